"""The reaction that every answer seen in the wild asks for; texts as gathered from public logs and issues."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpucare.adapters.google.classify import MESSAGE_LIMIT, Where, classify
from tpucare.model.errors import (
    AlreadyExists,
    AnswerLost,
    CloudError,
    LostRace,
    NeedsPerson,
    NoCapacity,
    NodeGone,
    NotPublished,
    OwnCredentials,
    PreemptedMeanwhile,
    QuotaExceeded,
    RateLimited,
    Transient,
)

STOCKOUT = (
    'There is no more capacity in the zone "europe-west4-a"; you can try in another zone where Cloud TPU Nodes are '
    "offered (see https://cloud.google.com/tpu/docs/regions) [EID: 0x1f2e3d]"
)
QUOTA = (
    "Quota limit 'TPUV6EPreemptiblePerProjectPerRegionForTPUAPI' has been exceeded. Limit: 64 in region us-east5."
    " [EID: 0x1]"
)
QUOTA_BOTH = "Quota limit 'A,B' has been exceeded. Limit: 64,20 in region us-east5,zone us-east5-a."
NO_QUOTA = QUOTA.replace("64", "0")
QUOTA_OTHER = "Quota 'TPUV2sPreemptiblePodPerProjectPerZoneForTPUAPI' exhausted. Limit 32 in zone europe-west4-a"
RATE = (
    "Quota exceeded for quota metric 'CreateNode requests': Maximum number of CreateNode requests per minute, "
    "tpu.googleapis.com/qps/create"
)
MISSING = "Resource 'projects/p/locations/us-central1-b/nodes/pod-0-a1' was not found"
TOKEN = "Getting metadata from plugin failed with error: ('invalid_grant: Token has been expired or revoked.', {})"
TOKEN_NET = "Getting metadata from plugin failed with error: HTTPSConnectionPool: Max retries exceeded with url: /token"

WILD = [
    (8, STOCKOUT, Where.OPERATION, NoCapacity),
    (8, STOCKOUT, Where.CREATE, NoCapacity),
    (
        9,
        "Insufficient reserved capacity. Contact customer support to increase your reservation.",
        "operation",
        NoCapacity,
    ),
    (8, QUOTA, Where.CREATE, QuotaExceeded),
    (8, QUOTA, Where.OPERATION, QuotaExceeded),
    (8, QUOTA_OTHER, Where.CREATE, QuotaExceeded),
    (8, NO_QUOTA, Where.CREATE, NeedsPerson),
    (8, NO_QUOTA, Where.OPERATION, NeedsPerson),
    (8, QUOTA_BOTH.replace("64,20", "64,0"), Where.CREATE, NeedsPerson),
    (8, QUOTA_OTHER.replace("32", "0"), Where.OPERATION, NeedsPerson),
    (9, QUOTA_OTHER, Where.OPERATION, QuotaExceeded),
    (8, "Quota 'IN_USE_ADDRESSES' exceeded. Limit: 8.0 in region us-central1.", Where.OPERATION, QuotaExceeded),
    (13, "HEALTH_CHECKS limit of 75 reached", Where.OPERATION, QuotaExceeded),
    (8, RATE, Where.CREATE, RateLimited),
    (8, "DeleteNode requests per minute", Where.DELETE, RateLimited),
    (13, "Constraint constraints/compute.requireOsLogin violated for project 1.", Where.OPERATION, NeedsPerson),
    (8, "", Where.CREATE, Transient),
    (8, "", Where.OPERATION, NoCapacity),
    (8, "Received message larger than max (9219020 vs. 4194304)", Where.LIST, AnswerLost),
    (8, "Sent message larger than max", Where.CREATE, NeedsPerson),
    (7, "Permission 'tpu.nodes.list' denied on 'projects/p/locations/-'", Where.LIST, NeedsPerson),
    (7, "Permission 'serviceusage.quotas.get' denied", Where.LIST, NeedsPerson),
    (7, "The tpu.googleapis.com API requires a quota project, which is not set by default.", Where.LIST, NeedsPerson),
    (7, "Permission denied on 'locations/us-central2-b' (or it may not exist)", Where.CREATE, NeedsPerson),
    (7, "cannot create a TPU Node on a project linked to a free-trial billing account", Where.CREATE, NeedsPerson),
    (
        7,
        "The user does not have access to service account '1-compute@developer.gserviceaccount.com'",
        "create",
        NeedsPerson,
    ),
    (3, "the accelerator v6e-1 was not found in zone asia-east1-a", Where.CREATE, NeedsPerson),
    (
        3,
        'Cloud TPU received a bad request. The requested zone "asia-northeast1-a" is not supported.',
        "create",
        NeedsPerson,
    ),
    (
        3,
        "Cloud TPU received a bad request. update is not supported while in state PREEMPTED",
        "operation",
        PreemptedMeanwhile,
    ),
    (9, "unable to queue the operation", Where.DELETE, LostRace),
    (10, "unable to queue the operation", Where.CREATE, LostRace),
    (9, "Your request to provision TPU Node has been denied. Please migrate to TPU VM", Where.CREATE, NeedsPerson),
    (9, "node is in state DELETING", Where.DELETE, LostRace),
    (10, "conflict", Where.UPDATE, LostRace),
    (10, "aborted", Where.CREATE, Transient),
    (5, MISSING, Where.GET, NodeGone),
    (5, MISSING, Where.OPERATION, NodeGone),
    (5, "Requested entity was not found.", Where.GET, NodeGone),
    (5, "Requested entity was not found.", Where.CREATE, NeedsPerson),
    (5, MISSING, Where.UPDATE, LostRace),
    (5, "Requested entity was not found.", Where.UPDATE, LostRace),
    (5, "Project 'projects/p' not found or deleted", Where.UPDATE, NeedsPerson),
    (5, "The resource 'hostkeys/' of type 'Guest Attribute' was not found.", Where.GUEST, NotPublished),
    (5, "Resource 'projects/p/locations/z/nodes/n/guestAttributes' was not found", Where.GUEST, NotPublished),
    (5, "Requested entity was not found.", Where.GUEST, NotPublished),
    (5, "Service account x@y.iam.gserviceaccount.com was not found", Where.OPERATION, NeedsPerson),
    (5, "Project 'projects/p' not found or deleted", Where.GET, NeedsPerson),
    (6, "Resource 'projects/p/locations/z/nodes/n' already exists", Where.CREATE, AlreadyExists),
    (6, "conflict", Where.UPDATE, LostRace),
    (13, "an internal error has occurred", Where.OPERATION, Transient),
    (13, "Received RST_STREAM with error code 2", Where.CREATE, AnswerLost),
    (1, "The operation was cancelled", Where.OPERATION, LostRace),
    (1, "Locally cancelled by application!", Where.CREATE, AnswerLost),
    (2, "502:Bad Gateway", Where.GET, Transient),
    (12, "Method not found!", Where.LIST, NeedsPerson),
    (16, "Request had invalid authentication credentials.", Where.LIST, OwnCredentials),
    (14, TOKEN, Where.LIST, OwnCredentials),
    (14, TOKEN_NET, Where.LIST, Transient),
    (77, "got into a bad state", Where.OPERATION, Transient),
]


@pytest.mark.parametrize(("code", "text", "where", "want"), WILD)
def test_reaction_to_what_was_seen_in_the_wild(code: int, text: str, where: str, want: type[CloudError]) -> None:
    error = classify(code, text, where)
    assert type(error) is want
    assert error.code == code


@pytest.mark.parametrize("code", [4, 14])
def test_an_answer_is_lost_in_a_call_and_final_in_an_operation(code: int) -> None:
    assert type(classify(code, "unavailable", Where.CREATE)) is AnswerLost
    assert type(classify(code, "unavailable", Where.OPERATION)) is Transient


@pytest.mark.parametrize(
    ("text", "region_wide"),
    [
        (QUOTA, True),
        (QUOTA_BOTH, False),
        (QUOTA_OTHER, False),
        ("Quota 'IN_USE_ADDRESSES' exceeded. Limit: 8.0 in region us-central1.", True),
        ("Quota exceeded", False),
    ],
)
def test_scope_of_a_quota(text: str, region_wide: bool) -> None:
    error = classify(8, text, Where.CREATE)
    assert isinstance(error, QuotaExceeded)
    assert error.region_wide is region_wide


@pytest.mark.parametrize(
    ("code", "text", "advice"),
    [
        (7, "Permission 'tpu.nodes.list' denied on 'projects/p/locations/-'", "roles/tpu.admin"),
        (7, "The user does not have access to service account 'x'", "roles/iam.serviceAccountUser"),
        (7, "requires a quota project", "set-quota-project"),
        (7, "Cloud TPU API has not been used in project 1 before or it is disabled.", "gcloud services enable"),
        (3, "the accelerator v6e-1 was not found in zone asia-east1-a", "`zones`"),
        (7, "Cloud TPU API has not been used in project 764086051850 before", "set-quota-project PROJECT"),
        (
            7,
            "Your application is using local Application Default Credentials from gcloud.",
            "set-quota-project PROJECT",
        ),
        (7, "The billing account for the owning project is disabled in state absent", "billing account to the project"),
        (7, "Request had insufficient authentication scopes.", "--scopes=cloud-platform"),
        (5, 'The referenced network "default" was not found in project p', "`network` under `tpu`"),
        (3, "Subnetwork projects/p/regions/r/subnetworks/s does not exist", "`network` under `tpu`"),
        (9, "Constraint constraints/compute.vmExternalIpAccess violated for project 1.", "external_ips: false"),
        (8, "Quota 'IN_USE_ADDRESSES' exceeded. Limit: 8.0 in region us-central1.", "In-use regional external IPv4"),
        (13, "HEALTH_CHECKS limit of 75 reached", '"Health checks"'),
        (8, "Quota limit 'TPUV6E' has been exceeded. Limit: 0 in region us-east5.", "no quota for this"),
        (9, "Constraint constraints/compute.requireOsLogin violated for project 123456.", "`os_login: true`"),
    ],
)
def test_a_person_is_told_what_to_change(code: int, text: str, advice: str) -> None:
    error = classify(code, text, Where.CREATE)
    assert advice in error.advice
    assert (error.message, str(error)) == (text, f"{text} -> {error.advice}")


def test_an_error_reworded_is_the_same_error() -> None:
    error = classify(8, "Quota 'IN_USE_ADDRESSES' exceeded. Limit: 8.0 in region us-central1.", Where.CREATE)
    other = error.reworded("zone -> zone")
    assert isinstance(other, QuotaExceeded)
    assert (other.code, other.region_wide, other.advice) == (8, True, error.advice)
    assert str(other) == f"zone -> zone -> {error.advice}"
    assert str(error).startswith("Quota 'IN_USE_ADDRESSES'")


@settings(max_examples=200)
@given(code=st.integers(-3, 40), text=st.text(max_size=700), where=st.sampled_from(list(Where)))
def test_every_answer_has_a_class_and_one_line(code: int, text: str, where: Where) -> None:
    error = classify(code, text, where)
    assert isinstance(error, CloudError)
    assert str(error).splitlines() == [str(error)]
    assert len(str(error)) <= MESSAGE_LIMIT + 300
