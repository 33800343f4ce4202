"""threed as a benchmarked engine, with models of its own layers and around any module; every engine by its name.

    engine = ENGINES["threed_tp"](GPTConfig(), args)        # args: .batch, .microbatches
    loss = engine.step(x, y)                                 # one optimizer step on the global batch [b s]

Same model, initial weights, data and AdamW as the peers, no clipping. Each class takes `(config, args)` and nothing
else, so that another harness can use it as FILE.py:Class.
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
if ROOT not in sys.path:  # loaded by path, from elsewhere
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
    """What is timed. loss_ranks: the ranks whose mean loss is the global batch's.

    Where `--settle` is asked for, update_s: seconds of the last step from the end of its last backward to its return.
    """

    loss_ranks: list[int]

    def step(self, x: Tensor, y: Tensor) -> Tensor | None:
        """One optimizer step on the global batch [b s], of which each rank takes its share; this rank's loss if any."""

    def finish(self) -> None:
        """Waits for what the last step left under way; inside the timed region, at the end of a block of steps."""


class ThreeD:
    """threed in one configuration; dp is what pp and tp leave of the world.

    microbatches: for pipelines, `args.microbatches`; without one a rank takes its share in one piece, as peers do, or
    in as many as its `offload` says.
    """

    pp, tp, sequence, schedule, zero = 1, 1, False, "1f1b", 1
    compile = False
    offload = Offload(0)  # where state lives; the stage is `zero`

    def __init__(self, config: GPTConfig, args: Any) -> None:
        topology = Topology(pp=self.pp, tp=self.tp)
        self.trainer = self.build(config, topology, self._settings(args, topology.dp))
        self.share, self.loss_ranks = topology.axis("dp").index, [0]

    def build(self, config: GPTConfig, topology: Topology, settings: dict[str, Any]) -> Trainer:
        """The engine, with the peers' initial weights in it."""
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
        """Bytes this rank has sent so far, by axis, as threed counts them."""
        return dict(self.trainer.topology.traffic)


class Zero0(ThreeD):
    """Plain data parallelism."""

    zero = 0


class Blocks(Zero0):
    """Its blocks through torch.compile."""

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
    """The reference model and its loss as one module, which is what an engine around any module takes."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.model = reference.build(config)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return reference.loss_of(self.model(tokens), labels)


class Wrapped0(ThreeD):
    """threed around the very module that the peers train, torch's own layers and kernels in it."""

    zero = 0

    def build(self, config: GPTConfig, topology: Topology, settings: dict[str, Any]) -> Trainer:
        module: Any = WithLoss(config)
        return Trainer(module, topology, complete(config, topology, settings))


class Wrapped1(Wrapped0):
    """The same with ZeRO-1."""

    zero = 1


class Wrapped2(Wrapped0):
    """The same with ZeRO-2."""

    zero = 2


class Wrapped3(Wrapped0):
    """The same with ZeRO-3."""

    zero = 3


def _offloading(name: str, base: type[ThreeD]) -> dict[str, type[ThreeD]]:
    """An engine for every mode of offloading."""
    return {
        f"{name}{kind}": type(f"{name}{kind}", (base,), {"zero": offload.stage, "offload": offload})
        for kind, offload in MODES.items()
    }


class TP2(ThreeD):
    """Tensor parallelism over two ranks."""

    tp = 2


class TP2Sequence(TP2):
    """The same with sequence parallelism."""

    sequence = True


class PP2(ThreeD):
    """1F1B over two stages; it keeps the spans of its steps."""

    pp = 2

    def __init__(self, config: GPTConfig, args: Any) -> None:
        super().__init__(config, args)
        # of each step, and the seconds of its update
        self.recorded: list[tuple[list[Span], float]] = []
        self.trainer.record()

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().step(x, y)
        self.recorded.append((self.trainer.record(), self.update_s))
        return loss

    def expected(self) -> dict[str, float]:
        """The shortest step if messages took no time, and the bubble beside the one that was measured. Collective.

        Every step's plan is played out with the times that its own actions took; medians over the steps. An update
        takes what it takes the rank that comes last to it, the others wait.
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
    """An engine over two stages for every schedule."""
    return {
        f"threed_{name}": type(f"threed_{name}", (PP2,), {"schedule": name}) for name in SCHEDULES
    }


class ThreeD222(ThreeD):
    """1F1B x ZeRO-1 x tensor parallelism, two of each."""

    pp = tp = 2


class ThreeD222Sequence(ThreeD222):
    """The same with sequence parallelism."""

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
