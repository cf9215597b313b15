"""Layers of Flax NNX that overlap a model's communication with its products.

The layers need Flax: `pip install 'flax>=0.12'`. docs/models/from_your_model.md shows how these
layers replace those of a model.
"""

try:
    import flax  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "flax":
        raise
    raise ModuleNotFoundError(
        "stretto.flax needs Flax, which is not installed: pip install 'flax>=0.12'.",
        name="flax",
    ) from error

from stretto.layers.attention import Attention
from stretto.layers.experts import MixtureOfExperts
from stretto.layers.feed_forward import FeedForward
from stretto.layers.linear import ColumnParallelLinear, RowParallelLinear
from stretto.layers.parallel import Parallel

__all__ = [
    "Attention",
    "ColumnParallelLinear",
    "FeedForward",
    "MixtureOfExperts",
    "Parallel",
    "RowParallelLinear",
]
