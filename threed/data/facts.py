"""Plain facts about tokens: the range of ids, the entropy of their frequencies, the bytes of text they stand for.

They are what a loss is read against: log(vocabulary) for a model that knows nothing, the unigram entropy for one that
knows only frequencies, and bytes per token to turn nats per token into bits per byte.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from threed.data.tokenizer import Tokenizer, Tokens

BLOCK = 1 << 22
# Entropy and bytes a token hardly change beyond this many tokens; decoding all of them could take hours.
MEASURED_TOKENS = 1 << 22


@dataclass(frozen=True)
class Facts:
    """Of a validation split: entropy of its token frequencies in nats a token, and bytes of text a token."""

    unigram_entropy: float
    bytes_per_token: float


def measure(tokens: Tokens, tokenizer: Tokenizer) -> Facts:
    """Measures the first `MEASURED_TOKENS` tokens (at least one) of a validation split."""
    return Facts(entropy(np.bincount(tokens[:MEASURED_TOKENS])), bytes_per_token(tokens, tokenizer))


def bytes_per_token(tokens: Tokens, tokenizer: Tokenizer) -> float:
    """Returns the mean bytes of text per token, of the first `MEASURED_TOKENS` tokens (at least one)."""
    part = tokens[:MEASURED_TOKENS]
    return tokenizer.count_bytes(part) / len(part)


def entropy(counts: Tokens) -> float:
    """Returns the entropy, in nats, of the frequencies that `counts` stand for: log n - (sum of c log c) / n."""
    seen = counts[counts > 0].astype(np.float64)
    total = seen.sum()
    return max(0.0, math.log(total) - float((seen * np.log(seen)).sum()) / float(total))


def id_range(tokens: Tokens) -> tuple[int, int]:
    """Returns the smallest and the largest id."""
    ranges = [(int(block.min()), int(block.max())) for _, block in _blocks(tokens)]
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def first_outside(tokens: Tokens, vocab: int) -> int | None:
    """Returns the offset of the first id that is negative or not below `vocab`."""
    for start, block in _blocks(tokens):
        outside = (block < 0) | (block >= vocab)
        if outside.any():
            return start + int(outside.argmax())
    return None


def _blocks(tokens: Tokens) -> Iterator[tuple[int, Tokens]]:
    for start in range(0, len(tokens), BLOCK):
        yield start, tokens[start : start + BLOCK]
