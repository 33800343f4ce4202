"""From the keys of a ds_config to a threed configuration, group by group; see the package."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from threed.config import Config, ConfigError
from threed.interop.deepspeed.config import keys
from threed.interop.deepspeed.config.offload import find_places, settle_aio
from threed.interop.deepspeed.config.optimizers import Group
from threed.interop.deepspeed.config.schedulers import LearningRate, learning_rate
from threed.interop.deepspeed.config.section import Auto, Report, Section
from threed.precision import LossScale
from threed.schema import ValidationError

DTYPE_NAMES = {
    "fp32": "fp32", "float32": "fp32", "float": "fp32", "torch.float32": "fp32",
    "bf16": "bf16", "bfloat16": "bf16", "torch.bfloat16": "bf16",
    "fp16": "fp16", "float16": "fp16", "half": "fp16", "torch.float16": "fp16",
}  # fmt: skip
BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
OPTIMIZERS = ("AdamW", "Adam", "SGD", "Lion")
NOT_HERE = "adagrad lamb onebitadam zerooneadam onebitlamb muadam muadamw musgd muon".split()
SHARED = "the default of DeepSpeed and Hugging Face"


@dataclass(frozen=True)
class ModelFacts:
    """What "auto" values are resolved from: the hidden size, and the format of the weights (fp64 stays fp64)."""

    hidden: int | None = None
    dtype: str | None = None


@dataclass(frozen=True)
class Translation:
    """A ds_config as threed understands it.

    train_batch_size = micro_batch × accumulation × world, in samples. learning_rate: None for a constant rate.
    loss_scale: None unless fp16. drop_last: of the data loader. notes: keys without effect, defaults of DeepSpeed that
    apply, "auto" values as they were resolved; one line each, beginning with the key.
    """

    config: Config
    train_batch_size: int
    micro_batch: int
    accumulation: int
    learning_rate: LearningRate | None
    loss_scale: LossScale | None
    drop_last: bool
    notes: tuple[str, ...]


def translate(
    ds: Mapping[str, Any],
    world: int,
    model: ModelFacts = ModelFacts(),
    groups: Sequence[Group] = (),
) -> Translation:
    """Reads a ds_config for `world` data-parallel ranks; ConfigError with everything that is wrong with it.

    groups: parameters with learning rate or decay of their own.
    """
    report = Report()
    top = Section(report, ds)
    micro, accumulation = _batch(top, world)
    clip = top.number("gradient_clipping", 1.0, least=0, auto=Auto(1.0, SHARED))
    precision, scale = _precision(top, model)
    zero = _zero(top, world, model, BYTES[precision["grad_dtype"]])
    optim = _optimizer(top, any(group.weight_decay for group in groups))
    scheduler = top.section("scheduler")
    rate = learning_rate(scheduler, optim["lr"])
    optim["groups"] = _groups(scheduler, groups, rate, optim["lr"], optim["weight_decay"])
    drop_last = top.switch("dataloader_drop_last", False)
    settle_aio(top, "nvme_path" in zero)
    top.section("checkpoint").close(keys.CHECKPOINT)
    top.section("compile").close(keys.COMPILE)
    top.section("tensor_parallel").close(keys.TENSOR_PARALLEL)
    top.section("activation_checkpointing").close(keys.ACTIVATION_CHECKPOINTING)
    top.close(keys.TOP)
    if report.problems:
        raise ConfigError(report.problems)
    batch = micro * accumulation * world
    train = {"global_batch": batch, "micro_batch": micro, "grad_clip": clip}
    try:
        config = Config.model_validate(
            {"zero": zero, "precision": precision, "optim": optim, "train": train}
        )
    except ValidationError as error:
        raise ConfigError(
            [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        ) from None
    return Translation(
        config, batch, micro, accumulation, rate, scale, drop_last, tuple(report.notes)
    )


def _batch(top: Section, world: int) -> tuple[int, int]:
    """Micro-batch and accumulation steps; "auto" is what the others say."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    total, micro, steps = (
        None
        if top.given(name) and top.values[name] == "auto"
        else top.whole(name, None, least=1, named=False)
        for name in names
    )
    if total is None and micro is None:
        top.problem(
            names[1],
            "not given: write the samples in one forward pass of one rank (or train_batch_size)",
        )
        return 1, 1
    if steps is None and (total is None or micro is None):
        steps = 1
        top.note(names[2], "not given: DeepSpeed's default, 1")
    if total is None:
        return int(micro or 1), int(steps or 1)
    given = " × ".join(
        f"{name} {n}" for name, n in zip(names[1:], (micro, steps), strict=True) if n
    )
    share = (micro or 1) * (steps or 1) * world
    if total % share or (micro and steps and total != share):
        near = share if micro and steps else max(total // share, 1) * share
        top.problem(
            names[0],
            f"{total} does not fit {given} × {world} data-parallel ranks = {share}: use {near}",
        )
        return micro or 1, steps or 1
    return int(micro or total // share), int(steps or total // share)


def _precision(top: Section, model: ModelFacts) -> tuple[dict[str, Any], LossScale | None]:
    fp16, bf16 = top.section("fp16"), top.section("bf16" if top.given("bf16") else "bfloat16")
    chosen = []
    for name, section in (("fp16", fp16), ("bf16", bf16)):
        own = model.dtype == name if model.dtype else None
        auto = Auto(own, f"as the model's weights are {model.dtype}", "write true or false")
        if section.switch("enabled", False, auto=auto):
            chosen.append(name)
    if len(chosen) > 1:
        top.problem("bf16", "fp16 and bf16 are both enabled: choose one")
    wide = "fp64" if model.dtype == "fp64" else "fp32"
    dtype = chosen[0] if chosen else wide
    if model.dtype in ("bf16", "fp16") and model.dtype != dtype:
        top.note(
            model.dtype, f"not enabled: the model's {model.dtype} weights are trained in {dtype}"
        )
    scale = _loss_scale(fp16, dtype == "fp16")
    fp16.close(keys.FP16)
    bf16.close(keys.BF16)
    grad = _grad_dtype(top.section("data_types"), dtype, wide)
    wire = _dtype(top, "communication_data_type")
    fixed = "dynamic" if scale is None or scale.dynamic else scale.initial
    return {
        "dtype": dtype,
        "grad_dtype": grad,
        "reduce_dtype": wire or grad,
        "loss_scale": fixed,
    }, scale


def _loss_scale(fp16: Section, enabled: bool) -> LossScale | None:
    fixed = fp16.number("loss_scale", 0, least=0, named=False)
    dynamic = enabled and not fixed
    power = fp16.whole("initial_scale_power", 16, least=0, below=128, named=dynamic)
    scale = LossScale(
        initial=float(fixed) if fixed else 2.0**power,
        window=fp16.whole("loss_scale_window", 1000, least=1, named=dynamic),
        hysteresis=fp16.whole("hysteresis", 2, least=1, named=dynamic),
        consecutive=fp16.switch("consecutive_hysteresis", False),
        minimum=float(fp16.number("min_loss_scale", 1, above=0, named=dynamic)),
        dynamic=not fixed,
    )
    return scale if enabled else None


def _grad_dtype(types: Section, dtype: str, wide: str) -> str:
    own = _dtype(types, "param_dtype")
    if own not in (None, dtype):
        types.problem(
            "param_dtype", f"{own}, but weights are {dtype}: enable bf16 or fp16, or leave it out"
        )
    grad = _dtype(types, "grad_accum_dtype")
    if grad is None and dtype != wide:
        types.note(
            "grad_accum_dtype", f"not given: {wide}, threed's own default (DeepSpeed's is {dtype})"
        )
    types.close(keys.DATA_TYPES)
    return grad or wide


def _dtype(section: Section, key: str) -> str | None:
    name = section.word(key, None, tuple(DTYPE_NAMES), named=False)
    return None if name is None else DTYPE_NAMES[name]


def _zero(top: Section, world: int, model: ModelFacts, width: int) -> dict[str, Any]:
    """width: bytes of a gradient element."""
    if isinstance(top.values.get("zero_optimization"), bool):
        top.problem("zero_optimization", 'a switch is the old form: write {"stage": 1}')
        top.values["zero_optimization"] = {}
    zero = top.section("zero_optimization")
    stage = zero.whole("stage", 0, least=0, below=4)
    values: dict[str, Any] = {"stage": stage}
    hidden = model.hidden
    told = f"from the model's hidden size {hidden}, as Hugging Face fills it in"
    instead = "write a number of elements (the model tells no hidden size)"
    bucket = Auto(hidden * hidden if hidden else None, told, instead)
    if stage == 0:
        zero.ignore("mics_shard_size", "stage 0 slices nothing")
    elif (size := _shard_size(zero, world)) is not None:
        values["shard_size"] = size
    values["bucket_mib"] = (
        _bucket_bytes(zero, stage, values.get("shard_size", world), width, bucket) / 2**20
    )
    values["resident"] = _resident(
        zero, stage, Auto(10 * hidden if hidden else None, told, instead)
    )
    values |= find_places(zero, stage)
    values |= _compressed(zero, stage)
    zero.close(keys.ZERO)
    return values


def _bucket_bytes(zero: Section, stage: int, ranks: int, width: int, auto: Auto) -> int:
    """Bytes of gradients reduced together; under stage 3 each of `ranks` updates no more of them than a sub-group."""
    elements = zero.whole("reduce_bucket_size", None, least=1, auto=auto, named=False)
    if elements is None:
        if stage:
            zero.note(
                "reduce_bucket_size",
                "not given: 64 MiB, threed's own default (DeepSpeed's is 5e8 elements)",
            )
        elements = 64 * 2**20 // width
    if stage < 3:
        zero.ignore(
            "sub_group_size", "a bucket's slice is the unit of the optimizer step below stage 3"
        )
    elif (most := zero.whole("sub_group_size", None, least=1, named=False)) is not None:
        elements = min(elements, most * ranks)
    return int(elements) * width


def _resident(zero: Section, stage: int, auto: Auto) -> int:
    """Elements below which a parameter stays whole under stage 3; DeepSpeed's threshold stays whole itself."""
    long, short = "stage3_param_persistence_threshold", "param_persistence_threshold"
    key = short if zero.given(short) and not zero.given(long) else long
    if stage < 3:
        zero.ignore(key, "parameters are whole anyway below stage 3")
        return 0
    return int(zero.whole(key, 100_000, least=0, auto=auto)) + 1


def _compressed(zero: Section, stage: int) -> dict[str, str]:
    """Returns what ZeRO++ sends as int8 blocks; DeepSpeed's gradients have 4 bits."""
    values = {}
    if zero.switch("zero_quantized_weights", False):
        values["compress_weights"] = "int8"
        if stage != 3:
            zero.problem("zero_quantized_weights", f"true with stage {stage}: use stage 3")
    if zero.switch("zero_quantized_gradients", False):
        values["compress_gradients"] = "int8"
        zero.note("zero_quantized_gradients", "blocks of 256 numbers in 8 bits, not 4")
    return values


def _shard_size(zero: Section, world: int) -> int | None:
    size = zero.whole("mics_shard_size", -1, least=-1, named=False)
    if size in (-1, 0):
        return None
    if world % size:
        zero.problem("mics_shard_size", f"{size} does not divide {world} data-parallel ranks")
        return None
    return int(size)


def _optimizer(top: Section, group_decay: bool) -> dict[str, Any]:
    """Returns the keys of `optim` for an "optimizer" section. group_decay: whether a parameter group has a decay."""
    section = top.section("optimizer")
    optim: dict[str, Any] = {"lr": 1e-3, "warmup": 0, "schedule": "constant", "weight_decay": 0.0}
    if not section.values:
        top.problem(
            "optimizer",
            'not given: write {"type": "AdamW", "params": {"lr": …}}, or pass a torch optimizer',
        )
        return optim
    name = section.word("type", None, OPTIMIZERS, named=False, refused=NOT_HERE)
    section.need("type", "use AdamW, Adam, SGD or Lion")
    params = section.section("params")
    section.close(keys.OPTIMIZER)
    if name is None:
        return optim
    optim["lr"] = params.number("lr", 1e-3, above=0, auto=Auto(instead="write the learning rate"))
    decay = optim["weight_decay"] = params.number(
        "weight_decay", 0.0, least=0, auto=Auto(0.0, SHARED)
    )
    optim["name"] = "adamw" if name == "adam" else name
    if name == "sgd":
        optim["momentum"] = params.number("momentum", 0.0, least=0, below=1)
    else:
        optim["betas"] = tuple(
            params.take("betas", (0.9, 0.999), _no_betas, Auto((0.9, 0.999), SHARED))
        )
    if optim["name"] == "adamw":
        optim["eps"] = params.number("eps", 1e-8, above=0, auto=Auto(1e-8, SHARED))
        if not params.switch("adam_w_mode", True) and name == "adam" and (decay or group_decay):
            params.problem(
                "adam_w_mode",
                "decay as part of the gradient is not there: use true, or weight_decay 0",
            )
    params.close(keys.PARAMS, {"sgd": keys.SGD, "lion": keys.LION}.get(name, keys.ADAM))
    return optim


def _no_betas(value: Any) -> str:
    """What is wrong with a value that should be two decays."""
    fits = isinstance(value, list | tuple) and len(value) == 2
    fits = fits and all(type(beta) in (int, float) and 0 <= beta < 1 for beta in value)
    return "" if fits else "must be two numbers from 0 up to, but not, 1"


def _groups(
    scheduler: Section, groups: Sequence[Group], rate: LearningRate | None, lr: float, decay: float
) -> tuple[dict[str, Any], ...]:
    """Returns the groups of `optim`, if one has another rate or decay than the optimizer. The last group matches all
    parameters: DeepSpeed, unlike threed, applies decay to norms and biases too."""
    rates = {lr if group.lr is None else group.lr for group in groups}
    decays = {decay if group.weight_decay is None else group.weight_decay for group in groups}
    if rate is not None and not rate.relative and rates - {lr}:
        scheduler.note(
            "params.warmup_max_lr", "one learning rate for all parameter groups, as in DeepSpeed"
        )
        groups = [Group(group.names, None, group.weight_decay) for group in groups]
        rates = {lr}
    groups = groups if rates - {lr} or decays - {decay} else ()
    own = tuple(
        {"match": glob.escape(name), "lr": group.lr, "weight_decay": group.weight_decay}
        for group in groups
        for name in group.names
    )
    return (*own, {"match": "*", "weight_decay": decay}) if decay or own else ()
