"""What is shown of a run: counts, time left, words, and the views."""

import io
import json
from pathlib import Path

import pytest
from fake_training import write_sweep

from sweeps.expand import TrialSpec, expand
from sweeps.packs import Pack, make_packs
from sweeps.progress import (
    Counts,
    Failure,
    JsonView,
    LiveView,
    PlainView,
    Running,
    RunningPack,
    Snapshot,
    Ticker,
    TimeLeft,
    Tracker,
    counts_text,
    describe_common,
    duration,
    error_kind,
    group_failures,
    make_view,
    swept_axes,
    time_left,
)
from sweeps.spec import load_sweep


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def trials(tmp_path: Path) -> list[TrialSpec]:
    return expand(load_sweep(write_sweep(tmp_path)))


@pytest.fixture
def packs(trials: list[TrialSpec]) -> list[Pack]:
    return make_packs(trials, 2)


def snapshot(**changes) -> Snapshot:
    pack = RunningPack("peak_lr=0.001 seed=0…1", 2, 1200, 4000, (0.5, 1.25), 80.0, "node")
    default = Snapshot(
        Counts(10, 3, 1, 2, 2, 2), [pack], [Failure("ValueError: no", 2, "abc")], 65.0, (30.0, 50.0), None
    )
    return default._replace(**changes)


def test_time_left_from_the_speed_so_far_and_of_late():
    left = TimeLeft(total=100)
    assert left.estimate() is None
    left.add(0, 0)
    assert left.estimate() is None
    left.add(20, 10)
    left.add(30, 40)  # 3 a second of late, 4/3 a second in all
    assert left.estimate() == pytest.approx((60 / 3, 60 / (4 / 3)))
    left.add(31, 100)
    assert left.estimate() == (0, 0)


def test_time_left_knows_nothing_from_a_moment_or_without_progress():
    left = TimeLeft(total=100)
    left.add(0, 5)
    left.add(2, 50)
    assert left.estimate() is None
    still = TimeLeft(total=100)
    still.add(0, 5)
    still.add(60, 5)
    assert still.estimate() is None


def test_a_tracker_follows_a_run(trials, packs):
    clock, claims = Clock(), []
    statuses = {trials[0].trial_id: "finished", trials[1].trial_id: "diverged", trials[2].trial_id: "failed"}
    tracker = Tracker(trials, statuses, packs[2:], lambda: list(claims), clock)
    assert tracker.snapshot().counts == Counts(total=8, finished=1, diverged=1, failed=1, running=0, left=5)

    tracker.pack_started(packs[2])
    assert tracker.snapshot().counts == Counts(total=8, finished=1, diverged=1, failed=1, running=2, left=3)
    first, second = (trial.trial_id for trial in packs[2].trials)
    claims += [Running(first, 5, 20, 0.5, 10.0, "a"), Running(second, 4, 20, None, 10.0, "a")]
    claims += [Running("somebody else's", 1, 2, 0.1, 1.0, "b")]
    tracker.look()
    shown = tracker.snapshot().running
    assert shown == [RunningPack("peak_lr=0.003 seed=0…1", 2, 4, 20, (0.5, 0.5), 10.0, "a")]

    clock.now += 30
    tracker.pack_ended(packs[2], {first: "finished", second: "failed"}, "ValueError: no")
    claims.clear()
    tracker.look()
    now = tracker.snapshot()
    assert now.counts == Counts(total=8, finished=2, diverged=1, failed=2, running=0, left=3)
    assert now.failures == [Failure("ValueError: no", 1, second)]
    assert now.elapsed_s == 30
    # A quarter and a fifth of two trials, of equal work, were done at 100 s; two of the four are at 130 s.
    assert now.left_s == pytest.approx((2 / ((2 - 0.45) / 30), 2 / ((2 - 0.45) / 30)))

    tracker.pack_started(packs[3])
    tracker.worker_lost(packs[3])
    assert tracker.snapshot().counts.running == 0


def test_a_trial_that_is_trained_again_counts_as_left(trials, packs):
    tracker = Tracker(trials, {packs[0].trials[0].trial_id: "diverged"}, packs[:1], list)
    assert tracker.snapshot().counts.left == 8


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (99.4, "99 s"), (100, "2 min"), (3570, "1 h"), (3600 + 300, "1 h 5 min"), (3600 * 76, "3 d 4 h")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_time_left_in_words():
    assert time_left(None) == "time left not known yet"
    assert time_left((180, 240)) == "about 3–4 min left"
    assert time_left((50, 240)) == "about 50 s–4 min left"
    assert time_left((180, 181)) == "about 3 min left"
    assert time_left((7500, 8100)) == "about 2 h 5 min–2 h 15 min left"


def test_counts_in_words():
    assert counts_text(Counts(16, 4, 0, 0, 0, 12)) == "4 of 16 done, 12 left"
    assert counts_text(Counts(16, 4, 1, 2, 3, 6)) == "5 of 16 done (1 diverged), 2 failed, 3 running, 6 left"


def test_trials_are_described_by_what_is_swept(trials):
    swept = swept_axes(trials)
    assert swept == {"optim.peak_lr": "peak_lr", "seed": "seed"}
    assert describe_common([trials[0].axes], swept) == "peak_lr=0.001 seed=0"
    assert describe_common([trials[0].axes, trials[1].axes], swept) == "peak_lr=0.001 seed=0…1"
    assert swept_axes(trials[:1]) == {}


def test_short_names_stay_unambiguous(trials):
    def with_axes(trial, **axes):
        return trial._replace(axes=axes)

    two = [
        with_axes(trials[0], **{"seeds.init": 0, "model.init": 1, "model.depth": 1}),
        with_axes(trials[1], **{"seeds.init": 1, "model.init": 2, "model.depth": 2}),
    ]
    assert swept_axes(two) == {"seeds.init": "seeds.init", "model.init": "model.init", "model.depth": "depth"}


def test_failures_are_grouped_by_what_is_not_a_number():
    assert error_kind("step 12 of 3f9ab2c4d5e6: 1.5") == error_kind("step 7 of 0a1b2c3d4e5f: 20")
    assert error_kind("axis 1 is bad") != error_kind("axis 1 is worse")
    errors = {"a": "bad 1", "b": "worse", "c": "bad 2"}
    assert group_failures(errors) == [Failure("bad 1", 2, "a"), Failure("worse", 1, "b")]


def test_plain_lines_come_now_and_then():
    clock, out = Clock(), io.StringIO()
    view = PlainView(out, every_s=30, clock=clock)
    for _ in range(62):
        view.update(snapshot())
        clock.now += 1
    assert (
        out.getvalue().splitlines()
        == ["4 of 10 done (1 diverged), 2 failed, 2 running, 2 left; 65 s gone, about 30–50 s left"] * 2
    )
    view.say("something")
    clock.now += 29
    view.update(snapshot())
    assert out.getvalue().splitlines()[-1] == "something"


def test_json_lines_hold_nothing_but_json():
    clock, out = Clock(), io.StringIO()
    view = JsonView(out, every_s=30, clock=clock)
    view.say("for people")
    view.event("start", total=10)
    clock.now += 30
    view.update(snapshot())
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert lines[0] == {"event": "start", "total": 10}
    assert lines[1]["event"] == "progress"
    assert (lines[1]["failed"], lines[1]["left_s"]) == (2, [30.0, 50.0])
    assert lines[1]["running_packs"][0]["label"] == "peak_lr=0.001 seed=0…1"
    assert len(lines) == 2


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_panel_shows_it_all(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "40")
    out = Terminal()
    view = make_view("toy", "results in st", as_json=False, out=out)
    assert isinstance(view, LiveView)
    view.update(snapshot(note="stopping"))
    view.say("a line that stays")
    view.close()
    text = out.getvalue()
    for part in ("toy", "results in st", "4 of 10 done", "peak_lr=0.001 seed=0…1  ×2", "1,200/4,000", "0.5–1.25"):
        assert part in text
    for part in ("80 steps/s", "2 failed: ValueError: no", "stopping", "about 30–50 s left", "a line that stays"):
        assert part in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1


def test_no_panel_without_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_view("t", "s", as_json=False, out=Terminal()), PlainView)
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(make_view("t", "s", as_json=False, out=io.StringIO()), PlainView)
    assert isinstance(make_view("t", "s", as_json=False, live=False, out=Terminal()), PlainView)
    assert isinstance(make_view("t", "s", as_json=True, out=Terminal()), JsonView)


class Closed(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_reader_that_has_gone_ends_nothing(trials, packs):
    PlainView(Closed()).say("nobody hears")
    JsonView(Closed()).event("start")
    with Ticker(Tracker(trials, {}, packs, list), PlainView(Closed(), every_s=0)):
        pass
