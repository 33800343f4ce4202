"""The documentation is correct: files exist, links work, commands parse, code runs.

The tests read the Markdown pages. Commands are the lines of their `sh` blocks. Each kind of command
has a function that checks it; a line of an unknown kind is an error. Generated pictures and pages
must be up to date.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import shlex
import textwrap
from pathlib import Path
from typing import get_args
from xml.etree import ElementTree

import pytest

import threed
from benchmarks import gpu
from tests import hf_models, keys, mutants, pictures, structure
from tests.harness import run_ranks, run_script
from threed import schedules
from threed.cli import from_megatron, parser
from threed.config.arguments import GROUPS, format_problems, load
from threed.config.groups import ConfigError, key_name
from threed.config.migration.megatron import translate
from threed.core import source
from threed.data.tokenizer_files import PUBLISHED
from threed.schedules import registry

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CODE_OF_CONDUCT.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
EXAMPLE = ROOT / "examples" / "custom_model.py"
WRAPPING = ROOT / "examples" / "wrap_transformers.py"
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
FOLDERS = ("threed/", "pretrain/", "examples/", "benchmarks/", "tests/", "docs/", "csrc/", ".ci/")
SHIPPED = set(get_args(registry.ScheduleName))
KEYS = {
    f"--{group}.{key_name(name)}" for group, model in GROUPS.items() for name in model.model_fields
}

page = pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)


def blocks(path: Path, language: str) -> list[str]:
    """Returns the contents of a page's code blocks in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)


def indented(block: str) -> str:
    """Returns a block indented like the body of a function; formatters remove this indentation."""
    return textwrap.indent(block, "    ")


def prose(path: Path) -> str:
    """Returns a page without its code blocks."""
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def inline(text: str) -> list[str]:
    """Returns the words between single backticks."""
    return [word for code in re.findall(r"`([^`\n]+)`", text) for word in code.split()]


# ------------------------------------------------------------------------------------------------ files, links, names


def anchors(path: Path) -> set[str]:
    """Returns the anchors that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@page
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if not target.startswith("http"):
            name, _, anchor = target.partition("#")
            file = path.parent / name if name else path
            assert file.exists(), f"{target}: no such file"
            assert not anchor or anchor in anchors(file), f"{target}: no such heading"


@page
def test_every_file_that_is_named_exists(path: Path) -> None:
    for word in inline(path.read_text()):
        if word.startswith(FOLDERS) and not re.search(r"[<>{}]", word):
            file = word.partition(":")[0]  # the word may be FILE.py:NAME
            assert any(ROOT.glob(file.rstrip("/,."))), f"{word}: no such file"


def test_the_table_of_packages_is_complete() -> None:
    """It lists every package, and the files that it names exist."""
    section = (ROOT / "CONTRIBUTING.md").read_text().split("| package | contents |")[1]
    named: set[str] = set()
    for line in section.split("\n\n")[0].splitlines()[2:]:
        _, where, what, _ = line.split("|")
        named.update(place.rstrip("/") for place in inline(where))
        for word in inline(what):
            if word.endswith(".py"):
                assert (ROOT / inline(where)[0] / word).is_file(), word
    packages = {
        f"threed/{path.name}"
        for path in (ROOT / "threed").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert packages - named == {"threed/__init__.py", "threed/__main__.py"}


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 1500


def test_the_example_of_the_readme_runs(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(blocks(ROOT / "README.md", "python")[0])
    for ranks in (1, 2):
        done = run_script(ranks, ["example.py"], tmp_path, {**os.environ, "PYTHONPATH": str(ROOT)})
        assert done.returncode == 0, done.stdout + done.stderr
        assert float(done.stdout.split()[-1]) < 1


@page
def test_every_python_name_that_is_named_exists(path: Path) -> None:
    for name in re.findall(r"`(threed(?:\.\w+)+)`", prose(path)):
        assert resolves(name), f"{name}: no such module or attribute"


def resolves(name: str) -> bool:
    """Returns whether a dotted name is a module or an attribute of one."""
    module, _, attribute = name.rpartition(".")
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        return hasattr(importlib.import_module(module), attribute)
    return True


# ----------------------------------------------------------------------------------------------------------- commands


@page
def test_every_flag_is_a_key(path: Path) -> None:
    flags = re.findall(r"(?<![\w-])--[a-z]+\.[a-z][\w-]*", path.read_text())
    # except a pattern, and a flag that is misspelled on purpose
    assert not set(flags) - KEYS - {"--group.key", "--optim.lrr"}


@page
def test_every_command_is_one_that_works(path: Path) -> None:
    for block in blocks(path, "sh"):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            if words:
                check_command(words)


def check_command(words: list[str]) -> None:
    """Raises AssertionError or ConfigError if a command would not run."""
    program, *rest = words
    if "&&" in rest:
        at = rest.index("&&")
        check_command([program, *rest[:at]])
        check_command(rest[at + 1 :])
    elif program == "tar":
        assert rest[0] == "czf", words
    elif program == "make":
        assert {word for word in rest if "=" not in word} <= make_targets(), words
    elif program == "torchrun":
        at = next(i for i, word in enumerate(rest) if word.endswith(".py") or word == "-m")
        check_launch(rest[:at])
        if rest[at : at + 2] == ["-m", "threed.interop.deepspeed"]:
            assert rest[at + 2] == "-m" or rest[at + 2].endswith(".py"), words
        elif rest[at] == "-m":
            assert rest[at + 1 : at + 3] == ["threed", "train"], words
            check_tool(rest[at + 2 :], world_of(rest[:at]))
        else:
            check_training(rest[at], rest[at + 1 :], world_of(rest[:at]))
    elif program == "threed":
        check_tool(rest)
    elif program == "hf":
        assert (rest[0], rest[1] in PUBLISHED.values()) == ("download", True), words
    elif program == "pip":
        assert rest[0] in ("install", "download"), words
    elif program == ".":
        assert rest == [".venv/bin/activate"], words
    elif program == "python" and rest[:2] == ["-m", "venv"]:
        assert rest[2:] == [".venv"], words
    elif program == "python" and rest[0] == "-m" and rest[1].startswith("tests."):
        importlib.import_module(rest[1])
    elif program == "python" and rest[:2] == ["-m", "pytest"]:
        assert all((ROOT / word).exists() for word in rest if "/" in word), words
    elif program == "python" and rest[0] == "tests/mutants.py":
        mutants.parser().parse_args(rest[1:])
    elif program == "python" and rest[0] == "benchmarks/gpu.py":
        args = gpu.parse(rest[1:])
        assert gpu.chosen(args.only, gpu.STAGES), words
        gpu.chosen(args.again, gpu.STAGES)
    elif program == "python":
        check_training(rest[0], rest[1:], 1)
    else:
        raise AssertionError(f"{shlex.join(words)}: no command that this test knows")


def make_targets() -> set[str]:
    """Returns the targets that the Makefile lists."""
    return set(
        re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    )  # type: ignore[index]


def check_launch(flags: list[str]) -> None:
    known = {
        "--standalone",
        "--nnodes",
        "--nproc-per-node",
        "--rdzv-backend",
        "--rdzv-endpoint",
        "--rdzv-id",
    }
    known |= {"--max-restarts"}
    assert {flag for flag in flags if flag.startswith("--")} <= known, flags


def world_of(flags: list[str]) -> int:
    """Returns the world size for torchrun's flags; for an elastic job, the largest one."""
    asked = {
        key: flags[flags.index(key) + 1] if key in flags else "1"
        for key in ("--nnodes", "--nproc-per-node")
    }
    sizes = {key: int(value.rpartition(":")[2]) for key, value in asked.items()}
    return sizes["--nnodes"] * sizes["--nproc-per-node"]


def check_training(script: str, flags: list[str], world: int) -> None:
    assert (ROOT / script).is_file(), script
    arch = "llama" if "llama" in script else "gpt"
    load(flags, defaults={"model": {"arch": arch}}, world_size=world)


def check_tool(words: list[str], world: int = 1) -> None:
    if from_megatron.FLAG in words:
        at = words.index(from_megatron.FLAG)
        found = translate(words[at + 1], world_size=8)
        assert (at, found.problems) == (1, ()), words
        load(
            [*found.flags, *words[at + 2 :]], defaults={"model": {"arch": found.arch}}, world_size=8
        )
    elif words[0] in ("train", "plan"):
        custom = source.names_model(words[1])
        arch = words.pop(1) if custom or words[1] in ("gpt", "llama") else "gpt"
        load(words[1:], defaults={"model": {"arch": arch}}, world_size=world)
    elif words[0] == "verify":
        load(parser.make_parser({}, "verify").parse_known_args(words)[1], world_size=1)
    else:
        parser.make_parser({}, words[0]).parse_args(words)


def test_make_train_runs_the_command_of_the_readme() -> None:
    recipe = re.search(
        r"^train:.*\n\t\$\(BIN\)/(torchrun .*) \$\(ARGS\)$",
        (ROOT / "Makefile").read_text(),
        re.MULTILINE,
    )
    assert recipe is not None
    assert f"```sh\n{recipe[1]}\n```" in (ROOT / "README.md").read_text()


def test_the_report_of_problems_is_a_real_one() -> None:
    flags = "--preset tiny --optim.lrr 1e-3 --parallel.tp 3 --parallel.sequence false".split()
    with pytest.raises(ConfigError) as caught:
        load(flags, world_size=3)
    assert (
        f"```text\n{format_problems(caught.value.problems)}\n```"
        in (ROOT / "README.md").read_text()
    )


def test_the_page_of_keys_is_new_and_has_them_all() -> None:
    assert keys.PAGE.read_text() == keys.page(), "stale: python -m tests.keys"
    assert set(re.findall(r"^\| `(--[\w.-]+)`", keys.page(), re.MULTILINE)) == KEYS


# --------------------------------------------------------------------------------------------------- code and pictures


@page
def test_python_code_runs_or_is_part_of_an_example(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # so that schedules that a page registers are removed afterwards
    monkeypatch.setattr(registry, "_SCHEDULES", dict(registry._SCHEDULES))
    for block in blocks(path, "python"):
        if not any(
            part in file.read_text() for file in EXAMPLES for part in (block, indented(block))
        ):
            code = compile(textwrap.dedent(block), str(path), "exec")
            if "threed.initialize" in block:  # it creates a process group
                run_ranks(1, run_beside_a_model, block, str(tmp_path))
            elif "fully_shard" in block:  # it creates a process group, too
                run_ranks(1, run_as_by_torchrun, block)
            elif "from_pretrained" not in block:  # such a block needs a finished run
                exec(code, {"__name__": "page"})


def run_beside_a_model(block: str, folder: str) -> None:
    """Runs code of a page with the objects that it assumes: model, data, and a ds_config.json."""
    os.chdir(folder)
    ds = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3},
    }
    Path("ds_config.json").write_text(json.dumps(ds))
    rows = hf_models.batch(0, 4)
    data = [{key: value[i] for key, value in rows.items()} for i in range(4)]
    exec(block, {"__name__": "page", "model": hf_models.make("gpt2"), "data": data})


def run_as_by_torchrun(block: str) -> None:
    """Runs code of a page with the environment of a single rank."""
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
    exec(block, {"__name__": "page"})


@pytest.mark.parametrize("name", pictures.SCHEDULES)
def test_pictures_of_plans_are_what_the_tool_draws(name: str) -> None:
    drawn = (pictures.FOLDER / f"{name}.svg").read_text()
    assert drawn == pictures.draw_schedule(name), "stale: python -m tests.pictures"


def test_the_picture_of_a_ring_is_what_the_tool_draws() -> None:
    drawn = (pictures.FOLDER / f"{pictures.RING}.svg").read_text()
    assert drawn == pictures.draw_ring(), "stale: python -m tests.pictures"


@pytest.mark.parametrize("name", pictures.BY_HAND)
def test_pictures_drawn_by_hand_have_the_colors_of_the_palette(name: str) -> None:
    drawn = (pictures.FOLDER / f"{name}.svg").read_text()
    assert drawn == pictures.restyled(drawn), "stale: python -m tests.pictures"


def test_every_picture_is_drawn_by_a_tool_or_by_hand() -> None:
    names = {*pictures.SCHEDULES, *pictures.BY_HAND, pictures.RING, structure.PICTURE.stem}
    assert {path.stem for path in pictures.FOLDER.iterdir()} == names


def test_the_page_of_schedules_has_each_with_its_simulated_figures() -> None:
    page = (ROOT / "docs" / "guide" / "schedules.md").read_text()
    assert set(pictures.SCHEDULES) == SHIPPED
    for name in pictures.SCHEDULES:
        timeline = schedules.simulate(schedules.build(name, 4, 8), schedules.Costs(1, 1, 1))
        held, sent = (
            " · ".join(f"{n:g}" for n in of)
            for of in (timeline.peak_activations, timeline.messages)
        )
        assert (
            f"| `{name}` | {timeline.makespan:g} | {timeline.bubble * 100:.1f} % | {held} | {sent} |"
            in page
        )
        assert f"(../images/{name}.svg)" in page


def test_the_picture_of_the_packages_is_new() -> None:
    assert structure.PICTURE.read_text() == structure.draw(), "stale: python -m tests.structure"


@pytest.mark.parametrize(
    "path", sorted((ROOT / "docs" / "images").iterdir()), ids=lambda path: path.name
)
def test_pictures_are_plain_svg_in_one_style_and_used(path: Path) -> None:
    pictures.check_style(path.read_text(encoding="utf-8"))
    root = ElementTree.parse(path).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "viewBox" in root.attrib
    for element in root.iter():
        assert element.tag.rpartition("}")[2] in {
            "svg",
            "title",
            "style",
            "g",
            "rect",
            "text",
            "line",
            "path",
            "circle",
        }
        assert not [
            name for name in element.attrib if name.startswith("on") or name.endswith("href")
        ]
    assert any(f"images/{path.name}" in other.read_text() for other in PAGES)


@page
def test_lines_of_prose_fit_a_screen(path: Path) -> None:
    if path.name != "CHANGELOG.md":  # it has one line per entry
        assert [
            line
            for line in prose(path).splitlines()
            if len(line) > 160 and not line.startswith("|")
        ] == []


def test_the_index_has_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    pages = [
        str(path.relative_to(ROOT / "docs")) for path in PAGES if ROOT / "docs" in path.parents
    ]
    linked = [name for name in pages if not name.startswith("internals/decisions/")]
    assert [name for name in linked if f"({name})" not in index] == ["index.md"]


def test_the_citation_has_the_version_of_the_package() -> None:
    assert f"\nversion: {threed.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_changelog_keeps_its_form() -> None:
    headings = re.findall(r"^(##+) (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == ("##", "[Unreleased]")
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert {text for level, text in headings if level == "###"} <= kinds


# ------------------------------------------------------------------------------------------------------ the examples


def run_example(
    folder: Path, name: str, *flags: str, ranks: int = 1, example: Path = EXAMPLE
) -> tuple[str, list[float]]:
    """Runs an example.

    Returns:
        Its output line about the model, and the losses and gradient norms of the steps.
    """
    (folder / "text.txt").write_text(
        "".join(f"the square of {n} is {n * n}\n" for n in range(2000))
    )
    small = (
        "--data.path text.txt --train.steps 3 --train.global-batch 8 --model.hidden 32 --model.seq 32 --optim.warmup 2"
        " --log.every 1 --log.wandb off --train.sample-tokens 0 --train.eval-samples 4"
    ).split()
    done = run_script(
        ranks, [str(example), *small, "--run.name", name, *flags], folder,
        {**os.environ, "THREED_CACHE": str(folder)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (model,) = (line for line in done.stdout.splitlines() if line.startswith("model "))
    rows = map(json.loads, (folder / "runs" / name / "metrics.jsonl").read_text().splitlines())
    return model, [row[key] for row in rows for key in ("train/loss", "train/grad_norm")]


def test_the_example_trains_the_same_on_one_rank_and_on_two(tmp_path: Path) -> None:
    model, alone = run_example(tmp_path, "alone")
    assert len(alone) == 6
    assert 5.5 <= alone[0] < 5.6
    again, cut = run_example(tmp_path, "cut", "--parallel.tp", "2", ranks=2)
    assert cut == pytest.approx(alone, abs=2e-5)  # fp32
    assert again == model


def test_a_transformers_model_trains_the_same_on_one_rank_and_on_two(tmp_path: Path) -> None:
    model, alone = run_example(tmp_path, "alone", example=WRAPPING)
    assert len(alone) == 6
    assert 5 <= alone[0] < 6
    again, sliced = run_example(
        tmp_path, "sliced", "--train.micro-batch", "4", ranks=2, example=WRAPPING
    )
    assert sliced == pytest.approx(alone, abs=2e-5)  # fp32
    assert again == model
