"""ZeRO: flat parameter buffers, gradient reduction, and an optimizer that is sharded over ranks.

This package is internal.
"""

__all__: list[str] = []
