"""Small functions of deepspeed.utils and its neighbors."""

from __future__ import annotations

import argparse
import logging
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion
from torch.utils._pytree import tree_map_only

from threed.distributed import topology
from threed.interop.deepspeed.data import repeat

logger = logging.getLogger("DeepSpeed")
DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"
__version_major__, __version_minor__, __version_patch__ = 0, 19, 8
torch_info = {
    "version": ".".join(torch.__version__.split(".")[:2]),
    "bf16_support": True,
    "cuda_version": torch.version.cuda or "0.0",
    "nccl_version": "0.0",
    "hip_version": torch.version.hip or "0.0",
}


# ------------------------------------------------------------------------------------------------------------ logging


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Logs a message on some ranks.

    Args:
        message: the message.
        ranks: the ranks that log it; None, an empty list, or [-1] means all ranks.
        level: level of the `logging` module.
    """
    rank = topology.everyone().index
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)


def set_log_level_from_string(level: str, custom_logger: logging.Logger | None = None) -> None:
    """Sets the level of DeepSpeed's logger, or of `custom_logger`, such as "warning"."""
    (custom_logger or logger).setLevel(level.upper())


def see_memory_usage(message: str, force: bool = False, ranks: Sequence[int] | None = None) -> None:
    """Logs a message with the peak memory of the device, if `force` is True.

    Args:
        message: the message.
        force: whether to log.
        ranks: see `log_dist`.
    """
    if not force:
        return
    device = topology.default_device()
    if device.type == "cpu":
        log_dist(message, ranks)
        return
    module = torch.get_device_module(device)
    used, peak = (n / 2**30 for n in (module.memory_allocated(), module.max_memory_allocated()))
    log_dist(f"{message}: {used:.2f} GiB allocated, peak {peak:.2f} GiB", ranks)


# ---------------------------------------------------------------------------------------------------------- arguments


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the arguments `--deepspeed` and `--deepspeed_config` to a parser, and returns it."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    for name, prefix in (("deepspeed", ""), ("deepscale", "deprecated spelling: ")):
        flag = f"{prefix}a flag for the program, which the engine does not read"
        group.add_argument(f"--{name}", default=False, action="store_true", help=flag)
        path = f"{prefix}path of a ds_config.json"
        group.add_argument(f"--{name}_config", default=None, type=str, help=path)
    return parser


def required_torch_version(
    min_version: str | float | None = None, max_version: str | float | None = None
) -> bool:
    """Returns whether torch's version is in a range.

    Args:
        min_version: the lowest version, such as 2.1; None means no limit.
        max_version: the highest version; None means no limit.
    """
    have = TorchVersion(torch.__version__.partition("+")[0])
    low = min_version is None or have >= str(min_version)
    return low and (max_version is None or have <= str(max_version))


# ------------------------------------------------------------------------------------------------- tensors and devices


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Returns a copy of nested lists, tuples and dicts, with copies of their tensors on a device.

    A copy of a view has a storage of its size, so that `torch.save` writes no other values.

    Args:
        item: a tensor, or lists, tuples and dicts with tensors; other values are kept.
        device: the device of the copies.
    """
    return tree_map_only(Tensor, lambda values: values.detach().to(device, copy=True), item)


def move_to_device(item: Any, device: torch.device | str, criterion_func: Any = None) -> Any:
    """Returns nested lists, tuples and dicts with their tensors on a device.

    Args:
        item: a tensor, or containers with tensors.
        device: the device.
        criterion_func: function from a tensor to whether it is moved; None moves all.
    """

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device) if criterion_func is None or criterion_func(tensor) else tensor

    return tree_map_only(Tensor, move, item)


def set_random_seed(seed: int) -> None:
    """Seeds Python's, numpy's (if it is imported) and torch's generators."""
    random.seed(seed)
    torch.manual_seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


def instrument_w_nvtx(func: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function unchanged; `torch.profiler` shows the engine's phases."""
    return func


class OnDevice:
    """Context manager in which modules are created on a device, with a dtype.

    Args:
        dtype: dtype of new floating-point tensors.
        device: device of new tensors, such as "meta".
        enabled: if False, the block has no effect.
    """

    def __init__(
        self, dtype: torch.dtype, device: torch.device | str = "meta", enabled: bool = True
    ) -> None:
        self._dtype, self._device, self._enabled = dtype, torch.device(device), enabled
        self._before = torch.get_default_dtype()

    def __enter__(self) -> None:
        if self._enabled:
            self._before = torch.get_default_dtype()
            torch.set_default_dtype(self._dtype)
            self._device.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._enabled:
            self._device.__exit__(*error)
            torch.set_default_dtype(self._before)


class RepeatingLoader:
    """Repeats a loader without end.

    Args:
        loader: an iterable, such as a DataLoader, that can be iterated several times.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = repeat(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __next__(self) -> Any:
        return next(self.data_iter)


# -------------------------------------------------------------------------------------------------------- leaf modules


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Marks the modules of some classes, and returns them.

    The mark has no effect on training, because threed gathers each parameter on use.

    Args:
        model: the module to search.
        leaf_module_classes: classes, or names of classes.
        raise_if_not_found: whether to raise an error if there is no such module.

    Raises:
        ValueError: if there is no such module.
    """
    return _mark(_of_classes(model, leaf_module_classes, raise_if_not_found), True)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Removes the marks of the modules of some classes, and returns them.

    Args:
        model: the module to search.
        leaf_module_classes: classes, or names of classes.
        raise_if_not_found: whether to raise an error if there is no such module.

    Raises:
        ValueError: if there is no such module.
    """
    return _mark(_of_classes(model, leaf_module_classes, raise_if_not_found), False)


def set_z3_leaf_modules_by_name(
    model: nn.Module,
    module_names: Sequence[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Marks modules with some names; returns the modules and the missing names.

    Args:
        model: the module to search.
        module_names: names as in `model.named_modules()`.
        flag: whether to set the marks, or to remove them.
        raise_if_not_found: whether to raise an error if a name is missing.

    Raises:
        ValueError: if a name is missing.
    """
    return _marked(model, module_names, str.__eq__, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:  # fmt: skip
    """Marks modules whose names have some suffixes; returns them, and suffixes without a module.

    Args:
        model: the module to search.
        module_name_suffixes: ends of names in `model.named_modules()`.
        flag: whether to set the marks, or to remove them.
        raise_if_not_found: whether to raise an error if a suffix has no module.

    Raises:
        ValueError: if a suffix has no module.
    """
    return _marked(model, module_name_suffixes, str.endswith, flag, raise_if_not_found)


def z3_leaf_module(model: nn.Module) -> bool:
    """Returns whether a module is marked as a leaf module."""
    return bool(getattr(model, "_z3_leaf", False))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Returns the modules in `model` that are marked as leaf modules."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def _of_classes(model: nn.Module, kinds: Sequence[type | str], required: bool) -> list[nn.Module]:
    def is_of(module: nn.Module, kind: type | str) -> bool:
        own = type(module)
        names = {own.__name__, f"{own.__module__}.{own.__qualname__}"}
        return isinstance(module, kind) if isinstance(kind, type) else kind in names

    found = [m for m in model.modules() if any(is_of(m, kind) for kind in kinds)]
    _check_found([] if found else kinds, model, required)
    return found


def _mark(modules: list[nn.Module], flag: bool) -> list[nn.Module]:
    for module in modules:
        module.__dict__["_z3_leaf"] = flag  # the name that DeepSpeed and programs use
    return modules


def _marked(
    model: nn.Module, keys: Sequence[str], matches: Callable[[str, str], bool], flag: bool,
    required: bool,
) -> tuple[list[nn.Module], list[str]]:  # fmt: skip
    known = dict(model.named_modules())
    missing = [key for key in keys if not any(matches(name, key) for name in known)]
    _check_found(missing, model, required)
    found = [m for name, m in known.items() if any(matches(name, key) for key in keys)]
    return _mark(found, flag), missing


def _check_found(missing: Sequence[type | str], model: nn.Module, required: bool) -> None:
    if missing and required:
        raise ValueError(f"no modules {[*missing]} in a {type(model).__name__}")


# ------------------------------------------------------------------------------------------------------------- experts


def has_moe_layers(module: nn.Module) -> tuple[bool, int]:
    """Returns (False, 0), because no module has experts of `deepspeed.moe`."""
    return False, 0


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Any, max_group_size: float | None = None
) -> list[dict[str, Any]]:
    """Returns the parameter groups unchanged, because no module has experts of `deepspeed.moe`.

    Args:
        param_groups: one parameter group, or a sequence of them.
        max_group_size: no effect.
    """
    return [param_groups] if isinstance(param_groups, dict) else list(param_groups)
