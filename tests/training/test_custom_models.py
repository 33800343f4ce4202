"""`threed train FILE.py:MODEL`: a custom model that imports threed alone trains with every flag of the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.test_pretrain import environment

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


if __name__ == "__main__":
    engine = threed.load("runs/one", build=Parallel)
    print(engine.steps, sum(p.numel() for p in engine.full_state_dict().values()))
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
    launcher = (
        ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
        if ranks > 1
        else []
    )
    command = [sys.executable, "-m", *launcher, "threed", *words]
    return subprocess.run(
        command, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=300
    )


def losses(folder: Path, name: str) -> list[float]:
    rows = map(json.loads, (folder / "runs" / name / "metrics.jsonl").read_text().splitlines())
    return [row["train/loss"] for row in rows if "train/loss" in row]


def test_a_custom_model_trains_resumes_and_loads_in_any_topology(folder: Path) -> None:
    for name, ranks, more in (
        ("one", 1, "--train.steps 3 --log.wandb offline"),
        ("four", 4, "--train.steps 6 --log.wandb off --parallel.tp 2 --parallel.pp 2 --preset tiny"),
        ("one", 2, "--train.steps 6 --log.wandb off --zero.stage 3"),
    ):  # fmt: skip
        done = threed(
            folder, ranks, "train", "mine.py:Parallel", "--run.name", name, *more.split(), *FLAGS
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "model      Parallel, " in done.stdout
        assert "-m threed train mine.py:Parallel --run.name" in done.stdout.splitlines()[-1]
    # the learning rate of the first three steps is that of a run of three steps
    assert losses(folder, "one")[0] == pytest.approx(losses(folder, "four")[0], abs=1e-9)
    assert len(losses(folder, "one")) == len(losses(folder, "four")) == 6
    assert list((folder / "runs" / "one" / "wandb").iterdir())
    loaded = subprocess.run(
        [sys.executable, "mine.py"], cwd=folder, env=environment(folder), capture_output=True, text=True
    )  # fmt: skip
    assert loaded.stdout.startswith("6 "), loaded.stdout + loaded.stderr


def test_losses_of_a_custom_model_are_those_of_one_process(folder: Path) -> None:
    words = ["train", "mine.py:Parallel", *FLAGS, "--train.steps", "3", "--log.wandb", "off"]
    threed(folder, 1, *words, "--run.name", "one")
    threed(folder, 4, *words, "--run.name", "four", "--parallel.tp", "2", "--parallel.pp", "2")
    assert losses(folder, "four") == pytest.approx(losses(folder, "one"), abs=1e-9)


def test_a_run_goes_on_after_its_file_moved(folder: Path) -> None:
    words = [*FLAGS, "--log.wandb", "off", "--run.name", "one"]
    assert (
        threed(folder, 1, "train", "mine.py:Parallel", *words, "--train.steps", "3").returncode == 0
    )
    (folder / "a b").mkdir()
    (folder / "mine.py").rename(folder / "a b" / "yours.py")
    done = threed(folder, 1, "train", "a b/yours.py:Parallel", *words, "--train.steps", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "-m threed train 'a b/yours.py:Parallel' --model.layers" in done.stdout.splitlines()[-1]


def test_the_file_that_a_checkpoint_names_is_not_imported(folder: Path) -> None:
    """A downloaded checkpoint could name a file of its own folder."""
    words = [*FLAGS, "--log.wandb", "off", "--run.name", "one", "--train.steps", "3"]
    assert threed(folder, 1, "train", "mine.py:Parallel", *words).returncode == 0
    (folder / "mine.py").write_text("open('imported', 'w')")
    step = "runs/one/checkpoints/step-3"
    for command in (
        ["-m", "threed", "convert", step, "out"],
        ["-m", "threed", "plan", "--checkpoint.resume", step],
        ["-m", "threed", "train", "gpt", "--checkpoint.resume", step, *FLAGS],
        ["-c", "import threed; threed.load('runs/one')"],
    ):
        subprocess.run(
            [sys.executable, *command], cwd=folder, env=environment(folder), capture_output=True
        )  # fmt: skip
        assert not (folder / "imported").exists(), command


def test_plan_knows_a_custom_model(folder: Path) -> None:
    done = threed(
        folder, 1, "plan", "mine.py:Parallel", *FLAGS, "--parallel.pp", "2", "--world-size", "4"
    )
    assert "model      Parallel, " in done.stdout, done.stderr
    assert "ranks      pp 2 × dp 2" in done.stdout


@pytest.mark.parametrize(
    ("target", "more", "message"),
    [
        ("mine.py:Missing", "", "mine.py has no 'Missing' to call; its classes are Block, Parallel, NoModel"),
        ("gone.py:Parallel", "", "gone.py: no such file"),
        ("mine.py:NoModel", "", "returned a NoModel: return an object with `layers()`"),
        ("mine.py:Parallel", "--checkpoint.export-hf true", "the Hugging Face layout cannot express that"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_refused_in_one_line(
    folder: Path, target: str, more: str, message: str
) -> None:
    done = threed(folder, 1, "plan", target, *FLAGS, *more.split(), "--world-size", "1")
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
