"""Configurations of the models of `tests/users_models.py`, their batches, and their training."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests import users_truths
from tests.configs import share, topology_of
from tests.users_layers import CHANNELS, CLASSES, PATCH
from tests.users_models import MODELS, Decoder
from tests.users_truths import Batch, Result
from threed.config import Config
from threed.config.resolution import resolve
from threed.engine import Engine
from threed.layers import Slicing

VOCAB, SEQ, HIDDEN, ROWS, STEPS = 53, 8, 24, 6, 2
BF16 = (
    "residual-32",
)  # compared with one process in bf16, because it has no fp64 version in plain PyTorch
BUFFERS = ("buffers",)  # a running mean depends on the micro-batches
RECOMPUTE = {
    "none": {},
    "full": {"mode": "full"},
    "selective": {"mode": "selective", "ops": ("attention", "activation", "norm")},
    "sliced": {"mode": "full", "partition": True},
}


@dataclass(frozen=True)
class Case:
    """One configuration. `microbatches` is per data rank; the global batch always has 6 rows."""

    model: str
    pp: int = 1
    dp: int = 1
    tp: int = 1
    cp: int = 1
    cp_heads: int = 1
    sequence: bool = False
    zero: int = 1
    offload: str = "none"
    recompute: str = "none"
    partition: str = "balanced"
    microbatches: int = 1
    schedule: str = "1f1b"
    bucket_mib: float = 64.0
    order: str = "micro"

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.pp * self.dp * self.tp * self.cp

    @property
    def truth(self) -> Case:
        """The same training on one process, with the same micro-batches if they affect results."""
        cut_alike = self.model in (*BF16, *BUFFERS)
        return Case(self.model, microbatches=self.microbatches * self.dp if cut_alike else 1)

    @property
    def layers(self) -> int:
        """The number of pipeline layers of the model."""
        return layers_of(self.model)


@functools.cache
def layers_of(model: str) -> int:
    """Returns the number of pipeline layers of a model."""
    return len(MODELS[model](config_of(Case(model)).model, Slicing()).layers())


def counts(case: Case) -> tuple[int, ...]:
    """Returns an explicit partition for two or three stages.

    The first stage has one layer. With two stages the last has all other layers, with three it has
    one.
    """
    return (1, case.layers - 1) if case.pp == 2 else (1, case.layers - 2, 1)


def config_of(case: Case) -> Config:
    """Returns the resolved configuration of a case."""
    params = case.offload if case.zero == 3 else "none"
    config = Config.model_validate({
        "parallel": {
            "tp": case.tp, "pp": case.pp, "cp": case.cp, "cp_heads": case.cp_heads,
            "sequence": case.sequence, "schedule": case.schedule,
            "partition": counts(case) if case.partition == "explicit" else case.partition,
        },
        "zero": {
            "stage": case.zero, "bucket_mib": case.bucket_mib, "offload_optimizer": case.offload,
            "offload_params": params, "nvme_path": tempfile.gettempdir() if case.offload == "nvme" else None,
            "resident": 0,  # shard all parameters: with the default, such small ones would stay full
            "order": case.order,
        },
        "precision": {"dtype": "bf16" if case.model in BF16 else "fp64"},
        "recompute": RECOMPUTE[case.recompute],
        "model": {"layers": 3, "hidden": HIDDEN, "heads": users_truths.HEADS, "seq": SEQ},
        "train": {
            "global_batch": ROWS, "micro_batch": ROWS // case.dp // case.microbatches, "steps": 10,
            "grad_clip": users_truths.CLIP,
        },
        "optim": {
            "warmup": 0, "schedule": "constant", "lr": users_truths.LR, "weight_decay": users_truths.DECAY,
            # Adam's step has the same size for any gradient. In bf16, gradients near zero are noise, so eps is larger.
            "betas": users_truths.BETAS, "eps": 1e-3 if case.model in BF16 else users_truths.EPS,
        },
    })  # fmt: skip
    return resolve(config, VOCAB, case.world)


def batch(model: str, step: int) -> Batch:
    """Returns the global batch of a step; some labels are negative, in one row all of them."""
    draw = torch.Generator().manual_seed(step)
    if model == "vision":
        pixels = torch.randn(
            ROWS, CHANNELS, 2 * PATCH, SEQ // 2 * PATCH, generator=draw, dtype=torch.float64
        )
        labels = torch.randint(0, CLASSES, (ROWS,), generator=draw)
        labels[[1, 4]] = -1
        return {"pixels": pixels, "labels": labels}
    ids = torch.randint(0, VOCAB, (ROWS, SEQ + 1), generator=draw)
    ignored = torch.rand(ROWS, SEQ, generator=draw) < torch.linspace(0, 0.8, ROWS).view(-1, 1)
    ignored[2] = True
    return {"tokens": ids[:, :-1].contiguous(), "labels": ids[:, 1:].masked_fill(ignored, -100)}


def engine_of(case: Case, model: type[Decoder] | None = None) -> Engine:
    """Returns the engine of a case on this rank.

    Args:
        case: the case.
        model: class to use instead of the case's model.
    """
    config, topology = config_of(case), topology_of(case.pp, case.tp, case.cp)
    built = (model or MODELS[case.model])(config.model, Slicing.of(topology, config))
    return Engine(built, topology, config)


def train(case: Case, model: type[Decoder] | None = None) -> Result:
    """Trains a case, and returns its results: of the steps and of an evaluation."""
    engine = engine_of(case, model)
    return steps_of(engine, case)


def steps_of(engine: Engine, case: Case) -> Result:
    """Runs the steps and the evaluation of a case with an engine; returns the results."""
    metrics = [
        engine.step(share(batch(case.model, step), engine.topology)) for step in range(STEPS)
    ]
    evaluation = float(engine.evaluate(share(batch(case.model, STEPS), engine.topology)))
    weights: dict[str, Tensor] = engine.full_state_dict()
    return Result([m.loss for m in metrics], [m.grad_norm for m in metrics], weights, evaluation)


def truth(case: Case) -> tuple[Result, dict[str, Tensor]]:
    """Returns the expected results of a case, and the initial weights. Only in a world of one rank.

    Plain PyTorch computes them from the engine's initial weights; for bf16 a single process does.
    """
    engine = engine_of(replace(case, microbatches=1))
    weights = engine.full_state_dict()
    if case.model in BF16:
        return train(case), weights
    batches = [batch(case.model, step) for step in range(STEPS + 1)]
    return users_truths.train(
        case.model, weights, batches[:-1], case.microbatches, batches[-1]
    ), weights
