"""The kernels, interpreted, against attention from all pairs: values and gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import DROPOUT, RTOL, assert_equal, cosine_variant, from_all_pairs, random_inputs, with_gradients

from hyla_core import choice
from hyla_core.attention import blockwise, blockwise_pallas
from hyla_core.attention.layer import Attention
from hyla_core.attention.variants import VARIANTS
from hyla_core.choice import Blocks

SEQ = 21  # two blocks of 16, the second one not full

CASES = {
    "hyla": {"rng": jax.random.key(3)},
    "hyla_gated": {"causal": True, "rng": jax.random.key(3)},
    "hyla_linear_no_rms": {"causal": True},
    "linear_rms": {"rng": jax.random.key(3)},
    "linear": {},
}


def by_kernels(variant, inputs, *, rng=None, **options):
    query, key, value, offset_bias = inputs
    dropout = {} if rng is None else {"dropout": DROPOUT, "rng": rng}
    options = {"interpret": True, "offset_bias": offset_bias, **dropout, **options}
    return blockwise_pallas.attend(variant, query, key, value, **options)


def assert_kernels_agree(variant, inputs, rtol=RTOL, **options):
    ours = with_gradients(lambda inputs: by_kernels(variant, inputs, **options), variant, inputs)
    expected = with_gradients(lambda inputs: from_all_pairs(variant, inputs, **options), variant, inputs)
    assert_equal(ours, expected, rtol)


@pytest.mark.parametrize(
    "name", ["hyla", *(pytest.param(name, marks=pytest.mark.slow) for name in CASES if name != "hyla")]
)
def test_kernels_agree_with_all_pairs(name):
    assert_kernels_agree(VARIANTS[name], random_inputs(VARIANTS[name], seq_len=SEQ), **CASES[name])


def test_kernels_agree_without_a_bias():
    assert_kernels_agree(VARIANTS["hyla"], random_inputs(VARIANTS["hyla"], seq_len=SEQ, bias=False), causal=True)


def test_what_fills_up_the_last_block_is_not_seen(monkeypatch):
    variant = cosine_variant(monkeypatch)
    assert_kernels_agree(variant, random_inputs(variant, seq_len=SEQ))


def test_kernels_round_to_bfloat16_where_all_pairs_do():
    # As in test_blockwise.py: a step of 8 bits.
    inputs = random_inputs(VARIANTS["hyla"], "bfloat16", seq_len=SEQ)
    assert_kernels_agree(VARIANTS["hyla"], inputs, rtol=2**-7, rng=jax.random.key(3))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_kernels_are_translated_for_gpus(name, dtype):
    """To Triton's language, which knows fewer operations than the interpreter; what it makes of them needs a GPU."""
    inputs = random_inputs(VARIANTS[name], dtype, seq_len=SEQ)

    def loss(inputs):
        return by_kernels(VARIANTS[name], inputs, interpret=False, **CASES[name]).astype(jnp.float32).sum()

    lowered = jax.jit(jax.grad(loss)).trace(inputs).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("__gpu$xla.gpu.triton") >= 3


@pytest.mark.parametrize(
    ("use", "backend", "masked", "expected"),
    [
        (False, "gpu", False, "blockwise"),
        (True, "gpu", False, "kernel"),
        (True, "gpu", True, "blockwise"),
        (True, "cpu", False, "blockwise"),
    ],
)
def test_kernels_are_taken_on_gpus_without_a_mask_when_asked_for(use, backend, masked, expected, monkeypatch):
    taken = []
    for name, module in (("blockwise", blockwise), ("kernel", blockwise_pallas)):
        monkeypatch.setattr(module, "attend", lambda _, query, *__, name=name, **___: taken.append(name) or query)
    monkeypatch.setattr(choice, "USE_KERNEL", use)
    monkeypatch.setattr(choice, "blocks", lambda *_: Blocks(4, 4))
    layer = Attention(VARIANTS["hyla"], num_heads=1, qk_dim=2, v_dim=2)
    inputs, mask = jnp.ones((1, 6, 2)), jnp.ones((6, 6), bool) if masked else None
    params = jax.eval_shape(partial(layer.init, deterministic=True), jax.random.key(0), inputs)
    taken.clear()
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    jax.eval_shape(partial(layer.apply, mask=mask, deterministic=True), params, inputs)
    assert taken == [expected]


def test_a_normalisation_over_keys_is_refused():
    with pytest.raises(ValueError, match="normalize='softmax_over_keys' looks at more than one pair"):
        by_kernels(VARIANTS["softmax"], random_inputs(VARIANTS["softmax"]))


def test_sums_of_diagonals_overlap():
    sums = np.zeros((3, 1, 32), np.float32)
    sums[0, 0, 20], sums[1, 0, 4], sums[2, 0, 31] = 1.0, 2.0, 4.0  # offsets 20, 16 + 4, and 32 + 31
    total = np.zeros((1, 64))
    total[0, 20], total[0, 63] = 3.0, 4.0
    np.testing.assert_array_equal(blockwise_pallas._overlapping_sum(jnp.asarray(sums)), total)
