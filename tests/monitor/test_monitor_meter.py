"""Throughput: rates by hand, averages over steps, MFU only where the peak is known."""

from __future__ import annotations

import pytest

from threed.monitor.meter import Throughput, peak_tflops, perf

RATES = {"perf/tokens_per_s", "perf/tokens_per_s_per_device", "perf/tflops_per_device"}


def test_rates_by_hand() -> None:
    # 8,000 tokens in 2 s at 6e9 FLOPs each on 4 devices: 24 TFLOP/s in all, 6 each
    assert perf(8000, 2.0, 6e9, 4, peak=60.0) == {
        "perf/tokens_per_s": 4000.0,
        "perf/tokens_per_s_per_device": 1000.0,
        "perf/tflops_per_device": pytest.approx(6.0),
        "perf/mfu": pytest.approx(0.1),
    }
    assert perf(8000, 2.0, 6e9, 4).keys() == RATES


def test_take_averages_over_its_steps_and_starts_anew() -> None:
    meter = Throughput(6e9, 4, "NVIDIA A100-SXM4-80GB", "bf16")
    assert meter.take() == {}
    meter.add(4000, 1.0, data_s=0.1, ckpt_s=0.5)
    meter.add(4000, 3.0, data_s=0.3)
    taken = meter.take()
    assert taken == {
        "perf/tokens_per_s": 2000.0,
        "perf/tokens_per_s_per_device": 500.0,
        "perf/tflops_per_device": pytest.approx(3.0),
        "perf/mfu": pytest.approx(3.0 / 312.0),
        "perf/step_s": 2.0,
        "perf/data_s": pytest.approx(0.2),
        "perf/ckpt_s": 0.25,
    }
    assert meter.take() == {}
    meter.add(1000, 0.5)
    assert meter.take()["perf/tokens_per_s"] == 2000.0


def test_no_mfu_on_a_cpu() -> None:
    meter = Throughput(6e9, 4)
    meter.add(4000, 1.0)
    assert meter.take().keys() == RATES | {"perf/step_s"}


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA A800-SXM4-80GB", 312.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA A10G", None),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.0),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA H200", 989.0),
        ("NVIDIA H200 NVL", 835.0),
        ("NVIDIA GH200 480GB", 989.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40", 181.0),
        ("NVIDIA L40S", 362.0),
        ("AMD Instinct MI300X", 1307.4),
        ("NVIDIA GeForce RTX 2080 Ti", None),
        ("cpu", None),
        ("", None),
        (None, None),
    ],
)
def test_peaks_by_device_name(name: str | None, peak: float | None) -> None:
    assert peak_tflops(name) == peak
    assert peak_tflops(name, "fp16") == peak
    assert peak_tflops(name, "fp32") is None
