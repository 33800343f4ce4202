"""Names of other frameworks that users give as flags or keys of threed, with the keys to use.

    find("learning_rate")       # Hint("TrainingArguments", ("optim.lr",), "use --optim.lr")
    find("swiglu")              # Hint("Megatron-LM", ("model.arch",), "use --model.arch")

The names are those of Megatron-LM (`megatron_flags`), of DeepSpeed's configuration (0.19), of the
`TrainingArguments` of Hugging Face transformers (5.24), and of torchtitan's configuration.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from threed.config.migration import megatron_flags

_OWN_LOOP = "threed.Engine trains the model in a custom loop"


def _by_name(table: Mapping[str, str]) -> dict[str, str]:
    return {name: entry for entry, names in table.items() for name in names.split()}


# The arguments of Hugging Face's Trainer, by the keys to use, separated by spaces; or, after a colon, by what to do instead.
_TRAINER = _by_name({
    "run.dir": "output-dir logging-dir",
    ": --checkpoint.resume none starts over": "overwrite-output-dir",
    "run.name": "run-name",
    "train.micro-batch": "per-device-train-batch-size per-gpu-train-batch-size per-device-eval-batch-size",
    "train.global-batch": "gradient-accumulation-steps",
    ": `threed plan` forecasts the memory of a batch": "auto-find-batch-size",
    "train.steps": "num-train-epochs max-steps",
    "optim.lr": "learning-rate",
    "optim.schedule": "lr-scheduler-type lr-scheduler-kwargs",
    "optim.warmup": "warmup-steps warmup-ratio",
    "optim.name": "optim",
    "optim.betas optim.eps": "optim-args",
    "optim.groups": "optim-target-modules",
    "optim.weight-decay": "weight-decay",
    "optim.betas": "adam-beta1 adam-beta2",
    "optim.eps": "adam-epsilon",
    "train.grad-clip": "max-grad-norm",
    f": {_OWN_LOOP}, with any loss": "label-smoothing-factor",
    f": {_OWN_LOOP}": "neftune-noise-alpha",
    "precision.dtype": "bf16 fp16 bf16-full-eval fp16-full-eval half-precision-backend fp16-opt-level mixed-precision",
    "recompute.mode":
        "gradient-checkpointing gradient-checkpointing-kwargs activation-checkpointing"
        " activation-checkpointing-kwargs",
    "run.compile": "torch-compile",
    "run.compile-backend": "torch-compile-backend",
    ": --run.compile true uses the default mode": "torch-compile-mode",
    ": threed has its own kernels": "use-liger-kernel liger-kernel-config",
    ": threed manages the memory": "torch-empty-cache-steps",
    "log.every": "logging-strategy logging-steps",
    ": --log.every sets the interval": "logging-first-step",
    ": steps that are not finite are skipped": "logging-nan-inf-filter",
    ": there is one level": "log-level",
    ": only rank 0 prints": "log-level-replica log-on-each-node",
    ": there is no progress bar": "disable-tqdm",
    "log.wandb": "report-to",
    "log.project": "project",
    ": metrics.jsonl counts the tokens": "include-num-input-tokens-seen",
    ": metrics.jsonl has the tokens per second": "include-tokens-per-second",
    "train.eval-every": "eval-strategy evaluation-strategy eval-steps do-eval",
    ": --train.eval-every sets the interval": "eval-delay eval-on-start",
    ": validation keeps only the loss": "eval-accumulation-steps",
    ": validation has the loss": "prediction-loss-only",
    "checkpoint.every": "save-strategy save-steps",
    "checkpoint.keep": "save-total-limit",
    ": checkpoints contain the full state": "save-only-model",
    ": checkpoints are safetensors": "save-safetensors",
    ": all ranks write one checkpoint folder": "save-on-each-node",
    ": --checkpoint.export-hf true writes a folder that can be uploaded":
        "push-to-hub hub-model-id hub-token hub-strategy",
    ": a run keeps its newest checkpoints": "load-best-model-at-end metric-for-best-model greater-is-better",
    ": a resumed run continues with the next sample": "ignore-data-skip",
    ": results are functions of --train.seed": "full-determinism",
    "train.seed": "data-seed",
    ": set CUDA_VISIBLE_DEVICES= to train on the CPU": "use-cpu no-cuda",
    ": torchrun or srun starts the ranks": "local-rank accelerator-config num-processes",
    "parallel.tp parallel.pp": "parallelism-config",
    ": every step has train.global-batch sequences": "dataloader-drop-last",
    ": samples are read without worker processes":
        "dataloader-num-workers dataloader-pin-memory dataloader-prefetch-factor dataloader-persistent-workers",
    ": threed reads the text": "remove-unused-columns",
    ": every sample has --model.seq tokens": "group-by-length",
    "model.seq": "max-seq-length max-length block-size",
    "data.path": "dataset-name dataset-path train-file",
    ": the lines of a .jsonl file have the key text": "dataset-text-field",
    "data.split": "validation-split-percentage",
    "checkpoint.resume": "model-name-or-path resume-from-checkpoint",
    "data.tokenizer": "tokenizer-name tokenizer-name-or-path",
    ": unused parameters are supported": "ddp-find-unused-parameters",
    "zero.bucket-mib": "ddp-bucket-cap-mb",
    ": buffers are equal on all ranks": "ddp-broadcast-buffers",
    ": the device determines the backend": "ddp-backend",
    "run.hang-timeout": "ddp-timeout",
    "zero.stage": "fsdp fsdp-config deepspeed deepspeed-config",
    "zero.resident": "fsdp-min-num-params",
    ": every block is a unit": "fsdp-transformer-layer-cls-to-wrap",
    ": `threed train` trains, and validates": "do-train",
    ": `threed convert` writes a Hugging Face folder": "do-predict",
})  # fmt: skip
# Keys of DeepSpeed's configuration, in the same notation. A name without a group is the key in any group.
_DEEPSPEED = _by_name({
    "train.global-batch": "train-batch-size",
    "train.micro-batch": "train-micro-batch-size-per-gpu",
    "train.grad-clip": "gradient-clipping",
    "log.every": "steps-per-print",
    "precision.reduce-dtype": "communication-data-type",
    "precision.grad-dtype": "grad-accum-dtype",
    "zero.stage": "zero-optimization zero-optimization.stage",
    "zero.offload-optimizer": "offload-optimizer cpu-offload offload-optimizer.device",
    "zero.offload-params": "offload-param cpu-offload-param cpu-offload-params offload-param.device",
    "zero.bucket-mib": "reduce-bucket-size allgather-bucket-size sub-group-size buffer-count buffer-size",
    "zero.resident": "stage3-param-persistence-threshold",
    "zero.prefetch": "stage3-prefetch-bucket-size",
    ": parameters are gathered and released one unit at a time":
        "stage3-max-live-parameters stage3-max-reuse-distance",
    "zero.shard-size": "mics-shard-size zero-hpz-partition-size",
    "zero.compress-weights": "zero-quantized-weights",
    "zero.compress-gradients": "zero-quantized-gradients",
    ": communication always overlaps with computation": "overlap-comm",
    ": gradients are always contiguous": "contiguous-gradients",
    ": parameters are gathered by NCCL": "compile.symmetric-memory",
    ": it is used from stage 2 on": "reduce-scatter",
    ": every rank has a slice of each bucket": "round-robin-gradients",
    ": all optimizer states are offloaded, or none": "ratio",
    ": host memory is page-locked if there is a GPU": "pin-memory",
    ": threed chooses the sizes of transfers": "aio",
    "checkpoint.export-hf": "stage3-gather-16bit-weights-on-model-save gather-16bit-weights-on-model-save",
    "precision.dtype": "fp16.enabled bf16.enabled bfloat16.enabled amp.enabled torch-autocast.enabled",
    ": the dynamic loss scale begins at 65536 and adapts itself": "initial-scale-power",
    "precision.loss-scale": "loss-scale",
    "optim.name": "optimizer.type",
    "optim.schedule": "scheduler.type",
    "optim.warmup": "warmup-num-steps",
    "optim.lr": "warmup-max-lr",
    ": the warm-up begins at 0": "warmup-min-lr",
    ": the warm-up is linear": "warmup-type",
    "train.steps": "total-num-steps",
    "optim.min-lr": "cos-min-ratio",
    "recompute.partition": "partition-activations",
    "recompute.offload": "cpu-checkpointing",
    "recompute.arena": "contiguous-memory-optimization",
    "log.profile-steps": "wall-clock-breakdown flops-profiler comms-logger",
    "log.wandb": "tensorboard",
    "parallel.tp": "autotp-size tp-size tensor-parallel",
    "parallel.cp": "sequence-parallel-size",
    ": updates of all optimizers are sharded": "zero-allow-untested-optimizer",
    ": updates of offloaded states run on the host": "zero-force-ds-cpu-optimizer",
    ": gradients are averaged before they are summed": "prescale-gradients gradient-predivide-factor",
    "checkpoint.resume": "load-universal",
    ": the global batch is the same on any number of ranks": "elasticity",
    ": `threed plan` forecasts memory and time": "autotuning",
    ": all ranks write one checkpoint folder": "use-node-local-storage",
    ": checkpoints have checksums": "tag-validation",
    ": samples have the order of the seed": "curriculum-learning data-efficiency",
    ": gradients are dense": "sparse-gradients",
    ": threed trains bf16, fp16 or fp32": "compression-training",
    ": a run writes its keys to config.toml": "dump-state",
})  # fmt: skip
# Keys of torchtitan's configuration, in the same notation. Here a name counts only with its group.
_TORCHTITAN = _by_name({
    ": --config FILE.toml reads a TOML file of threed": "job.config-file",
    "run.dir": "job.dump-folder checkpoint.folder",
    "model.arch": "model.name",
    ": --preset selects a published model": "model.flavor",
    "checkpoint.resume": "model.hf-assets-path checkpoint.initial-load-path checkpoint.initial-load-in-hf",
    "data.tokenizer": "model.tokenizer-path",
    "data.path": "training.dataset training.dataset-path",
    "train.micro-batch": "training.local-batch-size training.batch-size",
    "train.micro-batch model.seq": "training.num-tokens-per-microbatch-per-dp-rank",
    "train.global-batch": "training.global-batch-size",
    "train.global-batch model.seq": "training.num-tokens-per-train-step",
    "model.seq": "training.seq-len",
    "train.grad-clip": "training.max-norm",
    "precision.dtype": "training.dtype training.mixed-precision-param",
    "precision.reduce-dtype": "training.mixed-precision-reduce",
    "zero.offload-optimizer zero.offload-params": "training.enable-cpu-offload",
    "run.compile": "training.compile compile.enable",
    "run.compile-backend": "compile.backend",
    "train.seed": "training.seed debug.seed",
    "zero.stage": "parallelism.data-parallel-shard-degree parallelism.fsdp-reshard-after-forward",
    "zero.shard-size": "parallelism.data-parallel-replicate-degree",
    "parallel.tp": "parallelism.tensor-parallel-degree",
    "parallel.sequence": "parallelism.enable-sequence-parallel",
    "parallel.symmetric-memory": "parallelism.enable-async-tensor-parallel",
    "parallel.pp": "parallelism.pipeline-parallel-degree",
    "parallel.schedule":
        "parallelism.pipeline-parallel-schedule parallelism.pipeline-parallel-schedule-csv",
    "parallel.partition":
        "parallelism.pipeline-parallel-layers-per-stage parallelism.module-fqns-per-model-part"
        " parallelism.pipeline-parallel-first-stage-less-layers"
        " parallelism.pipeline-parallel-last-stage-less-layers",
    "parallel.cp": "parallelism.context-parallel-degree",
    "parallel.ep": "parallelism.expert-parallel-degree",
    "recompute.mode": "activation-checkpoint.mode activation-checkpoint.selective-ac-option",
    "optim.betas": "optimizer.beta1 optimizer.beta2",
    "optim.warmup": "lr-scheduler.warmup-steps",
    "optim.schedule": "lr-scheduler.decay-type lr-scheduler.decay-ratio",
    "optim.min-lr": "lr-scheduler.min-lr-factor",
    "checkpoint.every": "checkpoint.interval checkpoint.enable checkpoint.enable-checkpoint",
    "checkpoint.keep": "checkpoint.keep-latest-k",
    "checkpoint.async": "checkpoint.async-mode",
    "checkpoint.export-hf": "checkpoint.last-save-in-hf",
    "log.every": "metrics.log-freq",
    "log.wandb": "metrics.enable-wandb metrics.enable-tensorboard",
    "log.profile-steps": "profiling.enable-profiling profiling.profile-freq profiler.enable-profiling",
    "train.eval-every": "validation.enable validation.freq",
    "run.hang-timeout": "comm.init-timeout-seconds comm.train-timeout-seconds",
})  # fmt: skip


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
    if name in _TORCHTITAN:
        yield _read("torchtitan", _TORCHTITAN[name])
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
    # The text names flags of Megatron-LM to use instead.
    named = re.findall(r"--([\w-]+)", flag.text)
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
