"""Parameter groups: an optimizer, a learning rate and a decay of their own for parameters whose names match a pattern.

    groups = read_groups("embedding.*: lr=1e-4; *.bias: weight-decay=0")       # one flag, groups separated by ;
    groups = read_groups(["embedding.*: name=sgd, lr=0.1", "*.bias: weight-decay=0"])   # a list in TOML

Patterns are those of `fnmatch`, on global parameter names, and the first group that matches has the parameter. A group
is read from `pattern: key=value, key=value`, and `str` writes it back in that form.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from threed.schema import AfterValidator, BeforeValidator, Field, Settings, number

OptimizerName = Literal["adamw", "sgd", "lion"]


def _pattern(text: str) -> str:
    if not text.strip() or set(text) & set(":;"):  # with these most likely two groups in one
        separate = "separate groups by ; in a flag, in TOML they are items of a list"
        raise ValueError(f"is not a pattern of parameter names: {separate}")
    return text.strip()


_Rate = Annotated[float, Field(ge=0), BeforeValidator(number)]


class ParamGroup(Settings):
    """The options of the parameters whose names match a pattern; None: as in `optim`.

    Attributes:
        match: the pattern.
        name: the optimizer that updates them, with the constants of `optim`.
        lr: the peak learning rate; warmup and schedule are those of `optim`.
        weight_decay: also for norms and biases that match.
    """

    form: ClassVar[str] = '"pattern: name=sgd, lr=X, weight-decay=X"'

    match: Annotated[str, AfterValidator(_pattern)]
    name: OptimizerName | None = None
    lr: _Rate | None = None
    weight_decay: _Rate | None = None


def read_groups(value: Any) -> Any:
    """Returns the groups of one flag as a list of texts; `none` is no group at all. Other values pass unchanged."""
    if value == "none":
        return []
    return [text for text in value.split(";") if text.strip()] if isinstance(value, str) else value
