"""Properties of the SRAVEN task, against rules written out a second time and arithmetic by hand."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sraven_rules import follows, unshuffled

from hyla_core.config import NUM_SRAVEN_RULES, SravenConfig
from hyla_core.tasks import Batch, make_task
from hyla_core.tasks.base import STREAMS
from hyla_core.tasks.sraven import INCREMENTS, RULES, Instances, Sraven

# (num_features, num_values, grid_size, permute_features): each shape compiles once; hypothesis draws the rest.
SHAPES = ((4, 8, 3, True), (2, 5, 4, True), (3, 3, 3, False), (1, 5, 5, True), (8, 16, 3, True))
BATCH = 200  # one size for nearly all tests, since each size compiles


@functools.cache
def task(num_features=4, num_values=8, grid_size=3, permute_features=True, ood_fraction=0.25) -> Sraven:
    config = SravenConfig(
        name="sraven",
        num_features=num_features,
        num_values=num_values,
        grid_size=grid_size,
        permute_features=permute_features,
        ood_fraction=ood_fraction,
    )
    return make_task(config)


@functools.partial(jax.jit, static_argnums=(0, 2))
def draw(sraven: Sraven, tables, split: str, rng, index) -> Instances:
    return sraven.sample_instances(tables, split, rng, index)


def instances(sraven: Sraven, split="train", *, seed=0, split_seed=0, start=0, number=BATCH) -> Instances:
    tables, rng = sraven.tables(split_seed), jax.random.key(seed)
    batches = [
        draw(sraven, tables, split, rng, np.arange(first, first + BATCH, dtype=np.uint32))
        for first in range(start, start + number, BATCH)
    ]
    return Instances(*map(np.concatenate, zip(*batches, strict=True)))


@settings(max_examples=25, deadline=None)
@given(
    shape_and_split=st.sampled_from([*((shape, "train") for shape in SHAPES), (SHAPES[0], "ood")]),
    seed=st.integers(0, 2**31 - 1),
    split_seed=st.integers(0, 2**31 - 1),
    start=st.integers(0, 2**32 - BATCH - 1),
)
def test_instances_follow_their_rules(shape_and_split, seed, split_seed, start):
    shape, split = shape_and_split
    sraven = task(*shape)
    num_features, num_values, size, permute = shape
    cells, rules, perms = instances(sraven, split, seed=seed, split_seed=split_seed, start=start)
    assert cells.min() >= 0
    assert cells.max() < num_values
    assert perms.shape == (BATCH, size, num_features)
    identity = np.broadcast_to(np.arange(num_features), perms.shape)
    np.testing.assert_array_equal(np.sort(perms) if permute else perms, identity)
    allowed = set(map(tuple, sraven.tables(split_seed)["held_out" if split == "ood" else "seen"].tolist()))
    for n in range(BATCH):
        assert tuple(rules[n].tolist()) in allowed
        plain = unshuffled(cells[n], perms[n])
        for feature in range(num_features):
            grid = plain[:, :, feature].tolist()
            assert follows(rules[n, feature], grid, num_values), (RULES[rules[n, feature]], grid)


@settings(max_examples=50, deadline=None)
@given(
    num_features=st.integers(1, 5),
    fraction=st.floats(0, 0.999),
    split_seed=st.integers(0, 2**31 - 1),
)
def test_held_out_and_seen_combinations_are_disjoint_and_complete(num_features, fraction, split_seed):
    tables = task(num_features, ood_fraction=fraction).tables(split_seed)
    seen, held_out = (list(map(tuple, tables[name].tolist())) for name in ("seen", "held_out"))
    every = set(itertools.combinations_with_replacement(range(8), num_features))
    assert len(every) == math.comb(num_features + 7, 7)
    assert len(held_out) == int(fraction * len(every))
    assert not set(seen) & set(held_out)
    assert sorted(seen + held_out) == sorted(every)
    assert seen == sorted(seen)


def test_the_split_seed_alone_chooses_what_is_held_out():
    sraven = task()
    held_out = [sraven.tables(seed)["held_out"] for seed in (0, 0, 1)]
    np.testing.assert_array_equal(held_out[0], held_out[1])
    assert held_out[0].shape == held_out[2].shape == (82, 4)
    assert (held_out[0] != held_out[2]).any()


def test_a_fraction_that_rounds_to_none_held_out_leaves_no_ood_split():
    sraven = task(1, ood_fraction=0.1)  # 8 combinations, 0.8 of one held out
    assert sraven.eval_splits == ("valid",)
    assert sraven.tables(0)["held_out"].shape == (0, 1)
    assert task(1).eval_splits == ("valid", "ood")
    with pytest.raises(ValueError, match=r"split='ood' does not exist here; choose one of \['train', 'valid'\]"):
        sraven.sample(sraven.tables(0), "ood", jax.random.key(0), jnp.arange(2, dtype=jnp.uint32))


def test_rules_and_config_agree():
    assert len(RULES) == len(INCREMENTS) == NUM_SRAVEN_RULES
    assert len(set(STREAMS.values())) == len(STREAMS)


def test_an_example_is_the_same_whatever_batch_it_is_drawn_in():
    sraven, rng = task(), jax.random.key(7)
    tables = sraven.tables(0)
    whole = draw(sraven, tables, "train", rng, np.arange(BATCH, dtype=np.uint32))
    for index in (np.arange(BATCH)[::-1], np.full(BATCH, 5), np.arange(3) + 60):
        part = draw(sraven, tables, "train", rng, index.astype(np.uint32))
        for name in Instances._fields:
            np.testing.assert_array_equal(getattr(part, name), np.asarray(getattr(whole, name))[index])


def test_members_with_their_own_tables_and_keys_draw_as_if_alone():
    sraven, index = task(), np.arange(BATCH, dtype=np.uint32)
    tables = [sraven.tables(seed) for seed in (0, 1)]
    keys = jax.random.split(jax.random.key(3), 2)
    stacked = {name: np.stack([table[name] for table in tables]) for name in tables[0]}
    together = jax.jit(jax.vmap(lambda table, rng: sraven.sample_instances(table, "ood", rng, index)))(stacked, keys)
    for member in range(2):
        alone = draw(sraven, tables[member], "ood", keys[member], index)
        for name in Instances._fields:
            np.testing.assert_array_equal(getattr(together, name)[member], getattr(alone, name))


def test_splits_and_data_seeds_draw_different_examples_at_the_same_index():
    sraven = task()
    train = instances(sraven).cells
    for other in (instances(sraven, "valid"), instances(sraven, "ood"), instances(sraven, seed=1)):
        assert (other.cells != train).any(axis=(1, 2, 3)).all()


def test_no_evaluation_example_is_among_the_first_training_examples():
    # Four features of eight values have at least 2^36 equally likely starts for each combination of rules, so chance
    # repeats none of 20,000 instances.
    sraven = task()
    codes = {
        split: [instance.tobytes() for instance in instances(sraven, split, number=20_000).cells]
        for split in ("train", "valid", "ood")
    }
    train = set(codes["train"])
    assert len(train) == 20_000
    assert not train & set(codes["valid"])
    assert not train & set(codes["ood"])


def chi_square(counts: np.ndarray) -> float:
    """Per degree of freedom, for equal expected counts: 1 ± sqrt(2 / degrees of freedom) where draws are uniform.

    Limits are three to six such deviations: 4.5 for 4 degrees of freedom, 2.2 for 24, 1.9 for 35.
    """
    return float(((counts - counts.mean()) ** 2).sum() / counts.mean() / (counts.size - 1))


def test_rules_and_starting_values_are_uniform():
    cells, rules, _ = instances(task(2, 5, 3, False, 0.0), number=40_000)
    combinations = np.unique_counts(rules[:, 0] * 8 + rules[:, 1]).counts
    assert len(combinations) == 36
    assert chi_square(combinations) < 1.9
    for rule in range(8):
        starts = cells[:, :, 0, 0][rules[:, 0] == rule]
        for row in range(3):
            assert chi_square(np.bincount(starts[:, row], minlength=5)) < 4.5
        if rule != 7:  # the start of a row says nothing about that of another
            assert chi_square(np.bincount(starts[:, 0] * 5 + starts[:, 1], minlength=25)) < 2.2


def test_distribute_draws_each_set_and_each_order_alike():
    # One feature whose only seen rule is the last one: nothing is shuffled, so cells show the draws themselves.
    sraven = task(1, 5)
    index = np.arange(24_000, dtype=np.uint32)
    drawn = draw(sraven, {"seen": np.array([[7]], dtype=np.int32)}, "train", jax.random.key(0), index)
    grids = np.asarray(drawn.cells)[..., 0]
    sets = np.bincount([int((1 << row).sum()) for row in grids[:, 0]], minlength=32)
    assert (sets > 0).sum() == math.comb(5, 3)
    assert chi_square(sets[sets > 0]) < 2.5
    orders = np.argsort(grids, axis=-1) @ np.array([9, 3, 1])  # [batch, row], a number for each order
    both = np.unique_counts(orders[:, 0] * 27 + orders[:, 1]).counts
    assert len(both) == 36  # the orders of two rows are independent: rows may repeat
    assert chi_square(both) < 1.9


def test_shuffles_of_columns_are_uniform_and_independent():
    perms = instances(task(3), number=24_000).perms @ np.array([9, 3, 1])  # [batch, column]
    both = np.unique_counts(perms[:, 0] * 27 + perms[:, 2]).counts
    assert len(both) == 36
    assert chi_square(both) < 1.9


def test_encode_by_hand():
    sraven = task(2, 3)
    cells = np.array([[[0, 2], [1, 0], [2, 1]], [[1, 1], [2, 2], [0, 0]], [[2, 0], [0, 1], [1, 2]]])[None]
    inputs, targets = sraven.encode(cells)
    tokens = [0, 2, 1, 0, 2, 1, 1, 1, 2, 2, 0, 0, 2, 0, 0, 1]  # row by row, feature by feature, without the last cell
    expected = np.zeros((1, 18, 3), np.float32)
    for position, value in enumerate(tokens):
        expected[0, position, value] = 1
    assert (inputs.dtype, targets.dtype) == (jnp.float32, jnp.int32)
    np.testing.assert_array_equal(inputs, expected)
    np.testing.assert_array_equal(targets, [[1, 2]])


def test_sample_encodes_the_instances_it_draws():
    sraven, index = task(3, 3, 3, False), jnp.arange(6, dtype=jnp.uint32)
    args = (sraven.tables(0), "valid", jax.random.key(1), index)
    batch, drawn = jax.jit(lambda: (sraven.sample(*args), sraven.sample_instances(*args)))()
    cells = np.asarray(drawn.cells)
    assert batch.inputs.shape == (6, sraven.config.seq_len, sraven.config.input_dim)
    np.testing.assert_array_equal(batch.targets, cells[:, 2, 2])
    np.testing.assert_array_equal(np.argmax(batch.inputs[:, :-3], axis=-1), cells.reshape(6, 27)[:, :-3])


@pytest.mark.parametrize("shape", SHAPES)
def test_labels_say_which_rule_each_token_follows(shape):
    sraven = task(*shape)
    features, num_values, size, _ = shape
    arguments = (sraven.tables(0), "train", jax.random.key(0), np.arange(BATCH, dtype=np.uint32))
    labels = jax.device_get(jax.jit(sraven.labels, static_argnums=1)(*arguments))
    cells, rules, perms = instances(sraven)
    np.testing.assert_array_equal(labels["rules"], rules)
    np.testing.assert_array_equal(labels["perms"], perms)
    np.testing.assert_array_equal(labels["targets"], cells[:, -1, -1])
    position = sraven.position_labels()
    for token in range(sraven.config.seq_len):
        row, column, shown = (position[name][token] for name in ("row", "column", "feature"))
        assert token == (row * size + column) * features + shown
        for n in range(0, BATCH, 20):
            feature = perms[n, column, shown]
            plain = unshuffled(cells[n], perms[n])[:, :, feature]
            assert plain[row, column] == cells[n, row, column, shown]
            assert follows(labels["token_rules"][n, token], plain.tolist(), num_values)


def test_metrics_by_hand():
    sraven = task(2, 3)
    answers = np.log([[[2, 1, 1], [1, 2, 1]], [[1, 1, 2], [1, 4, 3]], [[2, 1, 1], [1, 1, 2]]]) + 5  # shifts cancel
    logits = np.full((3, 18, 3), 9.0)  # what other positions say does not matter
    logits[:, -2:] = answers
    targets = jnp.array([[0, 1], [2, 2], [1, 0]])
    scores = sraven.metrics(jnp.asarray(logits), Batch(jnp.zeros(0), targets))
    assert sorted(scores) == ["accuracy", "accuracy_per_feature", "loss"]
    assert {(score.shape, score.dtype.name) for score in scores.values()} == {((3,), "float32")}
    np.testing.assert_array_equal(scores["accuracy"], [1, 0, 0])
    np.testing.assert_array_equal(scores["accuracy_per_feature"], [1, 0.5, 0])
    expected = [math.log(2), (math.log(2) + math.log(8 / 3)) / 2, math.log(4)]
    np.testing.assert_allclose(scores["loss"], expected, rtol=1e-6)
