"""Hands packs to Ray Tune, one Tune trial each, and lets it place them, replace lost workers and grow the cluster.

Nothing that Tune writes is read back: the store is the truth. Its own folders are temporary and go when the run ends.
"""

import contextlib
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

from sweeps import provenance
from sweeps.cluster import machine
from sweeps.cluster.trainable import PackJob, PackOutcome, run_pack
from sweeps.packs import Pack
from sweeps.spec import Resources
from sweeps.stopping import Stop

MAX_WORKERS_LOST = 3
"""How often a pack is started again after its worker was lost; errors of the training itself never get there."""

_TEMP_PREFIX = "hyla-run-"
_SYSTEM_TEMP = Path("/tmp")
_LONGEST_TEMP_ROOT = 16
"""Ray puts its sockets some 85 characters below the temporary folder, and a socket's path has at most 103."""

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the behaviour to come; unset, Ray warns about it
    "RAY_SCHEDULER_EVENTS": "0",  # the autoscaler's lines on the terminal
    "RAY_AIR_NEW_OUTPUT": "0",  # Tune's other reporter prints even when told to be silent
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # signals are ours
    "TUNE_WARN_THRESHOLD_S": "60",
}
"""Settings that Ray and Tune take from the environment of the driver."""

_OBJECT_STORE_BYTES = 200 * 2**20
"""For a Ray of our own: all that travels is a list of configs, and some containers have little shared memory."""


class ClusterError(Exception):
    """What keeps a run from starting: one line for the user."""


class Events(Protocol):
    """What the driver is told while packs run; called from the thread that runs Tune."""

    def pack_started(self, pack: Pack) -> None:
        """A worker has begun."""

    def pack_ended(self, pack: Pack, outcome: PackOutcome) -> None:
        """A worker has returned; its results are in the store."""

    def worker_lost(self, pack: Pack, reason: str, *, again: bool) -> None:
        """A worker died under its pack, which is started again or, after several times, given up for this run."""


class _Overdue(Exception):
    """Workers did not stop within the time they had."""


def find_cluster(address: str | None) -> str | None:
    """Where to run.

    Args:
      address: as the user gave it: of a cluster, `local` for a Ray of our own, or None for the cluster around, if any.

    Returns:
      The address of a cluster; None for a Ray of our own on this machine.

    Raises:
      ClusterError: nothing answers at the address given, or `auto` finds none.
    """
    if address not in (None, "auto"):
        # Ray itself would try for eight minutes.
        if address != "local" and not _answers(address):
            raise ClusterError(f"--address {address}: nothing answers there; write HOST:PORT of the cluster's head")
        return None if address == "local" else address
    around = os.environ.get("RAY_ADDRESS", "")
    if around and around not in ("auto", "local"):
        if not _answers(around):
            raise ClusterError(f"RAY_ADDRESS={around}: nothing answers there; unset it, or add --address local")
        return around
    # Written by `ray start`, and so on every node of a cluster that `ray up` started.
    for root in filter(None, [os.environ.get("RAY_TMPDIR"), tempfile.gettempdir(), str(_SYSTEM_TEMP)]):
        with contextlib.suppress(OSError):
            found = Path(root, "ray", "ray_current_cluster").read_text().strip()
            if _answers(found):
                return found
    if address == "auto":
        raise ClusterError("--address auto: there is no Ray cluster around; start one, or leave the option out")
    return None


def _answers(address: str) -> bool:
    """Whether something listens there: the file outlives a cluster that was killed."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=2):
            return True
    except (OSError, ValueError):
        return False


def check_local_resources(resources: Resources) -> None:
    """Refuses what this machine does not have, before anything is started.

    Raises:
      ClusterError: names what is asked, what there is, and how to change it.
    """
    there = {"CPU": float(machine.num_cpus())}
    for kind in ("GPU", "TPU"):
        if _request(resources)[kind]:
            there[kind] = float(machine.num_accelerators(kind))
    _refuse_infeasible(resources, [there], "this machine")


def run_packs(
    packs: Sequence[Pack],
    job: PackJob,
    resources: Resources,
    *,
    events: Events,
    stop: Stop,
    address: str | None = None,
    max_concurrent: int | None = None,
) -> str | None:
    """Trains packs on a Ray of this machine, or on the cluster at `address`, as many at once as its resources hold.

    Args:
      packs: started in this order.
      job: what every worker has to know.
      resources: what one pack occupies.
      events: told of starts and ends.
      stop: once it is requested, nothing more starts, and workers that take too long are ended.
      address: of a running cluster; None starts a Ray for this run alone.
      max_concurrent: no more packs than this at once.

    Returns:
      None, or in one line why Tune itself gave up; what was trained until then is in the store.

    Raises:
      ClusterError: the cluster cannot be reached, or no node of it has the resources.
    """
    with (
        # Ray prints what it thinks people should read, whatever it is told; stdout is ours, and may be JSON.
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        _temporary_folder() as folder,
        _ray(folder, address, stop),
    ):
        if address is not None:
            _refuse_infeasible(resources, *_cluster_nodes(address))
        if stop.requested:
            return None
        return _fit(packs, job, resources, folder, events, stop, max_concurrent)


def end_now() -> None:
    """Ends a Ray of our own without waiting for anything, and removes its folder; for a process about to exit."""
    for pid in _descendants(os.getpid()):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    for folder in Path(tempfile.gettempdir()), _SYSTEM_TEMP:
        for own in folder.glob(f"{_TEMP_PREFIX}{os.getpid()}-*"):
            # Workers end on their own once their node manager is gone, and may be writing until then.
            for _ in range(5):
                shutil.rmtree(own, ignore_errors=True)
                if not own.exists():
                    break
                time.sleep(0.1)


# --- Ray -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _temporary_folder() -> Iterator[Path]:
    """A folder for all that Ray and Tune write, removed at the end; left-overs of drivers that were killed go too."""
    root = Path(tempfile.gettempdir())
    if len(str(root)) > _LONGEST_TEMP_ROOT and _SYSTEM_TEMP.is_dir():
        root = _SYSTEM_TEMP
    _remove_abandoned(root)
    folder = Path(tempfile.mkdtemp(prefix=f"{_TEMP_PREFIX}{os.getpid()}-", dir=root))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(root: Path) -> None:
    for folder in root.glob(f"{_TEMP_PREFIX}*"):
        pid = folder.name.removeprefix(_TEMP_PREFIX).partition("-")[0]
        try:
            if folder.stat().st_uid == os.getuid() and pid.isdigit():
                os.kill(int(pid), 0)
        except ProcessLookupError:
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue


@contextlib.contextmanager
def _ray(folder: Path, address: str | None, stop: Stop) -> Iterator[None]:
    """A connection to Ray; one of our own ends with it."""
    os.environ.update(_QUIET)
    import ray

    arguments: dict[str, Any] = {
        # A snapshot of the code travels with the run, so that workers that start later run the same.
        "runtime_env": {"py_modules": [str(path) for path in provenance.package_dirs()]},
        "log_to_driver": False,
        "logging_level": logging.CRITICAL,
        "configure_logging": True,
    }
    if address is None:
        arguments |= {
            "address": "local",
            "num_cpus": machine.num_cpus(),
            "include_dashboard": False,
            "object_store_memory": _OBJECT_STORE_BYTES,
            "_temp_dir": str(folder / "ray"),
        }
        _use_own_token(folder)
        # How long Ray's helpers outlive a driver that was killed: on one machine, nothing is gained by a long wait.
        os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "15")
    else:
        arguments["address"] = address
    try:
        with _own_process_groups():
            ray.init(**arguments)
    except SystemExit:  # what Ray makes of SIGTERM
        stop.by_signal(signal.SIGTERM)
    except Exception as error:
        ray.shutdown()
        where = "Ray could not be started" if address is None else f"--address {address}: no Ray cluster answers there"
        raise ClusterError(f"{where}: {_first_line(error)}") from error
    stop.rearm()
    try:
        logging.getLogger("ray").setLevel(logging.CRITICAL)
        yield
    finally:
        ray.shutdown()


def _use_own_token(folder: Path) -> None:
    """Guards a Ray of our own by a token that is as short-lived; Ray itself would leave one in the user's home."""
    if any(f"RAY_AUTH_{name}" in os.environ for name in ("MODE", "TOKEN", "TOKEN_PATH")):
        return
    path = folder / "token"
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(path)


@contextlib.contextmanager
def _own_process_groups() -> Iterator[None]:
    """Within it, Ray's processes start in process groups of their own.

    Ray shields them from Ctrl-C, but leaves them in the driver's group: a closed terminal or a `timeout` signals that
    whole group, and the workers would be gone before they could save anything.
    """
    from ray._private import services

    original = getattr(services, "ConsolePopen", None)
    if original is None or os.name != "posix":
        yield
        return

    class OwnGroup(original):  # type: ignore[valid-type,misc]
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **{"process_group": 0, **kwargs})

    setattr(services, "ConsolePopen", OwnGroup)  # noqa: B010 (mypy refuses a plain assignment to a class)
    try:
        yield
    finally:
        setattr(services, "ConsolePopen", original)  # noqa: B010


def _descendants(pid: int) -> list[int]:
    """Processes that a process started, and that these did, where the system has /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.parent.name))
    found = list(children.get(pid, []))
    for child in found:
        found += children.get(child, [])
    return found


def _cluster_nodes(address: str) -> tuple[list[dict[str, float]], str]:
    """Resources of each node, those included that an autoscaler may add, and what to call it all."""
    import ray
    from ray._private.state import state

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    # With an autoscaler, a node type that is not running yet counts as well.
    config = state.get_cluster_config()
    groups = [] if config is None else list(config.node_group_configs)
    nodes += [{name: float(count) for name, count in group.resources.items()} for group in groups]
    return nodes, f"the cluster at {address}"


def _request(resources: Resources) -> dict[str, float]:
    return {"CPU": resources.cpu, "GPU": resources.gpu, "TPU": float(resources.tpu)}


def _refuse_infeasible(resources: Resources, nodes: Sequence[dict[str, float]], where: str) -> None:
    """A pack runs on one node, so one node must have everything; Ray itself would wait for it for ever."""
    asked = {kind: count for kind, count in _request(resources).items() if count}
    if any(all(node.get(kind, 0.0) >= count for kind, count in asked.items()) for node in nodes):
        return
    most = {kind: max((node.get(kind, 0.0) for node in nodes), default=0.0) for kind in asked}
    lacking = [kind for kind, count in asked.items() if most[kind] < count] or list(asked)
    what = " and ".join(f"run.resources.{kind.lower()}={asked[kind]:g}" for kind in lacking)
    there = " and ".join(f"{most[kind]:g} {kind}{'' if most[kind] == 1 else 's'}" for kind in lacking)
    override = " ".join(f"--set run.resources.{kind.lower()}={most[kind]:g}" for kind in lacking)
    apart = "" if len(nodes) == 1 else " on one node"
    raise ClusterError(f"{what} for each pack, but {where} has at most {there}{apart}; use {override} to train on that")


# --- Tune ------------------------------------------------------------------------------------------------------------


class _NotSaved:
    """Tune writes its settings to disk for a restore that never happens; live objects leave nothing there."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return object, ()

    def __deepcopy__(self, memo: dict) -> Self:
        return self


class _Slots(NamedTuple):
    """How many packs run at once, and how many Tune keeps waiting."""

    limit: int | None
    pending: int


def _slots(resources: Resources, num_packs: int, max_concurrent: int | None) -> _Slots:
    import ray

    there = ray.cluster_resources()
    fits = min((there.get(kind, 0.0) // count for kind, count in _request(resources).items() if count), default=1.0)
    # Tune starts workers for as many waiting trials as this. One would start them one after another, and never a
    # second one where packs are shorter than a start.
    pending = max(1, min(num_packs, int(fits), max_concurrent or num_packs))
    return _Slots(max_concurrent, pending)


def _fit(
    packs: Sequence[Pack],
    job: PackJob,
    resources: Resources,
    folder: Path,
    events: Events,
    stop: Stop,
    max_concurrent: int | None,
) -> str | None:
    slots = _slots(resources, len(packs), max_concurrent)
    os.environ["TUNE_MAX_PENDING_TRIALS_PG"] = str(slots.pending)
    from ray import tune

    class InOrder(_NotSaved, tune.search.Searcher):
        """Hands out packs one by one, in order, and none once a stop is requested."""

        def __init__(self) -> None:
            super().__init__()
            self._next = 0

        def suggest(self, trial_id: str) -> Any:
            if stop.requested or self._next == len(packs):
                return self.FINISHED
            self._next += 1
            return {"pack": self._next - 1}

        def on_trial_complete(self, trial_id: str, result: dict | None = None, error: bool = False) -> None:
            """Nothing is searched for, so nothing is learned."""

        def save(self, checkpoint_path: str) -> None:
            """Tune keeps its state as it likes; it is never restored."""

        def restore(self, checkpoint_path: str) -> None:
            """See `save`."""

    class Forward(_NotSaved, tune.Callback):
        """Tells `events` what happens to packs."""

        def on_trial_start(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
            events.pack_started(packs[trial.config["pack"]])

        def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
            outcome = PackOutcome.from_json(trial.last_result["outcome"])
            events.pack_ended(packs[trial.config["pack"]], outcome)

        def on_trial_recover(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
            events.worker_lost(packs[trial.config["pack"]], _why_lost(trial.error_file), again=True)

        def on_trial_error(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
            events.worker_lost(packs[trial.config["pack"]], _why_lost(trial.error_file), again=False)

        def on_step_end(self, iteration: int, trials: list, **info: Any) -> None:
            if stop.overdue:
                raise _Overdue

    def train_pack(config: dict[str, int], packs: Sequence[Pack], job: PackJob) -> dict[str, str]:
        outcome = run_pack(packs[config["pack"]], job)
        return {"outcome": outcome.to_json()}

    bundle = {kind: count for kind, count in _request(resources).items() if count}
    trainable = tune.with_resources(
        tune.with_parameters(train_pack, packs=tuple(packs), job=job),
        tune.PlacementGroupFactory([bundle or {"CPU": 0.0}]),
    )
    tuner = tune.Tuner(
        trainable,
        tune_config=tune.TuneConfig(
            search_alg=InOrder(), num_samples=len(packs), max_concurrent_trials=slots.limit, reuse_actors=True
        ),
        run_config=tune.RunConfig(
            name="packs",
            storage_path=str(folder / "tune"),
            verbose=0,
            callbacks=[Forward()],
            failure_config=tune.FailureConfig(max_failures=MAX_WORKERS_LOST),
        ),
    )
    try:
        tuner.fit()
    except Exception as error:
        # A full disk, for one, breaks Tune's own bookkeeping after the packs have been dealt with.
        return None if stop.overdue else f"Ray Tune gave up: {_first_line(error)}"
    return None


def _why_lost(error_file: str | None) -> str:
    """What Tune's account of a lost worker comes down to."""
    try:
        text = Path(error_file or "").read_text().rpartition("Failure #")[2]
    except OSError:
        return "its process died"
    if "low on memory" in text:
        return "its machine ran low on memory"
    if re.search(r"node (has )?died|node failure", text, re.IGNORECASE):
        return "its machine is gone"
    if "runtime_env" in text or "runtime environment" in text:
        return "the code could not be set up for it: " + text.partition("\n")[2].strip().partition("\n")[0]
    return "its process died"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
