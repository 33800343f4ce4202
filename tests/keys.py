"""Writes docs/reference/configuration.md: all keys of the configuration.

python -m tests.keys         # after a key or its help text has changed
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.test_floors import ROOT
from threed.checkpoint.resuming import CONTENTS, RULES
from threed.config.arguments import GROUPS
from threed.config.flags import default_text, takes
from threed.config.groups import Config, key_name
from threed.config.requirements import REFUSALS
from threed.config.schema import written

PAGE = ROOT / "docs" / "reference" / "configuration.md"
HEAD = """# All keys

All keys of the configuration, with their defaults and meanings. `threed train --help` prints the same.
This page is generated from `threed/config/` by `python -m tests.keys`; a test fails if it is out of date.

A key is `--group.key value` as a flag, and `key = value` under `[group]` in a TOML file (`--config FILE.toml`).
Flags override the preset or file; the last of repeated flags applies, but `--preset` and `--config` may be given only
once. A table such as `[topology.8]` in a preset or file has values for 8 ranks
([recipes](../guide/recipes.md#your-own-topologies)). In Python a hyphen is an underscore: `config.train.global_batch`.

Keys without a default are *not set*; on the command line and in a file, the value `none` unsets them.
*Not yet* marks keys of which this version implements only the listed values.
"""
RESUMES = """## When a run resumes

A resume compares every key with the value in the checkpoint. A difference is

- **free**: it takes effect and is not reported;
- **applied**: it takes effect, and a line such as `changed    train.global-batch was 16 and is 32: …` reports it. If
  the learning rate of the next step differs, another line has both rates;
- **refused**: the run does not start (exit code 2); the message names the fix.

This applies to a run that resumes from a native checkpoint. For a run that begins from weights alone (a Hugging Face
folder, or another framework's checkpoint by way of `threed convert`), only the model and the optimizer are compared.
"""


def rows(group: str) -> Iterator[str]:
    """Yields the lines of a group's table."""
    defaults = getattr(Config(), group)
    for name, info in GROUPS[group].model_fields.items():
        value, own = takes(info).replace("|", "\\|"), getattr(defaults, name)
        default = "not set" if own is None else f"`{default_text(info, own)}`"
        meaning = " ".join(str(info.description).split())
        meaning = meaning.replace("<", "&lt;").replace("*", "\\*")
        yield f"| `--{group}.{key_name(name)}` | `{value}` | {default} | {meaning}{missing(group, name)} |"


def missing(group: str, name: str) -> str:
    """Returns which values of a key are not supported yet."""
    for refusal in REFUSALS:
        if (refusal.group, refusal.field) == (group, name):
            return f". *Not yet: other values than `{_plain(refusal.works)}`*"
    return ""


def _plain(values: tuple[object, ...]) -> str:
    return "`, `".join(written(value) for value in values if value is not None)


def resuming() -> Iterator[str]:
    """Yields the lines of the section on resumes."""
    yield RESUMES
    yield "| difference | on a resume | why, or what to do |\n|---|---|---|"
    for rule in RULES:
        yield f"| {', '.join(f'`--{key}`' for key in rule.keys)} | {rule.change} | {rule.note} |"
    for what, change, note in CONTENTS:
        yield f"| {what} | {change} | {note} |"


def page() -> str:
    """Returns the page as Markdown."""
    parts = [HEAD]
    for group, model in GROUPS.items():
        parts += [
            f"## {group}",
            "",
            str(model.__doc__),
            "",
            "| key | value | default | meaning |",
            "|---|---|---|---|",
        ]
        parts += [*rows(group), ""]
    parts += [*resuming(), ""]
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
