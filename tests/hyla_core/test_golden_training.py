"""Learning rates and whole trainings against numbers of the paper's official code."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from golden_files import Golden, flattened, golden_params, official_model
from quick_jit import quick_jit

from hyla_core import optim
from hyla_core.config import FuzzyLogicConfig, LanguageConfig, OptimConfig, SravenConfig
from hyla_core.model import Transformer
from hyla_core.optim import Hyperparams
from hyla_core.tasks import Batch, make_task
from hyla_core.train import gradient_step

pytestmark = pytest.mark.golden


@pytest.mark.parametrize("golden", golden_params("schedule"))
def test_schedule(golden: Golden):
    for case in golden.manifest["cases"]:
        expected = golden.arrays[case["key"]]
        rates = optim.learning_rate(np.arange(len(expected)), case["lr"], case["warmup_steps"], case["steps"], 0.1)
        np.testing.assert_allclose(rates, expected, err_msg=str(case), **golden.manifest["tolerance"])


def raven_metrics(official: dict[str, Any], logits: jax.Array, batch: Batch) -> dict[str, jax.Array]:
    data = official["data"]
    task = make_task(
        SravenConfig(
            name="sraven",
            num_features=data["num_features"],
            num_values=data["feature_maxval"],
            grid_size=data["grid_size"],
        )
    )
    means = {name: jnp.mean(values) for name, values in task.metrics(logits, batch).items()}
    return {"loss": means["loss"], "acc": means["accuracy"], "acc_per_feature": means["accuracy_per_feature"]}


def logic_metrics(official: dict[str, Any], logits: jax.Array, batch: Batch) -> dict[str, jax.Array]:
    data = official["data"]
    task = make_task(
        FuzzyLogicConfig(
            name="fuzzy_logic",
            num_variables=data["num_variables"],
            num_terms=data["num_terms"],
            num_context=data["seq_len"] - 1,
        )
    )
    return {name: jnp.mean(values) for name, values in task.metrics(logits, batch).items()}


def ar_metrics(official: dict[str, Any], logits: jax.Array, batch: Batch) -> dict[str, jax.Array]:
    sizes = {"vocab_size": logits.shape[-1], "seq_len": logits.shape[1]}
    task = make_task(LanguageConfig.model_construct(name="language", text="", text_sha256="0" * 64, **sizes))
    weights = task.weights(batch)
    means = {name: jnp.average(values, weights=weights) for name, values in task.metrics(logits, batch).items()}
    return {"loss": means["loss"], "acc": means["accuracy"], "perplexity": jnp.exp(means["loss"])}


METRICS = {"raven": raven_metrics, "logic": logic_metrics, "wiki": ar_metrics, "wikitext": ar_metrics, "ar": ar_metrics}
"""What measures a training, by the first word of its name; no other words are known. The official code names a language
model by its corpus, wikitext-103 say."""


@pytest.mark.parametrize("golden", golden_params("trajectory"))
def test_trajectory(golden: Golden):
    official = golden.manifest["config"]
    schedule, adamw = golden.manifest["schedule"], golden.manifest["adamw"]
    warmup_steps = int(schedule["warmup_steps"])
    config = OptimConfig(
        name=official["optimizer"],
        batch_size=official["batch_size"],
        peak_lr=schedule["peak_value"],
        warmup_steps=warmup_steps,
        final_lr_fraction=schedule["end_value"] / schedule["peak_value"],
        decay_mask="spare_rank_1" if official["mask_weight_decay"] else "all",
        grad_clip_norm=official["grad_clip_norm"],
        **adamw,
    )
    # The official code hands optax num_steps - warmup_steps as decay_steps.
    hyperparams = Hyperparams(
        config.peak_lr, config.weight_decay, warmup_steps, int(schedule["decay_steps"]) + warmup_steps
    )
    model = official_model(official["model"])
    transformer = Transformer(model.config, model.output_dim, model.vocab_size)
    metrics_fn = METRICS[re.split("[_-]", official["name"])[0]]

    @quick_jit
    def run(params, opt_state, step, batch):
        def loss_fn(params):
            logits = transformer.apply({"params": params}, batch.inputs, deterministic=True)
            metrics = metrics_fn(official, logits, batch)
            return metrics["loss"], metrics

        gradient = jax.grad(loss_fn, has_aux=True)
        grad_norm = optax.tree.norm(gradient(params)[0])
        params, opt_state, metrics = gradient_step(gradient, params, opt_state, step, hyperparams, config)
        rate = optim.learning_rate(step, config.peak_lr, warmup_steps, hyperparams.num_steps, config.final_lr_fraction)
        measured = metrics | {"grad_norm": grad_norm, "param_norm": optax.tree.norm(params), "lr": rate}
        return params, opt_state, measured

    params = jax.tree.map(jnp.asarray, golden.tree("params0"))
    decayed = flattened(optim.decay_mask(params, config.decay_mask), "params0/")
    assert decayed == golden.manifest["weight_decayed"]

    opt_state = optim.init(params, config)
    history = []
    for step, batch in enumerate(zip(golden.arrays["batch/x"], golden.arrays["batch/y"], strict=True)):
        params, opt_state, measured = run(params, opt_state, np.uint32(step), Batch(*batch))
        history.append(measured)

    tolerance = golden.manifest["tolerance"]
    assert {f"step/{name}" for name in history[0]} == {name for name in golden.arrays if name.startswith("step/")}
    for name in history[0]:
        ours = np.array([measured[name] for measured in history])
        expected, limits = golden.arrays[f"step/{name}"], tolerance[f"step/{name}"]
        np.testing.assert_allclose(ours, expected, err_msg=name, **limits)
    limits = {name: limit for name, limit in tolerance["params1"].items() if name in ("rtol", "atol")}
    for name, leaf in flattened(params, "params1/").items():
        if name not in golden.manifest["noisy_leaves"]:
            np.testing.assert_allclose(leaf, golden.arrays[name], err_msg=name, **{"rtol": 0, **limits})
