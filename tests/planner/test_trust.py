"""Decisions: whether a node's host keys are believed, before a launch and after one changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.kits.decisions import case, table
from tests.kits.evidence import (
    CHANGED,
    FRESH,
    PROJECT,
    QUIET,
    TRAINS,
    act,
    ago,
    before,
    evidence,
    memory,
    name_of,
    node,
    past,
    run,
    seen,
    slot,
)
from tpucare.adapters.google.classify import Where, classify
from tpucare.engine.tracking import NodeTrack
from tpucare.model.actions import EffectKind, FetchHostKeys, Launch, Record, Wait
from tpucare.model.causes import Cause
from tpucare.model.errors import CloudError, NotPublished, Transient
from tpucare.model.evidence import Evidence, Voucher
from tpucare.model.lifecycles import RunState
from tpucare.model.memory import Publishing, Trust
from tpucare.model.resources import HostKeys, Job

PRIVATE = Job(run="python3 train.py", secrets=("WANDB_API_KEY",))
AUTO = replace(slot(), job=PRIVATE)
STRICT = replace(slot(host_keys=HostKeys.VOUCHED), job=PRIVATE)
PUBLIC_STRICT = slot(host_keys=HostKeys.VOUCHED)
PUBLISHER = f"{PROJECT}/tpu-ubuntu2204-base"
FIRST_USE = "Record host keys trusted on first use"
BELIEVED = memory(past(trust=Trust.FIRST_USE))
VOUCHED = memory(past(trust=Trust.VOUCHED))


def asked(voucher: Voucher, seconds: float = 5, arrived: float = 30, **more: Any) -> Evidence:
    """Its workers answer since *arrived* seconds, and guest attributes said that, *seconds* ago."""
    known = {"answering_since": ago(arrived), "arrived_since": ago(arrived), "voucher_why": "so it said", **more}
    return evidence(
        seen(node(), QUIET, voucher=voucher, **known),
        ended_effects={EffectKind.FETCH_HOST_KEYS.of(name_of(0)): ago(seconds)},
    )


def unpublished(publisher: str = PUBLISHER, **more: Any) -> Evidence:
    """This project and runtime brought no host keys the last time."""
    told = Publishing(**{"at": before(hours=23), "published": False, **more})
    what = asked(Voucher.UNPUBLISHED, arrived=20)
    return replace(what, project=replace(what.project, publishing={publisher: told}))


def changed(voucher: Voucher = Voucher.VOUCHED, since: float = 60, at: float | None = 5, **more: Any) -> Evidence:
    looked = {EffectKind.FETCH_HOST_KEYS.of(name_of(0)): ago(at)} if at is not None else {}
    known = {"voucher": voucher, "changed_since": ago(since), **more}
    return evidence(seen(node(), (QUIET, CHANGED), **known), ended_effects=looked)


UNASKED = evidence(seen(node(), QUIET, voucher=Voucher.UNASKED))
IN_FLIGHT = replace(UNASKED, in_flight=frozenset({EffectKind.FETCH_HOST_KEYS.of(name_of(0))}))
SILENT_FOR_LONG = asked(Voucher.UNANSWERED, arrived=700, unanswered_since=ago(minutes=10))

test_whether_a_job_may_be_sent = table(
    [
        case("host keys first", UNASKED, FRESH, "FetchHostKeys"),
        case("host keys are asked for", IN_FLIGHT, FRESH, "Wait"),
        case("asked anew by each process, for pins may be lost", UNASKED, VOUCHED, "FetchHostKeys", AUTO),
        case("guest attributes vouch", asked(Voucher.VOUCHED), FRESH, "Launch", STRICT),
        case("they did, and say nothing now", asked(Voucher.UNANSWERED), VOUCHED, "Launch", STRICT),
        case("not published yet", asked(Voucher.UNPUBLISHED), FRESH, "Wait", AUTO),
        case("asked again after 10 s", asked(Voucher.UNPUBLISHED, seconds=10), FRESH, "FetchHostKeys", AUTO),
        case("not within 2 minutes", asked(Voucher.UNPUBLISHED, arrived=120), FRESH, FIRST_USE, AUTO),
        case("not within 2 minutes, vouched", asked(Voucher.UNPUBLISHED, arrived=120), FRESH, "Wait person", STRICT),
        case("and asked each minute", asked(Voucher.UNPUBLISHED, 60, 120), FRESH, "FetchHostKeys", STRICT),
        case("on first use already", asked(Voucher.UNPUBLISHED), BELIEVED, "Launch", AUTO),
        case("first use is not vouched", asked(Voucher.UNPUBLISHED, arrived=120), BELIEVED, "Wait person", STRICT),
        case("usually unpublished: 10 s", unpublished(), FRESH, FIRST_USE, AUTO),
        case("that was more than a day ago", unpublished(at=before(hours=25)), FRESH, "Wait", AUTO),
        case("it publishes here", unpublished(published=True), FRESH, "Wait", AUTO),
        case("vouched waits as long as it may take", unpublished(), FRESH, "Wait", STRICT),
        case("another runtime", unpublished(f"{PROJECT}/v2", at=before()),
             FRESH, "Wait", AUTO),
        case("not permitted", asked(Voucher.FORBIDDEN), FRESH, FIRST_USE, AUTO),
        case("not permitted, vouched", asked(Voucher.FORBIDDEN), FRESH, "Wait person", STRICT),
        case("no answer", asked(Voucher.UNANSWERED, arrived=300, unanswered_since=ago(300)), FRESH, "Wait", AUTO),
        case("no answer: again after 10 s", asked(Voucher.UNANSWERED, 10, 300), FRESH, "FetchHostKeys", AUTO),
        case("no answer for 10 minutes is no voucher's word", SILENT_FOR_LONG, FRESH, "Wait person", AUTO),
        case("nor with vouched", SILENT_FOR_LONG, FRESH, "Wait person", STRICT),
        case("nothing private begins meanwhile", asked(Voucher.UNPUBLISHED), FRESH, "Launch"),
        case("nor waits for an answer", SILENT_FOR_LONG, FRESH, "Launch"),
        case("but with vouched it waits", asked(Voucher.UNPUBLISHED), FRESH, "Wait", PUBLIC_STRICT),
    ]
)  # fmt: skip

INCOMPLETE = replace(TRAINS, run=run(state=RunState.LAUNCHING))
test_a_launch_that_is_repeated_asks_as_the_first = table(
    [
        case("no worker took it", asked(Voucher.UNPUBLISHED), INCOMPLETE, "Wait", AUTO),
        case("vouched for", asked(Voucher.VOUCHED), INCOMPLETE, "Launch", AUTO),
    ]
)

test_a_changed_host_key_is_believed_by_nobodys_silence = table(
    [
        case("asked at once", changed(at=None), TRAINS, "FetchHostKeys"),
        case("what was said before it changed does not count", changed(since=5, at=60), TRAINS, "FetchHostKeys"),
        case("the agent may be late", changed(), TRAINS, "Wait"),
        case("asked again after 10 s", changed(at=10), TRAINS, "FetchHostKeys"),
        case("they vouch for another", changed(since=120), TRAINS, "Wait person"),
        case("nothing is published", changed(Voucher.UNPUBLISHED, since=120), TRAINS, "Wait person"),
        case("not permitted", changed(Voucher.FORBIDDEN, since=120), TRAINS, "Wait person"),
        case("asked each minute from then on", changed(since=600, at=30), TRAINS, "Wait person"),
        case("a minute later", changed(since=600, at=60), TRAINS, "FetchHostKeys"),
        case("before a first launch, too", changed(Voucher.UNPUBLISHED, since=600), BELIEVED, "Wait person"),
        case("no answer", changed(Voucher.UNANSWERED, since=300, unanswered_since=ago(300)), TRAINS, "Wait"),
        case("no answer for long", changed(Voucher.UNANSWERED, since=900, unanswered_since=ago(600)), TRAINS,
             "Wait person"),
    ]
)  # fmt: skip


@pytest.mark.parametrize(
    "job",
    [
        Job(run="x", secrets=("A",)),
        Job(run="x", files={"a": b""}),
        Job(run="x", workdir="/w"),
        Job(run="x", env={"HF_TOKEN": "x"}),
        Job(run="", foreign=True),
    ],
)
def test_what_counts_as_private(job: Job) -> None:
    what = asked(Voucher.UNPUBLISHED)
    assert isinstance(act(what, FRESH, replace(AUTO, job=job)), Wait)
    public = Job(run="x", setup="y", repository="https://github.com/me/x", checkpoint="gs://b/x")
    assert isinstance(act(what, FRESH, replace(AUTO, job=public)), Launch)


def test_it_says_why_a_node_is_trusted_and_of_whom_that_tells() -> None:
    action = act(asked(Voucher.UNPUBLISHED, arrived=120), FRESH, AUTO)
    assert isinstance(action, Record)
    assert (action.name, action.publisher) == (name_of(0), PUBLISHER)
    assert "not published within 2 min" in action.why
    forbidden = act(asked(Voucher.FORBIDDEN), FRESH, AUTO)
    assert isinstance(forbidden, Record)
    assert forbidden.publisher == "", "who may not look has not learned what is published"
    assert "may not be read: so it said" in forbidden.why


def test_a_node_without_a_known_place_is_asked_about_too() -> None:
    action = act(UNASKED, memory(past(place="")), AUTO)
    assert action == FetchHostKeys(
        node().key, Cause.HOST_KEYS_UNVOUCHED, "its workers answer for the first time", f"{PROJECT}/"
    )


ANSWERS: list[tuple[bool, CloudError | None, Voucher]] = [
    (True, None, Voucher.VOUCHED),
    (False, None, Voucher.UNPUBLISHED),
    (False, classify(5, "Resource not found", Where.GUEST), Voucher.UNPUBLISHED),
    (False, NotPublished("x", 5), Voucher.UNPUBLISHED),
    (False, classify(7, "Permission 'tpu.nodes.getGuestAttributes' denied", Where.GUEST), Voucher.FORBIDDEN),
    (False, classify(9, "Guest attributes are not enabled", Where.GUEST), Voucher.UNPUBLISHED),
    (False, classify(12, "Method not found", Where.GUEST), Voucher.UNPUBLISHED),
    (False, classify(14, "unavailable", Where.GUEST), Voucher.UNANSWERED),
    (False, classify(4, "Deadline Exceeded", Where.GUEST), Voucher.UNANSWERED),
    (False, classify(13, "internal", Where.GUEST), Voucher.UNANSWERED),
    (False, classify(8, "Too many requests", Where.GUEST), Voucher.UNANSWERED),
    (False, classify(8, "", Where.GUEST), Voucher.UNANSWERED),
    (False, classify(16, "who are you", Where.GUEST), Voucher.UNANSWERED),
    (False, classify(9, "node is in state PREEMPTED", Where.GUEST), Voucher.UNANSWERED),
]


@pytest.mark.parametrize(("vouched", "error", "want"), ANSWERS)
def test_what_an_answer_of_guest_attributes_says(vouched: bool, error: CloudError | None, want: Voucher) -> None:
    track = NodeTrack(node(), ago(60), ago(60))
    track.apply_voucher(vouched, error, ago(5))
    assert track.voucher is want
    assert (track.unanswered_since is not None) == (want is Voucher.UNANSWERED)
    track.apply_voucher(False, Transient("x", 13), ago(1))
    assert track.unanswered_since == (ago(5) if want is Voucher.UNANSWERED else ago(1))
