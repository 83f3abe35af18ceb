"""The row of a trials part as one line in the footer: equal to what the columns say, or not used."""

import json
from datetime import UTC, datetime

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweeps.store import Store, footer_row, parts
from sweeps.store.schema import DECLARED, SCHEMA_VERSION, config_type

CONFIG = {"model.emb_dim": 2**53 + 1, "optim.peak_lr": 1e-3, "model.causal": True, "task.name": "«a»\n", "x.none": None}
ROW = {
    "trial_id": "ab",
    "attempt": 3,
    "status": None,
    "start_step": 0,
    "train_s": 0.1 + 0.2,
    "started_at": datetime(2026, 2, 3, 4, 5, 6, 789012, UTC),
    "error": 'hyla.row=00000000{"row": 1}\n',
    "git_dirty": False,
}


def table_of(row: dict, config: dict) -> pa.Table:
    types = {**DECLARED["trials"], **{name: config_type(name, value) for name, value in config.items()}}
    return pa.Table.from_pylist([{**row, **config}], schema=pa.schema(list(types.items())))


def quick(data: bytes) -> pa.Table:
    row = footer_row.read(data, SCHEMA_VERSION)
    assert row is not None
    [(path, table)] = footer_row.tables([("trials/ab-3.parquet", row)], None)
    assert path == "trials/ab-3.parquet"
    return table


def test_the_line_says_what_the_columns_say():
    data = parts.encode("trials", table_of(ROW, CONFIG))
    table = quick(data)
    assert table.equals(parts.decode("trials", data, "p"))
    assert table["train_s"].to_pylist() == [0.30000000000000004]
    assert table["started_at"].to_pylist() == [ROW["started_at"]]


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["a.x", "a.y", "b.z"]),
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**63 - 1)
        | st.floats(allow_nan=False)
        | st.text(st.characters(exclude_categories=["Cs"])),
    ),
    st.text(st.characters(exclude_categories=["Cs"])),
)
def test_whatever_the_row_holds(config, error):
    data = parts.encode("trials", table_of({**ROW, "error_detail": error}, config))
    assert quick(data).equals(parts.decode("trials", data, "p"))


def test_a_part_of_another_version_is_read_through_its_columns():
    assert footer_row.read(parts.encode("trials", table_of(ROW, CONFIG)), SCHEMA_VERSION + 1) is None


def test_rows_of_different_fields_make_different_tables():
    found = [
        ("p1", {"trial_id": "a", "attempt": 1, "m.x": 1}),
        ("p2", {"trial_id": "b", "attempt": 1, "m.x": 0.5}),
        ("p3", {"trial_id": "c", "attempt": 1, "m.x": 2}),
    ]
    tables = footer_row.tables(found, ["trial_id", "m.x"])
    assert [(path, table.to_pydict()) for path, table in tables] == [
        ("p1", {"trial_id": ["a", "c"], "m.x": [1, 2]}),
        ("p2", {"trial_id": ["b"], "m.x": [0.5]}),
    ]


@pytest.mark.parametrize("without_line", [False, True])
def test_a_store_reads_the_same_with_the_line_and_without(tmp_path, monkeypatch, without_line):
    if without_line:
        monkeypatch.setattr("sweeps.store.footer_row.marks", lambda rows, version: {})
    store = Store.create(tmp_path)
    for trial_id, width, status in (("a", 4, "finished"), ("b", 0.5, "failed")):
        writer = store.begin(trial_id, {"m.width": width}, {"run_id": "r"}, 0, 10, {})
        writer.add([(10, "valid", "loss", 1.0)])
        writer.seal(status, "no luck" if status == "failed" else None)
    data = (tmp_path / "trials" / "a-1.parquet").read_bytes()
    assert (footer_row.read(data, SCHEMA_VERSION) is None) == without_line
    store = Store.open(tmp_path)
    frame = store.trials()
    assert json.loads(frame[["trial_id", "status", "m.width", "num_steps", "error"]].to_json(orient="values")) == [
        ["a", "finished", 4.0, 10, None],
        ["b", "failed", 0.5, 10, "no luck"],
    ]
    assert store.finished() == {"a": "finished"}
    assert store.last_activity()["a"] >= frame["ended_at"][0].to_pydatetime()
    (tmp_path / "trials" / "b-1.parquet").rename(tmp_path / "trials" / "c-1.parquet")
    assert Store.open(tmp_path).trials()["trial_id"].tolist() == ["a"]
