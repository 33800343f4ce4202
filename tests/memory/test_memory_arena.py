"""Slots of one buffer: sized by the first, used again and again, replaced by a larger buffer when they do not do."""

from __future__ import annotations

import pytest
import torch

from threed.memory.arena import ALIGN, Arena

CPU = torch.device("cpu")


def test_slots_lie_in_one_buffer_and_do_not_overlap() -> None:
    arena = Arena(4, CPU)
    slots = [arena.take(10, torch.float32) for _ in range(4)]
    for n, slot in enumerate(slots):
        slot.fill_(n)
    assert [slot.unique().tolist() for slot in slots] == [[0], [1], [2], [3]]
    assert len({slot.untyped_storage().data_ptr() for slot in slots}) == 1
    assert slots[0].untyped_storage().nbytes() == 4 * ALIGN  # 40 bytes, aligned
    assert arena.allocations == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
def test_slots_are_used_again_whatever_they_hold(dtype: torch.dtype) -> None:
    arena = Arena(2, CPU)
    first = arena.take(100, torch.float64)
    at = arena.data_ptr
    for size in (1, 7, 100):
        slot = arena.take(size, dtype)
        assert slot.shape == (size,)
        assert slot.dtype == dtype
        assert slot.data_ptr() != first.data_ptr()
        arena.give(slot)
    arena.give(first)
    assert (arena.data_ptr, arena.allocations) == (at, 1)


def test_more_slots_than_were_planned_make_one_larger_buffer() -> None:
    arena = Arena(2, CPU)
    old = [arena.take(8, torch.float32).fill_(n) for n in range(2)]
    new = arena.take(8, torch.float32).fill_(9)
    assert (arena.count, arena.allocations) == (4, 2)
    assert [slot.unique().item() for slot in (*old, new)] == [0, 1, 9]
    for slot in (*old, new):
        arena.give(slot)  # those of the old buffer are gone
    again = [arena.take(8, torch.float32) for _ in range(4)]
    assert {slot.untyped_storage().data_ptr() for slot in again} == {arena.data_ptr}
    assert arena.allocations == 2


def test_a_larger_slot_makes_a_buffer_of_such() -> None:
    arena = Arena(3, CPU)
    arena.give(arena.take(8, torch.float32))
    large = arena.take(1000, torch.float32)
    assert (arena.nbytes, arena.count, arena.allocations) == (4032, 3, 2)
    arena.give(large)


def test_nothing_is_allocated_before_the_first_slot() -> None:
    assert Arena(10**9, CPU).data_ptr == 0
