"""Names of other frameworks that users give as flags or keys of threed, with the keys to use.

    find("learning_rate")       # Hint("TrainingArguments", ("optim.lr",), "use --optim.lr")
    find("swiglu")              # Hint("Megatron-LM", ("model.arch",), "use --model.arch")

The names are those of Megatron-LM (`megatron_flags`), of DeepSpeed's configuration (0.19), and of
the `TrainingArguments` of Hugging Face transformers (5.24).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from threed.config.migration import megatron_flags

_OWN_LOOP = "threed.Engine trains the model in a custom loop"
_LAUNCH = "torchrun or srun starts the ranks"
_NEWEST = ": a run keeps its newest checkpoints"
_UPLOAD = ": --checkpoint.export-hf true writes a folder that can be uploaded"
_UNITS = ": parameters are gathered and released one unit at a time"
# The arguments of Hugging Face's Trainer: the keys, separated by spaces; or, after a colon, what to do instead.
_TRAINER: Mapping[str, str] = {
    "output-dir": "run.dir",
    "overwrite-output-dir": ": --checkpoint.resume none starts over",
    "run-name": "run.name",
    "per-device-train-batch-size": "train.micro-batch",
    "per-gpu-train-batch-size": "train.micro-batch",
    "per-device-eval-batch-size": "train.micro-batch",
    "gradient-accumulation-steps": "train.global-batch",
    "auto-find-batch-size": ": `threed plan` forecasts the memory of a batch",
    "num-train-epochs": "train.steps",
    "max-steps": "train.steps",
    "learning-rate": "optim.lr",
    "lr-scheduler-type": "optim.schedule",
    "lr-scheduler-kwargs": "optim.schedule",
    "warmup-steps": "optim.warmup",
    "warmup-ratio": "optim.warmup",
    "optim": "optim.name",
    "optim-args": "optim.betas optim.eps",
    "optim-target-modules": "optim.groups",
    "weight-decay": "optim.weight-decay",
    "adam-beta1": "optim.betas",
    "adam-beta2": "optim.betas",
    "adam-epsilon": "optim.eps",
    "max-grad-norm": "train.grad-clip",
    "label-smoothing-factor": f": {_OWN_LOOP}, with any loss",
    "neftune-noise-alpha": f": {_OWN_LOOP}",
    "bf16": "precision.dtype",
    "fp16": "precision.dtype",
    "bf16-full-eval": "precision.dtype",
    "fp16-full-eval": "precision.dtype",
    "half-precision-backend": "precision.dtype",
    "fp16-opt-level": "precision.dtype",
    "gradient-checkpointing": "recompute.mode",
    "gradient-checkpointing-kwargs": "recompute.mode",
    "activation-checkpointing": "recompute.mode",
    "activation-checkpointing-kwargs": "recompute.mode",
    "torch-compile": "run.compile",
    "torch-compile-backend": "run.compile-backend",
    "torch-compile-mode": ": --run.compile true uses the default mode",
    "use-liger-kernel": ": threed has its own kernels",
    "liger-kernel-config": ": threed has its own kernels",
    "torch-empty-cache-steps": ": threed manages the memory",
    "logging-dir": "run.dir",
    "logging-strategy": "log.every",
    "logging-steps": "log.every",
    "logging-first-step": ": --log.every sets the interval",
    "logging-nan-inf-filter": ": steps that are not finite are skipped",
    "log-level": ": there is one level",
    "log-level-replica": ": only rank 0 prints",
    "log-on-each-node": ": only rank 0 prints",
    "disable-tqdm": ": there is no progress bar",
    "report-to": "log.wandb",
    "project": "log.project",
    "include-num-input-tokens-seen": ": metrics.jsonl counts the tokens",
    "include-tokens-per-second": ": metrics.jsonl has the tokens per second",
    "eval-strategy": "train.eval-every",
    "evaluation-strategy": "train.eval-every",
    "eval-steps": "train.eval-every",
    "eval-delay": ": --train.eval-every sets the interval",
    "eval-on-start": ": --train.eval-every sets the interval",
    "eval-accumulation-steps": ": validation keeps only the loss",
    "prediction-loss-only": ": validation has the loss",
    "save-strategy": "checkpoint.every",
    "save-steps": "checkpoint.every",
    "save-total-limit": "checkpoint.keep",
    "save-only-model": ": checkpoints contain the full state",
    "save-safetensors": ": checkpoints are safetensors",
    "save-on-each-node": ": all ranks write one checkpoint folder",
    "push-to-hub": _UPLOAD,
    "hub-model-id": _UPLOAD,
    "hub-token": _UPLOAD,
    "hub-strategy": _UPLOAD,
    "load-best-model-at-end": _NEWEST,
    "metric-for-best-model": _NEWEST,
    "greater-is-better": _NEWEST,
    "ignore-data-skip": ": a resumed run continues with the next sample",
    "full-determinism": ": results are functions of --train.seed",
    "data-seed": "train.seed",
    "use-cpu": ": set CUDA_VISIBLE_DEVICES= to train on the CPU",
    "no-cuda": ": set CUDA_VISIBLE_DEVICES= to train on the CPU",
    "local-rank": f": {_LAUNCH}",
    "accelerator-config": f": {_LAUNCH}",
    "parallelism-config": "parallel.tp parallel.pp",
    "dataloader-drop-last": ": every step has train.global-batch sequences",
    "dataloader-num-workers": ": samples are read without worker processes",
    "dataloader-pin-memory": ": samples are read without worker processes",
    "dataloader-prefetch-factor": ": samples are read without worker processes",
    "dataloader-persistent-workers": ": samples are read without worker processes",
    "remove-unused-columns": ": threed reads the text",
    "group-by-length": ": every sample has --model.seq tokens",
    "max-seq-length": "model.seq",
    "max-length": "model.seq",
    "block-size": "model.seq",
    "dataset-name": "data.path",
    "dataset-path": "data.path",
    "train-file": "data.path",
    "dataset-text-field": ": the lines of a .jsonl file have the key text",
    "validation-split-percentage": "data.split",
    "model-name-or-path": "checkpoint.resume",
    "tokenizer-name": "data.tokenizer",
    "tokenizer-name-or-path": "data.tokenizer",
    "ddp-find-unused-parameters": ": unused parameters are supported",
    "ddp-bucket-cap-mb": "zero.bucket-mib",
    "ddp-broadcast-buffers": ": buffers are equal on all ranks",
    "ddp-backend": ": the device determines the backend",
    "ddp-timeout": "run.hang-timeout",
    "fsdp": "zero.stage",
    "fsdp-config": "zero.stage",
    "fsdp-min-num-params": "zero.resident",
    "fsdp-transformer-layer-cls-to-wrap": ": every block is a unit",
    "deepspeed": "zero.stage",
    "deepspeed-config": "zero.stage",
    "do-train": ": `threed train` trains, and validates",
    "do-eval": "train.eval-every",
    "do-predict": ": `threed convert` writes a Hugging Face folder",
    "resume-from-checkpoint": "checkpoint.resume",
    "num-processes": f": {_LAUNCH}",
    "mixed-precision": "precision.dtype",
}
# Keys of DeepSpeed's configuration, in the same notation. A name without a group is the key in any group.
_DEEPSPEED: Mapping[str, str] = {
    "train-batch-size": "train.global-batch",
    "train-micro-batch-size-per-gpu": "train.micro-batch",
    "gradient-clipping": "train.grad-clip",
    "steps-per-print": "log.every",
    "communication-data-type": "precision.reduce-dtype",
    "grad-accum-dtype": "precision.grad-dtype",
    "zero-optimization": "zero.stage",
    "zero-optimization.stage": "zero.stage",
    "offload-optimizer": "zero.offload-optimizer",
    "offload-param": "zero.offload-params",
    "cpu-offload": "zero.offload-optimizer",
    "cpu-offload-param": "zero.offload-params",
    "cpu-offload-params": "zero.offload-params",
    "offload-optimizer.device": "zero.offload-optimizer",
    "offload-param.device": "zero.offload-params",
    "reduce-bucket-size": "zero.bucket-mib",
    "allgather-bucket-size": "zero.bucket-mib",
    "stage3-param-persistence-threshold": "zero.resident",
    "stage3-prefetch-bucket-size": "zero.prefetch",
    "stage3-max-live-parameters": _UNITS,
    "stage3-max-reuse-distance": _UNITS,
    "sub-group-size": "zero.bucket-mib",
    "mics-shard-size": "zero.shard-size",
    "zero-hpz-partition-size": "zero.shard-size",
    "zero-quantized-weights": "zero.compress-weights",
    "zero-quantized-gradients": "zero.compress-gradients",
    "overlap-comm": ": communication always overlaps with computation",
    "contiguous-gradients": ": gradients are always contiguous",
    "reduce-scatter": ": it is used from stage 2 on",
    "round-robin-gradients": ": every rank has a slice of each bucket",
    "ratio": ": all optimizer states are offloaded, or none",
    "pin-memory": ": host memory is page-locked if there is a GPU",
    "buffer-count": "zero.bucket-mib",
    "buffer-size": "zero.bucket-mib",
    "aio": ": threed chooses the sizes of transfers",
    "stage3-gather-16bit-weights-on-model-save": "checkpoint.export-hf",
    "gather-16bit-weights-on-model-save": "checkpoint.export-hf",
    "fp16.enabled": "precision.dtype",
    "bf16.enabled": "precision.dtype",
    "bfloat16.enabled": "precision.dtype",
    "amp.enabled": "precision.dtype",
    "torch-autocast.enabled": "precision.dtype",
    "initial-scale-power": ": the dynamic loss scale begins at 65536 and adapts itself",
    "loss-scale": "precision.loss-scale",
    "optimizer.type": "optim.name",
    "scheduler.type": "optim.schedule",
    "warmup-num-steps": "optim.warmup",
    "warmup-max-lr": "optim.lr",
    "warmup-min-lr": ": the warm-up begins at 0",
    "warmup-type": ": the warm-up is linear",
    "total-num-steps": "train.steps",
    "cos-min-ratio": "optim.min-lr",
    "partition-activations": "recompute.partition",
    "cpu-checkpointing": "recompute.offload",
    "contiguous-memory-optimization": "recompute.arena",
    "wall-clock-breakdown": "log.profile-steps",
    "flops-profiler": "log.profile-steps",
    "comms-logger": "log.profile-steps",
    "tensorboard": "log.wandb",
    "autotp-size": "parallel.tp",
    "tp-size": "parallel.tp",
    "sequence-parallel-size": "parallel.cp",
    "tensor-parallel": "parallel.tp",
    "zero-allow-untested-optimizer": ": updates of all optimizers are sharded",
    "zero-force-ds-cpu-optimizer": ": updates of offloaded states run on the host",
    "prescale-gradients": ": gradients are averaged before they are summed",
    "gradient-predivide-factor": ": gradients are averaged before they are summed",
    "load-universal": "checkpoint.resume",
    "elasticity": ": the global batch is the same on any number of ranks",
    "autotuning": ": `threed plan` forecasts memory and time",
    "use-node-local-storage": ": all ranks write one checkpoint folder",
    "tag-validation": ": checkpoints have checksums",
    "curriculum-learning": ": samples have the order of the seed",
    "data-efficiency": ": samples have the order of the seed",
    "sparse-gradients": ": gradients are dense",
    "compression-training": ": threed trains bf16, fp16 or fp32",
    "dump-state": ": a run writes its keys to config.toml",
}


@dataclass(frozen=True)
class Hint:
    """What a name of another framework is in threed.

    Attributes:
        source: the framework.
        keys: keys of threed, as `group.key`; empty if there is none.
        text: the flags to use; if there are none, the reason or what to do.
    """

    source: str
    keys: tuple[str, ...]
    text: str


def _read(source: str, entry: str) -> Hint:
    keys, _, text = entry.partition(": ")
    return _use(source, *keys.split()) if keys else Hint(source, (), text)


def _use(source: str, *keys: str, value: str = "") -> Hint:
    flags = ", ".join(f"--{key}" for key in keys)
    return Hint(source, keys, f"use {flags} {value}".rstrip())


def _candidates(name: str) -> Iterator[Hint]:
    flag = megatron_flags.FLAGS.get(name)
    if flag is not None and flag.keys:
        switch = flag.kind == "key" and not flag.values
        yield _use("Megatron-LM", *flag.keys, value=flag.form if switch else "")
    last = name.rpartition(".")[2]
    for source, table in (("TrainingArguments", _TRAINER), ("DeepSpeed", _DEEPSPEED)):
        for word in dict.fromkeys([name, ".".join(name.split(".")[-2:]), last]):
            if word in table:
                yield _read(source, table[word])
    if flag is not None:
        yield _without_key(flag)


def _without_key(flag: megatron_flags.Flag) -> Hint:
    refused = flag.kind == "refused"
    named = re.findall(
        r"--([\w-]+)", flag.text
    )  # the text names flags of Megatron-LM to use instead
    others = [megatron_flags.FLAGS[name] for name in named if name in megatron_flags.FLAGS]
    keys = dict.fromkeys(f"--{key}" for other in others for key in other.keys)
    here = f"; in threed: {', '.join(keys)}" if keys else ""
    return Hint(
        "Megatron-LM", (), f"{'not supported' if refused else 'not needed'}: {flag.text}{here}"
    )


def find(name: str) -> Hint | None:
    """Returns what a name of another framework is in threed, or None if the name is unknown.

    Args:
        name: a flag or key without hyphens in front; underscores count as hyphens.
    """
    return next(_candidates(name.replace("_", "-")), None)


def nearest(name: str) -> Hint | None:
    """Returns the hint for a name that is unknown itself, or None.

    It is the hint for the known name that differs from `name` by a typing error, or for a family of
    flags of Megatron-LM, such as all flags that begin with `--moe-`.

    Args:
        name: a flag or key without hyphens in front; underscores count as hyphens.
    """
    flag, name = name, name.replace("_", "-")
    megatron = [name for name in megatron_flags.FLAGS if not name.endswith("*")]
    near = difflib.get_close_matches(name, [*megatron, *_TRAINER, *_DEEPSPEED], 1, 0.92)
    if near:
        return find(near[0])
    family = megatron_flags.find(flag)  # these flags have hyphens
    return None if family is None else _without_key(family)
