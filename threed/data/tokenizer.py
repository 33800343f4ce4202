"""Tokenizers: encode text to token ids and back; an end-of-text id separates documents.

    tokenizer = load_tokenizer("bytes")                 or "path/to/folder"
    tokenizer.decode(tokenizer.encode("some text"))
    tokenizer.save_hf(folder)                           writes files for transformers.AutoTokenizer

`ByteTokenizer` (byte b is id b, 256 is the end of text) has no dependencies. `TokenizerJson` runs a
Hugging Face tokenizer with the `tokenizers` library, which is imported on first use. `transformers`
converts folders without a tokenizer.json.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from threed.core.packages import needed
from threed.core.parse import plain
from threed.data.special_tokens import (
    beginning,
    bos_id,
    end_of_document,
    hide,
    read_specials,
    specials_in_text,
)
from threed.data.tokenizer_files import CONFIG, JSON, SPECIALS_MAP, TokenizerFiles, find_files
from threed.data.tokenizer_import import import_tokenizer

Tokens = NDArray[np.integer[Any]]
Bos = Literal["auto"] | bool
SpecialTokens = Literal["text", "parse"]

END_OF_TEXT = "<|endoftext|>"


class EncodeError(ValueError):
    """Raised if a text has a character without a token, and the tokenizer has no unknown token."""


class Tokenizer(Protocol):
    """The interface of a tokenizer.

    Attributes:
        name: the tokenizer's name in messages.
        vocab_size: the largest id, plus 1.
        text_vocab_size: the largest id that encoded documents can contain, plus 1.
        eot: the id that ends a document.
        bos_ids: the ids that begin a document; empty if documents begin without bos.
        bos_token_id: the id of the tokenizer's bos token, even if documents do not begin with it;
            None if it has no bos.
        takes_any_bytes: whether `encode_pieces` encodes invalid UTF-8 without loss.
        fingerprint: identifies the meaning of the ids. If two tokenizers have the same fingerprint,
            each id stands for the same text in both, and both have the same `eot`.
        cache_key: identifies the encoding of text. If two tokenizers have the same key, they encode
            each text to the same ids, including `bos_ids` and special tokens.
        files: the sha256 of each file that `save_hf` copies, by the name of the copy.
    """

    name: str
    vocab_size: int
    text_vocab_size: int
    eot: int
    bos_ids: tuple[int, ...]
    bos_token_id: int | None
    takes_any_bytes: bool
    fingerprint: str
    cache_key: str
    files: dict[str, str]

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`, without any special token added."""

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of `ids`, without special tokens; invalid UTF-8 becomes U+FFFD."""

    def encode_pieces(self, pieces: Sequence[bytes]) -> list[Tokens]:
        """Returns the ids of each of the `pieces` of UTF-8 text.

        The arrays have the dtype `token_dtype(vocab_size)`.
        """

    def count_bytes(self, ids: Tokens) -> int:
        """Returns the number of UTF-8 bytes in the text of `ids`, without special tokens."""

    def save_hf(self, folder: Path, model_type: str | None = None) -> None:
        """Writes the files that `transformers.AutoTokenizer.from_pretrained(folder)` loads.

        Args:
            folder: the output folder.
            model_type: `model_type` of the model in `folder`, by which `transformers` may choose
                another tokenizer class; None if it is unknown.
        """


def load_tokenizer(
    spec: str, bos: Bos = "auto", special_tokens: SpecialTokens = "text"
) -> Tokenizer:
    """Returns a tokenizer.

    Args:
        spec: "bytes", a folder, or the path of a Hugging Face tokenizer.json.
        bos: whether documents begin with the bos token. "auto": only if the tokenizer itself adds
            the token to texts.
        special_tokens: how to encode text that spells a special token: "text" encodes it as
            ordinary text, "parse" as the special token.

    Raises:
        ValueError: if the file does not exist or is not a tokenizer, or `bos` is True and the
            tokenizer has no bos token; the message states the fix.
    """
    if spec == "bytes":
        if bos is True:
            raise ValueError(
                "--data.bos true: tokenizer bytes has no bos token. Use --data.bos auto"
            )
        return ByteTokenizer()
    return TokenizerJson(find_files(spec), bos, special_tokens)


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Returns the smallest dtype for ids below `vocab_size`: uint16 or int32, little-endian."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<i4")


class ByteTokenizer:
    """Encodes byte b of the UTF-8 text as id b. The only special token, 256, ends a document."""

    name = "bytes"
    vocab_size = text_vocab_size = 257
    eot = 256
    bos_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    takes_any_bytes = True
    fingerprint = cache_key = "bytes-257"

    def __init__(self) -> None:
        self.files: dict[str, str] = {}

    def encode(self, text: str) -> list[int]:
        """Returns the UTF-8 bytes of `text`; a lone surrogate (invalid UTF-8) becomes '?'."""
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of `ids` below 256; invalid UTF-8 becomes U+FFFD."""
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def encode_pieces(self, pieces: Sequence[bytes]) -> list[Tokens]:
        """Returns the bytes of each of the `pieces` as uint16.

        Unlike `encode`, it accepts any bytes.
        """
        return [
            np.frombuffer(piece, dtype=np.uint8).astype(token_dtype(self.vocab_size))
            for piece in pieces
        ]

    def count_bytes(self, ids: Tokens) -> int:
        """Returns the number of bytes in the text of `ids`: the number of ids below 256."""
        return int(np.count_nonzero(ids < 256))

    def save_hf(self, folder: Path, model_type: str | None = None) -> None:
        """Writes a byte-level BPE tokenizer.json without merges, in which byte b has id b.

        Also writes tokenizer_config.json and special_tokens_map.json.

        Args:
            folder: the folder to write to; created if it does not exist.
            model_type: not used.
        """
        library: Any = needed("tokenizers", "a tokenizer.json for exported weights")
        vocab = {character: byte for byte, character in enumerate(byte_characters())}
        backend = library.Tokenizer(library.models.BPE(vocab=vocab, merges=[]))
        backend.pre_tokenizer = library.pre_tokenizers.ByteLevel(
            add_prefix_space=False, use_regex=False
        )
        backend.decoder = library.decoders.ByteLevel()
        backend.add_special_tokens(
            [library.AddedToken(END_OF_TEXT, special=True, normalized=False)]
        )
        folder.mkdir(parents=True, exist_ok=True)
        backend.save(str(folder / JSON))
        _write_configs(folder, END_OF_TEXT)


class TokenizerJson:
    """A Hugging Face tokenizer, run by the `tokenizers` library.

    The functions of the module `special_tokens` find its bos and end-of-text tokens.

    Args:
        files: the tokenizer's files.
        bos: see `load_tokenizer`.
        special_tokens: see `load_tokenizer`.
    """

    takes_any_bytes = False

    def __init__(
        self, files: TokenizerFiles, bos: Bos = "auto", special_tokens: SpecialTokens = "text"
    ) -> None:
        path = files.files.get(JSON, files.place)
        self.name, self.files, self._files = str(path), files.hashes(), files
        self._text = path.read_bytes() if JSON in files.files else import_tokenizer(files).encode()
        self._backend = _load_backend(self._text, self.name)
        document, named = json.loads(self._backend.to_str()), read_specials(files)
        if named.complete(document):
            self._backend = _load_backend(json.dumps(document).encode(), self.name)
        ids = _ids(self._backend, document, self.name)
        self.vocab_size = max(ids.values()) + 1
        specials = frozenset(t["content"] for t in document["added_tokens"] if t["special"])
        with _name_in_errors(self.name):
            self._eot_name = end_of_document(named, ids, specials)
        self.eot, self.bos_token_id = ids[self._eot_name], bos_id(named, ids)
        self.bos_ids: tuple[int, ...] = ()
        if bos is not False:
            with _name_in_errors(self.name, ". Correct it, or use --data.bos false"):
                own = beginning(named, document, ids)
            self.bos_ids = self._choose_bos(bos, own)
        self.text_vocab_size = self._largest_text_id(document, ids, special_tokens) + 1
        known = json.dumps((self.eot, document["added_tokens"]))
        self.fingerprint = hashlib.sha256(self._text + known.encode()).hexdigest()
        self.cache_key = f"{self.fingerprint} {special_tokens} {self.bos_ids}"
        if special_tokens == "text":
            if hide(document):
                self._backend = _load_backend(json.dumps(document).encode(), self.name)
            self._backend.encode_special_tokens = True

    def _largest_text_id(
        self, document: dict[str, Any], ids: dict[str, int], special_tokens: SpecialTokens
    ) -> int:
        """Returns the largest id that documents can contain.

        If `special_tokens` is "text", most special tokens cannot occur in documents.
        """
        unseen = specials_in_text(document) if special_tokens == "text" else frozenset()
        unknown = document["model"].get("unk_id") or 0  # only Unigram models have the key unk_id
        return max(
            self.eot,
            unknown,
            *self.bos_ids,
            *(number for token, number in ids.items() if token not in unseen),
        )

    def _choose_bos(self, bos: Bos, own: tuple[int, ...]) -> tuple[int, ...]:
        if bos is not True or own:
            return own
        if self.bos_token_id is None:
            raise ValueError(
                f"--data.bos true: {self.name} has no bos_token in its vocabulary. Specify one in its {CONFIG}"
            )
        return (self.bos_token_id,)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`, without any special token added.

        Lone surrogates are replaced by '?', because the library accepts only valid UTF-8.
        """
        return self._encode([text.encode("utf-8", errors="replace").decode("utf-8")])[0].ids

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of `ids`, without special tokens and ids outside the vocabulary."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=True)

    def encode_pieces(self, pieces: Sequence[bytes]) -> list[Tokens]:
        """Returns the ids of each of the `pieces`, encoded in parallel.

        Invalid UTF-8 becomes U+FFFD.
        """
        texts = [piece.decode("utf-8", errors="replace") for piece in pieces]
        dtype = token_dtype(self.vocab_size)
        return [np.asarray(encoding.ids, dtype=dtype) for encoding in self._encode(texts)]

    def _encode(self, texts: list[str]) -> list[Any]:
        try:
            encodings: list[Any] = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:
            # The library raises a plain Exception for characters without a token.
            raise EncodeError(
                f"{self.name} cannot encode this text: {plain(error)}. Specify an unknown token from the vocabulary"
                " as the unk_token (unk_id of a Unigram model) in its model, or give another --data.tokenizer"
            ) from error
        return encodings

    def count_bytes(self, ids: Tokens) -> int:
        """Returns the number of bytes of the text of `ids`, decoded in blocks of 65,536 tokens.

        A character that spans two blocks is counted as a U+FFFD in each of them, which is an error
        of a few bytes per block.
        """
        blocks = (ids[i : i + 65536].tolist() for i in range(0, len(ids), 65536))
        return sum(len(self.decode(block).encode()) for block in blocks)

    def save_hf(self, folder: Path, model_type: str | None = None) -> None:
        """Copies the tokenizer's files, and writes missing configuration files if necessary.

        Without a tokenizer_config.json, `transformers` chooses the tokenizer class by the model
        type in the config.json of `folder`. This class may be wrong, unless the folder from which
        the tokenizer was loaded has the same model type. If it may be wrong, this method also
        writes tokenizer_config.json and special_tokens_map.json, and a tokenizer.json if there was
        none to copy.

        Args:
            folder: the folder to write to; created if it does not exist.
            model_type: `model_type` of the model in `folder`. None: the same as in the folder from
                which the tokenizer was loaded.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._files.save_hf(folder)
        own_type = self._files.read_model_config("config.json").get("model_type")
        if CONFIG in self._files.files or (
            own_type is not None and own_type == (model_type or own_type)
        ):
            return
        if JSON not in self._files.files:
            (folder / JSON).write_bytes(self._text)
        _write_configs(folder, self._eot_name)


def byte_characters() -> list[str]:
    """Returns the character of each of the 256 bytes in GPT-2's byte-level vocabularies.

    A byte that is printable in Latin-1 has its Latin-1 character. The other 68 bytes have the
    characters U+0100, U+0101, … in order. Source: byte-level BPE, Radford et al. 2019, "Language
    models are unsupervised multitask learners", section 2.2.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    unprintable = [byte for byte in range(256) if byte not in printable]
    substitutes = {byte: chr(0x100 + rank) for rank, byte in enumerate(unprintable)}
    return [substitutes.get(byte, chr(byte)) for byte in range(256)]


def _load_backend(text: bytes, name: str) -> Any:
    library: Any = needed("tokenizers", name)
    try:
        backend = library.Tokenizer.from_str(text.decode("utf-8"))
    except Exception as error:  # the library raises a plain Exception for any malformed file
        raise ValueError(
            f"{name} is not a tokenizer.json that the `tokenizers` library reads: {plain(error)}. Copy it again from its"
            " source, or give another --data.tokenizer"
        ) from error
    # Many published files enable truncation or padding for short inputs. Without these calls,
    # documents would be truncated or padded silently.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _ids(backend: Any, document: dict[str, Any], name: str) -> dict[str, int]:
    """Returns the id of every token.

    Raises ValueError if the vocabulary is empty, or if the library and `document` have different
    ids for a token.
    """
    ids: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    if not ids:
        raise ValueError(f"{name}: the vocabulary is empty")
    for entry in document["added_tokens"]:
        if (found := ids.get(entry["content"])) != entry["id"]:
            raise ValueError(
                f"{name}: token {plain(entry['content'])} has id {found}, but"
                f" {entry['id']} in its configuration. Correct {CONFIG} or added_tokens.json"
            )
    return ids


@contextmanager
def _name_in_errors(name: str, fix: str = "") -> Iterator[None]:
    """Adds the name of a tokenizer, and a fix, to the message of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name}: {error}{fix}") from None


def _write_configs(folder: Path, eot: str) -> None:
    """Writes tokenizer_config.json and special_tokens_map.json for `eot`, unless they exist."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": eot,
        "clean_up_tokenization_spaces": False,
    }
    for name, content in ((CONFIG, config), (SPECIALS_MAP, {"eos_token": eot})):
        if not (folder / name).exists():
            (folder / name).write_text(json.dumps(content, indent=2) + "\n")
