"""The stages of `measure_gpu.py`: each measures some figures on a device and returns them by name."""

from __future__ import annotations

import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any

import gpu_models
import torch
from gpu_attention import attention_kernels
from gpu_models import Sizes, capture, decode, milliseconds, seconds_of, static_pass, synchronize, tokens
from static_checks import OnlyDevice

from specgen.decoding.parallel_timing import time_parallel_passes
from specgen.engine.devices import device_timer
from specgen.engine.inference_mode import inference
from specgen.engine.model_runner import ModelRunner
from specgen.engine.native.native_model import NativeModel
from specgen.types import Context

Figures = dict[str, Any]
ACCEPTANCE, DRAFT_LENGTH = 0.8, 5
METHODS: dict[str, dict[str, object]] = {
    "sd": {"k": DRAFT_LENGTH},
    "svip": {"threshold": 100, "max_draft": DRAFT_LENGTH},  # entropies are computed and read, and end no draft
}


class Bench:
    """What the stages share: the device, the sizes, and models that are made when they are first needed."""

    def __init__(self, device: torch.device, sizes: Sizes) -> None:
        self.device, self.sizes = device, sizes

    @cached_property
    def target(self) -> NativeModel:
        return gpu_models.native_model(self.sizes.target, self.device, self.sizes.dtype)

    @cached_property
    def draft(self) -> NativeModel:
        return gpu_models.native_model(self.sizes.draft, self.device, self.sizes.dtype, seed=1)

    def prompt(self, length: int = 100) -> list[int]:
        return tokens(length, self.sizes.target)

    def time(self, work: Callable[[], object], repeats: int | None = None) -> float:
        return round(milliseconds(work, self.device, repeats or self.sizes.repeats), 4)

    def copy_bandwidth(self) -> float:
        """Bytes per second read and written by a copy on the device."""
        source = torch.zeros(self.sizes.copied_bytes // 2, dtype=torch.uint8, device=self.device)
        other = torch.empty_like(source)
        return 2 * source.nbytes / (milliseconds(lambda: other.copy_(source), self.device, self.sizes.repeats) / 1000)


def versions(bench: Bench) -> Figures:
    import transformers

    found: Figures = {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}
    if bench.device.type == "cuda":
        properties = torch.cuda.get_device_properties(bench.device)
        found |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "gpu": properties.name}
        found |= {"multiprocessors": properties.multi_processor_count, "gpus": torch.cuda.device_count()}
        found["memory_gb"] = round(properties.total_memory / 1e9, 1)
    return found


def bandwidth(bench: Bench) -> Figures:
    return {"copy_gb_per_s": bench.copy_bandwidth() / 1e9}


def eager(bench: Bench) -> Figures:
    """Eager passes: with the device's time, and the time in which the host queues them. If these are near, launches decide."""
    found: Figures = {}
    for name in ("target", "draft"):
        runner, context = ModelRunner(getattr(bench, name)), Context(bench.prompt())
        runner.reserve(200)
        for width in (1, 8):
            work = partial(runner.logits, context, [5] * (width - 1))
            found[f"{name}_{width}_ms"] = bench.time(work)
            synchronize(bench.device)
            start = time.perf_counter()
            work()
            found[f"{name}_{width}_queueing_ms"] = 1000 * (time.perf_counter() - start)
    return found


def sync(bench: Bench) -> Figures:
    """Runs passes while synchronisations are errors: of chains and trees, eager and static."""
    runner, context, found = ModelRunner(bench.draft), Context(bench.prompt()), {}
    runner.reserve(200)
    static, _ = static_pass(bench.draft, 8, 512, 100)
    cases: dict[str, Callable[[], object]] = {
        "eager_1": lambda: runner.logits(context),
        "eager_chain": lambda: runner.logits(context, [5, 6, 7]),
        "eager_tree": lambda: runner.logits(context, [5, 6, 7, 8], [-1, -1, 0, 1]),
        "static": static.run,
    }
    for name, work in cases.items():
        work()  # tables and masks grow in the first call
        try:
            with _refusing(bench.device, is_static=name == "static"):
                work()
            found[name] = "no synchronisation"
        except (RuntimeError, AssertionError) as error:
            found[name] = f"synchronises: {error}"
    return found


@contextmanager
def _refusing(device: torch.device, *, is_static: bool) -> Iterator[None]:
    if device.type != "cuda":
        with torch.inference_mode(), OnlyDevice() if is_static else torch.inference_mode():
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def capture_equality(bench: Bench) -> Figures:
    """Replays a captured pass with other inputs: another chain, after a rollback, a tree. Differences to eager passes."""
    model, width = bench.draft, 8
    static, chain = static_pass(model, width, 512, 100)
    replay, found = capture(static.run, bench.device), {}
    eager_forward = inference(static._forward)
    other = tokens(width, bench.sizes.draft, 7)
    cases = {
        "same": chain,
        "other_chain": chain._replace(draft=chain.draft._replace(tokens=other)),
        "tree": chain._replace(draft=chain.draft._replace(tokens=other, parents=[-1, 0, 0, 1, -1, 2, 4, 4])),
        "rolled_back": chain._replace(context=Context(chain.context.ids[:60]), first=60, last=60 + width),
    }
    for name, forward_pass in cases.items():
        expected = eager_forward(forward_pass, width).logits.float()
        forward_pass.cache.data[:, :, :, forward_pass.first :].zero_()
        static.load(forward_pass)
        replay()
        replay()
        found[f"{name}_error"] = float((static.output(width).logits.float() - expected).abs().max() / expected.abs().max())
    return found


def replay(bench: Bench) -> Figures:
    """Times of replays by width and bucket, and what a capture takes in time and memory."""
    found: Figures = {}
    for name in ("target", "draft"):
        model = getattr(bench, name)
        for width, bucket in product(bench.sizes.widths, bench.sizes.buckets):
            static, _ = static_pass(model, width, bucket, 100)
            before = torch.cuda.memory_reserved() if bench.device.type == "cuda" else 0
            seconds: list[Callable[[], None]] = []
            taken = seconds_of(
                lambda static=static, seconds=seconds: seconds.append(capture(static.run, bench.device)), bench.device
            )
            after = torch.cuda.memory_reserved() if bench.device.type == "cuda" else 0
            key = f"{name}_{width}x{bucket}"
            found[f"{key}_ms"] = bench.time(seconds[0])
            found[f"{key}_capture_ms"], found[f"{key}_capture_mb"] = round(1000 * taken, 1), (after - before) / 1e6
    return found


def attention(bench: Bench) -> Figures:
    """One layer's attention of the target, milliseconds by number of tokens, keys and kernel."""
    config, buckets, found = bench.sizes.target, bench.sizes.buckets, {}
    for count, keys in product((1, 6, 16), sorted({buckets[0], buckets[len(buckets) // 2], buckets[-1]})):
        for name, work in attention_kernels(config, count, keys, bench.sizes.dtype, bench.device).items():
            try:
                found[f"{count}x{keys}_{name}_ms"] = bench.time(inference(work))
            except RuntimeError as error:
                found[f"{count}x{keys}_{name}_ms"] = str(error).partition("\n")[0]
    return found


def steps(bench: Bench) -> Figures:
    """A draft's steps on the device: K replays of a graph of one step, against one graph of K steps."""
    static, _ = static_pass(bench.draft, 1, 512, 100)

    def step() -> None:
        static.run()
        static._ids.copy_(static._logits[0].argmax(keepdim=True))
        static.advance()

    start, state = static._input.clone(), static._input
    one = capture(step, bench.device)
    state.copy_(start)
    several = capture(lambda: [step() for _ in range(DRAFT_LENGTH)] and None, bench.device)

    def repeated() -> None:
        state.copy_(start)
        for _ in range(DRAFT_LENGTH):
            one()

    def at_once() -> None:
        state.copy_(start)
        several()

    repeated()
    last = static._ids.clone()
    at_once()
    equal = bool((last == static._ids).all())
    return {"replays_ms": bench.time(repeated), "one_graph_ms": bench.time(at_once), "k": DRAFT_LENGTH, "equal": equal}


def exact(bench: Bench) -> Figures:
    """Greedy tokens of plain and speculative decoding, with passes of one width and of several; with one, also logits' bits."""
    count, prompt, found = bench.sizes.new_tokens, bench.prompt(), {}
    for name, widths in (("one_width", (16,)), ("mixed", None)):
        how = gpu_models.use_graphs(bench.draft, widths)
        target, other = ModelRunner(bench.draft), ModelRunner(bench.draft)
        plain, _ = decode("ar", target, None, prompt, count)
        speculative, figures = decode("sd", target, other, prompt, count, {"k": DRAFT_LENGTH})
        differs = next((n for n, pair in enumerate(zip(plain, speculative, strict=True)) if pair[0] != pair[1]), None)
        found |= {f"{name}_first_difference": differs, f"{name}_passes": how, f"{name}_accepted": figures["acceptance_rate"]}
        context, draft = Context([*prompt, *plain[:8]]), plain[8:16]
        together = target.logits(context, draft).logits.clone()
        single = torch.cat([target.logits(Context([*context.ids, *draft[:n]])).logits.clone() for n in range(9)])
        found[f"{name}_logits_equal"] = torch.equal(together, single)
        found[f"{name}_logits_difference"] = float((together - single).abs().max())
    bench.draft.wrap = None
    return found


def streams(bench: Bench) -> Figures:
    """A target pass and a draft's steps on two streams against one after the other, as graphs; and PEARL's own measurement."""
    passes = {"target": (bench.target, DRAFT_LENGTH + 1), "draft": (bench.draft, 1)}
    static = {name: static_pass(model, width, 512, 100)[0] for name, (model, width) in passes.items()}
    graphs = {name: capture(one.run, bench.device) for name, one in static.items()}

    def drafting() -> None:
        for _ in range(DRAFT_LENGTH):
            graphs["draft"]()

    graphs["target"]()
    drafting()
    expected = {name: one.output(1).logits.clone() for name, one in static.items()}
    found = {"target_ms": bench.time(graphs["target"]), "draft_ms": bench.time(drafting)}
    if bench.device.type == "cuda":
        side, main = torch.cuda.Stream(bench.device), torch.cuda.current_stream(bench.device)

        def both() -> None:
            side.wait_stream(main)
            graphs["target"]()
            with torch.cuda.stream(side):
                drafting()
            main.wait_stream(side)
    else:

        def both() -> None:
            graphs["target"]()
            drafting()

    found["both_ms"] = bench.time(both)
    found["equal"] = all(torch.equal(one.output(1).logits, expected[name]) for name, one in static.items())
    shorter = min(found["target_ms"], found["draft_ms"])
    found["overlap"] = (found["target_ms"] + found["draft_ms"] - found["both_ms"]) / shorter
    return found


def parallel_costs(bench: Bench, target: ModelRunner, worker: Any) -> Any:
    """PEARL's measurement of its window."""
    from specgen.decoding.components import Components
    from specgen.methods import METHODS as ALL
    from specgen.methods import resolve
    from specgen.types import SamplingParams

    components = Components(target, worker.runner, SamplingParams(), frozenset(), target.vocab_size, 0)
    drafter = worker.drafter(resolve(ALL["pearl"], {}), components, 64)
    timer = device_timer(bench.device)
    return time_parallel_passes(target, drafter, Context(bench.prompt()), timer, 16, worker.kind == "stream")


def make_worker(bench: Bench, draft: ModelRunner) -> Any:
    from specgen.workers.draft_streams import streams_for
    from specgen.workers.stream_worker import StreamWorker
    from specgen.workers.thread_worker import ThreadWorker

    is_gpu = bench.device.type == "cuda"
    return StreamWorker(draft, streams_for(bench.device, bench.device)) if is_gpu else ThreadWorker(draft)


def plain(bench: Bench) -> Figures:
    """Plain decoding: its share of the bandwidth that a copy reaches."""
    found: Figures = {"passes": gpu_models.use_graphs(bench.target)}
    runner = ModelRunner(bench.target)
    decode("ar", runner, None, bench.prompt(), 8)
    _, figures = decode("ar", runner, None, bench.prompt(), bench.sizes.new_tokens)
    read = gpu_models.weight_bytes(bench.target) * figures["tokens_per_second"]
    copied = bench.copy_bandwidth()
    found |= {"tokens_per_second": figures["tokens_per_second"], "copy_gb_per_s": copied / 1e9}
    return found | {"read_gb_per_s": read / 1e9, "share_of_bandwidth": read / copied, "goal": 0.85}


def draft_step(bench: Bench) -> Figures:
    """Drafted tokens one after the other, with the host's part; and the replay of one step alone."""
    found: Figures = {"passes": gpu_models.use_graphs(bench.draft)}
    runner = ModelRunner(bench.draft)
    decode("ar", runner, None, bench.prompt(), 8)
    _, figures = decode("ar", runner, None, bench.prompt(), bench.sizes.new_tokens)
    found["ms_per_token"] = 1000 / figures["tokens_per_second"]
    static, _ = static_pass(bench.draft, 1, 512, 100)
    found["replay_ms"] = bench.time(capture(static.run, bench.device))
    return found | {"goal_ms": 1.0}


def speedup(bench: Bench) -> Figures:
    """Methods at forced acceptance, plain decoding, and transformers with the same acceptance."""
    from gpu_reference import transformers_figures

    found: Figures = {"passes": gpu_models.use_graphs(bench.target)}
    gpu_models.use_graphs(bench.draft)
    target, draft, prompt, count = ModelRunner(bench.target), ModelRunner(bench.draft), bench.prompt(), bench.sizes.new_tokens
    worker = make_worker(bench, draft)
    costs = parallel_costs(bench, target, worker)
    methods = {"ar": {}, **METHODS, "pearl": {"window": costs.window.size}}
    found |= {"pearl_window": costs.window.size, "pearl_overlap": costs.overlap}
    for name, settings in methods.items():
        for new_tokens in (count // 4, count):  # captures graphs first
            _, figures = decode(name, target, draft, prompt, new_tokens, settings, rate=ACCEPTANCE, worker=worker)
        found |= {f"{name}_{key}": value for key, value in figures.items()}
        found[f"{name}_speedup"] = figures["tokens_per_second"] / found["ar_tokens_per_second"]
    worker.close()
    found |= transformers_figures(bench.sizes, bench.device, prompt, count, DRAFT_LENGTH, ACCEPTANCE)
    best = found["transformers_assisted_tokens_per_second"] / found["transformers_tokens_per_second"]
    found["transformers_assisted_speedup"] = best
    for name in ("sd", "svip", "pearl"):
        found[f"{name}_against_assisted_speedup"] = found[f"{name}_speedup"] / best
    return found | {"goal": 1.5, "goal_round_ms": 10.0}


def context(bench: Bench) -> Figures:
    """Tokens per second after a long context against a short one, and what the bytes read say."""
    found: Figures = {"passes": gpu_models.use_graphs(bench.target)}
    gpu_models.use_graphs(bench.draft)
    target, draft = ModelRunner(bench.target), ModelRunner(bench.draft)
    weights, per_token = gpu_models.weight_bytes(bench.target), bench.target.shape.kv_bytes_per_token(bench.sizes.dtype.itemsize)
    lengths = (100, bench.sizes.long_context)
    for length, (name, settings) in product(lengths, {"ar": {}, "sd": METHODS["sd"]}.items()):
        prompt = bench.prompt(length)
        for new_tokens in (8, bench.sizes.new_tokens):
            _, figures = decode(name, target, draft, prompt, new_tokens, settings, rate=ACCEPTANCE)
        found[f"{name}_after_{length}_tokens_per_second"] = figures["tokens_per_second"]
    for name in ("ar", "sd"):
        speeds = [found[f"{name}_after_{length}_tokens_per_second"] for length in lengths]
        found[f"{name}_ratio"] = speeds[1] / speeds[0]
    return found | {"ratio_by_bytes": (weights + lengths[0] * per_token) / (weights + lengths[1] * per_token)}


def pair(bench: Bench) -> Figures:
    """`specgen compare` of the bundled pair."""
    amounts = ("-n", "16", "--limit", "1", "--repeats", "1") if bench.sizes.is_tiny else ("-n", "128", "--limit", "6")
    command = ["compare", "-m", "sd,svip,pearl,transformers-assisted", "--device", bench.device.type, *amounts]
    return _output([sys.executable, "-m", "specgen", *command], 240)


def tests(bench: Bench) -> Figures:
    """The tests that need a GPU; in the tiny form only their collection."""
    extra = ["--collect-only"] if bench.sizes.is_tiny else []
    files = [str(path) for path in sorted(Path(__file__).parent.glob("test_*.py")) if "mark.gpu" in path.read_text("utf-8")]
    return _output([sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "gpu", "-p", "no:cacheprovider", *extra, *files], 380)


def _output(command: list[str], seconds: float) -> Figures:
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, cwd=Path(__file__).parents[1])
    return {"exit_code": done.returncode, "output": done.stdout[-6000:], "errors": done.stderr[-3000:] if done.returncode else ""}


STAGES: dict[str, Callable[[Bench], Figures]] = {
    **{stage.__name__: stage for stage in (versions, bandwidth, eager, sync)},
    "capture": capture_equality,
    **{stage.__name__: stage for stage in (exact, plain, speedup, streams, context, steps, replay, attention, tests, pair)},
    "draft": draft_step,
}
