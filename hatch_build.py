"""The build hook of `pip install`: compiles csrc into the wheel; without a compiler it says so, and leaves it out.

An editable installation has no wheel to put libraries into: they go where the first use would compile them.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


def _builder(root: Path) -> ModuleType:
    """threed/native/build.py, without importing threed (which needs torch)."""
    spec = importlib.util.spec_from_file_location("threed_native_build", root / "threed" / "native" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


class NativeLibraries(BuildHookInterface):
    """Adds csrc and threed/native/lib/*.so to the wheel, whose tag then names the platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles each library that has sources; `version` is "editable" for an editable installation."""
        build, editable = _builder(Path(self.root)), version == "editable"
        self.folder = tempfile.TemporaryDirectory(prefix="threed-build-")
        if not editable:
            # Where the library does not load, or there was no compiler, one is compiled at first use.
            build_data["force_include"]["csrc"] = "threed/native/csrc"
        for library in build.LIBRARIES.values():
            try:
                path = build.ensure(library, None if editable else Path(self.folder.name))
            except build.BuildError as error:
                if library.sources:
                    self.app.display_warning(f"threed: no native {library.name} library: {error}")
                continue
            self.app.display_info(f"threed: native {library.name} library {path}")
            if not editable:
                _include(path, f"threed/native/lib/{library.name}.so", build_data)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Removes what `initialize` compiled: it is in the wheel now."""
        self.folder.cleanup()


def _include(path: Path, place: str, build_data: dict[str, Any]) -> None:
    """Puts a library into the wheel, which then fits one platform, but any Python."""
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    build_data["force_include"][str(path)] = place
    build_data["pure_python"] = False
    build_data["tag"] = f"py3-none-{platform}"
