"""Results of operations on the meta device are those of torch, also when they are known already."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from threed.pipeline import meta_results

ATEN = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def describe(out: object) -> object:
    """Returns type, shape, strides, dtype and bytes of a result."""
    if isinstance(out, Tensor):
        return (type(out), out.shape, out.stride(), out.dtype, out.untyped_storage().nbytes())
    return (type(out), [describe(item) for item in out]) if isinstance(out, list | tuple) else out


CALLS = {
    "broadcast": lambda: (ATEN.add.Tensor, (meta(3, 1), meta(4)), {}),
    "promotion by an int": lambda: (ATEN.mul.Tensor, (meta(2, dtype=torch.int32), 1), {}),
    "promotion by a bool": lambda: (ATEN.mul.Tensor, (meta(2, dtype=torch.int32), True), {}),
    "promotion by a float": lambda: (ATEN.mul.Tensor, (meta(2, dtype=torch.int32), 1.0), {}),
    "a scalar on the host": lambda: (ATEN.mul.Tensor, (meta(2), torch.tensor(2.0, dtype=torch.float64)), {}),
    "strides of the argument": lambda: (ATEN.exp.default, (meta(4, 3).t(),), {}),
    "a keyword argument": lambda: (ATEN.sum.dim_IntList, (meta(3, 4), [0]), {"dtype": torch.float64}),
    "several results": lambda: (ATEN.native_layer_norm.default, (meta(3, 4), [4], None, None, 1e-5), {}),
    "a list of tensors": lambda: (ATEN.cat.default, ([meta(2, 3), meta(4, 3)],), {}),
    "views": lambda: (ATEN.split.Tensor, (meta(6, 2), 4), {}),
    "a parameter": lambda: (ATEN.mm.default, (meta(2, 3), nn.Parameter(meta(3, 5))), {}),
    "empty": lambda: (ATEN.mm.default, (meta(0, 3), meta(3, 5)), {}),
    "a new tensor": lambda: (ATEN.empty.memory_format, ([2, 3],), {"device": "meta"}),
    "in 64 bits": lambda: (ATEN.to.dtype, (meta(2), torch.float64), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_known_result_is_that_of_torch(name: str) -> None:
    for _ in range(3):
        func, args, kwargs = CALLS[name]()
        assert describe(meta_results.run(func, args, kwargs)) == describe(func(*args, **kwargs))


def test_new_tensors_share_no_storage() -> None:
    x = meta(2, 3)
    storages = {meta_results.run(ATEN.exp.default, (x,), {}).untyped_storage()._cdata for _ in "ab"}
    outs = [meta_results.run(ATEN.exp.default, (x,), {}) for _ in range(3)]
    assert len({out.untyped_storage()._cdata for out in outs}) == 3
    assert x.untyped_storage()._cdata not in storages


def test_in_place_operations_return_their_argument() -> None:
    for _ in range(3):
        x = meta(2, 3)
        assert meta_results.run(ATEN.add_.Tensor, (x, meta(3)), {}) is x


def test_operations_that_change_shapes_in_place_run_each_time() -> None:
    for _ in range(3):
        x = meta(2, 3)
        assert meta_results.run(ATEN.transpose_.default, (x, 0, 1), {}) is x
        assert x.shape == (3, 2)
        assert meta_results.run(ATEN.resize_.default, (x, [4, 5]), {}).shape == (4, 5)
        assert x.shape == (4, 5)


def test_a_view_of_another_type_of_operation_keeps_the_storage() -> None:
    for _ in range(3):  # `_unsafe_view` is no view by its schema
        x = meta(2, 3)
        out = meta_results.run(ATEN._unsafe_view.default, (x, [6]), {})
        assert out.untyped_storage()._cdata == x.untyped_storage()._cdata


def test_results_have_the_default_dtype() -> None:
    x = meta(2, dtype=torch.int64)
    for dtype in (torch.float32, torch.float64, torch.float32):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            assert meta_results.run(ATEN.div.Tensor, (x, x), {}).dtype == dtype
        finally:
            torch.set_default_dtype(before)


def test_real_tensors_are_computed_each_time() -> None:
    for number in range(3):
        x = torch.full((2,), float(number))
        assert meta_results.run(ATEN.add.Tensor, (x, 1), {}).tolist() == [number + 1.0] * 2


def test_errors_are_those_of_torch() -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError):
            meta_results.run(ATEN.mm.default, (meta(2, 3), meta(2, 3)), {})


def test_results_are_forgotten_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meta_results, "LIMIT", 5)
    monkeypatch.setattr(meta_results, "_known", {})
    for size in range(12):
        assert meta_results.run(ATEN.exp.default, (meta(size),), {}).shape == (size,)
        assert len(meta_results._known) <= 5
