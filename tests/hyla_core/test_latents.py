"""Latent codes against a slow forward pass, the model's own choices, and what the task says of its examples."""

import jax
import numpy as np
import pytest
from model_cases import small_config
from quick_jit import known_options

from hyla_core import latents
from hyla_core.config import TrainConfig
from hyla_core.latents import collect, latent_codes
from hyla_core.model import init_params
from hyla_core.tasks import Task, make_task

SEQ, DIM, HEADS = 9, 5, 2  # of small_config


@pytest.fixture(autouse=True, scope="module")
def quick_programs():
    """Compiles with little optimisation."""
    statics = {"_codes": ("config", "choice"), "_sampled_codes": ("config", "choice", "split")}
    with pytest.MonkeyPatch.context() as patch:
        for name, static in statics.items():
            plain = getattr(latents, name).__wrapped__
            patch.setattr(latents, name, jax.jit(plain, static_argnames=static, compiler_options=known_options()))
        yield


def random_params(config: TrainConfig, seed: int = 0):
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda rng: init_params(config, rng), jax.random.key(0))
    return jax.tree.map(lambda leaf: rng.normal(scale=0.4, size=leaf.shape).astype(leaf.dtype), shapes)


def batch(size: int = 3) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(size, SEQ, DIM)).astype(np.float32)


def first_layer_scores(params, inputs: np.ndarray, query: int, key: int) -> np.ndarray:
    """Scores [batch, heads] of the first layer without position bias, one product at a time."""
    stream = inputs @ params["embedding"]["kernel"] + params["embedding"]["bias"]
    block = params["transformer_block_0"]
    centred = stream - stream.mean(-1, keepdims=True)
    normed = centred / np.sqrt(stream.var(-1, keepdims=True) + 1e-6)
    normed = normed * block["norm1"]["scale"] + block["norm1"]["bias"]
    mixer = block["sequence_mixer"]
    scores = np.zeros((len(inputs), HEADS))
    for example in range(len(inputs)):
        for head in range(HEADS):
            q, k = (
                normed[example, position] @ mixer[name]["kernel"][:, head] + mixer[name]["bias"][head]
                for name, position in (("query", query), ("key", key))
            )
            scores[example, head] = q @ k / np.sqrt(3)  # qk_dim 6 over 2 heads
    return scores


def test_codes_are_the_weights_of_all_heads_for_one_pair():
    config = small_config(relative_position=False)
    params = random_params(config)
    scores = first_layer_scores(params, batch(), query=7, key=2)
    raw = latent_codes(config, params, batch(), layers=0, queries=[7], keys=[2], normalized=False)
    np.testing.assert_allclose(raw.codes, scores[None, :, None, None], rtol=1e-4, atol=1e-5)
    codes = latent_codes(config, params, batch(), layers=0, queries=[7], keys=[2])
    expected = scores / np.sqrt((scores[:, :1] ** 2 + scores[:, 1:] ** 2) / 2 + 1e-6)
    np.testing.assert_allclose(codes.codes, expected[None, :, None, None], rtol=1e-4, atol=1e-5)
    assert codes.codes.dtype == np.float32


@pytest.mark.parametrize("share_layers", [True, False])
def test_a_choice_is_a_part_of_the_whole(share_layers):
    config = small_config(share_layers=share_layers, num_layers=3, attention="softmax")
    params = random_params(config)
    whole = latent_codes(config, params, batch())
    assert whole.codes.shape == (3, 3, SEQ, SEQ, HEADS)
    assert (whole.layers, whole.queries, whole.keys) == ((0, 1, 2), tuple(range(SEQ)), tuple(range(SEQ)))
    np.testing.assert_allclose(whole.codes.sum(axis=3), 1, rtol=1e-5)  # softmax over keys
    assert np.abs(np.diff(whole.codes, axis=0)).max(axis=(1, 2, 3, 4)).min() > 1e-3  # layers differ

    part = latent_codes(config, params, batch(), layers=[-1, 0], queries=range(5, 7), keys=np.array([8, -9, 4]))
    assert (part.layers, part.queries, part.keys) == ((2, 0), (5, 6), (8, 0, 4))
    np.testing.assert_allclose(part.codes, whole.codes[[2, 0]][:, :, 5:7][:, :, :, [8, 0, 4]], rtol=1e-5, atol=1e-6)


def test_shared_layers_have_one_entry_per_application():
    shared, apart = small_config(share_layers=True), small_config()
    params = random_params(shared)
    copied = dict(params)
    block = copied.pop("transformer_block")
    copied |= {"transformer_block_0": block, "transformer_block_1": block}
    codes, same = (latent_codes(c, p, batch(), queries=-1).codes for c, p in ((shared, params), (apart, copied)))
    np.testing.assert_allclose(codes, same, rtol=1e-3, atol=1e-4)


def test_a_mask_and_causality_hide_pairs_from_weights_but_not_from_scores():
    config = small_config(causal=True, num_layers=1)
    params = random_params(config)
    mask = (np.arange(SEQ) != 3)[None, None, None]
    weights, scores = (
        latent_codes(config, params, batch(), mask=mask, normalized=normalized).codes[0] for normalized in (True, False)
    )
    hidden = (np.arange(SEQ) == 3) | (np.arange(SEQ) > np.arange(SEQ)[:, None])  # [query, key]
    assert (weights[:, hidden] == 0).all()
    assert (weights[:, ~hidden] != 0).all()
    assert (scores != 0).all()


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"layers": [2]}, r"layers=\[2\] is out of range; choose at least one from -2 … 1"),
        ({"queries": -10}, r"queries=\[-10\] is out of range; choose at least one from -9 … 8"),
        ({"keys": []}, r"keys=\[\] is out of range; choose at least one from -9 … 8"),
    ],
)
def test_what_does_not_exist_is_refused_in_one_line(wanted, message):
    with pytest.raises(ValueError, match=message):
        latent_codes(small_config(), {}, batch(), **wanted)


def test_a_model_without_attention_has_no_codes():
    with pytest.raises(ValueError, match=r"model\.block='mlp_only' has no attention"):
        collect(small_config(block="mlp_only"), {}, "valid", 1)


def two_features(**seeds: int) -> TrainConfig:
    config = small_config(num_layers=1, task={"num_features": 2}).model_dump()
    config["seeds"] |= seeds
    return TrainConfig.model_validate(config)


def test_collected_examples_are_those_of_the_split_with_their_labels():
    config = two_features()
    params = random_params(config)
    task = make_task(config.task)
    # Batches of three: the last one is filled up.
    collected = collect(config, params, "ood", 7, first=5, queries=[-1, -2], keys=[4])
    assert collected.codes.shape == (1, 7, 2, 1, HEADS)

    index = np.arange(5, 12, dtype=np.uint32)
    arguments = task.tables(config.seeds.split), "ood", jax.random.key(config.seeds.data), index
    instances = jax.jit(task.sample_instances, static_argnums=1)(*arguments)
    inputs = task.encode(instances.cells).inputs
    expected = latent_codes(config, params, inputs, queries=[17, 16], keys=[4])
    np.testing.assert_allclose(collected.codes, expected.codes, rtol=1e-4, atol=1e-5)
    assert (collected.layers, collected.queries, collected.keys) == ((0,), (17, 16), (4,))

    np.testing.assert_array_equal(collected.labels["rules"], instances.rules)
    np.testing.assert_array_equal(collected.labels["perms"], instances.perms)
    np.testing.assert_array_equal(collected.labels["targets"], np.asarray(instances.cells)[:, 2, 2])
    assert {name: values.tolist() for name, values in collected.query_labels.items()} == {
        "row": [2, 2],
        "column": [2, 2],
        "feature": [1, 0],
    }
    # Position 4 of 2 features: third cell of the first row, its first feature.
    assert {name: values.tolist() for name, values in collected.key_labels.items()} == {
        "row": [0],
        "column": [2],
        "feature": [0],
    }


class Fed(Task):
    """The examples of another task, read on the host."""

    is_fed = True

    def __init__(self, task: Task):
        self._task = task

    @property
    def eval_splits(self):
        return self._task.eval_splits

    def fetch(self, split, seeds, index, num_train):
        assert index.dtype == np.int64
        arguments = self._task.tables(seeds.split), split, jax.random.key(seeds.data), index.astype(np.uint32)
        return jax.device_get(self._task.sample(*arguments))

    def metrics(self, logits, batch):
        raise AssertionError("no answer is scored here")


def test_examples_that_the_host_reads_have_codes_too(monkeypatch):
    config = two_features()
    params = random_params(config)
    expected = collect(config, params, "valid", 4, first=2, queries=-1, keys=0)
    monkeypatch.setattr(latents, "make_task", lambda task: Fed(make_task(task)))
    fed = collect(config, params, "valid", 4, first=2, queries=-1, keys=0)
    np.testing.assert_allclose(fed.codes, expected.codes, rtol=1e-4, atol=1e-5)
    assert fed.labels == fed.query_labels == fed.key_labels == {}


def test_members_of_one_shape_share_the_program():
    config, other = two_features(), two_features(data=77, split=5)
    params = random_params(config)
    first = collect(config, params, "train", 3, queries=-1, keys=0).labels
    compiled = latents._sampled_codes._cache_size()
    second = collect(other, params, "train", 3, queries=-1, keys=0).labels
    assert latents._sampled_codes._cache_size() == compiled
    assert (first["targets"] != second["targets"]).any()


@pytest.mark.parametrize(
    ("split", "number", "first", "message"),
    [
        ("train", 3, 98, r"first=98 \+ num_examples=3 goes beyond data.num_train=100"),
        ("valid", 0, 0, "at least one example"),
        ("valid", 1, -1, "choose from 0"),
        ("test", 1, 0, r"split='test' does not exist here; choose one of \['train', 'valid', 'ood'\]"),
    ],
)
def test_examples_that_do_not_exist_are_refused_in_one_line(split, number, first, message):
    config = two_features()
    with pytest.raises(ValueError, match=message):
        collect(config, random_params(config), split, number, first=first, queries=-1, keys=0)
