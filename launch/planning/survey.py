"""The GPUs of other hosts, read over the program by which mpirun would reach them."""

import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from stretto.launch import environment
from stretto.launch.errors import LaunchError
from stretto.launch.planning import gpus, network

_LIMIT_S = gpus.NVIDIA_SMI_TIMEOUT_S + 10
_MOST_AT_ONCE = 32
_STATUS = "stretto-status"
# The listing and its status; without nvidia-smi the device files, one a line.
_QUESTION = (
    f"if command -v nvidia-smi >/dev/null; then nvidia-smi -L 2>&1; echo {_STATUS} $?; "
    f"else for f in /dev/nvidia[0-9]*; do test -e $f && echo $f; done; echo {_STATUS} none; fi"
)
_SSH = ("ssh", "-x", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
# Programs that stand in for ssh, by the variables of Open MPI 5 and 4 and of MPICH.
_STAND_INS = ("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent", "HYDRA_LAUNCHER_EXEC")


def count_gpus(hosts: Sequence[str], environ: Mapping[str, str]) -> dict[str, int]:
    """GPUs on each of the hosts that a job with this environment could use, asked all at once.

    Raises:
      LaunchError: a host cannot be asked, cannot tell, or has not those that
        ``CUDA_VISIBLE_DEVICES`` names.
    """
    with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
        counts = pool.map(lambda host: _count(host, environ), hosts)
        return dict(zip(hosts, counts, strict=True))


def is_this_host(name: str) -> bool:
    """Whether a host's name is this machine's, or ``localhost``."""
    return name in ("localhost", network.LOOPBACK) or network.same_host(name, network.host_name())


def _count(host: str, environ: Mapping[str, str]) -> int:
    if is_this_host(host):
        return len(gpus.usable_gpus(environ))
    limit = environ.get(environment.CUDA_VISIBLE_DEVICES)
    if limit is not None and not gpus.entries(limit):
        return 0
    return len(gpus.visible(_ask(host, environ), limit, f"host {host}"))


def _ask(host: str, environ: Mapping[str, str]) -> gpus.Listing:
    way_out = "check the login, or pass --platform cuda or --platform cpu"
    try:
        answer = subprocess.run(
            [*reach_command(environ), host, _QUESTION],
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"host {host} did not say within {_LIMIT_S} s which GPUs it has; {way_out}"
        ) from None
    except OSError as error:
        raise LaunchError(f"host {host} cannot be asked for its GPUs: {error}") from None
    return parse_answer(answer.stdout, host, f"{answer.stderr.strip()[-200:]}; {way_out}")


def parse_answer(text: str, host: str, otherwise: str) -> gpus.Listing:
    """What a host answered to the question; ``otherwise`` goes into the error if it did not."""
    match = re.search(rf"^{_STATUS} (none|\d+)$", text, re.MULTILINE)
    if match is None:
        raise LaunchError(f"host {host} did not say which GPUs it has: {otherwise}")
    listing = text[: match.start()]
    if match[1] != "none":
        return gpus.judge_listing(int(match[1]), listing, f"host {host}")
    files = sorted(int(n) for n in re.findall(r"^/dev/nvidia(\d+)$", listing, re.MULTILINE))
    return gpus.Listing(gpus.unlisted(files))


def reach_command(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The program and options that reach a host: a replacement for ssh, or ssh."""
    for name in _STAND_INS:
        words = shlex.split(environ.get(name, "").partition(":")[0])
        if words:
            return tuple(words)
    return _SSH
