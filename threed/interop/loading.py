"""Saves an engine, and builds one from a run, a checkpoint or a Hugging Face folder; reads weights.

engine = threed.load("runs/tiny")                # `load` below
loss = engine.evaluate(batch)
threed.checkpoint.save(engine, "evaluated")      # `save` below
found = threed.checkpoint.weights("runs/tiny")   # `weights` below, without an engine
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from threed import models
from threed.checkpoint import native
from threed.checkpoint.files import CheckpointError
from threed.checkpoint.lazy_tensors import read_all
from threed.checkpoint.manifest import MANIFEST
from threed.checkpoint.reading import Reader
from threed.checkpoint.run_folder import candidates
from threed.config import Config, ConfigError
from threed.config.checks import find_problems
from threed.config.resolution import resolve
from threed.core.source import name_of, names_model
from threed.distributed.topology import Topology
from threed.engine import Engine
from threed.interop.huggingface.folder import HFFolder, is_hf_folder
from threed.interop.huggingface.layouts import default_seq
from threed.interop.safetensors_folder import (
    SafetensorsFolder,
    is_safetensors_folder,
    read_settings,
)
from threed.layers import Slicing
from threed.zero.state import WEIGHT

Build = Callable[..., Any]
LATEST = "latest"  # file of `DeepSpeedEngine.save_checkpoint` with the tag of the newest checkpoint
# Groups of configuration keys that are loaded from a checkpoint, because they define the model and
# its training. The other groups, such as "parallel", define where and how the training runs.
TRAINED = ("model", "precision", "train", "optim", "data")


def save(engine: Engine, path: str | Path, extra: Mapping[str, Any] | None = None) -> Path:
    """Writes a checkpoint of an engine, and waits until it is complete. Collective.

    This function calls `engine.save`. To write in the background, use `engine.start_save` instead.
    The folder is renamed to `path` after it is complete, so an interrupted save leaves no partial
    checkpoint at `path`.

    Args:
        engine: the engine, with the weights, optimizer states and counters to save.
        path: the folder to write, by convention `step-N`.
        extra: additional JSON values to store in the manifest; `Engine.load` returns them.

    Returns:
        `path`.

    Raises:
        CheckpointError: on every rank, if the checkpoint cannot be written.
        DataError: if an earlier step had invalid data, unless this error was already raised when
            the metrics of that step were read.
    """
    return engine.save(path, extra)


def load(
    path: str | Path,
    topology: Topology | None = None,
    *,
    build: Build | None = None,
    **changes: Mapping[str, Any],
) -> Engine:
    """Loads an engine from a run, a checkpoint, an export or a Hugging Face folder. Collective.

    The groups `model`, `precision`, `train`, `optim` and `data` of the configuration are taken from
    the checkpoint; all other groups have their default values. Hugging Face folders and exports
    (safetensors folders that `threed convert` wrote) contain only weights, so optimizer states
    start at zero.

    Args:
        path: a run folder, whose newest checkpoint is loaded; or a checkpoint, a safetensors
            folder, or a Hugging Face folder.
        topology: topology of all ranks; by default, every rank is a data-parallel rank.
        build: class or function that builds a custom model. Its parameters are (config, slicing),
            (config) or (). A custom model requires `build` or `model={"arch": "FILE.py:NAME"}`,
            because the code file that a checkpoint names is not imported.
        changes: values that override configuration keys, by group, such as `zero={"stage": 3}`.

    Returns:
        The engine. `engine.steps` is the number of updates so far.

    Raises:
        CheckpointError: if the checkpoint is missing or damaged, or does not match the model.
        ConfigError: if the configuration is invalid for the topology.

    Example:

        engine = threed.load("runs/tiny/hf", threed.Topology(tp=2), train={"global_batch": 8})
    """
    source, topology = newest_checkpoint(Path(path)), topology or Topology()
    saved = _saved(source)
    parallel = {"pp": topology.pp, "tp": topology.tp, "dp": topology.dp}
    groups = {"parallel": parallel, **saved}
    is_module = groups["model"].get("vocab") == 0  # saved by an engine of a wrapped module
    if is_module:
        groups["model"] = {**groups["model"], "vocab": None}
    for name, values in changes.items():
        groups[name] = {**groups.get(name, {}), **values}
    arch = str(groups["model"].get("arch"))
    if names_model(arch) and build is None and "arch" not in changes.get("model", {}):
        fix = "pass build=MODEL, or model={'arch': 'FILE.py:MODEL'}"
        problem = f"{path}: its model is the code {arch}, which is not imported by itself"
        raise ConfigError([f"{problem}: {fix}"])
    if is_module and build is None and not names_model(arch):
        raise ConfigError([f"{path}: its model is a custom nn.Module: pass build=CLASS"])
    if names_model(arch) and build is not None:
        # The configuration gets the name of `build`. Code that later builds the model from the
        # configuration then imports `build`, and not the file that the checkpoint names.
        with contextlib.suppress(ValueError):
            groups["model"] = {**groups["model"], "arch": name_of(build)}
    try:
        config = Config.model_validate(groups)
    except ValueError as error:
        raise ConfigError([f"{path}: {error}"]) from None
    if problems := find_problems(config, topology.world):
        raise ConfigError(problems)
    config = resolve(config, 0 if is_module else config.model.vocab or 1, topology.world)
    slicing = Slicing.of(topology, config)
    if build is not None and config.model.vocab == 0:  # the module gets other inputs than tokens
        module = cast(nn.Module, models.call_custom(build, config.model, slicing))
        engine = Engine(module, topology, config)
    else:
        engine = Engine(models.build(config.model, slicing, build), topology, config)
    if is_safetensors_folder(source):
        _load_weights(engine, source)
    else:
        engine.load(source)
    return engine


def _load_weights(engine: Engine, folder: Path) -> None:
    """Loads the weights of a safetensors folder into an engine. Collective."""
    try:
        engine.load_full_state_dict(SafetensorsFolder(folder))
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{folder}: {error.args[0]}") from None


def weights(path: str | Path, *, check: bool = True) -> Mapping[str, Tensor]:
    """Returns the weights and persistent buffers of a checkpoint by name, read on demand.

    Needs no process group and no code of the model, whatever the number of ranks that saved the
    checkpoint. Every access reads the full tensor from the files. For a native checkpoint, the
    values are the master weights (fp32, or fp64 for a model in fp64); a tied weight has all its
    names.

    Args:
        path: a run folder (its newest checkpoint is read), a checkpoint, a safetensors folder of
            `threed convert`, or a Hugging Face folder.
        check: whether to check the hashes of all files of a native checkpoint first.

    Returns:
        A mapping from global name to full tensor, on the CPU. The names are the same as in
        `Engine.full_state_dict`, also for a Hugging Face folder.

    Raises:
        CheckpointError: if the checkpoint is missing or damaged.

    Example:

        module.load_state_dict(dict(threed.checkpoint.weights("runs/mine")))
    """
    source = newest_checkpoint(Path(path))
    if is_safetensors_folder(source):
        return SafetensorsFolder(source)
    if is_hf_folder(source):
        return _Weights(HFFolder(source), {})
    manifest = native.verified(source) if check else native.read_manifest(source)
    return _Weights(Reader(source, manifest), manifest["state"].get("aliases", {}))


class _Weights(Mapping[str, Tensor]):
    def __init__(self, source: Any, aliases: Mapping[str, str]) -> None:
        self._source = source
        self._names = {name: name for name in (*source.shapes, *getattr(source, "buffers", ()))}
        self._names |= aliases

    def __getitem__(self, name: str) -> Tensor:
        first = self._names[name]
        if first in self._source.shapes:
            return read_all(self._source.tensor(WEIGHT, first))
        return self._source.buffer(first)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def newest_checkpoint(path: Path) -> Path:
    """Returns the folder to load: the newest checkpoint of a run folder, or `path` itself."""
    if (path / MANIFEST).is_file() or is_hf_folder(path) or is_safetensors_folder(path):
        return path
    tag = latest_tag(path)
    if tag is not None and (path / tag / MANIFEST).is_file():
        return path / tag
    newest = next(candidates(path, "auto"), None)
    if newest is None:
        raise CheckpointError(
            f"{path}: there is no run, checkpoint or Hugging Face folder (no checkpoints/step-N, no {MANIFEST}, no"
            " config.json)"
        )
    return newest


def latest_tag(folder: Path) -> str | None:
    """Returns the tag of the newest checkpoint in a folder of `DeepSpeedEngine.save_checkpoint`.

    Returns None if the folder has no file `latest`.
    """
    file = folder / LATEST
    return file.read_text(encoding="utf-8").strip() if file.is_file() else None


def _saved(source: Path) -> dict[str, Any]:
    """Returns the groups of the saved configuration that define the training.

    A Hugging Face folder has only the group `model`.
    """
    is_export = is_safetensors_folder(source)
    if is_hf_folder(source) and not is_export:
        model = HFFolder(source).model
        return {"model": {**dict(model), "seq": default_seq(model)}}
    config = read_settings(source) if is_export else native.read_manifest(source)["config"]
    return {name: config.get(name, {}) for name in TRAINED}
