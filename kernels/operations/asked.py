"""What a call of a matmul asks for besides operands and scales."""

from __future__ import annotations

import dataclasses
from typing import Any

from stretto.kernels.operations import epilogues


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """Arguments of the public functions, as these take them; not checked yet."""

    epilogue: epilogues.Like
    out_dtype: Any
    rhs_transposed: bool
    config: Any
    backend: str
