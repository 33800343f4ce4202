"""The attributes of a pipeline layer that an engine reads, with their defaults."""

from __future__ import annotations

from torch import nn


class Contract:
    """The attributes of a pipeline layer that an engine reads.

    Attributes:
        name: global name, unique in the model. It is the prefix of buffer names and appears in
            messages.
        recomputable: whether `--recompute.mode full` may run the forward again in the backward.
        backward_reads_weights: whether the backward reads parameter values, which ZeRO stage 3 then
            gathers.
        runs_vary: whether the number of runs of a part of the layer varies from pass to pass.
        compilable: whether torch.compile can compile the forward as one graph.
    """

    name: str = ""
    recomputable: bool = True
    backward_reads_weights: bool = True
    runs_vary: bool = False
    compilable: bool = False


class PipelineLayer(nn.Module, Contract):
    """A layer of a model: `forward(x, micro)` maps a micro-batch's activations to the next layer's.

    The layers of a model may be any modules with such a forward. If a module lacks an attribute of
    `Contract`, its default applies.

    The first layer gets x = None. The last layer returns the weighted loss of the micro-batch, or
    logits if the micro-batch has no labels. Submodules may have a method `flops(tokens, seq)`,
    which returns the floating-point operations of their forward (None: unknown), and a tuple
    `data_flags` of `slicing.Flag`s.
    """


def contract(layer: nn.Module) -> Contract:
    """Returns a layer's `Contract`, with defaults for missing attributes."""
    found = Contract()
    for name in Contract.__annotations__:
        setattr(found, name, getattr(layer, name, getattr(Contract, name)))
    return found


def title(layer: nn.Module, number: int) -> str:
    """Returns the name of a layer for messages: its name, or "layer <number>", and its class."""
    return f"{contract(layer).name or f'layer {number}'} ({type(layer).__name__})"
