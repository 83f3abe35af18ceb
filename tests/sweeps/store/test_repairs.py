"""`repair`: what is damaged goes aside, its trials alone are trained again, and what runs is left alone."""

import os
import time
from pathlib import Path

import pytest

from sweeps.store import Store, compact, parts, repair
from sweeps.store.repairs import LEFT, REMOVED, SET_ASIDE


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Two finished trials, the first of which was stopped at step 2 and went on there."""
    store = Store.create(tmp_path / "results")
    write(store, "a", "interrupted", [1, 2])
    write(store, "a", "finished", [3, 4], start_step=2)
    write(store, "b", "finished", [1, 2, 3, 4])
    return store


def write(store: Store, trial_id: str, status: str, steps, start_step: int = 0) -> None:
    writer = store.begin(trial_id, {"model.emb_dim": 8}, {"run_id": "run"}, start_step, 4, {})
    assert writer is not None
    writer.add([(step, "train", "loss", step / 7) for step in steps])
    writer.seal(status)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def aside(store: Store) -> set[str]:
    return {str(path.relative_to(store.path / "damaged")) for path in store.path.glob("damaged/*/*")}


def test_nothing_is_wrong_with_a_whole_store(store):
    before = store.trials(raw=True).to_csv(), store.metrics(raw=True).to_csv()
    assert repair(store) == []
    compact(store)
    assert repair(store) == []
    compact(store, grace_s=0.0)
    assert repair(store) == []
    assert (store.trials(raw=True).to_csv(), store.metrics(raw=True).to_csv()) == before
    assert not (store.path / "damaged").exists()


def test_files_that_are_no_parts_go_aside_and_nothing_else(store):
    trials = store.path / "trials"
    (trials / "stranger.parquet").write_bytes(b"mine")
    (trials / "a-2 (copy).parquet").write_bytes((trials / "a-2.parquet").read_bytes())
    (trials / "z-1.parquet").touch()
    (store.path / "sweeps" / "r.parquet").write_bytes(b"PAR1")
    assert {item.action for item in repair(store)} == {SET_ASIDE}
    assert aside(store) == {
        "trials/stranger.parquet",
        "trials/a-2 (copy).parquet",
        "trials/z-1.parquet",
        "sweeps/r.parquet",
    }
    assert store.finished() == {"a": "finished", "b": "finished"}
    assert len(store.trials()) == 2
    assert store.damaged == []
    assert repair(store) == []


@pytest.mark.parametrize("part", ["metrics/a-2.parquet", "metrics/a-1.parquet"])
@pytest.mark.parametrize("harm", ["cut", "gone", "fewer rows"])
def test_a_trial_whose_rows_are_lost_is_trained_anew_from_its_first_step(store, part, harm):
    """Also where the early rows are: a training that went on from the checkpoint would never measure them again."""
    path = store.path / part
    store.save_checkpoint("a", 4, b"state")
    if harm == "cut":
        cut(path)
    elif harm == "gone":
        path.unlink()
    else:
        path.write_bytes(parts.encode("metrics", parts.decode("metrics", path.read_bytes(), "p").slice(1)))
    assert store.finished() == {"a": "finished", "b": "finished"}
    found = repair(store)
    assert [item.what for item in found if item.what.startswith("trial ")] == ["trial a"]
    assert store.finished() == {"b": "finished"}
    assert list(store.load_checkpoints("a")) == []
    assert store.metrics(raw=True)["trial_id"].unique().tolist() == ["b"]
    assert {name for name in aside(store) if name.startswith("trials/")} == {"trials/a-1.parquet", "trials/a-2.parquet"}
    write(store, "a", "finished", [1, 2, 3, 4])
    assert store.finished() == {"a": "finished", "b": "finished"}
    assert store.metrics(trial_ids=["a"])["step"].tolist() == [1, 2, 3, 4]
    assert repair(store) == []


def test_a_damaged_row_of_the_trials_table_takes_its_trial_along(store):
    cut(store.path / "trials" / "b-1.parquet")
    assert any(item.what == "trial b" for item in repair(store))
    assert store.trials()["trial_id"].tolist() == ["a"]
    assert store.damaged == []


def test_the_row_of_a_lost_trial_is_taken_out_of_a_compacted_file(store):
    compact(store)
    compact(store, grace_s=0.0)
    write(store, "c", "finished", [1])
    (store.path / "metrics" / "c-1.parquet").unlink()
    compacted = next((store.path / "metrics").glob("compact-*"))
    rows = parts.decode("metrics", compacted.read_bytes(), "p")
    kept = rows.slice(0, len(rows) - 4)  # those of `b` are the last four
    compacted.write_bytes(parts.encode("metrics", kept, replaces=parts.replaces(compacted.read_bytes())))
    found = repair(store)
    assert {item.what for item in found if item.what.startswith("trial ")} == {"trial b", "trial c"}
    assert store.finished() == {"a": "finished"}
    assert len(list((store.path / "trials").iterdir())) == 1  # nobody who reads the raw files sees the lost rows
    assert store.trials(raw=True)["attempt"].tolist() == [1, 2]
    writer = store.begin("b", {"model.emb_dim": 8}, {}, 0, 4, {})
    assert writer is not None
    assert writer.attempt == 2  # the number of the lost attempt is not given again
    writer.seal("failed")
    assert repair(store) == []


def test_a_damaged_compacted_file_whose_parts_are_there_is_only_set_aside(store):
    before = store.metrics(raw=True).to_csv()
    compact(store)
    (compacted,) = (store.path / "metrics").glob("compact-*")
    cut(compacted)
    assert [(item.what, item.action) for item in repair(store)] == [(f"metrics/{compacted.name}", SET_ASIDE)]
    assert store.metrics(raw=True).to_csv() == before
    assert store.finished() == {"a": "finished", "b": "finished"}


def test_a_damaged_compacted_file_whose_parts_are_gone_sends_its_trials_back(store):
    compact(store)
    compact(store, grace_s=0.0)
    cut(next((store.path / "metrics").glob("compact-*")))
    repair(store)
    assert store.finished() == {}
    assert repair(store) == []


def test_what_runs_is_left_alone(store):
    writer = store.begin("c", {}, {}, 0, 4, {})
    writer.add([(1, "train", "loss", 0.5)])
    writer.flush()
    cut(store.path / "metrics" / "c-1.parquet")
    store.save_checkpoint("c", 1, b"state")
    assert [(item.what, item.action) for item in repair(store)] == [("trial c", LEFT)]
    writer.add([(2, "train", "loss", 0.25)])
    writer.seal("finished")
    store.clear_checkpoints("c")
    assert repair(store) == []
    assert store.metrics(trial_ids=["c"])["step"].tolist() == [1, 2]


def test_a_dry_run_only_tells(store):
    cut(store.path / "metrics" / "b-1.parquet")
    (store.path / "trials" / "stranger.parquet").write_bytes(b"mine")
    before = {path: path.stat().st_mtime_ns for path in store.path.rglob("*") if path.is_file()}
    assert len(repair(store, dry_run=True)) >= 3
    assert {path: path.stat().st_mtime_ns for path in store.path.rglob("*") if path.is_file()} == before


def test_what_dead_processes_left_is_cleared_and_is_no_damage(store):
    long_ago = time.time() - 2 * 3600
    half = store.path / "metrics" / ".x-1.parquet.0badc0de.tmp"
    young = store.path / "metrics" / ".y-1.parquet.0badc0de.tmp"
    claim = store.path / "claims" / "x-1.json"
    for path in (half, young, claim):
        path.write_bytes(b"{}")
    for path in (half, claim):
        os.utime(path, (long_ago, long_ago))
    store.save_checkpoint("a", 2, b"of a finished trial")
    store.save_checkpoint("b", 4, b"the trained state, kept on purpose")
    found = repair(store)
    assert {item.action for item in found} == {REMOVED}
    assert not any(item.is_damage for item in found)
    assert not half.exists()
    assert not claim.exists()
    assert young.exists()
    assert list(store.load_checkpoints("a")) == []
    assert [step for step, _ in store.load_checkpoints("b")] == [4]
