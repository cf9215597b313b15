"""The transformer's benchmark: what it writes, what it counts, and how it reads a profile."""

from __future__ import annotations

import json
from pathlib import Path

import benchmark
import breakdown
import config
import jax
import numpy as np
import parallel
import pytest
import rates
from breakdown import Span


def test_backends_are_compared_and_results_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--cases", "tiny:32", "--layers", "1", "--tp", "2", "--rounds", "2", "--runs", "1"]
    options += ["--parts", "forward", "--profile", "forward", "--dtype", "float32"]
    records = benchmark.main([str(tmp_path / "new"), *options])
    assert [record["backend"] for record in records] == ["xla", "auto", "silent"]
    assert all(record["ms"]["median"] > 0 and record["needed_gb"] > 0 for record in records)
    assert records[2]["exposed_ms"] == 0 and records[0]["speedup_over_xla"] == 1
    found = json.loads((tmp_path / "new" / "tiny-32.json").read_text())
    assert found["records"] == records and found["mesh"] == {"dp": 1, "tp": 2}
    losses = found["first_losses"]
    assert losses["forward-xla"] == losses["forward-auto"] != losses["forward-silent"]
    choices = found["choices"]["forward-auto"]
    assert [text.split()[:2] for text in choices] == [
        ["all_gather_matmul", "32x128x256"],
        ["all_gather_matmul", "32x128x640"],
        ["matmul_reduce_scatter", "32x128x128"],
        ["matmul_reduce_scatter", "32x320x128"],
    ]
    assert found["breakdown"]["forward-xla"]["kinds"]["collective"] > 0
    assert "collective" not in found["breakdown"]["forward-silent"]["kinds"]
    assert "failed" not in found
    printed = capsys.readouterr().out
    assert "tiny-32-forward-auto: " in printed and "forward    silent" in printed
    assert "num_devices" in json.loads((tmp_path / "new" / "machine.json").read_text())


@pytest.mark.slow
def test_cases_of_a_configuration_share_what_is_trained(tmp_path: Path) -> None:
    options = ["--cases", "tiny:32", "tiny:64", "--layers", "1", "--parts", "step"]
    args = benchmark.parse_arguments([str(tmp_path), *options, "--backends", "xla", "silent"])
    first, second = benchmark.begin(parallel.make_mesh(1, 1), args)
    first.run()
    second.run()
    assert first.weights is second.weights and int(first.weights.state.step) == 4
    assert len(second.found["first_losses"]) == 2 and "failed" not in second.found


def test_what_cannot_be_compiled_is_told_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--cases", "tiny:32", "--layers", "1", "--tp", "1", "--rounds", "1", "--runs", "1"]
    options += ["--parts", "forward", "--backends", "xla", "--attention", "cudnn"]
    assert benchmark.main([str(tmp_path), *options]) == []
    found = json.loads((tmp_path / "tiny-32.json").read_text())
    assert "forward-xla" in found["failed"]
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["forward", "gradients"])
def test_operations_are_counted_for_every_weight(part: str) -> None:
    sizes = config.SIZES["tiny"]
    _, shapes, _ = parallel.structure(sizes)
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    matrices = sum(np.prod(x.shape) for path, x in leaves if "norm" not in path[-1].key)
    pairs = sizes.sequence / 2 * sizes.layers
    expected = 3 * sizes.sequence * (2 * matrices + 4 * sizes.hidden * pairs)
    counted = rates.flops_per_device(sizes, part, batch=3, devices=2)
    assert counted == pytest.approx(expected * (1 if part == "forward" else 3) / 2)


def test_case_is_a_configuration_and_a_length() -> None:
    assert benchmark.Case.parse("7b-layer:8192") == ("7b-layer", 8192)
    assert benchmark.Case.parse("tiny") == ("tiny", 128)
    with pytest.raises(Exception, match="'8b' is none of tiny, 7b-layer, 70b-layer"):
        benchmark.Case.parse("8b:1")


# --- Breakdown. -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("all_gather_matmul_kernel", "fused"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage)", "collective"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "attention"),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTN", "matmul"),
        ("gemm_fusion_dot_7", "matmul"),
        ("loop_dynamic_update_slice_fusion_3", "copy"),
        ("MemcpyD2D", "copy"),
        ("loop_multiply_fusion_2", "elementwise"),
        ("input_reduce_fusion", "elementwise"),
    ],
)
def test_kernels_are_told_apart_by_name(name: str, kind: str) -> None:
    assert breakdown.kind_of(name) == kind


def test_breakdown_counts_what_runs_side_by_side_once() -> None:
    spans = [
        Span("gemm", 0, 4e6),
        Span("ncclAllGather", 2e6, 7e6),  # alone from 4 to 7
        Span("copy", 8e6, 9e6),
        Span("gemm", 8.5e6, 12e6),
    ]
    found = breakdown.summarise(spans, runs=2, longest=2)
    assert found.kinds == {"matmul": 3.75, "collective": 2.5, "copy": 0.5}
    assert found.kernels == [("gemm", 3.75, 1), ("ncclAllGather", 2.5, 0.5)]
    assert (found.idle, found.exposed) == (0.5, 1.5)
