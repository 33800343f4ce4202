"""Base class of the groups of configuration keys, with errors that suggest the right names."""

from __future__ import annotations

from typing import Any, Self

from threed.config.renames import renamed
from threed.config.schema import (
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    PydanticCustomError,
    ValidationError,
    model_validator,
)
from threed.config.suggestions import suggest
from threed.core.errors import PicklableError
from threed.core.messages import did_you_mean
from threed.core.parse import plain


class ConfigError(PicklableError, ValueError):
    """Raised for an invalid configuration, with all problems at once.

    Args:
        problems: one line per problem, which includes the fix.
    """

    def __init__(self, problems: list[str]) -> None:
        self.problems = [plain(problem, 4000) for problem in problems]
        super().__init__("\n".join(self.problems))


def with_suggestions(kind: type[BaseModel], error: ValidationError) -> ValidationError:
    """Returns an error with a suggestion for each unknown key or group.

    Args:
        kind: the class of the group that was validated, or `Config`.
        error: the error of pydantic.
    """
    known = {other.group(): other for other in Group.__subclasses__()}
    group = next((name for name, other in known.items() if other is kind), "")
    details: list[Any] = []
    for detail in error.errors():
        changed: dict[str, Any] = {**detail}
        if detail["type"] == "extra_forbidden":
            text = detail["msg"]  # of a group in a `Config`, which already has a suggestion
            if len(detail["loc"]) == 1:
                name = str(detail["loc"][0])
                hint = suggest(f"{group}.{name}".removeprefix("."), known)[1]
                hint = hint or ("" if group else did_you_mean(name, *known))
                text = f"no such {'key' if group else 'group'}{hint}"
            changed["type"] = PydanticCustomError("extra_forbidden", text)
        details.append(changed)
    return ValidationError.from_exception_data(kind.__name__, details)


class Suggesting(BaseModel):
    """Base class of models whose errors about unknown names have suggestions."""

    @model_validator(mode="wrap")
    @classmethod
    def _suggest(cls, data: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """Adds suggestions to errors about unknown names."""
        try:
            return validate(data)
        except ValidationError as error:
            raise with_suggestions(cls, error) from None


class Group(Suggesting):
    """Base class of the groups of keys; its direct subclasses are the groups of a `Config`."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )

    @classmethod
    def group(cls) -> str:
        """Returns the name of the group: `model` for `ModelConfig`."""
        return cls.__name__.removesuffix("Config").lower()

    @model_validator(mode="before")
    @classmethod
    def _read_none(cls, data: Any) -> Any:
        """Replaces renamed keys and values by the current ones, and `none` by None.

        `none` is replaced only in fields whose default is None.
        """
        optional = {name for name, field in cls.model_fields.items() if field.default is None}
        if not isinstance(data, dict):
            return data
        data = renamed(cls.group(), data)
        nones = {key: None for key in optional & data.keys() if data[key] == "none"}
        return data | nones
