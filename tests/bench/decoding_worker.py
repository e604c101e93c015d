"""One program that decodes, in a process of its own: with its own environment and libraries, it
neither helps nor hinders the other programs of a measurement. `programs.py` starts it and asks it.

It runs by the Python that the program needs (OpenVINO's has no specgen), so each class imports its
own libraries. Requests are lines of JSON on standard input, and each is answered by one line.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

CHUNK = 8  # tokens of a pass that `predictions` makes, as in verification

Answer = dict[str, Any]  # `ids`, `prompt_seconds` (of the first token), `seconds` (of the others)


class Specgen:
    """Decodes by the method that a request names."""

    def __init__(self, model: str, dtype: str, **draft: str) -> None:
        """`draft`: `draft` and `draft_dtype`, as of `specgen.load`."""
        import specgen
        from specgen.engine.kernels.library import kind, prepare
        from specgen.engine.precision import weight_bytes

        self._specgen = specgen
        # a first pair, so that the memory does not include what is imported or made once
        prepare(lambda _: None)
        specgen.load(device="cpu").close()
        with PeakMemory() as peak:
            self._pair = specgen.load(model, device="cpu", dtype=dtype, **draft)
        target = self._pair.target
        self._runner = target.runner()
        kept = sum(weight_bytes(target.files, target.device, target.precision).values())
        self.description = {
            "version": f"specgen, {kind()}",
            "loading_bytes": peak.bytes,
            "loaded_bytes": peak.left,
            "weight_bytes": kept,
        }

    def decode(self, prompt: list[int], count: int, way: str, to_end: bool) -> Answer:
        self._pair.forget()
        sampling = self._specgen.SamplingParams(max_new_tokens=count, ignore_eos=not to_end)
        result = self._pair.generate(prompt, method=way, sampling=sampling)
        summary = result.summary
        first = summary["phase_seconds"]["prefill"]
        return {
            "ids": result.token_ids,
            "prompt_seconds": first,
            "seconds": summary["seconds"] - first,
            "acceptance": summary["acceptance_rate"],
        }

    def pass_seconds(self, rows: int, context: int, repeats: int) -> list[float]:
        """Returns the seconds of passes over so many rows after `context` - 1 cached tokens."""
        from specgen.base.types import Context

        text = Context(range(100, 100 + context))
        drafted = list(range(1000, 1000 + rows - 1))
        self._runner.reserve(context + rows)
        self._runner.logits(text)
        return timed(lambda: self._runner.logits(text, drafted), repeats)

    def predictions(self, prompt: list[int], tokens: list[int]) -> Answer:
        from specgen.base.types import Context

        rows = []
        for first in range(0, len(tokens), CHUNK):
            text = Context([*prompt, *tokens[:first]])
            chunk = tokens[first : first + CHUNK]
            rows.append(self._runner.logits(text, chunk).logits[: len(chunk)].float().numpy())
        return losses_and_choices(np.concatenate(rows), tokens)


class Transformers:
    """Decodes by `generate`: `plain`, or with its prompt `lookup`."""

    def __init__(self, model: str, dtype: str, threads: int) -> None:
        import torch
        import transformers

        torch.set_num_threads(threads)
        self._torch = torch
        self._module = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, dtype)
        )
        self.description = {"version": f"transformers {transformers.__version__}"}

    def decode(self, prompt: list[int], count: int, way: str, to_end: bool) -> Answer:
        """The first token's time is that of a second call, which makes it alone."""
        options = {} if way == "plain" else {"prompt_lookup_num_tokens": 10}
        first_ids, first = self._generated(prompt, 1, options, to_end=False)
        ids, seconds = self._generated(prompt, count, options, to_end)
        assert ids[:1] == first_ids
        return {"ids": ids, "prompt_seconds": first, "seconds": seconds - first}

    def _generated(
        self, prompt: list[int], count: int, options: dict[str, Any], to_end: bool
    ) -> tuple[list[int], float]:
        ids = self._torch.tensor([prompt])
        begin = time.perf_counter()
        output = self._module.generate(
            ids,
            attention_mask=self._torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=None if to_end else count,
            do_sample=False,
            pad_token_id=0,
            **options,
        )
        return output[0, len(prompt) :].tolist(), time.perf_counter() - begin

    def predictions(self, prompt: list[int], tokens: list[int]) -> Answer:
        with self._torch.inference_mode():
            logits = self._module(self._torch.tensor([[*prompt, *tokens]])).logits[0]
        return losses_and_choices(logits[len(prompt) - 1 : -1].float().numpy(), tokens)


class LlamaCpp:
    """Decodes a GGUF file: `plain`, or with a draft model of so many tokens, `draft=4`."""

    def __init__(
        self, model: str, threads: int, vocabulary: int, ends: list[int], draft: str | None = None
    ) -> None:
        import llama_cpp
        from llama_model import Llama

        self._target = Llama(Path(model), threads, vocabulary)
        self._draft = None if draft is None else Llama(Path(draft), threads, vocabulary)
        self._ends = set(ends)
        features = llama_cpp.llama_print_system_info().decode()
        self.description = {"version": f"llama.cpp, {features}"}

    def decode(self, prompt: list[int], count: int, way: str, to_end: bool) -> Answer:
        if way == "plain":
            return self._plain(prompt, count, to_end)
        return self._speculative(prompt, count, int(way.removeprefix("draft=")))

    def _plain(self, prompt: list[int], count: int, to_end: bool) -> Answer:
        target = self._target
        target.keep(0)
        begin = time.perf_counter()
        ids = target.choices(prompt)
        middle = time.perf_counter()
        while len(ids) < count and not (to_end and ids[-1] in self._ends):
            ids += target.choices(ids[-1:])
        end = time.perf_counter()
        return {"ids": ids, "prompt_seconds": middle - begin, "seconds": end - middle}

    def _speculative(self, prompt: list[int], count: int, k: int) -> Answer:
        """Drafts `k` tokens in each round and verifies them in one pass."""
        target, draft = self._target, self._draft
        assert draft is not None
        target.keep(0)
        draft.keep(0)
        begin = time.perf_counter()
        output = [*prompt, *target.choices(prompt)]
        middle = time.perf_counter()
        draft.choices(prompt)
        while len(output) - len(prompt) < count:
            drafted: list[int] = []
            for _ in range(k):
                drafted += draft.choices(drafted[-1:] or output[draft.length :])
            chosen = target.choices([output[-1], *drafted], wanted=k + 1)
            accepted = next((index for index in range(k) if drafted[index] != chosen[index]), k)
            output += chosen[: accepted + 1]
            target.keep(len(output) - 1)
            draft.keep(min(draft.length, len(output) - 1))
        end = time.perf_counter()
        return {
            "ids": output[len(prompt) :],
            "prompt_seconds": middle - begin,
            "seconds": end - middle,
        }

    def pass_seconds(self, rows: int, context: int, repeats: int) -> list[float]:
        """Returns the seconds of passes over so many rows after `context` - 1 cached tokens."""
        target = self._target
        target.keep(0)
        target.run(range(100, 100 + context - 1), wanted=1)
        tokens = [99 + context, *range(1000, 1000 + rows - 1)]
        seconds = []
        for _ in range(repeats + 1):  # the first one warms up
            begin = time.perf_counter()
            target.run(tokens, wanted=rows)
            seconds.append(time.perf_counter() - begin)
            target.keep(context - 1)
        return seconds[1:]

    def predictions(self, prompt: list[int], tokens: list[int]) -> Answer:
        target = self._target
        target.keep(0)
        if len(prompt) > 1:
            target.run(prompt[:-1], wanted=1)
        inputs = [prompt[-1], *tokens[:-1]]
        rows = []
        for first in range(0, len(inputs), CHUNK):
            chunk = inputs[first : first + CHUNK]
            rows += [row.copy() for row in target.logits(chunk, wanted=len(chunk))]
        return losses_and_choices(np.stack(rows), tokens)


class OpenVino:
    """Decodes a model that OpenVINO's tools exported: `plain`, or with its prompt `lookup`."""

    def __init__(self, model: str, threads: int, ends: list[int]) -> None:
        import openvino
        import openvino_genai

        self._openvino = openvino
        self._genai = openvino_genai
        self._ends = ends
        self._pipelines = {
            way: openvino_genai.LLMPipeline(
                model, "CPU", INFERENCE_NUM_THREADS=threads, PERFORMANCE_HINT="LATENCY", **options
            )
            for way, options in {"plain": {}, "lookup": {"prompt_lookup": True}}.items()
        }
        self.description = {"version": f"OpenVINO GenAI {openvino_genai.__version__}"}

    def decode(self, prompt: list[int], count: int, way: str, to_end: bool) -> Answer:
        options = {} if way == "plain" else {"num_assistant_tokens": 5, "max_ngram_size": 3}
        config = self._genai.GenerationConfig(
            max_new_tokens=count, do_sample=False, ignore_eos=not to_end, **options
        )
        config.stop_token_ids = set(self._ends)
        ids = np.array([prompt], dtype=np.int64)
        inputs = self._genai.TokenizedInputs(
            self._openvino.Tensor(ids), self._openvino.Tensor(np.ones_like(ids))
        )
        result = self._pipelines[way].generate(inputs, config)
        metrics = result.perf_metrics
        first = metrics.get_ttft().mean / 1000
        whole = metrics.get_generate_duration().mean / 1000
        return {
            "ids": list(result.tokens[0]),
            "prompt_seconds": first,
            "seconds": whole - first,
        }


class PeakMemory:
    """Measures by how many `bytes` the memory of this process that belongs to no file grew at most
    within a `with` block, and how many of them were `left` at its end."""

    def __init__(self) -> None:
        self.bytes = 0
        self.left = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._before = anonymous_bytes()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.left = anonymous_bytes() - self._before

    def _watch(self) -> None:
        while True:
            self.bytes = max(self.bytes, anonymous_bytes() - self._before)
            if self._ended.wait(0.002):
                return


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    line = next(line for line in status.splitlines() if line.startswith("RssAnon:"))
    return 1024 * int(line.split()[1])


def timed(work: Any, repeats: int) -> list[float]:
    """Returns the seconds of each of so many calls; one more before them warms up."""
    work()
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return seconds


def losses_and_choices(logits: Any, tokens: Sequence[int]) -> Answer:
    """Returns the `loss` (nats) of all tokens, and the most likely token before each one, from the
    `logits` [tokens, vocabulary] that predict them."""
    logits = logits.astype(np.float64)
    largest = logits.max(1, keepdims=True)
    normaliser = np.log(np.exp(logits - largest).sum(1)) + largest[:, 0]
    loss = normaliser - logits[np.arange(len(tokens)), list(tokens)]
    return {"loss": float(loss.sum()), "choices": logits.argmax(1).tolist()}


PROGRAMS = {
    "specgen": Specgen,
    "transformers": Transformers,
    "llama.cpp": LlamaCpp,
    "openvino": OpenVino,
}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints is no answer
    name, options = json.loads(sys.argv[1])
    program: Any = PROGRAMS[name](**options)
    print(json.dumps(program.description), file=answers, flush=True)

    for line in sys.stdin:
        call, arguments = json.loads(line)
        print(json.dumps(getattr(program, call)(**arguments)), file=answers, flush=True)


if __name__ == "__main__":
    main()
