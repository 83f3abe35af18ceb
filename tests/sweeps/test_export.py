"""`export`: CSV files that hold what the store holds, to the last bit."""

import csv
import json
import math
import os
import stat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest

from sweeps.__main__ import main
from sweeps.store import Store

TENTH = 0.1 + 0.2


class Trial(NamedTuple):
    """What `record_sweep` asks of a trial."""

    trial_id: str
    point: str
    axes: dict[str, Any]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Sweep `a` with four trials: finished at the second attempt, failed, diverged, never begun; `b` has a fifth."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    store = Store.create(tmp_path / "store")
    trials = [
        Trial(name, "p", {"model.width": width, "seed": 0, "odd": odd})
        for name, width, odd in (("t1", 1, "x,y"), ("t2", 0.5, 2), ("t3", 2, [1]), ("t4", 4, None))
    ]
    store.record_sweep("a", trials[:1], file="a.yaml", tiny=False)
    store.record_sweep("a", trials, file="a.yaml", tiny=False, select_over=["model.width"])
    store.record_sweep("b", [Trial("t5", "p", {"seed": True}), trials[0]], file="b.yaml", tiny=True)

    def begin(trial_id: str, start_step: int = 0, **config: Any):
        return store.begin(trial_id, config, {"num_devices": None, "git_dirty": True}, start_step, 20, {})

    writer = begin("t1", **{"model.emb_dim": 2**60 + 1})
    writer.add([(10, "train", "loss", 3.0), (20, "train", "loss", 9.0)])
    writer.seal("interrupted")
    writer = begin("t1", 10, **{"model.emb_dim": 2**60 + 1})
    writer.add([(20, "train", "loss", TENTH), (20, "ood", "loss", 1e-300), (20, "ood", "r2", -math.inf)])
    writer.seal("finished")
    begin("t2").seal("failed", ValueError('no "luck"\nat all'))
    writer = begin("t3")
    writer.add([(20, "train", "loss", math.nan)])
    writer.seal("diverged")
    writer = begin("t5")
    writer.add([(10, "ood", "loss", 7.0), (20, "valid", "loss", 0.5)])
    writer.seal("finished")
    return store


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def export(store: Store, tmp_path: Path, *options: str) -> dict[str, list[dict[str, str]]]:
    out = tmp_path / "csv"
    assert main(["export", str(store.path), "--out", str(out), *options]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["final.csv", "metrics.csv", "sweeps.csv", "trials.csv"]
    return {path.stem: read(path) for path in out.iterdir()}


def test_final_has_a_row_per_requested_trial(store, tmp_path):
    final = export(store, tmp_path)["final"]
    assert [list(row.values())[:3] for row in final] == [
        *(["a", "false", name] for name in ("t1", "t2", "t3", "t4")), ["b", "true", "t5"], ["b", "true", "t1"],
    ]  # fmt: skip
    columns = [(row["status"], row["attempt"], row["model.width"], row["odd"], row["ood/loss"]) for row in final]
    assert columns == [
        ("finished", "2", "1", "x,y", "1e-300"),
        ("failed", "1", "0.5", "2", ""),
        ("diverged", "1", "2", "[1]", ""),  # its values are in metrics.csv: it has no last ones
        ("pending", "", "4", "", ""),
        ("finished", "1", "", "", ""),  # that of step 10 isn't a final one
        ("finished", "2", "1", "x,y", "1e-300"),
    ]
    assert float(final[0]["train/loss"]) == TENTH
    assert final[0]["ood/r2"] == "-inf"
    assert (final[4]["valid/loss"], final[1]["error"]) == ("0.5", 'ValueError: no "luck"')
    assert [row["seed"] for row in final] == ["0", "0", "0", "0", "true", "0"]


def test_clean_tables(store, tmp_path):
    tables = export(store, tmp_path)
    trials = {row["trial_id"]: row for row in tables["trials"]}
    assert list(trials) == ["t1", "t2", "t3", "t5"]
    assert (trials["t1"]["attempt"], trials["t1"]["model.emb_dim"]) == ("2", str(2**60 + 1))
    assert (trials["t2"]["model.emb_dim"], trials["t2"]["num_devices"], trials["t2"]["git_dirty"]) == ("", "", "true")
    assert "at all" in trials["t2"]["error_detail"]
    started = store.trials(trial_ids=["t1"])["started_at"][0]
    assert pd.Timestamp(trials["t1"]["started_at"]) == started
    assert trials["t1"]["started_at"] == f"{started:%Y-%m-%dT%H:%M:%S.%fZ}"
    rows = [tuple(row.values()) for row in tables["metrics"]]
    assert rows[:2] == [("t1", "1", "10", "train", "loss", "3"), ("t1", "2", "20", "train", "loss", repr(TENTH))]
    assert [row[5] for row in rows[2:]] == ["1e-300", "-inf", "nan", "7", "0.5"]
    assert [row["trial_id"] for row in tables["sweeps"]] == ["t1", "t2", "t3", "t4", "t5", "t1"]
    assert json.loads(tables["sweeps"][0]["select_over"]) == ["model.width"]
    assert json.loads(tables["sweeps"][2]["axes"]) == {"model.width": 2, "seed": 0, "odd": [1]}


def test_raw_tables(store, tmp_path):
    tables = export(store, tmp_path, "--raw")
    attempts = [(row["trial_id"], row["attempt"], row["status"]) for row in tables["trials"]]
    assert attempts[:2] == [("t1", "1", "interrupted"), ("t1", "2", "finished")]
    assert len(attempts) == 5
    assert ("t1", "1", "20", "train", "loss", "9") in [tuple(row.values()) for row in tables["metrics"]]
    assert len(tables["sweeps"]) == 7
    assert [row["attempt"] for row in tables["final"]] == ["2", "1", "1", "", "1", "2"]


@pytest.mark.parametrize("name", ["b", "b (tiny)"])
def test_one_sweep(store, tmp_path, name):
    tables = export(store, tmp_path, "--sweep", name)
    assert {row["trial_id"] for row in tables["trials"]} == {"t1", "t5"}
    assert {row["trial_id"] for row in tables["metrics"]} == {"t1", "t5"}
    assert [row["trial_id"] for row in tables["final"]] == ["t5", "t1"]
    assert [row["sweep"] for row in tables["sweeps"]] == ["b", "b"]


def test_floats_are_read_back_to_the_last_bit(tmp_path, capsys):
    store = Store.create(tmp_path / "store")
    bits = np.random.default_rng(0).integers(0, 2**64, 2000, dtype=np.uint64).view(np.float64)
    values = [*bits[np.isfinite(bits)].tolist(), 5e-324, 1.7976931348623157e308, -0.0, 2.0**53 + 2, 1e16]
    writer = store.begin("t", {}, {}, 0, 1, {})
    writer.add([(1, "train", f"m{number}", value) for number, value in enumerate(values)])
    writer.seal("finished")
    rows = export(store, tmp_path)["metrics"]
    assert np.array([float(row["value"]) for row in rows]).tobytes() == np.array(values).tobytes()
    assert f"{tmp_path / 'csv' / 'metrics.csv'}: {len(values)} rows" in capsys.readouterr().out


def test_json_says_what_was_written(store, tmp_path, capsys):
    export(store, tmp_path, "--json")
    told = json.loads(capsys.readouterr().out)
    assert told["rows"] == {"trials.csv": 4, "sweeps.csv": 6, "final.csv": 6, "metrics.csv": 7}
    assert (told["out"], told["damaged"]) == (str(tmp_path / "csv"), [])


def test_an_export_is_replaced_and_other_files_stay(store, tmp_path, capsys):
    export(store, tmp_path)
    before = (tmp_path / "csv" / "trials.csv").read_bytes()
    export(store, tmp_path, "--sweep", "b")
    assert (tmp_path / "csv" / "trials.csv").read_bytes() != before
    (tmp_path / "csv" / "metrics.csv").write_text("my,own,numbers\n")
    before = (tmp_path / "csv" / "trials.csv").read_bytes()
    capsys.readouterr()
    assert main(["export", str(store.path), "--out", str(tmp_path / "csv")]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{tmp_path / 'csv' / 'metrics.csv'}: is no export of a store")
    assert (tmp_path / "csv" / "metrics.csv").read_text() == "my,own,numbers\n"
    assert (tmp_path / "csv" / "trials.csv").read_bytes() == before


def test_a_write_that_fails_leaves_the_export_before_it(store, tmp_path, monkeypatch, capsys):
    tables = export(store, tmp_path)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sweeps.export.os.fsync", full)
    capsys.readouterr()
    assert main(["export", str(store.path), "--out", str(tmp_path / "csv"), "--sweep", "b"]) == 2
    assert capsys.readouterr().err == (f"{tmp_path / 'csv'}: the CSV files can't be written: No space left on device\n")
    monkeypatch.undo()
    assert sorted(path.name for path in (tmp_path / "csv").iterdir()) == [
        "final.csv",
        "metrics.csv",
        "sweeps.csv",
        "trials.csv",
    ]
    assert read(tmp_path / "csv" / "trials.csv") == tables["trials"]


def test_a_folder_that_can_not_be_is_one_line(store, tmp_path, capsys):
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "deeper"):
        assert main(["export", str(store.path), "--out", str(out)]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(f"{out}: the CSV files can't be written: ")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_one_line(store, tmp_path, capsys):
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv").chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert main(["export", str(store.path), "--out", str(tmp_path / "csv")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_damage_is_named_and_the_rest_exported(store, tmp_path, capsys):
    (store.path / "trials" / "t2-1.parquet").write_bytes(b"PAR1 and no more")
    assert main(["export", str(store.path), "--out", str(tmp_path / "csv")]) == 1
    assert [row["trial_id"] for row in read(tmp_path / "csv" / "trials.csv")] == ["t1", "t3", "t5"]
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{store.path}/trials/t2-1.parquet: passed over: ")


def test_nothing_to_export(store, tmp_path, capsys):
    out = str(tmp_path / "csv")
    assert main(["export", str(store.path), "--out", out, "--sweep", "c"]) == 1
    assert capsys.readouterr().err == f"{store.path}: no sweep is called 'c'; choose one of ['a', 'b (tiny)']\n"
    Store.create(tmp_path / "empty")
    assert main(["export", str(tmp_path / "empty"), "--out", out]) == 1
    assert capsys.readouterr().err == f"{tmp_path / 'empty'}: the store holds no trial and no sweep yet\n"
    assert main(["export", str(tmp_path / "nowhere"), "--out", out]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not (tmp_path / "csv").exists()
