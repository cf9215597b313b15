"""Where tokens go that choose experts, as tables."""

from __future__ import annotations

from typing import NamedTuple

import jax

NONE = -1
"""In a table, an entry that is sent nowhere."""


class Routing(NamedTuple):
    """The destinations of tokens, from `expert_dispatch`; `expert_combine` returns the rows by it.

    Attributes:
      positions: int32 `[tokens, top_k]`, for each entry of this device `row * D + device`, the row
        that it is on the device of its expert; -1 for one that goes nowhere.
      group_sizes: int32 `[e]`, rows of each expert of this device.
      tokens_per_expert: int32 `[num_experts]`, entries of each expert over all devices of the team,
        those that did not fit included. The same on every device.
      dropped: int32, entries that did not fit, over all devices.
      out_of_range: int32, entries whose expert is neither -1 nor an existing one, over all.
    """

    positions: jax.Array
    group_sizes: jax.Array
    tokens_per_expert: jax.Array
    dropped: jax.Array
    out_of_range: jax.Array
