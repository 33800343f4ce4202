"""csrc/cuda/router.cu and choices.cu against the plain operations of `layers.routing` in fp64."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from tests.cuda.cases import (
    assert_close,
    assert_close_in_bf16,
    assert_traffic,
    bf16,
    devices,
    in_every_order,
    normal,
)
from tests.cuda.emulator import COMPILER, Machine, emulated
from threed.distributed.sharding import attach
from threed.layers import LossFactors, MicroBatch, MixtureOfExperts, Routing, Slicing
from threed.layers import routing as plain
from threed.layers.routing import rule_of
from threed.ops import router
from threed.ops.router import Rule

pytestmark = [pytest.mark.skipif(COMPILER is None, reason="needs g++"), devices]
DEEPSEEK = Routing("sigmoid", scale=2.5, groups=4, groups_per_token=2, bias=True, epsilon=1e-20)
BEST = Routing(normalize=False, scale=16.0, groups=8, groups_per_token=3, group_score="best")
BOTH, NONE = LossFactors(0.3, 0.2), LossFactors()
# tokens, sequences, experts, choices; how experts are chosen; losses
CASES: dict[str, tuple[tuple[int, int, int, int], Routing, LossFactors]] = {
    "mixtral": ((9, 2, 8, 2), Routing(), NONE),
    "qwen3": ((7, 1, 40, 3), Routing(normalize=False), BOTH),
    "gpt-oss": ((5, 3, 32, 4), Routing(after_top_k=True), BOTH),
    "switch": ((1, 1, 1, 1), Routing(normalize=False), LossFactors(z=0.5)),
    "deepseek-v3": ((19, 2, 256, 8), DEEPSEEK, BOTH),
    "deepseek-v2": ((9, 1, 160, 6), BEST, LossFactors(aux=0.5)),
    "softmax with biases": ((9, 2, 72, 5), Routing(bias=True, epsilon=1e-3), BOTH),
    "sigmoid without a sum": ((9, 2, 20, 4), Routing("sigmoid", normalize=False), BOTH),
    "512 experts, 32 choices": ((17, 1, 512, 32), Routing("sigmoid", groups=32, groups_per_token=9), BOTH),
    "groups of one expert": ((9, 1, 32, 4), Routing(groups=32, groups_per_token=4), NONE),
}  # fmt: skip


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Any:
    sizes, how, factors = CASES[request.param]
    n, b, e, k = sizes
    logits = 2 * normal(n, b, e)
    logits[0, 0, e // 2 :] = 0.25  # ties
    return logits, 0.1 * normal(e, seed=1) if how.bias else None, k, how, factors


def truth(logits: Tensor, bias: Tensor | None, k: int, how: Routing) -> tuple[Tensor, Tensor]:
    """The choices and the scores by which experts are chosen."""
    scores = how.scores(logits) if how.needs_scores else logits
    return how.choose(scores, bias, k), scores


def weights_and_gradient(
    case: Any, experts: Tensor, chosen: Tensor, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, gradient of the logits, and sums of the losses, by the plain operations in fp64."""
    logits, _, _k, how, factors = case
    wide = logits.double().requires_grad_()
    given = wide.detach(), chosen.double(), torch.tensor(0.5, dtype=torch.float64)
    found, sums = plain.losses(factors, how, *given)
    weights = plain.gates(how, wide, how.scores(given[0]), experts, found)
    (gradient,) = torch.autograd.grad(weights, wide, dy.double())
    return weights.detach(), gradient, sums


def test_experts_are_chosen_and_weighed(case: Any) -> None:
    logits, bias, k, how, factors = case
    rule = rule_of(how, k, factors)
    assert rule is not None

    def work(machine: Machine) -> tuple[Tensor, ...]:
        out = router.route(logits, bias, None, any(factors), *rule)
        (ran,) = machine.launches
        share = k / logits.shape[2]  # the logits of choices are read again
        written = dict.fromkeys(("experts", "weights", "counts", "sums"), (0.0, 1.0))
        positions = logits.shape[0] * logits.shape[1]
        read = {"logits": (1 + share, 0.0), "bias": (float(positions), 0.0)}
        named = (written | read).items() if ran.counts else ()
        assert_traffic(ran, {name: times for name, times in named if name in ran.traffic})
        return out

    experts, weights, counts, sums = in_every_order(work)
    expected, _ = truth(logits, bias, k, how)
    assert torch.equal(experts, expected)
    one_hot = torch.zeros_like(logits).scatter_(-1, experts, 1.0)
    assert torch.equal(counts.sum(0), one_hot.sum(0).int())
    dy = bf16(*experts.shape, seed=3)
    scaled, gradient, losses = weights_and_gradient(case, experts, one_hot.sum(0), dy)
    assert_close_in_bf16(weights.flatten(0, 1), scaled.flatten(0, 1), 1e-5)
    with emulated():
        again = router.route(logits, bias, experts, False, *rule)
        assert torch.equal(again[1], weights)
        assert [t.numel() for t in again] == [0, weights.numel(), 0, 0]
    if any(factors):
        chosen = one_hot.sum(0) / 4 if factors.aux else None
        (found,) = in_every_order(lambda _: (router.losses(sums, chosen, 4.0),))
        assert_close(found, losses)

    def work_back(machine: Machine) -> tuple[Tensor, ...]:
        weight = torch.tensor(0.5, dtype=torch.float64)
        back = router.backward(
            dy, logits, experts, one_hot.sum(0), weight, rule.flags, rule.scale, rule.epsilon,
            factors.aux, 2 * factors.z,
        )  # fmt: skip
        return (back,)

    (dx,) = in_every_order(work_back)
    assert_close(dx, gradient, 3e-5)


def test_choices_are_sorted(case: Any) -> None:
    logits, bias, k, how, factors = case
    rule = rule_of(how, k, factors)
    assert rule is not None
    with emulated():
        experts, _, counts, _ = router.route(logits, bias, None, False, *rule)

    def work(machine: Machine) -> tuple[Tensor, ...]:
        found = router.sort(experts, counts)
        (ran,) = machine.launches
        if ran.counts:
            assert all(ran.traffic[name].times == (0, 1) for name in found._fields)
            assert ran.traffic["experts"].times == (1, 0)
        return tuple(found)

    found = router.Sorted(*in_every_order(work))
    e, flat = logits.shape[2], experts.flatten()
    order = flat.sort(stable=True).indices
    assert torch.equal(found.sources, order)
    assert torch.equal(
        found.places, torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    )
    assert torch.equal(found.tokens, order // k)
    assert torch.equal(found.firsts, torch.arange(0, len(order), k))
    loads = flat.bincount(minlength=e)
    assert torch.equal(found.loads, loads.int())
    assert torch.equal(found.bounds, torch.cat((loads.new_zeros(1), loads.cumsum(0))).int())
    assert torch.equal(found.excess, (loads * e - len(order)).float())
    assert torch.equal(found.chosen, torch.zeros_like(logits).scatter_(-1, experts, 1.0).sum(0))


ROUTINGS = {
    "deepseek-v3": (DEEPSEEK, 3, BOTH),
    "gpt-oss": (Routing(after_top_k=True), 2, LossFactors(aux=0.3)),
    "deepseek-v2": (replace(BEST, groups=4), 2, LossFactors(z=0.2)),
    "mixtral": (Routing(), 2, NONE),
}


def layer(name: str) -> MixtureOfExperts:
    """A layer of 16 experts with bf16 parameters on one process."""
    how, per_token, factors = ROUTINGS[name]
    module = MixtureOfExperts(
        "mlp", 32, 16, 16, per_token, Slicing(), routing=how, losses=factors, std=0.3, out_std=0.3
    )
    for seed, part in enumerate(module.modules()):
        for key, param in list(part._parameters.items()):
            if param is not None:
                values = 0.3 * normal(*param.shape, seed=seed + len(key))
                filled = nn.Parameter(values if key == "bias" else values.bfloat16())
                part._parameters[key] = attach(filled, param.spec)  # type: ignore[attr-defined]
    return module


def trained(name: str, training: bool, twice: bool) -> tuple[list[Tensor], Tensor | None]:
    """Output and gradients of a micro-batch, and the sums for metrics."""
    module, x = layer(name), bf16(9, 2, 32, seed=5).requires_grad_()
    memo: dict[str, Any] | None = {} if twice else None
    weight = torch.tensor(0.5, dtype=torch.float64)
    micro = MicroBatch(training=training, weight=weight, memo=memo)
    if twice:
        with torch.no_grad():
            module(x, micro)
    y = module(x, micro)
    y.backward(bf16(*y.shape, seed=6))
    found = [y.detach(), *(p.grad for p in (x, *module.parameters()) if p.grad is not None)]
    return found, module.take_sums()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("name", ROUTINGS)
def test_a_layer_trains_as_with_plain_operations(name: str, twice: bool, training: bool) -> None:
    with patch.object(router, "fits", return_value=False), emulated(torch_writes=True):
        expected, sums = trained(name, training, False)
    with emulated(torch_writes=True) as machine:
        found, own_sums = trained(name, training, twice)
    ran = Counter(one.name for one in machine.launches)
    assert ran["router"] == 1 + twice
    assert ran["sort_choices"] == ran["router_backward"] == 1
    for mine, theirs in zip(found, expected, strict=True):
        scale = theirs.abs().max().item()
        torch.testing.assert_close(mine, theirs, rtol=2**-7, atol=2**-7 * scale)
    if sums is None:
        assert own_sums is None
    else:
        torch.testing.assert_close(own_sums, sums, rtol=1e-5, atol=0)


def test_wrong_arguments_are_refused() -> None:
    logits, rule = normal(4, 2, 8), Rule(2, 1, 1, 0, 1.0, 0.0)
    with emulated(), pytest.raises(ValueError, match="router takes"):
        router.route(logits.double(), None, None, False, *rule)
    with emulated(), pytest.raises(ValueError, match="router takes"):
        router.route(logits, logits[0, 0, :4], None, False, *rule)
    with emulated(), pytest.raises(ValueError, match="sort_choices takes"):
        router.sort(torch.zeros(4, 2, 2), torch.zeros(1, 2, 8, dtype=torch.int32))
    back = bf16(4, 2, 2), logits, torch.zeros(4, 2, 2, dtype=torch.int64), None, None
    with emulated(), pytest.raises(ValueError, match="router_backward takes"):
        router.backward(*back, router.AUX, 1.0, 0.0, 0.1, 0.0)
    x = bf16(4, 2, 16)
    assert not router.fits(x.float(), logits, None, rule)
    assert not router.fits(x, normal(4, 2, 520), None, rule)
    assert not router.fits(x, logits, None, rule._replace(per_token=33))
