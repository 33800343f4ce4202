"""Blocks, embeddings and heads in the engine: frozen parameters, hooks on parts, and parts replaced by other modules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from tests.configs import Case, batch, config_of, engine_of, share
from threed import models
from threed.distributed.topology import Axis
from threed.engine import Engine
from threed.layers.block import Block
from threed.layers.linear import Terms, gradients, linear
from threed.layers.slicing import MicroBatch

Change = Callable[[list[nn.Module]], None]


def engine_alone(**changes: Any) -> tuple[Engine, int]:
    """Returns an engine of one process, and the rows of its batches."""
    config = config_of(Case(**{"dtype": "fp64", "microbatches": 1, **changes}))
    return engine_of(config), config.train.global_batch


def outcome(
    engine: Engine, rows: int, steps: int = 2
) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """Returns losses, norms and weights after some steps."""
    seen = [engine.step(share(batch(step, rows), engine.topology)) for step in range(steps)]
    return [(s.loss, s.grad_norm) for s in seen], engine.full_state_dict()


def block_of(engine: Engine) -> Any:
    """Returns the second block of the model."""
    return [layer for layer in engine.blueprint.layers if isinstance(layer, Block)][1]


@contextmanager
def built_with(change: Change) -> Iterator[None]:
    """Models are built with a change of their layers."""

    def build(*arguments: Any) -> Any:
        model = original(*arguments)
        layers = model.layers

        def changed() -> list[nn.Module]:
            found: list[nn.Module] = layers()
            change(found)
            return found

        model.layers = changed
        return model

    original = models.build
    with mock.patch.object(models, "build", build):
        yield


def _is_frozen(name: str) -> bool:
    return any(part in name for part in ("up.weight", "norm.bias", "out.bias", "position"))


def _freeze(layers: list[nn.Module]) -> None:
    for name, param in (pair for layer in layers for pair in layer.named_parameters()):
        param.requires_grad_(not _is_frozen(name))


def test_frozen_parameters_stay_and_the_others_are_trained() -> None:
    with built_with(_freeze):
        _, weights = outcome(*engine_alone())
    fresh = engine_alone()[0].full_state_dict()
    same = [name for name, value in weights.items() if torch.equal(value, fresh[name])]
    assert same == list(filter(_is_frozen, weights))


# Customizations of a part of a block, each of which appends to `calls` when it runs.


def _subclass(one: Any, calls: list[int]) -> None:
    class Louder(type(one.mlp)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            calls.append(1)
            y: Tensor = super().forward(x)
            return y

    one.mlp.__class__ = Louder


def _instance_forward(one: Any, calls: list[int]) -> None:
    forward = one.mlp.forward
    one.mlp.forward = lambda x: (calls.append(1), forward(x))[1]


def _hook(name: str, register: str) -> Callable[[Any, list[int]], None]:
    def put(one: Any, calls: list[int]) -> None:
        getattr(one.get_submodule(name), register)(lambda *_: calls.append(1))

    return put


def _parameter_hook(one: Any, calls: list[int]) -> None:
    one.mlp_norm.weight.register_hook(lambda gradient: calls.append(1))


def _post_accumulate_hook(one: Any, calls: list[int]) -> None:
    one.mlp_norm.weight.register_post_accumulate_grad_hook(lambda param: calls.append(1))


def _activation(one: Any, calls: list[int]) -> None:
    one.mlp.activation = lambda x: (calls.append(1), F.relu(x))[1]


CUSTOM: dict[str, Callable[[Any, list[int]], None]] = {
    "a class derived from MLP": _subclass,
    "a forward set on the instance": _instance_forward,
    "a custom activation": _activation,
    "a hook on a parameter": _parameter_hook,
    "a post-accumulate hook": _post_accumulate_hook,
    "a forward hook": _hook("mlp.up", "register_forward_hook"),
    "a forward pre-hook": _hook("attention.out", "register_forward_pre_hook"),
    "a backward hook": _hook("attention_norm", "register_full_backward_hook"),
    "a backward pre-hook": _hook("mlp.down", "register_full_backward_pre_hook"),
}


@pytest.mark.parametrize("what", CUSTOM)
def test_customizations_of_a_part_run(what: str) -> None:
    engine, rows = engine_alone()
    engine.step(batch(0, rows))
    calls: list[int] = []
    CUSTOM[what](block_of(engine), calls)
    engine.step(batch(1, rows))
    assert calls


def test_hooks_on_all_modules_run() -> None:
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


# Replacements of parts of the second block.


def _mlp_for_attention(layers: list[Any]) -> None:
    layers[2].attention = layers[2].mlp


def _linear_for_norm(layers: list[Any]) -> None:
    layers[2].mlp_norm = layers[2].attention.out


def _attention_for_mlp(layers: list[Any]) -> None:
    layers[2].mlp = layers[2].attention


def _one_norm_twice(layers: list[Any]) -> None:
    layers[2].mlp_norm = layers[2].attention_norm


REPLACED = [_mlp_for_attention, _linear_for_norm, _attention_for_mlp, _one_norm_twice]


@pytest.mark.parametrize("change", REPLACED)
def test_shared_and_replaced_parts_train_alike_in_one_micro_batch_and_in_three(
    change: Change,
) -> None:
    with built_with(change):
        numbers, weights = outcome(*engine_alone(microbatches=3))
        again, weights_again = outcome(*_in_one_micro_batch())
    assert numbers == [pytest.approx(pair, rel=1e-9) for pair in again]
    for name, value in weights.items():
        torch.testing.assert_close(value, weights_again[name], rtol=1e-9, atol=1e-9)


def _in_one_micro_batch() -> tuple[Engine, int]:
    """Returns an engine whose global batch is that of three micro-batches."""
    config = config_of(Case(dtype="fp64", microbatches=3))
    rows = config.train.global_batch
    train = config.train.model_copy(update={"micro_batch": rows})
    return engine_of(config.model_copy(update={"train": train})), rows


def test_uses_of_a_shared_norm_are_counted_with_and_without_hooks() -> None:
    with built_with(_one_norm_twice):
        engine, rows = engine_alone(microbatches=3)
        other, _ = engine_alone(microbatches=3)
    handle = block_of(engine).mlp.up.register_forward_hook(lambda *_: None)
    engine.step(batch(0, rows))
    handle.remove()
    got, want = engine.step(batch(1, rows)), [other.step(batch(i, rows)) for i in range(2)][1]
    assert (got.loss, got.grad_norm) == (want.loss, want.grad_norm)


def _buffer_for_bias(one: Any) -> None:
    bias = one.mlp.up.bias.detach() + 0.5
    del one.mlp.up.bias
    one.mlp.up.register_buffer("bias", bias)


def _tensor_for_bias(one: Any) -> None:
    bias = one.mlp_norm.bias.detach() + 0.5
    del one.mlp_norm.bias
    one.mlp_norm.bias = bias


@pytest.mark.parametrize("change", [_buffer_for_bias, _tensor_for_bias])
def test_a_bias_that_is_not_a_parameter_is_added(change: Callable[[Any], None]) -> None:
    (engine, rows), (plain, _) = engine_alone(), engine_alone()
    change(block_of(engine))
    assert engine.step(batch(0, rows)).loss != plain.step(batch(0, rows)).loss


def test_a_head_whose_weight_is_a_buffer_trains() -> None:
    engine, rows = engine_alone(model="gpt-untied")
    head = engine.blueprint.layers[-1]
    weight = head.weight.detach().clone()
    del head.weight
    head.register_buffer("weight", weight)
    assert torch.isfinite(torch.tensor(engine.step(batch(0, rows)).loss))


def test_a_block_outside_a_stage_gives_gradients_to_autograd() -> None:
    engine, rows = engine_alone(dtype="fp32")
    engine.step(batch(0, rows))
    one = copy.deepcopy(block_of(engine))
    one.mlp = nn.Linear(32, 32)
    x = torch.randn(4, 2, 32, requires_grad=True)
    one(x, MicroBatch(samples=torch.arange(2))).sum().backward()
    assert one.mlp.weight.grad is not None


def test_a_step_runs_under_autocast() -> None:
    engine, rows = engine_alone(dtype="fp32")
    with torch.autocast("cpu", torch.bfloat16):
        loss = engine.step(batch(0, rows)).loss
    assert loss == pytest.approx(engine_alone(dtype="fp32")[0].step(batch(0, rows)).loss, rel=1e-2)


# ------------------------------------------------------------------------------------- torch.autograd.grad in a forward


@pytest.mark.parametrize("trained", [False, True])
def test_gradients_of_a_linear_layer_can_be_differentiated(trained: bool) -> None:
    x, weight = (torch.randn(*shape, dtype=torch.float64) for shape in ((3, 4), (2, 4)))
    x.requires_grad_()
    weight.requires_grad_(trained)

    def second(product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        energy = product(x, weight).tanh().square().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return torch.autograd.grad(force.square().sum(), x)[0]

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return linear(x, Terms((weight,)))

    torch.testing.assert_close(second(ours), second(F.linear), rtol=1e-12, atol=0)


def test_gradients_over_tensor_ranks_cannot_be_differentiated() -> None:
    weight, axis = torch.ones(2, 4), Axis("tp", (0, 1), 0, None)
    for terms, what in (
        (Terms((weight,), None, axis), "sharded over tensor ranks"),
        (Terms((weight[:1], weight[1:])), "split into tiles"),
    ):
        with pytest.raises(RuntimeError, match=rf"grad in a layer's forward, .* {what}"):
            gradients(torch.ones(1, 2), torch.ones(1, 4), terms.weights, terms, True)
