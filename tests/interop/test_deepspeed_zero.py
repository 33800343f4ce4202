"""deepspeed.zero and deepspeed.comm on two ranks: gathered parameters, and values of the optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import threed
from tests.harness import run_ranks
from threed.interop.deepspeed import ownership
from threed.interop.deepspeed.api import marks, zero
from threed.interop.deepspeed.namespace import modules

LR, BETAS, EPS = 0.01, (0.9, 0.999), 1e-8
MARKS = {"ds_id", "ds_shape", "ds_numel", "ds_status", "ds_active_sub_modules"}


def module() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2, bias=False)).double()


def config(stage: int) -> dict[str, Any]:
    params = {"lr": LR, "betas": BETAS, "eps": EPS}
    return {
        "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": params},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 4},
    }  # fmt: skip


def batch(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(2, 5, generator=generator, dtype=torch.float64)


class Plain:
    """The same training in one process, with torch's AdamW."""

    def __init__(self) -> None:
        self.module = module()
        params = self.module.parameters()
        self.optimizer = torch.optim.AdamW(params, LR, BETAS, EPS, weight_decay=0)

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        losses = [self.module(batch(number, rank)).square().mean() for rank in range(2)]
        (sum(losses) / 2).backward()  # type: ignore[union-attr]
        self.optimizer.step()


def train(engine: Any, number: int) -> None:
    engine.backward(engine(batch(number, engine.global_rank)).square().mean())
    engine.step()


def assert_equal(got: Tensor | None, want: Tensor, what: str) -> None:
    assert got is not None
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9, msg=lambda text: f"{what}: {text}")


def check_stage(stage: int) -> None:
    deepspeed = modules()["deepspeed"]
    plain, trained = Plain(), module()
    engine, *_ = threed.initialize(model=trained, config=config(stage))
    check_marks(trained, stage)
    train(engine, 0)
    plain.step(0)
    check_values(trained, plain)
    check_edits(trained, plain, deepspeed)
    train(engine, 1)
    plain.step(1)
    check_values(trained, plain)
    set_values(trained, plain)
    train(engine, 2)
    plain.step(2)
    check_values(trained, plain)
    with pytest.raises(NotImplementedError, match="does not offer safe_get_full_grad"):
        deepspeed.utils.safe_get_full_grad(trained[0].weight)
    with pytest.raises(ValueError, match="no state 'max_exp_avg_sq', only exp_avg, exp_avg_sq"):
        zero.safe_get_full_optimizer_state(trained[0].weight, "max_exp_avg_sq")
    check_offload(engine)
    ownership.release(trained)
    with pytest.raises(NotImplementedError, match="does not offer GatheredParameters for a"):
        zero.GatheredParameters(trained[0].weight).__enter__()
    ownership.take(trained, engine)
    engine.destroy()
    assert not any(vars(param).keys() & {*MARKS, ownership.OWNER} for param in trained.parameters())
    with deepspeed.zero.GatheredParameters(trained[0].weight, modifier_rank=0):
        trained[0].weight.data.fill_(float(engine.global_rank))
    assert (trained[0].weight == 0).all()


def check_marks(trained: nn.Sequential, stage: int) -> None:
    for number, param in enumerate(trained.parameters()):
        marked: Any = param
        assert marks.is_zero_param(param) == (stage == 3)
        assert (vars(param).keys() & MARKS) == (MARKS if stage == 3 else set())
        if stage == 3:
            assert (marked.ds_shape, marked.ds_numel) == (param.shape, param.numel())
            sharded = number != 1  # the bias has 3 elements, and the threshold is 4
            want = (
                marks.ZeroParamStatus.NOT_AVAILABLE if sharded else marks.ZeroParamStatus.AVAILABLE
            )
            assert marked.ds_status is want
    ids = [vars(param).get("ds_id") for param in trained.parameters()]
    assert len(set(ids)) == (3 if stage == 3 else 1)


def check_values(trained: nn.Sequential, plain: Plain) -> None:
    for (name, param), other in zip(
        trained.named_parameters(), plain.module.parameters(), strict=True
    ):
        assert_equal(zero.safe_get_full_fp32_param(param), other.detach(), name)
        for key in ("exp_avg", "exp_avg_sq"):
            state = zero.safe_get_full_optimizer_state(param, key)
            assert_equal(state, plain.optimizer.state[other][key], f"{key} of {name}")


def check_edits(trained: nn.Sequential, plain: Plain, deepspeed: Any) -> None:
    """Rank 1 edits; nested blocks, repeated parameters, and parameters of no engine."""
    free, loose = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))
    weight: Any = trained[0].weight
    before = vars(weight).get("ds_status")
    given = [weight, None, weight, free]
    with deepspeed.zero.GatheredParameters(given, modifier_rank=1):
        with deepspeed.zero.GatheredParameters(trained[1].parameters()):
            assert trained[1].weight.sum() == plain.module[1].weight.sum()
        assert before is None or weight.ds_status is marks.ZeroParamStatus.AVAILABLE
        if deepspeed.comm.get_rank() == 1:
            with torch.no_grad():
                weight.mul_(2.0)
                free.fill_(7.0)
            loose.data.fill_(1.0)
    assert vars(weight).get("ds_status") is before
    assert free.tolist() == [7.0] * 3
    assert loose.tolist() == [float(deepspeed.comm.get_rank() == 1)] * 2
    plain.module[0].weight.data.mul_(2.0)
    with deepspeed.zero.GatheredParameters(trained, modifier_rank=0, enabled=False):
        pass
    with pytest.raises(ValueError, match="modifier_rank 2: ranks are 0 to 1"):
        deepspeed.zero.GatheredParameters(free, modifier_rank=2).__enter__()


def set_values(trained: nn.Sequential, plain: Plain) -> None:
    weight, other = trained[1].weight, plain.module[1].weight
    value = torch.arange(6, dtype=torch.float64).view(2, 3)
    zero.safe_set_full_fp32_param(weight, value)
    other.data.copy_(value)
    zero.safe_set_full_optimizer_state(weight, value / 10, "exp_avg")
    plain.optimizer.state[other]["exp_avg"].copy_(value / 10)
    with pytest.raises(ValueError, match=r"1.weight: values of shape \[3\]"):
        zero.safe_set_full_fp32_param(weight, value[0])
    check_values(trained, plain)


def check_init() -> None:
    """Rank 1 edits parameters of `zero.Init` before an engine exists."""
    deepspeed = modules()["deepspeed"]
    with deepspeed.zero.Init():
        built = module()
    with deepspeed.zero.GatheredParameters(built.parameters(), modifier_rank=1):
        if deepspeed.comm.get_rank() == 1:
            with torch.no_grad():
                built[0].weight.fill_(3.0)
    assert torch.equal(built[0].weight, torch.full((3, 5), 3.0, dtype=torch.float64))
    threed.initialize(model=built, config=config(3))
    weight = zero.safe_get_full_fp32_param(built[0].weight)
    assert_equal(weight, torch.full((3, 5), 3.0, dtype=torch.float64), "weight of zero.Init")


def check_offload(engine: Any) -> None:
    """trl removes DeepSpeed's hooks while it generates."""
    offload = engine.optimizer.parameter_offload
    names = [name for name, _ in offload.module.named_parameters(recurse=True)]
    assert names == [name for name, _ in engine.module.named_parameters()]
    assert [*offload.module.ds_external_parameters()] == []
    assert (offload.forward_hooks, offload.backward_hooks) == ([], [])
    offload._register_deepspeed_module(offload.module)


def check_comm() -> None:
    deepspeed = modules()["deepspeed"]
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    comm, groups = deepspeed.comm, deepspeed.utils.groups
    assert comm.is_initialized()
    assert comm.get_world_size() == 2
    assert comm.get_rank() == torch.distributed.get_rank() == groups._get_data_parallel_rank()
    assert comm.get_rank(comm.get_world_group()) == comm.get_rank()
    assert (groups._get_data_parallel_world_size(), groups._get_sequence_parallel_rank()) == (2, 0)
    values = torch.ones(2)
    comm.all_reduce(values, op=comm.ReduceOp.SUM)
    comm.barrier()
    assert values.tolist() == [2.0, 2.0]


def run() -> None:
    check_comm()
    check_init()
    for stage in (1, 3):
        check_stage(stage)


def test_zero_and_comm_on_two_ranks() -> None:
    run_ranks(2, run)


def test_a_parameter_of_no_engine() -> None:
    param = nn.Parameter(torch.ones(2))
    param.sum().backward()
    assert zero.safe_get_full_fp32_param(param) is None
    assert zero.safe_get_full_optimizer_state(param, "exp_avg") is None
    assert zero.safe_get_full_grad(param) is param.grad
    zero.safe_set_full_fp32_param(param, torch.zeros(2))
    assert param.tolist() == [1.0, 1.0]
    assert not marks.is_zero_param(param)
    assert param.detach().ds_status is marks.ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]
