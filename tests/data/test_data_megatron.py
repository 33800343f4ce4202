"""Megatron pairs: a golden file written by hand, round trips, and refusal of what does not fit together."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from threed.data.megatron import (
    MegatronWriter,
    is_megatron,
    open_tokens,
    pair_of,
    read_index,
    tokenize_to_megatron,
)
from threed.data.tokenizer import ByteTokenizer, load_tokenizer


def golden_index(**changes: Any) -> bytes:
    """Write, field by field, the .idx of documents [5 6 7] [8] and [9 10], the last in two sequences; uint16."""
    field: dict[str, Any] = {
        "magic": b"MMIDIDX\x00\x00",
        "version": 1,
        "code": 8,
        "sequences": 4,
        "indices": 4,
        "lengths": (3, 1, 1, 1),
        "offsets": (0, 6, 8, 10),
        "documents": (0, 1, 2, 4),
        **changes,
    }
    return b"".join(
        [
            field["magic"],
            struct.pack("<Q", field["version"]),
            struct.pack("<B", field["code"]),
            struct.pack("<Q", field["sequences"]),
            struct.pack("<Q", field["indices"]),
            struct.pack("<4i", *field["lengths"]),
            struct.pack("<4q", *field["offsets"]),
            struct.pack("<4q", *field["documents"]),
        ]
    )


def write_golden(folder: Path, **changes: Any) -> Path:
    (folder / "g.bin").write_bytes(struct.pack("<6H", 5, 6, 7, 8, 9, 10))
    (folder / "g.idx").write_bytes(golden_index(**changes))
    return folder / "g"


def test_reads_the_golden_pair_by_prefix_or_either_file(tmp_path: Path) -> None:
    prefix = write_golden(tmp_path)
    for name in (prefix, tmp_path / "g.bin", tmp_path / "g.idx"):
        assert is_megatron(name)
        tokens = open_tokens(name)
        assert isinstance(tokens, np.memmap)
        assert (tokens.dtype, tokens.tolist()) == (np.uint16, [5, 6, 7, 8, 9, 10])
    index = read_index(tmp_path / "g.idx")
    assert index.lengths.tolist() == [3, 1, 1, 1]
    assert index.offsets.tolist() == [0, 6, 8, 10]
    assert index.documents.tolist() == [0, 1, 2, 4]


def test_writes_the_golden_pair(tmp_path: Path) -> None:
    with (tmp_path / "w.bin").open("wb") as data, (tmp_path / "w.idx").open("wb") as index:
        writer = MegatronWriter(data, np.dtype("<u2"), longest=3)
        writer.add(np.array([5, 6]))
        writer.add(np.array([7]))
        writer.end_document()
        writer.add(np.array([8]))
        writer.end_document()
        writer.add(np.array([9, 10]))
        writer.end_document()
        writer.write_index(index)
    assert (tmp_path / "w.bin").read_bytes() == struct.pack("<6H", 5, 6, 7, 8, 9, 10)
    expected = [b"MMIDIDX\x00\x00", struct.pack("<QBQQ", 1, 8, 3, 4), struct.pack("<3i", 3, 1, 2)]
    expected += [struct.pack("<3q", 0, 6, 8), struct.pack("<4q", 0, 1, 2, 3)]
    assert (tmp_path / "w.idx").read_bytes() == b"".join(expected)
    assert (writer.documents, writer.tokens) == (3, 6)


def test_a_document_beyond_the_longest_sequence_takes_several(tmp_path: Path) -> None:
    with (tmp_path / "w.bin").open("wb") as data, (tmp_path / "w.idx").open("wb") as index:
        writer = MegatronWriter(data, np.dtype("<i4"), longest=4)
        writer.add(np.arange(3))
        writer.add(np.arange(3, 10))
        writer.end_document()
        writer.add(np.arange(10, 12))
        writer.end_document()
        writer.write_index(index)
    assert open_tokens(tmp_path / "w").tolist() == list(range(12))
    assert read_index(tmp_path / "w.idx").lengths.tolist() == [4, 4, 2, 2]
    assert read_index(tmp_path / "w.idx").documents.tolist() == [0, 3, 4]


@pytest.mark.parametrize(
    ("code", "form"), [(1, "B"), (2, "b"), (3, "h"), (4, "i"), (5, "q"), (8, "H")]
)
def test_reads_every_token_dtype(tmp_path: Path, code: int, form: str) -> None:
    size = struct.calcsize("<" + form)
    (tmp_path / "g.bin").write_bytes(struct.pack("<6" + form, 1, 2, 3, 4, 5, 127))
    (tmp_path / "g.idx").write_bytes(
        golden_index(code=code, offsets=(0, 3 * size, 4 * size, 5 * size))
    )
    tokens = open_tokens(tmp_path / "g")
    assert tokens.dtype.itemsize == size
    assert tokens.tolist() == [1, 2, 3, 4, 5, 127]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"magic": b"MMIDIDX\x00\x01"}, "is not a Megatron index"),
        ({"version": 2}, "index version 2"),
        ({"code": 9}, "dtype code 9 is not a token dtype"),
        ({"code": 6}, "dtype code 6 is not a token dtype"),
        ({"sequences": 5}, "truncated, damaged, or multimodal"),
        ({"sequences": 2**62}, "truncated, damaged, or multimodal"),
        ({"documents": (0, 1, 2, 3)}, "document indices do not increase from 0 to 4"),
        ({"documents": (0, 3, 2, 4)}, "document indices do not increase"),
        ({"offsets": (0, 8, 6, 10)}, "are not contiguous"),
        ({"lengths": (3, 1, 1, 2)}, "has 12 bytes and g.idx requires 14"),
        ({"lengths": (3, 1, 1, -1)}, "are not contiguous"),
    ],
)
def test_an_unsound_index_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    prefix = write_golden(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        open_tokens(prefix)


def test_halves_and_empty_files_are_refused(tmp_path: Path) -> None:
    prefix = write_golden(tmp_path)
    for length in (0, 8, 20, 40):
        (tmp_path / "g.idx").write_bytes(golden_index()[:length])
        with pytest.raises(ValueError, match=r"g\.idx"):
            open_tokens(prefix)
    (tmp_path / "g.idx").unlink()
    with pytest.raises(
        ValueError,
        match=r"g\.idx is missing\. A Megatron data set is a pair: put it next to g\.bin",
    ):
        open_tokens(prefix)
    write_golden(tmp_path)
    (tmp_path / "g.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"g\.bin is empty"):
        open_tokens(prefix)
    (tmp_path / "g.bin").unlink()
    with pytest.raises(ValueError, match=r"g\.bin is missing"):
        open_tokens(prefix)


@settings(max_examples=40, deadline=None)
@given(texts=st.lists(st.text(min_size=1, max_size=50), min_size=1, max_size=20))
def test_jsonl_round_trip(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    folder = tmp_path_factory.mktemp("round")
    (folder / "d.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    summary = tokenize_to_megatron(folder / "d.jsonl", folder / "out", ByteTokenizer())
    tokens, index = open_tokens(folder / "out"), read_index(folder / "out.idx")
    assert (summary.documents, summary.tokens, summary.dtype) == (len(texts), len(tokens), "uint16")
    assert summary.files == (folder / "out.bin", folder / "out.idx")
    ends = np.cumsum(index.lengths)
    for text, first, end in zip(texts, [0, *ends[:-1]], ends, strict=True):
        assert tokens[first:end].tolist() == [*text.encode(), 256]
    assert index.documents.tolist() == list(range(len(texts) + 1))
    assert sorted(path.name for path in folder.iterdir()) == ["d.jsonl", "out.bin", "out.idx"]


def test_a_large_vocabulary_takes_int32(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    backend = Tokenizer(models.WordLevel({"?": 0, "high": 70_000, "</s>": 1}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["</s>"])
    backend.save(str(tmp_path / "t.json"))
    (tmp_path / "a.txt").write_text("high low high")
    summary = tokenize_to_megatron(
        tmp_path / "a.txt", tmp_path / "sub" / "out.bin", load_tokenizer(str(tmp_path / "t.json"))
    )
    assert summary.dtype == "int32"
    assert open_tokens(tmp_path / "sub" / "out").tolist() == [70_000, 0, 70_000, 1]


def test_a_failed_write_leaves_nothing_and_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\nbroken\n')
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 2"):
        tokenize_to_megatron(tmp_path / "bad.jsonl", tmp_path / "out", ByteTokenizer())
    (tmp_path / "blank.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match=r"no text in it"):
        tokenize_to_megatron(tmp_path / "blank.jsonl", tmp_path / "out", ByteTokenizer())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.jsonl", "blank.jsonl"]
    (tmp_path / "good.txt").write_text("text")
    tokenize_to_megatron(tmp_path / "good.txt", tmp_path / "out", ByteTokenizer())
    before = (tmp_path / "out.bin").read_bytes()
    with pytest.raises(ValueError, match=r"out\.bin exists\. Remove it"):
        tokenize_to_megatron(tmp_path / "good.txt", tmp_path / "out.idx", ByteTokenizer())
    assert (tmp_path / "out.bin").read_bytes() == before


def test_names(tmp_path: Path) -> None:
    assert pair_of(Path("a/data.v1")) == (Path("a/data.v1.bin"), Path("a/data.v1.idx"))
    assert pair_of(Path("a/data.idx")) == (Path("a/data.bin"), Path("a/data.idx"))
    assert not is_megatron(tmp_path)
    assert not is_megatron(tmp_path / "missing")
    assert is_megatron(tmp_path / "missing.bin")


def test_memory_stays_small_however_large_the_text(tmp_path: Path) -> None:
    with (tmp_path / "large.txt").open("wb") as file:
        for _ in range(64):
            file.write(b"many words in one line \n" * 43_691)  # a little over 1 MiB
    tracemalloc.start()
    summary = tokenize_to_megatron(tmp_path / "large.txt", tmp_path / "out", ByteTokenizer())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert summary.tokens == (tmp_path / "large.txt").stat().st_size + 1
    # a group of pieces is 4 MiB, its tokens 8, and each exists twice for a moment
    assert peak < 32 << 20
