"""Finds the flags that an unknown flag may mean: a misspelled one, or one of another framework."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from threed.config.migration import other_names
from threed.config.schema import BaseModel, key_name

OPTIONS = ("preset", "config", "world-size", "dry-run", "help")  # flags without a group


def suggest(name: str, groups: Mapping[str, type[BaseModel]]) -> tuple[list[str], str]:
    """Returns the flags that an unknown flag may mean, and a text for the message.

    Args:
        name: the flag without the hyphens in front.
        groups: the groups of keys, by name.

    Returns:
        At most three flags; and a text in parentheses with a space in front, or "".
    """
    group, _, key = name.rpartition(".")
    hint = other_names.find(name) if group not in groups else None
    unneeded = hint is not None and not hint.keys  # so a key with this name means something else
    close = _same_key(key, groups) if group not in groups and not unneeded else []
    close = close or ([] if hint else close_flags(name, groups))
    if close:
        return close, f" (did you mean {' or '.join(close)}?)"
    hint = hint or other_names.find(name) or other_names.find(key) or other_names.nearest(name)
    if hint is None:
        return [], ""
    return [f"--{key}" for key in hint.keys], f" ({hint.source}: {hint.text})"


def close_flags(name: str, groups: Mapping[str, type[BaseModel]]) -> list[str]:
    """Returns flags with a spelling that is similar to `name`, at most three.

    If `name` has a group, its key may also be the key of another group, or a less similar key of
    its group.

    Args:
        name: the flag without the hyphens in front.
        groups: the groups of keys, by name.
    """
    keys = _keys(groups)
    name = name.replace("_", "-")
    group, dot, key = name.rpartition(".")
    close = _same_key(key, groups) if dot else []
    close = close or _matches(name, [*keys, *OPTIONS], 0.85)
    if group in groups:
        inside = [short for flag, short in keys.items() if flag.startswith(f"{group}.")]
        close = close or [f"{group}.{near}" for near in _matches(key, inside, 0.7)]
    similar = _matches(key, keys.values(), 0.85)
    close = close or [flag for flag, short in keys.items() if short in similar]
    return [f"--{flag.removeprefix('--')}" for flag in close[:3]]


def _keys(groups: Mapping[str, type[BaseModel]]) -> dict[str, str]:
    """Returns the key of each flag, by `group.key`."""
    return {
        f"{group}.{key_name(key)}": key_name(key)
        for group, model in groups.items()
        for key in model.model_fields
    }


def _same_key(key: str, groups: Mapping[str, type[BaseModel]]) -> list[str]:
    """Returns the flags of any group with the key `key`, at most three."""
    key = key.replace("_", "-")
    return [f"--{flag}" for flag, short in _keys(groups).items() if short == key][:3]


def _matches(word: str, words: Iterable[str], cutoff: float) -> list[str]:
    return difflib.get_close_matches(word, words, 1, cutoff)
