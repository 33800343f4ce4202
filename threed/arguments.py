"""The command line and TOML files: read into a `Config`, explained by `--help`, written back.

    config, options = load(sys.argv[1:])                    # single keys are checked
    config, options = load(sys.argv[1:], world_size=8)      # and their combinations, by `threed.checks`

Layers, later ones win: the program's defaults, the preset or TOML file, the flags. Phases: split the tokens, note every
value with where it was said, let pydantic judge them all, put its verdict in words.
"""

from __future__ import annotations

import difflib
import json
import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from threed.architectures.rope_scaling import RopeScaling
from threed.checks import find_problems
from threed.config import Config, ConfigError, ModelConfig, key_name, python_name
from threed.parse import ParseError, read_toml
from threed.schema import BaseModel, ErrorDetails, FieldInfo, ValidationError, reason
from threed.values import Takes

GROUPS: Mapping[str, type[BaseModel]] = {
    name: info.annotation
    for name, info in Config.model_fields.items()
    if isinstance(info.annotation, type)
}
PRESETS = Path(__file__).with_name("presets")
_WORDS = ("preset", "config", "world-size")
_SWITCHES = ("dry-run", "help")
_COLUMN = 34  # of meanings in the help
PROGRAM, FLAG = "the program's defaults", ""  # sources of values, besides files
Groups = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Options:
    """What the command line asks of the program rather than of the run.

    Attributes:
        source: the preset or TOML file that was read.
        pretrained: whether a folder to begin from says what the model is.
    """

    dry_run: bool = False
    world_size: int | None = None
    help: bool = False
    source: Path | None = None
    pretrained: bool = False


@dataclass(frozen=True)
class Pretrained:
    """Values that a folder to begin from gives.

    Attributes:
        defaults: used where neither a file nor a flag gives a value.
        model: its model, whose keys count more than those of a preset or file.
        differences: returns how a model differs from the folder's.
    """

    defaults: Groups
    model: ModelConfig
    differences: Callable[[ModelConfig], list[str]]


Begin = Callable[[Config], Pretrained | None]


@dataclass
class _Draft:
    """A configuration in the making: values by group and field, the source of each, and what is
    wrong so far.

    `suspects` are the flags that are wrong, or that a misspelt one may have meant: checks that look at them would only
    add noise. `complete` is false where a whole layer could not be read.
    """

    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    sources: dict[tuple[str, str], str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    suspects: set[str] = field(default_factory=set)
    complete: bool = True

    def say(self, group: str, key: str, value: Any, source: str = FLAG) -> None:
        group, key = python_name(group), python_name(key)
        self.values.setdefault(group, {})[key] = value
        self.sources[group, key] = source

    def value(self, group: str, key: str) -> Any:
        return self.values.get(group, {}).get(key)


def load(
    argv: list[str],
    *,
    defaults: Groups | None = None,
    presets: Path = PRESETS,
    begin: Begin | None = None,
    world_size: int | None = None,
    local_world: int | None = None,
    more: Callable[[Config], Iterable[str]] = lambda config: (),
) -> tuple[Config, Options]:
    """Reads the command line, and checks the configuration for a number of ranks.

    Args:
        defaults: the program's own values, {group: {key: value}}.
        presets: the folder of the named TOML files, by default the package's.
        begin: returns the values of the folder that a configuration begins from, if there is one. May raise
            ConfigError.
        world_size: the number of ranks if there is no `--world-size`. By default combinations of
            keys are not checked.
        local_world: the number of ranks on this machine.
        more: returns further problems of a configuration whose values are all valid.

    Returns:
        The configuration, and what is asked of the program. With `--help` nothing but the defaults is read.

    Raises:
        ConfigError: with every problem of keys and of their combinations.
    """
    config, options, draft = _read(argv, defaults or {}, presets, begin)
    if options.help:
        return config, options
    problems, found = list(draft.problems), []
    if world_size is not None and draft.complete:
        asked = options.world_size
        found = find_problems(config, asked or world_size, None if asked else local_world)
    problems += [
        text for text in found if not any(_mentions(text, flag) for flag in draft.suspects)
    ]
    problems += [] if draft.problems else more(config)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return config, options


def format_problems(problems: list[str]) -> str:
    """The report to print: a count, then each problem with its fix."""
    head = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return "\n".join(
        [
            f"threed: {head} in the configuration; nothing was started",
            *(f"  - {text}" for text in problems),
        ]
    )


def to_toml(config: Config) -> str:
    """All keys as TOML; `load` reads it back to an equal Config."""
    lines: list[str] = []
    for group in GROUPS:
        values = getattr(config, group)
        lines += [f"[{key_name(group)}]"]
        lines += [
            f"{key_name(name)} = {_toml_value(getattr(values, name))}"
            for name in GROUPS[group].model_fields
        ]
        lines += [""]
    return "\n".join(lines)


def help_text(
    config: Config, prog: str, *, width: int | None = None, about: str | None = None
) -> str:
    """Returns the text of `--help`: every key with its meaning, and its value in `config` as the default, in groups.

    width: in columns. about: the description of a custom program, which has no presets and no dry run.
    """
    width = width or min(110, shutil.get_terminal_size().columns)
    start = "" if prog.startswith("threed ") else "torchrun --standalone --nproc-per-node N "
    options = {"--config FILE.toml": "start from a TOML file, such as the config.toml of a run"}
    usage = "[--help] [--config FILE.toml]"
    if about is None:
        usage = "[--preset NAME | --config FILE.toml] [--dry-run] [--world-size N]"
        options |= {
            "--preset NAME": f"start from a preset: {', '.join(_preset_names(PRESETS))}",
            "--dry-run": "check everything, print rank map, bytes and bubble, and end",
            "--world-size N": "ranks to assume in a dry run",
        }
    usage = f"usage: {start}{prog} {usage} [--group.key value …]"
    parts = [textwrap.fill(usage, width, subsequent_indent="    ")]
    parts += [*([] if about is None else [about.strip()]), _help_rows(options, width)]
    for name, group in GROUPS.items():
        values = getattr(config, name)
        rows = {
            f"{_flag(name, key)} {takes(info)}": f"{info.description} (default {written(key, getattr(values, key))})"
            for key, info in group.model_fields.items()
        }
        parts.append(
            f"{textwrap.fill(f'{name}: {group.__doc__}', width)}\n{_help_rows(rows, width)}"
        )
    return "\n\n".join(parts) + "\n"


def _read(
    argv: list[str], defaults: Groups, presets: Path, begin: Begin | None
) -> tuple[Config, Options, _Draft]:
    draft = _Draft()
    for group, keys in defaults.items():
        for key, value in keys.items():
            draft.say(group, key, value, PROGRAM)
    if "--help" in argv or "-h" in argv:
        return _judge(draft), Options(help=True), draft
    settings, words = _split_tokens(argv, draft)
    source = _find_file(words, presets, draft.problems)
    draft.complete = source is not None or not words.keys() & {"preset", "config"}
    if source is not None:
        _read_toml(source, draft)
    for flag, value in settings:
        group, _, key = flag.partition(".")
        draft.say(group, key, value)
    if {flag for flag, _ in settings} & {"run.name", "run.dir"} == {"run.name"}:
        draft.values["run"].pop("dir", None)  # a resolved file's folder is that of its own name
    if source is not None and draft.value("run", "name") is None:
        draft.say("run", "name", source.stem, str(source))
    _fit_warmup(draft, {PROGRAM, *([str(source)] if "preset" in words else [])})
    world_size, config = _world_size(words, draft.problems), _judge(draft)
    found = None if begin is None or draft.problems else begin(config)
    if found is not None:
        config = _begin_from(found, draft, config)
        draft.problems += found.differences(config.model)
    options = Options("dry-run" in words, world_size, False, source, found is not None)
    return config, options, draft


def _begin_from(found: Pretrained, draft: _Draft, config: Config) -> Config:
    """Adds the values of a folder to begin from: its defaults below those of files, its model above them."""
    flags = {
        key for (group, key), source in draft.sources.items() if (group, source) == ("model", FLAG)
    }
    updates = {key: value for key, value in config.model if key in flags or key == "seq"}
    groups: dict[str, BaseModel] = {name: getattr(config, name) for name in GROUPS} | {
        "model": found.model.model_copy(update=updates)
    }
    for group, keys in found.defaults.items():
        unset = {key for key in keys if draft.sources.get((group, key), PROGRAM) == PROGRAM}
        groups[group] = groups[group].model_copy(update={key: keys[key] for key in unset})
    return config.model_copy(update=groups)


def _fit_warmup(draft: _Draft, suggested: set[str]) -> None:
    """Resets a warm-up that is not shorter than the run to its default, if it comes from one of the `suggested`
    sources."""
    steps, warmup = str(draft.value("train", "steps")), str(draft.value("optim", "warmup"))
    from_them = draft.sources.get(("optim", "warmup")) in suggested
    if from_them and steps.isdecimal() and warmup.isdecimal() and int(warmup) >= int(steps):
        draft.say("optim", "warmup", "none")


def _split_tokens(argv: list[str], draft: _Draft) -> tuple[list[tuple[str, str]], dict[str, str]]:
    """Tokens to `--group.key` settings in order, and the options of the program."""
    settings: list[tuple[str, str]] = []
    words: dict[str, str] = {}
    tokens = list(reversed(argv))
    while tokens:
        token = tokens.pop()
        name, equals, value = token.removeprefix("--").partition("=")
        known = "." in name or name in _WORDS or (name in _SWITCHES and not equals)
        if not token.startswith("--"):
            draft.problems.append(f"{token}: not a flag; write --group.key value")
        elif name in _SWITCHES and not equals:
            words[name] = "true"
        elif not equals and (not tokens or tokens[-1].startswith("--")):
            _describe_bare(name, draft)
        else:
            value = value if equals else tokens.pop()
            if not known:
                _describe_unknown(name, "", draft)
            elif name in _WORDS:
                words[name] = value
            else:
                settings.append((name, value))
    return settings, words


def _describe_bare(name: str, draft: _Draft) -> None:
    group, _, key = name.partition(".")
    info = GROUPS[group].model_fields.get(python_name(key)) if group in GROUPS else None
    if info is None and name not in _WORDS:
        _describe_unknown(name, "", draft)
        return
    expected = {"preset": "NAME", "config": "FILE.toml", "world-size": "N"}.get(name) or takes(info)
    draft.suspects.add(f"--{name}")
    draft.problems.append(f"--{name}: its value is missing; write --{name} {expected}")


def _find_file(words: dict[str, str], presets: Path, problems: list[str]) -> Path | None:
    if "preset" in words and "config" in words:
        problems.append("--preset and --config together: give one, and the differences as flags")
        return None
    if "preset" in words:
        names = _preset_names(presets)
        if words["preset"] in names:
            return presets / f"{words['preset']}.toml"
        problems.append(
            f"--preset {words['preset']}: no such preset; there are {', '.join(names) or 'none'}"
        )
    if "config" in words:
        path = Path(words["config"])
        if path.is_file():
            return path
        problems.append(
            f"--config {path}: no such file; presets are named with --preset ({', '.join(_preset_names(presets))})"
        )
    return None


def _preset_names(presets: Path) -> list[str]:
    return sorted(path.stem for path in presets.glob("*.toml"))


def _read_toml(path: Path, draft: _Draft) -> None:
    try:
        tables = read_toml(path)
    except ParseError as error:
        draft.problems.append(f"{error}; correct it there")
        draft.complete = False
        return
    for group, keys in tables.items():
        if not isinstance(keys, dict):
            draft.problems.append(
                f"{path}: {group} stands outside any group; put it under one, such as [train]"
            )
            continue
        for key, value in keys.items():
            alike = sorted(other for other in keys if python_name(other) == python_name(key))
            if key != alike[0]:
                draft.problems.append(
                    f"{path}: {group} has both {alike[0]} and {key}, which are one key; remove one"
                )
            draft.say(group, key, value, str(path))


def _world_size(words: dict[str, str], problems: list[str]) -> int | None:
    text = words.get("world-size")
    if text is None:
        return None
    if text.isdecimal() and int(text) > 0:
        return int(text)
    problems.append(f"--world-size {text}: must be a whole number of at least 1")
    return None


def _judge(draft: _Draft) -> Config:
    """Validates the values, puts pydantic's errors into words, and returns the Config of the valid
    ones."""
    try:
        return Config.model_validate(draft.values)
    except ValidationError as error:
        for detail in error.errors():
            _describe(detail, draft)
    valid = {
        group: {
            key: value for key, value in keys.items() if _flag(group, key) not in draft.suspects
        }
        for group, keys in draft.values.items()
    }
    return Config.model_validate({group: keys for group, keys in valid.items() if keys})


def _describe(detail: ErrorDetails, draft: _Draft) -> None:
    """Add one of pydantic's errors to the problems, in the words of the command line."""
    group, *rest = (str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        for place, source in draft.sources.items():
            if place[0] == group and (not rest or place[1] == rest[0]):
                _describe_unknown(_flag(*place).removeprefix("--"), source, draft)
        return
    place = (group, rest[0])
    flag, value, source = _flag(*place), draft.value(*place), draft.sources[place]
    draft.suspects.add(flag)
    given = value if isinstance(value, str) else _toml_value(value)
    where = f" (in {source})" if source else ""
    draft.problems.append(f"{flag} {given}{where}: {reason(detail)}")


def _describe_unknown(name: str, source: str, draft: _Draft) -> None:
    close = _close_flags(name)
    draft.suspects |= {f"--{name}", *close}
    hint = f" (did you mean {' or '.join(close)}?)" if close else ""
    where = f" (in {source})" if source else ""
    draft.problems.append(
        f"--{name}{where}: no such {'key' if '.' in name else 'flag'}{hint}; --help lists all"
    )


def _flag(group: str, name: str) -> str:
    return f"--{key_name(group)}.{key_name(name)}"


def _close_flags(name: str) -> list[str]:
    """Flags that `name` may have meant: the same key in another group, or one that is spelt much alike."""
    keys = {
        f"{group}.{key_name(key)}": key_name(key)
        for group, model in GROUPS.items()
        for key in model.model_fields
    }
    name = name.replace("_", "-")
    group, _, key = name.rpartition(".")
    close = [flag for flag, short in keys.items() if short == key] if group not in GROUPS else []
    close = close or difflib.get_close_matches(name, [*keys, *_WORDS, *_SWITCHES], 1, 0.75)
    alike = difflib.get_close_matches(key, keys.values(), 1, 0.7)
    close = close or [flag for flag, short in keys.items() if short in alike]
    return [f"--{flag}" for flag in close[:3]]


def _mentions(text: str, flag: str) -> bool:
    """Whether a problem speaks of this flag; those of `parallel` go by their short names too (`tp 2 × pp 2`)."""
    words = text.replace(":", " ").replace(",", " ").split()
    group, _, key = flag.partition(".")
    return flag in words or (group == "--parallel" and key in words)


def _toml_value(value: Any) -> str:
    """Returns a value in TOML, of which None is the word `none`; other values but DEL have JSON's form."""
    text = json.dumps("none" if value is None else value, ensure_ascii=False, default=str)
    return text.replace("\x7f", "\\u007f")


def written(name: str, value: Any) -> str:
    """Returns the value of a field as a command line has it."""
    if name == "groups":  # the text of a group has commas and brackets of its own
        return "; ".join(str(item) for item in value) or "none"
    if isinstance(value, RopeScaling):
        return str(value)
    return _toml_value(value).replace('"', "").replace("[", "").replace("]", "").replace(", ", ",")


def _help_rows(rows: Mapping[str, str], width: int) -> str:
    """Returns two columns; a long left side has a line of its own."""
    lines: list[str] = []
    for left, right in rows.items():
        first = f"  {left}".ljust(_COLUMN) if len(left) + 3 <= _COLUMN else " " * _COLUMN
        lines += [f"  {left}"] if not first.strip() else []
        lines.append(
            textwrap.fill(
                right,
                max(width, _COLUMN + 20),
                initial_indent=first,
                subsequent_indent=" " * _COLUMN,
            )
        )
    return "\n".join(lines)


def takes(info: FieldInfo | None) -> str:
    """What stands for a field's value in the help: `N`, `true|false`, `fp32|bf16|…`."""
    found = [*(info.metadata if info else []), *_parts(info.annotation if info else None)]
    marks = [part.text for part in found if isinstance(part, Takes)]
    return marks[0] if marks else "|".join(part for part in found if isinstance(part, str))


def _parts(annotation: Any) -> Iterator[Any]:
    parts = get_args(annotation)
    yield from parts
    for part in parts:
        yield from _parts(part)
