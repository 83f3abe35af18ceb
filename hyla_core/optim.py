"""AdamW with the paper's learning-rate schedule, for one member.

Peak rate, weight decay, warm-up and number of steps are plain arguments that may be traced values, so trainings that
differ in them share one compiled program. What shapes the program (moments, clipping, which leaves decay) comes from
`OptimConfig`.

Reference: Loshchilov and Hutter, arXiv 1711.05101 (AdamW); schedule and decay mask as in the official code of
arXiv 2406.05816.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from hyla_core.config import OptimConfig

Params = Any  # a tree of arrays


class Hyperparams(NamedTuple):
    """The settings of one training that enter its compiled program as data: scalars, Python's or traced."""

    peak_lr: ArrayLike
    weight_decay: ArrayLike
    warmup_steps: ArrayLike
    num_steps: ArrayLike


def learning_rate(
    step: ArrayLike, peak_lr: ArrayLike, warmup_steps: ArrayLike, num_steps: ArrayLike, final_lr_fraction: ArrayLike
) -> jax.Array:
    """Learning rate of one update: linear warm-up from zero, then a cosine down to a floor, then constant.

    Args:
      step: index of the update, 0 for the first.
      peak_lr: rate of update `warmup_steps`, the largest.
      warmup_steps: updates before the peak; less than half of num_steps.
      num_steps: updates of the whole training.
      final_lr_fraction: the floor, as a share of the peak.

    Returns:
      The rate, float32, in the shape of the arguments. The first is 0 unless there is no warm-up.

    Reference: the official code of arXiv 2406.05816.
    """
    step, warmup, total = (jnp.asarray(value, jnp.float32) for value in (step, warmup_steps, num_steps))
    # The official code asks optax for num_steps - warmup_steps decay steps, and optax counts the warm-up inside them:
    # the floor is reached warmup_steps before the end. Kept, so that curves compare.
    num_cosine_steps = total - 2 * warmup
    cosine = 0.5 * (1 + jnp.cos(jnp.pi * jnp.clip((step - warmup) / num_cosine_steps, 0, 1)))
    falling = final_lr_fraction + (1 - final_lr_fraction) * cosine
    rising = step / jnp.maximum(warmup, 1)  # the maximum only guards the branch that is not taken without warm-up
    return jnp.asarray(peak_lr, jnp.float32) * jnp.where(step < warmup, rising, falling)


def decay_mask(params: Params, name: str) -> Params:
    """Which leaves weight decay touches.

    Args:
      params: the parameters of one member, without a members axis: the rule goes by rank.
      name: `spare_rank_1` spares vectors (most biases, norms); query, key and value biases have a heads axis and the
        position table a bucket axis, so these do decay. `all` spares nothing.

    Returns:
      A tree like params of Python booleans.

    Reference: the official code of arXiv 2406.05816.
    """
    smallest_rank = {"spare_rank_1": 2, "all": 0}[name]
    return jax.tree.map(lambda leaf: jnp.ndim(leaf) >= smallest_rank, params)


def init(params: Params, config: OptimConfig) -> optax.OptState:
    """The optimiser's state before the first update; params are those of one member."""
    return _transform(config, weight_decay=0.0).init(params)


def update(
    grads: Params,
    state: optax.OptState,
    params: Params,
    step: ArrayLike,
    hyperparams: Hyperparams,
    config: OptimConfig,
) -> tuple[Params, optax.OptState]:
    """One update of one member.

    Args:
      grads: gradient of the loss, a tree like params.
      state: from `init` or the update before.
      params: parameters of one member. Packs map this function over their members, so that ranks and norms are a
        single member's.
      step: index of the update, 0 for the first.
      hyperparams: may be traced.
      config: the fields that hyperparams also holds are ignored.

    Returns:
      The parameters and the state after the update.
    """
    rate = learning_rate(
        step, hyperparams.peak_lr, hyperparams.warmup_steps, hyperparams.num_steps, config.final_lr_fraction
    )
    directions, state = _transform(config, hyperparams.weight_decay).update(grads, state, params)
    return jax.tree.map(lambda leaf, direction: leaf - rate * direction, params, directions), state


def _transform(config: OptimConfig, weight_decay: ArrayLike) -> optax.GradientTransformation:
    """Turns gradients into the directions that are multiplied by the rate and subtracted."""
    clip = optax.identity() if config.grad_clip_norm is None else optax.clip_by_global_norm(config.grad_clip_norm)
    return optax.chain(
        clip,
        optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps),
        # A zero decay must not be recognised as such: it would leave no place for a traced value in the program.
        optax.add_decayed_weights(
            jnp.asarray(weight_decay, jnp.float32), lambda tree: decay_mask(tree, config.decay_mask)
        ),
    )
