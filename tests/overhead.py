"""What does decoding cost besides the forward passes? `python tests/overhead.py` prints microseconds a round, by part.

The model runners are real, with forward functions that return logits computed beforehand. They depend on the position alone, so
every run has the same rounds: drafts of about five tokens, of which the last is rejected. Not a test.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch

from specgen.base.types import Context, SamplingParams
from specgen.decoding.components import Components
from specgen.decoding.run import Clock, Run
from specgen.engine.forward_pass import Cache, ForwardFunction, ForwardPass, ModelOutput
from specgen.engine.model_runner import ModelRunner
from specgen.methods import factory
from specgen.methods import table as methods

PARTS = ("runners", "drafter", "policy", "verifier", "rest")  # rest: commit, clock and the timing of the other parts
METHODS = {"ar": "ar", "sd": "sd", "svip": "svip", "eesd-beta": "beta-ts", "lookup": "lookup"}  # EESD's policy, any draft model
PERIOD, WIDEST = 60, 64  # the logits repeat, which prompt lookup needs


@dataclass
class Part:
    """Seconds in one part of a round, without the parts that it calls."""

    name: str
    seconds: defaultdict[str, float]

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        seconds, name = self.seconds, self.name

        def timed(*args: Any, **kwargs: Any) -> Any:
            inner, start = seconds["inner"], time.perf_counter()
            result = function(*args, **kwargs)
            spent = time.perf_counter() - start
            seconds[name] += spent - seconds["inner"] + inner
            seconds["inner"] = inner + spent
            return result

        return timed


def tables(vocabulary: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's and the draft's logits. At each sixth position both are unsure, and have other likeliest tokens."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(PERIOD, vocabulary, generator=generator)
    best = torch.randint(3, vocabulary, (PERIOD, 1), generator=generator)
    sure = target.logsumexp(dim=-1, keepdim=True) + 4
    sure[5::6] -= 6
    target.scatter_(1, best, sure)
    draft = target.clone()
    draft[5::6] = target[5::6].roll(1, dims=-1)
    return tuple(torch.cat((table, table, table[:WIDEST])).to(dtype) for table in (target, draft))


class ScriptedModel:
    """A model without layers, whose forward pass returns rows of `table` by position."""

    device = torch.device("cpu")

    def __init__(self, table: torch.Tensor) -> None:
        self.num_embeddings = self.vocab_size = table.shape[1]
        self.shape = SimpleNamespace(context_limit=8192, rope_boundary=None)
        self._table = table

    def new_cache(self) -> Cache:
        return SimpleNamespace(length=0, capacity=64)

    def forward(self) -> ForwardFunction:
        def forward(forward_pass: ForwardPass, logits_to_keep: int) -> ModelOutput:
            first = (forward_pass.last - logits_to_keep) % PERIOD
            return ModelOutput(self._table[first : first + logits_to_keep])

        return forward


def scripted_runner(table: torch.Tensor, part: Callable[[str], Part]) -> ModelRunner:
    model: Any = ScriptedModel(table)
    return ModelRunner(model, forward=part("forward").around(model.forward()))


def figures(method: str, temperature: float, both: tuple[torch.Tensor, ...], length: int, *, split: bool) -> dict[str, float]:
    """Microseconds of a round (those that a tenth of the rounds stays below) and its drafted tokens, after a prompt of `length`.

    With `split` it has the parts of a round too; timing them makes the whole round slower.
    """
    seconds: defaultdict[str, float] = defaultdict(float)

    def part(name: str) -> Part:
        return Part(name, seconds)

    target, draft = (scripted_runner(table, part) for table in both)
    sampling = SamplingParams(max_new_tokens=600, temperature=temperature, seed=1)
    components = Components(target, draft, sampling, frozenset({0}), target.vocab_size, 1, length + 600)
    chosen = methods.find(METHODS[method])
    rng = random.Random(length)
    context = Context([rng.randrange(3, 400) for _ in range(length)])
    run = factory.make_run(chosen, methods.resolve(chosen, {}), components, context, 600, None, Clock(None))
    if split:
        timed(run, part)
    samples: dict[str, list[float]] = {name: [] for name in (*(PARTS if split else ()), "round", "drafted")}
    rounds = run.rounds()
    for _ in range(12):  # the prefill, the first buffers, the first matches
        next(rounds)
    while True:
        seconds.clear()
        start = time.perf_counter()
        round_ = next(rounds)
        seconds["round"] = time.perf_counter() - start - seconds["forward"]
        if run.finish_reason is not None:
            return {name: sorted(taken)[len(taken) // 10] for name, taken in samples.items()}  # hardly any was interrupted
        if not round_.draft.tokens and method != "ar":  # prompt lookup found nothing
            continue
        seconds["rest"] = seconds["round"] - sum(seconds[name] for name in PARTS[:4])
        for name in samples:
            samples[name].append(len(round_.draft.tokens) if name == "drafted" else 1e6 * seconds[name])


def timed(run: Run, part: Callable[[str], Part]) -> None:
    for runner in {id(run.target): run.target, id(run.drafter): getattr(run.drafter, "_runner", run.target)}.values():
        runner.logits = part("runners").around(runner.logits)
    run.drafter.propose = part("drafter").around(run.drafter.propose)
    run.policy.keep_drafting = part("policy").around(run.policy.keep_drafting)
    run.policy.observe = part("policy").around(run.policy.observe)
    run.verifier.verify = part("verifier").around(run.verifier.verify)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[4096, 151936])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0, 1])
    parser.add_argument("--length", type=int, nargs="+", default=[300], help="tokens of the prompt")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for vocabulary in options.vocabulary:
        both = tables(vocabulary, getattr(torch, options.dtype))
        for temperature in options.temperature:
            for length in options.length:
                print(f"\n{vocabulary} logits, temperature {temperature:g}, {length} tokens of prompt; microseconds a round")
                print(f"{'':10}", *(f"{name:>9}" for name in (*PARTS, "round", "drafted")))
                for method in METHODS:
                    taken = [
                        figures(method, temperature, both, length, split=split)
                        for _ in range(options.repeats)
                        for split in (True, False)
                    ]
                    parts = {name: median(one[name] for one in taken[::2]) for name in PARTS}
                    whole = {name: median(one[name] for one in taken[1::2]) for name in ("round", "drafted")}
                    print(f"{method:10}", *(f"{value:9.1f}" for value in (parts | whole).values()))


if __name__ == "__main__":
    main()
