"""Backwards of wrapped modules that the program starts by a plain `loss.backward()`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from threed.zero.contributions import in_own_backward


class PlainBackwards:
    """Detects backwards that the program starts by `loss.backward()`, not by `engine.backward`.

    These backwards are called plain. When a plain backward computes its first gradient, `begins` is
    called, so that the engine can prepare for the gradients. When the backward ends, `ended` is
    called. The time between the two calls is a pass.

    Args:
        begins: called without arguments when a pass begins.
        ended: called without arguments when a pass has ended.

    Attributes:
        accepts: whether plain backwards are allowed; true from `engine.begin()` to the end of the
            step.
        running: whether a pass is in progress.
    """

    def __init__(self, begins: Callable[[], None], ended: Callable[[], None]) -> None:
        self._begins, self._ended = begins, ended
        self.accepts = self.running = False

    def allow(self, on: bool) -> None:
        """Sets `accepts`. A pass that an error has interrupted is dropped."""
        self.accepts, self.running = on, False

    def watch(self, module: nn.Module) -> None:
        """Has a pass begin when a gradient of one of the module's outputs is computed.

        Otherwise it would begin at the first gradient of a parameter. With a reentrant activation
        checkpoint, this is in a nested backward, which ends before the program's backward.
        """
        _OutputHook(self, module)

    def enter(self, *_: Any) -> None:
        """Begins a pass in the running backward, unless `engine.backward` has started it."""
        if in_own_backward() or self.running or not self.accepts:
            return
        self._begins()
        self.running = True
        torch.autograd.Variable._execution_engine.queue_callback(self._leave)

    def _leave(self) -> None:
        self.running = False
        self._ended()


class _OutputHook:
    """The forward hook of a wrapped module. It does nothing for copies and unpickled modules."""

    module: nn.Module | None = None

    def __init__(self, plain: PlainBackwards, module: nn.Module) -> None:
        self.plain, self.module = plain, module
        module.register_forward_hook(self.after)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or module is not self.module:
            return
        for leaf in tree_leaves(output) if self.plain.accepts and torch.is_grad_enabled() else ():
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(self.plain.enter)

    def __deepcopy__(self, memo: dict[int, Any]) -> _OutputHook:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {}
