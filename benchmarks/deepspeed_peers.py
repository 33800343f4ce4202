"""DeepSpeed as a peer: ZeRO stages 0 to 3 and offload, with its defaults where possible.

    pip install --no-deps --no-build-isolation deepspeed      # also needs hjson, py-cpuinfo, msgpack, einops and ninja

DeepSpeed is imported when an engine is created. Its CPU Adam and its async_io (which needs the
header of libaio) are compiled at first use, which takes a minute or two each, into
TORCH_EXTENSIONS_DIR; later runs use the result.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks import reference
from benchmarks.peers import Peer
from benchmarks.reference import ADAM, GPTConfig
from benchmarks.suites import MODES, Offload

# The fastest settings for swapping on this machine. Tried were sub-groups of 8 to 110 million elements, blocks of 0.25 to
# 8 MiB, 8 to 128 blocks in flight, and 1 to 4 threads. By default there is only one sub-group, so nothing overlaps.
SUB_GROUP = 50_000_000  # elements that are updated together
AIO = {"block_size": 2**20, "queue_depth": 32, "intra_op_parallelism": 1, "overlap_events": True}
BUFFERS = {
    "optimizer": 12,
    "params": 32,
}  # four for the next sub-group and for the current one, three for the previous one
LIVE = 32_000_000  # most parameters that are gathered at once; by default all would stay in memory


class DeepSpeed0(Peer):
    """Stage 0: all gradients are summed together after the backward."""

    stage = 0
    offload = Offload(0)

    @classmethod
    def load(cls) -> Any:
        """Imports DeepSpeed; the ImportError contains the command that installs it."""
        if importlib.util.find_spec("deepspeed") is None:
            raise ImportError(
                f"DeepSpeed is not installed; see {__file__}, or leave its engines out with --only"
            )
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed

        return deepspeed

    def __init__(self, config: GPTConfig, args: Any) -> None:
        self.index, self.size = dist.get_rank(), dist.get_world_size()
        self.loss_ranks = list(range(self.size))
        settings = {
            "train_micro_batch_size_per_gpu": args.batch // self.size // self.offload.microbatches,
            "gradient_accumulation_steps": self.offload.microbatches,
            "gradient_clipping": 0.0,  # no engine clips here; DeepSpeed's default is 1
            "optimizer": {"type": "AdamW", "params": dict(ADAM)},
            "zero_optimization": {"stage": self.stage, **self._places(config, args)},
            "bf16": {"enabled": self.offload.dtype == "bf16"},
            "steps_per_print": 10**9,
            "aio": AIO,
        }
        self.linear: Any = F.linear
        with self._own_linear():
            model = reference.build(config)
            self.engine, *_ = self.load().initialize(
                model=model, config=settings, dist_init_required=False
            )

    @contextlib.contextmanager
    def _own_linear(self) -> Iterator[None]:
        """Context manager: keeps torch's `torch.nn.functional.linear` outside of this engine.

        Stage 3 replaces the function for the full process, but the other engines need torch's.
        """
        others, F.linear = F.linear, self.linear
        try:
            yield
        finally:
            self.linear, F.linear = F.linear, others

    def _places(self, config: GPTConfig, args: Any) -> dict[str, Any]:
        """Returns the keys of `zero_optimization` for the location of the states."""
        o, found = self.offload, dict[str, Any]()
        if o.optimizer != "none":
            found["offload_optimizer"] = {"device": o.optimizer}
        if o.params != "none":
            found["offload_param"] = {"device": o.params}
        for part in found.values():
            part |= (
                {"nvme_path": f"{args.folder}/{type(self).__name__}"}
                if part["device"] == "nvme"
                else {}
            )
        if o.optimizer == "nvme":
            found["sub_group_size"] = SUB_GROUP // self.size
            found["offload_optimizer"] |= {
                "buffer_count": BUFFERS["optimizer"],
                "pipeline_read": True,
                "pipeline_write": True,
            }
        if o.params == "nvme":
            largest = max(config.vocab, 4 * config.d_model) * config.d_model // self.size
            found["offload_param"] |= {
                "buffer_count": BUFFERS["params"],
                "buffer_size": largest,
                "max_in_cpu": 0,
            }
            found |= {
                f"stage3_{name}": LIVE for name in ("max_live_parameters", "max_reuse_distance")
            }
            found["stage3_prefetch_bucket_size"] = LIVE // 2
        return found

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = x.chunk(self.size)[self.index], y.chunk(self.size)[self.index]
        count, losses, self.update_s = self.offload.microbatches, list[Tensor](), 0.0
        with self._own_linear():
            for rows, labels in zip(x.chunk(count), y.chunk(count), strict=True):
                loss = reference.loss_of(self.engine(rows), labels)
                self.engine.backward(loss)
                began = time.perf_counter()
                self.engine.step()  # updates only after the last micro-batch
                self.update_s += time.perf_counter() - began
                losses.append(loss.detach())
        return torch.stack(losses).mean()


class DeepSpeed1(DeepSpeed0):
    """Stage 1."""

    stage = 1


class DeepSpeed2(DeepSpeed0):
    """Stage 2."""

    stage = 2


class DeepSpeed3(DeepSpeed0):
    """Stage 3; by default, small parameters and those that are used again soon stay gathered."""

    stage = 3


def _offloading(kind: str) -> type[DeepSpeed0]:
    offload = MODES[kind]
    return type(f"deepspeed{kind}", (DeepSpeed0,), {"stage": offload.stage, "offload": offload})


DEEPSPEED: dict[str, type[DeepSpeed0]] = {
    "deepspeed0": DeepSpeed0, "deepspeed1": DeepSpeed1, "deepspeed2": DeepSpeed2, "deepspeed3": DeepSpeed3,
    **{f"deepspeed{kind}": _offloading(kind) for kind in MODES},
}  # fmt: skip
