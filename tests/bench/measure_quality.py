"""What do rounded weights cost in quality? Prints perplexities of generated text.

    python tests/bench/measure_quality.py [--llama FOLDER] [--tokens 128] [--threads 2]

The published model in float32 (transformers) answers chat prompts; specgen and llama.cpp then read
these answers, with each kind of weights, in passes of 8 tokens as in verification. `changed` is the
share of tokens before which the most likely token is another than in float32.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

from measure_published import QUESTIONS, chat_ids, end_ids, published_files
from programs import Program, Programs, add_options
from published_model import gguf_file, target_folder
from transformers import AutoTokenizer

from specgen.compare.prompts import load_prompts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--tokens", type=int, default=128, help="of an answer, at most")
    parser.add_argument("--limit", type=int, default=40, help="answers")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(target_folder())
    questions = [question for group in QUESTIONS.values() for question in group]
    questions += [prompt.text for prompt in load_prompts(None)]
    prompts = [chat_ids(tokenizer, question) for question in questions[: options.limit]]
    with Programs(options) as programs:
        reference = programs.transformers(target_folder(), "float32")
        # the same ids as those of float32, and faster
        writer = programs.specgen(target_folder(), "auto")
        answers = [generated(writer, prompt, options.tokens) for prompt in prompts]
        expected = predictions(reference, prompts, answers)
        show("transformers, float32", expected, expected)
        show("specgen, stored", predictions(writer, prompts, answers), expected)
        for name, program in rounded_programs(programs, len(tokenizer)).items():
            show(name, predictions(program, prompts, answers), expected)


def rounded_programs(programs: Programs, vocabulary: int) -> dict[str, Program]:
    """Returns the programs whose weights differ from the stored ones."""
    started = {
        "specgen, int8": programs.specgen(target_folder(), "int8"),
        "specgen, file": programs.specgen(gguf_file()),
    }
    ends = end_ids(target_folder())
    for build in programs.llama_builds:
        for kind, path in published_files().items():
            started[f"{build}, {kind}"] = programs.llama(
                build, path, vocabulary=vocabulary, ends=ends
            )
    return started


def generated(program: Program, prompt: Sequence[int], count: int) -> list[int]:
    answer = program.ask("decode", prompt=list(prompt), count=count, way="suffix", to_end=True)
    ids: list[int] = answer["ids"]
    return ids


def predictions(
    program: Program, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> tuple[float, list[int]]:
    """Returns the loss of all answers in nats, and the most likely token before each token."""
    loss = 0.0
    choices: list[int] = []
    for prompt, answer in zip(prompts, answers, strict=True):
        read: dict[str, Any] = program.ask("predictions", prompt=list(prompt), tokens=list(answer))
        loss += read["loss"]
        choices += read["choices"]
    return loss, choices


def show(name: str, read: tuple[float, list[int]], expected: tuple[float, list[int]]) -> None:
    loss, choices = read
    count = len(choices)
    perplexity = math.exp(loss / count)
    more = perplexity / math.exp(expected[0] / count) - 1
    changed = sum(a != b for a, b in zip(choices, expected[1], strict=True)) / count
    print(
        f"{name:24} {count} tokens, perplexity {perplexity:.4f} ({more:+.2%}), "
        f"changed {changed:.2%}",
        flush=True,
    )


if __name__ == "__main__":
    main()
