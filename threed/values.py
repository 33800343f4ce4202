"""The types of configuration values: how each is read, its range, and what `--help` shows in its place."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from threed import architectures, schedules
from threed.architectures.rope_scaling import RopeScaling, read_scaling
from threed.param_groups import OptimizerName, ParamGroup, read_groups
from threed.schema import AfterValidator, BeforeValidator, Field


@dataclass(frozen=True)
class Takes:
    """Rides on a field's type: what `--help` shows in place of the value."""

    text: str


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("must not have a NUL character")
    return text


def _number(value: object) -> object:
    if isinstance(value, bool):  # Python would read true as 1
        raise ValueError("must be a number")
    return value


def _boolean(value: object) -> object:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _auto_or_boolean(value: object) -> object:
    try:
        return value if value == "auto" else _boolean(value)
    except ValueError:
        raise ValueError("must be auto, true or false") from None


def _word_or(word: str, number: type[int] | type[float]) -> BeforeValidator:
    """Accepts `word`, or a positive number."""

    def validate(value: object) -> object:
        if value == word:
            return value
        try:
            parsed = number(str(value))
        except ValueError:
            parsed = number(0)
        if not 0 < parsed < float("inf"):
            raise ValueError(
                f"must be {word} or a positive {'whole ' if number is int else ''}number"
            )
        return parsed

    return BeforeValidator(validate)


def _items(value: object, separator: str = ",") -> list[object]:
    """Returns the items of a flag's text, or of a list; none of another thing."""
    if isinstance(value, str):
        return [item.strip() for item in value.split(separator)]
    return list(value) if isinstance(value, list | tuple) else []


def _whole_numbers(items: Iterable[object]) -> list[int]:
    """Returns whole numbers, and 0 for other items."""
    return [int(str(item)) if str(item).isdigit() else 0 for item in items]


def _partition(value: object) -> object:
    if value in ("balanced", "uniform", "measured"):
        return value
    counts = _whole_numbers(_items(value))
    if not counts or min(counts) < 1:
        raise ValueError(
            "must be balanced, uniform, measured, or the layers of each stage, such as 3,2,2"
        )
    return tuple(counts)


def _betas(value: object) -> object:
    items = _items(value)
    if len(items) != 2:
        raise ValueError("must be two numbers, such as 0.9,0.95")
    return tuple(items)


def _steps(value: object) -> object:
    numbers = _whole_numbers([value] if isinstance(value, int) else _items(value, ":"))
    if len(numbers) not in (1, 2) or min(numbers) < 1 or numbers[0] > numbers[-1]:
        raise ValueError("must be a step or first:last, such as 10:12, counted from 1")
    return (numbers[0], numbers[-1])


def _schedule(value: object) -> object:
    """A name that there is, or the form of a file's; what is in the file is looked at when a run is checked."""
    names = (*get_args(schedules.ScheduleName), *schedules.available())
    if isinstance(value, str) and (value in names or schedules.names_file(value)):
        return value
    listed = ", ".join(get_args(schedules.ScheduleName))
    close = schedules.closest(str(value))
    hint = f" (did you mean {close}?)" if close else ""
    raise ValueError(f"must be {listed}, FILE.py:FUNCTION or FILE.csv{hint}")


def _architecture(value: object) -> object:
    if value in architectures.NAMES:
        return value
    close = difflib.get_close_matches(str(value), architectures.NAMES, 1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise ValueError(f"must be {', '.join(architectures.NAMES)}{hint}")


def _optimizer(value: object) -> object:
    if value == "muon":
        raise ValueError(
            "muon orthogonalises whole matrices, and slices over ranks cut through them; use adamw, sgd or lion"
        )
    return value


def _zero_or_above_one(value: float) -> float:
    if 0 < value <= 1:
        raise ValueError("must be above 1, such as 10, or 0 for none")
    return value


def _operations(value: object) -> object:
    known, names = ("attention", "activation", "norm"), list(map(str, _items(value)))
    if not names or not set(names) <= set(known):
        raise ValueError(f"must be names among {', '.join(known)}, such as attention,activation")
    return tuple(dict.fromkeys(names))


_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def _duration(value: object) -> object:
    """Seconds, from 3h, 1h30m, 90m, 45s, 1:30:00, or a number of seconds."""
    text = re.sub(r"^(\d{1,9}):([0-5]\d):([0-5]\d)$", r"\1h\2m\3s", str(value).strip())
    if re.fullmatch(r"(\d{1,12}(\.\d{1,12})?[dhms])+", text):
        parts = re.findall(r"([\d.]+)([dhms])", text)
        return sum(float(number) * _UNITS[unit] for number, unit in parts)
    try:
        seconds = float("nan") if isinstance(value, bool) else float(text)
    except ValueError:
        seconds = float("nan")
    if not 0 <= seconds < float("inf"):
        raise ValueError("must be a time such as 3h, 90m, 1:30:00, or seconds")
    return seconds


Count = Annotated[int, Field(ge=1), BeforeValidator(_number), Takes("N")]
Natural = Annotated[int, Field(ge=0), BeforeValidator(_number), Takes("N")]
Positive = Annotated[float, Field(gt=0), BeforeValidator(_number), Takes("X")]
# of which bytes are finite
MemorySize = Annotated[float, Field(gt=0, le=1e12), BeforeValidator(_number), Takes("X")]
NonNegative = Annotated[float, Field(ge=0), BeforeValidator(_number), Takes("X")]
Spike = Annotated[NonNegative, AfterValidator(_zero_or_above_one)]
Duration = Annotated[float, Field(gt=0, le=1e9), BeforeValidator(_duration), Takes("TIME")]
DurationOrNone = Annotated[float, Field(ge=0, le=1e9), BeforeValidator(_duration), Takes("TIME")]
Share = Annotated[float, Field(ge=0, lt=1), BeforeValidator(_number), Takes("X")]
Switch = Annotated[bool, BeforeValidator(_boolean), Takes("true|false")]
AutoSwitch = Annotated[
    Literal["auto"] | bool, BeforeValidator(_auto_or_boolean), Takes("auto|true|false")
]
Text = Annotated[str, Field(min_length=1), AfterValidator(_without_nul), Takes("TEXT")]
PathText = Annotated[str, Field(min_length=1), AfterValidator(_without_nul), Takes("PATH")]
# of this machine: ~ is the user's home
LocalPath = Annotated[PathText, AfterValidator(os.path.expanduser)]
Partition = Annotated[
    Literal["balanced", "uniform", "measured"] | tuple[int, ...],
    BeforeValidator(_partition),
    Takes("balanced|uniform|measured|N,N,…"),
]
ZeroStage = Annotated[int, Field(ge=0, le=3), BeforeValidator(_number), Takes("0|1|2|3")]
ShardSize = Annotated[Literal["all"] | int, _word_or("all", int), Takes("all|N")]
LossScale = Annotated[Literal["dynamic"] | float, _word_or("dynamic", float), Takes("dynamic|X")]
Betas = Annotated[tuple[Share, Share], BeforeValidator(_betas), Takes("X,X")]
Optimizer = Annotated[OptimizerName, BeforeValidator(_optimizer)]
Schedule = Annotated[
    str,
    BeforeValidator(_schedule),
    Takes("|".join([*get_args(schedules.ScheduleName), "FILE.py:FUNCTION", "FILE.csv"])),
]
Architecture = Annotated[str, BeforeValidator(_architecture), Takes("|".join(architectures.NAMES))]
LayerPattern = Annotated[str, Field(pattern=r"^[sf]+$"), Takes("TEXT")]
Fraction = Annotated[float, Field(gt=0, le=1), BeforeValidator(_number), Takes("X")]
Scaling = Annotated[RopeScaling, BeforeValidator(read_scaling), Takes('"TYPE: key=X, …"')]
ParamGroups = Annotated[
    tuple[ParamGroup, ...],
    BeforeValidator(read_groups),
    Takes('"PATTERN: name=sgd, lr=X, weight-decay=X; …"'),
]
RecomputeOps = Annotated[
    tuple[str, ...], BeforeValidator(_operations), Takes("attention,activation,norm")
]
StepRange = Annotated[tuple[int, int], BeforeValidator(_steps), Takes("N|N:N")]
