"""The layer of experts: plain PyTorch as reference, routing, losses, planted faults, bytes, memory, refusals."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.configs import EXPERT_MODELS, Case, config_of, engine_of, topology_of, trained
from tests.expert_models import Softmax
from tests.harness import run_ranks
from tests.test_equivalence import run_cases, write_truths
from threed import models
from threed.config import Config
from threed.config.architectures import REGISTERED
from threed.config.checks import find_problems
from threed.distributed import collectives
from threed.distributed.sharding import attach, initial
from threed.distributed.topology import Topology
from threed.engine import Engine
from threed.layers import (
    LossFactors,
    MicroBatch,
    MixtureOfExperts,
    Routing,
    Slicing,
    clamped_swiglu,
    routing,
)
from threed.layers import experts as experts_module
from threed.ops import grouped
from threed.ops.balance import Balance
from threed.ops.update import StepScalars
from threed.zero import layout

HIDDEN, FFN, EXPERTS = 8, 6, 4
ROUTINGS = {
    "mixtral": (Routing(), 2),
    "qwen3": (Routing(normalize=False), 3),
    "gpt-oss": (Routing(after_top_k=True), 2),
    "switch": (Routing(normalize=False), 1),
    "deepseek-v3": (
        Routing("sigmoid", scale=2.5, groups=2, groups_per_token=1, bias=True, epsilon=1e-20), 2,
    ),
    "deepseek-v2": (
        Routing(normalize=False, scale=16.0, groups=2, groups_per_token=1, group_score="best"), 2,
    ),
}  # fmt: skip


def mixture(how: Routing, per_token: int, shared: int = 0, **more: Any) -> MixtureOfExperts:
    """Returns a layer with values on one process."""
    module = MixtureOfExperts(
        "mlp", HIDDEN, FFN, EXPERTS, per_token, Slicing(), routing=how, shared_ffn=shared, std=0.5,
        out_std=0.5, **more,
    )  # fmt: skip
    for part in module.modules():
        for name, param in list(part._parameters.items()):
            if param is not None:
                values = [initial(piece, 0).flatten() for piece in param.spec.pieces]
                filled = torch.cat(values).view(param.shape).double()
                part._parameters[name] = attach(nn.Parameter(filled), param.spec)
    return module


def plain(module: MixtureOfExperts, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The sum over the chosen experts, token by token."""
    out = []
    for token, experts, factors in zip(
        x.flatten(0, 1), chosen.flatten(0, 1), weights.flatten(0, 1), strict=True
    ):
        total = torch.zeros_like(token)
        for expert, factor in zip(experts.tolist(), factors, strict=True):
            gate_up, bias = module.gate_up[expert] @ token, module.gate_up_bias
            gate, up = (gate_up if bias is None else gate_up + bias[expert]).chunk(2)
            if module.activation is clamped_swiglu:
                gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0) + 1
                inner = gate * torch.sigmoid(1.702 * gate) * up
            else:
                inner = F.silu(gate) * up
            output, bias = module.down[expert] @ inner, module.down_bias
            total = total + factor * (output if bias is None else output + bias[expert])
        out.append(total)
    return torch.stack(out).view_as(x)


def plain_weights(how: Routing, count: int, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The experts of each token and their weights, written as the papers have it."""
    scores = logits.softmax(-1) if how.score == "softmax" else logits.sigmoid()
    allowed = torch.ones_like(scores, dtype=torch.bool)
    if how.groups > 1:
        size = EXPERTS // how.groups
        for index in itertools.product(*(range(n) for n in logits.shape[:-1])):
            best = [
                sum(
                    sorted(scores[index][g * size : g * size + size].tolist())[
                        -(2 if how.bias else 1) :
                    ]
                )
                for g in range(how.groups)
            ]
            for g in range(how.groups):
                allowed[index][g * size : g * size + size] = best[g] == max(best)
    chosen = scores.masked_fill(~allowed, -torch.inf).topk(count, -1).indices
    if how.after_top_k:
        return chosen, logits.gather(-1, chosen).softmax(-1) * how.scale
    weights = scores.gather(-1, chosen)
    return chosen, (
        weights / weights.sum(-1, keepdim=True) if how.normalize else weights
    ) * how.scale


@pytest.mark.parametrize(
    "kind", [{}, {"biases": True}, {"biases": True, "activation": clamped_swiglu}]
)
@pytest.mark.parametrize("shared", [0, 5])
@pytest.mark.parametrize("name", ROUTINGS)
def test_output_and_gradients_are_those_of_a_loop_over_tokens(
    name: str, shared: int, kind: dict[str, Any]
) -> None:
    how, count = ROUTINGS[name]
    # Gradients are up to a few thousand: in 1 % of other draws, one rounding exceeds 1e-12.
    torch.manual_seed(0)
    module = mixture(how, count, shared, **kind)
    x = torch.randn(5, 3, HIDDEN, dtype=torch.float64, requires_grad=True)
    params = [p for name, p in module.named_parameters() if name != "bias"]
    with torch.no_grad():
        for param in params:
            if not param.any():
                param.normal_(std=3.0)  # a bias: some sums are beyond the limit of the activation
    micro = MicroBatch(training=False)
    chosen, weights = plain_weights(
        how, count, F.linear(x, module.router.weight, module.router.bias)
    )
    want = plain(module, x, chosen, weights)
    want = want if module.shared is None else want + module.shared(x)
    got, dy = module(x, micro), torch.randn_like(want)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    pairs = zip(
        torch.autograd.grad(got, [x, *params], dy),
        torch.autograd.grad(want, [x, *params], dy),
        strict=True,
    )
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_ties_go_to_the_expert_with_the_lower_index() -> None:
    scores = torch.tensor([[0.2, 0.5, 0.5, 0.2, 0.5]])
    assert Routing().choose(scores, None, 3).tolist() == [[1, 2, 4]]
    bias = torch.tensor([0.3, 0.0, 0.0, 0.3, 0.0])
    assert Routing().choose(scores, bias, 2).tolist() == [[0, 1]]


def test_a_bias_chooses_but_does_not_weigh() -> None:
    how = replace(ROUTINGS["deepseek-v3"][0], groups=1)
    logits = torch.randn(7, EXPERTS, dtype=torch.float64)
    scores = how.scores(logits)
    chosen = how.choose(scores, torch.tensor([0.0, 0.0, 9.0, 0.0]), 1)
    assert (chosen == 2).all()
    weights = routing.gates(how, logits, scores, chosen, routing.Losses())
    torch.testing.assert_close(weights, torch.full((7, 1), 2.5).double())


@dataclass(frozen=True)
class Listed(Routing):
    """Chooses the experts of a list, one per token."""

    experts: tuple[int, ...] = ()

    def choose(self, scores: Tensor, bias: Tensor | None, count: int) -> Tensor:
        return torch.tensor(self.experts).view(*scores.shape[:-1], 1)


def test_biases_of_balanced_experts_have_no_gradient() -> None:
    """8 tokens for 3 experts in each of 3 micro-batches; their sum is balanced, no part of it is."""
    module = MixtureOfExperts("mlp", 8, 6, 3, 1, Slicing(), routing=Routing(bias=True))
    module.to_empty(device="cpu")
    for counts in ((3, 3, 2), (3, 2, 3), (2, 3, 3)):
        experts = tuple(e for e, count in enumerate(counts) for _ in range(count))
        module.routing = Listed(bias=True, experts=experts)
        module(torch.ones(8, 1, 8), MicroBatch()).sum().backward()
    assert module.bias is not None
    assert module.bias.grad is not None
    assert module.bias.grad.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_groups_skip_empty_groups(dtype: torch.dtype) -> None:
    sizes = [3, 0, 2, 0]
    x, w = torch.randn(5, HIDDEN, dtype=dtype), torch.randn(4, FFN, HIDDEN, dtype=dtype)
    parts = zip(x.split(sizes), w, strict=True)
    want = torch.cat([rows @ matrix.t() for rows, matrix in parts])
    groups = grouped.Groups(torch.tensor(sizes).cumsum(0), sizes)
    assert torch.equal(grouped.product(x, w, groups), want)
    out, dy = torch.full((4, FFN, HIDDEN), 7.0), torch.randn(5, FFN, dtype=dtype)
    grouped.add_products_(out, dy, x, groups, fresh=True)
    assert not out[[1, 3]].any()
    assert out[[0, 2]].all()
    once = out.clone()
    grouped.add_products_(out, dy, x, groups, fresh=False)
    torch.testing.assert_close(out, 2 * once)


def test_the_rule_of_biases_is_a_step_against_the_sign_of_the_load() -> None:
    p, g = torch.zeros(3), torch.tensor([5.0, -2.0, 0.0])
    for skip, want in ((1.0, [0.0, 0.0, 0.0]), (0.0, [-0.25, 0.25, 0.0])):
        now = scalars(skip)
        Balance(0.25).update(p, g, (), now, 0.1)
        assert p.tolist() == want


def scalars(skip: float) -> StepScalars:
    return StepScalars(*map(torch.tensor, (1e-3, 1.0, 0.5, skip)))


# ---------------------------------------------------------------------------------------- losses of routers


@pytest.mark.parametrize("factors", [(0.0, 0.0), (0.3, 0.0), (0.0, 0.2), (0.3, 0.2)])
@pytest.mark.parametrize("name", ROUTINGS)
def test_gradients_of_the_gates_are_those_of_autograd(
    name: str, factors: tuple[float, float]
) -> None:
    """The losses are also written out here."""
    how, count = ROUTINGS[name]
    logits = torch.randn(5, 3, EXPERTS, dtype=torch.float64, requires_grad=True)
    chosen, want = plain_weights(how, count, logits)
    p = logits.softmax(-1) if how.score == "softmax" else logits.sigmoid()
    shares, weight = torch.rand(3, EXPERTS).double(), torch.tensor(0.7).double()
    aux = (p / p.sum(-1, keepdim=True) * shares).sum()
    z = logits.logsumexp(-1).square().sum()
    loss = (factors[0] * aux + factors[1] * z) * weight
    given = LossFactors(*factors), how, logits.detach(), shares, weight
    found, sums = routing.losses(*given)
    scores = how.scores(logits.detach())
    got = routing.gates(how, logits, scores, chosen, found)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    on = torch.tensor(factors).bool()
    torch.testing.assert_close(sums, torch.stack((aux, z)).detach() * on, rtol=1e-12, atol=0)
    dy = torch.randn_like(want)
    (mine,) = torch.autograd.grad(got, logits, dy)
    (theirs,) = torch.autograd.grad((want * dy).sum() + loss, logits)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def weights_after_a_step(case: Case, aux: float) -> dict[str, Tensor]:
    """The weights after a step of plain SGD with a rate of 1, on rank 0: start minus gradient."""
    config = config_of(case)
    groups = {
        "optim": config.optim.model_copy(
            update={"name": "sgd", "momentum": 0.0, "lr": 1.0, "warmup": 0, "schedule": "constant", "weight_decay": 0.0}
        ),
        "train": config.train.model_copy(update={"grad_clip": 0.0}),
        "experts": config.experts.model_copy(update={"aux_loss": aux}),
    }  # fmt: skip
    with (
        patch("tests.configs.config_of", lambda case: config.model_copy(update=groups)),
        patch("tests.configs.STEPS", 1),
    ):
        engine, _ = trained(case)
    return engine.full_state_dict()


def gradients_of_the_auxiliary_loss(cases: list[Case]) -> list[dict[str, Tensor]]:
    """Returns for each case the difference that the loss makes in a step, on rank 0."""
    found = []
    for case in cases:
        on, off = (weights_after_a_step(case, aux) for aux in (0.02, 0.0))
        found.append({name: on[name] - off[name] for name in on})
    return found


PLACES = [
    Case(model="Softmax", layers=2, microbatches=8, zero=0),
    Case(model="Softmax", layers=2, microbatches=1, zero=0, dp=2, ep=2),
    Case(model="Softmax", layers=2, microbatches=2, zero=0, cp=2, ep=2),
    Case(model="Softmax", layers=2, microbatches=2, zero=0, cp=2, cp_heads=2),
    Case(model="Softmax", layers=2, microbatches=2, zero=0, tp=2, ep=2),
    Case(model="Softmax", layers=2, microbatches=2, zero=0, tp=2, sequence=True),
    Case(model="Softmax", layers=2, microbatches=3, zero=1, pp=2),
]


def test_the_gradient_of_the_auxiliary_loss_is_the_same_everywhere() -> None:
    found = dict[Case, dict[str, Tensor]]()
    cases = dict.fromkeys(place for case in PLACES for place in (case.truth, case))
    for world in (1, 2):
        places = [place for place in cases if place.world == world]
        ranks = run_ranks(world, gradients_of_the_auxiliary_loss, places)
        found |= zip(places, ranks[0], strict=True)
    for case in PLACES:
        for name, truth in found[case.truth].items():
            torch.testing.assert_close(found[case][name], truth, rtol=0, atol=1e-12)
        assert found[case]["blocks.0.mlp.router.weight"].abs().max() > 1e-5


# ------------------------------------------------------------------------------------------ planted faults


def patch_method(owner: Any, name: str, make: Callable[[Any], Any]) -> AbstractContextManager[Any]:
    return patch.object(owner, name, make(getattr(owner, name)))


def gradients_ep_times_too_large() -> AbstractContextManager[Any]:
    def make(real: Any) -> Any:
        return lambda out, dy, *rest, **more: real(out, dy * 2, *rest, **more)

    return patch_method(grouped, "add_products_", make)


def gradients_of_biases_ep_times_too_large() -> AbstractContextManager[Any]:
    return patch_method(grouped, "sums", lambda real: lambda x, groups: 2 * real(x, groups))


def biases_on_wrong_rows() -> AbstractContextManager[Any]:
    """The first row of an expert gets the bias of another."""

    def make(real: Any) -> Any:
        return lambda groups, rows: real(groups, rows).roll(1)

    return patch_method(grouped, "group_of_rows", make)


def norm_without_experts() -> AbstractContextManager[Any]:
    real = layout.Group.in_norm.fget
    return patch.object(
        layout.Group, "in_norm", property(lambda self: real(self) and self.key.over is None)
    )


def norm_counts_experts_twice() -> AbstractContextManager[Any]:
    real = layout.Group.in_norm.fget
    return patch.object(
        layout.Group, "in_norm", property(lambda self: real(self) or self.key.over is not None)
    )


def router_not_summed_over_tensor_ranks() -> AbstractContextManager[Any]:
    def make(real: Any) -> Any:
        def shared(self: Slicing, *pieces: Any, **more: Any) -> Any:
            spec = real(self, *pieces, **more)
            return replace(spec, partial=None) if "router" in spec.name else spec

        return shared

    return patch_method(Slicing, "shared", make)


def shares_of_local_counts() -> AbstractContextManager[Any]:
    return patch.object(experts_module.collectives, "all_reduce", lambda tensor, axis: tensor)


def recomputation_chooses_again_from_other_scores() -> AbstractContextManager[Any]:
    """The second forward draws its own choice, by scores in which ties may be broken otherwise."""

    choose = Routing.choose

    def make(real: Any) -> Any:
        def choices(self: Any, micro: MicroBatch, new: Any) -> Any:
            if micro.memo is None or self.name not in micro.memo:
                return real(self, micro, new)
            with patch.object(Routing, "choose", lambda how, s, *rest: choose(how, -s, *rest)):
                return real(self, replace(micro, memo=None), new)

        return choices

    return patch_method(MixtureOfExperts, "_choices", make)


def loads_counted_twice_under_recomputation() -> AbstractContextManager[Any]:
    def make(real: Any) -> Any:
        def choices(self: Any, micro: MicroBatch, new: Any) -> Any:
            found = real(self, micro, new)
            twice = micro.memo is not None
            return replace(found, counts=2 * found.counts.roll(1)) if twice else found

        return choices

    return patch_method(MixtureOfExperts, "_choices", make)


def ties_in_another_order() -> AbstractContextManager[Any]:
    def best(scores: Tensor, count: int) -> Tensor:
        return (
            scores.shape[-1]
            - 1
            - scores.flip(-1).sort(dim=-1, descending=True, stable=True).indices[..., :count]
        )

    return patch.object(routing, "_best", best)


EP = Case(model="Softmax", dp=2, ep=2, zero=1, layers=2)


def a_row_behind_the_last_offset() -> AbstractContextManager[Any]:
    """The last row belongs to no group, so its product is what its memory contained."""

    def make(real: Any) -> Any:
        def product(*given: Any) -> Tensor:
            out: Tensor = real(*given)
            out[-1:] = 7.0
            return out

        return product

    return patch_method(grouped, "product", make)


FAULTS: dict[Callable[[], AbstractContextManager[Any]], Case] = {
    a_row_behind_the_last_offset: EP,
    gradients_ep_times_too_large: EP,
    gradients_of_biases_ep_times_too_large: replace(EP, model="Chosen"),
    biases_on_wrong_rows: replace(EP, model="Chosen", dp=1, tp=2, zero=3),
    norm_without_experts: EP,
    norm_counts_experts_twice: replace(EP, dp=4, zero=0),
    router_not_summed_over_tensor_ranks: replace(EP, dp=1, tp=2),
    shares_of_local_counts: replace(EP, dp=1, cp=2),
    recomputation_chooses_again_from_other_scores: replace(EP, recompute="full"),
    loads_counted_twice_under_recomputation: replace(EP, model="Biased", recompute="full"),
}


def findings(name: str, folder: str) -> list[str]:
    fault, case = next((f, case) for f, case in FAULTS.items() if f.__name__ == name)
    with fault():
        return run_cases([case], folder, trained)


@pytest.fixture(scope="module")
def truths(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder with the results of one process, which those of the cases without a fault equal."""
    folder = str(tmp_path_factory.mktemp("truths"))
    cases = list(dict.fromkeys(FAULTS.values()))
    run_ranks(1, write_truths, list(dict.fromkeys(case.truth for case in cases)), folder)
    for world in {case.world for case in cases}:
        mine = [case for case in cases if case.world == world]
        assert not any(run_ranks(world, run_cases, mine, folder, trained))
    return folder


@pytest.mark.seldom(
    "a_row_behind*",
    "gradients_of_biases*",
    "norm_without_experts",
    "router_not_summed*",
    "loads_counted_twice*",
)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found(fault: Callable[[], Any], truths: str) -> None:
    assert any(run_ranks(FAULTS[fault].world, findings, fault.__name__, truths))


def test_another_order_of_ties_is_found() -> None:
    with ties_in_another_order(), pytest.raises(AssertionError):
        test_ties_go_to_the_expert_with_the_lower_index()


# ------------------------------------------------------------------------------------ bytes, memory, precision


@contextmanager
def counted_rows(found: list[int]) -> Iterator[None]:
    """Context in which the bytes that experts' exchanges should send are added up."""
    real = collectives.start_exchange

    def exchange(x: Tensor, axis: Any, sends: Any, receives: Any, *out: Any) -> Any:
        if axis.label == "ep":
            others = sum(n for i, n in enumerate(sends) if i != axis.index)
            found.append(others * x.shape[1:].numel() * x.element_size())
        return real(x, axis, sends, receives, *out)

    with patch.object(collectives, "start_exchange", exchange):
        yield


def traffic(case: Case) -> tuple[int, int, int]:
    found: list[int] = []
    with counted_rows(found):
        engine, _ = trained(case)
    return engine.topology.traffic["ep"], sum(found), len(found)


@pytest.mark.parametrize(
    "case", [replace(EP, dp=4, ep=4), replace(EP, dp=2, tp=2, recompute="full")]
)
def test_bytes_sent_are_those_of_the_routing(case: Case) -> None:
    for sent, routed, calls in run_ranks(case.world, traffic, case):
        assert sent == routed > 0
        again = 2 if case.recompute == "full" else 0
        # per step, micro-batch and layer: counts, two exchanges forward, two backward, two again
        assert calls == 2 * case.microbatches * case.layers * (5 + again)


def numbers_of_experts(case: Case) -> tuple[int, int]:
    """The numbers of experts' weights, moments included, that this rank has, and that the model has."""
    engine = engine_of(config_of(case))
    states = sum(
        run.last - run.first
        for state in engine.optimizer.states
        for run in state.bucket.runs()
        if ".experts." in run.piece.name
    )
    per_layer = 3 * 12 * 32 * 8
    return states, per_layer * case.layers


@pytest.mark.parametrize(
    "sizes", [{"dp": 2, "tp": 2, "ep": 1}, {"dp": 4, "ep": 2}, {"dp": 4, "ep": 4}]
)
def test_states_of_experts_are_divided_over_all_ranks(sizes: dict[str, int]) -> None:
    for own, full in run_ranks(4, numbers_of_experts, replace(EP, **sizes)):
        assert own == pytest.approx(full / 4, rel=0.03)


def biases(case: Case) -> tuple[Tensor, torch.dtype]:
    engine, _ = trained(case)
    (bias,) = (
        p
        for layer in engine.blueprint.layers
        for n, p in layer.named_parameters()
        if n.endswith("mlp.bias")
    )
    return bias.detach().clone(), bias.dtype


def test_frozen_biases_stay_in_fp32() -> None:
    """Otherwise a frozen layer would choose other experts than in training."""
    config = config_of(Case(model="Biased", layers=2, dtype="bf16", zero=0))
    model = models.build(config.model, Slicing())
    layers = model.layers()
    layers[2].requires_grad_(False)
    with patch.object(type(model), "layers", lambda self: layers):
        Engine(model, Topology(), config)
    dtypes = {name: param.dtype for name, param in layers[2].named_parameters()}
    assert dtypes.pop("mlp.bias") == torch.float32
    assert set(dtypes.values()) == {torch.bfloat16}


def in_bf16() -> AbstractContextManager[Any]:
    return patch.object(layout.Policy, "dtype", lambda self, options: self.param_dtype)


def off_grid(bias: Tensor) -> float:
    """The largest distance of a bias from a multiple of the rate, in steps."""
    steps = bias.double() / 1e-3
    return float((steps - steps.round()).abs().max())


def test_biases_stay_in_fp32() -> None:
    case = Case(model="Biased", layers=2, dtype="bf16", zero=0)
    bias, dtype = biases(case)
    assert dtype == torch.float32
    assert bias.any()
    assert off_grid(bias) < 1e-4
    with in_bf16():  # a planted fault
        bias, dtype = biases(case)
    assert dtype == torch.bfloat16
    assert off_grid(bias) > 1e-3


# ---------------------------------------------------------------------------------------------- refusals


def test_what_cannot_be_divided_is_refused_with_a_fix() -> None:
    slicing = Slicing()
    for changes, message in (
        ({"per_token": 5}, "5 experts per token, but only 4"),
        ({"routing": Routing(groups=3)}, "cannot be divided into 3 groups"),
        ({"routing": Routing(groups=2), "per_token": 3}, "fewer than 3 experts"),
    ):
        given = {"experts": 4, "per_token": 2, "routing": Routing(), **changes}
        with pytest.raises(ValueError, match=message):
            MixtureOfExperts("mlp", 8, 6, slicing=slicing, **given)


def test_sizes_of_expert_parallelism_are_checked() -> None:
    config = Config.model_validate({"parallel": {"ep": 3, "tp": 2}})
    (problem,) = find_problems(config, 4)
    assert "--parallel.ep 3 does not divide" in problem
    assert "use 1, 2 or 4" in problem
    config = Config.model_validate(
        {"parallel": {"tp": 2, "sequence": False}, "model": {"arch": "mixtral", "seq": 31}}
    )
    (problem,) = find_problems(config, 2)
    assert "--model.seq 31 with experts is not divisible by --parallel.tp 2" in problem
    assert "use 30 or 32" in problem


def no_experts() -> None:
    case = Case(dp=2, ep=2)
    with pytest.raises(ValueError, match=r"this model has no experts; use --parallel\.ep 1"):
        engine_of(config_of(case))


def test_a_model_without_experts_is_refused() -> None:
    run_ranks(2, no_experts)


def other_slicing() -> None:
    config = config_of(Case(model="Softmax", dp=2, ep=2, layers=2))
    model = Softmax(config.model, Slicing())
    with pytest.raises(ValueError, match=r"Slicing has 1 expert rank, parallel\.ep is 2: build"):
        Engine(model, topology_of(1, 1, 1), config)


def wrapped() -> None:
    config = Config.model_validate({"parallel": {"ep": 2}})
    with pytest.raises(ValueError, match=r"a wrapped module has no expert ranks; use --parallel"):
        Engine(torch.nn.Linear(2, 2), topology_of(1, 1, 1), config)


def test_expert_ranks_that_the_model_does_not_have_are_refused() -> None:
    run_ranks(2, other_slicing)
    run_ranks(2, wrapped)


def odd() -> None:
    case = Case(model="Softmax", tp=2, layers=2)
    engine = engine_of(config_of(case))
    with pytest.raises(ValueError, match="cannot be divided over tp 2"):
        engine.step(
            {
                "tokens": torch.zeros(8, 15, dtype=torch.int64),
                "labels": torch.zeros(8, 15, dtype=torch.int64),
            }
        )


def test_a_length_that_tensor_ranks_cannot_divide_is_refused() -> None:
    run_ranks(2, odd)


def test_all_models_are_those_of_the_covering_set() -> None:
    families = {name for name, record in REGISTERED.items() if "experts" in record.takes}
    assert set(EXPERT_MODELS) == {"Softmax", "Biased", "Chosen", "Single", "Lopsided", *families}
