"""Every exported operation has a record, tests, a page, a compile case and a benchmark."""

from __future__ import annotations

import dataclasses

import completeness
import pytest

import stretto
from stretto.kernels.operation import Examples
from stretto.kernels.operations import OPERATIONS


@pytest.mark.parametrize("name", OPERATIONS)
def test_nothing_is_lacking(name):
    assert list(completeness.lacking(OPERATIONS[name])) == []


def test_every_exported_operation_has_a_record():
    functions = [getattr(stretto, name) for name in stretto.__all__]
    inside = "stretto.kernels.operations."
    exported = {f for f in functions if getattr(f, "__module__", "").startswith(inside)}
    exported -= {stretto.sharded, stretto.explain_sizes}  # About operations, and none themselves.
    assert exported == {record.public for record in OPERATIONS.values()}


def halo_exchange():
    """An operation that somebody has only begun with."""


def test_what_lacks_is_told():
    begun = dataclasses.replace(
        OPERATIONS["all_gather"],
        name="halo_exchange",
        public=halo_exchange,
        examples=Examples(shapes=lambda name, devices: [], operands=lambda sizes, devices: ()),
    )
    found = [text.split(":")[0] for text in completeness.lacking(begun)]
    assert found == ["public name", "test", "page", "compile case", "benchmark"]


@pytest.mark.parametrize(
    ("changes", "lacking"),
    [
        (dict(public=halo_exchange), ["public name", "page"]),
        (dict(name="halo_exchange"), ["test", "compile case"]),
        (dict(examples=dataclasses.replace(OPERATIONS["all_gather"].examples, sets=())),
         ["benchmark"]),
    ],
)  # fmt: skip
def test_one_thing_at_a_time(changes, lacking):
    begun = dataclasses.replace(OPERATIONS["all_gather"], **changes)
    assert [text.split(":")[0] for text in completeness.lacking(begun)] == lacking
