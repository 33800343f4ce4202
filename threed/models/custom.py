"""Builds the model that a configuration names: a decoder, or a custom model (FILE.py:NAME).

    model = build(config.model, slicing)

A custom model consists of pipeline layers, or is any `nn.Module` that reads token ids
(`TokenModule`). The module's forward returns the loss, or logits from which the loss is computed.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from threed.config import ConfigError, ModelConfig
from threed.core.source import MODEL, count_arguments, find_model, names_model, place_of
from threed.layers.slicing import MicroBatch, Slicing
from threed.models.decoder import Decoder
from threed.models.interface import Model, is_layered
from threed.models.loss_items import count_items, shifts_labels
from threed.models.wrapped import Wrapped, item_of, loss_of
from threed.ops.positions import IGNORED

FORWARD = (
    "its forward must take token ids, int64 [b s], and return logits [b s v], or take also `labels`, int64 [b s],"
    " and return their mean loss"
)


OTHER_INPUTS = (
    "Train a module with other inputs or another loss in a program: threed.Engine(module, ...) passes the tensors of a"
    " batch to its forward (docs/guide/zero.md)"
)


def build(
    config: ModelConfig, slicing: Slicing, custom: Callable[..., object] | None = None
) -> Model:
    """Returns the model that `config.arch` names: a decoder, or a custom model (FILE.py:NAME).

    Args:
        config: the model configuration.
        slicing: how layers are sharded over tensor ranks.
        custom: the user's class or function that builds the model, for batches of tokens; by
            default `config.arch` names it.

    Raises:
        ConfigError: if a custom model needs other arguments (see `call_custom`), or is neither a
            model of pipeline layers nor an `nn.Module` that reads token ids.
    """
    name = config.arch if custom is None else getattr(custom, "__name__", type(custom).__name__)
    if custom is None:
        if not names_model(name):
            return Decoder(config, slicing)
        custom = find_model(name).found
    model = call_custom(custom, config, slicing)
    return for_tokens(model, config.vocab or 0, name)


def call_custom(custom: Callable[..., object], config: ModelConfig, slicing: Slicing) -> object:
    """Returns the object that the user's class or function builds.

    Before the user's code runs, torch's random generator on the CPU is seeded with `slicing.seed`.
    Afterwards the generator gets its previous state back.

    Args:
        custom: called with (config, slicing), (config) or (), depending on its parameters.
        config: the configuration of the model.
        slicing: how layers are sharded over tensor ranks.

    Raises:
        ConfigError: if `custom` needs other arguments.
    """
    try:
        count = count_arguments(custom, MODEL)
    except ValueError as error:
        raise ConfigError([str(error)]) from None
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(slicing.seed)
        try:
            return custom(*(config, slicing)[:count])
        except Exception as error:
            given = ", ".join(("config, a ModelConfig", "slicing, a Slicing")[:count])
            if count:
                error.add_note(
                    f"threed called {getattr(custom, '__name__', custom)} with {given} (docs/guide/own_models.md): for"
                    " other arguments, name a function without arguments that returns the module"
                )
            raise


def for_tokens(model: object, vocab: int, name: str) -> Model:
    """Returns a model that reads a batch of tokens and labels.

    Args:
        model: a model of pipeline layers, which is returned unchanged, or an `nn.Module`, which is
            wrapped.
        vocab: number of token ids in the data.
        name: name of the class or function that returned the model, for messages.

    Raises:
        ConfigError: if `model` is neither a model of pipeline layers nor an `nn.Module`, or if the
            module cannot be wrapped.
    """
    if is_layered(model):
        return cast(Model, model)
    if not isinstance(model, nn.Module) or inspect.ismethod(getattr(model, "layers", None)):
        missing = [key for key in ("layers", "hidden", "slicing") if not hasattr(model, key)]
        lacks = f" without `{'`, `'.join(missing)}`" if missing else ""
        fix = (
            "return an object with `layers()`, `hidden` and `slicing`, or an nn.Module that reads token ids"
            " (docs/guide/own_models.md)"
        )
        raise ConfigError([f"{name} returned a {type(model).__name__}{lacks}: {fix}"])
    try:
        return TokenModule(model, vocab, type(model).__name__)
    except ValueError as error:
        raise ConfigError([f"{name}: {error}"]) from None


class ForwardError(ValueError):
    """Raised if a module's forward does not take the arguments, or does not return the values, that
    a `TokenModule` requires. The message states the requirements."""


class TokenModule(Wrapped):
    """An `nn.Module` that reads token ids, as a model with a single pipeline layer.

    The first parameter of the module's forward gets the token ids. If the forward has a parameter
    `labels`, this parameter gets the labels (the tokens shifted by one position; labels below 0 are
    ignored), and the forward returns the mean loss in a form that `wrapped.loss_of` accepts.
    Otherwise the forward returns logits: a tensor, the attribute or entry `logits` of its output,
    or the first element of a tuple. A causal model of `transformers` shifts labels itself, so
    `labels` is not passed and its logits are used.

    Args:
        module: the module, whose forward reads token ids.
        vocab: number of token ids in the data.
        name: name of the module, for messages.

    Attributes:
        reads_labels: whether the forward gets the labels and returns the loss.
        gives_logits: whether the forward can be called without labels, to return logits.

    Raises:
        ForwardError: if the module's forward cannot be called with token ids.
    """

    def __init__(self, module: nn.Module, vocab: int, name: str = "") -> None:
        self.title, self.vocab = name or type(module).__name__, vocab
        labels = _labels_parameter(module, self.title)
        self.reads_labels = labels is not None and not shifts_labels(module)
        self.gives_logits = labels is None or labels.default is not labels.empty
        self._ran = False  # whether a forward has completed
        super().__init__(module, count=None if self.reads_labels else _count)

    def logits(self, tokens: Tensor) -> Tensor:
        """Returns the logits [b s v] of tokens [b s].

        Raises:
            ForwardError: if the module's forward, called without labels, does not return logits of
                the expected shape.
        """
        output = self._forward(tokens)
        found = item_of(output, "logits")
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        if not isinstance(found, Tensor) or found.dim() != 3 or found.shape[:2] != tokens.shape:
            given = f"returned {shape} for token ids {tuple(tokens.shape)}"
            raise ForwardError(f"{self.title} {given}: {FORWARD}")
        if found.shape[-1] < self.vocab:
            fix = "use the number `config.vocab` of the class's first argument"
            sizes = f"{found.shape[-1]} token ids, the data have {self.vocab}"
            raise ForwardError(f"{self.title} returns logits of {sizes}: {fix}")
        return found

    def _forward(self, tokens: Tensor, **labels: Tensor) -> Any:
        """Runs the module. An error of its code in the first forward becomes a ForwardError."""
        try:
            output = self.module(tokens, **labels)
        except Exception as error:
            if self._ran or tokens.is_meta or not _is_of_module(error):
                raise
            raise ForwardError(
                f"{self.title} failed with token ids {tuple(tokens.shape)}: {type(error).__name__}:"
                f" {error}{place_of(error)}; {FORWARD}. {OTHER_INPUTS}"
            ) from error
        self._ran = True
        return output

    def mean_loss(self, micro: MicroBatch) -> Tensor:
        given = {"tokens": micro.tokens, "labels": micro.labels, **(micro.inputs or {})}
        tokens, labels = given["tokens"], given["labels"]
        if not self.reads_labels:
            logits = self.logits(tokens)
            wide = logits if logits.dtype == torch.float64 else logits.float()
            ids = labels.masked_fill(labels < 0, IGNORED).flatten()
            return nn.functional.cross_entropy(wide.flatten(0, 1), ids, ignore_index=IGNORED)
        output = self._forward(tokens, labels=labels)
        try:
            return loss_of(output)
        except ValueError as error:
            raise ForwardError(f"{self.title}: {FORWARD} ({error})") from None


def _labels_parameter(module: nn.Module, name: str) -> inspect.Parameter | None:
    """Returns the parameter `labels` of a module's forward; None if the forward has none.

    Raises:
        ForwardError: if the forward has further required parameters, or takes no tokens.
    """
    signature = inspect.signature(module.forward)
    labels = signature.parameters.get("labels")
    try:
        signature.bind("tokens", **({} if labels is None else {"labels": None}))
    except TypeError as error:
        raise ForwardError(
            f"{name}.forward{signature}: {error}; {FORWARD}. {OTHER_INPUTS}"
        ) from None
    return labels


def _is_of_module(error: Exception) -> bool:
    """Returns whether the code of a module raised an error, and not threed or a full memory."""
    package = str(Path(__file__).parents[1])
    frames = traceback.extract_tb(error.__traceback__)[1:]  # without the caller's frame
    in_threed = any(frame.filename.startswith(package) for frame in frames)
    return not (in_threed or isinstance(error, (MemoryError, torch.OutOfMemoryError)))


def _count(inputs: Mapping[str, Any]) -> Tensor:
    return count_items(inputs, shifted=False)
