"""What is decided before Ray starts: where to run, and whether the resources are there."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sweeps.cluster import tune
from sweeps.spec import Resources


def refusal(resources: Resources, nodes: list[dict[str, float]]) -> str | None:
    try:
        tune._refuse_infeasible(resources, nodes, "the cluster")
    except tune.ClusterError as error:
        return str(error)
    return None


def test_one_node_must_have_everything():
    gpu_node, cpu_node = {"CPU": 4.0, "GPU": 2.0}, {"CPU": 32.0}
    assert refusal(Resources(cpu=4, gpu=2), [gpu_node, cpu_node]) is None
    assert refusal(Resources(cpu=32), [gpu_node, cpu_node]) is None
    assert refusal(Resources(cpu=1, gpu=0.25), [gpu_node]) is None
    assert refusal(Resources(cpu=0), [cpu_node]) is None
    assert refusal(Resources(cpu=8, gpu=1), [gpu_node, cpu_node]) is not None
    assert refusal(Resources(), []) is not None


def test_a_refusal_names_what_is_asked_what_there_is_and_what_to_do():
    assert refusal(Resources(cpu=8, gpu=4), [{"CPU": 16.0, "GPU": 1.0}, {"CPU": 4.0}]) == (
        "run.resources.gpu=4 for each pack, but the cluster has at most 1 GPU on one node; "
        "use --set run.resources.gpu=1 to train on that"
    )
    assert "run.resources.tpu=4 for each pack, but the cluster has at most 0 TPUs;" in refusal(
        Resources(tpu=4), [{"CPU": 16.0}]
    )


def test_where_to_run(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(tune, "_SYSTEM_TEMP", tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert tune.find_cluster("local") is None
    assert tune.find_cluster(None) is None
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        assert tune.find_cluster(None) == tune.find_cluster("auto") == tune.find_cluster(address) == address
        assert tune.find_cluster(f"ray://{address}") == f"ray://{address}"
        assert tune.find_cluster("local") is None
    assert tune.find_cluster(None) is None  # the file outlived the cluster
    with pytest.raises(tune.ClusterError, match=f"--address {address}: nothing answers there"):
        tune.find_cluster(address)
    with pytest.raises(tune.ClusterError, match="--address auto: there is no Ray cluster around"):
        tune.find_cluster("auto")
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(tune.ClusterError, match=f"RAY_ADDRESS={address}: nothing answers there"):
        tune.find_cluster(None)
    assert tune.find_cluster("local") is None


def test_folders_of_killed_drivers_are_removed(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for name in (f"hyla-run-{ended.pid}-x", f"hyla-run-{os.getpid()}-x", "hyla-run-odd", "other"):
        (tmp_path / name / "ray").mkdir(parents=True)
    tune._remove_abandoned(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [f"hyla-run-{os.getpid()}-x", "hyla-run-odd", "other"]
    )


def test_descendants_are_found_at_any_depth():
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'], stdin=sys.stdin)"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as child:
        for _ in range(100):
            found = tune._descendants(os.getpid())
            if len([pid for pid in found if pid in tune._descendants(child.pid)]) == 1:
                break
        assert child.pid in found
        assert len(tune._descendants(child.pid)) == 1
        child.stdin.close()
    assert child.pid not in tune._descendants(os.getpid())


def test_a_token_of_ones_own(tmp_path, monkeypatch):
    for name in ("MODE", "TOKEN", "TOKEN_PATH"):
        monkeypatch.delenv(f"RAY_AUTH_{name}", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "mine")
    tune._use_own_token(tmp_path)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH")
    tune._use_own_token(tmp_path)
    path = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
    assert path == tmp_path / "token"
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(path.read_text()) == 64


@pytest.mark.parametrize("length", [5, 60])
def test_ray_gets_a_short_folder(length, tmp_path_factory, monkeypatch):
    root = tmp_path_factory.mktemp("r" * length)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(root))
    with tune._temporary_folder() as folder:
        # Ray's longest socket, as of 2.60, and the limit of the strictest system.
        socket_path = folder / "ray" / "session_2026-11-30_21-53-59_972276_1234567" / "sockets" / "plasma_store"
        assert len(str(socket_path)) <= 103
        assert folder.is_dir()
    assert not folder.exists()
