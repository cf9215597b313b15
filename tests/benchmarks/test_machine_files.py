"""Machine files: what is published is named, what is wrong is one line with a way out."""

from __future__ import annotations

import re

import msgspec
import pytest

from stretto.benchmarks.commands import plan as command
from stretto.benchmarks.errors import BenchmarkError
from stretto.benchmarks.targets import machine_file

GOOD = (machine_file.folder() / "dgx-h100.toml").read_text()


@pytest.mark.parametrize("name", ["dgx-h100", "hgx-h200", "gb200-nvl72"])
def test_every_published_figure_has_its_address(name):
    target = machine_file.read(name)
    assert target.origin == "published"
    assert all(where.startswith("https://") for where in target.sources.values())
    assert target.card is not None and target.between is not None


def test_cards_of_results_have_a_machine():
    for card in ("NVIDIA H200", "NVIDIA H100 80GB HBM3"):
        target = machine_file.of_card(card)
        assert target is not None and target.link_gb_per_s == 450
    assert machine_file.of_card("an abacus") is None


@pytest.mark.parametrize("name", machine_file.names())
def test_a_written_file_reads_the_same(name, tmp_path):
    target = machine_file.read(name)
    machine_file.write(target, tmp_path / "m.toml")
    assert machine_file.read(str(tmp_path / "m.toml")) == target


def test_measured_links_count_as_the_published_ones_that_they_stand_for():
    target = machine_file.read("dgx-h100")
    link = machine_file.Link(gb_per_s=175, latency_us=4)
    measured = msgspec.structs.replace(target, origin="measured", within=link)
    assert measured.link_gb_per_s == 225
    assert measured.hop_us == target.hop_us - 4


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("gpus_per_node = 8", "gpus_per_node = 0", "Expected `int` >= 1 - at `$.gpus_per_node`"),
        ("gb_per_s = 450.0", "gb_per_s = -1.0", "Expected `float` > 0.0"),
        ("gb_per_s = 450.0", 'gb_per_s = "fast"', "Expected `float`, got `str`"),
        ("[within]", "[withn]", "unknown field `withn`"),
        ("oversubscription = 1.0", "oversubscription = 0.5", "Expected `float` >= 1.0"),
        ('origin = "published"', 'origin = "heard"', "Invalid enum value 'heard'"),
        ('"card.memory_gb" =', '"card.other" =', 'add "card.memory_gb" = "https://..."'),
        ("[card]", "[card", "see "),
    ],
)
def test_a_bad_file_is_one_line_with_the_way_out(old, new, said, tmp_path, capsys):
    path = tmp_path / "m.toml"
    path.write_text(GOOD.replace(old, new))
    assert command.main(["7b", "--gpus", "8", "--machine", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and f"--machine {path}" in err and said in err


def test_no_file(tmp_path):
    with pytest.raises(BenchmarkError, match=r"No such file.*there are dgx-h100, gb200-nvl72"):
        machine_file.read(str(tmp_path / "none.toml"))


def test_what_a_plan_lacks_is_said(tmp_path, capsys):
    """A measured file of an unknown card, and one of a single node."""
    without = re.sub(r"\[card\].*?\[within\]", "[within]", GOOD, flags=re.DOTALL)
    alone = re.sub(r"\[between\].*?\[sources\]", "[sources]", GOOD, flags=re.DOTALL)
    for text, said in ((without, "it has no [card]; add name"), (alone, "it has no [between]")):
        path = tmp_path / "m.toml"
        path.write_text(text.replace('"published"', '"measured"'))
        assert command.main(["7b", "--gpus", "16", "--machine", str(path)]) == 2
        assert said in capsys.readouterr().err
