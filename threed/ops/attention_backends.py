"""Which kernel computes attention, for each combination of shapes, dtype and mask.

The trainer logs the result (`described`) after the first step.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

_NAMES = {
    SDPBackend.CUDNN_ATTENTION.value: "cuDNN",
    SDPBackend.FLASH_ATTENTION.value: "flash attention",
    SDPBackend.EFFICIENT_ATTENTION.value: "memory-efficient attention",
    SDPBackend.MATH.value: "plain operations",
}
_chosen: dict[tuple[object, ...], int] = {}
_checked: set[tuple[object, ...]] = set()
_described: dict[tuple[object, ...], str] = {}  # lines of the log, in order


def described() -> list[str]:
    """Returns one line per kind of attention that ran in this process: kernel, shapes, mask."""
    return list(_described.values())


def record(kernel: str, q: Tensor, k: Tensor, what: str) -> None:
    """Records that a kernel computes attention, except in traces and in compiled graphs.

    Args:
        kernel: name of the kernel.
        q: queries [b a s d].
        k: keys [b k s d].
        what: description of the mask.
    """
    if q.is_meta or torch.compiler.is_compiling():
        return
    kind = (kernel, q.shape, k.shape[1], q.dtype, what)
    if kind in _described:
        return
    b, a, s, d = q.shape
    dtype = str(q.dtype).removeprefix("torch.")
    heads = f"{a} heads of {d}" + ("" if a == k.shape[1] else f", {k.shape[1]} key heads")
    _described[kind] = f"{kernel}: {dtype}, {b} x {s} positions, {heads}, {what}"


def choice(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> int:
    """Returns the value of the `SDPBackend` that torch chooses; the arguments are those of `check`."""
    kind = _kind(q, k, mask)
    if kind not in _chosen:
        grouped = q.shape[1] != k.shape[1]
        _chosen[kind] = torch._fused_sdp_choice(
            q, k, v, mask, 0.0, mask is None, scale=scale, enable_gqa=grouped
        )
    return _chosen[kind]


def check(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, fused: bool
) -> None:
    """Records the kernel that torch chooses, and checks that it keeps no score matrix.

    The check runs once per combination of shapes, dtype and kind of mask. It issues a warning if no
    fused kernel supports the combination.

    Args:
        q: queries [b a s d].
        k: keys [b k s d].
        v: values [b k s d].
        mask: mask that broadcasts to [b a s s]; None: causal.
        scale: factor of the scores.
        fused: whether the kernel must be fused. If false, it is only recorded.

    Raises:
        RuntimeError: if a fused kernel supports the combination but is switched off.
    """
    kind = _kind(q, k, mask)
    if kind in _checked:
        return
    chosen = choice(q, k, v, mask, scale)
    if fused and chosen == SDPBackend.MATH.value:
        _check_unfused(q, k, mask)
    record(_NAMES.get(chosen, "torch"), q, k, "causal" if mask is None else "a mask")
    _checked.add(kind)


def _kind(q: Tensor, k: Tensor, mask: Tensor | None) -> tuple[object, ...]:
    of_mask = None if mask is None else (mask.shape, mask.dtype, mask.requires_grad)
    # torch's switches (`torch.nn.attention.sdpa_kernel`) change the choice
    switches = (torch._C._get_flash_sdp_enabled(), torch._C._get_mem_efficient_sdp_enabled())
    return (q.shape, k.shape, q.dtype, q.device.type, of_mask, q.requires_grad, *switches)


def _check_unfused(q: Tensor, k: Tensor, mask: Tensor | None) -> None:
    """Warns that no fused kernel supports these arguments of `check`.

    Raises:
        RuntimeError: if a fused kernel supports them but is switched off.
    """
    description = f"{q.dtype} heads {list(q.shape)} [b a s d], keys {list(k.shape)}, {'no ' if mask is None else 'a '}mask"
    problem = f"attention without a fused kernel ({description}): it keeps the scores of all pairs of positions"
    narrow = q.dtype in (torch.bfloat16, torch.float16)
    if narrow and mask is None and q.shape[3] % 8 == 0 and q.shape[3] <= 256:
        raise RuntimeError(
            f"{problem}; a fused kernel supports these tensors but is switched off: leave out"
            " torch.nn.attention.sdpa_kernel and torch.backends.cuda.enable_flash_sdp(False)"
        )
    supported = "fused kernels support bf16 and fp16, head sizes that are multiples of 8 up to 256, and the causal mask"
    warnings.warn(f"{problem}; {supported}", stacklevel=4)
