"""`threed plan --from-megatron 'FLAGS'`: translates flags of Megatron-LM, and plans the run.

threed plan --from-megatron '--num-layers 24 --hidden-size 1024 …' --world-size 8 [flags of threed]
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from threed.core.messages import counted

if TYPE_CHECKING:
    from threed.config.migration.megatron import Translation

FLAG = "--from-megatron"
_RANKS_PER_MACHINE = 8
_OF_PLANS = ("--world-size", "--gpu")  # flags of a plan, which a run does not take


def given(words: Sequence[str]) -> bool:
    """Returns whether a command line has the flag `--from-megatron`."""
    return any(word.partition("=")[0] == FLAG for word in words)


def plan(words: Sequence[str]) -> int:
    """Prints the translation and the command of threed, then the plan. Returns the exit code.

    Args:
        words: the command line after `threed plan`.
    """
    from threed.cli import launch
    from threed.config.migration.megatron import translate

    text, rest = _split(words)
    if text is None or not text.strip():
        return launch.refuse(f"threed plan: {FLAG}: its value is missing; write {FLAG} 'FLAGS'")
    if given(rest):
        return launch.refuse(f"threed plan: {FLAG}: give it once, with all flags of Megatron-LM")
    if rest and not rest[0].startswith("-"):
        problem = f"{rest[0]}: the flags of Megatron-LM determine the architecture; leave this out"
        return launch.refuse(f"threed plan {FLAG}: {problem}")
    world_size = _world_size(rest)
    found = translate(text, world_size)
    if found.problems:
        count = counted(len(found.problems), "problem")
        head = f"threed: {count} in the flags of Megatron-LM; nothing was planned"
        return launch.refuse(f"{head}\n{found}")
    print(f"{found}\ncommand\n  {_command(found, rest, world_size)}\n")
    prog = shlex.join(["threed", "plan", found.arch])
    flags = [*found.flags, *rest, "--dry-run"]
    return launch.main(flags, arch=found.arch, prog=prog, named=True)


def _split(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Returns the value of `--from-megatron`, or None without one, and all other words."""
    at = next(i for i, word in enumerate(words) if word.partition("=")[0] == FLAG)
    _, equals, value = words[at].partition("=")
    if equals:
        return value, [*words[:at], *words[at + 1 :]]
    missing = at + 1 == len(words)
    return None if missing else words[at + 1], [*words[:at], *words[at + 2 :]]


def _world_size(rest: Sequence[str]) -> int:
    """Returns the value of `--world-size`, or 1 if it is missing or invalid."""
    for i, word in enumerate(rest):
        name, equals, value = word.partition("=")
        if name == "--world-size":
            text = value if equals else "".join(rest[i + 1 : i + 2])
            return int(text) if text.isdecimal() and int(text) else 1
    return 1


def _command(found: Translation, rest: Sequence[str], world_size: int) -> str:
    """Returns the command that trains, for a shell.

    Args:
        found: the translation.
        rest: flags of threed on the command line of the plan.
        world_size: number of ranks. The command starts them on one machine if they fit on it.
    """
    words, flags = list(rest), [*found.flags]
    while words:
        word = words.pop(0)
        name, equals, _ = word.partition("=")
        if name not in _OF_PLANS:
            flags.append(word)
        elif not equals:
            words[:1] = []
    train = ["threed", "train", found.arch, *flags]
    if 1 < world_size <= _RANKS_PER_MACHINE:
        launcher = ["torchrun", "--standalone", "--nproc-per-node", str(world_size), "-m"]
        return shlex.join([*launcher, *train])
    return shlex.join(train)
