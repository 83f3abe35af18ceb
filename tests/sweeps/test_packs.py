"""Packs: who trains together, and in which order."""

import random
from collections import Counter
from pathlib import Path

import pytest

import sweeps
from hyla_core.config import MEMBER_FIELDS
from sweeps.expand import TrialSpec, expand
from sweeps.packs import Pack, make_packs, shape_key, trial_flops
from sweeps.spec import load_sweep

SCALING = Path(sweeps.__file__).parent / "scaling.yaml"


@pytest.fixture(scope="module")
def trials() -> list[TrialSpec]:
    return expand(load_sweep(SCALING))


@pytest.mark.parametrize(
    ("max_size", "sizes"),
    [(1, {1: 1944}), (5, {5: 81 * 4, 4: 81}), (7, {6: 81 * 4}), (24, {24: 81}), (1000, {24: 81})],
)
def test_packs_hold_each_trial_once_and_are_filled_evenly(
    trials: list[TrialSpec], max_size: int, sizes: dict[int, int]
) -> None:
    # 24 trials (8 hyperparameter settings × 3 seeds) of each of the 81 cells can train together.
    packs = make_packs(trials, max_size)
    assert Counter(len(pack.trials) for pack in packs) == sizes
    assert Counter(t.trial_id for pack in packs for t in pack.trials) == Counter(t.trial_id for t in trials)
    assert len({pack.pack_id for pack in packs}) == len(packs)


def test_members_differ_in_member_fields_only(trials: list[TrialSpec]) -> None:
    for pack in make_packs(trials, 24):
        fields = [trial.config.flat() for trial in pack.trials]
        differing = {name for name in fields[0] if len({member[name] for member in fields}) > 1}
        assert differing <= set(MEMBER_FIELDS)
        assert "optim.peak_lr" in differing


def test_every_shape_is_met_once_before_the_rest_of_any_and_the_cheapest_first(trials: list[TrialSpec]) -> None:
    packs = make_packs(trials, 24)
    shapes = [shape_key(pack.trials[0].config) for pack in packs]
    costs = [trial_flops(pack.trials[0].config) for pack in packs]
    assert len(set(shapes)) == 27  # attention × width × depth; the three training sets share the program
    assert len(set(shapes[:27])) == 27
    assert costs[:27] == sorted(costs[:27])
    assert {pack.trials[0].config.data.num_steps for pack in packs[:27]} == {78_125}
    # Two more packs of each shape, adjacent, in the order of the first round.
    assert shapes[27:] == [shape for shape in shapes[:27] for _ in range(2)]
    assert [pack.trials[0].config.data.num_steps for pack in packs[27:29]] == [156_250, 312_500]


def test_packs_depend_on_the_trials_alone(trials: list[TrialSpec]) -> None:
    shuffled = random.Random(0).sample(trials, len(trials))

    def members(packs: list[Pack]) -> set[frozenset[str]]:
        return {frozenset(trial.trial_id for trial in pack.trials) for pack in packs}

    assert make_packs(trials, 5) == make_packs(trials, 5)
    assert {pack.pack_id for pack in make_packs(shuffled, 24)} == {pack.pack_id for pack in make_packs(trials, 24)}
    assert members(make_packs(shuffled, 24)) == members(make_packs(trials, 24))


def test_no_trials_make_no_packs() -> None:
    assert make_packs([], 4) == []


def test_a_pack_holds_someone(trials: list[TrialSpec]) -> None:
    with pytest.raises(ValueError, match="max_pack_size=0"):
        make_packs(trials, 0)
