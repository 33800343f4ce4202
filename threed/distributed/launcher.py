"""Sets torchrun's variables under srun or mpirun, and ends a process when its launcher dies.

    ranks = join()           # the first call in every rank: adopt() and die_with_parent()
    adopt()                  # sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...
    world = world_size()     # calls adopt() and returns the number of ranks

If torchrun or the user has set RANK or WORLD_SIZE, no variable is changed. So torchrun can run in
each task of a Slurm step. If the user sets `WORLD_SIZE=1`, the tasks of a step are independent
processes. In the shell of sbatch or salloc, the number of tasks of the Slurm job is ignored, so a
process that is started in this shell without srun has world size 1. torchrun can also be started in
this shell.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import signal
import sys
import zlib
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from threed.core.messages import counted

Variables = Mapping[str, str]
TORCHRUN = (
    "start the processes with torchrun instead: "
    "torchrun --nnodes N --nproc-per-node M ... (docs/guide/fault_tolerance.md)"
)

_PR_SET_PDEATHSIG = 1  # value from linux/prctl.h


class LauncherError(ValueError):
    """Raised if a launcher's variables are not sufficient to connect its processes."""


@dataclass(frozen=True)
class Launcher:
    """A launcher, such as srun, and the environment variables that it sets.

    Attributes:
        command: name of the launcher in messages.
        variables: the launcher's names for WORLD_SIZE, RANK, LOCAL_WORLD_SIZE and LOCAL_RANK.
        exports: option of the launcher that sets an environment variable for all ranks, with {} in
            place of NAME=VALUE.
        job: names of the variables whose values identify a run.
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


@dataclass(frozen=True)
class Ranks:
    """The ranks of a job.

    Attributes:
        world: number of ranks.
        local_world: number of ranks on this machine; None if the launcher does not set it.
        machines: (minimum, maximum) number of machines of an elastic job; None for other jobs.
    """

    world: int
    local_world: int | None
    machines: tuple[int, int] | None


def join() -> Ranks:
    """Sets torchrun's variables (see `adopt`) and returns the ranks of the job.

    After this call, the process is killed when its launcher dies (see `die_with_parent`).
    """
    die_with_parent()
    world, local = world_size(), os.environ.get("LOCAL_WORLD_SIZE")
    return Ranks(world, None if local is None else int(local), machines_asked())


def die_with_parent() -> bool:
    """Asks the kernel to kill this process when its parent dies; returns whether the kernel agreed.

    The result is False on systems other than Linux.

    The signal is SIGKILL, because a rank without a launcher usually waits in a collective, in C++,
    where no Python handler runs. The last complete checkpoint stays valid, because a checkpoint is
    published by one rename.

    If the parent dies during this call, before the kernel has accepted the request, this process
    kills itself. The kernel regards the *thread* that forked as the parent, so launchers must fork
    from a thread that outlives the rank (prctl(2), PR_SET_PDEATHSIG).
    """
    if not sys.platform.startswith("linux"):
        return False
    expected = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0) != 0:
        return False
    if os.getppid() != expected:
        os.kill(os.getpid(), signal.SIGKILL)
    return True


def end_by_signal(number: int) -> None:
    """Ends this process by a signal, with the default handler.

    Args:
        number: signal number.
    """
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


@contextlib.contextmanager
def exits_on_broken_pipe() -> Iterator[None]:
    """Context manager that ends this process by SIGPIPE if the reader of its output has exited.

    In `command | head`, for example, `head` exits before the command has ended. Without the context
    manager Python would print an error.
    """
    try:
        try:
            yield
        except SystemExit:  # from argparse, after it has printed help or an error message
            _flush()
            raise
        _flush()
    except BrokenPipeError:  # the broken pipe may be stdout or another pipe
        if sys.stdout is not None:
            poll = select.poll()
            poll.register(sys.stdout, 0)
            if poll.poll(0):
                end_by_signal(signal.SIGPIPE)
        raise


def _flush() -> None:
    if sys.stdout is not None:  # None if the shell has closed it (`>&-`)
        sys.stdout.flush()


def adopt(environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets torchrun's variables if srun or mpirun has started several processes.

    Args:
        environment: environment variables, which are changed in place.

    Raises:
        LauncherError: if the processes cannot find each other. The message contains a command that
            works.
    """
    if "RANK" in environment or "WORLD_SIZE" in environment:
        _check(environment)
        return
    launcher, numbers = _find(environment)
    if launcher is None or numbers.get("WORLD_SIZE") == 1:
        return
    started = f"{launcher.command} started {counted(numbers['WORLD_SIZE'], 'process')}"
    if missing := [name for name in NAMES if name not in numbers]:
        names = " and ".join(f"{name}=..." for name in missing)
        raise LauncherError(
            f"{started}, without a variable for {', '.join(missing)}: set {names}, or {TORCHRUN}"
        )
    size, rank, local_size, local_rank = (numbers[name] for name in NAMES)
    if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
        raise LauncherError(
            f"{started}, and this one has rank {rank} ({local_rank} of {local_size} here): {TORCHRUN}"
        )
    address = environment.get("MASTER_ADDR") or _address(launcher, environment, size == local_size)
    if address is None:
        export = launcher.exports.format("MASTER_ADDR=HOST")
        raise LauncherError(
            f"{started} on several machines: name the one of rank 0 with {export}, or {TORCHRUN}"
        )
    _check_port(environment)
    environment.update({name: str(numbers[name]) for name in NAMES}, MASTER_ADDR=address)
    environment.setdefault("MASTER_PORT", str(_port(launcher, environment)))


def _check(environment: Variables) -> None:
    """Raises LauncherError if torchrun's variables are inconsistent or incomplete."""
    size = _whole(environment, "WORLD_SIZE") if "WORLD_SIZE" in environment else 1
    needed = ("RANK", "MASTER_ADDR", "MASTER_PORT") if size > 1 else ()
    if missing := [name for name in needed if not environment.get(name)]:
        raise LauncherError(
            f"WORLD_SIZE is {size}, without {', '.join(missing)}: unset WORLD_SIZE, or {TORCHRUN}"
        )
    rank = _whole(environment, "RANK") if "RANK" in environment else 0
    if rank >= size:
        given = f"WORLD_SIZE={size}" if "WORLD_SIZE" in environment else "no WORLD_SIZE"
        raise LauncherError(f"RANK={rank} with {given}: unset RANK, or {TORCHRUN}")
    if size > 1:
        _check_port(environment)


def _check_port(environment: Variables) -> None:
    if (
        "MASTER_PORT" in environment
        and not 0 < _whole(environment, "MASTER_PORT", "a port") < 1 << 16
    ):
        raise LauncherError(
            f"MASTER_PORT={environment['MASTER_PORT']} is not a port: give one from 1 to 65535"
        )


def world_size() -> int:
    """Returns the number of ranks that torchrun, srun or mpirun has started; see `adopt`."""
    adopt()
    return int(os.environ.get("WORLD_SIZE", "1"))


def machines_asked() -> tuple[int, int] | None:
    """Returns the minimum and maximum number of machines of an elastic job.

    They come from torchrun's option `--nnodes MIN:MAX` or from the variable PET_NNODES.

    Returns:
        (minimum, maximum); None if the number of machines is fixed or unknown.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    asked = os.environ.get("PET_NNODES", "")
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{os.getppid()}/cmdline").read_text()
        if found := re.search(r"\0--?nnodes[=\0]([^\0]*)", command):
            asked = found[1]
    limits = re.fullmatch(r"(\d+):(\d+)", asked)
    return None if limits is None else (int(limits[1]), int(limits[2]))


def _find(environment: Variables) -> tuple[Launcher | None, dict[str, int]]:
    """Returns the launcher of this process, and the values of the variables that it has set.

    The values are keyed by torchrun's names of the variables, such as RANK.

    MPI's variables have priority over Slurm's, because in a Slurm job mpirun starts daemons with
    srun, and Slurm's variables then describe the daemons. But if MPI's variables are incomplete,
    Slurm's have priority: a Slurm step with PMI has PMI_RANK and PMI_SIZE, but not MPI's local
    variables.
    """
    mpi = [(launcher, dict(_numbers(environment, launcher.variables))) for launcher in MPI]
    mpi = [(launcher, numbers) for launcher, numbers in mpi if "WORLD_SIZE" in numbers]
    if complete := [both for both in mpi if len(both[1]) == len(NAMES)]:
        return complete[0]
    slurm = _slurm_numbers(environment)
    return (SLURM, slurm) if slurm else next(iter(mpi), (None, {}))


def _numbers(environment: Variables, variables: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    """Yields (torchrun's name, value) for each of the launcher's variables that is set.

    A variable may also be set under torchrun's name; then the launcher's name has priority.

    Args:
        environment: environment variables.
        variables: the launcher's names, in the order of `NAMES`.
    """
    for name, variable in zip(NAMES, variables, strict=True):
        if found := next((one for one in (variable, name) if one in environment), ""):
            yield name, _whole(environment, found)


def _whole(environment: Variables, variable: str, what: str = "a number of processes") -> int:
    if not environment[variable].isdecimal():
        raise LauncherError(f"{variable}={environment[variable]!r} is not {what}: {TORCHRUN}")
    return int(environment[variable])


def without_srun(environment: Variables = os.environ) -> str:
    """Returns a note if this process runs alone in a Slurm job of several tasks, otherwise "".

    A process runs alone if neither srun nor torchrun has started it.
    """
    tasks = environment.get("SLURM_NTASKS", "1")
    if tasks == "1" or "SLURM_STEP_NUM_TASKS" in environment or "WORLD_SIZE" in environment:
        return ""
    return f"SLURM_NTASKS is {tasks}, but srun did not start this process, so it runs alone: use srun or torchrun"


def _slurm_numbers(environment: Variables) -> dict[str, int]:
    """Returns the values of a Slurm step's variables, keyed by torchrun's names.

    The result is empty in the shell of sbatch, which is not in a step: there SLURM_NTASKS is the
    number of tasks that the job requested, and SLURM_PROCID is 0.
    """
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
    """Returns the number of tasks on this machine, or None if it is unknown.

    Slurm lists the tasks of all machines in SLURM_STEP_TASKS_PER_NODE or SLURM_TASKS_PER_NODE, such
    as 2(x3),1 for four machines; SLURM_NODEID is the index of this machine. Without the list, the
    number is known only if there is one machine.

    Args:
        environment: environment variables.
        size: number of tasks on all machines.
    """
    text = _first(environment, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    if text is None:
        return size if _nodes(environment) in (None, 1) else None
    counts: list[int] = []
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(tasks)] * int(times or 1)
    if sum(counts) != size or ("SLURM_NODEID" not in environment and len(counts) > 1):
        return None
    node = _whole({"SLURM_NODEID": "0", **environment}, "SLURM_NODEID", "the number of a machine")
    return counts[node] if node < len(counts) else None


def _first(environment: Variables, *names: str) -> str | None:
    return next((environment[name] for name in names if name in environment), None)


def _nodes(environment: Variables) -> int | None:
    names = ("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
    return next((_whole(environment, name) for name in names if name in environment), None)


def _address(launcher: Launcher, environment: Variables, one_machine: bool) -> str | None:
    """Returns the address of the machine of rank 0, or None if it is unknown.

    For Slurm this is the first machine in the list of machines: node01 in node[01-03,07],other.
    """
    if one_machine:
        return "127.0.0.1"
    nodes = _first(environment, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    if launcher is not SLURM or nodes is None:
        return None
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return None if first is None else re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group())


def _port(launcher: Launcher, environment: Variables) -> int:
    """Returns a port from 10000 to 29999, the same on all ranks of a run.

    Ephemeral ports, which outgoing connections occupy, begin above this range.
    """
    job = ".".join(environment.get(name, "") for name in launcher.job)
    return 10000 + zlib.crc32(job.encode()) % 20000
