"""One group of keys of a ds_config, with a memory of which keys were asked for.

section = Section(report, values, "fp16")
section.whole("hysteresis", 2, least=1)        # its value, DeepSpeed's default, or a problem
section.ignore("auto_cast", "why")             # a note, if it is there
section.close(keys.FP16)                       # the keys of a table; any that nobody asked for is a problem
"""

from __future__ import annotations

import difflib
import json
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from threed.config import ConfigError
from threed.parse import ParseError, read_json

LIMITS = {
    "least": ("at least", operator.ge),
    "above": ("more than", operator.gt),
    "below": ("less than", operator.lt),
}
Rows = Mapping[str, Any]  # by key, or by several keys separated by spaces
NONE: Rows = {}


def read(config: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """A ds_config as a dict: a mapping, or the path of a JSON file. Raises ConfigError when it is neither."""
    if isinstance(config, Mapping):
        return dict(config)
    try:
        return read_json(Path(config))
    except ParseError as error:
        fix = (
            "give the path of a ds_config.json, or a dict; comments and trailing commas are no JSON"
        )
        raise ConfigError([f"{error}: {fix}"]) from None


def shown(value: object) -> str:
    """A value as it stands in JSON."""
    return json.dumps(value, default=str)


@dataclass
class Report:
    """What a translation found out: what is wrong, and what should be known."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Auto:
    """What "auto" means for a key: a value, and where it comes from; without a value, what to write instead."""

    value: Any = None
    why: str = ""
    instead: str = "write the value"


class Table:
    """Keys of a group that choose nothing.

    ignored: those without effect, and why. refused: those of which only some values are taken; these, and why no
    others. blocks: groups that must say "enabled": false, and why.
    """

    def __init__(self, ignored: Rows = NONE, refused: Rows = NONE, blocks: Rows = NONE) -> None:
        self.ignored, self.refused, self.blocks = (
            {key: what for keys, what in rows.items() for key in keys.split()}
            for rows in (ignored, refused, blocks)
        )

    def off(self, why: str) -> Table:
        """The same keys, all of them without effect."""
        return Table(dict.fromkeys((*self.ignored, *self.refused), why))


class Section:
    """The keys of one group. A key that is null counts as not given."""

    def __init__(self, report: Report, values: Any, path: str = "") -> None:
        self.report, self.path = report, path
        if not isinstance(values, Mapping):
            report.problems.append(f"{path}: {shown(values)} is no object of keys")
            values = {}
        self.values: dict[str, Any] = {str(key): value for key, value in values.items()}
        self.known: list[str] = []

    def name(self, key: str) -> str:
        """The key with its groups: "zero_optimization.stage"."""
        return f"{self.path}.{key}" if self.path else key

    def problem(self, key: str, text: str) -> None:
        """Says what is wrong with a key."""
        self.report.problems.append(f"{self.name(key)}: {text}")

    def note(self, key: str, text: str) -> None:
        """Says what should be known about a key."""
        self.report.notes.append(f"{self.name(key)}: {text}")

    def given(self, key: str) -> bool:
        """Whether the key is there; from now on it is a known one."""
        self.known.append(key)
        return self.values.get(key) is not None

    def need(self, key: str, what: str) -> None:
        """A problem where the key is not there. what: to do then."""
        if not self.given(key):
            self.problem(key, f"not given: {what}")

    def section(self, key: str) -> Section:
        """The group below a key; an empty one if there is none."""
        return Section(self.report, self.values[key] if self.given(key) else {}, self.name(key))

    def take(
        self,
        key: str,
        default: Any,
        wrong: Callable[[Any], str],
        auto: Auto = Auto(),
        named: bool = True,
    ) -> Any:
        """A key's value; the default where it is not given, and, with a problem, where `wrong` says what is wrong.

        named: whether a default that applies is worth a note.
        """
        if not self.given(key):
            if named:
                self.note(key, f"not given: DeepSpeed's default, {shown(default)}")
            return default
        value = self.values[key]
        if value == "auto" and auto.value is not None:
            self.note(key, f'"auto": {shown(auto.value)}, {auto.why}')
            return auto.value
        trainer = f"is filled in by a trainer, and there is none here: {auto.instead}"
        if what := trainer if value == "auto" else wrong(value):
            self.problem(key, f"{shown(value)} {what}")
            return default
        return value

    def number(
        self,
        key: str,
        default: float | None,
        *,
        auto: Auto = Auto(),
        named: bool = True,
        **limits: float,
    ) -> Any:
        """A finite number not less than `least`, more than `above`, less than `below`."""
        return self.take(key, default, lambda value: _no_number(value, limits), auto, named)

    def whole(
        self,
        key: str,
        default: int | None,
        *,
        auto: Auto = Auto(),
        named: bool = True,
        **limits: float,
    ) -> Any:
        """A whole number; 5e8 is one."""

        def wrong(value: Any) -> str:
            return _no_number(value, limits) or (
                "" if value == int(value) else "is no whole number"
            )

        value = self.take(key, default, wrong, auto, named)
        return None if value is None else int(value)

    def switch(self, key: str, default: bool, *, auto: Auto = Auto()) -> bool:
        """True or false."""
        wrong = "must be true or false"
        return bool(
            self.take(
                key, default, lambda value: "" if isinstance(value, bool) else wrong, auto, False
            )
        )

    def word(
        self,
        key: str,
        default: str | None,
        words: Sequence[str],
        *,
        named: bool = True,
        refused: Collection[str] = (),
    ) -> Any:
        """One of some words, in lower case. refused: in lower case, those that DeepSpeed knows."""

        def wrong(value: Any) -> str:
            text = str(value).lower()
            what = "is not there" if text in refused else "is not known"
            return "" if text in map(str.lower, words) else f"{what}: use {_listed(words)}"

        value = self.take(key, default, wrong, Auto(instead=f"write {_listed(words)}"), named)
        return None if value is None else str(value).lower()

    def ignore(self, key: str, why: str) -> None:
        """A key whose value changes nothing here."""
        if self.given(key):
            self.note(key, f"no effect: {why}")

    def close(self, *tables: Table) -> None:
        """Says what is there of the tables, and which keys nobody asked for."""
        for table in tables:
            for key, why in table.ignored.items():
                self.ignore(key, why)
            for key, (fine, why) in table.refused.items():
                self._refuse(key, fine, why)
            for key, why in table.blocks.items():
                self._refuse_block(key, why)
        for key in self.values:
            if key not in self.known:
                near = difflib.get_close_matches(key, self.known, 1, 0.7)
                self.problem(
                    key,
                    f"no such key (did you mean {self.name(near[0])}?)" if near else "no such key",
                )

    def _refuse(self, key: str, fine: Sequence[Any], why: str) -> None:
        if self.given(key):
            value = self.values[key]
            only = f" (only {_listed([shown(value) for value in fine])})" if fine else ""
            if value in fine:
                self.note(key, f"{shown(value)}, as it always is here")
            else:
                self.problem(key, f"{shown(value)} is not there{only}: {why}")

    def _refuse_block(self, key: str, why: str) -> None:
        if self.given(key):
            value = self.values[key]
            if value is False or (isinstance(value, Mapping) and value.get("enabled") is False):
                self.note(key, "off, as it always is here")
            else:
                self.problem(key, f"is not there: {why}")


def _no_number(value: Any, limits: Mapping[str, float]) -> str:
    """What is wrong with a value that should be a number within limits."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not abs(value) < float("inf")
    ):
        return "is no number"
    beyond = (name for name, limit in limits.items() if not LIMITS[name][1](value, limit))
    return next((f"must be {LIMITS[name][0]} {limits[name]:g}" for name in beyond), "")


def _listed(words: Sequence[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
