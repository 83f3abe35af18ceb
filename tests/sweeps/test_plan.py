"""The plan: numbers against arithmetic by hand, and the same numbers in text and JSON."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sweeps
from hyla_core.counts import num_non_embedding_params, num_params, train_flops_per_example
from sweeps.__main__ import main
from sweeps.devices import DEVICES, find_device, pack_memory_on, packs_at_once, parse_devices
from sweeps.expand import TrialSpec, expand
from sweeps.plan import make_plan, print_plan, read_store
from sweeps.spec import Resources, SpecError, load_sweep
from sweeps.store import Store

SCALING = Path(sweeps.__file__).parent / "scaling.yaml"

SWEEP = """\
name: small
task: {name: sraven, num_features: 2}
data: {num_train: 6400, passes: 1, num_valid: 256, num_ood: 128}
model: {emb_dim: 32, num_heads: 4, qk_dim: 16, v_dim: 64, mlp_dim: 96}
optim: {name: adamw, batch_size: 64, weight_decay: 0.1, warmup_steps: 20}
axes:
  model.attention: [softmax, hyla]
  model.depth: [1, 3]
  data.train_fraction: [0.5, 1.0]
  optim.peak_lr: [1e-2, 1e-3, 1e-4]
  seed: [0, 1]
select_over: [optim.peak_lr]
run: {num_evals: 5, max_pack_size: 4}
"""

PlanJson = Callable[..., dict[str, Any]]


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYLA_STORE", raising=False)
    path = tmp_path / "small.yaml"
    path.write_text(SWEEP)
    return path


@pytest.fixture
def plan_json(sweep: Path, capsys: pytest.CaptureFixture[str]) -> PlanJson:
    def _plan_json(*flags: str, status: int = 0) -> dict[str, Any]:
        assert main(["plan", str(sweep), "--json", *flags]) == status
        return json.loads(capsys.readouterr().out)

    return _plan_json


def finish(store: Store, trial: TrialSpec, device_s: float, kind: str = "cpu", **changes: Any) -> None:
    """Puts a trial into the store as if it had been trained."""
    config = trial.config
    flops = train_flops_per_example(config) * config.optim.batch_size * config.data.num_steps
    facts = {"status": "finished", "start_step": 0} | changes
    writer = store.begin(
        trial.trial_id,
        config.flat(),
        {"run_id": "r1"},
        start_step=facts["start_step"],
        num_steps=config.data.num_steps,
        counts={"train_flops": float(flops)},
    )
    assert writer is not None
    writer.seal(facts["status"], device_kind=kind, device_s=device_s)


def trial_flops(trial: TrialSpec) -> float:
    config = trial.config
    return train_flops_per_example(config) * 64 * config.data.num_steps


def test_counts_of_a_sweep(plan_json: PlanJson) -> None:
    plan = plan_json()
    assert (plan["sweep"], plan["tiny"], plan["store"]) == ("small", False, "results")
    assert plan["axes"]["optim.peak_lr"] == [0.01, 0.001, 0.0001]
    assert plan["select_over"] == ["optim.peak_lr"]
    assert plan["num_trials"] == plan["num_new"] == 2 * 2 * 2 * 3 * 2
    assert plan["num_points"] == 2 * 2 * 2 * 3
    assert plan["num_cells"] == 2 * 2 * 2
    assert (plan["num_finished"], plan["num_diverged"]) == (0, 0)
    # Each cell's 6 trials train in two packs of 3: evenly, at most 4.
    assert (plan["max_pack_size"], plan["num_packs"]) == (4, 16)


def test_shapes_are_what_is_compiled_once(plan_json: PlanJson, sweep: Path) -> None:
    trials = expand(load_sweep(sweep))
    shapes = plan_json()["shapes"]
    assert [shape["axes"] for shape in shapes] == [
        {"model.attention": attention, "model.depth": depth} for attention in ("softmax", "hyla") for depth in (1, 3)
    ]
    for shape in shapes:
        group = [trial for trial in trials if shape["axes"].items() <= trial.axes.items()]
        assert shape["num_trials"] == shape["num_new"] == len(group) == 12
        assert (shape["min_steps"], shape["max_steps"]) == (50, 100)
        assert shape["num_params"] == sum(num_params(group[0].config).values())
        assert shape["num_non_embedding_params"] == num_non_embedding_params(group[0].config)
        assert shape["train_flops"] == shape["new_train_flops"] == sum(map(trial_flops, group))


def test_cost_without_experience_follows_from_operations_and_the_device(plan_json: PlanJson, sweep: Path) -> None:
    plan = plan_json("--devices", "h100:2")
    total = 0.0
    for trial in expand(load_sweep(sweep)):
        # Five evaluations of 256 + 128 examples, each a third of a training step's work on one.
        total += trial_flops(trial) + 5 * (256 + 128) * train_flops_per_example(trial.config) / 3
    assert plan["basis"] == "assumed"
    assert "5% of one h100's peak of 494 TFLOP/s" in plan["explanation"]
    assert plan["device_hours"] == pytest.approx(total / (0.05 * 494e12) / 3600)
    assert plan["wall_hours"] == pytest.approx(plan["device_hours"] / 2)
    assert plan["train_flops"] == pytest.approx(sum(shape["train_flops"] for shape in plan["shapes"]))
    assert plan["device_hours"] == pytest.approx(sum(shape["device_hours"] for shape in plan["shapes"]))


def test_bfloat16_is_priced_at_its_own_rate(plan_json: PlanJson) -> None:
    slow, fast = (
        plan_json("--devices", "h100", "--set", f"numerics.dtype={dtype}") for dtype in ("float32", "bfloat16")
    )
    assert slow["device_hours"] / fast["device_hours"] == pytest.approx(989 / 494)
    assert "989 TFLOP/s" in fast["explanation"]


def test_packs_are_no_larger_than_a_devices_memory_allows(plan_json: PlanJson, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = plan_json("--devices", "h100")["shapes"]
    assert plan_json("--devices", "h100")["pack_memory_bytes"] == 60e9  # three quarters of 80 GB
    assert plan_json("--devices", "h100:8", "--set", "run.resources.gpu=0.25")["pack_memory_bytes"] == 15e9
    assert plan_json("--devices", "h100:8", "--set", "run.resources.gpu=2")["pack_memory_bytes"] == 120e9
    softmax_1, _, hyla_1, hyla_3 = (shape["step_memory_bytes"] for shape in shapes)
    assert softmax_1 < hyla_1 < hyla_3
    # Room for two members of the largest shape, less a byte: its 2 × 6 trials are alone, those of others are not.
    small = DEVICES["h100"]._replace(memory_bytes=(2 * hyla_3 - 1) / 0.75)
    monkeypatch.setitem(DEVICES, "h100", small)
    plan = plan_json("--devices", "h100")
    per_pack = {name: min(4, (2 * hyla_3 - 1) // shape["step_memory_bytes"]) for name, shape in enumerate(shapes)}
    assert (per_pack[0], per_pack[3]) == (4, 1)
    assert plan["num_packs"] == sum(2 * -(-6 // size) for size in per_pack.values())


def test_cores_share_the_machines_memory(plan_json: PlanJson, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sweeps.plan.num_cpus", lambda: 6)
    monkeypatch.setattr("sweeps.plan.memory_bytes", lambda: 12_000_000_000)
    # Six workers of one core have 2 GB each, three of two cores 4 GB, less 0.75 GB for Python, Ray and JAX.
    assert plan_json()["pack_memory_bytes"] == 1_250_000_000
    assert plan_json("--set", "run.resources.cpu=2")["pack_memory_bytes"] == 3_250_000_000
    monkeypatch.setattr("sweeps.plan.memory_bytes", lambda: 600_000_000)
    assert plan_json()["pack_memory_bytes"] == 0
    # Of other machines, and of accelerators nobody has named, nothing is known.
    assert plan_json("--devices", "cpu:6")["pack_memory_bytes"] is None
    assert plan_json("--set", "run.resources.gpu=1")["pack_memory_bytes"] is None
    monkeypatch.setattr("sweeps.plan.memory_bytes", lambda: None)
    assert plan_json()["pack_memory_bytes"] is None


def test_a_trial_too_large_for_the_device_is_named_in_one_line(
    sweep: Path, plan_json: PlanJson, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = plan_json("--devices", "h100")["shapes"]
    second, largest = sorted(shape["step_memory_bytes"] for shape in shapes)[-2:]
    monkeypatch.setitem(DEVICES, "h100", DEVICES["h100"]._replace(memory_bytes=second / 0.75 + 2))
    assert main(["plan", str(sweep), "--devices", "h100"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "memory" in line)
    assert line == (
        f"12 trials may run out of memory even alone: by estimate up to {largest / 1e6:.0f} MB "
        f"(attention=hyla depth=3), a pack has {second / 1e6:.0f} MB of one h100"
    )
    monkeypatch.setitem(DEVICES, "h100", DEVICES["h100"]._replace(memory_bytes=largest / 0.75 + 2))
    assert main(["plan", str(sweep), "--devices", "h100"]) == 0
    assert "memory" not in capsys.readouterr().out


def test_more_devices_than_packs_do_not_help(plan_json: PlanJson) -> None:
    plan = plan_json("--devices", "h100:1000")
    assert plan["num_slots"] == 1000
    assert plan["wall_hours"] == pytest.approx(plan["device_hours"] / 16)


@pytest.mark.parametrize(("gpu", "num_slots"), [(0.25, 32), (1, 8), (2, 4), (3, 2)])
def test_a_pack_takes_the_devices_it_asks_for(plan_json: PlanJson, gpu: float, num_slots: int) -> None:
    plan = plan_json("--devices", "h100:8", "--set", f"run.resources.gpu={gpu}")
    assert plan["num_slots"] == num_slots
    assert plan["wall_hours"] == pytest.approx(plan["device_hours"] / gpu / min(num_slots, 16))


def test_cost_with_experience_follows_from_the_trials_in_the_store(plan_json: PlanJson, sweep: Path) -> None:
    trials = expand(load_sweep(sweep))
    store = Store.create("results")
    of = {
        (attention, depth): [
            t for t in trials if (t.axes["model.attention"], t.axes["model.depth"]) == (attention, depth)
        ]
        for attention in ("softmax", "hyla")
        for depth in (1, 3)
    }
    finish(store, of["softmax", 1][0], 10.0)
    finish(store, of["softmax", 1][1], 30.0)
    finish(store, of["hyla", 1][0], 100.0)
    # None of these tells how fast a whole training on this kind of device is.
    finish(store, of["softmax", 1][2], 1e6, kind="NVIDIA H100 80GB HBM3")
    finish(store, of["softmax", 1][3], 1e6, status="diverged")
    finish(store, of["softmax", 1][4], 1e6, start_step=7)

    plan = plan_json("--devices", "cpu:3")
    assert plan["basis"] == "measured"
    assert plan["explanation"].startswith("measured: 3 finished trials on cpu in the store")
    assert (plan["num_finished"], plan["num_diverged"], plan["num_new"]) == (5, 1, 42)

    def speed(*rows: tuple[TrialSpec, float]) -> float:
        return sum(trial_flops(trial) for trial, _ in rows) / sum(seconds for _, seconds in rows)

    softmax = speed((of["softmax", 1][0], 10.0), (of["softmax", 1][1], 30.0))
    hyla = speed((of["hyla", 1][0], 100.0))
    overall = speed((of["softmax", 1][0], 10.0), (of["softmax", 1][1], 30.0), (of["hyla", 1][0], 100.0))
    expected = {
        ("softmax", 1): sum(map(trial_flops, of["softmax", 1][5:])) / softmax,
        ("softmax", 3): sum(map(trial_flops, of["softmax", 3])) / overall,
        ("hyla", 1): sum(map(trial_flops, of["hyla", 1][1:])) / hyla,
        ("hyla", 3): sum(map(trial_flops, of["hyla", 3])) / overall,
    }
    for shape in plan["shapes"]:
        key = (shape["axes"]["model.attention"], shape["axes"]["model.depth"])
        assert shape["device_hours"] * 3600 == pytest.approx(expected[key])
    assert plan["wall_hours"] * 3600 == pytest.approx(sum(expected.values()) / 3)

    h100 = plan_json("--devices", "h100")
    assert h100["explanation"].startswith("measured: 1 finished trial on h100 in the store")


def test_other_sweeps_in_the_store_tell_how_fast_a_device_is(plan_json: PlanJson, sweep: Path) -> None:
    (trial,) = expand(load_sweep(sweep, overrides=["model.attention=linear", "model.depth=2", "seed=9"]))[:1]
    finish(Store.create("results"), trial, 20.0)
    plan = plan_json("--devices", "cpu:1")
    assert (plan["num_finished"], plan["basis"]) == (0, "measured")
    assert plan["wall_hours"] * 3600 == pytest.approx(plan["train_flops"] / (trial_flops(trial) / 20.0))


def test_nothing_is_left_when_all_is_in_the_store(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store.create("elsewhere")
    for trial in expand(load_sweep(sweep)):
        finish(store, trial, 1.0)
    assert main(["plan", str(sweep), "--results", "elsewhere"]) == 0
    printed = capsys.readouterr().out
    assert "elsewhere holds 48 finished; nothing to train" in printed
    assert "nothing left to pay for" in printed


def test_a_damaged_part_is_named_and_counts_as_missing(sweep: Path, plan_json: PlanJson) -> None:
    first, second = expand(load_sweep(sweep))[:2]
    store = Store.create("results")
    finish(store, first, 1.0)
    finish(store, second, 1.0)
    part = store.path / "trials" / f"{first.trial_id}-1.parquet"
    part.write_bytes(part.read_bytes()[:100])
    plan = plan_json(status=1)
    assert plan["num_finished"] == 1
    (damage,) = plan["damaged"]
    assert str(part) in damage


def test_long_lists_are_cut_short_in_the_text(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store.create("results")
    for trial in expand(load_sweep(sweep))[:8]:
        (store.path / "trials" / f"{trial.trial_id}-1.parquet").write_bytes(b"")
    widths = ", ".join(map(str, range(1, 33)))
    assert main(["plan", str(sweep), "--set", f"axes.model.width=[{widths}]", "--set", "run.max_pack_size=99"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("passed over: ") for line in lines) == 5
    assert "… and 3 more parts of the store that cannot be read; --json lists all" in lines
    assert sum(line.startswith(("softmax  ", "hyla  ")) for line in lines) == 60
    assert "… and 68 more rows; --json lists all" in lines  # 2 variants × 2 depths × 32 widths are 128 shapes


def test_text_for_a_reader_without_a_terminal(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store.create("results")
    finish(store, expand(load_sweep(sweep))[0], 1.0)
    assert main(["plan", str(sweep), "--devices", "a100:8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"small: {sweep} → results"
    assert "model.attention      softmax, hyla" in lines
    assert "optim.peak_lr        0.01, 0.001, 0.0001  best one chosen" in lines
    assert "seed                 0, 1                 averaged over" in lines
    assert "48 trials = 8 cells × 3 hyperparameter settings × 2 seeds" in lines
    assert "results holds 1 finished; 47 to train in 16 packs of at most 4" in lines
    (header,) = (line for line in lines if line.startswith("attention"))
    assert header.split("  ")[-1].strip() == "a100 time"
    assert any(line.startswith("softmax    1 ") and "50–100      12        11" in line for line in lines)
    assert any(line.startswith("total") and " 48 " in line and " 47 " in line for line in lines)
    assert all(line == line.rstrip() for line in lines)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_tables_are_drawn_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    spec = load_sweep(SCALING)
    trials = expand(spec)
    plan = make_plan(spec, trials, "results", read_store("nowhere", trials), DEVICES["h100"], 8)
    out = Terminal()
    print_plan(plan, out)
    text = out.getvalue()
    assert "1,944 trials = 81 cells × 8 hyperparameter settings × 3 seeds" in text
    assert "───" in text
    assert "78,125–312,500" in text
    assert text.count("softmax") == 1 + 9


def test_a_narrow_terminal_never_breaks_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    spec = load_sweep(SCALING)
    trials = expand(spec)
    out = Terminal()
    print_plan(make_plan(spec, trials, "results", read_store("nowhere", trials), DEVICES["h100"], 8), out)
    table = out.getvalue().split("───")[-1].split("total")[0].splitlines()[1:]
    assert any("…" in line for line in table)
    assert sum(line.startswith((" soft", " line", " hyla")) for line in table) == 27
    assert all(line.startswith((" soft", " line", " hyla")) for line in table if line.strip(" \x1b[1m"))


def test_a_sweep_without_axes_is_one_trial(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    axes = SWEEP[SWEEP.index("axes:") : SWEEP.index("run:")]
    sweep.write_text(SWEEP.replace(axes, "model.attention: hyla\nmodel.depth: 2\noptim.peak_lr: 0.1\nseed: 3\n"))
    assert main(["plan", str(sweep)]) == 0
    assert "1 trial = 1 cell × 1 seed" in capsys.readouterr().out


def test_the_store_named_first_wins(plan_json: PlanJson, monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan_json()["store"] == "results"
    assert plan_json("--tiny")["store"] == "results-tiny"
    monkeypatch.setenv("HYLA_STORE", "shared")
    assert plan_json()["store"] == plan_json("--tiny")["store"] == "shared"
    assert plan_json("--results", "mine")["store"] == "mine"


def test_an_empty_folder_is_a_store_yet_to_be(plan_json: PlanJson) -> None:
    Path("results").mkdir()
    assert plan_json()["num_new"] == 48


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--devices", "h999"], "--devices h999: 'h999' is unknown; choose one of ['cpu', 'a100',"),
        (["--devices", "h100:0"], "--devices h100:0: '0' is not a positive whole number"),
        (["--devices", "h100:"], "--devices h100:: '' is not a positive whole number"),
        (["--devices", "h100:two"], "--devices h100:two: 'two' is not a positive whole number"),
        (["--results", "small.yaml"], "small.yaml: not a folder; give the folder of a results store"),
        (["--results", "s3://me:secret@bucket/x"], "s3://…@bucket/x: a URL with credentials would be shown"),
        (["--max-concurrent", "2"], "python -m sweeps: unrecognized arguments: --max-concurrent 2"),
        (["--tin"], "python -m sweeps: unrecognized arguments: --tin"),
    ],
)
def test_a_slip_on_the_command_line_is_one_line(
    sweep: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert main(["plan", str(sweep), *flags]) == 2
    printed = capsys.readouterr()
    (error,) = printed.err.splitlines()
    assert error.startswith(message)
    assert printed.out == ""


@pytest.mark.parametrize(
    ("jax_name", "kind"),
    [
        ("cpu", "cpu"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("TPU v4", "tpu-v4"),
        ("TPU v5 lite", "tpu-v5e"),
        ("TPU v5p", "tpu-v5p"),
        ("TPU v5", "tpu-v5p"),
        ("TPU v6 lite", "tpu-v6e"),
    ],
)
def test_devices_are_found_by_the_name_jax_gives_them(jax_name: str, kind: str) -> None:
    assert [device.kind for device in DEVICES.values() if device.is_named(jax_name)] == [kind]


@pytest.mark.parametrize(
    ("ray_name", "kind"),
    [
        ("A100", "a100"),
        ("H100", "h100"),
        ("H200", "h200"),
        ("L4", "l4"),
        ("L40S", "l40s"),
        ("TPU-V4", "tpu-v4"),
        ("TPU-V5LITEPOD", "tpu-v5e"),
        ("TPU-V5P", "tpu-v5p"),
        ("TPU-V6E", "tpu-v6e"),
        ("GB200", None),
        ("cpu", None),
        (None, None),
    ],
)
def test_accelerators_are_found_by_the_name_ray_gives_them(ray_name: str | None, kind: str | None) -> None:
    found = find_device(ray_name)
    assert (found and found.kind) == kind
    assert (pack_memory_on(found, Resources(gpu=1)) is None) == (kind is None)


def test_packs_at_once_follow_from_cores_and_the_limit() -> None:
    assert packs_at_once(Resources(cpu=1), 8) == 8
    assert packs_at_once(Resources(cpu=3), 8) == 2
    assert packs_at_once(Resources(cpu=0.5), 8) == 16
    assert packs_at_once(Resources(cpu=16), 8) == 1
    assert packs_at_once(Resources(cpu=1), 8, 3) == 3
    assert packs_at_once(Resources(cpu=3), 8, 5) == 2


def test_devices_are_read_with_their_number() -> None:
    assert parse_devices("H100") == (DEVICES["h100"], 1)
    assert parse_devices("tpu-v5e:16") == (DEVICES["tpu-v5e"], 16)
    with pytest.raises(SpecError):
        parse_devices("h100:-1")


def test_planning_imports_neither_jax_nor_ray_nor_pandas(tmp_path: Path) -> None:
    """In a fresh interpreter, so that it starts quickly and touches no device."""
    code = (
        "import sys; from sweeps.__main__ import main; "
        f"status = main(['plan', {str(SCALING)!r}, '--results', {str(tmp_path / 'none')!r}]); "
        "heavy = {'jax', 'flax', 'ray', 'pandas', 'pyarrow', 'numpy', 'rich'} & set(sys.modules); "
        "sys.exit(f'{status} {heavy}' if status or heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=SCALING.parent.parent)
    assert (done.returncode, done.stderr) == (0, "")
    assert "1,944 trials = 81 cells" in done.stdout
