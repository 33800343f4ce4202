"""Rates of GPUs and of the links between them: for the predicted time of a step, and for the number of
chunks of a product that overlaps with a collective.

    gpu = find("h100")                        # or by product name, "NVIDIA H100 80GB HBM3"
    gpu.product_seconds((8192, 6144, 2048))   # a matrix product
    gpu.link(ranks).seconds(nbytes, count)    # collectives of a group of ranks

Each rate has a source in a comment. "Measured" means on an H200 (docs/reference/performance.md, on
a GPU). "Assumption" means that it was neither measured nor published; assumptions for other GPUs
than the H200 are mostly that a GPU reaches the same share of its nominal rates.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

from threed.core.device import Specification

GIB = 2**30
# (rows, columns, share of the rate of the largest tile) of tiles of the output of a product.
# Assumption, by the sizes of cuBLAS' kernels; smaller tiles read more operands per FLOP.
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.9), (128, 64, 0.75), (64, 64, 0.5))
# Share of the peak that a product with large tiles reaches, and seconds for its beginning and end.
# Measured: with these two values, 27 of 30 single products deviate by at most 5 %; those of the
# vocabulary of Llama-3 run at the clock of `sustained`.
_PRODUCT_SHARE, PRODUCT_S = 0.845, 6e-6
# Rate of a product that is added in fp32, divided by the rate of the same product in bf16.
# Measured: 0.957 to 0.971.
_WIDE = 0.965
# Attention of long sequences as a share of the peak, and the length at which it reaches half of
# this share, for the forward and the backward. Measured, with cuDNN: the two lengths of the table.
_ATTENTION, _ATTENTION_BACKWARD = (700 / 989, 1030), (625 / 989, 1620)
_HEAD = 128  # head size with this rate. Assumption: proportional to the size below it.
# Bandwidth of kernels, divided by the bandwidth of a copy. Measured: 61 to 97 % for the kernels of
# csrc/cuda, most between 85 and 95 %.
_KERNEL_SHARE = 0.9
# Bandwidth of a copy, divided by the nominal bandwidth. Measured: 4,256 of 4,800 GB/s.
_COPY_SHARE = 0.887
# Seconds between two kernels of a stream. Assumption.
_GAP_S = 1.5e-6
# Seconds of host time per kernel, including the engine's work. Measured: 65 to 71 µs, for two small
# models on a virtual machine. The step takes at least this time.
_HOST_S = 65e-6
# Bandwidth of a collective, divided by the nominal bandwidth of the link. Assumption, by published
# figures of nccl-tests: about 0.75 to 0.8 over NVLink and over InfiniBand.
_LINK_SHARE = 0.77
# Seconds until the host can launch kernels with sizes that it has read from the device: the copy, and
# the end of the host's wait. Assumption.
READ_S = 30e-6
# Seconds of a collective of few bytes. Assumption. NCCL's tuning table has 7 to 23 µs for 8 ranks
# on NVLink, by protocol.
_LINK_S, _NETWORK_S = 12e-6, 40e-6
# While a collective overlaps with computation, it slows it by this share, because NCCL's kernels
# occupy multiprocessors (16 to 24 of 132) and memory bandwidth. Assumption.
INTERFERENCE = 0.15


@dataclass(frozen=True)
class LinkRate:
    """Bandwidth between the ranks of a group.

    Attributes:
        gb_per_s: bytes that a rank sends per second in a collective, in 10⁹.
        latency: seconds of a collective of few bytes.
    """

    gb_per_s: float
    latency: float

    def seconds(self, nbytes: float, count: float = 1) -> float:
        """Returns the time of `count` collectives that together send `nbytes` per rank."""
        return 0.0 if nbytes == 0 else nbytes / self.gb_per_s / 1e9 + count * self.latency


@dataclass(frozen=True)
class Device:
    """Nominal rates of a GPU, with the share of them that training reaches.

    Attributes:
        spec: name, memory and limits, for a forecast on a machine without this GPU.
        pattern: regular expression of product names.
        peak: dense bf16 peak in TFLOP/s.
        tb_per_s: nominal memory bandwidth.
        processors: number of multiprocessors.
        nvlink: nominal GB/s of NVLink, in one direction.
        network: nominal GB/s of the network per GPU, between machines with 8 GPUs.
        sustained: clock in a step of training, divided by the clock in short runs.
    """

    spec: Specification
    pattern: str
    peak: float
    tb_per_s: float
    processors: int
    nvlink: float
    network: float = 50.0  # 400 Gbit/s. Assumption.
    sustained: float = 1.0

    @property
    def bandwidth(self) -> float:
        """Bytes that kernels read and write per second."""
        return self.tb_per_s * 1e12 * _COPY_SHARE * _KERNEL_SHARE

    def attention_seconds(
        self, flops: float, nbytes: float, length: int, head: int, backward: bool
    ) -> float:
        """Returns the time of fused attention.

        Args:
            flops: executed FLOPs, without the masked half of causal attention.
            nbytes: bytes read and written.
            length: number of positions.
            head: head size.
            backward: whether it is the backward.
        """
        share, half = _ATTENTION_BACKWARD if backward else _ATTENTION
        share *= length / (length + half) * min(1.0, head / _HEAD) * self.sustained
        return max(nbytes / self.bandwidth, flops / (self.peak * 1e12 * share))

    def product_seconds(self, shape: Sequence[int], wide: bool = False, groups: int = 1) -> float:
        """Returns the time of a product of 16-bit matrices, or of equal products in one kernel.

        The output is divided into tiles, of which each multiprocessor computes one at a time. The
        last wave of tiles may leave multiprocessors idle.

        Args:
            shape: m, n and k.
            wide: whether the product is added in fp32.
            groups: number of products. Assumption: one kernel computes their tiles as if they
                belonged to one product, so small groups fill their tiles less, and read more.
        """
        m, n, k = shape
        rate = self.peak * 1e12 * self.sustained * _PRODUCT_SHARE / self.processors
        best = inf
        for rows, columns, share in _TILES:
            waves = ceil(groups * ceil(m / rows) * ceil(n / columns) / self.processors)
            best = min(best, waves * 2 * rows * columns * k / (rate * share))
        nbytes = groups * (2 * (m * k + n * k) + (8 if wide else 2) * m * n)
        return max(best / (_WIDE if wide else 1), nbytes / self.bandwidth) + PRODUCT_S

    def gap_seconds(self, launches: int, host: bool = False) -> float:
        """Returns the time between kernels; with `host`, the host's time for launching them."""
        return launches * (_HOST_S if host else _GAP_S)

    def link(self, ranks: Sequence[int], per_machine: int = 8, pattern: str = "group") -> LinkRate:
        """Returns the bandwidth of a group of ranks.

        Within a machine, it is that of NVLink. Between machines, each rank of the group uses its
        own network card, so gathers and reductions of a group with several ranks per machine are
        faster. In an all-to-all, a rank sends a part of its bytes to other machines, all through
        its card. In a shift, some rank sends all its bytes to another machine.

        Args:
            ranks: global ranks of the group.
            per_machine: number of ranks per machine.
            pattern: to whom a rank sends; see `distributed.journal`.
        """
        inside = LinkRate(self.nvlink * _LINK_SHARE, _LINK_S)
        machines = {rank // per_machine for rank in ranks}
        if len(machines) <= 1:
            return inside
        cards, size = len(ranks) // len(machines) or 1, len(ranks)
        # how often the bytes of a rank would fit through its card, relative to those that must
        ways = {"group": cards, "shift": 1.0, "all-to-all": (size - 1) / (size - cards)}
        network = ways[pattern] * self.network * _LINK_SHARE
        return LinkRate(min(inside.gb_per_s, network), _NETWORK_S)

    def faster(self, **factors: float) -> Device:
        """Returns this device with some nominal rates multiplied by factors."""
        return replace(self, **{name: getattr(self, name) * by for name, by in factors.items()})


def _spec(name: str, gib: float, shared_kib: int) -> Specification:
    return Specification(name, int(gib * GIB), shared_kib * 1024)


# 1,710 of 1,980 MHz under the power limit of 700 W. Measured, in steps of GPT 1.3B.
_HOPPER_CLOCK = 1710 / 1980
DEVICES = {
    # A100 80GB SXM data sheet: 312 TFLOP/s, 2,039 GB/s, NVLink 600 GB/s in both directions; 108
    # multiprocessors. 200 Gbit/s per GPU: DGX A100. Assumption: the same loss of clock as an H100.
    "a100": Device(
        _spec("NVIDIA A100-SXM4-80GB", 79.3, 163), r"\bA[18]00\b.*\b80GB\b", 312.0, 2.039, 108, 300.0, 25.0,
        _HOPPER_CLOCK,
    ),
    # H100 SXM data sheet: 989 TFLOP/s dense, 3.35 TB/s, NVLink 900 GB/s in both directions.
    # Assumption: the clock of the H200, which has the same processor and power limit.
    "h100": Device(
        _spec("NVIDIA H100 80GB HBM3", 79.2, 227), r"\bH100\b.*\bHBM3\b", 989.0, 3.35, 132, 450.0,
        sustained=_HOPPER_CLOCK,
    ),
    # H200 SXM data sheet: 989 TFLOP/s dense, 4.8 TB/s, NVLink 900 GB/s in both directions.
    "h200": Device(
        _spec("NVIDIA H200", 139.8, 227), r"\bG?H200\b(?! NVL)", 989.0, 4.8, 132, 450.0,
        sustained=_HOPPER_CLOCK,
    ),
    # HGX B200 data sheet: 2,250 TFLOP/s dense, 8 TB/s, NVLink 1.8 TB/s in both directions; 148
    # multiprocessors. Assumption: the loss of clock of an H200.
    "b200": Device(
        _spec("NVIDIA B200", 178.4, 227), r"\bG?B200\b", 2250.0, 8.0, 148, 900.0,
        sustained=_HOPPER_CLOCK,
    ),
}  # fmt: skip


def find(name: str | None) -> Device | None:
    """Returns a device by its key in DEVICES or its product name; None if it is not known.

    A MIG slice is not known, because its name does not state its share of the GPU.
    """
    if not name or "MIG" in name:
        return None
    return DEVICES.get(name.lower()) or next(
        (device for device in DEVICES.values() if re.search(device.pattern, name)), None
    )
