"""Custom schedules in files: a function (FILE.py:NAME) or a plan in torch's CSV format (FILE.csv).

    fn = find("mine.py:zigzag", registered)       # the function zigzag in mine.py
    plan_of("mine.py:zigzag", fn, 4, 8)           # zigzag(4, 8), checked
    read_csv("mine.csv")                          # the plan in the file

Every error names the file and the problem; if the function raises, the error also names the line.
"""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from types import ModuleType
from typing import cast

from threed.core.messages import counted
from threed.core.source import load
from threed.schedules.action import COMPUTE
from threed.schedules.deadlock_check import validate
from threed.schedules.plan import Plan, SizesError
from threed.schedules.torch_csv import from_csv

Function = Callable[..., Plan]


def read_csv(file: str) -> Plan:
    """Returns the plan in a CSV file.

    Raises:
        ValueError: the file is missing or invalid; the message names the row and the cell.
    """
    path = Path(file)
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ValueError(
            f"{file}: it is not a regular file, but a pipe or a device that may never end"
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not text: {error}") from None
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror or error}") from None
    return from_csv(text, file)


def find(name: str, registered: Callable[[], Mapping[str, Function]]) -> Function:
    """Returns the function of FILE.py:NAME.

    NAME is the name of a schedule that the file registers, or of a function in the file. If there
    are both, the registered schedule is used.

    Args:
        name: FILE.py:NAME.
        registered: returns the functions of all registered schedules by name. It is called after
            the file is imported, because the import may register schedules.

    Raises:
        ValueError: the file has no such function; the message lists the functions in the file.
    """
    file, _, function = (name + ":" * name.endswith(".py")).rpartition(":")
    module = load(file)
    own = {key: fn for key, fn in registered().items() if _comes_from(fn, module)}
    value = own.get(function, getattr(module, function, None))
    if callable(value) and not inspect.isclass(value):
        return cast(Function, value if isinstance(value, Hashable) else value.__call__)
    functions = {
        key
        for key, fn in vars(module).items()
        if inspect.isfunction(fn) and _comes_from(fn, module)
    }
    names = ", ".join(sorted(own.keys() | {key for key in functions if not key.startswith("_")}))
    what = f"there is no function {function!r} in it" if function else f"write {file}:FUNCTION"
    raise ValueError(f"{name}: {what}; its functions are {names or 'none'}")


def _comes_from(fn: Function, module: ModuleType) -> bool:
    """Returns whether a module defines a function, or imports it from outside threed."""
    if getattr(fn, "__globals__", None) is vars(module):
        return True
    built_in = str(getattr(fn, "__module__", "")).startswith("threed.")
    return not built_in and any(fn is value for value in vars(module).values())


def plan_of(
    name: str, fn: Function | None, stages: int, microbatches: int, chunks: int | None = None
) -> Plan:
    """Returns the plan of FILE.csv, or the plan that FILE.py:NAME builds for these sizes.

    The plan of a function is cached for each combination of sizes. So even if a function returns
    random plans, its plan stays the same during a run.

    Args:
        name: FILE.csv or FILE.py:NAME.
        fn: the function; None for a CSV file.
        stages: number of pipeline ranks.
        microbatches: number of micro-batches per step.
        chunks: chunks per rank; None accepts any number of chunks in the plan.

    Raises:
        SizesError: the sizes of the plan differ from the arguments.
        ValueError: the plan is invalid, deadlocks, or has no backward.
    """
    plan = read_csv(name) if fn is None else _call(name, fn, stages, microbatches, chunks)
    if (plan.stages, plan.microbatches) != (stages, microbatches):
        found = f"{counted(plan.stages, 'stage')} and {counted(plan.microbatches, 'micro-batch')}"
        problem = (
            f"{name}: a plan for {found}, but the run needs one for {stages} and {microbatches}"
        )
        raise SizesError(problem, stages=plan.stages, microbatches=plan.microbatches)
    if chunks not in (None, plan.chunks):
        problem = f"{name}: a plan of {counted(plan.chunks, 'chunk')}, not {chunks}"
        raise SizesError(problem, chunks=plan.chunks)
    return plan


@functools.lru_cache(maxsize=64)
def _call(name: str, fn: Function, stages: int, microbatches: int, chunks: int | None) -> Plan:
    arguments: tuple[int, ...] = (stages, microbatches)
    if chunks is not None and _accepts(fn, 3):
        arguments += (chunks,)
    if not _accepts(fn, len(arguments)):
        fix = (
            "it needs a number of chunks: give one, such as --parallel.chunks 2"
            if _accepts(fn, 3)
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
    except Exception as error:  # wrong values in the plan can cause any exception
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"{name}{arguments}: {kind}{error}") from error
    return plan


def _accepts(fn: Function, count: int) -> bool:
    try:
        inspect.signature(fn).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # some C functions have no signature
        return True
    return True


def _check(plan: object) -> None:
    if not isinstance(plan, Plan):
        raise ValueError(f"it returns {_kind(plan)}, not a threed.schedules.Plan")
    validate(plan)
    for rank, actions in enumerate(plan.ranks):
        for action in actions:
            if action.kind not in COMPUTE:
                where = f"plan {plan.name}: rank {rank}: {action}"
                raise ValueError(f"{where}: use compute actions only; communication is added later")
    if plan.forward_only:
        raise ValueError(f"plan {plan.name} has no backward: nothing would be trained")


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
