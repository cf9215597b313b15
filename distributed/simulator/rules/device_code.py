"""Device code of `inline_mgpu`: refused, but for fences and code with an equivalent in numpy."""

from __future__ import annotations

from typing import Any

from stretto.distributed.simulator.program import Compiler, Step, rule
from stretto.distributed.simulator.refusals.unsupported import INLINE, in_numpy, is_proxy_fence
from stretto.distributed.simulator.reports.errors import UnsupportedKernelError
from stretto.distributed.simulator.rules.arrays import define


@rule("inline_mgpu")
def _inline_mgpu(compiler: Compiler, eqn: Any) -> Step:
    """The equivalent of device code; a fence between the two paths to shared memory commits.

    The equivalent takes arrays. References among the operands are scratch of the device code.
    """
    equivalent = in_numpy(eqn)
    if equivalent is not None:
        operands = eqn.invars[: eqn.params["pytree_args"].num_leaves]
        arrays = [v for v in operands if not hasattr(v.aval, "inner_aval")]
        return define(compiler, eqn, equivalent, arrays)
    if not is_proxy_fence(eqn):
        raise UnsupportedKernelError(INLINE)
    return False, lambda task, env: task.commit()
