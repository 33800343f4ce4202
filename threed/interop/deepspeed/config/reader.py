"""Parses a ds_config into `keys.DeepSpeedConfig`, and collects problems and notes about its keys.

reader = Reader(autos, inactive)                # (values that replace "auto", keys without effect)
config = reader.read(read("ds_config.json"))    # a key with a problem gets its default value
reader.problems, reader.notes                   # {key: problem}, ["key: note", ...]
"""

from __future__ import annotations

import base64
import difflib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from threed.config import ConfigError
from threed.config.schema import ValidationError, reason
from threed.core.parse import ParseError, read_json
from threed.interop.deepspeed.config.keys import NO_EFFECT, REFUSED, RENAMED, DeepSpeedConfig, Group


def read(config: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """Returns a ds_config as a dict.

    A top-level key with dots, such as "zero_optimization.reduce_bucket_size" (TRL writes such
    keys), is returned as the nested key.

    Args:
        config: a mapping; the path of a JSON file; or a JSON text in the URL-safe Base64 encoding.

    Raises:
        ConfigError: if the file cannot be read or is not valid JSON.
    """
    if isinstance(config, Mapping):
        return _nested(config)
    if isinstance(config, str) and (decoded := _decoded(config)) is not None:
        return _nested(decoded)
    try:
        return _nested(read_json(Path(config)))
    except ParseError as error:
        fix = (
            "give the path of a ds_config.json, or a dict; JSON has no comments or trailing commas"
        )
        raise ConfigError([f"{error}: {fix}"]) from None


def value_of(ds: Any, path: str) -> Any:
    """Returns the value that a ds_config gives for a key such as "fp16.enabled", or None."""
    for key in path.split("."):
        ds = ds.get(key) if isinstance(ds, Mapping) else None
    return ds


def _decoded(text: str) -> dict[str, Any] | None:
    """Returns the JSON object that a text encodes in Base64; None for any other text."""
    try:
        found = json.loads(base64.urlsafe_b64decode(text.encode("ascii")))
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _nested(ds: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of a ds_config in which top-level keys with dots are nested keys."""
    found = {key: value for key, value in ds.items() if "." not in key}
    for name in ds.keys() - found.keys():
        *groups, key = name.split(".")
        values = found
        for group in groups:
            inner = values.get(group)
            values[group] = dict(inner) if isinstance(inner, Mapping) else {}
            values = values[group]
        values[key] = ds[name]
    return found


def shown(value: object) -> str:
    """Returns a value as JSON text, for messages."""
    return json.dumps(value, default=str)


class Reader:
    """Parses one ds_config, and collects its problems and notes.

    Args:
        autos: key -> (value that replaces "auto", text for messages: where the value is from). If
            the pair is (None, text), "auto" is an error. If it is (None, ""), a key that is "auto"
            is treated as missing.
        inactive: key -> the reason why the key has no effect in this configuration.

    Attributes:
        problems: key -> the text of the first problem that was found for the key.
        notes: texts of the form "key: note", for the user.
    """

    def __init__(self, autos: Mapping[str, tuple[Any, str]], inactive: Mapping[str, str]) -> None:
        self.problems: dict[str, str] = {}
        self.notes: list[str] = []
        self._autos = autos
        self._no_effect = {**NO_EFFECT, **inactive}

    def problem(self, key: str, text: str) -> None:
        """Records a problem of a key, unless the key already has one."""
        self.problems.setdefault(key, text)

    def check(self, fits: bool, key: str, text: str) -> None:
        """Records a problem of a key if `fits` is False."""
        if not fits:
            self.problem(key, text)

    def note(self, key: str, text: str) -> None:
        """Adds a note on a key."""
        self.notes.append(f"{key}: {text}")

    def read(self, ds: Mapping[str, Any]) -> DeepSpeedConfig:
        """Returns the values of the supported keys; a key with a problem gets its default value."""
        values = self._select(ds, DeepSpeedConfig, "")
        try:
            return DeepSpeedConfig.model_validate(values)
        except ValidationError as error:
            for detail in error.errors():
                self._remove(values, [str(part) for part in detail["loc"]], reason(detail))
        return DeepSpeedConfig.model_validate(values)

    def refuse_keys(self, group: Group, path: str, keys: Iterable[str]) -> None:
        """Adds a problem for each key in `keys` that `group` sets.

        Args:
            group: values of the group "optimizer.params" or "scheduler.params".
            path: full name of this group.
            keys: keys that the selected type of optimizer or scheduler does not have.
        """
        for key in keys:
            given = key in group.model_fields_set
            self.check(not given, f"{path}.{key}", "no such key for this type")

    def _select(self, given: Any, model: type[Group], path: str) -> dict[str, Any]:
        """Returns a group's supported keys, after replacing "auto"; adds problems and notes."""
        values: dict[str, Any] = {}
        if not isinstance(given, Mapping):
            example = '{"stage": 1}' if path == "zero_optimization" else '{"enabled": true}'
            self.problem(path, f"{shown(given)} must be an object of keys, such as {example}")
            given = {}
        for key, value in given.items():
            name = f"{path}.{key}".removeprefix(".")
            name = RENAMED.get(name, name)
            key = name.rpartition(".")[2]
            field = model.model_fields.get(key)
            inner = field and field.annotation
            why = self._no_effect.get(name)
            if value is None and (field or why or name in REFUSED):
                continue
            if key in values:
                self.problem(name, "is given twice, once under another name: remove one")
            elif why:
                self.note(name, f"no effect: {why}")
            elif name in REFUSED:
                self._check_refused(name, value, *REFUSED[name])
            elif field is None:
                self.problem(name, f"no such key{_hint(path, key, model)}")
            elif isinstance(inner, type) and issubclass(inner, Group):
                values[key] = self._select(value, inner, name)
            elif value == "auto":
                values[key] = self._resolve(name, field.description or "set the value")
            else:
                integral = isinstance(value, float) and value.is_integer()
                values[key] = int(value) if integral else value
        return {key: value for key, value in values.items() if value is not None}

    def _check_refused(self, key: str, value: Any, works: tuple[Any, ...], why: str) -> None:
        if isinstance(value, Mapping) and False in works and not value.get("enabled"):
            value = False
        if value in works:
            self.note(key, f"{shown(value)}, the only supported value")
        else:
            only = f" (only {' or '.join(map(shown, works))})" if works else ""
            self.problem(key, f"{shown(value)} is not supported{only}: {why}")

    def _resolve(self, key: str, fix: str) -> Any:
        value, origin = self._autos.get(key, (None, "a trainer"))
        if value is not None:
            self.note(key, f'"auto": {shown(value)}, {origin}')
        elif origin:
            self.problem(key, f'"auto" needs Hugging Face\'s Trainer to fill it in: {fix}')
        return value

    def _remove(self, values: dict[str, Any], path: list[str], why: str) -> None:
        """Removes an invalid value and adds a problem.

        Args:
            values: values of the ds_config, nested by group.
            path: the names of the nested groups, then the name of the key, and then possibly an
                index into the key's value.
            why: the reason why the value is invalid.
        """
        for depth, part in enumerate(path, 1):
            inner = values.get(part)
            if depth == len(path) or not isinstance(inner, dict):
                self.problem(".".join(path[:depth]), f"{shown(values.pop(part, None))} {why}")
                return
            values = inner


def _hint(path: str, key: str, model: type[Group]) -> str:
    """Returns a hint that names the known key most similar to `key`, or an empty string."""
    tables = [name.rpartition(".") for name in (*NO_EFFECT, *REFUSED)]
    if path and key in (*DeepSpeedConfig.model_fields, *(n for group, _, n in tables if not group)):
        return ", which belongs at the top level of the config"
    known = [*model.model_fields, *(name for group, _, name in tables if group == path)]
    near = difflib.get_close_matches(key, known, 1, 0.7)
    return f" (did you mean {f'{path}.{near[0]}'.removeprefix('.')}?)" if near else ""
