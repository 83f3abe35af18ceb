"""Writing one attempt at one trial: its live parts, its claim, its end."""

from __future__ import annotations

import math
import os
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pyarrow as pa

from sweeps.store import parts
from sweeps.store.claims import claim_content, claim_path
from sweeps.store.places import Place, one_line
from sweeps.store.scalars import metric_value, plain_values, step_number
from sweeps.store.schema import (
    BOOL,
    DECLARED,
    EXIT_REASONS,
    FLOAT,
    METRICS,
    OWNED,
    STATUSES,
    STRING,
    StoreError,
    config_type,
    exit_reason,
)

KEEP_ALIVE_EVERY_S = 10.0
"""A claim is renewed at least this often while its process lives: a long compilation isn't death."""

MAX_PAUSE_S = 60.0
"""After a failed write, the next one is tried within this time."""

_writers: weakref.WeakSet[AttemptWriter] = weakref.WeakSet()
"""The attempts of this process that hold a claim."""

_keeper_pid: int | None = None
_keeper_lock = threading.Lock()


def keep_claims_alive() -> None:
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


def _give_back(place: Place, claim: str, pid: int) -> None:
    """Removes the claim of an attempt that has ended or that nobody holds any more, unless in a forked child."""
    if pid == os.getpid():
        with suppress(OSError):
            place.remove(claim)


class AttemptWriter:
    """Writes one attempt at one trial. Made by `Store.begin`; safe to use from several threads.

    Rows wait in memory until `flush`, which `add` calls every few seconds. When a write fails because the disk is full,
    the rows are held back and written by a later flush. Until the first flush, at most some seconds, an attempt is its
    claim alone: one that is over by then has one part per table to write and no more. A writer that is dropped before
    `seal` gives its claim back: the attempt reads as interrupted, or, where it has no part yet, as never begun.

    Attributes:
      trial_id: the trial.
      attempt: its number, from 1.
      held_back: why the last flush failed, in one line; None when it didn't.
      sealed: whether the attempt has ended.
    """

    def __init__(self, place: Place, row: dict[str, Any], config: Mapping[str, Any], run_id: str | None):
        self.trial_id: str = row["trial_id"]
        self.attempt: int = row["attempt"]
        self.held_back: str | None = None
        self.sealed = False
        self._row = row
        self._reached = 0
        self._config = dict(config)
        self._place = place
        self._lock = threading.RLock()
        self._rows: list[tuple[int, str, str, float]] = []
        self._num_written_rows = 0
        self._written_row: dict[str, Any] | None = None
        self._has_part = False  # of the trials table
        self._outlived: Callable[[], object] = lambda: None  # called once there is one
        self._flush_due = time.monotonic() + self._place.flush_every_s
        self._progress: dict[str, Any] = {}
        self._pid = os.getpid()
        self._run_id = run_id
        self._begun = False
        self._last_beat = self._beat_due = -math.inf
        self._release: Callable[[], object] = lambda: None

    def __repr__(self) -> str:
        return f"AttemptWriter({self.trial_id}-{self.attempt}, {self._row['status'] or 'running'})"

    @property
    def start_step(self) -> int:
        """The step from which the attempt goes on."""
        return self._row["start_step"]

    def update(self, **facts: Any) -> None:
        """Sets columns of the attempt's row, such as `start_step` once a checkpoint is restored, or `compile_s`."""
        facts = checked_facts(facts)
        with self._lock:
            self._require_open()
            self._set(facts)

    def add(self, rows: Iterable[tuple[int, str, str, float]]) -> None:
        """Adds measurements, each (step, split, metric, value); numbers may be those of numpy or jax.

        Raises:
          ValueError: a step or a value is no number; none of these rows is added.
        """
        measured = [_measurement(*row) for row in rows]
        with self._lock:
            self._require_open()
            self._rows += measured
            self._reached = max([self._reached, *(step for step, *_ in measured)])
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
                if not self._has_part:
                    self._write_first_part()
                self._write_parts()
            except OSError as error:
                self.held_back = one_line(error)
            # Many small members on a slow disk must not spend their time on live parts: at most a twentieth of it.
            taken = (time.monotonic() - start) * len(_writers)
            pause = 20 * taken if self.held_back is None else min(20 * taken, MAX_PAUSE_S)
            self._flush_due = time.monotonic() + max(self._place.flush_every_s, pause)
            return self.held_back is None

    def heartbeat(self, progress: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        """Tells the live view how far the attempt is; written at most once a second.

        Args:
          progress: step, num_steps, loss, and what else the view should show; merged into what was told before.
          **more: the same as keywords.

        Raises:
          ValueError: the step is no whole number, or something else an array.
        """
        told = plain_values({**(progress or {}), **more}, "progress")
        step = step_number(told.get("step", 0))
        with self._lock:
            self._require_open()
            self._progress.update(told)
            self._reached = max(self._reached, step)
            self._set({})
            if time.monotonic() >= self._beat_due:
                self._beat()

    def reach(self, step: int) -> None:
        """Notes how far the attempt is where the live view need not know, as when it is about to end."""
        with self._lock:
            self._require_open()
            self._reached = max(self._reached, step_number(step))
            self._set({})

    def seal(self, status: str, error: str | BaseException | None = None, **facts: Any) -> None:
        """Ends the attempt: writes its final parts and gives the claim back.

        Args:
          status: one of `STATUSES`.
          error: what went wrong; of an exception, its traceback is kept as well.
          **facts: more columns of the row, such as `train_s` or `peak_mem_bytes`. Without an `exit_reason`, one of
            `EXIT_REASONS`, status and error decide.

        Raises:
          StoreError: the parts can't be written. The attempt stays open and can be sealed again.
        """
        end = _end_columns(status, error, facts)
        # Between the tries the lock is free: the claim is to be kept alive meanwhile.
        while (failure := self._try_to_seal(end)) is not None:
            if not self._place.wait_to_retry():
                raise StoreError(
                    f"{self._place.shown}: the results of trial {self.trial_id} can't be written: {self.held_back}"
                ) from failure

    def _try_to_seal(self, end: Mapping[str, Any]) -> OSError | None:
        """Writes the final parts; returns why they can't be written."""
        with self._lock:
            self._require_open()
            before = dict(self._row)
            self._set(end)
            try:
                self._write_parts()
            except OSError as failure:
                self.held_back = one_line(failure)
                self._row = before
                return failure
            self._close()
            return None

    def _close(self) -> None:
        """Ends the attempt, whose final parts are written."""
        self.sealed = True
        self._release()
        with _keeper_lock:
            _writers.discard(self)

    @property
    def _claim_path(self) -> str:
        return claim_path(self.trial_id, self.attempt)

    def _require_open(self) -> None:
        if self.sealed:
            raise RuntimeError(f"attempt {self.attempt} at trial {self.trial_id} is sealed")

    def _set(self, columns: Mapping[str, Any]) -> None:
        self._row.update(columns)
        self._reached = max(self._reached, columns.get("step", 0))
        self._row["step"] = max(self._reached, self._row["start_step"])

    def _claim(self) -> bool:
        """Takes the claim; False where somebody was faster. It is given back when the attempt ends or is dropped."""
        if not self._place.create(self._claim_path, self._claim_content()):
            return False
        self._release = weakref.finalize(self, _give_back, self._place, self._claim_path, self._pid)
        with _keeper_lock:
            _writers.add(self)
        return True

    def _settle(self, outlived: Callable[[], object] = lambda: None) -> None:
        """Tells rivals that the attempt is begun, and the live view where it is.

        Args:
          outlived: what may be swept away as soon as a part has taken the attempt's number for good.
        """
        self._outlived = outlived
        self._begun = True
        self._progress = {"step": self._row["step"], "num_steps": self._row["num_steps"]}
        self._place.write(self._claim_path, self._claim_content(), durable=False)
        self._last_beat = time.monotonic()

    def _write_parts(self) -> None:
        """Metrics first: a row of the trials table never promises metrics that aren't there."""
        for path, data in self._metrics_part().items():
            self._place.write(path, data)
        self._num_written_rows = len(self._rows)
        for path, data in _trials_parts([self]).items():
            self._place.write(path, data)
            self._written_row = dict(self._row)
            self._take_number()
        self.held_back = None

    def _write_first_part(self) -> None:
        """The row of an attempt that goes on, before its metrics: to those without a row, nobody would know what to do.

        It need not outlive a power cut: as long as nothing else of the attempt lasts, it is as well if it never began.
        """
        for path, data in _trials_parts([self]).items():
            self._place.write(path, data, durable=False)
            self._take_number()

    def _take_number(self) -> None:
        """Notes that there is a part of the trials table; from now on nobody can take the attempt's number."""
        if not self._has_part:
            self._has_part = True
            with suppress(OSError):  # a later attempt sweeps them away, or `repair`
                self._outlived()

    def _metrics_part(self) -> dict[str, bytes]:
        """Path and content of the part of the metrics table, if there is something new."""
        if not self._rows or len(self._rows) == self._num_written_rows:
            return {}
        num_rows = len(self._rows)
        columns = ([self.trial_id] * num_rows, [self.attempt] * num_rows, *zip(*self._rows, strict=True))
        rows = pa.table(
            [pa.array(values, column.type) for values, column in zip(columns, METRICS, strict=True)],
            names=[column.name for column in METRICS],
        )
        return {f"metrics/{parts.part_name(self.trial_id, self.attempt)}": parts.encode("metrics", rows)}

    def _claim_content(self) -> bytes:
        return claim_content(
            self.trial_id,
            self.attempt,
            pid=self._pid,
            begun=self._begun,
            run_id=self._run_id,
            progress=self._progress,
        )

    def _beat(self) -> None:
        """Rewrites the claim. One that was swept away stays away: somebody else has the trial now."""
        start = self._last_beat = time.monotonic()
        try:
            if not self._place.exists(self._claim_path):
                return
            self._place.write(self._claim_path, self._claim_content(), durable=False)
        except OSError:  # a full disk has room for a new time
            with suppress(OSError):
                self._place.touch(self._claim_path)
        # As with live parts: whoever waits for a network is not to wait most of the time.
        self._beat_due = start + max(self._place.heartbeat_every_s, 20 * (time.monotonic() - start))

    def _keep_alive(self) -> None:
        with self._lock:
            if self._begun and not self.sealed and time.monotonic() - self._last_beat >= KEEP_ALIVE_EVERY_S / 2:
                self._beat()
            if self._begun and not self.sealed and not self._has_part and time.monotonic() >= self._flush_due:
                self.flush()


class Ending(NamedTuple):
    """How an attempt ends; see `AttemptWriter.seal`."""

    writer: AttemptWriter
    status: str
    error: str | BaseException | None
    facts: Mapping[str, Any]


def seal_all(endings: Sequence[Ending]) -> None:
    """`AttemptWriter.seal` for attempts of one store that end together: their files are made to last all at once.

    Raises:
      StoreError: the parts of one can't be written. Those of others may be; `sealed` tells.
    """
    ends = [(ending, _end_columns(ending.status, ending.error, ending.facts)) for ending in endings]
    if len(ends) > 1:
        with ExitStack() as locks:
            before = []
            for ending, end in ends:
                writer = ending.writer
                locks.enter_context(writer._lock)
                writer._require_open()
                before.append((writer, dict(writer._row)))
                writer._set(end)
            place = endings[0].writer._place
            try:
                # As with one: all metrics before the rows that promise them.
                place.write_all({path: data for writer, _ in before for path, data in writer._metrics_part().items()})
                for writer, _ in before:
                    writer._num_written_rows = len(writer._rows)
                place.write_all(_trials_parts([writer for writer, _ in before]))
            except OSError:
                for writer, row in before:
                    writer._row = row
            else:
                for writer, _ in before:
                    writer.held_back = None
                    writer._take_number()
                    writer._close()
                return
    # One by one, each with the patience that the place asks for.
    for ending in endings:
        ending.writer.seal(ending.status, ending.error, **ending.facts)


def _trials_parts(writers: Sequence[AttemptWriter]) -> dict[str, bytes]:
    """Paths and contents of the parts of the trials table, once the metrics that they promise are written.

    Attempts whose row is written already have none.
    """
    alike: dict[tuple[tuple[str, pa.DataType], ...], list[AttemptWriter]] = {}
    for writer in writers:
        writer._row["num_metric_rows"] = writer._num_written_rows
        if writer._row != writer._written_row:
            fields = tuple((field, config_type(field, value)) for field, value in writer._config.items())
            alike.setdefault(fields, []).append(writer)
    found = {}
    for fields, group in alike.items():
        schema = pa.schema([*DECLARED["trials"].items(), *fields])
        rows = [{**writer._row, **writer._config} for writer in group]
        # Many times as fast as a column at a time, and all rows at once as one.
        batch = pa.RecordBatch.from_struct_array(pa.array(rows, pa.struct(schema)))
        for number, (writer, row) in enumerate(zip(group, rows, strict=True)):
            data = parts.encode("trials", pa.Table.from_batches([batch.slice(number, 1)], schema), row=row)
            found[f"trials/{parts.part_name(writer.trial_id, writer.attempt)}"] = data
    return found


def _end_columns(status: str, error: str | BaseException | None, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a row that its end decides."""
    if status not in STATUSES:
        raise ValueError(f"status={status!r} is unknown; choose one of {list(STATUSES)}")
    facts = checked_facts(facts)
    errors = _error_columns(error)
    facts.setdefault("exit_reason", exit_reason(status, errors["error"]))
    if facts["exit_reason"] not in EXIT_REASONS:
        raise ValueError(f"exit_reason={facts['exit_reason']!r} is unknown; choose one of {list(EXIT_REASONS)}")
    return {**facts, "status": status, "ended_at": datetime.now(UTC), **errors}


def _measurement(step: Any, split: str, metric: str, value: Any) -> tuple[int, str, str, float]:
    step = step_number(step, f"step of metric {split}/{metric}")
    return step, str(split), str(metric), metric_value(value, step, split, metric)


def checked_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Values of columns as the store writes them.

    Raises:
      ValueError: one is no column of the trials table that a caller may set, or has no value of its type.
    """
    declared = DECLARED["trials"]
    facts = plain_values(facts, "column")
    for name, value in facts.items():
        if name in OWNED or name not in declared:
            raise ValueError(
                f"{name!r} is no column to set; choose from {[name for name in declared if name not in OWNED]}"
            )
        check_value(name, value, declared[name])
    return facts


def check_value(name: str, value: Any, kind: pa.DataType) -> None:
    """Refuses a value that does not fit a column of this type. Raises ValueError."""
    if value is None or ((type(value), kind) in _FIT and (type(value) is not str or value.isascii())):
        return  # most of them, and Arrow takes its time
    try:
        pa.array([value], kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name}={value!r} does not fit its column, which is {kind}") from error


_FIT = {(str, STRING), (float, FLOAT), (bool, BOOL)}


def _error_columns(error: str | BaseException | None) -> dict[str, str | None]:
    if error is None:
        return {"error": None, "error_detail": None}
    if isinstance(error, BaseException):
        lines = str(error).strip().splitlines()
        line = ": ".join([type(error).__name__, *lines[:1]])
        return {"error": line, "error_detail": "".join(traceback.format_exception(error))}
    lines = error.strip().splitlines() or [""]
    return {"error": lines[0], "error_detail": error if len(lines) > 1 else None}
