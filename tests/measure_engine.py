"""Measure the engine on a random model of 0.5B parameters (Qwen3's shape, bfloat16) against transformers. Not a test.

    python tests/measure_engine.py FOLDER [--threads 1] [--tokens 24] [--repeats 3] [--rows loading,passes,plain,sd]

Writes the model and a draft model into FOLDER (1.3 GB) unless they are there. The draft model is the target's first layers; the
output projections of the target's other layers are small, so that both often predict the same token. All alternatives are
measured in turns in one run; the figures are medians.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

import torch
import transformers
from benchmark import specgen_runner, transformers_runner
from families import LETTERS, make_tokenizer
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, DynamicCache, Qwen3Config

import specgen
from specgen.engine.timing import time_passes
from specgen.tune.outcome import counted

WIDTHS = (1, 4, 8)
CONTEXTS = (128, 1024)
METHOD = "sd:k=3"
ASSISTED = {"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
LOADERS = {
    "specgen": "import specgen; model = specgen.load({!r}, device='cpu', dtype='bfloat16')",
    "transformers": "from transformers import AutoModelForCausalLM as M; model = M.from_pretrained({!r}, dtype='bfloat16')",
}
LOADING = """
import time, torch
torch.set_num_threads({threads})
start = time.perf_counter()
{load}
seconds = time.perf_counter() - start
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(seconds, *(int(status[key].split()[0]) / 1024 for key in ("VmHWM", "RssAnon", "RssFile")))
"""


@dataclass(frozen=True)
class Shape:
    """The sizes of the random target. `draft_layers` are its first layers, `tail_scale` multiplies the outputs of the others."""

    vocab_size: int = 151_936
    layers: int = 24
    width: int = 896
    intermediate: int = 4864
    heads: int = 14
    kv_heads: int = 2
    head_dim: int = 64
    draft_layers: int = 4
    tail_scale: float = 0.05  # then both agree on about 4 of 5 tokens

    def config(self, layers: int) -> Qwen3Config:
        return Qwen3Config(
            vocab_size=self.vocab_size,
            hidden_size=self.width,
            intermediate_size=self.intermediate,
            num_hidden_layers=layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
            dtype="bfloat16",
            architectures=["Qwen3ForCausalLM"],
        )

    def layer(self, index: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Random weights of one layer, by their names in the file."""
        query, key_value = self.heads * self.head_dim, self.kv_heads * self.head_dim
        output_scale = 1.0 if index < self.draft_layers else self.tail_scale
        shapes = {
            "self_attn.q_proj": (query, self.width),
            "self_attn.k_proj": (key_value, self.width),
            "self_attn.v_proj": (key_value, self.width),
            "self_attn.o_proj": (self.width, query),
            "mlp.gate_proj": (self.intermediate, self.width),
            "mlp.up_proj": (self.intermediate, self.width),
            "mlp.down_proj": (self.width, self.intermediate),
        }
        norms = {"input_layernorm": self.width, "post_attention_layernorm": self.width}
        norms |= {"self_attn.q_norm": self.head_dim, "self_attn.k_norm": self.head_dim}
        weights = {}
        for name, shape in shapes.items():
            scale = 0.02 * (output_scale if name.endswith(("o_proj", "down_proj")) else 1.0)
            weights[name] = _random(shape, scale, generator)
        weights |= {name: torch.ones(size, dtype=torch.bfloat16) for name, size in norms.items()}
        return {f"model.layers.{index}.{name}.weight": weight for name, weight in weights.items()}


def write_models(folder: Path, shape: Shape | None = None) -> tuple[str, str]:
    """Writes a random target and a draft model of its first layers, unless they are there. Returns their folders."""
    shape = Shape() if shape is None else shape
    target, draft = folder / "target", folder / "draft"
    if not (target / "model.safetensors").exists():
        generator = torch.Generator().manual_seed(0)
        weights = {"model.embed_tokens.weight": _random((shape.vocab_size, shape.width), 0.02, generator)}
        weights["model.norm.weight"] = torch.ones(shape.width, dtype=torch.bfloat16)
        for layers, path in ((shape.draft_layers, draft), (shape.layers, target)):
            for index in range(layers):
                if f"model.layers.{index}.input_layernorm.weight" not in weights:
                    weights |= shape.layer(index, generator)
            path.mkdir(parents=True, exist_ok=True)
            shape.config(layers).save_pretrained(path)
            make_tokenizer(LETTERS).save_pretrained(path)
            save_file(weights, path / "model.safetensors", {"format": "pt"})
    return str(target), str(draft)


def _random(shape: tuple[int, ...], scale: float, generator: torch.Generator) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, scale, generator=generator)


def measure_loading(target: str, repeats: int, threads: int) -> None:
    """Loads in fresh processes: the seconds with imports other than torch, and the resident memory."""
    figures: dict[str, list[list[float]]] = defaultdict(list)
    for _ in range(repeats):
        for name, load in LOADERS.items():
            script = LOADING.format(threads=threads, load=load.format(target))
            output = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
            figures[name].append([float(value) for value in output.split()])
    for name, runs in figures.items():
        seconds, *sizes = map(median, zip(*runs, strict=True))
        peak, anonymous, mapped = (f"{size:5.0f} MB" for size in sizes)
        print(
            f"loading  {name:14} {seconds:6.2f} s, resident: peak {peak}, afterwards {anonymous} anonymous and {mapped} of files"
        )


def reference_passes(model: Any, context_length: int, repeats: int) -> dict[int, float]:
    """Median seconds of a forward pass of transformers over w tokens after `context_length` cached ones, for each w in WIDTHS."""
    cache = DynamicCache(config=model.config)
    samples: dict[int, list[float]] = {width: [] for width in WIDTHS}
    with torch.inference_mode():
        model(torch.ones(1, context_length, dtype=torch.long), past_key_values=cache, logits_to_keep=1)
        for _ in range(repeats):
            for width in WIDTHS:
                start = perf_counter()
                model(torch.ones(1, width, dtype=torch.long), past_key_values=cache)
                samples[width].append(perf_counter() - start)
                cache.crop(-width)
    return {width: median(taken) for width, taken in samples.items()}


def measure_passes(pair: specgen.Pair, reference: Any, repeats: int) -> None:
    alternatives: dict[str, Callable[[int], dict[int, float]]] = {
        "specgen": lambda length: time_passes(pair.runners[0], WIDTHS, length),
        "specgen, draft": lambda length: time_passes(pair.runners[1] or pair.runners[0], WIDTHS, length),
        "transformers": lambda length: reference_passes(reference, length, 5),
    }
    for length in CONTEXTS:
        figures: dict[str, list[dict[int, float]]] = defaultdict(list)
        for _ in range(repeats):
            for name, measured in alternatives.items():
                figures[name].append(measured(length))
        for name, runs in figures.items():
            columns = "  ".join(f"{width}: {1e3 * median(run[width] for run in runs):6.1f}" for width in WIDTHS)
            print(f"passes   {name:14} after {length:4} tokens, ms by rows  {columns}")


def measure_decoding(pair: specgen.Pair, reference: Any, assistant: Any, rows: list[str], tokens: int, repeats: int) -> None:
    """Tokens per second with the prefill of 32 tokens, each alternative on the same random prompts in turns."""
    runners: dict[str, Callable[[list[int]], Any]] = {}
    if "plain" in rows:
        runners |= {
            "specgen": specgen_runner(pair, "ar", tokens),
            "transformers": transformers_runner(reference, None, tokens, {}),
        }
    if "sd" in rows:
        runners[f"specgen {METHOD}"] = specgen_runner(pair, METHOD, tokens)
        runners["assisted K=3"] = transformers_runner(reference, assistant, tokens, ASSISTED)
    rng = Random(0)
    prompts = [[rng.randrange(3, pair.runners[0].vocab_size) for _ in range(32)] for _ in range(repeats)]
    seconds: dict[str, list[float]] = defaultdict(list)
    outputs: dict[str, list[list[int]]] = defaultdict(list)
    for ids in [prompts[0], *prompts]:  # the first turn warms up
        for name, run in runners.items():
            output, taken, _ = run(ids)
            seconds[name].append(taken)
            outputs[name].append(output)
    for name, taken in seconds.items():
        same = sum(map(_common, outputs[name][1:], next(iter(outputs.values()))[1:])) / (tokens * repeats)
        speed = tokens / median(taken[1:])
        print(f"decoding {name:14} {speed:6.2f} tokens/s; {same:4.0%} of the output before the first difference to the first row")
    if "sd" in rows:
        print(f"acceptance rate of {METHOD}: {acceptance_rate(pair, prompts, tokens):.2f}")


def _common(one: list[int], other: list[int]) -> int:
    """Returns the length of the common prefix."""
    return next((index for index, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def acceptance_rate(pair: specgen.Pair, prompts: list[list[int]], tokens: int) -> float:
    name, _, setting = METHOD.partition(":k=")
    sampling = specgen.SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    summaries = [pair.generate(ids, name, sampling, k=int(setting)).summary for ids in prompts]
    return sum(one["accepted"] for one in summaries) / sum(one["drafted"] for one in summaries)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows", default="loading,passes,plain,sd")
    parser.add_argument("--tail-scale", type=float, default=Shape.tail_scale, help="for models that are not there yet")
    options = parser.parse_args()
    rows = options.rows.split(",")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    target, draft = write_models(options.folder, Shape(tail_scale=options.tail_scale))
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {counted(options.threads, 'thread')}")
    if "loading" in rows:
        measure_loading(target, options.repeats, options.threads)
    if rows == ["loading"]:
        return
    reference, assistant = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval() for path in (target, draft))
    with specgen.load(target, draft, device="cpu", dtype="bfloat16") as pair:
        if "passes" in rows:
            measure_passes(pair, reference, options.repeats)
        if "plain" in rows or "sd" in rows:
            measure_decoding(pair, reference, assistant, rows, options.tokens, options.repeats)


if __name__ == "__main__":
    main()
