"""`compact` and `repair`: upkeep of a results store. Needs neither JAX nor Ray."""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence

from sweeps.__main__ import resolve_store
from sweeps.progress import duration
from sweeps.store import Compaction, Repair, Store, compact, repair
from sweeps.store.compaction import GRACE_S
from sweeps.store.repairs import LEFT, REMOVED, SET_ASIDE

WHOLE, DAMAGED = 0, 1


def compact_command(args: argparse.Namespace) -> int:
    """Compacts a store: 0, or 1 where damaged files were passed over."""
    shown = resolve_store(args)
    store = Store.open(shown)
    result = compact(store, grace_s=args.grace)
    if args.json:
        print(json.dumps(_as_json(result)))
    else:
        for line in compaction_lines(result, shown, args.grace):
            print(line)
    for path, reason in result.damaged:
        print(f"{store.place.shown_path(path)}: passed over: {reason}", file=sys.stderr)
    if result.damaged:
        print(repair_hint(shown), file=sys.stderr)
    return DAMAGED if result.damaged else WHOLE


def compaction_lines(result: Compaction, shown: str, grace_s: float) -> list[str]:
    """What was done, a line each, and what to do next."""
    lines = []
    for table in result.tables:
        if table.written:
            merged, files = _count(table.num_merged, "file"), _count(len(table.written), "file")
            lines.append(f"{table.table}: {merged} merged into {files}, {_count(table.num_rows, 'row')}")
        if table.num_deleted:
            lines.append(f"{table.table}: {_count(table.num_deleted, 'replaced file')} deleted")
        if table.overtaken:
            lines.append(f"{table.table}: somebody else compacts or repairs; some files are left")
    waiting = sum(table.num_waiting for table in result.tables)
    again = f"python -m sweeps compact {shlex.quote(shown)}"
    if not lines:
        lines.append(f"{shown}: nothing to compact")
    if any(table.overtaken for table in result.tables):
        lines.append(f"to go on: {again}")
    elif waiting:
        # Given the same time, the command of the hint does what the hint says.
        grace = "" if grace_s == GRACE_S else f" --grace {grace_s:g}s"
        when = f" in {duration(grace_s)}" if grace_s else ""
        lines.append(f"to delete {_count(waiting, 'replaced file')}{when}: {again}{grace}")
    return lines


def repair_command(args: argparse.Namespace) -> int:
    """Repairs a store: 0, or 1 where something was damaged."""
    shown = resolve_store(args)
    found = repair(Store.open(shown), dry_run=args.dry_run)
    if args.json:
        for item in found:
            print(json.dumps({**item._asdict(), "is_damage": item.is_damage, "dry_run": args.dry_run}))
    else:
        for line in repair_lines(found, shown, dry_run=args.dry_run):
            print(line)
    return DAMAGED if any(item.is_damage for item in found) else WHOLE


def repair_lines(found: Sequence[Repair], shown: str, *, dry_run: bool) -> list[str]:
    """What was wrong and what was done, a line each, and what to do next."""
    done = {SET_ASIDE: "set aside", REMOVED: "removed", LEFT: "left alone"}
    if dry_run:
        done = {action: f"would be {words}" for action, words in done.items()}
    lines = []
    for item in found:
        link = " " if item.action == SET_ASIDE and item.detail.startswith("to ") else "; "
        lines.append(f"{item.what}: {item.reason}: {done[item.action]}" + (item.detail and link + item.detail))
    if not found:
        return [f"{shown}: nothing to repair"]
    quoted = shlex.quote(shown)
    if dry_run:
        return [*lines, f"to do it: python -m sweeps repair {quoted}"]
    if any(item.action == LEFT for item in found):
        return [*lines, f"once the trials that were left alone have ended: python -m sweeps repair {quoted}"]
    if any(item.action == SET_ASIDE for item in found):
        return [*lines, f"to train again what is missing: python -m sweeps run SWEEP.yaml --results {quoted}"]
    return lines


def repair_hint(shown: str) -> str:
    """The command that sets aside what a reader passed over."""
    return f"to set it aside, so that it is trained again: python -m sweeps repair {shlex.quote(shown)}"


def _as_json(result: Compaction) -> dict[str, object]:
    return {
        "tables": [table._asdict() for table in result.tables],
        "damaged": [{"path": path, "reason": reason} for path, reason in result.damaged],
    }


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
