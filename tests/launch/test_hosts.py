"""Hostfiles as people write them."""

from __future__ import annotations

import pytest

from stretto.launch.errors import LaunchError
from stretto.launch.planning.hosts import parse_hostfile, parse_hosts

UGLY = (
    "# a cluster\r\n"
    "\r\n"
    "a slots=2 max_slots=4   # trailing\r\n"
    "\t b\tslots = 3\r\n"
    "   \r\n"
    "user@c\r\n"
    "fe80::1 slots=2\r\n"
    "[fe80::2]:3\r\n"
    "d:2\r\n"
    "a slots=1\r\n"
    "b slots=5 max-slots=4"
)


def pairs(hosts):
    return [(host.name, host.num_devices) for host in hosts]


def test_everything_at_once():
    assert pairs(parse_hostfile(UGLY, "f", 8)) == [
        ("a", 3),
        ("b", 4),
        ("user@c", 8),
        ("fe80::1", 2),
        ("fe80::2", 3),
        ("d", 2),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a\nb slots=x", "f, line 2: 'slots=x' needs a number of at least 1"),
        ("a slots=0", "f, line 1: 'slots=0' needs"),
        ("a\n\nb sltos=2", "f, line 3: 'sltos=2' is not slots=N"),
        ("a:b", "f, line 1: 'a:b' needs a number"),
        ("[fe80::1", r"is not \[ADDRESS\]"),
        ("# nothing\n\n", "f names no host"),
    ],
)
def test_errors_name_the_line(text, words):
    with pytest.raises(LaunchError, match=words):
        parse_hostfile(text, "f", 1)


def test_list():
    assert pairs(parse_hosts("a:4, b:2,c", 8)) == [("a", 4), ("b", 2), ("c", 8)]
