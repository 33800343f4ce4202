"""Replays the passes of micro-batches as CUDA graphs, for `--run.graphs`.

A forward or backward of a small model launches kernels more slowly than the GPU runs them. A CUDA
graph launches all kernels of a pass at once: the pass is captured once, and replayed afterwards. A
replay runs no Python code. It runs the same kernels at the same addresses, so these conditions
must hold:

- The inputs of a micro-batch are copied into static tensors, which the captured kernels read. This
  includes the number of the step, which determines dropout masks.
- Parameters and gradients are at fixed addresses (ZeRO stages 0 and 1). Before each plan, `reset`
  checks that parameters and buffers have not moved; otherwise the passes are captured again.
- Tensors that a pass allocates are in a memory pool that only graphs use. No such tensor may be
  used after its pass, except the loss and the data flags, which are copied after each replay. So
  all graphs of a stage share one pool: the memory contains no values between two micro-batches.
- A tensor from outside of the pool that the kernels read, such as a table of rotary angles, must
  stay allocated. `Region` keeps it alive.
- The host must not read values, copy from or to the device, or communicate. The reducer counts
  contributions to gradients, and launches reductions, after each replay of a backward.

The first contribution to a gradient overwrites it, and later contributions are added. So the first
micro-batch of a step has a separate graph. Each graph goes through four phases, one per micro-batch:

    plain      runs without a graph, which initializes libraries and tables
    rehearse   runs without a graph, and checks every operation (`Region`)
    capture    captures forward and backward, and replays them
    replay     afterwards

Operations are checked before the capture, because a violation in a capture gives an unclear error
of CUDA, or wrong numbers. torch's `make_graphed_callables` is the model of this procedure.
"""

from __future__ import annotations

import enum
import gc
import itertools
import random
import statistics
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from threed.config import Config, ConfigError
from threed.config.checks import find_graph_problems
from threed.core.device import DeviceGraph, can_capture, graph_pool
from threed.distributed import topology as topologies
from threed.distributed.sharding import spec_of
from threed.distributed.topology import Topology
from threed.layers.contract import contract, title
from threed.layers.experts import MixtureOfExperts
from threed.layers.slicing import Flag, MicroBatch, has_gradient_hooks, has_hooks
from threed.models import Model, Wrapped, options_of
from threed.pipeline.boundary import signature
from threed.pipeline.operations import tensors_in
from threed.pipeline.stage import Pass, Stage, finish
from threed.pipeline.trace import stated_flops

# `auto` uses graphs if the median layer has fewer FLOPs per forward and backward. The host takes up
# to 25 µs per kernel, and a layer has about 32 kernels. A GPU with 600 TFLOP/s computes 0.5e12 FLOPs
# in this time.
LAUNCH_BOUND = 0.5e12
MOST_SHAPES = 4  # shapes of micro-batches that get graphs, separately for training and evaluation
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"}


# ------------------------------------------------------------------------------- the decision


def wanted(
    config: Config, model: Model, layers: Sequence[nn.Module], topology: Topology, trains: bool
) -> bool:
    """Returns whether the passes of an engine are replayed as CUDA graphs.

    Args:
        config: the resolved configuration. `run.graphs` is true, false or auto. With auto, graphs
            are used on one GPU if all layers are from `threed.layers` and small (`LAUNCH_BOUND`).
        model: the model, or a wrapped module.
        layers: all layers of the model.
        topology: the process topology.
        trains: False for an engine that only evaluates.

    Raises:
        ConfigError: if `run.graphs` is true, but graphs are not supported.
    """
    asked = config.run.graphs
    if asked is False:
        return False
    problems = itertools.chain(find_graph_problems(config), _find_problems(model, layers, topology))
    if asked is True:
        if found := list(problems):
            raise ConfigError(found)
        return True
    if any(problems) or not trains or topology.dp > 1:
        return False
    seq = config.model.seq
    flops = stated_flops(layers, config.train.micro_batch * seq, seq)
    return flops is not None and 3 * statistics.median(flops) < LAUNCH_BOUND


def _find_problems(model: Model, layers: Sequence[nn.Module], topology: Topology) -> Iterator[str]:
    """Yields why passes of a model on these devices cannot be CUDA graphs, one line each."""
    given, fix = "--run.graphs true", "use --run.graphs false, or auto"
    if not can_capture(topology.device):
        yield f"{given} on {topology.device.type}: only CUDA GPUs have CUDA graphs; {fix}"
    elif topology.dp > 1 and topologies.backend() != "nccl":
        yield f"{given} with {topologies.backend()}, whose collectives run on the host; use NCCL, or --run.graphs false"
    if isinstance(model, Wrapped):
        yield (
            f"{given} with a wrapped module, whose forward may run any code on the host; use --run.graphs false, build the"
            " model from threed.layers, or use make_graphed_callables of torch on parts of it"
        )
        return
    if options_of(model).boundaries_vary:
        yield f"{given}: the shapes in this model vary (`boundaries_vary`); {fix}"
    for number, layer in enumerate(layers):
        if contract(layer).runs_vary:
            yield f"{given}: {title(layer, number)} runs a data-dependent number of times (`runs_vary`); {fix}"
        elif any(isinstance(part, MixtureOfExperts) for part in layer.modules()) or any(
            spec_of(param).over is not None for param in layer.parameters()
        ):
            yield f"{given}: {title(layer, number)} has experts, which get a varying number of tokens; {fix}"


# ------------------------------------------------------------------------ checks of operations


class Region(TorchDispatchMode):
    """Checks the operations of a pass, and keeps tensors alive that its graph reads.

    Attributes:
        problems: descriptions of operations that a CUDA graph cannot contain, in order.
        generators: the generators that operations draw from, except default generators.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.problems: dict[str, None] = {}
        self.generators: dict[int, torch.Generator] = {}
        # By address of the storage: storages that the pass has allocated, with the place; and
        # storages from outside.
        self._made: dict[int, tuple[StorageWeakRef, str]] = {}
        self._outside: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # asks a tensor for its device or layout
            return func(*args, **kwargs)
        given = list(tensors_in(*args, *kwargs.values()))
        if (problem := self._problem(func, given, args, kwargs)) is not None:
            self.problems.setdefault(f"{problem} ({func._opname}) at {_place()}")
        generator = kwargs.get("generator")
        if isinstance(generator, torch.Generator):
            self.generators[id(generator)] = generator
        for tensor in given:
            self._keep(tensor)
        out = func(*args, **kwargs)
        for tensor in tensors_in(out):
            if tensor.device.type == self.device.type:
                self._note_made(tensor)
        return out

    def _problem(
        self, func: Any, given: Sequence[Tensor], args: Any, kwargs: Mapping[str, Any]
    ) -> str | None:
        """Returns why a CUDA graph cannot contain an operation; None if it can."""
        name, kinds = func._opname, {tensor.device.type for tensor in given}
        target = kwargs.get("device")
        kinds |= set() if target is None else {torch.device(target).type}
        if func.namespace in ("c10d", "_c10d_functional"):
            return "a collective"
        if name == "_pin_memory" or kwargs.get("pin_memory"):
            return "page-locked memory is allocated"
        if len(kinds) > 1:
            return "a value crosses between host and device"
        if self.device.type not in kinds:
            draws = torch.Tag.nondeterministic_seeded in func.tags
            return "a random number is drawn on the host" if draws else None
        if torch.Tag.data_dependent_output in func.tags:
            return "the host reads a value of the device"
        if name in INDEXING:
            indices = tensors_in(*(args[1] or ()))
            masked = any(index.dtype in (torch.bool, torch.uint8) for index in indices)
            return "a shape depends on values" if masked else None
        if torch.Tag.dynamic_output_shape in func.tags:
            return "a shape depends on values"
        return None

    def _is_made(self, address: int) -> bool:
        return address in self._made and not self._made[address][0].expired()

    def _keep(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if not self._is_made(storage._cdata):
            self._outside[storage._cdata] = storage

    def _note_made(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._outside and not self._is_made(address):
            self._made[address] = StorageWeakRef(storage), _place()

    def kept(self, outputs: Iterable[Tensor]) -> list[str]:
        """Returns the places where the pass allocated tensors that are still alive.

        Args:
            outputs: tensors that may stay alive.
        """
        allowed = {tensor.untyped_storage()._cdata for tensor in outputs}

        def alive() -> list[str]:
            made = self._made.items()
            return [where for at, (ref, where) in made if at not in allowed and not ref.expired()]

        if alive():
            gc.collect()  # tensors in reference cycles are not kept
        return alive()


_TORCH = str(Path(torch.__file__).parent)


def _place() -> str:
    """Returns the innermost line of Python code that runs, outside of torch and of this module."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_TORCH, __file__)):
        frame = frame.f_back
    name = Path(frame.f_code.co_filename)
    return f"{Path(*name.parts[-2:])}:{frame.f_lineno}"


def _host_draws() -> tuple[Any, ...]:
    """Returns the states of Python's and NumPy's generators, whose draws a graph would repeat."""
    numpy = sys.modules.get("numpy")
    state = () if numpy is None else numpy.random.get_state()
    return random.getstate(), *(bytes(part) if hasattr(part, "tobytes") else part for part in state)


# --------------------------------------------------------------------------- one micro-batch


class Gradients(Protocol):
    """Counts contributions to gradients (`threed.zero.reducer.Reducer`, see there)."""

    @property
    def settled(self) -> bool: ...

    @property
    def fresh(self) -> bool: ...

    def recorded(self) -> AbstractContextManager[list[Any]]: ...

    def count(self, added: list[Any]) -> None: ...


class Phase(enum.Enum):
    """What the next pass of a micro-batch does."""

    PLAIN = enum.auto()
    REHEARSE = enum.auto()
    CAPTURE = enum.auto()
    REPLAY = enum.auto()


class StaticBatch:
    """A micro-batch with static tensors, into which other micro-batches are copied.

    Args:
        micro: the first micro-batch.
        device: device of the layers.
    """

    def __init__(self, micro: MicroBatch, device: torch.device) -> None:
        step = torch.zeros((), dtype=torch.int64, device=device)
        tensors: dict[str, Any] = {
            name: value.clone()
            for name in ("tokens", "labels", "samples", "weight", "documents")
            if isinstance(value := getattr(micro, name), Tensor)
        }
        inputs = None if micro.inputs is None else {k: v.clone() for k, v in micro.inputs.items()}
        full = None if micro.full is None else (micro.full[0].clone(), micro.full[1].clone())
        self.micro = replace(micro, **tensors, step=step, inputs=inputs, full=full)
        self._step, self._names = step, tuple(tensors)

    def fill(self, micro: MicroBatch) -> None:
        """Copies a micro-batch of the same shapes into the static tensors."""
        for name in self._names:
            getattr(self.micro, name).copy_(getattr(micro, name))
        for name, value in (self.micro.inputs or {}).items():
            value.copy_((micro.inputs or {})[name])
        for static, value in zip(self.micro.full or (), micro.full or (), strict=True):
            static.copy_(value)
        self._step.fill_(micro.step)


class PassGraphs:
    """The graphs of forward and backward, for micro-batches of one shape.

    Args:
        static: the static tensors.
        flags: the data flags that the layers set.
        gradients: counts contributions to gradients.
        device: device of the layers.
        pool: memory pool of all graphs of the stage.

    Attributes:
        phase: what the current or next micro-batch does.
        problems: why the passes cannot be captured; filled in the phase REHEARSE.
    """

    def __init__(
        self, static: StaticBatch, flags: Sequence[Flag], gradients: Gradients, device: torch.device, pool: Any
    ) -> None:  # fmt: skip
        self.static, self.flags, self.gradients = static, flags, gradients
        self.device, self.pool = device, pool
        self.phase, self.problems = Phase.PLAIN, list[str]()
        self._region = Region(device)
        self._graphs: dict[str, DeviceGraph] = {}
        self._found: list[tuple[Flag, Tensor]] = []
        self._generators: list[torch.Generator] = []
        self._added = list[Any]()

    def forward(self, run: Callable[[MicroBatch], Tensor], micro: MicroBatch) -> Tensor:
        """Runs a forward; returns the loss.

        Args:
            run: runs the layers on a micro-batch.
            micro: the micro-batch.
        """
        training = micro.training
        if self.phase is Phase.PLAIN:
            y = run(micro)
            if not training:
                self._end()
            return y
        self.static.fill(micro)
        if self.phase is not Phase.REPLAY:
            self._region, self._draws = Region(self.device), _host_draws()
            before = [flag.swap(None) for flag in self.flags]
            try:
                with self._captured("forward"):
                    self._loss = run(self.static.micro).detach()
            finally:
                found = [(f, f.swap(b)) for f, b in zip(self.flags, before, strict=True)]
            self._found = [(flag, wrong) for flag, wrong in found if wrong is not None]
        self._replay("forward")
        for flag, wrong in self._found:
            flag.note(wrong)
        loss = self._loss.clone()
        if not training:
            self._end()
        return loss

    def backward(self, run: Callable[[], Any]) -> None:
        """Runs the backward of the last forward.

        Args:
            run: runs the backward of the layers.
        """
        if self.phase is Phase.PLAIN:
            run()
        else:
            if self.phase is not Phase.REPLAY:
                with self.gradients.recorded() as added, self._captured("backward"):
                    run()
                self._added = added
            self._replay("backward")
            self.gradients.count(self._added)
        self._end()

    @contextmanager
    def _captured(self, name: str) -> Iterator[None]:
        """Context manager: checks the operations of the block; captures them in phase CAPTURE."""
        if self.phase is Phase.REHEARSE:
            with self._region:
                yield
            return
        graph = DeviceGraph(self.pool, self._generators)
        try:
            with graph.capture(), self._region:
                yield
        except RuntimeError as error:
            raise ConfigError(
                [f"--run.graphs: the capture of a {name} failed: {error}; use --run.graphs false"]
            ) from error
        self._graphs[name] = graph

    def _replay(self, name: str) -> None:
        if name in self._graphs:
            self._graphs[name].replay()

    def _end(self) -> None:
        """Ends a micro-batch, and enters the next phase."""
        phase = self.phase
        if phase in (Phase.REHEARSE, Phase.CAPTURE):
            kept = self._region.kept([self._loss, *(wrong for _, wrong in self._found)])
            problems = [*self._region.problems]
            problems += [f"a layer keeps a tensor of its pass, allocated at {at}" for at in kept]
            if _host_draws() != self._draws:
                problems.append("a random number is drawn on the host, by random or numpy")
            self.problems = problems
        if phase is Phase.REHEARSE:
            self._generators = [*self._region.generators.values()]
            self.phase = Phase.CAPTURE
        elif phase is Phase.CAPTURE:
            self.phase = Phase.REPLAY
        elif self.gradients.settled or not self.static.micro.training:
            self.phase = Phase.REHEARSE if phase is Phase.PLAIN else phase


# --------------------------------------------------------------------------------- the stage


class StageGraph(Stage):
    """A stage whose passes are replayed as CUDA graphs.

    The stage must be the only one of the model, and each backward must follow its forward before
    the next forward runs.

    Args:
        stage: positional arguments of `Stage`.
        gradients: counts contributions to gradients.
        device: device of the layers.
        required: True: raise ConfigError if a layer cannot be captured. False: warn, and run the
            layers without graphs.
    """

    def __init__(
        self, *stage: Any, gradients: Gradients, device: torch.device, required: bool
    ) -> None:
        super().__init__(*stage)
        self.gradients, self.device, self.required = gradients, device, required
        self._modules = [module for layer in self.layers for module in layer.modules()]
        self._flags = [flag for m in self._modules for flag in getattr(m, "data_flags", ())]
        self._statics: dict[Any, StaticBatch] = {}
        self._passes: dict[Any, PassGraphs] = {}
        self._running: PassGraphs | None = None
        self._identity: Any = None
        self._pool: Any = None
        self._on = True

    def reset(self, ended: int | None = None) -> None:
        super().reset(ended)
        self._running = None
        if self._on and (identity := self._identify()) != self._identity:
            self._passes.clear()
            self._identity = identity
            self._check_hooks()

    def forward_by_layer(
        self, microbatch: int, x: Any, micro: MicroBatch, keep: bool = False
    ) -> Pass[Any]:
        run = super().forward_by_layer
        self._running = passes = self._passes_of(micro)
        if passes is None:
            return (yield from run(microbatch, x, micro, keep))
        for unit in self._units:
            self.gatherer.ready(unit)  # no gather may be waited for in a capture
        y = passes.forward(lambda static: finish(run(microbatch, x, static)), micro)
        yield
        if not micro.training:
            self._running = None
            self._check(passes)
        return y

    def backward_by_layer(
        self, microbatch: int, dy: Any, keep: bool = False, split: bool = False
    ) -> Pass[Any]:
        run = super().backward_by_layer
        passes, self._running = self._running, None
        if passes is None:
            return (yield from run(microbatch, dy, keep, split))
        passes.backward(lambda: finish(run(microbatch, dy)))
        self._check(passes)
        yield
        return None

    def _passes_of(self, micro: MicroBatch) -> PassGraphs | None:
        """Returns the graphs for a micro-batch; None if it must run without a graph."""
        if self._running is not None:
            raise RuntimeError("a forward began before the backward of the previous forward ended")
        labels = micro.labels is not None or micro.inputs is not None
        if not (self._on and labels):  # without labels the layers compute logits, of any shape
            return None
        if torch.is_autocast_enabled("cuda"):
            self._refuse(["autocast is on, whose cache of cast weights would not be updated"])
            return None
        shapes = signature(micro)
        if shapes not in self._statics:
            if any(not isinstance(value, Tensor) for value in (micro.inputs or {}).values()):
                self._refuse(["the batch has inputs that are not tensors"])
                return None
            if sum(known[0] == micro.training for known in self._statics) == MOST_SHAPES:
                if self.required:
                    self._refuse([f"micro-batches have more than {MOST_SHAPES} different shapes"])
                return None
            self._statics[shapes] = StaticBatch(micro, self.device)
        key = (*shapes, micro.training and self.gradients.fresh)
        if key not in self._passes:
            self._pool = self._pool or graph_pool()
            self._passes[key] = PassGraphs(
                self._statics[shapes], self._flags, self.gradients, self.device, self._pool
            )
        return self._passes[key]

    def _check(self, passes: PassGraphs) -> None:
        if passes.problems:
            self._refuse(passes.problems)

    def _refuse(self, problems: list[str]) -> None:
        """Ends the use of graphs, with an error if they are required, else with a warning."""
        self._on = False
        self._passes.clear()
        if self.required:
            _raise(problems)
        warnings.warn(
            f"--run.graphs auto: no CUDA graphs are used: {'; '.join(problems)}", stacklevel=2
        )

    def _identify(self) -> tuple[Any, ...]:
        """Returns what a captured pass depends on: addresses of parameters and buffers, and hooks."""
        return tuple(
            (t.data_ptr(), t.requires_grad, module.training)
            for module in self._modules
            for t in (*module._parameters.values(), *module._buffers.values())
            if t is not None
        ), self._hooked()

    def _hooked(self) -> str | None:
        """Returns the name of the first module or parameter with hooks; None if there is none."""
        if nn.modules.module._has_any_global_hook():
            return "every module (a global hook)"
        for module in self._modules:
            if has_hooks(module):
                return type(module).__name__
            for name, param in module._parameters.items():
                if param is not None and has_gradient_hooks(param):
                    return f"{type(module).__name__}.{name}"
        return None

    def _check_hooks(self) -> None:
        if (name := self._identity[-1]) is not None:
            self._refuse([f"{name} has hooks, which a replay would not call"])


def _raise(problems: list[str]) -> NoReturn:
    fix = "use --run.graphs false, or change the layer"
    raise ConfigError([f"--run.graphs true: {problem}; {fix}" for problem in problems])
