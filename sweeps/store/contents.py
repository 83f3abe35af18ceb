"""What each file of a table holds, as `compact` and `repair` need to know it: whole, one file after another.

Readers want rows, wherever they lie; upkeep wants files. A unit is what is moved as one: an attempt (trial_id, attempt)
of the trials and metrics tables, a request (request_id,) of the sweeps table.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from sweeps.store import parts
from sweeps.store.parts import Damaged
from sweeps.store.places import Entry, Place, one_line
from sweeps.store.schema import StoreError

T = TypeVar("T")

Unit = tuple[Any, ...]
"""(trial_id, attempt) or (request_id,)."""

UNIT_COLUMNS = {"trials": ("trial_id", "attempt"), "metrics": ("trial_id", "attempt"), "sweeps": ("request_id",)}

_MAX_LISTINGS = 20


class Listing(NamedTuple):
    """The files of a table at one moment."""

    entries: dict[str, Entry]  # name → file, all of them
    compacted: dict[str, dict[Unit, int]]  # whole compacted files, hidden ones too → rows of each unit
    replaces: dict[str, frozenset[str]]  # of those, the names of the files whose rows they hold
    damaged: dict[str, Damaged]  # compacted files that can't be used

    @property
    def hidden(self) -> frozenset[str]:
        """Files whose rows a compacted file holds."""
        return frozenset[str]().union(*self.replaces.values())

    @property
    def visible(self) -> dict[str, dict[Unit, int]]:
        """Whole compacted files that no other one replaces."""
        hidden = self.hidden
        return {name: units for name, units in self.compacted.items() if name not in hidden}

    @property
    def parts(self) -> list[str]:
        """Files of one attempt or request that no compacted file replaces, in the order of trials and attempts."""
        hidden = self.hidden
        names = [name for name in self.entries if not parts.is_compacted(name) and name not in hidden]
        return sorted(names, key=lambda name: parts.split_name(name) or (name, 0))


class UnreadableError(Damaged):
    """A file can't be read just now, which says nothing of what it holds."""


class GoneError(Exception):
    """A listed file is not there any more: somebody compacted or repaired meanwhile."""


def list_table(place: Place, table: str, use: Callable[[str, pa.Table], object] = lambda name, rows: None) -> Listing:
    """Lists a table and reads its compacted files whole.

    Args:
      place: where the store is.
      table: trials, metrics or sweeps.
      use: is handed each whole compacted file, (name, rows).

    Raises:
      GoneError: a compacted file went while it was being read.
      StoreError: a file was written by a newer version, or the folder can't be read.
    """
    entries = {entry.name: entry for entry in place.entries(table, parts.SUFFIX)}
    compacted: dict[str, dict[Unit, int]] = {}
    replaces: dict[str, frozenset[str]] = {}
    damaged: dict[str, Damaged] = {}
    for name in filter(parts.is_compacted, entries):
        try:
            data = _read(place, table, name)
            rows = _decode(place, table, name, data)
            units = {unit: end - start for unit, (start, end) in spans(table, rows).items()}
            replaced = frozenset(parts.replaces(data))
        except Damaged as error:
            damaged[name] = error
            continue
        del data
        compacted[name], replaces[name] = units, replaced
        use(name, rows)
    return Listing(entries, compacted, replaces, damaged)


def until_listed(place: Place, table: str, use: Callable[[], T]) -> T:
    """Calls `use`, again where files went while it read them.

    Raises:
      StoreError: they go all the time.
    """
    for attempt in range(_MAX_LISTINGS):
        try:
            return use()
        except GoneError:
            time.sleep(0.001 * attempt)
    raise StoreError(f"{place.shown_path(table)}: its files go while they are read; try again")


def read_file(place: Place, table: str, name: str) -> pa.Table:
    """All rows of one file, checked whole: every page, and that a part is the attempt that its name says.

    Raises:
      GoneError: it isn't there.
      Damaged: it can't be used.
      StoreError: it was written by a newer version.
    """
    return _decode(place, table, name, _read(place, table, name))


def read_parts(place: Place, table: str, names: Iterable[str]) -> Iterator[tuple[str, pa.Table | Damaged | GoneError]]:
    """Reads files in their order, a few ahead, so that few are in memory at once; an error comes in a file's place."""

    def read_one(name: str) -> pa.Table | Damaged | GoneError:
        try:
            return read_file(place, table, name)
        except (Damaged, GoneError) as error:
            return error

    ahead: deque[tuple[str, Future[pa.Table | Damaged | GoneError]]] = deque()
    with ThreadPoolExecutor(place.num_readers) as pool:
        try:
            for name in names:
                ahead.append((name, pool.submit(read_one, name)))
                if len(ahead) > 4 * place.num_readers:
                    first, future = ahead.popleft()
                    yield first, future.result()
            while ahead:
                first, future = ahead.popleft()
                yield first, future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def unit_of(table: str, name: str) -> Unit:
    """The unit that a part's name says."""
    return (name.removesuffix(parts.SUFFIX),) if table == "sweeps" else parts.split_name(name) or (name, 0)


def spans(table: str, rows: pa.Table) -> dict[Unit, tuple[int, int]]:
    """Unit → (first row, row after its last) of rows in which each unit's stand together.

    Raises:
      Damaged: the rows of a unit are in two places.
    """
    if not len(rows):
        return {}
    names = UNIT_COLUMNS[table]
    changes = np.zeros(len(rows) - 1, bool)
    for name in names:
        codes = _codes(rows[name])
        changes |= np.diff(codes) != 0
    starts = np.concatenate([[0], np.flatnonzero(changes) + 1])
    ends = np.append(starts[1:], len(rows))
    firsts = rows.select(names).take(pa.array(starts))
    units = list(zip(*(firsts[name].to_pylist() for name in names), strict=True))
    found = dict(zip(units, zip(starts.tolist(), ends.tolist(), strict=True), strict=True))
    if len(found) != len(units):
        raise Damaged("the rows of an attempt don't stand together")
    return found


def take_units(table: str, rows: pa.Table, wanted: Callable[[Unit], bool]) -> pa.Table:
    """The rows of the wanted units."""
    mask = np.zeros(len(rows), bool)
    for unit, (start, end) in spans(table, rows).items():
        mask[start:end] = wanted(unit)
    return rows if mask.all() else rows.filter(pa.array(mask))


def join(table: str, found: Sequence[tuple[str, pa.Table]]) -> pa.Table:
    """Tables of whole units below one another, sorted by unit; sweeps by the time of their request.

    Raises:
      StoreError: a config field has values of different kinds in two files; both are named.
    """
    rows = parts.concatenate(found, table).combine_chunks()
    columns = ("requested_at", "request_id") if table == "sweeps" else UNIT_COLUMNS[table]
    # Stable: within a unit the rows stay as they were measured.
    order = np.lexsort([_codes(rows[name]) for name in reversed(columns)])
    return rows if (np.diff(order) == 1).all() else rows.take(pa.array(order))


def names_of(listing: Listing, names: Iterable[str]) -> list[str]:
    """These files and all those that they replace in turn: what a file with their rows must hide."""
    return sorted({other for name in names for other in (name, *listing.replaces.get(name, ()))})


def counted(units: Mapping[Unit, int]) -> int:
    """Rows of all units."""
    return sum(units.values())


def _codes(column: pa.ChunkedArray) -> np.ndarray:
    """A number for each value, in the order of the values."""
    if not pa.types.is_string(column.type):
        return column.cast(pa.int64()).to_numpy()
    encoded = column.combine_chunks().dictionary_encode()
    encoded = encoded.combine_chunks() if isinstance(encoded, pa.ChunkedArray) else encoded
    values = encoded.dictionary.to_pylist()
    ranks = np.empty(len(values), np.int64)
    ranks[sorted(range(len(values)), key=values.__getitem__)] = np.arange(len(values))
    return ranks[encoded.indices.to_numpy(zero_copy_only=False)]


def _read(place: Place, table: str, name: str) -> bytes:
    try:
        return place.read(f"{table}/{name}")
    except FileNotFoundError as error:
        raise GoneError(name) from error
    except OSError as error:
        raise UnreadableError(one_line(error)) from error


def _decode(place: Place, table: str, name: str, data: bytes) -> pa.Table:
    rows = parts.decode(table, data, place.shown_path(f"{table}/{name}"))
    if parts.is_compacted(name) or table == "sweeps":
        return rows
    unit = parts.split_name(name)
    if unit is None:
        raise Damaged(f"not named <trial_id>-<attempt>{parts.SUFFIX}")
    if table == "trials" and len(rows) != 1:
        raise Damaged(f"{len(rows)} rows instead of one")
    for other in spans(table, rows):
        if other != unit:
            raise Damaged(f"belongs to attempt {other[0]}-{other[1]}")
    return rows
