"""Work that the parent of all ranks does once, when it imports this module."""

import importlib
import os
import sys
from pathlib import Path

from torch._dynamo import list_backends

from threed.core import native

# To find the compiled library, each rank would otherwise query the compiler's version and hash the sources.
native.library("cpu")
# Each rank that names a backend of torch.compile would otherwise import all backends, and the compiler (1 s).
list_backends()
importlib.import_module("torch._inductor.compile_fx")
# The test modules whose functions ranks call (tests/conftest.py); pytest has imported them without an error.
for file in map(Path, filter(None, os.environ.get("TESTS_WITH_RANKS", "").split(os.pathsep))):
    sys.path.append(str(file.parent))
    importlib.import_module(file.stem)
