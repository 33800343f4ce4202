"""The engine as a program for DeepSpeed, Accelerate or the Trainer uses it: an nn.Module with DeepSpeed's methods."""

from __future__ import annotations

import base64
import copy
import functools
import inspect
import json
import types
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import threed
from tests.harness import run_ranks
from threed.checkpoint import CheckpointError
from threed.config import ConfigError
from threed.interop.deepspeed.config.optimizers import DeepSpeedOptimizer
from threed.interop.deepspeed.config.reader import read
from threed.interop.deepspeed.engine import DeepSpeedEngine
from threed.interop.deepspeed.module_methods import CONVERSIONS, ON_MODULE, ModuleMethods
from threed.interop.deepspeed.states import decode, encode

ROWS, ACCUMULATION, LR = 8, 2, 0.1


class Net(nn.Module):
    """Three layers, two of which share a weight, a frozen layer and a buffer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.tied, self.last = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 2)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.register_buffer("scale", torch.ones(1))
        self.double()

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        """The loss."""
        hidden = self.frozen((self.first(x) + self.tied(x)).tanh())
        return (self.last(hidden) * self.scale * factor).square().mean()


def rows(step: int, count: int = 1, index: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, 4, generator=draw, dtype=torch.float64).chunk(count)[index]


def config(stage: int = 0, accumulation: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "train_batch_size": ROWS, "gradient_accumulation_steps": accumulation, "gradient_clipping": 0.05,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.1}},
        "zero_optimization": {
            "stage": stage, "stage3_param_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        **more,
    }  # fmt: skip


def made(stage: int = 0, accumulation: int = 1, seed: int = 0, **more: Any) -> Any:
    return threed.initialize(model=Net(seed), config=config(stage, accumulation), **more)[0]


def step(engine: Any, number: int = 0) -> None:
    count = engine.world_size * engine.gradient_accumulation_steps()
    for micro in range(engine.gradient_accumulation_steps()):
        index = engine.global_rank * engine.gradient_accumulation_steps() + micro
        engine.backward(engine(rows(number, count, index)))
        engine.step()


def plainly(steps: int, model: Net | None = None) -> dict[str, Tensor]:
    model = model or Net()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0.1)
    for number in range(steps):
        model(rows(number)).backward()
        nn.utils.clip_grad_norm_(trained, 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in model.state_dict().items()}


def same(got: Any, want: Any, atol: float = 1e-9) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=atol, msg=f"{name} differs")


# ------------------------------------------------------------------------------------------------------- an nn.Module


def test_the_engine_is_a_module() -> None:
    engine = made()
    module = engine.module
    assert isinstance(engine, nn.Module)
    assert str(inspect.signature(engine.forward)) == str(inspect.signature(module.forward))
    assert inspect.signature(engine) == inspect.signature(module.forward)
    assert [*engine.named_parameters()] == [*module.named_parameters()]
    assert [*engine.modules()] == [*module.modules()]
    assert [name for name, _ in engine.named_children()] == ["first", "tied", "last", "frozen"]
    assert engine.training is engine.eval().train().training is True
    module.eval()
    assert not engine.training
    seen = []
    handle = engine.register_forward_hook(lambda owner, args, output: seen.append(owner))
    assert float(engine.forward(rows(0))) == float(engine(rows(0), factor=1.0))
    assert seen == [module, module]
    handle.remove()
    engine.head = nn.Linear(1, 1)
    assert isinstance(engine.head, nn.Linear)
    assert "first.weight" in dir(engine) or "first" in dir(engine)
    assert repr(engine).startswith("DeepSpeedEngine(Net(")
    assert type(copy.deepcopy(module)) is Net


def test_every_method_of_a_module_acts_on_the_wrapped_module() -> None:
    """A method that nn.Module gains in a later release of torch must be classified, too."""
    found = {name: getattr(nn.Module, name) for name in dir(nn.Module) if not name.startswith("_")}
    # transformers and other tests in this process may have added methods to nn.Module
    of_torch = {n: getattr(f, "__module__", "torch") for n, f in found.items()}
    others = {name for name, module in of_torch.items() if not module.startswith("torch")}
    # torch names a method after a backend that tests/accelerator registers
    others |= {torch._C._get_privateuse1_backend_name()}
    public = found.keys() - others
    kept = {"call_super_init", "dump_patches", "T_destination", "forward"}
    classified = {*ON_MODULE, *(name for name, *_ in CONVERSIONS), *kept}
    own = {
        name
        for kind in DeepSpeedEngine.__mro__
        for name in vars(kind)
        if issubclass(kind, ModuleMethods)
    }
    assert public - classified - own == set()


def test_conversions_of_the_engine() -> None:
    engine = made(3)
    for unchanged in (engine.double, engine.cpu, functools.partial(engine.type, torch.float64)):
        assert unchanged() is engine
    assert engine.to("cpu", torch.float64) is engine
    for call in (
        engine.half,
        engine.bfloat16,
        engine.float,
        functools.partial(engine.to, torch.float16),
    ):
        with pytest.raises(
            NotImplementedError, match=r"does not offer a conversion .* enable fp16"
        ):
            call()
    for call in (engine.xpu, functools.partial(engine.to, "meta")):
        with pytest.raises(
            NotImplementedError, match="does not offer a move of an engine's module"
        ):
            call()
    with pytest.raises(NotImplementedError, match=r"does not offer engine\.to_empty"):
        engine.to_empty(device="cpu")


@pytest.mark.parametrize("stage", [0, 3])
def test_weights_are_set_through_the_engine(stage: int) -> None:
    engine = made(stage)
    step(engine)
    other = Net(1).state_dict()
    assert engine.load_state_dict(other) == ([], [])
    same(engine.full_state_dict(), other)
    with pytest.raises(KeyError, match="missing"):
        engine.load_state_dict({"last.bias": torch.zeros(2)})
    found = engine.load_state_dict(
        {"last.bias": torch.full((2,), 7.0, dtype=torch.float64), "none": torch.ones(1)},
        strict=False,
    )
    assert found.unexpected_keys == ["none"]
    assert {*found.missing_keys} == {*other} - {"last.bias"}
    want = {**other, "last.bias": torch.full((2,), 7.0, dtype=torch.float64)}
    same(engine.full_state_dict(), want)

    def zero(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    assert engine.apply(zero) is engine
    want |= {name: torch.zeros_like(value) for name, value in want.items() if "bias" in name}
    same(engine.full_state_dict(), want)

    def fill(src: Any, dst: nn.Module) -> None:
        for name, param in dst.named_parameters():
            param.copy_(src[name])

    engine.load_module_state_dict({"module": other}, custom_load_fn=fill)
    same(engine.full_state_dict(), other)


def test_compile() -> None:
    engine = made()
    assert not engine.is_compiled
    engine.compile(backend="eager", compile_kwargs={"fullgraph": False})
    assert engine.is_compiled
    step(engine)
    same(engine.full_state_dict(), plainly(1))
    with pytest.raises(NotImplementedError, match="does not offer DeepCompile"):
        engine.compile(compiled_autograd_enabled=True)


# -------------------------------------------------------------------------------------------------- DeepSpeed's methods


def test_what_the_engine_returns() -> None:
    engine = made(1, accumulation=2)
    assert engine.get_batch_info() == (ROWS, 4, 2)
    assert (engine.optimizer_name(), engine.scheduler_name()) == ("adamw", None)
    assert engine.optimizer_params() == {"lr": LR, "weight_decay": 0.1}
    assert engine.scheduler_params() is None
    assert (engine.get_mom(), engine.get_type()) == ([(0.9, 0.999)], [0.0])
    assert engine.gradient_clipping() == 0.05
    assert engine.config["zero_optimization"]["stage"] == 1
    assert engine.zero_optimization()
    assert not engine.zero_optimization_partition_gradients()
    assert not engine.zero_optimization_partition_weights()
    assert (engine.zero_use_cpu_optimizer(), engine.zero_cpu_offload()) == (False, False)
    assert (engine.fp16_enabled(), engine.bfloat16_enabled()) == (False, False)
    assert (engine.loss_scale(), engine.dynamic_loss_scale()) == (0, True)
    assert engine.get_data_types() == (torch.float64, torch.float64)
    assert (engine.dp_world_size, engine.mp_world_size, engine.local_rank) == (1, 1, 0)
    assert engine.data_parallel_group is None
    assert engine.basic_optimizer is engine.optimizer
    assert engine.client_optimizer is engine.client_lr_scheduler is None
    assert engine.zero_gather_16bit_weights_on_model_save()
    assert (engine.optimizer.overflow, engine.optimizer.cur_scale) == (False, 1.0)
    engine.empty_partition_cache()
    engine.allreduce_gradients()
    backward = engine.backward(engine(rows(0, 2)))
    assert float(backward) == pytest.approx(float(Net()(rows(0, 2)).detach()) / 2)
    engine.step()
    assert not engine.was_step_applied()
    with pytest.raises(RuntimeError, match="a change of batch sizes in the middle of a step"):
        engine.set_train_batch_size(16)
    engine.backward(engine(rows(0, 2, 1)))
    engine.step()
    assert engine.was_step_applied()
    engine.set_train_batch_size(4)
    assert engine.get_batch_info() == (4, 4, 1)
    engine.set_train_micro_batch_size(2)
    assert engine.get_batch_info() == (2, 2, 1)
    with pytest.raises(ValueError, match="use a multiple of 2"):
        engine.set_train_batch_size(3)
    step(engine)
    assert (engine.global_steps, engine.global_samples) == (2, ROWS + 2)


def test_a_skipped_step() -> None:
    ds = {**config(), "fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}}
    engine = threed.initialize(model=Net().float(), config=ds)[0]
    for value, skipped in ((1.0, False), (float("inf"), True), (1.0, False)):
        engine.backward(engine(torch.full((ROWS, 4), value, dtype=torch.float16)))
        engine.step()
        assert engine.was_step_applied() != skipped
        assert engine.optimizer.overflow == skipped
        norm = engine.get_global_grad_norm()
        assert norm == float("inf") if skipped else 0 < norm < 100
    assert engine.fp16_enabled()
    assert engine.optimizer.cur_scale == engine.optimizer.loss_scale == 8.0


def test_backwards_without_steps() -> None:
    """`no_sync`, and one `step` after several backwards, as Accelerate calls them."""
    engine = made(1, accumulation=2)
    with engine.no_sync():
        engine.backward(engine(rows(0, 2)))
        with pytest.raises(
            AssertionError, match=r"illegal to call Engine.step\(\) .*: call it after"
        ):
            engine.step()
        with (
            pytest.raises(
                AssertionError, match="no_sync context manager reentry is unsupported: end"
            ),
            engine.no_sync(),
        ):
            pass
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(engine(rows(0, 2, 1)))
    engine.step()
    for micro in range(2):
        engine.set_gradient_accumulation_boundary(is_boundary=micro == 1)
        engine.backward(engine(rows(1, 2, micro)), scale_wrt_gas=True)
        if micro == 1:
            engine.step()
    same(engine.full_state_dict(), plainly(2))
    with (
        pytest.raises(
            AssertionError,
            match=r"^no_sync context manager is incompatible with gradient partitioning logic of"
            " ZeRO stage 2: use",
        ),
        made(2).no_sync(),
    ):
        pass


def test_loaders_of_the_engine() -> None:
    class Data(torch.utils.data.Dataset[Tensor]):
        def __getitem__(self, index: int) -> Tensor:
            return torch.full((4,), float(index), dtype=torch.float64)

        def __len__(self) -> int:
            return 6

    engine = made(collate_fn=lambda items: torch.stack(items) / 10)
    first = [float(x[0, 0]) * 10 for x in engine.deepspeed_io(Data(), batch_size=1, route="eval")]
    assert first == pytest.approx([0, 1, 2, 3, 4, 5])
    sampler = torch.utils.data.SequentialSampler(range(2, 4))
    loader = engine.deepspeed_io(Data(), batch_size=2, data_sampler=sampler)
    assert [x[:, 0].tolist() for x in loader] == [[0.0, 0.1]]
    engine.set_dataloader(loader)
    assert engine.training_dataloader is loader
    assert float(engine.train_batch()) > 0


# ---------------------------------------------------------------------------------------------------------- initialize


def test_arguments_of_initialize(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config()))
    args = types.SimpleNamespace(deepspeed_config=str(path), local_rank=0)
    engine = threed.initialize(args, Net())[0]
    assert engine.config == config()
    mpu = types.SimpleNamespace(get_model_parallel_world_size=lambda: 1)
    more = {"dist_init_required": False, "distributed_port": 1, "mpu": mpu}
    engine = threed.initialize(None, Net(), config_params=config(), **more)[0]  # type: ignore[arg-type]
    step(engine)
    same(engine.full_state_dict(), plainly(1))
    wide = types.SimpleNamespace(get_model_parallel_world_size=lambda: 2)
    for arguments, text in (
        ({"config": config(), "mpu": wide}, "mpu: threed does not offer 2 model-parallel ranks"),
        ({"config": config(), "mesh_param": (1, 1)}, "mesh_param: threed does not offer sequence"),
        ({"config": config(1), "args": args}, r"given twice, also in args\.deepspeed_config"),
        ({}, "config: not given"),
        ({"config": config(), "optimizer": lambda params: 3}, "optimizer: a int: pass a torch"),
    ):
        with pytest.raises(ConfigError, match=text):
            threed.initialize(model=Net(), **arguments)
    with pytest.raises(ConfigError, match="pass it by keyword"):
        threed.initialize(Net(), config())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"model: it is an engine: pass engine\.module"):
        threed.initialize(model=engine, config=config())


def test_forms_of_a_configuration() -> None:
    text = base64.urlsafe_b64encode(json.dumps(config()).encode()).decode()
    assert read(text) == config()
    ds = read({"zero_optimization.reduce_bucket_size": 50, **config(3)})
    assert ds["zero_optimization"] == {**config(3)["zero_optimization"], "reduce_bucket_size": 50}
    assert read({"zero_optimization.stage": 2}) == {"zero_optimization": {"stage": 2}}
    with pytest.raises(ConfigError, match="give the path of a"):
        read("bm9uZQ==")  # valid Base64 without JSON


class Described(DeepSpeedOptimizer):
    """An optimizer class as `threed.interop.deepspeed.api.optimizers` has them."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.1})

    def deepspeed_section(self) -> dict[str, Any]:
        return {"type": "AdamW", "params": {"betas": (0.9, 0.999)}}


@pytest.mark.parametrize("how", ["callable", "described", "warm-up from 0"])
def test_optimizers_that_are_passed(how: str) -> None:
    model, more = Net(), {}
    groups = [
        {"params": [*model.first.parameters(), *model.frozen.parameters()]}, {"params": []},
        {"params": [model.tied.bias, *model.last.parameters()]},
    ]  # fmt: skip
    optimizer: Any = lambda params: torch.optim.AdamW(params, lr=LR, weight_decay=0.1)  # noqa: E731
    if how != "callable":
        optimizer = Described(groups, lr=LR)
    if how == "warm-up from 0":
        more["lr_scheduler"] = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(n, 1))
        assert optimizer.param_groups[0]["lr"] == 0
    ds = {key: value for key, value in config(1).items() if key != "optimizer"}
    engine = threed.initialize(None, model, optimizer, groups, config=ds, **more)[0]
    if how == "warm-up from 0":
        before = engine.full_state_dict()
        engine.backward(engine(torch.zeros(ROWS, 4, dtype=torch.float64)))
        engine.step()
        same(engine.full_state_dict(), before, 0)  # learning rate 0
        assert engine.get_lr() == [LR] * 3
        return
    for number in range(3):
        step(engine, number)
    same(engine.full_state_dict(), plainly(3))
    assert engine.optimizer_name() == ("AdamW" if how == "callable" else "Described")


def test_an_engine_without_an_optimizer_evaluates() -> None:
    ds = {key: value for key, value in config(3).items() if key != "optimizer"}
    engine, optimizer, _, scheduler = threed.initialize(model=Net(), config=ds)
    assert optimizer is scheduler is engine.optimizer is None
    want = float(Net()(rows(0)).detach())
    assert float(engine(rows(0))) == pytest.approx(want)
    assert float(engine.eval_batch(iter([rows(0)]))) == pytest.approx(want)
    assert (engine.get_lr(), engine.get_mom(), engine.skipped_steps) == ([], [], 0)
    same(engine.full_state_dict(), Net().state_dict())
    with pytest.raises(
        RuntimeError, match="has no optimizer and only evaluates: pass an optimizer"
    ):
        engine.backward(engine(rows(0)))
    with pytest.raises(RuntimeError, match="only evaluates"):
        engine.step()
    assert any("only evaluates" in note for note in engine.notes)


# ---------------------------------------------------------------------------------------------- checkpoints and destroy


def test_states_of_a_program() -> None:
    state = {
        "epoch": 3, "best": np.float32(0.5), "seen": np.int64(4), "pair": (1, [2.5, None]), "counts": Counter("aab"),
        "by number": {1: "a", (2, 3): True}, "ema": {"w": torch.arange(3)}, "": {}, "items of a tuple": 5,
        "odd": {"items of a tuple": [1]},
    }  # fmt: skip
    tensors: dict[str, Tensor] = {}
    found = decode(json.loads(json.dumps(encode(state, "client_state", tensors))), tensors)
    assert torch.equal(found["ema"].pop("w"), torch.arange(3))
    del state["ema"]["w"]  # type: ignore[attr-defined]
    assert found == state
    assert isinstance(found["counts"], Counter)
    assert isinstance(found["pair"], tuple)
    with pytest.raises(TypeError, match=r"client_state\['a'\]\[0\]: a set cannot be saved"):
        encode({"a": [{1}]}, "client_state", tensors)


def checkpointed(folder: Path) -> None:
    """On two ranks: a checkpoint with tensors and a scheduler, and every way to load it."""
    decay = lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # noqa: E731
    engine = made(3, accumulation=2, lr_scheduler=decay)
    step(engine, 0)
    state = {"epoch": 1, "ema": {"w": torch.arange(3.0)}}
    assert engine.save_checkpoint(folder, tag=7, client_state=state, exclude_frozen_parameters=True)
    assert engine.save_16bit_model(folder / "whole")
    assert engine.save_fp16_model(folder / "whole", "trained.bin", exclude_frozen_parameters=True)
    saved = engine.full_state_dict()
    step(engine, 1)
    for stage in (1, 3):
        again = made(stage, accumulation=2, seed=1, lr_scheduler=decay)
        path, found = again.load_checkpoint(folder)
        assert path == str(folder / "7" / "manifest.json")
        assert found["epoch"] == 1
        assert torch.equal(found["ema"]["w"], torch.arange(3.0))
        assert again.get_lr() == [LR / 2]
        assert (again.global_steps, again.global_samples, again.micro_steps) == (1, ROWS, 2)
        step(again, 1)
        same(again.full_state_dict(), engine.full_state_dict(), 1e-12)
    again = made(2, accumulation=2, seed=1, lr_scheduler=decay)
    again.load_checkpoint(folder, 7, load_module_only=True)
    assert (again.global_steps, again.get_lr()) == (0, [LR])
    same(again.full_state_dict(), saved, 0)
    again.load_checkpoint(folder, 7, load_optimizer_states=False)
    assert (again.global_steps, again.get_lr()) == (1, [LR / 2])
    again.load_checkpoint(folder, 7, load_lr_scheduler_states=False)
    with pytest.raises(NotImplementedError, match="custom_load_fn with optimizer states"):
        again.load_checkpoint(folder, 7, custom_load_fn=print)
    with pytest.raises(ValueError, match="save_dir '': pass the folder"):
        again.save_checkpoint("")
    whole = again._zero3_consolidated_16bit_state_dict()
    assert (whole == {}) == (again.global_rank > 0)
    again.destroy()
    want = Net(1)
    want.load_state_dict(torch.load(folder / "whole" / "pytorch_model.bin", weights_only=True))
    same(dict(again.module.state_dict()), dict(want.state_dict()), 1e-12)


def test_checkpoints(tmp_path: Path) -> None:
    run_ranks(2, checkpointed, tmp_path)
    trained = torch.load(tmp_path / "whole" / "trained.bin", weights_only=True)
    assert {*Net().state_dict()} - {*trained} == {"frozen.weight", "frozen.bias"}
    assert trained["tied.weight"].data_ptr() == trained["first.weight"].data_ptr()
    engine = made()
    (tmp_path / "7" / "client_state.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"client_state\.safetensors is missing"):
        engine.load_checkpoint(tmp_path, 7, load_module_only=True)


def test_parts_of_a_checkpoint_with_the_schedule_of_the_configuration(tmp_path: Path) -> None:
    ds = config(1, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 3}})
    engine = threed.initialize(model=Net(), config=ds)[0]
    step(engine)
    engine.save_checkpoint(tmp_path)
    for part in ("load_optimizer_states", "load_lr_scheduler_states"):
        with pytest.raises(
            NotImplementedError, match="only the optimizer states or only the sched"
        ):
            engine.load_checkpoint(tmp_path, **{part: False})
    engine.load_checkpoint(tmp_path, load_optimizer_states=False, load_lr_scheduler_states=False)


def test_saving_weights_at_stage_3_needs_its_key(tmp_path: Path) -> None:
    ds = config(3)
    del ds["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"]
    engine = threed.initialize(model=Net(), config=ds)[0]
    with pytest.warns(UserWarning, match="has written nothing: set stage3_gather_16bit"):
        assert not engine.save_16bit_model(tmp_path)
    assert not [*tmp_path.iterdir()]
    with pytest.raises(
        NotImplementedError, match="does not offer module_state_dict at ZeRO stage 3"
    ):
        engine.module_state_dict()
    below = made(1)
    assert {*below.module_state_dict(prefix="a.", exclude_frozen_parameters=True)} == {
        f"a.{name}" for name in Net().state_dict() if "frozen" not in name
    }


@pytest.mark.parametrize("stage", [0, 3])
def test_a_module_is_initialized_again(stage: int) -> None:
    """The earlier engine is destroyed; its module continues in a new engine, and in plain PyTorch."""
    model = Net()
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=LR, weight_decay=0.1
    )
    engine = threed.initialize(model=model, config=config(stage), optimizer=optimizer)[0]
    step(engine)
    engine.backward(engine(rows(5)))  # the gradients of a step in progress are dropped
    again = threed.initialize(model=model, config=config(stage), optimizer=optimizer)[0]
    assert any("its engine of an earlier call" in note for note in again.notes)
    same(again.full_state_dict(), plainly(1))
    step(again)
    again.destroy()
    again.destroy()
    for use in (
        again.step,
        lambda: again(torch.ones(2, 4)),
        lambda: again.backward(torch.ones(())),
    ):
        with pytest.raises(RuntimeError, match=r"engine was destroyed.*deepspeed\.initialize"):
            use()
    assert not [key for key in vars(model) if "engine" in key or "threed" in key]
    restarted = Net()
    restarted.load_state_dict(plainly(1))
    want = plainly(1, restarted)
    same(dict(model.state_dict()), want)
    model(rows(1)).backward()
    assert model.first.weight.grad is not None
    optimizer.step()  # the hooks of the engine are removed


def test_auto_cast_casts_floating_point_inputs_to_fp16() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: Tensor, scale: dict[str, Tensor]) -> Tensor:
            assert x.dtype == scale["values"].dtype == torch.float16
            assert scale["count"].dtype == torch.int64
            return (self.layer(x) * scale["values"]).float().square().mean() / scale["count"]

    ds = config(1, fp16={"enabled": True, "auto_cast": True, "loss_scale": 1.0})
    engine, *_ = threed.initialize(model=Half(), config=ds)
    scale = {"values": torch.ones(2), "count": torch.tensor(2)}
    engine.backward(engine(torch.ones(8, 4), scale=scale))
    engine.step()
    assert engine.global_steps == 1
    assert engine.skipped_steps == 0
    engine.destroy()
    ds["fp16"]["auto_cast"] = False
    again, *_ = threed.initialize(model=Half(), config=ds)
    with pytest.raises(AssertionError):
        again(torch.ones(8, 4), scale=scale)
    again.destroy()
