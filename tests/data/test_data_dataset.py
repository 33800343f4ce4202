"""`open_data` end to end: splits, facts, caching, processes at once, and problems found beforehand."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from threed.data import ByteTokenizer, Data, open_data, tokenize_to_megatron
from threed.data import dataset as dataset_module
from threed.data.dataset import find_problems
from threed.data.sources import TextSource, standard_library

FORK = multiprocessing.get_context("fork")


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def default(shared_cache: Path) -> Data:
    return open_data(None, "bytes", split=0.05, seq=128, seed=1, cache=shared_cache)


def write_text(path: Path, size: int = 5000) -> bytes:
    content = bytes(np.random.default_rng(size).integers(97, 123, size, dtype=np.uint8))
    path.write_bytes(content)
    return content


def test_the_default_corpus_is_this_pythons_sources(default: Data) -> None:
    source = standard_library()
    assert default.sha256 == source.sha256()
    assert default.vocab == 257
    assert default.notice == ""
    assert f"{len(source.files)} files" in default.description
    # Every byte of every file that is not empty is there once, and one end of text after each.
    documents = sum(file.size > 0 for file in source.files)
    assert len(default.train.tokens) + len(default.valid.tokens) == source.size + documents


def test_the_default_split_keeps_whole_files_apart_by_name(default: Data) -> None:
    contents = {file.path.read_bytes() for file in standard_library().files if file.path}
    valid = np.asarray(default.valid.tokens)
    ends = np.flatnonzero(valid == 256)
    held_out = [bytes(part[part < 256].astype(np.uint8)) for part in np.split(valid, ends + 1)[:-1]]
    assert len(held_out) > 10
    assert set(held_out) <= contents
    assert 0.02 < len(valid) / (len(valid) + len(default.train.tokens)) < 0.1


def test_a_files_side_does_not_depend_on_the_others() -> None:
    files = standard_library().files
    train, valid = dataset_module._by_path(files, 0.05)
    assert sorted([*train, *valid], key=lambda file: file.name) == list(files)
    some = tuple(file for file in files if not file.name.startswith("pydoc_data/"))
    _, fewer = dataset_module._by_path(some, 0.05)
    assert fewer == tuple(file for file in valid if file in some)
    assert {f.name for f in valid} <= {f.name for f in dataset_module._by_path(files, 0.2)[1]}


def test_facts_agree_with_a_plain_count(default: Data) -> None:
    counts = Counter(default.valid.tokens.tolist())
    total = sum(counts.values())
    entropy = -sum(c / total * math.log(c / total) for c in counts.values())
    assert default.unigram_entropy == pytest.approx(entropy, rel=1e-12)
    assert 2.5 < default.unigram_entropy < default.uniform_entropy == math.log(257)
    assert default.bytes_per_token == pytest.approx(1 - counts[256] / total, rel=1e-12)
    labels = default.valid.tokens[1 : 3 * default.valid.seq + 1]
    assert default.bytes_per_label(3) == pytest.approx(float((labels < 256).mean()), rel=1e-12)


def test_text_splits_at_the_end(tmp_path: Path) -> None:
    content = write_text(tmp_path / "a.txt", 4999)
    data = open_data(
        str(tmp_path / "a.txt"), "bytes", split=0.05, seq=16, seed=1, cache=tmp_path / "c"
    )
    assert [*data.train.tokens.tolist(), *data.valid.tokens.tolist()] == [*content, 256]
    assert (len(data.train.tokens), len(data.valid.tokens)) == (4750, 250)
    assert data.train.shuffle
    assert not data.valid.shuffle
    assert data.valid.batch(0, 2)["tokens"].flatten().tolist() == list(content[4750:4782])
    assert (data.train.seed, data.train.seq, data.valid.seq) == (1, 16, 16)
    assert data.train.tokens.dtype == np.uint16


def test_batches_are_the_same_in_a_new_cache_and_at_a_new_place(tmp_path: Path) -> None:
    write_text(tmp_path / "a.txt")
    first = open_data(str(tmp_path / "a.txt"), "bytes", 0.1, 32, seed=3, cache=tmp_path / "c1")
    (tmp_path / "moved").mkdir()
    (tmp_path / "a.txt").rename(tmp_path / "moved" / "a.txt")
    second = open_data(
        str(tmp_path / "moved" / "a.txt"), "bytes", 0.1, 32, seed=3, cache=tmp_path / "c2"
    )
    assert first.sha256 == second.sha256
    for key, value in first.train.batch(1000, 16).items():
        assert torch.equal(value, second.train.batch(1000, 16)[key])
    other = open_data(
        str(tmp_path / "moved" / "a.txt"), "bytes", 0.1, 32, seed=4, cache=tmp_path / "c2"
    )
    assert not torch.equal(first.train.batch(0, 16)["tokens"], other.train.batch(0, 16)["tokens"])


def test_a_second_start_reads_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path / "a.txt")
    monkeypatch.setattr(dataset_module, "FRESH_S", 0.0)
    arguments = (str(tmp_path / "a.txt"), "bytes", 0.1, 32, 3, tmp_path / "c")
    first = open_data(*arguments)

    def refuse(*_: object) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr(TextSource, "sha256", refuse)
    monkeypatch.setattr(dataset_module, "_tokenize", refuse)
    second = open_data(*arguments)
    assert np.array_equal(first.train.tokens, second.train.tokens)
    assert (first.sha256, first.unigram_entropy) == (second.sha256, second.unigram_entropy)


def test_changed_text_is_noticed_even_when_size_and_time_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    old = time.time() - 100
    seen = []
    for letter in (b"a", b"b"):
        path.write_bytes(letter * 1000)
        os.utime(path, (old, old))
        seen.append(open_data(str(path), "bytes", 0.1, 8, 1, tmp_path / "c"))
    assert seen[0].sha256 != seen[1].sha256
    assert (seen[0].train.tokens[0], seen[1].train.tokens[0]) == (ord("a"), ord("b"))


def test_the_tokenizer_and_the_split_are_part_of_the_key(tmp_path: Path) -> None:
    write_text(tmp_path / "a.txt")
    ByteTokenizer().save_hf(tmp_path / "hf")
    plain = open_data(str(tmp_path / "a.txt"), "bytes", 0.1, 8, 1, tmp_path / "c")
    by_json = open_data(
        str(tmp_path / "a.txt"), str(tmp_path / "hf" / "tokenizer.json"), 0.1, 8, 1, tmp_path / "c"
    )
    smaller = open_data(str(tmp_path / "a.txt"), "bytes", 0.2, 8, 1, tmp_path / "c")
    assert len(list((tmp_path / "c").glob("tokens-*/tokens.bin"))) == 3
    assert np.array_equal(plain.train.tokens, by_json.train.tokens)
    assert plain.bytes_per_token == by_json.bytes_per_token
    assert len(smaller.valid.tokens) == 1000


def test_megatron_gives_the_same_batches_as_the_text(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"document {i} " * (i % 7 + 1)}) for i in range(60)]
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    tokenize_to_megatron(tmp_path / "d.jsonl", tmp_path / "out", ByteTokenizer())
    text = open_data(str(tmp_path / "d.jsonl"), "bytes", 0.1, 16, 1, tmp_path / "c")
    pair = open_data(str(tmp_path / "out"), "bytes", 0.1, 16, 1, tmp_path / "c")
    for key, value in text.train.batch(5, 40).items():
        assert torch.equal(value, pair.train.batch(5, 40)[key])
    assert np.array_equal(text.valid.tokens, pair.valid.tokens)
    assert text.unigram_entropy == pair.unigram_entropy
    assert text.bytes_per_token == pair.bytes_per_token
    assert (
        open_data(str(tmp_path / "out.idx"), "bytes", 0.1, 16, 1, tmp_path / "c").sha256
        == pair.sha256
    )


@pytest.mark.parametrize(("bad", "code"), [(257, 8), (-1, 4)])
def test_ids_outside_the_vocabulary_are_named_with_their_offset(
    tmp_path: Path, bad: int, code: int
) -> None:
    import struct

    tokens = np.full(1000, 7, dtype={8: "<u2", 4: "<i4"}[code])
    tokens[[613, 900]] = bad
    (tmp_path / "g.bin").write_bytes(tokens.tobytes())
    (tmp_path / "g.idx").write_bytes(
        b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, 1, 2) + struct.pack("<i3q", 1000, 0, 0, 1)
    )
    for _ in range(2):  # the second time from the cache
        with pytest.raises(
            ValueError,
            match=rf"token {bad} at offset 613 is outside the 257 ids .*--data\.tokenizer",
        ):
            open_data(str(tmp_path / "g"), "bytes", 0.1, 16, 1, tmp_path / "c")


def test_four_processes_at_once_agree_and_leave_one_cache(tmp_path: Path) -> None:
    write_text(tmp_path / "a.txt", 300_000)
    report = FORK.SimpleQueue()

    def work() -> None:
        data = open_data(str(tmp_path / "a.txt"), "bytes", 0.05, 64, 1, tmp_path / "c")
        report.put((data.sha256, data.unigram_entropy, data.train.batch(0, 8)["tokens"].tolist()))

    processes = [FORK.Process(target=work) for _ in range(4)]
    for process in processes:
        process.start()
    found = [report.get() for _ in processes]
    for process in processes:
        process.join(timeout=120)
        assert process.exitcode == 0
    assert all(one == found[0] for one in found)
    assert len(list((tmp_path / "c").glob("tokens-*/tokens.bin"))) == 1
    assert not list((tmp_path / "c").glob("*.building-*"))


def test_a_source_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text(tmp_path / "a.txt")
    real = dataset_module._write_tokens

    def and_grow(*arguments: object) -> int:
        written = real(*arguments)  # type: ignore[arg-type]
        write_text(tmp_path / "a.txt", 6000)
        return written

    monkeypatch.setattr(dataset_module, "_write_tokens", and_grow)
    with pytest.raises(ValueError, match="changed while it was read"):
        open_data(str(tmp_path / "a.txt"), "bytes", 0.1, 8, 1, tmp_path / "c")
    assert not list((tmp_path / "c").glob("tokens-*/"))


def test_too_little_data_is_refused_with_advice(tmp_path: Path) -> None:
    write_text(tmp_path / "a.txt", 99)
    path = str(tmp_path / "a.txt")
    with pytest.raises(
        ValueError, match=r"training split: 90 tokens, .* takes 129\. Give more data, or a smaller"
    ):
        open_data(path, "bytes", 0.1, 128, 1, tmp_path / "c")
    with pytest.raises(
        ValueError, match=r"validation split: 10 tokens, .* takes 33\. .* or a larger --data\.split"
    ):
        open_data(path, "bytes", 0.1, 32, 1, tmp_path / "c")
    with pytest.raises(ValueError, match="leaves no validation data"):
        open_data(path, "bytes", 0.001, 32, 1, tmp_path / "c")
    (tmp_path / "blank.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match="no text in it"):
        open_data(str(tmp_path / "blank.jsonl"), "bytes", 0.1, 32, 1, tmp_path / "c")


def test_an_unwritable_cache_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    write_text(tmp_path / "a.txt")
    (tmp_path / "b.md").write_text("x")
    data = open_data(str(tmp_path), "bytes", 0.1, 8, 1, tmp_path / "a.txt" / "cache")
    assert "ignored b.md" in data.notice
    assert "not writable" in data.notice


def test_sound_data_have_no_problems(tmp_path: Path) -> None:
    write_text(tmp_path / "a.txt")
    assert find_problems(None, "bytes", 0.05) == []
    assert find_problems(str(tmp_path), "bytes", 0.05) == []
    tokenize_to_megatron(tmp_path / "a.txt", tmp_path / "out", ByteTokenizer())
    assert find_problems(str(tmp_path / "out"), "bytes", 0.05) == []


def test_all_problems_are_found_at_once() -> None:
    problems = find_problems("/no/such/folder", "/no/tokenizer.json", 1.5)
    assert len(problems) == 3
    assert "--data.split 1.5" in problems[0]
    assert "--data.tokenizer bytes" in problems[1]
    assert "/no/such/folder does not exist" in problems[2]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "is empty"),
        ("a.parquet", b"PAR1", "nothing to read here"),
        ("a.jsonl", b"{}\n", "line 1: no key 'text'"),
        ("a.bin", b"xxxx", "a.idx is missing"),
        ("a.idx", b"xxxx", "a.bin is missing"),
    ],
)
def test_each_problem_names_the_file_and_the_fix(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    (problem,) = find_problems(str(tmp_path / name), "bytes", 0.05)
    assert message in problem
    assert str(tmp_path) in problem


def test_a_split_outside_zero_and_one_is_refused(tmp_path: Path) -> None:
    for split in (0.0, 1.0, -0.1, float("nan")):
        assert len(find_problems(None, "bytes", split)) == 1
        with pytest.raises(ValueError, match=r"--data\.split"):
            open_data(None, "bytes", split, 8, 1, tmp_path)
