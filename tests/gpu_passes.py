"""Stages of `measure_gpu.py` about single passes: launches, synchronisations, graphs, attention, products, and two streams."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import cycle, product
from statistics import median

import torch
from gpu_attention import attention_kernels
from gpu_bench import DRAFT_LENGTH, Bench
from gpu_models import free_bytes, static_pass, synchronize, tokens, use_graphs
from specgen.engine.native.quantised_products import quantised_product
from static_checks import OnlyDevice

from specgen.base.types import Context, SamplingParams
from specgen.decoding.device_chain import ChoiceOnDevice
from specgen.engine.inference_mode import inference
from specgen.engine.model_runner import ModelRunner
from specgen.engine.native.products import DenseProduct

_COLD_BYTES = 256 << 20  # of weights that are multiplied in turn: more than any cache holds


def eager(bench: Bench) -> None:
    """Eager passes: with the device's time, and the time in which the host queues them. If these are near, launches decide."""
    found = bench.figures
    for name in ("target", "draft"):
        runner, context = ModelRunner(bench.model(name)), Context(bench.prompt())
        runner.reserve(200)
        for width in (1, 8):
            work = partial(runner.logits, context, [5] * (width - 1))
            found[f"{name}_{width}_ms"] = bench.time(work)
            queueing = []
            for _ in range(5):
                synchronize(bench.device)
                start = time.perf_counter()
                work()
                queueing.append(1000 * (time.perf_counter() - start))
            found[f"{name}_{width}_queueing_ms"] = median(queueing)


def sync(bench: Bench) -> None:
    """Runs passes while synchronisations are errors: of chains and trees, eager and static, and a draft that feeds itself."""
    runner, context, found = ModelRunner(bench.draft), Context(bench.prompt()), bench.figures
    runner.reserve(200)
    static, _ = static_pass(bench.draft, 8, 512, 100)
    cases: dict[str, Callable[[], object]] = {
        "eager_1": lambda: runner.logits(context),
        "eager_chain": lambda: runner.logits(context, [5, 6, 7]),
        "eager_tree": lambda: runner.logits(context, [5, 6, 7, 8], [-1, -1, 0, 1]),
        "static": static.run,
    }
    if bench.device.type == "cuda":
        cases |= _graph_cases(bench, context)
    for name, work in cases.items():
        work()  # tables and masks grow, and graphs are captured, in the first call
        try:
            with _refusing(bench.device, is_static=name == "static"):
                work()
            found[name] = "no synchronisation"
        except (RuntimeError, AssertionError) as error:
            found[name] = f"synchronises: {error}"
    bench.draft.wrap = None


def _graph_cases(bench: Bench, context: Context) -> dict[str, Callable[[], object]]:
    """Passes that replay graphs, and a draft whose tokens the host does not read."""
    use_graphs(bench.draft)
    runner = ModelRunner(bench.draft)
    runner.reserve(200)
    rule = ChoiceOnDevice.make(SamplingParams(), runner.vocab_size, frozenset(), keep_probs=False)

    def draft() -> None:
        runner.chooser(rule).row.zero_()  # type: ignore[attr-defined]
        for level in range(DRAFT_LENGTH):
            runner.choose_next(rule, context, (), level, DRAFT_LENGTH)

    return {
        "graph_1": lambda: runner.logits(context),
        "graph_chain": lambda: runner.logits(context, [5, 6, 7]),
        "graph_tree": lambda: runner.logits(context, [5, 6, 7, 8], [-1, -1, 0, 1]),
        "draft_on_device": draft,
    }


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


def capture_equality(bench: Bench) -> None:
    """Replays a captured pass with other inputs: another chain, after a rollback, a tree. Differences to eager passes."""
    width = 8
    static, chain = static_pass(bench.draft, width, 512, 100)
    replay, found = bench.capture("draft", static.run), bench.figures
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


def replay(bench: Bench) -> None:
    """Times of replays by width and bucket, and what a capture takes in time and memory."""
    for name, width, bucket in product(("draft", "target"), bench.sizes.widths, bench.sizes.buckets):
        static, _ = static_pass(bench.model(name), width, bucket, 100)
        again, taken, megabytes = bench.capture_costs(name, static.run)
        key = f"{name}_{width}x{bucket}"
        bench.figures |= {f"{key}_ms": bench.time(again), f"{key}_capture_ms": taken, f"{key}_capture_mb": megabytes}


def attention(bench: Bench) -> None:
    """One layer's attention of the target, milliseconds by number of tokens, keys and kernel."""
    config, buckets = bench.sizes.target, bench.sizes.buckets
    for count, keys in product((1, 6, 16), sorted({buckets[0], buckets[len(buckets) // 2], buckets[-1]})):
        for name, work in attention_kernels(config, count, keys, bench.sizes.dtype, bench.device).items():
            try:
                bench.figures[f"{count}x{keys}_{name}_ms"] = bench.time(inference(work))
            except RuntimeError as error:
                bench.figures[f"{count}x{keys}_{name}_ms"] = str(error).partition("\n")[0]


def products(bench: Bench) -> None:
    """Products of a layer of the target with weights from memory: milliseconds, and the share of the copy bandwidth.

    Also with quantised weights, whose bytes are fewer.
    """
    found, config, device, dtype = bench.figures, bench.sizes.target, bench.device, bench.sizes.dtype
    found["copy_gb_per_s"] = copied = bench.copy_bandwidth() / 1e9
    width, inner = config["hidden_size"], config["intermediate_size"]
    keys = width * config["num_key_value_heads"] // config["num_attention_heads"]
    shapes = {"qkv": (width + 2 * keys, width), "output": (width, width), "gate_up": (2 * inner, width), "down": (width, inner)}
    for (name, (out, into)), kind in product(shapes.items(), ("dense", "int8", "int4")):
        weight = torch.randn(out, into, dtype=dtype, device=device)
        made = [DenseProduct(weight.clone()) if kind == "dense" else quantised_product(kind, weight)[0] for _ in range(2)]
        if made[0] is None or getattr(made[0], "kind", kind) != kind:
            found[f"{name}_{kind}"] = quantised_product(kind, weight)[1]
            continue
        size = weight.nbytes * {"dense": 2, "int8": 1, "int4": 0.5}[kind] / 2
        while len(made) * size < min(_COLD_BYTES, bench.sizes.copied_bytes):
            made.append(DenseProduct(weight.clone()) if kind == "dense" else quantised_product(kind, weight)[0])
        for rows in (1, 6, 16):
            x, turn = torch.randn(rows, into, dtype=dtype, device=device), cycle(made)
            taken = bench.time(inference(lambda x=x, turn=turn: next(turn)(x)))  # type: ignore[misc]
            found |= {f"{name}_{kind}_{rows}_ms": taken, f"{name}_{kind}_{rows}_share": size / (taken * 1e6) / copied}


def profile(bench: Bench) -> None:
    """The kernels of a replayed pass of the target that take the most time: microseconds in all, and how many there are."""
    if bench.device.type != "cuda":
        bench.figures["kernels"] = "only on a GPU"
        return
    runner, context = _replaying(bench), Context(bench.prompt())
    for width in (1, DRAFT_LENGTH + 1):
        for _ in range(3):
            runner.logits(context, [5] * (width - 1))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
            runner.logits(context, [5] * (width - 1))
            synchronize(bench.device)
        taken: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        for event in [event for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA]:
            taken[event.name[:70]] += event.device_time_total
            counts[event.name[:70]] += 1
        bench.figures |= {f"{width}_all": f"{sum(taken.values()):.0f} us, {sum(counts.values())} kernels"}
        bench.figures |= {f"{width} {name}": f"{us:.0f} us, {counts[name]}" for name, us in taken.most_common(14)}
    bench.target.wrap = None


def _replaying(bench: Bench) -> ModelRunner:
    use_graphs(bench.target)
    runner = ModelRunner(bench.target)
    runner.reserve(200)
    return runner


def steps(bench: Bench) -> None:
    """A draft's steps on the device: K replays of a graph of one step, against one graph of K steps."""
    static, _ = static_pass(bench.draft, 1, 512, 100)

    def step() -> None:
        static.run()
        static._ids.copy_(static._logits[0].argmax(keepdim=True))
        static.advance()

    start, state = static._input.clone(), static._input
    one = bench.capture("draft", step)
    state.copy_(start)
    several = bench.capture("draft", lambda: [step() for _ in range(DRAFT_LENGTH)] and None)

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
    bench.figures |= {"replays_ms": bench.time(repeated), "one_graph_ms": bench.time(at_once), "k": DRAFT_LENGTH, "equal": equal}


def streams(bench: Bench) -> None:
    """A target pass and a draft's steps on two streams against one after the other, as graphs."""
    passes = {"target": (bench.target, DRAFT_LENGTH + 1), "draft": (bench.draft, 1)}
    static = {name: static_pass(model, width, 512, 100)[0] for name, (model, width) in passes.items()}
    graphs = {name: bench.capture(name, one.run) for name, one in static.items()}

    def drafting() -> None:
        for _ in range(DRAFT_LENGTH):
            graphs["draft"]()

    graphs["target"]()
    drafting()
    expected = {name: one.output(1).logits.clone() for name, one in static.items()}
    found = bench.figures
    found |= {"target_ms": bench.time(graphs["target"]), "draft_ms": bench.time(drafting)}
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

    found["both_ms"] = bench.time(both, 3 * bench.sizes.repeats)
    found["equal"] = all(torch.equal(one.output(1).logits, expected[name]) for name, one in static.items())
    shorter = min(found["target_ms"], found["draft_ms"])
    found["overlap"] = (found["target_ms"] + found["draft_ms"] - found["both_ms"]) / shorter
    found["free_gb"] = free_bytes(bench.device) / 1e9
