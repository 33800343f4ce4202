"""Tokenizers: text to token ids and back, with one end-of-text id between documents.

Use: `tokenizer = load_tokenizer("bytes")` or `load_tokenizer("path/to/tokenizer.json")`; then `encode`, `decode`,
`eot`, `vocab_size`, and `save_hf(folder)` for an export that `transformers.AutoTokenizer` loads.

Two kinds: `ByteTokenizer` (byte b is id b, 256 is the end of text) needs nothing; `TokenizerJson` reads a Hugging Face
tokenizer.json through the `tokenizers` library, which is imported only where it is used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from threed.packages import needed
from threed.parse import plain

Tokens = NDArray[np.integer[Any]]

END_OF_TEXT = "<|endoftext|>"
# What published tokenizers call the token that ends a document, most specific first.
END_OF_TEXT_NAMES = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>")
COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json")


class Tokenizer(Protocol):
    """The interface of a tokenizer, for data and engine."""

    @property
    def name(self) -> str:
        """Its name in messages."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @property
    def eot(self) -> int:
        """The id that ends a document."""

    @property
    def fingerprint(self) -> str:
        """Changes whenever the ids could change; keys the token cache."""

    @property
    def files(self) -> dict[str, str]:
        """The sha256 of each file that `save_hf` copies, by the name it copies it to."""

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`, without any special token added."""

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of `ids`; specials are skipped, bytes that are no UTF-8 become U+FFFD."""

    def encode_pieces(self, pieces: Sequence[bytes]) -> list[Tokens]:
        """Returns the ids of each piece of UTF-8 text, in `token_dtype(vocab_size)`."""

    def count_bytes(self, ids: Tokens) -> int:
        """Counts the bytes of text that `ids` stand for; specials count none."""

    def save_hf(self, folder: Path) -> None:
        """Writes the tokenizer files that `transformers.AutoTokenizer.from_pretrained(folder)` loads."""


def load_tokenizer(spec: str) -> Tokenizer:
    """Returns the tokenizer named by `spec`: "bytes", or the path of a Hugging Face tokenizer.json.

    Raises ValueError, saying what to do, when there is no such file or it is no tokenizer.
    """
    if spec == "bytes":
        return ByteTokenizer()
    return TokenizerJson(tokenizer_file(spec))


def tokenizer_file(spec: str) -> Path:
    """Returns the tokenizer.json that `spec` names, or whose folder it names; ValueError if there is none."""
    path = Path(spec).expanduser()
    if path.is_dir() and (path / "tokenizer.json").is_file():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"tokenizer {spec!r} is no file. Use --data.tokenizer bytes, or the path of a tokenizer.json")
    return path


def file_hashes(path: Path) -> dict[str, str]:
    """Returns the sha256 of a tokenizer.json, and of its companions that lie beside it."""
    companions = {name: path.with_name(name) for name in COMPANIONS if path.with_name(name).is_file()}
    files = {"tokenizer.json": path, **companions}
    return {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()}


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Returns the smallest dtype, uint16 or int32 (little-endian), that holds every id below `vocab_size`."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<i4")


class ByteTokenizer:
    """Byte b of the UTF-8 text is id b; the only special, 256, ends a document."""

    name = "bytes"
    vocab_size = 257
    eot = 256
    fingerprint = "bytes-257"
    files: ClassVar[dict[str, str]] = {}

    def encode(self, text: str) -> list[int]:
        """Returns the UTF-8 bytes of `text`; a lone surrogate, which UTF-8 cannot say, becomes '?'."""
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of `ids`; ids from 256 are skipped, bytes that are no UTF-8 become U+FFFD."""
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def encode_pieces(self, pieces: Sequence[bytes]) -> list[Tokens]:
        """Returns each piece's bytes as uint16; unlike `encode`, any bytes at all pass unchanged."""
        return [np.frombuffer(piece, dtype=np.uint8).astype(token_dtype(self.vocab_size)) for piece in pieces]

    def count_bytes(self, ids: Tokens) -> int:
        """Counts the ids below 256: each is one byte."""
        return int(np.count_nonzero(ids < 256))

    def save_hf(self, folder: Path) -> None:
        """Writes a byte-pair tokenizer.json without merges that maps byte b to id b, and its two companions."""
        needed("tokenizers", "a tokenizer.json for exported weights")
        from tokenizers import AddedToken, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as Backend

        vocab = {character: byte for byte, character in enumerate(byte_characters())}
        backend = Backend(models.BPE(vocab=vocab, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
        folder.mkdir(parents=True, exist_ok=True)
        backend.save(str(folder / "tokenizer.json"))
        for name, content in _companions(END_OF_TEXT).items():
            (folder / name).write_bytes(content)


class TokenizerJson:
    """A Hugging Face tokenizer.json, run by the `tokenizers` library; `eot` is found by its usual names."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path
        self._backend = _load_backend(path)
        vocab: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        if not vocab:
            raise ValueError(f"{path}: the vocabulary is empty")
        self.vocab_size = max(vocab.values()) + 1
        self._eot_name = next((name for name in END_OF_TEXT_NAMES if name in vocab), "")
        if not self._eot_name:
            names = ", ".join(END_OF_TEXT_NAMES)
            raise ValueError(f"{path}: no end-of-text token. Add one of {names} to the tokenizer's added_tokens")
        self.eot = vocab[self._eot_name]
        self.files = file_hashes(path)
        self.fingerprint = self.files["tokenizer.json"]

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`, without any special token added."""
        ids: list[int] = self._backend.encode(_clean(text), add_special_tokens=False).ids
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of `ids`; specials and ids without a token are skipped."""
        text: str = self._backend.decode([int(i) for i in ids], skip_special_tokens=True)
        return text

    def encode_pieces(self, pieces: Sequence[bytes]) -> list[Tokens]:
        """Returns the ids of each piece, encoded in parallel; bytes that are no UTF-8 are read as U+FFFD."""
        texts = [piece.decode("utf-8", errors="replace") for piece in pieces]
        dtype = token_dtype(self.vocab_size)
        return [
            np.asarray(e.ids, dtype=dtype) for e in self._backend.encode_batch_fast(texts, add_special_tokens=False)
        ]

    def count_bytes(self, ids: Tokens) -> int:
        """Counts the bytes of the decoded text, 65,536 tokens at a time.

        A character cut by the edge of such a block is counted as two U+FFFD: a few bytes in 65,536 tokens.
        """
        blocks = (ids[i : i + 65536].tolist() for i in range(0, len(ids), 65536))
        return sum(len(self.decode(block).encode()) for block in blocks)

    def save_hf(self, folder: Path) -> None:
        """Copies tokenizer.json and, where they lie beside it, its two companions; else write those."""
        folder.mkdir(parents=True, exist_ok=True)
        contents = {"tokenizer.json": self._path.read_bytes(), **_companions(self._eot_name)}
        for name, content in contents.items():
            beside = self._path.with_name(name)
            # Read before anything is written: the folder may be the one that the file came from.
            kept = beside.read_bytes() if name in COMPANIONS and beside.is_file() else content
            (folder / name).write_bytes(kept)


def byte_characters() -> list[str]:
    """Returns the printable character by which GPT-2's byte-level vocabularies write each of the 256 bytes.

    Printable Latin-1 bytes stand for themselves; the other 68, in order, for the characters from U+0100.
    Source: byte-level BPE, Radford et al. 2019, "Language models are unsupervised multitask learners", section 2.2.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    substitutes = {byte: chr(0x100 + rank) for rank, byte in enumerate(others)}
    return [substitutes.get(byte, chr(byte)) for byte in range(256)]


def _load_backend(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer as Backend
    except ImportError as error:
        raise ValueError(f"{path} needs the `tokenizers` library: pip install tokenizers") from error
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception for every kind of malformed file
        raise ValueError(f"{path} is no tokenizer.json that the `tokenizers` library reads: {plain(error)}") from error
    # Many published files switch these on for short inputs; here they would cut or fill documents in silence.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _clean(text: str) -> str:
    """Replaces lone surrogates by '?': the library takes only what UTF-8 can say."""
    return text.encode("utf-8", errors="replace").decode("utf-8")


def _companions(eot: str) -> dict[str, bytes]:
    """Returns the two small files that tell `transformers` how to use a tokenizer.json."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eot, "clean_up_tokenization_spaces": False}
    contents = zip(COMPANIONS, (config, {"eos_token": eot}), strict=True)
    return {name: (json.dumps(content, indent=2) + "\n").encode() for name, content in contents}
