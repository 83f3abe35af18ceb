"""Frozen configs: the one definition of every field that changes what a training learns.

A config is checked once, when it is built, and never changed. No field is filled in later: sizes that follow from
others are properties. Imports neither jax nor flax.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from hyla_core import RESULTS_VERSION
from hyla_core.attention.variants import VARIANTS

Fraction = Annotated[float, Field(ge=0, lt=1)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]
MAX_EXAMPLES = 2**32  # examples are numbered by an unsigned 32-bit integer
NumExamples = Annotated[int, Field(ge=0, lt=MAX_EXAMPLES)]
MAX_FLOAT = 3.4e38  # what a float32 holds
MAX_FUNCTIONS = 1_000_000  # of fuzzy logic, and combinations of rules: their table is part of every training's memory
NUM_SRAVEN_RULES = 8  # length of tasks.sraven.RULES


class Config(BaseModel):
    """Base of all configs: frozen, finite numbers, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class SravenConfig(Config):
    """The symbolic Raven task: find the rule of each feature in a grid of cells and complete the last cell.

    Reference: arXiv 2406.05816, Section 4 and its appendix on SRAVEN.
    """

    name: Literal["sraven"]
    num_features: PositiveInt = 4
    num_values: PositiveInt = 8  # values of a feature: 0 … num_values - 1
    grid_size: Annotated[int, Field(ge=3)] = 3
    permute_features: bool = True  # shuffle the features within each column, alike for all rows
    ood_fraction: Fraction = 0.25  # share of the rule combinations held out of training

    @model_validator(mode="after")
    def _rows_have_distinct_values(self) -> Self:
        if self.num_combinations > MAX_FUNCTIONS:
            raise ValueError(
                f"num_features={self.num_features} makes more than {MAX_FUNCTIONS:,} combinations of rules"
            )
        if self.num_values < self.grid_size:
            raise ValueError(
                f"num_values={self.num_values} is less than grid_size={self.grid_size}, "
                "the distinct values that the rule 'distribute three' needs"
            )
        return self

    @property
    def num_combinations(self) -> int:
        """Multisets of num_features rules."""
        return math.comb(self.num_features + NUM_SRAVEN_RULES - 1, self.num_features)

    @property
    def num_held_out(self) -> int:
        """Rule combinations that training never shows: ⌊ood_fraction × num_combinations⌋."""
        # The product is rounded to binary first, as in the official code, so that sizes compare: 0.7 × 330 gives 230.
        return math.floor(self.ood_fraction * self.num_combinations)

    @property
    def eval_splits(self) -> tuple[str, ...]:
        """Fresh instances of seen combinations and, where some are held out, of those."""
        return ("valid", "ood") if self.num_held_out else ("valid",)

    @property
    def seq_len(self) -> int:
        """Tokens of one example: every feature of every cell."""
        return self.grid_size**2 * self.num_features

    @property
    def vocab_size(self) -> None:
        """No token ids: inputs are vectors."""
        return None

    @property
    def input_dim(self) -> int:
        """Width of one input token, a one-hot code."""
        return self.num_values

    @property
    def output_dim(self) -> int:
        """Logits per position."""
        return self.num_values

    @property
    def chance(self) -> float:
        """Accuracy per feature of a uniform guess."""
        return 1 / self.num_values


class FuzzyLogicConfig(Config):
    """Fuzzy logic: infer a function of num_variables truth values from examples of it in context.

    A conjunction takes every variable or its negation, so there are 2^num_variables; a function is the disjunction of
    num_terms different ones.

    Reference: arXiv 2406.05816, Section 3 and its appendix on fuzzy logic.
    """

    name: Literal["fuzzy_logic"]
    num_variables: Annotated[int, Field(ge=1, le=16)] = 4
    num_terms: PositiveInt = 2
    num_context: PositiveInt = 15  # examples before the query, so that a sequence has one token more
    test_fraction: Fraction = 0.5  # share of the functions of seen conjunctions held out of training, split `test`
    ood_fraction: Fraction = 0.25  # share of the conjunctions held out of training, split `ood`

    @model_validator(mode="after")
    def _some_function_is_left(self) -> Self:
        sizes = f"num_variables={self.num_variables} and num_terms={self.num_terms}"
        if self.num_terms > self.num_conjunctions:
            raise ValueError(f"{sizes} make no function: there are {self.num_conjunctions} conjunctions")
        if self.num_seen_functions + self.num_ood_functions > MAX_FUNCTIONS:
            raise ValueError(f"{sizes} make more than {MAX_FUNCTIONS:,} functions")
        if not self.num_train_functions:
            raise ValueError(
                f"num_terms={self.num_terms}, test_fraction={self.test_fraction} and ood_fraction={self.ood_fraction} "
                f"leave none of the functions of 2^{self.num_variables} conjunctions for training"
            )
        return self

    @property
    def num_conjunctions(self) -> int:
        """Conjunctions of all variables, each plain or negated."""
        return 2**self.num_variables

    @property
    def num_ood_conjunctions(self) -> int:
        """Conjunctions that training never shows: ⌊ood_fraction × num_conjunctions⌋."""
        return math.floor(self.ood_fraction * self.num_conjunctions)

    @property
    def num_seen_functions(self) -> int:
        """Functions all of whose conjunctions training shows: those of `train`, `valid` and `test`."""
        return math.comb(self.num_conjunctions - self.num_ood_conjunctions, self.num_terms)

    @property
    def num_test_functions(self) -> int:
        """Functions of seen conjunctions that training never shows: ⌊test_fraction × num_seen_functions⌋."""
        return math.floor(self.test_fraction * self.num_seen_functions)

    @property
    def num_train_functions(self) -> int:
        """Functions that training shows."""
        return self.num_seen_functions - self.num_test_functions

    @property
    def num_ood_functions(self) -> int:
        """Functions of held-out conjunctions only; those that mix both kinds are never used."""
        return math.comb(self.num_ood_conjunctions, self.num_terms)

    @property
    def eval_splits(self) -> tuple[str, ...]:
        """Fresh examples of seen functions, and of each kind of function that is held out."""
        held_out = {"test": self.num_test_functions, "ood": self.num_ood_functions}
        return ("valid", *(split for split, number in held_out.items() if number))

    @property
    def seq_len(self) -> int:
        """Tokens of one example: those in context and the query."""
        return self.num_context + 1

    @property
    def vocab_size(self) -> None:
        """No token ids: inputs are vectors."""
        return None

    @property
    def input_dim(self) -> int:
        """Width of one input token: the variables and the value of the function."""
        return self.num_variables + 1

    @property
    def output_dim(self) -> int:
        """The predicted value of the function."""
        return 1


Text = Annotated[str, Field(min_length=1)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class LanguageConfig(Config):
    """Language modelling: predict each token of a text from those before it.

    Where the text lies is no part of a trial's identity, what it says is. A sweep leaves the hashes out, and
    `sweeps.expand` fills them in.
    """

    name: Literal["language"]
    text: Text  # file, folder or glob of .txt, .jsonl, .json or .parquet files (.gz too), or `builtin`
    text_sha256: Sha256  # of its content, see corpus.content_hash
    valid_text: str | None = None  # a text of its own for validation; else a share of the documents is held out
    valid_sha256: Sha256 | None = None
    valid_fraction: Fraction = 0.05  # that share, chosen by seeds.split; of no account with a valid_text
    documents: Literal["file", "line", "paragraph"] = "paragraph"  # of text files; a row of a table is always one
    text_column: str = "text"  # of tables and JSON objects
    vocab_size: Annotated[int, Field(ge=258, le=2**20)] = 6144  # 2 special tokens, 256 bytes, and merges
    seq_len: Annotated[int, Field(ge=2)] = 128
    # packed: documents one after another, cut into sequences; per_document: a document begins a sequence of its own
    sequences: Literal["packed", "per_document"] = "packed"

    @model_validator(mode="after")
    def _texts_have_hashes(self) -> Self:
        if (self.valid_text is None) != (self.valid_sha256 is None):
            raise ValueError(f"valid_text={self.valid_text} and valid_sha256={self.valid_sha256} go together")
        if self.valid_text is None and not self.valid_fraction:
            raise ValueError("valid_fraction=0.0 leaves nothing for validation; raise it or name a valid_text")
        return self

    @property
    def eval_splits(self) -> tuple[str, ...]:
        """Text that training never shows."""
        return ("valid",)

    @property
    def input_dim(self) -> int:
        """No vectors: inputs are token ids."""
        return 0

    @property
    def output_dim(self) -> None:
        """Logits are products with the token embeddings, one for each token of the vocabulary."""
        return None


TaskConfig = Annotated[SravenConfig | FuzzyLogicConfig | LanguageConfig, Field(discriminator="name")]

NOT_IDENTITY = {"task": {"text", "valid_text"}, "numerics": {"remat"}}
"""Fields that say where something lies or how it is computed, not what is learned: never part of a trial's identity."""


class DataConfig(Config):
    """How many examples, and how often they are seen."""

    num_train: PositiveInt  # the training set: examples 0 … num_train - 1 of the training stream
    num_steps: PositiveInt
    num_valid: Annotated[NumExamples, Field(gt=0)]  # evaluation examples of what training shows, fresh ones
    num_ood: NumExamples  # evaluation examples of held-out parts or, in SRAVEN, rule combinations
    num_test: NumExamples = 0  # fuzzy logic: evaluation examples of held-out combinations of seen conjunctions


class ModelConfig(Config):
    """Shape of one transformer.

    Reference: arXiv 2406.05816, Section 2 and Appendix; defaults are those of the paper's SRAVEN runs.
    """

    attention: str  # a key of attention.variants.VARIANTS
    emb_dim: PositiveInt
    num_heads: PositiveInt
    num_layers: PositiveInt
    qk_dim: PositiveInt  # total over heads
    v_dim: PositiveInt  # total over heads
    mlp_dim: PositiveInt
    max_distance: Annotated[int, Field(ge=2)]  # T5 position biases: number of buckets and distance of the last one
    causal: bool = False  # a position sees itself and earlier ones only
    attention_dropout: Fraction = 0.0  # one mask over (query, key) serves all examples and heads
    dropout: Fraction = 0.0  # on embeddings and on the outputs of attention and MLP
    feedforward: Literal["gelu_mlp", "swiglu"] = "gelu_mlp"
    norm: Literal["layer", "rms"] = "layer"
    block: Literal["attention_first", "mlp_first", "mlp_only"] = "attention_first"
    normalize_qk: bool = False  # LayerNorm over each head's queries and keys
    relative_position: bool = True  # T5 position biases
    absolute_position: bool = False  # sinusoidal code added to the embeddings
    share_layers: bool = False  # one block applied num_layers times

    @field_validator("attention")
    @classmethod
    def _attention_is_known(cls, name: str) -> str:
        if name not in VARIANTS:
            raise ValueError(f"unknown; choose one of {sorted(VARIANTS)}")
        return name

    @model_validator(mode="after")
    def _heads_divide_dims(self) -> Self:
        for name in ("qk_dim", "v_dim"):
            if getattr(self, name) % self.num_heads:
                raise ValueError(f"{name}={getattr(self, name)} is not a multiple of num_heads={self.num_heads}")
        return self

    @model_validator(mode="after")
    def _sines_pair_with_cosines(self) -> Self:
        if self.absolute_position and self.emb_dim % 2:
            raise ValueError(f"emb_dim={self.emb_dim} is odd, but absolute_position needs a cosine for every sine")
        return self

    @property
    def qk_head_dim(self) -> int:
        """Width of one head's queries and keys."""
        return self.qk_dim // self.num_heads

    @property
    def v_head_dim(self) -> int:
        """Width of one head's values."""
        return self.v_dim // self.num_heads

    def widened(self, factor: int) -> Self:
        """A copy `factor` times as wide. Heads keep their size, so their number grows."""
        wider = {name: factor * getattr(self, name) for name in WIDTH_FIELDS}
        return type(self)(**{**dict(self), **wider})


WIDTH_FIELDS = ("emb_dim", "num_heads", "qk_dim", "v_dim", "mlp_dim")


class OptimConfig(Config):
    """Optimiser and learning-rate schedule."""

    name: Literal["adamw"]
    batch_size: PositiveInt
    peak_lr: Annotated[float, Field(gt=0, le=MAX_FLOAT)]
    weight_decay: Annotated[float, Field(ge=0, le=MAX_FLOAT)]
    warmup_steps: NonNegativeInt
    final_lr_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1  # the cosine's floor, as a share of the peak
    b1: Fraction = 0.9
    b2: Fraction = 0.999
    eps: PositiveFloat = 1e-8
    decay_mask: Literal["spare_rank_1", "all"] = "spare_rank_1"  # which leaves weight decay touches
    grad_clip_norm: PositiveFloat | None = None


class SeedsConfig(Config):
    """Independent randomness: what is held out, which examples are drawn, initialisation and dropout."""

    split: Seed
    data: Seed
    init: Seed


class NumericsConfig(Config):
    """Precision of the computation."""

    dtype: Literal["float32", "bfloat16"] = "float32"  # of activations; parameters and sums stay float32
    matmul_precision: Literal["default", "high", "highest"] = "default"
    remat: bool = False  # compute each block's activations anew in the backward pass: less memory, more time


HELD_OUT_BY = {"test": "test_fraction", "ood": "ood_fraction"}
"""The field of a task that decides whether there is anything to draw an evaluation split from."""


class TrainConfig(Config):
    """Everything that decides what one training learns."""

    task: TaskConfig
    data: DataConfig
    model: ModelConfig
    optim: OptimConfig
    seeds: SeedsConfig
    numerics: NumericsConfig = NumericsConfig()

    @model_validator(mode="after")
    def _parts_agree(self) -> Self:
        data, optim = self.data, self.optim
        if self.model.emb_dim % self.model.num_heads:
            raise ValueError(
                f"model.emb_dim={self.model.emb_dim} is not a multiple of model.num_heads={self.model.num_heads}"
            )
        if 2 * optim.warmup_steps >= data.num_steps:
            raise ValueError(
                f"optim.warmup_steps={optim.warmup_steps} is not less than half of data.num_steps={data.num_steps}"
            )
        if data.num_train < optim.batch_size:
            raise ValueError(f"data.num_train={data.num_train} is less than optim.batch_size={optim.batch_size}")
        if (seen := data.num_steps * optim.batch_size) >= MAX_EXAMPLES:
            raise ValueError(f"data.num_steps × optim.batch_size = {seen} is not below {MAX_EXAMPLES} examples")
        if isinstance(self.task, LanguageConfig) and not self.model.causal:
            raise ValueError("model.causal=False lets task.name='language' see what it predicts; set it to true")
        for split, fraction in HELD_OUT_BY.items():
            size = getattr(data, f"num_{split}")
            if size and split not in self.task.eval_splits:
                share = getattr(self.task, fraction, None)
                reason = (
                    f"task.name={self.task.name!r} has no such split"
                    if share is None
                    else f"task.{fraction}={share} holds out nothing to draw them from"
                )
                raise ValueError(f"data.num_{split}={size} but {reason}; set num_{split} to 0")
        return self

    @property
    def trial_id(self) -> str:
        """Identity: 12 hex digits that depend on what changes the result, and nothing else.

        Fields at their default are left out, so that a field added later with the default of old behaviour keeps the
        ids of what was trained before it. A default that changes what is learned raises RESULTS_VERSION.
        """
        identity = {"results_version": RESULTS_VERSION, **self.identity()}
        text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def identity(self) -> dict[str, Any]:
        """All fields that change the result and are not at their default, nested by section."""
        sections = self.model_dump(mode="json", exclude_defaults=True, exclude=NOT_IDENTITY)
        return {name: fields for name, fields in sections.items() if fields}

    def flat(self) -> dict[str, Any]:
        """Every field under its dotted name, `{"model.emb_dim": 128, …}`."""
        return {
            f"{section}.{name}": value
            for section, fields in self.model_dump(mode="json").items()
            for name, value in fields.items()
        }

    @classmethod
    def from_flat(cls, flat: Mapping[str, Any]) -> Self:
        """The opposite of `flat`, also for a row of the store's trials table.

        Args:
          flat: fields under their dotted names. Names of other sections are passed over, and so are fields without a
            value (None or NaN, as in a column that belongs to another task): they take their default.

        Returns:
          The config, with the `trial_id` of the one that `flat` came from.

        Raises:
          ValueError: a value is missing or not allowed.
        """
        sections: dict[str, dict[str, Any]] = {}
        for dotted, value in flat.items():
            section, _, name = dotted.partition(".")
            if section in cls.model_fields and name and value is not None and value == value:
                sections.setdefault(section, {})[name] = value
        return cls.model_validate(sections)


MEMBER_FIELDS = ("optim.peak_lr", "optim.weight_decay", "optim.warmup_steps", "seeds.split", "seeds.data", "seeds.init")
"""What members of one pack may differ in: values that enter the compiled program as data."""


def pack_key(config: TrainConfig) -> str:
    """Equal for exactly those configs that may train as one pack: all but the member fields agree."""
    shared = {name: value for name, value in config.flat().items() if name not in MEMBER_FIELDS}
    return json.dumps(shared, sort_keys=True)


class Cadence(Config):
    """When a training reports. Steps with rows depend on the number of steps alone, never on time."""

    num_logs: PositiveInt = 50  # training rows, each the mean over the steps since the one before
    num_evals: PositiveInt = 10  # evaluations; the last step always has one
    checkpoint_every_s: PositiveFloat = 60.0

    def log_steps(self, num_steps: int) -> list[int]:
        """Steps after which training rows are due, ascending, the last one included."""
        return _spread(self.num_logs, num_steps)

    def eval_steps(self, num_steps: int) -> list[int]:
        """Steps after which an evaluation is due, ascending, the last one included."""
        return _spread(self.num_evals, num_steps)


def _spread(num_points: int, num_steps: int) -> list[int]:
    return sorted({-(-k * num_steps // num_points) for k in range(1, num_points + 1)})
