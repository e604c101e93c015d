"""GGUF files as target and draft model in the commands: what identifies them, the report on a pair,
PEARL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import run_main
from gguf_models import model_of, write_model
from tuning_helpers import outcome

import specgen
from specgen.base.types import SamplingParams
from specgen.engine.gguf import file as gguf_file
from specgen.engine.gguf.file import GgufFile
from specgen.engine.gguf.tokenizer import GgufTokenizer, read_tokenizer
from specgen.engine.kernels.library import kernels
from specgen.engine.text import tokenizer_files
from specgen.engine.weights import weights_fingerprint
from specgen.pair import profile as profiles
from specgen.pair.profile_place import profile_key_of
from specgen.tune.profile import from_outcome

PROMPT = [5, 9, 7, 6, 11, 4]


@pytest.fixture(scope="module")
def pair_of_files(tmp_path_factory: Any) -> tuple[Path, Path]:
    """A target, and the same model with matrices of 4 bits as its draft."""
    folder = tmp_path_factory.mktemp("models")
    target = write_model(model_of("qwen2"), "qwen2", folder / "target.gguf", "F32")
    return target, write_model(model_of("qwen2"), "qwen2", folder / "draft.gguf", "Q4_0")


def test_a_profile_fits_the_files_that_it_was_made_for(
    pair_of_files: tuple[Path, Path], tmp_path: Path
) -> None:
    target, draft = pair_of_files
    other = write_model(
        model_of("qwen2"), "qwen2", tmp_path / "target.gguf", "Q8_0", **{"general.name": "other"}
    )
    with specgen.load(str(target), str(draft), dtype="float32") as pair:
        key = profile_key_of(pair)
    assert key["target"]["fingerprint"] == weights_fingerprint(target)
    assert key["draft"]["fingerprint"] == weights_fingerprint(draft)
    assert len({weights_fingerprint(path) for path in (target, draft, other)}) == 3
    described = write_model(
        model_of("qwen2"), "qwen2", tmp_path / "copy.gguf", "F32", **{"general.name": "renamed"}
    )
    assert weights_fingerprint(described) == weights_fingerprint(target)
    lengthened = write_model(
        model_of("qwen2"), "qwen2", tmp_path / "more.gguf", "F32", **{"qwen2.context_length": 1024}
    )
    assert weights_fingerprint(lengthened) != weights_fingerprint(target)


def test_the_headers_of_a_pair_are_read_once(
    pair_of_files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    original = gguf_file.read_header

    def recorded(path: Path) -> Any:
        read.append(path.name)
        return original(path)

    monkeypatch.setattr(gguf_file, "read_header", recorded)
    gguf_file._kept_header.cache_clear()
    with specgen.load(*map(str, pair_of_files), dtype="float32") as pair:
        profile_key_of(pair)
    assert sorted(read) == ["draft.gguf", "target.gguf"]


def test_pearl_drafts_with_a_file(pair_of_files: tuple[Path, Path]) -> None:
    sampling = SamplingParams(max_new_tokens=12, ignore_eos=True)
    with specgen.load(*map(str, pair_of_files), dtype="float32") as pair:
        plain, drafted = (
            pair.generate(PROMPT, method=method, sampling=sampling) for method in ("ar", "pearl")
        )
    assert list(drafted.token_ids) == list(plain.token_ids)
    assert drafted.summary["accepted"] > 0


def test_llama_cpp_gets_the_files_themselves(
    pair_of_files: tuple[Path, Path], tmp_path: Path, monkeypatch: Any, capfd: Any
) -> None:
    target, draft = pair_of_files
    with specgen.load(str(target), str(draft), device="cpu", dtype="float32") as pair:
        found = from_outcome(outcome(), profile_key_of(pair))
    choice = profiles.Choice(method="sd", settings={"k": 3})
    profiles.save(found.model_copy(update={"chosen": choice}), tmp_path)
    options = (
        f"tune -t {target} -d {draft} --device cpu --dtype float32 --out {tmp_path} "
        "--export llama.cpp"
    )
    code, out, err = run_main(monkeypatch, capfd, *options.split(), "-m", "sd")
    assert code == 0, err
    assert f"-m {target} " in out
    assert f"-md {draft} " in out


def test_inspect_reports_on_files_and_their_tokenizers(
    tmp_path: Path, monkeypatch: Any, capfd: Any
) -> None:
    named = {"tokenizer.ggml.pre": "unheard"}
    path = write_model(model_of("qwen2"), "qwen2", tmp_path / "target.gguf", "Q8_0", **named)
    command = ["inspect", "-t", str(path), "-d", "none"]
    code, out, err = run_main(monkeypatch, capfd, *command, "--json")
    assert (code, err) == (0, "")
    target = json.loads(out)["target"]
    dtype = "float32" if kernels() is None else "q8_0"
    assert (target["family"], target["backend"], target["dtype"]) == ("qwen2", "native", dtype)
    assert f"{path}: its pre-tokenizer 'unheard' is unknown" in target["tokenizer_warning"]
    code, out, _ = run_main(monkeypatch, capfd, *command)
    assert code == 0
    assert "✗ tokenizer" in out
    assert "is unknown, so text is split as by gpt-2" in " ".join(out.split())


def test_the_vocabulary_of_each_file_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And again after the file was replaced."""
    path = tmp_path / "model.gguf"
    asked: list[str] = []

    def recorded(opened: GgufFile, name: str) -> GgufTokenizer:
        asked.append(name)
        return read_tokenizer(opened, name)

    monkeypatch.setattr(tokenizer_files, "read_tokenizer", recorded)
    for count, name in enumerate(("one", "another one")):
        write_model(model_of("qwen2"), "qwen2", path, **{"general.name": name})
        for _ in range(2):
            with specgen.load(str(path), dtype="float32", find=False):
                assert len(asked) == count + 1


@pytest.mark.skipif(kernels() is None, reason="there are no kernels here")
@pytest.mark.parametrize(
    ("kind", "kept"),
    [
        ("Q5_K", "as in their file (q5_k)"),
        (
            "Q6_K",
            "as in their file (q6_k), Q6_K in 8 bits (perplexity +0.08 % for SmolLM2-135M)",
        ),
        ("IQ4_XS", "as in their file (iq4_xs), IQ4_XS in 8 bits"),
    ],
)
def test_inspect_says_what_of_a_file_is_rounded(
    kind: str,
    kept: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    path = write_model(model_of("qwen2"), "qwen2", tmp_path / "target.gguf", kind)
    code, out, err = run_main(monkeypatch, capfd, "inspect", "-t", str(path), "--json")
    assert code == 0, err
    assert json.loads(out)["target"]["kept_as"] == kept
