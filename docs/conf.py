"""Configuration of the documentation. `make docs` builds it, with warnings as errors and without the network."""

import os
import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS), str(DOCS.parent)]
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import api_pages  # noqa: E402  beside this file
import schema_page  # noqa: E402
import speed_page  # noqa: E402

project = "hyla"
author = "The hyla developers"
copyright = "the hyla developers"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "api_autodoc"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

# Docstrings are plain text in Google's form; what stands between single backticks is a name, and a link if it is known.
default_role = "py:obj"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_default_options = {
    "members": True,
    "special-members": "__call__",
    "ignore-module-all": True,
    "show-inheritance": True,
}
python_use_unqualified_type_names = True
python_display_short_literal_types = True
maximum_signature_line_length = 100
toc_object_entries_show_parents = "hide"
# Pseudo-code in Python's colours is highlighted as far as it is Python.
suppress_warnings = ["misc.highlighting_failure"]

html_theme = "furo"
html_title = "hyla"
html_static_path = ["static"]
html_css_files = ["hyla.css"]
html_copy_source = False
html_show_sphinx = False
html_last_updated_fmt = None

api_pages.write_pages(DOCS.parent, DOCS / "api")
schema_page.write_page(DOCS / "generated" / "schema.md")
speed_page.write_page(DOCS / "generated" / "measurements.md")
