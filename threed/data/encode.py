"""Encodes pieces of text into token arrays, a few MiB at a time.

    for tokens, ends in encode(source.pieces(), tokenizer): …

The tokens of a document begin with the bos token, if the tokenizer adds one, and end with the
end-of-text token, which separates documents in the flat sequence of training tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from threed.data.sources import Piece
from threed.data.tokenizer import Tokenizer, Tokens

# Bytes of text per call of the tokenizer. The `tokenizers` library encodes the pieces of a call in
# parallel; with this many bytes, there are enough pieces for all its threads.
GROUP_BYTES = 4 << 20


def encode(pieces: Iterable[Piece], tokenizer: Tokenizer) -> Iterator[tuple[Tokens, bool]]:
    """Yields (the tokens of a piece, whether the piece ends a document).

    The first piece of a document begins with the tokenizer's `bos_ids`, and the last piece ends
    with its `eot`.
    """
    begins = True
    for group in _groups(pieces):
        encoded = tokenizer.encode_pieces([piece.data for piece in group])
        for piece, tokens in zip(group, encoded, strict=True):
            before = tokenizer.bos_ids if begins else ()
            after = (tokenizer.eot,) if piece.ends else ()
            parts = [np.array(before, tokens.dtype), tokens, np.array(after, tokens.dtype)]
            yield np.concatenate(parts), piece.ends
            begins = piece.ends


def _groups(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        group.append(piece)
        size += len(piece.data)
        if size >= GROUP_BYTES:
            yield group
            group, size = [], 0
    yield group
