"""threed as a benchmarked engine, with models of its own layers and with any module.

    engine = ENGINES["threed_tp"](GPTConfig(), args)        # args: .batch, .microbatches
    loss = engine.step(x, y)                                 # one optimizer step on the global batch [b s]

ENGINES contains all engines, peers included, by name. All have the same model, initial weights,
data and AdamW, and none clips. A class takes only `(config, args)`, so that another program can use
it as FILE.py:Class.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

ROOT = str(Path(__file__).resolve().parents[1])
if ROOT not in sys.path:  # this file was loaded by its path, from another folder
    sys.path.insert(0, ROOT)

from benchmarks import reference  # noqa: E402
from benchmarks.deepspeed_peers import DEEPSPEED  # noqa: E402
from benchmarks.peers import PEERS  # noqa: E402
from benchmarks.pipelines import PIPELINES  # noqa: E402
from benchmarks.reference import GPTConfig  # noqa: E402
from benchmarks.suites import MODES, SCHEDULES, Offload  # noqa: E402
from benchmarks.trainer import complete, make_trainer, renamed  # noqa: E402
from threed.distributed import collectives  # noqa: E402
from threed.distributed.topology import Topology  # noqa: E402
from threed.engine import Engine as Trainer  # noqa: E402
from threed.memory.tiers import Drive  # noqa: E402
from threed.pipeline.executor import Span  # noqa: E402
from threed.schedules import Action  # noqa: E402
from threed.schedules.simulation import replay, span_and_bubble  # noqa: E402


class Engine(Protocol):
    """The interface of a benchmarked engine.

    Attributes:
        loss_ranks: the ranks whose mean loss is the loss of the global batch.
        update_s: with `--settle`, the seconds of the last step from the end of its last backward to
            its return.
    """

    loss_ranks: list[int]

    def step(self, x: Tensor, y: Tensor) -> Tensor | None:
        """Runs one optimizer step on the global batch [b s], of which each rank takes its part.

        Returns:
            This rank's loss, or None if the rank has none.
        """

    def finish(self) -> None:
        """Waits for all unfinished work of the last step.

        It is called at the end of a timed block of steps, and its time counts.
        """


class ThreeD:
    """threed in one configuration; the number of data ranks follows from pp, tp and the world size.

    With a pipeline, the number of micro-batches is `args.microbatches`. Without one it is
    `offload.microbatches`, by default 1, as for the peers.
    """

    pp, tp, sequence, schedule, zero = 1, 1, False, "1f1b", 1
    compile = False
    offload = Offload(0)  # location of the states; its stage is not used, but `zero`

    def __init__(self, config: GPTConfig, args: Any) -> None:
        topology = Topology(pp=self.pp, tp=self.tp)
        self.trainer = self.build(config, topology, self._settings(args, topology.dp))
        self.share, self.loss_ranks = topology.axis("dp").index, [0]

    def build(self, config: GPTConfig, topology: Topology, settings: dict[str, Any]) -> Trainer:
        """Returns the engine, with the peers' initial weights."""
        trainer = make_trainer(config, topology, settings)
        trainer.load_full_state_dict(renamed(reference.initial_weights(config), config.n_head))
        return trainer

    def _settings(self, args: Any, dp: int) -> dict[str, Any]:
        count = args.microbatches if self.pp > 1 else self.offload.microbatches
        return {
            "parallel": {
                "pp": self.pp,
                "tp": self.tp,
                "sequence": self.sequence,
                "schedule": self.schedule,
            },
            "zero": {"stage": self.zero, "order": self.offload.order, **self._places(args)},
            "precision": {"dtype": self.offload.dtype},
            "train": {
                "global_batch": args.batch,
                "micro_batch": args.batch // dp // count,
                "grad_clip": 0.0,
            },
            "run": {"compile": self.compile},
        }

    def _places(self, args: Any) -> dict[str, Any]:
        o = self.offload
        found = {"offload_optimizer": o.optimizer, "offload_params": o.params}
        return (
            {**found, "nvme_path": f"{args.folder}/{type(self).__name__}"}
            if "nvme" in found.values()
            else found
        )

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        dp = self.trainer.topology.dp
        share = {"tokens": x.chunk(dp)[self.share], "labels": y.chunk(dp)[self.share]}
        metrics = self.trainer.step(share)
        self.update_s = metrics.seconds["dp_comm_s"] + metrics.seconds["optim_s"]
        return torch.tensor(metrics.loss)

    def finish(self) -> None:
        self.trainer.optimizer.wait()
        policy = self.trainer.layout.policy
        for tier in {policy.params_tier, policy.optimizer_tier}:
            if isinstance(tier, Drive):
                tier.settle()

    @property
    def traffic(self) -> dict[str, int]:
        """Bytes that this rank has sent so far over each axis, from threed's counters."""
        return dict(self.trainer.topology.traffic)


class Zero0(ThreeD):
    """Plain data parallelism."""

    zero = 0


class Blocks(Zero0):
    """Data parallelism, with blocks compiled by torch.compile."""

    compile = True


class Zero1(ThreeD):
    """ZeRO-1 over all ranks."""


class Zero2(ThreeD):
    """ZeRO-2."""

    zero = 2


class Zero3(ThreeD):
    """ZeRO-3."""

    zero = 3


class WithLoss(nn.Module):
    """The reference model and its loss in one module, for `threed.Engine(module)`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.model = reference.build(config)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return reference.loss_of(self.model(tokens), labels)


class Wrapped0(ThreeD):
    """threed with the same torch module as the peers."""

    zero = 0

    def build(self, config: GPTConfig, topology: Topology, settings: dict[str, Any]) -> Trainer:
        module: Any = WithLoss(config)
        return Trainer(module, topology, complete(config, topology, settings))


class Wrapped1(Wrapped0):
    """The same module with ZeRO-1."""

    zero = 1


class Wrapped2(Wrapped0):
    """The same module with ZeRO-2."""

    zero = 2


class Wrapped3(Wrapped0):
    """The same module with ZeRO-3."""

    zero = 3


def _offloading(name: str, base: type[ThreeD]) -> dict[str, type[ThreeD]]:
    """Returns an engine for every mode of offload, by name."""
    return {
        f"{name}{kind}": type(f"{name}{kind}", (base,), {"zero": offload.stage, "offload": offload})
        for kind, offload in MODES.items()
    }


class TP2(ThreeD):
    """Tensor parallelism over two ranks."""

    tp = 2


class TP2Sequence(TP2):
    """Tensor parallelism over two ranks, with sequence parallelism."""

    sequence = True


class PP2(ThreeD):
    """1F1B over two stages; it records the times of the actions of its steps."""

    pp = 2

    def __init__(self, config: GPTConfig, args: Any) -> None:
        super().__init__(config, args)
        # the actions of each step, and the seconds of its update
        self.recorded: list[tuple[list[Span], float]] = []
        self.trainer.record()

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().step(x, y)
        self.recorded.append((self.trainer.record(), self.update_s))
        return loss

    def expected(self) -> dict[str, float]:
        """Returns the shortest step if messages took no time, and bubbles. Collective.

        The plan of every step is simulated with the measured times of its actions; the results are
        medians over the steps. In the simulation the update takes as long as on the rank that
        begins it last, because the other ranks wait for that rank. The bubbles are that of the
        simulation and the measured one.
        """
        plan, seconds, bubbles = self.trainer.blueprint.pipeline.plan, [], []
        mine = [
            ([(str(a), begin, end) for a, begin, end in spans], update)
            for spans, update in self.recorded
        ]
        for ranks in zip(
            *collectives.exchange(mine, self.trainer.topology.axis("pp")), strict=True
        ):
            measured = [
                [(Action.parse(text), begin, end) for text, begin, end in spans]
                for spans, _ in ranks
            ]
            span, bubble = span_and_bubble(replay(plan, measured))
            seconds.append(span + min(update for _, update in ranks))
            bubbles.append((span_and_bubble(measured)[1], bubble))
        found, simulated = (statistics.median(values) for values in zip(*bubbles, strict=True))
        return {
            "bound_s": statistics.median(seconds),
            "bubble": found,
            "bubble_expected": simulated,
        }


def _scheduled() -> dict[str, type[PP2]]:
    """Returns an engine over two stages for every schedule, by name."""
    return {
        f"threed_{name}": type(f"threed_{name}", (PP2,), {"schedule": name}) for name in SCHEDULES
    }


class ThreeD222(ThreeD):
    """1F1B, ZeRO-1 and tensor parallelism, each over two ranks."""

    pp = tp = 2


class ThreeD222Sequence(ThreeD222):
    """The same topology with sequence parallelism."""

    sequence = True


ENGINES: dict[str, Callable[[GPTConfig, Any], Engine]] = {
    **PEERS, **PIPELINES, **DEEPSPEED,
    "threed_compiled": Blocks,
    "threed_zero0": Zero0, "threed_zero1": Zero1, "threed_zero2": Zero2, "threed_zero3": Zero3,
    "wrapped_zero0": Wrapped0, "wrapped_zero1": Wrapped1, "wrapped_zero2": Wrapped2, "wrapped_zero3": Wrapped3,
    "threed_tp": TP2, "threed_tp_sp": TP2Sequence, **_scheduled(),
    "threed_3d": ThreeD222, "threed_3d_sp": ThreeD222Sequence,
    **_offloading("threed_zero", ThreeD), **_offloading("wrapped_zero", Wrapped0),
}  # fmt: skip
