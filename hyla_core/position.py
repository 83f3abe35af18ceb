"""Where a position is: T5's relative position biases and the sinusoidal code."""

from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax import Array


def relative_position_buckets(
    seq_len: int, num_buckets: int, max_distance: int, *, bidirectional: bool = False
) -> np.ndarray:
    """The bucket of every pair of positions: near distances have one each, far ones share logarithmically wider ones.

    Let n = max(query - key, 0), zero for all later keys, and exact = num_buckets // 2. A distance below `exact`
    is its own bucket; another falls into exact + ln(n / exact) / ln(max_distance / exact) · (num_buckets - exact),
    rounded down, or into the last bucket if that is past it. If bidirectional, n = |query - key|, and the first half of
    the buckets is for keys up to the query, the second half for later ones.

    Args:
      seq_len: number of positions.
      num_buckets: number of buckets.
      max_distance: distance from which on all share the last bucket; more than num_buckets // 2.
      bidirectional: whether later keys have buckets of their own.

    Returns:
      int32 [query, key].

    Reference: arXiv 1910.10683, Section 2.1. Models of arXiv 2406.05816 use one direction, with a causal mask or not.
    """
    position = np.arange(seq_len, dtype=np.int32)
    offsets = position[:, None] - position[None, :]
    return _buckets(offsets, num_buckets, max_distance, bidirectional)


def _buckets(offsets: np.ndarray, num_buckets: int, max_distance: int, bidirectional: bool) -> np.ndarray:
    """The bucket of each offset of a query's position from a key's; arguments as for `relative_position_buckets`."""
    distance = offsets
    first = np.zeros_like(distance)
    if bidirectional:
        num_buckets //= 2
        first = np.where(distance < 0, num_buckets, 0)
        distance = np.abs(distance)
    distance = np.maximum(distance, 0)
    exact = num_buckets // 2
    # float32 as in the official code: at the edge of a bucket the rounding decides.
    ratio = np.maximum(distance, 1).astype(np.float32) / np.float32(exact)
    share = np.log(ratio) / np.float32(np.log(max_distance / exact))
    far_bucket = exact + (share * np.float32(num_buckets - exact)).astype(np.int32)
    return (first + np.where(distance < exact, distance, np.minimum(far_bucket, num_buckets - 1))).astype(np.int32)


class PositionBias(NamedTuple):
    """A bias of each head for each bucket of relative positions, as many buckets as distances."""

    table: Array  # [heads, buckets], float32

    def by_pair(self, seq_len: int) -> Array:
        """The biases of all pairs of positions, [1, heads, query, key]."""
        num_buckets = self.table.shape[1]
        return self.table[None, :, relative_position_buckets(seq_len, num_buckets, num_buckets)]

    def by_offset(self, seq_len: int) -> Array:
        """The biases by the query's position less the key's, from 1 - seq_len on: [heads, 2·seq_len - 1]."""
        num_buckets = self.table.shape[1]
        offsets = np.arange(1 - seq_len, seq_len, dtype=np.int32)
        return self.table[:, _buckets(offsets, num_buckets, num_buckets, bidirectional=False)]


class RelativePositionBias(nn.Module):
    """A learned bias of each head for each bucket of relative positions.

    Attributes:
      num_heads: number of heads.
      max_distance: number of buckets, and the distance from which on all share the last one.
    """

    num_heads: int
    max_distance: int

    @nn.compact
    def __call__(self) -> PositionBias:
        """The table, which looks up the biases for a sequence."""
        shape = self.num_heads, self.max_distance
        return PositionBias(self.param("rel_embedding", nn.linear.default_embed_init, shape, jnp.float32))


def sinusoidal_code(seq_len: int, dim: int) -> np.ndarray:
    """The code [sin(p·f_i), cos(p·f_i)] of each position p, with f_i = 10000^(-i / (dim/2 - 1)).

    Args:
      seq_len: number of positions.
      dim: width of the code, an even number; sines take the first half, cosines the second.

    Returns:
      float32 [seq, dim].

    Reference: arXiv 1706.03762, Section 3.5, with the halves concatenated instead of interleaved.
    """
    num_frequencies = dim // 2
    frequency = 10_000.0 ** (-np.arange(num_frequencies) / max(num_frequencies - 1, 1))
    angle = np.arange(seq_len)[:, None] * frequency
    return np.concatenate([np.sin(angle), np.cos(angle)], axis=-1).astype(np.float32)
