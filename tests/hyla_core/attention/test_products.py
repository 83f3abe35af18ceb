"""Products in the form that a processor computes fastest are the einsums, and so are their gradients."""

import jax
import numpy as np
import pytest

from hyla_core.attention.products import EINSUM, ROW_MAJOR, Products, fastest

BATCH, HEADS, QUERIES, KEYS, DIM = 2, 3, 5, 7, 4
QUERY, KEY = (BATCH, QUERIES, HEADS, DIM), (BATCH, KEYS, HEADS, DIM)
WEIGHTS, HIDDEN = (BATCH, HEADS, QUERIES, KEYS), (BATCH, KEYS, QUERIES, DIM)
FACTORS = {
    "scores": (QUERY, KEY),
    "biased": (WEIGHTS, (1, HEADS, QUERIES, KEYS)),
    "mix": (WEIGHTS, KEY),
    "hidden": (WEIGHTS, KEY),
    "readout": (WEIGHTS, HIDDEN),
}


def draw(seed: int, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize("name", Products._fields)
def test_product_and_gradients_equal_those_of_the_einsum(name):
    factors = draw(0, *FACTORS[name])
    ours, pull_back = jax.vjp(jax.jit(getattr(ROW_MAJOR, name)), *factors)
    wanted, pull_back_einsum = jax.vjp(getattr(EINSUM, name), *factors)
    # Sums of at most 7 products of numbers around 1, in another order.
    np.testing.assert_allclose(ours, wanted, rtol=1e-5, atol=1e-6)
    (incoming,) = draw(1, wanted.shape)
    for grad, wanted_grad in zip(pull_back(incoming), pull_back_einsum(incoming), strict=True):
        np.testing.assert_allclose(grad, wanted_grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", Products._fields)
def test_product_of_several_members_side_by_side_is_that_of_each(name):
    factors = draw(2, *((3, *shape) for shape in FACTORS[name]))
    together = jax.vmap(getattr(ROW_MAJOR, name))(*factors)
    for member, result in enumerate(together):
        alone = getattr(ROW_MAJOR, name)(*(factor[member] for factor in factors))
        np.testing.assert_allclose(result, alone, rtol=1e-5, atol=1e-6)


def test_products_of_rounded_factors_are_einsums():
    assert fastest("bfloat16") is EINSUM
