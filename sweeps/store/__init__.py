"""The results store: the one reader and writer of trials, metrics, sweeps, claims and checkpoints.

    store = Store.create("results")
    writer = store.begin(config.trial_id, config.flat(), {"run_id": "r1"}, start_step=0, num_steps=1000, counts={})
    writer.add([(1000, "valid", "loss", 0.25)]); writer.seal("finished")
    Store.open("results").final_metrics()  # a DataFrame: trial_id, attempt, step, split, metric, value

A store is a folder, or a prefix of a bucket (`s3://bucket/prefix`, `gs://bucket/prefix`):

    trials/<trial_id>-<attempt>.parquet     one row per attempt
    metrics/<trial_id>-<attempt>.parquet    one row per (step, split, metric)
    sweeps/<request_id>.parquet             one row per trial that a request asked for
    <table>/compact-<time>-<hex>.parquet    the rows of many such files, whose names it lists
    claims/<trial_id>-<attempt>.json        who works on what; the one mutable folder
    checkpoints/<trial_id>/<step>.ckpt      the last two; removed when the trial is finished
    diffs/<hash>.diff                       how the code of a run differed from its commit
    damaged/<table>/                        what `repair` has set aside; nothing reads it

Every file appears whole or not at all: it is written under a name that starts with a dot, flushed to the disk and
renamed; in a bucket it is one object. An attempt begins as a claim. While it runs it owns one live part per table,
replaced whole; a part whose attempt has ended is sealed and never changes again. A part that can't be read is passed
over and named in `Store.damaged`.

Which rows count (the clean view): of a trial's attempts a finished or diverged one wins, else the latest; of the
attempts before it only the rows up to the `start_step` of every later one count. Attempts are ordered by number, never
by the clock.

Imports pyarrow, pandas and the standard library only, so that reading results needs neither jax nor ray.
"""

from sweeps.store.attempts import AttemptWriter, Ending, seal_all
from sweeps.store.claims import Claim
from sweeps.store.compaction import Compaction, compact
from sweeps.store.compare import equal_tables
from sweeps.store.places import is_url
from sweeps.store.repairs import Repair, repair
from sweeps.store.schema import (
    FINAL,
    KEYS,
    METRICS,
    SCHEMA_VERSION,
    STATUSES,
    SWEEPS,
    TABLES,
    TRIALS,
    Column,
    StoreError,
    is_config_column,
)
from sweeps.store.store import Beginning, RequestedTrial, Store, SweepSummary, TrialState, latest_requests

__all__ = [
    "FINAL",
    "KEYS",
    "METRICS",
    "SCHEMA_VERSION",
    "STATUSES",
    "SWEEPS",
    "TABLES",
    "TRIALS",
    "AttemptWriter",
    "Beginning",
    "Claim",
    "Column",
    "Compaction",
    "Ending",
    "Repair",
    "RequestedTrial",
    "Store",
    "StoreError",
    "SweepSummary",
    "TrialState",
    "compact",
    "equal_tables",
    "is_config_column",
    "is_url",
    "latest_requests",
    "repair",
    "seal_all",
]
