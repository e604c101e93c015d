"""Writes a random target of Qwen2's layout and a draft model, as safetensors and as GGUF files with
the same weights.

The draft is a part of the target: its first two layers, heads and columns. Whatever else the target
computes is scaled by `--rest`, which sets the acceptance rate.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from specgen import demo

VOCABULARY = 151_936
STRONGER = 4.0  # weights of layers than transformers makes them, for texts without repetitions
CERTAIN = 30.0  # times larger logits, for probabilities like those of a trained model
KINDS = ("F16", "Q8_0", "Q4_1")
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def add_size_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `make_files` reads; by default the target is that of 0.5B."""
    for name, default in {"layers": 24, "width": 896, "inner": 4864, "heads": 14}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rest", type=float, default=0.1)


def make_files(folder: Path, options: argparse.Namespace) -> None:
    """Writes the folders `target` and `draft` and files such as `target-Q8_0.gguf`, unless an
    earlier call has done so."""
    if (folder / "draft").exists():
        return

    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    target = model(options.layers, options.width, options.inner, options.heads, 2)
    draft = model(2, 256, 1024, 4, 1)
    make_pair(target, draft, options.rest)
    for role, module in {"target": target, "draft": draft}.items():
        module.to(torch.bfloat16)  # the GGUF files have the rounded weights
        for kind in KINDS:
            write_gguf(module, folder / f"{role}-{kind}.gguf", gguf.GGMLQuantizationType[kind])
        save(module, folder / role)


def model(layers: int, width: int, inner: int, heads: int, kv_heads: int) -> Any:
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Qwen2ForCausalLM(config)


@torch.no_grad()
def make_pair(target: Any, draft: Any, rest: float) -> None:
    """Scales what only the target has by `rest`, and copies the draft's weights into the target's
    first rows and columns."""
    width = draft.config.hidden_size
    size = target.config.hidden_size
    own = dict(draft.named_parameters())
    for name, weight in own.items():
        if "_proj.weight" in name:
            weight.mul_(STRONGER)
    for each in (target, draft):
        each.model.norm.weight.mul_(CERTAIN)
    for name, weight in target.named_parameters():
        if "norm" in name:
            # the mean square is over more numbers, most of them small
            weight[:width] *= (width / size) ** 0.5
            continue
        if name.endswith("embed_tokens.weight") or ".o_proj." in name or ".down_proj." in name:
            weight.mul_(rest)  # what writes to the residual stream
        if name in own:
            block = own[name].shape
            weight[: block[0], *(slice(each) for each in block[1:])] = own[name]
            if weight.dim() == 2 and not name.endswith("embed_tokens.weight"):
                weight[: block[0], block[1] :] *= rest


def save(module: Any, folder: Path) -> None:
    module.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo.folder("target") / name, folder)


def write_gguf(module: Any, file: Path, kind: gguf.GGMLQuantizationType) -> None:
    config = module.config
    writer = gguf.GGUFWriter(file, "qwen2")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    add_tokenizer(writer)
    for name, weight in module.model.named_parameters():
        stem, ending = name.rsplit(".", 1)
        if stem.startswith("layers."):
            _, layer, place = stem.split(".", 2)
            written = f"blk.{layer}.{NAMES[place]}.{ending}"
        else:
            written = {"embed_tokens": "token_embd.weight", "norm": "output_norm.weight"}[stem]
        numbers = weight.detach().float().numpy()
        if numbers.ndim == 1:
            writer.add_tensor(written, numbers)
        else:
            writer.add_tensor(written, gguf.quants.quantize(numbers, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """Adds the bundled target's tokenizer, and unused tokens for the rest of the vocabulary."""
    described = json.loads((demo.folder("target") / "tokenizer.json").read_text(encoding="utf-8"))
    texts = [f"[unused {id_}]" for id_ in range(VOCABULARY)]
    types = [gguf.TokenType.UNUSED] * VOCABULARY
    for text, id_ in described["model"]["vocab"].items():
        texts[id_] = text
        types[id_] = gguf.TokenType.NORMAL
    for token in described["added_tokens"]:
        texts[token["id"]] = token["content"]
        types[token["id"]] = gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(texts)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in described["model"]["merges"]])
