"""The published layouts of block heads (DFlash, DFlash2, DSpark): reads and writes them.

Three dialects, which differ in where config.json has the fields of the head, and in how the
target's layers are named: the authors' (z-lab: `dflash_config` or beside the others; DeepSpec:
beside the others), SpecForge's (`dflash_config` for both, with `projector_type`), and that of
speculators and vLLM (`speculators_model_type`, the layers under `transformer_layer_config`). A
field in `dflash_config` counts more than one beside it. The tensors are the same. A field that
nothing reads is refused, unless it is known to be irrelevant.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field

from specgen.base import schema
from specgen.engine.loaded_model import LoadedModel
from specgen.engine.native.architecture import UnsupportedConfig, is_irrelevant
from specgen.engine.native.config_reading import read_config
from specgen.engine.native.layer_files import EMBEDDING, FINAL_NORM, HEAD, layer_files
from specgen.engine.native.tensors import tensor_shapes
from specgen.engine.parts.block import (
    CONFIDENCE,
    CONFIDENCE_BIAS,
    CONTEXT_NORM,
    CONVOLUTIONS,
    SUCCESSOR_HEAD,
    SUCCESSORS,
)
from specgen.engine.parts.candidate_selector import (
    PREDECESSORS,
    STATE_PROJECTION,
)
from specgen.engine.parts.candidate_selector import SUCCESSORS as CANDIDATE_SUCCESSORS
from specgen.engine.parts.eagle import FC
from specgen.engine.parts.head_files import (
    OTHER_HEAD,
    check_size,
    check_vocabulary,
    drop_copies,
    expect,
    matrix_shape,
    take_exactly,
    target_ids,
    unsupported,
)
from specgen.engine.parts.part import BlockWeights
from specgen.engine.weights import Shape, WeightFiles, stored_tensors

_NESTED = "dflash_config"
_LAYERS = "transformer_layer_config"
_LAYER_TYPES = ("qwen3", "qwen2", "llama")
_TRAINING = (  # fields that concern training or the file itself
    *(
        "auto_map",
        "num_target_layers",
        "speculators_config",
        "speculators_version",
        "num_anchors",
        "max_anchors",
        "loss_decay_gamma",
    ),
    *("target_hidden_size", "tie_word_embeddings", "base_model_name_or_path", "target_model"),
)
# Fields that change the computation, with the values that change nothing.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "use_swa": (False,),
    "swa_window_size": (),
    "markov_head_type": ("vanilla",),
    "draft_ffn_type": ("dense",),
}
_OF_EXPERTS = (  # speculators writes them also for heads that have none (`draft_ffn_type`: dense)
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "moe_experts_implementation",
)
# Variants that compute something else: their names, and what the names of their architecture, type
# or fields hold.
_OTHERS = (
    ("LiLiCorr", "lilicorr"),
    ("XPress", "xpress"),
    ("Domino", "domino"),
    ("UNO", "uno_"),
    ("UNO", "unodraft"),
    ("Laguna's variant of DFlash", "laguna"),
)
_KINDS = ("architectures", "model_type", "projector_type", "speculators_model_type")
_PROJECTORS = ("dflash", "dflash2", "dspark")
# fields that belong together, and the tensors that they describe
_PAIRS = (
    (("conv_kernel_size", "conv_group_size"), "_conv"),
    (("selector_rank", "selector_top_k"), "candidate_selector"),
)
_CORRECT = "Correct its config.json"
_PICKLED_MASK = "mask_embedding.pt"
_DEFAULT_BLOCK = 16  # rows, of the authors
_DEFAULT_BLOCK_OF_SPECULATORS = 8

Factor = Annotated[float, Field(gt=0, lt=1e6)]
Size = Annotated[int, Field(ge=1, le=1 << 20)]


class BlockFields(BaseModel):
    """The fields of a block head in config.json, whatever its dialect. A missing field has its
    default here."""

    block_size: Annotated[int, Field(ge=2, le=256)] | None = None
    mask_token_id: Annotated[int, Field(ge=0)]
    target_layer_ids: Annotated[list[int], Field(min_length=1)] | None = None
    aux_hidden_state_layer_ids: Annotated[list[int], Field(min_length=1)] | None = None
    sample_from_anchor: bool | None = None
    is_causal: bool | None = None
    causal: bool | None = None
    sliding_window_non_causal: bool | None = None
    projector_type: str | None = None
    speculators_model_type: str | None = None
    architectures: list[str] = []
    vocab_size: Annotated[int, Field(ge=1)] | None = None
    draft_vocab_size: int | None = None
    markov_rank: Annotated[int, Field(ge=0)] | None = None
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False
    input_embedding_scale: Factor = 1.0
    output_multiplier: Factor = 1.0
    final_logit_softcapping: Factor | None = None
    conv_kernel_size: Annotated[int, Field(ge=1, le=64)] | None = None
    conv_group_size: Size | None = None
    selector_rank: Size | None = None
    selector_top_k: Size | None = None

    @property
    def rows(self) -> int:
        """The rows of a block."""
        is_theirs = self.speculators_model_type is not None
        default = _DEFAULT_BLOCK_OF_SPECULATORS if is_theirs else _DEFAULT_BLOCK
        return self.block_size or default

    @property
    def is_dflash2(self) -> bool:
        return any("dflash2" in name.lower() for name in self._kinds)

    @property
    def rows_are_causal(self) -> bool | None:
        """`BlockWeights.causal`."""
        if self.is_causal is not None:
            return self.is_causal
        if self.causal is not None:
            return self.causal
        sees_all = self.sliding_window_non_causal
        if sees_all is None and self.speculators_model_type is not None:
            sees_all = self.is_dflash2
        return False if sees_all else None

    @property
    def from_anchor(self) -> bool:
        """Whether row j predicts the token after its own position: DSpark, and the DFlash heads of
        DSpark's authors."""
        if self.sample_from_anchor is not None:
            return self.sample_from_anchor
        return self.markov_rank is not None or any("dspark" in name.lower() for name in self._kinds)

    @property
    def _kinds(self) -> Sequence[str]:
        """What the config calls the kind of the head."""
        return self.projector_type or "", self.speculators_model_type or "", *self.architectures


def read_block(
    files: WeightFiles, target: LoadedModel, folder: Path
) -> tuple[BlockWeights, str | None]:
    """Returns the weights of the head in `folder`, and a warning if it may have been made for
    another target (else None).

    Raises SpecgenError for other variants, for damaged heads and for heads of other targets.
    """
    config = read_config(folder, files.owner)
    _check_variant(files, config)
    if (folder / _PICKLED_MASK).exists():
        problem = (
            f"it has its mask's embedding in {_PICKLED_MASK}, a pickle, which can run code when "
            "it is read"
        )
        raise files.refuse(problem, OTHER_HEAD)
    fields, layers = _fields(files, config)
    if fields.projector_type not in (None, *_PROJECTORS):
        raise unsupported(files, "projector_type", fields.projector_type)
    _check_pairs(files, fields)
    if fields.selector_rank or fields.conv_group_size:
        _check_dflash2(files, fields, target, folder)
    width = matrix_shape(files, FC)[0]
    check_size(files, FC, "a hidden size of", width, target, target.shape.hidden_size)
    check_vocabulary(files, "t2d", target, fields.vocab_size)
    try:
        weights = _without_tensors(fields, layers, target, width)
        taps = _taps(files, fields, target, weights.architecture.num_layers)
        shapes = _shapes(weights, len(taps), width)
    except UnsupportedConfig as error:
        raise unsupported(files, error.field, error.value) from error
    rows = _expect_tables(files, shapes, fields, target.shape.vocab_size, width)
    _expect_convolutions(files, shapes, fields, weights.architecture.num_layers, width)

    tensors = take_exactly(files, shapes)
    names = [EMBEDDING, HEAD] if rows == target.shape.vocab_size else [EMBEDDING]
    warning = drop_copies(files, tensors, names, target)
    vocabulary = target_ids(files, tensors, target)
    return replace(weights, tensors=tensors, feature_layers=taps, vocabulary=vocabulary), warning


def _without_tensors(
    fields: BlockFields, layers: dict[str, Any], target: LoadedModel, width: int
) -> BlockWeights:
    """Returns a head of these fields, without tensors yet; `layers` is the config of its layers."""
    sizes = {
        "hidden_size": width,
        "vocab_size": target.shape.vocab_size,
        "max_position_embeddings": target.context_limit,
    }
    return BlockWeights(
        layers | sizes,
        {},
        fields.rows,
        fields.mask_token_id,
        from_anchor=fields.from_anchor,
        causal=fields.rows_are_causal,
        embedding_scale=fields.input_embedding_scale,
        logit_scale=fields.output_multiplier,
        logit_cap=fields.final_logit_softcapping,
        conv_group=fields.conv_group_size or 0,
        candidates=fields.selector_top_k or 0,
    )


def _shapes(weights: BlockWeights, taps: int, width: int) -> dict[str, Shape]:
    """Returns the shapes of the tensors that all heads have."""
    shapes: dict[str, Shape] = {
        FC: (width, taps * width),
        CONTEXT_NORM: (width,),
        FINAL_NORM: (width,),
    }
    for index in range(weights.architecture.num_layers):
        shapes |= tensor_shapes(layer_files(weights.architecture, index))
    return shapes


def _expect_tables(
    files: WeightFiles, shapes: dict[str, Shape], fields: BlockFields, vocab_size: int, width: int
) -> int:
    """Adds the shapes of a head's tables, perhaps of a reduced vocabulary, and of its Markov and
    confidence heads and its selector. Returns the number of rows of its LM head.

    Raises SpecgenError if the vocabulary lacks the mask token.
    """
    rows = matrix_shape(files, HEAD)[0] if HEAD in files else vocab_size
    rank = fields.markov_rank or 0
    if rank:
        shapes |= {SUCCESSORS: (vocab_size, rank), SUCCESSOR_HEAD: (rows, rank)}
    if fields.selector_rank:
        table = vocab_size, fields.selector_rank
        shapes |= {PREDECESSORS: table, CANDIDATE_SUCCESSORS: table}
        shapes[STATE_PROJECTION] = fields.selector_rank, width
        if rows != vocab_size:
            raise unsupported(files, "draft_vocab_size", rows)
    if fields.enable_confidence_head:
        read = width + (rank if fields.confidence_head_with_markov else 0)
        shapes |= {CONFIDENCE: (1, read), CONFIDENCE_BIAS: (1,)}
    expect(
        files,
        shapes,
        {EMBEDDING: (vocab_size, width), HEAD: (rows, width), "t2d": (vocab_size,)},
    )
    expect(files, shapes, {"d2t": (rows,)}, are_needed=rows != vocab_size)
    if fields.mask_token_id >= vocab_size:
        raise unsupported(files, "mask_token_id", fields.mask_token_id)
    return rows


def _fields(files: WeightFiles, config: dict[str, Any]) -> tuple[BlockFields, dict[str, Any]]:
    """Returns the head's fields, and the config of its layers. Raises SpecgenError for a field that
    is not known here."""
    known = BlockFields.model_fields.keys()
    nested = config.get(_NESTED)
    inner = config.get(_LAYERS)
    for name, part in ((_NESTED, nested), (_LAYERS, inner)):
        if part is not None and not isinstance(part, dict):
            raise unsupported(files, name, part)
    outer = {name: value for name, value in config.items() if name not in (_NESTED, _LAYERS)}
    for part in (outer, nested or {}):
        for name, value in part.items():
            if name in _NEUTRAL and value is not None and value not in _NEUTRAL[name]:
                raise unsupported(files, name, value)
    given = outer | (nested or {})
    ours = {*known, *_NEUTRAL, *_TRAINING}
    if given.get("draft_ffn_type") is not None:
        ours |= set(_OF_EXPERTS)
    if inner is not None:  # then `read_architecture` does not see the fields beside the layers'
        for name, value in given.items():
            if name not in ours and not is_irrelevant(name, value):
                raise unsupported(files, name, value)
    own = {name: value for name, value in given.items() if name in known}
    fields = schema.check(json.dumps(own), BlockFields, f"{files.owner}: its config.json", _CORRECT)
    layers = given if inner is None else inner
    ours.remove("vocab_size")
    layers = {name: layers[name] for name in sorted(layers) if name not in ours}
    layers.setdefault("model_type", "qwen3")
    types = layers.get("layer_types")
    if isinstance(types, list) and "sliding_attention" in types:
        layers["use_sliding_window"] = True
    if layers["model_type"] not in _LAYER_TYPES:
        raise unsupported(files, "model_type", layers["model_type"])
    return fields, layers


def _check_variant(files: WeightFiles, config: dict[str, Any]) -> None:
    """Raises SpecgenError for variants that compute something else, by their names."""
    parts = [config, *(config.get(name) for name in (_NESTED, _LAYERS))]
    words: list[object] = []
    for part in parts:
        if isinstance(part, dict):
            words += [*part, *(part.get(name) for name in _KINDS)]
    text = str(words).lower()
    for name, mark in _OTHERS:
        if mark in text:
            raise files.refuse(f"it is a head of {name}, which specgen does not run", OTHER_HEAD)


def _check_pairs(files: WeightFiles, fields: BlockFields) -> None:
    """Raises SpecgenError unless the fields of DFlash2's parts are there together, and where the
    head's kind or its tensors ask for them."""
    for names, part in _PAIRS:
        missing = [name for name in names if getattr(fields, name) is None]
        if len(missing) == 1:
            (given,) = set(names) - set(missing)
            raise files.refuse(f"its config.json has {given} without {missing[0]}", _CORRECT)
        is_needed = fields.is_dflash2 or any(f"{part}." in name for name in files.names)
        if missing and is_needed:
            raise files.refuse(f"its config.json lacks {' and '.join(names)}", _CORRECT)


def _check_dflash2(
    files: WeightFiles, fields: BlockFields, target: LoadedModel, folder: Path
) -> None:
    """Raises SpecgenError for what DFlash2 heads cannot have, and for float16, in which their
    activations become infinite."""
    if any(dtype == "F16" for _, dtype in stored_tensors(folder).values()):
        problem = "its weights are stored in float16, in which DFlash2's activations overflow"
        raise files.refuse(problem, "Take weights in bfloat16 or float32")
    if target.dtype == torch.float16:
        problem = f"{target.name} runs in float16, in which DFlash2's activations overflow"
        raise files.refuse(problem, "Load it with --dtype bfloat16 or float32")
    for name in ("sample_from_anchor", "markov_rank"):
        if getattr(fields, name):
            raise unsupported(files, name, getattr(fields, name))
    if fields.selector_top_k is not None and fields.selector_top_k > target.shape.vocab_size:
        raise unsupported(files, "selector_top_k", fields.selector_top_k)


def _expect_convolutions(
    files: WeightFiles, shapes: dict[str, Shape], fields: BlockFields, layers: int, width: int
) -> None:
    """Adds the shapes of the convolutions of a head's layers, if there are any."""
    group = fields.conv_group_size
    taps = fields.conv_kernel_size
    if group is None or taps is None:
        return
    if width % group:
        raise unsupported(files, "conv_group_size", group)
    for index in range(layers):
        for name in CONVOLUTIONS:
            prefix = f"layers.{index}.{name}."
            shapes[f"{prefix}base_kernel"] = 2, taps, width
            shapes[f"{prefix}kernel_projection.weight"] = 2 * taps * (width // group), width


def _taps(
    files: WeightFiles, fields: BlockFields, target: LoadedModel, layers: int
) -> tuple[int, ...]:
    """Returns the numbers of the hidden states that the head reads, as in
    `EagleWeights.feature_layers`.

    `target_layer_ids` names layers by their output (-1: the embeddings), speculators by the numbers
    of the hidden states.
    """
    count = target.shape.num_layers
    taps = fields.aux_hidden_state_layer_ids
    if taps is None:
        ids = fields.target_layer_ids or default_layers(count, layers)
        taps = [layer + 1 for layer in ids]
    if not all(0 <= tap <= count for tap in taps):
        raise unsupported(
            files, "target_layer_ids", fields.target_layer_ids or fields.aux_hidden_state_layer_ids
        )
    return tuple(taps)


def default_layers(count: int, taps: int) -> list[int]:
    """Returns the layers (indices from 0) whose outputs a head reads by default, if it reads those
    of `taps` layers of a target with `count` layers."""
    if taps == 1:
        return [count // 2]
    return [round(1 + index * (count - 4) / (taps - 1)) for index in range(taps)]


def published_block(weights: BlockWeights, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Returns the content of config.json in DeepSpec's dialect, for a DSpark head that specgen
    trained. `sizes` has the target's `vocab_size`."""
    config = {
        **weights.config,
        "vocab_size": sizes["vocab_size"],
        "architectures": ["Qwen3DSparkModel"],
    }
    config |= {
        "block_size": weights.block_size,
        "mask_token_id": weights.mask_id,
        "markov_head_type": "vanilla",
    }
    config |= {"target_layer_ids": [tap - 1 for tap in weights.feature_layers]}
    config |= {"markov_rank": weights.tensors[SUCCESSORS].shape[1], "is_causal": weights.causal}
    config |= {
        "input_embedding_scale": weights.embedding_scale,
        "output_multiplier": weights.logit_scale,
    }
    config |= {"final_logit_softcapping": weights.logit_cap}
    config |= {
        "enable_confidence_head": CONFIDENCE in weights.tensors,
        "confidence_head_with_markov": True,
    }
    return config
