"""The order of samples is a bijection and a pure function; batches are the tokens it names."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from threed.data.samples import Samples, permute


def identity(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.uint64)


@settings(max_examples=150, deadline=None)
@given(size=st.integers(1, 3000), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 2**62))
def test_permutation_is_a_bijection(size: int, seed: int, epoch: int) -> None:
    assert sorted(permute(identity(size), size, seed, epoch).tolist()) == list(range(size))


def test_permutation_of_every_small_size_is_a_bijection() -> None:
    for size in range(1, 130):
        assert sorted(permute(identity(size), size, 3, 5).tolist()) == list(range(size))


@settings(max_examples=50, deadline=None)
@given(
    bits=st.integers(20, 61),
    offset=st.integers(-3, 3),
    picks=st.sets(st.integers(0, 2**20 - 4), min_size=2),
)
def test_permutation_of_huge_sizes_stays_inside_and_is_injective(
    bits: int, offset: int, picks: set[int]
) -> None:
    size = 2**bits + offset
    images = permute(np.asarray(sorted(picks), dtype=np.uint64), size, 1, 0)
    assert int(images.max()) < size
    assert len(set(images.tolist())) == len(picks)


def test_permutation_does_not_touch_its_argument() -> None:
    index = identity(1000)
    permute(index, 1000, 1, 1)
    assert np.array_equal(index, identity(1000))


@pytest.mark.seldom("2", "5", "7", "30")
@pytest.mark.parametrize("size", [2, 3, 5, 7, 16, 30])
def test_every_window_comes_equally_often_at_every_position(size: int) -> None:
    epochs = 3000
    counts = np.zeros((size, size))
    for epoch in range(epochs):
        counts[np.arange(size), permute(identity(size), size, 7, epoch).astype(int)] += 1
    # Five standard deviations of a binomial; over at most 900 cells chance alone stays below with p > 0.999.
    assert np.abs(counts / epochs - 1 / size).max() < 5 * np.sqrt(
        (1 / size) * (1 - 1 / size) / epochs
    )


def test_neighbors_do_not_stay_neighbors() -> None:
    order = permute(identity(10_000), 10_000, 1, 0).astype(np.int64)
    assert (np.diff(order) == 1).sum() < 10  # a random order has one on average
    assert abs(np.corrcoef(np.arange(10_000), order)[0, 1]) < 0.04  # four standard deviations


def test_order_is_pinned() -> None:
    # A changed order would silently break resuming old runs: change this list only on purpose.
    samples = Samples(np.arange(81, dtype=np.uint16), seq=8, seed=1)
    assert [samples.order(i) for i in range(20)] == [
        7,
        0,
        9,
        6,
        2,
        8,
        5,
        3,
        1,
        4,
        2,
        3,
        4,
        1,
        9,
        0,
        6,
        7,
        5,
        8,
    ]


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(9, 400),
    seq=st.integers(1, 8),
    seed=st.integers(0, 9),
    first=st.integers(0, 10**12),
)
def test_batch_gives_the_windows_in_order_with_shifted_labels(
    length: int, seq: int, seed: int, first: int
) -> None:
    tokens = np.random.default_rng(length).integers(0, 60000, length).astype(np.uint16)
    samples = Samples(tokens, seq, seed)
    batch = samples.batch(first, 5)
    assert batch["samples"].tolist() == list(range(first, first + 5))
    for row in range(5):
        begin = samples.order(first + row) * seq
        assert batch["tokens"][row].tolist() == tokens[begin : begin + seq].tolist()
        assert batch["labels"][row].tolist() == tokens[begin + 1 : begin + seq + 1].tolist()


def test_batch_has_int64_contiguous_tensors() -> None:
    batch = Samples(np.arange(100, dtype=np.uint16), seq=9).batch(0, 4)
    assert {k: (v.dtype, tuple(v.shape), v.is_contiguous()) for k, v in batch.items()} == {
        "tokens": (torch.int64, (4, 9), True),
        "labels": (torch.int64, (4, 9), True),
        "samples": (torch.int64, (4,), True),
    }


def test_batch_does_not_depend_on_how_it_is_cut() -> None:
    tokens = np.random.default_rng(0).integers(0, 256, 1000).astype(np.uint16)
    whole = Samples(tokens, seq=7, seed=5).batch(130, 24)  # crosses an epoch: 142 windows
    for ranks in (1, 2, 3, 4, 8):
        count = 24 // ranks
        shares = [
            Samples(tokens, seq=7, seed=5).batch(130 + r * count, count) for r in range(ranks)
        ]
        for key, value in whole.items():
            assert torch.equal(torch.cat([share[key] for share in shares]), value)


def test_each_epoch_shows_every_window_once_in_another_order() -> None:
    samples = Samples(np.arange(1001, dtype=np.uint16), seq=10, seed=2)
    epochs = [samples.batch(e * 100, 100)["tokens"][:, 0] // 10 for e in range(3)]
    for epoch in epochs:
        assert sorted(epoch.tolist()) == list(range(100))
    assert not torch.equal(epochs[0], epochs[1])
    assert not torch.equal(epochs[1], epochs[2])


def test_seeds_give_other_orders() -> None:
    orders = [
        [Samples(np.arange(1001), 10, seed).order(i) for i in range(100)] for seed in (0, 1, -1)
    ]
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_validation_is_in_order() -> None:
    samples = Samples(np.arange(41), seq=4, shuffle=False)
    assert [samples.order(i) for i in range(12)] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert samples.batch(0, 10)["tokens"].flatten().tolist() == list(range(40))


@pytest.mark.parametrize(("length", "windows"), [(9, 1), (16, 1), (17, 2), (24, 2), (25, 3)])
def test_length_counts_whole_windows_with_their_label(length: int, windows: int) -> None:
    assert len(Samples(np.arange(length), seq=8)) == windows


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(
        ValueError, match="training split: 8 tokens, and one sample of sequence length 8 takes 9"
    ):
        Samples(np.arange(8), seq=8, name="training split")
    with pytest.raises(ValueError, match="at least 1"):
        Samples(np.arange(8), seq=0)
    samples = Samples(np.arange(9), seq=8)
    with pytest.raises(ValueError, match="sample index -1"):
        samples.batch(-1, 2)
    assert samples.batch(3, 0)["tokens"].shape == (0, 8)


def test_samples_number_their_documents_and_ends_have_no_label() -> None:
    """Documents end with token 0. One begins before a window, and one ends with a window."""
    tokens = np.asarray([3, 0, 1, 2, 0, 4, 5, 6, 7, 0, 0, 8, 9], dtype=np.uint16)
    samples = Samples(tokens, seq=5, shuffle=False, end=0)
    batch = samples.batch(0, 2)
    assert batch["tokens"].tolist() == [[3, 0, 1, 2, 0], [4, 5, 6, 7, 0]]
    assert batch["documents"].tolist() == [[0, 0, 1, 1, 1], [0, 0, 0, 0, 0]]
    assert batch["documents"].dtype == torch.int64
    for name, values in samples.batch(1, 1).items():
        assert values.tolist() == batch[name][1:].tolist()
    assert batch["labels"].tolist() == [[0, -100, 2, 0, -100], [5, 6, 7, 0, -100]]
    assert samples.labels(0, 1).tolist() == [0, 2, 0]
    assert samples.labels(1, 2).tolist() == [5, 6, 7, 0]
    assert "documents" not in Samples(tokens, seq=5).batch(0, 2)
    assert Samples(tokens, seq=5).labels(0, 2).tolist() == tokens[1:11].tolist()
