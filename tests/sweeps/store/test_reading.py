"""Compacted files: they hide what they replace, and no reader sees a row twice or misses one."""

from pathlib import Path

import pyarrow as pa
import pytest

from sweeps.store import Store, StoreError, parts
from sweeps.store.places import LocalPlace
from sweeps.store.reading import Reader

TRIALS = ("b", "a", "c")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Three trials: `a` was interrupted at step 2, began again there and finished; the others finished at once."""
    store = Store.create(tmp_path / "results")
    write(store, "a", "interrupted", [1, 2, 3])
    for trial_id in TRIALS:
        write(store, trial_id, "finished", [3, 4] if trial_id == "a" else [1, 2, 3, 4], 2 if trial_id == "a" else 0)
    return store


def write(store: Store, trial_id: str, status: str, steps, start_step: int = 0) -> None:
    writer = store.begin(trial_id, {"model.emb_dim": 8}, {"run_id": "run"}, start_step, 4, {})
    assert writer is not None
    writer.add([(step, split, "loss", step / 7) for step in steps for split in ("train", "valid")])
    writer.seal(status)


def compact(store: Store, table: str, names: list[str]) -> str:
    """A file with the rows of these."""
    place = store.place
    found = [(name, parts.decode(table, place.read(f"{table}/{name}"), name)) for name in sorted(names)]
    replaced = [
        *names,
        *(
            other
            for name in names
            if parts.is_compacted(name)
            for other in parts.replaces(place.read(f"{table}/{name}"))
        ),
    ]
    rows = parts.concatenate(found, table)
    name = parts.compacted_name()
    place.write(f"{table}/{name}", parts.encode(table, rows, replaces=replaced))
    return name


def names(store: Store, table: str) -> list[str]:
    return [entry.name for entry in store.place.entries(table, parts.SUFFIX)]


def views(store: Store) -> list:
    frames = [store.trials(), store.trials(raw=True), store.metrics(), store.metrics(raw=True), store.final_metrics()]
    frames += [store.metrics(splits=["valid"]), store.metrics(trial_ids=["a", "c"]), store.trials(trial_ids=["b"])]
    return [frame.to_csv() for frame in frames] + [store.finished(), store.statuses()]


@pytest.mark.parametrize("removed", [False, True])
@pytest.mark.parametrize("tables", [["trials"], ["metrics"], ["trials", "metrics"]])
def test_compaction_changes_no_view(store, tables, removed):
    before = views(store)
    for table in tables:
        replaced = names(store, table)
        compact(store, table, replaced)
        for name in replaced if removed else ():
            store.place.remove(f"{table}/{name}")
    assert views(Store(store.path)) == before
    assert views(store) == before  # with what it remembers from before
    write(store, "d", "finished", [1])
    assert set(store.finished()) == {"a", "b", "c", "d"}
    assert store.damaged == []


def test_an_attempt_in_two_compacted_files_counts_once(store):
    before = views(store)
    for table in ("trials", "metrics"):
        everything = names(store, table)
        compact(store, table, everything)
        compact(store, table, everything[1:])
    assert views(store) == before


def test_a_compacted_file_can_be_compacted_again(store):
    before = views(store)
    for table in ("trials", "metrics"):
        _, *others = names(store, table)
        compact(store, table, others)
        compact(store, table, [name for name in names(store, table) if name not in others])
        for name in others:
            store.place.remove(f"{table}/{name}")
    assert views(store) == before
    for table in ("trials", "metrics"):
        store.place.remove(f"{table}/{names(store, table)[-2]}")  # the older compacted file
    assert views(store) == before


def test_a_damaged_compacted_file_hides_nothing(store):
    before = views(store)
    for table in ("trials", "metrics"):
        name = compact(store, table, names(store, table))
        path = store.path / table / name
        data = bytearray(path.read_bytes())
        data[8] ^= 1  # within the first page
        path.write_bytes(data)
    assert views(store) == before
    assert len(store.damaged) == 2


def test_attempts_are_numbered_on_after_compaction(store):
    for table in ("trials", "metrics"):
        replaced = names(store, table)
        compact(store, table, replaced)
        for name in replaced:
            store.place.remove(f"{table}/{name}")
    write(store, "a", "finished", [1])
    assert store.trials(trial_ids=["a"])["attempt"].tolist() == [3]


def test_a_reader_that_listed_before_a_compaction_lists_again(store, monkeypatch):
    before = views(store)
    real, done = LocalPlace.entries, set()

    def compact_after_listing(self, folder, *selection):
        found = real(self, folder, *selection)
        if folder in ("trials", "metrics") and folder not in done:
            done.add(folder)
            replaced = names(store, folder)
            compact(store, folder, replaced)
            for name in replaced:
                self.remove(f"{folder}/{name}")
        return found

    monkeypatch.setattr(LocalPlace, "entries", compact_after_listing)
    assert views(store) == before
    assert done == {"trials", "metrics"}


def test_the_last_row_is_that_of_the_highest_step():
    from sweeps.store.reading import _last

    rows = pa.table(
        {
            "trial_id": ["a"] * 5,
            "attempt": pa.array([1] * 5, pa.int32()),
            "step": [2, 1, 2, 1, 1],
            "split": ["train", "train", "valid", "valid", "train"],
            "metric": ["loss", "loss", "loss", "loss", "accuracy"],
            "value": [1.0, 2.0, 3.0, 4.0, 5.0],
        }
    )
    assert _last(rows)["value"].to_pylist() == [1.0, 3.0, 5.0]


def test_a_folder_that_never_rests_is_given_up(store, monkeypatch):
    def gone(self, path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(LocalPlace, "read", gone)
    with pytest.raises(StoreError, match="its files go while they are read"):
        Reader(store.place).read("trials")


@pytest.mark.parametrize("at_once", [1, 2, 3, 256])
def test_rows_are_the_same_however_many_parts_are_selected_from_at_once(store, monkeypatch, at_once):
    for number in range(5):
        write(store, f"t{number}", "finished", range(1, number + 2))
    expected = [
        (trial_id, attempt, step, split)
        for trial_id, attempt, steps in [
            ("a", 1, [1, 2]), ("a", 2, [3, 4]), ("b", 1, [1, 2, 3, 4]), ("c", 1, [1, 2, 3, 4]),
            *((f"t{number}", 1, range(1, number + 2)) for number in range(5)),
        ]
        for step in steps
        for split in ("train", "valid")
    ]  # fmt: skip
    monkeypatch.setattr("sweeps.store.reading._MAX_SELECTED", at_once)
    columns = ["trial_id", "attempt", "step", "split"]
    assert list(store.metrics()[columns].itertuples(index=False, name=None)) == expected
    some = store.metrics(splits=["valid"], metrics=["loss"], trial_ids=["a", "t3"])
    kept = [row for row in expected if row[0] in ("a", "t3") and row[3] == "valid"]
    assert list(some[columns].itertuples(index=False, name=None)) == kept
    assert store.metrics(splits=["ood"]).empty
    assert store.metrics(metrics=["accuracy"]).empty
    last = {(row[0], row[3]): row for row in expected}
    final = store.final_metrics()
    assert sorted(final[columns].itertuples(index=False, name=None)) == sorted(last.values())
    assert set(map(str, final.dtypes[["trial_id", "split", "metric"]])) == {"str"}
