"""What of Mosaic GPU the simulator refuses, and why: told before a kernel is prepared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stretto.distributed.simulator.reports.errors import UnsupportedKernelError
from stretto.distributed.simulator.reports.flaws import inner_jaxprs
from stretto.distributed.sites import Site, is_kernel_code, site_of

_TENSOR_MEMORY = (
    "tensor memory is Blackwell's, and the simulator is of Hopper; multiply with plgpu.wgmma into"
    " plgpu.ACC, or run this kernel on a GPU only"
)
_LAUNCH_CONTROL = (
    "cluster launch control, of which plgpu.dynamic_scheduling_loop is made, is Blackwell's, and"
    " the simulator is of Hopper; divide the work among the blocks with plgpu.nd_loop"
)
CP_ASYNC = (
    "copies without a barrier (cp.async) are refused by Mosaic GPU on Hopper, too; give"
    " copy_gmem_to_smem a plgpu.Barrier and wait for that"
)
_MASKED = "masked loads and stores are refused by Mosaic GPU, too; take a slice, or jnp.where"
_INLINE = (
    "only a GPU can run the device code of inline_mgpu; where"
    " stretto.distributed.simulator.is_simulating() says so, do the same with operations of Pallas"
)

REFUSED: dict[str, str] = {
    "try_cluster_cancel": _LAUNCH_CONTROL,
    "query_cluster_cancel": _LAUNCH_CONTROL,
    "tcgen05_mma": _TENSOR_MEMORY,
    "tcgen05_commit_arrive": _TENSOR_MEMORY,
    "async_copy_scales_to_tmem": _TENSOR_MEMORY,
    "async_copy_smem_to_tmem": _TENSOR_MEMORY,
    "async_copy_sparse_metadata_to_tmem": _TENSOR_MEMORY,
    "async_load": _TENSOR_MEMORY,
    "async_store_tmem": _TENSOR_MEMORY,
    "commit_tmem": _TENSOR_MEMORY,
    "wait_load_tmem": _TENSOR_MEMORY,
    "wait_gmem_to_smem": CP_ASYNC,
    "masked_load": _MASKED,
    "masked_swap": _MASKED,
    "wgmma": "it is made while JAX lowers a kernel, and no kernel has it before",
    "inline_mgpu": _INLINE,
}
"""Why each of these primitives is refused. Of several in a kernel, the first here is told."""


def check_primitives(name: str, jaxpr: Any) -> None:
    """Refuses the kernel `name` if its jaxpr, or one inside it, has a primitive of `REFUSED`.

    Raises:
      UnsupportedKernelError: names the primitive, its line and a way out.
    """
    found: dict[str, str] = {}
    for primitive, site, outer in _refused(jaxpr, None):
        where = f"{site}" if outer is None or is_kernel_code(site) else f"{site}, in {outer}"
        found.setdefault(primitive, f"{primitive!r} used at {where}")
    for primitive, reason in REFUSED.items():
        if primitive in found:
            raise UnsupportedKernelError(f"kernel {name}: {reason} ({found[primitive]})")


def _refused(jaxpr: Any, outer: Site | None) -> Iterator[tuple[str, Site, Site | None]]:
    """Each refused primitive, its line, and the innermost line of kernel code around it."""
    for eqn in jaxpr.eqns:
        primitive = eqn.primitive.name.removesuffix("_p")
        inner = list(inner_jaxprs(eqn))
        if primitive in REFUSED:
            yield primitive, site_of(eqn), outer
        elif inner:
            site = site_of(eqn)
            for one in inner:
                yield from _refused(one, site if is_kernel_code(site) else outer)
