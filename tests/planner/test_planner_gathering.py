"""What ZeRO-3 gathers, counted by playing plans out, against counts by hand; and each rank's forecast of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest

from tests import configs
from tests.formulas import Decoder, transformer_costs
from threed.config import Config
from threed.config.resolution import resolve
from threed.planner import memory_estimate
from threed.planner.forecast import Forecast
from threed.planner.gathering import gathering
from threed.schedules import Action, build
from threed.schedules.action import Kind

Units = list[dict[str, int]]


def layers(*sizes: int) -> Units:
    """Layers that gather so many elements, each its own."""
    return [{f"layer {number}": size} for number, size in enumerate(sizes)]


def elements(
    units: Units, plan: Sequence[Action], *, first_reads: bool = True, prefetch: int = 1
) -> int:
    """Elements of all gathers of a step. first_reads: whether the first unit's backward reads weights."""
    times = gathering(
        units, [first_reads, *[True] * (len(units) - 1)], plan, prefetch=prefetch
    ).times
    sizes = {key: size for unit in units for key, size in unit.items()}
    assert set(times) <= set(sizes)
    return sum(count * sizes[key] for key, count in times.items())


def actions(text: str) -> list[Action]:
    return [Action.parse(word) for word in text.split()]


EMBEDDING, HEAD = {"table": 1000, "positions": 10}, {"norm": 5, "table": 1000}
MODEL = [EMBEDDING, {"block 0": 100}, {"block 1": 100}, {"block 2": 100}, HEAD]


def model_from(resident: int) -> Units:
    """What is left of the model when smaller parameters are whole anyway."""
    return [{key: size for key, size in unit.items() if size >= resident} for unit in MODEL]


def of_model(plan: Sequence[Action], resident: int = 0, prefetch: int = 1) -> int:
    """Elements gathered of a tied model, whose embedding's backward reads no weights."""
    return elements(model_from(resident), plan, first_reads=False, prefetch=prefetch)


@pytest.mark.parametrize(
    ("plan", "total"),
    [
        ("F0.0 B0.0", 2 * 111 - 100),  # the last one stays whole between
        ("F0.0 B0.0 F0.1 B0.1", 2 * 122 - 1),  # and so does the first one
        ("F0.0 B0.0 F0.1 B0.1 F0.2 B0.2", 3 * 122 - 2),
        (
            "F0.0 F0.1 B0.0 B0.1",
            4 * 111 - 100,
        ),  # only F1 B0 turns: the weights are the same for both micro-batches
        ("F0.0 F0.1 B0.0 F0.2 B0.1 B0.2", 6 * 111 - 2 * 100 - 1),
        (
            "F0.0 RF0.1 GATHER0 B0.0 SB0.0 F0.1 B0.1 REDUCE0",
            2 * 122 - 1,
        ),  # what does not compute changes nothing
        ("F0.0 I0.0 W0.0 F0.1 I0.1 W0.1", 2 * 122),  # W reads none, but it is between
        ("F0.0 F1.0 B1.0 B0.0", 222),  # the other chunk is between
    ],
)
def test_gathers_of_three_layers_by_hand(plan: str, total: int) -> None:
    """Layers of 1, 10 and 100 elements: the sum shows how often each was gathered."""
    assert elements(layers(1, 10, 100), actions(plan)) == total


def test_a_chunk_of_one_layer_may_stay_whole_all_the_time() -> None:
    assert elements(layers(7), actions("F0.0 B0.0 F0.1 B0.1")) == 7
    assert elements(layers(7), actions("F0.0 F0.1 B0.0 B0.1")) == 4 * 7 - 7


@pytest.mark.parametrize("microbatches", [1, 2, 5])
def test_the_embedding_is_gathered_in_forwards_and_the_head_once_a_microbatch(
    microbatches: int,
) -> None:
    """Without a pipeline, tied: the table for the embedding's forward and for the head; positions in forwards only."""
    plan = build("1f1b", 1, microbatches).ranks[0]
    assert of_model(plan) == microbatches * (1000 + 10 + 2 * 300 + 1000 + 5)
    assert of_model(plan, resident=6) == microbatches * (1000 + 10 + 2 * 300 + 1000)
    assert of_model(plan, resident=101) == microbatches * 2 * 1000
    assert gathering(model_from(1001), [True] * 5, plan) == (Counter(), 0, [0] * 5)
    # the head again in all backwards but the first
    turns = build("gpipe", 1, microbatches).ranks[0]
    assert of_model(turns) == microbatches * (1010 + 2 * 300) + (2 * microbatches - 1) * 1005


def test_a_shared_table_that_is_still_whole_is_not_gathered_again() -> None:
    """With everything gathered ahead the embedding's table is the head's."""
    plan = actions("F0.0 B0.0")
    assert of_model(plan, prefetch=3) - of_model(plan, prefetch=4) == 1000


@pytest.mark.parametrize(
    ("stages", "schedule"), [(2, "1f1b"), (4, "1f1b"), (2, "gpipe"), (4, "gpipe")]
)
def test_turns_of_schedules(stages: int, schedule: str) -> None:
    """A rank saves one layer at every turn: its last one from F to B, its first one from B to F."""
    m = 6
    for rank, plan in enumerate(build(schedule, stages, m).ranks):
        down = sum(str(a)[0] + str(b)[0] == "FB" for a, b in pairwise(plan))
        assert down == (1 if schedule == "gpipe" else m - (stages - rank - 1))
        up = down - 1
        assert elements(layers(1, 10, 100), plan) == 2 * m * 111 - 100 * down - up


@pytest.mark.parametrize(
    ("prefetch", "most"), [(1, 1110), (2, 1210), (3, 1310), (4, 1315), (9, 1315)]
)
def test_at_most_the_layer_that_runs_and_those_ahead_are_whole(prefetch: int, most: int) -> None:
    """The worst window of layers; the table is one tensor."""
    plan = build("1f1b", 1, 3).ranks[0]
    reads = [False, True, True, True, True]
    assert gathering(MODEL, reads, plan, prefetch=prefetch).most == most
    if prefetch >= 4:
        assert most == sum({key: size for unit in MODEL for key, size in unit.items()}.values())


def test_what_is_whole_beside_each_units_backward() -> None:
    """The unit and those ahead of it; beside a unit that reads no weights, what stays for the next forward: nothing."""
    plan = build("1f1b", 1, 3).ranks[0]
    found = gathering(layers(1, 10, 100, 1000), [False, True, True, True], plan)
    assert (found.forward, found.backward) == (1100, [0, 10, 110, 1100])


def test_chunks_of_a_rank_are_gathered_by_themselves() -> None:
    """Two chunks of an interleaved plan: what each gathers, and what comes between."""
    plan = actions("F0.0 F1.0 B1.0 B0.0 F0.1 F1.1 B1.1 B0.1")
    for chunk, times in (
        (0, [3, 4]),
        (1, [4, 2]),
    ):  # chunk 0 turns at its first unit, chunk 1 twice at its last
        found = gathering(layers(1, 10), [True, True], plan, chunk=chunk)
        assert list(found.times.values()) == times
        assert found.most == 11


# ------------------------------------------------------------------------------------------------------- the forecast


def forecast(world: int, **groups: dict[str, object]) -> Forecast:
    model = {"layers": 6, "hidden": 64, "heads": 4, "seq": 16, "vocab": 50}
    train = {"global_batch": 16, "micro_batch": 2, "steps": 10}
    config = Config.model_validate(
        {"model": model, "train": train, "precision": {"dtype": "bf16"}, **groups}
    )
    return Forecast.of(resolve(config, 50, world), world)


def test_a_forecast_passes_on_what_the_run_does() -> None:
    """pp 2 x dp 4 in groups of 2, bf16, gradients in fp32, two micro-batches, all parameters under the threshold."""
    zero = {"stage": 3, "shard_size": 2, "prefetch": 2, "bucket_mib": 0.01}
    run = forecast(8, zero=zero, parallel={"pp": 2}, optim={"name": "lion"})
    costs = transformer_costs(
        Decoder(
            hidden=64,
            heads=4,
            ffn=256,
            vocab=50,
            seq=16,
            micro_batch=2,
            positions=16,
            element_bytes=2,
        ),
        6,
    )
    assert run.microbatches == 2
    for rank in run.ranks:
        (held,) = rank.layers
        part = costs[held.start : held.stop]
        count = sum(cost.parameters for cost in part)
        assert rank.bytes["gradients"] == count // 2 * 4
        # masters, and the one moment of Lion
        assert rank.bytes["optimizer"] == count // 2 * (4 + 4)
        assert rank.bytes["parameters"] == 2 * count
        # messages, and the table's slice
        assert rank.sends["pp"] == 2 * part[0].output_bytes + 50 * 64 // 2 * 4
        assert rank.sends["dp"] == (2 * count * 4) // 2 + count // 2 * 4 + count * 2 // 2
    text = run.text()
    assert "14/2 bytes per parameter" in text
    assert "sliced over 2 ranks in each of 2 groups" in text
    assert "traffic    up to pp " in text


def test_tied_tables_are_summed_between_stages_only_where_they_have_copies() -> None:
    """With one stage the table is one tensor; with three the middle stage has none."""
    assert forecast(1).ranks[0].sends == {"tp": 0, "pp": 0, "dp": 0, "cp": 0, "ep": 0}
    first, middle, last = forecast(3, parallel={"pp": 3}).ranks
    message = 2 * 16 * 64 * 2 * 8
    assert middle.sends["pp"] == 2 * message
    assert first.sends["pp"] == last.sends["pp"] == message + 50 * 64 * 4


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_plans_gather_parameters_of_stage_3_only(stage: int) -> None:
    engine = configs.engine_of(configs.config_of(configs.Case(zero=stage, layers=2)))
    for training in (True, False):
        plan = engine.blueprint.lowered(2, training)
        kinds = {action.kind for actions in plan.ranks for action in actions}
        assert (Kind.GATHER in kinds) == (stage == 3)


def test_the_largest_bucket_is_decoded() -> None:
    case = configs.Case(dp=2, zero=3, layers=2, bucket_mib=64.0, dtype="fp32")
    config = configs.config_of(case)
    config = config.model_copy(
        update={"zero": config.zero.model_copy(update={"compress_weights": "int8"})}
    )
    stages = Forecast.of(config, 2).stages
    assert stages is not None
    ((blueprint,), *_) = stages.blueprints.values()
    groups = [group for group in blueprint.layout.groups if group.sliced]
    sizes = {bucket.last - bucket.first for group in groups for bucket in group.buckets}
    assert len(sizes) > 1
    blocks = -(-max(sizes) // 256)  # of 8-bit numbers, with a scale each
    assert memory_estimate._decoding_bytes(blueprint) == blocks * (256 + 4) + 2 * 4 * max(sizes)
