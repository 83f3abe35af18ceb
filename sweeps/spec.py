"""A sweep file: reads it, checks every name and value, and says where each one stands.

`load_sweep` finds what is wrong with single fields; what is wrong with a combination of them, `expand` finds.
"""

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError

from hyla_core.config import Cadence, Config, Seed, TrainConfig
from sweeps.yaml_loader import Located, Origin, SpecError, parse_yaml

__all__ = ["Origin", "Resources", "RunConfig", "SpecError", "SweepSpec", "default_tiny", "load_sweep"]


class Resources(Config):
    """What one pack occupies while it trains."""

    cpu: NonNegativeFloat = 1.0
    gpu: NonNegativeFloat = 0.0
    tpu: NonNegativeInt = 0  # whole chips


class RunConfig(Cadence):
    """How a sweep runs: never part of a trial's identity."""

    resources: Resources = Resources()
    max_pack_size: PositiveInt | None = None  # None: chosen by the device
    model_parallel: PositiveInt | None = None  # devices that share one model; None: as few as its state needs
    keep_checkpoints: bool = False  # keep what finished trials have learnt, their last two checkpoints


class _ModelShorthand(Config):
    """Spellings of `model` that only a sweep knows; `expand` resolves them."""

    width: PositiveInt = 1  # multiplies emb_dim, num_heads, qk_dim, v_dim and mlp_dim
    depth: PositiveInt  # num_layers


class _DataShorthand(Config):
    """Spellings of `data` that only a sweep knows; `expand` resolves them."""

    train_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0  # of num_train, counted from the first example
    passes: PositiveFloat  # over the training set, instead of num_steps


class _SeedShorthand(Config):
    """The spelling of all of `seeds` at once; `expand` resolves it."""

    seed: Seed


class _SweepName(Config):
    """A name that can also name a file."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]


SEEDS = ("seeds.split", "seeds.data", "seeds.init")
SEED_AXES = ("seed", *SEEDS)
"""Axes that a point is averaged over."""

ALTERNATIVES = {
    "data.passes": "data.num_steps",
    "data.num_steps": "data.passes",
    "model.depth": "model.num_layers",
    "model.num_layers": "model.depth",
}
"""Two spellings of one field: exactly one of them is given."""

DERIVED = ("model.max_distance",)
"""Required by TrainConfig, but filled in by `expand` where a sweep leaves it out."""


class SweepField(NamedTuple):
    """One field that a sweep may set."""

    models: tuple[type[Config], ...]  # more than one where a section is a union, such as the tasks
    name: str
    kind: type  # bool, int, float or str
    nullable: bool

    def problem(self, value: Any) -> str | None:
        """Why `value` is not allowed here, worded to follow `field=value `; None if it is."""
        if value is None and self.nullable:
            return None
        # Pydantic would take '16' and true for numbers; in a YAML file they are slips.
        fits = {
            bool: isinstance(value, bool),
            int: isinstance(value, int | float) and not isinstance(value, bool),
            float: isinstance(value, int | float) and not isinstance(value, bool),
            str: isinstance(value, str),
        }[self.kind]
        if not fits:
            allowed = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[self.kind]
            return f"is not {allowed}{' or null' if self.nullable else ''}"
        allowed_values = [choice for model in self.models for choice in choices(model, self.name)]
        if allowed_values:
            return None if value in allowed_values else f"is unknown; choose one of {allowed_values}"
        problems = [problem for model in self.models if (problem := self._refusal(model, value)) is not None]
        return problems[0] if len(problems) == len(self.models) else None

    def _refusal(self, model: type[Config], value: Any) -> str | None:
        try:
            model.model_validate({self.name: value})
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                # Other fields are missing from this one-field mapping; only what concerns the field itself counts.
                if detail["loc"] == (self.name,):
                    return pydantic_problem(detail)
        return None


def pydantic_problem(detail: Any) -> str:
    """One of pydantic's error details, worded to follow `field=value `."""
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "value_error":
        return message if message.startswith("is ") else f"is {message}"
    if detail["type"] in ("int_from_float", "int_type"):
        return "is not a whole number"
    message = message.replace("Input should be ", "must be ").replace("String should ", "must ")
    return f"is not allowed: it {message}"


def choices(model: type[Config], name: str) -> list[Any]:
    """The values that a field may take where they are listed one by one, else none."""
    annotation = model.model_fields[name].annotation if name in model.model_fields else None
    return list(get_args(annotation)) if get_origin(annotation) is Literal else []


def _kind(annotation: Any) -> tuple[type, bool]:
    """The scalar type behind an annotation, and whether null is allowed too."""
    origin = get_origin(annotation)
    if origin is Literal:
        return type(get_args(annotation)[0]), False
    if origin is Annotated:
        return _kind(get_args(annotation)[0])
    if origin in (Union, UnionType):
        kinds = [_kind(part) for part in get_args(annotation) if part is not type(None)]
        return kinds[0][0], type(None) in get_args(annotation)
    return annotation, False


def _models(annotation: Any) -> tuple[type[Config], ...]:
    """The configs that an annotation allows: one, several in a union, or none for a scalar."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return (annotation,)
    return tuple(model for part in get_args(annotation) for model in _models(part))


def _fields(prefix: str, *models: type[Config]) -> dict[str, SweepField]:
    fields: dict[str, SweepField] = {}
    for model in models:
        for name, info in model.model_fields.items():
            dotted = prefix + name
            if nested := _models(info.annotation):
                fields |= _fields(dotted + ".", *nested)
            elif dotted in fields:
                fields[dotted] = fields[dotted]._replace(models=(*fields[dotted].models, model))
            else:
                fields[dotted] = SweepField((model,), name, *_kind(info.annotation))
    return fields


CONFIG_FIELDS = _fields("", TrainConfig)
FIELDS = (
    CONFIG_FIELDS | _fields("model.", _ModelShorthand) | _fields("data.", _DataShorthand) | _fields("", _SeedShorthand)
)
"""Every field that a sweep may set or sweep over, by dotted name."""

RUN_FIELDS = _fields("run.", RunConfig)
NAME_FIELD = _fields("", _SweepName)["name"]
TOP_LEVEL = ("name", *TrainConfig.model_fields, "seed", "axes", "select_over", "run", "tiny")
SECTION_MODELS = {name: _models(info.annotation) for name, info in TrainConfig.model_fields.items()}
REQUIRED = tuple(
    f"{section}.{name}"
    for section, models in SECTION_MODELS.items()
    for name, info in models[0].model_fields.items()
    # Of several tasks, each may need fields of its own; which one it is, the trials know.
    if info.is_required() and all(name in model.model_fields for model in models) and f"{section}.{name}" not in DERIVED
)


def _prefixes(names: Iterable[str]) -> set[str]:
    return {name[:at] for name in names for at in range(len(name)) if name[at] == "."}


SECTIONS = _prefixes(FIELDS) | _prefixes(RUN_FIELDS)
NESTED = SECTIONS | {"axes"} | {f"axes.{section}" for section in _prefixes(FIELDS)}


class Axis(NamedTuple):
    """The values of a swept field as written, with the place of each."""

    values: list[Any]
    origin: Origin
    value_origins: list[Origin]


@dataclass(frozen=True)
class SweepSpec:
    """One sweep, every name and single value checked; `expand` turns it into trials."""

    name: str
    settings: dict[str, Any]  # base settings as written, nested by section; fields under `axes` are not among them
    axes: dict[str, list[Any]]  # dotted name → values as written, in the order of the file
    select_over: tuple[str, ...]  # axes among whose values the best is chosen
    run: RunConfig
    path: Path
    tiny: bool
    origins: dict[str, Origin]  # dotted name of a setting, `axes.NAME`, section → where it was written

    @property
    def num_combinations(self) -> int:
        """Trials of the product of all axes."""
        total = 1
        for values in self.axes.values():
            total *= len(values)
        return total

    @property
    def cell_axes(self) -> tuple[str, ...]:
        """The scaling axes: neither selected over nor seeds."""
        return tuple(axis for axis in self.axes if axis not in self.select_over and axis not in SEED_AXES)

    @cached_property
    def flat_settings(self) -> dict[str, Any]:
        """Base settings by dotted name."""
        flat: dict[str, Any] = {}
        for section, value in self.settings.items():
            if isinstance(value, dict):
                flat |= {f"{section}.{name}": item for name, item in value.items()}
            else:
                flat[section] = value
        return flat

    def origin(self, *names: str) -> Origin:
        """Where the first of these names was written, as an axis or else as a setting; else the file's first line."""
        for name in names:
            for key in (f"axes.{name}", name):
                if key in self.origins:
                    return self.origins[key]
        return Origin(str(self.path), 1)


def load_sweep(path: str | Path, *, tiny: bool = False, overrides: Sequence[str] = ()) -> SweepSpec:
    """Reads and checks a sweep file.

    Later layers win over earlier ones: the file, its `tiny` section, the overrides in order. A plain value for a field
    that is an axis leaves the axis in place, with that one value; an axis for a field that has a plain value replaces
    it. Of two spellings of one field (`data.passes` and `data.num_steps`) the later layer's stays.

    Args:
      path: the YAML file.
      tiny: apply what the file's `tiny` section changes, or `default_tiny` where there is none.
      overrides: settings written `dotted.name=VALUE`, VALUE in YAML, such as `axes.optim.peak_lr=[1e-3]`.

    Raises:
      SpecError: with every problem found, each with its line.
    """
    path = Path(path)
    try:
        text = path.read_bytes()
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else (error.strerror or "").lower()
        raise SpecError(path, None, f"cannot be read: {reason}") from None
    document = parse_yaml(text, str(path))
    if not isinstance(document.value, dict):
        what = "is empty" if document.value is None else "is not a mapping"
        raise SpecError(path, document.line, f"a sweep file {what}; allowed are {_listed(TOP_LEVEL)}")

    draft = _Draft(path, tiny)
    tiny_section = document.value.pop("tiny", None)
    draft.apply(document, str(path), first=True)
    draft.raise_problems()
    # The section is checked whether it is used or not: a slip in it should not wait for the next dry run.
    with_tiny = draft.copy()
    if tiny_section is not None:
        with_tiny.apply_tiny(tiny_section)
        with_tiny.raise_problems()
    if tiny and tiny_section is None:
        for name, value in default_tiny(draft.finish()).items():
            with_tiny.apply(Located({name: _located(value)}, 1), "the defaults of --tiny")
    if tiny:
        draft = with_tiny
    for text_override in overrides:
        draft.apply_override(text_override)
        draft.raise_problems()
    return draft.finish()


def _located(value: Any) -> Located:
    return Located([Located(item, 1) for item in value] if isinstance(value, list) else value, 1)


def _listed(names: Iterable[str]) -> str:
    return "[" + ", ".join(names) + "]"


class _Draft:
    """A sweep while its layers are applied; collects every problem instead of stopping at the first."""

    def __init__(self, path: Path, tiny: bool):
        self.path, self.tiny = path, tiny
        self.top: dict[str, tuple[Any, Origin]] = {}  # name, select_over
        self.base: dict[str, tuple[Any, Origin]] = {}
        self.axes: dict[str, Axis] = {}
        self.run: dict[str, tuple[Any, Origin]] = {}
        self.sections: dict[str, Origin] = {}
        self.problems: list[tuple[Origin, str]] = []

    def copy(self) -> "_Draft":
        """An independent draft with the same content."""
        copy = _Draft(self.path, self.tiny)
        for field in ("top", "base", "axes", "run", "sections"):
            setattr(copy, field, dict(getattr(self, field)))
        copy.problems = list(self.problems)
        return copy

    def raise_problems(self) -> None:
        if self.problems:
            raise SpecError.from_problems(self.problems)

    def apply_tiny(self, section: Located) -> None:
        origin = Origin(str(self.path), section.line)
        if not isinstance(section.value, dict) or not section.value:
            self.problems.append(
                (origin, "tiny must be a mapping of what --tiny changes; leave it out for the built-in changes")
            )
            return
        self.apply(section, str(self.path), within="tiny.")

    def apply_override(self, text: str) -> None:
        name, equals, value = text.partition("=")
        source = f"--set {text}"
        if not equals or not name.strip():
            self.problems.append((Origin(source, None), "must be written NAME=VALUE, such as model.emb_dim=64"))
            return
        try:
            parsed = parse_yaml(value, source)
        except SpecError as error:
            self.problems.append((Origin(source, None), error.message))
            return
        self.apply(Located({name.strip(): parsed}, parsed.line), source)

    def apply(self, tree: Located, source: str, within: str = "", first: bool = False) -> None:
        """Applies one layer. `within` is put before names in messages; the `first` layer has nothing to replace."""
        is_file = source == str(self.path)
        base: dict[str, tuple[Any, Origin]] = {}
        axes: dict[str, Axis] = {}
        seen: dict[str, Origin] = {}
        for dotted, item in self._leaves(tree, source if is_file else None, keep_sections=not within and is_file):
            origin = Origin(source, item.line if is_file else None)
            shown = within + dotted
            if dotted in seen:
                self.problems.append((origin, f"{shown} is given twice, first at {seen[dotted]}"))
                continue
            seen[dotted] = origin
            if dotted == "name":
                self._take(self.top, shown, dotted, NAME_FIELD, item, origin)
            elif dotted == "select_over":
                self.top["select_over"] = (item, origin)
            elif dotted in RUN_FIELDS:
                self._take(self.run, shown, dotted, RUN_FIELDS[dotted], item, origin)
            elif dotted in FIELDS:
                self._take(base, shown, dotted, FIELDS[dotted], item, origin)
            elif dotted.startswith("axes.") and dotted.removeprefix("axes.") in FIELDS:
                self._take_axis(axes, shown, dotted.removeprefix("axes."), item, origin)
            elif dotted in NESTED:
                if item.value is not None and item.value != {}:
                    self.problems.append((origin, f"{shown} must be a mapping of its fields, not {_shown(item)}"))
            else:
                self.problems.append((origin, self._unknown(dotted, within)))
        self._merge(base, axes, first)

    def _leaves(
        self, tree: Located, source: str | None, keep_sections: bool, prefix: str = ""
    ) -> Iterator[tuple[str, Located]]:
        """The layer's settings by dotted name: mappings are entered as far as they are sections."""
        for key, item in tree.value.items():
            dotted = prefix + key
            if dotted in NESTED and keep_sections and source is not None:
                self.sections.setdefault(dotted, Origin(source, item.line))
            if dotted in NESTED and isinstance(item.value, dict) and item.value:
                yield from self._leaves(item, source, keep_sections, dotted + ".")
            else:
                yield dotted, item

    def _take(
        self,
        into: dict[str, tuple[Any, Origin]],
        shown: str,
        dotted: str,
        field: SweepField,
        item: Located,
        origin: Origin,
    ) -> None:
        if isinstance(item.value, list) and dotted in FIELDS:
            how = f"to sweep over it, write it under axes: {dotted}: {_shown(item)}"
            self.problems.append((origin, f"{shown} takes one value; {how}"))
        elif isinstance(item.value, list | dict):
            what = "a list" if isinstance(item.value, list) else "a mapping"
            self.problems.append((origin, f"{shown} takes one value, not {what}"))
        elif problem := field.problem(item.value):
            self.problems.append((origin, f"{shown}={_shown(item)} {problem}"))
        else:
            into[dotted] = (item.value, origin)

    def _take_axis(self, into: dict[str, Axis], shown: str, dotted: str, item: Located, origin: Origin) -> None:
        if not isinstance(item.value, list):
            self.problems.append((origin, f"{shown} must be a list of values, not {_shown(item)}"))
            return
        if not item.value:
            self.problems.append((origin, f"{shown} is an empty list; an axis has at least one value"))
            return
        values: list[Any] = []
        origins: list[Origin] = []
        for entry in item.value:
            place = origin._replace(line=entry.line) if origin.line is not None else origin
            if isinstance(entry.value, list | dict):
                self.problems.append((place, f"{shown} holds {_shown(entry)}; each value must be a single one"))
            elif problem := FIELDS[dotted].problem(entry.value):
                self.problems.append((place, f"{shown}: {dotted}={_shown(entry)} {problem}"))
            elif entry.value in values:  # the kind has been checked, so that equality here is of numbers or of texts
                self.problems.append((place, f"{shown} has the value {_shown(entry)} twice"))
            else:
                values.append(entry.value)
                origins.append(place)
        into[dotted] = Axis(values, origin, origins)

    def _merge(self, base: dict[str, tuple[Any, Origin]], axes: dict[str, Axis], first: bool) -> None:
        """Puts a layer's settings over those of the layers before it."""
        given = {name: origin for name, (_, origin) in base.items()} | {
            name: axis.origin for name, axis in axes.items()
        }
        for name, axis in axes.items():
            if name in base:
                other = base[name][1]
                self.problems.append((axis.origin, f"{name} is both an axis and a fixed value ({other}); keep one"))
        for name, origin in given.items():
            other_name = ALTERNATIVES.get(name)
            if other_name in given and name < other_name:
                other = given[other_name]
                self.problems.append(
                    (max(origin, other), f"{name} and {other_name} set the same thing; keep one of them")
                )
            elif other_name is not None and other_name not in given and not first:
                self.base.pop(other_name, None)
                self.axes.pop(other_name, None)
        for name, (value, origin) in base.items():
            if name in self.axes:
                self.axes[name] = Axis([value], origin, [origin])
            else:
                self.base[name] = (value, origin)
        for name, axis in axes.items():
            self.base.pop(name, None)
            self.axes[name] = axis

    def _unknown(self, dotted: str, within: str) -> str:
        """Says that a name does not exist, which one may have been meant, and which ones there are."""
        shown = within + dotted
        is_axis = dotted.startswith("axes.")
        name = dotted.removeprefix("axes.")
        if dotted.split(".")[0] == "tiny":
            return f"{shown}: tiny is a section at the top level of the file, and cannot be set here"
        if is_axis and name.split(".")[0] == "run":
            return f"{shown}: what stands under run changes no result, so it cannot be an axis"
        names = [*FIELDS] if is_axis else [*FIELDS, *RUN_FIELDS]
        for field in names:
            if name.startswith(field + "."):
                return f"{shown} is unknown: {field} takes one value"
        section = name.rpartition(".")[0]
        while section and section not in SECTIONS:
            section = section.rpartition(".")[0]
        if section:
            inside = [other.removeprefix(section + ".") for other in names if other.startswith(section + ".")]
            siblings = list(dict.fromkeys(other.split(".")[0] for other in inside))
        else:
            siblings = [*TrainConfig.model_fields, "seed"] if is_axis else list(TOP_LEVEL)
        leaf = name.removeprefix(section + ".").split(".")[0]
        close = (
            difflib.get_close_matches(leaf, siblings, 1, 0.7)
            or [other for other in names if other.rpartition(".")[2] == name.rpartition(".")[2]]
            or difflib.get_close_matches(name, names, 1, 0.8)
        )
        hint = f"; did you mean {close[0]}?" if close else "."
        return f"{shown} is unknown{hint} Allowed: {_listed(siblings)}"

    def finish(self) -> SweepSpec:
        """The checked spec."""
        self._check_required()
        select_over = self._select_over()
        self.raise_problems()
        settings: dict[str, Any] = {}
        for dotted, (value, _) in self.base.items():
            section, _, name = dotted.rpartition(".")
            (settings.setdefault(section, {}) if section else settings)[name] = value
        run: dict[str, Any] = {}
        for dotted, (value, _) in self.run.items():
            *sections, name = dotted.split(".")[1:]
            inner = run
            for section in sections:
                inner = inner.setdefault(section, {})
            inner[name] = value
        origins = dict(self.sections)
        origins |= {name: origin for name, (_, origin) in (self.base | self.run | self.top).items()}
        origins |= {f"axes.{name}": axis.origin for name, axis in self.axes.items()}
        return SweepSpec(
            name=self.top["name"][0],
            settings=settings,
            axes={name: axis.values for name, axis in self.axes.items()},
            select_over=select_over,
            run=RunConfig.model_validate(run),
            path=self.path,
            tiny=self.tiny,
            origins=origins,
        )

    def _check_required(self) -> None:
        start = Origin(str(self.path), 1)
        given = self.base.keys() | self.axes.keys()
        if "name" not in self.top and not any(message.startswith("name") for _, message in self.problems):
            self.problems.append((start, "name is missing: what the sweep is called in the store and in figures"))
        missing: dict[str, list[str]] = {}
        for dotted in REQUIRED:
            if dotted in SEEDS or dotted in given or ALTERNATIVES.get(dotted) in given:
                continue
            section = dotted.partition(".")[0]
            alternative = ALTERNATIVES.get(dotted, "").partition(".")[2]
            missing.setdefault(section, []).append(f"{dotted} (or {alternative})" if alternative else dotted)
        for section, names in missing.items():
            verb = "is" if len(names) == 1 else "are"
            self.problems.append((self._place(section), f"{', '.join(names)} {verb} missing"))
        apart = [seed for seed in SEEDS if seed in given]
        if "seed" not in given and len(apart) < len(SEEDS):
            absent = [seed for seed in SEEDS if seed not in given] if apart else ["seed"]
            self.problems.append(
                (
                    self._place("seeds") if apart else start,
                    f"{', '.join(absent)} missing: give an axis seed, or seed: 0",
                )
            )
        elif "seed" in given and len(apart) == len(SEEDS):
            place = self.axes["seed"].origin if "seed" in self.axes else self.base["seed"][1]
            self.problems.append((place, f"seed has no effect, since {_listed(SEEDS)} are all given; leave it out"))

    def _place(self, section: str) -> Origin:
        """A section's line; where it is only spelled in dotted names, that of the first of them."""
        if section in self.sections:
            return self.sections[section]
        for name, (_, origin) in self.base.items():
            if name.startswith(section + "."):
                return origin
        return Origin(str(self.path), 1)

    def _select_over(self) -> tuple[str, ...]:
        if "select_over" not in self.top:
            return ()
        item, origin = self.top["select_over"]
        if not isinstance(item.value, list):
            self.problems.append((origin, f"select_over must be a list of axes, not {_shown(item)}"))
            return ()
        chosen: list[str] = []
        for entry in item.value:
            place = origin._replace(line=entry.line) if origin.line is not None else origin
            name = entry.value
            if not isinstance(name, str):
                self.problems.append((place, f"select_over holds {_shown(entry)}; it must name axes"))
            elif name in SEED_AXES:
                self.problems.append((place, f"select_over: {name} is averaged over, never selected; leave it out"))
            elif name not in self.axes:
                close = difflib.get_close_matches(name, self.axes, 1, 0.7)
                hint = f"; did you mean {close[0]}?" if close else "."
                allowed = [axis for axis in self.axes if axis not in SEED_AXES]
                self.problems.append((place, f"select_over: {name} is not an axis{hint} Allowed: {_listed(allowed)}"))
            elif name in chosen:
                self.problems.append((place, f"select_over names {name} twice"))
            else:
                chosen.append(name)
        return tuple(chosen)


def _shown(item: Located) -> str:
    """A value on one line and not too long, as it could be written in YAML."""
    text = _yaml_text(item.plain())
    return text if len(text) <= 80 else text[:77] + "..."


def _yaml_text(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_yaml_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return _listed(map(_yaml_text, value))
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value)


_TINY_SIZES: dict[str, list[Any]] = {
    "task.num_features": [2, 3],
    "task.permute_features": [False],
    "task.num_variables": [3, 4],
    "task.num_terms": [2, 1],
    "task.num_context": [15, 31],
    "task.vocab_size": [512, 1024],
    "task.seq_len": [32, 64],
    "data.num_train": [12_800, 6_400],
    "data.train_fraction": [1.0, 0.5],
    "data.passes": [1, 2],
    "data.num_steps": [200, 100],
    "data.num_valid": [1024, 512],
    "data.num_ood": [1024, 512],
    "data.num_test": [1024, 512],
    "model.emb_dim": [32, 64],
    "model.num_heads": [4, 2],
    "model.num_layers": [1, 2],
    "model.qk_dim": [32, 64],
    "model.v_dim": [32, 64],
    "model.mlp_dim": [64, 128],
    "model.width": [1, 2],
    "model.depth": [1, 2],
    "optim.batch_size": [64, 32],
    "optim.warmup_steps": [10, 5],
}

_TINY_TEXT = {
    # Needs no download, and is that small.
    "task.text": "builtin",
    "task.valid_text": None,
    "task.valid_fraction": 0.2,
    "data.num_train": 4000,
    "data.num_valid": 100,
}


def default_tiny(spec: SweepSpec) -> dict[str, Any]:
    """What --tiny changes where a file has no `tiny` section, by dotted name: sizes that train in seconds on a CPU.

    Every axis stays an axis: sizes take small values, at most two; other numbers keep their first two values and names
    all of theirs; an axis of `select_over` keeps one value.
    """
    changes: dict[str, Any] = {
        name: values[0]
        for name, values in _TINY_SIZES.items()
        # A sweep that evaluates nothing held out goes on doing so.
        if name in spec.flat_settings
        and not (name in ("data.num_ood", "data.num_test") and spec.flat_settings[name] == 0)
    }
    if spec.flat_settings.get("task.name") == "language":
        changes |= _TINY_TEXT
    for name, written in spec.axes.items():
        values = _TINY_SIZES.get(name, written)
        if name in spec.select_over:
            values = values[:1]
        elif not isinstance(values[0], str):
            values = values[:2]
        changes[f"axes.{name}"] = values[: len(written)]
    return changes | {"run.resources.cpu": 1, "run.resources.gpu": 0}
