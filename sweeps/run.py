"""`run`: trains what the store does not hold yet. The store is the truth; running again is how one resumes and extends.

Where nothing is left to train, neither Ray nor JAX is imported.
"""

import argparse
import functools
import os
import shlex
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hyla_core.config import Cadence
from sweeps.__main__ import resolve_store
from sweeps.devices import find_device, pack_memory_here, pack_memory_on, packs_at_once
from sweeps.expand import TrialSpec, expand
from sweeps.packs import Pack, default_pack_size, make_packs, short_pack_size
from sweeps.progress import (
    CLAIMS_S,
    DONE,
    Running,
    Ticker,
    Tracker,
    View,
    counts_text,
    duration,
    error_kind,
    group_failures,
    make_view,
)
from sweeps.spec import SpecError, SweepSpec, load_sweep
from sweeps.stopping import GRACE_S, Stop, on_signals
from sweeps.store import Store, TrialState, is_url
from sweeps.upkeep import repair_hint

if TYPE_CHECKING:
    from sweeps.cluster.trainable import PackJob, PackOutcome

OK, SOME_FAILED, WRONG_INPUT, BROKEN = 0, 1, 2, 3

CONFIRM_ABOVE_S = 24 * 3600
"""Device time from which on a run asks before it starts."""

NUM_PACKS_TO_JUDGE = 3
"""A sweep is broken when this many packs, or all where there are fewer, end with one error and none with a result."""


def run_command(args: argparse.Namespace) -> int:
    """Runs a sweep.

    Args:
      args: as `sweeps.__main__` parses them.

    Returns:
      The exit status: 0 every trial is in the store, 1 some are not, 2 wrong input, 3 the sweep is broken, 128+N ended
      by signal N.
    """
    spec = load_sweep(args.sweep, tiny=args.tiny, overrides=args.overrides)
    trials = expand(spec)
    selected = _only(trials, args.only, spec)
    named = resolve_store(args)
    # Workers have other working directories.
    store = Store(named if is_url(named) else Path(named).expanduser().absolute())
    request = _Request(args, spec, selected, store)
    states = store.statuses()
    work = _Work.of(selected, states, args.retry)
    if work.to_train and (problem := request.obstacle() or request.unconfirmed(work) or lacking(work.to_train)):
        print(f"{args.sweep}: {problem}", file=sys.stderr)
        return WRONG_INPUT
    Store.create(store.place)
    store.record_sweep(
        spec.name,
        trials,
        file=args.sweep,
        tiny=spec.tiny,
        select_over=spec.select_over,
        overrides=args.overrides,
        request_id=request.run_id,
    )
    if not work.to_train:
        return request.nothing_to_train(states, work)
    store.check_writable()
    return _train(request, work, states)


def lacking(trials: Sequence[TrialSpec]) -> str | None:
    """Why the data of a sweep does not suffice, in one line; None if it does. Tokenizes a corpus that was not yet."""
    checked = set()
    for trial in trials:
        config = trial.config
        if config.task.name != "language":
            continue
        need = (config.task, config.data.num_train, config.data.num_valid, config.seeds.split)
        if need in checked:
            continue
        checked.add(need)
        from hyla_core.corpus import BUILTIN, cache_folder
        from hyla_core.sequences import check_enough

        if config.task.text != BUILTIN and len(checked) == 1:
            print(f"looking for the tokens of {config.task.text} in {cache_folder()}, or making them", file=sys.stderr)
        try:
            check_enough(config)
        except (ValueError, ModuleNotFoundError) as error:
            return str(error)
        except OSError as error:
            return f"{error.filename or cache_folder()}: {error.strerror or error}"
    return None


def _only(trials: Sequence[TrialSpec], wanted: Sequence[str], spec: SweepSpec) -> list[TrialSpec]:
    """The trials whose ids start so; all of them where none is named.

    Raises:
      SpecError: nothing, or more than one trial, starts so.
    """
    if not wanted:
        return list(trials)
    chosen: dict[str, TrialSpec] = {}
    for prefix in wanted:
        found = [trial for trial in trials if trial.trial_id.startswith(prefix)]
        if len(found) != 1:
            what = "no trial of this sweep" if not found else f"{len(found)} trials of this sweep"
            example = f", such as {trials[0].trial_id}" if not found else ""
            raise SpecError(spec.path, None, f"--only {prefix}: {what} has an id that starts so{example}")
        chosen[found[0].trial_id] = found[0]
    return list(chosen.values())


class _Work(NamedTuple):
    """What a run does with each trial."""

    to_train: list[TrialSpec]
    interrupted: list[TrialSpec]  # those of `to_train` that were begun before
    elsewhere: int  # being trained by another run right now
    retried: frozenset[str]  # trained again although the store has a result

    @classmethod
    def of(cls, trials: Sequence[TrialSpec], states: Mapping[str, TrialState], retry: str | None) -> "_Work":
        """What the store leaves to do."""
        again = {"failed": ("failed",), "diverged": ("diverged",), "all": ("failed", "diverged"), None: ()}[retry]
        to_train, interrupted, retried, elsewhere = [], [], [], 0
        for trial in trials:
            state = states.get(trial.trial_id)
            if state is None:
                to_train.append(trial)
            elif state.status == "running":
                elsewhere += 1
            elif state.status == "interrupted":
                to_train.append(trial)
                interrupted.append(trial)
            elif state.status in again or (state.status == "failed" and is_environment_error(state.error)):
                to_train.append(trial)
                retried += [trial.trial_id] * (state.status in DONE)
        return cls(to_train, interrupted, elsewhere, frozenset(retried))


def damage_lines(store: Store, shown: str) -> list[str]:
    """What the last reading of a store passed over, and the command that sets it aside; nothing where all is whole."""
    if not store.damaged:
        return []
    path, reason = store.damaged[0]
    others = f", and {len(store.damaged) - 1} more" if len(store.damaged) > 1 else ""
    return [f"passed over: {path}: {reason}{others}", repair_hint(shown)]


def is_environment_error(error: str | None) -> bool:
    """Whether an error may not happen again elsewhere or later, such as a lack of memory."""
    from sweeps.cluster.trainable import ENVIRONMENT_ERRORS

    return error is not None and error.startswith(ENVIRONMENT_ERRORS)


class _Request:
    """One run command: what was asked, and how to speak of it."""

    def __init__(self, args: argparse.Namespace, spec: SweepSpec, trials: Sequence[TrialSpec], store: Store):
        self.args, self.spec, self.trials, self.store = args, spec, trials, store
        self.run_id = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{uuid.uuid4().hex[:6]}"
        self.shown_store = resolve_store(args)

    @functools.cached_property
    def address(self) -> str | None:
        """The Ray cluster to run on; None for this machine."""
        if self.args.in_process:
            return None
        from sweeps.cluster import tune

        return tune.find_cluster(self.args.address)

    def obstacle(self) -> str | None:
        """Why the sweep cannot run where it is asked to, before anything is started; None if it can."""
        if (problem := self._layout_problem()) is not None or self.args.in_process:
            return problem
        from sweeps.cluster import tune

        try:
            if self.address is None:
                tune.check_local_resources(self.spec.run.resources)
        except tune.ClusterError as error:
            return str(error)
        return None

    def _layout_problem(self) -> str | None:
        """Why run.model_parallel does not fit a model or the devices that a pack asks for; None if it does."""
        run = self.spec.run
        if run.model_parallel is None:
            return None
        from hyla_core.layout import layout

        num_devices = max(1, int(run.resources.gpu or run.resources.tpu or 1))
        if self.args.in_process:
            from sweeps.cluster import machine

            num_devices = max(1, *(machine.num_accelerators(kind) for kind in ("GPU", "TPU")))
        for config in {trial.config.model: trial.config for trial in self.trials}.values():
            try:
                layout(config, 1, num_devices, model_parallel=run.model_parallel)
            except ValueError as error:
                return f"run.{error}"
        return None

    def unconfirmed(self, work: _Work) -> str | None:
        """Why a costly run has not been agreed to; None if it was, or is not costly."""
        if self.args.yes or self.args.in_process:
            return None
        from sweeps import plan

        resources = self.spec.run.resources
        kind = "a100" if resources.gpu else "tpu-v5e" if resources.tpu else "cpu"
        state = plan.read_store(self.store.shown, work.to_train)
        cost = plan.make_plan(self.spec, work.to_train, self.shown_store, state, plan.DEVICES[kind], 1).cost
        if cost.device_s < CONFIRM_ABOVE_S:
            return None
        question = (
            f"{len(work.to_train):,} trials are to be trained, about {duration(cost.device_s)} of {cost.unit} time "
            f"({cost.explanation.partition(':')[0]})"
        )
        if self.args.json or not (sys.stdin.isatty() and sys.stdout.isatty()):
            return f"{question}; add --yes to start that"
        answer = input(f"{self.spec.name}: {question}. Start? [y/N] ")
        return None if answer.strip().lower() in ("y", "yes") else "not started"

    def command(self, retry: str | None = None) -> str:
        """The command that goes on with this request."""
        args = self.args
        words = ["python", "-m", "sweeps", "run", args.sweep]
        words += ["--tiny"] * args.tiny
        words += ["--results", args.results] * bool(args.results)
        words += [word for override in args.overrides for word in ("--set", override)]
        words += [word for trial in args.only for word in ("--only", trial)]
        words += ["--address", args.address] * bool(args.address)
        words += ["--max-concurrent", str(args.max_concurrent)] * bool(args.max_concurrent)
        words += ["--retry", retry or args.retry] * bool(retry or args.retry)
        words += ["--in-process"] * args.in_process
        words += ["--yes"] * args.yes
        return shlex.join(words)

    def packs(self, work: _Work) -> list[Pack]:
        """Trials that train together. Those begun before stay among themselves, so that none waits for a fresh one."""
        run = self.spec.run
        size = run.max_pack_size or default_pack_size(run.resources)
        short = None if run.max_pack_size else short_pack_size(run.resources)
        begun = {trial.trial_id for trial in work.interrupted}
        fresh = [trial for trial in work.to_train if trial.trial_id not in begun]
        memory = self.pack_memory()
        side_by_side = bool(run.resources.gpu or run.resources.tpu)
        return [
            pack
            for trials in (work.interrupted, fresh)
            for pack in make_packs(trials, size, memory, side_by_side=side_by_side, short_pack_size=short)
        ]

    def pack_memory(self) -> int | None:
        """Bytes that a pack may need where this runs; None where that is not known, as on a cluster."""
        if self.address is not None:
            return None
        from sweeps.cluster import machine

        resources = self.spec.run.resources
        if resources.gpu or resources.tpu:
            return pack_memory_on(find_device(machine.accelerator_name("TPU" if resources.tpu else "GPU")), resources)
        at_once = 1 if self.args.in_process else packs_at_once(resources, machine.num_cpus(), self.args.max_concurrent)
        return pack_memory_here(machine.memory_bytes(), at_once)

    def job(self, work: _Work) -> "PackJob":
        """What every worker has to know."""
        from sweeps import provenance
        from sweeps.cluster.trainable import PackJob

        run = self.spec.run
        return PackJob(
            store=self.store.shown,
            run_id=self.run_id,
            cadence=Cadence(**{name: getattr(run, name) for name in Cadence.model_fields}),
            keep_checkpoints=run.keep_checkpoints,
            model_parallel=run.model_parallel,
            resources=run.resources,
            provenance=provenance.of_request(self.store.keep_diff),
            retry=work.retried,
        )

    def nothing_to_train(self, states: Mapping[str, TrialState], work: _Work) -> int:
        """Says in one line why there is nothing to do."""
        statuses = Counter(states[trial.trial_id].status for trial in self.trials)
        done = sum(statuses[name] for name in DONE)
        diverged = f" ({statuses['diverged']} diverged)" if statuses["diverged"] else ""
        there = f"{done} of {len(self.trials)} trials{diverged} are in {self.shown_store}"
        text = f"{self.spec.name}: nothing to train, {there}"
        if statuses["failed"]:
            text += f", {statuses['failed']} failed; to try them again: {self.command('failed')}"
        if work.elsewhere:
            text += f"; {work.elsewhere} are being trained by another run, whose workers end soon if it was killed"
        status = OK if done == len(self.trials) else SOME_FAILED
        view = make_view(self.spec.name, self.shown_store, as_json=self.args.json, live=False)
        view.say(text)
        for line in damage_lines(self.store, self.shown_store):
            view.say(line)
        view.event("summary", exit_status=status, total=len(self.trials), trained=0, **statuses)
        return status


def _train(request: _Request, work: _Work, states: Mapping[str, TrialState]) -> int:
    packs = request.packs(work)
    stop = Stop()
    statuses = {trial_id: state.status for trial_id, state in states.items()}
    ids = {trial.trial_id for trial in request.trials}

    def read_claims() -> Iterator[Running]:
        for claim in request.store.claims():
            if claim.alive and claim.trial_id in ids:
                told = claim.progress
                yield Running(
                    trial_id=claim.trial_id,
                    step=told.get("step", 0),
                    num_steps=told.get("num_steps", 0),
                    loss=told.get("loss"),
                    steps_per_s=told.get("steps_per_s"),
                    host=claim.host or "",
                )

    tracker = Tracker(request.trials, statuses, packs, read_claims)
    view = make_view(request.spec.name, f"results in {request.shown_store}", as_json=request.args.json)
    driver = _Driver(request, packs, tracker, view, stop, any_result=any(statuses.get(id_) in DONE for id_ in ids))
    started = time.monotonic()
    problem: str | None = None
    train = _train_here if request.args.in_process else _train_with_ray
    try:
        # Claims in a bucket are rewritten less often, and each is a request or two to read.
        claims_every_s = max(CLAIMS_S, request.store.place.heartbeat_every_s)
        with on_signals(stop, _end_now), Ticker(tracker, view, claims_every_s), driver.watching():
            driver.starting(work)
            problem = train(packs, request.job(work), request, driver, stop)
    except _CannotStart as error:
        print(f"{request.args.sweep}: {error}", file=sys.stderr)
        return WRONG_INPUT
    finally:
        request.store.clear_stop(request.run_id)
    return driver.summary(time.monotonic() - started, problem)


class _CannotStart(Exception):
    """Why nothing was started, in one line."""


def _end_now() -> None:
    """Leaves no process and no folder behind, and a terminal with its cursor."""
    if sys.__stdout__ is not None and sys.__stdout__.isatty():
        os.write(sys.__stdout__.fileno(), b"\x1b[?25h\r\n")
    if (tune := sys.modules.get("sweeps.cluster.tune")) is not None:
        tune.end_now()


def _train_with_ray(
    packs: Sequence[Pack], job: "PackJob", request: _Request, driver: "_Driver", stop: Stop
) -> str | None:
    """Trains packs on this machine or a cluster; returns why Ray gave up, if it did."""
    from sweeps.cluster import tune

    try:
        return tune.run_packs(
            packs,
            job,
            request.spec.run.resources,
            events=driver,
            stop=stop,
            address=request.address,
            max_concurrent=request.args.max_concurrent,
        )
    except tune.ClusterError as error:
        raise _CannotStart(str(error)) from error


def _train_here(packs: Sequence[Pack], job: "PackJob", request: _Request, driver: "_Driver", stop: Stop) -> None:
    """Trains packs one after another in this process."""
    from sweeps.cluster.trainable import run_pack

    for pack in packs:
        if stop.requested:
            return
        driver.pack_started(pack)
        driver.pack_ended(pack, run_pack(pack, job, should_stop=lambda: stop.requested))


class _Driver:
    """Follows a run: tells view and tracker what happens, judges whether the sweep is broken, sums up at the end."""

    def __init__(
        self, request: _Request, packs: Sequence[Pack], tracker: Tracker, view: View, stop: Stop, any_result: bool
    ):
        self._request, self._packs, self._tracker, self._view, self._stop = request, packs, tracker, view, stop
        self._any_result = any_result
        self._errors: list[str] = []  # of packs that ended without a result
        self._not_trained: dict[str, str] = {}  # trial_id → why, where the store does not say
        self._lost: Counter[str] = Counter()  # reason → trials given up because their workers were lost
        self._started_at: dict[str, float] = {}
        self._trained: set[str] = set()

    def starting(self, work: _Work) -> None:
        """Says what is about to happen."""
        request, trials, packs = self._request, work.to_train, self._packs
        counts = self._tracker.snapshot().counts
        where = "in this process" if request.args.in_process else "on this machine"
        where = f"on the Ray cluster at {request.address}" if request.address else where
        in_packs = "" if len(packs) == len(trials) else f" in {len(packs)} packs"
        text = f"{request.spec.name}: {counts_text(counts)}; training {len(trials)}{in_packs} {where}"
        if work.elsewhere:
            text += f"; {work.elsewhere} are being trained by another run"
        self._view.say(f"{text}; results in {request.shown_store}")
        self._view.event(
            "start",
            sweep=request.spec.name,
            store=request.shown_store,
            run_id=request.run_id,
            total=counts.total,
            to_train=len(trials),
            packs=len(packs),
        )
        if not request.args.in_process:
            self._tracker.note = "starting Ray"

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it, a request to stop is passed on to the workers."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.is_set():
                if self._stop.wait(0.5):
                    self._pass_on_stop()
                    return

        thread = threading.Thread(target=watch, name="stop", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _pass_on_stop(self) -> None:
        if self._stop.signum is not None:
            text = f"stopping: running trials save a checkpoint (up to {GRACE_S:.0f} s); a second signal ends at once"
            self._view.event("stopping", signal=self._stop.signum)
        else:
            text = "stopping early: the sweep itself is broken"
            self._view.event("stopping", error=self._stop.broken)
        self._tracker.note = text
        self._view.say(text)
        try:
            self._request.store.request_stop(self._request.run_id)
        except Exception as error:
            # Workers then end with this process, and go on from their last checkpoints.
            self._view.say(str(error))

    def pack_started(self, pack: Pack) -> None:
        """A worker has begun."""
        if not self._stop.requested:
            self._tracker.note = None
        self._started_at[pack.pack_id] = time.monotonic()
        self._tracker.pack_started(pack)
        self._view.event("pack_started", pack_id=pack.pack_id, trial_ids=[trial.trial_id for trial in pack.trials])

    def pack_ended(self, pack: Pack, outcome: "PackOutcome") -> None:
        """A worker has returned."""
        self._tracker.pack_ended(pack, outcome.statuses, outcome.error)
        took = duration(time.monotonic() - self._started_at.get(pack.pack_id, time.monotonic()))
        groups: dict[str, list[str]] = {}
        for trial_id, status in outcome.statuses.items():
            groups.setdefault(status, []).append(trial_id)
        for status, trial_ids in groups.items():
            if status != "left" or outcome.error is not None or not self._stop.requested:
                self._view.say(self._line(status, trial_ids, took, outcome.error))
        for trial in pack.trials:
            status = outcome.statuses[trial.trial_id]
            failed = {"error": outcome.error} if status not in DONE and outcome.error else {}
            self._view.event("trial", trial_id=trial.trial_id, status=status, axes=trial.axes, **failed)
            if status in DONE:
                self._trained.add(trial.trial_id)
            elif status != "failed" and outcome.error is not None:
                self._not_trained[trial.trial_id] = outcome.error
        work = {} if outcome.work is None else outcome.work._asdict()
        self._view.event("pack_ended", pack_id=pack.pack_id, **work)
        if any(status in DONE for status in outcome.statuses.values()):
            self._any_result = True
        elif outcome.error is not None:
            self._judge(outcome.error)

    def _line(self, status: str, trial_ids: Sequence[str], took: str, error: str | None) -> str:
        several = f" {len(trial_ids)}" if len(trial_ids) > 1 else ""
        text = f"{status}{several}: {self._tracker.describe(trial_ids) or trial_ids[0]}"
        if status in DONE:
            return f"{text} ({took})"
        if error is not None:
            return f"{text}: {error}"
        return text + (" (another run has it)" if status == "left" else "")

    def _judge(self, error: str) -> None:
        """Finds the sweep broken if the first packs all ended with one error; called with that of each."""
        self._errors.append(error)
        enough = len(self._errors) >= min(NUM_PACKS_TO_JUDGE, len(self._packs))
        if enough and not self._any_result and len(set(map(error_kind, self._errors))) == 1:
            self._stop.as_broken(error)

    def worker_lost(self, pack: Pack, reason: str, *, again: bool) -> None:
        """A worker died under its pack."""
        trial_ids = [trial.trial_id for trial in pack.trials]
        self._tracker.worker_lost(pack)
        then = "starting it again" if again else "giving it up for this run"
        self._view.say(f"lost the worker of {self._tracker.describe(trial_ids) or trial_ids[0]}: {reason}; {then}")
        self._view.event("worker_lost", pack_id=pack.pack_id, trial_ids=trial_ids, reason=reason, again=again)
        if not again:
            self._lost[reason] += len(trial_ids)
            self._judge(reason)

    def summary(self, wall_s: float, problem: str | None) -> int:
        """Counts what the store has now, says so, and gives the exit status."""
        request, stop, say = self._request, self._stop, self._view.say
        states = request.store.statuses()
        found = [states.get(trial.trial_id) for trial in request.trials]
        statuses = Counter("left" if state is None else state.status for state in found)
        interrupted = statuses.pop("interrupted", 0)
        statuses["left"] += interrupted
        done = sum(statuses[name] for name in DONE)
        complete = done == len(found)
        if stop.signum is not None:
            status = 128 + stop.signum
        elif stop.broken is not None:
            status = BROKEN
        else:
            status = OK if complete else SOME_FAILED

        diverged = f" ({statuses['diverged']} diverged)" if statuses["diverged"] else ""
        begun = f", {interrupted} more begun and not finished" if interrupted else ""
        say(
            f"{request.spec.name}: {done} of {len(found)} trials{diverged} are in {request.shown_store}; "
            f"{len(self._trained)} trained now{begun}, in {duration(wall_s)}"
        )
        errors = {state_id: state.error or "" for state_id, state in states.items() if state.status == "failed"}
        ids = {trial.trial_id for trial in request.trials}
        failures = group_failures({trial_id: error for trial_id, error in errors.items() if trial_id in ids})
        if stop.broken is not None:
            say(f"stopped early, since every pack so far ended with: {stop.broken}")
        for failure in failures:
            say(f"{failure.num_trials} failed: {failure.error}")
            say(f"  python -m sweeps show {shlex.quote(request.shown_store)} {failure.trial_id}")
        for reason, num_trials in self._lost.items():
            say(f"{num_trials} given up for now: each time a worker was lost, {reason}")
        if stop.broken is None:
            for failure in group_failures(self._not_trained):
                say(f"{failure.num_trials} not trained: {failure.error}")
        if problem is not None:
            say(problem)
        for line in damage_lines(request.store, request.shown_store):
            say(line)
        if not complete:
            left = len(found) - done - statuses["failed"]
            if stop.broken is not None:
                say(f"once that is mended: {request.command('failed')}")
            elif statuses["failed"] and not left:
                say(f"to try them again: {request.command('failed')}")
            else:
                say(f"to continue: {request.command()}")
        if done:
            say(f"curves: python analysis/scaling.py {shlex.quote(request.shown_store)}")
        self._view.event(
            "summary",
            exit_status=status,
            total=len(found),
            trained=len(self._trained),
            wall_s=round(wall_s, 3),
            **{name: statuses[name] for name in ("finished", "diverged", "failed", "running", "left")},
            failures=[failure._asdict() for failure in failures],
            problem=problem or stop.broken,
        )
        return status
