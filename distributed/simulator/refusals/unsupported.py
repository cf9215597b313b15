"""Operations of Mosaic GPU that the simulator refuses, checked before a kernel is prepared."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterator
from typing import Any

from stretto.distributed.simulator.reports.errors import UnsupportedKernelError
from stretto.distributed.simulator.reports.flaws import inner_jaxprs
from stretto.distributed.sites import Site, is_kernel_code, site_of
from stretto.distributed.targets import Target

_SIMULATE_BLACKWELL = (
    'simulate a B200 with simulate(target="b200"), or stretto simulate --target b200'
)
_TENSOR_MEMORY = (
    f"tensor memory is Blackwell's, and the simulation is of an H100; {_SIMULATE_BLACKWELL}; for"
    " Hopper, multiply with plgpu.wgmma into plgpu.ACC"
)
_LAUNCH_CONTROL = (
    "cluster launch control, of which plgpu.dynamic_scheduling_loop is made, is Blackwell's, and"
    f" the simulation is of an H100; {_SIMULATE_BLACKWELL}; for Hopper, divide the work among the"
    " blocks with plgpu.nd_loop"
)
_WGMMA = (
    "plgpu.wgmma is Hopper's alone, and the simulation is of a B200; multiply with"
    " plgpu.tcgen05_mma into plgpu.TMEM, or simulate an H100 (the default target)"
)
SPARSE = (
    "products with a sparse operand are not simulated, nor is their metadata; multiply the"
    " operand with its zeros, or run this kernel on a GPU only"
)
CP_ASYNC = (
    "copies without a barrier (cp.async) are refused by Mosaic GPU on Hopper, too; give"
    " copy_gmem_to_smem a plgpu.Barrier and wait for that"
)
_MASKED = "masked loads and stores are refused by Mosaic GPU, too; take a slice, or jnp.where"
INLINE = (
    "only a GPU can run the device code of inline_mgpu; where"
    " stretto.distributed.simulator.is_simulating() says so, do the same with operations of Pallas"
)

BLACKWELLS: dict[str, str] = {
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
}
"""What a simulation of Hopper refuses, and why. Of several in a kernel, the first is reported."""

HOPPERS: dict[str, str] = {"wgmma_ref": _WGMMA}
"""What a simulation of Blackwell refuses."""

REFUSED: dict[str, str] = {
    "async_copy_sparse_metadata_to_tmem": SPARSE,
    "wait_gmem_to_smem": CP_ASYNC,
    "masked_load": _MASKED,
    "masked_swap": _MASKED,
    "wgmma": "it is made while JAX lowers a kernel, and no kernel has it before",
    "inline_mgpu": INLINE,
}
"""What every simulation refuses."""


def check_primitives(name: str, jaxpr: Any, target: Target | None) -> None:
    """Refuses the kernel `name` if its jaxpr, or one inside it, has a primitive that is refused.

    Args:
      name: of the kernel.
      jaxpr: its body.
      target: the GPU that is simulated; None for one that has all that any has.

    Raises:
      UnsupportedKernelError: names the primitive, its line and a way out.
    """
    others: dict[str, str] = {}
    if target is not None:
        others = HOPPERS if target.is_blackwell else BLACKWELLS
    refused = {**others, **REFUSED}
    found: dict[str, str] = {}
    for primitive, site, outer in _refused(jaxpr, refused, None):
        where = f"{site}" if outer is None or is_kernel_code(site) else f"{site}, in {outer}"
        found.setdefault(primitive, f"{primitive!r} used at {where}")
    for primitive, reason in refused.items():
        if primitive in found:
            raise UnsupportedKernelError(f"kernel {name}: {reason} ({found[primitive]})")


def _refused(
    jaxpr: Any, refused: Container[str], outer: Site | None
) -> Iterator[tuple[str, Site, Site | None]]:
    """Each refused primitive, its line, and the innermost line of kernel code around it."""
    for eqn in jaxpr.eqns:
        primitive = eqn.primitive.name.removesuffix("_p")
        inner = list(inner_jaxprs(eqn))
        if primitive in refused and not _is_simulated(eqn):
            yield primitive, site_of(eqn), outer
        elif inner:
            site = site_of(eqn)
            for one in inner:
                yield from _refused(one, refused, site if is_kernel_code(site) else outer)


def _is_simulated(eqn: Any) -> bool:
    if eqn.primitive.name.removesuffix("_p") != "inline_mgpu":
        return False
    return in_numpy(eqn) is not None or is_proxy_fence(eqn)


def in_numpy(eqn: Any) -> Callable[..., Any] | None:
    """What does the same as the device code of an `inline_mgpu` in numpy, if it says that."""
    return getattr(eqn.params["mgpu_fn"], "in_numpy", None)


def is_proxy_fence(eqn: Any) -> bool:
    """Whether an `inline_mgpu` is one fence between the two paths to shared memory, and no more.

    `plgpu.dynamic_scheduling_loop` makes two of them, as a function of JAX's that inserts PTX.
    """
    function = eqn.params["mgpu_fn"]
    if not function.__qualname__.startswith("inline_ptx."):
        return False
    text = inspect.getclosurevars(function).nonlocals.get("asm")
    instructions = [one.strip() for one in str(text).split(";") if one.strip()]
    return len(instructions) == 1 and instructions[0].startswith("fence.proxy.async")
