"""What ``stretto run`` starts, settled before anything is started."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stretto.launch.planning.launchers import AgentCommand
from stretto.launch.planning.layout import Layout


@dataclass(frozen=True)
class Job:
    """A script in the processes of a layout, and the commands that start their agents.

    ``environ`` is what every process gets beside its host's own variables; ``timeout_s``
    limits an attempt, ``start_timeout_s`` the time until all agents have connected;
    ``port`` is JAX's coordinator port, 0 for any free one; ``interface`` names the network
    interface whose addresses are used between hosts; ``attempt`` counts restarts.
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
    attempt: int = 0

    @property
    def is_local(self) -> bool:
        """Whether all processes are on this machine, and loopback will do."""
        return set(self.layout.hosts) == {"localhost"}
