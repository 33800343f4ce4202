"""Errors of the package survive pickling, as a process that collects them from others needs."""

from __future__ import annotations

import importlib
import inspect
import pickle
import pkgutil

import threed
from threed.config import ConfigError
from threed.core.errors import PicklableError
from threed.core.parse import ParseError
from threed.schedules.plan import SizesError

ARGUMENTS = {
    ConfigError: (["--model.seq: wrong", "--train.steps: too few"],),
    ParseError: ("config.toml", "no such key"),
}
BUILT_ELSEWHERE = {"RanksFailed", "_Broken"}  # from the results of ranks; they have the same base


def error_classes() -> list[type[Exception]]:
    """Returns the error classes of all modules."""
    classes = set()
    for module in pkgutil.walk_packages(threed.__path__, "threed."):
        if module.name == "threed.__main__":
            continue
        try:
            imported = importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if not str(error.name).startswith("torch."):  # a module of a newer torch
                raise
            continue
        members = inspect.getmembers(imported, inspect.isclass)
        classes |= {c for _, c in members if issubclass(c, Exception)}
    own = [c for c in classes if c.__module__.startswith("threed.")]
    return sorted(own, key=lambda cls: cls.__name__)


def test_errors_survive_pickling() -> None:
    for cls in error_classes():
        if cls.__name__ in BUILT_ELSEWHERE:
            assert issubclass(cls, PicklableError)
            continue
        error = cls(*ARGUMENTS.get(cls, ("what happened: what to do",)))
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is cls
        assert (str(again), vars(again)) == (str(error), vars(error))


def test_sizes_of_a_schedule_survive_pickling() -> None:
    again = pickle.loads(pickle.dumps(SizesError("3 stages", stages=4, microbatches=8)))
    assert again.needs == {"stages": 4, "microbatches": 8}
    assert str(again) == "3 stages: use 4 stages and 8 micro-batches"
