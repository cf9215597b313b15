"""`stretto.explain`: which implementation a call would take, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from stretto.kernels.choice import choose
from stretto.kernels.choice.choice import Choice


def explain(operation: Callable[..., jax.Array], *operands: Any, **arguments: Any) -> Choice:
    """The choice that `operation(*operands, **arguments)` makes, without computing anything.

    For a look at a call, put `print(stretto.explain(...))` beside it, with the same arguments,
    inside the same `shard_map`: it prints while the program is traced.

    Args:
      operation: a public operation, for example `stretto.all_gather_matmul`; or, with whole arrays,
        a function of `stretto.sharded` or a layer of `stretto.flax`.
      *operands: arrays, or `jax.ShapeDtypeStruct`s of their shapes per device, also in tuples and
        other trees, and the mesh axis.
      **arguments: as for the operation; arrays in them may be `jax.ShapeDtypeStruct`s, too.

    Raises:
      ValueError: what the operation would raise, or it is none of Stretto's.
    """
    refusal = (
        f"{operation!r} is not an operation of Stretto that chooses a backend; pass a public one,"
        " such as stretto.all_gather_matmul, and its arguments after it: explain(operation, x, w,"
        ' "x").'
    )
    leaves, tree = jax.tree.flatten((operands, arguments))
    described = [place for place, leaf in enumerate(leaves) if _describes_an_array(leaf)]

    def call(arrays: Sequence[jax.Array]) -> Any:
        filled = dict(zip(described, arrays, strict=True))
        whole = [filled.get(place, leaf) for place, leaf in enumerate(leaves)]
        operands, arguments = jax.tree.unflatten(tree, whole)
        return operation(*operands, **arguments)

    with choose.recorded() as choices:
        try:
            # Arrays stay what they are: where they lie, or their number, may decide.
            jax.eval_shape(call, [leaves[place] for place in described])
        except TypeError as error:  # Another function takes no name of an axis.
            if choices or _is_own(operation):
                raise
            raise ValueError(refusal) from error
    if not choices:
        raise ValueError(refusal)
    return choices[0]


def _describes_an_array(leaf: Any) -> bool:
    """Whether `leaf` has the shape and the type of an array, and no values."""
    has_both = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    return has_both and not isinstance(leaf, jax.Array | np.ndarray | np.generic)


def _is_own(operation: Callable) -> bool:
    return getattr(operation, "__module__", "").startswith("stretto.")
