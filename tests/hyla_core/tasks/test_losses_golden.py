"""Losses and metrics of every task against those of the official code (tests/golden/README.md)."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import pytest
from golden_files import GoldenCase, golden_cases

from hyla_core.config import LanguageConfig, SravenConfig
from hyla_core.tasks import Batch, fuzzy_logic, make_task
from hyla_core.tokens import PAD

pytestmark = pytest.mark.golden


def raven_scores(settings: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    sizes = {"num_features": settings["num_features"], "num_values": settings["feature_maxval"]}
    scores = make_task(SravenConfig(name="sraven", **sizes)).metrics(arrays["logits"], Batch(np.zeros(0), arrays["y"]))
    return {"loss": scores["loss"], "acc": scores["accuracy"], "acc_per_feature": scores["accuracy_per_feature"]}


def logic_scores(settings: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    return fuzzy_logic.scores(arrays["logits"], arrays["y"], arrays["base_mse"])


def ar_scores(settings: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    sizes = {"vocab_size": settings["vocab_size"], "seq_len": arrays["tokens"].shape[1]}
    # The smallest vocabulary that a text can have is larger than these; nothing but its shape depends on it.
    config = LanguageConfig.model_construct(name="language", text="", text_sha256="0" * 64, **sizes)
    assert settings["padding"] == PAD
    task, batch = make_task(config), Batch(arrays["model_input"], arrays["tokens"])
    scores, weights = task.metrics(arrays["logits"], batch), np.asarray(task.weights(batch))
    loss, accuracy = (np.average(scores[name], weights=weights) for name in ("loss", "accuracy"))
    return {"loss": loss, "acc": accuracy, "perplexity": task.derived({"loss": loss})["perplexity"]}


SCORES = {"raven": raven_scores, "logic": logic_scores, "ar": ar_scores}
"""What scores a case, by the first word of its name; no other words are known."""

GIVEN = ("logits", "y", "base_mse", "tokens", "model_input")


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in golden_cases("losses")])
def test_losses_and_metrics_equal_the_golden_ones(case: GoldenCase):
    scores = SCORES[case.name.split("_")[0]](case.settings, case.arrays)
    assert scores.keys() == case.arrays.keys() - set(GIVEN)
    for name, values in scores.items():
        np.testing.assert_allclose(np.mean(values), case.arrays[name], err_msg=name, **case.manifest["tolerance"])
