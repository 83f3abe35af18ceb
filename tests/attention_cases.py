"""Attention as the layer computes it from all pairs at once, and inputs on which other ways are compared with it."""

import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from quick_jit import quick_jit

from hyla_core.attention import normalize, values
from hyla_core.attention.products import EINSUM, Products
from hyla_core.attention.variants import VARIANTS, Variant
from hyla_core.numerics import product

BATCH, SEQ, HEADS, QK_DIM, DIM = 2, 13, 3, 4, 5
DROPOUT = 0.3
PAIRWISE = [name for name, variant in VARIANTS.items() if variant.is_pairwise]

RTOL = 1e-5
"""Of the largest entry. Sums of up to a hundred terms, each rounded to 2^-24, come in another order."""


class Inputs(NamedTuple):
    query: Array
    key: Array
    value: Array
    offset_bias: Array | None


def random_inputs(variant: Variant, dtype: str = "float32", *, seq_len: int = SEQ, bias: bool = True) -> Inputs:
    draw = np.random.default_rng(0).normal
    query, key = (jnp.asarray(draw(size=(BATCH, seq_len, HEADS, QK_DIM)), dtype) for _ in range(2))
    value = jnp.asarray(draw(size=(BATCH, seq_len, HEADS, variant.num_values * DIM)), dtype)
    return Inputs(query, key, value, jnp.asarray(draw(size=(HEADS, 2 * seq_len - 1)), jnp.float32) if bias else None)


def cosine_variant(monkeypatch: pytest.MonkeyPatch) -> Variant:
    """One whose value network makes ones of values that are zero, such as those that fill up a block."""

    def cosine_values(weights: Array, value: Array, products: Products = EINSUM) -> Array:
        return products.readout(weights, jnp.cos(products.hidden(weights, value)))

    monkeypatch.setattr(values, "cosine_values", cosine_values, raising=False)
    monkeypatch.setitem(values.ACTIVATIONS, "cosine_values", jnp.cos)
    return Variant("unnormalized", "cosine_values", num_hidden=1)


def random_mask(*shape: int) -> Array:
    return jnp.asarray(np.random.default_rng(1).random(shape) < 0.7)


def from_all_pairs(
    variant: Variant, inputs: Inputs, *, mask: Array | None = None, causal: bool = False, rng: Array | None = None
) -> Array:
    """[batch, seq, heads, dim]: scores, normalisation, dropout and value network, each for all pairs."""
    query, key, value, offset_bias = inputs
    seq_len = query.shape[1]
    scores = product("bqhd,bkhd->bhqk", query, key) / math.sqrt(query.shape[-1])
    if offset_bias is not None:
        position = np.arange(seq_len)
        scores = scores + offset_bias[:, position[:, None] - position + seq_len - 1]
    if causal:
        lower = jnp.tri(seq_len, dtype=bool)
        mask = lower if mask is None else mask & lower
    weights = getattr(normalize, variant.normalize)(scores, mask)
    if rng is not None:
        dropped = nn.Dropout(DROPOUT, broadcast_dims=(0, 1)).apply
        weights = dropped({}, weights, deterministic=False, rng=rng)
    return getattr(values, variant.values)(weights, value)


def with_gradients(function: Any, variant: Variant, inputs: Inputs) -> dict[str, np.ndarray]:
    """What a function of `Inputs` returns, and the gradients with respect to each, for a fixed random cotangent."""
    cotangent = jnp.asarray(np.random.default_rng(2).normal(size=(*inputs.value.shape[:3], DIM)), inputs.value.dtype)

    @quick_jit
    def run(inputs: Inputs) -> Any:
        out, pull_back = jax.vjp(function, inputs)
        return out, pull_back(cotangent)[0]

    out, grads = run(inputs)
    assert out.dtype == inputs.value.dtype
    named = {"out": out} | {name: grad for name, grad in grads._asdict().items() if grad is not None}
    return {name: np.asarray(array, np.float64) for name, array in named.items()}


def assert_equal(ours: dict[str, np.ndarray], expected: dict[str, np.ndarray], rtol: float = RTOL) -> None:
    assert ours.keys() == expected.keys()
    for name, array in expected.items():
        assert np.abs(array).max() > 0.1, name
        np.testing.assert_allclose(ours[name], array, rtol=0, atol=rtol * np.abs(array).max(), err_msg=name)
