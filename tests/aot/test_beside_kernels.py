"""What XLA runs beside the kernels of experts, each of which takes longer to launch than to run."""

from __future__ import annotations

import pytest
from aot_checks import compile_case
from expert_programs import beside_kernels
from selection import slow

from stretto.distributed.tools import aot

pytestmark = pytest.mark.skipif(
    not aot.is_available(), reason="needs the compiler: `uv sync --group aot`"
)

SUM = 1  # Over the devices, of few tokens.


@pytest.mark.parametrize(
    ("model", "tokens", "wanted"),
    [
        ("mixtral", 64, dict(dispatch=0, combine=SUM)),
        slow("mixtral", 8192, dict(dispatch=0, combine=0)),
        slow("qwen3-30b", 64, dict(dispatch=0, combine=SUM)),
        slow("deepseek-v3", 64, dict(dispatch=0, combine=1 + SUM)),  # Who has a token's rows.
        slow("qwen3-30b", 8192, dict(dispatch=0, combine=0)),
        slow("deepseek-v3", 8192, dict(dispatch=0, combine=0)),
    ],
)
def test_calls_of_experts(model, tokens, wanted, tmp_path):
    """Neither pads, nor cuts of tables."""
    programs = compile_case(f"calls of experts, {model}, {tokens}", tmp_path)
    found = {x["label"]: beside_kernels(x["hlo"]) for x in programs}
    assert {label: sum(x.values()) for label, x in found.items()} == wanted, found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "tokens", "tables"), [("mixtral", 64, 3), ("qwen3-30b", 64, 5), ("mixtral", 8192, 3)]
)
def test_layers_of_experts(model, tokens, tables, tmp_path):
    """Both products have the same tables, which XLA makes once."""
    (program,) = compile_case(f"layer of experts, {model}, {tokens}", tmp_path)
    found = beside_kernels(program["hlo"])
    assert sum(found.values()) == tables + (SUM if tokens == 64 else 0), found
