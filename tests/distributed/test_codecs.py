"""Codecs of collectives against a computation in NumPy, bit for bit; and that a run uses exactly what they decode."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.configs import Case, batch, config_of, engine_of, share
from tests.harness import run_ranks
from threed.config import Config
from threed.config.checks import find_problems
from threed.distributed import collectives
from threed.distributed.codecs import EXACT, Cast, Codec
from threed.distributed.collectives import Pending
from threed.distributed.topology import Axis, Topology
from threed.ops.quantize import Int8Blocks

INT8 = Int8Blocks()


def twin(rows: Tensor) -> Tensor:
    """Returns what [r n] fp32 numbers are after they were sent in blocks, by NumPy."""
    numbers = rows.float().numpy()
    padded = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % 256))).reshape(len(rows), -1, 256)
    scales = np.abs(padded).max(2, keepdims=True) / np.float32(127)
    with np.errstate(invalid="ignore"):
        whole = np.clip(np.round(np.nan_to_num(padded / scales)), -127, 127)
    decoded = (whole.astype(np.float32) * scales).reshape(len(rows), -1)
    return torch.from_numpy(decoded[:, : numbers.shape[1]])


def numbers(rank: int, *shape: int) -> Tensor:
    draw = torch.Generator().manual_seed(rank)
    spread = 10.0 ** torch.randint(-6, 3, shape, generator=draw)
    return torch.randn(shape, generator=draw) * spread


@pytest.mark.parametrize("count", [1, 255, 256, 257, 1000])
def test_blocks_are_the_twins_and_within_half_a_step(count: int) -> None:
    rows = torch.cat([numbers(0, 3, count), torch.zeros(1, count)])
    messages = INT8.encode(rows)
    assert messages.shape == (4, 260 * math.ceil(count / 256))
    assert messages.dtype == torch.uint8
    decoded = INT8.decode(messages, count, torch.float32)
    assert torch.equal(decoded, twin(rows))
    for first in range(0, count, 256):
        block = slice(first, first + 256)
        step = rows[:, block].abs().amax(1, keepdim=True) / 127
        assert bool(((decoded - rows)[:, block].abs() <= step * 0.5001).all())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_makes_its_block_nan(bad: float) -> None:
    rows = torch.ones(1, 600)
    rows[0, 300] = bad
    decoded = INT8.decode(INT8.encode(rows), 600, torch.float32)
    assert decoded.isnan().nonzero()[:, 1].tolist() == list(range(256, 512))


def check_collectives(world: int) -> None:
    axis = Topology(tp=world).axis("tp")
    for count in (1, 300, 1024):
        full = [numbers(rank, world * count) for rank in range(world)]
        parts = [twin(tensor.view(world, count))[axis.index] for tensor in full]
        want = parts[0]
        for part in parts[1:]:
            want = want + part
        before = axis.traffic["tp"]
        mine = full[axis.index].clone()
        assert torch.equal(collectives.start_reduce_scatter(mine, axis, codec=INT8).wait(), want)
        message = 260 * math.ceil(count / 256)
        assert axis.traffic["tp"] - before == (world - 1) * message
        into = torch.full((count,), 2.0)
        collectives.start_reduce_scatter(mine, axis, codec=INT8, into=into, add=True).wait()
        assert torch.equal(into, want + 2.0)

        shards = torch.stack([numbers(10 + rank, count) for rank in range(world)])
        before, out = axis.traffic["tp"], torch.empty(world * count)
        got = collectives.start_all_gather(shards[axis.index], axis, out=out, codec=INT8).wait()
        assert got is out
        assert torch.equal(out.view(world, -1), twin(shards)), "the own part is decoded, too"
        assert axis.traffic["tp"] - before == (world - 1) * message

        sums = [
            collectives.start_all_reduce(numbers(axis.index, 7, count), axis, codec=INT8).wait()
        ]
        exact = torch.stack([numbers(rank, 7, count) for rank in range(world)]).sum(0)
        assert sums[0].shape == exact.shape
        assert float((sums[0] - exact).abs().max()) <= float(exact.abs().max()) * world / 60
        assert (
            len({tuple(one) for one in collectives.exchange(sums[0].flatten().tolist(), axis)}) == 1
        )


@pytest.mark.parametrize("world", [2, 3])
def test_collectives_decode_what_they_sent(world: int) -> None:
    run_ranks(world, check_collectives, world)


class Recorder:
    """Records the encoded collectives of an engine: kind, input, axis label, result."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, Tensor, Axis, Tensor]] = []
        for kind in ("start_reduce_scatter", "start_all_gather"):
            patch.setattr(collectives, kind, self.recorded(kind, getattr(collectives, kind)))

    def recorded(self, kind: str, start: Any) -> Any:
        def call(
            tensor: Tensor, axis: Axis, *args: Any, codec: Codec = EXACT, **more: Any
        ) -> Pending:
            given = tensor.detach().clone()
            pending = start(tensor, axis, *args, codec=codec, **more)
            if isinstance(codec, Cast) or axis.size == 1:
                return pending

            def finish() -> Tensor:
                result = pending.wait()
                if not more.get("add"):
                    self.seen.append((kind, given, axis, result.detach().clone()))
                return result

            return Pending(finish)

        return call


def run_compressed(case: Case, compressed: dict[str, str]) -> tuple[int, int, list[str]]:
    """Trains; returns how many reductions and gathers were encoded, and what differs from the twin."""
    config = config_of(case)
    config = config.model_copy(update={"zero": config.zero.model_copy(update=compressed)})
    wrong, counts = [], {"start_reduce_scatter": 0, "start_all_gather": 0}
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(patch)
        engine = engine_of(config)
        for step in range(2):
            metrics = engine.step(share(batch(step, config.train.global_batch), engine.topology))
            if not math.isfinite(metrics.loss):
                wrong.append(f"loss {metrics.loss}")
        engine.optimizer.wait()
    for kind, given, axis, result in recorder.seen:
        counts[kind] += 1
        everyone = collectives.all_gather(given.view(1, -1), axis)
        if kind == "start_all_gather":
            want = twin(everyone).flatten()
        else:
            parts = [twin(row.view(axis.size, -1))[axis.index] for row in everyone]
            want = parts[0]
            for part in parts[1:]:
                want = want + part
        if not torch.equal(want, result.float().flatten()):
            wrong.append(f"{kind} of {tuple(given.shape)}: {(want - result.flatten()).abs().max()}")
    return counts["start_reduce_scatter"], counts["start_all_gather"], wrong


def run_cases(cases: list[tuple[Case, dict[str, str]]]) -> list[tuple[int, int, list[str]]]:
    return [run_compressed(case, compressed) for case, compressed in cases]


BOTH = {"compress_weights": "int8", "compress_gradients": "int8"}
GRADIENTS = {"compress_gradients": "int8"}
FP32 = {"dtype": "fp32"}
CASES: dict[int, list[tuple[Case, dict[str, str]]]] = {
    2: [
        (Case(dp=2, zero=1, **FP32), GRADIENTS),
        (Case(dp=2, zero=2, microbatches=3, **FP32), GRADIENTS),
        (Case(dp=2, zero=3, bucket_mib=0.01, **FP32), BOTH),
        (Case(dp=2, zero=3, offload_params="cpu", **FP32), BOTH),
        (Case(dp=2, zero=3, tile=3, order="layer", **FP32), BOTH),
    ],
    4: [
        (Case(dp=2, pp=2, zero=3, schedule="zb-h1", microbatches=4, **FP32), BOTH),
        (Case(dp=4, zero=2, shard=2, **FP32), GRADIENTS),
    ],
}


@pytest.mark.seldom("2")
@pytest.mark.parametrize("world", CASES)
def test_a_run_uses_what_is_decoded(world: int) -> None:
    """Every encoded reduction and gather of two steps, against the twin, on all ranks."""
    for of_rank in run_ranks(world, run_cases, CASES[world]):
        for (case, compressed), (reduced, gathered, wrong) in zip(
            CASES[world], of_rank, strict=True
        ):
            assert not wrong, (case, wrong[:3])
            assert reduced > 0, case
            sums_are_gathered = case.shard != "all"  # of the all-reduces over replicas
            expected = "compress_weights" in compressed or sums_are_gathered
            assert (gathered > 0) == expected, case


def test_compressed_weights_need_sharded_parameters() -> None:
    config = Config.model_validate({"zero": {"stage": 1, "compress_weights": "int8"}})
    (problem,) = find_problems(config, 2)
    assert problem.startswith("--zero.compress-weights int8 with --zero.stage 1: ")
