"""The stages of `measure_gpu.py` about decoding, and the list of all stages. Each writes its figures to `bench.figures`."""

from __future__ import annotations

import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from threading import Event, Thread
from typing import Any

import gpu_models
import torch
from gpu_bench import DRAFT_LENGTH, Bench
from gpu_kernels import kernels
from gpu_models import capture_memory, decode, static_pass
from gpu_passes import attention, capture_equality, eager, products, profile, replay, steps, streams, sync
from safetensors.torch import save_file

from specgen.base.types import Context, SamplingParams
from specgen.decoding.drafting import Setup, ModelDrafter
from specgen.methods.pearl_timing import time_parallel_passes
from specgen.decoding.policy import Fixed
from specgen.engine.devices import device_timer
from specgen.engine.model_runner import ModelRunner
from specgen.engine.native.architecture import read_architecture
from specgen.engine.native.loading import load_native
from specgen.engine.native.tensor_names import EMBEDDING, FINAL_NORM, layer_tensors

ACCEPTANCE = 0.8
METHODS: dict[str, dict[str, object]] = {
    "sd": {"k": DRAFT_LENGTH},
    "svip": {"threshold": 100, "max_draft": DRAFT_LENGTH},  # entropies are computed and read, and end no draft
}


def versions(bench: Bench) -> None:
    import transformers

    found = bench.figures
    found |= {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}
    if bench.device.type == "cuda":
        properties = torch.cuda.get_device_properties(bench.device)
        found |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "triton": _triton()}
        found |= {"gpu": properties.name, "multiprocessors": properties.multi_processor_count, "gpus": torch.cuda.device_count()}
        found |= {"capability": f"{properties.major}.{properties.minor}", "memory_gb": round(properties.total_memory / 1e9, 1)}
        found["tf32"] = torch.backends.cuda.matmul.allow_tf32  # with it, float32 is not lossless


def _triton() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "none, so no fused kernels"


def bandwidth(bench: Bench) -> None:
    bench.figures["copy_gb_per_s"] = bench.copy_bandwidth() / 1e9


def plain(bench: Bench) -> None:
    """Plain decoding: its share of the bandwidth that a copy reaches, and what the first tokens cost in time and memory."""
    found, prompt, count = bench.figures, bench.prompt(), bench.sizes.new_tokens
    found["passes"] = gpu_models.use_graphs(bench.target)
    runner = ModelRunner(bench.target)

    def begin() -> Callable[[], None]:
        decode("ar", runner, None, prompt, count)
        return lambda: None

    _, found["first_run_ms"], found["first_run_mb"] = capture_memory(bench.device, begin)
    _, figures = decode("ar", runner, None, prompt, count)
    read = gpu_models.weight_bytes(bench.target) * figures["tokens_per_second"]
    copied = bench.copy_bandwidth()
    found |= {"tokens_per_second": figures["tokens_per_second"], "copy_gb_per_s": copied / 1e9}
    found |= {"read_gb_per_s": read / 1e9, "share_of_bandwidth": read / copied}


def draft_step(bench: Bench) -> None:
    """A draft's steps as decoding makes them, the host's part included; plain decoding; and the replay of a pass alone."""
    found = bench.figures
    found["passes"] = gpu_models.use_graphs(bench.draft)
    runner, context = ModelRunner(bench.draft), Context(bench.prompt())
    runner.reserve(len(context) + bench.sizes.new_tokens + 80)
    drafter = ModelDrafter(Setup(runner, SamplingParams(), frozenset(), runner.vocab_size, context_limit=10_000))
    policy = Fixed(DRAFT_LENGTH)
    assert len(drafter.propose(context, policy, DRAFT_LENGTH).tokens) == DRAFT_LENGTH
    found["ms_per_drafted_token"] = bench.time(lambda: drafter.propose(context, policy, DRAFT_LENGTH)) / DRAFT_LENGTH
    for _ in range(2):
        _, figures = decode("ar", runner, None, bench.prompt(), bench.sizes.new_tokens)
    found["ms_per_token_of_plain_decoding"] = 1000 / figures["tokens_per_second"]
    bench.draft.wrap = None
    static, _ = static_pass(bench.draft, 1, 512, 100)
    found["replay_ms"] = bench.time(bench.capture("draft", static.run))


def speedup(bench: Bench) -> None:
    """Methods at forced acceptance, plain decoding, and transformers with the same acceptance."""
    from gpu_reference import transformers_figures

    found = bench.figures
    found["passes"] = gpu_models.use_graphs(bench.target)
    gpu_models.use_graphs(bench.draft)
    target, draft, prompt, count = ModelRunner(bench.target), ModelRunner(bench.draft), bench.prompt(), bench.sizes.new_tokens
    for runner in (target, draft):
        runner.reserve(len(prompt) + count + 80)
    worker = _worker(bench, draft)
    for _ in range(2):  # graphs are captured in the first turn
        costs = _parallel_costs(bench, target, worker)
    methods = {"ar": {}, **METHODS, "pearl": {"window": costs.window.size}}
    found |= {"pearl_window": costs.window.size, "pearl_overlap": costs.overlap}
    for name, settings in methods.items():
        for _ in range(2):
            _, figures = decode(name, target, draft, prompt, count, settings, rate=ACCEPTANCE, worker=worker)
        found |= {f"{name}_{key}": value for key, value in figures.items()}
        found[f"{name}_speedup"] = figures["tokens_per_second"] / found["ar_tokens_per_second"]
    worker.close()
    found |= transformers_figures(bench.sizes, bench.device, prompt, count, DRAFT_LENGTH, ACCEPTANCE)
    best = found["transformers_assisted_tokens_per_second"] / found["transformers_tokens_per_second"]
    found["transformers_assisted_speedup"] = best
    for name in ("sd", "svip", "pearl"):
        found[f"{name}_against_assisted_speedup"] = found[f"{name}_speedup"] / best


def _parallel_costs(bench: Bench, target: ModelRunner, worker: Any) -> Any:
    """PEARL's measurement of its window."""
    from specgen.decoding.drafting import Setup
    from specgen.methods import METHODS as ALL
    from specgen.methods import resolve

    components = Setup(target, worker.runner, SamplingParams(), frozenset(), target.vocab_size, 0)
    drafter = worker.drafter(resolve(ALL["pearl"], {}), components, 64)
    timer = device_timer(bench.device)
    return time_parallel_passes(target, drafter, Context(bench.prompt()), timer, 16, worker.kind == "stream")


def _worker(bench: Bench, draft: ModelRunner) -> Any:
    from specgen.workers.draft_streams import streams_for
    from specgen.workers.stream_worker import StreamWorker
    from specgen.workers.thread_worker import ThreadWorker

    is_gpu = bench.device.type == "cuda"
    return StreamWorker(draft, streams_for(bench.device, bench.device)) if is_gpu else ThreadWorker(draft)


def exact(bench: Bench) -> None:
    """Greedy tokens of plain and speculative decoding, of an exact model and of another one; and the bits of their logits."""
    count, prompt, found, sizes = bench.sizes.new_tokens, bench.prompt(), bench.figures, bench.sizes
    for name, is_exact in (("one_width", True), ("mixed", False)):
        model = gpu_models.native_model(sizes.draft, bench.device, sizes.dtype, seed=1, exact=is_exact)
        how = gpu_models.use_graphs(model)
        target, other = ModelRunner(model), ModelRunner(bench.draft)
        plain, _ = decode("ar", target, None, prompt, count)
        speculative, figures = decode("sd", target, other, prompt, count, {"k": DRAFT_LENGTH})
        differs = next((n for n, pair in enumerate(zip(plain, speculative, strict=True)) if pair[0] != pair[1]), None)
        found |= {f"{name}_first_difference": differs, f"{name}_passes": how, f"{name}_accepted": figures["acceptance_rate"]}
        context, draft = Context([*prompt, *plain[:8]]), plain[8:16]
        together = target.logits(context, draft).logits.clone()
        single = torch.cat([target.logits(Context([*context.ids, *draft[:n]])).logits.clone() for n in range(9)])
        found |= {f"{name}_logits_equal": torch.equal(together, single)}
        found |= {f"{name}_logits_difference": float((together - single).abs().max())}


def context(bench: Bench) -> None:
    """Tokens per second after a long context against a short one, and what the bytes read say."""
    found = bench.figures
    found["passes"] = gpu_models.use_graphs(bench.target)
    gpu_models.use_graphs(bench.draft)
    target, draft = ModelRunner(bench.target), ModelRunner(bench.draft)
    weights, per_token = gpu_models.weight_bytes(bench.target), bench.target.shape.kv_bytes_per_token(bench.sizes.dtype.itemsize)
    lengths = (100, bench.sizes.long_context)
    for runner in (target, draft):
        runner.reserve(lengths[1] + bench.sizes.new_tokens + 80)
    for length, (name, settings) in product(lengths, {"ar": {}, "sd": METHODS["sd"]}.items()):
        for _ in range(2):
            _, figures = decode(name, target, draft, bench.prompt(length), bench.sizes.new_tokens, settings, rate=ACCEPTANCE)
        found[f"{name}_after_{length}_tokens_per_second"] = figures["tokens_per_second"]
    expected = (weights + lengths[0] * per_token) / (weights + lengths[1] * per_token)
    for name in ("ar", "sd"):
        speeds = [found[f"{name}_after_{length}_tokens_per_second"] for length in lengths]
        found |= {f"{name}_ratio": speeds[1] / speeds[0], f"{name}_ratio_against_bytes": speeds[1] / speeds[0] / expected}
    found["ratio_by_bytes"] = expected


def loading(bench: Bench) -> None:
    """Loads the draft model's weights from a file: seconds, and the most memory of the device and of the host it takes."""
    architecture, found = read_architecture(bench.sizes.draft | {"tie_word_embeddings": True}), bench.figures
    tensors: dict[str, torch.Tensor] = {}
    width, inner, rows = architecture.hidden_size, architecture.intermediate_size, architecture.vocab_size
    keys = architecture.num_kv_heads * architecture.head_size
    for index in range(len(architecture.layers)):
        names = layer_tensors(architecture, index)
        shapes = [(width, width), (keys, width), (keys, width)]
        named = {**dict(zip(names.qkv, shapes, strict=True)), names.output: (width, width), names.down: (width, inner)}
        named |= dict.fromkeys(names.gate_up, (inner, width)) | {names.attention_norm: (width,), names.mlp_norm: (width,)}
        tensors |= {f"model.{name}": torch.ones(shape, dtype=bench.sizes.dtype) for name, shape in named.items()}
    tensors |= {f"model.{EMBEDDING}": torch.ones(rows, width, dtype=bench.sizes.dtype)}
    tensors |= {f"model.{FINAL_NORM}": torch.ones(width, dtype=bench.sizes.dtype)}
    with tempfile.TemporaryDirectory() as folder:
        save_file(tensors, Path(folder) / "model.safetensors")
        weights = sum(tensor.nbytes for tensor in tensors.values())
        tensors.clear()
        for turn in ("first", "second"):
            is_gpu = bench.device.type == "cuda"
            if is_gpu:
                torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated() if is_gpu else 0
            with _HostMemory() as host:
                start = time.perf_counter()
                model = load_native(Path(folder), "draft", architecture, bench.sizes.dtype, bench.device)
                gpu_models.synchronize(bench.device)
                found[f"{turn}_seconds"] = time.perf_counter() - start
            peak = (torch.cuda.max_memory_allocated() if is_gpu else 0) - before
            del model
            found |= {"weights_mb": weights / 1e6, f"{turn}_device_peak_mb": peak / 1e6, f"{turn}_host_peak_mb": host.most / 1e6}


class _HostMemory:
    """Watches how much anonymous memory this process has more than at the beginning; mapped files do not count."""

    most = 0

    def __enter__(self) -> _HostMemory:
        self._ended, self._first = Event(), self._now()
        self._watch = Thread(target=self._look, daemon=True)
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._watch.join()

    def _look(self) -> None:
        while not self._ended.wait(0.005):
            self.most = max(self.most, self._now() - self._first)

    @staticmethod
    def _now() -> int:
        try:
            lines = Path("/proc/self/status").read_text().splitlines()
        except OSError:
            return 0
        return 1024 * next((int(line.split()[1]) for line in lines if line.startswith("RssAnon:")), 0)


def pair(bench: Bench) -> None:
    """`specgen compare` of the bundled pair."""
    amounts = ("-n", "16", "--limit", "1", "--repeats", "1") if bench.sizes.is_tiny else ("-n", "128", "--limit", "6")
    command = ["compare", "-m", "sd,svip,pearl,transformers-assisted", "--device", bench.device.type, *amounts]
    _run(bench, [sys.executable, "-m", "specgen", *command], 240)


def tests(bench: Bench) -> None:
    """The tests that need a GPU; in the tiny form only their collection."""
    extra, exit_code = (["--collect-only"], "collecting_exit_code") if bench.sizes.is_tiny else ([], "exit_code")
    options = ["-q", "-n", "0", "-m", "gpu", "-p", "no:cacheprovider", *extra]
    _run(bench, [sys.executable, "-m", "pytest", *options, *gpu_tests()], 380, exit_code)


def gpu_tests() -> list[str]:
    """The files whose tests may need a GPU: those that name the mark, or take it from `graph_checks`."""
    marks = ("mark.gpu", "on_gpu", "DEVICES", "CUDA")
    files = sorted(Path(__file__).parent.glob("test_*.py"))
    return [str(path) for path in files if any(mark in path.read_text("utf-8") for mark in marks)]


def _run(bench: Bench, command: list[str], seconds: float, exit_code: str = "exit_code") -> None:
    """Adds what a command printed to the figures, and its exit code under this name."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, cwd=Path(__file__).parents[1])
    errors = done.stderr[-3000:] if done.returncode else ""
    bench.figures |= {exit_code: done.returncode, "output": done.stdout[-6000:], "errors": errors}


# In the order of their importance: what is asked for first, then what explains it.
STAGES: dict[str, Callable[[Bench], None]] = {
    "versions": versions,
    "bandwidth": bandwidth,
    "capture": capture_equality,
    "plain": plain,
    "draft": draft_step,
    "speedup": speedup,
    "exact": exact,
    "sync": sync,
    "context": context,
    "streams": streams,
    "profile": profile,
    "tests": tests,
    "products": products,
    "kernels": kernels,
    "attention": attention,
    "steps": steps,
    "eager": eager,
    "loading": loading,
    "replay": replay,
    "pair": pair,
}
