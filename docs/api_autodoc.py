"""A Sphinx extension: what autodoc finds in our modules, made complete.

Fields of configs and named tuples are documented by the comments behind them; here these become an "Attributes" section
of the class.
"""

import inspect
from typing import Any

from api_pages import PACKAGES, class_fields, plain_to_rest
from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.domains.python import PyObject

VALUES = ("attribute", "data", "property")
MAX_VALUE = 120  # characters of a value that is shown
_values: dict[str, list[str]] = {}


def _is_record(cls: type) -> bool:
    """Whether a class is a named tuple, dataclass or pydantic model: its signature repeats its fields."""
    return hasattr(cls, "_fields") or hasattr(cls, "__dataclass_fields__") or hasattr(cls, "model_fields")


def complete_docstring(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Adds fields to classes."""
    own = str(getattr(obj, "__module__", "") or "").split(".")[0] in PACKAGES
    lines[:] = plain_to_rest(lines)
    if what in VALUES:
        _values[name] = list(lines)
    if what == "class" and own and isinstance(obj, type) and _is_record(obj):
        fields = class_fields(inspect.getsourcefile(obj) or "").get(obj.__name__, [])
        if fields and "Attributes:" not in [line.strip() for line in lines]:
            lines += ["", "Attributes:", *fields, ""]


def restore_values(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Undoes what napoleon makes of the docstrings of values: it takes what stands before a colon for a type."""
    if what in VALUES:
        lines[:] = _values.pop(name)


def hide_long_values(app: Sphinx, doctree: nodes.document) -> None:
    """Leaves out values that are longer than a line, such as whole tables."""
    for node in list(doctree.findall(addnodes.desc_annotation)):
        if len(node.astext()) > MAX_VALUE and node.astext().lstrip().startswith("="):
            node.parent.remove(node)


def shorten_signature(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None] | None:
    """Hides constructors of records."""
    return ("", None) if what == "class" and isinstance(obj, type) and _is_record(obj) else None


def skip_fields(app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Hides descriptors of named tuples' fields, which the class documents itself, and pydantic's settings."""
    return True if type(obj).__name__ == "_tuplegetter" or name == "model_config" else None


def setup(app: Sphinx) -> dict[str, Any]:
    """Connects to autodoc, before napoleon reads the sections."""
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"
    app.connect("autodoc-process-docstring", complete_docstring, priority=400)
    app.connect("autodoc-process-docstring", restore_values, priority=600)
    app.connect("doctree-read", hide_long_values)
    app.connect("autodoc-process-signature", shorten_signature)
    app.connect("autodoc-skip-member", skip_fields)
    return {"parallel_read_safe": True}
