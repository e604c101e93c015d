"""What `measure_gpu.py` measures with: random models made on the device, timers, graphs, and scripted acceptance."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from random import Random
from statistics import median
from typing import Any

import torch
from scripted_models import scripted_run
from static_checks import Recording

from specgen.base.types import Context, Draft, SamplingParams, Verdict
from specgen.decoding import logits_ops
from specgen.decoding.run import Run
from specgen.decoding.verification import make_verdict
from specgen.engine.forward_pass import ForwardPass, ModelOutput, TreeNodes, chain_parents
from specgen.engine.inference_mode import inference
from specgen.engine.model_runner import ModelRunner
from specgen.engine.native.architecture import read_architecture
from specgen.engine.native.cuda_graphs import CudaGraphs, Graphs
from specgen.engine.native.inputs import layer_kinds
from specgen.engine.native.layer import NativeLayer
from specgen.engine.native.layer_weights import layer_weights
from specgen.engine.native.native_model import NativeModel, NativeParts
from specgen.engine.native.products import ProductFactory
from specgen.engine.native.static_forward import WIDTHS, use_cuda_graphs, use_static_passes
from specgen.engine.native.static_pass import StaticPass
from specgen.engine.native.tensor_names import layer_tensors

_LLAMA: dict[str, Any] = {"model_type": "llama", "vocab_size": 128_256, "rope_theta": 500_000.0, "rms_norm_eps": 1e-5}
LLAMA_8B = _LLAMA | {
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 16_384,
}
LLAMA_1B = LLAMA_8B | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "tie_word_embeddings": True}
TINY = LLAMA_8B | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 2048,
}


@dataclass(frozen=True)
class Sizes:
    """The shapes and amounts of the measurements."""

    target: dict[str, Any]
    draft: dict[str, Any]
    dtype: torch.dtype = torch.bfloat16
    new_tokens: int = 200
    long_context: int = 8000
    buckets: Sequence[int] = (512, 1024, 2048, 4096, 8192)
    widths: Sequence[int] = (1, 2, 4, 8, 16)
    copied_bytes: int = 4 << 30
    repeats: int = 20
    is_tiny: bool = False


FULL = Sizes(LLAMA_8B, LLAMA_1B)
SMALL = Sizes(
    TINY,
    TINY | {"num_hidden_layers": 1},
    new_tokens=24,
    long_context=600,
    buckets=(512,),
    widths=(1, 8),
    copied_bytes=1 << 20,
    repeats=3,
    is_tiny=True,
)


def native_model(
    config: dict[str, Any], device: torch.device, dtype: torch.dtype, seed: int = 0, *, exact: bool = False
) -> NativeModel:
    """A native model with random weights, made on the device."""
    architecture = read_architecture(dict(config))
    generator = torch.Generator(device).manual_seed(seed)

    def take(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if "norm" in name:
            return torch.ones(shape, dtype=dtype, device=device)
        return torch.randn(shape, generator=generator, dtype=dtype, device=device).mul_(0.02)

    with torch.no_grad():
        factory, kinds, layers = ProductFactory(device, dtype, pack=False), layer_kinds(architecture), []
        for index, kind in enumerate(architecture.layers):
            weights = layer_weights(architecture, layer_tensors(architecture, index), take, dtype)
            layers.append(NativeLayer(architecture, index, kinds.index(kind), weights, factory))
        table = architecture.vocab_size, architecture.hidden_size
        embedding = take("embedding", table)
        head = embedding if architecture.tied else take("head", table)
        parts = NativeParts(embedding, take("norm", table[1:]), None, factory(head))
        return NativeModel(architecture, layers, parts, dtype, exact=exact)


def transformers_model(config: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Any:
    """A model of transformers with the same shapes and random weights, made on the device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            fields = {name: value for name, value in config.items() if name != "model_type"}
            return LlamaForCausalLM(LlamaConfig(**fields)).eval()
    finally:
        torch.set_default_dtype(before)


def weight_bytes(model: NativeModel) -> int:
    """The bytes of the weights that a pass over one token reads: all but the embedding."""
    shape, architecture = model.shape, model.architecture
    heads = (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_size
    layer = shape.hidden_size * (heads + 3 * architecture.intermediate_size)
    return (layer * shape.num_layers + shape.vocab_size * shape.hidden_size) * model.dtype.itemsize


def use_graphs(model: NativeModel, widths: Sequence[int] | None = None) -> str:
    """Makes a model run its short passes as specgen does: as CUDA graphs on a GPU, as static passes on a CPU. Returns which.

    `widths` are the numbers of tokens per pass, by default those that specgen takes for the model.
    """
    is_gpu = model.device.type == "cuda"
    if widths is None and is_gpu:
        use_cuda_graphs(model)
    elif widths is None:
        use_static_passes(model, WIDTHS[-1:] if model.exact else WIDTHS)
    else:
        stream = torch.cuda.Stream(model.device) if is_gpu else None
        use_static_passes(model, widths, None if stream is None else partial(CudaGraphs, model.device, stream))
    return "CUDA graphs" if is_gpu else "static passes, not captured"


class Recorded:
    """Captures work on a CPU: records its operators and repeats them. Implements `Graphs`."""

    def capture(self, work: Callable[[], None], state: Sequence[torch.Tensor] = ()) -> Callable[[], None]:
        saved = [tensor.clone() for tensor in state]
        with torch.inference_mode(), Recording() as recorded:
            work()
        for tensor, value in zip(state, saved, strict=True):
            tensor.copy_(value)
        return inference(recorded.replay)


def new_graphs(device: torch.device) -> Graphs:
    """Returns what captures work on the device, on a stream and with memory of its own. Graphs of one run one after the other."""
    return CudaGraphs(device, torch.cuda.Stream(device)) if device.type == "cuda" else Recorded()


def free_bytes(device: torch.device) -> int:
    """The free memory of a GPU, of which graphs take some that torch's allocator does not count; 0 for a CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])


def capture_memory(device: torch.device, capture: Callable[[], Callable[[], None]]) -> tuple[Callable[[], None], float, float]:
    """Returns what `capture` returns, its milliseconds, and the megabytes that are in use after it and were not before."""
    before = free_bytes(device)
    made: list[Callable[[], None]] = []
    seconds = seconds_of(lambda: made.append(capture()), device)
    return made[0], 1000 * seconds, (before - free_bytes(device)) / 1e6


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The median time of one call, the device's work included. On a GPU by events, so without waiting between calls."""
    for _ in range(2):
        work()
    synchronize(device)
    if device.type != "cuda":
        return 1000 * median(seconds_of(work, device) for _ in range(repeats))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    synchronize(device)
    return median(first.elapsed_time(second) for first, second in pairwise(marks))


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """The time of one call, until the device has done its work."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def tokens(count: int, config: dict[str, Any], seed: int = 0) -> list[int]:
    return [3 + number % (config["vocab_size"] - 3) for number in Random(seed).choices(range(1 << 20), k=count)]


def static_pass(model: NativeModel, width: int, bucket: int, context: int, seed: int = 0) -> tuple[StaticPass, ForwardPass]:
    """A static pass of this size, loaded with a chain after `context` tokens, which its KV cache holds."""
    forward, cache = model.forward(), model.new_cache()
    cache.enlarge(max(bucket, context + width))
    ids = tokens(context + width, {"vocab_size": model.vocab_size}, seed)
    before = Context(ids[:context])
    eager = getattr(forward, "_eager", forward)
    inference(eager)(ForwardPass(before, TreeNodes([], range(-1, -1)), 0, context, cache), 1)
    cache.length = context
    static = StaticPass(eager, cache, width, bucket)
    chain = ForwardPass(before, TreeNodes(ids[context:], chain_parents(width)), context, context + width, cache)
    static.load(chain)
    return static, chain


@dataclass
class ForcedVerifier:
    """Accepts each drafted token with probability `rate`, whatever the models say, and does a greedy verifier's work."""

    rate: float
    random: Random = field(default_factory=lambda: Random(0))

    @inference
    def verify(self, draft: Draft, output: ModelOutput) -> Verdict:
        choices = logits_ops.argmax_tokens(output.logits)
        count = next((n for n in range(len(draft.tokens)) if self.random.random() >= self.rate), len(draft.tokens))
        return Verdict(tuple(range(count))) if count == len(choices) else make_verdict(draft, range(count), choices[count])


class ForcedCandidates:
    """Forces transformers' assisted generation to accept each candidate with probability `rate`. A logits processor."""

    def __init__(self, rate: float) -> None:
        self.rate, self._random = rate, Random(0)
        self._candidates: torch.Tensor | None = None
        self._is_drafting = False
        self.drafted = 0

    def __deepcopy__(self, memo: object) -> ForcedCandidates:
        return self

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        length = input_ids.shape[1]
        if self._is_drafting or self._candidates is None or length >= self._candidates.shape[1]:
            return scores
        value = torch.inf if self._random.random() < self.rate else -torch.inf
        return scores.scatter(1, self._candidates[:, length : length + 1], value)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Sees the candidates that are drafted inside the block."""
        from transformers.generation.candidate_generator import AssistedCandidateGenerator as Generator

        original = Generator.get_candidates

        def get_candidates(generator: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self._is_drafting = True
            try:
                found = original(generator, input_ids, *args, **kwargs)
            finally:
                self._is_drafting = False
            self._candidates = found[0]
            self.drafted += found[0].shape[1] - input_ids.shape[1]
            return found

        Generator.get_candidates = get_candidates
        try:
            yield
        finally:
            Generator.get_candidates = original


def decode(
    method: str,
    target: ModelRunner,
    draft: ModelRunner | None,
    prompt: Sequence[int],
    new_tokens: int,
    settings: dict[str, object] | None = None,
    *,
    rate: float | None = None,
    worker: Any = None,
) -> tuple[list[int], dict[str, float]]:
    """Decodes greedily, with the forced acceptance `rate` if given. Returns the new tokens, and figures without the prefill.

    What is captured or compiled in the first call with some arguments is there in the second one: only that is to be timed.
    """
    for runner in (target, draft):
        if runner is not None:
            runner.clear_cache()
            runner.reserve(len(prompt) + new_tokens + 80)
    sampling = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    run: Run = scripted_run(method, settings or {}, target, draft, sampling, prompt=prompt, worker=worker)
    if rate is not None:
        run = replace(run, verifier=ForcedVerifier(rate))
    rounds = run.rounds()
    first = next(rounds)
    start = time.perf_counter()
    others = list(rounds)
    seconds = time.perf_counter() - start
    found = [token for round_ in (first, *others) for token in round_.token_ids]
    drafted = sum(len(round_.draft.tokens) for round_ in others)
    accepted = sum(len(round_.verdict.path) for round_ in others)
    figures = {
        "tokens_per_second": (len(found) - len(first.token_ids)) / seconds,
        "ms_per_round": 1000 * seconds / max(len(others), 1),
        "drafted": drafted,
        "acceptance_rate": accepted / drafted if drafted else 0.0,
    }
    return found, figures
