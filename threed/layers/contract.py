"""What an engine reads of a pipeline layer, with defaults."""

from __future__ import annotations

from torch import nn


class Contract:
    """The attributes of a pipeline layer that an engine reads.

    Attributes:
        name: a global name, unique in the model: the prefix of its buffers' names, and what messages call it.
        recomputable: whether `--recompute.mode full` may run the forward again in the backward.
        backward_reads_weights: whether the backward needs the values of parameters, which stage 3 then gathers.
        runs_vary: whether parts of the layer run a different number of times from pass to pass.
        compilable: whether torch.compile can compile the forward as one graph.
    """

    name: str = ""
    recomputable: bool = True
    backward_reads_weights: bool = True
    runs_vary: bool = False
    compilable: bool = False


class PipelineLayer(nn.Module, Contract):
    """A layer of a model: `forward(x, micro)` maps the activations of a micro-batch to those of the next layer.

    The layers of a model may be any modules with such a forward. Attributes of `Contract` that a module lacks have the
    defaults.

    The first layer gets x = None, and the last returns the weighted loss of the micro-batch, or logits if the
    micro-batch has no labels. Parts of a layer may have a method `flops(tokens, seq)`, the floating-point operations of
    their forward (None: unknown), and a tuple `data_flags` of `slicing.Flag`s.
    """


def contract(layer: nn.Module) -> Contract:
    """Returns the attributes of a layer, with the defaults of those that it lacks."""
    found = Contract()
    for name in Contract.__annotations__:
        setattr(found, name, getattr(layer, name, getattr(Contract, name)))
    return found


def title(layer: nn.Module, number: int) -> str:
    """Returns what messages call a layer: its name, or else its number, and its class."""
    return f"{contract(layer).name or f'layer {number}'} ({type(layer).__name__})"
