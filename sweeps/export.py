"""`export`: the store's tables as CSV files, for programs that read no Parquet.

    trials.csv    one row per trial, or per attempt with --raw
    metrics.csv   one row per (trial, step, split, metric)
    sweeps.csv    one row per trial that a request asked for
    final.csv     one row per trial of each sweep's latest request: axes, status, last values

In all of them floats are written so that reading gives the same number to the last bit, NaN and infinities as `nan`,
`inf` and `-inf`, times as ISO 8601 in UTC, lists as JSON. What is absent is an empty field; an empty text is `""`.

Only reads the store; needs neither JAX nor Ray.
"""

import argparse
import csv
import json
import os
import sys
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from sweeps.__main__ import resolve_store
from sweeps.store import SWEEPS, Store, StoreError, latest_requests

PENDING = "pending"  # asked for and never begun
DONE, NOT_FOUND = 0, 1

_SWEEPS_SCHEMA = pa.schema([(column.name, column.type) for column in SWEEPS])

_FIRST_COLUMNS = {
    "trials.csv": ["trial_id", "attempt", "status"],
    "metrics.csv": ["trial_id", "attempt", "step"],
    "sweeps.csv": ["sweep", "request_id", "requested_at"],
    "final.csv": ["sweep", "tiny", "trial_id"],
}
"""The columns with which each file begins. A file of that name that begins otherwise isn't ours, and stays."""


def export_command(args: argparse.Namespace) -> int:
    """Writes the CSV files: 0; 1 where the store holds nothing of that name, or parts of it are damaged.

    What can be read is written also where parts are damaged; each is named on stderr.
    """
    shown = resolve_store(args)
    store = Store.open(shown)
    out = Path(args.out).expanduser()
    _check_out(out)
    requests = store.sweeps(raw=True)
    damaged = dict.fromkeys(store.damaged)
    chosen: pd.DataFrame | None = None
    if args.sweep is not None:
        chosen = _of_sweep(requests, args.sweep)
        if chosen is None:
            names = sorted(set(_names(requests)))
            known = f"choose one of {names}" if names else "the store holds no sweep"
            print(f"{shown}: no sweep is called {args.sweep!r}; {known}", file=sys.stderr)
            return NOT_FOUND
        requests = chosen
    latest = latest_requests(requests)
    asked = requests if args.raw else latest
    trial_ids = None if chosen is None else list(dict.fromkeys(asked["trial_id"]))

    trials = store.trial_table(raw=args.raw, trial_ids=trial_ids)
    if not len(trials) and requests.empty:
        print(f"{shown}: the store holds no trial and no sweep yet", file=sys.stderr)
        return NOT_FOUND
    clean = store.trial_table(trial_ids=trial_ids) if args.raw else trials
    damaged.update(dict.fromkeys(store.damaged))
    tables = {
        "trials.csv": trials,
        "sweeps.csv": pa.Table.from_pandas(asked, _SWEEPS_SCHEMA, preserve_index=False),
        "final.csv": final_table(latest, clean, store.final_metrics()),
        "metrics.csv": store.metric_table(raw=args.raw, trial_ids=trial_ids),
    }
    damaged.update(dict.fromkeys(store.damaged))
    write_tables(out, tables)
    _print(shown, out, tables, list(damaged), as_json=args.json)
    return NOT_FOUND if damaged else DONE


def final_table(requests: pd.DataFrame, trials: pa.Table, final: pd.DataFrame) -> pa.Table:
    """One row per requested trial, with what was measured after its last step.

    Args:
      requests: rows of the sweeps table, the latest request of each sweep.
      trials: the clean trials table.
      final: the last row of each (trial, split, metric) that counts.

    Returns:
      `sweep`, `tiny`, `trial_id`, `point`, the axes with values as the sweep file has them, `status` (`pending` where
      the trial was never begun), `attempt`, `step`, `num_steps`, `error`, and `<split>/<metric>` for all that a
      finished trial measured at its last step; null elsewhere. Of the train split that is a mean over the steps since
      the row before.
    """
    columns = ("status", "attempt", "step", "num_steps", "error")
    known = {row["trial_id"]: row for row in trials.select(["trial_id", *columns]).to_pylist()}
    finished = {trial_id: row["num_steps"] for trial_id, row in known.items() if row["status"] == "finished"}
    values: dict[str, dict[str, float]] = {}
    names: dict[str, None] = {}
    last = final[final["step"] == final["trial_id"].map(finished)]
    for trial_id, split, metric, value in last[["trial_id", "split", "metric", "value"]].to_numpy(object):
        name = f"{split}/{metric}"
        names[name] = None
        values.setdefault(trial_id, {})[name] = value

    axes = [json.loads(text) for text in requests["axes"]]
    trial_ids = [str(trial_id) for trial_id in requests["trial_id"]]
    table = {name: pa.array(requests[name].tolist(), kind) for name, kind in _REQUEST_COLUMNS.items()}
    for name in dict.fromkeys(name for row in axes for name in row):
        table[name] = _axis_column([row.get(name) for row in axes])
    for name in columns:
        absent = PENDING if name == "status" else None
        cells = [known.get(trial_id, {}).get(name, absent) for trial_id in trial_ids]
        table[name] = pa.array(cells, trials.schema.field(name).type)
    for name in sorted(names):
        table[name] = pa.array([values.get(trial_id, {}).get(name) for trial_id in trial_ids], pa.float64())
    return pa.table(table)


_REQUEST_COLUMNS = {"sweep": pa.string(), "tiny": pa.bool_(), "trial_id": pa.string(), "point": pa.string()}


def write_tables(out: Path, tables: Mapping[str, pa.Table]) -> None:
    """Writes tables as CSV files: all of them whole, or, where one can't be written, none.

    Args:
      out: the folder; made where it is missing.
      tables: file name → rows. A file of that name is replaced.

    Raises:
      StoreError: the folder can't be written, with the reason in one line.
    """
    temporary = {name: out / f".{name}.{uuid.uuid4().hex[:8]}.tmp" for name in tables}
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, rows in tables.items():
            with temporary[name].open("xb") as file:
                pa_csv.write_csv(_as_written(rows), file)
                file.flush()
                os.fsync(file.fileno())
        for name, path in temporary.items():
            path.replace(out / name)
    except OSError as error:
        raise StoreError(f"{out}: the CSV files can't be written: {error.strerror or error}") from error
    finally:
        for path in temporary.values():
            with suppress(OSError):
                path.unlink(missing_ok=True)


def _as_written(rows: pa.Table) -> pa.Table:
    """Times as ISO 8601 and lists as JSON, which CSV has no types for."""
    for index, field in enumerate(rows.schema):
        if pa.types.is_timestamp(field.type):
            text = pc.strftime(rows.column(index), format="%Y-%m-%dT%H:%M:%SZ", locale="C")
        elif pa.types.is_list(field.type):
            cells = [None if item is None else json.dumps(item) for item in rows.column(index).to_pylist()]
            text = pa.array(cells, pa.string())
        else:
            continue
        rows = rows.set_column(index, field.name, text)
    return rows


def _axis_column(values: Sequence[Any]) -> pa.Array:
    """An axis as numbers or truth values where all are, else as text."""
    values = [json.dumps(value) if isinstance(value, list | dict) else value for value in values]
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError):  # of several kinds, or too large for a number
        texts = [value if value is None or isinstance(value, str) else json.dumps(value) for value in values]
        return pa.array(texts, pa.string())


def _names(requests: pd.DataFrame) -> list[str]:
    """How each row's sweep is called: its tiny form is a sweep of its own."""
    return [f"{name} (tiny)" if tiny else name for name, tiny in zip(requests["sweep"], requests["tiny"], strict=True)]


def _of_sweep(requests: pd.DataFrame, wanted: str) -> pd.DataFrame | None:
    """The rows of one sweep. A bare name means the tiny form where there is no other."""
    names = pd.Series(_names(requests), index=requests.index, dtype=object)
    for name in (wanted, f"{wanted} (tiny)"):
        if (names == name).any():
            return requests[names == name].reset_index(drop=True)
    return None


def _check_out(out: Path) -> None:
    """Refuses to replace a file that only happens to have one of our names."""
    for name, first in _FIRST_COLUMNS.items():
        path = out / name
        try:
            with path.open(newline="", encoding="utf-8") as file:
                header = next(csv.reader(file), [])
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise StoreError(f"{path}: can't be replaced: {error.strerror or error}") from error
        except (UnicodeDecodeError, csv.Error):
            header = ["?"]
        if header[: len(first)] != first:
            raise StoreError(f"{path}: is no export of a store and stays as it is; give another folder with --out")


def _print(
    shown: str, out: Path, tables: Mapping[str, pa.Table], damaged: Iterable[tuple[Any, str]], *, as_json: bool
) -> None:
    damaged = list(damaged)
    if as_json:
        told = {
            "store": shown,
            "out": str(out),
            "rows": {name: len(rows) for name, rows in tables.items()},
            "damaged": [[str(path), reason] for path, reason in damaged],
        }
        print(json.dumps(told))
    else:
        for name, rows in tables.items():
            print(f"{out / name}: {len(rows)} rows")
    for path, reason in damaged:
        print(f"{path}: passed over: {reason}", file=sys.stderr)
