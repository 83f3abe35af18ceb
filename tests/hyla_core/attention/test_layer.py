from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick_jit import quick_jit

from hyla_core.attention.layer import Attention
from hyla_core.attention.variants import VARIANTS, Variant
from hyla_core.position import PositionBias

BATCH, HEADS, SEQ = 2, 3, 5


@partial(jax.jit, static_argnums=0)
def drop(layer: Attention, params: dict[str, Any], inputs: jax.Array, bias: PositionBias, rng: jax.Array) -> jax.Array:
    return layer.apply({"params": params}, inputs, bias=bias, deterministic=False, rngs={"dropout": rng})


def dropped_weights(rng: jax.Array, rate: float) -> np.ndarray:
    """What is left of weights that are all one, [batch, heads, query, key].

    Scores are the bias alone, a one for each pair. The value of a key is its one-hot code, for every head, and each
    head's sum over keys goes to its own part of the output: so the output is the weights that the value network gets.
    """
    layer = Attention(Variant("unnormalized", "default_values"), HEADS, qk_dim=HEADS, v_dim=HEADS * SEQ, dropout=rate)
    emb_dim = HEADS * SEQ
    one_hot = jnp.broadcast_to(jnp.eye(SEQ, emb_dim), (BATCH, SEQ, emb_dim))
    code = jnp.broadcast_to(jnp.eye(emb_dim, SEQ)[:, None], (emb_dim, HEADS, SEQ))
    no_score = {"kernel": jnp.zeros((emb_dim, HEADS, 1)), "bias": jnp.zeros((HEADS, 1))}
    params = {
        "query": no_score,
        "key": no_score,
        "value": {"kernel": code, "bias": jnp.zeros((HEADS, SEQ))},
        "out": {"kernel": jnp.eye(emb_dim).reshape(HEADS, SEQ, emb_dim), "bias": jnp.zeros(emb_dim)},
    }
    bias = PositionBias(jnp.ones((HEADS, SEQ)))
    output = drop(layer, params, one_hot, bias, rng)
    return np.asarray(output).reshape(BATCH, SEQ, HEADS, SEQ).transpose(0, 2, 1, 3)


def test_one_dropout_mask_serves_all_examples_and_heads():
    weights = dropped_weights(jax.random.key(0), rate=0.5)
    assert set(np.unique(weights)) == {0.0, 2.0}  # kept ones make up for the dropped half
    np.testing.assert_array_equal(weights, np.broadcast_to(weights[:1, :1], weights.shape))
    # Not one decision for a whole row or column of pairs.
    assert len(np.unique(weights[0, 0], axis=0)) > 1
    assert len(np.unique(weights[0, 0], axis=1)) > 1


def test_dropout_mask_follows_the_key():
    first, again, other = (dropped_weights(jax.random.key(seed), rate=0.5) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_dropout_rate_is_the_share_of_dropped_pairs():
    dropped = np.mean([dropped_weights(jax.random.key(seed), rate=0.2)[0, 0] == 0 for seed in range(40)])
    assert dropped == pytest.approx(0.2, abs=0.05)  # 1000 pairs: four standard deviations


@pytest.mark.parametrize("name", VARIANTS)
def test_scores_and_weights_are_float32_when_activations_are_not(name):
    layer = Attention(VARIANTS[name], num_heads=2, qk_dim=8, v_dim=6, dtype="bfloat16")  # scores halved: exact
    inputs = np.random.default_rng(0).normal(size=(2, 5, 4)).astype(np.float32)

    @quick_jit
    def run(rng):
        params = layer.init(rng, inputs, deterministic=True)["params"]
        return layer.apply({"params": params}, inputs, deterministic=True, mutable="intermediates")

    output, state = run(jax.random.key(0))
    (weights,) = state["intermediates"]["attn_weights"]
    assert (output.dtype, weights.dtype) == (jnp.bfloat16, jnp.float32)
    rounded = np.asarray(weights.astype(jnp.bfloat16), np.float32)
    assert (rounded != np.asarray(weights)).any()  # not merely cast to float32 at the end
