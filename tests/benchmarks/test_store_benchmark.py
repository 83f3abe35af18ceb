"""The store's benchmark at a small size: what it makes, measures and prints."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from analysis.frames import load_sweep
from benchmarks import store as benchmark
from sweeps.store import Store

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "store.py"


@pytest.mark.parametrize("num_rows", [10, 11, 99, 1000])
def test_rows_are_as_many_as_asked_for_and_end_with_an_evaluation(num_rows):
    rows = benchmark.metric_rows(3, 10_000, 5000, num_rows)
    assert len(rows) == num_rows == len({row[:3] for row in rows})
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    assert {(step, split) for step, split, _, _ in rows[-4:]} == {(5000, "valid"), (5000, "ood")}
    assert rows == benchmark.metric_rows(3, 10_000, 5000, num_rows)
    assert rows != benchmark.metric_rows(4, 10_000, 5000, num_rows)


def test_the_store_is_one_that_the_analysis_reads(tmp_path):
    benchmark.make_store(tmp_path / "store", 100, 10)
    store = Store.open(tmp_path / "store")
    frame = load_sweep(store)
    assert frame.status_counts() == {"finished": 98, "diverged": 1, "failed": 1}
    assert len(store.metrics()) == 1000
    assert frame.axes[-1] == "seed"


@pytest.mark.slow
def test_the_script_measures_and_writes_what_it_found(tmp_path):
    out = tmp_path / "new" / "store.json"
    command = [sys.executable, str(SCRIPT), "--trials", "20", "--rows", "10", "--out", str(out)]
    printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    told = json.loads(out.read_text())
    assert printed.startswith("20 trials × 10 rows, made in ")
    assert told["parts"]["size"]["metrics"]["files"] == 20
    assert told["compacted"]["size"]["metrics"]["files"] == 1
    for form in ("parts", "compacted"):
        rows = {name: told[form][name]["rows"] for name in told[form] if name != "size" and "rows" in told[form][name]}
        assert rows == {
            "list": 40 if form == "parts" else 2,
            "finished": 20, "statuses": 20, "summary": 1, "trials": 20, "final_metrics": 120, "one_trial": 10,
            "scaling_frame": 20,
        }  # fmt: skip
    text = out.read_text()
    assert socket.gethostname() not in text
    assert str(ROOT) not in text
    assert str(tmp_path) not in text


def test_wrong_numbers_are_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        benchmark.main(["--trials", "0"])
    assert stop.value.code == 2
    assert "at least one trial of 10 rows" in capsys.readouterr().err
