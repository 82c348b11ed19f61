"""Commands about fleets: write one, check it, hand it over, say what is wished of it."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from tpucare.cli.common import Failure, ask, options, print_json, say, warn

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
YesFlag = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
TargetWord = Annotated[str, typer.Argument(metavar="FLEET|SLOT", help="A fleet with all its slots, or one slot.")]


def init(
    name: Annotated[str, typer.Argument(help="Name of the fleet; default: the template's.")] = "",
    template: Annotated[str, typer.Option(help="Which ready fleet to begin with.", metavar="NAME")] = "single",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write it there, never over a file.")] = None,
    list_them: Annotated[bool, typer.Option("--list", help="List the templates, one a line.")] = False,
) -> None:
    """
    Print a ready fleet file to edit, or write it to a file that is not there yet.

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
        raise Failure(f"no template {template}; there are {', '.join(sorted(ready))}")
    text = _named(ready[template], name) if name else ready[template]
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise Failure(f"{output} is there already; choose another name, or delete it") from None
    say(f"{output}: edit it, then `tpucare check {output}`")


def _named(text: str, name: str) -> str:
    """The template for a fleet of that name, its checkpoint too. Raises: ConfigError: no fleet can be called so."""
    from tpucare.fleetfile.values import fleet_name
    from tpucare.model.errors import ConfigError

    try:
        fleet_name(name)
    except ValueError as error:
        raise ConfigError(f"name: {error}") from None
    old = next(line for line in text.splitlines() if line.startswith("name:")).partition(":")[2].strip()
    return re.sub(rf"(?m)(^name: |checkpoint: gs://my-bucket/){re.escape(old)}\b", rf"\g<1>{name}", text)


def _templates() -> dict[str, str]:
    """Ready fleets by name: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).parent.parent
    for folder in (package / "_templates" / "fleets", package.parent / "templates" / "fleets"):
        if found := {path.stem: path.read_text("utf-8") for path in folder.glob("*.yaml")}:
            return found
    raise Failure("this installation has no templates; install the package again")


def check(
    files: Annotated[list[Path] | None, typer.Argument(metavar="FILE...", help="Fleet files.")] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of fleet files instead.")] = False,
    json_out: JsonFlag = False,
) -> None:
    """
    Read fleet files as the daemon would; every problem is a line with its place. Asks no cloud.

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
        raise typer.BadParameter("give a FILE, or --schema")
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
        str, typer.Argument(metavar="[FLEET|SLOT|FILE]", help="Default: everything. FILE: what apply would change.")
    ] = "",
    json_out: JsonFlag = False,
) -> None:
    """
    Print what the daemon would do next for every slot, and why. Changes nothing.

    Of a fleet file: what `apply` of it would change. Without a daemon this process reads the fleets folder, looks at
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
    if not answer["slots"]:
        say("nothing is declared: `tpucare apply FILE` hands a fleet over")


def _preview(chosen: Any, file: Path, json_out: bool) -> None:
    from tpucare.service import client

    answer = client.preview(chosen, file)
    if json_out:
        print_json(answer)
        return
    for line in answer["warnings"]:
        warn(line)
    _tell_changes(answer)
    if answer["added"]:
        count = len(answer["added"])
        say(f"apply would ask for {count} node{'s' if count != 1 else ''}: {', or '.join(answer['places'])}")
    if answer["changes"]:
        _tell_when(answer)
    _tell(answer["surplus"], "would be no longer declared, and run on: `tpucare down SLOT` ends it")


def apply(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="Fleet file.", metavar="FILE")],
    restart: Annotated[bool, typer.Option("--restart", help="Restart the job now, on the node it has.")] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Replace the nodes now; asks first.")] = False,
    paused: Annotated[
        bool, typer.Option("--paused", help="Ask for no node until `resume`: time for `adopt-node`.")
    ] = False,
    yes: YesFlag = False,
    json_out: JsonFlag = False,
) -> None:
    """
    Check a fleet file, copy it into the daemon's folder, and have it cared for. Starts again what was taken down.

    A changed job is used from the next launch on, a changed TPU from the next node on; a live node is never touched
    for an edit alone.

    \b
    Example: tpucare apply pod.yaml
    Example: tpucare apply pod.yaml --restart
    Example: tpucare apply pod.yaml --paused
    """
    from tpucare.fleetfile import parse as fleets
    from tpucare.service.client import order
    from tpucare.service.fleet_folder import fleet_file_of, folder_of, read_text, without_header

    if paused and (restart or replace):
        raise typer.BadParameter("--paused asks for nothing now; --restart and --replace do")
    file = fleet_file_of(file)
    text = read_text(file)
    path = file.absolute()
    fleet = fleets.parse(without_header(text), file=str(file), folder=folder_of(text, path.parent))
    if replace:
        ask(f"Delete the nodes of {fleet.name} and make new ones?", yes=yes)
    what = {"do": "apply", "text": text, "folder": str(path.parent), "file": str(path)}
    chosen = options(context)
    answer = order(chosen, {**what, "restart": restart, "replace": replace, "paused": paused})
    if json_out:
        print_json(answer)
        return
    for line in answer["warnings"]:
        warn(line)
    _tell_changes(answer)
    if answer["changes"] and not (restart or replace):
        _tell_when(answer)
    _tell(answer["started_again"], "starts again")
    _tell(answer["restarted"], "restarts its job")
    _tell(answer["replaced"], "gets a new node")
    _tell(answer["surplus"], "is no longer declared and runs on: `tpucare down SLOT` ends it")
    if answer["paused"]:
        say(f"{answer['fleet']} is paused: `tpucare resume {answer['fleet']}`")
    _hint_daemon(chosen)


def _tell_changes(answer: Mapping[str, Any]) -> None:
    slots = len(answer["slots"])
    what = "new" if answer["is_new"] else "changed" if answer["changes"] else "unchanged"
    say(f"{answer['fleet']}: {what}, {slots} slot{'s' if slots != 1 else ''}")
    for row in answer["changes"]:
        say(f"  {row['key']}: {row['before']} -> {row['after']}")


def _tell_when(answer: Mapping[str, Any]) -> None:
    """When what was changed begins to count; only where something lives that it does not count for yet."""
    sections = {row["key"].partition(".")[0].partition("[")[0] for row in answer["changes"]}
    if "job" in sections:
        say("live runs keep the job they have; the next launch uses this one, `apply --restart` uses it now")
    if "tpu" in sections:
        say("live nodes stay; the next node is as declared here, `apply --replace` makes it now")


def _tell(slots: Sequence[str], text: str) -> None:
    for slot in slots:
        say(f"{slot} {text}")


def _hint_daemon(chosen: Any) -> None:
    from tpucare.service.control_socket import is_running

    if not is_running(chosen.socket):
        warn("no daemon runs: start one with `tpucare daemon`")


def down(
    context: typer.Context,
    target: Annotated[str, typer.Argument(metavar="FLEET|SLOT", help="A fleet with all its slots, or one slot.")] = "",
    every: Annotated[bool, typer.Option("--all", help="Every fleet of the daemon; no target.")] = False,
    yes: YesFlag = False,
    wait: Annotated[bool, typer.Option(help="Return only when nothing is left.")] = True,
    json_out: JsonFlag = False,
) -> None:
    """
    End a fleet or one slot: stop its runs, delete its nodes. The fleet stays down until `apply`.

    With a daemon, the daemon does it; without one, this command does, and returns when nothing is left.

    \b
    Example: tpucare down pod
    Example: tpucare down pod-3 --yes
    Example: tpucare down --all
    """
    from tpucare.service import client

    if bool(target) is every:
        raise typer.BadParameter("give a FLEET or SLOT, or --all")
    chosen = options(context, target)
    targets = [target] if target else client.fleets_that_are_up(chosen)
    if target:
        client.refuse_unknown(chosen, target)
    elif not targets:
        say("nothing is up")
        return
    ask(f"Stop the runs of {', '.join(targets)} and delete {'its' if target else 'their'} nodes?", yes=yes)
    answers = client.take_down(chosen, targets, warn, wait=wait)
    if json_out:
        print_json(answers[target] if target else {"fleets": list(answers.values())})
    else:
        for name, answer in answers.items():
            if answer["left"] and not answer["out_of_reach"]:
                say(f"{name}: going down: {', '.join(answer['left'])}")
            elif not answer["left"]:
                say(f"{name}: nothing is left of it")
    if hidden := [_hidden(name, answer["out_of_reach"]) for name, answer in answers.items() if answer["out_of_reach"]]:
        raise Failure("; ".join(hidden))


def _hidden(target: str, nodes: Sequence[Mapping[str, str]]) -> str:
    zones = ", ".join(sorted({node["zone"] for node in nodes}))
    names = ", ".join(node["node"] for node in nodes)
    why = f"{target}: {len(nodes)} node{'s' if len(nodes) > 1 else ''} in {zones} could not be looked at ({names})"
    return f"{why}: remembered; a daemon or `tpucare down {target}` deletes them once it answers"


def pause(context: typer.Context, target: TargetWord, json_out: JsonFlag = False) -> None:
    """
    Observe, and touch nothing but nodes that are dead, until `resume`. Survives a restart of the daemon.

    \b
    Example: tpucare pause pod-0
    """
    _wish(context, "pause", target, "paused", json_out)


def resume(context: typer.Context, target: TargetWord, json_out: JsonFlag = False) -> None:
    """
    Care again for what was paused.

    \b
    Example: tpucare resume pod
    """
    _wish(context, "resume", target, "cared for again", json_out)


def retry(context: typer.Context, target: TargetWord, json_out: JsonFlag = False) -> None:
    """
    Try again now: forget backoffs, spent budgets and blocked places. For slots that failed or wait for a person.

    \b
    Example: tpucare retry pod-0
    """
    _wish(context, "retry", target, "tried again now", json_out)


def confirm(
    context: typer.Context,
    target: Annotated[str, typer.Argument(metavar="[FLEET|SLOT]", help="What the confirmation is for.")] = "",
    store: Annotated[bool, typer.Option("--store", help="What is listed is all there is; no target.")] = False,
    moved: Annotated[bool, typer.Option("--moved", help="The state folder was moved to this machine.")] = False,
    yes: YesFlag = False,
    json_out: JsonFlag = False,
) -> None:
    """
    Confirm something that tpucare cannot verify: that no older node of a slot trains any more, that a brake may be
    lifted, that a lost store's nodes are all there are, or that a state folder moved here for good.

    \b
    Example: tpucare confirm pod-0
    Example: tpucare confirm --store
    """
    if sum((bool(target), store, moved)) > 1:
        raise typer.BadParameter("give a FLEET or SLOT, or --store, or --moved")
    if moved:
        _confirm_move(context, yes=yes)
        return
    ask(f"Sure? Deletes held back for {target or 'every slot'} go ahead then.", yes=yes)
    _wish(context, "confirm", target, "confirmed", json_out)


def _confirm_move(context: typer.Context, *, yes: bool) -> None:
    from tpucare.adapters.state.store import accept_move
    from tpucare.adapters.system import SystemClock, instance_id, machine_id

    ask("Is the daemon on the old machine stopped for good? Two of them would fight.", yes=yes)
    chosen = options(context)
    accept_move(chosen.state, machine_id=machine_id(), instance_id=instance_id(), now=SystemClock().now())
    say(f"{chosen.state}: lives on this machine now")


def _wish(context: typer.Context, verb: str, target: str, done: str, json_out: bool) -> None:
    from tpucare.service.client import order

    answer = order(options(context, target), {"do": verb, "target": target})
    if json_out:
        print_json(answer)
        return
    _tell(answer["changed"], done)
    if not answer["changed"]:
        say(f"{answer.get('fleet') or target or 'the store'}: {done}")
    sys.stdout.flush()
