"""The benchmark of training steps: what it compares with learns the same, and the script tells what it found."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.plain_loop import VARIANTS, PlainLoop
from benchmarks.steps import CASES, config_of
from hyla_core.config import Cadence, TrainConfig
from hyla_core.train import train

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "steps.py"
SMALL = {"emb_dim": 16, "num_heads": 4, "num_layers": 2, "qk_dim": 8, "v_dim": 8, "mlp_dim": 16}
NUM_STEPS = 6


def small(attention: str) -> TrainConfig:
    """Without dropout, whose masks the two draw from different keys."""
    fields = config_of(f"sraven/{attention}", dropout=0).model_dump()
    fields["task"] |= {"num_features": 2}
    fields["model"] |= SMALL
    fields["data"] |= {"num_steps": NUM_STEPS, "num_train": 1000}
    fields["optim"] |= {"batch_size": 16, "warmup_steps": 2, "peak_lr": 1e-2}
    return TrainConfig.model_validate(fields)


@pytest.mark.slow
@pytest.mark.parametrize("attention", VARIANTS)
def test_the_plain_loop_has_our_losses(attention):
    config = small(attention)
    rows = []
    train([config], lambda report: rows.extend(report.rows), cadence=Cadence(num_logs=NUM_STEPS, num_evals=1))
    ours = [row.value for row in rows if (row.split, row.metric) == ("train", "loss")]
    # Sums in another order, which six steps of Adam scale up.
    assert PlainLoop(config).run(NUM_STEPS) == pytest.approx(ours, rel=1e-4)
    assert len(ours) == NUM_STEPS


def test_the_plain_loop_refuses_what_it_does_not_have():
    with pytest.raises(ValueError, match="'hyla_gated': the plain loop has"):
        PlainLoop(small("hyla_gated"))


def test_every_case_is_a_training():
    assert {config_of(case).model.attention for case in CASES} == set(VARIANTS)


@pytest.mark.slow
def test_the_script_measures_and_writes_what_it_found(tmp_path):
    out = tmp_path / "new" / "steps.json"
    options = ["--cases", "logic16/linear", "--rounds", "1", "--round-s", "0.1", "--out", str(out), "--json"]
    command = [sys.executable, str(SCRIPT), *options]
    printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    (case,) = json.loads(out.read_text())["cases"]
    assert [json.loads(text) for text in printed.splitlines()] == [case]
    assert case["name"] == "logic16/linear"
    assert case["ratio"] == pytest.approx(case["plain_step_s"] / case["ours_step_s"], rel=0.05)
    for side in ("plain", "ours"):
        assert case[f"{side}_peak_mem_bytes"] > 2**27
        assert case[f"{side}_compile_s"] > 0
        assert 0 < case[f"{side}_utilisation"] < 1
