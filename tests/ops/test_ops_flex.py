"""FlexAttention without its compiled kernel, in fp64 on the CPU: windows, soft caps, documents and grouped heads."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.utils.weak import WeakTensorKeyDictionary

from tests.models.test_models_families import plain_attention
from threed.layers import Causal
from threed.ops import attention, attention_backends, flex

LENGTH, SIZE = 300, 16  # three blocks; the last is not full


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Has attention on the CPU run FlexAttention's plain implementation, which torch refuses to differentiate."""
    torch._dynamo.reset()  # a cap of another test would make the cap of this one a dynamic number
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex, "_kernel", lambda: torch_flex.flex_attention)
    monkeypatch.setattr(flex, "fits", lambda q: True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        yield


def heads() -> tuple[Tensor, Tensor, Tensor]:
    """q [s b a d], k and v [s b k d]."""
    draw = torch.Generator().manual_seed(3)
    made = (torch.randn(LENGTH, 2, n, SIZE, dtype=torch.float64, generator=draw) for n in (4, 2, 2))
    q, k, v = (x.requires_grad_() for x in made)
    return q, k, v


def gradients(y: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    dy = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(4))
    return y, *torch.autograd.grad(y, inputs, dy)


def assert_same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for ours, right in zip(got, want, strict=True):
        torch.testing.assert_close(ours, right, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    "core", [Causal(1), Causal(50), Causal(129, 0.7, 0.9), Causal(0, 0.7)], ids=str
)
def test_windows_and_soft_caps_are_those_of_plain_operations(core: Causal) -> None:
    inputs = heads()
    assert_same(gradients(core(*inputs), inputs), gradients(plain_attention(*inputs, core), inputs))
    assert any(line.startswith("FlexAttention: float64, 2 x 300 positions, 4 heads of 16, 2 key heads")
               for line in attention_backends.described())  # fmt: skip


def packed() -> Tensor:
    """Documents [b s] of many lengths; some end at a block's border."""
    rows = [[1, 127, 100, 72], [200, 56, 44]]
    return torch.stack(
        [torch.repeat_interleave(torch.arange(len(r)), torch.tensor(r)) for r in rows]
    )


@pytest.mark.seldom("flex-Causal(window=60, softcap=0.0*", "flex-Causal(window=0, softcap=0.7*")
@pytest.mark.parametrize("core", [Causal(), Causal(60), Causal(0, 0.7), Causal(60, 0.7)], ids=str)
@pytest.mark.parametrize("through", ["chunks", "flex"])
def test_documents_attend_as_if_alone(
    core: Causal, through: str, request: pytest.FixtureRequest
) -> None:
    if through == "flex":
        request.getfixturevalue("eager")
    q, k, v = inputs = heads()
    documents, want = packed(), torch.empty(LENGTH, 2, 4 * SIZE, dtype=torch.float64)
    for row, of_row in enumerate(documents):
        for number in of_row.unique():
            at = (of_row == number).nonzero().flatten()
            want[at, row] = plain_attention(*(x[at, row : row + 1] for x in inputs), core)[:, 0]
    assert_same(gradients(core(q, k, v, documents), inputs), gradients(want, inputs))


def pairs_of(documents: Tensor, window: int) -> Tensor:
    """Whether a query attends to a key, [b 1 s s]."""
    at = torch.arange(documents.shape[1])
    behind = at.unsqueeze(1) - at
    near = (behind >= 0) & (behind < window) if window else behind >= 0
    return (near & (documents.unsqueeze(2) == documents.unsqueeze(1))).unsqueeze(1)


@pytest.mark.parametrize("window", [0, 1, 64, 128, 129, 200])
@pytest.mark.parametrize("with_documents", [False, True])
def test_lists_of_blocks_are_those_of_all_pairs(window: int, with_documents: bool) -> None:
    documents = packed() if with_documents else None
    ours = flex.block_mask(LENGTH, window, torch.device("cpu"), documents)
    rows = documents if with_documents else torch.zeros(1, LENGTH, dtype=torch.int64)
    pairs = pairs_of(rows, window)
    padded = torch.nn.functional.pad(pairs, (0, 84, 0, 84))
    blocks = padded.unflatten(3, (3, 128)).unflatten(2, (3, 128))
    some = blocks.any(-1).any(3)
    # rows beyond the last query do not count
    exists = torch.arange(384).view(3, 128) < LENGTH
    every = (blocks | ~exists.view(1, 1, 3, 128, 1, 1)).all(-1).all(3)
    found = {}
    for name, counts, indices in (
        ("partial", ours.kv_num_blocks, ours.kv_indices),
        ("full", ours.full_kv_num_blocks, ours.full_kv_indices),
    ):
        dense = torch.zeros(indices.shape, dtype=torch.bool)
        for at in torch.cartesian_prod(*(torch.arange(n) for n in indices.shape[:3])).tolist():
            dense[*at, indices[*at][: counts[*at]].long()] = True
        found[name] = dense
    assert torch.equal(found["full"], every)
    assert torch.equal(found["partial"] | found["full"], some)
    assert not (found["partial"] & found["full"]).any()
    if documents is None:  # one for all calls
        assert flex.block_mask(LENGTH, window, torch.device("cpu"), None) is ours


def test_without_a_compiler_plain_operations_run_and_a_warning_names_their_cost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the CPU torch refuses the backward of FlexAttention, as on a GPU without Triton."""
    flex.problem.cache_clear()
    monkeypatch.setattr(flex.launch, "on_gpu", lambda x: True)
    monkeypatch.setattr(attention, "_on_cpu", lambda q: False)
    q, k, v = (x.float() for x in heads())
    with pytest.warns(UserWarning, match=r"does not run on cpu: .*4 bytes per head and key"):
        y = Causal(50)(q, k, v)
    flex.problem.cache_clear()
    want = plain_attention(q.double(), k.double(), v.double(), Causal(50))
    torch.testing.assert_close(y.double(), want, rtol=0, atol=1e-5)


def test_layers_share_the_lists_of_blocks_of_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the documents change in place, as those of a CUDA graph do, or are freed."""
    documents, cpu, made = packed(), torch.device("cpu"), flex._block_mask
    monkeypatch.setattr(flex, "_MASKS", WeakTensorKeyDictionary())
    first = flex.block_mask(LENGTH, 0, cpu, documents)
    assert flex.block_mask(LENGTH, 0, cpu, documents) is first
    assert flex.block_mask(LENGTH, 64, cpu, documents) is not first
    assert flex.block_mask(LENGTH, 0, cpu, documents) is first
    documents.copy_(documents.flip(0))
    other = flex.block_mask(LENGTH, 0, cpu, documents)
    again = made(LENGTH, 0, cpu, documents)
    assert torch.equal(other.kv_num_blocks, again.kv_num_blocks)
    assert not torch.equal(other.kv_num_blocks, first.kv_num_blocks)
    alive = weakref.ref(other)
    del documents, other, again
    assert alive() is None
    assert not len(flex._MASKS)
