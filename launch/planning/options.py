"""The options of ``stretto run``, as tyro shows and reads them."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

import tyro
from tyro.conf import FlagCreatePairsOff, Positional, UseAppendAction, arg

from stretto.launch.errors import LaunchError


@dataclass(frozen=True)
class RunOptions:
    """Start SCRIPT in the processes of a job, and end them together.

    -n counts devices. On a machine with GPUs one process drives all GPUs of a node; without
    GPUs each device is a CPU process. Options go before SCRIPT; what follows it is the script's.
    """

    script: Positional[Annotated[str, arg(metavar="SCRIPT")]]
    """Python script, or with -m a module; every process runs it."""

    args: Positional[Annotated[tuple[str, ...], arg(metavar="ARGS")]] = ()
    """The script's own arguments."""

    num_devices: Annotated[int | None, arg(name="num-devices", aliases=["-n"], metavar="COUNT")] = (
        None
    )
    """Devices of the whole job. Default: all GPUs; 1 without GPUs."""

    processes_per: Annotated[
        Literal["node", "gpu"] | int | None, arg(metavar="{node,gpu}|COUNT")
    ] = None
    """One process per node with all its devices, one per device, or COUNT per node."""

    devices_per_gpu: Annotated[int, arg(metavar="COUNT")] = 1
    """Devices of the job on each GPU, a process each, which take turns: to test on fewer GPUs."""

    module: Annotated[FlagCreatePairsOff[bool], arg(aliases=["-m"])] = False
    """SCRIPT is a module's name, as for python -m; stands right before it."""

    platform: Literal["cuda", "cpu"] | None = None
    """The type of devices. Default: GPUs if the hosts have any; the choice is printed."""

    min_devices: Annotated[int | None, arg(metavar="COUNT")] = None
    """The fewest devices with which to restart after lost hosts. Default: as many as before."""

    hostfile: Annotated[Path | None, arg(metavar="FILE")] = None
    """File with one host per line: NAME slots=DEVICES."""

    hosts: Annotated[str | None, arg(metavar="HOSTS")] = None
    """Hosts and their devices: a:4,b:4."""

    cluster: Annotated[Path | None, arg(metavar="FILE")] = None
    """Cluster file (TOML), such as those in configs/cluster."""

    launcher: Literal["auto", "mpirun", "srun", "local"] = "auto"
    """The program that starts the processes; auto chooses."""

    launcher_args: Annotated[str, arg(metavar="ARGS")] = ""
    """More arguments for mpirun or srun, as one word: --launcher-args="--mca btl ^openib"."""

    bind: Literal["auto", "numa", "none"] = "auto"
    """Bind each process to the cores beside its GPUs: where known, always, or never."""

    env: UseAppendAction[tuple[str, ...]] = ()
    """NAME=VALUE, or NAME for its value here; repeat for more."""

    timeout: Annotated[float | None, arg(metavar="SECONDS")] = None
    """Seconds after which the job ends, and the place of each process is printed."""

    restarts: int = 0
    """How often to start a failed job again."""

    log_dir: Annotated[Path | None, arg(metavar="FOLDER")] = None
    """Folder for a log file per process, in a folder per run."""

    tee: Annotated[str, arg(metavar="PROCESSES")] = "all"
    """Processes whose output is shown here: all, none, or such as 0,4-7."""

    stdin: Literal["first", "none"] = "first"
    """Whether process 0 reads the input of stretto run."""

    port: int = 0
    """Port of JAX's coordinator; 0: any free one."""

    interface: Annotated[str | None, arg(metavar="NAME")] = None
    """Network interface between the hosts, such as eth0."""

    start_timeout: float = 60.0
    """Seconds in which all processes must start."""

    grace: float = 30.0
    """Seconds for processes to end after SIGTERM or Ctrl-C."""

    control_port: int = 0
    """Port at which stretto run listens for its processes; 0: any free one."""

    network_timeout: float = 6.0
    """Seconds of silence after which a host counts as lost."""

    dry_run: FlagCreatePairsOff[bool] = False
    """Print the commands and processes, and start nothing."""


# Options that take a number, and what is one.
_NUMBERS = {
    "-n": (int, "a whole number"),
    "--num-devices": (int, "a whole number"),
    "--devices-per-gpu": (int, "a whole number"),
    "--restarts": (int, "a whole number"),
    "--port": (int, "a whole number"),
    "--min-devices": (int, "a whole number"),
    "--network-timeout": (float, "a number of seconds"),
    "--timeout": (float, "a number of seconds"),
    "--start-timeout": (float, "a number of seconds"),
    "--grace": (float, "a number of seconds"),
    "--control-port": (int, "a whole number"),
}
_FLAGS = ("--dry-run", "--help", "-h")
_MODULE = ("-m", "--module")


def known_options() -> set[str]:
    """The names of all options but those for help."""
    names = [field.name for field in fields(RunOptions) if field.name not in ("script", "args")]
    return {"-n", "-m", *(f"--{name.replace('_', '-')}" for name in names)}


def split_arguments(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """``(options and SCRIPT, ARGS)``: everything after the script is its own, dashes and all.

    With ``-m`` SCRIPT is the name that follows it.

    Raises:
      LaunchError: an option is unknown, has no number where it needs one, or none of the words that
        it takes, or there is no script.
    """
    known = sorted({*_FLAGS, *known_options()})
    index = 0
    while index < len(argv):
        token = argv[index]
        if token == "--":
            return [*argv[:index], *argv[index + 1 : index + 2]], list(argv[index + 2 :])
        if not token.startswith("-"):
            return list(argv[: index + 1]), list(argv[index + 1 :])
        if token in _MODULE and len(argv) > index + 1:
            return list(argv[: index + 2]), list(argv[index + 2 :])
        name = token.partition("=")[0]
        if name in ("-h", "--help"):
            return ["--help"], []
        if name not in known and not _is_joined_n(token):
            close = get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else "see stretto run --help"
            raise LaunchError(f"there is no option {name}; {hint}")
        following = [token.partition("=")[2]] if "=" in token else argv[index + 1 :]
        if name in _NUMBERS:
            _check_number(name, following)
        _check_choice(name, following)
        alone = token in _FLAGS or "=" in token or _is_joined_n(token)
        index += 1 if alone else 2
    raise LaunchError("no SCRIPT was given; write stretto run [OPTIONS] SCRIPT [ARGS]")


def _check_number(name: str, following: Sequence[str]) -> None:
    """Raises LaunchError unless the first of what follows an option is its number."""
    read, what = _NUMBERS[name]
    try:
        read(*following[:1])
    except ValueError:
        raise LaunchError(f"{name} {following[0]} must be {what}") from None


def _check_choice(name: str, following: Sequence[str]) -> None:
    """Raises LaunchError unless the first of what follows is one of the words that ``name`` takes.

    An option of another type takes any, and one that takes a number as well takes those.
    """
    hint = get_type_hints(RunOptions).get(name.removeprefix("--").replace("-", "_"))
    kinds = (hint,) if get_origin(hint) is Literal else get_args(hint)
    words = [str(word) for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    value = next(iter(following), None)
    if not words or value is None or value in words or (int in kinds and value.isdecimal()):
        return
    listed = [*words, "a whole number"] if int in kinds else words
    raise LaunchError(f"{name} {value} must be {', '.join(listed[:-1])} or {listed[-1]}")


def parse(argv: Sequence[str]) -> RunOptions:
    """The options of a ``stretto run`` command line; tyro shows help and wrong values, and exits.

    Raises:
      LaunchError: an option is unknown, or there is no script.
    """
    own, script_arguments = split_arguments(argv)
    own = [f"-n={token[2:]}" if _is_joined_n(token) else token for token in own]
    own = _joined(own, "--launcher-args")
    description = inspect.getdoc(RunOptions)
    options = tyro.cli(RunOptions, args=own, prog="stretto run", description=description)
    return replace(options, args=tuple(script_arguments))


def _joined(argv: Sequence[str], option: str) -> list[str]:
    """The same with ``option VALUE`` as ``option=VALUE``, since VALUE may begin with a dash."""
    joined = list(argv)
    while option in joined[:-1]:
        index = joined.index(option)
        joined[index : index + 2] = [f"{option}={joined[index + 1]}"]
    return joined


def _is_joined_n(token: str) -> bool:
    return token.startswith("-n") and token[2:].isdecimal()
