"""What a worker does with one pack: claims its trials, goes on from their checkpoints, trains, writes and seals.

Idempotent: whoever runs a pack, and however often, finished trials stay, and the others go on from where the store
has them. Errors of the training end up in the store; none leaves `run_pack`. This module imports neither jax nor ray,
so that what JAX reads from the environment can be set before it is imported.
"""

import contextlib
import errno
import functools
import json
import math
import os
import resource
import socket
import stat
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hyla_core import counts
from hyla_core.config import Cadence, TrainConfig
from sweeps import provenance
from sweeps.packs import Pack
from sweeps.spec import Resources
from sweeps.store import FINAL, AttemptWriter, Beginning, Ending, Store, StoreError, seal_all
from sweeps.store.schema import DISK_FULL, OUT_OF_MEMORY

if TYPE_CHECKING:
    from hyla_core.sharded_checkpoint import ShardedState
    from hyla_core.train import MemberProgress, Report

STOP_POLL_S = 1.0
"""The store is asked whether to stop at most this often."""

REMOTE_STOP_POLL_S = 5.0
"""The same where the store is in a bucket: each look is a request."""

ENVIRONMENT_ERRORS = (OUT_OF_MEMORY, DISK_FULL)
"""How errors begin that another machine, or the same one later, may not have: the next run tries these trials again."""


class PackJob(NamedTuple):
    """What a worker must know besides its pack; the same for all packs of a run."""

    store: str  # absolute path
    run_id: str
    cadence: Cadence
    keep_checkpoints: bool
    resources: Resources
    provenance: Mapping[str, Any]  # columns that the driver knows
    model_parallel: int | None = None  # devices that share a model; None: as few as its state needs
    retry: frozenset[str] = frozenset()  # trials to train again although the store has a result


class PackWork(NamedTuple):
    """What a pack cost its worker."""

    worker: str  # host:pid
    wall_s: float  # all of `run_pack`
    cpu_s: float  # the same in processor time, all threads of the process together
    train_s: float  # of that in the training itself: compilation and what is written to the store aside
    compile_s: float
    num_compiled: int  # training steps that were compiled
    num_loaded: int  # training steps that came compiled from the machine's cache


class PackOutcome(NamedTuple):
    """How a pack ended. What happened is in the store; this says it to the driver without a look there."""

    statuses: dict[str, str]  # trial_id → finished, diverged, failed, interrupted; `left` where nothing was done
    error: str | None = None  # one line: of the failed trials, or why the pack could not be worked on
    work: PackWork | None = None  # None where nothing was trained

    def to_json(self) -> str:
        """As text; `from_json` is the way back."""
        return json.dumps({**self._asdict(), "work": None if self.work is None else self.work._asdict()})

    @classmethod
    def from_json(cls, text: str) -> "PackOutcome":
        """The outcome that `to_json` wrote."""
        fields = json.loads(text)
        work = fields.pop("work")
        return cls(**fields, work=None if work is None else PackWork(**work))


def run_pack(pack: Pack, job: PackJob, should_stop: Callable[[], bool] = lambda: False) -> PackOutcome:
    """Trains what is left of a pack.

    Args:
      pack: the trials.
      job: store, run and settings.
      should_stop: asked now and then, besides the store; once true, trials are saved and left `interrupted`.

    Returns:
      How each trial ended. Raises nothing but what ends the process.
    """
    left = {trial.trial_id: "left" for trial in pack.trials}
    try:
        if (here := provenance.loaded_code_hash()) != job.provenance["code_hash"]:
            wanted = job.provenance["code_hash"]
            return PackOutcome(left, f"this worker runs code {here}, not {wanted} as the run; restart the cluster")
        prepare_jax(job.resources)
        store = _store(job.store)
        stopping = _Stopping(store, job.run_id, should_stop)
        return PackOutcome(left) if stopping() else _PackRun(store, pack, job, stopping).run()
    except Exception as error:
        # Nothing has been trained: the store cannot be reached, or an import failed. That is no result of a trial.
        return PackOutcome(left, one_line(error))


def prepare_jax(resources: Resources) -> None:
    """Sets what JAX reads when it is first imported or first used in this process.

    Args:
      resources: what a pack of this run occupies.
    """
    if not resources.gpu and not resources.tpu:
        # Ray leaves all GPUs visible to those who asked for none, and JAX would take them.
        os.environ["JAX_PLATFORMS"] = "cpu"
    elif 0 < resources.gpu < 1:
        # Several workers share a GPU; by default each would reserve three quarters of its memory.
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{0.9 * resources.gpu:.3f}")
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ and (folder := compilation_cache()) is not None:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def compilation_cache(root: Path | None = None) -> Path | None:
    """This machine's folder for compiled programs, created if absent; None where it cannot be used.

    One per machine, since programs are compiled for its processor, and per user, since what lies there is executed.
    """
    folder = (Path(tempfile.gettempdir()) if root is None else root) / f"hyla-compiled-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    others_write = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or others_write or not os.access(folder, os.W_OK):
        return None
    return folder


class _Stopping:
    """Whether this run should stop: asked by the process itself, or by anyone through the store."""

    def __init__(self, store: Store, run_id: str, should_stop: Callable[[], bool]):
        self._store, self._run_id, self._should_stop = store, run_id, should_stop
        self._asked, self._stop = float("-inf"), False
        self._poll_s = REMOTE_STOP_POLL_S if store.place.is_remote else STOP_POLL_S

    def __call__(self) -> bool:
        if not self._stop and time.monotonic() - self._asked >= self._poll_s:
            # A store that gives no answer for a while is no reason to end a training.
            with contextlib.suppress(OSError):
                self._stop = self._store.stop_requested(self._run_id)
            self._asked = time.monotonic()
        return self._stop or self._should_stop()


@functools.lru_cache(maxsize=4)
def _store(path: str) -> Store:
    """Kept between the packs of one worker: a store remembers which attempts it has read."""
    return Store.open(path)


class _PackRun:
    """One try at a pack."""

    def __init__(self, store: Store, pack: Pack, job: PackJob, stopping: Callable[[], bool]):
        self._store, self._pack, self._job, self._stopping = store, pack, job, stopping
        self._statuses = {trial.trial_id: "left" for trial in pack.trials}
        self._configs: dict[str, TrainConfig] = {}  # of the trials that were claimed
        self._writers: dict[str, AttemptWriter] = {}  # of those that have not ended
        self._begun = (time.perf_counter(), time.process_time())
        self._started = time.perf_counter()
        self._compile_s = 0.0
        self._written_s = 0.0  # spent in `_take`
        self._work: PackWork | None = None

    def run(self) -> PackOutcome:
        """Trains what can be claimed."""
        try:
            resume_from = self._begin()
            if not self._writers:
                return PackOutcome(self._statuses)
            # Imported only now: prepare_jax comes first, and a pack without work needs no JAX.
            from hyla_core.checkpoint import DamagedCheckpoint

            _reset_peak_memory()
            while True:
                try:
                    self._train(resume_from)
                    return PackOutcome(self._statuses, work=self._measured())
                except DamagedCheckpoint as error:
                    # Its bytes are whole, but of another training: code changed that should have raised
                    # RESULTS_VERSION. The others of the pack go on from theirs.
                    if error.trial_id not in resume_from:
                        raise
                    del resume_from[error.trial_id]
                    self._start_afresh(error.trial_id)
        except Exception as error:
            return self._fail(error)
        finally:
            # A claim counts as alive for as long as somebody here holds its writer.
            self._writers.clear()

    def _train(self, resume_from: "Mapping[str, bytes | Path]") -> None:
        from hyla_core.train import num_compilations, num_loaded, train

        compiled, loaded = num_compilations(), num_loaded()
        self._started = time.perf_counter()
        self._written_s = 0.0
        train(
            list(self._configs.values()),
            self._take,
            cadence=self._job.cadence,
            resume_from=resume_from,
            should_stop=self._stopping,
            final_checkpoints=self._job.keep_checkpoints,
            model_parallel=self._job.model_parallel,
        )
        loaded = num_loaded() - loaded
        self._work = PackWork(
            worker=f"{socket.gethostname()}:{os.getpid()}",
            wall_s=0.0,
            cpu_s=0.0,
            train_s=time.perf_counter() - self._started - self._compile_s - self._written_s,
            compile_s=self._compile_s,
            num_compiled=num_compilations() - compiled - loaded,
            num_loaded=loaded,
        )

    def _measured(self) -> PackWork | None:
        """What the pack has cost until now."""
        wall, cpu = self._begun
        return self._work and self._work._replace(wall_s=time.perf_counter() - wall, cpu_s=time.process_time() - cpu)

    def _start_afresh(self, trial_id: str) -> None:
        self._store.clear_checkpoints(trial_id)
        self._writers[trial_id].update(start_step=0)

    def _begin(self) -> dict[str, bytes | Path]:
        """Claims the trials that have no result and that nobody else works on.

        Returns:
          Their checkpoints, by trial_id.
        """
        states = self._store.statuses({trial.trial_id for trial in self._pack.trials})
        facts = {**self._job.provenance, **provenance.of_worker()}
        facts |= {"run_id": self._job.run_id, "pack_id": self._pack.pack_id}
        facts |= {"num_logs": self._job.cadence.num_logs, "num_evals": self._job.cadence.num_evals}
        resume_from: dict[str, bytes | Path] = {}
        beginnings = []
        for trial in self._pack.trials:
            state = states.get(trial.trial_id)
            # A pack that lost its worker comes here twice: what this run has trained again is not to be repeated.
            again = trial.trial_id in self._job.retry and state is not None and state.run_id != self._job.run_id
            if state is not None and state.status in FINAL and not again:
                self._statuses[trial.trial_id] = state.status
                continue
            if again and state is not None and state.status in FINAL:
                # What was kept of the finished training would leave nothing to train.
                self._store.clear_checkpoints(trial.trial_id)
            # The checkpoint comes before the claim: an attempt that died in between, and said that it starts from
            # step 0, would take the rows of those before it out of the count.
            step, data = _newest_whole(self._store.load_checkpoints(trial.trial_id))
            flat, counted = trial.config.flat(), _counts(trial.config)
            beginnings.append(Beginning(trial.trial_id, flat, step, trial.config.data.num_steps, counted))
            if data is not None:
                resume_from[trial.trial_id] = data
        configs = {trial.trial_id: trial.config for trial in self._pack.trials}
        for trial_id, writer in self._store.begin_all(beginnings, facts).items():
            if writer is not None:
                self._writers[trial_id], self._configs[trial_id] = writer, configs[trial_id]
        resume_from = {trial_id: data for trial_id, data in resume_from.items() if trial_id in self._writers}
        for writer in self._writers.values():
            writer.update(pack_size=len(self._writers))
        return resume_from

    def _take(self, report: "Report") -> None:
        """Writes what `train` reports: rows, then the checkpoints that rely on them, then the ends of members."""
        started = time.perf_counter()
        self._compile_s = report.compile_s
        for row in report.rows:
            self._writers[row.trial_id].add([(row.step, row.split, row.metric, row.value)])
        open_members = [member for member in report.progress if member.trial_id in self._writers]
        for member in open_members:
            writer = self._writers[member.trial_id]
            if member.status == "running":
                loss = member.loss if math.isfinite(member.loss) else None
                writer.heartbeat(
                    step=member.step, num_steps=member.num_steps, loss=loss, steps_per_s=report.steps_per_s
                )
            else:
                writer.reach(member.step)
            if member.trial_id in report.checkpoints:
                self._save(member, report.checkpoints[member.trial_id])
        if ended := [member for member in open_members if member.status != "running"]:
            self._end(ended)
        self._written_s += time.perf_counter() - started

    def _save(self, member: "MemberProgress", data: "bytes | ShardedState") -> None:
        """Saves a checkpoint, unless the rows before it cannot be written: a resumed run would not repeat them."""
        # A disk that is full now may not be so later; until then the training goes on without checkpoints. That of a
        # finished member was asked to stay: without it, the trial does not count as finished.
        must = member.status == "finished"
        if self._writers[member.trial_id].flush():
            try:
                self._store.save_checkpoint(
                    member.trial_id, member.step, data if isinstance(data, bytes) else data.write
                )
            except StoreError:
                if must:
                    raise
        elif must:
            raise StoreError(f"the rows of trial {member.trial_id} that belong to its last checkpoint can't be written")

    def _end(self, members: "Sequence[MemberProgress]") -> None:
        """Seals attempts with all that is known of them; those with a result need no checkpoints any more."""
        train_s = time.perf_counter() - self._started - self._compile_s
        facts = {"compile_s": self._compile_s, "train_s": train_s}
        facts |= _devices(list(self._configs.values()), self._job.model_parallel)
        facts["device_s"] = train_s * facts["num_devices"] / len(self._configs)
        endings = []
        for trial_id, step, _, _, status in members:
            why = f"the loss was not finite at step {step}" if status == "diverged" else None
            seen = step * self._configs[trial_id].optim.batch_size
            endings.append(Ending(self._writers[trial_id], status, why, {**facts, "examples_seen": seen}))
        try:
            seal_all(endings)
        finally:
            for member in members:
                if self._writers[member.trial_id].sealed:
                    self._statuses[member.trial_id] = member.status
                    del self._writers[member.trial_id]
        for member in members:
            if member.status in FINAL and not self._job.keep_checkpoints:
                self._store.clear_checkpoints(member.trial_id)

    def _fail(self, error: Exception) -> PackOutcome:
        """Ends what is still open. A store that cannot be written is no result of a trial, everything else is."""
        line = describe(error)
        status = "interrupted" if line.startswith(DISK_FULL) or isinstance(error, StoreError) else "failed"
        detail = "".join(traceback.format_exception(error))
        for folder in provenance.package_dirs():
            # Workers run a copy of the code in some temporary folder.
            detail = detail.replace(f"{folder.parent}{os.sep}", "")
        for trial_id, writer in list(self._writers.items()):
            with contextlib.suppress(StoreError, OSError):
                writer.seal(status, f"{line}\n{detail}")
                self._statuses[trial_id] = status
        return PackOutcome(self._statuses, line)


def _newest_whole(checkpoints: Iterator[tuple[int, bytes | Path]]) -> tuple[int, bytes | Path | None]:
    """Step and bytes, or folder, of the first checkpoint that is whole; step 0 where there is none."""
    for _, data in checkpoints:
        from hyla_core import checkpoint, sharded_checkpoint

        with contextlib.suppress(checkpoint.DamagedCheckpoint):
            if isinstance(data, Path):
                return sharded_checkpoint.read_step(data), data
            return checkpoint.read_step(data), data
    return 0, None


def _counts(config: TrainConfig) -> dict[str, float]:
    """What is known of a training before it starts. Columns of the trials table."""
    flops = float(counts.train_flops_per_example(config))  # beyond 2⁵³ whole numbers fit no column
    return {
        "num_params": sum(counts.num_params(config).values()),
        "num_non_embedding_params": counts.num_non_embedding_params(config),
        "train_flops_per_example": flops,
        "train_flops": flops * config.optim.batch_size * config.data.num_steps,
    }


# --- errors ----------------------------------------------------------------------------------------------------------


def describe(error: BaseException) -> str:
    """An error in one line, by which the same errors can be grouped and known ones recognised."""
    line = one_line(error)
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
        return f"{OUT_OF_MEMORY}: {line}; lower run.max_pack_size, or ask for more in run.resources"
    if any(isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT) for cause in _causes(error)):
        return f"{DISK_FULL}: {line}"
    return line


def one_line(error: BaseException) -> str:
    """Kind and first line of an error."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


# --- measurements ----------------------------------------------------------------------------------------------------


def _devices(configs: Sequence[TrainConfig], model_parallel: int | None) -> dict[str, Any]:
    """What a pack trains on, and the most memory that was in use at once there since `_reset_peak_memory`.

    Args:
      configs: the members.
      model_parallel: devices that share a model, if the run says so.
    """
    import jax

    from hyla_core.train import pack_layout

    devices = jax.local_devices()
    used = devices[: pack_layout(configs, devices, model_parallel=model_parallel).num_devices]
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in used]
    return {
        "device_kind": used[0].device_kind,
        "num_devices": len(used),
        "platform_version": provenance.in_one_line(used[0].client.platform_version),
        "peak_mem_bytes": sum(peaks) or _peak_host_memory(),
    }


def _reset_peak_memory() -> None:
    """Restarts Linux's count of the process's peak memory; without it, a pack would inherit that of those before."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak_host_memory() -> int:
    """Bytes of memory that this process held at most."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
