"""Properties of the fuzzy logic task, against loops in plain Python and arithmetic by hand."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from hyla_core.config import FuzzyLogicConfig
from hyla_core.tasks import Batch, make_task
from hyla_core.tasks.fuzzy_logic import Functions, FuzzyLogic, conjunctions, evaluate

BATCH = 100  # one size for nearly all tests, since each size compiles


@functools.cache
def task(num_variables=4, num_terms=2, num_context=6, **fractions) -> FuzzyLogic:
    sizes = {"num_variables": num_variables, "num_terms": num_terms, "num_context": num_context}
    return make_task(FuzzyLogicConfig(name="fuzzy_logic", **sizes, **fractions))


@functools.partial(jax.jit, static_argnums=(0, 2, 5))
def draw(fuzzy: FuzzyLogic, tables, split: str, rng, index, inputs="uniform") -> Functions:
    return fuzzy.sample_functions(tables, split, rng, index, inputs)


def functions(fuzzy: FuzzyLogic, split="train", *, seed=0, split_seed=0, start=0, inputs="uniform") -> Functions:
    index = np.arange(start, start + BATCH, dtype=np.uint32)
    return draw(fuzzy, fuzzy.tables(split_seed), split, jax.random.key(seed), index, inputs)


def slow_value(terms: list[list[int]], point: list[float]) -> float:
    """The operators as they are written, for one function at one point."""
    literals = [[x if latent else 1 - x for latent, x in zip(term, point, strict=True)] for term in terms]
    return max(min(term) for term in literals)


@settings(max_examples=20, deadline=None)
@given(
    shape_and_split=st.sampled_from(
        [((4, 2, 6), split) for split in ("train", "valid", "test", "ood")] + [((3, 3, 1), "train"), ((5, 1, 2), "ood")]
    ),
    seed=st.integers(0, 2**31 - 1),
    split_seed=st.integers(0, 2**31 - 1),
    start=st.integers(0, 2**32 - BATCH - 1),
)
def test_values_follow_from_functions_of_the_split(shape_and_split, seed, split_seed, start):
    shape, split = shape_and_split
    fuzzy = task(*shape)
    drawn = functions(fuzzy, split, seed=seed, split_seed=split_seed, start=start)
    assert drawn.inputs.shape == (BATCH, fuzzy.config.seq_len, fuzzy.config.num_variables)
    assert (drawn.inputs >= 0).all()
    assert (drawn.inputs < 1).all()
    allowed = set(map(tuple, fuzzy.tables(split_seed)["train" if split == "valid" else split].tolist()))
    every = [list(bits) for bits in itertools.product((0, 1), repeat=fuzzy.config.num_variables)]
    for inputs, values, terms, latents in zip(*(part[:5].tolist() for part in drawn), strict=True):
        assert tuple(terms) in allowed
        assert latents == [every[term] for term in terms]
        expected = [slow_value(latents, point) for point in inputs]
        np.testing.assert_allclose(values, expected, atol=1e-6)


@settings(max_examples=50, deadline=None)
@given(
    num_variables=st.integers(1, 5),
    num_terms=st.integers(1, 3),
    test_fraction=st.floats(0, 0.999),
    ood_fraction=st.floats(0, 0.999),
    split_seed=st.integers(0, 2**31 - 1),
)
def test_splits_are_disjoint_and_never_mix_conjunctions(
    num_variables, num_terms, test_fraction, ood_fraction, split_seed
):
    num_ood = int(ood_fraction * 2**num_variables)
    assume(num_terms <= 2**num_variables - num_ood)  # else no function is left for training
    fuzzy = task(num_variables, num_terms, test_fraction=test_fraction, ood_fraction=ood_fraction)
    tables = {name: list(map(tuple, table.tolist())) for name, table in fuzzy.tables(split_seed).items()}
    seen = set(range(2**num_variables - num_ood))
    every = itertools.combinations(range(2**num_variables), num_terms)
    of_one_kind = {function for function in every if len({term in seen for term in function}) == 1}
    assert sorted(tables["train"] + tables["test"] + tables["ood"]) == sorted(of_one_kind)
    assert all(set(function) <= seen for function in tables["train"] + tables["test"])
    assert not any(set(function) & seen for function in tables["ood"])
    assert len(tables["test"]) == int(test_fraction * (len(tables["train"]) + len(tables["test"])))
    assert tables["train"]


def test_the_split_seed_alone_chooses_which_functions_are_held_out():
    test = [task().tables(seed)["test"] for seed in (0, 0, 1)]
    np.testing.assert_array_equal(test[0], test[1])
    assert test[0].shape == test[2].shape == (33, 2)
    assert (test[0] != test[2]).any()
    np.testing.assert_array_equal(task().tables(0)["ood"], list(itertools.combinations(range(12, 16), 2)))


def test_a_split_that_holds_out_nothing_does_not_exist():
    assert task().eval_splits == ("valid", "test", "ood")
    assert task(test_fraction=0).eval_splits == ("valid", "ood")
    fuzzy = task(3, 2, ood_fraction=0.125)  # one of eight conjunctions, which makes no pair
    assert fuzzy.eval_splits == ("valid", "test")
    with pytest.raises(
        ValueError, match=r"split='ood' does not exist here; choose one of \['train', 'valid', 'test'\]"
    ):
        fuzzy.sample(fuzzy.tables(0), "ood", jax.random.key(0), np.arange(2, dtype=np.uint32))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_terms": 17}, "make no function: there are 16 conjunctions"),
        ({"num_terms": 13}, "leave none of the functions of 2^4 conjunctions"),
        ({"num_variables": 16, "num_terms": 1000}, "make more than 1,000,000 functions"),
        ({"ood_fraction": 0.99}, "leave none of the functions"),
        ({"num_variables": 10}, None),
        ({"num_variables": 10, "num_terms": 3}, "make more than 1,000,000 functions"),
    ],
)
def test_sizes_without_functions_or_with_too_many_are_refused(sizes, message):
    if message is None:
        FuzzyLogicConfig(name="fuzzy_logic", **sizes)
        return
    with pytest.raises(ValidationError) as error:
        FuzzyLogicConfig(name="fuzzy_logic", **sizes)
    assert message in str(error.value)


def test_no_evaluation_example_is_among_the_training_examples():
    # Inputs of 4 × 24 bits: chance repeats none.
    points = {split: functions(task(), split).inputs.reshape(-1, 4) for split in ("train", "valid", "test", "ood")}
    every = np.concatenate(list(points.values()))
    assert len(np.unique(every, axis=0)) == len(every)


def test_an_example_is_the_same_whatever_batch_it_is_drawn_in():
    whole = functions(task())
    index = np.array([3, 99, 3, 0], np.uint32)
    for inputs in ("uniform", "fixed_context"):
        whole = functions(task(), inputs=inputs)
        part = draw(task(), task().tables(0), "train", jax.random.key(0), index, inputs)
        for name in Functions._fields:
            np.testing.assert_array_equal(getattr(part, name), np.asarray(getattr(whole, name))[index])


@pytest.mark.parametrize("inputs", ["fixed_context", "fixed_query"])
def test_what_is_fixed_is_shared_by_all_examples_and_the_functions_stay(inputs):
    free, fixed = functions(task(), "valid"), functions(task(), "valid", inputs=inputs)
    np.testing.assert_array_equal(free.terms, fixed.terms)
    shared, own = (slice(-1, None), slice(-1)) if inputs == "fixed_query" else (slice(-1), slice(-1, None))
    assert (fixed.inputs[:, shared] == fixed.inputs[:1, shared]).all()
    np.testing.assert_array_equal(fixed.inputs[:, own], free.inputs[:, own])
    np.testing.assert_allclose(fixed.values, evaluate(fixed.latents, fixed.inputs))
    later = functions(task(), "valid", inputs=inputs, start=500)
    np.testing.assert_array_equal(later.inputs[0, shared], fixed.inputs[0, shared])
    other_split = functions(task(), "test", inputs=inputs)
    assert (other_split.inputs[0, shared] != fixed.inputs[0, shared]).all()


def test_functions_are_equally_likely():
    fuzzy = task(3, 2)  # 8 training functions
    index = np.arange(8_000, dtype=np.uint32)
    terms = np.asarray(draw(fuzzy, fuzzy.tables(0), "train", jax.random.key(1), index).terms)
    counts = np.unique(terms, axis=0, return_counts=True)[1]
    assert len(counts) == 8
    assert ((counts - 1000) ** 2 / 1000).sum() < 30  # chi-square with 7 degrees of freedom: 7 ± 3.7


def test_encode_and_metrics_by_hand():
    fuzzy = task(2, 1, 2)
    inputs = np.array([[[0.25, 0.5], [1.0, 0.0], [0.75, 0.125]]])
    latents = np.array([[[1, 0]]])  # min(x0, 1 - x1)
    values = evaluate(latents, inputs)
    np.testing.assert_allclose(values, [[0.25, 1.0, 0.75]])
    batch = fuzzy.encode(inputs, values)
    np.testing.assert_allclose(batch.inputs, [[[0.25, 0.5, 0.25], [1, 0, 1], [0.75, 0.125, 0]]])
    np.testing.assert_allclose(batch.targets, [[0.75]])
    scores = fuzzy.metrics(jnp.array([[[9.0], [9.0], [0.5]]]), batch)
    # Values 1/4, 1, 3/4 have the mean 2/3 and the variance (25 + 16 + 1) / 144 / 3 = 7/72.
    np.testing.assert_allclose(scores["loss"], [0.0625])
    np.testing.assert_allclose(scores["r2"], [1 - 0.0625 * 72 / 7], rtol=1e-6)


def test_sample_encodes_what_it_draws_and_labels_name_it():
    fuzzy = task()
    drawn = functions(fuzzy, "test")
    arguments = (fuzzy.tables(0), "test", jax.random.key(0), np.arange(BATCH, dtype=np.uint32))
    batch, expected = fuzzy.sample(*arguments), fuzzy.encode(drawn.inputs, drawn.values)
    for ours, theirs in zip(batch, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    labels = fuzzy.labels(*arguments)
    np.testing.assert_array_equal(labels["terms"], drawn.terms)
    np.testing.assert_array_equal(labels["latents"], conjunctions(4)[drawn.terms])
    np.testing.assert_array_equal(labels["target"], Batch(*expected).targets[:, 0])
    assert fuzzy.position_labels()["is_query"].tolist() == [False] * 6 + [True]
