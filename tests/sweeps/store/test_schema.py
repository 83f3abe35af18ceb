"""The schema's versions: an old store is read as if written today, and every column is explained where it lies."""

import json
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sweeps.store import SCHEMA_VERSION, TABLES, Store, parts
from sweeps.store.schema import EXIT_REASONS, MIGRATIONS, exit_reason

OLD = Path(__file__).parents[2] / "golden" / "store_v1"
FINISHED, DIVERGED, FAILED = "4caee5d4cd33", "25c2f1cfa222", "73bfa6953840"


def test_every_older_version_has_a_migration():
    assert sorted(MIGRATIONS) == list(range(1, SCHEMA_VERSION))


def test_a_store_of_version_1_is_read():
    marks = pq.read_metadata(OLD / "trials" / f"{FINISHED}-1.parquet").metadata
    assert marks[b"hyla.schema_version"] == b"1"
    store = Store.open(OLD)
    trials = store.trials().set_index("trial_id")
    assert trials["status"].to_dict() == {FINISHED: "finished", DIVERGED: "diverged", FAILED: "failed"}
    assert trials["exit_reason"].to_dict() == {FINISHED: "completed", DIVERGED: "diverged", FAILED: "error"}
    assert store.trials(raw=True)["exit_reason"].tolist().count("stopped") == 1
    assert trials["num_logs"].isna().all()
    assert trials["cpu_model"].isna().all()
    train_loss = store.metrics().query(f"trial_id == '{FINISHED}' and split == 'train' and metric == 'loss'")
    assert train_loss[["attempt", "step"]].values.tolist() == [[1, 5], [1, 10], [2, 15], [2, 20]]
    assert sorted(store.sweeps()["sweep"]) == ["toy", "toy", "toy-text"]
    assert store.finished() == {FINISHED: "finished", DIVERGED: "diverged"}
    assert store.damaged == []


def test_migrated_columns_can_be_asked_for_alone():
    data = (OLD / "trials" / f"{DIVERGED}-1.parquet").read_bytes()
    assert parts.decode("trials", data, "x", ["exit_reason"]).to_pydict() == {"exit_reason": ["diverged"]}
    assert parts.decode("trials", data, "x", ["step"]).to_pydict() == {"step": [3]}


def test_a_part_without_a_known_version_is_damaged(monkeypatch):
    rows = pa.table({"trial_id": ["a"], "attempt": [1], "status": ["failed"], "start_step": [0]})
    data = parts.encode("trials", rows)
    assert parts.decode("trials", data, "x")["trial_id"].to_pylist() == ["a"]
    monkeypatch.setattr(parts, "SCHEMA_VERSION", 0)
    data = parts.encode("trials", rows)
    monkeypatch.undo()
    with pytest.raises(parts.Damaged, match="schema version 0 is unknown"):
        parts.decode("trials", data, "x")


@pytest.mark.parametrize("table", TABLES)
def test_a_compacted_file_explains_its_columns(table):
    first = next(iter(TABLES[table])).name
    data = parts.encode(table, pa.table({first: ["a"]}), replaces=["a-1.parquet"])
    explained = json.loads(pq.ParquetFile(pa.BufferReader(data)).metadata.metadata[b"hyla.columns"])
    assert list(explained) == [column.name for column in TABLES[table]]
    for column in TABLES[table]:
        assert explained[column.name] == {
            "type": str(column.type),
            "unit": column.unit,
            "meaning": column.meaning,
        }


@pytest.mark.parametrize(
    ("status", "error", "reason"),
    [
        (None, None, None),
        ("finished", None, "completed"),
        ("diverged", None, "diverged"),
        ("interrupted", None, "stopped"),
        ("interrupted", "the disk is full: OSError: no room", "disk full"),
        ("interrupted", "OSError: timed out", "error"),
        ("failed", "out of memory: RESOURCE_EXHAUSTED", "out of memory"),
        ("failed", "ValueError: no", "error"),
    ],
)
def test_why_an_attempt_ended(status, error, reason):
    assert exit_reason(status, error) == reason
    assert reason is None or reason in EXIT_REASONS


def test_an_attempt_says_why_it_ended(tmp_path):
    store = Store.create(tmp_path / "store")
    for trial_id, told in (("a", {}), ("b", {"exit_reason": "stopped"})):
        writer = store.begin(trial_id, {}, {}, 0, 10, {})
        assert writer.flush()
        assert pd.isna(store.trials()["exit_reason"].iloc[-1])
        with pytest.raises(ValueError, match=r"exit_reason='bored' is unknown; choose one of \['completed'"):
            writer.seal("finished", exit_reason="bored")
        writer.seal("failed", "ValueError: no", **told)
    assert store.trials()["exit_reason"].tolist() == ["error", "stopped"]


def test_a_diff_is_kept_once_under_a_name_of_its_content(tmp_path):
    store = Store.create(tmp_path / "store")
    name = store.keep_diff("--- a\n+++ b\n")
    assert store.keep_diff("--- a\n+++ b\n") == name
    assert [path.name for path in (store.path / "diffs").iterdir()] == [name]
    assert (store.path / "diffs" / name).read_text() == "--- a\n+++ b\n"
    assert store.keep_diff("other") != name
