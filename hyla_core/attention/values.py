"""Value networks: what the attention weights of one (query, key) pair, the hypernetwork's latent code, configure.

Each function takes weights [batch, heads, query, key], values [batch, key, heads, dim] and the way to compute products,
and returns [batch, query, heads, dim]; the layer's output projection, which follows, is the last linear map of the
network. Result and hidden layer have the type of the values; sums are float32.

Reference: arXiv 2406.05816, Section 2.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from hyla_core.attention.products import EINSUM, Products


def default_values(weights: Array, values: Array, products: Products = EINSUM) -> Array:
    """Multi-head attention: y[q, h] = Σ_k w[h, q, k] v[k, h], a linear value network.

    Args:
      weights: [batch, heads, query, key].
      values: [batch, key, heads, dim].
      products: how to compute them.

    Returns:
      [batch, query, heads, dim].
    """
    return products.mix(weights, values).astype(values.dtype)


def relu_values(weights: Array, values: Array, products: Products = EINSUM) -> Array:
    """HYLA: y[q, h] = Σ_k w[h, q, k] relu(Σ_h' w[h', q, k] v[k, h']), a value network with one hidden layer.

    The hidden layer has the shape [batch, key, query, dim], so memory grows with the square of the sequence.

    Args:
      weights: [batch, heads, query, key].
      values: [batch, key, heads, dim].
      products: how to compute them.

    Returns:
      [batch, query, heads, dim].
    """
    return _readout(weights, jax.nn.relu(_hidden(weights, values, products)), products)


def linear_values(weights: Array, values: Array, products: Products = EINSUM) -> Array:
    """HYLA's value network without its non-linearity: y[q, h] = Σ_k w[h, q, k] Σ_h' w[h', q, k] v[k, h'].

    Args:
      weights: [batch, heads, query, key].
      values: [batch, key, heads, dim].
      products: how to compute them.

    Returns:
      [batch, query, heads, dim].
    """
    return _readout(weights, _hidden(weights, values, products), products)


def gated_values(weights: Array, values: Array, products: Products = EINSUM) -> Array:
    """HYLA with a gated hidden layer: y[q, h] = Σ_k w[h, q, k] silu(γ[q, k]) · υ[q, k].

    Here γ[q, k] = Σ_h' w[h', q, k] g[k, h'] and υ[q, k] = Σ_h' w[h', q, k] u[k, h'].

    Args:
      weights: [batch, heads, query, key].
      values: [batch, key, heads, 2·dim]: g, then u.
      products: how to compute them.

    Returns:
      [batch, query, heads, dim].

    Reference: arXiv 2002.05202 (SwiGLU), in the place of HYLA's relu.
    """
    gate, up = (_hidden(weights, part, products) for part in jnp.split(values, 2, axis=-1))
    return _readout(weights, _gated(gate, up), products)


def _gated(gate: Array, up: Array) -> Array:
    return jax.nn.silu(gate) * up


def _unchanged(hidden: Array) -> Array:
    return hidden


ACTIVATIONS: dict[str, Callable[..., Array]] = {
    "relu_values": jax.nn.relu,
    "linear_values": _unchanged,
    "gated_values": _gated,
}
"""What a network with a hidden layer makes of its sums over heads, entry by entry: a function of as many arrays as
there are sums. For code that computes the sums in another order (`blockwise.py`)."""


def _hidden(weights: Array, values: Array, products: Products) -> Array:
    """Σ_h w[h, q, k] v[k, h], [batch, key, query, dim]: what the heads make of each key, before any sum over keys."""
    return products.hidden(weights, values).astype(values.dtype)


def _readout(weights: Array, hidden: Array, products: Products) -> Array:
    """Σ_k w[h, q, k] hidden[k, q], [batch, query, heads, dim]."""
    return products.readout(weights, hidden).astype(hidden.dtype)
