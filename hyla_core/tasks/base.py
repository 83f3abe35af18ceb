"""What a task is: tables made once on the host, and pure functions that draw examples and score answers."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import jax
import numpy as np
from jax import Array

STREAMS = {"train": 0, "valid": 1, "test": 2, "ood": 3}
"""The constant that each split folds into the data key. A new split takes a new number; numbers never change."""


class Batch(NamedTuple):
    """Examples as the model sees them.

    Attributes:
      inputs: [batch, seq, input_dim] float32, or token ids [batch, seq].
      targets: what to predict; SRAVEN: [batch, num_features] int32.
    """

    inputs: Array
    targets: Array


class Task(Protocol):
    """One task at one size, immutable and hashable, so that it can be a static argument of `jax.jit`."""

    @property
    def eval_splits(self) -> tuple[str, ...]:
        """Which of `valid`, `test` and `ood` this task can draw from."""
        ...

    def tables(self, split_seed: int) -> dict[str, np.ndarray]:
        """What the split holds out, as arrays whose shapes do not depend on the seed. Runs on the host."""
        ...

    def sample(self, tables: Mapping[str, np.ndarray | Array], split: str, rng: Array, index: Array) -> Batch:
        """Examples `index` (uint32 [batch]) of a split, each a function of (rng, split, its index) alone. Traceable."""
        ...

    def metrics(self, logits: Array, batch: Batch) -> dict[str, Array]:
        """Scores per example, each float32 [batch]; `loss` is among them."""
        ...

    def labels(
        self, tables: Mapping[str, np.ndarray | Array], split: str, rng: Array, index: Array
    ) -> dict[str, Array]:
        """What produced the examples that `sample` draws for the same arguments: [batch, …] each. Traceable.

        For probes. A task that inherits this has none.
        """
        return {}

    def position_labels(self) -> dict[str, np.ndarray]:
        """What stands where in every example: [seq] each. A task that inherits this has none."""
        return {}


def seed_rng(seed: int | Array) -> Array:
    """The key of a seed. The generator is named, so that JAX's global default does not decide what is drawn."""
    return jax.random.key(seed, impl="threefry2x32")


def example_rngs(rng: Array, split: str, index: Array) -> Array:
    """One key per example, so that an example is the same whatever batch it is drawn in.

    Args:
      rng: the key of `seeds.data`.
      split: a key of STREAMS.
      index: uint32 [batch], the examples' numbers within the split.

    Returns:
      Keys, [batch].
    """
    if split not in STREAMS:
        raise ValueError(f"split={split!r} is unknown; choose one of {sorted(STREAMS)}")
    stream = jax.random.fold_in(rng, STREAMS[split])
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(stream, index)
