"""What a sweep file says, and one line for everything that it may not say."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sweeps.__main__ import main
from sweeps.expand import expand
from sweeps.spec import RunConfig, SpecError, SweepSpec, load_sweep

GOOD = """\
name: good
task: {name: sraven, num_features: 2}
data:
  num_train: 12800
  passes: 1
  num_valid: 256
  num_ood: 256
model:
  emb_dim: 32
  num_heads: 4
  qk_dim: 32
  v_dim: 32
  mlp_dim: 64
optim: {name: adamw, batch_size: 64, weight_decay: 0.1, warmup_steps: 20}
axes:
  model.attention: [softmax, hyla]
  model.depth: [1, 2]
  optim.peak_lr: [1e-2, 1e-3]
  seed: [0, 1]
select_over: [optim.peak_lr]
run: {resources: {cpu: 1}}
tiny: {data.num_train: 6400}
"""

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def _write(text: str) -> Path:
        path = tmp_path / "s.yaml"
        path.write_text(text)
        return path

    return _write


def edited(old: str, new: str) -> str:
    assert GOOD.count(old) == 1, old
    return GOOD.replace(old, new)


def test_good_sweep_keeps_everything_as_written(write: Write) -> None:
    path = write(GOOD)
    spec = load_sweep(path)
    assert spec.name == "good"
    assert spec.path == path
    assert spec.settings == {
        "task": {"name": "sraven", "num_features": 2},
        "data": {"num_train": 12800, "passes": 1, "num_valid": 256, "num_ood": 256},
        "model": {"emb_dim": 32, "num_heads": 4, "qk_dim": 32, "v_dim": 32, "mlp_dim": 64},
        "optim": {"name": "adamw", "batch_size": 64, "weight_decay": 0.1, "warmup_steps": 20},
    }
    assert spec.axes == {
        "model.attention": ["softmax", "hyla"],
        "model.depth": [1, 2],
        "optim.peak_lr": [0.01, 0.001],
        "seed": [0, 1],
    }
    assert spec.select_over == ("optim.peak_lr",)
    assert spec.cell_axes == ("model.attention", "model.depth")
    assert spec.run == RunConfig(resources={"cpu": 1.0, "gpu": 0.0})  # type: ignore[arg-type]
    assert spec.num_combinations == 16
    assert spec.origins["model.qk_dim"].line == 11
    assert spec.origins["axes.seed"].line == 19


def test_dotted_and_nested_spellings_mean_the_same(write: Write) -> None:
    nested = load_sweep(write(GOOD))
    dotted = load_sweep(
        write(
            edited("optim: {name: adamw, batch_size: 64,", "optim.name: adamw\noptim: {batch_size: 64,").replace(
                "  model.attention: [softmax, hyla]\n  model.depth: [1, 2]\n",
                "  model: {attention: [softmax, hyla], depth: [1, 2]}\n",
            )
        )
    )
    assert (dotted.settings, dotted.axes) == (nested.settings, nested.axes)


def _loaded(write: Write, text: str, **options: Any) -> SweepSpec:
    return load_sweep(write(text), **options)


def test_tiny_changes_leaf_by_leaf(write: Write) -> None:
    tiny = (
        "tiny:\n  model: {emb_dim: 16}\n  axes.model.depth: [3]\n  axes: {seed: [5, 6]}\n"
        "  optim.peak_lr: 0.1\n  axes.optim.warmup_steps: [5, 10]\n  run.resources.gpu: 0.5\n"
    )
    text = edited("tiny: {data.num_train: 6400}\n", tiny)
    spec = _loaded(write, text, tiny=True)
    assert spec.tiny
    assert spec.settings["model"] == {"emb_dim": 16, "num_heads": 4, "qk_dim": 32, "v_dim": 32, "mlp_dim": 64}
    # A plain value for an axis keeps it as an axis; an axis for a plain value replaces that.
    assert spec.axes == {
        "model.attention": ["softmax", "hyla"],
        "model.depth": [3],
        "optim.peak_lr": [0.1],
        "seed": [5, 6],
        "optim.warmup_steps": [5, 10],
    }
    assert "warmup_steps" not in spec.settings["optim"]
    assert (spec.run.resources.cpu, spec.run.resources.gpu) == (1.0, 0.5)
    assert _loaded(write, text).settings["model"]["emb_dim"] == 32


def test_without_a_tiny_section_sizes_shrink_and_axes_stay(write: Write) -> None:
    text = edited("tiny: {data.num_train: 6400}\n", "").replace("cpu: 1", "gpu: 8")
    text = text.replace("num_train: 12800", "num_train: 40000000").replace("depth: [1, 2]", "depth: [8, 16, 32]")
    spec = _loaded(write, text, tiny=True)
    assert spec.axes == {
        "model.attention": ["softmax", "hyla"],
        "model.depth": [1, 2],
        "optim.peak_lr": [0.01],
        "seed": [0, 1],
    }
    assert spec.run.resources.gpu == 0
    trials = expand(spec)
    assert len(trials) == 8
    assert all(trial.config.data.num_steps * trial.config.optim.batch_size <= 12_800 for trial in trials)


def test_overrides_come_last(write: Write) -> None:
    overrides = ["data.num_train=3200", "axes.optim.peak_lr=[1e-3]", "seed=7", "name=other", "run.num_evals=3"]
    spec = _loaded(write, GOOD, tiny=True, overrides=overrides)
    assert spec.settings["data"]["num_train"] == 3200
    assert spec.axes["optim.peak_lr"] == [0.001]
    assert spec.axes["seed"] == [7]
    assert spec.name == "other"
    assert spec.run.num_evals == 3


def test_the_later_spelling_of_one_field_stays(write: Write) -> None:
    spec = _loaded(write, GOOD, overrides=["data.num_steps=50", "model.num_layers=3"])
    assert "passes" not in spec.settings["data"]
    assert spec.settings["data"]["num_steps"] == 50
    assert "model.depth" not in spec.axes
    assert spec.settings["model"]["num_layers"] == 3


def test_seeds_may_be_given_apart(write: Write) -> None:
    text = edited("  seed: [0, 1]\n", "  seeds.init: [3, 4]\n") + "seeds: {split: 1, data: 2}\n"
    seeds = {(t.config.seeds.split, t.config.seeds.data, t.config.seeds.init) for t in expand(_loaded(write, text))}
    assert seeds == {(1, 2, 3), (1, 2, 4)}
    seeds = {
        (t.config.seeds.split, t.config.seeds.data, t.config.seeds.init)
        for t in expand(_loaded(write, GOOD + "seeds: {split: 9}\n"))
    }
    assert seeds == {(9, 0, 0), (9, 1, 1)}


def test_anchors_serve_sweeps(write: Write) -> None:
    text = edited("num_heads: 4", "num_heads: &four 4").replace("qk_dim: 32", "qk_dim: *four")
    assert _loaded(write, text).settings["model"]["qk_dim"] == 4


BAD = [
    # (what is replaced in GOOD, by what, line, a part of the message)
    ("name: good\n", "\n", 1, "name is missing"),
    ("name: good", "name: [a]", 1, "name takes one value, not a list"),
    ("name: good", "name: 7", 1, "name=7 is not text"),
    ("name: good", "name: a/b", 1, "name='a/b' is not allowed: it must match pattern"),
    ("name: good", "nam: good", 1, "nam is unknown; did you mean name? Allowed: [name, task,"),
    ("name: good", "name: good\nmodle: {emb_dim: 3}", 2, "modle is unknown; did you mean model?"),
    ("task: {name: sraven, num_features: 2}\n", "\n", 1, "task.name is missing"),
    ("name: sraven, ", "", 2, "task.name is missing"),
    ("name: sraven", "name: ravens", 2, "task.name='ravens' is unknown; choose one of ['sraven', 'fuzzy_logic', 'la"),
    ("num_features: 2", "num_features: 0", 2, "task.num_features=0 is not allowed: it must be greater than 0"),
    ("num_features: 2", "num_features: two", 2, "task.num_features='two' is not a whole number"),
    ("num_features: 2", "num_features: '2'", 2, "task.num_features='2' is not a whole number"),
    ("num_features: 2", "num_features: 2.5", 2, "task.num_features=2.5 is not a whole number"),
    ("num_features: 2", "num_features: true", 2, "task.num_features=true is not a whole number"),
    ("num_features: 2", "num_features: null", 2, "task.num_features=null is not a whole number"),
    ("num_features: 2", "num_feature: 2", 2, "task.num_feature is unknown; did you mean num_features? Allowed: [name,"),
    ("num_features: 2", "permute_features: 1", 2, "task.permute_features=1 is not true or false"),
    ("num_features: 2", "permute_features: yes", 2, "task.permute_features='yes' is not true or false"),
    ("num_features: 2", "grid_size: 2", 2, "task.grid_size=2 is not allowed: it must be greater than or equal to 3"),
    ("num_features: 2", "num_values: 2", 2, "task.num_values=2 is less than task.grid_size=3"),
    ("num_features: 2", "ood_fraction: 1.0", 2, "task.ood_fraction=1.0 is not allowed: it must be less than 1"),
    ("num_features: 2", "ood_fraction: 0", 7, "data.num_ood=256 but task.ood_fraction=0"),
    ("task: {name: sraven, num_features: 2}", "task: sraven", 2, "task must be a mapping of its fields, not 'sraven'"),
    ("task: {name: sraven, num_features: 2}", "task: [sraven]", 2, "task must be a mapping of its fields, not ['srave"),
    ("  num_valid: 256\n", "\n", 3, "data.num_valid is missing"),
    ("  num_valid: 256\n  num_ood: 256\n", "\n\n", 3, "data.num_valid, data.num_ood are missing"),
    ("  passes: 1\n", "\n", 3, "data.num_steps (or passes) is missing"),
    ("  passes: 1\n", "  passes: 1\n  num_steps: 9\n", 6, "data.num_steps and data.passes set the same thing; keep on"),
    ("  passes: 1\n", "  passes: 0\n", 5, "data.passes=0 is not allowed: it must be greater than 0"),
    ("  passes: 1\n", "  passes: 0.001\n", 5, "data.passes=0.001 over 12800 examples fills no batch of optim.batch_si"),
    ("  passes: 1\n", "  passes: .inf\n", 5, "data.passes=inf is not allowed"),
    ("num_train: 12800", "num_train: -5", 4, "data.num_train=-5 is not allowed: it must be greater than 0"),
    ("num_train: 12800", "num_train: 12_800", 4, "data.num_train='12_800' is not a whole number"),
    ("num_train: 12800", "num_train: 9e99", 4, "data.num_train"),
    ("  passes: 1\n", "  passes: 1\n  train_fraction: 0\n", 6, "data.train_fraction=0 is not allowed"),
    ("  passes: 1\n", "  passes: 1\n  train_fraction: 1.5\n", 6, "data.train_fraction=1.5 is not allowed"),
    ("  passes: 1\n", "  passes: 1\n  train_fraction: 1e-9\n", 6, "data.train_fraction=1e-09 leaves none of"),
    ("  passes: 1\n", "  num_steps: 200\n  train_fraction: 0.001\n", 6, "data.num_train=12 is less than optim.batch_s"),
    ("  passes: 1\n", "  num_steps: 99999999\n", 5, "is not below 4294967296 examples"),
    ("num_heads: 4", "num_head: 4", 10, "model.num_head is unknown; did you mean num_heads? Allowed: [attention, emb_"),
    ("num_heads: 4", "num_heads: 4\n  peak_lr: 1", 11, "model.peak_lr is unknown; did you mean optim.peak_lr?"),
    ("num_heads: 4", "num_heads: {a: 4}", 10, "model.num_heads takes one value, not a mapping"),
    ("num_heads: 4", "num_heads.a: 4", 10, "model.num_heads.a is unknown: model.num_heads takes one value"),
    ("num_heads: 4", "num_heads: [4]", 10, "write it under axes: model.num_heads: [4]"),
    ("num_heads: 4", "num_heads: 4\n  num_heads: 8", 11, "num_heads is given twice, first on line 10"),
    ("axes:", "model.num_heads: 8\naxes:", 15, "model.num_heads is given twice, first at "),
    ("num_heads: 4", "num_heads: 5", 11, "model.qk_dim=32 is not a multiple of model.num_heads=5"),
    ("emb_dim: 32", "emb_dim: 34", 9, "model.emb_dim=34 is not a multiple of model.num_heads=4"),
    ("mlp_dim: 64", "mlp_dim: 64\n  depth: 2", 18, "model.depth is both an axis and a fixed value"),
    ("mlp_dim: 64", "mlp_dim: 64\n  num_layers: 2", 18, "model.depth and model.num_layers set the same thing"),
    ("mlp_dim: 64", "mlp_dim: 64\n  width: 1.5", 14, "model.width=1.5 is not a whole number"),
    ("mlp_dim: 64", "mlp_dim: 64\n  norm: batch", 14, "model.norm='batch' is unknown; choose one of ['layer', 'rms']"),
    ("mlp_dim: 64", "mlp_dim: 64\n  dropout: 1", 14, "model.dropout=1 is not allowed: it must be less than 1"),
    ("name: adamw", "name: adam", 14, "optim.name='adam' is unknown; choose one of ['adamw']"),
    ("weight_decay: 0.1", "weight_decay: -0.1", 14, "optim.weight_decay=-0.1 is not allowed"),
    ("weight_decay: 0.1", "weight_decay: .nan", 14, "optim.weight_decay=nan is not allowed: it must be a finite numbe"),
    ("weight_decay: 0.1", "grad_clip_norm: x", 14, "optim.grad_clip_norm='x' is not a number or null"),
    ("warmup_steps: 20", "warmup_steps: 100", 14, "optim.warmup_steps=100 is not less than half of data.num_steps=200"),
    ("batch_size: 64", "batch_size: 0", 14, "optim.batch_size=0 is not allowed"),
    ("  model.attention: [softmax, hyla]\n", "\n", 8, "model.attention is missing"),
    ("[softmax, hyla]", "[softmax,\n hylla]", 17, "model.attention='hylla' is unknown; choose one of ['hyla',"),
    ("[softmax, hyla]", "softmax", 16, "axes.model.attention must be a list of values, not 'softmax'"),
    ("[softmax, hyla]", "[]", 16, "axes.model.attention is an empty list"),
    ("[softmax, hyla]", "[softmax, hyla, softmax]", 16, "axes.model.attention has the value 'softmax' twice"),
    ("[softmax, hyla]", "[[softmax], hyla]", 16, "axes.model.attention holds ['softmax']; each value must be a single"),
    ("model.depth: [1, 2]", "model.depth: [1, 1.0]", 17, "axes.model.depth has the value 1.0 twice"),
    ("model.depth: [1, 2]", "model.dept: [1, 2]", 17, "axes.model.dept is unknown; did you mean depth? Allowed: ["),
    ("model.depth: [1, 2]", "depth: [1, 2]", 17, "axes.depth is unknown; did you mean model.depth? Allowed: [task,"),
    ("model.depth: [1, 2]", "run.num_evals: [1]", 17, "axes.run.num_evals: what stands under run changes no result"),
    ("model.depth: [1, 2]", "run: {num_evals: [1]}", 17, "axes.run: what stands under run changes no result"),
    ("model.depth: [1, 2]", "model.depth: {a: 1}", 17, "axes.model.depth must be a list of values, not {a: 1}"),
    ("model.depth: [1, 2]", "model.depth:", 17, "axes.model.depth must be a list of values, not null"),
    ("model.depth: [1, 2]", "model.depth: [0]", 17, "model.depth=0 is not allowed"),
    ("[1e-2, 1e-3]", "[1e-2, 1e-2]", 18, "axes.optim.peak_lr has the value 0.01 twice"),
    ("[1e-2, 1e-3]", "[1e-2, 1_0]", 18, "optim.peak_lr='1_0' is not a number"),
    ("[1e-2, 1e-3]", "[1" + "0" * 400 + "]", 18, "is not allowed: it must be"),
    ("seed: [0, 1]", "seed: [0, -1]", 19, "seed=-1 is not allowed"),
    ("seed: [0, 1]", "seed: [2147483648]", 19, "seed=2147483648 is not allowed"),
    ("  seed: [0, 1]\n", "\n", 1, "seed missing: give an axis seed, or seed: 0"),
    ("  seed: [0, 1]\n", "seeds: {split: 1}\n", 19, "seeds.data, seeds.init missing"),
    ("seed: [0, 1]", "seed: [0]\nseeds: {split: 1, data: 1, init: 1}", 19, "seed has no effect"),
    ("seed: [0, 1]", "seed: [0]\nseed: 1", 19, "seed is both an axis and a fixed value"),
    ("select_over: [optim.peak_lr]", "select_over: optim.peak_lr", 20, "select_over must be a list of axes"),
    ("select_over: [optim.peak_lr]", "select_over: [3]", 20, "select_over holds 3; it must name axes"),
    ("select_over: [optim.peak_lr]", "select_over: [seed]", 20, "select_over: seed is averaged over, never selected"),
    ("[optim.peak_lr]", "[optim.peak_rl]", 20, "optim.peak_rl is not an axis; did you mean optim.peak_lr?"),
    ("[optim.peak_lr]", "[optim.weight_decay]", 20, "optim.weight_decay is not an axis. Allowed: [model.attention,"),
    ("[optim.peak_lr]", "[optim.peak_lr, optim.peak_lr]", 20, "select_over names optim.peak_lr twice"),
    ("resources: {cpu: 1}", "resources: {cpus: 1}", 21, "run.resources.cpus is unknown; did you mean cpu? Allowed: [c"),
    ("resources: {cpu: 1}", "resources: {cpu: -1}", 21, "run.resources.cpu=-1 is not allowed"),
    ("resources: {cpu: 1}", "resources: 4", 21, "run.resources must be a mapping of its fields, not 4"),
    ("resources: {cpu: 1}", "num_evals: [3]", 21, "run.num_evals takes one value, not a list"),
    ("resources: {cpu: 1}", "checkpoint_every: 3", 21, "run.checkpoint_every is unknown; did you mean checkpoint_ever"),
    ("tiny: {data.num_train: 6400}", "tiny:", 22, "tiny must be a mapping of what --tiny changes"),
    ("tiny: {data.num_train: 6400}", "tiny: {data.num_trains: 1}", 22, "tiny.data.num_trains is unknown; did you mean"),
    ("tiny: {data.num_train: 6400}", "tiny: {axes.model.dept: [1]}", 22, "tiny.axes.model.dept is unknown; did you me"),
    ("tiny: {data.num_train: 6400}", "tiny: {model.depth: [1]}", 22, "tiny.model.depth takes one value; to sweep over"),
    ("tiny: {data.num_train: 6400}", "tiny: {axes: {seed: 0}}", 22, "tiny.axes.seed must be a list of values, not 0"),
    ("tiny: {data.num_train: 6400}", "tiny: {tiny: {seed: 0}}", 22, "tiny.tiny: tiny is a section at the top level"),
    ("tiny: {data.num_train: 6400}", "tiny: {seed: 0, axes.seed: [0]}", 22, "seed is both an axis and a fixed value"),
    ("axes:", "axes: [", 17, "not valid YAML"),
    ("{data.num_train: 6400}", "{axes: 5}", 22, "tiny.axes must be a mapping of its fields, not 5"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "line", "message"), BAD, ids=[f"{old.strip()}→{new[:40].strip()}" for old, new, *_ in BAD]
)
def test_a_slip_is_one_line_with_its_place(
    write: Write, capsys: pytest.CaptureFixture[str], old: str, new: str, line: int, message: str
) -> None:
    path = write(edited(old, new))
    assert main(["plan", str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (error,) = printed.err.splitlines()
    assert error.startswith(f"{path}:{line}: ")
    assert message in error


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.num_head=4", "model.num_head is unknown; did you mean num_heads? Allowed: ["),
        ("model.num_heads=x", "model.num_heads='x' is not a whole number"),
        ("model.num_heads=[4]", "write it under axes: model.num_heads: [4]"),
        ("model.num_heads", "must be written NAME=VALUE, such as model.emb_dim=64"),
        ("model.num_heads=[4", "not valid YAML"),
        ("axes.seed=3", "axes.seed must be a list of values, not 3"),
        ("axes.seed=[1, 1]", "axes.seed has the value 1 twice"),
        ("select_over=[model.width]", "select_over: model.width is not an axis"),
        ("tiny.seed=1", "tiny.seed: tiny is a section at the top level of the file"),
        ("model=3", "model must be a mapping of its fields, not 3"),
        ("data={passes: 1, num_steps: 9}", "data.num_steps and data.passes set the same thing"),
        ("optim.warmup_steps=100", "optim.warmup_steps=100 is not less than half of data.num_steps=200"),
    ],
)
def test_a_slip_in_an_override_names_the_flag(
    write: Write, capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    assert main(["plan", str(write(GOOD)), "--set", override]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith(f"--set {override}: ")
    assert message in error


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ":1: a sweep file is empty; allowed are [name, task,"),
        ("- a\n", ":1: a sweep file is not a mapping"),
        ("just text\n", ":1: a sweep file is not a mapping"),
        ("a: \x07\n", ": not valid YAML: special characters are not allowed"),
    ],
)
def test_a_file_that_is_no_sweep(write: Write, text: str, message: str) -> None:
    path = write(text)
    with pytest.raises(SpecError) as caught:
        load_sweep(path)
    assert str(caught.value).startswith(f"{path}{message}")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"none\.yaml: cannot be read: no such file$"):
        load_sweep(tmp_path / "none.yaml")
    with pytest.raises(SpecError, match=r"cannot be read: is a directory$"):
        load_sweep(tmp_path)


def test_all_slips_are_reported_at_once_in_the_order_of_lines(write: Write) -> None:
    text = edited("mlp_dim: 64", "mlp_dim: x").replace("num_features: 2", "num_feature: 2").replace("cpu: 1", "cpus: 1")
    with pytest.raises(SpecError) as caught:
        load_sweep(write(text))
    assert [origin.line for origin, _ in caught.value.problems] == [2, 13, 21]
    assert (caught.value.line, len(str(caught.value).splitlines())) == (2, 3)


def test_a_newline_in_a_name_does_not_break_the_line(write: Write) -> None:
    with pytest.raises(SpecError) as caught:
        load_sweep(write(GOOD + '"a\\nb": 3\n'))
    assert len(str(caught.value).splitlines()) == 1
