"""Hooks of `pip install`: they add a native library to the wheel, and make the README's links absolute.

The library is compiled from csrc. Without a compiler, a warning is shown and the wheel contains
only the sources. They are then compiled at first use, on a machine that has a compiler.

An editable installation has no wheel. Its library is stored in the cache folder, where the first
use would also compile it.
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

# {N: minor version of glibc in the oldest distributions whose libstdc++ has GLIBCXX_3.4.N} (policies of PEP 600)
LIBSTDCXX = {29: 34, 30: 35, 33: 39}


def _builder(root: Path) -> ModuleType:
    """Returns the module threed/core/native/build.py without importing threed, which needs torch."""
    spec = importlib.util.spec_from_file_location(
        "threed_native_build", root / "threed" / "core" / "native" / "build.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # because dataclasses look up their module there
    spec.loader.exec_module(module)
    return module


class NativeLibraries(BuildHookInterface):
    """Adds csrc and threed/core/native/lib/*.so to the wheel, and names the platform in its tag."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles each library that has sources.

        Args:
            version: "editable" for an editable installation.
            build_data: hatchling's settings of the wheel; the libraries and csrc are added.
        """
        build, editable = _builder(Path(self.root)), version == "editable"
        self.folder = tempfile.TemporaryDirectory(prefix="threed-build-")
        if not editable:
            # If there is no compiler, or the library does not load later, threed compiles one at first use.
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
        """Removes the libraries that `initialize` compiled, because the wheel contains them now."""
        self.folder.cleanup()


class Readme(MetadataHookInterface):
    """Replaces relative links in README.md by links to the repository that pyproject.toml names."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Sets the long description of the project to the README with absolute links."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": absolute(text, metadata["urls"]["Repository"]),
        }


def absolute(text: str, repository: str) -> str:
    """Returns Markdown with absolute links.

    Args:
        text: Markdown. Relative links become links to a page of the repository's main branch, and
            relative addresses of pictures become addresses of the files there.
        repository: URL of the repository.
    """
    text = re.sub(r"(!\[[^\]]*\]\()(?!https?:)", rf"\1{repository}/raw/main/", text)
    return re.sub(r"(?<!!)(\[[^\]]*\]\()(?!https?:|#)", rf"\1{repository}/blob/main/", text)


def _include(path: Path, place: str, build_data: dict[str, Any]) -> None:
    """Adds a library to the wheel, which is then for one platform and any Python version.

    Args:
        path: the library.
        place: its path in the wheel.
        build_data: hatchling's settings of the wheel.
    """
    build_data["force_include"][str(path)] = place
    build_data["pure_python"] = False
    build_data["tag"] = f"py3-none-{platform_of(path.read_bytes())}"


def platform_of(library: bytes) -> str:
    """Returns the platform tag of a shared library.

    An example is `manylinux_2_35_x86_64`, if the library needs at most glibc 2.35 and the libstdc++
    that distributions ship with it.
    """
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    glibc = [
        (int(major), int(minor)) for major, minor in re.findall(rb"GLIBC_(\d+)\.(\d+)", library)
    ]
    newest = max((int(n) for n in re.findall(rb"GLIBCXX_3\.4\.(\d+)", library)), default=0)
    beside = next((minor for n, minor in LIBSTDCXX.items() if newest <= n), None)
    if (
        not glibc or beside is None
    ):  # not Linux with glibc, or a compiler newer than the table: a tag for this machine only
        return platform
    major, minor = max(*glibc, (2, beside))
    return platform.replace("linux", f"manylinux_{major}_{minor}", 1)
