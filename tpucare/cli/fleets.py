"""Commands about fleets: write a file, check it, apply it, and change a fleet's desired state."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from tpucare.cli.common import CommandError, ask, bounds_line, options, print_json, say, warn, work_line
from tpucare.model.text import counted, length

# An answer of a cluster's head that is not older describes the present.
_JUST_NOW_SECONDS = 30.0

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
YesFlag = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
TargetWord = Annotated[str, typer.Argument(metavar="FLEET|SLOT", help="A fleet with all its slots, or one slot.")]


def init(
    name: Annotated[str, typer.Argument(help="Name of the fleet; default: the template's.")] = "",
    template: Annotated[str, typer.Option(help="Template to print.", metavar="NAME")] = "single",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to this new file.")] = None,
    list_them: Annotated[bool, typer.Option("--list", help="List the templates, one per line.")] = False,
) -> None:
    """
    Print a template of a fleet file to edit, or write it to a new file.

    \b
    Example: tpucare init my-run --template pod > my-run.yaml
    Example: tpucare init my-run -o my-run.yaml
    """
    ready = _templates()
    if list_them:
        for word, text in sorted(ready.items()):
            say(f"{word:10} {text.splitlines()[0].removeprefix('# ')}")
        return
    if template not in ready:
        raise CommandError(f"there is no template {template}; write one of {', '.join(sorted(ready))}")
    text = _named(ready[template], name) if name else ready[template]
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise CommandError(f"{output} exists already; choose another name, or delete it") from None
    say(f"{output}: edit it, then `tpucare check {output}`")


def _named(text: str, name: str) -> str:
    """The template with that name, in its checkpoint too. Raises: ConfigError: not a valid name of a fleet."""
    from tpucare.fleetfile.values import fleet_name
    from tpucare.model.errors import ConfigError

    try:
        fleet_name(name)
    except ValueError as error:
        raise ConfigError(f"name: {error}") from None
    old = next(line for line in text.splitlines() if line.startswith("name:")).partition(":")[2].strip()
    return re.sub(rf"(?m)(^name: |checkpoint: gs://my-bucket/){re.escape(old)}\b", rf"\g<1>{name}", text)


def _templates() -> dict[str, str]:
    """Templates by name: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).parent.parent
    for folder in (package / "_templates" / "fleets", package.parent / "templates" / "fleets"):
        if found := {path.stem: path.read_text("utf-8") for path in folder.glob("*.yaml")}:
            return found
    raise CommandError("this installation has no templates; install the package again")


def check(
    files: Annotated[list[Path] | None, typer.Argument(metavar="FILE...", help="Fleet files.")] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of fleet files instead.")] = False,
    json_out: JsonFlag = False,
) -> None:
    """
    Check fleet files as the daemon would; prints each problem with its file, line and key. Does not ask the cloud.

    \b
    Example: tpucare check pod.yaml
    Example: tpucare check --schema > fleet.schema.json
    """
    from tpucare.fleetfile import parse as fleets
    from tpucare.fleetfile.limits import warnings_of
    from tpucare.fleetfile.schema import json_schema
    from tpucare.model.errors import ConfigError
    from tpucare.service.fleet_folder import folder_of, read_text

    if schema:
        print_json(json_schema())
        return
    if not files:
        raise typer.BadParameter("give a FILE or --schema")
    problems: list[str] = []
    good = []
    for path in files:
        try:
            text = read_text(path)
            fleet = fleets.parse(text, file=str(path), folder=folder_of(text, path.absolute().parent))
            good.append(fleet)
        except ConfigError as error:
            problems += str(error).splitlines()
    try:
        fleets.refuse_shared_names(good)
    except ConfigError as error:
        problems += str(error).splitlines()
    limits = warnings_of(good)
    if json_out:
        rows = [_summary(fleet) for fleet in good]
        print_json({"ok": not problems, "fleets": rows, "problems": problems, "warnings": limits})
    else:
        for fleet in good:
            for line in fleet.warnings:
                warn(line)
            say("{file}: {name}: {count} x {types} in {zones}".format(**_summary(fleet)))
        for line in limits:
            warn(line)
    if problems:
        raise ConfigError("\n".join(problems))


def _summary(fleet: Any) -> dict[str, Any]:
    return {
        "file": fleet.file,
        "name": fleet.name,
        "count": fleet.count,
        "types": ", ".join(dict.fromkeys(place.accelerator_type for place in fleet.places)),
        "zones": ", ".join(dict.fromkeys(place.zone for place in fleet.places)),
        "workers": fleet.workers,
        "warnings": list(fleet.warnings),
    }


def plan(
    context: typer.Context,
    target: Annotated[
        str, typer.Argument(metavar="[FLEET|SLOT|FILE]", help="Default: every slot. FILE: preview of `apply`.")
    ] = "",
    json_out: JsonFlag = False,
) -> None:
    """
    Print the daemon's next action for every slot, with its reason. Changes nothing.

    For a fleet file: the changes that `apply` would make. Without a daemon this process reads the fleets folder, asks
    the cloud and the workers once, and decides as the daemon would.

    \b
    Example: tpucare plan pod
    Example: tpucare plan pod.yaml
    """
    from tpucare.service import client

    if target.endswith((".yaml", ".yml")):
        _preview(options(context), Path(target), json_out)
        return
    answer = client.plan(options(context, target), target)
    if json_out:
        print_json(answer)
        return
    for row in answer["slots"]:
        doing = row["action"] + (f" {row['about']}" if row["about"] else "")
        busy = f" [under way: {', '.join(row['in_flight'])}]" if row["in_flight"] else ""
        say(f"{row['slot']}: {doing}: {row['why']}{busy}")
        if row["work"]:
            say(work_line(row["slot"], row["work"]))
    for line in filter(None, (bounds_line(fleet, cost) for fleet, cost in answer["costs"].items())):
        say(line)
    if not answer["slots"]:
        say("no fleet is declared: run `tpucare apply FILE`")
    _say_order(answer["places"])


def _preview(chosen: Any, file: Path, json_out: bool) -> None:
    from tpucare.service import client

    answer = client.preview(chosen, file)
    if json_out:
        print_json(answer)
        return
    for line in answer["warnings"]:
        warn(line)
    _say_changes(answer)
    if answer["added"]:
        count = len(answer["added"])
        say(f"apply would request {count} node{'s' if count != 1 else ''}: {', or '.join(answer['places'])}")
    _say_order(answer["order"])
    if answer["changes"]:
        _say_when_used(answer)
    _say_each(answer["surplus"], "would no longer be declared, but run on: `tpucare down SLOT` ends it")


def apply(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="Fleet file.", metavar="FILE")],
    restart: Annotated[bool, typer.Option("--restart", help="Restart the job now, on its present node.")] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Replace the nodes now; asks first.")] = False,
    paused: Annotated[
        bool, typer.Option("--paused", help="Request no node until `resume`: time for `adopt-node`.")
    ] = False,
    yes: YesFlag = False,
    json_out: JsonFlag = False,
) -> None:
    """
    Check a fleet file and copy it into the daemon's folder; the daemon then cares for the fleet. A fleet
    that is down starts again.

    A changed job is used from the next launch on, a changed TPU from the next node on; an edit alone never touches a
    live node.

    \b
    Example: tpucare apply pod.yaml
    Example: tpucare apply pod.yaml --restart
    Example: tpucare apply pod.yaml --paused
    """
    from tpucare.fleetfile import parse as fleets
    from tpucare.service.client import execute
    from tpucare.service.fleet_folder import fleet_file_of, folder_of, read_text, without_header

    if paused and (restart or replace):
        raise typer.BadParameter("--paused excludes --restart and --replace")
    file = fleet_file_of(file)
    text = read_text(file)
    path = file.absolute()
    fleet = fleets.parse(without_header(text), file=str(file), folder=folder_of(text, path.parent))
    if replace:
        ask(f"Delete the nodes of {fleet.name} and make new ones?", yes=yes)
    command = {"do": "apply", "text": text, "folder": str(path.parent), "file": str(path)}
    chosen = options(context)
    answer = execute(chosen, {**command, "restart": restart, "replace": replace, "paused": paused})
    if json_out:
        print_json(answer)
        return
    for line in answer["warnings"]:
        warn(line)
    _say_changes(answer)
    if answer["changes"] and not (restart or replace):
        _say_when_used(answer)
    _say_order(answer["order"])
    _say_each(answer["started_again"], "starts again")
    _say_each(answer["restarted"], "restarts its job")
    _say_each(answer["replaced"], "gets a new node")
    _say_each(answer["surplus"], "is no longer declared and runs on: `tpucare down SLOT` ends it")
    if answer["paused"]:
        say(f"{answer['fleet']} is paused: `tpucare resume {answer['fleet']}`")
    _hint_daemon(chosen)


def _say_changes(answer: Mapping[str, Any]) -> None:
    slots = len(answer["slots"])
    state = "new" if answer["is_new"] else "changed" if answer["changes"] else "unchanged"
    say(f"{answer['fleet']}: {state}, {slots} slot{'s' if slots != 1 else ''}")
    for row in answer["changes"]:
        say(f"  {row['key']}: {row['before']} -> {row['after']}")


def _say_order(rows: Sequence[Mapping[str, Any]]) -> None:
    """Say in which order fleets with several places ask them."""
    from tpucare.cli.places import order_lines

    for line in order_lines(rows):
        say(line)


def _say_when_used(answer: Mapping[str, Any]) -> None:
    """Say when a changed section is used."""
    sections = {row["key"].partition(".")[0].partition("[")[0] for row in answer["changes"]}
    if "job" in sections:
        say("live runs keep their old job; the next launch uses the new one, `apply --restart` uses it now")
    if "tpu" in sections:
        say("live nodes stay; the next node is as declared now, `apply --replace` makes it at once")


def _say_each(slots: Sequence[str], text: str) -> None:
    for slot in slots:
        say(f"{slot} {text}")


def _hint_daemon(chosen: Any) -> None:
    from tpucare.service.control_socket import is_running

    if not is_running(chosen.socket):
        warn("no daemon runs: start it with `tpucare daemon`")


def down(
    context: typer.Context,
    target: Annotated[str, typer.Argument(metavar="FLEET|SLOT", help="A fleet with all its slots, or one slot.")] = "",
    every: Annotated[bool, typer.Option("--all", help="Every fleet of the daemon, without a target.")] = False,
    cluster: Annotated[
        str, typer.Option(help="Every pool of this Ray cluster, without a target; its head goes on.", metavar="NAME")
    ] = "",
    yes: YesFlag = False,
    wait: Annotated[bool, typer.Option(help="Return only once every node is deleted.")] = True,
    json_out: JsonFlag = False,
) -> None:
    """
    End a fleet or one slot: stop its runs, delete its nodes. The fleet stays down until `apply`.

    A running daemon does this; without one, this command does it itself, and returns once every node is deleted.

    \b
    Example: tpucare down pod
    Example: tpucare down pod-3 --yes
    Example: tpucare down --all
    Example: tpucare down --cluster lab
    """
    from tpucare.service import client

    if sum((bool(target), every, bool(cluster))) != 1:
        raise typer.BadParameter("give a FLEET, a SLOT, --all or --cluster NAME")
    chosen = options(context, target)
    if target:
        client.refuse_unknown(chosen, target)
        targets = [target]
    elif cluster:
        targets = client.pools_that_are_up(chosen, cluster)
    else:
        targets = client.fleets_that_are_up(chosen)
    if not targets:
        say(f"no pool of {cluster} is up" if cluster else "no fleet is up")
        return
    if not yes:
        ending = _jobs_that_end(client.running_status(chosen, target), targets)
        stays = f"The head of {cluster} goes on. " if cluster else ""
        whose = "its" if len(targets) == 1 else "their"
        ask(f"{ending}{stays}Stop the runs of {', '.join(targets)} and delete {whose} nodes?", yes=False)
    answers = client.take_down(chosen, targets, warn, wait=wait)
    if json_out:
        print_json(answers[target] if target else {"fleets": list(answers.values())})
    else:
        for name, answer in answers.items():
            if answer["left"] and not answer["out_of_reach"]:
                say(f"{name}: going down: {', '.join(answer['left'])}")
            elif not answer["left"]:
                say(f"{name}: all its nodes are deleted")
        if cluster:
            say(f"the head of {cluster} goes on; Ctrl-C ends it, or `systemctl stop tpucare-ray@{cluster}`")
    if hidden := [_hidden(name, answer["out_of_reach"]) for name, answer in answers.items() if answer["out_of_reach"]]:
        raise CommandError("; ".join(hidden))


def _jobs_that_end(answer: Mapping[str, Any], targets: Collection[str]) -> str:
    """Sentences about pools of Ray clusters whose hosts work for jobs, before the question of `down`; else empty."""
    of_slots = {row["fleet"] for row in answer["slots"] if row["slot"] in targets}
    pools = [row["fleet"] for row in answer["fleets"] if row.get("cluster")]
    meant = [name for name in pools if name in targets or name in of_slots]
    if not answer["daemon"]:
        return f"Whether hosts of {', '.join(meant)} work for jobs is not known: no daemon answers. " if meant else ""
    found = ""
    for row in answer.get("ray", ()):
        if row["fleet"] not in meant:
            continue
        whose = row["fleet"] if row["fleet"] in targets else ", ".join(targets)
        slices = [one for one in row["slices"] if row["fleet"] in targets or one["slot"] in targets]
        hosts, age = sum(one["busy_hosts"] for one in slices), row["age_seconds"]
        if age is None and row["awake"]:
            found += (
                f"Whether hosts of {row['fleet']} work for jobs is not known: {row['problem'] or 'no answer yet'}. "
            )
        elif hosts and age < _JUST_NOW_SECONDS:
            work = "works" if hosts == 1 else "work"
            found += f"{counted(hosts, 'host')} of {whose} {work} for jobs, which end. "
        elif hosts:
            about = f"{counted(hosts, 'host')} of {whose}"
            found += f"{about} worked for jobs {length(age)} ago, when the head answered last; these jobs end. "
    return found


def _hidden(target: str, nodes: Sequence[Mapping[str, str]]) -> str:
    zones = ", ".join(sorted({node["zone"] for node in nodes}))
    names = ", ".join(node["node"] for node in nodes)
    why = f"{target}: {zones} does not answer, so {len(nodes)} node{'s' if len(nodes) > 1 else ''} may live ({names})"
    return f"{why}; once it answers, a daemon or `tpucare down {target}` deletes them"


def pause(context: typer.Context, target: TargetWord, json_out: JsonFlag = False) -> None:
    """
    Only observe, and delete only dead nodes, until `resume`. A pause survives a restart of the daemon.

    \b
    Example: tpucare pause pod-0
    """
    _send(context, "pause", target, "paused", json_out)


def resume(context: typer.Context, target: TargetWord, json_out: JsonFlag = False) -> None:
    """
    Care again for a paused fleet or slot.

    \b
    Example: tpucare resume pod
    """
    _send(context, "resume", target, "cared for again", json_out)


def retry(context: typer.Context, target: TargetWord, json_out: JsonFlag = False) -> None:
    """
    Try again now: reset backoffs, failure budgets and blocked places. For slots that failed or wait for a person.

    \b
    Example: tpucare retry pod-0
    """
    _send(context, "retry", target, "tried again now", json_out)


def confirm(
    context: typer.Context,
    target: Annotated[
        str, typer.Argument(metavar="[FLEET|SLOT]", help="Fleet or slot to confirm; default: every slot.")
    ] = "",
    store: Annotated[bool, typer.Option("--store", help="The listed nodes are all nodes; without a target.")] = False,
    moved: Annotated[bool, typer.Option("--moved", help="The state folder was moved to this machine.")] = False,
    yes: YesFlag = False,
    json_out: JsonFlag = False,
) -> None:
    """
    Confirm a fact that tpucare cannot verify: no older node of a slot trains any more, held deletes may go ahead, the
    listed nodes of a lost store are all its nodes, or the state folder was moved to this machine.

    \b
    Example: tpucare confirm pod-0
    Example: tpucare confirm --store
    """
    if sum((bool(target), store, moved)) > 1:
        raise typer.BadParameter("give only one of FLEET or SLOT, --store, --moved")
    if moved:
        _confirm_move(context, yes=yes)
        return
    ask(f"Held deletes of {target or 'every slot'} will go ahead. Confirm?", yes=yes)
    _send(context, "confirm", target, "confirmed", json_out)


def _confirm_move(context: typer.Context, *, yes: bool) -> None:
    from tpucare.adapters.state.store import accept_move
    from tpucare.adapters.system import SystemClock, instance_id, machine_id

    ask("Two daemons would delete each other's nodes. Is the daemon on the old machine stopped for good?", yes=yes)
    chosen = options(context)
    accept_move(chosen.state, machine_id=machine_id(), instance_id=instance_id(), now=SystemClock().now())
    say(f"{chosen.state}: belongs to this machine now")


def _send(context: typer.Context, verb: str, target: str, done: str, json_out: bool) -> None:
    from tpucare.service.client import execute

    answer = execute(options(context, target), {"do": verb, "target": target})
    if json_out:
        print_json(answer)
        return
    _say_each(answer["changed"], done)
    if not answer["changed"]:
        say(f"{answer.get('fleet') or target or 'the store'}: {done}")
    sys.stdout.flush()
