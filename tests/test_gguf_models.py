"""GGUF files as models: the same output as the model that was written, and as transformers' on a published file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_models import FAMILIES, model_of, write_model
from published_model import gguf_file, needs_published_model
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

import specgen
from specgen.base.types import SamplingParams
from specgen.engine.transformers.quiet import quiet_transformers

PROMPT = torch.randint(3, 400, (150,), generator=torch.manual_seed(1)).tolist()  # longer than the sliding windows


def decoded(pair: Any, prompt: list[int], count: int, method: str = "ar") -> list[int]:
    sampling = SamplingParams(max_new_tokens=count, ignore_eos=True)
    return list(pair.generate(prompt, method=method, sampling=sampling).token_ids)


def check_same_output(pair: Any, module: Any) -> None:
    """Compares the logits and the greedy ids with those of transformers' model."""
    ids = decoded(pair, PROMPT, 16)
    assert len(set(ids)) > 1, "a model that repeats itself proves nothing"
    with torch.no_grad():
        expected = module(torch.tensor([PROMPT + ids]), use_cache=False).logits[0]
    found = pair.target.model.reference_logits(PROMPT + ids)
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)
    assert ids == expected[len(PROMPT) - 1 : -1].argmax(dim=-1).tolist()


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_K"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_gives_the_output_of_the_model_that_was_written(family: str, kind: str, tmp_path: Path) -> None:
    module = model_of(family)
    before = [weight.clone() for weight in module.parameters()]
    path = write_model(module, family, tmp_path / "model.gguf", kind)  # gives the model the values in the file
    if kind == "F32":
        for weight, own in zip(module.parameters(), before, strict=True):
            torch.testing.assert_close(weight, own, rtol=0, atol=2e-7)  # norms lose a bit by 1 added and subtracted
    with specgen.load(str(path), dtype="float32") as pair:
        assert pair.target.backend == "native"
        check_same_output(pair, module)


MESSAGES = [{"role": "user", "content": "Why is the sky blue at 12:30?"}]
TEXTS = [
    "Hello world, it's   fine",
    "def f(x):\n    return x[0] + 1_000\n\n\tprint('12345', 6.7e8)\n",
    "\u00e9t\u00e9 e\u0301te\u0301 \U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "\u65e5\u672c\u8a9e \u0663\u0664\u00bd\u00b2",
    "\r\n  lines\r\n\n\n and spaces   ",
    "<|im_start|>user\nI'LL we've<|im_end|>\n",
]


@pytest.fixture(scope="module")
def published() -> Any:
    file = gguf_file()
    assert file is not None
    with specgen.load(str(file), dtype="float32") as pair:
        yield pair


@needs_published_model
def test_the_published_file_answers_as_in_transformers(published: Any) -> None:
    file = gguf_file()
    assert file is not None
    prompt = published.tokenizer.conversation(MESSAGES)
    with quiet_transformers():
        module = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    options = {"max_new_tokens": 32, "do_sample": False, "eos_token_id": 2, "pad_token_id": 2}
    expected = module.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
    assert published.target.backend == "native"
    assert len(expected) > 8
    for method in ("ar", "adaptive"):
        assert list(published.generate(prompt, method=method, sampling=SamplingParams(max_new_tokens=32)).token_ids) == expected


@needs_published_model
def test_the_published_file_has_the_tokens_of_its_model(published: Any) -> None:
    file = gguf_file()
    assert file is not None
    with quiet_transformers():
        theirs = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    backend = theirs.backend_tokenizer
    # its own tokenizer.json splits digits, which transformers does not know from the file
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer = published.tokenizer
    for text in TEXTS:
        ids = backend.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids, False) == text
    assert tokenizer.warning is None
    assert published.target.eos_ids == {0, 2}
    assert tokenizer.conversation(MESSAGES)[:2] == [1, 9690]  # <|im_start|>system
    assert tokenizer.turn_end == "<|im_end|>"
