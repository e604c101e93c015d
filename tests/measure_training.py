"""Measure time and memory of a training step (EESD, Table 6) and of the generation of training text.

    python tests/measure_training.py exit|draft|text [--backend native] [--batches 12]

`exit` trains an exit layer of the bundled target, `draft` a draft model of the same size: as many parameters as the first layer
and the exit together (embedding, two layers, untied head), and all of them are trained. A batch has 16 sequences of 256 tokens,
in float32 on a CPU. `text` lets the target continue 64 beginnings of texts to 256 tokens each, and then predict these texts.
Memory is the peak of the process.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from training_helpers import opened

from specgen import demo
from specgen.train.corpus import ALL_PARTS, Corpus, demo_corpus

SEQUENCES, TRAINING_LENGTH = 16, 256


def corpus_of(target: Any) -> Corpus:
    return demo_corpus(target.tokenizer.encode, 0, 100_000)


def exit_layer(batches: int, backend: str) -> dict[str, float]:
    from specgen.train.exit_training import ExitTraining
    from specgen.train.training_loop import TrainingBatches
    from specgen.train.training_task import Recipe

    target = opened(demo.folder("target"), backend)
    recipe = Recipe(steps=1000, batch_size=SEQUENCES, training_length=TRAINING_LENGTH)
    layer = target.model.trainable_exit(target.folder, 1)
    target.model.free_weights(1)
    training = ExitTraining(target.model, 1, layer, TrainingBatches(corpus_of(target), [], recipe))
    return timed(training.advance, batches, sum(weight.numel() for weight in training.trained.values()))


def text(_: int, backend: str) -> dict[str, float]:
    from specgen.train.batched_generation import continuations
    from specgen.train.generated_text import top1_and_hidden_states
    from specgen.train.text_generation import corpus_prompts

    target = opened(demo.folder("target"), backend)
    prompts = corpus_prompts(corpus_of(target), [ALL_PARTS] * 64, TRAINING_LENGTH, 0)
    start = time.perf_counter()
    texts = continuations(target, prompts, TRAINING_LENGTH, greedy=False)
    generated, new = time.perf_counter() - start, sum(map(len, texts)) - sum(map(len, prompts))
    start = time.perf_counter()
    for ids in texts:
        top1_and_hidden_states(target.model, torch.tensor(ids))
    predicted = time.perf_counter() - start
    return {
        "generated_tokens_per_second": new / generated,
        "predicted_tokens_per_second": sum(map(len, texts)) / predicted,
        "peak_megabytes": peak_megabytes(),
    }


def draft_model(batches: int, _: str) -> dict[str, float]:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(demo.folder("target"))
    config.num_hidden_layers, config.tie_word_embeddings = 2, False
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        ids = torch.randint(config.vocab_size, (SEQUENCES, TRAINING_LENGTH + 1))
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return timed(step, batches, sum(weight.numel() for weight in model.parameters()))


def timed(step: Callable[[], object], batches: int, trained: int) -> dict[str, float]:
    seconds = []
    for _ in range(batches):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    typical = median(seconds[len(seconds) // 4 :])
    return {
        "trained": trained,
        "peak_megabytes": peak_megabytes(),
        "seconds": typical,
        "tokens_per_second": SEQUENCES * TRAINING_LENGTH / typical,
    }


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", choices=["exit", "draft", "text"])
    parser.add_argument("--backend", choices=["native", "transformers"], default="native")
    parser.add_argument("--batches", type=int, default=12)
    options = parser.parse_args()
    measure = {"exit": exit_layer, "draft": draft_model, "text": text}[options.measured]
    print(" ".join(f"{name} {value:,.3f}" for name, value in measure(options.batches, options.backend).items()))


if __name__ == "__main__":
    main()
