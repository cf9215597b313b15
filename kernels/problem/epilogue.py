"""An epilogue with its arrays: a function of the product of a matmul, applied before the store.

A caller gives an `Epilogue`. Its function and how it is applied (`Form`) are known when a program
is traced, like other options; its arrays are operands with derivatives.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stretto.kernels.problem import checks, epilogues, lowered

type Shape = tuple[int, ...]


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False, init=False)
class Epilogue:
    """`function(product, *arrays)` for the product, elementwise; a pytree of its arrays.

    The function gets the float32 product and each array broadcast to the product's shape, floats as
    float32. So `lambda y, b: y + b` adds a bias `[n]`, a column `[m, 1]` or a matrix `[m, n]`.

    Attributes:
      function: elementwise; with `gated`, of two products.
      arrays: floats or bools that broadcast to the result of one device, as in NumPy. For several
        right-hand sides: one array, or a tuple of one for each.
      gated: `function(gate, up, *arrays)` of the products with two right-hand sides, which gives
        one result.
    """

    function: Callable[..., jax.Array]
    arrays: tuple[Any, ...]
    gated: bool

    def __init__(self, function: Callable[..., jax.Array], *arrays: Any, gated: bool = False):
        object.__setattr__(self, "function", function)
        object.__setattr__(self, "arrays", arrays)
        object.__setattr__(self, "gated", gated)

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Callable[..., jax.Array], bool]]:
        """The arrays, and what is known when a program is traced."""
        return self.arrays, (self.function, self.gated)

    @classmethod
    def tree_unflatten(cls, static: Any, arrays: Any) -> Epilogue:
        """The epilogue of such arrays."""
        function, gated = static
        return cls(function, *arrays, gated=gated)


@dataclasses.dataclass(frozen=True)
class Form:
    """An epilogue without its arrays.

    Attributes:
      function, gated: as of the `Epilogue`.
    """

    function: Callable[..., jax.Array]
    gated: bool = False

    def results(
        self, products: Sequence[jax.Array], arrays: Sequence[Any]
    ) -> tuple[jax.Array, ...]:
        """The results for the float32 products with each right-hand side; in float32.

        Arrays have to broadcast to the products, which may have any shape.
        """
        groups = [tuple(products)] if self.gated else [(x,) for x in products]
        return tuple(
            self.function(*group, *(seen(part(x, i), group[0]) for x in arrays))
            for i, group in enumerate(groups)
        )

    def after(self, outs: Sequence[jax.Array], arrays: Sequence[Any]) -> tuple[jax.Array, ...]:
        """The same of products that have been rounded, in the type that these have."""
        wide = [x.astype(at_least_float32(x.dtype)) for x in outs]
        return tuple(x.astype(outs[0].dtype) for x in self.results(wide, arrays))


def at_least_float32(dtype: Any) -> Any:
    """`dtype`, or float32 where that is the wider one."""
    # JAX promotes no floats of 8 bits by itself.
    return jnp.promote_types(dtype, jnp.float32) if dtype.itemsize > 1 else jnp.float32


def part(array: Any, index: int) -> Any:
    """The array of a result, of one for all or of a tuple of one for each."""
    return array[index] if isinstance(array, tuple) else array


def seen_dtype(dtype: Any, product: Any) -> Any:
    """The type of an array as the function's argument: bool, or the type of the product."""
    return dtype if dtype == jnp.bool_ else product


def seen(array: jax.Array, product: jax.Array) -> jax.Array:
    """An array as the function's argument, with the product's shape."""
    return jnp.broadcast_to(array.astype(seen_dtype(array.dtype, product.dtype)), product.shape)


def with_arrays(operands: Sequence[Any]) -> tuple[Any, Any, tuple[Any, ...]]:
    """(lhs, rhs, arrays of the epilogue) of a matmul's operands; plain ones have no arrays."""
    lhs, rhs, *arrays = operands
    return lhs, rhs, tuple(arrays[0]) if arrays else ()


@dataclasses.dataclass(frozen=True)
class Fitted:
    """An epilogue that fits its call.

    Attributes:
      form, arrays: of it; None and () where there is none.
      obstacle: why no kernel can hold the function, None where one can.
    """

    form: Form | None = None
    arrays: tuple[Any, ...] = ()
    obstacle: str | None = None


def fitted(op: str, given: Epilogue | None, products: Sequence[Shape], dtype: Any) -> Fitted:
    """`given`, checked for a call.

    Args:
      op: the operation's name, for errors.
      given: the caller's epilogue.
      products: shapes of one device's products with each right-hand side.
      dtype: that they have before they are rounded.

    Raises:
      ValueError: its arrays do not fit the results, or the function does not map each element.
    """
    if given is None:
        return Fitted()
    name = epilogues.name_of(given.function)
    if given.gated and (len(products) != 2 or products[0] != products[1]):
        found = " and ".join("x".join(map(str, shape)) for shape in products)
        raise ValueError(
            f"{op}: the epilogue {name} is gated, and the products are {found}; pass rhs as a tuple"
            " of two matrices of one shape, (gate, up)."
        )
    results = products[:1] if given.gated else products
    fit = functools.partial(_fitting, op, name, results)
    arrays = tuple(fit(i, x) for i, x in enumerate(given.arrays))
    seen_as = [dtype] * (1 + given.gated)
    seen_as += [seen_dtype(part(x, 0).dtype, dtype) for x in arrays]
    obstacle = epilogues.obstacle(op, given.function, products, seen_as)
    if obstacle is None:
        obstacle = lowered.obstacle(name, given.function, seen_as)
    return Fitted(Form(given.function, given.gated), arrays, obstacle)


def _fitting(op: str, name: str, results: Sequence[Shape], index: int, array: Any) -> Any:
    """An array of the epilogue, or a tuple of one for each result; ValueError if it fits none."""
    what = f"array {index} of the epilogue {name}"
    if isinstance(array, tuple | list):
        if len(array) != len(results):
            raise ValueError(
                f"{op}: {what} is a {type(array).__name__} of {len(array)} for {len(results)}"
                " results; pass one array for all, or a tuple of one for each."
            )
        pairs = zip(array, results, strict=True)
        return tuple(_fitting(op, name, [shape], index, x) for x, shape in pairs)
    if isinstance(array, bool | int | float | np.ndarray | np.generic):
        array = jnp.asarray(array, None if np.ndim(array) else jnp.result_type(float(array)))
    checks.check_array(op, what, array)
    if not (jnp.issubdtype(array.dtype, jnp.floating) or array.dtype == jnp.bool_):
        raise ValueError(f"{op}: {what} is {array.dtype}; it must be of floats or bools. Cast it.")
    for shape in results:
        if not _broadcasts(array.shape, shape):
            raise ValueError(
                f"{op}: {what} has shape {array.shape}, which does not broadcast to the result"
                f" {shape} of one device; pass {shape[-1:]} for a row, {(*shape[:-1], 1)} for a"
                f" column, or {shape}."
            )
    return array


def _broadcasts(shape: Shape, to: Shape) -> bool:
    sizes = zip(shape[::-1], to[::-1], strict=False)
    return len(shape) <= len(to) and all(x in (1, y) for x, y in sizes)


def kind_of(shape: Shape, result: Shape) -> str:
    """How an array lies along a result: "columns" `[n]`, "rows" `[m, 1]`, or "elements" of it."""
    *rows, columns = (1,) * (len(result) - len(shape)) + tuple(shape)
    if all(x == 1 for x in rows):
        return "columns"
    return "rows" if columns == 1 else "elements"
