"""Runs docs/tutorial.md: its blocks of Python, in order, and what stands below them as their output."""

import contextlib
import io
import re
from pathlib import Path

import pytest

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial.md"
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n^```text\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)
DECIMAL = re.compile(r"\d+\.\d+")
LEARNT_ATOL = 0.12
"""How far what a training has learnt, printed with decimals, may be elsewhere: other processors round otherwise."""


def blocks() -> list[tuple[str, str]]:
    """Code and expected output of each block; "" where none is shown."""
    return BLOCK.findall(TUTORIAL.read_text())


def run_all() -> list[str]:
    """What each block prints."""
    namespace: dict[str, object] = {"__name__": "tutorial"}
    printed = []
    for code, _ in blocks():
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile(code, TUTORIAL.name, "exec"), namespace)
        printed.append(output.getvalue())
    return printed


@pytest.mark.slow
def test_the_tutorial_prints_what_it_says():
    pytest.importorskip("sklearn")
    printed = run_all()
    assert len(printed) == TUTORIAL.read_text().count("```python\n") > 5
    for output, (code, expected) in zip(printed, blocks(), strict=True):
        assert DECIMAL.sub("#", output) == DECIMAL.sub("#", expected), code
        numbers, shown = ([float(number) for number in DECIMAL.findall(text)] for text in (output, expected))
        assert numbers == pytest.approx(shown, abs=LEARNT_ATOL), code
