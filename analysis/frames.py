"""Results store → tidy frames: one row per trial of a sweep, then one row per point.

What is missing stays visible: a trial that did not finish keeps its row and its status, and a point knows how many seeds
it was asked for and how many it has numbers from.
"""

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

import pandas as pd

from sweeps.store import Store

ATTENTION = "model.attention"
SEED_AXES = ("seed", "seeds.split", "seeds.data", "seeds.init")  # trials of a point differ in these alone
SPLITS = ("valid", "ood", "test")  # evaluations; of the train split there is no final value, only running means

FINISHED = "finished"
NOT_STARTED = "not started"  # asked for, and no attempt is in the store
NO_EVALUATION = "without final evaluation"  # finished, but the store holds no evaluation at the last step
STATUSES = (FINISHED, "diverged", "failed", "interrupted", "running", NOT_STARTED)  # the order in which counts are given

CONFIG_COLUMNS = (
    ATTENTION,
    "task.name",
    "task.num_values",
    "task.num_features",
    "data.num_train",
    "data.num_steps",
    "optim.batch_size",
)
COUNT_COLUMNS = ("num_non_embedding_params", "train_flops")


class NothingToShow(Exception):
    """There is nothing to draw; the message is one line that says where and what to do."""


class SweepFrame(NamedTuple):
    """The trials of one sweep's latest request."""

    sweep: str
    request_id: str
    axes: tuple[str, ...]  # as written in the sweep file, in its order
    select_over: tuple[str, ...]
    trials: pd.DataFrame
    other_sweeps: tuple[str, ...]  # what else the store holds
    damaged: tuple[str, ...]  # parts of the store that could not be read, each with the reason

    @property
    def point_axes(self) -> list[str]:
        """Axes that tell points apart: all but the seeds."""
        return [axis for axis in self.axes if axis not in SEED_AXES]

    @property
    def cell_axes(self) -> list[str]:
        """Axes that tell cells apart: those of points but the hyperparameters that are chosen."""
        return [axis for axis in self.point_axes if axis not in self.select_over]

    def status_counts(self) -> dict[str, int]:
        """Trials by status, those that occur."""
        counts = self.trials["status"].value_counts()
        return {status: int(counts[status]) for status in STATUSES if status in counts}

    def metrics(self) -> list[str]:
        """What was measured at the end of training, as `<split>/<metric>`."""
        return [column for column in self.trials if column.split("/")[0] in SPLITS and "/" in column]
