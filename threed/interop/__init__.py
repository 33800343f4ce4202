"""Formats and interfaces of other programs, on top of the rest of the package.

    convert.convert(src, dst)                 between native checkpoints and those of others
    pretrained.find(argv, defaults)           how a run begins from a Hugging Face folder
    huggingface                               their folders: read, written, loaded into an engine
    deepspeed                                 `threed.initialize`; DeepSpeed's configuration and checkpoints
    megatron                                  weights of Megatron-LM

All of them read checkpoints as `TensorSource`s (`threed.checkpoint.lazy_tensors`). A `native_writer.Source` also has the
model and the counters of the training, and `native_writer.write_native` writes a native checkpoint of it. Pickles are
read by `pickle_reader`, which executes nothing in them.

Nothing below imports this package, with one exception: `Engine.load` takes a Hugging Face folder in the place of a
checkpoint, by `huggingface.weights.load_hf`.
"""
