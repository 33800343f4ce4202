"""Configuration of a custom training program from its command line.

    config = program_config(
        sys.argv[1:], prog="mine.py", about=__doc__, defaults=DEFAULTS, world_size=8
    )

`Trainer.from_command_line` uses this function.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from threed.config.arguments import load
from threed.config.groups import Config, ConfigError
from threed.config.renames import report_renames


def program_config(
    argv: list[str],
    *,
    prog: str,
    about: str,
    defaults: Mapping[str, Mapping[str, Any]],
    world_size: int,
) -> Config:
    """Returns the checked configuration of a custom program, which has no presets and no dry run.

    With `--help`, local rank 0 prints `about` and every key with its default, and all ranks exit
    with code 0.

    Args:
        argv: command line without the program's name.
        prog: name of the program in the help.
        about: description of the program for the help.
        defaults: the program's defaults, {group: {key: value}}.
        world_size: number of ranks.

    Raises:
        ConfigError: if the command line has problems; the message lists all of them.
        SystemExit: after printing the help.
    """
    config, options = load(
        argv, prog=prog, about=about, defaults=defaults, presets=None, world_size=world_size
    )
    if options.help:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(options.help)
        raise SystemExit(0)
    report_renames(options.notes)
    if options.dry_run or options.world_size is not None:
        raise ConfigError([f"{prog} has no --dry-run and no --world-size; `threed plan` has them"])
    return config
