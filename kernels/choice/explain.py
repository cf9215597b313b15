"""`stretto.explain`: which implementation a call would take, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from stretto.kernels.choice import choose
from stretto.kernels.choice.choice import Choice


def explain(operation: Callable[..., jax.Array], *operands: Any, **arguments: Any) -> Choice:
    """The choice that `operation(*operands, **arguments)` makes, without computing anything.

    For a look at a call, put `print(stretto.explain(...))` beside it, with the same arguments,
    inside the same `shard_map`: it prints while the program is traced.

    Args:
      operation: a public operation, for example `stretto.all_gather_matmul`; or, with whole arrays,
        a function of `stretto.sharded` or a layer of `stretto.flax`.
      *operands: arrays, or `jax.ShapeDtypeStruct`s of their shapes per device, and the mesh axis.
      **arguments: as for the operation; arrays among them may be `jax.ShapeDtypeStruct`s, too.

    Raises:
      ValueError: what the operation would raise, or it is none of Stretto's.
    """
    refusal = (
        f"{operation!r} is not an operation of Stretto that chooses a backend; pass a public one,"
        " such as stretto.all_gather_matmul, and its arguments after it: explain(operation, x, w,"
        ' "x").'
    )
    with choose.recorded() as choices:
        arrays = [x for x in operands if hasattr(x, "shape")]
        rest = operands[len(arrays) :]
        named = {name: x for name, x in arguments.items() if _has_arrays(x)}
        plain = {name: x for name, x in arguments.items() if name not in named}
        try:
            jax.eval_shape(
                lambda *xs, **named: operation(*xs, *rest, **plain, **named), *arrays, **named
            )
        except TypeError as error:  # Another function takes no name of an axis.
            if choices or _is_own(operation):
                raise
            raise ValueError(refusal) from error
    if not choices:
        raise ValueError(refusal)
    return choices[0]


def _has_arrays(argument: Any) -> bool:
    """Whether an argument is an array or describes one, or is a tuple of such, as scales may be."""
    leaves = argument if isinstance(argument, tuple | list) else (argument,)
    return bool(leaves) and all(isinstance(x, jax.Array | jax.ShapeDtypeStruct) for x in leaves)


def _is_own(operation: Callable) -> bool:
    return getattr(operation, "__module__", "").startswith("stretto.")
