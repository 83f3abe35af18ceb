"""Measures the results store at the size of a large sweep: files, bytes, and how long readers wait for what.

    python benchmarks/store.py [--trials 10000] [--rows 1000] [--folder DIR] [--out FILE] [--json]

Makes a store of as many trials with as many metric rows each, measures what readers do with it, compacts it and
measures again. Each measurement has a fresh process of its own, so that its peak of memory is its own and nothing is
remembered; the libraries are loaded before the clock starts. The files were just written, so the operating system holds
them in memory: a first look at a store on a slow disk takes longer by the time that reading the bytes takes.

The trials are those of sweeps/scaling.yaml with more seeds: real configs with real ids. Each goes through the store's
own `AttemptWriter`, which makes and encodes its two files as in a training. Three things are left out that cost a
training milliseconds and 10,000 of them minutes: claims, the wait until each file is on the disk, and the live parts
that a running attempt replaces. The numbers are made up and always the same.
"""

import sys
from pathlib import Path

# As in analysis/scaling.py: the project's root takes the place of this folder.
if __name__ == "__main__" and not __package__:
    _here = Path(__file__).resolve().parent
    sys.path[:] = [str(_here.parent), *(entry for entry in sys.path if Path(entry).resolve() != _here)]

import argparse
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.machine import machine, peak_mem_bytes
from sweeps.store import TRIALS, AttemptWriter, Store, compact
from sweeps.store.places import LocalPlace

ROOT = Path(__file__).resolve().parent.parent
SWEEP = "sraven-scaling"
MIN_ROWS = 10
EVAL_METRICS = [(split, metric) for split in ("valid", "ood") for metric in ("loss", "accuracy_per_feature")]
TRAIN_METRICS = ["loss", "accuracy_per_feature"]

MEASUREMENTS: dict[str, Callable[[Store], int]] = {
    "list": lambda store: sum(len(store.place.entries(table, ".parquet")) for table in ("trials", "metrics")),
    "finished": lambda store: len(store.finished()),
    "statuses": lambda store: len(store.statuses()),
    "summary": lambda store: len(store.summary()),
    "trials": lambda store: len(store.trials()),
    "final_metrics": lambda store: len(store.final_metrics()),
    "one_trial": lambda store: len(store.metrics(trial_ids=[next(iter(store.sweeps()["trial_id"]))])),
    "scaling_frame": lambda store: _num_frame_rows(store),
}
"""What is timed, each returning the number of rows or files that it saw."""


def main(argv: Sequence[str] | None = None) -> int:
    """Makes a store, measures it, and writes what it found."""
    parser = argparse.ArgumentParser(description="Measures the results store.", allow_abbrev=False)
    parser.add_argument("--trials", metavar="N", type=int, default=10_000, help="trials of the store (default: 10000)")
    parser.add_argument("--rows", metavar="N", type=int, default=1000, help="metric rows per trial (default: 1000)")
    parser.add_argument("--folder", metavar="DIR", help="make the store here and keep it; default: a temporary folder")
    parser.add_argument("--out", metavar="FILE", help="where the numbers go; default: benchmarks/results/store.json")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--measure", choices=[*MEASUREMENTS, "compact"], help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.measure:
        print(json.dumps(_measure(args.measure, Store.open(args.folder))))
        return 0
    if args.trials < 1 or args.rows < MIN_ROWS:
        parser.error(f"--trials {args.trials} --rows {args.rows}: at least one trial of {MIN_ROWS} rows is needed")
    folder = Path(args.folder or tempfile.mkdtemp(prefix="hyla-store-benchmark-"))
    if args.folder and folder.exists() and any(folder.iterdir()):
        parser.error(f"--folder {folder}: isn't empty; name a new folder")
    try:
        result = run(folder, args.trials, args.rows)
    finally:
        if not args.folder:
            shutil.rmtree(folder, ignore_errors=True)
    out = Path(args.out) if args.out else ROOT / "benchmarks" / "results" / "store.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result) if args.json else table(result))
    return 0


def run(folder: Path, num_trials: int, num_rows: int) -> dict[str, Any]:
    """Makes a store in an empty folder and measures it, in parts and compacted.

    Args:
      folder: of the store.
      num_trials: trials it holds.
      num_rows: metric rows of each.

    Returns:
      What stands in store.json; times in seconds, sizes in bytes.
    """
    on = machine("pyarrow", "pandas", "numpy")
    start = time.perf_counter()
    make_store(folder, num_trials, num_rows)
    made_s = time.perf_counter() - start
    parts = {"size": sizes(folder), **{name: measure(name, folder) for name in MEASUREMENTS}}
    compacted = {"compact": measure("compact", folder)}
    measure("compact", folder)  # the first call made the large files, this one removes what they replace
    compacted |= {"size": sizes(folder), **{name: measure(name, folder) for name in MEASUREMENTS}}
    return {
        "machine": on,
        "trials": num_trials,
        "rows_per_trial": num_rows,
        "make_s": round(made_s, 3),
        "parts": parts,
        "compacted": compacted,
    }


# ----------------------------------------------------------------------------------------------------- the store


class HastyPlace(LocalPlace):
    """A folder whose writers don't wait until what they write is on the disk."""

    def write(self, path: str, data: bytes, *, durable: bool = True) -> None:
        super().write(path, data, durable=False)


def make_store(folder: Path, num_trials: int, num_rows: int) -> None:
    """Makes the store: one attempt per trial; of a hundred trials one diverged and one failed half way."""
    from hyla_core.counts import num_non_embedding_params, num_params, train_flops_per_example
    from sweeps.expand import expand
    from sweeps.spec import load_sweep

    scaling = ROOT / "sweeps" / "scaling.yaml"
    per_seed = load_sweep(scaling, overrides=["axes.seed=[0]"]).num_combinations
    seeds = list(range(-(-num_trials // per_seed)))
    spec = load_sweep(scaling, overrides=[f"axes.seed={seeds}"])
    trials = expand(spec)[:num_trials]
    store = Store.create(HastyPlace(folder))
    store.record_sweep(SWEEP, trials, file="sweeps/scaling.yaml", tiny=False, select_over=spec.select_over)
    for index, trial in enumerate(trials):
        config = trial.config
        total = config.data.num_steps
        status = {98: "diverged", 99: "failed"}.get(index % 100, "finished")
        steps = total if status == "finished" else total // 2
        flops = train_flops_per_example(config)
        row = {
            **{column.name: None for column in TRIALS},
            "trial_id": trial.trial_id,
            "attempt": 1,
            "start_step": 0,
            "num_steps": total,
            "started_at": pd.Timestamp("2026-01-01", tz="UTC") + pd.Timedelta(seconds=index),
            "run_id": "benchmark",
            "num_params": sum(num_params(config).values()),
            "num_non_embedding_params": num_non_embedding_params(config),
            "train_flops_per_example": float(flops),
            "train_flops": float(flops) * total * config.optim.batch_size,
        }
        writer = AttemptWriter(store.place, row, config.flat(), "benchmark")
        writer.add(metric_rows(index, row["num_non_embedding_params"], steps, num_rows))
        error = "RuntimeError: out of luck" if status == "failed" else None
        writer.seal(status, error, train_s=float(index), examples_seen=steps * config.optim.batch_size)


def metric_rows(index: int, num_params: int, num_steps: int, num_rows: int) -> list[tuple[int, str, str, float]]:
    """Made-up rows of one trial: losses that fall as power laws of step and size, with noise.

    Args:
      index: of the trial; seeds the noise.
      num_params: of its model.
      num_steps: step of the last row.
      num_rows: how many; an evaluation of four rows after each fifty, the last one after the last step.
    """
    rng = np.random.default_rng(index)
    num_evals = max(1, num_rows // 50)
    num_train = num_rows - num_evals * len(EVAL_METRICS)
    steps = np.arange(1, -(-num_train // 2) + 1) * num_steps // -(-num_train // 2)
    losses = num_params**-0.1 + steps**-0.3 + rng.normal(0, 0.01, len(steps))
    rows = []
    eval_after = {len(steps) * number // num_evals for number in range(1, num_evals + 1)}
    for number, (step, loss) in enumerate(zip(steps.tolist(), losses.tolist(), strict=True), start=1):
        values = {"loss": loss, "accuracy_per_feature": float(np.exp(-loss))}
        rows += [(step, "train", metric, values[metric]) for metric in TRAIN_METRICS]
        if number in eval_after:
            if number == len(steps):
                rows = rows[: num_train + (num_evals - 1) * len(EVAL_METRICS)]
            rows += [(step, split, metric, values[metric] + 0.01 * (split == "ood")) for split, metric in EVAL_METRICS]
    return rows


# ------------------------------------------------------------------------------------------------- measuring


def measure(name: str, folder: Path) -> dict[str, float]:
    """One measurement in a process of its own: `s` and `again_s` (seconds), `peak_mem_bytes`, `rows`."""
    command = [sys.executable, str(Path(__file__).resolve()), "--measure", name, "--folder", str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout))


def _measure(name: str, store: Store) -> dict[str, float]:
    before = peak_mem_bytes()
    if name == "compact":
        start = time.perf_counter()
        compact(store, grace_s=0)
        return {"s": time.perf_counter() - start, "peak_mem_bytes": peak_mem_bytes(), "import_mem_bytes": before}
    if name == "scaling_frame":
        import analysis.frames  # noqa: F401  loaded before the clock starts
    start = time.perf_counter()
    rows = MEASUREMENTS[name](store)
    taken = time.perf_counter() - start
    peak = peak_mem_bytes()
    start = time.perf_counter()
    MEASUREMENTS[name](store)
    again = time.perf_counter() - start
    return {"s": taken, "again_s": again, "peak_mem_bytes": peak, "import_mem_bytes": before, "rows": rows}


def _num_frame_rows(store: Store) -> int:
    from analysis.frames import load_sweep

    return len(load_sweep(store).trials)


def sizes(folder: Path) -> dict[str, dict[str, int]]:
    """Files and bytes of each table."""
    found = {}
    for name in ("trials", "metrics", "sweeps"):
        stats = [path.stat() for path in (folder / name).glob("*.parquet")]
        found[name] = {"files": len(stats), "bytes": sum(stat.st_size for stat in stats)}
    return found


def table(result: dict[str, Any]) -> str:
    """The numbers, for people."""
    lines = [f"{result['trials']:,} trials × {result['rows_per_trial']:,} rows, made in {result['make_s']:.0f} s", ""]
    lines.append(f"{'':16}{'parts':>34}{'compacted':>34}")
    for name in ("trials", "metrics"):
        cells = [result[form]["size"][name] for form in ("parts", "compacted")]
        lines.append(
            f"{name + '/':16}" + "".join(f"{c['files']:>14,} files {c['bytes'] / 2**20:>10,.1f} MiB" for c in cells)
        )
    lines += ["", f"{'':16}" + 2 * f"{'first s':>12}{'again s':>10}{'peak MiB':>12}"]
    for name in MEASUREMENTS:
        cells = [result[form][name] for form in ("parts", "compacted")]
        lines.append(
            f"{name:16}"
            + "".join(f"{c['s']:>12.3f}{c['again_s']:>10.3f}{c['peak_mem_bytes'] / 2**20:>12,.0f}" for c in cells)
        )
    done = result["compacted"]["compact"]
    lines.append(f"{'compact':16}{'':34}{done['s']:>12.3f}{'':10}{done['peak_mem_bytes'] / 2**20:>12,.0f}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
