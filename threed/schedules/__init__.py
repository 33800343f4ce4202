"""Pipeline schedules as data: build a plan, check it, play it out, add its communication, draw it.

    plan = build("1f1b", stages=4, microbatches=8)      each rank's compute actions, checked
    simulate(plan, Costs(1, 1, 1))                      makespan, bubble, peak activations, messages
    lower(plan)                                         with sends, receives and reductions, for the executor
    svg(simulate(plan, Costs(1, 1, 1)).spans)           a Gantt chart; of measured times too

A schedule of your own is a function (stages, microbatches) -> Plan: `register("mine", fn)`, then use it by name.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

from threed.schedules import draw
from threed.schedules.action import Action, Kind, together
from threed.schedules.chimera import chimera
from threed.schedules.draw import svg
from threed.schedules.dualpipe import dualpipe, dualpipev
from threed.schedules.gpipe import forward_only, gpipe
from threed.schedules.interleaved import interleaved
from threed.schedules.legal import legal
from threed.schedules.lower import lower
from threed.schedules.one_f_one_b import one_f_one_b
from threed.schedules.plan import Plan
from threed.schedules.rendezvous import check_rendezvous, validate
from threed.schedules.simulate import Costs, Timeline, peak_activations, simulate, span_and_bubble
from threed.schedules.validation import time_between_steps

__all__ = [
    "NOT_YET", "Action", "Costs", "Kind", "Plan", "ScheduleName", "Timeline", "available", "build",
    "check_rendezvous", "chimera", "chunks_are_free", "draw", "dualpipe", "dualpipev", "forward_only", "gpipe",
    "interleaved", "legal", "lower", "one_f_one_b", "own_chunks",
    "peak_activations", "register", "simulate", "span_and_bubble", "svg", "time_between_steps",
    "together", "validate",
]  # fmt: skip

ScheduleName = Literal[
    "1f1b", "gpipe", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "zb-auto", "chimera", "dualpipe",
    "dualpipev", "2bw",
]  # fmt: skip
"""All names that a configuration may give; those that cannot be built so far are in NOT_YET."""


class _Entry(NamedTuple):
    fn: Callable[..., Plan]
    chunks: int | None


# The one thing here that changes after import, and only by `register`: names exist per process, like imported modules.
_SCHEDULES = {
    "gpipe": _Entry(gpipe, 1),
    "1f1b": _Entry(one_f_one_b, 1),
    "interleaved": _Entry(interleaved, None),
    "chimera": _Entry(chimera, 2),
    "dualpipe": _Entry(dualpipe, 2),
    "dualpipev": _Entry(dualpipev, 2),
}
NOT_YET = tuple(name for name in get_args(ScheduleName) if name not in _SCHEDULES)


def available() -> tuple[str, ...]:
    """The names that `build` knows, registered ones included."""
    return tuple(_SCHEDULES)


def own_chunks(name: str) -> int:
    """How many chunks a rank has under a schedule where nothing else is asked for; 1 of one that is not there."""
    entry = _SCHEDULES.get(name)
    if entry is None or entry.chunks is not None:
        return 1 if entry is None else entry.chunks or 1
    third = list(inspect.signature(entry.fn).parameters.values())[2:3]
    return next((parameter.default for parameter in third if isinstance(parameter.default, int)), 1)


def chunks_are_free(name: str) -> bool:
    """Whether whoever builds a schedule chooses how many chunks a rank has."""
    return name in _SCHEDULES and _SCHEDULES[name].chunks is None


def register(name: str, fn: Callable[..., Plan], chunks: int | None = 1) -> None:
    """Makes a schedule available by name.

    `fn(stages, microbatches)` gives a plan with `chunks` chunks a rank. With chunks=None whoever builds it may
    choose, and then it is `fn(stages, microbatches, chunks)`, or without the last for its own default. Raises
    ValueError if the name is taken.
    """
    if name in _SCHEDULES:
        raise ValueError(f"schedule {name!r} exists already: register yours under another name")
    _SCHEDULES[name] = _Entry(fn, chunks)


def build(name: str, stages: int, microbatches: int, chunks: int | None = None) -> Plan:
    """Returns the plan of a schedule: compute actions only, checked to be legal.

    `stages` is the number of pipeline ranks; `chunks` the stages of the model that each holds (default: the
    schedule's own). Raises ValueError for a name that is not available, and for numbers the schedule cannot have.
    """
    entry = _entry(name)
    if min(stages, microbatches) < 1:
        raise ValueError(f"schedule {name}: {stages} stages and {microbatches} micro-batches: both must be at least 1")
    if chunks is not None and chunks != (entry.chunks or chunks):
        raise ValueError(f"schedule {name}: chunks is {chunks}; this schedule has {entry.chunks}: leave it out")
    chosen = () if chunks is None or entry.chunks is not None else (chunks,)
    plan = entry.fn(stages, microbatches, *chosen)
    legal(plan)
    return plan


def _entry(name: str) -> _Entry:
    if name in _SCHEDULES:
        return _SCHEDULES[name]
    choices = f"available: {', '.join(_SCHEDULES)}"
    if name in NOT_YET:
        raise ValueError(f"schedule {name!r} is not in this version; {choices}")
    close = difflib.get_close_matches(name, _SCHEDULES, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise ValueError(f"there is no schedule {name!r}: {hint}{choices}")
