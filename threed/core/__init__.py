"""Basic services: devices, random numbers, files, processes, and the native libraries.

This package is internal.
"""

__all__: list[str] = []
