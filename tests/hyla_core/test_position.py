import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_cases import small_config

from hyla_core.position import PositionBias, RelativePositionBias, relative_position_buckets, sinusoidal_code


def bucket_by_hand(query: int, key: int, num_buckets: int) -> int:
    """The bucket of one pair, one direction, with as many buckets as distances."""
    distance = max(query - key, 0)
    exact = num_buckets // 2
    if distance < exact:
        return distance
    share = math.log(distance / exact) / math.log(num_buckets / exact)
    return min(num_buckets - 1, exact + int(share * (num_buckets - exact) + 1e-6))


@pytest.mark.parametrize("num_buckets", [2, 3, 6, 9])
def test_buckets_follow_their_definition(num_buckets):
    buckets = relative_position_buckets(13, num_buckets, num_buckets)
    expected = [[bucket_by_hand(query, key, num_buckets) for key in range(13)] for query in range(13)]
    np.testing.assert_array_equal(buckets, expected)
    assert buckets.max() == num_buckets - 1  # the table has as many columns, and all that is far is in the last


def test_later_keys_share_the_bucket_of_distance_zero():
    later = np.triu(np.ones((7, 7), dtype=bool))
    np.testing.assert_array_equal(relative_position_buckets(7, 6, 6)[later], 0)


def test_bidirectional_buckets_tell_before_from_after():
    buckets = relative_position_buckets(3, 8, 8, bidirectional=True)  # four each; distances 0 and 1 have their own
    np.testing.assert_array_equal(buckets, [[0, 5, 6], [1, 0, 5], [2, 1, 0]])


def test_bias_looks_up_the_table():
    module = RelativePositionBias(num_heads=2, max_distance=4)
    table = jnp.arange(8.0).reshape(2, 4)
    bias = module.apply({"params": {"rel_embedding": table}}).by_pair(3)
    # Buckets [[0, 0, 0], [1, 0, 0], [2, 1, 0]].
    expected = [[[[0, 0, 0], [1, 0, 0], [2, 1, 0]], [[4, 4, 4], [5, 4, 4], [6, 5, 4]]]]
    np.testing.assert_array_equal(bias, expected)


@pytest.mark.parametrize("num_buckets", [2, 5, 8])
def test_bias_by_offset_is_that_of_every_pair(num_buckets):
    bias = PositionBias(jnp.asarray(np.random.default_rng(0).normal(size=(3, num_buckets)), jnp.float32))
    by_offset, by_pair = bias.by_offset(13), bias.by_pair(13)
    assert by_offset.shape == (3, 25)
    for query, key in itertools.product(range(13), repeat=2):
        np.testing.assert_array_equal(by_offset[:, query - key + 12], by_pair[0, :, query, key])


def test_bias_table_starts_with_variance_one_over_buckets():
    module = RelativePositionBias(num_heads=50, max_distance=40)
    table = module.init(jax.random.key(0))["params"]["rel_embedding"]
    assert table.shape == (50, 40)
    assert float(jnp.std(table)) == pytest.approx(1 / math.sqrt(40), rel=0.1)


def test_sinusoidal_code_by_hand():
    # Frequencies 10000^(-i/2) for i = 0, 1, 2 are 1, 1/100 and 1/10000; sines first, then cosines.
    angle = 3 * np.array([1, 1 / 100, 1 / 10_000])
    expected = np.concatenate([np.sin(angle), np.cos(angle)])
    code = sinusoidal_code(4, 6)
    assert code.shape == (4, 6)
    np.testing.assert_allclose(code[3], expected, rtol=1e-6)


def test_sinusoidal_code_needs_an_even_width():
    with pytest.raises(ValueError, match="emb_dim=9 is odd"):
        small_config(emb_dim=9, num_heads=3, qk_dim=6, v_dim=6, absolute_position=True)


def test_sinusoidal_code_of_width_two_has_one_frequency():
    np.testing.assert_allclose(sinusoidal_code(2, 2), [[0, 1], [math.sin(1), math.cos(1)]], rtol=1e-6)
