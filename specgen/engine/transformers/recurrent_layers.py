"""Recurrent layers of transformers' models: their own code, with convolutions and recurrences that
`native.recurrent_states` computes.

Transformers' mixers ask the cache for a convolution's inputs and for a state, and hand both to
functions of their module. `KVCache` answers with records that can be rolled back, and each mixer
object gets a `forward` in which these functions are replaced by ones that know records. Without a
cache they are transformers' own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus
from transformers.activations import ACT2FN

from specgen.engine.native.recurrent_states import ConvRecords, StateRecords, Steps, unit_length

_STATE_METHODS = frozenset(
    {"get_conv_state", "update_conv_state", "get_recurrent_state", "update_recurrent_state"}
)
# families whose limit of time steps transformers applies in some passes only, other engines nowhere
_UNLIMITED = ("nemotron_h",)
_NO_LIMIT = 0.0, torch.inf
_STEP = "mamba2_selective_state_update"
# layers that need no state but a KV cache
_ATTENTION_TYPES = frozenset(
    {"full_attention", "sliding_attention", "chunked_attention", "attention"}
)
RECURRENT_TYPES = frozenset({"linear_attention", "conv", "hybrid"})
_PLAIN_TYPES = frozenset({"mlp", "moe", "dummy"})  # layers without a state


class ConvInput(NamedTuple):
    """What a convolution reads in a pass: its records, and the inputs `x` [1, channels, n] of the
    pass."""

    steps: Steps
    records: ConvRecords
    x: Tensor


class StateInput(NamedTuple):
    """A layer's records in a pass."""

    steps: Steps
    records: StateRecords


class FixedState(NamedTuple):
    """A state that cannot be rolled back. `what` names the kind of layer that keeps it; `grows`:
    more tokens can be added to it, otherwise all must be run again."""

    what: str
    grows: bool


def replace_recurrences(module: Any) -> FixedState | None:
    """Makes a model's recurrent layers use the records of a `KVCache`. Returns None, or if the
    model keeps a state that cannot be rolled back, this state."""
    config = module.config.get_text_config()
    others = set(getattr(config, "layer_types", None) or ()) - _ATTENTION_TYPES
    recurrent = [
        (part, function)
        for part in module.modules()
        for function in _functions(part)
        if _STATE_METHODS & _names(function)
    ]
    if not recurrent:
        kept = ", ".join(sorted(others)) or (
            config.model_type if getattr(type(module), "_is_stateful", False) else None
        )
        return None if kept is None else FixedState(kept, grows=False)
    for part, function in recurrent:
        if config.model_type in _UNLIMITED:
            part.time_step_limit = _NO_LIMIT
        if (
            function.__name__ != "forward"
            or not _replaced(part, function)
            or others - RECURRENT_TYPES - _PLAIN_TYPES
        ):
            return FixedState(type(part).__name__, grows=True)
    for part, function in recurrent:
        names = {**function.__globals__, **_replaced(part, function)}
        own = FunctionType(
            function.__code__, names, "forward", function.__defaults__, function.__closure__
        )
        own.__kwdefaults__ = function.__kwdefaults__
        # accelerate's hooks
        setattr(
            part,
            "_old_forward" if hasattr(part, "_old_forward") else "forward",
            MethodType(own, part),
        )
    return None


def _functions(part: nn.Module) -> list[Any]:
    methods = (inspect.unwrap(value) for value in vars(type(part)).values() if callable(value))
    return [method for method in methods if isinstance(method, FunctionType)]


def _names(function: Any) -> set[str]:
    return set(function.__code__.co_names)


def _replaced(part: nn.Module, function: Any) -> Mapping[str, Any]:
    """Returns what replaces the functions that the `forward` of a mixer calls; nothing if it
    computes its state in another way.

    Mixers of older versions of transformers do: they read the layers of the cache themselves.
    """
    names = _names(function)
    if "get_conv_state" not in names:
        return {}
    made = {
        name: partial(own, function.__globals__[name])
        for name, own in _OWN.items()
        if name in names
    }
    limit = tuple(getattr(part, "time_step_limit", _NO_LIMIT))
    # transformers applies it to passes of several tokens only
    if _STEP in made and limit != _NO_LIMIT:
        made[_STEP] = partial(made[_STEP], limit=limit)
    is_complete = "causal_conv1d_fn" in made and (
        len(made) > 1 or "get_recurrent_state" not in names
    )
    return made if is_complete else {}


def _convolve(
    theirs: Callable[..., Any],
    inputs: Any,
    weight: Tensor,
    bias: Tensor | None = None,
    **options: Any,
) -> Any:
    """Returns the outputs [1, channels, n] of a short convolution, and of the activation after
    it."""
    if not isinstance(inputs, ConvInput):
        return theirs(inputs, weight, bias, **options)
    steps, records, x = inputs
    convolved = records(steps, x[0].t(), weight, bias)
    activation = options.get("activation")
    convolved = convolved if activation is None else ACT2FN[activation](convolved)
    return convolved.to(x.dtype).t()[None]


def _delta_rule(
    theirs: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    **options: Any,
) -> Any:
    """Returns the output [1, n, value heads, value size] of the gated delta rule, and in place of a
    state nothing."""
    inputs = options["initial_state"]
    if not isinstance(inputs, StateInput):
        return theirs(query, key, value, **options)
    parts = [part[0].float() for part in (query, key, value, options["g"], options["beta"])]
    if options.get("use_qk_l2norm_in_kernel"):
        parts[:2] = map(unit_length, parts[:2])
    own_query, own_key, own_value, decay, beta = parts
    decay = decay if decay.dim() == 3 else decay[..., None]
    read = inputs.records(
        inputs.steps, own_query * query.shape[-1] ** -0.5, own_key, own_value, decay, beta
    )
    return read[None].to(query.dtype), read[:0]


def _scan(
    theirs: Callable[..., Any],
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    **options: Any,
) -> Any:
    """Returns the output [1, n, heads, head size] of Mamba2, and in place of a state nothing."""
    inputs = options["initial_states"]
    if not isinstance(inputs, StateInput):
        return theirs(x, dt, a, b, c, **options)
    step = softplus(dt[0] + options["dt_bias"].to(dt.dtype)).clamp(*options["dt_limit"]).float()
    values = x[0].float()
    read = inputs.records(
        inputs.steps,
        c[0].float(),
        b[0].float(),
        values * step[..., None],
        (step * a.float())[..., None],
    )
    return (read + options["D"][:, None] * values)[None].contiguous(), read[:0]


def _step(
    theirs: Callable[..., Any],
    inputs: Any,
    *of_channels: Tensor,
    limit: Sequence[float] = _NO_LIMIT,
    **options: Any,
) -> Any:
    """Returns the output [1, heads, head size] of Mamba2 for one token, with what `_scan` takes
    repeated for all channels."""
    if not isinstance(inputs, StateInput):
        return theirs(inputs, *of_channels, **options)
    x, dt, a, b, c, d = of_channels
    of_heads = {
        "D": d[:, 0],
        "dt_bias": options["dt_bias"][:, 0],
        "dt_limit": limit,
        "initial_states": inputs,
    }
    scanned = _scan(
        theirs, x[:, None], dt[:, None, :, 0], a[:, 0, 0], b[:, None], c[:, None], **of_heads
    )[0][:, 0]
    gate = options.get("z")
    return scanned if gate is None else scanned * silu(gate)


_OWN: Mapping[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolve,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "torch_recurrent_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "recurrent_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _scan,
    _STEP: _step,
}
