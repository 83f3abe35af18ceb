"""SRAVEN against instances, encodings, counts and losses of the official code (tests/golden/README.md)."""

import numpy as np
import pytest
from golden_files import load_golden
from sraven_rules import follows, unshuffled

from hyla_core.config import SravenConfig
from hyla_core.tasks import Batch, make_task
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


def below(arrays: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """The arrays under `prefix/`, by the rest of their names."""
    return {name.removeprefix(prefix + "/"): array for name, array in arrays.items() if name.startswith(prefix + "/")}


def cases(kind: str, prefix: str = "") -> list:
    """Parameters: the task and the arrays of every case of every golden file of a kind."""
    return [
        pytest.param(task(official), golden.manifest, below(golden.arrays, case), id=f"{golden.name}-{case}")
        for golden in load_golden(kind)
        for case, official in golden.manifest["cases"].items()
        if case.startswith(prefix)
    ]


def groups(arrays: dict[str, np.ndarray], member: str) -> list[dict[str, np.ndarray]]:
    """The groups of arrays of one case among which there is one called `member`."""
    return [below(arrays, name.removesuffix("/" + member)) for name in arrays if name.endswith("/" + member)]


@pytest.mark.parametrize(("sraven", "manifest", "arrays"), cases("sraven"))
def test_golden_instances_follow_our_rules(sraven, manifest, arrays):
    num_values = sraven.config.num_values
    for group in groups(arrays, "latents"):
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


@pytest.mark.parametrize(("sraven", "manifest", "arrays"), cases("sraven"))
def test_our_combinations_are_the_golden_ones(sraven, manifest, arrays):
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


@pytest.mark.parametrize(("sraven", "manifest", "arrays"), cases("sraven"))
def test_encoding_equals_the_golden_one(sraven, manifest, arrays):
    for batch in groups(arrays, "x"):
        inputs, targets = sraven.encode(batch["instances"])
        assert inputs.dtype == batch["x"].dtype
        np.testing.assert_array_equal(inputs, batch["x"])
        np.testing.assert_array_equal(targets, batch["y"])


@pytest.mark.parametrize(("sraven", "manifest", "arrays"), cases("sraven"))
def test_ambiguity_counts_equal_the_golden_ones(sraven, manifest, arrays):
    for group in groups(arrays, "ambiguous_count"):
        counts = ambiguity_counts(group["instances"], sraven.config.num_values, "every_feature")
        np.testing.assert_array_equal(counts, group["ambiguous_count"])


@pytest.mark.parametrize(("sraven", "manifest", "arrays"), cases("losses", prefix="raven"))
def test_metrics_equal_the_golden_ones(sraven, manifest, arrays):
    scores = sraven.metrics(arrays["logits"], Batch(np.zeros(0), arrays["y"]))
    for ours, theirs in {"loss": "loss", "accuracy": "acc", "accuracy_per_feature": "acc_per_feature"}.items():
        np.testing.assert_allclose(np.mean(scores[ours]), arrays[theirs], **manifest["tolerance"])
