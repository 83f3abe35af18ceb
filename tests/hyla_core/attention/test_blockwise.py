"""Attention in blocks against attention from all pairs: values and gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    DROPOUT,
    HEADS,
    PAIRWISE,
    RTOL,
    SEQ,
    Inputs,
    assert_equal,
    cosine_variant,
    from_all_pairs,
    random_inputs,
    random_mask,
    with_gradients,
)
from golden_files import flattened
from jaxprs import equations
from model_cases import small_config
from quick_jit import quick_jit

from hyla_core import choice
from hyla_core.attention import blockwise, normalize
from hyla_core.attention.layer import Attention
from hyla_core.attention.variants import VARIANTS, Variant
from hyla_core.choice import Blocks
from hyla_core.model import apply, attention_weights, init_params

UNEVEN = Blocks(4, 5)  # neither divides the sequence, and neither divides the other


def in_blocks(variant, inputs, *, blocks=UNEVEN, rng=None, **options):
    query, key, value, offset_bias = inputs
    dropout = {} if rng is None else {"dropout": DROPOUT, "rng": rng}
    return blockwise.attend(variant, query, key, value, offset_bias=offset_bias, blocks=blocks, **dropout, **options)


def assert_blocks_agree(variant, inputs, *, blocks=UNEVEN, rtol=RTOL, **options):
    ours = with_gradients(lambda inputs: in_blocks(variant, inputs, blocks=blocks, **options), variant, inputs)
    expected = with_gradients(lambda inputs: from_all_pairs(variant, inputs, **options), variant, inputs)
    assert_equal(ours, expected, rtol)


@pytest.mark.parametrize("name", PAIRWISE)
def test_blocks_agree_with_all_pairs_for_every_variant_that_allows_them(name):
    options = {"causal": True, "mask": random_mask(2, 1, SEQ, SEQ), "rng": jax.random.key(3)}
    assert_blocks_agree(VARIANTS[name], random_inputs(VARIANTS[name]), **options)


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "dropout": {"rng": jax.random.key(3)},
    "mask_of_keys": {"mask": random_mask(2, 1, 1, SEQ)},
    "mask_of_queries_and_heads": {"mask": random_mask(1, HEADS, SEQ, 1)},
    "mask_of_all": {"mask": random_mask(2, HEADS, SEQ, SEQ)},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_blocks_agree_with_all_pairs_with_every_option(option):
    assert_blocks_agree(VARIANTS["hyla"], random_inputs(VARIANTS["hyla"]), **OPTIONS[option])


@pytest.mark.parametrize("blocks", [(1, 1), (13, 13), (6, 3), (3, 7), (64, 64)], ids=str)
def test_blocks_of_every_size_agree_with_all_pairs(blocks):
    options = {"causal": True, "rng": jax.random.key(3)}
    assert_blocks_agree(VARIANTS["hyla"], random_inputs(VARIANTS["hyla"]), blocks=Blocks(*blocks), **options)


def test_what_fills_up_the_last_block_is_not_seen(monkeypatch):
    variant = cosine_variant(monkeypatch)
    assert_blocks_agree(variant, random_inputs(variant))


def test_blocks_agree_without_a_bias_and_side_by_side(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")  # where examples of a batch are computed together
    mask = random_mask(2, 1, SEQ, SEQ)
    # Traced under that name, and compiled for the CPU that there is.
    assert_blocks_agree(VARIANTS["hyla_gated"], random_inputs(VARIANTS["hyla_gated"], bias=False), mask=mask)


@pytest.mark.parametrize(
    "name", ["hyla", *(pytest.param(name, marks=pytest.mark.slow) for name in ("hyla_gated", "linear_rms"))]
)
def test_blocks_round_to_bfloat16_where_all_pairs_do(name):
    variant = VARIANTS[name]
    inputs = random_inputs(variant, "bfloat16")
    # Results are rounded to 8 bits, so sums in another order may come out one step apart, 2^-8.
    assert_blocks_agree(variant, inputs, rtol=2**-7, causal=True, rng=jax.random.key(3))
    in_float32 = Inputs(*(array.astype(jnp.float32) for array in inputs))
    ours, exact = (
        with_gradients(lambda given: in_blocks(variant, given), variant, given)["out"] for given in (inputs, in_float32)
    )
    assert np.abs(ours - exact).max() > 1e-4 * np.abs(exact).max()  # weights and hidden layer are rounded


def test_gradients_are_summed_in_float32_over_blocks():
    # 512 queries add the same 1.0 to a value's gradient: in bfloat16 the sum would stop growing at 256.
    variant, seq_len = VARIANTS["linear"], 512
    ones = jnp.ones((1, seq_len, 1, 1), jnp.bfloat16)

    @jax.jit
    def of_value(value):
        return in_blocks(variant, Inputs(ones, ones, value, None), blocks=Blocks(1, 64)).sum()

    grad = jax.grad(of_value)(ones)
    np.testing.assert_array_equal(grad.astype(jnp.float32), np.full(ones.shape, 512.0))


def test_nothing_grows_with_the_square_of_the_sequence():
    variant, seq_len = VARIANTS["hyla"], 256
    inputs = random_inputs(variant, seq_len=seq_len)

    def loss(inputs):
        options = {"blocks": Blocks(8, 16), "causal": True, "rng": jax.random.key(0)}
        return in_blocks(variant, inputs, **options).sum()

    traced = jax.make_jaxpr(jax.grad(loss))(inputs).jaxpr
    sizes = [var.aval.size for equation in equations(traced) for var in equation.outvars]
    assert max(sizes) < seq_len**2 // 2
    assert max(sizes) >= inputs.value.size  # it did look into the loops


def test_queries_see_no_later_key():
    variant = VARIANTS["hyla_linear"]
    inputs = random_inputs(variant)

    def of_first_queries(value):
        return in_blocks(variant, inputs._replace(value=value), causal=True)[:, :6].sum()

    grads = np.abs(quick_jit(jax.grad(of_first_queries))(inputs.value)).max(axis=(0, 2, 3))
    assert (grads[:6] > 0).all()
    assert (grads[6:] == 0).all()


def test_a_normalisation_over_keys_is_refused():
    variant = VARIANTS["hyla_softmax"]
    message = r"normalize='softmax_over_keys' looks at more than one pair .* choose one of \['unnormalized', 'rms"
    with pytest.raises(ValueError, match=message):
        in_blocks(variant, random_inputs(variant))


def test_an_unknown_hidden_layer_is_refused():
    variant = Variant("unnormalized", "tanh_values", num_hidden=1)
    with pytest.raises(ValueError, match=r"values='tanh_values' is unknown in blocks; choose one of \['relu_values'"):
        in_blocks(variant, random_inputs(variant))


def test_other_generators_are_refused_rather_than_drawing_other_masks():
    variant = VARIANTS["hyla"]
    with pytest.raises(ValueError, match="no generator 'rbg'"):
        in_blocks(variant, random_inputs(variant), rng=jax.random.key(0, impl="rbg"))


@pytest.mark.parametrize("normalization", normalize.GRADIENTS)
def test_gradient_of_a_normalisation_is_its_derivative(normalization):
    scores, gradient = np.random.default_rng(0).normal(size=(2, 2, 3, 5, 7)).astype(np.float32)
    _, pull_back = jax.vjp(getattr(normalize, normalization), scores)
    np.testing.assert_allclose(normalize.GRADIENTS[normalization](scores, gradient), pull_back(gradient)[0], atol=1e-6)


# ---------------------------------------------------------------------------------------------- in the model


@pytest.fixture
def always_in_blocks(monkeypatch):
    """Blocks of 4 × 5 pairs, however short the sequence is, where the variant allows them; counts their use."""
    used = []

    def attend(*args, **options):
        used.append(args[0])
        return blockwise_attend(*args, **options)

    blockwise_attend = blockwise.attend
    monkeypatch.setattr(blockwise, "attend", attend)
    monkeypatch.setattr(choice, "blocks", lambda variant, *_: UNEVEN if variant.is_pairwise else None)
    return used


def loss_and_gradients(config, params, inputs, rng):
    def loss(params):
        logits = apply(config, params, inputs, dropout_rng=rng)
        return (logits * jnp.arange(1, 1 + logits.size).reshape(logits.shape) / logits.size).sum()

    return quick_jit(jax.value_and_grad(loss))(params)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"dropout": 0.2, "attention_dropout": 0.3}, marks=pytest.mark.slow),
        {"causal": True, "attention_dropout": 0.3, "share_layers": True},
        pytest.param(
            {"attention": "hyla_gated", "normalize_qk": True, "attention_dropout": 0.3}, marks=pytest.mark.slow
        ),
        {"attention": "softmax", "attention_dropout": 0.3},
        pytest.param({"relative_position": False, "absolute_position": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_model_in_blocks_has_the_same_loss_and_gradients(options, request):
    config = small_config(**options)
    params = quick_jit(lambda rng: init_params(config, rng))(jax.random.key(0))
    shape = 3, config.task.seq_len, config.task.input_dim
    inputs = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    expected_loss, expected = loss_and_gradients(config, params, inputs, jax.random.key(7))
    used = request.getfixturevalue("always_in_blocks")
    loss, grads = loss_and_gradients(config, params, inputs, jax.random.key(7))
    assert len(used) == (0 if options.get("attention") == "softmax" else config.model.num_layers)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    # Queries and keys of a few numbers, normalised, amplify rounding: 1e-7 in an input is 2e-4 in gradients.
    tolerance = 1e-3 if options.get("normalize_qk") else 5e-5
    for name, grad in flattened(grads).items():
        largest = np.abs(flattened(expected)[name]).max()
        np.testing.assert_allclose(
            grad, flattened(expected)[name], rtol=0, atol=tolerance * largest + 1e-6, err_msg=name
        )


def test_parameters_are_drawn_alike_in_blocks(request):
    config = small_config()
    expected = quick_jit(lambda rng: init_params(config, rng))(jax.random.key(0))
    request.getfixturevalue("always_in_blocks")
    ours = quick_jit(lambda rng: init_params(config, rng))(jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, ours, expected)


def test_who_asks_for_attention_weights_gets_those_of_all_pairs(always_in_blocks):
    config = small_config()
    params = quick_jit(lambda rng: init_params(config, rng))(jax.random.key(0))
    always_in_blocks.clear()
    inputs = jnp.ones((3, config.task.seq_len, config.task.input_dim))
    weights = quick_jit(partial(attention_weights, config))(params, inputs)
    assert not always_in_blocks
    assert [array.shape for array in weights] == 2 * [(3, 2, 9, 9)]


@pytest.mark.parametrize(("name", "shortest"), [("hyla", 128), ("linear", 256), ("softmax", None)])
def test_only_long_sequences_pass_in_blocks(name, shortest, monkeypatch):
    calls = []
    monkeypatch.setattr(blockwise, "attend", lambda variant, query, *_, **__: calls.append(query.shape[1]) or query)
    layer = Attention(VARIANTS[name], num_heads=1, qk_dim=2, v_dim=2)
    for seq_len in (127, 128, 255, 256, 2048):
        inputs = jnp.ones((1, seq_len, 2))
        params = jax.eval_shape(partial(layer.init, deterministic=True), jax.random.key(0), inputs)
        calls.clear()
        jax.eval_shape(partial(layer.apply, deterministic=True), params, inputs)
        assert calls == ([seq_len] if shortest and seq_len >= shortest else [])


@pytest.mark.parametrize("seq_len", [128, 129, 200, 1000, 1024])
@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_blocks_are_of_equal_size_and_little_is_filled_up(seq_len, backend):
    sizes = choice.blocks(VARIANTS["hyla"], seq_len, backend)
    if seq_len < choice.min_seq_len(VARIANTS["hyla"], backend):
        assert sizes is None
    else:
        assert sizes.queries == sizes.keys <= 128
        assert -(-seq_len // sizes.keys) * sizes.keys - seq_len < -(-seq_len // sizes.keys)
