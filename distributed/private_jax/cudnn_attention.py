"""cuDNN's attention with float32 logsumexps, and its derivative from given ones.

The public `jax.nn.dot_product_attention(implementation="cudnn")` rounds the logsumexp, and its
derivative takes the one of its own keys. Attention over keys in parts needs the derivative of each
part from the logsumexp of all. Private JAX, checked on 0.11.2 (cuDNN 9.10 and later): `obstacle`
says where another version has other functions.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax

TWICE = (
    "attention by cuDNN, or by the kernel of method='fused', has no second derivative; cast q, k"
    " and v to float32 and pass method='gather': jax.lax then attends, which has."
)
MOST_DIM, DIM_STEP = 256, 8
_FORWARD = [
    "query",
    "key",
    "value",
    "bias",
    "mask",
    "q_seqlen",
    "kv_seqlen",
    "q_offsets",
    "kv_offsets",
    "fp8_params",
    "scale",
    "mask_type",
    "seed",
    "dropout_rate",
    "qkv_layout",
    "sliding_window_length",
    "use_fp8",
    "return_residual",
]
_BACKWARD = [
    "query",
    "key",
    "value",
    "bias",
    "q_seqlen",
    "kv_seqlen",
    "q_offsets",
    "kv_offsets",
    "page_table_k",
    "page_table_v",
    "activation",
    "fwd_output",
    "grad_output",
    "scale",
    "seed",
    "dropout_rate",
    "variadic_args",
    "mask_type",
    "layout",
    "sliding_window_length",
]


@functools.cache
def obstacle() -> str | None:
    """Why cuDNN's attention cannot be called through this JAX; None if it can."""
    try:
        from jax._src.cudnn import fused_attention_stablehlo as fused

        functions = fused.dot_product_attention, fused._dot_product_attention_bwd_impl
        ask_version = fused.check_cudnn_version
    except (ImportError, AttributeError):
        return f"JAX {jax.__version__} has no private functions for cuDNN's attention."
    if [list(inspect.signature(function).parameters) for function in functions] != [
        _FORWARD,
        _BACKWARD,
    ]:
        return f"JAX {jax.__version__} has other private functions for cuDNN's attention."
    try:
        ask_version()
    except RuntimeError as error:
        return f"cuDNN was not found ({error})"
    return None


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float,
    causal: bool = False,
    window: int | None = None,
    keys: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention and its logsumexp, `[batch, heads, queries]` float32.

    Args:
      q: `[batch, queries, heads, dim]`, in bfloat16 or float16.
      k, v: `[batch, keys, kv_heads, dim]`, of q's type.
      scale: of the scores.
      causal: query i sees keys 0 to i.
      window: the most keys that a query sees; with `causal` only.
      keys: how many of the keys are seen, the first ones; a number that is known when the program
        runs, or one for each sequence of the batch. All by default.
    """
    from jax._src.cudnn import fused_attention_stablehlo as fused

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, *lengths: jax.Array) -> Any:
        queries, keys = lengths or (None, None)
        return cast(Any, fused.dot_product_attention)(
            q,
            k,
            v,
            q_seqlen=queries,
            kv_seqlen=keys,
            scale=scale,
            mask_type=_mask_type(fused, causal, keys),
            sliding_window_length=window,
            return_residual=True,
        )

    lengths = [x for x in _lengths(q, keys) if x is not None]
    out, lse = derived_once(_apart(attend))(q, k, v, *lengths)
    return out, lse


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    out_bar: jax.Array,
    *,
    scale: float,
    causal: bool = False,
    window: int | None = None,
    keys: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(q_bar, k_bar, v_bar), of the operands' type: these keys' share.

    Args:
      out, lse: of all keys that the queries see, which may be more than are given here.
      out_bar: the cotangent of `out`.
      others: as for `forward`.
    """
    from jax._src.cudnn import fused_attention_stablehlo as fused

    mask_type = _mask_type(fused, causal, keys)
    queries, keys = _lengths(q, keys)
    nothing = jnp.zeros(0, q.dtype)
    lengths = (nothing, nothing) if keys is None else (queries, keys)
    derive = functools.partial(
        fused._dot_product_attention_bwd_p_wrapper.bind,
        scale=scale,
        seed=42,
        dropout_rate=0.0,
        variadic_args=(False, False),
        mask_type=mask_type,
        layout=fused.AttentionLayout.BTNH.value,
        sliding_window_length=window,
    )
    given = q, k, v, nothing, *lengths, nothing, nothing, nothing, nothing, lse, out, out_bar
    q_bar, k_bar, v_bar = derived_once(_apart(derive))(*given)
    return q_bar, k_bar, v_bar


def _apart(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of copies, with copied results (`in_own_memory`); lengths are not copied.

    `derived_once` must guard the copies, too: a copy by bits has no derivative, and outside of the
    guard second derivatives would be zero in place of an error.
    """

    def own(x: jax.Array) -> jax.Array:
        return in_own_memory(x) if x.size and jnp.issubdtype(x.dtype, jnp.floating) else x

    def call(*operands: jax.Array) -> Any:
        return [own(x) for x in function(*map(own, operands))]

    return call


def in_own_memory(x: jax.Array) -> jax.Array:
    """The same bits, in memory of this process alone where kernels' results are in another.

    With a process per GPU XLA keeps what kernels read and write in memory that processes share. It
    compiles cuDNN's attention before it moves arrays there, and looks it up by the memory of its
    operands and results after that: `IndexError: absl::...raw_hash_map<>::at` (JAX 0.11.2, seen on
    H200s).

    XLA removes a copy that it sees through. This one adds a zero, bit by bit, that XLA does not
    know: the highest bit of the device's place.
    """
    axes = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    if not axes or jax.process_count() == 1 or jax.local_device_count() > 1:
        return x
    bits = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    zero = (lax.axis_index(axes).astype(jnp.uint32) >> 31).astype(bits)
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, bits) ^ zero, x.dtype)


def derived_once[Result](function: Callable[..., Result]) -> Callable[..., Result]:
    """`function`, of arrays given by position; NotImplementedError where JAX derives it.

    For what rules of derivatives call: there it is derived for second derivatives only.
    """
    guarded = jax.custom_jvp(function)

    @guarded.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        raise NotImplementedError(TWICE)

    return guarded


def _lengths(q: jax.Array, keys: jax.Array | None) -> tuple[jax.Array | None, jax.Array | None]:
    """How many queries and keys of each sequence count."""
    if keys is None:
        return None, None
    batch, queries = q.shape[:2]
    return jnp.full(batch, queries, jnp.int32), jnp.broadcast_to(keys, batch).astype(jnp.int32)


def _mask_type(fused: Any, causal: bool, keys: jax.Array | None) -> Any:
    types = fused.MaskType
    if keys is None:
        return types.CAUSAL if causal else types.NO_MASK
    return types.PADDING_CAUSAL if causal else types.PADDING
