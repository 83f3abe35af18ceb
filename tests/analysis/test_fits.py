import math

import numpy as np
import pytest

from analysis.fits import MIN_DISTINCT_X, fit_power_law

SIZES = np.array([1e5, 3e5, 1e6, 3e6, 1e7])


def test_an_exact_law_is_recovered():
    fit = fit_power_law(SIZES, 7.5 * SIZES**-0.31)
    assert fit.fitted
    np.testing.assert_allclose([fit.exponent, fit.coefficient, fit.r2], [0.31, 7.5, 1.0], rtol=1e-9)
    np.testing.assert_allclose([fit.exponent_low, fit.exponent_high], 0.31, rtol=1e-6)
    assert (fit.num_points, fit.x_min, fit.x_max) == (5, 1e5, 1e7)
    np.testing.assert_allclose(fit.predict([[1e6], [1e7]]), 7.5 * np.array([[1e6], [1e7]]) ** -0.31)


def test_least_squares_on_logarithms_agrees_with_polyfit():
    error = 2.0 * SIZES**-0.2 * np.array([1.1, 0.9, 1.05, 0.97, 1.02])
    slope, intercept = np.polyfit(np.log(SIZES), np.log(error), 1)
    fit = fit_power_law(SIZES, error)
    np.testing.assert_allclose([fit.exponent, fit.coefficient], [-slope, math.exp(intercept)], rtol=1e-9)


def test_intervals_cover_the_true_exponent_about_as_often_as_they_say():
    rng = np.random.default_rng(0)
    xs = np.geomspace(1e5, 1e8, 9)
    covered = 0
    for _ in range(200):
        error = 5.0 * xs**-0.25 * np.exp(0.05 * rng.normal(size=9))
        fit = fit_power_law(xs, error, num_resamples=400)
        covered += fit.exponent_low <= 0.25 <= fit.exponent_high
    assert 0.85 <= covered / 200 <= 0.99  # nine points: a percentile bootstrap falls a little short of 95 %


def test_the_interval_grows_with_the_noise_and_repeats_itself():
    noise = np.array([1.0, -1.0, 0.5, -0.8, 0.3])
    quiet, loud = (fit_power_law(SIZES, SIZES**-0.3 * np.exp(scale * noise)) for scale in (0.01, 0.1))
    assert loud.exponent_high - loud.exponent_low > 5 * (quiet.exponent_high - quiet.exponent_low) > 0
    assert quiet == fit_power_law(SIZES, SIZES**-0.3 * np.exp(0.01 * noise))


def test_too_few_sizes_are_refused_with_the_reason():
    xs = [1e5, 1e6, 1e7, 1e7, 1e7]
    fit = fit_power_law(xs, [0.5, 0.4, 0.3, 0.3, 0.3])
    assert not fit.fitted
    assert fit.why_not == f"3 distinct x; a fit needs {MIN_DISTINCT_X}"
    assert math.isnan(fit.exponent)


@pytest.mark.parametrize("unusable", [0.0, math.nan, -0.1])
def test_errors_that_have_no_logarithm_are_left_out_and_counted(unusable):
    error = 3.0 * SIZES**-0.4
    kept = fit_power_law([*SIZES, 1e8], [*error, unusable])
    np.testing.assert_allclose(kept.exponent, 0.4, rtol=1e-9)
    assert kept.num_points == 5
    assert "1 without a positive error" in fit_power_law(SIZES[:4], [*error[:3], unusable]).why_not
