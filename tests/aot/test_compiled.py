"""What the compiler for H100s makes of the kernels, on a machine that has none.

Each case is compiled by `compile_cases.py` in a process of its own: the compiler is asked for its
output through the environment.
"""

from __future__ import annotations

import re

import pytest
from aot_checks import COPIED, check, compile_case, flaws
from compile_cases import COMPILED_BY
from selection import slow
from subjects import HIERARCHICAL
from window_cases import CASES

from stretto.distributed.tools import aot

pytestmark = pytest.mark.skipif(
    not aot.is_available(), reason="needs the compiler: `uv sync --group aot`"
)

MATMULS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


# The reduce-scatter's code is the all-gather's but for its addends, and the all-reduce's its own.
@pytest.mark.parametrize(
    "name",
    [
        "all_gather_matmul",
        pytest.param("matmul_reduce_scatter", marks=pytest.mark.slow),
        pytest.param("matmul_all_reduce", marks=pytest.mark.slow),
    ],
)
def test_fused_matmuls_in_8_bits(name, tmp_path):
    compiled = compile_case(f"fp8, {name}", tmp_path)
    check(compiled, warpgroups=3, local=True)
    assert all("e4m3.e5m2" in kernel["ptx"] for x in compiled for kernel in x["kernels"])


def test_sums_in_place_in_8_bits(tmp_path):
    compiled = compile_case("fp8, in place", tmp_path)
    check(compiled, warpgroups=3, local=True)
    adds = "cp.reduce.async.bulk.tensor"
    assert all(adds in kernel["ptx"] for x in compiled for kernel in x["kernels"])


@pytest.mark.slow
def test_groups_in_8_bits(tmp_path):
    for program in compile_case("fp8, grouped_matmul", tmp_path):
        for kernel in program["kernels"]:
            assert not kernel["spill_bytes"] and not kernel["warnings"], program["label"]


@pytest.mark.slow
def test_experts_in_8_bits(tmp_path):
    """Forward and backward: tokens and their scales are sent, and multiplied."""
    for program in compile_case("fp8, experts", tmp_path):
        for kernel in program["kernels"]:
            assert not kernel["spill_bytes"] and not kernel["stack_bytes"], kernel["name"]
            assert not kernel["warnings"], kernel["name"]
        ptx = [kernel["ptx"] for kernel in program["kernels"]]
        assert any("e4m3.e4m3" in x for x in ptx)
        assert any("e5m2.e4m3" in x for x in ptx) == ("no derivative" not in program["label"])
        assert {"expert_dispatch", "expert_combine"} <= set(program["operations"])
        kernels = {kernel["name"] for kernel in program["kernels"]}
        assert any("activation" in name for name in kernels) == (
            "no derivative" in program["label"]
        )


# The all-reduce is the reduce-scatter's code, with more stores.
@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("some configs of", "all_gather_matmul"),
        slow("some configs of", "matmul_reduce_scatter"),  # One of them at odd sizes, below.
        slow("variants of", "all_gather_matmul"),  # Which the simulator runs.
        pytest.param("configs of", "all_gather_matmul", marks=pytest.mark.slow),
        pytest.param("configs of", "matmul_reduce_scatter", marks=pytest.mark.slow),
        # Those of the all-reduce are the reduce-scatter's, and variants are made by one function.
        pytest.param("configs of", "matmul_all_reduce", marks=pytest.mark.slow),
        pytest.param("variants of", "matmul_reduce_scatter", marks=pytest.mark.slow),
        pytest.param("variants of", "matmul_all_reduce", marks=pytest.mark.slow),
    ],
)
def test_fused_matmuls(name, case, tmp_path):
    compiled = compile_case(f"{case} {name}", tmp_path)
    assert len(compiled) >= 2
    check(compiled, warpgroups=3, local=True)
    for program in compiled:
        assert not COPIED.search(program["hlo"]), f"{program['label']}:\n{program['hlo']}"
        assert "S(1)" not in program["hlo"], "no memory of NCCL in a process that has all GPUs"
        assert "s32" not in program["hlo"], "there is something for XLA to zero"


@pytest.mark.slow
@pytest.mark.parametrize("name", MATMULS)
def test_fused_matmuls_in_other_settings(name, tmp_path):
    check(compile_case(f"more of {name}", tmp_path), warpgroups=3, local=True)


# "n" is the kernel of "m" on other operands.
@pytest.mark.parametrize("axis", ["k", pytest.param("n", marks=pytest.mark.slow)])
def test_gathers_along_another_dimension(axis, tmp_path):
    compiled = compile_case(f"gathers of all_gather_matmul_{axis}", tmp_path)
    check(compiled, warpgroups=3, local=True)
    for program in compiled:
        assert not COPIED.search(program["hlo"]), f"{program['label']}:\n{program['hlo']}"


@pytest.mark.parametrize("case", ["odd sizes", *map(slow, ["odd sizes of gathers", "batches"])])
def test_odd_sizes_and_batches_cost_no_spills_and_no_copies(case, tmp_path):
    compiled = compile_case(case, tmp_path)
    check(compiled, warpgroups=3, local=True)
    for program in compiled:
        found = re.findall(r"\bbf16\[[\d,]+\][^=]*? (copy|pad|slice|fusion)\(", program["hlo"])
        assert not found, f"{program['label']}: {found}"


@pytest.mark.parametrize(
    "case",
    [
        "epilogue",
        pytest.param("epilogues with arrays", marks=pytest.mark.slow),
        pytest.param("epilogues with arrays at odd sizes", marks=pytest.mark.slow),
    ],
)
def test_an_epilogue_costs_no_spills(case, tmp_path):
    compiled = compile_case(case, tmp_path)
    check(compiled, warpgroups=3, local=True)
    if case == "epilogue":  # One instruction of the unit for special functions.
        (kernel,) = compiled[0]["kernels"]
        assert "ex2.approx.ftz" in kernel["ptx"]
        assert not re.search(r"div\.|rcp\.|tanh|rsqrt", kernel["ptx"])


@pytest.mark.parametrize("devices", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_what_exchanges_through_the_heap_is_no_collective_to_xla(devices, tmp_path):
    for program in compile_case(f"through the heap of {devices}", tmp_path):
        (kernel,) = program["kernels"]
        assert not kernel["spill_bytes"] and not kernel["stack_bytes"], program["label"]
        hlo = program["hlo"]
        assert "uses_xla_collective_metadata = false" in hlo and "xla_replica_ids" not in hlo
        assert not re.search(r" (fusion|copy|all-reduce)\(", hlo), "one launch, beside its place's"
        for access in ("ld.volatile", "st.volatile"):
            assert f"{access}.global.v4.b32" in kernel["ptx"]


@pytest.mark.slow
def test_other_parts_cost_no_spills(tmp_path):
    """Tiles and contractions read at run time, gates and addends of those, and another fold."""
    for program in compile_case("other parts", tmp_path):
        (kernel,) = program["kernels"]
        assert not kernel["spill_bytes"] and not kernel["stack_bytes"], program["label"]
        assert not kernel["warnings"], program["label"]
        evenly = 128 if "three warpgroups" in program["label"] else 168
        assert kernel["registers"] == evenly and "wgmma.mma_async" in kernel["ptx"]


@pytest.mark.slow
def test_waits_without_a_limit_have_no_clock_and_no_trap(tmp_path):
    for program in compile_case("no limit", tmp_path):
        (kernel,) = program["kernels"]
        found = [f for f in flaws(kernel, warpgroups=3, local=True) if "limit" not in f]
        assert not found, found
        assert "globaltimer" not in kernel["ptx"] and "trap;" not in kernel["ptx"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_the_tests_on_gpus_compile(tmp_path):
    """There is nothing in their programs that is not lowered. How fast they are is no matter."""
    assert len(compile_case("tests on GPUs", tmp_path, timeout_s=580)) >= 15


def test_a_kernel_whose_result_a_loop_stacks_runs_once(tmp_path):
    """And takes its weights, of which the loop has a stack, where they are."""
    (program,) = compile_case("stacked", tmp_path)
    assert program["hlo"].count("mosaic_gpu_v2") == 1, program["hlo"]
    copied = re.findall(r"= bf16\[(?:1,)?512,1024\]\S* (?:copy|fusion)", program["hlo"])
    assert not copied, program["hlo"]


@pytest.mark.parametrize(
    ("case", "name"),
    [
        pytest.param(f"{case} of", name, marks=marks)
        for name, by in COMPILED_BY.items()
        if by.startswith("example of ")
        for case, marks in (
            # The layer is made of kernels that are compiled alone as well.
            ("example", pytest.mark.slow if name == "mixture_of_experts" else ()),
            ("derivatives", pytest.mark.slow),
        )
    ],
)
def test_operations_of_which_only_an_example_is_compiled(case, name, tmp_path):
    for program in compile_case(f"{case} {name}", tmp_path):
        assert program["kernels"]
        for kernel in program["kernels"]:
            assert not kernel["spill_bytes"] and not kernel["stack_bytes"], kernel["name"]
            assert not kernel["warnings"], kernel["name"]


@pytest.mark.slow
def test_few_tokens_of_experts(tmp_path):
    """Threads store the tables."""
    compiled = compile_case("few tokens of experts", tmp_path)
    check(compiled, warpgroups=1, local=True, plain_stores=True)


@pytest.mark.slow
def test_many_tokens_of_experts(tmp_path):
    """None of it spills, also where four warpgroups add."""
    for program in compile_case("many tokens of experts", tmp_path):
        for kernel in program["kernels"]:
            assert not kernel["spill_bytes"] and not kernel["stack_bytes"], kernel["name"]
            assert not kernel["warnings"], kernel["name"]


@pytest.mark.slow
@pytest.mark.parametrize("step", ["dispatch under", "activation in", "combine under"])
def test_a_step_of_experts_with_a_product(step, tmp_path):
    for program in compile_case(f"{step} a product", tmp_path):
        (kernel,) = program["kernels"]
        assert not kernel["spill_bytes"] and not kernel["stack_bytes"], program["label"]
        assert not kernel["warnings"] and "wgmma" in kernel["ptx"], program["label"]


@pytest.mark.slow
def test_attention_beside_its_collectives(tmp_path):
    for program in compile_case("attention", tmp_path):
        assert not any(kernel["spill_bytes"] or kernel["warnings"] for kernel in program["kernels"])


@pytest.mark.slow
@pytest.mark.parametrize("which", ["128", "64", "64, full", "full", "window", "documents"])
def test_the_attention_kernel(which, tmp_path):
    """Some registers spill that are used once a tile, or a segment, by the warps that load."""
    compiled = compile_case(f"attention kernel, {which}", tmp_path)
    check(compiled, warpgroups=3, local=True, most_spilled=100)
    for program in compiled:
        (kernel,) = program["kernels"]
        # Products of queries, and of weights that are in registers.
        dim, keys = (64 if which.startswith("64") else 128), 128
        assert kernel["ptx"].count("wgmma.mma_async") == dim // 16 + keys // 16
        assert "ex2.approx" in kernel["ptx"]


MOST_SPILLED = 560
"""Bytes that are stored to memory, and loaded."""


@pytest.mark.slow
@pytest.mark.parametrize("words", ["", ", documents"])
@pytest.mark.parametrize("dim", [64, 128])
def test_the_kernel_of_attentions_derivative(dim, words, tmp_path):
    """Its products run side by side: the compiler warns where it serialises them.

    Some registers spill.
    """
    for program in compile_case(f"attention derivative, {dim}{words}", tmp_path):
        (kernel,) = program["kernels"]
        said = program["label"], kernel["spill_bytes"], kernel["warnings"]
        assert kernel["spill_bytes"] <= MOST_SPILLED, said
        assert not any("(C75" in warning for warning in kernel["warnings"]), said
        # Five products for each tile of queries, and the last one once more behind the loop.
        assert kernel["ptx"].count("wgmma.mma_async") == 32 + 8
        assert "cp.reduce.async.bulk.tensor" in kernel["ptx"]


def test_collectives(tmp_path):
    compiled = compile_case("collectives", tmp_path)
    alone = set()
    for program in compiled:
        # A kernel that leaves room meets its peers by itself, and counts its blocks that have.
        meets = "skip_device_barrier = true" in program["hlo"]
        check([program], warpgroups=1, local=meets)
        assert not COPIED.search(program["hlo"]), program["hlo"]
        if meets:
            alone.add(program["label"])
            assert "s32" not in program["hlo"], "there is something for XLA to zero"
    assert {"all_gather", "all_to_all", "all_reduce in one shot"} <= alone


# All are lowered, so that each has kernels: one for each type that is gathered, or exchanged.
@pytest.mark.parametrize(
    ("case", "kernels"),
    [
        ("types", 7 + 2),
        slow("x64", 2 + 1 + 2),
        pytest.param("exchanges", 7, marks=pytest.mark.slow),
        pytest.param("more x64", 3 + 1 + 2 * 2, marks=pytest.mark.slow),
    ],
)
def test_what_is_lowered(case, kernels, tmp_path):
    lowered = compile_case(case, tmp_path, module="lower_cases")
    assert sum(program["hlo"].count("@mosaic_gpu_v2") for program in lowered) == kernels


FLAT_STORE = "cp.async.bulk.global.shared::cta.bulk_group"


def test_which_stores_are_flat(tmp_path):
    """As `distributed.windows` has it, which the simulator and the check of stores rest on."""
    flat, others = compile_case("windows", tmp_path)
    count = sum(case.flat for case in CASES.values())
    assert flat["kernels"][0]["ptx"].count(FLAT_STORE) == count > 5
    assert FLAT_STORE not in others["kernels"][0]["ptx"]


@pytest.mark.slow
def test_a_process_a_gpu(tmp_path):
    """Operands and results are then copied into memory that peers can reach, and no oftener."""
    compiled = compile_case("a process a GPU", tmp_path)
    check(compiled, warpgroups=3, local=True)
    for program in compiled:
        assert "S(1)" in program["hlo"]
        assert len(COPIED.findall(program["hlo"])) <= 3


def test_layers_of_a_process_a_gpu(tmp_path):
    """A layer's weights are a slice, which XLA would otherwise not move to shared memory."""
    (layers,) = compile_case("layers of a process a GPU", tmp_path)
    (call,) = [line for line in layers["hlo"].splitlines() if "mosaic_gpu_v2" in line]
    results = call.partition("= (")[2].partition(") custom-call(")[0].split(", ")
    assert all("S(1)" in result for result in results), call.partition("module =")[0]
    weights = re.search(r"custom-call\(\S+, (%[^\s,)]+)", call)
    assert weights is not None
    (made,) = [x for x in layers["hlo"].splitlines() if f"{weights[1]} = " in x]
    assert made.partition("} ")[0].endswith("S(1)"), made


def test_what_is_copied_out_of_shared_memory(tmp_path):
    """Between a kernel and what reads its result, or makes its operand, is a fusion that copies."""
    (program,) = compile_case("memory of one process", tmp_path)
    lines = program["hlo"].splitlines()
    made, given = [x for x in lines if " fusion(" in x and "xor" in x]
    assert "fusion(%mpmd_map" in made and "S(1)" not in made.partition(" fusion(")[0], made
    assert "S(1)" in given.partition(" fusion(")[0], given
    (between,) = [x for x in lines if " = (f32" in x and " fusion(" in x]
    assert "S(1)" not in between, between
    kernels = [x.partition(" custom-call(")[0] for x in lines if "mosaic_gpu_v2" in x]
    assert len(kernels) == 2 and all("S(1)" in kernel for kernel in kernels)


MEMBERS = re.compile(r'xla_replica_ids = "([\d,]+)"')


def test_two_processes_as_two_nodes(tmp_path):
    """Each connects its own devices, and to XLA both programs are one.

    XLA's processes share what they find out about a program (the fastest matmul) by its text
    without the configurations of its operations. If that differed they would wait for ever.
    """
    compiled = [compile_case(f"two nodes {process} 2", tmp_path)[0] for process in (0, 1)]
    check(compiled, warpgroups=3, local=True)
    for program, members in zip(compiled, ("1,0", "3,2"), strict=True):
        assert MEMBERS.findall(program["hlo"]) == [members], program["hlo"]
        assert not COPIED.search(program["hlo"]) and "S(1)" not in program["hlo"]
    one, other = (
        re.sub(r', backend_config=.*|fingerprint_before_lhs="\w+"', "", program["hlo"])
        for program in compiled
    )
    assert one == other


@pytest.mark.slow
def test_two_nodes_of_a_process_a_gpu(tmp_path):
    compiled = compile_case("two nodes 3 4", tmp_path)
    check(compiled, warpgroups=3, local=True)
    assert MEMBERS.findall(compiled[0]["hlo"]) == ["3,2"]
    assert "S(1)" in compiled[0]["hlo"]


COLLECTIVE = re.compile(r" (all-reduce|collective-permute)(-start|-done)?\(")


def overlaps(hlo: str) -> list[int]:
    """Kernels between the start and the end of each collective, as XLA has scheduled them."""
    kernels, begun, found = 0, None, []
    for line in hlo[hlo.index("\nENTRY") :].splitlines():
        kernels += "mosaic_gpu_v2" in line
        match = COLLECTIVE.search(line)
        if match and match[2] == "-start":
            begun = kernels
        elif match:
            found.append(kernels - begun if match[2] else 0)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", HIERARCHICAL)
def test_what_crosses_between_nodes_does_so_beside_a_kernel(name, tmp_path):
    """XLA's own scheduler, which knows nothing of kernels, makes the overlap that is meant."""
    (program,) = compile_case(f"hierarchical {name}", tmp_path)
    found = overlaps(program["hlo"])
    assert len(found) == 2 and all(found), f"{found}\n{program['hlo']}"
    assert "dynamic-slice-fusion" not in program["hlo"]
    assert set(MEMBERS.findall(program["hlo"])) == {"0,1"}


class TestTheChecks:
    """They find what they look for."""

    KERNEL = dict(  # noqa: RUF012
        name="kernel",
        ptx="""
        .target sm_90a
        @%p1 red.release.sys.global.add.u32 [%rd1], 1;
        ld.acquire.sys.global.u32 %r1, [%rd2];
        ld.global.b64 %rd3, [%rd4];
        trap;
        """,
        spill_bytes=0,
        stack_bytes=0,
        registers=168,
        warnings=[],
    )

    def found(self, old="", new="", *, local=False, **changes):
        kernel = self.KERNEL | changes
        kernel["ptx"] = kernel["ptx"].replace(old, new) if old else kernel["ptx"]
        return " ".join(flaws(kernel, warpgroups=3, local=local))

    def test_a_good_kernel_has_no_flaws(self):
        assert self.found() == ""

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (dict(spill_bytes=8), "8 bytes spilled"),
            (dict(stack_bytes=16), "16 of stack"),
            (dict(warnings=["C7510"]), "C7510"),
            (dict(registers=255), "255 registers do not fit"),
            (dict(local=True), "signals within a device: []"),
            (dict(old="red.release.sys", new="red.release.gpu"), "may cross devices"),
            (dict(old="red.release.sys", new="red.sys"), "has no order"),
            (dict(old="ld.acquire.sys", new="ld.volatile.sys"), "missing"),
            (dict(old="ld.global.b64 %rd3", new="st.global.b64 %rd3"), "may cross devices"),
            (dict(old="sm_90a", new="sm_90"), "not compiled for sm_90a"),
            (dict(old="trap;", new=""), "no wait has a limit"),
        ],
    )
    def test_flaws_are_found(self, changes, message):
        assert message in self.found(**changes)

    @pytest.mark.parametrize(
        ("line", "copied"),
        [
            ("%c = bf16[64,8]{1,0} copy(%p)", True),
            ("%c = (bf16[64,8]{1,0}, bf16[8]) copy-start(%p)", True),
            ("%c = f32[64,8]{1,0:S(1)} copy(%p)", True),
            ("%c = s32[1]{0} copy(%zero)", False),
            ("%c = bf16[64,8]{1,0} bitcast(%p)", False),
        ],
    )
    def test_copies_are_found(self, line, copied):
        assert bool(COPIED.search(line)) == copied
