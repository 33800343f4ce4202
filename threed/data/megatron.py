"""Megatron's indexed data sets: `prefix.bin` has the tokens, `prefix.idx` the sequence offsets.

    tokens = open_tokens("out/prefix")                                memory-mapped, 1-D
    index = read_index(Path("out/prefix.idx"))
    count_borders(tokens, index, tokenizer).notice(name, tokenizer)   warnings about documents that
                                                                      begin or end wrongly
    tokenize_to_megatron("texts/", "out/prefix", tokenizer)           writes both files from text

Layout of the .idx, all little-endian (Megatron-LM, megatron/core/datasets/indexed_dataset.py):
"MMIDIDX" and two zero bytes · uint64 version = 1 · uint8 dtype code · uint64 sequences · uint64
document indices (number of documents + 1) · int32 length of each sequence · int64 byte offset of
each sequence · int64 index of each document's first sequence, followed by the number of sequences.
"""

from __future__ import annotations

import mmap
import struct
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from threed.core.atomic import building
from threed.core.messages import counted
from threed.data.encode import encode
from threed.data.sources import find_text
from threed.data.tokenizer import Tokenizer, Tokens, token_dtype

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<QBQQ")
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
LONGEST_SEQUENCE = (1 << 31) - 1  # maximum tokens per sequence; the .idx stores lengths as int32
BLOCK = 1 << 20  # number of documents that `count_borders` reads at a time


@dataclass(frozen=True)
class MegatronIndex:
    """The content of an .idx file.

    Attributes:
        dtype: dtype of the tokens.
        lengths: [n], length of each sequence in tokens.
        offsets: [n], offset of each sequence in bytes.
        documents: [d + 1], index of each document's first sequence, followed by n.
    """

    dtype: np.dtype[Any]
    lengths: NDArray[np.int32]
    offsets: NDArray[np.int64]
    documents: NDArray[np.int64]


@dataclass(frozen=True)
class TokenizeSummary:
    """The result of `tokenize_to_megatron`.

    Attributes:
        documents: number of documents.
        tokens: number of tokens.
        dtype: name of the tokens' dtype.
        files: paths of the .bin and the .idx.
        notice: a warning about ignored files; may be empty.
    """

    documents: int
    tokens: int
    dtype: str
    files: tuple[Path, Path]
    notice: str = ""


def pair_of(path: Path) -> tuple[Path, Path]:
    """Returns the paths (.bin, .idx) of a pair from its prefix, its .bin or its .idx."""
    prefix = str(path)
    if prefix.endswith((".bin", ".idx")):
        prefix = prefix[:-4]
    return Path(prefix + ".bin"), Path(prefix + ".idx")


def is_megatron(path: Path) -> bool:
    """Returns whether `path` is a .bin, a .idx, or the prefix of an existing .bin or .idx."""
    return path.name.endswith((".bin", ".idx")) or (
        not path.exists() and any(p.exists() for p in pair_of(path))
    )


def read_index(path: Path) -> MegatronIndex:
    """Memory-maps an .idx file. Raises ValueError if it is not a valid index."""
    size = path.stat().st_size
    head = len(MAGIC) + HEADER.size
    with path.open("rb") as file:
        start = file.read(head)
        if len(start) < head or not start.startswith(MAGIC):
            raise ValueError(
                f"{path} is not a Megatron index: it does not begin with {MAGIC!r} and a complete header"
            )
        version, code, sequences, indices = HEADER.unpack(start[len(MAGIC) :])
        dtype = _dtype_of(path, version, code)
        expected = head + 12 * sequences + 8 * indices
        if size != expected:
            raise ValueError(
                f"{path}: {counted(size, 'byte')}, but {sequences} sequences and {indices} document indices need "
                f"{expected}: truncated, damaged, or multimodal (not supported)"
            )
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    lengths = np.frombuffer(mapped, "<i4", sequences, head)
    offsets = np.frombuffer(mapped, "<i8", sequences, head + 4 * sequences)
    documents = np.frombuffer(mapped, "<i8", indices, head + 12 * sequences)
    if (
        not indices
        or documents[0] != 0
        or documents[-1] != sequences
        or (np.diff(documents) < 0).any()
    ):
        raise ValueError(
            f"{path} is damaged: its document indices do not increase from 0 to {sequences} sequences"
        )
    return MegatronIndex(dtype, lengths, offsets, documents)


def open_tokens(path: Path) -> Tokens:
    """Memory-maps all tokens of the pair at `path` as one flat array, in the file's dtype.

    Args:
        path: the prefix or either file of the pair.

    Raises:
        ValueError: if a file is missing, the files do not match, or sequences are not contiguous;
            the message states the fix.
    """
    data, index_path = pair_of(path)
    for file, other in ((data, index_path), (index_path, data)):
        if not file.is_file():
            raise ValueError(
                f"{file} is missing. A Megatron data set is a pair: put it next to {other.name}"
            )
    index = read_index(index_path)
    if data.stat().st_size == 0:
        raise ValueError(f"{data} is empty. Tokenize some text into it, or give another path")
    ends = index.offsets + index.lengths.astype(np.int64) * index.dtype.itemsize
    begins_where_last_ended = (
        bool(np.array_equal(index.offsets, np.append(0, ends[:-1]))) if len(ends) else True
    )
    if not begins_where_last_ended or (index.lengths < 0).any():
        raise ValueError(
            f"{index_path}: the sequences are not contiguous in {data.name}. Write the pair again"
        )
    total = int(ends[-1]) if len(ends) else 0
    if total != data.stat().st_size:
        raise ValueError(
            f"{data} has {data.stat().st_size} bytes and {index_path.name} requires {total}: not a pair, or "
            "one file was truncated. Copy or write both again"
        )
    return np.memmap(data, dtype=index.dtype, mode="r")


@dataclass(frozen=True)
class Borders:
    """How many documents of a .bin/.idx pair begin with bos or end with the end-of-text token."""

    documents: int  # number of documents that have tokens
    ended: int  # number of documents that end with the end-of-text token
    begun: int  # number of documents that begin with bos
    alike: int  # number of documents that end with `last_id` (see below)
    last_id: int  # the most frequent last id of documents that are not counted in `ended`

    def notice(self, name: str, tokenizer: Tokenizer) -> str:
        """Returns one line per problem with the beginnings or ends of documents.

        The result is empty if all documents begin and end as the tokenizer requires.

        Args:
            name: name of the pair, for the warnings.
            tokenizer: the tokenizer of the run.
        """
        lines = []
        if missing := self.documents - self.ended:
            which = ""
            if 2 * self.alike > missing:
                which = f"; {self.alike:,} of them end with id {self.last_id}"
            lines.append(
                f"{name}: {missing:,} of {self.documents:,} documents do not end with the end of text (id"
                f" {tokenizer.eot}){which}: nothing separates documents. Write the pair with --append-eod, or give the"
                " --data.tokenizer that wrote it"
            )
        if tokenizer.bos_ids and self.begun < self.documents:
            lines.append(
                f"{name}: {self.documents - self.begun:,} of {self.documents:,} documents do not begin with bos (id"
                f" {tokenizer.bos_ids[0]}), which the tokenizer adds to texts. Write it again with `threed tokenize`"
            )
        if not tokenizer.bos_ids and self.begun and tokenizer.bos_token_id != tokenizer.eot:
            lines.append(
                f"{name}: {self.begun:,} of {self.documents:,} documents begin with bos (id {tokenizer.bos_token_id}),"
                " but prompts of this run do not. Use --data.bos true"
            )
        return "\n".join(lines)


def count_borders(tokens: Tokens, index: MegatronIndex, tokenizer: Tokenizer) -> Borders:
    """Counts the documents of a pair that begin with bos or end with the end-of-text token.

    Args:
        tokens: [n], all tokens of the pair.
        index: the index of the pair.
        tokenizer: the tokenizer of the run.
    """
    bos = tokenizer.bos_ids[0] if tokenizer.bos_ids else tokenizer.bos_token_id
    starts = np.concatenate([[0], np.cumsum(index.lengths, dtype=np.int64)])[index.documents]
    documents = ended = begun = 0
    last: dict[int, int] = {}
    for at in range(0, len(starts) - 1, BLOCK):
        first, end = _with_tokens(starts[at : at + BLOCK + 1])
        ends = tokens[end - 1]
        documents += len(first)
        ended += int((ends == tokenizer.eot).sum())
        begun += int((tokens[first] == bos).sum()) if bos is not None else 0
        for number, count in zip(
            *np.unique(ends[ends != tokenizer.eot], return_counts=True), strict=True
        ):
            last[int(number)] = last.get(int(number), 0) + int(count)
    last_id, alike = max(last.items(), key=lambda item: item[1], default=(-1, 0))
    return Borders(documents, ended, begun, alike, last_id)


def _with_tokens(borders: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns two arrays with the offsets, in tokens, at which non-empty documents begin and end.

    Args:
        borders: [d + 1], the offsets at which documents begin, followed by the end of the last one.
    """
    first, end = borders[:-1], borders[1:]
    return first[end > first], end[end > first]


def tokenize_to_megatron(
    src: Path | str, dst_prefix: Path | str, tokenizer: Tokenizer
) -> TokenizeSummary:
    """Writes the text at `src` as a .bin/.idx pair, with one sequence per document.

    Every document begins with the tokenizer's `bos_ids`, if any, and ends with its `eot`. The text
    is streamed: memory use is about 30 MiB with the tokenizer "bytes", or 300 MiB with a
    tokenizer.json, plus 12 bytes per document. The files get their final names when they are
    complete.

    Args:
        src: a .txt file, a .jsonl file or a folder of such files.
        dst_prefix: path of both files without .bin and .idx.
        tokenizer: tokenizer that encodes the text.

    Returns:
        The files, and the numbers of documents and tokens.

    Raises:
        ValueError: if the text is invalid, or a file of the pair already exists.
    """
    source = find_text(Path(src).expanduser())
    finals = pair_of(Path(dst_prefix).expanduser())
    for final in finals:
        if final.exists():
            raise ValueError(f"{final} exists. Remove it, or choose another name")
    # The .idx is renamed last. A .bin without an .idx is rejected, so no partial pair is ever read.
    with (
        building(*finals) as (bin_path, idx_path),
        bin_path.open("xb") as data,
        idx_path.open("xb") as index_file,
    ):
        writer = MegatronWriter(data, token_dtype(tokenizer.vocab_size))
        for tokens, ends in encode(source.pieces(tokenizer.takes_any_bytes), tokenizer):
            writer.add(tokens)
            if ends:
                writer.end_document()
        if not writer.tokens:
            raise ValueError(f"{src}: no text in it. Put text into it, or name another source")
        writer.write_index(index_file)
    return TokenizeSummary(
        writer.documents, writer.tokens, writer.dtype.name, finals, source.notice
    )


class MegatronWriter:
    """Writes tokens to an open .bin, document by document, and then the .idx.

    Args:
        data: the open .bin.
        dtype: dtype of the tokens in the file.
        longest: maximum length of a sequence in tokens. Longer documents become several sequences.
    """

    def __init__(
        self, data: BinaryIO, dtype: np.dtype[Any], longest: int = LONGEST_SEQUENCE
    ) -> None:
        self.dtype = dtype
        self.tokens = 0
        self._data = data
        self._longest = longest
        self._begin = 0  # offset, in tokens, of the first token of the unfinished sequence
        self._lengths = array("i")
        self._documents = array("q", [0])

    @property
    def documents(self) -> int:
        """Number of documents ended so far."""
        return len(self._documents) - 1

    def add(self, tokens: Tokens) -> None:
        """Appends tokens to the current document."""
        self._data.write(tokens.astype(self.dtype, copy=False).tobytes())
        self.tokens += len(tokens)
        while self.tokens - self._begin > self._longest:
            self._end_sequence(self._longest)

    def end_document(self) -> None:
        """Ends the current document; the next call of `add` begins a new document."""
        self._end_sequence(self.tokens - self._begin)
        self._documents.append(len(self._lengths))

    def write_index(self, file: BinaryIO) -> None:
        """Writes the .idx for all ended documents."""
        code = next(code for code, name in DTYPES.items() if np.dtype(name) == self.dtype)
        lengths = np.frombuffer(self._lengths, np.intc)
        offsets = np.zeros(len(lengths), dtype="<i8")
        np.cumsum(lengths[:-1], dtype=np.int64, out=offsets[1:])
        file.write(MAGIC + HEADER.pack(1, code, len(lengths), len(self._documents)))
        file.write(lengths.astype("<i4").tobytes())
        file.write((offsets * self.dtype.itemsize).astype("<i8").tobytes())
        file.write(np.frombuffer(self._documents, np.int64).astype("<i8").tobytes())

    def _end_sequence(self, length: int) -> None:
        if length:
            self._lengths.append(length)
            self._begin += length


def _dtype_of(path: Path, version: int, code: int) -> np.dtype[Any]:
    if version != 1:
        raise ValueError(
            f"{path}: index version {version}, but only version 1 is supported. Write the pair again"
        )
    if code not in DTYPES:
        raise ValueError(
            f"{path}: dtype code {code} is not a token dtype; the codes are 1 to 5 and 8"
        )
    return np.dtype(DTYPES[code])
