"""Keys of saves, of copies in memory, and of jobs whose machines come and go, that cannot work together.

`check_saves` and `check_copies` are parts of `checks.find_problems`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from threed import schedules
from threed.config import Config


def check_saves(config: Config) -> Iterator[str]:
    """Yields what means nothing where only the end is saved."""
    c = config.checkpoint
    for flag, there in (
        ()
        if c.every
        else (("async true", c.async_ is True), (f"keep-every {c.keep_every}", c.keep_every))
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
        f"--parallel.schedule {config.parallel.schedule}": schedules.is_asynchronous(
            config.parallel.schedule
        ),
    }
    for flag, there in late.items():
        if there and (every or (neighbour and every is None)):
            yield f"{given} with {flag}: updates are a step late, and copies would wait for them; use one of them"


def check_sizes(config: Config, machines: tuple[int, int], ranks: int) -> Iterator[str]:
    """Yields what is wrong where a job may have from the least to the most `machines`, of so many ranks each.

    All sizes are looked at when it starts: else it would end in the middle, when the first machine is lost.
    """
    p, train = config.parallel, config.train
    others, asked = p.tp * p.pp * p.cp, f"--nnodes {machines[0]}:{machines[1]}"
    sizes = [n * ranks for n in range(machines[0], machines[1] + 1)]
    if p.dp is not None and len({p.dp * others, *sizes}) > 1:
        yield f"{asked} with --parallel.dp {p.dp}: the data ranks follow from the machines; leave --parallel.dp out"
        return
    if uncut := [size for size in sizes if size % others]:
        factors = f"tp {p.tp} × pp {p.pp}"
        yield f"{asked} may give {uncut[0]} ranks, no multiple of {factors}: let each machine have a multiple"
        return
    fits = [
        size // others
        for size in sizes
        if train.global_batch % (train.micro_batch * size // others) == 0
    ]
    if len(fits) < len(sizes):
        whole = train.micro_batch * math.lcm(*(size // others for size in sizes))
        rows = -(-train.global_batch // whole) * whole
        bad = next(size // others for size in sizes if size // others not in fits)
        works = (
            f"works for dp {', '.join(map(str, fits))}" if fits else "works for none of these sizes"
        )
        given = (
            f"--train.global-batch {train.global_batch} with micro-batches of {train.micro_batch}"
        )
        yield f"{asked} may give dp {bad}, and {given} {works}: use --train.global-batch {rows}, or fewer machines"
