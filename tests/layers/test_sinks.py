"""Attention sinks in layers: the attention of gpt-oss in transformers, training in every topology, planted faults.

fp64 to 1e-9: the order of sums is all that differs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests import configs, peaks, test_context_parallel, test_equivalence
from tests.configs import RECOMPUTE, trained
from tests.covering import Space, Values
from tests.engine import test_documents
from tests.harness import run_ranks
from tests.pipeline.test_compile import compiled, steps
from threed import layers
from threed.distributed.sharding import Init, attach, spec_of
from threed.engine import Engine, StepMetrics
from threed.layers import Causal, Slicing
from threed.layers.context import Context
from threed.models import decoder
from threed.ops import attention
from threed.planner.forecast import Forecast
from threed.testing import results_of

patch = mock.patch.object

# --------------------------------------------------------------------------------- transformers

THETA, WINDOW, LENGTH = 1e4, 5, 24


def of_transformers(kind: str) -> tuple[Any, Callable[[Tensor], Tensor]]:
    """Returns the attention with random weights, and the function that calls it."""
    # imported here, because ranks import this file
    from transformers import GptOssConfig, masking_utils
    from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss

    config = GptOssConfig(
        num_hidden_layers=1, hidden_size=48, num_attention_heads=6, num_key_value_heads=2, head_dim=10,
        sliding_window=WINDOW, layer_types=[kind], attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
    )  # fmt: skip
    theirs = gpt_oss.GptOssAttention(config, 0).double()
    draw = torch.Generator().manual_seed(0)
    for param in theirs.parameters():
        torch.nn.init.normal_(param, std=0.3, generator=draw)
    torch.nn.init.normal_(theirs.sinks, generator=draw)
    make = (
        masking_utils.create_sliding_window_causal_mask
        if kind == "sliding_attention"
        else masking_utils.create_causal_mask
    )

    def attend(x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1]).expand(2, -1)
        angles = gpt_oss.GptOssRotaryEmbedding(config)(x, positions)
        mask = make(config, x, None, None, positions)
        y: Tensor = theirs(x, position_embeddings=angles, attention_mask=mask)[0]
        return y

    return theirs, attend


def of_threed(theirs: Any, window: int) -> layers.Attention:
    """Returns attention with the same weights."""
    ours = layers.Attention(
        "attention", 48, 6, Slicing(), kv_heads=2, head_dim=10, rotary=THETA, sinks=True, core=Causal(window)
    ).to_empty(device="cpu").double()  # fmt: skip
    projections = [theirs.q_proj, theirs.k_proj, theirs.v_proj]
    given = {
        "qkv.weight": torch.cat([part.weight for part in projections]),
        "qkv.bias": torch.cat([part.bias for part in projections]),
        "out.weight": theirs.o_proj.weight,
        "out.bias": theirs.o_proj.bias,
        "sinks": theirs.sinks,
    }
    ours.load_state_dict(given)
    return ours


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_attention_with_sinks_is_that_of_gpt_oss(kind: str) -> None:
    """Both compute in fp64, but for the angles of rotary positions, which both compute in fp32."""
    theirs, attend = of_transformers(kind)
    ours = of_threed(theirs, WINDOW if kind == "sliding_attention" else 0)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(2, LENGTH, 48, dtype=torch.float64, generator=draw).requires_grad_()
    dy = torch.randn(2, LENGTH, 48, dtype=torch.float64, generator=draw)
    want, got = attend(x), ours(x.transpose(0, 1)).transpose(0, 1)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-9)
    right = torch.autograd.grad(want, (x, theirs.sinks, theirs.o_proj.weight), dy)
    found = torch.autograd.grad(got, (x, ours.get_parameter("sinks"), ours.out.weight), dy)
    for mine, true in zip(found, right, strict=True):
        torch.testing.assert_close(mine, true, rtol=0, atol=1e-9)


# ------------------------------------------------------------------------------------- training

Build = Callable[..., layers.Attention]


def with_sinks(*args: Any, **more: Any) -> layers.Attention:
    """Attention with sinks that begin with random numbers: equal ones hide an exchange of heads."""
    made = layers.Attention(*args, **more | {"sinks": True})
    assert made.sinks is not None
    spec = spec_of(made.sinks)
    attach(made.sinks, replace(spec, pieces=(replace(spec.pieces[0], init=Init(std=1.0)),)))
    return made


def sinking(build: Build = with_sinks) -> AbstractContextManager[Any]:
    """Context manager: blocks of decoders have sinks."""
    return patch(decoder, "Attention", build)


@dataclass(frozen=True)
class Case(configs.Case):
    """A case whose blocks have sinks. documents: whether the rows of a batch are packed."""

    documents: bool = False


real_batch = configs.batch


def packed_batch(step: int, rows: int) -> dict[str, Tensor]:
    return {**real_batch(step, rows), "documents": test_documents.documents(step, rows)}


def trained_with_sinks(case: Case) -> tuple[Engine, list[StepMetrics]]:
    with sinking(), patch(configs, "batch", packed_batch if case.documents else real_batch):
        return trained(case)


SETTINGS: dict[str, list[object]] = {
    name: options[:1] for name, options in test_context_parallel.SETTINGS.items()
} | {
    "cp": [1, 2],
    "cp_heads": [1, 2],
    "pp": [1, 2],
    "dp": [1, 2],
    "tp": [1, 2],
    "model": ["llama", "qwen-tied", "gemma2", "mistral"],
    "sequence": [True, False],
    "zero": [0, 1, 2, 3],
    "schedule": ["1f1b", "zb-v"],
    "microbatches": [1, 3],
    "recompute": ["none", "full", "selective", *(["sliced"] if "sliced" in RECOMPUTE else [])],
    "dtype": ["fp64"],
    "documents": [False, True],
}


def make(values: Values) -> Case | None:
    """A case of the tests of context parallelism on at most four ranks."""
    v = dict(values)
    documents = bool(v.pop("documents"))
    v["cp_heads"] = min(int(str(v["cp_heads"])), int(str(v["cp"])))
    case = test_context_parallel.make(v)
    if case is None or case.world > 4:
        return None
    return Case(**vars(case), documents=documents)


SPACE = Space(
    SETTINGS,
    make,
    cost=test_context_parallel.cost,
    shape=lambda case: (case.cp, case.cp_heads, case.tp, case.pp > 1),
)


# Ranks of tensors and stages occur, but not each together with each kind of context ranks.
EVERYDAY = replace(SPACE, shape=lambda case: (case.cp, case.cp_heads))
CHEAPEST = 8  # the cheapest of the first seeds


def write_truths(cases: list[Case], folder: str) -> None:
    """Writes the results of one process."""
    for case in cases:
        results = results_of(*trained_with_sinks(case))
        torch.save(vars(results), Path(folder, test_equivalence.name_of(case)))


def run_all(cases: list[Case], folder: Path) -> None:
    truths = list(dict.fromkeys(case.truth for case in cases))
    run_ranks(1, write_truths, truths, str(folder), timeout=1200)
    wrong = list[str]()
    for shape in dict.fromkeys((case.pp, case.dp, case.cp, case.tp) for case in cases):
        mine = [case for case in cases if (case.pp, case.dp, case.cp, case.tp) == shape]
        arguments = mine, str(folder), trained_with_sinks
        for found in run_ranks(mine[0].world, test_equivalence.run_cases, *arguments, timeout=1200):
            wrong += found
    assert not wrong, "\n".join(wrong)


def test_every_setting_equals_one_process(tmp_path: Path) -> None:
    run_all(EVERYDAY.touching(CHEAPEST), tmp_path)


@pytest.mark.grid
@pytest.mark.timeout(1800)
def test_every_pair_of_settings_equals_one_process(tmp_path: Path) -> None:
    run_all(SPACE.covering(0), tmp_path)


def compiled_layers_are_the_same(model: str, blocks: int) -> bool:
    config = configs.config_of(Case(model=model, recompute="selective", layers=blocks))
    with sinking():
        (plain, weights), (traced, others) = steps(config), steps(compiled(config))
    return plain == traced and all(torch.equal(weights[name], others[name]) for name in others)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "blocks"),
    [
        ("mistral", 1),
        pytest.param("llama", 2, marks=pytest.mark.grid),
        pytest.param("gemma2", 2, marks=pytest.mark.grid),
    ],
)
def test_compiled_layers_give_every_bit(model: str, blocks: int) -> None:
    """Through the backend without code generation, as in tests/pipeline/test_compile.py."""
    assert run_ranks(1, compiled_layers_are_the_same, model, blocks, timeout=600) == [True]


# ------------------------------------------------------------------------------- planted faults


@contextmanager
def sinks_in_every_hop() -> Iterator[None]:
    """Each hop adds the sinks to its own scores, so that r of them are merged."""
    output, forward = attention.output, attention.forward

    def in_every_step(plan: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Any:
        def with_sink(*args: Any) -> tuple[Tensor, Tensor]:
            y, lse = forward(*args)
            scores = sinks.unsqueeze(1)
            share = torch.sigmoid(lse - scores).unsqueeze(-1)
            return y * share, torch.logaddexp(lse, scores)

        with patch(attention, "forward", with_sink):
            return output(plan, q, k, v)

    with sinking(), patch(attention, "output", in_every_step):
        yield


@contextmanager
def sinks_of_the_first_rank() -> Iterator[None]:
    """Context ranks that exchange positions for heads all use the sinks of the first one's heads."""
    real = Context.attend

    def attend(self: Context, *args: Any) -> Tensor:
        *rest, sinks, keep = args
        u = self.heads.size
        return real(self, *rest, torch.cat([sinks.chunk(u)[0]] * u), keep)

    with sinking(), patch(Context, "attend", attend):
        yield


def sinks_summed_over_tensor_ranks() -> AbstractContextManager[Any]:
    """Gradients of different heads are summed."""

    def build(*args: Any, **more: Any) -> layers.Attention:
        made = with_sinks(*args, **more)
        assert made.sinks is not None
        attach(made.sinks, replace(spec_of(made.sinks), partial="tp"))
        return made

    return sinking(build)


@contextmanager
def sinks_of_queries_not_summed() -> Iterator[None]:
    """The gradient of a context rank's sinks counts only the first rank's queries."""
    real = attention.gradients

    def gradients(*args: Any) -> tuple[Tensor | None, ...]:
        *grads, dsinks = real(*args)
        assert dsinks is not None
        first = torch.distributed.get_rank() == 0
        return *grads, dsinks if first else torch.zeros_like(dsinks)

    with sinking(), patch(attention, "gradients", gradients):
        yield


FAULTS: dict[Callable[[], AbstractContextManager[Any]], Case] = {
    sinks_in_every_hop: Case(cp=2, cp_heads=1, zero=0, layers=2, model="llama"),
    sinks_of_queries_not_summed: Case(cp=2, cp_heads=1, zero=0, layers=2, model="llama"),
    sinks_of_the_first_rank: Case(cp=2, cp_heads=2, zero=0, layers=2, model="llama"),
    sinks_summed_over_tensor_ranks: Case(tp=2, zero=0, layers=2, model="llama"),
}


def findings(fault: str, folder: str) -> list[str]:
    plant, case = next((f, case) for f, case in FAULTS.items() if f.__name__ == fault)
    with plant():
        return test_equivalence.run_cases([case], folder, trained)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found(fault: Callable[[], Any], truths: str) -> None:
    assert any(run_ranks(FAULTS[fault].world, findings, fault.__name__, truths))


@pytest.fixture(scope="module")
def truths(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder with the results of one process, which those of the cases without a fault equal."""
    folder = tmp_path_factory.mktemp("truths")
    run_all(list(dict.fromkeys(FAULTS.values())), folder)
    return str(folder)


# --------------------------------------------------------------- forecast, parameter, refusals


@pytest.mark.seldom("gemma2")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "groups"),
    [
        pytest.param(1, {"model": {"arch": "llama"}}, marks=pytest.mark.grid),
        (1, {"model": {"arch": "gemma2", "window": 16}, "recompute": {"mode": "selective"}}),
        (2, {"model": {"arch": "llama"}, "parallel": {"cp": 2, "cp_heads": 1}}),
    ],
    ids=["llama", "gemma2", "ring"],
)
def test_the_forecast_counts_sinks(world: int, groups: dict[str, dict[str, Any]]) -> None:
    """Within 1 % of the storages of a real step, as in tests/planner/test_footprint.py."""
    model = groups["model"] | {"layers": 3}
    train = {"global_batch": 4 * world}
    config = peaks.config_of(world, **groups | {"model": model, "train": train})
    with sinking(functools.partial(layers.Attention, sinks=True)):
        expected = [rank.bytes["peak"] for rank in Forecast.of(config, world).ranks]
    for got, want in zip(run_ranks(world, measured, config), expected, strict=True):
        assert abs(got - want) <= 0.01 * want


def measured(config: Any) -> int:
    with sinking(functools.partial(layers.Attention, sinks=True)):
        return peaks.measure(config)


def test_sinks_begin_at_zero_and_do_not_decay() -> None:
    spec = spec_of(layers.Attention("a", 8, 4, Slicing(), sinks=True).sinks)  # type: ignore[arg-type]
    assert spec.name == "a.sinks"
    assert spec.pieces[0].init == Init()
    assert not spec.decay


def own_core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q


def test_a_core_without_sinks_is_refused_by_name() -> None:
    text = r"blocks\.7: the core own_core does not support attention sinks: give it a parameter"
    with pytest.raises(ValueError, match=text):
        layers.Attention("blocks.7", 8, 2, Slicing(), sinks=True, core=own_core)
    sparse = layers.SparseAttention(layers.FixedPattern())
    with pytest.raises(ValueError, match="the core SparseAttention does not support attention si"):
        layers.Attention("blocks.7", 8, 2, Slicing(), sinks=True, core=sparse)


def test_a_core_of_the_user_gets_the_sinks_of_its_heads() -> None:
    given = list[Tensor]()

    def core(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        given.append(sinks)
        return Causal()(q, k, v, sinks=sinks)

    made = [
        layers.Attention("a", 8, 2, Slicing(), sinks=True, core=c).to_empty(device="cpu")
        for c in (core, Causal())
    ]
    with torch.no_grad():
        for module in made:
            for number, param in enumerate(module.parameters()):
                torch.nn.init.normal_(param, generator=torch.Generator().manual_seed(number))
    x = torch.randn(5, 2, 8, generator=torch.Generator().manual_seed(9))
    own, built_in = (module(x) for module in made)
    assert torch.equal(own, built_in)
    assert given == [made[0].sinks]
