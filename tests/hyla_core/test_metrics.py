import jax.numpy as jnp
import numpy as np
import pytest

from hyla_core import metrics
from hyla_core.metrics import MetricsRow


def test_fillers_do_not_count_even_if_they_are_not_finite():
    values = {"loss": jnp.array([1.0, 2.0, jnp.nan]), "accuracy": jnp.array([0.0, 1.0, 1.0])}
    sums = metrics.weighted_sums(values, jnp.array([1.0, 1.0, 0.0]))
    assert {name: float(value) for name, value in sums.items()} == {"loss": 3.0, "accuracy": 1.0}


def test_rows_are_python_numbers_in_the_order_of_names():
    rows = metrics.mean_rows("a1", 7, "valid", {"loss": np.float32(3), "accuracy": jnp.float32(1)}, np.int32(4))
    assert rows == [MetricsRow("a1", 7, "valid", "accuracy", 0.25), MetricsRow("a1", 7, "valid", "loss", 0.75)]
    assert all(type(row.value) is float for row in rows)


@pytest.mark.parametrize("value", [np.zeros(1), jnp.zeros((2, 3))])
def test_what_is_no_scalar_is_named(value):
    with pytest.raises(ValueError, match=r"metric 'loss' has shape \["):
        metrics.to_scalar("loss", value)
