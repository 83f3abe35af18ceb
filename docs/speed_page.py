"""Writes the page of measurements from the files in benchmarks/results/, which the scripts of benchmarks/ write.

`conf.py` calls `write_page`; the page can't say anything else than what was measured last.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from schema_page import markdown_table

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"


def write_page(path: Path) -> None:
    """Writes the page, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(RESULTS), encoding="utf-8")


def page(results: Path) -> str:
    """The page, in Markdown: a section for each result that is there."""
    lines = [
        "# Measurements",
        "",
        "Made from `benchmarks/results/`. Each number is from one run on the machine that is named above it; ratios",
        "compare two things that took turns in that run. [How fast](../speed.md) says what they mean.",
        "",
    ]
    for name, section in SECTIONS.items():
        if (file := results / f"{name}.json").exists():
            lines += [*section(json.loads(file.read_text())), ""]
    return "\n".join(lines)


def machine_line(machine: dict[str, Any]) -> str:
    """What a result was measured on."""
    versions = [f"{name} {value}" for name, value in machine.items() if isinstance(value, str) and name != "cpu"]
    memory = f"{machine['memory_bytes'] / 2**30:.0f} GiB"
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {memory}, load {machine['load']} before; {', '.join(versions)}."
    )


def steps_section(result: dict[str, Any]) -> list[str]:
    """Training steps against the plain loop."""
    header = ("training", "ratio", "step, ms", "compilation, s", "peak memory, MiB", "of the best product, %")
    rows = []
    for case in result["cases"]:
        cells = [
            " → ".join(form.format(scale * case[f"{side}_{name}"]) for side in ("plain", "ours"))
            for name, scale, form in (
                ("step_s", 1e3, "{:.0f}"),
                ("compile_s", 1, "{:.0f}"),
                ("peak_mem_bytes", 2**-20, "{:.0f}"),
                ("utilisation", 100, "{:.0f}"),
            )
        ]
        rows.append((f"`{case['name']}`", f"{case['ratio']:.2f}", *cells))
    return [
        "## Training steps",
        "",
        "`python benchmarks/steps.py`: batches of 128, plain loop → hyla; medians of "
        f"{result['rounds']} turns each. The best float32 matrix product of that run had "
        f"{result['product_flops_per_s'] / 1e9:.0f} GFLOP/s.",
        "",
        machine_line(result["machine"]),
        "",
        *markdown_table(header, rows),
    ]


def blockwise_section(result: dict[str, Any]) -> list[str]:
    """Attention in blocks against attention from all pairs."""
    model = result["model"]
    header = ("positions", "way", "step, s", "memory of a step, MiB", "compilation, s")
    rows = [
        (
            f"{step['seq_len']:,}",
            step["way"],
            "does not fit" if step["step_s"] is None else f"{step['step_s']:.1f}",
            f"{step['temp_bytes'] / 2**20:,.0f}",
            f"{step['compile_s']:.0f}",
        )
        for step in result["steps"]
    ]
    return [
        "## Long sequences",
        "",
        f"`python benchmarks/blockwise.py`: {model['attention']}, {model['num_layers']} layers of {model['num_heads']} "
        f"heads of {model['qk_dim'] // model['num_heads']}, dropout on, batch {result['batch']}; medians.",
        "",
        machine_line(result["machine"]),
        "",
        *markdown_table(header, rows),
    ]


def sweeps_section(result: dict[str, Any]) -> list[str]:
    """What a sweep costs beside its training steps."""
    mini, alone, steps = result["mini"], result["alone"], result["steps"]
    rows = [
        (f"{mini['trials']} trials of `--tiny`, wall time", f"{mini['wall_s']:.0f} s"),
        ("the same trials, one process each", f"{alone['wall_s']:.0f} s, {result['times_faster']:.2f} times as long"),
        ("start-up, of the wall time", f"{mini['start_s']:.0f} s"),
        (
            "training steps compiled",
            f"{mini['compiled']} by {mini['workers']} workers, {mini['loaded']} found in the cache",
        ),
        ("share of the driver in processor time", f"{100 * mini['driver_share']:.1f} %"),
        (f"{steps['trials']:,} trials of one step, beside training", f"{steps['trial_ms']:.1f} ms a trial"),
        (f"the same, {steps['packs']} packs", f"{steps['pack_ms']:.0f} ms a pack"),
        (
            "driver, a pack",
            f"{steps['driver_cpu_ms_per_pack']:.0f} ms of processor, {steps['driver_kb_per_pack']:.0f} kB",
        ),
    ]
    return [
        "## A sweep beside its training",
        "",
        f"`python benchmarks/sweeps.py`; of the trials in processes of their own, {alone['ran']} were run and the "
        "others calculated from them.",
        "",
        machine_line(result["machine"]),
        "",
        *markdown_table(("what", "takes"), rows),
    ]


SECTIONS: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "steps": steps_section,
    "blockwise": blockwise_section,
    "sweeps": sweeps_section,
}
"""By the name of a result's file, in the order of the page."""
