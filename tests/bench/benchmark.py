"""Measures the speed of specgen's methods against transformers on the same models: `python
tests/bench/benchmark.py`.

Runs are taken in turn, prompt by prompt, so that a drifting machine is fair to all; each method's
figure is the median over the prompts of its tokens a second over those of transformers' plain
`generate` on the same prompt. All outputs must be identical.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
import yaml
from transformers import AutoModelForCausalLM, GenerationConfig

import specgen
from specgen import demo
from specgen.base.text import counted
from specgen.engine.forward_pass import ForwardFunction, ForwardPass, ModelOutput
from specgen.methods import find, resolve

PLAIN = "transformers"
METHODS = (
    "ar",
    "sd:k=5",
    "sd:k=8",
    "sd:k=12",
    "heuristic",
    "confidence",
    "svip",
    "adaptive",
    "beta-ts",
    "lookup",
    "pearl",
)
Answer = tuple[list[int], float, dict[str, float]]


def examples(count: int) -> list[str]:
    """The texts of about `count` prompts of examples.yaml that are not for tuning: the first `count
    / 4` of each category, at least one."""
    entries = yaml.safe_load((Path(__file__).parents[2] / "examples.yaml").read_text())["prompts"]
    by_category: dict[str, list[str]] = defaultdict(list)
    for entry in entries:
        if not entry.get("tuning"):
            by_category[entry["category"]].append(entry["prompt"])
    return [
        prompt
        for texts in by_category.values()
        for prompt in texts[: max(1, count // len(by_category))]
    ]


def transformers_runner(
    target: Any, draft: Any, tokens: int, settings: dict[str, Any]
) -> Callable[[list[int]], Answer]:
    """Returns a function that runs transformers' `generate` after token ids; with a draft, its
    assisted generation.

    The `settings` are written to the draft's generation config, because transformers reads them
    only there.
    """
    if draft is not None:
        draft.generation_config = GenerationConfig(
            **{**draft.generation_config.to_diff_dict(), **settings}
        )
    config = GenerationConfig(
        max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )

    def run(ids: list[int]) -> Answer:
        prompt = torch.tensor([ids])
        start = time.perf_counter()
        options = {} if draft is None else {"assistant_model": draft}
        output = target.generate(
            prompt, attention_mask=torch.ones_like(prompt), generation_config=config, **options
        )
        return output[0, len(ids) :].tolist(), time.perf_counter() - start, {}

    return run


def specgen_runner(pair: specgen.Pair, written: str, tokens: int) -> Callable[[list[int]], Answer]:
    name, *pairs = written.split(":")
    settings = dict(part.split("=") for part in pairs)
    resolve(find(name), settings)

    def run(ids: list[int]) -> Answer:
        pair.forget()
        start = time.perf_counter()
        result = pair.generate(
            ids, name, specgen.SamplingParams(max_new_tokens=tokens, ignore_eos=True), **settings
        )
        return result.token_ids, time.perf_counter() - start, result.summary["phase_seconds"]

    return run


class ForwardClock:
    """Adds up in `seconds` the time of all forward passes that the pair's model runners make, those
    of early exit included."""

    def __init__(self, pair: specgen.Pair) -> None:
        self.seconds = 0.0
        loaded = pair.models.with_draft_model() or pair.models.plain()
        both_runners: list[Any] = [loaded.target]
        if loaded.draft is not None:
            both_runners.append(loaded.draft)
        if pair.parts.find("exit") is not None:
            both = pair.parts.runners("exit")
            assert both is not None
            both_runners += [both.target, both.draft]
        for runner in both_runners:
            runner._forward = self._timed(runner._forward)

    def _timed(self, forward: ForwardFunction) -> ForwardFunction:
        def timed(forward_pass: ForwardPass, logits_to_keep: int) -> ModelOutput:
            start = time.perf_counter()
            output = forward(forward_pass, logits_to_keep)
            self.seconds += time.perf_counter() - start
            return output

        return timed


def assistants(tokens: int, target: Any) -> dict[str, Callable[[list[int]], Answer]]:
    def draft() -> Any:
        return AutoModelForCausalLM.from_pretrained(
            demo.folder("draft"), dtype=torch.float32
        ).eval()

    constant = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
    return {
        "assisted K=5": transformers_runner(
            target, draft(), tokens, {"num_assistant_tokens": 5, **constant}
        ),
        "assisted heuristic": transformers_runner(
            target,
            draft(),
            tokens,
            {"num_assistant_tokens_schedule": "heuristic", "assistant_confidence_threshold": 0.0},
        ),
        "assisted defaults": transformers_runner(target, draft(), tokens, {}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=0, help="torch's own choice where 0")
    parser.add_argument(
        "--only", default="", help="these rows alone, between commas, plain decoding aside"
    )
    parser.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    if options.threads:
        torch.set_num_threads(options.threads)
    pair = specgen.load(device="cpu", dtype="float32")
    target = AutoModelForCausalLM.from_pretrained(demo.folder("target"), dtype=torch.float32).eval()
    runners = {PLAIN: transformers_runner(target, None, options.tokens, {})}
    only = options.only.split(",") if options.only else []
    ours = [
        *METHODS,
        *(
            name
            for name in only
            if name.partition(":")[0] in specgen.METHODS and name not in METHODS
        ),
    ]
    runners |= {name: specgen_runner(pair, name, options.tokens) for name in ours}
    runners |= assistants(options.tokens, target)
    if only:
        runners = {name: runner for name, runner in runners.items() if name in (PLAIN, *only)}
    texts = examples(options.prompts)
    report(measure(pair, runners, texts * options.repeats), options.tokens)


def measure(
    pair: specgen.Pair, runners: dict[str, Callable[[list[int]], Answer]], texts: list[str]
) -> dict[str, list[tuple[float, float, float]]]:
    """Runs all methods on each text. Returns for each method, per text: its seconds, its seconds
    relative to plain decoding's, and the share of the time outside forward passes."""
    inside = ForwardClock(pair)
    figures: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for position, text in enumerate([texts[0], *texts]):
        ids = pair.tokenizer.encode(text)
        answers = {}
        for name, run in runners.items():
            inside.seconds = 0.0
            tokens, seconds, _ = run(ids)
            answers[name] = (tokens, seconds, 1 - inside.seconds / seconds)
        different = [name for name, answer in answers.items() if answer[0] != answers[PLAIN][0]]
        if different:
            print(f"NOT the same output: {', '.join(different)} on prompt {position}")
        if position:  # the first round warms up
            for name, (_, seconds, outside) in answers.items():
                figures[name].append((seconds, answers[PLAIN][1] / seconds, outside))
    return figures


def report(figures: dict[str, list[tuple[float, float, float]]], tokens: int) -> None:
    print(
        f"torch {torch.__version__}, {counted(torch.get_num_threads(), 'thread')}, "
        f"{len(figures[PLAIN])} runs of {tokens} tokens"
    )
    for name, runs in figures.items():
        seconds, speedups, outside = zip(*runs, strict=True)
        share = f"{median(outside):6.1%} outside the models" if min(outside) < 0.99 else ""
        print(
            f"{name:20} {tokens / median(seconds):7.1f} tokens/s  {median(speedups):5.2f} "
            f"x plain  {share}"
        )


if __name__ == "__main__":
    main()
