"""Bytes are their own ids here and in `transformers`; tokenizer.json files are read whole, uncut and unpadded."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from threed.data.tokenizer import (
    ByteTokenizer,
    TokenizerJson,
    byte_characters,
    load_tokenizer,
    token_dtype,
)

TEXTS = [
    "",
    "a",
    "Hello, world!\n",
    "  two  spaces ",
    "tab\tand\r\nreturn\x00nul",
    "naïve café",
    "日本語のテキスト",
    "🙂🏳️‍🌈",
    "don't . , n't",
]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small trained tokenizer.json with truncation and padding switched on, as published files often have."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<pad>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=specials, initial_alphabet=alphabet
    )
    backend.train_from_iterator(
        ["the cat sat on the mat and the dog ran after the cat. "] * 50, trainer
    )
    backend.enable_truncation(8)
    backend.enable_padding(length=8, pad_token="<pad>")
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    backend.save(str(path))
    return path


@given(st.text())
def test_bytes_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    expected = text.encode("utf-8", errors="replace")
    assert tokenizer.encode(text) == list(expected)
    assert tokenizer.decode(tokenizer.encode(text)) == expected.decode()


@given(st.binary())
def test_any_bytes_are_their_own_ids(data: bytes) -> None:
    (ids,) = ByteTokenizer().encode_pieces([data])
    assert ids.dtype == np.uint16
    assert ids.tolist() == list(data)


def test_bytes_skip_specials_and_replace_what_is_no_utf8() -> None:
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.eot) == (257, 256)
    assert tokenizer.decode([72, 256, 105]) == "Hi"
    assert tokenizer.decode([0xFF, 65]) == "\ufffdA"
    assert tokenizer.encode("\ud800") == [ord("?")]
    assert tokenizer.count_bytes(np.array([1, 256, 255, 256])) == 2


def test_byte_characters_are_the_byte_level_alphabet() -> None:
    from tokenizers import pre_tokenizers

    characters = byte_characters()
    assert sorted(characters) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert (characters[ord("A")], characters[ord(" ")], characters[ord("\n")]) == ("A", "Ġ", "Ċ")


@pytest.mark.parametrize("model_type", [None, "gpt2", "llama", "qwen3"])
def test_transformers_gives_byte_b_id_b(tmp_path: Path, model_type: str | None) -> None:
    transformers = pytest.importorskip("transformers")
    ours = ByteTokenizer()
    ours.save_hf(tmp_path)
    if model_type:  # an exported model lies beside it, whose type must not choose another tokenizer
        (tmp_path / "config.json").write_text(
            json.dumps({"model_type": model_type, "vocab_size": 257})
        )
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True)
    assert len(theirs) == 257
    assert theirs.convert_ids_to_tokens(range(257)) == [*byte_characters(), "<|endoftext|>"]
    assert (theirs.eos_token_id, theirs.bos_token_id) == (256, None)
    for text in [*TEXTS, "".join(map(chr, range(256)))]:
        assert theirs(text)["input_ids"] == ours.encode(text)
        assert theirs.decode(ours.encode(text)) == text
    assert theirs.decode([72, 256], skip_special_tokens=True) == "H"
    assert theirs.decode([0xFF, 65]) == "\ufffdA"


def test_saved_bytes_read_back_as_a_tokenizer_json(tmp_path: Path) -> None:
    ByteTokenizer().save_hf(tmp_path)
    again = load_tokenizer(str(tmp_path))
    assert isinstance(again, TokenizerJson)
    assert (again.vocab_size, again.eot) == (257, 256)
    for text in TEXTS:
        assert again.encode(text) == ByteTokenizer().encode(text)


def test_json_round_trip_is_neither_cut_nor_padded(bpe: Path) -> None:
    tokenizer = load_tokenizer(str(bpe))
    for text in [*TEXTS, "the cat sat on the mat and ran " * 20]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        (piece,) = tokenizer.encode_pieces([text.encode()])
        assert piece.tolist() == ids
        assert tokenizer.count_bytes(piece) == len(text.encode())
    assert len(tokenizer.encode("the cat")) < len("the cat")
    assert tokenizer.decode([tokenizer.eot, *tokenizer.encode("x"), tokenizer.eot]) == "x"


def test_json_replaces_what_is_no_text(bpe: Path) -> None:
    tokenizer = load_tokenizer(str(bpe))
    assert tokenizer.encode("\ud800") == tokenizer.encode("?")
    assert tokenizer.decode(tokenizer.encode_pieces([b"\xff!"])[0].tolist()) == "\ufffd!"


@pytest.mark.parametrize("name", ["<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>"])
def test_json_finds_the_end_of_text(tmp_path: Path, name: str) -> None:
    from tokenizers import Tokenizer, models

    backend = Tokenizer(models.WordLevel({"a": 0, "b": 7}, unk_token="a"))
    backend.add_special_tokens([name])
    backend.save(str(tmp_path / "t.json"))
    tokenizer = load_tokenizer(str(tmp_path / "t.json"))
    assert tokenizer.eot == backend.token_to_id(name)
    # ids may have gaps; the largest one counts
    assert tokenizer.vocab_size == max(8, tokenizer.eot + 1)


def test_json_exports_load_in_transformers(tmp_path: Path, bpe: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours = load_tokenizer(str(bpe))
    ours.save_hf(tmp_path / "hf")
    assert (tmp_path / "hf" / "tokenizer.json").read_bytes() == bpe.read_bytes()
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "hf"), local_files_only=True)
    assert theirs.eos_token_id == ours.eot
    for text in TEXTS:
        assert theirs(text, truncation=False, padding=False)["input_ids"] == ours.encode(text)


def test_json_export_keeps_the_companions_it_came_with(tmp_path: Path, bpe: Path) -> None:
    source = tmp_path / "from"
    source.mkdir()
    (source / "tokenizer.json").write_bytes(bpe.read_bytes())
    (source / "tokenizer_config.json").write_text('{"chat_template": "mine"}')
    tokenizer = load_tokenizer(str(source))
    tokenizer.save_hf(tmp_path / "to")
    assert json.loads((tmp_path / "to" / "tokenizer_config.json").read_text()) == {
        "chat_template": "mine"
    }
    # it would name another eos than the source
    assert not (tmp_path / "to" / "special_tokens_map.json").exists()
    tokenizer.save_hf(source)  # onto itself: nothing may be lost
    assert json.loads((source / "tokenizer_config.json").read_text()) == {"chat_template": "mine"}
    assert (source / "tokenizer.json").read_bytes() == bpe.read_bytes()


def test_fingerprint_follows_the_content(tmp_path: Path, bpe: Path) -> None:
    (tmp_path / "a.json").write_bytes(bpe.read_bytes())
    (tmp_path / "b.json").write_bytes(bpe.read_bytes() + b"\n")
    first = load_tokenizer(str(tmp_path / "a.json"))
    second = load_tokenizer(str(tmp_path / "b.json"))
    assert first.fingerprint == load_tokenizer(str(bpe)).fingerprint != second.fingerprint


def test_bad_tokenizers_are_refused_with_advice(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    with pytest.raises(ValueError, match=r"does not exist\. Use --data\.tokenizer bytes"):
        load_tokenizer(str(tmp_path / "missing.json"))
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(ValueError, match=r"broken\.json is not a tokenizer\.json"):
        load_tokenizer(str(tmp_path / "broken.json"))
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "endless.json"))
    with pytest.raises(ValueError, match="no end-of-text token"):
        load_tokenizer(str(tmp_path / "endless.json"))


@pytest.mark.parametrize(("vocab", "dtype"), [(257, "uint16"), (65536, "uint16"), (65537, "int32")])
def test_token_dtype_holds_every_id(vocab: int, dtype: str) -> None:
    assert token_dtype(vocab) == np.dtype(dtype)
