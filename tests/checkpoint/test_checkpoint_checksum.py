"""Hashes of files: the native sums are those of numpy, streams and files give the same, and every change is found."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import numpy as np
import pytest

from threed.checkpoint import files
from threed.checkpoint.files import (
    BLOCK,
    CHUNK,
    PIECE,
    Hashes,
    combined,
    start_hashing,
    sums,
    tree_hash,
)
from threed.core import native

needs_native = pytest.mark.skipif(native.library("cpu") is None, reason=native.status()["cpu"])


def keys() -> np.ndarray:
    """Splitmix64 from 0."""
    out, mask, state = [], 2**64 - 1, 0
    for _ in range(CHUNK // 8 + 2):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        out.append(z ^ (z >> 31))
    return np.array(out, np.uint64)


def plain_sums(data: bytes) -> bytes:
    words, out = keys().view(np.uint32), []
    for at in range(0, len(data), CHUNK):
        chunk = np.frombuffer(data[at : at + CHUNK].ljust(CHUNK, b"\0"), np.uint32)
        for shift in (0, 4):
            mixed = (chunk + words[shift : shift + CHUNK // 4]).astype(np.uint64)
            out.append((mixed[::2] * mixed[1::2]).sum(dtype=np.uint64))
    return np.array(out, np.uint64).tobytes()


@needs_native
@pytest.mark.parametrize("instructions", [None, "avx512", "avx2", "portable"])
def test_the_sums_are_those_of_numpy(instructions: str | None) -> None:
    draw = np.random.default_rng(1)
    for n in (1, 7, 8, 4095, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 12):
        data = draw.bytes(n)
        try:
            assert sums(data, instructions) == plain_sums(data)
            # at an odd byte
            assert sums(memoryview(b"x" + data)[1:], instructions) == plain_sums(data)
        except ValueError as error:
            pytest.skip(str(error))


def whole(data: bytes, path: Path) -> Hashes:
    path.write_bytes(data)
    return Hashes(tree_hash(path), files.checksum(path))


def test_a_stream_of_blocks_has_the_hashes_of_its_file(tmp_path: Path) -> None:
    draw = random.Random(2)
    for n in (1, 4095, CHUNK, PIECE - 1, PIECE + 4097, BLOCK - 1, BLOCK, 2 * BLOCK + 70_001):
        data = draw.randbytes(n)
        blocks = [data[at : at + BLOCK] for at in range(0, n, BLOCK)]
        work = [start_hashing(memoryview(block), tree=True) for block in blocks]
        assert combined([one.result() for one in work]) == whole(data, tmp_path / "f")
        tree = hashlib.sha256(b"".join(hashlib.sha256(block).digest() for block in blocks))
        assert tree_hash(tmp_path / "f") == tree.hexdigest()


@needs_native
def test_every_flip_exchange_and_shift_is_found() -> None:
    """Bits of zeros, of ones and of numbers; words that change places; signs of two numbers."""
    draw = random.Random(3)
    for base in (
        bytes(CHUNK),
        b"\xff" * CHUNK,
        np.random.default_rng(4).normal(size=CHUNK // 4).astype("f4").tobytes(),
    ):
        before = sums(base)
        for _ in range(300):
            data, (i, j) = bytearray(base), draw.sample(range(CHUNK // 4), 2)
            action = draw.randrange(3)
            if action == 0:
                data[draw.randrange(CHUNK)] ^= 1 << draw.randrange(8)
            elif action == 1:
                data[4 * i + 3] ^= 0x80
                data[4 * j + 3] ^= 0x80
            else:
                data[4 * i : 4 * i + 4], data[4 * j : 4 * j + 4] = (
                    data[4 * j : 4 * j + 4],
                    data[4 * i : 4 * i + 4],
                )
            assert (sums(data) == before) == (data == base)


def test_without_the_library_the_tree_is_what_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "function", lambda *_: None)
    assert whole(b"abc", tmp_path / "f").sum is None
    found = start_hashing(memoryview(b"abc"), tree=False).result()
    assert combined([found]) == Hashes(tree_hash(tmp_path / "f"), None)
