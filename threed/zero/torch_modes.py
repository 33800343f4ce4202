"""Torch modes and transforms that may be active when user code causes a gather."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

_SELECTIVE = (_CachedTorchDispatchMode, _CachingTorchDispatchMode)


def compiles() -> bool:
    """Returns whether the process has compiled a function or module with torch.compile."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    backends = {} if frames is None else vars(frames).get("cached_backends", {})
    return any(backend is not None for backend in backends.values())


def without_transforms() -> AbstractContextManager[Any]:
    """Returns a context that suspends inference mode and `torch.func` transforms, if active.

    Gathers run in this context, so that gathered buffers are ordinary tensors.
    """
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    inferring = torch.is_inference_mode_enabled()
    if not (transformed or inferring):
        return nullcontext()
    stack = ExitStack()
    if transformed:
        stack.enter_context(torch._C._DisableFuncTorch())
    if inferring:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
    return stack


def hide_from_checkpointing() -> AbstractContextManager[Any]:
    """Returns a context that hides gathers from selective activation checkpointing.

    Selective checkpointing requires that the recomputation runs exactly the operations of the
    forward. But a gather may run in only one of the two, because in the other one the parameters
    may be gathered already.
    """
    modes = _get_current_dispatch_mode_stack() if torch._C._len_torch_dispatch_stack() else ()
    selective = any(isinstance(mode, _SELECTIVE) for mode in modes)
    return _disable_current_modes() if selective else nullcontext()
