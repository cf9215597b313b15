"""Which epilogues JAX lowers for GPUs inside a kernel: those of the operations listed here.

Mosaic GPU lacks many that XLA has, such as `erf`, `log1p` and `pow` (JAX 0.11.2), and raises
an error only where a program is lowered, too late to choose XLA. `tests/kernels/test_epilogues.py`
lowers all of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

NAMES = """
    abs add and bitcast_convert_type broadcast_in_dim clamp clz cond convert_element_type cos
    custom_jvp_call custom_vjp_call div eq exp exp2 ge gt integer_pow iota jit le log log2 logistic
    lt max min mul ne neg not optimization_barrier or rem round rsqrt scan select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sqrt square sub tanh xor
"""
LOWERED = frozenset(NAMES.split())
EXAMPLE = (64, 64)


def obstacle(
    name: str, epilogue: Callable[..., jax.Array], dtypes: Sequence[jax.typing.DTypeLike]
) -> str | None:
    """Why JAX cannot lower `epilogue`, which is elementwise, inside a kernel; None if it can.

    Args:
      name: of the epilogue.
      epilogue: the function.
      dtypes: of what it takes.
    """
    structs = [jax.ShapeDtypeStruct(EXAMPLE, dtype) for dtype in dtypes]
    traced = jax.make_jaxpr(epilogue)(*structs)
    lacking = sorted({found for eqn in equations(traced.jaxpr) if (found := _lacking(eqn))})
    if not lacking:
        return None
    return f"the epilogue {name} uses {', '.join(lacking)}, which XLA has and kernels lack."


def _lacking(equation: Any) -> str | None:
    """What no kernel has of an operation, in words."""
    name, params = equation.primitive.name, equation.params
    if name not in LOWERED:
        return name
    dtype = equation.invars[0].aval.dtype if equation.invars else jnp.float32
    if name == "not" and dtype == jnp.bool_:
        return "not of bools"
    if name == "rem" and not jnp.issubdtype(dtype, jnp.integer):
        return "rem of floats"
    if name == "integer_pow" and params["y"] < -1:
        return f"the power {params['y']}"
    if name == "select_n" and len(equation.invars) > 3:
        return "select_n of more than two cases"
    return None


def equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """Those of a function, and of all that it calls."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for one in value if isinstance(value, tuple | list) else (value,):
                if isinstance(one, ClosedJaxpr | Jaxpr):
                    yield from equations(one.jaxpr if isinstance(one, ClosedJaxpr) else one)
