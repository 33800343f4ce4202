"""Finds and reads the file of `--preset` or `--config`, with its topologies.

    file = read("tiny", None, PRESETS)
    file.tables                            # {"train": {"steps": 200, …}, …}
    file.topologies["8"]                   # {"parallel": {"tp": 2}, "zero": {"stage": 1}}

A topology is a table with the values of keys for a run of N ranks:

    [topology.8]
    parallel.tp = 2
    zero.stage = 1
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from threed.config.schema import key_name
from threed.core.parse import ParseError, read_toml

PRESETS = Path(__file__).with_name("presets")
# The keys that a topology may set: all keys of these groups, and `train.micro-batch`. None of
# them changes the batches, the model or the optimizer, so a run may resume with another topology.
TOPOLOGY_GROUPS = ("parallel", "zero", "recompute")
Topologies = Mapping[str, Mapping[str, Mapping[str, Any]]]


def preset_names(presets: Path | None) -> list[str]:
    """Returns the names of all presets in a folder, sorted; none without a folder."""
    return [] if presets is None else sorted(path.stem for path in presets.glob("*.toml"))


@dataclass(frozen=True)
class ConfigFile:
    """The content of a preset or configuration file. Names and values of keys are not checked.

    Attributes:
        path: path of the file; None if the command line names no file, or if it does not exist.
        tables: values by group and key, without topologies.
        topologies: values of the valid tables [topology.N], by N, group and key.
        problems: problems of the file.
        complete: whether the whole file could be read.
    """

    path: Path | None = None
    tables: Mapping[str, Any] = field(default_factory=dict)
    topologies: Topologies = field(default_factory=dict)
    problems: Sequence[str] = ()
    complete: bool = True


def read(preset: str | None, path: str | None, presets: Path | None) -> ConfigFile:
    """Reads the TOML file that a command line names.

    Args:
        preset: the value of `--preset`; None without this flag.
        path: the value of `--config`; None without this flag.
        presets: folder with a TOML file per preset; None without presets.
    """
    source, problem = _find(preset, path, presets)
    if source is None:
        return ConfigFile(problems=[problem] if problem else (), complete=not problem)
    try:
        tables = read_toml(source)
    except ParseError as error:
        toml = source.suffix == ".toml"
        fix = "correct it there" if toml else "only TOML is read; convert the file to TOML"
        problem = str(ParseError(source, f"{error.reason}; {fix}"))
        return ConfigFile(source, problems=[problem], complete=False)
    topologies, problems = _read_topologies(tables.pop("topology", {}))
    return ConfigFile(source, tables, topologies, [f"{source}: {text}" for text in problems])


def _find(preset: str | None, path: str | None, presets: Path | None) -> tuple[Path | None, str]:
    """Returns the path of the file, or None if none is named or found; and a problem, or ""."""
    if preset is not None and path is not None:
        return None, "--preset and --config together: give one, and the differences as flags"
    names = ", ".join(preset_names(presets)) or "none"
    if path is not None:
        problem = _file_problem(path, names)
        return (None, f"--config {path}: {problem}") if problem else (Path(path).expanduser(), "")
    if preset is None:
        return None, ""
    if presets is None or preset not in preset_names(presets):
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


def _read_topologies(tables: Any) -> tuple[Topologies, list[str]]:
    """Checks the structure of all topologies of a file.

    Args:
        tables: the content of the table `topology`, as parsed.

    Returns:
        The valid topologies, {N: {group: {key: value}}}; and a list with a line for each invalid
        topology. The values of keys are not checked.
    """
    if not isinstance(tables, dict):
        return {}, ["topology is not a table; write [topology.8], for example"]
    found = {ranks: _topology_problem(ranks, groups) for ranks, groups in tables.items()}
    valid = {ranks: groups for ranks, groups in tables.items() if not found[ranks]}
    return valid, [f"topology.{ranks}: {problem}" for ranks, problem in found.items() if problem]


def _topology_problem(ranks: str, groups: Any) -> str:
    """Returns why a topology is invalid, or "" if it is valid."""
    if not (ranks.isdecimal() and ranks == str(int(ranks)) != "0" and isinstance(groups, dict)):
        return "not a table for a number of ranks; write [topology.8], for example"
    for group, keys in groups.items():
        if not isinstance(keys, dict):
            return f"{group} is outside any group; write group.key, such as parallel.tp"
        for key in map(key_name, keys):
            if group not in TOPOLOGY_GROUPS and (group, key) != ("train", "micro-batch"):
                why = (
                    f"{group}.{key} must not depend on the number of ranks; put it under [{group}]"
                )
                return f"{why} (a topology sets only {', '.join(TOPOLOGY_GROUPS)} and train.micro-batch)"
    return ""
