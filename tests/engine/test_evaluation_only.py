"""`Engine(..., trains=False)`: only the slices of the weights, together with an engine that trains; as plain PyTorch."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import configs as layered
from tests.configs import topology_of
from tests.harness import run_ranks
from tests.live import Live
from threed import Config, Engine
from threed.zero.state import holdings

WIDTH, RANKS = 32, 2  # parameters are padded to multiples of 32 elements


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x


def net(seed: int, dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(seed)
    return Net().to(dtype)


def engine_at(
    module: nn.Module, stage: int, dtype: str = "fp64", trains: bool = True, **zero: Any
) -> Any:
    settings: dict[str, Any] = {
        "zero": {"stage": stage, "resident": 0, "bucket_mib": 1e-2, **zero}, "precision": {"dtype": dtype},
        "train": {"global_batch": RANKS * 2, "micro_batch": 2, "grad_clip": 0.0},
        "optim": {"lr": 0.1, "warmup": 0, "schedule": "constant", "eps": 1e-3, "weight_decay": 0.0},
    }  # fmt: skip
    return Engine(module, topology_of(1, 1), Config.model_validate(settings), trains=trains)


def rows(step: int, rank: int) -> Tensor:
    draw = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(2, WIDTH, generator=draw, dtype=torch.float64)


def preference(policy: Tensor, reference: Tensor) -> Tensor:
    """A loss of two models, as in DPO."""
    return -F.logsigmoid(policy - reference).mean()


def truth(steps: int) -> dict[str, Tensor]:
    policy, reference = net(0), net(1)
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=0.1, eps=1e-3, weight_decay=0.0, betas=(0.9, 0.95)
    )
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(RANKS):
            with torch.no_grad():
                fixed = reference(rows(step, rank))
            (preference(policy(rows(step, rank)), fixed) / RANKS).backward()
        optimizer.step()
    return policy.state_dict()


def two_engines(stage: int, zero: dict[str, Any]) -> dict[str, Tensor]:
    """Three steps of a policy and its reference; every other reference runs in `inference()`."""
    policy = engine_at(net(0), stage, **zero)
    reference = engine_at(net(1), stage, trains=False, **zero)
    for step in range(3):
        policy.begin()
        x = rows(step, policy.topology.rank)
        with reference.inference() if step % 2 else torch.no_grad():
            fixed = reference.module(x)
        policy.backward(preference(policy.module(x), fixed))
        policy.update()
    assert all(
        param.requires_grad and param.grad is None for param in reference.module.parameters()
    )
    unchanged = reference.full_state_dict()
    for name, value in unchanged.items():
        assert torch.equal(value, net(1).state_dict()[name])
    with reference.gathered():
        assert torch.equal(reference.module.blocks[1].weight, net(1).blocks[1].weight)
    with torch.no_grad(), reference.evaluating():
        assert torch.equal(reference.module(x), net(1)(x))
    refused(reference)
    module = reference.module
    reference.destroy()
    module(x).sum().backward()
    assert module.blocks[0].weight.grad is not None
    found: dict[str, Tensor] = policy.full_state_dict()
    return found


def refused(reference: Any) -> None:
    """Training and saving raise errors, and so does a backward to parameters; inputs may have gradients."""
    module, x = reference.module, rows(9, 0).requires_grad_()
    calls = {
        "begin": (), "backward": (x.sum(),), "update": (), "save": ("nowhere",), "start_save": ("nowhere",),
        "step": ({"x": x},),
    }  # fmt: skip
    for name, args in calls.items():
        with pytest.raises(RuntimeError, match=r"only evaluates \(trains=False\)"):
            getattr(reference, name)(*args)
    with pytest.raises(RuntimeError, match=r"gradient of blocks\.3\.weight.*torch\.no_grad\(\)"):
        module(x).sum().backward()
    assert all(param.grad is None for param in module.parameters())
    module.requires_grad_(False)
    module(x).sum().backward()
    right, y = net(1), rows(9, 0).requires_grad_()
    right(y).sum().backward()
    assert torch.equal(x.grad, y.grad)
    module.requires_grad_(True)  # also parameters that are unfrozen later are refused
    with pytest.raises(RuntimeError, match="gradient of"):
        module(x).sum().backward()


PLACES: dict[str, tuple[int, dict[str, Any]]] = {
    **{f"ZeRO-{stage}": (stage, {}) for stage in range(4)},
    "on the host": (3, {"offload_optimizer": "cpu", "offload_params": "cpu"}),
}  # fmt: skip


def of_all_places(folder: str) -> dict[str, dict[str, Tensor]]:
    nvme = {"offload_optimizer": "nvme", "offload_params": "nvme", "nvme_path": folder}
    places = {**PLACES, "on a drive": (3, nvme)}
    found = {name: two_engines(*place) for name, place in places.items()}
    for stage in range(4):
        only_weights(stage, "bf16", torch.float32)
    only_weights(3, "fp16", torch.float16)
    only_weights(1, "fp32", torch.float32)
    loaded(folder)
    with pytest.raises(
        ValueError, match=r"has a different configuration .*trains=...\): 'True' and 'False'"
    ):
        engine_at(net(0), 1, trains=topology_of(1, 1).rank == 0)
    return found


def test_a_reference_beside_a_training_engine(tmp_path: Path) -> None:
    right = truth(3)
    for name, weights in run_ranks(RANKS, of_all_places, str(tmp_path))[0].items():
        for key, value in weights.items():
            torch.testing.assert_close(
                value, right[key], rtol=1e-9, atol=1e-9, msg=f"{name}: {key}"
            )


def only_weights(stage: int, dtype: str, given: torch.dtype) -> None:
    """A rank holds its slices of the weights in the compute dtype, and less than 1 KiB more."""
    module = net(0, given)
    with Live() as live:
        engine = engine_at(module, stage, dtype, trains=False)
        held = holdings(engine.layout, [*engine.optimizer.states, *engine.optimizer.frozen], False)
        width = {"bf16": 2, "fp16": 2, "fp32": 4}[dtype]
        weights = 4 * WIDTH * WIDTH * width // (RANKS if stage == 3 else 1)
        assert held == {"parameters": weights, "gradients": 0, "optimizer": 0, "offloaded": 0}
        assert weights <= live.bytes() < weights + 1024
        with torch.no_grad():
            out = module(rows(0, 0).to(engine.layout.policy.param_dtype))
        right = net(0, given).to(out.dtype)(rows(0, 0).to(out.dtype))
        assert torch.equal(out, right)


def loaded(folder: str) -> None:
    """`load` takes the weights of another run's checkpoint, and leaves torch's generators alone."""
    policy = engine_at(net(0), 2)
    x = rows(0, policy.topology.rank)
    policy.begin()
    policy.backward(policy.module(x).square().mean())
    policy.update()
    path, weights = policy.save(f"{folder}/saved"), policy.full_state_dict()
    reference = engine_at(net(1), 3, "bf16", trains=False)
    state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reference.load(path)
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in reference.full_state_dict().items():
        assert torch.equal(value, weights[name].bfloat16().float())


def test_a_model_of_layers_is_refused() -> None:
    config = layered.config_of(layered.Case())
    with pytest.raises(NotImplementedError, match="does not offer trains=False"):
        layered.engine_of(config, trains=False)


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = net(0)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.inner(x).square().mean()
        return loss


def test_the_loss_of_a_batch() -> None:
    module = WithLoss()
    right = module(rows(0, 0)).detach()
    engine = engine_at(module, 0, trains=False)
    torch.testing.assert_close(engine.evaluate({"x": rows(0, 0)}), right, rtol=1e-12, atol=0)
