"""Measure time and memory of a training step (EESD, Table 6) for an exit layer and for a draft model of the same size.

    python tests/measure_training.py exit|draft [--batches 12]

A batch has 16 sequences of 256 tokens, in float32 on a CPU. The draft model has as many parameters as the first layer and the
exit together (embedding, two layers, untied head), and all of them are trained. Memory is the peak of the process.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from statistics import median

import torch
from training_helpers import opened

SEQUENCES, TRAINING_LENGTH = 16, 256


def exit_layer(batches: int) -> dict[str, float]:
    from specgen.engine.exit_layer import ExitLayer, FirstLayers

    from specgen import demo
    from specgen.training.corpus import demo_corpus
    from specgen.training.exit_training import ExitTraining
    from specgen.training.training_loop import TrainingBatches
    from specgen.training.training_task import Recipe

    target = opened(demo.folder("target"))
    recipe = Recipe(steps=1000, batch_size=SEQUENCES, training_length=TRAINING_LENGTH)
    layer = ExitLayer.of(target.model)
    first = FirstLayers(target.model, 1)
    text = TrainingBatches(demo_corpus(target.tokenizer.encode_long, 0, 100_000), [], recipe)
    training = ExitTraining(first, layer, text)
    trained = sum(weight.numel() for weight in layer.parameters())
    return timed(training.advance, batches, first.num_parameters + trained, trained)


def draft_model(batches: int) -> dict[str, float]:
    from transformers import AutoConfig, AutoModelForCausalLM

    from specgen import demo

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

    size = sum(weight.numel() for weight in model.parameters())
    return timed(step, batches, size, size)


def timed(step: Callable[[], object], batches: int, held: int, trained: int) -> dict[str, float]:
    seconds = []
    for _ in range(batches):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return {
        "held": held,
        "trained": trained,
        "megabytes_of_weights_gradients_and_moments": (4 * held + 12 * trained) / 2**20,
        "peak_megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "seconds": median(seconds[len(seconds) // 4 :]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=["exit", "draft"])
    parser.add_argument("--batches", type=int, default=12)
    options = parser.parse_args()
    figures = (exit_layer if options.model == "exit" else draft_model)(options.batches)
    print(" ".join(f"{name} {value:,.3f}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
