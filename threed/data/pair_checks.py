"""Checks whether the documents of a Megatron pair begin and end with the tokens that the tokenizer requires.

Use: `count_borders(tokens, index, tokenizer).notice(name, tokenizer)`. The notice is a report for the user; it is empty
if all documents do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from threed.data.megatron import MegatronIndex
from threed.data.tokenizer import Tokenizer, Tokens

BLOCK = 1 << 20  # documents that are counted at once


@dataclass(frozen=True)
class Borders:
    """Counts of the documents of a pair.

    Attributes:
        documents: documents with tokens.
        ended: documents that end with the end of text.
        begun: documents that begin with bos.
        alike: of the documents without an end of text, those that end with `last_id`.
        last_id: the most frequent last id of documents without an end of text.
    """

    documents: int
    ended: int
    begun: int
    alike: int
    last_id: int

    def notice(self, name: str, tokenizer: Tokenizer) -> str:
        """Returns the differences from the tokenizer's bos and end of text, one line each."""
        lines = []
        if missing := self.documents - self.ended:
            which = (
                f"; {self.alike:,} of them end with id {self.last_id}"
                if 2 * self.alike > missing
                else ""
            )
            lines.append(
                f"{name}: {missing:,} of {self.documents:,} documents do not end with the end of text (id"
                f" {tokenizer.eot}){which}: they run into one another. Write the pair with --append-eod, or give the"
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
    """Counts how the documents of a pair begin and end. tokens: [n], all of the pair."""
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
    """Returns the index of the first token of each non-empty document, and the index after its last one."""
    first, end = borders[:-1], borders[1:]
    return first[end > first], end[end > first]
