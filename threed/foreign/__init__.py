"""Checkpoints of DeepSpeed and Megatron-LM, which are pickles, read without executing them.

state = PickleReader().torch_file(Path("mp_rank_00_model_states.pt"))    values; tensors stay in the file
kind = folders.kind_of(folder)                               None if it is neither's
checkpoint = folders.open_source(folder, kind, config)       which `source.write_native` converts
"""
