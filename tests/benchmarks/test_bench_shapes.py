"""The list of shapes, and what each operation makes of one."""

from __future__ import annotations

import jax
import pytest
from bench_cases import case_of

import stretto
from stretto.benchmarks.cases.case import Case
from stretto.benchmarks.cases.meshes import AXIS, mesh_of
from stretto.benchmarks.cases.shapes import (
    operation_named,
    parse_shape,
    set_names,
    shapes_of,
    text_of,
)
from stretto.benchmarks.errors import UnavailableError
from stretto.kernels.operations import OPERATIONS
from stretto.kernels.problem.machine import Machine


@pytest.mark.parametrize("kernel", OPERATIONS)
@pytest.mark.parametrize("name", set_names())
def test_every_set_has_distinct_positive_shapes(kernel, name):
    operation = OPERATIONS[kernel]
    shapes = shapes_of(name, operation, 4)
    assert bool(shapes) == (name in operation.examples.sets)
    assert len(set(map(text_of, shapes))) == len(shapes)
    assert all(tuple(sizes) == operation.sizes for sizes in shapes)
    assert all(size > 0 for sizes in shapes for size in sizes.values())


@pytest.mark.parametrize("kernel", OPERATIONS)
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["awkward", "awkward-few", "goals"])
def test_these_sets_can_always_be_cut(kernel, devices, name):
    operation = OPERATIONS[kernel]
    for sizes in shapes_of(name, operation, devices):
        if kernel == "all_to_all" and name == "goals" and sizes["m"] % (devices * devices):
            continue
        Case(operation=operation, sizes=sizes, dtype="bfloat16", devices=devices).check()


def texts_of(name, kernel, devices):
    return [text_of(sizes) for sizes in shapes_of(name, OPERATIONS[kernel], devices)]


def test_awkward_sizes_are_per_device():
    assert f"{4 * 63}x8x{4 * 136}" in texts_of("awkward", "all_gather_matmul", 4)
    assert f"{4 * 63}x{4 * 8}x136" in texts_of("awkward", "matmul_reduce_scatter", 4)


def test_reducing_kernels_contract_the_long_dimension():
    assert "8192x8192x28672" in texts_of("llama-70b", "all_gather_matmul", 4)
    assert "8192x28672x8192" in texts_of("llama-70b", "matmul_reduce_scatter", 4)


def test_a_spelt_shape():
    gather_matmul, gather = OPERATIONS["all_gather_matmul"], OPERATIONS["all_gather"]
    assert parse_shape("8192x4096x28672", gather_matmul) == {"m": 8192, "k": 4096, "n": 28672}
    assert parse_shape("64x32", gather) == {"m": 64, "n": 32}
    assert text_of({"m": 64, "n": 32}) == "64x32"


@pytest.mark.parametrize(
    ("text", "kernel", "message"),
    [
        ("8192", "all_gather_matmul", "neither a set"),
        ("llama", "all_gather_matmul", "neither a set .*llama-70b"),
        ("64x32", "all_gather_matmul", "has 2 sizes; all_gather_matmul takes MxKxN"),
        ("64x32x16", "all_gather", "has 3 sizes; all_gather takes MxN"),
        ("64x0x16", "all_gather_matmul", "size of 0"),
    ],
)
def test_a_wrong_shape_says_what_is_wrong(text, kernel, message):
    with pytest.raises(ValueError, match=message):
        parse_shape(text, OPERATIONS[kernel])


def test_an_unknown_kernel():
    with pytest.raises(ValueError, match="all_gather_matmul"):
        operation_named("matmul")


@pytest.mark.parametrize(
    ("kernel", "shape", "blocks", "size", "sent"),
    [
        # Whole tensor S = 64 * 32 * 2 bytes for the gathered lhs; each device sends 3/4 of it.
        ("all_gather_matmul", "64x32x16", ((16, 32), (32, 4)), 4096, 3072),
        ("matmul_reduce_scatter", "64x32x16", ((64, 8), (8, 16)), 2048, 1536),
        ("matmul_all_reduce", "64x32x16", ((64, 8), (8, 16)), 2048, 3072),
        ("all_gather", "64x32", ((16, 32),), 4096, 3072),
        ("reduce_scatter", "64x32", ((64, 32),), 4096, 3072),
        ("all_reduce", "64x32", ((64, 32),), 4096, 6144),
        # S / D (D - 1) / D with S = 64 * 32 * 2.
        ("all_to_all", "64x32", ((16, 32),), 1024, 768),
    ],
)
def test_blocks_and_bytes(kernel, shape, blocks, size, sent):
    case = case_of(kernel, shape, 4, "bfloat16")
    assert tuple(operand.shape for operand in case.operands) == blocks
    assert case.size == size
    assert case.work.sent_bytes == sent


def test_one_device_sends_nothing():
    assert case_of("all_reduce", "64x32", devices=1).work.sent_bytes == 0


def test_flops_are_one_devices():
    assert case_of("all_gather_matmul", "64x32x16", 4).work.flops == 2 * 64 * 32 * 4
    assert case_of("matmul_all_reduce", "64x32x16", 4).work.flops == 2 * 64 * 8 * 16


def test_a_shape_that_cannot_be_cut_is_unavailable():
    with pytest.raises(UnavailableError, match="m=30 is not a multiple of 4"):
        case_of("all_gather_matmul", "30x32x16", 4).check()


@pytest.mark.parametrize("kernel", OPERATIONS)
def test_a_case_is_the_problem_that_its_call_is(kernel):
    """So that a table's entry, made from a case, is found by the calls that it was measured for."""
    operation = OPERATIONS[kernel]
    case = Case(
        operation=operation,
        sizes=shapes_of("tiny", operation, 4)[-1],
        dtype="bfloat16",
        devices=4 if operation.communicates else 1,
    )
    passed = {name: case.sizes[name] for name in operation.examples.passed}
    keywords = {**operation.examples.keywords, **passed}
    keywords |= operation.examples.keywords_of(case.sizes)
    operands = [jax.ShapeDtypeStruct(one.shape, one.dtype or case.dtype) for one in case.operands]
    choices = []

    def explained():
        axes = (AXIS,) if operation.communicates else ()
        choices.append(stretto.explain(operation.public, *operands, *axes, **keywords))

    jax.jit(jax.shard_map(explained, mesh=mesh_of(4), in_specs=(), out_specs=None)).trace()
    assert choices[0].problem == case.problem(Machine.of_mesh())
