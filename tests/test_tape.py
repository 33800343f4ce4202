"""Layers that run on tapes: the same bits as through autograd, in every topology, and only where nobody looks in."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from tests import test_equivalence as equivalence
from tests.configs import Case, batch, compare_in_worlds, config_of, engine_of, padded_to, share
from tests.covering import Space
from threed import models
from threed.engine import Engine
from threed.layers import block, loss
from threed.layers.block import Block
from threed.layers.loss import LanguageModelHead
from threed.layers.slicing import MicroBatch
from threed.ops import tape
from threed.pipeline.stage import AlwaysWhole, Stage

SETTINGS = equivalence.SETTINGS | {
    "pp": [1, 2],
    "dp": [1, 2],
    "tp": [1, 2],
    "schedule": ["1f1b", "vee"],
    "microbatches": [1, 3],
    "dtype": ["fp64", "fp32", "bf16"],
    "recompute": ["none", "full", "sliced", "selective"],
    "offload_optimizer": ["none"],
    "offload_params": ["none", "cpu"],
    "shard": ["all"],
    "partition": ["balanced"],
}


def _two_ranks(values: dict[str, object]) -> Case | None:
    case = equivalence.make(values)
    return case if case is not None and case.world <= 2 else None


SPACE = Space(
    SETTINGS,
    _two_ranks,
    cost=lambda case: case.world * case.layers,
    shape=lambda c: (c.pp, c.dp, c.tp),
)


@contextmanager
def without_tapes() -> Iterator[None]:
    """No layer finds that its parts run on a tape."""
    with ExitStack() as stack:
        for module in (block, loss):
            stack.enter_context(mock.patch.object(module, "may_run", return_value=False))
        yield


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """How often each function on a tape ran."""
    found: dict[str, int] = {}

    def count(function: Any, *arguments: Any) -> Any:
        found[function.__name__] = found.get(function.__name__, 0) + 1
        return apply(function, *arguments)

    apply = tape.apply
    with mock.patch.object(block, "apply", count), mock.patch.object(tape, "apply", count):
        yield found


def outcome(
    engine: Engine, rows: int, steps: int = 2
) -> tuple[list[tuple[float, float | None]], dict[str, Tensor]]:
    """Losses, norms and weights after some steps."""
    seen = [engine.step(share(batch(step, rows), engine.topology)) for step in range(steps)]
    return [(s.loss, s.grad_norm) for s in seen], engine.full_state_dict()


def compare(cases: Sequence[Case]) -> list[str]:
    """On every rank: what differs between steps on tapes and without."""
    wrong = []
    for case in cases:
        config = config_of(case)
        with padded_to(case.pad):
            engine, other = engine_of(config), engine_of(config)
        numbers, weights = outcome(engine, config.train.global_batch)
        with without_tapes():
            again, weights_again = outcome(other, config.train.global_batch)
        odd = [
            name for name, value in weights.items() if not torch.equal(value, weights_again[name])
        ]
        if numbers != again or odd:
            wrong.append(f"{case}: {numbers} and {again}; {odd}")
    return wrong


def test_every_bit_is_the_same_with_every_setting() -> None:
    compare_in_worlds(SPACE.touching(0), compare)


@pytest.mark.grid
@pytest.mark.timeout(3600)
def test_every_bit_is_the_same_in_a_covering_set() -> None:
    compare_in_worlds(SPACE.covering(0), compare)


@pytest.mark.grid
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1, 4))
def test_every_bit_is_the_same_in_all_topologies(seed: int) -> None:
    compare_in_worlds(equivalence.SPACE.covering(seed), compare)


def engine_alone(**changes: Any) -> tuple[Engine, int]:
    """An engine of one process, and the rows of its batches."""
    config = config_of(Case(**{"dtype": "fp32", "microbatches": 1, **changes}))
    return engine_of(config), config.train.global_batch


def blocks(engine: Engine) -> list[Any]:
    return [layer for layer in engine.blueprint.layers if isinstance(layer, Block)]


def test_a_block_is_one_function_to_autograd_on_a_cpu_and_two_around_a_core_of_its_own() -> None:
    engine, rows = engine_alone()
    layers, run = engine.blueprint.layers, LanguageModelHead._run
    names = [list(layer.state_dict()) for layer in layers]
    with (
        counted() as found,
        mock.patch.object(loss.LanguageModelHead, "_run", autospec=True) as head,
    ):
        head.side_effect = run
        engine.step(batch(0, rows))
    assert found == {"_AfterHeads": 3, "_AsOne": 2}  # and embedding and head
    assert head.call_count == 1
    assert [list(layer.state_dict()) for layer in layers] == names
    for one in blocks(engine):
        one.attention.core = lambda q, k, v: q + k + v
    with counted() as found:
        engine.step(batch(1, rows))
    assert found == {"_BeforeHeads": 3, "_AfterHeads": 3, "_AsOne": 2}


def _frozen(name: str) -> bool:
    return any(part in name for part in ("up.weight", "norm.bias", "out.bias", "position"))


def _some_are_frozen(build: Callable[..., Any], *arguments: Any) -> Any:
    model = build(*arguments)
    layers = model.layers

    def frozen() -> list[nn.Module]:
        found: list[nn.Module] = layers()
        for name, param in (pair for layer in found for pair in layer.named_parameters()):
            param.requires_grad_(not _frozen(name))
        return found

    model.layers = frozen
    return model


def test_frozen_parameters_stay_and_the_rest_is_the_same() -> None:
    build = functools.partial(_some_are_frozen, models.build)
    with mock.patch.object(models, "build", build), counted() as found:
        numbers, weights = outcome(*engine_alone())
    assert found == {"_AfterHeads": 6, "_AsOne": 4}
    with mock.patch.object(models, "build", build), without_tapes():
        again, weights_again = outcome(*engine_alone())
    fresh = engine_alone()[0].full_state_dict()
    assert numbers == again
    for name, value in weights.items():
        assert torch.equal(value, weights_again[name]), name
    same = [name for name, value in weights.items() if torch.equal(value, fresh[name])]
    assert same == list(filter(_frozen, weights))


# What somebody puts around a part of a block, and what shows that it was asked.


def _subclass(one: Any, asked: list[int]) -> None:
    class Louder(type(one.mlp)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            asked.append(1)
            y: Tensor = super().forward(x)
            return y

    one.mlp.__class__ = Louder


def _own_forward(one: Any, asked: list[int]) -> None:
    forward = one.mlp.forward
    one.mlp.forward = lambda x: (asked.append(1), forward(x))[1]


def _around(name: str, register: str) -> Callable[[Any, list[int]], None]:
    def put(one: Any, asked: list[int]) -> None:
        getattr(one.get_submodule(name), register)(lambda *_: asked.append(1))

    return put


def _of_parameter(one: Any, asked: list[int]) -> None:
    one.mlp_norm.weight.register_hook(lambda gradient: asked.append(1))


def _after_accumulation(one: Any, asked: list[int]) -> None:
    one.mlp_norm.weight.register_post_accumulate_grad_hook(lambda param: asked.append(1))


def _activation(one: Any, asked: list[int]) -> None:
    one.mlp.activation = lambda x: (asked.append(1), F.relu(x))[1]


AROUND: dict[str, Callable[[Any, list[int]], None]] = {
    "a class derived from MLP": _subclass,
    "a forward of the object's own": _own_forward,
    "an activation of the user's": _activation,
    "a hook on a parameter": _of_parameter,
    "a hook on a parameter's gradient": _after_accumulation,
    "a forward hook": _around("mlp.up", "register_forward_hook"),
    "a hook before the forward": _around("attention.out", "register_forward_pre_hook"),
    "a backward hook": _around("attention_norm", "register_full_backward_hook"),
    "a hook before the backward": _around("mlp.down", "register_full_backward_pre_hook"),
}


@pytest.mark.parametrize("what", AROUND)
def test_what_is_put_around_a_part_is_asked(what: str) -> None:
    engine, rows = engine_alone()
    engine.step(batch(0, rows))
    asked: list[int] = []
    AROUND[what](blocks(engine)[1], asked)
    with counted() as found:
        engine.step(batch(1, rows))
    assert asked
    assert found["_AfterHeads"] == 2  # the other blocks still run on tapes


def test_hooks_on_all_modules_are_asked() -> None:
    engine, rows = engine_alone()
    seen: list[str] = []
    handle = torch_modules.register_module_forward_hook(
        lambda module, *_: seen.append(type(module).__name__)
    )
    try:
        engine.step(batch(0, rows))
    finally:
        handle.remove()
    assert {"ColumnLinear", "RowLinear", "LayerNorm", "VocabEmbedding"} <= set(seen)


def test_tensors_are_saved_by_autograd_and_let_go_one_by_one() -> None:
    alive: list[int] = []

    class Thing:
        def __init__(self, value: Tensor) -> None:
            self.value = value
            alive.append(1)

        def __del__(self) -> None:
            alive.pop()

    left: list[int] = []

    def run(x: Tensor, on: tape.Tape) -> Tensor:
        for _ in range(3):
            on.note(lambda dy, x: (left.append(len(alive)), dy * x)[1], x)
            x = x * x.detach()
        return x

    x = torch.full((4,), 2.0, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(Thing, lambda thing: thing.value):
        y = tape.as_one(x, run)
    assert len(alive) == 3
    y.sum().backward()
    assert not alive
    assert left == [
        0,
        0,
        0,
    ]  # of hooks' things nothing is left when the steps begin: the steps own the tensors
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((4,), 2.0 * 4.0 * 16.0))


def test_a_tensor_changed_in_place_before_the_backward_is_an_error() -> None:
    def run(x: Tensor, on: tape.Tape) -> Tensor:
        on.note(lambda dy, x: dy * x, x)
        return x * 2

    x = torch.ones(3, requires_grad=True) * 1
    y = tape.as_one(x, run)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def _buffer_for_bias(one: Any) -> None:
    bias = one.mlp.up.bias.detach() + 0.5
    del one.mlp.up.bias
    one.mlp.up.register_buffer("bias", bias)


def _tensor_for_bias(one: Any) -> None:
    bias = one.mlp_norm.bias.detach() + 0.5
    del one.mlp_norm.bias
    one.mlp_norm.bias = bias


def _mlp_in_place_of_attention(one: Any) -> None:
    one.attention = one.mlp


def _linear_in_place_of_norm(one: Any) -> None:
    one.mlp_norm = one.attention.out


def _attention_in_place_of_mlp(one: Any) -> None:
    one.mlp = one.attention


def _one_norm_twice(one: Any) -> None:
    one.mlp_norm = one.attention_norm


CHANGES = [
    _mlp_in_place_of_attention,
    _linear_in_place_of_norm,
    _attention_in_place_of_mlp,
    _one_norm_twice,
]


@contextmanager
def built_with(change: Callable[[Any], None]) -> Iterator[None]:
    """Models are built with a change of their second block."""

    def build(*arguments: Any) -> Any:
        model = original(*arguments)
        layers = model.layers

        def others() -> list[nn.Module]:
            found: list[nn.Module] = layers()
            change(found[2])
            return found

        model.layers = others
        return model

    original = models.build
    with mock.patch.object(models, "build", build):
        yield


@pytest.mark.parametrize("change", CHANGES)
def test_parts_that_are_others_than_they_were_made_as(change: Callable[[Any], None]) -> None:
    with built_with(change), counted() as found:
        numbers, weights = outcome(*engine_alone(microbatches=3))
    assert found["_AfterHeads"] == 2 * 2 * 3
    with built_with(change), without_tapes():
        again, weights_again = outcome(*engine_alone(microbatches=3))
    assert numbers == again
    assert all(torch.equal(value, weights_again[name]) for name, value in weights.items())


@pytest.mark.parametrize("change", [_buffer_for_bias, _tensor_for_bias])
def test_a_bias_that_is_no_parameter_any_more_is_added(change: Callable[[Any], None]) -> None:
    (engine, rows), (other, _), (plain, _) = (engine_alone() for _ in range(3))
    change(blocks(engine)[1])
    change(blocks(other)[1])
    numbers, _ = outcome(engine, rows)
    with without_tapes():
        again, _ = outcome(other, rows)
    assert numbers == again
    assert numbers[0] != outcome(plain, rows)[0][0]


def test_uses_of_a_shared_norm_are_counted_alike_where_hooks_come_and_go() -> None:
    with built_with(_one_norm_twice):
        engine, rows = engine_alone(microbatches=3)
    handle = blocks(engine)[1].mlp.up.register_forward_hook(lambda *_: None)
    engine.step(batch(0, rows))
    handle.remove()
    with counted() as found:
        engine.step(batch(1, rows))
    assert found["_AfterHeads"] == 2 * 3


def test_a_head_whose_weight_is_made_of_others_trains() -> None:
    engine, rows = engine_alone(model="gpt-untied")
    head = engine.blueprint.layers[-1]
    weight = head.weight.detach().clone()
    del head.weight
    head.register_buffer("weight", weight)
    assert torch.isfinite(torch.tensor(engine.step(batch(0, rows)).loss))


def test_a_block_that_no_stage_calls_does_not_run_on_tapes() -> None:
    engine, rows = engine_alone()
    engine.step(batch(0, rows))
    one = copy.deepcopy(blocks(engine)[1])
    one.mlp = nn.Linear(32, 32)
    x = torch.randn(4, 2, 32, requires_grad=True)
    with counted() as found:
        one(x, MicroBatch(samples=torch.arange(2))).sum().backward()
    assert not found
    assert one.mlp.weight.grad is not None


def test_autocast_takes_blocks_off_their_tapes() -> None:
    engine, rows = engine_alone()
    with counted() as found, torch.autocast("cpu", torch.bfloat16):
        engine.step(batch(0, rows))
    assert "_AfterHeads" not in found


def test_a_layer_of_somebodys_may_have_a_method_called_look() -> None:
    class Looking(nn.Linear):
        def look(self, where: str) -> str:
            return where

        def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
            return super().forward(x)

    layer = Looking(4, 4)
    stage, x = Stage([layer], AlwaysWhole()), torch.ones(2, 4)
    stage.reset()
    assert torch.equal(stage.forward(0, x, MicroBatch()), F.linear(x, layer.weight, layer.bias))
