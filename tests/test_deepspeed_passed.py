"""What is passed to `initialize` in place of keys: files, torch optimizers, parameter groups."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.test_deepspeed_config import BASE, config, notes, problem
from threed.config import ConfigError
from threed.ds_config import Group, ModelFacts, find_groups, read, read_optimizer, translate


def test_reading(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(BASE), encoding="utf-8")
    assert read(path) == read(str(path)) == read(BASE) == BASE
    for text, want in (
        ('{"a": 1, // no', "no JSON"), ("[1]", "holds list"), ('{"fp16": 1, "fp16": 2}', "fp16: given twice"),
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
    section, note = read_optimizer(torch.optim.AdamW(model.parameters(), lr=2e-4, betas=(0.8, 0.9), weight_decay=0.3))
    optim = translate(config(optimizer=section), 4).config.optim
    assert (optim.name, optim.lr, optim.betas, optim.weight_decay) == ("adamw", 2e-4, (0.8, 0.9), 0.3)
    assert note == (
        "optimizer: torch.optim.AdamW as passed, with betas (0.8, 0.9), eps 1e-08, lr 0.0002, weight_decay 0.3"
    )
    section, _ = read_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5))
    optim = translate(config(optimizer=section), 4).config.optim
    assert (optim.name, optim.lr, optim.momentum) == ("sgd", 0.1, 0.5)
    section, _ = read_optimizer(torch.optim.Adam(model.parameters(), weight_decay=0.1))
    assert "weight_decay 0" in problem(optimizer=section)


def test_torch_optimizers_that_are_refused() -> None:
    model = small()
    with pytest.raises(ConfigError, match="RMSprop is not there: pass torch's AdamW, Adam or SGD"):
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


def test_parameter_groups() -> None:
    model = small()
    first, second = model.children()
    dicts = [{"params": first.parameters(), "lr": 0.1}, {"params": list(second.parameters()), "weight_decay": 0.2}]
    groups = find_groups(model, dicts)
    assert groups == (Group(("0.weight", "0.bias"), 0.1, None), Group(("1.weight", "1.bias"), None, 0.2))
    optim = translate(BASE, 4, ModelFacts(), groups).config.optim
    assert [(g.match, g.lr, g.weight_decay) for g in optim.groups] == [
        ("0.weight", 0.1, None), ("0.bias", 0.1, None), ("1.weight", None, 0.2), ("1.bias", None, 0.2), ("*", None, 0),
    ]  # fmt: skip
    assert find_groups(model, model.parameters()) == ()
    assert find_groups(model, None) == ()
    with pytest.raises(ConfigError, match=r"without 1.bias, 1.weight: set requires_grad_\(False\)"):
        find_groups(model, first.parameters())
    with pytest.raises(ConfigError, match="2 of them are not the model's"):
        find_groups(model, [*model.parameters(), *nn.Linear(2, 2).parameters()])
    second.requires_grad_(False)
    assert find_groups(model, first.parameters()) == ()


def test_a_schedule_of_its_own_rates_sets_all_groups() -> None:
    model = small()
    first, second = model.children()
    groups = find_groups(model, [{"params": first.parameters(), "lr": 0.1}, {"params": second.parameters(), "lr": 0.2}])
    t = translate(config(scheduler={"type": "WarmupLR"}), 4, ModelFacts(), groups)
    assert not {g.lr for g in t.config.optim.groups} - {None}
    assert (
        notes(t, "scheduler.params.warmup_max_lr")[-1] == "one learning rate for all parameter groups, as in DeepSpeed"
    )
    cosine = {"type": "WarmupCosineLR", "params": {"total_num_steps": 9}}
    t = translate(config(scheduler=cosine), 4, ModelFacts(), groups)
    assert {g.lr for g in t.config.optim.groups} == {0.1, 0.2, None}
