"""The shipped sweep as its users run it: the tiny form, and the smallest and largest cell of the real grid."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from sweeps.store import Store, equal_tables

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parent.parent
SWEEP = "sweeps/scaling.yaml"
CHANCE = 1 / 8


def run(store: Path, *options: str) -> subprocess.Popen[str]:
    """Starts the run command in a process group of its own, as a shell would."""
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "sweeps",
            "run",
            SWEEP,
            "--results",
            str(store),
            "--address",
            "local",
            "--yes",
            *options,
        ],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """What it prints; it must succeed."""
    output, _ = process.communicate()
    assert process.returncode == 0, output
    return output


def interrupt(process: subprocess.Popen[str], store: Path, ready: Callable[[Store], bool]) -> str:
    """Sends Ctrl-C once the store is in some state; returns what the run prints."""
    while process.poll() is None and not (store.exists() and ready(Store.open(store))):
        time.sleep(0.5)
    assert process.poll() is None, process.communicate()[0]
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate()
    assert process.returncode == 128 + signal.SIGINT, output
    return output


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """The store of a tiny sweep that nothing disturbed."""
    store = tmp_path_factory.mktemp("undisturbed") / "store"
    output = finish(run(store, "--tiny"))
    assert "48 of 48 trials" in output
    assert not re.search(r"warning|traceback", output, re.IGNORECASE), output
    return store


@pytest.fixture(scope="module")
def trials(undisturbed) -> pd.DataFrame:
    """One row per trial, with its axis values and final held-out accuracy per feature."""
    store = Store.open(undisturbed)
    final = store.final_metrics()
    held_out = final[(final.split == "ood") & (final.metric == "accuracy_per_feature")].set_index("trial_id").value
    trials = store.trials().set_index("trial_id")
    return trials.assign(held_out=held_out)


def test_the_tiny_sweep_holds_every_trial(trials):
    assert (trials.status == "finished").all()
    axes = ["model.attention", "model.emb_dim", "model.num_layers", "data.num_train", "seeds.init"]
    assert [trials[axis].nunique() for axis in axes] == [3, 2, 2, 2, 2]
    assert len(trials.drop_duplicates(axes)) == len(trials) == 48
    assert (trials["data.num_ood"] >= 4096).all()


def test_the_tiny_sweep_learns_to_compose_and_more_data_helps(trials):
    softmax = trials[trials["model.attention"] == "softmax"]
    by_size = softmax.groupby("data.num_train").held_out.mean()
    assert by_size.iloc[-1] >= 2 * CHANCE
    assert by_size.iloc[-1] >= by_size.iloc[0] + 0.05


def test_packs_of_the_tiny_sweep_run_side_by_side(trials):
    packs = trials.groupby("pack_id").agg(begin=("started_at", "min"), end=("ended_at", "max")).sort_values("begin")
    overlaps = (packs.begin.iloc[1:].to_numpy() < packs.end.iloc[:-1].to_numpy()).sum()
    assert overlaps >= min(1, (os.cpu_count() or 1) - 1)


def test_a_finished_sweep_is_not_trained_again(undisturbed):
    parts = {path: path.stat().st_mtime_ns for path in undisturbed.glob("[tm]*/*.parquet")}
    command = f"""
import sys
from sweeps.__main__ import main
status = main(["run", {SWEEP!r}, "--tiny", "--results", {str(undisturbed)!r}])
assert not {{"jax", "ray"}} & set(sys.modules)
sys.exit(status)
"""
    done = subprocess.run([sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "nothing to train, 48 of 48 trials are in" in done.stdout
    assert {path: path.stat().st_mtime_ns for path in undisturbed.glob("[tm]*/*.parquet")} == parts


def test_an_interrupted_tiny_sweep_is_completed_by_the_same_command(undisturbed, tmp_path):
    store = tmp_path / "store"

    def half_way(store: Store) -> bool:
        return len(store.finished()) >= 24

    output = interrupt(run(store, "--tiny"), store, half_way)
    assert "to continue: python -m sweeps run" in output
    assert 24 <= len(Store.open(store).finished()) < 48
    assert "48 of 48 trials" in finish(run(store, "--tiny"))
    assert equal_tables(Store.open(undisturbed), Store.open(store)) == []
    assert list((store / "claims").iterdir()) == []


def test_the_figures_of_the_tiny_sweep_are_drawn(undisturbed, tmp_path):
    command = [sys.executable, "analysis/scaling.py", str(undisturbed), "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("width", "depth", "params", "flops", "examples", "overview"):
        for suffix in ("png", "pdf", "csv"):
            assert (tmp_path / f"{name}.{suffix}").stat().st_size > 0


@pytest.mark.parametrize(("attention", "width", "depth", "fraction"), [("softmax", 1, 4, 0.25), ("hyla", 4, 16, 1.0)])
def test_a_cell_of_the_real_grid_trains_is_interrupted_and_goes_on(attention, width, depth, fraction, tmp_path):
    store = tmp_path / "store"
    changes = {
        "axes.model.attention": f"[{attention}]",
        "axes.model.width": f"[{width}]",
        "axes.model.depth": f"[{depth}]",
        "axes.data.train_fraction": f"[{fraction}]",
        "axes.optim.peak_lr": "[1e-3]",
        "axes.optim.weight_decay": "[0.1]",
        "axes.optim.warmup_steps": "[4]",
        "axes.seed": "[0]",
        # What is shortened: the steps and the evaluation. Sizes, task and batch are those of the paper.
        "data.num_steps": "10",
        "data.num_valid": "128",
        "data.num_ood": "128",
        "run.num_evals": "1",
        "run.checkpoint_every_s": "0.01",
        "run.resources.gpu": "0",
        "run.resources.cpu": str(os.cpu_count()),
    }
    options = [word for name, value in changes.items() for word in ("--set", f"{name}={value}")]

    def on_its_way(store: Store) -> bool:
        return any(claim.progress.get("step", 0) > 0 for claim in store.claims())

    interrupt(run(store, *options), store, on_its_way)
    finish(run(store, *options))
    attempts = Store.open(store).trials(raw=True).set_index("attempt")
    assert list(attempts.status) == ["interrupted", "finished"]
    assert 0 < attempts.start_step[2] == attempts.step[1] < attempts.step[2] == 10
    assert list(attempts["model.emb_dim"]) == [128 * width] * 2
    assert list(attempts["model.num_layers"]) == [depth] * 2
    assert attempts["task.num_features"][2] == 4
    assert attempts["optim.batch_size"][2] == 128
