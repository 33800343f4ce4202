"""Saves and loads checkpoints in the native format, and copies of the state in memory."""
