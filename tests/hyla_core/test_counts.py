"""Closed forms against the parameters and products of the model itself."""

import math
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from golden_files import flattened
from jax.extend.core import Jaxpr
from jaxprs import equations
from model_cases import MODEL_OPTIONS, small_config

import sweeps
from hyla_core import choice, train
from hyla_core.attention import layer
from hyla_core.attention.products import EINSUM
from hyla_core.attention.variants import VARIANTS
from hyla_core.config import ModelConfig, TrainConfig
from hyla_core.counts import (
    num_non_embedding_params,
    num_params,
    step_memory_bytes,
    train_flops_per_example,
    transformer_flops,
    transformer_params,
)
from hyla_core.model import Transformer, apply, init_params
from sweeps.expand import expand
from sweeps.spec import load_sweep

CASES = [pytest.param({"attention": name}, id=name) for name in VARIANTS] + [
    pytest.param(options, id=name) for name, options in MODEL_OPTIONS.items()
]
ALL_CASES = [
    pytest.param({"attention": name, **options}, id=f"{name}-{option}")
    for name in VARIANTS
    for option, options in MODEL_OPTIONS.items()
]


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


@pytest.fixture
def einsums(monkeypatch):
    """Makes every product one einsum: a CPU's forms sum gradients of biases by products with ones."""
    monkeypatch.setattr(layer, "fastest", lambda dtype: EINSUM)


@pytest.mark.parametrize("options", CASES)
def test_num_params_counts_the_tree(options):
    config = small_config(**options)
    params = jax.eval_shape(lambda rng: init_params(config, rng), jax.random.key(0))
    assert num_params(config) == params_by_group(params)


def test_num_non_embedding_params_is_what_blocks_and_norms_hold():
    # Attention 13·6 twice, 13·8 and 9·12; MLP 13·7 + 8·12; two norms of 24; two layers; the last norm.
    assert num_non_embedding_params(small_config()) == 2 * (156 + 104 + 108 + 91 + 96 + 48) + 24


def token_params(model: ModelConfig, output_dim: int | None) -> Any:
    init = Transformer(model, output_dim, vocab_size=17).init
    return jax.eval_shape(lambda: init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32), deterministic=True)["params"])


@pytest.mark.parametrize(("name", "output_dim"), [(name, None) for name in VARIANTS] + [("hyla", 3)])
def test_transformer_params_of_a_token_model(name, output_dim):
    model = small_config(attention=name).model
    counts = transformer_params(model, input_dim=0, output_dim=output_dim, vocab_size=17)
    assert counts == params_by_group(token_params(model, output_dim))


def traced_flops(config: TrainConfig, batch_size: int) -> int:
    """Of the products in a training step's loss and gradients."""
    params = jax.eval_shape(lambda rng: init_params(config, rng), jax.random.key(0))
    inputs = jax.ShapeDtypeStruct((batch_size, config.task.seq_len, config.task.input_dim), jnp.float32)

    def loss(params, inputs):
        return apply(config, params, inputs, dropout_rng=jax.random.key(0)).mean()

    return product_flops(jax.make_jaxpr(jax.value_and_grad(loss))(params, inputs).jaxpr)


@pytest.mark.parametrize("options", CASES)
def test_train_flops_counts_the_products_of_a_training_step(options, einsums):
    config = small_config(**options)
    assert traced_flops(config, batch_size=3) == 3 * train_flops_per_example(config)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", ALL_CASES)
def test_counts_of_every_variant_with_every_option(options, dtype, einsums):
    config = small_config(**options, numerics={"dtype": dtype})
    assert traced_flops(config, batch_size=2) == 2 * train_flops_per_example(config)
    assert num_params(config) == params_by_group(jax.eval_shape(partial(init_params, config), jax.random.key(0)))


@pytest.mark.parametrize(
    ("options", "output_dim"),
    [({"attention": name}, None) for name in VARIANTS] + [({"share_layers": True}, None), ({}, 3)],
    ids=str,
)
def test_transformer_flops_of_a_token_model(options, output_dim, einsums):
    model = small_config(causal=True, absolute_position=True, **options).model
    tokens = jnp.zeros((2, 4), jnp.int32)
    params = token_params(model, output_dim)

    def loss(params):
        logits = Transformer(model, output_dim, vocab_size=17).apply({"params": params}, tokens, deterministic=True)
        return logits.mean()

    step = jax.make_jaxpr(jax.value_and_grad(loss))(params)
    per_example = transformer_flops(model, seq_len=4, input_dim=0, output_dim=output_dim, vocab_size=17)
    assert product_flops(step.jaxpr) == 2 * per_example


def test_train_flops_by_hand():
    # One layer of one head, all widths 1, 9 tokens of width 5, in multiply-adds: embedding 9·5; query, key, value, out
    # 9 each; scores and two products of HYLA's value network 81 each; MLP 2·9; readout 9·5.
    tiny = small_config(emb_dim=1, num_heads=1, num_layers=1, qk_dim=1, v_dim=1, mlp_dim=1)
    assert train_flops_per_example(tiny) == 2 * (2 * 45 + 3 * (36 + 243 + 18 + 45))


WIDE = {"emb_dim": 32, "num_heads": 4, "qk_dim": 16, "v_dim": 16, "mlp_dim": 64}
MEMORY_CASES: dict[str, dict[str, Any]] = {name: {"attention": name} for name in VARIANTS} | {
    "deep": {"attention": "softmax", "num_layers": 4},
    "dropout": {"attention_dropout": 0.1, "dropout": 0.1},
    "wide_hidden": {"attention": "hyla_linear_no_rms", "num_heads": 2, "v_dim": 64},
    "swiglu": {"attention": "linear", "feedforward": "swiglu", "norm": "rms"},
    "mlp_only": {"block": "mlp_only"},
    "remat": {"num_layers": 4, "numerics": {"remat": True}},
}


def planned_bytes(config: TrainConfig, num_members: int) -> int:
    """What the compiler sets aside for the program that trains a pack."""
    plan = train._Program(train.program_shape(config), num_members, None).advance.memory_analysis()
    return plan.argument_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes + plan.temp_size_in_bytes


def compute_members(side_by_side: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has this CPU compile what an accelerator would: members side by side, and a batch at once."""
    monkeypatch.setattr(train, "_takes_turns", lambda: not side_by_side)
    if side_by_side:
        monkeypatch.setattr(choice, "CACHE_BYTES", 2**60)


def assert_within_a_factor_of_two(config: TrainConfig, num_members: int, side_by_side: bool) -> None:
    planned = planned_bytes(config, num_members)
    assert planned <= step_memory_bytes(config, num_members, side_by_side=side_by_side) <= 2 * planned


@pytest.mark.slow
@pytest.mark.parametrize(("num_members", "side_by_side"), [(1, True), (3, True), (3, False)])
@pytest.mark.parametrize("name", MEMORY_CASES)
def test_step_memory_is_within_a_factor_of_two_of_what_the_compiler_plans(name, num_members, side_by_side, monkeypatch):
    compute_members(side_by_side, monkeypatch)
    config = small_config(task={"num_features": 2}, **WIDE | MEMORY_CASES[name])
    optim = {**config.model_dump()["optim"], "batch_size": 32}  # so that examples outweigh parameters
    assert_within_a_factor_of_two(
        TrainConfig.model_validate({**config.model_dump(), "optim": optim}), num_members, side_by_side
    )


@pytest.mark.slow
def test_rematerialisation_saves_most_of_the_memory_of_a_deep_model():
    kept, remat = (
        small_config(task={"num_features": 4}, num_layers=8, numerics={"remat": remat}, **WIDE)
        for remat in (False, True)
    )
    # Parameters and optimiser are there either way.
    state = 4 * 5 * sum(num_params(kept).values())
    assert planned_bytes(remat, 1) - state < (planned_bytes(kept, 1) - state) / 2


# Of a sweep's shapes, the smallest and the largest of each variant; all were compared once, see the commit.
SHIPPED = [
    pytest.param(tiny, attention, width, depth, id=f"{'tiny' if tiny else 'full'}-{attention}-{width}-{depth}")
    for tiny, sizes in ((True, ((1, 1), (2, 2))), (False, ((1, 4), (4, 16))))
    for attention in ("softmax", "linear", "hyla")
    for width, depth in sizes
]


@pytest.mark.slow
@pytest.mark.parametrize(("tiny", "attention", "width", "depth"), SHIPPED)
def test_step_memory_is_within_a_factor_of_two_on_the_shipped_sweep(tiny, attention, width, depth, monkeypatch):
    """As it is meant to run: the tiny one with two members in turns on a core, the other with eight on a GPU."""
    compute_members(not tiny, monkeypatch)
    axes = {"model.attention": attention, "model.width": width, "model.depth": depth}
    trials = expand(load_sweep(Path(sweeps.__file__).parent / "scaling.yaml", tiny=tiny))
    config = next(trial.config for trial in trials if axes.items() <= trial.axes.items())
    assert_within_a_factor_of_two(config, 2 if tiny else 8, side_by_side=not tiny)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["softmax", "hyla"])
@pytest.mark.parametrize("sweep", ["fuzzy_logic", "language"])
def test_step_memory_is_within_a_factor_of_two_on_the_other_tiny_sweeps(sweep, attention, tmp_path, monkeypatch):
    monkeypatch.setenv("HYLA_CACHE", str(tmp_path))
    trials = expand(load_sweep(Path(sweeps.__file__).parent / f"{sweep}.yaml", tiny=True))
    config = next(trial.config for trial in trials if trial.config.model.attention == attention)
    assert_within_a_factor_of_two(config, 2, side_by_side=False)


def long_config(seq_len: int, **model: Any) -> TrainConfig:
    fields = small_config(**model).model_dump()
    data = {**fields["data"], "num_test": 4}
    task = {"name": "fuzzy_logic", "num_context": seq_len - 1}
    return TrainConfig.model_validate({**fields, "task": task, "data": data})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hyla", "hyla_gated", "linear"])
@pytest.mark.parametrize("num_members", [1, 3])
def test_step_memory_is_within_a_factor_of_two_in_blocks(name, num_members, monkeypatch):
    monkeypatch.setattr(train, "_takes_turns", lambda: True)
    # No MLP to speak of beside attention.
    sizes = {"emb_dim": 32, "num_heads": 8, "qk_dim": 64, "v_dim": 64, "mlp_dim": 8, "max_distance": 64}
    config = long_config(300, attention=name, attention_dropout=0.1, **sizes)
    assert_within_a_factor_of_two(config, num_members, side_by_side=False)


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
@pytest.mark.parametrize("name", [name for name, variant in VARIANTS.items() if variant.is_pairwise])
def test_step_memory_of_blocks_grows_with_the_sequence(name, backend):
    short, long = (
        step_memory_bytes(long_config(seq_len, attention=name), side_by_side=backend == "gpu")
        for seq_len in (1024, 2048)
    )
    assert choice.blocks(VARIANTS[name], 1024, backend) is not None
    assert 1.3 * short < long < 2.2 * short


@pytest.mark.parametrize(("num_features", "seq_len"), [(1, 9), (2, 18)])
@pytest.mark.parametrize(("gated", "copies"), [(False, (2, 2)), (True, (6, 3))])
def test_step_memory_grows_with_the_square_of_hylas_sequence(num_features, seq_len, gated, copies):
    name = "hyla_gated" if gated else "hyla"
    hyla, linear = (
        step_memory_bytes(small_config(attention=name, task={"num_features": num_features}))
        for name in (name, "linear_rms")
    )
    saved, in_work = copies  # of a hidden layer of width 4, in each of two layers, and in the one that is worked on
    hidden = 4 * (saved * 2 + in_work) * seq_len**2
    # The gated one has another value of width 8 for each token, saved in each layer, and 13·8 more parameters in each.
    second_value = 2 * seq_len * 8 * gated
    assert hyla - linear == 4 * (3 * (hidden + second_value) + 5 * 2 * 13 * 8 * gated)  # 3 examples, in float32


def test_members_side_by_side_need_as_much_each_and_in_turns_they_share_the_room_for_activations():
    config = small_config()
    one, params = step_memory_bytes(config), 4 * sum(num_params(config).values())
    assert step_memory_bytes(config, side_by_side=False) == one
    assert step_memory_bytes(config, 5) == 5 * one
    # Each member's parameters and two moments twice, one gradient, one update.
    assert step_memory_bytes(config, 5, side_by_side=False) == one - 5 * params + (5 * 2 * 3 + 2) * params
