"""Bytes one rank sends in a collective over some ranks, as a bandwidth-optimal ring does it (arXiv 1910.02054,
section 7.1).

Use: `all_reduce(bytes_of_the_tensor, ranks)`. Over one rank nothing moves.
"""

from __future__ import annotations


def all_gather(full: int, ranks: int) -> int:
    """Bytes sent when every rank gets all `full` bytes, of which it had one part."""
    return full * (ranks - 1) // ranks


def reduce_scatter(full: int, ranks: int) -> int:
    """Bytes sent when `full` bytes are summed and every rank keeps one part."""
    return full * (ranks - 1) // ranks


def all_reduce(full: int, ranks: int) -> int:
    """Bytes sent when `full` bytes are summed and every rank gets all of it."""
    return 2 * full * (ranks - 1) // ranks
