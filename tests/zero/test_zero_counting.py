"""The parts of gradient reduction alone: counts, launch queues, reductions, late gradients.

All run in one process without process groups.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from threed.distributed.sharding import ShardSpec, parameter, vector
from threed.distributed.topology import Topology
from threed.memory.tiers import StagedBuffer
from threed.zero import layout
from threed.zero.contributions import Contributions, LaunchQueue
from threed.zero.early_updates import Early
from threed.zero.gather import Gatherer
from threed.zero.late_gradients import LateGradients
from threed.zero.layout import Bucket, DataAxes, Layout, Policy, Slot
from threed.zero.reducer import Reducer
from threed.zero.reductions import PLAIN, Reductions

# ----------------------------------------------------------------------------------------- counts


def in_round(counts: Contributions, passes: int, added: int, late: int = 0) -> list[bool]:
    """Runs a round; returns for each contribution whether it made the gradient complete."""
    counts.begin_round(passes)
    complete = [counts.add() for _ in range(added)]
    for _ in range(late):
        counts.add_late()
    return complete


def test_a_gradient_is_complete_after_the_expected_contributions_of_all_passes() -> None:
    counts = Contributions(2)
    assert counts.begin_round(3)
    assert [counts.add() for _ in range(6)] == [False] * 5 + [True]
    assert counts.begin_round(1)
    assert [counts.add() for _ in range(2)] == [False, True]


@pytest.mark.parametrize(("dynamic", "expected"), [(False, 4), (True, 1)])
def test_only_a_dynamic_count_decreases(dynamic: bool, expected: int) -> None:
    counts = Contributions(1)
    in_round(counts, passes=2, added=3, late=4)
    counts.learn(2, dynamic)
    assert counts.per_pass == 4  # 7 of two passes, rounded up
    in_round(counts, passes=2, added=2)
    counts.learn(2, dynamic)
    assert counts.per_pass == expected


def test_an_unknown_number_is_never_complete_and_stays_unknown() -> None:
    counts = Contributions(1, known=False)
    assert counts.begin_round(1)
    assert not any(counts.add() for _ in range(5))
    counts.learn(1, dynamic=False)
    counts.restore(3)
    assert counts.per_pass is None
    assert counts.counted is None


def test_a_parameter_that_was_not_used_is_not_waited_for() -> None:
    counts = Contributions(1)
    in_round(counts, passes=1, added=0)
    counts.learn(1, dynamic=True)
    assert not counts.begin_round(1)
    assert not counts.add()
    assert counts.used


def test_a_checkpoint_holds_only_counts_that_are_not_those_of_the_model() -> None:
    counts = Contributions(2)
    assert counts.counted is None
    in_round(counts, passes=1, added=3)
    counts.learn(1, dynamic=False)
    assert counts.counted == 3
    other = Contributions(2)
    other.restore(counts.counted)
    assert (other.per_pass, other.used) == (3, False)
    other.restore(None)
    assert other.per_pass == 2


# --------------------------------------------------------------------------------- launch queues


def queue_of(*buckets: list[Contributions]) -> LaunchQueue:
    """A queue of buckets, numbered 10, 11, ..., whose gradients expect one contribution each."""
    parameters = list(dict.fromkeys(counts for bucket in buckets for counts in bucket))
    return LaunchQueue((0,), parameters, {10 + n: bucket for n, bucket in enumerate(buckets)})


def launched(queue: LaunchQueue) -> list[int]:
    """Launches all ready buckets; returns their numbers."""
    found = []
    while queue.is_ready:
        found.append(queue.take())
    return found


def complete(queue: LaunchQueue, counts: Contributions) -> list[int]:
    assert counts.add()
    queue.mark_complete(counts)
    return launched(queue)


def test_buckets_are_launched_in_order_whatever_is_complete_first() -> None:
    a, b, c = (Contributions() for _ in range(3))
    queue = queue_of([a], [b], [c])
    queue.restart(1)
    assert complete(queue, c) == []
    assert complete(queue, a) == [10]
    assert complete(queue, b) == [11, 12]
    assert queue.is_done


def test_a_bucket_waits_for_every_gradient_in_it_also_for_one_that_is_cut() -> None:
    a, cut, b = (Contributions() for _ in range(3))
    queue = queue_of([a, cut], [cut], [cut, b])
    queue.restart(1)
    assert complete(queue, a) == []
    assert complete(queue, cut) == [10, 11]
    assert complete(queue, b) == [12]


def test_a_gradient_is_late_when_its_first_bucket_was_launched_in_this_round() -> None:
    a, cut, b, nowhere = (Contributions() for _ in range(4))
    queue = queue_of([a, cut], [cut, b])
    for begin in (queue.restart, queue.next_round):
        begin(1)
        assert not any(queue.is_late(counts) for counts in (a, cut, b, nowhere))
        queue.launched += 1
        assert [queue.is_late(c) for c in (a, cut, b, nowhere)] == [True, True, False, False]


def test_rounds_and_backwards_are_counted_until_the_step_begins_again() -> None:
    queue = queue_of([Contributions()])
    queue.backwards = 3
    queue.restart(1)
    assert queue.is_untouched
    queue.launched += 1
    assert not queue.is_untouched
    queue.next_round(1)
    assert (queue.backwards, queue.rounds, queue.launched) == (2, 1, 0)
    assert not queue.is_untouched
    queue.restart(1)
    assert (queue.backwards, queue.is_untouched) == (2, True)


def test_the_counts_of_a_queue_are_learnt_also_without_a_bucket() -> None:
    inside, outside = Contributions(), Contributions()
    queue = LaunchQueue((0,), [inside, outside], {0: [inside]})
    queue.restart(1)
    for counts in (inside, outside):
        counts.add()
        counts.add()
    queue.learn(1, dynamic=False)
    assert (inside.per_pass, outside.per_pass) == (2, 2)


# ------------------------------------------------------------------- reductions and late gradients


class Vectors(nn.Module):
    """Vectors of 64 elements."""

    def __init__(self, number: int) -> None:
        super().__init__()
        for n in range(number):
            spec = ShardSpec((vector(f"v{n}", 64),))
            self.register_parameter(f"v{n}", parameter(spec, (64,)))


def vectors(number: int = 3) -> tuple[Layout, Vectors]:
    """A layout with one vector per bucket, the last vector first."""
    unit, alone = Vectors(number), Topology().axis("dp")
    policy = Policy(1, DataAxes(alone, alone, alone), 256, torch.float32, torch.float32)
    plan = layout.build([unit], {}, Topology(), policy)
    assert [[slot.spec.name for slot in bucket.slots] for bucket in plan.buckets] == [
        [f"v{n}"] for n in reversed(range(number))
    ]
    return plan, unit


def values(plan: Layout) -> list[float]:
    """The first element of each bucket's slice of gradients."""
    return [float(bucket.grad.fetch().wait()[0]) for bucket in plan.buckets]


def test_reductions_are_stored_in_order_and_their_windows_released() -> None:
    plan, _ = vectors()
    released, complete = list[Tensor](), list[Bucket]()

    def update(bucket: Bucket, staged: StagedBuffer) -> bool:
        complete.append(bucket)
        return False

    reductions = Reductions(plan, PLAIN, released.append, update)
    windows = [torch.full((64,), float(n + 1)) for n in range(3)]
    for bucket, window in zip(plan.buckets, windows, strict=True):
        reductions.make_room(bucket)
        reductions.launch(bucket, window, add=False, complete=bucket is not plan.buckets[1])
    got = reductions.finish()
    assert values(plan) == [1.0, 2.0, 3.0]
    assert complete == [plan.buckets[0], plan.buckets[2]]
    assert [id(window) for window in released] == [id(window) for window in windows]
    assert [float(gradient.squares) for gradient in got] == [64.0, 256.0, 576.0]


def test_a_slice_is_not_read_while_its_reduction_is_in_flight() -> None:
    plan, _ = vectors(1)
    released, bucket = list[Tensor](), plan.buckets[0]
    reductions = Reductions(plan, PLAIN, released.append, lambda *_: False)
    reductions.launch(bucket, torch.ones(64), add=False, complete=False)
    assert not released
    reductions.make_room(bucket)
    assert len(released) == 1
    reductions.launch(bucket, torch.ones(64), add=True, complete=True)
    assert [float(gradient.squares) for gradient in reductions.finish()] == [256.0]


def test_late_gradients_are_added_to_the_slices_of_their_buckets_once() -> None:
    plan, _ = vectors()
    first, _, last = plan.slots
    late = LateGradients(plan, PLAIN, None)
    late.add(last, torch.ones(64))
    late.add(first, torch.ones(64, dtype=torch.float64))
    late.add(first, torch.ones(64))
    assert [bucket for bucket, _ in late.reduce()] == [plan.buckets[0], plan.buckets[2]]
    assert values(plan) == [2.0, 0.0, 1.0]
    assert not list(late.reduce())
    late.add(first, torch.ones(64))
    late.clear()
    assert not list(late.reduce())


# ----------------------------------------------------------------------------------- early updates


class Taking(Early):
    """Takes all complete slices."""

    def __init__(self) -> None:
        self.steps, self.taken = 0, list[Bucket]()

    def begin(self) -> None:
        self.steps += 1

    def take(self, bucket: Bucket, gradient: StagedBuffer) -> bool:
        self.taken.append(bucket)
        return True


def test_updates_begin_in_the_backward_after_the_first_step() -> None:
    plan, unit = vectors()
    early = Taking()
    reducer = Reducer(plan, early=early)
    for step in range(2):
        reducer.begin(1)
        sum((step + 1.0) * param.sum() for param in unit.parameters()).backward()
        assert early.taken == plan.buckets[:step]  # the others are in flight
        reducer.finish()
        assert early.taken == plan.buckets * step
        early.taken.clear()
    assert early.steps == 2


def test_parameters_whose_gradients_are_complete_are_reported() -> None:
    plan, unit = vectors(2)
    complete = list[str]()

    class Listener(Gatherer):
        def gradient_complete(self, slot: Slot) -> None:
            complete.append(slot.spec.name)

    reducer = Reducer(plan, gatherer=Listener(plan))
    reducer.begin(2)
    for number in range(2):
        assert complete == []
        unit.v1.sum().backward()
        unit.v0.sum().backward() if number else None
    assert complete == ["v1"]
    unit.v0.sum().backward()
    assert complete == ["v1", "v0"]
    reducer.finish()
