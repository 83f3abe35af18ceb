import math
from functools import partial

import jax
import numpy as np
import pytest
from quick_jit import quick_jit

from hyla_core.feedforward import FEEDFORWARDS, GeluMlp, SwiGlu

RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


INPUTS = normal(2, 3, 5)


def test_gelu_mlp_follows_its_equation():
    (kernel0, bias0), (kernel1, bias1) = ((normal(5, 7), normal(7)), (normal(7, 5), normal(5)))
    params = {"Dense_0": {"kernel": kernel0, "bias": bias0}, "Dense_1": {"kernel": kernel1, "bias": bias1}}
    hidden = INPUTS @ kernel0 + bias0
    gelu = 0.5 * hidden * (1 + np.tanh(math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)))
    expected = gelu @ kernel1 + bias1
    outputs = quick_jit(partial(GeluMlp(7).apply, deterministic=True))({"params": params}, INPUTS)
    np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-5)


def test_swiglu_follows_its_equation():
    gate, up, down = normal(5, 7), normal(5, 7), normal(7, 5)
    params = {f"Dense_{i}": {"kernel": kernel} for i, kernel in enumerate((gate, up, down))}
    hidden = INPUTS @ gate
    expected = (hidden / (1 + np.exp(-hidden)) * (INPUTS @ up)) @ down
    outputs = quick_jit(partial(SwiGlu(7).apply, deterministic=True))({"params": params}, INPUTS)
    np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", FEEDFORWARDS)
def test_dropout_comes_after_the_activation_and_after_the_output(name):
    # The last kernel is the identity and all that it is given is one value, so an output shows what both dropouts left.
    width = 200
    mlp = FEEDFORWARDS[name](width, dropout=0.5)
    inputs = np.ones((1, 1, width), np.float32)
    shapes = jax.eval_shape(partial(mlp.init, deterministic=True), jax.random.key(0), inputs)["params"]
    params = jax.tree.map(lambda leaf: np.full(leaf.shape, 1 / width if leaf.ndim == 2 else 0, np.float32), shapes)
    params[max(params)]["kernel"] = np.eye(width, dtype=np.float32)
    undropped = quick_jit(partial(mlp.apply, deterministic=True))({"params": params}, inputs)
    drop = quick_jit(lambda rng: mlp.apply({"params": params}, inputs, deterministic=False, rngs={"dropout": rng}))
    outputs = np.asarray(drop(jax.random.key(1)))
    np.testing.assert_allclose(outputs[outputs != 0], 4 * undropped.mean(), rtol=1e-4)
    assert np.mean(outputs == 0) == pytest.approx(0.75, abs=0.13)  # four standard deviations
