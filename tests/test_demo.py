"""The bundled pair, the text and the program it was trained with, and the example prompts."""

from __future__ import annotations

import re
import string
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from recipe.train_pair import BUNDLED, train
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from specgen.demo import ROLES, documents, folder

EXAMPLES: list[dict[str, str]] = yaml.safe_load(
    (Path(__file__).parent.parent / "examples.yaml").read_text("utf-8")
)["prompts"]
FORMS = {
    "code": r"[\s\S]*\b(class|def)\b",
    "math": r"Question: .+\nAnswer:",
    "news": r"Article: .+\nSummary:",
    "chat": r"User: .+\nAssistant:",
}


@pytest.mark.parametrize("role", ROLES)
def test_bundled_models_load_in_transformers_and_know_a_fact(role: str) -> None:
    assert {
        path.name for path in folder(role).iterdir() if path.suffix not in {".json", ".jinja"}
    } == {"model.safetensors"}
    model = AutoModelForCausalLM.from_pretrained(folder(role), local_files_only=True)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder(role))
    assert model.dtype == torch.bfloat16
    assert model.config.vocab_size == len(tokenizer)
    prompt = tokenizer(
        "User: What is the capital of France?\nAssistant: The capital of", return_tensors="pt"
    )
    with torch.inference_mode():
        logits = model(input_ids=prompt.input_ids).logits
    assert tokenizer.decode(logits[0, -1].argmax().item()) == " France"


def test_the_text_has_all_four_kinds_and_none_of_the_example_prompts() -> None:
    texts = documents()
    assert len(set(texts)) == len(texts) > 20_000
    kinds = Counter(
        next((kind for kind in ("math", "news", "chat") if re.match(FORMS[kind], text)), "code")
        for text in texts
    )
    assert min(kinds[kind] for kind in FORMS) > 2_000
    trained = "\n\n".join(texts)
    assert not [example["id"] for example in EXAMPLES if example["prompt"] in trained]


def test_the_recipe_trains_a_model_that_learns(tokenizers: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizers / "draft")
    digits = [
        token for token in tokenizer.get_vocab() if any(digit in token for digit in string.digits)
    ]
    assert sorted(digits) == list(string.digits)  # each digit is one token
    assert (tokenizers / "draft" / "tokenizer.json").read_bytes() == (
        tokenizers / "target" / "tokenizer.json"
    ).read_bytes()
    loss = train(replace(BUNDLED["draft"], steps=80, length=64), tokenizers / "draft")
    assert loss < 5  # ln 400 = 6.0 before
    assert AutoModelForCausalLM.from_pretrained(tokenizers / "draft").config.num_hidden_layers == 2
    (tokenizers / "draft" / "model.safetensors").unlink()
