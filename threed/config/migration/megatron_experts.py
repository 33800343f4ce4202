"""The rules for flags of experts of Megatron-LM, see `megatron_rules`."""

from __future__ import annotations

import re

from threed.config.migration.megatron_flags import FLAGS
from threed.config.migration.megatron_items import Given, Items, Setting, Untranslatable, Unused


def architecture_with_experts(given: Given, arch: str) -> str:
    """Returns the architecture of a model with experts; `arch` is the one without them."""
    special = given.among("qk-layernorm", "moe-router-pre-softmax", "moe-layer-freq")
    if arch == "llama" and "qk-layernorm" in given:
        return "qwen3_moe"
    if arch in ("llama", "mistral") and not special:
        return "mixtral"
    fix = "threed translates Mixtral, and Qwen3-MoE (--qk-layernorm); write a custom model"
    raise Untranslatable(f"--num-experts: {fix}, or use the keys of threed")


def experts(given: Given) -> Items:
    """Yields the settings of experts."""
    kinds, factors = "moe-router-load-balancing-type", "moe-aux-loss-coeff"
    flags = [flag for flag in given.values if flag.startswith("moe-") and flag in FLAGS]
    if "num-experts" not in given:
        yield from (Unused(flag, "it needs --num-experts") for flag in flags)
        return
    topk, shared = "moe-router-topk", "moe-shared-expert-intermediate-size"
    yield Setting("model.experts-per-token", given.text(topk, "2"), given.among(topk))
    width = "moe-ffn-hidden-size"
    if "qk-layernorm" in given:
        own = given.text(width, given.text("ffn-hidden-size"))
        if own:
            yield Setting("model.expert-ffn", own, given.among(width))
        pre = given.among("moe-router-pre-softmax")
        yield Setting("model.normalize-experts", "false" if pre else "true", pre)
        yield from _dense_layers(given)
    if shared in given:
        yield from _shared_experts(given, shared, width)
    kind, factor = given.text(kinds, "aux_loss"), given.number(factors, 0.0)
    if factor and kind not in ("seq_aux_loss", "none"):
        fix = "threed balances experts within each sequence; use seq_aux_loss"
        raise Untranslatable(f"--{kinds} {kind}: {fix}")
    used = given.among(kinds, factors)
    if used:
        yield Setting("experts.aux-loss", f"{factor:g}" if kind == "seq_aux_loss" else "0", used)


def _dense_layers(given: Given) -> Items:
    """Yields the number of first blocks without experts."""
    name = "moe-layer-freq"
    text = given.text(name, "1").replace(" ", "")
    found = re.fullmatch(r"\(?\[0\]\*(\d+)\+\[1\]\*(\d+)\)?", text)
    if text != "1" and found is None:
        fix = 'threed translates 1, and patterns such as "([0]*3+[1]*58)"'
        raise Untranslatable(f"--{name} {text}: {fix}; or use --model.expert-every")
    yield Setting("model.dense-layers", found[1] if found else "0", given.among(name))


def _shared_experts(given: Given, shared: str, width: str) -> Items:
    """Yields the number of shared experts, each as wide as another expert."""
    each = given.integer(width, given.integer("ffn-hidden-size"))
    count, rest = divmod(given.integer(shared), each)
    if rest or "qk-layernorm" not in given:
        fix = (
            f"must be a multiple of {each}, the width of an expert, in a model with --qk-layernorm"
        )
        raise Untranslatable(f"--{shared} {given.text(shared)}: {fix}")
    yield Setting("model.shared-experts", str(count), (shared,))


def biases_with_experts(given: Given) -> Items:
    """Yields the settings of biases of a model with experts."""
    if "disable-bias-linear" not in given:
        raise Untranslatable("--num-experts: experts have no biases; add --disable-bias-linear")
    if "qk-layernorm" in given:
        yield Setting("model.bias", "false", ("disable-bias-linear",))
        yield Unused("qk-layernorm", "the architecture has norms of query and key heads")
    else:
        yield Unused("disable-bias-linear", "the architecture has no biases in linear layers")
