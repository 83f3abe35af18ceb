"""Losses and metrics of every task against those of the official code (tests/golden/README.md)."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import pytest
from golden_files import GoldenCase, golden_cases

from hyla_core.config import SravenConfig
from hyla_core.tasks import Batch, fuzzy_logic, make_task

pytestmark = pytest.mark.golden


def raven_scores(settings: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    sizes = {"num_features": settings["num_features"], "num_values": settings["feature_maxval"]}
    scores = make_task(SravenConfig(name="sraven", **sizes)).metrics(arrays["logits"], Batch(np.zeros(0), arrays["y"]))
    return {"loss": scores["loss"], "acc": scores["accuracy"], "acc_per_feature": scores["accuracy_per_feature"]}


def logic_scores(settings: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    return fuzzy_logic.scores(arrays["logits"], arrays["y"], arrays["base_mse"])


SCORES = {"raven": raven_scores, "logic": logic_scores}
"""What scores a case, by the first word of its name; no other words are known."""

GIVEN = ("logits", "y", "base_mse")


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in golden_cases("losses")])
def test_losses_and_metrics_equal_the_golden_ones(case: GoldenCase):
    scores = SCORES[case.name.split("_")[0]](case.settings, case.arrays)
    assert scores.keys() == case.arrays.keys() - set(GIVEN)
    for name, values in scores.items():
        np.testing.assert_allclose(np.mean(values), case.arrays[name], err_msg=name, **case.manifest["tolerance"])
