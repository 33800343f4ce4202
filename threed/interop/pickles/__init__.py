"""Reads pickled checkpoint files without executing any code in them.

This package is internal.
"""

__all__: list[str] = []
