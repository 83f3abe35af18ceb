"""What a person, or a program with `--json`, sees while a sweep runs.

A `Tracker` knows the state of every trial: from the driver's events when something ends, from the store's claims how
far the running ones are. A view shows it: a live panel in a terminal, plain lines elsewhere, JSON lines for programs.
"""

import json
import re
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, Any, NamedTuple, Protocol

from sweeps.expand import TrialSpec
from sweeps.packs import Pack, trial_flops

DONE = ("finished", "diverged")
"""Statuses of trials that are results."""

REFRESH_S = 0.5
"""Between two drawings of the live panel."""

CLAIMS_S = 2.0
"""Between two looks at the store's claims."""

PLAIN_EVERY_S = 30.0
"""Without a terminal, the longest time without a line."""


class Running(NamedTuple):
    """A trial that is being trained, as its claim tells."""

    trial_id: str
    step: int
    num_steps: int
    loss: float | None  # None before the first steps
    steps_per_s: float | None
    host: str


class Counts(NamedTuple):
    """Trials of a sweep by state; they add up to `total`."""

    total: int
    finished: int
    diverged: int
    failed: int
    running: int
    left: int  # neither begun nor ended; interrupted ones among them

    @property
    def done(self) -> int:
        """Trials that are results."""
        return self.finished + self.diverged


class RunningPack(NamedTuple):
    """A pack at work, its members together."""

    label: str  # what its members have in common
    num_trials: int
    step: int
    num_steps: int | None
    losses: tuple[float, float] | None  # lowest and highest of its members
    steps_per_s: float | None
    host: str


class Failure(NamedTuple):
    """Trials that ended with one error."""

    error: str
    num_trials: int
    trial_id: str  # one of them


class Snapshot(NamedTuple):
    """All that a view draws."""

    counts: Counts
    running: list[RunningPack]
    failures: list[Failure]
    elapsed_s: float
    left_s: tuple[float, float] | None  # time left, from and to; None while nothing is known
    note: str | None  # such as that it is stopping


class TimeLeft:
    """Estimates the time left from the work done, as a range: by the speed so far and by that of late.

    Work is in any unit that is proportional to time on one machine, such as floating-point operations.
    """

    def __init__(self, total: float):
        self._total = total
        self._samples: deque[tuple[float, float]] = deque(maxlen=600)

    def add(self, now_s: float, done: float) -> None:
        """Takes in how much is done at a time; the first sample starts the clock."""
        if not self._samples or now_s - self._samples[-1][0] >= 1 or done >= self._total:
            self._samples.append((now_s, done))

    def estimate(self) -> tuple[float, float] | None:
        """Seconds left, from and to; None before a twentieth of a minute, or a sample with progress, has passed."""
        if len(self._samples) < 2:
            return None
        first, last = self._samples[0], self._samples[-1]
        recent = next(sample for sample in self._samples if sample[0] >= last[0] - (last[0] - first[0]) / 3)
        speeds = [
            (last[1] - since[1]) / (last[0] - since[0])
            for since in (first, recent)
            if last[0] - since[0] >= 3 and last[1] > since[1]
        ]
        if not speeds:
            return None
        left = max(0.0, self._total - last[1])
        return left / max(speeds), left / min(speeds)


class Tracker:
    """The state of every trial of a sweep while it runs. Safe to use from several threads."""

    def __init__(
        self,
        trials: Sequence[TrialSpec],
        statuses: Mapping[str, str],
        packs: Sequence[Pack],
        read_claims: Callable[[], Iterable[Running]],
        clock: Callable[[], float] = time.monotonic,
    ):
        """
        Args:
          trials: of the sweep.
          statuses: what the store says of them now; trials it does not know are absent.
          packs: what is to be run.
          read_claims: trials that are being trained, of this sweep or others.
          clock: seconds.
        """
        self._lock = threading.Lock()
        self._clock, self._read_claims = clock, read_claims
        self._started = clock()
        self._axes = {trial.trial_id: trial.axes for trial in trials}
        self._swept = swept_axes(trials)
        self._work = {trial.trial_id: trial_flops(trial.config) for pack in packs for trial in pack.trials}
        self._statuses = {trial_id: statuses.get(trial_id, "left") for trial_id in self._axes}
        for trial_id in self._work:
            self._statuses[trial_id] = "left"
        self._errors: dict[str, str] = {}
        self._at_work: dict[str, Pack] = {}
        self._claims: dict[str, Running] = {}
        self._first_step: dict[str, int] = {}
        self._time_left = TimeLeft(sum(self._work.values()))
        self.note: str | None = None

    def pack_started(self, pack: Pack) -> None:
        """A worker has begun; a pack that lost its worker starts again."""
        with self._lock:
            self._at_work[pack.pack_id] = pack

    def pack_ended(self, pack: Pack, statuses: Mapping[str, str], error: str | None) -> None:
        """A pack ended: how each of its trials did; `error` is that of the failed ones."""
        with self._lock:
            self._at_work.pop(pack.pack_id, None)
            for trial_id, status in statuses.items():
                self._statuses[trial_id] = status if status in (*DONE, "failed") else "left"
                if status == "failed" and error is not None:
                    self._errors[trial_id] = error

    def worker_lost(self, pack: Pack) -> None:
        """A worker died; its trials are left as they were."""
        with self._lock:
            self._at_work.pop(pack.pack_id, None)

    def look(self) -> None:
        """Reads how far the running trials are."""
        claims = {claim.trial_id: claim for claim in self._read_claims()}
        with self._lock:
            self._claims = claims
            done = 0.0
            for trial_id, work in self._work.items():
                claim = claims.get(trial_id)
                if self._statuses[trial_id] in (*DONE, "failed"):
                    done += work
                elif claim is not None and claim.num_steps:
                    done += work * claim.step / claim.num_steps
            # The clock for time left starts with training, not with the start of Ray or a compilation.
            if done or self._time_left.estimate() is not None:
                self._time_left.add(self._clock(), done)

    def snapshot(self) -> Snapshot:
        """The state now."""
        with self._lock:
            running = {trial.trial_id for pack in self._at_work.values() for trial in pack.trials}
            running = {trial_id for trial_id in running if self._statuses[trial_id] == "left"}
            states = Counter(
                "running" if trial_id in running else status for trial_id, status in self._statuses.items()
            )
            total = len(self._statuses)
            named = {name: states[name] for name in ("finished", "diverged", "failed", "running")}
            counts = Counts(total=total, left=total - sum(named.values()), **named)
            packs = [self._running_pack(pack, running) for pack in self._at_work.values()]
            left_s = self._time_left.estimate() if counts.left + counts.running else (0.0, 0.0)
            return Snapshot(
                counts,
                packs,
                group_failures(self._errors),
                self._clock() - self._started,
                left_s,
                self.note,
            )

    def _running_pack(self, pack: Pack, running: set[str]) -> RunningPack:
        members = [trial.trial_id for trial in pack.trials if trial.trial_id in running]
        claims = [self._claims[trial_id] for trial_id in members if trial_id in self._claims]
        losses = [claim.loss for claim in claims if claim.loss is not None]
        return RunningPack(
            label=describe_common([self._axes[trial_id] for trial_id in members], self._swept),
            num_trials=len(members),
            step=min((claim.step for claim in claims), default=0),
            num_steps=claims[0].num_steps if claims else None,
            losses=(min(losses), max(losses)) if losses else None,
            steps_per_s=next((claim.steps_per_s for claim in claims if claim.steps_per_s), None),
            host=claims[0].host if claims else "",
        )

    def describe(self, trial_ids: Sequence[str]) -> str:
        """What trials have in common, in the sweep's own words."""
        return describe_common([self._axes[trial_id] for trial_id in trial_ids], self._swept)


# --- words -----------------------------------------------------------------------------------------------------------


def swept_axes(trials: Sequence[TrialSpec]) -> dict[str, str]:
    """Axes with more than one value, and a short name for each: the last part of the name where that is unique."""
    values: dict[str, set[str]] = {}
    for trial in trials:
        for name, value in trial.axes.items():
            values.setdefault(name, set()).add(repr(value))
    swept = [name for name, seen in values.items() if len(seen) > 1]
    short = Counter(name.rpartition(".")[2] for name in swept)
    return {name: last if short[last := name.rpartition(".")[2]] == 1 else name for name in swept}


def describe_common(axes: Sequence[Mapping[str, Any]], swept: Mapping[str, str]) -> str:
    """`attention=hyla width=2 seed=0…2`: swept values; those in which the trials differ as a range or a count."""
    words = []
    for name, short in swept.items():
        values = list(dict.fromkeys(trial[name] for trial in axes if name in trial))
        if len(values) == 1:
            words.append(f"{short}={values[0]}")
        elif len(values) > 1:
            words.append(f"{short}={values[0]}…{values[-1]}")
    return " ".join(words)


def group_failures(errors: Mapping[str, str]) -> list[Failure]:
    """Failed trials by error, most frequent first. Errors that differ in numbers only are one."""
    groups: dict[str, list[str]] = {}
    for trial_id, error in errors.items():
        groups.setdefault(error_kind(error), []).append(trial_id)
    failures = [Failure(errors[trial_ids[0]], len(trial_ids), trial_ids[0]) for trial_ids in groups.values()]
    return sorted(failures, key=lambda failure: -failure.num_trials)


def error_kind(error: str) -> str:
    """An error without what differs from trial to trial: its numbers and ids."""
    return re.sub(r"\b[0-9a-f]{12}\b|\d+(\.\d+)?", "#", error)


def duration(seconds: float) -> str:
    """`45 s`, `3 min`, `2 h 5 min`, `3 d 4 h`."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(round(seconds / 3600), 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def time_left(left_s: tuple[float, float] | None) -> str:
    """`about 3–4 min left`, or that it is not known yet."""
    if left_s is None:
        return "time left not known yet"
    low, high = duration(left_s[0]), duration(left_s[1])
    if low == high:
        return f"about {high} left"
    value, _, unit = low.partition(" ")
    same_unit = unit == high.partition(" ")[2]
    return f"about {value if same_unit else low}–{high} left"


def counts_text(counts: Counts) -> str:
    """`5 of 16 done, 1 failed, 2 running, 8 left`; zeros but for what is done and left are not said."""
    parts = [f"{counts.done} of {counts.total} done"]
    if counts.diverged:
        parts[0] += f" ({counts.diverged} diverged)"
    parts += [f"{counts.failed} failed"] * bool(counts.failed) + [f"{counts.running} running"] * bool(counts.running)
    return ", ".join([*parts, f"{counts.left} left"])


def _loss_text(losses: tuple[float, float] | None) -> str:
    if losses is None:
        return "–"
    low, high = (f"{loss:.4g}" for loss in losses)
    return low if low == high else f"{low}–{high}"


def _speed_text(steps_per_s: float | None) -> str:
    return "–" if not steps_per_s else f"{steps_per_s:.3g} steps/s"


# --- views -----------------------------------------------------------------------------------------------------------


class View(Protocol):
    """Shows a run. `update` is called often, `say` and `event` when something happens."""

    def update(self, snapshot: Snapshot) -> None:
        """Draws the state."""

    def say(self, text: str) -> None:
        """Shows a line that stays."""

    def event(self, name: str, **fields: Any) -> None:
        """Passes something that happened to a program that reads along."""

    def close(self) -> None:
        """Leaves the terminal as it was."""


class PlainView:
    """Lines of text, for logs and pipes."""

    def __init__(self, out: IO[str], every_s: float = PLAIN_EVERY_S, clock: Callable[[], float] = time.monotonic):
        self._out, self._every_s, self._clock = out, every_s, clock
        self._last = clock()

    def update(self, snapshot: Snapshot) -> None:
        """A line when there has been none for a while."""
        if self._clock() - self._last >= self._every_s:
            ends = f"{duration(snapshot.elapsed_s)} gone, {time_left(snapshot.left_s)}"
            self.say(f"{counts_text(snapshot.counts)}; {ends}")

    def say(self, text: str) -> None:
        self._last = self._clock()
        _write(self._out, text + "\n")

    def event(self, name: str, **fields: Any) -> None:
        """People read `say`."""

    def close(self) -> None:
        """Nothing to restore."""


class JsonView:
    """One JSON object a line."""

    def __init__(self, out: IO[str], every_s: float = PLAIN_EVERY_S, clock: Callable[[], float] = time.monotonic):
        self._out, self._every_s, self._clock = out, every_s, clock
        self._last = clock()

    def update(self, snapshot: Snapshot) -> None:
        """An object `progress` when there has been nothing for a while."""
        if self._clock() - self._last >= self._every_s:
            self.event("progress", **progress_fields(snapshot))

    def say(self, text: str) -> None:
        """Programs read `event`."""

    def event(self, name: str, **fields: Any) -> None:
        self._last = self._clock()
        _write(self._out, json.dumps({"event": name, **fields}) + "\n")

    def close(self) -> None:
        """Nothing to restore."""


def progress_fields(snapshot: Snapshot) -> dict[str, Any]:
    """A snapshot as plain values."""
    return {
        **snapshot.counts._asdict(),
        "elapsed_s": round(snapshot.elapsed_s, 1),
        "left_s": None if snapshot.left_s is None else [round(seconds, 1) for seconds in snapshot.left_s],
        "running_packs": [pack._asdict() for pack in snapshot.running],
    }


class LiveView:
    """A panel at the bottom of a terminal, redrawn in place; lines that stay go above it."""

    def __init__(self, title: str, subtitle: str, out: IO[str]):
        from rich.console import Console
        from rich.live import Live

        self._title, self._subtitle = title, subtitle
        self._console = Console(file=out)
        self._live = Live(console=self._console, auto_refresh=False, transient=True, redirect_stdout=False)
        self._live.start()
        self._size = self._console.size
        # The ticker and the driver are threads of their own; a line written between two halves of a redraw is lost.
        self._lock = threading.Lock()

    def update(self, snapshot: Snapshot) -> None:
        with self._lock:
            if self._console.size != self._size:
                # The terminal has rewrapped what was drawn, so that rich would move up by the wrong number of lines.
                self._size = self._console.size
                self._live.stop()
                self._console.clear()
                self._live.start()
            self._live.update(self._panel(snapshot), refresh=True)

    def say(self, text: str) -> None:
        with self._lock:
            self._console.print(text, markup=False, highlight=False)

    def event(self, name: str, **fields: Any) -> None:
        """People read the panel."""

    def close(self) -> None:
        with self._lock:
            self._live.stop()

    def _panel(self, snapshot: Snapshot) -> Any:
        from rich.console import Group
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        counts = snapshot.counts
        ends = f"{duration(snapshot.elapsed_s)} gone, {time_left(snapshot.left_s)}"
        parts: list[Any] = [_bar(counts), Text(f"{counts_text(counts)}; {ends}")]
        room = max(1, self._size.height - 8 - 2 * len(snapshot.failures[:3]))
        if snapshot.running:
            table = Table(box=None, padding=(0, 2, 0, 0), expand=True)
            table.add_column("running", ratio=1, no_wrap=True, overflow="ellipsis")
            for name in ("step", "loss", "speed"):
                table.add_column(name, justify="right", no_wrap=True)
            for pack in snapshot.running[:room]:
                several = f"  ×{pack.num_trials}" if pack.num_trials > 1 else ""
                step = f"{pack.step:,}/{pack.num_steps:,}" if pack.steps_per_s else "compiling"
                table.add_row(
                    (pack.label or "the trial") + several, step, _loss_text(pack.losses), _speed_text(pack.steps_per_s)
                )
            parts += [Text(), table]
            if len(snapshot.running) > room:
                parts.append(Text(f"… and {len(snapshot.running) - room} more", style="dim"))
        for failure in snapshot.failures[:3]:
            text = f"{failure.num_trials} failed: {failure.error}"
            parts.append(Text(text, style="red", no_wrap=True, overflow="ellipsis"))
        if snapshot.note:
            parts.append(Text(snapshot.note, style="yellow"))
        # The cursor rests on a line of its own: there, the terminal's ^C does not wrap and shift what is redrawn.
        return Group(Panel(Group(*parts), title=self._title, subtitle=self._subtitle, title_align="left"), Text())


def _bar(counts: Counts) -> Any:
    """A bar of the terminal's width: done, failed, running, left."""
    from rich.segment import Segment
    from rich.style import Style

    class Bar:
        def __rich_console__(self, console: Any, options: Any) -> Any:
            shares = [(counts.done, "green", "━"), (counts.failed, "red", "━"), (counts.running, "yellow", "━")]
            ends, so_far = [], 0
            for number, color, sign in shares:
                so_far += number
                ends.append((round(options.max_width * so_far / max(1, counts.total)), color, sign))
            drawn = 0
            for end, color, sign in ends:
                yield Segment(sign * (end - drawn), Style(color=color))
                drawn = end
            yield Segment("╌" * (options.max_width - drawn), Style(color="bright_black"))
            yield Segment.line()

    return Bar()


def make_view(title: str, subtitle: str, *, as_json: bool, live: bool = True, out: IO[str] | None = None) -> View:
    """The view that suits where the output goes; without `live`, never a panel."""
    out = sys.stdout if out is None else out
    if as_json:
        return JsonView(out)
    if live and out.isatty():
        from rich.console import Console

        console = Console(file=out)
        if console.is_terminal and not console.is_dumb_terminal:
            return LiveView(title, subtitle, out)
    return PlainView(out)


def _write(out: IO[str], text: str) -> None:
    """Writes at once. A reader that has gone, or a closed terminal, does not end the run."""
    try:
        out.write(text)
        out.flush()
    except (OSError, ValueError):
        pass


class Ticker:
    """Redraws a view from a tracker, in a thread of its own, until closed."""

    def __init__(self, tracker: Tracker, view: View, claims_every_s: float = CLAIMS_S):
        self._tracker, self._view, self._claims_every_s = tracker, view, claims_every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> "Ticker":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join(timeout=10)
        self._view.close()

    def _run(self) -> None:
        looked = float("-inf")
        while not self._ended.wait(REFRESH_S):
            if time.monotonic() - looked >= self._claims_every_s:
                # A store that cannot be read for a moment is no reason to stop drawing; training goes on.
                try:
                    self._tracker.look()
                except OSError:
                    self._tracker.note = "the store cannot be read at the moment"
                looked = time.monotonic()
            try:
                self._view.update(self._tracker.snapshot())
            except OSError:
                return  # the terminal has gone
