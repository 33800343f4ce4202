"""Tables [topology.N] of a preset or TOML file: values of keys for a run of N ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from threed.config.arguments import PRESETS, load, to_toml
from threed.config.groups import ConfigError
from threed.config.resolution import resolve

FILE = """
[parallel]
sequence = false

[train]
global-batch = 64
micro-batch = 4

[topology.8]
parallel.tp = 2
parallel.sequence = true
zero.stage = 3

[topology.64]
parallel = { pp = 4, schedule = "gpipe" }
recompute.mode = "full"
train.micro_batch = 1
"""


@pytest.fixture
def file(tmp_path: Path) -> list[str]:
    (tmp_path / "mine.toml").write_text(FILE)
    return ["--config", str(tmp_path / "mine.toml")]


def test_the_number_of_ranks_selects_a_topology(file: list[str]) -> None:
    config, options = load(file, world_size=8)
    assert (config.parallel.tp, config.parallel.sequence, config.zero.stage) == (2, True, 3)
    assert options.notice == ""
    assert (config.parallel.pp, config.train.micro_batch) == (1, 4)
    config, _ = load([*file, "--world-size", "64"], world_size=1)  # the flag comes before the ranks
    assert (config.parallel.pp, config.parallel.schedule) == (4, "gpipe")
    assert (config.recompute.mode, config.train.micro_batch) == ("full", 1)
    assert (config.parallel.tp, config.parallel.sequence, config.zero.stage) == (1, False, 1)


def test_without_a_table_for_the_ranks_the_other_keys_apply(file: list[str]) -> None:
    for world in (None, 1, 16):
        config, options = load(file, world_size=world, choose_topology=True)
        assert (config.parallel.tp, config.parallel.pp, config.zero.stage) == (1, 1, 1)
        notice = f"topology   mine has none for {world} ranks, only for 8, 64: its other keys apply"
        assert options.notice == (notice if world else "")
    config, _ = load(
        [*file, "--train.global-batch", "20"], world_size=15, choose_topology=True
    )  # chosen as for a file without tables
    assert config.parallel.pp == 3


def test_flags_override_a_topology_key_by_key(file: list[str]) -> None:
    flags = ["--parallel.tp", "4", "--zero.stage", "1"]
    config, options = load([*file, *flags], world_size=8)
    assert (config.parallel.tp, config.parallel.sequence, config.zero.stage) == (4, True, 1)
    assert options.flags == {"config", "parallel.tp", "zero.stage"}


def test_an_elastic_job_has_the_topology_of_its_maximum_size(file: list[str]) -> None:
    for world in (24, 56, 64):
        config, _ = load(
            [*file, "--train.global-batch", "1680"],
            world_size=world, local_world=8, machines=(3, 8),
        )  # fmt: skip
        assert (config.parallel.pp, config.train.micro_batch) == (4, 1)


def test_a_run_records_the_topology_as_keys(file: list[str], tmp_path: Path) -> None:
    config = resolve(load(file, world_size=8)[0], vocab=257, world_size=8)
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert load(["--config", str(tmp_path / "config.toml")], world_size=8)[0] == config
    with pytest.raises(ConfigError, match=r"use --parallel\.dp 32"):  # its keys are no suggestions
        load(["--config", str(tmp_path / "config.toml")], world_size=64)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("topology = 8", "topology is not a table; write [topology.8]"),
        ("[topology]\n8 = 2", "topology.8: not a table for a number of ranks"),
        ("[topology.all]\nparallel.tp = 2", "topology.all: not a table for a number of ranks"),
        ("[topology.08]\nparallel.tp = 2", "topology.08: not a table for a number of ranks"),
        ("[topology.8]\ntp = 2", "topology.8: tp is outside any group; write group.key, such as"),
        ("[topology.9]\noptim.lr = 1e-3", "topology.9: optim.lr must not depend on the number of"),
        ("[topology.9]\ntrain.global-batch = 8", "put it under [train]"),
        ("[topology.8]\nparallel.tpp = 2", "--parallel.tpp (in FILE): no such key"),
        ("[topology.8]\nzero.stage = 4", "--zero.stage 4 (in FILE)"),
        ("[topology.8]\nzero.bucket-mib = 1\nzero.bucket_mib = 2", "FILE: zero has both bucket"),
    ],
)
def test_an_invalid_topology_is_a_problem(text: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(["--config", str(path)], world_size=8)
    (found,) = caught.value.problems
    assert problem in found.replace(str(path), "FILE")
    assert str(path) in found


@pytest.mark.parametrize("world", [8, 64, 512])
@pytest.mark.parametrize(
    "name", ["llama3-8b", "llama3-70b", "qwen3-8b", "qwen3-32b", "gemma3-12b", "mistral-7b"]
)
def test_presets_of_published_models_have_topologies(name: str, world: int) -> None:
    assert f"[topology.{world}]" in (PRESETS / f"{name}.toml").read_text()
    config, _ = load(["--preset", name], world_size=world)
    tokens = config.train.global_batch * config.model.seq
    assert (config.run.name, tokens) == (name, 2**22)
