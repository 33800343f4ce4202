"""Ten layouts of tokenizer files, like those of published folders, and test strings.

    LAYOUTS["llama 3 instruct"](folder)           writes the files into the folder of a model with VOCAB rows
    strings(1000, seed=1)

The vocabularies are small and are trained here.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

VOCAB = 512  # number of embedding rows of the models with these tokenizers
CORPUS = [
    "the cat sat on the mat and the dog ran after the cat, 1234 times.\n",
    "Zürich, naïve café: 日本語のテキスト 🙂 and tabs\tand  spaces\n",
    "def main() -> None:\n    print('hello, world')  # </s> <b>bold</b>\n",
] * 30  # fmt: skip
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{{ eos_token }}{% endfor %}"
SPELT = [
    "<|endoftext|>",
    "</s>",
    "<s>",
    "<bos>",
    "<eos>",
    "<|im_start|>",
    "<|eot_id|>",
    "[SEP]",
    "<unk>",
]
Write = Callable[[Path], None]


def strings(count: int, seed: int) -> list[str]:
    """Returns random texts.

    They consist of words, white space, spellings of special tokens, and characters of any Unicode
    plane.
    """
    draw = random.Random(seed)
    words = [
        *" ".join(CORPUS[:3]).split(),
        *SPELT,
        "\t",
        "\n\n",
        "   ",
        "\u00a0",
        "\u200b",
        "e\u0301",
        "\x00",
        "🏳️‍🌈",
    ]

    def piece() -> str:
        kind = draw.randrange(4)
        if kind < 2:
            return draw.choice(words)
        if kind == 2:
            return draw.choice(["", " ", "  ", "\n", "\r\n"])
        code = draw.choice(
            [
                draw.randrange(0x20, 0x500),
                draw.randrange(0x20, 0xD800),
                draw.randrange(0xE000, 0x110000),
            ]
        )
        return chr(code)

    return ["".join(piece() for _ in range(draw.randrange(0, 24))) for _ in range(count)]


def special(name: str) -> AddedToken:
    return AddedToken(name, special=True, normalized=False)


def write(folder: Path, **files: Any) -> None:
    """Writes values as JSON files; a keyword is the name of a file without its extension."""
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1, ensure_ascii=False))


def byte_level(specials: Sequence[str] = (), size: int = 400, split: str = "") -> Tokenizer:
    """Returns a byte-level BPE.

    Args:
        specials: special tokens, which follow the vocabulary.
        size: size of the vocabulary.
        split: regular expression that splits text into words; empty for the default.
    """
    backend = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split)
    words = pre_tokenizers.Split(Regex(split), "isolated") if split else None
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, level]) if words else level
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_special_tokens([special(name) for name in specials])
    return backend


def lone_json(folder: Path) -> None:
    """Writes only a tokenizer.json."""
    byte_level(["<|endoftext|>"]).save(str(folder / "tokenizer.json"))


def saved_by_transformers(folder: Path) -> None:
    """Writes the files that transformers saves, with chat templates in separate files."""
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=byte_level(["<|im_start|>", "<|im_end|>", "<|endoftext|>"]), eos_token="<|im_end|>",
        pad_token="<|endoftext|>", additional_special_tokens=["<|im_start|>"],
    )  # fmt: skip
    fast.chat_template = {"default": TEMPLATE, "tool_use": TEMPLATE + "!"}
    fast.save_pretrained(folder)


def llama3_instruct(folder: Path) -> None:
    """Writes the layout of Llama 3 Instruct.

    The post-processor adds bos, eos ends a turn, whole words are looked up, and the configuration
    contains the chat template.
    """
    names = [
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    ]
    backend = byte_level(names)
    bos = ("<|begin_of_text|>", backend.token_to_id("<|begin_of_text|>"))
    template = processors.TemplateProcessing(
        single="<|begin_of_text|> $A",
        pair="<|begin_of_text|> $A <|begin_of_text|> $B",
        special_tokens=[bos],
    )
    backend.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=False), template]
    )
    backend.save(str(folder / "tokenizer.json"))
    about = json.loads((folder / "tokenizer.json").read_text())
    about["model"]["ignore_merges"] = True
    write(folder, tokenizer=about, tokenizer_config={
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos[0], "eos_token": "<|eot_id|>",
        "chat_template": TEMPLATE, "clean_up_tokenization_spaces": True, "model_max_length": 131072,
        "added_tokens_decoder": {
            str(backend.token_to_id(name)): {"content": name, "special": True, "normalized": False, "lstrip": False,
                                             "rstrip": False, "single_word": False}
            for name in names
        },
    }, special_tokens_map={"bos_token": bos[0], "eos_token": {"content": "<|eot_id|>", "lstrip": False,
                                                                "normalized": False, "rstrip": False,
                                                                "single_word": False}})  # fmt: skip
    ends = [backend.token_to_id(name) for name in ("<|end_of_text|>", "<|eot_id|>")]
    set_ids(folder, bos_token_id=bos[1], eos_token_id=ends, pad_token_id=None)
    write(folder, generation_config={"bos_token_id": bos[1], "eos_token_id": ends, "do_sample": True,
                                     "temperature": 0.6, "top_p": 0.9})  # fmt: skip


def gemma(folder: Path) -> None:
    """Writes the layout of Gemma.

    It has byte fallback, spaces as U+2581, a bos that the post-processor adds, and `</s>` as an
    ordinary token.
    """
    words = [
        "<pad>",
        "<eos>",
        "<bos>",
        "<unk>",
        "<mask>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "</s>",
        "<b>",
    ]
    letters = sorted(
        {letter for text in CORPUS for letter in text.replace(" ", "\u2581")} - {"\n", "\t"}
    )
    vocab = {word: i for i, word in enumerate([*words, *letters, "th", "the", "ca", "cat"])}
    merges = [("t", "h"), ("th", "e"), ("c", "a"), ("ca", "t")]
    backend = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens([special(name) for name in words[:4]])
    backend.add_tokens(
        [AddedToken(name, special=False, normalized=False) for name in ("<mask>", "</s>", "<b>")]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", 2)]
    )
    backend.save(str(folder / "tokenizer.json"))
    write(folder, tokenizer_config={
        "tokenizer_class": "GemmaTokenizer", "add_bos_token": True, "add_eos_token": False, "bos_token": "<bos>",
        "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>",
    }, preprocessor_config={"image_processor_type": "SiglipImageProcessor"})  # fmt: skip
    set_ids(folder, bos_token_id=2, eos_token_id=[1, 6], pad_token_id=0)


def sentencepiece_model(folder: Path, kind: str = "bpe") -> None:
    """Writes only a tokenizer.model, like Llama 2."""
    import io

    import sentencepiece

    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line.strip("\n") for line in CORPUS]), model_writer=out, vocab_size=400,
        model_type=kind, byte_fallback=True, hard_vocab_limit=False, minloglevel=2, split_digits=True,
        add_dummy_prefix=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
    )  # fmt: skip
    (folder / "tokenizer.model").write_bytes(out.getvalue())
    write(folder, tokenizer_config={
        "tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False, "bos_token": "<s>",
        "eos_token": "</s>", "unk_token": "<unk>", "pad_token": None, "legacy": False,
    }, special_tokens_map={"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})  # fmt: skip
    set_ids(folder, bos_token_id=1, eos_token_id=2, pad_token_id=None)


def sentencepiece_and_json(folder: Path) -> None:
    """Writes a tokenizer.model, and the tokenizer.json that transformers converts it to."""
    from transformers import AutoTokenizer

    sentencepiece_model(folder)
    model = (folder / "tokenizer.model").read_bytes()
    AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
    (folder / "tokenizer.model").write_bytes(model)


def gpt2_files(folder: Path) -> None:
    """Writes vocab.json and merges.txt, like GPT-2."""
    backend = byte_level(size=399)
    backend.model.save(str(folder))
    vocab = json.loads((folder / "vocab.json").read_text())
    write(folder, vocab={**vocab, "<|endoftext|>": len(vocab)}, tokenizer_config={
        "tokenizer_class": "GPT2Tokenizer", "model_max_length": 1024, "bos_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>",
    })  # fmt: skip
    set_ids(folder, bos_token_id=len(vocab), eos_token_id=len(vocab))


def qwen(folder: Path) -> None:
    """Writes tokenizer.json, vocab.json, merges.txt and added_tokens.json; eos ends a turn."""
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend = byte_level(names, split=PRETOKENIZE_REGEX)
    backend.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    backend.model.save(str(folder))
    backend.normalizer = normalizers.NFC()
    backend.save(str(folder / "tokenizer.json"))
    ids = {name: backend.token_to_id(name) for name in [*names, "<tool_call>"]}
    write(folder, added_tokens=ids, tokenizer_config={
        "tokenizer_class": "Qwen2Tokenizer", "add_bos_token": False, "bos_token": None, "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>", "unk_token": None, "additional_special_tokens": names[1:],
        "split_special_tokens": False, "errors": "replace",
    })  # fmt: skip
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    set_ids(folder, bos_token_id=ids["<|endoftext|>"], eos_token_id=ids["<|im_end|>"])
    write(
        folder,
        generation_config={"eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]], "top_k": 20},
    )


def word_pieces(folder: Path) -> None:
    """Writes vocab.txt, like BERT."""
    letters = sorted({letter for text in CORPUS for letter in text.lower() if not letter.isspace()})
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "the",
        "cat",
        "dog",
        *letters,
        *("##" + c for c in letters),
    ]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    write(
        folder,
        tokenizer_config={
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": True,
            "eos_token": "[SEP]",
        },
    )
    set_ids(folder, bos_token_id=2, eos_token_id=3, pad_token_id=0)


def unigram(folder: Path) -> None:
    """Writes a Unigram model.

    Its special tokens are in its vocabulary, and only special_tokens_map.json names eos.
    """
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    names = ["<pad>", "<s>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=names, unk_token="<unk>", show_progress=False,
        initial_alphabet=list("abcdefghijklmnopqrstuvwxyz</>[]|_"),
    )  # fmt: skip
    backend.train_from_iterator(CORPUS, trainer)
    backend.save(str(folder / "tokenizer.json"))
    write(folder, special_tokens_map={"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
          tokenizer_config={"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>"})  # fmt: skip


def set_ids(folder: Path, **ids: Any) -> None:
    """Sets the ids in the config.json of a model, if there is one."""
    if (folder / "config.json").is_file():
        write(folder, config=json.loads((folder / "config.json").read_text()) | ids)


LAYOUTS: dict[str, Write] = {
    "lone tokenizer.json": lone_json,
    "saved by transformers": saved_by_transformers,
    "llama 3 instruct": llama3_instruct,
    "gemma": gemma,
    "tokenizer.model": sentencepiece_model,
    "tokenizer.model and json": sentencepiece_and_json,
    "vocab.json and merges.txt": gpt2_files,
    "qwen": qwen,
    "vocab.txt": word_pieces,
    "unigram": unigram,
}
SENTENCEPIECE = frozenset({"tokenizer.model", "tokenizer.model and json"})
EOT = {
    "lone tokenizer.json": "<|endoftext|>", "saved by transformers": "<|endoftext|>",
    "llama 3 instruct": "<|end_of_text|>", "gemma": "<eos>", "tokenizer.model": "</s>",
    "tokenizer.model and json": "</s>", "vocab.json and merges.txt": "<|endoftext|>", "qwen": "<|endoftext|>",
    "vocab.txt": "[SEP]", "unigram": "</s>",
}  # fmt: skip
