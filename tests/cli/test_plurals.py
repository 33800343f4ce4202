"""Counts in messages have singular and plural."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.test_floors import ROOT
from threed.cli.commands import main
from threed.core.messages import counted


def test_counted() -> None:
    assert [counted(n, "rank") for n in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
    assert [counted(n, "micro-batch") for n in (1, 2)] == ["1 micro-batch", "2 micro-batches"]
    assert [counted(n, "process") for n in (1, 2)] == ["1 process", "2 processes"]
    assert [counted(n, "entry") for n in (1, 2)] == ["1 entry", "2 entries"]
    assert counted(2000, "key", ",") == "2,000 keys"
    assert [counted(n, "micro-batch", "g") for n in (1.0, 2.5)] == [
        "1 micro-batch",
        "2.5 micro-batches",
    ]


def test_no_message_adds_an_s_by_itself() -> None:
    for path in (ROOT / "threed").rglob("*.py"):
        text = path.read_text()
        assert not re.search(r"""\{['"]s['"] (\*|if) """, text) or path.name in EXCEPT, path


EXCEPT = ("replicas.py",)  # "ranks 1, 2 have"


def test_a_plan_and_a_corpus_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("hello")
    assert main(["tokenize", "text.txt", "out"]) == 0
    small = "--model.layers 2 --train.global-batch 2 --data.path out --model.seq 2"
    assert capsys.readouterr().out.startswith("1 document, 6 tokens: ")
    (tmp_path / "text.txt").write_text("hello" * 99)
    words = small.replace("out", "text.txt").split()
    assert main(["plan", "gpt", *words]) == 0
    assert "2 × 2 tokens, 1 micro-batch per data rank" in capsys.readouterr().out
    assert main(["plan", "gpt", "--world-size", "2", "--parallel.dp", "1"]) == 2
    assert "or start 1 rank" in capsys.readouterr().err
