"""Which exchanges of sequence parallelism overlap a matrix product: Llama-8B layers on 8 tensor ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest

from tests.accelerator.order import MAIN, Entry, Order
from tests.accelerator.test_order import config_of, nothing, run, seconds
from threed.config import Config
from threed.distributed import collectives
from threed.layers import sequence_chunks

# bytes of an exchange in bf16: the gathered tensor [8192 1 4096], and a rank's eighth of it
EXCHANGE = 8192 * 4096 * 2 * 9 // 8
Plant = Callable[[ExitStack], None]


def without_chunks(stack: ExitStack) -> None:
    """Products wait for the whole input, and reductions for the whole product."""
    stack.enter_context(patch.object(sequence_chunks, "count", lambda *_: 1))


def waiting_at_once(stack: ExitStack) -> None:
    """Every collective is waited for when it has been started."""
    for name in ("start_all_gather", "start_reduce_scatter"):
        start = getattr(collectives, name)

        def waited(*args: Any, start: Any = start, **keywords: Any) -> Any:
            pending = start(*args, **keywords)
            return collectives.done(pending.wait())

        stack.enter_context(patch.object(collectives, name, waited))


def without_lookahead(stack: ExitStack) -> None:
    """The gather of a chunk starts after the product of the chunk before."""

    def gathers(shard: Any, axis: Any, outs: list[Any]) -> Iterator[Any]:
        for part, out in zip(shard.chunk(len(outs)), outs, strict=True):
            yield collectives.start_all_gather(part, axis, out).wait()

    stack.enter_context(patch.object(sequence_chunks, "_gathers", gathers))


def tensor_config(layers: int, gathered: bool | str = "auto") -> Config:
    """Llama-3 8B on 8 tensor ranks, with fewer layers."""
    parallel = {"tp": 8, "sequence": True}
    return config_of(
        0, layers, parallel=parallel, train={"global_batch": 1}, recompute={"gathered": gathered}
    )


@functools.cache
def order_of(layers: int, plant: Plant = nothing, gathered: bool | str = "auto") -> Order:
    """Returns the order of a step."""
    return run(tensor_config(layers, gathered), plant).order


def exchanges(order: Order) -> list[list[Entry]]:
    """Returns the collectives of every exchange: one, or one per chunk."""
    found: list[list[Entry]] = []
    left = 0
    for entry in order.step:
        if entry.stream not in (MAIN, "reduce") and entry.nbytes > EXCHANGE // 16:
            found += [] if left else [[]]
            found[-1].append(entry)
            left = (left + entry.nbytes) % EXCHANGE
    assert left == 0
    return found


def overlapped(order: Order) -> list[float]:
    """Returns the share of each exchange's bytes that a product may overlap: neither waits for the other."""
    products = [e for e in order.step if e.stream == MAIN and e.flops and "attention" not in e.name]
    before = {product: order.waits(product) for product in products}
    shares = []
    for exchange in exchanges(order):
        share = 0.0
        for entry in exchange:
            waits = order.waits(entry)
            if any(p not in waits and entry not in before[p] for p in products):
                share += entry.nbytes / EXCHANGE
        shares.append(share)
    return shares


def per_layer(plant: Plant = nothing, gathered: bool | str = "auto") -> tuple[int, int]:
    """Returns a layer's exchanges, and how many of them overlap products with at least half of their bytes."""
    one, two = (overlapped(order_of(layers, plant, gathered)) for layers in (1, 2))
    return len(two) - len(one), sum(s >= 0.5 for s in two) - sum(s >= 0.5 for s in one)


def test_exchanges_of_a_layer_overlap_products() -> None:
    kept, again = per_layer(gathered=False), per_layer()
    print(
        f"overlapped: {kept[1]} of {kept[0]} exchanges a layer; with inputs gathered again {again}"
    )
    assert kept[0] == 8
    assert kept[1] >= 6
    assert again[0] == 10
    assert again[1] >= 8


@pytest.mark.parametrize(
    ("plant", "most"), [(without_chunks, 2), (waiting_at_once, 0), (without_lookahead, 3)]
)
def test_exchanges_that_overlap_nothing_are_found(plant: Plant, most: int) -> None:
    assert per_layer(plant, gathered=False) == (8, most)


def test_a_modelled_step_is_shorter() -> None:
    now, before = (
        [max(order_of(n, plant).ends(seconds).values()) for n in (1, 2)]
        for plant in (nothing, without_chunks)
    )
    layer, layer_before = now[1] - now[0], before[1] - before[0]
    print(f"a layer: {layer_before * 1e3:.2f} ms without chunks, now {layer * 1e3:.2f} ms")
    assert layer < layer_before


def test_a_layer_keeps_a_part_of_its_gathered_inputs() -> None:
    """Two gathered inputs a layer, of which 7 of 8 parts are not kept."""
    kept, again = (
        [run(tensor_config(n, gathered)).memory.most for n in (1, 2)] for gathered in (False, True)
    )
    saved = (kept[1] - kept[0]) - (again[1] - again[0])
    print(f"a layer keeps {saved / 2**20:.0f} MiB less")
    assert saved >= 0.9 * 2 * 7 / 9 * EXCHANGE
