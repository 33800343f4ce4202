"""DeepSpeed's checkpoints of a Hugging Face module: ZeRO stages 0 to 3, of its engine without a pipeline.

    checkpoint = DeepSpeedCheckpoint(folder, config)         a `Source`; CheckpointError for what is not read, by name

A folder (`global_step100`, or the one above with `latest`) has mp_rank_00_model_states.pt and, of each data rank,
zero_pp_rank_N_mp_rank_00_optim_states.pt. In these are flat fp32 masters and moments; what they are of, the model's
file says, `param_shapes`, in order (deepspeed/utils/zero_to_fp32.py, runtime/engine.py, runtime/zero, of 0.19.8):

- Stages 1 and 2: a group of parameters is one flat vector, cut evenly over the ranks; there may be padding behind a
  parameter (`param_alignment_paddings`) and at the end, which the last ranks' masters are saved without.
- Stage 3: of every parameter each rank has ceil(numel / ranks) elements, one parameter after the other, over all the
  groups that it updates at a time; the padding is at the end of each parameter.
- Frozen parameters are not there: stages up to 2 have them in `module`, stage 3 cut over the ranks' model files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
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
from threed.interop.huggingface.folder import DTYPES, Header, HFTensors
from threed.interop.pickle_reader import PickleReader, Thing, as_written_by, number
from threed.interop.source import Progress
from threed.parse import ParseError, read_file
from threed.zero.records import WEIGHT

MOMENTS = ("exp_avg", "exp_avg_sq")
MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
STATES_FILE = re.compile(r"(bf16_|fp16_|)zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
OTHERS = {  # by their files: what is not read
    "layer_*_model_states.pt": "that of a PipelineModule or of experts, whose names are its program's own",
    "layer_*-model_*states.pt": "that of a PipelineModule, whose layers have numbers for names",
    "expp_rank_*": "one with experts (MoE)",
}
NAMES = {name: spelt for spelt, name in DTYPES.items()}


def step_folder(path: Path) -> Path | None:
    """Returns the folder with a checkpoint's files: `path`, or the one below that `latest` names; None: neither."""
    if (path / "latest").is_file():
        try:
            tag = read_file(path / "latest", 2**12).decode("utf-8").strip()
        except (ParseError, ValueError):
            return None
        below = path / tag
        return (
            below
            if tag and tag.isprintable() and Path(tag).name == tag and _has_states(below)
            else None
        )
    return path if _has_states(path) else None


def _has_states(path: Path) -> bool:
    return path.is_dir() and any(file.name.endswith("model_states.pt") for file in path.iterdir())


class DeepSpeedCheckpoint(HFTensors):
    """A checkpoint of DeepSpeed's as a `Source`; stage: of ZeRO."""

    def __init__(self, path: Path, config: Path) -> None:
        self.notes: list[str] = []
        self.scale: dict[str, float] = {}
        self._tensors: dict[str, dict[str, LazyTensor]] = {}  # by their name, then by part
        super().__init__(path, config)
        for name, entry in self._entries.items():
            saved = self._tensors.get(self._key(entry), {})
            self.parts[name] = [part for part in (WEIGHT, *MOMENTS) if part in saved]

    def _open_all(self) -> set[str]:
        folder = step_folder(self.path)
        assert folder is not None
        self._folder = folder
        with as_written_by("DeepSpeed 0.19", folder):
            self._read(folder)
            self._strip()
        return set(self._tensors)

    # ---------------------------------------------------------------------------------------------------- what it has

    def _read(self, folder: Path) -> None:
        models, states = files_of(folder)
        reader = PickleReader()
        heads = [_table(reader.torch_file(file), file) for file in models]
        ranks = [
            _table(_table(reader.torch_file(file), file).get("optimizer_state_dict"), file)
            for file in states
        ]
        self._understand(heads, ranks)

    def _begin(self, head: dict[str, Any], what: str = "") -> None:
        """Takes what the model's file says of the training."""
        version = head.get("ds_version")
        self.title = f"{what}ZeRO stage {self.stage}"
        if version:
            self.title = f"DeepSpeed {plain(version)}, {self.title}"
        steps, samples, skipped = (
            _count(head.get(key)) for key in ("global_steps", "global_samples", "skipped_steps")
        )
        self.progress = Progress(steps, samples, max(0.0, float(steps - skipped)))
        self._has_masters = bool(head.get("param_shapes"))  # in other files

    def _understand(self, heads: list[dict[str, Any]], ranks: list[dict[str, Any]]) -> None:
        head = heads[0]
        self.stage = stage_of(ranks[0]) if ranks else 0
        self._begin(head)
        self.scale = scale_of(ranks[0].get("loss_scaler")) if ranks else {}
        self._check_ranks(ranks, len(heads))
        if self.stage == 3:
            self._sliced(head["param_shapes"], ranks)
            self._frozen([found.get("frozen_param_fragments") or {} for found in heads], head)
        else:
            if self.stage:
                self._flat(head["param_shapes"], ranks)
            else:
                self._plain(head)
            self._rest(head)
        self._finish(head)

    def _finish(self, head: dict[str, Any]) -> None:
        """Adds other names of shared parameters, and says where there are no moments."""
        for other, name in (head.get("shared_params") or {}).items():
            if name in self._tensors:
                self._tensors.setdefault(other, self._tensors[name])
        if self._has_masters and not any(len(parts) > 1 for parts in self._tensors.values()):
            self.progress, self.scale = Progress(), {}
            self.notes.append(
                "it has no moments of Adam: a run begins at step 0, with moments of zero"
            )

    def _check_ranks(self, ranks: list[dict[str, Any]], heads: int) -> None:
        if self._has_masters and not ranks:
            raise CheckpointError(
                f"{self._folder} has no files of its optimizer: copy those of all machines together"
            )
        for found in ranks:
            count = found.get("partition_count", len(ranks))
            if any(n != len(ranks) for n in (count if isinstance(count, list) else [count])):
                raise CheckpointError(
                    f"{self._folder} has states of {len(ranks)} data ranks, and was saved by {count}"
                )
        if self.stage == 3 and heads != len(ranks):
            raise CheckpointError(
                f"{self._folder} has the model of {heads} ranks and the states of {len(ranks)}"
            )

    def _flat(self, groups: list[dict[str, Any]], ranks: list[dict[str, Any]]) -> None:
        """Stages 1 and 2: the vector of each group."""
        paddings = ranks[0].get("param_alignment_paddings") or [[] for _ in groups]
        slices = [
            _vectors(found, "single_partition_of_fp32_groups", "base_optimizer_state")
            for found in ranks
        ]
        for group, shapes in enumerate(groups):
            vectors, end = self._concatenated([found[group] for found in slices]), 0
            behind = list(paddings[group]) + [0] * (len(shapes) - len(paddings[group]))
            for (name, shape), padding in zip(shapes.items(), behind, strict=True):
                first, end = end, end + math.prod(shape)
                self._tensors[name] = {
                    part: Reshaped(shape, rows(vector, (first, end)))
                    for part, vector in vectors.items()
                }
                end += padding
            (numel,) = vectors[WEIGHT].shape
            if not 0 <= numel - end + sum(behind[-1:]) <= 2 * 2 * len(ranks):
                raise CheckpointError(
                    f"{self._folder}: group {group} has {numel} values, not {end}"
                )

    def _sliced(self, groups: list[dict[str, Any]], ranks: list[dict[str, Any]]) -> None:
        """Stage 3: slices of each parameter."""
        slices = [_vectors(found, "fp32_flat_groups", "optimizer_state_dict") for found in ranks]
        vectors = [self._concatenated(found) for found in slices]
        at, size = 0, len(ranks)
        for name, shape in (pair for shapes in groups for pair in shapes.items()):
            numel = math.prod(shape)
            share = -(-numel // size)
            self._tensors[name] = {
                part: _unpadded(shape, [rows(some[part], (at, at + share)) for some in vectors])
                for part in vectors[0]
            }
            at += share
        if any(some[WEIGHT].shape != (at,) for some in vectors):
            numel = vectors[0][WEIGHT].shape[0]
            raise CheckpointError(f"{self._folder}: its slices have {numel} values, not {at}")

    def _concatenated(self, vectors: Sequence[Mapping[str, Any]]) -> dict[str, LazyTensor]:
        """Returns the weights and moments [n] in flat vectors, one after the other; notes what is left out."""
        common = set(vectors[0]).intersection(*vectors[1:])
        if any(set(found) != common for found in vectors):
            raise CheckpointError(
                f"{self._folder}: some ranks saved states of the optimizer, and others did not"
            )
        steps = {float(found["step"]) for found in vectors if found.get("step") is not None}
        if steps:
            self.progress = Progress(self.progress.steps, self.progress.samples, max(steps))
        kept = common - {"step", WEIGHT}
        if kept != set(MOMENTS):
            if kept:
                self._note(
                    f"{', '.join(sorted(kept))} of its optimizer are left out, which are not Adam's moments"
                )
            kept = set()
        return {
            part: concatenate([found[part] for found in vectors])
            for part in (WEIGHT, *MOMENTS)
            if part in kept | {WEIGHT}
        }

    def _frozen(self, fragments: list[dict[str, Any]], head: dict[str, Any]) -> None:
        """Stage 3: parameters that are not trained."""
        for name, shape in (head.get("frozen_param_shapes") or {}).items():
            self._tensors[name] = {WEIGHT: _unpadded(shape, [found[name] for found in fragments])}

    def _rest(self, head: dict[str, Any]) -> None:
        """Stages to 2: what the optimizer does not have."""
        buffers = set(head.get("buffer_names") or ())
        shared = head.get("shared_params") or {}
        for name, place in head["module"].items():
            if (
                name not in self._tensors
                and name not in buffers
                and name not in shared
                and isinstance(place, FileTensor)
            ):
                self._tensors[name] = {WEIGHT: place}

    def _plain(self, head: dict[str, Any]) -> None:
        """Stage 0 says nowhere what its states are of."""
        self.progress = Progress()
        found = {place.dtype for place in head["module"].values() if isinstance(place, FileTensor)}
        low = (
            ""
            if found <= {torch.float32, torch.float64}
            else ", and its weights are those in low precision"
        )
        self._note(f"its states have no names: a run begins at step 0, with moments of zero{low}")

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _strip(self) -> None:
        """Takes away what wrappers put before all names."""
        for prefix in ("module.", "_orig_mod.", "module."):
            if self._tensors and all(name.startswith(prefix) for name in self._tensors):
                self._tensors = {
                    name.removeprefix(prefix): parts for name, parts in self._tensors.items()
                }

    # -------------------------------------------------------------------------------------------------------- reading

    def _find(self, found: dict[str, Header]) -> Iterator[str]:
        for name, parts in self._tensors.items():
            found[name] = (
                NAMES.get(parts[WEIGHT].dtype, str(parts[WEIGHT].dtype)),
                tuple(parts[WEIGHT].shape),
            )
        yield from ()

    def _theirs(self, part: str, key: str) -> LazyTensor:
        return self._tensors[key][part]


def _unpadded(shape: Shape, slices: Sequence[LazyTensor]) -> LazyTensor:
    """Returns a parameter, from the slices [n] that the ranks have, with padding behind the last values."""
    return Reshaped(shape, rows(concatenate(slices), (0, math.prod(shape))))


# -------------------------------------------------------------------------------------------------------------- files


def files_of(folder: Path) -> tuple[list[Path], list[Path]]:
    """Returns the files of models and of states, by data rank; CheckpointError for what is not read, by name."""
    for pattern, what in OTHERS.items():
        if file := next(iter(sorted(folder.glob(pattern))), None):
            raise CheckpointError(f"{folder} is {what} ({file.name}): that is not read")
    models, states, kinds = dict[int, Path](), dict[int, Path](), set[str]()
    for file in sorted(folder.iterdir()):
        if match := MODEL_FILE.fullmatch(file.name):
            rank, mp = int(match[1] or 0), int(match[2])
            models[rank] = file
        elif match := STATES_FILE.fullmatch(file.name):
            rank, mp = int(match[2]), int(match[3])
            kinds.add(match[1])
            states[rank] = file
        else:
            continue
        if mp:
            raise CheckpointError(
                f"{folder} is of a model in several parts ({file.name}): that is not read; save it at tp 1"
            )
    if len(kinds) > 1:
        raise CheckpointError(
            f"{folder} has states of several kinds ({', '.join(sorted(kinds))}): take away the old ones"
        )
    for found in (models, states):
        if found and sorted(found) != list(range(len(found))):
            missing = next(rank for rank in range(len(found)) if rank not in found)
            raise CheckpointError(
                f"{folder} has no file of rank {missing}: copy those of all machines together"
            )
    return [models[rank] for rank in sorted(models)], [states[rank] for rank in sorted(states)]


def _table(found: Any, file: Path) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} is not as DeepSpeed writes it")
    return found


def stage_of(found: dict[str, Any]) -> int:
    """Returns ZeRO's stage, which one of its optimizers does not say."""
    value = found.get("zero_stage", 1)
    value = value.args[0] if isinstance(value, Thing) and value.args else value
    if value not in (1, 2, 3):
        raise CheckpointError(f"ZeRO stage {plain(value)} is not known")
    return int(value)


def scale_of(scaler: Any) -> dict[str, float]:
    """Returns the loss scale as a checkpoint keeps it, of a dynamic one (runtime/fp16/loss_scaler.py)."""
    state = (
        scaler.state
        if isinstance(scaler, Thing) and scaler.name.endswith(".DynamicLossScaler")
        else None
    )
    if not isinstance(state, dict):
        return {}
    names = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
    scale, at, overflow, left = (number(state.get(name)) for name in names)
    if scale is None or at is None or overflow is None or left is None or not scale > 0:
        return {}
    # 0.19 doubles one update later, and every window from then on
    good = max(0.0, at - overflow - 2)
    return {"loss_scale": scale, "good_steps": good, "hysteresis_left": max(0.0, left)}


def _count(value: Any) -> int:
    return value if isinstance(value, int) and 0 <= value < 2**53 else 0


def _vectors(found: dict[str, Any], weights: str, states: str) -> list[dict[str, Any]]:
    """Returns of each group a rank's parts (flat places) and step."""
    state: Any = found[states]
    group_step = found.get("base_optimizer_state_step")
    if isinstance(state, dict):
        steps = [group.get("step") for group in state.get("param_groups", ())]
        group_step = next((step for step in steps if step is not None), group_step)
        state = state["state"]
    vectors = []
    for index, place in enumerate(found[weights]):
        own = state.get(index, {}) if isinstance(state, dict) else state[index]
        parts = {
            name: value
            for name, value in own.items()
            if isinstance(value, FileTensor) and len(value.shape) == 1
        }
        step = number(own.get("step"), number(group_step))
        vectors.append({**parts, WEIGHT: place, **({} if step is None else {"step": step})})
    return vectors
