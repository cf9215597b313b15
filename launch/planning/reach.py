"""Whether a job's hosts answer, checked before mpirun, which would wait for minutes."""

import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from stretto.launch.errors import LaunchError
from stretto.launch.planning import network

_CONNECT_TIMEOUT_S = 5.0
_SSH_TIMEOUT_S = 5.0
_MOST_AT_ONCE = 32
_TRY_EVERY_S = 0.5
# Set where something else than ssh reaches the hosts; then only names can be checked.
_OTHER_AGENTS = ("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent", "HYDRA_LAUNCHER_EXEC")


def check_hosts(
    names: Sequence[str], environ: Mapping[str, str], limit_s: float, say: Callable[[str], None]
) -> None:
    """Wait until every host's name resolves and an ssh server answers there.

    This machine itself needs none. Hosts may come up late: as nodes that boot do, or containers.

    Args:
      names: as they were given, ``user@host`` too.
      environ: shows whether ssh is used.
      limit_s: how long to wait, in seconds.
      say: called with a line about the hosts that the job waits for.

    Raises:
      LaunchError: names the hosts that are not there in time, and why.
    """
    by_ssh = not any(name in environ for name in _OTHER_AGENTS)
    deadline = time.monotonic() + limit_s
    problems, said = dict.fromkeys(names, ""), False
    with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
        while True:
            told = pool.map(lambda name: (name, _problem(name, by_ssh)), list(problems))
            problems = {name: problem for name, problem in told if problem is not None}
            if not problems:
                return
            words = "; ".join(problems.values())
            if time.monotonic() + _TRY_EVERY_S > deadline:
                raise LaunchError(f"{words} (waited {limit_s:g} s); is it up?")
            if not said:
                said = True
                say(f"stretto: {words}; waiting up to {limit_s:g} s (--start-timeout)")
            time.sleep(_TRY_EVERY_S)


def silent_hosts(names: Sequence[str], environ: Mapping[str, str]) -> set[str]:
    """Those of the hosts that do not answer at this moment, so that spare ones can stand in."""
    by_ssh = not any(name in environ for name in _OTHER_AGENTS)
    with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
        problems = pool.map(lambda name: _problem(name, by_ssh), names)
        return {name for name, problem in zip(names, problems, strict=True) if problem}


def _problem(name: str, by_ssh: bool) -> str | None:
    host, port = name.rpartition("@")[2], 22
    if network.is_this_host(host):
        return None
    if by_ssh:
        settings = ssh_settings(name)
        if "proxycommand" in settings or "proxyjump" in settings:
            return None  # reached through another host, in a way only ssh knows
        host, port = settings.get("hostname", host), int(settings.get("port", port))
    if not network.resolve(host):
        return f"host {name} does not resolve; check its spelling, DNS or /etc/hosts"
    if by_ssh and (why := _silence(host, port)):
        return f"host {name} cannot be reached by ssh ({host} port {port}: {why})"
    return None


def _silence(host: str, port: int) -> str | None:
    """Why no ssh server answers there: a server greets every connection."""
    try:
        with socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_S) as sock:
            greeting = sock.recv(4)
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return error.strerror or str(error)
    return None if greeting == b"SSH-" else "what answers is no ssh server"


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
