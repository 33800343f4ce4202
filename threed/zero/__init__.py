"""ZeRO: flat buffers of parameters, gradient reduction, and an optimizer sharded over ranks.

This package is internal.
"""

__all__: list[str] = []
