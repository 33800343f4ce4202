"""The base class of the engine: an `nn.Module` whose methods act on the module that it wraps."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from threed.interop.deepspeed.names import REFUSED, Refused, not_offered, refusal

# Methods of nn.Module that are called on the wrapped module
ON_MODULE = (
    "add_module buffers children extra_repr get_buffer get_extra_state get_parameter get_submodule modules"
    " named_buffers named_children named_modules named_parameters parameters"
    " register_backward_hook register_buffer register_forward_hook register_forward_pre_hook"
    " register_full_backward_hook register_full_backward_pre_hook register_load_state_dict_post_hook"
    " register_load_state_dict_pre_hook register_module register_parameter register_state_dict_post_hook"
    " register_state_dict_pre_hook requires_grad_ set_extra_state set_submodule share_memory"
).split()  # fmt: skip
# (method of nn.Module, dtype or kind of device to which it converts)
CONVERSIONS: tuple[tuple[Any, ...], ...] = (
    ("half", torch.float16), ("bfloat16", torch.bfloat16), ("float", torch.float32), ("double", torch.float64),
    ("cpu", "cpu"), ("cuda", "cuda"), ("xpu", "xpu"), ("ipu", "ipu"), ("mtia", "mtia"), ("type",),
)  # fmt: skip
# docstrings of these methods
RESULT = """Returns the result of the module's method `{}`, or the engine instead of the module.

Args:
    args: arguments of the module's method.
    kwargs: keyword arguments of the module's method.
"""
CONVERTED = """Returns the engine if its module has the dtype and device; see `to` for all others.

Args:
    given: the dtype, or the index of the device.
"""


def _on_module(name: str) -> Callable[..., Any]:
    """Returns a method that calls the wrapped module's method; it returns the engine for the module."""

    def call(self: ModuleMethods, *args: Any, **kwargs: Any) -> Any:
        found = getattr(self.module, name)(*args, **kwargs)
        return self if found is self.module else found

    return _named(call, name, RESULT.format(name))


def _conversion(name: str, *to: Any) -> Callable[..., Any]:
    """Returns a method that checks a conversion, see `ModuleMethods.to`.

    Args:
        name: the name of the method.
        to: the dtype, or the kind of device; the argument of the method if missing.
    """

    def call(self: ModuleMethods, given: Any = None) -> Any:
        target = to[0] if to else given
        if isinstance(target, str):  # a kind of device; `given` may be an index
            target = torch.device(target if given is None else given)
        return self.to(target)

    return _named(call, name, CONVERTED)


def _named(call: Any, name: str, text: str) -> Callable[..., Any]:
    """Returns a function after setting its name and its docstring."""
    texts = {"__name__": name, "__qualname__": f"ModuleMethods.{name}", "__doc__": text}
    for key, value in texts.items():
        setattr(call, key, value)
    return call


def _same(device: torch.device, own: torch.device) -> bool:
    """Returns whether `device`, possibly without an index, is the device `own`."""
    return device.type == own.type and device.index in (None, own.index or 0)


class _Refusing(type):
    """The metaclass of the engines: attributes of the class that threed does not offer are refused."""

    def __getattr__(cls, name: str) -> Any:
        raise AttributeError(name if name.startswith("__") else refusal(f"{cls.__name__}.{name}"))


class ModuleMethods(nn.Module, metaclass=_Refusing):
    """An `nn.Module` whose methods act on the module that it wraps.

    The wrapped module is not a submodule, so that `named_parameters()` yields the module's own
    names, and hooks are registered on the module. Attributes that this class does not have are
    looked up in the module.

    Args:
        module: the wrapped module.

    Attributes:
        module: the wrapped module.
        forward: runs the module; has the signature of the module's `forward`.
        device: the device of the parameters.
        is_compiled: whether `compile` was called.
    """

    module: nn.Module
    device: torch.device

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        # set in `__dict__`, because nn.Module would register a submodule, and find it more slowly
        self.__dict__["module"] = module
        del self.__dict__["training"]  # so that the attribute is looked up in the module
        run = functools.partial(type(self).__call__, self)
        self.forward = functools.wraps(module.forward)(run)
        self.is_compiled = False
        self.__signature__ = inspect.signature(module.forward)

    def __getattr__(self, name: str) -> Any:
        module = self.__dict__.get("module")
        if module is None:
            raise AttributeError(name)
        try:
            return super().__getattr__(name)  # a value that the program has set
        except AttributeError:
            pass
        try:
            return getattr(module, name)
        except AttributeError:
            kind = type(module).__name__
        text = refusal(f"engine.{name}")
        if f"engine.{name}" not in REFUSED:
            text += f"; the module ({kind}) has no such attribute"
        raise AttributeError(text)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self.module)})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.module!r})"

    def train(self, mode: bool = True) -> Any:
        """Sets the training mode of the module; returns the engine.

        Args:
            mode: True for training, False for evaluation.
        """
        self.module.train(mode)
        return self

    def eval(self) -> Any:
        """Sets the module to evaluation mode; returns the engine."""
        return self.train(False)

    def compile(
        self,
        backend: str | Callable[..., Any] = "inductor",
        compile_kwargs: Mapping[str, Any] = MappingProxyType({}),
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compiles the module with `torch.compile`.

        Args:
            backend: the backend of `torch.compile`.
            compile_kwargs: other arguments of `torch.compile`.
            schedule: not supported.
            compiled_autograd_enabled: not supported.

        Raises:
            NotImplementedError: for an argument that is not supported.
        """
        if schedule is not None or compiled_autograd_enabled:
            what = "DeepCompile schedules and compiled autograd"
            raise NotImplementedError(not_offered(what, "use the default arguments"))
        self.module.compile(**{**compile_kwargs, "backend": backend})
        self.is_compiled = True

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the engine, if the module has the dtype and is on the device.

        Args:
            args: arguments of `nn.Module.to`.
            kwargs: keyword arguments of `nn.Module.to`.

        Raises:
            NotImplementedError: for another dtype or device than the module's.
        """
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        param = next((p for p in self.module.parameters() if p.is_floating_point()), None)
        if param is not None and dtype not in (None, param.dtype):
            fix = (
                "enable fp16 or bf16 in the configuration, or convert the module before initialize"
            )
            raise NotImplementedError(
                not_offered(f"a conversion of an engine's module to {dtype}", fix)
            )
        if device is not None and not _same(device, self.device):
            what = f"a move of an engine's module from {self.device} to {device}"
            fix = "offload by the configuration, or call engine.destroy() first"
            raise NotImplementedError(not_offered(what, fix))
        return self

    to_empty = Refused("engine.to_empty", "build the module on the meta device before initialize")
    state_dict = Refused(
        "engine.state_dict",
        "a rank may have slices only: use engine.full_state_dict(), or save_checkpoint()",
    )


for _name in ON_MODULE:
    setattr(ModuleMethods, _name, _on_module(_name))
for _name, *_to in CONVERSIONS:
    setattr(ModuleMethods, _name, _conversion(_name, *_to))
