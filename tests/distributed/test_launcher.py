"""Processes that srun or mpirun started: their ranks, and what is refused. Variables of torchrun count first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.programs import Program, printed
from threed.distributed.launcher import LauncherError, adopt, without_srun

Variables = dict[str, str]
ROOT = Path(__file__).parents[2]
LAUNCHERS = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "MPI_", "MASTER_", "TORCHELASTIC_")
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")


def slurm(
    rank: int,
    *,
    local: int,
    node: int = 0,
    size: int = 6,
    tasks: str = "4,2",
    nodes: str = "n[07-08]",
) -> Variables:
    return {
        "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_NTASKS": str(size), "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local), "SLURM_NODEID": str(node),
        "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_STEP_NODELIST": nodes, "SLURM_STEP_NUM_NODES": "2",
    }  # fmt: skip


def openmpi(rank: int, size: int = 4, local: int = 0, here: int = 4) -> Variables:
    names = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local, "LOCAL_SIZE": here}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in names.items()}


def hydra(rank: int, size: int = 4, local: int = 0, here: int = 4) -> Variables:
    names = {"PMI_RANK": rank, "PMI_SIZE": size, "MPI_LOCALRANKID": local, "MPI_LOCALNRANKS": here}
    return {name: str(value) for name, value in names.items()}


SBATCH = {
    "SLURM_JOB_ID": "77",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
INTERACTIVE = {
    **SBATCH,
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NUM_TASKS": "1",
}  # a shell of salloc
CASES: dict[str, tuple[Variables, tuple[object, ...]]] = {
    "srun": (slurm(3, local=3), (3, 6, 3, 4, "n07")),
    "srun, second machine": (slurm(5, local=1, node=1), (5, 6, 1, 2, "n07")),
    "srun, repeated counts": (slurm(7, local=1, node=2, size=9, tasks="3(x2),2,1"), (7, 9, 1, 2, "n07")),
    "srun, names": (slurm(0, local=0, nodes="gpu-a,gpu-b"), (0, 6, 0, 4, "gpu-a")),
    "srun, names with two brackets": (slurm(0, local=0, nodes="r[1,3]n[02-05,9],x"), (0, 6, 0, 4, "r1n02")),
    "srun, one machine": (slurm(1, local=1, size=2, tasks="2", nodes="n07"), (1, 2, 1, 2, "127.0.0.1")),
    "srun, few variables": (
        {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}, (1, 2, 1, 2, "127.0.0.1"),
    ),
    "srun with PMI": ({**slurm(3, local=3), "PMI_RANK": "3", "PMI_SIZE": "6"}, (3, 6, 3, 4, "n07")),
    "srun, address given": ({**slurm(3, local=3), "MASTER_ADDR": "10.0.0.1"}, (3, 6, 3, 4, "10.0.0.1")),
    "mpirun": (openmpi(1, local=1), (1, 4, 1, 4, "127.0.0.1")),
    "mpirun in a Slurm job": (
        {**openmpi(1, local=1), **slurm(0, local=0, size=2, tasks="1,1")}, (1, 4, 1, 4, "127.0.0.1"),
    ),
    "mpirun, two machines": (
        {**openmpi(3, local=1, here=2), "MASTER_ADDR": "10.0.0.1"}, (3, 4, 1, 2, "10.0.0.1"),
    ),
    "PMI, local ranks given": (
        {"PMI_RANK": "1", "PMI_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, (1, 2, 1, 2, "127.0.0.1"),
    ),
    "mpiexec": (hydra(2, local=2), (2, 4, 2, 4, "127.0.0.1")),
    "mpiexec in a Slurm job": (
        {**hydra(2, local=2), **slurm(0, local=0, size=2, tasks="1,1")}, (2, 4, 2, 4, "127.0.0.1"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_ranks_are_those_of_the_launcher(name: str) -> None:
    given, expected = CASES[name]
    found = dict(given)
    adopt(found)
    assert tuple(found[name] for name in NAMES) == tuple(str(value) for value in expected)
    assert 10000 <= int(found["MASTER_PORT"]) < 30000
    again = dict(found)
    adopt(again)
    assert again == found


def test_ranks_of_a_start_have_one_port_and_steps_of_a_job_have_others() -> None:
    ports = []
    for rank, step in ((0, "0"), (1, "0"), (0, "1")):
        found = {**slurm(rank, local=rank), "SLURM_STEP_ID": step}
        adopt(found)
        ports.append(found["MASTER_PORT"])
    assert ports[0] == ports[1] != ports[2]


@pytest.mark.parametrize(
    "given",
    [
        {}, SBATCH, INTERACTIVE, {**slurm(0, local=0, size=1, tasks="1")}, openmpi(0, size=1, here=1),
        {**openmpi(1), "WORLD_SIZE": "1"}, {**hydra(1), "RANK": "0"},
        {**slurm(1, local=1), "RANK": "5", "WORLD_SIZE": "16", "MASTER_ADDR": "n", "MASTER_PORT": "29500"},
    ],
)  # fmt: skip
def test_one_process_and_torchruns_are_left_alone(given: Variables) -> None:
    found = dict(given)
    adopt(found)
    assert found == given


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            openmpi(3, local=1, here=2),
            ["mpirun (Open MPI) started 4", "several machines", "-x MASTER_ADDR=HOST"],
        ),
        (hydra(3, local=1, here=2), ["mpirun (MPICH or Intel MPI)", "-genv MASTER_ADDR=HOST"]),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2"},
            ["started 2 processes", "LOCAL_WORLD_SIZE, LOCAL_RANK", "torchrun"],
        ),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, ["SLURM_PROCID is 1", "srun", "torchrun"]),
        (
            {**slurm(1, local=1), "SLURM_STEP_TASKS_PER_NODE": "1"},
            ["srun started 6", "LOCAL_WORLD_SIZE"],
        ),
        (slurm(1, local=1, size=2, tasks="1,1"), ["srun started 2", "rank 1 (1 of 1 here)"]),
        ({**slurm(1, local=1), "SLURM_NODEID": "x"}, ["SLURM_NODEID='x'", "torchrun"]),
        (
            {
                name: value
                for name, value in slurm(5, local=1, node=1).items()
                if name != "SLURM_NODEID"
            },
            ["srun started 6", "LOCAL_WORLD_SIZE"],
        ),
        ({**slurm(1, local=1), "MASTER_PORT": "70000"}, ["MASTER_PORT=70000 is not a port"]),
        ({"WORLD_SIZE": "four"}, ["WORLD_SIZE='four'", "torchrun"]),
        ({"WORLD_SIZE": ""}, ["WORLD_SIZE=''", "torchrun"]),
        (
            {"WORLD_SIZE": "4"},
            ["WORLD_SIZE is 4, without RANK, MASTER_ADDR, MASTER_PORT", "unset WORLD_SIZE"],
        ),
        (
            {"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "n", "MASTER_PORT": "1"},
            ["RANK=2 with WORLD_SIZE=2"],
        ),
        ({"RANK": "1"}, ["RANK=1 with no WORLD_SIZE", "unset RANK"]),
        (
            {**openmpi(1), "OMPI_COMM_WORLD_SIZE": "many"},
            ["OMPI_COMM_WORLD_SIZE='many'", "torchrun"],
        ),
    ],
)
def test_processes_that_cannot_find_each_other_are_refused(
    given: Variables, words: list[str]
) -> None:
    found = dict(given)
    with pytest.raises(LauncherError) as refused:
        adopt(found)
    assert all(word in str(refused.value) for word in words), refused.value
    assert found == given


def test_a_process_alone_in_a_job_of_several_tasks_gets_a_note() -> None:
    assert "SLURM_NTASKS is 8" in without_srun(SBATCH)
    for given in ({}, INTERACTIVE, slurm(1, local=1), {**SBATCH, "WORLD_SIZE": "8"}):
        assert without_srun(given) == ""


# --------------------------------------------------------------------------------------------------- real processes


def variables(folder: Path) -> Variables:
    """The variables of every started process: without those of launchers."""
    clean = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(LAUNCHERS) and key not in NAMES
    }
    return clean | {
        "PYTHONPATH": str(ROOT),
        "THREED_CACHE": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
    }


def together(
    words: Sequence[str], folder: Path, several: Sequence[Variables]
) -> list[subprocess.CompletedProcess[str]]:
    """Starts a process with each of these variables, as a launcher does; what each printed."""
    clean, logs = variables(folder), [folder / f"{number}.log" for number in range(len(several))]
    programs = [
        Program(words, folder, {**clean, **own}, log, log)
        for own, log in zip(several, logs, strict=True)
    ]
    return [
        subprocess.CompletedProcess(program.args, program.wait(120), log.read_text())
        for program, log in zip(programs, logs, strict=True)
    ]


PROGRAM = """
import torch, threed
from threed.distributed import collectives
topology = threed.Topology()
print(topology.rank, topology.world, collectives.exchange(topology.rank, topology.axis("world")), flush=True)
collectives.barrier(topology.axis("world"))
"""


def test_a_program_under_mpirun_has_its_ranks(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    several = [
        {**openmpi(rank, 2, rank, 2), "PMIX_NAMESPACE": f"job-{os.getpid()}"} for rank in range(2)
    ]
    for rank, done in enumerate(together(["program.py"], tmp_path, several)):
        assert printed(done.stdout) == f"{rank} 2 [0, 1]\n"


def test_a_run_under_srun_is_one_run(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some text to learn from. " * 400)
    words = "-m threed train gpt --model.layers 1 --model.hidden 16 --model.heads 2 --model.seq 32 --data.path text.txt"
    words += " --train.global-batch 4 --train.steps 3 --train.sample-tokens 0 --log.wandb off --run.dir run"
    job = str(os.getpid())
    several = [
        slurm(rank, local=rank, size=2, tasks="2", nodes="n07") | {"SLURM_JOB_ID": job}
        for rank in range(2)
    ]
    first, second = together(words.split(), tmp_path, several)
    assert (first.returncode, second.returncode) == (0, 0), first.stdout + second.stdout
    assert "rate  " in first.stdout
    assert printed(second.stdout) == ""
    assert (tmp_path / "run" / "checkpoints" / "step-3" / "rank-00001.safetensors").is_file()


LATE = """
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>
#include <time.h>
extern "C" int pthread_mutex_lock(pthread_mutex_t* mutex) {
  static int (*real)(pthread_mutex_t*) = (int (*)(pthread_mutex_t*))dlsym(RTLD_NEXT, "pthread_mutex_lock");
  char name[16] = "";
  pthread_getname_np(pthread_self(), name, sizeof name);
  timespec first, now;
  clock_gettime(CLOCK_MONOTONIC, &first);
  if (!strncmp(name, "pt_gloo_runloop", 15)) do clock_gettime(CLOCK_MONOTONIC, &now);
    while ((now.tv_sec - first.tv_sec) * 1000 + (now.tv_nsec - first.tv_nsec) / 1000000 < 20);
  return real(mutex);
}
"""
LOOP = """
import json, os, sys
import torch, torch.distributed as dist, threed
for number, mine in enumerate(json.loads(sys.argv[1])):
    if not os.fork():
        break
else:
    codes = dict(os.wait() for _ in range(number + 1))
    sys.exit(str(sorted(map(os.waitstatus_to_exitcode, codes.values()))))
os.environ |= mine
threed.Topology()
groups = [dist.new_group([0, 1]) for _ in range(6)]
def reduce():
    works = [dist.all_reduce(torch.ones(1000), group=group, async_op=True) for group in groups]
    for work in works:
        work.wait()
reduce()
print("end", flush=True)
"""


@pytest.mark.parametrize("pairs", [2, pytest.param(6, marks=pytest.mark.grid)])
def test_a_program_that_just_ends_is_not_aborted(pairs: int, tmp_path: Path) -> None:
    """gloo's threads take 20 ms longer for each lock, so that they release tensors after the program's last line.

    LD_PRELOAD needs an interpreter, from which the ranks of all pairs are forked. Each of them ends as an
    interpreter does. Without the function that `Topology` registers, a process of 9 in 12 pairs ended with exit
    code -6.
    """
    (tmp_path / "late.cpp").write_text(LATE)
    late = tmp_path / "late.so"
    subprocess.run(["g++", "-shared", "-fPIC", "-o", late, tmp_path / "late.cpp"], check=True)
    (tmp_path / "loop.py").write_text(LOOP)
    ranks = [
        {**openmpi(rank, 2, rank, 2), "PMIX_NAMESPACE": f"late-{pair}-{os.getpid()}"}
        for pair in range(pairs)
        for rank in range(2)
    ]
    done = subprocess.run(
        [sys.executable, "loop.py", json.dumps(ranks)], cwd=tmp_path, capture_output=True, text=True,
        timeout=120, env={**variables(tmp_path), "LD_PRELOAD": str(late)},
    )  # fmt: skip
    assert done.stderr.splitlines()[-1] == str([0] * 2 * pairs), done.stderr
    assert printed(done.stdout) == "end\n" * 2 * pairs
