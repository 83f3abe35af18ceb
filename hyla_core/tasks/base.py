"""What a task is: where examples come from, and how answers are scored."""

import abc
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from hyla_core.config import SeedsConfig

STREAMS = {"train": 0, "valid": 1, "test": 2, "ood": 3}
"""The constant that each split folds into the data key. A new split takes a new number; numbers never change."""


class Batch(NamedTuple):
    """Examples as the model sees them.

    Attributes:
      inputs: [batch, seq, input_dim] float32, or token ids [batch, seq] int32.
      targets: what to predict. SRAVEN: [batch, num_features] int32; fuzzy logic: [batch, 1] float32; language: [batch,
        seq] int32.
    """

    inputs: Any
    targets: Any


class Task(abc.ABC):
    """One task at one size, immutable and hashable, so that it can be a static argument of `jax.jit`.

    Examples of most tasks are drawn on the device, by `sample`. Those of a corpus are read on the host, by `fetch`, and
    handed to the device some steps at a time: such a task has `is_fed` true and no `sample`.
    """

    is_fed: bool = False

    @property
    @abc.abstractmethod
    def eval_splits(self) -> tuple[str, ...]:
        """Which of `valid`, `test` and `ood` this task can draw from."""

    def tables(self, split_seed: int) -> dict[str, np.ndarray]:
        """What the split holds out, as arrays whose shapes do not depend on the seed. Runs on the host."""
        return {}

    def sample(self, tables: Mapping[str, np.ndarray | Array], split: str, rng: Array, index: Array) -> Batch:
        """Examples `index` (uint32 [batch]) of a split, each a function of (rng, split, its index) alone. Traceable."""
        raise TypeError(f"{type(self).__name__} reads its examples on the host; use `fetch`")

    def fetch(self, split: str, seeds: SeedsConfig, index: np.ndarray, num_train: int) -> Batch:
        """Examples of a split, read on the host.

        Args:
          split: `train` or one of `eval_splits`.
          seeds: `split` says what is held out, `data` the order.
          index: int64 [batch]. Of `train`, numbers of the examples in the order of training, which goes on counting in
            the second pass over the num_train examples; else, numbers within the split.
          num_train: examples of the training set, which are contained in those of any larger one.

        Returns:
          numpy arrays.
        """
        raise TypeError(f"{type(self).__name__} draws its examples on the device; use `sample`")

    @abc.abstractmethod
    def metrics(self, logits: Array, batch: Batch) -> dict[str, Array]:
        """Scores per example, each float32 [batch]; `loss` is among them."""

    def weights(self, batch: Batch) -> Array | None:
        """How much each example counts in a mean, float32 [batch]; None where all count alike."""
        return None

    def derived(self, means: Mapping[str, float]) -> dict[str, float]:
        """Metrics that follow from the means of others, by name, such as a perplexity."""
        return {}

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
