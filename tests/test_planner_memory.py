"""Bytes per rank and bytes sent, against the figures of ZeRO and Megatron-LM."""

from __future__ import annotations

from dataclasses import replace

import pytest

from threed.planner import (
    Decoder,
    LayerCost,
    balanced,
    block_cost,
    communication_bytes,
    data_parallel_bytes,
    fully_recomputed,
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
    """7.5 B parameters, N = 64, fp16 parameters and gradients, K = 12: 120, 31.4, 16.6 and 1.9 GB."""
    assert states(7.5e9, 0, 64) == 120.0
    for stage, gigabytes in ((1, 31.4), (2, 16.6), (3, 1.9)):
        assert states(7.5e9, stage, 64) == pytest.approx(gigabytes, abs=0.05)


@pytest.mark.parametrize(
    ("billions", "shards", "gigabytes"),
    [(7.5, 1, (120, 120, 120)), (7.5, 4, (52.5, 41.3, 30)), (7.5, 64, (31.4, 16.6, 1.88)), (128, 64, (536, 284, 32)),
     (1000, 1024, (4011, 2013, 15.6))],
)  # fmt: skip
def test_zero_table_1_of_1910_02054(billions: float, shards: int, gigabytes: tuple[float, ...]) -> None:
    for stage, expected in enumerate(gigabytes, start=1):
        assert states(billions * 1e9, stage, shards) == pytest.approx(expected, rel=0.005)


def test_zero_table_1_of_1910_02054_where_it_rounds_to_two_digits() -> None:
    for stage, gigabytes in ((1, 30.1), (2, 15.1), (3, 0.12)):
        assert states(7.5e9, stage, 1024) == pytest.approx(gigabytes, abs=0.013)


def test_states_are_4_plus_k_bytes_per_parameter_of_which_each_stage_spreads_more() -> None:
    psi, n, k = 1_000_003, 8, 12
    expected = {0: 4 + k, 1: 4 + k / n, 2: 2 + (2 + k) / n, 3: (4 + k) / n}
    for stage, per_parameter in expected.items():
        held = rank_bytes([], live=0, parameters=psi, param_bytes=2, grad_bytes=2, shards=n, zero_stage=stage)
        assert 0 <= held["peak"] - per_parameter * psi < 4 + k  # the last slice is padded to a whole element


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


def test_the_regime_is_said_in_words() -> None:
    kinds = "2-byte parameters, 4-byte gradients, 12 bytes of optimizer state"
    two, three, alone = (regime(2, 4, z, n, replicas=2, resident=1000) for z, n in ((2, 64), (3, 64), (3, 1)))
    assert two == (
        f"2 + 16/64 bytes per parameter ({kinds}; ZeRO-2: gradients and optimizer state sliced over 64 ranks in each "
        "of 2 groups)"
    )
    assert three == (
        f"18/64 bytes per parameter ({kinds}; ZeRO-3: parameters, gradients and optimizer state sliced over 64 ranks "
        "in each of 2 groups; parameters under 1000 elements stay whole)"
    )
    assert alone == f"18 bytes per parameter ({kinds}; ZeRO-3 has no other rank to share with)"


@pytest.mark.parametrize(("moments", "bytes_of_states"), [(2, 12), (1, 8), (0, 4)])
def test_optimizers_with_fewer_moments_take_less(moments: int, bytes_of_states: int) -> None:
    """AdamW; SGD with momentum and Lion; plain SGD: each with fp32 master weights beside 16-bit parameters."""
    assert optimizer_bytes(2, moments) == bytes_of_states
    held = rank_bytes([], live=0, parameters=800, param_bytes=2, grad_bytes=4, zero_stage=3, shards=8, moments=moments)
    assert held["optimizer"] == 100 * bytes_of_states


@pytest.mark.parametrize("stage", [-1, 4])
def test_zero_stages_that_are_not_there_are_refused(stage: int) -> None:
    with pytest.raises(ValueError, match=rf"no zero\.stage {stage}"):
        states(1e9, stage, 2)
    with pytest.raises(ValueError, match=rf"no zero\.stage {stage}"):
        data_parallel_bytes(10, 2, 4, 4, stage)
    with pytest.raises(ValueError, match=rf"no zero\.stage {stage}"):
        regime(2, 2, stage, 4)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_shard_group_of_one_rank_is_zero_0(stage: int) -> None:
    """Whether there is one data rank, or every rank is a shard group of its own."""
    costs = transformer_costs(Decoder(hidden=64, heads=4, ffn=256, vocab=100, seq=16), 2)
    common = {"live": 1, "param_bytes": 4, "grad_bytes": 4, "bucket_bytes": 1000}
    for dp in (1, 4):
        assert rank_bytes(costs, zero_stage=stage, replicas=dp, **common) == rank_bytes(costs, shards=dp, **common)
        sent = communication_bytes(costs, microbatches=3, zero_stage=stage, replicas=dp)
        assert sent == communication_bytes(costs, microbatches=3, shards=dp)


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


def test_buffers_of_stages_2_and_3_do_not_grow_with_the_model() -> None:
    """Two buckets arrive, two leave and one fills, and one weight's gradient; under stage 3 two layers are whole."""
    dims = Decoder(hidden=64, heads=4, ffn=256, vocab=100, seq=16, tied=False)
    common = {"live": 1, "param_bytes": 2, "grad_bytes": 4, "shards": 4, "bucket_bytes": 4096}
    for layers in (4, 8):
        costs = transformer_costs(dims, layers)
        for stage, gathered in ((2, 0), (3, 2 * costs[1].parameters)):
            held = rank_bytes(costs, zero_stage=stage, **common)
            working = max(cost.working_bytes for cost in costs)
            assert held["buffers"] == working + 5 * 4096 + 64 * 256 * 4 + gathered * 2
    everything = rank_bytes(costs, zero_stage=3, prefetch=99, **common)
    assert everything["buffers"] - held["buffers"] == 2 * (stage_parameters(costs) - gathered)


def test_small_parameters_stay_whole_under_stage_3() -> None:
    """Their gradients and optimizer states are slices all the same."""
    layer = LayerCost("a", 1000, 1, 2, 0, 0, sizes=(900, 60, 40))
    common = {"live": 0, "param_bytes": 2, "grad_bytes": 4, "zero_stage": 3, "shards": 4}
    for resident, whole in ((0, 0), (40, 0), (41, 40), (61, 100), (901, 1000)):
        held = rank_bytes([layer], resident=resident, **common)
        assert held["parameters"] == 2 * (whole + (1000 - whole) // 4)
        assert held["gradients"] + held["optimizer"] == 250 * (4 + 12)
        assert held["buffers"] == 900 * 4 + (1000 - whole) * 2  # the largest gradient, the gathered layer


@pytest.mark.parametrize("shards", [1, 2, 3, 64])
def test_data_parallel_volume_is_2_psi_as_in_1910_02054_section_7(shards: int) -> None:
    psi = 3 * 64 * 1000
    assert data_parallel_bytes(psi, shards, 4, 4, 0) == 2 * psi * 4 * (shards - 1) // shards
    assert data_parallel_bytes(psi, shards, 4, 4, 1) == 2 * psi * 4 * (shards - 1) // shards
    assert data_parallel_bytes(psi, shards, 2, 4, 1) == psi * (4 + 2) * (shards - 1) // shards
    assert data_parallel_bytes(psi, shards, 4, 4, 2) == 2 * psi * 4 * (shards - 1) // shards
    assert data_parallel_bytes(psi, shards, 4, 4, 3) == 3 * psi * 4 * (shards - 1) // shards


def test_stages_2_and_3_pay_for_every_microbatch() -> None:
    """Stage 2 (k + 1) Psi; stage 3 k 3 Psi; stages 0 and 1 2 Psi, whatever k is."""
    psi, n, k = 64 * 1000, 4, 5
    part = psi * 4 * (n - 1) // n
    moved = [data_parallel_bytes(psi, n, 4, 4, stage, microbatches=k) for stage in range(4)]
    assert moved == [2 * part, 2 * part, (k + 1) * part, 3 * k * part]


@pytest.mark.parametrize(("stage", "reductions", "gathered"), [(1, 1, 1), (2, 3, 1), (3, 3, 6)])
def test_groups_of_shards_all_reduce_their_slices_once(stage: int, reductions: int, gathered: int) -> None:
    """8 data ranks as 2 groups of 4 (MiCS, arXiv 2205.00119, section 3.4; FSDP's hybrid sharding)."""
    psi, s, r = 64 * 1000, 4, 2
    sent = data_parallel_bytes(psi, s, 2, 4, stage, replicas=r, microbatches=3)
    scattered, own = psi * 4 * (s - 1) // s, psi // s * 4
    assert sent == reductions * scattered + 2 * own * (r - 1) // r + gathered * psi * 2 * (s - 1) // s
    assert data_parallel_bytes(psi, s, 2, 4, 0, replicas=r) == 2 * psi * 4 * (s * r - 1) // (s * r)


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

    # Under ZeRO-3 the last stage turns from F to B and back: one unit stays whole at each end. Norms and biases, fewer
    # than h f / 2 elements, stay whole and are gathered once. The first stage's embedding is gathered in forwards only.
    plan, stage3 = build("1f1b", 2, m), {**common, "zero_stage": 3, "resident": 128}
    whole_first = communication_bytes(first, last=False, actions=plan.ranks[0], **stage3)
    whole_last = communication_bytes(last, input_bytes=message, actions=plan.ranks[1], **stage3)
    assert [whole_first[axis] - sent_first[axis] for axis in ("tp", "pp")] == [0, 0]
    block, table = sum(size for size in first[1].sizes if size >= 128), v // 2 * h
    small = stage_parameters(first) - (len(first) - 1) * block - table - s * h
    # F0 F1 B0 F2 B1 B2: before B0 and B1 the last layer is whole; F2's first one, the embedding, is not.
    gathered = m * (table + s * h) + (2 * m * (len(first) - 1) - 2) * block + small
    assert whole_first["dp"] == (m * stage_parameters(first) + gathered) * 4 // 2
    # F0 B0 F1 B1 F2 B2: the head m times, the first block m + 1 times, the others 2 m times.
    small = stage_parameters(last) - (len(last) - 1) * block - table
    gathered = m * table + (m + 1 + 2 * m * (len(last) - 2)) * block + small
    assert whole_last["dp"] == (m * stage_parameters(last) + gathered) * 4 // 2


def test_one_rank_sends_nothing() -> None:
    costs = transformer_costs(Decoder(hidden=16, heads=4, ffn=32, vocab=64, seq=8), 2)
    assert communication_bytes(costs, microbatches=5) == {"tp": 0, "pp": 0, "dp": 0, "cp": 0}


def test_inputs_that_are_kept_by_the_formulas_of_1910_02054_section_6_1() -> None:
    """s b h of every layer; a t-th of it as slices; none where they are elsewhere, but for what is under way."""
    s, b, h, t = 128, 4, 64, 4
    cost = block_cost(Decoder(hidden=h, heads=8, ffn=256, vocab=100, seq=s, micro_batch=b, tensor=t, element_bytes=2))
    common = {"param_bytes": 2, "grad_bytes": 4}
    whole, sliced = (fully_recomputed(cost, n) for n in (1, t))
    away = fully_recomputed(cost, t, buffers=6)
    assert rank_bytes([whole] * 3, live=5, **common)["activations"] == 5 * 3 * 2 * s * b * h
    assert rank_bytes([sliced] * 3, live=5, **common)["activations"] == 5 * 3 * 2 * s * b * h // t
    held = rank_bytes([away] * 3, live=5, **common)
    assert held["activations"] == 0
    assert held["offloaded"] == 5 * 3 * 2 * s * b * h // t
    assert held["peak"] == sum(held[part] for part in ("parameters", "gradients", "optimizer", "buffers"))
    assert whole.working_bytes == cost.working_bytes + cost.activation_bytes
    assert away.working_bytes - sliced.working_bytes == 6 * 2 * s * b * h // t
    assert sliced.tp_bytes - whole.tp_bytes == 2 * s * b * h * (t - 1) // t
    assert "offloaded" not in rank_bytes([whole], live=5, **common)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("t", [1, 4])
def test_operations_that_are_computed_again(gated: bool, t: int) -> None:
    """In elements: attention gives back its output, the activation f (2 f gated), a norm what follows it."""
    s, b, h, f = 128, 4, 64, 256
    dims = Decoder(hidden=h, heads=8, ffn=f, vocab=100, seq=s, micro_batch=b, tensor=t, gated=gated, sequence=True)
    plain, tokens = block_cost(dims), s * b
    saved = {
        "attention": tokens * (h // t + 8 // t),
        "activation": tokens * f // t * (2 if gated else 1),
        "norm": 2 * tokens * h + 2 * 2 * tokens // t,
    }
    for op, elements in saved.items():
        again = block_cost(replace(dims, recompute=(op,)))
        assert plain.activation_bytes - again.activation_bytes == 4 * elements, op
        assert again.flops_backward - plain.flops_backward == (4 * tokens * s * h // t if op == "attention" else 0)
        assert again.tp_bytes - plain.tp_bytes == (2 * tokens * h * 4 * (t - 1) // t if op == "norm" else 0)
    both = block_cost(replace(dims, recompute=tuple(saved)))
    assert plain.activation_bytes - both.activation_bytes == 4 * sum(saved.values())
