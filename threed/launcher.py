"""Ranks of processes that srun or mpirun started, without torchrun.

    adopt()                  # sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT
    world = world_size()     # the same, and the number of ranks

What torchrun, or the user, has set counts: if RANK or WORLD_SIZE is there, nothing is changed. So torchrun may run in
each task of a Slurm step, and `WORLD_SIZE=1` starts independent processes in such a step. A shell of sbatch or salloc
is no step of several tasks: a process, or torchrun, started there is alone.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass

Variables = Mapping[str, str]
TORCHRUN = "start the processes with torchrun instead: torchrun --nnodes N --nproc-per-node M ... (docs/surviving.md)"


class LauncherError(ValueError):
    """Processes that a launcher started without what they need to find each other."""


@dataclass(frozen=True)
class Launcher:
    """The variables of a launcher: ranks in total, this rank, ranks of this machine, this rank among them.

    Args:
        command: for messages.
        variables: WORLD_SIZE, RANK, LOCAL_WORLD_SIZE and LOCAL_RANK by this launcher's names.
        exports: how the command passes a variable on, with {} for the variable.
        job: variables that are different for each start.
    """

    command: str
    variables: tuple[str, str, str, str]
    exports: str
    job: tuple[str, ...]


NAMES = ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK")
MPI = (
    Launcher(
        "mpirun (Open MPI)",
        tuple(f"OMPI_COMM_WORLD_{name}" for name in ("SIZE", "RANK", "LOCAL_SIZE", "LOCAL_RANK")),  # type: ignore[arg-type]
        "-x {}", ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    Launcher(
        "mpirun (MPICH or Intel MPI)", ("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"), "-genv {}", (),
    ),
)  # fmt: skip
SLURM = Launcher("srun", ("", "", "", ""), "--export=ALL,{}", ("SLURM_JOB_ID", "SLURM_STEP_ID"))


def adopt(environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets torchrun's variables from those of srun or mpirun, if they have started several processes.

    Raises:
        LauncherError: if the processes cannot find each other; it names the command to use.
    """
    if "RANK" in environment or "WORLD_SIZE" in environment:
        _check(environment)
        return
    launcher, numbers = _find(environment)
    if launcher is None or numbers.get("WORLD_SIZE") == 1:
        return
    started = f"{launcher.command} started {numbers['WORLD_SIZE']} processes"
    if missing := [name for name in NAMES if name not in numbers]:
        names = " and ".join(f"{name}=..." for name in missing)
        raise LauncherError(f"{started}, without a variable for {', '.join(missing)}: set {names}, or {TORCHRUN}")
    size, rank, local_size, local_rank = (numbers[name] for name in NAMES)
    if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
        raise LauncherError(f"{started}, and this one has rank {rank} ({local_rank} of {local_size} here): {TORCHRUN}")
    address = environment.get("MASTER_ADDR") or _address(launcher, environment, size == local_size)
    if address is None:
        export = launcher.exports.format("MASTER_ADDR=HOST")
        raise LauncherError(f"{started} on several machines: pass on the one of rank 0 with {export}, or {TORCHRUN}")
    _check_port(environment)
    environment.update({name: str(numbers[name]) for name in NAMES}, MASTER_ADDR=address)
    environment.setdefault("MASTER_PORT", str(_port(launcher, environment)))


def _check(environment: Variables) -> None:
    """Raises LauncherError if torchrun's variables contradict each other, or one of them is missing."""
    size = _whole(environment, "WORLD_SIZE") if "WORLD_SIZE" in environment else 1
    needed = ("RANK", "MASTER_ADDR", "MASTER_PORT") if size > 1 else ()
    if missing := [name for name in needed if not environment.get(name)]:
        raise LauncherError(f"WORLD_SIZE is {size}, without {', '.join(missing)}: unset WORLD_SIZE, or {TORCHRUN}")
    rank = _whole(environment, "RANK") if "RANK" in environment else 0
    if rank >= size:
        given = f"WORLD_SIZE={size}" if "WORLD_SIZE" in environment else "no WORLD_SIZE"
        raise LauncherError(f"RANK={rank} with {given}: unset RANK, or {TORCHRUN}")
    if size > 1:
        _check_port(environment)


def _check_port(environment: Variables) -> None:
    if "MASTER_PORT" in environment and not 0 < _whole(environment, "MASTER_PORT", "a port") < 1 << 16:
        raise LauncherError(f"MASTER_PORT={environment['MASTER_PORT']} is not a port: give one from 1 to 65535")


def world_size() -> int:
    """Returns the number of ranks that torchrun, srun or mpirun has started; see `adopt`."""
    adopt()
    return int(os.environ.get("WORLD_SIZE", "1"))


def _find(environment: Variables) -> tuple[Launcher | None, dict[str, int]]:
    """Returns the launcher of this process, and those of torchrun's numbers that its variables give.

    mpirun in a Slurm job starts its daemons with srun, whose variables are those of the daemons: so MPI comes first. A
    Slurm step with PMI has PMI_RANK and PMI_SIZE, but no local numbers of MPI.
    """
    mpi = [(launcher, dict(_numbers(environment, launcher.variables))) for launcher in MPI]
    mpi = [(launcher, numbers) for launcher, numbers in mpi if "WORLD_SIZE" in numbers]
    if complete := [both for both in mpi if len(both[1]) == len(NAMES)]:
        return complete[0]
    slurm = _slurm_numbers(environment)
    return (SLURM, slurm) if slurm else next(iter(mpi), (None, {}))


def _numbers(environment: Variables, variables: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    """Yields the numbers by these variables; local ones may be given by torchrun's names."""
    for name, variable in zip(NAMES, variables, strict=True):
        if found := next((one for one in (variable, name) if one in environment), ""):
            yield name, _whole(environment, found)


def _whole(environment: Variables, variable: str, what: str = "a number of processes") -> int:
    if not environment[variable].isdecimal():
        raise LauncherError(f"{variable}={environment[variable]!r} is not {what}: {TORCHRUN}")
    return int(environment[variable])


def without_srun(environment: Variables = os.environ) -> str:
    """Returns a note on a process that is alone in a Slurm job of several tasks, as in a shell of sbatch; else ""."""
    tasks = environment.get("SLURM_NTASKS", "1")
    if tasks == "1" or "SLURM_STEP_NUM_TASKS" in environment or "WORLD_SIZE" in environment:
        return ""
    return f"SLURM_NTASKS is {tasks}, and srun did not start this process: it is alone; srun or torchrun start several"


def _slurm_numbers(environment: Variables) -> dict[str, int]:
    """The numbers of a Slurm step. In a shell of sbatch there is none: SLURM_NTASKS is what the job asked for, and
    SLURM_PROCID is 0."""
    names = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "", "SLURM_LOCALID")
    found = dict(_numbers(environment, names))
    if "WORLD_SIZE" not in found:
        if found.get("RANK"):
            raise LauncherError(
                f"SLURM_PROCID is {found['RANK']} without SLURM_STEP_NUM_TASKS: use srun, or {TORCHRUN}"
            )
        return {}
    here = _tasks_here(environment, found["WORLD_SIZE"])
    return found if here is None else {**found, "LOCAL_WORLD_SIZE": here}


def _tasks_here(environment: Variables, size: int) -> int | None:
    """Tasks on this machine: the entry of SLURM_NODEID in a list such as 2(x3),1; all without such a list. None if the
    variables do not show it."""
    names = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    text = next((environment[name] for name in names if name in environment), None)
    if text is None:
        return size if _nodes(environment) in (None, 1) else None
    counts: list[int] = []
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(tasks)] * int(times or 1)
    if sum(counts) != size or ("SLURM_NODEID" not in environment and len(counts) > 1):
        return None
    node = _whole(environment, "SLURM_NODEID", "the number of a machine") if "SLURM_NODEID" in environment else 0
    return counts[node] if node < len(counts) else None


def _nodes(environment: Variables) -> int | None:
    names = ("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
    return next((_whole(environment, name) for name in names if name in environment), None)


def _address(launcher: Launcher, environment: Variables, one_machine: bool) -> str | None:
    """The machine of rank 0, as far as it is known: the first of Slurm's list such as node[01-03,07],other."""
    if one_machine:
        return "127.0.0.1"
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    nodes = next((environment[name] for name in names if name in environment), None)
    if launcher is not SLURM or nodes is None:
        return None
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return None if first is None else re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group())


def _port(launcher: Launcher, environment: Variables) -> int:
    """A port that all ranks of a start find: from 10000 to 29999, below those that systems hand out."""
    job = ".".join(environment.get(name, "") for name in launcher.job)
    return 10000 + zlib.crc32(job.encode()) % 20000
