import math

import pytest
from model_cases import small_config

from hyla_core.config import TrainConfig


def test_a_config_is_rebuilt_from_its_columns():
    config = small_config(dropout=0.25, share_layers=True, numerics={"dtype": "bfloat16"})
    row = {"trial_id": "0123456789ab", "version.jax": "0.10.2", "task.of_another": math.nan, **config.flat()}
    row["model.num_layers"] = float(row["model.num_layers"])  # as in a table where other rows lack the column
    assert row["optim.grad_clip_norm"] is None
    assert TrainConfig.from_flat(row) == config
    assert TrainConfig.from_flat(row).trial_id == config.trial_id


def test_columns_that_make_no_config_are_refused():
    flat = small_config().flat()
    with pytest.raises(ValueError, match=r"model\.emb_dim"):
        TrainConfig.from_flat({name: value for name, value in flat.items() if name != "model.emb_dim"})
    with pytest.raises(ValueError, match=r"model\.colour"):
        TrainConfig.from_flat(flat | {"model.colour": "red"})
