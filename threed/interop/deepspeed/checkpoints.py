"""Checkpoints and weights of DeepSpeed's engine.

engine.save_checkpoint("checkpoints", client_state={"epoch": 1})
path, client_state = engine.load_checkpoint("checkpoints")
engine.save_16bit_model("model")            # pytorch_model.bin
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.modules.module import _IncompatibleKeys

from threed.checkpoint import native
from threed.checkpoint.files import CheckpointError, building_place
from threed.checkpoint.manifest import MANIFEST
from threed.core.atomic import building
from threed.distributed import collectives
from threed.interop.deepspeed.api import zero_to_fp32
from threed.interop.deepspeed.names import not_offered
from threed.interop.deepspeed.states import decode, encode
from threed.interop.deepspeed.training import TrainingLoop
from threed.interop.deepspeed.views import SchedulerView
from threed.interop.loading import LATEST, latest_tag, weights

TENSORS = "client_state.safetensors"  # file of a checkpoint: tensors of client_state and scheduler
WEIGHTS = "use engine.full_state_dict(), or engine.save_16bit_model(folder)"
SCHEDULE = (
    "the schedule of the configuration follows the number of updates, which is loaded with the optimizer states: pass a"
    " scheduler to initialize instead"
)


class Checkpoints(TrainingLoop):
    """The methods of DeepSpeed's engine that save and load; see `DeepSpeedEngine`."""

    def save_checkpoint(
        self, save_dir: str | Path, tag: object = None, client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True, exclude_frozen_parameters: bool = False,
    ) -> bool:  # fmt: skip
        """Writes the checkpoint save_dir/tag, and writes the tag to save_dir/latest. Collective.

        Also writes save_dir/zero_to_fp32.py, a script with the arguments of DeepSpeed's script.

        Args:
            save_dir: the folder of checkpoints.
            tag: the name of the checkpoint; None means "global_stepN". If the tags of the ranks
                differ, rank 0's tag is used, with a warning (see the key `checkpoint.tag_validation`).
            client_state: data of the program to save with the checkpoint: numbers, strings,
                tensors, NumPy arrays, and lists, tuples and dicts of them. The data of rank 0 are
                saved.
            save_latest: whether to write the tag to save_dir/latest.
            exclude_frozen_parameters: has no effect: the checkpoint has all parameters.

        Returns:
            True.

        Raises:
            RuntimeError: if a step is in progress, because its gradients would be lost.
            ValueError: if `save_dir` is empty.
            AssertionError: if the tags of the ranks differ, and `checkpoint.tag_validation` is "Fail".
            NotImplementedError: if the engine only evaluates.
            TypeError: if `client_state` has a value of another type.
            CheckpointError: on every rank, if the checkpoint cannot be written.
            OSError: if the file `latest` cannot be written; RuntimeError on the other ranks.
        """
        if self.optimizer is None:
            raise NotImplementedError(
                not_offered("save_checkpoint of an engine that only evaluates", WEIGHTS)
            )
        self._check_boundary("save_checkpoint", "save at an accumulation boundary")
        everyone = self.topology.axis("world")
        tensors: dict[str, Tensor] = {}
        with collectives.failing_together(everyone, "save_checkpoint"):
            if not save_dir or not str(save_dir):
                raise ValueError(f"save_dir {save_dir!r}: pass the folder of checkpoints")
            extra = self._extra(client_state or {}, tensors)
        tag = self._common_tag(f"global_step{self.global_steps}" if tag is None else str(tag))
        path = Path(save_dir) / tag

        def add_tensors() -> None:
            if tensors:
                with building(building_place(path) / TENSORS) as (scratch,):
                    save_file(tensors, scratch)

        self.engine.save(path, extra, before_publishing=add_tensors)
        # No rank returns before `latest` exists.
        with collectives.failing_together(everyone, "save_checkpoint"):
            if everyone.index == 0:
                _write_latest(Path(save_dir), tag if save_latest else None)
        return True

    def _common_tag(self, tag: str) -> str:
        """Returns rank 0's tag. Collective."""
        tags = collectives.exchange(tag, self.topology.axis("world"))
        mode = self.translation.tag_validation
        if len(set(tags)) > 1 and mode != "ignore":
            what = f"ranks save under different tags: {', '.join(sorted(set(tags)))}"
            if mode == "fail":
                raise AssertionError(f"{what}: pass the same tag on all ranks")
            warnings.warn(f"{what}; rank 0's tag {tags[0]} is used", stacklevel=3)
        return tags[0]

    def _extra(self, client_state: Mapping[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Returns the values of a checkpoint that `ModuleEngine.save` does not save by itself."""
        scheduler = {} if self.lr_scheduler is None else self.lr_scheduler.state_dict()
        rates = []
        if self.optimizer is not None:
            self.optimizer.synchronize()
            rates = self.optimizer.rates()
        return {
            "client_state": encode(dict(client_state), "client_state", tensors),
            "lr_scheduler": encode(scheduler, "lr_scheduler", tensors),
            "rates": rates, "global_steps": self.global_steps, "global_samples": self.global_samples,
        }  # fmt: skip

    def load_checkpoint(
        self, load_dir: str | Path, tag: object = None, load_module_strict: bool = True,
        load_optimizer_states: bool = True, load_lr_scheduler_states: bool = True,
        load_module_only: bool = False, custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, Any]:  # fmt: skip
        """Loads the checkpoint load_dir/tag. Collective.

        The checkpoint may have been saved with any number of ranks and any ZeRO stage.

        Args:
            load_dir: the folder of checkpoints.
            tag: the name of the checkpoint; None means the tag in load_dir/latest.
            load_module_strict: whether the checkpoint must have exactly the module's parameters and
                buffers. Only used if the optimizer states are not loaded; otherwise they must.
            load_optimizer_states: whether to load the states of the optimizer.
            load_lr_scheduler_states: whether to load the state of the scheduler.
            load_module_only: whether to load weights and buffers only, as an engine that only
                evaluates always does.
            custom_load_fn: function that copies the weights: `custom_load_fn(src=weights,
                dst=module)`. Needs `load_module_only`, or `load_optimizer_states=False`.

        Returns:
            (path of a file in the folder load_dir/tag, as in DeepSpeed; client_state that was saved
            with it). (None, None) without `tag` if the file `latest` is missing.

        Raises:
            RuntimeError: if a step is in progress.
            NotImplementedError: for arguments that are not supported together.
            CheckpointError: if the checkpoint cannot be loaded.
        """
        self._check_boundary("load_checkpoint", "load at an accumulation boundary")
        load_module_only = load_module_only or self.optimizer is None
        complete = load_optimizer_states and not load_module_only
        if custom_load_fn is not None and complete:
            fix = "pass load_module_only=True, or load_optimizer_states=False"
            raise NotImplementedError(not_offered("custom_load_fn with optimizer states", fix))
        partial = load_optimizer_states != load_lr_scheduler_states and not load_module_only
        if partial and isinstance(self.lr_scheduler, SchedulerView):
            raise NotImplementedError(
                not_offered("to load only the optimizer states or only the scheduler", SCHEDULE)
            )
        found = _latest(Path(load_dir)) if tag is None else str(tag)
        if len(tags := set(collectives.exchange(found, self.topology.axis("world")))) > 1:
            what = f"ranks load different checkpoints of {load_dir}: {', '.join(sorted(map(str, tags)))}"
            raise CheckpointError(f"{what}: pass the same tag on all ranks")
        if found is None:
            return None, None
        path = Path(load_dir) / found
        if self._pending:
            self.zero_grad()
        if complete:
            extra = self._load_all(path, load_module_strict)
        else:
            with collectives.failing_together(self.topology.axis("world"), "load_checkpoint"):
                extra = dict(native.read_manifest(path)["state"]["extra"])
                values = weights(path)
            self._load_weights(values, load_module_strict, custom_load_fn)
        tensors = _tensors(path)
        if not load_module_only:
            scheduler = _decoded(extra.get("lr_scheduler"), tensors, path)
            self._restore(extra, scheduler if load_lr_scheduler_states else None, not complete)
        return str(path / MANIFEST), _decoded(extra.get("client_state", {}), tensors, path)

    def _load_all(self, path: Path, strict: bool) -> dict[str, Any]:
        """Loads weights and optimizer states; returns the values of `_extra`. Collective."""
        try:
            return self.engine.load(path)
        except CheckpointError as error:
            if not strict:
                fix = "pass load_module_only=True, or load_optimizer_states=False"
                error.add_note(f"threed: load_module_strict=False has no effect here: {fix}")
            raise

    def _restore(self, extra: Mapping[str, Any], scheduler: Any, load_rates: bool) -> None:
        """Restores the counters, and the states of scheduler and learning rates.

        Args:
            extra: values of `_extra`.
            scheduler: the state of the scheduler; None to keep the current state.
            load_rates: whether to restore the learning rates together with the scheduler.
        """
        if self.optimizer is not None:
            self.optimizer.show()
        if self.lr_scheduler is not None and scheduler:
            self.lr_scheduler.load_state_dict(scheduler)
            if load_rates and self.optimizer is not None:
                for group, rate in zip(self.optimizer.param_groups, extra["rates"], strict=True):
                    group["lr"] = rate
        steps = int(extra.get("global_steps", self.engine.steps))
        t = self.translation
        self._steps_before = steps - self.engine.steps
        self.global_samples = int(extra.get("global_samples", steps * t.train_batch_size))
        self.micro_steps = steps * t.accumulation
        self.metrics = self._earlier = None
        self._skipped_before = self.skipped_steps
        self._done = self._seen = 0

    # -------------------------------------------------------------------------------------------------------- weights

    def load_module_state_dict(
        self, checkpoint: Mapping[str, Any], strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None, fetch_z3_params: bool = False,
    ) -> None:  # fmt: skip
        """Sets the weights and buffers from full tensors. Collective.

        Args:
            checkpoint: a mapping whose entry "module" has the full tensors by name, on every rank.
            strict: whether the names must be exactly the module's names.
            custom_load_fn: function that copies the weights instead: `custom_load_fn(src=tensors,
                dst=module)`.
            fetch_z3_params: has no effect: parameters are gathered if necessary.

        Raises:
            KeyError, ValueError: if names or shapes differ from the module's.
        """
        self._load_weights(checkpoint["module"], strict, custom_load_fn)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Sets the weights and buffers from full tensors. Collective.

        Args:
            state_dict: the full tensors by the module's names, on every rank.
            strict: whether the names must be exactly the module's names.
            assign: has no effect: values are copied to the engine's storage.

        Returns:
            The missing and the unexpected names, as `nn.Module.load_state_dict`.

        Raises:
            KeyError, ValueError: if names or shapes differ from the module's.
        """
        return self._load_weights(state_dict, strict)

    def _load_weights(
        self,
        found: Mapping[str, Tensor],
        strict: bool,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> _IncompatibleKeys:
        if custom_load_fn is not None:
            with self.engine.gathered() as module, torch.no_grad():
                custom_load_fn(src=dict(found), dst=module)
            return _IncompatibleKeys([], [])
        names = self._names()
        first = self.engine.aliases
        given = {first.get(name, name) for name in found}
        missing = [name for name in names if first.get(name, name) not in given]
        unexpected = [name for name in found if name not in names]
        if strict or not missing:
            self.engine.load_full_state_dict(
                found if strict else {n: v for n, v in found.items() if n in names}
            )
            return _IncompatibleKeys([], unexpected)
        with self.engine.gathered() as module, torch.no_grad():
            targets = {
                **dict(module.named_buffers()),
                **dict(module.named_parameters(remove_duplicate=False)),
            }
            for name in found.keys() & names:
                targets[name].copy_(found[name])
        return _IncompatibleKeys(missing, unexpected)

    def _names(self) -> list[str]:
        """Returns the names of all parameters and persistent buffers, of tied weights too."""
        return [*self.module.state_dict(keep_vars=True)]

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """Returns the state dict of the module, below ZeRO stage 3. Collective.

        Args:
            destination: a mapping to which the entries are added; None: a new dict.
            prefix: prefix of all names.
            keep_vars: whether to return parameters instead of detached tensors.
            exclude_frozen_parameters: whether to leave out parameters that need no gradient.

        Raises:
            NotImplementedError: at stage 3, where a rank has only slices of the weights.
        """
        if self.translation.config.zero.stage == 3:
            raise NotImplementedError(not_offered("module_state_dict at ZeRO stage 3", WEIGHTS))
        self.engine.finish()
        found = self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        frozen = self._frozen() if exclude_frozen_parameters else ()
        for name in frozen:
            found.pop(prefix + name, None)
        return found

    def _frozen(self) -> list[str]:
        named = self.module.named_parameters(remove_duplicate=False)
        return [name for name, param in named if not param.requires_grad]

    def full_state_dict(self) -> dict[str, Tensor]:
        """Returns the full weights and persistent buffers by name on rank 0. Collective.

        Weights are fp32, or fp64 if the model uses fp64. Other ranks return an empty dict.
        """
        return self.engine.full_state_dict()

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Tensor]:
        """Returns the full weights and buffers in the module's dtype on rank 0. Collective.

        Tied weights share one tensor. Other ranks return an empty dict. DeepSpeed returns None, for
        which transformers' `save_pretrained` would read the sharded module.

        Args:
            exclude_frozen_parameters: whether to leave out parameters that need no gradient.
        """
        full = self.engine.full_state_dict()
        if self.topology.rank > 0:
            return {}
        dtypes, first = self._dtypes(), self.engine.aliases
        frozen = set(self._frozen() if exclude_frozen_parameters else ())
        found: dict[str, Tensor] = {}
        for name in self._names():
            if name in frozen or name not in full:
                continue
            tied = found.get(first.get(name, name))
            found[name] = full[name].to(dtypes.get(name)) if tied is None else tied
        return found

    def _dtypes(self) -> dict[str, torch.dtype]:
        """Returns the dtype of each parameter, by all of its names."""
        return {n: p.dtype for n, p in self.module.named_parameters(remove_duplicate=False)}

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Returns the key `zero_optimization.stage3_gather_16bit_weights_on_model_save`."""
        return self.translation.gather_on_save

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Writes the full weights in the module's dtype with `torch.save`. Collective.

        Args:
            save_dir: the folder.
            save_filename: the name of the file.
            exclude_frozen_parameters: whether to leave out parameters that need no gradient.

        Returns:
            True; or False if nothing was written, because the ZeRO stage is 3 and
            `stage3_gather_16bit_weights_on_model_save` is not set, as in DeepSpeed.

        Raises:
            OSError: on rank 0, if the file cannot be written; RuntimeError on the other ranks.
        """
        if self.translation.config.zero.stage == 3 and not self.translation.gather_on_save:
            warnings.warn(
                "save_16bit_model has written nothing: set stage3_gather_16bit_weights_on_model_save,"
                " or save engine.full_state_dict()",
                stacklevel=2,
            )
            return False
        found = self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)
        with collectives.failing_together(self.topology.axis("world"), "save_16bit_model"):
            if self.topology.rank == 0:
                with building(Path(save_dir) / save_filename) as (scratch,):
                    torch.save(found, scratch)
        return True

    save_fp16_model = save_16bit_model


def _write_latest(folder: Path, tag: str | None) -> None:
    """Writes `tag`, unless it is None, to the file `latest`; writes zero_to_fp32.py if it is missing."""
    files = {} if tag is None else {LATEST: tag}
    if not (folder / zero_to_fp32.NAME).exists():  # it may be DeepSpeed's own
        files[zero_to_fp32.NAME] = zero_to_fp32.SCRIPT
    for name, text in files.items():
        with building(folder / name) as (scratch,):
            scratch.write_text(text, encoding="utf-8")


def _latest(folder: Path) -> str | None:
    """Returns the tag in the file `latest`; None, with a warning, if the file is missing."""
    if (tag := latest_tag(folder)) is None:
        what = f"{folder} has no file {LATEST}: nothing was loaded; pass a tag, or another folder"
        warnings.warn(what, stacklevel=3)
    return tag


def _tensors(path: Path) -> Mapping[str, Tensor]:
    """Returns the tensors of the states in a checkpoint."""
    return load_file(path / TENSORS) if (path / TENSORS).is_file() else {}


def _decoded(state: Any, tensors: Mapping[str, Tensor], path: Path) -> Any:
    """Returns `decode(state, tensors)`; raises CheckpointError if a tensor is missing."""
    try:
        return decode(state, tensors)
    except KeyError as error:
        what = f"{path}: {TENSORS} is missing or has no tensor {error}"
        raise CheckpointError(f"{what}: load another checkpoint, or load_module_only") from None
