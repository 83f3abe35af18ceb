"""A sweep's trials: the product of its axes, each a complete and checked `TrainConfig`.

Pure: the same file gives the same trials with the same ids.
"""

import hashlib
import itertools
import json
import math
import re
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from hyla_core import corpus
from hyla_core.config import WIDTH_FIELDS, Config, LanguageConfig, ModelConfig, TrainConfig
from sweeps.spec import (
    SECTION_MODELS,
    SEEDS,
    Origin,
    SpecError,
    SweepSpec,
    choices,
    pydantic_problem,
)

MAX_TRIALS = 1_000_000
"""More than anyone trains; a slip in an axis should not fill the memory."""

MAX_REPORTED = 20
"""Kinds of bad combinations named one by one."""


class TrialSpec(NamedTuple):
    """One training with one seed: complete, nothing is filled in later."""

    trial_id: str
    config: TrainConfig
    axes: dict[str, Any]  # dotted name → value as the sweep writes it
    point: str  # equal for exactly those trials that differ in seeds alone


def expand(spec: SweepSpec) -> list[TrialSpec]:
    """The trials of a sweep, in the order of its axes, the last axis fastest.

    Raises:
      SpecError: naming at once, grouped by reason, every combination of axis values that is not a valid config, or
        the combinations that come to the same config.
    """
    if spec.num_combinations > MAX_TRIALS:
        origin = spec.origin("axes")
        raise SpecError(
            origin.source,
            origin.line,
            f"axes make {spec.num_combinations:,} trials; at most {MAX_TRIALS:,} are allowed",
        )
    resolver = _Resolver(spec.flat_settings, project_root(spec.path))
    trials: list[TrialSpec] = []
    failures: dict[str, list[dict[str, Any]]] = {}
    first_of: dict[str, TrialSpec] = {}
    duplicates: list[tuple[TrialSpec, TrialSpec]] = []
    for values in itertools.product(*spec.axes.values()):
        axes = dict(zip(spec.axes, values, strict=True))
        try:
            config = resolver.resolve(axes)
        except _BadCombination as error:
            for message in error.messages:
                failures.setdefault(message, []).append(axes)
            continue
        trial = TrialSpec(config.trial_id, config, axes, _point(config))
        if trial.trial_id in first_of:
            duplicates.append((first_of[trial.trial_id], trial))
        first_of.setdefault(trial.trial_id, trial)
        trials.append(trial)
    if failures:
        raise _failed(spec, failures)
    if duplicates:
        raise _duplicated(spec, duplicates)
    return trials


def _point(config: TrainConfig) -> str:
    """12 hex digits of all that a config says but its seeds."""
    fields = {section: values for section, values in config.identity().items() if section != "seeds"}
    text = json.dumps(fields, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class _BadCombination(Exception):
    def __init__(self, messages: list[str]):
        self.messages = messages


class _Resolver:
    """Turns base settings and one value of each axis into a config.

    Trials share their sections: with three widths and three depths there are nine models to check, however many trials.
    """

    def __init__(self, settings: Mapping[str, Any], root: Path):
        self.settings, self.root = settings, root
        self.built: dict[tuple[Any, ...], Config | _BadCombination] = {}

    def resolve(self, axes: Mapping[str, Any]) -> TrainConfig:
        """One trial's config.

        Raises:
          _BadCombination: with everything that is wrong with it.
        """
        given = {**self.settings, **axes}
        sections: dict[str, dict[str, Any]] = {name: {} for name in TrainConfig.model_fields}
        for dotted, value in given.items():
            section, _, name = dotted.rpartition(".")
            if section:
                sections[section][name] = value
        if "seed" in given:
            sections["seeds"] = {seed.partition(".")[2]: given["seed"] for seed in SEEDS} | sections["seeds"]
        sections["data"]["batch_size"] = sections["optim"]["batch_size"]

        task = self._section("task", sections["task"])
        if isinstance(task, _BadCombination):
            raise task
        sections["model"].setdefault("max_distance", task.seq_len)  # type: ignore[attr-defined]
        parts = {name: self._section(name, fields) for name, fields in sections.items()}
        bad = [part for part in parts.values() if isinstance(part, _BadCombination)]
        if bad:
            raise _BadCombination([message for part in bad for message in part.messages])
        try:
            return TrainConfig(**parts)  # type: ignore[arg-type]
        except ValidationError as error:
            raise _BadCombination(_messages(error, "", TrainConfig)) from None

    def _section(self, section: str, fields: dict[str, Any]) -> "Config | _BadCombination":
        key = (section, *fields.items())
        if key not in self.built:
            try:
                self.built[key] = _build(section, fields, self.root)
            except _BadCombination as error:
                self.built[key] = error
        return self.built[key]


def project_root(file: Path) -> Path:
    """What paths in a sweep file are relative to: the nearest folder above it with a pyproject.toml.

    Where there is none, as for a file that was copied to a cluster's home folder, it is the project of this package.
    """
    folder = Path(file).absolute().parent
    return next(
        (parent for parent in (folder, *folder.parents) if (parent / "pyproject.toml").is_file()),
        Path(__file__).parent.parent,
    )


def _build(section: str, fields: dict[str, Any], root: Path) -> Config:
    """One section of a config, its shorthand resolved."""
    models = SECTION_MODELS[section]
    model = next((model for model in models if fields.get("name") in choices(model, "name")), models[0])
    if section == "data":
        fields = _resolved_data(fields)
    if model is LanguageConfig:
        fields = _resolved_text(fields, root)
    width = fields.get("width", 1)
    renamed = {"depth": "num_layers"}
    fields = {renamed.get(name, name): value for name, value in fields.items() if name != "width"}
    try:
        config = model.model_validate(fields)
        return config.widened(int(width)) if isinstance(config, ModelConfig) else config
    except ValidationError as error:
        raise _BadCombination(_messages(error, section, model)) from None


def _resolved_data(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The `data` section with its shares and passes as numbers of examples and steps, exact in decimal."""
    fields = dict(fields)
    batch_size = fields.pop("batch_size")
    whole, fraction, passes = fields["num_train"], fields.pop("train_fraction", 1), fields.pop("passes", None)
    # Through the decimal spelling: in binary, 0.29 × 100 is 28.999…
    num_train = math.floor(Fraction(repr(fraction)) * Fraction(repr(whole)))
    if not num_train:
        raise _BadCombination([f"data.train_fraction={fraction} leaves none of data.num_train={whole} examples"])
    fields["num_train"] = num_train
    if passes is not None:
        fields["num_steps"] = math.floor(Fraction(repr(passes)) * num_train / Fraction(repr(batch_size)))
        if not fields["num_steps"]:
            raise _BadCombination(
                [f"data.passes={passes} over {num_train} examples fills no batch of optim.batch_size={batch_size}"]
            )
    return fields


def _resolved_text(fields: Mapping[str, Any], root: Path) -> dict[str, Any]:
    """A `task` section with its texts under their full paths, and the hashes of what they hold."""
    fields = dict(fields)
    if fields.get("text") is None:
        raise _BadCombination(["task.text is missing: a file, folder or glob of text, or 'builtin'"])
    for name, hashed in (("text", "text_sha256"), ("valid_text", "valid_sha256")):
        text = fields.get(name)
        if text is None:
            continue
        if text != corpus.BUILTIN:
            fields[name] = text = str(root / Path(text).expanduser())
        try:
            found = corpus.content_hash(text)
        except corpus.CorpusError as error:
            raise _BadCombination([f"task.{name}={error}"]) from None
        if fields.setdefault(hashed, found) != found:
            raise _BadCombination([f"task.{hashed}={fields[hashed]!r} is not the SHA-256 of {text}, which is {found}"])
    return fields


def _messages(error: ValidationError, section: str, model: type[Config]) -> list[str]:
    """One line for each of pydantic's complaints, fields under their dotted names."""
    messages = []
    for detail in error.errors(include_url=False):
        name = ".".join(part for part in (section, *map(str, detail["loc"])) if part)
        if name == section:
            message = detail["msg"].removeprefix("Value error, ")
            bare = "|".join(model.model_fields)
            prefix = f"{section}." if section else ""
            messages.append(re.sub(rf"(?<![\w.])({bare})(?==)", rf"{prefix}\1", message))
        elif detail["type"] == "missing":
            messages.append(f"{name} is missing")
        elif detail["type"] == "extra_forbidden":
            messages.append(f"{name} is not a field of this {section}")
        else:
            messages.append(f"{name}={detail['input']!r} {pydantic_problem(detail)}")
    return messages


def _failed(spec: SweepSpec, failures: Mapping[str, list[dict[str, Any]]]) -> SpecError:
    """The error that names every kind of bad combination once, most frequent first."""
    by_count = sorted(failures.items(), key=lambda item: -len(item[1]))
    total = spec.num_combinations
    problems = []
    for message, combinations in by_count[:MAX_REPORTED]:
        places = ""
        if total > 1:
            example = _described({name: value for name, value in combinations[0].items() if len(spec.axes[name]) > 1})
            places = f" ({len(combinations):,} of {total:,} trials" + (f", such as {example})" if example else ")")
        problems.append((_origin(spec, message), message + places))
    if (hidden := len(by_count) - MAX_REPORTED) > 0:
        problems.append((spec.origin("axes"), f"and {hidden:,} more kinds of bad combinations"))
    return SpecError.from_problems(problems)


def _duplicated(spec: SweepSpec, pairs: list[tuple[TrialSpec, TrialSpec]]) -> SpecError:
    """The error that names two combinations of axis values that are one config."""
    first, second = pairs[0]
    differing = [name for name in spec.axes if first.axes[name] != second.axes[name]]
    one, other = (_described({name: trial.axes[name] for name in differing}) for trial in (first, second))
    more = f" (and {len(pairs) - 1:,} more such pairs)" if len(pairs) > 1 else ""
    origin = spec.origin(*differing)
    message = f"{one} and {other} make the same trial {first.trial_id}{more}; keep one of them"
    return SpecError(origin.source, origin.line, message)


def _described(axes: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in axes.items())


def _origin(spec: SweepSpec, message: str) -> Origin:
    """Where the fields that a message names were written: an axis, the likelier slip, before a fixed value."""
    named = re.findall(r"[a-z_]+\.[a-z_0-9]+", message)
    sources = [source for name in named for source in (*_DERIVED_FROM.get(name, ()), name)]
    axes = [name for name in (*named, *sources) if name in spec.axes]
    return spec.origin(*axes, *sources)


_DERIVED_FROM = {
    "data.num_train": ("data.train_fraction",),
    "data.num_steps": ("data.train_fraction", "data.passes"),
    "model.num_layers": ("model.depth",),
    **{f"model.{name}": ("model.width",) for name in WIDTH_FIELDS},
}
"""Shorthand that a field of a config may come from."""
