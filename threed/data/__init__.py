"""Data: from text or token files to batches that are a pure function of (seed, samples consumed).

Use: `data = open_data(None, "bytes", split=0.05, seq=128, seed=1)`, then
`data.train.batch(first=0, count=8)`.

Modules, in the order of the data flow: sources (.txt, .jsonl and folders; by default Python's
standard library), tokenizer, encode, cache, megatron (reads and writes .bin/.idx), samples (windows
of tokens and their order), prefetch (a background thread), dataset (`open_data`, which combines the
others).
"""

from __future__ import annotations

from threed.data.dataset import Data, open_data
from threed.data.megatron import TokenizeSummary, tokenize_to_megatron
from threed.data.samples import Samples
from threed.data.tokenizer import ByteTokenizer, Tokenizer, TokenizerJson, load_tokenizer

__all__ = [
    "open_data", "Data", "Samples", "load_tokenizer", "Tokenizer", "ByteTokenizer", "TokenizerJson",
    "tokenize_to_megatron", "TokenizeSummary",
]  # fmt: skip
