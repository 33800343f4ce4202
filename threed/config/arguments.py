"""Reads the command line and TOML files into a `Config`, and writes TOML.

    config, options = load(sys.argv[1:])                    # checks each key
    config, options = load(sys.argv[1:], world_size=8)      # also checks combinations of keys

`threed.config.checks` finds invalid combinations. Values come from three sources: the program's
defaults, the preset or TOML file, and the flags. Each source overrides the previous ones. argparse
splits the command line, a `_Draft` keeps every value with its source, and pydantic validates all
values at once.

The file may have topologies, tables with the values of keys for a run of N ranks:

    [topology.8]
    parallel.tp = 2
    zero.stage = 1
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from threed.config.checks import find_problems, find_unused
from threed.config.flags import PRESETS as PRESETS
from threed.config.flags import Missing, add_flags, flag_of, help_text, preset_names
from threed.config.groups import GROUPS as GROUPS
from threed.config.groups import Config, ConfigError, key_name, python_name
from threed.config.renames import Renames
from threed.config.schema import (
    ErrorDetails,
    ValidationError,
    reason,
    written,
)
from threed.config.suggestions import suggest
from threed.config.topologies import choose_sizes
from threed.config.values import MOST_RANKS
from threed.core.messages import counted, did_you_mean
from threed.core.parse import ParseError, plain, read_toml
from threed.core.source import find_model, names_model

DEFAULTS = Config()
# Sources of values in `_Draft.sources`. For a configuration file, the source is the file's path.
PROGRAM, FLAG = "the program's defaults", ""
_OWN = ("seq", "dropout", "tokenizer")  # keys that a folder of pretrained weights does not override
Groups = Mapping[str, Mapping[str, Any]]
# The keys that a topology may set: all keys of these groups, and `train.micro-batch`. None of
# them changes the batches, the model or the optimizer, so a run may resume with another topology.
TOPOLOGY_GROUPS = ("parallel", "zero", "recompute")
Topologies = Mapping[str, Mapping[str, Mapping[str, Any]]]


@dataclass(frozen=True)
class Options:
    """Options of the program that are not part of the configuration.

    Attributes:
        dry_run: whether to check the configuration and print a report, but not train.
        world_size: the value of `--world-size`; None without this flag.
        gpu: the value of `--gpu`, the GPU that a dry run assumes; None without this flag.
        help: the text of `--help` if it was given, otherwise empty.
        flags: keys that were given as flags, as `group.field`.
        pretrained: whether the run starts from a folder of pretrained weights that defines the
            model.
        notes: a line per renamed key in use, with the old and the new spelling.
        notice: lines for the user if the preset or file has topologies, but none for the number of
            ranks, or if several pipeline ranks were chosen (`choose_sizes`); otherwise empty.
    """

    dry_run: bool = False
    world_size: int | None = None
    gpu: str | None = None
    help: str = ""
    flags: frozenset[str] = frozenset()
    pretrained: bool = False
    notes: tuple[str, ...] = ()
    notice: str = ""


def load(
    argv: list[str],
    *,
    prog: str = "",
    about: str = "",
    defaults: Groups | None = None,
    presets: Path | None = PRESETS,
    begin: Callable[[Config], Groups] = lambda config: {},
    world_size: int | None = None,
    local_world: int | None = None,
    machines: tuple[int, int] | None = None,
    choose_topology: bool = False,
    more: Callable[[Config], Iterable[str]] = lambda config: (),
    renames: Renames = Renames(),  # noqa: B008  # frozen
) -> tuple[Config, Options]:
    """Reads the command line, and checks the configuration.

    Args:
        argv: command line without the program's name.
        prog, about: see `help_text`.
        defaults: the program's defaults, {group: {key: value}}.
        presets: folder with a TOML file per preset; None for a custom program without presets.
        begin: function that returns the values of the folder of pretrained weights that the run
            starts from, or {} without such a folder. These values override the preset or file,
            except `seq`, `dropout` and `tokenizer`. A flag that contradicts the folder's model is a
            problem. May raise ConfigError.
        world_size: number of ranks, unless `--world-size` is given. It selects the table
            [topology.N] of the preset or file. If None, combinations of keys are not checked.
        local_world: number of ranks on this machine.
        machines: minimum and maximum number of machines of an elastic job; None for other jobs.
        choose_topology: whether to choose `parallel.pp` if the configuration gives no parallel
            size, and the global batch cannot be divided evenly over all ranks (`choose_sizes`).
        more: function that returns further problems. It is called with the configuration if all
            values are valid.
        renames: renamed and removed keys.

    Returns:
        The configuration and the program's options. With `--help`, only the defaults are read.

    Raises:
        ConfigError: if there are problems; the message lists all of them.
    """
    draft = _Draft(renames)
    for group, keys in (defaults or {}).items():
        for key, value in keys.items():
            draft.put(group, key, value, PROGRAM)
    if "--help" in argv or "-h" in argv:
        config = draft.validate()
        return config, Options(help=help_text(config, prog, about=about, custom=presets is None))
    given = draft.split(argv)
    source = draft.read_file(given, presets)
    asked = draft.world_size(given)
    # An elastic job uses the topology of its maximum size, so that it has the same topology at
    # every size.
    most = (local_world or 1) * machines[1] if machines and not asked else asked or world_size
    notice = draft.put_topology(source, most)
    draft.put_flags(given)
    draft.reset_long_warmup({PROGRAM, *([str(source)] if "preset" in given else [])})
    config = draft.validate()
    found = {} if draft.problems else begin(config)
    config = draft.begin(found, config)
    draft.find_custom_model(config)
    chooses = choose_topology and machines is None and ("parallel", "pp") not in draft.sources
    if chooses and (ranks := asked or world_size):
        config, why = choose_sizes(config, ranks)
        notice = "\n".join(filter(None, (notice, why)))
    flags = frozenset(map(renames.current_name, given))
    options = Options(
        "dry_run" in flags, asked, given.get("gpu"), "", flags, "model" in found, tuple(dict.fromkeys(draft.notes)), notice
    )  # fmt: skip
    problems = list(draft.problems)
    if world_size is not None and draft.complete:
        here = (None, None) if asked else (local_world, machines)
        combined = find_problems(config, asked or world_size, *here)
        combined += find_unused(config.optim, flags)
        problems += [text for text in combined if not draft.is_consequence(text)]
    problems += [] if draft.problems else more(config)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return config, options


@dataclass
class _Draft:
    """Collects values from all sources before they are validated.

    Attributes:
        renames: renamed and removed keys.
        values: values by group and field.
        sources: source of each value, by (group, field).
        spellings: each key as the user wrote it, by (group, field).
        notes: a line per renamed key in use, with the old and the new spelling.
        topologies: values of the tables [topology.N] of the preset or file, by N, group and key.
        problems: problems found so far.
        suspects: flags with an invalid value, misspelled flags, and the flags that the user may
            have meant by them. An invalid combination with a suspect flag is not reported, because
            it may only be a consequence of the problem with this flag.
        complete: whether all sources could be read.
    """

    renames: Renames
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    sources: dict[tuple[str, str], str] = field(default_factory=dict)
    spellings: dict[tuple[str, str], str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    topologies: Topologies = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    suspects: set[str] = field(default_factory=set)
    complete: bool = True

    def put(self, group: str, key: str, value: Any, source: str = FLAG) -> None:
        """Sets a value, which overrides the value of an earlier source.

        The old spelling of a renamed key sets the new key. A removed key is a problem. It is also a
        problem if one source has two spellings of a key with different values.
        """
        given, now = flag_of(group, key), self.renames.current(group, key, value)
        if instead := self.renames.removed.get(given.removeprefix("--")):
            self.problems.append(f"{given}{_in(source)}: was removed; {instead}")
            return
        place, values = (now.group, now.key), self.values.setdefault(now.group, {})
        before = self.spellings.get(place, given)
        if before != given and self.sources[place] == source and values[now.key] != now.value:
            both = f"{before} {written(values[now.key])} and {given} {written(value)}"
            self.problems.append(f"{both}{_in(source)}: two spellings of one key; keep one")
        if now.note:
            self.notes.append(f"{now.note}{_in(source)}")
        values[now.key] = now.value
        self.sources[place], self.spellings[place] = source, given

    def find_custom_model(self, config: Config) -> None:
        """Imports the file of `--model.arch FILE.py:NAME`; records a problem if this fails.

        It is also a problem if only a checkpoint names the file, because a checkpoint alone must
        not make code run. A flag, a configuration file or the program must name the file, too.
        """
        arch = config.model.arch
        if not names_model(arch):
            return
        if arch != os.path.expanduser(str(self.value("model", "arch"))):
            self.problems.append(
                f"--checkpoint.resume {config.checkpoint.resume}: its model is the code {arch}, which is not imported"
                " by itself: use threed train FILE.py:MODEL, or --model.arch FILE.py:MODEL"
            )
            return
        try:
            find_model(arch)
        except ValueError as error:
            self.problems.append(f"--model.arch {arch}: {error}")

    def value(self, group: str, key: str) -> Any:
        """Returns the value of a key before validation, or None if no source sets the key."""
        return self.values.get(group, {}).get(key)

    def split(self, argv: list[str]) -> dict[str, Any]:
        """Parses flags. Returns values by `group.field`, and program options by name."""
        parser = argparse.ArgumentParser(
            add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS
        )
        add_flags(parser, DEFAULTS, nargs="?")
        for name in self.renames.old_keys:
            missing = "" if name in self.renames.removed else Missing("VALUE")
            parser.add_argument(f"--{name}", dest=name, nargs="?", const=missing)
        named = [_hyphenated(token) if token.startswith("--") else token for token in argv]
        found, rest = parser.parse_known_args(named)
        given = vars(found)
        self._describe_missing(given, named, rest)
        flags = [token.partition("=")[0] for token in named]
        for flag in ("--config", "--preset"):
            if flags.count(flag) > 1:
                what = f"given {flags.count(flag)} times, but a run starts from one file"
                self.problems.append(f"{flag}: {what}; give one, and the differences as flags")
        for flag in ("help", "dry_run"):
            if value := given.get(flag):
                text = f"--{key_name(flag)}={value}: it takes no value; write --{key_name(flag)}, or leave it out"
                self.problems.append(text)
        before, strays, path = "", list[str](), str(given.get("data.path", ""))
        for token in rest:
            name, equals, _ = token.removeprefix("--").partition("=")
            if token.startswith("--"):
                self._describe_unknown(name)
            elif not before.startswith("--"):  # otherwise the token is the value of an unknown flag
                strays.append(token)
            elif before == "--data-path":  # Megatron-LM's flag
                path = token
            before = "" if equals else token
        if strays and re.fullmatch(r"[\d.]+", path):  # "0.5 a 0.5 b", as in Megatron-LM
            self.problems.append(
                f"--data.path {' '.join([path, *strays])}: threed reads one dataset; concatenate the files, or put them"
                " into one folder"
            )
        elif strays:
            what = "not a flag" if len(strays) == 1 else "no flags"
            self.problems.append(f"{' '.join(strays)}: {what}; write --group.key value")
        return given

    def put_flags(self, given: Mapping[str, Any]) -> None:
        """Sets the values that were given as flags."""
        for name, value in given.items():
            group, dot, key = name.partition(".")
            if dot:
                self.put(group, key, value)
        if {"run.name", "run.dir"} & given.keys() == {"run.name"}:
            # The configuration file may be the config.toml of an earlier run. A run with a new name
            # must not use the `run.dir` in that file, because it is the folder of the earlier run.
            self.values["run"].pop("dir", None)

    def read_file(self, given: Mapping[str, Any], presets: Path | None) -> Path | None:
        """Sets the values of the preset or TOML file. Returns its path, or None."""
        path, problem = _find_file(given.get("preset"), given.get("config"), presets)
        if path is None:
            self.problems += [problem] if problem else []
            self.complete = not problem
            return None
        source, tables = str(path), dict[str, Any]()
        try:
            tables = read_toml(path)
        except ParseError as error:
            toml = path.suffix == ".toml"
            fix = "correct it there" if toml else "only TOML is read; convert the file to TOML"
            self.problems.append(str(ParseError(path, f"{error.reason}; {fix}")))
            self.complete = False
        self.topologies, problems = _read_topologies(tables.pop("topology", {}))
        self.problems += [f"{source}: {text}" for text in problems]
        for group, keys in tables.items():
            if isinstance(keys, dict):
                self._put_table(source, group, keys)
            else:
                self.problems.append(
                    f"{source}: {group} is outside any group; put it under one, such as [train]"
                )
        if self.value("run", "name") is None:
            self.put("run", "name", path.stem, source)
        return path

    def _put_table(self, path: str, group: str, keys: Mapping[str, Any]) -> None:
        if not keys and python_name(group) not in GROUPS:
            hint = did_you_mean(group, *GROUPS)
            self.problems.append(f"{path}: [{plain(group)}]: no such group{hint}; --help lists all")
        for key, value in keys.items():
            spellings = sorted(other for other in keys if python_name(other) == python_name(key))
            if key != spellings[0]:
                self.problems.append(
                    f"{path}: {group} has both {spellings[0]} and {key}, which are one key; remove one"
                )
            self.put(group, key, value, path)

    def put_topology(self, source: Path | None, ranks: int | None) -> str:
        """Sets the values of the file's table [topology.N] for N = `ranks`, if it has one.

        Returns:
            A notice if the file has such tables only for other numbers of ranks, else "".
        """
        if source is None or ranks is None or not self.topologies:
            return ""
        for group, keys in self.topologies.get(str(ranks), {}).items():
            self._put_table(str(source), group, keys)
        known = ", ".join(sorted(self.topologies, key=int))
        notice = f"topology   {source.stem} has none for {ranks} ranks, only for {known}: its other keys apply"
        return "" if str(ranks) in self.topologies else notice

    def reset_long_warmup(self, suggested: set[str]) -> None:
        """Resets the warm-up to its default if it is not shorter than the run.

        Args:
            suggested: the sources whose warm-up may be reset: the program's defaults, and a preset.
        """
        steps, warmup = str(self.value("train", "steps")), str(self.value("optim", "warmup"))
        from_them = self.sources.get(("optim", "warmup")) in suggested
        if from_them and steps.isdecimal() and warmup.isdecimal() and int(warmup) >= int(steps):
            self.put("optim", "warmup", "none")

    def world_size(self, given: Mapping[str, Any]) -> int | None:
        """Returns the value of `--world-size`, or None if it is missing or invalid."""
        text = given.get("world_size")
        if text is None or (re.fullmatch(r"\d{1,20}", text) and 1 <= int(text) <= MOST_RANKS):
            return text and int(text)
        self.problems.append(f"--world-size {text}: must be a whole number from 1 to {MOST_RANKS}")
        return None

    def validate(self) -> Config:
        """Records a problem per invalid value. Returns the configuration of the valid values."""
        try:
            return Config.model_validate(self.values)
        except ValidationError as error:
            for detail in error.errors():
                self._describe(detail)
        for place in self.sources:
            if flag_of(*place) in self.suspects:
                self.values.get(place[0], {}).pop(place[1], None)
        return Config.model_validate({group: keys for group, keys in self.values.items() if keys})

    def begin(self, found: Groups, config: Config) -> Config:
        """Returns `config`, with the values of a folder of pretrained weights in place of its own.

        For the keys in `_OWN`, a value from a preset, a file or a flag takes precedence over the
        folder. For other keys, a flag that contradicts the folder is recorded as a problem.

        Args:
            found: values of the folder, {group: {key: value}}; {} without a folder.
            config: the configuration from all other sources: defaults, preset or file, and flags.
        """
        groups = {}
        for group, keys in found.items():
            now, values = getattr(config, group), dict(keys)
            for key, value in keys.items():
                source, own = self.sources.get((group, key), PROGRAM), getattr(now, key)
                if source == FLAG and own not in (None, value) and key not in _OWN:
                    differs = f"has {key} = {value}, this run has {own}"
                    fix = "leave the flag out, the folder defines its model"
                    self.problems.append(
                        f"the model of {config.checkpoint.resume} {differs}: {fix}"
                    )
                if own is not None and key in _OWN and source != PROGRAM:
                    values[key] = own
            groups[group] = now.model_copy(update=values)
        return config.model_copy(update=groups)

    def is_consequence(self, problem: str) -> bool:
        """Returns whether a problem may be a consequence of a problem that is already recorded.

        This is the case if its text names a flag in `suspects`. A flag of the group `parallel` may
        be named by its key alone, as in `tp 2 × pp 2`.
        """
        words = problem.replace(":", " ").replace(",", " ").split()
        names = [(flag, flag.removeprefix("--parallel.")) for flag in self.suspects]
        return any(flag in words or key in words for flag, key in names)

    def _describe(self, detail: ErrorDetails) -> None:
        """Records a pydantic error as a problem that names the flag and the source."""
        group, *rest = (str(part) for part in detail["loc"])
        if detail["type"] == "extra_forbidden":
            for place, source in self.sources.items():
                if place[0] == group and (not rest or place[1] == rest[0]):
                    self._describe_unknown(flag_of(*place).removeprefix("--"), source)
            return
        flag, value = flag_of(group, rest[0]), self.value(group, rest[0])
        self.suspects.add(flag)
        given = value if isinstance(value, str) else _toml_value(value)
        where = _in(self.sources[group, rest[0]])
        self.problems.append(f"{flag} {given}{where}: {reason(detail)}")

    def _describe_missing(self, given: dict[str, Any], named: list[str], rest: list[str]) -> None:
        """Records a problem per flag that was given without a value.

        argparse reads a value that begins with a hyphen, such as `-a.txt`, as another flag, so
        that the flag before the value has no value.

        Args:
            given: parsed flags; those without a value are removed.
            named: the tokens of the command line, in order.
            rest: tokens that argparse did not recognize; values that it read as flags are removed.
        """
        following = dict(itertools.pairwise([*named, ""]))
        for name in [name for name, value in given.items() if isinstance(value, Missing)]:
            flag, form = f"--{key_name(name)}", given.pop(name)
            problem, token = f"{flag}: its value is missing; write {flag} {form}", following[flag]
            if token in rest and not token.startswith("--"):
                rest.remove(token)
                why = "a value that begins with a hyphen needs an equals sign"
                problem = f"{flag} {token}: {why}; write {flag}={shlex.quote(token)}"
            self.suspects.add(flag)
            self.problems.append(problem)

    def _describe_unknown(self, name: str, source: str = FLAG) -> None:
        close, hint = suggest(name, GROUPS)
        self.suspects |= {f"--{name}", *close}
        kind = "key" if "." in name else "flag"
        self.problems.append(f"--{name}{_in(source)}: no such {kind}{hint}; --help lists all")


def _find_file(
    preset: str | None, path: str | None, presets: Path | None
) -> tuple[Path | None, str]:
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


def _hyphenated(token: str) -> str:
    name, equals, value = token.partition("=")
    # argparse treats a token with a space in its name as a value
    return token if " " in name else f"{key_name(name)}{equals}{value}"


def format_problems(problems: list[str]) -> str:
    """Returns the report to print: the number of problems, then one line per problem."""
    head = f"threed: {counted(len(problems), 'problem')} in the configuration; nothing was started"
    return "\n  - ".join([head, *problems])


def to_toml(config: Config) -> str:
    """Returns all keys of `config` as TOML, which `--config FILE` reads into an equal Config."""
    lines: list[str] = []
    for group, values in config:
        lines += [f"[{key_name(group)}]"]
        lines += [f"{key_name(name)} = {_toml_value(value)}" for name, value in values]
        lines += [""]
    return "\n".join(lines)


def _in(source: str) -> str:
    return f" (in {source})" if source else ""


def _toml_value(value: Any) -> str:
    """Returns a value as TOML; None becomes "none".

    JSON text is valid TOML, except that TOML requires DEL to be escaped.
    """
    text = json.dumps("none" if value is None else value, ensure_ascii=False, default=str)
    return text.replace("\x7f", "\\u007f")
