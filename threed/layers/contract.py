"""The attributes of a pipeline layer that an engine reads, with their defaults."""

from __future__ import annotations

from torch import nn


class Contract:
    """The attributes of a pipeline layer that an engine reads.

    Attributes:
        name: global name, unique in the model. It is the prefix of buffer names and appears in
            messages.
        recomputable: whether the layer may be recomputed. If so, its forward runs a second time in
            the backward under `--recompute.mode full`.
        backward_reads_weights: whether the backward reads the values of the parameters. If so, ZeRO
            stage 3 gathers them for the backward.
        runs_vary: whether some submodule runs a data-dependent number of times per micro-batch, so
            that the number of contributions to its gradients varies.
        compilable: whether torch.compile can compile the forward as one graph.
        context: whether the forward is correct if every sequence is split over context ranks. This
            is the case if it acts on each position separately, uses `layers.Attention`, or gathers
            sequences by `Slicing.gather_sequence`.
        documents: whether the layer keeps packed documents apart: it acts on each position alone,
            or reads `MicroBatch.documents`. Otherwise batches with documents are refused.
    """

    name: str = ""
    recomputable: bool = True
    backward_reads_weights: bool = True
    runs_vary: bool = False
    compilable: bool = False
    context: bool = False
    documents: bool = False


class PipelineLayer(nn.Module, Contract):
    """A layer of a model: `forward(x, micro)` returns the next layer's input for a micro-batch.

    Any module with such a forward can be a layer, without deriving from this class. If a module
    lacks an attribute of `Contract`, the attribute's default applies.

    The first layer gets x = None. The last layer returns the weighted loss of the micro-batch, or
    logits if the micro-batch has no labels.

    The engine reads three optional members of submodules: a method `flops(tokens, seq)`, which
    returns the floating-point operations of a forward (None: unknown), `data_flags`, a tuple of
    `slicing.Flag`s, and `tallies`, a tuple of `slicing.Tally`s.
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
