"""The list of shapes, and what each operation makes of one."""

from __future__ import annotations

import pytest

from stretto.benchmarks.cases.case import OPERATIONS, Case, operation_named
from stretto.benchmarks.cases.shapes import KERNELS, SETS, Shape, parse_shape, shapes_of
from stretto.benchmarks.errors import UnavailableError


def case_of(kernel: str, shape: str, devices: int = 4, dtype: str = "bfloat16") -> Case:
    return Case(
        operation=OPERATIONS[kernel],
        shape=parse_shape(shape, kernel),
        dtype=dtype,
        devices=devices,
    )


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", SETS)
def test_every_set_has_distinct_positive_shapes(kernel, name):
    shapes = shapes_of(name, kernel, 4)
    assert len(set(shapes)) == len(shapes)
    assert all(shape.m > 0 and shape.n > 0 for shape in shapes)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["awkward", "awkward-few", "goals"])
def test_these_sets_can_always_be_cut(kernel, devices, name):
    for shape in shapes_of(name, kernel, devices):
        if kernel == "all_to_all" and name == "goals" and shape.m % (devices * devices):
            continue
        Case(operation=OPERATIONS[kernel], shape=shape, dtype="bfloat16", devices=devices).check()


def test_awkward_sizes_are_per_device():
    assert Shape(4 * 63, 8, 4 * 136) in shapes_of("awkward", "all_gather_matmul", 4)
    assert Shape(4 * 63, 4 * 8, 136) in shapes_of("awkward", "matmul_reduce_scatter", 4)


def test_reducing_kernels_contract_the_long_dimension():
    assert Shape(8192, 8192, 28672) in shapes_of("llama-70b", "all_gather_matmul", 4)
    assert Shape(8192, 28672, 8192) in shapes_of("llama-70b", "matmul_reduce_scatter", 4)


def test_a_spelt_shape():
    assert parse_shape("8192x8192x28672", "all_gather_matmul") == Shape(8192, 8192, 28672)
    assert parse_shape("64x32", "all_gather") == Shape(64, 0, 32)
    assert str(Shape(64, 0, 32)) == "64x32"


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
        parse_shape(text, kernel)


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
    case = case_of(kernel, shape)
    assert case.blocks == blocks
    assert case.size == size
    assert case.sent_bytes == sent


def test_one_device_sends_nothing():
    assert case_of("all_reduce", "64x32", devices=1).sent_bytes == 0


def test_flops_are_one_devices():
    assert case_of("all_gather_matmul", "64x32x16").flops == 2 * 64 * 32 * 4
    assert case_of("matmul_all_reduce", "64x32x16").flops == 2 * 64 * 8 * 16


def test_a_shape_that_cannot_be_cut_is_unavailable():
    with pytest.raises(UnavailableError, match="m=30 is not a multiple of 4"):
        case_of("all_gather_matmul", "30x32x16").check()
