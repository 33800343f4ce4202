"""One group of keys of a ds_config, with a memory of which keys were asked for.

section = Section(report, values, "fp16")
section.number("hysteresis", 2, least=1)       # its value, DeepSpeed's default, or a problem
section.ignore("auto_cast", "why")             # a note, if it is there
section.close()                                # every key that nobody asked for is a problem
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from threed.config import ConfigError


def read(config: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """A ds_config as a dict: a mapping, or the path of a JSON file. Raises ConfigError when it is neither."""
    if isinstance(config, Mapping):
        return dict(config)
    try:
        values = json.loads(Path(config).read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except OSError as error:
        raise ConfigError([f"{config}: {error.strerror}: give the path of a ds_config.json, or a dict"]) from None
    except json.JSONDecodeError as error:
        raise ConfigError([f"{config}: not JSON ({error}); comments and trailing commas are none"]) from None
    if not isinstance(values, dict):
        raise ConfigError([f"{config}: holds {type(values).__name__}, not an object of keys"])
    return values


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError([f"{name}: given twice" for name in twice])
    return dict(pairs)


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

    def section(self, key: str) -> Section:
        """The group below a key; an empty one if there is none."""
        return Section(self.report, self.values[key] if self.given(key) else {}, self.name(key))

    def take(self, key: str, default: Any, auto: Auto, named: bool) -> tuple[Any, bool]:
        """A key's value and whether it still has to be checked. named: whether a default is worth a note."""
        if not self.given(key):
            if named:
                self.note(key, f"not given: DeepSpeed's default, {shown(default)}")
            return default, False
        value = self.values[key]
        if value != "auto":
            return value, True
        if auto.value is None:
            self.problem(key, f'"auto" is filled in by a trainer, and there is none here: {auto.instead}')
            return default, False
        self.note(key, f'"auto": {shown(auto.value)}, {auto.why}')
        return auto.value, False

    def number(
        self, key: str, default: float | None, *, least: float | None = None, above: float | None = None,
        below: float | None = None, auto: Auto = Auto(), named: bool = True,
    ) -> Any:  # fmt: skip
        """A finite number not less than `least`, more than `above`, less than `below`."""
        value, check = self.take(key, default, auto, named)
        if not check:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < float("inf"):
            self.problem(key, f"{shown(value)} is no number")
            return default
        if least is not None and value < least:
            self.problem(key, f"{shown(value)} must be at least {least:g}")
        elif above is not None and value <= above:
            self.problem(key, f"{shown(value)} must be more than {above:g}")
        elif below is not None and value >= below:
            self.problem(key, f"{shown(value)} must be less than {below:g}")
        else:
            return value
        return default

    def whole(self, key: str, default: int | None, **limits: Any) -> Any:
        """A whole number; 5e8 is one."""
        value = self.number(key, default, **limits)
        if value is not None and value != int(value):
            self.problem(key, f"{shown(value)} is no whole number")
            return default
        return None if value is None else int(value)

    def switch(self, key: str, default: bool, *, auto: Auto = Auto()) -> bool:
        """True or false."""
        value, check = self.take(key, default, auto, named=False)
        if check and not isinstance(value, bool):
            self.problem(key, f"{shown(value)} must be true or false")
            return default
        return bool(value)

    def word(self, key: str, default: str | None, words: Sequence[str], *, named: bool = True) -> Any:
        """One of some words, in lower case."""
        value, check = self.take(key, default, Auto(instead=f"write {_listed(words)}"), named)
        if not check:
            return value
        if isinstance(value, str) and value.lower() in words:
            return value.lower()
        self.problem(key, f"{shown(value)} is not known: use {_listed(words)}")
        return default

    def folder(self, key: str) -> str | None:
        """A path as text; none if it is not given."""
        value, check = self.take(key, None, Auto(instead="write a folder"), False)
        if not check:
            return None
        if isinstance(value, str | os.PathLike) and (path := os.fspath(value)) and isinstance(path, str):
            return path
        self.problem(key, f"{shown(value)} is no folder: write its path")
        return None

    def ignore(self, key: str, why: str) -> None:
        """A key whose value changes nothing here."""
        if self.given(key):
            self.note(key, f"no effect: {why}")

    def refuse(self, key: str, off: Sequence[Any], why: str) -> None:
        """A key that must be left out, or have one of the values `off`."""
        if not self.given(key):
            return
        if any(self.values[key] == value for value in off):
            self.note(key, f"{shown(self.values[key])}, as it always is here")
        else:
            choices = f" (only {_listed([shown(value) for value in off])})" if off else ""
            self.problem(key, f"{shown(self.values[key])} is not there{choices}: {why}")

    def refuse_block(self, key: str, why: str) -> None:
        """A group that must be left out, or say "enabled": false."""
        if not self.given(key):
            return
        value = self.values[key]
        if value is False or (isinstance(value, Mapping) and value.get("enabled") is False):
            self.note(key, "off, as it always is here")
        else:
            self.problem(key, f"is not there: {why}")

    def close(self) -> None:
        """Says which keys nobody asked for."""
        for key in self.values:
            if key not in self.known:
                near = difflib.get_close_matches(key, self.known, 1, 0.7)
                self.problem(key, f"no such key (did you mean {self.name(near[0])}?)" if near else "no such key")


def _listed(words: Sequence[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
