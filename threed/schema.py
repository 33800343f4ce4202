"""The names that threed uses of pydantic, pydantic's errors in plain words, and settings that are written as one text.

No other module imports pydantic, so there is one error if it is missing.
"""

from __future__ import annotations

import difflib
import keyword
from typing import Any, ClassVar

from threed.packages import missing

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
except ImportError as error:
    raise missing("pydantic>=2.7", "threed", error) from error


def python_name(key: str) -> str:
    """Returns the field of a key: `bucket-mib` is `bucket_mib`, `async` is `async_`."""
    name = key.replace("-", "_")
    return name + "_" if keyword.iskeyword(name) else name


def key_name(field: str) -> str:
    """Returns the key of a field, as users write it; the inverse of `python_name`."""
    return field.rstrip("_").replace("_", "-")


def number(value: object) -> object:
    """Raises ValueError for a boolean, which Python would read as 0 or 1."""
    if isinstance(value, bool):
        raise ValueError("must be a number")
    return value


def written(value: Any, separator: str = ",") -> str:
    """Returns a value as a command line has it. separator: of the items of a list."""
    if isinstance(value, tuple):
        groups = any(isinstance(item, Settings) for item in value)  # with commas of their own
        return ("; " if groups else separator).join(map(written, value)) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return str(value).removesuffix(".0")
    return "none" if value is None else str(value)


def did_you_mean(word: str, *names: str) -> str:
    """Returns a hint at the name that is most like `word`, to append to a message; "" if none is."""
    close = difflib.get_close_matches(word, names, 1)
    return f" (did you mean {close[0]}?)" if close else ""


def reason(detail: ErrorDetails) -> str:
    """Returns what is wrong with a value, in plain words, from one of pydantic's errors."""
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
    """Settings that users write as one text, `head: key=value, key=value`, or as a table; `str` returns the text.

    The head is the first field, and has no colon. The word `none` means None.

    Attributes:
        form: the text that users write, for messages.
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
            raise ValueError(f"{setting.strip()!r} of {text.strip()!r} is no setting; write {form}")
        if key in table:
            raise ValueError(f"{text.strip()!r} has {key} twice; keep one")
        table[key] = value
    return table


def _problem(detail: ErrorDetails, of: str, names: list[str]) -> str:
    where = ".".join(key_name(str(part)) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        return f"{where}{of}: no such setting; there are {', '.join(map(key_name, names))}"
    return f"{where}{of} {reason(detail)}" if where else reason(detail)
