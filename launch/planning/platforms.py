"""Whether a job runs on GPUs or on CPUs: by the options, else by its hosts."""

from collections.abc import Mapping
from typing import Literal

from stretto.launch.environment import names_cuda
from stretto.launch.errors import LaunchError
from stretto.launch.planning.layout import Platform

PlatformName = Literal["cuda", "cpu"]
_NEITHER = "stretto run starts jobs on cuda or cpu"


def asked_platform(
    option: PlatformName | None, of_cluster: Platform | None, environ: Mapping[str, str]
) -> Platform | None:
    """The platform of ``--platform``, else of the cluster file, else of ``JAX_PLATFORMS``, or None.

    Raises:
      LaunchError: ``JAX_PLATFORMS`` has neither GPUs nor CPUs in it.
    """
    if option is not None:
        return "gpu" if option == "cuda" else "cpu"
    if of_cluster is not None:
        return of_cluster
    platforms = environ.get("JAX_PLATFORMS", "")
    if not platforms:
        return None
    if names_cuda(platforms):
        return "gpu"
    if "cpu" not in platforms.lower().replace(" ", "").split(","):
        raise LaunchError(f"JAX_PLATFORMS={platforms} names neither; {_NEITHER}: unset it")
    return "cpu"


def check_explicit(platform: Platform, explicit: Mapping[str, str], source: str = "--env") -> None:
    """Refuse a ``JAX_PLATFORMS`` of `source` that takes a job's GPUs away, or its CPUs.

    Raises:
      LaunchError: the two contradict each other.
    """
    wanted = explicit.get("JAX_PLATFORMS")
    if wanted is None:
        return
    if platform == "cpu" and wanted.strip().lower() != "cpu":
        raise LaunchError(
            f"{source} JAX_PLATFORMS={wanted} is not cpu, and the job is on CPUs; drop it, or ask "
            "for GPUs with --platform cuda"
        )
    if platform == "gpu" and not names_cuda(wanted):
        raise LaunchError(
            f"{source} JAX_PLATFORMS={wanted} has no cuda in it, and the job is on GPUs; drop it, "
            "or run on the CPU with --platform cpu"
        )
