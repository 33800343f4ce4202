"""The flags of Megatron-LM, each with its replacement in threed.

    FLAGS["num-layers"].keys        # ("model.layers",)
    find("moe-grouped-gemm")        # a record that refuses all flags of experts

`threed.config.migration.megatron` translates a command line with this table, and
`threed.config.suggestions` names the replacement of a single flag. The flags are those of
Megatron-LM at commit d98e8a64 (megatron/training/arguments.py and megatron/training/config/).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["key", "combined", "unused", "refused"]


@dataclass(frozen=True)
class Flag:
    """A flag of Megatron-LM.

    Attributes:
        name: the flag without its hyphens. A name that ends with * stands for all flags with this
            beginning that have no separate entry.
        kind: "key" for a flag that sets one key, whatever the other flags are; "combined" for a
            flag that is translated together with other flags; "unused" for a flag that needs no
            replacement; "refused" for a feature that threed does not have.
        values: number of values: "" (none), "N" (one), "N…" (one or more) or "*" (any number).
        keys: keys of threed that the flag sets.
        text: for the kinds "unused" and "refused", the reason and what to use instead.
        words: for the kind "key", the value of the key by the value of the flag, for flags with a
            fixed set of values.
        form: for the kind "key", the value of the key, in which {} is the value of the flag.
        allowed: for the kind "refused", values with which the flag has no effect.
    """

    name: str
    kind: Kind
    values: str = ""
    keys: tuple[str, ...] = ()
    text: str = ""
    words: Mapping[str, str] = field(default_factory=dict)
    form: str = "{}"
    allowed: tuple[str, ...] = ()


# Flags that set one key. A mapping has the value of the key by the value of the flag.
_KEYS: Mapping[str, tuple[str, str | Mapping[str, str]]] = {
    "num-layers": ("model.layers", "{}"),
    "hidden-size": ("model.hidden", "{}"),
    "num-attention-heads": ("model.heads", "{}"),
    "kv-channels": ("model.head-dim", "{}"),
    "seq-length": ("model.seq", "{}"),
    "max-position-embeddings": ("model.positions", "{}"),
    "rotary-base": ("model.rope-theta", "{}"),
    "norm-epsilon": ("model.norm-eps", "{}"),
    "mtp-num-layers": ("model.mtp-depth", "{}"),
    "mtp-loss-scaling-factor": ("model.mtp-loss", "{}"),
    "hidden-dropout": ("model.dropout", "{}"),
    "tensor-model-parallel-size": ("parallel.tp", "{}"),
    "pipeline-model-parallel-size": ("parallel.pp", "{}"),
    "context-parallel-size": ("parallel.cp", "{}"),
    "num-experts": ("model.experts", "{}"),
    "expert-model-parallel-size": ("parallel.ep", "{}"),
    "moe-z-loss-coeff": ("experts.z-loss", "{}"),
    "loss-scale": ("precision.loss-scale", "{}"),
    "micro-batch-size": ("train.micro-batch", "{}"),
    "global-batch-size": ("train.global-batch", "{}"),
    "exit-interval": ("train.stop-after", "{}"),
    "exit-duration-in-mins": ("train.time-limit", "{}m"),
    "seed": ("train.seed", "{}"),
    "eval-interval": ("train.eval-every", "{}"),
    "lr": ("optim.lr", "{}"),
    "min-lr": ("optim.min-lr", "{}"),
    "weight-decay": ("optim.weight-decay", "{}"),
    "clip-grad": ("train.grad-clip", "{}"),
    "adam-eps": ("optim.eps", "{}"),
    "sgd-momentum": ("optim.momentum", "{}"),
    "decoupled-lr": ("optim.groups", "embedding.word.weight|head.weight: lr={}"),
    "optimizer": ("optim.name", {"adam": "adamw", "sgd": "sgd", "lion": "lion"}),
    "save": ("run.dir", "{}"),
    "save-interval": ("checkpoint.every", "{}"),
    "persistent-save-interval": ("checkpoint.every", "{}"),
    "save-retain-interval": ("checkpoint.keep-every", "{}"),
    "most-recent-k": ("checkpoint.keep", "{}"),
    "non-persistent-save-interval": ("checkpoint.memory-every", "{}"),
    "log-interval": ("log.every", "{}"),
    "wandb-project": ("log.project", "{}"),
    "wandb-exp-name": ("run.name", "{}"),
    "check-weight-hash-across-dp-replicas-interval": ("run.check-replicas", "{}"),
    "distributed-timeout-minutes": ("run.hang-timeout", "{}m"),
}
# Flags without a value that set one key.
_SWITCHES: Mapping[str, tuple[str, str]] = {
    "bf16": ("precision.dtype", "bf16"),
    "fp16": ("precision.dtype", "fp16"),
    "accumulate-allreduce-grads-in-fp32": ("precision.grad-dtype", "fp32"),
    "grad-reduce-in-bf16": ("precision.reduce-dtype", "bf16"),
    "optimizer-cpu-offload": ("zero.offload-optimizer", "cpu"),
    "recompute-activations": ("recompute.mode", "selective"),
    "checkpoint-activations": ("recompute.mode", "full"),
    "distribute-saved-activations": ("recompute.partition", "true"),
    "async-save": ("checkpoint.async", "true"),
}
# Flags that are translated together, by the keys that they set. NAME=N is a flag with one value, NAME=N… with one or more.
_COMBINED: Mapping[str, str] = {
    "model.arch":
        "normalization=N position-embedding-type=N use-rotary-position-embeddings no-position-embedding swiglu"
        " add-qkv-bias",
    "model.qk-norm": "qk-layernorm",
    "model.window model.arch": "window-size=N",
    "model.partial-rotary-factor model.arch": "rotary-percent=N",
    "model.rope-scaling": "use-rope-scaling rope-scaling-factor=N",
    "model.bias": "disable-bias-linear",
    "model.tied": "untie-embeddings-and-output-weights",
    "model.kv-heads": "group-query-attention num-query-groups=N",
    "model.ffn": "ffn-hidden-size=N",
    "model.vocab": "vocab-size=N",
    "parallel.sequence": "sequence-parallel",
    "parallel.chunks parallel.schedule":
        "num-layers-per-virtual-pipeline-stage=N num-virtual-stages-per-pipeline-rank=N",
    "parallel.partition":
        "decoder-first-pipeline-num-layers=N decoder-last-pipeline-num-layers=N pipeline-model-parallel-layout=N",
    "data.packing": "reset-position-ids reset-attention-mask eod-mask-loss",
    "model.experts-per-token": "moe-router-topk=N",
    "model.normalize-experts": "moe-router-pre-softmax",
    "model.ffn model.expert-ffn": "moe-ffn-hidden-size=N",
    "model.shared-experts": "moe-shared-expert-intermediate-size=N",
    "model.dense-layers": "moe-layer-freq=N",
    "experts.aux-loss": "moe-router-load-balancing-type=N moe-aux-loss-coeff=N",
    "zero.stage":
        "use-distributed-optimizer use-torch-fsdp2 use-megatron-fsdp torch-fsdp2-no-reshard-after-forward"
        " data-parallel-sharding-strategy=N",
    "zero.shard-size": "num-distributed-optimizer-instances=N",
    "zero.bucket-mib": "ddp-bucket-size=N",
    "recompute.mode": "recompute-granularity=N recompute-method=N recompute-num-layers=N",
    "recompute.ops": "recompute-modules=N…",
    "train.steps": "train-iters=N train-samples=N",
    "optim.schedule": "lr-decay-style=N lr-wsd-decay-style=N lr-wsd-decay-iters=N",
    "train.steps train.stop-after": "lr-decay-iters=N lr-decay-samples=N",
    "optim.warmup": "lr-warmup-iters=N lr-warmup-fraction=N lr-warmup-samples=N",
    "train.eval-samples": "eval-iters=N",
    "optim.betas": "adam-beta1=N adam-beta2=N lion-beta1=N lion-beta2=N",
    "data.path": "data-path=N…",
    "data.split": "split=N",
    "data.tokenizer": "tokenizer-type=N tokenizer-model=N",
    "run.dir checkpoint.resume": "load=N",
    "log.profile-steps": "profile use-pytorch-profiler profile-step-start=N profile-step-end=N",
}  # fmt: skip
# Flags that need no replacement, by reason. A name with =N or =N… takes values;
# a name with * stands for all flags that begin so.
_UNUSED: Mapping[str, str] = {
    "always on":
        "overlap-grad-reduce overlap-param-gather exit-signal-handler attention-softmax-in-fp32"
        " calculate-per-token-loss use-checkpoint-opt-param-scheduler use-checkpoint-opt_param-scheduler"
        " ckpt-fully-parallel-save ckpt-fully-parallel-load use-dist-ckpt",
    "parallel.partition balanced, the default, counts the FLOPs of embedding and head":
        "account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split",
    "threed pads the vocabulary itself": "make-vocab-size-divisible-by=N disable-pad-vocab-size no-pad-vocab-size",
    "threed chooses its kernels and fusions itself":
        "use-flash-attn attention-backend=N transformer-impl=N use-mcore-models no-masked-softmax-fusion"
        " no-bias-swiglu-fusion no-bias-dropout-fusion no-rope-fusion no-persist-layer-norm"
        " no-gradient-accumulation-fusion cross-entropy-loss-fusion cross-entropy-fusion-impl=N fused-residual-rmsnorm"
        " flash-attention-version=N use-te-activation-func use-transformer-engine-op-fuser disable-jit-fuser"
        " te-rng-tracker cuda-graph-* enable-cuda-graph external-cuda-graph no-gradient-reduce-div-fusion"
        " disable-bf16-reduced-precision-matmul",
    "threed chooses buckets, overlap and communication itself":
        "no-overlap-p2p-communication overlap-p2p-communication-warmup-flush ddp-num-buckets=N"
        " ddp-pad-buckets-for-high-nccl-busbw ddp-average-in-collective ddp-reduce-scatter-with-fp32-accumulation"
        " no-align-param-gather no-align-grad-reduce disable-align-grad-reduce tp-comm-*"
        " overlap-param-gather-with-optimizer-step defer-embedding-wgrad-compute wgrad-deferral-limit=N"
        " delay-wgrad-compute use-nccl-ub fsdp-double-buffer fsdp-manual-registration megatron-fsdp-*"
        " suggested-communication-unit-size=N high-priority-stream-groups=N… nccl-communicator-config-path=N"
        " microbatch-group-size-per-virtual-pipeline-stage=N use-ring-exchange-p2p",
    "the device determines the backend":
        "distributed-backend=N disable-gloo-process-groups local-rank=N lazy-mpu-init",
    "offload always overlaps with the update, in page-locked memory":
        "overlap-cpu-optimizer-d2h-h2d no-pin-cpu-grads no-pin-cpu-params use-torch-optimizer-for-cpu-offload",
    "the dynamic loss scale begins at 65536 and adapts itself":
        "initial-loss-scale=N min-loss-scale=N loss-scale-window=N hysteresis=N",
    "a step with a loss or gradients that are not finite is skipped on all ranks":
        "no-check-for-nan-in-loss-and-grad",
    "initial values, data order and dropout are functions of the seed": "deterministic-mode",
    "without --data.path, a run reads the source files of Python's standard library": "mock-data",
    "THREED_CACHE sets the folder of caches": "data-cache-path=N",
    "the files of a dataset determine its format": "data-impl=N",
    "samples are read without worker processes":
        "num-workers=N dataloader-type=N no-mmap-bin-files num-dataset-builder-threads=N dataloader-fast-cache-load"
        " dataloader-defer-npy-index-mmap no-create-attention-mask-in-dataloader no-data-sharding"
        " mid-level-dataset-surplus=N",
    "checkpoints always contain the full state, and load in every topology":
        "no-save-optim no-save-rng no-load-rng ckpt-format=N auto-detect-ckpt-format dist-ckpt-* no-ckpt-*"
        " ckpt-assume-constant-structure ckpt-fully-parallel-* async-strategy=N use-persistent-ckpt-worker"
        " async-ckpt-* non-persistent-* replication replication-jump=N replication-factor=N verify-integrity"
        " override-opt-param-scheduler override-opt_param-scheduler use-mp-args-from-checkpoint-args"
        " no-save-tokenizer-assets disable-save-tokenizer-assets ckpt-drop-redundant-extra-state",
    "metrics are written to metrics.jsonl and wandb":
        "tensorboard-* log-* timing-log-* wandb-save-dir=N wandb-entity=N no-one-logger one-logger-*"
        " app-tag-* otel-* logging-level=N no-barrier-with-level-1-timing no-log-loss-scale-to-tensorboard"
        " disable-log-loss-scale-to-tensorboard",
    "log.profile-steps records with torch.profiler":
        "profile-ranks=N… nvtx-ranges record-shapes record-memory-history memory-snapshot-path=N"
        " pytorch-profiler-*",
    "run.recheck-bad-steps computes a skipped step again":
        "rerun-mode=N error-injection-* check-for-spiky-loss check-for-large-grads",
    "garbage collection and memory are managed by threed":
        "manual-gc manual-gc-interval=N no-manual-gc-eval disable-manual-gc-eval empty-unused-memory-level=N"
        " train-sync-interval=N",
    "each rank computes the initial values of its slices":
        "use-cpu-initialization init-model-with-meta-device",
    "the run folder and the watchdog of threed need no settings":
        "enable-ft-package calc-ft-timeouts ft-* flight-recorder-* no-flight-recorder-*"
        " disable-flight-recorder-* straggler-* disable-straggler-on-startup exit-signal=N config-logger-dir=N"
        " exit-signal-handler-for-dataloader exit-signal-handler-for-training",
    "tokens are read from the files, without code from a model repository":
        "trust-remote-code tokenizer-hf-no-use-fast tokenizer-hf-no-include-special-tokens",
    "GELU always has its tanh form": "openai-gelu",
    "norms store their weights without an offset; training is the same": "apply-layernorm-1p",
    "master weights and optimizer states are always fp32": "use-precision-aware-optimizer",
    "it applies only to the options of experts": "no-weight-decay-cond-type=N",
    "experts are not sharded over tensor ranks": "expert-tensor-parallel-size=N",
    "threed chooses the kernels and messages of experts itself":
        "moe-grouped-gemm moe-use-legacy-grouped-gemm moe-token-dispatcher-type=N moe-permute-fusion"
        " moe-router-fusion moe-aux-loss-fusion moe-shared-expert-overlap overlap-moe-expert-parallel-comm",
    "the router always computes in fp32 or wider": "moe-router-dtype=N",
}  # fmt: skip
_CUSTOM = "write a custom model (FILE.py:MODEL)"
_KINDS = f"the built-in models are GPT-2 and Llama with their variants; {_CUSTOM}"
_FP32 = "master weights and optimizer states are fp32"
_STD = f"initial weights have a standard deviation of 0.02; {_CUSTOM}"
# Flags of features that threed does not have, by what to use instead. Names are written as in `_UNUSED`.
_REFUSED: Mapping[str, str] = {
    "add the flags of threed for experts, such as --experts.capacity":
        "moe-* ep-* use-grouped-gemm-* overlap-dispatch-backward-with-experts-wgrad",
    "threed chooses how context ranks communicate, or takes --parallel.cp-heads N; use --context-parallel-size":
        "hierarchical-context-parallel-sizes=N… hybrid-context-parallel cp-comm-type=N… max-seqlen-per-dp-cp-rank=N",
    "attention probabilities have no dropout; use --attention-dropout 0": "attention-dropout=N",
    _STD: "init-method-std=N embedding-init-method-std=N init-method-xavier-uniform",
    f"the activations are GELU (tanh form) and SwiGLU; {_CUSTOM}":
        "squared-relu quick-geglu glu-linear-offset=N activation-func-clamp-value=N",
    "it selects GELU by the error function, and threed has its tanh form; use --openai-gelu": "no-bias-gelu-fusion",
    _KINDS:
        "softmax-type=N apply-residual-connection-post-layernorm qk-l2-norm qk-clip"
        " attention-output-gate rotary-interleaved rotary-seq-len-interpolation-factor=N no-rope-freq=N"
        " window-attn-skip-freq=N apply-query-key-layer-scaling fp32-residual-connection relative-attention-*"
        " yarn-* no-yarn-* rope-type=N mrope-section=N… mscale=N mscale-all-dim=N"
        " rotary-scaling-factor=N multi-latent-attention q-lora-rank=N kv-lora-rank=N qk-head-dim=N"
        " qk-pos-emb-head-dim=N v-head-dim=N cache-mla-latents mla-* linear-* is-hybrid-model hybrid-* heterogeneous-*"
        " spec=* experimental-attention-variant=N mamba-* dsa-* gdp-* enable-mhc-connections mhc-* use-mup mup-*",
    "each layer that predicts a further token has its own weights and the attention of the model": "mtp-*",
    "threed has no fp8 or fp4; use --bf16":
        "fp8-* fp4-* first-last-layers-bf16 num-layers-at-start-in-bf16=N num-layers-at-end-in-bf16=N"
        " te-precision-config-file=N",
    _FP32: "main-grads-dtype=N main-params-dtype=N exp-avg-dtype=N exp-avg-sq-dtype=N",
    "all optimizer states are offloaded, or none": "optimizer-offload-fraction=N",
    "use --recompute-granularity full, and add --recompute.offload cpu to the flags of threed":
        "cpu-offloading-num-layers=N fine-grained-activation-offloading offload-modules=N…"
        " activation-offload-fraction=N",
    "the global batch is constant": "rampup-batch-size=N… step-batch-size-schedule=N decrease-batch-size-if-needed",
    "validation uses the batch sizes of training": "eval-micro-batch-size=N eval-global-batch-size=N",
    "validation reads one part of the data; use --eval-interval and --eval-iters":
        "full-validation multiple-validation-sets validation-set-names=N… start-eval-at-iter=N skip-train",
    "every step is trained": "iterations-to-skip=N… phase-transition-iterations=N",
    "the warm-up begins at 0": "lr-warmup-init=N",
    "all learning rates have one schedule; --decoupled-lr sets the peak": "decoupled-min-lr=N",
    "weight decay is constant; use --weight-decay": "start-weight-decay=N end-weight-decay=N weight-decay-incr-style=N",
    'norms have weight decay only with --optim.groups "*norm*: weight-decay=X"': "apply-wd-to-qk-layernorm",
    "the optimizers are adam, sgd and lion": "muon-*",
    "all parameters of a built-in model are trained": "freeze-all-layers",
    "use --lr-wsd-decay-iters": "lr-wsd-decay-samples=N",
    "use --data-path with --split":
        "train-data-path=N… valid-data-path=N… test-data-path=N… data-args-path=N per-split-data-args-path=N"
        " per-dataset-sequences-path=N",
    "use --reset-position-ids, --reset-attention-mask and --eod-mask-loss": "dataloader-inter-document-masking",
    "use --tokenizer-type HuggingFaceTokenizer, and the folder of a Hugging Face tokenizer as --tokenizer-model":
        "vocab-file=N merge-file=N tokenizer-metadata=N tokenizer-special-tokens=N… tiktoken-* tokenizer-sentencepiece-*"
        " no-tokenizer-* vocab-extra-ids=N",
    "threed trains on plain text":
        "sft sft-* chat-template=N fim-* logits-* perform-rl-step rl-* grpo-* langrl-*",
    "import the weights with `threed convert DIR/iter_N DST --allow-pickle`, and add --checkpoint.resume DST to the"
    " flags of threed":
        "finetune no-load-optim pretrained-checkpoint=N ckpt-step=N use-checkpoint-args exit-on-missing-checkpoint"
        " load-main-params-from-ckpt ckpt-convert-* override-ckpt-iteration=N",
    "shard groups are replicas of each other": "enable-full-sharding-in-hsdp outer-dp-sharding-strategy=N",
    "tensor-parallel ranks have consecutive numbers":
        "use-tp-pp-dp-mapping tensor-parallel-num-weight-shards=N gtp-*",
    "threed only trains; `threed convert` writes a Hugging Face folder":
        "inference-* decode-only-cuda-graphs num-speculative-tokens=N enable-chunked-prefill",
    "torchrun --max-restarts restarts a run, which then resumes": "inprocess-* adlr-autoresume adlr-autoresume-interval=N",
    "give flags": "yaml-cfg=N",
    "use --micro-batch-size": "batch-size=N",
    "use --lr-warmup-fraction": "warmup=N",
    "use --tensor-model-parallel-size": "model-parallel-size=N",
    "threed trains decoders":
        "encoder-* decoder-num-layers=N decoder-seq-length=N vision-* dino-* bert-* ict-* retriever-*",
}  # fmt: skip
# Values with which a flag of `_REFUSED` has no effect.
_HARMLESS: Mapping[str, tuple[str, ...]] = {
    "attention-dropout": ("0", "0.0"), "init-method-std": ("0.02",), "embedding-init-method-std": ("0.02",),
    "softmax-type": ("vanilla",), "main-grads-dtype": ("fp32",), "main-params-dtype": ("fp32",),
    "exp-avg-dtype": ("fp32",), "exp-avg-sq-dtype": ("fp32",), "optimizer-offload-fraction": ("1", "1.0"),
    "cpu-offloading-num-layers": ("0",), "lr-warmup-init": ("0", "0.0"), "weight-decay-incr-style": ("constant",),
    "outer-dp-sharding-strategy": ("no_shard",), "rope-type": ("rope",),
}  # fmt: skip


def _listed(names: str) -> Iterator[tuple[str, str]]:
    """Yields the name and the number of values of each flag in a text such as "a b=N c-*"."""
    for word in names.split():
        name, _, values = word.partition("=")
        yield name, "*" if name.endswith("*") else values


def _build() -> Iterator[Flag]:
    for name, (key, value) in _KEYS.items():
        if isinstance(value, str):
            yield Flag(name, "key", "N", (key,), form=value)
        else:
            yield Flag(name, "key", "N", (key,), words=value)
    for name, (key, value) in _SWITCHES.items():
        yield Flag(name, "key", "", (key,), form=value)
    for keys, names in _COMBINED.items():
        for name, values in _listed(names):
            yield Flag(name, "combined", values, tuple(keys.split()))
    for reason, names in _UNUSED.items():
        for name, values in _listed(names):
            yield Flag(name, "unused", values, text=reason)
    for reason, names in _REFUSED.items():
        for name, values in _listed(names):
            yield Flag(name, "refused", values, text=reason, allowed=_HARMLESS.get(name, ()))


FLAGS: Mapping[str, Flag] = {flag.name: flag for flag in _build()}
"""All flags, by name."""
ARCHITECTURES: Mapping[tuple[str, str, bool], str] = {
    ("RMSNorm", "rope", True): "llama",
    ("LayerNorm", "learned_absolute", False): "gpt",
}
"""The supported models: (normalization, position embedding type, whether the MLP is SwiGLU)."""
LLAMA3_SCALING: Mapping[str, object] = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""The settings of `--use-rope-scaling`, apart from the factor."""


def find(name: str) -> Flag | None:
    """Returns the record of a flag, or None if the table has no such flag.

    Args:
        name: the flag without its hyphens.
    """
    if name in FLAGS:
        return FLAGS[name]
    starts = [flag for flag in FLAGS.values() if flag.name.endswith("*")]
    found = [flag for flag in starts if name.startswith(flag.name[:-1]) and name != flag.name]
    return max(found, key=lambda flag: len(flag.name), default=None)
