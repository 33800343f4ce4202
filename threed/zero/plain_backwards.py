"""Backwards of wrapped modules that the program starts by a plain `loss.backward()`."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from threed.zero.contributions import in_own_backward


class PlainBackwards:
    """Handles backwards that the program starts by `loss.backward()`, not by `engine.backward`.

    The first gradient of a parameter that such a backward computes begins a pass of the engine. The
    pass ends with the backward. With a reentrant activation checkpoint, this gradient may be
    computed in a nested backward, which ends before the program's backward. Therefore hooks on the
    outputs of the module, whose gradients are computed in the program's backward, register the
    callback that ends the pass.

    Args:
        module: the wrapped module.
        begins: method of the engine that is called when a pass begins.
        ended: method of the engine that is called when it has ended.

    Attributes:
        accepts: whether such backwards are allowed, because a step of the engine is in progress.
        running: whether a pass is in progress.
    """

    def __init__(
        self, module: nn.Module, begins: Callable[[], None], ended: Callable[[], None]
    ) -> None:
        self.module = module
        # weak, because parameters refer to this object, and the program may keep the module only
        self._begins, self._ended = weakref.WeakMethod(begins), weakref.WeakMethod(ended)
        self.accepts = self.running = False
        self._end: weakref.ref[Callable[[], None]] | None = None
        self._handle: RemovableHandle | None = None

    def allow(self, on: bool) -> None:
        """Sets `accepts`. A pass that an error has interrupted is dropped."""
        self.accepts, self.running, self._end = on, False, None
        if self._handle is not None:
            self._handle.remove()
        hook = _OutputHook(self, self.module) if on else None
        self._handle = None if hook is None else self.module.register_forward_hook(hook)

    @property
    def interrupted(self) -> bool:
        """Whether an error has ended the backward of the pass in progress."""
        return self.running and not self._ends

    @property
    def _ends(self) -> bool:
        """Whether autograd will call `leave`; it drops the callback if an error ends a backward."""
        return self._end is not None and self._end() is not None

    def expect_end(self) -> None:
        """Registers the end of the running backward, unless `engine.backward` has started it."""
        if self.accepts and not self._ends and not in_own_backward():
            end = functools.partial(PlainBackwards.leave, self)
            self._end = weakref.ref(end)
            torch.autograd.Variable._execution_engine.queue_callback(end)

    def enter(self) -> None:
        """Begins a pass in the running backward, unless one is in progress."""
        if not self.running:
            self.running = True  # if an error is raised here, the pass counts as interrupted
            if (begins := self._begins()) is not None:
                begins()
            self.expect_end()

    def leave(self) -> None:
        """Ends the pass in progress, at the end of the backward."""
        ran, self.running, self._end = self.running, False, None
        if ran and (ended := self._ended()) is not None:
            ended()


class _OutputHook:
    """The forward hook of a wrapped module. It does nothing for copies and unpickled modules.

    It does not keep the engine alive: autograd's hooks are not traversed by Python's garbage
    collector, and the program may keep an output.
    """

    module: nn.Module | None = None

    def __init__(self, plain: PlainBackwards, module: nn.Module) -> None:
        self.plain, self.module = weakref.ref(plain), module

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or module is not self.module:
            return
        for leaf in tree_leaves(output) if torch.is_grad_enabled() else ():
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(_expecting_end(self.plain))

    def __deepcopy__(self, memo: dict[int, Any]) -> _OutputHook:
        return _OutputHook.__new__(_OutputHook)

    def __getstate__(self) -> dict[str, Any]:
        return {}


def _expecting_end(plain: weakref.ref[PlainBackwards]) -> Callable[[Tensor], None]:
    def hook(grad: Tensor) -> None:
        if (alive := plain()) is not None:
            alive.expect_end()

    return hook
