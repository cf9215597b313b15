"""Semaphores in the heap (`heap`), for kernels.

Pallas makes a kernel's semaphores out of buffers that XLA zeroes before each launch, and reaches a
peer's through the addresses that XLA collects. Those of the heap lie where they always lie. They
are refs like others, for everything but a peer's; that, a device's slot, and zeros in all of
them are primitives here.
Private JAX, checked on 0.11.2 and 0.12.0.1.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.core import Primitive

from stretto.distributed.memory import heap
from stretto.distributed.private_jax import kernel_rules
from stretto.distributed.private_jax.dialects import arith, ir, llvm
from stretto.distributed.private_jax.kernel_rules import EVERYWHERE, lowers

# --- A ref of semaphores --------------------------------------------------------------------------

heap_semaphores_p = Primitive("stretto_heap_semaphores")
heap_semaphores_p.ref_primitive = True
heap_semaphores_p.ref_allocating = True


def semaphores(shape: tuple[int, ...], word: int, *, name: str, reverse: bool) -> Any:
    """A ref of the semaphores that start at `word` (of 4 bytes) of this device's slot.

    `name` is for the simulator's reports.
    """
    if not 0 <= 4 * word <= heap.SLOT_BYTES - 4 * math.prod(shape):
        raise ValueError(f"semaphores of shape {shape} at word {word} do not fit a slot.")
    what = plgpu.SemaphoreType.REGULAR(shape).get_ref_aval()
    return heap_semaphores_p.bind(what=what, word=word, sem_name=name, reverse=reverse)


@heap_semaphores_p.def_abstract_eval
def _heap_semaphores_abstract_eval(*, what, **_):
    return what


@lowers(heap_semaphores_p, EVERYWHERE)
def _heap_semaphores_lowering(ctx, *, what, word, sem_name, reverse):
    del sem_name
    size = math.prod(ctx.module_ctx.mesh_info.mesh_shape)
    if size > heap.MAX_SLOTS:
        raise NotImplementedError(f"kernels join at most {heap.MAX_SLOTS} devices, not {size}.")
    i64 = ir.IntegerType.get_signless(64)
    slot = arith.extui(i64, _slot_of(ctx, ctx.launch_ctx.device_id(), reverse))
    address = arith.addi(
        arith.muli(slot, mgpu_utils.c(heap.SLOT_BYTES, i64)),
        mgpu_utils.c(heap.address() + 4 * word, i64),
    )
    pointer = llvm.inttoptr(llvm.PointerType.get(), address)
    memref = ir.MemRefType.get(what.shape, ir.IntegerType.get_signless(32))
    return mgpu_utils.ptr_as_memref(pointer, memref)


def _slot_of(ctx: Any, device: ir.Value, reverse: bool) -> ir.Value:
    """The slot of a device that the kernel knows as number `device` of its clique."""
    if not reverse:
        return device
    last = math.prod(ctx.module_ctx.mesh_info.mesh_shape) - 1
    return arith.subi(mgpu_utils.c(last, device.type), device)


# --- A device's slot ------------------------------------------------------------------------------

slot_p = Primitive("stretto_slot")


def slot(device_id: dict, *, reverse: bool) -> jax.Array:
    """The slot of the device that Pallas' remote operations name `device_id`, int32."""
    leaves, tree = jax.tree.flatten(device_id)
    return slot_p.bind(*map(_int32, leaves), tree=tree, reverse=reverse)


def _int32(x: int | jax.Array) -> jax.Array:
    return jnp.asarray(x, dtype=jnp.int32)


@slot_p.def_effectful_abstract_eval
def _slot_abstract_eval(*avals, tree, **_):
    return ShapedArray((), jnp.int32), _effects(tree.unflatten(avals))


def _effects(device_id: dict) -> set:
    """Those of a device id: it depends on where the device is along the axes it names."""
    names = [key if isinstance(key, tuple) else (key,) for key in device_id]
    return {kernel_rules.axis_effect(name) for key in names for name in key}


@lowers(slot_p, EVERYWHERE)
def _slot_lowering(ctx, *leaves, tree, reverse):
    device = kernel_rules.logical_device(ctx, tree.unflatten(leaves), tree.unflatten(ctx.avals_in))
    found = _slot_of(ctx, device, reverse)
    return kernel_rules.as_result(ctx, found)


# --- A signal to a peer ---------------------------------------------------------------------------

signal_p = Primitive("stretto_signal")
signal_p.multiple_results = True


def signal(semaphore: Any, inc: int | jax.Array, *, device_id: dict, reverse: bool) -> None:
    """Adds `inc` to a peer's semaphore of the heap, the same one as `semaphore` (release, sys)."""
    ref, transforms = kernel_rules.ref_and_transforms(semaphore)
    operands = (ref, transforms, _int32(inc), jax.tree.map(_int32, device_id))
    flat, args_tree = jax.tree.flatten(operands)
    signal_p.bind(*flat, args_tree=args_tree, reverse=reverse)


@signal_p.def_effectful_abstract_eval
def _signal_abstract_eval(*avals, args_tree, **_):
    sem_aval, transform_avals, _, device_id = jax.tree.unflatten(args_tree, avals)
    kernel_rules.check_semaphore(sem_aval, transform_avals, "signal")
    return [], {kernel_rules.SEMAPHORE_EFFECT, *_effects(device_id)}


@lowers(signal_p, EVERYWHERE)
def _signal_lowering(ctx, *args, args_tree, reverse):
    sem, transforms, inc, device_id = jax.tree.unflatten(args_tree, args)
    avals = jax.tree.unflatten(args_tree, ctx.avals_in)
    sem = kernel_rules.semaphore_of(ctx, avals[0], sem, avals[1], transforms, "signal")
    own = _slot_of(ctx, ctx.launch_ctx.device_id(), reverse)
    peer = _slot_of(ctx, kernel_rules.logical_device(ctx, device_id, avals[3]), reverse)
    operands = [sem, kernel_rules.int32_value(inc), arith.subi(peer, own)]
    with kernel_rules.one_operation(ctx, operands) as inner:
        sem, inc, distance = inner
        kernel_rules.meet(ctx)
        i64 = ir.IntegerType.get_signless(64)
        offset = arith.muli(arith.extsi(i64, distance), mgpu_utils.c(heap.SLOT_BYTES, i64))
        here = llvm.ptrtoint(i64, mgpu_utils.memref_ptr(sem))
        there = llvm.inttoptr(llvm.PointerType.get(), arith.addi(here, offset))
        mgpu_utils.SemaphoreRef(there).signal(inc, predicate=ctx.module_ctx.single_lane_predicate)
    return ()


# --- Zeros ----------------------------------------------------------------------------------------

zero_p = Primitive("stretto_zero")
zero_p.multiple_results = True


def zero(semaphores: Any) -> None:
    """Sets all semaphores of a ref to 0; each lane of a warp stores some of them."""
    zero_p.bind(semaphores)


@zero_p.def_effectful_abstract_eval
def _zero_abstract_eval(sem_aval):
    del sem_aval
    return [], {kernel_rules.SEMAPHORE_EFFECT}


@lowers(zero_p, EVERYWHERE)
def _zero_lowering(ctx, sem):
    i32 = ir.IntegerType.get_signless(32)
    count = math.prod(ctx.avals_in[0].shape)
    with kernel_rules.one_operation(ctx, [sem]) as inner:
        (sem,) = inner
        kernel_rules.meet(ctx)
        mgpu_utils.inline_ptx(
            _ZERO_PTX, mgpu_utils.memref_ptr(sem), mgpu_utils.c(count, i32), has_side_effects=True
        )
    return ()


_ZERO_PTX = """{
    .reg .pred p;
    .reg .u32 at;
    .reg .u64 address;
    mov.u32 at, %laneid;
    AGAIN: setp.lt.u32 p, at, $1;
    mad.wide.u32 address, at, 4, $0;
    @p st.relaxed.sys.global.u32 [address], 0;
    add.u32 at, at, 32;
    @p bra AGAIN;
}"""
"""$0 is where the semaphores begin, and $1 how many they are."""
