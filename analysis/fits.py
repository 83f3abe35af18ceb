"""Power-law fits of error against size, compute or data, with bootstrap intervals: numpy in, `FitResult` out.

Scaling letters, used nowhere else in the project:

  N  non-embedding parameters of a model
  D  examples in the training set
  C  floating-point operations of the whole training

A law reads `error = coefficient · x^(−exponent)` with x one of N, D, C. It has no irreducible error: a third
parameter is not identifiable from the handful of sizes that a sweep has. Curvature on the log-log plot, which such a
floor would cause, shows as a low `r2`.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import linalg

LETTERS = {"num_non_embedding_params": "N", "data.num_train": "D", "train_flops": "C"}
"""Columns that a law can be fitted against."""

MIN_DISTINCT_X = 4  # two parameters through three points leave one degree of freedom: too few to tell noise from trend
NUM_RESAMPLES = 2000
COVERAGE = 0.95


class FitResult(NamedTuple):
    """A fitted power law `coefficient · x^(−exponent)`; `why_not` says why there is none (the numbers are then NaN)."""

    exponent: float
    exponent_low: float  # ends of the bootstrap interval
    exponent_high: float
    coefficient: float
    coefficient_low: float
    coefficient_high: float
    r2: float  # share of the variance of log error that the law explains
    num_points: int
    x_min: float
    x_max: float
    why_not: str = ""

    @property
    def fitted(self) -> bool:
        """Whether there is a law."""
        return not self.why_not

    def predict(self, x: ArrayLike) -> NDArray[np.float64]:
        """The law's error at x, in the shape of x."""
        return self.coefficient * np.asarray(x, dtype=float) ** -self.exponent


def fit_power_law(
    x: ArrayLike, error: ArrayLike, *, num_resamples: int = NUM_RESAMPLES, rng_seed: int = 0
) -> FitResult:
    """Fits `error = coefficient · x^(−exponent)` by least squares on logarithms.

    The interval is a percentile bootstrap of the residuals, scaled by √(n / (n − 2)) since a fit of two parameters
    leaves residuals too small by that factor. Residuals hold both the noise of the seeds and the law's misfit; a
    resampling of seeds alone would leave the second out and have no width with one seed. With few points the interval
    is a rough guide.

    Args:
      x: [points] sizes, each greater than zero.
      error: [points] mean error at each x. Zeros and numbers that are not finite are left out: a law has no zeros.
      num_resamples: of the bootstrap.
      rng_seed: of the bootstrap; the same input gives the same interval.

    Returns:
      The fit, or one with `why_not` where fewer than `MIN_DISTINCT_X` distinct x remain.
    """
    all_x, all_error = np.asarray(x, dtype=float), np.asarray(error, dtype=float)
    usable = np.isfinite(all_x) & (all_x > 0) & np.isfinite(all_error) & (all_error > 0)
    xs, errors = all_x[usable], all_error[usable]
    num_distinct = len(np.unique(xs))
    if num_distinct < MIN_DISTINCT_X:
        num_unusable = len(all_x) - len(xs)
        left_out = f" ({num_unusable} without a positive error left out)" if num_unusable else ""
        return _no_fit(f"{num_distinct} distinct x{left_out}; a fit needs {MIN_DISTINCT_X}", len(xs))

    log_x, log_error = np.log(xs), np.log(errors)
    (intercept, slope), *_ = linalg.lstsq(np.stack([np.ones_like(log_x), log_x], axis=1), log_error)
    fitted = intercept + slope * log_x
    residuals = (log_error - fitted) * np.sqrt(len(xs) / (len(xs) - 2))

    rng = np.random.default_rng(rng_seed)
    resampled = fitted + rng.choice(residuals, size=(num_resamples, len(xs)))  # [resamples, points]
    centred = log_x - log_x.mean()
    slopes = resampled @ centred / np.sum(centred**2)
    intercepts = resampled.mean(axis=1) - slopes * log_x.mean()
    tails = [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2]
    exponent_low, exponent_high = np.quantile(-slopes, tails)
    coefficient_low, coefficient_high = np.exp(np.quantile(intercepts, tails))

    variance = np.sum((log_error - log_error.mean()) ** 2)
    r2 = 1 - np.sum((log_error - fitted) ** 2) / variance if variance > 0 else np.nan
    return FitResult(
        exponent=float(-slope),
        exponent_low=float(exponent_low),
        exponent_high=float(exponent_high),
        coefficient=float(np.exp(intercept)),
        coefficient_low=float(coefficient_low),
        coefficient_high=float(coefficient_high),
        r2=float(r2),
        num_points=len(xs),
        x_min=float(xs.min()),
        x_max=float(xs.max()),
    )


def _no_fit(why_not: str, num_points: int) -> FitResult:
    nan = float("nan")
    return FitResult(nan, nan, nan, nan, nan, nan, nan, num_points, nan, nan, why_not)
