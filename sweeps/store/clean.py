"""What counts: of each trial the attempt that wins, and of the attempts before it the rows up to where others went on.

A finished or diverged attempt wins, else the latest. Attempts are ordered by number, never by the clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import NamedTuple

from sweeps.store.schema import FINAL


class Attempt(NamedTuple):
    """The columns of an attempt that decide what counts, and what a status tells of it."""

    trial_id: str
    attempt: int
    status: str | None
    start_step: int
    step: int | None = None
    num_steps: int | None = None
    error: str | None = None
    run_id: str | None = None
    host: str | None = None
    ended_at: datetime | None = None


ATTEMPT_COLUMNS = Attempt._fields
"""The columns of the trials table that an `Attempt` is made of."""


def by_trial(attempts: Iterable[Attempt]) -> dict[str, list[Attempt]]:
    """Attempts of each trial in their order."""
    trials: dict[str, list[Attempt]] = {}
    for row in attempts:
        trials.setdefault(row.trial_id, []).append(row)
    for rows in trials.values():
        rows.sort(key=lambda row: row.attempt)
    return trials


def _winner(attempts: Sequence[Attempt]) -> Attempt:
    """The one that counts of a trial's attempts in order."""
    results = [row for row in attempts if row.status in FINAL]
    return (results or attempts)[-1]


def winners(attempts: Iterable[Attempt]) -> dict[str, Attempt]:
    """The attempt of each trial that counts."""
    return {trial_id: _winner(rows) for trial_id, rows in by_trial(attempts).items()}


def step_limits(attempts: Iterable[Attempt]) -> dict[tuple[str, int], int | None]:
    """(trial_id, attempt) → last step whose rows count, None for all; attempts of which nothing counts are left out."""
    limits: dict[tuple[str, int], int | None] = {}
    for trial_id, rows in by_trial(attempts).items():
        winner = _winner(rows)
        limit: int | None = None
        for row in reversed(rows[: rows.index(winner) + 1]):
            if limit != 0:
                limits[trial_id, row.attempt] = limit
            limit = row.start_step if limit is None else min(limit, row.start_step)
    return limits
