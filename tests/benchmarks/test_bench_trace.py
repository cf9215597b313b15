"""Timelines and predictions."""

from __future__ import annotations

import json

import pytest
from bench_cases import case_of

from stretto.benchmarks.commands import bench as command
from stretto.benchmarks.errors import BenchmarkError, UnavailableError
from stretto.benchmarks.measurements import results
from stretto.benchmarks.pages import timeline
from stretto.benchmarks.predict import predictions, trace


def timed_case(shape="256x128x256", devices=2):
    return case_of(shape=shape, devices=devices, dtype="bfloat16")


def test_a_timeline_is_predicted_where_there_are_no_gpus(tmp_path, capsys):
    path = tmp_path / "t.json"
    options = ["all_gather_matmul", "--shapes", "256x128x256", "--devices", "1,2"]
    assert command.main([*options, "--trace", str(path)]) == 0
    out = capsys.readouterr().out
    assert "256x128x256 bfloat16 on 2, predicted by the simulator" in out
    data = json.loads(path.read_text())
    assert data["otherData"]["about"] == "predicted by the simulator"
    block, spans = trace.spans_of_one_block(data)
    assert block.startswith("device 0 block ")
    assert {timeline.kind_of(span.what) for span in spans} >= {"wait", "multiply", "load, copy"}
    assert min(span.begin for span in spans) == 0
    assert all(span.end >= span.begin for span in spans)
    assert path.with_suffix(".svg").read_text().startswith("<?xml")


def test_a_kernels_own_events_are_read():
    """Begin and end events, nested, of two multiprocessors; an end that is missing is dropped."""

    def event(phase, name, pid, tid, ts):
        return {"ph": phase, "name": name, "pid": pid, "tid": tid, "ts": ts}

    events = [
        event("B", "multiply", 5, 13, 10.0),
        event("B", "store", 5, 13, 12.0),
        event("E", "store", 5, 13, 13.0),
        event("E", "multiply", 5, 13, 14.0),
        event("B", "load", 5, 22, 11.0),
        event("E", "load", 5, 22, 15.0),
        event("B", "load", 6, 1, 1.0),
        event("E", "load", 6, 1, 2.0),
        event("B", "multiply", 5, 22, 16.0),
    ]
    block, spans = trace.spans_of_one_block({"traceEvents": events})
    assert block == "multiprocessor 5"
    # Twelve warps a block: 13 is the first of the second block, 22 its tenth.
    assert [(s.row, s.what, s.begin, s.end) for s in spans] == [
        ("warpgroup 0 warp 0", "multiply", 0.0, 4.0),
        ("warpgroup 0 warp 0", "store", 2.0, 3.0),
        ("warpgroup 2 warp 1", "load", 1.0, 5.0),
    ]
    assert trace.spans_of_one_block({"traceEvents": []}) == ("", [])


def test_every_event_has_a_kind():
    assert timeline.kind_of("wait full[0]") == "wait"
    assert timeline.kind_of("wgmma") == "multiply"
    assert timeline.kind_of("something new") == "other"


def test_no_timeline_without_a_second_device(tmp_path, capsys):
    options = ["all_gather_matmul", "--shapes", "64x64x64", "--devices", "1"]
    assert command.main([*options, "--trace", str(tmp_path / "t.json")]) == 2
    assert "over several devices" in capsys.readouterr().err


def test_predictions_are_shown_beside_measurements_and_kept(tmp_path, capsys):
    path = tmp_path / "r.json"
    options = ["all_gather_matmul", "--shapes", "64x64x64", "--devices", "2", "--repeats", "1"]
    options += ["--peers", "xla", "--no-torch", "--json", str(path), "--predict", "4,8"]
    assert command.main(options) == 0
    found = results.read(path)
    assert [one.devices for one in found.predictions] == [2, 4, 8]
    assert len(found.measurements) == 1
    assert "predicted" in capsys.readouterr().out


def test_a_larger_problem_is_predicted_to_take_longer():
    small, large = (
        predictions.predict(timed_case(f"{size}x{size}x{size}"), "NVIDIA H200")
        for size in (4096, 8192)
    )
    assert 0 < small.fused < large.fused
    assert 0 < small.xla < large.xla
    assert large.fused_low < large.fused < large.fused_high
    assert not large.beyond


def test_what_cannot_be_predicted():
    with pytest.raises(UnavailableError, match="not a multiple of 3"):
        predictions.predict(timed_case(devices=3), "NVIDIA H200")
    found = predictions.predict_all([timed_case(devices=3), timed_case()], "NVIDIA H200")
    assert [one.devices for one in found] == [2]
    with pytest.raises(BenchmarkError, match="--predict 1 must be between 2 and 1024"):
        predictions.check_counts([8, 1])


def test_predictions_are_added_to_results(tmp_path, make_results):
    found = make_results(kernels=("all_gather_matmul", "all_reduce"))
    results.write(found, tmp_path / "r.json")
    options = ["show", str(tmp_path / "r.json"), "--predict", "4,8"]
    assert command.main([*options, "--merge", str(tmp_path / "all.json")]) == 0
    added = results.read(tmp_path / "all.json").predictions
    goals = {m.shape for m in found.measurements if m.kernel == "all_gather_matmul"}
    assert {(one.shape, one.devices) for one in added} == {(s, d) for s in goals for d in (4, 8)}
    assert {one.devices for one in added if "more than 4 devices" in one.beyond} == {8}
