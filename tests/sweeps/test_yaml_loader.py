"""YAML 1.2 core values, lines, and every way a document can be refused."""

import math
from typing import Any

import pytest
import yaml

from sweeps.yaml_loader import MAX_VALUES, Located, SpecError, parse_yaml


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1e-3", 0.001),
        ("1E+2", 100.0),
        ("3.", 3.0),
        (".5", 0.5),
        ("-.inf", -math.inf),
        ("010", 10),
        ("+7", 7),
        ("0x1F", 31),
        ("0o17", 15),
        ("true", True),
        ("False", False),
        ("~", None),
        ("", None),
        # What YAML 1.1 would turn into something else is text in YAML 1.2.
        ("yes", "yes"),
        ("on", "on"),
        ("No", "No"),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("0b11", "0b11"),
        ("2026-11-30", "2026-11-30"),
        ("=", "="),
        ("'1'", "1"),
        ("!!str 5", "5"),
        ("!!float 3", 3.0),
    ],
)
def test_scalars_follow_the_core_schema(text: str, expected: Any) -> None:
    value = parse_yaml(f"a: {text}", "x.yaml").plain()["a"]
    assert value == expected
    assert type(value) is type(expected)


def test_negative_zero_is_zero() -> None:
    assert math.copysign(1, parse_yaml("-0.0", "x.yaml").value) == 1.0


def test_lines_are_those_of_keys_and_items() -> None:
    document = parse_yaml("a:\n  b: 1\n  c:\n  - 5\n  -\n    6\n", "x.yaml")
    inner = document.value["a"].value
    assert document.value["a"].line == 1
    assert inner["b"] == Located(1, 2)
    assert inner["c"].line == 3
    assert inner["c"].value == [Located(5, 4), Located(6, 6)]


def test_anchors_and_merge_keys_keep_their_lines() -> None:
    text = "base: &base {x: 1,\n  y: 2}\nother:\n  <<: *base\n  y: 3\nlast: {<<: [*base, {z: 4, y: 5}]}\n"
    document = parse_yaml(text, "x.yaml")
    assert document.value["other"].plain() == {"x": 1, "y": 3}
    assert document.value["other"].value["x"].line == 1
    assert document.value["last"].plain() == {"x": 1, "y": 2, "z": 4}


def test_other_yaml_of_this_process_is_left_alone() -> None:
    assert yaml.safe_load("yes") is True


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "x.yaml:3: a is given twice, first on line 1"),
        ("a:\n  b: 1\n  b: 1", "x.yaml:3: b is given twice, first on line 2"),
        ("\n1: a", "x.yaml:2: the key 1 is not a name"),
        ("? [a]\n: b", "x.yaml:1: the key a list or mapping is not a name"),
        ("a: &a [*a]", "x.yaml:1: an anchor that contains itself"),
        ("a: &a {<<: *a}", "x.yaml:1: an anchor that contains itself"),
        ("a: 1\n<<: 3", "x.yaml:2: << merges a mapping or a list of mappings, nothing else"),
        ("a: !!set {b}", "x.yaml:1: the tag !!set is not supported"),
        ("a: !!binary aGk=", "x.yaml:1: the tag !!binary is not supported"),
        ("a: !!python/name:os.system x", "x.yaml:1: the tag !!python/name:os.system is not supported"),
        ("a: !!int x", "x.yaml:1: 'x' is not of the type !!int"),
        ("a: !!float 1_0", "x.yaml:1: '1_0' is not of the type !!float"),
        ("a: !!bool yes", "x.yaml:1: 'yes' is not of the type !!bool"),
        ("a: " + "9" * 5000, "x.yaml:1: a number of 5000 digits is too long"),
        ("[" * 3000, "x.yaml: not valid YAML: nested too deeply"),
        (b"a: \x80", "x.yaml: not valid YAML: invalid start byte"),
    ],
)
def test_refusals_name_the_line(text: str | bytes, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_yaml(text, "x.yaml")
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "line"),
    [("a: [1\nb: 2", 2), ("a: 1\n---\nb: 2", 2), ("a: *x", 1), ("a: 'b", 1), ("a: b: c", 1), ("\tb", 1)],
)
def test_syntax_errors_name_the_line(text: str, line: int) -> None:
    with pytest.raises(SpecError, match=r"not valid YAML: \S") as caught:
        parse_yaml(text, "x.yaml")
    assert caught.value.line == line
    assert "\n" not in str(caught.value)


def test_nested_aliases_do_not_fill_the_memory() -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    with pytest.raises(SpecError, match=f"more than {MAX_VALUES:,} values"):
        parse_yaml("\n".join(lines), "x.yaml")
