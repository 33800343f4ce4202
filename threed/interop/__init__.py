"""Checkpoint formats and APIs of other programs.

    convert.convert(src, dst)      converts checkpoints between the native format and other formats
    pretrained.find(config)        configures a run that starts from a Hugging Face folder
    huggingface                    reads and writes Hugging Face folders; loads them into an engine
    deepspeed                      `threed.initialize`, DeepSpeed's configuration and checkpoints
    megatron                       reads the weights of Megatron-LM checkpoints

Every reader provides a `TensorSource` (`threed.checkpoint.lazy_tensors`). A `native_writer.Source`
adds the model configuration and the training counters; `native_writer.write_native` writes it as a
native checkpoint. `pickle_reader` reads pickles without executing anything in them.

Lower-level packages do not import this package, with one exception: `Engine.load` calls
`huggingface.weights.load_hf` when it is given a Hugging Face folder.
"""
