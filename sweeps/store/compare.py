"""Comparing what counts in two stores."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import pandas as pd

from sweeps.store.schema import COUNTS, is_config_column
from sweeps.store.store import Store


def equal_tables(
    store_a: Store,
    store_b: Store,
    rtol: float = 0.0,
    atol: float = 0.0,
    *,
    trial_ids: Iterable[str] | None = None,
    max_step: int | None = None,
) -> list[str]:
    """Compares what counts in two stores: ids, configs, steps, statuses, counts and values.

    Attempt, host, time and run are left aside, and NaN equals NaN. So is a config column that a row lacks: a trial's id
    stands for its config, and such a column is a field younger than the row, at its default.

    Args:
      store_a: one store.
      store_b: the other.
      rtol: allowed difference of a value as a share of `store_b`'s; with both zero, values must agree to the last bit.
      atol: allowed difference of a value.
      trial_ids: compare these trials only.
      max_step: compare metrics up to this step only.

    Returns:
      The differences, a line each; empty when the tables are equal.
    """
    wanted = None if trial_ids is None else set(trial_ids)
    rows_a, rows_b = (
        {row["trial_id"]: row for row in store.trial_table(raw=False).to_pylist()} for store in (store_a, store_b)
    )
    if wanted is not None:
        rows_a, rows_b = ({key: row for key, row in rows.items() if key in wanted} for rows in (rows_a, rows_b))
    lines = []
    for here, there, store in ((rows_a, rows_b, store_a), (rows_b, rows_a, store_b)):
        lines += [f"trial {trial_id} is only in {store.shown}" for trial_id in sorted(set(here) - set(there))]
    both = sorted(set(rows_a) & set(rows_b))
    for trial_id in both:
        a, b = rows_a[trial_id], rows_b[trial_id]
        config = [name for name in a if is_config_column(name) and None not in (a[name], b.get(name))]
        for name in ("status", "step", "num_steps", *COUNTS, *config):
            if not _agree(a.get(name), b.get(name)):
                lines.append(f"trial {trial_id}: {name} is {a.get(name)!r} against {b.get(name)!r}")

    keys = ["trial_id", "step", "split", "metric"]
    a_frame, b_frame = (store.metrics(trial_ids=both)[[*keys, "value"]] for store in (store_a, store_b))
    if a_frame.empty and b_frame.empty:  # trials that diverged before their first row; pandas cannot merge these
        return lines
    merged = a_frame.merge(b_frame, on=keys, how="outer", suffixes=("_a", "_b"), indicator="side")
    if max_step is not None:
        merged = merged[merged["step"] <= max_step]
    for side, store in (("left_only", store_a), ("right_only", store_b)):
        for trial_id, rows in _rows_by_trial(merged[merged["side"] == side]):
            lines.append(
                f"trial {trial_id}: {len(rows)} metric rows are only in {store.shown}, the first {_place(rows)}"
            )
    shared = merged[merged["side"] == "both"]
    agree = [_agree(a, b, rtol, atol) for a, b in zip(shared["value_a"], shared["value_b"], strict=True)]
    num_shared = shared["trial_id"].value_counts()
    for trial_id, rows in _rows_by_trial(shared[~pd.Series(agree, shared.index, dtype=bool)]):
        a_value, b_value = rows["value_a"].iloc[0], rows["value_b"].iloc[0]
        lines.append(
            f"trial {trial_id}: {len(rows)} of {num_shared[trial_id]} values differ, the first {_place(rows)}: "
            f"{float(a_value)!r} against {float(b_value)!r}"
        )
    return lines


def _rows_by_trial(frame: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    for trial_id, rows in frame.sort_values(["trial_id", "step"], kind="stable").groupby("trial_id"):
        yield str(trial_id), rows


def _place(rows: pd.DataFrame) -> str:
    """Where the first of some metric rows was measured."""
    first = rows.iloc[0]
    return f"at step {first['step']}, {first['split']} {first['metric']}"


def _agree(a: Any, b: Any, rtol: float = 0.0, atol: float = 0.0) -> bool:
    if not (isinstance(a, float) and isinstance(b, float)):
        return a == b
    if math.isnan(a) or math.isnan(b):
        return math.isnan(a) and math.isnan(b)
    if a == b:
        return rtol > 0 or atol > 0 or math.copysign(1, a) == math.copysign(1, b)
    return math.isfinite(a) and math.isfinite(b) and abs(a - b) <= atol + rtol * abs(b)
