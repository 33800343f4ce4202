"""Which configuration keys a run may change when it resumes from a checkpoint, and the effects.

    for line in changes(manifest, config, data): ...     old value, new value and effect of a key

The rules are in the table `RULES`; `python -m tests.keys` writes this table to
docs/reference/configuration.md. Changes that prevent a resume are found by `run_folder.refusals`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from threed.checkpoint.files import plain
from threed.config.groups import GROUPS, Config, key_name
from threed.config.schema import written
from threed.data import Data
from threed.zero.rates import describe_rate_change

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


def changes(manifest: Manifest, config: Config, data: Data) -> list[str]:
    """Returns one line of text per change that takes effect when a run resumes.

    Empty if the step of the checkpoint is 0, or if its weights were imported from another
    framework: then only the model and the optimizer are compared.

    Args:
        manifest: manifest of the checkpoint.
        config: the resolved configuration of the run.
        data: data and tokenizer of the run.
    """
    if not is_of_a_run(manifest):
        return []
    saved, state = manifest["config"], manifest["state"]
    found = [OTHER_DATA] if state["extra"].get("data_sha256", data.sha256) != data.sha256 else []
    for key, before, now in _changed_keys(saved, config):
        if BY_KEY[key].change == "applied":
            found.append(f"{key} was {before} and is {now}: {BY_KEY[key].note}")
    if found:  # changed keys may change the learning rate
        found += describe_rate_change(saved, config, state)
    return found


def is_of_a_run(manifest: Manifest) -> bool:
    """Returns whether a run has saved a checkpoint after a step, so that its data are compared."""
    state = manifest["state"]
    return bool(state["steps"]) and "imported" not in state["extra"]


def _changed_keys(saved: Mapping[str, Any], config: Config) -> Iterator[tuple[str, str, str]]:
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
