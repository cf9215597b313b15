"""A wait with a time limit, in place of Pallas' `semaphore_wait`, which spins for ever.

The primitive takes its operands (a semaphore ref with its transforms, and a value) and lowers to a
spin that watches the clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.extend.core import Primitive

from stretto.distributed.memory import mailbox
from stretto.distributed.private_jax import kernel_rules
from stretto.distributed.private_jax.dialects import arith, gpu, ir, scf
from stretto.distributed.private_jax.kernel_rules import EVERYWHERE, int32_value, lowers

type MemoryScope = Literal["sys", "gpu"]

bounded_wait_p = Primitive("stretto_wait")
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
      decrement: subtract `value` once the wait is over; nobody else may be waiting then.
      scope: "sys" where the signals can come from another device, "gpu" where they cannot.
      site: names the wait in the report, and holds its limit.
      across_devices: whether the kernel has a team, and so a device id to report.
    """
    ref, transforms = kernel_rules.ref_and_transforms(semaphore)
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
    kernel_rules.check_semaphore(sem_aval, transform_avals, "wait")
    return [], {kernel_rules.SEMAPHORE_EFFECT}


@lowers(bounded_wait_p, EVERYWHERE)
def _bounded_wait_lowering(ctx, *args, args_tree, decrement, scope, site, across_devices):
    num_operands = args_tree.num_leaves
    sem, transforms, value = jax.tree.unflatten(args_tree, args[:num_operands])
    sem_aval, transform_avals, _ = jax.tree.unflatten(args_tree, ctx.avals_in[:num_operands])
    sem = kernel_rules.semaphore_of(ctx, sem_aval, sem, transform_avals, transforms, "wait on")
    device = ctx.launch_ctx.device_id() if across_devices else int32_value(0)
    operands = [sem, int32_value(value), device, *map(int32_value, args[num_operands:])]
    is_warp = kernel_rules.is_warp(ctx)
    threads = mgpu.ThreadSubset.WARP if is_warp else mgpu.ThreadSubset.WARPGROUP
    with kernel_rules.one_operation(ctx, operands) as inner:
        sem, value, device, *indices = inner
        with mgpu_utils.single_thread(scope=threads):
            ptr = mgpu_utils.memref_ptr(sem)
            _emit_bounded_spin(ptr, value, device, indices, decrement, scope, site)
        kernel_rules.meet(ctx)
    return ()


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
            report_ptx(len(words)),
            mgpu_utils.c(mailbox.register(site), i32),
            *words,
            has_side_effects=True,
        )
        scf.YieldOp([])


def report_ptx(num_words: int) -> str:
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

    The clock is read only after the first poll has failed. Polls acquire by themselves: a fence
    after the spin would wait for everything that the thread has in flight. The proxy fence orders
    bulk copies, issued next, after what the signaller wrote. What is subtracted is not waited for:
    with no one else who subtracts, the counter cannot have become smaller since the last poll.
    """
    look = f"ld.acquire.{scope}.global.u32 $0, [$2]; setp.ge.u32 p, $0, $3;"
    take = f"sub.u32 n, 0, $3; red.relaxed.{scope}.global.add.u32 [$2], n;"
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
        .reg .u32 n;
        .reg .u64 begin, now;
        mov.u32 $1, 0;
        mov.u64 begin, 0;
        AGAIN: {look}
        @p bra DONE;
        {"bra AGAIN;" if limit_ns is None else look_at_the_clock}
        DONE: fence.proxy.async;
        {take if decrement else ""}
    }}"""
