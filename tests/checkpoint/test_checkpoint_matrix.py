"""From any topology to any other: a checkpoint of each is loaded by each, with the same tensors and the same next loss.

Each source has trained on batches of its own, so no two have the same state; a target's engine loads one after the
other. Some pairs run always, all of them by `pytest -m grid`.
"""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.configs import EXPERT_MODELS, SEQ, VOCAB, batch, share, topology_of
from tests.configs import MODELS as BUILT_IN
from tests.harness import run_ranks
from tests.users_models import MODELS as USERS
from threed import models
from threed.checkpoint import native, sections
from threed.checkpoint.reading import Reader
from threed.config import Config
from threed.config.resolution import resolve
from threed.engine import Engine
from threed.layers import Slicing
from threed.zero.setup import state_names

ROWS, STEPS = 8, 2


@dataclass(frozen=True)
class Place:
    """A topology, and how the model is laid out there."""

    pp: int = 1
    dp: int = 1
    tp: int = 1
    cp: int = 1
    zero: int = 1
    count: int = 1  # micro-batches
    parallel: dict[str, Any] = field(default_factory=dict)
    sharing: dict[str, Any] = field(default_factory=dict)
    recompute: dict[str, Any] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.tp * self.cp


SMALL = {"bucket_mib": 0.03}
PLACES = {
    "alone": Place(),
    "alone nvme": Place(sharing={"offload_optimizer": "nvme"}),
    "pp2 gpipe": Place(pp=2, count=2, parallel={"schedule": "gpipe"}),
    "dp2 zero3 cpu": Place(dp=2, zero=3, sharing={"offload_optimizer": "cpu", "offload_params": "cpu", **SMALL}),
    "tp2": Place(tp=2, count=2, parallel={"sequence": False}),
    "pp2 dp2 zero0": Place(2, 2, zero=0, count=2),
    "pp2 dp2 zero1": Place(2, 2, zero=1, count=4, sharing=SMALL),
    "dp4 zero3": Place(dp=4, zero=3, sharing=SMALL),
    "dp2 tp2 zero2": Place(dp=2, tp=2, zero=2, parallel={"sequence": True}, sharing=SMALL),
    "pp2 tp2 interleaved": Place(2, 1, 2, count=4, parallel={"schedule": "interleaved", "chunks": 2}),
    "pp2 dp2 zb-v": Place(2, 2, zero=2, count=4, parallel={"schedule": "zb-v"}),
    "pp2 tp2 dualpipev": Place(2, 1, 2, count=4, parallel={"schedule": "dualpipev"}),
    "pp4 chimera": Place(4, count=4, parallel={"schedule": "chimera"}),
    "pp2 dp2 dualpipe": Place(2, 2, zero=2, count=4, parallel={"schedule": "dualpipe"}),
    "dp4 zero3 in twos": Place(dp=4, zero=3, sharing={"shard_size": 2}),
    "dp4 zero1 in twos": Place(dp=4, zero=1, sharing={"shard_size": 2, **SMALL}),
    "dp2 tp2 zero3 nvme": Place(dp=2, tp=2, zero=3, sharing={"offload_optimizer": "nvme", "offload_params": "nvme"}),
    "cp2": Place(cp=2, parallel={"cp_heads": 1}),
    "cp4 heads zero3": Place(cp=4, zero=3, parallel={"cp_heads": 4}, sharing=SMALL),
    "cp2 tp2 zero2": Place(cp=2, tp=2, zero=2, parallel={"cp_heads": 1, "sequence": True}),
    "cp4 zero1 nvme": Place(cp=4, parallel={"cp_heads": 2}, sharing={"offload_optimizer": "nvme"}),
    "dp4 ep4 zero1": Place(dp=4, parallel={"ep": 4}, sharing=SMALL),
    "dp2 tp2 ep2 zero3": Place(dp=2, tp=2, zero=3, parallel={"ep": 2, "sequence": True}, sharing=SMALL),
    "dp4 ep2 zero2": Place(dp=4, zero=2, parallel={"ep": 2}),
    "pp2 tp2 ep2": Place(2, 1, 2, count=2, parallel={"ep": 2}),
    "tp4": Place(tp=4, count=2, parallel={"sequence": True}, recompute={"mode": "full"}),
}  # fmt: skip
NAMES = list(PLACES)
OURS = {
    "gpt": 0.1,
    "qwen-tied": 0.0,
    "Biased": 0.1,
}  # with dropout, whose masks are those of the step
MODELS = ["gpt", "qwen-tied", "three-way-tie", "frozen-middle", "Biased"]


def config_of(model: str, place: Place) -> Config:
    sharing = {"stage": place.zero, "resident": 0, **place.sharing}
    sharing["nvme_path"] = tempfile.gettempdir() if "nvme" in place.sharing.values() else None
    shape: dict[str, Any] = {"layers": 3, "hidden": 32, "heads": 4, "seq": SEQ}
    if model in OURS:
        shape |= {**(BUILT_IN | EXPERT_MODELS)[model], "dropout": OURS[model]}
    ep = place.parallel.get("ep", 1) if model in EXPERT_MODELS else 1
    config = Config.model_validate({
        "parallel": {"pp": place.pp, "tp": place.tp, "cp": place.cp, "sequence": False, **place.parallel, "ep": ep},
        "zero": sharing,
        "precision": {"dtype": "fp64"},
        "recompute": place.recompute,
        "model": shape,
        "train": {"global_batch": ROWS, "micro_batch": ROWS // place.dp // place.count, "steps": 10},
        "optim": {"warmup": 0, "lr": 3e-3},
    })  # fmt: skip
    return resolve(config, VOCAB, place.world)


def engine_of(model: str, name: str) -> Engine:
    config, place = config_of(model, PLACES[name]), PLACES[name]
    topology = topology_of(place.pp, place.tp, place.cp)
    slicing = Slicing.of(topology, config)
    made = (
        models.build(config.model, slicing)
        if model in OURS
        else USERS[model](config.model, slicing)
    )
    return Engine(made, topology, config)


def step(engine: Engine, name: str) -> float:
    """The loss of a step on the next batch of a source's own."""
    return engine.step(
        share(batch(100 * NAMES.index(name) + engine.steps, ROWS), engine.topology)
    ).loss


def everything(engine: Engine) -> dict[str, Tensor]:
    """All weights and moments on rank 0, an empty dict elsewhere."""
    parts = ("weight", *state_names(engine.config.optim))
    found = {part: native.collect(engine.optimizer, engine.topology, part) for part in parts}
    return {f"{part} {name}": value for part, some in found.items() for name, value in some.items()}


def save_all(
    folder: Path, model: str, names: list[str]
) -> dict[str, tuple[dict[str, Tensor], float]]:
    """On the ranks of a world: saves from each place; what was saved, and the loss of the next step. From every second
    one, all that hold a slice write a part of it, however small."""
    out = {}
    for name in names:
        engine = engine_of(model, name)
        for _ in range(STEPS):
            step(engine, name)
        with mock.patch.object(
            sections, "LEAST_BYTES", 1 if NAMES.index(name) // 2 % 2 else sections.LEAST_BYTES
        ):
            engine.save(folder / name)
        out[name] = everything(engine), step(engine, name)
    return out


def load_all(
    folder: Path, model: str, pairs: list[tuple[str, str]], losses: dict[str, float], saved: Path
) -> list[str]:
    """On the ranks of a world: loads the sources of each target; what differs."""
    wrong = []
    for target, some in itertools.groupby(pairs, key=lambda pair: pair[1]):
        engine = engine_of(model, target)
        for source, _ in some:
            engine.load(folder / source)
            found, steps = everything(engine), engine.steps
            loss = step(engine, source)
            if found:
                want = torch.load(saved / f"{source}.pt")
                other = [
                    key
                    for key in want.keys() | found.keys()
                    if not torch.equal(want[key], found[key])
                ]
                facts = (other[:3], steps == STEPS, abs(loss - losses[source]) < 1e-12)
                wrong += (
                    [] if facts == ([], True, True) else [f"{model}: {source} to {target}: {facts}"]
                )
    return wrong


def compare(folder: Path, model: str, pairs: list[tuple[str, str]]) -> None:
    """Saves from each source once, and loads in every target of it."""
    losses, saved = {}, folder / "saved"
    saved.mkdir()
    for world, names in worlds([source for source, _ in pairs]).items():
        for name, (tensors, loss) in run_ranks(world, save_all, folder, model, names, timeout=900)[
            0
        ].items():
            torch.save(tensors, saved / f"{name}.pt")
            losses[name] = loss
    assert len(set(losses.values())) == len(losses)
    for world, targets in worlds([target for _, target in pairs]).items():
        mine = sorted(
            (pair for pair in pairs if pair[1] in targets), key=lambda pair: NAMES.index(pair[1])
        )
        wrong = run_ranks(world, load_all, folder, model, mine, losses, saved, timeout=2400)[0]
        assert wrong == []


def worlds(names: list[str]) -> dict[int, list[str]]:
    """Names of places, each once, by the ranks they take."""
    found = sorted(set(names), key=NAMES.index)
    return {
        n: [name for name in found if PLACES[name].world == n]
        for n in sorted({PLACES[n].world for n in found})
    }


EVERYDAY = {
    "gpt": [
        ("alone", "dp4 zero3"),
        ("cp4 heads zero3", "pp2 dp2 zero1"),
        ("pp2 tp2 interleaved", "alone nvme"),
        ("pp2 dp2 zb-v", "tp4"),
        ("dp4 zero3 in twos", "cp2 tp2 zero2"),
    ],
    "frozen-middle": [
        ("dp2 zero3 cpu", "pp4 chimera"),
        ("pp2 gpipe", "cp2"),
        ("tp2", "dp4 zero1 in twos"),
        ("cp4 zero1 nvme", "dp2 tp2 zero2"),
        ("dp2 tp2 zero3 nvme", "pp2 dp2 zero0"),
    ],
}
# Without experts, their ranks are data ranks. The others have the chunks of "pp2 dp2 zb-v" and of "pp4 chimera".
ALIKE = {
    *("dp4 ep4 zero1", "dp2 tp2 ep2 zero3", "dp4 ep2 zero2", "pp2 tp2 ep2"),
    *("pp2 tp2 dualpipev", "pp2 dp2 dualpipe"),
}


@pytest.mark.parametrize("model", EVERYDAY)
def test_every_topology_goes_to_another(tmp_path: Path, model: str) -> None:
    """Each place that is unlike the others is a source or a target, half of them with each model."""
    used = {place for pairs in EVERYDAY.values() for pair in pairs for place in pair}
    assert used == {*NAMES} - ALIKE
    compare(tmp_path, model, EVERYDAY[model])


def load_moments_of_another_expert(*given: Any) -> list[str]:
    """Like `load_all`, with a planted fault: the first expert gets the moments of the second."""
    real = Reader.tensor

    def tensor(self: Reader, part: str, name: str) -> Any:
        return real(
            self, part, name if part == "weight" else name.replace("experts.0.", "experts.1.")
        )

    with mock.patch.object(Reader, "tensor", tensor):
        return load_all(*given)


def test_moments_of_another_expert_are_found(tmp_path: Path) -> None:
    ((tensors, loss),) = run_ranks(1, save_all, tmp_path, "Biased", ["alone"])[0].values()
    torch.save(tensors, tmp_path / "alone.pt")
    given = tmp_path, "Biased", [("alone", "alone")], {"alone": loss}, tmp_path
    assert run_ranks(1, load_all, *given)[0] == []
    (wrong,) = run_ranks(1, load_moments_of_another_expert, *given)[0]
    assert "experts.0." in wrong


EXPERT_PLACES = [
    "alone",
    "dp4 ep4 zero1",
    "dp4 ep2 zero2",
    "tp2",
    "pp2 dp2 zero1",
    "dp2 tp2 ep2 zero3",
    "pp2 tp2 ep2",
]


@pytest.mark.parametrize(
    ("step", "every"),
    [(1, 2), *(pytest.param(step, 1, marks=pytest.mark.grid) for step in (1, 3))],
)
def test_experts_go_from_any_rank_to_any_other(tmp_path: Path, step: int, every: int) -> None:
    """Each place is a source or a target."""
    places = EXPERT_PLACES
    pairs = [(name, places[(i + step) % len(places)]) for i, name in enumerate(places)][::every]
    assert {place for pair in pairs for place in pair} == {*places}
    compare(tmp_path, "Biased", pairs)


@pytest.mark.grid
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("model", MODELS)
def test_every_topology_goes_to_every_other(tmp_path: Path, model: str) -> None:
    assert len(NAMES) >= 16
    compare(tmp_path, model, list(itertools.product(NAMES, NAMES)))
