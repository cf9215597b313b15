"""Memory that a training step needs on a device, by arithmetic.

Weights and AdamW's moments are float32, gradients float32, and what is multiplied is a copy of 16
bits: 18 bytes of a weight. With a shared state every device keeps its part of it, and gathers the
weights of a layer before the layer runs, two layers at a time.

Between the passes a layer keeps what `examples/transformer` names: gathered rows, products, the
sum, and attention's result; with the rematerialisation of layers the sums alone.
"""

from __future__ import annotations

import dataclasses

from stretto.benchmarks.scaling.decoder import Decoder
from stretto.benchmarks.scaling.layer import ITEMSIZE, Share, expert_rows
from stretto.benchmarks.scaling.steps import device_weights
from stretto.benchmarks.targets.machine_file import Card

STATE_BYTES = 16
"""Bytes of a weight: itself, two moments, its gradient."""
COPY_BYTES = 2
USABLE = 0.9
"""The usable share of a card's memory; the driver, NCCL and XLA take the rest."""
WORKING_LAYERS = 3.0
"""What a layer's derivatives need while they are computed, in layers' worth of what is kept."""
LAYERS_AT_ONCE = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device."""

    state: float
    kept: float
    working: float

    @property
    def gb(self) -> float:
        """All of them, in GB of 1e9 bytes."""
        return (self.state + self.kept + self.working) / 1e9

    def fits(self, card: Card) -> bool:
        """Whether the card has room for them."""
        return self.gb <= USABLE * card.memory_gb


def memory_of(decoder: Decoder, share: Share, *, remat: str, state_shares: float = 1.0) -> Memory:
    """What a step of one pass over a device's rows needs.

    Args:
      decoder: the model.
      share: the device's part.
      remat: "elementwise" or "layer", as `examples/transformer` has them.
      state_shares: devices that share out weights, moments and gradients; 1 where each has all.
    """
    weights = device_weights(decoder, share)
    if state_shares > 1:
        layer = (weights - decoder.end_weights) / decoder.layers
        gathered = LAYERS_AT_ONCE * layer * (COPY_BYTES + 4)
        state = weights * (STATE_BYTES + COPY_BYTES) / state_shares + gathered
    else:
        state = weights * (STATE_BYTES + COPY_BYTES)
    whole = _layer_bytes(decoder, share)
    kept = whole if remat == "elementwise" else _sums_bytes(decoder, share)
    logits = 2 * 4 * share.rows / share.tp * decoder.vocabulary
    return Memory(state=state, kept=decoder.layers * kept, working=WORKING_LAYERS * whole + logits)


def _layer_bytes(decoder: Decoder, share: Share) -> float:
    """The bytes that a layer keeps for its derivatives, with "elementwise"."""
    rows, tp = share.rows, share.tp
    gathered = rows * decoder.hidden * (1 if decoder.experts else 2)
    products = rows * (decoder.qkv_columns + decoder.attention_width) / tp
    if decoder.experts:
        own = expert_rows(decoder, share)
        products += own * (2 * decoder.feed_forward + decoder.hidden)
    else:
        products += rows * 2 * decoder.feed_forward / tp
    return ITEMSIZE * (gathered + products) + _sums_bytes(decoder, share)


def _sums_bytes(decoder: Decoder, share: Share) -> float:
    """The bytes of a layer's input, and of the sum between attention and feed-forward."""
    return ITEMSIZE * 2 * share.rows * decoder.hidden / share.tp
