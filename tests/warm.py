"""Work that the parent of all ranks does once, when it imports this module."""

from torch._dynamo import list_backends

from threed.core import native

# To find the compiled library, each rank would otherwise query the compiler's version and hash the sources.
native.library("cpu")
# Each rank that names a backend of torch.compile would otherwise import all backends.
list_backends()
