"""Reads YAML with the line of every value: PyYAML's SafeLoader, with the numbers and booleans of YAML 1.2.

PyYAML follows YAML 1.1, where `1e-3` is a string, `010` is eight, `1:30` is ninety and `yes` is true. Here the core
schema of YAML 1.2 holds, duplicate keys are refused, and so is every tag beyond the core schema.

Reference: YAML 1.2.2, Section 10.3, core schema.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

MAX_VALUES = 100_000
"""Values in one document, aliases counted each time: nested aliases can stand for more than memory holds."""


class Origin(NamedTuple):
    """Where a value was written."""

    source: str  # a file as the user named it, or a command-line flag
    line: int | None  # counted from 1; None where the source has no lines

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


class SpecError(Exception):
    """A sweep that cannot be run as written: one line per problem, each with its place.

    Attributes:
      path: the file, or the flag, of the first problem.
      line: its line, None where there is none.
      message: what is wrong and what is allowed.
      problems: every problem found at once, as (origin, message).
    """

    def __init__(self, path: str | Path, line: int | None, message: str, more: tuple[tuple[Origin, str], ...] = ()):
        self.path, self.line, self.message = str(path), line, message
        self.problems = ((Origin(str(path), line), message), *more)
        super().__init__(path, line, message, more)

    @classmethod
    def from_problems(cls, problems: list[tuple[Origin, str]]) -> "SpecError":
        """One error for several problems, in the order of their lines."""
        first, *more = sorted(problems, key=lambda problem: (problem[0].line is None, problem[0].line or 0))
        return cls(first[0].source, first[0].line, first[1], tuple(more))

    def __str__(self) -> str:
        return "\n".join(f"{origin}: {message}".replace("\n", "\\n") for origin, message in self.problems)


class Located(NamedTuple):
    """A YAML value and the line it stands on; of a mapping's value, the line of its key."""

    value: Any  # None, bool, int, float, str, list[Located] or dict[str, Located]
    line: int

    def plain(self) -> Any:
        """The value without lines."""
        if isinstance(self.value, dict):
            return {key: item.plain() for key, item in self.value.items()}
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        return self.value


class _CoreLoader(yaml.SafeLoader):
    """SafeLoader that resolves plain scalars by the core schema of YAML 1.2."""

    # The class attribute of SafeLoader is shared, so that changing it in place would change YAML for all the process.
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


_TAG = "tag:yaml.org,2002:"
_CORE = {
    "null": r"~ | null | Null | NULL | ",
    "bool": r"true | True | TRUE | false | False | FALSE",
    "int": r"[-+]?[0-9]+ | 0o[0-7]+ | 0x[0-9a-fA-F]+",
    "float": r"[-+]?(\.[0-9]+ | [0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)? | [-+]?\.(inf|Inf|INF) | \.(nan|NaN|NAN)",
    "merge": r"<<",
}
_PATTERNS = {name: re.compile(rf"(?: {pattern} )\Z", re.VERBOSE) for name, pattern in _CORE.items()}
for _name, _pattern in _PATTERNS.items():
    _CoreLoader.add_implicit_resolver(_TAG + _name, _pattern, None)


def parse_yaml(text: str | bytes, source: str) -> Located:
    """Parses one YAML document.

    Args:
      text: the document; bytes are read as UTF-8, or UTF-16 with a byte order mark.
      source: how errors name the document.

    Returns:
      The document's value; of an empty document, None on line 1.

    Raises:
      SpecError: the text is not one YAML document of the core schema, or a key stands twice in a mapping.
    """
    try:
        loader = _CoreLoader(text)
        try:
            node = loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = f"{error.problem} ({error.context})" if error.context else error.problem
        raise SpecError(source, mark.line + 1 if mark else None, f"not valid YAML: {what}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = getattr(error, "reason", "it cannot be read")
        raise SpecError(source, None, f"not valid YAML: {reason}") from None
    except RecursionError:
        raise SpecError(source, None, "not valid YAML: nested too deeply") from None
    if node is None:
        return Located(None, 1)
    return _Converter(source).convert(node, node.start_mark.line + 1, ())


class _Converter:
    """Turns PyYAML's nodes into values with lines."""

    def __init__(self, source: str):
        self.source = source
        self.num_values = 0

    def convert(self, node: yaml.Node, line: int, parents: tuple[yaml.Node, ...]) -> Located:
        """One node and all below it; `parents` are the nodes around it."""
        self.num_values += 1
        if self.num_values > MAX_VALUES:
            raise SpecError(self.source, line, f"more than {MAX_VALUES:,} values, aliases counted each time")
        if node in parents:
            raise SpecError(self.source, line, "an anchor that contains itself")
        inside = (*parents, node)
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            pairs = self._pairs(node, inside)
            return Located({key: self.convert(value, at, inside) for key, (value, at) in pairs.items()}, line)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            return Located([self.convert(item, item.start_mark.line + 1, inside) for item in node.value], line)
        if isinstance(node, yaml.ScalarNode):
            return Located(self._scalar(node, line), line)
        raise SpecError(self.source, line, f"the tag {_short(node.tag)} is not supported")

    def _pairs(self, node: yaml.MappingNode, parents: tuple[yaml.Node, ...]) -> dict[str, tuple[yaml.Node, int]]:
        """Keys of a mapping with value and line; what `<<` merges in stands behind the mapping's own keys."""
        own: dict[str, tuple[yaml.Node, int]] = {}
        merged: dict[str, tuple[yaml.Node, int]] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == _TAG + "merge":
                for source_node in self._merge_sources(value_node, line, parents):
                    for key, pair in self._pairs(source_node, (*parents, source_node)).items():
                        merged.setdefault(key, pair)
                continue
            if key_node.tag != _TAG + "str":
                written = key_node.value if isinstance(key_node, yaml.ScalarNode) else "a list or mapping"
                raise SpecError(self.source, line, f"the key {written} is not a name")
            if key_node.value in own:
                first_line = own[key_node.value][1]
                raise SpecError(self.source, line, f"{key_node.value} is given twice, first on line {first_line}")
            own[key_node.value] = (value_node, line)
        return own | {key: pair for key, pair in merged.items() if key not in own}

    def _merge_sources(self, node: yaml.Node, line: int, parents: tuple[yaml.Node, ...]) -> Iterator[yaml.MappingNode]:
        for source_node in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            if not isinstance(source_node, yaml.MappingNode):
                raise SpecError(self.source, line, "<< merges a mapping or a list of mappings, nothing else")
            if source_node in parents:
                raise SpecError(self.source, line, "an anchor that contains itself")
            yield source_node

    def _scalar(self, node: yaml.ScalarNode, line: int) -> bool | int | float | str | None:
        text, kind = node.value, node.tag.removeprefix(_TAG)
        if kind == "str":
            return text
        if kind not in ("null", "bool", "int", "float"):
            raise SpecError(self.source, line, f"the tag {_short(node.tag)} is not supported")
        if not _PATTERNS[kind].match(text):
            raise SpecError(self.source, line, f"{text!r} is not of the type {_short(node.tag)}")
        if kind == "null":
            return None
        if kind == "bool":
            return text.lower() == "true"
        if kind == "float":
            # Adding zero makes -0.0 into 0.0: equal values must not differ in a trial's identity.
            return float(re.sub(r"\.(inf|nan)", r"\1", text.lower())) + 0.0
        base = {"0x": 16, "0o": 8}.get(text[:2], 10)
        try:
            return int(text if base == 10 else text[2:], base)
        except ValueError:  # Python's limit on the digits of a decimal number
            raise SpecError(self.source, line, f"a number of {len(text)} digits is too long") from None


def _short(tag: str) -> str:
    return "!!" + tag.removeprefix(_TAG) if tag.startswith(_TAG) else tag
