"""What CreateNode says for a slot, to the letter: the metadata beside what the place is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
from google.protobuf.json_format import MessageToDict  # type: ignore[import-untyped]

from tests.kits.evidence import OWNER, place, slot
from tpucare.adapters.google.wire import create_request
from tpucare.engine.effects import Ports, node_request
from tpucare.model.actions import Create
from tpucare.model.causes import Cause
from tpucare.model.resources import Network, Place

OURS = "ubuntu:ssh-ed25519 AAAA tpucare"
PERSON = "me:ssh-ed25519 BBBB me"

GOLDEN: dict[str, Any] = {
    "parent": "projects/my-project/locations/us-central1-a",
    "nodeId": "pod-0-a7",
    "node": {
        "acceleratorType": "v3-16",
        "runtimeVersion": "tpu-ubuntu2204-base",
        "networkConfig": {"enableExternalIps": True},
        "schedulingConfig": {"spot": True},
        "labels": {
            "tpucare-owner": OWNER,
            "tpucare-fleet": "pod",
            "tpucare-slot": "pod-0",
            "tpucare-attempt": "7",
        },
        "metadata": {"ssh-keys": f"{OURS}\n{PERSON}", "enable-oslogin": "FALSE"},
    },
}


def request(where: Place) -> dict[str, Any]:
    """CreateNode for a slot of *where*, as REST would write it."""
    wanted = replace(slot(where), ssh_keys=(PERSON,))
    made = node_request(
        Create("pod-0-a7", 7, where, Cause.NO_NODE, "no node"), wanted, Ports(Mock(), Mock(), OWNER, OURS)
    )
    message = create_request(made)
    said: dict[str, Any] = MessageToDict(type(message).pb(message))
    return said


def test_a_create_says_this_and_nothing_else() -> None:
    assert request(place()) == GOLDEN


@pytest.mark.parametrize(
    ("where", "metadata"),
    [
        (replace(place(), os_login=True), {"ssh-keys": f"{OURS}\n{PERSON}"}),
        (
            replace(place(), metadata=(("startup-script", "true"), ("enable-guest-attributes", "TRUE"))),
            {**GOLDEN["node"]["metadata"], "startup-script": "true", "enable-guest-attributes": "TRUE"},
        ),
        # Fleet files cannot say so; what is ours counts whoever says something else.
        (replace(place(), metadata=(("ssh-keys", "x"), ("enable-oslogin", "TRUE"))), GOLDEN["node"]["metadata"]),
    ],
    ids=["os-login", "own-metadata", "ours-wins"],
)
def test_metadata_of_a_place_changes_the_metadata_alone(where: Place, metadata: dict[str, str]) -> None:
    node = {**GOLDEN["node"], "metadata": metadata}
    assert request(where) == {**GOLDEN, "node": node}


def test_workers_reached_inside_the_vpc_may_have_external_addresses() -> None:
    assert request(replace(place(), network=Network(reach_internal=True))) == GOLDEN
