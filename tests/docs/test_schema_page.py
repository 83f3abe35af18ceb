"""The page that is made from the schema: nothing that the store holds is missing from it."""

from pathlib import Path

import pyarrow as pa
import pytest

from hyla_core.config import TrainConfig
from sweeps.store import KEYS, SCHEMA_VERSION, TABLES
from sweeps.store.schema import MIGRATIONS

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def schema_page(docs_module):
    return docs_module("schema_page")


def tables(page: str) -> dict[str, list[list[str]]]:
    """Rows of the table below each heading, without header and rule."""
    found: dict[str, list[list[str]]] = {}
    heading = ""
    for line in page.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif line.startswith("|"):
            cells = line.replace(r"\|", "\0").strip("|").split("|")
            found.setdefault(heading, []).append([cell.strip().replace("\0", "|") for cell in cells])
    return {name: rows[2:] for name, rows in found.items()}


def test_every_declared_column_is_there_with_what_it_means(schema_page):
    page = schema_page.page()
    found = tables(page)
    for table, columns in TABLES.items():
        assert [row[0] for row in found[table]] == [f"`{column.name}`" for column in columns]
        assert [row[2:] for row in found[table]] == [[column.unit, column.meaning] for column in columns]
        assert all(column.meaning for column in columns)
        key = ", ".join(f"`{name}`" for name in KEYS[table])
        assert f"Unique key: {key}." in page
    assert f"Schema version {SCHEMA_VERSION}." in page
    assert [row[1] for row in found["metrics"]] == ["string", "int32", "int64", "string", "string", "double"]


def test_every_config_field_is_there_with_the_type_that_the_store_gives_it(schema_page):
    rows = tables(schema_page.page())["Config fields"]
    config = TrainConfig.model_validate(
        {
            "task": {"name": "sraven"},
            "data": {"num_train": 8, "num_steps": 2, "num_valid": 8, "num_ood": 8},
            "model": {
                "attention": "hyla", "emb_dim": 4, "num_heads": 1, "num_layers": 1, "qk_dim": 4, "v_dim": 4,
                "mlp_dim": 4, "max_distance": 4,
            },
            "optim": {"name": "adamw", "batch_size": 4, "peak_lr": 1e-3, "weight_decay": 0.1, "warmup_steps": 0},
            "seeds": {"split": 0, "data": 0, "init": 0},
        }
    )  # fmt: skip
    types = {(row[0], row[2]): row[1] for row in rows}
    sections = {section: type(getattr(config, section)).__name__ for section in TrainConfig.model_fields}
    kinds = {bool: "bool", int: "int64", float: "double", str: "string"}
    for name, value in config.flat().items():
        shown = types[f"`{name}`", f"`{sections[name.partition('.')[0]]}`"]
        assert shown == kinds.get(type(value), shown), name
    assert types["`optim.grad_clip_norm`", "`OptimConfig`"] == "double or null"
    meanings = {row[0]: row[3] for row in rows}
    assert meanings["`model.qk_dim`"] == "total over heads"
    assert meanings["`optim.name`"] == "`adamw`"
    assert meanings["`numerics.matmul_precision`"] == "`default`, `high`, `highest`"
    assert {"`task.num_terms`", "`task.seq_len`"} <= set(meanings)


def test_every_migration_says_what_it_does(schema_page):
    page = schema_page.page()
    assert set(MIGRATIONS) == set(range(1, SCHEMA_VERSION))
    for version, migrate in MIGRATIONS.items():
        summary = schema_page.summary_of(migrate)
        assert len(summary) > 20
        assert f"- From {version} to {version + 1}: {summary}\n" in page


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (pa.list_(pa.string()), "list of string"),
        (pa.timestamp("us", tz="UTC"), "timestamp, µs, UTC"),
        (pa.float64(), "double"),
    ],
)
def test_types_have_names(schema_page, kind, name):
    assert schema_page.type_name(kind) == name


def test_bars_do_not_end_a_cell(schema_page):
    assert schema_page.markdown_table(["a"], [["x | y"]])[-1] == r"| x \| y |"


def test_the_page_is_written_where_it_is_asked_for(schema_page, tmp_path):
    schema_page.write_page(tmp_path / "new" / "schema.md")
    assert (tmp_path / "new" / "schema.md").read_text(encoding="utf-8") == schema_page.page()
