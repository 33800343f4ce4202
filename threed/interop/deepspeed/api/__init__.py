"""The modules of DeepSpeed's API, one file each.

This package is internal.
"""

__all__: list[str] = []
