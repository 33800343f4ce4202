"""Keys of saves, and of copies in memory, that cannot work together: a part of `checks.find_problems`."""

from __future__ import annotations

from collections.abc import Iterator

from threed import schedules
from threed.config import Config


def check_saves(config: Config) -> Iterator[str]:
    """Yields what means nothing where only the end is saved."""
    c = config.checkpoint
    for flag, there in (
        () if c.every else (("async true", c.async_ is True), (f"keep-every {c.keep_every}", c.keep_every))
    ):
        if there:
            what = f"--checkpoint.{flag} with --checkpoint.every 0: only the end is saved then"
            yield f"{what}, where nothing goes on; give --checkpoint.every too"


def check_copies(config: Config) -> Iterator[str]:
    """Yields what copies in memory do not go with."""
    every, neighbour = config.checkpoint.memory_every, config.run.replicate == "neighbour"
    given = "--run.replicate neighbour" if neighbour else f"--checkpoint.memory-every {every}"
    if neighbour and every == 0:
        yield f"{given} with --checkpoint.memory-every 0: there is nothing to copy; leave one of them out"
    late = {
        "--zero.delayed-update true": config.zero.delayed_update,
        f"--parallel.schedule {config.parallel.schedule}": schedules.is_asynchronous(config.parallel.schedule),
    }
    for flag, there in late.items():
        if there and (every or (neighbour and every is None)):
            yield f"{given} with {flag}: updates are a step late, and copies would wait for them; use one of them"
