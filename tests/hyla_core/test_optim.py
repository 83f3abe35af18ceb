from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hyla_core import optim
from hyla_core.config import OptimConfig
from hyla_core.optim import Hyperparams

CONFIG = OptimConfig(name="adamw", batch_size=8, peak_lr=0.1, weight_decay=0.5, warmup_steps=0)


def rates(peak_lr: float, warmup_steps: int, num_steps: int, final: float = 0.1) -> np.ndarray:
    return np.asarray(optim.learning_rate(np.arange(num_steps), peak_lr, warmup_steps, num_steps, final))


def test_schedule_by_hand():
    # Two steps of warm-up; the cosine has 8 - 2·2 = 4 steps, so the floor comes at step 2 + 4 = 8 - 2.
    half_way = [(1 + np.sqrt(0.5)) / 2, 0.5, (1 - np.sqrt(0.5)) / 2]
    cosine = np.array([1, *half_way, 0, 0])
    expected = 0.3 * np.array([0, 0.5, *(0.1 + 0.9 * cosine)])
    np.testing.assert_allclose(rates(0.3, warmup_steps=2, num_steps=8), expected, rtol=1e-6, atol=1e-8)


def test_first_update_is_idle_unless_there_is_no_warm_up():
    assert rates(0.3, warmup_steps=3, num_steps=20)[0] == 0
    np.testing.assert_allclose(rates(0.3, warmup_steps=0, num_steps=20)[0], 0.3, rtol=1e-6)


def test_floor_is_a_share_of_the_peak():
    np.testing.assert_allclose(rates(0.3, warmup_steps=2, num_steps=20, final=0.25)[-2:], 0.075, rtol=1e-6)
    np.testing.assert_allclose(rates(0.3, warmup_steps=2, num_steps=20, final=1.0)[2:], 0.3, rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.uint32, np.int32])
def test_schedule_takes_traced_values_of_many_members(dtype):
    peaks = np.array([0.1, 0.2, 0.3], np.float32)
    warmups, totals = np.array([0, 1, 7], dtype), np.array([5, 9, 30], dtype)
    together = jax.jit(jax.vmap(optim.learning_rate, in_axes=(None, 0, 0, 0, None)))
    for step in (0, 1, 4):
        alone = [optim.learning_rate(step, *each, 0.1) for each in zip(peaks, warmups, totals, strict=True)]
        np.testing.assert_allclose(together(dtype(step), peaks, warmups, totals, 0.1), alone, rtol=1e-6)


def test_decay_mask_goes_by_the_rank_of_a_single_members_leaves():
    tree = {"scale": np.zeros(2), "query_bias": np.zeros((2, 3)), "kernel": np.zeros((2, 3, 5)), "number": np.zeros(())}
    assert optim.decay_mask(tree, "spare_rank_1") == {
        "scale": False,
        "query_bias": True,
        "kernel": True,
        "number": False,
    }
    assert all(optim.decay_mask(tree, "all").values())


def first_update(config: OptimConfig, grads: dict, params: dict, weight_decay: float) -> dict:
    hyperparams = Hyperparams(config.peak_lr, weight_decay, config.warmup_steps, 10)
    return optim.update(grads, optim.init(params, config), params, 0, hyperparams, config)[0]


def test_first_update_by_hand():
    # Bias correction makes the first Adam direction the sign of the gradient: p - 0.1·(±1 + decay·p).
    params = {"kernel": jnp.array([[2.0, -3.0]]), "bias": jnp.array([5.0])}
    grads = {"kernel": jnp.array([[0.7, -0.2]]), "bias": jnp.array([0.1])}
    updated = first_update(CONFIG, grads, params, weight_decay=0.5)
    np.testing.assert_allclose(updated["kernel"], [[2 - 0.1 * (1 + 1.0), -3 - 0.1 * (-1 - 1.5)]], rtol=1e-6)
    np.testing.assert_allclose(updated["bias"], [5 - 0.1 * 1], rtol=1e-6)


def test_clipping_limits_the_norm_over_all_leaves():
    # Norm 5 of (3, 4), clipped to 0.5: a tenth of each. With eps = 1, the direction is g / (|g| + 1).
    config = OptimConfig(**{**dict(CONFIG), "eps": 1.0, "grad_clip_norm": 0.5})
    params = {"a": jnp.zeros((1, 1)), "b": jnp.zeros(1)}
    updated = first_update(config, {"a": jnp.array([[3.0]]), "b": jnp.array([4.0])}, params, weight_decay=0.0)
    np.testing.assert_allclose(updated["a"], [[-0.1 * 0.3 / 1.3]], rtol=1e-5)
    np.testing.assert_allclose(updated["b"], [-0.1 * 0.4 / 1.4], rtol=1e-5)


def test_members_that_are_stacked_update_as_each_would_alone():
    # A members axis gives vectors rank 2 and joins norms: neither decay nor clipping may see it.
    config = OptimConfig(**{**dict(CONFIG), "grad_clip_norm": 0.5})
    rng = np.random.default_rng(0)
    params, grads = (
        {"a": rng.normal(size=(3, 2, 5)).astype(np.float32), "b": rng.normal(size=(3, 7)).astype(np.float32)}
        for _ in range(2)
    )
    decays = np.array([0.0, 0.5, 2.0], np.float32)
    step = jax.jit(partial(first_update, config))
    together = jax.jit(jax.vmap(partial(first_update, config)))(grads, params, decays)
    for i, decay in enumerate(decays):
        alone = step(*({name: leaf[i] for name, leaf in tree.items()} for tree in (grads, params)), decay)
        for name, leaf in alone.items():
            np.testing.assert_allclose(together[name][i], leaf, rtol=1e-6)
