"""Re-exports pydantic, explains its errors, and defines settings that users write as one string.

Only this module imports pydantic, so that a missing pydantic is reported in one place.
"""

from __future__ import annotations

import keyword
from typing import Any, ClassVar

from threed.core.messages import did_you_mean
from threed.core.packages import missing

try:
    from pydantic import AfterValidator as AfterValidator
    from pydantic import BaseModel as BaseModel
    from pydantic import BeforeValidator as BeforeValidator
    from pydantic import ConfigDict as ConfigDict
    from pydantic import Field as Field
    from pydantic import ModelWrapValidatorHandler as ModelWrapValidatorHandler
    from pydantic import ValidationError as ValidationError
    from pydantic import ValidatorFunctionWrapHandler as ValidatorFunctionWrapHandler
    from pydantic import WrapValidator as WrapValidator
    from pydantic import model_validator as model_validator
    from pydantic.fields import FieldInfo as FieldInfo
    from pydantic_core import ErrorDetails as ErrorDetails
    from pydantic_core import PydanticCustomError as PydanticCustomError
except ImportError as error:
    raise missing("pydantic>=2.7", "threed", error) from error


def python_name(key: str) -> str:
    """Returns the field name of a key: `bucket_mib` for `bucket-mib`, `async_` for `async`."""
    name = key.replace("-", "_")
    return name + "_" if keyword.iskeyword(name) else name


def key_name(field: str) -> str:
    """Returns the key of a field, as users write it: `bucket-mib` for `bucket_mib`.

    Inverse of `python_name`.
    """
    return field.rstrip("_").replace("_", "-")


def number(value: object) -> object:
    """Returns a value unchanged; raises ValueError for a boolean.

    Without this check, pydantic would accept a boolean as 0 or 1.
    """
    if isinstance(value, bool):
        raise ValueError("must be a number")
    return value


def written(value: Any, separator: str = ",") -> str:
    """Returns a value as a user writes it on the command line.

    Args:
        value: the value of a field.
        separator: separator between the items of a tuple.
    """
    if isinstance(value, tuple):
        # The text of a `Settings` contains commas, so such items are separated by semicolons.
        groups = any(isinstance(item, Settings) for item in value)
        return ("; " if groups else separator).join(map(written, value)) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return str(value).removesuffix(".0")
    return "none" if value is None else str(value)


def reason(detail: ErrorDetails) -> str:
    """Returns a plain-English message for a pydantic error, such as "must be a number"."""
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "literal_error":
        expected = context["expected"].replace("'", "")
        names = expected.replace(" or ", ", ").split(", ")
        return f"must be {expected}{did_you_mean(str(detail['input']), *names)}"
    if kind in ("int_parsing", "int_from_float", "int_type"):
        return "must be a whole number"
    if kind in ("float_parsing", "float_type"):
        return "must be a number"
    if kind == "bool_type":
        return "must be true or false"
    if kind == "missing":
        return "is missing"
    message = detail["msg"].removeprefix("Value error, ")
    return message.replace("Input should be", "must be").replace("String should", "must")


class Settings(BaseModel):
    """Base class for a group of settings that users write as one string or as a TOML table.

    The string is `head: key=value, key=value`. The head is the value of the first field, and ends
    at the last colon. In the other fields, the value `none` means None. `str()` returns the string.

    Attributes:
        form: the syntax of the string, for messages.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    form: ClassVar[str]

    @model_validator(mode="wrap")
    @classmethod
    def _read(cls, data: Any, validate: ModelWrapValidatorHandler[Settings]) -> Settings:
        if isinstance(data, cls):
            return data
        first, *names = cls.model_fields
        table = _split(data, first, cls.form) if isinstance(data, str) else data
        if not isinstance(table, dict):
            raise ValueError(f"{data!r} is not of the form {cls.form}")
        values: dict[str, Any] = {}
        for key, value in table.items():
            name = python_name(str(key))
            if name in values:
                raise ValueError(f"{data!r} has {key_name(name)} twice; keep one")
            values[name] = None if value == "none" and name != first else value
        try:
            return validate(values)
        except ValidationError as error:
            of = f" of {values[first]!r}" if first in values else ""
            problems = [_problem(detail, of, names) for detail in error.errors()]
            raise ValueError("; ".join(problems)) from None

    def __str__(self) -> str:
        first, *names = type(self).model_fields
        given = {name: getattr(self, name) for name in names}
        settings = [f"{key_name(k)}={written(v, ' ')}" for k, v in given.items() if v is not None]
        return f"{getattr(self, first)}: {', '.join(settings) or f'{key_name(names[0])}=none'}"


def _split(text: str, first: str, form: str) -> dict[str, Any]:
    head, _, settings = text.rpartition(":")
    if not head.strip() or not settings.strip():
        raise ValueError(f"{text.strip()!r} is not of the form {form}")
    table: dict[str, Any] = {first: head.strip()}
    for setting in settings.split(","):
        key, equals, value = (part.strip() for part in setting.partition("="))
        if not equals or key == first:
            raise ValueError(
                f"{setting.strip()!r} of {text.strip()!r} is not a setting; write {form}"
            )
        if key in table:
            raise ValueError(f"{text.strip()!r} has {key} twice; keep one")
        table[key] = value
    return table


def _problem(detail: ErrorDetails, of: str, names: list[str]) -> str:
    where = ".".join(key_name(str(part)) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        return f"{where}{of}: no such setting; there are {', '.join(map(key_name, names))}"
    return f"{where}{of} {reason(detail)}" if where else reason(detail)
