"""The row of a part of the trials table once more, in a form that is read many times as fast.

Such a part is a hundred columns of one value each, and Parquet describes every column in the file's footer: to read a
part that way takes a millisecond and more, which a store of thousands feels. So the row also stands in the footer's
key-value metadata as one line of JSON. Other readers pass over it. Where it is missing, the columns decide.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa

from sweeps.store.schema import DECLARED, TIME, config_type

KEY = "hyla.row"

_MARK = b"hyla.row="
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_US = timedelta(microseconds=1)
_DECLARED = DECLARED["trials"]
_TIMES = tuple(name for name, kind in _DECLARED.items() if kind == TIME)


def marks(row: Mapping[str, Any], schema_version: int) -> dict[str, str]:
    """The entry of the footer for a part with one row."""
    row = {name: value for name, value in row.items() if value is not None or name not in _DECLARED}
    for name in _TIMES:
        if name in row:
            row[name] = (row[name] - _EPOCH) // _US
    # Without "=", which JSON needs for nothing, no text of the row can be taken for a mark, this one or the seal's.
    text = json.dumps({"version": schema_version, "row": row}, separators=(",", ":")).replace("=", r"\u003d")
    return {KEY: f"{_MARK.decode()}{text}\n"}


def read(data: bytes, schema_version: int) -> dict[str, Any] | None:
    """The row of a part that is known to be intact; times in microseconds since 1970, absent columns left out.

    Returns:
      None where the part has to be read through its columns: it has no such line, or another version.
    """
    begin = data.rfind(_MARK) + len(_MARK)
    end = data.find(b"\n", begin)
    if begin < len(_MARK) or end < 0:
        return None
    content = json.loads(data[begin:end])
    return content["row"] if content["version"] == schema_version else None


def as_time(value: int | None) -> datetime | None:
    """A time of a row that was read."""
    return None if value is None else _EPOCH + value * _US


def tables(found: Iterable[tuple[str, Mapping[str, Any]]], columns: Sequence[str] | None) -> list[tuple[str, pa.Table]]:
    """Rows as tables, one for all rows that have the same config fields of the same types.

    Args:
      found: (path of the part, its row).
      columns: those wanted; None for all.

    Returns:
      (path of the first part, the table).
    """
    groups: dict[tuple[Any, ...], list[tuple[str, Mapping[str, Any]]]] = {}
    for path, row in found:
        fields = tuple((name, type(value)) for name, value in row.items() if name not in _DECLARED)
        groups.setdefault(fields, []).append((path, row))
    made = []
    for fields, group in groups.items():
        first = group[0][1]
        types = {**_DECLARED, **{name: config_type(name, first[name]) for name, _ in fields}}
        names = [name for name in types if columns is None or name in columns]
        arrays = [pa.array([row.get(name) for _, row in group], types[name]) for name in names]
        made.append((group[0][0], pa.table(arrays, names=names)))
    return made
