"""The results store: the one reader and writer of trials, metrics, sweeps, claims and checkpoints.

    store = Store.create("results")
    writer = store.begin(config.trial_id, config.flat(), {"run_id": "r1"}, start_step=0, num_steps=1000, counts={})
    writer.add([(1000, "valid", "loss", 0.25)]); writer.seal("finished")
    Store.open("results").final_metrics()  # a DataFrame: trial_id, attempt, step, split, metric, value

A store is a folder:

    trials/<trial_id>-<attempt>.parquet     one row per attempt
    metrics/<trial_id>-<attempt>.parquet    one row per (step, split, metric)
    sweeps/<request_id>.parquet             one row per trial that a request asked for
    claims/<trial_id>-<attempt>.json        who works on what; the one mutable folder
    checkpoints/<trial_id>/<step>.ckpt      the last two; removed when the trial is finished

Every file appears whole or not at all: it is written under a name that starts with a dot, flushed to the disk and
renamed. An attempt that runs owns one live part per table, replaced whole; a part whose attempt has ended is sealed and
never changes again. A part that can't be read is passed over and named in `Store.damaged`.

Which rows count (the clean view): of a trial's attempts a finished or diverged one wins, else the latest; of the
attempts before it only the rows up to the `start_step` of every later one count. Attempts are ordered by number, never
by the clock.

Imports pyarrow, pandas and the standard library only, so that reading results needs neither jax nor ray.
"""

from __future__ import annotations

import errno
import getpass
import json
import math
import os
import random
import re
import shutil
import socket
import threading
import time
import traceback
import uuid
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

SCHEMA_VERSION = 1
"""Raised when a column changes its meaning or type. A part written by a newer version is refused by name."""

HEARTBEAT_EVERY_S = 1.0  # a claim is rewritten at most this often by `AttemptWriter.heartbeat`
KEEP_ALIVE_EVERY_S = 10.0  # and at least this often while its process lives: a long compilation isn't death
DEAD_AFTER_S = 60.0  # silence after which the claim of a process that can't be looked up is dead
FLUSH_EVERY_S = 5.0  # `add` replaces the live parts about this often
MIN_FREE_BYTES = 16 * 2**20  # less free space than this is named before anything starts
KEPT_CHECKPOINTS = 2

FINAL = ("finished", "diverged")  # statuses that are results
STATUSES = (*FINAL, "failed", "interrupted")  # what an attempt can end as

_FOLDERS = ("trials", "metrics", "sweeps", "claims", "checkpoints")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")  # of trials, requests and runs: they become file names
_READERS = 4  # threads, one file each; more only contend for the interpreter


class StoreError(Exception):
    """What the user can mend, in one line. An `OSError` such as a full disk is its `__cause__`."""


# ---------------------------------------------------------------------------------------------------------- schema


class Column(NamedTuple):
    """One declared column."""

    name: str
    type: pa.DataType
    unit: str  # "" for what has none
    meaning: str


_STRING, _INT, _FLOAT, _BOOL = pa.string(), pa.int64(), pa.float64(), pa.bool_()
_TIME = pa.timestamp("us", tz="UTC")

TRIALS = (
    Column("trial_id", _STRING, "", "identity: a hash of the config fields that change the result"),
    Column("attempt", pa.int32(), "", "1, 2, … of this trial"),
    Column("status", _STRING, "", "finished, diverged, failed or interrupted; null while the attempt runs"),
    Column("error", _STRING, "", "what went wrong, in one line"),
    Column("error_detail", _STRING, "", "the traceback"),
    Column("start_step", _INT, "steps", "where the attempt took over: 0, or the step of the checkpoint it restored"),
    Column("step", _INT, "steps", "steps done when the row was written"),
    Column("num_steps", _INT, "steps", "steps the trial trains in all"),
    Column("started_at", _TIME, "UTC", "when the attempt began"),
    Column("ended_at", _TIME, "UTC", "when it was sealed"),
    Column("train_s", _FLOAT, "s", "wall time of training and evaluation, compilation aside"),
    Column("compile_s", _FLOAT, "s", "wall time of compilation"),
    Column("device_s", _FLOAT, "s", "device time that is this trial's share of its pack"),
    Column("run_id", _STRING, "", "the run command that made the attempt"),
    Column("pack_id", _STRING, "", "the pack it trained in"),
    Column("pack_size", _INT, "trials", "members of that pack"),
    Column("host", _STRING, "", "name of the machine"),
    Column("pid", _INT, "", "process on that machine"),
    Column("user", _STRING, "", "account that ran it"),
    Column("git_commit", _STRING, "", "commit of the code"),
    Column("git_dirty", _BOOL, "", "whether the working tree differed from that commit"),
    Column("code_hash", _STRING, "", "hash of the source files that ran"),
    Column("version.python", _STRING, "", "version of Python"),
    Column("version.jax", _STRING, "", "version of jax"),
    Column("version.jaxlib", _STRING, "", "version of jaxlib"),
    Column("version.flax", _STRING, "", "version of flax"),
    Column("version.optax", _STRING, "", "version of optax"),
    Column("version.ray", _STRING, "", "version of ray"),
    Column("version.numpy", _STRING, "", "version of numpy"),
    Column("device_kind", _STRING, "", "what jax calls the device"),
    Column("num_devices", _INT, "devices", "devices the pack trained on"),
    Column("xla_flags", _STRING, "", "XLA_FLAGS of the process"),
    Column("num_params", _INT, "parameters", "all trained numbers"),
    Column("num_non_embedding_params", _INT, "parameters", "those outside embedding tables and output layer"),
    Column("train_flops_per_example", _FLOAT, "FLOP", "forward and backward pass of one example"),
    Column("train_flops", _FLOAT, "FLOP", "the whole training"),
    Column("examples_seen", _INT, "examples", "training examples up to `step`, repeats included"),
    Column("peak_mem_bytes", _INT, "bytes", "most device memory in use at once, of the whole pack"),
)
"""The trials table: one row per attempt. The config's fields follow, under dotted names and with their values' type."""

METRICS = (
    Column("trial_id", _STRING, "", "the trial"),
    Column("attempt", pa.int32(), "", "the attempt that measured it"),
    Column("step", _INT, "steps", "steps done; a train row is the mean over the steps since the row before"),
    Column("split", _STRING, "", "train, valid, test or ood"),
    Column("metric", _STRING, "", "loss (nats), accuracy, accuracy_per_feature, …"),
    Column("value", _FLOAT, "", "the measurement; NaN and infinities are values"),
)
"""The metrics table: one row per (trial_id, attempt, step, split, metric)."""

SWEEPS = (
    Column("sweep", _STRING, "", "name in the sweep file"),
    Column("request_id", _STRING, "", "one run command's request for the sweep"),
    Column("requested_at", _TIME, "UTC", "when"),
    Column("file", _STRING, "", "the sweep file, as given"),
    Column("tiny", _BOOL, "", "whether the file's tiny form was asked for"),
    Column("overrides", pa.list_(pa.string()), "", "settings changed by --set, in order"),
    Column("trial_id", _STRING, "", "a trial that was asked for"),
    Column("point", _STRING, "", "shared by the trials that differ only in seed"),
    Column("axes", _STRING, "", "JSON: dotted name → value as the file has it"),
    Column("select_over", pa.list_(pa.string()), "", "axes over which hyperparameters are chosen"),
)
"""The sweeps table: one row per trial that a request asked for."""

TABLES = {"trials": TRIALS, "metrics": METRICS, "sweeps": SWEEPS}
_DECLARED = {table: {column.name: column.type for column in columns} for table, columns in TABLES.items()}
_REQUIRED = {
    "trials": ("trial_id", "attempt", "status", "start_step"),
    "metrics": tuple(_DECLARED["metrics"]),
    "sweeps": ("sweep", "request_id", "requested_at", "tiny", "trial_id"),
}
# Written by the store itself: neither provenance nor counts nor facts may set them.
_OWNED = ("trial_id", "attempt", "status", "error", "error_detail", "num_steps", "started_at", "ended_at")
_ATTEMPT_COLUMNS = ("trial_id", "attempt", "status", "start_step", "step", "num_steps", "error", "run_id", "host")
_COUNTS = ("num_params", "num_non_embedding_params", "train_flops_per_example", "train_flops", "examples_seen")


def is_config_column(name: str) -> bool:
    """Whether a column of the trials table is a field of the config, such as `model.emb_dim`."""
    return name not in _DECLARED["trials"]


def _config_type(name: str, value: object) -> pa.DataType:
    if value is None:
        return pa.null()
    for kind, arrow_type in ((bool, _BOOL), (int, _INT), (float, _FLOAT), (str, _STRING)):
        if isinstance(value, kind):  # bool first: it is an int, too
            return arrow_type
    raise ValueError(
        f"config field {name}={value!r} is a {type(value).__name__}; allowed are bool, int, float, str, None"
    )


# ------------------------------------------------------------------------------------------------- file operations
# All that touches files, apart from the exclusive claims, so that another kind of file system can take their place.


class _Entry(NamedTuple):
    name: str
    version: tuple[int, int, int]  # changes when the file is replaced


def _list(folder: Path, suffix: str) -> list[_Entry]:
    """The finished files of a folder by name; those with a leading dot are still being written."""
    entries = []
    try:
        with os.scandir(folder) as scan:
            for item in scan:
                if item.name.startswith((".", "_")) or not item.name.endswith(suffix):
                    continue
                with suppress(FileNotFoundError):
                    stat = item.stat()
                    entries.append(_Entry(item.name, (stat.st_size, stat.st_mtime_ns, stat.st_ino)))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"{folder}: can't be read: {_reason(error)}") from error
    return sorted(entries, key=lambda entry: _split_name(entry.name, suffix) or (entry.name, 0))


def _names(folder: Path, prefix: str) -> list[str]:
    """Names of the files in a folder that start so."""
    try:
        with os.scandir(folder) as scan:
            return [item.name for item in scan if item.name.startswith(prefix)]
    except FileNotFoundError:
        return []


def _write(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Replaces a file whole: whoever reads or crashes meanwhile has the old one or the new one.

    Args:
      path: of the file; its folder is made where it is missing.
      data: the new content.
      durable: whether it must outlive a power cut.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with temporary.open("xb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    if durable:
        _sync_folder(path.parent)


def _write_folder(path: Path, write: Callable[[Path], None]) -> None:
    """Makes a folder whole or not at all; `write` fills one that does not exist yet and sees to it that it lasts."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        write(temporary)
        _remove(path)
        temporary.replace(path)
    except BaseException:
        _remove(temporary)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Makes a rename outlive a power cut, where the file system knows how."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


def _create_exclusively(path: Path, data: bytes) -> bool:
    """Creates a file that nobody else has; False where somebody was faster."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    except FileExistsError:
        return False
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
    except BaseException:
        _remove(path)
        raise
    return True


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(FileNotFoundError):
        path.unlink()


def _reason(error: BaseException) -> str:
    """An error in one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


# ------------------------------------------------------------------------------------------------------------ parts


def _encode(table: str, rows: pa.Table) -> bytes:
    """One part as a Parquet file, marked with its table and the schema's version."""
    sink = pa.BufferOutputStream()
    # A trials row is many columns of one value each, where statistics and dictionaries only cost.
    options: dict[str, Any] = (
        {"compression": "none", "use_dictionary": False, "write_statistics": False}
        if table == "trials"
        else {"compression": "zstd"}
    )
    with pq.ParquetWriter(sink, rows.schema, store_schema=False, write_page_checksum=True, **options) as writer:
        marks = {
            "table": table,
            "schema_version": str(SCHEMA_VERSION),
            "checksum": _checksum(rows.column_names, len(rows)),
        }
        writer.add_key_value_metadata({f"hyla.{name}": value for name, value in marks.items()})
        writer.write_table(rows)
    return sink.getvalue().to_pybytes()


def _checksum(names: Sequence[str], num_rows: int) -> str:
    """Of what a file says of its shape; the values have checksums of their own, in their pages."""
    return f"{zlib.crc32(json.dumps([num_rows, *names]).encode()):08x}"


class _Damaged(Exception):
    """A part that can't be used, with the reason in one line."""


def _decode(table: str, path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Reads one part.

    Args:
      table: which table it should belong to.
      path: of the part.
      columns: those wanted, of those there; None for all.

    Raises:
      _Damaged: it is empty, cut short, changed, or not ours.
      StoreError: it was written by a newer version.
    """
    data = path.read_bytes()
    if not data:
        raise _Damaged("empty file")
    try:
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        marks = file.metadata.metadata or {}
        schema = file.schema_arrow
        types = dict(zip(schema.names, schema.types, strict=True))
    except Exception as error:  # pyarrow answers damage with many kinds of error
        raise _Damaged(_reason(error)) from error
    if marks.get(b"hyla.table") != table.encode():
        raise _Damaged(f"not a part of the {table} table")
    try:
        version = int(marks[b"hyla.schema_version"])
    except (KeyError, ValueError) as error:
        raise _Damaged("no schema version") from error
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"{path}: schema version {version} is newer than this code reads ({SCHEMA_VERSION}); update the code"
        )
    if marks.get(b"hyla.checksum") != _checksum(schema.names, file.metadata.num_rows).encode():
        raise _Damaged("its description of the columns was changed")
    if missing := [name for name in _REQUIRED[table] if name not in types]:
        raise _Damaged(f"columns missing: {', '.join(missing)}")
    try:
        wanted = list(types) if columns is None else [name for name in columns if name in types]
        rows = file.read(columns=wanted, use_threads=False)
        for index, name in enumerate(rows.column_names):
            declared = _DECLARED[table].get(name, types[name])
            if types[name] != declared:
                rows = rows.set_column(index, name, rows.column(name).cast(declared))
    except Exception as error:
        raise _Damaged(_reason(error)) from error
    return rows


def _concatenate(parts: Sequence[tuple[Path, pa.Table]], table: str) -> pa.Table:
    """Parts below one another; a column that a part lacks is null there, and int meets float as float.

    Raises:
      StoreError: a config field has values of different kinds in two parts; both are named.
    """
    types: dict[str, pa.DataType] = dict(_DECLARED[table])
    source: dict[str, Path] = {}
    groups: dict[pa.Schema, list[pa.Table]] = {}
    for path, rows in parts:
        schema = rows.schema
        group = groups.setdefault(schema, [])
        group.append(rows)
        if len(group) > 1:
            continue
        for field in schema:
            known = types.get(field.name)
            if known is None or known == pa.null():
                types[field.name], source[field.name] = field.type, path
            elif field.type != known and field.type != pa.null():
                if {field.type, known} != {_INT, _FLOAT}:
                    raise StoreError(
                        f"column {field.name} is {known} in {source[field.name]} but {field.type} in {path}; "
                        "move one of the two files away"
                    )
                types[field.name] = _FLOAT
    schema = pa.schema(list(types.items()))
    aligned = []
    for group in groups.values():
        rows = pa.concat_tables(group)
        columns = []
        for name, kind in types.items():
            if name not in rows.column_names:
                columns.append(pa.nulls(len(rows), kind))
            else:
                columns.append(rows.column(name).cast(kind, safe=False))
        aligned.append(pa.table(columns, schema=schema))
    return pa.concat_tables(aligned) if aligned else schema.empty_table()


# ----------------------------------------------------------------------------------------------- processes and claims


@cache
def _machine() -> str:
    """Where process numbers mean the same: this boot of this host, seen from this container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()}/{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()


_GONE, _UNKNOWN = "gone", "unknown"


def _process_start(pid: int) -> str:
    """When a process of this machine started, in clock ticks since boot; `gone`; `unknown` where that can't be told."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return _GONE if state in "ZX" else fields[18]  # field 22 of the line; state is field 3
    except (OSError, IndexError, ValueError):
        if os.name != "posix":
            return _UNKNOWN
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return _GONE
    except OSError:
        pass  # it exists and belongs to somebody else
    return _UNKNOWN


class Claim(NamedTuple):
    """Who works on an attempt."""

    trial_id: str
    attempt: int
    alive: bool
    begun: bool  # whether the attempt is settled; False for the moment in which rivals may still step back
    run_id: str | None
    host: str | None
    pid: int | None
    heartbeat: datetime | None
    progress: Mapping[str, Any]  # step, num_steps, loss, …


def _is_alive(content: Mapping[str, Any], modified: float) -> bool:
    if content.get("machine") == _machine():
        now, started = _process_start(content.get("pid", 0)), content.get("process_start")
        if now == _GONE:
            return False
        if _UNKNOWN not in (now, started):
            return now == started
    # The later of the two: neither a clock that runs behind nor a file server that keeps old times kills a live claim.
    return time.time() - max(content.get("heartbeat", 0.0), modified) < DEAD_AFTER_S


_writers: weakref.WeakSet[AttemptWriter] = weakref.WeakSet()
"""The attempts of this process that hold a claim."""

_keeper_pid: int | None = None
_keeper_lock = threading.Lock()


def _keep_claims_alive() -> None:
    """Starts this process's one thread that renews heartbeats while training doesn't, as in a long compilation."""
    global _keeper_pid

    def renew() -> None:
        with _keeper_lock:
            references = [weakref.ref(writer) for writer in _writers]
        for reference in references:
            if writer := reference():
                writer._keep_alive()
                del writer  # held no longer than needed: a dropped attempt gives its claim back

    def run() -> None:
        while True:
            time.sleep(KEEP_ALIVE_EVERY_S)
            renew()

    with _keeper_lock:
        if _keeper_pid != os.getpid():  # a forked child has no thread yet
            _keeper_pid = os.getpid()
            threading.Thread(target=run, name="hyla-store-heartbeat", daemon=True).start()


def _give_back(claim: Path, pid: int) -> None:
    """Removes the claim of an attempt that has ended or that nobody holds any more, unless in a forked child."""
    if pid == os.getpid():
        with suppress(OSError):
            _remove(claim)


# ------------------------------------------------------------------------------------------------------------- writer


class AttemptWriter:
    """Writes one attempt at one trial. Made by `Store.begin`; safe to use from several threads.

    Rows wait in memory until `flush`, which `add` calls every few seconds. When a write fails because the disk is full,
    the rows are held back and written by a later flush. A writer that is dropped before `seal` gives its claim back:
    the attempt reads as interrupted.

    Attributes:
      trial_id: the trial.
      attempt: its number, from 1.
      held_back: why the last flush failed, in one line; None when it didn't.
      sealed: whether the attempt has ended.
    """

    def __init__(self, store: Store, row: dict[str, Any], config: Mapping[str, Any], run_id: str | None):
        self.trial_id: str = row["trial_id"]
        self.attempt: int = row["attempt"]
        self.held_back: str | None = None
        self.sealed = False
        self._row = row
        self._reached = 0
        self._config = dict(config)
        self._store = store
        self._lock = threading.RLock()
        self._rows: list[tuple[int, str, str, float]] = []
        self._num_written_rows = 0
        self._written_row: dict[str, Any] | None = None
        self._flush_due = time.monotonic() + FLUSH_EVERY_S
        self._progress: dict[str, Any] = {}
        self._pid = os.getpid()
        self._run_id = run_id
        self._begun = False
        self._last_beat = -math.inf
        self._release: Callable[[], object] = lambda: None

    def __repr__(self) -> str:
        return f"AttemptWriter({self.trial_id}-{self.attempt}, {self._row['status'] or 'running'})"

    @property
    def start_step(self) -> int:
        """The step from which the attempt goes on."""
        return self._row["start_step"]

    def update(self, **facts: Any) -> None:
        """Sets columns of the attempt's row, such as `start_step` once a checkpoint is restored, or `compile_s`."""
        _check_facts(facts)
        with self._lock:
            self._require_open()
            self._set(facts)

    def add(self, rows: Iterable[tuple[int, str, str, float]]) -> None:
        """Adds measurements, each (step, split, metric, value)."""
        with self._lock:
            self._require_open()
            for step, split, metric, value in rows:
                self._rows.append((int(step), str(split), str(metric), float(value)))
                self._reached = max(self._reached, int(step))
            self._set({})
            if time.monotonic() >= self._flush_due:
                self.flush()

    def flush(self) -> bool:
        """Replaces the live parts where there is something new.

        Returns:
          Whether all is written. Where not, `held_back` says why, and a later flush tries again.
        """
        with self._lock:
            self._require_open()
            start = time.monotonic()
            try:
                self._write_parts()
            except OSError as error:
                self.held_back = _reason(error)
            # Many small members on a slow disk must not spend their time on live parts: at most a twentieth of it.
            taken = (time.monotonic() - start) * len(_writers)
            self._flush_due = time.monotonic() + max(FLUSH_EVERY_S, 20 * taken)
            return self.held_back is None

    def heartbeat(self, progress: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        """Tells the live view how far the attempt is; written at most once a second.

        Args:
          progress: step, num_steps, loss, and what else the view should show; merged into what was told before.
          **more: the same as keywords.
        """
        with self._lock:
            self._require_open()
            self._progress.update(progress or {}, **more)
            self._reached = max(self._reached, int(self._progress.get("step", 0)))
            self._set({})
            if time.monotonic() - self._last_beat >= HEARTBEAT_EVERY_S:
                self._beat()

    def seal(self, status: str, error: str | BaseException | None = None, **facts: Any) -> None:
        """Ends the attempt: writes its final parts and gives the claim back.

        Args:
          status: one of `STATUSES`.
          error: what went wrong; of an exception, its traceback is kept as well.
          **facts: more columns of the row, such as `train_s` or `peak_mem_bytes`.

        Raises:
          StoreError: the parts can't be written. The attempt stays open and can be sealed again.
        """
        if status not in STATUSES:
            raise ValueError(f"status={status!r} is unknown; choose one of {list(STATUSES)}")
        _check_facts(facts)
        with self._lock:
            self._require_open()
            before = dict(self._row)
            self._set({**facts, "status": status, "ended_at": datetime.now(UTC), **_error_columns(error)})
            try:
                self._write_parts()
            except OSError as failure:
                self.held_back = _reason(failure)
                self._row = before
                raise StoreError(
                    f"{self._store.path}: the results of trial {self.trial_id} can't be written: {self.held_back}"
                ) from failure
            self.sealed = True
            self._release()
            with _keeper_lock:
                _writers.discard(self)

    @property
    def _claim_path(self) -> Path:
        return self._store.path / "claims" / f"{self.trial_id}-{self.attempt}.json"

    def _require_open(self) -> None:
        if self.sealed:
            raise RuntimeError(f"attempt {self.attempt} at trial {self.trial_id} is sealed")

    def _set(self, columns: Mapping[str, Any]) -> None:
        self._row.update(columns)
        self._reached = max(self._reached, columns.get("step", 0))
        self._row["step"] = max(self._reached, self._row["start_step"])

    def _claim(self) -> bool:
        """Takes the claim; False where somebody was faster. It is given back when the attempt ends or is dropped."""
        if not _create_exclusively(self._claim_path, self._claim_content()):
            return False
        self._release = weakref.finalize(self, _give_back, self._claim_path, self._pid)
        with _keeper_lock:
            _writers.add(self)
        return True

    def _settle(self) -> None:
        """Tells rivals that the attempt is begun."""
        self._begun = True
        _write(self._claim_path, self._claim_content(), durable=False)

    def _write_parts(self) -> None:
        """Metrics first: a row of the trials table never promises metrics that aren't there."""
        name = f"{self.trial_id}-{self.attempt}.parquet"
        if (num_rows := len(self._rows)) > self._num_written_rows:
            columns = ([self.trial_id] * num_rows, [self.attempt] * num_rows, *zip(*self._rows, strict=True))
            rows = pa.table(
                [pa.array(values, column.type) for values, column in zip(columns, METRICS, strict=True)],
                names=[column.name for column in METRICS],
            )
            _write(self._store.path / "metrics" / name, _encode("metrics", rows))
            self._num_written_rows = num_rows
        if self._row != self._written_row:
            config = {field: _config_type(field, value) for field, value in self._config.items()}
            schema = pa.schema([*_DECLARED["trials"].items(), *config.items()])
            _write(
                self._store.path / "trials" / name,
                _encode("trials", pa.Table.from_pylist([{**self._row, **self._config}], schema=schema)),
            )
            self._written_row = dict(self._row)
        self.held_back = None

    def _claim_content(self) -> bytes:
        content = {
            "trial_id": self.trial_id,
            "attempt": self.attempt,
            "begun": self._begun,
            "run_id": self._run_id,
            "host": socket.gethostname(),
            "machine": _machine(),
            "pid": self._pid,
            "process_start": _process_start(self._pid),
            "heartbeat": time.time(),
            "progress": self._progress,
        }
        return json.dumps(content, default=_plain).encode()

    def _beat(self) -> None:
        """Rewrites the claim. One that was swept away stays away: somebody else has the trial now."""
        self._last_beat = time.monotonic()
        if not self._claim_path.exists():
            return
        try:
            _write(self._claim_path, self._claim_content(), durable=False)
        except OSError:  # a full disk has room for a new time
            with suppress(OSError):
                os.utime(self._claim_path)

    def _keep_alive(self) -> None:
        with self._lock:
            if self._begun and not self.sealed and time.monotonic() - self._last_beat >= KEEP_ALIVE_EVERY_S / 2:
                self._beat()


def _plain(value: Any) -> Any:
    """What JSON makes of a numpy or jax scalar, or of anything else."""
    return value.item() if hasattr(value, "item") else str(value)


def _check_facts(facts: Mapping[str, Any]) -> None:
    """Refuses what is no column of the trials table that a caller may set, or has no value of its type."""
    declared = _DECLARED["trials"]
    for name, value in facts.items():
        if name in _OWNED or name not in declared:
            raise ValueError(
                f"{name!r} is no column to set; choose from {[name for name in declared if name not in _OWNED]}"
            )
        _check_value(name, value, declared[name])


def _check_value(name: str, value: Any, kind: pa.DataType) -> None:
    try:
        pa.array([value], kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name}={value!r} does not fit its column, which is {kind}") from error


def _error_columns(error: str | BaseException | None) -> dict[str, str | None]:
    if error is None:
        return {"error": None, "error_detail": None}
    if isinstance(error, BaseException):
        lines = str(error).strip().splitlines()
        line = ": ".join([type(error).__name__, *lines[:1]])
        return {"error": line, "error_detail": "".join(traceback.format_exception(error))}
    lines = error.strip().splitlines() or [""]
    return {"error": lines[0], "error_detail": error if len(lines) > 1 else None}


# -------------------------------------------------------------------------------------------------------------- store


class TrialState(NamedTuple):
    """Where a trial is."""

    status: str  # finished, diverged, failed, interrupted or running
    attempt: int
    step: int
    num_steps: int | None
    loss: float | None  # of the last heartbeat of a running attempt
    error: str | None
    host: str | None
    run_id: str | None
    progress: Mapping[str, Any]  # all that the last heartbeat of a running attempt told


class SweepSummary(NamedTuple):
    """The state of a sweep: the trials of its latest request."""

    sweep: str
    tiny: bool
    request_id: str
    requested_at: datetime
    file: str | None
    trial_ids: tuple[str, ...]
    counts: dict[str, int]  # status → trials; `pending` for those never begun


class _Attempt(NamedTuple):
    """The columns of an attempt that decide what counts."""

    trial_id: str
    attempt: int
    status: str | None
    start_step: int
    step: int | None
    num_steps: int | None
    error: str | None
    run_id: str | None
    host: str | None


class RequestedTrial(Protocol):
    """What a request records of a trial; a `TrialSpec` is one."""

    @property
    def trial_id(self) -> str:
        """Its identity."""
        ...

    @property
    def point(self) -> str:
        """Equal for trials that differ only in their seeds."""
        ...

    @property
    def axes(self) -> Mapping[str, Any]:
        """The value of each axis as written."""
        ...


T = TypeVar("T")


class Store:
    """A results folder. Use `Store.create` to write and `Store.open` to read.

    Attributes:
      path: the folder.
    """

    def __init__(self, path: str | Path):
        self.path = _folder(path)
        self._damaged: dict[str, list[tuple[Path, str]]] = {}
        self._attempt_cache: dict[str, tuple[tuple[int, int, int], _Attempt]] = {}

    def __repr__(self) -> str:
        return f"Store({str(self.path)!r})"

    @classmethod
    def open(cls, path: str | Path) -> Store:
        """The store in a folder.

        Raises:
          StoreError: there is none.
        """
        store = cls(path)
        try:
            if not store.path.exists():
                raise StoreError(f"{path}: no such folder; give the folder of a results store")
            if not store.path.is_dir():
                raise StoreError(f"{path}: not a folder; give the folder of a results store")
            if not any((store.path / folder).is_dir() for folder in ("trials", "sweeps")):
                raise StoreError(
                    f"{path}: not a results store (it has no folder trials/); give the folder of a results store"
                )
        except OSError as error:
            raise StoreError(f"{path}: can't be read: {_reason(error)}") from error
        return store

    @classmethod
    def create(cls, path: str | Path) -> Store:
        """The store in a folder, made where it is missing.

        Raises:
          StoreError: it can't be made.
        """
        store = cls(path)
        for folder in _FOLDERS:
            try:
                (store.path / folder).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StoreError(f"{path}: the results store can't be made here: {_reason(error)}") from error
        return store

    def check_writable(self) -> None:
        """Tries to write, before anything starts.

        Raises:
          StoreError: path and reason, in one line.
        """
        if not self.path.is_dir():
            raise StoreError(f"{self.path}: not a folder; the results store can't be written")
        for folder in _FOLDERS:
            probe = self.path / folder / f".probe-{uuid.uuid4().hex[:8]}"
            try:
                _write(probe, bytes(4096))
                _remove(probe)
            except OSError as error:
                raise StoreError(
                    f"{self.path / folder}: the results store can't be written: {_reason(error)}"
                ) from error
        free = shutil.disk_usage(self.path).free
        if free < MIN_FREE_BYTES:
            raise StoreError(f"{self.path}: only {free} bytes are free on this disk; make room for {MIN_FREE_BYTES}")

    @property
    def damaged(self) -> list[tuple[Path, str]]:
        """Parts that the last read of each table passed over, with the reason."""
        return [item for items in self._damaged.values() for item in items]

    # ------------------------------------------------------------------------------------------------------- attempts

    def begin(
        self,
        trial_id: str,
        config_flat: Mapping[str, Any],
        provenance: Mapping[str, Any],
        start_step: int,
        num_steps: int,
        counts: Mapping[str, Any],
    ) -> AttemptWriter | None:
        """Claims a trial and begins the next attempt at it.

        Args:
          trial_id: the trial.
          config_flat: all fields of its config under dotted names.
          provenance: columns of the trials table such as `run_id`, `pack_id`, `git_commit`, `version.jax`; host, pid
            and user are filled in.
          start_step: step of the checkpoint from which it goes on, else 0; `AttemptWriter.update` can correct it.
          num_steps: steps it trains in all.
          counts: columns such as `num_params` and `train_flops`.

        Returns:
          The attempt's writer; None where a live claim of the trial exists.

        Raises:
          StoreError: the store can't be written.
        """
        _check_name("trial_id", trial_id)
        facts = {"host": socket.gethostname(), "pid": os.getpid(), "user": _user(), **provenance, **counts}
        _check_facts(facts)
        for name, value in config_flat.items():
            if "." not in name or name in _DECLARED["trials"]:
                raise ValueError(f"config field {name!r} needs a dotted name that is no column of the trials table")
            _check_value(name, value, _config_type(name, value))
        row = {
            **dict.fromkeys(_DECLARED["trials"]),
            **facts,
            "trial_id": trial_id,
            "start_step": int(start_step),
            "step": int(start_step),
            "num_steps": int(num_steps),
        }
        try:
            return self._begin(trial_id, row, config_flat)
        except OSError as error:
            raise StoreError(f"{self.path}: trial {trial_id} can't be begun: {_reason(error)}") from error

    def _begin(self, trial_id: str, row: Mapping[str, Any], config: Mapping[str, Any]) -> AttemptWriter | None:
        """Rivals for a trial agree without a lock, through exclusive creation of the claim and a second look.

        A claim counts only after its maker has looked again: it steps back where meanwhile a part of this or a later
        attempt appeared (its number was out of date), or where a live claim with a lower number exists. Dead claims are
        swept away only once the new attempt's part is there, so that nobody can take a number for free that isn't.
        """
        give_up = time.monotonic() + 5
        while True:
            parts, claims = self._parts_of(trial_id), self._claims_of(trial_id)
            if live := [claim for claim in claims if claim.alive]:
                if any(claim.begun for claim in live) or time.monotonic() > give_up:
                    return None
                time.sleep(random.uniform(0.001, 0.01))  # until the rival has settled or stepped back
                continue
            attempt = 1 + max([*parts, *(claim.attempt for claim in claims)], default=0)
            started = {**row, "attempt": attempt, "started_at": datetime.now(UTC)}
            writer = AttemptWriter(self, started, config, row["run_id"])
            if not writer._claim():
                continue
            try:
                parts, claims = self._parts_of(trial_id), self._claims_of(trial_id)
                outdated = any(part >= attempt for part in parts)
                if outdated or any(claim.alive and claim.attempt < attempt for claim in claims):
                    writer._release()
                    time.sleep(random.uniform(0.001, 0.01))
                    continue
                writer._write_parts()
                for claim in claims:
                    if not claim.alive:
                        self._sweep_away(claim)
                writer._settle()
            except BaseException:
                writer._release()
                raise
            _keep_claims_alive()
            return writer

    def _parts_of(self, trial_id: str) -> list[int]:
        """Attempts at a trial of which there is a part, readable or not."""
        numbers = []
        for folder in ("trials", "metrics"):
            for name in _names(self.path / folder, f"{trial_id}-"):
                if (split := _split_name(name, ".parquet")) and split[0] == trial_id:
                    numbers.append(split[1])
        return numbers

    def _claims_of(self, trial_id: str) -> list[Claim]:
        names = _names(self.path / "claims", f"{trial_id}-")
        return [claim for name in names if (claim := self._read_claim(name)) and claim.trial_id == trial_id]

    def _read_claim(self, name: str) -> Claim | None:
        split = _split_name(name, ".json")
        if split is None:
            return None
        path = self.path / "claims" / name
        try:
            modified = path.stat().st_mtime
        except FileNotFoundError:
            return None
        try:
            content = json.loads(path.read_bytes())
            heartbeat = datetime.fromtimestamp(content["heartbeat"], UTC)
            alive = _is_alive(content, modified)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, OverflowError, OSError):  # just being made, or its maker died over it
            alive = time.time() - modified < DEAD_AFTER_S
            return Claim(*split, alive, False, None, None, None, None, {})
        return Claim(
            *split,
            alive=alive,
            begun=bool(content.get("begun")),
            run_id=content.get("run_id"),
            host=content.get("host"),
            pid=content.get("pid"),
            heartbeat=heartbeat,
            progress=content.get("progress") or {},
        )

    def _sweep_away(self, claim: Claim) -> None:
        """Removes a dead claim and what its process left half written."""
        name = f"{claim.trial_id}-{claim.attempt}."
        for folder in ("trials", "metrics", "claims"):
            for leftover in _names(self.path / folder, f".{name}"):
                _remove(self.path / folder / leftover)
        for leftover in _names(self._checkpoint_folder(claim.trial_id), "."):
            _remove(self._checkpoint_folder(claim.trial_id) / leftover)
        _remove(self.path / "claims" / f"{name}json")

    def claims(self) -> list[Claim]:
        """All claims, live and dead."""
        return [claim for entry in _list(self.path / "claims", ".json") if (claim := self._read_claim(entry.name))]

    def request_stop(self, run_id: str) -> None:
        """Asks a run's workers to stop at the next opportunity."""
        _check_name("run_id", run_id)
        try:
            _write(self.path / "claims" / f"{run_id}.stop", b"")
        except OSError as error:
            raise StoreError(f"{self.path}: run {run_id} can't be stopped: {_reason(error)}") from error

    def stop_requested(self, run_id: str) -> bool:
        """Whether somebody asked the run to stop."""
        return (self.path / "claims" / f"{run_id}.stop").exists()

    def clear_stop(self, run_id: str) -> None:
        """Takes the request back, once the run has ended."""
        _check_name("run_id", run_id)
        _remove(self.path / "claims" / f"{run_id}.stop")

    # ------------------------------------------------------------------------------------------------------- requests

    def record_sweep(
        self,
        sweep: str,
        trials: Iterable[RequestedTrial],
        *,
        file: str | Path,
        tiny: bool,
        select_over: Sequence[str] = (),
        overrides: Sequence[str] = (),
        request_id: str | None = None,
    ) -> str:
        """Records which trials a run command asks for.

        Args:
          sweep: the sweep's name.
          trials: every trial of the sweep, whether it still has to run or not.
          file: the sweep file, as given.
          tiny: whether it is the file's tiny form.
          select_over: axes over which hyperparameters are chosen.
          overrides: settings changed by --set, in order.
          request_id: a name that no other request has; by default made from the time.

        Returns:
          The request's id.
        """
        now = datetime.now(UTC)
        request_id = request_id or f"{now:%Y%m%dT%H%M%S.%fZ}-{uuid.uuid4().hex[:6]}"
        _check_name("request_id", request_id)
        rows = [
            {
                "sweep": sweep,
                "request_id": request_id,
                "requested_at": now,
                "file": str(file),
                "tiny": tiny,
                "overrides": list(overrides),
                "trial_id": trial.trial_id,
                "point": trial.point,
                "axes": json.dumps(dict(trial.axes), ensure_ascii=False),
                "select_over": list(select_over),
            }
            for trial in trials
        ]
        table = pa.Table.from_pylist(rows, schema=pa.schema(list(_DECLARED["sweeps"].items())))
        try:
            _write(self.path / "sweeps" / f"{request_id}.parquet", _encode("sweeps", table))
        except OSError as error:
            raise StoreError(f"{self.path}: the request can't be recorded: {_reason(error)}") from error
        return request_id

    # ---------------------------------------------------------------------------------------------------- checkpoints

    def _checkpoint_folder(self, trial_id: str) -> Path:
        return self.path / "checkpoints" / trial_id

    def _checkpoint_steps(self, trial_id: str) -> list[int]:
        names = _names(self._checkpoint_folder(trial_id), "")
        return sorted(int(name[:-5]) for name in names if name.endswith(".ckpt") and name[:-5].isdecimal())

    def save_checkpoint(self, trial_id: str, step: int, data: bytes | Callable[[Path], None]) -> None:
        """Saves a state; the one before it is kept as well.

        States of later steps are removed: whoever saves at this step could not use them.

        Args:
          trial_id: whose state.
          step: updates done.
          data: the state, or what writes it into a folder that does not exist yet, for states in many files.

        Raises:
          StoreError: it can't be written; what was there before stays.
        """
        _check_name("trial_id", trial_id)
        folder = self._checkpoint_folder(trial_id)
        try:
            path = folder / f"{step}.ckpt"
            if not isinstance(data, bytes):
                _write_folder(path, data)
            else:
                if path.is_dir():
                    _remove(path)
                _write(path, data)
            steps = self._checkpoint_steps(trial_id)
            kept = [other for other in steps if other <= step][-KEPT_CHECKPOINTS:]
            for other in set(steps) - set(kept):
                _remove(folder / f"{other}.ckpt")
        except OSError as error:
            raise StoreError(f"{folder}: the checkpoint at step {step} can't be written: {_reason(error)}") from error

    def load_checkpoints(self, trial_id: str) -> Iterator[tuple[int, bytes | Path]]:
        """The saved states of a trial, newest first, each (step, bytes), or its folder if it is one.

        The caller judges whether one is damaged.
        """
        for step in reversed(self._checkpoint_steps(trial_id)):
            path = self._checkpoint_folder(trial_id) / f"{step}.ckpt"
            try:
                yield step, path if path.is_dir() else path.read_bytes()
            except OSError:
                continue

    def clear_checkpoints(self, trial_id: str) -> None:
        """Removes a trial's saved states."""
        _check_name("trial_id", trial_id)
        shutil.rmtree(self._checkpoint_folder(trial_id), ignore_errors=True)

    # -------------------------------------------------------------------------------------------------------- reading

    def finished(self) -> dict[str, str]:
        """Trials that have a result: trial_id → finished or diverged."""
        winners = _winners(self._attempts())
        return {trial_id: row.status for trial_id, row in winners.items() if row.status in FINAL}

    def statuses(self) -> dict[str, TrialState]:
        """Every trial that was ever begun: trial_id → where it is."""
        live = self._live_claims()  # before the parts: an attempt that ends meanwhile is then told by its sealed part
        attempts = self._attempts()
        if any(row.status is None and (row.trial_id, row.attempt) not in live for row in attempts):
            live |= self._live_claims()  # and after: it may have begun meanwhile
        states = {
            trial_id: TrialState(
                status=row.status or "interrupted",
                attempt=row.attempt,
                step=row.step or row.start_step,
                num_steps=row.num_steps,
                loss=None,
                error=row.error,
                host=row.host,
                run_id=row.run_id,
                progress={},
            )
            for trial_id, row in _winners(attempts).items()
        }
        sealed = {(row.trial_id, row.attempt) for row in attempts if row.status}
        for key, claim in live.items():
            known = states.get(claim.trial_id)
            if key in sealed or (known and (known.status in FINAL or known.attempt > claim.attempt)):
                continue
            progress = claim.progress
            states[claim.trial_id] = TrialState(
                status="running",
                attempt=claim.attempt,
                step=progress.get("step", known.step if known else 0),
                num_steps=progress.get("num_steps", known.num_steps if known else None),
                loss=progress.get("loss"),
                error=None,
                host=claim.host,
                run_id=claim.run_id,
                progress=progress,
            )
        return states

    def last_activity(self) -> dict[str, datetime]:
        """When something last happened to each trial: a write of a part, or a heartbeat of a live claim."""
        latest: dict[str, datetime] = {}
        moments = [
            (key[0], datetime.fromtimestamp(entry.version[1] / 1e9, UTC))
            for entry in _list(self.path / "trials", ".parquet")
            if (key := _split_name(entry.name, ".parquet")) is not None
        ]
        moments += [(claim.trial_id, claim.heartbeat) for claim in self.claims() if claim.alive and claim.heartbeat]
        for trial_id, moment in moments:
            latest[trial_id] = max(moment, latest.get(trial_id, moment))
        return latest

    def summary(self) -> list[SweepSummary]:
        """Every sweep by the trials of its latest request, newest request first; tiny sweeps apart."""
        statuses = self.statuses()
        summaries = []
        for _, rows in self.sweeps().groupby(["sweep", "tiny"], sort=False):
            trial_ids = tuple(rows["trial_id"])
            counts: dict[str, int] = {}
            for trial_id in trial_ids:
                state = statuses.get(trial_id)
                status = state.status if state else "pending"
                counts[status] = counts.get(status, 0) + 1
            first = rows.iloc[0]
            summaries.append(
                SweepSummary(
                    sweep=first["sweep"],
                    tiny=bool(first["tiny"]),
                    request_id=first["request_id"],
                    requested_at=first["requested_at"].to_pydatetime(),
                    file=first["file"],
                    trial_ids=trial_ids,
                    counts=counts,
                )
            )
        return sorted(summaries, key=lambda item: item.requested_at, reverse=True)

    def trials(self, raw: bool = False, trial_ids: Iterable[str] | None = None) -> pd.DataFrame:
        """The trials table, ordered by trial and attempt.

        Args:
          raw: every attempt, else the one of each trial that counts.
          trial_ids: of these trials only; files of others aren't opened.

        Returns:
          The columns of `TRIALS`, then the config's fields. `status` is `running` or `interrupted` where the attempt
          hasn't been sealed. Integers are floats, with NaN, where a row has none.
        """
        return self._trial_table(raw, trial_ids).to_pandas()

    def _trial_table(self, raw: bool, trial_ids: Iterable[str] | None = None) -> pa.Table:
        wanted = None if trial_ids is None else set(trial_ids)
        live = self._live_claims()  # before and after the parts, as in `statuses`
        parts = self._read("trials", is_wanted=lambda key: wanted is None or key[0] in wanted)
        table = _concatenate(parts, "trials")
        keys = list(zip(table["trial_id"].to_pylist(), table["attempt"].to_pylist(), strict=True))
        rows = [
            _Attempt(*key, status, start_step, None, None, None, None, None)
            for key, status, start_step in zip(
                keys, table["status"].to_pylist(), table["start_step"].to_pylist(), strict=True
            )
        ]
        if any(row.status is None and key not in live for key, row in zip(keys, rows, strict=True)):
            live |= self._live_claims()
        statuses = [
            row.status or ("running" if key in live else "interrupted") for key, row in zip(keys, rows, strict=True)
        ]
        index = table.schema.get_field_index("status")
        table = table.set_column(index, "status", pa.array(statuses, _STRING))
        if raw:
            chosen = list(range(len(rows)))
        else:
            winners = {(row.trial_id, row.attempt) for row in _winners(rows).values()}
            chosen = [index for index, key in enumerate(keys) if key in winners]
        return table.take(pa.array(sorted(chosen, key=lambda index: keys[index]), _INT))

    def _live_claims(self) -> dict[tuple[str, int], Claim]:
        return {(claim.trial_id, claim.attempt): claim for claim in self.claims() if claim.alive}

    def metrics(
        self,
        raw: bool = False,
        splits: Sequence[str] | None = None,
        metrics: Sequence[str] | None = None,
        trial_ids: Iterable[str] | None = None,
    ) -> pd.DataFrame:
        """The metrics table, ordered by trial, attempt and the order of measurement.

        Args:
          raw: every row, else those that count.
          splits: of these splits only.
          metrics: of these metrics only.
          trial_ids: of these trials only; files of others aren't opened.

        Returns:
          The columns of `METRICS`.
        """
        return self._metric_table(raw, splits, metrics, trial_ids).to_pandas()

    def _metric_table(
        self,
        raw: bool,
        splits: Sequence[str] | None = None,
        metrics: Sequence[str] | None = None,
        trial_ids: Iterable[str] | None = None,
    ) -> pa.Table:
        wanted = None if trial_ids is None else set(trial_ids)
        limits = None if raw else _step_limits(self._attempts())

        def is_wanted(key: tuple[str, int]) -> bool:
            return (wanted is None or key[0] in wanted) and (limits is None or key in limits)

        def reduce(key: tuple[str, int], rows: pa.Table) -> pa.Table:
            if limits is not None and (limit := limits[key]) is not None:
                rows = rows.filter(pc.less_equal(rows["step"], limit))
            for name, values in (("split", splits), ("metric", metrics)):
                if values is not None:
                    rows = rows.filter(pc.is_in(rows[name], pa.array(list(values), _STRING)))
            return rows

        return _concatenate(self._read("metrics", is_wanted=is_wanted, reduce=reduce), "metrics")

    def final_metrics(self, splits: Sequence[str] | None = None, metrics: Sequence[str] | None = None) -> pd.DataFrame:
        """The last row of each (trial, split, metric) that counts, with the columns of `METRICS`."""
        frame = self.metrics(splits=splits, metrics=metrics).sort_values(["trial_id", "step"], kind="stable")
        return frame.drop_duplicates(["trial_id", "split", "metric"], keep="last", ignore_index=True)

    def sweeps(self, raw: bool = False) -> pd.DataFrame:
        """The sweeps table.

        Args:
          raw: every request, else the latest of each sweep, where the tiny form is a sweep of its own.

        Returns:
          The columns of `SWEEPS`, ordered by request; `axes` is JSON.
        """
        frame = _concatenate(self._read("sweeps"), "sweeps").to_pandas()
        frame = frame.sort_values(["requested_at", "request_id"], kind="stable", ignore_index=True)
        if raw or frame.empty:
            return frame
        latest = frame.groupby(["sweep", "tiny"])["request_id"].transform("last")
        return frame[frame["request_id"] == latest].reset_index(drop=True)

    def _attempts(self) -> list[_Attempt]:
        """What decides which attempt counts, of every attempt; parts that haven't changed are remembered."""
        entries = _list(self.path / "trials", ".parquet")
        versions = {entry.name: entry.version for entry in entries}
        known = {
            name: (version, row)
            for name, (version, row) in self._attempt_cache.items()
            if versions.get(name) == version
        }
        fresh = self._read("trials", entries=[e for e in entries if e.name not in known], columns=_ATTEMPT_COLUMNS)
        for path, rows in fresh:
            values = rows.to_pylist()[0]
            known[path.name] = (versions[path.name], _Attempt(*(values.get(name) for name in _ATTEMPT_COLUMNS)))
        self._attempt_cache = known
        return [row for _, row in known.values()]

    def _read(
        self,
        table: str,
        *,
        entries: Sequence[_Entry] | None = None,
        columns: Sequence[str] | None = None,
        is_wanted: Callable[[tuple[str, int]], bool] | None = None,
        reduce: Callable[[tuple[str, int], pa.Table], pa.Table] | None = None,
    ) -> list[tuple[Path, pa.Table]]:
        """Reads the parts of a table, each alone, so that a broken one harms no other; notes those passed over.

        Args:
          table: trials, metrics or sweeps.
          entries: of these files; None for all of the table.
          columns: these columns; None for all.
          is_wanted: of an attempt (trial_id, attempt): whether to open its part.
          reduce: what to keep of a part.
        """
        if entries is None:
            entries = _list(self.path / table, ".parquet")
        damaged: list[tuple[Path, str]] = []

        def read_one(entry: _Entry) -> tuple[Path, pa.Table] | None:
            path = self.path / table / entry.name
            try:
                if table == "sweeps":
                    return path, _decode(table, path, columns)
                key = _split_name(entry.name, ".parquet")
                if key is None:
                    raise _Damaged("not named <trial_id>-<attempt>.parquet")
                if is_wanted is not None and not is_wanted(key):
                    return None
                rows = _decode(table, path, columns)
                if table == "trials" and len(rows) != 1:
                    raise _Damaged(f"{len(rows)} rows instead of one")
                # The name decides which attempt it is, so that a copy of a part under another name never counts twice.
                if len(rows) and (rows["trial_id"][0].as_py(), rows["attempt"][0].as_py()) != key:
                    raise _Damaged(f"belongs to attempt {rows['trial_id'][0]}-{rows['attempt'][0]}")
                return path, rows if reduce is None else reduce(key, rows)
            except FileNotFoundError:
                return None
            except _Damaged as error:
                damaged.append((path, str(error)))
            except OSError as error:
                damaged.append((path, _reason(error)))
            return None

        if len(entries) < 4:
            parts = [read_one(entry) for entry in entries]
        else:
            with ThreadPoolExecutor(_READERS) as pool:
                parts = list(pool.map(read_one, entries))
        self._damaged[table] = sorted(damaged)
        return [part for part in parts if part is not None]


def _folder(path: str | Path) -> Path:
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(path)):
        raise StoreError(f"{path}: a results store at a URL isn't supported yet; give a folder, such as a shared mount")
    return Path(path).expanduser()


def _check_name(what: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{what}={name!r} can't be part of a file name; letters, digits and _ . + - are allowed")


def _split_name(name: str, suffix: str) -> tuple[str, int] | None:
    """`<trial_id>-<attempt><suffix>` → (trial_id, attempt); None for other names."""
    trial_id, dash, attempt = name.removesuffix(suffix).rpartition("-")
    return (trial_id, int(attempt)) if name.endswith(suffix) and dash and attempt.isdecimal() else None


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container in which the account has no name
        return str(os.getuid()) if hasattr(os, "getuid") else ""


def _by_trial(attempts: Iterable[_Attempt]) -> dict[str, list[_Attempt]]:
    """Attempts of each trial in their order."""
    trials: dict[str, list[_Attempt]] = {}
    for row in attempts:
        trials.setdefault(row.trial_id, []).append(row)
    for rows in trials.values():
        rows.sort(key=lambda row: row.attempt)
    return trials


def _winner(attempts: Sequence[_Attempt]) -> _Attempt:
    """The one that counts of a trial's attempts in order."""
    results = [row for row in attempts if row.status in FINAL]
    return (results or attempts)[-1]


def _winners(attempts: Iterable[_Attempt]) -> dict[str, _Attempt]:
    return {trial_id: _winner(rows) for trial_id, rows in _by_trial(attempts).items()}


def _step_limits(attempts: Iterable[_Attempt]) -> dict[tuple[str, int], int | None]:
    """(trial_id, attempt) → last step whose rows count, None for all; attempts of which nothing counts are left out."""
    limits: dict[tuple[str, int], int | None] = {}
    for trial_id, rows in _by_trial(attempts).items():
        winner = _winner(rows)
        limit: int | None = None
        for row in reversed(rows[: rows.index(winner) + 1]):
            if limit != 0:
                limits[trial_id, row.attempt] = limit
            limit = row.start_step if limit is None else min(limit, row.start_step)
    return limits


# --------------------------------------------------------------------------------------------------------- comparison


def equal_tables(
    store_a: Store,
    store_b: Store,
    rtol: float = 0.0,
    atol: float = 0.0,
    *,
    trial_ids: Iterable[str] | None = None,
    max_step: int | None = None,
) -> list[str]:
    """Compares what counts in two stores: ids, configs, steps, statuses, counts and values.

    Attempt, host, time and run are left aside, and NaN equals NaN.

    Args:
      store_a: one store.
      store_b: the other.
      rtol: allowed difference of a value as a share of `store_b`'s; with both zero, values must agree to the last bit.
      atol: allowed difference of a value.
      trial_ids: compare these trials only.
      max_step: compare metrics up to this step only.

    Returns:
      The differences, a line each; empty when the tables are equal.
    """
    wanted = None if trial_ids is None else set(trial_ids)
    rows_a, rows_b = (
        {row["trial_id"]: row for row in store._trial_table(raw=False).to_pylist()} for store in (store_a, store_b)
    )
    if wanted is not None:
        rows_a, rows_b = ({key: row for key, row in rows.items() if key in wanted} for rows in (rows_a, rows_b))
    lines = []
    for here, there, store in ((rows_a, rows_b, store_a), (rows_b, rows_a, store_b)):
        lines += [f"trial {trial_id} is only in {store.path}" for trial_id in sorted(set(here) - set(there))]
    both = sorted(set(rows_a) & set(rows_b))
    for trial_id in both:
        a, b = rows_a[trial_id], rows_b[trial_id]
        config = [name for name in {**a, **b} if is_config_column(name)]
        for name in ("status", "step", "num_steps", *_COUNTS, *config):
            if not _agree(a.get(name), b.get(name)):
                lines.append(f"trial {trial_id}: {name} is {a.get(name)!r} against {b.get(name)!r}")

    keys = ["trial_id", "step", "split", "metric"]
    a_frame, b_frame = (store.metrics(trial_ids=both)[[*keys, "value"]] for store in (store_a, store_b))
    merged = a_frame.merge(b_frame, on=keys, how="outer", suffixes=("_a", "_b"), indicator="side")
    if max_step is not None:
        merged = merged[merged["step"] <= max_step]
    for side, store in (("left_only", store_a), ("right_only", store_b)):
        for trial_id, rows in _rows_by_trial(merged[merged["side"] == side]):
            lines.append(
                f"trial {trial_id}: {len(rows)} metric rows are only in {store.path}, the first {_place(rows)}"
            )
    shared = merged[merged["side"] == "both"]
    agree = [_agree(a, b, rtol, atol) for a, b in zip(shared["value_a"], shared["value_b"], strict=True)]
    num_shared = shared["trial_id"].value_counts()
    for trial_id, rows in _rows_by_trial(shared[[not item for item in agree]]):
        a_value, b_value = rows["value_a"].iloc[0], rows["value_b"].iloc[0]
        lines.append(
            f"trial {trial_id}: {len(rows)} of {num_shared[trial_id]} values differ, the first {_place(rows)}: "
            f"{float(a_value)!r} against {float(b_value)!r}"
        )
    return lines


def _rows_by_trial(frame: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    for trial_id, rows in frame.sort_values(["trial_id", "step"], kind="stable").groupby("trial_id"):
        yield str(trial_id), rows


def _place(rows: pd.DataFrame) -> str:
    """Where the first of some metric rows was measured."""
    first = rows.iloc[0]
    return f"at step {first['step']}, {first['split']} {first['metric']}"


def _agree(a: Any, b: Any, rtol: float = 0.0, atol: float = 0.0) -> bool:
    if not (isinstance(a, float) and isinstance(b, float)):
        return a == b
    if math.isnan(a) or math.isnan(b):
        return math.isnan(a) and math.isnan(b)
    if a == b:
        return rtol > 0 or atol > 0 or math.copysign(1, a) == math.copysign(1, b)
    return math.isfinite(a) and math.isfinite(b) and abs(a - b) <= atol + rtol * abs(b)
