"""The flags of a command line, and the text of `--help`.

add_flags(parser, config)                              # a flag per key
text = help_text(config, "threed train gpt")           # every key with its description and default
"""

from __future__ import annotations

import argparse
import functools
import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from threed.config.groups import GROUPS, Config, key_name
from threed.config.schema import FieldInfo, written
from threed.config.values import MOST_RANKS, Takes

PRESETS = Path(__file__).with_name("presets")


def preset_names(presets: Path | None) -> list[str]:
    """Returns the names of all presets in a folder, sorted; none without a folder."""
    return [] if presets is None else sorted(path.stem for path in presets.glob("*.toml"))


class Missing(str):
    """Marks a flag without a value. The text is the flag's placeholder in `--help`."""


def flag_of(group: str, name: str) -> str:
    """Returns the flag of a key: `--zero.bucket-mib` for `zero` and `bucket_mib`."""
    return f"--{key_name(group)}.{key_name(name)}"


def add_flags(
    parser: argparse.ArgumentParser,
    config: Config,
    *,
    nargs: str | None = None,
    custom: bool = False,
) -> None:
    """Adds all flags to a parser, with their descriptions and their values in `config` as defaults.

    Args:
        parser: the parser to extend.
        config: the configuration with the defaults to show.
        nargs: "?" to accept flags without a value, so that a missing value can be reported.
        custom: whether to omit the flags for presets and dry runs, which custom programs do not
            have.
    """

    def add(place: Any, flag: str, form: str, text: str, **more: Any) -> None:
        const = {} if nargs is None else {"nargs": nargs, "const": Missing(form)}
        place.add_argument(flag, metavar=form, help=text.replace("%", "%%"), **const, **more)

    options = parser.add_argument_group("options")
    bare: Any = {"action": "store_true"} if nargs is None else {"nargs": "?", "const": ""}
    options.add_argument("--help", help="print this text and exit", **bare)
    text = "start from a TOML file, such as the config.toml of a run"
    add(options, "--config", "FILE.toml", text)
    if not custom:
        names = ", ".join(preset_names(PRESETS))
        text = "start from a preset, with its topology for the number of ranks, if it has one"
        add(options, "--preset", "NAME", f"{text}: {names}")
        add(options, "--world-size", "N", f"ranks to assume in a dry run, at most {MOST_RANKS}")
        add(options, "--gpu", "NAME", "GPUs to assume in a dry run: a100, h100, h200 or b200")
        text = "check the configuration, print rank map, bytes and bubble, and exit"
        options.add_argument("--dry-run", help=text, **bare)
    for name, group in GROUPS.items():
        section = parser.add_argument_group(name, group.__doc__)
        for key, info in group.model_fields.items():
            text = _description(info, getattr(getattr(config, name), key))
            add(section, flag_of(name, key), takes(info), text, dest=f"{name}.{key}")


def _description(info: FieldInfo, value: Any) -> str:
    """Returns the description of a key, with its default."""
    text = str(info.description)
    if value is not None:
        return f"{text} (default {default_text(info, value)})"
    return text if "if not set" in text else f"{text} (not set by default)"


def default_text(info: FieldInfo, value: Any) -> str:
    """Returns a default value as a user would write it: a time with its unit; "not set" for None.

    Args:
        info: the field of the key.
        value: default value of the key.
    """
    if value is None:
        return "not set"
    return written(value) + "s" * (takes(info) == "TIME")


def takes(info: FieldInfo | None) -> str:
    """Returns the placeholder of a field's value in the help: `N`, `true|false`, `fp32|bf16|…`."""
    found = [*(info.metadata if info else []), *_parts(info.annotation if info else None)]
    marks = [part.text for part in found if isinstance(part, Takes)]
    return marks[0] if marks else "|".join(part for part in found if isinstance(part, str))


def _parts(annotation: Any) -> Iterator[Any]:
    parts = get_args(annotation)
    yield from parts
    for part in parts:
        yield from _parts(part)


def help_text(
    config: Config, prog: str, *, width: int | None = None, about: str = "", custom: bool = False
) -> str:
    """Returns the text of `--help`: every key by group, with its description and default.

    Args:
        config: the configuration with the defaults to show.
        prog: program name in the usage line.
        width: width in columns; by default the width of the terminal, at most 110.
        about: description of the program.
        custom: whether this is a custom program, which has no presets and no dry run.
    """
    width = width or min(110, shutil.get_terminal_size().columns)
    start = "" if prog.startswith("threed ") else "torchrun --standalone --nproc-per-node N "
    dry_run = "" if prog.startswith("threed plan") else "[--dry-run] "
    options = f"[--preset NAME | --config FILE.toml] {dry_run}[--world-size N]"
    options = "[--help] [--config FILE.toml]" if custom else options
    usage = f"usage: {start}{prog} {options} [--group.key value …]"
    formatter = functools.partial(argparse.HelpFormatter, max_help_position=34, width=width)
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS, add_help=False, formatter_class=formatter
    )
    add_flags(parser, config, custom=custom)
    usage = textwrap.fill(usage, width, subsequent_indent="    ", break_on_hyphens=False)
    unset = "The value none unsets a key that is not set by default."
    parts = [usage, about.strip(), parser.format_help().strip("\n"), unset]
    return "\n\n".join(filter(None, parts)) + "\n"
