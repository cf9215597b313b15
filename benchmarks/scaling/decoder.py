"""Files of models: the sizes of a decoder as `examples/transformer` has it, or with experts."""

from __future__ import annotations

import importlib.resources
import pathlib
from typing import Annotated

import msgspec

from stretto.benchmarks.errors import BenchmarkError

type Count = Annotated[int, msgspec.Meta(ge=1)]


class Decoder(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A decoder-only transformer with grouped-query attention and SwiGLU.

    Attributes:
      name: in words.
      layers, hidden, heads, kv_heads, head_dim: as usual.
      feed_forward: width of the SwiGLU layer, of each expert where there are some.
      sequence: tokens of a sequence.
      vocabulary: rows of the embedding and columns of the head, which every device holds whole.
      batch: sequences of a step, over all devices.
      experts, experts_a_token: of a mixture of experts; 0 for one feed-forward layer.
    """

    name: str
    layers: Count
    hidden: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    feed_forward: Count
    sequence: Count
    vocabulary: Count
    batch: Count
    experts: Annotated[int, msgspec.Meta(ge=0)] = 0
    experts_a_token: Annotated[int, msgspec.Meta(ge=0)] = 0

    @property
    def attention_width(self) -> int:
        """Columns of all heads' queries together."""
        return self.heads * self.head_dim

    @property
    def qkv_columns(self) -> int:
        """Columns of queries, keys and values."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def attention_weights(self) -> int:
        """Elements of a layer's attention, over all devices."""
        return self.hidden * (self.qkv_columns + self.attention_width)

    @property
    def feed_forward_weights(self) -> int:
        """Elements of a layer's feed-forward part, of all experts where there are some."""
        return 3 * self.hidden * self.feed_forward * max(1, self.experts)

    @property
    def end_weights(self) -> int:
        """Elements of embedding and head."""
        return 2 * self.vocabulary * self.hidden

    @property
    def weights(self) -> int:
        """Elements of the whole model."""
        layer = self.attention_weights + self.feed_forward_weights
        return self.layers * layer + self.end_weights


def folder() -> pathlib.Path:
    """The folder of the models."""
    return pathlib.Path(str(importlib.resources.files("stretto.configs"))) / "models"


def names() -> list[str]:
    """The models that Stretto ships."""
    return sorted(path.stem for path in folder().glob("*.toml"))


def read(name: str) -> Decoder:
    """A model by its name, or the one in a file.

    Raises:
      BenchmarkError: there is none, it is damaged, or its sizes do not fit each other.
    """
    path = folder() / f"{name}.toml" if name in names() else pathlib.Path(name)
    try:
        decoder = msgspec.toml.decode(path.read_bytes(), type=Decoder)
    except OSError as error:
        known = ", ".join(names())
        raise BenchmarkError(f"MODEL {name}: {error.strerror}; there are {known}.") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        example = folder() / f"{names()[0]}.toml"
        raise BenchmarkError(f"MODEL {name}: {error}; see {example} for one.") from None
    if decoder.heads % decoder.kv_heads:
        raise BenchmarkError(
            f"MODEL {name}: heads={decoder.heads} must be a multiple of"
            f" kv_heads={decoder.kv_heads}; change one of them."
        )
    if bool(decoder.experts) != bool(decoder.experts_a_token) or (
        decoder.experts_a_token > decoder.experts
    ):
        raise BenchmarkError(
            f"MODEL {name}: experts_a_token={decoder.experts_a_token} must be from 1 to"
            f" experts={decoder.experts}; leave both out for a model without experts."
        )
    return decoder
