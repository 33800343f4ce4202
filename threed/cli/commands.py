"""The console script `threed` (the same as `python -m threed`): training and its tools.

threed train gpt --preset tiny                                 on one process; on more: torchrun … -m threed train gpt
threed schedule 1f1b --stages 4 --microbatches 8 [--svg FILE] [--csv FILE] [--json]     1f1b, FILE.py:NAME or FILE.csv
threed plan --world-size 8 --preset small --parallel.tp 2      forecasts memory and time; takes the flags of training
threed tokenize SRC DST [--tokenizer bytes]                    text -> Megatron .bin/.idx
threed convert SRC DST [--dtype bf16]                          native checkpoint -> Hugging Face folder, and back
threed inspect [CHECKPOINT]                                    versions, devices; or a checkpoint or HF folder, verified
threed report RUN                                              redraws the figures of a run
threed verify FILE.py:NAME [--topologies tp2,pp2] [--json]     compares a custom model in every topology with one process
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import shlex
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from threed import schedules
from threed.config import architectures
from threed.core import source
from threed.core.packages import MissingPackageError
from threed.distributed.launcher import exits_on_broken_pipe


def main(argv: list[str] | None = None) -> int:
    """Runs a tool. Returns the exit code: 0, or 2 after an error message on stderr.

    Args:
        argv: command line without the program's name; by default the arguments of this process.
    """
    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        _parser().print_help(sys.stderr)
        return 2
    if argv[0] in (
        "train",
        "plan",
    ):  # they report refusals themselves; other errors have a traceback
        with exits_on_broken_pipe():
            return _train(*argv)
    try:
        with exits_on_broken_pipe():
            if argv[0] == "verify":
                return _verify(*_parser().parse_known_args(_joined(argv)))
            arguments = _parser().parse_args(argv)
            arguments.run(arguments)
    except (ValueError, OSError, RuntimeError, MissingPackageError) as error:
        print(f"threed {argv[0]}: {error}", file=sys.stderr)
        return 2
    return 0


def _joined(words: list[str]) -> list[str]:
    """Returns the words of a command line, with each training flag and its value joined to
    `--flag=value`.

    The parser of `verify` does not define training flags, so it would take the separate value of
    such a flag for its own positional argument.
    """
    own, joined = ("--topologies", "--timeout", "--json", "--help", "--dry-run"), list[str]()
    for word in words:
        flag = joined[-1] if joined else ""
        if flag.startswith("--") and "=" not in flag and flag not in own and word[:1] != "-":
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _add_schedule_flags(add: Callable[..., Any]) -> None:
    add("name", help=f"{', '.join(schedules.available())}, or FILE.py:FUNCTION, or FILE.csv")
    add("--stages", type=int, help="pipeline ranks; default for FILE.csv: number of rows")
    add(
        "--microbatches",
        type=int,
        help="micro-batches per step; default for FILE.csv: as in the file",
    )
    add("--chunks", type=int, help="model chunks per rank")
    for name in ("forward", "backward-input", "backward-weight"):
        add(f"--{name}", type=float, default=1.0, help="time per micro-batch (default 1)")
    add("--send", type=float, default=0.0, help="latency of a message (default 0)")
    text = "time of a forward overlapped with a backward (default: the sum of their times)"
    add("--overlapped", type=float, help=text)
    add("--svg", type=Path, help="draw the timeline into this file")
    add("--csv", type=Path, help="write the plan in the format of torch.distributed.pipelining")
    add("--json", action="store_true", help="print JSON")


def _parser() -> argparse.ArgumentParser:
    text = "Train transformer models with pipeline, tensor and ZeRO parallelism, and convert, check and inspect runs."
    parser = argparse.ArgumentParser(prog="threed", description=text)
    tools = parser.add_subparsers(required=True, metavar="TOOL")

    def tool(name: str, text: str, run: Callable[..., Any] | None = None) -> Callable[..., Any]:
        made = tools.add_parser(name, help=text, description=text, allow_abbrev=False)
        made.set_defaults(run=run)
        return made.add_argument

    named = "|".join(architectures.NAMES)
    text = f"trains a model: {named}, or a custom one, FILE.py:MODEL; `threed train --help` lists every key"
    tool("train", text)
    tool(
        "plan",
        "forecasts memory, traffic and time of a run; takes the arguments of train and --world-size N",
    )

    text = "simulates a pipeline schedule, and draws its timeline"
    _add_schedule_flags(tool("schedule", text, _schedule))

    text = "converts text (.txt, .jsonl, a folder of them) to Megatron .bin/.idx"
    add = tool("tokenize", text, _tokenize)
    add("src")
    add("dst", help="prefix of the .bin and .idx to write")
    text = "bytes (default), the folder of a tokenizer, or the path of a tokenizer.json"
    add("--tokenizer", default="bytes", help=text)
    text = "begin documents with the bos token (default auto: if the tokenizer itself adds it to texts)"
    add("--bos", choices=["auto", "true", "false"], default="auto", help=text)
    text = (
        "encode a special token that is spelt out in a text as ordinary text (default), or parse it"
    )
    add("--special-tokens", choices=["text", "parse"], default="text", help=text)

    text = "converts between native checkpoints and Hugging Face folders, and from DeepSpeed and Megatron"
    add = tool("convert", text, _convert)
    add("src", type=Path, help="a checkpoint, or a run folder, whose newest checkpoint is used")
    add("dst", type=Path, help="the folder to write")
    text = "format of DST; default: native, or hf if SRC is native (safetensors for a custom model)"
    add("--to", choices=["native", "hf", "safetensors"], help=text)
    text = "bytes, a folder, a tokenizer.json, or none; default: the tokenizer of the folder or run"
    add("--tokenizer", help=text)
    add("--dtype", choices=["fp32", "bf16", "fp16"], help="format of the weights")
    text = "read checkpoints of DeepSpeed and Megatron, which are pickles, without executing their code"
    add("--allow-pickle", action="store_true", help=text)
    text = "config.json of DeepSpeed's model; default: the one in SRC or above it"
    add("--config", type=Path, help=text)

    text = "shows versions and devices, or the contents of a checkpoint after verifying all hashes"
    add = tool("inspect", text, _inspect)
    add("checkpoint", type=Path, nargs="?")
    text = "folder on the drive to time (default %(default)s)"
    add("--drive", default=tempfile.gettempdir(), help=text)

    tool("report", "redraws the figures of a run from its folder", _report)("folder", type=Path)

    text = "trains a model in every topology and compares with one process: exit code 0 same, 1 differs, 2 not compared"
    add = tool("verify", f"{text}; takes flags of training too")
    add("model", metavar="FILE.py:NAME", help="model class or function, as for train")
    text = "such as tp2,tp2-seq,dp2-zero3: words tpN ppN dpN microN seq zeroN recompute offload"
    add("--topologies", help=text)
    add("--timeout", type=float, default=120, help="seconds per topology (default 120)")
    add("--json", action="store_true", help="print JSON")
    return parser


def _train(tool: str, *words: str) -> int:
    """Trains or plans a run. Arguments: an architecture or FILE.py:MODEL (optional), then flags."""
    from threed.cli import launch
    from threed.reliability.failure import refuse

    arch = words[0] if words and not words[0].startswith("-") else None
    flags = list(words[arch is not None :])
    if arch is not None and arch not in architectures.NAMES and not source.names_model(arch):
        known = ", ".join(architectures.NAMES)
        problem = f"no such architecture; there are {known}, and FILE.py:MODEL"
        return refuse(f"threed {tool} {arch}: {problem}")
    if tool == "plan":
        return launch.main([*flags, "--dry-run"], arch=arch, prog="threed plan")
    prog = ["-m", "threed", "train", *([arch] if arch else [])]
    return launch.main(flags, arch=arch, prog=shlex.join(prog))


def _verify(a: argparse.Namespace, flags: list[str]) -> int:
    from threed import testing
    from threed.config.arguments import load

    config, options = load(flags, defaults=testing.DEFAULTS)
    if options.dry_run or options.world_size is not None:
        raise ValueError("--dry-run and --world-size are for training; use --topologies")
    if not a.timeout > 0:
        raise ValueError(f"--timeout {a.timeout:g}: must be more than 0 seconds")
    build, batch = source.find_model(a.model), source.find_batch(a.model)
    names = testing.TOPOLOGIES if a.topologies is None else a.topologies.split(",")
    report = testing.same_everywhere(build, batch, names, config=config, timeout=a.timeout)
    print(report.json() if a.json else report)
    return report.exit_code


def _schedule(a: argparse.Namespace) -> None:
    costs = schedules.Costs(a.forward, a.backward_input, a.backward_weight, a.send, a.overlapped)
    plan = _plan(a, costs)
    timeline = schedules.simulate(plan, costs)
    facts = {
        "makespan": timeline.makespan,
        "span": timeline.span,
        "bubble": timeline.bubble,
        "peak_activations": list(timeline.peak_activations),
        "messages": list(timeline.messages),
    }
    if a.csv:
        a.csv.write_text(schedules.to_csv(plan))
    if a.svg:
        title = f"{Path(a.name).name}: {plan.stages} stages, {plan.microbatches} micro-batches"
        peak = f"at most {max(timeline.peak_activations):g} micro-batches in memory"
        subtitle = f"ends at {timeline.makespan:g}, bubble {timeline.bubble:.1%}, {peak}"
        a.svg.write_text(schedules.svg(timeline.spans, title, subtitle, ways=plan.ways))
    lines = (f"{name:<17} {value}" for name, value in facts.items())
    print(json.dumps(facts) if a.json else "\n".join(lines))


def _plan(a: argparse.Namespace, costs: schedules.Costs) -> schedules.Plan:
    stages, microbatches = a.stages, a.microbatches
    if a.name.endswith(".csv"):
        plan = schedules.read_csv(a.name)
        stages = plan.stages if stages is None else stages
        microbatches = plan.microbatches if microbatches is None else microbatches
    if stages is None or microbatches is None:
        raise ValueError(f"{a.name}: give --stages and --microbatches")
    times = costs if schedules.plans_by_times(a.name) else None
    return schedules.build(a.name, stages, microbatches, a.chunks, times)


def _tokenize(a: argparse.Namespace) -> None:
    from threed.data import load_tokenizer, tokenize_to_megatron

    bos: Any = {"true": True, "false": False}.get(a.bos, "auto")
    tokenizer = load_tokenizer(a.tokenizer, bos, a.special_tokens)
    made = tokenize_to_megatron(a.src, a.dst, tokenizer)
    files = ", ".join(map(str, made.files))
    print(f"{made.documents:,} documents, {made.tokens:,} tokens: {files}")
    begin = f"with {list(tokenizer.bos_ids)} (bos)" if tokenizer.bos_ids else "without bos"
    print(f"documents begin {begin} and end with {tokenizer.eot}")


def _convert(a: argparse.Namespace) -> None:
    from threed.checkpoint.manifest import MANIFEST
    from threed.interop.convert import convert, kind_of

    options = {"allow_pickle": a.allow_pickle, "config": a.config}
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        made = convert(a.src, a.dst, tokenizer=a.tokenizer, dtype=a.dtype, to=a.to, **options)
    for note in notes:
        print(f"threed convert: {note.message}", file=sys.stderr)
    print(made)
    if (made / MANIFEST).is_file() and kind_of(a.src, a.allow_pickle) == "hf":
        print("only weights: a run starts from them at step 0, with optimizer states of zero")


def _inspect(a: argparse.Namespace) -> None:
    if not a.checkpoint and not Path(a.drive).is_dir():
        raise ValueError(f"--drive {a.drive}: there is no such folder")
    print(_checkpoint_facts(a.checkpoint) if a.checkpoint else _machine_facts(a.drive))


def _machine_facts(drive: str) -> str:
    import torch

    from threed.core import device, native
    from threed.distributed.topology import backends
    from threed.ops import launch
    from threed.training import provenance

    lines = [f"python       {platform.python_version()}"]
    packages = "threed torch numpy safetensors pydantic tokenizers wandb transformers matplotlib"
    for name in packages.split():
        lines.append(f"{name:<12} {provenance.version(name)}")
    gpus = [torch.device("cuda", i) for i in range(device.count())]
    cpu = f"CPU, {torch.get_num_threads()} threads in this process"
    lines.append(f"devices      {', '.join(str(device.name(gpu)) for gpu in gpus) or cpu}")
    lines.append(f"backends     {', '.join(backends()) or 'none'}")
    for name, found in native.status().items():
        found = found.replace("\n", "\n" + " " * 13)
        lines.append(f"{f'kernels {name}':<12} {found}")
    if native.library("cuda") is not None:
        lines += [f"{'':<12} {launch.problem(gpu) or f'they run on {gpu}'}" for gpu in gpus]
    return "\n".join([*lines, f"drive        {_drive_facts(drive)}"])


def _drive_facts(folder: str, nbytes: int = 2**28) -> str:
    """Measures how fast offloading to a folder writes and reads. Returns the rates as text.

    Args:
        folder: the folder.
        nbytes: number of bytes to write and read.
    """
    from threed.memory.io import Disk, SwapError
    from threed.memory.pool import host_buffer

    try:
        disk, buffer, rates = Disk(folder, "inspect"), host_buffer(nbytes), []
        place = disk.reserve(nbytes)
        # The first write allocates the blocks of the file, so its rate is not reported.
        for transfer in (disk.write, disk.write, disk.read):
            began = time.perf_counter()
            transfer(place, buffer).wait()
            rates.append(nbytes / (time.perf_counter() - began) / 1e9)
        disk.close()
    except (SwapError, OSError) as error:
        return f"{folder}: {error}"
    how = "direct" if disk.direct else "through the page cache"
    return f"{folder}: {rates[1]:.1f} GB/s written, {rates[2]:.1f} read ({nbytes >> 20} MiB, {how})"


def _checkpoint_facts(path: Path) -> str:
    from threed.checkpoint import native
    from threed.checkpoint.files import CheckpointError
    from threed.checkpoint.reading import Reader
    from threed.interop.huggingface.folder import is_hf_folder
    from threed.interop.safetensors_folder import SafetensorsFolder, is_safetensors_folder

    if is_safetensors_folder(path):
        weights = SafetensorsFolder(path)
        shapes = [f"{name:<44} {list(weights[name].shape)}" for name in sorted(weights)]
        return "\n".join([f"{path}: a safetensors folder; it has no hashes", *shapes])
    if is_hf_folder(path):
        return _folder_facts(path)
    manifest = native.read_manifest(path)
    damaged = native.verify(path, manifest, thorough=True)
    if damaged:
        raise CheckpointError("\n".join(damaged))
    reader = Reader(path, manifest)
    state, model, axes = manifest["state"], manifest["config"]["model"], manifest["topology"]
    size = sum(entry["size"] for entry in manifest["files"])
    buffers = sorted(reader.buffers.items())
    lines = [
        f"{path}: {len(manifest['files'])} files, {size:,} bytes, every hash verified",
        f"after step {state['steps']} and {state['consumed']} samples",
        f"model {model['arch']}, saved on {' × '.join(f'{a} {n}' for a, n in axes.items() if n > 1) or 'one rank'}",
        *(f"{name:<44} {list(shape)}" for name, shape in sorted(reader.shapes.items())),
        *(f"{name:<44} {list(shape)} buffer, {dtype}" for name, (_, dtype, shape) in buffers),
    ]
    return "\n".join(lines)


def _folder_facts(path: Path) -> str:
    """Returns a description of a Hugging Face folder, which has no hashes to verify."""
    from threed.checkpoint.files import CheckpointError
    from threed.interop.huggingface.folder import HFFolder

    folder = HFFolder(path)
    if problems := list(folder.problems()):
        raise CheckpointError("\n".join(problems))
    names = sorted(folder.shapes)
    count = sum(math.prod(shape) for shape in folder.shapes.values())
    dtypes = {str(folder.tensor("weight", name).dtype).removeprefix("torch.") for name in names}
    formats = ", ".join(sorted(dtypes))
    lines = [
        f"{path}: a Hugging Face folder; its tensors match its configuration; it has no hashes",
        f"model {folder.model.arch}, {count:,} parameters, {formats}",
        *(f"{name:<44} {list(folder.shapes[name])}" for name in names),
    ]
    return "\n".join(lines)


def _report(a: argparse.Namespace) -> None:
    from threed.monitor.figures import report

    for path in report(a.folder):
        print(path)
