"""What an agent looks at on its host before a script starts: what would show as a hang later."""

import contextlib
import socket
from importlib import metadata
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
    found = {}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found
