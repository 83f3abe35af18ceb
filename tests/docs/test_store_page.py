"""Runs the code of docs/store.md: all of them must give the numbers that are worked out here."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sweeps.store import Store, compact

duckdb = pytest.importorskip("duckdb")
pytest.importorskip("polars")

PAGE = Path(__file__).parents[2] / "docs" / "store.md"
SECTION = re.compile(r"^### (\w+)\n(.*?)(?=^##)", re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"^```(python|sql)\n(.*?)^```$", re.DOTALL | re.MULTILINE)

TRIAL = "c0ffee000001"
ACCURACY = [(1, "hyla", 0.625, 2), (1, "softmax", 0.5, 1), (2, "hyla", 0.75, 1)]
FAILURES = [
    ("c0ffee000004", "failed", "ValueError: no luck"),
    ("c0ffee000005", "diverged", "loss is nan at step 10"),
]
CURVE = [(10, 3.0), (20, 2.0), (30, 1.25), (40, 1.0)]
"""Attempt 1 measured steps 10, 20 and 30 and attempt 2 went on from 20; attempt 3 came after the result."""


class Trial(NamedTuple):
    """What `record_sweep` asks of a trial."""

    trial_id: str
    point: str
    axes: dict[str, Any]


def begin(store: Store, trial_id: str, start_step: int = 0, **config: Any):
    writer = store.begin(trial_id, {"model.emb_dim": 16, **config}, {}, start_step, 40, {})
    assert writer is not None
    return writer


def finish(store: Store, trial_id: str, accuracy: float, **config: Any) -> None:
    writer = begin(store, trial_id, **config)
    writer.add([(40, "train", "loss", 1.0), (20, "ood", "accuracy", 0.1), (40, "ood", "accuracy", accuracy)])
    writer.seal("finished")


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A store `results` with all that makes a raw reader count wrong, and the folder it is in as working directory."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    monkeypatch.chdir(tmp_path)
    store = Store.create("results")
    trials = [
        Trial(f"c0ffee{number:06}", str(number), {"model.width": width, "model.attention": attention, "seed": number})
        for number, (width, attention) in enumerate(
            [(1, "hyla"), (1, "hyla"), (1, "softmax"), (2, "softmax"), (2, "hyla"), (2, "hyla"), (2, "hyla")], start=1
        )
    ]
    wrong = [Trial(trial.trial_id, "old", {**trial.axes, "model.width": 9}) for trial in trials]
    store.record_sweep("width-study", wrong, file="a.yaml", tiny=False)
    store.record_sweep("width-study", trials, file="a.yaml", tiny=False)
    store.record_sweep("other-study", wrong, file="b.yaml", tiny=False)

    writer = begin(store, TRIAL)
    writer.add([(10, "train", "loss", 3.0), (20, "train", "loss", 2.0), (30, "train", "loss", 99.0)])
    writer.seal("interrupted")
    writer = begin(store, TRIAL, start_step=20)
    writer.add([(30, "train", "loss", 1.25), (40, "train", "loss", 1.0), (40, "ood", "accuracy", 0.75)])
    writer.seal("finished")
    writer = begin(store, TRIAL)
    writer.add([(40, "ood", "accuracy", 0.0), (40, "train", "loss", 98.0)])
    writer.seal("failed", "out of memory")
    finish(store, "c0ffee000002", 0.5, **{"optim.grad_clip_norm": None})
    finish(store, "c0ffee000003", 0.5, **{"optim.grad_clip_norm": 1.0})
    begin(store, "c0ffee000004").seal("failed", ValueError("no luck\nat all"))
    writer = begin(store, "c0ffee000005")
    writer.add([(10, "train", "loss", float("nan")), (10, "ood", "accuracy", 0.0)])
    writer.seal("diverged", "loss is nan at step 10")
    finish(store, "c0ffee000006", 0.75, **{"task.num_features": 2})
    compact(store)  # without deleting: each row stands in two files
    running = begin(store, "c0ffee000007")
    running.add([(40, "ood", "accuracy", 0.0)])
    running.flush()
    yield store
    running.seal("interrupted")


def sections() -> dict[str, list[tuple[str, str]]]:
    """Language and code of each block, by the heading they stand under."""
    return {name: BLOCK.findall(text) for name, text in SECTION.findall(PAGE.read_text() + "\n##")}


def rows(answer: Any) -> list[tuple[Any, ...]]:
    """The rows of a pandas or polars frame, or of a list."""
    if hasattr(answer, "itertuples"):
        return list(answer.itertuples(index=False, name=None))
    return list(answer.rows() if hasattr(answer, "rows") else answer)


def test_the_store_holds_each_row_twice(results):
    """What the examples have to cope with."""
    for table in ("trials", "metrics"):
        files = [path.name for path in (results.path / table).glob("*.parquet")]
        assert sum(name.startswith("compact-") for name in files) == 1
        assert f"{TRIAL}-2.parquet" in files


@pytest.mark.parametrize("tool", ["pandas", "polars", "duckdb"])
def test_python_answers_the_three_questions(tool, results):
    blocks = [code for language, code in sections()[tool] if language == "python"]
    assert len(blocks) == 4
    names: dict[str, Any] = {}
    for code in blocks:
        exec(compile(code, f"{PAGE.name}, {tool}", "exec"), names)
    assert rows(names["accuracy"]) == ACCURACY
    assert rows(names["failures"]) == FAILURES
    assert rows(names["curve"]) == CURVE


def test_sql_answers_the_three_questions(results):
    [(language, code)] = sections()["SQL"]
    assert language == "sql"
    answers = []
    with duckdb.connect() as connection:
        for statement in duckdb.extract_statements(code):
            result = connection.execute(statement)
            if statement.type == duckdb.StatementType.SELECT:
                answers.append(result.fetchall())
    assert answers == [ACCURACY, FAILURES, CURVE]
