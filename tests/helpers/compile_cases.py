"""Compiles kernels for H100s without one; run by `test_compiled.py` in a process of its own.

    python compile_cases.py CASE FILE

writes a JSON list to FILE, an entry for each program of the case: its label, its HLO, the fields of
its kernels, and the operations that they serve.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import expert_programs
import field_cases
import fused_cases as cases
import jax
import jax.numpy as jnp
import launching
import ragged_matmul
import scaled_cases
import scaled_matmul
import slow_peers
import subjects
import window_cases
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import stretto as st
from stretto.distributed import settings, xla_flags
from stretto.distributed.devices import clique
from stretto.distributed.private_jax import cudnn_attention
from stretto.distributed.team import Team
from stretto.distributed.tools import aot
from stretto.kernels.choice import choose
from stretto.kernels.collectives import combine, dispatch, summed_norm_by_heap
from stretto.kernels.engine.blackwell import tile_config as blackwell_tiles
from stretto.kernels.engine.hopper.tile_config import (
    BLOCKS,
    BLOCKS_BY_THREE,
    LARGE_FP8,
    SHARED,
    SHARED_WIDE,
)
from stretto.kernels.fused import (
    attention_config,
    attention_derivative,
    dispatch_matmul,
    group_activation,
    matmul_combine,
)
from stretto.kernels.fused.local_matmul import local_matmul
from stretto.kernels.operations import OPERATIONS, SCALED, attention_options
from stretto.kernels.problem import node_config
from stretto.kernels.problem.activations import ClampedSwiglu, swiglu
from stretto.kernels.problem.machine import Machine
from stretto.kernels.problem.problem import Problem, Types
from stretto.kernels.xla.quantisation import Quantised

EXPERTS = ("expert_dispatch", "expert_combine", "mixture_of_experts")
MIDDLING = (2048, 1024, 2048)
README = (1024, 512, 2048)  # On its first page.
ODD = (2006, 1040, 2064)  # With rows of multiples of 16 bytes.
SHARES = (5120, 5120, 5120)  # In whose last wave blocks share tiles (`engine/remainder.py`).
type Program = tuple[str, Callable, list[jax.ShapeDtypeStruct]]


def fused(name: str, mesh: Mesh, sizes=MIDDLING, *, axis: Any = "x", dtype=jnp.bfloat16, **options):
    """One call of a fused matmul on operands that lie as it wants them."""
    m, k, n = sizes
    in_specs, _ = cases.specs(name, axis)
    structs = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip([(m, k), (k, n)], in_specs, strict=True)
    ]
    options = {"config": None} | options  # The kernel's own choice.
    return cases.mapped(name, mesh, axis, backend="pallas", **options), structs


def configs(name: str) -> Iterator[Program]:
    """Every configuration of the fused kernel that the tuner may choose."""
    mesh = aot.mesh_of_gpus((4,), ("x",))
    for config in OPERATIONS[name].kernels[0].candidates(None):
        if not config.unfused:
            yield f"{name} {config}", *fused(name, mesh, config=config)


def some_configs(name: str) -> Iterator[Program]:
    """The first and the last of them: the largest tiles, and the other way to gather or store."""
    first, *_, last = configs(name)
    yield from (first, last)


def variants(name: str) -> Iterator[Program]:
    """The default configuration where it is hardest: many peers, sizes that fit no tile."""
    yield "eight devices", *fused(name, aot.mesh_of_gpus((8,), ("x",)))
    four = aot.mesh_of_gpus((4,), ("x",))
    awkward = cases.whole(name, 4, 65, 72, 136)
    yield "awkward", *fused(name, four, awkward)
    if name == "all_gather_matmul":
        yield "awkward, in shards", *fused(name, four, awkward, config=cases.IN_SHARDS)


def more_variants(name: str) -> Iterator[Program]:
    """The default configuration in other settings."""
    four = aot.mesh_of_gpus((4,), ("x",))
    square = aot.mesh_of_gpus((2, 2), ("x", "y"))
    two = aot.mesh_of_gpus((2,), ("x",))
    yield "two devices", *fused(name, two)
    shares = SHARED_WIDE if name == "matmul_all_reduce" else SHARED
    shared = OPERATIONS[name].kernels[0].Config(tiles=shares)
    yield "shared tiles", *fused(name, two, SHARES, config=shared)
    yield "float32 out of float16", *fused(name, four, dtype=jnp.float16, out_dtype=jnp.float32)
    yield "second axis", *fused(name, square, axis="y")
    yield "tuple of axes", *fused(name, square, axis=("x", "y"))


def epilogue() -> Iterator[Program]:
    mesh = aot.mesh_of_gpus((4,), ("x",))
    yield "gelu", *fused("all_gather_matmul", mesh, epilogue=jax.nn.gelu)


def epilogues_with_arrays() -> Iterator[Program]:
    """And one that comes with a rule for its derivative."""
    mesh = aot.mesh_of_gpus((4,), ("x",))
    yield "gelu, a short contraction", *fused("all_gather_matmul", mesh, README, epilogue="gelu")
    yield "relu", *fused("all_gather_matmul", mesh, epilogue=jax.nn.relu)
    yield "bias and residual", *with_arrays(mesh, gated=False)
    yield "two products", *with_arrays(mesh, gated=True)
    yield "a residual of a sum", *residual_of_a_sum(mesh)


def residual_of_a_sum(mesh: Mesh) -> tuple[Callable, list[jax.ShapeDtypeStruct]]:
    """A matmul reduce-scatter that adds an array as large as its result."""
    (m, k, n), specs = MIDDLING, (P(None, "x"), P("x"), P("x"))

    def call(lhs, rhs, residual):
        epilogue = st.epilogues.residual(residual)
        return st.matmul_reduce_scatter(lhs, rhs, "x", epilogue=epilogue, backend="pallas")

    mapped = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=P("x"), check_vma=False)
    return mapped, [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip([(m, k), (k, n), (m, n)], specs, strict=True)
    ]


def epilogues_with_arrays_at_odd_sizes() -> Iterator[Program]:
    mesh, sizes = aot.mesh_of_gpus((2,), ("x",)), ODD
    yield "bias and residual", *with_arrays(mesh, gated=False, sizes=sizes)
    yield "two products", *with_arrays(mesh, gated=True, sizes=sizes)
    yield "transposed", *with_arrays(mesh, gated=True, sizes=sizes, transposed=True)


def with_arrays(
    mesh: Mesh, *, gated: bool, sizes=MIDDLING, transposed: bool = False
) -> tuple[Callable, list[jax.ShapeDtypeStruct]]:
    """An all-gather matmul whose epilogue has a bias and a residual, of one product or of two."""
    (m, k, n), rows, columns = sizes, P("x"), P(None, "x")
    side, of_side = (rows, (n, k)) if transposed else (columns, (k, n))
    make = st.epilogues.swiglu if gated else st.epilogues.gelu

    def call(lhs, first, second, bias, residual):
        epilogue = st.epilogues.chain(make(bias), st.epilogues.residual(residual))
        rhs = (first, second) if gated else first
        return st.all_gather_matmul(
            lhs, rhs, "x", rhs_transposed=transposed, epilogue=epilogue, backend="pallas"
        )

    specs = (rows, side, side, rows, columns)
    shapes = [(m, k), of_side, of_side, (n,), (m, n)]
    mapped = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=columns, check_vma=False)
    return mapped, [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]


def gathers(name: str) -> Iterator[Program]:
    """An all-gather matmul along another dimension, rhs given both ways where that matters."""
    yield "eight devices", *fused(name, aot.mesh_of_gpus((8,), ("x",)))
    four = aot.mesh_of_gpus((4,), ("x",))
    (lhs, rhs), out = cases.specs(name)
    call = functools.partial(
        cases.GATHERS[name],
        axis_name="x",
        rhs_transposed=True,
        epilogue=jax.nn.gelu,
        return_gathered=True,
        backend="pallas",
    )
    mapped = jax.shard_map(
        call, mesh=four, in_specs=(lhs, P(*rhs[::-1])), out_specs=(out, P()), check_vma=False
    )
    structs = [
        jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16, sharding=NamedSharding(four, spec))
        for spec in (lhs, P(*rhs[::-1]))
    ]
    yield "transposed", mapped, structs


def odd_sizes(*names: str) -> Iterator[Program]:
    """Sizes that fit no tile, with rows of multiples of 16 bytes: nothing is copied or padded."""
    mesh = aot.mesh_of_gpus((2,), ("x",))
    for name in names:
        yield name, *fused(name, mesh, ODD)
        if name in cases.OPERATIONS:  # A tile of rhs lies otherwise where it is transposed.
            (lhs, rhs), out = cases.specs(name)
            turned = lhs, P(*rhs[::-1])
            call = functools.partial(
                cases.FORMS[name], axis_name="x", rhs_transposed=True, backend="pallas"
            )
            structs = [
                jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
                for shape, spec in zip([(2006, 1040), (2064, 1040)], turned, strict=True)
            ]
            mapped = jax.shard_map(call, mesh=mesh, in_specs=turned, out_specs=out, check_vma=False)
            yield f"{name}, transposed", mapped, structs


def batches() -> Iterator[Program]:
    """Batches of whole tiles along a later dimension, also with arrays of an epilogue."""
    mesh, split, columns = aot.mesh_of_gpus((2,), ("x",)), P(None, "x"), P(None, None, "x")
    (b, s, k, n), bf16 = (4, 1024, 1024, 2048), jnp.bfloat16

    def program(call, out, *operands):
        specs = tuple(spec for _, spec in operands)
        structs = [
            jax.ShapeDtypeStruct(shape, bf16, sharding=NamedSharding(mesh, spec))
            for shape, spec in operands
        ]
        return jax.shard_map(
            call, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False
        ), structs

    def gather(x, w, residual, scale):
        epilogue = (lambda y, r, f: y * f + r), residual, scale
        return st.all_gather_matmul(x, w, "x", axis=1, epilogue=epilogue, backend="pallas")

    def scatter(x, w):
        return st.matmul_reduce_scatter(x, w, "x", axis=1, backend="pallas")

    arrays = ((b, s, n), columns), ((b, s, 1), P())
    yield "gathered", *program(gather, columns, ((b, s, k), split), ((k, n), split), *arrays)
    yield "scattered", *program(scatter, split, ((b, s, n), columns), ((n, k), P("x")))


def no_limit() -> Iterator[Program]:
    """Waits that spin for ever, as measurements of what the limit costs need them."""
    mesh = aot.mesh_of_gpus((4,), ("x",))
    for name in cases.OPERATIONS:
        program, structs = fused(name, mesh)

        def unlimited(*operands, program=program):
            with settings.wait_limit(0):
                return program(*operands)

        yield name, unlimited, structs


def stacked() -> Iterator[Program]:
    """A loop that keeps the kernel's result for later and uses it, as a backward pass needs it."""
    mesh = aot.mesh_of_gpus((4,), ("x",))

    def body(x, weights):
        def layer(x, w):
            product = st.all_gather_matmul(x, w, "x", backend="pallas")
            return x + product[: len(x), :512], product

        return lax.scan(layer, x, weights)

    specs = P("x"), P(None, None, "x")
    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=specs, out_specs=(P("x"), P(None, None, "x")), check_vma=False
    )
    structs = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip([(2048, 512), (3, 512, 4096)], specs, strict=True)
    ]
    yield "stacked", mapped, structs


def a_process_a_gpu() -> Iterator[Program]:
    mesh = aot.mesh_of_gpus((4,), ("x",), processes=4)
    for name in cases.OPERATIONS:
        yield name, *fused(name, mesh)


def layers_of_a_process_a_gpu() -> Iterator[Program]:
    """A scan over layers, as `stretto.initialize` has XLA compile it in such a job."""
    xla_flags.share_memory_of_kernels(os.environ)
    mesh = aot.mesh_of_gpus((2,), ("x",), processes=2)

    def body(lhs, rhs):
        layer = lambda x, w: (2 * x, st.all_gather_matmul(x, w, "x", backend="pallas"))  # noqa: E731
        return lax.scan(layer, lhs, rhs)[1]

    specs = P("x"), P(None, None, "x")
    mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=specs[1], check_vma=False)
    structs = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip([(256, 512), (3, 512, 512)], specs, strict=True)
    ]
    yield "layers", mapped, structs


def memory_of_one_process() -> Iterator[Program]:
    """A call between two kernels, whose operand and result processes do not share."""
    mesh = aot.mesh_of_gpus((2,), ("x",), processes=2)
    jax.process_count = lambda: 2  # Of the job that is compiled for.
    jax.local_device_count = lambda: 1

    def body(x):
        own = cudnn_attention.in_own_memory
        found = own(lax.sort(own(st.all_gather(x, "x", backend="pallas"))))
        return st.reduce_scatter(found, "x", backend="pallas")

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    yield (
        "sorted",
        mapped,
        [jax.ShapeDtypeStruct((1024, 256), jnp.float32, sharding=NamedSharding(mesh, P("x")))],
    )


def two_nodes(process: int, processes: int) -> Iterator[Program]:
    """A fused matmul over the devices of a node, seen from one of the processes of two nodes."""
    clique.this_process = lambda mesh: process
    clique.are_several = lambda: True
    mesh = aot.mesh_of_gpus((2, 2), ("x", "y"), processes=processes)

    def body(lhs, rhs):
        return lax.psum(st.all_gather_matmul(lhs, rhs, "y", backend="pallas"), "x")

    specs = P(("x", "y")), P(None, "y")
    mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=specs[1], check_vma=False)
    structs = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip([(2048, 1024), (1024, 1024)], specs, strict=True)
    ]
    with settings.nodes_of(2):
        yield f"process {process} of {processes}", mapped, structs


def hierarchical(name: str) -> Iterator[Program]:
    """An operation over two nodes, in several pieces."""
    mesh = aot.mesh_of_gpus((2, 2), ("x", "y"), processes=2)
    both, config = ("x", "y"), node_config.Config(pieces=2)
    with settings.nodes_of(2):
        if name in cases.OPERATIONS:
            yield name, *fused(name, mesh, (8192, 1024, 1024), axis=both, config=config)
            return
        sharding = NamedSharding(mesh, P(both))
        mapped = jax.shard_map(
            functools.partial(
                OPERATIONS[name].public, axis_name=both, backend="pallas", config=config
            ),
            mesh=mesh,
            in_specs=P(both),
            out_specs=P(both) if name == "reduce_scatter" else P(),
            check_vma=False,
        )
        yield name, mapped, [jax.ShapeDtypeStruct((16384, 1024), jnp.bfloat16, sharding=sharding)]


def collectives(target: str = "h100") -> Iterator[Program]:
    mesh = aot.mesh_of_gpus((4,), ("x",), target=target)
    calls = {
        "all_gather": (st.all_gather, (1024, 512), P(None)),
        "reduce_scatter": (st.reduce_scatter, (1024, 512), P("x")),
        "all_reduce in one shot": (st.all_reduce, (32, 512), P(None)),
        "all_reduce in two": (st.all_reduce, (4096, 512), P(None)),
        "all_to_all": (
            functools.partial(st.all_to_all, split_axis=0, concat_axis=0),
            (1024, 512),
            P("x"),
        ),
    }
    for label, (call, (rows, columns), out_spec) in calls.items():
        mapped = jax.shard_map(
            functools.partial(call, axis_name="x", backend="pallas"),
            mesh=mesh,
            in_specs=P("x"),
            out_specs=out_spec,
            check_vma=False,
        )
        sharding = NamedSharding(mesh, P("x"))
        yield (
            label,
            mapped,
            [jax.ShapeDtypeStruct((4 * rows, columns), jnp.bfloat16, sharding=sharding)],
        )


def sums_and_norms() -> Iterator[Program]:
    """In one shot and in two, of few devices and of many, and of a residual of another type."""
    for label, devices, shape, residual in (
        ("one shot", 2, (6, 6144), "bfloat16"),
        ("two shots", 4, (512, 6144), "bfloat16"),
        ("two shots of eight", 8, (512, 7168), "bfloat16"),
        ("float32", 4, (138, 2816), "float32"),
    ):
        mesh = aot.mesh_of_gpus((devices,), ("x",))
        call = jax.shard_map(
            functools.partial(st.all_reduce_rms_norm, axis_name="x", backend="pallas"),
            mesh=mesh,
            in_specs=(P("x"), P(), P()),
            out_specs=P(),
        )
        structs = [
            jax.ShapeDtypeStruct(size, dtype, sharding=NamedSharding(mesh, spec))
            for size, dtype, spec in (
                ((devices * shape[0], shape[1]), "bfloat16", P("x")),
                (shape, residual, P()),
                (shape[1:], "float32", P()),
            )
        ]
        yield label, call, structs


def through_the_heap(devices: int, n: int) -> Iterator[Program]:
    """Messages to peers and, on more than two devices, to this device itself."""
    mesh = aot.mesh_of_gpus((devices,), ("x",))
    config = summed_norm_by_heap.Config()
    call = jax.shard_map(
        functools.partial(st.all_reduce_rms_norm, axis_name="x", backend="pallas", config=config),
        mesh=mesh,
        in_specs=(P("x"), P(), P()),
        out_specs=P(),
    )
    structs = [
        jax.ShapeDtypeStruct(size, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for size, spec in (((devices * 6, n), P("x")), ((6, n), P()), ((n,), P()))
    ]
    yield f"sum and norm on {devices}", call, structs


def example(name: str, *, derivatives: bool = False) -> Iterator[Program]:
    """The first of an operation's examples in bfloat16, or its derivatives."""
    record, mesh = OPERATIONS[name], aot.mesh_of_gpus((4,), ("x",))
    sizes = record.examples.shapes("tiny", 4)[0]
    operands = record.examples.operands(sizes, 4)
    shapes = [(operand.shape, operand.dtype or jnp.bfloat16) for operand in operands]
    options = {"backend": "pallas", **record.examples.keywords}
    options |= {name: sizes[name] for name in record.examples.passed}
    axis = ("x",) if record.communicates else ()

    def call(*xs):
        return record.public(*xs, *axis, **options)

    def pulled(*xs):
        out, pull = jax.vjp(call, *xs)
        return [x for x in pull(out) if x.dtype != jax.dtypes.float0]

    yield name, *on_one(pulled if derivatives else call, mesh, shapes)


def few_tokens_of_experts() -> Iterator[Program]:
    """The dispatch that makes the tables, and the combine of small chunks."""
    mesh = aot.mesh_of_gpus((4,), ("x",))
    tokens, top_k, experts, d = 64, 8, 128, 2048
    entries = (tokens, top_k)

    def sent(x, index):
        config = dispatch.Config(tables=True)
        return st.expert_dispatch(x, index, "x", num_experts=experts, config=config)

    def combined(rows, weights, positions):
        config = combine.Config(chunk=4)
        return st.expert_combine(rows, weights, positions, "x", config=config)

    x, index = ((tokens, d), jnp.bfloat16), (entries, jnp.int32)
    yield "tables in the dispatch", *on_one(sent, mesh, [x, index])
    rows = (4 * tokens * top_k, d), jnp.bfloat16
    yield "combine", *on_one(combined, mesh, [rows, (entries, jnp.float32), index])


def many_tokens_of_experts() -> Iterator[Program]:
    """The dispatch that makes the tables, and the combines that add up sums of devices."""
    mesh = aot.mesh_of_gpus((4,), ("x",))
    tokens, top_k, experts, d = 8192, 8, 128, 2048
    entries = (tokens, top_k)

    def sent(x, index, experts=experts):
        config = dispatch.Config(counted=True, slots=8, stores=1)
        return st.expert_dispatch(x, index, "x", num_experts=experts, config=config)

    x, index = ((tokens, d), jnp.bfloat16), (entries, jnp.int32)
    two = aot.mesh_of_gpus((2,), ("x",))
    yield "tables in the dispatch", *on_one(sent, two, [x, index])
    more = functools.partial(sent, experts=256)
    yield "tables of four devices", *on_one(more, mesh, [x, index])
    rows = (4 * tokens * top_k, d), jnp.bfloat16
    for warpgroups, totals in ((2, False), (2, True), (4, True)):

        def combined(rows, weights, positions, warpgroups=warpgroups, totals=totals):
            config = combine.Config(totals=totals, chunk=8, warpgroups=warpgroups)
            return st.expert_combine(rows, weights, positions, "x", config=config)

        name = f"combine by {warpgroups} warpgroups" + ", with totals" * totals
        yield name, *on_one(combined, mesh, [rows, (entries, jnp.float32), index])


def experts_of_a_model(programs: Callable, model: str, tokens: int) -> Iterator[Program]:
    """Some `expert_programs` on two devices."""
    mesh = aot.mesh_of_gpus((2,), ("x",))
    for name, call, shapes in programs(model, tokens):
        yield name, *on_one(call, mesh, shapes)


def dispatch_under_a_product() -> Iterator[Program]:
    """The first product of a layer of experts, and the transposed one of its backward pass."""
    mesh = aot.mesh_of_gpus((4,), ("x",))
    tokens, rows, experts = 256, 2048, 8

    def body(x, sources, sizes, rhs, *, transposed):
        return dispatch_matmul.dispatch_matmul(
            x,
            sources,
            sizes,
            rhs,
            Team.along(("x",)),
            config=dispatch_matmul.Config(),
            rhs_transposed=transposed,
            interpret=None,
        )[1]

    for transposed, width in ((False, 2048), (True, 2880)):
        rhs = (1536, width) if transposed else (width, 1536)
        shapes = [
            ((tokens, width), jnp.bfloat16),
            ((rows,), jnp.int32),
            ((experts,), jnp.int32),
            ((experts, *rhs), jnp.bfloat16),
        ]
        program = functools.partial(body, transposed=transposed)
        yield f"transposed={transposed}", *on_one(program, mesh, shapes)


def activation_in_a_product() -> Iterator[Program]:
    """The first product of a layer of experts: gated in one matrix, by itself, and, with biases and
    a matrix each, under which tokens are dispatched.
    """
    mesh = aot.mesh_of_gpus((4,), ("x",))
    tokens, rows, experts, tiles = 256, 2048, 8, dispatch_matmul.Config().tiles

    def alone(x, sizes, w_in):
        how = dict(gated=True, tiles=tiles)
        activated = group_activation.Activated.of([w_in], None, swiglu, **how)
        return group_activation.activated_product(x, sizes, activated, interpret=None)

    def under(x, sources, sizes, gate, up, *biases):
        how = dict(gated=True, tiles=tiles)
        activated = group_activation.Activated.of([gate, up], biases, ClampedSwiglu(), **how)
        config = dispatch_matmul.Config()
        given = x, sources, sizes, activated, Team.along(("x",))
        how = dict(config=config, rhs_transposed=False, interpret=None)
        return dispatch_matmul.dispatch_matmul(*given, **how)[1]

    sizes = ((experts,), jnp.int32)
    shapes = [((rows, 2048), jnp.bfloat16), sizes, ((experts, 2048, 1536), jnp.bfloat16)]
    yield "alone", *on_one(alone, mesh, shapes)
    shapes = [((tokens, 2880), jnp.bfloat16), ((rows,), jnp.int32), sizes]
    shapes += [((experts, 2880, 2880), jnp.bfloat16)] * 2 + [((experts, 2880), jnp.bfloat16)] * 2
    yield "dispatch under it", *on_one(under, mesh, shapes)


def combine_under_a_product() -> Iterator[Program]:
    """The last product of a layer of experts, and the sum of two of its backward pass."""
    mesh = aot.mesh_of_gpus((4,), ("x",))
    tokens, f, experts = 256, 768, 8

    def body(sizes, weights, positions, *operands, transposed):
        sides = len(operands) // 2
        return matmul_combine.matmul_combine(
            operands[:sides],
            operands[sides:],
            sizes,
            weights,
            positions,
            Team.along(("x",)),
            wire_dtype=jnp.bfloat16,
            config=matmul_combine.Config(),
            rhs_transposed=transposed,
            interpret=None,
        )

    for transposed, width, top_k, sides in ((False, 2048, 8, 1), (True, 2880, 4, 2)):
        rhs = (width, f) if transposed else (f, width)
        shapes = [
            ((experts,), jnp.int32),
            ((tokens, top_k), jnp.float32),
            ((tokens, top_k), jnp.int32),
            *[((4 * tokens * top_k, f), jnp.bfloat16)] * sides,
            *[((experts, *rhs), jnp.bfloat16)] * sides,
        ]
        program = functools.partial(body, transposed=transposed)
        yield f"transposed={transposed}", *on_one(program, mesh, shapes)


def attention() -> Iterator[Program]:
    """The collectives that move keys, and heads, with what is computed beside them."""
    mesh = aot.mesh_of_gpus((4,), ("x",))
    operands = [((1, 256, heads, 64), jnp.bfloat16) for heads in (8, 4, 4)]
    for label, options in {
        "gathered together": dict(config=attention_options.Config(by_peer=False)),
        "heads": dict(method="heads"),
    }.items():

        def call(q, k, v, options=options):
            options = dict(causal=True, layout="zigzag", backend="pallas", **options)
            return st.context_parallel_attention(q, k, v, "x", **options)

        def pulled(q, k, v, call=call):
            out, pull = jax.vjp(call, q, k, v)
            return out, *pull(out)

        yield label, *on_one(pulled, mesh, operands)


def attention_kernel(which: str) -> Iterator[Program]:
    """The kernel that pulls keys, for each size of heads and each mask."""
    causal = dict(causal=True, layout="zigzag")
    devices, heads, calls = {
        "128": (2, (8, 2, 128), _of_candidates(causal)),
        "64": (4, (8, 4, 64), {"zigzag": causal}),
        "64, full": (4, (8, 4, 64), {"full": {}}),
        "full": (2, (4, 4, 128), {"full": {}}),
        "documents": (2, (8, 2, 128), {"zigzag": causal, "full": {}}),
        # Where most is left to the warps that move data, which have few registers.
        "window": (8, (8, 2, 128), {"window": dict(causal=True, window=1000)}),
    }[which]
    mesh = aot.mesh_of_gpus((devices,), ("x",))
    operands = [((1, 1024, count, heads[2]), jnp.bfloat16) for count in (*heads[:2], heads[1])]
    if which == "documents":
        operands.append(((1, 1024), jnp.int32))
    for label, options in calls.items():

        def call(q, k, v, ids=None, options=options):
            return st.context_parallel_attention(
                q, k, v, "x", segment_ids=ids, method="fused", backend="pallas", **options
            )

        yield f"{label}, {which}", *on_one(call, mesh, operands)


def _of_candidates(options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The same call in each configuration that the tuner tries for heads of 128."""
    problem = types.SimpleNamespace(sizes=dict(dim=128))
    configs = attention_config.Config.candidates(problem)
    return {f"zigzag, {config}": dict(options, config=config) for config in configs}


def attention_derivative_kernel(dim: int, *, packed: bool = False) -> Iterator[Program]:
    """The kernel of attention's derivative, for each mask, and by the keys of a peer.

    If `packed`, of documents.
    """
    operands = [((1, 1024, count, dim), jnp.bfloat16) for count in (8, 2, 2, 8)]
    rows = [((1, 8, 1024), jnp.float32)] * 2
    ids = [((1, 1024), jnp.int32)] * 2 if packed else []
    calls = {
        "full": (attention_config.Sequence(), 1),
        "causal": (attention_config.Sequence(causal=True), 1),
        "window": (attention_config.Sequence(causal=True, window=300), 1),
        "zigzag": (attention_config.Sequence(chunks=2, causal=True), 2),
    }
    for label, (sequence, devices) in calls.items():

        def call(q, k, v, bar, lse, delta, *segments, sequence=sequence, devices=devices):
            return attention_derivative.derive(
                *(q, k, v, bar, lse, delta, sequence),
                scale=q.shape[-1] ** -0.5,
                distance=devices - 1,
                team=Team.along("x"),
                segments=segments or None,
            )

        mesh = aot.mesh_of_gpus((devices,), ("x",))
        yield label, *on_one(call, mesh, [*operands, *rows, *ids])


def windows() -> Iterator[Program]:
    """Kernels whose stores are all flat copies, or none."""
    sharding = NamedSharding(aot.mesh_of_gpus((1,), ("x",)), P())
    for flat in (True, False):
        chosen = [case for case in window_cases.CASES.values() if case.flat == flat]

        def program(x, chosen=chosen):
            return window_cases.call(chosen), x

        yield f"{flat}", program, [jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding)]


def gpu_tests() -> Iterator[Program]:
    """Programs of `tests/gpu`: what it compiles there must compile here."""
    mesh = aot.mesh_of_gpus((4,), ("x",))
    for name, make in field_cases.CASES.items():
        yield name, *on_scalars(make(mesh, "pallas"), mesh, 1)
    for name, subject in subjects.SUBJECTS.items():
        sizes = subject.sizes_of(4, 65, 72, 136)

        def body(seed, subject=subject, sizes=sizes):
            operands = launching.drawn(subject, mesh, sizes, "x", seed, 0)
            return subject.call(operands, "x", backend="pallas")[:1, :1]

        with slow_peers.signals(lambda send, sem: (slow_peers.sleep_on(sem.team, 2, 200), send())):
            yield f"{name} that dawdles", *on_scalars(body, mesh, 1)


def parts() -> Iterator[Program]:
    """Kernels of parts that are not in Stretto: tiles read from memory, another fold."""
    mesh = aot.mesh_of_gpus((1,), ("x",))
    shapes = [((4096, 8192), jnp.bfloat16), ((8192, 4096), jnp.bfloat16), ((8,), jnp.int32)]
    for label, options in {"plain": {}, "waits": dict(columns_per_gate=(1024, 2048))}.items():
        body = functools.partial(ragged_matmul.ragged_matmul, **options)
        yield label, *on_one(body, mesh, [*shapes, shapes[-1]])
    addend = ((8, 4096, 4096), jnp.float32)
    yield (
        "addend",
        *on_one(
            lambda lhs, rhs, sizes, groups, addend: ragged_matmul.ragged_matmul(
                lhs, rhs, sizes, groups, addend=addend
            ),
            mesh,
            [*shapes, shapes[-1], addend],
        ),
    )
    e4m3 = jnp.float8_e4m3fn
    scaled = [((4096, 4096), e4m3), ((4096, 4096), e4m3), ((32, 32), jnp.float32)]
    yield "scaled", *on_one(scaled_matmul.scaled_matmul, mesh, scaled)
    yield from fp8()


def fp8() -> Iterator[Program]:
    """Products of 8 bits with scales of rows and columns, and of blocks."""
    mesh = aot.mesh_of_gpus((1,), ("x",))
    e4m3, e5m2, f32 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float32

    def call(lhs, rhs, lhs_scale, rhs_scale, config, out_dtype=None):
        return local_matmul(
            lhs,
            rhs,
            out_dtype=out_dtype,
            config=config,
            rhs_transposed=True,
            lhs_scale=lhs_scale,
            rhs_scale=rhs_scale,
        )

    of_rows, of_blocks = [(4096, 1)] * 2, [(4096, 32), (32, 32)]
    for label, config, shapes, rhs in (
        ("rows", LARGE_FP8, of_rows, e4m3),
        ("rows, mixed", LARGE_FP8, of_rows, e5m2),
        ("blocks", BLOCKS, of_blocks, e4m3),
        ("blocks, three warpgroups", BLOCKS_BY_THREE, of_blocks, e4m3),
    ):
        operands = [((4096, 4096), e4m3), ((4096, 4096), rhs), *((s, f32) for s in shapes)]
        yield f"fp8, {label}", *on_one(functools.partial(call, config=config), mesh, operands)


def fp8_fused(*names: str, target: str = "h100") -> Iterator[Program]:
    """The fused matmuls in 8 bits, with each granularity's default configuration."""
    mesh = aot.mesh_of_gpus((4,), ("x",), target=target)
    for name in names:
        for kind in ("row", "block"):
            yield f"{name}, {kind}", *scaled_cases.program(name, kind, mesh)
            # Sums are folded in other registers then.
            if kind == "row" and name != "all_gather_matmul":
                options = dict(out_dtype=jnp.float32)
                yield f"{name}, float32", *scaled_cases.program(name, kind, mesh, **options)


def fp8_in_place() -> Iterator[Program]:
    """The reduce-scatter in 8 bits of two devices, which the copy engine adds."""
    mesh = aot.mesh_of_gpus((2,), ("x",))
    for kind in ("row", "tensor", "block"):
        yield kind, *scaled_cases.program("matmul_reduce_scatter", kind, mesh)


def fp8_mx(*names: str) -> Iterator[Program]:
    """The matmuls in 8 bits with scales that Blackwell's tensor cores apply, groups as well."""
    mesh = aot.mesh_of_gpus((4,), ("x",), target="b200")
    for name in names:
        yield f"{name}, mx", *scaled_cases.program(name, "mx", mesh)
    e4m3, e8 = jnp.float8_e4m3fn, jnp.float8_e8m0fnu
    operands = [((4096, 2048), e4m3), ((8, 1536, 2048), e4m3), ((8,), jnp.int32)]
    operands += [((4096, 64), e8), ((8, 1536, 64), e8)]

    def call(lhs, rhs, sizes, lhs_scale, rhs_scale):
        given = dict(lhs_scale=lhs_scale, rhs_scale=rhs_scale, backend="pallas")
        return st.grouped_matmul(lhs, rhs, sizes, rhs_transposed=True, **given)

    one = aot.mesh_of_gpus((1,), ("x",), target="b200")
    yield "grouped_matmul, mx", *on_one(call, one, operands)


def fp8_groups(target: str = "h100") -> Iterator[Program]:
    """Groups of rows in 8 bits."""
    mesh = aot.mesh_of_gpus((1,), ("x",), target=target)
    e4m3, f32 = jnp.float8_e4m3fn, jnp.float32
    for kind, shapes in (
        ("row", [(4096, 1), (8, 1536, 1)]),
        ("block", [(4096, 16), (8, 12, 16)]),
    ):
        operands = [((4096, 2048), e4m3), ((8, 1536, 2048), e4m3), ((8,), jnp.int32)]
        operands += [(shape, f32) for shape in shapes]

        def call(lhs, rhs, sizes, lhs_scale, rhs_scale):
            given = dict(lhs_scale=lhs_scale, rhs_scale=rhs_scale, backend="pallas")
            return st.grouped_matmul(lhs, rhs, sizes, rhs_transposed=True, **given)

        yield f"grouped_matmul, {kind}", *on_one(call, mesh, operands)


def fp8_experts() -> Iterator[Program]:
    """A layer of experts in 8 bits, and its derivatives, with each granularity of scales."""
    mesh = aot.mesh_of_gpus((4,), ("x",))
    tokens, d, f, experts, top_k = 256, 2048, 768, 8, 4
    shapes = [((tokens, d), jnp.bfloat16), ((tokens, top_k), jnp.int32)]
    shapes += [((tokens, top_k), jnp.float32)]
    shapes += [(shape, jnp.bfloat16) for shape in ((experts, d, 2 * f), (experts, f, d))]
    for granularity in ("row", "block"):
        recipe = st.fp8.Recipe(granularity=granularity)

        def pulled(x, index, weights, w_in, w_out, recipe=recipe):
            def call(x, weights, w_in, w_out):
                given = dict(recipe=recipe, backend="pallas")
                return st.fp8.mixture_of_experts(x, index, weights, w_in, w_out, "x", **given)[0]

            out, pull = jax.vjp(call, x, weights, w_in, w_out)
            return out, *pull(out)

        yield f"experts, {granularity}", *on_one(pulled, mesh, shapes)
    e4m3, recipe = jnp.float8_e4m3fn, st.fp8.Recipe()
    of_weights = [((experts, 2 * f, d), e4m3), ((experts, 2 * f, 1), jnp.float32)]
    of_weights += [((experts, d, f), e4m3), ((experts, d, 1), jnp.float32)]

    def alone(x, index, weights, w_in, of_in, w_out, of_out):
        sides = Quantised(w_in, of_in), Quantised(w_out, of_out)
        given = dict(recipe=recipe, backend="pallas")
        return st.fp8.mixture_of_experts(x, index, weights, *sides, "x", **given)[0]

    yield "experts, row, no derivative", *on_one(alone, mesh, [*shapes[:3], *of_weights])


def blackwell(*names: str) -> Iterator[Program]:
    """The default configurations of fused matmuls for B200s."""
    mesh = aot.mesh_of_gpus((4,), ("x",), target="b200")
    for name in names:
        yield name, *fused(name, mesh)


def blackwell_alone() -> Iterator[Program]:
    """Shards of too few rows for pairs of blocks, on B200s."""
    mesh = aot.mesh_of_gpus((4,), ("x",), target="b200")
    for name in ("all_gather_matmul", "matmul_reduce_scatter"):
        yield name, *fused(name, mesh, (512, 1024, 2048))


def blackwell_configs(name: str) -> Iterator[Program]:
    """Every configuration for B200s that the tuner may choose, and other settings."""
    mesh = aot.mesh_of_gpus((4,), ("x",), target="b200")
    kernel = OPERATIONS[name].kernels[0]
    for config in kernel.candidates(problem_on(mesh, name)):
        if not getattr(config, "apart", False):
            yield f"{name} {config}", *fused(name, mesh, config=config)
    eight = aot.mesh_of_gpus((8,), ("x",), target="b200")
    yield "eight devices", *fused(name, eight, cases.whole(name, 8, 65, 72, 136))
    yield "float32 out of float16", *fused(name, mesh, dtype=jnp.float16, out_dtype=jnp.float32)
    if name == "all_gather_matmul":
        square = 2048, 512, 2048  # Of a device: k rows and n columns of rhs, or the reverse.
        yield "gelu", *fused(name, mesh, square, epilogue=jax.nn.gelu, rhs_transposed=True)


def problem_on(mesh: Mesh, name: str) -> Problem:
    """A problem of middling size on the devices of `mesh`."""
    device = mesh.devices.flat[0]
    return Problem(
        operation=name,
        sizes=dict(zip("mkn", (8192, 1024, 2048), strict=True)),
        types=Types(lhs="bfloat16", out="bfloat16"),
        devices=mesh.size,
        machine=Machine.of_kind("gpu", device.device_kind),
    )


def blackwell_fp8(*labels: str) -> Iterator[Program]:
    """Operands in 8 bits with scales on B200s, by one block and by pairs: those of `labels`."""
    mesh = aot.mesh_of_gpus((1,), ("x",), target="b200")
    e4m3, e5m2, f32, e8 = (
        jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float32, jnp.float8_e8m0fnu
    )  # fmt: skip

    def call(lhs, rhs, lhs_scale, rhs_scale, *, config):
        return local_matmul(
            lhs,
            rhs,
            config=config,
            rhs_transposed=True,
            lhs_scale=lhs_scale,
            rhs_scale=rhs_scale,
        )

    of_rows = [((4096, 1), f32)] * 2
    of_blocks, of_32 = [((4096, 32), f32), ((32, 32), f32)], [((4096, 128), e8)] * 2
    for label, config, scales, rhs in (
        ("rows", blackwell_tiles.LARGE_FP8, of_rows, e4m3),
        ("rows, pairs, mixed", blackwell_tiles.PAIR_FP8, of_rows, e5m2),
        ("blocks", blackwell_tiles.BLOCKS, of_blocks, e4m3),
        ("blocks, pairs", blackwell_tiles.PAIR_BLOCKS, of_blocks, e5m2),
        ("blocks of 32", blackwell_tiles.BLOCKS, of_32, e5m2),
        ("blocks of 32, pairs", blackwell_tiles.PAIR_BLOCKS, of_32, e4m3),
    ):
        operands = [((4096, 4096), e4m3), ((4096, 4096), rhs), *scales]
        if label in labels:
            yield f"fp8, {label}", *on_one(functools.partial(call, config=config), mesh, operands)


def blackwell_groups(which: str) -> Iterator[Program]:
    """Rows in groups on B200s: the product, or both derivatives as well."""
    mesh = aot.mesh_of_gpus((1,), ("x",), target="b200")

    def product(lhs, rhs, sizes, **options):
        return st.grouped_matmul(lhs, rhs, sizes, backend="pallas", **options)

    def derivatives(lhs, rhs, sizes, **options):
        def loss(x, y):
            return product(x, y, sizes, **options).astype(jnp.float32).sum()

        return jax.grad(loss, (0, 1))(lhs, rhs)

    shapes = [((2048, 1024), jnp.bfloat16), ((8, 1024, 2048), jnp.bfloat16), ((8,), jnp.int32)]
    if which == "product":
        yield "product", *on_one(product, mesh, shapes)
        return
    yield "derivatives", *on_one(derivatives, mesh, shapes)
    for config in OPERATIONS["grouped_matmul"].kernels[0].candidates(problem_on(mesh, "grouped")):
        body = functools.partial(product, config=config)
        yield f"{config}", *on_one(body, mesh, shapes)
    turned = [shapes[0], ((8, 2048, 1024), jnp.bfloat16), shapes[2]]
    body = functools.partial(product, rhs_transposed=True, out_dtype=jnp.float32)
    yield "transposed", *on_one(body, mesh, turned)


def on_one(body: Callable, mesh: Mesh, shapes: list[tuple[tuple[int, ...], Any]]) -> tuple:
    """A program of operands that all devices have alike."""
    sharding = NamedSharding(mesh, P())
    structs = [jax.ShapeDtypeStruct(*shape, sharding=sharding) for shape in shapes]
    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(P(),) * len(shapes), out_specs=P(), check_vma=False
    )
    return mapped, structs


def on_scalars(body: Callable, mesh: Mesh, count: int) -> tuple:
    """A program of whole numbers that all devices get alike."""
    scalar = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, P()))
    return subjects.on_mesh(body, mesh), [scalar] * count


CASES: dict[str, Callable[[], Iterator[Program]]] = {
    **{f"configs of {name}": functools.partial(configs, name) for name in cases.OPERATIONS},
    **{
        f"some configs of {name}": functools.partial(some_configs, name)
        for name in cases.OPERATIONS
    },
    **{f"variants of {name}": functools.partial(variants, name) for name in cases.OPERATIONS},
    **{f"more of {name}": functools.partial(more_variants, name) for name in cases.OPERATIONS},
    **{f"gathers of {name}": functools.partial(gathers, name) for name in cases.GATHERS},
    "odd sizes": functools.partial(odd_sizes, "matmul_reduce_scatter"),
    "odd sizes of gathers": functools.partial(
        odd_sizes, "all_gather_matmul", "all_gather_matmul_k"
    ),
    "batches": batches,
    **{f"fp8, {name}": functools.partial(fp8_fused, name) for name in scaled_cases.NAMES},
    "fp8, in place": fp8_in_place,
    "fp8, grouped_matmul": fp8_groups,
    "fp8, experts": fp8_experts,
    **{
        f"Blackwell fp8, {name}": functools.partial(fp8_fused, name, target="b200")
        for name in scaled_cases.NAMES
    },
    "Blackwell fp8, grouped_matmul": functools.partial(fp8_groups, target="b200"),
    "epilogue": epilogue,
    "epilogues with arrays": epilogues_with_arrays,
    "epilogues with arrays at odd sizes": epilogues_with_arrays_at_odd_sizes,
    "no limit": no_limit,
    "stacked": stacked,
    "tests on GPUs": gpu_tests,
    "a process a GPU": a_process_a_gpu,
    "layers of a process a GPU": layers_of_a_process_a_gpu,
    "memory of one process": memory_of_one_process,
    "other parts": parts,
    # The all-reduce is the reduce-scatter's code, with more stores.
    "Blackwell": functools.partial(blackwell, "all_gather_matmul", "matmul_reduce_scatter"),
    "Blackwell, the others": functools.partial(
        blackwell, "matmul_all_reduce", "all_gather_matmul_k", "all_gather_matmul_n"
    ),
    **{
        f"Blackwell configs of {name}": functools.partial(blackwell_configs, name)
        for name in cases.FORMS
    },
    **{
        f"Blackwell groups, {which}": functools.partial(blackwell_groups, which)
        for which in ("product", "rest")
    },
    "collectives": collectives,
    "Blackwell collectives": functools.partial(collectives, "b200"),
    "Blackwell blocks alone": blackwell_alone,
    "Blackwell fp8": functools.partial(blackwell_fp8, "rows, pairs, mixed", "blocks"),
    "Blackwell fp8, the others": functools.partial(blackwell_fp8, "rows", "blocks, pairs"),
    "Blackwell fp8, scales of the tensor cores": functools.partial(
        blackwell_fp8, "blocks of 32", "blocks of 32, pairs"
    ),
    "Blackwell fp8, mx": functools.partial(fp8_mx, *scaled_cases.NAMES),
    "sums and norms": sums_and_norms,
    "through the heap of 2": functools.partial(through_the_heap, 2, 6144),
    "through the heap of 8": functools.partial(through_the_heap, 8, 8192),
    **{
        f"hierarchical {name}": functools.partial(hierarchical, name)
        for name in subjects.HIERARCHICAL
    },
    "example of grouped_matmul": functools.partial(example, "grouped_matmul"),
    "derivatives of grouped_matmul": functools.partial(example, "grouped_matmul", derivatives=True),
    **{f"example of {name}": functools.partial(example, name) for name in EXPERTS},
    **{
        f"derivatives of {name}": functools.partial(example, name, derivatives=True)
        for name in EXPERTS
    },
    "few tokens of experts": few_tokens_of_experts,
    "many tokens of experts": many_tokens_of_experts,
    **{
        f"{what} of experts, {model}, {tokens}": functools.partial(
            experts_of_a_model, programs, model, tokens
        )
        for what, programs in (("calls", expert_programs.calls), ("layer", expert_programs.layer))
        for model in expert_programs.SIZES
        for tokens in (64, 8192)
    },
    "dispatch under a product": dispatch_under_a_product,
    "activation in a product": activation_in_a_product,
    "combine under a product": combine_under_a_product,
    "attention": attention,
    **{
        f"attention kernel, {which}": functools.partial(attention_kernel, which)
        for which in ("128", "64", "64, full", "full", "window", "documents")
    },
    **{
        f"attention derivative, {dim}{words}": functools.partial(
            attention_derivative_kernel, dim, packed=bool(words)
        )
        for dim in (64, 128)
        for words in ("", ", documents")
    },
    "windows": windows,
    **{
        f"two nodes {process} {processes}": functools.partial(two_nodes, process, processes)
        for process, processes in ((0, 2), (1, 2), (3, 4))
    },
}


# The case, of those above, in which the kernel of an operation is certain to be.
COMPILED_BY: dict[str, str] = {
    **{name: f"configs of {name}" for name in cases.OPERATIONS},
    **{
        name: f"fp8, {record.public.__name__}"
        if record.examples.scales != "mx"
        else "Blackwell fp8, mx"
        for name, record in SCALED.items()
    },
    **{name: f"gathers of {name}" for name in cases.GATHERS},
    **dict.fromkeys(subjects.COLLECTIVES, "collectives"),
    "grouped_matmul": "example of grouped_matmul",
    **{name: f"example of {name}" for name in EXPERTS},
    "all_reduce_rms_norm": "sums and norms",
    "context_parallel_attention": "attention",
}


def main(case: str, file: str) -> None:
    results: list[dict[str, Any]] = []
    for label, program, structs in CASES[case]():
        with choose.recorded() as choices:
            compiled = aot.compile_program(program, *structs)
        kernels = [dataclasses.asdict(kernel) for kernel in compiled.kernels]
        served = sorted({c.problem.operation for c in choices if c.backend == "pallas"})
        results.append(dict(label=label, hlo=compiled.hlo, kernels=kernels, operations=served))
    pathlib.Path(file).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
