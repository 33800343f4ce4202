"""What a checkpoint of very many ranks costs besides its tensors: nothing grows with the square of the world.

The real planning code runs on blueprints of one rank of each cell (place on pp and tp); the other data ranks of a cell
have the same layout and another portion of it. No process group, no tensors.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.configs import Case, engine_of, topology_of
from tests.configs import config_of as case_of
from tests.harness import run_ranks
from threed import models
from threed.checkpoint import native, sections
from threed.checkpoint.manifest import FORMAT, VERSION, check_structure, digest, file_of, joined
from threed.checkpoint.reading import Reader
from threed.checkpoint.sections import Held, held
from threed.config import Config
from threed.config.resolution import resolve
from threed.distributed.grid import Grid
from threed.distributed.topology import Topology
from threed.layers import Slicing
from threed.planner.blueprint import Blueprint, Pipeline
from threed.zero.state import Record, new_state

PARTS = ("exp_avg", "exp_avg_sq")
SMALL = {"layers": 4, "hidden": 256, "heads": 8, "seq": 64}
GPT_175B = {"layers": 96, "hidden": 12_288, "heads": 96, "seq": 2048}
SHA = "0" * 64


def config_of(model: dict[str, int], pp: int, tp: int, world: int, **sharing: Any) -> Config:
    rows = 2 * world // (pp * tp)
    config = Config.model_validate({
        "parallel": {"pp": pp, "tp": tp},
        "zero": {"stage": 3, **sharing},
        "precision": {"dtype": "bf16"},
        "model": model,
        "train": {"global_batch": rows, "micro_batch": 1, "steps": 10},
    })  # fmt: skip
    return resolve(config, 51_200, world)


class World:
    """Blueprints of any rank of a world, drawn once for each cell."""

    def __init__(self, config: Config, world: int) -> None:
        p = config.parallel
        self.config, self.grid = config, Grid(pp=p.pp, tp=p.tp, dp=world // (p.pp * p.tp))
        self.world = world

    def blueprint(self, pp: int, tp: int, dp: int = 0) -> Blueprint:
        rank = self.grid.rank_of({"pp": pp, "tp": tp, "dp": dp, "cp": 0})
        topology = Topology.on_meta(self.grid, rank)
        model = models.build(
            self.config.model, Slicing(topology.axis("tp"), True, self.config.train.seed)
        )
        layers = model.layers()
        flops = [1.0] * len(layers)
        pipeline = Pipeline.of(
            layers, topology, self.config, lambda: flops, lambda _: pytest.fail("measured")
        )
        return Blueprint.build(model, layers, topology, self.config, pipeline)

    def entries(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """What every rank leaves for the first one, by rank."""
        for pp in range(self.grid.pp):
            for tp in range(self.grid.tp):
                mine = sections_of(self.blueprint(pp, tp))
                for dp in range(self.grid.dp):
                    rank = self.grid.rank_of({"pp": pp, "tp": tp, "dp": dp, "cp": 0})
                    yield (
                        rank,
                        entry_of(
                            rank, [moved(h, dp, self.grid.dp) for h in mine], describes=dp == 0
                        ),
                    )


def sections_of(blueprint: Blueprint) -> list[Held]:
    layout = blueprint.layout
    states = [new_state(bucket, layout.policy) for bucket in layout.buckets]
    return held(layout, states)


def moved(h: Held, dp: int, size: int) -> Held:
    """What the data rank `dp` holds where the first one holds this."""
    if h.section.portions % size == 0 and size > 1:
        return replace(h, portion=dp * (h.section.portions // size) + h.portion)
    # replicas are the first of the axes of copies
    return replace(h, copy=dp * (h.copies // size) + h.copy)


def entry_of(rank: int, mine: list[Held], describes: bool) -> dict[str, Any]:
    sections = [[h.section.about, h.shapes] for h in mine] if describes else []
    holds = [[h.section.digest, h.number] for h in mine if h.number is not None]
    entry = {
        "file": file_of(rank),
        "tree": SHA,
        "sum": SHA,
        "size": 10**9,
        "holds": holds,
        "buffers": [],
        "generators": [],
    }
    return {"sections": sections, "files": [entry] if holds else []}


def opened(manifest: dict[str, Any], blueprint: Blueprint) -> int:
    """How many files a rank opens that loads, besides its share of the hashes."""
    states = [new_state(bucket, blueprint.layout.policy) for bucket in blueprint.layout.buckets]
    wanted = [
        Record(part, piece, state)
        for state in states
        for run in state.bucket.runs()
        for piece in run.pieces()
        for part in ("weight", *PARTS)
    ]
    return len(Reader(Path("nowhere"), manifest).files_of(wanted, (), None))


def saved(config: Config, world: int) -> tuple[dict[str, Any], dict[str, float]]:
    """The manifest of a world, and what it took."""
    found: dict[str, float] = {}
    sent = sorted((rank, json.dumps(entry)) for rank, entry in World(config, world).entries())
    sizes = [len(text) for _, text in sent]
    found |= {"sent, most": max(sizes), "sent, mean": sum(sizes) / world}
    began = time.perf_counter()
    body = joined([json.loads(text) for _, text in sent])
    state = {"steps": 1, "consumed": 1, "updates": 1.0, "skips": 0.0, "extra": {}}
    topology = {"pp": config.parallel.pp, "tp": config.parallel.tp, "dp": world}
    head = {
        "format": FORMAT,
        "version": VERSION,
        "config": config.model_dump(mode="json"),
        "topology": topology,
    }
    body = json.loads(json.dumps({**head, "state": state, **body}))
    check_structure(body)
    text = json.dumps({**body, "sha256": digest(body)})
    found |= {
        "planning_s": time.perf_counter() - began,
        "manifest": len(text),
        "files": len(body["files"]),
    }
    began = time.perf_counter()
    manifest = json.loads(text)
    digest(manifest)
    check_structure(manifest)
    Reader(Path("nowhere"), manifest)
    return manifest, {**found, "reading_s": time.perf_counter() - began}


def pieces_of(manifest: dict[str, Any]) -> int:
    return sum(len(line["pieces"]) for section in manifest["sections"] for line in section["lines"])


PER_RANK, PER_PIECE, HEAD = 330, 110, 8000  # bytes of a manifest


def test_a_manifest_grows_with_tensors_and_ranks_and_not_with_their_product() -> None:
    """Four times the ranks: as many bytes sent by a rank, as many files opened by it, and a row more for each."""
    found = {}
    for world in (256, 1024):
        config = config_of(SMALL, 2, 2, world, bucket_mib=0.1)
        manifest, costs = saved(config, world)
        costs["opens"] = opened(manifest, World(config, world).blueprint(1, 1, world // 8))
        assert costs["manifest"] <= PER_RANK * world + PER_PIECE * pieces_of(manifest) + HEAD
        assert costs["files"] == world
        found[world] = pieces_of(manifest), costs
    print(found)
    (pieces, small), (as_many, large) = found.values()
    assert pieces == as_many
    assert large["manifest"] - small["manifest"] <= PER_RANK * 768
    # a few describe their cell, and send some kilobytes
    assert large["sent, mean"] <= small["sent, mean"] <= 500
    assert large["sent, most"] <= small["sent, most"] + 100
    # its own file, and those with its part of what tensor ranks replicate
    assert small["opens"] <= 4
    assert large["opens"] <= 4


@pytest.mark.grid
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("pp", "tp", "opens", "halved"), [(1, 1, 1, 40), (8, 8, 4, 10)])
def test_175_billion_parameters_on_16384_ranks(pp: int, tp: int, opens: int, halved: int) -> None:
    """Under stage 3. halved: files that a rank opens which loads on half of the data ranks."""
    world = 16_384
    config, half = config_of(GPT_175B, pp, tp, world), config_of(GPT_175B, pp, tp, world // 2)
    manifest, costs = saved(config, world)
    costs["opens"] = opened(
        manifest, World(config, world).blueprint(pp - 1, tp - 1, world // (pp * tp) // 2)
    )
    costs["halved"] = opened(manifest, World(half, world // 2).blueprint(0, 0, 3))
    print(costs, pieces_of(manifest))
    assert costs["manifest"] <= PER_RANK * world + PER_PIECE * pieces_of(manifest) + HEAD
    assert costs["manifest"] <= 5 * 2**20
    assert costs["sent, mean"] <= 500
    assert costs["sent, most"] <= 2**18
    assert costs["opens"] <= opens
    assert costs["halved"] <= halved


# ------------------------------------------------------------------------------------------------------- on real ranks


def save_and_load(folder: Path) -> dict[str, Any]:
    """Bytes of the files where all ranks hold the same, and what ranks open that load."""
    topology_of(1, 1)
    whole = engine_of(case_of(Case(dp=4, zero=0, model="llama")))
    with mock.patch.object(sections, "LEAST_BYTES", 1):
        whole.save(folder / "zero0")
    whole.save(folder / "few")
    slices = engine_of(case_of(Case(dp=4, zero=3, model="llama")))
    slices.save(folder / "zero3")
    made: list[Reader] = []
    with mock.patch.object(
        native, "Reader", lambda *given: made.append(Reader(*given)) or made[-1]
    ):
        slices.load(folder / "zero3")
        whole.load(folder / "zero3")
        slices.load(folder / "few")
    sizes = {
        name: sorted(path.stat().st_size for path in (folder / name).glob("*.safetensors"))
        for name in ("zero0", "few", "zero3")
    }
    return {**sizes, "opens": [reader.opens for reader in made]}


def test_replicas_share_what_is_written_and_ranks_open_what_they_need(tmp_path: Path) -> None:
    for found in run_ranks(4, save_and_load, tmp_path):
        for name in ("zero0", "zero3"):
            assert len(found[name]) == 4
            assert found[name][-1] <= 1.1 * found[name][0], found[name]
        assert sum(found["few"]) <= sum(found["zero0"])
        assert len(found["few"]) < 4  # small parts are not worth a file for each rank
        assert found["opens"][0] == 1
        assert found["opens"][1] == 4
        assert found["opens"][2] <= len(found["few"])
