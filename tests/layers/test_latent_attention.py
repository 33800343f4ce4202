"""Latent attention computes the function of transformers' DeepSeek models, and trains the same in every topology."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

from tests import configs
from tests.configs import Case, config_of, share, topology_of
from tests.covering import Space, Values
from tests.engine.test_documents import documents, parts
from tests.harness import run_ranks
from tests.models.test_models_families import plain_attention
from tests.pipeline.test_trace import check_on_the_cpu
from tests.test_equivalence import run_all, run_cases, write_truths
from threed import layers
from threed.config import ModelConfig
from threed.config.architectures.rope_scaling import RopeScaling
from threed.config.resolution import context_fits
from threed.distributed.grid import Grid
from threed.distributed.sharding import spec_of
from threed.distributed.topology import Axis, Topology
from threed.engine import Engine, StepMetrics
from threed.layers import Causal, LatentAttention, MicroBatch, Slicing, latent_attention
from threed.layers.context import Context
from threed.ops.frequencies import frequencies
from threed.pipeline.trace import stated_flops
from threed.planner.memory_estimate import trace

SIZES = {"kv_rank": 10, "nope_dim": 6, "rope_dim": 4, "value_dim": 5}
SCALING = RopeScaling(
    rope_type="yarn",
    factor=4.0,
    original_max_position_embeddings=16,
    mscale=0.8,
    mscale_all_dim=1.3,
)
patch = mock.patch.object


# ------------------------------------------------------------------------------------- transformers

NAMES = {
    "q_proj": "query", "q_a_proj": "query_down", "q_a_layernorm": "query_norm", "q_b_proj": "query_up",
    "kv_a_proj_with_mqa": "kv_down", "kv_a_layernorm": "kv_norm", "kv_b_proj": "kv_up", "o_proj": "out",
}  # fmt: skip
LENGTH, ROWS, HIDDEN, HEADS = 24, 2, 20, 4


def theirs(
    family: Any, dtype: torch.dtype, query_rank: int | None, bias: bool, scaled: bool, **keys: Any
) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """Returns the attention of transformers with random weights, and its function of x [s b h]."""
    kind = family.__name__.rpartition("_")[2].upper()
    rope = {"rope_type": "default", "rope_theta": 1e4} | (SCALING.table() if scaled else {})
    config = getattr(family, f"Deepseek{kind}Config")(
        hidden_size=HIDDEN, num_attention_heads=HEADS, num_key_value_heads=HEADS, q_lora_rank=query_rank,
        kv_lora_rank=SIZES["kv_rank"], qk_nope_head_dim=SIZES["nope_dim"], qk_rope_head_dim=SIZES["rope_dim"],
        v_head_dim=SIZES["value_dim"], attention_bias=bias, max_position_embeddings=64, rope_parameters=rope,
        attn_implementation="sdpa", **keys,
    )  # fmt: skip
    module = getattr(family, f"Deepseek{kind}Attention")(config, 0)
    draw = torch.Generator().manual_seed(0)
    for param in module.parameters():
        param.data = torch.randn(param.shape, generator=draw, dtype=dtype) * 0.2 + (param.dim() < 2)
    rotary = getattr(family, f"Deepseek{kind}RotaryEmbedding")(config)

    def attend(x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        at = torch.arange(x.shape[1]).expand(x.shape[0], -1)
        y, _ = module(x, position_embeddings=rotary(x, at), attention_mask=None)
        return y.transpose(0, 1)

    return module, attend


def ours(module: nn.Module, query_rank: int | None, bias: bool, scaled: bool, **keys: Any) -> Any:
    """Returns the layer with the weights of a module of transformers."""
    rotary = frequencies(1e4, SIZES["rope_dim"], scaling=SCALING if scaled else None)
    layer = LatentAttention(
        "a", HIDDEN, HEADS, Slicing(), **SIZES, rotary=rotary, query_rank=query_rank, bias=bias, **keys
    )  # fmt: skip
    given = {_native(name): value.detach().clone() for name, value in module.named_parameters()}
    for part in layer.modules():
        for name, param in list(part._parameters.items()):
            if param is not None:
                part._parameters[name] = nn.Parameter(given.pop(spec_of(param).name))
    assert not given, "weights that the layer does not have"
    return layer


def _native(name: str) -> str:
    module, kind = name.rsplit(".", 1)
    return f"a.{NAMES[module]}.{kind}"


def check(
    module: nn.Module, attend: Callable[[Tensor], Tensor], layer: nn.Module, tolerance: float
) -> None:
    """Compares outputs, and gradients of x and of every weight."""
    dtype = next(layer.parameters()).dtype
    draw = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(LENGTH, ROWS, HIDDEN, generator=draw, dtype=dtype) for _ in range(2))
    found = list[list[Tensor]]()
    for run, owner in ((attend, module), (layer, layer)):
        given = x.clone().requires_grad_()
        y = run(given)
        grads = torch.autograd.grad(y, [given, *owner.parameters()], dy)
        found.append([y.detach(), grads[0], *_by_name(owner, grads[1:])])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def _by_name(owner: nn.Module, grads: tuple[Tensor, ...]) -> list[Tensor]:
    """Returns the gradients of a module's parameters, in the order of their names in the layer."""
    names = [name for name, _ in owner.named_parameters()]
    if not isinstance(owner, LatentAttention):
        names = [_native(name).removeprefix("a.").replace("query_up", "query") for name in names]
    return [grads[names.index(name)] for name in sorted(names)]


CASES = {
    "v3": (v3, {"query_rank": 12, "bias": True, "scaled": True}, {}),
    "v3-direct-query": (v3, {"query_rank": None, "bias": False, "scaled": True}, {}),
    "v3-unscaled": (v3, {"query_rank": 12, "bias": False, "scaled": False}, {}),
    "v3-halves": (v3, {"query_rank": 12, "bias": False, "scaled": True}, {"rope_interleave": False}),
    "v2": (v2, {"query_rank": 12, "bias": True, "scaled": True}, {}),
    "v2-direct-query": (v2, {"query_rank": None, "bias": False, "scaled": False}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_layer_is_the_attention_of_transformers(name: str) -> None:
    """In fp32 to 1e-5, because DeepseekV2Attention rotates, and both compute norms, in fp32."""
    family, keys, more = CASES[name]
    module, attend = theirs(family, torch.float32, **keys, **more)
    layer = ours(module, **keys, interleaved=not more)
    check(module, attend, layer, 1e-5)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("v3")])
def test_the_layer_is_the_attention_of_transformers_in_fp64(name: str) -> None:
    """With norms in fp64, DeepseekV3Attention computes in fp64 (tables of cosines are fp32 in both)."""
    family, keys, more = CASES[name]
    module, attend = theirs(family, torch.float64, **keys, **more)
    for at in ("q_a_layernorm", "kv_a_layernorm"):
        if (norm := getattr(module, at)) is not None:
            exact = nn.RMSNorm(norm.weight.shape, eps=norm.variance_epsilon)
            exact.weight = norm.weight
            setattr(module, at, exact)
    check(module, attend, ours(module, **keys, interleaved=not more), 1e-9)


def test_documents_are_attended_to_alone() -> None:
    """As the sequences of one document each; the order of sums differs."""
    module, _ = theirs(v3, torch.float64, 12, True, True)
    layer, numbers = ours(module, 12, True, True), documents(0, 4)
    x = torch.randn(numbers.shape[1], 4, HIDDEN, dtype=torch.float64)
    y = layer(x, documents=numbers)
    for row, at in parts(numbers):
        alone = layer(x[at, row : row + 1])
        torch.testing.assert_close(y[at, row : row + 1], alone, rtol=0, atol=1e-12)


# ------------------------------------------------------------------------------ values of another size


@pytest.mark.parametrize("sizes", [(6, 4), (4, 6)])
@pytest.mark.parametrize(
    "core", [Causal(), Causal(30), Causal(5), Causal(0, 0.7), Causal(40, scale=0.3)]
)
def test_values_of_another_size(core: Causal, sizes: tuple[int, int]) -> None:
    """On CPUs, where torch has no kernel for them, no tensor with all scores is kept."""
    draw, (size, value_size) = torch.Generator().manual_seed(3), sizes
    shapes = [(48, 2, 4, size), (48, 2, 2, size), (48, 2, 2, value_size)]
    given = [
        torch.randn(shape, dtype=torch.float64, generator=draw).requires_grad_() for shape in shapes
    ]
    kept = list[int]()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: (kept.append(x.numel()), x)[1], lambda x: x
    ):
        y = core(*given)
    assert max(kept) <= 48 * 2 * 4 * max(sizes)
    want = plain_attention(*given, core)
    dy = torch.randn(want.shape, dtype=torch.float64, generator=draw)
    torch.testing.assert_close(y, want, rtol=0, atol=1e-12)
    for got, right in zip(
        torch.autograd.grad(y, given, dy), torch.autograd.grad(want, given, dy), strict=True
    ):
        torch.testing.assert_close(got, right, rtol=0, atol=1e-12)


# ----------------------------------------------------------------------------------------- a model


@dataclass(frozen=True)
class Latent(Case):
    """A configuration of `LatentModel`. `documents` states whether rows have several documents."""

    documents: bool = False


class LatentModel:
    """A decoder whose blocks have latent attention, by turns with and without a latent query."""

    def __init__(self, config: ModelConfig, slicing: Slicing) -> None:
        self.config, self.slicing, self.hidden = config, slicing, config.hidden

    def layers(self) -> list[nn.Module]:
        c, slicing, vocab = self.config, self.slicing, self.config.vocab or 0
        embedding = layers.Embedding("embedding", vocab, c.hidden, slicing)
        norm = layers.RMSNorm("head.norm", c.hidden, slicing)
        head = layers.LanguageModelHead(
            "head", "embedding.word.weight", norm, vocab, c.hidden, slicing
        )
        return [embedding, *(self.block(f"blocks.{i}", i % 2 == 0) for i in range(c.layers)), head]

    def block(self, name: str, low_rank: bool) -> nn.Module:
        c, slicing = self.config, self.slicing
        attention = LatentAttention(
            f"{name}.attention", c.hidden, c.heads, slicing, **SIZES, interleaved=low_rank, bias=low_rank,
            rotary=frequencies(1e4, SIZES["rope_dim"], scaling=SCALING), query_rank=12 if low_rank else None,
            std=0.2, out_std=0.2,
        )  # fmt: skip
        norms = tuple(
            layers.RMSNorm(f"{name}.{part}_norm", c.hidden, slicing)
            for part in ("attention", "mlp")
        )
        mlp = layers.MLP(f"{name}.mlp", c.hidden, 40, slicing)
        return layers.Block(name, (norms[0], norms[1]), attention, mlp, slicing, dropout=c.dropout)


def engine_of(case: Case, **run: Any) -> Engine:
    config = config_of(case)
    config = config.model_copy(update={"run": config.run.model_copy(update=run)})
    topology = topology_of(case.pp, case.tp, case.cp)
    return Engine(LatentModel(config.model, Slicing.of(topology, config)), topology, config)


def batch(case: Latent, step: int) -> dict[str, Tensor]:
    rows = config_of(case).train.global_batch
    full = configs.batch(step, rows)
    return full | ({"documents": documents(step, rows)} if case.documents else {})


def trained(case: Latent, **run: Any) -> tuple[Engine, list[StepMetrics]]:
    engine = engine_of(case, **run)
    steps = range(configs.STEPS)
    return engine, [engine.step(share(batch(case, step), engine.topology)) for step in steps]


SETTINGS: dict[str, list[object]] = {
    "pp": [1, 2],
    "dp": [1, 2],
    "tp": [1, 2, 4],
    "cp": [1, 2, 4],
    "cp_heads": [1, 2, 4],
    "sequence": [True, False],
    "zero": [0, 1, 2, 3],
    "schedule": ["1f1b", "zb-h1", "zb-v", "dualpipev"],
    "microbatches": [1, 3, 8],
    "recompute": ["none", "full", "sliced", "selective"],
    "dropout": [0.0, 0.1],
    "tile": [1, 3],
    "bucket_mib": [64.0, 0.01],
    "documents": [False, True],
}
RANKS = 8


def make(values: Values) -> Latent | None:
    """Returns the case of some settings, or None if it needs too many ranks, or heads do not fit."""
    cp, u, pp, dp, tp = (int(str(values[name])) for name in ("cp", "cp_heads", "pp", "dp", "tp"))
    if pp * dp * tp * cp > RANKS or not context_fits(4 // tp, 4 // tp, cp, u):
        return None
    v = dict(values)
    v["sequence"] = v["sequence"] and tp > 1
    v["schedule"] = v["schedule"] if pp > 1 else "1f1b"
    v["microbatches"] = 8 if v["schedule"] == "dualpipev" else v["microbatches"]
    v["tile"] = v["tile"] if v["zero"] == 3 else 1
    v["layers"] = 6 if v["schedule"] in ("zb-v", "dualpipev") else 3 if pp > 1 else 2
    if v["recompute"] == "sliced" and (tp == 1 or v["sequence"]):
        v["recompute"] = "full"
    return Latent(**v)  # type: ignore[arg-type]


SPACE = Space(
    SETTINGS,
    make,
    cost=lambda case: case.world * (6 + case.layers * (3 + case.microbatches * 2)),
    shape=lambda case: (case.cp > case.cp_heads, case.cp_heads > 1, case.tp > 1),
)


EVERYDAY = replace(SPACE, shape=lambda case: (case.cp, case.cp_heads))
CHEAPEST = 11  # the cheapest of the first seeds


def test_every_setting_equals_one_process() -> None:
    cases = EVERYDAY.touching(CHEAPEST)
    for name, options in SETTINGS.items():
        assert {getattr(case, name) for case in cases} == set(options)
    run_all(cases, trained, trained)


@pytest.mark.grid
@pytest.mark.timeout(7200)
def test_every_pair_of_settings_equals_one_process() -> None:
    run_all(SPACE.covering(0), trained, trained)


# ---------------------------------------------------------------------------------- planted faults


def rotary_key_not_summed() -> AbstractContextManager[Any]:
    """The gradient of the shared rotary key is the one of this rank's heads."""

    def latent(self: LatentAttention, x: Tensor) -> Tensor:
        small = self._normed(self.kv_down(x))
        key = small[..., self.kv_rank :]
        return torch.cat((self.slicing.gather(small)[..., : self.kv_rank], key), -1)

    return patch(LatentAttention, "_latent", latent)


def gradients_of_norms_not_summed() -> AbstractContextManager[Any]:
    complete = functools.partial(layers.RMSNorm, partial=False)
    return patch(latent_attention, "RMSNorm", complete)


def gradients_of_projections_summed_twice() -> AbstractContextManager[Any]:
    """As if every rank had a part of the gradients, although f has summed them."""
    partial = functools.partial(layers.ReplicatedLinear, partial=True)
    return patch(latent_attention, "ReplicatedLinear", partial)


def rotary_positions_of_the_ranks_rows() -> AbstractContextManager[Any]:
    """Each context rank numbers the positions of its rows from 0."""
    return patch(
        Slicing,
        "gathered_positions",
        lambda self, x: layers.context.Positions(((0, len(x)),), len(x)),
    )


TP, RING = Latent(tp=2, zero=0, layers=2), Latent(cp=2, cp_heads=1, zero=0, layers=2)
FAULTS: dict[Callable[[], AbstractContextManager[Any]], Latent] = {
    rotary_key_not_summed: TP,
    gradients_of_norms_not_summed: replace(TP, sequence=True),
    gradients_of_projections_summed_twice: TP,
    rotary_positions_of_the_ranks_rows: RING,
}


def findings(folder: str) -> dict[str, list[str]]:
    """Returns this rank's differences from one process, by fault; "" has those without a fault."""
    found = {"": run_cases(list(dict.fromkeys(FAULTS.values())), folder, trained)}
    for fault, case in FAULTS.items():
        with fault():
            found[fault.__name__] = run_cases([case], folder, trained)
    return found


def test_planted_faults_are_found(tmp_path: Path) -> None:
    run_ranks(1, write_truths, [TP.truth], str(tmp_path), trained)
    ranks = run_ranks(2, findings, str(tmp_path))
    assert not any(found[""] for found in ranks)
    for fault in FAULTS:
        assert any(found[fault.__name__] for found in ranks), fault


# ------------------------------------------------------------------------- forecasts, compile, errors


@pytest.mark.seldom("dtype0-ops0", "dtype1-ops1")
@pytest.mark.parametrize("ops", [(), ("attention",), ("attention", "activation", "norm")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_memory_and_flops_are_as_traced(dtype: torch.dtype, ops: tuple[str, ...]) -> None:
    model = LatentModel(config_of(Case(layers=2)).model, Slicing())
    data = configs.batch(0, 4)
    weight = torch.ones((), dtype=torch.float64)
    micro = MicroBatch(data["tokens"], data["labels"], torch.arange(4), weight)
    check_on_the_cpu(model.layers(), micro, dtype, ops)


@pytest.mark.parametrize("sequence", [False, True])
def test_the_layer_states_the_flops_that_are_traced_on_every_rank(sequence: bool) -> None:
    config = config_of(Case(tp=2, sequence=sequence, layers=2))
    for rank in range(2):
        topology = Topology.on_meta(Grid(tp=2), rank)
        model = LatentModel(config.model, Slicing(topology.axis("tp"), sequence))
        found = model.layers()
        tokens = config.train.micro_batch * config.model.seq
        stated = stated_flops(found, tokens, config.model.seq)
        assert stated == [cost.flops for cost in trace(model, found, config, topology, [])]


def compiled(tp: int) -> list[str]:
    """Returns the differences between a compiled model and the same model that is not compiled."""
    case = Latent(tp=tp, sequence=tp > 1, layers=1, recompute="selective")
    runs = [trained(case), trained(case, compile=True, compile_backend="aot_eager")]
    numbers = [[(m.loss, m.grad_norm) for m in metrics] for _, metrics in runs]
    plain, again = (engine.full_state_dict() for engine, _ in runs)
    wrong = [f"{numbers}"] * (numbers[0] != numbers[1])
    return wrong + [name for name, value in plain.items() if not torch.equal(value, again[name])]


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.grid)])
def test_a_compiled_block_gives_the_same_numbers(tp: int) -> None:
    """tests/pipeline/test_compile.py compiles blocks of tensor ranks daily."""
    pytest.importorskip("torch._opaque_base", reason="this torch cannot compile layers")
    assert not any(run_ranks(tp, compiled, tp))


def build(slicing: Slicing | None = None, **keys: Any) -> LatentAttention:
    given = {**SIZES, "rotary": 1e4, **keys}
    return LatentAttention("a", HIDDEN, given.pop("heads", 4), slicing or Slicing(), **given)


def refused() -> Iterator[tuple[str, Callable[[], Any]]]:
    three = Axis("tp", (0, 1, 2), 0)
    heads = Context(Axis("cp", (0, 1, 2), 0), axis=Axis("cp", (0, 1, 2), 0))
    yield (
        r"a: 4 heads cannot be divided over tp 3: use another --parallel.tp",
        lambda: build(Slicing(three)),
    )
    yield (
        r"a: rotary positions must rotate pairs of all 5 .* even rope_dim",
        lambda: build(rope_dim=5),
    )
    yield (
        r"pairs of all 4 elements of rope_dim: .* rotary=frequencies\(theta, rope_dim\)",
        lambda: build(rotary=frequencies(1e4, 10, part=0.2)),
    )
    yield r"over 3 context ranks: use --parallel.cp-heads 1$", lambda: build(Slicing(context=heads))
    yield (
        r"over 3 context ranks: use --parallel.cp 1$",
        lambda: layers.Attention("a", HIDDEN, 4, Slicing(context=heads), core=lambda q, k, v: v),
    )


def test_layers_that_would_be_wrong_are_refused() -> None:
    for message, make_layer in refused():
        with pytest.raises(ValueError, match=message):
            make_layer()
