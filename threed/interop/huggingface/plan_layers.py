"""Pipeline layers that run parts of a model of `transformers`, sliced by its plan.

The embedding and the head run the forward of the model's own base model without layers, so that
scales of embeddings and logits are computed by the model's own code. A block runs one layer, with
the masks and rotary positions that the base model passes to this layer (`plan_arguments`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from threed.config import ConfigError
from threed.distributed.collectives import split
from threed.distributed.sharding import Piece, ShardSpec, attach
from threed.interop.huggingface.live_weights import fill
from threed.interop.huggingface.plan import COLUMN, PARTIAL, ROW, Plan
from threed.layers import MicroBatch, PipelineLayer, Slicing
from threed.layers.linear import Product
from threed.layers.slicing import Flag

# positional and keyword arguments of a layer, without its hidden states
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class SharedInput:
    """Computes f (`Slicing.gather`) once per input, for all column-sharded layers of a block.

    Queries, keys and values have one input, and so do the two column-sharded layers of a gated MLP.
    The backward then sums the gradient of this input over tensor ranks once.
    """

    def __init__(self, slicing: Slicing) -> None:
        self._slicing = slicing
        self._results: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, x: Tensor) -> Tensor:
        """Returns f(x). Collective in the backward."""
        if id(x) not in self._results:
            self._results[id(x)] = x, self._gather(x)
        return self._results[id(x)][1]

    def _gather(self, x: Tensor) -> Tensor:
        return self._slicing.gather(x)

    def clear(self) -> None:
        """Forgets all inputs. Called at the end of a block's forward."""
        self._results.clear()


class ColumnSlice(Product):
    """This rank's outputs of an `nn.Linear`: x [... in] -> [... out/t].

    Args:
        linear: the full layer.
        name: global name.
        slicing: how layers are sharded over tensor ranks.
        shared: computes f.
    """

    def __init__(self, linear: nn.Linear, name: str, slicing: Slicing, shared: SharedInput) -> None:
        super().__init__()
        self._shared = shared
        self.weight = _record(linear.weight, f"{name}.weight", slicing, dim=0)
        self.bias = (
            None if linear.bias is None else _record(linear.bias, f"{name}.bias", slicing, dim=0)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Returns this rank's columns of the product, [... out/t]."""
        return self.product(self._shared(x), self.bias)


class RowSlice(Product):
    """The product of this rank's inputs of an `nn.Linear`, summed: x [... in/t] -> [... out].

    Args:
        linear: the full layer.
        name: global name.
        slicing: how layers are sharded over tensor ranks.
    """

    def __init__(self, linear: nn.Linear, name: str, slicing: Slicing) -> None:
        super().__init__()
        self._slicing = slicing
        self.weight = _record(linear.weight, f"{name}.weight", slicing, dim=1)
        self.bias = None if linear.bias is None else _record(linear.bias, f"{name}.bias", slicing)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the product, summed over tensor ranks, [... out]. Collective."""
        y = self._slicing.reduce(self.product(x, None))
        return y if self.bias is None else y + self.bias


def _record(
    param: Tensor, name: str, slicing: Slicing, dim: int | None = None, partial: bool = False
) -> nn.Parameter:
    """Returns this rank's part of a parameter on the meta device, with its sharding record.

    Args:
        param: the full parameter.
        name: global name.
        slicing: how layers are sharded over tensor ranks.
        dim: the sharded dimension; None for a replicated parameter.
        partial: whether the gradient of a replicated parameter is partial on each rank.

    Raises:
        ConfigError: if the sharded dimension is not a multiple of tp.
    """
    shape, tp = tuple(param.shape), slicing.tp
    start, size = [0] * len(shape), list(shape)
    if dim is not None:
        if shape[dim] % tp.size:
            raise ConfigError([f"{name} {list(shape)} is not divisible by tp {tp.size}"])
        size[dim] = shape[dim] // tp.size
        start[dim] = size[dim] * tp.index
    piece = Piece(name, shape, tuple(start), tuple(size))
    decay = len(shape) > 1
    spec = ShardSpec((piece,), decay=decay)
    if dim is None:
        spec = slicing.shared(piece, partial=partial, decay=decay)
    empty = torch.empty(size, dtype=param.dtype, device="meta")
    return attach(nn.Parameter(empty, param.requires_grad), spec)


def sliced(
    module: nn.Module, path: str, prefix: str, plan: Plan, slicing: Slicing, shared: SharedInput
) -> nn.Module:
    """Returns a copy of a module with this rank's parameters, on the meta device.

    Args:
        module: a part of the base model.
        path: name of the module in the base model.
        prefix: name of the base model, with a dot.
        plan: the plan of the base model.
        slicing: how layers are sharded over tensor ranks.
        shared: computes the inputs of column-sharded layers.
    """
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
        for p in module.parameters()
    }
    memo |= {id(m.config): m.config for m in module.modules() if hasattr(m, "config")}
    new: nn.Module = copy.deepcopy(module, memo)
    for name, part in list(new.named_modules(prefix=path)):
        _disable_checkpointing(part)
        style = plan.style(name)
        if style in (COLUMN, ROW) and slicing.tp.size > 1:
            assert isinstance(part, nn.Linear)  # `plan.find_problems` refuses other modules
            inside = name.removeprefix(f"{path}.")
            if style == COLUMN:
                parent = new.get_submodule(inside.rpartition(".")[0])
                _check_heads(parent, prefix + name, part, slicing.tp.size)
                new.set_submodule(inside, ColumnSlice(part, prefix + name, slicing, shared))
            else:
                new.set_submodule(inside, RowSlice(part, prefix + name, slicing))
            continue
        for key, param in part._parameters.items():
            if param is not None:
                own_name = f"{prefix}{name}.{key}"
                record = _record(param, own_name, slicing, partial=style == PARTIAL)
                part._parameters[key] = record
    return new


def _check_heads(parent: nn.Module, name: str, linear: nn.Linear, tp: int) -> None:
    """Raises ConfigError if the outputs of a layer of an attention are not full heads per rank."""
    size = getattr(parent, "head_dim", None) or getattr(parent, "head_size", None)
    heads, rest = divmod(linear.out_features, size) if isinstance(size, int) else (0, 1)
    if not rest and heads % tp:
        raise ConfigError([f"{name} has {heads} heads, which is not a multiple of tp {tp}"])


class Skeleton:
    """The parts of a model of `transformers`, from which models with fewer parts are composed.

    Args:
        model: the causal language model.
        plan: its plan.

    Attributes:
        base: the base model.
        head: the head, which is a direct child of the model.
        head_name: name of the head.
        hidden: width of the activations between layers.
    """

    def __init__(self, model: Any, plan: Plan) -> None:
        self._model, self._plan, self.base = model, plan, model.base_model
        known = (plan.embedding, plan.layers, plan.norm)
        others = {name: module for name, module in self.base.named_children() if name not in known}
        self._others = {name: _filled(module, model) for name, module in others.items()}
        self.head, self.hidden = model.get_output_embeddings(), int(model.config.hidden_size)
        self.head_name = next(n for n, child in model.named_children() if child is self.head)

    def part(
        self,
        layers: Sequence[nn.Module] = (),
        embedding: nn.Module | None = None,
        norm: nn.Module | None = None,
    ) -> nn.Module:
        """Returns a base model with other layers, by default without layers.

        Args:
            layers: the layers.
            embedding: the embedding; None for a base model that is called with `inputs_embeds`.
            norm: the final norm; None for an identity.
        """
        own = {
            self._plan.embedding: embedding or nn.Identity(),
            self._plan.layers: nn.ModuleList(layers),
            self._plan.norm: norm or nn.Identity(),
        }
        # The engine may move the buffers of a part to another device.
        others = copy.deepcopy(self._others)
        return _copied(self.base, {**self.base._modules, **others, **own})

    def with_head(self, base: nn.Module, head: nn.Module) -> nn.Module:
        """Returns the causal language model with another base model and another head."""
        own = {self._model.base_model_prefix: base, self.head_name: head}
        return _copied(self._model, {**self._model._modules, **own})


def _copied(module: nn.Module, modules: Mapping[str, nn.Module | None]) -> nn.Module:
    """Returns a shallow copy of a module with other submodules, without gradient checkpointing."""
    new = copy.copy(module)
    new.__dict__.update(_modules=dict(modules), _buffers=dict(module._buffers))
    _disable_checkpointing(new)
    return new


def _disable_checkpointing(module: nn.Module) -> None:
    """Turns off gradient checkpointing by `transformers`; the engine has its own recomputation."""
    if "gradient_checkpointing" in vars(module):
        vars(module)["gradient_checkpointing"] = False


def _filled(module: nn.Module, model: Any) -> nn.Module:
    """Returns a copy of a module without parameters; buffers on the meta device get values."""
    new = copy.deepcopy(module)
    if any(buffer.is_meta for buffer in new.buffers()):
        fill(new, model, seed=0)
    return new.cpu()


class Substitute(nn.Module):
    """A final norm that is called with another input than the base model passes to it.

    The base model may scale its inputs before the first layer. The output of the last layer must
    not be scaled.

    Args:
        inner: the norm.

    Attributes:
        inputs: the input of the next call.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.inputs = inner, list[Tensor]()

    def forward(self, _: Tensor) -> Any:
        """Returns the norm of `inputs`."""
        return self.inner(self.inputs.pop())


def _unused_mask(x: Tensor) -> Tensor:
    """Returns a mask of four dimensions, which base models pass to their layers unchanged.

    Without it, `transformers` would compute a mask, and wait for the device to do so. A base model
    without layers has no use for a mask.
    """
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=x.device)


class PlanEmbedding(PipelineLayer):
    """The embedding of a base model: token ids [b s] -> [b s h].

    Args:
        name: global name of the embedding.
        base: the base model without layers and norm.
        vocab: number of token ids.
    """

    def __init__(self, name: str, base: nn.Module, vocab: int) -> None:
        super().__init__()
        self.name, self._vocab, self.base = name, vocab, base
        self.data_flags = (Flag(f"token ids beyond the {vocab} of {name}"),)

    def forward(self, _: Tensor | None, micro: MicroBatch) -> Tensor:
        """Returns the input of the first layer, [b s h]."""
        assert micro.tokens is not None
        ids = micro.tokens.clamp(0, self._vocab - 1)
        self.data_flags[0].note(ids != micro.tokens)
        out = self.base(input_ids=ids, attention_mask=_unused_mask(ids), use_cache=False)
        return out.last_hidden_state


class PlanBlock(PipelineLayer):
    """One layer of a base model: [b s h] -> [b s h].

    Args:
        name: global name of the layer.
        inner: the layer.
        arguments: function from the layer's input to its other arguments.
        shared: computes the inputs of the layer's column-sharded linear layers.
    """

    def __init__(
        self, name: str, inner: nn.Module, arguments: Callable[[Tensor], Arguments], shared: SharedInput
    ) -> None:  # fmt: skip
        super().__init__()
        self.name, self.inner = name, inner
        self._arguments, self._shared = arguments, shared

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        """Returns the input of the next layer, [b s h]. Collective over tensor ranks."""
        args, kwargs = self._arguments(x)
        try:
            out = self.inner(x, *args, **kwargs)
        finally:
            self._shared.clear()
        return out[0] if isinstance(out, tuple) else out


class PlanHead(PipelineLayer):
    """The final norm, the head and the loss: [b s h] -> weighted loss.

    Args:
        norm: the final norm.
        model: the causal language model without embedding and layers.
        vocab: number of token ids.
        slicing: how layers are sharded over tensor ranks.
    """

    recomputable = False

    def __init__(self, norm: Substitute, model: nn.Module, vocab: int, slicing: Slicing) -> None:
        super().__init__()
        self.name, self.model, self._slicing = "head", model, slicing
        self._vocab, self._inputs = vocab, norm.inputs
        self.data_flags = (Flag(f"labels beyond the {vocab} of {self.name}"),)

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        """Returns the weighted loss; without labels this rank's columns of the logits, [s b v/t]."""
        logits = self._logits(x)
        if micro.labels is None:
            first, last = split(logits.shape[-1], self._slicing.tp.size, self._slicing.tp.index)
            return logits[..., first:last].transpose(0, 1)
        labels = micro.labels.clamp(-1, self._vocab - 1)
        self.data_flags[0].note(micro.labels >= self._vocab)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
        loss = F.cross_entropy(logits, labels.flatten(), ignore_index=-1, reduction="sum")
        return loss if micro.weight is None else loss * micro.weight

    def _logits(self, x: Tensor) -> Tensor:
        """Returns the full logits, [b s v]."""
        self._inputs.append(x)
        try:
            mask = _unused_mask(x)
            out = self.model(inputs_embeds=x.detach(), attention_mask=mask, use_cache=False)
            return out.logits
        finally:
            self._inputs.clear()
