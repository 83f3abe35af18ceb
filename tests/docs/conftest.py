"""The scripts that write pages of the documentation lie beside the pages."""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def docs_module(monkeypatch) -> Callable[[str], ModuleType]:
    """Imports one of them by name."""
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module
