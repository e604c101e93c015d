"""Tiny configs of the native decoder's families, and comparisons with transformers' config classes and rotary modules."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from specgen.engine.model_shape import of_transformers
from specgen.engine.native.architecture import Architecture, of_architecture
from specgen.engine.native.families import read_architecture
from specgen.engine.native.rotary import RotaryTable

_TINY = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
_OWN_HEAD = {
    "gemma": 16,
    "gemma2": 16,
    "gemma3_text": 16,
    "qwen3": 16,
}  # families whose head size does not follow from hidden_size


def sparse(family: str, **changes: Any) -> dict[str, Any]:
    """A tiny config of the older form."""
    own = {"head_dim": _OWN_HEAD[family]} if family in _OWN_HEAD else {}
    return deepcopy({"model_type": family, **_TINY, **own, **changes})


def reference_of(config: dict[str, Any]) -> Any:
    return CONFIG_MAPPING[config["model_type"]].from_dict(deepcopy(config))


def written(reference: Any, *, whole: bool) -> dict[str, Any]:
    """What transformers 5 writes for a config: all fields, or those that differ from the base class."""
    found: dict[str, Any] = json.loads(reference.to_json_string(use_diff=not whole))
    return found


def read_like(config: dict[str, Any], reference: Any) -> Architecture:
    """Reads a config, and compares the numbers that transformers' config holds under the same names."""
    found = read_architecture(config)
    heads = reference.num_attention_heads
    assert found.hidden_size == reference.hidden_size
    assert found.intermediate_size == reference.intermediate_size
    assert (found.num_heads, found.num_kv_heads) == (heads, reference.num_key_value_heads)
    assert found.head_size == (getattr(reference, "head_dim", None) or reference.hidden_size // heads)
    assert found.vocab_size == reference.vocab_size
    assert (found.tied, found.default_eos) == (reference.tie_word_embeddings, reference.eos_token_id)
    assert found.dtype == (None if reference.dtype is None else str(reference.dtype).removeprefix("torch."))
    window = getattr(reference, "sliding_window", None)
    types = getattr(reference, "layer_types", None) or [window and "sliding_attention"] * reference.num_hidden_layers
    assert [layer.window for layer in found.layers] == [window if kind == "sliding_attention" else None for kind in types]
    if found.model_type == "gemma3_text":
        assert [layer.rotary for layer in found.layers] == types
    else:
        rotated = getattr(reference, "no_rope_layers", [True] * len(types))[: len(types)]
        assert [layer.rotary is not None for layer in found.layers] == [bool(entry) for entry in rotated]
    assert found.logit_cap == getattr(reference, "final_logit_softcapping", None)
    assert found.score_cap == (reference.attn_logit_softcapping if found.model_type == "gemma2" else None)
    assert found.residual_scale == getattr(reference, "residual_multiplier", 1.0)
    assert found.logit_scale == getattr(reference, "logit_scale", 1 / getattr(reference, "logits_scaling", 1.0))
    assert of_architecture(found) == of_transformers(reference)
    return found


def assert_same_rotary(found: Architecture, reference: Any, module: Any) -> None:
    """Compares frequencies, and cos and sin near and far, with transformers' rotary module, bit by bit."""
    for key, rotary in found.rotary.items():
        if key in ("full_attention", "sliding_attention") and key not in reference.layer_types:
            continue
        own, options = module(reference), {} if key == "all" else {"layer_type": key}
        prefix = "" if key == "all" else f"{key}_"
        assert list(rotary.inverse_frequencies) == getattr(own, f"{prefix}inv_freq").tolist()
        assert rotary.factor == getattr(own, f"{prefix}attention_scaling")
        assert len(rotary.inverse_frequencies) * 2 == found.rotary_size
        runs = [(torch.arange(20), False)]
        if rotary.long_boundary is not None:
            runs += [(torch.arange(rotary.long_boundary), False), (torch.arange(rotary.long_boundary + 1), True)]
        elif found.model_type == "llama":
            runs.append((torch.tensor([0, 1, 127, 9_000, 20_003]), False))
        for dtype in (torch.float32, torch.bfloat16):
            table = RotaryTable(rotary, "cpu", None if found.rotary_in_float32 else dtype)
            for positions, long in runs:
                if "dynamic" in str(reference.rope_parameters) and int(positions.max()) >= found.max_position_embeddings:
                    continue
                cos, sin = own(torch.zeros(1, dtype=dtype), positions[None], **options)
                half = slice(0, found.rotary_size // 2)
                expected = torch.complex(cos[0, :, half].float(), sin[0, :, half].float())
                torch.testing.assert_close(
                    table.gather(positions, long), expected, rtol=0, atol=1e-7 if dtype.itemsize > 2 else 0
                )
