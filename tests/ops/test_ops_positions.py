"""A rank with two ranges of a sequence, as zigzag context parallelism gives: its rows are those of the full sequence."""

from __future__ import annotations

import pytest
import torch

from tests.layers.test_layers import local_weight
from threed.config.architectures.rope_scaling import RopeScaling
from threed.layers import Dropout, MicroBatch, PositionEmbedding, Slicing, rotate
from threed.ops import dropout, rotary
from threed.ops.frequencies import Theta, frequencies
from threed.ops.positions import Positions

ENDS = Positions(((0, 2), (6, 8)), 8)
LONG = RopeScaling(
    rope_type="longrope", short_factor=(1.0, 1.5), long_factor=(2.0, 8.0),
    original_max_position_embeddings=6, factor=4.0,
)  # fmt: skip


class Ends(Slicing):
    """Activations between blocks are [s/2 b h], at both ends of the sequence."""

    @property
    def sequence_parts(self) -> int:
        return 2

    def positions(self, length: int) -> Positions:
        part = length // 4
        return Positions(((0, part), (length - part, length)), length)


def test_rows_and_indices() -> None:
    full = torch.randn(8, 3)
    assert Positions.all(8).rows(full).equal(full)
    assert Positions.all(8).rows(full).data_ptr() == full.data_ptr()
    assert ENDS.rows(full).equal(full[[0, 1, 6, 7]])
    assert ENDS.indices(full.device).tolist() == [0, 1, 6, 7]


def test_learned_positions() -> None:
    layers = [PositionEmbedding("p", 9, 4, slicing) for slicing in (Slicing(), Ends())]
    weight = local_weight(layers[0].weight)
    for layer in layers:
        layer.weight = torch.nn.Parameter(weight.clone())
    x, dy = torch.randn(2, 8, 3, 4, dtype=weight.dtype)
    full, ends = layers[0](x), layers[1](ENDS.rows(x))
    assert ends.equal(ENDS.rows(full))
    full.backward(dy * torch.tensor([1, 1, 0, 0, 0, 0, 1, 1]).view(8, 1, 1))
    ends.backward(ENDS.rows(dy))
    assert layers[0].weight.grad.equal(layers[1].weight.grad)
    with pytest.raises(ValueError, match="position 11 is beyond the 9 learned positions"):
        layers[1](torch.zeros(6, 1, 4))


@pytest.mark.parametrize(
    "theta", [1e4, frequencies(1e4, 8, part=0.5), frequencies(1e4, 4, scaling=LONG)], ids=str
)
def test_rotary_positions(theta: Theta) -> None:
    """Scaled angles are those of the length of the full sequence."""
    x = torch.randn(8, 2, 3, 4 if "longrope" in str(theta) else 8)
    assert rotate(ENDS.rows(x), theta, ENDS).equal(ENDS.rows(rotate(x, theta)))


def test_the_table_of_the_kernel() -> None:
    full, ends = (
        rotary.table(positions, 32, 1e4, torch.device("cpu"))
        for positions in (Positions.all(8), ENDS)
    )
    assert ends.equal(ENDS.rows(full))


def test_dropout() -> None:
    x, samples = torch.randn(8, 3, 20), torch.tensor([5, 2**33 + 1, 7])
    micro = MicroBatch(samples=samples, step=3)
    full, ends = (Dropout("d", 0.4, slicing) for slicing in (Slicing(), Ends()))
    assert ends(ENDS.rows(x), micro).equal(ENDS.rows(full(x, micro)))
    draws = [dropout.Draw(1, "d", 3, samples, of, 0.4) for of in (Positions.all(8), ENDS)]
    assert draws[1].mask(ENDS.rows(x)).equal(ENDS.rows(draws[0].mask(x)))
