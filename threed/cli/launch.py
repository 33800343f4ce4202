"""Launches a run from a command line: parses and checks it, then builds topology, model, engine and
trainer, and trains.

    sys.exit(launch.main(sys.argv[1:], arch="gpt", prog="pretrain/gpt.py"))

Configuration, data and disks are checked before any process group is created. If there are
problems, local rank 0 reports all of them at once, and the program ends with exit code 2.
"""

from __future__ import annotations

import errno
import functools
import os
import platform
import shlex
import signal
import threading
from pathlib import Path

from threed.checkpoint import native
from threed.checkpoint.files import CheckpointError, RunFolderError, check_space
from threed.checkpoint.run_folder import after_restart, candidates, refusals, resume_hint
from threed.config import Config, ConfigError
from threed.config.arguments import Options, format_problems, load
from threed.config.checks import check_vocab
from threed.config.renames import report_renames
from threed.config.resolution import resolve
from threed.core import device
from threed.core.disk import is_unwritable, why
from threed.core.messages import counted
from threed.core.source import is_foreign, names_model
from threed.data import Data
from threed.data.dataset import find_problems as find_data_problems
from threed.data.tokenizer_files import PUBLISHED, how_to_download
from threed.distributed import collectives
from threed.distributed.launcher import (
    LauncherError,
    end_by_signal,
    exits_on_broken_pipe,
    join,
    without_srun,
)
from threed.interop import pretrained
from threed.interop.huggingface.folder import is_hf_folder
from threed.memory.io import SwapError
from threed.models.custom import ForwardError
from threed.planner.forecast import Forecast, checkpoint_bytes
from threed.reliability import recheck
from threed.reliability.failure import LostContact, refuse
from threed.reliability.preemption import PREEMPTED, Preempted
from threed.trainer import Trainer, open_configured, start_engine
from threed.zero.replicas import ReplicaError
from threed.zero.step_metrics import BadStepsError

# Errors that all ranks raise together, and that end a run with a message instead of a traceback.
# For each type: the exit code, and whether the message includes the command that resumes the run.
ENDINGS: dict[type[Exception], tuple[int, bool]] = {
    CheckpointError: (2, False),
    ConfigError: (2, False),
    RunFolderError: (2, False),
    BadStepsError: (2, True),
    ReplicaError: (2, True),
    ForwardError: (2, False),
    Preempted: (PREEMPTED, True),
}


def main(argv: list[str], *, prog: str, arch: str | None = None, named: bool = False) -> int:
    """Runs the training that a command line describes.

    On an interrupt (Ctrl-C), prints one line and ends the process by SIGINT.

    Args:
        argv: flags of the command line.
        prog: the words of the command line between `torchrun` and the flags, for the usage line of
            `--help` and the hint on how to resume.
        arch: the architecture to use if no file and no flag names one; or a custom model, as
            FILE.py:MODEL.
        named: whether the user gave `arch` on the command line. If so, a flag with a different
            architecture is an error.

    Returns:
        The exit code (docs/guide/fault_tolerance.md).
    """
    try:
        with exits_on_broken_pipe():
            return _run(argv, arch, prog, named)
    except KeyboardInterrupt as interrupt:
        # Ignores further SIGINTs, because the launcher forwards the SIGINT that the terminal has
        # already sent to this process.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if _local_rank() == 0:
            print(f"threed: interrupted; {interrupt or 'the run had not started'}", flush=True)
        end_by_signal(signal.SIGINT)
        raise


def _run(argv: list[str], arch: str | None, prog: str, named: bool) -> int:
    flags, custom = argv, arch is not None and names_model(arch)
    if arch is not None and custom:
        # Presets turn on the export of a Hugging Face folder, which custom models do not support.
        flags = ["--model.arch", arch, "--checkpoint.export-hf", "false", *argv]
    defaults = {"model": {"arch": arch}} if arch and not custom else {}
    try:
        ranks = join()
        config, options = load(
            flags, prog=prog, defaults=defaults, world_size=ranks.world,
            local_world=ranks.local_world, machines=ranks.machines, choose_topology=True,
            more=_data_problems,
            # One rank per machine checks the folder.
            begin=functools.partial(pretrained.find, check=_local_rank() == 0),
        )  # fmt: skip
        if options.help:
            return _print_once(options.help)
        report_renames(options.notes)
        _check_arch(config, options, arch, prog, named)
        world = options.world_size or ranks.world
        data = open_configured(config)
        config = resolve(config, data.vocab, world)
        forecast = _forecast(config, world, options.dry_run, options.gpu)
        problems = _problems_here(config, forecast, data, options.dry_run)
    except LauncherError as error:
        return refuse(f"threed: {error}")
    except ConfigError as error:
        return refuse(format_problems(error.problems))
    problems += _device_problems(ranks.local_world or 1)
    if options.dry_run:
        # A dry run may plan for another machine, so it only prints the problems of this machine.
        text = [] if forecast is None else [forecast.dry_run_text(), *_notes(config, options)]
        return _print_once("\n".join([*text, *(f"here       {problem}" for problem in problems)]))
    if options.world_size is not None:
        problems = ["--world-size goes with --dry-run; torchrun sets the world size of a run"]
    if options.gpu is not None:
        problems.append("--gpu goes with --dry-run; a run uses the GPUs of its machines")
    if problems:
        return refuse(format_problems(problems))
    if note := without_srun():
        _print_once(f"threed: {note}")
    for line in _notes(config, options):
        _print_once(line)
    words = _resume_words(config, options) if options.pretrained else None
    command = [*shlex.split(prog), *(words or argv)]
    # The partition depends on times that all ranks measure later, so the trainer makes the forecast
    # after these measurements.
    if config.parallel.partition == "measured":
        forecast = None
    code = _exit_code(config, data, command, words, forecast)
    try:
        collectives.leave(code)
    except RuntimeError:  # rank 0 failed after the last step, and has reported the error
        os._exit(1)
    return code


def _exit_code(
    config: Config, data: Data, command: list[str], words: list[str] | None, forecast: Forecast | None
) -> int:  # fmt: skip
    """Trains and returns this rank's exit code; if the training ends early, reports the reason.

    Args:
        config, data, command, forecast: see `_train`.
        words: see `resume_hint`.
    """
    try:
        _train(config, data, command, forecast)
    except LostContact:  # the death of the other rank is already reported
        return 1
    except KeyboardInterrupt:
        raise KeyboardInterrupt(resume_hint(config, words)) from None
    except tuple(ENDINGS) as error:
        code, resumable = next(e for kind, e in ENDINGS.items() if isinstance(error, kind))
        more = f"; {resume_hint(config, words)}" if resumable else ""
        return refuse(f"threed: {error}{more}", code)
    except SwapError as error:  # the offload drive of this rank failed
        return refuse(f"threed: {error}", shared=False)
    except OSError as error:
        if not is_unwritable(error):
            raise
        folder, rank = Path(config.run.dir or "runs"), os.environ.get("RANK", 0)
        what = f"rank {rank} on {platform.node()} could not write {error.filename or folder}"
        return refuse(f"threed: {what}: {why(error, folder)}", shared=False)
    return 0


def _train(config: Config, data: Data, command: list[str], forecast: Forecast | None) -> None:
    """Builds topology, model and engine from a resolved configuration, and trains.

    Args:
        config: the resolved configuration.
        data: the training data.
        command: words of the command line, for the hint on how to resume.
        forecast: forecast of memory and time, or None.
    """
    interrupted = threading.Event()

    def interrupt(*_: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    # If the process ignores SIGINT, it continues to ignore it.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    if config.run.recheck_bad_steps:
        recheck.configure_cublas()
    try:
        Trainer(start_engine(config), data, command, forecast, interrupted).run()
    except RuntimeError:
        # An interrupt on another rank makes collectives fail on this rank, and this rank's own
        # interrupt may follow within a moment. The code waits for the event that `interrupt` sets,
        # not for the KeyboardInterrupt, because autograd loses a KeyboardInterrupt that is raised
        # in one of its callbacks.
        if interrupted.wait(1.0):
            raise KeyboardInterrupt from None
        raise


def _resume_words(config: Config, options: Options) -> list[str]:
    """Returns the flags that resume a run that started from a Hugging Face folder."""
    arch = ["--model.arch", config.model.arch] if "model.arch" in options.flags else []
    return ["--config", str(Path(config.run.dir or "runs") / "config.toml"), *arch]


def _check_arch(config: Config, options: Options, arch: str | None, prog: str, named: bool) -> None:
    """Raises ConfigError if the configuration names a different architecture than `arch`.

    If the program chose `arch` and not the user (`named` is False), the flag --model.arch may
    override `arch`, and no error is raised.
    """
    found, prog = config.model.arch, prog.removeprefix("-m ")
    if arch is None or _same_model(arch, found):
        return
    if "model.arch" in options.flags:
        if named:
            raise ConfigError([f"{prog} contradicts --model.arch {found}: leave one of them out"])
        return
    which = f"{prog} trains {arch}, and the preset, file or folder has model.arch {found}"
    other = f"use `threed train {found}`"
    fix = other if named else f"add --model.arch {found}"
    if not options.pretrained:
        other = f"add --model.arch {arch}" if named else f"--model.arch {arch}"
    fixes = dict.fromkeys([fix, other])
    raise ConfigError([f"{which}: {', or '.join(fixes)}"])


def _same_model(one: str, other: str) -> bool:
    """Returns whether two values of `--model.arch` name the same model; compares absolute paths."""
    if not (names_model(one) and names_model(other)):
        return one == other
    (file, _, name), (other_file, _, other_name) = one.rpartition(":"), other.rpartition(":")
    return name == other_name and Path(file).absolute() == Path(other_file).absolute()


def _data_problems(config: Config) -> list[str]:
    """Returns the problems of the data that can be found without reading all of it."""
    d = config.data
    return find_data_problems(
        d.path, d.tokenizer, d.split, bos=d.bos, special_tokens=d.special_tokens,
        fits=lambda tokenizer: check_vocab(config, tokenizer.text_vocab_size),
    )  # fmt: skip


def _local_rank() -> int:
    """Returns this process's index on its machine, as set by the launcher."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def _print_once(text: str) -> int:
    if _local_rank() == 0:
        print(text)
    return 0


def _notes(config: Config, options: Options) -> list[str]:
    """Returns notes on the configuration, to print at the start.

    One note is about the topologies of the preset or file (`Options.notice`). The other one is for
    a model that has the vocabulary size of a published tokenizer, but runs with tokenizer "bytes".
    """
    lines, vocab = [options.notice] if options.notice else [], config.model.vocab
    if config.data.tokenizer == "bytes" and vocab in PUBLISHED:
        note = f"bytes: 257 of the model's {vocab} token ids are used. For its published tokenizer"
        lines.append(f"tokenizer  {note}: {how_to_download(vocab)}")
    return lines


def _forecast(config: Config, world: int, alone: bool, gpu: str | None) -> Forecast | None:
    """Returns the forecast of memory and time on local rank 0, and None on other ranks.

    Args:
        config: the resolved configuration.
        world: number of ranks.
        alone: whether this is a dry run. Only in a dry run may this process time the layers for a
            measured partition. In other runs, the forecast uses a balanced partition instead,
            because all ranks must take part in the measurement.
        gpu: the GPU to assume; None for this machine's device.

    Raises:
        ConfigError: if the model cannot be partitioned. The launcher then ends the other ranks,
            too.
    """
    if _local_rank() > 0:
        return None
    if config.parallel.partition == "measured" and not alone:
        balanced = {"partition": "balanced", "memory_limit_gib": None}
        parallel = config.parallel.model_copy(update=balanced)
        config = config.model_copy(update={"parallel": parallel})
    try:
        return Forecast.of(config, world, gpu=gpu)
    except ConfigError:
        raise
    except ValueError as error:
        if is_foreign(error, Path(__file__).parents[1]):  # the code of a custom model raised it
            raise
        raise ConfigError([str(error)]) from None


def _problems_here(
    config: Config, forecast: Forecast | None, data: Data, dry_run: bool
) -> list[str]:
    """Returns the problems of this machine's run folder and drive, and of the checkpoint to resume.

    Args:
        config: the resolved configuration.
        forecast: forecast of the run, for the size of a checkpoint; None to skip the check of free
            space, as on ranks other than local rank 0.
        data: the training data.
        dry_run: whether to skip the checks of free space and of the drive, because the run may be
            planned for another machine.

    Raises:
        ConfigError: in a dry run, if it cannot resume from the checkpoint that
            `checkpoint.resume` names.
    """
    folder, drive = Path(config.run.dir or "runs"), config.zero.nvme_path
    named = dry_run and config.checkpoint.resume not in ("auto", "none")
    problems, space = _folder_problems(folder), list[str]()
    if forecast is not None and not dry_run and not problems:
        space = _space_problems(folder, forecast)
    if named or not problems:
        resume = _resume_problems(folder, config, data)
        if named and resume:
            raise ConfigError(resume)
        problems += [*resume, *space]
    # The drive's free space is checked later, when offload reserves its files.
    if drive is not None and not dry_run and (reason := _obstacle(Path(drive))):
        problems += [f"--zero.nvme-path {drive}: {reason}; name a folder on the drive"]
    return problems


def _existing(folder: Path) -> Path:
    """Returns the folder or, if it does not exist, its nearest existing parent.

    A broken link counts as existing.
    """
    return next(
        path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path)
    )


def _obstacle(folder: Path) -> str:
    """Returns why a folder cannot be created or written, or "" if it can."""
    try:
        os.lstat(folder)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return str(error.strerror)
    place = _existing(folder)
    if not place.is_dir():
        return f"{place} is {'a file' if os.path.exists(place) else 'a broken link'}"
    if os.access(place, os.W_OK):
        return ""
    read_only = os.statvfs(place).f_flag & os.ST_RDONLY
    return f"{place} {'is read-only' if read_only else 'not writable for this user'}"


def _folder_problems(folder: Path) -> list[str]:
    if reason := _obstacle(folder):
        return [
            f"the run folder {folder} cannot be created: {reason}; choose another with --run.dir"
        ]
    if reason := _obstacle(folder / "checkpoints"):
        return [f"checkpoints cannot be saved in {folder}: {reason}; choose another with --run.dir"]
    return []


def _space_problems(folder: Path, forecast: Forecast) -> list[str]:
    nbytes = checkpoint_bytes(forecast.parameters, forecast.config.precision.dtype)
    try:
        check_space(_existing(folder / "checkpoints"), nbytes)
    except CheckpointError as error:
        return [str(error)]
    return []


def _resume_problems(folder: Path, config: Config, data: Data) -> list[str]:
    """Returns the problems of the checkpoint to resume from.

    The checkpoint may be missing, or differ from the configuration in a key that must not change.
    Damaged files are found later, when the checkpoint is loaded.
    """
    resume = after_restart(folder, config.checkpoint.resume)
    if is_hf_folder(Path(resume)):
        return []  # `pretrained.find` has already checked the folder
    if resume not in ("auto", "none") and not os.path.exists(Path(resume) / native.MANIFEST):
        where = f"--checkpoint.resume {resume}: there is no checkpoint (no {native.MANIFEST}, no config.json)"
        hint = "give a step-N folder or a Hugging Face folder (`threed convert` converts other checkpoints)"
        return [f"{where}; {native.did_you_mean(Path(resume)) or hint}"]
    for path in candidates(folder, resume):
        try:
            return refusals(native.read_manifest(path), config, data)
        except CheckpointError as error:
            if resume != "auto":
                return [str(error)]
    return []


def _device_problems(local_world: int) -> list[str]:
    count = device.count()
    # srun may make only one GPU visible to each task, so one GPU is enough without torchrun.
    one_visible = count == 1 and "TORCHELASTIC_RUN_ID" not in os.environ
    if 0 < count < local_world and not one_visible:
        fix = f"start {count}, or hide them with CUDA_VISIBLE_DEVICES= to train on the CPU"
        return [f"{local_world} ranks on a machine with {counted(count, 'GPU')}: {fix}"]
    return []
