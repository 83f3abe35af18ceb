"""Writes the page that documents every column of the store, from the schema itself and from the configs.

`conf.py` calls `write_page`; the page can't fall behind the code, since nobody writes it.
"""

from collections.abc import Iterable, Iterator
from inspect import getdoc, getsourcefile
from pathlib import Path
from typing import Any

import pyarrow as pa
from api_pages import field_comments

from sweeps.spec import SECTION_MODELS
from sweeps.store import schema

TITLES = {
    "trials": "One row per attempt at a trial.",
    "metrics": "One row per measurement.",
    "sweeps": "One row per trial that a request asked for.",
}
CONFIG_TYPES = {"integer": "int64", "number": "double", "boolean": "bool", "string": "string"}
"""What JSON schema calls a field's type, and what the store stores it as."""


def write_page(path: Path) -> None:
    """Writes the page, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(), encoding="utf-8")


def page() -> str:
    """The page, in Markdown."""
    lines = [
        "# Columns of the store",
        "",
        f"Schema version {schema.SCHEMA_VERSION}. This page is made from `sweeps/store/schema.py` and the configs of",
        "`hyla_core/config.py`. [The results store](../store.md) says which rows count.",
        "",
        "Each Parquet file names its table and the schema version in the key-value metadata of its footer, as",
        "`hyla.table` and `hyla.schema_version`; compacted ones also say what each declared column means, as JSON in",
        "`hyla.columns`. A column that a file lacks, and a value that is absent, are null. Integers and floats of a",
        "column that has both are read as floats.",
        "",
    ]
    for table, columns in schema.TABLES.items():
        lines += [f"## {table}", "", f"{TITLES[table]} Unique key: {listed(schema.KEYS[table])}.", ""]
        rows = [(f"`{c.name}`", type_name(c.type), c.unit, c.meaning) for c in columns]
        lines += [*markdown_table(("column", "type", "unit", "meaning"), rows), ""]
        if table == "trials":
            lines += [
                "### Config fields",
                "",
                "They follow the columns above, in the same table: one column per field of the trial's config. A file",
                "has the fields of its own task only.",
                "",
                *markdown_table(("column", "type", "of", "meaning"), config_rows()),
                "",
            ]
    return "\n".join([*lines, *version_lines()])


def version_lines() -> list[str]:
    """What a version of the schema means to a reader, and what has changed since the first."""
    lines = [
        "## Versions",
        "",
        "The version is raised when a column is added or changes its meaning or type. Files of older versions are",
        "migrated as they are read and stay as they are. A file of a newer version than the code knows is refused, by",
        "name: update the code.",
        "",
    ]
    changes = [
        f"- From {version} to {version + 1}: {summary_of(migrate)}"
        for version, migrate in sorted(schema.MIGRATIONS.items())
    ]
    return [*lines, *changes, ""]


def summary_of(function: Any) -> str:
    """The first paragraph of a docstring, in one line."""
    return " ".join((getdoc(function) or "").partition("\n\n")[0].split())


def config_rows() -> Iterator[tuple[str, str, str, str]]:
    """Column, type, class and meaning of every config field. Tasks share names, so a column may have several rows."""
    for section, models in SECTION_MODELS.items():
        for model in models:
            comments = field_comments(getsourcefile(model) or "")
            properties = model.model_json_schema()["properties"]
            for name in model.model_fields:
                meaning = comments[model.__name__].get(name, "")
                choices = literal_values(properties[name])
                if choices:
                    meaning += f"{': ' if meaning else ''}{', '.join(f'`{value}`' for value in choices)}"
                yield f"`{section}.{name}`", config_type(properties[name]), f"`{model.__name__}`", meaning


def config_type(field: dict[str, Any]) -> str:
    """The column type of a field, from its JSON schema; ` or null` where it may be absent."""
    kinds = [CONFIG_TYPES[kind["type"]] for kind in field.get("anyOf", [field]) if kind["type"] != "null"]
    nullable = len(field.get("anyOf", [])) > len(kinds)
    return f"{'double' if 'double' in kinds else kinds[0]}{' or null' if nullable else ''}"


def literal_values(field: dict[str, Any]) -> list[Any]:
    """The values that a field may have, where they are listed."""
    return list(field.get("enum", [field["const"]] if "const" in field else []))


def type_name(kind: pa.DataType) -> str:
    """An Arrow type as people write it."""
    if pa.types.is_list(kind):
        return f"list of {type_name(kind.value_type)}"
    return "timestamp, µs, UTC" if pa.types.is_timestamp(kind) else str(kind)


def markdown_table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Lines of a table; bars within cells are escaped."""
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in lines]


def listed(names: Iterable[str]) -> str:
    """Names as code, with commas."""
    return ", ".join(f"`{name}`" for name in names)
