"""Measures the cost of a layer by running it once on the meta device: FLOPs, bytes kept for the
backward, peak bytes and bytes sent.

    tracer = Tracer(micro_batch, dtype, grad_dtype, traffic)
    costs = tracer.trace(layers, recomputed)        # one LayerCost per layer

On the meta device tensors have shapes and dtypes, but no values. So the layer's code runs forward
and backward as in a pipeline stage, without computing or sending values. A layer with the same
structure and input shapes as an earlier layer is not run again, but gets the earlier layer's cost.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from threed.core.source import place_of
from threed.distributed.journal import Journal
from threed.distributed.sharding import dtype_of
from threed.layers.contract import contract, title
from threed.layers.recompute import Selective
from threed.layers.slicing import Flag, MicroBatch, Tally
from threed.models.custom import ForwardError
from threed.ops import attention, attention_costs, grouped
from threed.ops.grouped import Groups
from threed.ops.matmul import NATIVE, Matmul
from threed.pipeline import meta_results
from threed.pipeline.activation_checkpointing import Recomputed
from threed.pipeline.boundary import Form, gradients_of, tensors
from threed.pipeline.operations import Operation, Recorder
from threed.pipeline.stage import AlwaysGathered, Stage

META = torch.device("meta")


@dataclass(frozen=True)
class LayerCost:
    """The cost of one layer for one micro-batch on one rank.

    Attributes:
        flops: FLOPs of the forward. A product of matrices [m k] and [k n] counts 2mnk; attention
            counts all pairs of positions, without a causal mask (arXiv 2204.02311, appendix B).
        kept: bytes that the layer keeps in memory from forward to backward, without the bytes of
            its input and output.
        keeps_input: whether the layer keeps its input from forward to backward.
        keeps_output: whether the layer keeps its output from forward to backward.
        forward: peak bytes in the forward, of all tensors of the layer: its input, the tensors that
            are kept for the backward, and temporary tensors.
        backward: peak bytes in the backward, of all tensors of the layer.
        input: bytes of the input.
        output: bytes of the output.
        cached: bytes that outlive the micro-batch, such as a table of rotary angles; not included
            in the other fields.
        elsewhere: bytes that are offloaded to a drive or host memory from forward to backward.
        sent: name of an axis -> bytes that this rank sends over the axis.
        operations: operations of the forward, and of the backward including recomputation.
    """

    flops: int
    kept: int = 0
    keeps_input: bool = False
    keeps_output: bool = False
    forward: int = 0
    backward: int = 0
    input: int = 0
    output: int = 0
    cached: int = 0
    elsewhere: int = 0
    sent: Mapping[str, int] = field(default_factory=dict)
    operations: tuple[tuple[Operation, ...], tuple[Operation, ...]] = ((), ())


class Pass:
    """Activation memory of one micro-batch in one chunk (a stage of the rank).

    Args:
        layers: costs of the chunk's layers.

    Attributes:
        kept: bytes that all layers keep from forward to backward.
        forward: peak bytes in the forward.
        backward: for each layer, peak bytes during its backward.
    """

    def __init__(self, layers: Sequence[LayerCost]) -> None:
        self.kept = self.forward = 0
        self.backward: list[int] = []
        kept_before = False  # whether the previous layer keeps its output
        for cost in layers:
            own = 0 if cost.keeps_input or not kept_before else cost.input
            self.forward = max(self.forward, self.kept + cost.forward)
            self.backward.append(self.kept + cost.backward + own)
            self.kept += cost.kept + cost.input * (cost.keeps_input or kept_before)
            kept_before = cost.keeps_output
        self.kept += layers[-1].output * kept_before


def stated_flops(layers: Iterable[nn.Module], tokens: int, seq: int) -> list[int] | None:
    """Returns the forward FLOPs of each layer from the `flops` methods of `threed.layers`.

    Returns None if a layer contains a module that is not from `threed.layers`, or a module whose
    `flops` returns None.

    Args:
        layers: the layers, such as all layers of a model.
        tokens: number of tokens of a micro-batch.
        seq: sequence length.
    """
    found: list[int] = []
    for layer in layers:
        found.append(0)
        for module in layer.modules():
            if not type(module).__module__.startswith("threed.layers."):
                return None
            states: Any = getattr(module, "flops", None)
            flops: int | None = 0 if states is None else states(tokens, seq)
            if flops is None:
                return None
            found[-1] += flops
    return found


@functools.cache
def formula_of(operation: Any) -> Callable[..., int] | None:
    """Returns the formula for an operation's FLOPs, or None if it has no formula.

    Fused attention and grouped products have formulas of this package. Other operations use torch's formulas. For an
    in-place operation such as `addmm_`, the formula of `addmm` is used.
    """
    if operation in attention.FUSED:
        return attention_costs.kernel_flops
    if operation in attention_costs.FUSED_BACKWARD:
        return attention_costs.kernel_backward_flops
    if operation is torch.ops.aten._grouped_mm:
        return grouped.kernel_flops
    plain = getattr(torch.ops.aten, operation.__name__.removesuffix("_"), operation)
    return flop_registry.get(operation, flop_registry.get(plain))


class TraceError(ValueError):
    """Raised if a layer cannot be traced. The message names the layer and a fix."""


class Watch(TorchDispatchMode):
    """Context manager that counts the FLOPs of operations and the bytes of tensor storages.

    It sees all operations inside its block, and the storages of their arguments and results.

    Args:
        ignored: tensors whose storages are not counted.
        real: if True, storages on the meta device are not counted, because they take no memory.
        recorder: records all operations; None to record nothing.

    Attributes:
        flops: FLOPs so far.
        most: peak bytes since the last call of `begin`.
    """

    def __init__(
        self, ignored: Iterable[Tensor] = (), real: bool = False, recorder: Recorder | None = None
    ) -> None:
        super().__init__()
        self.recorder = recorder
        self._real = real
        self._ignored = {tensor.untyped_storage()._cdata for tensor in ignored}
        self._size: dict[weakref.ref[UntypedStorage], int] = {}  # bytes when last seen
        # Storages that no longer exist, which `bytes` removes. Any thread may append to it.
        self._freed: deque[weakref.ref[UntypedStorage]] = deque()
        self._total = 0  # sum of `_size`
        self.flops = self.most = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # if this returned True, every operation would run through a wrapper of torch's compiler
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = meta_results.run(func, args, kwargs or {})
        if (formula := formula_of(func._overloadpacket)) is not None:
            # The argument `out_dtype` is removed, because torch's FLOP formulas do not accept it.
            known = [arg for arg in args if not isinstance(arg, torch.dtype)]
            self.flops += formula(*known, **(kwargs or {}), out_val=out)
        if self.recorder is not None:
            self.recorder.add(func, args, kwargs or {}, out)
        self.look_at((args, out))
        return out

    def look_at(self, values: Any) -> None:
        """Counts the bytes of new storages, and of storages that have grown.

        Args:
            values: a tensor, or nested lists and tuples of tensors; anything else is ignored.
        """
        if isinstance(values, Tensor):
            storage = values.untyped_storage()
            if storage._cdata in self._ignored or (self._real and values.is_meta):
                return
            ref, nbytes = weakref.ref(storage), storage.nbytes()
            known = self._size.get(ref)
            if known is None:
                ref = weakref.ref(storage, self._freed.append)
            if nbytes != known:  # the storage is new or was resized
                self._size[ref] = nbytes
                self._total += nbytes - (known or 0)
                self.most = max(self.most, self.bytes())
        elif isinstance(values, list | tuple):
            for value in values:
                self.look_at(value)

    def bytes(self) -> int:
        """Returns the total size in bytes of all counted storages that still exist."""
        while self._freed:
            self._total -= self._size.pop(self._freed.popleft())
        return self._total

    def begin(self) -> int:
        """Resets the peak to the current number of bytes, and returns this number."""
        self.most = self.bytes()
        return self.most


class _FusedAttention(TorchFunctionMode):
    """Context manager that replaces scaled dot-product attention by a fused operator.

    On the meta device torch would use its unfused implementation, whose score matrix does not exist
    in a real run.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            func = attention_costs.on_meta
        return func(*args, **(kwargs or {}))


class BufferSink:
    """A gradient sink: the object in `param.sink`, to which layers add the parameter's gradient.

    It adds the gradient to a buffer, as ZeRO's gradient sinks do. ZeRO's sinks also count how often
    a layer adds to a gradient, and reduce the gradient after the last addition; this sink does not.
    """

    def __init__(self, target: Tensor) -> None:
        self.target = target

    def add(self, grad: Tensor) -> None:
        self.target.add_(grad)

    def add_product(self, a: Tensor, b: Tensor, by: Matmul = NATIVE) -> None:
        by.add_product_(self.target, a, b, fresh=False)

    def add_rows(self, index: Tensor, rows: Tensor) -> None:
        self.target.index_add_(0, index, rows.to(self.target.dtype))

    def add_groups(self, dy: Tensor, x: Tensor, groups: Groups) -> None:
        grouped.add_products_(self.target, dy, x, groups, fresh=False)

    def memory(self) -> tuple[Tensor, bool]:
        return self.target, True

    def mark_added(self) -> None:
        """Has no effect, because this sink does not count additions."""

    def in_forward(self) -> bool:
        return False

    def defers(self) -> bool:
        return False

    def take(self, param: Tensor) -> None:
        """Adds `param.grad` to the buffer and sets it to None."""
        if param.grad is not None:
            self.add(param.grad.to_dense() if param.grad.is_sparse else param.grad)
            param.grad = None


class Tracer:
    """Measures the costs of layers on the meta device.

    Args:
        micro: a micro-batch on the meta device, with the shapes and dtypes of the run.
        dtype: dtype of parameters and activations.
        grad_dtype: dtype of gradients.
        traffic: bytes sent, by name of the axis; the axes of the model update this counter. The
            tracer reads the counter, and restores it after each measured layer.
        journal: the collectives of the axes of the model; the tracer removes those of the measured
            layers. None: operations of layers contain no messages.

    Attributes:
        output: `Form` (shapes and dtypes) of the output of the last layer in the newest trace;
            None if the output is a loss.
    """

    def __init__(
        self, micro: MicroBatch, dtype: torch.dtype, grad_dtype: torch.dtype, traffic: Counter[str],
        journal: Journal | None = None,
    ) -> None:  # fmt: skip
        self.micro, self.dtype, self.grad_dtype, self.traffic = micro, dtype, grad_dtype, traffic
        self.journal = Journal() if journal is None else journal
        self.output: Form | None = None
        self._known: dict[Any, tuple[LayerCost, Form | None]] = {}

    def trace(
        self, layers: Sequence[nn.Module], recomputed: Recomputed | None = None
    ) -> list[LayerCost]:
        """Returns the cost of every layer of a model, in order.

        Args:
            layers: the layers of the model.
            recomputed: the layers to recompute in the backward; `recomputed.units` are their
                indices in `layers`. None: no layer is recomputed.

        Raises:
            TraceError: if a layer cannot be run on the meta device.
        """
        costs, form, recomputed = [], None, recomputed or Recomputed()
        for number, layer in enumerate(layers):
            recompute = number in recomputed.units
            key = cost_key(layer, layers, form, recompute)
            if key not in self._known:
                try:
                    self._known[key] = self._run(layer, form, recomputed if recompute else None)
                except ForwardError:
                    raise
                except Exception as error:  # the code of a custom layer may raise any exception
                    raise TraceError(
                        f"{title(layer, number)} could not be run on the meta device:"
                        f" {type(error).__name__}: {error}{place_of(error)}. If the layer reads values on the host, threed"
                        " train and plan, which forecast its memory, cannot run it; train it by threed.Engine in a"
                        " program, with a method costs(micro_batch) of the model or --parallel.partition uniform"
                    ) from error
            cost, form = self._known[key]
            costs.append(cost)
        self.output = form
        return costs

    def require_loss(self, layers: Sequence[nn.Module]) -> None:
        """Raises TraceError if the last layer of the newest trace did not return a loss.

        Args:
            layers: the layers that were traced.
        """
        if self.output is not None:
            raise TraceError(
                f"{title(layers[-1], len(layers) - 1)} is the last layer and returned tensors of shape"
                f" {', '.join(str(list(shape)) for shape in self.output.shapes)} for a batch with labels: return the"
                " loss of the micro-batch, a scalar, as layers.LanguageModelHead does"
            )

    def _run(
        self, layer: nn.Module, form: Form | None, recomputed: Recomputed | None
    ) -> tuple[LayerCost, Form | None]:
        """Measures a copy of the layer, so that the layer's own state does not change.

        Returns the cost, and the `Form` (shapes and dtypes) of the output or None for a loss.
        """
        traced = copy.deepcopy(layer)
        params = materialize(layer, traced, self._parameter, META)
        given = [
            *params,
            *(param.sink.target for param in params),  # type: ignore[attr-defined]
            *traced.buffers(),
            *vars(self.micro).values(),
            *(self.micro.full or ()),
            *(self.micro.inputs or {}).values(),
        ]
        stage = Stage([traced], AlwaysGathered(), recomputed=for_layer_alone(recomputed, traced))
        before, recorder = Counter(self.traffic), Recorder(self.journal)
        known = len(self.journal.entries)
        try:
            with (
                Watch(
                    (value for value in given if isinstance(value, Tensor)),
                    recorder=recorder,
                ) as watch,
                _FusedAttention(),
            ):
                cost, output = _measure(stage, form, self.micro, watch, recorder)
            sent = {
                label: count - before[label]
                for label, count in self.traffic.items()
                if count > before[label]
            }
            return replace(cost, sent=sent), output
        finally:
            self.traffic.clear()
            self.traffic.update(before)
            del self.journal.entries[known:]

    def _parameter(self, param: nn.Parameter) -> nn.Parameter:
        """Returns a parameter on the meta device with a gradient sink."""
        own = dtype_of(param, self.dtype)
        new = nn.Parameter(torch.empty(param.shape, dtype=own, device=META), param.requires_grad)
        return attach_sink(new, BufferSink(torch.empty_like(new, dtype=self.grad_dtype)))


def attach_sink(param: nn.Parameter, sink: BufferSink) -> nn.Parameter:
    """Directs the gradients of a parameter to a sink, and returns the parameter."""
    param.sink = sink  # type: ignore[attr-defined]
    if param.requires_grad:
        param.register_post_accumulate_grad_hook(sink.take)
    return param


def materialize(
    layer: nn.Module,
    copied: nn.Module,
    make: Callable[[nn.Parameter], nn.Parameter],
    device: torch.device,
) -> list[nn.Parameter]:
    """Gives a copy of a layer new parameters, and moves the copy's buffers to a device.

    Args:
        layer: the layer. Its parameters have sharding records (`ShardSpec`).
        copied: the copy of the layer. Its parameters have no sharding records.
        make: `make(param)` returns the copy's new parameter for a parameter of the layer.
        device: device for the buffers.

    Returns:
        The new parameters.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for own, module in zip(layer.modules(), copied.modules(), strict=True):
        for name, param in own._parameters.items():
            if param is not None and param not in made:
                made[param] = make(param)
            module._parameters[name] = None if param is None else made[param]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
    return list(made.values())


def for_layer_alone(recomputed: Recomputed | None, layer: nn.Module) -> Recomputed | None:
    """Returns the recomputation settings of a stage that consists only of this layer.

    Args:
        recomputed: settings of the full model; None if the layer is not recomputed.
        layer: the layer. If only some of its operations are recomputed, this function changes the
            layer, so that it recomputes them (`Selective.install`).

    Returns:
        The settings; None if the layer is not recomputed.
    """
    if recomputed is None or recomputed.selective is None:
        return recomputed and replace(recomputed, units=frozenset({0}))
    selective = Selective(recomputed.selective.ops)
    selective.install(layer)
    return Recomputed(frozenset({0}), selective=selective)


def _measure(
    stage: Stage, form: Form | None, micro: MicroBatch, watch: Watch, recorder: Recorder
) -> tuple[LayerCost, Form | None]:
    """Measures one forward and one backward of a stage with a single layer.

    Args:
        stage: the stage, whose only layer is measured.
        form: structure, shapes and dtypes of the layer's input; None for the first layer.
        micro: the micro-batch that the layer runs on, on the meta device.
        watch: counts the memory and the FLOPs.
        recorder: records the operations of `watch`.

    Returns:
        The cost, and the form of the output (None for a loss).
    """
    x = None if form is None else form.value(form.empty(META, gradients=False))
    watch.look_at(tensors(x))
    size = watch.begin()
    input_storages = [StorageWeakRef(part.untyped_storage()) for part in tensors(x)]
    y = stage.forward(0, x, micro)
    forward, output, flops = watch.most, Form.of(y), watch.flops
    operations = recorder.take()
    made = {
        part.untyped_storage()._cdata: StorageWeakRef(part.untyped_storage()) for part in tensors(y)
    }
    nbytes = sum(part.untyped_storage().nbytes() for part in tensors(y))
    last = y.dim() == 0 if isinstance(y, Tensor) else False
    del x, y
    keeps_input, keeps_output = _any_alive(input_storages), _any_alive(made.values())
    kept = watch.begin() - size * keeps_input - nbytes * keeps_output
    dy = None if last else output.gradients(output.empty(META, gradients=True))
    watch.look_at(gradients_of(dy, len(output.shapes)))
    watch.begin()
    stage.backward(0, dy)
    del dy, stage
    cached, backward = watch.bytes(), watch.most
    cost = LayerCost(
        flops, kept - cached, keeps_input, keeps_output, forward - cached, backward - cached, size,
        0 if last else nbytes, cached, operations=(operations, recorder.take()),
    )  # fmt: skip
    return cost, None if last else output


def _any_alive(refs: Iterable[StorageWeakRef]) -> bool:
    return any(not ref.expired() for ref in refs)


def cost_key(
    layer: nn.Module, layers: Sequence[nn.Module], form: Form | None, recompute: bool
) -> Any:
    """Returns a hashable key of a layer; layers with equal keys have equal costs.

    Args:
        layer: one of `layers`.
        layers: all layers of the model.
        form: structure, shapes and dtypes of the layer's input; None for the first layer.
        recompute: whether the layer is recomputed.
    """
    return fingerprint(layer, contract(layer).name, set()), form, recompute, layer is layers[-1]


def fingerprint(value: Any, name: str, ancestors: set[int]) -> Any:
    """Returns a hashable key of a value's structure.

    Layers that differ only in name have equal keys.

    Args:
        value: a layer, or an attribute of a layer.
        name: the layer's name, which is removed from strings.
        ancestors: ids of the values that contain this value. They are not visited again, because a
            module may refer to its parent, and the recursion would not end.
    """
    if isinstance(value, nn.Module | dict | list | tuple | set | frozenset):
        if id(value) in ancestors:
            return id(value)
        ancestors = ancestors | {id(value)}
    if isinstance(value, nn.Module):
        return type(value), fingerprint(vars(value), name, ancestors)
    if isinstance(value, dict):
        items = ((str(key).replace(name, "") if name else key, v) for key, v in value.items())
        return tuple((key, fingerprint(v, name, ancestors)) for key, v in items)
    if isinstance(value, list | tuple):
        return tuple(fingerprint(item, name, ancestors) for item in value)
    if isinstance(value, set | frozenset):
        return frozenset(fingerprint(item, name, ancestors) for item in value)
    if is_dataclass(value) and type(value).__eq__ is not object.__eq__:
        return type(value), tuple(
            fingerprint(getattr(value, part.name), name, ancestors) for part in fields(value)
        )
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad
    if isinstance(value, Tally | Flag):  # each layer has its own
        return type(value)
    if isinstance(value, str):
        return value.replace(name, "") if name else value
    if isinstance(value, int | float | type(None) | torch.dtype):
        return value
    return id(value)
