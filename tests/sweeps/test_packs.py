"""Packs: who trains together, and in which order."""

import random
from collections import Counter
from pathlib import Path

import pytest

import sweeps
from hyla_core.config import MEMBER_FIELDS, TrainConfig
from hyla_core.counts import step_memory_bytes
from sweeps.expand import TrialSpec, expand
from sweeps.packs import Pack, make_packs, shape_key, short_pack_size, trial_flops
from sweeps.spec import Resources, load_sweep

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


def sizes_by_shape(packs: list[Pack]) -> dict[str, list[int]]:
    """Sizes of each shape's packs, under `attention width depth`."""
    sizes: dict[str, list[int]] = {}
    for pack in packs:
        axes = pack.trials[0].axes
        name = f"{axes['model.attention']} {axes['model.width']} {axes['model.depth']}"
        sizes.setdefault(name, []).append(len(pack.trials))
    return sizes


def test_a_pack_is_no_larger_than_the_memory(trials: list[TrialSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    # 1 GB a layer and member, and 2 GB a member besides: 8 members of depth 4 need 48 GB, 5 need 30 GB; of depth 8, 3
    # need 30 GB; of depth 16, one needs 18 GB and two 36 GB.
    def side_by_side_bytes(config: TrainConfig, num_members: int, *, side_by_side: bool) -> int:
        assert side_by_side
        return num_members * (config.model.num_layers + 2) * 10**9

    monkeypatch.setattr("sweeps.packs.step_memory_bytes", side_by_side_bytes)
    sizes = sizes_by_shape(make_packs(trials, 8, 30 * 10**9))
    assert sorted(sizes["hyla 4 4"]) == [4] * 3 + [5] * 12  # 24 trials in each of three groups
    assert sizes["hyla 4 8"] == [3] * 24
    assert sizes["hyla 4 16"] == [1] * 72
    # A byte less, and the fifth and the third no longer fit.
    sizes = sizes_by_shape(make_packs(trials, 8, 30 * 10**9 - 1))
    assert (sizes["softmax 1 4"], sizes["softmax 1 8"]) == ([4] * 18, [2] * 36)


def test_a_trial_that_needs_more_than_there_is_is_alone(trials: list[TrialSpec]) -> None:
    packs = make_packs(trials, 8, 0)
    assert {len(pack.trials) for pack in packs} == {1}
    assert len(packs) == len(trials)


def test_members_that_take_turns_share_their_room(trials: list[TrialSpec]) -> None:
    config = next(t.config for t in trials if t.axes["model.attention"] == "hyla" and t.config.model.num_layers == 4)
    memory = step_memory_bytes(config, 2)
    assert step_memory_bytes(config, 8, side_by_side=False) <= memory < step_memory_bytes(config, 3)
    group = [t for t in trials if shape_key(t.config) == shape_key(config)]
    in_turns = make_packs(group, 8, memory, side_by_side=False)
    assert {len(pack.trials) for pack in in_turns} == {8}
    at_once = make_packs(group, 8, memory)
    largest = max(len(pack.trials) for pack in at_once)
    assert largest == 2


def test_with_memory_for_all_packs_are_as_without_a_limit(trials: list[TrialSpec]) -> None:
    assert make_packs(trials, 8, 10**15) == make_packs(trials, 8)


def short_trials(num_trials: int, num_steps: int = 1) -> list[TrialSpec]:
    overrides = [f"axes.seed={list(range(num_trials))}", f"data.num_steps={num_steps}"]
    overrides += ["axes.model.attention=[softmax]", "axes.model.width=[1]", "axes.model.depth=[1]"]
    overrides += ["axes.data.train_fraction=[1.0]", "axes.optim.warmup_steps=[0]"]
    return expand(load_sweep(SCALING, tiny=True, overrides=overrides))


def test_many_short_trainings_share_larger_packs_and_leave_enough_of_them() -> None:
    def sizes(trials: list[TrialSpec]) -> Counter[int]:
        return Counter(len(pack.trials) for pack in make_packs(trials, 4, short_pack_size=16))

    assert sizes(short_trials(320)) == {16: 20}
    assert sizes(short_trials(96)) == {6: 16}  # sixteen packs are left to be shared
    assert sizes(short_trials(40)) == {4: 10}
    assert sizes(short_trials(320, num_steps=480)) == {4: 80}  # not short
    assert {len(pack.trials) for pack in make_packs(short_trials(320), 4)} == {4}
    assert {len(pack.trials) for pack in make_packs(short_trials(320), 24, short_pack_size=16)} <= {22, 23, 24}
    assert {len(pack.trials) for pack in make_packs(short_trials(320), 4, 0, short_pack_size=16)} == {1}


def test_packs_of_short_trainings_are_larger_on_cores_alone() -> None:
    assert short_pack_size(Resources(cpu=1)) == 16
    assert short_pack_size(Resources(cpu=1, gpu=1)) is None
