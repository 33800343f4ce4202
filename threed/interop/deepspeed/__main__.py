"""Runs a script or a module that imports deepspeed, with threed's implementation of DeepSpeed's API.

    python -m threed.interop.deepspeed train.py --deepspeed ds_config.json
    python -m threed.interop.deepspeed -m package.train --deepspeed ds_config.json
    torchrun --nproc-per-node 2 -m threed.interop.deepspeed train.py --deepspeed ds_config.json

The script runs as with `python train.py`: it is the module `__main__`, `sys.argv` has its name and
arguments, and `sys.path` begins with its folder.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from threed.interop.deepspeed.namespace import install_as_deepspeed

USAGE = "usage: python -m threed.interop.deepspeed [-m MODULE | SCRIPT] [ARGUMENTS...]"


def main(arguments: list[str]) -> None:
    """Runs the script or module that `arguments` begin with.

    Args:
        arguments: the path of a script, or "-m" and the name of a module; then its arguments.

    Raises:
        SystemExit: with an error message if the script is missing.
    """
    if arguments[:1] in (["-h"], ["--help"]):
        print(USAGE)
        return
    is_module = arguments[:1] == ["-m"]
    target, *rest = (arguments[1:] if is_module else arguments) or [""]
    if not target or (target.startswith("-") and not is_module):
        raise SystemExit(f"{USAGE}\ngive the path of a script, or -m and the name of a module")
    if not is_module and not Path(target).exists():
        raise SystemExit(f"{USAGE}\nno such script: {target}")
    install_as_deepspeed()
    sys.argv = [target, *rest]
    if is_module:
        sys.path[0] = ""
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(target).resolve().parent)
        runpy.run_path(target, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
