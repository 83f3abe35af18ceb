"""Counts other explanations of SRAVEN instances: instances can have several answers.

Who sees an instance knows neither the rules nor how each column's features were shuffled. An explanation is a
re-shuffling of every column such that each feature fits some rule. Where an explanation gives another answer than the
true one, the instance is ambiguous. Explanations are not weighed by how probable they are, so the share of
ambiguous instances is no exact ceiling on accuracy.

Reference: the ambiguity check in the official code of arXiv 2406.05816, whose definitions are kept, so that counts
compare. In three points they are wider than what `Sraven` draws:
  - all (num_features!)^grid_size re-shufflings count, though they repeat each explanation num_features! times;
  - the set that "distribute" permutes may repeat values;
  - where the last row shows all values of that set, its answer is the smallest of them.
Runs on the host, in numpy.
"""

import itertools
import math
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from hyla_core.tasks.sraven import DIFFERENCE, DISTRIBUTE, INCREMENTS, RULES, SUM

Sense = Literal["every_feature", "any_feature"]


def ambiguity_counts(cells: ArrayLike, num_values: int, sense: Sense) -> np.ndarray:
    """Counts re-shufflings that explain an instance and lead to another answer.

    Args:
      cells: [batch, row, column, feature], integers, as shown (`Instances.cells`).
      num_values: the modulus of the arithmetic.
      sense: `every_feature`: an explanation counts when the answer of every feature can differ from the true one, as
        in the official check; `any_feature`: when that of at least one feature can.

    Returns:
      [batch] int64; an instance is ambiguous where its count is above zero.

    Raises:
      ValueError: for an unknown sense, or where the number of re-shufflings exceeds 64 bits.
    """
    if sense not in get_args(Sense):
        raise ValueError(f"sense={sense!r} is unknown; choose one of {list(get_args(Sense))}")
    shown = np.asarray(cells)
    _, size, _, features = shown.shape
    if math.factorial(features) ** size >= 2**63:
        raise ValueError(f"num_features={features}, grid_size={size}: (num_features!)^grid_size is not below 2^63")

    # A re-shuffled feature takes one shown feature from each column: the counts need to look at every such tuple once
    # only, not at every re-shuffling.
    picks = np.array(list(itertools.product(range(features), repeat=size)))  # [tuple, column]
    rows = shown[:, :, np.arange(size), picks].transpose(0, 2, 1, 3)  # [batch, tuple, row, column]
    fits, answers = explain(rows, num_values)
    differs = np.any(fits & (answers != rows[..., -1, -1]), axis=0)
    grid = (len(shown), *[features] * size)
    if sense == "every_feature":
        return _count_matchings(differs.reshape(grid))
    fits_any = np.any(fits, axis=0)
    return _count_matchings(fits_any.reshape(grid)) - _count_matchings((fits_any & ~differs).reshape(grid))


def explain(rows: np.ndarray, num_values: int) -> tuple[np.ndarray, np.ndarray]:
    """Which rules a single feature fits, and how each would complete the last row.

    Args:
      rows: [..., row, column], the values of one feature; the last cell is not looked at.
      num_values: the modulus of the arithmetic.

    Returns:
      fits: [rule, ...], whether the complete rows follow the rule and the visible cells of the last row allow it;
      answers: [rule, ...], the rule's value of the last cell, of meaning only where it fits.
    """
    complete, visible = rows[..., :-1, :], rows[..., -1, :-1]
    fits = np.zeros((len(RULES), *rows.shape[:-2]), dtype=bool)
    answers = np.zeros(fits.shape, dtype=rows.dtype)

    for rule, increment in enumerate(INCREMENTS):
        if rule not in (SUM, DIFFERENCE, DISTRIBUTE):
            steps = [(np.diff(part, axis=-1) - increment) % num_values == 0 for part in (complete, visible)]
            fits[rule] = steps[0].all((-2, -1)) & steps[1].all(-1)
            answers[rule] = (visible[..., -1] + increment) % num_values

    for rule, sign in ((SUM, 1), (DIFFERENCE, -1)):
        last = (rows[..., 0] + sign * rows[..., 1:-1].sum(axis=-1)) % num_values  # [..., row]
        fits[rule] = (last[..., :-1] == complete[..., -1]).all(-1)
        answers[rule] = last[..., -1]

    ordered = np.sort(complete, axis=-1)
    members = ordered[..., 0, :]
    is_visible = (members[..., :, None] == visible[..., None, :]).any(-1)  # [..., member]
    fits[DISTRIBUTE] = (ordered == ordered[..., :1, :]).all((-2, -1)) & (
        (visible[..., :, None] == members[..., None, :]).any(-1).all(-1)
    )
    # The members ascend, so the first that is not visible is the smallest; argmin is 0 where all are visible.
    answers[DISTRIBUTE] = np.take_along_axis(members, np.argmin(is_visible, axis=-1)[..., None], axis=-1)[..., 0]
    return fits, answers


def _count_matchings(allowed: np.ndarray) -> np.ndarray:
    """Counts re-shufflings all of whose features are allowed: Σ over perms p of Π over j of allowed[p_0(j), p_1(j), …].

    The sum does not change when the features are renumbered, so p_0 may be the identity and the result is taken
    num_features! times. Then features are placed one after another, remembering for each of the other columns the set
    of shown features that are taken.

    Args:
      allowed: [batch, feature, …, feature] bool, one feature axis per column.

    Returns:
      [batch] int64.
    """
    features, columns = allowed.shape[1], allowed.ndim - 1
    by_tuple = np.moveaxis(allowed, 0, -1)
    counts = {(0,) * (columns - 1): np.ones(len(allowed), dtype=np.int64)}
    for feature in range(features):
        longer: dict[tuple[int, ...], np.ndarray] = {}
        for taken, count in counts.items():
            free = [[j for j in range(features) if not bits >> j & 1] for bits in taken]
            for picks in itertools.product(*free):
                now = tuple(bits | 1 << j for bits, j in zip(taken, picks, strict=True))
                longer[now] = longer.get(now, 0) + count * by_tuple[(feature, *picks)]
        counts = longer
    (total,) = counts.values()
    return math.factorial(features) * total
