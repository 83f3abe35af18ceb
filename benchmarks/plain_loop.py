"""Training as one writes it first: what the steps of hyla are compared with.

One seed, one jitted step that is called from Python and donates its state, examples from a jitted call of their own,
every product one einsum. The model is a function of the same parameters as hyla's, and without dropout the losses agree
(tests/benchmarks/test_plain_loop.py); with it, masks are drawn from other keys.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from hyla_core import model, optim
from hyla_core.config import TrainConfig
from hyla_core.position import relative_position_buckets
from hyla_core.tasks import Batch, make_task
from hyla_core.tasks.base import seed_rng

VARIANTS = ("softmax", "linear", "hyla")


class PlainLoop:
    """One training; `run` goes on with it."""

    def __init__(self, config: TrainConfig):
        """Draws parameters; compiles nothing.

        Args:
          config: softmax, linear or hyla, position biases, a GELU MLP after attention, layer norms, no weights per
            example. Whatever else it asks for is not looked at.
        """
        if config.model.attention not in VARIANTS:
            raise ValueError(f"model.attention={config.model.attention!r}: the plain loop has {VARIANTS}")
        self._config, self._task = config, make_task(config.task)
        self._tables = self._task.tables(config.seeds.split)
        self._rng = seed_rng(config.seeds.init)
        # The second number is what hyla folds into the key of seeds.init for its parameters.
        self._params = jax.jit(functools.partial(model.init_params, config))(jax.random.fold_in(self._rng, 0))
        self._optimizer = _optimizer(config)
        self._opt_state = self._optimizer.init(self._params)
        self._sample = jax.jit(self._draw)
        self._step = jax.jit(self._update, donate_argnums=(0, 1))
        self._done = 0

    def run(self, num_steps: int) -> list[float]:
        """Trains for some steps.

        Args:
          num_steps: how many.

        Returns:
          The loss of each.
        """
        losses = []
        for _ in range(num_steps):
            batch = self._sample(jnp.uint32(self._done))
            rng = jax.random.fold_in(jax.random.fold_in(self._rng, 1), self._done)
            self._params, self._opt_state, loss = self._step(self._params, self._opt_state, batch, rng)
            losses.append(loss)
            self._done += 1
        return [float(loss) for loss in jax.device_get(losses)]

    def _draw(self, step: Array) -> Batch:
        size = self._config.optim.batch_size
        index = (step * size + jnp.arange(size, dtype=jnp.uint32)) % self._config.data.num_train
        return self._task.sample(self._tables, "train", seed_rng(self._config.seeds.data), index)

    def _update(self, params: Any, opt_state: Any, batch: Batch, rng: Array) -> tuple[Any, Any, Array]:
        def loss_fn(params: Any) -> Array:
            logits = _logits(self._config, params, batch.inputs, rng)
            return jnp.mean(self._task.metrics(logits, batch)["loss"])

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = self._optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss


def _optimizer(config: TrainConfig) -> optax.GradientTransformation:
    c, num_steps = config.optim, config.data.num_steps
    return optax.adamw(
        lambda step: optim.learning_rate(step, c.peak_lr, c.warmup_steps, num_steps, c.final_lr_fraction),
        b1=c.b1,
        b2=c.b2,
        eps=c.eps,
        weight_decay=c.weight_decay,
        mask=lambda params: optim.decay_mask(params, c.decay_mask),
    )


def _logits(config: TrainConfig, params: Any, inputs: Array, rng: Array) -> Array:
    c = config.model
    stream = _dense("bsi,ie->bse", inputs, params["embedding"])
    for layer in range(c.num_layers):
        block = params[f"transformer_block_{layer}"]
        stream = stream + _attention(config, block, _norm(stream, block["norm1"]), jax.random.fold_in(rng, layer))
        mlp = block["state_mixer"]
        hidden = jax.nn.gelu(_dense("bse,em->bsm", _norm(stream, block["norm2"]), mlp["Dense_0"]), approximate=True)
        stream = stream + _dense("bsm,me->bse", hidden, mlp["Dense_1"])
    return _dense("bse,ev->bsv", _norm(stream, params["decoder_norm"]), params["logitdense"])


def _attention(config: TrainConfig, block: Any, inputs: Array, rng: Array) -> Array:
    c, seq_len = config.model, inputs.shape[1]
    mixer = block["sequence_mixer"]
    query, key, value = (_dense("bse,ehd->bshd", inputs, mixer[name]) for name in ("query", "key", "value"))
    buckets = relative_position_buckets(seq_len, c.max_distance, c.max_distance)
    bias = block["relative_embedding"]["rel_embedding"][:, buckets]
    weights = jnp.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(c.qk_head_dim) + bias
    if c.attention == "softmax":
        weights = jax.nn.softmax(weights)
    elif c.attention == "hyla":
        weights = weights * jax.lax.rsqrt(jnp.mean(jnp.square(weights), axis=1, keepdims=True) + 1e-6)
    if c.attention_dropout:
        kept = jax.random.bernoulli(rng, 1 - c.attention_dropout, (seq_len, seq_len))
        weights = jnp.where(kept, weights / (1 - c.attention_dropout), 0)
    if c.attention == "hyla":
        hidden = jax.nn.relu(jnp.einsum("bhqk,bkhd->bqkd", weights, value))
        mixed = jnp.einsum("bhqk,bqkd->bqhd", weights, hidden)
    else:
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
    return _dense("bqhd,hde->bqe", mixed, mixer["out"])


def _dense(spec: str, inputs: Array, layer: Any) -> Array:
    return jnp.einsum(spec, inputs, layer["kernel"]) + layer["bias"]


def _norm(stream: Array, layer: Any) -> Array:
    mean = jnp.mean(stream, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(stream - mean), axis=-1, keepdims=True)
    return (stream - mean) * jax.lax.rsqrt(variance + 1e-6) * layer["scale"] + layer["bias"]
