"""`compact`: fewer files, the same rows, whoever reads, writes or compacts beside it."""

import multiprocessing
import os
import time
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sweeps.store import Store, compact, equal_tables, parts
from sweeps.store.places import LocalPlace


class Requested(NamedTuple):
    trial_id: str
    point: str = "p"
    axes: tuple = ()  # what dict() takes


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Four trials: one finished after a stop, one that failed and has no rows, one that runs, one diverged."""
    store = Store.create(tmp_path / "results")
    write(store, "a", "interrupted", [1, 2])
    write(store, "a", "finished", [3, 4], start_step=2)
    write(store, "b", "failed", [])
    write(store, "d", "diverged", [1])
    for number in range(3):
        store.record_sweep("s", [Requested("a"), Requested("b")], file="s.yaml", tiny=False, request_id=f"r{number}")
    return store


def write(store: Store, trial_id: str, status: str | None, steps, start_step: int = 0):
    writer = store.begin(trial_id, {"model.emb_dim": 8}, {"run_id": "run"}, start_step, 4, {})
    assert writer is not None
    writer.add([(step, "train", "loss", step / 7) for step in steps])
    if status is None:
        writer.flush()
        return writer
    writer.seal(status)
    return None


def names(store: Store, table: str) -> list[str]:
    return sorted(path.name for path in (store.path / table).iterdir())


def views(store: Store) -> list:
    frames = [store.trials(), store.trials(raw=True), store.metrics(), store.metrics(raw=True), store.final_metrics()]
    return [frame.to_csv() for frame in (*frames, store.sweeps(raw=True))] + [store.finished(), store.summary()]


def test_files_become_one_and_are_deleted_after_the_grace_time(store):
    before = views(store)
    done = {table.table: table for table in compact(store).tables}
    assert {name: (table.num_merged, table.num_rows, len(table.written)) for name, table in done.items()} == {
        "trials": (4, 4, 1),
        "metrics": (3, 5, 1),
        "sweeps": (3, 6, 1),
    }
    assert [len(names(store, table)) for table in ("trials", "metrics", "sweeps")] == [5, 4, 4]
    assert views(store) == before
    assert views(Store.open(store.path)) == before
    assert not compact(store).did_something
    later = compact(store, grace_s=0.0)
    assert {table.table: table.num_deleted for table in later.tables} == {"trials": 4, "metrics": 3, "sweeps": 3}
    assert [len(names(store, table)) for table in ("trials", "metrics", "sweeps")] == [1, 1, 1]
    assert views(store) == before
    assert not compact(store, grace_s=0.0).did_something


def test_attempts_that_may_change_stay_where_they_are(store):
    running = write(store, "c", None, [1])
    dropped = write(store, "e", None, [1])
    del dropped
    compact(store)
    compact(store, grace_s=0.0)
    assert {name for name in names(store, "trials") if not parts.is_compacted(name)} == {"c-1.parquet", "e-1.parquet"}
    assert {name for name in names(store, "metrics") if not parts.is_compacted(name)} == {"c-1.parquet", "e-1.parquet"}
    running.add([(2, "train", "loss", 0.5)])
    running.seal("finished")
    assert store.finished() == {"a": "finished", "c": "finished", "d": "diverged"}
    assert store.metrics(trial_ids=["c"])["step"].tolist() == [1, 2]


def test_rows_are_sorted_and_say_what_they_replace(store):
    replaced = names(store, "metrics")
    compact(store)
    (path,) = (store.path / "metrics").glob("compact-*")
    rows = pq.read_table(path)
    assert rows["trial_id"].to_pylist() == ["a"] * 4 + ["d"]
    assert rows["step"].to_pylist() == [1, 2, 3, 4, 1]
    assert sorted(parts.replaces(path.read_bytes())) == replaced


def test_small_compacted_files_are_merged_and_large_ones_left(store):
    compact(store, max_rows=4)
    for trial_id in "fgh":
        write(store, trial_id, "finished", [1, 2, 3, 4])
    before = views(store)
    compact(store, max_rows=4, grace_s=0.0)
    compact(store, max_rows=4, grace_s=0.0)
    files = [pq.read_metadata(store.path / "metrics" / name).num_rows for name in names(store, "metrics")]
    assert sum(files) == 5 + 3 * 4
    assert max(files) <= 8
    assert views(store) == before


def test_damage_is_named_and_left(store):
    part = store.path / "metrics" / "a-2.parquet"
    part.write_bytes(part.read_bytes()[:-9])
    (store.path / "trials" / "stranger.parquet").write_bytes(b"mine")
    result = compact(store, grace_s=0.0)
    assert [path for path, _ in result.damaged] == ["metrics/a-2.parquet", "trials/stranger.parquet"]
    compact(store, grace_s=0.0)
    assert part.exists()
    assert "stranger.parquet" in names(store, "trials")


def test_metrics_that_lack_promised_rows_are_not_merged(store):
    part = store.path / "metrics" / "a-1.parquet"
    rows = parts.decode("metrics", part.read_bytes(), "p")
    part.write_bytes(parts.encode("metrics", rows.slice(0, 1)))
    assert compact(store).damaged == (("metrics/a-1.parquet", "1 rows instead of 2"),)


def test_nothing_is_deleted_that_the_compacted_file_does_not_hold(store):
    compact(store)
    name = next(name for name in names(store, "metrics") if parts.is_compacted(name))
    path = store.path / "metrics" / name
    rows = parts.decode("metrics", path.read_bytes(), "p")
    path.write_bytes(parts.encode("metrics", rows.slice(1), replaces=parts.replaces(path.read_bytes())))
    result = compact(store, grace_s=0.0)
    assert [line for line in result.damaged if "lacks rows" in line[1]]
    assert (store.path / "metrics" / "a-1.parquet").exists()


def test_int_and_float_agree_and_kinds_that_clash_name_both_files(store):
    for trial_id, value in (("i", 1), ("j", 0.5)):
        store.begin(trial_id, {"optim.x": value}, {}, 0, 4, {}).seal("failed")
    compact(store)
    compact(store, grace_s=0.0)
    assert store.trials().set_index("trial_id")["optim.x"].dropna().to_dict() == {"i": 1.0, "j": 0.5}
    store.begin("k", {"optim.x": "large"}, {}, 0, 4, {}).seal("failed")
    with pytest.raises(Exception, match=r"column optim\.x is .* in .*compact-.* but .* in .*k-1\.parquet"):
        store.trials()


def test_a_store_of_version_1_is_compacted_into_the_present_one(tmp_path):
    import shutil

    old = Path(__file__).parents[2] / "golden" / "store_v1"
    shutil.copytree(old, tmp_path / "copy")
    store = Store.open(tmp_path / "copy")
    compact(store)
    compact(store, grace_s=0.0)
    assert [len(names(store, table)) for table in ("trials", "metrics", "sweeps")] == [1, 1, 1]
    assert equal_tables(store, Store.open(old)) == []
    assert store.trials()["exit_reason"].tolist() == Store.open(old).trials()["exit_reason"].tolist()


def test_an_error_of_the_disk_is_one_line(store, monkeypatch):
    def full(self, path, data, *, durable=True):
        raise OSError(28, os.strerror(28))

    before = views(store)
    with monkeypatch.context() as patch:
        patch.setattr(LocalPlace, "write", full)
        with pytest.raises(Exception, match=r"can't be compacted: No space left on device; nothing is lost"):
            compact(store)
    assert views(store) == before


# --- many at once ----------------------------------------------------------------------------------------------------

NUM_WRITERS = 16


def _write_until(path: str, worker: int, deadline: float, results) -> None:
    store, number, written = Store.open(path), 0, 0
    while time.time() < deadline or number == 0:
        trial_id = f"w{worker:02d}x{number:04d}"
        for attempt, (status, steps, start) in enumerate((("interrupted", (1, 2), 0), ("finished", (3, 4), 2))):
            writer = store.begin(trial_id, {"model.emb_dim": worker}, {"run_id": "r"}, start, 4, {})
            assert writer is not None, (trial_id, attempt)
            assert writer.attempt == attempt + 1
            for step in steps:
                writer.add([(step, "train", "loss", worker + step / 8)])
                writer.flush()
            writer.seal(status)
        number += 1
        written += 4
    results.put((worker, number))


def _compact_until(path: str, deadline: float, results) -> None:
    store, rounds = Store.open(path), 0
    while time.time() < deadline:
        assert compact(store, grace_s=0.2, max_rows=400).damaged == ()
        rounds += 1
    results.put(("compactions", rounds))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_many_writers_a_reader_and_a_compaction_for_a_minute(tmp_path):
    store = Store.create(tmp_path / "results")
    context = multiprocessing.get_context("spawn")
    results, deadline = context.Queue(), time.time() + 60
    arguments = [(_write_until, (str(store.path), worker, deadline, results)) for worker in range(NUM_WRITERS)]
    arguments += [(_compact_until, (str(store.path), deadline, results))]
    processes = [context.Process(target=target, args=args) for target, args in arguments]
    for process in processes:
        process.start()
    seen: set[tuple] = set()
    num_looks = 0
    while any(process.is_alive() for process in processes):
        frame = store.metrics()
        keys = list(zip(frame["trial_id"], frame["step"], strict=True))
        assert len(keys) == len(set(keys))
        assert seen <= set(keys)  # what was counted once counts from then on: these attempts are never redone
        done = set(store.finished())
        seen = {key for key in keys if key[0] in done}
        assert store.damaged == []
        num_looks += 1
    told = dict(results.get(timeout=10) for _ in processes)
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert num_looks > 5
    assert told.pop("compactions") > 5
    frame = Store.open(store.path).metrics()
    found = list(zip(frame["trial_id"], frame["step"], frame["value"], strict=True))
    expected = [
        (f"w{worker:02d}x{number:04d}", step, worker + step / 8)
        for worker, count in sorted(told.items())
        for number in range(count)
        for step in (1, 2, 3, 4)
    ]
    assert found == expected
    raw = Store.open(store.path).metrics(raw=True)
    assert len(raw) == len(expected)
    assert isinstance(Store.open(store.path).metric_table(), pa.Table)
