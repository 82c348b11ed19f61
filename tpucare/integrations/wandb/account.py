"""
Address and key of the user's W&B, found as W&B's client finds them, without the `wandb` package: the daemon must not
need it.

Source: https://docs.wandb.ai/models/track/environment-variables, and the client's own settings file (INI, `[default]`)
and netrc entries, whose machine names include the port.
"""

from __future__ import annotations

import configparser
import ipaddress
import netrc
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from tpucare.model.errors import ConfigError

# The client's default address differs between its versions; a login with one of them puts its address into netrc.
KNOWN_BASE_URLS = ("https://api.wandb.ai", "https://api.forge.coreweave.com")
DEFAULT_BASE_URL = KNOWN_BASE_URLS[0]
KEY_VARIABLE = "WANDB_API_KEY"
URL_VARIABLE = "WANDB_BASE_URL"
URLS_VARIABLE = "TPUCARE_WANDB_URLS"
KEY_LENGTH = 40


def base_url(env: Mapping[str, str]) -> str:
    """
    WANDB_BASE_URL, else the client's settings file, else the service with a key in netrc; without a slash at the end.

    Raises: ConfigError: the setting is not an address.
    """
    found = env.get(URL_VARIABLE, "").strip() or _from_settings(env, "base_url")
    if not found:
        found = next((url for url in KNOWN_BASE_URLS if _from_netrc(env, url)), DEFAULT_BASE_URL)
    if not _is_address(found):
        raise ConfigError(f"{URL_VARIABLE}={found!r} is not an address such as {DEFAULT_BASE_URL}")
    return found.rstrip("/")


def key_refusal(env: Mapping[str, str], url: str) -> str:
    """
    Why the daemon's own key is not sent to *url*, the address in a fleet; empty if it is sent.

    The author of a fleet may name any address: the key is sent only to the W&B of the daemon's environment and to the
    addresses in TPUCARE_WANDB_URLS.
    Raises: ConfigError: as `base_url`.
    """
    own = base_url(env)
    allowed = {own, *(listed.rstrip("/") for listed in env.get(URLS_VARIABLE, "").replace(",", " ").split())}
    if url.rstrip("/") in allowed:
        return ""
    return (
        f"it names W&B at {url}, and the daemon's key is for {own}: set {URL_VARIABLE} for the daemon, or list the "
        f"address in its {URLS_VARIABLE}"
    )


def is_private_way(url: str) -> bool:
    """True for https and for an address of this machine."""
    split = urlsplit(url)
    if split.scheme == "https" or split.hostname == "localhost":
        return True
    try:
        return ipaddress.ip_address(split.hostname or "").is_loopback
    except ValueError:
        return False


def _is_address(text: str) -> bool:
    try:
        split = urlsplit(text)
        fits = split.scheme in ("http", "https") and bool(split.hostname) and split.port != 0
    except ValueError:
        return False
    # No blanks or other characters that a request line may not have.
    return fits and all("!" <= char <= "~" for char in text)


def api_key(env: Mapping[str, str], url: str) -> str:
    """WANDB_API_KEY, else the netrc entry of *url*'s host; empty without both."""
    return env.get(KEY_VARIABLE, "").strip() or _from_netrc(env, url)


def need_key(env: Mapping[str, str], url: str) -> str:
    """As `api_key`. Raises: ConfigError: no key, or one that is too short to come from W&B."""
    key = api_key(env, url)
    if not key:
        raise ConfigError(f"no W&B key for {url}: set {KEY_VARIABLE}, or run `wandb login`")
    if len(key) < KEY_LENGTH:
        raise ConfigError(f"the W&B key has {len(key)} characters, fewer than {KEY_LENGTH}: copy it again")
    return key


def with_key(env: Mapping[str, str]) -> Mapping[str, str]:
    """*env*, from which jobs get the key as a secret, with netrc's key if *env* has none."""
    try:
        key = api_key(env, base_url(env))
    except ConfigError:
        key = ""
    return {**env, KEY_VARIABLE: key} if key else env


def setting(env: Mapping[str, str], name: str) -> str:
    """`entity` or `project`: WANDB_ENTITY, WANDB_PROJECT, else the client's settings file; empty = not set."""
    return env.get(f"WANDB_{name.upper()}", "").strip() or _from_settings(env, name)


def _home(env: Mapping[str, str]) -> Path:
    return Path(env.get("HOME") or Path.home())


def _from_settings(env: Mapping[str, str], name: str) -> str:
    folder = Path(env["WANDB_CONFIG_DIR"]) if env.get("WANDB_CONFIG_DIR") else _home(env) / ".config" / "wandb"
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read(folder / "settings", encoding="utf-8")
        return parser.get("default", name, fallback="").strip()
    except (configparser.Error, OSError, UnicodeDecodeError):
        return ""


def _from_netrc(env: Mapping[str, str], url: str) -> str:
    try:
        path = Path(env["NETRC"]).expanduser() if env.get("NETRC") else _home(env) / ".netrc"
        # `authenticators` falls back to the entry `default`, which is not meant for W&B.
        found = netrc.netrc(path).hosts.get(urlsplit(url).netloc)
    except (netrc.NetrcParseError, OSError, UnicodeDecodeError, RuntimeError):
        return ""
    return (found[2] or "").strip() if found is not None else ""
