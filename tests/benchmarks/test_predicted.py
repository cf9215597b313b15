"""The model of time: held to every committed time, and honest about what it has not seen."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest

from stretto.benchmarks.cases.case import Case
from stretto.benchmarks.commands import bench as command
from stretto.benchmarks.commands import predicted as command_of_pages
from stretto.benchmarks.errors import BenchmarkError, UnavailableError
from stretto.benchmarks.pages import predicted as pages
from stretto.benchmarks.predict import fitting, model, network, noted, pipelines, samples
from stretto.benchmarks.predict.calls import call_time
from stretto.benchmarks.scaling import checked
from stretto.benchmarks.targets import machine_file
from stretto.kernels.operations import OPERATIONS

DOCS = Path(__file__).parents[2] / "docs"
H200 = machine_file.read("hgx-h200")
GATHER = dict(m=8192, k=8192, n=28672)


def timed(name, devices, sizes, how="auto", target=H200, **fields):
    case = Case(operation=OPERATIONS[name], sizes=sizes, dtype="bfloat16", devices=devices)
    return call_time(model.model(), dataclasses.replace(case, **fields), target, how)


def everything():
    """The rows of calls within a node and over nodes."""
    return [*checked.calls(), *checked.over_nodes()]


def is_matmul(row):
    return row.group.startswith("matmuls")


class TestChecked:
    """A new kernel, with its results, has to keep these true."""

    def test_matmuls(self):
        rows = [row for row in everything() if is_matmul(row)]
        assert len(rows) > 400
        for one in [checked.summary("all", rows), *checked.summaries(rows)]:
            assert one.median <= 0.10, one

    def test_collectives(self):
        rows = [row for row in everything() if not is_matmul(row)]
        for one in checked.summaries(rows):
            assert one.median <= 0.10, one

    def test_steps(self):
        found = checked.summary("steps", checked.steps())
        assert found.times >= 50 and found.median <= 0.15 and found.inside >= 0.95, found

    def test_intervals_hold_what_was_measured(self):
        assert checked.summary("all", everything()).inside >= 0.95
        assert checked.summary("nodes", checked.over_nodes(settled=True)).inside >= 0.95

    def test_all_committed_results_are_there(self):
        """On 1, 2 and 4 devices of both cards; a new file's cards need a machine file."""
        rows = checked.calls()
        assert {row.devices for row in rows} == {1, 2, 4}
        assert len({row.where for row in rows}) == 4
        assert len(rows) + len(checked.older_calls()) > 950
        nodes = checked.over_nodes()
        assert len(nodes) >= 30 and {row.devices for row in nodes} == {2}
        assert {row.group for row in nodes} >= set(checked.NODES.values())

    def test_noted_steps_name_a_commit(self):
        for source in noted.times().sources.values():
            assert len(source.commit) >= 7 and source.by


class TestLeftOut:
    def test_a_case_is_predicted_without_its_own_times(self):
        """Three times slower, it is predicted as before; its own fit would have moved."""
        rows = list(samples.all_samples())
        case = "all_gather_matmul 16384x16384x16384 bfloat16"
        others = [row for row in rows if row.case != case]
        assert 0 < len(rows) - len(others) < 20
        (one,) = [
            one
            for one in model.model().left_out
            if one.sample.case == case
            and (one.sample.way, one.sample.devices) == ("fused", 4)
            and "H200, one process" in one.sample.machine
            and "per" not in one.sample.machine
        ]
        fit = model.fitted_to(others, near=model.model().fit)
        again = model.Model(fit, ()).us_of("fused", one.sample.features)
        assert again == pytest.approx(one.us, rel=1e-6)

    def test_the_interval_of_a_case_does_not_rest_on_it(self):
        found = model.model()
        worst = max(found.left_out, key=lambda one: abs(one.error))
        without = found.error_of(worst.kind, worst.sample.case)
        assert without < abs(worst.error)

    def test_quantile_counts_one_more_error_than_was_seen(self):
        errors = np.asarray([0.1, -0.2, 0.3, -0.4])
        assert fitting.quantile(errors, 0.5) == pytest.approx(0.3)
        assert fitting.quantile(errors, 0.95) == pytest.approx(0.4)

    def test_a_fit_finds_its_parameters_beside_an_outlier(self):
        x = np.linspace(1.0, 50.0, 40)
        us = 3.0 + 2.0 * x
        us[7] *= 5
        found = fitting.fit(lambda p, t: p[0] + p[1] * t["x"], (1.0, 1.0), {"x": x}, us)
        assert found == pytest.approx([3.0, 2.0], rel=0.03)


class TestBeyond:
    def test_nothing_of_what_was_measured(self):
        assert timed("all_gather_matmul", 4, GATHER).time.beyond == ()

    @pytest.mark.parametrize(
        ("devices", "sizes", "fields", "said"),
        [
            (8, GATHER, {}, "more than 4 devices"),
            (4, dict(m=65536, k=65536, n=65536), {}, "products of another size"),
            (4, GATHER, {"dtype": "float32"}, "elements that are not of 16 bits"),
            (16, GATHER, {}, "transfers between nodes"),
        ],
    )
    def test_what_it_leaves_is_said(self, devices, sizes, fields, said):
        assert said in timed("all_gather_matmul", devices, sizes, "fused", **fields).time.beyond

    def test_another_card(self):
        blackwell = machine_file.read("gb200-nvl72")
        found = timed("all_gather_matmul", 4, GATHER, target=blackwell)
        assert {"another type of card", "other links"} <= set(found.time.beyond)
        assert found.way == "xla"  # no kernel for it

    def test_published_networks_have_bounds_and_measured_ones_their_own(self):
        published = network.crossing(50e6, 1.0, H200)
        assert published.low == pytest.approx(1014) and published.high == pytest.approx(2028)
        assert published.low < published.us < published.high


class TestPipelines:
    def test_gathers_in_the_order_of_the_code(self):
        """Own 5 beside 3; 2 beside 4; then the last kernel alone."""
        assert pipelines.gathers(5, [2, 2], [3, 4]) == 5 + 4 + 2

    def test_scatters(self):
        """Made at 2 and 4, moved at 5 and 8; the own rows at 6."""
        assert pipelines.scatters(2, [2, 2], [3, 3]) == 8
        assert pipelines.scatters(9, [2, 2], [3, 3]) == 13

    def test_reduces(self):
        assert pipelines.reduces([2, 2], [3, 3], [1, 1]) == 9
        assert pipelines.reduces([5], [1], [2]) == 8

    @pytest.mark.parametrize(
        "name", [name for name, one in OPERATIONS.items() if one.between_nodes is not None]
    )
    def test_every_hierarchical_operation_has_one(self, name):
        sizes = {"m": 16384, "k": 8192, "n": 8192}
        sizes = {size: sizes[size] for size in OPERATIONS[name].sizes}
        found = timed(name, 16, sizes, "fused")
        assert found.way == "hierarchical"
        assert found.time.low <= found.time.us <= found.time.high
        inside = timed(name, 8, sizes, "fused")
        assert found.time.us > inside.time.us / 2

    def test_no_network_no_time(self):
        alone = msgspec.structs.replace(H200, between=None)
        with pytest.raises(BenchmarkError, match=r"has one node of 8 GPUs; add \[between\]"):
            timed("all_reduce", 16, dict(m=8192, n=8192), target=alone)

    def test_sizes_that_cannot_be_cut(self):
        with pytest.raises(UnavailableError, match="not a multiple of 3"):
            timed("all_gather_matmul", 3, dict(m=8192, k=64, n=64))


def test_predictions_add_up():
    one = model.Predicted(us=1, low=0.5, high=3, beyond=("a",))
    other = model.Predicted(us=2, low=1, high=4, beyond=("a", "b"))
    assert one + other == model.Predicted(us=3, low=1.5, high=7, beyond=("a", "b"))
    assert one.times(2).high == 6 and math.isclose(one.within(2).low, 0.25)


class TestPages:
    """The pages are made by `stretto bench predicted`; their last digits may differ elsewhere."""

    def test_predicted_beside_measured(self):
        names = command_of_pages._names()
        assert_alike((DOCS / "results" / "predicted.md").read_text(), pages.page(names))

    def test_summary_and_parameters(self):
        text = (DOCS / "measure" / "planning.md").read_text()
        assert_alike(part_of(text, "checked"), pages.summary_table())
        assert_alike(part_of(text, "fitted"), pages.fitted_table())

    @pytest.mark.slow
    def test_planned_steps(self):
        text = (DOCS / "measure" / "planning.md").read_text()
        assert_alike(part_of(text, "planned"), pages.planned_table())

    def test_a_stale_page_is_told_and_written_again(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(pages, "planned_table", lambda: "planned\n")
        path = tmp_path / "scaling.md"
        marks = [f"<!-- {name} -->\n<!-- /{name} -->" for name in ("planned", "checked", "fitted")]
        path.write_text("\n".join(marks))
        options = ["predicted", "--scaling", str(path)]
        assert command.main([*options, "--check"]) == 1
        assert "is not what the model says" in capsys.readouterr().err
        assert command.main(options) == 0 and command.main([*options, "--check"]) == 0
        path.write_text("no marks")
        assert command.main(options) == 2
        assert "needs a line <!-- fitted -->" in capsys.readouterr().err


def part_of(text: str, name: str) -> str:
    return text.split(f"<!-- {name} -->\n")[1].split(f"<!-- /{name} -->")[0]


def assert_alike(text: str, wanted: str) -> None:
    """The same words, and the same numbers but for a share of 2%."""
    number = re.compile(r"\d+(?:\.\d+)?")
    words = [number.sub("#", one.replace("*", "")) for one in (text, wanted)]
    assert words[0] == words[1]
    found = [[float(x) for x in number.findall(one)] for one in (text, wanted)]
    np.testing.assert_allclose(*found, rtol=0.02, atol=0.6)
