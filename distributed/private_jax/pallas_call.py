"""`pl.pallas_call` inside the simulator, which runs what `plgpu.kernel` makes and nothing else.

JAX's own rule says that a CPU takes interpret mode only, whatever the kernel was written for.
Private JAX, checked on 0.11.2 and 0.12.0.1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax._src.interpreters import mlir
from jax._src.pallas import pallas_call
from jax._src.pallas.mosaic_gpu import core as gpu_core


def refuse_pallas_calls(reason_for: Callable[[str, bool], Exception | None]) -> None:
    """Has `reason_for` see every `pallas_call` that is lowered for CPU from now on.

    Args:
      reason_for: from "name at file:line" of the kernel, and whether it has `plgpu.CompilerParams`,
        to the error to raise; or to None, to lower it as JAX does. Calls with `interpret` set are
        not asked about.
    """

    def rule(ctx: mlir.LoweringRuleContext, *operands: Any, interpret: Any, **params: Any) -> Any:
        for_mosaic = isinstance(params["compiler_params"], gpu_core.CompilerParams)
        if not interpret:
            error = reason_for(params["jaxpr"].debug_info.func_src_info, for_mosaic)
            if error is not None:
                raise error
        return pallas_call._pallas_call_lowering(ctx, *operands, interpret=interpret, **params)

    mlir.register_lowering(pallas_call.pallas_call_p, rule, platform="cpu", cacheable=False)
