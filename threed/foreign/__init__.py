"""Checkpoints of other programs that are pickles, read without running them: DeepSpeed's and Megatron's.

    files = outline([Path("mp_rank_00_model_states.pt")])       what is in them, tensors as places of the file
    kind = folders.kind_of(folder)                               None where it is neither's
    checkpoint = folders.open_source(folder, kind, config)       which `source.write_native` converts

`outline` has a process of its own, cut off from the rest, look at a pickle; here, nothing is ever unpickled.
"""
