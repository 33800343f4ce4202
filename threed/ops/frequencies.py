"""Frequencies of rotary positions that are scaled for longer sequences, or turn a part of each head only.

    of = frequencies(10000.0, size, scaling=scaling, positions=131072)      the base itself where nothing is to be done
    inverse(of, size, length, device)                                       radians a position, fp32 [d/2]

Scalings: `threed.architectures.rope_scaling`. The order of operations is that of `transformers`, for in fp32 a
frequency's last bit is a hundredth of a radian at the hundred-thousandth position.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from threed.architectures.rope_scaling import RopeScaling
from threed.device import start_copy_in


class Frequencies(NamedTuple):
    """Scaled frequencies: numbers only, so that graphs and caches can tell two of them apart.

    turned: numbers of a head that are turned, the first ones. factor, low, high, original: as each kind needs them.
    short, long: of longrope, in sequences up to `original` and beyond. scale: of cosines and sines.
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


Theta = float | Frequencies


def frequencies(
    theta: float,
    size: int,
    *,
    part: float = 1.0,
    scaling: RopeScaling | None = None,
    positions: int = 0,
) -> Theta:
    """What rotary positions of heads of `size` need: theta alone, or with a scaling for so many positions.

    part: of each head that is turned. ValueError where that is no even number of elements.
    """
    turned = int(size * part)
    if turned % 2:
        raise ValueError(
            f"rotary positions turn pairs, and {part:g} of a head of {size} are {turned} numbers"
        )
    if scaling is None:
        return theta if turned == size else Frequencies(theta, turned)
    original = scaling.original_max_position_embeddings or 0
    factor = scaling.factor or (positions / original if original else 1.0)
    known = Frequencies(theta, turned, scaling.rope_type, factor, original=original)
    if scaling.rope_type == "llama3":
        return known._replace(
            low=scaling.low_freq_factor or 1.0, high=scaling.high_freq_factor or 4.0
        )
    if scaling.rope_type == "yarn":
        return _yarn(known, scaling)
    if scaling.rope_type == "longrope":
        longer = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        short, long = scaling.short_factor or (), scaling.long_factor or ()
        return known._replace(short=short, long=long, scale=scaling.attention_factor or longer)
    return known


def _yarn(known: Frequencies, scaling: RopeScaling) -> Frequencies:
    """low, high: the pairs between which frequencies go over from those kept to those divided by the factor."""

    def pair(turns: float) -> float:
        return (
            known.turned
            * math.log(known.original / (turns * 2 * math.pi))
            / (2 * math.log(known.theta))
        )

    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(known.factor) + 1.0 if known.factor > 1 else 1.0

    low, high = pair(scaling.beta_fast or 32), pair(scaling.beta_slow or 1)
    if scaling.truncate is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, known.turned - 1)
    both = scaling.mscale and scaling.mscale_all_dim
    scale = grown(scaling.mscale) / grown(scaling.mscale_all_dim) if both else grown(1.0)  # type: ignore[arg-type]
    return known._replace(
        low=low, high=high + 0.001 * (low == high), scale=scaling.attention_factor or scale
    )


def inverse(theta: Theta, size: int, length: int, device: torch.device) -> Tensor:
    """Radians a position, fp32 [d/2] of the numbers that are turned, in sequences of this length."""
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
            by = torch.tensor(numbers, dtype=torch.float32, device=device)
        else:
            by = start_copy_in(torch.tensor(numbers, dtype=torch.float32), device)
        return 1.0 / (by * base)
    return 1.0 / base


def _by_wavelength(plain: Tensor, theta: Frequencies) -> Tensor:
    """Long waves are divided by the factor, short ones are kept, those between go over."""
    wave = 2 * math.pi / plain
    longest, shortest = theta.original / theta.low, theta.original / theta.high
    divided = torch.where(wave > longest, plain / theta.factor, plain)
    kept = (theta.original / wave - theta.low) / (theta.high - theta.low)
    between = (1 - kept) * divided / theta.factor + kept * divided
    return torch.where((wave >= shortest) & (wave <= longest), between, divided)


def scale_of(theta: Theta) -> float:
    """What cosines and sines are multiplied by."""
    return theta.scale if isinstance(theta, Frequencies) else 1.0


def turned_of(theta: Theta, size: int) -> int:
    """How many numbers of a head of this size are turned."""
    return theta.turned if isinstance(theta, Frequencies) else size
