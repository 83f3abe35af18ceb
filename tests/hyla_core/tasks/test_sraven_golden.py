"""SRAVEN against instances, encodings, and counts of the official code (tests/golden/README.md)."""

import numpy as np
import pytest
from golden_files import golden_cases, groups, load_golden
from sraven_rules import follows, unshuffled

from hyla_core.config import SravenConfig
from hyla_core.tasks import make_task
from hyla_core.tasks.sraven import Sraven
from hyla_core.tasks.sraven_ambiguity import ambiguity_counts, explain

pytestmark = pytest.mark.golden


def task(official: dict) -> Sraven:
    """The task that the official code's settings describe."""
    config = SravenConfig(
        name="sraven",
        num_features=official["num_features"],
        num_values=official["feature_maxval"],
        grid_size=official.get("grid_size", 3),
        permute_features=official.get("permute_features", True),
        ood_fraction=official.get("frac_ood", 0.25),
    )
    return make_task(config)


def cases() -> list:
    """Parameters: the task and the arrays of every case of every golden file."""
    return [pytest.param(task(case.settings), case.arrays, id=case.id) for case in golden_cases("sraven")]


@pytest.mark.parametrize(("sraven", "arrays"), cases())
def test_golden_instances_follow_our_rules(sraven, arrays):
    num_values = sraven.config.num_values
    for group in groups(arrays, "latents").values():
        cells, rules = group["instances"], group["latents"]
        identity = np.broadcast_to(np.arange(cells.shape[3]), (len(cells), *cells.shape[2:]))
        for instance, latents, perms in zip(cells, rules, group.get("perms", identity), strict=True):
            plain = unshuffled(instance, perms)
            for feature, rule in enumerate(latents):
                grid = plain[:, :, feature]
                assert follows(rule, grid.tolist(), num_values), (rule, grid)
                fits, answers = explain(grid, num_values)
                assert fits[rule]
                assert answers[rule] == grid[-1, -1]


@pytest.mark.parametrize(("sraven", "arrays"), cases())
def test_our_combinations_are_the_golden_ones(sraven, arrays):
    tables = sraven.tables(0)
    ours = np.concatenate([tables["seen"], tables["held_out"]])
    np.testing.assert_array_equal(ours[np.lexsort(ours.T[::-1])], arrays["all_latents"])
    assert (len(tables["seen"]), len(tables["held_out"])) == (len(arrays["in_dist"]), len(arrays["ood"]))


@pytest.mark.parametrize(
    "counts",
    [
        pytest.param(counts, id=f"{golden.name}-{number}")
        for golden in load_golden("sraven")
        for number, counts in enumerate(golden.manifest["counts"])
    ],
)
def test_split_sizes_equal_the_golden_ones(counts):
    sraven = task(counts)
    assert sraven.config.num_combinations == counts["num_combinations"]
    assert sraven.config.num_held_out == counts["num_ood"]
    for split_seed in (0, 1):
        tables = sraven.tables(split_seed)
        assert tables["seen"].shape == (counts["num_in_dist"], counts["num_features"])
        assert tables["held_out"].shape == (counts["num_ood"], counts["num_features"])


@pytest.mark.parametrize(("sraven", "arrays"), cases())
def test_encoding_equals_the_golden_one(sraven, arrays):
    for batch in groups(arrays, "x").values():
        inputs, targets = sraven.encode(batch["instances"])
        assert inputs.dtype == batch["x"].dtype
        np.testing.assert_array_equal(inputs, batch["x"])
        np.testing.assert_array_equal(targets, batch["y"])


@pytest.mark.parametrize(("sraven", "arrays"), cases())
def test_ambiguity_counts_equal_the_golden_ones(sraven, arrays):
    for group in groups(arrays, "ambiguous_count").values():
        counts = ambiguity_counts(group["instances"], sraven.config.num_values, "every_feature")
        np.testing.assert_array_equal(counts, group["ambiguous_count"])
