"""Types of values inside `shard_map`.

The mesh axes that a value varies over are public only as text. Checked on 0.11.2 and 0.12.0.1.
"""

from __future__ import annotations

from collections.abc import Hashable

import jax


def varying_axes(x: jax.Array) -> frozenset[Hashable]:
    """The manual mesh axes that `x` is typed as varying over."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)
