"""Probes on data whose answer is known."""

import sys

import numpy as np
import pytest

from analysis.probes import fit_probe, probe_accuracy

pytest.importorskip("sklearn")


def clusters(num_each: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Points [3 · num_each, 2, 5] around three far centres, and the centre of each."""
    rng = np.random.default_rng(seed)
    labels = np.repeat([2, 5, 7], num_each)
    centres = np.random.default_rng(99).normal(size=(3, 2, 5))
    return centres[np.searchsorted([2, 5, 7], labels)] + 0.01 * rng.normal(size=(3 * num_each, 2, 5)), labels


def test_what_is_there_is_found_however_small():
    rng = np.random.default_rng(0)

    def hidden_in_noise(inputs):
        return np.concatenate([1e-6 * inputs, 1e3 * rng.normal(size=(len(inputs), 2, 1))], axis=-1)

    inputs, labels = clusters(20, seed=0)
    probe = fit_probe(hidden_in_noise(inputs), labels)
    other, answers = clusters(30, seed=1)
    found = probe_accuracy(probe, hidden_in_noise(other), answers)
    assert found == (1.0, pytest.approx(1 / 3), 90)


def test_what_is_not_there_is_not_found():
    rng = np.random.default_rng(0)
    inputs, labels = rng.normal(size=(400, 3)), rng.integers(2, size=400)
    probe = fit_probe(inputs[:200], labels[:200])
    assert probe_accuracy(probe, inputs[200:], labels[200:]).accuracy == pytest.approx(0.5, abs=0.1)


def test_chance_is_what_the_most_frequent_label_gets_elsewhere():
    probe = fit_probe([[0.0], [0.1], [1.0], [1.1], [1.2]], [3, 3, 8, 8, 8])
    found = probe_accuracy(probe, [[0.0], [0.2], [0.1], [1.0]], [3, 3, 3, 8])
    assert found == (1.0, 0.25, 4)


def test_a_heavy_penalty_leaves_the_most_frequent_label():
    probe = fit_probe([[0.0], [0.1], [1.0], [1.1], [1.2]], [3, 3, 8, 8, 8], penalty=1e9)
    assert probe.classifier.predict([[0.0]]) == [8]


@pytest.mark.parametrize(
    ("inputs", "labels", "message"),
    [
        (np.zeros((4, 2)), [1, 1, 1, 1], r"labels are all \[1\]"),
        (np.zeros((4, 2)), [1, 2, 3], r"inputs \[4, 2\] and labels \[3\] do not fit"),
        (np.zeros((2, 2)), [[1, 2], [3, 4]], r"labels have one axis"),
        ([[np.nan], [1.0]], [1, 2], "not all finite"),
    ],
)
def test_what_cannot_be_probed_is_refused_in_one_line(inputs, labels, message):
    with pytest.raises(ValueError, match=message) as error:
        fit_probe(inputs, labels)
    assert "\n" not in str(error.value)


def test_a_missing_package_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.linear_model", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'hyla\[analysis\]'"):
        fit_probe([[0.0], [1.0]], [0, 1])
