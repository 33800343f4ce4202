"""Memory below the model: constant-size host buffers, and files on a drive behind asynchronous direct I/O.

`pool` makes page-aligned buffers on huge pages; `io` moves tensors between memory and a drive.
"""
