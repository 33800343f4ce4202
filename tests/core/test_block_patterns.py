"""Patterns of block-sparse attention: DeepSpeed's layouts, random blocks, and ranges of positions."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from threed.core.block_patterns import (
    BigBirdPattern,
    BlockPattern,
    DensePattern,
    FixedPattern,
    FunctionPattern,
    LongformerPattern,
    Range,
    VariablePattern,
    _drawn,
    layouts,
)
from threed.interop import block_pattern

# Layouts made by `make_layout` of DeepSpeed's SparsityConfig classes (deepspeed/ops/sparse_attention/sparsity_config.py
# in DeepSpeed 0.18, by Microsoft, Apache-2.0): mode, arguments, and one text per head with one word per query block.
DEEPSPEED: list[tuple[str, dict[str, Any], list[str]]] = [
    ("dense", {}, ["111 111 111"]),
    ("fixed", {}, [
        "1111000101 1111000101 1111000101 1111000101 0001111101 0001111101 0001111101 0001111101 0001000111 0001000111",
    ]),
    ("fixed", {"attention": "unidirectional", "num_local_blocks": 3}, [
        "1000000000 1100000000 1110000000 0011000000 0011100000 0011110000 0010011000 0010011100 0010011110 0010010011",
    ]),
    ("fixed", {"num_global_blocks": 2, "attention": "unidirectional"}, [
        "100000000 110000000 111100000 111100000 001110000 001111000 001111110 001111111 001100111",
    ]),
    ("fixed", {"num_global_blocks": 2, "horizontal_global_attention": True}, [
        "111100111 111100111 111111111 111111111 001111111 001111111 111111111 111111111 111111111",
    ]),
    ("fixed", {"num_different_global_patterns": 4, "different_layout_per_head": True, "attention": "unidirectional"}, [
        "1000000 1100000 1110000 1111000 0001100 0001110 0001111",
        "1000000 1100000 1110000 1111000 0010100 0010110 0010111",
        "1000000 1100000 1110000 1111000 0100100 0100110 0100111",
        "1000000 1100000 1110000 1111000 1000100 1000110 1000111",
    ]),
    ("variable", {"local_window_blocks": [1, 3, 2], "global_block_indices": [0, 4]}, [
        "100010000 111110000 111110000 111110000 100011000 100011000 100010110 100010110 100010001",
    ]),
    ("variable", {"local_window_blocks": [2], "global_block_indices": [1, 4], "global_block_end_indices": [3, 20],
                  "horizontal_global_attention": True}, [
        "111011111 111111111 111111111 011111111 111111111 111111111 111111111 111111111 111111111",
    ]),
    ("variable", {"local_window_blocks": [2, 4], "global_block_indices": [1], "attention": "unidirectional"}, [
        "100000000 110000000 011000000 011100000 011110000 011111000 010000100 010000110 010000111",
    ]),
    ("bigbird", {"num_random_blocks": 0, "num_global_blocks": 2}, [
        "11111111 11111111 11110000 11111000 11011100 11001110 11000111 11000011",
    ]),
    ("bigbird", {"num_random_blocks": 0, "num_sliding_window_blocks": 5, "attention": "unidirectional"}, [
        "10000000 11000000 11100000 11110000 10111000 10011100 10001110 10000111",
    ]),
    ("bslongformer", {}, ["11111111 11100000 11110000 10111000 10011100 10001110 10000111 10000011"]),
    ("bslongformer", {"global_block_indices": [2, 6], "global_block_end_indices": [3, 7],
                      "num_sliding_window_blocks": 1, "attention": "unidirectional"}, [
        "10000000 01000000 11100000 00110000 00101000 00100100 11111110 00100011",
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("mode", "keys", "heads"), DEEPSPEED, ids=str)
def test_layouts_are_those_of_deepspeed(mode: str, keys: dict[str, Any], heads: list[str]) -> None:
    """Except for blocks after the query block, which the attention mask hides in DeepSpeed."""
    pattern = block_pattern({"sparse_attention": {"mode": mode, **keys}})
    assert pattern.block == 16
    for head, text in enumerate(heads):
        rows = text.split()
        for query, row in enumerate(rows):
            want = [k for k, listed in enumerate(row) if listed == "1"]
            want = [k for k in want if k <= query or not pattern.causal]
            assert list(pattern.key_blocks(query, len(rows), head)) == want


CAUSAL: list[BlockPattern] = [
    DensePattern(),
    FixedPattern(),
    FixedPattern(num_global_blocks=2),
    FixedPattern(num_different_global_patterns=4, different_layout_per_head=True),
    VariablePattern(local_window_blocks=(1, 3), global_block_indices=(0, 5), num_random_blocks=2),
    BigBirdPattern(num_random_blocks=2, different_layout_per_head=True),
    LongformerPattern(global_block_indices=(2,)),
]


@pytest.mark.parametrize("pattern", CAUSAL, ids=str)
def test_a_causal_list_does_not_depend_on_what_follows(pattern: BlockPattern) -> None:
    """So the tokens of a generation see the same keys as in training, and every query sees itself."""
    for head, query in itertools.product(range(4), range(12)):
        lists = {pattern.key_blocks(query, count, head) for count in range(query + 1, 20)}
        assert len(lists) == 1, (head, query, lists)
        assert next(iter(lists))[-1] == query


def test_random_blocks_depend_on_seed_head_and_row_only() -> None:
    """The first draws are written down, so that every version and every rank draws the same."""
    pattern = BigBirdPattern(num_random_blocks=3, different_layout_per_head=True)
    assert [sorted(_drawn(pattern, 20, 64, head)) for head in range(3)] == [
        [3, 8, 18],
        [0, 3, 10],
        [0, 9, 20],
    ]
    other = BigBirdPattern(num_random_blocks=3, different_layout_per_head=True, seed=1)
    assert _drawn(other, 20, 64, 0) != _drawn(pattern, 20, 64, 0)
    assert _drawn(pattern, 1, 64, 0) == {0, 1}
    same = BigBirdPattern(num_random_blocks=3)
    assert same.key_blocks(20, 64, 0) == same.key_blocks(20, 64, 5)


def test_random_blocks_are_uniform() -> None:
    """3 of 40 blocks in 4,000 rows: 300 of each, within five standard deviations (17 each)."""
    pattern = BigBirdPattern(num_random_blocks=3, attention="bidirectional")
    drawn = [_drawn(pattern, row, 40, 0) for row in range(4000)]
    assert {len(found) for found in drawn} == {3}
    counts = [sum(block in found for found in drawn) for block in range(40)]
    assert all(abs(count - 300) < 85 for count in counts), counts


RANGES: list[Range] = [(0, 23), (0, 8), (3, 9), (8, 8), (5, 21), (16, 23), (22, 23)]


@pytest.mark.parametrize("attention", ["unidirectional", "bidirectional"])
@pytest.mark.parametrize("block", [1, 4, 7, 64])
def test_parts_are_the_listed_pairs_of_any_ranges(block: int, attention: Any) -> None:
    """Pairs of positions from the parts, against pairs from the lists of blocks, one by one."""
    pattern = BigBirdPattern(block=block, attention=attention, different_layout_per_head=True)
    count = -(-23 // block)
    for queries, keys in itertools.product(RANGES, RANGES):
        found = layouts(pattern, 23, (2, 5), queries, keys)
        assert sorted(head for layout in found for head in layout.heads) == [0, 1, 2]
        for layout in found:
            seen = set[tuple[int, int]]()
            for part in layout.parts:
                positions = [k for span in part.keys for k in range(*span)]
                for i, query in enumerate(range(*part.queries)):
                    pairs = [(query, k) for j, k in enumerate(positions) if j <= i + part.offset]
                    assert not seen.intersection(pairs)
                    seen.update(pairs)
            for head in layout.heads:
                assert seen == {
                    (i - queries[0], j - keys[0])
                    for i, j in itertools.product(range(*queries), range(*keys))
                    if j // block in pattern.key_blocks(i // block, count, head + 2)
                    and (j <= i or attention == "bidirectional")
                }


def test_equal_rows_are_computed_together() -> None:
    pattern = FixedPattern(block=4, attention="bidirectional")
    (layout,) = layouts(pattern, 23, (0, 2))
    assert layout.heads == (0, 1)
    assert [part.queries for part in layout.parts] == [(0, 16), (16, 23)]
    assert [part.keys for part in layout.parts] == [((0, 16), (20, 23)), ((12, 23),)]
    (causal,) = layouts(FixedPattern(block=4), 23, (0, 2))
    assert len(causal.parts) == 6


WRONG: list[tuple[Callable[[], object], str]] = [
    (lambda: FixedPattern(block=0), "block 0: use 1 or more"),
    (lambda: FixedPattern(attention="causal"), "'causal': use unidirectional or bidirectional"),  # type: ignore[arg-type]
    (lambda: FixedPattern(num_local_blocks=4, num_global_blocks=3), "3 does not divide num_local_blocks 4"),
    (lambda: FixedPattern(num_global_blocks=0), "num_global_blocks 0"),
    (lambda: FixedPattern(horizontal_global_attention=True), "needs bidirectional"),
    (lambda: FixedPattern(num_different_global_patterns=2), "2 global patterns need different_layout"),
    (
        lambda: FixedPattern(num_different_global_patterns=5, different_layout_per_head=True),
        "a window has 4 places",
    ),
    (lambda: VariablePattern(local_window_blocks=()), r"local_window_blocks \(\)"),
    (lambda: VariablePattern(global_block_end_indices=(1, 2)), "one end above each index"),
    (lambda: LongformerPattern(global_block_end_indices=(0,)), "one end above each index"),
    (
        lambda: FunctionPattern(function=lambda i, n: [i, n]).key_blocks(2, 5),
        r"query block 2 of 5 lists key blocks \[5\]: use 0 to 4",
    ),
    (
        lambda: layouts(FunctionPattern(function=lambda i, n: [-1]), 300, (0, 1)),
        r"query block 0 of 3 lists key blocks \[-1\]",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("make", "text"), WRONG)
def test_a_wrong_pattern_is_refused(make: Callable[[], object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


def test_a_function_gets_the_head_if_layouts_differ() -> None:
    pattern = FunctionPattern(function=lambda i, n, h: [h % n], different_layout_per_head=True)
    assert pattern.key_blocks(3, 8, 2) == (2,)
    assert pattern.key_blocks(3, 8, 5) == ()  # after the query block


def test_patterns_are_made_without_torch() -> None:
    code = "import sys, threed.core.block_patterns; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
