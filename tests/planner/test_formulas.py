"""The formulas of `tests/formulas.py` against published ones, and against what this package's layers hold and keep."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

from tests.formulas import (
    Cost,
    Decoder,
    block_cost,
    embedding_cost,
    fully_recomputed,
    head_cost,
    sliced_parameters,
    stage_parameters,
    train_flops_per_token,
    transformer_costs,
)
from threed.distributed.topology import Axis
from threed.layers.attention import Attention
from threed.layers.block import Block, Embedding
from threed.layers.loss import LanguageModelHead
from threed.layers.mlp import MLP, GatedMLP
from threed.layers.norm import LayerNorm, RMSNorm
from threed.layers.slicing import MicroBatch, Slicing

GPT3 = Decoder(
    hidden=12288, heads=96, ffn=4 * 12288, vocab=51200, seq=2048, positions=2048, element_bytes=2
)


def gpt(layers: int, hidden: int, heads: int, **more: int | bool) -> tuple[Decoder, list[Cost]]:
    """A GPT of arXiv 2104.04473, table 1: f = 4h, vocabulary 51200, 2048 learned positions, tied."""
    dims = dataclasses.replace(GPT3, hidden=hidden, heads=heads, ffn=4 * hidden, **more)
    return dims, transformer_costs(dims, layers)


# --- published formulas ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "h", "heads", "billions"),
    [
        (24, 2304, 24, 1.7),
        (36, 4096, 32, 7.5),
        (48, 8192, 64, 39.1),
        (80, 12288, 96, 145.6),
        (128, 25600, 160, 1008.0),
    ],
)
def test_parameters_are_those_of_2104_04473_equation_2(
    layers: int, h: int, heads: int, billions: float
) -> None:
    """P = 12 l h^2 (1 + 13/(12h) + (V+s)/(12 l h)), which leaves out the final norm's 2h."""
    count = stage_parameters(gpt(layers, h, heads)[1])
    assert count == 12 * layers * h * h + 13 * layers * h + (51200 + 2048) * h + 2 * h
    assert count / 1e9 == pytest.approx(billions, abs=0.051)


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_flops_are_those_of_2104_04473_equation_3(micro_batch: int) -> None:
    """96 B s l h^2 (1 + s/6h + V/16lh) with full recomputation of the blocks; 72 (.. V/12lh) without."""
    s, l, h, v = 2048, 80, 12288, 51200  # noqa: E741
    _, costs = gpt(l, h, 96, micro_batch=micro_batch)
    unit = micro_batch * s * l * h * h
    assert sum(cost.flops for cost in costs) == pytest.approx(
        72 * unit * (1 + s / (6 * h) + v / (12 * l * h)), rel=1e-12
    )
    recomputed = [
        fully_recomputed(cost) if cost.name.startswith("blocks") else cost for cost in costs
    ]
    expected = 96 * unit * (1 + s / (6 * h) + v / (16 * l * h))
    assert sum(cost.flops for cost in recomputed) == pytest.approx(expected, rel=1e-12)


def test_gpt3_takes_34_days_as_in_2104_04473_section_5_1() -> None:
    """300 B tokens on 1024 A100 at 140 TFLOP/s by 8TP/(nX), which drops attention and head from the FLOPs."""
    dims, costs = gpt(96, 12288, 96)
    days = 8 * stage_parameters(costs) * 300e9 / (1024 * 140e12) / 86400
    assert round(days) == 34
    flops = (
        sum(
            (fully_recomputed(cost) if cost.name.startswith("blocks") else cost).flops
            for cost in costs
        )
        / dims.seq
    )
    layers, h, s, v = 96, 12288, 2048, 51200
    assert flops / (96 * layers * h * h) == pytest.approx(
        1 + s / (6 * h) + v / (16 * layers * h), rel=1e-12
    )
    assert 1.02 < flops / (8 * stage_parameters(costs)) < 1.03


@pytest.mark.parametrize(
    ("layers", "h", "heads", "t", "devices", "batch", "seconds", "mfu"),
    [
        (48, 6144, 64, 8, 8, 4, 1.10, 0.415),
        (96, 12288, 96, 8, 64, 64, 13.75, 0.514),
        (128, 25600, 160, 8, 512, 512, 71.49, 0.563),
    ],
)
def test_mfu_is_that_of_2205_05198_table_5(
    layers: int, h: int, heads: int, t: int, devices: int, batch: int, seconds: float, mfu: float
) -> None:
    dims, _ = gpt(layers, h, heads, tensor=t)
    flops = train_flops_per_token(dims, layers) * batch * dims.seq
    assert flops / seconds / (devices * 312e12) == pytest.approx(mfu, abs=0.002)


def test_flops_per_token_are_6n_plus_12lads_as_in_2204_02311_appendix_b() -> None:
    dims = Decoder(
        hidden=64,
        heads=8,
        kv_heads=2,
        head_dim=16,
        ffn=96,
        vocab=100,
        seq=32,
        gated=True,
        bias=False,
    )
    matmul_weights = 3 * (64 * 16 * (2 * 8 + 2 * 2) + 3 * 64 * 96) + 64 * 100
    assert train_flops_per_token(dims, 3) == 6 * matmul_weights + 12 * 3 * 8 * 16 * 32
    sliced = dataclasses.replace(dims, tensor=4, tensor_rank=3, sequence=True, micro_batch=2)
    assert train_flops_per_token(sliced, 3) == train_flops_per_token(dims, 3)


@pytest.mark.parametrize("t", [1, 2, 8])
def test_activations_are_those_of_2205_05198_less_the_attention_scores(t: int) -> None:
    """sbh(10 + 24/t) without 5as/h: 16 bit, masks of one byte; statistics and row sums of 4 bytes come on top."""
    s, b, h, a = 2048, 4, 6144, 64
    dims = Decoder(
        hidden=h,
        heads=a,
        ffn=4 * h,
        vocab=1,
        seq=s,
        micro_batch=b,
        tensor=t,
        dropout=True,
        element_bytes=2,
    )
    extra = s * b * (4 * 4 + 4 * a // t)
    assert block_cost(dims).activation_bytes == s * b * h * 10 + s * b * h * 24 // t + extra
    assert fully_recomputed(block_cost(dims)).activation_bytes == 2 * s * b * h


def test_sequence_parallelism_slices_norms_and_masks_but_keeps_gathered_inputs() -> None:
    """34/t of 2205.05198 table 2, and the two inputs that the paper gathers once more instead: 4 (1 - 1/t)."""
    s, b, h, a, t = 2048, 4, 6144, 64, 8
    dims = Decoder(
        hidden=h, heads=a, ffn=4 * h, vocab=1, seq=s, micro_batch=b, tensor=t, sequence=True, dropout=True,
        element_bytes=2,
    )  # fmt: skip
    extra = s * b * (4 * 4 // t + 4 * a // t)
    assert (
        block_cost(dims).activation_bytes
        == s * b * h * 34 // t + s * b * h * 4 * (t - 1) // t + extra
    )
    assert block_cost(dims).output_bytes == 2 * s * b * h // t


@pytest.mark.parametrize("sequence", [False, True])
def test_tensor_parallel_bytes_are_8bsh_per_layer_as_in_2104_04473_section_3_2(
    sequence: bool,
) -> None:
    """8 b s h (t-1)/t elements per layer; embedding and head one all-reduce each, and 3 numbers per token."""
    s, b, h, t = 128, 4, 64, 4
    dims = Decoder(
        hidden=h, heads=8, ffn=256, vocab=1000, seq=s, micro_batch=b, tensor=t, sequence=sequence
    )
    assert block_cost(dims).tp_bytes == 8 * b * s * h * (t - 1) // t * 4
    assert embedding_cost(dims).tp_bytes == 2 * b * s * h * (t - 1) // t * 4
    assert head_cost(dims).tp_bytes == 2 * b * s * h * (t - 1) // t * 4 + 3 * 4 * s * b * (t - 1)
    alone = dataclasses.replace(dims, tensor=1)
    assert [cost.tp_bytes for cost in transformer_costs(alone, 1)] == [0, 0, 0]
    assert [cost.partial_elements for cost in transformer_costs(alone, 1)] == [0, 0, 0]


def test_partial_gradients_of_tensor_ranks() -> None:
    dims = Decoder(
        hidden=64,
        heads=8,
        kv_heads=2,
        ffn=128,
        vocab=100,
        seq=16,
        positions=16,
        tensor=4,
        qk_norm=True,
    )
    # one kv head with its bias, on two ranks: an all-reduce sends 2n (2-1)/2 elements
    shared_kv = 2 * 8 * (64 + 1)
    assert block_cost(dims).partial_elements == 2 * (2 * 8) * 3 // 4 + shared_kv
    assert embedding_cost(dims).partial_elements == head_cost(dims).partial_elements == 0
    cut = dataclasses.replace(dims, sequence=True)
    assert block_cost(cut).partial_elements == 2 * (4 * 64 + 2 * 64 + 2 * 8) * 3 // 4 + shared_kv
    assert embedding_cost(cut).partial_elements == 2 * 16 * 64 * 3 // 4
    assert head_cost(cut).partial_elements == 2 * 2 * 64 * 3 // 4


@pytest.mark.parametrize("t", [1, 2, 3, 4])
def test_tensor_ranks_together_hold_the_model_and_do_its_work(t: int) -> None:
    """Also where t divides neither the vocabulary nor f; what every rank holds whole is counted once."""
    whole = Decoder(
        hidden=48,
        heads=12,
        ffn=130,
        vocab=257,
        seq=8,
        tied=False,
        bias=False,
        norm="rmsnorm",
        gated=True,
    )
    ranks = [
        transformer_costs(dataclasses.replace(whole, tensor=t, tensor_rank=rank), 2)
        for rank in range(t)
    ]
    replicated = 5 * 48
    total = stage_parameters(transformer_costs(whole, 2))
    assert sum(stage_parameters(rank) - replicated for rank in ranks) + replicated == total
    assert sum(cost.flops for rank in ranks for cost in rank) == sum(
        cost.flops for cost in transformer_costs(whole, 2)
    )


def test_tied_parameters_count_once_on_a_stage_and_in_the_model() -> None:
    dims = Decoder(hidden=8, heads=2, ffn=16, vocab=50, seq=4)
    costs = transformer_costs(dims, 2)
    assert [cost.name for cost in costs] == ["embedding", "blocks.0", "blocks.1", "head"]
    untied = transformer_costs(dataclasses.replace(dims, tied=False), 2)
    assert stage_parameters(untied) - stage_parameters(costs) == 50 * 8
    assert stage_parameters(costs[:2]) + stage_parameters(costs[2:]) == stage_parameters(untied)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("t", [1, 4])
def test_operations_that_are_computed_again(gated: bool, t: int) -> None:
    """In elements: attention gives back its output, the activation f (2 f gated), a norm what follows it."""
    s, b, h, f = 128, 4, 64, 256
    dims = Decoder(
        hidden=h,
        heads=8,
        ffn=f,
        vocab=100,
        seq=s,
        micro_batch=b,
        tensor=t,
        gated=gated,
        sequence=True,
    )
    plain, tokens = block_cost(dims), s * b
    saved = {
        "attention": tokens * (h // t + 8 // t),
        "activation": tokens * f // t * (2 if gated else 1),
        "norm": 2 * tokens * h + 2 * 2 * tokens // t,
    }
    for op, elements in saved.items():
        again = block_cost(dataclasses.replace(dims, recompute=(op,)))
        assert plain.activation_bytes - again.activation_bytes == 4 * elements, op
        assert again.flops_backward - plain.flops_backward == (
            4 * tokens * s * h // t if op == "attention" else 0
        )
        assert again.tp_bytes - plain.tp_bytes == (
            2 * tokens * h * 4 * (t - 1) // t if op == "norm" else 0
        )
    both = block_cost(dataclasses.replace(dims, recompute=tuple(saved)))
    assert plain.activation_bytes - both.activation_bytes == 4 * sum(saved.values())


# --- what the layers really hold and keep ----------------------------------------------------------------------------

BASE = Decoder(hidden=32, heads=4, ffn=100, vocab=50, seq=16, micro_batch=3, positions=16)
LLAMA = dataclasses.replace(
    BASE, norm="rmsnorm", gated=True, rotary=True, bias=False, positions=0, kv_heads=2, tied=False
)
MODELS = {
    "gpt": BASE,
    "gpt with dropout, one sequence": dataclasses.replace(BASE, dropout=True, micro_batch=1),
    "llama": LLAMA,
    "qwen3": dataclasses.replace(LLAMA, qk_norm=True, head_dim=16),
    "qk norms without rotary": dataclasses.replace(BASE, qk_norm=True, norm="rmsnorm"),
}
DTYPES = {8: torch.float64, 4: torch.float32, 2: torch.bfloat16}


def build_layers(dims: Decoder) -> dict[str, nn.Module]:
    """The pipeline layers of these dimensions, on their tensor rank."""
    h = dims.hidden
    slicing = Slicing(Axis("tp", tuple(range(dims.tensor)), dims.tensor_rank), dims.sequence)
    norm = RMSNorm if dims.norm == "rmsnorm" else LayerNorm
    attention = Attention(
        "a", h, dims.heads, slicing, kv_heads=dims.kv_heads or None, head_dim=dims.head_dim or None, bias=dims.bias,
        rotary=1e4 if dims.rotary else None, qk_norm=dims.qk_norm,
    )  # fmt: skip
    mlp = (GatedMLP if dims.gated else MLP)("m", h, dims.ffn, slicing, bias=dims.bias)
    dropout = 0.1 * dims.dropout
    layers = {
        "embedding": Embedding(
            "e", dims.vocab, h, slicing, positions=dims.positions or None, dropout=dropout
        ),
        "block": Block(
            "b",
            (norm("n1", h, slicing), norm("n2", h, slicing)),
            attention,
            mlp,
            slicing,
            dropout=dropout,
        ),
        "head": LanguageModelHead("h", "w", norm("n", h, slicing), dims.vocab, h, slicing),
    }
    for layer in layers.values():
        layer.to_empty(device="cpu").to(DTYPES[dims.element_bytes])
        for param in layer.parameters():
            nn.init.normal_(param, std=0.1)
    return layers


def bytes_kept(run: Callable[[], Tensor], not_counted: Iterable[Tensor]) -> int:
    """Bytes of all storages that autograd saves while `run` runs, each once."""
    storages: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    for tensor in not_counted:
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    assert result.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


@pytest.mark.parametrize("name", MODELS)
def test_parameters_equal_those_of_the_layers(name: str) -> None:
    costs = {
        "embedding": embedding_cost(MODELS[name]),
        "block": block_cost(MODELS[name]),
        "head": head_cost(MODELS[name]),
    }
    for part, layer in build_layers(MODELS[name]).items():
        assert costs[part].parameters == sum(param.numel() for param in layer.parameters()), part


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_sizes_are_those_of_the_layers_parameters(name: str, tensor: int) -> None:
    """On every tensor rank, where 4 share 2 kv heads, and where the vocabulary of 50 is cut unevenly."""
    for rank in range(tensor):
        dims = dataclasses.replace(MODELS[name], tensor=tensor, tensor_rank=rank)
        costs = {
            "embedding": embedding_cost(dims),
            "block": block_cost(dims),
            "head": head_cost(dims),
        }
        for part, layer in build_layers(dims).items():
            sizes = sorted(param.numel() for param in layer.parameters())
            assert sorted(costs[part].sizes) == sizes, part
            assert costs[part].largest == sizes[-1]
            assert costs[part].backward_reads == getattr(layer, "backward_reads_weights", True)
            for resident in (0, sizes[0] + 1, sizes[-1], sizes[-1] + 1):
                assert costs[part].sliced(resident) == sum(
                    size for size in sizes if size >= resident
                )


def test_sliced_parameters_count_a_shared_table_once() -> None:
    dims = Decoder(hidden=8, heads=2, ffn=16, vocab=50, seq=4, positions=4)
    costs = transformer_costs(dims, 2)
    assert sliced_parameters(costs, 0) == stage_parameters(costs)
    weights = 8 * 24 + 8 * 8 + 2 * 8 * 16
    assert sliced_parameters(costs, 64) == 2 * weights + 50 * 8
    assert sliced_parameters(costs[:2], 33) == weights + 50 * 8
    assert sliced_parameters(costs, 400) == 50 * 8
    assert sliced_parameters(costs, 401) == 0


@pytest.mark.parametrize("element_bytes", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_activation_bytes_equal_what_autograd_keeps(name: str, element_bytes: int) -> None:
    dims = dataclasses.replace(MODELS[name], element_bytes=element_bytes)
    layers = build_layers(dims)
    s, b, h = dims.seq, dims.micro_batch, dims.hidden
    x = torch.randn(s, b, h, dtype=DTYPES[element_bytes], requires_grad=True)
    tokens, labels = torch.randint(0, dims.vocab, (2, b, s))
    micro = MicroBatch(tokens.clone(), labels.clone(), torch.arange(b), torch.ones(()))
    costs = {"embedding": embedding_cost(dims), "block": block_cost(dims), "head": head_cost(dims)}
    # Outside the formula: one number, the loss's weight; the cos and sin tables, which all blocks share.
    shared = {
        "embedding": 0,
        "head": max(4, element_bytes),
        "block": 2 * s * dims.head_size * element_bytes * dims.rotary,
    }
    for part, layer in layers.items():
        kept = bytes_kept(
            lambda layer=layer, part=part: layer(None if part == "embedding" else x, micro),
            layer.parameters(),
        )
        # LayerNorm's statistics of 16-bit inputs are 16-bit on the CPU and fp32 on GPUs, as planned.
        narrower = 2 * s * b * 2 * {"embedding": 0, "block": 2, "head": 1}[part]
        narrower *= element_bytes == 2 and dims.norm == "layernorm"
        assert costs[part].activation_bytes == kept - shared[part] + narrower, part


def test_a_fused_rms_norm_keeps_its_input_and_one_number_per_row() -> None:
    composed, fused = (
        dataclasses.replace(LLAMA, element_bytes=2, fused_norm=fused) for fused in (False, True)
    )
    saved = block_cost(composed).activation_bytes - block_cost(fused).activation_bytes
    # two norms: fp32 copy and normalized input, instead of the 16-bit input
    assert saved == 2 * 16 * 3 * 32 * (4 + 4 - 2)
