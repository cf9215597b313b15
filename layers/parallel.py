"""`Parallel`: the sharding of a layer over a mesh, one record for all layers of a model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from stretto.distributed.devices.axes import AxisNames
from stretto.kernels.operations.fp8 import Recipe
from stretto.kernels.problem.checks import check_array, check_backend, check_integer


@dataclasses.dataclass(frozen=True)
class Parallel:
    """The sharding of layers over a mesh, and the implementation of their products.

    All arguments but the first are passed by keyword.

    Attributes:
      axis_name: mesh axis, or tuple of axes, that splits the weights: the team.
      sequence_parallel: between layers each device of the team has some of the tokens
        (`token_axis` of the activations is sharded over `axis_name`). The first product of a layer
        gathers the tokens, and the last product scatters them. If False, every device has all
        tokens, and an all-reduce follows the last product.
      token_axis: dimension of the activations `[..., features]` that is split; may be negative.
        The kernels need no copy where all dimensions before it are of size 1, as for rows `[tokens,
        features]`, or where a device's share of the tokens is a multiple of 256.
      batch_axes: mesh axis, or axes, over which the activations' first dimension is sharded. It is
        used in global-view code with `AxisType.Auto` only: with `AxisType.Explicit` the types of
        arrays state it, and inside `jax.shard_map` it is not needed.
      mesh: for global-view code outside of `jax.set_mesh`.
      backend: of the operations: "auto", "pallas", "xla" or "simulator".
      fp8: the recipe by which the operands of products are quantised in a team (`stretto.fp8`);
        parameters keep their type. None for products in the operands' own type.
      keep_gathered: keep gathered tokens for the backward pass, as `keep_gathered=` of
        `stretto.all_gather_matmul`, in place of gathering them again; not with `fp8`.

    Raises:
      ValueError: no axis is named, one is named twice, or `backend` is unknown.
    """

    axis_name: AxisNames = "tp"
    _: dataclasses.KW_ONLY
    sequence_parallel: bool = True
    token_axis: int = -2
    batch_axes: AxisNames = ()
    mesh: Mesh | None = None
    backend: str = "auto"
    keep_gathered: bool = False
    fp8: Recipe | None = None

    def __post_init__(self) -> None:
        for name in ("axis_name", "batch_axes"):  # lists would make it unhashable
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        named = (*self.axes, *names_of(self.batch_axes))
        if not self.axes:
            raise ValueError(f"axis_name={self.axis_name!r} is empty; name at least one mesh axis.")
        if len(set(named)) != len(named):
            raise ValueError(
                f"axis_name={self.axis_name!r} and batch_axes={self.batch_axes!r} name an axis"
                " twice; name each once."
            )
        check_backend(self.backend)

    @property
    def axes(self) -> tuple[Hashable, ...]:
        """The axes of the team."""
        return names_of(self.axis_name)

    def tokens_of(self, x: Any) -> int:
        """The dimension of activations `x` that is split, counted from the first.

        Raises:
          ValueError: `x` is no array, has no such dimension, or it is that of the features.
        """
        check_array("a layer", "x", x)
        axis = self.token_axis + x.ndim if self.token_axis < 0 else self.token_axis
        if not 0 <= axis < x.ndim - 1:
            raise ValueError(
                f"token_axis={self.token_axis} must be a dimension of x {x.shape} before its last;"
                " pass activations [..., tokens, features], or another token_axis."
            )
        return axis


def check_parallel(parallel: Any) -> None:
    """Raises ValueError where a layer's `parallel` is something else, such as the axis alone."""
    if not isinstance(parallel, Parallel):
        raise ValueError(
            f"parallel={parallel!r} is of type {type(parallel).__name__}; pass a"
            ' stretto.flax.Parallel, such as Parallel("tp").'
        )


def check_sizes(layer: str, **sizes: Any) -> None:
    """Raises ValueError unless all sizes of a layer are whole numbers above 0."""
    for name, size in sizes.items():
        if check_integer(layer, name, size) < 1:
            raise ValueError(f"{layer}: {name}={size} must be at least 1.")


def check_divides(parallel: Parallel, layer: str, name: str, features: int) -> None:
    """Raises ValueError where the mesh, if it is known already, cannot split so many features."""
    mesh = parallel.mesh if parallel.mesh is not None else jax.sharding.get_abstract_mesh()
    if mesh.empty or not {*parallel.axes} <= {*mesh.axis_names}:
        return
    devices = math.prod(mesh.shape[axis] for axis in parallel.axes)
    if features % devices:
        raise ValueError(
            f"{layer}: {name}={features} must be a multiple of the team's {devices} devices along"
            f" {parallel.axis_name!r}; pass {features // devices * devices or devices}, or a mesh"
            " with other devices there."
        )


def names_of(axis_names: AxisNames) -> tuple[Hashable, ...]:
    """One name, a sequence of names or None, as a tuple."""
    if axis_names is None:
        return ()
    return (
        tuple(axis_names)
        if isinstance(axis_names, Sequence | frozenset) and not isinstance(axis_names, str)
        else (axis_names,)
    )


DEFAULT = Parallel()
