"""`Store`: begins attempts, reads the tables, keeps requests and checkpoints."""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import random
import re
import socket
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pandas as pd
import pyarrow as pa

from sweeps.store import parts
from sweeps.store.attempts import AttemptWriter, check_value, checked_facts, keep_claims_alive
from sweeps.store.claims import SUFFIX as CLAIM_SUFFIX
from sweeps.store.claims import Claim, claim_path, read_claim
from sweeps.store.clean import Attempt, step_limits, winners
from sweeps.store.places import LocalPlace, Place, find_place, one_line
from sweeps.store.reading import Reader, Selection, in_order
from sweeps.store.scalars import step_number
from sweeps.store.schema import DECLARED, FINAL, INT, STRING, StoreError, config_type

KEPT_CHECKPOINTS = 2

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")  # of trials, requests and runs: they become file names


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


class Beginning(NamedTuple):
    """A trial of which an attempt is to begin; see `Store.begin`."""

    trial_id: str
    config_flat: Mapping[str, Any]
    start_step: int
    num_steps: int
    counts: Mapping[str, Any]


class Store:
    """A results folder. Use `Store.create` to write and `Store.open` to read.

    Attributes:
      path: the folder.
    """

    def __init__(self, path: str | Path | Place):
        self.place = path if isinstance(path, Place) else find_place(path)
        self._reader = Reader(self.place)

    def __repr__(self) -> str:
        return f"Store({self.shown!r})"

    @property
    def shown(self) -> str:
        """The store as messages name it: its folder or URL."""
        return self.place.shown

    @property
    def path(self) -> Path:
        """The store's folder.

        Raises:
          StoreError: it is not in a file system.
        """
        if not isinstance(self.place, LocalPlace):
            raise StoreError(f"{self.shown}: not a folder of this machine")
        return self.place.root

    @classmethod
    def open(cls, path: str | Path | Place) -> Store:
        """The store in a folder or at a URL.

        Raises:
          StoreError: there is none.
        """
        store = cls(path)
        try:
            problem = store.place.is_store()
        except OSError as error:
            raise StoreError(f"{store.shown}: can't be read: {one_line(error)}") from error
        if problem is not None:
            raise StoreError(f"{store.shown}: {problem}; give the folder of a results store")
        return store

    @classmethod
    def create(cls, path: str | Path | Place) -> Store:
        """The store in a folder or at a URL, made where it is missing.

        Raises:
          StoreError: it can't be made.
        """
        store = cls(path)
        try:
            store.place.make()
        except OSError as error:
            raise StoreError(f"{store.shown}: the results store can't be made here: {one_line(error)}") from error
        return store

    def check_writable(self) -> None:
        """Tries to write, before anything starts.

        Raises:
          StoreError: path and reason, in one line.
        """
        self.place.check_writable()

    @property
    def damaged(self) -> list[tuple[str, str]]:
        """Files that the last read of each table passed over, as messages name them, with the reason."""
        found = [item for items in self._reader.damaged.values() for item in items]
        return [(self.place.shown_path(path), reason) for path, reason in found]

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
        return self.begin_all([Beginning(trial_id, config_flat, start_step, num_steps, counts)], provenance)[trial_id]

    def begin_all(
        self, beginnings: Sequence[Beginning], provenance: Mapping[str, Any]
    ) -> dict[str, AttemptWriter | None]:
        """`begin` for trials that are trained together. The store's files are looked through for all of them at once.

        Args:
          beginnings: the trials, all different.
          provenance: of all of them.

        Returns:
          For each trial its writer; None where a live claim of it exists.

        Raises:
          StoreError: the store can't be written; none of the trials is claimed.
        """
        shared = checked_facts({"host": socket.gethostname(), "pid": os.getpid(), "user": _user(), **provenance})
        rows = {}
        for trial_id, config_flat, start_step, num_steps, counts in beginnings:
            _check_name("trial_id", trial_id)
            for name, value in config_flat.items():
                if "." not in name or name in DECLARED["trials"]:
                    raise ValueError(f"config field {name!r} needs a dotted name that is no column of the trials table")
                check_value(name, value, config_type(name, value))
            rows[trial_id] = {
                **dict.fromkeys(DECLARED["trials"]),
                **shared,
                **checked_facts(counts),
                "trial_id": trial_id,
                "start_step": step_number(start_step, "start_step"),
                "step": step_number(start_step, "start_step"),
                "num_steps": step_number(num_steps, "num_steps"),
            }
        configs = {beginning.trial_id: beginning.config_flat for beginning in beginnings}
        begun: dict[str, AttemptWriter | None] = {}
        try:
            keep_claims_alive()
            give_up = time.monotonic() + 5
            self._begin_round(rows, configs, begun, give_up)
            while left := {trial_id: row for trial_id, row in rows.items() if trial_id not in begun}:
                time.sleep(random.uniform(0.001, 0.01))  # until rivals have settled or stepped back
                self._begin_round(left, configs, begun, give_up)
        except BaseException as error:
            for writer in filter(None, begun.values()):
                writer._release()
            if isinstance(error, OSError):
                names = f"trial {beginnings[0].trial_id}" + (f" and {len(rows) - 1} more" if len(rows) > 1 else "")
                raise StoreError(f"{self.shown}: {names} can't be begun: {one_line(error)}") from error
            raise
        return begun

    def _begin_round(
        self,
        rows: Mapping[str, Mapping[str, Any]],
        configs: Mapping[str, Mapping[str, Any]],
        begun: dict[str, AttemptWriter | None],
        give_up: float,
    ) -> None:
        """Tries once to begin each of some trials, and notes in `begun` those of which it is settled.

        Rivals for a trial agree without a lock, through exclusive creation of the claim and a second look.
        A claim counts only after its maker has looked again: it steps back where meanwhile a part of this or a later
        attempt appeared (its number was out of date), or where a live claim with a lower number exists. Dead claims are
        swept away only once the new attempt has a part, so that nobody can take a number for free that isn't.
        """
        numbers, claims = self._reader.numbers(rows), self.claims_of(rows)
        held: dict[str, AttemptWriter] = {}
        try:
            for trial_id, row in rows.items():
                if live := [claim for claim in claims[trial_id] if claim.alive]:
                    if any(claim.begun for claim in live) or time.monotonic() > give_up:
                        begun[trial_id] = None
                    continue
                attempt = 1 + max([*numbers[trial_id], *(claim.attempt for claim in claims[trial_id])], default=0)
                started = {**row, "attempt": attempt, "started_at": datetime.now(UTC)}
                writer = AttemptWriter(self.place, started, configs[trial_id], row["run_id"])
                if writer._claim():
                    held[trial_id] = writer
            if held:
                own = {f"{trial_id}-{writer.attempt}{CLAIM_SUFFIX}" for trial_id, writer in held.items()}
                numbers, claims = self._reader.numbers(held), self.claims_of(held, besides=own)
            for trial_id, writer in list(held.items()):
                outdated = any(number >= writer.attempt for number in numbers[trial_id])
                # Names in a bucket may be half a minute old, and a part that is there must not be replaced.
                outdated = outdated or (
                    self.place.is_remote and self.place.exists(f"trials/{parts.part_name(trial_id, writer.attempt)}")
                )
                if outdated or any(claim.alive and claim.attempt < writer.attempt for claim in claims[trial_id]):
                    writer._release()
                    del held[trial_id]
                    continue
                dead = [claim for claim in claims[trial_id] if not claim.alive]
                writer._settle(partial(self._sweep_all_away, dead))
                begun[trial_id] = writer
        except BaseException:
            for writer in held.values():
                writer._release()
            raise

    def claims_of(self, trial_ids: Collection[str], besides: Collection[str] = ()) -> dict[str, list[Claim]]:
        """The claims of each of some trials, without the files `besides`."""
        found: dict[str, list[Claim]] = {trial_id: [] for trial_id in trial_ids}
        for name in self.place.names("claims"):
            if name.rpartition("-")[0] not in found or name in besides:
                continue
            if (claim := read_claim(self.place, name)) is not None:
                found[claim.trial_id].append(claim)
        return found

    def sweep_away(self, claim: Claim) -> None:
        """Removes a dead claim and what its process left half written."""
        name = f"{claim.trial_id}-{claim.attempt}."
        checkpoints = self._checkpoint_folder(claim.trial_id)
        for folder, prefix in (
            *((folder, f".{name}") for folder in ("trials", "metrics", "claims")),
            (checkpoints, "."),
        ):
            for leftover in self.place.names(folder, prefix):
                self.place.remove(f"{folder}/{leftover}")
        self.place.remove(claim_path(claim.trial_id, claim.attempt))

    def _sweep_all_away(self, claims: Iterable[Claim]) -> None:
        for claim in claims:
            self.sweep_away(claim)

    def claims(self, trial_ids: Collection[str] | None = None) -> list[Claim]:
        """All claims, live and dead; those of some trials only, where these are given."""
        entries = self.place.entries(
            "claims", CLAIM_SUFFIX, lambda name: trial_ids is None or name.rpartition("-")[0] in trial_ids
        )
        if self.place.is_remote and len(entries) > 1:
            with ThreadPoolExecutor(self.place.num_readers) as pool:
                found = list(pool.map(lambda entry: read_claim(self.place, entry.name, entry.modified), entries))
        else:
            found = [read_claim(self.place, entry.name) for entry in entries]
        return [claim for claim in found if claim is not None]

    def request_stop(self, run_id: str) -> None:
        """Asks a run's workers to stop at the next opportunity."""
        _check_name("run_id", run_id)
        try:
            self.place.write(f"claims/{run_id}.stop", b"")
        except OSError as error:
            raise StoreError(f"{self.shown}: run {run_id} can't be stopped: {one_line(error)}") from error

    def stop_requested(self, run_id: str) -> bool:
        """Whether somebody asked the run to stop."""
        return self.place.exists(f"claims/{run_id}.stop")

    def clear_stop(self, run_id: str) -> None:
        """Takes the request back, once the run has ended."""
        _check_name("run_id", run_id)
        self.place.remove(f"claims/{run_id}.stop")

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
        table = pa.Table.from_pylist(rows, schema=pa.schema(list(DECLARED["sweeps"].items())))
        try:
            self.place.write(f"sweeps/{request_id}{parts.SUFFIX}", parts.encode("sweeps", table))
        except OSError as error:
            raise StoreError(f"{self.shown}: the request can't be recorded: {one_line(error)}") from error
        return request_id

    def keep_diff(self, text: str) -> str:
        """Keeps how a working tree differs from its commit, once for all runs in which it does.

        Args:
          text: the diff; surrogates stand for bytes that are not UTF-8.

        Returns:
          The file's name within the folder diffs/, for the column `git_diff`.

        Raises:
          StoreError: the store can't be written.
        """
        data = text.encode(errors="surrogateescape")
        name = f"{hashlib.sha256(data).hexdigest()[:16]}.diff"
        path = f"diffs/{name}"
        try:
            if not self.place.exists(path):
                self.place.write(path, data)
        except OSError as error:
            raise StoreError(f"{self.place.shown_path(path)}: can't be written: {one_line(error)}") from error
        return name

    # ---------------------------------------------------------------------------------------------------- checkpoints

    def _checkpoint_folder(self, trial_id: str) -> str:
        return f"checkpoints/{trial_id}"

    def checkpoint_steps(self, trial_id: str) -> list[int]:
        """The steps of a trial's checkpoints, ascending."""
        names = self.place.names(self._checkpoint_folder(trial_id))
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
            path = f"{folder}/{step}.ckpt"
            if not isinstance(data, bytes):
                self.place.write_folder(path, data)
            else:
                if self.place.is_folder(path):
                    self.place.remove(path)
                self.place.write(path, data)
            steps = self.checkpoint_steps(trial_id)
            kept = [other for other in steps if other <= step][-KEPT_CHECKPOINTS:]
            for other in set(steps) - set(kept):
                self.place.remove(f"{folder}/{other}.ckpt")
        except OSError as error:
            raise StoreError(
                f"{self.place.shown_path(folder)}: the checkpoint at step {step} can't be written: {one_line(error)}"
            ) from error

    def load_checkpoints(self, trial_id: str) -> Iterator[tuple[int, bytes | Path]]:
        """The saved states of a trial, newest first, each (step, bytes), or its folder if it is one.

        The caller judges whether one is damaged.
        """
        for step in reversed(self.checkpoint_steps(trial_id)):
            path = f"{self._checkpoint_folder(trial_id)}/{step}.ckpt"
            try:
                yield step, self.place.local_folder(path) if self.place.is_folder(path) else self.place.read(path)
            except StoreError:
                raise  # a bucket that gives no answer: to start from an older state would lose work
            except OSError:
                continue

    def clear_checkpoints(self, trial_id: str) -> None:
        """Removes a trial's saved states."""
        _check_name("trial_id", trial_id)
        with suppress(OSError):  # they only take room
            self.place.remove(self._checkpoint_folder(trial_id))

    # -------------------------------------------------------------------------------------------------------- reading

    def finished(self) -> dict[str, str]:
        """Trials that have a result: trial_id → finished or diverged."""
        counting = winners(self._reader.attempts())
        return {trial_id: row.status for trial_id, row in counting.items() if row.status in FINAL}

    def statuses(self, trial_ids: Collection[str] | None = None) -> dict[str, TrialState]:
        """Every trial that was ever begun, or those among some: trial_id → where it is."""
        # Claims come before the parts: an attempt that ends meanwhile is then told by its sealed part.
        live = self._live_claims(trial_ids)
        attempts = self._reader.attempts(trial_ids)
        if any(row.status is None and (row.trial_id, row.attempt) not in live for row in attempts):
            live |= self._live_claims(trial_ids)  # and after: it may have begun meanwhile
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
            for trial_id, row in winners(attempts).items()
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
        """When something last happened to each trial: its end, a write of a part, or a heartbeat of a live claim."""
        latest: dict[str, datetime] = {}
        moments = [(row.trial_id, row.ended_at) for row in self._reader.attempts() if row.ended_at is not None]
        moments += [
            (key[0], datetime.fromtimestamp(entry.modified, UTC))
            for entry in self.place.entries("trials", parts.SUFFIX)
            if (key := parts.split_name(entry.name)) is not None
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
        return self.trial_table(raw, trial_ids).to_pandas()

    def trial_table(self, raw: bool = False, trial_ids: Iterable[str] | None = None) -> pa.Table:
        """`trials` as an Arrow table, in which integers stay integers beside nulls."""
        wanted = None if trial_ids is None else set(trial_ids)
        live = self._live_claims()  # before and after the parts, as in `statuses`
        table = parts.concatenate(self._reader.read("trials", selection=Selection(wanted)), "trials")
        keys = list(zip(table["trial_id"].to_pylist(), table["attempt"].to_pylist(), strict=True))
        rows = [
            Attempt(*key, status, start_step)
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
        table = table.set_column(index, "status", pa.array(statuses, STRING))
        if raw:
            chosen = list(range(len(rows)))
        else:
            counting = {(row.trial_id, row.attempt) for row in winners(rows).values()}
            chosen = [index for index, key in enumerate(keys) if key in counting]
        return table.take(pa.array(sorted(chosen, key=lambda index: keys[index]), INT))

    def _live_claims(self, trial_ids: Collection[str] | None = None) -> dict[tuple[str, int], Claim]:
        return {(claim.trial_id, claim.attempt): claim for claim in self.claims(trial_ids) if claim.alive}

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
        return self.metric_table(raw, splits, metrics, trial_ids).to_pandas()

    def metric_table(
        self,
        raw: bool = False,
        splits: Sequence[str] | None = None,
        metrics: Sequence[str] | None = None,
        trial_ids: Iterable[str] | None = None,
        *,
        last: bool = False,
    ) -> pa.Table:
        """`metrics` as an Arrow table; with `last`, the last row of each attempt, split and metric only."""
        limits = None if raw else step_limits(self._reader.attempts())
        values = {name: wanted for name, wanted in (("split", splits), ("metric", metrics)) if wanted is not None}
        selection = Selection(None if trial_ids is None else set(trial_ids), limits, values, last)
        return parts.concatenate(in_order(self._reader.read("metrics", selection=selection)), "metrics")

    def final_metrics(self, splits: Sequence[str] | None = None, metrics: Sequence[str] | None = None) -> pd.DataFrame:
        """The last row of each (trial, split, metric) that counts, with the columns of `METRICS`."""
        frame = self.metric_table(False, splits, metrics, last=True).to_pandas()
        frame = frame.sort_values(["trial_id", "step"], kind="stable")
        return frame.drop_duplicates(["trial_id", "split", "metric"], keep="last", ignore_index=True)

    def sweeps(self, raw: bool = False) -> pd.DataFrame:
        """The sweeps table.

        Args:
          raw: every request, else the latest of each sweep, where the tiny form is a sweep of its own.

        Returns:
          The columns of `SWEEPS`, ordered by request; `axes` is JSON.
        """
        frame = parts.concatenate(self._reader.read("sweeps"), "sweeps").to_pandas()
        frame = frame.sort_values(["requested_at", "request_id"], kind="stable", ignore_index=True)
        return frame if raw else latest_requests(frame)


def latest_requests(requests: pd.DataFrame) -> pd.DataFrame:
    """The rows of each sweep's latest request, the tiny form a sweep of its own.

    Args:
      requests: rows of the sweeps table, ordered by request as `Store.sweeps(raw=True)` gives them.
    """
    if requests.empty:
        return requests
    last = requests.groupby(["sweep", "tiny"])["request_id"].transform("last")
    return requests[requests["request_id"] == last].reset_index(drop=True)


def _check_name(what: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{what}={name!r} can't be part of a file name; letters, digits and _ . + - are allowed")


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container in which the account has no name
        return str(os.getuid()) if hasattr(os, "getuid") else ""
