"""Translates the keys of a ds_config into a threed configuration, group by group."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from threed.config import Config, ConfigError
from threed.config.schema import ValidationError
from threed.core.messages import counted
from threed.interop.deepspeed.config import keys
from threed.interop.deepspeed.config.optimizers import Group
from threed.interop.deepspeed.config.reader import Reader, shown, value_of
from threed.interop.deepspeed.config.schedulers import LearningRate, learning_rate
from threed.ops.precision import DTYPES, LossScale

SHARED = "the default of DeepSpeed and Hugging Face"
TRAINER = "as Hugging Face fills it in"
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
ZERO = "zero_optimization"
THRESHOLD = f"{ZERO}.stage3_param_persistence_threshold"
PLACES = (f"{ZERO}.offload_optimizer", f"{ZERO}.offload_param")
OLD_SWITCHES = {
    "cpu_offload": "offload_optimizer",
    "cpu_offload_param": "offload_param",
    "cpu_offload_params": "offload_param",
}
OWN_ATTENTION = (
    "the attention of a wrapped module cannot be replaced (DeepSpeed 0.19 has removed the key, too): build the model from"
    " threed.layers with core=layers.SparseAttention(threed.interop.block_pattern(ds_config)), or remove the key"
)
# For each optimizer, the keys of `keys.Params` that the optimizer does not have.
NOT_OF = {
    "adam": ("momentum",),
    "adamw": ("momentum",),
    "sgd": ("betas", "eps", "adam_w_mode"),
    "lion": ("momentum", "eps", "adam_w_mode"),
}


@dataclass(frozen=True)
class ModelFacts:
    """Facts about the model that determine the values of keys that are "auto".

    Attributes:
        hidden: the hidden size; None if unknown.
        dtype: the most common dtype of the weights, as a key of `precision.DTYPES`; None if
            unknown. A model with fp64 weights is trained in fp64.
    """

    hidden: int | None = None
    dtype: str | None = None


@dataclass(frozen=True)
class Translation:
    """The translation of a ds_config.

    Attributes:
        config: the threed configuration.
        train_batch_size: number of samples in one step: micro_batch × accumulation × number of
            ranks.
        micro_batch: number of samples in one forward pass of one rank.
        accumulation: number of micro-batches per rank and step.
        learning_rate: the learning rate schedule; None for a constant learning rate.
        rates: for each parameter group, the index of its learning rate in
            `Engine.learning_rates`; None for a group without trained parameters.
        loss_scale: settings of the loss scale; None unless the dtype is fp16.
        drop_last: whether the data loader drops a last batch that is not full.
        gather_on_save: whether `save_16bit_model` writes the weights under ZeRO stage 3.
        tag_validation: "warn", "ignore" or "fail", for a checkpoint whose tag differs between ranks.
        auto_cast: whether floating-point inputs of the module's forward are cast to fp16.
        notes: texts "key: note" about keys without effect and values chosen for "auto".
    """

    config: Config
    train_batch_size: int
    micro_batch: int
    accumulation: int
    learning_rate: LearningRate | None
    rates: tuple[int | None, ...]
    loss_scale: LossScale | None
    drop_last: bool
    gather_on_save: bool
    tag_validation: str
    auto_cast: bool
    notes: tuple[str, ...]


def translate(
    ds: Mapping[str, Any],
    world: int,
    model: ModelFacts = ModelFacts(),
    groups: Sequence[Group] = (),
    trains: bool = True,
) -> Translation:
    """Translates a ds_config into a threed configuration.

    Args:
        ds: the keys and values of the ds_config.
        world: number of data-parallel ranks.
        model: facts about the model, for keys that are "auto".
        groups: parameter groups, which may have their own learning rate or weight decay.
        trains: whether an optimizer is needed; without one, the engine only evaluates.

    Raises:
        ConfigError: if the ds_config is invalid; the message lists all problems.
    """
    reader = Reader(_autos(ds, model), _inactive(ds))
    found = reader.read(ds)
    given = "sparse_attention" in found.model_fields_set
    reader.check(not given, "sparse_attention", OWN_ATTENTION)
    micro, accumulation = _batch(reader, found, world)
    precision, scale = _precision(reader, found, model)
    width = DTYPES[precision["grad_dtype"]].itemsize
    zero = _zero(reader, found.zero_optimization, world, width)
    decays = any(group.weight_decay for group in groups)
    optim = _optimizer(reader, found.optimizer, decays, trains)
    rate = learning_rate(reader, found.scheduler, optim["lr"])
    optim["groups"] = _groups(reader, groups, rate, optim["lr"], optim["weight_decay"])
    if reader.problems:
        raise ConfigError([f"{key}: {text}" for key, text in reader.problems.items()])
    batch = micro * accumulation * world
    train = {"global_batch": batch, "micro_batch": micro, "grad_clip": found.gradient_clipping}
    try:
        config = Config.model_validate(
            {"zero": zero, "precision": precision, "optim": optim, "train": train}
        )
    except ValidationError as error:
        raise ConfigError(
            [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        ) from None
    return Translation(
        config, batch, micro, accumulation, rate, _rates(groups, len(optim["groups"])), scale,
        found.dataloader_drop_last, found.zero_optimization.stage3_gather_16bit_weights_on_model_save,
        found.checkpoint.tag_validation, found.fp16.auto_cast and precision["dtype"] == "fp16",
        tuple(reader.notes),
    )  # fmt: skip


def _autos(ds: Mapping[str, Any], model: ModelFacts) -> dict[str, tuple[Any, str]]:
    """Returns, for each key that may be "auto", the value that replaces "auto".

    The result is the argument `autos` of `Reader`: key -> (value, where the value is from). The
    second entry is text of a message, such as "as Hugging Face fills it in".
    """
    hidden, size = model.hidden, f"from the model's hidden size {model.hidden}, {TRAINER}"
    dtype = f"as the model's weights are {model.dtype}"
    lr = value_of(ds, "optimizer.params.lr")
    lr = lr if isinstance(lr, int | float) else 1e-3
    return {
        **dict.fromkeys(BATCH, (None, "")),
        "gradient_clipping": (1.0, SHARED),
        "optimizer.params.betas": ((0.9, 0.999), SHARED),
        "optimizer.params.eps": (1e-8, SHARED),
        "optimizer.params.weight_decay": (0.0, SHARED),
        "scheduler.params.warmup_min_lr": (0.0, TRAINER),
        "scheduler.params.warmup_max_lr": (lr, "the optimizer's lr, as in Hugging Face"),
        "fp16.enabled": (model.dtype and model.dtype == "fp16", dtype),
        "bf16.enabled": (model.dtype and model.dtype == "bf16", dtype),
        f"{ZERO}.reduce_bucket_size": (hidden and hidden * hidden, size),
        THRESHOLD: (hidden and 10 * hidden, size),
    }


def _inactive(ds: Mapping[str, Any]) -> dict[str, str]:
    """Returns the keys without effect at the ds_config's ZeRO stage or with its offload devices.

    The value of a key in the returned dict is the reason why the key has no effect.
    """
    off: dict[str, str] = {}
    if (stage := value_of(ds, f"{ZERO}.stage")) != 3:
        off[f"{ZERO}.sub_group_size"] = "below stage 3 the update runs per slice of a bucket"
        off[THRESHOLD] = "parameters are not sharded below stage 3"
    if not stage:
        off[f"{ZERO}.mics_shard_size"] = "stage 0 does not shard"
    for place in PLACES:
        device = str(value_of(ds, f"{place}.device")).lower()
        if device != "nvme":
            off[f"{place}.nvme_path"] = "NVMe offload is not enabled"
        if device not in ("nvme", "cpu"):
            for key in (*keys.NO_EFFECT, *keys.REFUSED):
                off |= {key: "offload is not enabled"} if key.startswith(f"{place}.") else {}
    return off


def _batch(reader: Reader, found: keys.DeepSpeedConfig, world: int) -> tuple[int, int]:
    """Returns (micro-batch size, number of accumulation steps).

    If train_batch_size and only one of the two values are given, the other value is computed. If
    only train_batch_size is given, the number of accumulation steps is 1, and the micro-batch size
    is computed. Without train_batch_size, the micro-batch size is required.
    """
    total, micro, steps = (getattr(found, name) for name in BATCH)
    if total is None:
        fix = "set the number of samples in one forward pass of one rank (or train_batch_size)"
        reader.check(micro is not None, BATCH[1], f"not given: {fix}")
        return micro or 1, steps or 1
    steps = 1 if micro is None and steps is None else steps
    share = (micro or 1) * (steps or 1) * world
    rest = 1 if micro and steps else total // share
    sizes = zip(BATCH[1:], (micro, steps), strict=True)
    given = " × ".join(f"{name} {size}" for name, size in sizes if size)
    text = f"does not fit {given} × {world} data-parallel ranks = {share}: use"
    text = f"{total} {text} {max(rest, 1) * share}"
    if micro and steps and world > 1 and total == micro * steps:
        text += (
            ". It fits one rank: on CPUs, pass use_cpu=True to TrainingArguments, or create PartialState(cpu=True) before"
            " the Accelerator, which otherwise count one rank"
        )
    reader.check(total == rest * share > 0, BATCH[0], text)
    return micro or rest, steps or rest


def _precision(
    reader: Reader, found: keys.DeepSpeedConfig, model: ModelFacts
) -> tuple[dict[str, Any], LossScale | None]:
    """Returns (keys of the group `precision`, loss scale or None); only fp16 has a loss scale."""
    fp16, bf16, types = found.fp16, found.bf16.enabled, found.data_types
    wide = "fp64" if model.dtype == "fp64" else "fp32"
    dtype = "fp16" if fp16.enabled else "bf16" if bf16 else wide
    reader.check(not (fp16.enabled and bf16), "bf16", "fp16 and bf16 are both enabled: choose one")
    text = f"{types.param_dtype}, but weights are {dtype}"
    fix = "enable bf16 or fp16, or remove the key"
    reader.check(types.param_dtype in (None, dtype), "data_types.param_dtype", f"{text}: {fix}")
    if model.dtype in ("bf16", "fp16") and model.dtype != dtype:
        text = f"not enabled: the model's {model.dtype} weights are trained in {dtype}"
        reader.note(model.dtype, text)
    scale = LossScale(
        initial=fp16.loss_scale or 2.0**fp16.initial_scale_power,
        window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        consecutive=fp16.consecutive_hysteresis,
        minimum=fp16.min_loss_scale,
        dynamic=not fp16.loss_scale,
    )
    grad = types.grad_accum_dtype or wide
    precision = {
        "dtype": dtype,
        "grad_dtype": grad,
        "reduce_dtype": found.communication_data_type or grad,
        "loss_scale": (fp16.enabled and fp16.loss_scale) or "dynamic",
    }
    return precision, scale if fp16.enabled else None


def _zero(reader: Reader, zero: keys.Zero, world: int, width: int) -> dict[str, Any]:
    """Returns the keys of the group `zero`; `width` is the number of bytes per gradient element."""
    stage, ranks = zero.stage, world if zero.mics_shard_size < 1 else zero.mics_shard_size
    text = f"{ranks} does not divide {counted(world, 'data-parallel rank')}"
    reader.check(world % ranks == 0, f"{ZERO}.mics_shard_size", text)
    fits = stage == 3 or not zero.zero_quantized_weights
    text = f"true with stage {stage}: use stage 3"
    reader.check(fits, f"{ZERO}.zero_quantized_weights", text)
    if zero.zero_quantized_gradients:
        reader.note(
            f"{ZERO}.zero_quantized_gradients", "quantizes blocks of 256 elements to 8 bits, not 4"
        )
    elements = zero.reduce_bucket_size or 64 * 2**20 // width
    # sub_group_size limits the number of elements in one rank's slice of a bucket.
    if zero.sub_group_size is not None:
        elements = min(elements, zero.sub_group_size * ranks)
    return {
        "stage": stage,
        "shard_size": "all" if zero.mics_shard_size < 1 else ranks,
        "bucket_mib": elements * width / 2**20,
        # Parameters of fewer than `resident` elements stay unsharded. DeepSpeed's threshold also
        # includes parameters of exactly this size, so 1 is added.
        "resident": zero.stage3_param_persistence_threshold + 1 if stage == 3 else 0,
        "compress_weights": "int8" if zero.zero_quantized_weights else "none",
        "compress_gradients": "int8" if zero.zero_quantized_gradients else "none",
        **_offload(reader, zero),
    }


def _offload(reader: Reader, zero: keys.Zero) -> dict[str, Any]:
    """Returns the offload keys of the group `zero`: the device per kind of state, and a folder."""
    groups = (zero.offload_optimizer, zero.offload_param)
    devices = {place: group.device for place, group in zip(PLACES, groups, strict=True)}
    for old, key in OLD_SWITCHES.items():
        if getattr(zero, old):
            devices[f"{ZERO}.{key}"] = "cpu"
            reader.note(f"{ZERO}.{old}", f'the old form of "{key}": {{"device": "cpu"}}')
            text = f"is the old form of {key}, which is given too: remove the old one"
            reader.check(key not in zero.model_fields_set, f"{ZERO}.{old}", text)
    folders = []
    for place, group in zip(PLACES, groups, strict=True):
        if group.device == "nvme":
            fix = "not given: set it to a folder on a fast local drive"
            reader.check(group.nvme_path is not None, f"{place}.nvme_path", fix)
            folders += [group.nvme_path] if group.nvme_path else []
    if len({os.path.normpath(folder) for folder in folders}) > 1:
        text = f"{shown(folders[1])}, but offload_optimizer.nvme_path is {shown(folders[0])}"
        fix = "set both to one folder (combine several drives as a RAID-0 volume)"
        reader.problem(f"{PLACES[1]}.nvme_path", f"{text}: a rank swaps to one file; {fix}")
    optimizer, params = devices.values()
    text = f"{optimizer} with stage 0: only sharded states can be offloaded; use stage 1, 2 or 3"
    reader.check(optimizer == "none" or zero.stage > 0, PLACES[0], text)
    text = (
        f"{params} with stage {zero.stage}: only sharded parameters can be offloaded; use stage 3"
    )
    reader.check(params == "none" or zero.stage == 3, PLACES[1], text)
    path = folders[0] if folders else None
    return {"offload_optimizer": optimizer, "offload_params": params, "nvme_path": path}


def _optimizer(
    reader: Reader, found: keys.Optimizer, group_decay: bool, trains: bool
) -> dict[str, Any]:
    """Returns the keys of the group `optim`.

    Args:
        reader: the reader, to which problems of the keys are added.
        found: values of the group "optimizer".
        group_decay: whether a parameter group has a nonzero weight decay.
        trains: whether `optimizer.type` is required.
    """
    fix = "use AdamW, Adam, SGD or Lion, or pass a torch optimizer"
    reader.check(found.type is not None or not trains, "optimizer.type", f"not given: {fix}")
    name, path, params = found.type or "adamw", "optimizer.params", found.params
    reader.refuse_keys(params, path, NOT_OF[name])
    coupled = name == "adam" and not params.adam_w_mode
    text = "weight decay as part of the gradient is not supported: use true, or weight_decay 0"
    decays = bool(params.weight_decay or group_decay)
    reader.check(not (coupled and decays), f"{path}.adam_w_mode", text)
    values = params.model_dump(exclude={"adam_w_mode", *NOT_OF[name]})
    name = "adamw" if name == "adam" else name
    return {**values, "name": name, "warmup": 0, "schedule": "constant"}


def _groups(
    reader: Reader, groups: Sequence[Group], rate: LearningRate | None, lr: float, decay: float
) -> tuple[dict[str, Any], ...]:
    """Returns the key `optim.groups`: one group for each of `groups` that has parameters.

    The order of the groups is kept. A single group with the optimizer's learning rate and weight
    decay is left out, because the other keys of `optim` contain these values.

    A last group matches all other parameters, and sets their weight decay to the optimizer's. It is
    needed because DeepSpeed applies weight decay to norms and biases too, unlike threed. It is
    added if another group is returned, or if the optimizer's weight decay is not 0.

    Args:
        reader: the reader, to which notes are added.
        groups: the program's parameter groups.
        rate: the learning rate schedule, or None.
        lr: the optimizer's learning rate.
        decay: the optimizer's weight decay.
    """
    rates = {lr if group.lr is None else group.lr for group in groups}
    decays = {decay if group.weight_decay is None else group.weight_decay for group in groups}
    if rate is not None and not rate.relative and rates - {lr}:
        text = "one learning rate for all parameter groups, as in DeepSpeed"
        reader.note("scheduler.params.warmup_max_lr", text)
        groups = [Group(group.names, lr, group.weight_decay) for group in groups]
        rates = {lr}
    groups = groups if len(groups) > 1 or rates - {lr} or decays - {decay} else ()
    own = tuple(
        {
            "match": "|".join(glob.escape(name).replace("|", "[|]") for name in group.names),
            "lr": lr if group.lr is None else group.lr,
            "weight_decay": group.weight_decay,
        }
        for group in groups
        if group.names
    )
    return (*own, {"match": "*", "weight_decay": decay}) if decay or own else ()


def _rates(groups: Sequence[Group], configured: int) -> tuple[int | None, ...]:
    """Returns `Translation.rates`.

    Args:
        groups: the program's parameter groups; empty for one group of all parameters.
        configured: number of groups in the key `optim.groups`, see `_groups`.
    """
    if len(groups) < 2:
        return (min(configured, 1),)
    trained = [bool(group.names) for group in groups]
    return tuple(sum(trained[: n + 1]) if used else None for n, used in enumerate(trained))
