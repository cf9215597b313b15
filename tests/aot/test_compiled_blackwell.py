"""What the compiler for B200s makes of the kernels; nobody has run them on one."""

from __future__ import annotations

import pytest
from aot_checks import COPIED, check, compile_case

from stretto.distributed.tools import aot

pytestmark = pytest.mark.skipif(
    not aot.is_available(), reason="needs the compiler: `uv sync --group aot`"
)

MATMULS = (
    "all_gather_matmul",
    "all_gather_matmul_k",
    "all_gather_matmul_n",
    "matmul_reduce_scatter",
    "matmul_all_reduce",
)
# Beside the warpgroup that drains there are five warps or more, of up to eight.
WARPGROUPS = 3


def check_for_blackwell(compiled):
    check(compiled, warpgroups=WARPGROUPS, local=True, target="sm_100a")
    for program in compiled:
        assert not COPIED.search(program["hlo"]), f"{program['label']}:\n{program['hlo']}"
        for kernel in program["kernels"]:
            assert "tcgen05.mma" in kernel["ptx"] and "wgmma" not in kernel["ptx"]


@pytest.mark.parametrize(
    "case", ["Blackwell", pytest.param("Blackwell, the others", marks=pytest.mark.slow)]
)
def test_fused_matmuls(case, tmp_path):
    """Of the first case rows fill the tiles that two blocks make together."""
    compiled = compile_case(case, tmp_path)
    check_for_blackwell(compiled)
    if case == "Blackwell":
        for kernel in (kernel for program in compiled for kernel in program["kernels"]):
            assert "cta_group::2" in kernel["ptx"] and ".reqnctapercluster" in kernel["ptx"]


@pytest.mark.slow
def test_blocks_alone(tmp_path):
    compiled = compile_case("Blackwell blocks alone", tmp_path)
    check_for_blackwell(compiled)
    for program in compiled:
        assert all("cta_group::2" not in kernel["ptx"] for kernel in program["kernels"])


@pytest.mark.slow
def test_collectives(tmp_path):
    """They have no products: for a B200 they are compiled as for an H100."""
    for program in compile_case("Blackwell collectives", tmp_path):
        meets = "skip_device_barrier = true" in program["hlo"]
        check([program], warpgroups=1, local=meets, target="sm_100a")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", MATMULS)
def test_every_configuration(name, tmp_path):
    check_for_blackwell(compile_case(f"Blackwell configs of {name}", tmp_path, timeout_s=580))


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        ("Blackwell fp8", "kind::f8f6f4"),
        pytest.param("Blackwell fp8, the others", "kind::f8f6f4", marks=pytest.mark.slow),
        pytest.param(
            "Blackwell fp8, scales of the tensor cores",
            "kind::mxf8f6f4.block_scale.scale_vec::1X",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_eight_bits(case, kind, tmp_path):
    compiled = compile_case(case, tmp_path)
    assert len(compiled) == 2
    for program in compiled:
        for kernel in program["kernels"]:
            assert not kernel["spill_bytes"] and not kernel["stack_bytes"], program["label"]
            assert not kernel["warnings"], program["label"]
            pair = 2 if "pairs" in program["label"] else 1
            assert f"tcgen05.mma.cta_group::{pair}.{kind}" in kernel["ptx"], program["label"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "grouped_matmul"]
)
def test_operations_in_eight_bits(name, tmp_path):
    compiled = compile_case(f"Blackwell fp8, {name}", tmp_path)
    assert len(compiled) >= 2
    for program in compiled:
        for kernel in program["kernels"]:
            assert not kernel["spill_bytes"] and not kernel["warnings"], program["label"]
            assert ".kind::f8f6f4" in kernel["ptx"], program["label"]


@pytest.mark.slow
def test_operations_with_scales_of_the_tensor_cores(tmp_path):
    compiled = compile_case("Blackwell fp8, mx", tmp_path)
    assert len(compiled) == 4
    for program in compiled:
        for kernel in program["kernels"]:
            assert not kernel["spill_bytes"] and not kernel["warnings"], program["label"]
            assert ".kind::mxf8f6f4.block_scale.scale_vec::1X" in kernel["ptx"], program["label"]


@pytest.mark.slow
@pytest.mark.parametrize("which", ["product", "rest"])
def test_rows_in_groups(which, tmp_path):
    for program in compile_case(f"Blackwell groups, {which}", tmp_path):
        for kernel in program["kernels"]:
            assert not kernel["spill_bytes"] and not kernel["stack_bytes"], program["label"]
            assert not kernel["warnings"], program["label"]
            assert ".target sm_100a" in kernel["ptx"] and "tcgen05.mma" in kernel["ptx"]
