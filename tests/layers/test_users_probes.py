"""What goes wrong easily in models of one's own: right in every topology, or refused by name before the first step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from tests import users_layers as own
from tests.configs import share
from tests.harness import run_ranks
from tests.layers.test_users_models import TOLERANCE
from tests.users_cases import STEPS, Case, batch, engine_of
from tests.users_layers import STD, WORD, whole
from tests.users_models import Decoder, MiddleLosses
from tests.users_torch import TorchModules
from tests.users_truths import Batch
from threed import layers
from threed.distributed import conjugate
from threed.distributed.collectives import split
from threed.distributed.sharding import Init, Piece, ShardSpec, parameter, vector
from threed.layers import MicroBatch, Slicing
from threed.zero.step_metrics import DataError

# ------------------------------------------------------------------------------------------------------------- refused


class Plain(Decoder):
    """Nothing special: embedding, two blocks, a tied head."""

    def layers(self) -> list[nn.Module]:
        return [self.embedding(), self.block("blocks.0"), self.block("blocks.1"), self.head()]


class OtherStd(Plain):
    """A tied weight that begins otherwise at its other place."""

    def embedding(self) -> layers.Embedding:
        return layers.Embedding("embedding", self.vocab, self.hidden, self.slicing, std=STD / 2)


class OtherDecay(Plain):
    """A tied weight that decays at one place only."""

    def layers(self) -> list[nn.Module]:
        found = super().layers()
        table = found[0].word.weight
        table.spec = replace(table.spec, decay=False)
        return found


class FrozenTiedOne(Plain):
    """A tied weight that is frozen at one place only."""

    def layers(self) -> list[nn.Module]:
        found = super().layers()
        found[0].requires_grad_(False)
        return found


class OtherShape(Plain):
    """Two layers that share a name, and disagree about the shape."""

    def layers(self) -> list[nn.Module]:
        found = super().layers()
        shapes = ((self.hidden, 2), (2, self.hidden))
        for layer, shape in zip(found[1:3], shapes, strict=True):
            layer.extra = whole("blocks.extra", shape, self.slicing)
        return found


class OneNameTwice(Plain):
    """Two norms of one layer with the same name, copied by mistake."""

    def block(self, name: str, width: int | None = None) -> layers.Block:
        found = super().block(name, width)
        found.mlp_norm = self.norm(f"{name}.attention_norm")
        return found


class NoRecord(Plain):
    """A parameter of torch's own, which nobody cut or named."""

    def layers(self) -> list[nn.Module]:
        found = super().layers()
        found[1].scale = nn.Linear(self.hidden, self.hidden, device="meta")
        return found


class ForgottenAxis(Plain):
    """Layers that were not told of the tensor-parallel axis."""

    def __init__(self, config: object, slicing: Slicing) -> None:
        super().__init__(config, Slicing())  # type: ignore[arg-type]


class HalfForgotten(Plain):
    """One layer that was not told of it."""

    def block(self, name: str, width: int | None = None) -> layers.Block:
        found = super().block(name, width)
        found.mlp = layers.MLP(
            f"{name}.mlp", self.hidden, 2 * self.hidden, Slicing(), std=STD, out_std=STD
        )
        return found


class NotMarked(Plain):
    """A weight that all tensor ranks hold whole, without saying so."""

    def layers(self) -> list[nn.Module]:
        found = super().layers()
        piece = Piece("blocks.extra", (self.hidden,), (0,), (self.hidden,))
        found[1].extra = parameter(ShardSpec((piece,)), (self.hidden,))
        return found


class Hooked(Plain):
    """A weight with a hook on its gradient."""

    def layers(self) -> list[nn.Module]:
        found = super().layers()
        next(found[2].parameters()).register_hook(lambda gradient: gradient / 2)
        return found


REFUSED: dict[str, tuple[type[Decoder], Case, list[str]]] = {
    "other std": (OtherStd, Case("albert", pp=2), [WORD, "initial values"]),
    "other decay": (OtherDecay, Case("albert", pp=2), [WORD, "decay"]),
    "frozen at one place": (FrozenTiedOne, Case("albert", pp=2), [WORD, "requires_grad"]),
    "frozen at one place of a rank": (
        FrozenTiedOne,
        Case("albert", dp=2, zero=3),
        [WORD, "requires_grad"],
    ),
    "other shape": (OtherShape, Case("albert", pp=2), ["blocks.extra", "shape"]),
    "one name twice": (
        OneNameTwice,
        Case("albert", dp=2),
        ["blocks.0.attention_norm.weight", "mlp_norm.weight"],
    ),
    "no record": (NoRecord, Case("albert", dp=2), ["blocks.0", "scale.weight"]),
    "forgotten axis": (ForgottenAxis, Case("albert", tp=2), ["Slicing", "topology.axis('tp')"]),
    "forgotten in a layer": (
        HalfForgotten,
        Case("albert", tp=2),
        ["blocks.0.mlp.up.weight", "tensor ranks"],
    ),
    "not marked as replicated": (NotMarked, Case("albert", tp=2), ["blocks.extra", "replicated"]),
    "hook on a gradient": (
        Hooked,
        Case("albert", pp=2),
        ["blocks.1", "parameter", "has a gradient hook"],
    ),
}


def refusal(case: Case, model: type[Decoder]) -> tuple[str, str]:
    """How the engine refuses a model: the exception's name and message."""
    try:
        engine_of(case, model)
    except ValueError as error:
        return type(error).__name__, str(error)
    return "", "not refused"


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_right_is_refused_by_name_on_every_rank(name: str) -> None:
    model, case, words = REFUSED[name]
    for kind, message in run_ranks(case.world, refusal, case, model, timeout=60):
        assert kind == "ModelError", message
        assert all(word in message for word in words), message


# -------------------------------------------------------------------------------------------------------------- agrees


class FrozenTied(Plain):
    """A tied weight that is frozen at both places."""

    def layers(self) -> list[nn.Module]:
        found = super().layers()
        found[0].requires_grad_(False)
        found[-1].weight.requires_grad_(False)
        return found


class Identity(nn.Module):
    """A layer without parameters."""

    name = "identity"

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        return x


class Skipped(nn.Module):
    """A layer that some micro-batches skip, as their tokens have it."""

    runs_vary = True

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.name, self.layer = layer.name, layer

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        assert micro.tokens is not None
        return self.layer(x, micro) if int(micro.tokens[0, 0]) % 2 else x


class Odd(Decoder):
    """Layers that do nothing, weights that are never used, and layers that are not always."""

    def layers(self) -> list[nn.Module]:
        blocks = [Skipped(self.block(f"blocks.{i}")) for i in range(2)]
        blocks[0].unused = whole("unused", (3, self.hidden), self.slicing)
        return [self.embedding(), Identity(), blocks[0], Identity(), blocks[1], self.head()]


class Shapes(nn.Module):
    """Parameters without a dimension, of one element, and of three odd dimensions."""

    def __init__(self, name: str, norm: nn.Module, slicing: Slicing) -> None:
        super().__init__()
        self.name, self.norm = name, norm
        spec = ShardSpec(
            (Piece(f"{name}.scale", (), (), (), init=Init(value=0.7)),),
            slicing.replicated,
            slicing.partial,
            decay=False,
        )
        self.scale = parameter(spec, ())
        spec = ShardSpec(
            (vector(f"{name}.one", 1, value=0.5),), slicing.replicated, slicing.partial
        )
        self.one = parameter(spec, (1,))
        self.cube = whole(f"{name}.cube", (3, 5, 7), slicing)

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        return x + self.norm(x) * self.scale * self.one + self.cube.square().mean() * x


class OddShapes(Decoder):
    """Parameters of shapes that nobody expects."""

    def layers(self) -> list[nn.Module]:
        shapes = [
            Shapes(f"shapes.{i}", self.norm(f"shapes.{i}.norm"), self.slicing) for i in range(2)
        ]
        return [self.embedding(), shapes[0], self.block("blocks.0"), shapes[1], self.head()]


class TwoInTurn(Decoder):
    """Two shared linear layers in turn, which stages hold in another order: A B A | B A."""

    letters = "ababa"

    def layers(self) -> list[nn.Module]:
        found = [
            own.Gate(
                f"shared.{letter}", self.norm(f"shared.{letter}.norm"), self.hidden, self.slicing
            )
            for letter in self.letters
        ]
        return [self.embedding(), *found, self.head("head.weight")]


class Features(nn.Module):
    """x + down(silu(up(x) + the features of the layer before)), which passes on features times a gain: each tensor rank
    its own; or, `alike`, x times a gain."""

    def __init__(
        self, name: str, norm: nn.Module, hidden: int, slicing: Slicing, gain: float, alike: bool
    ) -> None:
        super().__init__()
        self.name, self.norm, self.slicing, self.alike = name, norm, slicing, alike
        self.up = layers.ColumnLinear(name, hidden, [("up", 2 * hidden)], slicing, std=STD)
        self.down = layers.RowLinear(f"{name}.down", 2 * hidden, hidden, slicing, std=STD)
        first, last = split(2 * hidden, slicing.tp.size, slicing.tp.index)
        piece = Piece(
            f"{name}.gain", (2 * hidden,), (first,), (last - first,), init=Init(value=gain)
        )
        self.gain = parameter(ShardSpec((piece,)), (last - first,))

    def forward(
        self, given: Tensor | tuple[Tensor, Tensor], micro: MicroBatch
    ) -> tuple[Tensor, Tensor]:
        x, before = given if isinstance(given, tuple) else (given, given.new_zeros(()))
        y = self.up(self.norm(x)) + before
        passed = self.slicing.gather(x)[..., : len(self.gain)] if self.alike else y
        return x + self.down(F.silu(y)), passed * self.gain


class PerRank(Decoder):
    """Layers that hand on a part per tensor rank."""

    gain, alike = 1.0, False

    def layers(self) -> list[nn.Module]:
        made = [
            Features(
                f"blocks.{i}",
                self.norm(f"blocks.{i}.norm"),
                self.hidden,
                self.slicing,
                self.gain,
                self.alike,
            )
            for i in range(3)
        ]
        return [self.embedding(), *made, own.Before(lambda given: given[0], self.head())]


class PerRankLater(PerRank):
    """The same; the parts are zero before the first update."""

    gain = 0.0


class AlikeAtFirst(PerRank):
    """The parts are the same on two tensor ranks before the first update."""

    alike = True


class ThreeInTurn(TwoInTurn):
    """Of several chunks, one stage has some of these in the same ones, and another has not: A B | C A | B C."""

    letters = "abcabc"


class Rebuilt(nn.Module):
    """The squared error of patches that are made anew from x: a loss without labels, [n b h] -> a scalar."""

    name = "head"

    def __init__(self, hidden: int, slicing: Slicing) -> None:
        super().__init__()
        self.slicing = slicing
        self.weight = whole("head.weight", (own.CHANNELS * own.PATCH**2, hidden), slicing)

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        assert micro.inputs is not None
        pixels = rearrange(
            micro.inputs["pixels"], "b c (i p) (j q) -> (i j) b (c p q)", p=own.PATCH, q=own.PATCH
        )
        pixels = self.slicing.positions(len(pixels)).rows(pixels)
        error = (F.linear(x, self.weight) - pixels).square().sum()
        if self.slicing.sequence_parallel:
            error = conjugate.reduce_from(error, self.slicing.tp)
        return error if micro.weight is None else error * micro.weight.to(error.dtype)


class Autoencoder(Decoder):
    """A batch of pixels alone: the loss is the mean over rows."""

    def layers(self) -> list[nn.Module]:
        patches = own.Patches(self.hidden, self.config.seq, self.slicing)
        encoder = own.Encoder("blocks.0", self.hidden, self.config.heads, self.slicing)
        return [patches, encoder, Rebuilt(self.hidden, self.slicing)]


def without_labels(case: Case, step: int) -> Batch:
    """Pixels alone."""
    return {"pixels": batch("vision", step)["pixels"]}


def usual(case: Case, step: int) -> Batch:
    """The batches of the covering set."""
    return batch(case.model, step)


def of_changing_length(case: Case, step: int) -> Batch:
    """Shorter ones from step to step."""
    return {key: value[:, : 8 - 2 * step] for key, value in batch(case.model, step).items()}


Batches = Callable[[Case, int], Batch]
AGREES: dict[str, tuple[type[Decoder], Batches, list[Case]]] = {
    "a frozen tied weight": (FrozenTied, usual, [Case("albert", pp=2, dp=2, zero=3), Case("albert", tp=2, zero=1)]),
    "unused weights and skipped layers": (
        Odd, usual,
        [
            Case("albert", pp=2, microbatches=3, schedule="gpipe"), Case("albert", pp=3, recompute="full"),
            Case("albert", pp=2, dp=2, zero=3, offload="nvme"), Case("albert", tp=2, dp=2, zero=2, sequence=True),
        ],
    ),
    "odd shapes": (
        OddShapes, usual,
        [
            Case("albert", dp=2, zero=3, bucket_mib=0.0005), Case("albert", pp=2, tp=2, sequence=True),
            Case("albert", dp=2, tp=2, zero=2, offload="nvme", bucket_mib=0.0005),
        ],
    ),
    "shared layers in turn": (
        TwoInTurn, usual,
        [
            Case("a-b-a-b-a", pp=2, partition="explicit"), Case("a-b-a-b-a", pp=2, partition="uniform"),
            Case("a-b-a-b-a", pp=3, dp=2, zero=3, partition="uniform"),
            *(
                Case("a-b-a-b-a", pp=2, schedule=name, partition=how, microbatches=6)
                for name in ("interleaved", "zb-v", "dualpipev") for how in ("balanced", "uniform")
            ),
            Case("a-b-a-b-a", pp=2, dp=2, zero=3, schedule="interleaved", partition="uniform", microbatches=3),
        ],
    ),
    "three shared layers in turn": (
        ThreeInTurn, usual,
        [
            *(
                Case("a-b-a-b-a", pp=2, schedule=name, partition=how, microbatches=6)
                for name in ("interleaved", "zb-v", "v-half", "zb-auto", "dualpipev") for how in ("balanced", "uniform")
            ),
            Case("a-b-a-b-a", pp=2, dp=2, zero=2, schedule="zb-v", microbatches=3, offload="cpu"),
            Case("a-b-a-b-a", pp=2, dp=2, zero=3, schedule="v-min", partition="uniform", microbatches=3),
        ],
    ),
    "a part per tensor rank between layers": (
        PerRank, usual,
        [
            Case("albert", tp=2, recompute="sliced"), Case("albert", tp=3, recompute="sliced", microbatches=3),
            Case("albert", pp=2, tp=2, recompute="sliced", schedule="zb-v", microbatches=6),
        ],
    ),
    "a part per tensor rank that begins as zeros": (
        PerRankLater, usual, [Case("albert", tp=2, recompute="sliced"), Case("albert", tp=2, recompute="full")],
    ),
    "losses in middle layers": (
        MiddleLosses, usual,
        [
            *(
                Case("middle-losses", pp=2, schedule=name, microbatches=6, recompute=how)
                for name, how in (
                    ("interleaved", "none"), ("zb-v", "full"), ("dualpipe", "selective"), ("dualpipev", "none"),
                    ("chimera", "full"), ("zb-auto", "none"),
                )
            ),
            Case("middle-losses", pp=2, dp=2, zero=3, schedule="v-half", microbatches=3),
        ],
    ),
    "a batch without labels": (
        Autoencoder, without_labels,
        [Case("vision", pp=2, microbatches=3), Case("vision", dp=2, tp=2, zero=3), Case("vision", tp=2, sequence=True)],
    ),
    "modules of torch's own": (
        TorchModules, usual,
        [
            Case("albert", pp=2, microbatches=3, schedule="zb-h1"),
            Case("albert", pp=2, microbatches=6, schedule="dualpipe", recompute="full"),
            Case("albert", pp=2, dp=2, zero=3, microbatches=3, schedule="zb-v"),
        ],
    ),
    "lengths that change": (
        Plain, of_changing_length,
        [Case("albert", pp=2, dp=2, zero=3, recompute="full"), Case("albert", pp=2, tp=2, recompute="sliced")],
    ),
}  # fmt: skip


Trained = tuple[list[float], list[float], dict[str, Tensor]]


def trained(case: Case, model: type[Decoder], batches: Batches) -> Trained:
    """Losses, norms and weights of a few steps."""
    engine = engine_of(case, model)
    metrics = [engine.step(share(batches(case, step), engine.topology)) for step in range(STEPS)]
    return [m.loss for m in metrics], [m.grad_norm for m in metrics], engine.full_state_dict()


def whole_batch_of(case: Case) -> Case:
    """The same on one process, cut into the same micro-batches: a layer may ask which one it sees."""
    return Case(case.model, microbatches=case.microbatches * case.dp)


def differences(
    case: Case, model: type[Decoder], batches: Batches, truth: Trained
) -> Iterator[str]:
    losses, norms, weights = trained(case, model, batches)
    if weights:
        if losses != pytest.approx(truth[0], rel=TOLERANCE) or norms != pytest.approx(
            truth[1], rel=TOLERANCE
        ):
            yield f"{losses} {norms}, should be {truth[:2]}"
        assert weights.keys() == truth[2].keys()
        yield from (
            name
            for name, want in truth[2].items()
            if not (weights[name] - want).abs().max() <= TOLERANCE
        )


def run_cases(
    cases: list[Case], model: type[Decoder], batches: Batches, truths: dict[Case, Trained]
) -> list[str]:
    """What differs, case by case."""
    return [
        f"{case}: {wrong}"
        for case in cases
        for wrong in differences(case, model, batches, truths[whole_batch_of(case)])
    ]


def find_truths(cases: list[Case], model: type[Decoder], batches: Batches) -> dict[Case, Trained]:
    """What one process gives."""
    return {case: trained(case, model, batches) for case in cases}


def everyday(name: str) -> list[Case]:
    """Every third case of a model."""
    return AGREES[name][2][::3]


def others() -> Iterator[Any]:
    """The parameters of the cases that run in the grid."""
    for name, (_, _, cases) in AGREES.items():
        if rest := [case for case in cases if case not in everyday(name)]:
            yield pytest.param(name, rest, marks=pytest.mark.grid, id=f"{name}-others")


@pytest.mark.seldom("three shared layers*", "a part per tensor rank that begins*", "odd shapes")
@pytest.mark.parametrize(
    ("name", "cases"),
    [*(pytest.param(name, everyday(name), id=name) for name in AGREES), *others()],
)
def test_an_unusual_model_is_right_in_every_topology(name: str, cases: list[Case]) -> None:
    """As on one process: the parts are those of the models that equal plain PyTorch."""
    model, batches, _ = AGREES[name]
    (truths,) = run_ranks(
        1, find_truths, list({whole_batch_of(case) for case in cases}), model, batches
    )
    for world in sorted({case.world for case in cases}):
        mine = [case for case in cases if case.world == world]
        assert not run_ranks(world, run_cases, mine, model, batches, truths, timeout=60)[0]


def alike_at_first() -> list[str]:
    """What the metrics of each step say where a sliced input stops to be the same on all tensor ranks."""
    engine, said = engine_of(Case("albert", tp=2, recompute="sliced"), AlikeAtFirst), []
    for step in range(3):
        try:
            said.append(f"{engine.step(share(batch('albert', step), engine.topology)).loss:.0f}")
        except DataError as error:
            said.append(str(error))
    return said


def test_sliced_inputs_that_stop_to_be_the_same_on_tensor_ranks_are_found() -> None:
    for first, *later in run_ranks(2, alike_at_first, timeout=60):
        assert first.isdigit()
        assert all("--recompute.partition true cannot slice them" in text for text in later)


def inferred(case: Case) -> tuple[float, float]:
    """An evaluation under inference mode, and a step after it."""
    engine = engine_of(case, Plain)
    with torch.inference_mode():
        evaluated = float(engine.evaluate(share(batch("albert", 0), engine.topology)))
    return evaluated, engine.step(share(batch("albert", 0), engine.topology)).loss


def test_a_step_after_an_evaluation_under_inference_mode() -> None:
    for evaluated, loss in run_ranks(2, inferred, Case("albert", pp=2), timeout=60):
        assert evaluated == pytest.approx(loss, rel=TOLERANCE)


def stepped(case: Case, kind: str) -> str:
    """What a step says about a batch that cannot be."""
    engine = engine_of(case, Plain)
    index = engine.topology.axis("dp").index
    given = share(batch("albert", 0), engine.topology)
    if kind == "rows":  # 6 and 9 where 3 are due
        given = {key: torch.cat([value] * (2 + index)) for key, value in given.items()}
    else:
        given[kind] = given[kind].clone()
        given[kind][0, 0] = 53
    try:
        _ = engine.step(given).loss  # ids are found out where the step reads nothing, and told here
    except (ValueError, IndexError) as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("rows", ["data rank", "rows"]),
        ("tokens", ["ids beyond the 53"]),
        ("labels", ["labels beyond the 53"]),
    ],
)
def test_a_batch_that_cannot_be_is_refused_by_name(kind: str, words: list[str]) -> None:
    """Other numbers of rows on data ranks; ids beyond the vocabulary."""
    for message in run_ranks(2, stepped, Case("albert", dp=2), kind, timeout=60):
        assert all(word in message for word in words), message
