"""Runs Python programs in tests without starting an interpreter.

    done = run(["-m", "threed", "train", "gpt"], folder, environment)    # like subprocess.run([sys.executable, ...])
    program = Program(["train.py"], folder, environment, out, err)       # like subprocess.Popen([sys.executable, ...])

A new process that imports threed and torch takes 4 s of CPU time before its first statement. These
programs are forked from the parent of all ranks (`threed.testing.ranks`), which has imported both.
The programs that they start, such as the ranks of torchrun, are forked in turn. If they call
`run_ranks`, their ranks have the same parent, and its environment variables.

A program sees the given arguments, environment variables, folder, output files and `sys.path`, and
ends with the exit code, the traceback and the exit functions of an interpreter. Modules that the
parent has imported are not imported again. Tests of imports, of the installation, of libraries that
are preloaded, and of environment variables that are read during an import must start an interpreter.
"""

from __future__ import annotations

import atexit
import functools
import gc
import io
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import types
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from threed.testing.ranks import _context, preload
from threed.training import final_report

# If there is a process group, torch.testing.assert_close imports DTensor, which takes a second.
preload(
    "tests.configs", "pytest", "hypothesis", "torch.distributed.tensor", "threed.trainer", "einops", "tests.warm",
    "tests.programs", "torch.distributed.run", "matplotlib.backends.backend_svg", "matplotlib.figure",
)  # fmt: skip

# Environment variable of programs that draw no figures at the end of a run, which takes 0.3 s.
NO_FIGURES = "TESTS_NO_FIGURES"
# output files of the programs from which this one was forked; they would write their buffers when they are freed
_parents: list[Any] = []


class Program:
    """A running program in a session of its own, with the interface of `subprocess.Popen`.

    Args:
        words: what follows `python` on the command line: "-m" and a module, "-c" and code, or a
            script, with their arguments; before them, "-u" if output is not buffered.
        folder: working folder.
        environment: all environment variables.
        out: file to which the output is appended.
        err: the same for the error output; may be equal to `out`.
        first: code that runs before the program. If the program is torchrun, its ranks are forked
            with the modules that this code imports.
    """

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        out: Path,
        err: Path,
        first: str = "",
    ) -> None:
        self.args = [sys.executable, *words]
        forkserver.ensure_running()
        server = forkserver._forkserver._forkserver_address  # type: ignore[attr-defined]
        about = (list(words), str(folder), dict(environment), str(out), str(err), first, server)
        self._process = _context.Process(target=_begin, args=about)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(
    words: Sequence[str], folder: Path, environment: Mapping[str, str], timeout: float = 240, first: str = ""
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Runs a program to its end. The arguments are those of `Program`.

    Returns:
        The output and the exit code.

    Raises:
        subprocess.TimeoutExpired: if the program takes longer than `timeout` seconds; it is killed.
    """
    with tempfile.TemporaryDirectory() as place:
        out, err = Path(place, "out"), Path(place, "err")
        program = Program(words, folder, environment, out, err, first)
        try:
            code = program.wait(timeout)
        finally:
            program.kill()
            program.wait()
        return subprocess.CompletedProcess(program.args, code, output_of(out), output_of(err))


def output_of(file: Path) -> str:
    """Returns what a program has written to a file, without gloo's lines (`printed`)."""
    return printed(file.read_text())


def printed(output: str) -> str:
    """Returns the output of a program without the lines that gloo of torch 2.10 prints."""
    lines = output.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("[Gloo] Rank "))


def _begin(
    words: list[str], folder: str, environment: dict[str, str], out: str, err: str, first: str, server: str
) -> None:  # fmt: skip
    for descriptor, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(file, descriptor)
        os.close(file)
    os.setsid()  # a signal for this program's process group reaches no other program
    os.chdir(folder)
    # Ranks of `run_ranks` in this program are forked from the same parent, which is never started again.
    forkserver._forkserver._forkserver_address = server  # type: ignore[attr-defined]
    forkserver._forkserver.ensure_running = resource_tracker.ensure_running  # type: ignore[attr-defined]
    _become(words, environment, first)


class _Popen(subprocess.Popen[Any]):
    """Forks this process if the command is a Python program."""

    def __init__(self, args: Any, *others: Any, **options: Any) -> None:
        if not isinstance(args, str) and args[0] == sys.executable and not others:
            environment = {**(os.environ if options.get("env") is None else options["env"])}
            options["preexec_fn"] = functools.partial(_become_child, list(args[1:]), environment)
        super().__init__(args, *others, **options)


def _become_child(words: list[str], environment: dict[str, str]) -> NoReturn:
    """Runs a program in a process that was forked by `subprocess`, which has set descriptors 0 to 2."""
    kept = (2, forkserver._forkserver._forkserver_alive_fd, resource_tracker.getfd())  # type: ignore[attr-defined]
    for begin, end in zip(
        sorted(kept), (*sorted(kept)[1:], os.sysconf("SC_OPEN_MAX")), strict=True
    ):
        os.closerange(begin + 1, end)
    # The exit functions of the program that started this one would remove its temporary folders.
    atexit._clear()
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    atexit.register(util._exit_function)  # type: ignore[attr-defined]
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGINT}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    _become(words, environment)


def _become(words: list[str], environment: dict[str, str], first: str = "") -> NoReturn:
    """Runs a program, and ends this process as an interpreter would."""
    # Objects of the parent are never freed here: they may have descriptors that are now other files.
    gc.freeze()
    os.environ.clear()
    os.environ.update(environment)
    _parents.extend((sys.stdout, sys.stderr))
    unbuffered = words[0] == "-u" or bool(environment.get("PYTHONUNBUFFERED"))
    sys.stdout = _text(1, "strict", line_buffering=False, write_through=unbuffered)
    sys.stderr = _text(2, "backslashreplace", line_buffering=True, write_through=unbuffered)
    subprocess.Popen = subprocess_handler.Popen = _Popen  # type: ignore[misc]
    torch.set_num_threads(1)
    if NO_FIGURES in environment:
        final_report.draw = lambda *about: []
    code = 0
    try:
        exec(first, {})
        _run(words[1:] if words[0] == "-u" else words)
    except SystemExit as end:
        code = _code(end)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            code = -signal.SIGINT
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        if code < 0:
            os.kill(os.getpid(), -code)
        os._exit(code)


def _text(descriptor: int, errors: str, **buffering: bool) -> io.TextIOWrapper:
    file = open(descriptor, "wb", closefd=False)  # noqa: SIM115
    return io.TextIOWrapper(file, "utf-8", errors, **buffering)


def _code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    print(end.code, file=sys.stderr)
    return 1


def _run(words: list[str]) -> None:
    kind, paths = words[0], os.environ.get("PYTHONPATH", "").split(os.pathsep)
    own = {"-m": os.getcwd(), "-c": ""}.get(kind, str(Path(kind).parent))
    sys.path[:0] = [own, *filter(None, paths)]
    if kind == "-m":
        sys.argv = words[1:]
        sys.modules.pop(words[1], None)  # runpy warns about a module that was imported before
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = words
        runpy.run_path(kind, run_name="__main__")
