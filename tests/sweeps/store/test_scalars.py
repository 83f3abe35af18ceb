"""What may enter the store as a number, and what is refused by name."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sweeps.store import Store, scalars


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.25, 0.25),
        (3, 3.0),
        (Fraction(1, 4), 0.25),
        (np.float32(0.25), 0.25),
        (np.int8(-3), -3.0),
        (np.array(0.25), 0.25),
        (np.longdouble(0.25), 0.25),
        (jnp.float32(0.25), 0.25),
        (jnp.array(0.25, jnp.bfloat16), 0.25),
        (jnp.array(7), 7.0),
        (-math.inf, -math.inf),
    ],
)
def test_a_measurement_becomes_a_float(value, expected):
    number = scalars.metric_value(value, 100, "valid", "loss")
    assert type(number) is float
    assert number == expected


def test_a_float32_keeps_its_value_and_nan_is_one():
    assert scalars.metric_value(np.float32(0.1), 1, "train", "loss") == 0.10000000149011612
    assert math.isnan(scalars.metric_value(jnp.nan, 1, "train", "loss"))


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (np.zeros(3), r"an array of shape \(3,\)"),
        (jnp.zeros((1, 1)), r"an array of shape \(1, 1\)"),
        ("0.5", r"a str \('0.5'\)"),
        (None, "None"),
        (True, r"a bool \(True\)"),
        (np.bool_(True), r"a bool \(True\)"),
        (1j, r"a complex \(1j\)"),
        ([0.5], r"a list \(\[0.5\]\)"),
        (np.datetime64("2026-01-01"), r"a date \(datetime\.date\(2026, 1, 1\)\)"),
    ],
)
def test_what_is_no_number_is_refused_with_the_name_of_its_metric(value, what):
    with pytest.raises(ValueError, match=rf"^metric valid/accuracy at step 100 is {what}; a number is needed$"):
        scalars.metric_value(value, 100, "valid", "accuracy")


def test_a_number_that_no_column_holds_is_refused():
    with pytest.raises(ValueError, match=r"^metric train/loss at step 1 is an integer of more digits"):
        scalars.metric_value(10**400, 1, "train", "loss")
    for step in (-1, 2**63):
        with pytest.raises(ValueError, match=rf"^step={step} is out of range; 0 to 9223372036854775807 are allowed$"):
            scalars.step_number(step)


def test_a_value_that_jax_only_traces_is_refused_by_name():
    def loss(x):
        return jnp.float32(scalars.metric_value(x, 5, "train", "loss"))

    with pytest.raises(ValueError, match=r"^metric train/loss at step 5 is .* whose value can't be read here"):
        jax.jit(loss)(1.0)


@pytest.mark.parametrize("value", [5, np.int32(5), np.array(5, np.uint8), jnp.array(5)])
def test_a_step_becomes_an_int(value):
    step = scalars.step_number(value)
    assert type(step) is int
    assert step == 5


@pytest.mark.parametrize("value", [5.0, "5", None, False, np.array([5]), jnp.float32(5)])
def test_a_step_that_is_not_whole_is_refused(value):
    with pytest.raises(ValueError, match=r"^step is .*; a (whole )?number is needed$"):
        scalars.step_number(value)


def test_other_values_stay_as_they_are():
    values = {"a": "text", "b": None, "c": True, "d": 1.5}
    assert scalars.plain_values(values, "column") == values
    found = scalars.plain_values({"flops": jnp.float32(2.0), "flag": np.bool_(True)}, "column")
    assert [(value, type(value)) for value in found.values()] == [(2.0, float), (True, bool)]
    with pytest.raises(ValueError, match=r"^column flops is an array of shape \(2,\); a number is needed$"):
        scalars.plain_values({"flops": np.ones(2)}, "column")


def test_an_attempt_takes_device_values_and_refuses_what_is_no_number(tmp_path):
    store = Store.create(tmp_path / "store")
    writer = store.begin("a", {}, {}, 0, 100, {})
    assert writer is not None
    writer.add([(jnp.array(50), "valid", "loss", jnp.float32(0.5))])
    with pytest.raises(ValueError, match=r"^metric valid/accuracy at step 100 is an array of shape \(3,\)"):
        writer.add([(100, "valid", "loss", 0.25), (100, "valid", "accuracy", jnp.zeros(3))])
    writer.update(compile_s=jnp.float32(1.5))
    with pytest.raises(ValueError, match=r"^column compile_s is an array of shape \(2,\)"):
        writer.update(compile_s=np.ones(2))
    writer.heartbeat(step=jnp.array(60), loss=jnp.float32(0.5))
    with pytest.raises(ValueError, match=r"^progress loss is an array of shape \(1,\)"):
        writer.heartbeat(step=70, loss=np.ones(1))
    assert store.statuses()["a"].step == 60
    assert store.statuses()["a"].loss == 0.5
    writer.seal("finished", train_s=np.float32(2.5))
    assert store.metrics()[["step", "value"]].to_numpy().tolist() == [[50, 0.5]]  # of refused rows none
    assert store.trials()[["compile_s", "train_s", "step"]].to_numpy().tolist() == [[1.5, 2.5, 60]]
