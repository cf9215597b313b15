"""Private JAX: only the files `jax_*.py` of this folder import `jax._src`.

Each section says what it needs that has no public name, and the JAX versions it was checked on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import core as jax_core
from jax._src.interpreters import mlir
from jax._src.lib.mlir.dialects import hlo
from jax._src.pallas import mpmd
from jax._src.pallas import primitives as pallas_primitives
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.pallas.mosaic_gpu import lowering as gpu_lowering
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, scf

from stretto.distributed import clique, jax_callbacks, jax_lowering, mailbox

# --- A wait with a time limit ---------------------------------------------------------------------
# Pallas' `semaphore_wait` spins for ever. This primitive takes its operands (a semaphore ref with
# its transforms, and a value) and lowers to a spin that watches the clock. It needs the registry of
# Mosaic GPU's lowering rules. Checked on 0.11.2 and 0.12.0.1.

type MemoryScope = Literal["sys", "gpu"]

bounded_wait_p = jax_core.Primitive("stretto_wait")
bounded_wait_p.multiple_results = True


def bounded_wait(
    semaphore: Any,
    value: int | jax.Array,
    *,
    indices: Sequence[int | jax.Array],
    decrement: bool,
    scope: MemoryScope,
    site: mailbox.Site,
    across_devices: bool,
) -> None:
    """Waits until `semaphore` is at least `value`; past the limit leaves a report and traps.

    Args:
      semaphore: ref (or view) of one regular semaphore.
      value: int32, what to wait for.
      indices: position of the semaphore in its array, for the report only.
      decrement: subtract `value` once the wait is over.
      scope: "sys" where the signals can come from another device, "gpu" where they cannot.
      site: names the wait in the report, and holds its limit.
      across_devices: whether the kernel has a team, and so a device id to report.
    """
    ref, transforms = pallas_primitives._get_ref_and_transforms(semaphore)
    operands = (ref, transforms, _int32(value))
    flat, args_tree = jax.tree.flatten(operands)
    bounded_wait_p.bind(
        *flat,
        *map(_int32, indices[: mailbox.MAX_INDICES]),
        args_tree=args_tree,
        decrement=decrement,
        scope=scope,
        site=site,
        across_devices=across_devices,
    )


def _int32(x: int | jax.Array) -> jax.Array:
    return jnp.asarray(x, dtype=jnp.int32)


@bounded_wait_p.def_effectful_abstract_eval
def _bounded_wait_abstract_eval(*avals, args_tree, **_):
    num_operands = args_tree.num_leaves
    sem_aval, transform_avals, _ = jax.tree.unflatten(args_tree, avals[:num_operands])
    pallas_primitives.check_sem_avals(sem_aval, transform_avals, "wait")
    return [], {pallas_primitives.sem_effect}


def _bounded_wait_lowering(ctx, *args, args_tree, decrement, scope, site, across_devices):
    num_operands = args_tree.num_leaves
    sem, transforms, value = jax.tree.unflatten(args_tree, args[:num_operands])
    sem_aval, transform_avals, _ = jax.tree.unflatten(args_tree, ctx.avals_in[:num_operands])
    sem, _, transforms = gpu_lowering._handle_transforms(
        ctx, sem_aval, sem, transform_avals, transforms
    )
    if transforms:
        raise NotImplementedError(f"cannot wait on a semaphore seen through {transforms}")

    def as_i32(x):
        return gpu_lowering._ensure_ir_value(x, jnp.int32)

    device = ctx.launch_ctx.device_id() if across_devices else as_i32(0)
    operands = [sem, as_i32(value), device, *map(as_i32, args[num_operands:])]
    is_warp = ctx.module_ctx.primitive_semantics == gpu_core.PrimitiveSemantics.Warp
    threads = mgpu.ThreadSubset.WARP if is_warp else mgpu.ThreadSubset.WARPGROUP
    with gpu_lowering._wrap_in_custom_primitive_if_wg(ctx, operands) as inner:
        sem, value, device, *indices = inner
        with mgpu_utils.single_thread(scope=threads):
            ptr = mgpu_utils.memref_ptr(sem)
            _emit_bounded_spin(ptr, value, device, indices, decrement, scope, site)
        if is_warp:
            mgpu_utils.warp_barrier()
        else:
            mgpu_utils.warpgroup_barrier()
    return ()


for _semantics in (
    gpu_core.LANExWG_SEMANTICS,
    gpu_core.LANExWARP_SEMANTICS,
    gpu_core.WGxWG_SEMANTICS,
    gpu_core.WGxWARP_SEMANTICS,
):
    gpu_lowering.register_lowering_rule(bounded_wait_p, *_semantics)(_bounded_wait_lowering)


def _emit_bounded_spin(ptr, wanted, device, indices, decrement, scope, site) -> None:
    """One thread's spin on `ptr`, its fences, and the report and trap past the limit."""
    i32 = ir.IntegerType.get_signless(32)
    limit_ns = None if math.isinf(site.limit_s) else round(site.limit_s * 1e9)
    seen, timed_out = mgpu_utils.inline_ptx(
        _spin_ptx(scope, decrement, limit_ns),
        ptr,
        wanted,
        result_types=(i32, i32),
        has_side_effects=True,
    )
    if limit_ns is None:
        return
    late = arith.cmpi(arith.CmpIPredicate.ne, timed_out, mgpu_utils.c(0, i32))
    if_late = scf.IfOp(late)
    with ir.InsertionPoint(if_late.then_block):
        block = [arith.index_cast(i32, gpu.block_id(d)) for d in gpu.Dimension]
        words = [device, *block, wanted, seen, mgpu_utils.c(len(indices), i32), *indices]
        mgpu_utils.inline_ptx(
            _report_ptx(len(words)),
            mgpu_utils.c(mailbox.register(site), i32),
            *words,
            has_side_effects=True,
        )
        scf.YieldOp([])


def _report_ptx(num_words: int) -> str:
    """PTX that writes a record of `mailbox` and stops the kernel: $0 the site, then the words."""
    stores = "\n".join(
        f"st.relaxed.sys.global.u32 [at+{8 + 4 * i}], ${1 + i};" for i in range(num_words)
    )
    return f"""{{
        .reg .u32 slot;
        .reg .u64 at;
        and.b32 slot, $1, {mailbox.MAX_DEVICES - 1};
        mul.wide.u32 at, slot, {mailbox.RECORD_BYTES};
        add.u64 at, at, {mailbox.address():#x};
        st.relaxed.sys.global.u32 [at+4], $0;
        {stores}
        st.release.sys.global.u32 [at], {mailbox.WRITTEN};
        fence.acq_rel.sys;
        trap;
    }}"""


def _spin_ptx(scope: MemoryScope, decrement: bool, limit_ns: int | None) -> str:
    """PTX of the spin: $0 value seen, $1 whether it timed out, $2 address, $3 value wanted.

    With `limit_ns` None it spins for ever.

    The clock is read only once the first look has failed. Looks acquire by themselves: a fence
    after the spin would wait for everything that the thread has in flight. The proxy fence orders
    bulk copies, issued next, after what the signaller wrote.
    """
    look = f"ld.acquire.{scope}.global.u32 $0, [$2]; setp.ge.u32 p, $0, $3;"
    take = f"""
        @!p bra LATER;
        sub.u32 n, $0, $3;
        atom.acquire.{scope}.global.cas.b32 w, [$2], $0, n;
        setp.eq.u32 p, w, $0;
    """
    look_at_the_clock = f"""
        mov.u64 now, %globaltimer;
        setp.eq.u64 p, begin, 0;
        @p mov.u64 begin, now;
        sub.u64 now, now, begin;
        setp.lt.u64 p, now, {limit_ns};
        @p bra AGAIN;
        mov.u32 $1, 1;
    """
    return f"""{{
        .reg .pred p;
        .reg .u32 w, n;
        .reg .u64 begin, now;
        mov.u32 $1, 0;
        mov.u64 begin, 0;
        AGAIN: {look}
        {take if decrement else ""}
        @p bra DONE;
        LATER: {"bra AGAIN;" if limit_ns is None else look_at_the_clock}
        DONE: fence.proxy.async;
    }}"""


# --- Types of values inside shard_map -------------------------------------------------------------
# The mesh axes that a value varies over are public only as text. Checked on 0.11.2 and 0.12.0.1.


def varying_axes(x: jax.Array) -> frozenset[Hashable]:
    """The manual mesh axes that `x` is typed as varying over."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


# --- Kernels on a CPU -----------------------------------------------------------------------------
# Mosaic GPU kernels arrive as `mpmd_map`, which JAX can lower for CPU only in its own interpreter.
# The simulator needs to lower it to a callback that brings the device's position and its operands.
# Checked on 0.11.2 and 0.12.0.1.


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoweredKernel:
    """A kernel call that is being lowered for CPU.

    Attributes:
      name: the kernel's name.
      jaxpr: its body, a function of refs of the operands and then of the results.
      pallas_mesh: grid, cluster and threads.
      interpret, compiler_params: what `plgpu.kernel` was given under these names.
      axis_names, axis_sizes: axes of the device mesh, or of the clique in it that the kernel runs
        on; none outside of `shard_map`.
      turned: they count their devices from the end (`clique`).
      unordered: why no GPU runs a kernel that communicates on devices in this order, if none does.
      out_avals: shapes and types of the results.
      aliases: results that are an operand's memory, as {result: operand}.
      refusal: says what JAX has against lowering it for GPUs of a compute capability; to be called
        while it is lowered.
    """

    name: str
    jaxpr: Any
    pallas_mesh: Any
    interpret: Any
    compiler_params: Any
    axis_names: tuple[Hashable, ...]
    axis_sizes: tuple[int, ...]
    turned: bool
    unordered: str | None
    out_avals: Sequence[Any]
    aliases: dict[int, int]
    refusal: Callable[[tuple[int, int]], jax_lowering.Refusal | None]


type KernelIntercept = Callable[[LoweredKernel], Callable[[jax_callbacks.Visit], None] | None]

_kernel_intercept: list[KernelIntercept] = []


def install_kernel_interception(intercept: KernelIntercept) -> None:
    """Has `intercept` see every Mosaic GPU kernel that is lowered for CPU from now on.

    Args:
      intercept: from a kernel to the host function that runs it, which is called for each device
        with its `Visit`, at its position on those axes (row-major); or to None, to lower the kernel
        as JAX does.
    """
    if not _kernel_intercept:
        # A cached lowering would be made in a function of its own, out of the calls' order.
        mlir.register_lowering(
            mpmd.mpmd_map_p, lower_kernel_for_cpu, platform="cpu", cacheable=False
        )
    _kernel_intercept[:] = [intercept]


def lower_kernel_for_cpu(
    ctx: mlir.LoweringRuleContext, *operands, members: Sequence[int] | None = None, **params
):
    """The lowering of `mpmd_map` for CPU: a callback, or what JAX makes of it.

    `members` are the positions in the program's mesh of the devices that the kernel runs on, as it
    counts them: in their order or, in a kernel that counts from the end, in the other; all of them
    by default.
    """
    meshes, jaxprs = params["meshes"], params["jaxprs"]
    callback = None
    axis_context = ctx.module_context.axis_context
    if len(meshes) == 1 and isinstance(meshes[0], gpu_core.Mesh):
        device_mesh = getattr(axis_context, "mesh", None)
        shape = dict(device_mesh.shape) if device_mesh is not None else {}
        kernel = LoweredKernel(
            name=params["name"] or "kernel",
            jaxpr=jaxprs[0],
            pallas_mesh=meshes[0],
            interpret=params["interpret"],
            compiler_params=params["compiler_params"],
            axis_names=tuple(shape),
            axis_sizes=tuple(shape.values()),
            turned=members is not None and members[0] > members[-1],
            # A clique's order has been looked at.
            unordered=_order_obstacle(device_mesh) if members is None else None,
            out_avals=ctx.avals_out,
            aliases={o: i for i, o in dict(params["input_output_aliases"]).items()},
            refusal=functools.partial(jax_lowering.refusal, ctx, params),
        )
        callback = _kernel_intercept[0](kernel)
        if callback is None and not kernel.interpret:
            raise ValueError(
                f"kernel {kernel.name} needs GPUs; on a CPU run it with `stretto simulate SCRIPT`,"
                " or inside `stretto.simulate()`."
            )
    if callback is None:
        return mpmd._mpmd_map_fallback_lowering(ctx, *operands, **params)
    if members is not None:
        callback = _at_members(callback, sorted(members))
    position = (
        hlo.partition_id() if axis_context_is_spmd(axis_context) else mlir.ir_constant(np.uint32(0))
    )
    return jax_callbacks.emit(ctx, callback, position, operands)


def _order_obstacle(mesh: Any) -> str | None:
    return clique.order_obstacle(mesh) if isinstance(mesh, jax.sharding.Mesh) else None


def _at_members(
    callback: Callable[[jax_callbacks.Visit], None], members: Sequence[int]
) -> Callable[[jax_callbacks.Visit], None]:
    """`callback`, called with positions in a mesh that are then counted among `members`."""
    numbers = {position: number for number, position in enumerate(members)}

    def call(visit: jax_callbacks.Visit) -> None:
        callback(dataclasses.replace(visit, position=numbers[visit.position]))

    return call


def axis_context_is_spmd(axis_context: Any) -> bool:
    """Whether a program is lowered as one of many that run together on a mesh."""
    return getattr(axis_context, "mesh", None) is not None


@contextlib.contextmanager
def cpu_core_count(count: int) -> Generator[None]:
    """Gives CPU devices a `core_count`, which GPU kernels size their grids by."""
    device_type = type(jax.local_devices(backend="cpu")[0])
    before = device_type.__dict__.get("core_count")
    fallback = getattr(device_type, "__getattr__", None)

    def core_count(device: Any) -> int:
        if device.platform == "cpu" or fallback is None:
            return count
        return fallback(device, "core_count")

    device_type.core_count = property(core_count)
    try:
        yield
    finally:
        if before is None:
            del device_type.core_count
        else:
            device_type.core_count = before
