"""The command line of the tools: arguments, `--help`, and examples.

    arguments = make_parser({"report": report, ...}, "report").parse_args(["report", "runs/tiny"])
    arguments.run(arguments)

The flags of `train` and `plan` are the keys of the configuration, which `threed.config.arguments`
parses; `train_help` returns the text of their `--help`.
"""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from threed.config import architectures

Add = Callable[..., Any]
TRAINING = ("train", "plan")
TOOLS: Mapping[str, str] = {
    "train": f"train a model: {'|'.join(architectures.NAMES)}, or a custom one, FILE.py:MODEL; `threed train --help`"
    " lists every key",
    "plan": "forecast memory, traffic and time of a run; takes the arguments of train, --world-size N and"
    " --gpu NAME",
    "schedule": "simulate a pipeline schedule, and draw its timeline",
    "tokenize": "convert text (.txt, .jsonl, a folder of them) to Megatron .bin/.idx",
    "convert": "convert native checkpoints to Hugging Face folders and back, and checkpoints of DeepSpeed and"
    " Megatron to either",
    "inspect": "show versions and devices, or the contents of a checkpoint after verifying all hashes",
    "report": "redraw the figures of a run from its folder, or compare several runs",
    "verify": "train a custom model in every topology and compare with one process; exit code 0: same, 1: different,"
    " 2: not compared; takes the flags of training, too",
}  # fmt: skip
_EVALUATE = (
    "a run validates every --train.eval-every steps and at its end; in Python, threed.load(RUN).evaluate(batch); for"
    " other programs, `threed convert` writes a Hugging Face folder"
)
_GENERATE = "`threed convert` writes a Hugging Face folder, whose model transformers loads and whose `generate` continues text"
_TUNE = "`threed train --checkpoint.resume FOLDER` starts from the weights of a Hugging Face folder"
# names of tools that users expect, with what to use instead
NO_TOOLS: Mapping[str, str] = {
    **dict.fromkeys(("eval", "evaluate", "test", "validate", "benchmark"), _EVALUATE),
    **dict.fromkeys(("generate", "sample", "infer", "inference", "chat", "serve", "predict"), _GENERATE),
    **dict.fromkeys(("finetune", "fine-tune", "sft", "tune"), _TUNE),
    **dict.fromkeys(("export", "import"), "`threed convert` converts checkpoints to Hugging Face folders and back"),
}  # fmt: skip
_EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "schedule": (
        "threed schedule 1f1b --stages 4 --microbatches 8 --svg 1f1b.svg",
        "threed schedule mine.py:my_schedule --stages 4 --microbatches 8",
    ),
    "tokenize": ("threed tokenize my-texts my-data --tokenizer my-tokenizer",),
    "convert": (
        "threed convert runs/tiny/checkpoints/step-150 tiny-hf --dtype bf16",
        "threed convert tiny-hf tiny-native",
    ),
    "inspect": ("threed inspect", "threed inspect runs/tiny/checkpoints/step-150"),
    "report": ("threed report runs/tiny", "threed report runs/a runs/b"),
    "verify": ("threed verify mine.py:Model --topologies tp2,pp2,dp2-zero3 --model.layers 4",),
}
_TRAIN_EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "train": (
        "threed train gpt --preset tiny",
        "torchrun --standalone --nproc-per-node 4 -m threed train gpt --preset tiny --parallel.tp 2",
        "threed train mine.py:Model --train.steps 100",
    ),
    "plan": (
        "threed plan gpt --preset gpt2 --parallel.tp 2 --world-size 8",
        "threed plan mine.py:Model --zero.stage 3 --world-size 4",
        "threed plan --preset llama3-8b --world-size 64 --gpu h100",
        "threed plan --from-megatron '--num-layers 24 --hidden-size 1024 --num-attention-heads 16' --world-size 8",
    ),
}


def path(text: str) -> Path:
    """Returns a path, with `~` expanded."""
    return Path(os.path.expanduser(text))


def make_parser(run: Mapping[str, Callable[..., Any]], used: str = "") -> argparse.ArgumentParser:
    """Returns the command line's parser, with a list of all tools and the arguments of one tool.

    Args:
        run: function of each tool, by name of the tool. The parsed arguments have the function of
            the selected tool as attribute `run`; the caller calls it with the parsed arguments.
        used: name of the tool whose arguments are added. Other tools get none, because their
            arguments would import further modules.
    """
    text = "Train transformer models with pipeline, tensor and ZeRO parallelism, and convert, check and inspect runs."
    usage = "%(prog)s TOOL ..."
    parser = argparse.ArgumentParser(
        prog="threed", description=text, usage=usage, epilog="threed TOOL --help describes a tool."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    tools = parser.add_subparsers(required=True, metavar="TOOL", title="tools")
    for name, about in TOOLS.items():
        lines = "".join(f"\n  {line}" for line in _EXAMPLES.get(name, ()))
        made = tools.add_parser(
            name, prog=f"threed {name}", help=about, description=textwrap.fill(f"{about[0].upper()}{about[1:]}.", 78),
            epilog=f"examples:{lines}" if lines else None, allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        made.set_defaults(run=run.get(name))
        # The arguments of other tools are not needed, and would import further modules.
        if name == used and name in _ARGUMENTS:
            _ARGUMENTS[name](made.add_argument)
    return parser


class _Version(argparse.Action):
    """Prints the version and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"threed {version('threed')}")
        except PackageNotFoundError:
            print("threed, not installed")
        parser.exit()


def train_help(tool: str, arch: str | None) -> str:
    """Returns the `--help` of `train` or `plan`.

    Args:
        tool: "train" or "plan".
        arch: an architecture or FILE.py:MODEL, whose defaults are shown; None if not given.
    """
    from threed.config.arguments import load

    action = "Trains a model" if tool == "train" else "Forecasts memory, traffic and time of a run"
    about = f"{action}. ARCH is {', '.join(architectures.NAMES)}; FILE.py:MODEL is a class of a Python file."
    default = "Without both, the preset or file determines the architecture; its default is gpt."
    if tool == "plan":
        default += " --from-megatron 'FLAGS' translates flags of Megatron-LM, prints the command of threed, and plans it."
    examples = "".join(f"\n  {line}" for line in _TRAIN_EXAMPLES[tool])
    about = f"{textwrap.fill(f'{about} {default}', 78)}\n\nexamples:{examples}"
    prog = f"threed {tool} {arch or '[ARCH | FILE.py:MODEL]'}"
    defaults = {"model": {"arch": arch}} if arch else {}
    return load(["--help"], prog=prog, about=about, defaults=defaults)[1].help


def _schedule(add: Add) -> None:
    from threed import schedules

    add(
        "name",
        metavar="NAME",
        help=f"{', '.join(schedules.available())}, FILE.py:FUNCTION, or FILE.csv",
    )
    add("--stages", type=int, metavar="N", help="pipeline ranks; default for FILE.csv: its rows")
    text = "micro-batches per step; default for FILE.csv: as in the file"
    add("--microbatches", type=int, metavar="N", help=text)
    add("--chunks", type=int, metavar="N", help="model chunks per rank; default: the schedule's")
    for name in ("forward", "backward-input", "backward-weight"):
        text = (
            f"time of a {name.replace('-', ' for the ')} per micro-batch, in any unit (default 1)"
        )
        add(f"--{name}", type=float, default=1.0, metavar="X", help=text)
    text = "latency of a message, in the same unit (default 0)"
    add("--send", type=float, default=0.0, metavar="X", help=text)
    text = "time of a forward overlapped with a backward (default: the sum of their times)"
    add("--overlapped", type=float, metavar="X", help=text)
    add("--svg", type=path, metavar="FILE", help="draw the timeline into this file")
    text = "write the plan in the format of torch.distributed.pipelining"
    add("--csv", type=path, metavar="FILE", help=text)
    add("--json", action="store_true", help="print JSON")


def _tokenize(add: Add) -> None:
    add("src", metavar="SRC", help=".txt or .jsonl file, or a folder of them")
    add("dst", metavar="DST", help="prefix of the .bin and .idx to write")
    text = "bytes (default), the folder of a tokenizer, or the path of a tokenizer.json"
    add("--tokenizer", default="bytes", metavar="bytes|PATH", help=text)
    text = "begin documents with the bos token (default auto: if the tokenizer itself adds it to texts)"
    add("--bos", choices=["auto", "true", "false"], default="auto", help=text)
    text = "encode a special token that is spelled out in a text as ordinary text (default), or parse it"
    add("--special-tokens", choices=["text", "parse"], default="text", help=text)


def _convert(add: Add) -> None:
    text = "step-N folder, Hugging Face folder, or checkpoint of DeepSpeed or Megatron"
    add("src", type=path, metavar="SRC", help=text)
    add("dst", type=path, metavar="DST", help="folder to write; must not exist yet")
    text = "format of DST (default: native, or hf if SRC is native; safetensors for a custom model)"
    add("--to", choices=["native", "hf", "safetensors"], help=text)
    text = (
        "bytes, a folder, a tokenizer.json, or none (default: the tokenizer of the folder or run)"
    )
    add("--tokenizer", metavar="bytes|PATH|none", help=text)
    text = "format of the weights (default: as in SRC)"
    add("--dtype", choices=["fp32", "bf16", "fp16"], help=text)
    text = "read checkpoints of DeepSpeed and Megatron, which are pickles, without executing their code"
    add("--allow-pickle", action="store_true", help=text)
    text = "config.json of DeepSpeed's model (default: the one in SRC or above it)"
    add("--config", type=path, metavar="FILE", help=text)


def _inspect(add: Add) -> None:
    import tempfile

    text = "step-N folder or Hugging Face folder; without it, versions and devices are shown"
    add("checkpoint", type=path, nargs="?", metavar="CHECKPOINT", help=text)
    text = "folder on the drive to time (default %(default)s)"
    add("--drive", type=path, default=path(tempfile.gettempdir()), metavar="FOLDER", help=text)


def _report(add: Add) -> None:
    text = (
        "run folder, such as runs/tiny; several are compared: a figure and a table of what differs"
    )
    add("folders", type=path, nargs="+", metavar="RUN", help=text)


def _verify(add: Add) -> None:
    text = "class or function that is called with a ModelConfig and a Slicing"
    add("model", metavar="FILE.py:NAME", help=text)
    text = (
        "topologies to compare, such as tp2,tp2-seq,dp2-zero3 (default: 11, which together have every"
        " word): words tpN ppN dpN cpN cpNhM microN seq zeroN recompute offload, joined by -"
    )
    add("--topologies", metavar="LIST", help=text)
    text = "seconds per topology (default %(default)g)"
    add("--timeout", type=float, default=120.0, metavar="X", help=text)
    add("--json", action="store_true", help="print JSON")


_ARGUMENTS: Mapping[str, Callable[[Add], None]] = {
    "schedule": _schedule,
    "tokenize": _tokenize,
    "convert": _convert,
    "inspect": _inspect,
    "report": _report,
    "verify": _verify,
}
