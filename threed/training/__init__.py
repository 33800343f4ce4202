"""Callbacks of the training loop: logging, evaluation, checkpoints, profiles and skipped steps."""

from threed.training.callback import Callback, Run, Start

__all__ = ["Callback", "Run", "Start"]
