"""SRAVEN's rules written a second time, in plain Python, for tests to hold the product code against."""

import itertools

import numpy as np


def follows(rule: int, grid: list[list[int]], num_values: int) -> bool:
    """Whether every row of one feature's grid follows a rule (numbered as in tests/golden/sraven.json)."""
    for row in grid:
        first, *middle, last = row
        if rule <= 4:
            step = {0: 0, 1: 1, 2: 2, 3: -1, 4: -2}[rule]
            ok = all((b - a - step) % num_values == 0 for a, b in itertools.pairwise(row))
        elif rule == 5:
            ok = (first + sum(middle) - last) % num_values == 0
        elif rule == 6:
            ok = (first - sum(middle) - last) % num_values == 0
        else:
            ok = len(set(row)) == len(row) and set(row) == set(grid[0])
        if not ok:
            return False
    return True


def unshuffled(cells: np.ndarray, perms: np.ndarray) -> np.ndarray:
    """One instance [row, column, feature] before its columns' features were shuffled by perms [column, feature]."""
    plain = np.full_like(cells, -1)
    for column, perm in enumerate(perms):
        for shown, feature in enumerate(perm):
            plain[:, column, feature] = cells[:, column, shown]
    return plain


def explanation(rule: int, grid: list[list[int]], num_values: int) -> int | None:
    """The last cell that a rule gives to one feature's grid, or None where the visible cells do not fit the rule.

    By the definitions of tests/golden/README.md, `ambiguous_count`: the last rule's set may repeat values.
    """
    *complete, (*visible, _) = grid
    if rule == 7:
        members = sorted(complete[0])
        if any(sorted(row) != members for row in complete) or not set(visible) <= set(members):
            return None
        return min(set(members) - set(visible), default=members[0])
    fitting = [last for last in range(num_values) if follows(rule, [*complete, [*visible, last]], num_values)]
    return fitting[0] if fitting else None


def ambiguity_count(cells: np.ndarray, num_values: int, sense: str) -> int:
    """Counts re-shufflings of one instance [row, column, feature] one by one, and all choices of rules in each."""
    _, size, features = cells.shape
    count = 0
    for perms in itertools.product(itertools.permutations(range(features)), repeat=size):
        grids = [cells[:, range(size), [perm[j] for perm in perms]].tolist() for j in range(features)]
        answers = [{explanation(rule, grid, num_values) for rule in range(8)} - {None} for grid in grids]
        truths = [grid[-1][-1] for grid in grids]
        different = [
            [answer != truth for answer, truth in zip(choice, truths, strict=True)]
            for choice in itertools.product(*answers)
        ]
        count += any(map(all if sense == "every_feature" else any, different))
    return count
