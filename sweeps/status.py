"""`status` and `show`: what the store knows of its sweeps, and of one trial. Only reads; needs neither JAX nor Ray."""

import argparse
import json
import math
import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pandas as pd
from rich.console import Console
from rich.live import Live
from rich.table import Table

from sweeps.__main__ import resolve_store
from sweeps.progress import duration
from sweeps.store import FINAL, Store, is_config_column
from sweeps.upkeep import repair_hint

WATCH_EVERY_S = 5.0

FOUND, NOT_FOUND = 0, 1

COLUMNS = ("finished", "diverged", "failed", "running", "interrupted", "pending")
"""Statuses, in the order of the table."""


class SweepStatus(NamedTuple):
    """The state of one sweep."""

    sweep: str
    tiny: bool
    file: str | None
    num_trials: int
    counts: dict[str, int]  # by status, all of COLUMNS
    last_activity: datetime  # the latest write of an attempt, heartbeat, or request


def status_command(args: argparse.Namespace) -> int:
    """Shows every sweep of a store: 0, or 1 where the store holds none."""
    shown = resolve_store(args)
    store = Store.open(shown)
    if not args.watch:
        statuses = sweep_statuses(store)
        _print(statuses, store, shown, as_json=args.json)
        return FOUND if statuses else NOT_FOUND
    return _watch(store, shown, as_json=args.json)


def sweep_statuses(store: Store) -> list[SweepStatus]:
    """The state of every sweep, the latest request first."""
    latest = store.last_activity()
    return [
        SweepStatus(
            sweep=summary.sweep,
            tiny=summary.tiny,
            file=summary.file,
            num_trials=len(summary.trial_ids),
            counts={name: summary.counts.get(name, 0) for name in COLUMNS},
            last_activity=max([summary.requested_at, *(latest[id_] for id_ in summary.trial_ids if id_ in latest)]),
        )
        for summary in store.summary()
    ]


def _watch(store: Store, shown: str, *, as_json: bool) -> int:
    """Looks again until nothing runs."""
    live = sys.stdout.isatty() and not as_json
    panel = Live(console=Console(), auto_refresh=False) if live else None
    if panel:
        panel.start()
    try:
        while True:
            statuses = sweep_statuses(store)
            if panel:
                panel.update(_table(statuses, shown), refresh=True)
            else:
                _print(statuses, store, shown, as_json=as_json)
            if not any(status.counts["running"] for status in statuses):
                return FOUND if statuses else NOT_FOUND
            time.sleep(WATCH_EVERY_S)
    finally:
        if panel:
            panel.stop()


def _print(statuses: Sequence[SweepStatus], store: Store, shown: str, *, as_json: bool) -> None:
    if as_json:
        for status in statuses:
            print(json.dumps({**status._asdict(), "last_activity": status.last_activity.isoformat()}), flush=True)
    elif not statuses:
        print(f"{shown}: no sweep has been run into this store")
    elif sys.stdout.isatty():
        Console().print(_table(statuses, shown))
    else:
        for status in statuses:
            counts = ", ".join(f"{count} {name}" for name, count in status.counts.items() if count)
            print(f"{_name(status)}: {status.num_trials} trials: {counts}; {_ago(status.last_activity)}", flush=True)
    for path, reason in store.damaged:
        print(f"{path}: passed over: {reason}", file=sys.stderr)
    if store.damaged:
        print(repair_hint(shown), file=sys.stderr)


def _table(statuses: Sequence[SweepStatus], shown: str) -> Table:
    table = Table(title=f"sweeps in {shown}", title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("sweep", no_wrap=True, overflow="ellipsis")
    for name in ("trials", *COLUMNS):
        table.add_column(name, justify="right")
    table.add_column("last activity")
    for status in statuses:
        counts = [str(status.counts[name] or "·") for name in COLUMNS]
        table.add_row(_name(status), str(status.num_trials), *counts, _ago(status.last_activity))
    return table


def _name(status: SweepStatus) -> str:
    return f"{status.sweep} (tiny)" if status.tiny else status.sweep


def _ago(when: datetime) -> str:
    return f"{duration(max(0.0, (datetime.now(UTC) - when).total_seconds()))} ago"


# --- show ------------------------------------------------------------------------------------------------------------


def show_command(args: argparse.Namespace) -> int:
    """Shows one trial: 0, or 1 where no trial, or more than one, has such an id."""
    shown = resolve_store(args)
    store = Store.open(shown)
    requests = store.sweeps(raw=True)
    trial_id = find_trial([*requests["trial_id"], *store.statuses()], args.trial, shown)
    if trial_id is None:
        return NOT_FOUND
    trial = describe_trial(store, shown, trial_id, requests)
    if args.json:
        print(json.dumps(trial, default=str))
    else:
        _print_trial(trial)
    return FOUND


def find_trial(trial_ids: Iterable[str], start: str, shown: str) -> str | None:
    """The one trial whose id starts so; None, said on stderr, where none or more than one does.

    Args:
      trial_ids: those there are, repeats allowed.
      start: of the id, or all of it.
      shown: the store as the user writes it.
    """
    found = [trial_id for trial_id in dict.fromkeys(trial_ids) if trial_id.startswith(start)]
    if len(found) == 1:
        return found[0]
    what = "no trial has" if not found else f"{len(found)} trials have"
    print(f"{shown}: {what} an id that starts with {start}", file=sys.stderr)
    return None


def describe_trial(store: Store, shown: str, trial_id: str, requests: pd.DataFrame) -> dict[str, Any]:
    """All that the store knows of a trial, as plain values.

    Args:
      store: the store.
      shown: its path as the user writes it.
      trial_id: the trial.
      requests: the store's sweeps table, raw.
    """
    state = store.statuses().get(trial_id)
    own = store.trial_table(raw=True, trial_ids=[trial_id]).to_pylist()  # a frame would make floats of whole numbers
    rows = [{name: value for name, value in row.items() if not absent(value)} for row in own]
    asked = requests[requests["trial_id"] == trial_id]
    last = rows[-1] if rows else {}
    status = state.status if state else "pending"
    metrics = store.metrics(trial_ids=[trial_id]).sort_values("step", kind="stable")
    metrics = metrics.drop_duplicates(["split", "metric"], keep="last")
    trial: dict[str, Any] = {
        "trial_id": trial_id,
        "status": status,
        "sweeps": sorted(set(asked["sweep"])),
        "axes": json.loads(asked.iloc[-1]["axes"]) if len(asked) else {},
        "config": {name: value for name, value in last.items() if is_config_column(name)},
        "attempts": [
            {name: value for name, value in row.items() if not is_config_column(name) and name != "trial_id"}
            for row in rows
        ],
        "metrics": metrics[["step", "split", "metric", "value"]].to_dict("records"),
        "rerun": _rerun(shown, trial_id, asked.iloc[-1], status) if len(asked) else None,
        "reproduce": f"python -m sweeps reproduce {shlex.quote(shown)} {trial_id}" if status in FINAL else None,
    }
    return trial


def absent(value: Any) -> bool:
    """Whether a cell of a frame holds nothing."""
    return value is None or value is pd.NaT or (isinstance(value, float) and math.isnan(value))


def _rerun(shown: str, trial_id: str, request: pd.Series, status: str) -> str:
    """The command that trains this trial alone, in this process, so that its error can be looked at."""
    words = ["python", "-m", "sweeps", "run", str(request["file"])]
    words += ["--tiny"] * bool(request["tiny"])
    overrides = request["overrides"]
    words += [word for override in ([] if overrides is None else overrides) for word in ("--set", override)]
    # Into another store, where this one has its result already.
    words += ["--results", "rerun" if status in FINAL else shown, "--only", trial_id]
    words += ["--retry", status] * (status == "failed")
    return shlex.join([*words, "--in-process"])


def _print_trial(trial: dict[str, Any]) -> None:
    print(f"trial {trial['trial_id']}: {trial['status']}")
    if trial["sweeps"]:
        print(f"sweep {', '.join(trial['sweeps'])}: " + " ".join(f"{k}={v}" for k, v in trial["axes"].items()))
    if trial["config"]:
        print("\nconfig")
        for name, value in trial["config"].items():
            print(f"  {name}: {value}")
    for attempt in trial["attempts"]:
        print(f"\nattempt {attempt['attempt']}: {attempt['status']}")
        for name, value in attempt.items():
            if name not in ("attempt", "status", "error_detail"):
                print(f"  {name}: {value}")
        for line in str(attempt.get("error_detail") or "").splitlines():
            print(f"  | {line}")
    if trial["metrics"]:
        print("\nlast values")
        for row in trial["metrics"]:
            print(f"  step {row['step']} {row['split']} {row['metric']}: {row['value']:.6g}")
    if trial["rerun"]:
        print(f"\nto train it alone: {trial['rerun']}")
    if trial["reproduce"]:
        print(f"\nto train it again and compare: {trial['reproduce']}")
