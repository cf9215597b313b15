"""What is trained (`Sizes`), how long (`Training`), and how it is computed (`Execution`)."""

from __future__ import annotations

import dataclasses
from typing import Literal

from stretto.distributed import compiling
from stretto.distributed.simulating import is_simulating

VOCABULARY = 256  # the model reads and writes bytes
BALANCE = 0.01  # what the load-balancing loss counts in gradients


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a decoder: `hidden` wide, `layers` deep, reading `sequence` bytes at once.

    Attributes:
      heads: heads of queries; `head_dim` is `hidden / heads`.
      kv_heads: heads of keys and values, each shared by `heads / kv_heads` heads of queries.
      feed_forward: width of the SwiGLU layer between its two projections; of each expert, if any.
      experts: of every layer, in place of one feed-forward layer; 0 for none.
      top_k: experts that a byte goes to.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    feed_forward: int
    sequence: int
    experts: int = 0
    top_k: int = 0

    def __post_init__(self) -> None:
        if bool(self.experts) != bool(self.top_k) or not 0 <= self.top_k <= self.experts:
            raise ValueError(
                f"top_k={self.top_k} must be from 1 to experts={self.experts}; pass --experts and"
                " --top-k, or neither."
            )
        if self.hidden % self.heads or self.head_dim % 2:
            raise ValueError(
                f"hidden={self.hidden} must be a multiple of 2 * heads={2 * self.heads}: every"
                " head has an even number of columns, which rotary positions turn in pairs."
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}.")

    @property
    def head_dim(self) -> int:
        """Columns of one head."""
        return self.hidden // self.heads

    def check_fits(self, dp: int, tp: int, batch: int, cp: int = 1) -> None:
        """Raises ValueError unless a `dp` x `cp` x `tp` mesh can compute `batch` sequences."""
        if self.experts and cp > 1:
            raise ValueError(
                f"experts={self.experts} and cp={cp}: the example has experts or split sequences;"
                " leave out --experts or --cp."
            )
        if self.experts % (dp * tp):
            raise ValueError(
                f"experts={self.experts} must be a multiple of the dp={dp} x tp={tp} devices, which"
                " have as many each; pass other --experts, or fewer devices."
            )
        for name in ("kv_heads",) if self.experts else ("kv_heads", "feed_forward"):
            if getattr(self, name) % tp:
                raise ValueError(
                    f"{name}={getattr(self, name)} must be a multiple of tp={tp}, which splits it;"
                    " pass a smaller --tp and the rest of the devices as --dp."
                )
        if batch % dp:
            raise ValueError(
                f"batch={batch} must be a multiple of dp={dp}, which splits it; pass another"
                " --batch."
            )
        if cp > 1 and self.sequence % (2 * cp):
            raise ValueError(
                f"sequence={self.sequence} must be a multiple of {2 * cp}: each of cp={cp} devices"
                " has a chunk from both of its ends; pass another --sequence."
            )
        if batch // dp * (self.sequence // cp) % tp:
            raise ValueError(
                f"a group's {batch // dp} x {self.sequence // cp} bytes must be a multiple of"
                f" tp={tp}, which splits them; pass another --sequence or --batch."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """A run's length and its optimiser: AdamW, warmed up, then on half a cosine to a tenth.

    `batch` counts sequences, over all devices. Validation and checkpoints come every
    `evaluate_every` steps and after the last one. `warmup` is a share of the steps.
    """

    steps: int
    batch: int
    learning_rate: float
    evaluate_every: int = 100
    warmup: float = 0.1
    evaluation_batches: int = 4
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
    """How the model is computed: nothing here changes more than rounding, with `fp8` to 8 bits.

    Attributes:
      backend: of the four projections, as `stretto.all_gather_matmul` takes it.
      dtype: of the projections' and the attention's operands; weights are float32.
      attention: implementation of `jax.nn.dot_product_attention`, "xla" or "cudnn". Over split
        sequences, Stretto's attention chooses.
      cp: devices that each sequence is split between, along the mesh axis "cp".
      remat: what the backward pass computes again in place of keeping it: what is "elementwise"
        (norms, rotary positions, SwiGLU), or a whole "layer" but for two sums.
      fp8: granularity of the scales of projections and experts in 8 bits, as `stretto.fp8.Recipe`
        has it; None for products of `dtype`.
    """

    backend: str = "auto"
    dtype: str = "float32"
    attention: Literal["xla", "cudnn"] = "xla"
    cp: int = 1
    remat: Literal["elementwise", "layer"] = "elementwise"
    fp8: Literal["tensor", "row", "block"] | None = None

    def __post_init__(self) -> None:
        if self.attention not in ("xla", "cudnn"):
            raise ValueError(f"attention={self.attention!r} must be 'xla' or 'cudnn'.")
        if self.remat not in ("elementwise", "layer"):
            raise ValueError(f"remat={self.remat!r} must be 'elementwise' or 'layer'.")

    @staticmethod
    def suited_to(platform: str, backend: str, dtype: str | None = None) -> Execution:
        """The defaults for CPUs ("cpu") or GPUs: 16 bits wherever a fused kernel may serve."""
        served = is_simulating() or compiling.current() is not None  # `stretto simulate`, `compile`
        kernels = backend in ("pallas", "simulator") or (backend == "auto" and served)
        fused = platform != "cpu" or kernels
        dtype = dtype or ("bfloat16" if fused else "float32")
        cudnn = platform != "cpu" and dtype != "float32"
        return Execution(backend=backend, dtype=dtype, attention="cudnn" if cudnn else "xla")


def replaced[T](record: T, **changes: object) -> T:
    """`record` with those changes that are not None."""
    given = {name: value for name, value in changes.items() if value is not None}
    return dataclasses.replace(record, **given)  # type: ignore[type-var]


SIZES = {
    "tiny": Sizes(layers=2, hidden=128, heads=8, kv_heads=4, feed_forward=320, sequence=128),
    # A few layers of models that need tensor parallelism, to measure them.
    "7b-layer": Sizes(
        layers=4, hidden=4096, heads=32, kv_heads=8, feed_forward=14336, sequence=4096
    ),
    "70b-layer": Sizes(
        layers=2, hidden=8192, heads=64, kv_heads=8, feed_forward=28672, sequence=4096
    ),
}

TRAININGS = {
    "tiny": Training(steps=400, batch=16, learning_rate=4e-3),
    "7b-layer": Training(steps=200, batch=4, learning_rate=3e-4),
    "70b-layer": Training(steps=200, batch=4, learning_rate=1.5e-4),
}
