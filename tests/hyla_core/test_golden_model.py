"""The model against numbers of the paper's official code, with its weights loaded as they are."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_files import Golden, flattened, golden_params, official_model
from quick_jit import quick_jit

from hyla_core.attention import normalize
from hyla_core.attention.layer import Attention
from hyla_core.attention.variants import Variant
from hyla_core.model import Transformer
from hyla_core.position import relative_position_buckets

pytestmark = pytest.mark.golden

NORMALIZE = {"softmax": "softmax_over_keys", "none": "unnormalized", "rms_head": "rms_over_heads"}
VALUES = {"default": "default_values", "mlp_relu": "relu_values", "mlp_linear": "linear_values"}


def in_order_of_application(intermediates: dict[str, Any], leaf: str) -> list[np.ndarray]:
    """What the layers have sown under `leaf`. A block that is applied repeatedly has sown once each time."""
    blocks = [intermediates[name] for name in sorted(intermediates, key=lambda name: (len(name), name))]
    sown = [value for block in blocks for name, value in flattened(block).items() if name.split("/")[-1] == leaf]
    return [array for layer in sown for array in layer]


def leaf_tolerance(limits: dict[str, Any], leaf: np.ndarray) -> dict[str, float]:
    """Reads limits that may go by the size of a leaf: `{"atol": "5e-4 * (1 + max abs of that leaf)"}`."""
    read = {"rtol": 0.0}
    for name, limit in limits.items():
        factor, _, scale = str(limit).partition(" * ")
        assert scale in ("", "(1 + max abs of that leaf)"), limit
        read[name] = float(factor) * (1 + np.abs(leaf).max() if scale else 1)
    return read


ARRAYS = ("params/", "grads/", "attn_weights/", "attn_bias/", "input", "mask", "cotangent", "logits")


@pytest.mark.parametrize("golden", golden_params("transformer"))
def test_transformer(golden: Golden):
    official = official_model(golden.manifest["config"])
    assert [name for name in golden.arrays if not name.startswith(ARRAYS)] == []  # nothing is passed over
    model = Transformer(official.config, official.output_dim, official.vocab_size)
    params, inputs = golden.tree("params"), golden.arrays["input"]
    mask = golden.arrays.get("mask")
    apply = partial(model.apply, mask=mask, deterministic=True)

    @quick_jit
    def run(params):
        def weighted_sum(params):
            logits, state = apply({"params": params}, inputs, mutable="intermediates")
            return jnp.sum(logits * golden.arrays["cotangent"]), (logits, state)

        (_, (logits, state)), grads = jax.value_and_grad(weighted_sum, has_aux=True)(params)
        return logits, state["intermediates"], grads

    initial = jax.eval_shape(partial(model.init, deterministic=True), jax.random.key(0), inputs)["params"]
    assert {name: leaf.shape for name, leaf in flattened(initial).items()} == {
        name: leaf.shape for name, leaf in flattened(params).items()
    }
    logits, intermediates, grads = run(params)
    tolerance = golden.manifest["tolerance"]
    np.testing.assert_allclose(logits, golden.arrays["logits"], **tolerance["logits"])
    for leaf in ("attn_weights", "attn_bias"):
        layers = in_order_of_application(intermediates, leaf)
        assert len(layers) == sum(name.startswith(leaf + "/") for name in golden.arrays)
        for layer, ours in enumerate(layers):
            np.testing.assert_allclose(ours, golden.arrays[f"{leaf}/{layer}"], err_msg=leaf, **tolerance[leaf])

    expected = flattened(golden.tree("grads"))
    assert flattened(grads).keys() == expected.keys()
    for name, ours in flattened(grads).items():
        limits = leaf_tolerance(tolerance["grads"], expected[name])
        np.testing.assert_allclose(ours, expected[name], err_msg=name, **limits)


@pytest.mark.parametrize("golden", golden_params("attention"))
def test_attention_weights(golden: Golden):
    arrays = golden.arrays
    scores = jnp.einsum("bqhd,bkhd->bhqk", arrays["query"], arrays["key"]) / np.sqrt(arrays["query"].shape[-1])
    kept = arrays["keep_mask"] / (1 - golden.manifest["dropout_rate"])
    cases = {
        "plain": lambda weigh: weigh(scores, None),
        "bias": lambda weigh: weigh(scores + arrays["bias"], None),
        "mask": lambda weigh: weigh(scores, arrays["mask"]),
        "bias_mask": lambda weigh: weigh(scores + arrays["bias"], arrays["mask"]),
        "bias_mask_dropout": lambda weigh: weigh(scores + arrays["bias"], arrays["mask"]) * kept,
    }
    inputs = {"query", "key", "bias", "mask", "keep_mask", "mha_input"}
    recorded = {tuple(name.split("/")) for name in arrays if not name.startswith("mha/") and name not in inputs}
    assert recorded, "no weights are recorded"
    for norm, case in sorted(recorded):
        weights = cases[case](getattr(normalize, NORMALIZE[norm]))
        expected = arrays[f"{norm}/{case}"]
        np.testing.assert_allclose(weights, expected, err_msg=f"{norm}/{case}", **golden.manifest["tolerance"])


@pytest.mark.parametrize("golden", golden_params("attention"))
def test_attention_layer(golden: Golden):
    sizes = golden.manifest["mha"]
    layers = golden.tree("mha")
    for norm, networks in layers.items():
        for network, expected in networks.items():
            layer = Attention(Variant(NORMALIZE[norm], VALUES[network]), **sizes)
            apply = partial(layer.apply, mask=golden.arrays["mask"], deterministic=True, mutable="intermediates")
            output, state = quick_jit(apply)({"params": expected["params"]}, golden.arrays["mha_input"])
            (weights,) = state["intermediates"]["attn_weights"]
            name, tolerance = f"{norm}/{network}", golden.manifest["tolerance"]
            np.testing.assert_allclose(weights, expected["attn_weights"], err_msg=name, **tolerance)
            np.testing.assert_allclose(output, expected["output"], err_msg=name, **tolerance)


@pytest.mark.parametrize("golden", golden_params("position_buckets"))
def test_position_buckets(golden: Golden):
    for case in golden.manifest["cases"]:
        case = dict(case)
        expected = golden.arrays[case.pop("key")]
        np.testing.assert_array_equal(relative_position_buckets(case.pop("length"), **case), expected, str(case))
