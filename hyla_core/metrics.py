"""Measured values: how they are averaged, and the rows they become."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class MetricsRow(NamedTuple):
    """One measured value of one trial."""

    trial_id: str
    step: int  # updates done
    split: str
    metric: str
    value: float


def weighted_sums(metrics: Mapping[str, jax.Array], weights: jax.Array) -> dict[str, jax.Array]:
    """Sums each metric over examples, as many times as each example counts.

    Args:
      metrics: values per example, [batch] each.
      weights: [batch], 0 for examples that only fill up a batch, else 1.

    Returns:
      A scalar per metric, float32. A value of weight 0 does not count even if it is not finite.
    """
    return {
        name: jnp.sum(jnp.where(weights > 0, values.astype(jnp.float32) * weights, 0))
        for name, values in metrics.items()
    }


def to_scalar(metric: str, value: Any) -> float:
    """The Python number of a value on device or host.

    Raises:
      ValueError: the value is not a scalar; the message names the metric.
    """
    array = np.asarray(value)
    if array.shape != ():
        raise ValueError(f"metric {metric!r} has shape {list(array.shape)}; a scalar is needed")
    return float(array)


def mean_rows(
    trial_id: str,
    step: int,
    split: str,
    sums: Mapping[str, Any],
    num_summed: float,
    derived: Callable[[Mapping[str, float]], dict[str, float]] = lambda means: {},
) -> list[MetricsRow]:
    """Rows of means, one per metric, in the order of names.

    Args:
      trial_id: whose values.
      step: updates done when they were measured; of training, at the end of the interval.
      split: `train`, `valid`, `test` or `ood`.
      sums: a scalar per metric.
      num_summed: total weight in each sum, positive.
      derived: metrics that follow from the means, such as a perplexity.

    Returns:
      The rows; division is in float64.
    """
    means = {name: to_scalar(name, total) / float(num_summed) for name, total in sums.items()}
    return [MetricsRow(trial_id, step, split, name, value) for name, value in sorted((means | derived(means)).items())]
