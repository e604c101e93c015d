"""Tiny random models of every family that we promise, made and saved by the tests."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from specgen.engine.exit_layer import ExitLayer, Predictor
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from specgen.engine.exit_files import Description, Exit

VOCAB = 96  # rows of the models' tables; the tokenizer knows fewer, as padded families do
EOS = 2
WORDS = ["<pad>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz \n.,0123456789"]
CONTEXT = 128
LETTERS = [*WORDS, *"ABCDEFGHIJKLMNOPQRSTUVWXYZ", *"éèêàâîôûçäöüßñåøæœαβγδεζηθκ"]  # each id has a text to see
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }}\n{% endfor %}assistant "

_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.25,  # wide, so that the likeliest token stands clear of the next: a tie proves nothing
}
_WINDOW = 12  # shorter than the texts, so that sliding windows slide
_IDS = {"bos_token_id": 1, "eos_token_id": EOS, "pad_token_id": 0, "vocab_size": VOCAB}

FAMILIES: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**_LLAMA, **_IDS, tie_word_embeddings=False),
    "mistral": lambda: MistralConfig(**_LLAMA, **_IDS, sliding_window=_WINDOW),
    "qwen2": lambda: Qwen2Config(**_LLAMA, **_IDS, use_sliding_window=True, sliding_window=_WINDOW, max_window_layers=1),
    "qwen3": lambda: Qwen3Config(**_LLAMA, **_IDS, head_dim=8),
    "phi3": lambda: Phi3Config(**_LLAMA, **_IDS, sliding_window=_WINDOW),
    "gemma2": lambda: Gemma2Config(**_LLAMA, **_IDS, head_dim=8, sliding_window=_WINDOW, query_pre_attn_scalar=8),
    "olmo2": lambda: Olmo2Config(**_LLAMA, **_IDS),
    "gpt2": lambda: GPT2Config(n_embd=32, n_layer=3, n_head=4, n_positions=CONTEXT, initializer_range=0.25, **_IDS),
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
    "gpt_neox": lambda: GPTNeoXConfig(**{k: v for k, v in _LLAMA.items() if k != "num_key_value_heads"}, **_IDS),
}


def make_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """A random float32 model; `changes` are set on its config."""
    config = FAMILIES[family]()
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = EOS
    model.generation_config.pad_token_id = 0
    return model


def make_bloom() -> Any:
    """A random model with ALiBi, which runs no trees."""
    torch.manual_seed(0)
    return BloomForCausalLM(BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.25)).eval()


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
    backend = Tokenizer(models.WordLevel({word: position for position, word in enumerate(words)}, unk_token="."))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def save(model: Any, folder: Path, tokenizer: Any = None) -> str:
    model.save_pretrained(folder)
    (tokenizer or make_tokenizer()).save_pretrained(folder)
    return str(folder)


def prompt(seed: int) -> list[int]:
    """4 to 12 random token ids, the first one `<s>`."""
    rng = random.Random(seed)
    return [1, *(rng.randrange(3, 40) for _ in range(rng.randrange(3, 12)))]


def plain(model: Any, prompt_ids: list[int], count: int, **options: Any) -> list[int]:
    """Transformers' own greedy decoding."""
    ids = torch.tensor([prompt_ids])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, **options)
    new: list[int] = output[0, len(prompt_ids) :].tolist()
    return new


def exit_of(model: object, depth: int, *, predictor: bool = True, seed: int = 0) -> Exit:
    """An untrained exit after `depth` layers, with a predictor that has random weights."""
    own = None
    if predictor:
        torch.manual_seed(seed)
        own = Predictor(model.config.hidden_size)  # type: ignore[attr-defined]
        for weight in own.parameters():
            torch.nn.init.normal_(weight, std=0.3)
        own.requires_grad_(False)
    return Exit(ExitLayer.of(model), own, Description("a test's", "", depth))
