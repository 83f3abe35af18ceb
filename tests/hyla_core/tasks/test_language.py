"""The language task: what it reads, what it scores, and whole trainings that are fed from the host."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from quick_jit import known_options

from hyla_core import checkpoint, choice, corpus, tokens, train
from hyla_core.config import Cadence, LanguageConfig, SeedsConfig, TrainConfig
from hyla_core.sequences import sequences_of
from hyla_core.tasks import Batch, make_task
from hyla_core.tokens import END, PAD
from hyla_core.train import Report

SEEDS = SeedsConfig(split=0, data=0, init=0)


@pytest.fixture(scope="module", autouse=True)
def text(tmp_path_factory):
    """A small text of its own, and a cache of its own."""
    folder = tmp_path_factory.mktemp("text")
    words = np.random.default_rng(0).choice(["one", "two", "three", "red", "blue", "fish", "and"], (60, 20))
    (folder / "text.txt").write_text("\n".join(" ".join(line) for line in words))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYLA_CACHE", str(folder / "cache"))
        # Compiled with little optimisation: that is where the time goes.
        fully = jax.stages.Lowered.compile
        patch.setattr(jax.stages.Lowered, "compile", lambda self, _=None: fully(self, known_options()))
        train._program.drop()
        yield str(folder / "text.txt")
        train._program.drop()


def language_config(text: str, **fields) -> LanguageConfig:
    fields = {"documents": "line", "vocab_size": 270, "seq_len": 6, "valid_fraction": 0.2} | fields
    return LanguageConfig(name="language", text=text, text_sha256=corpus.content_hash(text), **fields)


def test_encode_sets_each_token_against_those_before_it(text):
    inputs, targets = make_task(language_config(text)).encode(np.array([[5, 6, 7, END], [8, END, PAD, PAD]]))
    assert inputs.tolist() == [[PAD, 5, 6, 7], [PAD, 8, PAD, PAD]]
    assert targets.tolist() == [[5, 6, 7, END], [8, END, PAD, PAD]]


def test_metrics_by_hand(text):
    task = make_task(language_config(text))
    batch = task.encode(np.array([[2, 3, END], [4, END, PAD], [5, PAD, PAD]]))
    logits = np.zeros((3, 3, 6), np.float32)
    logits[0, 1, 3] = math.log(5)  # 5 of 10 parts: a half; the others of these rows are uniform over six
    logits[1, 0, 2] = 100.0  # the first token of a sequence is not asked for
    scores, weights = task.metrics(logits, batch), task.weights(batch)
    assert weights.tolist() == [2, 1, 0]
    np.testing.assert_allclose(scores["loss"], [(math.log(2) + math.log(6)) / 2, math.log(6), 0], rtol=1e-6)
    np.testing.assert_allclose(scores["accuracy"], [0.5, 0, 0])  # of equal logits, the first is taken: token 0
    assert task.derived({"loss": math.log(7)})["perplexity"] == pytest.approx(7)


@pytest.mark.parametrize("sequences", ["packed", "per_document"])
def test_a_pass_shows_each_sequence_of_the_training_set_once_in_a_new_order(text, sequences):
    task = make_task(language_config(text, sequences=sequences))
    there = len(sequences_of(task.config, "train", 0))

    def shown(number_of_pass: int, num_train: int) -> list[tuple[int, ...]]:
        index = np.arange(number_of_pass * num_train, (number_of_pass + 1) * num_train)
        return [tuple(row) for row in task.fetch("train", SEEDS, index, num_train).targets.tolist()]

    every = sequences_of(task.config, "train", 0).read(np.arange(there))
    first, second = shown(0, there), shown(1, there)
    assert sorted(first) == sorted(second) == sorted(map(tuple, every.tolist()))
    assert first != second
    small, large = set(shown(0, 10)), set(shown(3, 25))
    assert small <= large < set(first)
    straddling = task.fetch("train", SEEDS, np.arange(there - 2, there + 2), there).targets
    assert [tuple(row) for row in straddling.tolist()] == first[-2:] + second[:2]


def test_more_than_the_text_holds_is_refused(text):
    task = make_task(language_config(text))
    there = {split: len(sequences_of(task.config, split, 0)) for split in ("train", "valid")}
    with pytest.raises(ValueError, match=f"10000 examples of split=.train. .*; the text has {there['train']}"):
        task.fetch("train", SEEDS, np.arange(3), 10_000)
    with pytest.raises(ValueError, match=f"the text has {there['valid']}"):
        task.fetch("valid", SEEDS, np.array([there["valid"]]), 10)


def test_a_batch_of_which_nothing_counts_does_no_harm(text, monkeypatch):
    config = train_config(text)
    blank = Batch(np.zeros((8, 6), np.int32), np.zeros((8, 6), np.int32))
    fetch = type(make_task(config.task)).fetch

    def sometimes_blank(self, split, seeds, index, num_train):
        return blank if split == "train" and index[0] == 16 else fetch(self, split, seeds, index, num_train)

    monkeypatch.setattr("hyla_core.tasks.language.Language.fetch", sometimes_blank)
    recorder = run([config])
    assert recorder.reports[-1].progress[0].status == "finished"
    assert all(math.isfinite(row.value) for row in recorder.rows(config))


def test_what_looks_like_a_special_token_is_text(tmp_path):
    (tmp_path / "text.txt").write_text("a <pad> b <end> c\nsecond")
    found = tokens.load(language_config(str(tmp_path / "text.txt")))
    assert found.ids.tolist().count(PAD) == 0
    assert found.ids.tolist().count(END) == 2


def test_seeds_choose_the_order_and_the_documents_of_validation(text):
    task, index = make_task(language_config(text)), np.arange(12)

    def shown(kind: str, **seeds: int) -> list[list[int]]:
        return task.fetch(kind, SeedsConfig(**{**dict(SEEDS), **seeds}), index, 20).targets.tolist()

    assert shown("train") == shown("train", init=1)
    assert shown("train") != shown("train", data=1)
    assert shown("valid") == shown("valid", data=1)
    assert shown("valid") != shown("valid", split=1)
    with pytest.raises(ValueError, match="split='ood' does not exist here"):
        shown("ood")


def test_documents_of_validation_are_not_trained_on(text):
    config = language_config(text, sequences="per_document", seq_len=64)  # a sequence is a document
    splits = [sequences_of(config, split, 3) for split in ("train", "valid")]
    rows = [set(map(tuple, found.read(np.arange(len(found))).tolist())) for found in splits]
    assert [len(found) for found in rows] == [48, 12]
    assert not rows[0] & rows[1]


def train_config(text: str, **changes) -> TrainConfig:
    fields = {"split": 0, "data": 1, "init": 2, "peak_lr": 3e-3, "task": {}, "num_train": 50} | changes
    return TrainConfig.model_validate(
        {
            "task": language_config(text, **fields["task"]).model_dump(),
            "data": {"num_train": fields["num_train"], "num_steps": 30, "num_valid": 13, "num_ood": 0},
            "model": {
                "attention": "hyla",
                "causal": True,
                "emb_dim": 16,
                "num_heads": 2,
                "num_layers": 1,
                "qk_dim": 8,
                "v_dim": 8,
                "mlp_dim": 16,
                "max_distance": 6,
            },
            "optim": {
                "name": "adamw",
                "batch_size": 8,
                "peak_lr": fields["peak_lr"],
                "weight_decay": 0.1,
                "warmup_steps": 3,
            },
            "seeds": {name: fields[name] for name in ("split", "data", "init")},
        }
    )


@dataclasses.dataclass
class Recorder:
    reports: list[Report] = dataclasses.field(default_factory=list)

    def rows(self, config: TrainConfig) -> list:
        return [row for report in self.reports for row in report.rows if row.trial_id == config.trial_id]


def run(configs, stop_after=math.inf, checkpoint_every_s=1e-9, **arguments) -> Recorder:
    recorder = Recorder()
    cadence = Cadence(num_logs=5, num_evals=3, checkpoint_every_s=checkpoint_every_s)
    stop = lambda: len(recorder.reports) >= stop_after  # noqa: E731
    train.train(configs, recorder.reports.append, cadence=cadence, should_stop=stop, **arguments)
    return recorder


@pytest.fixture(scope="module")
def pack(text) -> list[TrainConfig]:
    return [train_config(text), train_config(text, split=4, data=5, init=6, peak_lr=1e-2)]


@pytest.fixture(scope="module")
def unbroken(pack) -> Recorder:
    return run(pack)


def test_a_fed_training_learns_and_reports_perplexity(pack, unbroken):
    for config in pack:
        rows = {(row.split, row.metric, row.step): row.value for row in unbroken.rows(config)}
        assert {step for split, _, step in rows if split == "valid"} == {10, 20, 30}
        for (split, metric, step), value in rows.items():
            if metric == "perplexity":
                assert value == pytest.approx(math.exp(rows[split, "loss", step]))
        assert rows["train", "loss", 6] < 1.5 * math.log(270)
        assert rows["valid", "loss", 30] < rows["valid", "loss", 10]


def test_evaluation_is_a_mean_over_tokens_of_an_independent_loop(text, pack, unbroken):
    config = pack[0]
    final = next(data for report in unbroken.reports for data in report.checkpoints.values())
    assert checkpoint.read_step(final) < 30
    kept = run([config], checkpoint_every_s=1000, final_checkpoints=True)
    params, _ = train.restore_params(config, kept.reports[-1].checkpoints[config.trial_id])
    batch = make_task(config.task).fetch("valid", config.seeds, np.arange(13), 50)
    log_probs = jax.nn.log_softmax(train.model.apply(config, params, batch.inputs))
    losses = [
        -log_probs[row, place, batch.targets[row, place]]
        for row in range(13)
        for place in range(6)
        if batch.inputs[row, place] != PAD
    ]
    rows = {(row.split, row.metric, row.step): row.value for row in kept.rows(config)}
    assert rows["valid", "loss", 30] == pytest.approx(float(np.mean(losses)), rel=1e-5)


def test_a_resumed_fed_training_has_the_rows_of_an_unbroken_one(pack, unbroken):
    first = run(pack, stop_after=3)
    saved = first.reports[-1].checkpoints
    step = checkpoint.read_step(saved[pack[0].trial_id])
    assert 0 < step < 30
    rest = run(pack, resume_from=saved)
    for config in pack:
        assert first.rows(config) + rest.rows(config) == unbroken.rows(config)


def test_a_member_with_seeds_of_its_own_learns_what_it_learns_alone(pack, unbroken):
    alone = {(row.split, row.metric, row.step): row.value for row in run([pack[1]]).rows(pack[1])}
    for row in unbroken.rows(pack[1]):
        assert row.value == pytest.approx(alone[row.split, row.metric, row.step], rel=1e-4)


def test_rows_do_not_depend_on_how_much_is_fed_at_once(pack, unbroken, monkeypatch):
    monkeypatch.setattr(train, "MAX_FEED_STEPS", 2)
    train._program.drop()
    compiled = train.num_compilations()
    rows = run(pack)
    assert train.num_compilations() == compiled + 1
    train._program.drop()
    for config in pack:
        for ours, theirs in zip(rows.rows(config), unbroken.rows(config), strict=True):
            assert ours._replace(value=0) == theirs._replace(value=0)
            assert ours.value == pytest.approx(theirs.value, rel=1e-4)


@pytest.mark.slow
def test_rows_do_not_depend_on_the_pieces_of_a_batch(text, monkeypatch):
    # Documents end at different places, so that the pieces of a batch count differently.
    config = train_config(text, task={"sequences": "per_document"})
    whole = run([config]).rows(config)
    monkeypatch.setattr(choice, "CACHE_BYTES", 1)
    train._program.drop()
    assert choice.pieces(config, "cpu") == 8
    pieces = run([config]).rows(config)
    train._program.drop()
    for ours, theirs in zip(pieces, whole, strict=True):
        assert ours._replace(value=0) == theirs._replace(value=0)
        assert ours.value == pytest.approx(theirs.value, rel=1e-4)


def test_an_error_of_reading_passes_through_and_no_thread_is_left(pack, monkeypatch):
    import threading

    def fail(*_):
        raise OSError("gone")

    program = train._program(train.program_shape(pack[0]), 2)
    assert program.feed_steps == train.MAX_FEED_STEPS
    monkeypatch.setattr("hyla_core.tasks.language.Language.fetch", fail)
    with pytest.raises(OSError, match="gone"):
        run(pack)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("feed")]


def test_where_the_text_lies_is_not_its_identity(text, tmp_path):
    moved = tmp_path / "moved.txt"
    moved.write_bytes(open(text, "rb").read())  # noqa: SIM115, PTH123
    assert train_config(str(moved)).trial_id == train_config(text).trial_id
    assert train_config(text, task={"seq_len": 5}).trial_id != train_config(text).trial_id
    moved.write_text("x\ny")
    assert train_config(str(moved)).trial_id != train_config(text).trial_id
    assert "task.text" in train_config(text).flat()


def test_batches_are_numpy_arrays_of_32_bits(text):
    batch = make_task(language_config(text)).fetch("train", SEEDS, np.arange(3), 10)
    assert isinstance(batch, Batch)
    assert all(isinstance(leaf, np.ndarray) and leaf.dtype == np.int32 and leaf.shape == (3, 6) for leaf in batch)
