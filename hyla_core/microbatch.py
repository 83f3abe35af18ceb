"""A batch in pieces, so that what a step computes in between stays in a CPU's cache.

A step of the paper's smaller models is bound by memory: per example there are heads × seq² attention weights, in
several copies, and a CPU computes on them as fast as it can fetch them. In pieces that fit a core's cache, the
gradients of a batch took about half the time (`benchmarks/steps.py`). Accelerators want the opposite: as much at once
as there is.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from hyla_core import choice
from hyla_core.tasks import Batch


def gradient(
    sums: Callable[[Any, Batch], tuple[Array, dict[str, Array]]], params: Any, batch: Batch, pieces: int
) -> tuple[Any, dict[str, Array]]:
    """The gradient of a sum over a batch, and other sums, piece by piece.

    Args:
      sums: maps parameters and some examples to the loss summed over them, and whatever else is summed.
      params: a tree of arrays.
      batch: leaves [batch, …].
      pieces: a divisor of batch.

    Returns:
      The gradient of the loss of the whole batch with respect to params, and the other sums.
    """
    one = jax.grad(sums, has_aux=True)
    if pieces == 1:
        return one(params, batch)
    cut = jax.tree.map(lambda leaf: jnp.reshape(leaf, (pieces, -1, *leaf.shape[1:])), batch)
    described = jax.eval_shape(one, params, jax.tree.map(lambda leaf: leaf[0], cut))
    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), described)

    def add(total: Any, piece: Batch) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, one(params, piece)), None

    # Pieces in one turn of the loop depend on each other only where they are added up, so that cores share them. How
    # many cores there are does not matter: one program for all machines is one result, and one entry of a cache.
    return jax.lax.scan(add, nothing, cut, unroll=choice.PIECES_AT_ONCE)[0]
