"""Provides host buffers of constant size, and files on a drive with asynchronous direct I/O.

`pool` allocates page-aligned buffers on huge pages, `arena` slots in one buffer; `io` moves tensors
between memory and a drive; `tiers` stores the training state in memory or on a drive.
"""
