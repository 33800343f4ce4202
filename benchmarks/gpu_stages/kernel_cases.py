"""Every kernel of csrc/cuda as a case of `kernels.py`: inputs, bytes, and implementations.

A side is one implementation: a function of the case's inputs that prepares a computation and
returns the function to time, which returns the results to compare. A side may overwrite its inputs;
comparisons pass copies. Plain sides use plain PyTorch, and also compute the expected results in
fp64. A computation in place continues with its own results in the next run; its values stay in a
normal range.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from threed.layers.routing import LossFactors, Routing, rule_of
from threed.ops import (
    activation,
    adam,
    cross_entropy,
    dropout,
    head_norm,
    lion,
    norm,
    quantize,
    rotary,
    router,
    sums,
)  # fmt: skip
from threed.ops.positions import Positions
from threed.ops.update import StepScalars

Results = tuple[Tensor | None, ...]
Side = Callable[..., Callable[[], Results]]
Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
EPS, THETA = 1e-5, 1e4


@dataclass(frozen=True)
class Sizes:
    """Sizes of the inputs.

    Attributes:
        rows: rows of an activation.
        sequences: number of sequences in them.
        h: width of an activation.
        f: features of the MLP.
        v: size of the vocabulary.
        d: head size.
        n: number of parameters.
        blocks: number of blocks of 256 elements.
    """

    rows: int
    sequences: int
    h: int
    f: int
    v: int
    d: int
    n: int
    blocks: int


LARGE = Sizes(8192, 4, 2048, 8192, 50304, 128, 1 << 26, 1 << 18)  # GPT 1.3B, four sequences of 2048
SMALL = Sizes(70, 2, 64, 128, 512, 32, 4096, 16)


@dataclass(frozen=True)
class Case:
    """A kernel with its inputs and implementations.

    Attributes:
        name: name of the case.
        kernels: launchers of csrc/cuda that it starts.
        nbytes: bytes that threed's kernel has to read and write.
        inputs: the inputs.
        ours: threed's side.
        plain: returns the plain side; its argument is a function that compiles, or one that returns
            its argument.
        others: further sides, by name.
        truth: the side with the expected results; by default the plain side in fp64.
        comparable: whether plain sides compute the same results.
        seen: returns the part of the results to compare.
    """

    name: str
    kernels: tuple[str, ...]
    nbytes: int
    inputs: tuple[Any, ...]
    ours: Side
    plain: Callable[[Compile], Side]
    others: dict[str, Callable[[], Side]] = field(default_factory=dict)
    truth: Side | None = None
    comparable: bool = True
    seen: Callable[[Results], Results] = lambda results: results


def bf16(*shape: int, device: torch.device, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*shape, device=device)).bfloat16()


def call(function: Callable[..., Any]) -> Callable[[Compile], Side]:
    """Returns a side that calls a function of the inputs, compiled or not."""

    def made(compiled: Compile) -> Side:
        work = compiled(function)
        return lambda *inputs: lambda: _tuple(work(*inputs))

    return made


def gradient_of(function: Callable[..., Any], gradients: int) -> Callable[[Compile], Side]:
    """Returns a side that computes gradients.

    The first `gradients` inputs are gradients of the outputs, the others are the arguments.
    """

    def made(compiled: Compile) -> Side:
        work = compiled(function)

        def prepare(*inputs: Tensor) -> Callable[[], Results]:
            given = inputs[:gradients]
            leaves = [x.detach().requires_grad_() for x in inputs[gradients:]]
            outputs = _tuple(work(*leaves))
            return lambda: torch.autograd.grad(outputs, leaves, given, retain_graph=True)

        return prepare

    return made


def _tuple(results: Any) -> Any:
    return results if isinstance(results, tuple) else (results,)


def liger(name: str) -> Callable[..., Any]:
    """Returns a function of Liger; raises ImportError if it is not installed."""
    from liger_kernel.transformers import functional  # type: ignore[import-not-found]

    return getattr(functional, name)


# --------------------------------------------------------------------------------------------------------------- cases


def cross_entropies(s: Sizes, device: torch.device) -> list[Case]:
    """Returns the cases of losses and of the gradient of their weighted sum."""
    logits = bf16(s.rows, s.v, device=device, scale=3.0)
    targets = torch.randint(s.v, (s.rows,), device=device)
    weight = torch.tensor(1 / s.rows, device=device)

    def losses(x: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(x if x.dtype == torch.float64 else x.float(), t, reduction="none")

    def plain(compiled: Compile) -> Side:
        work = compiled(losses)

        def prepare(x: Tensor, t: Tensor, w: Tensor) -> Callable[[], Results]:
            leaf = x.detach().requires_grad_()

            def both() -> Results:
                found = work(leaf, t)
                (dx,) = torch.autograd.grad(found, leaf, w.to(found.dtype).expand_as(found))
                return dx, found.detach()

            return both

        return prepare

    def whole(x: Tensor, t: Tensor, w: Tensor) -> Callable[[], Results]:
        return lambda: (x, cross_entropy.whole(x, t, w, x.shape[1]))

    def shard(x: Tensor, t: Tensor, w: Tensor) -> Callable[[], Results]:
        def work() -> Results:
            numbers = cross_entropy.shard_numbers(x, t, s.v, 0)
            return x, cross_entropy.from_numbers(x, t, w, numbers.unsqueeze(0), s.v, 0, s.v)

        return work

    def by_liger() -> Side:
        loss_of = liger("liger_cross_entropy")

        def prepare(x: Tensor, t: Tensor, w: Tensor) -> Callable[[], Results]:
            leaf = x.detach().requires_grad_()
            return lambda: (*torch.autograd.grad(loss_of(leaf, t, reduction="sum"), leaf, w), None)

        return prepare

    inputs, size = (logits, targets, weight), logits.numel()
    # more columns than shared memory holds, if there are 50,304 in the other cases
    longer = logits[: s.rows // 3 * 3].view(-1, 3 * s.v), targets[: s.rows // 3], weight
    return [
        Case("cross entropy", ("cross_entropy",), 4 * size, inputs, whole, plain, {"liger": by_liger}),
        Case(
            "cross entropy, long rows", ("cross_entropy",), 4 * longer[0].numel(), longer, whole, plain,
            {"liger": by_liger},
        ),
        Case(
            "cross entropy of a shard", ("cross_entropy_stats", "cross_entropy_gradient"), 6 * size, inputs, shard,
            plain,
        ),
        Case(
            "scale in place", ("scale",), 4 * size, (logits, torch.tensor(-1.0, device=device)),
            lambda x, factor: lambda: (cross_entropy.scale_(x, factor), x)[1:],
            call(lambda x, factor: x.mul_(factor)),
        ),
    ]  # fmt: skip


def _norm(layer: bool, residual: bool) -> Callable[..., Any]:
    """Returns plain PyTorch's norm of x, or of x + residual together with this sum."""

    def work(x: Tensor, *rest: Tensor) -> Any:
        other, (weight, *bias) = (rest[:1], rest[1:]) if residual else ((), rest)
        total = x + other[0] if residual else x
        if residual and total.dtype == torch.float64:
            # all sides normalize the sum after it is rounded to bf16
            total = total + (total.bfloat16().double() - total).detach()
        y = (
            F.layer_norm(total, weight.shape, weight, bias[0], EPS)
            if layer
            else F.rms_norm(total, weight.shape, weight, EPS)
        )
        return (total, y) if residual else y

    return work


def norms(s: Sizes, device: torch.device) -> list[Case]:
    """Returns the cases of RMSNorm and LayerNorm, with and without a residual addition."""
    cases = []
    x, r, dy, ds = (bf16(s.rows, s.h, device=device) for _ in range(4))
    weight, bias = 1 + bf16(s.h, device=device, scale=0.2), bf16(s.h, device=device)
    for layer, residual in ((False, False), (True, False), (False, True), (True, True)):
        vectors = (weight, bias) if layer else (weight,)
        name = f"{'LayerNorm' if layer else 'RMSNorm'}{' + residual' if residual else ''}"
        size, inputs = x.numel(), (x, *((r,) if residual else ()), *vectors)
        cases.append(
            Case(
                f"{name}, forward", ("norm",), (8 if residual else 4) * size, inputs, _norm_forward(layer, residual),
                call(_norm(layer, residual)), {} if residual else {"liger": _liger_norm(layer, backward=False)},
            )
        )  # fmt: skip
        cases.append(
            Case(
                f"{name}, backward", ("norm_backward", "add_parts"), (8 if residual else 6) * size,
                (*((ds,) if residual else ()), dy, *inputs), _norm_backward(layer, residual),
                gradient_of(_norm(layer, residual), 2 if residual else 1),
                {} if residual else {"liger": _liger_norm(layer, backward=True)},
            )
        )  # fmt: skip
    return cases


def _norm_forward(layer: bool, residual: bool) -> Side:
    def prepare(x: Tensor, *rest: Tensor) -> Callable[[], Results]:
        other, (weight, *bias) = (rest[0], rest[1:]) if residual else (None, rest)

        def work() -> Results:
            done = norm.forward(x, weight, bias[0] if bias else None, EPS, layer, other)
            return (done.sum, done.y) if residual else (done.y,)

        return work

    return prepare


def _norm_backward(layer: bool, residual: bool) -> Side:
    def prepare(*inputs: Tensor) -> Callable[[], Results]:
        ds, (dy, x, *rest) = (inputs[0], inputs[1:]) if residual else (None, inputs)
        other, (weight, *bias) = (rest[0], rest[1:]) if residual else (None, rest)
        done = norm.forward(x, weight, bias[0] if bias else None, EPS, layer, other)
        gradients = [torch.empty(weight.numel(), device=x.device) for _ in range(1 + layer)]

        def work() -> Results:
            dbias = gradients[1] if layer else None
            dx = norm.backward(dy, done, weight, gradients[0], dbias, add=False, residual=ds)
            return (
                dx,
                *((dx,) if residual else ()),
                *gradients,
            )  # x and the residual have the same gradient

        return work

    return prepare


def _liger_norm(layer: bool, backward: bool) -> Callable[[], Side]:
    def made() -> Side:
        work = liger("liger_layer_norm" if layer else "liger_rms_norm")
        # in_place=False, because otherwise the backward overwrites the gradient, which the next run needs.
        ours = (
            (lambda x, w, b: work(x, w, b, EPS))
            if layer
            else (lambda x, w: work(x, w, EPS, in_place=False))
        )
        return (gradient_of(ours, 1) if backward else call(ours))(lambda same: same)

    return made


def activations(s: Sizes, device: torch.device) -> list[Case]:
    """Returns the cases of SwiGLU and GEGLU, and of GELU and squared ReLU with a bias."""
    both, dout, x, bias = (
        bf16(s.rows, 2 * s.f, device=device), bf16(s.rows, s.f, device=device), bf16(s.rows, s.f, device=device),
        bf16(s.f, device=device),
    )  # fmt: skip
    size = dout.numel()

    def with_bias_gradient(backward: Callable[..., Tensor]) -> Callable[..., Callable[[], Results]]:
        def prepare(dy: Tensor, x: Tensor, b: Tensor) -> Callable[[], Results]:
            db = torch.empty(b.numel(), device=b.device)
            return lambda: (backward(dy, x, b, db), db)

        return prepare

    def liger_forward() -> Side:
        work = liger("liger_swiglu")

        def prepare(gate_up: Tensor) -> Callable[[], Results]:
            gate, up = (half.contiguous() for half in gate_up.chunk(2, -1))
            return lambda: (work(gate, up),)

        return prepare

    return [
        Case(
            "SwiGLU, forward", ("swiglu",), 6 * size, (both,), lambda x: lambda: (activation.swiglu(x),),
            call(activation.swiglu_reference), {"liger": liger_forward},
        ),
        Case(
            "SwiGLU, backward", ("swiglu_backward",), 10 * size, (dout, both),
            lambda dy, x: lambda: (activation.swiglu_backward(dy, x),), gradient_of(activation.swiglu_reference, 1),
        ),
        Case(
            "GEGLU, forward", ("geglu",), 6 * size, (both,), lambda x: lambda: (activation.geglu(x),),
            call(activation.geglu_reference),
        ),
        Case(
            "GEGLU, backward", ("geglu_backward",), 10 * size, (dout, both),
            lambda dy, x: lambda: (activation.geglu_backward(dy, x),), gradient_of(activation.geglu_reference, 1),
        ),
        Case(
            "GELU + bias, forward", ("gelu",), 4 * size, (x, bias), lambda x, b: lambda: (activation.gelu(x, b),),
            call(activation.gelu_reference),
        ),
        Case(
            "GELU + bias, backward", ("gelu_backward", "add_parts"), 6 * size, (dout, x, bias),
            with_bias_gradient(activation.gelu_backward), gradient_of(activation.gelu_reference, 1),
        ),
        Case(
            "squared ReLU + bias, forward", ("squared_relu",), 4 * size, (x, bias),
            lambda x, b: lambda: (activation.squared_relu(x, b),), call(activation.squared_relu_reference),
        ),
        Case(
            "squared ReLU + bias, backward", ("squared_relu_backward", "add_parts"), 6 * size, (dout, x, bias),
            with_bias_gradient(activation.squared_relu_backward), gradient_of(activation.squared_relu_reference, 1),
        ),
    ]  # fmt: skip


def dropouts(s: Sizes, device: torch.device) -> list[Case]:
    """Returns the cases of dropout with bias and residual; torch's has another mask."""
    length = s.rows // s.sequences
    x, residual = (bf16(length, s.sequences, s.h, device=device) for _ in range(2))
    bias = bf16(s.h, device=device)
    samples = torch.arange(s.sequences, device=device)
    draw = dropout.Draw(1, "blocks.0.mlp.dropout", 2, samples, Positions.all(length), 0.1)
    return [
        Case(
            "dropout + bias + residual", ("dropout",), 6 * x.numel(), (x, bias, residual),
            lambda x, b, r: lambda: (dropout.dropout(x, draw, b, r),),
            call(lambda x, b, r: r + F.dropout(x + b, 0.1)), comparable=False,
            truth=lambda x, b, r: lambda: (dropout.reference(x, draw, b, r),),
        ),
    ]  # fmt: skip


def updates(s: Sizes, device: torch.device) -> list[Case]:
    """Returns the cases of AdamW and Lion on a slice, with a bf16 gradient and a bf16 copy."""
    p, m, v = (torch.randn(s.n, device=device) for _ in range(3))
    g, out = bf16(s.n, device=device), bf16(s.n, device=device)
    scalars = [torch.tensor(x, dtype=torch.float64, device=device) for x in (1e-3, 3.0, 0.5, 0.0)]
    rule, mixed, now = adam.Adam(), lion.Lion(), StepScalars(*scalars)

    def ours(p: Tensor, m: Tensor, v: Tensor, g: Tensor, out: Tensor) -> Callable[[], Results]:
        def work() -> Results:
            adam.call_cuda(
                p,
                m,
                v,
                g,
                out,
                now.lr,
                now.step,
                now.scale,
                now.skip,
                rule.beta1,
                rule.beta2,
                rule.eps,
                0.1,
            )
            return p, m, v, out

        return work

    def formulas(p: Tensor, m: Tensor, v: Tensor, g: Tensor, out: Tensor) -> Results:
        adam.reference(p, g, m, v, now, rule, 0.1)
        out.copy_(p)
        return p, m, v, out

    def fused() -> Side:
        def prepare(
            p: Tensor, m: Tensor, v: Tensor, g: Tensor, out: Tensor
        ) -> Callable[[], Results]:
            def work() -> Results:
                adam.adamw_(p, g, m, v, now, rule, 0.1)
                out.copy_(p)
                return p, m, v, out

            return work

        return prepare

    inputs = (p, 0.1 * m, 0.01 * v.square(), g, out)

    def lion_step(p: Tensor, m: Tensor, g: Tensor, out: Tensor) -> Callable[[], Results]:
        def work() -> Results:
            scalars = (now.lr, now.scale, now.skip)
            lion.call_cuda(p, m, g, out, *scalars, mixed.beta1, mixed.beta2, 0.1)
            return p, m, out

        return work

    def lion_formulas(p: Tensor, m: Tensor, g: Tensor, out: Tensor) -> Results:
        lion.reference(p, g, (m,), now, mixed, 0.1)
        out.copy_(p)
        return p, m, out

    momentum = (p, 0.1 * m, g, out)
    return [
        Case("AdamW", ("adamw",), 28 * s.n, inputs, ours, call(formulas), {"torch fused": fused}),
        Case("Lion", ("lion",), 20 * s.n, momentum, lion_step, call(lion_formulas)),
    ]


def sums_of(s: Sizes, device: torch.device) -> list[Case]:
    """Returns the cases of sums of squares, and of sums over rows."""
    x, rows = torch.randn(s.n, device=device), bf16(s.rows, s.f, device=device)

    def columns(x: Tensor) -> Callable[[], Results]:
        out = torch.empty(x.shape[1], device=x.device)

        def work() -> Results:
            sums.column_sums(x, out, add=False)
            return (out,)

        return work

    return [
        Case(
            "sum of squares", ("square_sum",), 4 * s.n, (x,), lambda x: lambda: (sums.square_sum(x),),
            call(lambda x: torch.linalg.vector_norm(x).square()),
        ),
        Case(
            "sums over rows", ("column_sums", "add_parts"), 2 * rows.numel(), (rows,), columns,
            call(lambda x: x.sum(0, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)),
        ),
    ]  # fmt: skip


def rotaries(s: Sizes, device: torch.device) -> list[Case]:
    """Returns the cases of rotary positions, with equal numbers of queries and keys."""
    length, heads = s.rows // s.sequences, 2 * (s.h // s.d)
    x = bf16(length * s.sequences, heads * s.d, device=device)

    def parts(x: Tensor) -> tuple[Tensor, Tensor]:
        q, k = x.view(length, s.sequences, heads, s.d).chunk(2, 2)
        return q, k

    def ours(x: Tensor) -> Callable[[], Results]:
        def work() -> Results:
            rotary.rotate_(x, Positions.all(length), heads, s.d, THETA)
            return parts(x)

        return work

    def by_liger() -> Side:
        turn = liger("liger_rope")

        def prepare(x: Tensor) -> Callable[[], Results]:
            # each part as [b a s d]
            q, k = (part.transpose(0, 1).contiguous().transpose(1, 2) for part in parts(x))
            angle = rotary.angles(Positions.all(length), s.d, THETA, x.device)
            angle = angle.repeat(1, 2).unsqueeze(0).to(x.dtype)
            cosines, sines = angle.cos(), angle.sin()
            return lambda: tuple(part.permute(2, 0, 1, 3) for part in turn(q, k, cosines, sines))

        return prepare

    def plain(x: Tensor) -> Results:
        return tuple(rotary.rotate(part.float(), THETA).to(x.dtype) for part in parts(x))

    values = bf16(length, s.sequences, heads // 2, s.d, device=device)

    def packed(*gradients: Tensor) -> Callable[[], Results]:
        dq, dk, dv = gradients
        return lambda: (rotary.pack_back((dq, dk, dv), Positions.all(length), THETA),)

    def plain_backward(*gradients: Tensor) -> Results:
        # A rotation of exchanged halves is a rotation back.
        turned = (rotary.rotate(g.float().roll(s.d // 2, -1), THETA) for g in gradients[:2])
        back = [g.roll(s.d // 2, -1).to(x.dtype) for g in turned]
        return (torch.cat([g.flatten(2) for g in (*back, gradients[2].to(x.dtype))], -1),)

    return [
        Case(
            "rotary positions",
            ("rotary",),
            4 * x.numel(),
            (x,),
            ours,
            call(plain),
            {"liger": by_liger},
        ),
        Case(
            "rotary backward, packed",
            ("rotary_backward",),
            4 * (x.numel() + values.numel()),
            (*parts(x), values),
            packed,
            call(plain_backward),
        ),
    ]


def head_norms(s: Sizes, device: torch.device) -> list[Case]:
    """Returns the cases of norms and rotary positions of heads, with four query heads per key head."""
    d = max(s.d, min(head_norm.SIZES))
    length, keys = s.rows // s.sequences, max(1, s.h // d // 4)
    heads = 4 * keys, keys
    by = head_norm.HeadNorm(heads, d, THETA, Positions.all(length), 0.0, EPS)
    x = bf16(length, s.sequences, 6 * keys * d, device=device)
    weights = bf16(d, device=device), bf16(d, device=device)
    given = [bf16(length, s.sequences, n, d, device=device) for n in (*heads, keys)]

    def plain(x: Tensor, *weights: Tensor) -> Results:
        q, k, _ = x.unflatten(-1, (-1, d)).split([*heads, keys], 2)
        normed = (F.rms_norm(h, (d,), w, EPS) for h, w in zip((q, k), weights, strict=True))
        return (torch.cat([rotary.rotate(part, THETA) for part in normed], 2).flatten(2),)

    def ours_backward(*inputs: Tensor) -> Callable[[], Results]:
        dq, dk, dv, x, *weights = inputs
        outs = [torch.empty(d, device=device) for _ in weights]

        def work() -> Results:
            pair = weights[0], weights[1]
            dx = head_norm.backward((dq, dk, dv), x, pair, by, (outs[0], outs[1]), (False, False))
            return dx, *outs

        return work

    def plain_backward(dq: Tensor, dk: Tensor, dv: Tensor, *inputs: Tensor) -> Results:
        wide = torch.promote_types(inputs[0].dtype, torch.float32)
        x, *weights = (part.detach().to(wide).requires_grad_() for part in inputs)
        y = plain(x, *weights)[0].unflatten(-1, (-1, d))
        dx, *dweights = torch.autograd.grad(y, (x, *weights), torch.cat((dq, dk), 2).to(wide))
        dx = torch.cat((dx[..., : 5 * keys * d].to(dv.dtype), dv.flatten(2)), -1)
        return dx, *dweights

    turned = x.numel() * 5 // 6
    return [
        Case(
            "norms and rotary positions of heads", ("head_norm",), 4 * turned, (x, *weights),
            lambda x, *weights: lambda: (head_norm.forward(x, (weights[0], weights[1]), by),), call(plain),
        ),
        Case(
            "norms and rotary positions of heads, backward", ("head_norm_backward", "add_parts"),
            6 * turned + 4 * (x.numel() - turned), (*given, x, *weights), ours_backward, call(plain_backward),
        ),
    ]  # fmt: skip


def routers(s: Sizes, device: torch.device) -> list[Case]:
    """Returns the cases of a router with 8 of 256 experts, as in DeepSeek-V3 with both losses."""
    e, k, shape = 256, 8, (s.rows // s.sequences, s.sequences)
    how, factors = (
        Routing("sigmoid", scale=2.5, groups=8, groups_per_token=4),
        LossFactors(0.01, 0.1),
    )
    rule = rule_of(how, k, factors)
    assert rule is not None
    logits, dy = torch.randn(*shape, e, device=device), bf16(*shape, k, device=device)
    experts = how.choose(how.scores(logits), None, k).contiguous()
    chosen = torch.zeros_like(logits).scatter_(-1, experts, 1.0).sum(0)
    sums = torch.rand(router.chunks(*shape), shape[1], e + 1, device=device)
    weight = torch.full((), 1.0 / s.rows, dtype=torch.float64, device=device)
    parts = 4 * e * shape[1] * router.chunks(*shape)  # bytes of the numbers of choices, by block

    def weigh(logits: Tensor, experts: Tensor) -> Tensor:
        chosen = how.scores(logits).gather(-1, experts)
        return chosen / chosen.sum(-1, keepdim=True) * how.scale

    def plain(logits: Tensor) -> Results:
        return (weigh(logits, how.choose(how.scores(logits), None, k)),)

    def plain_backward(dy: Tensor, logits: Tensor, chosen: Tensor) -> Results:
        wide = torch.promote_types(logits.dtype, torch.float32)
        x = logits.detach().to(wide).requires_grad_()
        scores, z = how.scores(x), x.logsumexp(-1).square().sum()
        aux = (scores / scores.sum(-1, keepdim=True) * chosen).sum()
        loss = (factors.aux * aux + factors.z * z) * weight.to(wide)
        return torch.autograd.grad((weigh(x, experts) * dy).sum() + loss, x)

    def ours_backward(dy: Tensor, logits: Tensor, chosen: Tensor) -> Callable[[], Results]:
        back = rule.flags, rule.scale, rule.epsilon, factors.aux, 2 * factors.z
        return lambda: (router.backward(dy, logits, experts, chosen, weight, *back),)

    def ours_sort(experts: Tensor) -> Callable[[], Results]:
        counts = router.route(logits, None, None, False, *rule)[2]
        return lambda: tuple(router.sort(experts, counts)[:2])

    def plain_sort(experts: Tensor) -> Results:
        order = experts.flatten().sort(stable=True).indices
        return order, torch.empty_like(order).scatter_(
            0, order, torch.arange(len(order), device=device)
        )

    def plain_losses(sums: Tensor, chosen: Tensor) -> Results:
        return (torch.stack(((sums[..., :e] * chosen).sum(), sums[..., e].sum())),)

    again = logits.nbytes * k // e  # the logits of the choices
    return [
        Case(
            "router", ("router",), logits.nbytes + again + 2 * parts, (logits,),
            lambda x: lambda: (router.route(x, None, None, True, *rule)[1],), call(plain),
        ),
        Case(
            "router, backward", ("router_backward",), 2 * logits.nbytes + again, (dy, logits, chosen),
            ours_backward, call(plain_backward),
        ),
        Case(
            "losses of the router", ("router_losses",), sums.nbytes, (sums, chosen),
            lambda sums, chosen: lambda: (router.losses(sums, chosen, 1.0),), call(plain_losses),
        ),
        Case(
            "choices sorted by expert", ("sort_choices",), 4 * experts.nbytes + parts * router.chunks(*shape),
            (experts,), ours_sort, call(plain_sort),
            seen=lambda results: tuple(x.float() for x in results if x is not None),
        ),
    ]  # fmt: skip


def quantizations(s: Sizes, device: torch.device) -> list[Case]:
    """Returns the cases of quantization to 8 and 4 bits, and of dequantization.

    Dequantization sums over 8 ranks.
    """
    cases, ranks = [], 8
    x = bf16(s.blocks * quantize.BLOCK, device=device)
    for bits in quantize.TOPS:
        whole, scales = quantize.quantize_reference(x.float(), bits)
        q = quantize.packed(whole, bits).expand(ranks, -1, -1).contiguous()
        spread = scales * torch.linspace(0.5, 2, ranks, device=device).view(-1, 1)
        cases += [
            Case(
                f"quantize to {bits} bits", ("quantize",), x.numel() * (16 + bits) // 8, (x,),
                lambda x, bits=bits: lambda: quantize.quantize(x, bits),
                call(lambda x, bits=bits: quantize.quantize_reference(_wide(x), bits)),
                seen=lambda results, bits=bits: (results[1], _worst(x, results[0], results[1], bits)),
            ),
            Case(
                f"sum of {ranks} dequantized, {bits} bits", ("dequantize",), x.numel() * (16 + ranks * bits) // 8,
                (q, spread), lambda q, scales, bits=bits: lambda: (quantize.dequantize(q, scales, bits),),
                call(lambda q, scales, bits=bits: quantize.dequantize_reference(q, scales, bits)),
            ),
        ]  # fmt: skip
    return cases


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _worst(x: Tensor, whole: Any, scales: Any, bits: int) -> Tensor:
    """Returns the largest error of quantized numbers, in units of their scale.

    The expected value is a half, whichever way ties are rounded.
    """
    found = quantize.unpacked(whole, bits) if whole.dtype == torch.uint8 else whole
    return (found - x.view(-1, quantize.BLOCK).to(scales.dtype) / scales.view(-1, 1)).abs().max()


# Functions that create cases, so that the inputs of only one family are in memory at a time.
FAMILIES = (
    cross_entropies,
    norms,
    activations,
    dropouts,
    updates,
    sums_of,
    rotaries,
    head_norms,
    routers,
    quantizations,
)


def sizes_for(memory: int) -> Sizes:
    """Returns the large sizes, with fewer rows if the GPU has less than 40 GB."""
    rows = LARGE.rows if memory > 40e9 else LARGE.rows // 4
    return Sizes(
        rows, *(getattr(LARGE, name) for name in ("sequences", "h", "f", "v", "d", "n", "blocks"))
    )


# Relative limits: of two roundings to bf16, and of fp32 sums in different orders.
_LIMITS = {torch.bfloat16: 2.0**-7, torch.float32: 1e-4, torch.float64: 1e-5}
_OTHERS = {
    **_LIMITS,
    torch.bfloat16: 2.0**-5,
}  # for other sides, which may sum in bf16, like eager LayerNorm's backward on a CPU


def limit_of(result: Tensor, ours: bool) -> float:
    """Returns the limit of ||result - truth|| / ||truth|| for a result."""
    return (_LIMITS if ours else _OTHERS)[result.dtype]
