"""Reading a table whole: its parts and compacted files as one, whatever is damaged and whoever compacts meanwhile.

A compacted file hides the files that it replaces. An attempt that two files hold is taken from one of them. A listed
file that is gone when it is to be read was compacted in between, so the folder is listed again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sweeps.store import footer_row, parts
from sweeps.store.clean import ATTEMPT_COLUMNS, Attempt
from sweeps.store.parts import Damaged
from sweeps.store.places import Entry, Place, one_line
from sweeps.store.schema import INT, SCHEMA_VERSION, STRING, StoreError

_MAX_LISTINGS = 20
"""A reader that meets so many compactions in a row gives up."""

_NEEDED = {"trials": ("trial_id", "attempt"), "metrics": ("trial_id", "attempt"), "sweeps": ("request_id",)}
"""Columns that tell what a row belongs to."""

_CODED = ("trial_id", "split", "metric")
"""Columns of the metrics table that are read as codes and a dictionary."""

_MAX_SELECTED = 256
"""Parts whose rows are selected from at once: most of the time of one alone goes into the calls."""

_MAX_HANDED_OVER = 32
"""Files that a thread reads before it asks for more."""

Key = tuple[str, int]
"""Trial and attempt."""

T = TypeVar("T")


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

    def attempts(self, trial_ids: Collection[str] | None = None) -> list[Attempt]:
        """What decides which attempt counts, of every attempt; files that haven't changed are remembered.

        Args:
          trial_ids: at these trials only; None for all. Of other trials' parts no more than the name is looked at.
        """
        selection = Selection(trial_ids)

        def wanted(name: str) -> bool:
            return trial_ids is None or parts.is_compacted(name) or name.rpartition("-")[0] in trial_ids

        return self._until_listed("trials", lambda entries: self._read_attempts(entries, selection), wanted)

    def numbers(self, trial_ids: Collection[str]) -> dict[str, list[int]]:
        """For each of some trials the attempts of which there is, or was, a part, readable or not."""
        numbers: dict[str, list[int]] = {trial_id: [] for trial_id in trial_ids}

        def note(names: Collection[str]) -> None:
            for name in names:
                # Of the thousands of names, most are cheaply seen to be of others.
                if name.rpartition("-")[0] in numbers and (split := parts.split_name(name)) is not None:
                    numbers[split[0]].append(split[1])

        for table in ("trials", "metrics"):
            names = self._place.names(table)
            note(names)
            for name in filter(parts.is_compacted, names):
                try:
                    note(self._replaced_by(table, name))
                except StoreError:
                    raise
                except (Damaged, OSError):
                    continue
        return numbers

    def _until_listed(
        self, table: str, use: Callable[[list[Entry]], Any], wanted: Callable[[str], bool] = lambda name: True
    ) -> Any:
        for attempt in range(_MAX_LISTINGS):
            self.damaged[table] = []
            try:
                return use(self._place.entries(table, parts.SUFFIX, wanted))
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
        needed = None if columns is None else list(dict.fromkeys([*_NEEDED[table], *columns]))
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

        single = [entry for entry in entries if not parts.is_compacted(entry.name) and entry.name not in hidden]
        if table == "sweeps":
            single = [entry for entry in single if entry.name.removesuffix(parts.SUFFIX) not in seen]
        else:
            single = [entry for entry in single if self._is_wanted(table, entry.name, selection, seen)]
            single.sort(key=lambda entry: parts.split_name(entry.name) or ("", 0))
        if table == "trials":
            found += self._trial_parts(single, columns)
        elif table == "metrics":
            found += self._metric_parts(single, columns, selection)
        else:
            found += self._each(
                table,
                single,
                lambda name, data: parts.decode(table, data, self._place.shown_path(f"{table}/{name}"), columns),
            )
        self.damaged[table].sort()
        return found

    def _is_wanted(self, table: str, name: str, selection: Selection, seen: Collection[Key]) -> bool:
        key = parts.split_name(name)
        if key is None:
            self.damaged[table].append((f"{table}/{name}", f"not named <trial_id>-<attempt>{parts.SUFFIX}"))
            return False
        return key not in seen and selection.limit(key) != -1

    def _each(self, table: str, entries: Sequence[Entry], use: Callable[[str, bytes], T | None]) -> list[tuple[str, T]]:
        """Reads files, several at once; notes those that can't be used."""

        def read_one(entry: Entry) -> tuple[str, T] | None:
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

        num_readers = self._place.num_readers
        if len(entries) < 4:
            results = [read_one(entry) for entry in entries]
        else:
            # Handing over each file alone takes longer than reading a small one.
            size = max(1, min(_MAX_HANDED_OVER, len(entries) // (4 * num_readers)))
            chunks = [entries[start : start + size] for start in range(0, len(entries), size)]
            with ThreadPoolExecutor(num_readers) as pool:
                read = pool.map(lambda chunk: [read_one(entry) for entry in chunk], chunks)
                results = [result for chunk in read for result in chunk]
        return [result for result in results if result is not None]

    def _trial_parts(self, entries: Sequence[Entry], columns: Sequence[str] | None) -> list[tuple[str, pa.Table]]:
        """The rows of parts of the trials table; many of them in one table."""
        found = self._each("trials", entries, lambda name, data: self._trial_part(name, data, columns))
        quick = [(path, row) for path, row in found if not isinstance(row, pa.Table)]
        return [(path, row) for path, row in found if isinstance(row, pa.Table)] + footer_row.tables(quick, columns)

    def _trial_part(self, name: str, data: bytes, columns: Sequence[str] | None) -> dict[str, Any] | pa.Table:
        """The row of a part of the trials table, as `rows.read` gives it if it can."""
        row = footer_row.read(data, SCHEMA_VERSION) if parts.is_intact(data) else None
        if row is None:
            return self._part("trials", name, data, columns)
        _check_key(name, (row["trial_id"], row["attempt"]))
        return row

    def _metric_parts(
        self, entries: Sequence[Entry], columns: Sequence[str] | None, selection: Selection
    ) -> list[tuple[str, pa.Table]]:
        """The wanted rows of parts of the metrics table; those of some hundred parts in one table."""
        needed = None if columns is None else list(dict.fromkeys([*_NEEDED["metrics"], *columns]))
        found = []
        for start in range(0, len(entries), _MAX_SELECTED):
            chunk = entries[start : start + _MAX_SELECTED]
            if rows := self._each("metrics", chunk, lambda name, data: self._part("metrics", name, data, needed)):
                selected = _select(pa.concat_tables([part for _, part in rows]), selection, set())
                found.append((rows[0][0], selected if columns is None else selected.select(columns)))
        return found

    def _whole(self, table: str, name: str, data: bytes, columns: Sequence[str] | None) -> pa.Table:
        shown = self._place.shown_path(f"{table}/{name}")
        rows = parts.decode(table, data, shown, columns, _CODED if table == "metrics" else ())
        self._replaced_by(table, name, data)
        return rows

    def _part(self, table: str, name: str, data: bytes, columns: Sequence[str] | None) -> pa.Table:
        shown = self._place.shown_path(f"{table}/{name}")
        rows = parts.decode(table, data, shown, columns, _CODED if table == "metrics" else ())
        if table == "trials" and len(rows) != 1:
            raise Damaged(f"{len(rows)} rows instead of one")
        if len(rows) and {"trial_id", "attempt"} <= set(rows.column_names):
            _check_key(name, (rows["trial_id"][0].as_py(), rows["attempt"][0].as_py()))
        return rows

    def _read_attempts(self, entries: Sequence[Entry], selection: Selection = ALL) -> list[Attempt]:
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
                if selection.limit((row.trial_id, row.attempt)) != -1:
                    found.setdefault((row.trial_id, row.attempt), row)

        seen = frozenset(found)
        versions, known, fresh = {}, {}, []
        for entry in entries:
            if parts.is_compacted(entry.name) or entry.name in hidden:
                continue
            if not self._is_wanted("trials", entry.name, selection, seen):
                continue
            versions[entry.name] = entry
            cached = self._attempts.get(entry.name)
            if cached is not None and cached[0] == entry.version:
                known[entry.name] = cached
            else:
                fresh.append(entry)
        rows_of = self._each("trials", fresh, lambda name, data: self._trial_part(name, data, ATTEMPT_COLUMNS))
        settled_before = time.time() - self._place.settles_after_s
        current = [row for _, row in known.values()]
        for path, part in rows_of:
            entry = versions[path.rpartition("/")[2]]
            row = _attempts_of(part)[0] if isinstance(part, pa.Table) else _quick_attempt(part)
            current.append(row)
            # A file that is replaced within the clock's resolution would not look replaced.
            if entry.modified < settled_before or not self._place.settles_after_s:
                known[entry.name] = (entry.version, row)
        self._attempts = known if selection.trial_ids is None else {**self._attempts, **known}
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


def _quick_attempt(row: Mapping[str, Any]) -> Attempt:
    values: list[Any] = [row.get(name) for name in ATTEMPT_COLUMNS]
    return Attempt(*values)._replace(ended_at=footer_row.as_time(row.get("ended_at")))


def _check_key(name: str, inside: Key) -> None:
    """The name decides which attempt it is, so that a copy of a part under another name never counts twice."""
    if inside != parts.split_name(name):
        raise Damaged(f"belongs to attempt {inside[0]}-{inside[1]}")


def _unseen_requests(rows: pa.Table, seen: set[str]) -> pa.Table:
    """Without the requests that another file holds."""
    kept = rows.filter(pc.invert(pc.is_in(rows["request_id"], pa.array(sorted(seen), STRING)))) if seen else rows
    seen.update(kept["request_id"].to_pylist())
    return kept


def _codes(column: pa.ChunkedArray) -> tuple[list[Any], np.ndarray]:
    """The values of a column that few values repeat in, and which of them each row has."""
    array = column.combine_chunks().dictionary_encode()
    array = array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
    return array.dictionary.to_pylist(), array.indices.to_numpy(zero_copy_only=False)


def _runs(rows: pa.Table) -> Iterator[tuple[Key, int, int]]:
    """(attempt, first row, row after its last) of rows in which each attempt's stand together."""
    if not len(rows):
        return
    names, codes = _codes(rows["trial_id"])
    attempts = rows["attempt"].to_numpy()
    starts = np.flatnonzero((np.diff(codes) != 0) | (np.diff(attempts) != 0)) + 1
    for start, end in zip([0, *starts.tolist()], [*starts.tolist(), len(rows)], strict=True):
        yield (names[codes[start]], int(attempts[start])), start, end


def _select(rows: pa.Table, selection: Selection, seen: set[Key]) -> pa.Table:
    """The wanted rows of many attempts, each of whose stand together, without attempts that another file holds."""
    rows = rows.unify_dictionaries()
    wanted = np.zeros(len(rows), bool)
    steps = rows["step"].to_numpy() if selection.limits is not None else None
    for key, start, end in _runs(rows):
        limit = selection.limit(key)
        if key in seen:
            continue
        seen.add(key)
        if limit != -1:
            wanted[start:end] = True if limit is None or steps is None else steps[start:end] <= limit
    for name, values in selection.values.items():
        names, codes = _codes(rows[name])
        wanted &= np.isin(names, list(values))[codes] if names else False
    if not wanted.all():
        rows = rows.filter(pa.array(wanted))
    if selection.last and len(rows):
        rows = _last(rows)
    return rows.cast(_plain(rows.schema))


def _plain(schema: pa.Schema) -> pa.Schema:
    """With strings in place of codes and dictionaries."""
    fields = [field.with_type(STRING) if pa.types.is_dictionary(field.type) else field for field in schema]
    return pa.schema(fields)


def _last(rows: pa.Table) -> pa.Table:
    """Of each attempt, split and metric the row of the highest step, the later one of two."""
    codes = np.zeros(len(rows), np.int64)
    for name in ("trial_id", "attempt", "split", "metric"):
        values, own = _codes(rows[name])
        codes = codes * max(1, len(values)) + own
    steps = rows["step"].to_numpy()
    order = np.lexsort((steps, codes))
    ends = np.flatnonzero(np.diff(codes[order], append=-1))
    return rows.take(pa.array(np.sort(order[ends]), INT))
