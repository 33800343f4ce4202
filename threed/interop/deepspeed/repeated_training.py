"""Lets a `Trainer` of transformers train again after its engine was destroyed.

`Trainer.train` calls `Accelerator.free_memory`, which destroys the engine of an earlier `train` or
`evaluate`. The Trainer still passes this engine to the training loop as `model_wrapped`, "the most
external model", and prepares no other engine; with DeepSpeed, the first backward then fails.
"""

from __future__ import annotations

import sys
from typing import Any

from threed.interop.deepspeed.module_methods import ModuleMethods
from threed.interop.deepspeed.ownership import owner

ATTRIBUTE = "model_wrapped"  # documented attribute of the Trainer


def _model_wrapped(trainer: Any) -> Any:
    """The most external model: the model itself if the engine was destroyed."""
    if ATTRIBUTE not in vars(trainer):
        raise AttributeError(ATTRIBUTE)
    found = vars(trainer)[ATTRIBUTE]
    destroyed = isinstance(found, ModuleMethods) and owner(found.module) is not found
    return found.module if destroyed else found


def _set_model_wrapped(trainer: Any, model: Any) -> None:
    vars(trainer)[ATTRIBUTE] = model


def release_trainers() -> None:
    """Makes `Trainer.model_wrapped` the model instead of an engine that was destroyed.

    Has no effect if transformers is not in use, and on a second call.
    """
    trainer = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    if trainer is not None and ATTRIBUTE not in vars(trainer):
        setattr(trainer, ATTRIBUTE, property(_model_wrapped, _set_model_wrapped))
