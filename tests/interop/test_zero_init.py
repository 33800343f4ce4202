"""zero.Init: values, training and memory are those of a plain module, and no rank holds the model."""

from __future__ import annotations

import copy
import errno
import gc
import os
import pickle
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import threed
from tests.disks import tmpfs
from tests.harness import run_ranks
from threed.config import Config, ConfigError
from threed.distributed import collectives
from threed.distributed.topology import world_axis
from threed.interop.deepspeed.api import init
from threed.interop.deepspeed.api.init import Init, share_changes
from threed.memory.mapped import region_of
from threed.models import Wrapped

WIDTH = 16


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    """A model with the usual ways in which parameters are created and initialized."""

    def __init__(self, outside: nn.Module | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        first = Block()
        self.blocks = nn.ModuleList([first, copy.deepcopy(first), Block()])
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight  # tied
        self.scale = nn.Parameter(torch.rand(WIDTH, 3).t())  # not contiguous
        self.scale.data.mul_(2.0)  # reads and writes: would be wrong if two ranks did it
        self.outside = outside or nn.Linear(WIDTH, WIDTH)
        self.register_buffer("offset", torch.randn(WIDTH))
        self.blocks[2].up.bias = nn.Parameter(torch.full((4 * WIDTH,), 0.5))  # replaced
        self.blocks[2].down._parameters["bias"] = nn.Parameter(torch.ones(WIDTH))
        self.apply(self._init_weights)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.normal_(0, 0.02)

    def forward(self, x: Tensor) -> Tensor:
        y = self.outside(self.embed(x)) + self.offset + self.scale.sum(0)
        for block in self.blocks:
            y = block(y)
        return self.head(y).square().mean()


def build(seed: int, inside: bool = True, **arguments: Any) -> tuple[Net, Tensor]:
    """Returns a model and a random number that was drawn after it was built."""
    torch.manual_seed(seed)
    with Init(enabled=inside, **arguments):
        net = Net()
    return net, torch.rand(())


def same(net: nn.Module, other: nn.Module) -> bool:
    values, others = net.state_dict(), other.state_dict()
    return values.keys() == others.keys() and all(torch.equal(values[k], others[k]) for k in values)


def mapped(net: nn.Module) -> bool:
    return all(region_of(param) is not None for param in net.parameters())


def config(stage: int, world: int, bucket_mib: float = 0.01, **precision: str) -> Config:
    return Config.model_validate(
        {
            "zero": {"stage": stage, "bucket_mib": bucket_mib},
            "precision": {"dtype": "fp32", **precision},
            "train": {"micro_batch": 2, "global_batch": 2 * world},
            "optim": {"name": "adamw", "lr": 0.01},
        }
    )


def trained(net: nn.Module, topology: threed.Topology, stage: int, **precision: str) -> Any:
    """Returns the losses of three steps, and the weights afterwards on rank 0."""
    engine = threed.Engine(net, topology, config(stage, topology.world, **precision))
    rows = torch.arange(10).view(2, 5) + topology.rank
    losses = [engine.step({"x": rows}).loss for _ in range(3)]
    return losses, engine.full_state_dict()


# ----------------------------------------------------------------------------------------------------- one process


def test_values_and_random_numbers_are_those_of_plain_construction(tmp_path: Path) -> None:
    torch.manual_seed(1)
    with Init(folder=tmp_path) as entered:
        net = Net(nn.Linear(WIDTH, WIDTH))
        assert not list(tmp_path.iterdir())  # the file is unlinked already
        assert entered is None  # as in DeepSpeed
    after = torch.rand(())
    torch.manual_seed(1)
    plain = Net(nn.Linear(WIDTH, WIDTH))
    assert torch.equal(after, torch.rand(()))
    assert same(net, plain)
    assert mapped(net)
    assert net.head.weight is net.embed.weight
    assert type(net.scale) is nn.Parameter
    assert net.scale.stride() == plain.scale.stride()
    for copied in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert same(copied, plain)
        assert not any(map(region_of, copied.parameters()))
    with torch.no_grad():
        net.scale.zero_()  # ordinary parameters
    assert not net.scale.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_floating_point_parameters_are_converted(dtype: torch.dtype) -> None:
    net, _ = build(2, dtype=dtype)
    plain, _ = build(2, inside=False)
    for (name, param), other in zip(net.named_parameters(), plain.parameters(), strict=True):
        assert param.dtype == dtype, name
        assert torch.equal(param, other.to(dtype)), name
    assert torch.equal(net.offset, plain.offset.to(dtype))
    with Init(dtype=torch.float32):
        wide = nn.Linear(4, 4, dtype=torch.bfloat16)
    assert wide.weight.dtype == torch.float32
    assert mapped(wide)


def test_the_configuration_sets_dtype_and_folder(tmp_path: Path) -> None:
    ds = {
        "bf16": {"enabled": True},
        "zero_optimization": {
            "offload_param": {"device": "nvme", "nvme_path": str(tmp_path / "drive")}
        },
    }
    net, _ = build(2, config_dict_or_path=ds)
    assert {param.dtype for param in net.parameters()} == {torch.bfloat16}
    assert (tmp_path / "drive").is_dir()
    net, _ = build(2, config={"bf16": {"enabled": "auto"}, "fp16": {"enabled": False}})
    assert net.scale.dtype == torch.float32


def test_existing_modules_nested_blocks_and_the_decorator() -> None:
    torch.manual_seed(3)
    net = Net()
    plain, parameter = copy.deepcopy(net), net.scale
    Init(module=net)
    assert mapped(net)
    assert same(net, plain)
    assert net.scale is parameter
    with Init():
        inner = Init()
        with inner:
            linear = nn.Linear(2, 2)
        with inner:  # the same object again
            other = nn.Linear(2, 2)
    assert mapped(linear)
    assert mapped(other)

    @Init()
    def make() -> nn.Module:
        return nn.Linear(2, 2)

    assert mapped(make())
    assert mapped(make())
    assert not mapped(nn.Linear(2, 2))
    with Init(enabled=False):
        assert not mapped(nn.Linear(2, 2))


def test_other_parameters_are_left_alone() -> None:
    with Init():
        with torch.device("meta"):
            meta = nn.Linear(2, 2)
        lazy = nn.LazyLinear(2)
        empty = nn.utils.skip_init(nn.Linear, 2, 2)
        holder = nn.Module()
        holder.nothing = nn.Parameter(torch.empty(0))
        holder.register_parameter("none", None)
    assert meta.weight.is_meta
    assert isinstance(lazy.weight, nn.UninitializedParameter)
    assert mapped(empty)
    assert holder.nothing.numel() == 0


def test_an_error_in_the_block_ends_it(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="own"), Init(folder=tmp_path):
        raise KeyError("own")
    assert not mapped(nn.Linear(2, 2))
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"No space left.*TMPDIR") as caught, Init(folder=tmp_path):
        nn.Linear(2, 2)
    assert caught.value.errno == errno.ENOSPC
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(RuntimeError, match=r"zero.Init.*TMPDIR"), Init(folder=file):
        pass


def test_a_disk_that_fills_up_does_not_kill_the_process(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    with tmpfs(folder, "2m"):
        with pytest.raises(OSError, match="No space left"), Init(folder=folder):
            nn.ModuleList(nn.Linear(256, 256) for _ in range(16))
        gc.collect()  # the error refers to mappings of the disk


class Half:
    """A process group of fewer ranks, or a unit of model parallelism."""

    def size(self) -> int:
        return 2

    def get_model_parallel_world_size(self) -> int:
        return 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data_parallel_group": Half()}, "data_parallel_group=...*groups of some ranks"),
        ({"sequence_data_parallel_group": Half()}, "sequence_data_parallel_group"),
        ({"mpu": Half()}, "model parallelism"),
        ({"zero_param_parallel_group": 1}, "zero_param_parallel_group"),
        ({"zero_quantized_weights": True}, "in the configuration"),
        ({"zero_quantized_nontrainable_weights": True}, "zero_quantized_nontrainable_weights"),
        ({"dtype": torch.int8}, "dtype"),
    ],
)
def test_arguments_that_are_not_offered_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Init(**arguments)
    Init(**arguments, enabled=False)


@pytest.mark.parametrize("stage", [0, 3])
def test_the_engine_frees_the_file(stage: int) -> None:
    topology = threed.Topology()
    net, _ = build(4)
    found = trained(net, topology, stage)
    assert found[0] == trained(build(4, inside=False)[0], topology, stage)[0]
    assert "threed-init" not in Path("/proc/self/maps").read_text()
    assert not any(hasattr(param, "region") for param in net.parameters())


class FromDisk(dict[str, Any]):
    """Values that are created when they are read; records which are alive at once."""

    def __init__(self, values: dict[str, Tensor]) -> None:
        super().__init__(values)
        self.read: list[str] = []

    def __getitem__(self, name: str) -> Tensor:
        self.read.append(name)
        return super().__getitem__(name).clone()


@pytest.mark.parametrize("stage", [1, 3])
def test_initial_values_are_read_on_demand(stage: int) -> None:
    topology = threed.Topology()
    plain, _ = build(5, inside=False)
    wanted = trained(copy.deepcopy(plain), topology, stage)
    with torch.device("meta"):
        net = Net()
    net.offset = plain.offset.clone()
    values = FromDisk(plain.state_dict())
    found = trained(Wrapped(net, initial=values), topology, stage)
    assert found[0] == wanted[0]
    assert all(torch.equal(found[1][name], value) for name, value in wanted[1].items())
    assert set(values.read) == {name for name, _ in net.named_parameters()}
    with pytest.raises(ValueError, match=r"initial has no values for scale, embed\.weight"):
        Wrapped(Net(), initial={})
    wrong = {name: value[:1] for name, value in plain.state_dict().items()}
    with pytest.raises(ValueError, match=r"has shape .*the parameter"):
        threed.Engine(Wrapped(Net(), initial=wrong), topology, config(1, 1))


# -------------------------------------------------------------------------------------------------------- two ranks


def values_of_rank_0(rank: int) -> None:
    net, after = build(rank)
    assert torch.equal(after, build(rank, inside=False)[1])
    plain, _ = build(0, inside=False)
    buffer, net.offset = net.offset, plain.offset
    assert same(net, plain)
    assert mapped(net)
    assert torch.equal(buffer, build(rank, inside=False)[0].offset)  # buffers are this rank's
    world = world_axis()
    collectives.barrier(world)
    with torch.no_grad():
        net.scale.fill_(rank + 7)  # without GatheredParameters: only seen by this rank
        assert net.scale.eq(rank + 7).all()
    collectives.barrier(world)
    assert net.scale.eq(rank + 7).all()
    for modifier in (0, 1):
        with torch.no_grad():
            if rank == modifier:
                net.scale.fill_(modifier + 2)
        share_changes([net.scale, nn.Parameter(torch.ones(1))], modifier)
        assert net.scale.eq(modifier + 2).all()
        collectives.barrier(world)


def training_is_equal(topology: threed.Topology, stage: int, dtype: str) -> None:
    ds = {"bf16": {"enabled": dtype == "bf16"}}
    net, _ = build(topology.rank, config_dict_or_path=ds)
    plain, _ = build(0, inside=False)
    plain.to(net.scale.dtype)
    net.offset = plain.offset.clone()
    found, wanted = (trained(each, topology, stage, dtype=dtype) for each in (net, plain))
    assert found[0] == wanted[0], (stage, dtype)
    assert found[1].keys() == wanted[1].keys()
    assert all(torch.equal(found[1][name], value) for name, value in wanted[1].items())


def two_machines(topology: threed.Topology) -> None:
    """Each rank is alone on its machine; the values of rank 0 win when the engine is created."""
    here = init.process_space
    init.process_space = lambda: f"{here()} {topology.rank}"  # type: ignore[attr-defined]
    try:
        net, _ = build(topology.rank)
        assert same(net, build(topology.rank, inside=False)[0])
        share_changes([net.embed.weight], 1)
        assert torch.equal(net.embed.weight, build(1, inside=False)[0].embed.weight)
        training_is_equal(topology, 3, "fp32")
    finally:
        init.process_space = here  # type: ignore[attr-defined]


@Init()
def build_unless(fails: bool) -> None:
    nn.Linear(2, 2)
    if fails:
        raise KeyError("own")


def failures(rank: int) -> None:
    with pytest.raises(ValueError, match="rank 1 has built other parameters"), Init():
        nn.Linear(2, 2 + rank)
    with pytest.raises((KeyError, RuntimeError), match=r"own|zero.Init raised an error on rank 1"):
        build_unless(rank == 1)


def on_two_ranks(folder: str) -> None:
    os.environ["TMPDIR"] = folder
    init.tempfile.tempdir = None
    topology = threed.Topology()
    values_of_rank_0(topology.rank)
    for stage in (0, 1, 2, 3):
        training_is_equal(topology, stage, "bf16" if stage in (1, 3) else "fp32")
    training_is_equal(topology, 3, "fp32")
    two_machines(topology)
    failures(topology.rank)
    assert not list(Path(folder).glob("threed-init*"))


def test_two_ranks_get_the_values_of_rank_0(tmp_path: Path) -> None:
    run_ranks(2, on_two_ranks, str(tmp_path))


# ----------------------------------------------------------------------------------------------------------- memory


def status(name: str) -> int:
    """Returns a value of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


@contextmanager
def sampled(peaks: dict[str, int], name: str) -> Iterator[None]:
    """Context manager: records the growth of this process's anonymous memory in the block."""
    base, ended = status("RssAnon"), threading.Event()
    peaks[name] = 0

    def sample() -> None:
        while not ended.wait(0.002):
            peaks[name] = max(peaks[name], status("RssAnon") - base)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class Large(nn.Module):
    def __init__(self, mib: int, width: int) -> None:
        super().__init__()
        count = max(2, mib * 2**20 // (8 * width * width * 4))
        self.blocks = nn.ModuleList(Block(width) for _ in range(count))
        self.width = width
        for param in self.parameters():
            nn.init.normal_(param, std=0.01)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def peak_of(mib: int, width: int) -> dict[str, float]:
    """Returns the peaks of anonymous memory under ZeRO-3, divided by the bytes of the model."""
    topology = threed.Topology()
    x = torch.randn(2, width)
    with suppress(Exception):  # first uses of torch's modules take memory
        Large(1, 64)(torch.randn(1, 64)).backward()
    peaks: dict[str, int] = {}
    began = time.perf_counter()
    with sampled(peaks, "all"):
        with sampled(peaks, "build"), Init():
            net = Large(mib, width)
        nbytes = sum(param.numel() * 4 for param in net.parameters())
        with sampled(peaks, "engine"):
            engine = threed.Engine(net, topology, config(3, topology.world, bucket_mib=64))
        engine.evaluate({"x": x})
    ratios = {name: peak / nbytes for name, peak in peaks.items()}
    return ratios | {
        "seconds": time.perf_counter() - began,
        "VmHWM": status("VmHWM") / nbytes,
        "mib": nbytes / 2**20,
    }


@pytest.mark.alone
def test_no_rank_holds_the_model() -> None:
    for found in run_ranks(2, peak_of, 64, 256):
        assert found["build"] < 0.1, found
        assert found["engine"] < 0.7, found


@pytest.mark.grid
@pytest.mark.alone
def test_a_large_model_needs_a_share_of_its_memory_per_rank() -> None:
    for found in run_ranks(2, peak_of, 2048, 1024):
        print(found)
        assert found["build"] < 0.1, found
        assert found["all"] <= 0.7, found
