"""Device code of `inline_mgpu`: refused, but for fences and code with an equivalent in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np

from stretto.distributed.simulator.program import Compiler, Step, rule
from stretto.distributed.simulator.refusals.unsupported import INLINE, in_numpy, is_proxy_fence
from stretto.distributed.simulator.reports.errors import UnsupportedKernelError
from stretto.distributed.simulator.rules.arrays import define
from stretto.distributed.simulator.rules.memory import store_region
from stretto.distributed.simulator.state.views import ViewPlan, plan_view


@rule("inline_mgpu")
def _inline_mgpu(compiler: Compiler, eqn: Any) -> Step:
    """The equivalent of device code; a fence between the two paths to shared memory commits.

    The equivalent takes arrays. Refs among the operands are scratch, which is zero afterwards: so
    what another warpgroup reads or writes there meanwhile is found.
    """
    equivalent = in_numpy(eqn)
    if equivalent is None:
        if not is_proxy_fence(eqn):
            raise UnsupportedKernelError(INLINE)
        return False, lambda task, env: task.commit()
    views, site = _scratch(compiler, eqn), compiler.site
    operands = eqn.invars[: eqn.params["pytree_args"].num_leaves]
    _, compute = define(compiler, eqn, equivalent, [v for v in operands if not _is_ref(v)])

    def step(task: Any, env: list) -> None:
        for view in views:
            region = view.region(task, env)
            store_region(task, region, np.zeros_like(region.get()), site)
        compute(task, env)

    return False, step


def _scratch(compiler: Compiler, eqn: Any) -> list[ViewPlan]:
    """The refs among the operands, each through its transforms."""
    number = eqn.params["pytree_args"].num_leaves
    transforms = eqn.params["pytree_ref_transforms"].unflatten(eqn.invars[number:])
    operands = zip(eqn.invars[:number], transforms, strict=True)
    return [plan_view(compiler, v, through) for v, through in operands if _is_ref(v)]


def _is_ref(atom: Any) -> bool:
    return hasattr(atom.aval, "inner_aval")
