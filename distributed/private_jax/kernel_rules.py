"""What the rules of Stretto's own operations inside kernels need of Pallas and Mosaic GPU.

Their registry of lowering rules is private, and so is what turns operands into values of MLIR.
Private JAX, checked on 0.11.2 and 0.12.0.1.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax.numpy as jnp
from jax._src import core as jax_core
from jax._src.pallas import primitives as pallas_primitives
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.pallas.mosaic_gpu import lowering as gpu_lowering
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir

MEMORY_EFFECT = gpu_core._memory_effect
"""Of what reads or writes memory that no operand is."""
SEMAPHORE_EFFECT = pallas_primitives.sem_effect
BY_WARPGROUP = (gpu_core.LANExWG_SEMANTICS,)
"""Code of a warpgroup, whose threads are told apart."""
EVERYWHERE = (
    gpu_core.LANExWG_SEMANTICS,
    gpu_core.LANExWARP_SEMANTICS,
    gpu_core.WGxWG_SEMANTICS,
    gpu_core.WGxWARP_SEMANTICS,
)
"""Also that of a single warp, and that of a warpgroup as a whole."""


def lowers[F: Callable[..., Any]](primitive: Any, where: Sequence[Any]) -> Callable[[F], F]:
    """Registers the rule that lowers `primitive` in a kernel."""

    def register(rule: F) -> F:
        for semantics in where:
            gpu_lowering.register_lowering_rule(primitive, *semantics)(rule)
        return rule

    return register


def axis_effect(name: Hashable) -> Any:
    """The effect of what depends on where a device is along a mesh axis."""
    return jax_core.NamedAxisEffect(name)


# --- Where a rule lowers --------------------------------------------------------------------------


def is_warp(ctx: Any) -> bool:
    """Whether a single warp runs the code, and not a warpgroup."""
    return ctx.module_ctx.primitive_semantics == gpu_core.PrimitiveSemantics.Warp


def meet(ctx: Any) -> None:
    """A barrier of those who run the code."""
    (mgpu_utils.warp_barrier if is_warp(ctx) else mgpu_utils.warpgroup_barrier)()


def one_operation(ctx: Any, operands: Sequence[ir.Value]) -> AbstractContextManager[Any]:
    """What is emitted inside it is one operation where a warpgroup's code is that of a whole.

    It gives the operands as they are inside.
    """
    return gpu_lowering._wrap_in_custom_primitive_if_wg(ctx, list(operands))


# --- Numbers --------------------------------------------------------------------------------------


def int32_value(x: Any) -> ir.Value:
    """An operand, an int32, as a value of MLIR."""
    return gpu_lowering._ensure_ir_value(x, jnp.int32)


def int32_result(value: Any) -> Any:
    """An int32 as the result of a rule for `BY_WARPGROUP`."""
    return gpu_lowering._ensure_fa(value, jnp.int32)


def as_result(ctx: Any, value: ir.Value) -> Any:
    """The same of a rule for `EVERYWHERE`."""
    is_lane = ctx.module_ctx.lowering_semantics == mgpu.LoweringSemantics.Lane
    return int32_result(value) if is_lane else value


def logical_device(ctx: Any, device_id: dict, aval: dict) -> ir.Value:
    """The number of a device in the kernel's mesh, of its places along axes."""
    kind = pallas_primitives.DeviceIdType.MESH
    return int32_value(gpu_lowering._device_id_to_logical(ctx, device_id, kind, aval))


# --- Semaphores -----------------------------------------------------------------------------------


def ref_and_transforms(semaphore: Any) -> tuple[Any, Any]:
    """A ref, or a view of one, as operands: the ref itself, and what makes the view."""
    return pallas_primitives._get_ref_and_transforms(semaphore)


def check_semaphore(aval: Any, transform_avals: Any, what: str) -> None:
    """Raises an error unless it is one semaphore, for operation `what`."""
    pallas_primitives.check_sem_avals(aval, transform_avals, what)


def semaphore_of(
    ctx: Any, aval: Any, ref: Any, transform_avals: Any, transforms: Any, what: str
) -> ir.Value:
    """The semaphore itself, of `ref_and_transforms`; `what` is the verb of the error.

    Raises:
      NotImplementedError: a view that has more than indices.
    """
    found, _, rest = gpu_lowering._handle_transforms(ctx, aval, ref, transform_avals, transforms)
    if rest:
        raise NotImplementedError(f"cannot {what} a semaphore seen through {rest}")
    return found
