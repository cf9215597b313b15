"""What ``stretto run`` starts, settled before anything is started."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stretto.launch.planning.launchers import AgentCommand
from stretto.launch.planning.layout import Layout


@dataclass(frozen=True)
class Job:
    """A script in the processes of a layout, and the commands that start their agents.

    ``environ`` is what every process gets beside its host's own variables; ``timeout_s``
    limits an attempt, ``start_timeout_s`` the time until all agents have connected;
    ``port`` is JAX's coordinator port, 0 for any free one; ``interface`` names the network
    interface whose addresses are used between hosts; ``control_port`` is where agents connect,
    0 for any free one; ``grace_s`` is how long processes may take to end when a signal asks the
    job to; ``folder`` is removed with the job;
    ``attempt`` counts restarts.
    ``arguments`` begin with the script, or with ``-m`` and a module, whose file ``module_file`` is.
    ``bind`` says whether processes keep to the cores beside their GPUs; ``tee`` which processes
    are shown, all if None; ``takes_stdin`` whether process 0 reads the supervisor's input;
    ``silence_limit_s`` how long a host may be silent; ``start_hint`` what to check when agents
    do not come.
    """

    layout: Layout
    arguments: tuple[str, ...]
    cwd: str
    environ: Mapping[str, str]
    commands: tuple[AgentCommand, ...]
    log_dir: Path | None = None
    timeout_s: float | None = None
    start_timeout_s: float = 60.0
    port: int = 0
    interface: str | None = None
    control_port: int = 0
    grace_s: float = 30.0
    folder: Path | None = None
    attempt: int = 0
    module_file: str = ""
    bind: Literal["auto", "numa", "none"] = "auto"
    tee: frozenset[int] | None = None
    takes_stdin: bool = False
    silence_limit_s: float = 6.0
    start_hint: str = "check that ssh to it works without a password"

    @property
    def script(self) -> str:
        """The file that every process runs."""
        return self.module_file or self.arguments[0]

    @property
    def is_local(self) -> bool:
        """Whether all processes are on this machine, and loopback will do."""
        return set(self.layout.hosts) == {"localhost"}
