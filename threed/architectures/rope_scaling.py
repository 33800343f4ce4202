"""Scalings of rotary angles, for sequences that are longer than those a model was trained on first.

    scaling = read_scaling("llama3: factor=8, low-freq-factor=1, high-freq-factor=4, ...")      one flag
    scaling = read_scaling({"rope_type": "linear", "factor": 2.0})                              a table in TOML

Names and meaning are those of `rope_parameters` in Hugging Face's configurations: linear (arXiv 2306.15595), llama3
(arXiv 2407.21783), yarn (arXiv 2309.00071), longrope (arXiv 2402.13753). Numbers of a list are separated by blanks.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from threed.schema import BaseModel, ConfigDict, Field, model_validator

_FORM = '"TYPE: key=X, key=X" with the keys of rope_parameters, such as "linear: factor=2"'
_Factor = Annotated[float, Field(gt=0)]
KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (("factor",), ()),
    "llama3": (
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        (),
    ),
    "yarn": (
        ("original_max_position_embeddings",),
        (
            "factor",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
    ),
    "longrope": (
        ("short_factor", "long_factor", "original_max_position_embeddings"),
        ("factor", "attention_factor"),
    ),
}
"""What each kind needs, and what it may have."""


class RopeScaling(BaseModel):
    """One scaling. factor: by default the model's positions / original_max_position_embeddings."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    rope_type: Literal["linear", "llama3", "yarn", "longrope"]
    factor: _Factor | None = None
    original_max_position_embeddings: Annotated[int, Field(ge=2)] | None = None
    low_freq_factor: _Factor | None = None
    high_freq_factor: _Factor | None = None
    attention_factor: _Factor | None = None
    beta_fast: _Factor | None = None
    beta_slow: _Factor | None = None
    mscale: _Factor | None = None
    mscale_all_dim: _Factor | None = None
    truncate: bool | None = None
    short_factor: tuple[_Factor, ...] | None = None
    long_factor: tuple[_Factor, ...] | None = None

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        if isinstance(data, dict) and (
            unknown := [str(name) for name in data if name not in cls.model_fields]
        ):
            raise ValueError(f"there is no {', '.join(unknown)}; write {_FORM}")
        return data

    @model_validator(mode="after")
    def _check(self) -> RopeScaling:
        needed, optional = KINDS[self.rope_type]
        given = [name for name in self.table() if name != "rope_type"]
        if missing := [name for name in needed if name not in given]:
            raise ValueError(f"{self.rope_type} needs {', '.join(missing)}")
        if unknown := [name for name in given if name not in (*needed, *optional)]:
            raise ValueError(f"{self.rope_type} has no {', '.join(unknown)}")
        low, high = self.low_freq_factor, self.high_freq_factor
        if low is not None and high is not None and low >= high:
            raise ValueError(f"low_freq_factor {low} must be below high_freq_factor {high}")
        return self

    def table(self) -> dict[str, Any]:
        """What is said of it, by Hugging Face's names; lists for tuples."""
        said = {name: value for name, value in dict(self).items() if value is not None}
        return {
            name: list(value) if isinstance(value, tuple) else value for name, value in said.items()
        }

    def __str__(self) -> str:
        """The scaling as users write it."""
        settings = [
            f"{name.replace('_', '-')}={_text(value)}" for name, value in self.table().items()
        ]
        return f"{self.rope_type}: {', '.join(settings[1:])}"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return " ".join(repr(item) for item in value) if isinstance(value, list) else repr(value)


def read_scaling(value: object) -> object:
    """A scaling from a flag's text; tables and scalings pass as they are. ValueError for another thing."""
    if not isinstance(value, str):
        if isinstance(value, dict | RopeScaling):
            return value
        raise ValueError(f"must be {_FORM}")
    kind, colon, settings = value.partition(":")
    table: dict[str, Any] = {"rope_type": kind.strip()}
    for setting in settings.split(",") if colon else ():
        name, equals, text = (part.strip() for part in setting.partition("="))
        field = name.replace("-", "_")
        if not equals or field in table:
            raise ValueError(f"{setting.strip()!r} is no setting, or there twice; write {_FORM}")
        table[field] = text.split() if field in ("short_factor", "long_factor") else text
    return table
