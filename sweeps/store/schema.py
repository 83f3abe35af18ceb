"""The schema of the store: every declared column of its three tables, and what makes a row unique.

The fields of a trial's config follow the declared columns of the trials table, under dotted names such as
`model.emb_dim` and with their values' type. A part written by an older version is migrated when it is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

import pyarrow as pa

SCHEMA_VERSION = 2
"""Raised when columns come or go, or one changes its meaning or type; `MIGRATIONS` then gets a row more.

A part written by a newer version is refused by name.
"""

FINAL = ("finished", "diverged")
"""Statuses that are results."""

STATUSES = (*FINAL, "failed", "interrupted")
"""What an attempt can end as."""

EXIT_REASONS = ("completed", "diverged", "error", "out of memory", "disk full", "stopped")
"""Why an attempt can end."""

OUT_OF_MEMORY, DISK_FULL = "out of memory", "the disk is full"
"""How the line of an error begins that another machine, or the same one later, may not have."""


class StoreError(Exception):
    """What the user can mend, in one line. An `OSError` such as a full disk is its `__cause__`."""


class Column(NamedTuple):
    """One declared column."""

    name: str
    type: pa.DataType
    unit: str  # "" for what has none
    meaning: str


STRING, INT, FLOAT, BOOL = pa.string(), pa.int64(), pa.float64(), pa.bool_()
TIME = pa.timestamp("us", tz="UTC")

TRIALS = (
    Column("trial_id", STRING, "", "identity: a hash of the config fields that change the result"),
    Column("attempt", pa.int32(), "", "1, 2, … of this trial"),
    Column("status", STRING, "", "finished, diverged, failed or interrupted; null while the attempt runs"),
    Column(
        "exit_reason",
        STRING,
        "",
        f"why it ended: {', '.join(EXIT_REASONS[:-1])} or {EXIT_REASONS[-1]}; null while it runs or if it was killed",
    ),
    Column("error", STRING, "", "what went wrong, in one line"),
    Column("error_detail", STRING, "", "the traceback"),
    Column("start_step", INT, "steps", "where the attempt took over: 0, or the step of the checkpoint it restored"),
    Column("step", INT, "steps", "steps done when the row was written"),
    Column("num_steps", INT, "steps", "steps the trial trains in all"),
    Column("num_logs", INT, "times", "how often train rows are due, evenly over those steps"),
    Column("num_evals", INT, "times", "how often evaluations are due, evenly over those steps"),
    Column("started_at", TIME, "UTC", "when the attempt began"),
    Column("ended_at", TIME, "UTC", "when it was sealed"),
    Column("train_s", FLOAT, "s", "wall time of training and evaluation, compilation aside"),
    Column("compile_s", FLOAT, "s", "wall time of compilation"),
    Column("device_s", FLOAT, "s", "device time that is this trial's share of its pack"),
    Column("run_id", STRING, "", "the run command that made the attempt"),
    Column("pack_id", STRING, "", "the pack it trained in"),
    Column("pack_size", INT, "trials", "members of that pack"),
    Column("host", STRING, "", "name of the machine"),
    Column("pid", INT, "", "process on that machine"),
    Column("user", STRING, "", "account that ran it"),
    Column("git_commit", STRING, "", "commit of the code"),
    Column("git_dirty", BOOL, "", "whether the working tree differed from that commit"),
    Column("git_diff", STRING, "", "file in the store's folder diffs/ that says how it differed; `git apply` takes it"),
    Column("code_hash", STRING, "", "hash of the source files that ran"),
    Column("version.hyla", STRING, "", "version of this package"),
    Column("version.python", STRING, "", "version of Python"),
    Column("version.jax", STRING, "", "version of jax"),
    Column("version.jaxlib", STRING, "", "version of jaxlib"),
    Column("version.flax", STRING, "", "version of flax"),
    Column("version.optax", STRING, "", "version of optax"),
    Column("version.ray", STRING, "", "version of ray"),
    Column("version.numpy", STRING, "", "version of numpy"),
    Column("device_kind", STRING, "", "what jax calls the device"),
    Column("num_devices", INT, "devices", "devices the pack trained on"),
    Column("platform_version", STRING, "", "what jax says of what drives the device: CUDA, driver, libtpu"),
    Column("cpu_model", STRING, "", "what the host's processor calls itself"),
    Column("xla_flags", STRING, "", "XLA_FLAGS of the process"),
    Column("num_params", INT, "parameters", "all trained numbers"),
    Column("num_non_embedding_params", INT, "parameters", "those outside embedding tables and output layer"),
    Column("train_flops_per_example", FLOAT, "FLOP", "forward and backward pass of one example"),
    Column("train_flops", FLOAT, "FLOP", "the whole training"),
    Column("num_metric_rows", INT, "rows", "rows of the metrics table that the attempt had written by then"),
    Column("examples_seen", INT, "examples", "training examples up to `step`, repeats included"),
    Column("peak_mem_bytes", INT, "bytes", "most device memory in use at once, of the whole pack"),
)
"""The trials table: one row per attempt. The config's fields follow, under dotted names and with their values' type."""

METRICS = (
    Column("trial_id", STRING, "", "the trial"),
    Column("attempt", pa.int32(), "", "the attempt that measured it"),
    Column("step", INT, "steps", "steps done; a train row is the mean over the steps since the row before"),
    Column("split", STRING, "", "train, valid, test or ood"),
    Column("metric", STRING, "", "loss (nats), accuracy, accuracy_per_feature, …"),
    Column("value", FLOAT, "", "the measurement; NaN and infinities are values"),
)
"""The metrics table: one row per (trial_id, attempt, step, split, metric)."""

SWEEPS = (
    Column("sweep", STRING, "", "name in the sweep file"),
    Column("request_id", STRING, "", "one run command's request for the sweep"),
    Column("requested_at", TIME, "UTC", "when"),
    Column("file", STRING, "", "the sweep file, as given"),
    Column("tiny", BOOL, "", "whether the file's tiny form was asked for"),
    Column("overrides", pa.list_(pa.string()), "", "settings changed by `--set`, in order"),
    Column("trial_id", STRING, "", "a trial that was asked for"),
    Column("point", STRING, "", "shared by the trials that differ only in seed"),
    Column("axes", STRING, "", "JSON: dotted name → value as the file has it"),
    Column("select_over", pa.list_(pa.string()), "", "axes over which hyperparameters are chosen"),
)
"""The sweeps table: one row per trial that a request asked for."""

TABLES = {"trials": TRIALS, "metrics": METRICS, "sweeps": SWEEPS}

KEYS = {
    "trials": ("trial_id", "attempt"),
    "metrics": ("trial_id", "attempt", "step", "split", "metric"),
    "sweeps": ("request_id", "trial_id"),
}
"""What tells a table's rows apart."""

DECLARED = {table: {column.name: column.type for column in columns} for table, columns in TABLES.items()}
"""Table → column → type."""

REQUIRED = {
    "trials": ("trial_id", "attempt", "status", "start_step"),
    "metrics": tuple(DECLARED["metrics"]),
    "sweeps": ("sweep", "request_id", "requested_at", "tiny", "trial_id"),
}
"""Columns without which a part is none of its table."""

OWNED = (
    *("trial_id", "attempt", "status", "error", "error_detail", "num_steps"),
    *("started_at", "ended_at", "num_metric_rows"),
)
"""Columns of the trials table that the store writes itself: neither provenance nor counts nor facts may set them."""

COUNTS = ("num_params", "num_non_embedding_params", "train_flops_per_example", "train_flops", "examples_seen")
"""Columns of the trials table that are equal wherever a trial was trained."""


def is_config_column(name: str) -> bool:
    """Whether a column of the trials table is a field of the config, such as `model.emb_dim`."""
    return name not in DECLARED["trials"]


def config_type(name: str, value: object) -> pa.DataType:
    """The column type of a config field's value.

    Raises:
      ValueError: it has a type that no field of a config can have.
    """
    if value is None:
        return pa.null()
    for kind, arrow_type in ((bool, BOOL), (int, INT), (float, FLOAT), (str, STRING)):
        if isinstance(value, kind):  # bool first: it is an int, too
            return arrow_type
    raise ValueError(
        f"config field {name}={value!r} is a {type(value).__name__}; allowed are bool, int, float, str, None"
    )


def columns_json(table: str) -> str:
    """What a table's columns mean, as compacted files carry it: JSON, name → type, unit and meaning."""
    columns = {
        column.name: {"type": str(column.type), "unit": column.unit, "meaning": column.meaning}
        for column in TABLES[table]
    }
    return json.dumps(columns, ensure_ascii=False)


def exit_reason(status: str | None, error: str | None) -> str | None:
    """Why an attempt ended, as far as its status and the line of its error tell; None while it runs."""
    if status is None or status in FINAL:
        return {None: None, "finished": "completed", "diverged": "diverged"}[status]
    for beginning, reason in ((OUT_OF_MEMORY, "out of memory"), (DISK_FULL, "disk full")):
        if error is not None and error.startswith(beginning):
            return reason
    return "stopped" if status == "interrupted" and error is None else "error"


# ---------------------------------------------------------------------------------------------------------- migrations


def _from_1(table: str, rows: pa.Table) -> pa.Table:
    """Version 2 added columns to the trials table; why an attempt ended can be told from what there was."""
    if table != "trials":
        return rows
    pairs = zip(rows["status"].to_pylist(), rows["error"].to_pylist(), strict=True)
    return rows.append_column("exit_reason", pa.array([exit_reason(*pair) for pair in pairs], STRING))


MIGRATIONS: dict[int, Callable[[str, pa.Table], pa.Table]] = {1: _from_1}
"""Version → what makes rows of the next one out of its rows, given the table's name."""

MIGRATED_FROM = {"trials": ("status", "error"), "metrics": (), "sweeps": ()}
"""Table → columns that migrations look at: an old part is read with these, whatever is wanted of it."""
