"""The rules that translate flags of Megatron-LM that depend on each other.

Each function of `RULES` gets all flags of a command line (`Given`), and yields the settings of
threed that follow from them. A flag that is missing has the default of Megatron-LM.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from threed.config.architectures.rope_scaling import RopeScaling
from threed.config.migration.megatron_experts import (
    architecture_with_experts,
    biases_with_experts,
    experts,
)
from threed.config.migration.megatron_flags import ARCHITECTURES, FLAGS, LLAMA3_SCALING
from threed.config.migration.megatron_items import Given, Items, Setting, Untranslatable, Unused


def _architecture(given: Given) -> Items:
    norm, gated = given.text("normalization", "LayerNorm"), "swiglu" in given
    rotary = "use-rotary-position-embeddings" in given
    positions = "rope" if rotary else given.text("position-embedding-type", "learned_absolute")
    arch = ARCHITECTURES.get((norm, positions, gated))
    if "no-position-embedding" in given and positions != "rope":
        raise Untranslatable("--no-position-embedding: it needs --position-embedding-type rope")
    if arch is None:
        given_text = f"--normalization {norm} with --position-embedding-type {positions}"
        raise Untranslatable(
            f"{given_text} and {'--swiglu' if gated else 'no --swiglu'}: use RMSNorm with rope and --swiglu (Llama), or"
            " LayerNorm with learned_absolute (GPT-2), or write a custom model (FILE.py:MODEL)"
        )
    if arch == "llama":
        arch = _variant(given)
    if "num-experts" in given:
        arch = architecture_with_experts(given, arch)
    yield Setting("model.arch", arch, given.among(*_SHAPES))
    if "window-size" in given:
        yield Setting("model.window", _window(given), ("window-size",))
    if arch == "qwen2" and "window-size" in given:
        yield Setting("model.layer-pattern", "s", ("window-size",))
    if arch == "phi3" and "rotary-percent" in given:
        factor = given.text("rotary-percent")
        yield Setting("model.partial-rotary-factor", factor, ("rotary-percent",))


_SHAPES = (
    "normalization", "position-embedding-type", "use-rotary-position-embeddings", "swiglu", "add-qkv-bias",
    "window-size", "rotary-percent", "no-position-embedding",
)  # fmt: skip


def _variant(given: Given) -> str:
    """Returns the architecture of a model with RMSNorm, rotary positions and SwiGLU."""
    biased = "add-qkv-bias" in given and "disable-bias-linear" in given
    partial = given.number("rotary-percent", 1.0) != 1
    if biased and partial:
        both = "--add-qkv-bias with --rotary-percent"
        raise Untranslatable(f"{both}: no built-in model has both; write a custom model")
    if partial:
        return "phi3"
    if biased:
        return "qwen2"
    return "mistral" if "window-size" in given else "llama"


def _window(given: Given) -> str:
    """Returns the number of positions of a sliding window, including the query's own."""
    sizes = re.fullmatch(r"\(?(\d+),\s*0\)?", given.text("window-size"))
    if sizes is None:
        problem = "must be N,0: threed has windows of earlier positions only"
        raise Untranslatable(f"--window-size {given.text('window-size')}: {problem}")
    return str(int(sizes[1]) + 1)


def _weights(given: Given) -> Items:
    gated, flags = "swiglu" in given, ("ffn-hidden-size",)
    width = "moe-ffn-hidden-size"
    if width in given and "num-experts" in given and "qk-layernorm" not in given:
        yield Setting("model.ffn", given.text(width), given.among("ffn-hidden-size", width))
    elif "ffn-hidden-size" in given:
        yield Setting("model.ffn", given.text("ffn-hidden-size"), flags)
    elif gated and "hidden-size" in given:
        yield Setting("model.ffn", str(int(4 * given.integer("hidden-size") * 2 / 3) // 64 * 64))
    if "vocab-size" in given:
        yield Setting("model.vocab", given.text("vocab-size"), ("vocab-size",))
    untied = "untie-embeddings-and-output-weights"
    if untied in given:
        yield Setting("model.tied", "false", (untied,))
    elif gated:
        yield Setting("model.tied", "true")
    if given.among("mtp-num-layers", "mtp-loss-scaling-factor") == ("mtp-num-layers",):
        yield Setting("model.mtp-loss", "0.1")
    if "hidden-dropout" not in given:
        yield Setting("model.dropout", "0.1")
    if "attention-dropout" not in given:
        reason = "Megatron-LM's default is 0.1; attention probabilities have no dropout in threed"
        yield Unused("attention-dropout", reason)


def _biases(given: Given) -> Items:
    without = "disable-bias-linear" in given
    if "num-experts" in given:
        yield from biases_with_experts(given)
        return
    plain = "swiglu" not in given or _variant(given) == "llama"
    if without and plain:
        yield Setting("model.bias", "false", ("disable-bias-linear",))
    elif without:
        yield Unused("disable-bias-linear", "the architecture has no biases in linear layers")
    elif "swiglu" in given:
        yield Setting("model.bias", "true")
    if "qk-layernorm" in given:
        yield Setting("model.qk-norm", "true", ("qk-layernorm",))


def _attention(given: Given) -> Items:
    groups, grouped = "num-query-groups", "group-query-attention"
    if grouped in given:
        yield Setting("model.kv-heads", given.text(groups, "1"), given.among(grouped, groups))
    elif groups in given and given.text(groups) != given.text("num-attention-heads"):
        fix = f"Megatron-LM ignores it without --{grouped}; add this flag, or leave it out"
        raise Untranslatable(f"--{groups} {given.text(groups)}: {fix}")
    if "use-rope-scaling" in given:
        factor = given.number("rope-scaling-factor", 8.0)
        if factor <= 0:
            raise Untranslatable(f"--rope-scaling-factor {factor:g}: must be more than 0")
        scaling = RopeScaling.model_validate({**LLAMA3_SCALING, "factor": factor})
        flags = given.among("use-rope-scaling", "rope-scaling-factor")
        yield Setting("model.rope-scaling", str(scaling), flags)


def _pipeline(given: Given) -> Items:
    per_stage = "num-layers-per-virtual-pipeline-stage"
    per_rank = "num-virtual-stages-per-pipeline-rank"
    stages, chunks = given.integer("pipeline-model-parallel-size"), given.integer(per_rank)
    if per_stage in given and per_rank in given:
        raise Untranslatable(f"--{per_stage} with --{per_rank}: keep one")
    if per_stage in given:
        layers, size = given.integer("num-layers", 0), given.integer(per_stage)
        chunks, rest = divmod(layers, stages * size)
        if rest or not chunks:
            problem = f"{layers} layers cannot be divided into {stages} stages of {size} layers"
            raise Untranslatable(f"--{per_stage} {size}: {problem}; use --{per_rank}")
    partition, flags = _partition(given, stages)
    if "pipeline-model-parallel-layout" in given:
        chunks, rest = divmod(len(partition), stages)
        if rest:
            count = f"{len(partition)} stages are not a multiple of {stages} pipeline ranks"
            raise Untranslatable(f"--pipeline-model-parallel-layout: {count}")
    elif partition and chunks > 1:
        raise Untranslatable(
            f"--{flags[0]} with virtual stages: use --pipeline-model-parallel-layout"
        )
    if chunks > 1:
        virtual = (*given.among(per_stage, per_rank), *flags)
        yield Setting("parallel.schedule", "interleaved", virtual)
        yield Setting("parallel.chunks", str(chunks), virtual)
    if partition:
        yield Setting("parallel.partition", ",".join(map(str, partition)), flags)


def _partition(given: Given, stages: int) -> tuple[list[int], tuple[str, ...]]:
    """Returns the layers of each stage, with embedding and head as layers, and the flags for it.

    Without such flags, both results are empty.
    """
    layout = "pipeline-model-parallel-layout"
    if layout in given:
        return _layout(given.text(layout)), (layout,)
    ends = ("decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers")
    flags = given.among(*ends)
    if not flags or stages == 1:
        return [], flags
    first, last = (given.integer(name) if name in given else 0 for name in ends)
    between = stages - len(flags)
    size, rest = divmod(given.integer("num-layers", 0) - first - last, max(1, between))
    if rest or size < 0 or (not between and size):
        others = "the other layers cannot be divided evenly over the other stages"
        raise Untranslatable(f"--{' --'.join(flags)}: {others}")
    counts = [first] * (first > 0) + [size] * between + [last] * (last > 0)
    return [counts[0] + 1, *counts[1:-1], counts[-1] + 1], flags


def _layout(text: str) -> list[int]:
    """Returns the layers per stage of a pipeline layout such as "Ettt|(tt|)*3ttL"."""
    spelled = text.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        spelled = re.sub(pattern, lambda found: found[1] * int(found[2]), spelled)
    stages = spelled.split("|")
    if not re.fullmatch(r"E[t|]*L", spelled) or not all(stages):
        needs = "threed needs E in the first stage, L in the last one, and a layer in every stage"
        raise Untranslatable(f"--pipeline-model-parallel-layout {text}: {needs}")
    return [len(stage) for stage in stages]


def _tensor(given: Given) -> Items:
    if given.integer("tensor-model-parallel-size") == 1:
        for name in given.among("sequence-parallel"):
            yield Unused(name, "it needs tensor parallelism")
    elif "sequence-parallel" in given:
        yield Setting("parallel.sequence", "true", ("sequence-parallel",))
    else:
        yield Setting("parallel.sequence", "false")


_STRATEGIES = {"no_shard": "0", "optim": "1", "optim_grads": "2", "optim_grads_params": "3"}


def _sharding(given: Given) -> Items:
    strategy, instances = "data-parallel-sharding-strategy", "num-distributed-optimizer-instances"
    keeps = "torch-fsdp2-no-reshard-after-forward"
    if "use-torch-fsdp2" in given:
        yield Setting(
            "zero.stage", "2" if keeps in given else "3", given.among("use-torch-fsdp2", keeps)
        )
    elif "use-megatron-fsdp" in given:
        name = given.text(strategy, "optim_grads_params")
        if name not in _STRATEGIES:
            raise Untranslatable(f"--{strategy} {name}: must be {', '.join(_STRATEGIES)}")
        yield Setting("zero.stage", _STRATEGIES[name], given.among("use-megatron-fsdp", strategy))
    else:
        flags = given.among("use-distributed-optimizer")
        yield Setting("zero.stage", "1" if flags else "0", flags)
        for name in given.among(strategy, keeps):
            yield Unused(name, "it needs --use-megatron-fsdp or --use-torch-fsdp2")
    groups = given.integer(instances)
    if groups > 1 and given.data_ranks % groups:
        ranks = f"{given.data_ranks} data ranks are not a multiple of {groups}"
        raise Untranslatable(f"--{instances} {groups}: {ranks}; give --world-size to threed plan")
    if groups > 1:
        yield Setting("zero.shard-size", str(given.data_ranks // groups), (instances,))
    if "ddp-bucket-size" in given:
        nbytes = given.integer("ddp-bucket-size") * (2 if "grad-reduce-in-bf16" in given else 4)
        yield Setting("zero.bucket-mib", f"{nbytes / 2**20:.4g}", ("ddp-bucket-size",))


def _recomputation(given: Given) -> Items:
    mode = given.text("recompute-granularity")
    method = "recompute-method"
    count = "recompute-num-layers"
    if mode not in ("", "full", "selective"):
        raise Untranslatable(f"--recompute-granularity {mode}: must be full or selective")
    if mode == "full":
        layers = given.integer("num-layers", 1) // given.integer("pipeline-model-parallel-size")
        each = given.text(method, "uniform") == "uniform" and given.integer(count) == 1
        if not each and not (given.text(method) == "block" and given.integer(count) >= layers):
            fix = "threed recomputes each layer by itself; use --recompute-method uniform --recompute-num-layers 1"
            raise Untranslatable(f"--{method} with --{count} {given.text(count)}: {fix}")
    if mode:
        names = ("recompute-granularity", *((method, count) if mode == "full" else ()))
        yield Setting("recompute.mode", mode, given.among(*names))
    if "recompute-modules" in given:
        known = {"core_attn": "attention", "layernorm": "norm"}
        modules = given.values["recompute-modules"]
        if strange := [name for name in modules if name not in known]:
            fix = f"threed recomputes {' and '.join(known)}; or use --recompute-granularity full"
            raise Untranslatable(f"--recompute-modules {' '.join(strange)}: {fix}")
        yield Setting(
            "recompute.ops", ",".join(known[name] for name in modules), ("recompute-modules",)
        )


def _steps(given: Given) -> Items:
    steps, decay = given.iterations, given.decay_iterations
    lengths = given.among("train-iters", "train-samples")
    decays = given.among("lr-decay-iters", "lr-decay-samples")
    if given.text("lr-decay-style", "linear") == "constant":
        yield from (Unused(name, "the learning rate is constant") for name in decays)
        decay = steps
    if decay < steps:
        fix = "the learning rate of threed decays until the last step; use the number of steps"
        raise Untranslatable(f"--{decays[0]} {given.text(decays[0])}: {fix}")
    if steps:
        used = (*lengths, *decays) if decay == steps else decays
        yield Setting("train.steps", str(decay), used)
    if decay > steps > 0:
        yield Setting("train.stop-after", str(steps), lengths)
    if "global-batch-size" not in given and "micro-batch-size" in given:
        yield Setting("train.global-batch", str(given.batch))
    if "eval-iters" in given and given.text("eval-iters") == "0":
        yield Unused("eval-iters", "a run validates at least at its end")
    elif "eval-iters" in given:
        samples = given.integer("eval-iters") * given.batch
        yield Setting("train.eval-samples", str(samples), ("eval-iters",))


def _warmup(given: Given) -> Items:
    names = given.among("lr-warmup-iters", "lr-warmup-fraction", "lr-warmup-samples")
    if len(names) > 1:
        raise Untranslatable(f"--{' --'.join(names)}: keep one")
    warmup = "0"
    if names == ("lr-warmup-iters",):
        warmup = given.text("lr-warmup-iters")
    elif names == ("lr-warmup-samples",):
        warmup = str(given.integer("lr-warmup-samples") // given.batch)
    elif names and not given.iterations:
        raise Untranslatable("--lr-warmup-fraction: give --train-iters, too")
    elif names:
        warmup = str(round(given.number("lr-warmup-fraction", 0) * given.decay_iterations))
    yield Setting("optim.warmup", warmup, names)


def _schedule(given: Given) -> Items:
    style, flags = given.text("lr-decay-style", "linear"), given.among("lr-decay-style")
    shape, length = "lr-wsd-decay-style", "lr-wsd-decay-iters"
    styles = {"cosine": "cosine", "linear": "linear", "constant": "constant", "WSD": "wsd"}
    if style not in styles:
        raise Untranslatable(f"--lr-decay-style {style}: threed has {', '.join(styles)}")
    if style != "WSD":
        yield from (
            Unused(name, "it needs --lr-decay-style WSD") for name in given.among(shape, length)
        )
    elif given.text(shape) != "linear" or given.integer(length) != given.decay_iterations // 5:
        fix = f"threed decays linearly over the last 20 % of the steps; use --{shape} linear"
        raise Untranslatable(
            f"--lr-decay-style WSD: {fix} and --{length} with a fifth of the steps"
        )
    else:
        flags = given.among("lr-decay-style", shape, length)
    yield Setting("optim.schedule", styles[style], flags)
    if "min-lr" not in given:
        yield Setting("optim.min-lr", "0")
    if "weight-decay" not in given:
        yield Setting("optim.weight-decay", "0.01")


def _betas(given: Given) -> Items:
    name = given.text("optimizer", "adam")
    defaults = {"adam": ("0.9", "0.999"), "lion": ("0.95", "0.98")}
    for other in defaults:
        names = given.among(f"{other}-beta1", f"{other}-beta2")
        if other == name:
            first, second = (given.text(f"{name}-beta{n}", defaults[name][n - 1]) for n in (1, 2))
            yield Setting("optim.betas", f"{first},{second}", names)
        else:
            yield from (Unused(unused, f"it needs --optimizer {other}") for unused in names)


def _data(given: Given) -> Items:
    paths = given.values.get("data-path", ())
    if len(paths) > 2 or (len(paths) == 2 and not re.fullmatch(r"[\d.]+", paths[0])):
        mixture = "threed reads one dataset; concatenate the files"
        raise Untranslatable(f"--data-path {' '.join(paths)}: {mixture}")
    if paths:
        yield Setting("data.path", paths[-1], ("data-path",))
    if "split" in given or paths:
        yield Setting("data.split", _share(given.text("split", "969,30,1")), given.among("split"))
    names = ("reset-position-ids", "reset-attention-mask", "eod-mask-loss")
    if packing := given.among(*names):
        if len(packing) < len(names):
            fix = f"give --{' --'.join(names)}, or none of the three"
            raise Untranslatable(f"--{packing[0]}: {fix}")
        yield Setting("data.packing", "true", packing)


def _share(text: str) -> str:
    """Returns the share of validation data of a split such as "949,50,1"."""
    parts = re.split(r"[,/]\s*", text)
    if not all(re.fullmatch(r"[\d.]+", part) for part in parts):
        raise Untranslatable(f"--split {text}: must be numbers, such as 949,50,1")
    numbers = [float(part) for part in parts]
    total = sum(numbers)
    share = numbers[1] / total if len(numbers) > 1 and total else 0.0
    if not share:
        raise Untranslatable(f"--split {text}: threed always validates; use a split such as 99,1,0")
    return f"{share:.6g}"


def _tokenizer(given: Given) -> Items:
    kind = given.text("tokenizer-type", "HuggingFaceTokenizer")
    flags = given.among("tokenizer-type", "tokenizer-model")
    if kind == "NullTokenizer":
        yield from (Unused(name, "--vocab-size gives the vocabulary") for name in flags)
    elif kind != "HuggingFaceTokenizer":
        raise Untranslatable(f"--tokenizer-type {kind}: {FLAGS['vocab-file'].text}")
    elif "tokenizer-model" in given:
        yield Setting("data.tokenizer", given.text("tokenizer-model"), flags)


def _checkpoints(given: Given) -> Items:
    if "load" in given and given.text("load") != given.text("save"):
        other = "a run resumes from its own folder, which --save names; to begin from another checkpoint,"
        raise Untranslatable(f"--load {given.text('load')}: {other} {FLAGS['finetune'].text}")
    if "load" in given:
        yield Setting("run.dir", given.text("load"), ("load",))


def _profile(given: Given) -> Items:
    flags = given.among("profile", "use-pytorch-profiler")
    bounds = given.among("profile-step-start", "profile-step-end")
    if not flags:
        yield from (Unused(name, "it needs --profile") for name in bounds)
        return
    first = int(given.number("profile-step-start", 10)) + 1
    last = given.integer("profile-step-end", 12)
    yield Setting("log.profile-steps", f"{first}:{last}", (*flags, *bounds))


RULES: tuple[Callable[[Given], Items], ...] = (
    _architecture, _weights, experts, _biases, _attention, _pipeline, _tensor, _sharding, _recomputation, _steps, _warmup,
    _schedule, _betas, _data, _tokenizer, _checkpoints, _profile,
)  # fmt: skip
"""All rules."""
