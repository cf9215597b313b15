"""Linear layers whose weights a team of devices splits, by output or by input features."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from jax.sharding import PartitionSpec as P

from stretto.layers import products
from stretto.layers.parallel import (
    DEFAULT,
    Parallel,
    check_divides,
    check_parallel,
    check_sizes,
)
from stretto.layers.placement import on_devices
from stretto.layers.products import Affine, Types

type Initializer = Callable[..., Any]
type Metadata = Mapping[str, Any]

NOTHING: Metadata = MappingProxyType({})
kernel_initializer = nnx.initializers.lecun_normal()
bias_initializer = nnx.initializers.zeros_init()


class _Linear(nnx.Module):
    """A kernel, a bias and their sharding over the team, by `in_split` and `out_split`."""

    in_split: bool
    out_split: bool

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        parallel: Parallel = DEFAULT,
        use_bias: bool = True,
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        kernel_init: Initializer = kernel_initializer,
        bias_init: Initializer = bias_initializer,
        promote_dtype: products.Promote = dtypes.promote_dtype,
        preferred_element_type: jax.typing.DTypeLike | None = None,
        rngs: nnx.Rngs,
        kernel_metadata: Metadata = NOTHING,
        bias_metadata: Metadata = NOTHING,
    ):
        check_parallel(parallel)
        layer = type(self).__name__
        check_sizes(layer, in_features=in_features, out_features=out_features)
        if "out_sharding" not in kernel_metadata:
            split = {"in_features": in_features} if self.in_split else {}
            split |= {"out_features": out_features} if self.out_split else {}
            for name, features in split.items():
                check_divides(parallel, layer, name, features)
        kernel_spec, bias_spec = self._split(parallel)
        kernel = kernel_init(rngs.params(), (in_features, out_features), param_dtype)
        self.kernel = parameter(kernel, parallel, kernel_spec, kernel_metadata)
        self.bias: nnx.Param | None = nnx.data(None)
        if use_bias:
            bias = bias_init(rngs.params(), (out_features,), param_dtype)
            self.bias = parameter(bias, parallel, bias_spec, bias_metadata)
        self.in_features = in_features
        self.out_features = out_features
        self.parallel = parallel
        self.use_bias = use_bias
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.promote_dtype = promote_dtype
        self.preferred_element_type = preferred_element_type

    def arrays(self) -> Affine:
        """The values of the parameters."""
        return Affine(self.kernel[...], None if self.bias is None else self.bias[...])

    def specs(self) -> Affine:
        """The sharding of the parameters over the team, a `PartitionSpec` each."""
        kernel, bias = self._split(self.parallel)
        return Affine(kernel, bias if self.use_bias else None)

    def types(self) -> Types:
        """The types of the operands and of the result."""
        return Types(self.dtype, self.preferred_element_type, self.promote_dtype)

    @classmethod
    def _split(cls, parallel: Parallel) -> tuple[P, P]:
        axes = parallel.axes[0] if len(parallel.axes) == 1 else parallel.axes
        inputs, outputs = axes if cls.in_split else None, axes if cls.out_split else None
        return P(inputs, outputs), P(outputs)


def parameter(value: Any, parallel: Parallel, spec: P, metadata: Metadata) -> nnx.Param:
    """A parameter with its sharding over the team, unless `metadata` or `value` have one."""
    where: dict[str, Any] = {"out_sharding": tuple(spec)}
    if parallel.mesh is not None:
        where["mesh"] = parallel.mesh
    return nnx.Param(value, **{**where, **metadata})


class ColumnParallelLinear(_Linear):
    """`nnx.Linear` whose output features are split: `all_gather(x) @ kernel + bias`, overlapped.

    | | whole | per device, in a team of D |
    |---|---|---|
    | x | `[..., tokens, in_features]` | `[..., tokens / D, in_features]` |
    | kernel | `[in_features, out_features]` | `[in_features, out_features / D]` |
    | bias | `[out_features]` | `[out_features / D]` |
    | result | `[..., tokens, out_features]` | `[..., tokens, out_features / D]` |

    Without `sequence_parallel` x is whole on every device, and nothing is sent. Call the layer on
    whole arrays under a mesh (`jax.set_mesh`), or inside `jax.shard_map` on a device's own arrays.
    Without a mesh it equals `nnx.Linear`, if it is created under `nnx.use_eager_sharding(False)`:
    otherwise Flax refuses parameters that have a sharding and no mesh.

    Args:
      in_features, out_features: sizes, over all devices.
      parallel: axis of the mesh, and the sharding of activations.
      use_bias: add a bias.
      dtype: of the computation; by default what x and the parameters promote to.
      param_dtype: of the parameters.
      kernel_init, bias_init: initialisers, which get the same keys as in `nnx.Linear`.
      promote_dtype: converts `(x, kernel, bias)`, given `dtype=`.
      preferred_element_type: of the result, rounded once from float32.
      rngs: for the initialisers, its stream "params".
      kernel_metadata, bias_metadata: of the `nnx.Param`s. The default `out_sharding` has the team's
        axes along the split dimension. Names of logical axes may replace them, here or by
        `nnx.with_partitioning`; Flax's rules translate the names.

    Raises:
      ValueError: the mesh cannot split the features; in calls, it cannot split an operand, x has
        no dimension of tokens, or what the operations raise.
    """

    in_split, out_split = False, True

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[..., tokens, in_features]` to `[..., tokens, out_features]`, split as above."""

        def body(how: Parallel | None, x: jax.Array, weight: Affine) -> jax.Array:
            return products.columns(how, x, [weight], self.types())[0]

        return on_devices(
            body,
            self.parallel,
            x,
            [self.arrays()],
            [self.specs()],
            enters="tokens",
            leaves="features",
        )


class RowParallelLinear(_Linear):
    """`nnx.Linear` whose input features are split: `reduce_scatter(x @ kernel) + bias`, overlapped.

    | | whole | per device, in a team of D |
    |---|---|---|
    | x | `[..., tokens, in_features]` | `[..., tokens, in_features / D]` |
    | kernel | `[in_features, out_features]` | `[in_features / D, out_features]` |
    | bias | `[out_features]` | `[out_features]` |
    | result | `[..., tokens, out_features]` | `[..., tokens / D, out_features]` |

    Without `sequence_parallel` the sum is reduced on every device, and its tokens are whole.

    Arguments and errors are those of `ColumnParallelLinear`.
    """

    in_split, out_split = True, False

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[..., tokens, in_features]` to `[..., tokens, out_features]`, split as above."""

        def body(how: Parallel | None, x: jax.Array, weight: Affine) -> jax.Array:
            return products.rows(how, x, weight, self.types())

        return on_devices(
            body,
            self.parallel,
            x,
            [self.arrays()],
            [self.specs()],
            enters="features",
            leaves="tokens",
        )
