"""Saves, loads, inspects and converts checkpoints.

    checkpoint.save(engine, "runs/tiny/checkpoints/step-200")          collective
    engine = checkpoint.load("runs/tiny", threed.Topology(tp=2))       collective; in any topology
    print(checkpoint.inspect("runs/tiny/checkpoints/step-200"))        checks all hashes
    tensors = checkpoint.weights("runs/tiny")                          read on demand
    checkpoint.convert("runs/tiny/checkpoints/step-200", "tiny-hf")    to a Hugging Face folder

The functions are defined in `threed.interop`, because they also handle the formats of other
programs; this package imports them on first use. The modules of this package are internal. They
implement the native format, its readers and writers, and copies of the training state in memory.
"""

from threed.core.exports import lazy

TYPE_CHECKING = False
__all__ = ["save", "load", "inspect", "CheckpointInfo", "weights", "convert", "CheckpointError"]

if TYPE_CHECKING:
    from threed.checkpoint.files import CheckpointError
    from threed.interop.convert import convert
    from threed.interop.inspection import CheckpointInfo, inspect
    from threed.interop.loading import load, save, weights
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "save": "threed.interop.loading",
            "load": "threed.interop.loading",
            "inspect": "threed.interop.inspection",
            "CheckpointInfo": "threed.interop.inspection",
            "weights": "threed.interop.loading",
            "convert": "threed.interop.convert",
            "CheckpointError": "threed.checkpoint.files",
        },
    )
