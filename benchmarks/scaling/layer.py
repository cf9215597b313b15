"""The work of one layer of a decoder on a device, forward and backward.

Dense projections are the operations that `examples/transformer` calls along "tp". Tokens of a
sequence split over "cp" gather the keys and values of all of it; experts are dealt out along "tp"
and "ep" together, and get their rows by an all-to-all. The example has neither: these two are
arithmetic, with nothing hidden.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from stretto.benchmarks.scaling.decoder import Decoder
from stretto.kernels.operation import Sizes

ITEMSIZE = 2
"""Bytes of an operand: bfloat16."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """A device's part of a step: `rows` tokens of its group along "tp", and the axes' sizes."""

    rows: int
    sequence: int
    tp: int = 1
    cp: int = 1
    ep: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """A layer's work on one device, in one direction.

    Attributes:
      calls: operations along "tp", by name and sizes.
      products: matmuls on the device, (m, k, n).
      grouped: products of rows in groups, (m, k, n, groups).
      attention_flops: of the scores and their sums, the masked half left out.
      sorted_bytes: read and written by putting experts' rows in order and adding them up again.
      elementwise_bytes: read and written by norms, rotations, activations and sums.
      gathered: bytes of keys and values that are gathered along "cp".
      exchanged: bytes of a device's rows that an all-to-all along "tp" and "ep" moves, each time.
      exchanges: how often it does.
    """

    calls: tuple[tuple[str, Sizes], ...]
    products: tuple[tuple[int, int, int], ...] = ()
    grouped: tuple[tuple[int, int, int, int], ...] = ()
    attention_flops: float = 0.0
    elementwise_bytes: float = 0.0
    sorted_bytes: float = 0.0
    gathered: Mapping[str, float] = dataclasses.field(default_factory=dict)
    exchanged: float = 0.0
    exchanges: int = 0


def forward(decoder: Decoder, share: Share) -> Asked:
    """The layer itself."""
    hidden, width = decoder.hidden, decoder.attention_width
    rows = share.rows
    calls = [
        _gathers(rows, hidden, decoder.qkv_columns),
        _scatters(rows, width, hidden),
    ]
    grouped: list[tuple[int, int, int, int]] = []
    if decoder.experts:
        own, groups = expert_rows(decoder, share), decoder.experts // (share.tp * share.ep)
        grouped = [
            (own, hidden, 2 * decoder.feed_forward, groups),
            (own, decoder.feed_forward, hidden, groups),
        ]
    else:
        calls += [
            _gathers(rows, hidden, 2 * decoder.feed_forward),
            _scatters(rows, decoder.feed_forward, hidden),
        ]
    return Asked(
        calls=tuple(calls),
        grouped=tuple(grouped),
        attention_flops=_attention_flops(decoder, share),
        elementwise_bytes=_elementwise_bytes(decoder, share),
        sorted_bytes=_sorted_bytes(decoder, share),
        gathered={"all_gather": _keys_bytes(decoder, share)},
        exchanged=exchanged_bytes(decoder, share),
        exchanges=2 if decoder.experts else 0,
    )


def backward(decoder: Decoder, share: Share) -> Asked:
    """Both derivatives of every product; gathered rows are kept."""
    hidden, width, tp = decoder.hidden, decoder.attention_width, share.tp
    rows, qkv = share.rows, decoder.qkv_columns
    calls = [_scatters(rows, qkv, hidden), _gathers(rows, hidden, width)]
    products = [(hidden, rows, qkv // tp), (width // tp, rows, hidden)]
    grouped: list[tuple[int, int, int, int]] = []
    if decoder.experts:
        own, groups = expert_rows(decoder, share), decoder.experts // (tp * share.ep)
        two = 2 * decoder.feed_forward
        # By the rows, and by the weights, whose contraction is the rows': as many operations.
        grouped = 2 * [(own, two, hidden, groups), (own, hidden, decoder.feed_forward, groups)]
    else:
        two = 2 * decoder.feed_forward
        calls += [_scatters(rows, two, hidden), _gathers(rows, hidden, decoder.feed_forward)]
        products += [(hidden, rows, two // tp), (decoder.feed_forward // tp, rows, hidden)]
    keys = _keys_bytes(decoder, share)
    return Asked(
        calls=tuple(calls),
        products=tuple(products),
        grouped=tuple(grouped),
        attention_flops=_attention_flops(decoder, share),
        elementwise_bytes=_elementwise_bytes(decoder, share),
        sorted_bytes=_sorted_bytes(decoder, share),
        gathered={"all_gather": keys, "reduce_scatter": keys},
        exchanged=exchanged_bytes(decoder, share),
        exchanges=2 if decoder.experts else 0,
    )


def expert_rows(decoder: Decoder, share: Share) -> int:
    """Rows that a device's experts get, where tokens go to all experts alike."""
    return share.rows * decoder.experts_a_token // share.tp


def exchanged_bytes(decoder: Decoder, share: Share) -> float:
    """A device's rows for the experts, each once for every device that holds one of its experts.

    An expert is one of so many alike: of E devices a token of k experts reaches
    E (1 - (1 - 1/E)^k).
    """
    devices = share.tp * share.ep
    if not decoder.experts or devices == 1:
        return 0.0
    reached = devices * (1 - (1 - 1 / devices) ** decoder.experts_a_token)
    return share.rows / share.tp * reached * decoder.hidden * ITEMSIZE


def _gathers(rows: int, columns: int, out: int) -> tuple[str, Sizes]:
    return "all_gather_matmul", {"m": rows, "k": columns, "n": out}


def _scatters(rows: int, columns: int, out: int) -> tuple[str, Sizes]:
    return "matmul_reduce_scatter", {"m": rows, "k": columns, "n": out}


def _attention_flops(decoder: Decoder, share: Share) -> float:
    """Two products of every token with half of the tokens of its sequence."""
    return 2.0 * share.rows * share.sequence * decoder.attention_width / share.tp


def _keys_bytes(decoder: Decoder, share: Share) -> float:
    """Keys and values of a device's heads, of all tokens along "cp"; 0 where none come together."""
    if share.cp == 1:
        return 0.0
    columns = 2 * decoder.kv_heads * decoder.head_dim / share.tp
    return share.rows * share.cp * columns * ITEMSIZE


def _elementwise_bytes(decoder: Decoder, share: Share) -> float:
    """Two norms and sums on a device's own rows, rotations, and the activation."""
    rows, tp = share.rows, share.tp
    own = 10 * rows * decoder.hidden / tp
    rotated = 2 * rows * (decoder.heads + decoder.kv_heads) * decoder.head_dim / tp
    activated = 3 * rows * decoder.feed_forward * max(1, decoder.experts_a_token) / tp
    return ITEMSIZE * (own + rotated + activated)


def _sorted_bytes(decoder: Decoder, share: Share) -> float:
    """Every row of an expert is copied before and after, and read and written in a sum."""
    if not decoder.experts:
        return 0.0
    return ITEMSIZE * 6.0 * expert_rows(decoder, share) * decoder.hidden
