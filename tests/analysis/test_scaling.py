import csv
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from analysis.scaling import choose_store, main
from sweeps.store import Store

ROOT = Path(__file__).resolve().parents[2]
FIGURES = ("width", "depth", "params", "flops", "examples", "overview")


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


class Run:
    """One run of the command and what it left."""

    def __init__(self, store: Path, out: Path, capsys, *options: str):
        self.status = main([str(store), "--out", str(out), *options])
        captured = capsys.readouterr()
        self.stdout, self.stderr, self.out = captured.out, captured.err, out


def test_figures_come_with_exactly_the_numbers_they_show(scaling_store, stores, tmp_path, capsys):
    run = Run(scaling_store, tmp_path / "figures", capsys, "--json")
    assert (run.status, run.stderr) == (0, "")
    report = json.loads(run.stdout)
    assert report["trials"] == {"asked": 48, "finished": 48}
    expected = {f"{name}.{suffix}" for name in FIGURES for suffix in ("png", "pdf", "csv")} | {"cells.csv", "fits.csv"}
    assert {Path(path).name for path in report["files"]} == expected
    assert {path.name for path in run.out.iterdir()} == expected
    assert all(path.stat().st_size > 200 for path in run.out.iterdir())

    by_id = _curves(stores)
    for name in FIGURES:
        for row in read(run.out / f"{name}.csv"):
            values = [by_id[trial_id]["ood/accuracy_per_feature"] for trial_id in row["trial_ids"].split(";")]
            assert row["seed_values"] == ";".join(map(repr, values))
            assert float(row["mean"]) == pytest.approx(sum(values) / 2, rel=1e-15)
            assert (float(row["low"]), float(row["high"])) == (min(values), max(values))
            assert (row["num_seeds"], row["num_seeds_asked"], row["complete"]) == ("2", "2", "True")
            assert (row["split"], row["metric"]) == ("ood", "accuracy_per_feature")
    assert len(read(run.out / "width.csv")) == 24
    assert len(read(run.out / "cells.csv")) == 24

    fits = read(run.out / "fits.csv")
    assert len(fits) == 3 * (2 + 1 + 4)  # variants × panels of params, flops, examples
    assert {row["why_not"] for row in fits if row["figure"] == "examples"} == {"2 distinct x; a fit needs 4"}
    flops = {row["variant"]: float(row["exponent"]) for row in fits if row["figure"] == "flops"}
    assert flops["hyla"] > flops["softmax"] > flops["linear"] > 0.1


def _curves(stores) -> dict[str, dict[str, float]]:
    names, levels = zip(*stores.axes.items(), strict=True)
    trials = [stores.trial(dict(zip(names, values, strict=True))) for values in itertools.product(*levels)]
    return {trial.trial_id: stores.curve(trial) for trial in trials}


SELECTED = {
    "model.attention": ["softmax", "hyla"],
    "optim.peak_lr": [0.01, 0.001],
    "optim.weight_decay": [0.1, 0.3],
    "seed": [0, 1],
}


def opposed(trial) -> dict[str, float]:
    """The validation split prefers (0.001, 0.3); the held-out split prefers (0.01, 0.1), and by far."""
    axes = trial.axes
    quality = (axes["optim.peak_lr"] == 0.001) + 0.5 * (axes["optim.weight_decay"] == 0.3)
    valid, ood = 0.80 + 0.1 * quality, 0.70 - 0.2 * quality + 0.01 * axes["seed"]
    return {
        "valid/accuracy": valid,
        "valid/accuracy_per_feature": valid,
        "valid/loss": 1 - valid,
        "ood/accuracy": ood / 2,
        "ood/accuracy_per_feature": ood,
        "ood/loss": 1 - ood,
    }


def test_hyperparameters_are_chosen_on_validation_alone(stores, tmp_path, capsys):
    select_over = ("optim.peak_lr", "optim.weight_decay")
    stores.write(tmp_path / "r", SELECTED, select_over=select_over, metrics=opposed)
    run = Run(tmp_path / "r", tmp_path / "f", capsys)
    assert run.status == 0
    rows = read(tmp_path / "f" / "cells.csv")
    assert len(rows) == 2  # two variants, one point of each
    for row in rows:
        assert (row["optim.peak_lr"], row["optim.weight_decay"]) == ("0.001", "0.3")
        assert (row["num_candidates"], row["num_candidates_complete"]) == ("4", "4")
        ood = [0.70 - 0.2 * 1.5 + 0.01 * seed for seed in (0, 1)]
        assert float(row["mean"]) == pytest.approx(sum(ood) / 2)
        assert float(row["valid/accuracy"]) == pytest.approx(0.95)
    assert "peak lr 0.001, weight decay 0.3" in run.stdout
    assert "no figure depth: depth (layers) takes no value in this sweep" in run.stdout


def test_missing_seeds_are_named_in_the_output_and_in_the_csv(stores, tmp_path, capsys):
    def ends(trial):
        axes = trial.axes
        if axes["model.width"] == 2 and axes["seed"] == 1:
            return {"softmax": "failed", "hyla": "diverged"}[axes["model.attention"]]
        return "finished"

    axes = {"model.attention": ["softmax", "hyla"], "model.width": [1, 2], "seed": [0, 1]}
    stores.write(tmp_path / "r", axes, status=ends)
    run = Run(tmp_path / "r", tmp_path / "f", capsys)
    assert run.status == 0
    assert "8 asked: 6 finished, 1 diverged, 1 failed" in run.stdout
    assert "2 of 4 cells lack seeds and are drawn hollow:" in run.stdout
    assert "attention softmax, width 2: 1 of 2 seeds (1 failed)" in run.stdout
    assert "attention hyla, width 2: 1 of 2 seeds (1 diverged)" in run.stdout
    assert "(failed): RESOURCE_EXHAUSTED: out of memory" in run.stdout
    rows = read(tmp_path / "f" / "width.csv")
    assert [(r["num_seeds"], r["num_seeds_asked"], r["complete"], r["missing"]) for r in rows] == [
        ("2", "2", "True", ""),
        ("2", "2", "True", ""),
        ("1", "2", "False", "1 failed"),
        ("1", "2", "False", "1 diverged"),
    ]


def test_another_metric_and_split_can_be_drawn(stores, tmp_path, capsys):
    stores.write(tmp_path / "r", {"model.attention": ["softmax", "hyla"]})
    run = Run(tmp_path / "r", tmp_path / "f", capsys, "--metric", "loss", "--split", "valid", "--json")
    assert run.status == 0
    assert json.loads(run.stdout)["metric"] == "valid/loss"
    assert {row["metric"] for row in read(tmp_path / "f" / "cells.csv")} == {"loss"}
    run = Run(tmp_path / "r", tmp_path / "f", capsys, "--metric", "acc")
    assert run.status == 1
    assert "measured no ood/acc; choose one of ['ood/accuracy', " in run.stderr


def test_a_sweep_without_scaling_axes_still_has_its_table(stores, tmp_path, capsys):
    stores.write(tmp_path / "r", {"seed": [0, 1, 2]})
    run = Run(tmp_path / "r", tmp_path / "f", capsys)
    assert run.status == 0
    assert {path.name for path in (tmp_path / "f").iterdir()} == {"cells.csv", "fits.csv"}
    assert "3/3" in run.stdout


@pytest.mark.parametrize(
    ("make", "sweep", "message"),
    [
        (None, None, "no such folder; give the folder of a results store"),
        ("empty", None, "the store holds no sweep yet"),
        ("unfinished", None, "has no finished trial yet (2 interrupted)"),
        ("finished", "other", "no sweep is called 'other'; choose one of ['sraven-scaling']"),
    ],
)
def test_what_is_missing_is_said_in_one_line(stores, tmp_path, capsys, make, sweep, message):
    path = tmp_path / "store"
    if make == "empty":
        Store.create(path)
    elif make:
        stores.write(path, {"seed": [0, 1]}, status=lambda _: {"unfinished": "interrupted"}.get(make, make))
    run = Run(path, tmp_path / "f", capsys, *(["--sweep", sweep] if sweep else []))
    assert run.status == 1
    assert run.stdout == ""
    assert len(run.stderr.splitlines()) == 1
    assert str(path) in run.stderr
    assert message in run.stderr
    assert not (tmp_path / "f").exists()


def test_a_folder_that_cannot_be_written_is_named(stores, tmp_path, capsys):
    stores.write(tmp_path / "r", {"seed": [0]})
    (tmp_path / "f").write_text("a file in the way")
    run = Run(tmp_path / "r", tmp_path / "f", capsys)
    assert run.status == 1
    assert run.stderr == f"{tmp_path / 'f'}: figures can't be written here: File exists\n"


def test_wrong_usage_is_status_2(capsys):
    with pytest.raises(SystemExit) as error:
        main(["--colour"])
    assert error.value.code == 2
    assert "unrecognized arguments: --colour" in capsys.readouterr().err


def test_the_store_is_the_named_one_then_the_environments_then_what_is_there(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYLA_STORE", raising=False)
    assert choose_store("mine", "shared").path == "mine"
    assert choose_store(None, "shared") == ("shared", "from HYLA_STORE")
    assert main([]) == 1
    assert "no results store there, nor in results-tiny/" in capsys.readouterr().err
    (tmp_path / "results-tiny").mkdir()
    assert choose_store(None, None) == ("results-tiny", "there is no results/")
    (tmp_path / "results").mkdir()
    assert choose_store(None, "") == ("results", "HYLA_STORE is not set")


def test_the_script_runs_from_anywhere_and_imports_neither_jax_nor_ray(stores, tmp_path):
    stores.write(tmp_path / "results-tiny", {"model.width": [1, 2]}, tiny=True)
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, sys\n"
        "atexit.register(lambda: print('loaded', [n for n in ('jax', 'flax', 'ray', 'pyplot') if n in sys.modules]))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("HYLA_STORE", "PYTHONPATH")}
    finished = subprocess.run(
        [sys.executable, str(ROOT / "analysis" / "scaling.py")],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (finished.returncode, finished.stderr) == (0, "")
    assert "store   results-tiny (there is no results/)" in finished.stdout
    assert "sweep   sraven-scaling (tiny), requested " in finished.stdout
    assert "loaded []" in finished.stdout
    assert (tmp_path / "figures" / "sraven-scaling--tiny" / "width.png").exists()


def test_a_reader_that_leaves_early_is_no_error(stores, tmp_path):
    stores.write(tmp_path / "r", {"seed": [0]})
    command = [sys.executable, "-m", "analysis.scaling", str(tmp_path / "r"), "--out", str(tmp_path / "f")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 0
    assert (tmp_path / "f" / "cells.csv").exists()


def test_no_module_is_named_like_a_standard_one():
    assert not {path.stem for path in (ROOT / "analysis").glob("*.py")} & set(sys.stdlib_module_names)
