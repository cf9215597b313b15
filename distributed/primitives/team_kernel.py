"""A kernel as one operation of the program, which XLA connects to its own team's devices only.

`plgpu.kernel` binds a primitive that knows how to be lowered but neither how to be mapped (its vmap
adds a grid axis, which breaks protocols that count signals) nor what team it serves. The primitive
here holds the traced call and adds both.

JAX lowers a kernel for the whole mesh: its number of peers is the mesh's size, and XLA connects all
devices of the mesh for it. Here it is lowered for its clique alone (`clique`), as if that were the
mesh: members are numbered from 0, as JAX demands. Then the operation gets their real places.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Primitive
from jax.interpreters import ad, batching, mlir

from stretto.distributed import recording, xla_flags
from stretto.distributed.devices.clique import Clique, check_order, clique_of
from stretto.distributed.memory import edges, heap, mailbox
from stretto.distributed.primitives import cpu_kernels, slots
from stretto.distributed.private_jax import lowered_meshes, marks, options, warps
from stretto.distributed.private_jax import tracing as tracing_settings
from stretto.distributed.private_jax.dialects import ir
from stretto.distributed.private_jax.inlining import inline
from stretto.distributed.private_jax.kernel_operation import kernel_p, lower_for_gpus
from stretto.distributed.sites import site_of

team_kernel_p = Primitive("stretto_kernel")
team_kernel_p.multiple_results = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class TeamKernelInfo:
    """The facts of a kernel that its lowering needs.

    Its name, the axes it communicates over, and whether it was traced with its devices counted
    from the end (`team.places_reversed`); and whether its devices exchange through the heap alone.
    """

    name: str
    axes: tuple[Hashable, ...]
    reverse: bool = False
    by_heap: bool = False


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Kernels are traced inside it.

    Values are not typed as varying over mesh axes. Integers have 32 bits, whatever `jax_enable_x64`
    says: Mosaic GPU's operations ask for them, and Python's numbers would have 64.
    """
    warps.allow_scalar_loads()
    with tracing_settings.without_varying_types(), jax.enable_x64(False):
        yield


def bind_team_kernel(
    jaxpr: ClosedJaxpr, operands: Sequence[jax.Array], info: TeamKernelInfo
) -> list[jax.Array]:
    """Makes a traced call of `plgpu.kernel` one operation of the program, on `operands`."""
    if any(isinstance(const, Tracer) for const in jaxpr.consts):
        raise ValueError(
            f"kernel {info.name}: its body uses a traced value from outside; compute the value"
            " inside the body, or pass it as an operand."
        )
    edges.check_stores(jaxpr, info.name)
    _check_places(jaxpr, info)
    return team_kernel_p.bind(*operands, jaxpr=_unwrapped(jaxpr), info=info)


def _check_places(jaxpr: ClosedJaxpr, info: TeamKernelInfo) -> None:
    """Raises ValueError for a body that takes its device's place from `lax.axis_index`.

    A kernel may count its devices from the end (`clique`), which its team knows and JAX does not.
    """
    axes = frozenset(jax.sharding.get_abstract_mesh().axis_names)
    for eqn in marks.unmarked_places(jaxpr, axes):
        axis = eqn.params["axis_name"]
        raise ValueError(
            f"kernel {info.name}: lax.axis_index({axis!r}) need not be this device's place in the"
            " mesh, since kernels count devices from the end in jobs of several nodes; inside the"
            f" body take team.device_id() or team.neighbour(), for the team's axes {info.axes}, or"
            f" pass the index as an operand. It is at {site_of(eqn)}"
        )


def _unwrapped(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """The kernel without JAX's rule for `vmap`, which would be lowered as a function of its own."""
    if len(jaxpr.eqns) == 1 and jaxpr.eqns[0].primitive.name == "custom_vmap_call":
        (call,) = jaxpr.eqns
        if call.invars == jaxpr.jaxpr.invars and call.outvars == jaxpr.jaxpr.outvars:
            return call.params["call"]
    return jaxpr


@team_kernel_p.def_impl
def _team_kernel_impl(*operands, **params):
    return jax.jit(lambda *xs: team_kernel_p.bind(*xs, **params))(*operands)


@team_kernel_p.def_effectful_abstract_eval
def _team_kernel_abstract_eval(*_, jaxpr, info):
    del info
    return jaxpr.out_avals, jaxpr.effects


def _team_kernel_batching(args, dims, *, jaxpr, info):
    """One launch per batch entry, in order: the same on every device of the team."""
    mapped = [d is not None for d in dims]
    moved = [jnp.moveaxis(x, d, 0) if m else x for x, d, m in zip(args, dims, mapped, strict=True)]

    def launch(slices):
        rest = iter(slices)
        xs = [next(rest) if m else x for x, m in zip(moved, mapped, strict=True)]
        return team_kernel_p.bind(*xs, jaxpr=jaxpr, info=info)

    outs = jax.lax.map(launch, [x for x, m in zip(moved, mapped, strict=True) if m])
    return outs, [0] * len(outs)


batching.primitive_batchers[team_kernel_p] = _team_kernel_batching


def _team_kernel_jvp(primals, tangents, *, jaxpr, info):
    raise NotImplementedError(
        f"kernel {info.name} cannot be differentiated by itself; wrap its call in jax.custom_vjp,"
        " as Stretto's public operations do (reverse mode only)."
    )


ad.primitive_jvps[team_kernel_p] = _team_kernel_jvp


def _team_kernel_lowering(ctx, *args, jaxpr, info):
    if info.axes and not info.by_heap:
        _check_not_recorded(info, on_gpus="cuda" in ctx.module_context.platforms)
    context = _context_of_clique(ctx.module_context, info)
    return inline(ctx, jaxpr, args, context=context, name=info.name)


def _check_not_recorded(info: TeamKernelInfo, *, on_gpus: bool) -> None:
    """A kernel with peers' operands must not be recorded: XLA would keep their addresses."""
    if recording.is_active():
        raise NotImplementedError(
            f"kernel {info.name} reads its peers' operands, whose addresses a recorded program"
            " would keep, so stretto.recorded has no place for it. Call the operation with"
            " backend='auto' or 'xla'; a kernel of your own can exchange by distributed.posting."
        )
    obstacle = options.why_kernels_are_recorded() if on_gpus else None
    if obstacle is not None:
        raise RuntimeError(f"kernel {info.name}: {obstacle}")


mlir.register_lowering(team_kernel_p, _team_kernel_lowering, cacheable=False)


def _context_of_clique(context: mlir.ModuleContext, info: TeamKernelInfo) -> mlir.ModuleContext:
    """`context` with the kernel's clique in place of the mesh; as it is for one without a team."""
    mesh = lowered_meshes.mesh_of(context)
    if mesh is None:
        return context
    if not info.axes:
        check_order(mesh, info.name)
        return context
    clique = clique_of(mesh, info.axes, info.name)
    _warn_of_unshared_memory(clique, context, info)
    if info.reverse:
        clique = clique.reversed()
    processes = clique.processes[::-1] if info.reverse else clique.processes
    rule = functools.partial(_lower_for_clique, clique, processes)
    return lowered_meshes.context_of(
        context, clique.processes, clique.shape, clique.axis_names, [(kernel_p, rule)]
    )


def _warn_of_unshared_memory(
    clique: Clique, context: mlir.ModuleContext, info: TeamKernelInfo
) -> None:
    """Where a kernel's devices belong to several processes, XLA needs a flag (`xla_flags`)."""
    if len(set(clique.processes)) == 1 or "cuda" not in context.platforms:
        return
    if not options.decides_on_slices():
        warnings.warn(
            f"kernel {info.name} joins several processes, and XLA may fail to share its memory"
            f" between them without {xla_flags.NO_SLICES_IN_CALLS}. stretto.initialize(), called"
            " before JAX is first used, adds that to XLA_FLAGS.",
            RuntimeWarning,
            stacklevel=2,
        )


def _lower_for_clique(
    clique: Clique,
    processes: tuple[int, ...],
    ctx: mlir.LoweringRuleContext,
    *args: Any,
    **params: Any,
):
    """Lowers `mpmd_map` for a clique that JAX takes for the mesh, and says who its members are.

    `processes` are theirs, in the order of their slots in the heap.
    """
    if ctx.module_context.platforms == ("cpu",):
        return cpu_kernels.lower_kernel_for_cpu(ctx, *args, members=clique.members, **params)
    in_order = sorted(clique.members)
    with (
        mailbox.devices_numbered(clique.members),
        heap.joining(processes),
        slots.of_members(in_order),
    ):
        outs = lower_for_gpus(ctx, *args, **params)
    _set_members(outs[0].owner, clique.members)
    return outs


def _set_members(operation: ir.Operation, members: Sequence[int]) -> None:
    """Names a clique's members: XLA's `xla_replica_ids` are positions in the program's mesh.

    A kernel without communication has none.
    """
    name, key = "mhlo.backend_config", "xla_replica_ids"
    settings = {item.name: item.attr for item in ir.DictAttr(operation.attributes[name])}
    if key not in settings:
        return
    settings[key] = ir.StringAttr.get(",".join(map(str, members)))
    operation.attributes[name] = ir.DictAttr.get(settings)
