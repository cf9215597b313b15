"""What PyTorch's peers call, in the processes of `torch_worker.py`.

Each function takes the process (`torch_worker.Rank`) and sets of operands, and returns what calls
the operation on set `i`. This imports the standard library only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Call = Callable[[int], Any]
Sets = list[list[Any]]
ONE_SHOT_BYTES = 256 * 1024
"""Up to this size PyTorch's all-reduce takes one step, in which every device adds everything."""


class Unsupported(Exception):
    """The peer has no such operation."""


# --- NCCL's collective and cuBLAS' matmul, one after the other ------------------------------------


def _all_gather_matmul(this: Any, sets: Sets) -> Call:
    lhs, rhs = sets[0]
    gathered = this.empty(lhs.dtype, lhs.shape[0] * this.world, lhs.shape[1])
    out = this.empty(lhs.dtype, gathered.shape[0], rhs.shape[1])

    def call(i: int) -> None:
        this.dist.all_gather_into_tensor(gathered, sets[i][0])
        this.torch.mm(gathered, sets[i][1], out=out)

    return call


def _matmul_reduce_scatter(this: Any, sets: Sets) -> Call:
    lhs, rhs = sets[0]
    partial = this.empty(lhs.dtype, lhs.shape[0], rhs.shape[1])
    out = this.empty(lhs.dtype, partial.shape[0] // this.world, partial.shape[1])

    def call(i: int) -> None:
        this.torch.mm(*sets[i], out=partial)
        this.dist.reduce_scatter_tensor(out, partial)

    return call


def _matmul_all_reduce(this: Any, sets: Sets) -> Call:
    lhs, rhs = sets[0]
    partial = this.empty(lhs.dtype, lhs.shape[0], rhs.shape[1])

    def call(i: int) -> None:
        this.torch.mm(*sets[i], out=partial)
        this.dist.all_reduce(partial)

    return call


def _all_gather(this: Any, sets: Sets) -> Call:
    x = sets[0][0]
    out = this.empty(x.dtype, x.shape[0] * this.world, x.shape[1])
    return lambda i: this.dist.all_gather_into_tensor(out, sets[i][0])


def _reduce_scatter(this: Any, sets: Sets) -> Call:
    x = sets[0][0]
    out = this.empty(x.dtype, x.shape[0] // this.world, x.shape[1])
    return lambda i: this.dist.reduce_scatter_tensor(out, sets[i][0])


def _all_reduce(this: Any, sets: Sets) -> Call:
    # In place, as PyTorch has it; the sums overflow in time, which changes no time.
    return lambda i: this.dist.all_reduce(sets[i][0])


def _all_to_all(this: Any, sets: Sets) -> Call:
    out = this.empty(sets[0][0].dtype, *sets[0][0].shape)
    return lambda i: this.dist.all_to_all_single(out, sets[i][0])


# --- Operands in 8 bits with scales: lhs, transposed rhs, their scales ----------------------------


def _scaled_product(this: Any, operands: list[Any], out: Any) -> Any:
    """By cuBLAS or CUTLASS with fast accumulation, in bfloat16; scales of rows or of a tensor."""
    lhs, rhs, lhs_scale, rhs_scale = operands
    return this.torch._scaled_mm(
        lhs,
        rhs.t(),
        scale_a=lhs_scale,
        scale_b=rhs_scale.t(),
        out_dtype=out.dtype,
        use_fast_accum=True,
        out=out,
    )


def _all_gather_scaled_matmul(this: Any, sets: Sets) -> Call:
    lhs, rhs, lhs_scale, _ = sets[0]
    rows = lhs.shape[0] * this.world
    gathered = this.empty(lhs.dtype, rows, lhs.shape[1])
    scales = this.empty(lhs_scale.dtype, rows, 1)
    out = this.empty(this.torch.bfloat16, rows, rhs.shape[0])
    as_bytes = gathered.view(this.torch.uint8)  # NCCL need not know the type.

    def call(i: int) -> None:
        lhs, rhs, lhs_scale, rhs_scale = sets[i]
        this.dist.all_gather_into_tensor(as_bytes, lhs.view(this.torch.uint8))
        if lhs_scale.numel() > 1:
            this.dist.all_gather_into_tensor(scales, lhs_scale)
            lhs_scale = scales
        _scaled_product(this, [gathered, rhs, lhs_scale, rhs_scale], out)

    return call


def _scaled_matmul_reduce_scatter(this: Any, sets: Sets) -> Call:
    lhs, rhs, *_ = sets[0]
    partial = this.empty(this.torch.bfloat16, lhs.shape[0], rhs.shape[0])
    out = this.empty(partial.dtype, partial.shape[0] // this.world, partial.shape[1])

    def call(i: int) -> None:
        _scaled_product(this, sets[i], partial)
        this.dist.reduce_scatter_tensor(out, partial)

    return call


def _scaled_matmul_all_reduce(this: Any, sets: Sets) -> Call:
    lhs, rhs, *_ = sets[0]
    partial = this.empty(this.torch.bfloat16, lhs.shape[0], rhs.shape[0])

    def call(i: int) -> None:
        _scaled_product(this, sets[i], partial)
        this.dist.all_reduce(partial)

    return call


UNFUSED: dict[str, Callable[[Any, Sets], Call]] = {
    "all_gather_matmul": _all_gather_matmul,
    "matmul_reduce_scatter": _matmul_reduce_scatter,
    "matmul_all_reduce": _matmul_all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "all_gather_scaled_matmul": _all_gather_scaled_matmul,
    "scaled_matmul_reduce_scatter": _scaled_matmul_reduce_scatter,
    "scaled_matmul_all_reduce": _scaled_matmul_all_reduce,
}


# --- PyTorch's kernels over symmetric memory ------------------------------------------------------


def _symmetric_all_gather_matmul(this: Any, sets: Sets) -> Call:
    # Without the gathered operand PyTorch would multicast where it thinks it can.
    return lambda i: this.symm_mem.fused_all_gather_matmul(
        sets[i][0], [sets[i][1]], 0, this.group, return_A=True
    )


def _symmetric_matmul_reduce_scatter(this: Any, sets: Sets) -> Call:
    return lambda i: this.symm_mem.fused_matmul_reduce_scatter(*sets[i], "sum", 0, this.group)


def _symmetric_all_gather_scaled_matmul(this: Any, sets: Sets) -> Call:
    def call(i: int) -> Any:
        lhs, rhs, lhs_scale, rhs_scale = sets[i]
        return this.symm_mem.fused_all_gather_scaled_matmul(
            lhs,
            [rhs.t()],
            lhs_scale,
            [rhs_scale.t()],
            gather_dim=0,
            group_name=this.group,
            biases=[None],
            result_scales=[None],
            out_dtypes=[this.torch.bfloat16],
            use_fast_accum=[True],
        )

    return call


def _symmetric_scaled_matmul_reduce_scatter(this: Any, sets: Sets) -> Call:
    def call(i: int) -> Any:
        lhs, rhs, lhs_scale, rhs_scale = sets[i]
        return this.symm_mem.fused_scaled_matmul_reduce_scatter(
            lhs,
            rhs.t(),
            lhs_scale,
            rhs_scale.t(),
            reduce_op="sum",
            orig_scatter_dim=0,
            scatter_dim_after_maybe_reshape=0,
            group_name=this.group,
            output_shape=[lhs.shape[0], rhs.shape[0]],
            out_dtype=this.torch.bfloat16,
            use_fast_accum=True,
        )

    return call


def _symmetric_all_gather(this: Any, sets: Sets) -> Call:
    return lambda i: this.wait(this.symm_mem._low_contention_all_gather(sets[i][0], this.group))


def _symmetric_reduce_scatter(this: Any, sets: Sets) -> Call:
    return lambda i: this.wait(
        this.symm_mem._low_contention_reduce_scatter(sets[i][0], "sum", this.group)
    )


def _symmetric_all_reduce(this: Any, sets: Sets) -> Call:
    if sets[0][0].numel() * sets[0][0].element_size() <= ONE_SHOT_BYTES:
        return lambda i: this.symm_mem.one_shot_all_reduce(sets[i][0], "sum", this.group)
    return lambda i: this.symm_mem.two_shot_all_reduce_(sets[i][0], "sum", this.group)


SYMMETRIC: dict[str, Callable[[Any, Sets], Call]] = {
    "all_gather_matmul": _symmetric_all_gather_matmul,
    "matmul_reduce_scatter": _symmetric_matmul_reduce_scatter,
    "all_gather": _symmetric_all_gather,
    "reduce_scatter": _symmetric_reduce_scatter,
    "all_reduce": _symmetric_all_reduce,
    "all_gather_scaled_matmul": _symmetric_all_gather_scaled_matmul,
    "scaled_matmul_reduce_scatter": _symmetric_scaled_matmul_reduce_scatter,
}
