"""Layers of Flax NNX that overlap a model's communication with its products.

`pip install 'stretto[flax]'` brings Flax. docs/models/from_your_model.md has the way from a
model's own layers to these.
"""

try:
    import flax  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "flax":
        raise
    raise ModuleNotFoundError(
        "stretto.flax needs Flax, which is not installed: pip install 'stretto[flax]'.",
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
