"""A batch in pieces has the gradient and the sums of the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hyla_core import choice, microbatch
from hyla_core.config import TrainConfig
from hyla_core.tasks import Batch


def sums(params, batch):
    values = jnp.square(batch.inputs @ params["kernel"]) * batch.targets
    return jnp.sum(values), {"loss": jnp.sum(values), "targets": jnp.sum(batch.targets)}


@pytest.mark.parametrize("pieces", [1, 2, 3, 6])
def test_gradient_and_sums_are_those_of_the_whole_batch(pieces):
    rng = np.random.default_rng(0)
    params = {"kernel": rng.normal(size=4).astype(np.float32)}
    batch = Batch(rng.normal(size=(6, 4)).astype(np.float32), rng.normal(size=6).astype(np.float32))
    grads, measured = microbatch.gradient(sums, params, batch, pieces)
    wanted_grads, wanted = jax.grad(sums, has_aux=True)(params, batch)
    np.testing.assert_allclose(grads["kernel"], wanted_grads["kernel"], rtol=1e-5)
    assert measured.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(measured[name], value, rtol=1e-5)


def config(num_heads=16, batch_size=128, dropout=0.0):
    return TrainConfig.model_validate(
        {
            "task": {"name": "sraven"},
            "data": {"num_train": 1000, "num_steps": 10, "num_valid": 1, "num_ood": 1},
            "model": {
                "attention": "softmax",
                "emb_dim": 4 * num_heads,
                "num_heads": num_heads,
                "num_layers": 1,
                "qk_dim": num_heads,
                "v_dim": num_heads,
                "mlp_dim": 8,
                "max_distance": 36,
                "dropout": dropout,
            },
            "optim": {
                "name": "adamw",
                "batch_size": batch_size,
                "peak_lr": 1e-3,
                "weight_decay": 0,
                "warmup_steps": 0,
            },
            "seeds": {"split": 0, "data": 0, "init": 0},
        }
    )


@pytest.mark.parametrize(
    ("changes", "pieces"),
    [
        ({}, 16),  # 83 kB of weights per example: 12 fit, 8 is the largest number of them that divides the batch
        ({"num_heads": 1}, 1),
        ({"batch_size": 127}, 127),  # a prime
        ({"num_heads": 1024}, 128),  # not even one fits
        ({"dropout": 0.1}, 1),  # masks over the batch would repeat
    ],
)
def test_pieces_fit_the_cache_and_divide_the_batch(changes, pieces):
    assert choice.pieces(config(**changes), "cpu") == pieces


def test_accelerators_take_a_batch_at_once():
    assert choice.pieces(config(), "gpu") == choice.pieces(config(), "tpu") == 1
