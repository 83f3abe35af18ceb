"""The pages that `make docs` writes, and the docstrings that they show."""

import ast
import importlib.util
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("api_pages", ROOT / "docs" / "api_pages.py")
assert _spec is not None
assert _spec.loader is not None
api_pages = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(api_pages)

FILES = [
    path
    for package in ("hyla_core", "sweeps", "analysis")
    for path in sorted((ROOT / package).rglob("*.py"))
    if not path.name.startswith("_")
]


def test_every_public_module_has_a_page(tmp_path):
    api_pages.write_pages(ROOT, tmp_path)
    pages = {path.stem for path in tmp_path.glob("*.rst")}
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in FILES}
    assert len(modules) > 30
    assert pages >= modules | {"index", "hyla_core", "hyla_core.tasks"}
    index = (tmp_path / "index.rst").read_text().split()
    assert [name for name in sorted(modules) if name not in index] == []


def test_pages_of_modules_that_are_gone_are_removed(tmp_path):
    (tmp_path / "gone.rst").touch()
    api_pages.write_pages(ROOT, tmp_path)
    assert not (tmp_path / "gone.rst").exists()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_everything_public_has_a_docstring(path):
    def public(node: ast.AST, within: str):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef) and not child.name.startswith("_"):
                yield f"{within}{child.name}", child
                if isinstance(child, ast.ClassDef):
                    yield from public(child, f"{within}{child.name}.")

    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree)
    found = list(public(tree, ""))
    # A method of a protocol is described there, not once more by whatever implements it.
    described = {node.name for _, node in found if ast.get_docstring(node)}
    assert [name for name, node in found if node.name not in described] == []


def test_plain_text_becomes_restructured_text():
    plain = """\
        Adds a | b [*, dim], worded to follow `field=value `.

        Both count:
          - one: in `a | b`
            and more;
          two.
        After.

            a diagram | as it is

        Args:
          a: kept,
            as napoleon reads it.
        """
    expected = """\
        Adds a \\| b [\\*, dim], worded to follow `field=value`.

        Both count:

        - one: in `a | b`
          and more;
        - two.

        After.

        .. code-block:: text

            a diagram | as it is

        Args:
          a: kept,
            as napoleon reads it.
        """
    lines = textwrap.dedent(plain).splitlines()
    assert api_pages.plain_to_rest(lines) == textwrap.dedent(expected).splitlines()


def test_fields_are_documented_by_the_comments_behind_them(tmp_path):
    (tmp_path / "records.py").write_text(
        "class Pair(NamedTuple):\n"
        "    first: int  # the one before\n"
        "    second: float = 0.5\n"
        "    _hidden: int = 1  # not shown\n"
    )
    assert api_pages.class_fields(str(tmp_path / "records.py")) == {
        "Pair": ["  first (int): The one before.", "  second (float):  Default: ``0.5``."]
    }
