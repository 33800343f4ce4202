"""The schedules by name: built-in and registered ones, and files with a custom schedule.

    plan = build("1f1b", stages=4, microbatches=8)
    own_chunks("zb-v")          # 2: zb-v has two chunks per rank
    is_asynchronous("2bw")      # True: the steps of 2bw overlap

A name is one of `available()`, FILE.py:FUNCTION or FILE.csv.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from threed.core.messages import counted
from threed.schedules import from_file
from threed.schedules.all_forward_all_backward import gpipe
from threed.schedules.bidirectional import chimera, dualpipe, dualpipev
from threed.schedules.double_buffered import two_bw
from threed.schedules.from_file import read_csv
from threed.schedules.one_forward_one_backward import interleaved, one_f_one_b
from threed.schedules.plan import Plan, SizesError
from threed.schedules.plan_checks import legal
from threed.schedules.simulation import Costs
from threed.schedules.v_shape import v_half, v_min, zb_v
from threed.schedules.zero_bubble import zb_h1, zb_h2
from threed.schedules.zero_bubble_search import planned

ScheduleName = Literal[
    "1f1b", "gpipe", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "zb-auto", "chimera", "dualpipe",
    "dualpipev", "2bw",
]  # fmt: skip
"""The built-in schedule names. A configuration may also use registered names and files."""


_Function = TypeVar("_Function", bound=Callable[..., Plan])


class _Entry(NamedTuple):
    fn: Callable[..., Plan]
    chunks: int | None
    by_times: bool = False  # whether `fn` also takes `costs` and `limit`
    asynchronous: bool = False


# After import only `register` changes this table. A name is known only in the process that has
# registered it.
_SCHEDULES = {
    "gpipe": _Entry(gpipe, 1),
    "1f1b": _Entry(one_f_one_b, 1),
    "interleaved": _Entry(interleaved, None),
    "zb-h1": _Entry(zb_h1, 1),
    "zb-h2": _Entry(zb_h2, 1),
    "zb-v": _Entry(zb_v, 2),
    "v-half": _Entry(v_half, 2),
    "v-min": _Entry(v_min, 2),
    "zb-auto": _Entry(planned, None, by_times=True),
    "chimera": _Entry(chimera, 2),
    "dualpipe": _Entry(dualpipe, 2),
    "dualpipev": _Entry(dualpipev, 2),
    "2bw": _Entry(two_bw, 1, asynchronous=True),
}


def available() -> tuple[str, ...]:
    """Returns the schedule names that `build` accepts, including registered ones."""
    return tuple(_SCHEDULES)


def names_file(name: str) -> bool:
    """Returns whether a name has the form FILE.py, FILE.py:FUNCTION or FILE.csv.

    It does not check that the file exists.
    """
    return name.endswith((".csv", ".py")) or ".py:" in name


def absolute(name: str) -> str:
    """Returns a schedule's name that is valid in any working directory.

    The path of a file becomes absolute; the name of a registered schedule does not change.
    """
    return str(Path(name).absolute()) if names_file(name) else name


def own_chunks(name: str, stages: int | None = None, microbatches: int | None = None) -> int | None:
    """Returns a schedule's default number of chunks per rank.

    For a CSV file, this is the number in the file. For a registered function, it is the argument
    `chunks` of `register`. If this argument was None, it is the default value of the function's
    third parameter. If neither defines the number, the plan for `stages` and `microbatches` is
    built, and the result is the plan's number.

    Args:
        name: name of a schedule, FILE.py:FUNCTION or FILE.csv.
        stages: number of pipeline ranks; None if not known.
        microbatches: number of micro-batches per step; None if not known.

    Returns:
        Chunks per rank; 1 if the name is unknown. If only a plan defines the number, but `stages`
        or `microbatches` is not known: None.

    Raises:
        ValueError: the schedule's file or plan is invalid.
    """
    if name not in _SCHEDULES and not names_file(name):
        return 1
    entry = _entry(name)
    chunks = entry.chunks or _default_chunks(entry.fn)
    if chunks is None and stages is not None and microbatches is not None:
        return build(name, stages, microbatches).chunks
    return chunks


def _default_chunks(fn: Callable[..., Plan]) -> int | None:
    """Returns the default value of the third parameter of `fn`; None if it is not an integer."""
    third = list(inspect.signature(fn).parameters.values())[2:3]
    return next(
        (parameter.default for parameter in third if isinstance(parameter.default, int)), None
    )


def chunks_are_free(name: str) -> bool:
    """Returns whether a registered schedule lets the caller of `build` choose `chunks`."""
    return name in _SCHEDULES and _SCHEDULES[name].chunks is None


def plans_by_times(name: str) -> bool:
    """Returns whether a schedule searches for the plan that is best for given times.

    `build` accepts `costs` and `limit` only for such a schedule.
    """
    return name in _SCHEDULES and _SCHEDULES[name].by_times


def is_asynchronous(name: str) -> bool:
    """Returns whether the steps of a schedule overlap, which requires two weight versions."""
    return name in _SCHEDULES and _SCHEDULES[name].asynchronous


def register(name: str, fn: Callable[..., Plan], chunks: int | None = 1) -> None:
    """Makes a schedule available by name.

    Args:
        name: the name for `build` and `--parallel.schedule`.
        fn: `fn(stages, microbatches)` returns the plan. If the caller of `build` chooses the
            number of chunks, `fn(stages, microbatches, chunks)` is called instead.
        chunks: chunks per rank in the plans of `fn`; None if the caller of `build` may choose.

    Raises:
        ValueError: another function is registered under this name. Importing the same file again
            is allowed.
    """
    if name in _SCHEDULES and not _is_again(_SCHEDULES[name].fn, fn):
        raise ValueError(f"schedule {name!r} exists already: register yours under another name")
    _SCHEDULES[name] = _Entry(fn, chunks)


def schedule(name: str, chunks: int | None = 1) -> Callable[[_Function], _Function]:
    """Returns a decorator that registers a function and returns the function unchanged.

    Args:
        name: as in `register`.
        chunks: as in `register`.
    """

    def decorate(fn: _Function) -> _Function:
        register(name, fn, chunks)
        return fn

    return decorate


def _is_again(old: Callable[..., Plan], new: Callable[..., Plan]) -> bool:
    """Returns whether two function objects come from one function in a file imported twice."""
    names = {getattr(fn, "__qualname__", None) for fn in (old, new)}
    files = {getattr(getattr(fn, "__code__", None), "co_filename", None) for fn in (old, new)}
    return (
        len(names) == len(files) == 1 and None not in names | files and "<lambda>" not in str(names)
    )


def build(
    name: str, stages: int, microbatches: int, chunks: int | None = None,
    costs: Costs | None = None, limit: float | None = None,
) -> Plan:  # fmt: skip
    """Returns the plan of a schedule, after checking it. The plan has only compute actions.

    Args:
        name: one of `available()`, FILE.py:function or FILE.csv.
        stages: number of pipeline ranks.
        microbatches: number of micro-batches per step.
        chunks: model stages per rank; None: the schedule's default.
        costs: times of the stages. Allowed only for a schedule that is planned by times: zb-auto.
        limit: upper limit of the live activations per rank, in micro-batches (see
            `Timeline.peak_activations`). It has an effect only if it is below the schedule's
            default limit. Allowed only for zb-auto.

    Raises:
        SizesError: the schedule has no plan for these sizes.
        ValueError: the name is unknown, or the plan is invalid.
    """
    entry = _entry(name)
    if min(stages, microbatches) < 1:
        raise ValueError(
            f"schedule {name}: {counted(stages, 'stage')} and {counted(microbatches, 'micro-batch')}:"
            " both must be at least 1"
        )
    if entry.chunks is not None and chunks not in (None, entry.chunks):
        problem = f"schedule {name}: chunks is {chunks}; this schedule has {entry.chunks}"
        raise SizesError(problem, chunks=entry.chunks)
    if (costs, limit) != (None, None) and not entry.by_times:
        raise ValueError(f"schedule {name}: it does not plan by times: leave costs and limit out")
    chosen = () if chunks is None or entry.chunks is not None else (chunks,)
    times = {"costs": costs, "limit": limit} if entry.by_times else {}
    plan = entry.fn(stages, microbatches, *chosen, **times)
    legal(plan)
    if plan.asynchronous and not entry.asynchronous:
        raise ValueError(
            f"schedule {name}: its plan leaves micro-batches to the next step, which only 2bw may"
        )
    return plan


def build_some(name: str, stages: int, chunks: int | None = None) -> Plan | None:
    """Returns a plan of a schedule, for checks that do not depend on the number of micro-batches.

    A registered schedule is built for 2 * stages micro-batches, and a CSV file for the number of
    micro-batches that it contains. If the name is FILE.py:function, this function returns None: it
    imports the file, but does not call the function in it. Raises the same errors as `build`.
    """
    if name.endswith(".csv"):
        return build(name, stages, read_csv(name).microbatches, chunks)
    _entry(name)
    return None if names_file(name) else build(name, stages, 2 * stages, chunks)


def _entry(name: str) -> _Entry:
    if name in _SCHEDULES:
        return _SCHEDULES[name]
    if names_file(name):
        return _entry_of_file(name)
    choices = f"available: {', '.join(_SCHEDULES)}"
    close = closest(name)
    hint = f"did you mean {close!r}? " if close else ""
    raise ValueError(f"there is no schedule {name!r}: {hint}{choices}")


def closest(name: str) -> str | None:
    """Returns the schedule name closest to a misspelled name (ZBH1, zb_h1), or None."""
    close = difflib.get_close_matches(name.lower().replace("_", "-"), _SCHEDULES, n=1, cutoff=0.5)
    return close[0] if close else None


def _entry_of_file(name: str) -> _Entry:
    if name.endswith(".csv"):
        return _Entry(partial(from_file.plan_of, name, None), read_csv(name).chunks)
    fn = from_file.find(name, lambda: {key: entry.fn for key, entry in _SCHEDULES.items()})
    chunks = next((entry.chunks for entry in _SCHEDULES.values() if entry.fn is fn), None)
    return _Entry(partial(from_file.plan_of, name, fn), chunks)
