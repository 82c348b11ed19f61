"""A context comes back as it went, in another process too; what cannot is told in one line, and never guessed."""

from __future__ import annotations

import argparse
import enum
import functools
import json
import math
import subprocess
import sys
import textwrap
import types
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field, make_dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from ipaddress import IPv4Network
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, HttpUrl, PrivateAttr, RootModel, SecretStr

from tpucare.adapters.state.store import SqliteStore, open_store
from tpucare.api import contexts
from tpucare.api.contexts import StoredContexts, Unserialisable, decode
from tpucare.model.errors import ConfigError

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


@dataclass
class Context:
    zone: str
    retry: int = 0
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Frozen:
    inner: Context
    when: datetime


@dataclass
class Checked:
    """Its checks have had their turn when it is restored."""

    steps: int
    doubled: int = field(init=False)

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ValueError("negative")
        self.doubled = 2 * self.steps


@dataclass
class Reduced:
    """What pickle would call for it is not called."""

    command: list[str]

    def __reduce__(self) -> Any:
        return subprocess.Popen, (self.command,)


class Model(BaseModel):
    name: str
    limits: dict[str, float] = {}


class Optimizer(BaseModel):
    lr: float = 0.1


class Adam(Optimizer):
    beta: float = 0.9


T = TypeVar("T")


class Wrapped(BaseModel, Generic[T]):
    inner: T


class Training(BaseModel):
    """Of each field the annotation, or the declaration, says less than the value."""

    model_config = ConfigDict(extra="allow", frozen=True)

    optimizer: Optimizer = Adam(beta=0.5)
    best: float = math.inf
    limit: float | None = math.inf
    shape: Any = (1, 2)
    names: Any = {1: "one", (2, 3): "two"}
    inner: Any = Wrapped[Adam](inner=Adam(beta=0.25))
    hidden: int = Field(0, exclude=True)
    aliased: int = Field(0, alias="otherName")
    checked: Annotated[int, AfterValidator(lambda number: number + 1)] = 0
    _private: Any = PrivateAttr(default=None)
    _unset: int = PrivateAttr()

    @functools.cached_property
    def computed(self) -> object:
        return object()

    def model_post_init(self, context: object) -> None:
        self._private = {"attempts": (1, 2)}


class Steps(RootModel[list[Any]]):
    pass


class Secretive(BaseModel):
    key: SecretStr = SecretStr("geheim")


class Holds(BaseModel):
    held: Any = None
    _kept: Any = PrivateAttr(default=None)


def holding(kept: object) -> Holds:
    holds = Holds()
    holds._kept = kept
    return holds


class Color(enum.Enum):
    RED = "red"


class Outer:
    @dataclass
    class Nested:
        x: int


Point = namedtuple("Point", "x y")


class Bound(str):
    """A text that knows more than it says, as a host's name does."""

    __slots__ = ("secret",)


class Plain:
    pass


def through(value: object) -> object:
    return contexts.decode(contexts.encode(value))


CHECKED = Checked(3)
CHECKED.steps = -4


@pytest.mark.parametrize(
    "value",
    [
        None,
        {"retry": 3, "nested": [1, 2.5, True, None, "ü\ud800"]},
        {"$": "not ours", 7: "seven", (1, 2): "pair"},
        Context("europe-west4-a", 2, {"training": {"start_step": 100}}),
        Context(None, 2),  # type: ignore[arg-type]
        Frozen(Context("z"), NOW),
        CHECKED,
        Reduced(["false"]),
        Model(name="m", limits={"a": 0.5}),
        Training(hidden=3, otherName=4, more=(1, Color.RED)),
        Model.model_construct(name=Context("z"), limits=None),  # type: ignore[arg-type]
        Steps([(1, Adam()), None]),
        Wrapped[Wrapped[int]](inner=Wrapped[int](inner=3)),
        Outer.Nested(4),
        Color.RED,
        Point(1, Context("z")),
        (1, [2, (3,)]),
        {1, 2},
        frozenset({"a"}),
        b"\x00\xff",
        date(2026, 11, 21),
        timedelta(days=1, microseconds=7),
        time(12, 30, tzinfo=UTC),
        Path("/data/x"),
        UUID(int=7),
        Decimal("0.10"),
        IPv4Network("10.0.0.0/8"),
        HttpUrl("https://example.org/x"),
        deque([(1, 2), Adam()], maxlen=2),
        OrderedDict([("b", 1), ("a", (2,))]),
        Counter({(1, 2): 3}),
        defaultdict(list, {1: [Adam()]}),
        types.SimpleNamespace(a=1, b=Context("z")),
        argparse.Namespace(preemptible=1, service_account=None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_context_comes_back_as_it_went(value: object) -> None:
    restored = through(value)
    assert restored == value
    assert type(restored) is type(value)


def test_a_restored_dataclass_goes_through_no_init_again() -> None:
    restored = through(CHECKED)
    assert isinstance(restored, Checked)
    assert (restored.steps, restored.doubled) == (-4, 6)


def test_a_model_comes_back_whole_and_goes_through_no_validator_again() -> None:
    model = Training(hidden=3, checked=1, more=(1, 2))
    model._private["attempts"] = (3,)
    assert model.computed is model.computed
    restored = through(model)
    assert isinstance(restored, Training)
    assert restored == model
    assert type(restored.optimizer) is Adam
    assert type(restored.inner) is Wrapped[Adam]
    assert (restored.hidden, restored.checked, restored._private) == (3, 2, {"attempts": (3,)})
    assert restored.model_fields_set == {"hidden", "checked", "more"}
    assert restored.__pydantic_extra__ == {"more": (1, 2)}
    assert not hasattr(restored, "_unset")
    assert "computed" not in vars(restored)


def test_a_deque_and_a_defaultdict_keep_what_equality_does_not_see() -> None:
    restored = through([deque([1], maxlen=2), defaultdict(Adam), defaultdict(None, {"a": 1})])
    assert isinstance(restored, list)
    assert restored[0].maxlen == 2
    assert [each.default_factory for each in restored[1:]] == [Adam, None]


def test_attributes_that_were_set_later_are_kept() -> None:
    ctx = Context("z")
    ctx.note = "added"  # type: ignore[attr-defined]
    assert through(ctx).note == "added"  # type: ignore[attr-defined]


def test_a_bound_name_comes_back_as_a_plain_text() -> None:
    ctx = Context(Bound("pod"))
    restored = through(ctx)
    assert isinstance(restored, Context)
    assert type(restored.zone) is str


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(_JSON)
def test_every_json_value_survives(value: object) -> None:
    assert through(value) == value


Local: Any = make_dataclass("Elsewhere", [("x", int)])


def _inside() -> object:
    @dataclass
    class Inside:
        x: int

    return Inside(1)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Plain(), "ctx is a Plain"),
        (Context("z", config={"model": Plain()}), "ctx.config['model'] is a Plain"),
        ([1, (2, {"a": lambda: 1})], "ctx[1][1]['a'] is a function"),
        (_inside(), "made inside a function: move it to the top of its module"),
        (Local(1), "could not be found again"),
        (Context, "is a type"),
        ({"a": Secretive()}, "ctx['a'].key is a SecretStr, and secrets are not written down"),
        (Holds(held=[Plain()]), "ctx.held[0] is a Plain"),
        (holding(Plain()), "ctx._kept is a Plain"),
        (Training(more=Plain()), "ctx.more is a Plain"),
        (Wrapped[int | None](inner=1), "with the parameter int | None, which has no name"),
        (defaultdict(lambda: 1), "a defaultdict of a function"),
    ],
    ids=[
        "object",
        "in a field",
        "in a list",
        "local class",
        "renamed class",
        "a class",
        "a secret",
        "in a model",
        "private",
        "extra",
        "parameter",
        "factory",
    ],
)
def test_what_cannot_be_stored_is_told_in_one_line(value: object, words: str, store: SqliteStore) -> None:
    with pytest.raises(ConfigError) as caught:
        StoredContexts(store).put("pod", value)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert store.context("pod") is None


def test_a_context_that_contains_itself_is_refused(store: SqliteStore) -> None:
    ctx: list[object] = []
    ctx.append(ctx)
    with pytest.raises(ConfigError, match="contains itself"):
        StoredContexts(store).put("pod", ctx)


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with open_store(tmp_path / "state", machine_id="machine", now=NOW) as opened:
        yield opened


class TestTypesThatChanged:
    def keep(self, store: SqliteStore, **changes: Any) -> StoredContexts:
        """A context as an older script wrote it."""
        written = json.loads(contexts.encode(Context("z", 2)))
        fields = {key: value for key, value in {**written["fields"], **changes}.items() if value is not ...}
        store.save_context("pod", json.dumps({**written, "fields": fields}))
        return StoredContexts(store)

    def test_a_new_field_takes_its_default(self, store: SqliteStore) -> None:
        assert self.keep(store, retry=...).get("pod") == Context("z", 0)

    def test_a_field_that_is_gone_is_left_out(self, store: SqliteStore) -> None:
        assert self.keep(store, older=1).get("pod") == Context("z", 2)

    def test_a_new_field_without_a_default_is_an_error(self, store: SqliteStore) -> None:
        with pytest.raises(ConfigError, match=r"field zone now, and no value was kept for it; .*fresh=True"):
            self.keep(store, zone=...).get("pod")

    def test_a_type_that_is_gone_is_an_error_unless_the_script_has_it(self, store: SqliteStore) -> None:
        text = contexts.encode(Context("z")).replace("tests.api.test_contexts:Context", "__main__:Context")
        store.save_context("pod", text)
        with pytest.raises(ConfigError, match="__main__:Context is not there any more"):
            StoredContexts(store).get("pod")
        assert StoredContexts(store, homes=[__name__]).get("pod") == Context("z")

    def keep_model(self, store: SqliteStore, value: BaseModel, old: str, new: str) -> object:
        store.save_context("pod", contexts.encode(value).replace(f'"{old}"', f'"{new}"'))
        return StoredContexts(store).get("pod")

    def test_a_model_takes_defaults_and_leaves_out_what_is_gone(self, store: SqliteStore) -> None:
        assert self.keep_model(store, Model(name="m", limits={"a": 1}), "limits", "bounds") == Model(name="m")
        restored = self.keep_model(store, holding(1), "_kept", "_older")
        assert isinstance(restored, Holds)
        assert restored._kept is None

    def test_a_field_of_a_model_without_a_value_is_an_error(self, store: SqliteStore) -> None:
        with pytest.raises(
            ConfigError, match=r"Model has a field name now, and no value was kept for it; .*fresh=True"
        ):
            self.keep_model(store, Model(name="m"), "name", "label")

    def test_a_model_that_is_none_any_more_is_an_error(self, store: SqliteStore) -> None:
        with pytest.raises(ConfigError, match="Plain is no model any more"):
            self.keep_model(store, Model(name="m"), "tests.api.test_contexts:Model", "tests.api.test_contexts:Plain")

    @pytest.mark.parametrize(("key", "fits"), [("name", True), ("label", False)])
    def test_models_as_they_were_written_at_first_are_read(self, store: SqliteStore, key: str, fits: bool) -> None:
        text = json.dumps({key: "m", "limits": {"a": 0.5}})
        store.save_context("pod", json.dumps({"$": "model", "type": "tests.api.test_contexts:Model", "text": text}))
        if fits:
            assert StoredContexts(store).get("pod") == Model(name="m", limits={"a": 0.5})
        else:
            with pytest.raises(ConfigError, match=r"Model has changed \(name: Field required\)"):
                StoredContexts(store).get("pod")

    @pytest.mark.parametrize("text", ["", "{", '{"$": "dataclass"}', '{"$": "nonsense"}', '{"$": [1]}'])
    def test_a_text_that_nobody_wrote_is_an_error(self, store: SqliteStore, text: str) -> None:
        store.save_context("pod", text)
        with pytest.raises(ConfigError):
            StoredContexts(store).get("pod")


def test_each_copy_is_deep() -> None:
    ctx = Context("z", config={"a": [1]})
    copied = StoredContexts(_NoShelf()).copy(ctx)
    assert isinstance(copied, Context)
    copied.config["a"].append(2)
    assert ctx.config == {"a": [1]}


class _NoShelf:
    def context(self, slot: str) -> str | None:
        return None

    def save_context(self, slot: str, text: str) -> None: ...

    def drop_context(self, slot: str) -> None: ...


SCRIPT = """
    import sys
    from dataclasses import dataclass
    from datetime import UTC, datetime
    from pathlib import Path
    from tpucare.api.contexts import StoredContexts
    from tpucare.adapters.state.store import open_store

    @dataclass
    class Mine:
        retry: int

    with open_store(Path(sys.argv[1]), machine_id="machine", now=datetime.now(UTC)) as store:
        kept = StoredContexts(store)
        ctx = kept.get("pod") or Mine(0)
        assert type(ctx) is Mine
        ctx.retry += 1
        kept.put("pod", ctx)
        print(ctx.retry)
"""


def test_types_of_a_script_are_found_again_by_its_next_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, str(script), str(tmp_path / "state")]
    said = [subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout for _ in range(2)]
    assert said == ["1\n", "2\n"]


@pytest.mark.parametrize(
    "text",
    [
        {"$": "namedtuple", "type": "subprocess:Popen", "items": [["touch", "TARGET"]]},
        {"$": "bag", "type": "subprocess:Popen", "fields": {"args": ["touch", "TARGET"]}},
        {"$": "bag", "type": "pathlib:Path", "fields": {}},
        {"$": "enum", "type": "subprocess:Popen", "name": "x"},
        {"$": "namedtuple", "type": "builtins:tuple", "items": []},
        {"$": "bag", "type": "builtins:getattr", "fields": {}},
        {"$": "defaultdict", "makes": "builtins:getattr", "items": {}},
        {"$": "defaultdict", "makes": "subprocess:Popen", "items": {}},
        {"$": "defaultdict", "makes": f"{__name__}:SqliteStore", "items": {}},
        {"$": "defaultdict", "makes": f"{__name__}:subprocess.Popen", "items": {}},
        {"$": "namedtuple", "type": f"{__name__}:contexts._Form", "items": [1, 2]},
        {"$": "enum", "type": f"{__name__}:enum.FlagBoundary", "name": "STRICT"},
    ],
    ids=lambda text: text.get("type", text.get("makes")),
)
def test_a_text_makes_nothing_but_what_is_written_down(tmp_path: Path, text: dict[str, Any]) -> None:
    """
    The text of a kept context could name any class to be called, also in a store from somewhere else. A context makes
    named tuples, namespaces, enums, dataclasses and models, under their own names and not where a module imports them.
    """
    target = tmp_path / "touched"
    with pytest.raises(Unserialisable):
        decode(json.dumps(text).replace("TARGET", str(target)))
    assert not target.exists()


@pytest.mark.parametrize("module", ["this", "ensurepip.__main__", "pytest.__main__"])
def test_a_text_imports_no_program(module: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Unserialisable, match="is not there any more"):
        decode(json.dumps({"$": "enum", "type": f"{module}:Any", "name": "x"}))
    assert module not in sys.modules
    assert capfd.readouterr() == ("", "")


def test_a_class_that_moved_and_is_imported_where_it_was_is_found(store: SqliteStore) -> None:
    text = contexts.encode(Context("z")).replace(f"{__name__}:Context", "__main__:Context")
    main = types.ModuleType("script_that_imports_it")
    main.Context = Context  # type: ignore[attr-defined]
    sys.modules[main.__name__] = main
    try:
        store.save_context("pod", text)
        assert StoredContexts(store, homes=[main.__name__]).get("pod") == Context("z")
    finally:
        del sys.modules[main.__name__]
