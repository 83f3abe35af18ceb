import numpy as np
import pandas as pd
import pytest

from analysis.selection import rank, select_points, selection_metric


def points(*rows: tuple) -> pd.DataFrame:
    """Rows of (width, peak_lr, valid accuracy, valid loss, ood accuracy, seeds); three seeds are asked for."""
    names = ["model.width", "optim.peak_lr", "valid/accuracy", "valid/loss", "ood/accuracy", "num_seeds"]
    return pd.DataFrame(rows, columns=names).assign(num_seeds_asked=3)


def chosen(frame: pd.DataFrame, axes=("model.width",)) -> list[float]:
    return select_points(frame, axes)["optim.peak_lr"].tolist()


def test_validation_decides_where_held_out_accuracy_disagrees():
    frame = points(
        (1, 0.01, 0.90, 0.3, 0.40, 3),
        (1, 0.03, 0.80, 0.5, 0.70, 3),
        (2, 0.01, 0.70, 0.6, 0.90, 3),
        (2, 0.03, 0.95, 0.2, 0.10, 3),
    )
    assert chosen(frame) == [0.01, 0.03]


def test_a_tie_goes_to_the_lower_validation_loss_and_then_to_the_first():
    frame = points((1, 0.01, 0.9, 0.3, 0.5, 3), (1, 0.03, 0.9, 0.2, 0.4, 3), (1, 0.1, 0.9, 0.2, 0.9, 3))
    assert chosen(frame) == [0.03]


def test_points_that_lack_seeds_do_not_compete_with_those_that_have_all():
    frame = points((1, 0.01, 0.99, 0.1, 0.9, 2), (1, 0.03, 0.80, 0.4, 0.6, 3), (1, 0.1, 0.7, 0.5, 0.5, 3))
    cells = select_points(frame, ["model.width"])
    assert cells["optim.peak_lr"].tolist() == [0.03]
    assert cells["complete"].tolist() == [True]
    assert cells[["num_candidates", "num_candidates_complete"]].to_numpy().tolist() == [[3, 2]]


def test_where_no_point_is_complete_the_most_seeds_compete_and_the_choice_says_so():
    frame = points((1, 0.01, 0.99, 0.1, 0.9, 1), (1, 0.03, 0.80, 0.4, 0.6, 2), (1, 0.1, 0.85, 0.3, 0.5, 2))
    cells = select_points(frame, ["model.width"])
    assert cells["optim.peak_lr"].tolist() == [0.1]
    assert cells["complete"].tolist() == [False]


def test_a_cell_without_any_number_keeps_its_row():
    frame = points((1, 0.01, np.nan, np.nan, np.nan, 0), (2, 0.01, 0.5, 0.7, 0.3, 3))
    cells = select_points(frame, ["model.width"])
    assert cells["model.width"].tolist() == [1, 2]
    assert cells["complete"].tolist() == [False, True]


def test_without_cell_axes_all_points_compete():
    assert chosen(points((1, 0.01, 0.5, 0.7, 0.9, 3), (1, 0.03, 0.6, 0.6, 0.1, 3)), axes=()) == [0.03]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [(["valid/accuracy"], "valid/accuracy"), (["valid/r2"], "valid/r2"), ([], "valid/loss")],
)
def test_the_first_measured_metric_ranks(columns, expected):
    frame = pd.DataFrame({"valid/loss": [0.2, 0.1], **{name: [0.9, 0.8] for name in columns}})
    assert selection_metric(frame) == expected
    assert rank(frame).index.tolist() == ([0, 1] if columns else [1, 0])
