"""Computes the `perf/` metrics from tokens and seconds, and the mean bytes sent per step.

    meter = Throughput(flops_per_token=6 * parameters, world_size=8, device_name="NVIDIA H200", dtype="bf16")
    meter.add(tokens=524_288, step_s=0.83, data_s=0.01)   # after every step
    metrics |= meter.take()                               # at a logged step: means since last `take`

`flops_per_token` counts the model's forward and backward (about 6 per parameter, plus attention)
without recompute, so MFU is as defined in PaLM (Chowdhery et al. 2022, appendix B). MFU is reported
only if the device's peak is known for the dtype, so never on a CPU.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

# (pattern of the name from `device.name`, dense bf16 tensor-core peak in TFLOP/s). The first
# matching pattern applies. Source: the vendors' data sheets. NVIDIA mostly states the peak "with
# sparsity", which is twice the dense peak.
_PEAKS: tuple[tuple[str, float], ...] = (
    (r"\bGB200\b", 2500.0),  # GB200 NVL72 data sheet: 360 PFLOP/s with sparsity for 72 GPUs
    (r"\bB200\b", 2250.0),  # HGX B200 data sheet: 36 PFLOP/s with sparsity for 8 GPUs
    (r"\bGH200\b", 989.0),  # GH200 data sheet: 1,979 TFLOP/s with sparsity
    (r"\bH200 NVL\b", 835.0),  # H200 data sheet, NVL column: 1,671 TFLOP/s with sparsity
    (r"\bH200\b", 989.0),  # H200 data sheet, SXM column: 1,979 TFLOP/s with sparsity
    (r"\bH100 NVL\b", 835.0),  # H100 data sheet, NVL column: 1,671 TFLOP/s with sparsity
    (r"\bH100 PCIe\b", 756.0),  # H100 data sheet, PCIe column: 1,513 TFLOP/s with sparsity
    (r"\bH100\b.*\bHBM3\b", 989.0),  # H100 data sheet, SXM column: 1,979 TFLOP/s with sparsity
    (r"\bH800\b(?! PCIe)", 989.0),  # an H100 SXM with slower NVLink and fp64
    (r"\bA[18]00\b", 312.0),  # A100 data sheet, all form factors; the A800 differs only in NVLink
    (r"\bA30\b", 165.0),  # A30 data sheet: 165 TFLOP/s dense
    (r"\bA10\b", 125.0),  # A10 data sheet: 125 TFLOP/s dense
    (r"\bL40S\b", 362.0),  # L40S data sheet: 362.05 TFLOP/s dense
    (r"\bL40\b", 181.0),  # L40 data sheet: 181.05 TFLOP/s dense
    (r"\bL4\b", 121.0),  # L4 data sheet: 242 TFLOP/s with sparsity
    (r"\bMI300X\b", 1307.4),  # AMD Instinct MI300X data sheet: 1,307.4 TFLOP/s dense
)


def peak_tflops(device_name: str | None, dtype: str = "bf16") -> float | None:
    """Returns the dense peak of a device in TFLOP/s, or None if it is unknown.

    The peak of a MIG slice is unknown, because its name does not state its share of the GPU. The
    peak in fp32 is unknown, because fp32 matrix products may or may not use TF32.

    Args:
        device_name: name from `device.name`.
        dtype: bf16 or fp16, which have the same peak; the peak of other dtypes is unknown.
    """
    if not device_name or dtype not in ("bf16", "fp16") or "MIG" in device_name:
        return None
    return next((peak for pattern, peak in _PEAKS if re.search(pattern, device_name)), None)


def perf(
    tokens: int, seconds: float, flops_per_token: float, world_size: int, peak: float | None = None
) -> dict[str, float]:
    """Returns tokens per second, TFLOP/s per device and, if `peak` is known, MFU, by metric name.

    Args:
        tokens: tokens processed by all devices.
        seconds: time in which they were processed, above 0.
        flops_per_token: FLOPs of the model's forward and backward per token.
        world_size: number of devices.
        peak: peak of one device in TFLOP/s, for MFU; None if unknown.
    """
    rate = tokens / seconds
    tflops = rate * flops_per_token / world_size / 1e12
    rates = {
        "perf/tokens_per_s": rate,
        "perf/tokens_per_s_per_device": rate / world_size,
        "perf/tflops_per_device": tflops,
    }
    return rates if peak is None else {**rates, "perf/mfu": tflops / peak}


class Throughput:
    """Accumulates tokens and times of steps. `take` returns mean rates and times, and resets.

    Args:
        flops_per_token: FLOPs of the model's forward and backward per token.
        world_size: number of devices.
        device_name: name of the device, for MFU.
        dtype: dtype of the matrix products, for MFU.
    """

    def __init__(
        self,
        flops_per_token: float,
        world_size: int,
        device_name: str | None = None,
        dtype: str = "fp32",
    ) -> None:
        self._flops_per_token = flops_per_token
        self._world_size = world_size
        self._peak = peak_tflops(device_name, dtype)
        self._sums: Counter[str] = Counter()

    def add(self, tokens: int, step_s: float, **phases: float) -> None:
        """Adds a step.

        Args:
            tokens: tokens of all devices.
            step_s: duration of the step in seconds.
            phases: seconds of parts of the step, by names such as data_s.
        """
        self._sums.update({"tokens": tokens, "steps": 1, "step_s": step_s, **phases})

    def take(self) -> dict[str, float]:
        """Returns the mean perf/ metrics of the steps since the last call.

        The result is empty if there was no step.
        """
        sums: dict[str, float] = dict(self._sums)
        self._sums.clear()
        if not sums.get("step_s"):
            return {}
        tokens, steps = int(sums.pop("tokens")), sums.pop("steps")
        rates = perf(tokens, sums["step_s"], self._flops_per_token, self._world_size, self._peak)
        return rates | {f"perf/{name}": seconds / steps for name, seconds in sums.items()}


class Traffic:
    """Accumulates the bytes that this rank sends. `take` returns the mean per step, and resets."""

    def __init__(self) -> None:
        self._sent: Counter[str] = Counter()
        self._steps = 0

    def add(self, sent: Mapping[str, int]) -> None:
        """Adds a step.

        Args:
            sent: bytes sent in the step, by parallel axis.
        """
        self._sent.update(sent)
        self._steps += 1

    def take(self) -> dict[str, float]:
        """Returns the mean bytes sent per step since the last call, by axis.

        The result is empty if there was no step.
        """
        means = {axis: sent / self._steps for axis, sent in self._sent.items()}
        self._sent.clear()
        self._steps = 0
        return means
