"""Text sources: the files of a corpus, its sha256, and its documents as a stream of pieces.

    source = find_text(Path("data/"))       a .txt, a .jsonl (key "text") or a folder of them
    source = standard_library()             the default corpus
    source.sha256()
    for piece in source.pieces(): …

Only about one piece is in memory at a time: about 1 MiB of a .txt, or one line of a .jsonl.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

from threed.core.messages import counted
from threed.core.parse import ParseError, parse_json, plain

PIECE_BYTES = 1 << 20
# A .jsonl line of only these bytes is blank: white space and the UTF-8 byte-order mark.
BLANK = b" \t\r\n\xef\xbb\xbf"
# Byte-order marks. The UTF-8 mark is removed; files with another mark are rejected. The UTF-32
# marks are compared first, because the little-endian UTF-32 mark begins with the bytes of the
# little-endian UTF-16 mark.
UTF8_MARK = b"\xef\xbb\xbf"
OTHER_MARKS = {
    b"\xff\xfe\x00\x00": "UTF-32", b"\x00\x00\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16",
}  # fmt: skip
# A piece of text with a larger fraction of NUL bytes is rejected, because it is probably UTF-16 or
# UTF-32 without a byte-order mark.
MAX_NUL_SHARE = 0.25
TEXT_ENDINGS = (".txt", ".jsonl")
# The default corpus excludes third-party code, tests, and folders with compiled files.
EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
# A complete standard library has about 12 MB of sources. A smaller library than this limit was
# stripped of its sources, and is rejected as a corpus.
MIN_LIBRARY_BYTES = 1_000_000


class Piece(NamedTuple):
    """A part of a document.

    Attributes:
        data: the bytes, normally UTF-8 text.
        ends: whether the document ends with this piece.
    """

    data: bytes
    ends: bool


@dataclass(frozen=True)
class TextFile:
    """A file of a corpus.

    Attributes:
        name: path relative to the folder of the corpus; or the name of the file, if the corpus is a
            single file.
        path: path of the file.
    """

    name: str
    path: Path

    def open(self) -> BinaryIO:
        """Opens the file for reading."""
        return self.path.open("rb")

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.path.stat().st_size


@dataclass(frozen=True)
class TextSource:
    """A corpus of text files, in a fixed order.

    Attributes:
        description: name and size of the corpus, for logs.
        files: its files.
        split_by: "end": the last tokens are for validation. "path": a file is for validation if the
            hash of its name is below the validation fraction, so that a file stays in its split if
            other files are added or removed.
        notice: a warning about ignored files; may be empty.
    """

    description: str
    files: tuple[TextFile, ...]
    split_by: Literal["end", "path"] = "end"
    notice: str = ""

    @property
    def size(self) -> int:
        """Size of all files in bytes."""
        return sum(file.size for file in self.files)

    def sha256(self) -> str:
        """Returns the hash of the names and contents of all files.

        The length of each name or content is hashed before it.
        """
        digest = hashlib.sha256()
        for file in self.files:
            label = file.name.encode("utf-8", errors="surrogateescape")
            digest.update(len(label).to_bytes(8, "little") + label)
            digest.update(file.size.to_bytes(8, "little"))
            with file.open() as stream:
                while block := stream.read(PIECE_BYTES):
                    digest.update(block)
        return digest.hexdigest()

    def pieces(self, any_bytes: bool = False) -> Iterator[Piece]:
        """Yields the pieces of all documents.

        Args:
            any_bytes: whether a .txt may contain invalid UTF-8, see `read_pieces`.
        """
        for file in self.files:
            yield from read_pieces(file, any_bytes)

    def stamp(self) -> tuple[str, float]:
        """Returns a hash of the files' metadata, and the time of the newest change in Unix seconds.

        The metadata are names, paths, sizes, times and inodes. As long as the hash is the same, the
        contents are the same, except if a file is changed twice within the resolution of the file
        system's clock.
        """
        digest, newest = hashlib.sha256(), 0.0
        for file in self.files:
            seen = file.path.stat()
            times = (seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns, seen.st_ino, seen.st_dev)
            facts = repr((file.name, str(file.path.absolute()), times))
            digest.update(facts.encode("utf-8", errors="surrogateescape"))
            newest = max(newest, seen.st_mtime, seen.st_ctime)
        return digest.hexdigest(), newest


def find_text(path: Path) -> TextSource:
    """Returns the source at `path`: a .txt file, a .jsonl file or a folder of such files.

    A folder is read recursively, in the order of the names.

    Raises:
        ValueError: if the path has no text; the message states the fix.
    """
    if not path.exists():
        raise ValueError(
            f"{path} does not exist. Check the name; without --data.path the default corpus is used"
        )
    ignored: list[str] = []
    if path.is_dir():
        names = _list_files(path)
        ignored = [name for name in names if not name.endswith(TEXT_ENDINGS)]
        files = tuple(TextFile(name, path / name) for name in names if name.endswith(TEXT_ENDINGS))
        description = f"{path}: {counted(len(files), 'file')}"
    else:
        files = (TextFile(path.name, path),) if path.name.endswith(TEXT_ENDINGS) else ()
        description = str(path)
    if not files:
        found = f" (found {_summary(ignored)})" if ignored else ""
        raise ValueError(
            f"{path}: nothing to read here{found}. --data.path takes .txt, .jsonl, a folder of them, "
            "or a Megatron .bin/.idx pair by its prefix"
        )
    source = TextSource(
        description, files, notice=f"{path}: ignored {_summary(ignored)}" if ignored else ""
    )
    if source.size == 0:
        raise ValueError(f"{path} is empty. Put text into it, or give another path")
    return source


def standard_library(folder: Path | None = None) -> TextSource:
    """Returns the default corpus: the .py files of the standard library.

    Tests and installed packages are excluded. The files differ between Python versions, so runs
    record their sha256.

    Args:
        folder: the library's folder; None: the library of this Python.

    Raises:
        ValueError: if the folder has no sources, as in a zipped or stripped Python; the message
            states the fix.
    """
    root = folder or Path(sysconfig.get_path("stdlib"))
    files = tuple(TextFile(name, root / name) for name in _python_files(root))
    source = TextSource(
        f"Python {platform.python_version()} standard library, {len(files)} files", files, "path"
    )
    if source.size < MIN_LIBRARY_BYTES:
        raise ValueError(
            f"{root} has no Python sources, which are the default corpus. Give text by --data.path: a .txt, a .jsonl, "
            "a folder of them, or a Megatron .bin/.idx pair"
        )
    return source


def _python_files(root: Path) -> list[str]:
    names: list[str] = []
    for here, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in EXCLUDED_FOLDERS]
        names += [
            Path(here, name).relative_to(root).as_posix() for name in files if name.endswith(".py")
        ]
    return sorted(
        name for name in names if (root / name).is_file() and os.access(root / name, os.R_OK)
    )


def read_pieces(file: TextFile, any_bytes: bool = False) -> Iterator[Piece]:
    """Returns the pieces of the documents in one file.

    Each line of a .jsonl is a document of one piece. A .txt is one document of one or more pieces.
    Empty documents and a leading UTF-8 byte-order mark are skipped.

    Args:
        file: the file to read.
        any_bytes: whether a .txt may contain invalid UTF-8, which is then returned unchanged. A
            .jsonl must always be UTF-8.

    Raises:
        ValueError: for invalid UTF-8, or a malformed line of a .jsonl; the message states the file
            and the byte or line.
    """
    if file.name.endswith(".jsonl"):
        return _read_jsonl(file)
    return _read_text(file) if any_bytes else _check_pieces(file, _read_text(file))


def _list_files(folder: Path) -> list[str]:
    """Returns the files under `folder`, sorted by name, except hidden files and folders.

    Follows links to folders, except links to folders visited before, so that a loop of links ends.
    """
    names: list[str] = []
    visited: set[str] = set()
    for here, folders, files in os.walk(folder, followlinks=True):
        visited.add(os.path.realpath(here))
        folders[:] = [
            name
            for name in sorted(folders)
            if not name.startswith(".")
            and os.path.realpath(os.path.join(here, name)) not in visited
        ]
        names += [
            Path(here, name).relative_to(folder).as_posix()
            for name in files
            if not name.startswith(".")
        ]
    return sorted(names)


def _read_text(file: TextFile) -> Iterator[Piece]:
    with file.open() as stream:
        kept = stream.read(PIECE_BYTES).removeprefix(UTF8_MARK)
        while block := stream.read(PIECE_BYTES):
            kept += block
            if len(kept) > PIECE_BYTES:
                cut = _piece_end(kept)
                yield Piece(kept[:cut], ends=False)
                kept = kept[cut:]
        if kept:
            yield Piece(kept, ends=True)


def _check_pieces(file: TextFile, pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yields the pieces unchanged. Raises ValueError at the first byte that is not UTF-8."""
    with file.open() as stream:
        offset = len(UTF8_MARK) if stream.read(len(UTF8_MARK)) == UTF8_MARK else 0
    for piece in pieces:
        check_utf8(piece.data, str(file.path), offset)
        offset += len(piece.data)
        yield piece


def check_utf8(data: bytes, place: str, offset: int) -> None:
    """Raises ValueError if bytes are not UTF-8 text; the message states the fix.

    Args:
        data: bytes to check.
        place: the file and line, for the message.
        offset: offset of `data` in the file, in bytes.
    """
    mark = next(
        (name for mark, name in OTHER_MARKS.items() if offset == 0 and data.startswith(mark)), None
    )
    if mark is not None:
        raise ValueError(
            f"{place} begins with the byte-order mark of {mark}, at byte 0: {_fix(mark)}"
        )
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        at = offset + error.start
        raise ValueError(
            f"{place} is not UTF-8: invalid byte 0x{data[error.start]:02x} at byte {at:,} ({error.reason}). If it is in"
            f" another encoding, {_fix('latin1')}"
        ) from None
    if data.count(0) > MAX_NUL_SHARE * len(data):
        at = offset + data.index(0)
        raise ValueError(
            f"{place} has a NUL at byte {at:,} and many more: it looks like UTF-16 or UTF-32. {_fix('UTF-16')}"
        )


def _fix(encoding: str) -> str:
    return f"convert it, such as by iconv -f {encoding} -t UTF-8"


def _piece_end(data: bytes) -> int:
    """Returns the index at which to split `data`, which has more than `PIECE_BYTES` bytes.

    The index is in the last `PIECE_BYTES` bytes: it is the last line break there; without a line
    break, the last space; without a space, the start of the last UTF-8 character.
    """
    tail = len(data) - PIECE_BYTES
    line = data.rfind(b"\n", tail, len(data) - 1)
    # White space before a word belongs to the word's token. So the next piece starts with the line
    # break, and with any white space in front of it.
    while line > tail and data[line - 1 : line].isspace():
        line -= 1
    if line > tail:
        return line
    word = data.rfind(b" ", tail)
    if word > tail:
        return word
    last = len(data) - 1
    while last > tail and len(data) - last < 4 and data[last] & 0xC0 == 0x80:
        last -= 1
    return last


def _read_jsonl(file: TextFile) -> Iterator[Piece]:
    offset = 0
    with file.open() as stream:
        for number, line in enumerate(stream, start=1):
            place = f"{file.path}, line {number}"
            check_utf8(line, place, offset)
            offset += len(line)
            if line.strip(BLANK):
                text = _text_of(line, place)
                if text:
                    yield Piece(text.encode("utf-8", errors="replace"), ends=True)


# keys of the data of TRL and of other programs that train on conversations
_CHAT = {"messages", "conversations", "prompt", "completion", "chosen", "rejected", "instruction"}


def _text_of(line: bytes, place: str) -> str:
    try:
        # Many tools write NaN values under keys other than "text", so NaN is accepted.
        record = parse_json(line.rstrip(), place, finite=False)
    except ParseError as error:
        raise ValueError(f"{error}. Every line is one object with a key 'text'") from None
    if not isinstance(record, dict):
        raise ValueError(
            f"{place}: a JSON {type(record).__name__}, but an object with a key 'text' is required"
        )
    if "text" not in record:
        fix = "Rename the key that holds the text"
        if not _CHAT.isdisjoint(record):
            fix = (
                "threed train reads plain text; for conversations, use TRL's SFTTrainer or DPOTrainer, whose scripts run"
                " unchanged (docs/guide/accelerate.md)"
            )
        raise ValueError(f"{place}: no key 'text' among {plain(sorted(record))}. {fix}")
    if not isinstance(record["text"], str):
        raise ValueError(
            f"{place}: 'text' is a {type(record['text']).__name__}; it must be a string"
        )
    return record["text"]


def _summary(names: list[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more}"
