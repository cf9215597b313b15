"""What a call would take on GPUs that are not here: the choice, its estimate, what was measured."""

from __future__ import annotations

from functools import partial

import pytest
from problems import entry

import stretto as st
from stretto.benchmarks.commands import explain
from stretto.kernels.choice import tables
from stretto.kernels.choice.tables import Table
from stretto.kernels.operations import OPERATIONS

SIZES = dict(m=8192, k=8192, n=28672)


@pytest.fixture
def one_entry(monkeypatch):
    """A table that holds one shape."""
    found = entry(**SIZES, fused_us=800.0, xla_us=1000.0)
    monkeypatch.setattr(tables, "table_for", lambda kind: Table(kind, (found,)))


def test_what_was_measured(one_entry):
    found = st.explain_sizes("all_gather_matmul", **SIZES, devices=4, kind="NVIDIA H200")
    assert found.choice.backend == "pallas"
    assert found.choice.problem.machine.kind == "NVIDIA H200"
    first, estimated, measured = str(found).splitlines()
    assert "all_gather_matmul 8192x8192x28672 bfloat16 on 4 x NVIDIA H200: pallas" in first
    assert "measured to take 80% of XLA's time (fused 800 us, XLA 1000 us)" in first
    assert estimated.startswith("estimated: fused ")
    assert measured == "measured at 8192x8192x28672: fused 800 us, XLA 1000 us"


def test_what_was_not(one_entry):
    found = st.explain_sizes("all_gather_matmul", m=64, k=64, n=64, devices=4, kind="H200")
    assert found.choice.problem.machine.kind == "NVIDIA H200"
    assert "it is estimated to be faster" in found.choice.reason
    assert str(found).endswith("measured: nothing near it")


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("h200", "NVIDIA H200"),
        ("nvidia h200", "NVIDIA H200"),
        ("H100 80GB", "NVIDIA H100 80GB HBM3"),
        ("NVIDIA H20", "NVIDIA H20"),
        ("H20", "H20"),
        ("NVIDIA", "NVIDIA"),
    ],
)
def test_a_kind_is_whole_words_of_the_driver_s_name(one_entry, given, found):
    """A card whose name begins another's has none of its times."""
    choice = st.explain_sizes("all_gather_matmul", **SIZES, devices=4, kind=given).choice
    assert choice.problem.machine.kind == found


def test_other_operations_types_and_machines(one_entry):
    small = st.explain_sizes("all_reduce", m=8, n=8, devices=4, kind="H200")
    assert small.choice.backend == "xla" and small.estimated_us is None
    wide = st.explain_sizes("all_gather_matmul", **SIZES, devices=4, kind="H200", dtype="float32")
    assert "takes bfloat16 and float16, not float32" in wide.choice.reason
    other = st.explain_sizes("all_gather_matmul", **SIZES, devices=4, kind="NVIDIA A100")
    assert "written for Hopper and Blackwell GPUs and these are NVIDIA A100" in other.choice.reason
    assert other.estimated_us is None
    alone = st.explain_sizes("all_gather_matmul", **SIZES, devices=1, kind="H200")
    assert alone.choice.reason == "one device needs no communication"


def test_what_was_measured_of_another_kernel_is_not_said_to_be_the_chosen_one_s():
    found = st.explain_sizes("all_reduce_rms_norm", m=6, n=6144, devices=2, kind="H200")
    assert "through the heap" in found.choice.reason
    assert str(found).endswith("measured at 6x6144: another kernel 18 us, XLA 31 us")


def test_attention_whose_kernel_the_table_has():
    sizes = dict(b=1, t=1024, kv_t=1024, heads=8, kv_heads=1, dim=128, masking=3, passes=1)
    found = st.explain_sizes("context_parallel_attention", devices=2, kind="H200", **sizes)
    assert found.choice.backend == "pallas" and "measured to take" in found.choice.reason
    other = st.explain_sizes("context_parallel_attention", devices=1, kind="H200", **sizes)
    assert other.choice.backend == "xla"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (dict(operation=["matmul"], m=1), r"operation=\['matmul'\] is not one of"),
        (dict(operation="all_reduce", m=1, n=1, dtype=None), "dtype=None is no type that JAX has"),
        (dict(operation="matmul", m=1), "operation='matmul' is not one of all_gather_matmul"),
        (dict(operation="all_reduce", m=1), "all_reduce has the sizes m, n, and m are given"),
        (dict(operation="all_reduce", m=0, n=1), "m=0 must be a whole number above 0"),
        (dict(operation="all_reduce", m=1, n=1, dtype="real"), "dtype='real' is no type"),
        (dict(operation="all_reduce", m=1, n=1, out_dtype="real"), "out_dtype='real' is no type"),
        (dict(operation="all_reduce", m=1, n=1, kind=" "), "kind=' ' must be a GPU's name"),
        (dict(operation="all_reduce", m=1, n=1, kind=None), "kind=None must be a GPU's name"),
        (dict(operation="all_gather_matmul", m=8, k=8, n=7), "n=7 must be a multiple of 4, since"),
    ],
)
def test_bad_input(arguments, said):
    with pytest.raises(ValueError, match=said):
        st.explain_sizes(**dict(devices=4, kind="H200") | arguments)


def test_the_command(one_entry, capsys):
    assert explain.main(["all_gather_matmul", "8192x8192x28672", "-n", "4", "--kind", "H200"]) == 0
    assert "4 x NVIDIA H200: pallas" in capsys.readouterr().out
    for words, said in [
        (
            ["all_gather_matmul", "8192x8192"],
            "sizes '8192x8192' must be 3 numbers joined by x: m, k, n.",
        ),
        (["matmul", "8192x8192"], "operation='matmul' is not one of"),
    ]:
        assert explain.main(words) == 2
        assert said in capsys.readouterr().err


def test_a_missing_table_is_a_sentence_of_the_command(capsys):
    """Not a warning of Python, with a path and a line of the source."""
    tables.table_for.cache_clear()
    assert explain.main(["all_gather_matmul", "8192x8192x8192", "--kind", "H20"]) == 0
    said = capsys.readouterr()
    assert said.err == (
        "stretto explain: no tuned table for H20: XLA serves its calls; `stretto tune` writes"
        " one.\n"
    )
    assert "on 4 x H20: xla, because the estimates are those of H100s and H200s" in said.out


@pytest.mark.filterwarnings("ignore:no tuned table")
@pytest.mark.parametrize("devices", [1, 2, 8])
@pytest.mark.parametrize("name", OPERATIONS)
def test_another_hopper_gpu_without_a_table_has_no_estimates(name, devices):
    """Nothing is known of its rates: its calls are XLA's, also such as by messages on an H200."""
    examples = OPERATIONS[name].examples
    for sizes in (*examples.shapes("tiny", devices), *examples.shapes("goals", devices)):
        found = st.explain_sizes(name, **sizes, devices=devices, kind="NVIDIA H20")
        assert found.choice.backend == "xla" and found.estimated_us is None


def test_its_own_table_decides_of_what_is_near(one_entry, monkeypatch):
    monkeypatch.setattr(tables, "exists", lambda kind: True)
    ask = partial(st.explain_sizes, "all_gather_matmul", devices=4, kind="NVIDIA H20")
    assert ask(**SIZES).choice.backend == "pallas"
    assert ask(m=8192, k=8192, n=2 * 28672).choice.backend == "pallas"
    far = ask(m=65536, k=65536, n=28672).choice
    assert far.backend == "xla" and "no table of NVIDIA H20 says" in far.reason


@pytest.mark.parametrize("devices", [1, 2, 64])
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_is_explained(name, devices):
    """With the package's tables, at a size of its benchmarks and at one that is in no table."""
    shapes = [
        sizes
        for shape_set in OPERATIONS[name].examples.sets
        for sizes in OPERATIONS[name].examples.shapes(shape_set, devices)
    ]
    for sizes in (shapes[0], {size: 3 * value for size, value in shapes[0].items()}):
        text = str(st.explain_sizes(name, **sizes, devices=devices, kind="NVIDIA H200"))
        assert text.startswith(name), text


def test_gpus_without_kernels_are_not_told_to_tune(recwarn):
    found = st.explain_sizes("all_gather_matmul", **SIZES, devices=4, kind="A100")
    assert str(found).endswith("these are A100.\nmeasured: nothing near it")
    assert not recwarn.list
