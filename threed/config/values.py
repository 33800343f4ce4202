"""The types of configuration values. A type defines parsing, range, and placeholder in `--help`."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, get_args

from threed import schedules
from threed.config import architectures
from threed.config.architectures.rope_scaling import RopeScaling
from threed.config.schema import (
    AfterValidator,
    BeforeValidator,
    Field,
    Settings,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    number,
)
from threed.core.messages import did_you_mean
from threed.core.source import names_model
from threed.schedules import registry


@dataclass(frozen=True)
class Takes:
    """Annotation of a field's type: the placeholder of the value in `--help`, such as `N`."""

    text: str


OptimizerName = Literal["adamw", "sgd", "lion"]


def _pattern(text: str) -> str:
    if not text.strip() or set(text) & set(":;"):  # the text most likely contains several groups
        separate = "separate groups by ; in a flag, in TOML they are items of a list"
        raise ValueError(f"is not a pattern of parameter names: {separate}")
    return text.strip()


@lru_cache
def _alternatives(match: str) -> tuple[frozenset[str], tuple[str, ...]]:
    """Splits a pattern at each "|" outside of brackets.

    Returns:
        All alternatives, as a set; and the alternatives that contain `*`, `?` or `[`. Plain names
        are looked up in the set, because imported groups may list thousands of them. Only the
        alternatives in the second result have to be matched one by one.
    """
    found = [text.strip() for text in re.findall(r"(?:\[.[^]]*\]|[^|])+", match)]
    wild = tuple(text for text in found if set(text) & set("*?["))
    return frozenset(found), wild


_Rate = Annotated[float, Field(ge=0), BeforeValidator(number)]


class ParamGroup(Settings):
    """Optimizer options of the parameters with matching names.

    If several groups match a parameter, the first one applies. If an option has the value None, the
    value in `optim` applies. In a flag, groups are separated by `;`.

    Attributes:
        match: `fnmatch` pattern of parameter names, or several patterns separated by "|".
        name: optimizer of these parameters. Its other hyperparameters are taken from `optim`.
        lr: peak learning rate; the warm-up and schedule of `optim` apply.
        weight_decay: weight decay, which also applies to matching norms and biases.
    """

    form: ClassVar[str] = '"pattern: name=sgd, lr=X, weight-decay=X"'

    match: Annotated[str, AfterValidator(_pattern)]
    name: OptimizerName | None = None
    lr: _Rate | None = None
    weight_decay: _Rate | None = None

    def matches(self, name: str) -> bool:
        """Returns whether a pattern of the group matches the name of a parameter."""
        names, wild = _alternatives(self.match)
        return name in names or any(fnmatchcase(name, pattern) for pattern in wild)


def _groups(value: Any) -> Any:
    """Splits the string of a flag into the strings of its groups; `none` means no groups.

    A value that is not a string is returned unchanged.
    """
    if value == "none":
        return []
    return [text for text in value.split(";") if text.strip()] if isinstance(value, str) else value


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("must not have a NUL character")
    return text


def _boolean(value: object) -> object:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _must_be(form: str, separator: str = ",") -> WrapValidator:
    """Returns a validator of a tuple, which may also be given as a list or as one string.

    Args:
        form: description of valid values; the error message is "must be " and this text.
        separator: separator between the items in the string.
    """

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        candidates = [tuple(value) if isinstance(value, list) else value]
        if isinstance(value, str):
            candidates.append(tuple(item.strip() for item in value.split(separator)))
        for candidate in candidates:
            with suppress(ValidationError):
                return handler(candidate)
        raise ValueError(f"must be {form}")

    return WrapValidator(validate)


def _in_order(steps: tuple[int, int]) -> tuple[int, int]:
    if steps[0] > steps[1]:
        raise ValueError("the first is after the last")
    return steps


def _schedule(value: object) -> object:
    """Returns the name of a schedule or of a schedule file, unchanged; does not read the file.

    Raises:
        ValueError: for any other value.
    """
    names = (*get_args(registry.ScheduleName), *schedules.available())
    if isinstance(value, str) and (value in names or registry.names_file(value)):
        return value
    listed = ", ".join(get_args(registry.ScheduleName))
    close = registry.closest(str(value))
    hint = f" (did you mean {close}?)" if close else ""
    raise ValueError(f"must be {listed}, FILE.py:FUNCTION or FILE.csv{hint}")


def _architecture(value: object) -> object:
    if value in architectures.NAMES:
        return value
    if isinstance(value, str) and names_model(value):
        # The file is not imported here, because a checkpoint may name it, and a checkpoint alone
        # must not make code run.
        return value
    hint = did_you_mean(str(value), *architectures.NAMES)
    raise ValueError(f"must be {', '.join(architectures.NAMES)} or FILE.py:NAME{hint}")


def _optimizer(value: object) -> object:
    if value == "muon":
        raise ValueError(
            "muon orthogonalizes full matrices, but ZeRO and tensor parallelism shard them; use adamw, sgd or lion"
        )
    return value


def _zero_or_above_one(value: float) -> float:
    if 0 < value <= 1:
        raise ValueError("must be above 1, such as 10, or 0 for none")
    return value


def _folder_name(text: str) -> str:
    if not text.strip(".") or set(text) & set("/\\"):
        raise ValueError("must be a plain folder name, without slashes")
    return text


_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def _one_share(value: object) -> object:
    """Returns a value unchanged; raises ValueError for a list of shares as in Megatron-LM."""
    if isinstance(value, str) and re.fullmatch(r"[\d.]+(,[\d.]+){1,2}", value):
        shares = [float(part) for part in value.split(",")]
        valid = shares[1] / sum(shares) if sum(shares) else 0.0
        fix = f"write {valid:.6g}" if valid else "it must be more than 0"
        raise ValueError(f"must be one number, the share of the validation data: {fix}")
    return value


def _duration(value: object) -> object:
    """Converts 2d, 3h, 1h30m, 90m, 45s or 1:30:00 to seconds. Returns other values unchanged."""
    text = re.sub(r"^(\d{1,9}):([0-5]\d):([0-5]\d)$", r"\1h\2m\3s", str(value).strip())
    if re.fullmatch(r"(\d{1,12}(\.\d{1,12})?[dhms])+", text):
        parts = re.findall(r"([\d.]+)([dhms])", text)
        return sum(float(number) * _UNITS[unit] for number, unit in parts)
    return number(value)


MOST_RANKS = 1_000_000  # maximum of --world-size, because the time of a plan grows with it
Count = Annotated[int, Field(ge=1), BeforeValidator(number), Takes("N")]
Natural = Annotated[int, Field(ge=0), BeforeValidator(number), Takes("N")]
Positive = Annotated[float, Field(gt=0), BeforeValidator(number), Takes("X")]
# MiB or GiB; the upper bound ensures that the number of bytes is finite
MemorySize = Annotated[float, Field(gt=0, le=1e12), BeforeValidator(number), Takes("X")]
NonNegative = Annotated[float, Field(ge=0), BeforeValidator(number), Takes("X")]
Multiple = Annotated[NonNegative, AfterValidator(_zero_or_above_one)]
_TIME = _must_be("a time such as 3h, 90m, 1:30:00, or seconds")
Duration = Annotated[float, Field(gt=0, le=1e9), BeforeValidator(_duration), _TIME, Takes("TIME")]
DurationOrNone = Annotated[
    float, Field(ge=0, le=1e9), BeforeValidator(_duration), _TIME, Takes("TIME")
]
Share = Annotated[float, Field(ge=0, lt=1), BeforeValidator(number), Takes("X")]
ValidationShare = Annotated[Share, Field(gt=0), BeforeValidator(_one_share)]
Switch = Annotated[bool, BeforeValidator(_boolean), Takes("true|false")]
AutoSwitch = Annotated[
    Literal["auto"] | Switch, _must_be("auto, true or false"), Takes("auto|true|false")
]
Text = Annotated[str, Field(min_length=1), AfterValidator(_without_nul), Takes("TEXT")]
# ~ at the start of a path is expanded to the user's home
_Path = Annotated[
    str, Field(min_length=1), AfterValidator(_without_nul), AfterValidator(os.path.expanduser)
]
PathText = Annotated[_Path, Takes("PATH")]
TokenizerText = Annotated[_Path, Takes("bytes|PATH")]
ResumeText = Annotated[_Path, Takes("auto|none|PATH")]
Partition = Annotated[
    Literal["balanced", "uniform", "measured"] | tuple[Count, ...],
    _must_be("balanced, uniform, measured, or the layers of each stage, such as 3,2,2"),
    Takes("balanced|uniform|measured|N,N,…"),
]
ZeroStage = Annotated[int, Field(ge=0, le=3), BeforeValidator(number), Takes("0|1|2|3")]
ShardSize = Annotated[
    Literal["all"] | Count, _must_be("all or a positive whole number"), Takes("all|N")
]
ContextHeads = Annotated[
    Literal["auto"] | Count, _must_be("auto or a positive whole number"), Takes("auto|N")
]
LossScale = Annotated[
    Literal["dynamic"] | Positive, _must_be("dynamic or a positive number"), Takes("dynamic|X")
]
Betas = Annotated[
    tuple[Share, Share],
    _must_be("two numbers, such as 0.9,0.95, each at least 0 and less than 1"),
    Takes("X,X"),
]
Optimizer = Annotated[OptimizerName, BeforeValidator(_optimizer)]
Schedule = Annotated[
    str,
    BeforeValidator(_schedule),
    AfterValidator(os.path.expanduser),
    Takes("|".join([*get_args(registry.ScheduleName), "FILE.py:FUNCTION", "FILE.csv"])),
]
Architecture = Annotated[
    str,
    BeforeValidator(_architecture),
    AfterValidator(os.path.expanduser),
    Takes("|".join([*architectures.NAMES, "FILE.py:NAME"])),
]
LayerPattern = Annotated[str, Field(pattern=r"^[sf]+$"), Takes("TEXT")]
Fraction = Annotated[float, Field(gt=0, le=1), BeforeValidator(number), Takes("X")]
Scaling = Annotated[RopeScaling, Takes('"TYPE: key=X, …"')]
ParamGroups = Annotated[
    tuple[ParamGroup, ...],
    BeforeValidator(_groups),
    Takes('"PATTERN: name=sgd, lr=X, weight-decay=X; …"'),
]
RecomputeOps = Annotated[
    tuple[Literal["attention", "activation", "norm"], ...],
    Field(min_length=1),
    AfterValidator(lambda names: tuple(dict.fromkeys(names))),
    _must_be("names among attention, activation, norm, such as attention,activation"),
    Takes("attention,activation,norm"),
]
StepRange = Annotated[
    tuple[Count, Count],
    AfterValidator(_in_order),
    BeforeValidator(lambda value: (value, value) if str(value).isdigit() else value),
    _must_be("a step or first:last, such as 10:12, counted from 1", ":"),
    Takes("N|N:N"),
]
FolderName = Annotated[Text, AfterValidator(_folder_name), Takes("TEXT")]
