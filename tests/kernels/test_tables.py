"""Tuned tables: reading, damage, the nearest shape, and what is chosen from them."""

from __future__ import annotations

import dataclasses
import math

import pytest
from leave_one_out import left_out
from problems import H100, entry, problem

from stretto.kernels.choice import by_table, config_data, neighbours, speed, tables
from stretto.kernels.choice.tables import Table, TableError
from stretto.kernels.operations import KNOWN, OPERATIONS

KIND = H100
MATMULS = OPERATIONS["all_gather_matmul"]

TABLE = """
schema = 1
device_kind = "NVIDIA H100 80GB HBM3"

[[entry]]
op = "all_gather_matmul"
m = 8192
k = 8192
n = 8192
dtype = "bfloat16"
devices = 4
fused_us = 420.0
xla_us = 716.0
config = { pull_slots = 3, tiles = { tile_n = 128 } }

[[entry]]
op = "all_gather_matmul"
m = 512
k = 8192
n = 8192
dtype = "bfloat16"
devices = 4
fused_us = 80.0
xla_us = 60.0
config = {}
"""


@dataclasses.dataclass(frozen=True)
class Tiles:
    tile_n: int = 256


@dataclasses.dataclass(frozen=True)
class Config:
    tiles: Tiles = Tiles()
    pull_slots: int = 2

    def check(self, problem):
        if self.pull_slots * problem.types.itemsize > 6:
            raise ValueError("too many slots")


def kernel(config_type):
    return dataclasses.replace(
        MATMULS.kernels[0], Config=config_type, fitted=lambda config, problem: config
    )


KERNEL = kernel(Config)


@pytest.fixture
def tuned(tmp_path, monkeypatch):
    """The folder of tables, holding `TABLE`; nothing is remembered between tests."""
    (tmp_path / tables.file_name(KIND)).write_text(TABLE)
    monkeypatch.setattr(tables, "folder", lambda: tmp_path)
    tables.table_for.cache_clear()
    yield tmp_path
    tables.table_for.cache_clear()


def test_sizes_have_any_names(tuned):
    """Those of experts have words; a field that is no size, as a word that is misspelt, is not."""
    path = tuned / tables.file_name(KIND)
    path.write_text(TABLE.replace("m = 512\n", "m = 512\ntop_k = 8\n"))
    assert tables.read(path).entries[1].sizes["top_k"] == 8
    path.write_text(TABLE.replace("fused_us = 80.0", "fusd_us = 80.0"))
    with pytest.raises(TableError, match="unknown field 'fusd_us'; a size is a whole number"):
        tables.read(path)


def test_the_file_of_a_gpu():
    assert tables.file_name(KIND) == "nvidia-h100-80gb-hbm3.toml"


def test_an_exact_entry_gives_its_times_and_config(tuned):
    found = by_table.look_up(KERNEL, problem())
    assert found is not None
    assert found.backend == "pallas"
    assert found.config == Config(Tiles(tile_n=128), pull_slots=3)
    assert (found.fused_us, found.xla_us) == (420.0, 716.0)


def test_xla_where_it_was_faster(tuned):
    found = by_table.look_up(KERNEL, problem(m=512))
    assert found is not None
    assert found.backend == "xla"


def test_a_near_shape_lends_its_config_but_not_its_times(tuned):
    found = by_table.look_up(KERNEL, problem(n=12288))
    assert found is not None
    assert found.backend == "pallas"
    assert found.config.pull_slots == 3
    assert found.fused_us is None
    assert "8192x8192x8192" in found.reason


@pytest.mark.parametrize(
    "other",
    [
        dict(m=65536 * 2),
        dict(k=512),
        dict(m=16384, k=16384, n=32768),
        dict(dtype="float16"),
        dict(out_dtype="float32"),
        dict(devices=2),
        dict(operation="matmul_reduce_scatter"),
    ],
)
def test_a_far_shape_or_another_problem_is_not_decided(tuned, other):
    assert by_table.look_up(KERNEL, problem(**other)) is None


def test_an_entry_whose_config_does_not_fit_the_problem_is_not_used(tuned):
    assert by_table.look_up(KERNEL, problem(dtype="float32", out_dtype="float32")) is None


def test_an_entry_with_fields_that_the_kernel_lost_is_not_used(tuned):
    @dataclasses.dataclass(frozen=True)
    class Without:
        tiles: Tiles = Tiles()

    assert by_table.look_up(kernel(Without), problem()) is None


def has(monkeypatch, *entries):
    monkeypatch.setattr(tables, "table_for", lambda kind: Table(kind, entries))


def test_a_tie_at_another_shape_goes_to_xla(monkeypatch):
    has(monkeypatch, entry(fused_us=99.0, xla_us=100.0))
    assert by_table.look_up(KERNEL, problem()).backend == "pallas"
    assert by_table.look_up(KERNEL, problem(n=8200)).backend == "xla"


def test_a_single_entry_of_an_untried_kernel_decides_no_far_shape(monkeypatch):
    untried = dataclasses.replace(KERNEL, untried=True)
    has(monkeypatch, entry(fused_us=50.0, xla_us=100.0))
    assert by_table.look_up(untried, problem(m=4096)).backend == "pallas"
    assert by_table.look_up(untried, problem(m=2048)) is None
    assert by_table.look_up(KERNEL, problem(m=2048)).backend == "pallas"
    has(monkeypatch, *(entry(m=m, fused_us=50.0, xla_us=100.0) for m in (8192, 16384)))
    assert by_table.look_up(untried, problem(m=2048)).backend == "pallas"


def test_a_shape_between_two_is_decided_by_both(monkeypatch):
    """By the nearest alone it would be the other way round."""
    near, far = entry(fused_us=98.0), entry(m=2048, fused_us=400.0)
    has(monkeypatch, dataclasses.replace(near, xla_us=100.0), far)
    found = by_table.look_up(KERNEL, problem(m=4160))
    assert found.backend == "pallas" and "8192x8192x8192, 2048x8192x8192" in found.reason
    has(monkeypatch, dataclasses.replace(near, xla_us=100.0))
    assert by_table.look_up(KERNEL, problem(m=4160)).backend == "xla"


def test_the_estimate_is_corrected_by_what_it_was_off(monkeypatch):
    """It has the kernel win by more the more rows; measured, it is a fifth slower than that."""

    def estimate(one):
        return 1.0, one.sizes["m"] / 4096

    has(monkeypatch, entry(fused_us=0.6, xla_us=1.0))
    for rows, expected in ((8192, 0.6), (4096, 1.2), (2048, 2.4), (16384, 0.3)):
        found = by_table.look_up(KERNEL, problem(m=rows), estimate)
        assert found.backend == ("pallas" if expected < 1 else "xla")
        assert f"{100 * expected:.0f}%" in found.reason


def test_only_a_near_shape_lends_its_config(monkeypatch):
    lent = {"pull_slots": 3}
    has(monkeypatch, entry(fused_us=1.0, xla_us=2.0, config=lent))
    assert by_table.look_up(KERNEL, problem(m=4096)).config.pull_slots == 3
    far = problem(m=2048)
    assert by_table.look_up(KERNEL, far).config == KERNEL.default(far)


def test_the_nearest_entry_is_within_a_doubling():
    table = Table(KIND, (entry(), entry(m=65536)))
    assert table.nearest(problem(m=4096)) == (table.entries[0], 1.0)
    assert table.nearest(problem(m=2048)) is None
    assert [distance for distance, _ in table.near(problem(m=2048))] == [2.0]
    assert table.near(problem(m=512)) == []


def test_weights_fall_with_the_distance():
    assert neighbours.weighted([(0.0, 5.0), (1.0, 9.0)]) == 5.0
    assert neighbours.weighted([(1.0, 0.0), (1.0, 1.0)]) == 0.5
    assert neighbours.weighted([(1.0, 0.0), (2.0, 1.0)]) == pytest.approx(1 / 9)
    many = [(1.0, 1.0)] * neighbours.COUNT + [(1.0, 100.0)]
    assert neighbours.weighted(many) == pytest.approx(1.0)


@pytest.mark.parametrize("file", sorted(tables.folder().glob("*.toml")), ids=lambda f: f.stem)
def test_left_out_entries_are_told_better_by_several_than_by_the_nearest(file):
    """The ratio of each entry from the others: its error, and what wrong choices cost."""
    several, nearest = left_out(tables.read(file))
    assert len(several.errors) == len(nearest.errors) > 10
    assert several.mean_error <= nearest.mean_error
    assert several.root_mean_square <= nearest.root_mean_square
    assert several.regret <= nearest.regret


def test_distance_counts_doublings():
    measured = entry(fused_us=1.0, xla_us=1.0)
    assert measured.distance(problem(m=4096, n=16384)) == 2
    assert measured.distance(problem(devices=2)) == math.inf


def test_a_missing_table_warns_once_and_decides_nothing(tuned):
    other = problem(kind="NVIDIA H200")
    with pytest.warns(UserWarning, match=r"no tuned table for NVIDIA H200.*stretto tune"):
        assert by_table.look_up(KERNEL, other) is None
    assert by_table.look_up(KERNEL, other) is None  # no second warning: those are errors


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("schema = ", "damaged, not TOML"),
        ("schema = 2", "schema 2, this version reads 1"),
        ("schema = 1", "KeyError: 'device_kind'"),
        (TABLE.replace("m = 512", 'm = "512"'), "m='512' is not an integer"),
        (TABLE.replace("xla_us = 60.0", "xla_us = 0.0"), "must be positive"),
        (TABLE.replace("xla_us = 60.0", "xla = 60.0"), "unknown field 'xla'"),
        (TABLE.replace("config = {}", "config = 1"), "config=1 is not a table"),
    ],
)
def test_a_damaged_table_says_what_is_wrong(tuned, text, message):
    path = tuned / tables.file_name(KIND)
    path.write_text(text)
    with pytest.raises(TableError, match=message):
        tables.read(path)
    with pytest.warns(UserWarning, match=r"no tuned table for .*: estimates"):
        assert by_table.look_up(KERNEL, problem()) is None


def test_a_config_survives_the_table():
    config = Config(Tiles(tile_n=64), pull_slots=1)
    assert config_data.from_data(Config, config_data.to_data(config)) == config


def test_tables_of_earlier_versions_are_read() -> None:
    """Two fields had other names; a table that somebody has measured stays of use."""
    Config = OPERATIONS["all_gather_matmul"].kernels[0].Config
    config = Config(gather_first=True, unfused=True)
    data = config_data.to_data(config)
    data |= {"whole": data.pop("gather_first"), "apart": data.pop("unfused")}
    assert config_data.from_data(Config, data) == config


@pytest.mark.parametrize("file", sorted(tables.folder().glob("*.toml")), ids=lambda f: f.stem)
def test_entries_of_the_shipped_tables_name_every_field(file):
    """Of one of the kernels, so that an entry stays what was measured when a default changes."""
    for found in tables.read(file).entries:
        kinds = [
            kernel.Config
            for kernel in KNOWN[found.op].kernels
            if found.config.keys() == {field.name for field in dataclasses.fields(kernel.Config)}
        ]
        assert kinds, found
        config = config_data.from_data(kinds[0], found.config)
        assert config_data.to_data(config) == found.config, found


def test_the_pass_of_an_epilogue_after_the_kernel_counts():
    asked = problem()

    def chosen(applied):
        given = dataclasses.replace(asked, applied=applied)
        return speed.faster(MATMULS, MATMULS.kernels[0], given)

    without, little, much = (chosen(applied) for applied in (0, 2**20, 2**34))
    assert (without.backend, little.backend, much.backend) == ("pallas", "pallas", "xla")
    assert without.fused_us < little.fused_us < little.xla_us < much.fused_us
    assert "but for the epilogue after it" in much.reason
