"""Checkpoint formats and APIs of other programs.

    engine, optimizer, loader, scheduler = threed.interop.initialize(model=model, config="ds.json")
    engine.train_batch(iterator)

`initialize` (also `threed.initialize`) has the interface of `deepspeed.initialize`. `block_pattern`
reads the key `sparse_attention` of a ds_config. `threed.load`
and `threed.checkpoint.convert` read Hugging Face folders. `threed.checkpoint.convert` also reads
the checkpoints of DeepSpeed and Megatron-LM. `threed.from_transformers` returns a model for
`threed.Engine` with the weights of a model of `transformers`.

The modules of this package are internal:

    convert            converts checkpoints between the native format and other formats
    safetensors_folder exports custom models as safetensors files
    inspection         describes a checkpoint or a Hugging Face folder
    loading            builds an engine from a run, checkpoint or Hugging Face folder
    pretrained         configures a run that starts from a Hugging Face folder
    huggingface        reads and writes Hugging Face folders; loads them into an engine; builds
                       models of pipeline layers from models of transformers (`from_transformers`)
    deepspeed          the API, configuration and checkpoints of DeepSpeed
    megatron           reads the weights of Megatron-LM checkpoints
    pickles            reads pickled files without executing any code in them

Every reader of checkpoints provides a `TensorSource` (`threed.checkpoint.lazy_tensors`). A
`huggingface.native_writer.Source` is a `TensorSource` with a model configuration and training
counters. The function `write_native` in the same module writes a `Source` as a native checkpoint.

`threed.engine` imports this package, because `Engine.load` also loads Hugging Face folders
(`huggingface.weights.load_hf`). The packages on which the engine is built do not import this
package.
"""

from threed.core.exports import lazy

TYPE_CHECKING = False
__all__ = ["initialize", "DeepSpeedEngine", "block_pattern"]

if TYPE_CHECKING:
    from threed.interop.deepspeed.config.sparse_attention import block_pattern
    from threed.interop.deepspeed.engine import DeepSpeedEngine
    from threed.interop.deepspeed.initialization import initialize
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "initialize": "threed.interop.deepspeed.initialization",
            "DeepSpeedEngine": "threed.interop.deepspeed.engine",
            "block_pattern": "threed.interop.deepspeed.config.sparse_attention",
        },
    )
