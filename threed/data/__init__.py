"""Data: from text or token files to batches that are a pure function of (seed, samples consumed).

    data = open_data(None, "bytes", split=0.05, seq=128, seed=1)
    data.train.batch(first=0, count=8)

The modules, in the order of the data flow:

- `sources` reads text files and folders; by default, the sources of Python's standard library.
- `tokenizer` and `encode` convert text to token ids.
- `cache` stores the ids; `megatron` reads and writes Megatron's .bin and .idx files.
- `samples` divides the ids into windows, and computes the order of the windows.
- `dataset` combines these modules (`open_data`).
- `prefetch` computes the next batches in a background thread.
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
