"""Writes Markdown tables for docs/reference/performance.md from the JSON files of the other stages.

    python -m benchmarks.gpu_stages.table --out benchmarks/results/gpu     # prints them, and writes OUT/table.md

It needs no GPU and no torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_stages import record
from benchmarks.gpu_stages.record import NOT_MEASURED, CorruptRecord

STAGES = (
    "build", "tests", "bandwidth", "features", "roof", "kernels", "step", "sanitizer", "nccl", "sizes", "largest",
)  # fmt: skip
Found = Mapping[str, Any]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns a table; if it has no rows, it states "not measured"."""
    lines = [[one_line(cell) for cell in row] for row in rows] or [
        [NOT_MEASURED] + ["–"] * (len(head) - 1)
    ]
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines)]


def number(value: Any, form: str = ".3g", unit: str = "") -> str:
    """Returns a figure as text; "not measured" for other values."""
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{value:{form}}{unit}" if plain else NOT_MEASURED


def percent(value: Any) -> str:
    return number(value * 100, ".0f", " %") if isinstance(value, int | float) else NOT_MEASURED


def at(found: Any, *names: str) -> Any:
    """Returns the value under nested names; None if one is missing."""
    for name in names:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def spread(found: Found, form: str = ".4g") -> str:
    """Returns a median and its quartiles as text, in milliseconds."""
    if "median_ms" not in found:
        return str(found.get("wrong") or found.get("note") or NOT_MEASURED)
    return f"{found['median_ms']:{form}} ({found['low_ms']:{form}}–{found['high_ms']:{form}})"


# ---------------------------------------------------------------------------------------------------- a table a stage


def of_stages(folder: Path) -> list[str]:
    """Returns the table of stages: how each ended, on which device, at which commit."""
    rows = []
    for stage in STAGES:
        try:
            found = record.read(folder, stage)
        except CorruptRecord:
            found = {"status": "corrupt"}
        if found is None:
            rows.append([stage, NOT_MEASURED, "–", "–", "–", "–"])
            continue
        texts = [str(found.get(key, "–")) for key in ("status", "seconds", "device", "commit")]
        rows.append([stage, *texts, str(found.get("message", ""))])
    return table(["stage", "status", "seconds", "device", "commit", "message"], rows)


def one_line(text: str) -> str:
    """Returns a text in a form that is valid in a table cell."""
    return text.replace("|", "/").replace("\n", " ")[:160] or "–"


def of_build(found: Found) -> list[str]:
    rows: list[list[str]] = []
    for group in ("versions", "gpu", "state"):
        rows += [[key, str(value)] for key, value in (at(found, group) or {}).items()]
    rows += [
        [f"compilation of csrc/{name}, s", number(at(found, f"build_{name}", "seconds"))]
        for name in ("cpu", "cuda")
    ]
    return table(["what", "value"], rows)


def of_tests(found: Found) -> list[str]:
    counts = found.get("counts") or {}
    rows = [[way, str(counts[way])] for way in counts]
    rows += [["failure", text] for text in found.get("failures", ())]
    rows += [["collected, not run", str(found["collected"])]] if "collected" in found else []
    return table(["pytest -m gpu", "tests"], rows)


def of_sanitizer(found: Found) -> list[str]:
    if found.get("tools") == "not available":
        return table(
            ["compute-sanitizer", "result"], [["not available", str(found.get("why", "–"))]]
        )
    rows = [[f"{name}, our kernels", number(at(one, "errors"), "d", " errors")] for name, one in
            (found.get("ours") or {}).items()]  # fmt: skip
    if planted := found.get("planted"):
        rows.append(["planted faults reported", f"{len(planted['found'])} of {planted['planted']}"])
        rows.append(["missed", ", ".join(planted["missed"]) or "none"])
        rows.append(["not looked for by any tool", ", ".join(planted["not_looked_for"]) or "none"])
    return table(["compute-sanitizer", "result"], rows)


def of_bandwidth(found: Found) -> list[str]:
    rows = [
        [f"on the device, {mib} MiB", one] for mib, one in (found.get("copy_by_mib") or {}).items()
    ]
    rows += [[name.replace("_", " "), one] for name, one in (found.get("host") or {}).items()]
    cells = [
        [name, *(number(one.get(key), ".1f") for key in ("gb_per_s", "low", "high"))]
        for name, one in rows
    ]
    return table(["copy", "GB/s", "lower quartile", "upper quartile"], cells)


def of_kernels(found: Found) -> list[str]:
    head = [
        "kernel",
        "MB",
        "ours, ms",
        "of copy bandwidth",
        "eager, ms",
        "compiled, ms",
        "others, ms",
        "best / ours",
    ]
    rows = []
    for name, case in (found.get("cases") or {}).items():
        sides = dict(case["sides"])
        ours, eager, compiled = (sides.pop(side, {}) for side in ("ours", "eager", "compiled"))
        others = ", ".join(f"{side}: {spread(one)}" for side, one in sides.items()) or "–"
        peers = [
            one["median_ms"] for one in (eager, compiled, *sides.values()) if "median_ms" in one
        ]
        ratio = min(peers) / ours["median_ms"] if peers and "median_ms" in ours else None
        rows.append([
            name, number(case["bytes"] / 1e6, ".1f"), spread(ours), percent(ours.get("share")), spread(eager),
            spread(compiled), others, number(ratio, ".2f"),
        ])  # fmt: skip
    return [*table(head, rows), *_left_out(found)]


def _left_out(found: Found) -> list[str]:
    return (
        ["", f"No time was left for: {', '.join(found['left_out'])}."]
        if found.get("left_out")
        else []
    )


def of_step(found: Found) -> list[str]:
    sides = {"threed": found.get("ours") or {}, **(found.get("others") or {})}
    rows = []
    for name, one in sides.items():
        note = one.get("wrong") or one.get("note")
        rows.append([
            name if not note else f"{name}: {note}", number(at(one, "step_s"), ".3f"),
            number(at(one, "tokens_per_s"), ",.0f"), percent(at(one, "mfu")), number(at(one, "peak_gib"), ".1f"),
            number(at(one, "ours_times_as_fast"), ".3f"), number(_last(one), ".4f"),
        ])  # fmt: skip
    head = [
        "side",
        "s a step",
        "tokens/s",
        "MFU",
        "peak GiB",
        "threed is so many times as fast",
        "last loss compared",
    ]
    targets = (
        f"Targets: MFU {percent(found.get('target_mfu'))} ({met(at(found, 'ours', 'mfu'), found.get('target_mfu'))}), "
        f"{number(found.get('target_ratio'))} times as fast as compiled plain PyTorch "
        f"({met(at(found, 'others', 'plain, compiled', 'ours_times_as_fast'), found.get('target_ratio'))})."
    )
    without = [
        [name, number(at(one, "step_s"), ".3f"), number(100 * at(one, "longer_by"), "+.1f", " %")]
        for name, one in (found.get("ablation") or {}).items() if isinstance(one, Mapping)
    ]  # fmt: skip
    profile = found.get("profile") or {}
    idle = [
        ["idle between kernels", percent(profile.get("idle_share"))],
        ["gaps of more than 10 µs in two steps", number(profile.get("long_gaps"), "d")],
        ["kernels in two steps", number(profile.get("kernels"), "d")],
    ]
    state = [[key, str(value)] for key, value in (found.get("state_under_load") or {}).items()]
    longest = [
        [f"`{name}`", number(ms, ".2f")]
        for name, ms in (profile.get("longest_ms_a_step") or {}).items()
    ]
    return [
        *table(head, rows if found else []), "", targets, "", *table(["without", "s a step", "longer by"], without), "",
        *table(["the GPU's time", "value"], idle), "", *table(["while training", "nvidia-smi"], state), "",
        *table(["longest kernels", "ms a step"], longest[:10]),
    ]  # fmt: skip


def met(value: Any, target: Any) -> str:
    """Returns whether a figure reaches its target, as text."""
    if not isinstance(value, int | float) or not isinstance(target, int | float):
        return NOT_MEASURED
    return "reached" if value >= target else "missed"


def _last(one: Found) -> Any:
    losses = one.get("losses")
    return losses[-1] if losses else None


def of_largest(found: Found) -> list[str]:
    rows = []
    for place, one in (found.get("places") or {}).items():
        best, after = one.get("largest", {}), one.get("next", {})
        rows.append([
            {"none": "on the GPU", "cpu": "host memory", "nvme": "drive"}.get(place, place),
            number(at(best, "parameters"), ","), number(at(best, "layers"), "d"),
            number(at(best, "tokens_per_s"), ",.0f"), number(at(best, "tflops"), ".1f"),
            number(at(best, "peak_gib"), ".1f"),
            f"{after.get('layers', '')} layers: {after['failed']}" if "failed" in after else "–",
        ])  # fmt: skip
    return table(
        ["states", "parameters", "layers", "tokens/s", "TFLOP/s", "peak GiB", "the next one"], rows
    )


def of_nccl(found: Found) -> list[str]:
    rows = [
        [
            name,
            str(one["ranks"]),
            number(one["difference"], ".1e"),
            "yes" if one["same"] else "**no**",
        ]
        for name, one in (found.get("ways") or {}).items()
    ]
    note = ["", f"{found['note'][0].upper()}{found['note'][1:]}."] if found.get("note") else []
    return [
        *table(["way", "ranks", "largest difference of losses from one GPU", "same"], rows),
        *note,
    ]


def of_features(found: Found) -> list[str]:
    rows = [
        [name, str(one.get("dtype", "–")), number(one.get("difference"), ".1e"), _verdict(one)]
        for name, one in (found.get("features") or {}).items()
    ]
    return table(["feature", "format", "largest relative difference of losses", "same"], rows)


def _verdict(one: Found) -> str:
    if text := one.get("wrong") or one.get("note"):
        return str(text)
    return "yes" if one.get("same") else "**no**"


def of_roof(found: Found) -> list[str]:
    ways = ("forward", "input gradient", "weight gradient, bf16", "weight gradient, added in fp32")
    rows = [[name, *(number(at(one, way, "tflops"), ".0f") for way in ways)]
            for name, one in (found.get("products") or {}).items()]  # fmt: skip
    heads = [
        [model, backend, *(number(at(one, way, "tflops"), ".0f") for way in ("forward", "forward and backward")),
         "yes" if by["chosen"] == backend else "no"]
        for model, by in (found.get("attention") or {}).items()
        for backend, one in by.items() if backend != "chosen"
    ]  # fmt: skip
    return [
        *table(["product of 8,192 tokens, TFLOP/s", *ways], rows), "",
        *table(["attention, TFLOP/s", "backend", "forward", "forward and backward", "chosen by torch"], heads),
    ]  # fmt: skip


def of_sizes(found: Found) -> list[str]:
    rows = [
        [name, number(one.get("parameters"), ","), number(one.get("tokens_per_s"), ",.0f"), percent(one.get("mfu")),
         number(one.get("peak_gib"), ".1f")]
        for name, one in (found.get("sizes") or {}).items()
    ]  # fmt: skip
    off = f"bf16 against fp32 on the CPU, 5 losses: {number(found.get('difference_from_fp32'), '.1e')}."
    return [*table(["model", "parameters", "tokens/s", "MFU", "peak GiB"], rows), "", off]


SECTIONS = {
    "Machine": ("build", of_build), "Tests": ("tests", of_tests), "Sanitizer": ("sanitizer", of_sanitizer),
    "Copies": ("bandwidth", of_bandwidth), "Features": ("features", of_features),
    "Matrix products and attention": ("roof", of_roof), "Kernels": ("kernels", of_kernels),
    "A step of GPT 1.3B": ("step", of_step),
    "Largest models": ("largest", of_largest), "NCCL": ("nccl", of_nccl), "Other sizes": ("sizes", of_sizes),
}  # fmt: skip


def page(folder: Path) -> str:
    """Returns all tables."""
    lines = [
        "## GPU",
        "",
        *(["**" + warning + "**", ""] if (warning := rehearsal(folder)) else []),
        *of_stages(folder),
    ]
    for title, (stage, make) in SECTIONS.items():
        lines += ["", f"### {title}", "", *make(record.figures(folder, stage))]
    return "\n".join(lines) + "\n"


def rehearsal(folder: Path) -> str:
    """Returns the notice for figures of a rehearsal."""
    for stage in STAGES:
        try:
            found = record.read(folder, stage)
        except CorruptRecord:
            continue
        if found is not None and found.get("rehearsal"):
            return "REHEARSAL in tiny shapes: no figure here is a measurement."
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).resolve().parents[1] / "results" / "gpu"
    )
    # The options of every stage, which have no effect here.
    parser.add_argument("--device", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", help=argparse.SUPPRESS)
    parser.add_argument("--small", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    text = page(args.out)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "table.md").write_text(text)
    made = record.Record(args.out, "table", rehearsal=args.small, device="unknown")
    made.put(file=str(args.out / "table.md"))
    made.end(record.DONE)
    print(text)


if __name__ == "__main__":
    main()
