"""What is passed to `initialize` in place of keys: files, torch optimizers, parameter groups."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import threed
from tests.interop.test_deepspeed_config import BASE, config, notes, problem
from threed.config import ConfigError
from threed.interop.deepspeed.config.optimizers import Group, find_groups, read_optimizer
from threed.interop.deepspeed.config.reader import read
from threed.interop.deepspeed.config.translate import ModelFacts, translate


def test_reading(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(BASE), encoding="utf-8")
    assert read(path) == read(str(path)) == read(BASE) == BASE
    for text, want in (
        ('{"a": 1, // no', "invalid JSON"), ("[1]", "holds list"), ('{"fp16": 1, "fp16": 2}', "fp16: given twice"),
    ):  # fmt: skip
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=want):
            read(path)
    with pytest.raises(ConfigError, match="give the path of a"):
        read(tmp_path / "none.json")


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def test_a_torch_optimizer_is_read() -> None:
    model = small()
    section, note = read_optimizer(
        torch.optim.AdamW(model.parameters(), lr=2e-4, betas=(0.8, 0.9), weight_decay=0.3)
    )
    optim = translate(config(optimizer=section), 4).config.optim
    assert (optim.name, optim.lr, optim.betas, optim.weight_decay) == (
        "adamw",
        2e-4,
        (0.8, 0.9),
        0.3,
    )
    assert note == (
        "optimizer: torch.optim.AdamW as passed, with betas (0.8, 0.9), eps 1e-08, lr 0.0002, weight_decay 0.3"
    )
    section, _ = read_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5))
    optim = translate(config(optimizer=section), 4).config.optim
    assert (optim.name, optim.lr, optim.momentum) == ("sgd", 0.1, 0.5)
    section, _ = read_optimizer(torch.optim.Adam(model.parameters(), weight_decay=0.1))
    assert "weight_decay 0" in problem(optimizer=section)
    section, _ = read_optimizer(
        torch.optim.Adam(model.parameters(), weight_decay=0.1, decoupled_weight_decay=True)
    )
    assert translate(config(optimizer=section), 4).config.optim.weight_decay == 0.1
    frozen = [
        {"params": [p], "lr": lr}
        for p, lr in zip(model.parameters(), (0.0, 0.1, 0.1, 0.2), strict=True)
    ]
    optimizer = torch.optim.SGD(frozen, momentum=0.5)
    section, _ = read_optimizer(optimizer)
    groups = find_groups(model, optimizer.param_groups, section["params"])
    optim = translate(config(optimizer=section), 4, groups=groups).config.optim
    assert (optim.lr, [group.lr for group in optim.groups]) == (0.1, [0.0, 0.1, 0.1, 0.2, None])


def test_torch_optimizers_that_are_refused() -> None:
    model = small()
    with pytest.raises(
        ConfigError, match="RMSprop is not supported: pass torch's AdamW, Adam or SGD"
    ):
        read_optimizer(torch.optim.RMSprop(model.parameters()))
    first, second = model.children()
    groups: list[dict[str, Any]] = [
        {"params": first.parameters()},
        {"params": second.parameters(), "betas": (0.1, 0.2)},
    ]
    with pytest.raises(ConfigError, match="groups differ in betas"):
        read_optimizer(torch.optim.AdamW(groups))
    used = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    used.step()
    with pytest.raises(ConfigError, match="has made steps"):
        read_optimizer(used)


def linear(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1)


SCHEDULERS = {
    "torch's": linear,
    "warm-up from 0": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: step / 10
    ),
    "by metrics": torch.optim.lr_scheduler.ReduceLROnPlateau,
    "several": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [linear(optimizer), torch.optim.lr_scheduler.ConstantLR(optimizer)],
        milestones=[3],
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_an_optimizer_with_a_scheduler_is_read_with_its_first_rate(name: str) -> None:
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    SCHEDULERS[name](optimizer)
    assert read_optimizer(optimizer)[0]["params"]["lr"] == 0.1
    assert [group.lr for group in find_groups(model, optimizer.param_groups)] == [0.1]


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).square().mean()


def started(optimizer: str = "SGD", **more: Any) -> tuple[Any, Any, torch.optim.Optimizer]:
    model = Linear()
    passed = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1)
    ds = {"train_batch_size": 2}
    engine, view, _, _ = threed.initialize(model=model, config=ds, optimizer=passed, **more)
    return engine, view, passed


def step(engine: Any) -> None:
    engine.backward(engine(torch.ones(2, 3)))
    engine.step()


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_of_a_passed_optimizer_sets_the_rates(name: str, after: bool) -> None:
    twin = nn.Parameter(torch.ones(1))
    other = torch.optim.SGD([twin], lr=0.1)
    want = SCHEDULERS[name](other)
    if after:
        engine, view, passed = started()
        scheduler = SCHEDULERS[name](passed)
    else:
        model = Linear()
        passed = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = SCHEDULERS[name](passed)
        engine, view, _, _ = threed.initialize(
            model=model, config={"train_batch_size": 2}, optimizer=passed
        )
    metric = (1.0,) if name == "by metrics" else ()
    for _ in range(14):
        rate = other.param_groups[0]["lr"]
        assert engine.get_lr() == [pytest.approx(rate)]
        step(engine)
        assert engine.metrics.lr == pytest.approx(rate)
        other.step()
        want.step(*metric)
        scheduler.step(*metric)
    assert view.param_groups[0]["lr"] == passed.param_groups[0]["lr"]


def test_a_step_with_a_new_rate_reads_no_rate_of_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, _, passed = started()

    def read(_: Any) -> Any:
        raise AssertionError("the host would wait for the device")

    monkeypatch.setattr(type(engine.engine), "learning_rates", property(read))
    passed.param_groups[0]["lr"] = 0.2
    step(engine)
    assert engine.metrics.lr == 0.2


@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
def test_hooks_of_a_passed_optimizer_are_refused(register: str) -> None:
    engine, _, passed = started("AdamW")
    getattr(passed, register)(lambda *_: None)
    with pytest.raises(
        RuntimeError,
        match=r"hooks for its steps.* call your function before or after engine\.step\(\)",
    ):
        step(engine)
    fresh = torch.optim.AdamW(small().parameters())
    getattr(fresh, register)(lambda *_: None)
    with pytest.raises(
        ConfigError,
        match=r"hooks for its steps.* call your function before or after engine\.step\(\)",
    ):
        read_optimizer(fresh)


def test_other_changes_of_a_passed_optimizer_are_refused() -> None:
    engine, view, passed = started()
    for optimizer in (passed, view):
        with pytest.raises(RuntimeError, match=r"call engine.step\(\)"):
            optimizer.step()
        with pytest.raises(NotImplementedError, match=r"use engine.save_checkpoint\(\)"):
            optimizer.state_dict()
        with pytest.raises(NotImplementedError, match=r"use engine.save_checkpoint\(\)"):
            optimizer.load_state_dict({})
    passed.param_groups[0]["weight_decay"] = 0.5
    with pytest.raises(RuntimeError, match=r"\[0\] has another weight_decay .* only lr may change"):
        step(engine)
    passed.param_groups[0]["weight_decay"] = 0
    step(engine)
    passed.param_groups[:] = [dict(passed.param_groups[0])]
    with pytest.raises(RuntimeError, match=r"has other groups: .* engine.load_checkpoint"):
        step(engine)


def test_groups_added_to_a_passed_optimizer_are_refused() -> None:
    engine, view, passed = started()
    with pytest.raises(RuntimeError, match="pass all groups to initialize"):
        view.add_param_group({"params": nn.Linear(2, 2).parameters()})
    passed.add_param_group({"params": nn.Linear(2, 2).parameters()})
    with pytest.raises(RuntimeError, match="pass all groups to initialize"):
        step(engine)


@pytest.mark.parametrize(("lr", "decay"), [(5e-4, 0.1), (None, 0.1), (5e-4, None), (None, None)])
@pytest.mark.parametrize("count", [1, 2])
def test_groups_that_are_alike_keep_their_values(
    lr: float | None, decay: float | None, count: int
) -> None:
    model = small()
    params, own = list(model.parameters()), {"lr": lr, "weight_decay": decay}
    some = {key: value for key, value in own.items() if value is not None}
    groups = [{"params": params[number::count], **some} for number in range(count)]
    found = find_groups(model, groups)
    optim = translate(
        config(optimizer={"type": "AdamW", "params": {"lr": 0.1}}), 4, groups=found
    ).config.optim
    alone = count == 1 and lr is None and decay is None  # left out: the optimizer's values apply
    for name, _ in model.named_parameters():
        of = next((group for group in optim.groups if group.matches(name)), None)
        assert (of and of.lr, of and of.weight_decay) == (None if alone else lr or 0.1, decay)


def test_values_of_groups_that_cannot_apply_are_refused() -> None:
    model = small()
    params = list(model.parameters())
    for groups, text in (
        (
            [{"params": params, "betas": (0.5, 0.9)}],
            r"model_parameters\[0\]: betas \(0.5, 0.9\), but the optimizer's is",
        ),
        ([{"params": params, "momentum": 0.5}], "momentum 0.5, but the optimizer's is 0.0"),
        ([{"params": params}, {"params": params[:1]}], "0.weight in more than one group"),
        ([{"lr": 0.1}], r"model_parameters\[0\]: no 'params'"),
    ):
        with pytest.raises(ConfigError, match=text):
            find_groups(model, groups, {"betas": [0.9, 0.95]})
    assert (
        find_groups(
            model, [{"params": params, "betas": (0.9, 0.95), "name": "all"}], {"betas": [0.9, 0.95]}
        )
        == ()
    )
    groups = find_groups(model, [{"params": params, "weight_decay": 0.1}])
    coupled = {"type": "Adam", "params": {"lr": 0.1, "adam_w_mode": False}}
    with pytest.raises(ConfigError, match="decay as part of the gradient is not supported"):
        translate(config(optimizer=coupled), 4, groups=groups)


def test_parameter_groups() -> None:
    model = small()
    first, second = model.children()
    dicts = [
        {"params": first.parameters(), "lr": 0.1},
        {"params": list(second.parameters()), "weight_decay": 0.2},
    ]
    groups = find_groups(model, dicts)
    assert groups == (
        Group(("0.weight", "0.bias"), 0.1, None),
        Group(("1.weight", "1.bias"), None, 0.2),
    )
    optim = translate(BASE, 4, ModelFacts(), groups).config.optim
    assert [(g.match, g.lr, g.weight_decay) for g in optim.groups] == [
        ("0.weight|0.bias", 0.1, None), ("1.weight|1.bias", 1e-3, 0.2), ("*", None, 0),
    ]  # fmt: skip
    assert find_groups(model, model.parameters()) == ()
    assert find_groups(model, None) == ()
    with pytest.raises(ConfigError, match=r"missing 1.bias, 1.weight: set requires_grad_\(False\)"):
        find_groups(model, first.parameters())
    with pytest.raises(ConfigError, match="2 of them are not the model's"):
        find_groups(model, [*model.parameters(), *nn.Linear(2, 2).parameters()])
    second.requires_grad_(False)
    assert find_groups(model, first.parameters()) == ()


def test_a_schedule_of_its_own_rates_sets_all_groups() -> None:
    model = small()
    first, second = model.children()
    groups = find_groups(
        model,
        [{"params": first.parameters(), "lr": 0.1}, {"params": second.parameters(), "lr": 0.2}],
    )
    t = translate(config(scheduler={"type": "WarmupLR"}), 4, ModelFacts(), groups)
    assert {g.lr for g in t.config.optim.groups} == {t.config.optim.lr, None}
    assert (
        notes(t, "scheduler.params.warmup_max_lr")[-1]
        == "one learning rate for all parameter groups, as in DeepSpeed"
    )
    cosine = {"type": "WarmupCosineLR", "params": {"total_num_steps": 9}}
    t = translate(config(scheduler=cosine), 4, ModelFacts(), groups)
    assert {g.lr for g in t.config.optim.groups} == {0.1, 0.2, None}


RESUMED = {
    "milestones": lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5]),
    "a tensor": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n)),
    "nested": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [linear(optimizer), torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3])],
        milestones=[2],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RESUMED)
def test_a_scheduler_continues_after_a_load(name: str, tmp_path: Path) -> None:
    def new() -> Any:
        lr = torch.tensor(0.1) if name == "a tensor" else 0.1
        model = Linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        ds = {"train_batch_size": 2}
        scheduler = RESUMED[name]
        return threed.initialize(
            None, model, config=ds, optimizer=optimizer, lr_scheduler=scheduler
        )[0]

    engine, found = new(), []
    for number in range(8):
        if number == 3:
            engine.save_checkpoint(tmp_path)
        step(engine)
        found.append(engine.get_lr())
    engine = new()
    engine.load_checkpoint(tmp_path)
    for rates in found[3:]:
        step(engine)
        assert engine.get_lr() == pytest.approx(rates)


@pytest.mark.parametrize(
    ("precision", "before"),
    [
        ({"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}}, 0.025),
        ({"fp16": {"enabled": True, "loss_scale": 16}}, 0.0125),
        ({"bf16": {"enabled": True}}, 0.0125),
        ({}, 0.0125),
    ],
)
def test_a_scheduler_continues_after_skipped_steps(
    precision: dict[str, Any], before: float, tmp_path: Path
) -> None:
    """Only a dynamic loss scale holds the scheduler back in a skipped step, as in DeepSpeed."""
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get("".join(precision), torch.float32)

    def new() -> Any:
        schedule = lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # noqa: E731
        model = Linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ds = {"train_batch_size": 2, **precision}
        return threed.initialize(
            None, model, config=ds, optimizer=optimizer, lr_scheduler=schedule
        )[0]

    engine = new()
    for value in (1.0, float("nan"), 1.0):
        engine.backward(engine(torch.full((2, 3), value, dtype=dtype)))
        engine.step()
    assert engine.skipped_steps == 1
    engine.save_checkpoint(tmp_path)
    assert engine.get_lr() == [before]
    engine = new()
    engine.load_checkpoint(tmp_path)
    engine.backward(engine(torch.ones(2, 3, dtype=dtype)))
    engine.step()
    assert engine.get_lr() == [before / 2]


def test_frozen_groups_keep_their_rates() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    for frozen in (0, 3):
        model[frozen].requires_grad_(False)
    groups = [{"params": model[n].parameters(), "lr": 0.1 * (n + 1)} for n in range(4)]
    groups.insert(2, {"params": [], "lr": 0.9})
    passed = torch.optim.SGD(groups)
    ds = {"train_batch_size": 2}
    engine, view, _, _ = threed.initialize(None, model, config=ds, optimizer=passed)
    want = [0.1, 0.2, 0.9, 0.3, 0.4]
    assert engine.get_lr() == pytest.approx(want)
    for number, group in enumerate(view.param_groups):
        group["lr"] = want[number] / 2
    engine.backward(engine(torch.ones(2, 2)).square().mean())
    engine.step()
    assert engine.get_lr() == pytest.approx([rate / 2 for rate in want])
    assert engine.engine.learning_rates[1:3] == pytest.approx([0.1, 0.15])


def test_groups_of_parameters_with_odd_names() -> None:
    names = ["a", "a|b", "[a|b]", "b"]
    params = nn.ParameterDict({name: nn.Parameter(torch.ones(1)) for name in names})
    model = nn.Module()
    model.params = params
    model.forward = lambda x: sum(params.values()).sum() * x.mean()  # type: ignore[method-assign,assignment]
    groups = [{"params": [params[name]], "lr": 0.1 * n} for n, name in enumerate(names, 1)]
    ds = {"train_batch_size": 2, "gradient_clipping": 0.0}
    engine = threed.initialize(None, model, config=ds, optimizer=torch.optim.SGD(groups))[0]
    engine.backward(engine(torch.ones(2, 1)))
    engine.step()
    found = [1 - float(params[name]) for name in names]
    assert found == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_a_created_scheduler_that_needs_a_metric_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a metric"):
        started(lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau)


def test_the_section_scheduler_is_used_until_the_program_sets_a_rate() -> None:
    model = Linear()
    passed = torch.optim.SGD(model.parameters(), lr=0.1)
    program = torch.optim.lr_scheduler.LambdaLR(passed, lambda step: 0.5)
    warmup = {"warmup_num_steps": 4, "warmup_max_lr": 0.2, "warmup_type": "linear"}
    ds = {"train_batch_size": 2, "scheduler": {"type": "WarmupLR", "params": warmup}}
    engine, view, _, scheduler = threed.initialize(model=model, config=ds, optimizer=passed)
    rates = []
    for _ in range(4):
        rates += scheduler.get_last_lr()
        step(engine)
    assert rates == pytest.approx([0.0, 0.0, 0.05, 0.1])
    program.step()
    step(engine)
    assert [group["lr"] for group in view.param_groups] == pytest.approx([0.05])
