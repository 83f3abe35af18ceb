"""Linear probes: how well what produced an example can be read from numbers inside a model.

Takes arrays, such as the latent codes and labels that `hyla_core.latents.collect` returns. Needs scikit-learn, which
comes with the extra `analysis`.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike


class Probe(NamedTuple):
    """A fitted probe.

    Attributes:
      classifier: scikit-learn's logistic regression on standardised inputs.
      most_frequent: the label that most of the examples had that it was fitted to.
    """

    classifier: Any
    most_frequent: Any


class ProbeAccuracy(NamedTuple):
    """How a probe does on examples that it was not fitted to.

    Attributes:
      accuracy: share of labels that it gets right.
      chance: share that the most frequent label of the fitted examples gets right, without a look at the inputs.
      num_examples: over how many.
    """

    accuracy: float
    chance: float
    num_examples: int


def fit_probe(inputs: ArrayLike, labels: ArrayLike, *, penalty: float = 1.0, max_iterations: int = 1000) -> Probe:
    """Fits a multinomial logistic regression, by L-BFGS, to standardised inputs.

    Args:
      inputs: [example, …]; all further axes are flattened.
      labels: [example], of at least two kinds.
      penalty: strength of the squared penalty on weights, relative to the summed cross-entropy (1/C of scikit-learn).
      max_iterations: of L-BFGS; it stops there without converging.

    Returns:
      The probe.

    Raises:
      ValueError: numbers of examples differ, inputs are not finite, or there is one label only.
      ModuleNotFoundError: scikit-learn is not installed.
    """
    flat, answers = _checked(inputs, labels)
    kinds, counts = np.unique(answers, return_counts=True)
    if len(kinds) < 2:
        raise ValueError(f"labels are all {kinds.tolist()}; a probe needs at least two kinds")
    try:
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("probes need scikit-learn: pip install 'hyla[analysis]'", name=error.name) from None
    classifier = make_pipeline(StandardScaler(), LogisticRegression(C=1 / penalty, max_iter=max_iterations))
    classifier.fit(flat, answers)
    return Probe(classifier, kinds[np.argmax(counts)])


def probe_accuracy(probe: Probe, inputs: ArrayLike, labels: ArrayLike) -> ProbeAccuracy:
    """How well a probe does on other examples, and how well one would do that does not look.

    Args:
      probe: from `fit_probe`.
      inputs: [example, …], further axes as it was fitted to.
      labels: [example].

    Returns:
      Accuracy and chance level, both from 0 to 1.

    Raises:
      ValueError: numbers of examples differ, or inputs are not finite.
    """
    flat, answers = _checked(inputs, labels)
    accuracy = np.mean(probe.classifier.predict(flat) == answers)
    return ProbeAccuracy(float(accuracy), float(np.mean(answers == probe.most_frequent)), len(answers))


def _checked(inputs: ArrayLike, labels: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Inputs [example, dim] and labels [example]."""
    numbers, answers = np.asarray(inputs), np.asarray(labels)
    if answers.ndim != 1 or not len(answers) or len(numbers) != len(answers):
        raise ValueError(
            f"inputs {list(numbers.shape)} and labels {list(answers.shape)} do not fit; "
            "labels have one axis, as long as the first of inputs"
        )
    flat = numbers.reshape(len(answers), -1)
    if not np.isfinite(flat).all():
        raise ValueError("inputs are not all finite: was the model trained without diverging?")
    return flat, answers
