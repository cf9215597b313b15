"""`stretto plan`: splits that can be, that fit, and what it prints, writes and draws."""

from __future__ import annotations

import json
import math
import re

import config
import jax
import msgspec
import pytest
import rates

from stretto.benchmarks.commands import plan as command
from stretto.benchmarks.errors import BenchmarkError
from stretto.benchmarks.scaling import decoder, evaluate, layer, memory, plan, steps
from stretto.benchmarks.scaling.layer import Share
from stretto.benchmarks.scaling.splits import Split, members, splits_of
from stretto.benchmarks.targets import machine_file

H100, H200 = machine_file.read("dgx-h100"), machine_file.read("hgx-h200")
SMALL = decoder.read("7b")
MIXTURE = decoder.read("mixture-30b")


def over(name, gpus, batch=1024, target=H200):
    return plan.over(steps.step_model(), decoder.read(name), gpus, batch, target)


@pytest.mark.parametrize("name", ["7b-layer", "70b-layer"])
def test_files_of_models_are_the_examples_configurations(name):
    ours, theirs = decoder.read(name), config.SIZES[name]
    for field in ("layers", "hidden", "heads", "kv_heads", "head_dim", "feed_forward", "sequence"):
        assert getattr(ours, field) == getattr(theirs, field)
    assert ours.vocabulary == config.VOCABULARY
    deep = decoder.read(name.removesuffix("-layer"))
    assert deep == msgspec.structs.replace(ours, name=deep.name, layers=deep.layers, batch=1024)


def test_a_step_asks_for_as_many_operations_as_the_example_counts():
    ours = plan.flops_of_step(decoder.read("7b-layer"), 4)
    theirs = rates.flops_per_device(config.SIZES["7b-layer"], "step", 4, 1)
    # The example's table is looked up by a product, whose operations the plan leaves out.
    assert ours == pytest.approx(theirs, rel=0.01)


def test_splits_are_all_ways_to_share_out_the_gpus():
    found = list(splits_of(16, MIXTURE))
    assert len(found) == len(set(found)) == 35
    assert all(split.gpus == 16 for split in found)
    assert {split.ep for split in splits_of(16, SMALL)} == {1}


@pytest.mark.parametrize(
    ("split", "model", "batch", "said"),
    [
        (Split(tp=16), SMALL, 16, "kv_heads=8 is no multiple of tp=16; take a smaller tp"),
        (Split(tp=1, dp=16), SMALL, 8, "batch=8 is no multiple of ep dp = 16; take a larger"),
        (Split(tp=2, cp=3), SMALL, 8, "sequence=4096 is no multiple of 2 cp tp = 12"),
        (Split(tp=1, ep=256), MIXTURE, 256, "experts=128 is no multiple of tp ep = 256"),
    ],
)
def test_an_impossible_split_says_the_way_out(split, model, batch, said):
    assert said in split.obstacle(model, batch)


def test_neighbours_share_a_node_as_far_as_they_fit():
    assert members(1, 8, 8) == 8 and members(2, 8, 8) == 4 and members(8, 64, 8) == 1
    assert members(1, 512, 72) == 64  # of a rack's 72


class TestMemory:
    def test_a_split_that_does_not_fit_is_said_so(self):
        found = over("70b", 8, target=H100)
        assert not found.best and found.too_large and found.least_gb > 140
        assert any("does not fit: it needs" in loser.why for loser in found.losers)

    def test_it_counts_as_xla_does(self):
        """GB for the step compiled for H100s: of XLA, `Compiled.memory_analysis()`."""
        for name, tp, rows, gb in (
            ("7b-layer", 4, 1024, 3.91),
            ("7b-layer", 4, 2048, 4.39),
            ("7b-layer", 2, 1024, 7.70),
            ("70b-layer", 4, 1024, 7.73),
        ):
            share = Share(rows=rows, sequence=rows, tp=tp)
            found = memory.memory_of(decoder.read(name), share, remat="elementwise")
            assert found.gb == pytest.approx(gb, rel=0.1)

    @pytest.mark.parametrize("experts", [0, 16])
    @pytest.mark.parametrize("remat", ["elementwise", "layer"])
    @pytest.mark.parametrize("shares", [1, 4])
    def test_it_adds_up_what_is_kept(self, experts, remat, shares):
        """With numbers small enough to count, on two devices, each with 8 tokens."""
        model = decoder.Decoder(
            name="two layers", layers=2, hidden=10, heads=4, kv_heads=2, head_dim=5,
            feed_forward=30, sequence=8, vocabulary=100, batch=1,
            experts=experts, experts_a_token=min(3, experts),
        )  # fmt: skip
        share = Share(rows=8, sequence=8, tp=2)
        of_layer = (10 * (40 + 20) + 3 * 10 * 30 * max(1, experts)) / 2
        weights = 2 * of_layer + 2 * 100 * 10
        gathered = 2 * of_layer * (2 + 4) if shares > 1 else 0
        sums = 2 * (2 * 8 * 10 / 2)
        # Of a layer: gathered rows, queries to values and what attention gives, the activations.
        if experts:
            rows = 8 * 3 / 2
            whole = sums + 2 * (8 * 10 + 8 * (40 + 20) / 2 + rows * (2 * 30 + 10))
        else:
            whole = sums + 2 * (2 * 8 * 10 + 8 * (40 + 20) / 2 + 8 * 2 * 30 / 2)
        found = memory.memory_of(model, share, remat=remat, state_shares=shares)
        assert found.state == pytest.approx(weights * 18 / shares + gathered)
        assert found.kept == pytest.approx(2 * (whole if remat == "elementwise" else sums))
        assert found.working == pytest.approx(3 * whole + 2 * 4 * 8 / 2 * 100)

    def test_what_makes_it_smaller(self):
        split = Split(tp=2, dp=4)

        def gb(**how):
            base = dict(at_once=2, remat="elementwise", shared=False)
            return evaluate.memory_of(SMALL, split, evaluate.How(**(base | how))).gb

        assert gb(at_once=1) < gb() and gb(remat="layer") < gb() and gb(shared=True) < gb()

    def test_the_best_splits_fit(self):
        for gpus in (8, 64):
            for entry in over("7b", gpus).best:
                assert entry.memory_gb <= memory.USABLE * 141


class TestTimes:
    def test_best_first_and_the_others_say_why(self):
        found = over("7b", 64)
        times = [entry.step_s for entry in found.best]
        assert len(times) == 5 and times == sorted(times)
        assert len(found.losers) + 5 == found.fitting + found.too_large + found.impossible
        assert all(loser.why for loser in found.losers)

    def test_long_times_have_no_exponent(self):
        reasons = [loser.why for loser in over("70b", 64).losers]
        assert any(re.search(r" \d{3,} s more$", why) for why in reasons)
        assert not any("e+" in why for why in reasons)

    def test_parts_make_up_the_step_and_lie_within_its_interval(self):
        for name in ("7b", "mixture-30b"):
            for entry in over(name, 64).best:
                assert sum(entry.parts_s.values()) == pytest.approx(entry.step_s)
                assert entry.low_s < entry.step_s < entry.high_s
                assert 0 <= entry.exposed_s < entry.step_s

    def test_it_stays_below_the_cards_peak(self):
        for name in ("7b", "70b", "mixture-30b"):
            for entry in over(name, 64).best:
                assert 50 < entry.tflops_per_gpu < 989

    def test_a_slower_network_takes_longer(self):
        slow = msgspec.structs.replace(
            H200, between=msgspec.structs.replace(H200.between, oversubscription=4.0)
        )
        assert over("7b", 64, 64, slow).best[0].step_s > over("7b", 64, 64).best[0].step_s

    def test_experts_are_said_to_be_beyond_what_was_measured(self):
        assert "experts" in over("mixture-30b", 8).best[0].beyond

    def test_rows_of_experts_cross_once_for_each_device(self):
        share = Share(rows=1024, sequence=1024, ep=2)
        two = msgspec.structs.replace(MIXTURE, experts=2, experts_a_token=2)
        # With both experts chosen a token reaches one device or two: 1.5 of two drawn alike.
        sent = 1024 * 1.5 * two.hidden * 2
        assert math.isclose(layer.exchanged_bytes(two, share), sent)


class TestCommand:
    def test_tables(self, capsys):
        assert command.main(["7b", "--gpus", "8,16", "--machine", "hgx-h200"]) == 0
        out = capsys.readouterr().out
        for words in ("8 GPUs, 1024 sequences", "strong scaling", "weak scaling", "slower:"):
            assert words in out
        assert "Beyond what was measured" in out and "links as published" in out

    def test_json_and_picture(self, tmp_path, capsys):
        picture = tmp_path / "p.svg"
        options = ["70b", "--gpus", "8,32", "--json", "--picture", str(picture)]
        assert command.main(options) == 0
        found = json.loads(capsys.readouterr().out)
        assert [one["gpus"] for one in found["splits"]] == [8, 32]
        assert found["strong"][0].get("best") is None  # none fits
        assert "none" in picture.read_text() and "tokens a second" in picture.read_text()

    def test_calls_of_a_file(self, tmp_path, capsys):
        path = tmp_path / "calls.toml"
        path.write_text(
            '[[call]]\noperation = "all_gather_matmul"\nshape = "8192x8192x28672"\ntimes = 2\n'
            '[[call]]\noperation = "all_reduce"\nshape = "8190x8192"\n'
        )
        assert command.main([str(path), "--gpus", "8,16", "--json"]) == 0
        calls = json.loads(capsys.readouterr().out)["calls"]
        assert [one["gpus"] for one in calls] == [8, 16, 8, 16]
        assert calls[1]["way"] == "hierarchical" and calls[0]["low_us"] < calls[0]["us"]
        assert command.main([str(path), "--gpus", "8"]) == 0
        assert "all_gather_matmul" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["8b"], "MODEL 8b: No such file"),
            (["7b", "--gpus", "many"], "--gpus 'many' is not like 8,64 or 8..1024"),
            (["7b", "--gpus", "0"], "must be from 1 to 65536"),
            (["7b", "--gpus", ","], "names no number"),
            (["7b", "--batch", "0"], "--batch 0 must be at least 1"),
        ],
    )
    def test_misuse(self, arguments, said, capsys):
        assert command.main(arguments) == 2
        err = capsys.readouterr().err
        assert said in err and err.count("\n") == 1

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ('operation = "sort"\nshape = "8x8"', "kernel 'sort' is not one of"),
            ('operation = "all_reduce"\nshape = "8"', "is neither a set"),
            ('operation = "all_reduce"\nshape = "8x8"\ntype = "int9"', "type 'int9' is not one of"),
            ('operation = "all_reduce"\nshap = "8x8"', "unknown field `shap`"),
        ],
    )
    def test_bad_calls(self, text, said, tmp_path, capsys):
        path = tmp_path / "calls.toml"
        path.write_text(f"[[call]]\n{text}\n")
        assert command.main([str(path), "--gpus", "8"]) == 2
        assert said in capsys.readouterr().err

    def test_bad_models(self, tmp_path):
        text = (decoder.folder() / "7b.toml").read_text()
        for old, new, said in (
            ("kv_heads = 8", "kv_heads = 5", "must be a multiple of kv_heads=5"),
            ("layers = 32", "layers = 0", "Expected `int` >= 1"),
            ("layers = 32", "layers = 32\nexperts = 4", "experts_a_token=0 must be from 1"),
        ):
            path = tmp_path / "m.toml"
            path.write_text(text.replace(old, new))
            with pytest.raises(BenchmarkError, match=said):
                decoder.read(str(path))

    def test_doublings(self):
        assert command.gpu_counts("8..1024") == [8, 16, 32, 64, 128, 256, 512, 1024]
        assert command.gpu_counts("6..20, 7") == [6, 7, 12]


def test_no_device_is_asked_to_plan(monkeypatch):
    """On a machine with GPUs that would start the backend, which takes their memory."""

    def started(*_):
        raise AssertionError("a backend was started")

    monkeypatch.setattr(jax, "devices", started)
    steps.part_of_step.cache_clear()
    steps._call.cache_clear()
    assert over("7b", 8, batch=64).best
