"""Measures what long contexts cost: memory of a prompt, and time per token. Run by hand:

    python tests/bench/measure_context.py memory
        peak resident memory of prompts of 2,000, 8,000 and 32,000 tokens
    python tests/bench/measure_context.py speed
        time per token after 100 and after 8,000 tokens

The models are random: what is measured depends on their sizes alone. Figures of memory are taken in
a process of their own each. Times are seconds of the CPU with one thread, so that other processes
disturb them less.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

MIB = 1 << 20
LIMIT = 40_000
LENGTHS = (2_000, 8_000, 32_000)
SPEED_LENGTHS = (100, 8_000)
NEW_TOKENS = 24
BACKENDS = ("native", "transformers")
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
DRAFT = SMALL | {"num_hidden_layers": 1}
LARGE = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
}
LARGE |= {"num_key_value_heads": 4}


def make(folder: Path, sizes: dict[str, int], seed: int) -> Path:
    """Saves a random model with a long context limit."""
    import torch
    from families import LETTERS, make_tokenizer, save
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = LlamaConfig(
        **sizes,
        **ids,
        vocab_size=len(LETTERS),
        max_position_embeddings=LIMIT,
        initializer_range=0.1,
    )
    save(LlamaForCausalLM(config), folder, make_tokenizer(LETTERS))
    return folder


def resident(name: str) -> int:
    """Returns the resident memory of this process in bytes: `name` VmRSS is the present one, VmHWM
    the highest."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def one_prompt(target: str, draft: str, backend: str, length: int) -> None:
    """Runs a prompt and a few tokens, and prints the expected and the measured bytes."""
    import specgen
    from specgen.engine.cached_prefix import PREFILL_CHUNK, chunk_size

    with specgen.load(target, draft, device="cpu", dtype="float32", backend=backend) as pair:
        sampling = specgen.SamplingParams(max_new_tokens=8, ignore_eos=True)
        pair.generate([5] * 70, "sd", sampling)
        pair.forget()
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        pair.generate([5 + number % 60 for number in range(length)], "sd", sampling)
        grown = resident("VmHWM") - before
        models = [pair.target.model, pair.draft.model]  # type: ignore[union-attr]
        cache = sum(model.shape.kv_bytes_per_token(4) for model in models) * (length + 8)
        shape = pair.target.model.shape
        rows = min(length, chunk_size(max(length - PREFILL_CHUNK, 0)))
        mask = rows * length * (4 + 1 + 1)  # additive, and two boolean ones it is made of
        chunk = 4 * rows * (6 * shape.hidden_size + 3 * (shape.intermediate_size or 0))
        # keys and values, once for each query head
        repeated = 2 * 4 * length * shape.num_heads * shape.head_size
        print(
            *(
                round(part / MIB, 1)
                for part in (cache, mask, chunk + repeated, cache + mask + chunk + repeated, grown)
            )
        )


def memory(folder: Path) -> None:
    names = [
        str(make(folder / role, sizes, seed))
        for role, sizes, seed in (("t", SMALL, 0), ("d", DRAFT, 1))
    ]
    print("backend       prompt    cache    masks    chunk  expected  measured (MiB)")
    for backend in BACKENDS:
        for length in LENGTHS:
            command = [sys.executable, __file__, "prompt", *names, backend, str(length)]
            made = subprocess.run(command, capture_output=True, text=True, check=False)
            if made.returncode:
                print(made.stderr)
                return
            cache, mask, chunk, expected, grown = made.stdout.split()[-5:]
            print(
                (
                    f"{backend:12} {length:7,} {cache:>8} {mask:>8} {chunk:>8} {expected:>9} "
                    f"{grown:>9}"
                ),
                flush=True,
            )


def speed(folder: Path, backends: Sequence[str]) -> None:
    import specgen
    from specgen.decoding import run

    run.time = SimpleNamespace(perf_counter=time.process_time)  # type: ignore[assignment]
    target = str(make(folder / "t", LARGE, 0))
    draft = str(make(folder / "d", LARGE | {"num_hidden_layers": 2}, 1))
    print(
        "backend      method      tokens  ms a round: draft   verify   rest   total   "
        "bytes read (MB)"
    )
    for backend in backends:
        with specgen.load(target, draft, device="cpu", dtype="float32", backend=backend) as pair:
            models = [pair.target.model, pair.draft.model]  # type: ignore[union-attr]
            weights = [
                4 * sum(loaded.files.parameters.values()) for loaded in (pair.target, pair.draft)
            ]  # type: ignore[union-attr]
            per_token = [model.shape.kv_bytes_per_token(4) for model in models]
            for method, settings in (
                ("ar", {}),
                ("sd", {"k": 4}),
                ("svip", {"threshold": 9.0, "max_draft": 4}),
                ("lookup", {}),
            ):
                totals = []
                for length in SPEED_LENGTHS:
                    prompt = [5 + (number * number) % 60 for number in range(length)]
                    sampling = specgen.SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
                    rounds = pair.generate(prompt, method, sampling, **settings).rounds[2:]
                    phases = [
                        dict(each.seconds) for each in rounds if each.draft.tokens or method == "ar"
                    ]
                    spent = {
                        name: statistics.median(each[name] for each in phases) for name in phases[0]
                    }
                    drafted = (
                        statistics.mean(len(each.draft.tokens) for each in rounds)
                        if method in ("sd", "svip")
                        else 0
                    )
                    read = sum(
                        (weights[role] + per_token[role] * length) * (1, drafted)[role]
                        for role in (0, 1)
                    )
                    rest = sum(spent.values()) - spent["draft"] - spent["verify"]
                    totals.append((sum(spent.values()), read))
                    parts = (spent["draft"], spent["verify"], rest, sum(spent.values()))
                    shown = "  ".join(f"{part * 1e3:7.2f}" for part in parts)
                    print(
                        f"{backend:12} {method:8} {length:7,}          {shown}   {read / 1e6:7.1f}",
                        flush=True,
                    )
                (short, few), (long, many) = totals
                print(f"{'':22} ratio: time {long / short:.2f}, bytes {many / few:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("memory", "speed", "prompt"))
    parser.add_argument("arguments", nargs="*")
    given = parser.parse_args()
    if given.what == "prompt":
        target, draft, backend, length = given.arguments
        one_prompt(target, draft, backend, int(length))
        return
    with tempfile.TemporaryDirectory() as folder:
        if given.what == "memory":
            memory(Path(folder))
        else:
            speed(Path(folder), given.arguments or BACKENDS)


if __name__ == "__main__":
    main()
