"""`open_data`: training and validation samples from a path or the default corpus, with checks.

    problems = find_problems(path, tokenizer, split)       checks without reading all data
    data = open_data(path, tokenizer, split, seq, seed)
    data.train.batch(first, count)

`open_data` finds the files and computes their sha256, which is cached as long as the sizes and
times of the files do not change. It then writes the token file and measures statistics. The token
file and the statistics are cached, with a cache key that depends on the sha256, the tokenizer and
the split. Finally, it memory-maps the token file and returns one part of it for training and one
for validation. All ranks may call `open_data` at the same time; one of them builds the cache
entries.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from threed.data.cache import build_once, cache_folder
from threed.data.encode import encode
from threed.data.megatron import (
    Borders,
    count_borders,
    is_megatron,
    open_tokens,
    pair_of,
    read_index,
)
from threed.data.samples import Samples
from threed.data.sources import TextFile, TextSource, find_text, read_pieces, standard_library
from threed.data.tokenizer import Bos, SpecialTokens, Tokenizer, Tokens, load_tokenizer, token_dtype

# Version of the contents of cache entries, and a part of every cache key. Increase it whenever the
# contents change, so that older entries are not read.
LAYOUT = 2
# Time in seconds within which two changes of a file may get the same time stamp, if the clock of
# the file system is coarse. If a file was changed less than this time ago, results for it are not
# cached: another change could follow with the same time stamp, and would not be noticed.
FRESH_S = 2.0
# Number of tokens that `id_range` and `first_outside` read at a time.
BLOCK = 1 << 22
# Maximum number of tokens from which entropy and bytes per token are measured. More tokens would
# hardly change the result, and decoding all tokens could take hours.
MEASURED_TOKENS = 1 << 22


@dataclass(frozen=True)
class Data:
    """The training and validation data of a run.

    Attributes:
        train: training samples.
        valid: validation samples.
        tokenizer: the tokenizer of both splits.
        vocab: vocabulary size of the tokenizer.
        sha256: hash of the names and contents of the files in the corpus.
        description: name and size of the corpus, for logs.
        notice: warnings for the user, one per line; may be empty.
        unigram_entropy: entropy of the token frequencies in the validation split, in nats per
            token.
        bytes_per_token: mean bytes of text per token in the validation split.
    """

    train: Samples
    valid: Samples
    tokenizer: Tokenizer
    vocab: int
    sha256: str
    description: str
    notice: str
    unigram_entropy: float
    bytes_per_token: float

    @property
    def uniform_entropy(self) -> float:
        """The loss of a uniform prediction, in nats per token."""
        return math.log(self.vocab)

    def bytes_per_label(self, windows: int) -> float:
        """Returns the mean number of bytes of text per label (target token) in the validation data.

        Args:
            windows: number of validation windows to measure, beginning with the first window.
        """
        return bytes_per_token(self.valid.labels(0, windows), self.tokenizer)


def open_data(
    path: str | None, tokenizer: str, split: float, seq: int, seed: int, cache: Path | None = None, *,
    bos: Bos = "auto", special_tokens: SpecialTokens = "text", packing: bool = False,
) -> Data:  # fmt: skip
    """Opens the data at `path` as training and validation samples.

    Args:
        path: a .txt file, a .jsonl file, a folder of such files, or a Megatron pair (.bin and
            .idx). None: the default corpus.
        tokenizer: "bytes", a folder, or the path of a tokenizer.json; see `load_tokenizer`.
        split: fraction of the data for validation. The validation data are the last tokens; in the
            default corpus, they are files that are chosen by a hash of their path.
        seq: sample length in tokens.
        seed: seed of the order of training samples.
        cache: folder of tokenized text. Default: THREED_CACHE, or `~/.cache/threed`.
        bos: whether documents begin with the bos token; see `load_tokenizer`.
        special_tokens: how text that spells a special token is encoded; see `load_tokenizer`.
        packing: whether samples number their documents, which end with the tokenizer's `eot`.

    Returns:
        The data: `data.train` and `data.valid` are `Samples`.

    Raises:
        ValueError: if the data are missing, empty or malformed, if a split is too short for one
            sample, if ids are outside the vocabulary, or if no document ends as `packing` requires;
            the message states the fix.
    """
    _check_split(split)
    encoder = load_tokenizer(tokenizer, bos, special_tokens)
    folder, notice = cache_folder(cache)
    where = Path(path).expanduser() if path is not None else None
    if where and is_megatron(where):
        opened = _open_pair(where, encoder, split, folder, packing)
    else:
        opened = _open_text(_find_source(where), encoder, split, folder)
    train, valid = opened.tokens[: opened.cut], opened.tokens[opened.cut :]
    end = encoder.eot if packing else None
    return Data(
        train=_samples(train, seq, seed, True, "training split", "a smaller --data.split", end),
        valid=_samples(valid, seq, seed, False, "validation split", "a larger --data.split", end),
        tokenizer=encoder,
        vocab=encoder.vocab_size,
        sha256=opened.sha256,
        description=f"{opened.description}: {len(train):,} training and {len(valid):,} validation tokens",
        notice="\n".join(line for line in (opened.notice, notice) if line),
        **opened.facts,
    )


def find_problems(
    path: str | None,
    tokenizer: str,
    split: float,
    *,
    bos: Bos = "auto",
    special_tokens: SpecialTokens = "text",
    fits: Callable[[Tokenizer], Iterable[str]] = lambda tokenizer: (),
) -> list[str]:
    """Returns the problems that can be found without reading all data, each with its fix.

    Args:
        path: as in `open_data`.
        tokenizer: as in `open_data`.
        split: as in `open_data`.
        bos: as in `open_data`.
        special_tokens: as in `open_data`.
        fits: function that is called with the tokenizer and returns further problems, for example
            if the model's vocabulary is too small for it.
    """
    problems: list[str] = []
    checks: list[Callable[[], object]] = [
        lambda: _check_split(split),
        lambda: problems.extend(fits(load_tokenizer(tokenizer, bos, special_tokens))),
        lambda: _check_path(path),
    ]
    for check in checks:
        try:
            check()
        except (ValueError, OSError) as error:
            problems.append(str(error))
    return problems


@dataclass(frozen=True)
class _Opened:
    """A corpus as one flat sequence of tokens; tokens from `cut` on are for validation."""

    tokens: Tokens
    cut: int
    sha256: str
    facts: dict[str, float]
    description: str
    notice: str


def _check_split(split: float) -> None:
    if not 0.0 < split < 1.0:
        raise ValueError(
            f"--data.split {split}: the fraction for validation must be between 0 and 1, e.g. 0.05"
        )


def _check_path(path: str | None) -> None:
    where = None if path is None else Path(path).expanduser()
    if where and is_megatron(where):
        open_tokens(where)
        return
    for file in _find_source(where).files:
        if file.name.endswith(".jsonl"):
            next(read_pieces(file), None)
        with file.open():
            pass


def _find_source(path: Path | None) -> TextSource:
    return standard_library() if path is None else find_text(path)


def _samples(
    tokens: Tokens, seq: int, seed: int, shuffle: bool, name: str, fix: str, end: int | None
) -> Samples:
    try:
        return Samples(tokens, seq, seed, shuffle, name, end)
    except ValueError as error:
        raise ValueError(f"{error}. Give more data, or a smaller --model.seq, or {fix}") from error


def _open_text(source: TextSource, tokenizer: Tokenizer, split: float, folder: Path) -> _Opened:
    sha256 = _text_sha256(source, folder)
    key = _key(sha256, tokenizer.cache_key, repr(split), source.split_by)
    entry = build_once(
        folder, f"tokens-{key}", lambda scratch: _tokenize(source, tokenizer, split, scratch)
    )
    tokens = np.memmap(
        entry.folder / "tokens.bin", dtype=token_dtype(tokenizer.vocab_size), mode="r"
    )
    record = entry.record
    return _Opened(
        tokens, record["cut"], sha256, record["facts"], source.description, source.notice
    )


def _text_sha256(source: TextSource, folder: Path) -> str:
    def read(_: Path) -> dict[str, Any]:
        return {"sha256": source.sha256()}

    return str(_cached(folder, *source.stamp(), read)["sha256"])


def _cached(
    folder: Path, stamp: str, newest: float, read: Callable[[Path], dict[str, Any]]
) -> dict[str, Any]:
    """Returns the result of `read`, from the cache if no file has changed since the last `read`.

    If a file was changed less than `FRESH_S` seconds ago, the cache is not used.

    Args:
        folder: the cache folder.
        stamp: hash of the files' metadata.
        newest: time of the last change of any of the files, in Unix seconds.
        read: function that reads the files and returns the result. Its argument is a folder, which
            it may ignore.
    """
    if time.time() - newest < FRESH_S:
        return read(folder)
    return build_once(folder, f"files-{_key(stamp)}", read).record


def _tokenize(
    source: TextSource, tokenizer: Tokenizer, split: float, scratch: Path
) -> dict[str, Any]:
    """Writes tokens.bin, with the validation tokens last; returns the record of the cache entry.

    The record has the number of training tokens and the statistics of the validation tokens.
    """
    before = source.stamp()
    groups = _by_path(source.files, split) if source.split_by == "path" else [source.files]
    with (scratch / "tokens.bin").open("wb") as out:
        counts = [_write_tokens(out, files, tokenizer) for files in groups]
    if source.stamp() != before:
        raise ValueError(
            f"{source.description} changed while it was read. Start again when no process writes to it"
        )
    if sum(counts) == 0:
        raise ValueError(
            f"{source.description}: no text in it. Put text into it, or give another path"
        )
    tokens = np.memmap(scratch / "tokens.bin", dtype=token_dtype(tokenizer.vocab_size), mode="r")
    cut = counts[0] if source.split_by == "path" else _cut(len(tokens), split)
    return {"cut": cut, "facts": _measure(tokens[cut:], tokenizer, split)}


def _by_path(files: tuple[TextFile, ...], split: float) -> list[tuple[TextFile, ...]]:
    """Returns the training and the validation files.

    A hash of its name decides whether a file is for validation. But a file that is larger than
    `split` times the size of all files is always for training, so that no single file dominates the
    validation data. In the default corpus of Python 3.11, one file of help texts would otherwise be
    62 % of the validation data.
    """
    share = split * sum(f.size for f in files)
    held_out = {f.name for f in files if _fraction(f.name) < split and f.size <= share}
    return [tuple(f for f in files if (f.name in held_out) == side) for side in (False, True)]


def _fraction(name: str) -> float:
    """Returns a number in [0, 1) that is computed from the sha256 of a name."""
    return (
        int.from_bytes(
            hashlib.sha256(name.encode("utf-8", errors="surrogateescape")).digest()[:6], "big"
        )
        / 2**48
    )


def _write_tokens(out: BinaryIO, files: tuple[TextFile, ...], tokenizer: Tokenizer) -> int:
    written = 0
    pieces = (piece for file in files for piece in read_pieces(file, tokenizer.takes_any_bytes))
    for tokens, _ in encode(pieces, tokenizer):
        out.write(tokens.tobytes())
        written += len(tokens)
    return written


def _open_pair(
    path: Path, tokenizer: Tokenizer, split: float, folder: Path, packing: bool
) -> _Opened:
    tokens = open_tokens(path)
    data, index = pair_of(path)
    source = TextSource(str(path), tuple(TextFile(file.name, file) for file in (data, index)))

    def read(_: Path) -> dict[str, Any]:
        return {"sha256": source.sha256(), "range": id_range(tokens)}

    known = _cached(folder, *source.stamp(), read)
    low, high = known["range"]
    if low < 0 or high >= tokenizer.vocab_size:
        _refuse_ids(data, tokens, tokenizer)
    cut = _cut(len(tokens), split)
    key = _key(known["sha256"], tokenizer.cache_key, repr(split))

    def measure(_: Path) -> dict[str, Any]:
        borders = count_borders(tokens, read_index(index), tokenizer)
        return {"facts": _measure(tokens[cut:], tokenizer, split), "borders": asdict(borders)}

    record = build_once(folder, f"facts-{key}", measure).record
    borders = Borders(**record["borders"])
    notice = borders.notice(str(path), tokenizer)
    if packing and not borders.ended:
        raise ValueError(f"--data.packing true finds no documents: {notice}")
    return _Opened(tokens, cut, known["sha256"], record["facts"], str(path), notice)


def _refuse_ids(file: Path, tokens: Tokens, tokenizer: Tokenizer) -> NoReturn:
    offset = first_outside(tokens, tokenizer.vocab_size)
    found = "" if offset is None else f"token {int(tokens[offset])} at offset {offset}"
    raise ValueError(
        f"{file}: {found} is outside the {tokenizer.vocab_size} ids of tokenizer {tokenizer.name!r}. "
        "Give the tokenizer that wrote it: --data.tokenizer path/to/tokenizer.json"
    )


def _cut(tokens: int, split: float) -> int:
    return tokens - round(tokens * split)


def _measure(valid: Tokens, tokenizer: Tokenizer, split: float) -> dict[str, float]:
    """Returns the statistics in `Data`, measured on the first `MEASURED_TOKENS` of `valid`."""
    if not len(valid):
        raise ValueError(
            f"--data.split {split} leaves no validation data. Give a larger one, or more data"
        )
    return {
        "unigram_entropy": entropy(np.bincount(valid[:MEASURED_TOKENS])),
        "bytes_per_token": bytes_per_token(valid, tokenizer),
    }


def _key(*parts: str) -> str:
    return hashlib.sha256("\n".join([str(LAYOUT), *parts]).encode()).hexdigest()[:32]


def bytes_per_token(tokens: Tokens, tokenizer: Tokenizer) -> float:
    """Returns the mean bytes of text per token, measured on the first `MEASURED_TOKENS` tokens.

    Args:
        tokens: [n], token ids, n > 0.
        tokenizer: the tokenizer of the ids.
    """
    part = tokens[:MEASURED_TOKENS]
    return tokenizer.count_bytes(part) / len(part)


def entropy(counts: Tokens) -> float:
    """Returns the entropy of the frequencies of tokens, in nats: log n - (sum of c log c) / n.

    Args:
        counts: [vocab], the number c of occurrences of each token; n is the sum of `counts`.
    """
    seen = counts[counts > 0].astype(np.float64)
    total = seen.sum()
    return max(0.0, math.log(total) - float((seen * np.log(seen)).sum()) / float(total))


def id_range(tokens: Tokens) -> tuple[int, int]:
    """Returns the smallest and the largest of the ids `tokens` [n], n > 0."""
    ranges = [(int(block.min()), int(block.max())) for _, block in _blocks(tokens)]
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def first_outside(tokens: Tokens, vocab: int) -> int | None:
    """Returns the offset of the first id that is not in [0, vocab), or None."""
    for start, block in _blocks(tokens):
        outside = (block < 0) | (block >= vocab)
        if outside.any():
            return start + int(outside.argmax())
    return None


def _blocks(tokens: Tokens) -> Iterator[tuple[int, Tokens]]:
    for start in range(0, len(tokens), BLOCK):
        yield start, tokens[start : start + BLOCK]
