"""`plan`: what a sweep would train, what the store holds of it, and what the rest costs. Touches no device."""

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from hyla_core.config import TrainConfig
from hyla_core.counts import num_non_embedding_params, num_params, step_memory_bytes, train_flops_per_example
from sweeps.cluster.machine import memory_bytes, num_cpus
from sweeps.devices import DEVICES, Device, pack_memory_here, pack_memory_on, packs_at_once, parse_devices
from sweeps.expand import TrialSpec, expand
from sweeps.packs import default_pack_size, make_packs, shape_key, short_pack_size, trial_flops
from sweeps.progress import duration
from sweeps.spec import SEED_AXES, RunConfig, SweepSpec, load_sweep

MAX_ROWS = 60
"""Shapes shown in the table; --json lists all of them."""

MAX_DAMAGED = 5
"""Unreadable parts named in the text."""

MAX_TIMED_PER_SHAPE = 8
MAX_TIMED_OTHERS = 50
"""Finished trials whose timings are read, of each shape of the sweep and of other sweeps in the store."""

FORWARD_SHARE = 1 / 3
"""Of a training step's operations; the backward pass takes twice as many as the forward pass."""


class StoreState(NamedTuple):
    """What a store knows of a sweep."""

    statuses: dict[str, str]  # trial_id → finished or diverged
    timings: dict[
        str, tuple[str, float, float]
    ]  # trial_id → what jax calls the device, FLOPs, device seconds; a sample
    damaged: list[str]  # parts that could not be read


class Shape(NamedTuple):
    """The trials that one compiled program trains."""

    axes: dict[str, Any]  # the axis values that all of them share
    num_params: int
    num_non_embedding_params: int
    step_memory_bytes: int  # of one trial alone, by estimate
    num_trials: int
    num_new: int  # not in the store
    min_steps: int
    max_steps: int
    train_flops: float  # of all its trials
    new_train_flops: float  # of those not in the store
    new_slot_s: float  # time that these occupy one slot: the devices of one pack


class Cost(NamedTuple):
    """What the trials that the store lacks cost."""

    device: str
    unit: str  # what one of the devices is called
    num_devices: int
    num_slots: int  # packs that train at once
    device_s: float
    wall_s: float
    basis: str  # measured, or assumed
    explanation: str


class Plan(NamedTuple):
    """All that `plan` prints."""

    spec: SweepSpec
    store: str
    num_trials: int
    num_points: int
    num_cells: int
    num_new: int
    statuses: dict[str, int]  # finished, diverged → trials in the store
    max_pack_size: int
    pack_memory_bytes: int | None  # what a pack may need; None where that is not known
    num_packs: int  # of the trials not in the store
    shapes: list[Shape]
    cost: Cost
    damaged: list[str]


def plan_command(args: argparse.Namespace) -> int:
    """Prints the plan of `args.sweep`, as text or, with `args.json`, as one JSON object.

    Returns:
      The exit status: 0, or 1 where parts of the store could not be read.
    """
    from sweeps.__main__ import resolve_store

    spec = load_sweep(args.sweep, tiny=args.tiny, overrides=args.overrides)
    device, count = parse_devices(args.devices) if args.devices else (DEVICES["cpu"], num_cpus())
    trials = expand(spec)
    store = resolve_store(args)
    memory = _pack_memory(spec.run, device, here=not args.devices)
    plan = make_plan(spec, trials, store, read_store(store, trials), device, count, memory)
    if args.json:
        print(json.dumps(as_json(plan), ensure_ascii=False))
    else:
        print_plan(plan, sys.stdout)
    return 1 if plan.damaged else 0


def _pack_memory(run: RunConfig, device: Device, *, here: bool) -> int | None:
    """Bytes that a pack may need on a device; here: on this machine's cores."""
    if not device.is_cpu:
        return pack_memory_on(device, run.resources)
    if not here or _asks_for_accelerator(run):
        return None
    return pack_memory_here(memory_bytes(), packs_at_once(run.resources, num_cpus()))


def _asks_for_accelerator(run: RunConfig) -> bool:
    return bool(run.resources.gpu or run.resources.tpu)


def read_store(path: str, trials: Sequence[TrialSpec]) -> StoreState:
    """What a store knows; nothing where there is no store yet.

    Args:
      path: of the store.
      trials: of the sweep that is planned; their timings are looked at first.

    Raises:
      StoreError: there is something at the path that is no store.
    """
    if "://" not in path:
        folder = Path(path).expanduser()
        if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
            return StoreState({}, {}, [])
    from sweeps.store import Store, is_url  # pyarrow and pandas take a while to import

    if is_url(path) and not Store(path).place.names(""):
        return StoreState({}, {}, [])
    store = Store.open(path)
    statuses = store.finished()
    damaged = [f"{where}: {reason}" for where, reason in store.damaged]
    rows = store.trials(trial_ids=_sample(statuses, trials))
    # Whole trainings only: of a resumed one, the seconds of its earlier attempts stand elsewhere.
    timed = rows[(rows["start_step"] == 0) & (rows["device_s"] > 0) & (rows["train_flops"] > 0)]
    columns = [timed[name].tolist() for name in ("trial_id", "device_kind", "train_flops", "device_s")]
    timings = {trial_id: (str(kind), flops, s) for trial_id, kind, flops, s in zip(*columns, strict=True)}
    return StoreState(statuses, timings, damaged)


def _sample(statuses: Mapping[str, str], trials: Sequence[TrialSpec]) -> list[str]:
    """Finished trials whose timings tell enough: opening all the parts of a large store would take longer."""
    shapes: dict[str, list[str]] = {}
    for trial in trials:
        if statuses.get(trial.trial_id) == "finished":
            shapes.setdefault(shape_key(trial.config), []).append(trial.trial_id)
    sample = [trial_id for ids in shapes.values() for trial_id in ids[:: -(-len(ids) // MAX_TIMED_PER_SHAPE)]]
    ours = {trial.trial_id for trial in trials}
    others = [trial_id for trial_id, status in statuses.items() if status == "finished" and trial_id not in ours]
    return sample + others[:MAX_TIMED_OTHERS]


def make_plan(
    spec: SweepSpec,
    trials: Sequence[TrialSpec],
    store: str,
    state: StoreState,
    device: Device,
    num_devices: int,
    pack_memory_bytes: int | None = None,
) -> Plan:
    """Counts and prices a sweep.

    Args:
      spec: the sweep.
      trials: all of its trials.
      store: the store's path, to print it.
      state: what the store holds.
      device: what it would run on.
      num_devices: how many of them; of a CPU, the cores.
      pack_memory_bytes: what a pack may need there; None where that is not known.
    """
    new = [trial for trial in trials if trial.trial_id not in state.statuses]
    size = spec.run.max_pack_size or default_pack_size(spec.run.resources)
    short = None if spec.run.max_pack_size else short_pack_size(spec.run.resources)
    side_by_side = not device.is_cpu or _asks_for_accelerator(spec.run)
    packs = make_packs(new, size, pack_memory_bytes, side_by_side=side_by_side, short_pack_size=short)
    groups: dict[str, list[TrialSpec]] = {}
    for trial in trials:
        groups.setdefault(shape_key(trial.config), []).append(trial)
    rates = _Rates(spec.run, device, state, groups)
    shared = _axes_of_shapes(spec, groups)
    shapes = [_shape(key, group, shared, state, rates) for key, group in groups.items()]
    return Plan(
        spec=spec,
        store=store,
        num_trials=len(trials),
        num_points=len({trial.point for trial in trials}),
        num_cells=math.prod(len(spec.axes[axis]) for axis in spec.cell_axes),
        num_new=len(new),
        statuses=dict(Counter(state.statuses[trial.trial_id] for trial in trials if trial.trial_id in state.statuses)),
        max_pack_size=size,
        pack_memory_bytes=pack_memory_bytes,
        num_packs=len(packs),
        shapes=shapes,
        cost=_cost(spec, trials, rates, num_devices, sum(shape.new_slot_s for shape in shapes), len(packs)),
        damaged=state.damaged,
    )


class _Rates:
    """Operations per second of one slot: measured where the store has finished trials of this device, else assumed."""

    def __init__(self, run: RunConfig, device: Device, state: StoreState, groups: Mapping[str, Sequence[TrialSpec]]):
        self.run, self.device = run, device
        there = {id_: row for id_, row in state.timings.items() if device.is_named(row[0])}
        self.num_measured = len(there)
        self.overall = _speed(there.values())
        # Small models reach less than large ones, so that a shape's own trials tell more than the average.
        self.by_shape = {
            key: speed
            for key, group in groups.items()
            if (speed := _speed(there[trial.trial_id] for trial in group if trial.trial_id in there))
        }

    def slot_s(self, key: str, config: TrainConfig) -> float:
        """How long one training of a shape occupies a slot that it has for itself."""
        measured = self.by_shape.get(key, self.overall)
        if measured:
            return trial_flops(config) / measured  # evaluations included: so are they in the seconds measured
        steps = len(self.run.eval_steps(config.data.num_steps))
        examples = steps * (config.data.num_valid + config.data.num_test + config.data.num_ood)
        flops = trial_flops(config) + FORWARD_SHARE * examples * train_flops_per_example(config)
        return flops / (self.device.flops_per_s(config.numerics.dtype) * devices_per_slot(self.run, self.device))


def _speed(rows: Any) -> float | None:
    pairs = [(flops, seconds) for _, flops, seconds in rows]
    return sum(flops for flops, _ in pairs) / sum(seconds for _, seconds in pairs) if pairs else None


def devices_per_slot(run: RunConfig, device: Device) -> float:
    """Devices that one pack occupies; of a CPU, cores."""
    if device.is_cpu:
        return max(1.0, run.resources.cpu)
    return run.resources.tpu or run.resources.gpu or 1.0


def _cost(
    spec: SweepSpec, trials: Sequence[TrialSpec], rates: _Rates, num_devices: int, slot_s: float, num_packs: int
) -> Cost:
    device, per_slot = rates.device, devices_per_slot(spec.run, rates.device)
    num_slots = max(1, int(num_devices / per_slot))
    if rates.overall:
        explanation = (
            f"measured: {_counted(rates.num_measured, 'finished trial')} on {device.kind} in the store, "
            f"{_si(rates.overall)}FLOP/s a pack on average"
        )
    else:
        peak = device.peak_flops_per_s(trials[0].config.numerics.dtype)
        explanation = (
            f"assumed: {device.utilisation:.0%} of one {_unit(device)}'s peak of {_si(peak)}FLOP/s, give or take "
            f"a factor of three; the store has no finished trial on {device.kind} to go by"
        )
    return Cost(
        device=device.kind,
        unit=_unit(device),
        num_devices=num_devices,
        num_slots=num_slots,
        device_s=slot_s * per_slot,
        wall_s=slot_s / max(1, min(num_slots, num_packs)),
        basis="measured" if rates.overall else "assumed",
        explanation=explanation,
    )


def _unit(device: Device) -> str:
    """What one device is called: of a CPU, devices are its cores."""
    return "core" if device.is_cpu else device.kind


def _axes_of_shapes(spec: SweepSpec, groups: Mapping[str, Sequence[TrialSpec]]) -> list[str]:
    """Axes with several values of which each shape has one."""
    return [
        axis
        for axis, values in spec.axes.items()
        if len(values) > 1 and all(len({trial.axes[axis] for trial in group}) == 1 for group in groups.values())
    ]


def _shape(key: str, group: Sequence[TrialSpec], shared: Sequence[str], state: StoreState, rates: _Rates) -> Shape:
    config = group[0].config
    new = [trial for trial in group if trial.trial_id not in state.statuses]
    steps = [trial.config.data.num_steps for trial in group]
    return Shape(
        axes={axis: group[0].axes[axis] for axis in shared},
        num_params=sum(num_params(config).values()),
        num_non_embedding_params=num_non_embedding_params(config),
        step_memory_bytes=step_memory_bytes(config),
        num_trials=len(group),
        num_new=len(new),
        min_steps=min(steps),
        max_steps=max(steps),
        train_flops=sum(trial_flops(trial.config) for trial in group),
        new_train_flops=sum(trial_flops(trial.config) for trial in new),
        new_slot_s=sum(rates.slot_s(key, trial.config) for trial in new),
    )


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as one JSON object; times in hours where the name says so."""
    spec = plan.spec
    per_slot = _per_slot(plan)
    return {
        "sweep": spec.name,
        "file": str(spec.path),
        "tiny": spec.tiny,
        "store": plan.store,
        "axes": spec.axes,
        "select_over": list(spec.select_over),
        "num_trials": plan.num_trials,
        "num_points": plan.num_points,
        "num_cells": plan.num_cells,
        "num_finished": plan.statuses.get("finished", 0),
        "num_diverged": plan.statuses.get("diverged", 0),
        "num_new": plan.num_new,
        "num_packs": plan.num_packs,
        "max_pack_size": plan.max_pack_size,
        "pack_memory_bytes": plan.pack_memory_bytes,
        "train_flops": sum(shape.train_flops for shape in plan.shapes),
        "new_train_flops": sum(shape.new_train_flops for shape in plan.shapes),
        "device": plan.cost.device,
        "num_devices": plan.cost.num_devices,
        "num_slots": plan.cost.num_slots,
        "device_hours": plan.cost.device_s / 3600,
        "wall_hours": plan.cost.wall_s / 3600,
        "basis": plan.cost.basis,
        "explanation": plan.cost.explanation,
        "shapes": [
            {
                "axes": shape.axes,
                "num_params": shape.num_params,
                "num_non_embedding_params": shape.num_non_embedding_params,
                "step_memory_bytes": shape.step_memory_bytes,
                "num_trials": shape.num_trials,
                "num_new": shape.num_new,
                "min_steps": shape.min_steps,
                "max_steps": shape.max_steps,
                "train_flops": shape.train_flops,
                "new_train_flops": shape.new_train_flops,
                "device_hours": shape.new_slot_s * per_slot / 3600,
            }
            for shape in plan.shapes
        ],
        "damaged": plan.damaged,
    }


# ------------------------------------------------------------------------------------------------------------- printing


class _Table(NamedTuple):
    headers: list[str]
    rows: list[list[str]]
    num_left: int  # columns aligned to the left; the others hold numbers
    total: list[str] | None = None
    folded: int | None = None  # the column that may take several lines where the terminal is narrow


def print_plan(plan: Plan, out: IO[str]) -> None:
    """Prints the plan for people: tables drawn in a terminal, plain lines elsewhere."""
    spec = plan.spec
    title = f"{spec.name}{' (tiny)' if spec.tiny else ''}: {spec.path} → {plan.store}"
    parts: list[str | _Table] = [_axes_table(plan), _trials_text(plan), _shapes_table(plan)]
    if (hidden := len(plan.shapes) - MAX_ROWS) > 0:
        parts.append(f"… and {hidden:,} more rows; --json lists all")
    parts.append(_cost_text(plan))
    if (warning := _memory_warning(plan)) is not None:
        parts.append(warning)
    if plan.damaged:
        lines = [f"passed over: {damage}" for damage in plan.damaged[:MAX_DAMAGED]]
        if hidden := len(plan.damaged) - len(lines):
            lines.append(f"… and {hidden:,} more parts of the store that cannot be read; --json lists all")
        parts.append("\n".join(lines))
    if out.isatty():
        _print_drawn(title, parts, out)
    else:
        _print_plain(title, parts, out)


def _axes_table(plan: Plan) -> _Table:
    spec = plan.spec
    rows = []
    for axis, values in spec.axes.items():
        role = "averaged over" if axis in SEED_AXES else "best one chosen" if axis in spec.select_over else ""
        rows.append([axis, ", ".join(map(str, values)), role])
    return _Table(["axis", "values", ""], rows, 3, folded=1)


def _trials_text(plan: Plan) -> str:
    spec = plan.spec
    settings = math.prod(len(spec.axes[axis]) for axis in spec.select_over)
    seeds = math.prod(len(values) for axis, values in spec.axes.items() if axis in SEED_AXES)
    product = [_counted(plan.num_cells, "cell")]
    product += [_counted(settings, "hyperparameter setting")] if spec.select_over else []
    product += [_counted(seeds, "seed")]
    there = [f"{count:,} {status}" for status, count in sorted(plan.statuses.items(), reverse=True)]
    held = f"{plan.store} holds {' and '.join(there)}" if there else f"{plan.store} holds none of them yet"
    todo = (
        f"{plan.num_new:,} to train in {_counted(plan.num_packs, 'pack')} of at most {plan.max_pack_size}"
        if plan.num_new
        else "nothing to train"
    )
    return f"{_counted(plan.num_trials, 'trial')} = {' × '.join(product)}\n{held}; {todo}"


def _shapes_table(plan: Plan) -> _Table:
    axes = list(plan.shapes[0].axes)
    leaves = [axis.rpartition(".")[2] for axis in axes]
    names = leaves if len(set(leaves)) == len(leaves) else axes
    per_slot = _per_slot(plan)
    some_held = plan.num_new < plan.num_trials
    headers = [*names, "parameters", "steps", "trials", *(["to train"] * some_held), "FLOPs", f"{plan.cost.unit} time"]

    def counted(num_trials: int, num_new: int, flops: float, device_s: float) -> list[str]:
        new = [f"{num_new:,}"] * some_held
        return [f"{num_trials:,}", *new, f"{flops:.1e}".replace("e+", "e"), _hours(device_s)]

    rows = []
    for shape in plan.shapes[:MAX_ROWS]:
        size = [_si(shape.num_params).rstrip(), _span(shape.min_steps, shape.max_steps)]
        rest = counted(shape.num_trials, shape.num_new, shape.train_flops, shape.new_slot_s * per_slot)
        rows.append([*(str(value) for value in shape.axes.values()), *size, *rest])
    sums = counted(plan.num_trials, plan.num_new, sum(s.train_flops for s in plan.shapes), plan.cost.device_s)
    total = ["total", *[""] * (len(axes) + 1), *sums]
    return _Table(headers, rows, len(axes), total if len(rows) > 1 else None)


def _cost_text(plan: Plan) -> str:
    cost = plan.cost
    if not plan.num_new:
        return "nothing left to pay for"
    devices = f"{_counted(cost.num_devices, cost.unit)}, {_counted(cost.num_slots, 'pack')} at once"
    text = f"about {_hours(cost.device_s)} of {cost.unit} time: {_wall(cost.wall_s)} on {devices}\n({cost.explanation})"
    if cost.device == "cpu" and _asks_for_accelerator(plan.spec.run):
        text += "\nThe sweep asks for an accelerator: --devices h100:8, say, gives its price there."
    return text


def _memory_warning(plan: Plan) -> str | None:
    """Says which trials may not fit even alone."""
    memory = plan.pack_memory_bytes
    large = [] if memory is None else [s for s in plan.shapes if s.num_new and s.step_memory_bytes > memory]
    if memory is None or not large:
        return None
    worst = max(large, key=lambda shape: shape.step_memory_bytes)
    which = " ".join(f"{axis.rpartition('.')[2]}={value}" for axis, value in worst.axes.items())
    number = _counted(sum(shape.num_new for shape in large), "trial")
    return (
        f"{number} may run out of memory even alone: by estimate up to "
        f"{_si(worst.step_memory_bytes)}B{f' ({which})' if which else ''}, a pack has {_si(memory)}B of "
        f"{'this machine' if plan.cost.device == 'cpu' else f'one {plan.cost.unit}'}"
    )


def _per_slot(plan: Plan) -> float:
    total = sum(shape.new_slot_s for shape in plan.shapes)
    return plan.cost.device_s / total if total else 0.0


def _counted(count: int, name: str) -> str:
    return f"{count:,} {name}{'' if count == 1 else 's'}"


def _span(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"


def _si(number: float) -> str:
    """`812`, `1.2 M`, `40 G`, with a trailing space where no letter follows the number."""
    for letter, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.2g} {letter}" if number < 99.5 * size else f"{number / size:.0f} {letter}"
    return f"{number:.0f} "


def _hours(seconds: float) -> str:
    """`45 s`, `12 min`, `3.4 h`, `1,200 h`."""
    if seconds < 3600:
        return duration(seconds)
    return f"{seconds / 3600:.1f} h" if seconds < 36_000 else f"{seconds / 3600:,.0f} h"


def _wall(seconds: float) -> str:
    """`45 s`, `2 h 5 min`, `3 d 4 h`, `1,200 d`."""
    return duration(seconds) if seconds < 30 * 86_400 else f"{seconds / 86_400:,.0f} d"


def _print_plain(title: str, parts: Sequence[str | _Table], out: IO[str]) -> None:
    print(title, file=out)
    for part in parts:
        print(file=out)
        if isinstance(part, str):
            print(part, file=out)
            continue
        lines = [part.headers, *part.rows, *([part.total] if part.total else [])]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            cells = [
                cell.ljust(width) if index < part.num_left else cell.rjust(width)
                for index, (cell, width) in enumerate(zip(line, widths, strict=True))
            ]
            print("  ".join(cells).rstrip(), file=out)


def _print_drawn(title: str, parts: Sequence[str | _Table], out: IO[str]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=out, highlight=False)
    console.print(Text(title, style="bold"))
    for part in parts:
        if isinstance(part, str):
            console.print(Text(part))
            continue
        table = Table(
            box=box.SIMPLE_HEAD,
            show_footer=part.total is not None,
            header_style="bold",
            footer_style="bold",
            collapse_padding=True,
            pad_edge=False,
        )
        for index, header in enumerate(part.headers):
            table.add_column(
                header,
                part.total[index] if part.total else "",
                justify="left" if index < part.num_left else "right",
                no_wrap=index != part.folded,
                overflow="fold" if index == part.folded else "ellipsis",
            )
        for row in part.rows:
            table.add_row(*map(Text, row))
        console.print(table)
