"""One Parquet file of the store: its bytes, and the tables that many of them make.

A part says to which table it belongs and which version of the schema wrote it. Damage of any kind is found when it is
read: a seal in the footer is the checksum of the whole file. (Files of schema version 1 have checksums of their pages
and of the description of their columns alone.) A compacted file holds the rows of many parts and
names the files that it replaces.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq

from sweeps.store import footer_row
from sweeps.store.places import one_line
from sweeps.store.schema import (
    DECLARED,
    FLOAT,
    INT,
    MIGRATED_FROM,
    MIGRATIONS,
    REQUIRED,
    SCHEMA_VERSION,
    StoreError,
    columns_json,
)

SUFFIX = ".parquet"
_COMPACTED = "compact-"
_REPEATED = ("trial_id", "attempt", "split", "metric")
_CODES = pa.dictionary(pa.int32(), pa.string())
_LARGE_BYTES = 4 * 2**20
_SEAL, _UNSEALED = b"hyla.crc32=", b"00000000"


class Damaged(Exception):
    """A part that can't be used, with the reason in one line."""


def part_name(trial_id: str, attempt: int) -> str:
    """File name of an attempt's part, the same in every table."""
    return f"{trial_id}-{attempt}{SUFFIX}"


def split_name(name: str, suffix: str = SUFFIX) -> tuple[str, int] | None:
    """`<trial_id>-<attempt><suffix>` → (trial_id, attempt); None for other names."""
    trial_id, dash, attempt = name.removesuffix(suffix).rpartition("-")
    if not (name.endswith(suffix) and dash and attempt.isdecimal()) or is_compacted(name):
        return None
    return trial_id, int(attempt)


def compacted_name() -> str:
    """A new name for a file with the rows of many parts; names sort by time."""
    return f"{_COMPACTED}{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}-{uuid4().hex[:8]}{SUFFIX}"


def is_compacted(name: str) -> bool:
    """Whether a file holds the rows of many parts; no trial's id begins so."""
    return name.startswith(_COMPACTED)


def encode(
    table: str, rows: pa.Table, *, replaces: Sequence[str] | None = None, row: Mapping[str, Any] | None = None
) -> bytes:
    """One Parquet file, marked with its table and the schema's version.

    Args:
      table: trials, metrics or sweeps.
      rows: its rows.
      replaces: of a compacted file: names of the files whose rows these are.
      row: of a part of the trials table: its one row as Python has it, where the caller does: Arrow takes a while to
        give it back.
    """
    sink = pa.BufferOutputStream()
    # A trials row is many columns of one value each, where statistics and dictionaries only cost.
    alone = table == "trials" and replaces is None
    options: dict[str, Any] = (
        {"compression": "none", "use_dictionary": False, "write_statistics": False}
        if alone
        # Steps and values hardly repeat: a dictionary of them would be made, found too large and thrown away.
        else {"compression": "zstd", "use_dictionary": [name for name in _REPEATED if name in rows.column_names]}
        if table == "metrics"
        else {"compression": "zstd"}
    )
    with pq.ParquetWriter(sink, rows.schema, store_schema=False, write_page_checksum=True, **options) as writer:
        marks = {
            "table": table,
            "schema_version": str(SCHEMA_VERSION),
            "checksum": _checksum(rows.column_names, len(rows)),
        }
        if replaces is not None:
            marks["replaces"] = json.dumps(list(replaces))
            # In every small part, these words would make a third of the bytes.
            marks["columns"] = columns_json(table)
        if alone and row is None and len(rows) == 1:
            row = rows.to_pylist()[0]
        quick = footer_row.marks(row, SCHEMA_VERSION) if alone and row is not None else {}
        seal = {"hyla.seal": (_SEAL + _UNSEALED).decode()}  # last, so that it is the last of its kind in the file
        writer.add_key_value_metadata({f"hyla.{name}": value for name, value in marks.items()} | quick | seal)
        writer.write_table(rows)
    data = sink.getvalue().to_pybytes()
    start = data.rindex(_SEAL) + len(_SEAL)
    return b"%b%08x%b" % (data[:start], zlib.crc32(data), data[start + len(_UNSEALED) :])


def is_intact(data: bytes) -> bool | None:
    """Whether a file is, byte for byte, what was written; None where it has no seal, as those of schema version 1."""
    start = data.rfind(_SEAL) + len(_SEAL)
    if start < len(_SEAL):
        return None
    view, end = memoryview(data), start + len(_UNSEALED)
    checksum = zlib.crc32(view[end:], zlib.crc32(_UNSEALED, zlib.crc32(view[:start])))
    return data[start:end] == b"%08x" % checksum


def _checksum(names: Sequence[str], num_rows: int) -> str:
    """Of what a file says of its shape; the values have checksums of their own, in their pages."""
    return f"{zlib.crc32(json.dumps([num_rows, *names]).encode()):08x}"


def replaces(data: bytes) -> list[str]:
    """Names of the files whose rows a compacted file holds.

    Raises:
      Damaged: it names none.
    """
    marks = _open(data).metadata.metadata or {}
    try:
        names = json.loads(marks[b"hyla.replaces"])
    except (KeyError, ValueError) as error:
        raise Damaged("does not say which files it replaces") from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise Damaged("does not say which files it replaces")
    return names


def _open(data: bytes, dictionaries: Sequence[str] = ()) -> pq.ParquetFile:
    if not data:
        raise Damaged("empty file")
    if is_intact(data) is False:
        raise Damaged("it was changed or cut short: its checksum does not match")
    try:
        return pq.ParquetFile(
            pa.BufferReader(data), page_checksum_verification=True, read_dictionary=list(dictionaries)
        )
    except Exception as error:  # pyarrow answers damage with many kinds of error
        raise Damaged(one_line(error)) from error


def decode(
    table: str, data: bytes, path: str, columns: Sequence[str] | None = None, dictionaries: Sequence[str] = ()
) -> pa.Table:
    """The rows of one file.

    Args:
      table: which table it should belong to.
      data: the file.
      path: of the file, for messages.
      columns: those wanted, of those there; None for all.
      dictionaries: string columns to keep as codes and a dictionary, which takes a fraction of time and memory where
        few values repeat.

    Returns:
      The rows as the current version of the schema has them, whichever version wrote them.

    Raises:
      Damaged: it is empty, cut short, changed, or not ours.
      StoreError: it was written by a newer version.
    """
    file = _open(data, dictionaries)
    try:
        marks = file.metadata.metadata or {}
        schema = file.schema_arrow
        types = dict(zip(schema.names, schema.types, strict=True))
    except Exception as error:
        raise Damaged(one_line(error)) from error
    if marks.get(b"hyla.table") != table.encode():
        raise Damaged(f"not a part of the {table} table")
    try:
        version = int(marks[b"hyla.schema_version"])
    except (KeyError, ValueError) as error:
        raise Damaged("no schema version") from error
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"{path}: schema version {version} is newer than this code reads ({SCHEMA_VERSION}); update the code"
        )
    if version < min(MIGRATIONS):
        raise Damaged(f"schema version {version} is unknown")
    if version > 1 and is_intact(data) is None:
        raise Damaged("its checksum is missing")
    if marks.get(b"hyla.checksum") != _checksum(schema.names, file.metadata.num_rows).encode():
        raise Damaged("its description of the columns was changed")
    if missing := [name for name in REQUIRED[table] if name not in types]:
        raise Damaged(f"columns missing: {', '.join(missing)}")
    try:
        wanted = list(types) if columns is None else [name for name in columns if name in types]
        if version < SCHEMA_VERSION:
            wanted += [name for name in MIGRATED_FROM[table] if name in types and name not in wanted]
        # Many small files are read by threads already.
        rows = file.read(columns=wanted, use_threads=len(data) >= _LARGE_BYTES)
        for index, name in enumerate(rows.column_names):
            declared = DECLARED[table].get(name, types[name])
            if name in dictionaries:
                if types[name] != _CODES:
                    rows = rows.set_column(index, name, rows.column(name).cast(declared).dictionary_encode())
            elif types[name] != declared:
                rows = rows.set_column(index, name, rows.column(name).cast(declared))
        for older in range(version, SCHEMA_VERSION):
            rows = MIGRATIONS[older](table, rows)
        if version < SCHEMA_VERSION and columns is not None:
            rows = rows.select([name for name in columns if name in rows.column_names])
    except Exception as error:
        raise Damaged(one_line(error)) from error
    return rows


def concatenate(found: Sequence[tuple[str, pa.Table]], table: str) -> pa.Table:
    """Parts below one another; a column that a part lacks is null there, and int meets float as float.

    Raises:
      StoreError: a config field has values of different kinds in two parts; both are named.
    """
    types: dict[str, pa.DataType] = dict(DECLARED[table])
    source: dict[str, str] = {}
    groups: dict[pa.Schema, list[pa.Table]] = {}
    for path, rows in found:
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
                if {field.type, known} != {INT, FLOAT}:
                    raise StoreError(
                        f"column {field.name} is {known} in {source[field.name]} but {field.type} in {path}; "
                        "move one of the two files away"
                    )
                types[field.name] = FLOAT
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
