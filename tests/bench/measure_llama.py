"""Is specgen faster than llama.cpp on this processor? Prints tokens/s of both; needs
`llama-cpp-python` and `gguf`.

    pip install -e ".[bench]"        # builds llama.cpp from source, about ten minutes
    python tests/bench/measure_llama.py [--layers 24 --width 896 --inner 4864 --heads 14]
        [--threads 1]

A random Qwen2 target and a draft model of a tenth of its size are written as bfloat16 safetensors
and as GGUF, with the same weights. The draft is a part of the target: its first two layers, heads
and columns; whatever else the target computes is scaled by `--rest`, which sets the acceptance
rate. The programs take turns; figures are medians. Both decode greedily, and llama.cpp's
speculative decoding (draft K tokens, verify them in one batch) is driven here, by its C functions,
with the best K.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import gguf
import torch
from llama_model import Llama, llama_plain
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

import specgen
from specgen import demo

VOCABULARY = 151_936
STRONGER = 4.0  # weights of layers than transformers makes them, for texts without repetitions
CERTAIN = 30.0  # times larger logits, for probabilities like those of a trained model
KINDS = ("Q8_0", "Q4_0", "BF16")
LENGTHS = (2, 4, 6, 8, 12)
PROMPTS = [list(range(first, first + 20)) for first in (100, 1000, 10_000, 50_000)]
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


def save(module: Any, folder: Path) -> Path:
    module.to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo.folder("target") / name, folder)
    return folder


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
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(VOCABULARY)
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


def llama_speculative(
    target: Llama, draft: Llama, k: int, prompt: Sequence[int], *, count: int
) -> float:
    """Returns the tokens/s of drafts of `k` tokens, each verified in one pass, after the prompt's
    passes."""
    target.keep(0)
    draft.keep(0)
    output = [*prompt, target.choices(prompt)[0]]
    draft.choices(prompt)
    begin = time.perf_counter()
    first = len(output)
    while len(output) - first < count:
        drafted: list[int] = []
        for _ in range(k):
            drafted += draft.choices(output[draft.length :] if not drafted else drafted[-1:])
        chosen = target.choices([output[-1], *drafted], wanted=k + 1)
        accepted = next((index for index in range(k) if drafted[index] != chosen[index]), k)
        output += chosen[: accepted + 1]
        target.keep(len(output) - 1)
        draft.keep(min(draft.length, len(output) - 1))
    return (len(output) - first) / (time.perf_counter() - begin)


def specgen_speed(
    pair: Any, method: str, prompt: Sequence[int], count: int
) -> tuple[float, float | None]:
    """Returns the tokens/s after the prompt's pass, and the acceptance rate."""
    result = pair.generate(
        list(prompt),
        method=method,
        sampling=specgen.SamplingParams(max_new_tokens=count, ignore_eos=True),
    )
    found = result.summary
    return (found["new_tokens"] - 1) / (
        found["seconds"] - found["phase_seconds"]["prefill"]
    ), found["acceptance_rate"]


def transformers_speed(module: Any, prompt: Sequence[int], *, count: int) -> float:
    ids = torch.tensor([list(prompt)])
    begin = time.perf_counter()
    module.generate(
        ids, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return count / (time.perf_counter() - begin)


def make_files(folder: Path, options: argparse.Namespace) -> None:
    """Writes the target and the draft model, each as safetensors and as GGUF, unless the folder has
    them."""
    if (folder / "draft").exists():
        return
    torch.manual_seed(0)
    target = model(options.layers, options.width, options.inner, options.heads, 2)
    draft = model(2, 256, 1024, 4, 1)
    make_pair(target, draft, options.rest)
    for role, module in {"target": target, "draft": draft}.items():
        for kind in KINDS:
            write_gguf(module, folder / f"{role}-{kind}.gguf", gguf.GGMLQuantizationType[kind])
        save(module, folder / role)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in {
        "layers": 24,
        "width": 896,
        "inner": 4864,
        "heads": 14,
        "threads": 1,
        "tokens": 64,
        "prompts": 4,
        "repeats": 3,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rest", type=float, default=0.1)
    parser.add_argument("--folder", type=Path, help="for the models' files, which are kept there")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as made:
        measure(options.folder or Path(made), options)


def measure(folder: Path, options: argparse.Namespace) -> None:
    make_files(folder, options)
    plain = {
        kind: Llama(folder / f"target-{kind}.gguf", options.threads, VOCABULARY) for kind in KINDS
    }
    small = Llama(folder / "draft-Q8_0.gguf", options.threads, VOCABULARY)
    named = {"target": str(folder / "target"), "draft": str(folder / "draft"), "device": "cpu"}
    pair = specgen.load(**named, dtype="int8", draft_dtype="int8")
    reference = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.bfloat16)
    count = options.tokens
    rates = []

    def adaptive(prompt: Sequence[int]) -> float:
        speed, rate = specgen_speed(pair, "adaptive", prompt, count)
        rates.append(rate or 0.0)
        return speed

    ways: dict[str, Callable[[Sequence[int]], float]] = {
        **{f"llama.cpp {kind}": partial(llama_plain, plain[kind], count=count) for kind in KINDS},
        **{
            f"llama.cpp Q8_0, draft of {k}": partial(
                llama_speculative, plain["Q8_0"], small, k, count=count
            )
            for k in LENGTHS
        },
        "specgen int8, plain": lambda prompt: specgen_speed(pair, "ar", prompt, count)[0],
        "specgen int8, adaptive": adaptive,
        "transformers bfloat16": partial(transformers_speed, reference, count=8),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.repeats):
        for prompt in PROMPTS[: options.prompts]:
            for name, way in ways.items():
                found[name].append(way(prompt))
    for name, speeds in found.items():
        print(f"{name:28} {median(speeds):7.1f} tokens/s  {min(speeds):.1f} to {max(speeds):.1f}")
    print(f"acceptance of adaptive {median(rates):.2f}, {min(rates):.2f} to {max(rates):.2f}")
    pair.close()


if __name__ == "__main__":
    main()
