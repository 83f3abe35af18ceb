import numpy as np
import pytest
from sraven_rules import ambiguity_count

from hyla_core.tasks.sraven_ambiguity import ambiguity_counts

SENSES = ("every_feature", "any_feature")


@pytest.mark.parametrize(("features", "size", "num_values"), [(1, 3, 4), (2, 3, 3), (2, 4, 4), (3, 3, 3)])
def test_counts_equal_those_of_all_reshufflings_one_by_one(features, size, num_values):
    # Equal rows and few values make many explanations; half of the instances have shifted rows, which leaves fewer.
    rng = np.random.default_rng(features)
    cells = rng.integers(num_values, size=(60 if features < 3 else 10, 1, size, features))
    shift = rng.integers(2, size=(len(cells), size, 1, features)) * (np.arange(len(cells)) % 2).reshape(-1, 1, 1, 1)
    cells = (cells + shift) % num_values
    cells[:, -1, -1] = rng.integers(num_values, size=(len(cells), features))
    for sense in SENSES:
        expected = [ambiguity_count(instance, num_values, sense) for instance in cells]
        assert 2 <= np.count_nonzero(expected) < len(cells)
        np.testing.assert_array_equal(ambiguity_counts(cells, num_values, sense), expected)


def test_senses_differ_where_one_feature_is_sure():
    # Feature 0 is 5 everywhere: whatever rule it fits, the answer is 5. Feature 1 may be a sum, 3 + 1 = 4 (the answer),
    # or permute {1, 2, 3}, which leaves 2. Columns mixed from both fit no rule in at least one of the two features:
    # 5 2 5 / 5 1 ?, 1 5 5 / 3 5 ? and 1 2 5 / 3 1 ?. So the two ways to name the features are all there is.
    unsure = [[1, 2, 3], [1, 2, 3], [3, 1, 4]]
    cells = np.stack([np.full((3, 3), 5), unsure], axis=-1)[None]
    assert ambiguity_counts(cells, 8, "every_feature").tolist() == [0]
    assert ambiguity_counts(cells, 8, "any_feature").tolist() == [2]


def test_unusable_arguments_are_refused():
    with pytest.raises(ValueError, match="sense='all' is unknown; choose one of"):
        ambiguity_counts(np.zeros((1, 3, 3, 1), int), 8, "all")
    with pytest.raises(ValueError, match="num_features=10, grid_size=3"):
        ambiguity_counts(np.zeros((1, 3, 3, 10), int), 8, "any_feature")
