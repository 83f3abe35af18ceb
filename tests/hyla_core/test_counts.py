"""Closed forms against the parameters and products of the model itself."""

import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from golden_files import flattened
from jax.extend.core import Jaxpr
from jaxprs import equations
from model_cases import MODEL_OPTIONS, small_config

from hyla_core.attention.variants import VARIANTS
from hyla_core.counts import (
    num_non_embedding_params,
    num_params,
    step_memory_bytes,
    train_flops_per_example,
    transformer_flops,
    transformer_params,
)
from hyla_core.model import Transformer, apply, init_params

CASES = [pytest.param({"attention": name}, id=name) for name in VARIANTS] + [
    pytest.param(options, id=name) for name, options in MODEL_OPTIONS.items()
]
TOKEN_CASES = [pytest.param(None, id="tied"), pytest.param(3, id="untied")]


def params_by_group(params: dict[str, Any]) -> dict[str, int]:
    """Counts the leaves' entries under the group that their name belongs to."""
    count: Counter[str] = Counter(dict.fromkeys(("embedding", "position", "attention", "mlp", "norms", "readout"), 0))
    for name, leaf in flattened(params).items():
        modules = name.split("/")
        if any("norm" in module or module.endswith("_ln") for module in modules):
            group = "norms"
        else:
            parent = modules[0] if modules[0] in ("embedding", "logitdense") else modules[1]
            group = {
                "embedding": "embedding",
                "logitdense": "readout",
                "relative_embedding": "position",
                "sequence_mixer": "attention",
                "state_mixer": "mlp",
            }[parent]
        count[group] += math.prod(leaf.shape)
    return dict(count)


def product_flops(jaxpr: Jaxpr) -> int:
    """Two for each multiply-add of each dot_general of a program, those of inner programs included."""
    flops = 0
    for equation in equations(jaxpr):
        assert equation.primitive.name not in ("while", "scan", "cond"), "a loop's products would be counted once"
        assert equation.primitive.name != "conv_general_dilated", "a product of another kind"
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            summed = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
            flops += 2 * math.prod(equation.outvars[0].aval.shape) * summed
    return flops


@pytest.mark.parametrize("options", CASES)
def test_num_params_counts_the_tree(options):
    config = small_config(**options)
    params = jax.eval_shape(lambda rng: init_params(config, rng), jax.random.key(0))
    assert num_params(config) == params_by_group(params)


def test_num_non_embedding_params_is_what_blocks_and_norms_hold():
    # Attention 13·6 twice, 13·8 and 9·12; MLP 13·7 + 8·12; two norms of 24; two layers; the last norm.
    assert num_non_embedding_params(small_config()) == 2 * (156 + 104 + 108 + 91 + 96 + 48) + 24


@pytest.mark.parametrize("output_dim", TOKEN_CASES)
def test_transformer_params_of_a_token_model(output_dim):
    model = small_config().model
    transformer = Transformer(model, output_dim, vocab_size=17)
    tokens = jax.ShapeDtypeStruct((1, 4), jnp.int32)
    init = lambda tokens: transformer.init(jax.random.key(0), tokens, deterministic=True)["params"]  # noqa: E731
    counts = transformer_params(model, input_dim=0, output_dim=output_dim, vocab_size=17)
    assert counts == params_by_group(jax.eval_shape(init, tokens))


@pytest.mark.parametrize("options", CASES)
def test_train_flops_counts_the_products_of_a_training_step(options):
    config, batch_size = small_config(**options), 3
    params = jax.eval_shape(lambda rng: init_params(config, rng), jax.random.key(0))
    inputs = jax.ShapeDtypeStruct((batch_size, config.task.seq_len, config.task.input_dim), jnp.float32)

    def loss(params, inputs):
        return apply(config, params, inputs, dropout_rng=jax.random.key(0)).mean()

    step = jax.make_jaxpr(jax.value_and_grad(loss))(params, inputs)
    assert product_flops(step.jaxpr) == batch_size * train_flops_per_example(config)


@pytest.mark.parametrize("output_dim", TOKEN_CASES)
def test_transformer_flops_of_a_token_model(output_dim):
    model = small_config().model
    transformer = Transformer(model, output_dim, vocab_size=17)
    tokens = jnp.zeros((1, 4), jnp.int32)
    params = jax.eval_shape(lambda: transformer.init(jax.random.key(0), tokens, deterministic=True)["params"])

    def loss(params):
        return transformer.apply({"params": params}, tokens, deterministic=True).mean()

    step = jax.make_jaxpr(jax.value_and_grad(loss))(params)
    expected = transformer_flops(model, seq_len=4, input_dim=0, output_dim=output_dim, vocab_size=17)
    assert product_flops(step.jaxpr) == expected


def test_train_flops_by_hand():
    # One layer of one head, all widths 1, 9 tokens of width 5, in multiply-adds: embedding 9·5; query, key, value, out
    # 9 each; scores and two products of HYLA's value network 81 each; MLP 2·9; readout 9·5.
    tiny = small_config(emb_dim=1, num_heads=1, num_layers=1, qk_dim=1, v_dim=1, mlp_dim=1)
    assert train_flops_per_example(tiny) == 2 * (2 * 45 + 3 * (36 + 243 + 18 + 45))


MEMORY_CASES: dict[str, dict[str, Any]] = {
    "softmax": {"attention": "softmax", "num_layers": 4},
    "hyla": {"attention_dropout": 0.1, "dropout": 0.1},
    "hyla_linear": {"attention": "hyla_linear_no_rms", "num_heads": 2, "v_dim": 64},
    "swiglu": {"attention": "linear", "feedforward": "swiglu", "norm": "rms"},
    "mlp_only": {"block": "mlp_only"},
}


@pytest.mark.slow
@pytest.mark.parametrize("num_members", [1, 3])
@pytest.mark.parametrize("options", [pytest.param(options, id=name) for name, options in MEMORY_CASES.items()])
def test_step_memory_is_within_a_factor_of_two_of_what_the_compiler_plans(options, num_members):
    config = small_config(**{"emb_dim": 32, "num_heads": 4, "qk_dim": 16, "v_dim": 16, "mlp_dim": 64} | options)
    optimizer = optax.adamw(1e-3)

    def init(rng):
        params = init_params(config, rng)
        return params, optimizer.init(params)

    def step(state, inputs, rng):
        params, moments = state
        grads = jax.grad(lambda p: jnp.mean(apply(config, p, inputs, dropout_rng=rng) ** 2))(params)
        updates, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments

    rngs = jax.random.split(jax.random.key(0), num_members)
    shape = (num_members, config.optim.batch_size, config.task.seq_len, config.task.input_dim)
    inputs = jax.ShapeDtypeStruct(shape, jnp.float32)
    program = jax.jit(jax.vmap(step), donate_argnums=0).lower(jax.eval_shape(jax.vmap(init), rngs), inputs, rngs)
    plan = program.compile().memory_analysis()
    measured = (
        plan.argument_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes + plan.temp_size_in_bytes
    )
    assert 0.9 * measured < step_memory_bytes(config, num_members) < 2 * measured


@pytest.mark.parametrize(("num_features", "seq_len"), [(1, 9), (2, 18)])
def test_step_memory_grows_with_the_square_of_hylas_sequence(num_features, seq_len):
    hyla, linear = (
        step_memory_bytes(small_config(attention=name, task={"num_features": num_features}))
        for name in ("hyla_no_rms", "linear")
    )
    # Three in each of two layers and two gradients, of a hidden layer of width 4, for 3 examples in float32.
    assert hyla - linear == (3 * 2 + 2) * seq_len**2 * 4 * 3 * 4


def test_step_memory_is_that_of_one_member_times_their_number():
    assert step_memory_bytes(small_config(), 5) == 5 * step_memory_bytes(small_config())
