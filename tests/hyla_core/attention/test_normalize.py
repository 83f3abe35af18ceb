import jax.numpy as jnp
import numpy as np
import pytest

from hyla_core.attention.normalize import rms_over_heads, softmax_over_keys, unnormalized

NORMALIZATIONS = [softmax_over_keys, unnormalized, rms_over_heads]


def scores_and_mask() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    mask = rng.random((2, 1, 5, 7)) < 0.6
    mask[..., 0] = True  # every query sees a key
    return rng.normal(size=(2, 3, 5, 7)).astype(np.float32), mask


def test_rms_over_heads_normalises_each_pair():
    scores = jnp.array([3.0, 4.0]).reshape(1, 2, 1, 1)  # two heads, one pair: root mean square sqrt(12.5)
    expected = np.array([3.0, 4.0]).reshape(1, 2, 1, 1) / np.sqrt(12.5)
    np.testing.assert_allclose(rms_over_heads(scores), expected, rtol=1e-6)


def test_rms_over_heads_has_root_mean_square_one_over_the_head_axis():
    scores, _ = scores_and_mask()
    mean_square = np.mean(np.square(rms_over_heads(scores)), axis=1)
    np.testing.assert_allclose(mean_square, np.ones((2, 5, 7)), atol=1e-3)  # eps takes a little where scores are small


def test_softmax_over_keys_by_hand():
    scores = jnp.log(jnp.array([1.0, 2.0, 5.0])).reshape(1, 1, 1, 3)
    mask = jnp.array([True, True, False])
    np.testing.assert_allclose(softmax_over_keys(scores).ravel(), [1 / 8, 2 / 8, 5 / 8], rtol=1e-6)
    np.testing.assert_allclose(softmax_over_keys(scores, mask).ravel(), [1 / 3, 2 / 3, 0], rtol=1e-6)


def test_unnormalized_leaves_the_scores_alone():
    scores, _ = scores_and_mask()
    np.testing.assert_array_equal(unnormalized(scores), scores)


@pytest.mark.parametrize("normalize", NORMALIZATIONS)
def test_masked_entries_weigh_nothing_and_sway_nothing(normalize):
    scores, mask = scores_and_mask()
    weights = normalize(scores, mask)
    assert weights.shape == scores.shape
    np.testing.assert_array_equal(np.where(mask, 0, weights), 0)
    elsewhere = np.where(mask, scores, 1e6).astype(np.float32)
    np.testing.assert_array_equal(normalize(elsewhere, mask), weights)


@pytest.mark.parametrize("normalize", NORMALIZATIONS)
def test_weights_are_float32_whatever_the_scores_are(normalize):
    scores, mask = scores_and_mask()
    assert normalize(jnp.asarray(scores, jnp.bfloat16), mask).dtype == jnp.float32
