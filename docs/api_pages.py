"""Writes one API page for each public module, and turns our docstrings into reStructuredText.

Pages follow from the package tree, so that no module can be without one. Imports the standard library only;
`api_autodoc.py` connects this to Sphinx.
"""

import ast
import io
import shutil
import tokenize
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

PACKAGES = ("hyla_core", "sweeps", "analysis")
SECTIONS = ("Args:", "Returns:", "Raises:", "Yields:", "Attributes:")


def public_modules(root: Path) -> Iterator[str]:
    """Dotted names of all modules that others may import; packages come before what is in them."""
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py"), key=lambda path: path.with_suffix("").parts):
            parts = path.relative_to(root).with_suffix("").parts
            if parts[-1] == "__init__":
                if not ast.get_docstring(ast.parse(path.read_text())):
                    continue  # an empty package says nothing
                parts = parts[:-1]
            if not any(part.startswith("_") for part in parts):
                yield ".".join(parts)


def write_pages(root: Path, folder: Path) -> None:
    """Writes `<folder>/<module>.rst` for every public module, and an index of them.

    Args:
      root: where the packages are.
      folder: emptied first, so that modules that are gone leave no page.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    modules = list(public_modules(root))
    for module in modules:
        (folder / f"{module}.rst").write_text(f"{module}\n{'=' * len(module)}\n\n.. automodule:: {module}\n")
    lines = [
        "API",
        "===",
        "",
        "Every public module, from its docstrings. Shapes are in square brackets, axes by name.",
        "",
    ]
    for package in PACKAGES:
        lines += [".. toctree::", f"   :caption: {package}", "   :maxdepth: 1", ""]
        lines += [f"   {module}" for module in modules if module.split(".")[0] == package] + [""]
    (folder / "index.rst").write_text("\n".join(lines))


@cache
def _comments(source: str) -> dict[int, str]:
    """The comment on each line, without its sign."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {token.start[0]: token.string.lstrip("#: ") for token in tokens if token.type == tokenize.COMMENT}


@cache
def field_comments(path: str) -> dict[str, dict[str, str]]:
    """The comment behind each field, without its sign, for each class of a file; "" where there is none."""
    source = Path(path).read_text()
    comments = _comments(source)
    return {
        node.name: {
            field.target.id: comments.get(field.end_lineno or 0, "")
            for field in node.body
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        }
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
    }


@cache
def class_fields(path: str) -> dict[str, list[str]]:
    """Lines of an "Attributes" section for each class of a file."""
    source = Path(path).read_text()
    comments = _comments(source)
    sections: dict[str, list[str]] = {}
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ClassDef):
            continue
        lines = []
        for field in node.body:
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            if field.target.id.startswith("_"):
                continue
            comment = comments.get(field.end_lineno or 0, "")
            default = "" if field.value is None else f"Default: ``{ast.unparse(field.value)}``."
            text = f"{comment[:1].upper()}{comment[1:]}." if comment else ""
            lines.append(f"  {field.target.id} ({ast.unparse(field.annotation)}): {text} {default}".rstrip())
        sections[node.name] = lines
    return sections


def plain_to_rest(lines: Sequence[str]) -> list[str]:
    """Says in reStructuredText what our docstrings say in plain text.

    Outside Google's sections, an indented block right below a line is a list of its items; one below a blank line is
    shown as it stands, such as a diagram or a command. Bars are no substitutions, stars no emphasis.
    """
    result: list[str] = []
    in_section, block = False, ""
    for number, line in enumerate(lines):
        text, indent = line.strip(), len(line) - len(line.lstrip())
        if not block and text and not indent:
            in_section = text in SECTIONS
        if block and text and not indent:
            block = ""
            if result[-1]:
                result.append("")
            in_section = text in SECTIONS
        if indent and not in_section and not block:
            block = "list" if number and lines[number - 1].strip() else "literal"
            first_indent = indent
            result += [""] if block == "list" else [".. code-block:: text", ""]
        if block == "list" and text:
            text = _without_markup(text)
            is_item = indent == first_indent
            result.append(f"- {text.removeprefix('- ')}" if is_item else f"  {text}")
        elif block == "literal":
            result.append(line)
        else:
            result.append(_without_markup(line))
    return result


def _without_markup(line: str) -> str:
    """Takes bars and stars for themselves, and single backticks for code even where a blank stands inside them."""
    parts = line.split("`")
    if len(parts) % 2 == 0:
        return line  # some code goes on in the next line
    parts[::2] = [part.replace("|", r"\|").replace("*", r"\*") for part in parts[::2]]
    parts[1::2] = [part.strip() for part in parts[1::2]]
    return "`".join(parts)
