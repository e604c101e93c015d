"""What all published layouts of heads share: the files, config.json, decoder layers, and copies of the target's tables."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, Field

from specgen.base import schema
from specgen.base.errors import SpecgenError
from specgen.engine.model_loading import LoadedModel
from specgen.engine.native.architecture import Architecture, UnsupportedConfig
from specgen.engine.native.families import read_architecture
from specgen.engine.native.layer_weights import EMBEDDING, HEAD, layer_shapes
from specgen.engine.weights import AGAIN, BUFFER, SINGLE_FILE, Shape, WeightFiles, files_of_keys, reading_weights, shown

MEDUSA_FILE = "medusa_lm_head.safetensors"
OTHER_HEAD = "Take another head"
FOR_ANOTHER = "Name a head for this target, or the target that it was made for"

_PREFIXES = re.compile(r"((module|draft_model|model|medusa_heads?)\.)+")
_MEDUSA_PART = re.compile(r"(model\.)?medusa_heads?\.")
_CONVERTER = (
    "import sys, torch; from safetensors.torch import save_file; save_file({name: tensor.clone().contiguous() for path in"
    " sys.argv[2:] for name, tensor in torch.load(path, map_location='cpu', weights_only=True).items()}, sys.argv[1])"
)
_ROPE_BASE = 10_000.0  # where the config has none: that of the code of EAGLE's and GliDe's authors, whatever the target's is
_NORM_EPSILON = 1e-6  # transformers' default for Llama
_MOST_LAYERS = 64
_EMBEDDINGS = (EMBEDDING, "wte.weight", "embed_in.weight", "word_embeddings.weight")
_HEADS = (HEAD, "embed_out.weight")
_ROWS = 128  # that are compared; models that were not made from each other differ in nearly every number
_SIMILAR = 0.5  # the least median cosine of rows of the same origin; those of unrelated models are nearly orthogonal

Size = Annotated[int, Field(ge=1, le=1 << 31)]
Similarity = Literal["equal", "similar", "different", "unknown"]


class HeadFields(BaseModel):
    """The fields of a head's config.json that are read here, in all layouts; None: missing. Others are ignored."""

    num_attention_heads: Size | None = None
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    intermediate_size: Size | None = None
    max_position_embeddings: Size | None = None
    vocab_size: Size | None = None
    block_size: Size | None = None
    model_type: str | None = None
    hidden_act: Any = None
    rms_norm_eps: Any = None
    rope_theta: Any = None
    partial_rotary_factor: Any = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    use_sliding_window: bool | None = None
    tie_word_embeddings: bool | None = None
    original_lm_head: bool | None = None
    norm_before_residual: bool | None = None
    norm_output: bool | None = None
    norm_before_fc: bool | None = None
    layernorms: bool | None = None
    use_remap: bool | None = None
    use_aux_hidden_state: bool | None = None
    eagle_aux_hidden_state_layer_ids: Annotated[list[int], Field(min_length=3, max_length=3)] | None = None
    eagle_config: dict[str, Any] | None = None
    model: dict[str, Any] | None = None
    transformer_layer_config: dict[str, Any] | None = None


def read_fields(files: WeightFiles, config: Mapping[str, Any]) -> HeadFields:
    """Reads a config.json. Raises SpecgenError for fields of other types, and for switches of variants that are not supported."""
    fields = schema.check(json.dumps(config), HeadFields, f"{files.owner}: its config.json", "Correct its config.json")
    for switch in ("norm_before_fc", "layernorms", "use_remap"):
        if getattr(fields, switch):
            raise files.refuse(f"it is of a variant that specgen cannot run ({switch} in its config.json)", OTHER_HEAD)
    return fields


def open_head(folder: Path, device: torch.device) -> tuple[WeightFiles, bool]:
    """Opens the tensors of a head, whose names here have no prefix such as `model.` or `medusa_head.`.

    Also returns whether the files hold the model that the head was trained with (Medusa-2); its tensors are left out. Raises
    SpecgenError if the folder has no safetensors weights, or if they cannot be read.
    """
    owner, single = f"the head {folder}", _weight_file(folder)
    with reading_weights(owner):
        keys = files_of_keys(folder, single)
    parts = {key for key in keys if _MEDUSA_PART.match(key)}
    has_model = bool(parts) and any("layers." in key for key in keys if key not in parts)

    def name_of(key: str) -> str | None:
        is_left_out = BUFFER.search(key) or (has_model and key not in parts)
        return None if is_left_out else _PREFIXES.sub("", key, count=1) if _PREFIXES.match(key) else key

    files = WeightFiles(folder, owner, device, single=single, name_of=name_of)
    if not files.names:
        raise files.refuse("its files hold no tensors")
    for name in files.names:
        files.shape(name)  # reads all headers
    return files, has_model


def _weight_file(folder: Path) -> str:
    """Returns the name of the file that holds the head's tensors, unless there is an index of several files.

    Raises SpecgenError if there is none, and for formats that can run code when they are read.
    """
    found = sorted(folder.glob("*.safetensors"))
    for path in found:
        if not path.is_file():  # reading a FIFO would wait for another program
            raise SpecgenError(f"cannot read the head {folder}: {shown(path.name)} is not a file", AGAIN)
    names = [path.name for path in found]
    if chosen := next((name for name in (MEDUSA_FILE, SINGLE_FILE) if name in names), None):
        return chosen
    if any(folder.glob("*.safetensors.index.json")):
        return SINGLE_FILE
    if len(names) == 1:
        return names[0]
    if names:
        raise SpecgenError(f"the head {folder} has {len(names)} weight files and no index of them", AGAIN)
    others = sorted(path for path in folder.glob("*") if path.suffix in (".bin", ".pt", ".pth"))
    if not others:
        raise SpecgenError(f"there is no head in {folder}: it has no safetensors file", "Name the folder of a trained head")
    paths = " ".join(shlex.quote(str(path)) for path in (folder / SINGLE_FILE, *others))
    raise SpecgenError(
        f"the head {folder} has no safetensors weights (only {shown(others[0].name)}, which can run code when it is read)",
        f'Convert it: python -c "{_CONVERTER}" {paths}',
    )


def take_exactly(files: WeightFiles, expected: Mapping[str, Shape]) -> dict[str, torch.Tensor]:
    """Returns the expected tensors in their stored dtype.

    Raises SpecgenError, before reading any, unless the files have exactly these with these shapes; then for tensors that hold NaN
    or infinities, and for weights that hold only zeros. Those of an untrained Medusa block may.
    """
    files.check(expected)
    if unknown := sorted(files.names - expected.keys()):
        tensors = "a tensor" if len(unknown) == 1 else f"{len(unknown):,} tensors"
        problem = f"it has {tensors} that such a part does not have (the first: {files.key(unknown[0])})"
        raise files.refuse(problem, "It is of a kind that specgen does not know")
    taken = {}
    for name in expected:
        if name in ("d2t", "t2d", "token_map"):
            taken[name] = files.take_integers(name)
            continue
        taken[name] = tensor = files.take(name)
        least, most = torch.aminmax(tensor) if tensor.numel() else (tensor.new_zeros(()), tensor.new_zeros(()))
        if not (torch.isfinite(least) and torch.isfinite(most)):
            raise files.refuse(f"{files.key(name)} holds NaN or infinities", "Its training diverged, or its file is damaged")
        if least == 0 and most == 0 and not name.endswith(".bias") and not name.startswith("blocks."):
            raise files.refuse(f"{files.key(name)} holds only zeros", "It was not trained, or its file is damaged")
    return taken


def matrix_shape(files: WeightFiles, name: str) -> tuple[int, int]:
    """Returns the rows and columns of a matrix that has both. Raises SpecgenError if the tensor is missing or no matrix."""
    shape = files.shape(name)
    if len(shape) != 2 or 0 in shape:
        raise files.refuse(f"{files.key(name)} is no matrix in its file")
    return shape[0], shape[1]


def refuse_target(files: WeightFiles, name: str, what: str, found: int, target: LoadedModel, expected: int) -> SpecgenError:
    """Returns an error for a head that was made for a model with other sizes. `name` is the tensor that shows it."""
    shows = f"{files.key(name)} is for {what} {found:,}, {target.name} has {expected:,}"
    return SpecgenError(f"{files.owner} was made for another target: {shows}", FOR_ANOTHER)


def check_vocabulary(files: WeightFiles, names: list[str], target: LoadedModel, size: int | None = None) -> None:
    """Raises SpecgenError if a tensor among `names` has a row for each token of another vocabulary than the target's.

    If none of them is there, `size` (of config.json) decides; None: it is not known.
    """
    sizes = (target.model.shape.vocab_size, target.model.shape.vocab_size)
    rows = {name: (*files.shape(name), 1)[0] for name in names if name in files}
    for name, count in rows.items() or ({} if size is None else {"config.json": size}).items():
        if count not in sizes:
            raise refuse_target(files, name, "a vocabulary of", count, target, sizes[0])


def decoder_layers(
    files: WeightFiles, fields: HeadFields, target: LoadedModel, width: int
) -> tuple[dict[str, Any], Architecture, dict[str, Shape]]:
    """Returns the decoder layers of a head: a config as in `EagleWeights`, what it describes, and the shapes of their tensors.

    Their hidden states have `width` numbers. What config.json leaves out is taken from the tensors' shapes. Raises SpecgenError
    for what the native decoder cannot run.
    """
    if fields.use_sliding_window:
        raise files.refuse("it is of a variant that specgen cannot run (use_sliding_window in its config.json)", OTHER_HEAD)
    count = len({found[1] for name in files.names if (found := re.match(r"layers\.(\d+)\.", name))})
    if count > _MOST_LAYERS:
        raise files.refuse(f"it has {count:,} layers, which is a model's and not a head's", "Name it as a draft model: -d")
    heads, first = fields.num_attention_heads, "layers.0.self_attn."
    if heads is None:
        raise files.refuse("its config.json does not say num_attention_heads")
    head_size = fields.head_dim or _share(files, f"{first}q_proj.weight", heads)
    kv_heads = fields.num_key_value_heads or _share(files, f"{first}k_proj.weight", head_size)
    inner = fields.intermediate_size or matrix_shape(files, "layers.0.mlp.gate_proj.weight")[0]
    has_norms = any(name.endswith((".q_norm.weight", ".k_norm.weight")) for name in files.names)
    qkv_bias = any(re.search(r"self_attn\.[qkv]_proj\.bias$", name) for name in files.names)
    output_bias = any(name.endswith("self_attn.o_proj.bias") for name in files.names)
    if qkv_bias != output_bias and (output_bias or has_norms):
        raise files.refuse("its attention has a bias in some of its projections only", OTHER_HEAD)
    config = {
        "model_type": "qwen3" if has_norms else "qwen2" if qkv_bias and not output_bias else "llama",
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": max(count, 1),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_size,
        "hidden_act": fields.hidden_act or "silu",
        "rms_norm_eps": _NORM_EPSILON if fields.rms_norm_eps is None else fields.rms_norm_eps,
        "max_position_embeddings": fields.max_position_embeddings or target.context_limit,
        "vocab_size": target.model.shape.vocab_size,
        "attention_bias": output_bias,
        "tie_word_embeddings": False,
        **_rope(fields),
    }
    try:
        architecture = read_architecture(config)
    except UnsupportedConfig as error:
        value = shown(repr(error.value), 40)
        raise files.refuse(f"{shown(error.field)} = {value} in its config.json is not supported", OTHER_HEAD) from error
    shapes: dict[str, Shape] = {}
    for index in range(max(count, 1)):
        shapes |= layer_shapes(architecture, index)
    return config, architecture, shapes


def _rope(fields: HeadFields) -> dict[str, Any]:
    section = fields.rope_scaling or fields.rope_parameters or {}
    base = section.get("rope_theta", _ROPE_BASE if fields.rope_theta is None else fields.rope_theta)
    scaling = {name: value for name, value in section.items() if name != "rope_theta"}
    share = scaling.get("partial_rotary_factor", 1.0 if fields.partial_rotary_factor is None else fields.partial_rotary_factor)
    plain = {"rope_theta": base} | ({} if share == 1 else {"partial_rotary_factor": share})
    is_plain = scaling.get("rope_type", scaling.get("type", "default")) == "default"
    return plain if is_plain else {**plain, "rope_scaling": scaling}


def _share(files: WeightFiles, name: str, parts: int) -> int:
    """Returns the rows of a matrix divided by `parts`."""
    rows = matrix_shape(files, name)[0]
    if rows % parts:
        raise files.refuse(f"the {rows:,} rows of {files.key(name)} are not divisible into heads of its config.json")
    return rows // parts


def compare_table(files: WeightFiles, name: str, target: LoadedModel) -> Similarity:
    """Compares some rows of a head's embedding or LM head with the target's own.

    `equal`: after rounding to the narrower dtype. `similar`: one may have been made from the other by training. `unknown`: the
    target's files do not have the table in a known form.
    """
    rows, width = files.shape(name)
    ranges = [range(row, row + 1) for row in range(0, rows, max(1, rows // _ROWS))]
    suffixes = (*_EMBEDDINGS, *_HEADS) if name == EMBEDDING else (*_HEADS, *_EMBEDDINGS)
    try:
        theirs = WeightFiles(target.folder, target.name, name_of=lambda key: key.removeprefix("model."))
        ends = (next((each for each in theirs.names if f".{each}".endswith(f".{suffix}")), None) for suffix in suffixes)
        found = next((each for each in ends if each is not None), None)
        if found is None or theirs.shape(found) != (rows, width):
            return "unknown"
        of_target = theirs.take_part(found, 0, ranges)
    except SpecgenError:  # the files are named otherwise: transformers may have loaded them
        return "unknown"
    own = files.take_part(name, 0, ranges).cpu()
    dtypes = own.dtype, of_target.dtype
    dtype = next((each for each in (torch.bfloat16, torch.float16, torch.float32) if each in dtypes), torch.float64)
    if torch.equal(own.to(dtype), of_target.to(dtype)):
        return "equal"
    cosines = torch.nn.functional.cosine_similarity(own.float(), of_target.float(), dim=-1)
    used = cosines[(own != 0).any(-1) & (of_target != 0).any(-1)]  # rows of padding may be zero
    return "similar" if used.numel() and float(used.median()) >= _SIMILAR else "different"
