"""
The demo on a terminal: the slot's timeline as it happens, step and loss below it; plain lines without a terminal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tpucare.model.text import counted
from tpucare.testbed.demo.ray_story import TASKS, RayReport
from tpucare.testbed.demo.run import Glance, Report
from tpucare.testbed.demo.setup import DemoOptions
from tpucare.testbed.demo.timeline import PHASES, Told

# The events of a slot, in words for a person who is new to tpucare.
_SAID = {
    "create": ("cyan", "asks for a node"),
    "create-failed": ("yellow", "no capacity"),
    "create-accepted": ("cyan", "create accepted"),
    "answers": ("blue", "all workers answer over SSH"),
    "launched": ("green", "the run is started on all workers"),
    "progress": ("bold green", "trains"),
    "delete": ("magenta", "deletes"),
    "gone": ("magenta", "is gone"),
    "done": ("bold green", "finished"),
    "wake": ("cyan", "wakes"),
    "rest": ("magenta", "rests"),
    "task": ("bold green", ""),
}


class Screen:
    """Shows glances; `update` is cheap enough to be called several times a second."""

    def __init__(self, console: Console, options: DemoOptions) -> None:
        self.console = console
        self.options = options
        self.began = time.monotonic()
        self._live = Live(console=console, refresh_per_second=8, transient=True) if console.is_terminal else None
        self._act = ""

    def shown(self) -> AbstractContextManager[object]:
        return self._live if self._live is not None else nullcontext()

    def update(self, glance: Glance) -> None:
        for event in glance.events:
            line = self._line(event)
            if line is not None:
                self.console.print(line)
        if self._live is not None:
            self._live.update(self._status(glance))
        elif glance.act != self._act:
            self._act = glance.act
            self.console.print(f"{self._clock()}  {glance.act}", highlight=False)

    def follow(self, events: Sequence[Told], act: str) -> None:
        """As `update`, for a demo that trains nothing."""
        self.update(Glance(list(events), None, "", "", 0, act))

    def _clock(self) -> str:
        return f"{time.monotonic() - self.began:5.1f} s"

    def _line(self, event: Told) -> Text | None:
        if event.kind == "state" and event.fields.get("state") == "PREEMPTED":
            style, said = "bold red", "is PREEMPTED"
        elif event.kind in _SAID:
            style, said = _SAID[event.kind]
        else:
            return None
        detail = f" (step {event.fields['step']})" if event.fields.get("step") is not None else ""
        reason = ""
        if event.kind == "task":
            said = event.text
        elif event.kind == "create":
            reason = f": {event.fields.get('accelerator_type')} in {event.fields.get('zone')}"
        elif event.kind in ("create-failed", "delete"):
            reason = f": {event.text.partition(': ')[2].partition(';')[0]}"
        elif event.kind in ("wake", "rest"):
            reason = f": {event.text.partition(', ')[2]}"
        name = event.node or event.text.partition(":")[0]
        return Text.assemble((self._clock(), "dim"), "  ", (f"{name:<12}", "bold"), (said + detail, style), reason)

    def _status(self, glance: Glance) -> RenderableType:
        steps, life = self.options.steps, glance.life
        if life is None and not glance.node:
            return Text(f"\n{self._clock()}  {glance.act}")
        grid = Table.grid(padding=(0, 2))
        last = life.last if life is not None else 0
        loss = f"loss {life.loss:.3f}" if life is not None and life.loss is not None else ""
        bar = ProgressBar(total=steps, completed=last, width=40)
        grid.add_row(self._clock(), f"attempt {glance.attempts}", glance.node or "-", glance.zone or "-")
        return Group(Text(""), grid, Table.grid(padding=(0, 2)), _row(f"step {last}/{steps}", bar, loss, glance.act))


def _row(*cells: RenderableType) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_row(*cells)
    return grid


def show_report(console: Console, report: Report) -> None:
    """Print the report: the losses, the length of each recovery, and the proof."""
    table = Table(title="recoveries", title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0))
    for head in ("lost", "next"):
        table.add_column(head, no_wrap=True)
    for head in (*(phase.replace("_", " ") for phase in PHASES), "in all", "redone"):
        table.add_column(head, justify="right", no_wrap=True)
    for recovery in report.recoveries:
        lengths = [f"{recovery.seconds.get(phase, 0.0):.1f} s" for phase in PHASES]
        lost, following = (name.rpartition("-")[2] for name in (recovery.lost_node, recovery.new_node))
        redone = f"{recovery.steps_redone} of {recovery.allowed}"
        table.add_row(lost, f"{following} {recovery.zone}", *lengths, f"{recovery.total:.1f} s", redone)
    if report.recoveries:
        console.print(table)
        console.print("[dim]redone: steps made twice, of those that a checkpoint interval and a save allow[/dim]")
    zones = " -> ".join(report.zones)
    console.print(f"{report.attempts} attempts ({zones}), step {report.final_step}", highlight=False)
    same = "equal, bit for bit" if report.params_match else "DIFFER"
    console.print(f"parameters  {report.params}\nundisturbed {report.reference}\n  -> {same}", highlight=False)
    console.print(f"left over: {_left_over(report)}; {report.seconds:.0f} s in all", highlight=False)
    _show_verdict(console, report.faults)


def show_ray_report(console: Console, report: RayReport) -> None:
    """Print the report: slices, tasks, the preemption, the proof, and the time of set-up and story."""
    nodes = "; ".join(f"{slot}: {', '.join(names)}" for slot, names in report.slices.items())
    console.print(f"slices      {report.asked} asked for, {len(report.slices)} created ({nodes})", highlight=False)
    console.print(f"tasks       {report.tasks} of {TASKS} done, job status {report.job_status}", highlight=False)
    healed = f"a task ran on its slice again after {report.healed_seconds:.1f} s" if report.healed_seconds else "LOST"
    console.print(f"preempted   {report.lost or 'none'}: {healed}", highlight=False)
    console.print(f"left over   {_left_over(report)}", highlight=False)
    console.print(f"set-up {report.setup_seconds:.0f} s, story {report.story_seconds:.0f} s", highlight=False)
    _show_verdict(console, report.faults)


def _left_over(report: Report | RayReport) -> str:
    processes = counted(len(report.leaked_processes), "process", "processes")
    return f"{counted(len(report.leaked_nodes), 'node')}, {processes}"


def _show_verdict(console: Console, faults: Sequence[str]) -> None:
    for fault in faults:
        console.print(f"[bold red]broken:[/bold red] {fault}", highlight=False)
    if not faults:
        console.print("[bold green]every promise kept[/bold green]")


def watch(console: Console, options: DemoOptions) -> tuple[AbstractContextManager[object], Callable[[Glance], None]]:
    """The context of the live view, and the function that shows each glance."""
    screen = Screen(console, options)
    return screen.shown(), screen.update
