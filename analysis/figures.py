"""All drawing: held-out metrics against width, depth, parameters, training FLOPs and training-set size.

`plot_data` makes the table that a figure shows, and `draw` draws that table and nothing else, so the CSV beside a
figure holds exactly its numbers. Nothing is averaged but seeds: sizes that a figure's x does not tell apart get
panels of their own, or dots of their own where x orders models of many shapes.

The interval of a mean is the range of its seeds, and every seed is a dot. With the two or three seeds that a large
sweep affords, a 95 % t interval reaches 9 or 2.5 standard deviations to each side and hides every trend, and a
bootstrap of two or three numbers is no better than their range.
"""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from numpy.typing import NDArray

from analysis.fits import LETTERS, FitResult, fit_power_law
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
    frontier: bool = False  # x orders models of many shapes; the line joins those that no smaller one beats


MAX_COLUMNS = 4  # panels side by side that stay readable at the width of a page

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
        frontier=True,
    ),
    FigureSpec(
        name="flops",
        against="training compute",
        x_label="training FLOPs",
        x_columns=("train_flops",),
        stands_for=SIZE_AXES + LENGTH_AXES,
        ticks="power",
        frontier=True,
    ),
    FigureSpec(
        name="examples",
        against="training-set size",
        x_label="training examples (fraction of the full set)",
        x_columns=("data.num_train",),
        stands_for=(FRACTION, "data.num_train"),
        ticks="examples",
    ),
)
TASK_FIGURES = tuple(
    FigureSpec(name, against, x_label, (axis,), (axis,), "values")
    for name, against, x_label, axis in (
        ("context", "examples in context", "examples in context", "task.num_context"),
        (
            "held_out_combinations",
            "share of combinations held out",
            "share of combinations held out of training",
            "task.test_fraction",
        ),
        ("held_out_parts", "share of parts held out", "share of parts held out of training", "task.ood_fraction"),
    )
)
"""Drawn where the sweep has an axis for them."""


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
    "hyla_gated": VariantStyle("HYLA, gated", "#882255", "<"),
}
SPARE_STYLES = (("#44AA99", ">"), ("#999933", "p"), ("#332288", "h"))  # variants added later

AXIS_LABELS = {
    FRACTION: "training fraction",
    "data.num_train": "training examples",
    "data.passes": "passes",
    "task.num_context": "examples in context",
    "task.test_fraction": "held-out combinations",
    "task.ood_fraction": "held-out parts",
}
METRIC_LABELS = {
    "accuracy_per_feature": "accuracy per feature",
    "accuracy": "accuracy (all features)",
    "loss": "loss (nats)",
    "r2": "R²",
}
X_LABELS = {"model.emb_dim": "embedding width", "model.num_layers": "layers"}  # where axes name sizes themselves
SPLIT_LABELS = {"ood": "held-out", "valid": "in-distribution", "test": "test"}
TASK_LABELS = {"sraven": "SRAVEN", "fuzzy_logic": "fuzzy logic", "language": "language modelling"}
# What the task calls its parts; elsewhere the general words hold.
TASK_SPLIT_LABELS = {
    ("fuzzy_logic", "ood"): "held-out conjunctions,",
    ("fuzzy_logic", "test"): "held-out combinations,",
}
TASK_METRIC_LABELS = {("fuzzy_logic", "loss"): "squared error"}
# What a law is fitted to.
ERROR_OF = {"accuracy": "1 − accuracy", "accuracy_per_feature": "1 − accuracy", "r2": "1 − R²", "loss": "loss"}


class NoFigure(Exception):
    """A figure would show nothing; the message says why."""


class Plot(NamedTuple):
    """A figure's content, ready to draw and to write as CSV."""

    spec: FigureSpec
    data: pd.DataFrame  # one row per cell; `x` its place, `on_line` whether the line passes through it
    x: str  # column
    x_label: str
    column_axis: str | None  # axis whose values are the panels' columns
    row_axes: tuple[str, ...]
    fits: list["PanelFit"]


class PanelFit(NamedTuple):
    """The law of one variant in one panel."""

    variant: str
    panel: dict[str, Any]  # the values of the panel's axes
    error: str  # what the law is of
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
    if num_values and cells[x].min() <= 0:
        raise NoFigure(f"{spec.x_label} goes down to {cells[x].min():g}, which a logarithmic axis cannot show")
    if num_values < 2:
        raise NoFigure(f"{spec.x_label} takes {'one value' if num_values else 'no value'} in this sweep")
    varying = [a for a in frame.cell_axes if cells[a].nunique() > 1 and a not in (ATTENTION, *spec.stands_for)]
    column_axis = FRACTION if FRACTION in varying else next(iter(varying), None)
    if column_axis and cells[column_axis].nunique() > MAX_COLUMNS:
        column_axis = None  # its values stand below each other instead
    row_axes = tuple(axis for axis in varying if axis != column_axis)

    panel_axes = [axis for axis in (column_axis, *row_axes) if axis]
    data = cells.assign(x=cells[x].astype(float))
    data = data.sort_values("x", kind="stable").reset_index(drop=True)
    groups = [part for _, part in data.groupby([ATTENTION, *panel_axes], sort=False, dropna=False)]
    on_line = [index for part in groups for index in (_frontier(part) if spec.frontier else part.index)]
    data["on_line"] = data.index.isin(on_line) & data["mean"].notna() & data["x"].notna()
    fits = [_fit(part.assign(on_line=data["on_line"]), panel_axes, value) for part in groups] if x in LETTERS else []
    return Plot(spec, data, x, X_LABELS.get(x, spec.x_label), column_axis, row_axes, fits)


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
    if metric in ERROR_OF:
        fit = fit_power_law(used["x"], used["mean"] if metric == "loss" else 1 - used["mean"])
    else:
        fit = fit_power_law([], [])._replace(why_not=f"{metric} is neither an accuracy, nor R², nor a loss")
    panel = {axis: first[axis] for axis in panel_axes}
    return PanelFit(first[ATTENTION], panel, ERROR_OF.get(metric, metric), fit)


CSV_FACTS = ("mean", "low", "high", "std", "num_seeds", "num_seeds_asked", "complete", "on_line", "missing")
SELECTION = ("num_candidates", "num_candidates_complete")


def csv_table(data: pd.DataFrame, frame: SweepFrame, value: str, x: str | None = None) -> pd.DataFrame:
    """What a figure shows, as it stands in the CSV beside it: one row per cell, lists joined by semicolons."""
    lead = list(dict.fromkeys([ATTENTION, *frame.cell_axes, *([x] if x else [])]))
    split, metric = value.split("/")
    sizes = [n for n in ("data.num_train", "num_non_embedding_params", "train_flops") if n not in lead]
    chosen = [axis for axis in frame.select_over if axis in data and axis not in lead]
    measured = [name for name in frame.measured if name != value]
    table = data[[*lead, *sizes]].copy()
    table.insert(0, "split", split)
    table.insert(1, "metric", metric)
    facts = [name for name in CSV_FACTS if name in data]
    table = pd.concat([table, data[[*facts, *chosen, *SELECTION, *measured]]], axis=1)
    table["seed_values"] = [";".join(repr(number) for number in numbers) for numbers in data["seed_values"]]
    table["trial_ids"] = [";".join(ids) for ids in data["trial_ids"]]
    return table


# ----------------------------------------------------------------------------------------------------------- drawing

INK, MUTED, GRID = "#222222", "#767676", "#E8E8E8"
STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same figure on every machine
    "font.size": 7.5,
    "axes.labelsize": 8,
    "axes.edgecolor": "#9A9A9A",
    "axes.linewidth": 0.6,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "xtick.major.size": 2.5,
    "ytick.major.size": 0,
    "xtick.major.width": 0.6,
    "xtick.major.pad": 2,
    "ytick.major.pad": 2,
    "mathtext.default": "regular",
    "pdf.fonttype": 42,  # letters stay letters in the PDF
    "figure.facecolor": "white",
}
DPI = 200
LINE_INCHES = 0.135  # height of a line of small text


def draw(plot: Plot, frame: SweepFrame, value: str, *, show_valid: bool = False) -> Figure:
    """Draws one figure: columns and rows of panels for the axes that x does not express."""
    data = plot.data
    columns = _levels(data, [plot.column_axis] if plot.column_axis else [])
    rows = _levels(data, plot.row_axes)
    with matplotlib.rc_context():
        _set_style()
        canvas = _Canvas(
            num_rows=len(rows),
            num_columns=len(columns),
            title=f"{_value_label(value, frame)} against {plot.spec.against}",
            subtitle=_subtitle(plot, frame),
            legend=_legend([plot], show_valid=show_valid),
            headers=plot.column_axis is not None,
            row_labels=bool(plot.row_axes),
            tick_lines=2 if _has_fractions(plot) else 1,
        )
        y_limits = _y_limits([plot], value, show_valid)
        for r, row in enumerate(rows):
            for c, column in enumerate(columns):
                panel = {**column, **row}
                axes = canvas.axes(r, c)
                _draw_panel(axes, plot, panel, value, show_valid=show_valid, label_chance=r == c == 0)
                _y_axis(axes, value, y_limits)
                axes.tick_params(labelbottom=r == len(rows) - 1, labelleft=c == 0)
                if r == 0 and column:
                    axes.set_title(panel_text(column), fontsize=7.5, pad=4)
                if c == len(columns) - 1 and row:
                    canvas.row_label(axes, panel_text(row))
        canvas.label(plot.x_label, _value_label(value, frame, short=True))
    return canvas.figure


def draw_overview(
    plots: Sequence[Plot], cells: pd.DataFrame, frame: SweepFrame, value: str, *, show_valid: bool = False
) -> Figure:
    """Draws one panel of every figure, at the largest values of the axes it does not show, and held-out against valid.

    Args:
      plots: the figures.
      cells: all cells, for the last panel; it is left out where there is no validation metric of the same name.
      frame: the sweep.
      value: the metric on the y axis.
      show_valid: whether to add the in-distribution metric to the curves.
    """
    with_gap = has_gap(cells, value)
    num_panels = len(plots) + with_gap
    num_columns = 3 if num_panels > 4 else min(2, num_panels)
    with matplotlib.rc_context():
        _set_style()
        canvas = _Canvas(
            num_rows=-(-num_panels // num_columns),
            num_columns=num_columns,
            title=f"{_value_label(value, frame)}: overview",
            subtitle=f"{_context(frame)} Each panel at the largest value of the axes that it does not show.",
            legend=_legend(plots, show_valid=show_valid),
            headers=True,
            own_x=True,
            tick_lines=2 if any(map(_has_fractions, plots)) else 1,
            inner_tick_lines=2 if any(map(_has_fractions, plots[:-num_columns])) else 1,
        )
        y_limits = _y_limits(plots, value, show_valid)
        for position in range(num_panels):
            axes = canvas.axes(*divmod(position, num_columns))
            if position < len(plots):
                plot = plots[position]
                panel = largest_panel(plot)
                _draw_panel(axes, plot, panel, value, show_valid=show_valid, label_chance=position == 0)
                header = panel_text(panel) + (", all sizes" if plot.spec.frontier else "")
                header, x_label = header.removeprefix(", "), plot.x_label
            else:
                _draw_gap(axes, cells, value, y_limits)
                header = "all cells (line: no gap)"
                x_label = _value_label(f"valid/{value.split('/')[1]}", frame, short=True)
            _y_axis(axes, value, y_limits)
            axes.tick_params(labelleft=position % num_columns == 0)
            axes.set_xlabel(x_label, labelpad=2, fontsize=7)
            # Panels stand close together: a long header is set smaller, not over its neighbour's.
            axes.set_title(header, fontsize=min(7.5, 7.5 * 45 / max(1, len(header))), pad=4)
        canvas.label("", _value_label(value, frame, short=True))
    return canvas.figure


def has_gap(cells: pd.DataFrame, value: str) -> bool:
    """Whether the metric can be set against itself on the validation split."""
    split, metric = value.split("/")
    return split != "valid" and f"valid/{metric}" in cells and bool(cells[f"valid/{metric}"].notna().any())


def _draw_gap(axes: Axes, cells: pd.DataFrame, value: str, y_limits: tuple[float, float]) -> None:
    """Every cell, held-out against in-distribution; generalisation falls short below the diagonal."""
    valid = f"valid/{value.split('/')[1]}"
    for variant in variants(cells):
        rows = cells[(cells[ATTENTION] == variant) & cells["mean"].notna()]
        style = style_of(variant)
        for complete, group in rows.groupby("complete"):
            axes.plot(
                group[valid], group["mean"], **_marker(style, hollow=not complete, scale=0.8), linestyle="", alpha=0.85
            )
    low, high = _padded(cells[valid].min(), cells[valid].max(), _is_log(value))
    low, high = min(low, y_limits[0]), max(high, y_limits[1])  # the diagonal, where both splits agree, is in view
    low, high = _padded(low, high, _is_log(value))  # so that no marker is cut
    axes.plot([low, high], [low, high], color=MUTED, lw=0.7, zorder=1)
    if _is_log(value):
        axes.set_xscale("log")
        _set_ticks(axes.xaxis, _round_ticks(low, high))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.set_xlim(low, high)


def largest_panel(plot: Plot) -> dict[str, Any]:
    """Of each axis that x does not express the largest value, the last one where values have no order."""
    axes = [plot.column_axis] if plot.column_axis else []
    return {axis: level[axis] for axis in (*axes, *plot.row_axes) for level in _levels(plot.data, [axis])[-1:]}


def panel_rows(data: pd.DataFrame, panel: Mapping[str, Any]) -> pd.DataFrame:
    """The rows of one panel."""
    for axis, level in panel.items():
        data = data[data[axis].isna() if level is None else data[axis] == level]
    return data


def save(figure: Figure, stem: Path) -> list[Path]:
    """Writes PNG (200 dpi) and PDF; equal figures give equal bytes."""
    paths = [stem.with_suffix(".png"), stem.with_suffix(".pdf")]
    with matplotlib.rc_context():
        _set_style()
        figure.savefig(paths[0], dpi=DPI, metadata={"Software": None})
        figure.savefig(paths[1], metadata={"CreationDate": None, "Producer": None, "Creator": None})
    return paths


def _set_style() -> None:
    matplotlib.rcdefaults()  # whatever the user's matplotlibrc says
    matplotlib.rcParams.update(STYLE)  # type: ignore[arg-type]  # its stub wants each name as a literal


def style_of(variant: str) -> VariantStyle:
    """How a variant looks, the same in every figure and sweep."""
    if variant in VARIANT_STYLES:
        return VARIANT_STYLES[variant]
    color, marker = SPARE_STYLES[sum(map(ord, variant)) % len(SPARE_STYLES)]
    return VariantStyle(variant, color, marker)


class _Canvas:
    """A figure laid out in inches, so that text has its room however many panels there are."""

    LEFT, RIGHT, GAP = 0.48, 0.12, 0.13

    def __init__(
        self,
        *,
        num_rows: int,
        num_columns: int,
        title: str,
        subtitle: str,
        legend: Sequence[Any],
        headers: bool = False,
        row_labels: bool = False,
        own_x: bool = False,
        tick_lines: int = 1,
        inner_tick_lines: int = 1,
    ):
        """Sets the size and writes title, subtitle and legend."""
        self.num_rows, self.num_columns = num_rows, num_columns
        width = 3.4 if num_columns == 1 else 6.9 if num_columns > 2 else 5.2  # one or two columns of a paper
        right = self.RIGHT + (0.14 if row_labels else 0)
        self.panel_width = (width - self.LEFT - right - self.GAP * (num_columns - 1)) / num_columns
        self.panel_height = min(2.1, max(1.15, 0.8 * self.panel_width))
        below = 0.07 + LINE_INCHES * tick_lines + 0.19
        self.row_gap = 0.46 + LINE_INCHES * inner_tick_lines if own_x else 0.13
        self.figure = Figure(figsize=(width, 2))
        FigureCanvasAgg(self.figure)

        characters = int(width * 16.5)
        title_lines = textwrap.wrap(title, int(width * 12))
        subtitle_lines = textwrap.wrap(subtitle, characters)
        handles = self._legend_rows(legend)
        title_height, subtitle_height = 0.18 * len(title_lines), LINE_INCHES * len(subtitle_lines)
        legend_height = 0.155 * len(handles)
        top = 0.08 + title_height + subtitle_height + 0.05 + legend_height + 0.07 + (0.17 if headers else 0)
        height = top + num_rows * self.panel_height + (num_rows - 1) * self.row_gap + below
        self.width, self.height, self.top, self.below = width, height, top, below
        self.figure.set_size_inches(width, height)

        x = 0.08 / width
        self.figure.text(x, 1 - 0.08 / height, "\n".join(title_lines), fontsize=9, fontweight="bold", va="top")
        y = 1 - (0.08 + title_height) / height
        self.figure.text(x, y, "\n".join(subtitle_lines), fontsize=6.5, color=MUTED, va="top", linespacing=1.25)
        for number, row in enumerate(handles):
            y = 1 - (0.08 + title_height + subtitle_height + 0.05 + 0.155 * number) / height
            self.figure.add_artist(self._make_legend(row, (0.08 / width, y)))

    def _make_legend(self, handles: Sequence[Any], anchor: tuple[float, float]) -> Any:
        legend = self.figure.legend(
            handles=list(handles),
            ncol=len(handles),
            loc="upper left",
            bbox_to_anchor=anchor,
            frameon=False,
            fontsize=7,
            borderpad=0,
            borderaxespad=0,
            handlelength=1.8,
            handletextpad=0.5,
            columnspacing=1.1,
        )
        self.figure.legends.remove(legend)
        return legend

    def _legend_rows(self, handles: Sequence[Any]) -> list[list[Any]]:
        """Handles broken into rows that fit the figure's width, by their drawn size."""
        rows: list[list[Any]] = []
        limit = (self.figure.get_figwidth() - 0.16) * self.figure.dpi
        for handle in handles:
            trial = [*(rows[-1] if rows else []), handle]
            if rows and self._make_legend(trial, (0, 1)).get_window_extent().width <= limit:
                rows[-1] = trial
            else:
                rows.append([handle])
        return rows

    def axes(self, row: int, column: int) -> Axes:
        """The panel at (row, column)."""
        left = self.LEFT + column * (self.panel_width + self.GAP)
        bottom = self.height - self.top - (row + 1) * self.panel_height - row * self.row_gap
        size = (self.panel_width / self.width, self.panel_height / self.height)
        axes = self.figure.add_axes((left / self.width, bottom / self.height, *size))
        axes.grid(axis="y", color=GRID, linewidth=0.6)
        axes.yaxis.set_major_locator(MaxNLocator(5))
        return axes

    def label(self, x_label: str, y_label: str) -> None:
        """One label for all panels' x and one for all their y."""
        centre = (self.LEFT + (self.num_columns * (self.panel_width + self.GAP) - self.GAP) / 2) / self.width
        middle = (self.below + (self.height - self.top - self.below) / 2) / self.height
        self.figure.text(centre, 0.05 / self.height, x_label, ha="center", va="bottom", fontsize=8)
        self.figure.text(0.04 / self.width, middle, y_label, rotation=90, ha="left", va="center", fontsize=8)

    def row_label(self, axes: Axes, text: str) -> None:
        """Names a row of panels at its right end."""
        axes.annotate(
            text,
            (1, 0.5),
            xytext=(5, 0),
            xycoords="axes fraction",
            textcoords="offset points",
            rotation=270,
            va="center",
            ha="left",
        )


def _draw_panel(
    axes: Axes, plot: Plot, panel: Mapping[str, Any], value: str, *, show_valid: bool, label_chance: bool
) -> None:
    part = panel_rows(plot.data, panel)
    for variant in variants(part):
        rows = part[(part[ATTENTION] == variant) & part["mean"].notna() & part["x"].notna()]
        style = style_of(variant)
        line = rows[rows["on_line"]]
        axes.fill_between(line["x"], line["low"], line["high"], color=style.color, alpha=0.16, linewidth=0, zorder=2)
        if show_valid and (valid := "valid/" + value.split("/")[1]) in rows:
            axes.plot(line["x"], line[valid], color=style.color, alpha=0.5, lw=0.8, dashes=(5, 2), zorder=2)
        for fit in plot.fits:
            if fit.variant == variant and fit.panel == panel and fit.fit.fitted:
                xs = np.geomspace(fit.fit.x_min, fit.fit.x_max, 100)
                error = fit.fit.predict(xs)
                ys = error if value.endswith("/loss") else 1 - error
                axes.plot(xs, ys, color=style.color, lw=0.9, dashes=(1.5, 1.5), zorder=3)
        axes.plot(line["x"], line["mean"], color=style.color, lw=1.4, zorder=4, solid_capstyle="round")
        axes.vlines(rows["x"], rows["low"], rows["high"], color=style.color, alpha=0.5, lw=0.8, zorder=3)
        xs_of_seeds = [x for x, values in zip(rows["x"], rows["seed_values"], strict=True) for _ in values]
        seeds = [value for values in rows["seed_values"] for value in values]
        dots: dict[str, Any] = {"linestyle": "", "marker": ".", "markersize": 3.4, "markeredgewidth": 0}
        axes.plot(xs_of_seeds, seeds, **dots, color=style.color, alpha=0.6, zorder=3.5)
        for (complete, on_line), group in rows.groupby(["complete", "on_line"]):
            axes.plot(
                group["x"],
                group["mean"],
                **_marker(style, hollow=not complete, scale=1 if on_line else 0.75),
                linestyle="",
                alpha=1 if on_line else 0.45,
                zorder=5 if on_line else 3.7,
            )
    _chance_line(axes, part, value, labelled=label_chance)
    _x_axis(axes, plot)


def _marker(style: VariantStyle, *, hollow: bool = False, scale: float = 1) -> dict[str, Any]:
    """Options of a variant's marker; hollow says that seeds are missing."""
    size = {"D": 4.2, "s": 4.6, "*": 7, "P": 5.6, "X": 5.6}.get(style.marker, 5)  # alike to the eye
    return {
        "marker": style.marker,
        "markersize": size * scale,
        "markerfacecolor": "white" if hollow else style.color,
        "markeredgecolor": style.color if hollow else "white",
        "markeredgewidth": 0.9 if hollow else 0.4,
    }


def _chances(part: pd.DataFrame, value: str) -> list[tuple[float, str]]:
    """Accuracy of a uniform guess and its name, for each number of values in the rows; none for other metrics."""
    metric = value.split("/")[1]
    if metric not in ("accuracy", "accuracy_per_feature"):
        return []
    chances = []
    for row in part[["task.num_values", "task.num_features"]].dropna().drop_duplicates().itertuples(index=False):
        num_values, num_features = (int(number) for number in row)
        odds = num_values if metric == "accuracy_per_feature" else num_values**num_features
        chances.append((1 / odds, f"chance, 1/{odds:,}"))
    return sorted(set(chances))


def _chance_line(axes: Axes, part: pd.DataFrame, value: str, *, labelled: bool) -> None:
    for level, text in _chances(part, value):
        axes.axhline(level, color=MUTED, lw=0.7, dashes=(4, 2, 1, 2), zorder=1)
        if labelled:
            axes.annotate(
                text,
                (1, level),
                xytext=(-1, -1.5),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                ha="right",
                va="top",
                fontsize=6.5,
                color=MUTED,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},  # over a grid line, it hides that
            )


def _y_limits(plots: Sequence[Plot], value: str, show_valid: bool) -> tuple[float, float]:
    """Limits that hold every seed and, with room for its label below, the chance line."""
    numbers: list[float] = []
    for plot in plots:
        numbers += plot.data[["low", "high"]].to_numpy(dtype=float).ravel().tolist()
        if show_valid and (valid := "valid/" + value.split("/")[1]) in plot.data:
            numbers += plot.data[valid].tolist()
    levels = [level for plot in plots for level, _ in _chances(plot.data, value)]
    finite = [number for number in (*numbers, *levels) if np.isfinite(number) and (number > 0 or not _is_log(value))]
    if not finite:
        return 0.5, 2.0
    low, high = min(finite), max(finite)
    if levels and low == min(levels):
        low -= 0.08 * (high - low)
    return _padded(low, high, _is_log(value))


def _padded(low: float, high: float, log: bool) -> tuple[float, float]:
    if log:
        pad = max((high / low) ** 0.06, 1.02)
        return low / pad, high * pad
    pad = 0.06 * ((high - low) or max(abs(high), 1e-3))
    return low - pad, high + pad


def _is_log(value: str) -> bool:
    """A power law of a loss is a straight line on logarithmic axes; an accuracy is read on a linear one."""
    return value.endswith("/loss")


def _y_axis(axes: Axes, value: str, limits: tuple[float, float]) -> None:
    if _is_log(value):
        axes.set_yscale("log")
        _set_ticks(axes.yaxis, _round_ticks(*limits))
    axes.set_ylim(*limits)


def _x_axis(axes: Axes, plot: Plot) -> None:
    """Logarithmic, with ticks at the values or at round numbers, alike in all panels of a figure."""
    xs = np.sort(plot.data["x"].dropna().unique())
    pad = (xs[-1] / xs[0]) ** 0.08
    low, high = xs[0] / pad, xs[-1] * pad
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    at_values = plot.spec.ticks == "values" or _has_fractions(plot)
    # A round tick at the very end would stand under the next panel's first one.
    end = low * (high / low) ** 0.95
    ticks = _thinned(xs, 0.2 if _has_fractions(plot) else 0.07) if at_values else _round_ticks(low, end)
    _set_ticks(axes.xaxis, ticks, _tick_texts(plot, ticks))


def _set_ticks(axis: Axis, ticks: Sequence[float], texts: Sequence[str] | None = None) -> None:
    """Puts ticks in these places of a logarithmic axis and nowhere else."""
    names = dict(zip(ticks, texts or [f"{tick:.3g}" for tick in ticks], strict=True))
    axis.set_major_locator(FixedLocator(list(ticks)))
    axis.set_major_formatter(FuncFormatter(lambda tick, _: names.get(tick, "")))
    axis.set_minor_locator(NullLocator())


def _thinned(xs: NDArray[np.float64], min_gap: float) -> list[float]:
    """The ascending numbers without those that come closer than a share of the logarithmic range to a larger one."""
    kept: list[float] = []
    gap = min_gap * np.log(xs[-1] / xs[0])
    for x in xs[::-1].tolist():
        if not kept or np.log(kept[-1] / x) >= gap:
            kept.append(x)
    return kept[::-1]


def _has_fractions(plot: Plot) -> bool:
    return plot.spec.ticks == "examples" and FRACTION in plot.data


def _round_ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers between low and high, evenly spread on a logarithmic axis."""
    decades = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    best: list[float] = []
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
        best = [step * 10.0**decade for decade in decades for step in steps if low <= step * 10.0**decade <= high]
        if len(best) >= 3:
            break
    if len(best) < 3:
        # Over so short a range a logarithmic axis is nearly even: what is round on an even one.
        best = [float(tick) for tick in MaxNLocator(5).tick_values(low, high) if low <= tick <= high]
    stride = -(-len(best) // 6)
    return best[::stride] if best else [low, high]


def _tick_texts(plot: Plot, ticks: Sequence[float]) -> list[str]:
    if plot.spec.ticks == "power":
        return [_power_text(tick) for tick in ticks]
    if plot.spec.ticks == "values":
        return [f"{tick:g}" for tick in ticks]
    texts = [si_text(tick) for tick in ticks]
    if _has_fractions(plot):
        fractions = plot.data.dropna(subset="x").groupby("x")[FRACTION].first()
        texts = [f"{text}\n({fractions[tick]:g})" for text, tick in zip(texts, ticks, strict=True)]
    return texts


def si_text(number: float) -> str:
    """12300 → 12.3k, three significant digits."""
    for power, letter in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if abs(number) >= 10**power * 0.9995:
            return f"{number / 10**power:.3g}{letter}"
    return f"{number:.3g}"


def _power_text(number: float) -> str:
    exponent = int(np.floor(np.log10(number) + 1e-9))
    mantissa = number / 10.0**exponent
    lead = "" if abs(mantissa - 1) < 1e-6 else f"{mantissa:.2g}\\times"
    return f"${lead}10^{{{exponent}}}$"


def _legend(plots: Sequence[Plot], *, show_valid: bool) -> list[Any]:
    data = pd.concat([plot.data for plot in plots])
    handles: list[Any] = []
    for variant in variants(data):
        style = style_of(variant)
        handles.append(Line2D([], [], color=style.color, lw=1.4, label=style.label, **_marker(style)))
    if (data["num_seeds"] > 1).any():
        handles.append(Patch(color=MUTED, alpha=0.25, linewidth=0, label="range of seeds"))
    if show_valid:
        handles.append(Line2D([], [], color=MUTED, alpha=0.6, lw=0.8, dashes=(5, 2), label="in-distribution"))
    if any(fit.fit.fitted for plot in plots for fit in plot.fits):
        handles.append(Line2D([], [], color=MUTED, lw=0.9, dashes=(1.5, 1.5), label="power law"))
    drawn = data[data["mean"].notna()]
    for shown, label, options in (
        ((~drawn["complete"]).any(), "seeds missing", {"markerfacecolor": "white", "markeredgewidth": 0.9}),
        ((~drawn["on_line"]).any(), "beaten by a smaller cell", {"markersize": 3.6, "alpha": 0.5}),
    ):
        if shown:
            marker: dict[str, Any] = {"color": MUTED, "linestyle": "", "marker": "o", "markersize": 4.5, **options}
            handles.append(Line2D([], [], label=label, **marker))
    return handles


def _levels(data: pd.DataFrame, axes: Sequence[str]) -> list[dict[str, Any]]:
    """Distinct values of the axes together, in ascending order where they have one."""
    if not axes:
        return [{}]
    distinct = data[list(axes)].drop_duplicates()
    for axis in reversed(axes):
        if all(isinstance(level, int | float) for level in distinct[axis]):
            distinct = distinct.sort_values(axis, kind="stable")
    return [dict(zip(axes, row, strict=True)) for row in distinct.itertuples(index=False, name=None)]


def variants(data: pd.DataFrame) -> list[str]:
    """Variants in a fixed order: as in the table of styles, then by name."""
    known = list(VARIANT_STYLES)
    present = data[ATTENTION].dropna().unique().tolist()
    return sorted(present, key=lambda name: (known.index(name) if name in known else len(known), name))


def panel_text(panel: Mapping[str, Any]) -> str:
    """A panel's place in words, `width 2, depth 4`."""
    return ", ".join(f"{axis_label(axis)} {level_text(level)}" for axis, level in panel.items())


def axis_label(axis: str) -> str:
    """An axis in words."""
    return AXIS_LABELS.get(axis, axis.rpartition(".")[2].replace("_", " "))


def level_text(level: Any) -> str:
    """An axis value in words."""
    return f"{level:,g}" if isinstance(level, float) else f"{level:,}" if type(level) is int else str(level)


def _value_label(value: str, frame: SweepFrame, *, short: bool = False) -> str:
    split, metric = value.split("/")
    tasks = _tasks(frame)
    task = tasks[0] if len(tasks) == 1 else ""
    metric_text = METRIC_LABELS.get(metric, metric.replace("_", " "))
    metric_text = TASK_METRIC_LABELS.get((task, metric), metric_text)
    text = f"{TASK_SPLIT_LABELS.get((task, split), SPLIT_LABELS.get(split, split))} {metric_text}"
    return text if short else text[0].upper() + text[1:]


def _tasks(frame: SweepFrame) -> list[str]:
    return [str(name) for name in frame.trials["task.name"].dropna().unique()]


def _context(frame: SweepFrame) -> str:
    tasks = ", ".join(TASK_LABELS.get(name, name) for name in _tasks(frame))
    chosen = ", ".join(axis_label(axis) for axis in frame.select_over)
    how = f" {chosen[0].upper() + chosen[1:]} chosen on the in-distribution split." if chosen else ""
    return f"{tasks[:1].upper() + tasks[1:]}, sweep {frame.sweep}. Mean over seeds.{how}"


def _subtitle(plot: Plot, frame: SweepFrame) -> str:
    text = _context(frame)
    if plot.spec.frontier:
        text += " The line joins the cells that no cell further left beats on the in-distribution split."
    return text
