"""`compact` and `repair` on the command line: what they print, and with which status they end."""

import json

import pytest
from fake_training import FakeTrain, write_sweep

from sweeps.__main__ import main
from sweeps.store import Store


@pytest.fixture
def store(monkeypatch, tmp_path, capsys) -> Store:
    """Eight trials of the fake training."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    monkeypatch.setattr("hyla_core.train.train", FakeTrain())
    assert main(["run", str(write_sweep(tmp_path)), "--in-process", "--results", str(tmp_path / "store")]) == 0
    capsys.readouterr()
    return Store.open(tmp_path / "store")


def call(capsys, *arguments: object) -> tuple[int, list[str], list[str]]:
    status = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return status, out.splitlines(), err.splitlines()


def test_a_store_is_compacted(store, capsys):
    path = store.path
    assert call(capsys, "compact", path, "--grace", "0s") == (
        0,
        [
            "trials: 8 files merged into 1 file, 8 rows",
            "metrics: 8 files merged into 1 file, 32 rows",
            f"to delete 16 replaced files: python -m sweeps compact {path} --grace 0s",
        ],
        [],
    )
    assert call(capsys, "compact", path, "--grace", "0s")[1] == [
        "trials: 8 replaced files deleted",
        "metrics: 8 replaced files deleted",
    ]
    assert call(capsys, "compact", path)[:2] == (0, [f"{path}: nothing to compact"])
    assert len(store.finished()) == 8
    status, out, _ = call(capsys, "compact", path, "--json")
    assert status == 0
    assert json.loads(out[0])


def test_damage_is_found_told_and_set_aside(store, tmp_path, capsys):
    path = store.path
    part = next((path / "metrics").iterdir())
    trial_id = part.name.partition("-")[0]
    part.write_bytes(part.read_bytes()[:-3])
    status, _, err = call(capsys, "compact", path)
    assert status == 1
    assert "its checksum does not match" in err[0]
    assert err[-1].endswith(f"python -m sweeps repair {path}")
    status, out, _ = call(capsys, "repair", path, "--dry-run")
    assert status == 1
    assert part.exists()
    assert out[-1] == f"to do it: python -m sweeps repair {path}"
    status, out, _ = call(capsys, "repair", path)
    assert status == 1
    assert any(f"trial {trial_id}" in line for line in out)
    assert out[-1] == f"to train again what is missing: python -m sweeps run SWEEP.yaml --results {path}"
    assert call(capsys, "repair", path)[0] == 0
    assert main(["run", str(tmp_path / "toy.yaml"), "--in-process", "--results", str(path)]) == 0
    assert "1 trained now" in capsys.readouterr().out
    assert len(store.finished()) == 8


@pytest.mark.parametrize("command", ["compact", "repair"])
def test_what_is_no_store_is_one_line(command, tmp_path, capsys):
    status, out, err = call(capsys, command, tmp_path / "nowhere")
    assert (status, out) == (2, [])
    assert err == [f"{tmp_path / 'nowhere'}: no such folder; give the folder of a results store"]


@pytest.mark.parametrize("text", ["x", "-1s", "10 parsecs", ""])
def test_a_wrong_grace_time_is_one_line(text, tmp_path, capsys):
    status, _, err = call(capsys, "compact", tmp_path, f"--grace={text}")
    assert status == 2
    assert len(err) == 1
    assert "--grace" in err[0]
