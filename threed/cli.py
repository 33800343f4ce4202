"""The console script `threed` (the same as `python -m threed`): training, and the tools beside it.

threed train gpt --preset tiny                                 on one process; on more: torchrun … -m threed train gpt
threed schedule 1f1b --stages 4 --microbatches 8 [--svg FILE] [--csv FILE] [--json]     1f1b, FILE.py:NAME or FILE.csv
threed plan --world-size 8 --preset small --parallel.tp 2      what a run would take; flags as for training
threed tokenize SRC DST [--tokenizer bytes]                    text -> Megatron .bin/.idx
threed convert SRC DST [--dtype bf16]                          native checkpoint -> Hugging Face folder, and back
threed inspect [CHECKPOINT]                                    versions, devices; or a checkpoint or HF folder, verified
threed report RUN                                              draws a run's figures again
threed verify FILE.py:NAME [--topologies tp2,pp2] [--json]     is a model of one's own the same in every topology?
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from threed import architectures, schedules
from threed.packages import MissingPackageError


def main(argv: list[str] | None = None) -> int:
    """Runs a tool; the exit code: 0, or 2 with one clear line for what was wrong."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        if argv[:1] in (["train"], ["plan"]):
            return _train(*argv)
        if argv[:1] == ["verify"]:
            return _verify(argv)
        if not argv:
            _parser().print_help(sys.stderr)
            return 2
        return _tool(argv)
    except MissingPackageError as error:
        print(f"threed {argv[0]}: {error}", file=sys.stderr)
        return 2


def _tool(argv: list[str]) -> int:
    arguments = _parser().parse_args(argv)
    run: Callable[[argparse.Namespace], None] = arguments.run
    try:
        run(arguments)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"threed {argv[0]}: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="threed", description="Training, and the tools beside it."
    )
    tools = parser.add_subparsers(required=True, metavar="TOOL")
    named = "|".join(architectures.NAMES)
    tools.add_parser(
        "train", help=f"[{named}] --preset tiny …: trains; `threed train --help` lists every key"
    )
    tools.add_parser(
        "plan", help="what a run would take; takes the flags of training and --world-size N"
    )
    for name, (text, add_arguments, run) in _TOOLS.items():
        tool = tools.add_parser(name, help=text, description=text)
        tool.set_defaults(run=run)
        add_arguments(tool)
    text = "trains a model in every topology and compares with one process: exit code 0 same, 1 differs, 2 not compared"
    _add_verify(
        tools.add_parser(
            "verify",
            help=text,
            allow_abbrev=False,
            description=f"{text}; takes flags of training too",
        )
    )
    return parser


def _add_schedule(tool: argparse.ArgumentParser) -> None:
    tool.add_argument(
        "name", help=f"{', '.join(schedules.available())}, or FILE.py:FUNCTION, or FILE.csv"
    )
    tool.add_argument(
        "--stages", type=int, help="pipeline ranks; of FILE.csv as many as it has rows"
    )
    tool.add_argument(
        "--microbatches", type=int, help="micro-batches of a step; of FILE.csv its own"
    )
    tool.add_argument("--chunks", type=int, default=None, help="model chunks on a rank")
    for name in ("forward", "backward-input", "backward-weight"):
        tool.add_argument(
            f"--{name}", type=float, default=1.0, help="time of it for one micro-batch (default 1)"
        )
    tool.add_argument("--send", type=float, default=0.0, help="latency of a message (default 0)")
    text = "time of a forward run together with a backward (default the sum)"
    tool.add_argument("--overlapped", type=float, help=text)
    tool.add_argument("--svg", type=Path, help="draw the timeline into this file")
    tool.add_argument(
        "--csv", type=Path, help="write the plan as torch.distributed.pipelining reads it"
    )
    tool.add_argument("--json", action="store_true", help="print JSON")


def _add_tokenize(tool: argparse.ArgumentParser) -> None:
    tool.add_argument("src")
    tool.add_argument("dst", help="prefix of the .bin and .idx to write")
    text = "bytes (default), the folder of a tokenizer, or the path of a tokenizer.json"
    tool.add_argument("--tokenizer", default="bytes", help=text)
    text = "begin documents with the bos token (default auto: if the tokenizer itself adds it to texts)"
    tool.add_argument("--bos", choices=["auto", "true", "false"], default="auto", help=text)
    text = "encode the spelling of a special token as ordinary text (default), or parse it as the token"
    tool.add_argument("--special-tokens", choices=["text", "parse"], default="text", help=text)


def _add_convert(tool: argparse.ArgumentParser) -> None:
    tool.add_argument("src", type=Path)
    tool.add_argument("dst", type=Path)
    tool.add_argument(
        "--to",
        choices=["native", "hf"],
        help="what DST is to be; default: the other one than SRC is",
    )
    text = "bytes, a folder, a tokenizer.json, or none; default: the folder's, or the run's"
    tool.add_argument("--tokenizer", help=text)
    tool.add_argument(
        "--dtype", choices=["fp32", "bf16", "fp16"], default=None, help="format of the weights"
    )
    text = "read checkpoints of DeepSpeed and Megatron, which are pickles, in a process that is cut off"
    tool.add_argument("--allow-pickle", action="store_true", help=text)
    text = "config.json of DeepSpeed's model; default: the one in SRC or above it"
    tool.add_argument("--config", type=Path, help=text)


def _add_inspect(tool: argparse.ArgumentParser) -> None:
    tool.add_argument("checkpoint", type=Path, nargs="?")
    text = "folder whose drive is timed (default %(default)s)"
    tool.add_argument("--drive", default=tempfile.gettempdir(), help=text)


def _add_report(tool: argparse.ArgumentParser) -> None:
    tool.add_argument("folder", type=Path)


def _add_verify(tool: argparse.ArgumentParser) -> None:
    tool.add_argument(
        "model", metavar="FILE.py:NAME", help="a class called with a ModelConfig and a Slicing"
    )
    text = "such as tp2,tp2-seq,dp2-zero3: words tpN ppN dpN microN seq zeroN recompute offload"
    tool.add_argument("--topologies", help=text)
    tool.add_argument(
        "--timeout", type=float, default=120, help="seconds for one topology (default 120)"
    )
    tool.add_argument("--json", action="store_true", help="print JSON")


def _train(tool: str, *words: str) -> int:
    """Trains, or plans a run: an architecture or none, then the flags of training."""
    from threed import launch

    arch = words[0] if words and not words[0].startswith("-") else None
    flags = list(words[arch is not None :])
    if arch not in (None, *architectures.NAMES):
        known = ", ".join(architectures.NAMES)
        return launch.refuse(f"threed {tool} {arch}: no such architecture; there are {known}")
    if tool == "plan":
        return launch.main([*flags, "--dry-run"], arch=arch, prog="threed plan")
    return launch.main(flags, arch=arch, prog=f"-m threed train {arch or ''}".rstrip())


def _verify(argv: list[str]) -> int:
    a, flags = _parser().parse_known_args(argv)
    from threed import testing
    from threed.arguments import load

    try:
        config, options = load(flags, defaults=testing.DEFAULTS)
        if options.dry_run or options.world_size is not None:
            raise ValueError("--dry-run and --world-size are for training; use --topologies")
        build, batch = testing.find(a.model)
        names = testing.TOPOLOGIES if a.topologies is None else a.topologies.split(",")
        report = testing.same_everywhere(build, batch, names, config=config, timeout=a.timeout)
    except ValueError as error:
        print(f"threed verify: {error}", file=sys.stderr)
        return 2
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
    print(
        json.dumps(facts)
        if a.json
        else "\n".join(f"{name:<17} {value}" for name, value in facts.items())
    )


def _plan(a: argparse.Namespace, costs: schedules.Costs) -> schedules.Plan:
    stages, microbatches = a.stages, a.microbatches
    if a.name.endswith(".csv"):
        plan = schedules.read_csv(a.name)
        stages = plan.stages if stages is None else stages
        microbatches = plan.microbatches if microbatches is None else microbatches
    if stages is None or microbatches is None:
        raise ValueError(f"{a.name}: how many? give --stages and --microbatches")
    times = costs if schedules.plans_by_times(a.name) else None
    return schedules.build(a.name, stages, microbatches, a.chunks, times)


def _tokenize(a: argparse.Namespace) -> None:
    from threed.data import load_tokenizer, tokenize_to_megatron

    tokenizer = load_tokenizer(
        a.tokenizer, {"true": True, "false": False}.get(a.bos, "auto"), a.special_tokens
    )
    made = tokenize_to_megatron(a.src, a.dst, tokenizer)
    print(
        f"{made.documents:,} documents, {made.tokens:,} tokens: {', '.join(str(file) for file in made.files)}"
    )
    begin = (
        f"begin with {list(tokenizer.bos_ids)} (bos)" if tokenizer.bos_ids else "begin without bos"
    )
    print(f"documents {begin} and end with {tokenizer.eot}")


def _convert(a: argparse.Namespace) -> None:
    from threed.interop.convert import convert, kind_of

    others = {"allow_pickle": a.allow_pickle, "config": a.config}
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        made = convert(a.src, a.dst, tokenizer=a.tokenizer, dtype=a.dtype, to=a.to, **others)
    for note in notes:
        print(f"threed convert: {note.message}", file=sys.stderr)
    print(made)
    if (kind_of(Path(a.src), a.allow_pickle), kind_of(made)) == ("hf", "native"):
        print("weights alone: a run begins from them at step 0, with moments of zero")


def _inspect(a: argparse.Namespace) -> None:
    if not a.checkpoint and not Path(a.drive).is_dir():
        raise ValueError(f"--drive {a.drive}: there is no such folder")
    print(_checkpoint_facts(a.checkpoint) if a.checkpoint else _machine_facts(a.drive))


def _machine_facts(drive: str) -> str:
    import torch

    from threed import device, native
    from threed.ops import launch
    from threed.topology import backends

    lines = [f"python       {platform.python_version()}"]
    for (
        name
    ) in "threed torch numpy safetensors pydantic tokenizers wandb transformers matplotlib".split():
        try:
            lines.append(f"{name:<12} {version(name)}")
        except PackageNotFoundError:
            lines.append(f"{name:<12} not installed")
    devices = [str(device.name(torch.device("cuda", i))) for i in range(device.count())]
    lines.append(
        f"devices      {', '.join(devices) or f'CPU, {torch.get_num_threads()} threads in this process'}"
    )
    lines.append(f"backends     {', '.join(backends()) or 'none'}")
    for name, found in native.status().items():
        found = found.replace("\n", "\n" + " " * 13)
        lines.append(f"{f'kernels {name}':<12} {found}")
    if native.library("cuda") is not None:
        gpus = [torch.device("cuda", i) for i in range(device.count())]
        lines += [f"{'':<12} {launch.problem(gpu) or f'they run on {gpu}'}" for gpu in gpus]
    return "\n".join([*lines, f"drive        {_drive_facts(drive)}"])


def _drive_facts(folder: str, nbytes: int = 2**28) -> str:
    """How fast offload to a folder would be: some direct writes, and reads of the same."""
    from threed.memory.io import Disk, SwapError
    from threed.memory.pool import host_buffer

    try:
        disk, buffer, rates = Disk(folder, "inspect"), host_buffer(nbytes), []
        place = disk.reserve(nbytes)
        for transfer in (
            disk.write,
            disk.write,
            disk.read,
        ):  # the first write is of blocks that were never written
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

    if is_hf_folder(path):
        return _folder_facts(path)
    manifest = native.read_manifest(path)
    damaged = native.verify(path, manifest, thorough=True)
    if damaged:
        raise CheckpointError("\n".join(damaged))
    reader = Reader(path, manifest)
    state, model = manifest["state"], manifest["config"]["model"]
    size = sum(entry["size"] for entry in manifest["files"])
    lines = [
        f"{path}: {len(manifest['files'])} files, {size:,} bytes, every hash verified",
        f"after step {state['steps']} and {state['consumed']} samples",
        f"model {model['arch']}, saved on {manifest['topology']}",
        *(f"{name:<44} {list(shape)}" for name, shape in sorted(reader.shapes.items())),
        *(
            f"{name:<44} {list(shape)} buffer, {dtype}"
            for name, (_, dtype, shape) in sorted(reader.buffers.items())
        ),
    ]
    return "\n".join(lines)


def _folder_facts(path: Path) -> str:
    """What is in a Hugging Face folder, which has no hashes."""
    from threed.checkpoint.files import CheckpointError
    from threed.interop.huggingface.folder import HFFolder

    folder = HFFolder(path)
    if problems := list(folder.problems()):
        raise CheckpointError("\n".join(problems))
    names = sorted(folder.shapes)
    count = sum(math.prod(shape) for shape in folder.shapes.values())
    formats = ", ".join(
        sorted({str(folder.tensor("weight", name).dtype).removeprefix("torch.") for name in names})
    )
    lines = [
        f"{path}: a Hugging Face folder whose tensors are those of its configuration; it has no hashes",
        f"model {folder.model.arch}, {count:,} parameters, {formats}",
        *(f"{name:<44} {list(folder.shapes[name])}" for name in names),
    ]
    return "\n".join(lines)


def _report(a: argparse.Namespace) -> None:
    from threed.monitor.figures import report

    for path in report(a.folder):
        print(path)


_Arguments = Callable[[argparse.ArgumentParser], None]
_TOOLS: dict[str, tuple[str, _Arguments, Callable[[argparse.Namespace], None]]] = {
    "schedule": ("plays a pipeline schedule out, and draws it", _add_schedule, _schedule),
    "tokenize": (
        "turns text (.txt, .jsonl, a folder of them) into Megatron .bin/.idx",
        _add_tokenize,
        _tokenize,
    ),
    "convert": (
        "turns a native checkpoint into a Hugging Face folder, and back, and DeepSpeed's and Megatron's into it",
        _add_convert,
        _convert,
    ),
    "inspect": (
        "shows versions and devices, or what is in a checkpoint, all hashes verified",
        _add_inspect,
        _inspect,
    ),
    "report": ("draws a run's figures again from its folder", _add_report, _report),
}
