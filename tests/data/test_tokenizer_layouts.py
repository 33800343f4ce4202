"""Ten layouts of tokenizer files through `threed convert`, and read as `transformers` reads them.

Each layout goes with one family of models here, so that all families occur; pytest -m grid tries each with each.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.models.test_models_families import FAMILIES, theirs
from tests.tokenizer_layouts import EOT, LAYOUTS, SENTENCEPIECE, VOCAB, strings
from threed.checkpoint.files import CheckpointError
from threed.data.tokenizer import load_tokenizer
from threed.interop.convert import convert
from threed.interop.huggingface.folder_record import GENERATION, KEPT

MODELS = ["gpt2", "llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3"]
PAIRED = dict(
    zip(
        LAYOUTS,
        ["gpt2", "phi3", "llama", "gemma2", "mistral", "llama", "gpt2", "qwen2", "qwen3", "gemma3"],
        strict=True,
    )
)
CONVERSATION = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of each family, as transformers saves it."""
    place = tmp_path_factory.mktemp("models")
    for name in MODELS:
        kind, sizes = FAMILIES[name]
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(FAMILIES, name, (kind, sizes | {"vocab_size": VOCAB}))
            theirs(name).save_pretrained(place / name)
    return place


def folder_of(layout: str, family: str, weights: Path, place: Path) -> Path:
    """A Hugging Face folder with this tokenizer."""
    if layout in SENTENCEPIECE:
        pytest.importorskip("sentencepiece")
    shutil.copytree(weights / family, place)
    LAYOUTS[layout](place)
    return place


def auto(folder: Path) -> Any:
    """What transformers reads."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def companions(folder: Path) -> dict[str, bytes]:
    """All files but weights and the model's configuration."""
    files = {
        path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()
    }
    left_out = ("config.json", "model.safetensors")
    return {name: path.read_bytes() for name, path in files.items() if name not in left_out}


def read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.is_file() else None


def assert_same_folder(out: Path, source: Path) -> None:
    assert companions(out) == companions(source)
    now, was = read(out / "config.json"), read(source / "config.json")
    assert {key: now.get(key) for key in KEPT} == {key: was.get(key) for key in KEPT}


def assert_same_tokenizer(out: Any, source: Any, texts: list[str]) -> None:
    assert type(out) is type(source)
    assert out.get_vocab() == source.get_vocab()
    assert out.special_tokens_map == source.special_tokens_map
    assert out.chat_template == source.chat_template
    ids = source(texts)["input_ids"]
    assert out(texts)["input_ids"] == ids
    some = texts[:500]
    for kwargs in ({"add_special_tokens": False}, {"split_special_tokens": True}):
        assert out(some, **kwargs)["input_ids"] == source(some, **kwargs)["input_ids"]
    assert out.batch_decode(ids[:500]) == source.batch_decode(ids[:500])
    if source.chat_template:
        assert out.apply_chat_template(CONVERSATION) == source.apply_chat_template(CONVERSATION)


def there_and_back(source: Path, place: Path) -> list[Path]:
    """Folder to native to folder, and folder to folder."""
    convert(source, place / "native")
    return [convert(place / "native", place / "back"), convert(source, place / "direct", to="hf")]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_goes_there_and_back(layout: str, weights: Path, tmp_path: Path) -> None:
    source = folder_of(layout, PAIRED[layout], weights, tmp_path / "source")
    texts = strings(500, seed=len(layout))
    for out in there_and_back(source, tmp_path):
        assert_same_folder(out, source)
        assert load_tokenizer(str(out)).fingerprint == load_tokenizer(str(source)).fingerprint
    assert_same_tokenizer(auto(tmp_path / "back"), auto(source), texts)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_read_as_transformers_reads_it(
    layout: str, weights: Path, tmp_path: Path
) -> None:
    source = folder_of(layout, PAIRED[layout], weights, tmp_path / "source")
    texts, theirs = strings(1000, seed=len(layout)), auto(source)
    ours, parsing = load_tokenizer(str(source)), load_tokenizer(str(source), special_tokens="parse")
    assert [parsing.encode(text) for text in texts] == theirs(texts, add_special_tokens=False)[
        "input_ids"
    ]
    assert theirs.convert_ids_to_tokens(ours.eot) == EOT[layout]
    bare, full = (theirs("cat", add_special_tokens=flag)["input_ids"] for flag in (False, True))
    assert [*ours.bos_ids, *bare] == full[: len(ours.bos_ids) + len(bare)]
    # what is not in the vocabulary
    unknown = {theirs.get_vocab().get(name) for name in ("<unk>", "[UNK]")}
    specials = set(theirs.all_special_ids) - unknown
    ids = [ours.encode(text) for text in texts]
    assert not [text for text, some in zip(texts, ids, strict=True) if specials & set(some)]
    pieces = ours.encode_pieces([text.encode() for text in texts])
    assert [piece.tolist() for piece in pieces] == ids
    assert any(specials & set(parsing.encode(text)) for text in texts)


@pytest.mark.grid
@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_goes_there_and_back_in_every_family(
    layout: str, family: str, weights: Path, tmp_path: Path
) -> None:
    source = folder_of(layout, family, weights, tmp_path / "source")
    texts, outs = strings(10_000, seed=7), there_and_back(source, tmp_path)
    for out in outs:
        assert_same_folder(out, source)
    try:
        wanted = auto(source)
        wanted(texts[:500])
    except (
        Exception
    ) as error:  # transformers chooses a class by the model, which does not suit these files
        for out in outs:
            with pytest.raises(type(error)):
                auto(out)(texts[:500])
        return
    for out in outs:
        assert_same_tokenizer(auto(out), wanted, texts)


def test_files_that_are_plain_data_go_along_and_no_code_or_pickle_does(
    weights: Path, tmp_path: Path
) -> None:
    source = folder_of("llama 3 instruct", "llama", weights, tmp_path / "source")
    along = [
        "chat_template.jinja", "chat_template.json", "chat_templates/tools.jinja", "additional_chat_templates/a.jinja",
        "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json", "tokenizer.model.v3",
        "spiece.model", "qwen.tiktoken", "tekken.json",
    ]  # fmt: skip
    left = [
        "tokenization_x.py",
        "training_args.bin",
        "README.md",
        "data.jsonl",
        "chat_templates/x.py",
        ".env.json",
    ]
    for name in [*along, *left]:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(f'{{"about": "{name}"}}')
    for out in there_and_back(source, tmp_path):
        wanted = {name: content for name, content in companions(source).items() if name not in left}
        assert wanted.keys() >= set(along)
        assert companions(out) == wanted


def test_ids_of_another_tokenizer_are_its_own_and_said(weights: Path, tmp_path: Path) -> None:
    source = folder_of("llama 3 instruct", "llama", weights, tmp_path / "source")
    convert(source, tmp_path / "native")
    with pytest.warns(
        UserWarning,
        match="those of tokenizer bytes, not of the folder of the weights",
    ):
        outs = [convert(tmp_path / "native", tmp_path / "back", tokenizer="bytes")]
    with pytest.warns(UserWarning, match="those of tokenizer bytes"):
        outs.append(convert(source, tmp_path / "direct", to="hf", tokenizer="bytes"))
    for out in outs:
        assert read(out / GENERATION) == {"bos_token_id": 256, "eos_token_id": 256}
        assert read(out / "config.json")["eos_token_id"] == 256
        assert auto(out).eos_token_id == 256
    (source / "chat_template.jinja").write_text("added later")
    with pytest.raises(
        CheckpointError, match=r"the tokenizer it was trained with, .* has other files now"
    ):
        convert(tmp_path / "native", tmp_path / "again")
