"""Training configuration: frozen, typed groups of keys, each key with a default, a meaning and a range.

    config = Config(parallel=ParallelConfig(tp=2), train=TrainConfig(steps=100))

Four phases, four modules. The groups here are what a user may say; `threed.arguments` reads them from presets, TOML
files and flags. `threed.checks` finds combinations that cannot work. `threed.resolution` then fills in what is derived.

A key is `--group.key` on the command line and `key` under `[group]` in TOML, with hyphens; in Python the hyphens are
underscores, and `async` is `async_`. Where a key's default is None, users write the word `none` for it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from threed import architectures
from threed.parse import plain
from threed.schema import BaseModel, ConfigDict, Field, model_validator
from threed.schema import key_name as key_name
from threed.schema import python_name as python_name
from threed.values import (
    Architecture,
    AutoSwitch,
    Betas,
    Count,
    Duration,
    DurationOrNone,
    FolderName,
    Fraction,
    LayerPattern,
    LocalPath,
    LossScale,
    MemorySize,
    Natural,
    NonNegative,
    Optimizer,
    ParamGroups,
    Partition,
    PathText,
    Positive,
    RecomputeOps,
    Scaling,
    Schedule,
    ShardSize,
    Share,
    Spike,
    StepRange,
    Switch,
    Text,
    ZeroStage,
)
from threed.values import ParamGroup as ParamGroup

DType = Literal["fp32", "bf16", "fp16", "fp8", "fp64"]
SumType = Literal["fp32", "bf16", "fp16", "fp64"]
Place = Literal["none", "cpu", "nvme"]


class ConfigError(ValueError):
    """Everything that is wrong with a configuration, each problem one line that names its fix."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = [plain(problem, 4000) for problem in problems]
        super().__init__("\n".join(self.problems))


class _Group(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _read_none(cls, data: Any) -> Any:
        """The word `none` asks for the default of a field whose default is None."""
        optional = {name for name, field in cls.model_fields.items() if field.default is None}
        if not isinstance(data, dict):
            return data
        nones = {key: None for key in optional & data.keys() if data[key] == "none"}
        return data | nones


class ParallelConfig(_Group):
    """How the ranks are laid out, and how the pipeline runs."""

    tp: Count = 1
    """tensor-parallel ranks: every layer is sliced this many ways"""
    pp: Count = 1
    """pipeline ranks: the layers are cut into this many stages"""
    cp: Count = 1
    """context-parallel ranks: every sequence is cut into this many parts"""
    ep: Count = 1
    """expert-parallel ranks"""
    dp: Count | None = None
    """data-parallel ranks; none: what is left of the world"""
    sequence: Switch | None = None
    """slice norms and dropout over tp along the sequence; none: if tp > 1"""
    schedule: Schedule = "1f1b"
    """order of forwards and backwards in the pipeline; of your own: a function or a CSV file"""
    chunks: Count | None = None
    """model chunks on each pipeline rank; none: the schedule's own number"""
    partition: Partition = "balanced"
    """layers of each stage: equal cost, equal count, measured, or counts (embedding and head
    count)"""
    memory_limit_gib: MemorySize | None = None
    """most that a rank's layers may hold where measured times cut; none: a GPU's memory"""
    optimistic_step: AutoSwitch = "auto"
    """update before the gradient norm of all ranks is known, and undo that where it was wrong;
    auto: where the schedule's ranks end at different times"""


class ZeroConfig(_Group):
    """What of the model's state each data-parallel rank keeps only a slice of, and where the slices live."""

    stage: ZeroStage = 1
    """slice nothing (0), optimizer states (1), gradients (2), parameters (3)"""
    bucket_mib: MemorySize = 64.0
    """MiB of gradients reduced together"""
    shard_size: ShardSize = "all"
    """data-parallel ranks that share one set of slices"""
    offload_optimizer: Place = "none"
    """where optimizer states live when not on the device"""
    offload_params: Place = "none"
    """where parameter slices live when not on the device"""
    nvme_path: LocalPath | None = None
    """folder on the NVMe drive for what is offloaded to it"""
    prefetch: Count = 1
    """units gathered ahead of the one that runs under stage 3"""
    resident: Natural = 65536
    """parameters with fewer elements than this stay whole under stage 3"""
    order: Literal["micro", "layer", "auto"] = "micro"
    """run all layers of a micro-batch, or all micro-batches of a layer, before the next"""
    early_update: AutoSwitch = "auto"
    """under order layer with all state on a drive: update a layer beside the backward of those
    before it; takes twice the space there"""
    tile: Count = 1
    """tiles a giant linear layer is cut into, gathered one at a time; 1: none"""
    compress_weights: Literal["none", "int8"] = "none"
    """format that stage 3 gathers sharded parameters in; int8: blocks of 256 with a scale"""
    compress_gradients: Literal["none", "int8"] = "none"
    """format that gradients travel in between data ranks; none: reduce-dtype"""
    delayed_update: Switch = False
    """update on the host while the next step runs, with weights one step old"""


class RecomputeConfig(_Group):
    """Which activations are computed again in the backward pass, and where what is kept lives."""

    mode: Literal["none", "selective", "full"] = "none"
    """compute again: nothing, some operations, whole layers"""
    ops: RecomputeOps = ("attention",)
    """what selective computes again: attention, activation (of the MLP), norm"""
    every: Count = 1
    """recompute each n-th layer"""
    partition: Switch = False
    """keep only a slice over tp of each saved input"""
    offload: Place = "none"
    """where saved inputs live when not on the device"""
    loss_chunks: Count = 1
    """parts that logits are made in, one at a time, and again in the backward; 1: all at once"""
    arena: Switch = False
    """saved inputs in one buffer, and gradient buffers kept, from step to step"""


class PrecisionConfig(_Group):
    """Number formats. Master weights and optimizer states are fp32 (fp64 when dtype is fp64)."""

    dtype: DType = "fp32"
    """format of weights and activations"""
    grad_dtype: SumType | None = None
    """format gradients are kept and summed in; none: fp32, or fp64 with fp64"""
    reduce_dtype: SumType | None = None
    """format gradients travel in between ranks; none: grad-dtype"""
    loss_scale: LossScale = "dynamic"
    """factor on the loss under fp16, found while training or given"""
    cast_inputs: Switch = False
    """cast floating-point tensors of a batch to dtype; false: pass them unchanged"""


class ModelConfig(_Group):
    """The shapes of the transformer."""

    arch: Architecture = "gpt"
    """what the blocks are made of, by the name of a family of models"""
    layers: Count = 6
    """transformer blocks"""
    hidden: Count = 256
    """width of the residual stream"""
    heads: Count = 8
    """attention heads"""
    kv_heads: Count | None = None
    """key and value heads; none: as many as heads"""
    head_dim: Count | None = None
    """size of one head; none: hidden / heads"""
    ffn: Count | None = None
    """inner width of the MLP; none: 4 hidden (gpt), 8/3 hidden (gated)"""
    vocab: Count | None = None
    """vocabulary size; none: the tokenizer's"""
    seq: Count = 256
    """tokens in a sequence"""
    positions: Count | None = None
    """longest sequence: learned positions, and what exports and rope-scaling name; none: seq"""
    dropout: Share = 0.0
    """dropout rate"""
    tied: Switch | None = None
    """head and embedding share one weight; none: yes for gpt and gemma, else no"""
    bias: Switch | None = None
    """biases in linear layers; none: yes for gpt, else no"""
    mlp_bias: Switch | None = None
    """biases in the MLP's; none: as bias for gpt and llama, else no"""
    norm_eps: Positive = 1e-5
    """added to the variance in norms"""
    rope_theta: Positive = 10000.0
    """base of the rotary frequencies"""
    rope_local_theta: Positive | None = None
    """that in layers with a window (gemma3); none: 10000 for gemma3"""
    rope_scaling: Scaling | None = None
    """rotary angles for longer sequences: linear, llama3, yarn or longrope with its keys"""
    partial_rotary_factor: Fraction = 1.0
    """part of each head that rotary positions turn"""
    qk_norm: Switch = False
    """norm queries and keys per head, as Qwen3 does (llama)"""
    window: Natural | None = None
    """positions a query sees in layers with a window; 0: all; none: 4096 for gemma, else all"""
    layer_pattern: LayerPattern | None = None
    """layers with a window (s) and without (f), repeated; none: the arch's own, such as sf"""
    attention_softcap: NonNegative | None = None
    """bound on attention scores, by tanh; 0: none; none: 50 for gemma2, else no bound"""
    logit_softcap: NonNegative | None = None
    """bound on logits, by tanh; 0: none; none: 30 for gemma2, else no bound"""
    query_pre_attn_scalar: Positive | None = None
    """attention scores are divided by its root; none: the size of a head"""

    @property
    def record(self) -> architectures.Architecture:
        """The record of its architecture."""
        return architectures.REGISTERED[self.arch]

    @property
    def layout(self) -> architectures.Architecture:
        """The record of its Hugging Face layout: Qwen3's for a Llama with `qk_norm`."""
        name = "qwen3" if self.arch == "llama" and self.qk_norm else self.arch
        return architectures.REGISTERED[name]


class TrainConfig(_Group):
    """How long and on how much at a time."""

    steps: Count = 200
    """optimizer steps; learning-rate schedules end here"""
    stop_after: Count | None = None
    """end after this step already, with the same schedules"""
    global_batch: Count = 16
    """sequences in a step, over all ranks"""
    micro_batch: Count = 2
    """sequences in one forward pass of one rank"""
    seed: Natural = 1234
    """seed of initial weights, data order and dropout"""
    eval_every: Natural = 0
    """steps between validations; 0: only at the end"""
    eval_samples: Count = 64
    """validation sequences read, each once; all if the data have fewer"""
    grad_clip: NonNegative = 1.0
    """largest global gradient norm; 0: no clipping"""
    max_bad_steps: Natural = 10
    """steps skipped in a row, for what is not finite or a spike, that end the run; 0: none do"""
    max_norm_spike: Spike = 0.0
    """skip steps whose gradient norm is above so many times its running mean; 0: none"""
    sample_tokens: Natural = 200
    """tokens of text generated at the end; 0: none"""
    time_limit: Duration | None = None
    """save and end after so long, from the launcher's start, such as 3h, 90m or 1:30:00; none:
    never"""


class OptimConfig(_Group):
    """The optimizer and its learning rate."""

    name: Optimizer = "adamw"
    """optimizer"""
    lr: Positive = 1e-3
    """peak learning rate"""
    min_lr: NonNegative | None = None
    """learning rate at the end; none: lr / 10"""
    warmup: Natural | None = None
    """steps from 0 to lr, fewer than train.steps; none: 20, at most half of train.steps"""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """learning rate after the warmup"""
    betas: Betas = (0.9, 0.95)
    """decay of the first and second moment (adamw, lion); by convention 0.9,0.99 with lion"""
    momentum: Share = 0.9
    """decay of the momentum (sgd)"""
    eps: Positive = 1e-8
    """added to the root of the second moment (adamw)"""
    weight_decay: NonNegative = 0.1
    """decay, decoupled but for sgd; norms and biases have none"""
    groups: ParamGroups = ()
    """optimizer, lr and weight-decay of parameters by name, such as *.bias; the first pattern that
    fits counts"""


class DataConfig(_Group):
    """The text and how it becomes tokens."""

    path: PathText | None = None
    """.txt, .jsonl, a folder of them, or Megatron .bin/.idx; none: this Python's library sources"""
    tokenizer: Text = "bytes"
    """bytes, the folder of a tokenizer, or the path of a tokenizer.json"""
    bos: AutoSwitch = "auto"
    """documents begin with the bos token; auto: if the tokenizer itself adds it to texts"""
    special_tokens: Literal["text", "parse"] = "text"
    """encode the spelling of a special token in a text as ordinary text, or parse it as the
    token"""
    split: Annotated[Share, Field(gt=0)] = 0.05
    """share of the data kept for validation: its end; files of the default corpus"""


class CheckpointConfig(_Group):
    """What is saved and what a run starts from."""

    every: Natural = 0
    """steps between checkpoints; 0: only at the end"""
    keep: Count = 2
    """newest good checkpoints kept"""
    keep_every: Natural = 0
    """steps between checkpoints that are kept for good besides; 0: none"""
    async_: AutoSwitch = "auto"
    """write while training goes on, if half (auto) or all (true) of the free memory can hold a copy"""
    memory_every: Natural | None = None
    """steps between copies in the machines' memory, which outlive the ranks there; 0: none; none: 1
    with --run.replicate neighbour, else 0"""
    write_limit_mib: MemorySize | None = None
    """most MiB a second that the ranks of a machine write of a checkpoint together; none: no
    limit"""
    resume: Text = "auto"
    """auto: the run's newest good checkpoint if any; none; or the path of a checkpoint, or of a
    Hugging Face folder, which says what the model is"""
    export_hf: Switch = False
    """write a Hugging Face folder at the end"""


class LogConfig(_Group):
    """What a run tells about itself."""

    every: Count = 10
    """steps between lines in metrics.jsonl and wandb"""
    wandb: Literal["auto", "off", "offline", "online"] = "auto"
    """auto: online with a key, else offline"""
    project: Text = "threed"
    """wandb project"""
    profile_steps: StepRange | None = None
    """steps to record with torch.profiler"""


class RunConfig(_Group):
    """Where a run lives."""

    dir: PathText | None = None
    """run folder; none, or --run.name without --run.dir: runs/<name>"""
    name: FolderName | None = None
    """name of the run; none: of the preset or TOML file, else of the arch"""
    check_replicas: Natural = 0
    """steps between comparisons of what several ranks hold copies of; 0: none"""
    hang_timeout: DurationOrNone = 600.0
    """longest that a rank may stay in one phase before the run is ended and the rank named; 0: for
    ever"""
    replicate: Literal["none", "neighbour"] = "none"
    """where copies in memory are kept: on each rank's own machine, or on the next one as well"""
    recheck_bad_steps: Switch = False
    """compute a skipped step twice, to tell a faulty machine from bad data; steps then use
    deterministic kernels only"""
    compile: Switch = False
    """blocks run through torch.compile"""
    compile_backend: Text = "inductor"
    """who compiles them: a backend of torch.compile"""


class Config(BaseModel):
    """All keys of a run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    parallel: ParallelConfig = ParallelConfig()
    zero: ZeroConfig = ZeroConfig()
    recompute: RecomputeConfig = RecomputeConfig()
    precision: PrecisionConfig = PrecisionConfig()
    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig()
    optim: OptimConfig = OptimConfig()
    data: DataConfig = DataConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    run: RunConfig = RunConfig()
