"""Text sources: which files, which documents, whole and in pieces, with errors that name file and line."""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from threed.data import sources
from threed.data.dataset import find_problems
from threed.data.encode import encode
from threed.data.sources import (
    EXCLUDED_FOLDERS,
    Piece,
    TextFile,
    find_text,
    read_pieces,
    standard_library,
)
from threed.data.tokenizer import ByteTokenizer


@dataclass(frozen=True)
class Held(TextFile):
    """A file in memory."""

    content: bytes

    def open(self) -> BinaryIO:
        return io.BytesIO(self.content)


def held(name: str, content: bytes) -> TextFile:
    return Held(name, Path(name), content)


def write_lines(path: Path, *lines: str) -> Path:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def test_a_folder_is_read_recursively_in_name_order(tmp_path: Path) -> None:
    (tmp_path / "b" / "deep").mkdir(parents=True)
    (tmp_path / "b" / "deep" / "x.txt").write_text("three")
    (tmp_path / "a.txt").write_text("one")
    write_lines(tmp_path / "b" / "a.jsonl", '{"text": "two"}')
    (tmp_path / "README.md").write_text("left out")
    (tmp_path / ".hidden.txt").write_text("left out")
    source = find_text(tmp_path)
    assert [file.name for file in source.files] == ["a.txt", "b/a.jsonl", "b/deep/x.txt"]
    assert list(source.pieces()) == [
        Piece(b"one", True),
        Piece(b"two", True),
        Piece(b"three", True),
    ]
    assert source.notice == f"{tmp_path}: ignored README.md"


def test_links_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x.txt").write_text("x")
    (tmp_path / "data" / "linked").symlink_to(tmp_path / "other")
    (tmp_path / "data" / "circle").symlink_to(tmp_path / "data")
    assert [file.name for file in find_text(tmp_path / "data").files] == ["linked/x.txt"]


def test_what_cannot_be_read_is_refused_with_advice(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        find_text(tmp_path / "missing.txt")
    (tmp_path / "data.parquet").write_text("x")
    with pytest.raises(
        ValueError, match=r"data\.parquet: nothing to read here\. --data\.path takes \.txt, \.jsonl"
    ):
        find_text(tmp_path / "data.parquet")
    with pytest.raises(ValueError, match=r"nothing to read here \(found data\.parquet\)"):
        find_text(tmp_path)
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match="is empty"):
        find_text(tmp_path / "empty.txt")
    with pytest.raises(ValueError, match="is empty"):
        find_text(tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"line 3: invalid JSON"),
        ("[1]", r"line 3: a JSON list, but an object with a key 'text' is required"),
        ('{"content": "x", "id": 1}', r"line 3: no key 'text' among \['content', 'id'\]"),
        (
            '{"messages": []}',
            r"line 3: no key 'text' among \['messages'\]. threed .* use TRL's SFTTrainer",
        ),
        ('{"text": null}', r"line 3: 'text' is a NoneType; it must be a string"),
        ('{"text": ["x"]}', r"line 3: 'text' is a list"),
    ],
)
def test_a_bad_jsonl_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = write_lines(tmp_path / "d.jsonl", '{"text": "fine"}', "", line)
    with pytest.raises(ValueError, match=rf"d\.jsonl, {message}"):
        list(find_text(path).pieces())


def test_a_jsonl_line_that_is_no_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    for any_bytes in (False, True):
        with pytest.raises(
            ValueError, match=r"d\.jsonl, line 2 is not UTF-8: invalid byte 0xff at byte 24 "
        ):
            list(find_text(tmp_path / "d.jsonl").pieces(any_bytes))


@given(texts=st.lists(st.text()), ascii_only=st.booleans())
def test_jsonl_gives_every_text(texts: list[str], ascii_only: bool) -> None:
    lines = "".join(
        json.dumps({"id": 1, "text": text}, ensure_ascii=ascii_only) + "\r\n" for text in texts
    )
    file = held("d.jsonl", ("\ufeff" + lines).encode("utf-8"))
    assert list(read_pieces(file)) == [Piece(text.encode(), True) for text in texts if text]


def test_jsonl_replaces_a_lone_surrogate() -> None:
    assert list(read_pieces(held("d.jsonl", b'{"text": "a\\ud800"}'))) == [Piece(b"a?", True)]


@settings(max_examples=300, deadline=None)
@given(text=st.text(alphabet="ab \n\té日🙂", max_size=120), size=st.integers(1, 20))
def test_pieces_join_to_the_whole_and_split_no_character(text: str, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "PIECE_BYTES", max(size, 4))
        pieces = list(read_pieces(held("d.txt", text.encode())))
    assert b"".join(piece.data for piece in pieces) == text.encode()
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True] * bool(text)
    for piece in pieces:
        assert piece.data.decode("utf-8")
        assert len(piece.data) <= 2 * max(size, 4)


def test_pieces_are_cut_between_lines_then_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PIECE_BYTES", 16)
    lines = [
        piece.data for piece in read_pieces(held("d.txt", b"one two\nthree four\nfive six\n" * 4))
    ]
    assert all(data.startswith(b"\n") for data in lines[1:])
    words = [piece.data for piece in read_pieces(held("d.txt", b"one two three four five " * 4))]
    assert all(data.startswith(b" ") for data in words[1:])
    assert len(lines) > 2 < len(words)


def test_any_bytes_pass_through_a_text_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PIECE_BYTES", 64)
    data = bytes(range(128, 192)) * 20  # nothing but UTF-8 continuation bytes
    assert (
        b"".join(piece.data for piece in read_pieces(held("d.txt", data), any_bytes=True)) == data
    )


@pytest.mark.parametrize("size", [64, 1 << 20])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("naïve text. ".encode("latin-1") * 30, "is not UTF-8: invalid byte 0xef at byte 2 "),
        (b"good " * 99 + b"\xff", "is not UTF-8: invalid byte 0xff at byte 495 "),
        (
            b"\xef\xbb\xbf" + b"good " * 99 + b"\xe9!",
            "is not UTF-8: invalid byte 0xe9 at byte 498 ",
        ),
        ("é".encode()[:1], "is not UTF-8: invalid byte 0xc3 at byte 0 "),
        (
            "some text".encode("utf-16"),
            "begins with the byte-order mark of UTF-16, at byte 0: .*iconv -f UTF-16 -t UTF-8",
        ),
        (
            b"\xfe\xff" + "some text".encode("utf-16-be"),
            "begins with the byte-order mark of UTF-16",
        ),
        ("some text".encode("utf-32"), "begins with the byte-order mark of UTF-32"),
        (
            "some text".encode("utf-16-le"),
            "has a NUL at byte 1 and many more: it looks like UTF-16",
        ),
    ],
)
def test_text_that_is_not_utf8_is_refused_with_its_place(
    content: bytes, message: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "PIECE_BYTES", size)
    for name in ("d.txt", "d.jsonl"):
        place = r"d\.txt " if name == "d.txt" else r"d\.jsonl, line 1 "
        with pytest.raises(ValueError, match=place + message):
            list(read_pieces(held(name, content)))
    assert b"".join(piece.data for piece in read_pieces(held("d.txt", content), any_bytes=True)) in (
        content, content.removeprefix(b"\xef\xbb\xbf"),
    )  # fmt: skip


def test_the_mark_of_utf8_is_no_part_of_the_text() -> None:
    for any_bytes in (False, True):
        assert list(read_pieces(held("d.txt", b"\xef\xbb\xbfa \xef\xbb\xbf"), any_bytes)) == [
            Piece(b"a \xef\xbb\xbf", True)
        ]
        assert list(read_pieces(held("d.txt", b"\xef\xbb\xbf"), any_bytes)) == []


def test_nuls_in_a_text_are_text() -> None:
    assert list(read_pieces(held("d.txt", b"a\x00bcdefgh"))) == [Piece(b"a\x00bcdefgh", True)]


def test_every_document_ends_with_the_end_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("threed.data.encode.GROUP_BYTES", 3)
    pieces = [Piece(b"ab", False), Piece(b"c", True), Piece(b"d", True)]
    encoded = list(encode(iter(pieces), ByteTokenizer()))
    assert [(tokens.tolist(), ends) for tokens, ends in encoded] == [
        ([97, 98], False),
        ([99, 256], True),
        ([100, 256], True),
    ]


class WithBos(ByteTokenizer):
    """Documents begin with 7."""

    bos_ids = (7,)


def test_every_document_begins_with_bos_if_the_tokenizer_has_it_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("threed.data.encode.GROUP_BYTES", 3)
    pieces = [Piece(b"ab", False), Piece(b"c", True), Piece(b"d", True), Piece(b"e", True)]
    encoded = [tokens.tolist() for tokens, _ in encode(iter(pieces), WithBos())]
    assert encoded == [[7, 97, 98], [99, 256], [7, 100, 256], [7, 101, 256]]


def test_sha256_is_over_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"xy")
    expected = hashlib.sha256(
        (5).to_bytes(8, "little") + b"a.txt" + (2).to_bytes(8, "little") + b"xy"
    ).hexdigest()
    assert find_text(tmp_path).sha256() == find_text(tmp_path / "a.txt").sha256() == expected
    (tmp_path / "a.txt").rename(tmp_path / "b.txt")
    assert find_text(tmp_path).sha256() != expected


def test_the_stamp_follows_size_and_time(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"xy")
    first = find_text(path).stamp()
    assert find_text(path).stamp() == first
    path.write_bytes(b"xyz")
    assert find_text(path).stamp()[0] != first[0]


def test_the_standard_library_has_sources_and_no_tests() -> None:
    source = standard_library()
    names = [file.name for file in source.files]
    assert names == sorted(names)
    assert {"ast.py", "json/decoder.py"} <= set(names)
    assert not [name for name in names if EXCLUDED_FOLDERS & set(name.split("/"))]
    assert all(name.endswith(".py") for name in names)
    assert source.size > 5_000_000
    assert (source.split_by, source.notice) == ("path", "")


def test_without_sources_the_refusal_says_what_to_give(tmp_path: Path) -> None:
    (tmp_path / "site.py").write_text("pass\n")
    with pytest.raises(
        ValueError, match=rf"{tmp_path} has no Python sources.*Give text by --data\.path: a \.txt"
    ):
        standard_library(tmp_path)


def test_a_run_without_sources_is_refused_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("threed.data.sources.sysconfig.get_path", lambda _: str(tmp_path))
    (problem,) = find_problems(None, "bytes", 0.05)
    assert problem.startswith(f"{tmp_path} has no Python sources")
    (tmp_path / "mine.txt").write_text("text")
    assert find_problems(str(tmp_path / "mine.txt"), "bytes", 0.05) == []
