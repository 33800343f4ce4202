"""Finds the flags that a misspelled flag may mean."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from threed.config.schema import BaseModel, key_name

OPTIONS = ("preset", "config", "world-size", "dry-run", "help")  # flags without a group


def close_flags(name: str, groups: Mapping[str, type[BaseModel]]) -> list[str]:
    """Returns flags that a misspelled flag `name` may mean, at most three.

    Such a flag has the same key in another group, or a similar spelling.

    Args:
        name: the flag without the hyphens in front.
        groups: the groups of keys, by name.
    """
    keys = {
        f"{group}.{key_name(key)}": key_name(key)
        for group, model in groups.items()
        for key in model.model_fields
    }
    name = name.replace("_", "-")
    group, _, key = name.rpartition(".")
    close = [flag for flag, short in keys.items() if short == key] if group not in groups else []
    close = close or difflib.get_close_matches(name, [*keys, *OPTIONS], 1, 0.75)
    similar = difflib.get_close_matches(key, keys.values(), 1, 0.7)
    close = close or [flag for flag, short in keys.items() if short in similar]
    return [f"--{flag}" for flag in close[:3]]
