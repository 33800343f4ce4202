"""Finds and reads the file of `--preset` or `--config`.

source, problem = find("tiny", None, PRESETS)       # (the path of tiny.toml, "")
tables = read(source)                               # {"train": {"steps": 200, …}, …}
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from threed.core.parse import ParseError, read_toml

PRESETS = Path(__file__).with_name("presets")


def preset_names(presets: Path) -> list[str]:
    """Returns the names of all presets in a folder, sorted."""
    return sorted(path.stem for path in presets.glob("*.toml"))


def find(preset: str | None, path: str | None, presets: Path) -> tuple[Path | None, str]:
    """Returns the TOML file that a command line names, and a problem.

    Args:
        preset: the value of `--preset`; None without this flag.
        path: the value of `--config`; None without this flag.
        presets: folder with a TOML file per preset.

    Returns:
        The path, or None if no file is named or if there is a problem; and the problem, or "".
    """
    if preset is not None and path is not None:
        return None, "--preset and --config together: give one, and the differences as flags"
    names = ", ".join(preset_names(presets)) or "none"
    if path is not None:
        problem = _file_problem(path, names)
        return (None, f"--config {path}: {problem}") if problem else (Path(path).expanduser(), "")
    if preset is None:
        return None, ""
    if preset not in preset_names(presets):
        return None, f"--preset {preset}: no such preset; there are {names}"
    return presets / f"{preset}.toml", ""


def _file_problem(path: str, names: str) -> str:
    """Returns why a path is not a configuration file, or "".

    Args:
        path: the value of `--config`.
        names: names of the presets, for the message.
    """
    file = Path(path).expanduser()
    run = file / "config.toml"
    if file.is_file():
        return ""
    if not path or not file.exists():
        return f"no such file; presets are named with --preset ({names})"
    if run.is_file():
        return f"is a folder; did you mean {run}?"
    if file.is_dir():
        return "is a folder; give the path of a TOML file"
    # A pipe can be read only once, but every rank reads the file.
    return "is not a regular file; write the configuration to a TOML file, and give its path"


def read(file: Path) -> dict[str, Any]:
    """Returns the tables of a configuration file.

    Raises:
        ParseError: if the file is not readable, too large, or not TOML.
    """
    try:
        return read_toml(file)
    except ParseError as error:
        toml = file.suffix == ".toml"
        fix = "correct it there" if toml else "only TOML is read; convert the file to TOML"
        raise ParseError(file, f"{error.reason}; {fix}") from None
