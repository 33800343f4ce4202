"""Recomputed training is the same training: bit by bit, in every mode, wherever inputs are kept."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests import hf_models
from tests.configs import Case, batch, config_of, engine_of, share, trained
from tests.harness import run_ranks
from tests.pipeline.test_executor import Vanishing
from tests.pipeline.test_step import same, state
from threed.config import Config, ConfigError
from threed.distributed.topology import Axis, Topology, alone
from threed.engine import Engine
from threed.layers import MLP, MicroBatch, Slicing
from threed.layers.recompute import Recompute, RngState, Selective
from threed.ops.matmul import Matmul
from threed.pipeline.activation_checkpointing import ActivationStore, InArena, Recomputed, choose
from threed.pipeline.stage import AlwaysGathered, Stage

CPU = torch.device("cpu")


def everything(case: Case) -> tuple[list[float], list[float], list[Tensor]]:
    """Losses and norms, and all that this rank then has of weights and moments."""
    engine, metrics = trained(case)
    return [m.loss for m in metrics], [m.grad_norm for m in metrics], state(engine)


def compare(modes: dict[Case, list[str]]) -> list[str]:
    """On every rank: each case in its modes, beside itself without recompute; which are not equal bit by bit."""
    wrong = []
    for case in modes:
        *numbers, tensors = everything(case)
        for mode in modes[case]:
            if mode == "sliced" and case.tp == 1:
                mode = "cpu"
            *found, held = everything(replace(case, recompute=mode))
            if found != numbers or not same(held, tensors):
                wrong.append(f"{case} {mode}: {found}, {numbers}")
    return wrong


# Of every shape: ZeRO's stage and the schedule of the two cases that are trained in some of the modes each.
SHAPES = {
    (1, 1, 1): ((0, "1f1b"), (1, "1f1b")),
    (2, 1, 1): ((1, "gpipe"), (1, "1f1b")),
    (1, 2, 1): ((3, "1f1b"), (2, "1f1b")),
    (1, 1, 2): ((1, "1f1b"), (1, "1f1b")),
    (2, 2, 1): ((2, "1f1b"), (3, "gpipe")),
    (2, 1, 2): ((1, "gpipe"), (1, "1f1b")),
    (1, 2, 2): ((3, "1f1b"), (0, "1f1b")),
}


ALWAYS = ((1, 1, 1), (1, 2, 1), (2, 1, 2))


@pytest.mark.seldom("pp1-dp2-tp1")
@pytest.mark.parametrize(
    "shape",
    [pytest.param(s, marks=() if s in ALWAYS else pytest.mark.grid) for s in SHAPES],
    ids=lambda s: "pp{}-dp{}-tp{}".format(*s),
)
def test_recompute_changes_no_bit(shape: tuple[int, int, int]) -> None:
    """With dropout, clipping and accumulation."""
    (one, schedule), (other, turn) = SHAPES[shape]
    base = Case(*shape, dropout=0.1, dtype="fp32", layers=3)
    gpt = replace(base, zero=one, schedule=schedule)
    qwen = replace(base, model="qwen-tied", zero=other, schedule=turn, sequence=shape[2] > 1)
    for found in run_ranks(
        base.world, compare, {gpt: ["half", "sliced", "nvme"], qwen: ["full", "selective"]}
    ):
        assert not found


LLAMA = Case(2, 2, 2, "llama", zero=3, dropout=0.1, dtype="bf16", layers=3)
GPT = Case(2, 2, 2, sequence=True, dtype="fp16", layers=3)


@pytest.mark.parametrize(
    "modes",
    [
        {LLAMA: ["sliced"], GPT: ["selective"]},
        pytest.param({LLAMA: ["selective"], GPT: ["full"]}, marks=pytest.mark.grid),
    ],
    ids=["some", "others"],
)
def test_recompute_changes_no_bit_in_three_dimensions(modes: dict[Case, list[str]]) -> None:
    for found in run_ranks(8, compare, modes):
        assert not found


# --------------------------------------------------------------------------------------------- one stage by itself


class Drawing(nn.Module):
    """A layer of a user's: it draws from torch's generator, and counts its runs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.runs = nn.Parameter(torch.eye(4)), 0

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        self.runs += 1
        return nn.functional.dropout(torch.tanh(x @ self.weight), 0.5)


def passes(recomputed: Recomputed) -> tuple[list[Tensor], int]:
    torch.manual_seed(0)
    layers = [Drawing() for _ in range(3)]
    stage, grads = Stage(layers, AlwaysGathered(), recomputed=recomputed), []
    x = torch.ones(2, 3, 4)
    for m in range(2):
        stage.forward(m, (x + m).requires_grad_(), MicroBatch())
    for m in range(2):
        dx = stage.backward(m, torch.ones(2, 3, 4))
        assert dx is not None
        grads.append(dx)
    runs = sum(layer.runs for layer in layers)
    return [*grads, *(layer.weight.grad for layer in layers), torch.rand(3)], runs  # type: ignore[list-item]


def test_layers_that_draw_draw_the_same_again_and_disturb_nobody() -> None:
    plain, once = passes(Recomputed())
    again, twice = passes(Recomputed(frozenset({0, 2}), ActivationStore(None, None, CPU)))
    assert (once, twice) == (6, 10)
    for got, want in zip(again, plain, strict=True):
        assert torch.equal(got, want)


def test_generator_states_are_kept_only_for_work_that_draws() -> None:
    draws = RngState(CPU)
    draws.drawn()
    assert draws._before is None
    draws = RngState(CPU)
    first = torch.rand(3)
    draws.drawn()
    with draws.again():
        assert torch.equal(torch.rand(3), first)


def test_every_nth_layer_is_counted_over_the_model() -> None:
    class Never(nn.Module):
        recomputable = False

    layers = [Never(), *(nn.Identity() for _ in range(5)), Never()]
    assert choose(layers, 1) == [1, 2, 3, 4, 5]
    assert choose(layers, 2) == [1, 3, 5]
    assert choose(layers, 9) == [1]


class Linear(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)))

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        return torch.tanh(x @ self.weight)


@pytest.mark.parametrize("prefetch", [1, 2])
def test_weights_are_gathered_once_for_recompute_and_backward(prefetch: int) -> None:
    """The weights of `Vanishing` are NaN where they are not gathered."""
    layers = [Linear(n) for n in range(4)]
    counts, grads = [], []
    for recomputed in (
        Recomputed(),
        Recomputed(frozenset(range(4)), ActivationStore(None, None, CPU)),
    ):
        gatherer = Vanishing(layers, range(4))
        stage = Stage(layers, gatherer, prefetch, recomputed=recomputed)
        stage.forward(0, torch.ones(2, 4, requires_grad=True), MicroBatch())
        dx = stage.backward(0, torch.ones(2, 4))
        assert dx is not None
        assert dx.isfinite().all()
        grads.append(dx)
        counts.append(gatherer.gathers)
        for unit, layer in enumerate(layers):
            layer.weight.data.copy_(gatherer.weights[unit][0])
            layer.weight.grad = None
    assert counts[0] == counts[1] == Counter(dict.fromkeys(range(4), 2))
    assert torch.equal(*grads)


@pytest.mark.parametrize("frozen", [(0,), (0, 1), (0, 1, 2)])
def test_frozen_layers(frozen: tuple[int, ...]) -> None:
    """What needs no gradient is not kept, and not computed again."""
    found = []
    for recomputed in (
        Recomputed(),
        Recomputed(frozenset(range(3)), ActivationStore(None, None, CPU)),
    ):
        layers = [Linear(n) for n in range(3)]
        for n in frozen:
            layers[n].weight.requires_grad_(False)
        first = layers[0]
        first.forward = lambda x, micro, f=first: torch.tanh(torch.ones(2, 4) @ f.weight)  # type: ignore[method-assign]
        stage = Stage(layers, AlwaysGathered(), recomputed=recomputed)
        stage.forward(0, None, MicroBatch())
        if len(frozen) < 3:
            stage.backward(0, torch.ones(2, 4))
        found.append([layer.weight.grad for layer in layers])
    for plain, again in zip(*found, strict=True):
        assert (plain is None) == (again is None)
        assert plain is None or torch.equal(plain, again)


@pytest.mark.parametrize("mode", ["half", "nvme"])
def test_steps_that_were_given_up_leave_their_places(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in the middle of a backward or a forward, more often than there are slots or buffers."""
    engine = engine_of(config_of(Case(recompute=mode, microbatches=1, layers=5)))
    stage, data = engine.executor.stages[0], batch(0, 8)
    layer, broken = stage.layers[3], [""]
    forward = layer.forward

    def failing(*args: Any) -> Tensor:
        if broken[0] == ("backward" if torch.is_grad_enabled() else "forward"):
            raise ArithmeticError("a user's layer")
        return forward(*args)

    monkeypatch.setattr(layer, "forward", failing)
    engine.step(data)
    for broken[0] in ["backward", "forward"] * 8:
        with pytest.raises(ArithmeticError):
            engine.step(data)
    broken[0] = ""
    engine.step(data)
    store = stage.recomputed.store
    assert store is not None
    if isinstance(store.storages, InArena):
        assert len(store.storages.arena._free) == store.storages.arena.count == 3
        assert store.storages.arena.allocations == 1


def test_what_is_kept_holds_on_to_nothing_else() -> None:
    """A view of something larger is copied; a slice is no view."""
    large = torch.arange(100.0)
    for axis, elements in ((None, 40), (Axis("tp", (0, 1, 2), 2), 14)):
        kept = ActivationStore(axis, None, CPU).save(large[:40].view(8, 5))
        assert kept.value is not None
        assert kept.value.untyped_storage().nbytes() == 4 * elements
    whole = torch.ones(8, 5)
    same = ActivationStore(None, None, CPU).save(whole).value
    assert same is not None
    assert same.data_ptr() == whole.data_ptr()


def check_slice_is_freed() -> None:
    axis, x = Topology(tp=2).axis("tp"), torch.arange(12.0).view(3, 4)
    store = ActivationStore(axis, None, CPU)
    kept = store.save(x)
    slice_of = StorageWeakRef(kept.value.untyped_storage())  # type: ignore[union-attr]
    whole = store.get(kept)
    assert torch.equal(whole, x)
    end = time.monotonic() + 60
    while not slice_of.expired() and time.monotonic() < end:
        time.sleep(0.01)  # gloo's thread lets go of what it sent a moment after it has arrived
    assert slice_of.expired()


def test_a_slice_is_freed_once_it_is_whole_again() -> None:
    """While its layer runs again, a rank holds the input once."""
    run_ranks(2, check_slice_is_freed)


class Forks(Linear):
    """Gives two tensors; what comes after uses the first."""

    def forward(self, x: Tensor, micro: MicroBatch) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        y = super().forward(x, micro)
        return y, y * 2


class TakesOne(Linear):
    def forward(self, x: tuple[Tensor, Tensor], micro: MicroBatch) -> Tensor:  # type: ignore[override]
        return super().forward(x[0], micro)


@pytest.mark.parametrize(
    "recomputed", [Recomputed(), Recomputed(frozenset({0, 1}), ActivationStore(None, None, CPU))]
)
def test_an_output_that_nothing_uses_has_no_gradient(recomputed: Recomputed) -> None:
    layers = [Forks(0), TakesOne(1)]
    stage = Stage(layers, AlwaysGathered(), recomputed=recomputed)
    x = torch.ones(2, 4, requires_grad=True)
    plain = layers[1](layers[0](x, MicroBatch()), MicroBatch())
    want = torch.autograd.grad(plain, (x, layers[0].weight, layers[1].weight), torch.ones(2, 4))
    stage.forward(0, x, MicroBatch())
    got = (stage.backward(0, torch.ones(2, 4)), *(layer.weight.grad for layer in layers))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


# ------------------------------------------------------------------------------------------------ selected operations


class Two(nn.Module):
    """Operations one after the other, and one within another."""

    recompute = Recompute()

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        a = self.recompute.run("norm", lambda v: self.recompute.run("norm", torch.tanh, v) * 2, x)
        b = self.recompute.run("activation", lambda v: nn.functional.dropout(v.sin(), 0.5), a)
        return b[1:] @ self.weight * b[:-1]


def test_operations_in_a_row_and_within_each_other() -> None:
    found = []
    for ops in ((), ("norm",), ("activation",), ("activation", "norm")):
        torch.manual_seed(3)
        layer, selective = Two(), Selective(ops)
        selective.install(layer)
        x = torch.linspace(-2, 2, 12, dtype=torch.float64).view(3, 4).requires_grad_()
        with selective.watch():
            y = layer(x)
        torch.autograd.backward((y.square().sum(),))
        found.append((y.detach(), x.grad, layer.weight.grad, torch.rand(2)))
    for other in found[1:]:
        for got, want in zip(other, found[0], strict=True):
            assert torch.equal(got, want)  # type: ignore[arg-type]


def test_an_operation_that_is_no_function_of_its_inputs_is_an_error() -> None:
    turns = iter([True, False])
    selective = Selective(["activation"])
    x = torch.ones(3, requires_grad=True)
    with selective.watch():
        y = selective.run("activation", lambda v: v.sin() if next(turns) else v * 2 + 1, x)
    with pytest.raises(
        RuntimeError, match="recompute of activation saved 0 tensors where its forward saved 1"
    ):
        y.sum().backward()


def test_weights_keep_their_sinks_under_saved_tensor_hooks() -> None:
    """Hooks hand autograd other tensors than were saved: the parameter itself has the sink."""

    class Sink:
        products = 0

        def add_product(self, a: Tensor, b: Tensor, by: Matmul) -> None:
            self.products += 1

        def in_forward(self) -> bool:
            return False

    mlp = MLP("m", 4, 8, Slicing(alone())).to_empty(device="cpu")
    selective = Selective(["activation"])
    selective.install(mlp)
    mlp.up.weight.sink, mlp.down.weight.sink = Sink(), Sink()
    with selective.watch():
        y = mlp(torch.ones(2, 3, 4, requires_grad=True))
    y.sum().backward()
    assert mlp.up.weight.sink.products == mlp.down.weight.sink.products == 1
    assert mlp.up.weight.grad is None


# ---------------------------------------------------------------------------------------------------- wrapped modules


def wrapped(recompute: dict[str, Any], stage: int) -> tuple[list[float], dict[str, Tensor], int]:
    model = hf_models.make("llama")
    config = Config.model_validate({
        "zero": {"stage": stage, "resident": 0}, "precision": {"dtype": "fp64"}, "recompute": recompute,
        "train": {"global_batch": 8, "micro_batch": 2, "steps": 9}, "optim": {"warmup": 0},
    })  # fmt: skip
    topology = Topology()
    calls = Counter[str]()
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.update(["mlp"]))
    engine = Engine(model, topology, config)
    losses = [engine.step(share(hf_models.batch(step, 8), topology)).loss for step in range(2)]
    return losses, engine.full_state_dict(), calls["mlp"]


def compare_wrapped(stage: int) -> None:
    plain, again = wrapped({}, stage), wrapped({"mode": "full"}, stage)
    assert plain[0] == again[0]
    assert again[2] == 2 * plain[2]
    for name, weight in plain[1].items():
        assert torch.equal(weight, again[1][name])


@pytest.mark.parametrize("stage", [1, 3])
def test_a_wrapped_module_recomputes_its_own_way(stage: int) -> None:
    run_ranks(2, compare_wrapped, stage)


@pytest.mark.parametrize(
    ("recompute", "message"),
    [
        ({"mode": "selective"}, "selective: LlamaForCausalLM has no named operations"),
        (
            {"mode": "full", "every": 2},
            "recompute.every: LlamaForCausalLM is not built from threed.layers",
        ),
        ({"mode": "full", "arena": True}, "recompute.arena: LlamaForCausalLM"),
    ],
)
def test_what_wrapped_modules_cannot_do_is_refused(recompute: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        wrapped(recompute, 1)


def test_a_module_without_checkpointing_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"Linear has no gradient_checkpointing_enable\(\); wrap its blocks"
    ):
        Engine(nn.Linear(2, 2), Topology(), Config.model_validate({"recompute": {"mode": "full"}}))


@pytest.mark.parametrize(
    ("recompute", "fix"),
    [
        (
            {"every": 2},
            "every 2 with --recompute.mode none: .* use --recompute.mode full or selective",
        ),
        ({"arena": True}, "arena true with --recompute.mode none: .* use --recompute.mode full"),
        (
            {"mode": "selective", "offload": "cpu"},
            "offload cpu with --recompute.mode selective: .* use",
        ),
        (
            {"mode": "full", "ops": ("norm",)},
            "ops norm with --recompute.mode full: .* use --recompute.mode selective",
        ),
        (
            {"mode": "full", "partition": True},
            "partition true with --parallel.tp 1: .* or --recompute.partition false",
        ),
        ({"mode": "full", "offload": "nvme"}, "--zero.nvme-path FOLDER"),
    ],
)
def test_keys_that_would_do_nothing_are_refused(recompute: dict[str, Any], fix: str) -> None:
    config = config_of(Case())
    config = config.model_copy(update={"recompute": config.recompute.model_copy(update=recompute)})
    with pytest.raises(ConfigError, match=fix):
        engine_of(config)
