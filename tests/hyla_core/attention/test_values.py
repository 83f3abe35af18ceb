"""The value networks against loops that follow the equations word for word."""

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hyla_core.attention import values
from hyla_core.attention.products import EINSUM, ROW_MAJOR
from hyla_core.attention.variants import VARIANTS

BATCH, HEADS, QUERIES, KEYS, DIM = 2, 3, 5, 7, 4


def gated(hidden: np.ndarray) -> np.ndarray:
    gate, up = hidden[:DIM], hidden[DIM:]
    return gate / (1 + np.exp(-gate)) * up


# What a network makes of Σ_h' w[h', q, k] v[k, h'], before the sum over keys.
ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "linear_values": lambda hidden: hidden,
    "relu_values": lambda hidden: np.maximum(hidden, 0),
    "gated_values": gated,
}
NETWORKS = {variant.values: variant.num_values for variant in VARIANTS.values()}


def by_loops(weights: np.ndarray, value: np.ndarray, network: str) -> np.ndarray:
    """y[b, q, h] of one value network, a pair of query and key at a time."""
    out = np.zeros((BATCH, QUERIES, HEADS, DIM))
    for b, q, k in itertools.product(range(BATCH), range(QUERIES), range(KEYS)):
        hidden = sum(weights[b, head, q, k] * value[b, k, head] for head in range(HEADS))
        for h in range(HEADS):
            configured = value[b, k, h] if network == "default_values" else ACTIVATIONS[network](hidden)
            out[b, q, h] += weights[b, h, q, k] * configured
    return out


def weights_and_values(network: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    weights = rng.normal(size=(BATCH, HEADS, QUERIES, KEYS))
    return weights, rng.normal(size=(BATCH, KEYS, HEADS, NETWORKS[network] * DIM))


@pytest.mark.parametrize("products", [EINSUM, ROW_MAJOR], ids=["einsum", "row_major"])
@pytest.mark.parametrize("network", NETWORKS)
def test_value_network_follows_its_equation(network, products):
    weights, value = weights_and_values(network)
    ours = getattr(values, network)(weights.astype(np.float32), value.astype(np.float32), products)
    np.testing.assert_allclose(ours, by_loops(weights, value, network), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("products", [EINSUM, ROW_MAJOR], ids=["einsum", "row_major"])
@pytest.mark.parametrize("network", NETWORKS)
def test_gradients_of_a_value_network_are_its_slopes(network, products):
    point = weights_and_values(network)
    directions = weights_and_values(network, seed=1)
    cotangent = np.random.default_rng(2).normal(size=(BATCH, QUERIES, HEADS, DIM))
    as_float32 = [jnp.asarray(array, jnp.float32) for array in point]
    _, pull_back = jax.vjp(lambda *factors: getattr(values, network)(*factors, products), *as_float32)
    grads = pull_back(jnp.asarray(cotangent, jnp.float32))
    step = 1e-6
    for number in range(2):

        def moved(by: float, number: int = number) -> float:
            factors = list(point)
            factors[number] = factors[number] + by * directions[number]
            return float(np.sum(cotangent * by_loops(*factors, network)))

        slope = (moved(step) - moved(-step)) / (2 * step)  # float64
        assert float(np.sum(np.asarray(grads[number]) * directions[number])) == pytest.approx(slope, rel=1e-4)


@pytest.mark.parametrize("network", NETWORKS)
def test_a_value_network_answers_in_the_type_of_its_values(network):
    weights, value = weights_and_values(network)
    exact = by_loops(weights, value, network)
    rounded = getattr(values, network)(jnp.float32(weights), jnp.bfloat16(value))
    assert rounded.dtype == jnp.bfloat16
    # Weights, values, the hidden layer and the result are rounded, by up to 2^-8 each.
    error = np.abs(np.asarray(rounded, np.float64) - exact).max() / np.abs(exact).max()
    assert 1e-4 < error < 5 * 2**-8
