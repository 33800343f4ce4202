"""Checkpoints: the native format, and conversion to and from Hugging Face folders, and from other programs'."""
