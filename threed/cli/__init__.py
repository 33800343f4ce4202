"""The command line: `threed train`, `plan`, `verify`, `convert`, `inspect`, `report` and the other commands."""
