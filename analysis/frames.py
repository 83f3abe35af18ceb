"""Results store → tidy frames: one row per trial of a sweep's latest request, then one row per point.

What is missing stays visible: a trial that did not finish keeps its row and its status, and a point knows how many
seeds it was asked for and how many it has numbers from. A diverged trial is a result but not a number: it is counted,
and the point it belongs to lacks that seed.
"""

import json
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from sweeps.store import Store

ATTENTION = "model.attention"
SEED_AXES = ("seed", "seeds.split", "seeds.data", "seeds.init")  # trials of a point differ in these alone
SPLITS = ("valid", "ood", "test")  # of the train split there are running means only, no final value

FINISHED = "finished"
PENDING = "pending"  # asked for and never begun
NOT_EVALUATED = "finished without evaluation"  # a part of the metrics table is lost, say
STATUSES = (FINISHED, NOT_EVALUATED, "diverged", "failed", "interrupted", "running", PENDING)  # as they are counted

CONFIG_COLUMNS = (
    ATTENTION,
    "task.name",
    "task.num_values",
    "task.num_features",
    "data.num_train",
    "optim.batch_size",
)
FACT_COLUMNS = ("step", "num_steps", "num_non_embedding_params", "train_flops", "examples_seen", "error")


class NothingToShow(Exception):
    """There is nothing to draw; the message is one line that says where and what to do."""


class SweepFrame(NamedTuple):
    """The trials of one sweep's latest request."""

    sweep: str  # its name, with ` (tiny)` where the tiny form was asked for
    request_id: str
    requested_at: pd.Timestamp
    axes: tuple[str, ...]  # as the sweep file has them, in its order
    select_over: tuple[str, ...]
    trials: pd.DataFrame
    other_sweeps: tuple[str, ...]  # what else the store holds, newest request first
    damaged: tuple[str, ...]  # parts of the store that could not be read, each with the reason

    @property
    def point_axes(self) -> list[str]:
        """Axes that tell points apart: all but the seeds."""
        return [axis for axis in self.axes if axis not in SEED_AXES]

    @property
    def cell_axes(self) -> list[str]:
        """Axes that tell cells apart: those of points without the hyperparameters that are chosen."""
        return [axis for axis in self.point_axes if axis not in self.select_over]

    @property
    def measured(self) -> list[str]:
        """What was measured at the end of training, as `<split>/<metric>`."""
        return [name for name in map(str, self.trials.columns) if name.partition("/")[0] in SPLITS and "/" in name]

    def status_counts(self) -> dict[str, int]:
        """Trials by status, those that occur."""
        counts = self.trials["status"].value_counts()
        return {status: int(counts[status]) for status in STATUSES if status in counts}


def load_sweep(store: Store, sweep: str | None = None) -> SweepFrame:
    """One row per trial of the sweep's latest request.

    Columns of `trials`: `trial_id`, the axes under their dotted names with values as the sweep file has them, `status`,
    `CONFIG_COLUMNS`, `FACT_COLUMNS`, and the evaluation after the last step as `<split>/<metric>`, NaN where a trial is
    not finished.

    Args:
      store: the results store.
      sweep: name of the sweep, `NAME (tiny)` for a tiny form; the one that was requested last where none is given.

    Raises:
      NothingToShow: the store holds no sweep, not this one, or no finished trial of it.
    """
    requests = store.sweeps()
    damaged = _damaged(store)
    if requests.empty:
        raise NothingToShow(
            f"{store.shown}: the store holds no sweep yet; train one with `python -m sweeps run SWEEP.yaml "
            f"--results {store.shown}`{_damage_hint(damaged)}"
        )
    requests["name"] = requests["sweep"] + np.where(requests["tiny"], " (tiny)", "")
    newest_first = requests.sort_values("requested_at", ascending=False, kind="stable")["name"].unique().tolist()
    name = _choose(newest_first, sweep, store)
    rows = requests[requests["name"] == name].reset_index(drop=True)

    axes = pd.DataFrame([_axis_values(text) for text in rows["axes"]], dtype=object)
    trials = pd.concat([rows[["trial_id"]], axes], axis=1)
    known = store.trials()
    known = known[known["trial_id"].isin(trials["trial_id"])]
    damaged += _damaged(store)
    keep = [column for column in (*CONFIG_COLUMNS, *FACT_COLUMNS) if column not in axes]
    trials = trials.merge(known.reindex(columns=["trial_id", "status", *keep]), on="trial_id", how="left")
    trials["status"] = trials["status"].fillna(PENDING)
    trials["examples_seen"] = trials["examples_seen"].fillna(trials["step"] * trials["optim.batch_size"].astype(float))
    if ATTENTION not in axes:  # trials that never began have no config yet, and theirs is that of the others
        trials[ATTENTION] = trials[ATTENTION].ffill().bfill()

    final = store.final_metrics(splits=SPLITS)
    damaged += _damaged(store)
    finished = trials.loc[trials["status"] == FINISHED, ["trial_id", "num_steps"]]
    final = final.merge(finished, on="trial_id")
    final = final[final["step"] == final["num_steps"]]
    wide = final.assign(name=final["split"] + "/" + final["metric"]).pivot(
        index="trial_id", columns="name", values="value"
    )
    trials = trials.merge(wide, on="trial_id", how="left")
    not_evaluated = (trials["status"] == FINISHED) & ~trials["trial_id"].isin(wide.index)
    trials.loc[not_evaluated, "status"] = NOT_EVALUATED

    if not (trials["status"] == FINISHED).any():
        frame = SweepFrame(name, "", rows["requested_at"].iloc[0], (), (), trials, (), ())
        counts = ", ".join(f"{count} {status}" for status, count in frame.status_counts().items())
        raise NothingToShow(
            f"{store.shown}: sweep {name} has no finished trial yet ({counts}); run it again with "
            f"`python -m sweeps run SWEEP.yaml --results {store.shown}`{_damage_hint(damaged)}"
        )
    select_over = rows["select_over"].iloc[0]
    return SweepFrame(
        sweep=name,
        request_id=rows["request_id"].iloc[0],
        requested_at=rows["requested_at"].iloc[0],
        axes=tuple(axes.columns),
        select_over=tuple(select_over) if select_over is not None else (),
        trials=trials,
        other_sweeps=tuple(other for other in newest_first if other != name),
        damaged=tuple(dict.fromkeys(damaged)),
    )


def points_of(frame: SweepFrame, value: str) -> pd.DataFrame:
    """One row per point, in the order of the sweep's axes.

    Args:
      frame: the sweep.
      value: the metric to show, `<split>/<metric>`. Seeds that lack it count as missing.

    Returns:
      The axes without the seeds; `CONFIG_COLUMNS` and counts; every measured metric's mean over the seeds that have
      `value`; of `value` itself `mean`, `low` and `high` (its range), `std` (n − 1; NaN for one seed), `seed_values`;
      `num_seeds`, `num_seeds_asked`, `missing` (why the others are), `trial_ids` of the seeds that count.
    """
    facts = [name for name in (*CONFIG_COLUMNS, "num_non_embedding_params", "train_flops") if name not in frame.axes]
    rows = []
    for _, trials in _groups(frame.trials, frame.point_axes):
        counted = trials[trials[value].notna()]  # finished ones: no other has a final value
        values = counted[value].to_numpy(dtype=float)
        rest = trials.drop(counted.index)["status"].replace(FINISHED, NOT_EVALUATED).value_counts()
        rows.append(
            {
                **{name: trials[name].iloc[0] for name in frame.point_axes},
                **{name: _first(trials[name]) for name in facts},
                **{name: counted[name].mean() for name in frame.measured},
                "mean": values.mean() if len(values) else np.nan,
                "low": values.min() if len(values) else np.nan,
                "high": values.max() if len(values) else np.nan,
                "std": values.std(ddof=1) if len(values) > 1 else np.nan,
                "seed_values": tuple(values.tolist()),
                "num_seeds": len(counted),
                "num_seeds_asked": len(trials),
                "missing": ", ".join(f"{rest[status]} {status}" for status in STATUSES if status in rest),
                "trial_ids": tuple(counted["trial_id"]),
            }
        )
    return pd.DataFrame(rows)


def _groups(frame: pd.DataFrame, by: list[str]) -> list[tuple[Any, pd.DataFrame]]:
    return list(frame.groupby(by, sort=False, dropna=False)) if by else [((), frame)]


def _first(column: pd.Series) -> Any:
    known = column.dropna()
    return known.iloc[0] if len(known) else np.nan


def _axis_values(text: str) -> dict[str, Any]:
    """Axis values of one trial; lists and mappings, which can't be grouped by, as their JSON."""
    return {
        axis: json.dumps(value, sort_keys=True) if isinstance(value, list | dict) else value
        for axis, value in json.loads(text).items()
    }


def _choose(names: list[str], wanted: str | None, store: Store) -> str:
    if wanted is None:
        return names[0]
    for name in (wanted, f"{wanted} (tiny)"):
        if name in names:
            return name
    raise NothingToShow(f"{store.shown}: no sweep is called {wanted!r}; choose one of {names}")


def _damaged(store: Store) -> list[str]:
    return [f"{path}: {reason}" for path, reason in store.damaged]


def _damage_hint(damaged: list[str]) -> str:
    return f"; {len(damaged)} damaged part(s) passed over, the first {damaged[0]}" if damaged else ""
