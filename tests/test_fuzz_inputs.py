"""Damaged and malicious files: each is refused in one line, or has the meaning that its text has.

HF folders    `threed convert`: header, index, configuration. If a folder is accepted, the result has
              exactly the tensors that `twin` below reads. `--checkpoint.resume`: a plan or a refusal
text, tokens  `threed tokenize` of .jsonl, with a tokenizer.json; Megatron's .idx
keys          TOML for `--config`, ds_config.json

For each damaged file the exit code must be 0 or 2, the output printable lines without a traceback,
nothing may be written outside of the folder, and it may take at most ten seconds. `pytest -m grid`
tries thousands of them.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import shutil
import signal
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.checkpoint.test_checkpoint_fuzz import VALUES, change
from tests.models.test_models_families import FAMILIES, theirs
from threed.cli import launch
from threed.cli.commands import main
from threed.config import ConfigError
from threed.config.arguments import PRESETS, load, to_toml
from threed.data.megatron import open_tokens, tokenize_to_megatron
from threed.data.tokenizer import ByteTokenizer
from threed.interop.deepspeed.config.reader import read
from threed.interop.deepspeed.config.translate import translate

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
MOST_S = 10.0
DS: dict[str, Any] = {
    "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": 100}},
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 500000, "offload_optimizer": {"device": "cpu"}},
    "gradient_clipping": 1.0,
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- mutants


def damage(draw: random.Random, file: Path) -> None:
    """Changes bytes of a file: flips a bit, removes or adds a few bytes, or inserts bad text.

    The text is deeply nested, very long, or invalid UTF-8.
    """
    data = bytearray(file.read_bytes())
    at, length = draw.randrange(len(data) + 1), draw.choice([1, 1, 9, 300])
    action = draw.randrange(6)
    if action == 0 and data:
        data[at % len(data)] ^= 1 << draw.randrange(8)
    elif action == 1:
        del data[at : at + length]
    elif action == 2:
        data[at:at] = draw.randbytes(length)
    elif action == 3:
        data[at:at] = draw.choice(
            [b"[", b'{"a":', b"9", b"\xff", b"a.", b"[[a]]\n", b"\0", b'"']
        ) * draw.choice([1, 60_000])
    elif action == 4:
        data = bytearray(draw.choice([b"[", b'{"a":', b"9", b"\xff", b"", b"\0"]) * 60_000)
    else:
        data = data[: at // 8] + data
    file.write_bytes(data)


def forge(draw: random.Random, file: Path) -> None:
    """Changes a node of a JSON file, or duplicates a key."""
    tree = json.loads(file.read_text())
    if draw.random() < 0.1:
        key = draw.choice(list(tree))
        file.write_text(
            f"{json.dumps(tree)[:-1]}, {json.dumps(key)}: {json.dumps(draw.choice(VALUES))}}}"
        )
        return
    change(draw, tree)
    file.write_text(json.dumps(tree))


def forge_header(draw: random.Random, file: Path) -> None:
    """Changes a node of a safetensors header, or its length."""
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    if draw.random() < 0.2:
        one, other = draw.sample([name for name in header if name != "__metadata__"], 2)
        header[one]["data_offsets"], header[other]["data_offsets"] = (
            header[other]["data_offsets"], header[one]["data_offsets"],
        )  # fmt: skip
    elif draw.random() < 0.8:
        change(draw, header)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    length = (
        len(text)
        if draw.random() < 0.9
        else draw.choice([0, 1, len(text) - 1, len(text) + 8, 2**63, 2**64 - 1])
    )
    file.write_bytes(length.to_bytes(8, "little") + text + data[end:])


def forge_index(draw: random.Random, file: Path) -> None:
    """Replaces names of files in an index."""
    tree, names = json.loads(file.read_text()), sorted(file.parent.glob("*.safetensors"))
    places = tree["weight_map"]
    key = draw.choice(list(places))
    strange = [
        "../a.safetensors",
        "/dev/zero",
        "/etc/passwd",
        ".",
        "..",
        "",
        "x/../config.json",
        "config.json",
        None,
        7,
    ]
    new = draw.choice([*strange, *(name.name for name in names), *(str(name) for name in names)])
    for name in places if draw.random() < 0.3 else [key]:
        places[name] = new
    if draw.random() < 0.2:
        places[draw.choice(["x", "lm_head.weight", "\0", "model.layers.0"])] = places.pop(key)
    file.write_text(json.dumps(tree))


def forge_toml(draw: random.Random, file: Path) -> None:
    """Changes the value of a key, or moves a line."""
    lines = file.read_text().splitlines()
    at = draw.randrange(len(lines))
    value = draw.choice(
        [*VALUES, "nan", "-inf", "1979-05-27", "{a = 1}", "[1, [2]]", '"\\u0000"', "0x" + "f" * 400]
    )
    text = value if isinstance(value, str) and draw.random() < 0.5 else json.dumps(value)
    key = lines[at].partition("=")[0]
    lines[at] = draw.choice(
        [f"{key}= {text}", lines[draw.randrange(len(lines))], f"[{key.strip() or 'a'}]", text]
    )
    file.write_text("\n".join(lines), encoding="utf-8", errors="replace")


def forge_lines(draw: random.Random, file: Path) -> None:
    """Changes a line of a .jsonl."""
    lines = file.read_text().splitlines()
    tree = json.loads(lines[at := draw.randrange(len(lines))])
    change(draw, tree)
    lines[at] = json.dumps(draw.choice([tree, [tree], draw.choice(VALUES)]))
    file.write_text("\n".join(lines))


def forge_numbers(draw: random.Random, file: Path) -> None:
    """Changes 8 bytes of a binary file to another number."""
    data = bytearray(file.read_bytes())
    at = draw.randrange(0, len(data) - 8)
    number = draw.choice([0, 1, 2, -1, 2**31, 2**62, -(2**63), len(data)])
    data[at : at + 8] = number.to_bytes(8, "little", signed=True)
    file.write_bytes(data)


# ----------------------------------------------------------------------------------------------------------- verdicts


def tool(*words: str) -> int:
    """Returns the exit code of a tool; raises AssertionError if its output is not printable."""
    said, refused = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(refused):
        code = main(list(words))
    text = refused.getvalue()
    assert code in (0, 2), code
    assert text == "" if code == 0 else re.fullmatch(r"threed \w+: [^\n]+\n", text), text
    assert text.replace("\n", "").isprintable(), text
    return code


def refused(*problems: str) -> str:
    """Raises AssertionError if a problem is not one printable line."""
    assert problems
    assert all(text.isprintable() for text in problems), problems
    return "refused"


def twin(folder: Path) -> dict[str, Tensor]:
    """Returns the tensors in the files of a folder, read without any check."""
    found = {}
    single = folder / "model.safetensors"
    for file in [single] if single.exists() else sorted(folder.glob("model-*.safetensors")):
        data = file.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        for name, about in json.loads(data[8:end]).items():
            if name != "__metadata__":
                first, last = about["data_offsets"]
                flat = torch.frombuffer(
                    bytearray(data[end + first : end + last]), dtype=DTYPES[about["dtype"]]
                )
                found[name] = flat.view(about["shape"])
    return found


def judge_folder(folder: Path, to: str) -> str:
    """Converts a folder: it is refused, or the result has the same tensors, except a tied head."""
    if (
        tool("convert", str(folder / "in"), str(folder / "out"), "--to", to, "--tokenizer", "none")
        == 2
    ):
        assert not list(folder.glob("out*"))
        return "refused"
    out = folder / "out"
    if to == "native":
        assert tool("convert", str(folder / "out"), str(folder / "back")) == 0
        out = folder / "back"
    found, wanted = load_file(out / "model.safetensors"), twin(folder / "in")
    wanted.pop("lm_head.weight" if "lm_head.weight" not in found else "", None)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name].view(torch.uint8), value.view(torch.uint8)), name
    return "same"


def judge_run(folder: Path) -> str:
    """Plans a run that starts from a folder."""
    said = io.StringIO()
    words = [
        "--checkpoint.resume",
        str(folder / "in"),
        "--data.path",
        str(folder / "in" / "x.txt"),
        "--model.seq",
        "8",
    ]
    words += ["--data.tokenizer", "bytes"]  # the folder has none
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = launch.main([*words, "--dry-run"], prog="threed train")
    assert code in (0, 2)
    refused(*said.getvalue().strip().split("\n"))
    return "refused" if code else "same"


def judge_toml(folder: Path) -> str:
    """Reads a file of keys; an accepted one can be written and read again."""
    try:
        config, _ = load(["--config", str(folder / "in" / "x.toml")], world_size=2)
    except ConfigError as error:
        return refused(*error.problems)
    (folder / "in" / "again.toml").write_text(to_toml(config))
    again, _ = load(["--config", str(folder / "in" / "again.toml")], world_size=2)
    assert again == config
    return "same"


def judge_ds(folder: Path) -> str:
    """Reads a ds_config."""
    try:
        translate(read(folder / "in" / "ds.json"), 1)
    except ConfigError as error:
        return refused(*error.problems)
    return "same"


def judge_text(folder: Path) -> str:
    """Tokenizes lines of text; the tokens decode to the bytes of the text."""
    if tool("tokenize", str(folder / "in" / "x.jsonl"), str(folder / "out")) == 2:
        assert not list(folder.glob("out*"))
        return "refused"
    lines = (
        line
        for line in (folder / "in" / "x.jsonl").read_bytes().split(b"\n")
        if line.strip(b" \t\r\n\xef\xbb\xbf")
    )
    texts = [json.loads(line.decode("utf-8-sig"))["text"] for line in lines]
    wanted = [number for text in texts if text for number in [*text.encode(errors="replace"), 256]]
    assert open_tokens(folder / "out").tolist() == wanted
    return "same"


def judge_tokenizer(folder: Path) -> str:
    """Tokenizes a text with a tokenizer; the resulting file can be read."""
    words = ("tokenize", str(folder / "in" / "x.txt"), str(folder / "out"))
    if tool(*words, "--tokenizer", str(folder / "in" / "tokenizer.json")) == 2:
        assert not list(folder.glob("out*"))
        return "refused"
    assert len(open_tokens(folder / "out")) > 0
    return "same"


def judge_index(folder: Path) -> str:
    """Opens a Megatron pair: it is refused, or its documents are the bytes of the file in order."""
    try:
        tokens = open_tokens(folder / "in" / "x")
    except ValueError as error:
        return refused(str(error))
    assert tokens.tobytes() == (folder / "in" / "x.bin").read_bytes()
    return "same"


# ------------------------------------------------------------------------------------------------------------- kinds


def make_inputs(place: Path) -> None:
    """Writes undamaged files of each kind."""
    for name, size in (("qwen2", "1GB"), ("gpt2", "20KB")):
        theirs(name).save_pretrained(place / name, max_shard_size=size)
    kind, sizes = FAMILIES["gpt2"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, "gpt2", (kind, sizes | {"vocab_size": 300}))
        theirs("gpt2").save_pretrained(place / "run")
    (place / "run" / "x.txt").write_text("some text, and more\n" * 200)
    (place / "toml").mkdir()
    shutil.copy(PRESETS / "llama-tiny.toml", place / "toml" / "x.toml")
    (place / "ds").mkdir()
    (place / "ds" / "ds.json").write_text(json.dumps(DS))
    (place / "text").mkdir()
    rows = [{"text": f"line {n} é", "about": {"n": n, "of": [1.5, None]}} for n in range(5)]
    (place / "text" / "x.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    ByteTokenizer().save_hf(place / "tokenizer")
    (place / "tokenizer" / "x.txt").write_text("some text, and more\n")
    about = {
        "eos_token": {"content": "<|endoftext|>", "special": True}, "bos_token": "<|endoftext|>", "add_bos_token": True,
        "added_tokens_decoder": {"257": {"content": "<x>", "special": True}}, "additional_special_tokens": ["<x>"],
    }  # fmt: skip
    (place / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(about))
    (place / "tokens").mkdir()
    tokenize_to_megatron(place / "text" / "x.jsonl", place / "tokens" / "x", ByteTokenizer())


Kind = tuple[str, str, Callable[[random.Random, Path], None], Callable[[Path], str]]
INDEX = "model.safetensors.index.json"
KINDS: dict[str, Kind] = {
    "header": (
        "qwen2",
        "model.safetensors",
        forge_header,
        lambda folder: judge_folder(folder, "native"),
    ),
    "header, re-sharded": (
        "qwen2",
        "model.safetensors",
        forge_header,
        lambda folder: judge_folder(folder, "hf"),
    ),
    "file": ("qwen2", "model.safetensors", damage, lambda folder: judge_folder(folder, "native")),
    "configuration": ("qwen2", "config.json", forge, lambda folder: judge_folder(folder, "hf")),
    "damaged configuration": (
        "gpt2",
        "config.json",
        damage,
        lambda folder: judge_folder(folder, "native"),
    ),
    "index": ("gpt2", INDEX, forge_index, lambda folder: judge_folder(folder, "native")),
    "forged index": ("gpt2", INDEX, forge, lambda folder: judge_folder(folder, "hf")),
    "damaged index": ("gpt2", INDEX, damage, lambda folder: judge_folder(folder, "hf")),
    "configuration of a run": ("run", "config.json", forge, judge_run),
    "damaged configuration of a run": ("run", "config.json", damage, judge_run),
    "TOML": ("toml", "x.toml", forge_toml, judge_toml),
    "damaged TOML": ("toml", "x.toml", damage, judge_toml),
    "ds_config": ("ds", "ds.json", forge, judge_ds),
    "damaged ds_config": ("ds", "ds.json", damage, judge_ds),
    "text": ("text", "x.jsonl", forge_lines, judge_text),
    "damaged text": ("text", "x.jsonl", damage, judge_text),
    "tokenizer": ("tokenizer", "tokenizer.json", forge, judge_tokenizer),
    "tokenizer's configuration": ("tokenizer", "tokenizer_config.json", forge, judge_tokenizer),
    "damaged tokenizer": ("tokenizer", "tokenizer.json", damage, judge_tokenizer),
    ".idx": ("tokens", "x.idx", damage, judge_index),
    "numbers of .idx": ("tokens", "x.idx", forge_numbers, judge_index),
}


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Context manager: raises TimeoutError after `seconds` of CPU time, or ten times as long."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"more than {seconds} s")

    clocks = {
        signal.SIGPROF: (signal.ITIMER_PROF, seconds),
        signal.SIGALRM: (signal.ITIMER_REAL, 10 * seconds),
    }
    before = {name: signal.signal(name, stop) for name in clocks}
    try:
        for clock, time in clocks.values():
            signal.setitimer(clock, time)
        yield
    finally:
        for name, (clock, _) in clocks.items():
            signal.setitimer(clock, 0)
            signal.signal(name, before[name])


def fuzz(place: Path, seed: int, count: int) -> tuple[Counter[tuple[str, str]], list[str]]:
    """Tries damaged files of each kind.

    Returns:
        The number of files per kind and outcome, and the errors.
    """
    ends, wrong = Counter[tuple[str, str]](), []
    for number in range(count):
        kind = list(KINDS)[number % len(KINDS)]
        source, name, mutate, judge = KINDS[kind]
        folder, draw = place / "work" / "mutant", random.Random(f"{seed}/{number}")
        shutil.copytree(place / source, folder / "in")
        mutate(draw, folder / "in" / name)
        try:
            with at_most(MOST_S):
                end = judge(folder)
            assert {path.name for path in (place / "work").iterdir()} == {"mutant"}
            assert {path.name for path in folder.iterdir()} <= {
                "in",
                "out",
                "back",
                "out.bin",
                "out.idx",
            }
        except (Exception, SystemExit) as error:
            end = f"{type(error).__name__}: {error}"
            wrong.append(f"seed {seed}, mutant {number} ({kind}): {end[:600]}")
        ends[kind, end if end in ("refused", "same") else "wrong"] += 1
        shutil.rmtree(place / "work")
    return ends, wrong


def fuzzed(place: Path, seed: int, count: int) -> Counter[tuple[str, str]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ends, wrong = fuzz(place, seed, count)
    assert wrong == []
    return ends


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder with undamaged files of each kind."""
    place = tmp_path_factory.mktemp("inputs")
    make_inputs(place)
    return place


def test_whole_files_are_accepted(inputs: Path, tmp_path: Path) -> None:
    for number, (source, _, _, judge) in enumerate(KINDS.values()):
        shutil.copytree(inputs / source, tmp_path / str(number) / "in")
        assert judge(tmp_path / str(number)) == "same"


def test_no_mutant_gets_through(inputs: Path) -> None:
    ends = fuzzed(inputs, 1, 20 * 20)
    assert sum(ends.values()) == 400
    assert all(ends[kind, "refused"] for kind in KINDS)


@pytest.mark.grid
@pytest.mark.parametrize("seed", range(2, 12))
def test_no_mutant_of_thousands_gets_through(seed: int, inputs: Path) -> None:
    assert sum(fuzzed(inputs, seed, 900).values()) == 900
