"""Reads the weights of Megatron-LM's `torch_dist` checkpoints.

This package is internal.
"""

__all__: list[str] = []
