"""Dropout masks by counter: whether an entry is kept follows from the key and from its place alone.

So each block of a matrix, or each chunk of a batch, can make its own part of a mask that never exists as a whole. The
masks are, bit for bit, those of flax's `nn.Dropout`, which asks `jax.random.bernoulli` for a whole array at once.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

MAX_INDEX = 2**32
"""Entries that can be told apart. A square of 65,536 positions just fits."""

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def kept(rng: Array, rate: float, index: Array) -> Array:
    """Which entries of an array dropout keeps, as `jax.random.bernoulli(rng, 1 - rate, shape)` decides for all of them.

    Written out in operations on whole numbers, which are fused with what uses the mask. The primitive that draws JAX's
    bits is a loop of its own on CPUs: a mask of 1,024 × 1,024 took 11 ms by it and 1.4 ms by this.

    Args:
      rng: one key of JAX's default generator, new style or two words uint32; may be traced.
      rate: share of the entries that are dropped, between 0 and 1.
      index: uint32, any shape: places in the flattened array, below MAX_INDEX. Beyond it, indices would wrap around
        and masks repeat; who makes the indices has to look after that, as `kept_block` does.

    Returns:
      bool, of the shape of index.

    Raises:
      ValueError: another generator, whose bits do not follow from places, or more than one key.

    Reference: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011), Threefry-2x32 of 20 rounds.
    """
    return kept_by_words(*key_words(rng), rate, index)


def kept_block(rng: Array, rate: float, shape: tuple[int, int], rows: Array, columns: Array) -> Array:
    """`kept` for the places in some rows and columns of a matrix.

    Args:
      rng: as for `kept`.
      rate: as for `kept`.
      shape: rows and columns of the whole matrix, together no more than MAX_INDEX entries.
      rows: integers [rows of the block]; may be traced. Those outside the matrix get a decision without a meaning.
      columns: integers [columns of the block], likewise.

    Returns:
      bool [rows of the block, columns of the block].

    Raises:
      ValueError: the matrix has more than MAX_INDEX entries, or as for `kept`.
    """
    return kept(rng, rate, block_index(shape, rows[:, None], columns[None, :]))


def block_index(shape: tuple[int, int], rows: Array, columns: Array) -> Array:
    """Places in the flattened matrix, uint32, for rows and columns that broadcast to each other.

    Raises:
      ValueError: the matrix has more than MAX_INDEX entries.
    """
    if math.prod(shape) > MAX_INDEX:
        raise ValueError(f"a dropout mask of shape={shape} has more than 2**32 entries; choose a shorter sequence")
    return rows.astype(jnp.uint32) * np.uint32(shape[1]) + columns.astype(jnp.uint32)


def key_words(rng: Array) -> tuple[Array, Array]:
    """The two words, uint32, of a key.

    Raises:
      ValueError: as for `kept`.
    """
    name = str(jax.random.key_impl(rng))
    if name != "threefry2x32" or not jax.config.jax_threefry_partitionable:  # type: ignore[attr-defined]
        found = name if name != "threefry2x32" else "threefry2x32 with jax_threefry_partitionable=False"
        raise ValueError(f"dropout by counter has no generator {found!r}; choose jax's default, 'threefry2x32'")
    words = jax.random.key_data(rng) if jnp.issubdtype(rng.dtype, jax.dtypes.prng_key) else rng
    if words.shape != (2,):
        raise ValueError(f"dropout by counter takes one key, not an array of keys of shape {rng.shape}")
    return words[0], words[1]


def kept_by_words(first: Array, second: Array, rate: float, index: Array) -> Array:
    """`kept`, given the two words of the key: for code that cannot take a key apart, such as a kernel."""
    if not 0 <= rate <= 1:
        raise ValueError(f"dropout rate={rate} is out of range; choose from 0 to 1")
    if rate == 1:  # nn.Dropout asks nobody then
        return jnp.zeros(index.shape, bool)
    # bernoulli makes its number from the upper 23 bits, m / 2**23, and keeps it below the float32 nearest to 1 - rate.
    limit = math.ceil(float(np.float32(1 - rate)) * 2**23)
    return (_threefry_bits(first, second, index) >> np.uint32(9)) < np.uint32(limit)


def _threefry_bits(first: Array, second: Array, index: Array) -> Array:
    """The 32 bits that `jax.random.bits` has at each place."""
    keys = (first, second, first ^ second ^ np.uint32(_PARITY))
    # The counter has 64 bits; of places below MAX_INDEX the upper word is zero.
    left, right = keys[0], index + keys[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            left = left + right
            right = (right << np.uint32(rotation)) | (right >> np.uint32(32 - rotation))
            right = right ^ left
        left = left + keys[(group + 1) % 3]
        right = right + keys[(group + 2) % 3] + np.uint32(group + 1)
    return left ^ right
