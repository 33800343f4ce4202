"""The hooks of `pip install`: the wheel gets a library compiled from csrc, and the README links that work anywhere.

Without a compiler the wheel has the sources alone, and says so: the first use on a machine with one compiles them.

An editable installation has no wheel to put libraries into: they go where the first use would compile them.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

# glibc of the oldest distributions whose libstdc++ has GLIBCXX_3.4.N (PEP 600's policies): {N: minor version}
LIBSTDCXX = {29: 34, 30: 35, 33: 39}


def _builder(root: Path) -> ModuleType:
    """threed/core/native/build.py, without importing threed (which needs torch)."""
    spec = importlib.util.spec_from_file_location(
        "threed_native_build", root / "threed" / "core" / "native" / "build.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


class NativeLibraries(BuildHookInterface):
    """Adds csrc and threed/core/native/lib/*.so to the wheel, whose tag then names the platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles each library that has sources; `version` is "editable" for an editable installation."""
        build, editable = _builder(Path(self.root)), version == "editable"
        self.folder = tempfile.TemporaryDirectory(prefix="threed-build-")
        if not editable:
            # Where the library does not load, or there was no compiler, one is compiled at first use.
            build_data["force_include"]["csrc"] = "threed/core/native/csrc"
        for library in build.LIBRARIES.values():
            try:
                to_cache = editable or build.is_cached(library)
                path = build.ensure(library, None if to_cache else Path(self.folder.name))
            except build.BuildError as error:
                if library.sources:
                    self.app.display_warning(f"threed: no native {library.name} library: {error}")
                continue
            self.app.display_info(f"threed: native {library.name} library {path}")
            if not editable:
                _include(path, f"threed/core/native/lib/{library.name}.so", build_data)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Removes what `initialize` compiled: it is in the wheel now."""
        self.folder.cleanup()


class Readme(MetadataHookInterface):
    """README.md with links into the repository of pyproject.toml."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Gives the project its long description."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": absolute(text, metadata["urls"]["Repository"]),
        }


def absolute(text: str, repository: str) -> str:
    """Markdown whose relative links lead into a repository's main branch; pictures to the file itself."""
    text = re.sub(r"(!\[[^\]]*\]\()(?!https?:)", rf"\1{repository}/raw/main/", text)
    return re.sub(r"(?<!!)(\[[^\]]*\]\()(?!https?:|#)", rf"\1{repository}/blob/main/", text)


def _include(path: Path, place: str, build_data: dict[str, Any]) -> None:
    """Puts a library into the wheel, which then fits one platform, but any Python."""
    build_data["force_include"][str(path)] = place
    build_data["pure_python"] = False
    build_data["tag"] = f"py3-none-{platform_of(path.read_bytes())}"


def platform_of(library: bytes) -> str:
    """The platform tag of a shared library: `manylinux_2_35_x86_64` where glibc 2.35 and what came with it will do."""
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    glibc = [
        (int(major), int(minor)) for major, minor in re.findall(rb"GLIBC_(\d+)\.(\d+)", library)
    ]
    newest = max((int(n) for n in re.findall(rb"GLIBCXX_3\.4\.(\d+)", library)), default=0)
    beside = next((minor for n, minor in LIBSTDCXX.items() if newest <= n), None)
    if (
        not glibc or beside is None
    ):  # not Linux with glibc, or a compiler newer than the table: for machines like this
        return platform
    major, minor = max(*glibc, (2, beside))
    return platform.replace("linux", f"manylinux_{major}_{minor}", 1)
