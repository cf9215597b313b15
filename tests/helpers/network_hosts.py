"""Hosts made of network namespaces: each with its own name, address and hosts file.

`agent_script` stands in for ssh: mpirun calls it with a host and a command, and it runs the
command there with an environment as clean as ssh's.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stretto.launch.planning.launchers import MpiRun

HOSTS_FOLDER = Path("/etc/netns")
AGENT = """#!/bin/sh
# Options of ssh that mpirun gives are dropped; then come the host and the command.
while :; do
    case "$1" in
        -x|-T|-n|-q) shift ;;
        -o|-p|-l) shift 2 ;;
        *) break ;;
    esac
done
host=${1#*@}; shift
exec env -i PATH=/usr/local/bin:/usr/bin:/bin HOME=/root \\
    ip netns exec "$host" unshare --uts sh -c "hostname $host; $*"
"""


_numbers = itertools.count()


@dataclass(frozen=True)
class Hosts:
    """Names of the hosts, first to last, and the program that runs commands on them."""

    names: tuple[str, ...]
    agent: Path

    def command(self, host: str, *argv: str) -> tuple[str, ...]:
        """A command line that runs `argv` on a host, with this environment."""
        rename = 'hostname "$0"; exec "$@"'
        return ("ip", "netns", "exec", host, "unshare", "--uts", "sh", "-c", rename, host, *argv)

    def run(self, host: str, *argv: str) -> subprocess.CompletedProcess[str]:
        """Run a command on a host to its end."""
        return subprocess.run(self.command(host, *argv), capture_output=True, text=True)

    def reach(self, mpirun: MpiRun | None) -> dict[str, str]:
        """Variables by which mpirun reaches the hosts."""
        if mpirun is not None and mpirun.flavour == "mpich":
            return {"HYDRA_LAUNCHER": "ssh", "HYDRA_LAUNCHER_EXEC": str(self.agent)}
        return {"PRTE_MCA_plm_ssh_agent": str(self.agent)}

    def cut(self, host: str) -> None:
        """Take a host's network away, without a word to anyone."""
        _ip("-n", host, "link", "set", "eth0", "down")

    def mend(self, host: str) -> None:
        """Give it back."""
        _ip("-n", host, "link", "set", "eth0", "up")


def why_not() -> str | None:
    """Why this machine cannot make such hosts, or None if it can."""
    if os.geteuid() != 0:
        return "needs root to make network namespaces"
    for tool in ("ip", "unshare", "hostname"):
        if shutil.which(tool) is None:
            return f"needs the program {tool}"
    probe = f"probe{os.getpid()}"
    try:
        _ip("netns", "add", probe)
        _ip("netns", "del", probe)
    except subprocess.CalledProcessError as error:
        return f"may not make network namespaces here: {error.stderr.strip()}"
    return None


@contextlib.contextmanager
def make_hosts(count: int, folder: Path, *, ipv6: bool = False) -> Iterator[Hosts]:
    """`count` hosts on one bridge, removed again at the end; `ipv6`: with no other addresses."""
    # A namespace that a process still holds keeps its link for a moment, so names are used once.
    mark = f"{'sx' if ipv6 else 'st'}{os.getpid() % 10_000}{chr(ord('a') + next(_numbers) % 26)}"
    subnet = f"10.{77 + os.getpid() % 100}.{os.getpid() % 250}."
    if ipv6:
        subnet = f"fd77:{os.getpid() % 10_000}::"
    names = tuple(f"{mark}n{i}" for i in range(count))
    agent = folder / "agent.sh"
    agent.write_text(AGENT)
    agent.chmod(0o755)
    table = "::1 localhost\n" if ipv6 else "127.0.0.1 localhost\n"
    table += "".join(f"{subnet}{i + 1} {name}\n" for i, name in enumerate(names))
    try:
        _ip("link", "add", mark, "type", "bridge")
        _ip("link", "set", mark, "up")
        for i, name in enumerate(names):
            _add_host(name, mark, f"{subnet}{i + 1}", table)
        yield Hosts(names, agent)
    finally:
        for name in names:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)
            shutil.rmtree(HOSTS_FOLDER / name, ignore_errors=True)
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("link", "del", mark)


def _add_host(name: str, bridge: str, address: str, table: str) -> None:
    folder = HOSTS_FOLDER / name
    folder.mkdir(parents=True)
    (folder / "hosts").write_text(table)
    outer = f"{name}v"
    _ip("netns", "add", name)
    _ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", name)
    _ip("link", "set", outer, "master", bridge, "up")
    # At once: no other host has an IPv6 address that is to be looked for first.
    form = (f"{address}/64", "nodad") if ":" in address else (f"{address}/24",)
    _ip("-n", name, "addr", "add", *form, "dev", "eth0")
    _ip("-n", name, "link", "set", "eth0", "up")
    _ip("-n", name, "link", "set", "lo", "up")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
