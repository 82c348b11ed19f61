"""
Errors of the service: codes and texts as public issues and logs show them.

Only the fixed words are well attested; the numbers around them vary. Most service errors end in an event id, which the
caller adds (`with_event_id`), so that clients learn to match on the words alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from tpucare.testbed.emulator.world.config import Quota
from tpucare.testbed.emulator.world.records import ApiError, NodePath

CANCELLED = 1
INVALID_ARGUMENT = 3
DEADLINE_EXCEEDED = 4
NOT_FOUND = 5
ALREADY_EXISTS = 6
PERMISSION_DENIED = 7
RESOURCE_EXHAUSTED = 8
FAILED_PRECONDITION = 9
ABORTED = 10
INTERNAL = 13
UNAVAILABLE = 14

Status = tuple[int, str]
"""Code and message of an error inside an operation."""

_QUOTA_NAMES = {"v2": "V2", "v3": "V3", "v4": "V4", "v5e": "V5sLitepod", "v5p": "V5P", "v6e": "V6E"}
_TIER_NAMES = {"spot": "Preemptible", "on-demand": "", "reserved": "Reserved"}


def with_event_id(error: ApiError, event_id: int) -> ApiError:
    """The same error with the ending that texts of the service have."""
    text = f"{error.message} [EID: 0x{event_id:016x}]"
    return ApiError(
        error.code, text, resource=error.resource, quota=error.quota, reason=error.reason, field=error.field
    )


# --- errors of the call -----------------------------------------------------------------------------------------------


def not_found(name: str) -> ApiError:
    return ApiError(NOT_FOUND, f"Resource '{name}' was not found", resource=name)


def no_guest_attribute(query_path: str) -> ApiError:
    """Source: the answer of Compute Engine's getGuestAttributes until the guest has written some."""
    return ApiError(NOT_FOUND, f"The resource '{query_path}' of type 'Guest Attribute' was not found.")


def already_exists(path: NodePath) -> ApiError:
    return exists(str(path))


def exists(name: str) -> ApiError:
    return ApiError(ALREADY_EXISTS, f"Resource '{name}' already exists", resource=name)


def bad_argument(what: str) -> ApiError:
    return ApiError(INVALID_ARGUMENT, f"Cloud TPU received a bad request. {what}")


def unknown_type(accelerator: str, zone: str) -> ApiError:
    return bad_argument(
        f'The requested accelerator configuration for accelerator type, "{accelerator}", could not be found. '
        f"Please check the accelerator type; the accelerator {accelerator} was not found in zone {zone}"
    )


def unsupported_zone(zone: str) -> ApiError:
    return bad_argument(f'The requested zone "{zone}" is not supported.')


def unknown_runtime(runtime: str, accelerator: str, zone: str) -> ApiError:
    return bad_argument(
        f'The requested runtime version "{runtime}" could not be found for accelerator type "{accelerator}" '
        f"in zone {zone}"
    )


def permission(permission_name: str, parent: str) -> ApiError:
    return ApiError(PERMISSION_DENIED, f"Permission '{permission_name}' denied on '{parent}'")


def closed_zone(zone: str) -> ApiError:
    text = f"Permission denied on 'locations/{zone}' (or it may not exist)."
    return ApiError(PERMISSION_DENIED, text, reason="LOCATION_POLICY_VIOLATED")


def type_not_allowed(accelerator: str, zone: str) -> ApiError:
    text = f'User does not have permission to submit requests for accelerator type "{accelerator}" in location {zone}'
    return ApiError(PERMISSION_DENIED, text)


def free_trial() -> ApiError:
    return ApiError(PERMISSION_DENIED, "cannot create a TPU Node on a project linked to a free-trial billing account")


def service_account(email: str) -> ApiError:
    return ApiError(PERMISSION_DENIED, f"The user does not have access to service account '{email}'")


def rate_limit(verb: str, project: str, limit: int) -> ApiError:
    method = {"create": "CreateNode", "delete": "DeleteNode"}[verb]
    metric = f"tpu.googleapis.com/qps/{verb}"
    text = (
        f"Quota exceeded for quota metric '{metric}' and limit 'Maximum number of {method} requests per minute' of "
        f"service 'tpu.googleapis.com' for consumer 'project_number:{project}'. Limit: {limit}"
    )
    return ApiError(RESOURCE_EXHAUSTED, text, reason="RATE_LIMIT_EXCEEDED")


def read_rate(project: str, limit: int) -> ApiError:
    text = (
        "Quota exceeded for quota metric 'Read requests' and limit 'Read requests per minute' of service "
        f"'tpu.googleapis.com' for consumer 'project_number:{project}'. Limit: {limit}"
    )
    return ApiError(RESOURCE_EXHAUSTED, text, reason="RATE_LIMIT_EXCEEDED")


def page_too_large(limit: int) -> ApiError:
    return bad_argument(f"Invalid value for field page_size: must be at most {limit}.")


_CONSOLE = "https://console.developers.google.com"
_REFUSALS = {
    "api-disabled": (
        "Cloud TPU API has not been used in project {project} before or it is disabled. Enable it by visiting "
        f"{_CONSOLE}/apis/api/tpu.googleapis.com/overview?project={{project}} then retry.",
        "SERVICE_DISABLED",
    ),
    # gcloud's own project, against which calls with a person's credentials count when no quota project is set.
    "no-quota-project": (
        "Your application is authenticating by using local Application Default Credentials. The tpu.googleapis.com API "
        "requires a quota project, which is not set by default. Cloud TPU API has not been used in project "
        "764086051850 before or it is disabled.",
        "SERVICE_DISABLED",
    ),
    "billing-disabled": (
        "This API method requires billing to be enabled. Please enable billing on project #{project} by visiting "
        f"{_CONSOLE}/billing/enable?project={{project}} then retry. The billing account for the project is disabled.",
        "BILLING_DISABLED",
    ),
    "narrow-scopes": ("Request had insufficient authentication scopes.", "ACCESS_TOKEN_SCOPE_INSUFFICIENT"),
}


def project_refuses(why: str, project: str) -> ApiError:
    text, reason = _REFUSALS[why]
    return ApiError(PERMISSION_DENIED, text.format(project=project), reason=reason)


def no_network(project: str, name: str) -> ApiError:
    return bad_argument(f'The network "{name}" was not found in project {project}.')


def quota_id(quota: Quota) -> str:
    """Usual name of a limit, for example TPUV6EPreemptiblePerProjectPerRegionForTPUAPI."""
    if quota.id:
        return quota.id
    scope = "Region" if quota.region else "Zone"
    generation = _QUOTA_NAMES.get(quota.generation, quota.generation.upper())
    kind = ""
    if quota.generation in ("v2", "v3"):
        kind = "Pod" if quota.size == "multi-host" else ""
    elif quota.generation == "v5e":
        kind = "Serving" if quota.size == "single-host" else ""
    return f"TPU{generation}{_TIER_NAMES[quota.tier]}{kind}PerProjectPer{scope}ForTPUAPI"


def quota(exceeded: Sequence[Quota], project: str) -> ApiError:
    """One refusal for all limits that a create would break."""
    first = exceeded[0]
    if first.form == "exhausted":
        text = f"Quota '{quota_id(first)}' exhausted. Limit {first.limit} in {_scope(first)}"
    else:
        ids = ",".join(quota_id(one) for one in exceeded)
        limits = ",".join(str(one.limit) for one in exceeded)
        scopes = ",".join(_scope(one) for one in exceeded)
        text = f"Quota limit '{ids}' has been exceeded. Limit: {limits} in {scopes}."
    return ApiError(RESOURCE_EXHAUSTED, text, quota=(f"project:{project}", text))


def _scope(one: Quota) -> str:
    return f"region {one.region}" if one.region else f"zone {one.zone}"


def busy(path: NodePath) -> ApiError:
    return ApiError(ABORTED, f"unable to queue the operation: another one is in progress for '{path}'")


def deleting_already(path: NodePath, code: int) -> ApiError:
    text = f"Resource '{path}' is being deleted already; unable to queue the operation"
    return ApiError(code, text)


def not_stoppable(verb: str, why: str) -> ApiError:
    return ApiError(FAILED_PRECONDITION, f"Cloud TPU cannot {verb} this node: {why}.")


def queued_busy(name: str, state: str) -> ApiError:
    text = f"Queued resource '{name}' is in state {state}: delete its nodes first, or delete it with force"
    return ApiError(FAILED_PRECONDITION, text)


def not_resettable(name: str, state: str) -> ApiError:
    text = f"Queued resource '{name}' is in state {state}; only ACTIVE and SUSPENDED ones can be reset"
    return ApiError(FAILED_PRECONDITION, text)


def queue_full(zone: str) -> ApiError:
    text = f"The project has too many queued resources in location {zone}"
    return ApiError(RESOURCE_EXHAUSTED, text, reason="QUOTA_EXCEEDED")


def unavailable() -> ApiError:
    return ApiError(UNAVAILABLE, "The service is currently unavailable.")


def lost() -> ApiError:
    return ApiError(UNAVAILABLE, "Socket closed")


def internal() -> ApiError:
    return ApiError(INTERNAL, "Internal error. Please try again.")


# --- errors of the operation ------------------------------------------------------------------------------------------


def stockout(zone: str) -> Status:
    return RESOURCE_EXHAUSTED, (
        f'There is no more capacity in the zone "{zone}"; you can try in another zone where Cloud TPU Nodes are '
        "offered (see https://cloud.google.com/tpu/docs/regions)"
    )


def reservation_short() -> Status:
    return FAILED_PRECONDITION, (
        "Insufficient reserved capacity. Contact customer support to increase your reservation."
    )


def constraint(name: str, project: str) -> Status:
    return FAILED_PRECONDITION, f"Constraint constraints/{name} violated for project {project}."


def compute_quota(name: str, limit: int, scope: str) -> Status:
    return RESOURCE_EXHAUSTED, f"Quota '{name}' exceeded. Limit: {limit}.0 {scope}."


def queue_expired() -> Status:
    return DEADLINE_EXCEEDED, "The queued resource was not provisioned before the end of its validity"


def preempted_meanwhile(verb: str, state: str) -> Status:
    return INVALID_ARGUMENT, (f"Cloud TPU received a bad request. {verb} is not supported while in state {state}")


def internal_status() -> Status:
    return INTERNAL, "an internal error has occurred"


def deleted_meanwhile() -> Status:
    return CANCELLED, "The operation was cancelled: the node was deleted meanwhile"


def gone_meanwhile(name: str) -> Status:
    return NOT_FOUND, f"Resource '{name}' was not found"
