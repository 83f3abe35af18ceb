"""The shipped sweeps of fuzzy logic and language modelling, in their tiny forms, through Ray and to the figure."""

import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from sweeps.store import Store

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parent.parent


def call(*words: str, cache: Path) -> str:
    """What a command of the project prints; it must succeed."""
    environment = {**os.environ, "COLUMNS": "200", "HYLA_CACHE": str(cache)}
    result = subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


def trained(sweep: str, folder: Path, *options: str) -> pd.DataFrame:
    """Trains the tiny form and draws it; the final metrics of its trials, one row each, by `<split>/<metric>`."""
    path, cache = folder / "store", folder / "cache"
    local = ("--address", "local", "--yes")
    call("-m", "sweeps", "run", sweep, "--tiny", "--results", str(path), *local, *options, cache=cache)
    assert "nothing to train" in call(
        "-m", "sweeps", "run", sweep, "--tiny", "--results", str(path), *local, *options, cache=cache
    )
    printed = call("analysis/scaling.py", str(path), "--out", str(folder / "figures"), cache=cache)
    assert "best cell of each variant" in printed
    assert (folder / "figures" / "overview.png").stat().st_size > 10_000
    store = Store.open(path)
    final = store.final_metrics().assign(name=lambda rows: rows["split"] + "/" + rows["metric"])
    wide = final.pivot(index="trial_id", columns="name", values="value")
    return store.trials().set_index("trial_id").join(wide)


def test_fuzzy_logic_is_learnt_and_what_is_held_out_is_harder(tmp_path):
    trials = trained("sweeps/fuzzy_logic.yaml", tmp_path, "--set", "task.num_context=31", "--set", "seed=0")
    assert set(trials["status"]) == {"finished"}
    assert set(trials["model.attention"]) == {"softmax", "hyla"}
    assert (trials["valid/r2"] > 0.4).all()
    assert (trials["ood/r2"] < trials["valid/r2"]).all()
    assert trials["test/r2"].notna().all()


def test_a_language_model_learns_from_pythons_own_text(tmp_path):
    trials = trained("sweeps/language.yaml", tmp_path, "--set", "seed=0")
    assert set(trials["status"]) == {"finished"}
    assert set(trials["data.num_train"]) == {1000, 4000}
    for _, of_variant in trials.groupby("model.attention"):
        by_size = of_variant.sort_values("data.num_train")["valid/perplexity"].tolist()
        assert by_size[1] < by_size[0] < 512 / 2  # a uniform guess has the vocabulary's 512
