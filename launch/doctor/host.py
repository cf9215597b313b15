"""This host: its name, its loopback, its memory."""

import os
import socket
from pathlib import Path

from stretto.launch.doctor.finding import Finding, error, ok, warning
from stretto.launch.planning import network

_GIB = 1 << 30
_LEAST_MEMORY = 4 * _GIB
_LEAST_SHARED_MEMORY = _GIB


def check_host() -> list[Finding]:
    """Name resolution, loopback and memory."""
    return [
        judge_name(socket.gethostname(), network.resolve(socket.gethostname())),
        judge_loopback(_loopback_error()),
        judge_memory(_available_memory()),
        judge_shared_memory(_shared_memory()),
    ]


def judge_name(name: str, addresses: list[str]) -> Finding:
    """CPU collectives listen on the address of the host's own name."""
    if not addresses:
        return error(
            "host name",
            f"{name} does not resolve; CPU collectives would wait 300 s and abort",
            f"add '127.0.0.1 {name}', or its network address, to /etc/hosts",
        )
    text = f"{name} is {addresses[0]}"
    if all(address.startswith("127.") or address == "::1" for address in addresses):
        text += " (enough for this machine; jobs over several hosts need its network address)"
    return ok("host name", text)


def _loopback_error() -> str | None:
    try:
        with network.listen(network.LOOPBACK) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as problem:
        return str(problem)
    return None


def judge_loopback(problem: str | None) -> Finding:
    """Processes of one machine communicate over loopback."""
    if problem is not None:
        return error("loopback", f"127.0.0.1: {problem}", "bring it up: ip link set lo up")
    return ok("loopback", "127.0.0.1 can be listened on and reached")


def _available_memory() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def judge_memory(available: int | None) -> Finding:
    """Host memory in bytes; each JAX process takes about half a GiB before any data."""
    if available is None:
        return ok("memory", "unknown on this system")
    text = f"{available / _GIB:.1f} GiB free"
    if available < _LEAST_MEMORY:
        return warning("memory", text, "start fewer processes, or free memory")
    return ok("memory", text)


def _shared_memory() -> int | None:
    try:
        stat = os.statvfs("/dev/shm")
    except OSError:
        return None
    return stat.f_bavail * stat.f_frsize


def judge_shared_memory(free: int | None) -> Finding:
    """NCCL's processes of one host communicate through /dev/shm; containers often have 64 MiB."""
    if free is None:
        return ok("shared memory", "no /dev/shm on this system")
    text = f"{free / _GIB:.1f} GiB free in /dev/shm"
    if free < _LEAST_SHARED_MEMORY:
        return warning(
            "shared memory",
            text + "; NCCL may run out with one process per GPU",
            "start the container with --shm-size=8g or --ipc=host",
        )
    return ok("shared memory", text)
