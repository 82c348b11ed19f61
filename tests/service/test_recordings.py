"""`tpucare places --record`: what the event logs of a state folder tell of places, as files for a simulation."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

from typer.testing import CliRunner

from tpucare.adapters.state.store import open_store
from tpucare.cli.app import app
from tpucare.model.memory import FleetRecord
from tpucare.model.resources import Event
from tpucare.testbed.replay.recordings import load_dataset

ZONE, TYPE = "us-central2-b", "v4-32"
CREATE: dict[str, str | int | float | bool | None] = {
    "zone": ZONE,
    "accelerator_type": TYPE,
    "terms": "spot",
    "hosts": "4",
}


def record(state: Path, folder: Path) -> tuple[int, str]:
    ran = CliRunner().invoke(app, ["--state", str(state), "places", "--record", str(folder)])
    return ran.exit_code, f"{ran.output} {ran.exception}"


def test_all_stores_are_recorded_in_one_file_per_zone(tmp_path: Path) -> None:
    now = datetime.now(UTC) - timedelta(hours=2)
    for name, node in (("daemon", "pod-0-a0"), ("script", "run-0-a0")):
        with open_store(tmp_path / "state", machine_id="machine", now=now, name=name) as store:
            store.save({}, [Event(now, "create", "", node[:-3], node, "info", CREATE)])
            ready = Event(now + timedelta(minutes=5), "state", "", node[:-3], node, "info", {"state": "READY"})
            store.save({}, [ready])
    code, told = record(tmp_path / "state", tmp_path / "seen")
    assert code == 0, told
    assert "2 sightings" in told
    trace = load_dataset(str(tmp_path / "seen"))[ZONE]
    assert (trace.maximum, set(trace.ticks)) == (8, {8})
    assert json.loads((tmp_path / "seen" / f"{ZONE}.json").read_text())["machine"] == TYPE


def test_a_price_is_that_of_its_terms(tmp_path: Path) -> None:
    """The same machines stand in the file twice: on spot, and on demand where spot is dry."""
    tpu = f"{{type: {TYPE}, zones: [{ZONE}], provisioning: spot, price: 2}}"
    dear = f"{{type: {TYPE}, zones: [{ZONE}], provisioning: on-demand, price: 7}}"
    text = f"name: pod\ncount: 1\ntpu: [{tpu}, {dear}]\njob: {{run: 'true', checkpoint: /none}}\n"
    now = datetime.now(UTC) - timedelta(hours=2)
    with open_store(tmp_path / "state", machine_id="machine", now=now) as store:
        store.save_fleet(FleetRecord("pod", text, "/", now, project="grant"))
        store.save({}, [Event(now, "create", "", "pod-0", "pod-0-a0", "info", CREATE)])
        store.save({}, [Event(now, "state", "", "pod-0", "pod-0-a0", "info", {"state": "READY"})])
    code, told = record(tmp_path / "state", tmp_path / "seen")
    assert code == 0, told
    price = json.loads((tmp_path / "seen" / f"{ZONE}.json").read_text())["price"]
    assert (price["spot"], price["on_demand"]) == (2, 7)


def test_a_folder_that_saw_nothing_says_so(tmp_path: Path) -> None:
    code, told = record(tmp_path / "state", tmp_path / "seen")
    assert code == 1
    assert "nothing is known of any place" in told
    assert not (tmp_path / "seen").exists()
