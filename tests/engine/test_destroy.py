"""`Engine.destroy` gives the module back as it was, with the trained values; another engine can train it."""

from __future__ import annotations

import copy
import gc
import os
import threading
import weakref
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests import configs as layered
from tests.configs import topology_of
from tests.harness import run_ranks
from threed import Config, Engine, ModuleEngine
from threed.config import ConfigError
from threed.distributed import collectives
from threed.engine import base
from threed.models import Wrapped

WIDTH, RANKS = 8, 2


class Special(nn.Parameter):
    """A subclass of a parameter, as programs define them."""


class CausalLM(nn.Linear):
    """A module whose calls are observed by `Items`, because of its name."""


class Net(nn.Module):
    """Tied weights, a frozen weight, a subclass of a parameter, buffers, hooks, and blocks in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.frozen, self.tied = CausalLM(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.blocks[0].weight
        self.frozen.requires_grad_(False)
        self.scale = Special(torch.ones(WIDTH))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.recomputes = False
        self.blocks[1].weight.note = "of the program"  # type: ignore[attr-defined]
        self.blocks[2].register_forward_hook(halved)

    def gradient_checkpointing_enable(self, options: Any) -> None:
        self.recomputes = True
        self.function = checkpoint
        self.blocks[1] = nn.Sequential(self.blocks[1])
        self.hook = self.frozen.register_forward_hook(halved)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x) * self.scale
        for block in (*self.blocks, self.frozen):
            x = (checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)).tanh()
        out: Tensor = self.tied(x).square().mean()
        return out


def halved(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out / 2


def net(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def described(module: nn.Module) -> dict[str, Any]:
    """Everything of a module that an engine may change, except the values."""
    found: dict[str, Any] = {}
    for name, part in module.named_modules():
        found[f"{name}: class"] = type(part)
        for key, value in vars(part).items():
            if key == "_buffers":
                value = {k: None if v is None else (v.dtype, v.shape) for k, v in value.items()}
            found[f"{name}.{key}"] = copy.copy(value)
    for name, param in module.named_parameters(remove_duplicate=False):
        about = (
            id(param),
            type(param),
            param.dtype,
            param.shape,
            param.requires_grad,
            param.is_leaf,
        )
        hooks = (dict(param._backward_hooks or {}), dict(param._post_accumulate_grad_hooks or {}))
        found[f"parameter {name}"] = (*about, *hooks, dict(vars(param)), param.grad)
    return found


def config_of(stage: int, dtype: str = "fp64", **sections: dict[str, Any]) -> Config:
    settings: dict[str, Any] = {
        "zero": {"stage": stage, "resident": 0, "bucket_mib": 1e-4}, "precision": {"dtype": dtype},
        "train": {"global_batch": 4, "micro_batch": 2, "grad_clip": 0.0},
        "optim": {"name": "adamw", "lr": 0.1, "warmup": 0, "schedule": "constant"},
    }  # fmt: skip
    for name, section in sections.items():
        settings[name] = {**settings.get(name, {}), **section}
    return Config.model_validate(settings)


def batch(step: int, rank: int, dtype: torch.dtype) -> Tensor:
    draw = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(2, WIDTH, generator=draw, dtype=torch.float64).to(dtype)


def trained(engine: Any, steps: int = 2) -> dict[str, Tensor]:
    """The weights after some steps of one micro-batch."""
    dtype = engine.layout.policy.param_dtype
    for step in range(steps):
        engine.begin()
        engine.backward(engine.module(batch(step, engine.topology.rank, dtype)))
        engine.update()
    found: dict[str, Tensor] = engine.full_state_dict()
    return found


def assert_returned(module: nn.Module, full: dict[str, Tensor], topology: Any) -> None:
    """Asserts that every rank has the values that `full_state_dict` gave rank 0."""
    for name, value in module.state_dict().items():
        everyone = collectives.exchange(value.double().tolist(), topology.axis("world"))
        assert all(values == everyone[0] for values in everyone) or "running" in name
        if full and "num_batches" not in name:
            assert_equal({name: value}, {name: full[name].to(value.dtype)})


def assert_equal(got: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert got.keys() == right.keys()
    for name, value in got.items():
        torch.testing.assert_close(value, right[name], rtol=0, atol=0)


def swaps() -> list[str]:
    """The open swap files and the threads of offload in this process."""
    places = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    files = [os.readlink(place) for place in places if os.path.lexists(place)]
    threads = [thread.name for thread in threading.enumerate()]
    found = [file for file in files if ".swap" in file]
    return found + [name for name in threads if name.startswith(("threed-io", "delayed-update"))]


def given_back(config: Config, given: torch.dtype) -> None:
    """Two engines, one after the other, on one module; the second trains as one of a new module."""
    earlier = Counter(swaps())  # of engines of other tests in this process
    module, topology = net(given), topology_of(1, 1)
    before = described(module)
    engine: Any = Engine(module, topology, config)
    with pytest.raises(ValueError, match=r"destroy\(\)"):
        Engine(module, topology, config)
    full = trained(engine)
    parts = engine.reducer, engine.gatherer, engine.optimizer, engine.model
    alive = [weakref.ref(part) for part in parts]
    del parts
    engine.destroy()
    assert described(module) == before
    assert [part() for part in alive] == [None] * 4
    assert not Counter(swaps()) - earlier
    assert_returned(module, full, topology)

    fresh = net(given)
    fresh.load_state_dict(module.state_dict())
    losses = [some(batch(0, topology.rank, given)) for some in (module, fresh)]  # plain PyTorch
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    for one, other in zip(module.parameters(), fresh.parameters(), strict=True):
        assert one.grad is other.grad is None or torch.equal(one.grad, other.grad)
        one.grad = other.grad = None
    again, right = (Engine(some, topology, config) for some in (module, fresh))
    assert_equal(trained(again), trained(right))
    for some in (again, again, right):
        some.destroy()
    assert described(module) == before


OFFLOADED = {"offload_optimizer": "cpu", "offload_params": "cpu"}
Case = tuple[
    int, str, torch.dtype, dict[str, Any]
]  # ZeRO stage, dtype of the engine and the module, sections


def cases(folder: str) -> list[Case]:
    f64, nvme = torch.float64, {"offload_optimizer": "nvme", "nvme_path": folder}
    return [
        *((stage, "fp64", f64, {}) for stage in range(4)),
        (2, "fp64", f64, {"zero": {"offload_optimizer": "cpu"}}),
        (3, "fp64", f64, {"zero": OFFLOADED, "recompute": {"mode": "full"}}),
        (3, "bf16", torch.bfloat16, {"zero": {**nvme, "offload_params": "nvme"}}),
        (1, "bf16", torch.float32, {"zero": {"offload_optimizer": "cpu", "delayed_update": True}}),
        (3, "bf16", torch.float32, {"recompute": {"mode": "full"}}),
        (0, "fp32", torch.bfloat16, {}),
        (2, "fp16", torch.float16, {}),
        (1, "fp64", f64, {"parallel": {"schedule": "zb-h1"}}),  # splits the backward of linear layers
    ]  # fmt: skip


def all_given_back(folder: str) -> None:
    gc.freeze()  # `destroy` collects garbage, which takes long with all that the parent has imported
    for stage, dtype, given, sections in cases(folder):
        given_back(config_of(stage, dtype, **sections), given)


def test_a_module_comes_back_as_it_was_and_trains_again(tmp_path: Path) -> None:
    run_ranks(RANKS, all_given_back, str(tmp_path))


def test_a_module_of_one_rank_comes_back(tmp_path: Path) -> None:
    for stage, dtype, given, sections in cases(str(tmp_path))[3:7:3]:
        given_back(config_of(stage, dtype, **sections), given)


def test_an_engine_without_a_step_gives_the_initial_values_back() -> None:
    module, right = net(), net().state_dict()
    before = described(module)
    Engine(module, topology_of(1, 1), config_of(0)).destroy()
    assert described(module) == before
    assert_equal(module.state_dict(), right)


def test_a_refused_module_gets_an_engine_later() -> None:
    module = net()
    with pytest.raises(ConfigError, match=r"--run\.compile"):
        Engine(module, topology_of(1, 1), config_of(0, run={"compile": True}))
    Engine(module, topology_of(1, 1), config_of(0)).destroy()


# parts that the constructor builds, in this order; each may fail
PARTS = (
    "draw", "buffers.build", "ModuleGatherer", "Rates", "Saver", "agreement.check_buckets", "Reducer",
    "Synchronous", "compiling.compile_layers", "Extras", "Executor",
)  # fmt: skip


def fail_to_build(*_: Any, **__: Any) -> None:
    raise MemoryError("on purpose")


def attempts_fail(config: Config, given: torch.dtype, meta: bool) -> None:
    """Fails to build an engine, at every part; afterwards the module is as before, and trains."""
    with torch.device("meta" if meta else "cpu"):
        module: Any = nn.Sequential(nn.Linear(WIDTH, 1)) if meta else net(given)
    topology, before = topology_of(1, 1), described(module)
    values = {name: value.clone() for name, value in module.state_dict().items()}
    wrapped = Wrapped(module)
    wrapped.remove()
    for number, part in enumerate(PARTS):
        *owner, name = f"threed.engine.base.{part}".rsplit(".", 1)
        with pytest.MonkeyPatch.context() as patch:
            if part == "compiling.compile_layers":  # called twice; the first call is early
                patch.setattr(base, "compiling", SimpleNamespace(compile_layers=fail_to_build))
            else:
                patch.setattr(f"{owner[0]}.{name}", fail_to_build)
            with pytest.raises(MemoryError, match="on purpose"):
                Engine(wrapped if number % 2 else module, topology, config)
        assert described(module) == before
        if not meta and topology.rank == 0:
            assert_equal(dict(module.state_dict()), values)
    engine = Engine(wrapped, topology, config)
    if not meta:
        assert_equal(trained(engine), trained(Engine(net(given), topology, config)))
    engine.destroy()
    assert meta or described(module) == before


def all_attempts_fail() -> None:
    gc.freeze()
    for stage, dtype, given in (
        (0, "fp32", torch.bfloat16),
        (1, "bf16", torch.float32),
        (3, "fp64", torch.float64),
    ):
        attempts_fail(config_of(stage, dtype, recompute={"mode": "full"}), given, meta=False)
    attempts_fail(config_of(3, "fp32"), torch.float32, meta=True)


def test_a_constructor_that_fails_leaves_the_module_as_it_was() -> None:
    run_ranks(RANKS, all_attempts_fail)


def test_a_rank_whose_module_is_refused_leaves_the_others_as_they_were() -> None:
    run_ranks(RANKS, refused_on_one_rank)


def refused_on_one_rank() -> None:
    module, topology = net(), topology_of(1, 1)
    before = described(module)
    with pytest.raises(ValueError, match=r"int|not a parameter|only real"):
        Engine(module if topology.rank else Integers(), topology, config_of(0))
    assert described(module) == before


class Integers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_module_that_was_changed_comes_back_with_the_changes(stage: int) -> None:
    module, zero = net(), {"offload_params": "cpu"} if stage else {}
    replaced = module.frozen
    engine: Any = Engine(module, topology_of(1, 1), config_of(stage, zero=zero))
    full = trained(engine)
    module.adapter = nn.Linear(2, 2)
    module.blocks[1].register_parameter("more", nn.Parameter(torch.zeros(3)))
    module.frozen = nn.Linear(WIDTH, WIDTH).double()
    with pytest.raises(RuntimeError, match=r"build a new engine|replaced"):
        engine.full_state_dict()
    engine.destroy()
    added = {"adapter.weight", "adapter.bias", "blocks.1.more", "frozen.weight", "frozen.bias"}
    for name, value in module.state_dict().items():
        if name not in added and "num_batches" not in name:
            assert_equal({name: value}, {name: full[name]})
    assert torch.equal(replaced.weight, full["frozen.weight"])
    parameters = [*module.parameters(), *replaced.parameters()]
    assert {type(param) for param in parameters} == {nn.Parameter, Special}
    assert all("spec" not in vars(param) for param in parameters)
    module(batch(0, 0, torch.float64)).backward()
    Engine(
        module.requires_grad_(True).double(), topology_of(1, 1), config_of(stage, zero=zero)
    ).destroy()


def test_a_wrapped_module_needs_a_new_wrapper() -> None:
    module, topology = net(), topology_of(1, 1)
    wrapped = Wrapped(module)
    engine = Engine(wrapped, topology, config_of(0))
    for end in (lambda: None, engine.destroy):
        end()
        with pytest.raises(ValueError, match=r"make a new threed\.models\.Wrapped"):
            Engine(wrapped, topology, config_of(0))
    Engine(Wrapped(module), topology, config_of(0)).destroy()


def test_a_module_on_the_meta_device_comes_back_with_values() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    engine = Engine(module, topology_of(1, 1), config_of(3, "fp32"))
    full = engine.full_state_dict()
    engine.destroy()
    assert all(type(param) is nn.Parameter and not vars(param) for param in module.parameters())
    assert_equal(dict(module.state_dict()), full)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_step_in_progress_is_refused_until_it_is_discarded(stage: int) -> None:
    module = net()
    before = described(module)
    zero = (
        {"offload_params": "cpu"} if stage == 3 else {}
    )  # so that one rank has sharded parameters
    engine: Any = Engine(module, topology_of(1, 1), config_of(stage, zero=zero))
    engine.begin(2)
    engine.backward(module(batch(0, 0, torch.float64)))
    with pytest.raises(
        RuntimeError, match=r"1 backward is in progress: call update\(\).*discard\(\)"
    ):
        engine.destroy()
    engine.discard()
    with engine.gathered(), pytest.raises(RuntimeError, match="end the block"):
        engine.destroy()
    engine.begin()
    out = module(batch(0, 0, torch.float64))
    out.register_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        engine.backward(out)
    engine.discard()
    engine.destroy()
    assert described(module) == before
    assert_equal({n: p for n, p in module.named_parameters()}, dict(net().named_parameters()))  # noqa: C416


def fail(grad: Tensor) -> None:
    raise ValueError("on purpose")


@pytest.mark.parametrize("block", ["inference", "evaluating", "inference_mode"])
def test_a_block_without_gradients_may_destroy(block: str) -> None:
    module = net()
    engine: Any = Engine(module, topology_of(1, 1), config_of(3, zero={"offload_params": "cpu"}))
    with torch.inference_mode() if block == "inference_mode" else getattr(engine, block)():
        module(batch(0, 0, torch.float64))
        engine.destroy()
    assert module.training
    module(batch(0, 0, torch.float64)).backward()
    assert module.scale.grad is not None


def test_every_method_of_a_destroyed_engine_raises() -> None:
    engine: Any = Engine(net(), topology_of(1, 1), config_of(0))
    engine.destroy()
    assert isinstance(engine, ModuleEngine)
    for name in (name for name in dir(ModuleEngine) if not name.startswith("_")):
        if name != "destroy":
            with pytest.raises(RuntimeError, match=f"{name}: the engine was destroyed"):
                getattr(engine, name)


def test_an_engine_of_layers_refuses() -> None:
    with pytest.raises(NotImplementedError, match=r"does not offer destroy\(\)"):
        layered.engine_of(layered.config_of(layered.Case())).destroy()
