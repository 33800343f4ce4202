"""Where state lives, as a ds_config says it: offload_optimizer and offload_param, their old switches, and aio.

values = find_places(zero, stage)          # of threed's zero group: offload_optimizer, offload_params, nvme_path
settle_aio(top, "nvme_path" in values)
"""

from __future__ import annotations

import os
from typing import Any

from threed.interop.deepspeed.config import keys
from threed.interop.deepspeed.config.section import Auto, Section, Table, shown

OLD = {
    "offload_optimizer": ("cpu_offload",),
    "offload_param": ("cpu_offload_param", "cpu_offload_params"),
}
NO_NVME = "nothing is offloaded to NVMe"


def find_places(zero: Section, stage: int) -> dict[str, str]:
    """Where optimizer states and parameters live, and nvme_path if one of them lives on a drive."""
    optimizer, optimizer_path = _find_place(zero, "offload_optimizer", keys.OFFLOAD_OPTIMIZER)
    params, params_path = _find_place(zero, "offload_param", keys.OFFLOAD_PARAM)
    if optimizer != "none" and stage == 0:
        zero.problem(
            "offload_optimizer",
            f"{optimizer} with stage 0: it moves what ZeRO slices; use stage 1, 2 or 3",
        )
    if params != "none" and stage != 3:
        zero.problem(
            "offload_param", f"{params} with stage {stage}: parameters are whole there; use stage 3"
        )
    if (
        optimizer_path
        and params_path
        and os.path.normpath(optimizer_path) != os.path.normpath(params_path)
    ):
        zero.problem(
            "offload_param.nvme_path",
            f"{shown(params_path)}, but offload_optimizer.nvme_path is {shown(optimizer_path)}: a rank swaps to one"
            " file; write one folder for both (several drives: as one RAID-0 volume)",
        )
    path = optimizer_path or params_path
    return {
        "offload_optimizer": optimizer,
        "offload_params": params,
        **({"nvme_path": path} if path else {}),
    }


def _find_place(zero: Section, key: str, table: Table) -> tuple[str, str | None]:
    """Device, and the folder if it is nvme."""
    section = zero.section(key)
    device = section.word("device", "none", ("none", "cpu", "nvme"), named=bool(section.values))
    for name in OLD[key]:
        if zero.switch(name, False):
            if section.values:
                zero.problem(name, f"is the old form of {key}, which is there too: leave it out")
            zero.note(name, f'the old form of "{key}": {{"device": "cpu"}}')
            device = "cpu"
    path = None
    if device == "nvme":
        section.need("nvme_path", "write a folder on a fast local drive")
        path = section.take("nvme_path", None, _no_folder, Auto(instead="write a folder"), False)
    else:
        section.ignore("nvme_path", NO_NVME)
    section.close(table.off("nothing is offloaded") if device == "none" else table)
    return device, path and os.path.expanduser(path)


def _no_folder(value: Any) -> str:
    fits = (
        isinstance(value, str | os.PathLike) and isinstance(path := os.fspath(value), str) and path
    )
    return "" if fits else "is no folder: write its path"


def settle_aio(top: Section, to_nvme: bool) -> None:
    """Names what of aio is there. to_nvme: whether anything goes to a drive."""
    if to_nvme:
        top.section("aio").close(keys.AIO)
    else:
        top.ignore("aio", NO_NVME)
