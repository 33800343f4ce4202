"""DeepSpeed's `zero.Init`: builds a model that no rank holds in its own memory.

    with Init(config_dict_or_path="ds_config.json"):
        model = MyModel()
    engine, *_ = threed.initialize(model=model, config="ds_config.json")

A parameter is moved into a temporary file when a module registers it, before its values are
initialized. The file is mapped into memory, so the kernel can page it out. The ranks of a machine
share the file of the first of them:

    in the block     every rank writes to a file; only the first rank of the machine keeps its file
    at its end       the other ranks map the file of the first rank, and drop their own
    afterwards       the parameters are ordinary parameters with full shapes. Only changes by the
                     first rank of the machine are written to the file
    engine           reads this rank's slices from the file; the file is freed with the parameters

All files are unlinked as soon as the ranks of the machine have opened them. If there are several
machines, the engine takes the values of rank 0, one parameter at a time (`Wrapped.agree`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import UninitializedParameter

from threed.config import ConfigError
from threed.core.process import process_space
from threed.distributed import collectives
from threed.distributed.sharding import is_managed
from threed.distributed.topology import Axis, world_axis
from threed.interop.deepspeed.api.marks import ZeroParamStatus, mark
from threed.interop.deepspeed.config.reader import read, value_of
from threed.memory.mapped import ELSEWHERE, MappedFile, place, region_of
from threed.models.wrapped import keeps_dtype

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
STEP = 2**22  # number of elements that are converted to another dtype at a time


class Init(contextlib.ContextDecorator):
    """Context manager and decorator: parameters of modules built in it are in a mapped file.

    Collective: every rank builds the same modules in the block. The random numbers are the same as
    without `Init`. If ranks compute different values, the engine uses the values of rank 0.

    As in DeepSpeed, the parameters have the attributes `ds_id`, `ds_shape` and `ds_numel`, and
    `ds_status` is NOT_AVAILABLE after the block, because they must be edited within
    `GatheredParameters`. Unlike in DeepSpeed, their full values can be read.

    Args:
        module: an existing module, whose parameters are moved to the file by the constructor.
        data_parallel_group: the ranks that share the parameters; only all ranks are supported.
        config_dict_or_path: a ds_config. If it enables bf16 or fp16, floating-point parameters and
            buffers are converted at the end of the block. If parameters are offloaded to a drive, its
            `nvme_path` is the default of `folder`.
        config: same as `config_dict_or_path`.
        enabled: if False, the block has no effect.
        dtype: dtype to which floating-point parameters and buffers are converted at the end of the
            block; by default the dtype that the configuration enables, or else no conversion.
        mpu: DeepSpeed's model-parallel unit; model parallelism is not supported.
        zero_param_parallel_group: must be None.
        zero_quantized_weights: must be False; set it in the configuration instead.
        zero_quantized_nontrainable_weights: must be False.
        sequence_data_parallel_group: see `data_parallel_group`.
        folder: the folder of the temporary file; by default the folder of temporary files (TMPDIR).
        mem_efficient_linear, remote_device, pin_memory, param_swapper, tensor_overrides: no effect.

    Raises:
        ConfigError: if an argument is not supported.
    """

    def __init__(
        self, module: nn.Module | None = None, data_parallel_group: Any = None, mem_efficient_linear: bool = True,
        remote_device: str | None = None, pin_memory: bool = False, config_dict_or_path: Any = None,
        config: Any = None, enabled: bool = True, dtype: torch.dtype | None = None, mpu: Any = None,
        zero_param_parallel_group: Any = None, zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False, sequence_data_parallel_group: Any = None,
        param_swapper: Any = None, tensor_overrides: Any = None, *, folder: str | Path | None = None,
    ) -> None:  # fmt: skip
        self.enabled = enabled
        given = config_dict_or_path if config is None else config
        ds = {} if given is None else read(given)
        self.dtype = dtype or _dtype_of(ds)
        self._folder = Path(folder or _nvme_path(ds) or tempfile.gettempdir()).expanduser()
        self._files: list[_Files] = []  # one entry per block in progress
        if not enabled:
            return
        groups = {
            "data_parallel_group": data_parallel_group,
            "sequence_data_parallel_group": sequence_data_parallel_group,
        }
        refused = {
            "zero_param_parallel_group": zero_param_parallel_group is not None,
            "zero_quantized_weights": zero_quantized_weights,
            "zero_quantized_nontrainable_weights": zero_quantized_nontrainable_weights,
        }
        if problems := list(_problems(groups, refused, mpu, self.dtype)):
            raise ConfigError(problems)
        if module is not None:
            with self:
                self._files[-1].adopt_all(module)

    def __enter__(self) -> None:
        if self.enabled:
            self._files.append(_Files(self._folder, world_axis()))

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self.enabled:
            self._files.pop().end(error, self.dtype)


class _Files:
    """The files of one block of `Init`, and the modules that are built in it.

    Args:
        folder: folder of the files.
        axis: all ranks.
    """

    def __init__(self, folder: Path, axis: Axis) -> None:
        self.axis = axis
        places = collectives.exchange(process_space(), axis)
        ranks = [rank for rank, place in enumerate(places) if place == places[axis.index]]
        first = ranks[0] == axis.index
        paths = list[str]()
        try:
            own, path = self._attempt(lambda: _create(folder, paths))
            path_of_first = collectives.exchange(path, axis)[ranks[0]]
            # Opened now, because the files are unlinked before the block begins.
            self._shared = self._attempt(
                lambda: os.dup(own) if first else os.open(path_of_first, os.O_RDWR)
            )
        finally:
            for path in paths:
                os.unlink(path)
        self.file = MappedFile(own, folder, ranks if first else [axis.index], writes=True)
        self._ranks, self._first = ranks, first
        # All modules with new parameters, by id. References are strong, so that all ranks have the
        # same modules in the same order, whenever garbage is collected.
        self._modules: dict[int, nn.Module] = {}
        self._handles = [
            register_module_parameter_registration_hook(self._parameter_registered),
            register_module_module_registration_hook(self._module_registered),
        ]

    def _attempt(self, act: Any) -> Any:
        return collectives.attempt_together(
            act, self.axis, RuntimeError, lambda error: f"zero.Init: {error}: {ELSEWHERE}"
        )

    def _parameter_registered(self, module: nn.Module, name: str, param: Any) -> None:
        self._modules[id(module)] = module
        self._adopt(param)

    def _module_registered(self, module: nn.Module, name: str, submodule: Any) -> None:
        if isinstance(submodule, nn.Module):
            self.adopt_all(submodule)

    def adopt_all(self, module: nn.Module) -> None:
        """Moves all parameters of a module and its submodules to the file."""
        for part in module.modules():
            self._modules[id(part)] = part
            for param in part._parameters.values():
                self._adopt(param)

    def _adopt(self, param: Any) -> None:
        """Moves a parameter to the file, unless it is in a file or not in the CPU's memory."""
        if not _can_move(param) or region_of(param) is not None:
            return
        stride = torch.empty_like(param, device="meta").stride()
        region = self.file.allocate(param.numel() * param.element_size())
        values = region.tensor(param.dtype, param.shape, stride)
        values.copy_(param.data)
        place(param, values, region)

    def end(self, error: BaseException | None, dtype: torch.dtype | None) -> None:
        """Ends the block: the ranks of the machine share the file of the first of them. Collective.

        Args:
            error: the exception that the block has raised, or None.
            dtype: dtype to which floating-point parameters and buffers are converted, or None.
        """
        for handle in self._handles:
            handle.remove()
        try:
            with collectives.failing_together(self.axis, "the block of zero.Init"):
                if error is not None:
                    raise error
                for module in list(self._modules.values()):
                    for param in module._parameters.values():
                        self._adopt(param)
                params = list(self._params())
                if dtype is not None:
                    for param in params:
                        self._convert(param, dtype)
                    self._convert_buffers(dtype)
            self._check_same(params)
            # `_check_same` is collective, so the first rank has written all values.
            if not self._first:
                self._map_shared(params)
            _mark(self._modules.values())
        finally:
            self.file.close()
            os.close(self._shared)
            self._modules.clear()

    def _params(self) -> Iterator[nn.Parameter]:
        """Yields each parameter that is in this object's file once."""
        seen = set[int]()
        for module in self._modules.values():
            for param in module._parameters.values():
                if param is None or id(param) in seen or not _can_move(param):
                    continue
                region = region_of(param)
                if region is not None and region.file is self.file:
                    seen.add(id(param))
                    yield param

    def _convert(self, param: nn.Parameter, dtype: torch.dtype) -> None:
        """Converts a parameter to another dtype, in place if the new values are not larger."""
        region = region_of(param)
        if region is None or not param.is_floating_point() or param.dtype == dtype:
            return
        if dtype.itemsize > param.element_size():
            region = self.file.allocate(param.numel() * dtype.itemsize)
        flat = param.data.as_strided((param.numel(),), (1,))
        out = region.tensor(dtype, flat.shape, (1,))
        # In place, elements are read before they are overwritten, because they are not smaller than
        # the new elements at the same index.
        for first in range(0, len(flat), STEP):
            out[first : first + STEP] = flat[first : first + STEP].to(dtype)
        place(param, out.as_strided(param.shape, param.stride()), region)

    def _convert_buffers(self, dtype: torch.dtype) -> None:
        """Converts the floating-point buffers, as `module.to(dtype)` would."""
        for module in self._modules.values():
            for key, buffer in module._buffers.items():
                if (
                    buffer is not None
                    and buffer.is_floating_point()
                    and not keeps_dtype(module, key)
                ):
                    module._buffers[key] = buffer.to(dtype)

    def _check_same(self, params: Iterable[nn.Parameter]) -> None:
        """Raises ValueError if a rank of the machine has built other parameters. Collective."""
        found = [
            (region.offset, str(param.dtype), list(param.shape), list(param.stride()))
            for param in params
            if (region := region_of(param)) is not None
        ]
        digest = hashlib.sha256(repr((self.file.lengths, found)).encode()).hexdigest()
        everyone = collectives.exchange(digest, self.axis)
        for rank, other in enumerate(everyone):
            if other != everyone[0]:
                raise ValueError(
                    f"zero.Init: rank {rank} has built other parameters than rank 0, or in a different order: build the"
                    " same modules on every rank"
                )

    def _map_shared(self, params: Iterable[nn.Parameter]) -> None:
        """Makes the parameters use the file of the machine's first rank, instead of this rank's."""
        folder, lengths = self.file.folder, self.file.lengths
        shared = MappedFile(os.dup(self._shared), folder, self._ranks, False, lengths)
        for param in params:
            if (own := region_of(param)) is not None:
                region = shared.region(own.offset, own.nbytes)
                place(param, region.tensor(param.dtype, param.shape, param.stride()), region)
        shared.close()


def _mark(modules: Iterable[nn.Module]) -> None:
    """Sets the attributes by which programs recognize parameters of `zero.Init`."""
    found: dict[int, Any] = {
        id(param): param
        for module in modules
        for param in module._parameters.values()
        if param is not None and region_of(param) is not None
    }
    for number, param in enumerate(found.values()):
        mark(param, number, param.shape, ZeroParamStatus.NOT_AVAILABLE)


def share_changes(params: Iterable[Tensor], modifier_rank: int) -> None:
    """Makes one rank's changes of parameters in mapped files visible on all ranks. Collective.

    Call it at the end of a `GatheredParameters` block with a `modifier_rank`, if the parameters
    belong to no engine. If the modifier is the first rank of the only machine, its changes are in
    the file already, and this function only waits for them. Parameters that are not in a file are
    ignored.

    Args:
        params: the parameters, the same on all ranks.
        modifier_rank: global rank whose values are used.
    """
    found = [(param, region) for param in params if (region := region_of(param)) is not None]
    if not found:
        return
    axis = world_axis()
    everywhere = found[0][1].file.ranks == axis.ranks
    for param, region in found if not everywhere or modifier_rank != axis.ranks[0] else ():
        own = param.detach().contiguous().clone()
        values = collectives.broadcast(own.to(collectives.device_of(axis)), axis, modifier_rank)
        if region.file.writes:
            with torch.no_grad():
                param.copy_(values)
    collectives.barrier(axis)
    for _, region in found:
        region.drop_pages()


def _create(folder: Path, paths: list[str]) -> tuple[int, str]:
    """Creates a temporary file; returns its descriptor and path, and adds the path to `paths`."""
    folder.mkdir(parents=True, exist_ok=True)
    fd, path = tempfile.mkstemp(prefix="threed-init-", dir=folder)
    paths.append(path)
    return fd, path


def _can_move(param: Any) -> bool:
    """Returns whether a parameter is a plain tensor in the CPU's memory, with at least one element."""
    return (
        isinstance(param, nn.Parameter)
        and not isinstance(param, UninitializedParameter)
        and not is_managed(param)
        and type(param.data) is Tensor
        and param.layout is torch.strided
        and param.device.type == "cpu"
        and not param.is_quantized
        and param.numel() > 0
    )


def _problems(
    groups: dict[str, Any],
    refused: dict[str, bool],
    mpu: Any,
    dtype: torch.dtype | None,
) -> Iterator[str]:
    """Yields a message for each argument of `Init` that is not supported."""
    for name, group in groups.items():
        if group is not None and group.size() != world_axis().size:
            yield f"zero.Init({name}=...): threed does not offer groups of some ranks: pass the group of all ranks"
    if mpu is not None and mpu.get_model_parallel_world_size() > 1:
        yield "zero.Init(mpu=...): threed does not offer model parallelism in zero.Init: build the model from threed.layers"
    instead = {
        "zero_quantized_weights": "set zero_optimization.zero_quantized_weights in the configuration"
    }
    for name, is_set in refused.items():
        if is_set:
            yield f"zero.Init({name}=...): threed does not offer it: {instead.get(name, 'omit it')}"
    if dtype not in (None, *DTYPES):
        yield f"zero.Init(dtype={dtype}): use torch.float16, torch.bfloat16 or torch.float32"


def _dtype_of(ds: dict[str, Any]) -> torch.dtype | None:
    """Returns the 16-bit dtype that a ds_config enables, or None."""
    names = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16}
    enabled = (dtype for name, dtype in names.items() if value_of(ds, f"{name}.enabled") is True)
    return next(enabled, None)


def _nvme_path(ds: dict[str, Any]) -> str | None:
    """Returns the folder on a drive to which a ds_config offloads parameters, or None."""
    offload = value_of(ds, "zero_optimization.offload_param")
    path: str | None = value_of(offload, "nvme_path")
    return path if value_of(offload, "device") == "nvme" else None
