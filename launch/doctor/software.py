"""Python, the packages, and variables that are known to break a job."""

import platform
from collections.abc import Mapping
from importlib import metadata

from stretto.launch import environment
from stretto.launch.doctor.finding import Finding, error, ok, warning

_PYTHON_FROM = (3, 12)
_JAX_FROM = (0, 11, 2)
_JAX_BELOW = (0, 13)


def check_software() -> list[Finding]:
    """Versions of Python, JAX and Stretto, and this environment's variables."""
    return [
        judge_python(platform.python_version()),
        judge_jax(_version("jax"), _version("jaxlib")),
        ok("stretto", _version("stretto") or "running from a source tree"),
        *judge_variables(environment.current()),
    ]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def numbers(version: str) -> tuple[int, ...]:
    """``(0, 11, 2)`` for ``0.11.2`` or ``0.11.2.dev3``."""
    parts = []
    for part in version.split("."):
        if not part.isdecimal():
            break
        parts.append(int(part))
    return tuple(parts)


def judge_python(version: str) -> Finding:
    """Python must be recent enough for JAX."""
    if numbers(version) < _PYTHON_FROM:
        return error("python", f"{version} is too old", "use Python 3.12 or newer")
    return ok("python", version)


def judge_jax(jax: str | None, jaxlib: str | None) -> Finding:
    """JAX must be a version that the kernels were checked on, and jaxlib must be its own."""
    supported = "0.11.2 or newer, below 0.13"
    if jax is None or jaxlib is None:
        return error("jax", "not installed", f"install jax {supported}")
    if not _JAX_FROM <= numbers(jax) < _JAX_BELOW:
        return error("jax", f"{jax} is not supported", f"install jax {supported}")
    if numbers(jaxlib)[:2] != numbers(jax)[:2]:
        return error("jax", f"jax {jax} with jaxlib {jaxlib}", f"install jaxlib {jax}")
    return ok("jax", jax)


def judge_variables(environ: Mapping[str, str]) -> list[Finding]:
    """Variables that abort, slow down or confuse a job."""
    found = []
    if "nvshmem" in environ.get("XLA_FLAGS", "").lower():
        found.append(
            error(
                "environment",
                "XLA_FLAGS names NVSHMEM, which JAX no longer has; XLA aborts the process",
                "remove that flag from XLA_FLAGS",
            )
        )
    proxies = sorted(name for name in environ if name.lower() in ("http_proxy", "https_proxy"))
    if proxies and not environ.get("no_proxy", environ.get("NO_PROXY")):
        found.append(
            warning(
                "environment",
                f"{' and '.join(proxies)} set: processes started without stretto run may try to "
                "reach their coordinator through the proxy",
                "set no_proxy to the cluster's addresses; stretto run does not pass proxies on",
            )
        )
    return found
