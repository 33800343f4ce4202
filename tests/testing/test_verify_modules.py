"""`threed verify` of an `nn.Module` that returns logits of random tokens, as `threed train` takes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from threed.cli.commands import main

MODEL = """
from torch import nn

class Logits(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        self.blocks = nn.ModuleList(nn.Linear(config.hidden, config.hidden) for _ in range(config.layers))
        self.head = nn.Linear(config.hidden, config.vocab)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x).relu()
        return self.head(x)

class Pooled(Logits):
    def forward(self, tokens):
        return super().forward(tokens).mean(1)
"""


def test_a_module_is_compared_on_data_ranks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logits_of_tokens.py").write_text(MODEL)
    file = tmp_path / "logits_of_tokens.py"
    assert main(["verify", f"{file}:Logits", "--topologies", "dp2-zero3,tp2"]) == 0
    out = capfd.readouterr().out
    assert "equal          dp2-zero3\nsame (1 of 2 topologies compared)\n" in out
    assert "not compared   tp2: Logits cannot be split by pp 1 or tp 2" in out
    assert main(["verify", f"{file}:Pooled", "--topologies", "dp2-zero3"]) == 2
    out = capfd.readouterr().out
    assert (
        "not compared   one process: Pooled returned (2, 53) for token ids (2, 16): its forwa"
        in out
    )
