"""`threed train FILE.py:MODEL`: a custom model that imports threed alone trains with every flag of the command line."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from tests.harness import run_script
from tests.training.test_pretrain import environment
from threed.config import ModelConfig
from threed.core import source

MODEL = """
import torch
import threed


class Block(torch.nn.Module):
    def __init__(self, name, c, slicing):
        super().__init__()
        self.name = name
        self.norm = threed.layers.RMSNorm(f"{name}.norm", c.hidden, slicing)
        self.attention = threed.layers.Attention(f"{name}.attention", c.hidden, c.heads, slicing, rotary=1e4)
        self.up = threed.layers.ColumnLinear(f"{name}.mlp", c.hidden, [("up", 4 * c.hidden)], slicing)
        self.down = threed.layers.RowLinear(f"{name}.mlp.down", 4 * c.hidden, c.hidden, slicing)

    def forward(self, x, micro):
        y = self.norm(x)
        return x + self.attention(y) + self.down(self.up(y).relu().square())


class Parallel:
    def __init__(self, config, slicing):
        self.config, self.slicing, self.hidden = config, slicing, config.hidden

    def layers(self):
        c, s = self.config, self.slicing
        norm = threed.layers.RMSNorm("head.norm", c.hidden, s)
        head = threed.layers.LanguageModelHead("head", "embedding.word.weight", norm, c.vocab, c.hidden, s)
        blocks = [Block(f"blocks.{i}", c, s) for i in range(c.layers)]
        return [threed.layers.Embedding("embedding", c.vocab, c.hidden, s), *blocks, head]


class NoModel:
    def __init__(self, config, slicing):
        pass


class Other:
    def __init__(self, hidden, layers, heads):
        pass


class Raises:
    def __init__(self, config):
        raise ValueError("an odd width")


class Recurrent(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embedding = torch.nn.Embedding(config.vocab, config.hidden)
        self.lstm = torch.nn.LSTM(config.hidden, config.hidden, config.layers, batch_first=True)
        self.register_buffer("scale", torch.tensor(2.0))
        self.head = torch.nn.Linear(config.hidden, config.vocab)

    def forward(self, tokens):
        return {"logits": self.scale * self.head(self.lstm(self.embedding(tokens))[0])}


class Branching(Recurrent):
    def forward(self, tokens):
        return super().forward(tokens) if tokens.sum() > 0 else None


class Frozen(Recurrent):
    def __init__(self, config):
        super().__init__(config)
        self.requires_grad_(False)


class Headless(Parallel):
    def layers(self):
        return super().layers()[:-1]


class Bare(Parallel):
    def layers(self):
        first, *others = super().layers()
        return [first, torch.nn.Linear(self.hidden, self.hidden), *others]


class Pooled(Recurrent):
    def forward(self, tokens):
        return super().forward(tokens)["logits"].mean(1)


if __name__ == "__main__":
    full = [threed.load(path, build=Parallel) for path in ("runs/one", "exported")]
    (trained, weights), (exported, read) = ((e.steps, e.full_state_dict()) for e in full)
    assert full[0].config.model.arch.endswith("mine.py:Parallel")
    assert all(torch.equal(weights[name], read[name].to(weights[name])) for name in weights)
    print(trained, exported, sum(p.numel() for p in weights.values()))
"""
FLAGS = (
    "--model.layers 3 --model.hidden 32 --model.heads 4 --model.seq 32 --train.global-batch 8 --log.every 1"
    " --train.eval-samples 4 --train.sample-tokens 4 --data.path text.txt --optim.warmup 2 --precision.dtype fp64"
).split()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MODEL)
    (tmp_path / "text.txt").write_text(
        "".join(f"the square of {n} is {n * n}\n" for n in range(2000))
    )
    return tmp_path


def threed(folder: Path, ranks: int, *words: str) -> subprocess.CompletedProcess[str]:
    return run_script(ranks, ["-m", "threed", *words], folder, environment(folder))


def losses(folder: Path, name: str) -> list[float]:
    rows = map(json.loads, (folder / "runs" / name / "metrics.jsonl").read_text().splitlines())
    return [row["train/loss"] for row in rows if "train/loss" in row]


def test_a_custom_model_trains_resumes_and_loads_in_any_topology(folder: Path) -> None:
    """On 1 rank with wandb, and on 2 × 2; resumed from 1 to 2 ranks and from 4 to 1; exported and loaded."""
    part, split = "--train.stop-after 3", "--parallel.tp 2 --parallel.pp 2"
    for name, ranks, more in (
        ("one", 1, f"{part} --log.wandb offline"),
        ("four", 4, f"{part} --log.wandb off {split}"),
        ("one", 2, "--log.wandb off --zero.stage 3"),
        ("four", 1, "--log.wandb off"),
    ):
        words = ["--run.name", name, "--train.steps", "6", *more.split(), *FLAGS]
        done = threed(folder, ranks, "train", "mine.py:Parallel", *words)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "model      Parallel, " in done.stdout
        assert "-m threed train mine.py:Parallel --run.name" in done.stdout.splitlines()[-1]
    assert len(losses(folder, "one")) == 6
    assert losses(folder, "four") == pytest.approx(losses(folder, "one"), abs=1e-9)  # fp64
    assert list((folder / "runs" / "one" / "wandb").iterdir())
    assert threed(folder, 1, "convert", "runs/one", "exported", "--dtype", "fp32").returncode == 0
    refused = threed(folder, 1, "convert", "runs/one", "hf", "--to", "hf")
    assert "mine.py:Parallel, for which Hugging Face has no layout" in refused.stderr
    with safe_open(folder / "exported" / "model.safetensors", framework="pt") as file:
        assert "blocks.2.attention.query.weight" in file.keys()  # noqa: SIM118 (not a mapping)
    text = (folder / "mine.py").read_text().replace(".to(weights[name])", "")
    (folder / "mine.py").write_text(
        text.replace("torch.equal(", "torch.allclose(")
    )  # fp64 and fp32
    loaded = run_script(1, ["mine.py"], folder, environment(folder))
    assert loaded.stdout.startswith("6 0 "), loaded.stdout + loaded.stderr


def test_a_module_trains_on_data_ranks_and_is_exported(folder: Path) -> None:
    words = [*FLAGS, "--train.steps", "3", "--log.wandb", "off"]
    for name, ranks, more in (("one", 1, ""), ("two", 2, "--zero.stage 3 --zero.resident 0")):
        done = threed(
            folder, ranks, "train", "mine.py:Recurrent", *words, "--run.name", name, *more.split()
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "the model writes:\ndef " in done.stdout
        assert "UserWarning" not in done.stderr
    assert losses(folder, "two") == pytest.approx(losses(folder, "one"), abs=1e-9)  # fp64
    assert threed(folder, 1, "convert", "runs/two", "exported").returncode == 0
    module = source.load(str(folder / "mine.py")).Recurrent(
        ModelConfig(layers=3, hidden=32, vocab=257)
    )
    module.double().load_state_dict(load_file(folder / "exported" / "model.safetensors"))


def test_a_run_goes_on_after_its_file_moved(folder: Path) -> None:
    words = [*FLAGS, "--log.wandb", "off", "--run.name", "one"]
    assert (
        threed(folder, 1, "train", "mine.py:Parallel", *words, "--train.steps", "3").returncode == 0
    )
    (folder / "a b").mkdir()
    (folder / "mine.py").rename(folder / "a b" / "yours.py")
    script = "import threed, yours; print(threed.load('../runs/one', build=yours.Parallel).config.model.arch)"
    (folder / "a b" / "load.py").write_text(script)
    loaded = run_script(1, ["load.py"], folder / "a b", environment(folder))
    assert loaded.stdout.endswith("a b/yours.py:Parallel\n"), loaded.stderr
    done = threed(folder, 1, "train", "a b/yours.py:Parallel", *words, "--train.steps", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "-m threed train 'a b/yours.py:Parallel' --model.layers" in done.stdout.splitlines()[-1]


def test_the_file_that_a_checkpoint_names_is_not_imported(folder: Path) -> None:
    """A downloaded checkpoint could name a file of its own folder."""
    words = [*FLAGS, "--log.wandb", "off", "--run.name", "one", "--train.steps", "3"]
    assert threed(folder, 1, "train", "mine.py:Parallel", *words).returncode == 0
    (folder / "mine.py").write_text("open('imported', 'w')")
    (folder / "load.py").write_text("import threed; threed.load('runs/one')")
    step = "runs/one/checkpoints/step-3"
    for command in (
        ["-m", "threed", "convert", step, "out"],
        ["-m", "threed", "plan", "--checkpoint.resume", step],
        ["-m", "threed", "train", "gpt", "--checkpoint.resume", step, *FLAGS],
        ["load.py"],
    ):
        run_script(1, command, folder, environment(folder))
        assert not (folder / "imported").exists(), command


def test_plan_knows_a_custom_model(folder: Path) -> None:
    done = threed(
        folder,
        1,
        "plan",
        "mine.py:Parallel",
        *FLAGS,
        "--preset",
        "tiny",
        "--parallel.pp",
        "2",
        "--world-size",
        "4",
    )
    assert "model      Parallel, " in done.stdout, done.stderr
    assert "ranks      pp 2 × dp 2" in done.stdout
    done = threed(folder, 1, "plan", "mine.py:Branching", *FLAGS)
    assert "memory     of activations is not known: " in done.stdout, done.stderr
    assert "rank 0" in done.stdout


def test_a_model_that_an_engine_refuses_ends_the_run_without_a_traceback(folder: Path) -> None:
    done = threed(folder, 1, "train", "mine.py:Frozen", *FLAGS, "--log.wandb", "off")
    assert done.returncode == 2
    assert "threed: the model has no parameter to train" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("target", "more", "message"),
    [
        ("mine.py:Missing", "", "mine.py has no 'Missing' to call; its classes are Block, Parallel, NoModel, "),
        ("gone.py:Parallel", "", "gone.py: no such file"),
        ("mine.py:NoModel", "", "returned a NoModel without `layers`, `hidden`, `slicing`: return an object with `la"),
        ("mine.py:Other", "", "Other(hidden, layers, heads) of mine.py cannot be called as Other(config, slicing) or"),
        ("mine.py:Pooled", "", "Pooled returned (2, 257) for token ids (2, 32): its forward must take token ids"),
        ("mine.py:Headless", "", "blocks.2 (Block) is the last layer and returned tensors of shape [32, 2, 32] for a"),
        ("mine.py:Bare", "", "layer 1 (Linear): parameter weight has no sharding record: make it by threed.layers or"),
        ("mine.py:Recurrent", "--parallel.tp 2 --world-size 2", "Recurrent cannot be split by pp 1 or tp 2: build it"),
        ("mine.py:Recurrent", "--parallel.pp 2 --world-size 2", "Recurrent cannot be split by pp 2 or tp 1: build it"),
        ("mine.py:Recurrent", "--recompute.mode full", "Recurrent has no gradient_checkpointing_enable()"),
        ("mine.py:Parallel", "--checkpoint.export-hf true", "the Hugging Face layout cannot express that"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_refused_in_one_line(
    folder: Path, target: str, more: str, message: str
) -> None:
    done = threed(folder, 1, "plan", target, *FLAGS, "--world-size", "1", *more.split())
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_an_error_in_the_constructor_keeps_its_traceback(folder: Path) -> None:
    done = threed(folder, 1, "plan", "mine.py:Raises", *FLAGS)
    assert done.returncode == 1
    assert 'mine.py", line ' in done.stderr
    assert "ValueError: an odd width" in done.stderr
