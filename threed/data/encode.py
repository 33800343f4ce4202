"""From pieces of text to token arrays, a few MiB at a time.

Use: `for tokens, ends in encode(source.pieces(), tokenizer): …`. After the last piece of every document comes the end
of text, so that documents stay apart in the flat run that training reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from threed.data.sources import Piece
from threed.data.tokenizer import Tokenizer, Tokens

# Enough pieces at once for the `tokenizers` library to use all its threads.
GROUP_BYTES = 4 << 20


def encode(pieces: Iterable[Piece], tokenizer: Tokenizer) -> Iterator[tuple[Tokens, bool]]:
    """Returns each piece's tokens, the end of text included where a document ends, and whether one ends there."""
    group: list[Piece] = []
    held = 0
    for piece in pieces:
        group.append(piece)
        held += len(piece.data)
        if held >= GROUP_BYTES:
            yield from _encode_group(group, tokenizer)
            group, held = [], 0
    yield from _encode_group(group, tokenizer)


def _encode_group(group: list[Piece], tokenizer: Tokenizer) -> Iterator[tuple[Tokens, bool]]:
    encoded = tokenizer.encode_pieces([piece.data for piece in group])
    for piece, tokens in zip(group, encoded, strict=True):
        yield (np.append(tokens, tokens.dtype.type(tokenizer.eot)) if piece.ends else tokens), piece.ends
