"""From pieces of text to token arrays, a few MiB at a time.

Use: `for tokens, ends in encode(source.pieces(), tokenizer): …`. Before the first piece of every document comes the
bos token, if the tokenizer begins documents with one, and after the last piece the end of text, so that documents stay
apart in the flat run that training reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from threed.data.sources import Piece
from threed.data.tokenizer import Tokenizer, Tokens

# Enough pieces at once for the `tokenizers` library to use all its threads.
GROUP_BYTES = 4 << 20


def encode(pieces: Iterable[Piece], tokenizer: Tokenizer) -> Iterator[tuple[Tokens, bool]]:
    """Yields each piece's tokens, with bos at the beginning and the end of text at the end of a document, and whether
    the piece ends a document."""
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
    held = 0
    for piece in pieces:
        group.append(piece)
        held += len(piece.data)
        if held >= GROUP_BYTES:
            yield group
            group, held = [], 0
    yield group
