"""What a command reports about presets: tokenizers that the user has to download, and missing topologies."""

from __future__ import annotations

import pytest

from threed.cli.commands import main
from threed.config.arguments import PRESETS, load
from threed.data.tokenizer_files import PUBLISHED, how_to_download


def test_a_preset_that_trains_on_bytes_names_its_tokenizer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "gpt", "--preset", "gpt2", "--model.layers", "1"]) == 0
    (note,) = [line for line in capsys.readouterr().out.splitlines() if "tokenizer" in line]
    assert note.startswith("tokenizer  bytes: 257 of the model's 50257 token ids are used.")
    assert "hf download openai-community/gpt2 --include 'tokenizer*' --local-dir gpt2, " in note
    assert note.endswith("then --data.tokenizer gpt2")
    assert main(["plan", "gpt", "--preset", "tiny"]) == 0
    assert "tokenizer" not in capsys.readouterr().out


def test_a_preset_without_a_topology_for_the_ranks_is_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = "--model.layers 1 --model.vocab 257 --train.global-batch 32".split()
    assert main(["plan", "--preset", "mistral-7b", "--world-size", "16", *small]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "topology   mistral-7b has none for 16 ranks, only for 8, 64, 512: its other keys apply"
    )


def test_a_missing_tokenizer_is_refused_with_the_steps(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "gpt", "--preset", "gpt2", "--data.tokenizer", "no/gpt2"]) == 2
    problem = capsys.readouterr().err
    assert "tokenizer 'no/gpt2' does not exist" in problem
    assert "threed does not download it" in problem
    assert how_to_download() in problem


def test_presets_of_published_models_have_a_published_tokenizer() -> None:
    vocabularies = {load(["--preset", path.stem])[0].model.vocab for path in PRESETS.glob("*.toml")}
    assert vocabularies == {None, *PUBLISHED}
