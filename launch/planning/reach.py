"""Are a job's hosts there? Asked before mpirun, which waits for minutes on one that is not."""

import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from stretto.launch.errors import LaunchError
from stretto.launch.planning import network

_CONNECT_TIMEOUT_S = 5.0
_SSH_TIMEOUT_S = 5.0
_MOST_AT_ONCE = 32
# Set where something else than ssh reaches the hosts; then only names can be checked.
_OTHER_AGENTS = ("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent", "HYDRA_LAUNCHER_EXEC")


def check_hosts(names: Sequence[str], environ: Mapping[str, str]) -> None:
    """Raise unless every host's name resolves and something listens on its ssh port.

    Raises:
      LaunchError: names the first host that is not there.
    """
    by_ssh = not any(name in environ for name in _OTHER_AGENTS)
    with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
        for problem in pool.map(lambda name: _problem(name, by_ssh), names):
            if problem is not None:
                raise LaunchError(problem)


def _problem(name: str, by_ssh: bool) -> str | None:
    host, port = name.rpartition("@")[2], 22
    if by_ssh:
        settings = ssh_settings(name)
        if "proxycommand" in settings or "proxyjump" in settings:
            return None  # reached through another host, in a way only ssh knows
        host, port = settings.get("hostname", host), int(settings.get("port", port))
    if not network.resolve(host):
        return f"host {name} does not resolve; check its spelling, DNS or /etc/hosts"
    if not by_ssh:
        return None
    try:
        socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError as error:
        why = "no answer" if isinstance(error, TimeoutError) else error.strerror
        return f"host {name} cannot be reached by ssh ({host} port {port}: {why}); is it up?"
    return None


def ssh_settings(name: str) -> dict[str, str]:
    """What ``ssh`` would use for a host, aliases of its configuration applied."""
    tool = shutil.which("ssh")
    if tool is None:
        return {}
    try:
        answer = subprocess.run(
            [tool, "-G", "--", name], capture_output=True, text=True, timeout=_SSH_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    pairs = (line.partition(" ") for line in answer.stdout.splitlines())
    return {key: value for key, _, value in pairs}
