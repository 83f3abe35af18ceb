"""Expansion: which trials a sweep has, what their ids depend on, and how bad combinations are reported."""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sweeps
from hyla_core import RESULTS_VERSION
from hyla_core.attention.variants import VARIANTS
from sweeps.expand import TrialSpec, expand
from sweeps.spec import SpecError, load_sweep

SCALING = Path(sweeps.__file__).parent / "scaling.yaml"

BASE: dict[str, Any] = {
    "name": "base",
    "task": {"name": "sraven", "num_features": 2},
    "data": {"num_train": 12800, "passes": 1, "num_valid": 256, "num_ood": 256},
    "model": {"attention": "hyla", "emb_dim": 32, "num_heads": 4, "qk_dim": 16, "v_dim": 64, "mlp_dim": 96, "depth": 2},
    "optim": {"name": "adamw", "batch_size": 64, "peak_lr": 0.001, "weight_decay": 0.1, "warmup_steps": 20},
    "axes": {"seed": [0]},
}

Expand = Callable[..., list[TrialSpec]]


def expand_text(folder: Path, text: str) -> list[TrialSpec]:
    path = folder / "sweep.yaml"
    path.write_text(text)
    return expand(load_sweep(path))


@pytest.fixture
def trials_of(tmp_path: Path) -> Expand:
    """Expands BASE with some of its sections changed: `trials_of(model={"width": 2}, axes={…})`."""

    def _trials_of(**changes: Any) -> list[TrialSpec]:
        document = {name: dict(value) if isinstance(value, dict) else value for name, value in BASE.items()}
        for axis in changes.get("axes", {}):
            section, _, name = axis.rpartition(".")
            document.get(section, {}).pop(name, None)
        for section, change in changes.items():
            merged = change if section == "axes" else {**document.get(section, {}), **change}
            document[section] = {name: value for name, value in merged.items() if value is not None}
        return expand_text(tmp_path, yaml.safe_dump(document, sort_keys=False))

    return _trials_of


def ids(trials: list[TrialSpec]) -> list[str]:
    return [trial.trial_id for trial in trials]


def test_the_paper_grid_has_1944_trials_of_81_cells() -> None:
    spec = load_sweep(SCALING)
    trials = expand(spec)
    assert len(trials) == 3 * 3 * 3 * 3 * 2 * 2 * 2 * 3 == 1944
    assert len(set(ids(trials))) == 1944
    assert set(Counter(trial.point for trial in trials).values()) == {3}
    cells = Counter(tuple(trial.axes[axis] for axis in spec.cell_axes) for trial in trials)
    assert (len(cells), set(cells.values())) == (81, {24})
    assert spec.run.resources.gpu == 1
    # The largest: 40 million problems in one pass of batches of 128, four times as wide with heads of the same size.
    config = trials[-1].config
    assert config.data.num_train == 40_000_000
    assert config.data.num_steps == 312_500
    assert (config.model.emb_dim, config.model.num_heads, config.model.qk_dim) == (512, 64, 256)
    assert (config.model.v_dim, config.model.mlp_dim, config.model.num_layers) == (256, 1024, 16)
    assert config.model.max_distance == 36  # 3 × 3 cells of 4 features
    assert config.model.attention_dropout == 0.1
    assert not config.model.causal


def test_the_tiny_grid_keeps_every_axis() -> None:
    full, tiny = load_sweep(SCALING), load_sweep(SCALING, tiny=True)
    assert list(tiny.axes) == list(full.axes)
    assert tiny.select_over == full.select_over
    assert tiny.run.resources.gpu == 0
    trials = expand(tiny)
    assert 1 < len(trials) <= 100
    assert all(trial.config.data.num_steps * trial.config.optim.batch_size < 100_000 for trial in trials)
    assert {trial.config.task.num_features for trial in trials} == {2}


def test_every_axis_value_stays_as_written(trials_of: Expand) -> None:
    (trial,) = trials_of(axes={"seed": [3], "model.depth": [2.0], "data.train_fraction": [1]})
    assert trial.axes == {"seed": 3, "model.depth": 2.0, "data.train_fraction": 1}
    assert [type(value) for value in trial.axes.values()] == [int, float, int]
    assert trial.config.model.num_layers == 2


def test_order_is_that_of_the_axes_the_last_one_fastest(trials_of: Expand) -> None:
    trials = trials_of(axes={"model.width": [2, 1], "seed": [5, 3]})
    assert [tuple(trial.axes.values()) for trial in trials] == [(2, 5), (2, 3), (1, 5), (1, 3)]


def test_shorthand_is_resolved_and_gone(trials_of: Expand) -> None:
    (trial,) = trials_of(
        model={"width": 3, "depth": 5}, data={"passes": 2.5, "train_fraction": 0.5}, axes={"seed": [7]}
    )
    model, data, seeds = trial.config.model, trial.config.data, trial.config.seeds
    assert (model.emb_dim, model.num_heads, model.qk_dim, model.v_dim, model.mlp_dim) == (96, 12, 48, 192, 288)
    assert model.num_layers == 5
    assert model.max_distance == 18  # 3 × 3 cells of 2 features
    assert data.num_train == 6400
    assert data.num_steps == 250  # ⌊2.5 × 6400 / 64⌋
    assert (seeds.split, seeds.data, seeds.init) == (7, 7, 7)


def test_max_distance_follows_the_task_unless_given(trials_of: Expand) -> None:
    by_task = trials_of(axes={"task.num_features": [1, 3], "seed": [0]})
    assert [trial.config.model.max_distance for trial in by_task] == [9, 27]
    (given_one,) = trials_of(model={"max_distance": 5})
    assert given_one.config.model.max_distance == 5


@pytest.mark.parametrize(
    ("fraction", "num_train", "expected"),
    [
        (0.29, 100, 29),  # in binary 0.29 × 100 is 28.999999999999996
        (0.57, 100, 57),
        (0.1, 30, 3),
        (0.7, 10, 7),
        (0.25, 102, 25),  # rounded down
        (1.0, 101, 101),
        (1e-2, 1000, 10),
    ],
)
def test_train_fraction_is_exact_in_decimal(trials_of: Expand, fraction: float, num_train: int, expected: int) -> None:
    (trial,) = trials_of(
        data={"num_train": num_train, "train_fraction": fraction, "passes": None, "num_steps": 100},
        optim={"batch_size": 1},
    )
    assert trial.config.data.num_train == expected


def test_passes_are_exact_in_decimal(trials_of: Expand) -> None:
    (trial,) = trials_of(data={"num_train": 100, "passes": 1.16}, optim={"batch_size": 1})
    assert math.floor(1.16 * 100) == 115  # what binary arithmetic would make of it
    assert trial.config.data.num_steps == 116


def test_smaller_training_sets_are_contained_in_larger_ones(trials_of: Expand) -> None:
    trials = trials_of(axes={"data.train_fraction": [0.25, 0.5, 1.0], "seed": [0]})
    # Training sets are the examples 0 … num_train - 1 of one stream, which the data seed alone decides.
    assert [trial.config.data.num_train for trial in trials] == [3200, 6400, 12800]
    assert [trial.config.data.num_steps for trial in trials] == [50, 100, 200]
    assert len({trial.config.seeds.data for trial in trials}) == 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_can_be_swept(trials_of: Expand, variant: str) -> None:
    (trial,) = trials_of(model={"attention": variant}, axes={"seed": [0]})
    assert trial.config.model.attention == variant


# ------------------------------------------------------------------------------------------------------------ identity

FROZEN = """\
name: frozen
task: {name: sraven, num_features: 2}
data: {num_train: 12800, passes: 1, num_valid: 256, num_ood: 256}
model: {attention: hyla, emb_dim: 32, num_heads: 4, qk_dim: 16, v_dim: 64, mlp_dim: 96, depth: 2}
optim: {name: adamw, batch_size: 64, peak_lr: 1e-3, weight_decay: 0.1, warmup_steps: 20}
axes: {seed: [0, 1]}
"""


def test_ids_are_frozen(tmp_path: Path) -> None:
    """Stores hold these ids: no finished trial is found again once they change, as they do with RESULTS_VERSION."""
    assert RESULTS_VERSION == 1
    by_hand = (
        '{"data":{"num_ood":256,"num_steps":200,"num_train":12800,"num_valid":256},'
        '"model":{"attention":"hyla","emb_dim":32,"max_distance":18,"mlp_dim":96,"num_heads":4,"num_layers":2,'
        '"qk_dim":16,"v_dim":64},'
        '"optim":{"batch_size":64,"name":"adamw","peak_lr":0.001,"warmup_steps":20,"weight_decay":0.1},'
        '"results_version":1,"seeds":{"data":0,"init":0,"split":0},"task":{"name":"sraven","num_features":2}}'
    )
    first, second = expand_text(tmp_path, FROZEN)
    assert first.trial_id == hashlib.sha256(by_hand.encode()).hexdigest()[:12] == "fd1d227ddad4"
    assert second.trial_id == "97d3128109ce"
    assert first.point == second.point


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("qk_dim: 16, v_dim: 64", "v_dim: 64, qk_dim: 16"),
        ("axes:", "# a comment\nrun: {resources: {gpu: 4}, num_logs: 7, checkpoint_every_s: 1}\naxes:"),
        ("name: frozen", "name: another"),
        ("12800", "12800.0"),
        ("12800", "1.28e4"),
        ("peak_lr: 1e-3", "peak_lr: 0.001"),
        ("peak_lr: 1e-3", "peak_lr: 1.0E-3"),
        ("passes: 1", "passes: 1.0"),
        ("passes: 1", "num_steps: 200"),
        ("num_train: 12800", "num_train: 25600, train_fraction: 0.5"),
        ("depth: 2", "num_layers: 2"),
        ("depth: 2", "depth: 2, width: 1"),
        (
            "emb_dim: 32, num_heads: 4, qk_dim: 16, v_dim: 64, mlp_dim: 96",
            "emb_dim: 8, num_heads: 1, qk_dim: 4, v_dim: 16, mlp_dim: 24, width: 4",
        ),
        ("depth: 2", "depth: 2, max_distance: 18, dropout: 0, causal: false, attention_dropout: -0.0"),
        ("num_features: 2", "num_features: 2, num_values: 8, ood_fraction: 0.25"),
        ("axes:", "numerics: {dtype: float32}\naxes:"),
        ("axes: {seed: [0, 1]}", "seeds: {split: 0, data: 0}\naxes: {seeds.init: [0]}"),
    ],
)
def test_spelling_and_conduct_do_not_change_ids(tmp_path: Path, old: str, new: str) -> None:
    assert old in FROZEN
    assert ids(expand_text(tmp_path, FROZEN.replace(old, new)))[0] == ids(expand_text(tmp_path, FROZEN))[0]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("num_ood: 256", "num_ood: 257"),
        ("qk_dim: 16", "qk_dim: 32"),
        ("depth: 2", "depth: 2, dropout: 0.1"),
        ("axes:", "numerics: {dtype: bfloat16}\naxes:"),
        ("axes:", "seeds: {split: 5}\naxes:"),
    ],
)
def test_what_changes_results_changes_ids(tmp_path: Path, old: str, new: str) -> None:
    assert not set(ids(expand_text(tmp_path, FROZEN.replace(old, new)))) & set(ids(expand_text(tmp_path, FROZEN)))


def test_more_values_keep_the_trials_there_were(trials_of: Expand) -> None:
    before = trials_of(axes={"model.width": [1, 2], "seed": [0, 1]})
    after = trials_of(axes={"seed": [2, 1, 0], "optim.peak_lr": [1e-3, 3e-4], "model.width": [1, 2, 4]})
    assert set(ids(before)) < set(ids(after))
    points = {trial.trial_id: trial.point for trial in after}
    assert all(points[trial.trial_id] == trial.point for trial in before)


AXES = {
    "model.attention": sorted(VARIANTS),
    "model.width": [1, 2, 3, 4],
    "model.causal": [True, False],
    "data.train_fraction": [0.5, 0.75, 0.8, 1.0],
    "optim.peak_lr": [1e-4, 1e-3, 0.01, 0.1],
    "task.num_features": [1, 2, 3],
    "seeds.init": [0, 1, 2, 3],
    "seed": [0, 1, 2, 3],
}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.permutations(list(AXES)).flatmap(
        lambda names: st.fixed_dictionaries(
            {name: st.lists(st.sampled_from(AXES[name]), min_size=1, max_size=3, unique=True) for name in names[:4]}
        )
    )
)
def test_expansion_is_a_product_of_distinct_trials(trials_of: Expand, axes: dict[str, list[Any]]) -> None:
    drawn = {"seed": [0]} | axes
    trials = trials_of(axes=drawn)
    assert len(trials) == len(set(ids(trials))) == math.prod(map(len, drawn.values()))
    num_points = math.prod(len(values) for name, values in drawn.items() if name not in ("seed", "seeds.init"))
    assert len({trial.point for trial in trials}) == num_points
    backwards = {name: values[::-1] for name, values in reversed(drawn.items())}
    again = trials_of(axes=backwards)
    assert {t.trial_id: (t.config, t.point, t.axes) for t in again} == {
        t.trial_id: (t.config, t.point, t.axes) for t in trials
    }


# ---------------------------------------------------------------------------------------------------- bad combinations


def test_bad_combinations_are_grouped_with_a_count_and_an_example(trials_of: Expand) -> None:
    axes = {
        "model.width": [1, 2],
        "data.train_fraction": [0.25, 1.0],
        "optim.warmup_steps": [20, 30, 120],
        "model.num_heads": [4, 3],
        "seed": [0, 1],
    }
    with pytest.raises(SpecError) as caught:
        trials_of(axes=axes)
    lines = [re.sub(r"^.*sweep\.yaml:\d+: ", "", line) for line in str(caught.value).splitlines()]
    # 48 trials. num_heads=3 spoils half of them whatever the rest is. Of the other 24, at 50 steps (12 trials) warm-ups
    # of 30 and 120 are too long (4 each), at 200 steps only 120 is.
    example = "model.width=1, data.train_fraction={}, optim.warmup_steps={}, model.num_heads={}, seed=0)"
    assert sorted(lines) == sorted(
        [
            "model.qk_dim=16 is not a multiple of model.num_heads=3 (24 of 48 trials, such as "
            + example.format(0.25, 20, 3),
            "optim.warmup_steps=30 is not less than half of data.num_steps=50 (4 of 48 trials, such as "
            + example.format(0.25, 30, 4),
            "optim.warmup_steps=120 is not less than half of data.num_steps=50 (4 of 48 trials, such as "
            + example.format(0.25, 120, 4),
            "optim.warmup_steps=120 is not less than half of data.num_steps=200 (4 of 48 trials, such as "
            + example.format(1.0, 120, 4),
        ]
    )
    written = caught.value.path
    places = {message.split(" ")[0]: origin.line for origin, message in caught.value.problems}
    text = Path(written).read_text().splitlines()
    assert "optim.warmup_steps:" in text[places["optim.warmup_steps=120"] - 1]  # type: ignore[operator]
    assert "model.num_heads:" in text[places["model.qk_dim=16"] - 1]  # type: ignore[operator]


def test_many_kinds_of_bad_combinations_are_cut_short(trials_of: Expand) -> None:
    with pytest.raises(SpecError) as caught:
        trials_of(axes={"optim.warmup_steps": list(range(100, 125)), "seed": [0]})
    lines = str(caught.value).splitlines()
    assert len(lines) == 21
    assert any("and 5 more kinds of bad combinations" in line for line in lines)


def test_two_combinations_that_are_one_trial_are_refused(trials_of: Expand) -> None:
    with pytest.raises(SpecError) as caught:
        trials_of(axes={"data.train_fraction": [0.5, 0.50001], "model.width": [1, 2], "seed": [0]})
    message = str(caught.value)
    assert "data.train_fraction=0.5 and data.train_fraction=0.50001 make the same trial " in message
    assert "(and 1 more such pairs)" in message
    assert len(message.splitlines()) == 1


def test_a_slip_that_makes_millions_of_trials_is_refused(trials_of: Expand) -> None:
    seeds = list(range(1001))
    with pytest.raises(SpecError, match=r"axes make 1,002,001 trials; at most 1,000,000 are allowed"):
        trials_of(axes={"seed": seeds, "seeds.init": seeds})


def language(folder: Path, task: str, extra: str = "") -> list[TrialSpec]:
    text = f"""
name: language
task: {{name: language, {task}}}
data: {{num_train: 100, num_steps: 10, num_valid: 10, num_ood: 0}}
model: {{attention: hyla, causal: true, emb_dim: 8, num_heads: 2, qk_dim: 8, v_dim: 8, mlp_dim: 8, depth: 1}}
optim: {{name: adamw, batch_size: 8, peak_lr: 1e-3, weight_decay: 0, warmup_steps: 2}}
seed: 0
{extra}
"""
    return expand_text(folder, text)


@pytest.fixture
def texts(tmp_path, monkeypatch) -> Path:
    """A project of its own, with two texts."""
    monkeypatch.setenv("HYLA_CACHE", str(tmp_path / "cache"))
    project = tmp_path / "project"
    (project / "data").mkdir(parents=True)
    (project / "sweeps").mkdir()
    (project / "pyproject.toml").write_text("")
    (project / "data" / "train.txt").write_text("some text")
    (project / "data" / "valid.txt").write_text("other text")
    return project


def test_texts_are_found_from_the_projects_root_and_named_by_their_content(texts, monkeypatch):
    (trial,) = language(texts / "sweeps", "text: data/train.txt, valid_text: data/valid.txt")
    task = trial.config.task
    assert task.text == str(texts / "data" / "train.txt")
    # The hash of the list of the files' kinds and hashes.
    of_file = hashlib.sha256(b"some text").hexdigest()
    assert task.text_sha256 == hashlib.sha256(f".txt False {of_file}".encode()).hexdigest()
    assert trial.config.model.max_distance == task.seq_len == 128

    monkeypatch.chdir(texts / "data")
    (elsewhere,) = language(texts / "sweeps", f"text: {texts}/data/../data/train.txt, valid_text: data/valid.txt")
    assert (elsewhere.trial_id, elsewhere.point) == (trial.trial_id, trial.point)
    (texts / "data" / "valid.txt").write_text("changed")
    (changed,) = language(texts / "sweeps", "text: data/train.txt, valid_text: data/valid.txt")
    assert changed.trial_id != trial.trial_id
    assert changed.point != trial.point


@pytest.mark.parametrize(
    ("task", "extra", "message"),
    [
        ("text: data/*.parquet", "", "/data/*.parquet: no text there; it must be a file, folder or glob of .txt"),
        (f"text: builtin, text_sha256: '{'0' * 64}'", "", "is not the SHA-256 of builtin, which is "),
        ("text: builtin, seq_len: 1", "", "task.seq_len=1 is not allowed"),
        ("text: builtin, vocab_size: 100", "", "task.vocab_size=100 is not allowed"),
        ("text: builtin, valid_fraction: 0", "", "leaves nothing for validation"),
        ("text: builtin, documents: page", "", "task.documents='page' is unknown; choose one of ['file', 'line'"),
        ("vocab_size: 300", "", "task.text is missing"),
    ],
)
def test_wrong_texts_are_one_line_with_their_place(texts, task, extra, message):
    with pytest.raises(SpecError) as error:
        language(texts / "sweeps", task, extra)
    assert message in str(error.value)
    assert re.match(r"\S+sweep\.yaml:\d+: ", str(error.value))
    assert "\n" not in str(error.value)


def test_a_tiny_form_without_a_section_of_its_own_takes_the_builtin_text(texts):
    path = texts / "sweeps" / "sweep.yaml"
    language(texts / "sweeps", "text: data/train.txt")
    (trial,) = expand(load_sweep(path, tiny=True))
    assert trial.config.task.text == "builtin"
    assert (trial.config.data.num_train, trial.config.data.num_valid) == (4000, 100)
