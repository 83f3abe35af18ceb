"""The products of an attention layer, each in the form that a processor computes fastest.

Any of them is one einsum, and `EINSUM` has them so: it is what the others are compared with. XLA's CPU compiler hands a
batched product to its fast library only where the left factor's rows and the right factor's columns lie as the formula
reads them; it computes the gradients that JAX derives from an einsum, which read a factor by its columns, several times
slower. `ROW_MAJOR` spells out factors, transposed where needed, and gradients.

Its products have derivatives in reverse mode only (`jax.grad`, `jax.vjp`), as all training needs.

Reference: arXiv 2406.05816, Section 2.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from hyla_core.numerics import product

_Product = Callable[[Array, Array], Array]


class Products(NamedTuple):
    """One way to compute each product; all results are float32."""

    # query [batch, query, heads, dim], key [batch, key, heads, dim] -> scores [batch, heads, query, key]
    scores: _Product
    # scores [batch, heads, query, key] + bias [1, heads, query, key]
    biased: _Product
    # weights [batch, heads, query, key], values [batch, key, heads, dim] -> [batch, query, heads, dim]
    mix: _Product
    # weights [batch, heads, query, key], values [batch, key, heads, dim] -> hidden layer [batch, key, query, dim]
    hidden: _Product
    # weights [batch, heads, query, key], hidden layer [batch, key, query, dim] -> [batch, query, heads, dim]
    readout: _Product


EINSUM = Products(
    scores=functools.partial(product, "bqhd,bkhd->bhqk"),
    biased=jnp.add,
    mix=functools.partial(product, "bhqk,bkhd->bqhd"),
    # Key before query is the order in which the product comes; the other order takes a transposition.
    hidden=functools.partial(product, "bhqk,bkhd->bkqd"),
    readout=functools.partial(product, "bhqk,bkqd->bqhd"),
)


def fastest(dtype: str) -> Products:
    """What to use on the default backend for factors of this dtype.

    Measured by `benchmarks/steps.py`. Products of rounded factors are left to `EINSUM`: a CPU has no fast ones.
    """
    return ROW_MAJOR if jax.default_backend() == "cpu" and dtype == "float32" else EINSUM


def _rows(spec: str, left: Array, right: Array) -> Array:
    """A product of matrices that lie in memory as the spec reads them: "…ij,…jk->…ik"."""
    return jnp.einsum(spec, left, right)


def _turned(matrices: Array) -> Array:
    """Matrices transposed for good: XLA folds a plain transposition into a product before or after it.

    That product would read columns again. XLA drops the barriers once the danger is past.
    """
    return jax.lax.optimization_barrier(jnp.swapaxes(jax.lax.optimization_barrier(matrices), 2, 3))


def _with_gradient(function: _Product, gradient: Callable[[Array, Array, Array], tuple[Array, Array]]) -> _Product:
    """A product whose gradients with respect to left and right are given by (left, right, incoming gradient)."""

    def forward(left: Array, right: Array) -> tuple[Array, tuple[Array, Array]]:
        return function(left, right), (left, right)

    def backward(factors: tuple[Array, Array], grad: Array) -> tuple[Array, Array]:
        return gradient(*factors, grad)

    wrapped = jax.custom_vjp(function)
    wrapped.defvjp(forward, backward)
    return wrapped


def _scores(query: Array, key: Array) -> Array:
    return _rows("bhqd,bhdk->bhqk", jnp.swapaxes(query, 1, 2), jnp.transpose(key, (0, 2, 3, 1)))


def _scores_gradient(query: Array, key: Array, grad: Array) -> tuple[Array, Array]:
    query_grad = _rows("bhqk,bhkd->bhqd", grad, jnp.swapaxes(key, 1, 2))
    key_grad = _rows("bhdq,bhqk->bhdk", jnp.transpose(query, (0, 2, 3, 1)), grad)
    return jnp.swapaxes(query_grad, 1, 2), jnp.transpose(key_grad, (0, 3, 1, 2))


def _biased(scores: Array, bias: Array) -> Array:
    return scores + bias


def _biased_gradient(scores: Array, bias: Array, grad: Array) -> tuple[Array, Array]:
    # As a product with ones: the CPU's own sum over the first axis of so large an array is far from memory's speed.
    ones = jnp.ones((1, scores.shape[0]), grad.dtype)
    return grad, jnp.reshape(ones @ jnp.reshape(grad, (scores.shape[0], -1)), bias.shape)


def _mix(weights: Array, values: Array) -> Array:
    return jnp.swapaxes(_rows("bhqk,bhkd->bhqd", weights, jnp.swapaxes(values, 1, 2)), 1, 2)


def _mix_gradient(weights: Array, values: Array, grad: Array) -> tuple[Array, Array]:
    weights_grad = _rows("bhqd,bhdk->bhqk", jnp.swapaxes(grad, 1, 2), jnp.transpose(values, (0, 2, 3, 1)))
    values_grad = _rows("bhdq,bhqk->bhdk", jnp.transpose(grad, (0, 2, 3, 1)), weights)
    return weights_grad, jnp.transpose(values_grad, (0, 3, 1, 2))


def _hidden(weights: Array, values: Array) -> Array:
    return _rows("bkqh,bkhd->bkqd", jnp.transpose(weights, (0, 3, 2, 1)), values)


def _hidden_gradient(weights: Array, values: Array, grad: Array) -> tuple[Array, Array]:
    weights_grad = _rows("bkqd,bkdh->bkqh", grad, jnp.swapaxes(values, 2, 3))
    values_grad = _rows("bkdq,bkqh->bkdh", _turned(grad), jnp.transpose(weights, (0, 3, 2, 1)))
    return jnp.transpose(weights_grad, (0, 3, 2, 1)), _turned(values_grad)


def _readout(weights: Array, hidden: Array) -> Array:
    return _rows("bqhk,bqkd->bqhd", jnp.swapaxes(weights, 1, 2), jnp.swapaxes(hidden, 1, 2))


def _readout_gradient(weights: Array, hidden: Array, grad: Array) -> tuple[Array, Array]:
    weights_grad = _rows("bqhd,bqdk->bqhk", grad, jnp.transpose(hidden, (0, 2, 3, 1)))
    hidden_grad = _rows("bqdh,bqhk->bqdk", _turned(grad), jnp.swapaxes(weights, 1, 2))
    return jnp.swapaxes(weights_grad, 1, 2), jnp.transpose(hidden_grad, (0, 3, 1, 2))


ROW_MAJOR = Products(
    scores=_with_gradient(_scores, _scores_gradient),
    biased=_with_gradient(_biased, _biased_gradient),
    mix=_with_gradient(_mix, _mix_gradient),
    hidden=_with_gradient(_hidden, _hidden_gradient),
    readout=_with_gradient(_readout, _readout_gradient),
)
