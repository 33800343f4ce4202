"""What a run reports at its end."""

from __future__ import annotations

import pytest

from threed.training.final_report import _torchrun_flags


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
