"""The page of measurements says what the results of the benchmarks say."""

import json
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
MACHINE = {"cpu": "A|B", "cores": 3, "load": 0.25, "memory_bytes": 8 * 2**30, "python": "3.11.7", "jax": "0.10.2"}


@pytest.fixture
def speed_page(docs_module):
    return docs_module("speed_page")


def test_a_case_is_a_row_with_both_sides(speed_page, tmp_path):
    case = {"name": "sraven/hyla", "ratio": 2.0}
    for side, scale in (("plain", 2), ("ours", 1)):
        case |= {f"{side}_step_s": 0.1 * scale, f"{side}_compile_s": 7.0 * scale}
        case |= {f"{side}_peak_mem_bytes": 300 * 2**20 * scale, f"{side}_utilisation": 0.4 / scale}
    result = {"machine": MACHINE, "product_flops_per_s": 1.5e11, "rounds": 5, "cases": [case]}
    (tmp_path / "steps.json").write_text(json.dumps(result))
    page = speed_page.page(tmp_path)
    assert "| `sraven/hyla` | 2.00 | 200 → 100 | 14 → 7 | 600 → 300 | 20 → 40 |" in page
    assert "A|B, 3 cores, 8 GiB, load 0.25 before; python 3.11.7, jax 0.10.2." in page
    assert "150 GFLOP/s" in page


def test_what_was_not_measured_has_no_section(speed_page, tmp_path):
    assert "##" not in speed_page.page(tmp_path)


def test_the_results_in_the_repository_have_their_sections(speed_page):
    page = speed_page.page(speed_page.RESULTS)
    titles = {
        "steps": "## Training steps",
        "blockwise": "## Long sequences",
        "sweeps": "## A sweep beside its training",
    }
    assert titles.keys() == speed_page.SECTIONS.keys()
    for name, title in titles.items():
        assert (title in page) == (speed_page.RESULTS / f"{name}.json").exists()
