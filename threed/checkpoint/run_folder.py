"""The checkpoints of a run folder: which a resume uses, and which are kept, deleted or set aside.

    paths = candidates(folder, after_restart(folder, config.checkpoint.resume))
    problems = refusals(read_manifest(path), config, data)     differences that prevent the resume
    retention = Retention(folder, keep, everyone)
    retention.prune()                                          after each save; collective

    demo/checkpoints/step-40                              the highest step, which was saved last
    demo/checkpoints-abandoned-20260801-101500/step-60    set aside by a resume from step 40

If a run resumes from an earlier step, or skips damaged checkpoints, the checkpoints of later steps
are abandoned: they are moved to another folder before the run's first step. So the checkpoint with
the highest step in the folder `checkpoints` is always the one that was saved last. The next start
of the run resumes from this checkpoint.
"""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from threed.checkpoint.files import CheckpointError, plain
from threed.checkpoint.manifest import parts_of, read_manifest, verify
from threed.checkpoint.resuming import BY_KEY, OTHER_IDS, SHAPE, Manifest, is_of_a_run
from threed.config.groups import Config, ModelConfig, OptimConfig, python_name
from threed.config.resolution import resolve_model
from threed.core import process
from threed.core.atomic import sync
from threed.core.source import names_model
from threed.data import Data
from threed.distributed import collectives
from threed.distributed.topology import Axis
from threed.zero.setup import state_names
from threed.zero.state import PREVIOUS, WEIGHT


def candidates(folder: Path, resume: str) -> Iterator[Path]:
    """Yields the checkpoints that a resume tries, in the order in which it tries them.

    Args:
        folder: run folder.
        resume: "auto" for the run folder's checkpoints by descending step; "none" for no
            checkpoints; or the path of a single checkpoint.
    """
    if resume == "auto":
        steps = [
            path for path in (folder / "checkpoints").glob("step-*") if path.name[5:].isdecimal()
        ]
        yield from sorted(steps, key=step_of, reverse=True)
    elif resume != "none":
        yield Path(resume)


def after_restart(folder: Path, resume: str) -> str:
    """Returns the value of `checkpoint.resume` to use after a possible restart by torchrun.

    If torchrun has restarted this job and the job has already saved a checkpoint, the value is
    "auto". With the configured value, the run would start from a different state and abandon that
    checkpoint. Otherwise the configured value is returned.

    Args:
        folder: run folder.
        resume: the configured value of `checkpoint.resume`.
    """
    job = process.job_name()
    if resume == "auto" or job is None or process.restarts() == 0:
        return resume
    for path in candidates(folder, "auto"):
        with suppress(CheckpointError):
            if read_manifest(path)["state"]["extra"].get("job") == job:
                return "auto"
    return resume


def step_of(path: Path) -> int:
    """Returns the step of a checkpoint from the name of its folder, step-N."""
    return int(path.name[5:])


def refusals(manifest: Manifest, config: Config, data: Data) -> list[str]:
    """Returns one line of text per difference that prevents a run from resuming, with a fix.

    If the step of the checkpoint is 0, or if its weights were imported from another framework, only
    the model and the optimizer are compared. Other differences take effect (`resuming.changes`).

    Args:
        manifest: manifest of the checkpoint.
        config: the resolved configuration of the run.
        data: data and tokenizer of the run.
    """
    found = []
    if is_of_a_run(manifest) and _tokenizer_differs(manifest["state"]["extra"], data):
        saved = plain(manifest["config"]["data"]["tokenizer"])
        names = f"{saved}, and --data.tokenizer {config.data.tokenizer} gives other ids"
        found = [f"the checkpoint was trained with tokenizer {names}: {OTHER_IDS}"]
    return found + model_differences(manifest, config) + optimizer_differences(manifest, config)


def _tokenizer_differs(extra: Mapping[str, Any], data: Data) -> bool:
    """Returns whether the run's tokenizer maps text to different ids than the checkpoint's.

    The fingerprints of the two tokenizers are compared. If the checkpoint has no fingerprint, the
    hashes of the files tokenizer.json are compared instead. The end-of-text id is compared
    separately, because config.json may define it. So it can differ even if tokenizer.json is the
    same.
    """
    files, now = extra.get("tokenizer"), data.tokenizer.files
    if extra.get("eot", data.tokenizer.eot) != data.tokenizer.eot:
        return True
    if not isinstance(files, dict) or files == now:
        return False
    if "fingerprint" in extra:
        return bool(extra["fingerprint"] != data.tokenizer.fingerprint)
    return files.get("tokenizer.json") != now.get("tokenizer.json")


def model_differences(manifest: Manifest, config: Config) -> list[str]:
    """Returns one line of text per difference between the models that prevents a resume."""
    saved, wanted = manifest["config"]["model"], config.model.model_dump(mode="json")
    # Adds the defaults of keys that an older version of threed did not save. If a later version of
    # threed wrote the checkpoint, the validation may fail; the saved values are then compared as
    # they are.
    with suppress(ValueError):
        resolved = resolve_model(ModelConfig.model_validate(saved))
        saved = spelled_as(resolved, config.model).model_dump(mode="json")
    if all(names_model(str(model.get("arch"))) for model in (saved, wanted)):
        # For custom models, the paths of the code files are not compared, because a file may have
        # moved. The shapes of the tensors are compared when the checkpoint is loaded.
        saved["arch"], wanted["arch"] = (m["arch"].rpartition(":")[2] for m in (saved, wanted))
    fixed = {
        python_name(key[6:])
        for key, rule in BY_KEY.items()
        if rule.group == "model" and rule.change == "refused"
    }
    learned = config.model.record.learned_positions
    fixed |= {"positions"} if learned or config.model.rope_scaling is not None else set()
    found = []
    for key in [key for key in wanted if key in fixed and saved.get(key) != wanted[key]]:
        before = plain(saved.get(key))
        how = f"give --model.positions {before} as well; otherwise " if key == "positions" else ""
        differs = f"has {key} = {before}, this run has {wanted[key]}"
        found.append(f"the checkpoint's model {differs}: {how}{SHAPE}")
    return found


def spelled_as(saved: ModelConfig, model: ModelConfig) -> ModelConfig:
    """Returns a saved model configuration in the notation of `model`, to compare the two.

    A Qwen3 without windows can also be written as a Llama with `qk_norm`. If `model` is a Llama
    with `qk_norm`, such a saved Qwen3 is returned in this notation.

    Args:
        saved: model configuration of a checkpoint.
        model: model configuration to compare with.
    """
    windows = saved.window is not None or saved.layer_pattern is not None
    same = (saved.arch, model.arch, model.qk_norm, windows) == ("qwen3", "llama", True, False)
    return saved.model_copy(update={"arch": "llama", "qk_norm": True}) if same else saved


def optimizer_differences(manifest: Manifest, config: Config) -> list[str]:
    """Returns a list of one line of text if the optimizers differ, else an empty list.

    The names of the optimizers in the two configurations are compared. It would not be enough to
    compare the names of the saved parts, because Lion's momentum has the same name as one of Adam's
    moments.
    """
    optim = OptimConfig.model_validate(manifest["config"]["optim"])
    saved, wanted = _optimizer_names(optim), _optimizer_names(config.optim)
    kept = sorted(parts_of(manifest) - {WEIGHT, PREVIOUS})
    # A checkpoint without moments and without steps has only weights, which were imported from
    # another format. Any optimizer can start from these weights.
    if saved == wanted or not (kept or manifest["state"]["steps"]):
        return []
    there, here = (", ".join(names) or "nothing" for names in (kept, state_names(config.optim)))
    fix = f"resume with --optim.name {saved}, or start over with --checkpoint.resume none"
    return [
        f"the checkpoint's optimizer is {saved}, which keeps {there}; this run has {wanted}, which keeps {here}: {fix}"
    ]


def _optimizer_names(optim: OptimConfig) -> str:
    """Returns the optimizer's name, followed by --optim.groups if groups name an optimizer."""
    own = "; ".join(f"{group.match}: name={group.name}" for group in optim.groups if group.name)
    return f'{optim.name} --optim.groups "{own}"' if own else optim.name


def resuming_flags(config: Config) -> list[str]:
    """Returns flags that make a run resume from its own checkpoints.

    Append them to the command line of the run. They take effect there, because the last value of a
    repeated key is used.
    """
    return [] if config.checkpoint.resume == "auto" else ["--checkpoint.resume", "auto"]


def resume_hint(config: Config, words: list[str] | None) -> str:
    """Returns how to resume a run, for messages about its end.

    Args:
        config: the resolved configuration of the run.
        words: the command that resumes, if it is not the run's own command. This is the case if a
            Hugging Face folder defined the model, because then the run's command line has no flags
            for the model, and the command that resumes reads the run's config.toml.
    """
    newest = next(candidates(Path(config.run.dir or "runs"), "auto"), None)
    if newest is None:
        return "no checkpoint was saved yet (--checkpoint.every N saves while the run trains; SIGTERM saves before it ends)"
    more = resuming_flags(config)
    if words is not None:
        return f"{shlex.join([*words, *more])} resumes from {newest}"
    return f"the same command{' with ' * bool(more)}{' '.join(more)} resumes from {newest}"


# ------------------------------------------------------------------------------------------- retention


def _covered_steps(path: Path) -> Iterator[int]:
    """Yields the step of a checkpoint, and the steps of the deferred checkpoints that it replaces.

    A checkpoint that is due after a skipped step is deferred: it is not saved, and the next saved
    checkpoint replaces it.
    """
    yield step_of(path)
    with suppress(CheckpointError):
        put_off = read_manifest(path)["state"]["extra"].get("put_off")
        yield from (
            step for step in (put_off if isinstance(put_off, list) else ()) if isinstance(step, int)
        )


class Retention:
    """Deletes old checkpoints of a run folder.

    The newest `keep` good checkpoints are kept, and all checkpoints at steps that are multiples of
    `every`. Checkpoints that this process has loaded or written are good. Any other checkpoint is
    good if the hashes of its files match its manifest. A damaged checkpoint does not count toward
    `keep`, so it never causes a good checkpoint to be deleted. It is kept for inspection until
    there are `keep` newer good checkpoints; then it is deleted, unless its step is a multiple of
    `every`. The newest good checkpoint is never deleted.

    Args:
        folder: run folder.
        keep: number of good checkpoints to keep.
        everyone: axis of all ranks.
        every: checkpoints of steps that are multiples of `every` are kept, too. If the checkpoint
            of such a step was deferred, the checkpoint that replaces it is kept. 0 for none.
    """

    def __init__(self, folder: Path, keep: int, everyone: Axis, every: int = 0) -> None:
        self.folder, self.keep, self.everyone, self.every = folder, keep, everyone, every
        self._good: dict[str, bool] = {}

    def trust(self, path: Path) -> str | None:
        """Marks a checkpoint as good, because this process has just loaded or written it.

        Returns:
            The name of the checkpoint, or None if it is not in this run's folder.
        """
        if not self._owns(path):
            return None
        self._good[path.absolute().name] = True
        return path.absolute().name

    def _owns(self, path: Path) -> bool:
        return path.absolute().parent.resolve() == (self.folder / "checkpoints").resolve()

    def sweep(self) -> None:
        """Removes the folders that interrupted saves have left behind.

        To replace a checkpoint, `files.publish` may rename the older one to `step-N.old` and then
        the new one to `step-N`. If a save was interrupted between these renames, this method
        renames `step-N.old` back to `step-N`. Call it on one rank only, in a run that owns the run
        folder.
        """
        place = self.folder / "checkpoints"
        for old in place.glob("step-*.old"):
            if (final := old.with_suffix("")).exists():
                shutil.rmtree(old, ignore_errors=True)
            else:
                old.rename(final)
        for building in place.glob("step-*.tmp"):
            shutil.rmtree(building, ignore_errors=True)

    def prune(self) -> list[str]:
        """Deletes checkpoints that are older than the newest `keep` good checkpoints. Collective.

        Checkpoints at steps that are multiples of `every` are not deleted.

        Returns:
            One error text per damaged checkpoint that was found.
        """
        paths = list(candidates(self.folder, "auto")) if self.everyone.index == 0 else []
        names = collectives.exchange([path.name for path in paths], self.everyone)[0]
        problems: list[str] = []
        good = 0
        for number, name in enumerate(names, 1):
            if name not in self._good:
                found = self._problems(self.folder / "checkpoints" / name)
                self._good[name], problems = not found, problems + found[:1]
            good += self._good[name]
            if good == self.keep:
                self._delete(paths[number:])
                break
        return problems

    def _delete(self, paths: Sequence[Path]) -> None:
        """Deletes checkpoints, except at steps that are multiples of `every`.

        Args:
            paths: paths of the checkpoints on rank 0; empty on other ranks.
        """
        for path in paths:
            if not (self.every and any(step % self.every == 0 for step in _covered_steps(path))):
                shutil.rmtree(path, ignore_errors=True)

    def _problems(self, path: Path) -> list[str]:
        """Returns the error texts that the ranks find in a checkpoint. Collective.

        Each rank checks some of the files; every rank returns the errors of all files.
        """
        try:
            problems = verify(path, read_manifest(path), self.everyone.index, self.everyone.size)
        except CheckpointError as error:
            problems = [str(error)]
        return collectives.problems_of_all(problems, self.everyone)

    def set_aside(self, origin: Path | None, step: int) -> str:
        """Moves the checkpoints that a run abandons by starting from `origin`. Collective.

        If `origin` is in this run's folder, the run abandons the checkpoints of later steps. If the
        run starts from scratch or from another run's checkpoint, it abandons all checkpoints in its
        folder. They are moved to a new folder, to which `metrics.jsonl` is copied.

        Args:
            origin: checkpoint from which the run starts; None to start from scratch.
            step: step of `origin`.

        Returns:
            A text with the names of the moved checkpoints and their new folder; "" if no
            checkpoint was moved.

        Raises:
            CheckpointError: on every rank if moving fails.
        """
        kept = step if origin is not None and self._owns(origin) else -1
        text = collectives.attempt_together(
            lambda: self._move_later(kept), self.everyone, CheckpointError,
            lambda error: f"the checkpoints after step {step} cannot be set aside: {error}",
        )  # fmt: skip
        return str(collectives.exchange(text, self.everyone)[0])

    def _move_later(self, step: int) -> str:
        later = [path for path in candidates(self.folder, "auto") if step_of(path) > step]
        if not later or self.everyone.index:
            return ""
        aside = _new_folder(self.folder / time.strftime("checkpoints-abandoned-%Y%m%d-%H%M%S"))
        metrics = self.folder / "metrics.jsonl"
        if metrics.exists():
            shutil.copy2(metrics, aside)
        # Moves the newest checkpoint last. If the process is killed in between, the next start with
        # "auto" still resumes from this checkpoint.
        for path in reversed(later):
            path.rename(aside / path.name)
        for place in (aside, self.folder, self.folder / "checkpoints"):
            sync(place)
        return f"{', '.join(path.name for path in reversed(later))} in {aside}"


def _new_folder(path: Path) -> Path:
    """Creates a folder and returns its path; a number is appended if the name is taken."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    free.mkdir()
    return free
