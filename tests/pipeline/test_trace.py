"""What tracing finds that a layer costs: against formulas, published figures, and what layers really do on the CPU."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import sys
from collections import Counter
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo  # by the first operation on the meta device: here it is part of what `conftest` freezes
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests import configs, formulas, users_cases, users_truths
from tests.covering import in_turns, some_always
from tests.formulas import Decoder
from tests.live import Live
from tests.users_layers import Latent, Running
from tests.users_models import MODELS as USERS_MODELS
from threed import models
from threed.config import Config
from threed.config.resolution import resolve
from threed.distributed.grid import Grid
from threed.distributed.topology import Topology
from threed.layers import Block, MicroBatch, Slicing
from threed.layers.recompute import Selective
from threed.ops.precision import DTYPES
from threed.pipeline import activation_checkpointing
from threed.pipeline.activation_checkpointing import Recomputed
from threed.pipeline.boundary import like, tensors
from threed.pipeline.stage import AlwaysGathered, Stage
from threed.pipeline.trace import (
    META,
    LayerCost,
    TraceError,
    Tracer,
    Watch,
    for_layer_alone,
    stated_flops,
)
from threed.planner.memory_estimate import trace

MODELS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "gpt with dropout": {"dropout": 0.1},
    "untied gpt": {"tied": False},
    "llama": {"arch": "llama", "ffn": 100},
    "llama with 2 kv heads": {"arch": "llama", "ffn": 100, "kv_heads": 2},
    "qwen3 with 1 kv head": {
        "arch": "llama",
        "ffn": 70,
        "kv_heads": 1,
        "qk_norm": True,
        "head_dim": 4,
        "tied": True,
    },
}
# Tensor ranks, one of them, and whether sequences are cut too.
CUTS = [
    (1, 0, False),
    *((t, rank, cut) for t, rank in ((2, 1), (3, 1), (4, 3), (8, 7)) for cut in (False, True)),
]
WIDTHS = {"fp32": 4, "bf16": 2, "fp64": 8}
OPS = ("attention", "activation", "norm")
MODES: dict[str, dict[str, Any]] = {
    **{op: {"mode": "selective", "ops": (op,)} for op in OPS},
    "all": {"mode": "selective", "ops": OPS},
    "full": {"mode": "full"},
    "every second": {"mode": "full", "every": 2},
    "sliced": {"mode": "full", "partition": True},
}
ROWS = 2


def config_of(
    model: dict[str, Any], dtype: str = "fp32", tp: int = 1, cut: bool = False, **recompute: Any
) -> Config:
    config = Config.model_validate({
        "parallel": {"tp": tp, "sequence": cut},
        "model": {"layers": 2, "hidden": 48, "heads": 24, "seq": 24, **model},
        "precision": {"dtype": dtype},
        "recompute": recompute,
        "train": {"global_batch": ROWS, "micro_batch": ROWS, "steps": 10},
    })  # fmt: skip
    return resolve(config, 53, tp)


def traced(config: Config, rank: int = 0) -> list[LayerCost]:
    """The costs of a configured model's layers to a tensor rank."""
    topology = Topology.on_meta(Grid(tp=config.parallel.tp), rank)
    model = models.build(config.model, Slicing(topology.axis("tp"), bool(config.parallel.sequence)))
    layers, r = model.layers(), config.recompute
    return trace(
        model,
        layers,
        config,
        topology,
        [] if r.mode == "none" else activation_checkpointing.choose(layers, r.every),
    )


def dims_of(config: Config, rank: int = 0) -> Decoder:
    dims = formulas.decoder(
        config.model, micro_batch=ROWS, tensor=config.parallel.tp, tensor_rank=rank,
        sequence=bool(config.parallel.sequence), element_bytes=WIDTHS[config.precision.dtype],
    )  # fmt: skip
    return replace(
        dims, recompute=tuple(config.recompute.ops) if config.recompute.mode == "selective" else ()
    )


def held(cost: LayerCost) -> int:
    """What is kept of a micro-batch, as the formulas count it: with the input, without the output."""
    assert not cost.keeps_output
    return cost.kept + cost.input * cost.keeps_input


def apart(dims: Decoder, part: str) -> int:
    """Bytes by which what is kept differs from the formulas, and why."""
    found, narrow = 0, dims.element_bytes < 4
    if (
        narrow
        and dims.norm == "rmsnorm"
        and (part == "head" or (part == "block" and "norm" not in dims.recompute))
    ):
        # A composed RMSNorm keeps an fp32 copy of its input; that of a layer's first norm stays all the same.
        found += dims.local_tokens * dims.hidden * dims.element_bytes
    if (
        part == "block"
        and dims.kv_sharers > 1
        and dims.rotary
        and "attention" not in dims.recompute
    ):
        # Queries have a projection of their own, which nobody needs once they are rotated; but norms of heads do.
        found -= dims.tokens * dims.query_width * dims.element_bytes * (narrow or not dims.qk_norm)
    if part == "head":
        found += 4 * (dims.element_bytes < 8)  # the loss's weight, which comes as fp64
    return found


def can_be_cut(model: dict[str, Any], t: int) -> bool:
    k = model.get("kv_heads", 24)
    return k % t == 0 or t % k == 0


def check(
    costs: list[LayerCost], wanted: list[formulas.Cost], dims: Decoder, again: tuple[int, ...] = ()
) -> None:
    """Equal in all that the formulas know; `again`: layers that are computed again from their input."""
    for number, (part, cost, want) in enumerate(
        zip(("embedding", "block", "block", "head"), costs, wanted, strict=True)
    ):
        assert cost.flops == want.flops_forward, part
        assert cost.output == want.output_bytes, part
        assert cost.sent.get("tp", 0) == want.tp_bytes, part
        assert set(cost.sent) <= {"tp"}
        assert held(cost) == want.activation_bytes + (
            0 if number in again else apart(dims, part)
        ), part
        assert cost.input == (0 if part == "embedding" else wanted[0].output_bytes)
        assert min(cost.forward, cost.backward) >= held(cost)
        table = 2 * dims.seq * dims.head_size * dims.element_bytes * dims.rotary  # cos and sin
        # one flag: ids, or labels, beyond the vocabulary
        assert cost.cached == (table if part == "block" else 1)


CASES = [
    (name, cut, tuple(WIDTHS)[(i + j) % 3])  # every two of model, cut and dtype meet
    for (i, name), (j, cut) in itertools.product(enumerate(MODELS), enumerate(CUTS))
    if can_be_cut(MODELS[name], cut[0])
]


@pytest.mark.parametrize(("name", "cut", "dtype"), some_always(CASES, 4))
def test_layers_cost_what_the_formulas_say(
    name: str, cut: tuple[int, int, bool], dtype: str
) -> None:
    t, rank, sequence = cut
    config = config_of(MODELS[name], dtype, t, sequence)
    dims = dims_of(config, rank)
    check(traced(config, rank), formulas.transformer_costs(dims, 2), dims)


AGAIN = [
    (name, cut, mode, tuple(WIDTHS)[(i + j + k) % 3])
    for (i, name), (j, cut), (k, mode) in itertools.product(
        enumerate(["gpt with dropout", "llama with 2 kv heads", "qwen3 with 1 kv head"]),
        enumerate([(1, 0, False), (4, 3, False), (4, 1, True)]),
        enumerate(MODES),
    )
    if not (mode == "every second" and cut[0] > 1)
]


@pytest.mark.parametrize(("name", "cut", "mode", "dtype"), some_always(AGAIN, 5))
def test_what_is_computed_again_is_not_kept(
    name: str, cut: tuple[int, int, bool], mode: str, dtype: str
) -> None:
    """And what it sends is sent again."""
    t, rank, sequence = cut
    config = config_of(MODELS[name], dtype, t, sequence, **MODES[mode])
    dims, r = dims_of(config, rank), config.recompute
    wanted = formulas.transformer_costs(dims, 2)
    again = (1, 2)[:: r.every] if r.mode == "full" else ()
    for number in again:
        wanted[number] = formulas.fully_recomputed(
            wanted[number], t if r.partition and not sequence else 1
        )
    costs = traced(config, rank)
    check(costs, wanted, dims, again)
    if again:  # its backward has all that the plain one keeps
        plain = traced(config_of(MODELS[name], dtype, t, sequence), rank)
        assert costs[1].backward >= held(plain[1]) > held(costs[1])


@pytest.mark.parametrize(
    ("name", "ranks", "tile"),
    in_turns(5, list(MODELS), [(1, False), (4, False), (4, True)], [1, 2]),
)
def test_layers_state_the_flops_that_are_traced(
    name: str, ranks: tuple[int, bool], tile: int
) -> None:
    """On every tensor rank, whole or tiled."""
    t, cut = ranks
    config = config_of(MODELS[name], tp=t, cut=cut)
    for rank in {0, t - 1}:
        topology = Topology.on_meta(Grid(tp=t), rank)
        model = models.build(config.model, Slicing(topology.axis("tp"), cut, tile=tile))
        layers = model.layers()
        wanted = [
            cost.flops_forward for cost in formulas.transformer_costs(dims_of(config, rank), 2)
        ]
        assert stated_flops(layers, ROWS * config.model.seq, config.model.seq) == wanted
        assert [cost.flops for cost in trace(model, layers, config, topology, [])] == wanted


@pytest.mark.parametrize("name", USERS_MODELS)
def test_layers_by_others_state_what_is_traced_or_nothing(name: str) -> None:
    config, data = users_cases.config_of(users_cases.Case(name)), users_cases.batch(name, 0)
    layers, seq = USERS_MODELS[name](config.model, Slicing()).layers(), config.model.seq
    stated = stated_flops(layers, users_cases.ROWS * seq, seq)
    if stated is not None:
        micro = MicroBatch(
            data["tokens"], data["labels"], torch.arange(users_cases.ROWS), torch.ones(())
        )
        costs = Tracer(on_meta(micro), torch.float64, torch.float64, Counter()).trace(layers)
        assert stated == [cost.flops for cost in costs]


# -------------------------------------------------------------------------------------------------- published figures

PAPER = {
    "hidden": 6144,
    "heads": 64,
    "seq": 2048,
    "layers": 1,
    "dropout": 0.1,
}  # of arXiv 2205.05198, table 3


def block(t: int, cut: bool, **recompute: Any) -> tuple[LayerCost, int, int]:
    """A block of the paper's 22 B model in 16 bits; s b h, and bytes of statistics, which the paper leaves out."""
    cost = traced(config_of(PAPER, "bf16", t, cut, **recompute), t - 1)[1]
    tokens = PAPER["seq"] * ROWS
    return (
        cost,
        tokens * PAPER["hidden"],
        tokens * (4 * 4 // (t if cut else 1) + 4 * PAPER["heads"] // t),
    )


@pytest.mark.parametrize("t", [1, pytest.param(2, marks=pytest.mark.grid), 8])
def test_activations_are_those_of_2205_05198_less_the_attention_scores(t: int) -> None:
    """sbh(10 + 24/t) without 5as/h: 16 bit, masks of one byte; two norms' statistics and row sums come on top."""
    cost, sbh, statistics = block(t, cut=False)
    assert held(cost) == 10 * sbh + 24 * sbh // t + statistics
    assert held(block(t, cut=False, mode="full")[0]) == 2 * sbh


@pytest.mark.parametrize("t", [pytest.param(2, marks=pytest.mark.grid), 8])
def test_sequence_parallelism_slices_norms_and_masks_but_keeps_gathered_inputs(t: int) -> None:
    """34/t of 2205.05198 table 2, and the two inputs that the paper gathers once more instead: 4 (1 - 1/t)."""
    cost, sbh, statistics = block(t, cut=True)
    assert held(cost) == 34 * sbh // t + 4 * sbh * (t - 1) // t + statistics
    assert cost.output == 2 * sbh // t
    assert held(block(t, cut=True, mode="full")[0]) == 2 * sbh // t


def test_flops_and_bytes_sent_are_those_of_the_papers() -> None:
    """A forward is a third of 72 b s h^2 (1 + s/6h) (arXiv 2104.04473, equation 3); 8 b s h (t-1)/t elements travel."""
    cost, sbh, _ = block(8, cut=True)
    assert cost.flops * 8 == 24 * sbh * 6144 + 4 * sbh * 2048
    assert cost.sent == {"tp": 8 * sbh * 7 // 8 * 2}


@pytest.mark.parametrize("t", [2, 3, 4])
def test_tensor_ranks_together_do_the_models_work(t: int) -> None:
    """Also where t divides neither the vocabulary nor f."""
    model = {"arch": "llama", "ffn": 130}
    ranks = [traced(config_of(model, tp=t), rank) for rank in range(t)]
    whole = traced(config_of(model))
    assert [
        sum(costs) for costs in zip(*([c.flops for c in rank] for rank in ranks), strict=True)
    ] == [cost.flops for cost in whole]


# ---------------------------------------------------------------------------------------------------- layers by others


def give_values(layer: nn.Module, dtype: torch.dtype) -> None:
    """Parameters with values; buffers have theirs."""
    for module in layer.modules():
        for name, param in module._parameters.items():
            if param is not None and param.is_meta:
                module._parameters[name] = nn.Parameter(
                    torch.randn(param.shape, dtype=dtype) / 8, param.requires_grad
                )


def copied(x: Any) -> Any:
    """The same in memory of its own, without a graph."""
    return like(
        x, [part.detach().clone().requires_grad_(part.requires_grad) for part in tensors(x)]
    )


def really(
    layer: nn.Module, x: Any, micro: MicroBatch, recomputed: Recomputed | None = None
) -> tuple[int, Any]:
    """Bytes of live storages that a forward on the CPU leaves behind, and what it gives."""
    alone = for_layer_alone(recomputed, layer)
    stage, live, kept = Stage([layer], AlwaysGathered(), recomputed=alone), Live(), [0]
    with live:
        # the first time there are also tables that stay, and what is seen only now
        for number in range(3):
            before = live.bytes_now()
            out = copied(stage.forward(number, copied(x), micro))
            gc.collect()
            kept.append(
                live.bytes_now()
                - before
                - sum(part.untyped_storage().nbytes() for part in tensors(out))
            )
            del out
    assert kept[-1] == kept[-2]
    return kept[-1], copied(stage.forward(3, x, micro))


def flops_of(layer: nn.Module, x: Any, micro: MicroBatch) -> int:
    """Of a forward on the CPU, where attention is plain products, or an operator that torch does not count."""

    def flash(q: list[int], k: list[int], v: list[int], *_: Any, **__: Any) -> int:
        return 2 * math.prod(q[:3]) * k[2] * (q[3] + v[3])

    mapping: Any = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: flash}
    counter = FlopCounterMode(display=False, custom_mapping=mapping)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        layer(x, micro)
    return counter.get_total_flops()


def on_meta(micro: MicroBatch) -> MicroBatch:
    values = {
        name: value.to(META) for name, value in vars(micro).items() if isinstance(value, Tensor)
    }
    return replace(
        micro, **values, inputs={k: v.to(META) for k, v in (micro.inputs or {}).items()} or None
    )


def check_on_the_cpu(
    layers: list[nn.Module], micro: MicroBatch, dtype: torch.dtype, ops: tuple[str, ...] = ()
) -> None:
    """ops: operations that are computed again in the backward, in all layers but the first and the last."""
    again = (
        Recomputed(frozenset(range(1, len(layers) - 1)), selective=Selective(ops))
        if ops
        else Recomputed()
    )
    costs = Tracer(on_meta(micro), dtype, torch.float32, Counter()).trace(layers, again)
    x: Any = None
    for number, (layer, cost) in enumerate(zip(layers, costs, strict=True)):
        give_values(layer, dtype)
        assert cost.flops == flops_of(layer, x, micro), layer
        kept, x = really(layer, x, micro, again if number in again.units else None)
        kept += fused(micro, layer) if isinstance(layer, Latent) else 0
        # its scale is another tensor each time: traced once, it is a table
        kept -= 8 * isinstance(layer, Running)
        assert (
            cost.kept + cost.input * cost.keeps_input + cost.output * cost.keeps_output == kept
        ), layer


def fused(micro: MicroBatch, layer: Latent) -> int:
    """What CUDA's fused attention keeps beyond what the CPU does in fp64 if values are narrower than keys (plain
    products): its log-sum-exps, fp32 in rows of 32, and its random state; the packed keys and values. It keeps neither
    the probabilities nor a copy of the values; its output is the next layer's input."""
    assert micro.tokens is not None
    b, s, a = *micro.tokens.shape, users_truths.HEADS
    rows = 4 * b * a * 32 * -(-s // 32) + 16
    return rows + 8 * b * (2 * s * a * layer.d - a * s * s - s * a * layer.d)


@pytest.mark.parametrize("name", USERS_MODELS)
def test_users_layers_keep_and_compute_what_was_traced(name: str) -> None:
    """As floating point is on the CPU: a LayerNorm's statistics of 16 bits are 16-bit there."""
    config, data = users_cases.config_of(users_cases.Case(name)), users_cases.batch(name, 0)
    tokens, labels = data.pop("tokens", None), data.pop("labels")
    weight = torch.ones((), dtype=torch.float64)
    micro = MicroBatch(tokens, labels, torch.arange(len(labels)), weight, inputs=data or None)
    layers = USERS_MODELS[name](config.model, Slicing()).layers()
    check_on_the_cpu(layers, micro, torch.bfloat16 if name in users_cases.BF16 else torch.float64)


@pytest.mark.parametrize(
    ("name", "dtype"),
    some_always(
        list(itertools.product(["mistral", "qwen2", "phi3", "gemma2", "gemma3"], ["fp64", "bf16"])),
        3,
    ),
)
def test_families_keep_and_compute_what_was_traced_and_stated(name: str, dtype: str) -> None:
    config = configs.config_of(configs.Case(model=name, dtype=dtype))
    layers, data = models.build(config.model, Slicing()).layers(), configs.batch(0, ROWS)
    weight = torch.ones((), dtype=torch.float64)
    micro = MicroBatch(data["tokens"], data["labels"], torch.arange(ROWS), weight)
    stated, wide = stated_flops(layers, ROWS * configs.SEQ, configs.SEQ), DTYPES[dtype]
    assert stated == [
        cost.flops for cost in Tracer(on_meta(micro), wide, wide, Counter()).trace(layers)
    ]
    check_on_the_cpu(layers, micro, wide)


# Each of the other models is like one of these.
DIFFERENT_LAYERS = (
    *("gpt", "qwen-tied", "llama-mtp", "phi3", "gemma3"),
    *("Biased", "Lopsided", "mixtral", "gpt_oss", "deepseek_v3"),
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in DIFFERENT_LAYERS else pytest.mark.grid)
        for name in (*configs.MODELS, *configs.EXPERT_MODELS)
    ],
)
def test_layers_that_differ_only_in_name_are_measured_once(name: str) -> None:
    """Of 16 blocks at most four differ: full and windowed attention, dense MLPs and experts."""
    config = configs.config_of(configs.Case(model=name, layers=16))
    layers, data = models.build(config.model, Slicing()).layers(), configs.batch(0, ROWS)
    weight = torch.ones((), dtype=torch.float64)
    micro = MicroBatch(data["tokens"], data["labels"], torch.arange(ROWS), weight)
    tracer = Tracer(on_meta(micro), torch.float64, torch.float64, Counter())
    with mock.patch.object(tracer, "_run", mock.Mock(wraps=tracer._run)) as run:
        tracer.trace(layers)
    # embedding, head, further tokens' layers
    assert run.call_count <= 4 + len(layers) - 16


class Plain(nn.Module):
    """A block that knows nothing of threed.layers: its own attention, a cache, a counter, a buffer that it writes."""

    def __init__(self, name: str, hidden: int, heads: int) -> None:
        super().__init__()
        self.name, self.heads, self.cache, self.runs = name, heads, {}, 0  # type: ignore[var-annotated]
        self.norm = nn.LayerNorm(hidden, device=META)
        self.qkv = nn.Linear(hidden, 3 * hidden, device=META)
        self.out = nn.Linear(hidden, hidden, device=META)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        self.runs += 1
        self.seen += 1
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(0, 2)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        key = len(x), x.device
        if key not in self.cache:
            self.cache[key] = torch.full(
                (len(x), len(x)), -torch.inf, device=x.device, dtype=x.dtype
            ).triu(1)
        scores = torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + self.cache[key], -1)
        return x + F.dropout(self.out((scores @ v).transpose(0, 2).flatten(2)), 0.1, micro.training)


class Start(nn.Module):
    """Where activations come from."""

    name = "start"

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.table = nn.Embedding(53, hidden, device=META)

    def forward(self, x: None, micro: MicroBatch) -> Tensor:
        assert micro.tokens is not None
        return self.table(micro.tokens.t())


def tokens_of(rows: int = 2, seq: int = 8) -> MicroBatch:
    return MicroBatch(torch.arange(rows * seq).view(rows, seq), samples=torch.arange(rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_plain_module_keeps_and_computes_what_was_traced(dtype: torch.dtype) -> None:
    check_on_the_cpu([Start(16), Plain("a", 16, 2), Plain("b", 16, 4)], tokens_of(), dtype)


def test_counting_bytes_takes_the_same_work_with_many_tensors() -> None:
    """Per operation, because the reductions of a large model keep thousands of tensors."""

    def calls(count: int) -> int:
        seen = 0

        def see(*_: object) -> None:
            nonlocal seen
            seen += 1

        with Watch() as watch:
            kept = [torch.empty(1, device=META) for _ in range(count)]
            sys.setprofile(see)
            kept += [torch.zeros(2, device=META) for _ in range(50)]
            sys.setprofile(None)
        assert watch.most == watch.bytes() == 4 * count + 8 * 50
        del kept[0], kept[-1]
        assert (watch.most, watch.bytes()) == (4 * count + 8 * 50, 4 * count + 8 * 50 - 12)
        return seen

    calls(1)  # the first operations build tables
    assert calls(1000) < 1.1 * calls(10)


def tracer(traffic: Counter[str] | None = None) -> Tracer:
    return Tracer(
        on_meta(tokens_of()),
        torch.float32,
        torch.float32,
        Counter() if traffic is None else traffic,
    )


def test_a_traced_layer_is_what_it_was() -> None:
    """Parameters, buffers, attributes, caches, counters of traffic, and torch's generator."""
    layers = [Start(16), Plain("a", 16, 2)]
    before = copy.deepcopy(layers[1].__dict__)
    weights = [dict(layer.named_parameters()) for layer in layers]
    draws, traffic = torch.get_rng_state(), Counter({"tp": 7})
    assert tracer(traffic).trace(layers) == tracer(traffic).trace(layers)
    plain = layers[1]
    assert (plain.runs, plain.cache, float(plain.seen)) == (0, {}, 0.0)
    assert plain.__dict__.keys() == before.keys()
    assert plain.seen.device.type == "cpu"
    for layer, names in zip(layers, weights, strict=True):
        for name, param in layer.named_parameters():
            assert param is names[name]
            assert not hasattr(param, "sink")
            assert param.grad is None
            assert not param._post_accumulate_grad_hooks
    assert torch.equal(torch.get_rng_state(), draws)
    assert traffic == Counter({"tp": 7})


def test_tracing_leaves_the_counters_of_the_models_axes() -> None:
    config = config_of(MODELS["gpt"], tp=4, cut=True)
    topology = Topology.on_meta(Grid(tp=4), 2)
    topology.traffic.update(tp=5, dp=6)
    model = models.build(config.model, Slicing(topology.axis("tp"), True))
    costs = trace(model, model.layers(), config, topology)
    assert topology.traffic == Counter(tp=5, dp=6)
    assert costs[1].sent["tp"] > 0


# -------------------------------------------------------------------------------------------- how often, and where not


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the blocks of which a forward ran."""
    ran: list[str] = []
    real = Block.forward

    def spy(self: Block, x: Tensor, micro: MicroBatch) -> Tensor:
        ran.append(self.name)
        return real(self, x, micro)

    monkeypatch.setattr(Block, "forward", spy)
    return ran


def test_a_layer_built_as_one_before_it_is_not_run_again(forwards: list[str]) -> None:
    costs = traced(config_of({"layers": 30}))
    assert len(costs) == 32
    assert len(set(map(id, costs[1:-1]))) == 1
    assert forwards == ["blocks.0"]


def test_a_layer_that_is_computed_again_is_run_twice_and_is_another_one(
    forwards: list[str],
) -> None:
    traced(config_of({"layers": 6}, mode="full", every=3))
    assert forwards == ["blocks.0", "blocks.0", "blocks.1"]  # 0 and 3 are, the others are not


def test_layers_that_differ_in_anything_are_run_each(forwards: list[str]) -> None:
    """Sizes, an attribute, an input of another shape, whether a parameter is trained."""
    model = USERS_MODELS["hourglass"](
        users_cases.config_of(users_cases.Case("hourglass")).model, Slicing()
    )
    layers = model.layers()
    given = on_meta(
        MicroBatch(torch.zeros(2, 8, dtype=torch.int64), torch.zeros(2, 8, dtype=torch.int64))
    )
    Tracer(given, torch.float32, torch.float32, Counter()).trace(layers)
    assert forwards == ["blocks.0", "blocks.1", "blocks.2"]
    forwards.clear()
    alike = [model.block(f"blocks.{n}") for n in range(4)]
    alike[2].requires_grad_(False)
    alike[3].attention.rotary = 2e4
    Tracer(given, torch.float32, torch.float32, Counter()).trace([layers[0], *alike])
    assert forwards == ["blocks.0", "blocks.2", "blocks.3"]


def test_a_layer_may_refer_back_to_its_parent(forwards: list[str]) -> None:
    layers = [Start(16), Plain("plain", 16, 2), Plain("other", 16, 2)]
    for layer in layers[1:]:
        layer.__dict__["around"] = {"parent": [layer]}
    costs = tracer().trace(layers)
    assert costs[1] == costs[2] == tracer().trace([Start(16), Plain("plain", 16, 2)])[1]


class Peeks(Plain):
    """Reads a value on the host."""

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        return super().forward(x, micro) if x.sum().item() > 0 else x


class Asserts(Plain):
    """Wants what the batch does not have."""

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        assert micro.inputs is not None
        return super().forward(x, micro)


@pytest.mark.parametrize("kind", [Peeks, Asserts])
def test_a_layer_that_has_no_shapes_alone_is_refused_by_name(kind: type[Plain]) -> None:
    layers = [Start(16), Plain("plain", 16, 2), kind("odd", 16, 2)]
    with pytest.raises(
        TraceError, match=rf"odd \({kind.__name__}\) could not be run on the meta device"
    ) as caught:
        tracer().trace(layers)
    for words in ("a method costs(micro_batch)", "--parallel.partition uniform"):
        assert words in str(caught.value)
    assert not isinstance(caught.value.__cause__, TraceError)
