"""What the warm parent of the ranks does once for all of them, when it imports this module."""

from torch._dynamo import list_backends

from threed.core import native

# Each rank would ask the compiler for its version, and hash the sources, to find what was compiled.
native.library("cpu")
# Each that names a backend of torch.compile would import all of them.
list_backends()
