"""Whether the documents of a Megatron pair begin and end as the tokenizer has it.

Use: `count_borders(tokens, index, tokenizer).notice(name, tokenizer)`. The notice is for the user to read; it is empty
if all documents begin and end as they should.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from threed.data.megatron import MegatronIndex
from threed.data.tokenizer import Tokenizer, Tokens

BLOCK = 1 << 20  # documents that are looked at together


@dataclass(frozen=True)
class Borders:
    """Counts of documents: all that have tokens; those that end with the end of text; those that begin with bos; and of
    those without an end of text how many end with the most frequent last id, and which that is."""

    documents: int
    ended: int
    begun: int
    alike: int
    last_id: int

    def notice(self, name: str, tokenizer: Tokenizer) -> str:
        """Returns what differs from how the tokenizer begins and ends documents, a line each."""
        lines = []
        if missing := self.documents - self.ended:
            which = f"; {self.alike:,} of them end with id {self.last_id}" if 2 * self.alike > missing else ""
            lines.append(
                f"{name}: {missing:,} of {self.documents:,} documents do not end with the end of text (id"
                f" {tokenizer.eot}){which}: they run into one another. Write the pair with --append-eod, or give the"
                " --data.tokenizer that wrote it"
            )
        if tokenizer.bos_ids and self.begun < self.documents:
            lines.append(
                f"{name}: {self.documents - self.begun:,} of {self.documents:,} documents do not begin with bos (id"
                f" {tokenizer.bos_ids[0]}), as the tokenizer begins texts. Write the pair anew, by `threed tokenize`"
            )
        if not tokenizer.bos_ids and self.begun and tokenizer.bos_token_id != tokenizer.eot:
            lines.append(
                f"{name}: {self.begun:,} of {self.documents:,} documents begin with bos (id {tokenizer.bos_token_id}),"
                " and prompts and the text of this run do not. Use --data.bos true"
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
        for number, count in zip(*np.unique(ends[ends != tokenizer.eot], return_counts=True), strict=True):
            last[int(number)] = last.get(int(number), 0) + int(count)
    last_id, alike = max(last.items(), key=lambda item: item[1], default=(-1, 0))
    return Borders(documents, ended, begun, alike, last_id)


def _with_tokens(borders: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the first token of each document that has any, and the one after its last."""
    first, end = borders[:-1], borders[1:]
    return first[end > first], end[end > first]
