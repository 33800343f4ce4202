"""Gradient hooks on weights of threed.layers: called with the gradient, in every topology, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.configs import engine_of, share, topology_of
from tests.harness import run_ranks
from threed.config import Config
from threed.config.resolution import resolve
from threed.distributed.sharding import spec_of
from threed.engine import Engine

VOCAB, SEQ, ROWS, LR, FACTOR = 64, 8, 4, 0.5, 0.25
Groups = dict[str, dict[str, Any]]
CASES: dict[int, dict[str, Groups]] = {
    1: {
        "one rank": {},
        "tied table": {"model": {"tied": True}},
        "norms with biases, recompute": {"model": {"arch": "gpt"}, "recompute": {"mode": "full"}},
        "chunked loss": {"recompute": {"loss_chunks": 2}},
        "MLPs in chunks": {"recompute": {"mlp_chunks": 3}, "model": {"arch": "gpt"}},
    },
    2: {
        "layer by layer": {"zero": {"stage": 3, "order": "layer", "resident": 0}},
        **{
            f"stage {stage}": {"zero": {"stage": stage, "resident": 0, "bucket_mib": 1e-3}}
            for stage in range(4)
        },
        "stage 3, tied, tiles": {
            "zero": {"stage": 3, "resident": 0, "tile": 2},
            "model": {"tied": True},
        },
        "tensor ranks": {"parallel": {"tp": 2}},
        "tensor ranks, whole sequences": {
            "parallel": {"tp": 2, "sequence": False},
            "model": {"tied": True},
        },
        "stages, tied": {"parallel": {"pp": 2}, "model": {"tied": True}},
        "stages with chunks": {"parallel": {"pp": 2, "schedule": "interleaved", "chunks": 2}},
        "split backwards": {"parallel": {"pp": 2, "schedule": "zb-h1"}, "model": {"tied": True}},
    },
}


def config_of(groups: Groups, lr: float, microbatches: int) -> Config:
    topology = topology_of(
        groups.get("parallel", {}).get("pp", 1), groups.get("parallel", {}).get("tp", 1)
    )
    values = {
        "model": {"arch": "llama", "layers": 2, "hidden": 16, "heads": 2, "seq": SEQ},
        "precision": {"dtype": "fp64"},
        "train": {"global_batch": ROWS, "micro_batch": ROWS // topology.dp // microbatches, "grad_clip": 0.0},
        "optim": {
            "name": "sgd", "momentum": 0.0, "lr": lr, "weight_decay": 0.0, "warmup": 0, "schedule": "constant",
        },
    }  # fmt: skip
    merged = {key: {**values.get(key, {}), **groups.get(key, {})} for key in {*values, *groups}}
    return resolve(Config.model_validate(merged), VOCAB, topology.world)


def weights_after(engine: Engine, steps: int = 2) -> dict[str, Tensor]:
    for step in range(steps):
        draw = torch.Generator().manual_seed(step)
        ids = torch.randint(0, VOCAB, (ROWS, SEQ + 1), generator=draw)
        engine.step(share({"tokens": ids[:, :-1], "labels": ids[:, 1:]}, engine.topology))
    return engine.full_state_dict()


def hooked(engine: Engine, kind: str, called: set[str]) -> None:
    """Registers a hook that scales the gradient on every parameter of this rank."""

    def scaled(param: nn.Parameter) -> Callable[[Tensor], Tensor]:
        def hook(gradient: Tensor) -> Tensor:
            assert (gradient.shape, gradient.dtype) == (param.shape, param.dtype)
            called.add(spec_of(param).name)
            return gradient * FACTOR

        return hook

    def scale(param: Tensor) -> None:
        assert param.grad is not None
        called.add(spec_of(param).name)
        param.grad.mul_(FACTOR)

    for slot in engine.layout.slots:
        if kind == "hook":
            slot.param.register_hook(scaled(slot.param))
        else:
            slot.param.register_post_accumulate_grad_hook(scale)


def with_hooks(groups: Groups) -> list[tuple[float, list[str]]]:
    """Returns, for each kind of hook, the largest difference from a run whose learning rate is scaled instead, and the
    parameters whose hook was not called."""
    found = []
    for kind, microbatches in (("hook", 2), ("post-accumulate", 1)):
        if microbatches == 1 and groups.get("parallel", {}).get("schedule") == "interleaved":
            continue  # needs two
        want = weights_after(engine_of(config_of(groups, LR * FACTOR, microbatches)))
        engine, called = engine_of(config_of(groups, LR, microbatches)), set[str]()
        hooked(engine, kind, called)
        got = weights_after(engine)
        off = max((float((got[name] - want[name]).abs().max()) for name in want), default=0.0)
        found.append((off, sorted({slot.spec.name for slot in engine.layout.slots} - called)))
    return found


def all_with_hooks(world: int, names: list[str]) -> dict[str, list[tuple[float, list[str]]]]:
    return {name: with_hooks(CASES[world][name]) for name in names}


# Each like another one of two ranks.
IN_GRID = ["stage 0", "stage 1", "stage 2", "tensor ranks", "stages, tied"]


@pytest.mark.parametrize(
    ("world", "names"),
    [
        pytest.param(1, list(CASES[1]), id="1"),
        pytest.param(2, [name for name in CASES[2] if name not in IN_GRID], id="2"),
        pytest.param(2, IN_GRID, id="2, others", marks=pytest.mark.grid),
    ],
)
def test_hooks_get_every_gradient_once(world: int, names: list[str]) -> None:
    for rank in run_ranks(world, all_with_hooks, world, names, timeout=300):
        for name, found in rank.items():
            assert all(off < 1e-12 and not missing for off, missing in found), (name, found)


def refused(groups: Groups, kind: str, microbatches: int) -> str:
    engine = engine_of(config_of(groups, LR, microbatches))
    hooked(engine, kind, set())
    try:
        weights_after(engine, steps=1)
    except RuntimeError as error:
        return str(error)
    return "not refused"


def all_refused() -> list[str]:
    compiled = {"run": {"compile": True, "compile_backend": "aot_eager"}, "model": {"layers": 1}}
    return [refused({}, "post-accumulate", 2), refused(compiled, "hook", 1)]


def test_hooks_that_cannot_be_right_are_refused_by_name() -> None:
    several, compiled = run_ranks(1, all_refused)[0]
    assert "register_post_accumulate_grad_hook with 2 micro-batches per step" in several
    assert "use register_hook" in several
    assert "blocks.0" in compiled
    assert "gradient hooks do not run on weights of compiled layers" in compiled
