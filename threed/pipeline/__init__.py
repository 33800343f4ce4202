"""Pipeline parallelism: stages of layers, and an executor that runs a rank's part of a plan.

This package is internal.
"""

__all__: list[str] = []
