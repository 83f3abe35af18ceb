"""The results store: what is written comes back, and no crash, rival or broken file breaks a reader."""

import errno
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sweeps.store import (
    METRICS,
    SCHEMA_VERSION,
    SWEEPS,
    TRIALS,
    AttemptWriter,
    Beginning,
    Ending,
    Store,
    StoreError,
    equal_tables,
    is_config_column,
    seal_all,
)
from sweeps.store import attempts as attempts_module
from sweeps.store import claims as claims_module
from sweeps.store import parts as parts_module
from sweeps.store.clean import Attempt, step_limits
from sweeps.store.compare import _agree
from sweeps.store.places import LocalPlace
from sweeps.store.reading import Reader

ROOT = Path(attempts_module.__file__).parents[2]
CONFIG = {"model.emb_dim": 32, "model.attention": "hyla", "model.causal": False, "optim.peak_lr": 0.001}


class Requested(NamedTuple):
    trial_id: str
    point: str
    axes: dict


keep_alive = AttemptWriter._keep_alive


@pytest.fixture(autouse=True)
def no_renewal(monkeypatch):
    """Keeps the thread that renews claims from undoing what a test does to one."""
    monkeypatch.setattr(AttemptWriter, "_keep_alive", lambda self: None)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "results")


def begin(
    store: Store, trial_id: str = "t", *, start_step: int = 0, num_steps: int = 100, config=CONFIG
) -> AttemptWriter:
    """An attempt that has its row already."""
    writer = store.begin(trial_id, config, {"run_id": "run"}, start_step, num_steps, {"num_params": 7})
    assert writer is not None
    assert writer.flush()
    return writer


def attempt(store: Store, trial_id: str, status: str | None, steps, *, start_step: int = 0, value: float = 0.0) -> None:
    """One whole attempt with a training loss at each step; status None leaves it as a killed process would."""
    writer = begin(store, trial_id, start_step=start_step)
    writer.add([(step, "train", "loss", value) for step in steps])
    if status is not None:
        writer.seal(status)
        return
    writer.flush()
    claim = store.path / "claims" / f"{trial_id}-{writer.attempt}.json"
    del writer
    deadline = time.monotonic() + 30
    while claim.exists() and time.monotonic() < deadline:  # the heartbeat's thread may just hold the writer
        time.sleep(0.01)


def measured(frame: pd.DataFrame) -> list[tuple]:
    return list(frame[["attempt", "step", "split", "metric", "value"]].itertuples(index=False, name=None))


def run_python(code: str, *args: object, check: bool = True) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, args)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=check,
        timeout=120,
    )


def change_claim(store: Store, name: str, **changes: object) -> None:
    path = store.path / "claims" / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# ------------------------------------------------------------------------------------------------ what comes back


def test_a_row_comes_back_with_its_columns_and_types(store):
    writer = store.begin(
        "t",
        {**CONFIG, "optim.grad_clip_norm": None},
        {"run_id": "run", "git_commit": "abc", "git_dirty": True, "version.jax": "0.10"},
        0,
        100,
        {"num_params": 7, "train_flops": 1e21},
    )
    writer.update(device_kind="cpu")
    writer.seal("finished", train_s=1.5, step=100)
    table = pq.read_table(store.path / "trials" / "t-1.parquet")
    for column in TRIALS:
        assert table.schema.field(column.name).type == column.type
    assert [str(table.schema.field(name).type) for name in CONFIG] == ["int64", "string", "bool", "double"]
    row = store.trials().iloc[0]
    expected = {**CONFIG, "trial_id": "t", "attempt": 1, "status": "finished", "step": 100, "num_steps": 100}
    expected |= {"num_params": 7, "train_flops": 1e21, "git_dirty": True, "version.jax": "0.10", "train_s": 1.5}
    expected |= {"device_kind": "cpu", "pid": os.getpid()}
    assert {name: row[name] for name in expected} == expected
    assert pd.isna(row["optim.grad_clip_norm"])
    assert pd.isna(row["error"])
    assert row["started_at"] <= row["ended_at"]
    assert str(row["started_at"].tz) == "UTC"


def test_the_clock_is_utc(store):
    before = pd.Timestamp.now("UTC")
    begin(store).seal("finished")
    assert abs(store.trials()["started_at"].iloc[0] - before) < pd.Timedelta(minutes=1)


def test_parts_are_marked_with_table_and_version(store):
    attempt(store, "t", "finished", [1])
    store.record_sweep("s", [Requested("t", "p", {})], file="s.yaml", tiny=False)
    for table in ("trials", "metrics", "sweeps"):
        (part,) = (store.path / table).iterdir()
        marks = pq.read_metadata(part).metadata
        assert marks[b"hyla.table"] == table.encode()
        assert marks[b"hyla.schema_version"] == str(SCHEMA_VERSION).encode()


def test_every_column_is_explained():
    for column in (*TRIALS, *METRICS, *SWEEPS):
        assert column.meaning
        assert not column.name.startswith("model.")
    assert is_config_column("model.emb_dim")
    assert not is_config_column("version.jax")


def test_values_that_are_no_numbers_are_kept(store):
    writer = begin(store)
    writer.add([(1, "valid", "loss", math.nan), (2, "valid", "loss", math.inf), (3, "valid", "loss", -math.inf)])
    writer.seal("diverged")
    values = store.metrics()["value"].tolist()
    assert math.isnan(values[0])
    assert values[1:] == [math.inf, -math.inf]


def test_an_empty_store_reads_as_empty_tables(store):
    assert list(store.trials().columns) == [column.name for column in TRIALS]
    assert list(store.metrics().columns) == [column.name for column in METRICS]
    assert list(store.final_metrics().columns) == [column.name for column in METRICS]
    assert list(store.sweeps().columns) == [column.name for column in SWEEPS]
    assert store.finished() == store.statuses() == {}
    assert store.summary() == []


def test_metrics_can_be_narrowed(store):
    for trial_id in ("a", "b"):
        writer = begin(store, trial_id)
        writer.add([(1, split, metric, 0.5) for split in ("train", "ood") for metric in ("loss", "accuracy")])
        writer.seal("finished")
    frame = store.metrics(splits=["ood"], metrics=["accuracy"], trial_ids=["b"])
    assert frame.values.tolist() == [["b", 1, 1, "ood", "accuracy", 0.5]]
    assert len(store.metrics(splits=["ood"])) == 4
    assert len(store.metrics(metrics=[])) == 0


def test_trials_can_be_narrowed(store):
    for trial_id in ("a", "a", "b"):
        attempt(store, trial_id, "failed", [1])
    assert store.trials(trial_ids=["a"])[["trial_id", "attempt"]].values.tolist() == [["a", 2]]
    assert store.trials(raw=True, trial_ids=iter(["a", "c"]))["attempt"].tolist() == [1, 2]


def test_final_metrics_take_the_last_step_of_each_split_and_metric(store):
    writer = begin(store)
    writer.add([(10, "train", "loss", 3.0), (10, "ood", "loss", 4.0), (20, "train", "loss", 2.0)])
    writer.seal("interrupted")
    resumed = begin(store, start_step=20)
    resumed.add([(30, "train", "loss", 1.0)])
    resumed.seal("finished")
    assert measured(store.final_metrics()) == [(1, 10, "ood", "loss", 4.0), (2, 30, "train", "loss", 1.0)]
    assert measured(store.final_metrics(splits=["ood"])) == [(1, 10, "ood", "loss", 4.0)]


def test_int_and_float_agree_and_absent_fields_are_null(store):
    begin(store, "a", config={"optim.weight_decay": 0}).seal("finished")
    begin(store, "b", config={"optim.weight_decay": 0.1, "model.dropout": 0.5}).seal("finished")
    begin(store, "c", config={"optim.weight_decay": None, "optim.clip": None}).seal("finished")
    frame = store.trials()
    assert frame["optim.weight_decay"].tolist()[:2] == [0.0, 0.1]
    assert frame["optim.weight_decay"].isna().tolist() == [False, False, True]
    assert frame["model.dropout"].isna().tolist() == [True, False, True]
    assert frame["optim.clip"].isna().all()


@pytest.mark.parametrize("other", ["1", True])
def test_kinds_that_clash_name_both_files(store, other):
    begin(store, "a", config={"model.norm": 1}).seal("finished")
    begin(store, "b", config={"model.norm": other}).seal("finished")
    with pytest.raises(StoreError, match=r"model\.norm is int64 in .*a-1\.parquet but .* in .*b-1\.parquet"):
        store.trials()
    assert set(store.finished()) == {"a", "b"}


def test_attempts_are_ordered_by_number_not_by_name(store):
    for number in range(11):
        attempt(store, "t", "interrupted", [number + 1], start_step=number)
    assert store.metrics()["step"].tolist() == list(range(1, 12))
    assert store.trials(raw=True)["attempt"].tolist() == list(range(1, 12))
    assert store.trials()["attempt"].tolist() == [11]


# ------------------------------------------------------------------------------------------------- the clean view


def test_a_resumed_trial_reads_as_one(store):
    attempt(store, "t", "interrupted", [10, 20, 30], value=1.0)  # saved at 20, then lost
    attempt(store, "t", None, [30, 40, 50], start_step=20, value=2.0)  # saved at 40, then killed
    attempt(store, "t", "finished", [50, 100], start_step=40, value=3.0)
    assert [(row[0], row[1]) for row in measured(store.metrics())] == [
        (1, 10),
        (1, 20),
        (2, 30),
        (2, 40),
        (3, 50),
        (3, 100),
    ]
    assert len(store.metrics(raw=True)) == 8
    assert store.trials()[["attempt", "status"]].values.tolist() == [[3, "finished"]]
    assert store.trials(raw=True)["status"].tolist() == ["interrupted", "interrupted", "finished"]


@pytest.mark.parametrize(
    ("statuses", "winner"),
    [
        (["failed", "interrupted"], 2),
        (["finished", "failed"], 1),
        (["diverged", None], 1),
        (["diverged", "finished"], 2),
        (["finished", "diverged", "interrupted"], 2),
        ([None, None], 2),
    ],
)
def test_a_result_wins_else_the_latest(store, statuses, winner):
    for number, status in enumerate(statuses, 1):
        attempt(store, "t", status, [number])
    assert store.trials()["attempt"].tolist() == [winner]
    assert set(store.metrics()["attempt"]) == {winner}  # each began at step 0, so nothing of an earlier one counts
    result = statuses[winner - 1]
    assert store.finished() == ({"t": result} if result in ("finished", "diverged") else {})


@given(
    attempts=st.lists(
        st.tuples(st.sampled_from(["finished", "diverged", "failed", "interrupted", None]), st.integers(0, 5)),
        min_size=1,
        max_size=5,
    )
)
def test_the_clean_view_agrees_with_its_definition(attempts):
    rows = [Attempt("t", number, status, start_step) for number, (status, start_step) in enumerate(attempts, 1)]
    results = [row.attempt for row in rows if row.status in ("finished", "diverged")]
    winner = max(results) if results else len(rows)
    expected = {
        (row.attempt, step)
        for row in rows[:winner]
        for step in range(1, 8)
        if all(step <= later.start_step for later in rows[row.attempt : winner])
    }
    limits = step_limits(reversed(rows))
    counted = {
        (number, step)
        for (_, number), limit in limits.items()
        for step in range(1, 8)
        if limit is None or step <= limit
    }
    assert counted == expected


def test_metrics_of_an_attempt_without_a_row_are_raw_only(store):
    attempt(store, "t", "finished", [1])
    (store.path / "trials" / "t-1.parquet").unlink()
    assert len(store.metrics()) == 0
    assert len(store.metrics(raw=True)) == 1


# ---------------------------------------------------------------------------------------------------- the writer


def test_live_parts_are_replaced_whole_and_then_sealed(store):
    writer = begin(store)
    writer.add([(10, "train", "loss", 2.0)])
    assert len(store.metrics()) == 0
    assert writer.flush()
    assert len(store.metrics()) == 1
    assert store.trials()[["status", "step"]].values.tolist() == [["running", 10]]
    writer.add([(20, "train", "loss", 1.0)])
    writer.seal("finished")
    assert store.metrics()["step"].tolist() == [10, 20]
    assert store.trials()[["status", "step"]].values.tolist() == [["finished", 20]]
    assert list((store.path / "claims").iterdir()) == []
    assert sorted(path.name for path in store.path.rglob("*") if path.is_file()) == ["t-1.parquet", "t-1.parquet"]
    with pytest.raises(RuntimeError, match="sealed"):
        writer.add([(30, "train", "loss", 1.0)])
    with pytest.raises(RuntimeError, match="sealed"):
        writer.seal("failed")


def test_rows_are_flushed_every_few_seconds_without_being_asked(store, monkeypatch):
    monkeypatch.setattr(LocalPlace, "flush_every_s", 0.0)
    writer = store.begin("t", CONFIG, {}, 0, 100, {})
    writer.add([(10, "train", "loss", 2.0)])
    assert store.metrics()["step"].tolist() == [10]
    assert store.trials()["num_metric_rows"].tolist() == [1]
    assert not writer.sealed


def test_a_flush_with_nothing_new_writes_nothing(store):
    writer = begin(store)
    writer.add([(10, "train", "loss", 2.0)])
    writer.flush()
    before = {path: path.stat().st_ino for path in store.path.rglob("*.parquet")}
    assert writer.flush()
    assert {path: path.stat().st_ino for path in store.path.rglob("*.parquet")} == before


def test_start_step_can_be_corrected(store):
    writer = begin(store, start_step=50)
    assert writer.start_step == 50
    writer.update(start_step=0)
    writer.flush()
    assert store.trials(raw=True)[["start_step", "step"]].values.tolist() == [[0, 0]]


def test_errors_are_one_line_with_the_traceback_beside_it(store):
    try:
        raise ValueError("first line\nsecond line")
    except ValueError as error:
        begin(store, "a").seal("failed", error)
    begin(store, "b").seal("interrupted", "lost its worker")
    begin(store, "c").seal("failed", "one\ntwo")
    begin(store, "d").seal("failed", KeyError())
    frame = store.trials().set_index("trial_id")
    assert frame["error"].to_dict() == {
        "a": "ValueError: first line",
        "b": "lost its worker",
        "c": "one",
        "d": "KeyError",
    }
    assert "raise ValueError" in frame["error_detail"]["a"]
    assert "second line" in frame["error_detail"]["a"]
    assert pd.isna(frame["error_detail"]["b"])
    assert frame["error_detail"]["c"] == "one\ntwo"


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"trian_s": 1.0}, "'trian_s' is no column to set; choose from"),
        ({"attempt": 3}, "'attempt' is no column to set"),
        ({"train_s": "long"}, "train_s='long' does not fit its column, which is double"),
    ],
)
def test_wrong_facts_are_refused_before_anything_is_written(store, facts, message):
    writer = begin(store)
    with pytest.raises(ValueError, match=message):
        writer.seal("finished", **facts)
    with pytest.raises(ValueError, match=message):
        store.begin("other", CONFIG, facts, 0, 1, {})
    writer.seal("finished")
    assert set(store.statuses()) == {"t"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model.sizes": [1, 2]}, r"model\.sizes=\[1, 2\]"),
        ({"emb_dim": 1}, "dotted name"),
        ({"version.jax": "1"}, "dotted"),
    ],
)
def test_config_fields_that_fit_no_column_are_refused(store, config, message):
    with pytest.raises(ValueError, match=message):
        begin(store, config=config)
    assert store.claims() == []


def test_an_unknown_status_is_refused(store):
    writer = begin(store)
    with pytest.raises(ValueError, match="status='done' is unknown; choose one of"):
        writer.seal("done")


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "../a", "a b"])
def test_names_that_are_no_file_names_are_refused(store, name):
    with pytest.raises(ValueError, match="can't be part of a file name"):
        begin(store, name)
    with pytest.raises(ValueError, match="can't be part of a file name"):
        store.clear_checkpoints(name)


# ------------------------------------------------------------------------------------------------------ full disks


def full_disk(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_rows_are_held_back_while_the_disk_is_full(store, monkeypatch):
    writer = begin(store)
    writer.add([(10, "train", "loss", 2.0)])
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        assert not writer.flush()
        assert writer.held_back == "No space left on device"
        writer.add([(20, "train", "loss", 1.0)])
        writer.heartbeat(step=20)
        with pytest.raises(StoreError, match="trial t can't be written: No space left on device") as caught:
            writer.seal("finished")
        assert "\n" not in str(caught.value)
        assert store.trials()["status"].tolist() == ["running"]
    assert [path.name for path in store.path.rglob(".*")] == []  # no half-written files take up room
    assert writer.flush()
    assert store.trials()["status"].tolist() == ["running"]
    writer.seal("finished")
    assert writer.held_back is None
    assert store.metrics()["step"].tolist() == [10, 20]
    assert store.finished() == {"t": "finished"}


def test_no_trial_begins_on_a_full_disk(store, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(LocalPlace, "write", full_disk)
        with pytest.raises(StoreError, match="trial t can't be begun: No space left on device"):
            begin(store)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        with pytest.raises(StoreError, match="checkpoint at step 5 can't be written: No space"):
            store.save_checkpoint("t", 5, b"state")
        with pytest.raises(StoreError, match="the request can't be recorded: No space"):
            store.record_sweep("s", [], file="s.yaml", tiny=False)
        with pytest.raises(StoreError, match="the results store can't be written: No space"):
            store.check_writable()
    assert [path for path in store.path.rglob("*") if path.is_file()] == []
    begin(store).seal("finished")


def test_metrics_are_written_before_the_row_that_promises_them(store, monkeypatch):
    writer = begin(store)
    writer.add([(10, "train", "loss", 2.0)])
    real = LocalPlace.write

    def fail_on_trials(self, path, data, **options):
        if path.startswith("trials/"):
            full_disk()
        real(self, path, data, **options)

    with monkeypatch.context() as patch:
        patch.setattr(LocalPlace, "write", fail_on_trials)
        with pytest.raises(StoreError):
            writer.seal("finished")
    assert store.metrics()["step"].tolist() == [10]
    assert store.finished() == {}


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="needs file size limits")
def test_a_real_write_that_is_cut_off_leaves_the_part_before_it(store):
    run_python(
        """
        import resource, sys
        from sweeps.store import Store, StoreError
        store = Store.open(sys.argv[1])
        writer = store.begin("t", {"model.emb_dim": 1}, {}, 0, 9999, {})
        writer.add([(1, "train", "loss", 0.5)])
        assert writer.flush()
        resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, resource.RLIM_INFINITY))
        writer.add([(step, "train", f"metric_{step}", step / 7) for step in range(2, 3000)])
        assert not writer.flush(), "the limit was not met"
        try:
            writer.seal("finished")
        except StoreError as error:
            assert "File too large" in str(error), error
        else:
            raise AssertionError("sealed")
        """,
        store.path,
    )
    assert store.metrics(raw=True)["step"].tolist() == [1]
    assert store.statuses()["t"].status == "interrupted"
    assert store.damaged == []


# ---------------------------------------------------------------------------------------------------------- claims


def test_a_live_claim_keeps_others_away(store):
    writer = begin(store)
    assert Store.open(store.path).begin("t", CONFIG, {}, 0, 100, {}) is None
    assert begin(store, "t2").attempt == 1  # a trial whose name starts alike
    writer.seal("interrupted")
    assert begin(store).attempt == 2


def test_a_claim_says_who_works_and_how_far(store):
    writer = begin(store)
    writer.heartbeat({"step": 5, "num_steps": 100}, loss=2.5, steps_per_s=10.0)
    (claim,) = store.claims()
    assert (claim.trial_id, claim.attempt, claim.alive, claim.begun) == ("t", 1, True, True)
    assert (claim.pid, claim.run_id) == (os.getpid(), "run")
    assert claim.progress == {"step": 5, "num_steps": 100, "loss": 2.5, "steps_per_s": 10.0}
    state = store.statuses()["t"]
    assert (state.status, state.step, state.num_steps, state.loss) == ("running", 5, 100, 2.5)
    assert state.progress["steps_per_s"] == 10.0


def test_heartbeats_are_written_at_most_every_second(store, monkeypatch):
    writer = begin(store)
    writer.heartbeat(step=1)
    writer.heartbeat(step=2)
    assert store.claims()[0].progress == {"step": 1, "num_steps": 100}
    writer._beat_due = 0.0
    writer.heartbeat(loss=float("nan"))
    progress = store.claims()[0].progress
    assert progress["step"] == 2  # told before, written now
    assert math.isnan(progress["loss"])


def test_a_claim_is_kept_alive_while_training_says_nothing(store, monkeypatch):
    monkeypatch.undo()  # of `no_renewal`
    monkeypatch.setattr(attempts_module, "KEEP_ALIVE_EVERY_S", 0.05)
    monkeypatch.setattr(attempts_module, "_keeper_pid", None)  # a thread of this test's pace
    writer = begin(store)
    change_claim(store, "t-1.json", heartbeat=0.0)
    deadline = time.monotonic() + 30
    while store.claims()[0].heartbeat.year < 2000 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert store.claims()[0].heartbeat.year > 2000
    writer.seal("finished")


def test_a_full_disk_does_not_kill_a_claim(store, monkeypatch):
    writer = begin(store)
    change_claim(store, "t-1.json", machine="another", heartbeat=0.0)
    os.utime(store.path / "claims" / "t-1.json", (0, 0))
    assert not store.claims()[0].alive
    monkeypatch.setattr(LocalPlace, "write", full_disk_write)
    writer.heartbeat(step=3)
    assert store.claims()[0].alive


def full_disk_write(self: LocalPlace, path: str, data: bytes, **_: object) -> None:
    full_disk()


def ended_process() -> int:
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    return process.pid


def test_the_claim_of_an_ended_process_is_dead_at_once(store):
    writer = begin(store)
    writer.add([(10, "train", "loss", 2.0)])
    writer.flush()
    change_claim(store, "t-1.json", pid=ended_process())
    assert not store.claims()[0].alive
    assert store.statuses()["t"].status == "interrupted"
    assert store.trials()["status"].tolist() == ["interrupted"]
    (store.path / "metrics" / ".t-1.parquet.0123.tmp").write_bytes(b"half")
    (store.path / "checkpoints" / "t").mkdir()
    (store.path / "checkpoints" / "t" / ".5.ckpt.0123.tmp").write_bytes(b"half")
    in_files("half")(store.path / "checkpoints" / "t" / ".6.ckpt.0123.tmp")
    (store.path / "metrics" / ".t-10.parquet.0123.tmp").write_bytes(b"somebody else's")
    assert begin(store, start_step=10).attempt == 2
    assert [path.name for path in store.path.rglob(".*")] == [".t-10.parquet.0123.tmp"]
    assert store.claims() == []  # the second writer was dropped, and the dead claim is gone


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_killed_process_that_nobody_waited_for_is_dead(store):
    writer = begin(store)
    process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    change_claim(store, "t-1.json", pid=process.pid, process_start=claims_module.process_start(process.pid))
    assert store.claims()[0].alive
    process.kill()
    deadline = time.monotonic() + 30
    while store.claims()[0].alive and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not store.claims()[0].alive
    process.communicate()
    assert not writer.sealed


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_number_that_another_process_has_now_does_not_keep_a_claim_alive(store):
    writer = begin(store)
    change_claim(store, "t-1.json", process_start="1")
    assert not store.claims()[0].alive
    assert not writer.sealed


def test_elsewhere_only_silence_tells(store):
    writer = begin(store)
    path = store.path / "claims" / "t-1.json"
    now = time.time()
    for heartbeat, modified, alive in (
        (now, 0, True),
        (0, now, True),
        (now - 50, 0, True),
        (now - 70, now - 70, False),
    ):
        change_claim(store, "t-1.json", machine="another", pid=ended_process(), heartbeat=heartbeat)
        os.utime(path, (modified, modified))
        assert store.claims()[0].alive is alive
    assert begin(store).attempt == 2
    assert not writer.sealed


def test_without_process_tables_silence_tells(store, monkeypatch):
    writer = begin(store)
    monkeypatch.setattr(claims_module, "process_start", lambda pid: "unknown")
    assert store.claims()[0].alive
    change_claim(store, "t-1.json", process_start="unknown")
    with monkeypatch.context() as patch:
        patch.setattr(claims_module, "process_start", lambda pid: "gone")
        assert not store.claims()[0].alive
    old = time.time() - 70
    change_claim(store, "t-1.json", heartbeat=old)
    os.utime(store.path / "claims" / "t-1.json", (old, old))
    assert not store.claims()[0].alive
    assert not writer.sealed


@pytest.mark.parametrize("content", [b"", b'{"pid": 1', b"[]", b'{"heartbeat": "x"}', b'{"heartbeat": 1e99}', b"\xff"])
def test_a_claim_cut_short_is_dead_once_it_is_old(store, content):
    path = store.path / "claims" / "t-4.json"
    path.write_bytes(content)
    assert store.claims()[0].alive
    old = time.time() - 70
    os.utime(path, (old, old))
    assert begin(store).attempt == 5
    assert not path.exists()


def test_a_claim_that_was_swept_away_stays_away(store, monkeypatch):
    monkeypatch.setattr(LocalPlace, "heartbeat_every_s", 0.0)
    writer = begin(store)
    (store.path / "claims" / "t-1.json").unlink()
    second = begin(store)
    writer.heartbeat(step=3)
    assert [claim.attempt for claim in store.claims()] == [2]
    writer.seal("interrupted")
    second.seal("finished")
    assert store.trials()["attempt"].tolist() == [2]


def test_a_dropped_writer_gives_its_claim_back(store):
    writer = begin(store)
    deadline = time.monotonic() + 30
    del writer
    while store.claims() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert store.claims() == []
    assert store.statuses()["t"].status == "interrupted"
    assert begin(store).attempt == 2


def test_a_short_attempt_writes_one_part_per_table(store, monkeypatch):
    written = []
    real = LocalPlace.write
    monkeypatch.setattr(
        LocalPlace, "write", lambda self, path, *a, **o: (written.append(path), real(self, path, *a, **o))
    )
    writer = store.begin("t", CONFIG, {}, 0, 100, {})
    assert store.statuses()["t"].status == "running"
    writer.add([(100, "train", "loss", 1.0)])
    writer.seal("finished")
    assert written == ["claims/t-1.json", "metrics/t-1.parquet", "trials/t-1.parquet"]
    assert store.claims() == []


def test_an_attempt_without_a_row_that_is_gone_was_never_begun(store):
    """Its number is free again, and rows of the attempts before it count as if it had not been."""
    attempt(store, "t", None, [10, 20])
    writer = store.begin("t", CONFIG, {}, 10, 100, {})
    assert writer.attempt == 2
    writer._release()
    del writer
    assert store.trials(raw=True)["attempt"].tolist() == [1]
    assert store.metrics()["step"].tolist() == [10, 20]
    assert begin(store).attempt == 2


def test_a_dead_claim_goes_once_a_later_attempt_has_its_row(store):
    first = store.begin("t", CONFIG, {}, 0, 100, {})
    change_claim(store, "t-1.json", pid=1, process_start="0")
    second = store.begin("t", CONFIG, {}, 0, 100, {})
    assert second.attempt == 2
    assert sorted(claim.attempt for claim in store.claims()) == [1, 2]
    assert second.flush()
    assert [claim.attempt for claim in store.claims()] == [2]
    assert not first.sealed


def test_an_attempt_has_its_row_before_its_metrics_where_it_goes_on(store, monkeypatch):
    """Else one that is killed in between would leave metrics that count for nothing."""
    written = []
    real = LocalPlace.write
    monkeypatch.setattr(
        LocalPlace, "write", lambda self, path, *a, **o: (written.append(path), real(self, path, *a, **o))
    )
    writer = store.begin("t", CONFIG, {}, 0, 100, {})
    writer.add([(10, "train", "loss", 1.0)])
    assert writer.flush()
    assert written[1:] == ["trials/t-1.parquet", "metrics/t-1.parquet", "trials/t-1.parquet"]


def test_an_attempt_that_compiles_for_long_has_its_row_all_the_same(store, monkeypatch):
    monkeypatch.setattr(LocalPlace, "flush_every_s", 0.0)
    writer = store.begin("t", CONFIG, {}, 0, 100, {})
    keep_alive(writer)
    assert store.trials()["status"].tolist() == ["running"]


def test_a_stale_number_is_noticed(store, monkeypatch):
    """A rival that looked before an attempt began and claims after it ended must not begin the same attempt again."""
    looks = []
    real = Reader.numbers

    def look_then_lose_time(self, trial_ids):
        parts = real(self, trial_ids)
        looks.append(parts)
        if len(looks) == 1:
            with monkeypatch.context() as patch:
                patch.setattr(Reader, "numbers", real)
                attempt(Store.open(store.path), "t", "failed", [1])
        return parts

    monkeypatch.setattr(Reader, "numbers", look_then_lose_time)
    assert begin(store).attempt == 2
    assert looks[0] == {"t": []}


def test_a_claim_that_a_listing_missed_is_noticed(store, monkeypatch):
    """A file server may show a folder as it was a moment ago."""
    writer = begin(store)
    real = Store.claims_of
    looks = []

    def miss_once(self, trial_ids, **besides):
        looks.append(trial_ids)
        return {"t": []} if len(looks) == 1 else real(self, trial_ids, **besides)

    monkeypatch.setattr(Store, "claims_of", miss_once)
    assert store.begin("t", CONFIG, {}, 0, 100, {}) is None
    assert [claim.attempt for claim in store.claims()] == [1]
    assert not writer.sealed


def beginnings(*trial_ids: str) -> list[Beginning]:
    return [Beginning(trial_id, CONFIG, 0, 100, {"num_params": 7}) for trial_id in trial_ids]


def test_trials_begin_together_but_for_those_that_others_have(store):
    other = begin(store, "b")
    attempt(store, "c", "failed", [5])
    begun = store.begin_all(beginnings("a", "b", "c"), {"run_id": "run"})
    assert {id_: writer and writer.attempt for id_, writer in begun.items()} == {"a": 1, "b": None, "c": 2}
    assert {id_: state.status for id_, state in store.statuses().items()} == dict.fromkeys("abc", "running")
    assert all(writer.flush() for writer in begun.values() if writer)
    assert store.trials(raw=True)[["trial_id", "attempt"]].to_numpy().tolist() == [
        ["a", 1],
        ["b", 1],
        ["c", 1],
        ["c", 2],
    ]
    assert not other.sealed


def test_the_folders_are_looked_through_twice_however_many_trials_begin(store, monkeypatch):
    looks = []
    real = LocalPlace.names
    monkeypatch.setattr(LocalPlace, "names", lambda self, *args: looks.append(args) or real(self, *args))
    store.begin_all(beginnings(*"abcdefgh"), {"run_id": "run"})
    assert sorted(looks) == sorted(2 * [("claims",), ("metrics",), ("trials",)])


def test_no_claim_is_left_where_one_of_several_trials_cannot_begin(store, monkeypatch):
    real = LocalPlace.write

    def full_for_b(self, path, data, **options):
        if path == "claims/b-1.json":
            full_disk()
        real(self, path, data, **options)

    monkeypatch.setattr(LocalPlace, "write", full_for_b)
    with pytest.raises(StoreError, match="trial a and 2 more can't be begun: No space left on device"):
        store.begin_all(beginnings("a", "b", "c"), {"run_id": "run"})
    assert store.claims() == []


def test_statuses_of_some_trials_look_at_no_other_part(store, monkeypatch):
    for trial_id in ("a", "b", "c"):
        attempt(store, trial_id, "finished", [1])
    writer = begin(store, "d")
    read = []
    real = LocalPlace.read
    monkeypatch.setattr(LocalPlace, "read", lambda self, path: read.append(path) or real(self, path))
    fresh = Store.open(store.path)
    assert {id_: state.status for id_, state in fresh.statuses({"b", "d", "e"}).items()} == {
        "b": "finished", "d": "running",
    }  # fmt: skip
    assert set(read) == {"trials/b-1.parquet", "trials/d-1.parquet", "claims/d-1.json"}
    assert len(fresh.statuses()) == 4
    writer.seal("finished")


def test_attempts_that_end_together_are_made_to_last_before_they_are_seen(store, monkeypatch):
    """Every file is on the disk before it has its name, and all metrics have theirs before any row does."""
    writers = list(store.begin_all(beginnings(*"abc"), {"run_id": "run"}).values())
    for writer in writers:
        writer.add([(100, "train", "loss", 1.0)])
    happened = []
    fsync, replace = os.fsync, Path.replace

    def note_sync(descriptor):
        name = Path(f"/proc/self/fd/{descriptor}").readlink()
        happened.append(("last", name.name.split(".")[1] if name.is_file() else "", name.parent.name))
        fsync(descriptor)

    def note_name(self, target):
        happened.append(("name", target.name.split(".")[0], target.parent.name))
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "replace", note_name)
    seal_all([Ending(writer, "finished", None, {"train_s": 1.0}) for writer in writers])
    files = ["a-1", "b-1", "c-1"]
    for table, events in (("metrics", happened[:7]), ("trials", happened[7:])):
        assert sorted(events[:3]) == [("last", name, table) for name in files]
        assert events[3:6] == [("name", name, table) for name in files]
        assert events[6] == ("last", "", store.path.name)  # the folder itself
    assert all(writer.sealed for writer in writers)
    assert store.claims() == []
    assert store.finished() == dict.fromkeys("abc", "finished")
    assert store.metrics()["value"].tolist() == [1.0] * 3
    assert store.trials()["num_metric_rows"].tolist() == [1] * 3


def test_attempts_that_cannot_end_together_end_one_by_one(store, monkeypatch):
    writers = store.begin_all(beginnings(*"abc"), {"run_id": "run"})
    real = LocalPlace.write

    def full_for_b(self, path, data, **options):
        if path == "trials/b-1.parquet":
            full_disk()
        real(self, path, data, **options)

    with monkeypatch.context() as patch:
        patch.setattr(LocalPlace, "write_all", full_disk)
        patch.setattr(LocalPlace, "write", full_for_b)
        with pytest.raises(StoreError, match="the results of trial b can't be written: No space"):
            seal_all([Ending(writer, "finished", None, {}) for writer in writers.values()])
    assert {id_: writer.sealed for id_, writer in writers.items()} == {"a": True, "b": False, "c": False}
    seal_all([Ending(writers[id_], "finished", None, {}) for id_ in ("b", "c")])
    assert store.finished() == dict.fromkeys("abc", "finished")


def test_files_of_which_one_cannot_be_written_leave_nothing_half_written(store, monkeypatch):
    real = os.fsync
    done = []

    def full_once(descriptor):
        done.append(descriptor)
        if len(done) == 2:
            full_disk()
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full_once)
    with pytest.raises(OSError, match="No space"):
        store.place.write_all({f"metrics/{name}.parquet": b"x" for name in "abcd"})
    assert list((store.path / "metrics").iterdir()) == []


RIVALS = """
    import json, os, sys, time
    from pathlib import Path
    from sweeps.store import Store

    store, num_processes, num_trials, ends = Store.open(sys.argv[1]), 8, 40, sys.argv[2] == "ends"
    out = Path(sys.argv[3])
    for number in range(num_processes):
        if os.fork():
            continue
        (out / f"ready-{number}").touch()
        while len(list(out.glob("ready-*"))) < num_processes:
            time.sleep(0.02)
        begun = []
        for trial in range(num_trials):
            writer = store.begin(f"t{trial}", {"model.emb_dim": 1}, {}, 0, 1, {})
            if writer is not None:
                begun.append((writer, [writer.trial_id, writer.attempt]))
                if ends:
                    writer.seal("failed")
        assert ends or all(writer.flush() for writer, _ in begun)
        (out / f"done-{number}").write_text(json.dumps([key for _, key in begun]))
        while len(list(out.glob("done-*"))) < num_processes:
            time.sleep(0.02)
        os._exit(0)
    for _ in range(num_processes):
        assert os.wait()[1] == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("case", ["lives", "lives after a crash", "ends"])
def test_of_racing_processes_exactly_one_begins_each_trial(store, tmp_path, case):
    first = 1
    if case == "lives after a crash":  # between the claim and the first part
        writer = begin(store, "template")
        template = store.path / "claims" / "template-1.json"
        for trial in range(40):
            shutil.copy(template, store.path / "claims" / f"t{trial}-1.json")
            change_claim(store, f"t{trial}-1.json", pid=1, process_start="0")
        writer.seal("failed")
        (store.path / "trials" / "template-1.parquet").unlink()
        first = 2
    run_python(RIVALS, store.path, case, tmp_path)
    begun = [tuple(key) for path in tmp_path.glob("done-*") for key in json.loads(path.read_text())]
    assert len(begun) == len(set(begun))
    assert {trial_id for trial_id, _ in begun} == {f"t{trial}" for trial in range(40)}
    if case != "ends":
        assert len(begun) == 40
        assert {number for _, number in begun} == {first}
    assert set(begun) == set(store.trials(raw=True)[["trial_id", "attempt"]].itertuples(index=False, name=None))
    assert store.damaged == []


# -------------------------------------------------------------------------------------------------------- broken parts


@pytest.fixture(scope="module")
def two_trials(tmp_path_factory) -> Path:
    store = Store.create(tmp_path_factory.mktemp("two") / "results")
    for trial_id in ("a", "b"):
        writer = begin(store, trial_id)
        writer.add([(step, "train", "loss", step / 3) for step in range(1, 20)])
        writer.seal("finished")
        store.record_sweep("s", [Requested(trial_id, "p", {"seed": 0})], file="s.yaml", tiny=False, request_id=trial_id)
    return store.path


@pytest.mark.parametrize("table", ["trials", "metrics", "sweeps"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_part_cut_at_any_byte_is_named_and_the_rest_is_read(two_trials, tmp_path, table, data):
    path = tmp_path / "results"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(two_trials, path)
    part = path / table / ("a.parquet" if table == "sweeps" else "a-1.parquet")
    whole = part.read_bytes()
    part.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    store = Store.open(path)
    read = {
        "trials": store.trials,
        "metrics": lambda: store.metrics(raw=True),
        "sweeps": lambda: store.sweeps(raw=True),
    }
    assert set(read[table]()["trial_id"]) == {"b"}
    assert [damaged for damaged, _ in store.damaged] == [str(part)]
    assert all(reason and "\n" not in reason for _, reason in store.damaged)
    if table == "trials":
        assert store.finished() == {"b": "finished"}
        assert store.statuses().keys() == {"b"}
        assert set(store.metrics()["trial_id"]) == {"b"}
        assert begin(store, "a").attempt == 2  # so it is trained again


@pytest.mark.parametrize("table", ["trials", "metrics"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_changed_byte_brings_a_reader_down(two_trials, tmp_path, table, data):
    path = tmp_path / "results"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(two_trials, path)
    part = path / table / "a-1.parquet"
    changed = bytearray(part.read_bytes())
    changed[data.draw(st.integers(0, len(changed) - 1))] ^= data.draw(st.integers(1, 255))
    part.write_bytes(changed)
    store = Store.open(path)
    message = ""
    try:
        frame = store.trials() if table == "trials" else store.metrics(raw=True)
    except StoreError as error:  # a version that looks newer, or a column that looks like another kind
        message = str(error)
    assert "a-1.parquet" in message or "b" in set(frame["trial_id"])


def test_changed_values_are_noticed(two_trials, tmp_path):
    path = tmp_path / "results"
    shutil.copytree(two_trials, path)
    part = path / "trials" / "a-1.parquet"
    part.write_bytes(part.read_bytes().replace(b"hyla", b"hylo", 1))
    store = Store.open(path)
    assert store.trials()["trial_id"].tolist() == ["b"]
    assert "its checksum does not match" in store.damaged[0][1]


def test_changed_columns_are_noticed(two_trials, tmp_path):
    path = tmp_path / "results"
    shutil.copytree(two_trials, path)
    part = path / "trials" / "a-1.parquet"
    part.write_bytes(part.read_bytes().replace(b"model.causal", b"model.casual"))
    store = Store.open(path)
    assert store.trials()["trial_id"].tolist() == ["b"]
    assert store.damaged == [(str(part), "it was changed or cut short: its checksum does not match")]


def test_what_is_no_part_is_passed_over(store):
    attempt(store, "a", "finished", [1])
    attempt(store, "b", "finished", [1])
    trials = store.path / "trials"
    shutil.copy(trials / "a-1.parquet", trials / "a-2.parquet")  # a copy never counts as an attempt of its own
    shutil.copy(trials / "a-1.parquet", trials / "a-1 (copy).parquet")
    shutil.copy(store.path / "metrics" / "b-1.parquet", trials / "c-1.parquet")
    pq.write_table(pa.table({"trial_id": ["d"]}), trials / "d-1.parquet")
    (trials / "e-1.parquet").touch()
    (trials / "f-1.parquet").mkdir()
    (trials / "g-1.parquet").write_text("trial_id,attempt\ng,1\n")
    (trials / ".h-1.parquet.1234.tmp").write_bytes(b"half")
    (trials / "._a-1.parquet").write_bytes(b"what a file manager leaves")
    (trials / "notes.txt").write_text("mine")
    assert store.trials()["trial_id"].tolist() == ["a", "b"]
    reasons = {Path(path).name: reason for path, reason in store.damaged}
    assert reasons.keys() == {f"{name}.parquet" for name in ("a-2", "a-1 (copy)", "c-1", "d-1", "e-1", "f-1", "g-1")}
    assert reasons["a-2.parquet"] == "belongs to attempt a-1"
    assert reasons["c-1.parquet"] == reasons["d-1.parquet"] == "not a part of the trials table"
    assert reasons["e-1.parquet"] == "empty file"
    assert store.finished() == {"a": "finished", "b": "finished"}
    assert len(store.damaged) == 7


def test_a_part_that_was_mended_is_read_again(store):
    attempt(store, "a", "finished", [1])
    part = store.path / "trials" / "a-1.parquet"
    whole = part.read_bytes()
    part.write_bytes(whole[:100])
    assert store.finished() == {}
    assert len(store.damaged) == 1
    part.write_bytes(whole)
    assert store.finished() == {"a": "finished"}
    assert store.damaged == []


def test_a_newer_schema_is_refused_by_name(store, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(parts_module, "SCHEMA_VERSION", SCHEMA_VERSION + 1)
        attempt(store, "new", "finished", [1])
    for read in (store.trials, store.finished, store.metrics):
        with pytest.raises(StoreError, match=rf"new-1\.parquet: schema version {SCHEMA_VERSION + 1} is newer"):
            read()


def test_unchanged_parts_are_not_read_again(store, monkeypatch):
    for trial_id in "abc":
        attempt(store, trial_id, "interrupted", [1])
    assert store.finished() == {}
    opened = []
    real = store.place.read

    def noting(path):
        if path.startswith("trials/"):
            opened.append(Path(path).name)
        return real(path)

    monkeypatch.setattr(store.place, "read", noting)
    attempt(store, "b", "finished", [1])
    assert store.finished() == {"b": "finished"}
    assert opened == ["b-2.parquet"]
    assert len(store.statuses()) == 3
    assert opened == ["b-2.parquet"]


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs signals")
def test_a_process_killed_at_any_moment_leaves_whole_parts(store):
    code = """
        import sys
        from sweeps.store import Store
        writer = Store.open(sys.argv[1]).begin(sys.argv[2], {"model.emb_dim": 1}, {}, 0, 10**6, {})
        print("begun", flush=True)
        for step in range(1, 10**6):
            writer.add([(step, "train", "loss", float(step))])
            writer.flush()
            writer.heartbeat(step=step)
    """
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), str(store.path), trial_id],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for trial_id in ("a", "b")
    ]
    for process in processes:
        assert process.stdout.readline() == "begun\n"
    for number in range(20):  # a reader beside the writers
        for trial_id, rows in store.metrics().groupby("trial_id"):
            assert rows["step"].tolist() == list(range(1, len(rows) + 1)), trial_id
        assert store.damaged == []
        if number == 10:
            assert {state.status for state in store.statuses().values()} == {"running"}
    for process in processes:
        process.kill()
        process.communicate()
    assert set(store.trials()["status"]) == {"interrupted"}
    assert len(store.metrics()) > 0
    assert store.damaged == []
    assert {begin(store, trial_id).attempt for trial_id in ("a", "b")} == {2}
    assert [path.name for path in store.path.rglob(".*") if "claims" not in path.parts] == []


# ------------------------------------------------------------------------------------------------------------- sweeps


def test_a_request_is_recorded_with_axis_values_as_written(store):
    axes = {"model.width": 2, "data.train_fraction": 0.25, "model.attention": "hyla", "model.causal": True, "x": None}
    request_id = store.record_sweep(
        "s",
        [Requested("a", "p", axes), Requested("b", "p", axes)],
        file=Path("sweeps/s.yaml"),
        tiny=True,
        select_over=["x"],
        overrides=["model.width=2"],
    )
    frame = store.sweeps()
    assert frame["trial_id"].tolist() == ["a", "b"]
    row = frame.iloc[0]
    assert json.loads(row["axes"]) == axes
    assert list(json.loads(row["axes"])) == list(axes)
    assert (row["sweep"], row["request_id"], row["file"], row["point"]) == ("s", request_id, "sweeps/s.yaml", "p")
    assert bool(row["tiny"])
    assert list(row["select_over"]) == ["x"]
    assert list(row["overrides"]) == ["model.width=2"]


def test_a_sweep_is_what_its_latest_request_asked_for(store):
    store.record_sweep("s", [Requested("a", "p", {}), Requested("gone", "p", {})], file="s.yaml", tiny=False)
    store.record_sweep("other", [Requested("a", "p", {})], file="o.yaml", tiny=False)
    store.record_sweep("s", [Requested("tiny", "p", {})], file="s.yaml", tiny=True)
    names = ["a", "b", "c", "d", "e", "f"]
    latest = store.record_sweep("s", [Requested(name, "p", {}) for name in names], file="s.yaml", tiny=False)
    attempt(store, "a", "finished", [1])
    attempt(store, "b", "diverged", [1])
    attempt(store, "c", "failed", [1])
    attempt(store, "d", None, [1])
    running = begin(store, "e")
    assert len(store.sweeps(raw=True)) == 10
    assert len(store.sweeps()) == 8
    summaries = store.summary()
    assert [(item.sweep, item.tiny) for item in summaries] == [("s", False), ("s", True), ("other", False)]
    expected = {"finished": 1, "diverged": 1, "failed": 1, "interrupted": 1, "running": 1, "pending": 1}
    assert summaries[0].counts == expected
    assert summaries[0].request_id == latest
    assert summaries[0].trial_ids == tuple(names)
    assert summaries[1].counts == {"pending": 1}
    assert summaries[2].counts == {"finished": 1}
    assert not running.sealed


def test_a_trial_is_running_while_its_latest_attempt_lives(store):
    attempt(store, "t", "failed", [10])
    writer = begin(store, start_step=10)
    writer.heartbeat(step=12, loss=1.0)
    state = store.statuses()["t"]
    assert (state.status, state.attempt, state.step, state.error) == ("running", 2, 12, None)
    writer.seal("failed", "again")
    state = store.statuses()["t"]
    assert (state.status, state.attempt, state.step, state.loss, state.error) == ("failed", 2, 12, None, "again")


def test_a_result_that_is_tried_again_stays_a_result(store):
    attempt(store, "t", "diverged", [10])
    writer = begin(store)
    assert store.statuses()["t"].status == "diverged"
    assert store.trials()["attempt"].tolist() == [1]
    writer.seal("finished")
    assert store.statuses()["t"].status == "finished"


# ---------------------------------------------------------------------------------------------------- checkpoints, stop


def test_the_last_two_checkpoints_are_kept(store):
    for step in (5, 10, 100):
        store.save_checkpoint("t", step, f"state {step}".encode())
    assert list(store.load_checkpoints("t")) == [(100, b"state 100"), (10, b"state 10")]
    assert list(store.load_checkpoints("other")) == []
    store.clear_checkpoints("t")
    assert list(store.load_checkpoints("t")) == []
    store.clear_checkpoints("t")


def test_checkpoints_of_later_steps_go_when_an_earlier_one_was_taken_up(store):
    for step in (50, 80):
        store.save_checkpoint("t", step, b"damaged")
    store.save_checkpoint("t", 60, b"resumed from 50")
    assert [step for step, _ in store.load_checkpoints("t")] == [60, 50]


def test_a_checkpoint_is_replaced_whole(store, monkeypatch):
    store.save_checkpoint("t", 5, b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        with pytest.raises(StoreError):
            store.save_checkpoint("t", 5, b"new")
    (store.path / "checkpoints" / "t" / ".10.ckpt.0123.tmp").write_bytes(b"half")
    assert list(store.load_checkpoints("t")) == [(5, b"old")]


def in_files(content: str):
    """What writes a state of several files."""

    def write(folder: Path) -> None:
        folder.mkdir()
        (folder / "part").write_text(content)

    return write


def test_a_checkpoint_in_a_folder_is_kept_replaced_and_removed_like_a_file(store):
    for step in (5, 10):
        store.save_checkpoint("t", step, in_files(f"state {step}"))
    store.save_checkpoint("t", 20, b"a file")
    store.save_checkpoint("t", 20, in_files("state 20"))
    found = list(store.load_checkpoints("t"))
    assert [step for step, _ in found] == [20, 10]
    assert [(path / "part").read_text() for _, path in found] == ["state 20", "state 10"]
    store.save_checkpoint("t", 20, in_files("again"))
    assert (found[0][1] / "part").read_text() == "again"
    store.save_checkpoint("t", 20, b"a file again")
    assert next(store.load_checkpoints("t")) == (20, b"a file again")

    def fail(folder: Path) -> None:
        in_files("half")(folder)
        raise OSError(28, "No space left on device")

    with pytest.raises(StoreError, match="checkpoint at step 30 can't be written: No space left"):
        store.save_checkpoint("t", 30, fail)
    assert [path.name for path in sorted((store.path / "checkpoints" / "t").iterdir())] == ["10.ckpt", "20.ckpt"]
    store.clear_checkpoints("t")
    assert not list(store.load_checkpoints("t"))


def test_a_run_can_be_asked_to_stop(store):
    assert not store.stop_requested("run-1")
    store.request_stop("run-1")
    assert Store.open(store.path).stop_requested("run-1")
    assert not store.stop_requested("run-10")
    assert store.claims() == []
    store.clear_stop("run-1")
    assert not store.stop_requested("run-1")


# -------------------------------------------------------------------------------------------------- where the store is


def test_a_store_that_is_not_there_is_named(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for name, reason in (("missing", "no such folder"), ("file", "not a folder"), ("empty", "not a results store")):
        with pytest.raises(StoreError, match=rf"^{re.escape(str(tmp_path / name))}: {reason}"):
            Store.open(tmp_path / name)
    with pytest.raises(StoreError, match=r"file: the results store can't be made here: Not a directory"):
        Store.create(tmp_path / "file")


def test_a_folder_that_cannot_be_read_is_named(store, monkeypatch):
    def refuse(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refuse)
        with pytest.raises(StoreError, match=r"/(claims|trials): can't be read: Permission denied"):
            store.trials()
    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.raises(StoreError, match=r"results: can't be read: Permission denied"):
        Store.open(store.path)


def test_a_home_folder_is_understood(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Store.create("~/results").path == tmp_path / "results"


def test_a_store_is_made_where_it_is_missing_and_can_be_written(tmp_path):
    store = Store.create(tmp_path / "deep" / "results")
    store.check_writable()
    assert [path for path in store.path.rglob("*") if path.is_file()] == []
    Store.create(tmp_path / "deep" / "results")


def test_too_little_room_is_named_before_anything_starts(store, monkeypatch):
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=5))
    with pytest.raises(StoreError, match="only 5 bytes are free"):
        store.check_writable()


@pytest.mark.skipif(os.name != "posix", reason="needs permissions")
def test_a_folder_that_may_not_be_written_is_named():
    code = """
        import os, sys
        from sweeps.store import Store, StoreError
        store = Store.open(sys.argv[1])
        warm = Store.create(sys.argv[2])  # loads whatever is loaded late, while that may still be read
        warm.check_writable()
        warm.begin("t", {}, {}, 0, 1, {}).seal("failed")
        if os.geteuid() == 0:
            os.setgid(65534)
            os.setuid(65534)  # root may write anywhere
        def said(do):
            try:
                return do()
            except StoreError as error:
                return error
        print(said(store.check_writable))
        writer = store.begin("t", {}, {}, 0, 1, {})
        writer.add([(1, "train", "loss", 0.5)])
        print(writer.flush())
        print(said(lambda: writer.seal("finished")))
    """
    with tempfile.TemporaryDirectory() as folder:  # not in tmp_path, which its owner alone may enter
        Path(folder).chmod(0o755)
        store = Store.create(Path(folder) / "results")
        for path in (store.path, *store.path.iterdir()):
            path.chmod(0o777)
        (store.path / "metrics").chmod(0o555)
        assert run_python(code, store.path, Path(folder) / "warm").stdout.splitlines() == [
            f"{store.path}/metrics: the results store can't be written: Permission denied",
            "False",
            f"{store.path}: the results of trial t can't be written: Permission denied",
        ]
        assert store.statuses()["t"].status == "interrupted"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that nobody can write")
def test_a_place_that_cannot_hold_a_store_is_named():
    with pytest.raises(StoreError, match=r"^/proc/results: the results store can't be made here: "):
        Store.create("/proc/results")


def test_reading_needs_no_jax_ray_or_pydantic():
    code = "import sys, sweeps.store; print(sorted({name.partition('.')[0] for name in sys.modules}))"
    modules = set(re.findall(r"'(\w+)'", run_python(code).stdout))
    assert "pyarrow" in modules
    assert not modules & {"jax", "jaxlib", "flax", "ray", "pydantic", "yaml", "hyla_core"}


# --------------------------------------------------------------------------------------------------------- comparison


@pytest.fixture
def pair(tmp_path) -> tuple[Store, Store]:
    stores = tuple(Store.create(tmp_path / name) for name in ("left", "right"))
    for store in stores:
        writer = begin(store)
        writer.add([(1, "train", "loss", 1.0), (2, "train", "loss", math.nan), (2, "ood", "loss", 0.1)])
        writer.seal("finished")
    return stores


def test_equal_tables_have_no_differences(pair):
    assert equal_tables(*pair) == []


def test_attempts_do_not_matter_to_equality(pair):
    left, right = pair
    for store, parts in ((left, [[1, 2, 3, 4]]), (right, [[1, 2, 3], [3, 4]])):
        for number, steps in enumerate(parts):
            last = number == len(parts) - 1
            attempt(store, "u", "finished" if last else "interrupted", steps, start_step=2 * number)
    assert equal_tables(left, right) == []


def test_trials_without_a_row_can_be_compared(tmp_path):
    first, second = (Store.create(tmp_path / name) for name in "ab")
    for store in (first, second):
        attempt(store, "a", "diverged", [])
    assert equal_tables(first, second) == []
    attempt(second, "a", "finished", [1])
    assert len(equal_tables(first, second)) == 3  # the status, the step and the row


def test_missing_trials_are_named(pair):
    left, right = pair
    attempt(left, "l", "finished", [1])
    attempt(right, "r", "finished", [1])
    assert equal_tables(left, right) == [f"trial l is only in {left.path}", f"trial r is only in {right.path}"]
    assert equal_tables(left, right, trial_ids=["t"]) == []


def test_configs_statuses_and_steps_are_compared(pair):
    left, right = pair
    begin(left, "u", config={"model.emb_dim": 1}).seal("finished", step=3)
    begin(right, "u", config={"model.emb_dim": 2}).seal("failed", step=4)
    assert equal_tables(left, right) == [
        "trial u: status is 'finished' against 'failed'",
        "trial u: step is 3 against 4",
        "trial u: model.emb_dim is 1 against 2",
    ]


def test_config_fields_younger_than_a_row_are_no_difference(pair):
    left, right = pair
    begin(left, "u", config={"model.emb_dim": 1}).seal("finished", step=3)
    begin(right, "u", config={"model.emb_dim": 1, "model.new": True}).seal("finished", step=3)
    assert equal_tables(left, right) == []
    assert equal_tables(right, left) == []
    begin(left, "v", config={"model.new": False}).seal("finished", step=3)
    assert equal_tables(left, right, trial_ids=["u"]) == []  # the column is there now, and empty


def test_rows_that_one_store_lacks_are_named(pair):
    left, right = pair
    attempt(left, "u", "finished", [1, 2, 3])
    attempt(right, "u", "finished", [1, 4])
    lines = equal_tables(left, right)
    assert f"trial u: 2 metric rows are only in {left.path}, the first at step 2, train loss" in lines
    assert f"trial u: 1 metric rows are only in {right.path}, the first at step 4, train loss" in lines
    assert equal_tables(left, right, max_step=1) == ["trial u: step is 3 against 4"]


def test_values_agree_to_the_last_bit_or_within_the_tolerance(pair):
    left, right = pair
    close = 1.0 + 2**-52
    attempt(left, "u", "finished", [1, 2], value=1.0)
    attempt(right, "u", "finished", [1, 2], value=close)
    (line,) = equal_tables(left, right)
    assert line == f"trial u: 2 of 2 values differ, the first at step 1, train loss: 1.0 against {close!r}"
    assert equal_tables(left, right, rtol=1e-15) == []
    assert equal_tables(left, right, atol=1e-15) == []
    assert equal_tables(left, right, rtol=1e-17) != []


@pytest.mark.parametrize(
    ("a", "b", "bits", "close"),
    [
        (math.nan, math.nan, True, True),
        (0.0, -0.0, False, True),
        (math.inf, math.inf, True, True),
        (math.inf, -math.inf, False, False),
        (math.inf, 1.0, False, False),
        (math.nan, 1.0, False, False),
        (1.0, 1.05, False, True),
        (1.0, 1.2, False, False),
    ],
)
def test_agreement_of_single_values(a, b, bits, close):
    assert _agree(a, b) is bits
    assert _agree(a, b, rtol=0.1) is close
