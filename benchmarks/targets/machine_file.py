"""Machine files: cards, and links within and between nodes, in TOML.

`configs/targets/` holds those of machines as their makers publish them; `stretto bench links
--machine-out FILE` writes one of what it measured. Rates are of one GPU, in one direction; GB is
1e9 bytes.
"""

from __future__ import annotations

import functools
import importlib.resources
import pathlib
from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from stretto.benchmarks import files
from stretto.benchmarks.cases.floors import LINK_GB_PER_S
from stretto.benchmarks.errors import BenchmarkError

PUBLISHED_LINK_GB_PER_S = 450.0
"""What is published of the links on which `LINK_GB_PER_S` was measured: NVLink of an H100."""

MOST = 1e12
"""More than any figure of a machine, in its unit."""

type Positive = Annotated[float, msgspec.Meta(gt=0, le=MOST)]


class Card(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One GPU.

    Attributes:
      name: as the driver gives it.
      memory_gb: its memory.
      memory_gb_per_s: what is read and written together.
      bf16_tflops: of dense products of 16 bits.
    """

    name: str
    memory_gb: Positive
    memory_gb_per_s: Positive
    bf16_tflops: Positive


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The links between the GPUs of a node.

    Attributes:
      gb_per_s: sent by one GPU.
      latency_us: of a small message; measured, with the launch of what sends it.
    """

    gb_per_s: Positive
    latency_us: Positive | None = None


class Network(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The network between nodes.

    Attributes:
      gb_per_s: sent by one GPU to another node, while no other sends.
      latency_us: of a small message, for one hop.
      interfaces: names of a node's network interfaces that carry it.
      oversubscription: how many times less a GPU sends while all do; 1 for none.
    """

    gb_per_s: Positive
    latency_us: Positive
    interfaces: tuple[str, ...] = ()
    oversubscription: Annotated[float, msgspec.Meta(ge=1, le=MOST)] = 1.0


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A cluster of equal nodes.

    Attributes:
      name: in words.
      origin: of the links' figures: "published" by their maker, or "measured".
      gpus_per_node: GPUs that NVLink joins; of a rack such as NVL72, all of the rack's.
      card: of every GPU; None in a file that was measured where nothing is published of it.
      within, between: links within a node, and between nodes.
      sources: of each figure, such as "card.memory_gb", where it is published, or who measured it.
    """

    name: str
    origin: Literal["published", "measured"]
    gpus_per_node: Annotated[int, msgspec.Meta(ge=1)]
    within: Link
    between: Network | None = None
    card: Card | None = None
    sources: Mapping[str, str] = {}

    def __hash__(self) -> int:
        return hash((self.name, self.origin, self.gpus_per_node, self.within, self.between))

    @property
    def link_gb_per_s(self) -> float:
        """The links within a node, as they would be published."""
        if self.origin == "published":
            return self.within.gb_per_s
        return self.within.gb_per_s * PUBLISHED_LINK_GB_PER_S / LINK_GB_PER_S

    @property
    def hop_us(self) -> float:
        """A hop between nodes, without the launch of what sends; 0 without a network."""
        if self.between is None:
            return 0.0
        launch = self.within.latency_us if self.origin == "measured" else None
        return max(self.between.latency_us - (launch or 0.0), 0.0)


def folder() -> pathlib.Path:
    """Where the published machines lie."""
    return pathlib.Path(str(importlib.resources.files("stretto.configs"))) / "targets"


def names() -> list[str]:
    """The published machines, as `--machine` takes them."""
    return sorted(path.stem for path in folder().glob("*.toml"))


def read(name: str) -> Target:
    """A published machine by its name, or the one in a file.

    Raises:
      BenchmarkError: there is none, or it is damaged, or a figure is impossible or has no source.
    """
    path = folder() / f"{name}.toml" if name in names() else pathlib.Path(name)
    known = ", ".join(names())
    try:
        target = msgspec.toml.decode(path.read_bytes(), type=Target)
    except OSError as error:
        raise BenchmarkError(f"--machine {name}: {error.strerror}; there are {known}.") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        example = folder() / f"{names()[0]}.toml"
        raise BenchmarkError(f"--machine {name}: {error}; see {example} for one.") from None
    _check_sources(target, name)
    return target


@functools.cache
def of_card(card: str) -> Target | None:
    """The published machine of 8 GPUs a node, or more, that has such cards; None if there is none.

    Args:
      card: the card's name, as the driver gives it.
    """
    found = [target for target in map(read, names()) if target.card and target.card.name == card]
    return min(found, key=lambda target: target.gpus_per_node, default=None)


def card_of(target: Target, name: str) -> Card:
    """The machine's card; BenchmarkError if the file called `name` has none."""
    if target.card is None:
        raise BenchmarkError(
            f"--machine {name}: it has no [card]; add name, memory_gb, memory_gb_per_s and"
            " bf16_tflops, as the card's maker publishes them."
        )
    return target.card


def write(target: Target, path: pathlib.Path) -> None:
    """Writes a machine file, whole or not at all; BenchmarkError if that cannot be."""
    files.write_whole(path, _toml(target))


def _toml(target: Target) -> bytes:
    """The file's text. `msgspec` reads TOML by itself and writes it with another package only."""
    data = msgspec.to_builtins(target)
    lines = [f"{name} = {_value(value)}" for name, value in data.items() if _is_plain(value)]
    for name, table in data.items():
        if isinstance(table, dict) and table:
            lines += ["", f"[{name}]"]
            lines += [f"{_key(key)} = {_value(v)}" for key, v in table.items() if v is not None]
    return ("\n".join(lines) + "\n").encode()


def _is_plain(value: object) -> bool:
    return value is not None and not isinstance(value, dict)


def _key(key: str) -> str:
    return _value(key) if "." in key else key


def _value(value: object) -> str:
    # TOML's strings, numbers and lists of them are written as JSON's are.
    return msgspec.json.encode(value).decode()


def _check_sources(target: Target, name: str) -> None:
    """Raises BenchmarkError for a published figure without a source in the file."""
    if target.origin != "published":
        return
    for table in ("card", "within", "between"):
        figures = getattr(target, table)
        for field in figures.__struct_fields__ if figures is not None else ():
            value = getattr(figures, field)
            named = f"{table}.{field}" in target.sources
            if isinstance(value, float) and field != "oversubscription" and not named:
                raise BenchmarkError(
                    f'--machine {name}: {table}.{field} = {value:g} has no source; add "{table}.'
                    f'{field}" = "https://..." under [sources], or set origin = "measured".'
                )
