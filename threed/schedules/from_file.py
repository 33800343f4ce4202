"""Schedules in files of one's own: a function (FILE.py:NAME) or a plan as torch's CSV text (FILE.csv).

    plan_of("mine.py:zigzag", stages=4, microbatches=8)      zigzag(4, 8) of mine.py, checked
    read_csv("mine.csv")                                     for the ranks and micro-batches that its rows have

Every error names the file, what in it is wrong, and for a function that raises the line.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from types import ModuleType
from typing import cast

from threed.schedules.action import COMPUTE
from threed.schedules.plan import Plan, SizesError
from threed.schedules.rendezvous import validate
from threed.schedules.torch_csv import from_csv

Function = Callable[..., Plan]


def read_csv(file: str) -> Plan:
    """The plan that a CSV file holds. Raises ValueError for one that is not there, or holds none."""
    path = Path(file)
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ValueError(f"{file}: it is no file, but a pipe or a device, which may have no end")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not text: {error}") from None
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror or error}") from None
    return from_csv(text, file)


def load(file: str) -> ModuleType:
    """The module that a file is, its folder on the path for the modules beside it. ValueError where that fails."""
    path = Path(file).resolve()
    name = f"threed_user_{path.stem}"
    if name in sys.modules and sys.modules[name].__file__ == str(path):
        return sys.modules[name]
    if not path.is_file():
        raise ValueError(f"{file}: no such file")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{file}: no Python file")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        hint = (
            "; guard what runs with `if __name__ == '__main__':`"
            if isinstance(error, SystemExit)
            else ""
        )
        raise ValueError(
            f"{file} cannot be imported: {type(error).__name__}: {error}{hint}"
        ) from error
    return module


def find(name: str, registered: Callable[[], Mapping[str, Function]]) -> Function:
    """The function that FILE.py:NAME means: the file's own, or what the file registers under that name.

    registered: gives the functions of all schedules that have names, once the file is imported. Raises ValueError
    listing what the file has.
    """
    file, _, wanted = (name + ":" * name.endswith(".py")).rpartition(":")
    module = load(file)
    own = {key: fn for key, fn in registered().items() if _comes_from(fn, module)}
    value = own.get(wanted, getattr(module, wanted, None))
    if callable(value) and not inspect.isclass(value):
        return cast(Function, value if isinstance(value, Hashable) else value.__call__)
    functions = {
        key
        for key, fn in vars(module).items()
        if inspect.isfunction(fn) and _comes_from(fn, module)
    }
    names = ", ".join(sorted(own.keys() | {key for key in functions if not key.startswith("_")}))
    what = f"there is no function {wanted!r} in it" if wanted else f"write {file}:FUNCTION"
    raise ValueError(f"{name}: {what}; its functions are {names or 'none'}")


def _comes_from(fn: Function, module: ModuleType) -> bool:
    """Whether a function was written in a user's module, or came into it from another one that is not ours."""
    if getattr(fn, "__globals__", None) is vars(module):
        return True
    ours = str(getattr(fn, "__module__", "")).startswith("threed.")
    return not ours and any(fn is value for value in vars(module).values())


def plan_of(
    name: str, fn: Function | None, stages: int, microbatches: int, chunks: int | None = None
) -> Plan:
    """The plan of FILE.csv, or that `fn` of FILE.py:NAME gives, for these numbers; chunks None: as it likes.

    A function is called once for the same numbers in a process: one that draws at random still has one plan for a run.
    Raises ValueError for a plan that is not legal, stalls, trains nothing, or is for other numbers.
    """
    plan = read_csv(name) if fn is None else _call(name, fn, stages, microbatches, chunks)
    if (plan.stages, plan.microbatches) != (stages, microbatches):
        found = f"{plan.stages} stages and {plan.microbatches} micro-batches"
        problem = f"{name}: a plan for {found}, and needed is one for {stages} and {microbatches}"
        raise SizesError(problem, stages=plan.stages, microbatches=plan.microbatches)
    if chunks not in (None, plan.chunks):
        problem = f"{name}: a plan of {plan.chunks} chunks, not {chunks}"
        raise SizesError(problem, chunks=plan.chunks)
    return plan


@functools.lru_cache(maxsize=64)
def _call(name: str, fn: Function, stages: int, microbatches: int, chunks: int | None) -> Plan:
    arguments = (
        (stages, microbatches)
        if chunks is None or not _takes(fn, 3)
        else (stages, microbatches, chunks)
    )
    if not _takes(fn, len(arguments)):
        fix = (
            "it needs a number of chunks: give one, such as --parallel.chunks 2"
            if _takes(fn, 3)
            else "it must take (stages, microbatches)"
        )
        raise ValueError(f"{name}{inspect.signature(fn)}: {fix}")
    try:
        plan = fn(*arguments)
    except (Exception, SystemExit) as error:
        line = traceback.extract_tb(error.__traceback__)[-1]
        place = f"line {line.lineno} of {Path(line.filename).name}"
        raise ValueError(
            f"{name}{arguments}: {type(error).__name__} at {place}: {error}"
        ) from error
    try:
        _check(plan)
    except (
        Exception
    ) as error:  # a plan of anything: not all that is wrong with it has a word of its own
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"{name}{arguments}: {kind}{error}") from error
    return plan


def _takes(fn: Function, count: int) -> bool:
    try:
        inspect.signature(fn).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # it has no signature, as some of those written in C
        return True
    return True


def _check(plan: object) -> None:
    if not isinstance(plan, Plan):
        raise ValueError(f"it gives {_kind(plan)}, not a threed.schedules.Plan")
    validate(plan)
    for rank, actions in enumerate(plan.ranks):
        for action in actions:
            if action.kind not in COMPUTE:
                where = f"plan {plan.name}: rank {rank}: {action}"
                raise ValueError(
                    f"{where}: give compute actions only, communication is added to them"
                )
    if plan.forward_only:
        raise ValueError(f"plan {plan.name} has no backward: nothing would be trained")


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
