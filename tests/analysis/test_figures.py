import re

import matplotlib.image
import numpy as np
import pandas as pd
import pytest

from analysis import figures
from analysis.frames import load_sweep, points_of
from analysis.selection import select_points
from sweeps.store import Store

VALUE = "ood/accuracy_per_feature"
SPECS = {spec.name: spec for spec in figures.FIGURES}


def cells_of(frame, value=VALUE):
    return select_points(points_of(frame, value), frame.cell_axes)


@pytest.fixture(scope="module")
def scaling(scaling_store):
    frame = load_sweep(Store.open(scaling_store))
    return frame, cells_of(frame)


def texts(figure) -> list[str]:
    found = [text.get_text() for text in figure.texts]
    for axes in figure.axes:
        found += [axes.get_title(), axes.get_xlabel(), *(text.get_text() for text in axes.texts)]
    return [text for text in found if text]


def lines(axes, color) -> list:
    return [line for line in axes.lines if line.get_color() == color]


@pytest.mark.parametrize(
    ("name", "column_axis", "row_axes"),
    [
        ("width", "data.train_fraction", ("model.depth",)),
        ("depth", "data.train_fraction", ("model.width",)),
        ("params", "data.train_fraction", ()),
        ("flops", None, ()),
        ("examples", "model.width", ("model.depth",)),
    ],
)
def test_axes_that_x_does_not_express_get_panels(scaling, name, column_axis, row_axes):
    frame, cells = scaling
    plot = figures.plot_data(cells, SPECS[name], frame, VALUE)
    assert (plot.column_axis, plot.row_axes) == (column_axis, row_axes)
    assert len(plot.data) == 24  # every cell is in the table, on a line or not


def test_a_line_never_passes_two_cells_at_one_x(scaling):
    frame, cells = scaling
    for spec in figures.FIGURES:
        plot = figures.plot_data(cells, spec, frame, VALUE)
        panel_axes = [axis for axis in (plot.column_axis, *plot.row_axes) if axis]
        on_line = plot.data[plot.data["on_line"]]
        assert on_line.groupby(["model.attention", *panel_axes, "x"]).size().max() == 1


def test_many_values_stand_below_each_other(stores, tmp_path):
    stores.write(tmp_path / "r", {"model.width": [1, 2], "model.depth": [1, 2, 3, 4, 5]})
    frame = load_sweep(Store.open(tmp_path / "r"))
    plot = figures.plot_data(cells_of(frame), SPECS["width"], frame, VALUE)
    assert (plot.column_axis, plot.row_axes) == (None, ("model.depth",))


def test_an_axis_with_one_value_has_no_figure(stores, tmp_path):
    stores.write(tmp_path / "r", {"model.width": [1, 2], "model.depth": [2]})
    frame = load_sweep(Store.open(tmp_path / "r"))
    for name in ("depth", "examples"):
        with pytest.raises(figures.NoFigure, match="takes one value in this sweep"):
            figures.plot_data(cells_of(frame), SPECS[name], frame, VALUE)
    assert len(figures.plot_data(cells_of(frame), SPECS["params"], frame, VALUE).data) == 2


def frontier_of(xs, valid) -> list[int]:
    part = pd.DataFrame({"x": xs, "valid/accuracy": valid, "valid/loss": 0.5, "mean": 0.3})
    return figures._frontier(part)


@pytest.mark.parametrize(
    ("xs", "valid", "expected"),
    [
        ([1, 2, 4, 8], [0.1, 0.3, 0.2, 0.4], [0, 1, 3]),  # the third is beaten by the smaller second
        ([1, 2, 2, 4], [0.1, 0.2, 0.3, 0.4], [0, 2, 3]),  # of two at one size the better
        ([1, 2, 4], [0.9, 0.8, 0.7], [0]),
        ([4, 2, 1], [0.9, 0.8, 0.7], [2, 1, 0]),
        ([1, 2], [0.5, 0.5], [0]),  # as good at a smaller size
    ],
)
def test_the_frontier_joins_what_no_smaller_cell_beats_on_validation(xs, valid, expected):
    assert frontier_of(xs, valid) == expected


def test_the_drawn_line_and_band_are_the_tables_numbers(scaling):
    frame, cells = scaling
    plot = figures.plot_data(cells, SPECS["width"], frame, VALUE)
    figure = figures.draw(plot, frame, VALUE)
    assert len(figure.axes) == 4
    style = figures.VARIANT_STYLES["hyla"]
    rows = figures.panel_rows(plot.data, {"data.train_fraction": 0.25, "model.depth": 1})
    rows = rows[rows["model.attention"] == "hyla"]
    solid = next(line for line in lines(figure.axes[0], style.color) if line.get_linewidth() == 1.4)
    np.testing.assert_array_equal(solid.get_xydata(), rows[["x", "mean"]])
    band = figure.axes[0].collections[4]  # softmax, linear, HYLA: a band and the ranges of each
    assert {tuple(vertex) for vertex in band.get_paths()[0].vertices} >= set(zip(rows["x"], rows["high"], strict=True))
    dots = next(line for line in lines(figure.axes[0], style.color) if line.get_marker() == ".")
    assert sorted(dots.get_ydata()) == sorted(value for values in rows["seed_values"] for value in values)


def test_cells_that_lack_seeds_are_hollow(stores, tmp_path):
    def ends(trial):
        return "diverged" if trial.axes == {"model.width": 2, "seed": 1} else "finished"

    stores.write(tmp_path / "r", {"model.width": [1, 2], "seed": [0, 1]}, status=ends)
    frame = load_sweep(Store.open(tmp_path / "r"))
    plot = figures.plot_data(cells_of(frame), SPECS["width"], frame, VALUE)
    figure = figures.draw(plot, frame, VALUE)
    faces = {
        line.get_xdata()[0]: line.get_markerfacecolor() for line in figure.axes[0].lines if line.get_marker() == "o"
    }
    assert faces == {1.0: figures.VARIANT_STYLES["softmax"].color, 2.0: "white"}
    legend = [text.get_text() for child in figure.artists for text in child.get_texts()]
    assert "seeds missing" in legend


def test_chance_is_drawn_at_one_over_the_number_of_values(scaling):
    frame, _ = scaling
    for value, level, label in ((VALUE, 1 / 8, "chance, 1/8"), ("ood/accuracy", 1 / 64, "chance, 1/64")):
        plot = figures.plot_data(cells_of(frame, value), SPECS["width"], frame, value)
        figure = figures.draw(plot, frame, value)
        assert label in texts(figure)
        for axes in figure.axes:
            assert any(list(line.get_ydata()) == [level, level] for line in axes.lines)
            assert axes.get_ylim()[0] < level


def test_loss_has_no_chance_line_and_a_law_of_its_own(scaling):
    frame, _ = scaling
    plot = figures.plot_data(cells_of(frame, "ood/loss"), SPECS["flops"], frame, "ood/loss")
    figure = figures.draw(plot, frame, "ood/loss")
    assert not any("chance" in text for text in texts(figure))
    assert "Held-out loss (nats) against training\ncompute" in texts(figure)
    assert figure.axes[0].get_yscale() == "log"
    fit = plot.fits[0]
    assert (fit.error, fit.fit.fitted) == ("loss", True)
    dashed = next(line for line in figure.axes[0].lines if line.get_linewidth() == 0.9)
    np.testing.assert_allclose(dashed.get_ydata()[[0, -1]], fit.fit.predict([fit.fit.x_min, fit.fit.x_max]))


def test_titles_say_what_is_shown(scaling):
    frame, cells = scaling
    figure = figures.draw(figures.plot_data(cells, SPECS["examples"], frame, VALUE), frame, VALUE)
    found = texts(figure)
    assert "Held-out accuracy per feature against training-set size" in found
    assert "held-out accuracy per feature" in found
    assert {"width 1", "width 2", "depth 1", "depth 2"} <= set(found)
    ticks = [tick.get_text() for tick in figure.axes[-1].get_xticklabels()]
    assert ticks == ["19.2k\n(0.25)", "76.8k\n(1)"]


@pytest.mark.parametrize("name", ["width", "flops"])
def test_no_text_leaves_the_figure_or_covers_another(scaling, name):
    frame, cells = scaling
    figure = figures.draw(figures.plot_data(cells, SPECS[name], frame, VALUE), frame, VALUE, show_valid=True)
    renderer = figure.canvas.get_renderer()
    figure.draw(renderer)
    artists = [text for text in figure.texts if text.get_text()]
    artists += [text for legend in figure.artists for text in legend.get_texts()]
    for axes in figure.axes:
        artists += [axes.title, *axes.texts]
        for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            shown = [tick for tick in axis.get_major_ticks() if limits[0] <= tick.get_loc() <= limits[1]]
            artists += [tick.label1 for tick in shown]
    boxes = [(a.get_text(), a.get_window_extent(renderer)) for a in artists if a.get_text() and a.get_visible()]
    width, height = figure.canvas.get_width_height()
    for text, box in boxes:
        assert box.x0 >= 0, text
        assert box.y0 >= 0, text
        assert box.x1 <= width + 1, text
        assert box.y1 <= height + 1, text
    for i, (text, box) in enumerate(boxes):
        for other, other_box in boxes[i + 1 :]:
            overlap_x = min(box.x1, other_box.x1) - max(box.x0, other_box.x0)
            overlap_y = min(box.y1, other_box.y1) - max(box.y0, other_box.y0)
            assert overlap_x <= 1 or overlap_y <= 1, (text, other)


def test_saved_figures_are_not_blank_and_repeat_byte_for_byte(scaling, tmp_path):
    frame, cells = scaling
    plot = figures.plot_data(cells, SPECS["params"], frame, VALUE)
    paths = []
    for name in ("a", "b"):
        paths.append(figures.save(figures.draw(plot, frame, VALUE), tmp_path / name))
    for first, second in zip(*paths, strict=True):
        assert first.read_bytes() == second.read_bytes()
    pixels = matplotlib.image.imread(paths[0][0])
    assert pixels.shape[1] == int(5.2 * 200)  # two panels
    hyla = np.array([int(figures.VARIANT_STYLES["hyla"].color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    assert (np.abs(pixels[..., :3] - hyla).max(axis=-1) < 0.02).sum() > 200
    assert paths[0][1].read_bytes().startswith(b"%PDF")


def test_variants_never_share_a_look():
    styles = list(figures.VARIANT_STYLES.values())
    for field in ("label", "color", "marker"):
        assert len({getattr(style, field) for style in styles}) == len(styles)
    assert all(re.fullmatch("#[0-9A-F]{6}", style.color) for style in styles)
    unknown = figures.style_of("mamba")
    assert unknown == figures.style_of("mamba")
    assert unknown.color not in {style.color for style in styles}


def test_laws_are_fitted_to_complete_cells_on_the_line(scaling):
    frame, cells = scaling
    plot = figures.plot_data(cells, SPECS["flops"], frame, VALUE)
    assert [fit.variant for fit in plot.fits] == ["softmax", "linear", "hyla"]
    for fit in plot.fits:
        used = plot.data[(plot.data["model.attention"] == fit.variant) & plot.data["on_line"]]
        slope = np.polyfit(np.log(used["x"]), np.log(1 - used["mean"]), 1)[0]
        assert fit.fit.exponent == pytest.approx(-slope)
        assert fit.fit.num_points == len(used)
    lacking = cells.assign(complete=False)
    plot = figures.plot_data(lacking, SPECS["flops"], frame, VALUE)
    assert {fit.fit.why_not for fit in plot.fits} == {"0 distinct x; a fit needs 4"}


@pytest.mark.parametrize(
    ("number", "text"), [(0.5, "0.5"), (999, "999"), (999.9, "1k"), (12_345, "12.3k"), (4e7, "40M"), (1.5e9, "1.5G")]
)
def test_si_text(number, text):
    assert figures.si_text(number) == text


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (2e4, 3e6, [3e4, 1e5, 3e5, 1e6, 3e6]),
        (9e3, 2e7, [1e4, 1e5, 1e6, 1e7]),
        (9e4, 6e5, [1e5, 3e5]),
        (1.1e5, 1.3e5, [1.12e5, 1.16e5, 1.2e5, 1.24e5, 1.28e5]),
        (3.5, 5.1, [3.6, 4, 4.4, 4.8]),
    ],
)
def test_round_ticks_lie_inside_and_are_few(low, high, expected):
    ticks = figures._round_ticks(low, high)
    assert all(low <= tick <= high for tick in ticks)
    assert 2 <= len(ticks) <= 6
    if len(expected) > 2 or high / low < 1.5:
        np.testing.assert_allclose(ticks, expected)


def test_ticks_too_close_to_a_larger_one_are_left_out():
    assert figures._thinned(np.array([0.1, 0.25, 0.5, 0.9, 1.0]), 0.2) == [0.1, 0.25, 0.5, 1.0]
    assert figures._thinned(np.array([1.0, 2.0, 4.0, 8.0, 16.0]), 0.2) == [1.0, 2.0, 4.0, 8.0, 16.0]


@pytest.mark.parametrize("value", [VALUE, "ood/loss"])
def test_the_overview_ends_with_held_out_against_in_distribution(scaling, value):
    frame, _ = scaling
    cells = cells_of(frame, value)
    plots = [figures.plot_data(cells, spec, frame, value) for spec in figures.FIGURES]
    figure = figures.draw_overview(plots, cells, frame, value)
    assert len(figure.axes) == 6
    gap = figure.axes[-1]
    hyla = next(line for line in gap.lines if line.get_marker() == "D")
    rows = cells[cells["model.attention"] == "hyla"]
    np.testing.assert_array_equal(hyla.get_xydata(), rows[["valid/" + value.split("/")[1], "mean"]])
    (low, high), (bottom, top) = gap.get_xlim(), gap.get_ylim()
    assert low <= bottom < top <= high  # so that the diagonal crosses the panel
    titles = [axes.get_title() for axes in figure.axes]
    assert titles[:2] == ["training fraction 1, depth 2", "training fraction 1, width 2"]
    assert titles[2:4] == ["training fraction 1, all sizes", "all sizes"]
