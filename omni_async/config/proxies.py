"""Finds the proxy that the environment names for an address: `http_proxy`, `https_proxy`, `all_proxy` and `no_proxy`.

Addresses of this machine never use a proxy.
"""

from __future__ import annotations

import ipaddress
import urllib.request
from urllib.parse import urlsplit

from omni_async.config.redact import redact_text


def is_loopback(host: str) -> bool:
    """Return whether a host's name or address is this machine's own."""
    name = host.strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def proxy_for(url: str) -> str | None:
    """Return the URL of the proxy for requests to `url`; None: no proxy."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if is_loopback(host) or urllib.request.proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    found = urllib.request.getproxies()
    proxy = found.get(parts.scheme) or found.get("all")
    return None if not proxy else proxy if "://" in proxy else f"http://{proxy}"


def through(proxy: str | None) -> str:
    """Return a phrase for a request's error that names its proxy without the password; empty without a proxy."""
    return "" if proxy is None else f" (through the proxy {redact_text(proxy)} of the environment)"
