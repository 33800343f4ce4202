"""Configurations of the models of `tests/users_models.py`, their batches, and how one is run."""

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
BF16 = ("residual-32",)  # compared with one process: there is no truth in fp64
BUFFERS = ("buffers",)  # a running mean depends on how a batch is cut
RECOMPUTE = {
    "none": {},
    "full": {"mode": "full"},
    "selective": {"mode": "selective", "ops": ("attention", "activation", "norm")},
    "sliced": {"mode": "full", "partition": True},
}


@dataclass(frozen=True)
class Case:
    """One configuration; `microbatches` of each data rank. The global batch has 6 rows in all of them."""

    model: str
    pp: int = 1
    dp: int = 1
    tp: int = 1
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
        """How many ranks it takes."""
        return self.pp * self.dp * self.tp

    @property
    def truth(self) -> Case:
        """The same training on one process, in as many micro-batches where that matters."""
        cut_alike = self.model in (*BF16, *BUFFERS)
        return Case(self.model, microbatches=self.microbatches * self.dp if cut_alike else 1)

    @property
    def layers(self) -> int:
        """Pipeline layers of the model."""
        return layers_of(self.model)


@functools.cache
def layers_of(model: str) -> int:
    """How many pipeline layers a model has."""
    return len(MODELS[model](config_of(Case(model)).model, Slicing()).layers())


def counts(case: Case) -> tuple[int, ...]:
    """An explicit partition: one layer at each end, or all but one."""
    return (1, case.layers - 1) if case.pp == 2 else (1, case.layers - 2, 1)


def config_of(case: Case) -> Config:
    """The resolved configuration of a case."""
    params = case.offload if case.zero == 3 else "none"
    config = Config.model_validate({
        "parallel": {
            "tp": case.tp, "pp": case.pp, "sequence": case.sequence, "schedule": case.schedule,
            "partition": counts(case) if case.partition == "explicit" else case.partition,
        },
        "zero": {
            "stage": case.zero, "bucket_mib": case.bucket_mib, "offload_optimizer": case.offload,
            "offload_params": params, "nvme_path": tempfile.gettempdir() if case.offload == "nvme" else None,
            "resident": 0,  # slice everything: the default keeps parameters as small as these whole
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
            # Adam's step is of one size, however small a gradient is: in bf16 nearly zero ones are noise.
            "betas": users_truths.BETAS, "eps": 1e-3 if case.model in BF16 else users_truths.EPS,
        },
    })  # fmt: skip
    return resolve(config, VOCAB, case.world)


def batch(model: str, step: int) -> Batch:
    """The global batch of a step; labels are ignored unevenly over rows, and one row has none."""
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
    """The engine of a case in this world; `model` in place of the one that the case names."""
    config, topology = config_of(case), topology_of(case.pp, case.tp)
    slicing = Slicing(topology.axis("tp"), bool(config.parallel.sequence), config.train.seed)
    return Engine((model or MODELS[case.model])(config.model, slicing), topology, config)


def train(case: Case, model: type[Decoder] | None = None) -> Result:
    """Three steps of a case, and an evaluation."""
    engine = engine_of(case, model)
    return steps_of(engine, case)


def steps_of(engine: Engine, case: Case) -> Result:
    """What an engine gives."""
    metrics = [
        engine.step(share(batch(case.model, step), engine.topology)) for step in range(STEPS)
    ]
    evaluation = float(engine.evaluate(share(batch(case.model, STEPS), engine.topology)))
    weights: dict[str, Tensor] = engine.full_state_dict()
    return Result([m.loss for m in metrics], [m.grad_norm for m in metrics], weights, evaluation)


def truth(case: Case) -> tuple[Result, dict[str, Tensor]]:
    """What plain PyTorch gives on the engine's initial weights, and these; for bf16 what one process gives. In a world
    of one rank."""
    engine = engine_of(replace(case, microbatches=1))
    weights = engine.full_state_dict()
    if case.model in BF16:
        return train(case), weights
    batches = [batch(case.model, step) for step in range(STEPS + 1)]
    return users_truths.train(
        case.model, weights, batches[:-1], case.microbatches, batches[-1]
    ), weights
