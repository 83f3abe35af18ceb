"""Products with rounded factors against the same products in float64."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Jaxpr
from jaxprs import equations
from model_cases import MODEL_OPTIONS, small_config

from hyla_core import optim
from hyla_core.attention.variants import VARIANTS
from hyla_core.config import Cadence, TrainConfig
from hyla_core.metrics import MetricsRow
from hyla_core.model import Transformer, apply, init_params
from hyla_core.numerics import BFLOAT16_LOSS_ATOL, Dense, dot_general, product
from hyla_core.optim import Hyperparams
from hyla_core.tasks import Batch, make_task
from hyla_core.train import gradient_step, train

SPEC = "bhqk,bkhd->bqhd"
TYPES = [
    (jnp.float32, jnp.float32),
    (jnp.bfloat16, jnp.bfloat16),
    (jnp.float32, jnp.bfloat16),
    (jnp.bfloat16, jnp.float32),
]

SUMS = ("reduce_sum", "cumsum", "scatter-add", "reduce_window_sum", "reduce")
NORMS_AND_SOFTMAX = ("rsqrt", "sqrt", "exp", "log", "reduce_max")


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["softmax", "linear", "hyla", "hyla_gated"])
def test_a_training_in_bfloat16_reaches_the_loss_of_float32(attention):
    full, half = (mean_final_loss(attention, dtype) for dtype in ("float32", "bfloat16"))
    assert full < 0.5  # it has learned: a guess has ln 4 = 1.39
    assert full != half
    assert half == pytest.approx(full, abs=BFLOAT16_LOSS_ATOL)


def mean_final_loss(attention: str, dtype: str) -> float:
    """Training loss over the last 150 of 900 steps, a mean over three seeds."""
    model = {"emb_dim": 32, "num_heads": 4, "qk_dim": 32, "v_dim": 32, "mlp_dim": 64, "max_distance": 9}
    configs = [
        TrainConfig.model_validate(
            {
                "task": {"name": "sraven", "num_features": 1, "num_values": 4, "permute_features": False},
                "data": {"num_train": 10**6, "num_steps": 900, "num_valid": 64, "num_ood": 64},
                "model": {"attention": attention, "num_layers": 2, **model},
                "optim": {"name": "adamw", "batch_size": 64, "peak_lr": 3e-3, "weight_decay": 0.1, "warmup_steps": 50},
                "seeds": {"split": 0, "data": 1, "init": seed},
                "numerics": {"dtype": dtype},
            }
        )
        for seed in range(3)
    ]
    rows: list[MetricsRow] = []
    train(configs, lambda report: rows.extend(report.rows), cadence=Cadence(num_logs=6, num_evals=1))
    final = [row.value for row in rows if (row.split, row.metric, row.step) == ("train", "loss", 900)]
    assert len(final) == 3
    return float(np.mean(final))


def rounded(array: np.ndarray, dtype: jnp.dtype) -> np.ndarray:
    return np.asarray(jnp.asarray(array, jnp.float32).astype(dtype), np.float64)


def factors_and_cotangent() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(2, 3, 5, 7)), rng.normal(size=(2, 7, 3, 4)), rng.normal(size=(2, 5, 3, 4))


@pytest.mark.parametrize(("left_type", "right_type"), TYPES)
def test_a_product_rounds_its_factors_to_the_narrower_type_and_nothing_else(left_type, right_type):
    left, right, cotangent = factors_and_cotangent()
    narrow = jnp.float32 if left_type == right_type == jnp.float32 else jnp.bfloat16
    out, pull_back = jax.vjp(
        lambda *factors: product(SPEC, *factors), jnp.asarray(left, left_type), jnp.asarray(right, right_type)
    )
    left_grad, right_grad = pull_back(jnp.asarray(cotangent, jnp.float32))
    assert (out.dtype, left_grad.dtype, right_grad.dtype) == (jnp.float32, left_type, right_type)

    left, right, cotangent = (rounded(array, narrow) for array in (left, right, cotangent))
    np.testing.assert_allclose(out, np.einsum(SPEC, left, right), rtol=1e-5, atol=1e-5)
    expected = np.einsum("bqhd,bkhd->bhqk", cotangent, right), np.einsum("bhqk,bqhd->bkhd", left, cotangent)
    for grad, exact in zip((left_grad, right_grad), expected, strict=True):
        # A gradient of a bfloat16 factor is rounded at the end: by at most half of 2^-7 of itself.
        np.testing.assert_allclose(grad, exact, rtol=1e-5 if grad.dtype == jnp.float32 else 2**-8, atol=1e-5)


@pytest.mark.parametrize(
    "dimension_numbers",
    [(((3,), (1,)), ((0, 1), (0, 2))), (((1, 3), (2, 1)), ((), ())), (((), ()), ((0,), (0,)))],
    ids=["one_summed_two_batch", "two_summed", "none_summed"],
)
def test_dot_general_orders_its_axes_as_lax_does(dimension_numbers):
    left, right, _ = factors_and_cotangent()
    left, right = jnp.asarray(left, jnp.bfloat16), jnp.asarray(right, jnp.bfloat16)
    expected = jax.lax.dot_general(left.astype(jnp.float32), right.astype(jnp.float32), dimension_numbers)
    np.testing.assert_allclose(dot_general(left, right, dimension_numbers), expected, rtol=1e-5, atol=1e-5)


def test_a_dense_layer_in_bfloat16_rounds_once_and_gives_its_parameters_exact_gradients():
    rng = np.random.default_rng(0)
    inputs, kernel, bias = rng.normal(size=(300, 3, 4)), rng.normal(size=(3, 4, 5, 2)), rng.normal(size=(5, 2))
    layer = Dense((5, 2), num_summed=2, dtype="bfloat16")
    params = jax.tree.map(jnp.float32, {"kernel": kernel, "bias": bias})
    out, pull_back = jax.vjp(lambda params: layer.apply({"params": params}, jnp.float32(inputs)), params)
    x, k = rounded(inputs, jnp.bfloat16), rounded(kernel, jnp.bfloat16)
    exact = np.einsum("bij,ijkl->bkl", x, k) + rounded(bias, jnp.float32)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out, exact, rtol=2**-8, atol=1e-6)

    (grads,) = pull_back(jnp.ones_like(out))  # 300 ones, of which a sum in bfloat16 would make 256
    np.testing.assert_array_equal(grads["bias"], np.full((5, 2), 300))
    np.testing.assert_allclose(grads["kernel"][..., 0, 0], x.sum(axis=0), rtol=1e-5, atol=1e-5)


def training_step(config: TrainConfig) -> Callable[[jax.Array], Any]:
    """Of a key: what `train` traces for one step and a batch: loss, gradients and optimiser."""
    task = make_task(config.task)
    batch = Batch(
        jnp.zeros((3, config.task.seq_len, config.task.input_dim)), jnp.zeros((3, config.task.num_features), jnp.int32)
    )
    hyperparams = Hyperparams(peak_lr=1e-3, weight_decay=0.1, warmup_steps=2, num_steps=10)

    def step(rng):
        params = init_params(config, rng)

        def loss(params):
            metrics = task.metrics(apply(config, params, batch.inputs, dropout_rng=rng), batch)
            return jnp.mean(metrics["loss"]), metrics

        gradient = jax.grad(loss, has_aux=True)
        return gradient_step(
            gradient, params, optim.init(params, config.optim), jnp.uint32(1), hyperparams, config.optim
        )

    return step


def assert_sums_are_float32(program: Jaxpr) -> int:
    """The number of products of two bfloat16 factors."""
    num_products = 0
    for equation in equations(program):
        name = equation.primitive.name
        dtypes = {variable.aval.dtype for variable in equation.outvars}
        if name == "dot_general":
            assert dtypes == {np.dtype(np.float32)}
            num_products += {variable.aval.dtype for variable in equation.invars} == {np.dtype(jnp.bfloat16)}
        elif name in SUMS + NORMS_AND_SOFTMAX:
            assert np.dtype(jnp.bfloat16) not in dtypes, equation
    return num_products


QUICK_CASES: list[dict[str, Any]] = [  # each value network, and every option at least once
    {"attention": "softmax", "normalize_qk": True, "dropout": 0.1, "attention_dropout": 0.1},
    {"attention": "linear_rms", "feedforward": "swiglu", "norm": "rms", "causal": True},
    {"attention": "hyla", "share_layers": True, "block": "mlp_first"},
    {"attention": "hyla_gated", "absolute_position": True, "relative_position": False, "num_layers": 1},
]
ALL_CASES = [
    pytest.param({"attention": name, **options}, id=f"{name}-{option}", marks=pytest.mark.slow)
    for name in VARIANTS
    for option, options in MODEL_OPTIONS.items()
]


@pytest.mark.parametrize("options", QUICK_CASES + ALL_CASES)
def test_a_training_step_in_bfloat16_keeps_its_sums_in_float32(options, monkeypatch):
    config = small_config(**options, numerics={"dtype": "bfloat16"})
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")  # traced only
    step = training_step(config)
    num_products = assert_sums_are_float32(jax.make_jaxpr(step)(jax.random.key(0)).jaxpr)
    num_float32 = sum(
        equation.primitive.name == "dot_general"
        for equation in equations(jax.make_jaxpr(training_step(small_config(**options)))(jax.random.key(0)).jaxpr)
    )
    # All but those of the readout: one in drawing the parameters, one forward, two for the gradients.
    assert num_products == num_float32 - 4
    assert {leaf.dtype for leaf in jax.tree.leaves(jax.eval_shape(step, jax.random.key(0)))} <= {
        np.dtype(np.float32),
        np.dtype(np.int32),  # of the optimiser's count
    }


@pytest.mark.parametrize("output_dim", [None, 3])
def test_a_language_model_in_bfloat16_keeps_its_sums_in_float32(output_dim, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    model = Transformer(small_config(absolute_position=True).model, output_dim, vocab_size=17, dtype="bfloat16")
    tokens = jnp.zeros((2, 4), jnp.int32)

    def loss(rng):
        params = model.init(rng, tokens, deterministic=True)["params"]
        return jax.grad(lambda params: model.apply({"params": params}, tokens, deterministic=True).mean())(params)

    program = jax.make_jaxpr(loss)(jax.random.key(0)).jaxpr
    assert assert_sums_are_float32(program) > 0
    # The gradient of the table is a sum over places in the text.
    assert any(equation.primitive.name == "scatter-add" for equation in equations(program))


def test_on_a_cpu_factors_are_rounded_alike_and_stay_float32():
    """XLA's CPU compiler refuses some products of bfloat16."""
    step = training_step(small_config(numerics={"dtype": "bfloat16"}, num_layers=1))
    assert assert_sums_are_float32(jax.make_jaxpr(step)(jax.random.key(0)).jaxpr) == 0
    numbers = jnp.float32([1 + 2**-8 + 2**-20, 3.0])
    assert product("a,a->a", numbers, jnp.bfloat16([1, 1])).tolist() == [1 + 2**-7, 3.0]
