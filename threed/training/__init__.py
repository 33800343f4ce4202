"""What surrounds an optimizer step in a run: callbacks for logging, evaluation, checkpoints and profiles."""

from threed.training.callback import Callback, Run, Start

__all__ = ["Callback", "Run", "Start"]
