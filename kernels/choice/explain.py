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
      operation: a public operation, for example `stretto.all_gather_matmul`.
      *operands: arrays, or `jax.ShapeDtypeStruct`s of their shapes per device, and the mesh axis.
      **arguments: as for the operation.

    Raises:
      ValueError: what the operation would raise, or it is none of Stretto's.
    """
    refusal = f"{operation!r} is not an operation of Stretto that chooses a backend."
    with choose.recorded() as choices:
        arrays = [x for x in operands if hasattr(x, "shape")]
        rest = operands[len(arrays) :]
        try:
            jax.eval_shape(lambda *xs: operation(*xs, *rest, **arguments), *arrays)
        except TypeError as error:  # Another function takes no name of an axis.
            if choices or _is_own(operation):
                raise
            raise ValueError(refusal) from error
    if not choices:
        raise ValueError(refusal)
    return choices[0]


def _is_own(operation: Callable) -> bool:
    return getattr(operation, "__module__", "").startswith("stretto.")
