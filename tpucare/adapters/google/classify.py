"""
Errors of the Cloud TPU API: (code, message, where) -> one class of the CloudError tree.

Pure, so that the real client and the stand-ins of tests read an error the same way. The texts are those seen in the
wild; a stable word of the text counts before the code, and the code before the channel, since the service says
"quota" and "no more capacity" on every channel. Entry points print ``str(error)``: one line, with advice where a
person has to change something.

Taking apart the exceptions of grpc and google-auth is left to `client`, the reaction to a class to `planner`.
"""

from __future__ import annotations

import re
from enum import StrEnum

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

MESSAGE_LIMIT = 600
READ_TRIES = 3


class Where(StrEnum):
    """The call that failed; OPERATION is the error inside a finished long-running operation."""

    LIST = "list"
    GET = "get"
    CREATE = "create"
    DELETE = "delete"
    UPDATE = "update"
    GUEST = "guest"
    GET_OPERATION = "get-operation"
    OPERATION = "operation"


CANCELLED, UNKNOWN, INVALID_ARGUMENT, DEADLINE_EXCEEDED, NOT_FOUND, ALREADY_EXISTS, PERMISSION_DENIED = range(1, 8)
RESOURCE_EXHAUSTED, FAILED_PRECONDITION, ABORTED, OUT_OF_RANGE, UNIMPLEMENTED, INTERNAL, UNAVAILABLE = range(8, 15)
DATA_LOSS, UNAUTHENTICATED = 15, 16

# Calls whose NOT_FOUND proves that the node (or the operation) in them is gone.
_PROVES_ABSENCE = (Where.GET, Where.DELETE, Where.GET_OPERATION)


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text, re.IGNORECASE)


# Our own gRPC channel raises RESOURCE_EXHAUSTED for these two; neither is a quota.
_REPLY_TOO_LARGE = _pattern(r"received message larger than max")
_REQUEST_TOO_LARGE = _pattern(r"sent message larger than max")
_TOKEN_PLUGIN = _pattern(r"getting metadata from plugin failed")
_TOKEN_OUT_OF_REACH = _pattern(r"max retries|failed to resolve|connection|timed? ?out|transporterror|unreachable")
_PREEMPTED = _pattern(r"\bstate PREEMPTED\b")
_QUEUE = _pattern(r"unable to queue the operation")
_RATE = _pattern(r"per ?minute|per \d+ seconds|too many requests|rate limit")
# "Constraint constraints/compute.requireOsLogin violated for project ..." has the code of the VM's insert, whichever.
_POLICY = _pattern(r"\bconstraints/compute\.|org(anization)? ?policy")
_CAPACITY = _pattern(
    r"no more capacity|insufficient reserved|insufficient capacity|resource_pool_exhausted|not have enough resources"
)
# "requires a quota project" concerns credentials (code 7); every other text with the word is about a limit.
# A project may have so many queued resources in a zone; shells of old ones count.
_QUOTA = _pattern(
    r"\bquotas?\b(?! project)|IN_USE_ADDRESSES|HEALTH_CHECKS|too many queued resources|reservation for request queue"
)
_LIMIT = _pattern(r"\blimit:? ([\d.,]*\d)")
_REGION = _pattern(r"\bin region \S")
_ZONE = _pattern(r"\bzone [a-z\"']")
_BEING_DELETED = _pattern(r"\bDELETING\b|being deleted")
_NAMES_NODE = _pattern(r"/nodes/|/operations/|/queuedResources/")
_NAMES_OTHER = _pattern(r"\b(project|location|zone|service account|network|subnetwork)s?\b")
_CONNECTION_CUT = _pattern(r"RST_STREAM|stream removed|socket closed|connection reset|goaway")

_ADVICE = tuple(
    (_pattern(pattern), advice)
    for pattern, advice in (
        (
            r"requireOsLogin",
            "the organisation enforces OS Login, and tpucare switches it off: have the project exempted, or set "
            "`os_login: true` under `tpu` and add tpucare's key to the account by hand",
        ),
        (
            r"764086051850|local Application Default Credentials|quota project",
            "run `gcloud auth application-default set-quota-project PROJECT`",
        ),
        (
            r"insufficient authentication scopes|ACCESS_TOKEN_SCOPE_INSUFFICIENT",
            "give the VM that tpucare runs on the scope `cloud-platform`: stop it, run "
            "`gcloud compute instances set-service-account VM --scopes=cloud-platform`, start it",
        ),
        (r"free-trial billing", "link the project to a paid billing account"),
        (r"\bbilling\b", "link an open billing account to the project (console: Billing)"),
        (
            r"vmExternalIpAccess",
            "set `network: {external_ips: false}` under `tpu`, and see docs/installing.md for access without them",
        ),
        (
            r"\bsubnetwork|\bnetworks?/|\bnetwork \"?[\w-]+\"? (was )?not found|network .*(not found|not exist)",
            "create the network (`gcloud compute networks create default`), or set `network` under `tpu` to yours",
        ),
        (
            r"IN_USE_ADDRESSES",
            'each host needs one: request more "In-use regional external IPv4 addresses" on '
            "https://console.cloud.google.com/iam-admin/quotas, or set `network: {external_ips: false}` under `tpu`",
        ),
        (
            r"HEALTH_CHECKS",
            'each host needs about five: request more "Health checks" on '
            "https://console.cloud.google.com/iam-admin/quotas, or use fewer hosts",
        ),
        (
            r"service account",
            "check `service_account`, and give the caller roles/iam.serviceAccountUser on it",
        ),
        (
            r"has not been used in project|is disabled|SERVICE_DISABLED",
            "run `gcloud services enable tpu.googleapis.com`",
        ),
        (
            r"accelerator type .* in location|LOCATION_POLICY_VIOLATED|Permission denied on 'locations/",
            "request access to this type and zone, or list another zone under `tpu`",
        ),
        (r"Permission '(tpu\.[\w.]+)' denied", "give the caller roles/tpu.admin on the project"),
        (
            r"accelerator .* (was not found|could not be found)|invalid AcceleratorType|zone .* is not supported",
            "change `type` or `zones` under `tpu`",
        ),
        (r"runtime.?version", "change `runtime` under `tpu`"),
    )
)


_NO_QUOTA = (
    "the project has no quota for this: request it on https://console.cloud.google.com/iam-admin/quotas, or change "
    "`zones` or `provisioning` under `tpu`"
)


def classify(code: int, message: str, where: str) -> CloudError:
    """
    The error to raise for a gRPC status.

    code:    gRPC status number
    message: the status text; line breaks are folded, and it is cut at MESSAGE_LIMIT characters
    where:   a `Where`; with OPERATION the answer is final, so it is never AnswerLost
    """
    text = " ".join(message.split())[:MESSAGE_LIMIT] or f"gRPC status {code} without a text"
    return _by_text(code, text, where) or _by_code(code, text, where)


def is_worth_repeating(error: BaseException) -> bool:
    """
    True if a read should be tried again at once, up to READ_TRIES times in all.

    A passed deadline is not worth it: it took seconds already, and the next pass asks anyway.
    """
    return isinstance(error, Transient) and error.code != DEADLINE_EXCEEDED


def _by_text(code: int, text: str, where: str) -> CloudError | None:
    """The class by stable words of *text*, on whatever channel; None if there are none."""
    if _REPLY_TOO_LARGE.search(text):
        return AnswerLost(text, code)
    if _REQUEST_TOO_LARGE.search(text):
        return NeedsPerson(text, code)
    if _TOKEN_PLUGIN.search(text):
        return Transient(text, code) if _TOKEN_OUT_OF_REACH.search(text) else OwnCredentials(text, code)
    if _PREEMPTED.search(text):
        return PreemptedMeanwhile(text, code)
    if _QUEUE.search(text):
        return LostRace(text, code)
    # A refused permission or login may name quotas and rates in passing (`serviceusage.quotas.get`).
    if code in (PERMISSION_DENIED, UNAUTHENTICATED):
        return None
    if _POLICY.search(text):
        return NeedsPerson(text, code, advice=_advice(text))
    if _RATE.search(text):
        return RateLimited(text, code)
    if _CAPACITY.search(text):
        return NoCapacity(text, code)
    if _QUOTA.search(text):
        if _is_limit_zero(text):
            return NeedsPerson(text, code, advice=_NO_QUOTA)
        return QuotaExceeded(text, code, region_wide=_is_region_wide(text), advice=_advice(text))
    return _being_deleted(code, text, where)


def _being_deleted(code: int, text: str, where: str) -> CloudError | None:
    """LostRace for a second delete of a node in DELETING, which the service refuses with either code."""
    if where == Where.DELETE and code in (FAILED_PRECONDITION, ABORTED) and _BEING_DELETED.search(text):
        return LostRace(text, code)
    return None


def _is_limit_zero(text: str) -> bool:
    """True if one of the limits in *text* ("Limit: 0,64") is 0: waiting cannot help."""
    found = _LIMIT.search(text)
    return found is not None and any(limit.strip("0.") == "" for limit in found[1].split(",") if limit)


def _is_region_wide(text: str) -> bool:
    return bool(_REGION.search(text)) and not _ZONE.search(text)


def _by_code(code: int, text: str, where: str) -> CloudError:
    """The class by *code*, for a text without a known word."""
    match code:
        case 4 | 14:  # DEADLINE_EXCEEDED, UNAVAILABLE
            return Transient(text, code) if where == Where.OPERATION else AnswerLost(text, code)
        case 1 | 2 | 13 | 15:  # CANCELLED, UNKNOWN, INTERNAL, DATA_LOSS
            return _broken(code, text, where)
        case 5:  # NOT_FOUND
            return _not_found(code, text, where)
        case 6:  # ALREADY_EXISTS
            return AlreadyExists(text, code) if where in (Where.CREATE, Where.OPERATION) else LostRace(text, code)
        case 8:  # RESOURCE_EXHAUSTED without a word: a stockout comes through the operation, a limit from the call
            return NoCapacity(text, code) if where == Where.OPERATION else Transient(text, code)
        case 10:  # ABORTED
            return LostRace(text, code) if where == Where.UPDATE else Transient(text, code)
        case 16:  # UNAUTHENTICATED
            return OwnCredentials(text, code)
        case 3 | 7 | 9 | 11 | 12:
            return NeedsPerson(text, code, advice=_advice(text))
        case _:
            return Transient(text, code)


def _broken(code: int, text: str, where: str) -> CloudError:
    """
    The class for a failure of the service, the operation or the connection.

    A create that is cancelled because its node is deleted ends with CANCELLED in the operation.
    """
    if where == Where.OPERATION:
        return LostRace(text, code) if code == CANCELLED else Transient(text, code)
    if code == CANCELLED or _CONNECTION_CUT.search(text):
        return AnswerLost(text, code)
    return Transient(text, code)


def _not_found(code: int, text: str, where: str) -> CloudError:
    """
    The class for NOT_FOUND. NodeGone proves absence, so it needs a text or a call that is about the node (or the
    operation) itself.

    A create can miss its service account, its network or its zone; a read can miss its project. Guest attributes of a
    live node are not found until the guest has published them (Compute Engine, "The resource 'hostkeys/' of type
    'Guest Attribute' was not found"); an update that misses its node makes the loop read it again.
    """
    if where == Where.GUEST:
        return NotPublished(text, code)
    if _NAMES_OTHER.search(text) and not _NAMES_NODE.search(text):
        return NeedsPerson(text, code, advice=_advice(text))
    if where == Where.UPDATE:
        return LostRace(text, code)
    if where in _PROVES_ABSENCE or _NAMES_NODE.search(text):
        return NodeGone(text, code)
    return NeedsPerson(text, code, advice=_advice(text))


def _advice(text: str) -> str:
    return next((advice for pattern, advice in _ADVICE if pattern.search(text)), "")
