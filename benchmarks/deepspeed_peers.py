"""DeepSpeed's ZeRO stages 0 to 3 as peers: DeepSpeed's own defaults but for what the comparison fixes.

    pip install --no-deps --no-build-isolation deepspeed      # with hjson, py-cpuinfo, msgpack, einops and ninja

It is imported when an engine is made. Its CPU Adam is compiled at first use, a minute or two, into
TORCH_EXTENSIONS_DIR; the next run finds it there.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks import reference
from benchmarks.peers import Peer
from benchmarks.reference import ADAM, GPTConfig


class DeepSpeed0(Peer):
    """Stage 0: gradients summed in one piece after the backward."""

    stage = 0

    @classmethod
    def load(cls) -> Any:
        """The library; ImportError says how to get it."""
        if importlib.util.find_spec("deepspeed") is None:
            raise ImportError(f"DeepSpeed is not installed; see {__file__}, or leave its engines out with --only")
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed

        return deepspeed

    def __init__(self, config: GPTConfig, args: Any) -> None:
        self.index, self.size = dist.get_rank(), dist.get_world_size()
        self.loss_ranks = list(range(self.size))
        settings = {
            "train_micro_batch_size_per_gpu": args.batch // self.size,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,  # nobody clips here; DeepSpeed would, to norm 1
            "optimizer": {"type": "AdamW", "params": dict(ADAM)},
            "zero_optimization": {"stage": self.stage},
            "steps_per_print": 10**9,
        }
        self.linear: Any = F.linear
        with self._own_linear():
            model = reference.build(config)
            self.engine, *_ = self.load().initialize(model=model, config=settings, dist_init_required=False)

    @contextlib.contextmanager
    def _own_linear(self) -> Iterator[None]:
        """Stage 3 replaces `torch.nn.functional.linear` for the whole process; the other engines want torch's."""
        others, F.linear = F.linear, self.linear
        try:
            yield
        finally:
            self.linear, F.linear = F.linear, others

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = x.chunk(self.size)[self.index], y.chunk(self.size)[self.index]
        with self._own_linear():
            loss = reference.loss_of(self.engine(x), y)
            self.engine.backward(loss)
            self.engine.step()
        return loss.detach()


class DeepSpeed1(DeepSpeed0):
    """Stage 1."""

    stage = 1


class DeepSpeed2(DeepSpeed0):
    """Stage 2."""

    stage = 2


class DeepSpeed3(DeepSpeed0):
    """Stage 3; by default it keeps small parameters, and those that it will soon use again, gathered."""

    stage = 3


DEEPSPEED = {"deepspeed0": DeepSpeed0, "deepspeed1": DeepSpeed1, "deepspeed2": DeepSpeed2, "deepspeed3": DeepSpeed3}
