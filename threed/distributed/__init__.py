"""Ranks and their communication: the grid and its process groups, collectives, and how parameters are sharded.

This package is internal.
"""

__all__: list[str] = []
