import numpy as np
import pytest

from analysis.frames import NothingToShow, load_sweep, points_of
from sweeps.store import Store

AXES = {"model.attention": ["softmax", "hyla"], "model.width": [1, 2], "seed": [0, 1, 2]}
VALUE = "ood/accuracy"


def ends(trial) -> str | None:
    """softmax width 1 loses a seed each to failure and to divergence; the last seed of hyla width 2 never began."""
    axes = trial.axes
    if axes["model.attention"] == "softmax" and axes["model.width"] == 1:
        return ["finished", "failed", "diverged"][axes["seed"]]
    if axes["model.attention"] == "hyla" and axes["model.width"] == 2 and axes["seed"] == 2:
        return None
    return "finished"


@pytest.fixture(scope="module")
def gappy(stores, tmp_path_factory):
    path = tmp_path_factory.mktemp("gappy") / "results"
    trials = stores.write(path, AXES, status=ends)
    return load_sweep(Store.open(path)), trials


def test_every_trial_of_the_request_has_a_row_with_its_status(gappy):
    frame, trials = gappy
    assert frame.trials["trial_id"].tolist() == [trial.trial_id for trial in trials]
    assert frame.trials["status"].tolist() == [ends(trial) or "pending" for trial in trials]
    assert frame.status_counts() == {"finished": 9, "diverged": 1, "failed": 1, "pending": 1}
    assert frame.axes == ("model.attention", "model.width", "seed")
    assert frame.cell_axes == ["model.attention", "model.width"]


def test_metrics_are_those_after_the_last_step_and_of_finished_trials_only(gappy, stores):
    frame, trials = gappy
    expected = [stores.curve(trial)[VALUE] if ends(trial) == "finished" else np.nan for trial in trials]
    np.testing.assert_array_equal(frame.trials[VALUE], expected)
    assert "train/loss" not in frame.trials


def test_axis_values_counts_and_examples_come_along(gappy):
    frame, _ = gappy
    row = frame.trials.iloc[-3]  # hyla, width 2, seed 0
    assert (row["model.attention"], row["model.width"], row["seed"]) == ("hyla", 2, 0)
    params = 1 * 64 * (4 * 64 + 2 * 128)  # one layer of width 64
    assert row["num_non_embedding_params"] == params
    assert row["train_flops"] == 6 * params * 18 * 76800
    assert row["examples_seen"] == 76800
    assert row["data.num_train"] == 76800


def test_points_average_the_seeds_they_have_and_say_what_is_missing(gappy, stores):
    frame, trials = gappy
    points = points_of(frame, VALUE)
    assert points["num_seeds"].tolist() == [1, 3, 3, 2]
    assert points["num_seeds_asked"].tolist() == [3, 3, 3, 3]
    assert points["missing"].tolist() == ["1 diverged, 1 failed", "", "", "1 pending"]
    values = [stores.curve(trial)[VALUE] for trial in trials]
    second, last = points.iloc[1], points.iloc[3]
    assert second["mean"] == pytest.approx(sum(values[3:6]) / 3)
    assert (second["low"], second["high"]) == (min(values[3:6]), max(values[3:6]))
    spread = sum((value - sum(values[3:6]) / 3) ** 2 for value in values[3:6]) / 2
    assert second["std"] == pytest.approx(spread**0.5)
    assert last["seed_values"] == tuple(values[9:11])
    assert last["trial_ids"] == tuple(trial.trial_id for trial in trials[9:11])
    assert np.isnan(points.iloc[0]["std"])  # one seed has no spread


def test_a_lost_evaluation_is_missing_and_not_zero(stores, tmp_path):
    path = tmp_path / "results"
    trials = stores.write(path, {"model.width": [1], "seed": [0, 1]})
    (path / "metrics" / f"{trials[0].trial_id}-1.parquet").write_bytes(b"PAR1")
    frame = load_sweep(Store.open(path))
    assert frame.status_counts() == {"finished": 1, "finished without evaluation": 1}
    assert points_of(frame, VALUE)["missing"].tolist() == ["1 finished without evaluation"]
    assert len(frame.damaged) == 1
    assert trials[0].trial_id in frame.damaged[0]


def test_an_evaluation_before_the_last_step_does_not_stand_in_for_the_final_one(stores, tmp_path):
    path = tmp_path / "results"
    trials = stores.write(path, {"seed": [0, 1]}, status=lambda trial: None if trial.axes["seed"] else "finished")
    writer = Store.open(path).begin(
        trials[1].trial_id, trials[1].config.flat(), {"run_id": "run"}, start_step=0, num_steps=1200, counts={}
    )
    writer.add([(600, "ood", "accuracy", 0.9)])
    writer.seal("finished", step=1200)
    frame = load_sweep(Store.open(path))
    assert frame.trials["status"].tolist() == ["finished", "finished without evaluation"]
    assert points_of(frame, VALUE)["seed_values"].tolist() == [(stores.curve(trials[0])[VALUE],)]


def test_a_sweep_without_attention_axis_takes_the_variant_from_the_config(stores, tmp_path):
    path = tmp_path / "results"
    stores.write(path, {"model.width": [1, 2]}, status=lambda t: "finished" if t.axes["model.width"] == 1 else None)
    assert load_sweep(Store.open(path)).trials["model.attention"].tolist() == ["softmax", "softmax"]


@pytest.fixture(scope="module")
def several(stores, tmp_path_factory) -> Store:
    path = tmp_path_factory.mktemp("several") / "results"
    stores.write(path, {"model.width": [1, 2]}, name="wide")
    stores.write(path, {"model.depth": [1, 2]}, name="deep")
    stores.write(path, {"model.depth": [1]}, name="deep", tiny=True)
    stores.write(path, {"model.width": [1]}, name="wide")  # asked again with less
    return Store.open(path)


def test_the_latest_request_of_the_latest_sweep_is_taken(several):
    frame = load_sweep(several)
    assert (frame.sweep, len(frame.trials)) == ("wide", 1)
    assert frame.other_sweeps == ("deep (tiny)", "deep")


@pytest.mark.parametrize(("name", "num_trials"), [("deep", 2), ("deep (tiny)", 1), ("wide", 1)])
def test_a_name_chooses(several, name, num_trials):
    frame = load_sweep(several, name)
    assert (frame.sweep, len(frame.trials)) == (name, num_trials)


def test_an_unknown_name_is_refused_with_those_there_are(several):
    with pytest.raises(NothingToShow, match=r"results: no sweep is called 'dep'; choose one of \['wide', 'deep"):
        load_sweep(several, "dep")


def test_an_empty_store_says_what_to_do(tmp_path):
    with pytest.raises(NothingToShow, match=r"holds no sweep yet; train one with `python -m sweeps run"):
        load_sweep(Store.create(tmp_path / "results"))


def test_a_sweep_without_finished_trials_says_where_it_stands(stores, tmp_path):
    stores.write(tmp_path / "results", {"seed": [0, 1]}, status=lambda t: "failed" if t.axes["seed"] else None)
    with pytest.raises(NothingToShow, match=r"no finished trial yet \(1 failed, 1 pending\)"):
        load_sweep(Store.open(tmp_path / "results"))
