"""Bytes per rank and bytes sent, as forecast from real layouts, against the figures of ZeRO and Megatron-LM."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import pytest

from tests import formulas
from tests.formulas import (
    Decoder,
    block_cost,
    communication_bytes,
    stage_parameters,
    transformer_costs,
)
from threed.config import Config
from threed.config.resolution import resolve
from threed.memory.sizes import optimizer_bytes, regime
from threed.pipeline.trace import LayerCost, Pass
from threed.planner import memory_estimate
from threed.planner.forecast import Forecast, RankForecast
from threed.schedules import build

STATES = ("parameters", "gradients", "optimizer")


def forecast(world: int, **groups: Mapping[str, Any]) -> Forecast:
    """Of a small GPT whose sizes need no padding up to 4 data ranks; two rows a micro-batch, two of these."""
    base: dict[str, dict[str, Any]] = {
        "model": {"layers": 2, "hidden": 128, "heads": 4, "seq": 16, "vocab": 64},
        "train": {"global_batch": 4 * world, "micro_batch": 2, "steps": 10},
        "zero": {"resident": 0},
        "parallel": {"sequence": False},
    }
    for name, values in groups.items():
        base[name] = {**base.get(name, {}), **values}
    config = Config.model_validate(base)
    return Forecast.of(resolve(config, 64, world), world)


def first(world: int, **groups: Mapping[str, Any]) -> RankForecast:
    return forecast(world, **groups).ranks[0]


# ------------------------------------------------------------------------------------------------------- model states


@functools.cache
def per_parameter(
    stage: int, shards: int, dtype: str = "bf16", grads: str = "bf16", optimizer: str = "adamw"
) -> float:
    """Bytes of model states that a rank holds for each parameter of a model of 0.6 B, times the shards."""
    model = {"layers": 2, "hidden": 4096, "heads": 32, "vocab": 51200}
    found = forecast(
        shards, model=model, precision={"dtype": dtype, "grad_dtype": grads}, zero={"stage": stage, "bucket_mib": 8192},
        optim={"name": optimizer},
    )  # fmt: skip
    return sum(found.ranks[0].bytes[part] for part in STATES) / found.parameters


def states(stage: int, shards: int, psi: float) -> float:
    """Gigabytes of model states of a rank with its part of `psi` parameters."""
    return per_parameter(stage, shards) * psi / 1e9


def test_zero_figure_1_of_1910_02054() -> None:
    """7.5 B parameters, N = 64, 16-bit parameters and gradients, K = 12: 120, 31.4, 16.6 and 1.9 GB."""
    assert states(0, 64, 7.5e9) == 120.0
    for stage, gigabytes in ((1, 31.4), (2, 16.6), (3, 1.9)):
        assert states(stage, 64, 7.5e9) == pytest.approx(gigabytes, abs=0.05)


@pytest.mark.parametrize(
    ("billions", "shards", "gigabytes"),
    [(7.5, 1, (120, 120, 120)), (7.5, 4, (52.5, 41.3, 30)), (7.5, 64, (31.4, 16.6, 1.88)), (128, 64, (536, 284, 32)),
     (1000, 1024, (4011, 2013, 15.6))],
)  # fmt: skip
def test_zero_table_1_of_1910_02054(
    billions: float, shards: int, gigabytes: tuple[float, ...]
) -> None:
    for stage, expected in enumerate(gigabytes, start=1):
        assert states(stage, shards, billions * 1e9) == pytest.approx(expected, rel=0.005)


def test_zero_table_1_of_1910_02054_where_it_rounds_to_two_digits() -> None:
    for stage, gigabytes in ((1, 30.1), (2, 15.1), (3, 0.12)):
        assert states(stage, 1024, 7.5e9) == pytest.approx(gigabytes, abs=0.013)


@pytest.mark.parametrize("shards", [4, 64])
def test_states_are_4_plus_k_bytes_per_parameter_of_which_each_stage_spreads_more(
    shards: int,
) -> None:
    """Slices are multiples of 32 elements: under ZeRO-3 each of 4 layers has two groups of them, with and without
    decay, and before all layers share one or two."""
    n, k = shards, 12
    expected = {0: 4 + k, 1: 4 + k / n, 2: 2 + (2 + k) / n, 3: (4 + k) / n}
    psi = 2 * (12 * 4096**2 + 13 * 4096) + (51200 + 16) * 4096 + 2 * 4096
    for stage, wanted in expected.items():
        assert 0 <= per_parameter(stage, n) - wanted <= (4 + k) * 8 * 32 / psi


@pytest.mark.parametrize(
    ("dtypes", "widths", "whole", "spread"),
    [
        (("bf16", "bf16"), (2, 2), 4, 12),
        (("bf16", "fp32"), (2, 4), 6, 12),
        (("fp32", "fp32"), (4, 4), 8, 8),
        (("fp64", "fp64"), (8, 8), 16, 16),
    ],
)
def test_regimes_of_bytes_per_parameter(
    dtypes: tuple[str, str], widths: tuple[int, int], whole: int, spread: int
) -> None:
    """ZeRO's 4 + 12/N; Megatron's distributed optimizer, bf16 with fp32 gradients 6 + 12/N and fp32 8 + 8/N; fp64."""
    assert optimizer_bytes(widths[0]) == spread
    assert regime(*widths, 1, 16).startswith(f"{whole} + {spread}/16 bytes per parameter")
    assert regime(*widths, 0, 16).startswith(f"{whole + spread} bytes per parameter")
    assert per_parameter(1, 4, *dtypes) == whole + spread / 4


def test_the_regime_is_said_in_words() -> None:
    kinds = "2-byte parameters, 4-byte gradients, 12 bytes of optimizer state"
    two, three, alone = (
        regime(2, 4, z, n, replicas=2, resident=1000) for z, n in ((2, 64), (3, 64), (3, 1))
    )
    assert two == (
        f"2 + 16/64 bytes per parameter ({kinds}; ZeRO-2: gradients and optimizer state sliced over 64 ranks in each "
        "of 2 groups)"
    )
    assert three == (
        f"18/64 bytes per parameter ({kinds}; ZeRO-3: parameters, gradients and optimizer state sliced over 64 ranks "
        "in each of 2 groups; parameters under 1000 elements are not sharded)"
    )
    assert alone == f"18 bytes per parameter ({kinds}; ZeRO-3 has no other rank to share with)"


@pytest.mark.parametrize(
    ("optim", "moments", "width"),
    [
        ({}, 2, 12),
        ({"name": "sgd"}, 1, 8),
        ({"name": "lion"}, 1, 8),
        ({"name": "sgd", "momentum": 0.0}, 0, 4),
    ],
)
def test_optimizers_with_fewer_moments_take_less(
    optim: dict[str, Any], moments: int, width: int
) -> None:
    """Each with fp32 master weights beside 16-bit parameters."""
    assert optimizer_bytes(2, moments) == width
    found = forecast(4, optim=optim, precision={"dtype": "bf16"}, zero={"stage": 3})
    assert found.ranks[0].bytes["optimizer"] == found.parameters // 4 * width


@pytest.mark.parametrize("stage", [-1, 4])
def test_zero_stages_that_are_not_there_are_refused(stage: int) -> None:
    with pytest.raises(ValueError, match=rf"zero\.stage is {stage}"):
        regime(2, 2, stage, 4)
    with pytest.raises(ValueError, match=r"zero\.stage"):
        forecast(2, zero={"stage": stage})


@pytest.mark.parametrize("dp", [1, 4])
def test_a_shard_group_of_one_rank_is_zero_0(dp: int) -> None:
    """Whether there is one data rank, or every rank is a shard group of its own: it holds and sends the same."""
    plain = first(dp, zero={"stage": 0})
    for stage in (1, 2, 3):
        assert first(dp, zero={"stage": stage, "shard_size": 1}) == plain


def test_small_parameters_stay_whole_under_stage_3() -> None:
    """Their gradients and optimizer states are slices all the same."""
    h, count = 128, forecast(1).parameters
    sizes = (
        [h] * (2 + 2 * 6)
        + [3 * h, 4 * h] * 2
        + [h * h, 3 * h * h, 4 * h * h, 4 * h * h] * 2
        + [16 * h, 64 * h]
    )
    assert sum(sizes) == count
    for resident in (0, h, h + 1, 3 * h + 1, 16 * h + 1, h * h + 1, 4 * h * h + 1):
        held = first(4, zero={"stage": 3, "resident": resident}, precision={"dtype": "bf16"}).bytes
        whole = sum(size for size in sizes if size < resident)
        assert held["parameters"] == 2 * (whole + (count - whole) // 4)
        assert held["gradients"] + held["optimizer"] == count // 4 * (4 + 12)


# ------------------------------------------------------------------------------------------------- activations, buffers


def test_first_stage_of_1f1b_keeps_p_microbatches_as_in_2205_05198_section_4_2_3() -> None:
    """Stage 0 of p holds p micro-batches of l/p layers: the activations of all l layers, whatever p is."""
    model = {"layers": 8}
    whole = Decoder(hidden=128, heads=4, ffn=512, vocab=64, seq=16, positions=16, micro_batch=2)
    embedding, block, *_, head = (cost.activation_bytes for cost in transformer_costs(whole, 8))
    head += 4  # the loss's weight
    for p in (1, 2, 4, 8):
        counts = [1 + 8 // p, *[8 // p] * (p - 2), 8 // p + 1] if p > 1 else [10]
        train, cut = {"global_batch": 16}, {"pp": p, "partition": tuple(counts)}
        held = first(p, model=model, train=train, parallel=cut).bytes["activations"]
        assert held == p * embedding + 8 * block + (head if p == 1 else 0)


def test_a_pass_adds_up_what_layers_keep() -> None:
    """What a layer hands on is kept if it, or the layer after it, keeps it; and once."""

    def cost(kept: int, *, into: bool = False, out: bool = False) -> LayerCost:
        return LayerCost(
            0, kept, into, out, forward=1000 + kept, backward=2000 + kept, input=100, output=100
        )

    plain = Pass([cost(1), cost(2), cost(3)])
    assert (plain.kept, plain.forward, plain.backward) == (6, 1006, [2001, 2003, 2006])
    inputs = Pass([cost(1, into=True), cost(2, into=True), cost(3)])
    assert (inputs.kept, inputs.forward) == (206, 1206)
    outputs = Pass([cost(1, out=True), cost(2, out=True), cost(3, out=True)])
    assert outputs.kept == 306
    assert outputs.backward == [
        2001,
        2103,
        2206,
    ]  # an input that the layer before keeps is there beside its own
    both = Pass([cost(1, out=True), cost(2, into=True), cost(3)])
    assert both.kept == 106


def test_an_arena_holds_copies_of_inputs() -> None:
    """If the layer before keeps its output, both it and its copy are there."""
    cost = LayerCost(0, 1, True, False, forward=1000, backward=2000, input=100, output=100)
    before = LayerCost(0, 7, False, True, forward=1000, backward=2000, input=100, output=100)
    for arena, kept in ((False, 108), (True, 207)):
        recompute = {"mode": "full", "arena": arena}
        config = Config.model_validate({"recompute": recompute})
        stored = memory_estimate._with_stored_input(cost, config, "cpu")
        assert Pass([before, stored]).kept == kept


def test_parts_add_up_to_the_peak() -> None:
    for zero in (
        {"stage": 0},
        {"stage": 2},
        {"stage": 3},
        {"stage": 3, "offload_optimizer": "cpu"},
    ):
        for rank in forecast(4, parallel={"pp": 2}, zero=zero).ranks:
            parts = ("parameters", "gradients", "optimizer", "activations", "buffers")
            assert rank.bytes["peak"] == sum(rank.bytes[part] for part in parts)
            assert set(rank.bytes) <= {*parts, "peak", "offloaded"}


def test_buffers_of_stages_2_and_3_do_not_grow_with_the_model() -> None:
    """Under stage 2 by no more than a bucket, for where buckets cut parameters depends on what lies before; under stage
    3, whose layers have buckets of their own, not at all: two of them are whole, or more when more are gathered ahead.
    At the worst moment, a block's backward, the head is free again, and the embedding's backward reads no weights.
    """
    common = {"bucket_mib": 0.1}
    model = {"tied": False}
    block = 12 * 128 * 128 + 13 * 128
    for stage in (2, 3):
        few, many = (
            first(4, model={**model, "layers": n}, zero={**common, "stage": stage}).bytes["buffers"]
            for n in (4, 8)
        )
        # what 4 layers add is 3.2 MB of gradients
        assert abs(many - few) <= (0.1 * 2**20 if stage == 2 else 0)
    ahead = [
        first(4, model={**model, "layers": 8}, zero={**common, "stage": 3, "prefetch": n}).bytes[
            "buffers"
        ]
        for n in (1, 2, 99)
    ]
    assert (ahead[0], ahead[1] - ahead[0], ahead[2] - ahead[0]) == (many, 4 * block, 4 * 6 * block)


def test_buckets_on_their_way_are_counted() -> None:
    """From stage 2 on buckets fill, leave and arrive; larger ones take more, up to what there is."""
    sizes = [
        first(4, model={"layers": 8}, zero={"stage": 2, "bucket_mib": mib}).bytes["buffers"]
        for mib in (0.1, 0.5)
    ]
    alone = first(1, model={"layers": 8}, zero={"stage": 2, "bucket_mib": 0.5}).bytes["buffers"]
    assert alone < sizes[0] < sizes[1]
    assert sizes[1] - sizes[0] >= 2 * (0.5 - 0.1) * 2**20  # one fills while another travels


def test_inputs_that_are_kept_by_the_formulas_of_1910_02054_section_6_1() -> None:
    """s b h of every layer; a t-th of it as slices, gathered again; none where they are elsewhere: what 3 add."""
    s, b, h, t, m = 16, 2, 128, 4, 2
    activation = s * b * h * 2

    def added(**recompute: Any) -> dict[str, int]:
        run = {
            "precision": {"dtype": "bf16"},
            "parallel": {"tp": t, "sequence": False},
            "train": {"global_batch": b * m},
        }
        zero = {"nvme_path": "/tmp"}
        few, more = (
            first(t, model={"layers": n}, recompute={"mode": "full", **recompute}, zero=zero, **run)
            for n in (2, 5)
        )
        keys = ("activations", "offloaded")
        return {key: more.bytes.get(key, 0) - few.bytes.get(key, 0) for key in keys} | {
            "tp": more.sends["tp"] - few.sends["tp"]
        }

    whole, sliced, away = added(), added(partition=True), added(partition=True, offload="nvme")
    assert (whole["activations"], whole["offloaded"]) == (3 * activation, 0)
    assert (sliced["activations"], sliced["offloaded"]) == (3 * activation // t, 0)
    assert (away["activations"], away["offloaded"]) == (0, 3 * activation // t)
    # four sums, and two once more
    assert whole["tp"] == m * 3 * 6 * formulas.all_reduce(activation, t)
    assert (
        sliced["tp"] - whole["tp"] == away["tp"] - whole["tp"] == m * 3 * activation * (t - 1) // t
    )


# --------------------------------------------------------------------------------------------------------- bytes sent


def sent(
    shards: int, stage: int, m: int = 1, *, world: int = 0, layers: int = 2, dtype: str = "fp32"
) -> int:
    """Over dp, by a rank."""
    world = world or shards
    found = first(
        world, model={"layers": layers}, train={"global_batch": world * 2 * m}, precision={"dtype": dtype},
        zero={"stage": stage, "shard_size": shards if stage else "all"},
    )  # fmt: skip
    return found.sends["dp"]


PSI = 2 * (12 * 128**2 + 13 * 128) + (64 + 16 + 2) * 128
BLOCK = 12 * 128**2 + 13 * 128


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_data_parallel_volume_is_2_psi_as_in_1910_02054_section_7(n: int) -> None:
    """Under stage 3 it is 3 Psi for what lies between the ends: these may be whole still where the rank turns round."""
    for stage in range(3):
        assert sent(n, stage) == 2 * PSI * 4 * (n - 1) // n
    assert sent(n, 1, dtype="bf16") == PSI * (4 + 2) * (n - 1) // n
    if n < 8:  # in 8 slices a block's biases are padded
        assert sent(n, 3, layers=3) - sent(n, 3) == 3 * BLOCK * 4 * (n - 1) // n


def test_stages_2_and_3_pay_for_every_microbatch() -> None:
    """Stage 2 (k + 1) Psi; stage 3 k 3 Psi; stages 0 and 1 2 Psi, whatever k is."""
    n, k = 4, 5
    part, block = PSI * 4 * (n - 1) // n, BLOCK * 4 * (n - 1) // n
    assert [sent(n, stage, k) for stage in range(3)] == [2 * part, 2 * part, (k + 1) * part]
    assert sent(n, 3, k, layers=3) - sent(n, 3, k) == 3 * k * block


@pytest.mark.parametrize(("stage", "reductions", "gathered"), [(1, 1, 1), (2, 3, 1), (3, 3, 6)])
def test_groups_of_shards_all_reduce_their_slices_once(
    stage: int, reductions: int, gathered: int
) -> None:
    """8 data ranks as 2 groups of 4 (MiCS, arXiv 2205.00119, section 3.4; FSDP's hybrid sharding), bf16; a block's."""
    s, r = 4, 2
    block = sent(s, stage, 3, world=s * r, layers=3, dtype="bf16") - sent(
        s, stage, 3, world=s * r, dtype="bf16"
    )
    scattered, own = BLOCK * 4 * (s - 1) // s, BLOCK // s * 4
    assert (
        block
        == reductions * scattered + 2 * own * (r - 1) // r + gathered * BLOCK * 2 * (s - 1) // s
    )
    assert sent(s * r, 0) == 2 * PSI * 4 * (s * r - 1) // (s * r)


def test_bytes_of_a_2x2x2_step_by_hand() -> None:
    """pp = dp = tp = 2, 3 micro-batches, fp32, sequence parallel, tied: every term of every axis."""
    b, s, h, v, l, m = 4, 8, 128, 128, 4, 3  # noqa: E741
    dims = Decoder(
        hidden=h, heads=4, ffn=2 * h, vocab=v, seq=s, micro_batch=b, positions=s, tensor=2, sequence=True
    )  # fmt: skip
    costs = transformer_costs(dims, l)

    def run(stage: int, resident: int) -> list[RankForecast]:
        found = forecast(
            8, model={"layers": l, "hidden": h, "ffn": 2 * h, "vocab": v, "seq": s}, parallel={"pp": 2, "tp": 2,
            "sequence": True}, train={"global_batch": 2 * m * b, "micro_batch": b},
            zero={"stage": stage, "resident": resident},
        )  # fmt: skip
        return [rank for rank in found.ranks if rank.label in ("pp0 dp0 tp0", "pp1 dp0 tp0")]

    plain = run(1, 0)
    first, last = (costs[rank.layers[0].start : rank.layers[0].stop] for rank in plain)
    assert len(first) + len(last) == l + 2
    sent_first, sent_last = (rank.sends for rank in plain)
    message = b * s // 2 * h * 4

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
    common = {"microbatches": m, "shards": 2, "zero_stage": 1, "tied_elsewhere": True}
    assert sent_first == communication_bytes(first, last=False, **common)
    assert sent_last == communication_bytes(last, input_bytes=message, **common)

    # Under ZeRO-3 the last stage turns from F to B and back: one unit stays whole at each end. Norms and biases, fewer
    # than h f / 2 elements, stay whole and are gathered once. The first stage's embedding is gathered in forwards only.
    whole_first, whole_last = (rank.sends for rank in run(3, 1024))
    assert [whole_first[axis] - sent_first[axis] for axis in ("tp", "pp")] == [0, 0]
    block, table = sum(size for size in first[1].sizes if size >= 1024), v // 2 * h
    small = stage_parameters(first) - (len(first) - 1) * block - table - s * h
    # F0 F1 B0 F2 B1 B2: before B0 and B1 the last layer is whole; F2's first one, the embedding, is not.
    gathered = m * (table + s * h) + (2 * m * (len(first) - 1) - 2) * block + small
    assert whole_first["dp"] == (m * stage_parameters(first) + gathered) * 4 // 2
    # F0 B0 F1 B1 F2 B2: the head m times, the first block m + 1 times, the others 2 m times.
    small = stage_parameters(last) - (len(last) - 1) * block - table
    gathered = m * table + (m + 1 + 2 * m * (len(last) - 2)) * block + small
    assert whole_last["dp"] == (m * stage_parameters(last) + gathered) * 4 // 2
    plan, stage3 = build("1f1b", 2, m), {**common, "zero_stage": 3, "resident": 1024}
    assert whole_first == communication_bytes(first, last=False, actions=plan.ranks[0], **stage3)
    assert whole_last == communication_bytes(
        last, input_bytes=message, actions=plan.ranks[1], **stage3
    )


def test_one_rank_sends_nothing() -> None:
    for stage in (0, 3):
        assert first(1, zero={"stage": stage}).sends == {
            "tp": 0,
            "pp": 0,
            "dp": 0,
            "cp": 0,
            "ep": 0,
        }
    costs = transformer_costs(Decoder(hidden=16, heads=4, ffn=32, vocab=64, seq=8), 2)
    assert communication_bytes(costs, microbatches=5) == {
        "tp": 0,
        "pp": 0,
        "dp": 0,
        "cp": 0,
        "ep": 0,
    }
    assert block_cost(Decoder(hidden=16, heads=4, ffn=32, vocab=64, seq=8)).tp_bytes == 0
