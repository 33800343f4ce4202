"""`threed plan --from-megatron` translates flags of Megatron-LM, or refuses them by name."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from threed.cli.commands import main
from threed.config.arguments import GROUPS, load
from threed.config.groups import Config, key_name
from threed.config.migration.megatron import split, translate
from threed.config.migration.megatron_flags import FLAGS, find
from threed.config.migration.megatron_items import Given, Setting
from threed.config.migration.megatron_rules import RULES
from threed.config.resolution import resolve_model
from threed.interop.megatron.model_args import model_of

KEYS = {f"{group}.{key_name(key)}" for group, model in GROUPS.items() for key in model.model_fields}
PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "megatron.md"
SHAPE = "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --micro-batch-size 2"
LLAMA = (
    f"{SHAPE} --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear"
)
PIPELINE = f"{SHAPE} --pipeline-model-parallel-size 4"
RUN = f"{SHAPE} --global-batch-size 32 --train-iters 1000"


def settings(text: str, world_size: int = 1) -> dict[str, str]:
    """Returns the value of each key, and the architecture as `model.arch`."""
    found = translate(text, world_size)
    assert found.problems == (), found.problems
    return {"model.arch": found.arch} | {s.key: s.value for s in found.settings}


def config_of(text: str, world_size: int = 1) -> Config:
    """Returns the configuration of the translated flags, with all checks of threed."""
    found = translate(text, world_size)
    assert found.problems == (), found.problems
    defaults = {"model": {"arch": found.arch}}
    return load(found.flags, defaults=defaults, world_size=world_size)[0]


# The table


def test_every_key_of_the_table_exists() -> None:
    for flag in FLAGS.values():
        assert set(flag.keys) <= KEYS, flag
        assert bool(flag.keys) == (flag.kind in ("key", "combined")), flag
        assert bool(flag.text) == (flag.kind in ("unused", "refused")), flag


class Recording(dict[str, tuple[str, ...]]):
    """The values of flags; records which flags the rules read."""

    def __init__(self, values: Mapping[str, tuple[str, ...]], read: set[str]) -> None:
        super().__init__(values)
        self.read = read

    def __contains__(self, name: object) -> bool:
        self.read.add(str(name))
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)


def test_a_rule_reads_every_combined_flag() -> None:
    read: set[str] = set()
    full = "--profile --train-iters 10 --recompute-granularity full --recompute-modules core_attn"
    for text in (
        f"{LLAMA} {full} --use-rope-scaling --use-megatron-fsdp --optimizer lion",
        f"{RUN} --use-torch-fsdp2 --tensor-model-parallel-size 2 --group-query-attention",
        f"{RUN} --lr-decay-style WSD",
        f"{LLAMA} --num-experts 8 --qk-layernorm --disable-bias-linear",
    ):
        values, _ = split(text)
        for rule in RULES:
            with contextlib.suppress(ValueError):
                list(rule(Given(Recording(values, read), 2)))
    assert {flag.name for flag in FLAGS.values() if flag.kind == "combined"} <= read


EXPERTS = f"{LLAMA} --disable-bias-linear --num-experts 8"


@pytest.mark.parametrize(
    ("flags", "arch", "settings"),
    [
        (
            "--expert-model-parallel-size 2 --moe-router-topk 3 --moe-grouped-gemm", "mixtral",
            {"model.experts": "8", "model.experts-per-token": "3", "parallel.ep": "2"},
        ),
        (
            "--moe-ffn-hidden-size 64 --moe-z-loss-coeff 1e-3", "mixtral",
            {"model.experts-per-token": "2", "model.ffn": "64", "experts.z-loss": "1e-3"},
        ),
        (
            (
                "--qk-layernorm --moe-ffn-hidden-size 64 --moe-shared-expert-intermediate-size 128"
                " --moe-layer-freq ([0]*1+[1]*3) --moe-router-pre-softmax"
                " --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2"
            ), "qwen3_moe",
            {
                "model.expert-ffn": "64", "model.shared-experts": "2", "model.dense-layers": "1",
                "model.normalize-experts": "false", "experts.aux-loss": "0.01",
            },
        ),
    ],
)  # fmt: skip
def test_flags_of_experts(flags: str, arch: str, settings: dict[str, str]) -> None:
    found = translate(f"{EXPERTS} {flags}", 2)
    assert found.problems == ()
    assert found.arch == arch
    assert {s.key: s.value for s in found.settings}.items() >= settings.items()


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--moe-aux-loss-coeff 1e-2", "within each sequence; use seq_aux_loss"),
        ("--moe-router-pre-softmax", "translates Mixtral, and Qwen3-MoE"),
        ("--qk-layernorm --moe-layer-freq 2", "or use --model.expert-every"),
        ("--moe-shared-expert-intermediate-size 64", "in a model with --qk-layernorm"),
        ("biases", "add --disable-bias-linear"),
    ],
)
def test_flags_of_experts_that_are_not_translated(flags: str, problem: str) -> None:
    text = EXPERTS.replace("--disable-bias-linear", "") if flags == "biases" else EXPERTS
    options = "" if flags == "biases" else flags
    assert any(problem in line for line in translate(f"{text} {options}").problems)


@pytest.mark.parametrize("name", [name for name in FLAGS if FLAGS[name].kind == "refused"])
def test_a_refused_flag_is_named(name: str) -> None:
    name = name.replace("*", "x")
    (problem,) = [text for text in translate(f"{SHAPE} --{name} 7").problems if name in text]
    flag = find(name)
    assert flag is not None
    assert problem == f"--{name} 7: {flag.text}"
    for value in flag.allowed:
        assert translate(f"{SHAPE} --{name} {value}").problems == ()


# The page docs/guide/megatron.md


def test_the_page_has_every_flag_with_its_keys() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    rows = [line.split(" | ", 1) for line in lines]
    for flag in FLAGS.values():
        pattern = re.compile(rf"--{flag.name}(?![\w-])")
        text = "".join(right for left, right in rows if pattern.search(left))
        keys = [key for key in flag.keys if key not in ("model.arch", "checkpoint.resume")]
        assert all(f"--{key}" in text for key in keys), flag.name
    named = [name for left, _ in rows for name in re.findall(r"--([\w-]+)", left)]
    assert [name for name in named if find(name) is None] == []


@pytest.mark.parametrize("kind", ["unused", "refused"])
def test_the_page_has_every_flag_without_a_key(kind: str) -> None:
    names: dict[str, list[str]] = {}
    for flag in FLAGS.values():
        if flag.kind == kind:
            names.setdefault(flag.text, []).append(f"`--{flag.name.replace('*', '…')}`")
    page = PAGE.read_text()
    for reason, flags in names.items():
        text = reason.replace("*", r"\*")
        assert f"| {', '.join(flags)} | {text} |\n" in page


def test_the_example_of_the_page_is_a_real_one() -> None:
    page = PAGE.read_text()
    (flags,) = re.findall(r"--from-megatron '([^'\n]+--bf16)'", page)
    assert f"```text\n{translate(flags, 8)}\n```" in page


# Translations


@pytest.mark.parametrize(
    ("flags", "keys"),
    [
        (SHAPE, {"model.arch": "gpt", "model.layers": "8", "model.dropout": "0.1"}),
        (SHAPE, {"optim.betas": "0.9,0.999", "optim.weight-decay": "0.01", "zero.stage": "0"}),
        (LLAMA, {"model.arch": "llama", "model.ffn": "2688", "model.tied": "true"}),
        (f"{LLAMA} --no-position-embedding --data-impl mmap", {"model.arch": "llama"}),
        (f"{LLAMA} --ffn-hidden-size 4096", {"model.ffn": "4096"}),
        (f"{LLAMA} --add-qkv-bias", {"model.arch": "qwen2"}),
        (f"{LLAMA} --window-size 127,0", {"model.arch": "mistral", "model.window": "128"}),
        (
            f"{LLAMA} --rotary-percent 0.5",
            {"model.arch": "phi3", "model.partial-rotary-factor": "0.5"},
        ),
        (f"{LLAMA} --qk-layernorm --rotary-base 500000", {"model.qk-norm": "true"}),
        (f"{LLAMA} --group-query-attention --num-query-groups 4", {"model.kv-heads": "4"}),
        (f"{LLAMA} --untie-embeddings-and-output-weights", {"model.tied": "false"}),
        (f"{LLAMA} --hidden-dropout 0 --attention-dropout 0.0", {"model.dropout": "0"}),
        (f"{SHAPE} --disable-bias-linear", {"model.bias": "false"}),
        (
            f"{SHAPE} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
            {"parallel.chunks": "4", "parallel.schedule": "interleaved"},
        ),
        (
            f"{SHAPE} --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
            {"parallel.chunks": "2", "parallel.schedule": "interleaved"},
        ),
        (
            f"{PIPELINE} --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 3",
            {"parallel.partition": "2,2,2,4"},
        ),
        (
            f"{SHAPE} --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ett|(t*2|)*2ttL",
            {"parallel.partition": "3,2,2,3", "parallel.chunks": "2"},
        ),
        (f"{SHAPE} --tensor-model-parallel-size 2", {"parallel.sequence": "false"}),
        (
            f"{SHAPE} --tensor-model-parallel-size 2 --sequence-parallel",
            {"parallel.sequence": "true"},
        ),
        (f"{SHAPE} --use-distributed-optimizer", {"zero.stage": "1"}),
        (f"{SHAPE} --use-torch-fsdp2", {"zero.stage": "3"}),
        (f"{SHAPE} --use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward", {"zero.stage": "2"}),
        (
            f"{SHAPE} --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads",
            {"zero.stage": "2"},
        ),
        (
            f"{SHAPE} --use-distributed-optimizer --num-distributed-optimizer-instances 2",
            {"zero.shard-size": "4"},
        ),
        (f"{SHAPE} --ddp-bucket-size 40000000", {"zero.bucket-mib": "152.6"}),
        (f"{SHAPE} --recompute-activations", {"recompute.mode": "selective"}),
        (
            f"{SHAPE} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            {"recompute.mode": "full"},
        ),
        (
            f"{SHAPE} --recompute-granularity selective --recompute-modules core_attn layernorm",
            {"recompute.ops": "attention,norm"},
        ),
        (f"{SHAPE} --bf16 --grad-reduce-in-bf16", {"precision.reduce-dtype": "bf16"}),
        (f"{SHAPE} --global-batch-size=32 --train-samples=3200", {"train.steps": "100"}),
        (
            f"{RUN} --lr-decay-iters 1200",
            {"train.steps": "1200", "train.stop-after": "1000"},
        ),
        (f"{RUN} --lr-warmup-fraction 0.01", {"optim.warmup": "10"}),
        (f"{RUN} --lr-warmup-samples 640", {"optim.warmup": "20"}),
        (
            f"{RUN} --lr-decay-style WSD --lr-wsd-decay-style linear --lr-wsd-decay-iters 200",
            {"optim.schedule": "wsd"},
        ),
        (f"{RUN} --eval-iters 10", {"train.eval-samples": "320"}),
        (RUN.replace("--global-batch-size 32", ""), {"train.global-batch": "16"}),
        (
            f"{SHAPE} --optimizer lion --lion-beta1 0.9",
            {"optim.name": "lion", "optim.betas": "0.9,0.98"},
        ),
        (
            f"{SHAPE} --decoupled-lr 1e-4",
            {"optim.groups": "embedding.word.weight|head.weight: lr=1e-4"},
        ),
        (f"{SHAPE} --data-path 1.0 a_text", {"data.path": "a_text", "data.split": "0.03"}),
        (f"{SHAPE} --data-path a --split 949,50,1", {"data.split": "0.05"}),
        (
            f"{SHAPE} --eod-mask-loss --reset-position-ids --reset-attention-mask",
            {"data.packing": "true"},
        ),
        (
            f"{SHAPE} --tokenizer-type HuggingFaceTokenizer --tokenizer-model tok",
            {"data.tokenizer": "tok"},
        ),
        (f"{SHAPE} --save x --load x --async-save", {"run.dir": "x", "checkpoint.async": "true"}),
        (f"{SHAPE} --exit-duration-in-mins 60", {"train.time-limit": "60m"}),
        (
            f"{SHAPE} --profile --profile-step-start 4 --profile-step-end 6",
            {"log.profile-steps": "5:6"},
        ),
        (
            f"{LLAMA} --mtp-num-layers 2",
            {"model.mtp-depth": "2", "model.mtp-loss": "0.1"},
        ),
        (f"{LLAMA} --mtp-num-layers 1 --mtp-loss-scaling-factor 0.2", {"model.mtp-loss": "0.2"}),
        (f"{SHAPE} \\\n --lr 3e-4 # peak\n --seed 7", {"optim.lr": "3e-4", "train.seed": "7"}),
    ],
)
def test_a_translation(flags: str, keys: dict[str, str]) -> None:
    found = settings(flags, 8)
    assert {key: found.get(key) for key in keys} == keys


def test_a_translated_run_has_the_values_of_megatron() -> None:
    flags = (
        f"{LLAMA} --seq-length 512 --max-position-embeddings 512 --vocab-size 1000 --use-rope-scaling"
        " --rope-scaling-factor 4 --group-query-attention --num-query-groups 4 --tensor-model-parallel-size 2"
        " --sequence-parallel --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2"
        " --use-distributed-optimizer --bf16 --global-batch-size 32 --train-iters 1000 --lr 3e-4 --min-lr 3e-5"
        " --lr-decay-style cosine --lr-warmup-iters 100 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 0.5"
        " --attention-dropout 0 --hidden-dropout 0 --overlap-grad-reduce --exit-duration-in-mins 90"
    )
    config = config_of(flags, 8)
    assert (config.model.layers, config.model.kv_heads, config.model.ffn) == (8, 4, 2688)
    assert config.model.rope_scaling is not None
    assert config.model.rope_scaling.factor == 4
    assert (config.parallel.tp, config.parallel.pp, config.parallel.chunks) == (2, 2, 2)
    assert (config.zero.stage, config.precision.dtype) == (1, "bf16")
    assert (config.optim.betas, config.optim.warmup) == ((0.9, 0.95), 100)
    assert (config.train.time_limit, config.train.grad_clip) == (5400, 0.5)
    found = translate(flags, 8)
    assert [unused.name for unused in found.unused] == [
        "attention-dropout", "overlap-grad-reduce",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "arch", ["--add-qkv-bias", "--window-size 99,0", "--rotary-percent 0.5", ""]
)
def test_every_architecture_passes_the_checks_of_threed(arch: str) -> None:
    assert config_of(f"{LLAMA} {arch}").model.arch != "gpt"
    assert config_of(f"{SHAPE} --disable-bias-linear").model.arch == "gpt"


@pytest.mark.parametrize(
    "flags",
    [
        LLAMA,
        f"{LLAMA} --add-qkv-bias --untie-embeddings-and-output-weights",
        f"{LLAMA} --qk-layernorm --group-query-attention --num-query-groups 4 --rotary-base 500000",
        f"{LLAMA.replace('--disable-bias-linear', '')} --use-rope-scaling --rope-scaling-factor 4.0",
        SHAPE,
        f"{SHAPE} --disable-bias-linear --norm-epsilon 1e-6 --kv-channels 32",
    ],
)
def test_the_flags_and_the_arguments_in_a_checkpoint_give_one_model(flags: str) -> None:
    flags += " --max-position-embeddings 128 --seq-length 128 --vocab-size 1000"
    flags += f" --ffn-hidden-size {2688 if 'swiglu' in flags else 4096}"
    given, _ = split(f"{flags} --hidden-dropout 0")
    args: dict[str, Any] = {"padded_vocab_size": 1000, "bias_gelu_fusion": True}
    for name, words in given.items():
        text = words[0] if words else ""
        args[name.replace("-", "_")] = int(text) if text.isdecimal() else text or True
    args["norm_epsilon"] = float(args.get("norm_epsilon", 1e-5))
    args["add_bias_linear"] = "disable-bias-linear" not in given
    config = config_of(f"{flags} --hidden-dropout 0")
    assert resolve_model(config.model) == model_of(args, "a checkpoint")


# Refusals


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--num-layer 3", "no flag of Megatron-LM that threed can translate (did you mean --num-layers?)"),
        ("--model.layers 3", "a key of threed; write it after the flags"),
        ("pretrain_gpt.py --bf16", "pretrain_gpt.py: not a flag of Megatron-LM"),
        ("--bf16 true", "--bf16 true: it takes no value"),
        ("--num-layers", "--num-layers: it takes one value"),
        ("--lr 1 2", "--lr 1 2: it takes one value"),
        ("--bf16 --fp16", "--bf16 and --fp16: they set --precision.dtype to bf16 and to fp16; keep one"),
        ("--optimizer muon", "--optimizer muon: threed has adam, sgd, lion"),
        ("--swiglu", "use RMSNorm with rope and --swiglu (Llama), or LayerNorm"),
        ("--num-layers x --pipeline-model-parallel-size 2.5", "must be a whole number of at least 1"),
        (f"{LLAMA} --add-qkv-bias --rotary-percent 0.5", "no built-in model has both"),
        (f"{LLAMA} --window-size 5,5", "must be N,0"),
        ("--num-query-groups 4", "add this flag, or leave it out"),
        (f"{LLAMA} --use-rope-scaling --rope-scaling-factor 0", "must be more than 0"),
        (
            "--num-layers 6 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1",
            "6 layers cannot be divided into 4 stages of 1 layers",
        ),
        (
            "--num-layers 6 --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 1",
            "cannot be divided evenly",
        ),
        ("--pipeline-model-parallel-layout Etm|L", "needs E in the first stage"),
        ("--reset-position-ids --eod-mask-loss", "--reset-position-ids: give --reset-position-ids --"),
        (
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|t|tL",
            "3 stages are not a multiple of 2 pipeline ranks",
        ),
        ("--num-distributed-optimizer-instances 3", "give --world-size to threed plan"),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy all", "must be no_shard, optim,"),
        (
            "--num-layers 4 --recompute-granularity full --recompute-method block --recompute-num-layers 2",
            "use --recompute-method uniform --recompute-num-layers 1",
        ),
        ("--recompute-granularity selective --recompute-modules mlp", "--recompute-modules mlp: "),
        ("--train-iters 100 --lr-decay-iters 90", "decays until the last step"),
        ("--lr-warmup-iters 1 --lr-warmup-fraction 0.1", "keep one"),
        ("--lr-warmup-fraction 0.1", "give --train-iters"),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 20 --train-iters 100", "decays linearly over the last 20 %"),
        ("--lr-decay-style inverse-square-root", "threed has cosine, linear, constant, WSD"),
        ("--data-path 0.5 a 0.5 b", "threed reads one dataset"),
        ("--split 100,0,0", "threed always validates"),
        ("--split a,b", "must be numbers"),
        ("--tokenizer-type SentencePieceTokenizer", "use --tokenizer-type HuggingFaceTokenizer"),
        ("--load x", "`threed convert DIR/iter_N DST --allow-pickle`"),
        ("--save y --load x", "a run resumes from its own folder, which --save names"),
        ("--lr 'x", "cannot be read"),
        ("--no-position-embedding", "it needs --position-embedding-type rope"),
        (
            "--save $DIR --lr ${LR} ${ARGS[@]}",
            "$DIR, ${LR}, ${ARGS[@]}: the shell must insert these values: put the flags in double quotes",
        ),
    ],
)  # fmt: skip
def test_a_problem_has_its_fix(flags: str, problem: str) -> None:
    found = translate(flags)
    assert any(problem in text for text in found.problems), found.problems


# The command line


def test_a_plan_prints_the_command_and_plans_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --bf16"
    words = ["plan", "--from-megatron", text, "--world-size", "4", "--parallel.tp", "2"]
    assert main([*words, "--data.split=0.1"]) == 0
    out = capsys.readouterr().out
    (command,) = (line for line in out.splitlines() if "threed train gpt" in line and "--" in line)
    launcher, train = shlex.split(command)[:5], shlex.split(command)[5:]
    assert launcher == ["torchrun", "--standalone", "--nproc-per-node", "4", "-m"]
    assert train[-3:] == ["--parallel.tp", "2", "--data.split=0.1"]
    assert "dp 2 × tp 2" in out
    assert main(["plan", *train[2:], "--world-size", "4"]) == 0
    again = capsys.readouterr().out
    assert out.partition("\n\n")[2] == again


def test_what_a_plan_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    for words, part in (
        (["plan", "--from-megatron"], "its value is missing"),
        (["plan", "--from-megatron="], "its value is missing"),
        (["plan", "--from-megatron", "--bf16", "--from-megatron", "--lr 1"], "give it once"),
        (["plan", "gpt", "--from-megatron=--bf16"], "gpt: the flags of Megatron-LM determine the"),
        (["train", "--from-megatron", "--bf16"], "it is an option of threed plan"),
        (
            ["plan", "--from-megatron", "--moe-expert-capacity-factor 1 --bf16"],
            "--moe-expert-capacity-factor 1: add the flags of threed",
        ),
    ):
        assert main(words) == 2
        assert part in capsys.readouterr().err


def test_a_value_that_begins_with_a_hyphen_is_joined() -> None:
    assert Setting("data.path", "-x").words == ["--data.path=-x"]
