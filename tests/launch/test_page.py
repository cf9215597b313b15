"""Text of several sources on one page: whole lines, prefixes, and lines that are not complete."""

from __future__ import annotations

import random

import pytest

from stretto.launch.supervision.page import PAUSE_S, Page


class Reader:
    """A page, its clock, and what was shown so far; sources are named by their prefix."""

    def __init__(self, **options):
        self.page = Page(**options)
        self.now = 100.0
        self.shown = b""

    def write(self, name: str, data: bytes) -> None:
        self.shown += self.page.add(name, f"[{name}] ".encode(), data, self.now)

    def pause(self, seconds: float = PAUSE_S) -> None:
        self.now += seconds
        self.shown += self.page.due(self.now)

    def end(self, *names: str) -> bytes:
        for name in names:
            self.shown += self.page.end(name)
        return self.shown


def test_pieces_of_two_sources_become_whole_lines():
    reader = Reader()
    for name, data in (("0", b"a"), ("1", b"x\ny"), ("0", b"b\nc\n"), ("1", b"z\n")):
        reader.write(name, data)
    assert reader.shown == b"[1] x\n[0] ab\n[0] c\n[1] yz\n"


def test_a_line_without_its_end_is_shown_after_a_pause_and_goes_on():
    reader = Reader()
    reader.write("0", b"loading ... ")
    assert reader.shown == b"" and reader.page.holds_back
    reader.pause()
    assert reader.shown == b"[0] loading ... " and not reader.page.holds_back
    reader.write("0", b"done\n")
    assert reader.shown == b"[0] loading ... done\n"


def test_another_source_begins_a_line_of_its_own():
    reader = Reader()
    reader.write("0", b"loading ... ")
    reader.pause()
    reader.write("1", b"x\n")
    reader.write("0", b"done\n")
    assert reader.shown == b"[0] loading ... \n[1] x\n[0] done\n"


def test_a_source_that_never_pauses_is_shown_in_time():
    reader = Reader()
    for _ in range(8):
        reader.write("0", b".")
        reader.pause(0.9 * PAUSE_S)
    assert reader.shown.startswith(b"[0] ......")


def test_carriage_returns_go_back_to_the_prefix():
    reader = Reader()
    for step in (b"1", b"2"):
        reader.write("0", b"\rstep " + step)
        reader.pause()
    reader.write("0", b"\n")
    assert reader.shown == b"[0] \r[0] step 1\r[0] step 2\n"


def test_a_return_at_the_end_waits_for_what_it_returns_for():
    reader = Reader()
    for step in (b"1", b"2"):
        reader.write("0", b"step " + step + b"\r")
        reader.pause()
    assert reader.shown == b"[0] step 1\r[0] step 2"
    reader.write("1", b"windows\r\n")
    assert reader.shown.endswith(b"\n[1] windows\r\n")


def test_the_last_line_ends_with_its_source():
    reader = Reader()
    reader.write("0", b"shown")
    reader.pause()
    reader.write("1", b"not shown")
    assert reader.end("0", "1", "2") == b"[0] shown\n[1] not shown\n"


def test_a_message_in_between_begins_a_line():
    reader = Reader()
    reader.write("0", b"loading")
    reader.pause()
    assert reader.page.close_line() == b"\n"
    assert reader.page.close_line() == b""


def test_hidden_lines():
    reader = Reader(hides=lambda line: line == b"secret")
    reader.write("0", b"a\nsecret\nsecrets\n")
    assert reader.shown == b"[0] a\n[0] secrets\n"


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_lost_however_it_is_cut(seed):
    """Of each source: all bytes, in their order, and every line begins with its prefix."""
    draw = random.Random(seed)
    texts = {
        name: bytes(draw.choice(b"ab\xff\n") for _ in range(draw.randrange(1, 400)))
        for name in ("0", "1", "2")
    }
    reader, left = Reader(), dict(texts)
    while any(left.values()):
        name = draw.choice([name for name, text in left.items() if text])
        cut = draw.randrange(1, 30)
        reader.write(name, left[name][:cut])
        left[name] = left[name][cut:]
        if draw.random() < 0.3:
            reader.pause(draw.choice([0.01, PAUSE_S]))
    shown = reader.end(*texts)
    lines = shown.split(b"\n")[:-1]
    assert all(line[:1] == b"[" and line[2:4] == b"] " for line in lines)
    for name, text in texts.items():
        own = b"".join(line[4:] for line in lines if line[1:2] == name.encode())
        assert own == text.replace(b"\n", b"")


def test_a_long_line_stays_whole():
    reader = Reader()
    for _ in range(64):
        reader.write("0", b"x" * (1 << 14))
        reader.write("1", b"in between\n")
    reader.write("0", b"\n")
    assert b"[0] " + b"x" * (1 << 20) + b"\n" in reader.shown
