"""Hyperparameters of each cell, chosen by the in-distribution validation split and never by held-out data.

A cell holds the points that share the scaling axes; they differ in the hyperparameters that the sweep's `select_over`
names. Choosing by held-out accuracy would report the luckiest of several draws as generalisation.

Not called `select`: that is a standard module, and a script imports its folder's neighbours first.
"""

from collections.abc import Sequence

import pandas as pd

BEST_BY = ("valid/accuracy", "valid/r2")  # the first one that the sweep measured; greater is better
TIE_BY = "valid/loss"  # lower is better
LOSS_ONLY = "valid/perplexity"  # who measures this is a language model, which is judged by its loss


def select_points(points: pd.DataFrame, cell_axes: Sequence[str]) -> pd.DataFrame:
    """Chooses in each cell the point with the best mean validation accuracy; a tie goes to the lower validation loss.

    Only points with numbers from every seed compete: the mean of the seeds that survived flatters settings that
    diverge. Where a cell has no such point, those with the most seeds compete and the chosen one says so (`complete`
    is false). A last tie goes to the point that stands first, so the choice does not depend on chance.

    Args:
      points: one row per point, as `frames.points_of` makes it: axis values, means over seeds under `<split>/<metric>`,
        `num_seeds`, `num_seeds_asked`.
      cell_axes: the axes that tell cells apart.

    Returns:
      One row per cell in order of appearance: the chosen point's row and `complete`, `num_candidates`,
      `num_candidates_complete`.
    """
    points = points.assign(complete=(points["num_seeds"] == points["num_seeds_asked"]) & (points["num_seeds"] > 0))
    chosen, num_candidates, num_complete = [], [], []
    for cell in _cells(points, cell_axes):
        most = cell["num_seeds"] == cell["num_seeds"].max()
        candidates = cell[cell["complete"]] if cell["complete"].any() else cell[most]
        chosen.append(rank(candidates).index[0])
        num_candidates.append(len(cell))
        num_complete.append(int(cell["complete"].sum()))
    cells = points.loc[chosen].assign(num_candidates=num_candidates, num_candidates_complete=num_complete)
    return cells.reset_index(drop=True)


def rank(points: pd.DataFrame) -> pd.DataFrame:
    """The points, best validation result first; those without one come last."""
    by = selection_metric(points)
    columns = list(dict.fromkeys(name for name in (by, TIE_BY) if name in points))
    if not columns:
        return points
    ascending = [name == TIE_BY for name in columns]
    return points.sort_values(columns, ascending=ascending, kind="stable", na_position="last")


def selection_metric(points: pd.DataFrame) -> str:
    """What points are ranked by: the first of `BEST_BY` that was measured; else, and for language models, `TIE_BY`."""
    if LOSS_ONLY in points and points[LOSS_ONLY].notna().any():
        return TIE_BY
    return next((name for name in BEST_BY if name in points and points[name].notna().any()), TIE_BY)


def _cells(points: pd.DataFrame, cell_axes: Sequence[str]) -> list[pd.DataFrame]:
    if not cell_axes:
        return [points]
    return [cell for _, cell in points.groupby(list(cell_axes), sort=False, dropna=False)]
