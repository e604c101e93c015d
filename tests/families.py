"""Makes and saves tiny random models of every family that specgen promises to run, and exit layers
for them."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GemmaConfig,
    Glm4MoeConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    Llama4TextConfig,
    LlamaConfig,
    MiniMaxM2Config,
    MistralConfig,
    Olmo2Config,
    OlmoeConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
)
from transformers.cache_utils import Cache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from specgen.engine.loaded_model import LoadedModel
from specgen.engine.model import Model
from specgen.engine.native.config_reading import read_architecture, read_config
from specgen.engine.native.native_model import load_native
from specgen.engine.parts.own_layers import ExitLayers, ExitWeights, Predictor
from specgen.engine.parts.trained_part import ExitDescription, TrainedPart
from specgen.engine.transformers.transformers_model import TransformersModel
from specgen.engine.weights import weights_fingerprint
from specgen.pair.pair import Pair

VOCAB = 96  # rows of the models' tables; the tokenizer knows fewer, as padded families do
EOS = 2
WORDS = ["<pad>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz \n.,0123456789"]
CONTEXT = 128
# each id has a text to see
LETTERS = [*WORDS, *"ABCDEFGHIJKLMNOPQRSTUVWXYZ", *"éèêàâîôûçäöüßñåøæœαβγδεζηθκ"]
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }}\n{% endfor %}assistant "

_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    # wide, so that the likeliest token stands clear of the next: a tie proves nothing
    "initializer_range": 0.25,
}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_WINDOW = 12  # shorter than the texts, so that sliding windows slide
_IDS = {"bos_token_id": 1, "eos_token_id": EOS, "pad_token_id": 0, "vocab_size": VOCAB}

FAMILIES: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**_LLAMA, **_IDS, tie_word_embeddings=False),
    "mistral": lambda: MistralConfig(**_LLAMA, **_IDS, sliding_window=_WINDOW),
    "qwen2": lambda: Qwen2Config(
        **_LLAMA, **_IDS, use_sliding_window=True, sliding_window=_WINDOW, max_window_layers=1
    ),
    "qwen3": lambda: Qwen3Config(**_LLAMA, **_IDS, head_dim=8),
    "phi3": lambda: Phi3Config(**_LLAMA, **_IDS, sliding_window=_WINDOW),
    "gemma2": lambda: Gemma2Config(
        **_LLAMA, **_IDS, head_dim=8, sliding_window=_WINDOW, query_pre_attn_scalar=8
    ),
    "olmo2": lambda: Olmo2Config(**_LLAMA, **_IDS),
    "gemma": lambda: GemmaConfig(**_LLAMA, **_IDS, head_dim=8),
    "gemma3_text": lambda: Gemma3TextConfig(
        **_LLAMA,
        **_IDS,
        head_dim=8,
        sliding_window=_WINDOW,
        query_pre_attn_scalar=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "smollm3": lambda: SmolLM3Config(**_LLAMA, **_IDS, no_rope_layers=[1, 0, 1]),
    "granite": lambda: GraniteConfig(
        **_LLAMA,
        **_IDS,
        embedding_multiplier=3.0,
        attention_multiplier=0.3,
        residual_multiplier=0.7,
        logits_scaling=2.0,
    ),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **_LLAMA,
        **_IDS,
        **_MOE,
        head_dim=8,
        num_experts=8,
        mlp_only_layers=[0],
        norm_topk_prob=True,
    ),
    "olmoe": lambda: OlmoeConfig(**_LLAMA, **_IDS, num_experts=8, num_experts_per_tok=2),
    "glm4_moe": lambda: Glm4MoeConfig(
        **_LLAMA,
        **_IDS,
        **_MOE,
        head_dim=8,
        n_routed_experts=8,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
    ),
    "minimax_m2": lambda: MiniMaxM2Config(
        **_LLAMA, **_IDS, head_dim=8, num_local_experts=8, num_experts_per_tok=2, rotary_dim=4
    ),
    "gpt_oss": lambda: GptOssConfig(
        **_LLAMA,
        **_IDS,
        head_dim=8,
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=_WINDOW,
        swiglu_limit=2.0,
    ),
    "gemma4_text": lambda: Gemma4TextConfig(
        **_LLAMA | {"num_hidden_layers": 4},
        **_IDS,
        head_dim=8,
        global_head_dim=16,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=_WINDOW,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB,
        enable_moe_block=True,
        num_experts=8,
        top_k_experts=2,
        moe_intermediate_size=16,
    ),
    "starcoder2": lambda: Starcoder2Config(**_LLAMA, **_IDS, sliding_window=_WINDOW),
    "stablelm": lambda: StableLmConfig(**_LLAMA, **_IDS, use_qkv_bias=True, qk_layernorm=True),
    "cohere": lambda: CohereConfig(**_LLAMA, **_IDS, use_qk_norm=True, logit_scale=0.5),
    "gpt2": lambda: GPT2Config(
        n_embd=32, n_layer=3, n_head=4, n_positions=CONTEXT, initializer_range=0.25, **_IDS
    ),
    "opt": lambda: OPTConfig(
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        word_embed_proj_dim=32,
        init_std=0.25,
        **_IDS,
    ),
    "llama4_text": lambda: Llama4TextConfig(
        **_LLAMA,
        **_IDS,
        head_dim=8,
        intermediate_size_mlp=48,
        num_local_experts=2,
        attention_chunk_size=_WINDOW,
    ),
    "gpt_neox": lambda: GPTNeoXConfig(
        **{k: v for k, v in _LLAMA.items() if k != "num_key_value_heads"}, **_IDS
    ),
}

_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
}
_MAMBA = {
    f"mamba_{name}": value
    for name, value in {"n_heads": 8, "d_head": 8, "d_state": 8, "n_groups": 2, "d_conv": 4}.items()
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LATENT = {
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}


def _of(name: str, **fields: Any) -> Callable[[], Any]:
    return lambda: CONFIG_MAPPING[name](**{**_LLAMA, **_IDS, **fields})


# The oldest supported versions of transformers run recurrent layers without asking the cache for a
# state, so that a draft cannot be rolled back; their MiniMax and GPT OSS ignore fields of the
# config.
IS_OLD_TRANSFORMERS = not hasattr(Cache, "get_conv_state")
if IS_OLD_TRANSFORMERS:
    del FAMILIES["minimax_m2"], FAMILIES["gpt_oss"]

# models with recurrent layers: a delta rule (with one decay for each head, or for each channel),
# Mamba2, short convolutions
HYBRIDS: dict[str, Callable[[], Any]] = {
    "qwen3_5_text": _of("qwen3_5_text", head_dim=8, num_hidden_layers=4, **_DELTA),
    "lfm2": _of("lfm2", full_attn_idxs=[1], conv_L_cache=3, block_ff_dim=48),
    "nemotron_h": _of(
        "nemotron_h",
        hybrid_override_pattern="M-*M",
        mamba_num_heads=8,
        mamba_head_dim=8,
        ssm_state_size=8,
        n_groups=2,
        head_dim=8,
        time_step_min=1e-30,
    ),
    "kimi_linear": _of(
        "kimi_linear",
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        num_hidden_layers=4,
        linear_num_heads=4,
        linear_head_dim=8,
        n_routed_experts=4,
        **_EXPERTS,
        **_LATENT,
    ),
    "qwen3_next": _of(
        "qwen3_next",
        num_hidden_layers=4,
        shared_expert_intermediate_size=16,
        head_dim=8,
        **_DELTA,
        **_EXPERTS,
    ),
    "qwen3_5_moe_text": _of(
        "qwen3_5_moe_text",
        num_hidden_layers=4,
        shared_expert_intermediate_size=16,
        head_dim=8,
        **_DELTA,
        **_EXPERTS,
    ),
    "lfm2_moe": _of(
        "lfm2_moe",
        layer_types=["conv", "full_attention", "conv"],
        conv_bias=True,
        num_dense_layers=1,
        **_EXPERTS,
    ),
    "falcon_h1": _of(
        "falcon_h1",
        mamba_d_ssm=64,
        mamba_rms_norm=False,
        ssm_multipliers=[0.5, 1.5, 0.7, 1.2, 0.9],
        ssm_in_multiplier=1.3,
        **_MAMBA,
    ),
    "granitemoehybrid": _of(
        "granitemoehybrid",
        layer_types=["mamba", "attention", "mamba"],
        num_local_experts=4,
        shared_intermediate_size=32,
        **_EXPERTS,
        **_MAMBA,
    ),
    "bamba": _of("bamba", attn_layer_indices=[1], **_MAMBA),
    "mamba2": _of("mamba2", num_heads=8, head_dim=8, state_size=8, n_groups=2, chunk_size=16),
}
_ODD = {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 1}
_EQUAL = {"num_key_value_heads": 4}


def _delta(
    key_heads: int, value_heads: int, key_size: int, value_size: int, kernel: int
) -> dict[str, int]:
    return dict(zip(_DELTA, (key_heads, value_heads, key_size, value_size, kernel), strict=True))


def _mamba(heads: int, size: int, states: int, groups: int, kernel: int) -> dict[str, int]:
    return dict(zip(_MAMBA, (heads, size, states, groups, kernel), strict=True))


def _layers(letters: str, other: str = "linear_attention") -> dict[str, Any]:
    kinds = {"f": "full_attention", "a": "attention", "-": other}
    return {"num_hidden_layers": len(letters), "layer_types": [kinds[letter] for letter in letters]}


_MORE = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
_SHARED = {**_MORE, "shared_expert_intermediate_size": 40}
# their other numbers of heads and groups, kernels, orders of layers, routings and LM heads
SHAPES = [
    (
        "qwen3_5_text",
        {
            **_ODD,
            **_layers("f--f-"),
            **_delta(3, 3, 5, 7, 3),
            "head_dim": 16,
            "tie_word_embeddings": True,
        },
    ),
    (
        "qwen3_5_text",
        {
            **_EQUAL,
            **_layers("--"),
            **_delta(1, 5, 12, 6, 2),
            "head_dim": 24,
            "tie_word_embeddings": False,
        },
    ),
    ("qwen3_5_moe_text", {**_layers("f-f-"), **_delta(2, 6, 9, 16, 5), **_SHARED, "head_dim": 8}),
    (
        "qwen3_next",
        {
            **_ODD,
            **_layers("f--f-"),
            **_delta(3, 6, 5, 7, 3),
            **_SHARED,
            "mlp_only_layers": [0, 2],
            "head_dim": 16,
        },
    ),
    (
        "qwen3_next",
        {
            **_EQUAL,
            **_layers("-f"),
            **_delta(1, 4, 12, 6, 2),
            **_SHARED,
            "norm_topk_prob": False,
            "head_dim": 8,
        },
    ),
    (
        "lfm2",
        {
            **_ODD,
            **_layers("f--f", "conv"),
            "conv_L_cache": 5,
            "conv_bias": True,
            "block_multiple_of": 8,
        },
    ),
    (
        "lfm2",
        {
            **_EQUAL,
            **_layers("-f-", "conv"),
            "conv_L_cache": 2,
            "block_auto_adjust_ff_dim": False,
            "norm_eps": 1e-3,
        },
    ),
    (
        "lfm2_moe",
        {
            **_ODD,
            **_layers("f--f", "conv"),
            **_MORE,
            "num_dense_layers": 2,
            "conv_L_cache": 5,
            "conv_bias": True,
        },
    ),
    (
        "lfm2_moe",
        {
            **_layers("-f", "conv"),
            **_MORE,
            "num_dense_layers": 0,
            "use_expert_bias": False,
            "norm_topk_prob": False,
        },
    ),
    (
        "nemotron_h",
        {
            **_ODD,
            "hybrid_override_pattern": "*M-MM",
            "mamba_num_heads": 6,
            "mamba_head_dim": 8,
            "n_groups": 3,
        },
    ),
    (
        "granitemoehybrid",
        {**_ODD, **_layers("a--a", "mamba"), **_mamba(6, 8, 5, 3, 3), "num_local_experts": 0},
    ),
    (
        "falcon_h1",
        {**_ODD, **_mamba(6, 8, 5, 3, 3), "mamba_d_ssm": 48, "mamba_rms_norm": True, "head_dim": 8},
    ),
    ("bamba", {**_ODD, **_mamba(6, 8, 5, 3, 3), "attn_layer_indices": [0, 2]}),
    (
        "mamba2",
        {
            "num_heads": 4,
            "head_dim": 16,
            "n_groups": 1,
            "state_size": 5,
            "conv_kernel": 3,
            "tie_word_embeddings": True,
        },
    ),
    (
        "mamba2",
        {
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 8,
            "use_conv_bias": False,
            "time_step_limit": [0.0, 0.2],
        },
    ),
    (
        "kimi_linear",
        {
            **_layers("f---"),
            **_MORE,
            **_LATENT,
            "linear_num_heads": 3,
            "linear_head_dim": 6,
            "n_routed_experts": 5,
        },
    ),
]
# models with a state that cannot be rolled back
FIXED: dict[str, Callable[[], Any]] = {
    "mamba": _of("mamba", state_size=8),
    "jamba": _of("jamba", num_experts=2, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8),
    "recurrent_gemma": _of(
        "recurrent_gemma", lru_width=32, attention_window_size=_WINDOW, head_dim=8
    ),
}

# the native decoder runs these families
NATIVE = tuple(
    name
    for name in FAMILIES
    if name not in ("gpt2", "opt", "gpt_neox", "starcoder2", "stablelm", "cohere", "llama4_text")
)
MIXTURES = tuple(
    name
    for name in ("qwen3_moe", "olmoe", "glm4_moe", "minimax_m2", "gpt_oss", "gemma4_text")
    if name in FAMILIES
)
BACKENDS = ("native", "transformers")


def make_model(
    family: str, seed: int = 0, *, shape: Mapping[str, Any] | None = None, **changes: Any
) -> Any:
    """A random float32 model; `changes` are set on its config. With `shape`, the config is made
    from these fields."""
    config = {**FAMILIES, **HYBRIDS, **FIXED}[family]() if shape is None else _of(family, **shape)()
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, weight in model.named_parameters():  # transformers sets some to ones
        if name.endswith(("A_log", "dt_bias", ".D", "bias")) and family in HYBRIDS:
            torch.nn.init.normal_(weight)
    for name, bias in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            bias.normal_(std=0.2)
        if name.endswith("layer_scalar"):
            bias.uniform_(0.5, 1.5)
    if family == "gemma2" and IS_OLD_TRANSFORMERS:  # the default ignores the caps of scores there
        model.set_attn_implementation("eager")
    model.generation_config.eos_token_id = EOS
    model.generation_config.pad_token_id = 0
    return model


def make_bloom() -> Any:
    """A random model with ALiBi, which runs no trees."""
    torch.manual_seed(0)
    return BloomForCausalLM(
        BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.25)
    ).eval()


def near_copy(model: Any, noise: float = 0.02, seed: int = 1) -> Any:
    """The same model with noise on its weights: a draft that is often right."""
    torch.manual_seed(seed)
    copy = type(model)(model.config).eval()
    copy.load_state_dict(model.state_dict())
    with torch.no_grad():
        for weight in copy.parameters():
            weight.add_(torch.randn_like(weight) * noise * weight.std())
    return copy


def make_tokenizer(words: list[str] = WORDS) -> PreTrainedTokenizerFast:
    """A tokenizer of single characters."""
    backend = Tokenizer(
        models.WordLevel({word: position for position, word in enumerate(words)}, unk_token=".")
    )
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def save(model: Any, folder: Path, tokenizer: Any = None) -> str:
    model.save_pretrained(folder)
    (tokenizer or make_tokenizer()).save_pretrained(folder)
    return str(folder)


def prompt(seed: int) -> list[int]:
    """4 to 12 random token ids, the first one `<s>`."""
    rng = random.Random(seed)
    return [1, *(rng.randrange(3, 40) for _ in range(rng.randrange(3, 12)))]


def plain(model: Any, prompt_ids: list[int], count: int, **options: Any) -> list[int]:
    """The `count` new tokens of transformers' own greedy decoding, fewer after an end-of-sequence
    token."""
    ids = torch.tensor([prompt_ids])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, **options
    )
    new: list[int] = output[0, len(prompt_ids) :].tolist()
    return new


def model_of(module: Any, backend: str) -> Model:
    """The transformers model `module` as a specgen `Model` that `backend` runs."""
    if backend == "transformers":
        return TransformersModel(module)
    with tempfile.TemporaryDirectory() as folder:
        module.save_pretrained(folder)
        architecture = read_architecture(read_config(Path(folder), "a test's"))
        return load_native(Path(folder), "a test's", architecture, module.dtype, module.device)


def exit_tensors(weights: Mapping[str, torch.Tensor], layers: int = 1) -> dict[str, torch.Tensor]:
    """An untrained exit layer: a model's last `layers` layers, norm and LM head, by their names in
    an exit layer's file.

    `weights` are the model's, by name.
    """
    count = 1 + max(int(name.split(".")[2]) for name in weights if name.startswith("model.layers."))
    tensors = {
        name.removeprefix("model."): weight
        for name, weight in weights.items()
        if name.startswith("model.norm.")
    }
    for index in range(layers):
        prefix = f"model.layers.{count - layers + index}."
        for name, weight in weights.items():
            if name.startswith(prefix):
                tensors[f"layers.{index}.{name.removeprefix(prefix)}"] = weight
    head = (
        weights["lm_head.weight"]
        if "lm_head.weight" in weights
        else weights["model.embed_tokens.weight"]
    )
    return {
        **{name: weight.clone() for name, weight in tensors.items()},
        "head.weight": head.clone(),
    }


def exit_layers_of(model: Model, module: Any, layers: int = 1) -> ExitLayers:
    """The untrained exit layer of `exit_tensors` for `model`, with the weights of the same model in
    transformers, `module`."""
    return ExitLayers(model, layers, exit_tensors(module.state_dict(), layers))


def random_predictor(width: int, seed: int = 0) -> Predictor:
    """A predictor of acceptance with random weights, for hidden states of this width."""
    torch.manual_seed(seed)
    made = Predictor(width)
    for weight in made.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return made.requires_grad_(False)


def exit_of(
    target: LoadedModel, depth: int, *, predictor: bool = True, seed: int = 0
) -> TrainedPart:
    """An untrained exit layer after the target's first `depth` layers; with `predictor` also one of
    acceptance, with random weights."""
    own = random_predictor(target.model.shape.hidden_size, seed) if predictor else None
    tensors = exit_tensors(load_file(target.folder / "model.safetensors"))
    description = ExitDescription(
        "a test's", weights_fingerprint(target.folder), depth, predictor=predictor
    )
    part = TrainedPart("exit", Path(f"exit {depth}"), target, description)
    part._weights = ExitWeights(ExitLayers(target.model, 1, tensors), depth, own)
    return part


def with_exit(pair: Pair, depth: int, *, predictor: bool = True) -> Pair:
    """The pair, with `exit_of` its target as the default exit layer."""
    pair.parts.named["exit"] = exit_of(pair.target, depth, predictor=predictor)
    return pair
