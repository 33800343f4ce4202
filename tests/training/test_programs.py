"""`threed.Trainer` for a user's model: from a configuration, and what it refuses."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

import threed
from tests.harness import run_ranks
from tests.runs import TINY, configuration, open_text
from threed import layers
from threed.checkpoint import native
from threed.config import Config, ConfigError, ModelConfig
from threed.core.source import name_of
from threed.trainer import start_engine
from threed.training import Callback


class Shallow:
    """An embedding and a head."""

    def __init__(self, config: ModelConfig, slicing: layers.Slicing) -> None:
        self.config, self.slicing, self.hidden = config, slicing, config.hidden

    def layers(self) -> list[Any]:
        c, slicing = self.config, self.slicing
        norm = layers.RMSNorm("head.norm", c.hidden, slicing)
        table = "embedding.word.weight"
        head = layers.LanguageModelHead("head", table, norm, c.vocab or 0, c.hidden, slicing)
        return [layers.Embedding("embedding", c.vocab or 0, c.hidden, slicing), head]


class Tokens(torch.nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(config.vocab or 0, config.vocab or 0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.embedding(tokens)
        return out


class Count(Callback):
    steps = 0

    def after_step(self, run: Any, metrics: Any, row: dict[str, float]) -> None:
        self.steps += 1
        row["steps"] = self.steps


def given(folder: Path, **groups: dict[str, Any]) -> Config:
    open_text(folder)
    own = {"run": {"dir": str(folder / "run")}, "data": {"path": str(folder / "text.txt")}}
    own |= {"train": {**TINY["train"], "steps": 2}, "optim": {"warmup": 1}}
    return Config.model_validate({**TINY, **own, **groups})


def train(folder: Path, patch: pytest.MonkeyPatch) -> str:
    """Trains two steps, and returns the model's name in the checkpoint."""
    patch.setenv("THREED_CACHE", str(folder / "cache"))
    count = Count()
    threed.Trainer.from_config(given(folder), Shallow, callbacks=[count]).run()
    assert count.steps == 2
    manifest = native.read_manifest(folder / "run" / "checkpoints" / "step-2")
    return str(manifest["config"]["model"]["arch"])


def work(folder: Path) -> str:
    with pytest.MonkeyPatch.context() as patch:
        return train(folder, patch)


def refusals(folder: Path) -> list[str]:
    """The problems of a local class, of keys, of data, and of an engine that another program built."""

    class Local(Shallow):
        pass

    found = []
    for config, model in (
        (given(folder), Local),
        (given(folder, train={"global_batch": 3, "micro_batch": 2}), Shallow),
        (given(folder, data={"path": "gone.txt"}), Shallow),
    ):
        with pytest.raises(ConfigError) as caught:
            threed.Trainer.from_config(config, model)
        found.append(str(caught.value))
    data = open_text(folder)
    config = configuration(folder, data, world=1)
    engine = threed.Engine(Shallow(config.model, threed.Slicing()), threed.Topology(), config)
    with pytest.raises(ConfigError) as caught:
        threed.Trainer(engine, data)
    return [*found, str(caught.value)]


def seeds(folder: Path) -> tuple[int, float]:
    """The seed of a module's dropout after two starts, and the sum of its initial values."""
    data = open_text(folder)
    config = configuration(folder, data, world=2, model={"arch": name_of(Tokens)})
    weights = start_engine(config).full_state_dict()
    return torch.initial_seed(), float(sum(w.sum() for w in weights.values()))


def test_the_random_numbers_of_a_module_are_seeded(tmp_path: Path) -> None:
    first, second = (run_ranks(2, seeds, tmp_path) for _ in range(2))
    assert [seed for seed, _ in first] == [1234, 1235]
    assert first == second


def test_a_trainer_of_a_configuration_trains_a_users_model(tmp_path: Path) -> None:
    assert run_ranks(1, work, tmp_path) == [name_of(Shallow)]


def test_a_trainer_refuses_what_it_cannot_train(tmp_path: Path) -> None:
    (problems,) = run_ranks(1, refusals, tmp_path)
    for problem, expected in zip(
        problems,
        [
            "Local is not a class or function at the top level of a file",
            "--train.global-batch 3",
            "gone.txt",
            "the model is a Shallow, but model.arch is gpt: create the trainer by Trainer.from_config",
        ],
        strict=True,
    ):
        assert expected in problem


def test_examples_import_public_packages_only() -> None:
    public = {"threed", *(f"threed.{name}" for name in threed.__all__)}
    examples = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
    assert examples
    for path in examples:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        imported = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        imported |= {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
        own = {name for name in imported if name.split(".")[0] == "threed"}
        assert own <= public, path.name
