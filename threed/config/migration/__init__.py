"""Flags and keys of other frameworks: the keys of threed that replace them.

`megatron_flags` has the table of Megatron-LM's flags, which `megatron` translates into flags of
threed. `other_names` has the names of DeepSpeed and of Hugging Face's Trainer. This package is
internal.
"""

__all__: list[str] = []
