"""Frequencies of rotary positions.

The frequencies can be scaled for longer sequences. The rotation can be limited to the first part of
each head.

    theta = frequencies(10000.0, size, scaling=scaling, positions=131072)
    inverse(theta, size, length, device)               # radians per position, fp32 [d/2]

The types of scaling are described in `threed.config.architectures.rope_scaling`. The order of
operations is the same as in `transformers`, so that frequencies agree to the last bit. This is
necessary, because one bit of an fp32 frequency changes the angle at position 100,000 by up to a
hundredth of a radian.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from threed.config.architectures.rope_scaling import RopeScaling
from threed.core.device import start_copy_in


class Frequencies(NamedTuple):
    """Parameters of scaled frequencies.

    All fields are plain values, so that graphs and caches can compare them.

    Attributes:
        theta: base of the frequencies.
        turned: number of elements of a head that are rotated, from its first element.
        kind: type of scaling ("linear", "llama3", "yarn" or "longrope"), or "default" for none.
        factor: scaling factor.
        low: for llama3, its low_freq_factor. For yarn, the number of a pair of elements that are
            rotated together: pairs up to this number keep their frequency.
        high: for llama3, its high_freq_factor. For yarn, the number of a pair: from this number on,
            the frequencies of pairs are divided by `factor`.
        original: number of positions before scaling.
        short: factors of longrope for sequences up to `original`.
        long: factors of longrope for longer sequences.
        scale: factor by which cosines and sines are multiplied.
        mscale: mscale of yarn for the weight `mscale_all_dim`, by whose square latent attention
            multiplies its scores; otherwise 1.
    """

    theta: float
    turned: int
    kind: str = "default"
    factor: float = 1.0
    low: float = 0.0
    high: float = 0.0
    original: int = 0
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()
    scale: float = 1.0
    mscale: float = 1.0


Theta = float | Frequencies


def frequencies(
    theta: float,
    size: int,
    *,
    part: float = 1.0,
    scaling: RopeScaling | None = None,
    positions: int = 0,
) -> Theta:
    """Returns the argument `theta` of rotary positions.

    It is the base if heads are fully rotated without scaling, otherwise a `Frequencies`.

    Args:
        theta: base of the frequencies.
        size: head's size d.
        part: fraction of each head that is rotated.
        scaling: scaling for longer sequences.
        positions: number of positions of the model. If `scaling` has no factor, the factor is
            `positions` / number of positions before scaling.

    Raises:
        ValueError: if the rotated part has an odd number of elements.
    """
    turned = int(size * part)
    if turned % 2:
        raise ValueError(
            f"rotary positions rotate pairs, and {part:g} of a head of {size} are {turned} numbers"
        )
    if scaling is None:
        return theta if turned == size else Frequencies(theta, turned)
    original = scaling.original_max_position_embeddings or 0
    factor = scaling.factor or (positions / original if original else 1.0)
    common = Frequencies(theta, turned, scaling.rope_type, factor, original=original)
    if scaling.rope_type == "llama3":
        return common._replace(
            low=scaling.low_freq_factor or 1.0, high=scaling.high_freq_factor or 4.0
        )
    if scaling.rope_type == "yarn":
        return _yarn(common, scaling)
    if scaling.rope_type == "longrope":
        longer = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        short, long = scaling.short_factor or (), scaling.long_factor or ()
        return common._replace(short=short, long=long, scale=scaling.attention_factor or longer)
    return common


def _yarn(common: Frequencies, scaling: RopeScaling) -> Frequencies:
    """Sets `scale`, `low` and `high` of yarn.

    A pair consists of two elements of a head that are rotated together. Pairs with a number below
    `low` keep their frequency. The frequency of pairs above `high` is divided by the factor. For
    pairs from `low` to `high`, the kept and the divided frequency are interpolated.
    """

    def pair(turns: float) -> float:
        return (
            common.turned
            * math.log(common.original / (turns * 2 * math.pi))
            / (2 * math.log(common.theta))
        )

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(common.factor) + 1.0 if common.factor > 1 else 1.0

    low, high = pair(scaling.beta_fast or 32), pair(scaling.beta_slow or 1)
    if scaling.truncate is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, common.turned - 1)
    of_all = mscale(scaling.mscale_all_dim) if scaling.mscale_all_dim else 1.0
    both = scaling.mscale and scaling.mscale_all_dim
    scale = mscale(scaling.mscale) / of_all if both else mscale(1.0)  # type: ignore[arg-type]
    return common._replace(
        low=low, high=high + 0.001 * (low == high), scale=scaling.attention_factor or scale,
        mscale=of_all,
    )  # fmt: skip


def inverse(theta: Theta, size: int, length: int, device: torch.device) -> Tensor:
    """Returns radians per position, fp32 [d/2], for the rotated pairs of a head.

    Args:
        theta: base of the frequencies, or a `Frequencies`.
        size: head's size d.
        length: full length of the sequences.
        device: device of the result.
    """
    theta = theta if isinstance(theta, Frequencies) else Frequencies(theta, size)
    base = theta.theta ** (
        torch.arange(0, theta.turned, 2, dtype=torch.float32, device=device) / theta.turned
    )
    if theta.kind == "linear":
        return 1.0 / base / theta.factor
    if theta.kind == "llama3":
        return _by_wavelength(1.0 / base, theta)
    if theta.kind == "yarn":
        pairs = torch.arange(theta.turned // 2, dtype=torch.float32, device=device)
        kept = 1 - ((pairs - theta.low) / (theta.high - theta.low)).clamp(0, 1)
        return 1.0 / (theta.factor * base) * (1 - kept) + 1.0 / base * kept
    if theta.kind == "longrope":
        numbers = theta.long if length > theta.original else theta.short
        if torch.compiler.is_compiling():
            factors = torch.tensor(numbers, dtype=torch.float32, device=device)
        else:
            factors = start_copy_in(torch.tensor(numbers, dtype=torch.float32), device)
        return 1.0 / (factors * base)
    return 1.0 / base


def _by_wavelength(plain: Tensor, theta: Frequencies) -> Tensor:
    """Applies llama3's scaling.

    Low frequencies (long waves) are divided by the factor. High frequencies (short waves) are kept.
    Between the two ranges, the divided and the kept frequency are interpolated.
    """
    wave = 2 * math.pi / plain
    longest, shortest = theta.original / theta.low, theta.original / theta.high
    divided = torch.where(wave > longest, plain / theta.factor, plain)
    kept = (theta.original / wave - theta.low) / (theta.high - theta.low)
    between = (1 - kept) * divided / theta.factor + kept * divided
    return torch.where((wave >= shortest) & (wave <= longest), between, divided)


def scale_of(theta: Theta) -> float:
    """Returns the factor by which cosines and sines are multiplied."""
    return theta.scale if isinstance(theta, Frequencies) else 1.0


def mscale_of(theta: Theta) -> float:
    """Returns the number by whose square latent attention multiplies its scores."""
    return theta.mscale if isinstance(theta, Frequencies) else 1.0


def rotated_size(theta: Theta, size: int) -> int:
    """Returns how many elements of a head of this size are rotated."""
    return theta.turned if isinstance(theta, Frequencies) else size
