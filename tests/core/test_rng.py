"""Random numbers: the published vectors of Philox, slices that are parts of one whole, and distributions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.live import Peak
from threed.core import native, rng
from threed.distributed.sharding import Init, Piece, initial, split

# Random123 1.14.0 (Salmon et al., SC 2011), tests/kat_vectors, philox4x32-10: counter, key, result.
VECTORS = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_philox_gives_the_published_vectors(counter: str, key: str, expected: str) -> None:
    k0, k1 = words(key)
    assert [int(word) for word in rng.philox(words(counter), (k0, k1))] == words(expected)


def test_philox_of_many_counters_is_philox_of_each() -> None:
    counters = torch.tensor([words(counter) for counter, *_ in VECTORS]).t()
    together = torch.stack(rng.philox(list(counters), (7, 9)))
    for column, counter in enumerate(counters.t().tolist()):
        assert together[:, column].tolist() == [int(word) for word in rng.philox(counter, (7, 9))]


# ---------------------------------------------------------------------------------------------------------- normals


@st.composite
def boxes_of_matrices(draw: st.DrawFn) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    shape = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    start = tuple(draw(st.integers(0, n - 1)) for n in shape)
    size = tuple(draw(st.integers(0, n - at)) for n, at in zip(shape, start, strict=True))
    return shape, (start[0], start[1]), (size[0], size[1])


def whole(shape: tuple[int, ...], name: str = "w", seed: int = 3) -> Tensor:
    return rng.normal(seed, name, shape, (0,) * len(shape), shape)


@given(boxes_of_matrices())
def test_any_box_of_a_matrix_is_that_part_of_the_whole(
    case: tuple[tuple[int, int], tuple[int, int], tuple[int, int]],
) -> None:
    shape, (r, c), (n, m) = case
    part = rng.normal(3, "w", shape, (r, c), (n, m))
    assert part.shape == (n, m)
    assert torch.equal(part, whole(shape)[r : r + n, c : c + m])


@given(st.integers(1, 300), st.data())
def test_any_range_of_a_vector_is_that_part_of_the_whole(length: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, length - 1))
    count = data.draw(st.integers(0, length - first))
    part = rng.normal(3, "v", (length,), (first,), (count,))
    assert torch.equal(part, whole((length,), "v")[first : first + count])


def test_slices_over_the_internal_chunk_size_are_parts_of_the_whole() -> None:
    shape = (700, 1001)  # 700,700 elements: three chunks of 4 x 65,536 and a rest
    full = whole(shape)
    assert torch.equal(rng.normal(3, "w", shape, (100, 0), (500, 1001)), full[100:600])
    assert torch.equal(rng.normal(3, "w", shape, (0, 333), (700, 601)), full[:, 333:934])
    assert torch.equal(
        rng.normal(3, "w", (shape[0] * shape[1],), (0,), (shape[0] * shape[1],)), full.view(-1)
    )


@given(st.lists(st.integers(1, 7), max_size=4), st.data())
def test_any_box_of_a_tensor_of_any_number_of_dimensions_is_that_part_of_the_whole(
    shape: list[int], data: st.DataObject
) -> None:
    start = [data.draw(st.integers(0, n - 1)) for n in shape]
    size = [data.draw(st.integers(0, n - first)) for first, n in zip(start, shape, strict=True)]
    part = rng.normal(3, "w", shape, start, size)
    assert part.shape == tuple(size)
    inside = tuple(slice(first, first + n) for first, n in zip(start, size, strict=True))
    assert torch.equal(part, whole(tuple(shape))[inside])


@given(boxes_of_matrices(), st.data())
def test_the_boxes_of_a_flat_range_put_together_are_the_range(
    case: tuple[tuple[int, int], tuple[int, int], tuple[int, int]], data: st.DataObject
) -> None:
    """What a bucket slice does: it cuts a piece anywhere, and every cut gets the values of the whole."""
    shape, start, size = case
    piece = Piece("w", shape, start, size, init=Init(std=0.5))
    first = data.draw(st.integers(0, piece.numel))
    last = data.draw(st.integers(first, piece.numel))
    flat = torch.full((last - first,), float("nan"))
    for part in split(piece, first, last):
        flat[part.offset : part.offset + part.numel] = initial(part, 3).reshape(-1)
    (r, c), (n, m) = start, size
    assert torch.equal(flat, (whole(shape) * 0.5)[r : r + n, c : c + m].reshape(-1)[first:last])


def test_constants_have_no_noise() -> None:
    piece = Piece("b", (5,), (1,), (3,), init=Init(value=1.0))
    assert torch.equal(initial(piece, seed=0), torch.ones(3))


def normal_cdf(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(x / math.sqrt(2)))


@pytest.mark.parametrize("lane", [None, 0, 1, 2, 3])
def test_normals_are_standard_normal(lane: int | None) -> None:
    """Moments and the Kolmogorov-Smirnov distance, of all and of each of the four lanes of a block, at 4.5 sigma."""
    x = whole((400_000,), "big").double()
    x = x if lane is None else x[lane::4]
    n = len(x)
    assert abs(x.mean()) < 4.5 / math.sqrt(n)
    assert abs(x.var() - 1) < 4.5 * math.sqrt(2 / n)
    assert abs((x**3).mean()) < 4.5 * math.sqrt(15 / n)
    assert abs((x**4).mean() - 3) < 4.5 * math.sqrt(96 / n)
    steps = torch.arange(1, n + 1) / n
    distance = (normal_cdf(x.sort().values) - steps).abs().max()
    assert distance < 2.3 / math.sqrt(n)  # exceeded with probability 2 exp(-2 * 2.3^2) = 5e-5
    assert x.abs().max() > 4.0  # tails are there


def test_streams_of_other_names_and_seeds_are_independent() -> None:
    draws = [
        whole((100_000,), name, seed) for name, seed in (("a", 1), ("b", 1), ("a", 2), ("ab", 1))
    ]
    stacked = torch.stack(draws)
    correlation = torch.corrcoef(stacked) - torch.eye(len(draws))
    assert correlation.abs().max() < 4.5 / math.sqrt(100_000)
    neighbors = torch.corrcoef(torch.stack([draws[0][:-1], draws[0][1:]]))[0, 1]
    assert abs(neighbors) < 4.5 / math.sqrt(100_000)
    assert rng.key(1, "2a") != rng.key(12, "a")


def test_a_name_always_gives_the_same_numbers() -> None:
    """Fixed for ever: checkpoints do not depend on it, but runs must be repeatable over versions."""
    values = rng.normal(1234, "embedding.word.weight", (4, 4), (0, 0), (1, 4))
    u = [
        (int(w) + 0.5) / 2**32
        for w in rng.philox((0, 0, 0, 0), rng.key(1234, "embedding.word.weight"))
    ]
    radius = [math.sqrt(-2 * math.log(u[0])), math.sqrt(-2 * math.log(u[2]))]
    angle = [2 * math.pi * u[1], 2 * math.pi * u[3]]
    want = [f(a) * r for r, a in zip(radius, angle, strict=True) for f in (math.cos, math.sin)]
    torch.testing.assert_close(values[0], torch.tensor(want), rtol=2e-7, atol=1e-9)


# --------------------------------------------------------------------------------------------------------- dropout


def mask(
    samples: list[int], rows: tuple[int, int] = (0, 12), columns: tuple[int, int] = (0, 30), *, step: int = 5,
    name: str = "blocks.0.mlp.dropout", p: float = 0.3, seed: int = 11,
) -> Tensor:  # fmt: skip
    return rng.keep_mask(seed, name, step, torch.tensor(samples), rows, columns, 30, p)


@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 30), st.integers(0, 30))
def test_a_mask_of_any_rows_and_columns_is_that_part_of_the_whole(
    a: int, b: int, c: int, d: int
) -> None:
    rows, columns = (min(a, b), max(a, b)), (min(c, d), max(c, d))
    part = mask([4, 9], rows, columns)
    assert part.shape == (rows[1] - rows[0], 2, columns[1] - columns[0])
    assert torch.equal(part, mask([4, 9])[slice(*rows), :, slice(*columns)])


def test_a_mask_depends_on_the_sample_and_not_on_its_micro_batch() -> None:
    together = mask([3, 8, 2**33 + 3])
    for column, sample in enumerate((3, 8, 2**33 + 3)):
        assert torch.equal(together[:, column : column + 1], mask([sample]))
    # sample numbers beyond 32 bits are not wrapped
    assert not torch.equal(together[:, 0], together[:, 2])


def test_masks_of_other_steps_layers_samples_and_seeds_differ() -> None:
    first = mask([1])
    others = [
        mask([1], step=6),
        mask([1], name="blocks.1.mlp.dropout"),
        mask([2]),
        mask([1], seed=12),
    ]
    for other in others:
        agree = (first == other).double().mean()
        assert abs(agree - (0.7**2 + 0.3**2)) < 4.5 * math.sqrt(0.25 / first.numel())


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.999])
def test_a_mask_drops_at_its_rate_in_every_lane(p: float) -> None:
    keep = rng.keep_mask(1, "d", 0, torch.arange(8), (0, 64), (0, 512), 512, p)
    n = keep.numel() // 4
    for lane in range(4):
        assert abs(keep[..., lane::4].double().mean() - (1 - p)) <= 4.5 * math.sqrt(p * (1 - p) / n)


def mask_by_element(
    seed: int,
    step: int,
    samples: Tensor,
    rows: tuple[int, int],
    columns: tuple[int, int],
    width: int,
    p: float,
) -> Tensor:
    """The definition: element e of a sample is word e % 4 of counter e // 4, each counter worked out for itself."""
    element = torch.arange(*rows).view(-1, 1, 1) * width + torch.arange(*columns)
    sample = samples.view(1, -1, 1)
    words = torch.stack(
        rng.philox((element >> 2, sample & 2**32 - 1, sample >> 32, step), rng.key(seed, "d")), -1
    )
    return words.gather(-1, (element & 3).expand(words.shape[:-1]).unsqueeze(-1)).squeeze(
        -1
    ) >= int(p * 2**32)


@pytest.mark.parametrize(
    ("rows", "columns", "width", "samples"),
    [
        ((0, 512), (0, 1024), 1024, 1),  # several blocks
        ((5, 405), (4, 1000), 1023, 3),  # a line begins anywhere in a counter
        ((0, 2), (0, 300_000), 300_000, 2),  # a line is larger than a block
        ((3, 9), (7, 8), 30, 2),
        ((0, 0), (0, 8), 8, 2),
        ((0, 4), (8, 8), 16, 2),
        ((0, 4), (0, 9), 9, 0),
    ],
)
def test_a_mask_made_in_blocks_is_that_of_its_elements(
    rows: tuple[int, int], columns: tuple[int, int], width: int, samples: int
) -> None:
    numbers = torch.arange(samples) + 2**33 - 1
    mine = rng.keep_mask(9, "d", 7, numbers, rows, columns, width, 0.1)
    assert torch.equal(mine, mask_by_element(9, 7, numbers, rows, columns, width, 0.1))


def test_a_mask_takes_the_same_memory_to_make_whatever_its_size() -> None:
    """Beside the mask: 8.2 MB. All at once it was 88 bytes an element: 369 MB for the larger one here."""
    beside = []
    for length in (512, 4096):
        peak = Peak()
        with peak:
            keep = rng.keep_mask(1, "d", 0, torch.arange(1), (0, length), (0, 1024), 1024, 0.1)
        beside.append(peak.most - keep.numel())
    assert beside[0] == pytest.approx(beside[1], rel=0.01)
    assert max(beside) <= 8.2e6


@pytest.mark.skipif(native.library("cpu") is None, reason="no native library: no compiler")
def test_the_native_normals_are_those_of_torch() -> None:
    """Both round the same fp64 formula to fp32; two libraries' last fp64 bit shows once in 2^28 values."""
    blocks = torch.cat(
        (torch.arange(200_000), torch.arange(2**32 - 7, 2**32 + 7), torch.tensor([2**40 + 1]))
    )
    stream = rng.key(7, "weight")
    want = rng.normal_blocks(blocks, stream)
    assert torch.equal(rng._normal_blocks(blocks, stream), want)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    assert torch.equal(rng._normal_blocks(blocks, stream), want)
    torch.set_num_threads(threads)
