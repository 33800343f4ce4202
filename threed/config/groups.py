"""Training configuration: frozen, typed groups of keys with defaults, ranges and descriptions.

    config = Config(parallel=ParallelConfig(tp=2), train=TrainConfig(steps=100))

This module declares the keys, except those of the model (`threed.config.model`).
`threed.config.arguments` reads their values from presets, TOML files and flags,
`threed.config.checks` finds invalid combinations, and `threed.config.resolution` fills in derived
values.

A key is `--group.key` on the command line and `key` under `[group]` in TOML, with hyphens; in
Python the hyphens are underscores, and `async` is `async_`. The default None means "not set". On
the command line and in TOML, the value `none` unsets a key with this default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from threed.config.base import ConfigError as ConfigError
from threed.config.base import Group, Suggesting
from threed.config.model import ModelConfig as ModelConfig
from threed.config.schema import BaseModel, ConfigDict
from threed.config.schema import key_name as key_name
from threed.config.schema import python_name as python_name
from threed.config.values import (
    AutoSwitch,
    Betas,
    ContextHeads,
    Count,
    Duration,
    DurationOrNone,
    FolderName,
    LossScale,
    MemorySize,
    Multiple,
    Natural,
    NonNegative,
    Optimizer,
    ParamGroups,
    Partition,
    PathText,
    Positive,
    RecomputeOps,
    ResumeText,
    Schedule,
    ShardSize,
    Share,
    StepRange,
    Switch,
    Text,
    TokenizerText,
    ValidationShare,
    ZeroStage,
)
from threed.config.values import ParamGroup as ParamGroup

DType = Literal["fp32", "bf16", "fp16", "fp8", "fp64"]
SumType = Literal["fp32", "bf16", "fp16", "fp64"]
Place = Literal["none", "cpu", "nvme"]


class ParallelConfig(Group):
    """Sizes of the parallel axes, and the pipeline."""

    tp: Count = 1
    """tensor-parallel ranks; every layer is sharded over them"""
    pp: Count = 1
    """pipeline-parallel ranks; the layers are split into stages over them"""
    cp: Count = 1
    """context-parallel ranks; every sequence is split over them"""
    cp_heads: ContextHeads = "auto"
    """context-parallel ranks that exchange positions for attention heads; the other factor of cp is
    a ring between which keys travel; auto: the factor that sends the fewest bytes"""
    ep: Count = 1
    """expert-parallel ranks: blocks of dp × cp × tp ranks, each of which holds other experts"""
    dp: Count | None = None
    """data-parallel ranks; if not set, the world size divided by tp × pp × cp"""
    sequence: Switch | None = None
    """sequence parallelism: shard norms and dropout over tp along the sequence; if not set, on when
    tp > 1"""
    symmetric_memory: Switch = False
    """on GPUs of one machine, overlap the products of sequence parallelism with reads from the
    memory of the other GPUs, by torch's symmetric memory, instead of with NCCL's collectives"""
    schedule: Schedule = "1f1b"
    """pipeline schedule: a built-in name, a custom function, or a CSV file"""
    chunks: Count | None = None
    """model chunks per pipeline rank; if not set, the schedule's default"""
    partition: Partition = "balanced"
    """layers per stage: balanced (equal cost), uniform (equal count), measured (equal measured
    time), or explicit counts, in which the embedding and the head are layers too"""
    memory_limit_gib: MemorySize | None = None
    """GiB that the layers of one rank may use when the partition is measured; if not set, the
    memory of the GPU"""
    optimistic_step: AutoSwitch = "auto"
    """update before the global gradient norm is known, and undo the update if the norm requires
    it; auto: if ranks of the schedule finish at different times and all state is on the device"""


class ZeroConfig(Group):
    """Sharding and offload of optimizer states, gradients and parameters."""

    stage: ZeroStage = 1
    """shard nothing (0), optimizer states (1), also gradients (2), also parameters (3)"""
    bucket_mib: MemorySize = 64.0
    """MiB of gradients per reduction"""
    shard_size: ShardSize = "all"
    """ranks per shard group, a divisor of dp × cp; the groups are replicas of each other; all: one
    group"""
    offload_optimizer: Place = "none"
    """where optimizer states are stored: on the device (none), in host memory (cpu), or on a
    drive (nvme)"""
    offload_params: Place = "none"
    """where sharded parameters are stored: device (none), host memory (cpu), or a drive (nvme)"""
    nvme_path: PathText | None = None
    """folder for offloaded data, on a fast local NVMe drive; required if something is offloaded
    to nvme"""
    prefetch: Count = 1
    """units gathered ahead of the running unit under stage 3"""
    resident: Natural = 65536
    """parameters with fewer elements than this stay unsharded under stage 3"""
    order: Literal["micro", "layer", "auto"] = "micro"
    """micro: run all layers of a micro-batch before the next micro-batch; layer: run all
    micro-batches of a layer before the next layer; auto: layer if sharded parameters free enough
    memory for the activations, else micro"""
    early_update: AutoSwitch = "auto"
    """update each layer during the backward of the layers before it, with twice the space on the
    drive; auto: if the order is layer and all state is on a drive"""
    tile: Count = 1
    """tiles per large linear layer, gathered one at a time; 1: no tiling"""
    compress_weights: Literal["none", "int8"] = "none"
    """format of stage 3's parameter all-gathers; none: the same as precision.dtype; int8: blocks
    of 256 numbers with one scale"""
    compress_gradients: Literal["none", "int8"] = "none"
    """format of gradients sent between data ranks; none: the same as precision.reduce-dtype;
    int8: blocks of 256 numbers with one scale"""
    delayed_update: Switch = False
    """update on the host while the next step runs, so that each step uses weights one update old"""


class RecomputeConfig(Group):
    """Activations to recompute in the backward, and storage of saved inputs."""

    mode: Literal["none", "selective", "full"] = "none"
    """recompute nothing (none), the operations in ops (selective), or entire layers (full)"""
    ops: RecomputeOps = ("attention",)
    """operations that selective recomputes: attention, activation (of the MLP), norm"""
    every: Count = 1
    """recompute every n-th layer"""
    partition: Switch = False
    """shard each saved input over tp"""
    offload: Place = "none"
    """where saved inputs are stored: on the device (none), host memory (cpu), or a drive (nvme)"""
    loss_chunks: Count = 1
    """chunks of the sequence on which the head runs, recomputed in the backward; 1: all at once"""
    mlp_chunks: Count = 1
    """chunks of the sequence on which each MLP runs, recomputed in the backward; 1: all at once"""
    gathered: AutoSwitch = "auto"
    """gather inputs that sequence parallelism shards again in the backward; auto: on accelerators"""
    arena: Switch = False
    """allocate gradient buffers and a buffer for all saved inputs once, and reuse them every step"""


class PrecisionConfig(Group):
    """Number formats. Master weights and optimizer states are fp32 (fp64 when dtype is fp64)."""

    dtype: DType = "fp32"
    """format of weights and activations"""
    grad_dtype: SumType | None = None
    """format in which gradients are stored and accumulated; if not set, fp32 (fp64 if dtype is
    fp64)"""
    reduce_dtype: SumType | None = None
    """format in which gradients are sent between ranks; if not set, grad-dtype"""
    loss_scale: LossScale = "dynamic"
    """loss scale under fp16: dynamic, or a constant"""
    cast_inputs: Switch = False
    """cast floating-point tensors of the batches of step and evaluate to dtype; false: pass them
    unchanged"""


class ExpertsConfig(Group):
    """Training of mixtures of experts."""

    aux_loss: NonNegative = 0.0
    """coefficient of the loss that balances the load of experts within each sequence; 0: none"""
    z_loss: NonNegative = 0.0
    """coefficient of the mean squared log-sum-exp of the router's logits; 0: none"""
    bias_rate: NonNegative = 1e-3
    """step size of the selection biases of models that balance experts by biases; 0: they stay as
    they are"""
    room: Multiple = 0.0
    """rows that a rank can send to each expert rank, as a multiple of the mean, so that the host reads
    no sizes; a step that needs more is skipped, and the room doubles; 0: as many as needed"""
    capacity: NonNegative = 0.0
    """tokens of a sequence that an expert takes in training, as a multiple of the mean; later tokens
    are dropped; 0: no limit"""


class TrainConfig(Group):
    """Length of the run, batch sizes, validation and skipped steps."""

    steps: Count = 200
    """optimizer steps of the run, which the learning-rate schedule spans"""
    stop_after: Count | None = None
    """stop after this step, but keep the learning-rate schedule of train.steps; if not set, the last"""
    global_batch: Count = 16
    """sequences per optimizer step, over all ranks"""
    micro_batch: Count = 2
    """sequences per forward pass of one rank"""
    seed: Natural = 1234
    """seed of initial weights, data order and dropout"""
    eval_every: Natural = 0
    """steps between validations; 0: only at the end"""
    eval_samples: Count = 64
    """validation sequences per validation, without repetition; all if the data have fewer"""
    grad_clip: NonNegative = 1.0
    """maximum global gradient norm; 0: no clipping"""
    max_bad_steps: Natural = 10
    """end the run after this many consecutive skipped steps (gradients not finite, or a spike of
    their norm); 0: never"""
    max_norm_spike: Multiple = 0.0
    """skip a step if its gradient norm exceeds this multiple of the running mean; 0: never"""
    sample_tokens: Natural = 200
    """tokens of text to generate at the end; 0: none"""
    time_limit: Duration | None = None
    """save and stop after this time since the start of the launcher, such as 3h, 90m or 1:30:00;
    if not set, no limit"""


class OptimConfig(Group):
    """The optimizer and its learning rate."""

    name: Optimizer = "adamw"
    """optimizer"""
    lr: Positive = 1e-3
    """peak learning rate"""
    min_lr: NonNegative | None = None
    """learning rate at the last step; if not set, lr / 10"""
    warmup: Natural | None = None
    """steps of linear warm-up from 0 to lr, fewer than train.steps; if not set, 20, at most half of
    train.steps"""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """shape of the learning rate after the warm-up; wsd: constant, then linear decay over the
    last 20 %"""
    betas: Betas = (0.9, 0.95)
    """decay rates of the first and second moments (adamw, lion); 0.9,0.99 is usual for lion"""
    momentum: Share = 0.9
    """decay rate of the momentum (sgd)"""
    eps: Positive = 1e-8
    """added to the square root of the second moment (adamw)"""
    weight_decay: NonNegative = 0.1
    """weight decay, decoupled except for sgd; not applied to norms and biases"""
    groups: ParamGroups = ()
    """optimizer, lr and weight-decay for parameters whose names match a pattern, such as *.bias;
    the first matching pattern applies"""


class DataConfig(Group):
    """Training data and tokenizer."""

    path: PathText | None = None
    """.txt or .jsonl file, a folder of them, or Megatron .bin/.idx; if not set, the source files of
    Python's standard library"""
    tokenizer: TokenizerText = "bytes"
    """bytes, the folder of a tokenizer, or the path of a tokenizer.json"""
    bos: AutoSwitch = "auto"
    """begin documents with the bos token; auto: if the tokenizer itself adds it to texts"""
    special_tokens: Literal["text", "parse"] = "text"
    """encode a special token that a text spells out as ordinary text, or parse it as the token"""
    split: ValidationShare = 0.05
    """fraction of the data for validation: the last tokens, or some files of the default corpus"""
    packing: Switch = False
    """train the documents of a window as if alone: attention stays inside, positions begin at 0"""


class CheckpointConfig(Group):
    """Checkpoints: when to write them, which to keep, and which to resume from."""

    every: Natural = 0
    """steps between checkpoints; 0: only at the end"""
    keep: Count = 2
    """number of newest good checkpoints to keep"""
    keep_every: Natural = 0
    """steps between checkpoints that are kept permanently, in addition to keep; 0: none"""
    async_: AutoSwitch = "auto"
    """write checkpoints in the background while training continues, if a copy fits into half
    (auto) or all (true) of the free host memory; false: training waits"""
    memory_every: Natural | None = None
    """steps between checkpoints in host memory, which survive a restart of the ranks; 0: never;
    if not set, 1 with --run.replicate neighbor, else 0"""
    write_limit_mib: MemorySize | None = None
    """maximum speed, in MiB per second, at which all ranks of a machine together write a
    checkpoint; if not set, no limit"""
    resume: ResumeText = "auto"
    """auto (the run's newest good checkpoint, if any), none, or the path of a checkpoint or a
    Hugging Face folder; a Hugging Face folder sets the model"""
    export_hf: Switch = False
    """write a Hugging Face folder at the end"""


class LogConfig(Group):
    """Metrics, wandb and the profiler."""

    every: Count = 10
    """steps between lines in metrics.jsonl and wandb"""
    wandb: Literal["auto", "off", "offline", "online"] = "auto"
    """off, offline or online; auto: online with an API key, else offline"""
    project: Text = "threed"
    """wandb project"""
    profile_steps: StepRange | None = None
    """steps to record with torch.profiler, counted from 1; if not set, no profile"""


class RunConfig(Group):
    """Folder and name of the run, fault detection, compilation, and CUDA graphs."""

    dir: PathText | None = None
    """run folder; if not set: runs/NAME, where NAME is run.name. If a TOML file sets run.dir, the flag
    --run.name without --run.dir still selects runs/NAME"""
    name: FolderName | None = None
    """name of the run in wandb, and of the run folder if run.dir is not set; if not set, the name of
    the preset or TOML file, else the architecture"""
    check_replicas: Natural = 0
    """steps between comparisons of replicated state across ranks; 0: never"""
    hang_timeout: DurationOrNone = 600.0
    """time that a rank may spend in one phase before the run ends and reports it; 0: no limit"""
    replicate: Literal["none", "neighbor"] = "none"
    """machines that store checkpoints in memory: each rank's own (none), or also the next one
    (neighbor)"""
    recheck_bad_steps: Switch = False
    """compute a skipped step twice, to distinguish a faulty machine from bad data; all steps
    then use deterministic kernels only"""
    compile: Switch = False
    """run blocks through torch.compile"""
    compile_backend: Text = "inductor"
    """backend of torch.compile"""
    graphs: AutoSwitch = "auto"
    """replay passes as CUDA graphs; auto: only for small layers on one GPU with ZeRO stage 0 or 1"""


class Config(Suggesting):
    """The full configuration of a run: all groups of keys.

    Values are checked when a group is created. A configuration is frozen: `model_copy(update=...)`
    returns a changed copy.

    Attributes:
        parallel: sizes of the parallel axes, and the pipeline.
        zero: ZeRO and offloading.
        recompute: activation checkpointing.
        precision: dtypes and the loss scale.
        model: architecture and shapes of the model.
        train: steps, batch sizes and limits.
        optim: the optimizer and its learning rate.
        data: training data and tokenizer.
        checkpoint: when to save, what to keep, what to resume from.
        log: metrics, wandb and the profiler.
        run: run folder, fault detection, compilation and CUDA graphs.

    Example:

        config = Config(parallel=ParallelConfig(tp=2), train=TrainConfig(steps=100))
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    parallel: ParallelConfig = ParallelConfig()
    zero: ZeroConfig = ZeroConfig()
    recompute: RecomputeConfig = RecomputeConfig()
    precision: PrecisionConfig = PrecisionConfig()
    model: ModelConfig = ModelConfig()
    experts: ExpertsConfig = ExpertsConfig()
    train: TrainConfig = TrainConfig()
    optim: OptimConfig = OptimConfig()
    data: DataConfig = DataConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    run: RunConfig = RunConfig()


GROUPS: Mapping[str, type[BaseModel]] = {
    name: info.annotation
    for name, info in Config.model_fields.items()
    if isinstance(info.annotation, type)
}
