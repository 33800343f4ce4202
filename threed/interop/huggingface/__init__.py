"""Reads and writes Hugging Face folders, and loads their weights into an engine.

This package is internal.
"""

__all__: list[str] = []
