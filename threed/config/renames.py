"""Keys and values that were renamed, whose old spellings still work, and keys that were removed.

    Renames().current("run", "replicate", "neighbour").value        # "neighbor"

The renames apply to flags, TOML files, groups that are created in Python, and the configurations in
checkpoints. An old spelling causes a warning, except in a checkpoint. A removed key is an error; in
a checkpoint, it is ignored. To rename a key, add a line to `RENAMES`; to remove a key, add it to
`REMOVED` with the action to take instead.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from threed.config.schema import key_name, python_name


@dataclass(frozen=True)
class Rename:
    """A renamed key, or a key with renamed values.

    Attributes:
        old: the old key, as `group.key`.
        new: the new key, as `group.key`; the same as `old` if only values were renamed.
        values: maps each old value to the new value, both as users write them; empty if only the
            key was renamed.
    """

    old: str
    new: str
    values: Mapping[str, str] = field(default_factory=dict)


RENAMES = (Rename("run.replicate", "run.replicate", {"neighbour": "neighbor"}),)
REMOVED: Mapping[str, str] = {}
"""For each removed key, as `group.key`: what to do instead. This text is a part of the error."""


@dataclass(frozen=True)
class Setting:
    """A key and its value, in their current spelling.

    Attributes:
        group: group of the key, as a field name.
        key: the key, as a field name.
        value: value of the key.
        note: a line with the old and the new spelling; "" if nothing was renamed.
    """

    group: str
    key: str
    value: Any
    note: str = ""


@dataclass(frozen=True)
class Renames:
    """The renamed and removed keys.

    Attributes:
        renames: renamed keys, and keys with renamed values.
        removed: the action to take instead of setting a removed key, by key (`group.key`).
    """

    renames: tuple[Rename, ...] = RENAMES
    removed: Mapping[str, str] = field(default_factory=lambda: REMOVED)

    @property
    def old_keys(self) -> tuple[str, ...]:
        """The keys that are no longer in the configuration, as `group.key`."""
        return (*(rename.old for rename in self.renames if rename.old != rename.new), *self.removed)

    def current(self, group: str, key: str, value: Any = None) -> Setting:
        """Returns a key and its value in their current spelling; removed keys are unchanged."""
        group, key = python_name(group), python_name(key)
        old = f"{key_name(group)}.{key_name(key)}"
        for rename in self.renames:
            now = rename.values.get(value, value) if isinstance(value, str) else value
            if rename.old == old and (rename.new, now) != (old, value):
                changed = ("", "") if now == value else (f" {value}", f" {now}")
                note = f"--{old}{changed[0]} is now --{rename.new}{changed[1]}"
                group, _, key = rename.new.partition(".")
                return Setting(python_name(group), python_name(key), now, note)
        return Setting(group, key, value)

    def current_name(self, name: str) -> str:
        """Returns the current name of a flag as `group.field`; a program option is unchanged."""
        group, dot, key = name.partition(".")
        now = self.current(group, key)
        return f"{now.group}.{now.key}" if dot else name

    def update(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a saved configuration with its keys and values in their current spelling.

        If a renamed key is saved in both spellings, the value under the new spelling is used.
        Removed keys are left out.

        Args:
            config: values as {group: {key: value}}.
        """
        found: dict[str, Any] = {}
        old: dict[str, dict[str, Any]] = {}
        for group, table in config.items():
            found[group] = {} if isinstance(table, dict) else table
            for key, value in table.items() if isinstance(table, dict) else ():
                now = self.current(group, key, value)
                if f"{group}.{key_name(key)}" not in self.removed:
                    (old if now.note else found).setdefault(now.group, {})[now.key] = now.value
        for group, table in old.items():
            found[group] = table | found.get(group, {})
        return found


def report_renames(notes: Iterable[str]) -> None:
    """Prints a warning per renamed key in use, on rank 0.

    Args:
        notes: a line per renamed key, with the old and the new spelling.
    """
    if os.environ.get("RANK", "0") == "0":
        for note in notes:
            print(f"threed: warning: {note}", file=sys.stderr, flush=True)


def renamed(group: str, data: dict[str, Any]) -> dict[str, Any]:
    """Replaces renamed keys and values of a group by the current ones, with a warning for each.

    Args:
        group: name of the group.
        data: values by key.
    """
    settings = [Renames().current(group, key, value) for key, value in data.items()]
    for setting in settings:
        if setting.note:
            warnings.warn(setting.note, FutureWarning, stacklevel=_depth() + 1)
    return {setting.key: setting.value for setting in settings}


def _depth() -> int:
    """Returns the number of calls from the code that creates a configuration to the caller."""
    depth, frame = 0, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(
        ("threed.config.", "pydantic.")
    ):
        depth, frame = depth + 1, frame.f_back
    return depth
