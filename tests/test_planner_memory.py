"""Bytes per rank and bytes sent, against the figures of ZeRO and Megatron-LM."""

from __future__ import annotations

import pytest

from threed.planner import (
    Decoder,
    LayerCost,
    balanced,
    communication_bytes,
    data_parallel_bytes,
    optimizer_bytes,
    rank_bytes,
    regime,
    stage_parameters,
    transformer_costs,
)
from threed.schedules import Costs, build, simulate


def states(parameters: float, zero_stage: int, shards: int, param_bytes: int = 2, grad_bytes: int = 2) -> float:
    """Gigabytes of model states alone."""
    parts = rank_bytes(
        [], live=0, parameters=int(parameters), param_bytes=param_bytes, grad_bytes=grad_bytes, zero_stage=zero_stage,
        shards=shards,
    )  # fmt: skip
    assert parts["peak"] == parts["parameters"] + parts["gradients"] + parts["optimizer"]
    return parts["peak"] / 1e9


def test_zero_figure_1_of_1910_02054() -> None:
    """7.5 B parameters, N = 64, fp16 parameters and gradients, K = 12: 120 GB without ZeRO, 31.4 GB at stage 1."""
    assert states(7.5e9, 0, 64) == 120.0
    assert states(7.5e9, 1, 64) == pytest.approx(31.4, abs=0.01)


@pytest.mark.parametrize(
    ("billions", "shards", "gigabytes"),
    [(7.5, 1, 120), (7.5, 4, 52.5), (7.5, 16, 35.6), (7.5, 64, 31.4), (7.5, 256, 30.4), (7.5, 1024, 30.1),
     (128, 64, 536), (1000, 1024, 4011)],
)  # fmt: skip
def test_zero_table_1_of_1910_02054_stage_1(billions: float, shards: int, gigabytes: float) -> None:
    assert states(billions * 1e9, 1, shards) == pytest.approx(gigabytes, rel=0.005)


def test_states_are_k_plus_4_and_4_plus_k_over_n_bytes_per_parameter() -> None:
    psi, n, k = 1_000_003, 8, 12
    zero0 = rank_bytes([], live=0, parameters=psi, param_bytes=2, grad_bytes=2, shards=n)
    assert zero0["peak"] == (4 + k) * psi
    zero1 = rank_bytes([], live=0, parameters=psi, param_bytes=2, grad_bytes=2, shards=n, zero_stage=1)
    assert 0 <= zero1["peak"] - (4 + k / n) * psi < k  # the last slice is padded to a whole element


@pytest.mark.parametrize(
    ("param_bytes", "grad_bytes", "whole", "spread"),
    [(2, 2, 4, 12), (2, 4, 6, 12), (4, 4, 8, 8), (8, 8, 16, 16)],
)
def test_regimes_of_bytes_per_parameter(param_bytes: int, grad_bytes: int, whole: int, spread: int) -> None:
    """ZeRO's 4 + 12/N; Megatron's distributed optimizer, bf16 with fp32 gradients 6 + 12/N and fp32 8 + 8/N; fp64."""
    assert optimizer_bytes(param_bytes) == spread
    assert regime(param_bytes, grad_bytes, 1, 16).startswith(f"{whole} + {spread}/16 bytes per parameter")
    assert regime(param_bytes, grad_bytes, 0, 16).startswith(f"{whole + spread} bytes per parameter")
    assert states(1e9, 1, 10, param_bytes, grad_bytes) == pytest.approx(whole + spread / 10)


@pytest.mark.parametrize("stage", [2, 3, 4])
def test_zero_stages_that_are_not_there_are_refused(stage: int) -> None:
    with pytest.raises(ValueError, match=rf"zero\.stage {stage} is not in this version"):
        states(1e9, stage, 2)
    with pytest.raises(ValueError, match=rf"zero\.stage {stage} is not in this version"):
        data_parallel_bytes(10, 2, 4, 4, stage)
    with pytest.raises(ValueError, match=rf"zero\.stage {stage} is not in this version"):
        regime(2, 2, stage, 4)


def test_first_stage_of_1f1b_keeps_p_microbatches_as_in_2205_05198_section_4_2_3() -> None:
    """Stage 0 of p holds p micro-batches of l/p layers: the activations of all l layers, whatever p is."""
    costs = transformer_costs(Decoder(hidden=64, heads=4, ffn=256, vocab=100, seq=16), 8)
    blocks = costs[1:-1]
    for p in (1, 2, 4, 8):
        live = simulate(build("1f1b", p, 8), Costs(1, 1, 1)).peak_activations[0]
        first = rank_bytes(blocks[: 8 // p], live=live, param_bytes=4, grad_bytes=4)
        assert first["activations"] == 8 * blocks[0].activation_bytes


def test_parts_add_up_and_buffers_are_named() -> None:
    layers = [
        LayerCost("a", 1000, 1, 2, 300, 40, working_bytes=70),
        LayerCost("b", 500, 1, 2, 100, 40, working_bytes=90),
    ]
    parts = rank_bytes(
        layers, live=2.5, param_bytes=2, grad_bytes=4, zero_stage=1, shards=4, bucket_bytes=1024, message_bytes=80
    )
    assert parts == {
        "parameters": 3000,
        "gradients": 6000,
        "optimizer": 375 * 12,
        "activations": 1000,
        "buffers": 2 * 1024 + 80 + 90,
        "peak": 3000 + 6000 + 4500 + 1000 + 2218,
    }
    alone = rank_bytes(layers, live=1, param_bytes=2, grad_bytes=4, zero_stage=1, bucket_bytes=1024)
    assert alone["buffers"] == 90  # one rank reduces nothing
    small = rank_bytes(layers, live=1, param_bytes=2, grad_bytes=4, shards=2, bucket_bytes=10**9)
    assert small["buffers"] == 2 * 6000 + 90  # buckets are no larger than what they hold


@pytest.mark.parametrize("shards", [1, 2, 3, 64])
def test_data_parallel_volume_is_2_psi_as_in_1910_02054_section_7(shards: int) -> None:
    psi = 3 * 64 * 1000
    assert data_parallel_bytes(psi, shards, 4, 4, 0) == 2 * psi * 4 * (shards - 1) // shards
    assert data_parallel_bytes(psi, shards, 4, 4, 1) == 2 * psi * 4 * (shards - 1) // shards
    assert data_parallel_bytes(psi, shards, 2, 4, 1) == psi * (4 + 2) * (shards - 1) // shards


def test_bytes_of_a_2x2x2_step_by_hand() -> None:
    """pp = dp = tp = 2, 3 micro-batches, fp32, sequence parallel, tied: every term of every axis."""
    b, s, h, v, l, m = 4, 8, 16, 64, 4, 3  # noqa: E741
    dims = Decoder(
        hidden=h, heads=4, ffn=32, vocab=v, seq=s, micro_batch=b, positions=s, tensor=2, sequence=True
    )  # fmt: skip
    costs = transformer_costs(dims, l)
    cut = balanced([cost.flops for cost in costs], 2)
    first, last = (costs[part.start : part.stop] for part in cut)
    common = {"microbatches": m, "shards": 2, "zero_stage": 1, "tied_elsewhere": True}
    message = b * s // 2 * h * 4
    sent_first = communication_bytes(first, last=False, **common)
    sent_last = communication_bytes(last, input_bytes=first[-1].output_bytes, **common)

    blocks = len(first) - 1
    per_microbatch = (2 + 8 * blocks) * b * s * h // 2 * 4
    partial = (s * h + blocks * 6 * h) // 2 * 4  # slices of positions, 2 norms and 2 biases a block
    assert sent_first["tp"] == m * per_microbatch + partial
    blocks = len(last) - 1
    per_microbatch = (2 + 8 * blocks) * b * s * h // 2 * 4 + 3 * 4 * b * s
    assert sent_last["tp"] == m * per_microbatch + (2 * h + blocks * 6 * h) // 2 * 4

    tied = v // 2 * h // 2 * 4  # this rank's slice of its half of the table, to the other stage
    assert sent_first["pp"] == sent_last["pp"] == m * message + tied
    assert sent_first["dp"] == 2 * stage_parameters(first) * 4 // 2
    assert sent_last["dp"] == 2 * stage_parameters(last) * 4 // 2
    assert sent_first["cp"] == sent_last["cp"] == 0


def test_one_rank_sends_nothing() -> None:
    costs = transformer_costs(Decoder(hidden=16, heads=4, ffn=32, vocab=64, seq=8), 2)
    assert communication_bytes(costs, microbatches=5) == {"tp": 0, "pp": 0, "dp": 0, "cp": 0}
