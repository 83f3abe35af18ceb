"""`reproduce`: a trial trained again from its row alone."""

import json
import shutil
from pathlib import Path

import pytest
from fake_training import FakeTrain, write_sweep

from hyla_core.config import Cadence
from sweeps import reproduce as module
from sweeps.__main__ import main
from sweeps.reproduce import CannotReproduce, _times, cadence_of, config_of
from sweeps.spec import Resources
from sweeps.store import Store

OLD = Path(__file__).parents[1] / "golden" / "store_v1"
FINISHED, DIVERGED, FAILED = "4caee5d4cd33", "25c2f1cfa222", "73bfa6953840"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> FakeTrain:
    fake = FakeTrain()
    monkeypatch.setattr("hyla_core.train.train", fake)
    return fake


@pytest.fixture
def store(train, tmp_path, capsys) -> Store:
    """Eight trials of the fake training."""
    assert main(["run", str(write_sweep(tmp_path)), "--in-process", "--results", str(tmp_path / "store")]) == 0
    capsys.readouterr()
    return Store.open(tmp_path / "store")


def reproduce(capsys, *arguments: object) -> tuple[int, str, str]:
    status = main(["reproduce", *map(str, arguments)])
    return status, *capsys.readouterr()


def test_a_trial_that_comes_out_alike_is_reproduced(store, capsys):
    trial_id = next(iter(store.finished()))
    status, out, err = reproduce(capsys, store.path, trial_id[:6])
    assert status == 0
    assert out.endswith("reproduced (bit-equal)\n")
    assert "training trial" in err
    assert len(store.trials(raw=True)) == 8  # nothing of it is in this store


def test_what_comes_out_otherwise_is_named(store, train, tmp_path, capsys):
    trial_id = next(iter(store.finished()))
    train.diverges = lambda config: True
    status, out, _ = reproduce(capsys, store.path, trial_id, "--into", tmp_path / "again", "--json")
    told = json.loads(out)
    assert (status, told["outcome"]) == (1, "differs")
    assert "status is 'finished' against 'diverged'" in told["differences"][0]
    assert Store.open(tmp_path / "again").finished() == {trial_id: "diverged"}


def test_small_differences_are_within_the_tolerance(store, train, monkeypatch, capsys):
    """Where rounding differs, as on another device."""
    from hyla_core.metrics import MetricsRow

    trial_id = next(iter(store.finished()))
    real = MetricsRow.__new__
    monkeypatch.setattr("fake_training.MetricsRow", lambda *row: real(MetricsRow, *row[:4], row[4] * (1 + 1e-6)))
    status, out, _ = reproduce(capsys, store.path, trial_id)
    assert status == 0
    assert out.endswith("reproduced within tolerance over the first 20 of 20 steps\n")


def test_rows_that_begin_where_no_tolerance_is_known_are_not_within_one(store, train, monkeypatch, capsys):
    trial_id = next(iter(store.finished()))
    monkeypatch.setattr(module, "COMPARED_STEPS", 4)  # the first row is of step 5
    monkeypatch.setattr("fake_training.ROW_EVERY", 10)
    status, out, _ = reproduce(capsys, store.path, trial_id)
    assert status == 1
    assert out.endswith("differs: no row is of the first 4 steps, over which alone a tolerance is known\n")


def test_a_training_that_fails_here_differs(store, train, capsys):
    def at_step(configs, step):
        raise ValueError("no luck")

    train.at_step = at_step
    status, out, _ = reproduce(capsys, store.path, next(iter(store.finished())))
    assert status == 1
    assert out.endswith("differs: it finished there, but is failed here: ValueError: no luck\n")


@pytest.mark.parametrize(
    ("there", "here", "expected", "told"),
    [
        ("cpu", "NVIDIA H100", Resources(), ""),
        (None, "NVIDIA H100", Resources(), ""),
        ("NVIDIA H100", "NVIDIA H100", Resources(gpu=1), ""),
        ("TPU v5 lite", "TPU v5 lite", Resources(tpu=1), ""),
        ("NVIDIA H100", "NVIDIA A100", Resources(), "this machine has NVIDIA A100, so it trains on the CPU\n"),
        ("NVIDIA H100", "cpu", Resources(), "this machine has no accelerator, so it trains on the CPU\n"),
    ],
)
def test_it_trains_on_the_device_of_the_row_or_says_otherwise(monkeypatch, capsys, there, here, expected, told):
    monkeypatch.setattr(module, "_kind_here", lambda: here)
    assert module._resources(there) == expected
    assert capsys.readouterr().err.endswith(told)


def test_differing_provenance_is_told(store, train, monkeypatch, capsys):
    monkeypatch.setattr("sweeps.provenance.cpu_model", lambda: "another processor")
    _, out, _ = reproduce(capsys, store.path, next(iter(store.finished())))
    assert "another processor here" in out


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["zz"], 1, "no trial has an id that starts with zz"),
        ([FAILED], 2, f"trial {FAILED}: it is failed; only a finished or diverged one can be reproduced"),
        ([FINISHED, "--into", str(OLD)], 2, "is the store that it is to be compared with; name another"),
    ],
)
def test_what_cannot_be_reproduced_is_one_line(capsys, arguments, status, message):
    found, out, err = reproduce(capsys, OLD, *arguments)
    assert (found, out) == (status, "")
    assert message in err
    assert err.count("\n") == 1


def test_a_row_of_other_code_is_refused():
    row = Store.open(OLD).trials(trial_ids=[FINISHED]).to_dict("records")[0]
    row = {name: value for name, value in row.items() if not module.absent(value)}
    assert config_of(row).trial_id == FINISHED
    with pytest.raises(CannotReproduce, match=r"its row makes trial [0-9a-f]+ with this code: RESULTS_VERSION"):
        config_of({**row, "optim.peak_lr": 0.5})
    with pytest.raises(CannotReproduce, match=r"its row is no config of this code: model\.emb_dim"):
        config_of({**row, "model.emb_dim": -1})


@pytest.mark.parametrize("num_steps", [1, 7, 20, 100])
@pytest.mark.parametrize("number", [1, 2, 3, 4, 7, 10, 50])
def test_the_cadence_of_an_old_row_follows_from_its_metrics(num_steps, number):
    steps = Cadence(num_logs=number).log_steps(num_steps)
    found = _times(sorted(steps), num_steps, num_steps)
    assert found is not None
    assert Cadence(num_logs=found).log_steps(num_steps) == steps


def test_a_cadence_in_the_row_counts():
    metrics = Store.open(OLD).metrics(trial_ids=[FINISHED])
    row = {"num_steps": 20, "step": 20}
    told = cadence_of(row, metrics)
    assert (told.num_logs, told.num_evals) == (4, 2)
    assert cadence_of({**row, "num_logs": 9.0}, metrics).num_logs == 9
    with pytest.raises(CannotReproduce, match="neither its row nor its metrics tell num_logs"):
        cadence_of(row, metrics.assign(step=7))


@pytest.mark.slow
@pytest.mark.parametrize("trial_id", [FINISHED, DIVERGED])
def test_a_real_trial_is_reproduced(capsys, tmp_path, trial_id):
    """One of a store of schema version 1, which an earlier version of the code trained, in one case with a stop."""
    shutil.copytree(OLD, tmp_path / "store")
    status, out, err = reproduce(capsys, tmp_path / "store", trial_id, "--json")
    assert status == 0, err
    assert json.loads(out)["outcome"] in ("bit-equal", "within tolerance")
