"""
Which project is meant: flag, environment (Google's libraries', then gcloud's), gcloud's configuration or credentials.

Where its credentials lie is told here, too. gcloud itself is not called: it costs a second, and need not be installed
where its configuration was copied to.
"""

from __future__ import annotations

import configparser
from collections.abc import Mapping
from pathlib import Path

import google.auth
from google.auth.exceptions import GoogleAuthError

from tpucare.model.errors import ConfigError

_NO_PROJECT = (
    "no Google Cloud project is known: set `project` in the fleet file or GOOGLE_CLOUD_PROJECT, "
    "or run `gcloud config set project PROJECT`"
)


def find_project(explicit: str | None, env: Mapping[str, str]) -> str:
    """
    *explicit*, else GOOGLE_CLOUD_PROJECT, else CLOUDSDK_CORE_PROJECT, else the project of gcloud's active
    configuration, else of the credentials.

    env: the process's environment. Raises: ConfigError: none of them says.
    """
    named = explicit or env.get("GOOGLE_CLOUD_PROJECT") or env.get("CLOUDSDK_CORE_PROJECT")
    project = named or _configured_project(env) or _credentials_project()
    if not project:
        raise ConfigError(_NO_PROJECT)
    return project


def credentials_file(env: Mapping[str, str]) -> Path:
    """Where `google.auth.default` looks for a file first; on a VM with an account of its own there need be none."""
    return Path(env.get("GOOGLE_APPLICATION_CREDENTIALS") or _folder(env) / "application_default_credentials.json")


def _folder(env: Mapping[str, str]) -> Path:
    home = env.get("HOME") or str(Path.home())
    return Path(env.get("CLOUDSDK_CONFIG") or Path(home, ".config", "gcloud"))


def _configured_project(env: Mapping[str, str]) -> str:
    """`core/project` of gcloud's active configuration, empty when there is none."""
    folder = _folder(env)
    try:
        name = env.get("CLOUDSDK_ACTIVE_CONFIG_NAME") or (folder / "active_config").read_text("utf-8").strip()
        parser = configparser.ConfigParser(interpolation=None)
        parser.read_string((folder / "configurations" / f"config_{name}").read_text("utf-8"))
    except (OSError, UnicodeDecodeError, configparser.Error):
        return ""
    return parser.get("core", "project", fallback="").strip()


def _credentials_project() -> str:
    try:
        _, project = google.auth.default()
    except GoogleAuthError:
        return ""
    return str(project or "")
