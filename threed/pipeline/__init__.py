"""Pipeline parallelism: stages of layers, and an executor that runs the plan of a rank.

This package is internal.
"""

__all__: list[str] = []
