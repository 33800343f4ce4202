"""Chooses between micro-batch-major and layer-major order of a step (`--zero.order auto`).

    choose(microbatches=8, kept=2**20, freed=2**30)     # "layer"

In micro-batch-major order, a rank runs all layers of a micro-batch before the next micro-batch. For
each micro-batch, it sends every sharded parameter twice and every gradient once. In layer-major
order, it runs all micro-batches through a layer before the next layer (arXiv 2512.17570). It then
sends every sharded parameter only twice, and every gradient only once, per step. But it needs more
memory: the activations of all micro-batches exist at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from threed.config import Config
from threed.config.requirements import LAYER_MAJOR


def choose(microbatches: int, kept: int, freed: int) -> Literal["micro", "layer"]:
    """Returns the order of a step, "layer" or "micro", by its memory and messages.

    The order is "layer" if two conditions hold. It must send fewer bytes than the order "micro".
    Its additional activations must take at most as much memory as the sharding and offloading of
    parameters saves. So with `--zero.order auto`, ZeRO-3 never needs more memory than ZeRO-2. In
    the order "layer", it also sends no more bytes than ZeRO-2.

    Args:
        microbatches: number of micro-batches of a step.
        kept: bytes of activations that one micro-batch keeps on the device.
        freed: bytes of parameters that this rank's device does not keep between their uses: the
            slices of other ranks, and this rank's own slices if they are offloaded.
    """
    return "layer" if microbatches > 1 and freed and (microbatches - 1) * kept <= freed else "micro"


def with_order(config: Config, facts: Callable[[], Sequence[tuple[int, int]]]) -> Config:
    """Returns the configuration with `zero.order` decided if it is auto.

    Args:
        config: the resolved configuration.
        facts: function that returns (kept, freed) of every tensor rank, as in
            `memory_estimate.order_facts`. It is called only if the decision depends on it.
    """
    p, zero, train = config.parallel, config.zero, config.train
    if zero.order != "auto":
        return config
    microbatches, order = train.global_batch // (train.micro_batch * (p.dp or 1)), "micro"
    if zero.stage == 3 and microbatches > 1 and p.pp == 1 and p.schedule in LAYER_MAJOR:
        kept, freed = zip(*facts(), strict=True)
        order = choose(microbatches, max(kept), min(freed))
    return config.model_copy(update={"zero": zero.model_copy(update={"order": order})})
