"""The published layouts of trained heads: recognises, reads and writes them.

Medusa: the authors' v0.1, v1.0 and "version 2", and vLLM's. EAGLE-1 and 2: the authors' (the config of a Llama), SGLang's (the
same under another architecture), vLLM's first (the Llama's config under `model`) and the early one of speculators (`fusion_fc`,
`transformer`). EAGLE-3: the one of the authors, SpecForge and SGLang (`midlayer`), and the one of speculators and vLLM
(`layers.0`, `transformer_layer_config`). GliDe: the authors', a Llama with cross-attention in each layer.

A head is checked once, here: exactly the expected tensors, with shapes that fit each other and the target.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from specgen.engine.model_loading import LoadedModel
from specgen.engine.native.families import read_config
from specgen.engine.native.layer_weights import EMBEDDING, FINAL_NORM, HEAD
from specgen.engine.parts.head_config import (
    FOR_ANOTHER,
    MEDUSA_FILE,
    OTHER_HEAD,
    HeadFields,
    check_vocabulary,
    compare_table,
    decoder_layers,
    matrix_shape,
    open_head,
    read_fields,
    refuse_target,
    take_exactly,
)
from specgen.engine.parts.weights import EagleWeights, GlideWeights, HeadKind, HeadWeights, MedusaWeights
from specgen.engine.weights import SINGLE_FILE, Shape, WeightFiles, weights_fingerprint

FEATURES = "eagle_aux_hidden_state_layer_ids"  # the name of the feature layers in config.json
_FEATURE_NORM, _FIRST_NORM = "layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight"
_KINDS_HINT = "Name the folder of a Medusa, EAGLE or GliDe head"
_LAYER_TYPES = ("llama", "qwen2", "qwen3", None)  # of speculators' layers; those of other types compute something else
_BLOCK_SIZE = 5  # the default of GliDe's authors
_RENAMED = (  # names in files, and those here: EAGLE-1's authors', with all layers under `layers`; Medusa's as in vLLM
    (r"(midlayer|transformer)\.(.+)", r"layers.0.\2"),
    (r"fusion_fc\.(.+)", r"fc.\1"),
    (r"(\d{1,3})\.(\d{1,3})\.linear\.(weight|bias)", r"blocks.\1.layers.\2.\3"),
    (r"(\d{1,3})\.\d{1,3}\.weight", r"lm_heads.\1.weight"),
)
_BLOCK = re.compile(r"blocks\.(\d{1,3})\.layers\.(\d{1,3})\.(weight|bias)")


def _own_name(name: str) -> str:
    for published, own in _RENAMED:
        if found := re.fullmatch(published, name):
            return found.expand(own)
    return name


class PublishedHead:
    """A head's files, opened and recognised: `kind` is known by the names of the tensors.

    After `read`, `warning` says what is doubtful about the head (None: nothing). Raises SpecgenError for other kinds of files.
    """

    def __init__(self, folder: Path, target: LoadedModel) -> None:
        self.files, self._has_model = open_head(folder, target.device)
        self.warning: str | None = None
        self._folder, self._target = folder, target
        self.files.rename(_own_name)
        self.kind = self._kind()

    def _kind(self) -> HeadKind:
        files, names = self.files, set(self.files.names)
        if any(map(_BLOCK.fullmatch, names)):
            return "medusa"
        if any(".cross_attn." in name for name in names):
            return "glide"
        is_model = _FIRST_NORM in names and not names & {"fc.weight", _FEATURE_NORM}
        if is_model:
            raise files.refuse("it is a model, not a head", "Name it as a draft model: -d")
        if any(name.startswith("layers.0.") for name in names):
            return "eagle"
        raise files.refuse(f"it is of no kind that specgen knows (its first tensor: {files.key(min(names))})", _KINDS_HINT)

    def read(self) -> HeadWeights:
        """Returns the weights, on the target's device and in the dtype of their files. All shapes are checked before.

        Raises SpecgenError for other variants, for damaged heads and for heads of other targets.
        """
        files, folder = self.files, self._folder
        if self._has_model and weights_fingerprint(folder) != weights_fingerprint(self._target.folder):
            raise files.refuse("its heads were trained with the model in the same files", f"Take that as the target: -t {folder}")
        config: dict[str, Any] = {}
        if self.kind != "medusa" or (folder / "config.json").exists():
            if not (folder / "config.json").is_file():
                raise files.refuse("it has no config.json")
            config = read_config(folder, files.owner)
        if self.kind == "medusa":
            return _read_medusa(files, read_fields(files, config), self._target)
        if self.kind == "glide":
            return _read_glide(files, read_fields(files, config), self._target)
        return self._read_eagle(config)

    def _read_eagle(self, config: dict[str, Any]) -> EagleWeights:
        files, target = self.files, self._target
        outer, fields = _eagle_fields(files, config)
        (width, fused), hidden = matrix_shape(files, "fc.weight"), target.model.shape.hidden_size
        inputs = matrix_shape(files, "layers.0.self_attn.q_proj.weight")[1]
        is_third = _FEATURE_NORM in files or inputs == 2 * width
        if not is_third and width != hidden:
            raise refuse_target(files, "fc.weight", "a hidden size of", width, target, hidden)
        if is_third and fused != 3 * hidden:
            raise refuse_target(files, "fc.weight", "three features of", fused // 3, target, hidden)
        check_vocabulary(files, [EMBEDDING, "t2d" if is_third else HEAD], target, fields.vocab_size)
        layers, architecture, shapes = decoder_layers(files, fields, target, width)
        shapes["fc.weight"] = width, (3 if is_third else 2) * (hidden if is_third else width)
        shapes |= {"fc.bias": (width,)} if "fc.bias" in files else {}
        if EMBEDDING in files or width != hidden:
            shapes[EMBEDDING] = (target.model.shape.vocab_size if is_third else files.shape(EMBEDDING)[0]), width
        if not is_third:
            del shapes[_FIRST_NORM]
            shapes |= {HEAD: (files.shape(HEAD)[0], width)} if HEAD in files else {}
            tensors = take_exactly(files, shapes)
            self._drop_copies(tensors, refuse=True)
            return EagleWeights(1, layers, tensors)
        if (outer.norm_output is False and outer is fields) or (outer.norm_output and outer is not fields):
            raise files.refuse("it is of a variant that specgen cannot run (norm_output in its config.json)", OTHER_HEAD)
        if len(architecture.layers) != 1:
            raise files.refuse(f"it has {len(architecture.layers)} decoder layers, and specgen runs EAGLE-3 heads with one")
        rows, vocabulary = matrix_shape(files, HEAD)[0], target.model.shape.vocab_size
        for name in ("q", "k", "v"):
            attention = f"layers.0.self_attn.{name}_proj.weight"
            shapes[attention] = shapes[attention][0], 2 * width
        shapes |= {**dict.fromkeys((_FEATURE_NORM, FINAL_NORM), (width,)), HEAD: (rows, width)}
        shapes |= {"d2t": (rows,)} if "d2t" in files or rows != vocabulary else {}
        shapes |= {"t2d": files.shape("t2d")[:1]} if "t2d" in files else {}
        tensors = take_exactly(files, shapes)
        ids = _vocabulary(files, tensors, rows, target)
        self._drop_copies(tensors, refuse=False)
        return EagleWeights(3, layers, tensors, _feature_layers(files, outer, target), ids, bool(outer.norm_before_residual))

    def _drop_copies(self, tensors: dict[str, torch.Tensor], *, refuse: bool) -> None:
        """Removes the copies of the target's embedding and, with `refuse`, of its LM head, which heads of EAGLE-1 cannot have of
        their own. Those of EAGLE-3 may, and get a warning if the embedding is another one."""
        files, target = self.files, self._target
        likeness = compare_table(files, EMBEDDING, target) if EMBEDDING in tensors else "unknown"
        if likeness == "equal":
            del tensors[EMBEDDING]
        elif likeness == "different" and refuse:
            raise files.refuse(f"its copy of the embedding is not that of {target.name}", FOR_ANOTHER)
        elif likeness == "different":
            self.warning = f"its embedding is not that of {target.name}: it may have been made for another target"
        if refuse and tensors.pop(HEAD, None) is not None and compare_table(files, HEAD, target) == "different":
            raise files.refuse(f"its copy of the LM head is not that of {target.name}", FOR_ANOTHER)


def _eagle_fields(files: WeightFiles, config: Mapping[str, Any]) -> tuple[HeadFields, HeadFields]:
    """Returns the fields of config.json, and those that describe the decoder layer: of the nested config, if there is one."""
    outer = read_fields(files, config)
    outer = outer.model_copy(update=_sglang(files, outer))
    if nested := outer.transformer_layer_config:
        fields = read_fields(files, nested)
        if fields.model_type not in _LAYER_TYPES:
            raise files.refuse(
                f"model_type = {fields.model_type!r} in its config.json is not supported", "Correct its config.json"
            )
        return outer, fields
    if of_vllm := outer.model:
        return outer, read_fields(files, of_vllm | {name: value for name, value in config.items() if name in of_vllm})
    return outer, outer


def _sglang(files: WeightFiles, outer: HeadFields) -> dict[str, Any]:
    """Returns the fields under `eagle_config`. There the feature layers are named by their outputs if the first is layer 1."""
    if not outer.eagle_config:
        return {}
    inner = read_fields(files, outer.eagle_config)
    if inner.use_aux_hidden_state is False:
        raise files.refuse("use_aux_hidden_state = False in its config.json is not supported", "Correct its config.json")
    ids = inner.eagle_aux_hidden_state_layer_ids
    return {} if ids is None else {FEATURES: [each + (ids[0] == 1) for each in ids]}


def _feature_layers(files: WeightFiles, outer: HeadFields, target: LoadedModel) -> tuple[int, ...]:
    """Returns the layers whose inputs are the features of EAGLE-3."""
    count, ids = target.model.shape.num_layers, outer.eagle_aux_hidden_state_layer_ids
    if ids is None:
        ids = [2, count // 2, count - 3]
        if not 2 < count // 2 < count - 3:
            raise files.refuse(f"its config.json does not say {FEATURES}, and {target.name} has too few layers for the default")
    if not all(0 <= each < count for each in ids) or len(set(ids)) != 3:
        problem = f"{FEATURES} = {ids} in its config.json does not fit {target.name} with its {count} layers"
        raise files.refuse(problem, "Correct its config.json")
    return tuple(ids)


def _vocabulary(files: WeightFiles, tensors: dict[str, torch.Tensor], rows: int, target: LoadedModel) -> torch.Tensor | None:
    """Takes the maps of an EAGLE-3 head, which hold differences, out of its tensors. Returns the target's id of each of the
    head's ids; None if they are equal."""
    offsets, used = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if offsets is None:
        return None
    ids = offsets + torch.arange(rows)
    if int(ids.min()) < 0 or int(ids.max()) >= target.model.shape.vocab_size or not bool((ids.diff() > 0).all()):
        raise files.refuse(f"{files.key('d2t')} does not map its ids to rising ids of {target.name}")
    if used is not None and not torch.equal(torch.isin(torch.arange(len(used)), ids), used != 0):
        raise files.refuse(f"{files.key('t2d')} and {files.key('d2t')} contradict each other")
    return None if rows == target.model.shape.vocab_size else ids.to(target.device)


def _read_glide(files: WeightFiles, fields: HeadFields, target: LoadedModel) -> GlideWeights:
    shape, query = target.model.shape, "layers.0.cross_attn.q_proj.weight"
    rows, width = matrix_shape(files, query)
    crossed = shape.num_heads * shape.head_size
    if rows != crossed:
        raise refuse_target(files, query, "attention of a width of", rows, target, crossed)
    check_vocabulary(files, [EMBEDDING, HEAD], target, fields.vocab_size)
    config, architecture, shapes = decoder_layers(files, fields, target, width)
    count = len(architecture.layers)
    if count > shape.num_layers:
        raise files.refuse(f"its {count} layers read from as many of {target.name}, which has {shape.num_layers}")
    shapes[FINAL_NORM] = (width,)
    for index in range(count):
        shapes[f"layers.{index}.cross_attn.q_proj.weight"] = crossed, width
        shapes[f"layers.{index}.cross_attn.o_proj.weight"] = width, crossed
    is_tied = bool(fields.tie_word_embeddings) and EMBEDDING in files
    for name, rows in ((EMBEDDING, target.model.shape.vocab_size), (HEAD, target.model.shape.vocab_size)):
        needs_own = width != shape.hidden_size and not (name == HEAD and is_tied)
        shapes |= {name: (rows, width)} if name in files or needs_own else {}
    tensors = take_exactly(files, shapes)
    for name in (EMBEDDING, HEAD):
        if name in tensors and compare_table(files, name, target) == "equal":
            del tensors[name]
    if is_tied and HEAD not in files and EMBEDDING in tensors:
        tensors[HEAD] = tensors[EMBEDDING]
    return GlideWeights(config, tensors, fields.block_size or _BLOCK_SIZE)


def _read_medusa(files: WeightFiles, fields: HeadFields, target: LoadedModel) -> MedusaWeights:
    """Reads Medusa's heads. How many heads and blocks there are is counted: config files state other numbers."""
    if HEAD in files:
        files.rename(lambda name: "lm_heads.0.weight" if name == HEAD else name)
    first = "blocks.0.layers.0.weight"
    width, expected = matrix_shape(files, first)[0], target.model.shape.hidden_size
    if width != expected:
        raise refuse_target(files, first, "a hidden size of", width, target, expected)
    found = [match for name in files.names if (match := _BLOCK.fullmatch(name))]
    heads, layers = len({match[1] for match in found}), len({match[2] for match in found})
    lm_heads: list[str] = []
    if any(name.startswith("lm_heads.") for name in files.names):
        is_shared = fields.original_lm_head and "lm_heads.0.weight" in files
        lm_heads = [f"lm_heads.{head}.weight" for head in range(1 if is_shared else heads)]
    shapes: dict[str, Shape] = {name: (matrix_shape(files, name)[0], width) for name in lm_heads}
    rows = {count for count, *_ in shapes.values()}
    blocks = [[f"blocks.{head}.layers.{layer}" for layer in range(layers)] for head in range(heads)]
    for block in (block for each in blocks for block in each):
        shapes[f"{block}.weight"] = width, width
        shapes |= {f"{block}.bias": (width,)} if f"{block}.bias" in files else {}
    shapes |= {"token_map": files.shape("token_map")} if "token_map" in files else {}
    tensors = take_exactly(files, shapes)
    order = tensors.get("token_map")
    if order is not None:
        ids = order.sort().values
        if not len(ids) or int(ids[0]) < 0 or int(ids[-1]) >= target.model.shape.vocab_size or not bool((ids.diff() > 0).all()):
            raise files.refuse(f"{files.key('token_map')} does not hold different ids of tokens of {target.name}")
        if not lm_heads:
            raise files.refuse("it has a token_map, but no LM head of its own")
    if len(rows) > 1:
        raise files.refuse("its LM heads have different numbers of rows")
    if order is None or rows != {len(order)}:
        check_vocabulary(files, lm_heads, target)
    tables = [_ordered(tensors[name], order) for name in lm_heads]
    zeros = tensors[first].new_zeros(width)
    read = [[(tensors[f"{block}.weight"], tensors.get(f"{block}.bias", zeros)) for block in each] for each in blocks]
    own = [tables[min(head, len(tables) - 1)] for head in range(heads)] if tables else None
    return MedusaWeights(read, own, None if order is None else order.sort().values.to(target.device))


def _ordered(table: torch.Tensor, token_map: torch.Tensor | None) -> torch.Tensor:
    """Returns the rows of an LM head for ascending ids. It has a row for each id of `token_map`, or for each of the target's."""
    if token_map is None:
        return table
    ordered = token_map.sort()
    return table[(ordered.indices if len(table) == len(token_map) else ordered.values).to(table.device)]


def published(weights: HeadWeights, target: str, sizes: Mapping[str, int]) -> tuple[dict[str, Any], dict[str, torch.Tensor], str]:
    """Returns the content of config.json, the tensors to write, and the name of their file, for a head that specgen trained.

    The layouts are those of the authors, which SGLang and vLLM read too, and for EAGLE-3 SpecForge; Medusa: "version 2", or v0.1
    if it has LM heads of its own. `target` is the target's name, `sizes` are its own, see `HeadDescription`.
    """
    vocab_size, config = sizes["vocab_size"], dict[str, Any]()
    if isinstance(weights, MedusaWeights):
        config = {"hidden_size": sizes["hidden_size"], "vocab_size": vocab_size, "base_model_name_or_path": target}
        config |= {"medusa_num_heads": len(weights.blocks), "medusa_num_layers": 1}
        named = [(f"{head}.0.linear", *block) for head, (block,) in enumerate(weights.blocks)]
        tensors = {f"{name}.weight": weight for name, weight, _ in named} | {f"{name}.bias": bias for name, _, bias in named}
        if weights.lm_heads is None:
            return config | {"version": "2"}, tensors, MEDUSA_FILE
        return config, tensors | {f"{head}.1.weight": each for head, each in enumerate(weights.lm_heads)}, MEDUSA_FILE
    config, tensors = {**weights.config, "architectures": ["LlamaForCausalLM"], "vocab_size": vocab_size}, dict(weights.tensors)
    if isinstance(weights, GlideWeights):
        large = {"large_hidden_size": "hidden_size", "large_num_attention_heads": "num_heads", "large_head_dim": "head_size"}
        config |= {"use_remap": False, "block_size": weights.block_size} | {name: sizes[own] for name, own in large.items()}
        return config, {f"model.{name}": each for name, each in tensors.items()}, SINGLE_FILE
    if config["model_type"] == "qwen2":
        config |= {"model_type": "llama", "qkv_bias": True}
    rows, features = len(tensors[HEAD]), {"use_aux_hidden_state": True, FEATURES: list(weights.feature_layers)}
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": rows, "eagle_config": features}
    config |= {"target_hidden_size": sizes["hidden_size"]}
    ids = torch.arange(rows) if weights.vocabulary is None else weights.vocabulary.cpu()
    maps = {"d2t": ids - torch.arange(rows), "t2d": torch.isin(torch.arange(vocab_size), ids)}
    return config, {name.replace("layers.0.", "midlayer."): each for name, each in tensors.items()} | maps, SINGLE_FILE
