"""Measures the peak memory of `threed convert` in every direction, and compares the results.

    python -m benchmarks.conversion_memory --gib 2                       # a Llama of 2 GiB in fp32
    python -m benchmarks.conversion_memory --gib 2 --arch gpt            # a GPT-2, whose matrices are transposed

The program writes a folder of random weights. Each conversion then runs in a separate process,
whose anonymous memory (RssAnon in /proc/self/status, which excludes mapped files) is read every 5
ms. After a conversion back, all bits must be the same. One JSON record per conversion is printed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from threed.config import ModelConfig
from threed.config.resolution import resolve_model
from threed.interop.convert import convert
from threed.interop.huggingface.export import write_folder
from threed.interop.huggingface.layouts import config_of, entries, native_shapes

STEPS = (
    ("theirs", "native", "native", None),
    ("native", "back", "hf", None),
    ("theirs", "half", "hf", "bf16"),
    ("native", "half-too", "hf", "bf16"),
)


@dataclass(frozen=True)
class RandomTensor:
    """A tensor whose random values are generated when it is read."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    def read(self, start: tuple[int, ...], out: Tensor) -> None:
        """Fills `out` with values that are a function of the name and the position."""
        text = f"{self.name} {start}"
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")
        out.copy_(torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)) * 0.02)


class RandomSource:
    """The weights of a model, which are generated when they are read."""

    def __init__(self, model: ModelConfig) -> None:
        self.shapes = native_shapes(entries(model))
        self.parts = dict.fromkeys(self.shapes, ("weight",))

    def tensor(self, part: str, name: str) -> RandomTensor:
        """Returns a weight."""
        return RandomTensor(name, self.shapes[name])


def model_of(arch: str, gib: float) -> ModelConfig:
    """Returns a model of about `gib` GiB in fp32.

    Its embedding has an eighth of this size.
    """
    keys = {
        "arch": arch,
        "hidden": 2048,
        "heads": 16,
        "ffn": 8192,
        "vocab": int(16_384 * gib),
        "seq": 1024,
    }
    layers = 1
    while True:
        model = resolve_model(ModelConfig.model_validate(keys | {"layers": layers}))
        if sum(torch.Size(entry.shape).numel() for entry in entries(model)) * 4 >= gib * 2**30:
            return model
        layers += 1


def peak_while(src: Path, dst: Path, to: str, dtype: str | None) -> dict[str, float]:
    """Runs a conversion; returns MiB of anonymous memory before it and at its peak, and seconds."""
    found, over = [anonymous_mib()], threading.Event()

    def look() -> None:
        while not over.wait(0.005):
            found.append(anonymous_mib())

    watcher = threading.Thread(target=look)
    watcher.start()
    began = time.perf_counter()
    convert(src, dst, to=to, dtype=dtype)
    seconds = time.perf_counter() - began
    over.set()
    watcher.join()
    return {
        "before_mib": round(found[0]),
        "peak_mib": round(max(found)),
        "seconds": round(seconds, 1),
    }


def anonymous_mib() -> float:
    """Returns the anonymous memory of this process (RssAnon), in MiB."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) / 1024


def hashes(folder: Path) -> dict[str, str]:
    """Returns the sha256 of every tensor in a folder."""
    return {
        name: digest
        for file in sorted(folder.glob("*.safetensors"))
        for name, digest in _hashes(file)
    }


def _hashes(file: Path) -> Iterator[tuple[str, str]]:
    with safe_open(file, framework="pt") as opened:
        for name in list(opened.keys()):
            values, digest = opened.get_slice(name), hashlib.sha256()
            for first in range(0, values.get_shape()[0], 1024):
                rows = values[first : first + 1024].contiguous()
                digest.update(rows.view(-1).view(torch.uint8).numpy().data)
            yield name, digest.hexdigest()


def main() -> None:
    """Runs and measures all conversions."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--arch", default="llama")
    parser.add_argument("--folder", help="where to write; default: a temporary folder")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        src, dst, to, dtype = arguments.one
        print(json.dumps(peak_while(Path(src), Path(dst), to, dtype or None)))
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as place:
        model = model_of(arguments.arch, arguments.gib)
        write_folder(Path(place, "theirs"), entries(model), RandomSource(model), config_of(model))
        sizes = sum(file.stat().st_size for file in Path(place, "theirs").glob("*.safetensors"))
        for src, dst, to, dtype in STEPS:
            words = [str(Path(place, src)), str(Path(place, dst)), to, dtype or ""]
            command = [sys.executable, "-m", "benchmarks.conversion_memory", "--one", *words]
            said = json.loads(
                subprocess.run(command, check=True, capture_output=True, text=True).stdout
            )
            print(
                json.dumps(
                    {
                        "arch": arguments.arch,
                        "gib": round(sizes / 2**30, 2),
                        "from": src,
                        "to": dst,
                        **said,
                    }
                )
            )
        for one, other in (("theirs", "back"), ("half", "half-too")):
            same = hashes(Path(place, one)) == hashes(Path(place, other))
            print(json.dumps({"arch": arguments.arch, "same bits": [one, other], "is": same}))


if __name__ == "__main__":
    main()
