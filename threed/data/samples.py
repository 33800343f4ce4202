"""Fixed-length samples from a flat token sequence, in an order computed from (seed, index).

    samples = Samples(tokens, seq=128, seed=1)
    samples.batch(first, count)      the next `count` samples of a run that has consumed `first`
    Samples(tokens, seq=128, end=0)  token 0 ends a document; samples number their documents

The number of consumed samples is the only state that a checkpoint needs. The index of a sample in
the run determines its epoch and its position in the epoch. A permutation that depends on
(seed, epoch) maps the position to a window of tokens.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from numpy.typing import NDArray

from threed.core.messages import counted
from threed.data.tokenizer import Tokens
from threed.ops.positions import IGNORED

# Number of Feistel rounds. With four rounds and fewer than ten windows, some permutations occur in
# visibly more epochs than others. With six rounds, no such difference is visible.
ROUNDS = 6
# The multipliers of splitmix64's finalizer (Steele, Lea, Flood 2014, "Fast splittable pseudorandom
# number generators").
MIX_1, MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)

Words = NDArray[np.uint64]


class Samples:
    """Windows of `seq` tokens with stride `seq`, with a label for each token.

    The label of a token is the token that follows it, so a window reads `seq` + 1 tokens.

    With `shuffle`, sample i of the run is window permutation(seed, i // n)[i % n] of the n windows;
    otherwise it is window i % n. The index i counts the samples of the run over all ranks and
    epochs, and has no upper limit.

    Args:
        tokens: [n], token ids.
        seq: length of a window in tokens.
        seed: seed of the permutation.
        shuffle: whether to permute the windows in each epoch.
        name: description of the data, for error messages.
        end: id of the token that ends a document, if the documents of a window are to be kept
            apart (packing). This token has no label, because the next token belongs to another
            document.

    Raises:
        ValueError: if there are too few tokens for one sample.
    """

    def __init__(
        self, tokens: Tokens, seq: int, seed: int = 0, shuffle: bool = True, name: str = "data",
        end: int | None = None,
    ) -> None:  # fmt: skip
        if seq < 1:
            raise ValueError(f"sequence length {seq}: must be at least 1")
        if len(tokens) < seq + 1:
            raise ValueError(
                f"{name}: {counted(len(tokens), 'token')}, and one sample of sequence length {seq} takes {seq + 1}"
            )
        self.tokens = tokens
        self.seq = seq
        self.seed = seed
        self.shuffle = shuffle
        self.end = end
        self._windows = (len(tokens) - 1) // seq

    def __len__(self) -> int:
        """Returns the number of windows, i.e. of samples per epoch."""
        return self._windows

    def labels(self, first: int, last: int) -> Tokens:
        """Returns the labels of windows first … last - 1 as one array, without ignored labels.

        Without `shuffle`, these are the labels of samples first … last - 1.

        Args:
            first: index of the first window.
            last: index of the window after the last one.
        """
        start, stop = first * self.seq, last * self.seq
        labels = self.tokens[start + 1 : stop + 1]
        return labels if self.end is None else labels[self.tokens[start:stop] != self.end]

    def order(self, index: int) -> int:
        """Returns the window of sample `index` (>= 0) of the run."""
        return int(self._windows_of(np.asarray([index], dtype=np.uint64))[0])

    def batch(self, first: int, count: int) -> dict[str, torch.Tensor]:
        """Returns the samples first … first + count - 1 of the run.

        Args:
            first: index of the first sample, at least 0.
            count: number of samples.

        Returns:
            int64 tensors: "tokens" [count, seq], "labels" [count, seq] (for each token, the token
            that follows it) and "samples" [count] (the indices of the samples in the run). With
            `end`, also "documents" [count, seq] (the number of each token's document in its
            window); the label of a token `end` is `IGNORED`.

        Raises:
            ValueError: if `first` is negative.
        """
        if first < 0:
            raise ValueError(f"sample index {first}: must not be negative")
        indices = np.arange(first, first + count, dtype=np.int64)
        rows = np.empty((len(indices), self.seq + 1), dtype=np.int64)
        for row, window in zip(
            rows, self._windows_of(indices.astype(np.uint64)).tolist(), strict=True
        ):
            row[:] = self.tokens[window * self.seq : (window + 1) * self.seq + 1]
        both = torch.from_numpy(rows)
        batch = {
            "tokens": both[:, :-1].contiguous(),
            "labels": both[:, 1:].contiguous(),
            "samples": torch.from_numpy(indices),
        }
        if self.end is not None:
            ends = batch["tokens"] == self.end
            # A copy, because the labels of a single row share their memory with the tokens.
            batch["labels"] = batch["labels"].masked_fill(ends, IGNORED)
            batch["documents"] = ends.cumsum(1) - ends.long()
        return batch

    def _windows_of(self, indices: Words) -> Words:
        epochs, positions = np.divmod(indices, np.uint64(self._windows))
        if not self.shuffle:
            return positions
        windows = np.empty_like(positions)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            windows[here] = permute(positions[here], self._windows, self.seed, int(epoch))
        return windows


def permute(index: Words, size: int, seed: int, epoch: int) -> Words:
    """Maps indices by a pseudorandom permutation of [0, size) that depends on (seed, epoch).

    The permutation is computed, not stored, so its memory does not depend on `size`. A Feistel
    network permutes the numbers below the next power of four. A result is permuted again until it
    is below `size`, which takes fewer than four permutations on average. Source: Black and Rogaway
    2002, "Ciphers with arbitrary finite domains".

    Args:
        index: [n], uint64, indices in [0, size).
        size: number of windows.
        seed: seed of the run.
        epoch: number of the epoch.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = _round_keys(seed, epoch)
    value = _feistel(index, half, keys)
    while (outside := value >= size).any():
        value[outside] = _feistel(value[outside], half, keys)
    return value


def _round_keys(seed: int, epoch: int) -> Words:
    digest = hashlib.blake2b(
        f"threed samples {seed} {epoch}".encode(), digest_size=8 * ROUNDS
    ).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _feistel(value: Words, half: int, keys: Words) -> Words:
    """Permutes the numbers that have 2 * half bits.

    Each round XORs a hash of one half of the bits into the other half. A round is invertible, so
    the result is a permutation.
    """
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = value >> bits, value & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << bits) | right


def _mix(word: Words) -> Words:
    word = (word ^ (word >> np.uint64(30))) * MIX_1
    word = (word ^ (word >> np.uint64(27))) * MIX_2
    return word ^ (word >> np.uint64(31))
