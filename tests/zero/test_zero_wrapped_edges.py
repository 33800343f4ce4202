"""What can go wrong around a wrapped module: errors in the middle, returned weights, values that differ, refusals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.configs import STEPS, batch, config_of, topology_of, train
from tests.configs import Case as PlainCase
from tests.harness import run_ranks
from tests.zero.test_zero_wrapped import Case, engine_of
from threed import models
from threed.checkpoint.native import CheckpointError
from threed.config import Config, ConfigError
from threed.distributed.topology import Topology
from threed.engine import Engine, LayeredEngine
from threed.layers import Slicing
from threed.models.wrapped import Wrapped
from threed.zero import hooks

WIDTH, ROWS = 12, 8


class Net(nn.Module):
    """Four blocks, of which `pick` may choose, and `trouble` may raise."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.pick: Callable[[], list[int]] = lambda: [0, 1, 2, 3]
        self.trouble: Callable[[Tensor], Tensor] = lambda x: x

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for number in self.pick():
            x = x + self.blocks[number](x).tanh()
            x = self.trouble(x)
        return F.mse_loss(x, y)


def made(
    stage: int, kind: Callable[[], nn.Module] = Net, seed: int = 0
) -> tuple[Engine, nn.Module]:
    torch.manual_seed(seed)
    module = kind().double()
    return engine_of(
        Case("", stage, microbatches=1, bucket_mib=1e-3), module, topology_of(1, 1)
    ), module


def whole_batch(step: int) -> Tensor:
    return torch.randn(
        2, ROWS, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64
    )


def data(step: int) -> dict[str, Tensor]:
    x, y = whole_batch(step)
    topology = topology_of(1, 1)
    return {"x": x.chunk(topology.dp)[topology.rank], "y": y.chunk(topology.dp)[topology.rank]}


def trained(engine: Engine, steps: range) -> tuple[list[float], dict[str, Tensor]]:
    losses = [engine.step(data(step)).loss for step in steps]
    return losses, engine.full_state_dict()


def same(
    a: tuple[list[float], dict[str, Tensor]], b: tuple[list[float], dict[str, Tensor]]
) -> None:
    assert a[0] == b[0]
    assert all(torch.equal(a[1][name], b[1][name]) for name in b[1])


class Raise(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        raise RuntimeError("trouble")


def fail(x: Tensor) -> Tensor:
    raise RuntimeError("trouble")


def check_interrupted(stage: int) -> None:
    """A step that raises on every rank leaves nothing behind: the next ones are as if it had not been."""
    want = trained(made(stage)[0], range(3))
    for trouble in (fail, Raise.apply):
        engine, module = made(stage)
        calls = iter(range(100))
        module.trouble = lambda x, c=calls, t=trouble: t(x) if next(c) == 1 else x
        with pytest.raises(RuntimeError, match="trouble"):
            engine.step(data(77))
        module.trouble = lambda x: x
        engine.zero_grad()  # launches what other ranks may have launched
        sent = Counter(engine.topology.traffic)
        engine.zero_grad()
        assert engine.topology.traffic == sent
        same(trained(engine, range(3)), want)
    engine, module = made(stage)
    engine.begin(1)
    engine.backward(engine.module(**data(5)))  # and no update
    same(trained(engine, range(3)), want)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_that_was_given_up_leaves_nothing_behind(stage: int) -> None:
    run_ranks(2, check_interrupted, stage)


def check_detours(stage: int) -> None:
    """A weight that lies in several buckets comes unexpectedly when the first of them has left: all of it counts."""
    engine, module = made(stage)
    plain = Net().double()
    for step, route in enumerate(([0, 1, 2, 3], [0, 3], [0, 1, 2, 3], [1, 2], [0, 1, 3])):
        module.pick = plain.pick = lambda route=route: route
        weights, norm = engine.full_state_dict(), engine.step(data(step)).grad_norm
        if weights:  # on rank 0
            plain.load_state_dict(weights)
            plain.zero_grad()
            plain(*whole_batch(step)).backward()
            want = (
                sum(float(p.grad.square().sum()) for p in plain.parameters() if p.grad is not None)
                ** 0.5
            )
            assert norm == pytest.approx(want, rel=1e-12), (step, route)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_blocks_that_come_and_go_from_step_to_step(stage: int) -> None:
    run_ranks(2, check_detours, stage)


def check_routes() -> None:
    engine, module = made(3)
    module.pick = lambda: [engine.topology.rank]
    with pytest.raises(RuntimeError, match="ranks used different parameters in this step"):
        engine.step(data(0))


def test_ranks_that_gather_different_blocks_are_told() -> None:
    """The blocks are of one size: the gathers meet, and each rank has a mixture."""
    run_ranks(2, check_routes)


class Counting(Net):
    """A net with a buffer that changes: ranks compare such buffers at the end of the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls.add_(1)
        return super().forward(x, y)


def check_resumed_routes(stage: int, folder: Path) -> None:
    def loop(engine: Engine) -> None:
        engine.begin(1)
        engine.backward(engine.module(**data(0)))
        engine.update()

    engine, _ = made(stage, Counting)
    loop(engine)
    engine.save(folder)
    engine, module = made(stage, Counting)
    engine.load(folder)
    module.pick = lambda: [[0, 1, 2, 3], [0, 2]][engine.topology.rank]
    loop(engine)
    engine.compare_replicas()


@pytest.mark.parametrize("stage", [0, 1])
def test_the_first_custom_step_after_a_load_may_have_routes_of_its_own(
    stage: int, tmp_path: Path
) -> None:
    """One rank has sent all its buckets by the end of the backward, the other one has not."""
    run_ranks(2, check_resumed_routes, stage, tmp_path / "saved", timeout=60)


def check_own_routes() -> None:
    torch.manual_seed(0)
    zero = {"stage": 3, "shard_size": 1, "resident": 0, "offload_params": "cpu"}
    train = {"global_batch": ROWS, "micro_batch": ROWS // 2, "grad_clip": 0.0}
    config = Config.model_validate({"zero": zero, "train": train, "precision": {"dtype": "fp64"}})
    module, plain = Net().double(), Net().double()
    plain.load_state_dict(module.state_dict())
    engine = Engine(module, Topology(), config)
    routes = [0, 1, 2, 3], [3, 1, 2, 0]
    module.pick = lambda: routes[engine.topology.rank]
    losses = []
    for rank, part in enumerate(zip(*(value.chunk(2) for value in whole_batch(0)), strict=True)):
        plain.pick = lambda rank=rank: routes[rank]
        losses.append(plain(*part))
    torch.stack(losses).mean().backward()
    want = sum(float(p.grad.square().sum()) for p in plain.parameters() if p.grad is not None)
    assert engine.step(data(0)).grad_norm == pytest.approx(want**0.5, rel=1e-12)
    engine.compare_replicas()


def test_ranks_that_gather_alone_have_orders_of_their_own() -> None:
    """Parameters on the host that no rank shares: there is no gather that ranks have to begin in one order."""
    run_ranks(2, check_own_routes)


def check_seeds(stage: int) -> None:
    engine, _ = made(stage, seed=engine_seed())
    losses, weights = trained(engine, range(2))
    want, full = trained(made(stage)[0], range(2))
    assert losses == want
    assert all(torch.equal(weights[name], full[name]) for name in full)


def engine_seed() -> int:
    return 100 * Topology().rank


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_all_begin_with_the_first_ranks_values(stage: int) -> None:
    run_ranks(2, check_seeds, stage)


class Returns(nn.Module):
    """Hands out views of its weight, in a dictionary and in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, n: int) -> dict[str, Any]:
        return {"a": self.weight[:n], "b": (self.weight.t(),)}


class UsesReturned(nn.Module):
    """Uses weights that a unit returned, after it has."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([Returns(), Returns()])
        self.end = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for table in self.tables:
            out = table(WIDTH)
            x = x + (x @ out["a"]).tanh() @ out["b"][0]
        return F.mse_loss(self.end(x), y)


class Direct(nn.Module):
    """One checkpointed function that reads the weights of seven modules, and calls none of them."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(7))

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + F.linear(x, block.weight).tanh()
        return x

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return F.mse_loss(checkpoint(self.through, x, use_reentrant=self.reentrant), y)


class DirectReentrant(Direct):
    """The same, reentrant."""

    reentrant = True


class Chain(torch.autograd.Function):
    """A product of all matrices in one node."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        for weight in weights:
            x = x @ weight
        return x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        x, *weights = ctx.saved_tensors
        inputs, grads = [x], []
        for weight in weights[:-1]:
            inputs.append(inputs[-1] @ weight)
        for before, weight in zip(reversed(inputs), reversed(weights), strict=True):
            grads.append(before.t() @ dy)
            dy = dy @ weight.t()
        return dy, *reversed(grads)


class Fused(nn.Module):
    """A node of autograd that saves the weights of six units."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(Chain.apply(x, *(block.weight for block in self.blocks)), y)


class Recurrent(nn.Module):
    """An LSTM holds its weights in a list of its own, too."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.lstm(x.unsqueeze(0))[0].squeeze(0), y)  # one position, so many rows


class Regularized(nn.Module):
    """Goes over its own parameters, for a penalty and for their device."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.to(next(self.parameters()).device)
        for block in self.blocks:
            x = x + block(x).tanh()
        return (
            F.mse_loss(x, y)
            + 1e-3 * torch.stack([p.square().sum() for p in self.parameters()]).sum()
        )


def run_kind(
    kind: type[nn.Module], stages: tuple[int, ...]
) -> list[tuple[list[float], dict[str, Tensor]]]:
    return [trained(made(stage, kind)[0], range(3)) for stage in stages]


@pytest.mark.parametrize(
    "kind", [UsesReturned, Direct, DirectReentrant, Fused, Recurrent, Regularized]
)
def test_unusual_uses_are_those_of_one_process(kind: type[nn.Module]) -> None:
    ((losses, weights),) = run_kind(kind, (0,))
    for got_losses, got in run_ranks(2, run_kind, kind, (1, 3))[0]:
        assert got_losses == pytest.approx(losses, rel=1e-9)
        for name, want in weights.items():
            torch.testing.assert_close(got[name], want, rtol=0, atol=1e-9)


def check_stale() -> None:
    """Weights that are loaded while something is whole are what the next forward uses."""
    engine, _ = made(3)
    engine.step(data(0))
    box: list[Any] = [engine.full_state_dict()]
    torch.distributed.broadcast_object_list(box, 0)
    other = {name: value * 0.5 for name, value in box[0].items()}
    engine.begin(1)
    for _ in range(3):
        engine.module(**data(1))  # with gradients, and no backward: the last block stays whole
    engine.load_full_state_dict(other)
    got = engine.evaluate(data(1))
    twin, _ = made(1)
    twin.load_full_state_dict(other)
    assert float(got) == pytest.approx(float(twin.evaluate(data(1))), rel=1e-12)


def test_loaded_weights_are_used_at_once() -> None:
    run_ranks(2, check_stale)


class WithEmpty(Net):
    """Has a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, 3))


@pytest.mark.parametrize("stage", [0, 3])
def test_weights_that_a_program_passes(stage: int) -> None:
    """A parameter without elements is among the weights; other values than tensors change nothing."""
    engine, module = made(stage, WithEmpty)
    weights = engine.full_state_dict()
    assert weights.keys() == module.state_dict().keys()
    with pytest.raises(TypeError, match=r"pass a torch\.Tensor, not ndarray"):
        engine.load_full_state_dict({name: value.numpy() for name, value in weights.items()})
    engine.load_full_state_dict({name: value * 0.5 for name, value in weights.items()})
    for name, value in engine.full_state_dict().items():
        assert torch.equal(value, weights[name] * 0.5)


@pytest.mark.parametrize("stage", [0, 3])
def test_an_engine_in_inference_mode(stage: int) -> None:
    """The constructor and steps suspend it; a module that was built in it is refused."""
    want = trained(made(stage)[0], range(2))
    torch.manual_seed(0)
    module, batches = Net().double(), [data(0), data(1)]
    with torch.inference_mode():
        engine = engine_of(
            Case("", stage, microbatches=1, bucket_mib=1e-3), module, topology_of(1, 1)
        )
        losses = [engine.step(batch).loss for batch in batches]
        with pytest.raises(ValueError, match=r"blocks\.0\.weight was created in inference mode"):
            made(stage)
    same((losses, engine.full_state_dict()), want)


@pytest.mark.parametrize("wrong", [{}, None, Topology])
def test_an_engine_needs_a_topology_and_a_configuration(wrong: Any) -> None:
    kind = type(wrong).__name__
    with pytest.raises(TypeError, match=rf"config is a {kind}: pass threed\.Config"):
        Engine(Net(), Topology(), wrong)
    with pytest.raises(TypeError, match=rf"topology is a {kind}: pass threed\.Topology"):
        Engine(Net(), wrong, Config())


@pytest.mark.parametrize("path", [".", ""])
def test_a_save_to_the_working_directory_is_refused(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="is the working directory: choose another name"):
        made(0)[0].save(path)


class FrozenEnd(Net):
    """Backwards pass through the last eight blocks, whose gradients are never complete."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.extend(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.blocks[2:].requires_grad_(False)
        self.pick = lambda: list(range(10))


def check_frozen() -> None:
    engine, module = made(3, FrozenEnd)
    gatherer, most = engine.gatherer, list[int]()

    def count(grad: Tensor) -> None:
        groups = [group for group in engine.layout.groups if group.sliced]
        most.append(sum(map(gatherer.is_open, groups)))

    module.trouble = lambda x: (x.requires_grad and x.register_hook(count), x)[1]
    for step in range(2):
        engine.step(data(step))
    assert len(most) == 20
    # the most recently used ones, the one that is used, and the one that is gathered ahead
    assert max(most) <= hooks.RECENT + 2 < 8


def test_frozen_parameters_are_released_in_the_backward() -> None:
    run_ranks(2, check_frozen)


def check_evaluation() -> None:
    """An evaluation computes no gradients; the values from which the module began are not kept."""
    for stage in (0, 3):
        engine, module = made(stage)
        assert engine.optimizer.consistency.initial is None
        seen = list[bool]()
        module.trouble = lambda x, seen=seen: seen.append(torch.is_grad_enabled()) or x
        engine.evaluate(data(0))
        assert seen == [False] * 4
        engine.step(data(0))
        assert seen[4:] == [True] * 4


def test_evaluations_compute_no_gradients() -> None:
    run_ranks(2, check_evaluation)


def check_outside() -> None:
    """Outside a forward sharded parameters have a shape and a device, but no values; they stay the same objects."""
    torch.manual_seed(0)
    module = Net().double()
    before = dict(module.named_parameters())
    engine = engine_of(Case("", 3, microbatches=1), module, Topology())
    engine.step(data(0))
    weight = module.blocks[0].weight
    assert (weight.shape, weight.dtype, weight.device.type) == (
        (WIDTH, WIDTH),
        torch.float64,
        "cpu",
    )
    assert all(param is before[name] for name, param in module.named_parameters())
    with pytest.raises(RuntimeError, match=r"by the engine's load_full_state_dict or load"):
        module.load_state_dict({})
    with pytest.raises(RuntimeError, match=r"call Engine\.begin"):
        engine.backward(torch.ones((), dtype=torch.float64, requires_grad=True))


def test_a_sliced_parameter_from_outside() -> None:
    run_ranks(2, check_outside)


def test_a_parameter_stays_the_object_it_was() -> None:
    torch.manual_seed(0)
    module = Net().double()
    weight, seen = module.blocks[0].weight, []
    weight.register_hook(lambda grad: seen.append(grad.shape))
    engine = engine_of(Case("", 1, microbatches=1), module, Topology())
    engine.step(data(0))
    assert module.blocks[0].weight is weight
    assert seen == [(WIDTH, WIDTH)]


def test_what_cannot_be_wrapped_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="weight has no shape yet"):
        Wrapped(nn.LazyLinear(3))
    with pytest.raises(ValueError, match=r"weight is torch\.complex64"):
        Wrapped(nn.Linear(2, 2, dtype=torch.complex64))
    _, module = made(0)
    with pytest.raises(ValueError, match="this Net belongs to an engine already"):
        Wrapped(module)
    engine, _ = made(0)
    for none in (3, torch.tensor(3.0)):
        with pytest.raises(ValueError, match="'y' is not a tensor with rows"):
            engine.step({"x": torch.zeros(4, WIDTH), "y": none})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="different numbers of rows"):
        engine.step({"x": torch.zeros(4, WIDTH), "y": torch.zeros(3, WIDTH)})


class Detached(Net):
    """Returns a loss that nothing can be trained by, in training."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().forward(x, y)
        return loss.detach() if self.training else loss


def check_detached(stage: int) -> None:
    engine, module = made(stage, Detached)
    assert engine.evaluate(data(0)).isfinite()
    with pytest.raises(
        RuntimeError,
        match=r"the loss that module \(Detached\) returned has no gradient, .* no_grad",
    ):
        engine.step(data(0))
    module.eval()  # goes on as if nothing had been
    assert engine.step(data(0)).grad_norm > 0


@pytest.mark.parametrize("stage", [0, 3])
def test_a_loss_without_a_gradient_is_refused(stage: int) -> None:
    run_ranks(2, check_detached, stage)


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (lambda loss: {"loss": loss}, "got dict"),
        (Tensor.item, "got float"),
        (lambda loss: loss.expand(3), r"got a tensor of shape \(3,\)"),
        (lambda loss: loss * 1j, "got a tensor of shape .* and torch.complex128"),
    ],
)
def test_a_backward_of_another_value_than_a_loss(loss: Callable[[Tensor], Any], kind: str) -> None:
    """It is refused, and the gradients of earlier micro-batches are discarded."""
    engine, module = made(0)
    want = trained(engine, range(2))
    engine, module = made(0)
    engine.begin(2)
    engine.backward(module(**data(5)))
    with pytest.raises(ValueError, match=f"backward needs the mean loss, .* {kind}"):
        engine.backward(loss(module(**data(5))))
    same(trained(engine, range(2)), want)


@pytest.mark.parametrize("schedule", ["zb-v", "interleaved", "zb-h1", "2bw"])
def test_schedules_with_several_chunks_are_refused_by_name(schedule: str) -> None:
    config = Config.model_validate({"parallel": {"schedule": schedule}})
    if schedule == "zb-h1":
        Engine(Net(), Topology(), config)
        return
    with pytest.raises(ConfigError) as found:
        Engine(Net(), Topology(), config)
    (problem,) = found.value.problems
    assert problem.startswith(f"--parallel.schedule {schedule} with a wrapped module: ")
    assert ("cannot be split into 2 chunks; use a schedule with one chunk per rank" in problem) == (
        schedule != "2bw"
    )


class OfLayers(nn.Module):
    """A model of threed.layers that is a module, too."""

    def __init__(self) -> None:
        super().__init__()
        inner = models.build(config_of(PlainCase(layers=2)).model, Slicing())
        self.hidden, self.slicing, self.layers = inner.hidden, inner.slicing, inner.layers


def test_a_model_of_layers_may_be_a_module() -> None:
    config = config_of(PlainCase(layers=2))
    engine = Engine(OfLayers(), Topology(), config)
    assert isinstance(engine, LayeredEngine)
    want = train(PlainCase(layers=2))
    rows = config.train.global_batch
    assert [engine.step(batch(step, rows)).loss for step in range(STEPS)] == want.losses
