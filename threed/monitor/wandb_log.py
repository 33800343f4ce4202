"""Logs metrics to Weights & Biases on rank 0. Errors of wandb never stop training.

    run = WandbRun("auto", project="threed", name="demo", directory="runs/demo", config=config, run_id=None)
    run.log(step, {"train/loss": 2.31})
    checkpoint["wandb_run_id"] = run.run_id            # pass it as run_id= on resume
    run.close(figures="runs/demo/figures")

Modes: `off`; `offline` (files under <directory>/wandb, uploaded later with `wandb sync`); `online`;
`auto`, which is the mode in the environment variable WANDB_MODE if that is set, else online if
wandb finds an API key, else offline.

- Only this module imports wandb, and only if the mode is not `off`. If the package is missing, the
  API key is missing in mode `online`, or wandb fails later, one message is printed and logging to
  wandb stops. metrics.jsonl still has all metrics.
- `step` is logged as a metric and used as the x axis, not passed as wandb's internal step, because
  wandb drops rows with a smaller internal step than before. Such rows occur when a resumed run
  repeats steps (wandb/wandb issue 4482).
- The name of a run is its given name and its id, so runs of one preset have different names. Their
  wandb group is the given name. A resumed run keeps its id and name.
- Secrets are not sent: the environment is not part of the config, and config values with names such
  as `api_key`, `token`, `secret` or `password` are redacted.
"""

from __future__ import annotations

import importlib
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_SECRET_WORDS = {"key", "apikey", "token", "secret", "password", "credentials"}


class WandbRun:
    """A wandb run. The methods have no effect if wandb is off or has failed, and never raise.

    Args:
        mode: off, offline, online or auto.
        project: wandb project.
        name: name of the run, without the id.
        directory: folder in which wandb writes its files.
        config: configuration of the run; secrets are redacted.
        run_id: id of the run to continue; None for a new run.
        note: function that prints a message.
        tags: wandb tags of the run, by which runs can be filtered.
    """

    def __init__(
        self,
        mode: str,
        project: str,
        name: str,
        directory: str | Path,
        config: Mapping[str, Any],
        run_id: str | None = None,
        note: Callable[[str], None] = print,
        tags: Sequence[str] = (),
    ) -> None:
        # The id is kept if wandb is off, so that a later start can continue the run.
        self.run_id = run_id
        self._note = note
        self._run: Any = None
        self._step = 0
        if mode != "off":
            known = run_id or secrets.token_hex(4)
            settings = {
                "project": project, "name": f"{name}-{known}", "group": name, "job_type": "train", "tags": list(tags),
                "dir": str(directory), "config": redact(config), "id": known,
            }  # fmt: skip
            self._try("start", lambda: self._start(mode, settings))

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Logs a row of metrics, with `step` as a metric."""
        self._step = step
        if self._run is not None:
            self._try("log", lambda: self._run.log({"step": step, **metrics}))

    def close(self, figures: str | Path | None = None, failed: bool = False) -> None:
        """Uploads figures and ends the run. Idempotent.

        Args:
            figures: folder with SVG files to upload.
            failed: whether to mark the run as failed.
        """
        if self._run is None:
            return
        if figures is not None:
            self._try("upload of figures", lambda: self._upload(Path(figures)))
        if self._run is not None:
            self._try("finish", lambda: self._run.finish(exit_code=int(failed)))
        self._run = None

    def _start(self, mode: str, settings: dict[str, Any]) -> None:
        wandb = _import()
        chosen = _choose(mode, wandb)
        if chosen == "disabled":
            return
        Path(settings["dir"]).mkdir(parents=True, exist_ok=True)
        # wandb is silent, because its output would break the progress bar; `_greeting` prints the
        # URL. The timeout is below the default of 90 s, because other ranks wait while wandb
        # connects.
        options = wandb.Settings(silent=True, init_timeout=30)
        self._run = wandb.init(mode=chosen, resume="allow", settings=options, **settings)
        self._run.define_metric("*", step_metric="step")
        self.run_id = self._run.id
        self._note(_greeting(self._run, chosen))

    def _upload(self, folder: Path) -> None:
        html = importlib.import_module("wandb").Html
        pages = {
            f"figures/{file.stem}": html(file.read_text(), inject=False)
            for file in sorted(folder.glob("*.svg"))
        }
        if pages:
            self._run.log({"step": self._step, **pages})

    def _try(self, what: str, action: Callable[[], None]) -> None:
        """Runs `action`. If it raises, prints a note and stops logging to wandb."""
        try:
            action()
        except Exception as error:
            self._run = None
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            self._note(
                f"wandb: {what} failed ({reason}). Training goes on without it; metrics.jsonl has every number."
            )


def redact(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of a nested config in which secrets are replaced by `<redacted>`.

    A value is a secret if its name contains one of `_SECRET_WORDS` as a full word: `api_key` does,
    `tokens` does not.

    Args:
        config: the configuration, with nested mappings.
    """

    def clean(name: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return redact(value)
        secret = _SECRET_WORDS & set(re.split(r"[^a-z]+", name.lower()))
        return "<redacted>" if secret and value is not None else value

    return {str(name): clean(str(name), value) for name, value in config.items()}


def _import() -> ModuleType:
    try:
        wandb = importlib.import_module("wandb")
    except ImportError as error:
        raise RuntimeError(
            "the package is not installed: pip install wandb, or set --log.wandb off"
        ) from error
    # If the package is not installed, Python imports a folder wandb/ in the working directory as an
    # empty package.
    if not hasattr(wandb, "init"):
        raise RuntimeError(
            "the package is not installed (`import wandb` found only a folder): pip install wandb"
        )
    return wandb


def _choose(mode: str, wandb: ModuleType) -> str:
    """Returns the mode for wandb.init: online, offline or disabled."""
    if mode == "offline":
        return mode
    if mode == "auto":
        wanted = os.environ.get("WANDB_MODE", "")
        if wanted in ("online", "offline", "disabled"):
            return wanted
        return "online" if _has_key(wandb) else "offline"
    if not _has_key(wandb):  # wandb would prompt for a key, and all other ranks would wait
        raise RuntimeError(
            "no API key: set WANDB_API_KEY, run `wandb login`, or use --log.wandb offline"
        )
    return "online"


def _has_key(wandb: ModuleType) -> bool:
    """Returns whether wandb finds an API key. Never prompts."""
    try:
        return bool(wandb.login(prompt=False, verify=False))
    except TypeError:  # in older versions of wandb, login() has no parameter `prompt`
        return bool(wandb.api.api_key)


def _greeting(run: Any, mode: str) -> str:
    if mode == "online":
        return f"wandb: {run.url}"
    folder = Path(run.dir).parent  # run.dir is the folder `files` in the folder of the wandb run
    return f"wandb: offline, nothing is sent. To upload later: wandb sync {folder}"
