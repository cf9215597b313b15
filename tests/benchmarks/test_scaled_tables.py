"""The tables of operands in 8 bits, written into a page."""

from __future__ import annotations

import pytest

from stretto.benchmarks.commands import bench as command
from stretto.benchmarks.measurements import results
from stretto.benchmarks.measurements.results import Measurement, Timed

SIZES = dict(m=8192, k=8192, n=8192)


def timed(peer, us, error=None):
    samples = [us, us * 1.01] * 4
    return Timed(
        peer=peer,
        role="matmul" if peer == "matmul" else "fused",
        time=us,
        time_p10=us - 1,
        time_p90=us + 1,
        samples=samples,
        calls=5,
        tflops=5e5 / us,
        float32_error=error,
    )


def measurement(kernel, *peers, values=""):
    return Measurement(
        kernel=kernel,
        **SIZES,
        type="bfloat16",
        devices=2,
        values=values,
        size=1,
        count=1,
        flops=1,
        sent_bytes=1.0,
        per_visit=2,
        communication_floor=100.0,
        timed=list(peers),
    )


@pytest.fixture
def written(tmp_path, make_results):
    """(the page's path, the results' path) of a run with scales of rows and of blocks."""
    one = make_results(kernels=("all_gather",))
    one.measurements = [
        measurement("all_gather_matmul_fp8", timed("fused", 400, 1e-3), timed("xla", 800, 2e-3)),
        measurement("all_gather_matmul_fp8", timed("fused", 390), timed("matmul", 351)),
        measurement("all_gather_matmul_fp8_block", timed("fused", 500), timed("matmul", 60)),
        measurement("all_gather_matmul", timed("fused", 1000)),
    ]
    one.measurements[1].values = "tensor"
    path, page = tmp_path / "r.json", tmp_path / "page.md"
    results.write(one, path)
    page.write_text("# Page\n\n<!-- times -->\n<!-- /times -->\n")
    return page, path


def test_a_row_a_case(written):
    page, path = written
    assert command.main(["document", str(path), "--fp8", str(page)]) == 0
    text = page.read_text()
    assert "`all_gather_matmul`:" in text and "4 x NVIDIA H100" in text
    lines = [line for line in text.splitlines() if line.startswith("| 8192x8192x8192")]
    cells = {line.split(" | ")[1]: line.strip("| ").split(" | ") for line in lines}
    # shape, scales, time, TFLOP/s, share of the floor, XLA, matmul alone, bfloat16, error
    assert cells["rows"][2:4] == ["400 [399, 401]", "1250"]
    assert cells["rows"][5:] == ["800", "-", "2.50", "0.50"]
    assert cells["a tensor"][4] == "90.0% [90.0, 90.0]"
    assert cells["blocks"][4] == "20%", "the links are the floor"
    assert command.main(["document", str(path), "--fp8", str(page), "--check"]) == 0


def test_a_page_that_is_out_of_date(written, capsys):
    page, path = written
    assert command.main(["document", str(path), "--fp8", str(page), "--check"]) == 1
    assert "does not match the results" in capsys.readouterr().err


def test_results_without_operands_in_8_bits(tmp_path, make_results, capsys):
    path, page = tmp_path / "r.json", tmp_path / "page.md"
    results.write(make_results(kernels=("all_gather",)), path)
    page.write_text("<!-- times -->\n<!-- /times -->\n")
    assert command.main(["document", str(path), "--fp8", str(page)]) == 2
    assert "hold no products of operands in 8 bits" in capsys.readouterr().err
    assert command.main(["document", str(path), str(path), "--fp8", str(page)]) == 2
    assert "takes the results of one run, and 2 are given" in capsys.readouterr().err
