"""Whether attention is split by tokens or by heads, or by the fused kernel, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from stretto.kernels.attention import cudnn
from stretto.kernels.attention.layouts import ZIGZAG
from stretto.kernels.attention.masks import Mask
from stretto.kernels.choice import costs
from stretto.kernels.choice.choice import Choice
from stretto.kernels.operations import attention_heads as heads
from stretto.kernels.problem import checks

OP = "context_parallel_attention"
GATHER, HEADS, FUSED, AUTO = "gather", "heads", "fused", "auto"
METHODS = (AUTO, GATHER, HEADS, FUSED)
FASTEST = "the tuned table has it as the fastest at such sizes"
BY_LAX = "the other methods attend by jax.lax where there are segment ids"
NOT_IN_TABLE = "no tuned table has 'fused' as the fastest at such sizes"
UNKNOWN = "a size is known when the program runs."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """What serves.

    Attributes:
      name: "gather", "heads" or "fused".
      by_cudnn: whether cuDNN attends on each device; if not, `jax.lax`. Of "fused" the derivative.
      reason: why it is this one, in words.
      served: by what each device attends, in words.
    """

    name: str
    by_cudnn: bool
    reason: str
    served: str

    def by_kernel(self, reason: str) -> Method:
        """The kernel in its place."""
        return dataclasses.replace(self, name=FUSED, reason=reason)

    def remark(self, choice: Choice, not_by_kernel: str | None) -> str:
        """Further words on the choice of a backend; why the fused kernel does not derive, if so."""
        if self.name == FUSED and choice.backend != "xla":
            said = f"method 'fused', because {self.reason}; its derivative by"
            if not_by_kernel is None:
                return f"{said} the kernel"
            return f"{said} {self.served}; not by the kernel: {not_by_kernel.removesuffix('.')}"
        instead = f" but {GATHER!r} serves in its place" if self.name == FUSED else ""
        return f"method {self.name!r}, because {self.reason}{instead}; attention by {self.served}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """A call, as far as the method depends on it.

    Attributes:
      q, k: the operands, or their shapes and types.
      mask: what holds for all queries.
      layout: of the tokens.
      segments: the types of the documents' ids; none where there are no documents.
      devices: that the sequence is split between.
    """

    q: Any
    k: Any
    mask: Mask
    layout: str
    segments: Sequence[str]
    devices: int

    def unserved(self, method: str) -> str | None:
        """Why cuDNN cannot attend; None if it can."""
        if checks.is_symbolic(self.q, self.k):
            return UNKNOWN
        devices = 1 if method == HEADS else self.devices
        return cudnn.obstacle(self.q, self.mask, segments=bool(self.segments), devices=devices)

    @property
    def not_by_heads(self) -> str | None:
        """Why the heads cannot be shared out; None if they can."""
        return heads.obstacle(self.q.shape[2], self.k.shape[2], self.devices)


def chosen(method: str, question: Question) -> Method:
    """The method that `method` names, or that "auto" takes.

    Raises:
      ValueError: an unknown method, or heads that the devices cannot share out.
    """
    if method not in METHODS:
        raise ValueError(f"{OP}: method={method!r} is not one of {', '.join(map(repr, METHODS))}.")
    if method == HEADS and (obstacle := question.not_by_heads):
        raise ValueError(f"{OP}: method='heads': {obstacle} Pass method='gather'.")
    name, why = (method, "it was asked for") if method != AUTO else _by_sizes(question)
    unserved = question.unserved(name)
    served = "cuDNN" if unserved is None else f"jax.lax: {unserved.removesuffix('.')}"
    reason = why if method != AUTO or question.devices == 1 else f"{why}; {NOT_IN_TABLE}"
    return Method(name=name, by_cudnn=unserved is None, reason=reason, served=served)


def _by_sizes(question: Question) -> tuple[str, str]:
    if question.devices == 1:
        return GATHER, "one device has all"
    if obstacle := question.not_by_heads:
        return GATHER, obstacle.removesuffix(".")
    if (why := question.unserved(GATHER)) and question.unserved(HEADS) is None:
        return HEADS, f"by tokens {why.removesuffix('.')}"
    if checks.is_symbolic(question.q, question.k):
        return GATHER, UNKNOWN.removesuffix(".")
    gather, by_heads = gather_us(question), heads_us(question)
    name = GATHER if gather <= by_heads else HEADS
    return name, f"it is estimated to be faster (gather {gather:.0f} us, heads {by_heads:.0f} us)"


def gather_us(question: Question) -> float:
    """Microseconds of the busiest device, with its waits.

    Under a causal mask, attention to the own keys overlaps the transfer of the peers' keys.
    """
    batch, tokens, count, dim = question.q.shape
    keys, kv_heads, devices = *question.k.shape[1:3], question.devices
    own = tokens * tokens / 2
    pairs = tokens * keys * devices
    if question.mask.causal:
        last = (devices - 1) * tokens * tokens + own
        pairs = pairs / 2 if question.layout == ZIGZAG else last
    sent = 2 * (devices - 1) * batch * keys * kv_heads * dim * question.q.dtype.itemsize
    hidden = costs.attention_us(batch * count * dim * own) if question.mask.causal else 0.0
    exposed = max(0.0, costs.sent_by_xla_us(sent) - hidden)
    return costs.attention_us(batch * count * dim * pairs) + exposed


def heads_us(question: Question) -> float:
    """Microseconds of any device: all have equal work, and nothing overlaps."""
    batch, tokens, count, dim = question.q.shape
    keys, kv_heads, devices = *question.k.shape[1:3], question.devices
    sent_heads = kv_heads * heads.copies(kv_heads, devices)
    pairs = tokens * keys * devices / (2 if question.mask.causal else 1)
    columns = 2 * tokens * count + 2 * keys * sent_heads
    sent = batch * columns * dim * question.q.dtype.itemsize * (devices - 1) / devices
    return costs.attention_us(batch * count * dim * pairs) + costs.sent_by_xla_us(sent)
