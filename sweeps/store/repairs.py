"""`repair`: sets aside what is damaged, so that only its trials are trained again, and clears what dead processes left.

Nothing that was measured is deleted: files go to STORE/damaged/<table>/, and rows that lie in a compacted file are
written there before a new file without them takes its place. A trial whose counted rows are no longer whole is set
aside altogether, with its checkpoints: an attempt that went on from one of them would lack the early rows for ever. Its
row in the trials table goes last, so that a repair that is cut off finds the damage again.

Trials with a live claim are left alone. While it works on a trial, the repair holds a claim itself, and nobody begins.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple
from uuid import uuid4

import pyarrow as pa

from sweeps.store import parts
from sweeps.store.attempts import AttemptWriter, keep_claims_alive
from sweeps.store.claims import claim_path
from sweeps.store.clean import ATTEMPT_COLUMNS, Attempt, step_limits, winners
from sweeps.store.contents import (
    GoneError,
    Listing,
    Unit,
    UnreadableError,
    list_table,
    names_of,
    read_file,
    read_parts,
    take_units,
    until_listed,
)
from sweeps.store.parts import Damaged
from sweeps.store.places import FOLDERS, one_line
from sweeps.store.schema import DECLARED, FINAL, TABLES, StoreError

if TYPE_CHECKING:
    from sweeps.store.store import Store

SET_ASIDE, REMOVED, LEFT = "set aside", "removed", "left"
"""What is done about something: moved to STORE/damaged, deleted because nobody needs it, or left as it is for now."""

LEFTOVER_AFTER_S = 3600.0
"""A temporary file so old belongs to a dead writer."""


class Repair(NamedTuple):
    """One thing that was wrong."""

    what: str  # a file or folder relative to the store, or `trial <trial_id>`
    reason: str  # what is wrong with it
    action: str  # SET_ASIDE, REMOVED or LEFT; with `dry_run`, what would be done
    detail: str = ""  # where to, or what follows from it

    @property
    def is_damage(self) -> bool:
        """Whether results are concerned, rather than what dead processes left."""
        return self.action != REMOVED


def repair(store: Store, *, dry_run: bool = False) -> list[Repair]:
    """Sets aside what is damaged and clears what dead processes left.

    Args:
      store: the store.
      dry_run: only tell what would be done.

    Returns:
      What was wrong, damage first; empty where nothing was.

    Raises:
      StoreError: something can't be read or moved just now, or was written by a newer version.
    """
    try:
        return _Work(store, dry_run).run()
    except OSError as error:
        raise StoreError(f"{store.shown}: can't be repaired: {one_line(error)}; run it again") from error


class _Row(NamedTuple):
    """A row of the trials table, as far as it decides what must be there."""

    decides: Attempt
    num_metric_rows: int | None


class _Trial:
    """All that was found of one trial."""

    def __init__(self, trial_id: str) -> None:
        self.trial_id = trial_id
        self.rows: dict[int, _Row] = {}  # of whole files, by attempt
        self.num_metric_rows: dict[int, int] = {}
        self.damaged: dict[str, dict[int, Damaged]] = {"trials": {}, "metrics": {}}
        self.files: dict[str, set[str]] = {"trials": set(), "metrics": set()}  # names of its parts, hidden ones too
        self.numbers: set[int] = set()  # attempts of which there is, or was, a part

    @property
    def winner(self) -> Attempt | None:
        """The attempt that counts."""
        return winners(row.decides for row in self.rows.values()).get(self.trial_id)

    @property
    def is_readable(self) -> bool:
        """Whether all could be read that is there."""
        return not any(
            isinstance(error, UnreadableError) for errors in self.damaged.values() for error in errors.values()
        )

    @property
    def orphans(self) -> set[int]:
        """Attempts that have metrics but no row that says how far they count."""
        return set(self.num_metric_rows) - set(self.rows)

    def why_anew(self, has_checkpoints: bool) -> str | None:
        """Why rows that count are lost, now or once the trial goes on from its checkpoint; None where none are.

        Args:
          has_checkpoints: whether a later attempt could go on from one.
        """
        winner = self.winner
        if winner is None:
            return self._without_rows()
        if winner.status not in FINAL and not has_checkpoints:
            return None  # the next attempt begins at step 0: no row of the earlier ones counts then
        for attempt, error in sorted(self.damaged["trials"].items()):
            later = [n.decides.start_step for n in self.rows.values() if attempt < n.decides.attempt <= winner.attempt]
            if (min(later) > 0) if later else winner.status not in FINAL:
                return f"its attempt {attempt} is damaged ({error})"
        reached = 0
        limits = step_limits(row.decides for row in self.rows.values())
        for (_, attempt), limit in sorted(limits.items()):
            if lost := self._lost(attempt):
                return lost
            row = self.rows[attempt].decides
            if limit is not None and limit <= row.start_step:
                continue
            if row.start_step > reached:
                return f"its attempt {attempt} goes on from step {row.start_step}, the rows before end at {reached}"
            step = row.start_step if row.step is None else row.step
            reached = max(reached, step if limit is None else min(step, limit))
        return None

    def _without_rows(self) -> str | None:
        for errors in self.damaged.values():
            for attempt, error in sorted(errors.items()):
                return f"its attempt {attempt} is damaged ({error})"
        return "its attempts have no row in the trials table" if self.num_metric_rows else None

    def _lost(self, attempt: int) -> str | None:
        row, there = self.rows[attempt], self.num_metric_rows.get(attempt, 0)
        if error := self.damaged["metrics"].get(attempt):
            return f"the metrics of its attempt {attempt} are damaged ({error})"
        if row.num_metric_rows is not None:
            if there < row.num_metric_rows:
                return f"{there} of {row.num_metric_rows} rows of its attempt {attempt} are there"
        elif not there and row.decides.status == "finished" and (row.decides.step or 0) > row.decides.start_step:
            return f"the metrics of its attempt {attempt} are gone"  # a row that promises no number of them
        return None


class _Work:
    """One repair of one store."""

    def __init__(self, store: Store, dry_run: bool):
        self.store, self.place, self.dry_run = store, store.place, dry_run
        self.found: list[Repair] = []
        self.trials: dict[str, _Trial] = {}
        self.held: list[AttemptWriter] = []
        self.settled: set[str] = set()  # trials that are left alone from now on
        self.moved: set[str] = set()  # paths
        self.taken: dict[str, set[str]] = {}  # table → names in its folder for damaged files

    def run(self) -> list[Repair]:
        live = self._live()
        other_files = {table: self._scan(table) for table in TABLES}
        live |= self._live()
        try:
            for table, files in other_files.items():
                for name, error in files.items():
                    self._set_aside(table, name, str(error))
            self._trials(live)
            self._checkpoints(live)
            self._claims(live)
            self._temporary_files(live)
        finally:
            for writer in self.held:
                writer._release()
        return sorted(self.found, key=lambda repair: not repair.is_damage)

    def _live(self) -> set[str]:
        return {claim.trial_id for claim in self.store.claims() if claim.alive}

    # ------------------------------------------------------------------------------------------------------- looking

    def _scan(self, table: str) -> dict[str, Damaged]:
        """Reads a table whole. What belongs to a trial goes to `trials`; returned are other damaged files."""
        files, trials = until_listed(self.place, table, lambda: self._scan_once(table))
        for trial_id, seen in trials.items():
            trial = self.trials.setdefault(trial_id, _Trial(trial_id))
            trial.rows |= seen.rows
            trial.num_metric_rows |= seen.num_metric_rows
            trial.damaged[table] = seen.damaged[table]
            trial.files[table] = seen.files[table]
            trial.numbers |= seen.numbers
        return files

    def _scan_once(self, table: str) -> tuple[dict[str, Damaged], dict[str, _Trial]]:
        trials: dict[str, _Trial] = {}
        rows_of: dict[str, dict[Unit, _Row]] = {}

        def trial(trial_id: str) -> _Trial:
            return trials.setdefault(trial_id, _Trial(trial_id))

        def use(name: str, rows: pa.Table) -> None:
            if table == "trials":
                rows_of[name] = _rows(rows)

        listing = list_table(self.place, table, use)
        for name, error in listing.damaged.items():
            if isinstance(error, UnreadableError):
                raise StoreError(f"{self.place.shown_path(f'{table}/{name}')}: can't be read: {error}; run it again")
        for name in sorted(listing.visible):
            for key, num_rows in listing.compacted[name].items():
                if table == "trials":
                    trial(key[0]).rows.setdefault(key[1], rows_of[name][key])
                elif table == "metrics":
                    trial(key[0]).num_metric_rows.setdefault(key[1], num_rows)
        for name in names_of(listing, listing.entries):
            if table != "sweeps" and (split := parts.split_name(name)):
                trial(split[0]).numbers.add(split[1])
                if name in listing.entries:
                    trial(split[0]).files[table].add(name)
        files, hidden = dict(listing.damaged), listing.hidden
        for name, rows in read_parts(self.place, table, (n for n in listing.entries if not parts.is_compacted(n))):
            if isinstance(rows, GoneError):
                raise rows
            unit: Unit | None = None if table == "sweeps" else parts.split_name(name)
            held = unit is not None and (unit[1] in trial(unit[0]).rows or unit[1] in trial(unit[0]).num_metric_rows)
            if unit is None or held or name in hidden:
                # Of a unit whose rows lie in a compacted file, the part is only one more file.
                if isinstance(rows, Damaged) and not isinstance(rows, UnreadableError):
                    files[name] = rows
            elif isinstance(rows, Damaged):
                trial(unit[0]).damaged[table][unit[1]] = rows
            elif table == "trials":
                trial(unit[0]).rows[unit[1]] = _rows(rows)[unit]
            else:
                trial(unit[0]).num_metric_rows[unit[1]] = len(rows)
        return files, trials

    # -------------------------------------------------------------------------------------------------------- trials

    def _trials(self, live: Collection[str]) -> None:
        """Sets aside trials whose counted rows are lost, and of the others the files and rows that can't count."""
        with_checkpoints = set(self.place.names("checkpoints")) & set(self.trials)
        with_checkpoints = {trial_id for trial_id in with_checkpoints if self.store.checkpoint_steps(trial_id)}
        anew: list[_Trial] = []
        partly: list[tuple[_Trial, dict[str, dict[int, str]]]] = []
        for trial_id, trial in sorted(self.trials.items()):
            why = trial.why_anew(trial_id in with_checkpoints)
            doomed = _doomed(trial)
            if why is None and not any(doomed.values()):
                continue
            if not (trial.is_readable and self._hold(trial, live)):
                self.settled.add(trial_id)
                reasons = [why or "", *(reason for table in doomed.values() for reason in table.values())]
                detail = "it is being trained" if trial_id in live else "it can't be looked at just now"
                reason = next(filter(None, reasons))
                self.found.append(Repair(f"trial {trial_id}", reason, LEFT, f"{detail}; repair again later"))
            elif why is not None:
                self.found.append(
                    Repair(f"trial {trial_id}", why, SET_ASIDE, "the next run that asks for it trains it anew")
                )
                anew.append(trial)
            else:
                partly.append((trial, doomed))
        self.settled |= {trial.trial_id for trial in anew}
        for trial in anew:
            if not self.dry_run:
                self.place.remove(f"checkpoints/{trial.trial_id}")
        # The rows of the trials table go last: until then a repair that is cut off finds everything again.
        for table in ("metrics", "trials"):
            out = {(trial.trial_id, number) for trial in anew for number in self._numbers(table, trial)}
            for trial in anew:
                errors = trial.damaged[table]
                causes = {parts.part_name(trial.trial_id, number): str(error) for number, error in errors.items()}
                for name in sorted(trial.files[table]):
                    self._set_aside(table, name, causes.get(name, "its trial is trained anew"))
            for trial, doomed in partly:
                for number, reason in sorted(doomed[table].items()):
                    name = parts.part_name(trial.trial_id, number)
                    if name in trial.files[table]:
                        self._set_aside(table, name, reason)
                    out.add((trial.trial_id, number))
            if out:
                self._take_out(table, out)

    def _numbers(self, table: str, trial: _Trial) -> Iterable[int]:
        return trial.rows if table == "trials" else trial.num_metric_rows

    def _hold(self, trial: _Trial, live: Collection[str]) -> bool:
        """Takes a claim as `Store.begin` does, so that nobody begins; False where somebody works on the trial."""
        if trial.trial_id in live:
            return False
        if self.dry_run:
            return True
        store, trial_id = self.store, trial.trial_id
        claims = store.claims_of([trial_id])[trial_id]
        attempt = 1 + max([*trial.numbers, *(claim.attempt for claim in claims)], default=0)
        row = {**dict.fromkeys(DECLARED["trials"]), "trial_id": trial_id, "attempt": attempt, "start_step": 0}
        writer = AttemptWriter(self.place, row, {}, None)
        if any(claim.alive for claim in claims) or not writer._claim():
            return False
        # The second look: what was begun since this trial was read is none of our business.
        others = [claim for claim in store.claims_of([trial_id])[trial_id] if claim.attempt != attempt]
        if any(claim.alive for claim in others) or self._has_changed(trial):
            writer._release()
            return False
        writer._settle()
        keep_claims_alive()
        self.held.append(writer)
        return True

    def _has_changed(self, trial: _Trial) -> bool:
        """Whether parts of a trial appeared since it was read."""
        return any(
            (split := parts.split_name(name)) and split[0] == trial.trial_id and name not in files
            for table, files in trial.files.items()
            for name in self.place.names(table, f"{trial.trial_id}-")
        )

    def _take_out(self, table: str, units: Collection[Unit]) -> None:
        """Writes compacted files anew without some units, whose rows are kept aside."""
        # Again where a compaction merged such a file meanwhile.
        while until_listed(self.place, table, lambda: self._take_out_once(table, units)) and not self.dry_run:
            pass

    def _take_out_once(self, table: str, units: Collection[Unit]) -> bool:
        listing = list_table(self.place, table)
        concerned = {name: set(held).intersection(units) for name, held in sorted(listing.visible.items())}
        concerned = {name: mine for name, mine in concerned.items() if mine}
        for name, mine in concerned.items():
            aside = f"damaged/{table}/removed-{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}-{uuid4().hex[:8]}{parts.SUFFIX}"
            if not self.dry_run:
                self._rewrite(table, listing, name, mine, aside)
            num_rows = sum(listing.compacted[name][unit] for unit in mine)
            reason = f"rows that can't count any more ({num_rows} of {len(mine)} attempts)"
            self.found.append(Repair(f"{table}/{name}", reason, SET_ASIDE, f"to {aside}"))
        return bool(concerned)

    def _rewrite(self, table: str, listing: Listing, name: str, units: Collection[Unit], aside: str) -> None:
        rows = read_file(self.place, table, name)
        removed = take_units(table, rows, lambda unit: unit in units)
        kept = take_units(table, rows, lambda unit: unit not in units)
        self.place.write(aside, parts.encode(table, removed))
        # The new file hides the old one, and tells which numbers were taken.
        data = parts.encode(table, kept, replaces=names_of(listing, [name]))
        self.place.write(f"{table}/{parts.compacted_name()}", data)
        # Nothing is lost with it, and whoever reads the raw files is not to see rows that promise lost ones.
        self.place.remove(f"{table}/{name}")

    def _set_aside(self, table: str, name: str, reason: str) -> None:
        """Moves a file to the folder for damaged ones, under a name that is free there."""
        path, folder = f"{table}/{name}", f"damaged/{table}"
        if path in self.moved:
            return
        self.moved.add(path)
        if table not in self.taken:
            self.taken[table] = set(self.place.names(folder))
        stem, number, free = name.removesuffix(parts.SUFFIX), 1, name
        while free in self.taken[table]:
            number += 1
            free = f"{stem}~{number}{parts.SUFFIX}"
        self.taken[table].add(free)
        if not self.dry_run:
            try:
                self.place.move(path, f"{folder}/{free}")
            except FileNotFoundError:
                if self.place.exists(path):
                    raise
                return  # another repair, or a compaction, was faster
        self.found.append(Repair(path, reason, SET_ASIDE, f"to {folder}/{free}"))

    # -------------------------------------------------------------------------------------------------------- leftovers

    def _checkpoints(self, live: Collection[str]) -> None:
        """Removes checkpoints of trials that have a result, unless the trained state was kept on purpose."""
        for trial_id in sorted(self.place.names("checkpoints")):
            trial = self.trials.get(trial_id)
            winner = trial.winner if trial else None
            if trial is None or winner is None or winner.status not in FINAL or trial_id in self.settled:
                continue
            last = winner.num_steps if winner.status == "finished" else winner.step
            if last in self.store.checkpoint_steps(trial_id):
                continue
            is_held = any(writer.trial_id == trial_id for writer in self.held)
            if is_held or self._hold(trial, live):
                if not self.dry_run:
                    self.store.clear_checkpoints(trial_id)
                self.found.append(Repair(f"checkpoints/{trial_id}", f"the trial is {winner.status}", REMOVED))

    def _claims(self, live: Collection[str]) -> None:
        """Removes claims of dead processes once their number is taken by a part, or an hour later."""
        for claim in self.store.claims():
            if claim.alive or claim.trial_id in live:
                continue
            path = claim_path(claim.trial_id, claim.attempt)
            trial = self.trials.get(claim.trial_id)
            if (trial and claim.attempt in trial.numbers) or self._is_old(path):
                if not self.dry_run:
                    self.store.sweep_away(claim)
                host = f" on {claim.host}" if claim.host else ""
                self.found.append(Repair(path, f"its process{host} is gone", REMOVED))

    def _temporary_files(self, live: Collection[str]) -> None:
        """Removes what dead writers left half written."""
        checkpoints = [f"checkpoints/{name}" for name in self.place.names("checkpoints") if name not in live]
        for folder in (*(folder for folder in FOLDERS if folder != "checkpoints"), *sorted(checkpoints)):
            for name in sorted(self.place.names(folder, ".")):
                if any(name.startswith(f".{trial_id}-") for trial_id in live) or not self._is_old(f"{folder}/{name}"):
                    continue
                if not self.dry_run:
                    self.place.remove(f"{folder}/{name}")
                self.found.append(Repair(f"{folder}/{name}", "its writer is gone", REMOVED))

    def _is_old(self, path: str) -> bool:
        with suppress(OSError):
            return time.time() - self.place.modified(path) > LEFTOVER_AFTER_S
        return False


def _doomed(trial: _Trial) -> dict[str, dict[int, str]]:
    """Table → attempt → why its part can't count, of a trial of which the rest is whole."""
    found = {table: {attempt: str(error) for attempt, error in trial.damaged[table].items()} for table in trial.damaged}
    for attempt in trial.orphans:
        found["metrics"].setdefault(attempt, "its row of the trials table is missing or damaged")
    return found


def _rows(rows: pa.Table) -> dict[Unit, _Row]:
    none = [None] * len(rows)
    columns = [
        rows[name].to_pylist() if name in rows.column_names else none for name in (*ATTEMPT_COLUMNS, "num_metric_rows")
    ]
    decides = [Attempt(*values[:-1]) for values in zip(*columns, strict=True)]
    return {(a.trial_id, a.attempt): _Row(a, promised) for a, promised in zip(decides, columns[-1], strict=True)}
