"""Measures what a sweep costs beside its training steps: start-up, compilation, the driver, the store.

    python benchmarks/sweeps.py [--quick] [--only mini|alone|steps] [--out FILE] [--json]

Three measurements, each with a cache of compiled programs that is empty at its start, and none with what another run
left behind:

- mini: `python -m sweeps run sweeps/scaling.yaml --tiny` as users run it. Its wall time; how many training steps each
  worker compiled and how many it found compiled; imports and start-up; the share of the driver.
- alone: the plain way. The same trials one after another, each in a process of its own that imports, compiles and
  trains, and keeps nothing. One long training of each shape is run. The other trials of a shape are taken to cost as
  much, where in the short ones steps and evaluations take as much less as there are fewer steps. `--all` runs every
  trial instead. Beside it, what the same would cost where the processes share JAX's persistent cache of programs,
  which is off unless somebody turns it on: for every fourth shape one more training is run, which finds its program.
- steps: 2,000 trials of one step of the smallest model, through all of it: spec, packs, Ray Tune, training, store. What
  is left of the time beside training, a pack and a trial; the driver's processor time and memory a pack. It is counted
  from the moment at which every worker has done its first pack, so that start-up and compilation stand apart.

Nothing inside the measured code is changed: the numbers come from the JSON lines that a run prints, and from what the
operating system says of the driver's process.
"""

import sys
from pathlib import Path

# As in analysis/scaling.py: the project's root takes the place of this folder.
if __name__ == "__main__" and not __package__:
    _here = Path(__file__).resolve().parent
    sys.path[:] = [str(_here.parent), *(entry for entry in sys.path if Path(entry).resolve() != _here)]

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from benchmarks.machine import machine

ROOT = Path(__file__).resolve().parent.parent
SCALING = ROOT / "sweeps" / "scaling.yaml"
MEASUREMENTS = ("mini", "alone", "steps")

NUM_STEPS_TRIALS = 2000
QUICK_TRIALS = 60
WARM_EVERY = 4
"""Of every so many shapes, one is run once more, with its program in the cache."""

QUICK = [
    "axes.optim.warmup_steps=[2]",
    "axes.model.attention=[softmax]",
    "axes.model.width=[1]",
    "axes.model.depth=[1]",
    "data.num_train=2560",
]
"""Makes the mini sweep one of a single shape."""

ONE_STEP = """\
name: one-step
task: {{name: sraven, num_features: 1, num_values: 4, permute_features: false}}
data: {{num_train: 64, num_steps: 1, num_valid: 4, num_ood: 4}}
model: {{attention: softmax, emb_dim: 4, num_heads: 1, num_layers: 1, qk_dim: 4, v_dim: 4, mlp_dim: 4}}
optim: {{name: adamw, batch_size: 4, peak_lr: 1e-3, weight_decay: 0.1, warmup_steps: 0}}
axes: {{seed: {seeds}}}
run: {{num_logs: 1, num_evals: 1, resources: {{cpu: 1}}}}
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, and writes what it found."""
    parser = argparse.ArgumentParser(description="Measures what a sweep costs beside training.", allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="a few trials, to see that it works")
    parser.add_argument(
        "--only", choices=MEASUREMENTS, action="append", help="this measurement alone (may be repeated)"
    )
    parser.add_argument("--all", action="store_true", help="alone: run every trial, not one of each shape")
    parser.add_argument("--out", metavar="FILE", help="where the numbers go; default: benchmarks/results/sweeps.json")
    parser.add_argument("--json", action="store_true", help="print JSON, one object a line, instead of text")
    parser.add_argument("--trial", metavar="INDEX", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.trial is not None:
        print(json.dumps(train_alone(args.trial, args.quick)))
        return 0
    result: dict[str, Any] = {"machine": machine("jax", "jaxlib", "ray", "pyarrow")}
    for name in args.only or MEASUREMENTS:
        if name == "mini":
            result[name] = mini(args.quick)
        elif name == "alone":
            result[name] = alone(args.quick, every=args.all)
        else:
            result[name] = steps(QUICK_TRIALS if args.quick else NUM_STEPS_TRIALS)
        if not args.json:
            print(f"{name}: {text(result[name])}", flush=True)
        else:
            print(json.dumps({"measurement": name, **result[name]}), flush=True)
    if {"mini", "alone"} <= result.keys():
        names = {"times_faster": "wall_s", "times_faster_than_cached": "cached_wall_s"}
        faster = {name: round(result["alone"][wall] / result["mini"]["wall_s"], 2) for name, wall in names.items()}
        result |= faster
        print(json.dumps(faster) if args.json else text(faster))
    out = Path(args.out) if args.out else ROOT / "benchmarks" / "results" / "sweeps.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def text(numbers: Mapping[str, Any]) -> str:
    """Numbers in one line."""
    return ", ".join(
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in numbers.items()
    )


# ------------------------------------------------------------------------------------------------- whole runs


class Moment(NamedTuple):
    """A line of a run, and how its driver was doing when it came."""

    event: dict[str, Any]
    at_s: float  # since the driver was started
    cpu_s: float  # processor time of the driver
    memory_bytes: int  # of the driver


def follow(command: Sequence[str], environment: Mapping[str, str]) -> list[Moment]:
    """Runs a sweep to its end and reads along.

    Args:
      command: of a run, which prints JSON.
      environment: of the process.

    Returns:
      What it printed.

    Raises:
      RuntimeError: it failed.
    """
    started = time.perf_counter()
    moments = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(environment), cwd=ROOT) as process:
        assert process.stdout is not None
        for line in process.stdout:
            event = json.loads(line)
            # Of the many lines of a pack, one is enough to look at the driver for.
            cpu_s, memory = (0.0, 0) if event["event"] == "trial" else _usage(process.pid)
            moments.append(Moment(event, time.perf_counter() - started, cpu_s, memory))
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit status {process.returncode}")
    moments.append(Moment({"event": "end"}, time.perf_counter() - started, 0.0, 0))
    return moments


def _usage(pid: int) -> tuple[float, int]:
    """Seconds of processor time and bytes of memory of a process; those that it started are not counted."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    cpu = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return cpu, int(fields[21]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def _fresh() -> Iterator[tuple[Path, dict[str, str]]]:
    """A folder for a store, and an environment with an empty cache of compiled programs."""
    folder = Path(tempfile.mkdtemp(prefix="hyla-sweeps-benchmark-"))
    cache = folder / "compiled"
    cache.mkdir()
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONPATH": str(ROOT),
    }
    try:
        yield folder, environment
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(sweep: Path, store: Path, *options: str) -> list[str]:
    words = [sys.executable, "-m", "sweeps", "run", str(sweep), "--results", str(store), "--address", "local"]
    return [*words, "--yes", "--json", *options]


def mini(quick: bool) -> dict[str, Any]:
    """The tiny form of the shipped sweep.

    Args:
      quick: one shape of it.

    Returns:
      Times in seconds; `compiled` counts training steps that XLA compiled, `loaded` those found in the cache.
    """
    options = [word for override in QUICK * quick for word in ("--set", override)]
    with _fresh() as (folder, environment):
        moments = follow(_run(SCALING, folder / "store", "--tiny", *options), environment)
    packs = [moment for moment in moments if moment.event["event"] == "pack_ended"]
    workers: dict[str, list[dict[str, Any]]] = {}
    for moment in packs:
        workers.setdefault(moment.event["worker"], []).append(moment.event)
    first = next(moment for moment in moments if moment.event["event"] == "pack_started")
    summary = next(moment for moment in moments if moment.event["event"] == "summary")
    total = sum(pack.event["wall_s"] for pack in packs)
    return {
        "wall_s": round(moments[-1].at_s, 2),
        "trials": summary.event["trained"],
        "packs": len(packs),
        "workers": len(workers),
        "compiled": sum(pack.event["num_compiled"] for pack in packs),
        "compiled_per_worker": [sum(pack["num_compiled"] for pack in own) for own in workers.values()],
        "loaded": sum(pack.event["num_loaded"] for pack in packs),
        "start_s": round(first.at_s, 2),
        "packs_s": round(total, 2),
        "packs_cpu_s": round(sum(pack.event["cpu_s"] for pack in packs), 2),
        "compile_s": round(sum(pack.event["compile_s"] for pack in packs), 2),
        "train_s": round(sum(pack.event["train_s"] for pack in packs), 2),
        "driver_cpu_s": round(summary.cpu_s, 2),
        "driver_share": round(summary.cpu_s / (summary.cpu_s + sum(pack.event["cpu_s"] for pack in packs)), 3),
    }


def steps(num_trials: int) -> dict[str, Any]:
    """Trials of one step.

    Returns:
      `pack_ms` and `trial_ms`: wall time beside training, of all workers' packs and trials once each worker has done
      its first pack; `busy_...`: processor time of workers and driver, which other work on the machine disturbs less.
    """
    with _fresh() as (folder, environment):
        sweep = folder / "one-step.yaml"
        sweep.write_text(ONE_STEP.format(seeds=list(range(num_trials))))
        moments = follow(_run(sweep, folder / "store"), environment)
    packs = [moment for moment in moments if moment.event["event"] == "pack_ended"]
    trials_of = {
        moment.event["pack_id"]: len(moment.event["trial_ids"])
        for moment in moments
        if moment.event["event"] == "pack_started"
    }
    first_of: dict[str, Moment] = {}
    for moment in packs:
        first_of.setdefault(moment.event["worker"], moment)
    begin, end = max(first_of.values(), key=lambda moment: moment.at_s), packs[-1]
    counted = packs[packs.index(begin) + 1 :]
    wall_s = end.at_s - begin.at_s
    train_s = sum(pack.event["train_s"] for pack in counted) / len(first_of)
    driver_cpu_s = end.cpu_s - begin.cpu_s
    cpu_s = driver_cpu_s + sum(pack.event["cpu_s"] for pack in counted)
    num_packs, num_trials_counted = len(counted), sum(trials_of[pack.event["pack_id"]] for pack in counted)
    first = next(moment for moment in moments if moment.event["event"] == "pack_started")
    return {
        "wall_s": round(moments[-1].at_s, 2),
        "trials": num_trials,
        "packs": len(packs),
        "workers": len(first_of),
        "start_s": round(first.at_s, 2),
        "first_packs_s": round(begin.at_s - first.at_s, 2),
        "steady_s": round(wall_s, 2),
        "train_s": round(train_s, 2),
        "pack_ms": round(1e3 * (wall_s - train_s) / num_packs, 2),
        "trial_ms": round(1e3 * (wall_s - train_s) / num_trials_counted, 2),
        "whole_pack_ms": round(1e3 * wall_s / num_packs, 2),
        "whole_trial_ms": round(1e3 * wall_s / num_trials_counted, 2),
        "busy_pack_ms": round(1e3 * cpu_s / num_packs, 2),
        "busy_trial_ms": round(1e3 * cpu_s / num_trials_counted, 2),
        "driver_cpu_ms_per_pack": round(1e3 * driver_cpu_s / num_packs, 2),
        "driver_kb_per_pack": round((end.memory_bytes - begin.memory_bytes) / 1e3 / num_packs, 1),
        "end_s": round(moments[-1].at_s - end.at_s, 2),
    }


# ------------------------------------------------------------------------------------------------- one process each


def _trials(quick: bool) -> list[Any]:
    from sweeps.expand import expand
    from sweeps.spec import load_sweep

    return expand(load_sweep(SCALING, tiny=True, overrides=QUICK * quick))


def alone(quick: bool, *, every: bool) -> dict[str, Any]:
    """The trials of the mini sweep, one process each, one after another.

    Args:
      quick: those of one shape.
      every: all of them; else one of each shape, and the rest by calculation.

    Returns:
      Times in seconds: `wall_s` where each process compiles, `cached_wall_s` where those of a shape compile once.
    """
    from sweeps.packs import shape_key

    shapes: dict[str, dict[int, list[int]]] = {}
    for index, trial in enumerate(_trials(quick)):
        by_length = shapes.setdefault(shape_key(trial.config), {})
        by_length.setdefault(trial.config.data.num_steps, []).append(index)
    ran: list[dict[str, float]] = []

    def run(index: int, environment: Mapping[str, str]) -> dict[str, float]:
        command = [sys.executable, str(Path(__file__).resolve()), "--trial", str(index), *["--quick"] * quick]
        started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment, cwd=ROOT)
        wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        ran.append({"index": index, **json.loads(done.stdout), "wall_s": wall, "cpu_s": cpu})
        return ran[-1]

    wall_s, cpu_s, num_found = 0.0, 0.0, 0
    saved_s: list[float] = []
    for number, by_length in enumerate(shapes.values()):
        lengths = sorted(by_length)
        longest = by_length[lengths[-1]]
        with _fresh() as (_, environment):
            cold = run(longest[0], environment)
            if number % WARM_EVERY == 0:
                saved_s.append(cold["compile_s"] - run(longest[-1], environment)["compile_s"])
        wall_s, cpu_s = wall_s + cold["wall_s"], cpu_s + cold["cpu_s"]
        num_found += sum(len(indices) for indices in by_length.values()) - 1
        for length in lengths:
            for index in by_length[length][length == lengths[-1] :]:
                if every:
                    with _fresh() as (_, environment):
                        own = run(index, environment)
                    wall_s, cpu_s = wall_s + own["wall_s"], cpu_s + own["cpu_s"]
                else:
                    # An evaluation does not get shorter with the training: short ones come out too cheap, if anything.
                    less = 1 - length / lengths[-1]
                    wall_s += cold["wall_s"] - less * cold["train_s"]
                    cpu_s += cold["cpu_s"] - less * cold["train_cpu_s"]
    return {
        "wall_s": round(wall_s, 2),
        "cached_wall_s": round(wall_s - num_found * statistics.mean(saved_s), 2),
        "cpu_s": round(cpu_s, 2),
        "trials": sum(len(indices) for by_length in shapes.values() for indices in by_length.values()),
        "ran": len(ran),
        "ran_s": round(sum(one["wall_s"] for one in ran), 2),
        **{name: round(sum(one[name] for one in ran), 2) for name in ("import_s", "compile_s", "train_s")},
    }


def train_alone(index: int, quick: bool) -> dict[str, float]:
    """One trial in this process, which has imported nothing yet: what it took, in seconds."""
    started = time.perf_counter()
    from hyla_core.config import Cadence
    from hyla_core.train import Report, train

    imported = time.perf_counter()
    config = _trials(quick)[index].config
    reports: list[tuple[float, float]] = []

    def take(report: Report) -> None:
        reports.append((report.compile_s, time.process_time()))

    begun = time.perf_counter()
    train([config], take, cadence=Cadence(num_logs=20, num_evals=2))
    wall, cpu = time.perf_counter() - begun, time.process_time()
    # The first report comes after one step.
    (compile_s, first_cpu), *_ = reports
    return {
        "import_s": imported - started,
        "compile_s": compile_s,
        "train_s": wall - compile_s,
        "train_cpu_s": cpu - first_cpu,
    }


if __name__ == "__main__":
    sys.exit(main())
