"""Decisions: silence and bad health."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from tests.kits.decisions import MUTE, ON_DEMAND, STALE, case, silent, table
from tests.kits.evidence import (
    FRESH,
    NO_PROGRESS,
    QUIET,
    REFUSED,
    SILENT,
    TRAINS,
    ago,
    evidence,
    launched,
    memory,
    name_of,
    node,
    past,
    run,
    running,
    seen,
    token,
)
from tpucare.model.actions import EffectKind
from tpucare.model.evidence import Progress
from tpucare.model.lifecycles import RunState
from tpucare.model.memory import FailureCounter
from tpucare.model.resources import Health

SILENCE = [
    case("silent for less than unreachable_after", evidence(silent(2), elsewhere_answers=True), TRAINS, "Wait"),
    case(
        "silent for unreachable_after, others answer",
        evidence(silent(3), elsewhere_answers=True),
        TRAINS,
        "Delete judged",
    ),
    case("two probes are too few", evidence(silent(60, probes=2), elsewhere_answers=True), TRAINS, "Wait"),
    case("nobody else answers", evidence(silent(60)), TRAINS, "Wait"),
    case(
        "nobody answers for 3x the time: the canary", evidence(silent(9), may_be_canary=True), TRAINS, "Delete judged"
    ),
    case("nobody answers: the canary waits", evidence(silent(8), may_be_canary=True), TRAINS, "Wait"),
    case(
        "never answered: twice the patience",
        evidence(silent(5, seen_since=ago(minutes=20)), elsewhere_answers=True),
        memory(past(answered=False)),
        "Wait",
    ),
    case(
        "never answered, others do",
        evidence(silent(6), elsewhere_answers=True),
        memory(past(answered=False)),
        "Delete judged",
    ),
    case(
        "never all answered, and the last of those that did came just now: it boots",
        evidence(
            silent(9, QUIET, SILENT, arrived_since=ago(minutes=1), seen_since=ago(minutes=20)), elsewhere_answers=True
        ),
        memory(past(answered=False)),
        "Wait",
    ),
    case(
        "never all answered, and nobody came for twice the patience",
        evidence(silent(16, QUIET, SILENT, arrived_since=ago(minutes=6)), elsewhere_answers=True),
        memory(past(answered=False)),
        "Delete judged",
    ),
    case(
        "a worker that answers no more is no booting one, whoever came just now",
        evidence(silent(3, QUIET, SILENT, arrived_since=ago(minutes=1)), elsewhere_answers=True),
        TRAINS,
        "Delete judged",
    ),
    # The node that replaced a canary never answered and was replaced again and again, while no worker answered
    # anywhere. Where no worker answers, `boot_timeout` alone judges a node that never answered; two of them in a row
    # block the place.
    case(
        "never answered, nobody does: no canary before boot_timeout",
        evidence(silent(25, seen_since=ago(minutes=29)), may_be_canary=True),
        memory(past(answered=False)),
        "Wait",
    ),
    case(
        "never answered, nobody does: boot_timeout ends the wait",
        evidence(silent(25, seen_since=ago(minutes=31))),
        memory(past(answered=False)),
        "Delete judged",
    ),
    case(
        "it refused our key and is silent since: a guard may drop our packets",
        evidence(silent(25, seen_since=ago(minutes=26)), elsewhere_answers=True),
        memory(past(answered=False, refused=True)),
        "Wait",
    ),
    case(
        "and boot_timeout ends that",
        evidence(silent(25, seen_since=ago(minutes=31)), elsewhere_answers=True),
        memory(past(answered=False, refused=True)),
        "Delete judged",
    ),
    case(
        "it answered since: silence is silence",
        evidence(silent(3), elsewhere_answers=True),
        memory(launched(refused=True), run=run()),
        "Delete judged",
    ),
    case(
        "on-demand: never for silence under 30 min",
        evidence(silent(29, what=node(tier=ON_DEMAND)), elsewhere_answers=True),
        TRAINS,
        "Wait",
    ),
    case(
        "on-demand: after 30 min",
        evidence(silent(30, what=node(tier=ON_DEMAND)), elsewhere_answers=True),
        TRAINS,
        "Delete judged",
    ),
    case(
        "silent on node after node, without a further step",
        evidence(silent(9), elsewhere_answers=True),
        replace(TRAINS, books={"infrastructure": FailureCounter(12, 12)}, step=9),
        "Delete judged gives up",
    ),
    case(
        "silent on node after node, and further each time",
        evidence(silent(9, running(step=10), SILENT), elsewhere_answers=True),
        replace(TRAINS, books={"infrastructure": FailureCounter(12, 12)}, step=9),
        "Delete judged",
    ),
    case(
        "silent on node after node, and nothing was launched on this one",
        evidence(silent(9), elsewhere_answers=True),
        memory(past(), books={"infrastructure": FailureCounter(12, 12)}),
        "Delete judged",
    ),
    case(
        "a worker is silent, progress goes on",
        evidence(
            silent(5, running(), SILENT, progress=Progress(token(), 9, ago(10), timedelta(seconds=15), ago(10))),
            elsewhere_answers=True,
        ),
        TRAINS,
        "Wait",
    ),
    case(
        "a worker fell silent, then one last step was seen",
        evidence(
            silent(9, running(), SILENT, progress=Progress(token(), 9, ago(minutes=8), timedelta(seconds=15), ago(10))),
            elsewhere_answers=True,
        ),
        TRAINS,
        "Delete judged",
    ),
    case(
        "a worker is silent, and steps take long",
        evidence(
            silent(9, running(), SILENT, progress=Progress(token(), 9, ago(minutes=8), timedelta(minutes=1), ago(10))),
            elsewhere_answers=True,
        ),
        TRAINS,
        "Wait",
    ),
    case(
        "silent since long before it was READY: it was booting",
        evidence(
            silent(10, QUIET, SILENT, seen_since=ago(minutes=20), state_since=ago(minutes=5)), elsewhere_answers=True
        ),
        memory(past(answered=False)),
        "Wait",
    ),
    case("some workers silent for 30 s", evidence(silent(0.5, running(), SILENT)), TRAINS, "Wait"),
    case("some workers silent, no progress: stop the rest", evidence(silent(1, running(), SILENT)), TRAINS, "Stop"),
    case(
        "the rest was stopped already",
        evidence(silent(1, running(), SILENT), ended_effects={EffectKind.STOP.of(name_of(0)): ago(30)}),
        TRAINS,
        "Wait",
    ),
    case(
        "worker 0 never told of progress",
        evidence(silent(1, running(), SILENT, progress=NO_PROGRESS)),
        TRAINS,
        "Wait",
    ),
    case("our key is refused: it may be late", evidence(seen(node(), REFUSED, refused_since=ago(20))), FRESH, "Wait"),
    case("our key is refused", evidence(seen(node(), REFUSED, refused_since=ago(31))), FRESH, "AddSshKey"),
    case(
        "our key could not be written: not at once again",
        evidence(
            seen(node(), REFUSED, refused_since=ago(99)), ended_effects={EffectKind.ADD_SSH_KEY.of(name_of(0)): ago(50)}
        ),
        FRESH,
        "Wait person",
    ),
    case(
        "our key could not be written: again",
        evidence(
            seen(node(), REFUSED, refused_since=ago(99)), ended_effects={EffectKind.ADD_SSH_KEY.of(name_of(0)): ago(61)}
        ),
        FRESH,
        "AddSshKey",
    ),
    case(
        "our key was written",
        evidence(seen(node(), REFUSED, refused_since=ago(60))),
        memory(past(keyed=True)),
        "Wait",
    ),
    case(
        "our key was written and does not serve",
        evidence(seen(node(), REFUSED, refused_since=ago(minutes=3))),
        memory(past(keyed=True)),
        "Wait person",
    ),
]

SICK = node(health=Health.TIMEOUT)
HEALTH = [
    case("health bad, progress goes on", evidence(seen(SICK, running(), unhealthy_since=ago(hours=5))), TRAINS, "Wait"),
    case(
        "health bad, no progress for unhealthy_after",
        evidence(seen(SICK, running(), unhealthy_since=ago(hours=2), progress=MUTE)),
        TRAINS,
        "Stop then judged",
    ),
    case(
        "health bad for less than that",
        evidence(seen(SICK, running(), unhealthy_since=ago(minutes=50), progress=MUTE)),
        TRAINS,
        "Wait",
    ),
    case(
        "health bad, on-demand",
        evidence(
            seen(
                node(health=Health.TIMEOUT, tier=ON_DEMAND),
                running(),
                unhealthy_since=ago(hours=2),
                progress=MUTE,
            )
        ),
        TRAINS,
        "Wait",
    ),
    case(
        "REPAIRING beyond unhealthy_after without progress",
        evidence(seen(node("REPAIRING"), running(), state_since=ago(hours=1), progress=STALE)),
        TRAINS,
        "Stop then judged",
    ),
    # An hour of REPAIRING deleted a run that tells no step, though its log grew. As with bad health, any change in the
    # run is a sign of life.
    case(
        "REPAIRING, no step is told and the log moves",
        evidence(
            seen(
                node("REPAIRING"),
                running(),
                state_since=ago(hours=1),
                progress=Progress(token(), 0, None, None, ago(10)),
            )
        ),
        TRAINS,
        "Wait",
    ),
    case(
        "REPAIRING, and one last step was seen",
        evidence(
            seen(
                node("REPAIRING"),
                running(),
                state_since=ago(hours=2),
                progress=Progress(token(), 9, ago(minutes=61), timedelta(seconds=15), ago(minutes=61)),
            )
        ),
        TRAINS,
        "Stop then judged",
    ),
    case(
        "REPAIRING, on-demand: never deleted for health",
        evidence(seen(node("REPAIRING", tier=ON_DEMAND), QUIET, state_since=ago(hours=2), progress=NO_PROGRESS)),
        memory(launched(), run=run(state=RunState.ENDED)),
        "Launch",
    ),
    case(
        "REPAIRING, stopped",
        evidence(
            seen(node("REPAIRING"), QUIET, state_since=ago(hours=1), progress=STALE),
            ended_effects={EffectKind.STOP.of(name_of(0)): ago(9)},
        ),
        TRAINS,
        "Delete judged",
    ),
    case(
        "REPAIRING with progress",
        evidence(seen(node("REPAIRING"), running(), state_since=ago(hours=1))),
        TRAINS,
        "Wait",
    ),
]


test_what_comes_of_silence = table(SILENCE)


test_what_comes_of_health = table(HEALTH)
