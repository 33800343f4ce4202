"""Translates a command line of Megatron-LM into flags of threed.

    translation = translate("--num-layers 24 --hidden-size 1024 --swiglu …", world_size=8)
    translation.problems        # flags that threed cannot translate, each with what to do
    translation.flags           # ["--model.layers", "24", …]
    print(translation)          # what became of each flag

Defaults of Megatron-LM that differ from threed's are translated, too. The table of flags is
`threed.config.migration.megatron_flags`; the functions of `RULES` translate the flags that depend
on each other.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from threed.config.groups import Config
from threed.config.migration.megatron_flags import FLAGS, Flag, find
from threed.config.migration.megatron_items import Given, Setting, Untranslatable, Unused
from threed.config.migration.megatron_rules import RULES

_VARIABLE = re.compile(r"\$(?:\w+|\{[^}]*\}|\([^)]*\))")
_ORDER = ("model", *(name for name in Config.model_fields if name != "model"))


@dataclass(frozen=True)
class Translation:
    """The result of a translation. `str()` lists what became of each flag.

    Attributes:
        arch: value of `--model.arch`, the first word of `threed train`.
        settings: the translated flags, without `model.arch`, in the order of the groups of keys.
        unused: the flags that need no replacement, each with the reason.
        problems: a line per flag that cannot be translated, with what to do.
        arch_flags: the flags of Megatron-LM that determine `arch`.
    """

    arch: str
    settings: tuple[Setting, ...]
    unused: tuple[Unused, ...]
    problems: tuple[str, ...]
    arch_flags: tuple[str, ...] = ()

    @property
    def flags(self) -> list[str]:
        """The flags of threed, without the architecture."""
        return [word for setting in self.settings for word in setting.words]

    def __str__(self) -> str:
        arch = [Setting("", self.arch, self.arch_flags)] if self.arch else []
        rows = [
            (s, shlex.join(s.words) if s.key else f"threed train {self.arch}")
            for s in (*arch, *self.settings)
        ]
        translated = [(_written(s.flags), text) for s, text in rows if s.flags]
        parts = {
            "translated": translated,
            "defaults of Megatron-LM": [(text, "") for s, text in rows if not s.flags],
            "no effect": [(f"--{unused.name}", unused.reason) for unused in self.unused],
            "not supported": [(text, "") for text in self.problems],
        }
        lines = []
        for title, cells in parts.items():
            width = min(60, max((len(left) for left, _ in cells), default=0))
            lines += [title] * bool(cells)
            lines += [f"  {left:<{width}}  {right}".rstrip() for left, right in cells]
        return "\n".join(lines)


def _written(flags: Iterable[str]) -> str:
    return " ".join(f"--{name}" for name in flags)


def translate(text: str, world_size: int = 1) -> Translation:
    """Translates flags of Megatron-LM.

    Args:
        text: the flags, as in a shell script; lines may end with a backslash.
        world_size: number of ranks of the run.
    """
    values, problems = split(text)
    if problems and not values:
        return Translation("", (), (), tuple(problems))
    unused, settings = list[Unused](), list[Setting]()
    for name, words in values.items():
        flag = find(name)
        if flag is None:
            problems.append(_unknown(name))
        elif problem := _misused(flag, name, words):
            problems.append(problem)
        elif flag.kind == "key":
            settings.append(_convert(flag, words))
        elif flag.kind == "unused":
            unused.append(Unused(name, flag.text))
        elif flag.kind == "refused":
            unused.append(Unused(name, "with this value, the same in threed"))
    given = Given({name: words for name, words in values.items() if find(name)}, world_size)
    for rule in RULES:
        try:
            for item in rule(given):
                unused.append(item) if isinstance(item, Unused) else settings.append(item)
        except Untranslatable as error:
            problems.append(str(error))
    settings, conflicts = _merge(settings)
    arch = next((setting for setting in settings if setting.key == "model.arch"), None)
    rest = tuple(setting for setting in settings if setting.key != "model.arch")
    return Translation(
        arch.value if arch else "", rest, tuple(unused), (*dict.fromkeys(problems), *conflicts),
        arch.flags if arch else (),
    )  # fmt: skip


def split(text: str) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """Splits a command line of Megatron-LM.

    Args:
        text: the flags, as in a shell script.

    Returns:
        The values of each flag, by name; and a problem per word that belongs to no flag. If the
        text cannot be read, only one problem.
    """
    values, problems, name = dict[str, tuple[str, ...]](), list[str](), ""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        return {}, [f"the flags of Megatron-LM cannot be read: {error}"]
    if variables := dict.fromkeys(_VARIABLE.findall(" ".join(words))):
        fix = "put the flags in double quotes, or write the values"
        return {}, [f"{', '.join(variables)}: the shell must insert these values: {fix}"]
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            values[name] = (value,) if equals else ()
        elif name:
            values[name] = (*values[name], word)
        else:
            problems.append(f"{word}: not a flag of Megatron-LM; give only the flags")
    return values, problems


def _unknown(name: str) -> str:
    group, dot, _ = name.partition(".")
    if dot and group in Config.model_fields:
        return f"--{name}: a key of threed; write it after the flags of Megatron-LM, outside of their quotes"
    near = difflib.get_close_matches(name, [n for n in FLAGS if not n.endswith("*")], 1)
    hint = f" (did you mean --{near[0]}?)" if near else ""
    return f"--{name}: no flag of Megatron-LM that threed can translate{hint}"


def _misused(flag: Flag, name: str, words: tuple[str, ...]) -> str:
    """Returns the problem of a flag that is refused, or has a wrong number of values; or ""."""
    given = " ".join([f"--{name}", *words])
    if flag.kind == "refused":
        return "" if words and set(words) <= set(flag.allowed) else f"{given}: {flag.text}"
    if flag.values == "" and words:
        return f"{given}: it takes no value"
    if flag.values == "N" and len(words) != 1:
        return f"{given}: it takes one value"
    if flag.values == "N…" and not words:
        return f"{given}: its values are missing"
    if flag.words and words[0] not in flag.words:
        return f"{given}: threed has {', '.join(flag.words)}"
    return ""


def _convert(flag: Flag, words: tuple[str, ...]) -> Setting:
    value = words[0] if words else ""
    return Setting(flag.keys[0], flag.words.get(value, flag.form.format(value)), (flag.name,))


def _merge(settings: Iterable[Setting]) -> tuple[list[Setting], list[str]]:
    """Joins settings of one key. Settings with different values are a problem."""
    merged: dict[str, Setting] = {}
    for setting in settings:
        before = merged.get(setting.key)
        if before is None:
            merged[setting.key] = setting
        elif before.value == setting.value:
            flags = tuple(dict.fromkeys([*before.flags, *setting.flags]))
            merged[setting.key] = Setting(setting.key, setting.value, flags)
    clashes = dict.fromkeys(_clashes(settings, merged))
    found = sorted(merged.values(), key=lambda one: _ORDER.index(one.key.partition(".")[0]))
    return found, list(clashes)


def _clashes(settings: Iterable[Setting], merged: dict[str, Setting]) -> Iterator[str]:
    for setting in settings:
        first = merged[setting.key]
        if setting.value != first.value:
            flags = " and ".join(map(_written, (first.flags, setting.flags)))
            yield f"{flags}: they set --{setting.key} to {first.value} and to {setting.value}; keep one"
