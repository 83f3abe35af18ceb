"""`run` in this process: exit statuses, what is left to train, retries, signals."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from fake_training import SWEEP, FakeTrain, write_sweep

from hyla_core.config import TrainConfig
from hyla_core.counts import step_memory_bytes
from sweeps.__main__ import main
from sweeps.devices import WORKER_BYTES
from sweeps.expand import expand
from sweeps.spec import load_sweep
from sweeps.store import Store


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> FakeTrain:
    fake = FakeTrain()
    monkeypatch.setattr("hyla_core.train.train", fake)
    # Nothing here is about power cuts, and a busy disk takes its time.
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    # What a run sets for its own process should not outlive the test.
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", os.environ.get("JAX_COMPILATION_CACHE_DIR", ""))
    return fake


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    return write_sweep(tmp_path)


@pytest.fixture
def run(sweep: Path, tmp_path: Path):
    def run(*options: str) -> int:
        return main(["run", str(sweep), "--results", str(tmp_path / "store"), "--in-process", *options])

    return run


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


def fail_above(peak_lr: float, error: Exception):
    def at_step(configs: Sequence[TrainConfig], step: int) -> None:
        if configs[0].optim.peak_lr > peak_lr:
            raise error

    return at_step


def statuses(store: Store) -> list[str]:
    return sorted(state.status for state in store.statuses().values())


def test_a_sweep_is_trained_once(train, run, store):
    assert run() == 0
    assert len(train.calls) == 4
    assert statuses(store) == ["finished"] * 8
    assert run() == 0
    assert len(train.calls) == 4
    assert len(store.sweeps(raw=True)["request_id"].unique()) == 2


def test_damage_is_named_with_what_to_do_about_it(train, run, store, capsys):
    assert run() == 0
    (store.path / "trials" / "stranger.parquet").write_bytes(b"mine")
    next(store.path.glob("trials/*-1.parquet")).unlink()
    for _ in range(2):  # a run that trains, and one that has nothing to train
        capsys.readouterr()
        assert run() == 0
        out = capsys.readouterr().out
        assert "passed over: " in out
        assert "stranger.parquet: not named" in out
        assert f"python -m sweeps repair {store.path}" in out


@pytest.mark.parametrize(("room_for", "pack_sizes"), [(1, [1] * 8), (1.9, [1] * 8), (2, [2] * 4), (5, [2] * 4)])
def test_packs_are_as_large_as_the_memory_allows(
    train, run, store, sweep, monkeypatch, room_for: float, pack_sizes: list[int]
):
    (config, *_) = (trial.config for trial in expand(load_sweep(sweep)))
    alone, two = (step_memory_bytes(config, number, side_by_side=False) for number in (1, 2))
    memory = alone + (room_for - 1) * (two - alone) + WORKER_BYTES
    monkeypatch.setattr("sweeps.cluster.machine.memory_bytes", lambda: int(memory))
    assert run() == 0
    assert [len(call) for call in train.calls] == pack_sizes
    assert statuses(store) == ["finished"] * 8


def test_on_this_machines_accelerator_its_memory_counts(train, run, store, sweep, monkeypatch):
    monkeypatch.setattr("sweeps.cluster.machine.accelerator_name", {"GPU": "A100", "TPU": None}.__getitem__)
    monkeypatch.setattr("sweeps.run.pack_memory_on", lambda device, resources: 0 if device.kind == "a100" else None)
    assert run("--set", "run.resources.gpu=1") == 0
    assert [len(call) for call in train.calls] == [1] * 8


def test_what_a_trial_leaves_in_the_store(train, run, store):
    run()
    row = store.trials().query("`optim.peak_lr` == 0.003 and `seeds.init` == 1").iloc[0]
    assert row["start_step"] == 0
    assert row["step"] == row["num_steps"] == 20
    assert row["examples_seen"] == 80
    assert row["pack_size"] == 2
    assert row["compile_s"] == 0.25
    assert row["train_flops"] == row["train_flops_per_example"] * 80 > 0
    assert row["device_s"] == pytest.approx(row["train_s"] / 2)
    assert row["run_id"] == store.sweeps()["request_id"].iloc[0]
    assert len(row["code_hash"]) == 16
    losses = store.metrics(trial_ids=[row["trial_id"]])
    assert losses["step"].tolist() == [5, 10, 15, 20]
    assert losses["value"].tolist() == pytest.approx([0.015, 0.03, 0.045, 0.06])
    assert list((store.path / "checkpoints").iterdir()) == []
    assert store.claims() == []


def test_an_added_value_costs_only_its_own_trials(train, run, store):
    run()
    train.calls.clear()
    assert run("--set", "axes.optim.peak_lr=[1e-3, 2e-3, 3e-3, 4e-3, 5e-3]") == 0
    assert [len(call) for call in train.calls] == [2]
    assert len(store.finished()) == 10


def test_a_failed_trial_is_a_row_and_is_tried_again_only_when_asked(train, run, store, capsys):
    train.at_step = fail_above(0.0035, ValueError("bad\nluck"))
    assert run() == 1
    rows = store.trials()
    failed = rows[rows["status"] == "failed"]
    assert failed["error"].tolist() == ["ValueError: bad"] * 2
    assert "in at_step" in failed["error_detail"].iloc[0]
    assert failed["optim.peak_lr"].tolist() == [0.004, 0.004]
    assert "2 failed: ValueError: bad" in capsys.readouterr().out

    train.calls.clear()
    assert run() == 1
    assert train.calls == []
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 1
    assert "2 failed" in out
    assert "--retry failed" in out

    train.at_step = lambda configs, step: None
    assert run("--retry", "failed") == 0
    assert len(train.calls) == 1
    assert len(store.finished()) == 8


def test_what_kept_trials_from_being_trained_is_said_at_the_end(train, run, store, capsys):
    train.at_step = fail_above(0.0035, OSError(errno.ENOSPC, "No space left on device"))
    assert run() == 1
    assert statuses(store) == ["finished"] * 6 + ["interrupted"] * 2
    assert "2 not trained: the disk is full: OSError: [Errno 28] No space left on device" in capsys.readouterr().out
    train.at_step = lambda configs, step: None
    assert run() == 0


def test_a_lack_of_memory_is_tried_again_by_the_next_run(train, run, store):
    train.at_step = fail_above(0.0035, RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes"))
    assert run() == 1
    assert store.trials()["error"].dropna().iloc[0].startswith("out of memory: ")
    train.at_step = lambda configs, step: None
    assert run() == 0


def test_a_broken_sweep_stops_early(train, run, store, capsys):
    train.at_step = fail_above(0, ValueError("shape (12,) is wrong"))
    assert run() == 3
    assert len(train.calls) == 3
    assert statuses(store) == ["failed"] * 6
    out = capsys.readouterr().out
    assert "every pack so far ended with: ValueError: shape (12,) is wrong" in out


def test_failures_are_no_broken_sweep_where_anything_succeeded(train, run, store):
    assert run("--set", "axes.optim.peak_lr=[1e-3]") == 0
    train.at_step = fail_above(0, ValueError("no"))
    assert run() == 1
    assert len(train.calls) == 4


def test_different_failures_are_no_broken_sweep(train, run):
    errors = iter([ValueError("one"), TypeError("two"), ValueError("one"), ValueError("one")])

    def at_step(configs, step):
        raise next(errors)

    train.at_step = at_step
    assert run() == 1
    assert len(train.calls) == 4


def test_a_diverged_trial_is_a_result(train, run, store, capsys):
    train.diverges = lambda config: config.optim.peak_lr == 0.004 and config.seeds.init == 1
    assert run() == 0
    assert statuses(store) == ["diverged"] + ["finished"] * 7
    row = store.trials().query("status == 'diverged'").iloc[0]
    assert row["step"] == 10
    assert row["examples_seen"] == 40
    assert "8 of 8 trials (1 diverged)" in capsys.readouterr().out
    train.calls.clear()
    assert run() == 0
    assert train.calls == []
    train.diverges = lambda config: False
    assert run("--retry", "diverged") == 0
    assert [list(call.values()) for call in train.calls] == [[0]]
    assert statuses(store) == ["finished"] * 8


def test_a_signal_saves_and_the_next_run_goes_on(train, run, store, capsys):
    def at_step(configs, step):
        if configs[0].optim.peak_lr == 0.002 and step == 10:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)  # a thread takes it in

    train.at_step = at_step
    before = signal.getsignal(signal.SIGTERM)
    assert run() == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
    assert statuses(store) == ["finished"] * 2 + ["interrupted"] * 2
    out = capsys.readouterr().out
    assert "2 more begun and not finished" in out
    assert "to continue: python -m sweeps run" in out
    assert not list((store.path / "claims").iterdir())

    train.at_step = lambda configs, step: None
    train.calls.clear()
    assert run() == 0
    assert [sorted(call.values()) for call in train.calls] == [[10, 10], [0, 0], [0, 0]]
    trial = next(iter(train.calls[0]))
    attempts = store.trials(raw=True).query("trial_id == @trial")
    assert attempts["start_step"].tolist() == [0, 10]
    assert store.metrics(trial_ids=[trial])["step"].tolist() == [5, 10, 15, 20]


def test_only_trains_the_trial_named(train, run, store):
    wanted = "optim.peak_lr"
    run()
    ids = store.trials().sort_values(wanted)["trial_id"].tolist()
    for name in ("trials", "metrics"):
        for part in (store.path / name).iterdir():
            part.unlink()
    train.calls.clear()
    assert run("--only", ids[0][:8], "--only", ids[5]) == 0
    assert sorted(trial_id for call in train.calls for trial_id in call) == sorted([ids[0], ids[5]])


def test_only_refuses_what_names_no_single_trial(train, run, capsys):
    assert run("--only", "zzz") == 2
    assert run("--only", "") == 2
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 2
    assert "--only zzz: no trial of this sweep has an id that starts so, such as" in err[0]
    assert "8 trials of this sweep" in err[1]
    assert train.calls == []


def test_json_lines(train, run, capsys):
    train.at_step = fail_above(0.0035, ValueError("bad"))
    run("--json")
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert events[0]["event"] == "start"
    assert events[0]["to_train"] == 8
    trials = [event for event in events if event["event"] == "trial"]
    assert [event["status"] for event in trials] == ["finished"] * 6 + ["failed"] * 2
    assert trials[0]["axes"] == {"optim.peak_lr": 0.001, "seed": 0}
    assert trials[7]["error"] == "ValueError: bad"
    assert events[-1]["event"] == "summary"
    assert events[-1]["exit_status"] == 1
    assert (events[-1]["finished"], events[-1]["failed"], events[-1]["left"]) == (6, 2, 0)


def test_resources_that_no_machine_has_are_refused_before_anything_starts(train, run, sweep, tmp_path, capsys):
    options = ["run", str(sweep), "--results", str(tmp_path / "new"), "--address", "local"]
    assert main([*options, "--set", "run.resources.gpu=99"]) == 2
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 1
    assert "run.resources.gpu=99 for each pack, but this machine has at most" in err[0]
    assert "--set run.resources.gpu=" in err[0]
    assert main([*options, "--set", "run.resources.cpu=9999"]) == 2
    assert "run.resources.cpu=9999" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    assert "ray" not in sys.modules or not sys.modules["ray"].is_initialized()


def test_a_costly_sweep_wants_a_yes(train, store, sweep, tmp_path, capsys, monkeypatch):
    started = []
    monkeypatch.setattr("sweeps.run._train", lambda request, work, states: started.append(len(work.to_train)) or 0)
    options = ["run", str(sweep), "--results", str(tmp_path / "store"), "--address", "local"]
    assert main(options) == 0  # cheap
    for part in (store.path / "sweeps").iterdir():
        part.unlink()

    monkeypatch.setattr("sweeps.run.CONFIRM_ABOVE_S", 1e-6)
    assert main(options) == 2
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 1
    assert "8 trials are to be trained, about 0 s of core time (assumed); add --yes to start that" in err[0]
    assert store.sweeps(raw=True).empty

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: "n")
    assert main(options) == 2
    assert "not started" in capsys.readouterr().err
    monkeypatch.setattr("builtins.input", lambda question: "y")
    assert main(options) == 0
    assert main([*options, "--yes"]) == 0
    assert started == [8, 8, 8]


def test_a_finished_sweep_needs_neither_ray_nor_jax(train, run, sweep, tmp_path):
    run()
    code = (
        "import sys; from sweeps.__main__ import main; status = main(sys.argv[1:]);"
        "assert not {'ray', 'jax', 'flax'} & sys.modules.keys(), 'imported'; sys.exit(status)"
    )
    options = ["run", str(sweep), "--results", str(tmp_path / "store")]
    done = subprocess.run([sys.executable, "-c", code, *options], capture_output=True, text=True, cwd=Path.cwd())
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"toy: nothing to train, 8 of 8 trials are in {tmp_path / 'store'}"]
    assert done.stderr == ""


def test_trials_of_another_run_are_left_to_it(train, run, store, capsys):
    run("--set", "axes.optim.peak_lr=[1e-3]")
    row = store.trials().iloc[0]
    other = store.begin("f" * 12, {"model.emb_dim": 4}, {}, 0, 20, {})
    assert other is not None
    # A claim of a trial of the sweep that is not trained yet.
    path = write_sweep(store.path.parent, SWEEP.replace("seed: [0, 1]", "seed: [0]"))
    from sweeps.expand import expand
    from sweeps.spec import load_sweep

    wanted = next(trial for trial in expand(load_sweep(path)) if trial.config.optim.peak_lr == 0.002)
    claimed = store.begin(wanted.trial_id, wanted.config.flat(), {}, 0, 20, {})
    capsys.readouterr()
    assert run() == 1
    out = capsys.readouterr().out
    assert "3 of 8 done" not in out.splitlines()[0]
    assert "1 are being trained by another run" in out.splitlines()[0]
    assert wanted.trial_id not in {trial_id for call in train.calls for trial_id in call}
    assert row["trial_id"] in store.finished()
    claimed.seal("finished")
    assert run() == 0
