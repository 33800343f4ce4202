"""Which special tokens end and begin documents, and that text which spells special tokens stays text."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from tests import programs
from tests.tokenizer_layouts import LAYOUTS, strings
from threed.cli import commands
from threed.data import load_tokenizer, open_data, tokenize_to_megatron
from threed.data.megatron import open_tokens, pair_of
from threed.training.final_report import PROMPT, sample_text

WORDS = [
    "<unk>",
    "<bos>",
    "<eos>",
    "</s>",
    "<|endoftext|>",
    "<|im_end|>",
    "<|custom|>",
    "a",
    "b",
    "c",
]


def folder_of(
    place: Path,
    specials: Sequence[str] = (),
    words: Sequence[str] = WORDS,
    template: str = "",
    **files: Any,
) -> Path:
    """A folder with a tokenizer of whole words; `files`: JSON files by their names without the ending."""
    place.mkdir(parents=True, exist_ok=True)
    backend = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in specials]
    )
    if template:
        backend.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[("<bos>", 1)]
        )
    backend.save(str(place / "tokenizer.json"))
    for name, content in files.items():
        (place / f"{name}.json").write_text(json.dumps(content))
    return place


# ------------------------------------------------------------------------------------------------------ end of document


@pytest.mark.parametrize(
    ("specials", "files", "end"),
    [
        # the tokenizer's own name of it, wherever it is named, in either spelling
        (["<eos>"], {"tokenizer_config": {"eos_token": "<eos>"}}, "<eos>"),
        (
            ["<eos>"],
            {"tokenizer_config": {"eos_token": {"content": "<eos>", "special": True}}},
            "<eos>",
        ),
        (["<eos>"], {"special_tokens_map": {"eos_token": "<eos>"}}, "<eos>"),
        (
            ["<eos>", "</s>"],
            {"tokenizer_config": {"eos_token": None}, "special_tokens_map": {"eos_token": "<eos>"}},
            "<eos>",
        ),
        (["<|custom|>"], {"tokenizer_config": {"eos_token": "<|custom|>"}}, "<|custom|>"),
        (["<|custom|>", "</s>"], {"tokenizer_config": {"eos_token": "<|custom|>"}}, "<|custom|>"),
        ([], {"tokenizer_config": {"eos_token": "<eos>"}}, "<eos>"),  # special by its name alone
        (
            [],
            {
                "tokenizer_config": {
                    "added_tokens_decoder": {"4": {"content": "<|endoftext|>", "special": True}}
                }
            },
            "<|endoftext|>",
        ),
        # text that looks like one is none
        (["<eos>"], {}, "<eos>"),
        (["</s>", "<eos>"], {"tokenizer_config": {"eos_token": "<eos>"}}, "<eos>"),
        # an eos that ends a turn: the document's end is looked for, in the model's ids first
        (
            ["<|im_end|>", "<|endoftext|>"],
            {"tokenizer_config": {"eos_token": "<|im_end|>"}},
            "<|endoftext|>",
        ),
        (
            ["<|im_end|>", "<eos>", "</s>"],
            {"tokenizer_config": {"eos_token": "<|im_end|>"}, "config": {"eos_token_id": [2, 5]}},
            "<eos>",
        ),
        (
            ["<|im_end|>", "<eos>", "</s>"],
            {
                "tokenizer_config": {"eos_token": "<|im_end|>"},
                "generation_config": {"eos_token_id": [5, 2]},
            },
            "<eos>",
        ),
        (
            ["<|im_end|>", "<|custom|>"],
            {"tokenizer_config": {"eos_token": "<|im_end|>"}, "config": {"eos_token_id": [5, 6]}},
            "<|custom|>",
        ),
        (
            ["<|im_end|>"],
            {"tokenizer_config": {"eos_token": "<|im_end|>"}},
            "<|im_end|>",
        ),  # there is no other
        # a name that is not known, and a model that also names one that is
        (
            ["<|custom|>", "</s>"],
            {"tokenizer_config": {"eos_token": "<|custom|>"}, "config": {"eos_token_id": [6, 3]}},
            "</s>",
        ),
        # no name: the model's ids, then the names that are known
        (["<|custom|>"], {"config": {"eos_token_id": 6}}, "<|custom|>"),
        (["<|custom|>", "</s>"], {"config": {"eos_token_id": 999}}, "</s>"),
    ],
)
def test_the_end_of_a_document_is_the_tokenizers_own(
    specials: list[str], files: dict[str, Any], end: str, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "t", specials, **files)
    for spec in (folder, folder / "tokenizer.json"):
        assert load_tokenizer(str(spec)).eot == WORDS.index(end)


@pytest.mark.parametrize(
    ("specials", "files", "message"),
    [
        (
            [],
            {},
            r"no end-of-text token\. Name an eos_token in tokenizer_config\.json",
        ),  # all of them plain text
        ([], {"config": {"eos_token_id": 3}}, "no end-of-text token"),
        (
            ["<eos>"],
            {"tokenizer_config": {"eos_token": "<end>"}},
            r"eos_token '<end>' is not in the vocab",
        ),
        (
            ["<eos>"],
            {"added_tokens": {"<more>": 99}},
            r"token <more> has id 10, but 99 in its configuration",
        ),
    ],
)
def test_a_tokenizer_without_an_end_of_document_is_refused(
    specials: list[str], files: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        load_tokenizer(str(folder_of(tmp_path, specials, **files)))


def test_added_tokens_that_the_configuration_names_are_tokens(tmp_path: Path) -> None:
    tokens = {
        "10": {"content": "<more>", "special": False},
        "11": {"content": "<control>", "special": True},
    }
    folder = folder_of(
        tmp_path,
        ["<eos>"],
        tokenizer_config={"added_tokens_decoder": tokens},
        added_tokens={"<x>": 12},
    )
    tokenizer = load_tokenizer(str(folder), special_tokens="parse")
    assert tokenizer.vocab_size == 13
    assert tokenizer.encode("a<more>b<control><x>") == [7, 10, 8, 11, 12]
    assert load_tokenizer(str(folder)).encode("a <more> <control> <x>") == [7, 10, 0, 12]


# ------------------------------------------------------------------------------------------------ beginning of document


@pytest.mark.parametrize(
    ("template", "files", "auto"),
    [
        ("<bos> $A", {}, (1,)),
        ("<bos> $A", {"tokenizer_config": {"add_bos_token": False, "bos_token": "<bos>"}}, ()),
        ("", {"tokenizer_config": {"add_bos_token": True, "bos_token": "<bos>"}}, (1,)),
        ("", {"tokenizer_config": {"bos_token": "<bos>"}}, ()),
        ("$A <bos>", {"tokenizer_config": {"bos_token": "<bos>"}}, ()),
        ("<bos> <bos> $A", {"tokenizer_config": {"bos_token": "<bos>"}}, (1, 1)),
    ],
)
def test_documents_begin_as_the_tokenizer_begins_texts(
    template: str, files: dict[str, Any], auto: tuple[int, ...], tmp_path: Path
) -> None:
    folder = str(folder_of(tmp_path, ["<eos>", "<bos>"], template=template, **files))
    assert load_tokenizer(folder).bos_ids == load_tokenizer(folder, "auto").bos_ids == auto
    assert load_tokenizer(folder, False).bos_ids == ()
    if files or auto:
        assert load_tokenizer(folder, True).bos_ids == (auto or (1,))


def test_bos_without_a_bos_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--data\.bos true: tokenizer bytes has no bos token"):
        load_tokenizer("bytes", True)
    with pytest.raises(
        ValueError, match=r"--data\.bos true: .* has no bos_token in its vocabulary\. "
    ):
        load_tokenizer(str(folder_of(tmp_path, ["<eos>"])), True)


@pytest.mark.parametrize(
    ("template", "files", "words"),
    [
        ("", {"tokenizer_config": {"add_bos_token": True}}, "add_bos_token true, but no bos_token"),
        (
            "",
            {"tokenizer_config": {"add_bos_token": True, "bos_token": "<s>"}},
            "add_bos_token true, but no bos_token",
        ),
        (
            "",
            {"tokenizer_config": {"add_bos_token": True}, "config": {"bos_token_id": 99_999}},
            "no bos_token that is",
        ),
        ("<bos> $A", {"bos_number": 99_999}, r"the post_processor begins texts with id 99999"),
    ],
)
def test_a_beginning_that_is_not_in_the_vocabulary_is_refused(
    template: str, files: dict[str, Any], words: str, tmp_path: Path
) -> None:
    number = files.pop("bos_number", None)
    folder = folder_of(tmp_path, ["<eos>", "<bos>"], template=template, **files)
    if number is not None:
        document = json.loads((folder / "tokenizer.json").read_text())
        document["post_processor"]["special_tokens"]["<bos>"]["ids"] = [number]
        (folder / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(ValueError, match=rf"tokenizer\.json: .*{words}.*--data\.bos false"):
        load_tokenizer(str(folder))
    assert load_tokenizer(str(folder), False).bos_ids == ()


def test_text_without_tokens_in_the_vocabulary_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, ["<eos>", "<bos>"])
    document = json.loads((folder / "tokenizer.json").read_text())
    document["model"]["unk_token"] = "<none>"
    (folder / "tokenizer.json").write_text(json.dumps(document))
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.encode("a b") == [7, 8]
    for encode in (lambda: tokenizer.encode("a é"), lambda: tokenizer.encode_pieces([b"a z"])):
        with pytest.raises(
            ValueError, match=r"tokenizer\.json cannot encode this text: .*unk_token"
        ):
            encode()


def test_text_pairs_and_prompts_have_bos_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(
        tmp_path / "t",
        ["<eos>", "<bos>"],
        template="<bos> $A",
        tokenizer_config={"bos_token": "<bos>"},
    )
    (tmp_path / "d.jsonl").write_text('{"text": "a b"}\n{"text": "c"}\n' * 20)
    found = {}
    for bos, document in (
        ("auto", [1, 7, 8, 2, 1, 9, 2]),
        ("false", [7, 8, 2, 9, 2]),
        ("true", [1, 7, 8, 2, 1, 9, 2]),
    ):
        words = [
            str(tmp_path / "d.jsonl"),
            str(tmp_path / bos),
            "--tokenizer",
            str(folder),
            "--bos",
            bos,
        ]
        assert commands.main(["tokenize", *words]) == 0
        said = "begin without bos" if bos == "false" else "begin with [1] (bos)"
        assert f"documents {said} and end with 2" in capsys.readouterr().out
        assert open_tokens(tmp_path / bos).tolist() == document * 20
        for path in (tmp_path / "d.jsonl", tmp_path / bos):
            how = {"auto": "auto", "false": False, "true": True}[bos]
            data = open_data(str(path), str(folder), 0.2, 4, 1, tmp_path / "cache", bos=how)  # type: ignore[arg-type]
            assert [*data.train.tokens.tolist(), *data.valid.tokens.tolist()] == document * 20
            assert data.notice == ""
        found[bos] = data
    assert [sampled(data) for data in found.values()] == [
        [1, 0],
        [0],
        [1, 0],
    ]  # PROMPT is an unknown word
    assert PROMPT.strip() not in WORDS


def sampled(data: Any) -> list[int]:
    """The ids of the prompt that a run is sampled with."""
    prompts: list[list[int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "threed.training.final_report.generate",
            lambda engine, prompt, count: prompts.append(prompt) or prompt,
        )
        sample_text(None, data, 4)  # type: ignore[arg-type]
    return prompts[0]


# ----------------------------------------------------------------------------------------------- special tokens in text


def test_special_tokens_in_text_are_text_unless_parsed(tmp_path: Path) -> None:
    """Also of whole words and of Unigram pieces, whose models find a token by its spelling, special or not."""
    words = folder_of(tmp_path / "words", ["<eos>", "<bos>"])
    assert load_tokenizer(str(words)).encode("a <eos> b <bos>") == [7, 0, 8, 0]
    assert load_tokenizer(str(words), special_tokens="parse").encode("a <eos> b <bos>") == [
        7,
        2,
        8,
        1,
    ]
    (tmp_path / "unigram").mkdir()
    LAYOUTS["unigram"](tmp_path / "unigram")
    text, parse = (
        load_tokenizer(str(tmp_path / "unigram"), special_tokens=how) for how in ("text", "parse")
    )
    assert 2 in parse.encode("the</s>cat")
    assert not {0, 1, 2} & set(text.encode("the</s>cat <s> <pad>"))
    assert text.decode(text.encode("the</s>cat")) == "the</s>cat"
    for some in strings(300, seed=3):
        if not any(name in some for name in ("<s>", "</s>", "<pad>", "<unk>")):
            assert text.encode(some) == parse.encode(some)


def test_special_tokens_beyond_a_models_vocabulary_are_allowed_if_no_text_has_them(
    tmp_path: Path,
) -> None:
    """Published folders have such tokens: for padding, or for images."""
    words = [*WORDS, "<image>", "<pad>"]
    (tmp_path / "a.txt").write_text("a b <image> c <pad> " * 200)
    cases: list[tuple[list[str], dict[str, Any], dict[str, Any], int]] = [
        (["<eos>", "<image>", "<pad>"], {}, {}, 10),
        (["<eos>", "<image>", "<pad>"], {}, {"special_tokens": "parse"}, 12),
        (["<eos>", "<image>"], {}, {}, 12),
        (["<image>", "<pad>"], {"tokenizer_config": {"eos_token": "<image>"}}, {}, 11),
        (["<eos>", "<pad>"], {"tokenizer_config": {"bos_token": "<pad>"}}, {"bos": True}, 12),
    ]
    for number, (specials, files, how, vocab) in enumerate(cases):
        folder = folder_of(tmp_path / f"{number}", specials, words, **files)
        data = open_data(str(tmp_path / "a.txt"), str(folder), 0.1, 4, 1, tmp_path / "cache", **how)
        assert data.tokenizer.text_vocab_size == vocab
        assert data.vocab == 12
        assert max(data.train.tokens.max(), data.valid.tokens.max()) < vocab


def test_how_special_tokens_are_read_is_a_part_of_the_caches_key(tmp_path: Path) -> None:
    folder = folder_of(
        tmp_path / "t",
        ["<eos>", "<bos>"],
        template="<bos> $A",
        tokenizer_config={"eos_token": "<eos>"},
    )
    (tmp_path / "a.txt").write_text("a b <eos> c " * 200)
    path, cache = str(tmp_path / "a.txt"), tmp_path / "cache"

    def tokens(**how: Any) -> list[int]:
        return open_data(path, str(folder), 0.1, 4, 1, cache, **how).train.tokens[:6].tolist()

    assert tokens() == [1, 7, 8, 0, 9, 7]
    assert tokens(special_tokens="parse") == [1, 7, 8, 2, 9, 7]
    assert tokens(bos=False) == [7, 8, 0, 9, 7, 8]
    before = load_tokenizer(str(folder)).fingerprint
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    assert load_tokenizer(str(folder)).fingerprint != before
    assert open_data(path, str(folder), 0.1, 4, 1, cache).valid.tokens[-1] == 3


# ---------------------------------------------------------------------------------------------------------------- pairs


@pytest.mark.parametrize(
    ("documents", "bos", "notice"),
    [
        ([[1, 7, 2]] * 40, "auto", ""),
        ([[7, 2], []] * 40, False, ""),
        (
            [[1, 7, 8]] * 40,
            "auto",
            r"40 of 40 documents do not end .* \(id 2\); 40 of them end with id 8: ",
        ),
        ([[1, 7, 8], [1, 7, 2]] * 40, "auto", r"40 of 80 documents do not end with .*--append-eod"),
        (
            [[1, 7, 2], [7, 2]] * 40,
            "auto",
            r"40 of 80 documents do not begin with bos \(id 1\), which",
        ),
        (
            [[1, 7, 2], [7, 2]] * 40,
            False,
            r"40 of 80 documents begin with bos \(id 1\), .*--data\.bos true",
        ),
    ],
)
def test_a_pair_that_begins_and_ends_documents_in_another_way_is_reported(
    documents: list[list[int]], bos: Any, notice: str, tmp_path: Path
) -> None:
    import re

    folder = folder_of(
        tmp_path / "t",
        ["<eos>", "<bos>"],
        template="<bos> $A",
        tokenizer_config={"bos_token": "<bos>"},
    )
    write_pair(tmp_path / "p", documents)
    for _ in range(2):  # the second time from the cache
        data = open_data(str(tmp_path / "p"), str(folder), 0.2, 4, 1, tmp_path / "cache", bos=bos)
        assert re.search(notice, data.notice) if notice else data.notice == ""
        assert data.notice.count("documents") <= 2


def test_packing_needs_the_end_of_some_document(tmp_path: Path) -> None:
    def packed(documents: list[list[int]]) -> list[list[int]]:
        place = tmp_path / str(documents[0][-1])
        write_pair(place, documents)
        data = open_data(str(place), "bytes", 0.2, 4, 1, tmp_path / "cache", packing=True)
        return list(data.valid.batch(0, 1)["documents"].tolist())

    assert packed([[1, 7, 256], [2, 256]] * 20) == [[0, 0, 0, 1]]
    with pytest.raises(ValueError, match=r"packing true finds no documents: .*40 of 40 documents"):
        packed([[1, 7, 8]] * 40)


def write_pair(prefix: Path, documents: list[list[int]]) -> None:
    """A pair of these documents, one sequence each."""
    from threed.data.megatron import MegatronWriter

    data, index = pair_of(prefix)
    with data.open("wb") as out, index.open("wb") as index_file:
        writer = MegatronWriter(out, np.dtype("<u2"))
        for document in documents:
            writer.add(np.array(document, dtype="<u2"))
            writer.end_document()
        writer.write_index(index_file)


def test_a_pair_that_we_wrote_is_not_reported(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "some text"}\n' * 40)
    tokenize_to_megatron(tmp_path / "a.jsonl", tmp_path / "p", load_tokenizer("bytes"))
    assert open_data(str(tmp_path / "p"), "bytes", 0.2, 8, 1, tmp_path / "cache").notice == ""


# ------------------------------------------------------------------------------------------------------------- refusals


def test_what_is_no_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    place = tmp_path / "t"
    place.mkdir()
    with pytest.raises(
        ValueError, match=r"has no vocabulary\. Use --data\.tokenizer bytes, or a folder"
    ):
        load_tokenizer(str(place))
    (place / "tekken.json").write_text("{}")
    (place / "vocab.json").write_text('{"a": 0}')  # without merges.txt
    with pytest.raises(ValueError, match=r"no vocabulary \(found tekken\.json, vocab\.json\)"):
        load_tokenizer(str(place))
    with pytest.raises(ValueError, match=r"no vocabulary \(found tekken\.json, vocab\.json\)"):
        load_tokenizer(str(place / "vocab.json"))
    (place / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(
        ValueError,
        match=rf"vocab\.json' is one file of a tokenizer: give --data\.tokenizer {place}",
    ):
        load_tokenizer(str(place / "vocab.json"))
    (place / "sp.model").write_bytes(b"\x0a\x80\x81")
    with pytest.raises(
        ValueError, match=r"sp\.model' is not a tokenizer\.json: .* to tokenizer\.model"
    ):
        load_tokenizer(str(place / "sp.model"))
    with pytest.raises(
        ValueError, match=r"merges\.txt there: no tokenizer_config\.json says .* Add one"
    ):
        load_tokenizer(str(place))
    (place / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    # which that class does not read
    with pytest.raises(ValueError, match=r"vocab\.json and merges\.txt"):
        load_tokenizer(str(place))


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"a model")
    code = (
        "import sys; sys.modules[sys.argv[2]] = None;"
        "from threed.data import load_tokenizer; load_tokenizer(sys.argv[1])"
    )
    for package in ("transformers", "sentencepiece"):
        done = programs.run(["-c", code, str(tmp_path), package], tmp_path, os.environ)
        assert f"{package}" in done.stderr.rpartition("ValueError: ")[2]
        assert "pip install" in done.stderr
        assert "'threed[hf]'" in done.stderr
    folder_of(tmp_path, ["<eos>"])
    done = programs.run(["-c", code, str(tmp_path), "tokenizers"], tmp_path, os.environ)
    assert "needs the package tokenizers" in done.stderr
    assert "pip install tokenizers" in done.stderr
