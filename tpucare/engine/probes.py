"""
Schedules probes of workers and applies their reports; decides when silence counts as evidence against a node.

On the engine's thread only; the probes run on the Executor. A node is probed every second until its run makes progress
or its reports brought nothing new for ten minutes, then every 15 s (more seldom with hundreds of workers), and at once
after a hint of the launcher. Verdicts are left to the planner.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from datetime import timedelta

from tpucare.engine.effects import Ports
from tpucare.engine.state import EngineState
from tpucare.engine.tracking import NodeTrack, SlotTrack, is_running, newest_checkpoint, newest_step
from tpucare.model.evidence import SUPPORTING_OBSERVATIONS
from tpucare.model.lifecycles import RunState
from tpucare.model.ports import Finished, Lane
from tpucare.model.resources import PENDING_STATES, USABLE_STATES, NodeState
from tpucare.model.runs import UNPREPARED, Archive, Contact, NodeReport, Phase, ProbeOrder, preparation_text
from tpucare.model.text import length, size_text
from tpucare.planner import cadence, remember
from tpucare.planner.backoff import refusal_pause
from tpucare.planner.predicates import cache_scope
from tpucare.planner.run import EXIT_IS_SEEN_REPORTS, got_further, is_row_open

# The workers of an UNKNOWN node may answer.
PROBED = PENDING_STATES | USABLE_STATES | {NodeState.UNKNOWN}
# Then a job without progress reports, a long setup or a silent worker is probed at the slow pace.
NEWS_IS_FRESH_FOR = timedelta(minutes=10)
# A probe costs 3 to 4 ms of CPU per worker; all together may take a tenth of a core. Most events also drop a
# connection, which hints at once, so the probes of a large fleet may be slower.
WORKERS_A_SECOND = 18


class Prober:
    """Probes every node when it is due."""

    def __init__(self, state: EngineState, ports: Ports, liveness: Liveness, rng: random.Random) -> None:
        self.state = state
        self.ports = ports
        self.liveness = liveness
        self.rng = rng
        self._probes: list[tuple[float, str, str]] = []

    def next_due(self) -> float | None:
        return self._probes[0][0] if self._probes else None

    def apply_hints(self, now: float) -> None:
        """Probe nodes with a dropped connection or a newly open port now; a hint is never a verdict."""
        for key in sorted(self.ports.launcher.hints()):
            if found := self.state.find_node(key):
                self.schedule_probe(*found, now)
                # A preemption that dropped the connection may be listed by now.
                self.state.project(key.project).list_soon(now, self.state.settings.fast_poll)

    def schedule_probe(self, track: SlotTrack, seen: NodeTrack, due: float) -> None:
        seen.probe_due = due
        heapq.heappush(self._probes, (due, track.slot.name, seen.node.name))

    def resume_probes(self, track: SlotTrack, seen: NodeTrack) -> None:
        """Schedule a probe of a node whose probes had stopped, such as in an unreachable zone."""
        if seen.probe_due is None and seen.workers is not None:
            self.schedule_probe(track, seen, self.state.clock.monotonic())

    def probe_due_nodes(self, now: float) -> None:
        """Begin a probe of every node that is due."""
        while self._probes and self._probes[0][0] <= now:
            due, slot, name = heapq.heappop(self._probes)
            track = self.state.slots.get(slot)
            seen = track.nodes.get(name) if track is not None else None
            if track is None or seen is None or seen.probe_due != due or seen.probing:
                continue
            past = track.memory.node(name)
            # Nodes that are not in memory are not probed.
            is_asked = past is not None and past.serves
            if seen.workers is None or seen.node.state not in PROBED or not is_asked:
                seen.probe_due = None
                continue
            self._begin_probe(track, seen, past.attempt if past is not None else 0)

    def _begin_probe(self, track: SlotTrack, seen: NodeTrack, attempt: int) -> None:
        job, run = track.slot.job, track.memory.run
        assert seen.workers is not None
        order = ProbeOrder(
            seen.workers,
            track.slot.name,
            attempt,
            progress=job.progress if job is not None else "",
            checkpoint=job.checkpoint if job is not None else "",
            everything=run is not None and not (run.state.is_wanted or run.state is RunState.ENDED),
            cadence=self._new_cadence(track, seen),
            run=run.token if run is not None else "",
        )
        seen.probing, seen.probe_due = True, None
        tag = ("probe", track.slot.name, seen.node.name, str(seen.generation))
        self.state.queue_effect((Lane.PROBE, tag, lambda: self.ports.launcher.probe(order)))

    def _new_cadence(self, track: SlotTrack, seen: NodeTrack) -> str:
        """The advice how often to save, where it is news to a worker of the run; it travels with the probe."""
        run, job = track.memory.run_on(seen.node.name), track.slot.job
        if run is None or not run.state.is_wanted or job is None or job.foreign:
            return ""
        advice = self.state.cadence_of(track)
        workers = seen.report.workers if seen.report is not None else ()
        told = [worker.cadence_seconds for worker in workers if worker.contact is Contact.ANSWERED]
        is_news = any(cadence.differs(seconds, advice.interval.total_seconds()) for seconds in told or [None])
        return cadence.cadence_text(advice, self.state.clock.now()) if is_news else ""

    def apply_probe(self, slot: str, name: str, generation: str, finished: Finished) -> None:
        """Apply a probe that ended, and schedule the next; reports of an earlier *generation* are dropped."""
        track = self.state.slots.get(slot)
        seen = track.nodes.get(name) if track is not None else None
        if track is None or seen is None:
            return
        seen.probing = False
        now = self.state.clock.monotonic()
        report = finished.result
        if finished.error is not None:
            self.state.set_aside(track, finished.error)
        elif isinstance(report, NodeReport) and report.node_id == seen.node.id and str(seen.generation) == generation:
            self._apply_report(track, seen, report)
        # A hint came during the probe, whose report may be older.
        hinted = seen.probe_due is not None
        self.schedule_probe(track, seen, now if hinted else now + self._pause(track, seen))

    def _pause(self, track: SlotTrack, seen: NodeTrack) -> float:
        if seen.refusals:
            return refusal_pause(seen.refusals).total_seconds()
        report = seen.report
        tells = seen.progress.first_step is not None or seen.progress.signals > 0
        steady = report is not None and report.all_answer and is_running(report) and tells
        if not steady and self._has_news(track, seen):
            return self.state.settings.fast_probe
        crowd = (len(self._probes) + 1) * len(seen.workers or ())
        return max(self.state.settings.probe, crowd / WORKERS_A_SECOND) * self.rng.uniform(0.8, 1.2)

    def _has_news(self, track: SlotTrack, seen: NodeTrack) -> bool:
        marks = (seen.phase_since, seen.ended_since, seen.answering_since, seen.silent_since, seen.refused_since)
        newest = max((mark.observed for mark in marks if mark is not None), default=None)
        now = self.state.project(track.slot.project).observed
        return newest is None or now - newest < NEWS_IS_FRESH_FOR

    def _apply_report(self, track: SlotTrack, seen: NodeTrack, report: NodeReport) -> None:
        view = self.state.project(track.slot.project)
        before, token, signals = seen.report, seen.progress.token, seen.progress.signals
        self.liveness.record_answers(seen.node.name, report)
        mark = view.mark if view.fresh else seen.advance_own_clock(self.state.clock.monotonic(), view.mark, view.cap)
        changed = seen.apply_report(report, mark) or not view.fresh
        if seen.progress.token != token:
            # The signs counted before are those of an earlier run.
            signals = 0
        self.liveness.update_silence(track)
        if report.all_answer:
            self.state.update_memory(track, remember.mark_answered(track.memory, seen.node.name))
        if seen.refusals:
            self.state.update_memory(track, remember.mark_key_refused(track.memory, seen.node.name))
        self._add_events(track, seen, before, report, signals)
        self._apply_saves(track, seen, before, report)
        self._apply_preparation(track, seen, before, report)
        # A decision may depend on enough reports without progress, on a confirmed end, on the second sign (this job
        # reports progress at all) and on a step beyond earlier failures.
        stood_still = SUPPORTING_OBSERVATIONS in (seen.progress.unchanged, seen.progress.still)
        ended = seen.ended_reports == EXIT_IS_SEEN_REPORTS
        second = seen.progress.signals == 2 and signals < 2
        further = is_row_open(track.memory) and got_further(seen.freeze(), track.memory)
        if changed or stood_still or ended or second or further:
            self.state.dirty[track.slot.name] = None

    def _add_events(
        self, track: SlotTrack, seen: NodeTrack, before: NodeReport | None, report: NodeReport, signals: int
    ) -> None:
        name = seen.node.name
        if track.memory.run_on(name) is None and report.all_answer and (before is None or not before.all_answer):
            self.state.add_event(track, "answers", f"all workers of {name} answer", node=name)
        run = track.memory.run
        first = report.workers[0] if report.workers else None
        if first is None or run is None or first.token != run.token:
            return
        old = before.workers[0].phase if before is not None and before.workers else None
        if first.phase is not old and first.phase is not Phase.NONE:
            # A run of start_fn stays in its last phase, so a found one may have ended long ago.
            over = old is None and first.foreign is not None and not any(worker.alive for worker in report.workers)
            word = "ended" if over and first.phase is Phase.RUN else first.phase.value
            self.state.add_event(track, "phase", f"{run.token}: {word}", node=name, phase=word)
        if signals == 0 and seen.progress.signals > 0:
            step, checkpoint = newest_step(report), newest_checkpoint(report)
            since = max(timedelta(), self.state.clock.now() - run.launched_at)
            text = f"{run.token}: first sign of progress, {length(since)} after its launch"
            seconds = round(since.total_seconds(), 1)
            self.state.add_event(track, "progress", text, node=name, step=step, checkpoint=checkpoint, seconds=seconds)

    def _apply_saves(self, track: SlotTrack, seen: NodeTrack, before: NodeReport | None, report: NodeReport) -> None:
        """Remember the cost of a save, and tell a changed cadence of a run; of one that measures none only in debug."""
        run = track.memory.run_on(seen.node.name)
        first = report.workers[0] if report.workers else None
        if first is None or run is None or first.token != run.token:
            return
        self.state.update_memory(track, remember.record_save_cost(track.memory, first.save_seconds))
        old = before.workers[0] if before is not None and before.workers else None
        if first.cadence_seconds is None or old is None or old.token != run.token:
            return
        was_told, measures = old.cadence_seconds, first.save_seconds is not None
        if first.cadence_seconds == was_told and measures is (old.save_seconds is not None):
            return
        advice = self.state.cadence_of(track)
        last = timedelta(seconds=was_told) if was_told and was_told != first.cadence_seconds else None
        text = f"{run.token}: {cadence.describe_cadence(advice, last)}"
        level = "info" if measures else "debug"
        fields = {
            "interval_seconds": first.cadence_seconds,
            "lost_minutes_a_day": round(advice.lost_minutes_a_day(), 1),
            "before_minutes_a_day": round(advice.lost_minutes_a_day(last or cadence.USUAL_INTERVAL), 1),
        }
        self.state.add_event(track, "cadence", text, node=seen.node.name, level=level, **fields)

    def _apply_preparation(
        self, track: SlotTrack, seen: NodeTrack, before: NodeReport | None, report: NodeReport
    ) -> None:
        """Tell how the run came to its environment, and remember the one that it stored for later nodes."""
        run = track.memory.run_on(seen.node.name)
        first = report.workers[0] if report.workers else None
        if first is None or run is None or first.token != run.token:
            return
        old = before.workers[0] if before is not None and before.workers else None
        last = old.preparation if old is not None and old.token == run.token else UNPREPARED
        now, name = first.preparation, seen.node.name
        self._apply_archive(track, name, run.token, now.archive)
        if now.refused and not last.refused:
            text = f"{run.token}: the environment is not kept: {now.refused}"
            self.state.add_event(track, "environment", text, node=name, level="warning")
        # A process that finds the run in its last phase has not seen it come there.
        if now.environment and not last.environment and old is not None:
            text = f"{run.token}: {preparation_text(now)}"
            self.state.add_event(
                track,
                "environment",
                text,
                node=name,
                environment=now.environment,
                fetch_seconds=now.fetch_seconds,
                setup_seconds=now.setup_seconds,
            )

    def _apply_archive(self, track: SlotTrack, node: str, token: str, archive: Archive | None) -> None:
        if archive is None or (track.memory.stored is not None and track.memory.stored.archive == archive):
            return
        # The worker's word counts for its own scope alone: it must not choose what other fleets believe.
        if archive.scope != cache_scope(track.slot, track.memory, node):
            return
        self.state.update_memory(track, remember.record_archive(track.memory, archive, self.state.clock.now()))
        text = f"{token}: the environment is kept for later nodes ({size_text(archive.bytes)})"
        self.state.add_event(track, "environment", text, node=node, archive=archive.key)


# --- liveness of workers: silence is a verdict only while our own network is known to work ----------------------------
# Where no worker anywhere answers, one slot at a time may be the canary: its node is replaced, and the others wait for
# an answer of the new one.


ANSWER_COUNTS_FOR = 60.0


class Liveness:
    """Recent answers and silences of the workers of all slots."""

    def __init__(self, state: EngineState) -> None:
        self.state = state
        self.silent: set[str] = set()
        self.canary: str | None = None
        self._answers: deque[tuple[float, str]] = deque()

    def record_answers(self, node: str, report: NodeReport) -> None:
        """Record answers of *node*; called before the report is applied to its own track."""
        if not any(worker.contact is Contact.ANSWERED for worker in report.workers):
            return
        now = self.state.clock.monotonic()
        if not self._answers or now - self._answers[-1][0] > ANSWER_COUNTS_FOR:
            self._restart_silences()
        self._answers.append((now, node))
        self.canary = None

    def update_silence(self, track: SlotTrack) -> None:
        """Update whether a node of the slot is silent."""
        if any(seen.silent_since is not None for seen in track.nodes.values()):
            self.silent.add(track.slot.name)
        else:
            self.silent.discard(track.slot.name)

    def suspects(self) -> list[str]:
        """Slots with a silent node that is not CREATING; their verdicts depend on the answers of others."""
        tracks = ((name, self.state.slots.get(name)) for name in self.silent)
        return [name for name, track in tracks if track is not None and any(map(_is_suspect, track.nodes.values()))]

    def _restart_silences(self) -> None:
        """
        Begin all silences anew: a worker answers after none did, so the silence was an outage of ours.

        Else the first answer after the outage would turn the silence of all workers not yet probed into verdicts.
        """
        for name in self.silent:
            track = self.state.slots.get(name)
            mark = self.state.project(track.slot.project).mark if track is not None else None
            for seen in track.nodes.values() if track is not None else ():
                if seen.silent_since is not None and mark is not None:
                    seen.silent_since, seen.silent_probes = mark, 0

    def elsewhere_answers(self, track: SlotTrack) -> bool:
        """A worker that is not silent itself answered within the last minute."""
        now = self.state.clock.monotonic()
        while self._answers and now - self._answers[0][0] > ANSWER_COUNTS_FOR:
            self._answers.popleft()
        silent = {name for name, seen in track.nodes.items() if seen.silent_since is not None}
        if any(name not in silent for _, name in self._answers):
            return True
        # An answering worker of the same node shows as well that our network works.
        reports = [seen.report for name, seen in track.nodes.items() if name in silent and seen.report is not None]
        return any(worker.contact is Contact.ANSWERED for report in reports for worker in report.workers)

    def may_be_canary(self, track: SlotTrack) -> bool:
        """This slot is the canary, or there is none and it is the longest silent of those that can act."""
        canary = self.state.slots.get(self.canary) if self.canary is not None else None
        if canary is not None and canary.memory.wants_node(canary.slot):
            return canary is track
        return track.slot.name == min(filter(None, map(self._canary_claim, self.silent)), default=(None, ""))[1]

    def _canary_claim(self, slot: str) -> tuple[timedelta, str] | None:
        """Since when a node of *slot* is silent that `decide` may replace now; None: no such node."""
        track = self.state.slots.get(slot)
        if track is None or not track.memory.wants_node(track.slot):
            return None
        if not self.state.project(track.slot.project).fresh:
            return None
        marks = [
            seen.silent_since.observed for seen in track.nodes.values() if seen.silent_since and _may_go(track, seen)
        ]
        return (min(marks), slot) if marks else None


def _is_suspect(seen: NodeTrack) -> bool:
    return seen.silent_since is not None and seen.node.state is not NodeState.CREATING


def _may_go(track: SlotTrack, seen: NodeTrack) -> bool:
    past = track.memory.node(seen.node.name)
    if past is None or not past.serves or not past.answered:
        return False
    return seen.node.state in USABLE_STATES and not seen.zone_unreachable
