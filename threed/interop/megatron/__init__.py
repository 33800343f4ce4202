"""Checkpoints of Megatron-LM: the weights of its `torch_dist` folders."""
