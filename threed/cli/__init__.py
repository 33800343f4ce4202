"""The command line: `threed train`, `plan`, `verify`, `convert`, `inspect`, `report` and the other commands.

This package is internal.
"""

__all__: list[str] = []
