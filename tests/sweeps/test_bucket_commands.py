"""Every command that takes a store, with one in a bucket."""

import json
import os
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest
from fake_training import SWEEP, FakeTrain, write_sweep
from s3_server import BUCKET, S3Server, answer

from analysis import scaling
from sweeps.__main__ import main
from sweeps.store import Store, equal_tables, object_place

_numbers = count()


@pytest.fixture
def url(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(object_place, "MIN_CLAIM_WAIT_S", 0.01)
    monkeypatch.setattr(object_place, "AWAY_FOR_S", 0.2)
    return f"s3://{BUCKET}/jobs/{next(_numbers)}"


def small_sweep(folder: Path, peak_lrs: str = "[1e-3, 2e-3]") -> str:
    """Two trials, one pack, for each learning rate."""
    return str(write_sweep(folder, SWEEP.replace("[1e-3, 2e-3, 3e-3, 4e-3]", peak_lrs)))


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> FakeTrain:
    fake = FakeTrain()
    monkeypatch.setattr("hyla_core.train.train", fake)
    # What a run sets for its own process should not outlive the test.
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", os.environ.get("JAX_COMPILATION_CACHE_DIR", ""))
    return fake


def test_a_sweep_goes_into_a_bucket_as_into_a_folder(
    train: FakeTrain, url: str, tmp_path: Path, server: S3Server, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    sweep = small_sweep(tmp_path)
    assert main(["plan", sweep, "--results", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_new"] == 4
    assert main(["run", sweep, "--results", url, "--in-process"]) == 0
    assert main(["run", sweep, "--results", str(tmp_path / "local"), "--in-process"]) == 0
    assert equal_tables(Store.open(tmp_path / "local"), Store.open(url)) == []
    assert len(train.calls) == 4
    printed = capsys.readouterr().out
    assert f"4 of 4 trials are in {url}" in printed

    monkeypatch.setenv("HYLA_STORE", url)
    assert main(["run", sweep, "--in-process"]) == 0
    assert "nothing to train" in capsys.readouterr().out
    assert len(train.calls) == 4
    assert main(["plan", sweep, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_new"] == 0
    assert main(["status"]) == 0
    assert "4 trials: 4 finished" in capsys.readouterr().out
    (trial_id, *_) = Store.open(url).finished()
    assert main(["show", url, trial_id, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["trial_id"], shown["status"]) == (trial_id, "finished")
    assert scaling.main(["--out", str(tmp_path / "figures")]) == 1  # the stand-in for training evaluates nothing
    assert capsys.readouterr().err.startswith(f"{url}: sweep toy has no finished trial yet (4 finished without")

    prefix = url.removeprefix(f"s3://{BUCKET}/")
    # A working tree that differs from its commit adds a file that says how.
    objects = [path for path in server.objects(prefix) if not path.startswith(f"{prefix}/diffs/")]
    # A row and the metrics of each trial, two requests; no claim, no checkpoint, nothing half done.
    assert len(objects) == 2 * 4 + 2
    assert {path.removeprefix(f"{prefix}/").partition("/")[0] for path in objects} == {"metrics", "sweeps", "trials"}


def test_a_training_goes_on_where_it_was_interrupted(train: FakeTrain, url: str, tmp_path: Path, monkeypatch) -> None:
    sweep = small_sweep(tmp_path, "[1e-3]")

    def stop(configs: object, step: int) -> None:
        if step == 15 and len(train.calls) == 1:
            raise MemoryError

    train.at_step = stop
    assert main(["run", sweep, "--results", url, "--in-process"]) == 3
    assert main(["run", sweep, "--results", url, "--in-process"]) == 0
    assert any(step > 0 for call in train.calls for step in call.values())
    train.at_step = lambda configs, step: None
    assert main(["run", sweep, "--results", str(tmp_path / "local"), "--in-process"]) == 0
    assert equal_tables(Store.open(tmp_path / "local"), Store.open(url)) == []


@pytest.mark.parametrize(
    "command", [["run", "SWEEP", "--in-process", "--results"], ["plan", "SWEEP", "--results"], ["status"], ["show"]]
)
def test_a_bucket_that_is_closed_is_one_line(
    command: list[str], url: str, server: S3Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = small_sweep(tmp_path, "[1e-3]")
    server.fault = answer("403 Forbidden", "AccessDenied", "")
    arguments = [sweep if word == "SWEEP" else word for word in command]
    assert main([*arguments, url, *(["ab"] if command == ["show"] else [])]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(url)
    assert "access denied; the credentials of the environment" in line
    server.fault = None
    assert server.objects(url.removeprefix(f"s3://{BUCKET}/")) == []


def test_a_store_that_is_away_for_a_while_does_not_end_a_training(
    train: FakeTrain, url: str, server: S3Server, tmp_path: Path
) -> None:
    sweep = small_sweep(tmp_path, "[1e-3]")

    def away(configs: object, step: int) -> None:
        # From step 5 to the end of the first pack's training nothing can be written.
        if len(train.calls) == 1:
            server.fault = (
                None if step == 20 else answer("403 Forbidden", "AccessDenied", "") if step == 5 else server.fault
            )

    train.at_step = away
    assert main(["run", sweep, "--results", url, "--in-process"]) == 0
    assert main(["run", sweep, "--results", str(tmp_path / "local"), "--in-process"]) == 0
    assert equal_tables(Store.open(tmp_path / "local"), Store.open(url)) == []


@pytest.mark.slow
def test_a_real_training_goes_into_a_bucket_as_into_a_folder(server: S3Server, tmp_path: Path, capsys) -> None:
    sweep = small_sweep(tmp_path, "[1e-3]")
    url = f"s3://{BUCKET}/jobs/{next(_numbers)}"
    for where in (url, str(tmp_path / "local")):
        command = [sys.executable, "-m", "sweeps", "run", sweep, "--results", where, "--in-process"]
        subprocess.run(command, check=True, timeout=600, stdout=subprocess.DEVNULL)
    assert equal_tables(Store.open(tmp_path / "local"), Store.open(url)) == []
    assert len(Store.open(url).finished()) == 2
    capsys.readouterr()
    assert scaling.main([url, "--out", str(tmp_path / "figures"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["store"] == url
