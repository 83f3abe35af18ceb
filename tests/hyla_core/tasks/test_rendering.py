import numpy as np

from hyla_core.config import SravenConfig
from hyla_core.tasks.fuzzy_logic import Functions
from hyla_core.tasks.rendering import describe, describe_function
from hyla_core.tasks.sraven import Instances


def test_describe_shows_grid_answer_rules_and_shuffle():
    config = SravenConfig(name="sraven", num_features=2, num_values=11)
    # Feature 0 is constant, feature 1 goes up by one; the middle column shows them the other way round.
    cells = np.array([[[4, 8], [9, 4], [4, 10]], [[0, 1], [2, 0], [0, 3]], [[7, 10], [0, 7], [7, 1]]])
    perms = np.array([[0, 1], [1, 0], [0, 1]])
    instances = Instances(np.stack([cells + 0, cells]), np.array([[7, 7], [0, 1]]), np.stack([perms * 0, perms]))
    assert describe(config, instances, 1).splitlines() == [
        "3 × 3 cells of 2 features with values 0 … 10",
        "   4  8 |  9  4 |  4 10",
        "   0  1 |  2  0 |  0  3",
        "   7 10 |  0  7 |  ?  ?",
        "answer:  7  1",
        "rules, before features are shuffled:",
        "  feature 0: constant",
        "  feature 1: progression +1",
        "features shown, column by column:",
        "   0  1 |  1  0 |  0  1",
    ]


def test_describe_leaves_out_the_shuffle_where_there_is_none():
    config = SravenConfig(name="sraven", num_features=1, num_values=10, permute_features=False)
    instances = Instances(np.full((1, 3, 3, 1), 5), np.array([[0]]), np.zeros((1, 3, 1), int))
    assert describe(config, instances).splitlines() == [
        "3 × 3 cells of 1 feature with values 0 … 9",
        "  5 | 5 | 5",
        "  5 | 5 | 5",
        "  5 | 5 | ?",
        "answer: 5",
        "rules, before features are shuffled:",
        "  feature 0: constant",
    ]


def test_describe_function_shows_the_function_its_context_and_the_query():
    inputs = np.array([[[0.5, 0.25], [0.125, 1.0], [0.75, 0.0]]] * 2)
    latents = np.array([[[0, 0], [1, 1]], [[0, 1], [1, 0]]])
    drawn = Functions(inputs, np.array([[0, 0, 0], [0.5, 0.875, 0.75]]), np.array([[0, 3], [1, 2]]), latents)
    assert describe_function(drawn, 1, max_rows=1).splitlines() == [
        "f(x) = (¬x0 ∧ x1) ∨ (x0 ∧ ¬x1)",
        "context, 2 points:",
        "  0.500 0.250 → 0.500",
        "  … and 1 more",
        "query:",
        "  0.750 0.000 → ?",
        "answer: 0.750",
    ]
