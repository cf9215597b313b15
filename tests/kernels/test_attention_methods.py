"""By tokens or by heads: what is chosen, why, and what is refused."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from attention_cases import stand_in
from fused_cases import mesh_of
from jax.sharding import PartitionSpec as P

import stretto as st
from stretto.benchmarks.cases.case import Case
from stretto.distributed import compiling
from stretto.distributed.private_jax import cuda_version
from stretto.distributed.tools import aot
from stretto.kernels.attention import cudnn
from stretto.kernels.attention.masks import Mask
from stretto.kernels.choice import tables
from stretto.kernels.fused import attention_config
from stretto.kernels.operations import OPERATIONS, attention_heads, attention_methods
from stretto.kernels.operations.attention_options import Config

TOKENS = 8192  # of a device


def explained(devices, heads, kv_heads, mesh=None, **options: Any):
    """The reason of a call of bfloat16, head size 128."""
    found = []
    q, k = (
        jax.ShapeDtypeStruct((1, devices * TOKENS, count, 128), "bfloat16")
        for count in (heads, kv_heads)
    )

    def body(q, k, v):
        call = st.context_parallel_attention
        found.append(st.explain(call, q, k, v, "x", **options))
        return q

    spec = P(None, "x")
    mesh = mesh or mesh_of(devices)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)
    jax.eval_shape(mapped, q, k, k)
    return found[0]


@pytest.mark.parametrize(
    ("devices", "heads", "kv_heads", "options", "method", "reason"),
    [
        (2, 64, 8, dict(causal=True, layout="zigzag"), "gather", "estimated to be faster"),
        (2, 64, 8, dict(causal=True), "heads", "estimated to be faster"),  # half of it waits
        (8, 32, 32, dict(), "heads", "estimated to be faster"),  # sends a quarter
        (4, 6, 2, dict(causal=True), "gather", "heads=6 of q must be a multiple of the 4"),
        (1, 6, 2, dict(), "gather", "one device has all"),
        (2, 64, 8, dict(method="heads"), "heads", "it was asked for"),
    ],
)
def test_auto_says_why(devices, heads, kv_heads, options, method, reason):
    found = explained(devices, heads, kv_heads, **options)
    assert found.backend == "xla"
    assert f"method {method!r}, because" in found.reason and reason in found.reason
    assert "attention by jax.lax: the devices are cpu" in found.reason


def test_what_only_heads_can_have_of_cudnn_is_by_heads(monkeypatch):
    """A window over several devices."""

    def obstacle(q, mask, *, segments, devices):
        return "it has no such mask." if mask.window and devices > 1 else None

    stand_in(monkeypatch)
    monkeypatch.setattr(cudnn, "obstacle", obstacle)
    options = dict(causal=True, layout="zigzag", window=100)
    found = explained(2, 64, 8, **options)
    assert "method 'heads', because by tokens it has no such mask" in found.reason
    assert found.reason.endswith("attention by cuDNN")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(method="ring"), "method='ring' is not one of 'auto', 'gather', 'heads'"),
        (dict(method="heads"), "heads=6 of q must be a multiple of the 4 devices. Pass method="),
        (dict(method="heads", config=Config()), "is for method='gather'; pass one of the two"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        explained(4, 6, 2, **options)


def test_heads_that_fit_no_copies_are_refused():
    assert attention_heads.copies(8, 16) == 2 and attention_heads.copies(8, 4) == 1
    assert attention_heads.obstacle(64, 8, 16) is None
    assert "kv_heads=6 on 4 devices are sent as 12" in str(attention_heads.obstacle(40, 6, 4))


def test_nobody_has_timed_the_ways_to_gather():
    """So `auto` leaves it to XLA on GPUs, too, and a simulation takes the default."""
    found = explained(2, 64, 8, backend="simulator")
    assert found.backend == "simulator" and found.config == Config(by_peer=True)


BY_PEER = dict(by_peer=True)
KERNEL = attention_config.Config(pull_rows=16, pull_slots=6)
PULLED = dict(pull_rows=16, pull_slots=6)


@pytest.mark.parametrize(
    ("options", "config", "fused_us", "served"),
    [
        ({}, PULLED, 90.0, KERNEL),
        ({}, PULLED, 110.0, None),  # XLA is faster.
        ({}, BY_PEER, 90.0, Config()),  # Another way is fastest.
        (dict(scale=-1.0), PULLED, 90.0, None),  # It cannot serve the call.
        (dict(config=Config()), PULLED, 90.0, Config()),
        (dict(method="gather"), PULLED, 90.0, None),
        (dict(causal=False), PULLED, 90.0, None),  # Another mask was measured.
    ],
)
def test_the_kernel_serves_where_a_table_has_it_as_the_fastest(
    monkeypatch, options, config, fused_us, served
):
    sizes = dict(b=1, t=16384, kv_t=16384, heads=64, kv_heads=8, dim=128, masking=2, passes=1)
    entry = tables.Entry(
        op="context_parallel_attention",
        sizes=sizes,
        dtype="bfloat16",
        devices=2,
        fused_us=fused_us,
        xla_us=100.0,
        config=config,
    )
    monkeypatch.setattr(cuda_version, "running", lambda: None)
    monkeypatch.setattr(tables, "table_for", lambda kind: tables.Table(kind, (entry,)))
    monkeypatch.setattr(compiling, "current", lambda: None)  # It would ask for kernels.
    gpus = aot.mesh_of_gpus((2,), ("x",))
    options = dict(causal=True, layout="zigzag") | options
    found = explained(2, 64, 8, mesh=gpus, **options)
    assert found.backend == ("xla" if served is None else "pallas"), found.reason
    assert found.config == served or served is None
    by_table = isinstance(served, attention_config.Config)
    assert ("method 'fused', because the tuned table has it" in found.reason) == by_table
    assert not by_table or "was measured to take 90% of XLA's time" in found.reason


@pytest.mark.parametrize(
    ("version", "refused"), [(12080, "12.8"), (12090, "12.9"), (12091, None), (13000, None)]
)
def test_an_assembler_that_miscompiles_is_refused(monkeypatch, version, refused):
    monkeypatch.setattr(cuda_version, "running", lambda: version)
    found = explained(2, 64, 8, causal=True, method="fused")
    wanted = f"CUDA {refused} miscompiles" if refused else "the devices are cpu"
    assert found.backend == "xla" and wanted in found.reason


def test_estimates_count_the_last_device_and_what_is_sent():
    q, k = (jax.ShapeDtypeStruct((1, 8192, n, 128), "bfloat16") for n in (64, 8))

    def question(layout, devices):
        mask = Mask(causal=True)
        return attention_methods.Question(
            q=q, k=k, mask=mask, layout=layout, segments=(), devices=devices
        )

    zigzag = attention_methods.gather_us(question("zigzag", 4))
    contiguous = attention_methods.gather_us(question("contiguous", 4))
    assert contiguous / zigzag == pytest.approx(7 / 4, rel=0.02)
    assert attention_methods.heads_us(question("zigzag", 4)) > zigzag


def test_work_of_a_case():
    record = OPERATIONS["context_parallel_attention"]
    sizes = dict(b=1, t=64, kv_t=64, heads=4, kv_heads=2, dim=8, masking=1, passes=1)
    forward, causal, both = (
        Case(operation=record, sizes={**sizes, **more}, dtype="bfloat16", devices=2).work
        for more in ({}, dict(masking=2), dict(passes=2))
    )
    assert forward.flops == 4 * 64 * 64 * 4 * 8 // 2 == 2 * causal.flops
    assert both.flops == 3.5 * forward.flops
    # Keys and values of the other device, of 2 heads of 8 numbers of 2 bytes.
    assert forward.sent_bytes == 2 * 32 * 2 * 8 * 2 and both.sent_bytes == 3 * forward.sent_bytes
