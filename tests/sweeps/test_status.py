"""`status` and `show`: what the store knows."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from fake_training import FakeTrain, write_sweep

from sweeps.__main__ import main
from sweeps.store import Store

ROOT = Path(__file__).parents[2]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Store:
    """Six trials finished, one of them diverged, two failed."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")
    fake = FakeTrain()
    fake.diverges = lambda config: config.optim.peak_lr == 0.001 and config.seeds.init == 1

    def at_step(configs, step):
        if configs[0].optim.peak_lr == 0.004:
            raise ValueError("no luck\nat all")

    fake.at_step = at_step
    monkeypatch.setattr("hyla_core.train.train", fake)
    options = ["--results", str(tmp_path / "store"), "--set", "data.num_valid=16", "--in-process"]
    assert main(["run", str(write_sweep(tmp_path)), *options]) == 1
    capsys.readouterr()
    return Store.open(tmp_path / "store")


def trial_id(store: Store, status: str) -> str:
    return store.trials().query("status == @status")["trial_id"].iloc[0]


def test_status_counts_every_sweep(store, capsys):
    live = store.begin("f" * 12, {"model.emb_dim": 4}, {}, 0, 20, {})
    assert live is not None
    assert main(["status", str(store.path)]) == 0
    line = capsys.readouterr().out
    assert line.startswith("toy: 8 trials: 5 finished, 1 diverged, 2 failed; ")
    assert line.endswith(" s ago\n")


def test_status_tells_running_interrupted_and_pending_apart(store, tmp_path, capsys):
    failed = trial_id(store, "failed")
    writer = store.begin(failed, {"model.emb_dim": 4}, {}, 0, 20, {})
    assert main(["status", str(store.path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["counts"] == {
        "finished": 5, "diverged": 1, "failed": 1, "running": 1, "interrupted": 0, "pending": 0,
    }  # fmt: skip
    writer.seal("interrupted")
    for part in (store.path / "trials").glob(f"{trial_id(store, 'finished')}-*"):
        part.unlink()
    main(["status", str(store.path), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["counts"] == {
        "finished": 4, "diverged": 1, "failed": 1, "running": 0, "interrupted": 1, "pending": 1,
    }  # fmt: skip
    assert (told["sweep"], told["num_trials"], told["tiny"]) == ("toy", 8, False)


def test_watching_ends_when_nothing_runs(store, capsys, monkeypatch):
    failed = trial_id(store, "failed")
    writer = store.begin(failed, {"model.emb_dim": 4}, {}, 0, 20, {})
    naps = []

    def sleep(seconds):
        naps.append(seconds)
        if len(naps) == 2:
            writer.seal("finished")

    monkeypatch.setattr("sweeps.status.time.sleep", sleep)
    assert main(["status", str(store.path), "--watch"]) == 0
    assert naps == [5.0, 5.0]
    lines = capsys.readouterr().out.splitlines()
    assert [("1 running" in line) for line in lines] == [True, True, False]


def test_a_damaged_part_is_named(store, capsys):
    part = next((store.path / "trials").iterdir())
    part.write_bytes(b"PAR1 and no more")
    assert main(["status", str(store.path)]) == 0
    told = capsys.readouterr()
    assert part.name in told.err
    assert "1 pending" in told.out


def test_no_store_and_an_empty_one(tmp_path, capsys):
    assert main(["status", str(tmp_path / "nowhere")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    Store.create(tmp_path / "empty")
    assert main(["status", str(tmp_path / "empty")]) == 1
    assert "no sweep has been run into this store" in capsys.readouterr().out


def test_show_tells_all_of_a_failed_trial(store, capsys):
    failed = trial_id(store, "failed")
    assert main(["show", str(store.path), failed[:7]]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"trial {failed}: failed\nsweep toy: optim.peak_lr=0.004 seed=")
    for part in (
        "  model.emb_dim: 4\n",
        "attempt 1: failed",
        "  error: ValueError: no luck\n",
        "  | ValueError: no luck",
    ):
        assert part in out


def test_the_command_that_show_gives_reruns_the_trial_alone(store, capsys, monkeypatch):
    failed = trial_id(store, "failed")
    main(["show", str(store.path), failed, "--json"])
    told = json.loads(capsys.readouterr().out)
    words = shlex.split(told["rerun"])
    assert words[:3] == ["python", "-m", "sweeps"]
    fake = FakeTrain()
    monkeypatch.setattr("hyla_core.train.train", fake)
    assert main(words[3:]) == 0
    assert [list(call) for call in fake.calls] == [[failed]]


def test_show_gives_numbers_of_a_finished_trial(store, capsys):
    finished = trial_id(store, "finished")
    main(["show", str(store.path), finished, "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["status"] == "finished"
    assert told["config"]["data.num_valid"] == 16
    assert [row["step"] for row in told["metrics"]] == [20]
    assert told["attempts"][0]["examples_seen"] == 80
    assert "--results rerun" in told["rerun"]


def test_show_says_what_it_does_not_find(store, capsys):
    assert main(["show", str(store.path), "zzz"]) == 1
    assert main(["show", str(store.path), ""]) == 1
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 2
    assert "no trial has an id that starts with zzz" in err[0]
    assert "8 trials have" in err[1]


def test_status_loads_neither_jax_nor_ray(store):
    code = (
        "import sys; from sweeps.__main__ import main; status = main(['status', sys.argv[1]]); "
        "assert not {'ray', 'jax', 'flax'} & sys.modules.keys(), 'imported'; sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(store.path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("toy: 8 trials: ")
