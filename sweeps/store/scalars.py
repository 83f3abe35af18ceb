"""From what a training computes to Python's own numbers: the one place where values of devices enter the store.

jax and numpy scalars are told by how they look, so that neither library has to be imported.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

MAX_INT = 2**63 - 1


def metric_value(value: Any, step: int, split: str, metric: str) -> float:
    """A measurement as a float, NaN and infinities included.

    Args:
      value: a number of Python, numpy or jax, or an array of no dimensions that holds one.
      step: steps done when it was measured.
      split: the split it was measured on.
      metric: its name.

    Raises:
      ValueError: it is no number; the message says which metric.
    """
    if type(value) is float:  # nearly always, since a training has read its device by then
        return value
    what = f"metric {split}/{metric} at step {step}"
    number = plain(value, what)
    if isinstance(number, bool) or not isinstance(number, numbers.Real):
        raise ValueError(f"{what} is {_described(number)}; a number is needed")
    try:
        return float(number)
    except OverflowError:
        raise ValueError(f"{what} is an integer of more digits than a float64 holds") from None


def step_number(value: Any, what: str = "step") -> int:
    """A count of steps as an int.

    Args:
      value: a whole number of Python, numpy or jax, or an array of no dimensions that holds one.
      what: how a message names it.

    Raises:
      ValueError: it is no whole number that the column holds.
    """
    number = plain(value, what)
    if isinstance(number, bool) or not isinstance(number, numbers.Integral):
        raise ValueError(f"{what} is {_described(number)}; a whole number is needed")
    if not 0 <= int(number) <= MAX_INT:
        raise ValueError(f"{what}={int(number)} is out of range; 0 to {MAX_INT} are allowed")
    return int(number)


def plain_values(values: Mapping[str, Any], of: str) -> dict[str, Any]:
    """Values by name, each as `plain` makes it; a message calls one "`of` `name`"."""
    return {name: plain(value, f"{of} {name}") for name, value in values.items()}


def plain(value: Any, what: str) -> Any:
    """A value of numpy or jax without dimensions as the Python value it holds; any other value as it is.

    Args:
      value: the value.
      what: how a message names it.

    Raises:
      ValueError: it is an array with dimensions, or one whose value can't be had, as while jax traces.
    """
    # A class can have these attributes as well, as descriptors; only an instance is a value.
    if isinstance(value, type) or not (hasattr(value, "shape") and hasattr(value, "dtype")):
        return value
    if value.shape != ():
        raise ValueError(f"{what} is {_described(value)}; a number is needed")
    try:
        return value.item()
    except Exception as error:  # of a traced, donated or far-away value; each kind has an error of its own
        raise ValueError(f"{what} is {_described(value)} whose value can't be read here; a number is needed") from error


def _described(value: Any) -> str:
    """What a value is, for a message that can't show all of it."""
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and shape:
        return f"an array of shape {shape}"
    if value is None:
        return "None"
    kind, text = type(value).__name__, repr(value)
    article = "an" if kind[0] in "aeiouAEIOU" else "a"
    return f"{article} {kind} ({text})" if len(text) <= 40 and "\n" not in text else f"{article} {kind}"
