"""Parameter groups: an optimizer, a learning rate and a decay of their own for parameters whose names match a pattern.

    groups = read_groups("embedding.*: lr=1e-4; *.bias: weight-decay=0")       # one flag, groups separated by ;
    groups = read_groups(["embedding.*: name=sgd, lr=0.1", "*.bias: weight-decay=0"])   # a list in TOML

Patterns are those of `fnmatch`, on global parameter names, and the first group that matches has the parameter. A group
is read from `pattern: key=value, key=value`, and `str` writes it back in that form.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, get_args

from threed.schema import BaseModel, ConfigDict, Field, model_validator

_FORM = '"pattern: name=sgd, lr=X, weight-decay=X"'
_SEPARATE = "separate groups by ; in a flag, in TOML they are items of a list"
_KEYS = ("name", "lr", "weight_decay")
OptimizerName = Literal["adamw", "sgd", "lion"]


class ParamGroup(BaseModel):
    """The options of the parameters whose names match a pattern; None: as in `optim`.

    Attributes:
        match: the pattern.
        name: the optimizer that updates them, with the constants of `optim`.
        lr: the peak learning rate; warmup and schedule are those of `optim`.
        weight_decay: also for norms and biases that match.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    match: Annotated[str, Field(min_length=1)]
    name: OptimizerName | None = None
    lr: Annotated[float, Field(ge=0)] | None = None
    weight_decay: Annotated[float, Field(ge=0)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _read(cls, data: Any) -> Any:
        """From text or a table to fields; the messages name the group, as there may be many in one value."""
        if isinstance(data, ParamGroup):
            return data
        if isinstance(data, str):
            return _from_text(data)
        if isinstance(data, dict):
            return _from_table(data)
        raise ValueError(f"{data!r} is no group; write {_FORM}")

    def __str__(self) -> str:
        """The group as users write it; `lr=none` where it has nothing of its own."""
        given = [(key.replace("_", "-"), getattr(self, key)) for key in _KEYS]
        settings = [
            f"{key}={value if key == 'name' else repr(value)}"
            for key, value in given
            if value is not None
        ]
        return f"{self.match}: {', '.join(settings) or 'lr=none'}"


def read_groups(value: object) -> object:
    """The groups of one flag as a list of texts; lists pass as they are, and `none` is no group at all."""
    if isinstance(value, str):
        return [] if value == "none" else [text for text in value.split(";") if text.strip()]
    if isinstance(value, list | tuple):
        return list(value)
    raise ValueError(f"must be groups such as {_FORM}; {_SEPARATE}")


def _from_text(text: str) -> dict[str, Any]:
    match, colon, settings = text.rpartition(":")
    if not colon or not match.strip() or not settings.strip():
        raise ValueError(f"{text.strip()!r} is no group; write {_FORM}")
    table: dict[str, Any] = {"match": match}
    for setting in settings.split(","):
        key, equals, value = (part.strip() for part in setting.partition("="))
        if not equals or key == "match":
            raise ValueError(
                f"{setting.strip()!r} of {text.strip()!r} is no setting; write {_FORM}"
            )
        if key in table:
            raise ValueError(f"{text.strip()!r} says {key} twice; keep one")
        table[key] = value
    return _from_table(table)


def _from_table(table: dict[Any, Any]) -> dict[str, Any]:
    match = table.get("match")
    if not isinstance(match, str) or not match.strip():
        raise ValueError('a group needs match, a pattern of parameter names such as "*.bias"')
    if set(match) & set(":;"):  # most likely two groups in one
        raise ValueError(f"{match.strip()!r} is no pattern, as it has : or ; in it; {_SEPARATE}")
    values: dict[str, Any] = {"match": match.strip()}
    for key, value in table.items():
        field = str(key).replace("-", "_")
        if field in values and field != "match":
            raise ValueError(f"{match.strip()!r} says {field.replace('_', '-')} twice; keep one")
        if field == "name":
            values[field] = _optimizer(value, match.strip())
        elif field in _KEYS:
            values[field] = _number(key, value, match.strip())
        elif field != "match":
            raise ValueError(
                f"{key} of {match.strip()!r}: no such setting; a group has name, lr and weight-decay"
            )
    return values


def _optimizer(value: object, match: str) -> str | None:
    if value is None or value == "none":
        return None
    if value not in get_args(OptimizerName):
        raise ValueError(
            f"name of {match!r} must be one of {', '.join(get_args(OptimizerName))}, not {value}"
        )
    return str(value)


def _number(key: object, value: object, match: str) -> float | None:
    if value is None or value == "none":
        return None
    try:
        number = math.nan if isinstance(value, bool) else float(str(value))
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise ValueError(f"{key} of {match!r} must be a number of at least 0, not {value}")
    return number
