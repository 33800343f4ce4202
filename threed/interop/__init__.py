"""Formats and interfaces of other programs, on top of the rest of the package.

    convert.convert(src, dst)                 between native checkpoints and those of others
    pretrained.find(argv, defaults)           how a run begins from a Hugging Face folder
    huggingface                               their folders: read, written, loaded into an engine
    deepspeed                                 `threed.initialize`; DeepSpeed's configuration and checkpoints
    megatron                                  weights of Megatron-LM

`source.Source` is what a checkpoint of another program has to offer, and `source.write_native` makes a native one of it.
Pickles are read by `pickle_reader`, which executes nothing in them; `lazy_tensors` puts tensors together from pieces
of files.

Nothing below imports this package, with one exception: `Engine.load` takes a Hugging Face folder in the place of a
checkpoint, by `huggingface.weights.load_hf`.
"""
