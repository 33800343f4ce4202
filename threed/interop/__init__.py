"""Checkpoint formats and APIs of other programs.

    convert.convert(src, dst)      converts checkpoints between the native format and other formats
    pretrained.find(config)        configures a run that starts from a Hugging Face folder
    loading.load(path)             builds an engine from a run, checkpoint or Hugging Face folder
    safetensors_folder             writes and reads weights under their own names, for custom models
    huggingface                    reads and writes Hugging Face folders; loads them into an engine
    deepspeed                      `threed.initialize`, DeepSpeed's configuration and checkpoints
    megatron                       reads the weights of Megatron-LM checkpoints
    pickles                        reads pickled files without executing any code in them

Every reader provides a `TensorSource` (`threed.checkpoint.lazy_tensors`). A
`huggingface.native_writer.Source` is a `TensorSource` with a model configuration and training
counters; `write_native` in the same module writes such a source as a native checkpoint.

Packages that the engine is built from do not import this package. The engine does, because
`Engine.load` also loads Hugging Face folders (`huggingface.weights.load_hf`).
"""
