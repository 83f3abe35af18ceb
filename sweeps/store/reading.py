"""Reading a table whole: its parts and compacted files as one, whatever is damaged and whoever compacts meanwhile.

A compacted file hides the files that it replaces. An attempt that two files hold is taken from one of them. A listed
file that is gone when it is to be read was compacted in between, so the folder is listed again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sweeps.store import parts
from sweeps.store.clean import ATTEMPT_COLUMNS, Attempt
from sweeps.store.parts import Damaged
from sweeps.store.places import Entry, Place, one_line
from sweeps.store.schema import INT, STRING, StoreError

_MAX_LISTINGS = 20
"""A reader that meets so many compactions in a row gives up."""

Key = tuple[str, int]
"""Trial and attempt."""


class Selection(NamedTuple):
    """Which rows of a table are wanted."""

    trial_ids: Collection[str] | None = None  # of these trials; None for all
    limits: Mapping[Key, int | None] | None = None  # of these attempts, up to this step; None for all
    values: Mapping[str, Sequence[str]] = {}  # column → allowed values
    last: bool = False  # of each attempt, split and metric the last row only

    def limit(self, key: Key) -> int | None:
        """The last step wanted of an attempt: None for all, -1 for nothing."""
        if self.trial_ids is not None and key[0] not in self.trial_ids:
            return -1
        return None if self.limits is None else self.limits.get(key, -1)


ALL = Selection()
"""Every row."""


class _Gone(Exception):
    """A listed file is not there any more."""


class Reader:
    """Reads the tables of one store.

    Attributes:
      damaged: table → files that its last read passed over, each with the reason.
    """

    def __init__(self, place: Place):
        self._place = place
        self.damaged: dict[str, list[tuple[str, str]]] = {}
        self._attempts: dict[str, tuple[tuple[int, ...], Attempt]] = {}
        # Compacted files never change, so their names are enough.
        self._compacted_attempts: dict[str, list[Attempt]] = {}
        self._replaces: dict[str, frozenset[str]] = {}

    def read(
        self, table: str, *, columns: Sequence[str] | None = None, selection: Selection = ALL
    ) -> list[tuple[str, pa.Table]]:
        """The rows of a table, each file alone, so that a broken one harms no other; notes those passed over.

        Args:
          table: trials, metrics or sweeps.
          columns: these columns; None for all.
          selection: which rows.

        Returns:
          (path of the file, its rows), in the order of trials and attempts as far as each file goes.

        Raises:
          StoreError: a file was written by a newer version, or the folder can't be read.
        """
        return self._until_listed(table, lambda entries: self._read(table, entries, columns, selection))

    def attempts(self) -> list[Attempt]:
        """What decides which attempt counts, of every attempt; files that haven't changed are remembered."""
        return self._until_listed("trials", self._read_attempts)

    def numbers(self, trial_id: str) -> list[int]:
        """Attempts at a trial of which there is, or was, a part, readable or not."""
        own, numbers = f"{trial_id}-", []
        for table in ("trials", "metrics"):
            for name in self._place.names(table):
                if name.startswith(own):
                    if (split := parts.split_name(name)) and split[0] == trial_id:
                        numbers.append(split[1])
                elif parts.is_compacted(name):
                    try:
                        replaced = self._replaced_by(table, name)
                    except StoreError:
                        raise
                    except (Damaged, OSError):
                        continue
                    splits = (parts.split_name(other) for other in replaced if other.startswith(own))
                    numbers += [split[1] for split in splits if split and split[0] == trial_id]
        return numbers

    def _until_listed(self, table: str, use: Callable[[list[Entry]], Any]) -> Any:
        for attempt in range(_MAX_LISTINGS):
            self.damaged[table] = []
            try:
                return use(self._place.entries(table, parts.SUFFIX))
            except _Gone:
                time.sleep(0.001 * attempt)
        raise StoreError(f"{self._place.shown_path(table)}: its files go while they are read; try again")

    def _replaced_by(self, table: str, name: str, data: bytes | None = None) -> frozenset[str]:
        path = f"{table}/{name}"
        if path not in self._replaces:
            self._replaces[path] = frozenset(parts.replaces(self._place.read(path) if data is None else data))
        return self._replaces[path]

    def _read(
        self, table: str, entries: Sequence[Entry], columns: Sequence[str] | None, selection: Selection
    ) -> list[tuple[str, pa.Table]]:
        # The keys are needed to tell attempts apart; of a part its name is the key.
        keys = ("request_id",) if table == "sweeps" else ("trial_id", "attempt")
        needed = None if columns is None else list(dict.fromkeys([*keys, *columns]))
        compacted = [entry for entry in entries if parts.is_compacted(entry.name)]
        whole = self._each(table, compacted, lambda name, data: self._whole(table, name, data, needed))
        hidden = frozenset().union(*(self._replaced_by(table, path.rpartition("/")[2]) for path, _ in whole))
        found: list[tuple[str, pa.Table]] = []
        seen: set[Any] = set()
        for path, rows in whole:
            if path.rpartition("/")[2] in hidden:
                continue
            kept = _unseen_requests(rows, seen) if table == "sweeps" else _select(rows, selection, seen)
            if columns is not None:
                kept = kept.select([name for name in columns if name in kept.column_names])
            found.append((path, kept))

        def read_part(name: str, data: bytes) -> pa.Table | None:
            path = f"{table}/{name}"
            if table == "sweeps":
                return parts.decode(table, data, self._place.shown_path(path), columns)
            return self._part(table, name, data, columns, selection)

        single = [entry for entry in entries if not parts.is_compacted(entry.name) and entry.name not in hidden]
        if table == "sweeps":
            single = [entry for entry in single if entry.name.removesuffix(parts.SUFFIX) not in seen]
        else:
            single = [entry for entry in single if self._is_wanted(table, entry.name, selection, seen)]
            single.sort(key=lambda entry: parts.split_name(entry.name) or ("", 0))
        found += self._each(table, single, read_part)
        self.damaged[table].sort()
        return found

    def _is_wanted(self, table: str, name: str, selection: Selection, seen: Collection[Key]) -> bool:
        key = parts.split_name(name)
        if key is None:
            self.damaged[table].append((f"{table}/{name}", f"not named <trial_id>-<attempt>{parts.SUFFIX}"))
            return False
        return key not in seen and selection.limit(key) != -1

    def _each(
        self, table: str, entries: Sequence[Entry], use: Callable[[str, bytes], pa.Table | None]
    ) -> list[tuple[str, pa.Table]]:
        """Reads files, several at once; notes those that can't be used."""

        def read_one(entry: Entry) -> tuple[str, pa.Table] | None:
            path = f"{table}/{entry.name}"
            try:
                rows = use(entry.name, self._place.read(path))
                return None if rows is None else (path, rows)
            except FileNotFoundError as error:
                raise _Gone from error
            except Damaged as error:
                self.damaged[table].append((path, str(error)))
            except StoreError:
                raise  # also of a bucket that gives no answer: its files are not damaged
            except OSError as error:
                self.damaged[table].append((path, one_line(error)))
            return None

        if len(entries) < 4:
            results = [read_one(entry) for entry in entries]
        else:
            with ThreadPoolExecutor(self._place.num_readers) as pool:
                results = list(pool.map(read_one, entries))
        return [result for result in results if result is not None]

    def _whole(self, table: str, name: str, data: bytes, columns: Sequence[str] | None) -> pa.Table:
        rows = parts.decode(table, data, self._place.shown_path(f"{table}/{name}"), columns)
        self._replaced_by(table, name, data)
        return rows

    def _part(
        self, table: str, name: str, data: bytes, columns: Sequence[str] | None, selection: Selection
    ) -> pa.Table | None:
        key = parts.split_name(name)
        assert key is not None
        rows = parts.decode(table, data, self._place.shown_path(f"{table}/{name}"), columns)
        if table == "trials" and len(rows) != 1:
            raise Damaged(f"{len(rows)} rows instead of one")
        # The name decides which attempt it is, so that a copy of a part under another name never counts twice.
        if len(rows) and {"trial_id", "attempt"} <= set(rows.column_names):
            inside = (rows["trial_id"][0].as_py(), rows["attempt"][0].as_py())
            if inside != key:
                raise Damaged(f"belongs to attempt {inside[0]}-{inside[1]}")
        return _narrow(rows, selection, selection.limit(key))

    def _read_attempts(self, entries: Sequence[Entry]) -> list[Attempt]:
        compacted = [entry for entry in entries if parts.is_compacted(entry.name)]
        unknown = [entry for entry in compacted if entry.name not in self._compacted_attempts]
        for path, rows in self._each(
            "trials", unknown, lambda name, data: self._whole("trials", name, data, ATTEMPT_COLUMNS)
        ):
            self._compacted_attempts[path.rpartition("/")[2]] = _attempts_of(rows)
        there = {entry.name for entry in compacted if entry.name in self._compacted_attempts}
        self._compacted_attempts = {name: self._compacted_attempts[name] for name in there}
        hidden = frozenset().union(*(self._replaced_by("trials", name) for name in there))
        found: dict[Key, Attempt] = {}
        for name in sorted(there - hidden):
            for row in self._compacted_attempts[name]:
                found.setdefault((row.trial_id, row.attempt), row)

        seen = frozenset(found)
        versions, known, fresh = {}, {}, []
        for entry in entries:
            if parts.is_compacted(entry.name) or entry.name in hidden:
                continue
            if not self._is_wanted("trials", entry.name, ALL, seen):
                continue
            versions[entry.name] = entry
            cached = self._attempts.get(entry.name)
            if cached is not None and cached[0] == entry.version:
                known[entry.name] = cached
            else:
                fresh.append(entry)
        rows_of = self._each("trials", fresh, lambda name, data: self._part("trials", name, data, ATTEMPT_COLUMNS, ALL))
        settled_before = time.time() - self._place.settles_after_s
        current = [row for _, row in known.values()]
        for path, part in rows_of:
            entry = versions[path.rpartition("/")[2]]
            row = _attempts_of(part)[0]
            current.append(row)
            # A file that is replaced within the clock's resolution would not look replaced.
            if entry.modified < settled_before or not self._place.settles_after_s:
                known[entry.name] = (entry.version, row)
        self._attempts = known
        self.damaged["trials"].sort()
        return [*found.values(), *current]


def in_order(found: Sequence[tuple[str, pa.Table]]) -> list[tuple[str, pa.Table]]:
    """Tables of one or many attempts each, cut up and put in the order of trials and attempts."""
    if len(found) < 2 or not any(parts.is_compacted(path.rpartition("/")[2]) for path, _ in found):
        return list(found)
    pieces = [(key, path, rows.slice(start, end - start)) for path, rows in found for key, start, end in _runs(rows)]
    return [(path, rows) for _, path, rows in sorted(pieces, key=lambda piece: piece[0])]


def _attempts_of(rows: pa.Table) -> list[Attempt]:
    none = [None] * len(rows)
    columns = [rows[name].to_pylist() if name in rows.column_names else none for name in ATTEMPT_COLUMNS]
    return [Attempt(*values) for values in zip(*columns, strict=True)]


def _unseen_requests(rows: pa.Table, seen: set[str]) -> pa.Table:
    """Without the requests that another file holds."""
    kept = rows.filter(pc.invert(pc.is_in(rows["request_id"], pa.array(sorted(seen), STRING)))) if seen else rows
    seen.update(kept["request_id"].to_pylist())
    return kept


def _runs(rows: pa.Table) -> Iterator[tuple[Key, int, int]]:
    """(attempt, first row, row after its last) of rows in which each attempt's stand together."""
    if not len(rows):
        return
    trials = rows["trial_id"].combine_chunks().dictionary_encode()
    trials = trials.combine_chunks() if isinstance(trials, pa.ChunkedArray) else trials
    codes, attempts = trials.indices.to_numpy(zero_copy_only=False), rows["attempt"].to_numpy()
    starts = np.flatnonzero((np.diff(codes) != 0) | (np.diff(attempts) != 0)) + 1
    names = trials.dictionary.to_pylist()
    for start, end in zip([0, *starts.tolist()], [*starts.tolist(), len(rows)], strict=True):
        yield (names[codes[start]], int(attempts[start])), start, end


def _select(rows: pa.Table, selection: Selection, seen: set[Key]) -> pa.Table:
    """The wanted rows of a compacted file, without the attempts that another file holds."""
    wanted = np.zeros(len(rows), bool)
    steps = rows["step"].to_numpy() if selection.limits is not None else None
    for key, start, end in list(_runs(rows)):
        limit = selection.limit(key)
        if key in seen:
            continue
        seen.add(key)
        if limit != -1:
            wanted[start:end] = True if limit is None or steps is None else steps[start:end] <= limit
    if not wanted.all():
        rows = rows.filter(pa.array(wanted))
    return _narrow(rows, selection, None)


def _narrow(rows: pa.Table, selection: Selection, limit: int | None) -> pa.Table:
    """The wanted rows of those up to a step, in which each attempt's stand together."""
    if limit is not None:
        rows = rows.filter(pc.less_equal(rows["step"], limit))
    for name, values in selection.values.items():
        rows = rows.filter(pc.is_in(rows[name], pa.array(list(values), STRING)))
    return _last(rows) if selection.last and len(rows) else rows


def _last(rows: pa.Table) -> pa.Table:
    """Of each attempt, split and metric the row of the highest step, the later one of two."""
    codes = np.zeros(len(rows), np.int64)
    for name in ("trial_id", "attempt", "split", "metric"):
        column = rows[name].combine_chunks().dictionary_encode()
        column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        codes = codes * max(1, len(column.dictionary)) + column.indices.to_numpy(zero_copy_only=False)
    steps = rows["step"].to_numpy()
    order = np.lexsort((steps, codes))
    ends = np.flatnonzero(np.diff(codes[order], append=-1))
    return rows.take(pa.array(np.sort(order[ends]), INT))
