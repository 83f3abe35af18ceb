"""What turns attention scores into weights: a normalisation over keys, over heads, or none.

Each function takes scores [batch, heads, query, key] and a mask that broadcasts to them (true: may be seen; None: all
may) and returns weights of the shape of the scores, in float32. A masked entry's weight is zero.

Reference: arXiv 2406.05816, Section 2.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

EPS = 1e-6
"""Added to the mean square over heads, so that a pair whose scores are all zero stays zero."""


def softmax_over_keys(scores: Array, mask: Array | None = None) -> Array:
    """Weights of one query and head are positive and sum to one over the keys it may see.

    Args:
      scores: [batch, heads, query, key].
      mask: broadcasts to scores; true where the query may see the key. A query that may see no key at all weighs all
        keys alike.

    Returns:
      [batch, heads, query, key], float32.
    """
    scores = scores.astype(jnp.float32)
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
    return jax.nn.softmax(scores, axis=-1)


def unnormalized(scores: Array, mask: Array | None = None) -> Array:
    """The scores themselves: linear attention.

    Args:
      scores: [batch, heads, query, key].
      mask: broadcasts to scores; true where the query may see the key.

    Returns:
      [batch, heads, query, key], float32.
    """
    scores = scores.astype(jnp.float32)
    return scores if mask is None else jnp.where(mask, scores, 0.0)


def rms_over_heads(scores: Array, mask: Array | None = None, eps: float = EPS) -> Array:
    """Scales scores so that their root mean square over heads is one, for each pair of query and key.

    Args:
      scores: [batch, heads, query, key].
      mask: broadcasts to scores; true where the query may see the key.
      eps: added to the mean square.

    Returns:
      [batch, heads, query, key], float32.

    Reference: arXiv 2406.05816, Section 2, HYLA's normalisation over heads.
    """
    scores = unnormalized(scores, mask)
    mean_square = jnp.mean(jnp.square(scores), axis=-3, keepdims=True)
    return scores * jax.lax.rsqrt(mean_square + eps)


def unnormalized_gradient(scores: Array, gradient: Array) -> Array:
    """What `unnormalized` makes of a gradient: nothing. Arguments as for `rms_over_heads_gradient`."""
    return gradient


def rms_over_heads_gradient(scores: Array, gradient: Array, eps: float = EPS) -> Array:
    """The gradient with respect to the scores, from the gradient with respect to the weights of `rms_over_heads`.

    With r = 1 / √(mean square + eps), it is r·g - s·r³·mean(s·g), means over heads.

    Args:
      scores: [batch, heads, query, key], masked entries already zero.
      gradient: of the shape of scores; masked entries are of no account, as nobody asks for theirs.
      eps: as for `rms_over_heads`.

    Returns:
      [batch, heads, query, key], float32.
    """
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(scores), axis=-3, keepdims=True) + eps)
    common = jnp.mean(scores * gradient, axis=-3, keepdims=True) * scale * scale * scale
    return gradient * scale - scores * common


GRADIENTS: dict[str, Callable[[Array, Array], Array]] = {
    "unnormalized": unnormalized_gradient,
    "rms_over_heads": rms_over_heads_gradient,
}
"""For each normalisation that looks at one pair of query and key at a time, how it hands a gradient back."""
