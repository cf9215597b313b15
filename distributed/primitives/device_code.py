"""Device code that Pallas has no function for, and its equivalent in numpy.

The simulator runs the equivalent, `in_numpy` of the function that GPUs run
(`simulator.rules.device_code`). Mosaic GPU's dialects are private JAX, checked on 0.11.2 and
0.12.0.1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.private_jax.dialects import arith, ir, llvm, vector

_LAYOUT = plgpu.Layout.WGMMA
_VOTE = (
    "{ .reg .pred one, any; setp.ne.b32 one, $1, 0;"
    " vote.sync.any.pred any, one, 0xffffffff; selp.b32 $0, 1, 0, any; }"
)


def any_above(x: jax.Array, limit: float) -> jax.Array:
    """Whether an element of `x` that this warp holds is above `limit`, or is no number.

    Each warp of a warpgroup decides by its own elements, without shared memory or a barrier. So a
    branch on the answer must not have what the warps do together: a product, a barrier, a copy.
    In the simulator all warps have the answer for the whole array.

    Args:
      x: float32, in the layout of a product's result.
      limit: of its elements.
    """
    inline = plgpu.inline_mgpu(
        arg_types=(_LAYOUT,),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT),
    )
    return inline(_any_above(limit))(x) != 0


def settled(x: jax.Array) -> jax.Array:
    """`x` itself, computed before what follows: LLVM moves it behind no branch or wait.

    Args:
      x: of 16 bits an element, in the layout of a product's result.
    """
    inline = plgpu.inline_mgpu(
        arg_types=(_LAYOUT,),
        return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=_LAYOUT),
    )
    return inline(_settled)(x)


def with_equivalent(equivalent: Callable[..., Any]) -> Callable[[Any], Any]:
    """A function that GPUs run, and what the simulator computes of its operands but refs."""

    def mark(function: Any) -> Any:
        function.in_numpy = equivalent
        return function

    return mark


@functools.cache  # One function for each limit: JAX compares kernels by it.
def _any_above(limit: float) -> Callable[..., mgpu.FragmentedArray]:
    @with_equivalent(lambda x: np.int32(not np.all(x <= limit)))
    def found(_: Any, x: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        float32, int32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
        most = arith.constant(float32, ir.FloatAttr.get(float32, limit))
        own = None
        for register in x.registers.flat:
            for place in range(ir.VectorType(register.type).shape[0]):
                element = vector.extract(register, dynamic_position=[], static_position=[place])
                above = arith.cmpf(arith.CmpFPredicate.UGT, element, most)
                own = above if own is None else arith.ori(own, above)
        word = arith.extui(int32, own)
        answer = llvm.inline_asm(int32, [word], _VOTE, "=r,r", has_side_effects=True)
        layout = mgpu.WGSplatFragLayout(())
        return mgpu.FragmentedArray.splat(answer, shape=(), layout=layout, is_signed=True)

    return found


@with_equivalent(lambda x: x)
def _settled(_: Any, x: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
    int32 = ir.IntegerType.get_signless(32)
    found = np.empty_like(x.registers)
    for at, register in np.ndenumerate(x.registers):
        word = llvm.bitcast(int32, register)
        word = llvm.inline_asm(int32, [word], "mov.b32 $0, $1;", "=r,r", has_side_effects=True)
        found[at] = llvm.bitcast(register.type, word)
    return mgpu.FragmentedArray(_registers=found, _layout=x.layout, _is_signed=x.is_signed)
