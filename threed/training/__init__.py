"""Callbacks of the training loop: logging, evaluation, checkpoints, profiles and skipped steps.

`Callback` is the base class of the callbacks that a program passes to `threed.Trainer`. The rest of
this package is internal.
"""

from threed.training.callback import Callback, Run

__all__ = ["Callback", "Run"]
