"""What PyTorch's helper is asked for, of operands in 8 bits too; no test here has PyTorch."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest

from stretto.benchmarks.cases.case import Case
from stretto.benchmarks.peers import torch_calls, torch_peers
from stretto.benchmarks.sweeps.expand import expand
from stretto.benchmarks.sweeps.sweep import Sweep
from stretto.kernels.operations import KNOWN

SIZES = dict(m=256, k=128, n=512)


def case(name, values=""):
    return Case(operation=KNOWN[name], sizes=SIZES, dtype="bfloat16", devices=2, values=values)


def asked(case):
    """The request for a timer of a case."""
    helper = torch_peers.TorchHelper(None, on_gpu=False)
    found = []
    with (
        mock.patch.object(helper, "start"),
        mock.patch.object(helper, "_await_start"),
        mock.patch.object(helper, "ask", lambda request: found.append(request) or {"id": 0}),
    ):
        helper.timer("torch", case, 1, 2)
    return found[-1]


def test_every_served_operation_has_a_call():
    served = set(torch_peers.SERVED.values())
    assert served == set(torch_calls.UNFUSED)
    assert served > set(torch_calls.SYMMETRIC)


@pytest.mark.parametrize(
    ("values", "scales"), [("", [(128, 1), (256, 1)]), ("tensor", [(1, 1), (1, 1)])]
)
def test_each_operand_has_its_type(values, scales):
    request = asked(case("all_gather_matmul_fp8", values))
    assert request["operation"] == "all_gather_scaled_matmul"
    matrices = [((128, 128), "float8_e4m3fn"), ((256, 128), "float8_e4m3fn")]
    assert request["operands"] == [*matrices, *((shape, "float32") for shape in scales)]
    plain = asked(case("all_gather_matmul"))
    assert plain["operands"] == [((128, 128), "bfloat16"), ((128, 256), "bfloat16")]


def test_scales_of_tensors_are_of_operands_in_8_bits_alone():
    kernels = ("all_gather_matmul", "all_gather_matmul_fp8", "all_gather_matmul_fp8_block")
    sweep = Sweep(kernels=kernels, shapes=("256x128x512",), devices=(2,), values=("", "tensor"))
    sweep.check()
    found = [(item.case.operation.name, item.case.values) for item in expand([sweep], 2, True)]
    assert found == [(kernels[0], ""), (kernels[1], ""), (kernels[1], "tensor"), (kernels[2], "")]


def test_scaled_products_of_symmetric_memory():
    """As PyTorch 2.11 declares them: rhs is a transposed view, and its scales are a row."""
    symm_mem = mock.Mock()
    process = SimpleNamespace(symm_mem=symm_mem, group="0", torch=SimpleNamespace(bfloat16="bf16"))
    lhs, rhs, of_lhs, of_rhs = (
        mock.Mock(shape=shape) for shape in ((8, 4), (6, 4), (8, 1), (6, 1))
    )
    sets = [[lhs, rhs, of_lhs, of_rhs]]
    for name in ("all_gather_scaled_matmul", "scaled_matmul_reduce_scatter"):
        torch_calls.SYMMETRIC[name](process, sets)(0)
    (x, (y,), s, (t,)), options = symm_mem.fused_all_gather_scaled_matmul.call_args
    assert (x, y, s, t) == (lhs, rhs.t(), of_lhs, of_rhs.t())
    assert options["out_dtypes"] == ["bf16"] and options["use_fast_accum"] == [True]
    given, options = symm_mem.fused_scaled_matmul_reduce_scatter.call_args
    assert given == (lhs, rhs.t(), of_lhs, of_rhs.t())
    assert options["output_shape"] == [8, 6] and options["use_fast_accum"]
