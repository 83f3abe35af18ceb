"""The value networks against loops that follow the equations word for word."""

import itertools

import numpy as np
import pytest

from hyla_core.attention import values

BATCH, HEADS, QUERIES, KEYS, DIM = 2, 3, 5, 7, 4


def by_loops(weights: np.ndarray, value: np.ndarray, network: str) -> np.ndarray:
    """y[b, q, h] of one value network, a pair of query and key at a time."""
    out = np.zeros((BATCH, QUERIES, HEADS, DIM))
    for b, q, k in itertools.product(range(BATCH), range(QUERIES), range(KEYS)):
        hidden = sum(weights[b, head, q, k] * value[b, k, head] for head in range(HEADS))
        for h in range(HEADS):
            configured = {
                "default_values": value[b, k, h],
                "linear_values": hidden,
                "relu_values": np.maximum(hidden, 0),
            }[network]
            out[b, q, h] += weights[b, h, q, k] * configured
    return out


@pytest.mark.parametrize("network", ["default_values", "linear_values", "relu_values"])
def test_value_network_follows_its_equation(network):
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(BATCH, HEADS, QUERIES, KEYS)).astype(np.float32)
    value = rng.normal(size=(BATCH, KEYS, HEADS, DIM)).astype(np.float32)
    np.testing.assert_allclose(
        getattr(values, network)(weights, value), by_loops(weights, value, network), rtol=1e-5, atol=1e-5
    )
