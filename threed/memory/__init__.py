"""Host buffers of constant size, and files on a drive with asynchronous direct I/O.

- `pool` allocates page-aligned buffers on huge pages.
- `arena` allocates slots of equal size in one buffer.
- `io` transfers tensors between memory and a drive.
- `tiers` stores the training state in memory or on a drive.
- `sizes` computes the bytes of model states per parameter, and the number of host buffers.

This package is internal.
"""

__all__: list[str] = []
