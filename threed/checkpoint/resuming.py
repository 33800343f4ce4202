"""Compares a checkpoint with the run that resumes from it, by a table of all keys.

    found = compare(manifest, config, data)
    found.refused          problems, each with its fix
    found.applied          lines to report: the old value, the new value, the effect

`python -m tests.keys` writes the table, `RULES`, to docs/reference.md. If a checkpoint has no steps, or its weights
were trained by another framework, its keys are not those of a run: only the model and the optimizer are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from threed.arguments import GROUPS
from threed.checkpoint.files import CheckpointError, plain
from threed.checkpoint.manifest import parts_of
from threed.config import Config, ModelConfig, OptimConfig, key_name, python_name
from threed.data import Data
from threed.resolution import resolve_model, spelt_as
from threed.schema import written
from threed.zero.records import PREVIOUS, WEIGHT
from threed.zero.setup import learning_rate, state_names

Change = Literal["free", "applied", "refused"]
Manifest = Mapping[str, Any]


@dataclass(frozen=True)
class Rule:
    """The handling of some keys on a resume, if they differ from the checkpoint's.

    Args:
        group: of the keys.
        names: the keys as users write them, separated by blanks.
        change: free (takes effect and is not reported), applied (takes effect and is reported) or refused.
        note: the reason if free, the effect (a part of the report) if applied, the fix if refused.
    """

    group: str
    names: str
    change: Change
    note: str

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys as `group.key`."""
        return tuple(f"{self.group}.{name}" for name in self.names.split())


SHAPE = "resume with the same shape, or start anew with --checkpoint.resume none"
RULES = (
    Rule(
        "parallel", "tp pp cp ep dp sequence chunks partition memory-limit-gib optimistic-step", "free",
        "a checkpoint is loaded in any topology, and each step has the same samples",
    ),
    Rule("parallel", "schedule", "applied", "2bw delays updates by a step; all others differ in speed and memory only"),
    Rule(
        "zero",
        "stage bucket-mib shard-size offload-optimizer offload-params nvme-path prefetch resident order early-update"
        " tile",
        "free", "where the state is and in which order it is updated do not change the results",
    ),
    Rule("zero", "compress-weights compress-gradients", "applied", "numbers are rounded differently"),
    Rule("zero", "delayed-update", "applied", "delayed updates use weights that are one step old"),
    Rule(
        "recompute", "mode ops every partition offload loss-chunks arena", "free",
        "activations computed again are the same",
    ),
    Rule("precision", "dtype", "applied", "results are rounded differently; the master weights stay"),
    Rule("precision", "grad-dtype reduce-dtype", "applied", "gradients are rounded differently"),
    Rule("precision", "cast-inputs", "applied", "rounding of floating-point inputs changes from here on"),
    Rule("precision", "loss-scale", "applied", "dynamic goes on from the checkpoint's dynamic scale, if it has one"),
    Rule(
        "model",
        "arch layers hidden heads kv-heads head-dim ffn vocab tied bias mlp-bias norm-eps rope-theta rope-local-theta"
        " rope-scaling partial-rotary-factor qk-norm window layer-pattern attention-softcap logit-softcap"
        " query-pre-attn-scalar",
        "refused", SHAPE,
    ),
    Rule("model", "seq", "applied", "the data are divided into other windows: some text is read again, some later"),
    Rule(
        "model", "positions", "applied",
        "changes exports only; refused with learned positions or rope-scaling, as it is a part of the model",
    ),
    Rule("model", "dropout", "applied", "takes effect from the next step on"),
    Rule("train", "steps", "applied", "the learning-rate schedule ends there"),
    Rule("train", "global-batch", "applied", "samples go on after the checkpoint's last one; the rate is not scaled"),
    Rule("train", "seed", "applied", "samples and dropout masks differ from here on"),
    Rule("train", "eval-samples", "applied", "val/loss is the mean over another number of windows"),
    Rule("train", "grad-clip max-norm-spike", "applied", "takes effect from the next step on"),
    Rule(
        "train", "stop-after micro-batch eval-every max-bad-steps sample-tokens time-limit", "free",
        "updates do not depend on it",
    ),
    Rule("optim", "name", "refused", "resume with the same optimizer, or start anew with --checkpoint.resume none"),
    Rule("optim", "lr min-lr warmup schedule", "applied", "the learning rate follows this run's keys"),
    Rule(
        "optim", "betas momentum eps weight-decay groups", "applied",
        "takes effect from the next step on; moments stay; another optimizer of a group is refused",
    ),
    Rule("data", "path", "free", "the contents are compared instead"),
    Rule("data", "tokenizer", "free", "the ids are compared instead"),
    Rule("data", "bos special-tokens", "applied", "documents are encoded differently from here on"),
    Rule("data", "split", "applied", "text that was trained on may be in the validation split now"),
    Rule(
        "checkpoint", "every keep keep-every async memory-every write-limit-mib resume export-hf", "free",
        "the saved values do not depend on it",
    ),
    Rule("log", "every wandb project profile-steps", "free", "logging does not change training"),
    Rule(
        "run", "dir name check-replicas hang-timeout replicate recheck-bad-steps compile compile-backend", "free",
        "results are the same up to rounding",
    ),
)  # fmt: skip
OTHER_DATA = "the data differ from those the checkpoint was trained on: losses may jump"
OTHER_IDS = (
    "resume with its tokenizer; or write the weights to a folder with `threed convert`, and begin from it with"
    " --checkpoint.resume FOLDER and the other --data.tokenizer"
)
CONTENTS: tuple[tuple[str, Change, str], ...] = (
    ("contents of the data (sha256)", "applied", OTHER_DATA),
    ("ids that the tokenizer gives (fingerprint)", "refused", OTHER_IDS),
)
"""Comparisons other than of keys: name, change, note."""
RATE = ("train.steps", "optim.lr", "optim.min-lr", "optim.warmup", "optim.schedule")
BY_KEY = {key: rule for rule in RULES for key in rule.keys}


@dataclass
class Comparison:
    """The differences between a checkpoint and a run: problems, and lines to report."""

    refused: list[str] = field(default_factory=list)
    applied: list[str] = field(default_factory=list)

    def accepted(self) -> list[str]:
        """Returns the lines to report. Raises CheckpointError if something is refused."""
        if self.refused:
            raise CheckpointError("; ".join(self.refused))
        return self.applied


def compare(manifest: Manifest | None, config: Config, data: Data) -> Comparison:
    """Compares a checkpoint with the run that resumes from it.

    Args:
        manifest: of the checkpoint; None if there is none.
        config: the resolved configuration of the run.
        data: of the run.
    """
    if manifest is None:
        return Comparison()
    model = model_differences(manifest, config)
    model += optimizer_differences(manifest, config)
    if not _is_of_a_run(manifest):
        return Comparison(model)
    saved, extra, found = manifest["config"], manifest["state"]["extra"], Comparison()
    if _tokenizer_differs(extra, data):
        names = f"{plain(saved['data']['tokenizer'])}, and --data.tokenizer {config.data.tokenizer} gives other ids"
        found.refused.append(f"the checkpoint was trained with tokenizer {names}: {OTHER_IDS}")
    found.refused += model
    if extra.get("data_sha256", data.sha256) != data.sha256:
        found.applied.append(OTHER_DATA)
    changed = {key: both for key, *both in _changes(saved, config)}
    for key, (before, now) in changed.items():
        if BY_KEY[key].change == "applied":
            found.applied.append(f"{key} was {before} and is {now}: {BY_KEY[key].note}")
    if changed.keys() & set(RATE):
        found.applied += _rate(manifest, config)
    return found


def _is_of_a_run(manifest: Manifest) -> bool:
    state = manifest["state"]
    return bool(state["steps"]) and "imported" not in state["extra"]


def _tokenizer_differs(extra: Mapping[str, Any], data: Data) -> bool:
    """Returns whether the run's tokenizer gives other ids than the checkpoint's, as far as that is recorded.

    With the same files it does not, except for the end of documents, which a config.json in their folder may name.
    """
    files, now = extra.get("tokenizer"), data.tokenizer.files
    if extra.get("eot", data.tokenizer.eot) != data.tokenizer.eot:
        return True
    if not isinstance(files, dict) or files == now:
        return False
    if "fingerprint" in extra:
        return bool(extra["fingerprint"] != data.tokenizer.fingerprint)
    return files.get("tokenizer.json") != now.get("tokenizer.json")


def _changes(saved: Mapping[str, Any], config: Config) -> Iterator[tuple[str, str, str]]:
    """Yields each key that differs from the checkpoint's, with both values as users write them. Keys that the version
    which wrote the checkpoint did not have are left out."""
    wanted = config.model_dump(mode="json")
    for group, kind in GROUPS.items():
        found = saved.get(group)
        there: Mapping[str, Any] = found if isinstance(found, dict) else {}
        for name in [n for n in kind.model_fields if n in there and there[n] != wanted[group][n]]:
            now = written(getattr(getattr(config, group), name))
            yield f"{group}.{key_name(name)}", _as_written(group, name, there), now


def _as_written(group: str, name: str, saved: Mapping[str, Any]) -> str:
    with suppress(ValueError):  # of a version with other values
        return written(getattr(GROUPS[group].model_validate({name: saved[name]}), name))
    return str(plain(saved[name]))


def _rate(manifest: Manifest, config: Config) -> Iterator[str]:
    """Yields a line if this run's keys give the next update another learning rate than the checkpoint's."""
    state, saved = manifest["state"], manifest["config"]
    done = torch.tensor(float(state["updates"]), dtype=torch.float64)
    with suppress(ValueError, KeyError, TypeError):  # of a version with other keys
        optim, steps = OptimConfig.model_validate(saved["optim"]), int(saved["train"]["steps"])
        before = float(learning_rate(optim, steps)(done))
        now = float(learning_rate(config.optim, config.train.steps)(done))
        if abs(now - before) > 1e-9 * max(now, before):
            step, times = state["steps"] + 1, f", {now / before:.3g} times" if before else ""
            yield f"the learning rate of step {step} is {now:.4g}{times} the {before:.4g} of the checkpoint's keys"


def model_differences(manifest: Manifest, config: Config) -> list[str]:
    """Returns the differences of the model that a resume refuses, one line each."""
    saved, wanted = manifest["config"]["model"], config.model.model_dump(mode="json")
    # defaults of keys that did not exist then; unchanged if a later version wrote it
    with suppress(ValueError):
        resolved = resolve_model(ModelConfig.model_validate(saved))
        saved = spelt_as(resolved, config.model).model_dump(mode="json")
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
        how = f"give --model.positions {before} as well; else " if key == "positions" else ""
        differs = f"has {key} = {before}, this run has {wanted[key]}"
        found.append(f"the checkpoint's model {differs}: {how}{SHAPE}")
    return found


def optimizer_differences(manifest: Manifest, config: Config) -> list[str]:
    """Returns a line if the checkpoint is another optimizer's: Lion's momentum has the name of an Adam moment."""
    optim = OptimConfig.model_validate(manifest["config"]["optim"])
    saved, wanted = _optimizers(optim), _optimizers(config.optim)
    kept = sorted(parts_of(manifest) - {WEIGHT, PREVIOUS})
    # weights alone, of another format
    if saved == wanted or not (kept or manifest["state"]["steps"]):
        return []
    there, here = (", ".join(names) or "nothing" for names in (kept, state_names(config.optim)))
    fix = f"resume with --optim.name {saved}, or start anew with --checkpoint.resume none"
    return [
        f"the checkpoint's optimizer is {saved}, which keeps {there}; this run has {wanted}, which keeps {here}: {fix}"
    ]


def _optimizers(optim: OptimConfig) -> str:
    """Returns the optimizer of a configuration, with those of groups that have their own."""
    own = "; ".join(f"{group.match}: name={group.name}" for group in optim.groups if group.name)
    return f'{optim.name} --optim.groups "{own}"' if own else optim.name


def resuming_flags(config: Config) -> list[str]:
    """Returns the flags that make a run's command line resume from its newest checkpoint: of a repeated key the last
    one counts."""
    return [] if config.checkpoint.resume == "auto" else ["--checkpoint.resume", "auto"]
