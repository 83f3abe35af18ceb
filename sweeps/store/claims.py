"""Claims: who works on which attempt, and whether they still live."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from sweeps.store.parts import split_name
from sweeps.store.places import Place

DEAD_AFTER_S = 60.0
"""Silence after which the claim of a process that can't be looked up is dead."""

SUFFIX = ".json"


def claim_path(trial_id: str, attempt: int) -> str:
    """Where the claim of an attempt is."""
    return f"claims/{trial_id}-{attempt}{SUFFIX}"


class Claim(NamedTuple):
    """Who works on an attempt."""

    trial_id: str
    attempt: int
    alive: bool
    begun: bool  # whether the attempt is settled; False for the moment in which rivals may still step back
    run_id: str | None
    host: str | None
    pid: int | None
    heartbeat: datetime | None
    progress: Mapping[str, Any]  # step, num_steps, loss, …


def read_claim(place: Place, name: str, modified: float | None = None) -> Claim | None:
    """The claim in a file of the folder claims/; None where there is none of that name.

    Args:
      place: where the store is.
      name: of the file.
      modified: when it was written, in seconds since the epoch, where that is known already.
    """
    split = split_name(name, SUFFIX)
    if split is None:
        return None
    path = f"claims/{name}"
    try:
        modified = place.modified(path) if modified is None else modified
        content = json.loads(place.read(path))
        heartbeat = datetime.fromtimestamp(content["heartbeat"], UTC)
        alive = _is_alive(content, modified)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, OverflowError, OSError):  # just being made, or its maker died over it
        try:
            alive = time.time() - place.modified(path) < DEAD_AFTER_S
        except FileNotFoundError:
            return None
        return Claim(*split, alive, False, None, None, None, None, {})
    return Claim(
        *split,
        alive=alive,
        begun=bool(content.get("begun")),
        run_id=content.get("run_id"),
        host=content.get("host"),
        pid=content.get("pid"),
        heartbeat=heartbeat,
        progress=content.get("progress") or {},
    )


def claim_content(
    trial_id: str, attempt: int, *, pid: int, begun: bool, run_id: str | None, progress: Mapping[str, Any]
) -> bytes:
    """What a claim's file says of the process that holds it."""
    content = {
        "trial_id": trial_id,
        "attempt": attempt,
        "begun": begun,
        "run_id": run_id,
        "host": socket.gethostname(),
        "machine": _machine(),
        "pid": pid,
        "process_start": process_start(pid),
        "heartbeat": time.time(),
        "progress": progress,
    }
    return json.dumps(content, default=str).encode()


@cache
def _machine() -> str:
    """Where process numbers mean the same: this boot of this host, seen from this container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()}/{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()


_GONE, _UNKNOWN = "gone", "unknown"


def process_start(pid: int) -> str:
    """When a process of this machine started, in clock ticks since boot; `gone`; `unknown` where that can't be told."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return _GONE if state in "ZX" else fields[18]  # field 22 of the line; state is field 3
    except (OSError, IndexError, ValueError):
        if os.name != "posix":
            return _UNKNOWN
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return _GONE
    except OSError:
        pass  # it exists and belongs to somebody else
    return _UNKNOWN


def _is_alive(content: Mapping[str, Any], modified: float) -> bool:
    if content.get("machine") == _machine():
        now, started = process_start(content.get("pid", 0)), content.get("process_start")
        if now == _GONE:
            return False
        if _UNKNOWN not in (now, started):
            return now == started
    # The later of the two: neither a clock that runs behind nor a file server that keeps old times kills a live claim.
    return time.time() - max(content.get("heartbeat", 0.0), modified) < DEAD_AFTER_S
