"""Whatever happens to a store, in whatever order, nothing that was renamed into place is lost or doubled."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from sweeps.store import FINAL, AttemptWriter, Store, compact, parts, repair
from sweeps.store.places import LocalPlace

TRIALS = ("a", "b", "c")


class Crash(BaseException):
    """The process died. No product code catches it as an error that it could handle."""


class FragilePlace(LocalPlace):
    """Dies in the middle of its work, and then does nothing any more, as a killed process does.

    Attributes:
      left: operations that change something, before it dies; None: it lives.
      share: how much of a file is written under its temporary name when it dies in a write.
    """

    flush_every_s = math.inf  # only when a rule says so

    def __init__(self, root: Path):
        super().__init__(root)
        self.left: int | None = None
        self.share = 0.0

    def _work(self) -> bool:
        """Counts an operation. False where it is the one that is cut off."""
        if self.left is None:
            return True
        self.left -= 1
        if self.left < -1:
            raise Crash
        return self.left >= 0

    def write(self, path: str, data: bytes, *, durable: bool = True) -> None:
        if not self._work():
            folder, _, name = path.rpartition("/")
            (self.root / folder).mkdir(exist_ok=True)
            (self.root / folder / f".{name}.0badc0de.tmp").write_bytes(data[: int(self.share * len(data))])
            raise Crash
        super().write(path, data, durable=False)

    def create(self, path: str, data: bytes) -> bool:
        if not self._work():
            raise Crash
        return super().create(path, data)

    def move(self, path: str, to: str) -> None:
        if not self._work():
            raise Crash
        super().move(path, to)

    def remove(self, path: str) -> None:
        # A dead process's claims are dead; this process lives on, so it gives them back instead.
        if not path.startswith("claims/") and not self._work():
            raise Crash
        super().remove(path)


class Model:
    """What a store must show, as plain dicts of what was handed to it and written."""

    def __init__(self) -> None:
        self.attempts: dict[
            tuple[str, int], dict
        ] = {}  # (trial_id, attempt) → status, start, step, rows: [(step, value)]
        self.orphans: dict[tuple[str, int], list[tuple[int, float]]] = {}  # rows of attempts killed before their row
        self.requests: dict[str, list[str]] = {}

    def of(self, trial_id: str) -> list[tuple[int, dict]]:
        return sorted((number, row) for (trial, number), row in self.attempts.items() if trial == trial_id)

    def winner(self, trial_id: str) -> int | None:
        own = self.of(trial_id)
        results = [number for number, row in own if row["status"] in FINAL]
        return max(results) if results else max((number for number, _ in own), default=None)

    def clean_rows(self) -> set[tuple]:
        """By the definition: rows of an attempt count up to the start of every later one, up to the winner."""
        counted = set()
        for trial_id in TRIALS:
            winner = self.winner(trial_id)
            for number, row in self.of(trial_id):
                later = [other["start"] for n, other in self.of(trial_id) if winner and number < n <= winner]
                if winner and number <= winner:
                    counted |= {
                        (trial_id, number, step, value)
                        for step, value in row["rows"]
                        if all(step <= start for start in later)
                    }
        return counted

    def raw_rows(self) -> set[tuple]:
        return {(*key, step, value) for key, row in self.attempts.items() for step, value in row["rows"]}

    def orphaned_rows(self) -> set[tuple]:
        return {(*key, step, value) for key, rows in self.orphans.items() for step, value in rows}


def rows_of(frame: pd.DataFrame) -> list[tuple]:
    return [
        (trial_id, int(attempt), int(step), float(value))
        for trial_id, attempt, step, value in zip(
            frame["trial_id"], frame["attempt"], frame["step"], frame["value"], strict=True
        )
    ]


class Histories(RuleBasedStateMachine):
    """Writers, crashes, compactions, repairs and damage in any order; after each, every view equals the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.place = FragilePlace(Path(self.folder.name) / "results")
        self.store = Store.create(self.place)
        self.model = Model()
        self.writers: dict[str, AttemptWriter] = {}
        self.rows: dict[str, dict] = {}  # of the attempts that are being written, in the model or not yet
        self.pending: dict[str, list[tuple[int, float]]] = {}
        self.reader = Store.open(LocalPlace(self.place.root))  # one reader all along, with what it remembers
        self.counter = 0.0
        self.num_requests = 0

    def teardown(self) -> None:
        self.writers.clear()
        self.folder.cleanup()

    @contextmanager
    def crash_after(self, num_operations: int, share: float) -> Iterator[None]:
        self.place.left, self.place.share = num_operations, share
        try:
            yield
        finally:
            self.place.left = None

    def value(self) -> float:
        self.counter += 1.0
        return self.counter

    # --- a sweep

    @rule(trial_id=st.sampled_from(TRIALS), flushes=st.booleans())
    def begin(self, trial_id, flushes):
        if trial_id in self.writers:
            assert self.store.begin(trial_id, {"model.size": 3}, {"run_id": "other"}, 0, 100, {}) is None
            return
        own = self.model.of(trial_id)
        if own and self.model.attempts[trial_id, self.model.winner(trial_id)]["status"] in FINAL:
            self.store.clear_checkpoints(trial_id)  # as when a diverged trial is tried again
        start, _ = next(self.store.load_checkpoints(trial_id), (0, None))
        writer = self.store.begin(trial_id, {"model.size": 3}, {"run_id": "run"}, start, 100, {})
        assert writer is not None
        assert writer.attempt > max((number for number, _ in own), default=0)
        self.writers[trial_id] = writer
        self.pending[trial_id] = []
        self.rows[trial_id] = {"status": None, "start": start, "step": start, "rows": []}
        if flushes:
            assert writer.flush()
            self.written(trial_id)

    @precondition(lambda self: self.writers)
    @rule(data=st.data(), number=st.integers(1, 3))
    def add(self, data, number):
        trial_id = data.draw(st.sampled_from(sorted(self.writers)))
        writer, row = self.writers[trial_id], self.rows[trial_id]
        for _ in range(number):
            step = max([row["step"], *(step for step, _ in self.pending[trial_id])]) + 1
            value = self.value()
            self.pending[trial_id].append((step, value))
            writer.add([(step, "train", "loss", value)])

    def written(self, trial_id: str) -> None:
        row = self.model.attempts[trial_id, self.writers[trial_id].attempt] = self.rows[trial_id]
        row["rows"] += self.pending[trial_id]
        row["step"] = max([row["step"], *(step for step, _ in row["rows"])])
        self.pending[trial_id] = []

    @precondition(lambda self: self.writers)
    @rule(data=st.data())
    def flush(self, data):
        trial_id = data.draw(st.sampled_from(sorted(self.writers)))
        assert self.writers[trial_id].flush()
        self.written(trial_id)
        self.store.save_checkpoint(trial_id, self.rows[trial_id]["step"], b"the state")

    @precondition(lambda self: self.writers)
    @rule(
        data=st.data(),
        status=st.sampled_from(["finished", "finished", "diverged", "failed", "interrupted"]),
        clears=st.booleans(),
    )
    def seal(self, data, status, clears):
        trial_id = data.draw(st.sampled_from(sorted(self.writers)))
        self.writers[trial_id].seal(status)
        self.written(trial_id)
        self.rows[trial_id]["status"] = status
        del self.writers[trial_id]
        if status in FINAL and clears:
            self.store.clear_checkpoints(trial_id)

    @precondition(lambda self: self.writers)
    @rule(data=st.data())
    def drop(self, data):
        del self.writers[data.draw(st.sampled_from(sorted(self.writers)))]

    @precondition(lambda self: self.writers)
    @rule(data=st.data(), after=st.integers(0, 2), share=st.floats(0, 1), status=st.sampled_from(["finished", None]))
    def crash_in_a_write(self, data, after, share, status):
        """A process dies while it flushes or seals: each of its two files is the old one or the new one."""
        trial_id = data.draw(st.sampled_from(sorted(self.writers)))
        writer, row = self.writers.pop(trial_id), self.rows[trial_id]
        key = (trial_id, writer.attempt)
        with self.crash_after(after, share), suppress(Crash):
            if status:
                writer.seal(status)
            else:
                writer.flush()
        del writer
        # What was renamed into place is what the parts say; that is the promise, so it is read with other means.
        name = f"{key[0]}-{key[1]}.parquet"
        if (self.place.root / "metrics" / name).exists():
            frame = pd.read_parquet(self.place.root / "metrics" / name)
            written = [(int(step), float(value)) for step, value in zip(frame["step"], frame["value"], strict=True)]
            known = row["rows"] + self.pending[trial_id]
            assert written in (row["rows"], known)
            row["rows"] = written
        if not (self.place.root / "trials" / name).exists():
            assert key not in self.model.attempts
            if row["rows"]:
                self.model.orphans[key] = row["rows"]
            return
        self.model.attempts[key] = row
        sealed = pq.read_table(self.place.root / "trials" / name).to_pylist()[0]
        row["status"], row["step"] = sealed["status"], sealed["step"]
        assert row["status"] is None or row["rows"] == [] or row["rows"][-1][0] == row["step"]

    @rule(trial_ids=st.lists(st.sampled_from(TRIALS), unique=True))
    def request(self, trial_ids):
        self.num_requests += 1
        request_id = f"request{self.num_requests}"
        trials = [type("Trial", (), {"trial_id": name, "point": name, "axes": {}})() for name in trial_ids]
        self.store.record_sweep("sweep", trials, file="sweep.yaml", tiny=False, request_id=request_id)
        self.model.requests[request_id] = trial_ids

    # --- upkeep

    @rule(grace_s=st.sampled_from([0.0, 3600.0]), max_rows=st.sampled_from([3, 8, 1000]))
    def compact(self, grace_s, max_rows):
        assert compact(self.store, grace_s=grace_s, max_rows=max_rows).damaged == ()

    @rule(after=st.integers(0, 12), share=st.floats(0, 1), max_rows=st.sampled_from([3, 8, 1000]))
    def crash_in_a_compaction(self, after, share, max_rows):
        with self.crash_after(after, share), suppress(Crash):
            compact(self.store, grace_s=0.0, max_rows=max_rows)

    @rule(data=st.data(), grace_s=st.sampled_from([0.0, 3600.0]))
    def two_compactions(self, data, grace_s):
        """One begins and ends at a moment in which another is about to write or to delete."""
        moment = data.draw(st.integers(0, 8))
        other = Store.open(LocalPlace(self.place.root))

        class Interrupted(LocalPlace):
            left = moment

            def _meanwhile(self) -> None:
                self.left -= 1
                if self.left == -1:
                    compact(other, grace_s=grace_s, max_rows=5)

            def write(self, path: str, data: bytes, *, durable: bool = True) -> None:
                self._meanwhile()
                super().write(path, data, durable=False)

            def remove(self, path: str) -> None:
                self._meanwhile()
                super().remove(path)

        compact(Store.open(Interrupted(self.place.root)), grace_s=0.0, max_rows=8)

    @rule(after=st.one_of(st.none(), st.integers(0, 6)))
    def repair_what_is_whole(self, after):
        """There is no damage to results, so that no row may move but those that never counted."""
        if after is None:
            damaged = [item for item in repair(self.store) if item.is_damage]
            orphans = [f"{trial_id}-{attempt}.parquet" for trial_id, attempt in self.model.orphans]
            left = [item for item in damaged if item.what.startswith("metrics/")]
            assert sorted(item.what for item in left) == sorted(f"metrics/{name}" for name in orphans)
            assert all(item.what == f"trial {item.what[6:]}" for item in damaged if item not in left)
            assert {item.what[6:] for item in damaged if item not in left} <= {key[0] for key in self.model.orphans}
        else:
            with self.crash_after(after, 0.5), suppress(Crash):
                repair(self.store)
        self.note_orphans()

    def note_orphans(self) -> None:
        """Those that a repair has not set aside."""
        metrics = self.place.root / "metrics"
        self.model.orphans = {
            key: rows for key, rows in self.model.orphans.items() if (metrics / parts.part_name(*key)).exists()
        }

    @rule(data=st.data(), upkeep=st.sampled_from(["compact", "delete"]))
    def read_across_a_compaction(self, data, upkeep):
        """A reader lists, then files are merged and deleted, then it reads."""
        moment = data.draw(st.integers(0, 3))
        store = self.store

        class Slow(LocalPlace):
            left = moment

            def read(self, path: str) -> bytes:
                self.left -= 1
                if self.left == -1:
                    compact(store, grace_s=0.0)
                    if upkeep == "delete":
                        compact(store, grace_s=0.0)
                return super().read(path)

        self.check(Store.open(Slow(self.place.root)))

    @rule(data=st.data(), share=st.floats(0, 0.99), crash_after=st.one_of(st.none(), st.integers(0, 6)))
    def damage_and_repair(self, data, share, crash_after):
        """A file is cut short. Of what the repair sets aside, only trials that lost rows are concerned."""
        self.writers.clear()
        self.pending.clear()
        files = sorted(
            path for table in ("trials", "metrics", "sweeps") for path in self.place.root.glob(f"{table}/[!.]*")
        )
        if not files:
            return
        path = data.draw(st.sampled_from(files))
        content = path.read_bytes()
        path.write_bytes(content[: int(share * len(content))])
        before, rows_before = self.reader.trials(raw=True), set(rows_of(self.reader.metrics(raw=True)))
        if crash_after is not None:
            with self.crash_after(crash_after, 0.5), suppress(Crash):
                repair(self.store)
        found = repair(self.store)
        assert found or crash_after is not None
        assert [item for item in repair(self.store) if item.is_damage] == []
        aside = list(self.place.root.glob("damaged/*/*"))
        assert any(
            other.read_bytes() == path_content
            for other in aside
            for path_content in [content[: int(share * len(content))]]
        )

        # What the store still shows is the new truth; it must be some of the old one, and all that was not concerned.
        after = self.reader.trials(raw=True)
        kept = set(zip(after["trial_id"], after["attempt"], strict=True))
        rows = set(rows_of(self.reader.metrics(raw=True)))
        assert kept <= set(zip(before["trial_id"], before["attempt"], strict=True))
        assert rows <= rows_before
        if not parts.is_compacted(path.name) and path.parent.name != "sweeps":
            trial_id = parts.split_name(path.name)[0]
            assert {key for key in self.model.attempts if key[0] != trial_id} <= kept
            assert {row for row in self.model.raw_rows() if row[0] != trial_id} <= rows
        if path.parent.name == "sweeps":
            assert kept == set(self.model.attempts)
            assert rows == self.model.raw_rows()
        self.note_orphans()
        assert self.model.orphans == {}
        self.model.attempts = {
            key: {**row, "rows": [(row_[2], row_[3]) for row_ in sorted(rows) if row_[:2] == key]}
            for key, row in self.model.attempts.items()
            if key in kept
        }
        requests = set(self.reader.sweeps(raw=True)["request_id"])
        self.model.requests = {name: trials for name, trials in self.model.requests.items() if name in requests}

    # --- what must hold

    @invariant()
    def every_view_is_the_models(self):
        self.check(self.reader)
        self.check(Store.open(LocalPlace(self.place.root)))

    def check(self, store: Store) -> None:
        model = self.model
        raw = rows_of(store.metrics(raw=True))
        assert len(raw) == len(set(raw))
        assert set(raw) == model.raw_rows() | model.orphaned_rows()
        clean = rows_of(store.metrics())
        assert len(clean) == len(set(clean))
        assert set(clean) == model.clean_rows()
        for trial_id in TRIALS:
            # By how the rows were made, and not by which attempts there are: one at every step.
            steps = sorted(row[2] for row in clean if row[0] == trial_id)
            number = model.winner(trial_id)
            if number is not None and model.attempts[trial_id, number]["status"] in FINAL:
                assert steps == list(range(1, model.attempts[trial_id, number]["step"] + 1))
        trials = store.trials(raw=True)
        assert list(zip(trials["trial_id"], trials["attempt"], strict=True)) == sorted(model.attempts)
        winners = store.trials()
        expected = {(trial_id, model.winner(trial_id)) for trial_id in TRIALS if model.of(trial_id)}
        assert set(zip(winners["trial_id"], winners["attempt"], strict=True)) == expected
        assert store.finished() == {
            trial_id: status
            for trial_id in TRIALS
            if model.of(trial_id) and (status := model.attempts[trial_id, model.winner(trial_id)]["status"]) in FINAL
        }
        sweeps = store.sweeps(raw=True)
        found = sorted(zip(sweeps["request_id"], sweeps["trial_id"], strict=True))
        assert found == sorted((request, trial) for request, trials in model.requests.items() for trial in trials)
        assert store.damaged == []


def example_settings(num_examples: int, num_steps: int) -> settings:
    return settings(
        max_examples=num_examples,
        stateful_step_count=num_steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def test_no_short_history_loses_or_doubles_a_row():
    run_state_machine_as_test(Histories, settings=example_settings(5, 15))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_history_loses_or_doubles_a_row():
    run_state_machine_as_test(Histories, settings=example_settings(30, 40))
