"""The version of CUDA that JAX runs with. Private JAX, checked on 0.11.2.

JAX refuses its own attention kernel with a causal mask for CUDA 12.8 up to 12.9.0, whose assembler
miscompiles it (`jax/experimental/pallas/ops/gpu/attention_mgpu.py`). Stretto's is much like it.
"""

from __future__ import annotations

FROM, BEFORE = 12080, 12091


def running() -> int | None:
    """As 1000 * major + 10 * minor; None without CUDA, or where this JAX does not tell."""
    try:
        from jax._src.lib import cuda_versions

        return None if cuda_versions is None else cuda_versions.cuda_runtime_get_version()
    except (ImportError, AttributeError, RuntimeError):
        return None


def miscompiles_attention() -> str | None:
    """Why this CUDA cannot compile attention; None if it can."""
    version = running()
    if version is not None and FROM <= version < BEFORE:
        return (
            f"the assembler of CUDA {version // 1000}.{version % 1000 // 10} miscompiles attention;"
            " install CUDA 12.9.1 or later, or the extra cuda13."
        )
    return None
