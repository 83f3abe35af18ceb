import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_files import flattened
from jaxprs import equations
from model_cases import MODEL_OPTIONS, small_config
from quick_jit import quick_jit

from hyla_core.attention import layer
from hyla_core.attention.products import EINSUM
from hyla_core.attention.variants import VARIANTS
from hyla_core.config import TrainConfig
from hyla_core.model import Transformer, apply, attention_weights, init_params

SEQ, INPUT_DIM, OUTPUT_DIM = 9, 5, 5  # of small_config's task


def batch(size: int = 2, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(size, SEQ, INPUT_DIM)).astype(np.float32)


def random_params(config: TrainConfig, seed: int = 0) -> dict[str, Any]:
    """Parameters all of which matter: as drawn by init_params, biases are zero and would hide mistakes."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(partial(init_params, config), jax.random.key(0))
    return jax.tree.map(lambda leaf: rng.normal(scale=0.4, size=leaf.shape).astype(leaf.dtype), shapes)


@cache
def causal_logits_and_jacobian(attention: str) -> Callable[..., Any]:
    """Of (params, inputs [seq, input_dim]): logits [seq, output_dim] and [seq, output_dim, seq, input_dim]."""
    config = small_config(attention=attention, causal=True, num_layers=1, num_heads=3, qk_dim=6, v_dim=12)

    def logits(inputs, params):
        out = apply(config, params, inputs[None])[0]
        return out, out

    jacobian = quick_jit(jax.jacrev(logits, has_aux=True))
    return lambda params, inputs: jacobian(inputs, params)[::-1]


@pytest.mark.parametrize("name", VARIANTS)
def test_causal_logits_have_no_gradient_with_respect_to_later_inputs(name):
    config = small_config(attention=name, causal=True, num_layers=1, num_heads=3, qk_dim=6, v_dim=12)
    _, jacobian = causal_logits_and_jacobian(name)(random_params(config), batch(1)[0])
    response = np.abs(jacobian).sum(axis=(1, 3))  # [query, key]
    later = np.triu(np.ones((SEQ, SEQ), dtype=bool), k=1)
    np.testing.assert_array_equal(response[later], 0)
    assert (response[~later] > 0).all()


@pytest.mark.parametrize("name", VARIANTS)
def test_the_order_of_heads_does_not_matter(name):
    config = small_config(attention=name, causal=True, num_layers=1, num_heads=3, qk_dim=6, v_dim=12)
    params = random_params(config)
    order = np.array([2, 0, 1])
    head_axis = {"query/kernel": 1, "query/bias": 0, "key/kernel": 1, "key/bias": 0, "value/kernel": 1, "value/bias": 0}
    head_axis |= {"out/kernel": 0, "relative_embedding/rel_embedding": 0}

    def reordered(path, leaf):
        axis = head_axis.get("/".join(entry.key for entry in path[-2:]))
        return leaf if axis is None else np.take(leaf, order, axis=axis)

    shuffled = jax.tree_util.tree_map_with_path(reordered, params)
    moved = sum((a != b).any() for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(shuffled), strict=True))
    assert moved == len(head_axis)
    logits, same = (causal_logits_and_jacobian(name)(p, batch(1)[0])[0] for p in (params, shuffled))
    np.testing.assert_allclose(same, logits, rtol=1e-5, atol=1e-5)


def test_without_a_causal_mask_every_position_sees_every_other():
    config = small_config(num_layers=1)
    params = random_params(config)
    jacobian = quick_jit(jax.jacrev(lambda inputs: apply(config, params, inputs[None])[0]))(batch(1)[0])
    assert (np.abs(jacobian).sum(axis=(1, 3)) > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("option", MODEL_OPTIONS)
def test_causality_of_two_layers_with_every_option(name, option):
    config = small_config(**{"attention": name, **MODEL_OPTIONS[option], "causal": True})
    params = random_params(config)
    jacobian = jax.jacrev(lambda x: apply(config, params, x[None])[0])
    # Over several examples: the relu of a single hidden unit lets nothing through for half of the pairs of each.
    response = np.abs(quick_jit(jax.vmap(jacobian))(batch(8))).sum(axis=(0, 2, 4))
    later = np.triu(np.ones((SEQ, SEQ), dtype=bool), k=1)
    np.testing.assert_array_equal(response[later], 0)
    seen = np.eye(SEQ, dtype=bool) if config.model.block == "mlp_only" else ~later
    assert (response[seen] > 0).all()


@cache
def masked_logits(attention: str, causal: bool = False) -> Callable[..., Any]:
    """Of (params, inputs, mask)."""
    config = small_config(attention=attention, causal=causal, num_layers=1, num_heads=3, qk_dim=6, v_dim=12)
    logits = quick_jit(lambda params, inputs, mask: apply(config, params, inputs, mask=mask))
    params = random_params(config)
    return lambda inputs, mask: np.asarray(logits(params, inputs, np.broadcast_to(mask, (2, 3, SEQ, SEQ))))


@pytest.mark.parametrize("name", VARIANTS)
def test_padding_has_no_influence(name):
    """Each example has padding of its own: [batch, 1, 1, key]."""
    logits = masked_logits(name)
    seen = np.ones((2, SEQ), dtype=bool)
    seen[0, [3, 7]] = seen[1, 0] = False
    inputs, changed = batch(), batch()
    changed[~seen] += 1
    first, second = (logits(x, seen[:, None, None])[seen] for x in (inputs, changed))
    np.testing.assert_array_equal(first, second)
    everyone = np.ones((2, 1, 1, SEQ), dtype=bool)
    assert np.any(logits(inputs, everyone) != logits(changed, everyone), axis=-1).all()


@pytest.mark.parametrize("name", VARIANTS)
def test_a_mask_may_differ_by_example_head_and_query(name):
    """A key sways exactly the queries that see it with at least one head."""
    logits = masked_logits(name)
    mask = np.random.default_rng(0).random((2, 3, SEQ, SEQ)) < 0.25
    position = np.arange(SEQ)
    mask[..., position, position] = True  # every query sees a key, itself
    for key in (0, 4, 8):
        inputs, changed = batch(), batch()
        changed[:, key] += 1
        swayed = np.any(logits(inputs, mask) != logits(changed, mask), axis=-1)
        np.testing.assert_array_equal(swayed, mask[..., key].any(axis=1))


@pytest.mark.parametrize("name", ["hyla_gated"])
def test_a_mask_comes_on_top_of_the_causal_one(name):
    logits = masked_logits(name, causal=True)
    position = np.arange(SEQ)
    inputs, changed = batch(), batch()
    changed[:, 3] += 1
    for mask, swayed in ((position != 3, position == 3), (position >= 0, position >= 3)):
        moved = np.any(logits(inputs, mask) != logits(changed, mask), axis=(0, 2))
        np.testing.assert_array_equal(moved, swayed)


@pytest.mark.parametrize("shape", [(SEQ,), (SEQ, SEQ), (2, 1, 1, SEQ), (1, 3, SEQ, 1)])
def test_a_mask_of_any_shape_that_broadcasts_means_its_broadcast(shape):
    config = small_config(attention="linear", num_layers=1, num_heads=3, qk_dim=6, v_dim=12)
    params, mask = random_params(config), np.random.default_rng(1).random(shape) < 0.6
    logits, same = (
        apply(config, params, batch(), mask=array) for array in (mask, np.broadcast_to(mask, (2, 3, SEQ, SEQ)))
    )
    np.testing.assert_allclose(logits, same, rtol=1e-5, atol=1e-5)


def test_a_shared_block_is_the_same_block_in_every_layer():
    shared, apart = small_config(share_layers=True), small_config()
    params = random_params(shared)
    copied = dict(params)
    block = copied.pop("transformer_block")
    copied |= {"transformer_block_0": block, "transformer_block_1": block}
    logits, same = (quick_jit(partial(apply, c))(p, batch()) for c, p in ((shared, params), (apart, copied)))
    np.testing.assert_allclose(same, logits, rtol=1e-5, atol=1e-5)


def test_apply_maps_over_members_of_a_pack():
    config = small_config(num_layers=1)
    members = [random_params(config, seed) for seed in range(3)]
    inputs = np.stack([batch(seed=seed) for seed in range(3)])
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *members)
    packed = quick_jit(jax.vmap(partial(apply, config)))(stacked, inputs)
    alone = quick_jit(partial(apply, config))
    assert packed.shape == (3, 2, SEQ, OUTPUT_DIM)
    for member in range(3):
        np.testing.assert_allclose(packed[member], alone(members[member], inputs[member]), rtol=1e-4, atol=1e-4)


def test_dropout_acts_only_with_a_key_and_where_the_config_says():
    config, plain = small_config(num_layers=1, dropout=0.5), small_config(num_layers=1)
    params = random_params(config)
    logits, undropped, without_rate = (
        quick_jit(lambda rng, c=c, on=on: apply(c, params, batch(), dropout_rng=rng if on else None))
        for c, on in ((config, True), (config, False), (plain, True))
    )
    first, again, other = (logits(jax.random.key(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).all()
    np.testing.assert_array_equal(undropped(jax.random.key(1)), without_rate(jax.random.key(1)))


def outputs_of_modules(model: Transformer, chosen: Callable[[nn.Module], bool], **options: Any) -> dict[str, Any]:
    """Shape and dtype of what the chosen modules return and of what they have sown, by name."""

    def run(rng):
        inputs = jnp.asarray(batch())
        params = model.init(rng, inputs, deterministic=True)["params"]
        capture = lambda module, method: method == "__call__" and chosen(module)  # noqa: E731
        _, state = model.apply(
            {"params": params}, inputs, capture_intermediates=capture, mutable="intermediates", **options
        )
        return state["intermediates"]

    captured = flattened(jax.eval_shape(run, jax.random.key(0)))
    return {name.removesuffix("/__call__"): output for name, (output,) in captured.items()}


def test_dropout_stands_after_embedding_mixer_activation_and_mlp():
    config = small_config(dropout=0.5, attention_dropout=0.25, num_layers=1).model
    rates: dict[str, float] = {}

    def chosen(module: nn.Module) -> bool:
        if isinstance(module, nn.Dropout):
            rates["/".join(module.path)] = module.rate
        return isinstance(module, nn.Dropout)

    model, rngs = Transformer(config, OUTPUT_DIM), {"dropout": jax.random.key(1)}
    outputs = outputs_of_modules(model, chosen, deterministic=False, rngs=rngs)
    stream, block = (2, SEQ, config.emb_dim), "transformer_block_0"
    assert {name: (rate, outputs[name].shape) for name, rate in rates.items()} == {
        "Dropout_0": (0.5, stream),
        f"{block}/Dropout_0": (0.5, stream),
        f"{block}/sequence_mixer/Dropout_0": (0.25, (2, config.num_heads, SEQ, SEQ)),
        f"{block}/state_mixer/Dropout_0": (0.5, (2, SEQ, config.mlp_dim)),
        f"{block}/state_mixer/Dropout_1": (0.5, stream),
    }


@pytest.mark.parametrize("feedforward", ["gelu_mlp", "swiglu"])
def test_bfloat16_is_for_activations_alone(feedforward):
    options: dict[str, Any] = {"dropout": 0.1, "attention_dropout": 0.1, "normalize_qk": True, "norm": "rms"}
    config = small_config(feedforward=feedforward, absolute_position=True, **options).model
    outputs = outputs_of_modules(Transformer(config, OUTPUT_DIM, dtype="bfloat16"), lambda _: True, deterministic=True)
    attention = ("attn_scores", "attn_weights", "attn_bias", "relative_embedding", "sequence_mixer/Dropout_0")
    final = ("__call__", "decoder_norm", "logitdense")
    for name, output in outputs.items():
        exact = name.startswith(final) or any(part in name for part in attention)
        dtypes = {leaf.dtype for leaf in jax.tree.leaves(output)}
        assert dtypes == {jnp.dtype("float32" if exact else "bfloat16")}, name


def test_bfloat16_changes_little():
    full, half = (small_config(attention="softmax", numerics={"dtype": dtype}) for dtype in ("float32", "bfloat16"))
    params = random_params(full)
    assert {leaf.dtype for leaf in jax.tree.leaves(random_params(half))} == {np.dtype("float32")}
    exact, rounded = (quick_jit(partial(apply, config))(params, batch()) for config in (full, half))
    assert rounded.dtype == jnp.float32
    assert 1e-5 < np.abs(exact - rounded).max() < 0.1


@pytest.mark.parametrize("options", [pytest.param({}, marks=pytest.mark.slow), {"share_layers": True}], ids=str)
def test_rematerialisation_changes_neither_gradients_nor_what_is_looked_at(options):
    plain, remat = (
        small_config(attention="hyla", dropout=0.2, attention_dropout=0.2, numerics={"remat": remat}, **options)
        for remat in (False, True)
    )
    params, inputs = random_params(plain), batch(3)
    assert plain.trial_id == remat.trial_id

    def loss(config, params):
        return jnp.sum(jnp.square(apply(config, params, inputs, dropout_rng=jax.random.key(5))))

    grads = [quick_jit(jax.grad(partial(loss, config)))(params) for config in (plain, remat)]
    for ours, theirs in zip(*map(jax.tree.leaves, grads), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(*(attention_weights(config, params, inputs) for config in (plain, remat)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("name", ["high", "highest"])
def test_matmul_precision_reaches_every_product_forward_and_backward(name, monkeypatch):
    # What accelerators use; a CPU multiplies float32 exactly whatever is asked for.
    monkeypatch.setattr(layer, "fastest", lambda dtype: EINSUM)
    config = small_config(numerics={"matmul_precision": name})
    params = random_params(config)
    step = jax.make_jaxpr(jax.grad(lambda params: apply(config, params, batch()).mean()))(params)
    precision = {"high": jax.lax.Precision.HIGH, "highest": jax.lax.Precision.HIGHEST}[name]
    products = [equation for equation in equations(step.jaxpr) if equation.primitive.name == "dot_general"]
    assert {equation.params["precision"] for equation in products} == {(precision, precision)}


def test_kernels_start_as_lecun_normal_and_biases_at_zero():
    config = small_config(emb_dim=96, num_heads=4, qk_dim=64, v_dim=64, mlp_dim=128, num_layers=1)
    flat = flattened(quick_jit(partial(init_params, config))(jax.random.key(0)))
    fan_in = {"out": 64, "Dense_1": 128, "embedding": INPUT_DIM}  # what each output sums over; emb_dim for the others
    for name, leaf in flat.items():
        module, kind = name.split("/")[-2:]
        if kind == "bias":
            assert not leaf.any(), name
        elif kind == "scale":
            assert (leaf == 1).all(), name
        elif kind == "kernel":
            assert float(np.std(leaf)) == pytest.approx(1 / math.sqrt(fan_in.get(module, 96)), rel=0.1), name


def test_token_embeddings_start_with_variance_one_over_width():
    model = Transformer(small_config().model.widened(8), output_dim=None, vocab_size=100)
    init = quick_jit(partial(model.init, deterministic=True))
    table = init(jax.random.key(0), np.zeros((1, 2), np.int32))["params"]["embedding"]["embedding"]
    assert float(np.std(table)) == pytest.approx(1 / math.sqrt(96), rel=0.05)


def test_initial_parameters_follow_the_key():
    init = quick_jit(partial(init_params, small_config(num_layers=1)))
    first, again, other = (init(jax.random.key(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first["embedding"]["kernel"], again["embedding"]["kernel"])
    assert (first["embedding"]["kernel"] != other["embedding"]["kernel"]).all()


def test_a_transformer_needs_something_to_answer_with():
    model = Transformer(small_config().model, output_dim=None)
    with pytest.raises(ValueError, match="output_dim"):
        model.init(jax.random.key(0), batch(), deterministic=True)
