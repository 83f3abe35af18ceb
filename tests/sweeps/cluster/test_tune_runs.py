"""Whole runs through Ray, disturbed in every way a machine knows, against an undisturbed one."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sweeps.store import Store, equal_tables

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

SWEEP = """\
name: small
task: {name: sraven, num_features: 1, num_values: 4, permute_features: false}
data: {num_train: 4096, num_steps: 12000, num_valid: 64, num_ood: 64}
model: {attention: softmax, emb_dim: 8, num_heads: 2, num_layers: 1, qk_dim: 8, v_dim: 8, mlp_dim: 8}
optim: {name: adamw, batch_size: 8, weight_decay: 0.1, warmup_steps: 10}
axes:
  optim.peak_lr: [1e-3, 3e-3, 1e-2]
  seed: [0, 1]
run: {num_logs: 40, num_evals: 4, max_pack_size: 2, checkpoint_every_s: 1}
"""

PATIENCE_S = 180


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.2)


def session_members(session: int) -> list[int]:
    """Processes that a run started, Ray's included: they stay in its session, whatever their groups and parents."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, found = stat.read_text().rpartition(")")[2].split()[:4]
            if int(found) == session and state != "Z":
                members.append(int(stat.parent.name))
    return members


class Run:
    """A run command in a session of its own."""

    def __init__(self, folder: Path, *options: str):
        self.folder = folder
        self.home, self.cwd = folder / "home", folder / "cwd"
        self.home.mkdir(exist_ok=True)
        self.cwd.mkdir(exist_ok=True)
        self.output = (folder / "output.txt").open("a+")
        command = [sys.executable, "-m", "sweeps", "run", str(folder / "small.yaml"), "--address", "local"]
        self.process = subprocess.Popen(
            [*command, "--results", str(folder / "store"), *options],
            cwd=self.cwd,
            env={
                **os.environ,
                "HOME": str(self.home),
                "PYTHONPATH": str(Path(__file__).parents[3]),
                "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            },
            stdout=self.output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            # The tests may run under nohup, whose children inherit that SIGHUP is ignored, and would honour it.
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        )
        self.pid = self.process.pid

    def wait_until_training(self, store: Store) -> None:
        """Until two trials have trained for some steps."""

        def training() -> bool:
            assert self.process.poll() is None, self.text()
            return sum("steps_per_s" in claim.progress for claim in store.claims() if claim.alive) >= 2

        wait_for(training, "training")

    def ends_with(self) -> int:
        return self.process.wait(PATIENCE_S)

    def text(self) -> str:
        self.output.seek(0)
        return self.output.read()

    def left_nothing(self) -> None:
        wait_for(lambda: not session_members(self.pid), "processes to end")
        for root in {tempfile.gettempdir(), "/tmp"}:
            assert list(Path(root).glob(f"hyla-run-{self.pid}-*")) == []
        assert list(self.cwd.iterdir()) == []
        assert list(self.home.iterdir()) == []

    def clean_up(self) -> None:
        for pid in session_members(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.output.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    (tmp_path / "small.yaml").write_text(SWEEP)
    runs: list[Run] = []

    def start(*options: str) -> Run:
        runs.append(Run(tmp_path, *options))
        return runs[-1]

    yield start
    for run in runs:
        run.clean_up()


def test_a_disturbed_sweep_equals_an_undisturbed_one(start, tmp_path):
    undisturbed = start("--results", str(tmp_path / "undisturbed"), "--in-process")
    assert undisturbed.ends_with() == 0, undisturbed.text()
    store = Store.create(tmp_path / "store")

    # Ctrl-C: the terminal signals the whole process group.
    run = start()
    run.wait_until_training(store)
    os.killpg(run.pid, signal.SIGINT)
    asked = time.monotonic()
    assert run.ends_with() == 128 + signal.SIGINT, run.text()
    assert time.monotonic() - asked < 30
    run.left_nothing()
    interrupted = [state for state in store.statuses().values() if state.status == "interrupted"]
    assert len(interrupted) >= 2
    assert "to continue: python -m sweeps run" in run.text()

    # A closed terminal, which reaches the whole group as well.
    run = start()
    run.wait_until_training(store)
    os.killpg(run.pid, signal.SIGHUP)
    assert run.ends_with() == 128 + signal.SIGHUP, run.text()
    run.left_nothing()

    # The driver killed: nothing can be said or tidied, and the processes it started end by themselves.
    run = start()
    run.wait_until_training(store)
    os.kill(run.pid, signal.SIGKILL)
    run.ends_with()
    wait_for(lambda: not session_members(run.pid), "orphans to end")
    killed_folder = f"hyla-run-{run.pid}-*"

    # A worker killed: its pack goes on in another one.
    run = start()
    victims = []

    def saved() -> bool:
        rows = set(store.trials(raw=True)[["trial_id", "attempt"]].itertuples(index=False, name=None))
        victims[:] = [claim for claim in store.claims() if claim.alive and (claim.trial_id, claim.attempt) in rows]
        return bool(victims)

    wait_for(saved, "an attempt with rows")
    victim = victims[0]
    os.kill(victim.pid, signal.SIGKILL)
    assert run.ends_with() == 0, run.text()
    assert "lost the worker of" in run.text()
    run.left_nothing()
    assert list(Path("/tmp").glob(killed_folder)) == []

    attempts = store.trials(raw=True)
    assert attempts["start_step"].max() > 0
    assert attempts.query("trial_id == @victim.trial_id")["status"].tolist()[-2:] == ["interrupted", "finished"]
    assert list((store.path / "claims").iterdir()) == []
    assert list((store.path / "checkpoints").iterdir()) == []
    assert equal_tables(store, Store.open(tmp_path / "undisturbed")) == []


def test_a_second_signal_ends_at_once(start, tmp_path):
    store = Store.create(tmp_path / "store")
    run = start()
    run.wait_until_training(store)
    run.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    run.process.send_signal(signal.SIGINT)
    asked = time.monotonic()
    assert run.ends_with() in (128 + signal.SIGINT, 128 + signal.SIGTERM)
    assert time.monotonic() - asked < 5
    run.left_nothing()
