"""Suites of engines that are compared with each other, and ZeRO's formula for bytes sent."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Suite:
    """Engines that run in turn; the first is the reference of the others.

    Attributes:
        ranks: number of ranks.
        engines: names of the engines.
        options: flags of the worker for the model and the batch.
        parity: largest relative difference between the losses of the first steps.
        threads: number of threads per rank.
    """

    ranks: int
    engines: tuple[str, ...]
    options: tuple[str, ...] = ()
    parity: float = 1e-5
    threads: int = 1


@dataclass(frozen=True)
class Offload:
    """The location of an engine's training states, and its dtype.

    Attributes:
        stage: the ZeRO stage.
        optimizer: location of the optimizer states: none, cpu or nvme.
        params: location of the parameters.
        dtype: dtype of weights and activations.
        microbatches: micro-batches per rank and step.
        order: threed's `--zero.order`.
    """

    stage: int
    optimizer: str = "none"
    params: str = "none"
    dtype: str = "fp32"
    microbatches: int = 1
    order: str = "micro"


TORCH = ("ddp", "ddp_again", "torch_zero1", "fsdp2_keep", "fsdp2")
DEEPSPEED = ("deepspeed0", "deepspeed1", "deepspeed2", "deepspeed3")
OURS = (
    "threed_zero1",
    "threed_zero2",
    "threed_zero3",
    "wrapped_zero1",
    "wrapped_zero2",
    "wrapped_zero3",
)
BASE = ("--preset", "base", "--batch", "2", "--microbatches", "2")

SCHEDULES = (
    "1f1b", "gpipe", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "zb-auto", "chimera", "dualpipe",
    "dualpipev",
)  # fmt: skip

SUITES = {
    "dp2": Suite(2, ("ddp", "threed_zero1")),
    "dp2_fsdp2": Suite(2, ("fsdp2", "threed_zero1")),
    "tp2": Suite(2, ("dtensor_tp", "threed_tp")),
    "tp2_sp": Suite(2, ("dtensor_tp_sp", "threed_tp_sp")),
    "pp2": Suite(2, ("torch_1f1b", "threed_1f1b")),
    "pp2_gpipe": Suite(2, ("torch_gpipe", "threed_gpipe")),
    "pp2_interleaved": Suite(2, ("torch_interleaved", "threed_interleaved")),
    "pp2_zb": Suite(2, ("torch_zb", "threed_zb-h1", "threed_zb-h2", "threed_zb-auto")),
    "pp2_zb-v": Suite(2, ("torch_zb-v", "threed_zb-v", "threed_v-half", "threed_v-min")),
    "pp2_dualpipev": Suite(
        2, ("torch_dualpipev", "threed_dualpipev", "threed_dualpipe", "threed_chimera")
    ),
    "pp2_all": Suite(
        2,
        (
            "torch_1f1b",
            "torch_interleaved",
            "torch_zb",
            "torch_zb-v",
            "torch_dualpipev",
            "threed_1f1b",
            "threed_interleaved",
            "threed_zb-h2",
            "threed_zb-v",
            "threed_zb-auto",
            "threed_dualpipev",
        ),
    ),
    "2x2x2": Suite(8, ("torch_3d", "threed_3d")),
    "2x2x2_sp": Suite(8, ("torch_3d_sp", "threed_3d_sp")),
    "compile": Suite(1, ("compiled", "threed_compiled", "single", "threed_zero0")),
    "zero": Suite(2, (*TORCH, *DEEPSPEED, "threed_zero0", *OURS)),
    "zero-base": Suite(2, (*TORCH, *DEEPSPEED[1:], *OURS), BASE),
    "zero4": Suite(4, (*TORCH, *DEEPSPEED[1:], *OURS)),
}

# Modes of offload: the stage and the location. On a machine without a GPU, all states are in host memory anyway, so the
# modes with "cpu" compare only the implementations. There is no mode for fp32 parameters on a drive, because DeepSpeed
# 0.19.8 stores them in bf16 there, so its results differ.
OFFLOADS = {
    "2_cpu": Offload(2, "cpu"), "2_cpu_bf16": Offload(2, "cpu", dtype="bf16"),
    "3_cpu": Offload(3, "cpu", "cpu"), "3_cpu_bf16": Offload(3, "cpu", "cpu", "bf16"),
    "3_nvme": Offload(3, "nvme", "cpu"), "3_nvme_bf16": Offload(3, "nvme", "cpu", "bf16"),
    "3_nvme_all_bf16": Offload(3, "nvme", "nvme", "bf16"),
}  # fmt: skip
# All states on the drive, with 8 micro-batches of 512 tokens, each of which reads the parameters again.
_ALL = OFFLOADS["3_nvme_all_bf16"]
ACCUMULATED = {
    "3_nvme_all_bf16_by_micro": replace(_ALL, microbatches=8),
    "3_nvme_all_bf16_by_layer": replace(_ALL, microbatches=8, order="layer"),
}  # fmt: skip
MODES = OFFLOADS | ACCUMULATED
_MAKERS = ("deepspeed", "threed_zero", "wrapped_zero")


def _beside_deepspeed(kind: str, ranks: int) -> tuple[str, Suite]:
    """Returns the suite of a mode of offload, with DeepSpeed and threed.

    A step ends when all offloaded states are written back.
    """
    stage, place, *rest = kind.split("_")
    engines = tuple(f"{maker}{kind}" for maker in _MAKERS)
    options = ("--preset", "200m", "--batch", str(ranks), "--warmup", "3", "--settle")
    # In bf16 losses may differ by one rounding: DeepSpeed's fp32 masters start as the rounded weights, and its gradients
    # are bf16.
    suite = Suite(
        ranks,
        engines,
        options,
        2**-8 if OFFLOADS[kind].dtype == "bf16" else 1e-5,
        threads=2 // ranks,
    )
    return "-".join(("offload", place, stage, *rest, f"dp{ranks}")), suite


SUITES |= dict(_beside_deepspeed(kind, ranks) for kind in OFFLOADS for ranks in (1, 2))

_BY_MICRO, _BY_LAYER = ACCUMULATED
SUITES["accumulate-nvme"] = Suite(
    1, (f"deepspeed{_BY_MICRO}", f"threed_zero{_BY_MICRO}", f"threed_zero{_BY_LAYER}"),
    ("--preset", "200m", "--batch", "32", "--warmup", "2", "--steps", "1", "--settle"), 2**-8, threads=2,
)  # fmt: skip

# The ZeRO stage of every data-parallel engine, according to its documentation.
STAGES = {
    "ddp": 0, "ddp_again": 0, "torch_zero1": 1, "fsdp2_keep": 2, "fsdp2": 3,
    "deepspeed0": 0, "deepspeed1": 1, "deepspeed2": 2, "deepspeed3": 3,
    "threed_zero0": 0, "threed_zero1": 1, "threed_zero2": 2, "threed_zero3": 3,
    "wrapped_zero0": 0, "wrapped_zero1": 1, "wrapped_zero2": 2, "wrapped_zero3": 3,
    **{f"{maker}{kind}": offload.stage for kind, offload in MODES.items() for maker in _MAKERS},
}  # fmt: skip
FP32_STAGES = {engine: stage for engine, stage in STAGES.items() if "bf16" not in engine}


def wire_mib(stage: int, parameters: int, ranks: int) -> float:
    """Returns the MiB that all ranks together send in a step of one micro-batch in fp32.

    A rank sends 2 (N-1)/N times the number of parameters, or 3 (N-1)/N times at stage 3
    (Rajbhandari et al. 2020, ZeRO, section 7).
    """
    return (3 if stage == 3 else 2) * 4 * parameters * (ranks - 1) / 2**20
