"""What the tests of checkpoints share: a few more steps, the state of a rank to compare, and older formats."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from torch import Tensor

from tests.configs import batch, share
from threed.buffers import bytes_of
from threed.checkpoint.checksum import checksum, tree_hash
from threed.checkpoint.files import sha256, stream_tensors
from threed.checkpoint.manifest import digest, file_of, read_manifest
from threed.checkpoint.reading import Reader
from threed.engine import Engine
from threed.sharding import Piece, boxes
from threed.zero.records import read, records


def train(engine: Engine, count: int) -> list[float]:
    """The losses of `count` more steps."""
    rows = engine.config.train.global_batch
    return [
        engine.step(share(batch(engine.steps, rows), engine.topology)).loss for _ in range(count)
    ]


def state_of(engine: Engine) -> list[tuple[str, str, Tensor]]:
    """A copy of every box of weight and moments on this rank."""
    found = read(engine.optimizer, records(engine.optimizer))
    return [(r.part, r.piece.name, values.clone()) for r, values in found]


def distance(one: list[tuple[str, str, Tensor]], other: list[tuple[str, str, Tensor]]) -> float:
    """The largest difference of two states of one topology."""
    assert [a[:2] for a in one] == [b[:2] for b in other]
    return max(
        (float((a[2] - b[2]).abs().max()) for a, b in zip(one, other, strict=True)), default=0.0
    )


def hashes_of(file: Path) -> dict[str, str | None]:
    """What a manifest says of a file's contents."""
    return {"tree": tree_hash(file), "sum": checksum(file)}


def rewrite(path: Path, version: int, ranks: int) -> None:
    """Makes a checkpoint one of version 1 or 2, of as many files, each with a slice of every tensor in boxes."""
    manifest = read_manifest(path)
    with Reader(path, manifest) as reader:
        states = [reader.generators(rank) for rank in range(ranks)]
        held = {name: reader.buffer(name) for name in reader.buffers}
        full = {
            (part, name): reader.full(part, name)
            for name, parts in reader.parts.items()
            for part in sorted(parts)
        }
    for file in path.glob("*.safetensors"):
        file.unlink()
    files = [
        write_listed(
            path / file_of(rank),
            full,
            (rank, ranks),
            held if rank == 0 else {},
            states[rank],
            version,
        )
        for rank in range(ranks)
    ]
    head = {key: manifest[key] for key in ("format", "config", "topology", "state")}
    body = json.loads(json.dumps({**head, "version": version, "files": files}))
    (path / "manifest.json").write_text(json.dumps({**body, "sha256": digest(body)}))


def write_listed(
    file: Path, full: dict[tuple[str, str], Tensor], of: tuple[int, int], held: dict[str, Tensor],
    states: dict[str, Tensor], version: int,
) -> dict[str, Any]:  # fmt: skip
    """One of the files, and its entry of the manifest."""
    listed, tensors = [], list[Tensor]()
    for (part, name), value in full.items():
        piece = Piece(name, tuple(value.shape), (0,) * value.dim(), tuple(value.shape))
        lo, hi = (math.prod(value.shape) * rank // of[1] for rank in (of[0], of[0] + 1))
        for box in boxes(piece, lo, hi):
            listed.append([part, name, piece.shape, box.start, box.size])
            tensors.append(
                value[tuple(slice(a, a + n) for a, n in zip(box.start, box.size, strict=True))]
            )
    named = {str(number): tensor for number, tensor in enumerate(tensors)}
    entry: dict[str, Any] = {"boxes": listed}
    if version > 1:
        named |= {f"buffer/{n}": bytes_of(v) for n, v in held.items()} | {
            f"generator/{n}": v for n, v in states.items()
        }
        about = [[n, str(v.dtype).removeprefix("torch."), list(v.shape)] for n, v in held.items()]
        entry |= {"buffers": about, "generators": list(states)}
    stream_tensors(file, {n: (v.dtype, tuple(v.shape)) for n, v in named.items()}, named.values())
    return {"file": file.name, "sha256": sha256(file), "size": file.stat().st_size, **entry}
