"""Weights that come from elsewhere, some rows at a time, become a native checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.checkpoints import train
from tests.configs import Case, engine_of
from tests.configs import config_of as case_of
from tests.harness import run_ranks
from threed import models
from threed.checkpoint import lazy_tensors
from threed.checkpoint.files import CheckpointError
from threed.checkpoint.lazy_tensors import MemoryTensor, read_all
from threed.checkpoint.manifest import read_manifest
from threed.checkpoint.reading import Reader
from threed.distributed import collectives
from threed.distributed.sharding import spec_of
from threed.interop.huggingface.native_writer import write_tensors
from threed.layers import Slicing


class Given:
    """Weights in memory, as a `TensorSource`."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self.tensors = {name: MemoryTensor(value) for name, value in values.items()}
        self.shapes = {name: tensor.shape for name, tensor in self.tensors.items()}
        self.parts = dict.fromkeys(values, ("weight",))

    def tensor(self, part: str, name: str) -> MemoryTensor:
        return self.tensors[name]


def imported(folder: Path) -> list[str]:
    """Weights from elsewhere, in one file and in several, on two tensor ranks: what is not as it was written."""
    engine, wrong = engine_of(case_of(Case(1, 1, 2, model="llama", layers=2))), []
    names = {name: tuple(value.shape) for name, value in meta_weights().items()}
    values = {
        name: torch.randn(shape, dtype=torch.float64) for name, shape in sorted(names.items())
    }
    for limit in (10**9, 20_000):
        path = folder / f"{limit} on {engine.topology.rank}"
        state = {"extra": {"from": "afar"}}
        write_tensors(path, engine.config, Given(values), state=state, file_bytes=limit)
        collectives.barrier(engine.topology.axis("world"))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            extra = engine.load(folder / f"{limit} on 0")
        told = [str(one.message) for one in caught if "they begin at zero" in str(one.message)]
        full, manifest = engine.full_state_dict(), read_manifest(path)
        facts = [extra == {"from": "afar"}, engine.steps == 0, not told]
        facts += [len(manifest["files"]) == 1 if limit == 10**9 else len(manifest["files"]) > 4]
        facts += (
            [all(torch.equal(full[name], value) for name, value in values.items())] if full else []
        )
        wrong += [] if all(facts) else [f"{limit}: {facts}"]
        train(engine, 1)
    return wrong


def meta_weights() -> dict[str, Tensor]:
    """The full weights of the same model, for their names and shapes."""
    layers = models.build(case_of(Case(model="llama", layers=2)).model, Slicing()).layers()
    pieces = (piece for layer in layers for p in layer.parameters() for piece in spec_of(p).pieces)
    return {piece.name: torch.empty(piece.shape, device="meta") for piece in pieces}


def test_weights_from_elsewhere_become_a_checkpoint(tmp_path: Path) -> None:
    torch.manual_seed(3)
    assert run_ranks(2, imported, tmp_path) == [[], []]


class Broken(MemoryTensor):
    """A tensor whose last row cannot be read."""

    def read(self, start: tuple[int, ...], out: Tensor) -> None:
        if start[0] + out.shape[0] == self.shape[0]:
            raise CheckpointError("the source is damaged")
        super().read(start, out)


def test_an_import_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lazy_tensors, "SLAB_BYTES", 12)  # a row at a time
    config, good = case_of(Case()), {"a": torch.ones(2, 3), "none": torch.empty(0, 3)}
    for a, error, text in (
        (MemoryTensor(torch.ones(2, 2)), ValueError, "not complete"),
        (MemoryTensor(torch.ones(1, 3)), ValueError, "not complete"),
        (MemoryTensor(torch.ones(0, 3)), ValueError, "not complete"),
        (MemoryTensor(torch.ones(3, 3)), ValueError, "more tensors than announced"),
        (MemoryTensor(torch.ones(2, 3, dtype=torch.int64)), CheckpointError, "is not supported"),
        (Broken(torch.ones(2, 3)), CheckpointError, "the source is damaged"),
    ):
        source = Given(good)
        source.tensors["a"] = a
        with pytest.raises(error, match=text):
            write_tensors(tmp_path / "out", config, source)
        assert list(tmp_path.iterdir()) == []
    write_tensors(tmp_path / "out", config, Given(good))
    reader = Reader(tmp_path / "out", read_manifest(tmp_path / "out"))
    assert read_all(reader.tensor("weight", "a")).tolist() == [[1.0] * 3] * 2
