"""Reads the weights of Megatron-LM's `torch_dist` checkpoints."""
