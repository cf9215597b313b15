"""The clocks of the cards beside the times."""

from __future__ import annotations

import types

import pytest
from bench_cases import case_of
from rich.console import Console

from stretto.benchmarks.pages import terminal
from stretto.benchmarks.peers.peers import PEERS
from stretto.benchmarks.timing import clocks
from stretto.benchmarks.timing import measure as measuring
from stretto.benchmarks.timing.clocks import Clock, Clocks
from stretto.benchmarks.timing.measure import Settings, measure
from stretto.benchmarks.timing.turns import in_turns


class NoNvmlError(Exception):
    pass


def nvml(mhz=(1980, 1455, 345), limited=(0, 1, 0), fails=""):
    """Three cards: their clocks, and which the power limit lowers; one function may fail."""

    def answer(name, found):
        def function(*args):
            if name == fails:
                raise NoNvmlError(name)
            return found(*args)

        return function

    answers = dict(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: len(mhz),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetHandleByUUID=lambda name: {"GPU-b": 1}[name],
        nvmlDeviceGetClockInfo=lambda card, kind: mhz[card],
        nvmlDeviceGetMaxClockInfo=lambda card, kind: 1980,
        nvmlDeviceGetCurrentClocksEventReasons=lambda card: 1 | 4 * limited[card],
    )
    return types.SimpleNamespace(
        NVMLError=NoNvmlError,
        NVML_CLOCK_SM=1,
        nvmlClocksEventReasonSwPowerCap=4,
        **{name: answer(name, found) for name, found in answers.items()},
    )


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, Clock(345, 1980, False)),
        ("0, 1", Clock(1455, 1980, True)),
        ("0", Clock(1980, 1980, False)),
        ("GPU-b", Clock(1455, 1980, True)),
    ],
)
def test_the_slowest_of_the_cards_that_the_process_may_use(monkeypatch, visible, found):
    monkeypatch.setattr(clocks, "pynvml", nvml())
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert Clocks(on_gpu=True).read() == found


@pytest.mark.parametrize("fails", ["nvmlInit", "nvmlDeviceGetClockInfo", "package", "no GPU"])
def test_where_the_cards_do_not_tell_there_is_no_clock(monkeypatch, fails):
    monkeypatch.setattr(clocks, "pynvml", None if fails == "package" else nvml(fails=fails))
    reader = Clocks(on_gpu=fails != "no GPU")
    assert reader.read() is None and reader.read() is None


def test_clocks_are_read_after_each_visit():
    log = []

    class Logged:
        calls, temp_bytes = 1, None

        def __init__(self, name):
            self.name = name

        def visit(self, samples):
            log.append(self.name)
            return [1.0] * samples

    in_turns([Logged(0), Logged(1)], 6, per_visit=2, visited=lambda place: log.append(-1 - place))
    assert len(log) == 12
    assert all(done == -1 - name for name, done in zip(log[::2], log[1::2], strict=True))


def test_times_come_with_their_clocks(monkeypatch):
    found = iter([Clock(1500, 1980, True), Clock(1980, 1980, False), Clock(1700, 1980, False)] * 9)
    monkeypatch.setattr(measuring.Clocks, "read", lambda self: next(found))
    one = measure(case_of(), [PEERS["xla"]], Settings(repeats=6, rest_s=0.0), None)
    (timed,) = one.timed
    assert (timed.mhz, one.most_mhz) == (1700.0, 1980)
    assert timed.at_power_limit == pytest.approx(1 / 3)
    console = Console(width=200)
    with console.capture() as printed:
        terminal.print_measurement(console, one, "gpu")
    assert "clocks 1700 of 1980 MHz, lowered by the power limit in up to 33%" in printed.get()


def test_without_clocks_there_is_no_line():
    one = measure(case_of(), [PEERS["xla"]], Settings(repeats=2, rest_s=0.0), None)
    assert one.timed[0].mhz is None and terminal.clocks_sentence(one) == ""
