"""The default corpus: the sources of this Python's own standard library, so that nothing is shipped or downloaded.

Use: `source = standard_library()`. Which files: every .py under the standard library's folder except tests and
installed packages, sorted by path. They differ between Python versions, so runs record the corpus' sha256. Where the
sources are missing (a zipped or stripped Python), a synthetic grammar takes their place, and the notice says so.
"""

from __future__ import annotations

import os
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from threed.data.sources import TextFile, TextSource

# Third-party code and tests are no part of the corpus; the folders of compiled files hold no sources.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
# A whole standard library has about 12 MB. Less than this is a stripped one, too little to learn from.
ENOUGH_BYTES = 1_000_000

NOUNS = "cat dog bird child teacher river garden house letter song engine sailor king farmer window clock".split()
VERBS = "see follow find paint carry remember help hear watch build".split()
MOODS = "sleep sing wait fall arrive laugh".split()
ADJECTIVES = "small old quiet green happy strange heavy bright".split()
PLACES = "near behind under beside above".split()
NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve".split()


def standard_library(folder: Path | None = None) -> TextSource:
    """Give the .py files of the standard library in `folder` (default: this Python's), or the synthetic corpus."""
    root = folder or Path(sysconfig.get_path("stdlib"))
    files = tuple(TextFile(name, root / name) for name in _python_files(root))
    source = TextSource(f"Python {platform.python_version()} standard library, {len(files)} files", files, "path")
    if source.size < ENOUGH_BYTES:
        return synthetic(
            notice=f"No Python sources in {root}: training on a synthetic grammar. Give --data.path for real text."
        )
    return source


def synthetic(seed: int = 0, documents: int = 1000, notice: str = "") -> TextSource:
    """Give seeded documents of about 3 kB: sentences with agreement, nesting and small sums, the same everywhere."""
    files = tuple(
        TextFile(f"synthetic/{number:05}.txt", content=_document(_Draw((seed << 32) + number)).encode())
        for number in range(documents)
    )
    return TextSource(f"synthetic grammar, seed {seed}, {documents} documents", files, "path", notice)


def _python_files(root: Path) -> list[str]:
    names: list[str] = []
    for here, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        names += [Path(here, name).relative_to(root).as_posix() for name in files if name.endswith(".py")]
    return sorted(name for name in names if (root / name).is_file() and os.access(root / name, os.R_OK))


class _Draw:
    """Random choices from splitmix64, which, unlike `random.choice`, no Python version can change."""

    def __init__(self, seed: int) -> None:
        self._state = seed

    def below(self, bound: int) -> int:
        """Give the next number from 0 to bound - 1."""
        mask = (1 << 64) - 1
        self._state = (self._state + 0x9E3779B97F4A7C15) & mask
        word = self._state
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & mask
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & mask
        return ((word ^ (word >> 31)) * bound) >> 64

    def of(self, words: list[str]) -> str:
        """Give the next one of `words`."""
        return words[self.below(len(words))]


def _document(draw: _Draw) -> str:
    return "".join(f"{' '.join(sentence)}.\n" for sentence in _sentences(draw, count=64))


def _sentences(draw: _Draw, count: int) -> Iterator[list[str]]:
    for _ in range(count):
        yield _sum(draw) if draw.below(5) == 0 else _statement(draw)


def _sum(draw: _Draw) -> list[str]:
    total = draw.below(len(NUMBERS))
    part = draw.below(total + 1)
    return [NUMBERS[part], "plus", NUMBERS[total - part], "is", NUMBERS[total]]


def _statement(draw: _Draw) -> list[str]:
    subject, plural = _noun_phrase(draw, depth=0)
    if draw.below(3) == 0:
        return [*subject, _agree(draw.of(MOODS), plural)]
    return [*subject, _agree(draw.of(VERBS), plural), *_noun_phrase(draw, depth=1)[0]]


def _noun_phrase(draw: _Draw, depth: int) -> tuple[list[str], bool]:
    """Give a noun phrase and whether it is plural; the verb may come several words later and must still agree."""
    plural = draw.below(2) == 1
    noun = draw.of(NOUNS)
    words = ["these" if plural else "this"]
    if draw.below(3) == 0:
        words.append(draw.of(ADJECTIVES))
    words.append(("children" if noun == "child" else f"{noun}s") if plural else noun)
    kind = draw.below(4) if depth < 2 else 0
    if kind == 1:
        words += [draw.of(PLACES), *_noun_phrase(draw, depth + 1)[0]]
    elif kind == 2:
        words += ["that", _agree(draw.of(VERBS), plural), *_noun_phrase(draw, depth + 1)[0]]
    return words, plural


def _agree(verb: str, plural: bool) -> str:
    if plural:
        return verb
    return verb[:-1] + "ies" if verb.endswith("y") and verb[-2] not in "aeiou" else _third_person(verb)


def _third_person(verb: str) -> str:
    return verb + ("es" if verb.endswith(("s", "sh", "ch", "x")) else "s")
