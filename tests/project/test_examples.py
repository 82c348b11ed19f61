"""What `examples/` and the wheel promise: every fleet there is valid, and the demo finds the training."""

from __future__ import annotations

import json
import os
import re
import runpy
import stat
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tpucare.fleetfile import parse as fleets
from tpucare.testbed.demo.examples import example_folder
from tpucare.testbed.demo.reference import free_loopback_endpoint

ROOT = Path(__file__).parents[2]
FLEETS = sorted((ROOT / "examples" / "fleets").glob("*.yaml"))
POD_SCRIPTS = ROOT / "examples" / "pod_scripts"


@pytest.mark.parametrize("file", FLEETS, ids=lambda file: file.stem)
def test_every_example_fleet_is_valid_without_a_warning_and_runs_what_is_there(file: Path) -> None:
    declared = fleets.parse(file.read_text(), file=file.name, folder=file.parent, default_project="my-project")
    assert declared.warnings == ()
    for script in re.findall(r"bash (\S+)", f"{declared.job.setup}\n{declared.job.run}"):
        assert (file.parent / "../train" / script).is_file()


def test_the_readme_names_every_example() -> None:
    text = (ROOT / "examples" / "README.md").read_text()
    scripts = sorted((ROOT / "examples").glob("*.py"))
    assert [script.name for script in scripts if f"]({script.name})" not in text] == []
    assert {"pod.py", "sweep.py", "inference.py"} <= {script.name for script in scripts}
    assert [file.name for file in FLEETS if f"fleets/{file.name}" not in text] == []
    assert len(FLEETS) >= 3


@pytest.mark.parametrize(
    "name", ["pod.py", "sweep.py", "inference.py", "inference_server.py", "sweep/train.py", "first_hour.py"]
)
def test_every_script_says_how_it_is_used(name: str) -> None:
    command = [sys.executable, str(ROOT / "examples" / name), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")


def test_the_training_is_found_and_travels_in_the_wheel() -> None:
    folder = example_folder("train")
    assert {"train.py", "setup.sh", "run.sh", "README.md", "corpus.txt"} <= {each.name for each in folder.iterdir()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert included["examples/train"] == "tpucare/_examples/train"
    assert all(os.stat(folder / name).st_mode & stat.S_IXUSR for name in ("setup.sh", "run.sh"))


def test_the_files_of_the_ray_practical_are_told_of_and_its_pools_are_valid() -> None:
    folder = example_folder("ray")
    text = (folder / "README.md").read_text()
    files = [path for path in folder.glob("*") if path.is_file() and path.name != "README.md"]
    assert [path.name for path in files if f"`{path.name}`" not in text] == []
    pools = sorted(folder.glob("*.yaml"))
    for pool in pools:
        declared = fleets.parse(pool.read_text(), file=pool.name, folder=folder, default_project="my-project")
        assert declared.warnings == ()
        assert declared.ray is not None
        assert declared.ray.cluster == "lab"
    assert [pool.name for pool in pools] == ["pool.yaml", "slices.yaml"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert included["examples/ray"] == "tpucare/_examples/ray"


def test_an_unknown_example_is_named() -> None:
    with pytest.raises(FileNotFoundError, match="'no-such-example'"):
        example_folder("no-such-example")


def test_the_text_is_plain_ascii_of_a_useful_size() -> None:
    text = (example_folder("train") / "corpus.txt").read_bytes()
    assert 20_000 < len(text) < 60_000
    assert text.isascii()


def test_every_shell_script_passes_shellcheck() -> None:
    scripts = sorted((ROOT / "examples").rglob("*.sh"))
    program = Path(sys.executable).with_name("shellcheck")
    command = [str(program), "--external-sources", "--source-path=SCRIPTDIR", *map(str, scripts)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout
    assert len(scripts) >= 8


def test_the_pod_scripts_are_told_of_and_their_fleet_is_valid() -> None:
    text = (POD_SCRIPTS / "README.md").read_text()
    scripts = sorted(POD_SCRIPTS.glob("*.sh"))
    assert [script.name for script in scripts if f"`{script.name}`" not in text] == []
    assert {"install.sh", "test.sh", "update.sh", "run.sh", "resume.sh"} <= {script.name for script in scripts}
    assert [script.name for script in scripts if not os.stat(script).st_mode & stat.S_IXUSR] == ["settings.sh"]
    pod = POD_SCRIPTS / "pod.yaml"
    declared = fleets.parse(pod.read_text(), file=pod.name, folder=POD_SCRIPTS, default_project="my-project")
    assert declared.warnings == ()
    for script in re.findall(r"bash (\S+)", f"{declared.job.setup}\n{declared.job.run}"):
        assert (POD_SCRIPTS / script).is_file()


def test_the_inference_server_generates_and_tells_of_its_health() -> None:
    address, _, port = free_loopback_endpoint().rpartition(":")
    command = [sys.executable, str(ROOT / "examples" / "inference_server.py"), f"--address={address}", f"--port={port}"]
    command += ["--text", str(example_folder("train") / "corpus.txt")]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while (health := _ask(f"http://{address}:{port}/health"))[0] != 200:
            assert server.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert health[1]["requests"] == 0
        wish = {"prompt": "The ", "length": 50, "seed": 3}
        status, said = _ask(f"http://{address}:{port}/generate", wish)
        assert (status, len(said["text"])) == (200, 54)
        assert said["text"].startswith("The ")
        assert _ask(f"http://{address}:{port}/generate", wish) == (200, said), "the seed decides"
        assert _ask(f"http://{address}:{port}/generate", ["no object"])[0] == 400
        assert _ask(f"http://{address}:{port}/elsewhere")[0] == 404
        assert _ask(f"http://{address}:{port}/health")[1]["requests"] == 2
    finally:
        server.kill()
        server.wait()


def _ask(url: str, body: object = None) -> tuple[int, dict[str, Any]]:
    """Status and answer; status 0 when nobody listens."""
    try:
        with urllib.request.urlopen(url, None if body is None else json.dumps(body).encode(), timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
    except urllib.error.URLError:
        return 0, {}


def test_a_sweep_brings_its_workers_all_that_it_imports_but_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = runpy.run_path(str(ROOT / "examples" / "sweep.py"))
    code = sweep["assemble_code"](tmp_path / "code")
    assert sweep["assemble_code"](tmp_path / "code") == code, "again, as the next start does"
    # With no site-packages, as on a TPU VM: what is not in the folder is not there.
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(code)!r}); import train"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    monkeypatch.setattr(sys, "argv", ["sweep.py", "--type=v4-8", "--zone=z", "--checkpoint=c", f"--code={code}"])
    job = sweep["fleet"](sweep["parse_arguments"]())["job"]
    assert job["workdir"] == str(code)
    assert "tpucare" not in job["setup"], "pip finds no tpucare for the Python of a TPU VM"
