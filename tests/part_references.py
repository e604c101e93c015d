"""Random trained parts for small targets, and what they predict, computed from their papers'
definitions in plain torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from families import (
    IS_OLD_TRANSFORMERS,
    exit_layers_of,
    exit_tensors,
    make_model,
    random_predictor,
    save,
)
from head_layouts import write_head
from runner_checks import four_layers, uncached
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from training_helpers import opened
from transformers import DynamicCache
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from specgen.engine.loaded_model import LoadedModel
from specgen.engine.model_runner import ModelRunner, Runners
from specgen.engine.parts import eagle as eagle_runners
from specgen.engine.parts import own_layers
from specgen.engine.parts.mtp import read_layers
from specgen.engine.parts.own_layers import ExitLayers, ExitWeights
from specgen.engine.parts.part import DecoderWeights
from specgen.engine.parts.trained_part import open_part
from specgen.engine.penalties import PenaltyProcessor
from specgen.engine.transformers.transformers_model import cache_argument

_FOLDERS: list[TemporaryDirectory[str]] = []  # removed at exit


@cache
def target(
    family: str, backend: str, changes: tuple[tuple[str, Any], ...]
) -> tuple[Any, LoadedModel]:
    """A random model of a family: the transformers module, and the same model loaded by the engine.
    `changes` are made to its config."""
    _FOLDERS.append(TemporaryDirectory())
    module = make_model(
        family,
        **{name: list(value) if isinstance(value, tuple) else value for name, value in changes},
    )
    return module, opened(save(module, Path(_FOLDERS[-1].name)), backend)


# The names of the token's norm, the state's norm, the projection and the last norm, and what is
# before all names of layer k.
MTP_LAYOUTS = {
    "deepseek": ("model.layers.{last}.", "enorm hnorm eh_proj shared_head.norm"),
    "qwen": ("mtp.layers.{k}.", "pre_fc_norm_embedding pre_fc_norm_hidden fc norm"),
    "mimo": (
        "model.mtp_layers.{k}.",
        "token_layernorm hidden_layernorm input_proj final_layernorm",
    ),
    "mimo-v2": ("model.mtp.layers.{k}.", "enorm hnorm eh_proj final_layernorm"),
}


def add_drafting_layers(
    module: Any, folder: Path, layout: str = "deepseek", layers: int = 1
) -> None:
    """Adds random drafting layers to a model's files in `folder`, in a published layout. Their
    numbers are the same in all."""
    (file,), (prefix, names), config = (
        folder.glob("*.safetensors"),
        MTP_LAYOUTS[layout],
        module.config,
    )
    tensors = load_file(file)
    width = config.hidden_size
    for k in range(layers):
        torch.manual_seed(50 + k)
        block = weakened(type(module)(config)).model.layers[-1].state_dict()
        own = prefix.format(k=k, last=config.num_hidden_layers + k)
        tensors |= {own + name: tensor.clone() for name, tensor in separate_experts(block).items()}
        token_norm, state_norm, join, out_norm = (
            ("mtp." if layout == "qwen" else own) + name for name in names.split()
        )
        tensors |= {
            f"{name}.weight": 0.9 + torch.rand(width) / 4
            for name in (token_norm, state_norm, out_norm)
        }
        tensors[f"{join}.weight"] = (
            torch.eye(width, 2 * width) + torch.randn(width, 2 * width) * (2 * width) ** -0.5 / 3
        )
        if layout == "deepseek":
            # not read
            tensors |= {
                own + "embed_tokens.weight": torch.zeros(3),
                own + "shared_head.head.weight": torch.zeros(3),
            }
        if layout == "mimo":
            tensors[f"{join}.weight"] = tensors[f"{join}.weight"].roll(width, dims=1)
        if layout == "mimo-v2":
            renamed = "post_attention_layernorm.weight"
            tensors[own + renamed.replace("post_attention", "pre_mlp")] = tensors.pop(own + renamed)
    save_file(tensors, file, {"format": "pt"})
    stored = json.loads((folder / "config.json").read_text())
    stored |= {"num_nextn_predict_layers": layers} if layout == "deepseek" else {}
    stored |= (
        {"model_type": "mimo", "auto_map": {"AutoConfig": "own.Config"}} if layout == "mimo" else {}
    )
    (folder / "config.json").write_text(json.dumps(stored))


def separate_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a layer, with those of each expert apart, as in published files."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for name in tensors.keys() - found.keys():
        for number, matrix in enumerate(tensors[name]):
            parts = matrix.chunk(2) if name.endswith("gate_up_proj") else [matrix]
            for part, own in zip(
                ("gate", "up") if len(parts) > 1 else ("down",), parts, strict=True
            ):
                found[f"mlp.experts.{number}.{part}_proj.weight"] = own
    return found


def weakened(module: Any) -> Any:
    """A model whose likeliest next token depends on the last one most, so that drafts are right now
    and then."""
    for name, weight in module.model.layers.named_parameters():
        if name.endswith(("o_proj.weight", "out_proj.weight")) or "down_proj" in name:
            weight.data *= 0.03
    return module


@cache
def drafting_target(
    family: str, backend: str, layout: str, layers: int
) -> tuple[Any, LoadedModel, Any]:
    """A random model with drafting layers, and transformers' model of these, which knows them in
    DeepSeek-V3's layout (None where the installed version lacks it)."""
    _FOLDERS.extend([TemporaryDirectory(), TemporaryDirectory()])
    own, theirs = (Path(each.name) for each in _FOLDERS[-2:])
    module = weakened(make_model(family))
    module.model.norm.weight.data.uniform_(0.5, 1.5)
    for folder, name in ((own, layout), (theirs, "deepseek")):
        save(module, folder)
        add_drafting_layers(module, folder, name, layers)
    module.config.num_mtp_layers = layers
    module.config.name_or_path = str(theirs)
    module.config.dtype = torch.float32
    if getattr(module.config, "layer_types", None):
        module.config.mtp_layer_types = module.config.layer_types[-1:] * layers
    last = range(module.config.num_hidden_layers, module.config.num_hidden_layers + layers)
    module._keys_to_ignore_on_load_unexpected = [rf"^model\.layers\.{number}\." for number in last]
    reference = None if IS_OLD_TRANSFORMERS else MtpModel.from_pretrained(module)
    return module, opened(own, backend), reference


class Part:
    """A trained part with random weights: a head in a published layout with these `sizes` (see
    `head_layouts.Sizes`), or for the layout `exit` an exit layer after the target's first `depth`
    layers, for `mtp-...` the target's own drafting `layers`.

    `changes` are made to the target's config (None: those that give it four layers). `row` computes
    the part's logits as the paper defines them; what was computed once is kept.
    """

    def __init__(
        self,
        layout: str,
        family: str = "llama",
        backend: str = "native",
        changes: dict[str, Any] | None = None,
        penalties: Callable[[], PenaltyProcessor | None] = lambda: None,
        **sizes: Any,
    ) -> None:
        self.block_rows: int | None = None  # of a block that is run shorter than trained
        self._rows: dict[tuple[tuple[int, ...], tuple[int, ...]], Tensor] = {}
        self._states: dict[tuple[int, ...], Any] = {}
        self.tensors: dict[str, Tensor] = {}  # of an exit that is joined
        if layout.startswith("mtp-"):
            self.kind = "mtp"
            self.layout = layout.removeprefix("mtp-")
            self.module, loaded, self.layers = drafting_target(
                family, backend, self.layout, sizes["layers"]
            )
            self.model = loaded.model
            self.weights = read_layers(loaded)
            self.made = eagle_runners.make_runners(
                self.weights, self.model, ModelRunner(self.model), penalties
            )
            return
        self.window = sizes.get("window")
        found = four_layers(family) if changes is None else changes
        hashable = tuple(
            (name, tuple(value) if isinstance(value, list) else value)
            for name, value in found.items()
        )
        self.module, loaded = target(family, backend, hashable)
        self.kind = layout[:6].rstrip("1-3")
        self.model = loaded.model
        self.made: Runners
        if layout == "exit":
            self.depth = sizes["depth"]
            layers = exit_layers_of(self.model, self.module)
            if sizes.get("joined"):
                self.tensors = joined_exit_tensors(self.module)
                layers = ExitLayers(self.model, 1, self.tensors)
            self.weights: Any = ExitWeights(layers, self.depth, random_predictor(32))
            self.made = own_layers.make_runners(self.weights, self.model, None, penalties)
            return
        with TemporaryDirectory() as name:
            self.weights = open_part(
                write_head(Path(name), layout, loaded.folder, **sizes), loaded, is_exit=False
            ).load()
        runners = import_module(f"specgen.engine.parts.{self.kind}").make_runners
        self.made = runners(
            self.weights, self.model, ModelRunner(self.model, penalties()), penalties
        )

    @torch.no_grad()
    def row(self, ids: Sequence[int], path: Sequence[int]) -> Tensor:
        """The part's logits [vocabulary] after the context `ids` and the drafted tokens `path`,
        without any cache."""
        key = tuple(ids), tuple(path)
        if key not in self._rows:
            self._rows[key] = self._row(list(ids), list(path))
        return self._rows[key]

    def _row(self, ids: list[int], path: list[int]) -> Tensor:
        if self.tensors:
            return joined_exit(self, ids, path)
        if self.kind == "exit":
            return uncached(exit_model(self.module, self.depth), [*ids, *path])
        rows = {"medusa": medusa, "eagle": eagle, "glide": glide, "block": block, "mtp": mtp}
        found: Tensor = rows[self.kind](self, ids, path)
        return found

    def embedded(self, ids: Sequence[int]) -> Tensor:
        table = self.weights.tensors.get("embed_tokens.weight")
        return (
            self.model.embeddings(torch.tensor(ids)) if table is None else table[torch.tensor(ids)]
        )

    def of_all_tokens(self, logits: Tensor) -> Tensor:
        """Logits over the target's vocabulary from those over the head's own vocabulary; -inf for
        tokens that the head lacks."""
        if self.weights.vocabulary is None:
            return logits
        return torch.full((self.module.config.vocab_size,), -torch.inf).index_copy(
            0, self.weights.vocabulary, logits
        )

    def states(self, ids: Sequence[int]) -> Any:
        """The target's hidden states, each [1, n, width], numbered as in transformers: i is the
        input of layer i."""
        key = tuple(ids)
        if key not in self._states:
            self._states[key] = self.computed_states(ids)
        return self._states[key]

    def computed_states(self, ids: Sequence[int]) -> Any:
        """`states`, computed anew."""
        return self.module(
            torch.tensor([list(ids)]), use_cache=False, output_hidden_states=True
        ).hidden_states


@cache
def exit_model(module: Any, depth: int) -> Any:
    """A model that computes what an untrained exit does: the target's first `depth` layers, then
    its last one."""
    layers = module.model.layers
    lists = {name: getattr(module.config, name, None) for name in ("layer_types", "no_rope_layers")}
    changes = {name: [*entries[:depth], entries[-1]] for name, entries in lists.items() if entries}
    short = make_model(module.config.model_type, num_hidden_layers=depth + 1, **changes)
    state = {name: weight for name, weight in module.state_dict().items() if "layers." not in name}
    for position, layer in enumerate([*layers[:depth], layers[-1]]):
        state |= {
            f"model.layers.{position}.{name}": weight for name, weight in layer.state_dict().items()
        }
    short.load_state_dict(state)
    return short


def joined_exit_tensors(module: Any) -> dict[str, Tensor]:
    """The weights of an exit that joins two states at random, with the target's last layer and
    an LM head that knows every second token."""
    torch.manual_seed(3)
    tensors = exit_tensors(module.state_dict(), 1)
    tensors["vocabulary"] = torch.arange(1, len(tensors["head.weight"]), 2)
    tensors["head.weight"] = tensors["head.weight"][tensors["vocabulary"]]
    width = tensors["head.weight"].shape[1]
    tensors["join.weight"] = torch.randn(width, 2 * width) * 0.3
    tensors["join.bias"] = torch.randn(width) * 0.3
    return tensors


def joined_exit(part: Part, ids: list[int], path: list[int]) -> Tensor:
    """The logits [vocabulary] of such an exit after `ids` and `path`, by definition.

    The target's last state of the token before is joined with each token of the context, the exit's
    own with a drafted token.
    """
    tensors = part.tensors
    hidden = part.states([*ids, *path])[part.depth][0]
    width = hidden.shape[1]
    before = torch.zeros(1, width)
    if len(ids) > 1:
        before = torch.cat((before, part.states(ids[:-1])[-1][0]))
    last = exit_model(part.module, 0)
    eps = part.module.config.rms_norm_eps
    for number in range(len(path) + 1):
        read = torch.cat((hidden[: len(ids) + number], before), dim=0).unflatten(0, (2, -1))
        normed = torch.cat(tuple(functional.rms_norm(read, (width,), eps=eps)), dim=-1)
        entering = functional.linear(normed, tensors["join.weight"], tensors["join.bias"])
        output = last.model(inputs_embeds=entering[None], use_cache=False).last_hidden_state[0]
        before = torch.cat((before, output[-1:]))
    logits = torch.full((part.module.config.vocab_size,), -torch.inf)
    logits[tensors["vocabulary"]] = tensors["head.weight"] @ output[-1]
    return logits


def medusa(part: Part, ids: list[int], path: list[int]) -> Tensor:
    state = part.states(ids[:-1])[-1][0, -1]
    head = len(path)
    for matrix, bias in part.weights.blocks[head]:
        state = state + functional.silu(matrix @ state + bias)
    if part.weights.lm_heads is None:
        return part.model.head_logits(state[None])[0]
    return part.of_all_tokens(part.weights.lm_heads[head] @ state)


def eagle(part: Part, ids: list[int], path: list[int]) -> Tensor:
    """An EAGLE head's logits [vocabulary] after `ids` and `path`, by definition.

    The embedding of each token of the context is paired with the target's features of the token
    before it, that of a drafted token with the head's own output for the token before it.
    """
    weights = part.weights
    states = part.states(ids[:-1])
    tensors = weights.tensors
    layer = DecoderReference(weights)
    features = states[-1][0]
    if weights.version == 3:
        taps = [states[tap][0] for tap in weights.feature_layers]
        if "fc_norm.0.weight" in tensors:
            taps = [layer.norm(tap, f"fc_norm.{number}") for number, tap in enumerate(taps)]
        features = torch.cat(taps, dim=-1)
        if "input_norm.weight" in tensors:
            features = layer.norm(features, "input_norm")
        features = features @ tensors["fc.weight"].T
    for number in range(len(path) + 1):
        embeddings = part.embedded([*ids[1:], *path[:number]])
        if weights.version == 1:
            pairs = torch.cat((embeddings, features), -1)
            hidden = attended = functional.linear(
                pairs, tensors["fc.weight"], tensors.get("fc.bias")
            )
        else:
            normed = layer.norm(features, "layers.0.hidden_norm")
            attended = torch.cat((layer.norm(embeddings, "layers.0.input_layernorm"), normed), -1)
            hidden = normed if weights.norm_before_residual else features
        for index in range(weights.config["num_hidden_layers"]):
            attended = layer.norm(hidden, f"layers.{index}.input_layernorm") if index else attended
            rows = torch.arange(len(hidden))
            window = part.window or len(hidden)
            hides = (rows[None] > rows[:, None]) | (rows[:, None] - rows[None] >= window)
            hidden = layer.with_mlp(hidden + layer.attention(attended, index, hides), index)
        normed = hidden if weights.version == 1 else layer.norm(hidden, "norm")
        features = torch.cat((features, (normed if weights.norm_output else hidden)[-1:]))
    if weights.version == 1:
        return part.model.head_logits(hidden[-1:])[0]
    return part.of_all_tokens(tensors["lm_head.weight"] @ normed[-1])


def mtp(part: Part, ids: list[int], path: list[int]) -> Tensor:
    """Layer k joins the states of layer k - 1, at first the target's, with later tokens; a single
    one is its own successor."""
    count = len(ids) - 1
    layers = part.layers
    before = list[Tensor]()
    with part.module.model.norm.register_forward_pre_hook(lambda _, given: before.append(given[0])):
        states = part.computed_states(ids[:-1])[-1]
    states = before[0] if part.layout == "mimo" else states
    for number in range(len(path) + 1):
        several = layers.num_mtp_layers > 1
        tokens = torch.tensor(
            [
                [*ids, *path][number + 1 : number + 1 + count]
                if several
                else [*ids[1:], *path[:number]]
            ]
        )
        positions = torch.arange(tokens.shape[1])[None] + 1 + several * number
        cache = MtpCache(config=layers.config)
        found = layers.forward_layer(several * number, states, positions, cache, input_ids=tokens)
        states = found if several else torch.cat((states, found[:, -1:]), dim=1)
    return part.model.head_logits(found[0, -1:])[0]


def glide(part: Part, ids: list[int], path: list[int]) -> Tensor:
    """A GliDe model's logits [vocabulary] after `ids` and `path`, by definition.

    Each token attends to the target's keys of the context's tokens before it, without the last one.
    The first token sees its own.
    """
    weights = part.weights
    tokens = torch.tensor([[*ids, *path]])
    committed = len(ids) - 1
    layer = DecoderReference(weights)
    hidden = part.embedded(tokens[0].tolist())
    cache = cache_of_all(part.module, tokens)
    count = weights.config["num_hidden_layers"]
    seen = [min(max(at, 1), committed) for at in range(tokens.shape[1])]
    for index in range(count):
        hidden = hidden + layer.attention(
            layer.norm(hidden, f"layers.{index}.input_layernorm"), index
        )
        if committed:
            attentions = [
                number
                for number, each in enumerate(part.module.model.layers)
                if hasattr(each, "self_attn")
            ]
            hidden = hidden + cross(part, index, attentions[index - count], hidden, cache, seen)
        hidden = layer.with_mlp(hidden, index)
    normed = layer.norm(hidden[-1:], "norm")
    head = weights.tensors.get("lm_head.weight")
    return part.model.head_logits(normed)[0] if head is None else head @ normed[0]


def cache_of_all(module: Any, tokens: Tensor) -> Any:
    """Transformers' KV cache after a pass of `module` over `tokens`, with the keys of all of them,
    also where a window slides."""
    is_hybrid = not all(hasattr(layer, "self_attn") for layer in module.model.layers)
    kept = DynamicCache(config=module.config) if is_hybrid else DynamicCache()
    module(tokens, **{cache_argument(module): kept})
    return kept


def block(part: Part, ids: list[int], path: list[int]) -> Tensor:
    """The logits [vocabulary] of a DFlash, DFlash2 or DSpark head after `ids` and `path`, by
    definition.

    Its layers see the context's fused features, as they are, and the rows of the block: the last
    token and masks.
    """
    weights, layer = part.weights, DecoderReference(part.weights)
    count = part.block_rows or weights.block_size
    known = len(ids) - 1
    states = part.states(ids) if known else [torch.zeros(1, 1, part.module.config.hidden_size)] * 9
    features = torch.cat([states[tap][0, :known] for tap in weights.feature_layers], dim=-1)
    context = layer.norm(features @ weights.tensors["fc.weight"].T, "hidden_norm")
    module = part.module
    hidden = (
        module.get_input_embeddings().weight[[ids[-1], *[weights.mask_id] * (count - 1)]]
        * weights.embedding_scale
    )
    types = (
        weights.config.get("layer_types")
        or ["full_attention"] * weights.config["num_hidden_layers"]
    )
    rows = torch.arange(known + count)
    for index, kind in enumerate(types):
        slides = kind == "sliding_attention"
        hides = torch.zeros(len(rows), len(rows), dtype=torch.bool)
        if slides if weights.causal is None else weights.causal:
            hides |= rows[None] > rows[:, None]
        if slides:
            hides |= (rows[:, None] - rows[None]).abs() >= weights.config["sliding_window"]
        normed = layer.norm(hidden, f"layers.{index}.input_layernorm")
        entering = convolved(weights, f"layers.{index}.attention_conv", 0, normed, normed)
        attended = layer.attention(torch.cat((context, entering)), index, hides)[known:]
        hidden = hidden + convolved(weights, f"layers.{index}.attention_conv", 1, normed, attended)
        normed = layer.norm(hidden, f"layers.{index}.post_attention_layernorm")
        entering = convolved(weights, f"layers.{index}.mlp_conv", 0, normed, normed)
        made = layer.mlp(entering, index)
        hidden = hidden + convolved(weights, f"layers.{index}.mlp_conv", 1, normed, made)
    state = layer.norm(hidden[len(path) + (not weights.from_anchor)], "norm")
    head = weights.tensors.get("lm_head.weight")
    logits = (module.lm_head.weight if head is None else head) @ state * weights.logit_scale
    if weights.logit_cap is not None:
        logits = weights.logit_cap * torch.tanh(logits / weights.logit_cap)
    logits = part.of_all_tokens(logits)
    before = [*ids, *path][-1]
    if "markov_head.markov_w1.weight" in weights.tensors:
        first, second = (
            weights.tensors[f"markov_head.markov_w{number}.weight"] for number in (1, 2)
        )
        logits = logits + second @ first[before]
    if "candidate_selector.predecessor_codebook" in weights.tensors:
        logits = selected(part, logits, state, before)
    return logits


def convolved(weights: Any, name: str, side: int, normed: Tensor, x: Tensor) -> Tensor:
    """DFlash2's convolution `name` on this side of a sublayer with the input `normed`, row by row;
    `x` itself where a head has none.

    Row i, channel c: the sum over taps t of (base[side, t, c] + delta_i[side, t, c // group])
    x[i - t, c]. Rows before row 0 are 0.
    """
    if f"{name}.base_kernel" not in weights.tensors:
        return x
    base = weights.tensors[f"{name}.base_kernel"]
    delta = normed @ weights.tensors[f"{name}.kernel_projection.weight"].T
    _, taps, width = base.shape
    groups = width // weights.conv_group
    made = torch.zeros_like(x)
    for row in range(len(x)):
        for tap in range(min(taps, row + 1)):
            first = (side * taps + tap) * groups
            of_channels = delta[row, first : first + groups].repeat_interleave(weights.conv_group)
            made[row] += (base[side, tap] + of_channels) * x[row - tap]
    return made


def selected(part: Part, logits: Tensor, state: Tensor, before: int) -> Tensor:
    """The scores of DFlash2's selector for the likeliest tokens after the token `before`; -inf for
    the others."""
    tensors = part.weights.tensors
    own = tensors["candidate_selector.hidden_projection.weight"] @ state
    predecessor = tensors["candidate_selector.predecessor_codebook"][before]
    successors = tensors["candidate_selector.successor_codebook"]
    found = torch.full_like(logits, -torch.inf)
    for token in sorted(range(len(logits)), key=lambda token: -float(logits[token]))[
        : part.weights.candidates
    ]:
        found[token] = logits[token] + (predecessor * own * successors[token]).sum()
    return found


def cross(
    part: Part, index: int, layer: int, hidden: Tensor, cache: Any, seen: Sequence[int]
) -> Tensor:
    """The output [n, width] of the cross-attention in GliDe layer `index`, to the keys and values
    of the target's `layer`.

    The target's own code rotates the queries. Token i sees the first `seen[i]` keys.
    """
    module, config = part.module, part.module.config
    heads = config.num_attention_heads
    q_proj, o_proj = (
        part.weights.tensors[f"layers.{index}.cross_attn.{name}_proj.weight"] for name in "qo"
    )
    query = functional.linear(hidden, q_proj).view(1, len(hidden), heads, -1).transpose(1, 2)
    if getattr(module.model.layers[layer].self_attn, "use_rope", True):
        options = (
            {"layer_type": config.layer_types[layer]} if config.model_type == "gemma3_text" else {}
        )
        cos, sin = module.model.rotary_emb(query, torch.arange(len(hidden))[None], **options)
        rotated = query[..., : cos.shape[-1]]
        rotated = sys.modules[type(module).__module__].apply_rotary_pos_emb(
            rotated, rotated, cos, sin
        )[0]
        query = torch.cat((rotated, query[..., cos.shape[-1] :]), dim=-1)
    of_layer = cache.layers[layer]
    keys, values = (
        each[0].repeat_interleave(heads // each.shape[1], 0)
        for each in (of_layer.keys, of_layer.values)
    )
    hides = torch.arange(len(hidden)) >= torch.tensor(seen)[:, None]
    return attend(query[0], keys, values, hides) @ o_proj.T


def attend(query: Tensor, keys: Tensor, values: Tensor, hides: Tensor) -> Tensor:
    """Returns softmax(query keys^T / sqrt(head size)) values as [n, heads * head size].

    `query` is [heads, n, head size], `keys` and `values` are [heads, m, head size]. `hides` [n, m]
    is True where a token does not see a key.
    """
    scores = (query @ keys.transpose(1, 2) * query.shape[-1] ** -0.5).masked_fill(hides, -torch.inf)
    return (scores.softmax(-1) @ values).transpose(0, 1).flatten(1)


class DecoderReference:
    """The operations of a Llama's layers, or a Qwen's, on texts without a cache."""

    def __init__(self, weights: DecoderWeights) -> None:
        self.tensors = weights.tensors
        self.config = weights.config
        section = self.config.get("rope_parameters") or {}
        self.base = section.get("rope_theta", self.config.get("rope_theta", 1e4))

    def norm(self, x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(
            x, x.shape[-1:], self.tensors[f"{name}.weight"], self.config["rms_norm_eps"]
        )

    def attention(self, x: Tensor, index: int, hides: Tensor | None = None) -> Tensor:
        """The output for the rows `x`, which see those before them, or all but what `hides`
        says."""
        prefix = f"layers.{index}.self_attn."
        size = self.config["head_dim"]
        angles = torch.arange(len(x))[:, None] * self.base ** (-torch.arange(0, size, 2) / size)
        made: list[Tensor] = []
        for name in "qkv":
            weight, bias = (
                self.tensors.get(f"{prefix}{name}_proj.{part}") for part in ("weight", "bias")
            )
            heads = functional.linear(x, weight, bias).view(len(x), -1, size).transpose(0, 1)  # type: ignore[arg-type]
            if f"{prefix}{name}_norm.weight" in self.tensors:
                heads = self.norm(heads, f"{prefix}{name}_norm")
            if name != "v":
                first, second = heads.chunk(2, dim=-1)
                cos = angles.cos()
                sin = angles.sin()
                heads = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
            made.append(heads)
        query, keys, values = made
        group = len(query) // len(keys)
        hides = torch.ones(len(x), len(x), dtype=torch.bool).triu(1) if hides is None else hides
        mixed = attend(
            query, keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0), hides
        )
        return mixed @ self.tensors[f"{prefix}o_proj.weight"].T

    def with_mlp(self, hidden: Tensor, index: int) -> Tensor:
        inner = self.norm(hidden, f"layers.{index}.post_attention_layernorm")
        return hidden + self.mlp(inner, index)

    def mlp(self, inner: Tensor, index: int) -> Tensor:
        gate, up, down = (
            self.tensors[f"layers.{index}.mlp.{name}_proj.weight"]
            for name in ("gate", "up", "down")
        )
        return (functional.silu(inner @ gate.T) * (inner @ up.T)) @ down.T
