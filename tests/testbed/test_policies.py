"""What a fresh project, an organisation and an image do to a first day: options of a world, in virtual time."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.kits.harness import Daemon
from tests.testbed.mutations import Mutation
from tests.testbed.test_world import EVERYWHERE, PARENT, START, ZONE, at, calm, name, refusal, spec
from tpucare.adapters.google.classify import Where, classify
from tpucare.model.errors import CloudError, NeedsPerson, QuotaExceeded, RateLimited
from tpucare.testbed.emulator.world.config import WorldConfig
from tpucare.testbed.emulator.world.machine_effects import AuthorizeKeys, Boot, MachineEffect
from tpucare.testbed.emulator.world.records import NetworkConfig
from tpucare.testbed.emulator.world.world import World
from tpucare.testbed.simulation.faults import FAULTS, Span
from tpucare.testbed.simulation.scenario import Strike

EXTERNAL = NetworkConfig(enable_external_ips=True)
SWITCHED_OFF = {"ssh-keys": "ubuntu:ssh-ed25519 AAAA", "enable-oslogin": "FALSE"}


def reaction(world: World, node: str) -> CloudError | None:
    """What tpucare makes of the end of that node's create, if it failed."""
    ended = [record for record in world.audit if record["kind"] == "operation" and record["target"].endswith(node)]
    code, message = ended[0].get("code", 0), ended[0].get("message", "")
    return classify(code, message, Where.OPERATION) if code else None


def made(world: World, node: str, **changes: Any) -> CloudError | None:
    now = world.now
    world.api.create_node(PARENT, node, spec(**changes), now)
    world.advance(now + timedelta(hours=1))
    return reaction(world, node)


def boots(world: World) -> list[MachineEffect]:
    return [effect for effect in world.take_effects() if isinstance(effect, Boot | AuthorizeKeys)]


# --- the project and its organisation ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("why", "words"),
    [
        ("api-disabled", "gcloud services enable"),
        ("no-quota-project", "764086051850"),
        ("billing-disabled", "billing"),
        ("narrow-scopes", "insufficient authentication scopes"),
    ],
)
def test_a_project_refuses_every_call(why: str, words: str) -> None:
    world = calm(project={"refuses": why})
    for said in (
        refusal(world.api.list_nodes, EVERYWHERE, 0, "", START),
        refusal(world.api.create_node, PARENT, "a", spec(), START),
    ):
        error = classify(said.code, said.message, Where.CREATE)
        assert isinstance(error, NeedsPerson)
        assert words in str(error)


def test_a_project_without_a_default_network() -> None:
    world = calm(project={"networks": ["training"]})
    said = refusal(world.api.create_node, PARENT, "a", spec(), START)
    assert (said.code, "network" in said.message) == (3, True)
    assert isinstance(classify(said.code, said.message, Where.CREATE), NeedsPerson)
    for number, network in enumerate(("training", "projects/p/global/networks/training")):
        world.api.create_node(PARENT, f"b{number}", spec(network=NetworkConfig(network=network)), START)


def test_an_organisation_that_allows_no_external_addresses() -> None:
    world = calm(project={"external_ips": False})
    assert isinstance(made(world, "a", network=EXTERNAL), NeedsPerson)
    assert made(world, "b") is None


def test_addresses_are_counted_by_region_and_are_free_again_with_their_node() -> None:
    zones = {zone: {"accelerators": ["*"]} for zone in (ZONE, "us-central1-b", "europe-west4-a")}
    world = calm(zones=zones, project={"addresses_per_region": 8})
    assert made(world, "a", type="v3-32", network=EXTERNAL) is None
    assert made(world, "b", type="v3-32", network=EXTERNAL) is None
    error = made(world, "c", network=EXTERNAL)
    assert isinstance(error, QuotaExceeded)
    assert error.region_wide
    assert made(world, "inside") is None, "without an external address"
    world.api.create_node("projects/p/locations/europe-west4-a", "far", spec(network=EXTERNAL), world.now)
    world.api.delete_node(name("a"), world.now)
    world.advance(world.now + timedelta(hours=1))
    assert reaction(world, "far") is None
    assert made(world, "d", network=EXTERNAL) is None


def test_health_checks_are_counted_over_the_whole_project() -> None:
    world = calm(project={"health_checks": 75})
    assert made(world, "a", type="v3-64") is None
    assert made(world, "b", type="v3-32") is None
    assert isinstance(made(world, "c", type="v3-64"), QuotaExceeded)
    assert made(world, "d") is None


@pytest.mark.parametrize(
    ("project", "metadata", "lets_in"),
    [
        ("off", {}, True),
        ("on", {}, False),
        ("on", {"enable-oslogin": "FALSE"}, True),
        ("off", {"enable-oslogin": "TRUE"}, False),
        ("required", {}, False),
    ],
)
def test_keys_count_for_nothing_under_os_login(project: str, metadata: dict[str, str], lets_in: bool) -> None:
    world = calm(project={"os_login": project})
    assert made(world, "a", metadata=metadata) is None
    world.api.update_node(name("a"), ("metadata",), spec(metadata={**metadata, "ssh-keys": "k"}), world.now)
    world.advance(world.now + timedelta(hours=1))
    first, *later = boots(world)
    assert isinstance(first, Boot)
    assert first.takes_keys is lets_in
    assert bool(later) is lets_in


def test_an_organisation_that_enforces_os_login_refuses_a_node_without_it() -> None:
    error = made(calm(project={"os_login": "required"}), "a", metadata=SWITCHED_OFF)
    assert isinstance(error, NeedsPerson)
    assert "os_login: true" in str(error)


# --- limits of the API ---------------------------------------------------------------------------------------------


def test_reads_have_a_rate_of_their_own() -> None:
    world = calm(rates={"read": 3})
    for _ in range(3):
        world.api.list_nodes(EVERYWHERE, 0, "", START)
    said = refusal(world.api.get_node, name("a"), START)
    assert isinstance(classify(said.code, said.message, Where.GET), RateLimited)
    world.api.list_nodes(EVERYWHERE, 0, "", at(seconds=61))


def test_a_page_may_be_too_large() -> None:
    world = calm(listing={"page_refused": 500})
    assert refusal(world.api.list_nodes, EVERYWHERE, 1000, "", START).code == 3
    world.api.list_nodes(EVERYWHERE, 500, "", START)
    world.api.list_nodes(EVERYWHERE, 0, "", START)


def test_a_zone_that_never_answers() -> None:
    world = calm(zones={ZONE: {}, "europe-west4-a": {"dark": True}})
    for moment in (START, at(days=30)):
        assert world.api.list_nodes(EVERYWHERE, 0, "", moment).unreachable == ("europe-west4-a",)
    assert world.calls.fate("ListNodes", "projects/p/locations/europe-west4-a", at(days=30)).error is not None


@pytest.mark.parametrize(
    ("generation", "small", "large", "names"),
    [
        ("v2", "v2-8", "v2-32", ("TPUV2PreemptiblePerProject", "TPUV2PreemptiblePodPerProject")),
        ("v5e", "v5litepod-4", "v5litepod-16", ("TPUV5sLitepodPreemptibleServing", "TPUV5sLitepodPreemptiblePer")),
    ],
)
def test_small_and_large_slices_have_quotas_of_their_own(
    generation: str, small: str, large: str, names: tuple[str, str]
) -> None:
    quotas = [
        {"generation": generation, "zone": ZONE, "size": size, "limit": 16} for size in ("single-host", "multi-host")
    ]
    runtime = "v2-alpha-tpuv5-lite" if generation == "v5e" else "tpu-ubuntu2204-base"
    world = calm(quotas=quotas)
    for count in range(20):
        if made_or_refused(world, f"s{count}", small, runtime):
            break
    assert names[0] in made_or_refused(world, "small", small, runtime)
    assert made_or_refused(world, "large", large, runtime) == ""
    assert names[1] in made_or_refused(world, "larger", large, runtime)


def made_or_refused(world: World, node: str, kind: str, runtime: str) -> str:
    try:
        world.api.create_node(PARENT, node, spec(kind, runtime_version=runtime), START)
    except Exception as error:
        return str(error)
    return ""


# --- images --------------------------------------------------------------------------------------------------------


def test_keys_may_come_later_than_sshd() -> None:
    world = calm(guest={"keys_late": "30s"})
    assert made(world, "a", type="v3-16", metadata=SWITCHED_OFF) is None
    told = boots(world)
    booted = {effect.worker: effect for effect in told if isinstance(effect, Boot)}
    keyed = {effect.worker: effect for effect in told if isinstance(effect, AuthorizeKeys)}
    assert set(booted) == set(keyed) == {0, 1}
    for number, boot in booted.items():
        assert not boot.takes_keys
        assert (keyed[number].at - boot.at).total_seconds() == 30


# --- what tpucare does there ---------------------------------------------------------------------------------------


def care(tmp_path: Path, **world: Any) -> Daemon:
    daemon = Daemon(tmp_path / "state", config=WorldConfig.calm(**world))
    daemon.care_for("pod", 2)
    return daemon


@pytest.mark.parametrize(
    "world",
    [
        {"project": {"os_login": "on"}},
        {"guest": {"keys_late": "60s"}},
        {"guest_attributes": {"published_after": "45s", "unpublished": "not-found"}},
        {"zones": {ZONE: {"accelerators": ["*"]}, "europe-west4-a": {"dark": True}}},
        {"guest": {"sshguard": {"block": "120s"}, "keys_late": "40s"}},
        {"guest": {"sshguard": {"block": "630s"}, "keys_late": "40s"}},
    ],
    ids=["os-login", "late-keys", "late-host-keys", "dark-zone", "sshguard-120", "sshguard-630"],
)
def test_a_first_day_that_can_go_well_does(tmp_path: Path, world: dict[str, Any]) -> None:
    daemon = care(tmp_path, **world)
    daemon.run(minutes=40)
    assert daemon.all_train()
    assert len(daemon.zone.calls("CreateNode")) == 2, "the first nodes are good"
    daemon.check()


def test_an_image_that_holds_the_chips_is_not_tried_for_ever(tmp_path: Path) -> None:
    """
    A service of the image held the chips: the node was stopped, deleted after 10 s as one whose run would not end, and
    replaced by the next one without end; a person at work on the node lost it, too. A process that outlives a stop, on
    a node on which no run of ours was launched, is another's: a person is told, the node goes after ten minutes, and
    two such nodes in a row block the place.
    """
    daemon = care(tmp_path, guest={"chip_holding_runtimes": ["tpu-ubuntu2204-*"]})
    daemon.run(hours=6)
    assert len(daemon.zone.calls("CreateNode")) <= 2 * 8, "two of each slot, then one after ten minutes and one an hour"
    assert any("had their chips held before any launch" in why for why in daemon.why().values())
    assert any("holds the chips" in text for text in daemon.told("person"))


FIRST_DAY = ("chips-held", "container-left", "guarded", "policy-refused", "reads-limited")


@pytest.mark.parametrize("kind", FIRST_DAY)
def test_a_strike_of_a_first_day_takes_hold_and_is_recovered_from(kind: str) -> None:
    target = "mini-0" if FAULTS[kind].span is Span.SLOT else ""
    lost = Strike(1700, "preempted", "mini-0")
    told = Mutation(kind, "", lambda _: None, (Strike(1600, kind, target, 600), lost), slots=1).tell()
    assert told.broken == []
    assert told.tally.faults[kind] == 1
