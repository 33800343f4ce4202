"""The console script `threed` (the same as `python -m threed`): training and its tools.

threed train gpt --preset tiny                                 trains on one process
torchrun --nproc-per-node 4 -m threed train gpt --preset tiny  trains on four processes
threed schedule 1f1b --stages 4 --microbatches 8 [--svg FILE]  simulates a schedule: a name, FILE.py:NAME or FILE.csv
threed plan --world-size 8 --preset small --parallel.tp 2      forecasts memory and time; takes the flags of training
threed plan --from-megatron 'FLAGS' --world-size 8             translates flags of Megatron-LM, and plans the run
threed tokenize SRC DST [--tokenizer bytes]                    writes text as Megatron's .bin and .idx
threed convert SRC DST [--dtype bf16]                          converts a checkpoint to a Hugging Face folder, or back
threed inspect [CHECKPOINT]                                    prints versions and devices, or verifies a checkpoint
threed report RUN [RUN ...]                                    redraws the figures of a run, or compares runs
threed verify FILE.py:NAME [--topologies tp2,pp2] [--json]     compares a custom model in every topology with one process

`threed.cli.parser` defines the arguments of the tools. For example, `threed schedule` also takes
--csv FILE and --json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shlex
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from threed.cli import from_megatron, parser
from threed.config import architectures
from threed.core import source
from threed.core.atomic import building
from threed.core.disk import is_unwritable, why
from threed.core.messages import counted, did_you_mean
from threed.core.packages import MissingPackageError
from threed.distributed.launcher import end_by_signal, exits_on_broken_pipe

if TYPE_CHECKING:
    from threed.schedules import Costs, Plan


def main(argv: list[str] | None = None) -> int:
    """Runs a tool. Returns the exit code: 0, or 2 after an error message on stderr.

    Args:
        argv: command line without the program's name; by default the arguments of this process.
    """
    argv = sys.argv[1:] if argv is None else argv
    tools = parser.make_parser(_RUN, argv[0] if argv else "")
    if not argv:
        tools.print_help(sys.stderr)
        return 2
    if argv[0] not in parser.TOOLS and not argv[0].startswith("-"):
        hint, known = did_you_mean(argv[0], *parser.TOOLS), ", ".join(parser.TOOLS)
        advice = parser.NO_TOOLS.get(argv[0])
        return _refuse(argv[0], f"no such tool{hint}; {advice or f'there are {known}'}")
    # `train` and `plan` report expected errors themselves; any other error keeps its traceback.
    if argv[0] in parser.TRAINING:
        with exits_on_broken_pipe():
            return _train(*argv)
    try:
        with exits_on_broken_pipe():
            if argv[0] == "verify":
                return _verify(*tools.parse_known_args(_joined(argv)))
            arguments = tools.parse_args(argv)
            arguments.run(arguments)
    except (ValueError, OSError, RuntimeError, MissingPackageError) as error:
        return _refuse(argv[0], _problem(error))
    except KeyboardInterrupt:
        _refuse(argv[0], "interrupted")
        end_by_signal(signal.SIGINT)
    return 0


def _problem(error: Exception) -> str:
    """Returns the text of an error; an OSError about a file is shown without its errno."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _refuse(tool: str, problem: str) -> int:
    print(f"threed {tool}: {problem}", file=sys.stderr)
    return 2


def _joined(words: list[str]) -> list[str]:
    """Joins each training flag of a command line and its value into one word, `--flag=value`.

    The parser of `verify` does not define training flags. So if the value of such a flag were a
    separate word, the parser would take it for the positional argument of `verify`.
    """
    own, joined = ("--topologies", "--timeout", "--json", "--help", "--dry-run"), list[str]()
    for word in words:
        flag = joined[-1] if joined else ""
        if flag.startswith("--") and "=" not in flag and flag not in own and word[:1] != "-":
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _train(tool: str, *words: str) -> int:
    """Trains or plans a run.

    Args:
        tool: "train" or "plan".
        words: an architecture or FILE.py:MODEL (optional), then flags.
    """
    if from_megatron.given(words):
        if tool == "plan" and not {"--help", "-h"} & set(words):
            return from_megatron.plan(words)
        if tool == "train":
            fix = "it is an option of threed plan, which prints the command that trains"
            return _refuse("train", f"{from_megatron.FLAG}: {fix}")
    arch = os.path.expanduser(words[0]) if words and not words[0].startswith("-") else None
    flags = list(words[arch is not None :])
    if arch is not None and arch not in architectures.NAMES and not source.names_model(arch):
        hint, known = did_you_mean(arch, *architectures.NAMES), ", ".join(architectures.NAMES)
        problem = f"no such architecture{hint}; there are {known}, and FILE.py:MODEL"
        if arch.endswith(".py"):
            problem = f"name the model in the file, too: {arch}:MODEL"
        from threed.cli import launch

        return launch.refuse(f"threed {tool} {arch}: {problem}")
    if {"--help", "-h"} & set(flags):
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(parser.train_help(tool, arch), end="")
        return 0
    if tool == "plan" and not words:
        return _refuse(
            "plan",
            "give a model (ARCH or FILE.py:MODEL), a --preset or a --config; see threed plan --help",
        )
    from threed.cli import launch

    named = arch is not None
    if tool == "plan":
        prog = shlex.join(["threed", "plan", *([arch] if arch else [])])
        return launch.main([*flags, "--dry-run"], arch=arch, prog=prog, named=named)
    prog = shlex.join(["-m", "threed", "train", *([arch] if arch else [])])
    return launch.main(flags, arch=arch, prog=prog, named=named)


def _verify(a: argparse.Namespace, flags: list[str]) -> int:
    from threed import testing
    from threed.config.arguments import load
    from threed.config.renames import report_renames

    config, options = load(flags, defaults=testing.DEFAULTS)
    report_renames(options.notes)
    if options.dry_run or options.world_size is not None or options.gpu is not None:
        raise ValueError("--dry-run, --world-size and --gpu are for plans; use --topologies")
    if not a.timeout > 0:
        raise ValueError(f"--timeout {a.timeout:g}: must be more than 0 seconds")
    model = os.path.expanduser(a.model)
    build, batch = source.find_model(model), source.find_batch(model)
    names = testing.TOPOLOGIES if a.topologies is None else a.topologies.split(",")
    report = testing.same_everywhere(build, batch, names, config=config, timeout=a.timeout)
    print(report.json() if a.json else report)
    return report.exit_code


def _schedule(a: argparse.Namespace) -> None:
    from threed import schedules

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
        _write(a.csv, schedules.to_csv(plan))
    if a.svg:
        counts = f"{counted(plan.stages, 'stage')}, {counted(plan.microbatches, 'micro-batch')}"
        title = f"{Path(a.name).name}: {counts}"
        peak = f"at most {counted(max(timeline.peak_activations), 'micro-batch', 'g')} in memory"
        subtitle = f"ends at {timeline.makespan:g}, bubble {timeline.bubble:.1%}, {peak}"
        unit = f"forward = {a.forward:g}"
        _write(a.svg, schedules.svg(timeline.spans, title, subtitle, unit=unit, ways=plan.ways))
    lines = (f"{name:<17} {value}" for name, value in facts.items())
    print(json.dumps(facts) if a.json else "\n".join(lines))


@contextlib.contextmanager
def _writes(path: Path) -> Iterator[None]:
    """Context manager: an error of a full or read-only disk becomes a ValueError with advice.

    Args:
        path: the file that the block writes.
    """
    try:
        yield
    except OSError as error:
        if not is_unwritable(error):
            raise
        reason = why(error, path.parent, elsewhere="choose another path")
        raise ValueError(f"could not write {path}: {reason}") from error


def _write(path: Path, text: str) -> None:
    """Writes a file; after an error, an existing file is unchanged, and no partial file is left."""
    with _writes(path):
        if path.exists() and not path.is_file():  # such as /dev/stdout, which cannot be replaced
            path.write_text(text)
            return
        with building(path) as (scratch,):
            scratch.write_text(text)


def _plan(a: argparse.Namespace, costs: Costs) -> Plan:
    from threed import schedules
    from threed.schedules import registry

    stages, microbatches = a.stages, a.microbatches
    if a.name.endswith(".csv"):
        plan = schedules.read_csv(a.name)
        stages = plan.stages if stages is None else stages
        microbatches = plan.microbatches if microbatches is None else microbatches
    if stages is None or microbatches is None:
        raise ValueError(f"{a.name}: give --stages and --microbatches")
    times = costs if registry.plans_by_times(a.name) else None
    return schedules.build(a.name, stages, microbatches, a.chunks, times)


def _tokenize(a: argparse.Namespace) -> None:
    from threed.data import load_tokenizer, tokenize_to_megatron

    if not Path(a.src).expanduser().exists():
        raise ValueError(f"{a.src} does not exist")
    bos: Any = {"true": True, "false": False}.get(a.bos, "auto")
    tokenizer = load_tokenizer(a.tokenizer, bos, a.special_tokens)
    with _writes(Path(a.dst).expanduser()):
        made = tokenize_to_megatron(a.src, a.dst, tokenizer)
    files = ", ".join(map(str, made.files))
    counts = f"{counted(made.documents, 'document', ',')}, {counted(made.tokens, 'token', ',')}"
    print(f"{counts}: {files}")
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
    if not a.checkpoint:
        print(_machine_facts(a.drive))
        return
    from threed.interop.inspection import inspect

    print(inspect(a.checkpoint))


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
    cpu = f"CPU, {counted(torch.get_num_threads(), 'thread')} in this process"
    lines.append(f"devices      {', '.join(str(device.name(gpu)) for gpu in gpus) or cpu}")
    lines.append(f"backends     {', '.join(backends()) or 'none'}")
    for name, found in native.status().items():
        found = found.replace("\n", "\n" + " " * 13)
        lines.append(f"{f'kernels {name}':<12} {found}")
    if native.library("cuda") is not None:
        lines += [f"{'':<12} {launch.problem(gpu) or f'they run on {gpu}'}" for gpu in gpus]
    return "\n".join([*lines, f"drive        {_drive_facts(drive)}"])


def _drive_facts(folder: str, nbytes: int = 2**28) -> str:
    """Measures how fast offload writes to and reads from a folder; returns the rates as text.

    Args:
        folder: folder on the drive to measure.
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


def _report(a: argparse.Namespace) -> None:
    from threed.monitor.comparison import compare
    from threed.monitor.figures import report

    if len(a.folders) == 1:
        drawn = report(a.folders[0])
    else:
        table, drawn = compare(a.folders)
        print(table)
    for path in drawn:
        print(path)


_RUN: Mapping[str, Callable[[argparse.Namespace], None]] = {
    "schedule": _schedule,
    "tokenize": _tokenize,
    "convert": _convert,
    "inspect": _inspect,
    "report": _report,
}
