"""Loading models: refused models, context limits, devices, threads and dtypes, tokenizers, text
that streams."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cli_helpers import run_main
from families import BACKENDS, CONTEXT, VOCAB, make_model, plain, save
from runner_checks import TOLERANCE, uncached
from transformers import AutoModelForCausalLM, GenerationConfig
from typer.testing import CliRunner

import specgen
from specgen import demo
from specgen.base.errors import SpecgenError
from specgen.base.types import SamplingParams
from specgen.cli.app import app
from specgen.engine import devices, precision
from specgen.engine.devices import ThreadChoice, pick_threads
from specgen.engine.model_files import ModelFiles, ModelSource, describe
from specgen.engine.precision import choose_precision
from specgen.methods import METHODS
from specgen.pair.pair import Pair


def test_models_that_cannot_be_rolled_back_are_named_or_refused(tmp_path: Path) -> None:
    """Others are in `test_bad_inputs.py`: an encoder, an encoder-decoder."""
    from transformers import BertConfig, BertLMHeadModel

    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
    }
    bert = BertLMHeadModel(BertConfig(**shape, initializer_range=0.25))
    with pytest.raises(SpecgenError, match=r"is an encoder\. Take a decoder-only"):
        specgen.load(save(bert, tmp_path / "bert"), device="cpu")
    pair = specgen.load(save(make_model("jamba"), tmp_path / "jamba"), device="cpu")
    assert "needs no rollback: -m ar" in str(pair.target.warning)


def test_eager_attention_gives_the_reference_output(tmp_path: Path) -> None:
    """Gemma 2 uses eager attention, which would add a boolean mask as numbers."""
    model = make_model("gemma2", seed=6)
    pair = specgen.load(
        save(model, tmp_path), device="cpu", dtype="float32", backend="transformers"
    )
    pair.target.transformers_module.set_attn_implementation("eager")
    result = pair.generate([1, 5, 6, 5, 6], "lookup", SamplingParams(max_new_tokens=30), k=10)
    assert result.token_ids == plain(model, [1, 5, 6, 5, 6], 30)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_longrope_run_never_crosses_the_rope_boundary(
    tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rope = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "rope_theta": 10000.0,
    }
    rope |= {"partial_rotary_factor": 1.0, "original_max_position_embeddings": 32}
    model = make_model(
        "phi3", sliding_window=None, original_max_position_embeddings=32, rope_parameters=rope
    )
    pair = specgen.load(save(model, tmp_path), device="cpu", dtype="float32", backend=backend)
    shape = pair.target.model.shape
    assert (shape.context_limit, shape.rope_boundary) == (CONTEXT, 32)
    short = pair.request([5] * 20, "lookup", SamplingParams(max_new_tokens=60), k=10)
    assert short.limit == 13, "the token after the boundary is never run"
    result = CliRunner().invoke(
        app,
        ["generate", "-t", str(tmp_path), "--backend", backend, "-n", "60", "--ignore-eos", "abc"],
    )
    assert "(no draft model, 33 tokens: LongRoPE changes there)" in result.stderr, (
        "one line says why the text ends"
    )
    monkeypatch.setattr("specgen.engine.cached_prefix.PREFILL_CHUNK", 10)
    text = [5 + token % 7 for token in range(60)]
    # prefixes of each other, which share no cache across the boundary
    for length in (36, 15, 60, 32, 33, 31, 20):
        reference = pair.target.reference_logits(text[:length], [])
        assert torch.allclose(reference, uncached(model, text[:length]), atol=TOLERANCE, rtol=1e-4)
        expected = plain(model, text[:length], min(40, pair.target.max_tokens(length) - length))
        assert (
            pair.generate(
                text[:length], "lookup", SamplingParams(max_new_tokens=40), k=10
            ).token_ids
            == expected
        ), length


@pytest.mark.parametrize(
    ("speedups", "chosen"),
    [({1: 1.0, 2: 1.1, 4: 1.15}, 1), ({1: 1.0, 2: 1.5, 4: 1.6}, 2), ({1: 1.0, 2: 1.9, 4: 3.5}, 4)],
)
def test_the_fewest_threads_that_are_nearly_the_fastest_are_chosen(
    monkeypatch: pytest.MonkeyPatch, speedups: dict[int, float], chosen: int
) -> None:
    clock = [0.0]
    threads = [4]
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    share = [1.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    monkeypatch.setattr("time.thread_time", lambda: clock[0] * share[0])
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: threads.__setitem__(0, count))
    sample = pick_threads(lambda: clock.__setitem__(0, clock[0] + 0.1 / speedups[threads[0]]))
    choice = sample.value
    assert sample.is_steady
    assert (threads, choice.threads) == ([4], chosen)
    assert choice.seconds == pytest.approx(
        {number: 0.1 / speedups.get(number, 1) for number in (1, 2, 4)}
    )
    share[0] = 0.5  # a neighbour takes half of the processor, evenly
    assert not pick_threads(lambda: clock.__setitem__(0, clock[0] + 0.1)).is_steady
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert pick_threads(lambda: pytest.fail("nothing to time")).value == ThreadChoice(
        4, "OMP_NUM_THREADS is set"
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("method", ["ar", "sd", "svip", "lookup"])
def test_cuda_gives_the_same_tokens_as_transformers_there(method: str) -> None:
    pair = specgen.load(device="cuda", dtype="float32")
    ids = pair.tokenizer.encode("User: What is the capital of Japan?\nAssistant:")
    model = AutoModelForCausalLM.from_pretrained(
        specgen.demo.folder("target"), dtype=torch.float32
    ).to("cuda")
    output = model.generate(torch.tensor([ids], device="cuda"), do_sample=False, max_new_tokens=40)
    assert (
        pair.generate(ids, method, SamplingParams(max_new_tokens=40)).token_ids
        == output[0, len(ids) :].tolist()
    )


def test_the_users_repetition_penalty_changes_outputs_and_no_likelihood(
    pair_of: Callable[..., Pair],
) -> None:
    plain_pair = pair_of("llama", "near")
    folder = str(plain_pair.target.folder)
    prompt, answer = [1, 5, 6, 5], [6, 5, 6, 5]
    sampling = SamplingParams(max_new_tokens=12, ignore_eos=True)
    with specgen.load(
        folder, folder, device="cpu", dtype="float32", repetition_penalty=1.7
    ) as pair:
        found = pair.generate(prompt, "sd", sampling)
        likelihood = pair.log_likelihood(prompt, answer)
    model = AutoModelForCausalLM.from_pretrained(plain_pair.target.folder, dtype=torch.float32)
    assert found.token_ids == plain(model, prompt, 12, repetition_penalty=1.7, eos_token_id=-1)
    assert found.token_ids != plain(model, prompt, 12, eos_token_id=-1)
    assert found.summary["acceptance_rate"] == 1, "the draft has the penalty, too"
    assert likelihood == pytest.approx(plain_pair.log_likelihood(prompt, answer), abs=1e-4)


def test_quantised_text_parts_do_not_run_natively(tmp_path: Path) -> None:
    config = json.loads((demo.folder("target") / "config.json").read_text(encoding="utf-8"))
    config["text_config"] = {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(SpecgenError, match="does not run it: its weights are quantised with fp8"):
        describe(tmp_path, ModelSource("it", backend="native"))


def test_a_pass_of_a_mixture_reads_the_chosen_experts(
    pair_of: Callable[..., Pair],
) -> None:
    files = pair_of("qwen3_moe", "near").target.files
    count, chosen = files.experts or (0, 0)
    assert 0 < chosen < count
    experts = sum(size for name, size in files.parameters.items() if ".experts." in name)
    others = sum(files.parameters.values()) - experts
    assert files.active_parameters == others + experts * chosen // count
    assert files.rounding_refusal(torch.device("cpu")) is None
    assert "is rounded on a CPU alone" in str(files.rounding_refusal(torch.device("cuda")))


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
        penalties = {
            "bad_words_ids": [[5], [VOCAB - 1]],
            "repetition_penalty": 1.2,
            "suppress_tokens": [VOCAB - 2],
        }
        target.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0, **penalties)
    pair = specgen.load(
        save(target, tmp_path / "t"), save(draft, tmp_path / "d"), device="cpu", dtype="float32"
    )
    expected = plain(target, [1, 5, 6], 30)
    for method in ("sd", "spectr", "specinfer", "mtad", "bild"):
        # at temperature 1 the target has one token to sample with top_k 1, whatever the draft
        # samples
        sampling = SamplingParams(
            max_new_tokens=30, temperature=temperature, top_k=1 if temperature else 0, seed=1
        )
        if METHODS[method].lossless:
            assert pair.generate([1, 5, 6], method, sampling).token_ids == expected, method
        tokens = pair.generate(
            [1, 5, 6], method, replace(sampling, top_k=0, ignore_eos=True)
        ).token_ids
        assert len(tokens) == 30
        assert max(tokens) < VOCAB, "a token that only the draft's vocabulary has"
        assert not set(forbidden) & set(tokens)


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n    return x  # naïve café",
        "日本語のテキスト 🎉👩‍👩‍👧‍👦 ok",
        "tabs\tand  spaces   \n\n\nلغة",
    ],
)
def test_incremental_text_is_the_whole_text_in_complete_characters(
    demo_pair: Pair, text: str
) -> None:
    prompt = demo_pair.tokenizer.encode("x =")
    ids = demo_pair.tokenizer.encode(text)[1:]
    detokenizer = demo_pair.tokenizer.detokenizer(prompt)
    pieces = [detokenizer.push(token) for token in ids]
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert "".join(pieces) + detokenizer.flush() == text


def test_invalid_bytes_hold_back_only_a_few_tokens(demo_pair: Pair) -> None:
    vocabulary = demo_pair.tokenizer.vocabulary()
    # a lone UTF-8 tail byte
    continuation = next(vocabulary[token] for token in ("¡", "¢", "£", "Ģ") if token in vocabulary)
    detokenizer = demo_pair.tokenizer.detokenizer([])
    assert any(detokenizer.push(continuation) for _ in range(12)), "shown as replacement characters"
    assert (detokenizer.push(demo_pair.tokenizer.encode("a")[-1]) + detokenizer.flush()).endswith(
        "a"
    )


CPU = torch.device("cpu")


def stored_in_bfloat16(folder: Path, backend: str = "auto") -> ModelFiles:
    save(make_model("qwen3").to(torch.bfloat16), folder)
    return describe(folder, ModelSource(str(folder), backend=backend))


def choice_of(
    name: str, model: ModelFiles, stored: str, device: torch.device = CPU
) -> tuple[torch.dtype, str]:
    """The chosen dtype and its reason, for a model whose config names the dtype `stored`."""
    choice = choose_precision(
        name, replace(model, shape=replace(model.shape, dtype=stored)), device
    )
    return choice.dtype, choice.reason


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_dtype_follows_from_a_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    model = stored_in_bfloat16(tmp_path, backend)
    bytes_in_float32 = 4 * sum(model.parameters.values())
    monkeypatch.setattr(precision, "total_memory", lambda: 2 * bytes_in_float32)
    everywhere = torch.float32, "the dtype of all models on a CPU"
    own = "the dtype of its weights"
    assert choice_of("auto", model, "bfloat16") == everywhere
    assert choice_of("auto", model, "float16") == everywhere
    assert choice_of("auto", model, "float32") == (torch.float32, own)
    assert choice_of("float16", model, "bfloat16") == (torch.float16, "chosen by --dtype")
    assert choice_of("auto", model, "bfloat16", torch.device("meta")) == (torch.bfloat16, own)


@pytest.mark.usefixtures("without_kernels")
def test_a_model_that_is_too_large_in_float32_runs_as_it_is_stored_and_a_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    model = stored_in_bfloat16(tmp_path)
    bytes_in_float32 = 4 * sum(model.parameters.values())
    monkeypatch.setattr(precision, "total_memory", lambda: int(1.5 * bytes_in_float32))
    assert choose_precision("auto", model, CPU).warning is not None
    options = ("generate", "-t", str(tmp_path), "--device", "cpu", "-m", "ar", "-n", "2", "abc")
    code, _, err = run_main(monkeypatch, capfd, *options)
    assert code == 0
    assert (
        f"{tmp_path} runs in bfloat16, as it is stored: in float32 it would take 0.0 GiB of this"
        in err
    )
    monkeypatch.setattr(precision, "total_memory", lambda: 2 * bytes_in_float32)
    assert choose_precision("auto", model, CPU).warning is None


def test_memory_that_others_have_taken_ends_the_run_and_never_changes_the_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stored_in_bfloat16(tmp_path)
    monkeypatch.setattr(precision, "free_memory", lambda _: 1024)
    options = (
        "generate",
        "-t",
        str(tmp_path),
        "--device",
        "cpu",
        "-m",
        "ar",
        "--json",
        "-n",
        "2",
        "abc",
    )
    code, _, err = run_main(monkeypatch, capfd, *options)
    assert code == 1
    assert (
        "GiB of memory in float32, and 0.0 GiB are free. Close other programs, or take "
        "--dtype bfloat16"
    ) in err
    code, out, _ = run_main(monkeypatch, capfd, *options, "--dtype", "bfloat16")
    assert (code, json.loads(out.splitlines()[0])["dtype"]) == (0, "bfloat16")


_V1 = "12:cpu,cpuacct:/a\n9:memory:/docker/12:ab\n1:name=systemd:/a\n"


@pytest.mark.parametrize(
    ("groups", "file"),
    [
        ("0::/\n", "memory.max"),
        ("0::/user.slice/run:1.scope\n", "user.slice/run:1.scope/memory.max"),
        ("0::/../outside\n", "memory.max"),
        (_V1, "memory/docker/12:ab/memory.limit_in_bytes"),
        (_V1 + "0::/\n", "memory/memory.limit_in_bytes"),
        ("\nodd\n0::/user.slice\n", "user.slice/memory.max"),
    ],
)
def test_a_container_with_less_memory_than_the_machine_counts(
    groups: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "_ROOT", tmp_path)
    whole = devices.total_memory()
    assert whole is not None
    assert whole > 1 << 20
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    limit = tmp_path / "sys/fs/cgroup" / file
    limit.parent.mkdir(parents=True)
    for content, expected in (("max\n", whole), ("1048576\n", 1 << 20), (f"{2 * whole}\n", whole)):
        limit.write_text(content)
        assert devices.total_memory() == expected


def test_the_least_limit_of_the_groups_around_a_process_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "_ROOT", tmp_path)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/outer/own\n")
    limits = {"outer": 1 << 20, "outer/own": 2 << 20, "outer/own/inner": 1 << 10, "other": 1 << 10}
    for group, limit in limits.items():
        folder = tmp_path / "sys/fs/cgroup" / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
    assert devices.total_memory() == 1 << 20


def test_the_chosen_dtype_is_the_one_that_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stored_in_bfloat16(tmp_path)
    named = ("-t", str(tmp_path), "--device", "cpu")
    for asked, chosen in (((), "float32"), (("--dtype", "float16"), "float16")):
        code, out, _ = run_main(
            monkeypatch, capfd, "generate", *named, *asked, "--json", "-n", "4", "abc"
        )
        assert (code, json.loads(out.splitlines()[0])["dtype"]) == (0, chosen)
