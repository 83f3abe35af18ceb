import dataclasses
import functools
import gc
import math
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick_jit import known_options, quick_jit

from hyla_core import checkpoint, model, optim, train
from hyla_core.checkpoint import DamagedCheckpoint
from hyla_core.config import Cadence, TrainConfig
from hyla_core.metrics import MetricsRow
from hyla_core.optim import Hyperparams
from hyla_core.tasks import make_task
from hyla_core.train import PACK_ATOL, PACK_RTOL, MemberProgress, Report

CADENCE = Cadence(num_logs=5, num_evals=2, checkpoint_every_s=3600)
EVERY_CHUNK = Cadence(num_logs=5, num_evals=2, checkpoint_every_s=1e-9)
NUM_STEPS = 40


def make_config(num_steps: int = NUM_STEPS, **changes) -> TrainConfig:
    """A small HYLA; all tests share its shape, so that few programs are compiled."""
    fields = {
        "peak_lr": 3e-3,
        "weight_decay": 0.1,
        "warmup_steps": 5,
        "split": 1,
        "data": 2,
        "init": 3,
        "num_train": 70,
    } | changes
    return TrainConfig.model_validate(
        {
            "task": {"name": "sraven", "num_features": 2, "num_values": 5, "permute_features": False},
            # Neither set divides into batches of 8, and 40 batches go round the training set more than once.
            "data": {"num_train": fields["num_train"], "num_steps": num_steps, "num_valid": 21, "num_ood": 9},
            "model": {
                "attention": "hyla",
                "emb_dim": 16,
                "num_heads": 4,
                "num_layers": 1,
                "qk_dim": 8,
                "v_dim": 8,
                "mlp_dim": 24,
                "max_distance": 18,
                "attention_dropout": 0.1,
                "dropout": 0.1,
            },
            "optim": {
                "name": "adamw",
                "batch_size": 8,
                "peak_lr": fields["peak_lr"],
                "weight_decay": fields["weight_decay"],
                "warmup_steps": fields["warmup_steps"],
            },
            "seeds": {name: fields[name] for name in ("split", "data", "init")},
        }
    )


PACK = [
    make_config(),
    make_config(peak_lr=1e-3, weight_decay=0.3, warmup_steps=0),
    make_config(split=7, data=8, init=9, warmup_steps=11),
]


@pytest.fixture(autouse=True, scope="module")
def quick_programs():
    """Compiles with little optimisation, which takes a quarter of the time. Slow tests undo it."""
    compile_fully = jax.stages.Lowered.compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", lambda self, _=None: compile_fully(self, known_options()))
        train._program.drop()
        yield patch
        train._program.drop()


@pytest.fixture
def fully_compiled(quick_programs):
    """Undoes `quick_programs` for one test."""
    quick = jax.stages.Lowered.compile
    quick_programs.undo()
    train._program.drop()
    yield
    train._program.drop()
    quick_programs.setattr(jax.stages.Lowered, "compile", quick)


def changed(config: TrainConfig, **sections: dict) -> TrainConfig:
    """A copy with other values of some fields, `changed(config, model={"emb_dim": 32})`."""
    fields = config.model_dump()
    for section, values in sections.items():
        fields[section] |= values
    return TrainConfig.model_validate(fields)


@dataclasses.dataclass
class Recorder:
    """Keeps what `train` reports; stops it after a number of reports."""

    stop_after: float = math.inf
    reports: list[Report] = dataclasses.field(default_factory=list)

    def should_stop(self) -> bool:
        return len(self.reports) >= self.stop_after

    @property
    def rows(self) -> list[MetricsRow]:
        return [row for report in self.reports for row in report.rows]

    def rows_of(self, config: TrainConfig) -> list[MetricsRow]:
        return [row for row in self.rows if row.trial_id == config.trial_id]

    def checkpoint(self, config: TrainConfig, step: int) -> bytes:
        for report in self.reports:
            data = report.checkpoints.get(config.trial_id, b"")
            if data and checkpoint.read_step(data) == step:
                return data
        raise LookupError(f"no checkpoint of step {step}")


def run(configs, cadence: Cadence = CADENCE, stop_after: float = math.inf, **arguments) -> Recorder:
    recorder = Recorder(stop_after)
    returned = train.train(
        configs, recorder.reports.append, cadence=cadence, should_stop=recorder.should_stop, **arguments
    )
    assert returned == recorder.reports[-1].progress or any(math.isnan(member.loss) for member in returned)
    return recorder


@pytest.fixture
def chunk_of_steps(monkeypatch) -> Callable[[int], None]:
    """Makes chunks as long as asked for, whatever the speed."""

    def set_length(num_steps: int) -> None:
        def measured(pace, _num_steps, elapsed_s):
            pace.steps_per_s, pace.num_steps = 1 / elapsed_s, num_steps

        monkeypatch.setattr(train._Pace, "measured", measured)

    return set_length


def test_rows_are_due_at_steps_that_depend_on_the_number_of_steps_alone():
    recorder = run([make_config()])
    assert {row.step for row in recorder.rows if row.split == "train"} == {8, 16, 24, 32, 40}
    for split in ("valid", "ood"):
        assert {row.step for row in recorder.rows if row.split == split} == {20, 40}
    assert {row.metric for row in recorder.rows} == {"loss", "accuracy", "accuracy_per_feature"}
    assert all(type(row.value) is float for row in recorder.rows)
    assert recorder.reports[-1].progress == [
        MemberProgress(make_config().trial_id, 40, 40, pytest.approx(1.6, abs=1), "finished")
    ]
    assert not any(report.checkpoints for report in recorder.reports)


def test_training_rows_are_means_over_an_independent_loop():
    config = make_config()
    task = make_task(config.task)
    tables = task.tables(config.seeds.split)
    dropout_rng = jax.random.fold_in(jax.random.key(config.seeds.init), 1)
    hyperparams = Hyperparams(3e-3, 0.1, 5, NUM_STEPS)

    @quick_jit
    def update(params, opt_state, step, index):
        batch = task.sample(tables, "train", jax.random.key(config.seeds.data), index)

        def loss_fn(params):
            logits = model.apply(config, params, batch.inputs, dropout_rng=jax.random.fold_in(dropout_rng, step))
            return jnp.mean(task.metrics(logits, batch)["loss"])

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return loss, *optim.update(grads, opt_state, params, step, hyperparams, config.optim)

    params = quick_jit(functools.partial(model.init_params, config))(
        jax.random.fold_in(jax.random.key(config.seeds.init), 0)
    )
    opt_state = optim.init(params, config.optim)
    losses = []
    for step in range(NUM_STEPS):
        index = np.array([(8 * step + j) % 70 for j in range(8)], np.uint32)
        loss, params, opt_state = update(params, opt_state, step, index)
        losses.append(float(loss))

    recorder = run([config])
    rows = [row.value for row in recorder.rows if (row.split, row.metric) == ("train", "loss")]
    np.testing.assert_allclose(rows, np.reshape(losses, (5, 8)).mean(axis=1), rtol=1e-4)
    for split, size in (("valid", 21), ("ood", 9)):

        @quick_jit
        def measure(params, split=split, size=size):
            index = np.arange(size, dtype=np.uint32)
            batch = task.sample(tables, split, jax.random.key(config.seeds.data), index)
            return task.metrics(model.apply(config, params, batch.inputs), batch)

        values = measure(params)
        for name in values:
            (row,) = [row for row in recorder.rows if (row.step, row.split, row.metric) == (40, split, name)]
            np.testing.assert_allclose(row.value, np.mean(values[name]), rtol=1e-4, err_msg=f"{split} {name}")


def test_rows_do_not_depend_on_chunks(chunk_of_steps):
    chunk_of_steps(1000)
    long = run([make_config()])
    chunk_of_steps(3)
    short = run([make_config()])
    assert len(long.reports) < len(short.reports)
    assert long.rows == short.rows


@pytest.mark.parametrize("step", [1, 8, 13, 20, 39])
def test_a_resumed_run_has_the_rows_of_an_unbroken_one(step, chunk_of_steps):
    config = make_config()
    chunk_of_steps(1)
    unbroken = run([config], EVERY_CHUNK)
    chunk_of_steps(5)
    resumed = run([config], resume_from={config.trial_id: unbroken.checkpoint(config, step)})
    assert resumed.reports[0].progress[0].step > step
    assert resumed.rows == [row for row in unbroken.rows if row.step > step]


def test_a_checkpoint_comes_with_the_rows_up_to_its_step(chunk_of_steps):
    chunk_of_steps(3)
    config = make_config()
    recorder = run([config], EVERY_CHUNK)
    assert [bool(report.checkpoints) for report in recorder.reports] == [
        report.progress[0].status == "running" for report in recorder.reports
    ]
    for report in recorder.reports:
        for data in report.checkpoints.values():
            assert checkpoint.read_step(data) == report.progress[0].step
            assert all(row.step == report.progress[0].step for row in report.rows)


@pytest.mark.slow
def test_members_that_finish_hand_out_what_they_have_learnt_where_asked():
    config, bad = PACK[0], make_config(peak_lr=1e38, weight_decay=0.3, warmup_steps=0)
    recorder = run([config, bad, PACK[2]], final_checkpoints=True)
    *before, last = recorder.reports
    assert not any(report.checkpoints for report in before)
    assert last.checkpoints.keys() == {config.trial_id, PACK[2].trial_id}

    params, step = train.restore_params(config, last.checkpoints[config.trial_id])
    assert step == NUM_STEPS
    task = make_task(config.task)
    batch = task.sample(
        task.tables(config.seeds.split), "valid", jax.random.key(config.seeds.data), np.arange(21, dtype=np.uint32)
    )
    loss = quick_jit(lambda params: jnp.mean(task.metrics(model.apply(config, params, batch.inputs), batch)["loss"]))
    (row,) = [row for row in recorder.rows_of(config) if (row.step, row.split, row.metric) == (40, "valid", "loss")]
    np.testing.assert_allclose(loss(params), row.value, rtol=1e-4)
    with pytest.raises(DamagedCheckpoint, match=r"does not fit this training: decoder_norm/bias is float32\[16\]"):
        train.restore_params(changed(config, model={"emb_dim": 32}), last.checkpoints[config.trial_id])


def test_a_stopped_run_hands_out_all_states_and_goes_on_later():
    unbroken = run(PACK)
    stopped = run(PACK, stop_after=3)
    last = stopped.reports[-1]
    assert [member.status for member in last.progress] == ["interrupted"] * 3
    assert last.checkpoints.keys() == {config.trial_id for config in PACK}
    assert last.progress[0].step == stopped.reports[-2].progress[0].step < NUM_STEPS
    resumed = run(PACK, resume_from=last.checkpoints)
    assert stopped.rows + resumed.rows == unbroken.rows


def test_a_run_stopped_at_once_hands_out_its_start():
    stopped = run(PACK, stop_after=0)
    assert [checkpoint.read_step(data) for data in stopped.reports[-1].checkpoints.values()] == [0, 0, 0]
    assert run(PACK, resume_from=stopped.reports[-1].checkpoints).rows == run(PACK).rows


def test_members_behind_catch_up_and_all_rows_stay_the_same(chunk_of_steps):
    chunk_of_steps(1)
    unbroken = run(PACK, EVERY_CHUNK)
    starts = {PACK[0].trial_id: 22, PACK[2].trial_id: 9}
    chunk_of_steps(4)
    resumed = run(
        PACK,
        resume_from={
            config.trial_id: unbroken.checkpoint(config, starts[config.trial_id]) for config in (PACK[0], PACK[2])
        },
    )
    for config in PACK:
        expected = [row for row in unbroken.rows_of(config) if row.step > starts.get(config.trial_id, 0)]
        assert resumed.rows_of(config) == expected
    assert [member.step for member in resumed.reports[0].progress] == [22, 1, 9]
    steps = [member.step for report in resumed.reports for member in report.progress[1:2]]
    assert {9, 22, 40} <= set(steps)


def test_a_run_stopped_while_members_wait_hands_out_their_states_too(chunk_of_steps):
    chunk_of_steps(1)
    unbroken = run(PACK, EVERY_CHUNK)
    waiting = unbroken.checkpoint(PACK[0], 22)
    stopped = run(PACK, resume_from={PACK[0].trial_id: waiting}, stop_after=3)
    saved = stopped.reports[-1].checkpoints
    assert saved[PACK[0].trial_id] == waiting
    assert [checkpoint.read_step(saved[config.trial_id]) for config in PACK] == [22, 3, 3]


def test_a_diverging_member_ends_and_leaves_the_others_alone():
    healthy = run(PACK)
    bad = make_config(peak_lr=1e38, weight_decay=0.3, warmup_steps=0)
    recorder = run([PACK[0], bad, PACK[2]])
    assert recorder.rows_of(PACK[0]) == healthy.rows_of(PACK[0])
    assert recorder.rows_of(PACK[2]) == healthy.rows_of(PACK[2])
    first, diverged, last = recorder.reports[-1].progress
    assert (first.status, diverged.status, last.status) == ("finished", "diverged", "finished")
    assert 1 < diverged.step < NUM_STEPS
    assert not math.isfinite(diverged.loss)
    assert all(row.step < diverged.step and math.isfinite(row.value) for row in recorder.rows_of(bad))


def test_divergence_is_dated_to_its_step_whatever_the_chunks(chunk_of_steps):
    bad = make_config(peak_lr=1e38, weight_decay=0.3, warmup_steps=0)
    ends = []
    for length in (1, 5, 1000):
        chunk_of_steps(length)
        recorder = run([bad])
        ends.append((recorder.reports[-1].progress[0].step, recorder.rows))
        assert recorder.reports[-1].progress[0].status == "diverged"
    assert ends[0] == ends[1] == ends[2]


def test_trainings_of_other_lengths_share_the_program():
    run([make_config()])
    compiled = train.num_compilations()
    recorder = run([make_config(num_steps=17, num_train=1000, peak_lr=1e-4)])
    assert train.num_compilations() == compiled
    assert recorder.reports[-1].compile_s == 0
    assert recorder.reports[-1].progress[0].step == 17


def test_compilation_is_timed_apart(monkeypatch):
    program = train._program(train.program_shape(make_config()), 1)

    def compile_slowly(*_):
        time.sleep(0.2)
        return program

    monkeypatch.setattr(train, "_program", train._Programs(compile_slowly))
    first, second = run([make_config()]), run([make_config(peak_lr=1e-3)])
    assert train.num_compilations() == 1
    assert all(report.compile_s == first.reports[0].compile_s > 0.2 for report in first.reports)
    assert {report.compile_s for report in second.reports} == {0}


def test_finished_members_have_nothing_to_do(chunk_of_steps):
    config = make_config()
    chunk_of_steps(1)
    data = run([config], EVERY_CHUNK).checkpoint(config, 39)
    state, _ = checkpoint.decode(data, train._program(train.program_shape(config), 1).member_state)
    recorder = run([config], resume_from={config.trial_id: checkpoint.encode(state, 40)})
    assert [report.progress[0].status for report in recorder.reports] == ["finished"]
    assert recorder.rows == []


def test_exceptions_of_report_pass_through():
    class DiskFull(Exception):
        pass

    def report(_: Report) -> None:
        raise DiskFull

    with pytest.raises(DiskFull):
        train.train([make_config()], report, cadence=CADENCE)


@pytest.mark.parametrize(
    ("configs", "message"),
    [
        ([], "at least one config"),
        ([make_config(), make_config()], "each trial once"),
        ([make_config(), make_config(num_steps=41)], r"not in \['data.num_steps'\]"),
    ],
)
def test_what_is_no_pack_is_refused(configs, message):
    with pytest.raises(ValueError, match=message):
        run(configs)


def test_checkpoints_that_do_not_fit_are_refused_by_trial():
    config = make_config()
    data = run([config], stop_after=1).reports[-1].checkpoints[config.trial_id]
    with pytest.raises(DamagedCheckpoint, match=rf"^trial {config.trial_id}: .*SHA-256"):
        run([config], resume_from={config.trial_id: data[:-1] + bytes([data[-1] ^ 1])})
    state, _ = checkpoint.decode(data, train._program(train.program_shape(config), 1).member_state)
    with pytest.raises(DamagedCheckpoint, match="beyond num_steps=40"):
        run([config], resume_from={config.trial_id: checkpoint.encode(state, 41)})
    with pytest.raises(ValueError, match="not in this pack"):
        run([config], resume_from={"0123456789ab": data})


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["softmax", "hyla"])
def test_on_a_cpu_members_learn_to_the_bit_what_they_learn_alone(attention, fully_compiled):
    pack = [changed(config, model={"attention": attention}) for config in PACK]
    together = run(pack)
    for config in pack:
        assert together.rows_of(config) == run([config]).rows


@pytest.mark.slow
def test_members_side_by_side_learn_what_they_learn_alone_within_the_tolerance(monkeypatch):
    pack = [
        make_config(num_steps=200, **changes)
        for changes in (
            {},
            {"peak_lr": 1e-3, "weight_decay": 0.3},
            {"split": 7, "data": 8, "init": 9, "warmup_steps": 50},
        )
    ]
    alone = [row for config in pack for row in run([config]).rows]
    monkeypatch.setattr(train, "_takes_turns", lambda: False)
    monkeypatch.setattr(train, "_program", train._Programs(train._Program))
    recorder = run(pack)
    together = [row for config in pack for row in recorder.rows_of(config)]
    assert [row[:-1] for row in together] == [row[:-1] for row in alone]
    values, expected = ([row.value for row in rows] for rows in (together, alone))
    np.testing.assert_allclose(values, expected, rtol=PACK_RTOL, atol=PACK_ATOL)
    # The tolerance leaves room for what rounding can become. Early on, it is still far from that.
    early = [i for i, row in enumerate(together) if row.step <= 40 and row.metric == "loss"]
    np.testing.assert_allclose(np.take(values, early), np.take(expected, early), rtol=1e-4)


def test_a_small_training_set_is_learnt():
    config = make_config(num_steps=400, num_train=16, peak_lr=1e-2)
    losses = [row.value for row in run([config]).rows if (row.split, row.metric) == ("train", "loss")]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.slow
def test_fresh_examples_of_seen_and_unseen_rules_are_answered(fully_compiled):
    """Guessing gets one feature in eight right; seven in ten were after 2000 steps."""
    config = changed(
        make_config(num_steps=2000, num_train=128_000, peak_lr=1e-3, warmup_steps=20),
        task={"num_values": 8},
        data={"num_valid": 512, "num_ood": 512},
        model={
            "attention": "softmax",
            "emb_dim": 32,
            "num_heads": 8,
            "num_layers": 2,
            "qk_dim": 16,
            "v_dim": 16,
            "mlp_dim": 64,
            "dropout": 0.0,
        },
        optim={"batch_size": 64},
    )
    final = {(row.split, row.metric): row.value for row in run([config]).rows if row.step == 2000}
    assert final["valid", "accuracy_per_feature"] > 0.5
    assert final["ood", "accuracy_per_feature"] > 0.5


@pytest.mark.slow
def test_programs_that_are_dropped_are_freed(monkeypatch):
    def num_executables() -> int:
        gc.collect()
        return len(jax.devices()[0].client.live_executables())

    shape = train.program_shape(make_config())
    kept = train._Programs(train._Program, 1)
    before = num_executables()
    kept(shape, 1)
    assert num_executables() >= before + 3
    kept.drop()
    assert num_executables() == before
