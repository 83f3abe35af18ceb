"""Fuzzy logic against functions, targets, batches and counts of the official code (tests/golden/README.md)."""

from typing import Any

import numpy as np
import pytest
from golden_files import golden_cases, groups, load_golden

from hyla_core.config import FuzzyLogicConfig
from hyla_core.tasks import Batch, make_task
from hyla_core.tasks.fuzzy_logic import FuzzyLogic, base_mse, conjunctions, evaluate

pytestmark = pytest.mark.golden


def task(official: dict[str, Any]) -> FuzzyLogic:
    """The task that the official code's settings describe."""
    return make_task(
        FuzzyLogicConfig(
            name="fuzzy_logic",
            num_variables=official["num_variables"],
            num_terms=official["num_terms"],
            num_context=official.get("seq_len", 2) - 1,
            test_fraction=official["frac_test"],
            ood_fraction=official["frac_ood_conj"],
        )
    )


CASES = [
    pytest.param(task(case.settings), case.arrays, case.manifest, id=case.id) for case in golden_cases("fuzzy_logic")
]
SPLITS = ("train", "test", "ood")


@pytest.mark.parametrize(
    "counts",
    [
        pytest.param(counts, id=f"{golden.name}-{number}")
        for golden in load_golden("fuzzy_logic")
        for number, counts in enumerate(golden.manifest["counts"])
    ],
)
def test_split_sizes_equal_the_golden_ones(counts):
    config = task(counts).config
    assert config.num_conjunctions == counts["num_conjunctions"]
    assert config.num_ood_conjunctions == counts["num_ood_conjunctions"]
    assert config.num_seen_functions == counts["num_in_dist"]
    for split_seed in (0, 1):
        tables = task(counts).tables(split_seed)
        for split in SPLITS:
            assert tables[split].shape == (counts[f"num_{split}"], counts["num_terms"])


@pytest.mark.parametrize(("fuzzy", "arrays", "manifest"), CASES)
def test_functions_are_the_golden_ones(fuzzy, arrays, manifest):
    def functions(*tables: np.ndarray) -> set[tuple[int, ...]]:
        sets = [tuple(sorted(terms.tolist())) for table in tables for terms in table]
        assert len(set(sets)) == len(sets)
        return set(sets)

    np.testing.assert_array_equal(conjunctions(fuzzy.config.num_variables), arrays["conjunctions"])
    ours, theirs = fuzzy.tables(0), {split: arrays[f"terms_{split}"] for split in SPLITS}
    assert functions(ours["ood"]) == functions(theirs["ood"])
    # Which of the others are held out, chance decides.
    assert functions(ours["train"], ours["test"]) == functions(theirs["train"], theirs["test"])


@pytest.mark.parametrize(("fuzzy", "arrays", "manifest"), CASES)
def test_values_equal_the_golden_ones(fuzzy, arrays, manifest):
    drawn = groups(arrays, "targets")
    assert drawn.keys() >= set(SPLITS)
    for name, group in drawn.items():
        values = evaluate(group["latents"], group["inputs"])[..., None]
        np.testing.assert_allclose(values, group["targets"], err_msg=name, **manifest["tolerance"]["targets"])
        batch = fuzzy.encode(group["inputs"], group["targets"][..., 0])
        assert batch.inputs.shape[1:] == (fuzzy.config.seq_len, fuzzy.config.input_dim)
        np.testing.assert_array_equal(batch.targets, group["targets"][:, -1])


@pytest.mark.parametrize(("fuzzy", "arrays", "manifest"), CASES)
def test_batches_equal_the_golden_ones(fuzzy, arrays, manifest):
    tolerance = manifest["tolerance"]
    batches = groups(arrays, "x")
    assert batches
    for name, group in batches.items():
        inputs = group["x"][..., :-1]
        ours = fuzzy.encode(inputs, evaluate(group["latents"], inputs))
        np.testing.assert_allclose(ours.inputs, group["x"], err_msg=name, **tolerance["targets"])
        np.testing.assert_allclose(ours.targets, group["y"], err_msg=name, **tolerance["targets"])
        mse = base_mse(Batch(group["x"], group["y"]))
        np.testing.assert_allclose(mse, group["base_mse"], err_msg=name, **tolerance["base_mse"])

        is_query = np.arange(fuzzy.config.seq_len) == fuzzy.config.seq_len - 1
        shared = {"fixed_context": ~is_query, "fixed_query": is_query}
        is_shared = next(
            (tokens for ending, tokens in shared.items() if name.endswith(ending)), np.zeros_like(is_query)
        )
        np.testing.assert_array_equal(np.all(inputs == inputs[:1], axis=(0, 2)), is_shared, err_msg=name)

        split = name.split("/")[-1].split("_")[0]
        functions = arrays[f"terms_{'train' if split == 'valid' else split}"]
        known = {tuple(sorted(terms)) for terms in functions.tolist()}
        numbers = group["latents"] @ (1 << np.arange(fuzzy.config.num_variables)[::-1])
        assert {tuple(sorted(terms)) for terms in numbers.tolist()} <= known, name
