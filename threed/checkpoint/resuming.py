"""Compares a checkpoint with the run that resumes from it, key by key.

    found = compare(manifest, config, data)
    found.refused          differences that prevent the resume, each with its fix
    found.applied          other differences to report, each with old value, new value and effect

The rules are in the table `RULES`; `python -m tests.keys` writes this table to
docs/reference/configuration.md. If the step of a checkpoint is 0, or its weights were imported from
another framework, only the model and the optimizer are compared.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from threed.checkpoint.files import CheckpointError, plain
from threed.checkpoint.manifest import parts_of
from threed.checkpoint.retention import candidates
from threed.config.arguments import GROUPS
from threed.config.groups import Config, ModelConfig, OptimConfig, key_name, python_name
from threed.config.resolution import resolve_model
from threed.config.schema import written
from threed.core.source import names_model
from threed.data import Data
from threed.zero.rates import describe_rate_change
from threed.zero.setup import state_names
from threed.zero.state import PREVIOUS, WEIGHT

Change = Literal["free", "applied", "refused"]
Manifest = Mapping[str, Any]


@dataclass(frozen=True)
class Rule:
    """Whether a run may change some keys when it resumes, and the effect of a change.

    Attributes:
        group: name of the group that contains the keys.
        names: names of the keys as users write them, separated by blanks.
        change: "free" (the new value takes effect and is not reported), "applied" (the new value
            takes effect and is reported) or "refused" (the run does not start).
        note: a text that depends on `change`. For "free", the reason why the change is not
            reported. For "applied", the effect of the change. For "refused", a fix. The effect and
            the fix are reported to the user.
    """

    group: str
    names: str
    change: Change
    note: str

    @property
    def keys(self) -> tuple[str, ...]:
        """The full names of the keys, such as "optim.lr"."""
        return tuple(f"{self.group}.{name}" for name in self.names.split())


SHAPE = "resume with the same shape, or start over with --checkpoint.resume none"
RULES = (
    Rule(
        "parallel", "tp pp cp cp-heads ep dp sequence symmetric-memory chunks partition memory-limit-gib"
        " optimistic-step", "free",
        "a checkpoint can be loaded in any topology, and each step has the same samples",
    ),
    Rule("parallel", "schedule", "applied", "2bw delays updates by one step; all others differ only in speed and memory"),
    Rule(
        "zero",
        "stage bucket-mib shard-size offload-optimizer offload-params nvme-path prefetch resident order early-update"
        " tile",
        "free", "the location of the state and the order of updates do not change the results",
    ),
    Rule("zero", "compress-weights compress-gradients", "applied", "numbers are rounded differently"),
    Rule("zero", "delayed-update", "applied", "delayed updates use weights that are one step old"),
    Rule(
        "recompute", "mode ops every partition offload loss-chunks mlp-chunks gathered arena", "free",
        "recomputed activations are identical",
    ),
    Rule("experts", "aux-loss z-loss bias-rate", "applied", "routers are trained by other losses or steps"),
    Rule("experts", "capacity", "applied", "other tokens are dropped"),
    Rule("experts", "room", "free", "results are the same, apart from skipped steps"),
    Rule("precision", "dtype", "applied", "results are rounded differently; the master weights are unchanged"),
    Rule("precision", "grad-dtype reduce-dtype", "applied", "gradients are rounded differently"),
    Rule("precision", "cast-inputs", "applied", "rounding of floating-point inputs changes from here on"),
    Rule("precision", "loss-scale", "applied", "dynamic continues from the checkpoint's dynamic scale, if it has one"),
    Rule(
        "model",
        "arch layers hidden heads kv-heads head-dim ffn vocab tied bias mlp-bias norm-eps rope-theta rope-local-theta"
        " rope-scaling partial-rotary-factor qk-norm window layer-pattern attention-softcap logit-softcap"
        " query-pre-attn-scalar experts experts-per-token expert-ffn shared-experts expert-groups groups-per-token expert-scale"
        " dense-layers expert-every normalize-experts kv-rank query-rank nope-dim rope-dim value-dim mtp-depth",
        "refused", SHAPE,
    ),
    Rule("model", "seq", "applied", "the data are divided into different windows: some text is read twice, some later"),
    Rule(
        "model", "positions", "applied",
        "changes exports only; refused with learned positions or rope-scaling, where it is part of the model",
    ),
    Rule("model", "mtp-loss", "applied", "layers that predict further tokens count by the new coefficient"),
    Rule("model", "dropout", "applied", "takes effect from the next step on"),
    Rule("train", "steps", "applied", "the learning-rate schedule ends there"),
    Rule("train", "global-batch", "applied", "samples continue after the checkpoint's last; the learning rate is not scaled"),
    Rule("train", "seed", "applied", "samples and dropout masks differ from here on"),
    Rule("train", "eval-samples", "applied", "val/loss is averaged over a different number of windows"),
    Rule("train", "grad-clip max-norm-spike", "applied", "takes effect from the next step on"),
    Rule(
        "train", "stop-after micro-batch eval-every max-bad-steps sample-tokens time-limit", "free",
        "updates do not depend on it",
    ),
    Rule("optim", "name", "refused", "resume with the same optimizer, or start over with --checkpoint.resume none"),
    Rule("optim", "lr min-lr warmup schedule", "applied", "the learning rate follows this run's keys"),
    Rule(
        "optim", "betas momentum eps weight-decay groups", "applied",
        "takes effect from the next step on; moments are kept; a different optimizer in a group is refused",
    ),
    Rule("data", "path", "free", "the contents are compared instead"),
    Rule("data", "tokenizer", "free", "the ids are compared instead"),
    Rule("data", "bos special-tokens", "applied", "documents are encoded differently from here on"),
    Rule("data", "packing", "applied", "tokens attend to other tokens, at other positions, from here on"),
    Rule("data", "split", "applied", "the validation split may now contain text that was trained on"),
    Rule(
        "checkpoint", "every keep keep-every async memory-every write-limit-mib resume export-hf", "free",
        "the saved values do not depend on it",
    ),
    Rule("log", "every wandb project profile-steps", "free", "logging does not change training"),
    Rule(
        "run",
        "dir name check-replicas hang-timeout replicate recheck-bad-steps compile compile-backend graphs", "free",
        "results are the same up to rounding",
    ),
)  # fmt: skip
OTHER_DATA = "the data differ from the checkpoint's training data: losses may jump"
OTHER_IDS = (
    "resume with its tokenizer; or write the weights to a folder with `threed convert`, and start from it with"
    " --checkpoint.resume FOLDER and the other --data.tokenizer"
)
CONTENTS: tuple[tuple[str, Change, str], ...] = (
    ("contents of the data (sha256)", "applied", OTHER_DATA),
    ("token ids of the tokenizer (fingerprint)", "refused", OTHER_IDS),
)
"""Rules for the contents of the data and of the tokenizer, each as (description, change, note).

The contents are compared instead of the keys `data.path` and `data.tokenizer`, because the same
contents may be at a different path.
"""
BY_KEY = {key: rule for rule in RULES for key in rule.keys}


@dataclass
class Comparison:
    """The differences between a checkpoint and the run that resumes from it.

    Attributes:
        refused: one line of text per difference that prevents the resume, with a fix.
        applied: one line of text per change that takes effect.
    """

    refused: list[str] = field(default_factory=list)
    applied: list[str] = field(default_factory=list)

    def accepted(self) -> list[str]:
        """Returns the lines in `applied`, which the run reports.

        Raises:
            CheckpointError: if a difference is refused.
        """
        if self.refused:
            raise CheckpointError("; ".join(self.refused))
        return self.applied


def compare(manifest: Manifest | None, config: Config, data: Data) -> Comparison:
    """Compares a checkpoint with the run that resumes from it.

    Args:
        manifest: manifest of the checkpoint; None if the run starts without a checkpoint.
        config: the resolved configuration of the run.
        data: data and tokenizer of the run.
    """
    if manifest is None:
        return Comparison()
    found = _compare_keys(manifest, config, data) if _is_of_a_run(manifest) else Comparison()
    found.refused += model_differences(manifest, config)
    found.refused += optimizer_differences(manifest, config)
    if found.applied:  # changed keys may change the learning rate
        found.applied += describe_rate_change(manifest["config"], config, manifest["state"])
    return found


def _compare_keys(manifest: Manifest, config: Config, data: Data) -> Comparison:
    """Compares data, tokenizer and configuration keys; models and optimizers are not compared."""
    saved, extra, found = manifest["config"], manifest["state"]["extra"], Comparison()
    if _tokenizer_differs(extra, data):
        names = f"{plain(saved['data']['tokenizer'])}, and --data.tokenizer {config.data.tokenizer} gives other ids"
        found.refused.append(f"the checkpoint was trained with tokenizer {names}: {OTHER_IDS}")
    if extra.get("data_sha256", data.sha256) != data.sha256:
        found.applied.append(OTHER_DATA)
    for key, before, now in _changes(saved, config):
        if BY_KEY[key].change == "applied":
            found.applied.append(f"{key} was {before} and is {now}: {BY_KEY[key].note}")
    return found


def _is_of_a_run(manifest: Manifest) -> bool:
    state = manifest["state"]
    return bool(state["steps"]) and "imported" not in state["extra"]


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


def _changes(saved: Mapping[str, Any], config: Config) -> Iterator[tuple[str, str, str]]:
    """Yields the keys whose values differ between the checkpoint and the run.

    Keys that the checkpoint does not have are skipped, because an older version of threed, which
    did not have these keys, wrote the checkpoint.

    Yields:
        (key, value in the checkpoint, value in the run). The values are texts as users write them.
    """
    wanted = config.model_dump(mode="json")
    for group, kind in GROUPS.items():
        found = saved.get(group)
        there: Mapping[str, Any] = found if isinstance(found, dict) else {}
        for name in [n for n in kind.model_fields if n in there and there[n] != wanted[group][n]]:
            now = written(getattr(getattr(config, group), name))
            yield f"{group}.{key_name(name)}", _as_written(group, name, there), now


def _as_written(group: str, name: str, saved: Mapping[str, Any]) -> str:
    with suppress(ValueError):  # another version of threed may have saved an invalid value
        return written(getattr(GROUPS[group].model_validate({name: saved[name]}), name))
    return str(plain(saved[name]))


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
