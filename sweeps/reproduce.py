"""`reproduce`: trains a trial once more, from its row in the store alone, and compares what comes out."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd
from pydantic import ValidationError

from hyla_core import RESULTS_VERSION
from hyla_core.config import Cadence, TrainConfig
from sweeps.__main__ import resolve_store
from sweeps.expand import TrialSpec
from sweeps.packs import make_packs
from sweeps.progress import duration
from sweeps.run import lacking
from sweeps.spec import Resources
from sweeps.status import absent, find_trial
from sweeps.store import FINAL, Store, equal_tables, is_config_column

if TYPE_CHECKING:
    from sweeps.cluster.trainable import PackOutcome

REPRODUCED, DIFFERS, NOT_FOUND, WRONG_INPUT = 0, 1, 1, 2

BIT_EQUAL, WITHIN_TOLERANCE, DIFFERENT = "bit-equal", "within tolerance", "differs"

COMPARED_STEPS = 200
"""Steps over which `hyla_core.train` promises its tolerance; later on, rounding may have grown to anything."""

SHOWN_DIFFERENCES = 10

TOLD_EVERY_S = 10.0

PROVENANCE = (
    "code_hash",
    "git_commit",
    "git_diff",
    "version.hyla",
    "version.python",
    "version.jax",
    "version.jaxlib",
    "version.flax",
    "version.optax",
    "version.numpy",
    "device_kind",
    "num_devices",
    "platform_version",
    "cpu_model",
    "xla_flags",
    "pack_size",
)
"""Columns of the trials table that can explain a difference."""


class CannotReproduce(Exception):
    """Why a trial can't be trained from its row, in one line."""


class Comparison(NamedTuple):
    """What came out."""

    trial_id: str
    outcome: str  # bit-equal, within tolerance, or differs
    differences: list[str]  # beyond what the outcome allows
    provenance: dict[str, tuple[Any, Any]]  # column → value in the store, value here; of those that differ
    num_steps: int
    wall_s: float
    device_kind: str | None


def reproduce_command(args: argparse.Namespace) -> int:
    """Trains a trial again and compares.

    Returns:
      0 it was reproduced; 1 it came out otherwise, or there is no such trial; 2 it can't be trained from its row.
    """
    shown = resolve_store(args)
    store = Store.open(shown)
    trial_id = find_trial(store.statuses(), args.trial, shown)
    if trial_id is None:
        return NOT_FOUND
    try:
        if args.into is not None:
            if Path(args.into).expanduser().resolve() == Path(store.shown).resolve():
                raise CannotReproduce(f"--into {args.into} is the store that it is to be compared with; name another")
            comparison = reproduce(store, trial_id, Store.create(args.into))
        else:
            with tempfile.TemporaryDirectory(prefix="hyla-reproduce-") as folder:
                comparison = reproduce(store, trial_id, Store.create(folder))
    except CannotReproduce as error:
        print(f"{shown}: trial {trial_id}: {error}", file=sys.stderr)
        return WRONG_INPUT
    _print(comparison, as_json=args.json)
    return DIFFERS if comparison.outcome == DIFFERENT else REPRODUCED


def reproduce(store: Store, trial_id: str, into: Store) -> Comparison:
    """Trains a trial in this process, into another store, and compares the two.

    Args:
      store: has the trial.
      trial_id: the trial.
      into: where the new results go, as one more attempt if it has the trial already.

    Raises:
      CannotReproduce: there is no result, or it can't be trained here from its row.
      StoreError: a store can't be read or written.
    """
    status = store.statuses()[trial_id].status
    if status not in FINAL:
        raise CannotReproduce(f"it is {status}; only a finished or diverged one can be reproduced")
    row = _row(store, trial_id)
    config = config_of(row)
    cadence = cadence_of(row, store.metrics(trial_ids=[trial_id]))
    if (problem := lacking([TrialSpec(trial_id, config, {}, "")])) is not None:
        raise CannotReproduce(problem)
    resources = _resources(row.get("device_kind"))

    started = time.monotonic()
    outcome = _train(config, cadence, resources, into)
    wall_s = time.monotonic() - started
    ended = outcome.statuses[trial_id]
    if ended == "left":
        raise CannotReproduce(outcome.error or f"another process is training it into {into.shown}")
    here = _row(into, trial_id, last=True)
    if outcome.error is not None or ended not in FINAL:
        verdict, differences = DIFFERENT, [f"it {status} there, but is {ended} here: {outcome.error}"]
    else:
        verdict, differences = _compare(store, into, trial_id)
    return Comparison(
        trial_id,
        verdict,
        differences,
        provenance={
            name: (row.get(name), here.get(name))
            for name in PROVENANCE
            # A column that the row lacks may be younger than it; XLA flags are absent where none were set.
            if row.get(name) != here.get(name) and (name in row or name == "xla_flags")
        },
        num_steps=config.data.num_steps,
        wall_s=wall_s,
        device_kind=here.get("device_kind"),
    )


def config_of(row: Mapping[str, Any]) -> TrainConfig:
    """The config of a trial, from its row alone.

    Args:
      row: columns of the trials table that have a value.

    Raises:
      CannotReproduce: this code can't make that trial out of it.
    """
    try:
        config = TrainConfig.from_flat({name: value for name, value in row.items() if is_config_column(name)})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise CannotReproduce(f"its row is no config of this code: {field}: {first['msg']}") from error
    if config.trial_id != row["trial_id"]:
        raise CannotReproduce(
            f"its row makes trial {config.trial_id} with this code: RESULTS_VERSION ({RESULTS_VERSION} here) or the "
            f"meaning of a field has changed; check out the code that trained it (commit {row.get('git_commit')})"
        )
    return config


def cadence_of(row: Mapping[str, Any], metrics: pd.DataFrame) -> Cadence:
    """When rows were due: as the trial's row says, else, in a store of schema version 1, as its metrics tell.

    Args:
      row: columns of the trials table that have a value.
      metrics: the trial's rows of the metrics table.

    Raises:
      CannotReproduce: neither tells.
    """
    num_steps, reached = int(row["num_steps"]), int(row["step"])
    numbers: dict[str, int] = {}
    for name, is_due in (("num_logs", metrics["split"] == "train"), ("num_evals", metrics["split"] != "train")):
        number = row.get(name) or _times(sorted(set(metrics["step"][is_due])), num_steps, reached)
        if number is None:
            raise CannotReproduce(f"neither its row nor its metrics tell {name}: how often rows were due")
        numbers[name] = int(number)
    return Cadence(**numbers)


def _times(steps: Sequence[int], num_steps: int, reached: int) -> int | None:
    """How often rows were due, by the steps that have some; None where no number fits.

    Args:
      steps: ascending.
      num_steps: steps of the training.
      reached: step at which it ended; a diverged training may have a row there or not.
    """
    first = steps[0] if steps else num_steps
    most = num_steps if first == 1 else (num_steps - 1) // (first - 1)
    for number in range(-(-num_steps // first), most + 1):  # those whose first step is this one
        due = Cadence(num_logs=number).log_steps(num_steps)
        if set(steps) <= set(due) and [step for step in due if step < reached] == [s for s in steps if s < reached]:
            return number
    return None


def _row(store: Store, trial_id: str, *, last: bool = False) -> dict[str, Any]:
    """The columns that have a value, of a trial's attempt that counts, or of its last one."""
    row = store.trials(raw=last, trial_ids=[trial_id]).to_dict("records")[-1]
    return {str(name): value for name, value in row.items() if not absent(value)}


# --- training --------------------------------------------------------------------------------------------------------


def _train(config: TrainConfig, cadence: Cadence, resources: Resources, into: Store) -> "PackOutcome":
    from sweeps import provenance
    from sweeps.cluster.trainable import PackJob, run_pack

    trial = TrialSpec(config.trial_id, config, {}, "")
    (pack,) = make_packs([trial], 1)
    job = PackJob(
        store=into.shown,
        run_id=f"reproduce-{uuid.uuid4().hex[:12]}",
        cadence=cadence,
        keep_checkpoints=False,
        resources=resources,
        provenance=provenance.of_request(into.keep_diff),
        retry=frozenset([trial.trial_id]),
    )
    with _telling(into, config):
        return run_pack(pack, job)


@contextmanager
def _telling(into: Store, config: TrainConfig) -> Iterator[None]:
    """Within it, stderr is told now and then how far the training is."""
    ended = threading.Event()

    def tell() -> None:
        while not ended.wait(TOLD_EVERY_S):
            for claim in into.claims():
                if claim.trial_id == config.trial_id and claim.alive:
                    loss = claim.progress.get("loss")
                    text = f"step {claim.progress.get('step', 0):,} of {config.data.num_steps:,}"
                    print(text + (f", loss {loss:.4g}" if loss is not None else ""), file=sys.stderr, flush=True)

    print(f"training trial {config.trial_id} again, {config.data.num_steps:,} steps", file=sys.stderr, flush=True)
    thread = threading.Thread(target=tell, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _resources(device_kind: str | None) -> Resources:
    """The device that a trial was trained on if this machine has one, else the CPU."""
    if device_kind in (None, "cpu"):
        return Resources()
    here = _kind_here()
    if here == device_kind:
        return Resources(tpu=1) if "TPU" in device_kind else Resources(gpu=1)
    found = "no accelerator" if here in (None, "cpu") else f"{here}"
    print(f"it was trained on {device_kind}; this machine has {found}, so it trains on the CPU", file=sys.stderr)
    return Resources()


def _kind_here() -> str | None:
    """What JAX calls the devices that it takes by itself. Asked in another process: this one may yet need the CPU."""
    command = [sys.executable, "-c", "import jax; print(jax.local_devices()[0].device_kind)"]
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.strip() or None


# --- comparison ------------------------------------------------------------------------------------------------------


def _compare(store: Store, into: Store, trial_id: str) -> tuple[str, list[str]]:
    """Which of the three outcomes it is, and what differs beyond the tolerance."""
    lines = equal_tables(store, into, trial_ids=[trial_id])
    if not lines:
        return BIT_EQUAL, []
    from hyla_core.train import PACK_ATOL, PACK_RTOL

    if store.metrics(trial_ids=[trial_id])["step"].min() > COMPARED_STEPS:
        # With nothing to compare, no tolerance would be exceeded.
        lines.append(f"no row is of the first {COMPARED_STEPS} steps, over which alone a tolerance is known")
    else:
        lines = equal_tables(store, into, rtol=PACK_RTOL, atol=PACK_ATOL, trial_ids=[trial_id], max_step=COMPARED_STEPS)
    differences = [
        line.removeprefix(f"trial {trial_id}: ").replace(into.shown, "what was trained now") for line in lines
    ]
    return (DIFFERENT, differences) if differences else (WITHIN_TOLERANCE, [])


def _print(comparison: Comparison, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(comparison._asdict()))
        return
    print(
        f"trial {comparison.trial_id}: {comparison.num_steps:,} steps on {comparison.device_kind}, "
        f"{duration(comparison.wall_s)}"
    )
    for name, (there, here) in comparison.provenance.items():
        print(f"{name}: {there} there, {here} here")
    if comparison.outcome == BIT_EQUAL:
        print("reproduced (bit-equal)")
    elif comparison.outcome == WITHIN_TOLERANCE:
        steps = min(COMPARED_STEPS, comparison.num_steps)
        print(f"reproduced within tolerance over the first {steps} of {comparison.num_steps:,} steps")
    else:
        for line in comparison.differences[:SHOWN_DIFFERENCES]:
            print(f"differs: {line}")
        if (more := len(comparison.differences) - SHOWN_DIFFERENCES) > 0:
            print(f"differs: {more} more")
