"""Models written as users write them; each docstring states what is difficult about the model.

    model = MODELS["albert"](config.model, slicing)

The same models in plain PyTorch are in `tests/users_truths.py`.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from tests import users_layers as own
from tests.users_layers import STD, WORD
from threed import layers
from threed.config import ModelConfig
from threed.layers import Slicing


class Decoder:
    """The base of the models below: embedding, blocks, head."""

    def __init__(self, config: ModelConfig, slicing: Slicing) -> None:
        self.config, self.slicing, self.hidden = config, slicing, config.hidden
        self.vocab = config.vocab or 0

    def layers(self) -> list[nn.Module]:
        """Returns the pipeline layers, in order."""
        raise NotImplementedError

    def costs(self, micro_batch: int) -> list[float]:
        """Returns costs of the layers; the first and the last layer cost more than the others."""
        return [1.5, *[1.0] * (len(self.layers()) - 2), 2.5]

    def embedding(self) -> layers.Embedding:
        return layers.Embedding("embedding", self.vocab, self.hidden, self.slicing, std=STD)

    def norm(self, name: str, width: int | None = None) -> layers.RMSNorm:
        return layers.RMSNorm(name, width or self.hidden, self.slicing)

    def block(self, name: str, width: int | None = None) -> layers.Block:
        """Returns a block; its head size does not depend on its width."""
        h, slicing = width or self.hidden, self.slicing
        heads = self.config.heads * h // self.hidden
        norms = (self.norm(f"{name}.attention_norm", h), self.norm(f"{name}.mlp_norm", h))
        attention = layers.Attention(
            f"{name}.attention", h, heads, slicing, rotary=1e4, std=STD, out_std=STD
        )
        mlp = layers.MLP(f"{name}.mlp", h, 2 * h, slicing, std=STD, out_std=STD)
        return layers.Block(name, norms, attention, mlp, slicing)

    def head(self, weight: str = WORD, width: int | None = None) -> layers.LanguageModelHead:
        h = width or self.hidden
        return layers.LanguageModelHead(
            "head", weight, self.norm("head.norm", h), self.vocab, h, self.slicing, std=STD
        )


class TwoTies(Decoder):
    """A word table and a projection, both tied between the first and the last layer.

    So ALBERT factorizes them (arXiv 1909.11942).
    """

    def layers(self) -> list[nn.Module]:
        e = self.hidden // 2
        word = layers.VocabEmbedding("embedding.word", self.vocab, e, self.slicing, std=STD)
        first, last = (
            own.whole("embedding.up.weight", (self.hidden, e), self.slicing) for _ in range(2)
        )
        ends = own.FactorizedEmbedding(word, first), own.FactorizedHead(last, self.head(width=e))
        return [ends[0], self.block("blocks.0"), self.block("blocks.1"), ends[1]]


class ThreeWayTie(Decoder):
    """One matrix in the first, the middle and the last layer; with pp 3, on all stages."""

    def layers(self) -> list[nn.Module]:
        memory = own.WordMemory(
            "memory", self.norm("memory.norm"), self.vocab, self.hidden, self.slicing
        )
        return [
            self.embedding(),
            self.block("blocks.0"),
            memory,
            self.block("blocks.1"),
            self.head(),
        ]


class Albert(Decoder):
    """One block that is shared by all depths, and a tied head."""

    def layers(self) -> list[nn.Module]:
        return [self.embedding(), *(self.block("shared") for _ in range(3)), self.head()]


class Alternating(Decoder):
    """Two blocks that alternate: A B A B A."""

    def layers(self) -> list[nn.Module]:
        return [
            self.embedding(),
            *(self.block(f"shared.{letter}") for letter in "ababa"),
            self.head("head.weight"),
        ]


class UsedTwice(Decoder):
    """A layer that runs its block three times, and a layer object that is in the list twice."""

    def layers(self) -> list[nn.Module]:
        twice = self.block("twice")
        return [
            self.embedding(),
            twice,
            own.Universal(self.block("universal")),
            twice,
            self.head("head.weight"),
        ]


class FrozenEmbedding(Decoder):
    """Embedding and first block are frozen, so the first stage may have nothing to train."""

    def layers(self) -> list[nn.Module]:
        blocks = [self.block(f"blocks.{i}") for i in range(2)]
        found: list[nn.Module] = [self.embedding(), *blocks, self.head("head.weight")]
        for layer in found[:2]:
            layer.requires_grad_(False)
        return found


class FrozenMiddle(Decoder):
    """A frozen block between trained ones, and a half-frozen next block; the head is tied."""

    def layers(self) -> list[nn.Module]:
        blocks = [self.block(f"blocks.{i}") for i in range(3)]
        blocks[1].requires_grad_(False)
        blocks[2].mlp.requires_grad_(False)
        return [self.embedding(), *blocks, self.head()]


class Kernels(Decoder):
    """Parameters of three dimensions: replicated, split along the second, and along the first."""

    def layers(self) -> list[nn.Module]:
        parts = {"gate": own.Gate, "convolution": own.Convolution, "stacked": own.Stacked}
        made = (
            kind(name, self.norm(f"{name}.norm"), self.hidden, self.slicing)
            for name, kind in parts.items()
        )
        return [self.embedding(), *made, self.head()]


class Buffers(Decoder):
    """Persistent buffers that training changes and evaluation reads, and one not persistent."""

    def layers(self) -> list[nn.Module]:
        running = (
            own.Running(
                f"running.{i}",
                self.norm(f"running.{i}.norm"),
                self.hidden,
                self.config.seq,
                self.slicing,
            )
            for i in range(2)
        )
        return [self.embedding(), next(running), self.block("blocks.0"), next(running), self.head()]


class Residual32(Decoder):
    """bf16 weights, and an fp32 residual stream between layers."""

    def layers(self) -> list[nn.Module]:
        blocks = [own.WideResidual(self.block(f"blocks.{i}")) for i in range(3)]
        return [self.embedding(), *blocks, own.Before(Tensor.bfloat16, self.head(), separate=True)]


class Cast(Decoder):
    """An fp32 tensor between layers of an fp64 model."""

    def layers(self) -> list[nn.Module]:
        before, after = (functools.partial(kind, separate=True) for kind in (own.Before, own.After))
        blocks = [
            before(Tensor.double, after(Tensor.float, self.block(f"blocks.{i}"))) for i in range(2)
        ]
        return [self.embedding(), *blocks, before(Tensor.double, self.head())]


class Hourglass(Decoder):
    """Tensors between layers that have first half the width, then half the length."""

    def layers(self) -> list[nn.Module]:
        half = self.hidden // 2
        after = functools.partial(own.After, separate=True)
        narrow = after(lambda x: x[..., :half].contiguous(), self.block("blocks.0"))
        widen = after(lambda x: torch.cat((x, x.square()), -1), self.block("blocks.1", half))
        short = own.Before(own.pool, self.block("blocks.2"))
        return [
            self.embedding(),
            narrow,
            widen,
            short,
            own.Before(own.stretch, self.head("head.weight")),
        ]


class LatentAttention(Decoder):
    """Attention with a latent vector, like DeepSeek's."""

    def layers(self) -> list[nn.Module]:
        latents = [
            own.Latent(f"latent.{i}", self.hidden, self.config.heads, self.slicing)
            for i in range(2)
        ]
        return [self.embedding(), latents[0], self.block("blocks.0"), latents[1], self.head()]


class TwoTensors(Decoder):
    """Three tensors between layers, one of them of integers.

    Later there are two tensors: one is wide at first, and then short.
    """

    def layers(self) -> list[nn.Module]:
        word = functools.partial(
            layers.VocabEmbedding, vocab=self.vocab, hidden=self.hidden, slicing=self.slicing
        )
        first = own.Sources(word("embedding.word", std=STD))
        value = own.ValueEmbedding(word("value.word", std=STD))
        blocks = [own.Passing(self.block(f"blocks.{i}")) for i in range(2)]
        return [
            first,
            blocks[0],
            value,
            blocks[1],
            own.Join(self.head(), self.hidden, self.slicing),
        ]


class MiddleLosses(Decoder):
    """Losses in middle layers: two early exits and a penalty.

    One exit uses the tied head, the other its own head.
    """

    def layers(self) -> list[nn.Module]:
        blocks = [self.block(f"blocks.{i}") for i in range(3)]
        heads = [self.exit("exit.0", WORD), None, self.exit("exit.1", "exit.1.weight")]
        supervised = [
            own.Supervised(b, self.slicing, h) for b, h in zip(blocks, heads, strict=True)
        ]
        return [self.embedding(), *supervised, own.WithLosses(self.head())]

    def exit(self, name: str, weight: str) -> layers.LanguageModelHead:
        norm = self.norm(f"{name}.norm")
        return layers.LanguageModelHead(
            name, weight, norm, self.vocab, self.hidden, self.slicing, std=STD
        )


class Vision(Decoder):
    """A vision transformer: pixels instead of tokens, and one label per image.

    One parameter has four dimensions.
    """

    def layers(self) -> list[nn.Module]:
        blocks = [
            own.Encoder(f"blocks.{i}", self.hidden, self.config.heads, self.slicing)
            for i in range(2)
        ]
        patches = own.Patches(self.hidden, self.config.seq, self.slicing)
        return [patches, *blocks, own.Classifier(self.hidden, self.slicing)]


MODELS: dict[str, type[Decoder]] = {
    "two-ties": TwoTies,
    "three-way-tie": ThreeWayTie,
    "albert": Albert,
    "a-b-a-b-a": Alternating,
    "used-twice": UsedTwice,
    "frozen-embedding": FrozenEmbedding,
    "frozen-middle": FrozenMiddle,
    "kernels": Kernels,
    "buffers": Buffers,
    "residual-32": Residual32,
    "cast": Cast,
    "hourglass": Hourglass,
    "latent": LatentAttention,
    "two-tensors": TwoTensors,
    "middle-losses": MiddleLosses,
    "vision": Vision,
}
