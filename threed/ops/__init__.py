"""Operators: each has a readable reference implementation and, where one exists, a fast kernel.

This package is internal.
"""

__all__: list[str] = []
