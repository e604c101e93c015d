"""Loading models: refused models, context limits, devices, threads and dtypes, tokenizers, text that streams."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_helpers import run_main
from families import BACKENDS, CONTEXT, VOCAB, make_model, plain, save
from runner_checks import TOLERANCE, uncached
from transformers import AutoModelForCausalLM, GenerationConfig

import specgen
from specgen.base.errors import SpecgenError
from specgen.base.types import SamplingParams
from specgen.engine import dtype_choice
from specgen.engine.devices import ThreadChoice, pick_threads
from specgen.engine.dtype_choice import choose_dtype
from specgen.engine.model_loading import ModelSource, PreparedModel, describe
from specgen.methods import METHODS
from specgen.pair.pair import Pair


def test_models_that_cannot_be_rolled_back_are_named_or_refused(tmp_path: Path) -> None:
    """Others are in `test_bad_inputs.py`: an encoder, an encoder-decoder."""
    from transformers import BertConfig, BertLMHeadModel

    shape = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    bert = BertLMHeadModel(BertConfig(**shape, initializer_range=0.25))
    with pytest.raises(SpecgenError, match=r"is an encoder\. Take a decoder-only"):
        specgen.load(save(bert, tmp_path / "bert"), device="cpu")
    pair = specgen.load(save(make_model("jamba"), tmp_path / "jamba"), device="cpu")
    assert "needs no rollback: -m ar" in str(pair.target.warning)


def test_eager_attention_gives_the_reference_output(tmp_path: Path) -> None:
    """Gemma 2 uses eager attention, which would add a boolean mask as numbers."""
    model = make_model("gemma2", seed=6)
    pair = specgen.load(save(model, tmp_path), device="cpu", dtype="float32", backend="transformers")
    pair.target.transformers_module.set_attn_implementation("eager")
    result = pair.generate([1, 5, 6, 5, 6], "lookup", SamplingParams(max_new_tokens=30), k=10)
    assert result.token_ids == plain(model, [1, 5, 6, 5, 6], 30)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_longrope_run_never_crosses_the_rope_boundary(tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 10000.0}
    rope |= {"partial_rotary_factor": 1.0, "original_max_position_embeddings": 32}
    model = make_model("phi3", sliding_window=None, original_max_position_embeddings=32, rope_parameters=rope)
    pair = specgen.load(save(model, tmp_path), device="cpu", dtype="float32", backend=backend)
    shape = pair.target.model.shape
    assert (shape.context_limit, shape.rope_boundary) == (CONTEXT, 32)
    short = pair.request([5] * 20, "lookup", SamplingParams(max_new_tokens=60), k=10)
    assert short.limit == 13, "the token after the boundary is never run"
    monkeypatch.setattr("specgen.engine.cached_prefix.PREFILL_CHUNK", 10)
    text = [5 + token % 7 for token in range(60)]
    for length in (36, 15, 60, 32, 33, 31, 20):  # prefixes of each other, which share no cache across the boundary
        reference = pair.target.reference_logits(text[:length], [])
        assert torch.allclose(reference, uncached(model, text[:length]), atol=TOLERANCE, rtol=1e-4)
        expected = plain(model, text[:length], min(40, pair.target.max_tokens(length) - length))
        assert pair.generate(text[:length], "lookup", SamplingParams(max_new_tokens=40), k=10).token_ids == expected, length


@pytest.mark.parametrize(
    ("speedups", "chosen"),
    [({1: 1.0, 2: 1.1, 4: 1.15}, 1), ({1: 1.0, 2: 1.5, 4: 1.6}, 2), ({1: 1.0, 2: 1.9, 4: 3.5}, 4)],
)
def test_the_fewest_threads_that_are_nearly_the_fastest_are_chosen(
    monkeypatch: pytest.MonkeyPatch, speedups: dict[int, float], chosen: int
) -> None:
    clock, threads = [0.0], [4]
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: threads.__setitem__(0, count))
    choice = pick_threads(lambda: clock.__setitem__(0, clock[0] + 0.1 / speedups[threads[0]]))
    assert (threads, choice.threads) == ([4], chosen)
    assert choice.seconds == pytest.approx({number: 0.1 / speedups.get(number, 1) for number in (1, 2, 4)})
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert pick_threads(lambda: pytest.fail("nothing to time")) == ThreadChoice(4, "OMP_NUM_THREADS is set")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("method", ["ar", "sd", "svip", "lookup"])
def test_cuda_gives_the_same_tokens_as_transformers_there(method: str) -> None:
    pair = specgen.load(device="cuda", dtype="float32")
    ids = pair.tokenizer.encode("User: What is the capital of Japan?\nAssistant:")
    model = AutoModelForCausalLM.from_pretrained(specgen.demo.folder("target"), dtype=torch.float32).to("cuda")
    output = model.generate(torch.tensor([ids], device="cuda"), do_sample=False, max_new_tokens=40)
    assert pair.generate(ids, method, SamplingParams(max_new_tokens=40)).token_ids == output[0, len(ids) :].tolist()


FORBIDDEN = [5, VOCAB - 1, VOCAB - 2]


@pytest.mark.parametrize(
    ("draft_vocab", "temperature", "forbidden"),
    [(VOCAB - 32, 0.0, []), (VOCAB - 6, 1.0, FORBIDDEN), (VOCAB + 40, 0.0, FORBIDDEN)],
)
def test_vocabularies_padded_to_different_sizes_work(
    tmp_path: Path, draft_vocab: int, temperature: float, forbidden: list[int]
) -> None:
    target = make_model("llama", seed=4)
    draft = make_model("llama", seed=5, vocab_size=draft_vocab)
    if forbidden:
        penalties = {"bad_words_ids": [[5], [VOCAB - 1]], "repetition_penalty": 1.2, "suppress_tokens": [VOCAB - 2]}
        target.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0, **penalties)
    pair = specgen.load(save(target, tmp_path / "t"), save(draft, tmp_path / "d"), device="cpu", dtype="float32")
    expected = plain(target, [1, 5, 6], 30)
    for method in ("sd", "spectr", "specinfer", "mtad", "bild"):
        # at temperature 1 the target has one token to sample with top_k 1, whatever the draft samples
        sampling = SamplingParams(max_new_tokens=30, temperature=temperature, top_k=1 if temperature else 0, seed=1)
        if METHODS[method].lossless:
            assert pair.generate([1, 5, 6], method, sampling).token_ids == expected, method
        tokens = pair.generate([1, 5, 6], method, replace(sampling, top_k=0, ignore_eos=True)).token_ids
        assert len(tokens) == 30
        assert max(tokens) < VOCAB, "a token that only the draft's vocabulary has"
        assert not set(forbidden) & set(tokens)


@pytest.mark.parametrize(
    "text", ["def f(x):\n    return x  # naïve café", "日本語のテキスト 🎉👩‍👩‍👧‍👦 ok", "tabs\tand  spaces   \n\n\nلغة"]
)
def test_incremental_text_is_the_whole_text_in_complete_characters(demo_pair: Pair, text: str) -> None:
    prompt, ids = demo_pair.tokenizer.encode("x ="), demo_pair.tokenizer.encode(text)[1:]
    detokenizer = demo_pair.tokenizer.detokenizer(prompt)
    pieces = [detokenizer.push(token) for token in ids]
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert "".join(pieces) + detokenizer.flush() == text


def test_invalid_bytes_hold_back_only_a_few_tokens(demo_pair: Pair) -> None:
    vocabulary = demo_pair.tokenizer.vocabulary()
    continuation = next(vocabulary[token] for token in ("¡", "¢", "£", "Ģ") if token in vocabulary)  # a lone UTF-8 tail byte
    detokenizer = demo_pair.tokenizer.detokenizer([])
    assert any(detokenizer.push(continuation) for _ in range(12)), "shown as replacement characters"
    assert (detokenizer.push(demo_pair.tokenizer.encode("a")[-1]) + detokenizer.flush()).endswith("a")


CPU = torch.device("cpu")


def clock(bfloat16: float) -> Any:
    """Gives float32's products one second and bfloat16's so many, after it ran all of them; of three turns two are disturbed."""

    def timed(work: Any, *_: object, **__: object) -> Any:
        assert torch.get_num_threads() == 1
        assert {run() is None for run in work.values()} == {False}
        return {key: [90.0, 1.0 if key[0] == torch.float32 else bfloat16, 90.0] for key in work}

    return timed


def stored_in_bfloat16(folder: Path, backend: str = "auto") -> PreparedModel:
    save(make_model("qwen3").to(torch.bfloat16), folder)
    return describe(folder, ModelSource(str(folder), backend=backend))


@pytest.mark.parametrize(("seconds", "chosen"), [(0.5, torch.bfloat16), (0.95, torch.float32), (3.0, torch.float32)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_large_model_runs_in_16_bits_if_that_is_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, chosen: torch.dtype, backend: str
) -> None:
    model = stored_in_bfloat16(tmp_path, backend)
    monkeypatch.setattr(dtype_choice, "last_level_cache", lambda: 1024)
    monkeypatch.setattr(dtype_choice, "timed", clock(seconds))
    choice = choose_dtype("auto", model, CPU)
    assert choice.dtype == chosen
    assert f"{1e3 * seconds:.2f} ms a token in bfloat16, 1000.00 in float32" in choice.reason


def test_the_dtype_is_chosen_by_the_time_of_a_token_with_its_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, six tokens take as long as six passes over one, and plain decoding is faster than in float32."""
    seconds = {(torch.float32, 1): 1.0, (torch.float32, 6): 1.1, (torch.bfloat16, 1): 0.5, (torch.bfloat16, 6): 3.0}
    seconds |= {("int8", 1): 0.26, ("int8", 6): 0.3}
    model = stored_in_bfloat16(tmp_path)
    monkeypatch.setattr(dtype_choice, "last_level_cache", lambda: 1024)
    monkeypatch.setattr(dtype_choice, "refusal", lambda *_: None)
    monkeypatch.setattr(dtype_choice, "timed", lambda work, *_, **__: {key: [seconds[key]] for key in work})
    plain, drafted = (choose_dtype("auto", model, CPU, is_drafted_for=each) for each in (False, True))
    assert (plain.dtype, drafted.dtype) == (torch.bfloat16, torch.float32)
    assert plain.hint is None
    assert drafted.hint is not None
    assert "about 3.7 times as fast: --dtype int8" in drafted.hint


def test_nothing_is_timed_where_a_rule_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = stored_in_bfloat16(tmp_path)
    monkeypatch.setattr(dtype_choice, "timed", lambda *_, **__: pytest.fail("timed"))
    stored = "the dtype of its weights"
    cached = "the model fits into the processor's cache"
    narrow = torch.bfloat16
    for name, device, dtype, cache, expected in (
        ("float16", CPU, "bfloat16", 1024, (torch.float16, "chosen by --dtype")),
        ("auto", CPU, "float32", 1024, (torch.float32, stored)),
        ("auto", torch.device("meta"), "bfloat16", 1024, (narrow, stored)),
        ("auto", CPU, "bfloat16", 1024, (narrow, "in float32 the weights might not fit into memory")),
        ("auto", CPU, "bfloat16", 1 << 30, (torch.float32, cached)),
    ):
        monkeypatch.setattr(dtype_choice, "last_level_cache", lambda cache=cache: cache)
        monkeypatch.setattr(dtype_choice, "free_memory", lambda _: 1024)
        choice = choose_dtype(name, replace(model, shape=replace(model.shape, dtype=dtype)), device)
        assert (choice.dtype, choice.reason) == expected


def test_the_chosen_dtype_is_the_one_that_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`auto`, the default, on a CPU, for weights in bfloat16 whose products take half as long as in float32."""
    stored_in_bfloat16(tmp_path)
    monkeypatch.setattr(dtype_choice, "last_level_cache", lambda: 1024)
    monkeypatch.setattr(dtype_choice, "timed", clock(0.5))
    for asked, chosen in (((), "bfloat16"), (("--dtype", "float16"), "float16")):
        named = ("-t", str(tmp_path), "--device", "cpu", *asked)
        code, out, _ = run_main(monkeypatch, capfd, "generate", *named, "--json", "-n", "4", "abc")
        assert (code, json.loads(out.splitlines()[0])["dtype"]) == (0, chosen)
