"""One pack in one process: claims, checkpoints, what is written when something goes wrong."""

import errno
import os
import pickle
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import numpy as np
import pytest
from fake_training import FakeTrain, checkpoint, write_sweep

from hyla_core import model
from hyla_core import train as hyla_train
from hyla_core.checkpoint import DamagedCheckpoint
from hyla_core.config import Cadence, TrainConfig
from hyla_core.tasks import make_task
from hyla_core.tasks.base import seed_rng
from hyla_core.train import restore_params
from sweeps import provenance
from sweeps.cluster import trainable
from sweeps.cluster.trainable import PackJob, compilation_cache, describe, prepare_jax, run_pack
from sweeps.expand import expand
from sweeps.packs import Pack, make_packs, shape_key
from sweeps.spec import Resources, load_sweep
from sweeps.store import AttemptWriter, Store, StoreError, equal_tables
from sweeps.store.places import LocalPlace


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", os.environ.get("JAX_COMPILATION_CACHE_DIR", ""))


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> FakeTrain:
    fake = FakeTrain()
    monkeypatch.setattr("hyla_core.train.train", fake)
    return fake


@pytest.fixture
def pack(tmp_path: Path) -> Pack:
    """Two trials that differ in their seed."""
    return make_packs(expand(load_sweep(write_sweep(tmp_path))), 2)[0]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


@pytest.fixture
def job(tmp_path: Path, store: Store, pack: Pack) -> PackJob:
    spec = load_sweep(tmp_path / "toy.yaml")
    return PackJob(str(store.path), "run-1", spec.run, False, spec.run.resources, provenance.of_request())


def ids(pack: Pack) -> list[str]:
    return [trial.trial_id for trial in pack.trials]


def test_a_pack_is_trained_once(train, pack, job, store):
    first, second = ids(pack)
    assert run_pack(pack, job).statuses == {first: "finished", second: "finished"}
    assert run_pack(pack, job).statuses == {first: "finished", second: "finished"}
    assert train.calls == [{first: 0, second: 0}]


def test_a_trial_claimed_by_another_process_is_left_to_it(train, pack, job, store):
    first, second = ids(pack)
    other = store.begin(first, pack.trials[0].config.flat(), {}, 0, 20, {})
    assert run_pack(pack, job).statuses == {first: "left", second: "finished"}
    assert train.calls == [{second: 0}]
    assert store.trials(raw=True).query("trial_id == @second")["pack_size"].tolist() == [1]
    assert other is not None


def test_the_newest_whole_checkpoint_is_restored(train, pack, job, store):
    first, second = ids(pack)
    store.save_checkpoint(first, 5, checkpoint(5))
    store.save_checkpoint(first, 10, checkpoint(10)[:-3])
    run_pack(pack, job)
    assert train.calls == [{first: 5, second: 0}]
    rows = store.trials(raw=True).set_index("trial_id")
    assert rows["start_step"].to_dict() == {first: 5, second: 0}


def test_the_row_of_a_killed_attempt_says_where_it_goes_on(train, pack, job, store, monkeypatch):
    """Else the rows before its checkpoint would no longer count."""
    monkeypatch.setattr(LocalPlace, "flush_every_s", 0.0)
    first, _ = ids(pack)
    store.save_checkpoint(first, 10, checkpoint(10))
    seen: list[int] = []

    def at_step(configs, step):
        rows = Store.open(store.path).trials(raw=True).set_index("trial_id")["start_step"]
        seen.append(rows.get(first))

    train.at_step = at_step
    assert set(run_pack(pack, job).statuses.values()) == {"finished"}
    assert set(seen) == {None, 10}  # no row at first


def test_rows_are_on_disk_before_the_checkpoint_that_relies_on_them(train, pack, job, store, monkeypatch):
    known: list[tuple[int, list[int]]] = []
    save = Store.save_checkpoint

    def spying(self, trial_id, step, data):
        known.append((step, Store.open(store.path).metrics(raw=True, trial_ids=[trial_id])["step"].tolist()))
        save(self, trial_id, step, data)

    monkeypatch.setattr(Store, "save_checkpoint", spying)
    run_pack(pack, job)
    assert [steps[-1] for _, steps in known] == [step for step, _ in known] == [5, 5, 10, 10, 15, 15]


def test_a_stop_in_the_store_is_obeyed(train, pack, job, store, monkeypatch):
    monkeypatch.setattr(trainable, "STOP_POLL_S", 0.0)
    train.at_step = lambda configs, step: store.request_stop("run-1") if step == 10 else None
    outcome = run_pack(pack, job)
    assert set(outcome.statuses.values()) == {"interrupted"}
    assert outcome.error is None
    assert [step for step, _ in store.load_checkpoints(ids(pack)[0])] == [10, 5]
    # A pack that comes after the stop does nothing at all.
    train.calls.clear()
    assert set(run_pack(pack, job).statuses.values()) == {"left"}
    assert train.calls == []
    assert len(store.trials(raw=True)) == 2


def test_an_error_fails_every_member_and_gives_their_claims_back(train, pack, job, store):
    def at_step(configs, step):
        raise ValueError("some\nlines")

    train.at_step = at_step
    outcome = run_pack(pack, job)
    assert outcome.error == "ValueError: some"
    assert set(outcome.statuses.values()) == {"failed"}
    assert store.claims() == []
    detail = store.trials()["error_detail"].iloc[0]
    assert 'File "sweeps/cluster/trainable.py"' in detail
    assert "ValueError: some\nlines" in detail


def test_claims_are_given_back_even_where_nothing_can_be_written(train, pack, job, store, monkeypatch):
    kept = ValueError("whose traceback somebody keeps, and all that it refers to")

    def at_step(configs, step):
        raise kept

    def refuse(self, status, error=None, **facts):
        raise StoreError("no room")

    train.at_step = at_step
    monkeypatch.setattr(AttemptWriter, "seal", refuse)
    assert run_pack(pack, job).error.startswith("ValueError: whose traceback")
    assert [claim for claim in store.claims() if claim.alive] == []
    assert store.statuses() == {}  # as if never begun: the next run tries again


def test_a_full_disk_is_no_result_of_a_trial(train, pack, job, store):
    def at_step(configs, step):
        raise StoreError("no room") from OSError(errno.ENOSPC, "No space left on device")

    train.at_step = at_step
    outcome = run_pack(pack, job)
    assert outcome.error == "the disk is full: StoreError: no room"
    assert set(outcome.statuses.values()) == {"interrupted"}


def test_training_goes_on_where_a_checkpoint_cannot_be_saved(train, pack, job, store, monkeypatch):
    def refuse(self, trial_id, step, data):
        raise StoreError("no room")

    monkeypatch.setattr(Store, "save_checkpoint", refuse)
    assert set(run_pack(pack, job).statuses.values()) == {"finished"}


def test_a_store_that_is_gone_for_a_while_misses_nothing(train, pack, job, store):
    """As a network's folder that is not mounted for a moment."""
    away = store.path.with_name("away")

    def at_step(configs, step):
        if step == 10:
            store.path.rename(away)
        elif step == 20:
            away.rename(store.path)

    train.at_step = at_step
    assert set(run_pack(pack, job).statuses.values()) == {"finished"}
    assert store.metrics()["step"].tolist() == 2 * [5, 10, 15, 20]


def test_a_store_that_was_deleted_is_not_made_anew_somewhere_else(train, pack, job, store):
    """Where it was mounted, a folder of that name would be on another disk."""

    def at_step(configs, step):
        if step == 10:
            shutil.rmtree(store.path)

    train.at_step = at_step
    outcome = run_pack(pack, job)
    assert "the results store is gone" in outcome.error
    assert "\n" not in outcome.error
    assert set(outcome.statuses.values()) == {"left"}
    assert not store.path.exists()


def test_a_whole_checkpoint_of_another_training_is_dropped_and_that_of_its_neighbour_is_not(
    train, pack, job, store, monkeypatch
):
    first, second = ids(pack)
    store.save_checkpoint(first, 10, checkpoint(10))
    store.save_checkpoint(second, 15, checkpoint(15))

    def refusing(configs, report, *, resume_from, **options):
        if first in resume_from:
            raise DamagedCheckpoint("it does not fit", first)
        return train(configs, report, resume_from=resume_from, **options)

    monkeypatch.setattr("hyla_core.train.train", refusing)
    assert set(run_pack(pack, job).statuses.values()) == {"finished"}
    assert train.calls == [{first: 0, second: 15}]
    assert store.trials().set_index("trial_id")["start_step"].to_dict() == {first: 0, second: 15}
    assert store.metrics(trial_ids=[first])["step"].tolist() == [5, 10, 15, 20]


def test_other_code_is_refused(train, pack, job, store):
    outcome = run_pack(pack, job._replace(provenance={**job.provenance, "code_hash": "0" * 16}))
    assert "not 0000000000000000 as the run" in outcome.error
    assert set(outcome.statuses.values()) == {"left"}
    assert store.trials(raw=True).empty


def test_a_row_says_where_it_comes_from(train, pack, job, store):
    run_pack(pack, job._replace(cadence=Cadence(num_logs=4, num_evals=2)))
    for row in store.trials().to_dict("records"):
        assert (row["exit_reason"], row["num_logs"], row["num_evals"]) == ("completed", 4, 2)
        assert (row["device_kind"], row["num_devices"], row["platform_version"]) == ("cpu", 1, "cpu")
        assert row["numerics.matmul_precision"] == "default"
        assert row["code_hash"] == provenance.loaded_code_hash()
        assert row["version.hyla"] == provenance.own_version()
        assert row["cpu_model"] == provenance.cpu_model()


def test_a_pack_over_several_devices_says_how_many(train, pack, job, store, monkeypatch):
    (device,) = jax.local_devices()[:1]
    monkeypatch.setattr("jax.local_devices", lambda: [device] * 3)  # the third stays idle
    run_pack(pack, job)
    rows = store.trials()
    assert rows["num_devices"].tolist() == [2, 2]
    assert rows["device_s"].tolist() == rows["train_s"].tolist()  # each member had one of them


def test_a_store_that_is_not_there_is_an_error_of_the_pack(train, pack, job, tmp_path):
    outcome = run_pack(pack, job._replace(store=str(tmp_path / "nowhere")))
    assert "no such folder" in outcome.error
    assert set(outcome.statuses.values()) == {"left"}


def test_a_retried_trial_is_trained_again_once(train, pack, job, store):
    first, second = ids(pack)
    run_pack(pack, job)
    again = job._replace(run_id="run-2", retry=frozenset([first]))
    run_pack(pack, again)
    # As when the worker was lost after the trial had ended.
    run_pack(pack, again)
    assert train.calls == [{first: 0, second: 0}, {first: 0}]


def test_checkpoints_stay_where_the_sweep_says_so(train, pack, job, store):
    run_pack(pack, job)
    assert list(store.load_checkpoints(ids(pack)[0])) == []
    for run_id in ("run-2", "run-3"):
        # A retry starts afresh, whatever was kept.
        run_pack(pack, job._replace(keep_checkpoints=True, run_id=run_id, retry=frozenset(ids(pack))))
        assert train.calls[-1] == dict.fromkeys(ids(pack), 0)
        # The last one is that of the trained state.
        assert [step for step, _ in store.load_checkpoints(ids(pack)[0])] == [20, 15]


def test_a_trial_whose_trained_state_was_to_stay_and_cannot_is_not_finished(train, pack, job, store, monkeypatch):
    save = Store.save_checkpoint

    def refuse_the_last(self, trial_id, step, data):
        if step == 20:
            raise StoreError("no room")
        save(self, trial_id, step, data)

    monkeypatch.setattr(Store, "save_checkpoint", refuse_the_last)
    keeping = job._replace(keep_checkpoints=True)
    outcome = run_pack(pack, keeping)
    assert "no room" in outcome.error
    assert set(outcome.statuses.values()) == {"interrupted"}
    monkeypatch.setattr(Store, "save_checkpoint", save)
    assert set(run_pack(pack, keeping).statuses.values()) == {"finished"}
    assert train.calls[-1] == dict.fromkeys(ids(pack), 15)


def test_a_trained_state_that_was_saved_before_a_crash_is_enough_to_finish(train, pack, job, store, monkeypatch):
    seal = AttemptWriter.seal

    def crash(*_, **__):
        raise StoreError("gone")

    keeping = job._replace(keep_checkpoints=True)
    monkeypatch.setattr(AttemptWriter, "seal", crash)
    with monkeypatch.context() as patch:
        patch.setattr(LocalPlace, "write_all", crash)
        assert run_pack(pack, keeping).error is not None
    monkeypatch.setattr(AttemptWriter, "seal", seal)
    assert set(run_pack(pack, keeping).statuses.values()) == {"finished"}
    assert store.metrics(trial_ids=[ids(pack)[0]])["step"].tolist() == [5, 10, 15, 20]


def test_counts_beyond_what_a_float_holds_exactly_fit_their_columns(train, pack, job, store, monkeypatch):
    monkeypatch.setattr(trainable.counts, "train_flops_per_example", lambda config: 2**53 + 1)
    assert run_pack(pack, job).error is None
    assert store.trials()["train_flops"].tolist() == [pytest.approx(80 * 2**53)] * 2


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("a\nb"), "ValueError: a"),
        (ValueError(), "ValueError"),
        (
            MemoryError("big"),
            "out of memory: MemoryError: big; lower run.max_pack_size, or ask for more in run.resources",
        ),
        (OSError(errno.ENOSPC, "No space"), "the disk is full: OSError: [Errno 28] No space"),
        (OSError(errno.EACCES, "Denied"), "PermissionError: [Errno 13] Denied"),
    ],
)
def test_errors_in_one_line(error, line):
    assert describe(error) == line


def test_what_jax_is_told(monkeypatch, tmp_path):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "7")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.delenv("JAX_PLATFORMS")
    prepare_jax(Resources(gpu=0.5))
    assert "JAX_PLATFORMS" not in os.environ
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.450"
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path / f"hyla-compiled-{os.getuid()}")
    assert os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] == "7"
    prepare_jax(Resources(tpu=1))
    assert "JAX_PLATFORMS" not in os.environ
    prepare_jax(Resources())
    assert os.environ["JAX_PLATFORMS"] == "cpu"


def test_a_cache_that_others_could_write_is_not_used(tmp_path):
    folder = compilation_cache(tmp_path)
    assert folder is not None
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    assert compilation_cache(tmp_path) is None
    folder.rmdir()
    folder.symlink_to(tmp_path)
    assert compilation_cache(tmp_path) is None
    assert compilation_cache(tmp_path / "absent") is None


@pytest.mark.slow
def test_a_real_training_goes_on_bit_for_bit(pack, job, store, tmp_path, monkeypatch):
    unbroken = Store.create(tmp_path / "unbroken")
    assert set(run_pack(pack, job._replace(store=str(unbroken.path))).statuses.values()) == {"finished"}
    asked = iter([False] * 4)
    outcome = run_pack(pack, job, should_stop=lambda: next(asked, True))
    assert set(outcome.statuses.values()) == {"interrupted"}
    assert set(run_pack(pack, job).statuses.values()) == {"finished"}
    attempts = store.trials(raw=True)
    assert len(attempts) == 4
    assert 0 < attempts["start_step"].max() < 20
    assert equal_tables(store, unbroken) == []
    assert (attempts["peak_mem_bytes"] > 2**20).all()
    assert set(attempts["device_kind"]) == {"cpu"}


@pytest.mark.slow
def test_what_a_finished_trial_has_learnt_can_be_restored_from_the_store(pack, job, store):
    run_pack(pack, job._replace(keep_checkpoints=True))
    trial_id = ids(pack)[1]
    row = store.trials().set_index("trial_id").loc[trial_id]
    config = TrainConfig.from_flat(row.to_dict())
    assert config.trial_id == trial_id
    _, data = next(store.load_checkpoints(trial_id))
    params, step = restore_params(config, data)
    assert step == 20
    task = make_task(config.task)
    index = np.arange(config.data.num_valid, dtype=np.uint32)
    batch = task.sample(task.tables(config.seeds.split), "valid", seed_rng(config.seeds.data), index)
    values = task.metrics(model.apply(config, params, batch.inputs), batch)
    measured = store.final_metrics(splits=["valid"], metrics=["loss"]).query("trial_id == @trial_id")["value"]
    assert float(np.mean(values["loss"])) == pytest.approx(measured.item(), rel=1e-4)


def test_an_outcome_travels_as_text():
    work = trainable.PackWork("host:7", 2.0, 1.5, 1.0, 0.5, 1, 0)
    outcome = trainable.PackOutcome({"a": "finished", "b": "left"}, "an error", work)
    assert trainable.PackOutcome.from_json(outcome.to_json()) == outcome
    assert trainable.PackOutcome.from_json(trainable.PackOutcome({}).to_json()) == trainable.PackOutcome({})


@pytest.mark.slow
def test_compilations_grow_with_shapes_and_not_with_trials(tmp_path, store, job):
    """Two shapes, each with packs of two lengths and seeds: four packs of two, and programs go with their shape."""
    path = write_sweep(tmp_path)
    overrides = ["axes.seed=[0,1]", "axes.optim.peak_lr=[1e-3]", "axes.data.num_steps=[20,30]"]
    trials = expand(load_sweep(path, overrides=[*overrides, "axes.model.mlp_dim=[4,6]"]))
    packs = make_packs(trials, 2)
    shapes = [shape_key(pack.trials[0].config) for pack in packs]
    assert [shapes.index(shape) for shape in shapes] == [0, 1, 0, 1]
    last = trainable.last_of_shapes(packs)
    hyla_train._program.drop()
    compiled, kept = [], []
    for index, pack in enumerate(packs):
        work = run_pack(pack, job).work
        assert work is not None
        assert work.wall_s >= work.train_s > 0
        compiled.append(work.num_compiled + work.num_loaded)
        trainable.drop_programs(last, index)
        kept.append(len(hyla_train._program._kept))
    assert compiled == [1, 1, 0, 0]
    assert kept == [1, 2, 1, 0]
    assert set(store.finished()) == {trial.trial_id for trial in trials}


@pytest.mark.slow
def test_a_training_step_that_the_cache_holds_is_not_compiled_again(pack, job, tmp_path):
    """In fresh processes, as workers are."""
    code = """
        import pickle, sys
        from sweeps.cluster.trainable import run_pack
        pack, job = pickle.loads(bytes.fromhex(sys.argv[1]))
        work = run_pack(pack, job._replace(store=sys.argv[2])).work
        print(work.num_compiled, work.num_loaded)
    """
    given = pickle.dumps((pack, job)).hex()
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled")}
    environment |= {
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    counted = []
    for name in ("a", "b"):
        Store.create(tmp_path / name)
        command = [sys.executable, "-c", textwrap.dedent(code), given, str(tmp_path / name)]
        done = subprocess.run(
            command, cwd=Path(__file__).parents[3], env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        counted.append(done.stdout.split()[-2:])
    assert counted == [["1", "0"], ["0", "1"]]
