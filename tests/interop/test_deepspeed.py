"""`threed.initialize`: programs written for DeepSpeed train an unmodified GPT-2 as plain PyTorch does."""

from __future__ import annotations

import operator
import tempfile
from collections import UserDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

import threed
from tests import hf_models
from tests.harness import run_ranks
from threed.config import ConfigError
from threed.interop.deepspeed.data import repeat, to_device
from threed.interop.deepspeed.engine import DeepSpeedEngine
from threed.interop.deepspeed.names import REFUSED

STEPS, ROWS, ACCUMULATION = 3, 8, 2
Result = tuple[list[float], list[float], dict[str, Tensor]]


def ds_config(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_batch_size": ROWS, "gradient_accumulation_steps": ACCUMULATION, "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 5000, "stage3_param_persistence_threshold": 40},
        **more,
    }  # fmt: skip


def pieces(step: int, count: int) -> list[dict[str, Tensor]]:
    full = hf_models.batch(step, ROWS)
    return [{key: value.chunk(count)[i] for key, value in full.items()} for i in range(count)]


def my_pieces(engine: DeepSpeedEngine, step: int) -> list[dict[str, Tensor]]:
    everyone = pieces(step, engine.world_size * ACCUMULATION)
    return everyone[engine.global_rank * ACCUMULATION :][:ACCUMULATION]


def train_plainly(
    world: int,
    steps: int = STEPS,
    groups: Callable[[nn.Module], Any] | None = None,
    rate: Any = None,
    scheduler: Any = None,
) -> Result:
    """The mean of the micro-batches' mean losses, torch's AdamW and clipping."""
    model, count = hf_models.make("gpt2"), world * ACCUMULATION
    optimizer = torch.optim.AdamW(
        groups(model) if groups else model.parameters(), lr=3e-3, weight_decay=0.1
    )
    schedule = None if rate is None else torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    schedule = schedule if scheduler is None else scheduler(optimizer)
    losses, norms = [], []
    for step in range(steps):
        losses.append(0.0)
        for piece in pieces(step, count):
            loss = model(**piece).loss / count
            loss.backward()
            losses[-1] += float(loss.detach())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
    return (
        losses,
        norms,
        {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)},
    )


def train_one(engine: DeepSpeedEngine, step: int) -> None:
    """One step as in DeepSpeed's tutorials."""
    for number, piece in enumerate(my_pieces(engine, step), 1):
        loss = engine(**piece).loss
        engine.backward(loss)
        assert engine.is_gradient_accumulation_boundary() == (number == ACCUMULATION)
        engine.step()


def by_hand(ds: dict[str, Any]) -> Result:
    engine, _, _, _ = threed.initialize(model=hf_models.make("gpt2"), config=ds)
    losses, norms = [], []
    for step in range(STEPS):
        train_one(engine, step)
        assert engine.metrics is not None
        losses.append(engine.metrics.loss)
        norms.append(engine.get_global_grad_norm() or 0.0)
    assert (engine.global_steps, engine.global_samples, engine.micro_steps) == (
        STEPS,
        STEPS * ROWS,
        STEPS * 2,
    )
    return losses, norms, engine.full_state_dict()


def by_train_batch(ds: dict[str, Any]) -> Result:
    engine, _, _, _ = threed.initialize(model=hf_models.make("gpt2"), config=ds)
    stream = (piece for step in range(STEPS) for piece in my_pieces(engine, step))
    losses, norms = [], []
    for _ in range(STEPS):
        losses.append(float(engine.train_batch(stream)))
        norms.append(engine.get_global_grad_norm() or 0.0)
    return losses, norms, engine.full_state_dict()


def run_all(calls: list[tuple[Callable[..., Any], tuple[Any, ...]]]) -> list[Any]:
    """Several trainings in one world."""
    return [call(*args) for call, args in calls]


def check(got: Result, want: Result) -> None:
    assert got[0] == pytest.approx(want[0], rel=1e-9)
    assert got[1] == pytest.approx(want[1], rel=1e-9)
    same(got[2], want[2], 1e-9)


def same(got: dict[str, Tensor], want: dict[str, Tensor], atol: float) -> None:
    assert got.keys() == want.keys()
    for name, weight in want.items():
        torch.testing.assert_close(got[name], weight, rtol=0, atol=atol, msg=f"{name} differs")


@pytest.mark.seldom("1")
@pytest.mark.parametrize("world", [1, 2])
def test_it_trains_as_plain_pytorch(world: int) -> None:
    calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
        (by_hand, (ds_config(stage),)) for stage in range(4)
    ]
    calls.append((by_train_batch, (ds_config(2),)))
    want = train_plainly(world)
    for got in run_ranks(world, run_all, calls)[0]:
        check(got, want)


def linear(done: int) -> float:
    """WarmupDecayLR with 2 steps up and 6 in all, as a share."""
    step = max(done - 1, 0)
    return step / 2 if step < 2 else (6 - step) / 4


def scheduled(ds: dict[str, Any]) -> tuple[Result, list[float]]:
    engine, optimizer, _, scheduler = threed.initialize(model=hf_models.make("gpt2"), config=ds)
    assert scheduler is not None
    losses, norms, rates = [], [], []
    for step in range(6):
        rates.append(optimizer.param_groups[0]["lr"])
        train_one(engine, step)
        scheduler.step()  # changes nothing
        assert scheduler.get_last_lr() == engine.get_lr()
        assert engine.metrics is not None
        losses.append(engine.metrics.loss)
        norms.append(engine.metrics.grad_norm)
        assert engine.metrics.lr == pytest.approx(rates[-1])
    return (losses, norms, engine.full_state_dict()), rates


def test_a_schedule() -> None:
    params = {
        "warmup_min_lr": 0, "warmup_max_lr": 3e-3, "warmup_num_steps": 2, "warmup_type": "linear", "total_num_steps": 6,
    }  # fmt: skip
    ds = ds_config(2, scheduler={"type": "WarmupDecayLR", "params": params})
    got, rates = run_ranks(2, scheduled, ds)[0]
    assert rates == pytest.approx([3e-3 * linear(done) for done in range(6)])
    check(got, train_plainly(2, 6, rate=linear))


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Biases and norms without decay, and the head's embedding faster."""
    named = dict(model.named_parameters())
    bare = [p for p in named.values() if p.dim() < 2]
    fast = [p for name, p in named.items() if "wpe" in name]
    rest = [p for name, p in named.items() if p.dim() > 1 and "wpe" not in name]
    return [{"params": rest}, {"params": bare, "weight_decay": 0.0}, {"params": fast, "lr": 1e-2}]


def passed(stage: int) -> Result:
    model = hf_models.make("gpt2")
    own = torch.optim.AdamW(two_groups(model), lr=3e-3, weight_decay=0.1)
    shapes = sorted(tuple(param.shape) for param in model.parameters())
    engine, optimizer, _, _ = threed.initialize(model=model, config=ds_config(stage), optimizer=own)
    rates = sorted(
        (round(group["lr"], 9), group["weight_decay"]) for group in optimizer.param_groups
    )
    assert rates == [(3e-3, 0.0), (3e-3, 0.1), (1e-2, 0.1)]
    assert (
        sorted(tuple(param.shape) for group in optimizer.param_groups for param in group["params"])
        == shapes
    )
    assert any(note.startswith("optimizer: torch.optim.AdamW as passed") for note in engine.notes)
    losses, norms = [], []
    for step in range(STEPS):
        train_one(engine, step)
        assert engine.metrics is not None
        losses.append(engine.metrics.loss)
        norms.append(engine.metrics.grad_norm)
    return losses, norms, engine.full_state_dict()


def per_group(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    """A warm-up from 0, and another schedule for the last group."""
    up = [lambda done: min(done / 2, 1.0)] * 2
    return torch.optim.lr_scheduler.LambdaLR(optimizer, [*up, lambda done: 0.5**done])


def driven(stage: int, how: str, **zero: Any) -> Result:
    """A scheduler of the passed optimizer, made and advanced in one of three ways."""
    model = hf_models.make("gpt2")
    own = torch.optim.AdamW(two_groups(model), lr=3e-3, weight_decay=0.1)
    scheduler = per_group(own) if how != "made by initialize" else per_group
    ds = ds_config(stage)
    ds["zero_optimization"] |= zero
    engine, _, _, returned = threed.initialize(
        model=model, config=ds, optimizer=own,
        lr_scheduler=None if how == "by the program" else scheduler,
    )  # fmt: skip
    losses, norms = [], []
    for step in range(STEPS):
        train_one(engine, step)
        if how == "by the program":
            scheduler.step()
        assert engine.metrics is not None
        losses.append(engine.metrics.loss)
        norms.append(engine.metrics.grad_norm)
    assert (returned is None) == (how == "by the program")
    assert engine.get_lr() == pytest.approx([3e-3, 3e-3, 1e-2 * 0.5**STEPS])
    return losses, norms, engine.full_state_dict()


def test_a_scheduler_with_a_schedule_per_group() -> None:
    ways = ("by the program", "by the engine", "made by initialize")
    calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
        (driven, (stage, how)) for stage, how in zip((0, 1, 2), ways, strict=True)
    ]
    calls.append((driven_offloaded, (3, "by the program")))
    want = train_plainly(2, groups=two_groups, scheduler=per_group)
    for got in run_ranks(2, run_all, calls)[0]:
        check(got, want)


def driven_offloaded(stage: int, how: str) -> Result:
    return driven(stage, how, offload_optimizer={"device": "cpu"})


def resumed_rates(folder: str) -> list[list[float]]:
    """The rates that a program and a scheduler set are those of the checkpoint after a load."""

    def start() -> DeepSpeedEngine:
        model = hf_models.make("gpt2")
        own = torch.optim.AdamW(two_groups(model), lr=3e-3, weight_decay=0.1)
        config = ds_config(1)
        return threed.initialize(model=model, config=config, optimizer=own, lr_scheduler=per_group)[
            0
        ]

    engine = start()
    train_one(engine, 0)
    engine.save_checkpoint(folder)
    rates = [engine.get_lr()]
    train_one(engine, 1)
    rates.append(engine.get_lr())
    engine = start()
    engine.load_checkpoint(folder)
    rates.append(engine.get_lr())
    train_one(engine, 1)
    return [*rates, engine.get_lr()]


def test_a_scheduler_is_saved_with_the_engine(tmp_path: Path) -> None:
    saved, later, loaded, again = run_ranks(1, resumed_rates, str(tmp_path))[0]
    assert (loaded, again) == (saved, later)
    assert saved != later


def test_an_optimizer_with_groups() -> None:
    want = train_plainly(2, groups=two_groups)
    for got in run_ranks(2, run_all, [(passed, (1,)), (passed, (3,))])[0]:
        check(got, want)


def saved(stage: int, folder: str, later: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Trains, saves, trains on; then loads into a fresh engine of another stage, and trains on again."""
    engine, _, _, _ = threed.initialize(model=hf_models.make("gpt2"), config=ds_config(stage))
    with pytest.warns(UserWarning, match="has no file latest: nothing was loaded"):
        assert engine.load_checkpoint(folder) == (None, None)
    train_one(engine, 0)
    assert engine.save_checkpoint(folder, client_state={"epoch": 4})
    train_one(engine, 1)
    fresh, _, _, _ = threed.initialize(
        model=hf_models.make("gpt2", seed=1), config=ds_config(later)
    )
    path, state = fresh.load_checkpoint(folder)
    assert (path, state) == (f"{folder}/global_step1/manifest.json", {"epoch": 4})
    assert (fresh.global_steps, fresh.micro_steps) == (1, 2)
    train_one(fresh, 1)
    fresh.save_checkpoint(folder, tag="mine")
    assert (Path(folder) / "latest").read_text() == "mine"
    train_partly(fresh)
    with pytest.raises(RuntimeError, match="in the middle of a step"):
        fresh.save_checkpoint(folder)
    return engine.full_state_dict(), fresh.full_state_dict()


def train_partly(engine: DeepSpeedEngine) -> None:
    engine.backward(engine(**my_pieces(engine, 2)[0]).loss)
    engine.step()


def test_checkpoints() -> None:
    with tempfile.TemporaryDirectory() as folder:
        want, got = run_ranks(2, saved, 3, folder, 1)[0]
    same(got, want, 1e-12)


def evaluated(stage: int) -> tuple[float, float, bool, Result]:
    model = hf_models.make("gpt2")
    model.transformer.drop.eval()  # type: ignore[union-attr]
    engine, _, _, _ = threed.initialize(model=model, config=ds_config(stage))
    with pytest.raises(StopIteration):  # an evaluation that breaks off leaves no trace either
        engine.eval_batch(iter(()))
    before = float(engine.eval_batch(iter(my_pieces(engine, 0))))
    kept = engine.training and not model.transformer.drop.training  # type: ignore[union-attr]
    losses, norms = [], []
    for step in range(STEPS):
        train_one(engine, step)
        with torch.no_grad():
            engine(**my_pieces(engine, 9)[0])
        assert engine.metrics is not None
        losses.append(engine.metrics.loss)
        norms.append(engine.metrics.grad_norm)
    kept = kept and not model.transformer.drop.training  # type: ignore[union-attr]
    engine.eval()
    with torch.no_grad():
        last = float(engine(**pieces(0, 1)[0]).loss)
    return before, last, kept and not engine.training, (losses, norms, engine.full_state_dict())


def test_evaluation_between_steps() -> None:
    want = train_plainly(2)
    model = hf_models.make("gpt2")
    before = sum(float(model(**piece).loss.detach()) for piece in pieces(0, 4)) / 4
    model.load_state_dict(want[2], strict=False)
    model.tie_weights()  # type: ignore[operator]
    after = float(model(**pieces(0, 1)[0]).loss.detach())
    for got in run_ranks(2, run_all, [(evaluated, (stage,)) for stage in (2, 3)])[0]:
        assert got[:2] == (pytest.approx(before, rel=1e-9), pytest.approx(after, rel=1e-9))
        assert got[2]
        check(got[3], want)


class Regression(nn.Module):
    """A loss of positional arguments."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.linear(x), y)


def data() -> TensorDataset:
    x = torch.arange(60.0).view(20, 3) / 60
    return TensorDataset(x, x.sum(1, keepdim=True))


def loaded() -> tuple[list[list[float]], list[list[float]], int, list[float]]:
    ds = {
        "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}},
        "dataloader_drop_last": True, "gradient_accumulation_steps": 2,
    }  # fmt: skip
    engine, _, loader, scheduler = threed.initialize(
        model=Regression(), config=ds, training_data=data()
    )
    assert loader is not None
    assert scheduler is None
    batches = repeat(loader)
    first, second = (
        [x[:, 0].tolist() for x, _ in (next(batches) for _ in range(len(loader)))] for _ in range(2)
    )
    losses = [float(engine.train_batch()) for _ in range(40)]
    return first, second, len(loader), losses


def test_training_data() -> None:
    results = run_ranks(2, loaded)
    rows = [[v for batch in first for v in batch] for first, _, _, _ in results]
    # every sample once
    assert sorted(rows[0] + rows[1]) == pytest.approx(data().tensors[0][:, 0].tolist())
    assert results[0][2] == 5
    assert all(len(batch) == 2 for first, _, _, _ in results for batch in first)
    assert results[0][0] != results[0][1]  # another order in the next epoch
    assert results[0][3] == results[1][3]
    assert results[0][3][-1] < 0.1 * results[0][3][0]


def half() -> tuple[list[float], int]:
    fp16 = {"enabled": True, "initial_scale_power": 40, "hysteresis": 1, "min_loss_scale": 0.5}
    ds = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}, "fp16": fp16}
    engine, optimizer, _, _ = threed.initialize(model=Regression(), config=ds)
    scales = []
    stream = [(x.half(), y.half()) for x, y in [data()[:2]] * 4]
    for x, y in stream:
        scales.append(optimizer.loss_scale)
        engine.backward(engine(x, y))
        engine.step()
    return scales, engine.skipped_steps


def test_fp16_overflows_are_skipped() -> None:
    scales, skipped = run_ranks(1, half)[0]
    assert scales == [2.0**40, 2.0**39, 2.0**38, 2.0**37]
    assert skipped == 4


# ------------------------------------------------------------------------------------------------------ what it refuses

DS = {"train_batch_size": 2, "optimizer": {"type": "AdamW"}}


@pytest.fixture
def engine() -> DeepSpeedEngine:
    return threed.initialize(model=Regression(), config=DS)[0]


def test_what_programs_look_up(engine: DeepSpeedEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert engine.linear.in_features == 3  # looked up in the module
    assert [name for name, _ in engine.named_parameters()] == ["linear.weight", "linear.bias"]
    assert engine.get_global_grad_norm() is None
    assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (2, 2)
    assert (
        engine.gradient_accumulation_steps(),
        engine.zero_optimization_stage(),
        engine.get_lr(),
    ) == (1, 0, [1e-3])
    assert engine.optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    assert engine.eval().train() is engine
    with pytest.raises(AttributeError):
        engine.nothing  # noqa: B018


def test_what_applies_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    engine = threed.initialize(model=Regression(), config={**DS, "steps_per_print": 10})[0]
    said = capsys.readouterr().err.splitlines()
    assert said == [f"threed: {note}" for note in engine.notes]
    assert any(line.startswith("threed: steps_per_print: no effect: ") for line in said)


def test_what_cannot_be_done(engine: DeepSpeedEngine) -> None:
    x, y = data()[:2]
    with pytest.raises(RuntimeError, match="step without a backward"):
        engine.step()
    loss = engine(x, y)
    with pytest.raises(ValueError, match="scalar loss"):
        engine.backward(y)
    engine.backward(loss)
    with pytest.raises(RuntimeError, match="train_batch in the middle of a step"):
        engine.train_batch(iter([]))
    engine.step()
    with pytest.raises(ValueError, match="needs an iterator, or training_data"):
        engine.train_batch()
    with pytest.raises(NotImplementedError, match="full_state_dict"):
        engine.state_dict()
    with pytest.raises(NotImplementedError, match=r"engine\.step"):
        engine.optimizer.step()
    with pytest.raises(NotImplementedError, match="save_checkpoint"):
        engine.optimizer.state_dict()


RATES: dict[str, Callable[[Any], Any]] = {
    "item": lambda groups: operator.setitem(groups[0], "lr", 1.0),
    "update": lambda groups: groups[0].update(lr=1.0),
    "|=": lambda groups: operator.ior(groups[0], {"lr": 1.0}),
}


@pytest.mark.parametrize("name", RATES)
def test_a_program_sets_learning_rates(engine: DeepSpeedEngine, name: str) -> None:
    RATES[name](engine.optimizer.param_groups)
    assert engine.get_lr() == [1.0]
    engine.backward(engine(*data()[:2]))
    engine.step()
    assert engine.metrics is not None
    assert engine.metrics.lr == 1.0
    assert engine.get_lr() == [1.0]


CHANGES: dict[str, Callable[[Any], Any]] = {
    "del": lambda groups: operator.delitem(groups[0], "betas"),
    "item": lambda groups: operator.setitem(groups[0], "eps", 1.0),
    "no rate": lambda groups: groups[0].pop("lr"),
    "clear": lambda groups: groups[0].clear(),
    "list item": lambda groups: operator.setitem(groups, 0, {}),
    "list append": lambda groups: groups.append({}),
    "list +=": lambda groups: operator.iadd(groups, [{}]),
    "list clear": lambda groups: groups.clear(),
    "params": lambda groups: groups[0]["params"].append(nn.Parameter(torch.ones(1))),
}


@pytest.mark.parametrize("name", CHANGES)
def test_other_changes_of_groups_are_refused(engine: DeepSpeedEngine, name: str) -> None:
    CHANGES[name](engine.optimizer.param_groups)
    with pytest.raises(RuntimeError, match=r"only lr may change|has no lr|has other groups"):
        engine(*data()[:2])
    with pytest.raises(RuntimeError, match="add_param_group"):
        engine.optimizer.add_param_group({"params": []})


def test_names_that_are_missing_do_not_blame_the_module(engine: DeepSpeedEngine) -> None:
    with pytest.raises(
        AttributeError,
        match=r"threed does not offer engine.get_fp32_state_dict: use engine.full_state_",
    ):
        engine.get_fp32_state_dict()
    with pytest.raises(
        AttributeError,
        match=r"threed does not offer engine.nothing: use .* module \(Regression\) has no",
    ):
        engine.nothing  # noqa: B018
    with pytest.raises(
        AttributeError, match=r"does not offer DeepSpeedEngine._do_args_sanity_check: use"
    ):
        DeepSpeedEngine._do_args_sanity_check  # noqa: B018
    assert not hasattr(DeepSpeedEngine, "_configure_optimizer")
    assert engine.linear is engine.module.linear
    assert not hasattr(engine, "set_lr")
    refused = {name.removeprefix("engine.") for name in REFUSED if name.startswith("engine.")}
    assert "set_lr" in refused
    assert refused.isdisjoint(dir(DeepSpeedEngine))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from data()


def streamed() -> str:
    try:
        threed.initialize(model=Regression(), config=DS, training_data=Stream())
    except ConfigError as error:
        return str(error)
    return "not refused"


def test_a_stream_is_refused_where_ranks_would_read_the_same() -> None:
    for said in run_ranks(2, streamed):
        assert said.startswith(
            "training_data: a Stream is iterable, without indices, and each of the 2 data ranks"
        )
    loader = threed.initialize(model=Regression(), config=DS, training_data=Stream())[2]
    assert loader is not None
    assert sum(len(x) for x, _ in loader) == 20


def test_every_complete_pass_is_shuffled_anew() -> None:
    loader = threed.initialize(model=Regression(), config=DS, training_data=data())[2]
    assert loader is not None

    def rows() -> list[float]:
        return [float(v) for x, _ in loader for v in x[:, 0]]

    next(iter(loader))  # a look is not a pass
    first, second = rows(), rows()
    assert first != second
    assert sorted(first) == sorted(second)
    loader.sampler.set_epoch(0)  # type: ignore[attr-defined]
    assert rows() == first
    assert rows() == second


def one_loss(stage: int, accumulation: int) -> list[dict[str, Tensor]]:
    """Two engines and one loss: the backward of the first, then a step of each."""
    ds = {
        "train_batch_size": ROWS, "gradient_accumulation_steps": accumulation, "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }  # fmt: skip
    torch.manual_seed(0)
    first, second = (
        threed.initialize(model=nn.Linear(4, 4).double(), config=ds)[0] for _ in range(2)
    )
    for step in range(2):
        x = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        for part in x.chunk(first.world_size)[first.global_rank].chunk(accumulation):
            first.backward(second(first(part).tanh()).square().mean())
            first.step()
            second.step()
    with pytest.raises(RuntimeError, match="step without a backward"):
        second.step()
    return [first.full_state_dict(), second.full_state_dict()]


def test_one_loss_through_two_engines() -> None:
    torch.manual_seed(0)
    modules = [nn.Linear(4, 4).double() for _ in range(2)]
    for step in range(2):
        x = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        modules[1](modules[0](x).tanh()).square().mean().backward()
        for p in (p for module in modules for p in module.parameters()):
            p.data -= 0.1 * p.grad  # type: ignore[operator]
            p.grad = None
    for got in run_ranks(
        2, run_all, [(one_loss, (stage, count)) for stage in range(4) for count in (1, 2)]
    )[0]:
        for weights, module in zip(got, modules, strict=True):
            same(
                weights,
                {name: p.detach() for name, p in module.named_parameters(remove_duplicate=False)},
                1e-12,
            )


def test_what_initialize_refuses() -> None:
    for arguments, text in (
        ({}, "model: not given\nconfig: not given"),
        (
            {"model": Regression(), "config": DS, "lr_scheduler": object()},
            "lr_scheduler: pass a torch scheduler, or a function",
        ),
        ({"model": Regression(), "config": DS, "model_parameters": []}, "set requires_grad_"),
        (
            {"model": Regression(), "config": {**DS, "train_batch_sise": 2}},
            "did you mean train_batch_size",
        ),
    ):
        with pytest.raises(ConfigError, match=text):
            threed.initialize(**arguments)


def test_a_batch_moves_with_its_structure() -> None:
    class Pair(NamedTuple):
        ids: Any
        text: str

    batch = UserDict(pair=Pair([torch.ones(2)], "kept"), flag=True, rows=(torch.zeros(1),))
    moved = to_device(batch, torch.device("meta"))
    assert type(moved) is dict
    assert isinstance(moved["pair"], Pair)
    assert (moved["pair"].ids[0].device.type, moved["pair"].text, moved["flag"]) == (
        "meta",
        "kept",
        True,
    )
    assert moved["rows"][0].is_meta
