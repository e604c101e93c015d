"""The published layouts of trained heads: recognises, reads and writes them.

Medusa: the authors' v0.1, v1.0 and "version 2", and vLLM's. EAGLE-1 and 2: the authors' (the config
of a Llama), SGLang's (the same under another architecture), vLLM's first (the Llama's config under
`model`) and the early one of speculators (`fusion_fc`, `transformer`). EAGLE-3 and 3.1: the one of
the authors, SpecForge and SGLang (`midlayer`), and the one of speculators and vLLM (`layers.0`,
`transformer_layer_config`). GliDe: the authors', a Llama with cross-attention in each layer.
DFlash, DFlash2 and DSpark are in `block_layouts`, assistants of Gemma 4 in `mtp`.

The tensors of all layouts get one set of names (`_NAMES`), and nested fields of configs are moved
to the top level. So from here on there is one layout for each kind of head. A head is checked once,
here: it has to have exactly the expected tensors, with shapes that fit each other and the target.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import BaseModel, Field

from specgen.base import schema
from specgen.base.part_kinds import HeadKind
from specgen.engine.loaded_model import LoadedModel
from specgen.engine.native.architecture import UnsupportedConfig
from specgen.engine.native.config_reading import read_config
from specgen.engine.native.layer_files import EMBEDDING, FINAL_NORM, HEAD, layer_files
from specgen.engine.native.native_model import NativeModel
from specgen.engine.native.tensors import tensor_shapes
from specgen.engine.parts.block import CONTEXT_NORM
from specgen.engine.parts.block_layouts import published_block, read_block
from specgen.engine.parts.eagle import FC, FEATURE_NORM, FIRST_NORM, INPUT_NORMS, TRIAL_TEXT
from specgen.engine.parts.head_files import (
    MEDUSA_FILE,
    OTHER_HEAD,
    are_rising,
    check_size,
    check_vocabulary,
    drop_copies,
    expect,
    matrix_shape,
    open_head,
    take_exactly,
    target_ids,
    unsupported,
)
from specgen.engine.parts.mtp import JOIN, read_assistant
from specgen.engine.parts.part import (
    AssistantWeights,
    BlockWeights,
    DecoderWeights,
    EagleWeights,
    GlideWeights,
    HeadWeights,
    MedusaWeights,
)
from specgen.engine.weights import SINGLE_FILE, Shape, WeightFiles, weights_fingerprint

HOT_TOKENS = "hot_token_ids"  # our name in config.json for FR-Spec's tokens
FEATURES = "eagle_aux_hidden_state_layer_ids"  # the name of the feature layers in config.json
# from config.json to ours
_PASSED_ON = ("intermediate_size", "max_position_embeddings", "hidden_act", "rms_norm_eps")
_ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
# as in transformers for Llama; the base is that of the code of EAGLE's and GliDe's authors,
# whatever the target's is
_DEFAULTS = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10_000.0}
# of speculators' layers; those of other types compute something else
_LAYER_TYPES = ("llama", "qwen2", "qwen3")
_UNSUPPORTED = {
    "layernorms": True,
    "use_remap": True,
    "use_aux_hidden_state": False,
}
_QUERY = "layers.0.cross_attn.q_proj.weight"  # of GliDe
_BLOCK = re.compile(r"blocks\.(\d{1,3})\.layers\.(\d{1,3})\.(weight|bias)")
_MEDUSA_PART = re.compile(r"(model\.)?medusa_heads?\.")
# beginnings of names in files, and those here: EAGLE-1's authors', with all layers under `layers`,
# and vLLM's
_NAMES = (
    (r"((module|draft_model|model|medusa_heads?)\.)+", ""),
    (r"(midlayer|transformer)\.", "layers.0."),
    (r"fusion_fc\.", "fc."),
    (r"(\d{1,3})\.(\d{1,3})\.linear\.", r"blocks.\1.layers.\2."),
    (r"(\d{1,3})\.\d{1,3}\.(?=weight$)", r"lm_heads.\1."),
)

Size = Annotated[int, Field(ge=1, le=1 << 31)]


class HeadFields(BaseModel):
    """The fields of a head's config.json that are read by name. A missing field has its default
    here, and `num_attention_heads` has to be there. The other fields are ignored or checked
    elsewhere."""

    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    vocab_size: Size | None = None
    block_size: Size = 5  # the default of GliDe's authors
    tie_word_embeddings: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    hot_token_ids: list[int] | None = None
    eagle_aux_hidden_state_layer_ids: (
        Annotated[list[int], Field(min_length=3, max_length=3)] | None
    ) = None


class PublishedHead:
    """A head's files, opened and recognised: the names of the tensors decide its `kind`.

    After `read`, `warning` says that the head may have been made for another target, or is None.
    Raises SpecgenError if the files are of no such kind.
    """

    def __init__(self, folder: Path, target: LoadedModel) -> None:
        self.files, self._has_model = open_head(folder, target.device, _NAMES, _MEDUSA_PART)
        self.warning: str | None = None
        self._folder = folder
        self._target = target
        fitting = [kind for kind, layout in _LAYOUTS.items() if layout.tensor in self.files]
        if any(".lora_A." in name for name in self.files.names):
            problem = "it is an adapter of a target (as UNO has), which specgen does not draft with"
            raise self.files.refuse(problem, OTHER_HEAD)
        if not fitting:
            problem = (
                "it is of no kind that specgen knows (its first tensor: "
                f"{self.files.key(min(self.files.names, default='none'))})"
            )
            raise self.files.refuse(
                problem,
                (
                    "Name the folder of a Medusa, EAGLE, GliDe, DFlash or DSpark head, and a "
                    "model with -d"
                ),
            )
        self.kind = fitting[0]

    def read(self) -> HeadWeights | AssistantWeights:
        """Returns the weights, on the target's device and in the dtype of their files. All shapes
        are checked before weights are read.

        Raises SpecgenError for unsupported variants, for damaged heads and for heads of other
        targets.
        """
        files = self.files
        folder = self._folder
        target = self._target
        if self._has_model and weights_fingerprint(folder) != weights_fingerprint(target.folder):
            raise files.refuse(
                "its heads were trained with the model in the same files",
                f"Take that as the target: -t {folder}",
            )
        weights, self.warning = _LAYOUTS[self.kind].read(files, target, folder)
        return weights


# What reads a head: the weights, and what is doubtful about them (None: nothing).
_Reader = Callable[
    [WeightFiles, LoadedModel, Path], tuple[HeadWeights | AssistantWeights, str | None]
]


def _read_assistant(
    files: WeightFiles, target: LoadedModel, folder: Path
) -> tuple[AssistantWeights, None]:
    return read_assistant(files, target, read_config(folder, files.owner)), None


def _read_eagle(
    files: WeightFiles, target: LoadedModel, folder: Path
) -> tuple[EagleWeights, str | None]:
    config, fields = _flat_config(files, folder)
    width = matrix_shape(files, FC)[0]
    is_third = (
        FEATURE_NORM in files
        or matrix_shape(files, "layers.0.self_attn.q_proj.weight")[1] == 2 * width
    )
    read = _read_third_eagle if is_third else _read_first_eagle
    return read(files, target, config, fields)


def _read_first_eagle(
    files: WeightFiles, target: LoadedModel, config: dict[str, Any], fields: HeadFields
) -> tuple[EagleWeights, str | None]:
    """Returns a head of EAGLE-1 or 2."""
    shape = target.shape
    width = matrix_shape(files, FC)[0]
    check_size(files, FC, "a hidden size of", width, target, shape.hidden_size)
    check_vocabulary(files, EMBEDDING, target, fields.vocab_size)

    weights, shapes = _eagle_decoder(files, config, fields, target, width)
    del shapes[FIRST_NORM]
    shapes[FC] = width, 2 * width
    expect(files, shapes, {HEAD: (shape.vocab_size, width)})

    tensors = take_exactly(files, shapes)
    warning = drop_copies(files, tensors, [EMBEDDING, HEAD], target)
    tensors.pop(HEAD, None)  # the target's is used
    if fields.hot_token_ids is None or not isinstance(target.model, NativeModel):
        return EagleWeights(weights.config, tensors, 1), warning
    ids = torch.tensor(fields.hot_token_ids)
    if not are_rising(ids, shape.vocab_size):
        raise files.refuse(
            f"its {HOT_TOKENS} are not rising ids of {target.name}", "Correct its config.json"
        )
    tensors[HEAD] = target.model.head_rows(target.folder, ids)
    return EagleWeights(weights.config, tensors, 1, vocabulary=ids.to(target.device)), warning


def _read_third_eagle(
    files: WeightFiles, target: LoadedModel, config: dict[str, Any], fields: HeadFields
) -> tuple[EagleWeights, str | None]:
    """Returns a head of EAGLE-3 or 3.1."""
    width, fused = matrix_shape(files, FC)
    hidden_size = target.shape.hidden_size
    check_size(files, FC, "three features of", fused // 3, target, hidden_size)
    check_vocabulary(files, "t2d", target, fields.vocab_size)

    weights, shapes = _eagle_decoder(files, config, fields, target, width)
    if weights.architecture.num_layers != 1:
        raise unsupported(files, "num_hidden_layers", weights.architecture.num_layers)
    shapes |= {
        FC: (width, 3 * hidden_size),
        FEATURE_NORM: (width,),
        FINAL_NORM: (width,),
    }
    for name in ("q", "k", "v"):
        attention = f"layers.0.self_attn.{name}_proj.weight"
        shapes[attention] = shapes[attention][0], 2 * width
    _expect_reduced_head(files, shapes, target, width)
    _expect_input_norms(files, shapes, fields, hidden_size)

    tensors = take_exactly(files, shapes)
    warning = drop_copies(files, tensors, [EMBEDDING], target)
    layers = _feature_layers(files, fields, target)
    vocabulary = target_ids(files, tensors, target)
    # SpecForge's true had the other meaning too
    is_known = not fields.norm_output or "transformer_layer_config" in config
    trial = [] if is_known else target.tokenizer.encode(TRIAL_TEXT)
    options = fields.norm_before_residual, fields.norm_output, trial
    return EagleWeights(weights.config, tensors, 3, layers, vocabulary, *options), warning


def _eagle_decoder(
    files: WeightFiles, config: dict[str, Any], fields: HeadFields, target: LoadedModel, width: int
) -> tuple[DecoderWeights, dict[str, Shape]]:
    """Returns `_decoder` with the shapes of what all heads of EAGLE may have besides."""
    shape = target.shape
    weights, shapes = _decoder(files, config, fields, target, width)
    expect(files, shapes, {"fc.bias": (width,)})
    expect(
        files, shapes, {EMBEDDING: (shape.vocab_size, width)}, are_needed=width != shape.hidden_size
    )
    return weights, shapes


def _expect_reduced_head(
    files: WeightFiles, shapes: dict[str, Shape], target: LoadedModel, width: int
) -> None:
    """Adds the shapes of an LM head, perhaps of a reduced vocabulary, and of the maps of its
    ids."""
    vocab_size = target.shape.vocab_size
    rows = matrix_shape(files, HEAD)[0]
    shapes[HEAD] = rows, width
    expect(files, shapes, {"t2d": (vocab_size,)})
    expect(files, shapes, {"d2t": (rows,)}, are_needed=rows != vocab_size)


def _expect_input_norms(
    files: WeightFiles, shapes: dict[str, Shape], fields: HeadFields, hidden_size: int
) -> None:
    """Adds the shapes of EAGLE-3.1's norms before `fc`. Raises SpecgenError for norms of each
    feature and one of all."""
    whole, *single = INPUT_NORMS
    expect(files, shapes, {whole: (3 * hidden_size,)}, are_needed=fields.norm_before_fc)
    expect(
        files,
        shapes,
        dict.fromkeys(single, (hidden_size,)),
        are_needed=fields.fc_norm or single[0] in files,
    )
    if whole in shapes and shapes.keys() & set(single):
        raise files.refuse(
            "it has norms of each feature and one of all (fc_norm and norm_before_fc)", OTHER_HEAD
        )


def _feature_layers(files: WeightFiles, fields: HeadFields, target: LoadedModel) -> tuple[int, ...]:
    """Returns `EagleWeights.feature_layers`. Raises SpecgenError if the target lacks one of
    them."""
    count = target.shape.num_layers
    layers = fields.eagle_aux_hidden_state_layer_ids
    layers = layers or [2, count // 2, count - 3]
    if not all(0 <= layer < count for layer in layers) or len(set(layers)) != 3:
        problem = (
            f"its feature layers {layers} ({FEATURES}) do not fit {target.name} "
            f"with its {count} layers"
        )
        raise files.refuse(problem, "Correct its config.json")
    return tuple(layers)


def _read_glide(files: WeightFiles, target: LoadedModel, folder: Path) -> tuple[GlideWeights, None]:
    config, fields = _flat_config(files, folder)
    shape, (rows, width) = target.shape, matrix_shape(files, _QUERY)
    crossed = shape.num_heads * shape.head_size
    is_tied = fields.tie_word_embeddings and HEAD not in files
    check_size(files, _QUERY, "attention of a width of", rows, target, crossed)
    check_vocabulary(files, EMBEDDING, target, fields.vocab_size)
    weights, shapes = _decoder(files, config, fields, target, width)
    count = weights.architecture.num_layers
    if count > shape.num_layers:
        raise files.refuse(
            f"its {count} layers read from as many of {target.name}, which has {shape.num_layers}"
        )
    shapes[FINAL_NORM] = (width,)
    for index in range(count):
        shapes[f"layers.{index}.cross_attn.q_proj.weight"] = crossed, width
        shapes[f"layers.{index}.cross_attn.o_proj.weight"] = width, crossed
    for name in [EMBEDDING] if is_tied else [EMBEDDING, HEAD]:
        expect(
            files, shapes, {name: (shape.vocab_size, width)}, are_needed=width != shape.hidden_size
        )
    tensors = take_exactly(files, shapes)
    drop_copies(files, tensors, [EMBEDDING, HEAD], target)
    if is_tied and EMBEDDING in tensors:
        tensors[HEAD] = tensors[EMBEDDING]
    return GlideWeights(weights.config, tensors, fields.block_size), None


def _flat_config(files: WeightFiles, folder: Path) -> tuple[dict[str, Any], HeadFields]:
    """Returns the config.json in `folder` with nested fields moved to the top level, and the fields
    of it that are read by name.

    The feature layers are then counted by their inputs. In `eagle_config` they are counted by their
    outputs if the first is layer 1.
    """
    config = read_config(folder, files.owner)
    flat = dict(config)
    layer = config.get("transformer_layer_config")
    for part in (layer, config.get("model"), config.get("eagle_config")):
        flat |= part if isinstance(part, dict) else {}
    fields = schema.check(
        json.dumps(flat), HeadFields, f"{files.owner}: its config.json", "Correct its config.json"
    )
    layers = fields.eagle_aux_hidden_state_layer_ids
    if layers is not None and layers[0] == 1 and flat.get(FEATURES) != config.get(FEATURES):
        fields = fields.model_copy(update={FEATURES: [layer + 1 for layer in layers]})
    for name, value in _UNSUPPORTED.items():
        if flat.get(name) is value:
            raise unsupported(files, name, value)
    if isinstance(layer, dict) and layer.get("model_type", "llama") not in _LAYER_TYPES:
        raise unsupported(files, "model_type", layer["model_type"])
    return flat, fields


def _decoder(
    files: WeightFiles, given: dict[str, Any], fields: HeadFields, target: LoadedModel, width: int
) -> tuple[DecoderWeights, dict[str, Shape]]:
    """Returns the decoder layers of a head, without tensors yet, and the shapes of these. `width`
    is the size of hidden states.

    What config.json (`given`) leaves out is taken from the tensors' shapes. Raises SpecgenError for
    what the native decoder cannot run.
    """
    config = _layers_config(files, given, fields, target, width)
    _set_windows(files, config, given)
    weights = DecoderWeights(config, {})
    shapes = dict[str, Shape]()
    try:
        for index in range(weights.architecture.num_layers):
            shapes |= tensor_shapes(layer_files(weights.architecture, index))
    except UnsupportedConfig as error:
        raise unsupported(files, error.field, error.value) from error
    return weights, shapes


def _layers_config(
    files: WeightFiles, given: dict[str, Any], fields: HeadFields, target: LoadedModel, width: int
) -> dict[str, Any]:
    """Returns the config of a head's layers, without sliding windows; for the arguments see
    `_decoder`."""
    names = " ".join(files.names)
    first = "layers.0.self_attn."
    heads = fields.num_attention_heads
    output_bias = "self_attn.o_proj.bias" in names
    head_size = fields.head_dim or matrix_shape(files, f"{first}q_proj.weight")[0] // heads
    if "self_attn.q_norm." in names:
        model_type = "qwen3"
    elif f"{first}q_proj.bias" in names and not output_bias:
        model_type = "qwen2"
    else:
        model_type = "llama"
    return {
        "model_type": model_type,
        "hidden_size": width,
        "intermediate_size": matrix_shape(files, "layers.0.mlp.gate_proj.weight")[0],
        "num_hidden_layers": max(1, len(set(re.findall(r"\blayers\.(\d+)\.", names)))),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.num_key_value_heads
        or matrix_shape(files, f"{first}k_proj.weight")[0] // (head_size or 1),
        "head_dim": head_size,
        "max_position_embeddings": target.context_limit,
        "vocab_size": target.shape.vocab_size,
        "attention_bias": output_bias,
        "tie_word_embeddings": False,
        **_DEFAULTS,
        **{name: given[name] for name in (*_PASSED_ON, *_ROPE) if given.get(name) is not None},
    }


def _set_windows(files: WeightFiles, config: dict[str, Any], given: dict[str, Any]) -> None:
    """Adds the sliding windows that config.json (`given`) names to the config of a head's layers.
    Raises SpecgenError for those that the layers' family cannot have."""
    types = given.get("layer_types")
    if isinstance(types, list) and "sliding_attention" in types:
        config["sliding_window"] = given.get("sliding_window")
        if config["model_type"] != "llama":
            config |= {"layer_types": types, "use_sliding_window": True}
        elif not config["attention_bias"] and types.count("sliding_attention") == len(types):
            del config["attention_bias"]
            config["model_type"] = "mistral"
        else:
            raise unsupported(files, "layer_types", types)
    elif types is None and given.get("use_sliding_window") is True:
        raise unsupported(files, "use_sliding_window", True)


def _read_medusa(
    files: WeightFiles, target: LoadedModel, folder: Path
) -> tuple[MedusaWeights, None]:
    """Reads Medusa's heads. The numbers of heads, blocks and LM heads are those of the tensors,
    because config files state others.

    A single LM head serves all heads.
    """
    first = "blocks.0.layers.0.weight"
    vocab_size = target.shape.vocab_size
    width = matrix_shape(files, first)[0]
    check_size(files, first, "a hidden size of", width, target, target.shape.hidden_size)
    matches = [match for name in files.names if (match := _BLOCK.fullmatch(name))]
    heads, layers = (range(len({match[group] for match in matches})) for group in (1, 2))
    blocks = [[f"blocks.{head}.layers.{layer}" for layer in layers] for head in heads]
    names = [HEAD] if HEAD in files else [f"lm_heads.{head}.weight" for head in heads]
    if not any(name in files for name in names[1:]):
        names = [name for name in names[:1] if name in files]
    rows = matrix_shape(files, names[0])[0] if names else vocab_size
    shapes: dict[str, Shape] = dict.fromkeys(names, (rows, width))
    for block in itertools.chain.from_iterable(blocks):
        shapes[f"{block}.weight"] = width, width
        expect(files, shapes, {f"{block}.bias": (width,)})
    if "token_map" in files:
        shapes["token_map"] = files.shape("token_map")
    tensors = take_exactly(files, shapes)
    tables = [tensors[name] for name in names]
    ids = tensors.get("token_map")
    if ids is not None and not (tables and are_rising(ids.sort().values, vocab_size)):
        raise files.refuse(
            f"{files.key('token_map')} does not hold different ids of tokens of "
            f"{target.name} for its LM heads"
        )
    if ids is None or rows != len(ids):
        check_size(files, names[0] if names else first, "a vocabulary of", rows, target, vocab_size)
        tables = tables if ids is None else [table[ids.to(table.device)] for table in tables]
    zeros = tensors[first].new_zeros(width)
    read = [
        [(tensors[f"{block}.weight"], tensors.get(f"{block}.bias", zeros)) for block in head]
        for head in blocks
    ]
    own = [tables[min(head, len(tables) - 1)] for head in heads] if tables else None
    return MedusaWeights(read, own, None if ids is None else ids.to(target.device)), None


class _Layout(NamedTuple):
    """A kind of head in its one layout: a `tensor` that it has, and kinds further down do not."""

    tensor: str
    read: _Reader


_LAYOUTS: Mapping[HeadKind, _Layout] = {
    "block": _Layout(CONTEXT_NORM, read_block),
    "medusa": _Layout("blocks.0.layers.0.weight", _read_medusa),
    "eagle": _Layout(FC, _read_eagle),
    "glide": _Layout(_QUERY, _read_glide),
    "mtp": _Layout(JOIN, _read_assistant),
}


def published(
    weights: HeadWeights, target: str, sizes: Mapping[str, int]
) -> tuple[dict[str, Any], dict[str, torch.Tensor], str]:
    """Returns the content of config.json, the tensors to write, and the name of their file, for a
    head that specgen trained.

    The layouts are those of the authors, which SGLang and vLLM read too, and for EAGLE-3 that of
    SpecForge. An EAGLE-1 head of a reduced vocabulary has its ids in config.json besides, which
    others ignore. Medusa heads get "version 2", v0.1 if they have LM heads of their own, and vLLM's
    if these know some of the tokens alone. `target` is the target's name; `sizes` are the target's,
    as in `HeadDescription`.
    """
    if isinstance(weights, MedusaWeights):
        return *_published_medusa(weights, target, sizes), MEDUSA_FILE
    if isinstance(weights, BlockWeights):
        return published_block(weights, sizes), dict(weights.tensors), SINGLE_FILE
    if isinstance(weights, GlideWeights):
        return *_published_glide(weights, sizes), SINGLE_FILE
    return *_published_eagle(weights, sizes), SINGLE_FILE


def _published_medusa(
    weights: MedusaWeights, target: str, sizes: Mapping[str, int]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    config = {
        "vocab_size": sizes["vocab_size"],
        "hidden_size": sizes["hidden_size"],
        "base_model_name_or_path": target,
        "medusa_num_heads": len(weights.blocks),
        "medusa_num_layers": 1,
    }
    ids = weights.vocabulary
    if ids is not None:
        config |= {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "num_heads": len(weights.blocks),
            "num_hidden_layers": 1,
            "medusa_fc_bias": True,
            "truncated_vocab_size": len(ids),
        }
    elif weights.lm_heads is None:
        config["version"] = "2"
    block = "{}.0.linear" if ids is None else "blocks.{}.layers.0"
    table = "{}.1.weight" if ids is None else "lm_heads.{}.weight"
    tensors = {table.format(head): rows for head, rows in enumerate(weights.lm_heads or ())}
    for head, ((matrix, bias),) in enumerate(weights.blocks):
        name = block.format(head)
        tensors |= {f"{name}.weight": matrix, f"{name}.bias": bias}
    return config, tensors if ids is None else {**tensors, "token_map": ids}


def _published_glide(
    weights: GlideWeights, sizes: Mapping[str, int]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    config = {
        **weights.config,
        "vocab_size": sizes["vocab_size"],
        "architectures": ["LlamaForCausalLM"],
        "use_remap": False,
        "block_size": weights.block_size,
        "large_hidden_size": sizes["hidden_size"],
        "large_num_attention_heads": sizes["num_heads"],
        "large_head_dim": sizes["head_size"],
    }
    return config, {f"model.{name}": tensor for name, tensor in weights.tensors.items()}


def _published_eagle(
    weights: EagleWeights, sizes: Mapping[str, int]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    config = {**weights.config, "vocab_size": sizes["vocab_size"]}
    if weights.version == 1:
        config |= {"architectures": ["LlamaForCausalLMEagle"], "bias": True}
        if weights.vocabulary is not None:
            config[HOT_TOKENS] = weights.vocabulary.tolist()
    else:
        config |= {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": len(weights.tensors[HEAD]),
            "eagle_config": {"use_aux_hidden_state": True, FEATURES: list(weights.feature_layers)},
            "target_hidden_size": sizes["hidden_size"],
        }
    if config["model_type"] == "qwen2":
        config |= {"model_type": "llama", "qkv_bias": True}
    if weights.version == 1:
        return config, {name: each for name, each in weights.tensors.items() if name != HEAD}

    own_ids = torch.arange(len(weights.tensors[HEAD]))
    ids = own_ids if weights.vocabulary is None else weights.vocabulary.cpu()
    maps = {
        "d2t": ids - own_ids,
        "t2d": torch.isin(torch.arange(sizes["vocab_size"]), ids),
    }
    tensors = {
        name.replace("layers.0.", "midlayer."): tensor for name, tensor in weights.tensors.items()
    }
    return config, tensors | maps
