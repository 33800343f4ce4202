"""What a run reports at its end."""

from __future__ import annotations

import pytest

from threed.config import Config
from threed.training.final_report import _torchrun_flags, further


@pytest.mark.parametrize(
    ("local", "flags"),
    [
        (None, "--standalone --nproc-per-node 8"),
        ("8", "--standalone --nproc-per-node 8"),
        ("4", "--nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:PORT"),
        ("3", "--standalone --nproc-per-node 8"),  # machines with different numbers of ranks
    ],
)
def test_the_command_to_resume_has_the_machines_of_the_run(
    local: str | None, flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if local is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    assert _torchrun_flags(8) == flags


COMMANDS = {
    "stopped": ("gpt.py --train.steps 6 --train.stop-after 4 --a b", 4, "gpt.py --train.steps 6 --a b"),
    "with =": ("gpt.py --train.stop-after=4 --train.steps=6", 4, "gpt.py --train.steps=6"),
    "complete": ("gpt.py --train.steps 6 --a b", 6, "gpt.py --a b --train.steps 12"),
    "complete, with =": ("gpt.py --train.steps=6", 6, "gpt.py --train.steps 12"),
    "steps of a file": ("gpt.py --config c.toml", 6, "gpt.py --config c.toml --train.steps 12"),
}  # fmt: skip


@pytest.mark.parametrize(("command", "steps", "wanted"), COMMANDS.values(), ids=COMMANDS.keys())
def test_the_printed_command_has_steps_left(command: str, steps: int, wanted: str) -> None:
    config = Config.model_validate({"train": {"steps": 6}})
    assert further(command.split(), steps, config) == wanted.split()
