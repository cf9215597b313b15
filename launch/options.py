"""The options of ``stretto run``, as tyro shows and reads them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import FlagCreatePairsOff, Positional, UseAppendAction, arg


@dataclass(frozen=True)
class RunOptions:
    """Start SCRIPT in the processes of a job, and end them together.

    -n counts devices. On a machine with GPUs one process drives all GPUs of a node; without
    GPUs each device is a CPU process. Options go before SCRIPT; what follows it is the script's.
    """

    script: Positional[Annotated[str, arg(metavar="SCRIPT")]]
    """Python script; every process runs it."""

    args: Positional[Annotated[tuple[str, ...], arg(metavar="ARGS")]] = ()
    """The script's own arguments."""

    num_devices: Annotated[int | None, arg(name="num-devices", aliases=["-n"])] = None
    """Devices of the whole job. All GPUs if not given; 1 where there are none."""

    processes_per: Literal["node", "gpu"] | None = None
    """One process per node with all its devices, or one per device."""

    hostfile: Path | None = None
    """File with a host a line: NAME slots=DEVICES."""

    hosts: str | None = None
    """Hosts and their devices: a:4,b:4."""

    cluster: Path | None = None
    """Cluster file (TOML), such as those in configs/cluster."""

    launcher: Literal["auto", "mpirun", "srun", "local"] = "auto"
    """What starts the processes; auto finds out."""

    env: UseAppendAction[tuple[str, ...]] = ()
    """NAME=VALUE, or NAME for its value here; repeat for more."""

    timeout: float | None = None
    """Seconds after which the job is ended, and where each process is gets shown."""

    restarts: int = 0
    """How often to start a failed job again."""

    log_dir: Path | None = None
    """Folder for a log file per process."""

    port: int = 0
    """Port of JAX's coordinator; 0 takes a free one."""

    interface: str | None = None
    """Network interface between the hosts, such as eth0."""

    start_timeout: float = 60.0
    """Seconds for all processes to come up."""

    dry_run: FlagCreatePairsOff[bool] = False
    """Show what would be started, and start nothing."""


_FLAGS = ("--dry-run", "--help", "-h")


def split_arguments(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """``(options and SCRIPT, ARGS)``: everything after the script belongs to it, dashes and all."""
    index = 0
    while index < len(argv):
        token = argv[index]
        if token == "--":
            return [*argv[:index], *argv[index + 1 : index + 2]], list(argv[index + 2 :])
        if not token.startswith("-"):
            return list(argv[: index + 1]), list(argv[index + 1 :])
        takes_value = token not in _FLAGS and "=" not in token
        if token.startswith("-n") and not token.startswith("--") and token != "-n":
            takes_value = False  # -n4
        index += 2 if takes_value else 1
    return list(argv), []


def parse(argv: Sequence[str]) -> RunOptions:
    """The options of a ``stretto run`` command line; exits with help or an error as tyro does."""
    own, script_arguments = split_arguments(argv)
    own = [f"-n={token[2:]}" if _is_joined_n(token) else token for token in own]
    options = tyro.cli(RunOptions, args=own, prog="stretto run", description=RunOptions.__doc__)
    return replace(options, args=tuple(script_arguments))


def _is_joined_n(token: str) -> bool:
    return token.startswith("-n") and token[2:].isdigit()
