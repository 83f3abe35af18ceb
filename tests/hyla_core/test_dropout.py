from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hyla_core import dropout

kept = jax.jit(dropout.kept, static_argnums=1)
kept_block = jax.jit(dropout.kept_block, static_argnums=(1, 2))

RATES = [0.0, 0.1, 1 / 3, 1 - 2**-24, 1e-9]


def whole(rng, rate, shape):
    return np.asarray(jax.random.bernoulli(rng, 1 - rate, shape))


def index_of(shape):
    return jnp.arange(np.prod(shape), dtype=jnp.uint32).reshape(shape)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("shape", [(5,), (2, 3, 5, 7)])
def test_kept_is_what_bernoulli_draws(rate, shape):
    for seed in (0, 1, 2**31 + 5):
        np.testing.assert_array_equal(
            kept(jax.random.key(seed), rate, index_of(shape)), whole(jax.random.key(seed), rate, shape)
        )


def test_kept_tells_both_sides_of_the_limit_apart():
    shape = (256, 256)
    bits = np.asarray(jax.random.bits(jax.random.key(7), shape))
    for place in (3, 1000, 65535):
        number = (int(bits.flat[place]) >> 9) / 2**23
        for above in (number, number + 2**-40, number + 2**-24, number + 2**-23):
            drawn = whole(jax.random.key(7), 1 - above, shape)
            np.testing.assert_array_equal(kept(jax.random.key(7), 1 - above, index_of(shape)), drawn)


def test_kept_is_what_flax_drops():
    rng, values = jax.random.key(3), jnp.ones((2, 3, 11, 13))
    for rate in (0.0, 0.3, 1.0):
        dropped = nn.Dropout(rate, broadcast_dims=(0, 1)).apply({}, values, deterministic=False, rng=rng)
        ours = kept(rng, rate, index_of((11, 13)))
        np.testing.assert_array_equal(np.broadcast_to(ours, values.shape), dropped != 0)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_a_block_is_its_part_of_the_whole(rate):
    shape, rng = (41, 29), jax.random.key(5)
    expected = whole(rng, rate, shape)
    for rows, columns in [(slice(0, 41), slice(0, 29)), (slice(8, 16), slice(20, 29)), (slice(40, 41), slice(3, 4))]:
        block = kept_block(rng, rate, shape, jnp.arange(41)[rows], jnp.arange(29)[columns])
        np.testing.assert_array_equal(block, expected[rows, columns])


def test_last_places_of_the_largest_matrix_differ_from_all_others():
    shape = (2**16, 2**16)
    last = kept_block(jax.random.key(0), 0.5, shape, jnp.arange(2**16 - 8, 2**16), jnp.arange(2**16))
    first = kept_block(jax.random.key(0), 0.5, shape, jnp.arange(8), jnp.arange(2**16))
    assert np.mean(np.asarray(last) == np.asarray(first)) == pytest.approx(0.5, abs=0.01)
    with pytest.raises(ValueError, match=r"shape=\(65536, 65537\) has more than 2\*\*32 entries"):
        kept_block(jax.random.key(0), 0.5, (2**16, 2**16 + 1), jnp.arange(8), jnp.arange(8))


def test_blocks_under_jit_map_and_scan_make_up_the_whole():
    shape, rng = (24, 35), jax.random.key(9)
    expected = whole(rng, 0.25, shape)
    rows = jnp.arange(24).reshape(6, 4)
    block = partial(dropout.kept_block, rate=0.25, shape=shape, columns=jnp.arange(35))

    @jax.jit
    def mapped(rng):
        return jax.lax.map(lambda part: block(rng, rows=part), rows).reshape(shape)

    @jax.jit
    def scanned(rng):
        return jax.lax.scan(lambda carry, part: (carry, block(rng, rows=part)), 0, rows)[1].reshape(shape)

    np.testing.assert_array_equal(mapped(rng), expected)
    np.testing.assert_array_equal(scanned(rng), expected)
    np.testing.assert_array_equal(jax.vmap(lambda part: block(rng, rows=part))(rows).reshape(shape), expected)


def test_each_key_of_a_vmap_has_its_own_mask():
    rngs = jax.random.split(jax.random.key(1), 3)
    index = index_of((6, 7))
    masks = jax.jit(jax.vmap(lambda rng: dropout.kept(rng, 0.5, index)))(rngs)
    for rng, mask in zip(rngs, masks, strict=True):
        np.testing.assert_array_equal(mask, whole(rng, 0.5, (6, 7)))


def test_old_style_keys_give_the_same_numbers():
    np.testing.assert_array_equal(
        kept(jax.random.PRNGKey(4), 0.5, index_of((5, 7))), whole(jax.random.PRNGKey(4), 0.5, (5, 7))
    )


def test_other_generators_are_refused():
    index = index_of((5, 7))
    for name in ("rbg", "unsafe_rbg"):
        with pytest.raises(ValueError, match=f"no generator '{name}'; choose jax's default"):
            kept(jax.random.key(0, impl=name), 0.5, index)
    with jax.threefry_partitionable(False), pytest.raises(ValueError, match="jax_threefry_partitionable=False"):
        kept(jax.random.key(0), 0.5, index)
    with pytest.raises(ValueError, match="takes one key, not an array of keys of shape"):
        kept(jax.random.split(jax.random.key(0)), 0.5, index)
    with pytest.raises(ValueError, match=r"rate=1\.5 is out of range; choose from 0 to 1"):
        kept(jax.random.key(0), 1.5, index)
