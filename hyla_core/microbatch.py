"""A batch in pieces, so that what a step computes in between stays in a CPU's cache.

A step of the paper's smaller models is bound by memory: per example there are heads × seq² attention weights, in
several copies, and a CPU computes on them as fast as it can fetch them. In pieces that fit a core's cache, the
gradients of a batch took about half the time (`benchmarks/steps.py`). Accelerators want the opposite: as much at once
as there is.
"""

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from hyla_core.config import TrainConfig
from hyla_core.tasks import Batch

CACHE_BYTES = 2**20
"""Attention weights that a piece of a batch may have.

Measured on cores with 2 MiB of cache each: SRAVEN of 83 kB per example took least time with 8 to 16 examples a piece.
"""


def num_pieces(config: TrainConfig) -> int:
    """Into how many pieces of equal size a training's batches are cut on the default backend.

    Args:
      config: the training.

    Returns:
      A divisor of the batch size; 1 on accelerators, and where masks of dropout differ between examples.
    """
    c, size = config.model, config.optim.batch_size
    if jax.default_backend() != "cpu" or c.dropout:
        return 1
    example_bytes = 4 * c.num_heads * config.task.seq_len**2
    return next(pieces for pieces in range(1, size + 1) if not size % pieces and _fits(size // pieces, example_bytes))


def _fits(num_examples: int, example_bytes: int) -> bool:
    return num_examples == 1 or num_examples * example_bytes <= CACHE_BYTES


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

    # Two pieces in one turn of the loop depend on each other only where they are added up, so two cores share them.
    turns = 2 if len(os.sched_getaffinity(0)) > 1 else 1
    return jax.lax.scan(add, nothing, cut, unroll=turns)[0]
