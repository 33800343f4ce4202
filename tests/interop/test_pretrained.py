"""A run that begins from a Hugging Face folder: the folder says what the model is, the run all else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.test_checkpoint_native import sealed
from tests.data.test_tokenizer_layouts import assert_same_folder
from tests.models.test_models_families import FAMILIES, theirs
from tests.training.test_pretrain import again, folder  # noqa: F401
from threed.checkpoint import native
from threed.cli import launch
from threed.config import ConfigError
from threed.config.arguments import load
from threed.data.dataset import find_problems
from threed.data.tokenizer import ByteTokenizer
from threed.interop.convert import convert
from threed.interop.huggingface.layouts import model_of
from threed.interop.pretrained import find
from threed.monitor import metrics

RUN = [
    "--train.global-batch", "4", "--train.eval-samples", "4", "--train.sample-tokens", "8", "--data.path", "text.txt",
    "--optim.warmup", "2", "--log.every", "1", "--log.wandb", "off", "--run.dir", "run",
]  # fmt: skip


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with a tokenizer, and a GPT-2 without one."""
    place = tmp_path_factory.mktemp("pretrained")
    for name in ("llama", "gpt2"):
        kind, sizes = FAMILIES[name]
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(FAMILIES, name, (kind, sizes | {"vocab_size": 300}))
            theirs(name).save_pretrained(place / name)
    ByteTokenizer().save_hf(place / "llama")
    (place / "llama" / "chat_template.jinja").write_text("{{ messages }}")
    (place / "llama" / "generation_config.json").write_text(
        '{"eos_token_id": [2, 256], "top_p": 0.9}'
    )
    convert(place / "llama", place / "native")
    return place


def resolved(argv: list[str], defaults: dict[str, Any]) -> Any:
    """The configuration of a run that begins from a folder."""
    config, options = load(argv, defaults=defaults, begin=find)
    assert options.pretrained
    return config


def test_a_chosen_topology_keeps_the_model_of_the_folder(pretrained: Path) -> None:
    words = ["--checkpoint.resume", str(pretrained / "llama"), *RUN[:2], "--train.micro-batch", "2"]
    config, _ = load(words, begin=find, world_size=4, choose_topology=True)
    assert (config.parallel.pp, config.parallel.dp) == (2, None)
    assert (config.model.arch, config.model.layers) == ("llama", 3)


@pytest.mark.parametrize("kind", ["llama", "native"])
def test_the_folder_says_what_the_model_is(kind: str, pretrained: Path) -> None:
    resume = ["--checkpoint.resume", str(pretrained / kind)]
    model = model_of(json.loads((pretrained / "llama" / "config.json").read_text()))
    config = resolved(resume, {"model": {"arch": "gpt"}})
    assert config.model == model.model_copy(update={"seq": 64})  # of its 64 positions
    assert Path(config.data.tokenizer).samefile(pretrained / "llama") or kind == "native"
    config = resolved(
        [*resume, "--preset", "llama-tiny", "--model.seq", "16", "--model.dropout", "0.1"], {}
    )
    assert config.model == model.model_copy(update={"seq": 16, "dropout": 0.1})
    assert config.optim.lr == load(["--preset", "llama-tiny"])[0].optim.lr
    assert resolved([*resume, "--data.tokenizer", "bytes"], {}).data.tokenizer == "bytes"
    with pytest.raises(ConfigError) as error:
        resolved([*resume, "--model.layers", "4", "--model.kv-heads", "4"], {})
    for text, wanted in zip(
        error.value.problems, ("layers = 3, this run", "kv_heads = 2, this run"), strict=True
    ):
        assert text.startswith(
            f"the model of {pretrained / kind} has {wanted} has 4: leave the flag out"
        )


def test_without_such_a_folder_nothing_changes(pretrained: Path, tmp_path: Path) -> None:
    for resume in ("auto", "none", str(tmp_path), str(tmp_path / "nowhere")):
        assert not load(["--checkpoint.resume", resume], begin=find)[1].pretrained
    gpt2 = ["--checkpoint.resume", str(pretrained / "gpt2")]
    assert not load([*gpt2, "--help"], begin=find)[1].pretrained
    with pytest.raises(ConfigError, match="no such key"):
        load([*gpt2, "--no.key", "1"], begin=find)


def test_a_begin_without_a_known_tokenizer_is_refused(pretrained: Path, tmp_path: Path) -> None:
    """Of folders without one, with one that cannot be read, and of native checkpoints, at step 0 or later."""
    convert(pretrained / "gpt2", tmp_path / "none")
    convert(pretrained / "llama", tmp_path / "told none", tokenizer="none")
    shutil.copytree(tmp_path / "none", tmp_path / "moments")
    sealed(
        tmp_path / "moments", lambda body: body["state"].update(steps=40, consumed=40, updates=40.0)
    )
    for path in (
        pretrained / "gpt2",
        tmp_path / "none",
        tmp_path / "told none",
        tmp_path / "moments",
    ):
        words = ["--checkpoint.resume", str(path)]
        with pytest.raises(
            ConfigError, match=r"tokenizer .*: give the model's tokenizer with --data\.tok"
        ):
            load(words, begin=find)
        (tmp_path / "run.toml").write_text('[data]\ntokenizer = "bytes"\n')
        for named in (
            ["--data.tokenizer", "bytes"],
            ["--data.tokenizer=bytes"],
            ["--config", str(tmp_path / "run.toml")],
        ):
            assert load([*words, *named], begin=find)[0].data.tokenizer == "bytes"


def test_a_tokenizer_that_cannot_be_read_is_refused_and_goes_along(
    pretrained: Path, tmp_path: Path
) -> None:
    source = shutil.copytree(pretrained / "gpt2", tmp_path / "source")
    (source / "tokenizer.model").write_bytes(b"not a SentencePiece model")
    native = convert(source, tmp_path / "native")
    for path in (source, native):
        config = resolved(["--checkpoint.resume", str(path)], {})
        (problem,) = find_problems(None, config.data.tokenizer, 0.1)
        assert "tokenizer.model" in problem
        assert "give --data.tokenizer a folder with a tokenizer.json" in problem
    assert (
        convert(native, tmp_path / "back") / "tokenizer.model"
    ).read_bytes() == b"not a SentencePiece model"
    (source / "tokenizer.model").write_bytes(b"another")
    with pytest.raises(
        ConfigError,
        match=r"its tokenizer, .* has other files now: give the model's tokenizer with --data\.tok",
    ):
        load(["--checkpoint.resume", str(native)], begin=find)


def test_a_folder_that_does_not_fit_is_refused_before_the_start(
    pretrained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = shutil.copytree(pretrained / "llama", tmp_path / "theirs")
    words = ["--checkpoint.resume", str(source), "--dry-run"]
    about = json.loads((source / "config.json").read_text())
    for changes, problem in [
        ({"model_type": "bloom"}, "model_type bloom is not one of gpt2"),
        ({"hidden_size": 44}, "model.embed_tokens.weight is [300, 40], not [300, 44]"),
    ]:
        (source / "config.json").write_text(json.dumps(about | changes))
        assert launch.main(words, prog="threed train") == 2
        assert problem in capsys.readouterr().err
    (source / "config.json").write_text(json.dumps(about))
    assert launch.main(words, prog="pretrain/gpt.py", arch="gpt") == 2
    said = capsys.readouterr().err
    assert "pretrain/gpt.py trains gpt, and the preset, file or folder has model.arch llama" in said
    # it cannot be gpt
    assert said.rstrip().endswith(": add --model.arch llama, or use `threed train llama`")


def test_a_run_begins_from_a_folder_and_goes_on_from_its_own_checkpoints(
    pretrained: Path,
    folder: Path,  # noqa: F811
) -> None:
    first = again(
        folder, 2, "llama.py", *RUN, "--checkpoint.resume", str(pretrained / "llama"), "--parallel.tp", "2",
        "--train.steps", "4", "--train.stop-after", "2", "--model.seq", "16",
    )  # fmt: skip
    assert first.returncode == 0, first.stderr
    assert (
        f"started from the weights of {pretrained / 'llama'}; optimizer moments are zero"
        in first.stdout
    )
    told = first.stdout.partition("resume     ")[2].split()
    assert told[3:6] == ["2", "pretrain/llama.py", "--config"]
    assert told[-2:] == ["--checkpoint.resume", "auto"]
    second = again(
        folder,
        2,
        "llama.py",
        *told[5:],
        "--train.stop-after",
        "none",
        "--checkpoint.export-hf",
        "true",
    )
    assert second.returncode == 0, second.stderr
    assert "resumed    run/checkpoints/step-2" in second.stdout
    rows = metrics.read(folder / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert (
        native.read_manifest(folder / "run" / "checkpoints" / "step-4")["config"]["model"]["layers"]
        == 3
    )
    converted = convert(folder / "run" / "checkpoints" / "step-4", folder / "converted")
    for out in (
        folder / "run" / "hf",
        converted,
    ):  # ids, generation defaults and files are those of the first folder
        assert_same_folder(out, pretrained / "llama")
