"""What an agent looks at on its host before a script starts: what would show as a hang later."""

import contextlib
import os
import re
import socket
import sys
from pathlib import Path

from stretto.launch.planning import network
from stretto.launch.supervision.wire import Message


def problem(message: Message) -> str | None:
    """Why the job that a ``prepare`` message describes cannot run on this host, or None."""
    name = socket.gethostname()
    if not Path(message["cwd"]).is_dir():
        return f"the working directory {message['cwd']} does not exist on host {name}"
    if not Path(message["cwd"], message["script"]).is_file():
        return f"the script {message['script']} does not exist on host {name}"
    if message["needs_host_name"]:
        return _host_name_problem(name, many_hosts=message["many_hosts"])
    return None


def _host_name_problem(name: str, *, many_hosts: bool) -> str | None:
    """Why CPU collectives, which listen on the host name's address, would hang here."""
    addresses = network.resolve(name)
    if not addresses:
        return (
            f"the host name {name} does not resolve on its own host, and CPU collectives need it; "
            f"add '127.0.0.1 {name}' (or its network address) to /etc/hosts"
        )
    if many_hosts and all(network.is_loopback(address) for address in addresses):
        return (
            f"the host name {name} means {addresses[0]} on its own host, which others cannot "
            f"reach; give {name} its network address in /etc/hosts"
        )
    return None


def versions(*packages: str) -> dict[str, str]:
    """The versions of those packages that are installed."""
    found = {name: version for name in packages if (version := _version_of_folder(name))}
    if len(found) < len(packages):
        from importlib import metadata  # takes as long to import as all else in an agent

        for name in packages:
            with contextlib.suppress(metadata.PackageNotFoundError):
                found.setdefault(name, metadata.version(name))
    return found


def _version_of_folder(package: str) -> str | None:
    """A package's version by the name of its folder in the first place that has one."""
    form = re.compile(rf"{re.escape(package.replace('-', '_'))}-(.+)\.dist-info", re.IGNORECASE)
    for place in sys.path:
        with contextlib.suppress(OSError):
            for match in filter(None, map(form.fullmatch, os.listdir(place or "."))):
                return match[1]
    return None
