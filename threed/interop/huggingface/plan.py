"""How a model of `transformers` is sliced by the plans in its configuration.

    plan = Plan.of(model)            # raises ConfigError for a model without complete plans
    plan.style("layers.3.mlp.up_proj")      # "colwise"

`base_model_pp_plan` names the parts of the base model in the order of its forward: the embedding,
parts without parameters, the list of layers, and the final norm. `base_model_tp_plan` has a style
for each sliced module:

    colwise, rowwise                   a linear layer sharded by outputs, or by inputs
    replicated_with_grad_allreduce     a replicated module whose gradient is partial on each rank
    colwise_gather_output, rowwise_split_input, replicate, embedding_rowwise, embedding_colwise
                                       `transformers` gathers the result or splits the input again;
                                       threed replicates these modules

Other styles, such as the styles of experts, are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from threed.config import ConfigError
from threed.distributed.sharding import few
from threed.interop.huggingface.changes import shared_parameters
from threed.layers import Slicing

COLUMN, ROW, PARTIAL = "colwise", "rowwise", "replicated_with_grad_allreduce"
REPLICATED = (
    "colwise_gather_output", "rowwise_split_input", "replicate", "embedding_rowwise", "embedding_colwise",
)  # fmt: skip
STYLES = (COLUMN, ROW, PARTIAL, *REPLICATED)
UNSPLIT = "use it with tp 1 and pp 1 (threed.Engine(module, ...))"
OTHERWISE = f"{UNSPLIT}, or build a model from threed.layers (docs/guide/own_models.md)"


@dataclass(frozen=True)
class Plan:
    """The plans of a base model.

    Attributes:
        embedding: name of the embedding in the base model.
        layers: name of the list of layers.
        norm: name of the final norm.
        styles: style of each sliced module, by a pattern of names in the base model, in which `*`
            is a number.
    """

    embedding: str
    layers: str
    norm: str
    styles: Mapping[str, str]

    @classmethod
    def of(cls, model: Any) -> Plan:
        """Returns the plans of a model.

        Args:
            model: a causal language model of `transformers`.

        Raises:
            ConfigError: if the model is not a decoder with both plans.
        """
        if problems := list(_kind_problems(model)):
            raise ConfigError([f"{type(model).__name__}: {text}" for text in problems])
        names = list(model.config.base_model_pp_plan)
        lists = [n for n in names if isinstance(getattr(model.base_model, n, None), nn.ModuleList)]
        embedding, head = getattr(model.base_model, names[0], None), model.get_output_embeddings()
        parts = isinstance(embedding, nn.Embedding) and isinstance(head, nn.Linear)
        if not parts or len(lists) != 1 or len(names) < 3 or lists[0] in (names[0], names[-1]):
            text = f"its base_model_pp_plan {names} is not an nn.Embedding, a list of layers and a norm"
            raise ConfigError([f"{type(model).__name__}: {text}: {OTHERWISE}"])
        return cls(names[0], lists[0], names[-1], model.config.base_model_tp_plan)

    def style(self, name: str) -> str | None:
        """Returns the style of a module or parameter of the base model; None without a style.

        Args:
            name: name in the base model, such as "layers.3.mlp.up_proj".
        """
        for pattern, style in self.styles.items():
            if re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name):
                return style
        return None


def _kind_problems(model: Any) -> Iterator[str]:
    """Yields the reasons why a model is not a decoder with plans."""
    config = model.config
    if _has_adapter(model):
        yield "it has an adapter: merge it into the weights first (PEFT's merge_and_unload)"
        return
    if config.is_encoder_decoder:
        yield f"threed does not offer tensor and pipeline parallelism of encoder-decoder models: {OTHERWISE}"
        return
    if parts := [key for key in getattr(config, "sub_configs", {}) if key != "text_config"]:
        yield f"threed does not split models with other inputs than text ({', '.join(parts)}): {OTHERWISE}"
        return
    if getattr(config, "quantization_config", None) is not None:
        yield "threed does not train quantized models: load it without a quantization_config"
    if model.base_model is model or model.get_output_embeddings() is None:
        yield "it has no language head: load it with AutoModelForCausalLM"
    plans = ("base_model_tp_plan", "base_model_pp_plan")
    if missing := [key for key in plans if not getattr(config, key, None)]:
        yield f"its configuration has no {' and no '.join(missing)}: {OTHERWISE}"


def _has_adapter(model: Any) -> bool:
    """Returns whether a model has an adapter of PEFT: `add_adapter`, or a `PeftModel`."""
    return (
        getattr(model, "_hf_peft_config_loaded", False)
        or hasattr(model, "peft_config")
        or any(hasattr(module, "base_layer") for module in model.modules())
    )


def find_problems(model: Any, plan: Plan, slicing: Slicing) -> Iterator[str]:
    """Yields the reasons why a model cannot be sliced by its plan.

    Args:
        model: a model for which `Plan.of` raised no error.
        plan: its plan.
        slicing: how layers are sharded over tensor ranks.
    """
    if slicing.sequence_parallel:
        yield (
            "a model that is sliced by its own plan has no sequence parallelism: use --parallel.sequence false and"
            " Slicing(..., sequence=False)"
        )
    if slicing.context.size > 1:
        yield (
            "a model that is sliced by its own plan has no context parallelism, because its attention needs full sequences:"
            " use --parallel.cp 1 and a Slicing without `context`"
        )
    if slicing.tile > 1:
        yield "a model that is sliced by its own plan has no tiles: use --zero.tile 1"
    yield from _head_problems(model.config, slicing.tp.size)
    yield from _unplanned(model, plan)
    yield from _shared(model)
    yield from _random(model)
    if kept := [name for name in model.state_dict() if name in dict(model.named_buffers())]:
        yield f"threed does not slice models with buffers in their state dict ({few(kept)}): {OTHERWISE}"
    yield from _style_problems(model.base_model, plan)


def _head_problems(config: Any, tp: int) -> Iterator[str]:
    """Yields a problem for each number of heads that is not a multiple of `tp`."""
    heads = config.num_attention_heads
    numbers = {"attention heads": heads}
    for key in ("num_key_value_heads", "num_global_key_value_heads"):
        numbers[key] = getattr(config, key, None) or heads
    for what, number in numbers.items():
        if number % tp:
            yield (
                f"its {number} {what} are not a multiple of tp {tp}: use a tp that divides {number}"
            )


def _unplanned(model: Any, plan: Plan) -> Iterator[str]:
    """Yields a problem if there are parameters outside of the embedding, layers, norm and head."""
    base, head = model.base_model, model.get_output_embeddings()
    known = [getattr(base, name) for name in (plan.embedding, plan.layers, plan.norm)] + [head]
    inside = {id(p) for module in known for p in module.parameters()}
    if found := [name for name, p in model.named_parameters() if id(p) not in inside]:
        yield f"its base_model_pp_plan does not name the modules of {few(found)}: {OTHERWISE}"
    if head not in list(model.children()):
        yield f"its head is not a direct child of {type(model).__name__}: {OTHERWISE}"


def _shared(model: Any) -> Iterator[str]:
    """Yields a problem for each parameter with several names, except for the weight of the head."""
    head = model.get_output_embeddings().weight
    for names in shared_parameters(model):
        if model.get_parameter(names[0]) is not head:
            yield f"{few(names)} are one parameter, which each of its layers would train separately: {OTHERWISE}"


def _random(model: nn.Module) -> Iterator[str]:
    """Yields a problem if some module has dropout."""
    found = [
        f"{name}.{key} = {value}" if name else f"{key} = {value}"
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if ("dropout" in key or (key == "p" and isinstance(module, nn.Dropout)))
        and isinstance(value, float)
        and value > 0
    ]
    if found:
        yield (
            f"its dropout ({few(found)}) uses torch's random generator, whose values differ between topologies: load the"
            " model with dropout 0, such as from_pretrained(..., attention_dropout=0.0)"
        )


def _style_problems(base: nn.Module, plan: Plan) -> Iterator[str]:
    """Yields the problems of the tensor-parallel plan."""
    unknown, incomplete = dict[str, str](), list[str]()
    for name, module in base.named_modules():
        style = plan.style(name)
        names = [f"{name}.{key}" for key in module._parameters]
        styles = {n: s for n in [name, *names] if (s := plan.style(n)) is not None}
        unknown |= {n: s for n, s in styles.items() if s not in STYLES}
        if style in (COLUMN, ROW):
            if not isinstance(module, nn.Linear):
                unknown[name] = f"{style} of a {type(module).__name__}"
            parent = base.get_submodule(name.rpartition(".")[0])
            incomplete += _without_style(parent, name.rpartition(".")[0], plan)
    if unknown:
        kinds = ", ".join(sorted(set(unknown.values())))
        offered = f"{COLUMN} and {ROW} of nn.Linear, {PARTIAL}"
        yield (
            f"threed does not offer {kinds}, in its base_model_tp_plan ({few(list(unknown))}), only"
            f" {offered} and replicated styles: {UNSPLIT}"
        )
    elif not any(name.startswith(f"{plan.layers}.") for name in plan.styles):
        yield f"its base_model_tp_plan has no style for the modules of its layers: {OTHERWISE}"
    elif incomplete:
        found = few(list(dict.fromkeys(incomplete)))
        yield f"its base_model_tp_plan is not complete, because it has no style for {found}: {OTHERWISE}"


def _without_style(parent: nn.Module, path: str, plan: Plan) -> Iterator[str]:
    """Yields the modules with parameters in `parent` that have no style.

    They may compute with a rank's own heads or features. Their gradients would then be partial.
    """
    for name, module in parent.named_modules(prefix=path):
        if any(p is not None for p in module._parameters.values()) and plan.style(name) is None:
            yield name
