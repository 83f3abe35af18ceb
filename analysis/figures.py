"""All drawing: held-out metrics against width, depth, parameters, training FLOPs and training-set size.

`plot_data` makes the table that a figure shows, and `draw` draws that table and nothing else, so the CSV beside a figure
holds exactly its numbers. Nothing is averaged but seeds: sizes that a figure's x does not tell apart get panels of their
own, or dots of their own where x orders models of many shapes.

The interval of a mean is the range of its seeds, and every seed is a dot. With the two or three seeds that a large sweep
affords, a 95 % t interval reaches 9 or 2.5 standard deviations to each side and hides every trend, and a bootstrap of
two or three numbers is no better than their range.
"""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from analysis.fits import FitResult, fit_power_law
from analysis.frames import ATTENTION, SweepFrame
from analysis.selection import rank

FRACTION = "data.train_fraction"
SIZE_AXES = tuple(
    f"model.{name}"
    for name in ("width", "depth", "emb_dim", "num_layers", "num_heads", "qk_dim", "v_dim", "mlp_dim", "share_layers")
)
LENGTH_AXES = (FRACTION, "data.num_train", "data.num_steps", "data.passes", "optim.batch_size")


class FigureSpec(NamedTuple):
    """One figure: what stands on its x axis."""

    name: str  # stem of its files
    against: str  # for the title
    x_label: str
    x_columns: tuple[str, ...]  # candidates; the first that the sweep has
    stands_for: tuple[str, ...]  # axes that x expresses, so that they get no panels of their own
    ticks: str  # values | si | power | examples
    letter: str = ""  # scaling letter of the law that is fitted; none where x is no size
    frontier: bool = False  # x orders models of many shapes; the line joins those that no smaller one beats


DEPTH_COLUMNS = ("model.depth", "model.num_layers")
WIDTH_COLUMNS = ("model.width", "model.emb_dim")
FIGURES = (
    FigureSpec("width", "width", "width (× base size)", WIDTH_COLUMNS, WIDTH_COLUMNS, "values"),
    FigureSpec("depth", "depth", "depth (layers)", DEPTH_COLUMNS, DEPTH_COLUMNS, "values"),
    FigureSpec(
        name="params",
        against="model size",
        x_label="non-embedding parameters",
        x_columns=("num_non_embedding_params",),
        stands_for=SIZE_AXES,
        ticks="si",
        letter="N",
        frontier=True,
    ),
    FigureSpec(
        name="flops",
        against="training compute",
        x_label="training FLOPs",
        x_columns=("train_flops",),
        stands_for=SIZE_AXES + LENGTH_AXES,
        ticks="power",
        letter="C",
        frontier=True,
    ),
    FigureSpec(
        name="examples",
        against="training-set size",
        x_label="training examples (fraction of the full set)",
        x_columns=("data.num_train",),
        stands_for=(FRACTION, "data.num_train"),
        ticks="examples",
        letter="D",
    ),
)


class VariantStyle(NamedTuple):
    """How an attention variant looks in every figure."""

    label: str
    color: str  # Okabe and Ito's palette, which colour-blind readers can tell apart; markers say it again
    marker: str


VARIANT_STYLES = {
    "softmax": VariantStyle("softmax", "#0072B2", "o"),
    "linear": VariantStyle("linear", "#E69F00", "s"),
    "hyla": VariantStyle("HYLA", "#009E73", "D"),
    "linear_rms": VariantStyle("linear, RMS over heads", "#56B4E9", "^"),
    "hyla_no_rms": VariantStyle("HYLA without RMS", "#CC79A7", "v"),
    "hyla_linear": VariantStyle("HYLA, linear values", "#D55E00", "P"),
    "hyla_linear_no_rms": VariantStyle("HYLA, linear values, without RMS", "#666666", "X"),
    "hyla_softmax": VariantStyle("HYLA, softmax over keys", "#000000", "*"),
}
SPARE_STYLES = (("#882255", "<"), ("#44AA99", ">"), ("#999933", "p"), ("#332288", "h"))  # variants added later

AXIS_LABELS = {FRACTION: "training fraction", "data.num_train": "training examples", "data.passes": "passes"}
METRIC_LABELS = {
    "accuracy_per_feature": "accuracy per feature",
    "accuracy": "accuracy (all features)",
    "loss": "loss (nats)",
    "r2": "R²",
}
SPLIT_LABELS = {"ood": "held-out", "valid": "in-distribution", "test": "test"}
ERROR_OF = {"accuracy": "1 − accuracy", "accuracy_per_feature": "1 − accuracy", "loss": "loss"}  # what a law is fitted to


class NoFigure(Exception):
    """A figure would show nothing; the message says why."""


class Plot(NamedTuple):
    """A figure's content, ready to draw and to write as CSV."""

    spec: FigureSpec
    data: pd.DataFrame  # one row per cell; `x` its place, `on_line` whether the line passes through it
    x: str  # column
    column_axis: str | None  # axis whose values are the panels' columns
    row_axes: tuple[str, ...]
    fits: list["PanelFit"]


class PanelFit(NamedTuple):
    """The law of one variant in one panel."""

    variant: str
    panel: dict[str, Any]  # the values of the panel's axes
    fit: FitResult


def plot_data(cells: pd.DataFrame, spec: FigureSpec, frame: SweepFrame, value: str) -> Plot:
    """The table that one figure shows.

    Args:
      cells: one row per cell, as `selection.select_points` chooses it.
      spec: the figure.
      frame: the sweep.
      value: the metric on the y axis, `<split>/<metric>`; its mean and interval are in `mean`, `low`, `high`.

    Raises:
      NoFigure: where x takes a single value.
    """
    x = next((name for name in spec.x_columns if name in frame.axes), spec.x_columns[0])
    num_values = cells.loc[cells["mean"].notna(), x].nunique() if x in cells else 0
    if num_values < 2:
        raise NoFigure(f"{spec.x_label} takes {'one value' if num_values else 'no value'} in this sweep")
    varying = [a for a in frame.cell_axes if cells[a].nunique() > 1 and a not in (ATTENTION, *spec.stands_for)]
    column_axis = FRACTION if FRACTION in varying else next(iter(varying), None)
    row_axes = tuple(axis for axis in varying if axis != column_axis)

    panel_axes = [axis for axis in (column_axis, *row_axes) if axis]
    data = cells.assign(x=cells[x].astype(float))
    data = data.sort_values("x", kind="stable").reset_index(drop=True)
    groups = [part for _, part in data.groupby([ATTENTION, *panel_axes], sort=False, dropna=False)]
    on_line = [index for part in groups for index in (_frontier(part) if spec.frontier else part.index)]
    data["on_line"] = data.index.isin(on_line) & data["mean"].notna() & data["x"].notna()
    fits = [_fit(part.assign(on_line=data["on_line"]), panel_axes, value) for part in groups] if spec.letter else []
    return Plot(spec, data, x, column_axis, row_axes, fits)


def _frontier(part: pd.DataFrame) -> list[int]:
    """Rows that no row of smaller (or equal) x beats on the validation split, ascending in x."""
    drawable = part[part["mean"].notna() & part["x"].notna()]
    best_first = rank(drawable)
    frontier: list[int] = []
    for index in best_first.index:
        if not frontier or drawable.loc[index, "x"] < drawable.loc[frontier[-1], "x"]:
            frontier.append(index)
    return frontier[::-1]


def _fit(part: pd.DataFrame, panel_axes: Sequence[str], value: str) -> PanelFit:
    """The law of the points that the line joins, those with all their seeds."""
    first = part.iloc[0]
    used = part[part["on_line"] & part["complete"]]
    metric = value.split("/")[1]
    if metric not in ERROR_OF:
        fit = fit_power_law([], [])._replace(why_not=f"{metric} is no error or loss that falls to zero")
    else:
        fit = fit_power_law(used["x"], used["mean"] if metric == "loss" else 1 - used["mean"])
    return PanelFit(first[ATTENTION], {axis: first[axis] for axis in panel_axes}, fit)


def draw(plot: Plot, frame: SweepFrame, value: str, *, show_valid: bool = False) -> Figure:
    """Draws one figure: columns and rows of panels for the axes that x does not express."""
    data = plot.data
    columns = _levels(data, plot.column_axis)
    rows = _row_levels(data, plot.row_axes)
    title, subtitle = _titles(plot, frame, value, single_panel=len(columns) * len(rows) == 1)
    canvas = _Canvas(
        num_rows=len(rows),
        num_columns=len(columns),
        title=title,
        subtitle=subtitle,
        legend=_legend(data, plot.fits, spec_frontier=plot.spec.frontier, show_valid=show_valid),
        headers=plot.column_axis is not None,
        row_labels=bool(plot.row_axes),
        two_line_ticks=plot.spec.ticks == "examples",
    )
    y_limits = _y_limits(data, value, show_valid)
    x_limits = _log_limits(data["x"])
    for r, row in enumerate(rows):
        for c, column in enumerate(columns):
            axes = canvas.axes(r, c)
            panel = {**({plot.column_axis: column} if plot.column_axis else {}), **dict(zip(plot.row_axes, row, strict=True))}
            part = _where(data, panel)
            fits = [fit for fit in plot.fits if fit.panel == panel]
            _draw_panel(axes, part, fits, value, show_valid=show_valid)
            _chance_line(axes, part, value, labelled=r == c == 0)
            axes.set_ylim(*y_limits)
            _x_axis(axes, plot, x_limits, labels=r == len(rows) - 1)
            axes.yaxis.set_major_locator(MaxNLocator(5))
            if c:
                axes.tick_params(labelleft=False)
            if r == 0 and plot.column_axis:
                axes.set_title(_axis_text(plot.column_axis, column), fontsize=7.5, color=INK, pad=4)
            if c == len(columns) - 1 and plot.row_axes:
                text = ", ".join(_axis_text(axis, level) for axis, level in zip(plot.row_axes, row, strict=True))
                axes.annotate(
                    text, (1, 0.5), xytext=(6, 0), xycoords="axes fraction", textcoords="offset points",
                    rotation=270, va="center", ha="left", fontsize=7.5, color=INK,
                )  # fmt: skip
    canvas.shared_labels(plot.spec.x_label, _value_label(value))
    return canvas.figure
