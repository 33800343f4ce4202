"""Lets a `Trainer` of transformers train again after its engine was destroyed.

`Trainer.train` calls `Accelerator.free_memory`, which destroys the engine of an earlier `train` or
`evaluate`. The Trainer still passes this engine to the training loop as `model_wrapped`, "the most
external model", and prepares no other engine; with DeepSpeed, the first backward then fails.

After a trial of `Trainer.hyperparameter_search`, only rank 0 destroys the engine. The other ranks do not
take part in the gather of the parameters, so a search on several ranks is refused.

With DeepSpeed, `Trainer.train` replaces the optimizer and the scheduler of `Trainer(optimizers=...)` by
those that `TrainingArguments` describe, without a message. `replaced_optimizers` reports it.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from threed.interop.deepspeed.module_methods import ModuleMethods
from threed.interop.deepspeed.names import not_offered
from threed.interop.deepspeed.ownership import owner

ATTRIBUTE = "model_wrapped"  # documented attribute of the Trainer


def _trainer_class() -> Any:
    """Returns the class `Trainer`; None if transformers is not in use."""
    return getattr(sys.modules.get("transformers.trainer"), "Trainer", None)


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
    trainer = _trainer_class()
    if trainer is not None and ATTRIBUTE not in vars(trainer):
        setattr(trainer, ATTRIBUTE, property(_model_wrapped, _set_model_wrapped))


def _calling_trainer() -> Any:
    """Returns the Trainer that called `initialize`, or None."""
    trainer = _trainer_class()
    frame: FrameType | None = sys._getframe(1)
    while trainer is not None and frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, trainer):
            return caller
        frame = frame.f_back
    return None


def refuse_search(ranks: int) -> None:
    """Raises NotImplementedError if a Trainer calls this function in a search on several ranks."""
    caller = _calling_trainer() if ranks > 1 else None
    if caller is not None and caller.hp_search_backend is not None:
        instead = "start the search on one rank, without torchrun, or train each trial by itself"
        what = "Trainer.hyperparameter_search on several ranks"
        raise NotImplementedError(not_offered(what, instead))


def replaced_optimizers() -> list[str]:
    """Returns a note if the calling Trainer was created with `optimizers`, which it has replaced."""
    callbacks = getattr(_calling_trainer(), "callback_handler", None)  # keeps the passed objects
    given = [getattr(callbacks, name, None) for name in ("optimizer", "lr_scheduler")]
    names = ", ".join(type(value).__name__ for value in given if value is not None)
    if not names:
        return []
    fix = "use TrainingArguments, or override Trainer.create_optimizer and create_scheduler"
    return [
        f"Trainer(optimizers=...): no effect ({names}): with DeepSpeed, the Trainer replaces them: {fix}"
    ]
