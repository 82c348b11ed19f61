"""
Writes `fleet-file.md`, the reference of the fleet file, from the models that check it.

    python docs/gen_fleet.py            write it
    python docs/gen_fleet.py --check    exit 1 if the file is not what this would write
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from datetime import timedelta
from enum import Enum
from pathlib import Path

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from tpucare.fleetfile import schema
from tpucare.fleetfile.parse import FILE_LIMIT_BYTES, FILES_LIMIT, TOTAL_LIMIT_BYTES
from tpucare.fleetfile.schema import Section
from tpucare.fleetfile.yaml_document import SIZE_LIMIT_BYTES

TARGET = Path(__file__).with_name("fleet-file.md")

INTRODUCTION = f"""\
# The fleet file

<!-- Written by docs/gen_fleet.py from the models that check the file. Edit those, then run it. -->

One YAML file declares one fleet: a number of equal slots, their TPU, their job and their care settings.
`tpucare check FILE` checks it as the daemon does. `tpucare check --schema` prints a JSON schema, so that an editor can
complete and check keys:

```yaml
# yaml-language-server: $schema=./fleet.schema.json
```

The check reports all problems at once, one line each, with the nearest valid word:

```text
big-pod.yaml:3: tpu.type: v5e-8 is not a known accelerator type; nearest: v5litepod-8
big-pod.yaml:9: job.comand: unknown key; nearest: run
```

## An example

```yaml
name: big-pod
count: 1
project: my-project
tpu:
  type: v3-256
  zones:
    - europe-west4-a
    - {{zone: us-east1-d, service_account: us-trainer@my-project.iam.gserviceaccount.com}}
  provisioning: spot
  service_account: trainer@my-project.iam.gserviceaccount.com
  network: {{external_ips: true}}
job:
  repository: https://github.com/HomebrewNLP/HomebrewNLP-Jax
  branch: main
  setup: bash setup.sh
  run: bash run.sh
  files: {{config.yaml: ./config.yaml}}
  env: {{WANDB_PROJECT: gpt}}
  secrets: [WANDB_API_KEY]
  checkpoint: gs://my-bucket/big-pod
  progress: 'step[ =:]+(\\d+)'
care:
  unhealthy_after: 1h
  stalled_after: 30m
  on_success: delete
```

A `ray` section makes the fleet a *pool* of a [Ray cluster](ray.md): its slots get nodes when tasks ask for their TPUs.
Jobs are submitted to the cluster, so `job` has no `run`:

```yaml
name: lab
count: {{min: 0, max: 4}}
tpu: {{type: v4-16, zones: [us-central2-b], network: {{external_ips: false}}}}
job: {{workdir: ., setup: bash setup.sh}}
ray: {{idle: 10m}}
```

## How it is read

* **YAML 1.2 words.** `on`, `yes` and `no` are words, dates are text; a boolean is `true` or `false`. Anchors and
  aliases work; merge keys (`<<`), tags, duplicate keys and multiple documents are errors. The limit is
  {SIZE_LIMIT_BYTES // 1024} KB.
* **Durations** have a unit: `90s`, `30m`, `1h30m`, `2d`; at most 30 days. A bare number is an error.
* **Numbers in `env`** reach the job as written: `1e-4` stays `1e-4`, `010` stays `010`. `true`, `false` and an empty
  value are errors: quote the text that the program expects.
* **Names.** Slots are `<name>-0`, `<name>-1`, …; `<name>` alone means slot 0. Nodes are `<slot>-a<number>`, and every
  create takes a new number. So the name of a fleet must not end in `-<digits>` or `-a<digits>`.
* **`{{slot}}`** stands for the slot's name in `run`, `checkpoint`, the values of `env` and both paths of `files`.
  Only this exact token is replaced: `${{VAR}}`, awk and f-strings are unchanged. A script can also use `$TPUCARE_SLOT`.
* **Where the job runs.** It runs in `~/.tpucare/work` on every worker (the clone, or the copy of `workdir`), as the
  login user, in the screen `tpucare-SLOT`. `setup` and `run` are separate `bash -e` scripts: the first failing command
  ends a script. `python3` is the one of the worker's image. `tpucare ssh` and `tpucare exec` start in the login user's
  home, without the job's environment.
* **Checkpoints of many slots.** With `count` above 1, `/<slot>` is appended to a `checkpoint` without `{{slot}}`. If
  `count` may grow from 1 later, write `{{slot}}` from the start: the path of slot 0 then stays the same.
  Once slot 0 has run, an edit of `count` alone that would move its folder is refused.
* **Files.** At most {FILES_LIMIT}, each up to {FILE_LIMIT_BYTES >> 20} MB, together {TOTAL_LIMIT_BYTES >> 20} MB.
  Local paths stay in the folder of the fleet file or below, paths on the worker below the job's folder.
* **Alternatives.** `tpu` may be a list of sections: tpucare asks every zone of the first section before those of the
  second, and the zones of one section in the order of [`placement`](placement.md). Sections may differ in size; each
  place (zone, type, terms, account, network) is listed once.
* **The catalogue** lists types, zones and terms. A value outside it is an error that names the nearest one; with
  `unlisted: true` it is a warning, for a new zone or a slice of an unusual size.
* **Secrets** never appear in this file: `secrets` names variables, and a URL with credentials is refused.

Reserved for later versions, and refused until then: {", ".join(f"`{key}`" for key in schema.LATER_KEYS)}.
"""

TITLES = {
    (): "Top level",
    ("count",): "`count`, of a pool",
    ("tpu",): "`tpu`",
    ("tpu", "zones"): "`tpu.zones[]`",
    ("tpu", "network"): "`tpu.network` and `tpu.zones[].network`",
    ("job",): "`job`",
    ("care",): "`care`",
    ("care", "save_every"): "`care.save_every`",
    ("deadline",): "`deadline`",
    ("ray",): "`ray`",
}


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    parts += ["\n".join(_section(title, schema.SECTIONS[path])) for path, title in TITLES.items()]
    return "\n".join(parts)


def _section(title: str, model: type[Section]) -> Iterator[str]:
    properties = model.model_json_schema()["properties"]
    yield f"## {title}\n"
    yield f"{' '.join((model.__doc__ or '').split())}\n"
    yield "| key | value | default | meaning |"
    yield "|---|---|---|---|"
    for name, info in model.model_fields.items():
        row = (f"`{name}`", _value(model, properties[name]), _default(info), info.description or "")
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
    yield ""


def _value(model: type[Section], property: dict[str, object]) -> str:
    definitions = model.model_json_schema().get("$defs", {})
    text = json.dumps(property)
    for name, definition in definitions.items():
        if f'"$ref": "#/$defs/{name}"' in text and "enum" in definition:
            return ", ".join(f"`{word}`" for word in definition["enum"])
    if "oneOf" in property:
        return "number or section"
    if '"null"' in text:
        return "section"
    if "anyOf" in property:
        return "section or list" if "TpuSection" in text else "text"
    if "$ref" in property:
        return "section"
    if property.get("pattern"):
        return "duration"
    return _KINDS[str(property["type"])] + _range(property)


_KINDS = {
    "string": "text",
    "boolean": "true or false",
    "integer": "number",
    "number": "number",
    "array": "list",
    "object": "mapping",
}


def _range(property: dict[str, object]) -> str:
    if "exclusiveMinimum" in property:
        return f", above {property['exclusiveMinimum']}"
    if "minimum" not in property:
        return ""
    least, most = property["minimum"], property.get("maximum")
    return f", at least {least}" if most is None else f", {least} to {most}"


def _default(info: FieldInfo) -> str:
    default = info.default
    if default is PydanticUndefined:
        return "**required**"
    if callable(info.json_schema_extra) or default in ("", [], {}) or isinstance(default, Section):
        return ""
    if isinstance(default, timedelta):
        return f"`{schema.duration_text(default)}`"
    if isinstance(default, Enum):
        return f"`{default.value}`"
    return f"`{json.dumps(default)}`"


def main() -> int:
    if "--check" in sys.argv[1:]:
        fresh = TARGET.exists() and TARGET.read_text(encoding="utf-8") == page()
        print("fresh" if fresh else f"{TARGET.name} is stale: run python docs/gen_fleet.py")
        return 0 if fresh else 1
    TARGET.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
