"""Checkpoints: the native format, and conversion to Hugging Face layouts."""
