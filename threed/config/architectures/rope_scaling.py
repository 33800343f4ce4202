"""Rotary scaling: settings that extend a model to longer sequences than it was first trained on.

    scaling = RopeScaling.model_validate("llama3: factor=8, ...")      from a flag
    scaling = RopeScaling(rope_type="linear", factor=2.0)              from a TOML table

Types and keys have the names and meanings of `rope_parameters` in Hugging Face configurations. The
types are linear (arXiv 2306.15595), llama3 (arXiv 2407.21783), yarn (arXiv 2309.00071) and longrope
(arXiv 2402.13753). In a flag, the numbers of a list are separated by spaces.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from threed.config.schema import BeforeValidator, Field, Settings, model_validator

_Factor = Annotated[float, Field(gt=0)]
_Factors = Annotated[
    tuple[_Factor, ...],
    BeforeValidator(lambda value: value.split() if isinstance(value, str) else value),
]
KINDS: dict[str, tuple[str, str]] = {
    "linear": ("factor", ""),
    "llama3": ("factor low_freq_factor high_freq_factor original_max_position_embeddings", ""),
    "yarn": (
        "original_max_position_embeddings",
        "factor attention_factor beta_fast beta_slow mscale mscale_all_dim truncate",
    ),
    "longrope": (
        "short_factor long_factor original_max_position_embeddings",
        "factor attention_factor",
    ),
}
"""By scaling type: its required keys and its optional keys, separated by spaces."""


class RopeScaling(Settings):
    """Settings of a model's rotary scaling; `KINDS` lists the keys of each type.

    Attributes:
        factor: ratio of the new to the original maximum sequence length. None means the model's
            `positions` divided by original_max_position_embeddings.
    """

    form: ClassVar[str] = (
        '"TYPE: key=X, key=X" with the keys of rope_parameters, such as "linear: factor=2"'
    )

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
    short_factor: _Factors | None = None
    long_factor: _Factors | None = None

    @model_validator(mode="after")
    def _check(self) -> RopeScaling:
        needed, optional = (names.split() for names in KINDS[self.rope_type])
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
        """Returns the keys that are set, under Hugging Face's names; tuples become lists."""
        return self.model_dump(mode="json", exclude_none=True)
