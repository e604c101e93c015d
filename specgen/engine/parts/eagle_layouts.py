"""Reads and writes heads of EAGLE-1, EAGLE-2 and EAGLE-3 in their published layouts.

EAGLE-1 and 2: the authors' (the config of a Llama), SGLang's (the same under another architecture), vLLM's first (the Llama's
config under `model`) and the early one of speculators (`fusion_fc`, `transformer`). EAGLE-3: the one of the authors, SpecForge
and SGLang (`midlayer`), and the one of speculators and vLLM (`layers.0`, `transformer_layer_config`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from specgen.engine.model_loading import LoadedModel
from specgen.engine.parts.head_tensors import HeadTensors, Shape
from specgen.engine.parts.layer_config import HeadConfig, check_vocabulary, matrix_shape, read_decoder_layers
from specgen.engine.parts.shared_tables import compare_embedding, compare_lm_head
from specgen.engine.parts.weights import EagleWeights

AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"  # the name of the feature layers in config.json

_LAYER_TYPES = ("llama", "qwen2", "qwen3")  # of speculators' layers; those of other types compute something else
_RENAMED = {"midlayer.": "layers.0.", "transformer.": "layers.0.", "fusion_fc.": "fc."}
_VARIANTS = {  # by tensors that only they have
    "fc_norm.": "an EAGLE-3.1 head",
    "input_norm.": "an EAGLE-3 head with a norm before its fc",
    "embedding_layernorm.": "a variant of EAGLE-1 with further norms (HASS)",
    "pre_lm_head_layernorm.": "a variant of EAGLE-1 with further norms (HASS)",
    "hidden_states_layernorm.": "a variant of EAGLE-1 with further norms (HASS)",
    "mask_hidden": "a head for parallel drafting",
}
_OTHER_HEAD = "Take a head of EAGLE-1, EAGLE-2 or EAGLE-3"
_FOR_ANOTHER = "Name a head for this target, or the target that it was made for"


def rename_eagle(name: str) -> str:
    """Returns the name of a head's tensor by EAGLE-1's authors, with all layers under `layers`."""
    for published, own in _RENAMED.items():
        if name.startswith(published):
            return own + name.removeprefix(published)
    return name


def read_eagle(files: HeadTensors, config: Mapping[str, Any], target: LoadedModel) -> EagleWeights:
    """Reads a head whose tensors have EAGLE's names. `config` is the content of its config.json.

    Raises SpecgenError for other variants, for damaged heads and for heads of other targets.
    """
    files.rename(rename_eagle)
    for prefix, kind in _VARIANTS.items():
        if any(name.startswith(prefix) for name in files.names):
            raise files.refuse(f"it is {kind}, which specgen cannot run", _OTHER_HEAD)
    outer, inner = HeadConfig(files, config), _layer_config(files, config)
    width, fused = matrix_shape(files, "fc.weight")
    inputs = matrix_shape(files, "layers.0.self_attn.q_proj.weight")[1]
    if "layers.0.hidden_norm.weight" in files or inputs == 2 * width:
        return _read_eagle3(files, outer, inner, target, width, fused)
    return _read_eagle1(files, outer, inner, target, width, fused)


def _layer_config(files: HeadTensors, config: Mapping[str, Any]) -> HeadConfig:
    """Returns the fields that describe the decoder layer: those of the nested config in layouts that have one."""
    outer = HeadConfig(files, config)
    nested = outer.section("transformer_layer_config")
    if nested:
        if nested.get("model_type", "llama") not in _LAYER_TYPES:
            raise HeadConfig(files, nested).refuse("model_type")
        return HeadConfig(files, nested)
    of_vllm = outer.section("model")
    overridden = {name: value for name, value in config.items() if name in of_vllm}
    return HeadConfig(files, {**of_vllm, **overridden}) if of_vllm else outer


def _read_eagle1(
    files: HeadTensors, outer: HeadConfig, inner: HeadConfig, target: LoadedModel, width: int, fused: int
) -> EagleWeights:
    expected_width = target.model.shape.hidden_size
    if width != expected_width:
        raise files.refuse_target("fc.weight", "a hidden size of", width, target.name, expected_width)
    outer.check_off("layernorms")
    check_vocabulary(files, ["embed_tokens.weight", "lm_head.weight"], target, inner)
    layers = read_decoder_layers(files, inner, target, width, width)
    shapes: dict[str, Shape] = {"fc.weight": (width, 2 * width), **layers.shapes}
    if _has_fusion_bias(files, outer):
        shapes["fc.bias"] = (width,)
    shapes |= {f"layers.{index}.input_layernorm.weight": (width,) for index in range(1, layers.count)}
    tables = {name: (files.shape(name)[0], width) for name in ("embed_tokens.weight", "lm_head.weight") if name in files}
    files.check_shapes(shapes | tables)
    if "lm_head.weight" in files and compare_lm_head(files, "lm_head.weight", target) == "different":
        raise files.refuse(f"its copy of the LM head is not that of {target.name}", _FOR_ANOTHER)
    tensors = _take(files, shapes)
    if "embed_tokens.weight" in files:
        likeness = compare_embedding(files, "embed_tokens.weight", target)
        if likeness == "different":
            raise files.refuse(f"its copy of the embedding is not that of {target.name}", _FOR_ANOTHER)
        if likeness != "equal":
            tensors["embed_tokens.weight"] = files.take("embed_tokens.weight")
    return EagleWeights(1, layers.config, tensors)


def _has_fusion_bias(files: HeadTensors, outer: HeadConfig) -> bool:
    """Whether `fc` has a bias: as config.json says by the name that its layout has for it, or as the file has it."""
    named = next((name for name in ("eagle_fc_bias", "fusion_bias", "bias") if name in outer.values), None)
    stated = None if named is None else outer.switch(named)
    return "fc.bias" in files if stated is None else stated


def _read_eagle3(
    files: HeadTensors, outer: HeadConfig, inner: HeadConfig, target: LoadedModel, width: int, fused: int
) -> EagleWeights:
    feature_width = target.model.shape.hidden_size
    if fused != 3 * feature_width:
        raise files.refuse_target("fc.weight", "three features of", fused // 3, target.name, feature_width)
    is_nested = outer is not inner
    outer.check_off("norm_before_fc", "fc_norm", *(["norm_output"] if is_nested else []))
    if not is_nested and outer.switch("norm_output") is False:
        raise outer.refuse("norm_output")
    check_vocabulary(files, ["embed_tokens.weight", "t2d"], target, inner)
    layers = read_decoder_layers(files, inner, target, width, 2 * width)
    if layers.count != 1:
        raise files.refuse(f"it has {layers.count} decoder layers, and specgen runs EAGLE-3 heads with one", _OTHER_HEAD)
    rows = matrix_shape(files, "lm_head.weight")[0]
    norms = ("layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight", "norm.weight")
    shapes: dict[str, Shape] = {"fc.weight": (width, fused), **layers.shapes, **dict.fromkeys(norms, (width,))}
    shapes["lm_head.weight"] = (rows, width)
    if "fc.bias" in files:
        shapes["fc.bias"] = (width,)
    if width != feature_width or "embed_tokens.weight" in files:
        shapes["embed_tokens.weight"] = (target.model.num_embeddings, width)
    maps: dict[str, Shape] = {}
    if "d2t" in files or rows != target.model.vocab_size:
        maps["d2t"] = (rows,)
    if "t2d" in files:
        maps["t2d"] = files.shape("t2d")[:1]
    files.check_shapes(shapes | maps)
    features = _feature_layers(outer, target)
    vocabulary = _vocabulary(files, rows, target)
    if "embed_tokens.weight" in files:
        likeness = compare_embedding(files, "embed_tokens.weight", target)
        if likeness == "equal":
            del shapes["embed_tokens.weight"]
        elif likeness == "different":  # EAGLE-3 heads may have an embedding of their own
            files.warnings.append(f"its embedding is not that of {target.name}: it may have been made for another target")
    norm_first = bool(outer.switch("norm_before_residual"))
    return EagleWeights(3, layers.config, _take(files, shapes), features, vocabulary, norm_first)


def _take(files: HeadTensors, names: Mapping[str, Shape]) -> dict[str, torch.Tensor]:
    return {name: files.take(name, may_be_zero=name.endswith(".bias")) for name in names}


def _feature_layers(outer: HeadConfig, target: LoadedModel) -> tuple[int, ...]:
    """Returns the layers whose inputs are the features. Files name inputs, or outputs if the first is layer 1."""
    count = target.model.shape.num_layers
    config = HeadConfig(outer.files, outer.section("eagle_config"))
    if config.switch("use_aux_hidden_state") is False:
        raise config.refuse("use_aux_hidden_state")
    of_sglang = AUX_LAYERS in config.values
    named = config if of_sglang else outer
    ids = named.values.get(AUX_LAYERS)
    if ids is None:
        ids = [2, count // 2, count - 3]
        if not 2 < count // 2 < count - 3:
            problem = f"its config.json does not say {AUX_LAYERS}, and {target.name} has too few layers for the default"
            raise outer.files.refuse(problem)
    if not isinstance(ids, list) or len(ids) != 3 or not all(type(each) is int for each in ids):
        raise named.refuse(AUX_LAYERS)
    if of_sglang and ids[0] == 1:
        ids = [each + 1 for each in ids]
    if not all(0 <= each < count for each in ids) or len(set(ids)) != 3:
        raise named.refuse(AUX_LAYERS, f"does not fit {target.name} with its {count} layers")
    return tuple(ids)


def _vocabulary(files: HeadTensors, rows: int, target: LoadedModel) -> torch.Tensor | None:
    """Returns the target's id of each of the head's ids; None if they are equal. Files hold the differences."""
    if "d2t" not in files:
        return None
    ids = files.take_integers("d2t") + torch.arange(rows)
    if int(ids.min()) < 0 or int(ids.max()) >= target.model.vocab_size or not bool((ids.diff() > 0).all()):
        raise files.refuse(f"{files.stored_name('d2t')} does not map its ids to rising ids of {target.name}")
    if "t2d" in files:
        used = torch.zeros(files.shape("t2d")[0], dtype=torch.bool)
        used[ids.clamp(max=len(used) - 1)] = True
        if not torch.equal(used, files.take_integers("t2d") != 0):
            raise files.refuse(f"{files.stored_name('t2d')} and {files.stored_name('d2t')} contradict each other")
    return None if rows == target.model.vocab_size else ids.to(target.device)


def eagle_layout(weights: EagleWeights, target_width: int, vocab_size: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Returns the content of config.json, and the tensors to write: the authors' layout, which for EAGLE-3 is also that of
    SpecForge and SGLang.

    `target_width` is the target's hidden size and `vocab_size` its number of logits.
    """
    config = dict(weights.config)
    tensors = dict(weights.tensors)
    if config["model_type"] == "qwen2":
        config |= {"model_type": "llama", "qkv_bias": True}
    config |= {"vocab_size": vocab_size}
    if weights.version == 1:
        return {**config, "architectures": ["LlamaForCausalLM"], "bias": "fc.bias" in tensors}, tensors
    rows = len(tensors["lm_head.weight"])
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": rows, "target_hidden_size": target_width}
    config["eagle_config"] = {"use_aux_hidden_state": True, AUX_LAYERS: list(weights.feature_layers)}
    if weights.norm_before_residual:
        config["norm_before_residual"] = True
    tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    ids = torch.arange(rows) if weights.vocabulary is None else weights.vocabulary.cpu()
    used = torch.zeros(vocab_size, dtype=torch.bool)
    used[ids] = True
    return config, {**tensors, "d2t": ids - torch.arange(rows), "t2d": used}
