"""Text becomes plain values that know their line; no text becomes a traceback, an endless loop or a large structure."""

from __future__ import annotations

import time

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tpucare.fleetfile import yaml_document
from tpucare.fleetfile.yaml_document import DEPTH_LIMIT, Unreadable, WrittenFloat, WrittenInt, read
from tpucare.model.errors import Problem

LOADERS = [yaml.SafeLoader, yaml.CSafeLoader] if yaml.__with_libyaml__ else [yaml.SafeLoader]


@pytest.fixture(params=LOADERS)
def loader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine may or may not have libyaml; both readers must hold."""
    monkeypatch.setattr(yaml_document, "_LOADER", request.param)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("on: yes", {"on": "yes"}),
        ("a: true\nb: FALSE", {"a": True, "b": False}),
        ("a: ~\nb:\nc: null", {"a": None, "b": None, "c": None}),
        ("a: 2024-01-01", {"a": "2024-01-01"}),
        ("a: 1:30", {"a": "1:30"}),
        ("a: 0x1f\nb: .inf", {"a": "0x1f", "b": ".inf"}),
        ("1: a\nnull: b\ntrue: c", {"1": "a", "null": "b", "true": "c"}),
        ("a: '1'\nb: \"true\"\nc: !!str 1", {"a": "1", "b": "true", "c": "1"}),
        ("a: |\n  x\n  y\n", {"a": "x\ny\n"}),
        ("a: &x [1, 2]\nb: *x", {"a": [1, 2], "b": [1, 2]}),
        ("me:ssh-ed25519 AAAA", "me:ssh-ed25519 AAAA"),
        ("\ufeffa: 1", {"a": 1}),
        ("a: " + "9" * 5000, {"a": "9" * 5000}),
    ],
)
def test_values_follow_the_core_schema(loader: None, text: str, value: object) -> None:
    document = read(text)
    assert document.value == value
    assert not document.problems


@pytest.mark.parametrize("written", ["010", "+1", "1e-4", "1.", ".5", "-0", "1e999"])
def test_a_number_remembers_how_it_was_written(written: str) -> None:
    document = read(f"a: {written}")
    assert isinstance(document.value, dict)
    number = document.value["a"]
    assert isinstance(number, WrittenInt | WrittenFloat)
    assert number.text == written


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("", 1, "is empty"),
        ("# only a comment", 1, "is empty"),
        ("a: 1\nb: \x00", 2, "U+0000"),
        ("a: \ud800", 1, "U+D800"),
        ("a:\n\t- b", 2, "spaces"),
        ("a: 1\nrun: {slot}.yaml\n", 2, "quote"),
        ("a: b: c", 1, "is not YAML"),
        ("a: *nobody", 1, "complete anchor"),
        ("a: &a [1, *a]", 1, "complete anchor"),
        ("a: 1\n---\nb: 2", 2, "more than one document"),
        ("[" * 100_000, 1, "nested deeper"),
        ("? " * 100_000, 1, "nested deeper"),
        ("- " * 100_000, 1, "nested deeper"),
        ("-\n" * 60_000, 20_000, "more than 20,000 values"),
        ("#" * 300_000, 1, "larger than 256 KB"),
        ("#" + "é" * 200_000, 1, "larger than 256 KB"),
        ("%YAML 2.0\n---\na: 1", 1, "is not YAML"),
    ],
)
def test_what_cannot_be_read_is_said_with_its_line(loader: None, text: str, line: int, says: str) -> None:
    started = time.process_time()
    with pytest.raises(Unreadable) as caught:
        read(text)
    assert caught.value.problem.line == line
    assert says in caught.value.problem.text
    assert time.process_time() - started < 5


def test_aliases_that_expand_without_bound_are_refused(loader: None) -> None:
    laughs = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    laughs += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
    with pytest.raises(Unreadable, match="aliases expanded"):
        read("\n".join(laughs))
    chain = ["a0: &a0 [x]"] + [f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, DEPTH_LIMIT + 2)]
    with pytest.raises(Unreadable, match="nested deeper"):
        read("\n".join(chain))


def test_problems_that_do_not_stop_the_reading_are_collected(loader: None) -> None:
    document = read("a:\n  b: 1\n  b: 2\n? [x]\n: 3\n<<: {c: 1}\nd: !!python/object:os.system x\n")
    assert document.value == {"a": {"b": 1}, "d": "x"}
    assert document.problems == (
        Problem(3, "a.b", "is a duplicate, first on line 2"),
        Problem(4, "", "a key must be a word"),
        Problem(6, "", "merge keys (<<) are not supported; write the keys out"),
        Problem(7, "d", "the tag tag:yaml.org,2002:python/object:os.system is not supported; write plain values"),
    )


@pytest.mark.parametrize(
    ("path", "line", "key"),
    [
        ((), 1, ""),
        (("a",), 1, "a"),
        (("a", "b", 1), 4, "a.b[1]"),
        (("a", "b", 0, "zone"), 3, "a.b[0]"),  # a name that stands for a mapping
        (("a", 0, "b"), 2, "a.b"),  # a mapping that stands for a list of one
        (("a", "missing"), 1, "a.missing"),
        (("a", "x.y"), 5, "a[x.y]"),
        (("nowhere", "deep"), 1, "nowhere"),
    ],
)
def test_a_problem_finds_its_line_and_name(path: tuple[str | int, ...], line: int, key: str) -> None:
    document = read("a:\n  b:\n    - c\n    - d\n  x.y: 1\n")
    assert document.problem(path, "?") == Problem(line, key, "?")
    assert Problem(3, "a.b", "is wrong").render("f.yaml") == "f.yaml:3: a.b: is wrong"
    assert Problem(3, "", "is wrong").render("f.yaml") == "f.yaml:3: is wrong"
    assert Problem(0, "a.b", "is wrong").render("f.yaml") == "f.yaml: a.b: is wrong"


def test_an_aliased_value_has_the_line_of_its_alias_and_its_content_that_of_the_anchor(loader: None) -> None:
    document = read("a: &x [1]\nb:\n  - 2\n  - *x\n")
    assert [document.problem(path, "?").line for path in [("a",), ("b", 1), ("b", 1, 0)]] == [1, 4, 1]


YAML_PIECES = st.sampled_from(
    [
        *("a", "b: ", "- ", "? ", ": ", "\n", "\n  ", "\t", "[", "]", "{", "}", ",", "&x ", "*x", "!!str ", "!t ", "'"),
        *('"', "|\n", ">", "#", "<<: ", "---\n", "...\n", "%YAML 1.1\n", "\\", "1", "1e3", "~", "on", "\x00", "é"),
        *("\ud800", "\r", "! "),
    ]
)


@settings(max_examples=400)
@given(st.text(max_size=60) | st.lists(YAML_PIECES, max_size=40).map("".join))
def test_any_text_is_read_or_refused(text: str) -> None:
    for reader in LOADERS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(yaml_document, "_LOADER", reader)
            try:
                document = read(text)
            except Unreadable as refused:
                assert refused.problem.line >= 1  # noqa: PT017 - either outcome is right
                assert refused.problem.text.isprintable()  # noqa: PT017
            else:
                assert all(problem.text.isprintable() for problem in document.problems)
