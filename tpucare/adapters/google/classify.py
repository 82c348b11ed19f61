"""
Which reaction an answer of the Cloud TPU API asks for: (code, message, where) -> one class of the CloudError tree.

Pure, so that the real client and the stand-ins of tests read an error the same way. The texts are those seen in the
wild; a stable word of the text counts before the code, and the code before the channel, since the service says
"quota" and "no more capacity" on every channel it has. What a door prints is ``str(error)``: one line, with advice
where a person has to change something.

Not here: how an exception of grpc or google-auth is taken apart (`cloud`), and what follows from a class (`plan`).
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
    """What was being asked for when the error came; OPERATION is the error inside a finished long-running one."""

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

# Calls whose NOT_FOUND is a proof that the node (or the operation) they name is gone.
_PROVES_ABSENCE = (Where.GET, Where.DELETE, Where.GET_OPERATION)


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text, re.IGNORECASE)


# The channel of our own client speaks of RESOURCE_EXHAUSTED too; neither is a quota.
_REPLY_TOO_LARGE = _pattern(r"received message larger than max")
_REQUEST_TOO_LARGE = _pattern(r"sent message larger than max")
_TOKEN_PLUGIN = _pattern(r"getting metadata from plugin failed")
_TOKEN_OUT_OF_REACH = _pattern(r"max retries|failed to resolve|connection|timed? ?out|transporterror|unreachable")
_PREEMPTED = _pattern(r"\bstate PREEMPTED\b")
_QUEUE = _pattern(r"unable to queue the operation")
_RATE = _pattern(r"per ?minute|per \d+ seconds|too many requests|rate limit")
# "Constraint constraints/compute.requireOsLogin violated for project ..." comes with whatever code the VM's insert had.
_POLICY = _pattern(r"\bconstraints/compute\.|org(anization)? ?policy")
_CAPACITY = _pattern(
    r"no more capacity|insufficient reserved|insufficient capacity|resource_pool_exhausted|not have enough resources"
)
# "requires a quota project" is a matter of credentials, and code 7; all others speak of a limit that is used up.
_QUOTA = _pattern(r"\bquotas?\b(?! project)|IN_USE_ADDRESSES|HEALTH_CHECKS")
_LIMIT = _pattern(r"\blimit:? ([\d.,]*\d)")
_REGION = _pattern(r"\bin region \S")
_ZONE = _pattern(r"\bzone [a-z\"']")
_BEING_DELETED = _pattern(r"\bDELETING\b|being deleted")
_NAMES_NODE = _pattern(r"/nodes/|/operations/")
_NAMES_OTHER = _pattern(r"\b(project|location|zone|service account|network|subnetwork)s?\b")
_CONNECTION_CUT = _pattern(r"RST_STREAM|stream removed|socket closed|connection reset|goaway")

_ADVICE = tuple(
    (_pattern(pattern), advice)
    for pattern, advice in (
        (
            r"requireOsLogin",
            "the organisation enforces OS Login, and tpucare switches it off: have the project exempted, or set "
            "`os_login: true` under `tpu` and provision tpucare's key on the account by hand",
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
            "set `network: {external_ips: false}` under `tpu`, and see docs/installing.md for the way in",
        ),
        (
            r"\bsubnetwork|\bnetworks?/|\bnetwork \"?[\w-]+\"? (was )?not found|network .*(not found|not exist)",
            "create the network (`gcloud compute networks create default`), or name yours: `network` under `tpu`",
        ),
        (
            r"IN_USE_ADDRESSES",
            'each host takes one: ask for more "In-use regional external IPv4 addresses" on '
            "https://console.cloud.google.com/iam-admin/quotas, or set `network: {external_ips: false}` under `tpu`",
        ),
        (
            r"HEALTH_CHECKS",
            'each host takes about five: ask for more "Health checks" on '
            "https://console.cloud.google.com/iam-admin/quotas, or for fewer hosts",
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
            "ask for access to this type and zone, or list another zone under `tpu`",
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
    "the project has no quota for this: ask for it on https://console.cloud.google.com/iam-admin/quotas, or change "
    "`zones` or `provisioning` under `tpu`"
)


def classify(code: int, message: str, where: str) -> CloudError:
    """
    The error to raise for a gRPC status.

    code:    gRPC status number
    message: the status text; line breaks are folded, and it is cut at MESSAGE_LIMIT characters
    where:   a `Where`; "operation" means that the answer is final, so that nothing can have been lost
    """
    text = " ".join(message.split())[:MESSAGE_LIMIT] or f"gRPC status {code} without a text"
    return _by_text(code, text, where) or _by_code(code, text, where)


def is_worth_repeating(error: BaseException) -> bool:
    """
    Whether a call that changes nothing should be tried again at once, up to READ_TRIES times in all.

    A deadline that passed is not: it took seconds already, and the next pass asks anyway.
    """
    return isinstance(error, Transient) and error.code != DEADLINE_EXCEEDED


def _by_text(code: int, text: str, where: str) -> CloudError | None:
    """The class that stable words of *text* ask for, wherever they arrive."""
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
    """A second delete of a node in DELETING is under way already, whatever the code."""
    if where == Where.DELETE and code in (FAILED_PRECONDITION, ABORTED) and _BEING_DELETED.search(text):
        return LostRace(text, code)
    return None


def _is_limit_zero(text: str) -> bool:
    """Whether one of the limits that are named ("Limit: 0,64") is nothing at all: no wait can help."""
    found = _LIMIT.search(text)
    return found is not None and any(limit.strip("0.") == "" for limit in found[1].split(",") if limit)


def _is_region_wide(text: str) -> bool:
    return bool(_REGION.search(text)) and not _ZONE.search(text)


def _by_code(code: int, text: str, where: str) -> CloudError:
    """The class that the number asks for when the text has no word that we know."""
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
    The service, the operation or the line to it broke down.

    A create that is cancelled because its node is deleted ends with CANCELLED in the operation.
    """
    if where == Where.OPERATION:
        return LostRace(text, code) if code == CANCELLED else Transient(text, code)
    if code == CANCELLED or _CONNECTION_CUT.search(text):
        return AnswerLost(text, code)
    return Transient(text, code)


def _not_found(code: int, text: str, where: str) -> CloudError:
    """
    NodeGone is a proof of absence, so it is given only when it was the node (or the operation) that was not found.

    A create can miss its service account, its network or its zone; a read can miss its project. Guest attributes are
    not found until the guest has published them, on a node that lives (Compute Engine, "The resource 'hostkeys/' of
    type 'Guest Attribute' was not found"); an update that misses its node is a reason to look.
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
