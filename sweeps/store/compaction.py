"""`compact`: a few large, sorted files per table in place of thousands of small ones, while others read and write.

Three rules keep every row. A compacted file appears whole and names the files whose rows it holds, and whose rows they
held; it hides them from then on. Rows of attempts that may still change are left where they are. A file is deleted only
by a later compaction, once the file that hides it is older than the grace time and was read back whole with the same
rows. So whatever is lost or half done at any moment, each row lies whole in a file that nothing hides; where two
compactions hold the same rows, readers take them from one, and the next compaction merges the two.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from sweeps.store import parts
from sweeps.store.contents import (
    GoneError,
    Listing,
    Unit,
    counted,
    join,
    list_table,
    names_of,
    read_file,
    read_parts,
    spans,
    take_units,
    unit_of,
    until_listed,
)
from sweeps.store.parts import Damaged
from sweeps.store.places import Place, one_line
from sweeps.store.schema import KEYS, TABLES, StoreError

if TYPE_CHECKING:
    from sweeps.store.store import Store

GRACE_S = 600.0
"""How long replaced files stay, for readers other than ours that have just listed them."""

MAX_ROWS = 2_000_000
"""Rows of one compacted file; it bounds the memory that compaction needs, about 0.2 GB for each million."""

_JOINED_AT_ONCE = 256  # parts; small tables cost more memory than their rows


class TableCompaction(NamedTuple):
    """What was done to one table."""

    table: str
    num_merged: int  # files whose rows lie in new files now
    num_rows: int  # rows of the new files
    written: tuple[str, ...]  # names of the new files
    num_deleted: int  # replaced files that were deleted
    num_waiting: int  # replaced files that stay for now
    overtaken: bool  # whether somebody else compacted or repaired meanwhile, so that some is left to do


class Compaction(NamedTuple):
    """What was done to a store."""

    tables: tuple[TableCompaction, ...]
    damaged: tuple[tuple[str, str], ...]  # files passed over, relative to the store, each with the reason

    @property
    def did_something(self) -> bool:
        """Whether any file was written or deleted."""
        return any(table.written or table.num_deleted for table in self.tables)


class _Fact(NamedTuple):
    """What the trials table says of an attempt."""

    status: str | None
    num_metric_rows: int | None


def compact(store: Store, *, grace_s: float = GRACE_S, max_rows: int = MAX_ROWS) -> Compaction:
    """Makes a few large, sorted files per table, and deletes those that an earlier compaction replaced.

    Harmless beside readers, a running sweep, and other compactions, and after a crash at any moment.

    Args:
      store: the store.
      grace_s: replaced files are deleted once the file that holds their rows is so old, in seconds.
      max_rows: rows of one file; a file with less than half is merged with others.

    Returns:
      What was done.

    Raises:
      StoreError: a file can't be written, or was written by a newer version.
    """
    place = store.place
    running = {(claim.trial_id, claim.attempt) for claim in store.claims() if claim.alive}
    damaged: dict[str, str] = {}
    facts: dict[Unit, _Fact] = {}

    def is_whole(unit: Unit, rows: pa.Table) -> bool:
        promised = facts[unit].num_metric_rows
        if promised is not None and len(rows) < promised:
            raise Damaged(f"{len(rows)} rows instead of {promised}")
        return True

    def is_sealed(unit: Unit, rows: pa.Table) -> bool:
        facts.update(_facts(rows))
        return facts[unit].status is not None and unit not in running

    # Trials first: an attempt that is sealed now has all of its rows in the metrics table.
    steps: dict[str, tuple[Callable[[Unit], bool], Callable[[Unit, pa.Table], bool]]] = {
        "trials": (lambda unit: True, is_sealed),
        "metrics": (lambda unit: unit in facts and facts[unit].status is not None and unit not in running, is_whole),
        "sweeps": (lambda unit: True, lambda unit, rows: True),
    }
    assert set(steps) == set(TABLES)
    results = []
    try:
        for table, (is_wanted, is_ready) in steps.items():
            work = _Work(place, table, grace_s, max_rows, damaged)
            if table == "trials":
                work.use_compacted = lambda name, rows: facts.update(_facts(rows))
            results.append(work.run(is_wanted, is_ready))
    except OSError as error:
        raise StoreError(f"{place.shown}: can't be compacted: {one_line(error)}; nothing is lost") from error
    return Compaction(tuple(results), tuple(sorted(damaged.items())))


class _OvertakenError(Exception):
    """Somebody else changed the table meanwhile."""


class _Group:
    """Files that become one."""

    def __init__(self, table: str):
        self.table = table
        self.names: list[str] = []
        self.num_rows = 0
        self._units: set[Unit] = set()
        self._pieces: list[tuple[str, pa.Table]] = []

    def add(self, name: str, rows: pa.Table) -> None:
        """Takes in a file, without the units that another file of the group holds."""
        units = set(spans(self.table, rows))
        if both := units & self._units:
            rows = take_units(self.table, rows, lambda unit: unit not in both)
        self._units |= units
        self.names.append(name)
        self.num_rows += len(rows)
        self._pieces.append((f"{self.table}/{name}", rows))
        if len(self._pieces) >= _JOINED_AT_ONCE:
            self._pieces = [(f"{self.table}/{name}", self.rows())]

    def rows(self) -> pa.Table:
        """All rows, sorted."""
        return join(self.table, self._pieces)


class _Work:
    """The compaction of one table."""

    def __init__(self, place: Place, table: str, grace_s: float, max_rows: int, damaged: dict[str, str]):
        self.place, self.table, self.grace_s, self.max_rows = place, table, grace_s, max_rows
        self.damaged = damaged
        self.use_compacted: Callable[[str, pa.Table], object] = lambda name, rows: None
        self.written: list[str] = []
        self.num_merged = self.num_rows = 0

    def run(self, is_wanted: Callable[[Unit], bool], is_ready: Callable[[Unit, pa.Table], bool]) -> TableCompaction:
        """Merges, then deletes what earlier compactions replaced.

        Args:
          is_wanted: whether to open the part of a unit.
          is_ready: whether its rows, once read, are to be merged; raises Damaged where they are not whole.
        """
        listing = until_listed(self.place, self.table, lambda: list_table(self.place, self.table, self.use_compacted))
        for name, error in listing.damaged.items():
            self._note(name, error)
        overtaken = False
        try:
            for group in self._groups(listing, is_wanted, is_ready):
                if len(group.names) > 1:
                    self._write(group, listing)
        except (_OvertakenError, GoneError):
            overtaken = True
        deleted = self._delete_replaced(listing)
        waiting = len(listing.hidden & set(listing.entries)) - len(deleted) + self.num_merged
        return TableCompaction(
            self.table, self.num_merged, self.num_rows, tuple(self.written), len(deleted), waiting, overtaken
        )

    def _note(self, name: str, error: Damaged) -> None:
        self.damaged[f"{self.table}/{name}"] = str(error)

    def _groups(
        self, listing: Listing, is_wanted: Callable[[Unit], bool], is_ready: Callable[[Unit, pa.Table], bool]
    ) -> Iterator[_Group]:
        """The files to merge, read, a new file's worth at a time; a file is never split between two."""
        clusters, single = self._clusters(listing, is_wanted)
        group = _Group(self.table)
        for names, num_rows in clusters:
            if group.names and group.num_rows + num_rows > self.max_rows:
                yield group
                group = _Group(self.table)
            for name in names:
                try:
                    rows = read_file(self.place, self.table, name)
                    if parts.is_compacted(name) or is_ready(unit_of(self.table, name), rows):
                        group.add(name, rows)
                except Damaged as error:
                    self._note(name, error)
        for name, part in read_parts(self.place, self.table, single):
            try:
                if isinstance(part, Exception):
                    raise part
                if not is_ready(unit_of(self.table, name), part):
                    continue
            except Damaged as error:
                self._note(name, error)
                continue
            if group.names and group.num_rows + len(part) > self.max_rows:
                yield group
                group = _Group(self.table)
            group.add(name, part)
        yield group

    def _clusters(
        self, listing: Listing, is_wanted: Callable[[Unit], bool]
    ) -> tuple[list[tuple[list[str], int]], list[str]]:
        """What is there to merge.

        Returns:
          Clusters (files, rows): compacted files that share units among themselves or with parts, and small ones.
          The other parts.
        """
        units = {name: set(held) for name, held in listing.visible.items()}
        single = []
        for name in listing.parts:
            if self.table != "sweeps" and parts.split_name(name) is None:
                self._note(name, Damaged(f"not named <trial_id>-<attempt>{parts.SUFFIX}"))
            elif is_wanted(unit := unit_of(self.table, name)):
                if any(unit in held for held in listing.visible.values()):
                    units[name] = {unit}
                else:
                    single.append(name)
        clusters: list[tuple[list[str], set[Unit]]] = []
        for name in sorted(units, key=lambda name: (not parts.is_compacted(name), name)):
            names, held = [name], units[name]
            apart = []
            for other_names, other_units in clusters:
                if held.isdisjoint(other_units):
                    apart.append((other_names, other_units))
                else:
                    names, held = [*other_names, *names], held | other_units
            clusters = [*apart, (names, held)]
        counts = {name: counted(held) for name, held in listing.visible.items()}
        sized = [(names, sum(counts.get(name, 0) for name in names)) for names, _ in clusters]
        merged = [(names, num) for names, num in sized if len(names) > 1 or num < self.max_rows / 2]
        return sorted(merged, key=lambda cluster: cluster[1]), single

    def _write(self, group: _Group, listing: Listing) -> None:
        data = parts.encode(self.table, group.rows(), replaces=names_of(listing, group.names))
        # A look just before: what was moved or compacted meanwhile is not to come back. If it happens after the look,
        # rows are held twice or set aside once more, which readers and `repair` know how to take.
        now = {entry.name: entry for entry in self.place.entries(self.table, parts.SUFFIX)}
        known = {*listing.entries, *self.written}
        if any(parts.is_compacted(name) and name not in known for name in now) or any(
            name not in now or now[name].version != listing.entries[name].version for name in group.names
        ):
            raise _OvertakenError
        name = parts.compacted_name()
        self.place.write(f"{self.table}/{name}", data)
        self.written.append(name)
        self.num_merged += len(group.names)
        self.num_rows += group.num_rows

    def _delete_replaced(self, listing: Listing) -> set[str]:
        """Deletes files whose rows a compacted file holds that is old enough, whole, and holds them indeed."""
        deleted: set[str] = set()
        for name in sorted(listing.compacted):
            age_s = time.time() - listing.entries[name].modified
            doomed = sorted((listing.replaces[name] & set(listing.entries)) - deleted)
            if not doomed or age_s < self.grace_s:
                continue
            try:
                held = _Keys(self.table, [read_file(self.place, self.table, name)])
            except Damaged as error:
                self._note(name, error)
                continue
            except GoneError:
                continue
            for other, rows in read_parts(self.place, self.table, doomed):
                if isinstance(rows, GoneError):
                    continue
                if isinstance(rows, Damaged):
                    self._note(other, rows)
                elif held.lacks(rows) and held.lacks(rows, self._set_aside):
                    self._note(other, Damaged(f"replaced by {name}, which lacks rows of it; kept"))
                else:
                    self.place.remove(f"{self.table}/{other}")
                    deleted.add(other)
        return deleted

    @cached_property
    def _set_aside(self) -> _Keys:
        """Rows that `repair` took out of the table: the file that replaces theirs lacks them on purpose."""
        folder = f"damaged/{self.table}"
        found = []
        for entry in self.place.entries(folder, parts.SUFFIX):
            with suppress(Damaged, OSError):
                found.append(parts.decode(self.table, self.place.read(f"{folder}/{entry.name}"), entry.name))
        return _Keys(self.table, found)


class _Keys:
    """The keys of rows, to see whether other rows are among them."""

    def __init__(self, table: str, found: Iterable[pa.Table]):
        self._table = table
        self._rows: dict[Unit, list[pa.Table]] = {}
        for rows in found:
            keys = rows.select(KEYS[table])
            for unit, (start, end) in spans(table, keys).items():
                self._rows.setdefault(unit, []).append(keys.slice(start, end - start))

    def lacks(self, rows: pa.Table, more: _Keys | None = None) -> bool:
        """Whether these, and more, lack any unit of some rows, or hold it with other rows."""
        keys = rows.select(KEYS[self._table])
        return not all(
            any(
                keys.slice(start, end - start).equals(own)
                for own in (*self._rows.get(unit, ()), *(more._rows.get(unit, ()) if more else ()))
            )
            for unit, (start, end) in spans(self._table, keys).items()
        )


def _facts(rows: pa.Table) -> Mapping[Unit, _Fact]:
    none = [None] * len(rows)
    names = ("trial_id", "attempt", *_Fact._fields)
    columns = [rows[name].to_pylist() if name in rows.column_names else none for name in names]
    return {(trial_id, attempt): _Fact(*values) for trial_id, attempt, *values in zip(*columns, strict=True)}
