"""Reads DeepSpeed checkpoints of Hugging Face models: ZeRO stages 0 to 3 and universal checkpoints.

    checkpoint = DeepSpeedCheckpoint(folder, config)   a `Source`; CheckpointError if not supported

`folder` is the folder of a step, such as `global_step100`, or its parent, which has the file
`latest`. The folder of a step has the model file mp_rank_00_model_states.pt. For each data rank N,
it has the optimizer file zero_pp_rank_N_mp_rank_00_optim_states.pt, which contains fp32 master
weights and Adam moments as flat vectors. `param_shapes` in the model file lists the names and
shapes of the parameters in the order in which the vectors contain them
(deepspeed/utils/zero_to_fp32.py, runtime/engine.py and runtime/zero of DeepSpeed 0.19.8):

- Stages 1 and 2: each parameter group is one flat vector, sharded evenly over the ranks. The vector
  may have padding after each parameter (`param_alignment_paddings`) and at its end. The ranks that
  hold the padding at the end save their master weights without this padding.
- Stage 3: each rank has a slice of ceil(numel / ranks) elements of every parameter; the last slices
  are padded. A rank has one flat vector per sub-group. The concatenation of these vectors contains
  the rank's slices in the order of `param_shapes`.
- Frozen parameters are not in these vectors. Stages 0 to 2 save them in `module` of the model file;
  stage 3 shards them over the model files of the ranks.
- Universal checkpoints have no such vectors. For each trained parameter NAME, the folder zero/NAME
  has the files fp32.pt, exp_avg.pt, exp_avg_sq.pt and optionally step.pt. A file contains a tensor,
  or a dictionary with the tensor `param`; the tensor is flat if the checkpoint was converted from
  stage 3. zero/optimizer_state.pt has the stage and the loss scale
  (deepspeed/checkpoint/ds_to_universal.py of DeepSpeed 0.19.8).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from threed.checkpoint.files import CheckpointError, plain
from threed.checkpoint.lazy_tensors import (
    FileTensor,
    LazyTensor,
    Reshaped,
    Shape,
    concatenate,
    rows,
)
from threed.core.messages import counted
from threed.core.parse import ParseError, read_file
from threed.interop.huggingface.folder import DTYPES, Header, HFTensors
from threed.interop.pickles.pickle_reader import PickledObject, PickleReader, as_written_by, number
from threed.zero.state import WEIGHT

MOMENTS = ("exp_avg", "exp_avg_sq")
STATES_FILE = re.compile(
    r"(?!(?:bf16_|fp16_).*_model_|(?:bf16_|fp16_|)mp_rank_\d+_optim_)"
    r"(bf16_|fp16_|)(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_(model|optim)_states\.pt"
)
UNIVERSAL_FILES = {"fp32.pt": WEIGHT, "exp_avg.pt": MOMENTS[0], "exp_avg_sq.pt": MOMENTS[1]}
UNSUPPORTED = {  # pattern of file names -> description of the unsupported kind of checkpoint
    "layer_*_model_states.pt": "a checkpoint of a PipelineModule or of experts, with names that only its program knows",
    "layer_*-model_*states.pt": "a checkpoint of a PipelineModule, with layer numbers instead of names",
    "expp_rank_*": "a checkpoint with experts (MoE)",
}
NAMES = {name: spelled for spelled, name in DTYPES.items()}
Parts = dict[str, LazyTensor]  # "weight", "exp_avg" or "exp_avg_sq" -> tensor of one parameter
Table = dict[str, Any]


def step_folder(path: Path) -> Path | None:
    """Returns the folder of a step, which contains the files of a DeepSpeed checkpoint.

    This is the subfolder of `path` that the file `latest` names, or `path` itself if this file is
    missing. Returns None if the folder does not have the files of a DeepSpeed checkpoint.
    """
    if (path / "latest").is_file():
        try:
            tag = read_file(path / "latest", 2**12).decode("utf-8").strip()
        except (ParseError, ValueError):
            return None
        if not tag or not tag.isprintable() or Path(tag).name != tag:
            return None
        path = path / tag
    return path if path.is_dir() and any(path.glob("*model_states.pt")) else None


class DeepSpeedCheckpoint(HFTensors):
    """A DeepSpeed checkpoint, as a `Source`.

    Args:
        path: the folder of a step, or its parent folder, which contains the file `latest`.
        config: path of the model's transformers config.json.

    Raises:
        CheckpointError: if the checkpoint is not supported, incomplete or damaged.
    """

    def __init__(self, path: Path, config: Path) -> None:
        self.notes: list[str] = []
        self.state: dict[str, float] = {}
        self._tensors: dict[str, Parts] = {}  # name of a parameter -> its weight and moments
        super().__init__(path, config)
        for name, entry in self._entries.items():
            self.parts[name] = tuple(self._tensors.get(self._key(entry), ()))

    def _open_files(self) -> set[str]:
        folder = step_folder(self.path)
        assert folder is not None
        self._folder = folder
        with as_written_by("DeepSpeed 0.19", folder):
            self._read(PickleReader())
        # DDP adds the prefix "module." to names of parameters; torch.compile adds "_orig_mod.".
        for prefix in ("module.", "_orig_mod.", "module."):
            if all(name.startswith(prefix) for name in self._tensors):
                found = self._tensors.items()
                self._tensors = {name.removeprefix(prefix): parts for name, parts in found}
        return set(self._tensors)

    def _read(self, reader: PickleReader) -> None:
        models, states = self._files()
        model_states = [reader.torch_file(file) for file in models]
        ranks = [reader.torch_file(file)["optimizer_state_dict"] for file in states]
        model_state, universal = model_states[0], any(self._folder.glob("zero/*/fp32.pt"))
        about = self._universal_groups(reader, ranks) if universal else ranks[0] if ranks else {}
        stage = stage_of(about) if ranks or universal else 0
        version = model_state.get("ds_version")
        before = f"DeepSpeed {plain(version)}, " if version else ""
        self.title = f"{before}{'universal, from ' if universal else ''}ZeRO stage {stage}"
        keys = ("global_steps", "global_samples", "skipped_steps")
        steps, samples, skipped = (_count(model_state.get(key)) for key in keys)
        self._updates = float(max(0, steps - skipped))
        if universal:
            self._universal(reader, model_state["param_shapes"])
        else:
            self._check_ranks(ranks, len(model_states), stage, model_state)
            read = (self._without_zero, self._from_flat, self._from_flat, self._from_slices)[stage]
            read(model_state, ranks)
        if stage == 3:
            self._frozen(model_states)
        else:
            self._remaining(model_state)
        for other, name in (model_state.get("shared_params") or {}).items():
            if name in self._tensors:
                self._tensors.setdefault(other, self._tensors[name])
        if any(len(parts) > 1 for parts in self._tensors.values()):
            self.state = {
                "steps": steps, "consumed": samples, "updates": self._updates,
                "skips": max(0.0, steps - self._updates), **scale_of(about.get("loss_scaler")),
            }  # fmt: skip
        elif stage:
            self._note("it has no moments of Adam: a run starts at step 0 with zero moments")

    def _files(self) -> tuple[list[Path], list[Path]]:
        """Returns the model files and the optimizer files, each in the order of data ranks."""
        for pattern, what in UNSUPPORTED.items():
            for file in sorted(self._folder.glob(pattern)):
                raise self._error(f"is {what} ({file.name}), which is not supported")
        found: dict[str, dict[int, Path]] = {"model": {}, "optim": {}}
        prefixes = set()
        for file in sorted(self._folder.iterdir()):
            if (match := STATES_FILE.fullmatch(file.name)) is None:
                continue
            prefix, rank, mp, kind = match.groups()
            if int(mp):
                what = f"is a checkpoint of a tensor-parallel model ({file.name})"
                raise self._error(f"{what}, which is not supported; save it at tp 1")
            found[kind][int(rank or 0)] = file
            prefixes |= {prefix} if kind == "optim" else set()
        if len(prefixes) > 1:
            kinds = ", ".join(sorted(prefixes))
            raise self._error(
                f"has optimizer states of several kinds ({kinds}): remove the old ones"
            )
        for files in found.values():
            if missing := set(range(len(files))) - files.keys():
                fix = "copy the files of all machines into one folder"
                raise self._error(f"has no file of rank {min(missing)}: {fix}")
        models, states = ([files[rank] for rank in sorted(files)] for files in found.values())
        return models, states

    def _check_ranks(
        self, ranks: list[Table], model_files: int, stage: int, model_state: Table
    ) -> None:
        if model_state.get("param_shapes") and not ranks:
            raise self._error(
                "has no optimizer files: copy the files of all machines into one folder"
            )
        for found in ranks:
            # one number, or one per parameter group
            given = found.get("partition_count", len(ranks))
            counts = given if isinstance(given, list) else [given]
            if others := [count for count in counts if count != len(ranks)]:
                what = f"optimizer states of {counted(len(ranks), 'data rank')}"
                fix = "copy the files of all machines into one folder"
                raise self._error(f"has {what}, but was saved by {others[0]}: {fix}")
        if stage == 3 and model_files != len(ranks):
            raise self._error(
                f"has model files of {counted(model_files, 'rank')}, but optimizer files of {len(ranks)}"
            )

    def _without_zero(self, model_state: Table, ranks: list[Table]) -> None:
        """Adds the note that optimizer states of stage 0 are not imported.

        They cannot be imported, because stage 0 saves them without the names of the parameters. The
        weights are read by `_remaining`.
        """
        tensors = [
            value for value in model_state["module"].values() if isinstance(value, FileTensor)
        ]
        low = any(tensor.dtype in (torch.bfloat16, torch.float16) for tensor in tensors)
        more = ", and with weights in low precision" if low else ""
        self._note(f"its states have no names: a run starts at step 0 with zero moments{more}")

    def _from_flat(self, model_state: Table, ranks: list[Table]) -> None:
        """Reads the parameters of stages 1 and 2 from the sharded flat vectors of all ranks."""
        paddings = ranks[0].get("param_alignment_paddings")
        keys = "single_partition_of_fp32_groups", "base_optimizer_state"
        slices = [_vectors(found, *keys) for found in ranks]
        for group, shapes in enumerate(model_state["param_shapes"]):
            vectors, end, padding = self._concatenated([found[group] for found in slices]), 0, 0
            paddings_after = paddings[group] if paddings else []
            for index, (name, shape) in enumerate(shapes.items()):
                padding = paddings_after[index] if index < len(paddings_after) else 0
                first, end = end, end + math.prod(shape)
                own = {part: rows(vector, (first, end)) for part, vector in vectors.items()}
                self._tensors[name] = {part: Reshaped(shape, some) for part, some in own.items()}
                end += padding
            (numel,) = vectors[WEIGHT].shape
            if not 0 <= numel - end + padding <= 4 * len(ranks):
                raise self._error(f"has {numel} values in parameter group {group}, not {end}")

    def _from_slices(self, model_state: Table, ranks: list[Table]) -> None:
        """Reads the parameters of stage 3. Each rank has a slice of every parameter."""
        slices = [_vectors(found, "fp32_flat_groups", "optimizer_state_dict") for found in ranks]
        vectors, at = [self._concatenated(found) for found in slices], 0
        for name, shape in (
            pair for shapes in model_state["param_shapes"] for pair in shapes.items()
        ):
            first, at = at, at - (-math.prod(shape) // len(ranks))
            self._tensors[name] = {
                part: _unpadded(shape, [rows(some[part], (first, at)) for some in vectors])
                for part in vectors[0]
            }
        for some in vectors:
            if some[WEIGHT].shape != (at,):
                numel = some[WEIGHT].shape[0]
                raise self._error(f"has slices of {numel} values, not {at}")

    def _concatenated(self, vectors: Sequence[Table]) -> Parts:
        """Returns flat weights and moments [n], each concatenated from all `vectors`.

        Optimizer states other than Adam's moments are not imported. If there are any, a note is
        added.

        Args:
            vectors: results of `_vectors`, in the order of concatenation.
        """
        found = set(vectors[0])
        if any(set(some) != found for some in vectors):
            what = "optimizer states of some ranks only"
            raise self._error(f"has {what}")
        if "step" in found:
            self._updates = max(some["step"] for some in vectors)
        states = found - {"step", WEIGHT}
        if states != set(MOMENTS):
            if states:
                names = ", ".join(sorted(states))
                self._note(
                    f"{names} of its optimizer are not imported, because they are not Adam's moments"
                )
            found = {WEIGHT}
        parts = [part for part in (WEIGHT, *MOMENTS) if part in found]
        return {part: concatenate([some[part] for some in vectors]) for part in parts}

    def _frozen(self, model_states: list[Table]) -> None:
        """Reads the frozen parameters of stage 3."""
        for name, shape in (model_states[0].get("frozen_param_shapes") or {}).items():
            parts = [model_state["frozen_param_fragments"][name] for model_state in model_states]
            self._tensors[name] = {WEIGHT: _unpadded(shape, parts)}

    def _remaining(self, model_state: Table) -> None:
        """Reads the weights of stages 0 to 2 that only the model file has, such as frozen ones."""
        excluded = {
            *(model_state.get("buffer_names") or ()),
            *(model_state.get("shared_params") or ()),
        }
        for name, tensor in model_state["module"].items():
            if isinstance(tensor, FileTensor) and name not in excluded | self._tensors.keys():
                self._tensors[name] = {WEIGHT: tensor}

    def _error(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self._folder} {text}")

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    # ------------------------------------------------------------------------------------------------------- universal

    def _universal_groups(self, reader: PickleReader, ranks: list[Table]) -> Table:
        """Returns the content of the file zero/optimizer_state.pt, or {} if the file is missing."""
        if ranks:
            raise self._error("has both a universal checkpoint and another one: remove one of them")
        file = self._folder / "zero/optimizer_state.pt"
        if file.is_file():
            return reader.torch_file(file)
        self._note("it has no zero/optimizer_state.pt: the loss scale of fp16 is not imported")
        return {}

    def _universal(self, reader: PickleReader, groups: list[dict[str, Shape]]) -> None:
        """Reads the files of each parameter of a universal checkpoint."""
        updates = set[float | None]()
        for name, shape in (pair for shapes in groups for pair in shapes.items()):
            is_plain = Path(name).name == name != ".." and name.isprintable()
            if not is_plain or len(name.encode()) > 250:
                why = "which cannot be the name of a folder"
                raise self._error(f"has a parameter {plain(name)}, {why}")
            folder = self._folder / "zero" / name
            files = {part: folder / file for file, part in UNIVERSAL_FILES.items()}
            saved = {part: file for part, file in files.items() if file.is_file()}
            parts = {part: _reshaped(reader, file, shape) for part, file in saved.items()}
            if WEIGHT not in parts:
                raise self._error(f"has no zero/{name}/fp32.pt, but its model has that parameter")
            self._tensors[name] = parts
            if (folder / "step.pt").is_file():
                updates.add(number(_value(reader, folder / "step.pt")))
        self._check_universal(updates - {None})

    def _check_universal(self, updates: set[Any]) -> None:
        """Checks the moments and the update counts of a universal checkpoint.

        Either all parameters or no parameters must have moments. All update counts must be equal.

        Args:
            updates: the distinct update counts in the files `step.pt`.
        """
        missing = [name for name, parts in self._tensors.items() if len(parts) < 3]
        if 0 < len(missing) < len(self._tensors):
            raise self._error(f"has moments of other parameters, but not of {missing[0]}")
        if missing:  # no parameter has both of Adam's moments, so no moments are imported
            self._tensors = {name: {WEIGHT: parts[WEIGHT]} for name, parts in self._tensors.items()}
        if len(updates) > 1:
            raise self._error(f"has different numbers of updates: {plain(sorted(updates))}")
        self._updates = max(updates, default=self._updates)

    # --------------------------------------------------------------------------------------------------------- reading

    def _read_headers(self, found: dict[str, Header]) -> Iterator[str]:
        for name, parts in self._tensors.items():
            dtype = parts[WEIGHT].dtype
            found[name] = (NAMES.get(dtype, str(dtype)), tuple(parts[WEIGHT].shape))
        yield from ()

    def _hf_tensor(self, part: str, key: str) -> LazyTensor:
        return self._tensors[key][part]


def _unpadded(shape: Shape, slices: Sequence[LazyTensor]) -> LazyTensor:
    """Returns a parameter from the slices [n] of all ranks, without the padding at the end."""
    return Reshaped(shape, rows(concatenate(slices), (0, math.prod(shape))))


# --------------------------------------------------------------------------------------------------------------- files


def _value(reader: PickleReader, file: Path) -> Any:
    """Returns the content of a universal checkpoint's file; of a dict, only the entry "param"."""
    value = reader.torch_file(file)
    return value.get("param") if isinstance(value, dict) else value


def _reshaped(reader: PickleReader, file: Path, shape: Shape) -> LazyTensor:
    """Returns the tensor in a file of a universal checkpoint, in the shape of its parameter."""
    tensor = _value(reader, file)
    if not isinstance(tensor, FileTensor):
        raise CheckpointError(f"{file} has no tensor")
    if tensor.shape == shape:
        return tensor
    if tensor.shape != (math.prod(shape),):
        raise CheckpointError(
            f"{file} has shape {list(tensor.shape)}, but its parameter {list(shape)}"
        )
    return Reshaped(shape, tensor)


def stage_of(found: Table) -> int:
    """Returns the ZeRO stage of an optimizer state: 1, 2 or 3.

    Without the key `zero_stage`, the stage is 1, because one of DeepSpeed's optimizers for stage 1
    does not save this key.
    """
    value = found.get("zero_stage", 1)
    value = value.args[0] if isinstance(value, PickledObject) and value.args else value
    # Python 3.11.0 to 3.11.3 pickle a member of ZeroStageEnum by its name.
    if isinstance(value, str):
        value = {"optimizer_states": 1, "gradients": 2, "weights": 3}.get(value, value)
    if value not in (1, 2, 3):
        raise CheckpointError(f"ZeRO stage {plain(value)} is not known")
    return int(value)


def scale_of(scaler: Any) -> dict[str, float]:
    """Converts the state of DeepSpeed's dynamic loss scaler to the keys of native checkpoints.

    Returns an empty dict for any other loss scaler. See deepspeed/runtime/fp16/loss_scaler.py.
    """
    if not isinstance(scaler, PickledObject) or not scaler.name.endswith(".DynamicLossScaler"):
        return {}
    names = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
    values = [number(scaler.state.get(name)) for name in names]
    scale, at, overflow, left = (-1.0 if value is None else value for value in values)
    if None in values or not scale > 0:
        return {}
    # `at` - `overflow` - 1 updates have succeeded since the overflow. `good` is one less: after an
    # overflow, DeepSpeed 0.19 first doubles the scale after `loss_scale_window` + 1 such updates,
    # but threed after `loss_scale_window`.
    good = max(0.0, at - overflow - 2)
    return {"loss_scale": scale, "good_steps": good, "hysteresis_left": max(0.0, left)}


def _count(value: Any) -> int:
    return value if isinstance(value, int) and 0 <= value < 2**53 else 0


def _vectors(found: Table, weights: str, states: str) -> list[Table]:
    """Returns one dictionary per parameter group, with the rank's flat weights and moments [n].

    The keys are "weight" and the names of the moments. If the checkpoint stores the number of
    updates, the dictionary has this number as "step".

    Args:
        found: the optimizer state of the rank.
        weights: the key of the master weights in `found`.
        states: the key of the base optimizer's state in `found`.
    """
    state = found[states]
    group_step = found.get("base_optimizer_state_step")
    if isinstance(state, dict):
        steps = [group.get("step") for group in state.get("param_groups", ())]
        group_step = next((step for step in steps if step is not None), group_step)
        state = state["state"]
    vectors = []
    for index, masters in enumerate(found[weights]):
        own = state.get(index, {}) if isinstance(state, dict) else state[index]
        parts: Table = {
            name: value
            for name, value in own.items()
            if isinstance(value, FileTensor) and len(value.shape) == 1
        }
        step = number(own.get("step", group_step))
        vectors.append({**parts, WEIGHT: masters} | ({} if step is None else {"step": step}))
    return vectors
