"""generation_config.json and the penalties in it: read and computed as transformers does."""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from runner_checks import path_to
from transformers import GenerationMixin

from specgen.base.errors import SpecgenError
from specgen.base.types import Context
from specgen.engine.penalties import (
    GenerationConfig,
    PenaltyProcessor,
    eos_ids,
    read_generation_config,
)

WIDTH = 13  # few tokens, so that n-grams and biased sequences occur often
CPU = torch.device("cpu")


def takes_tokens_without_logit() -> bool:
    """Whether the installed transformers does; only models with a smaller head than embedding have
    such tokens."""
    rule = transformers.NoRepeatNGramLogitsProcessor(1)
    try:
        rule(torch.tensor([[WIDTH + 1]]), torch.zeros(1, WIDTH))
    except RuntimeError:
        return False
    return True


BEYOND = 4 if takes_tokens_without_logit() else 0  # how many ids without a logit occur


def write(folder: Path, generation: Any = None, config: dict[str, Any] | None = None) -> Path:
    (folder / "config.json").write_text(json.dumps(config or {"model_type": "llama"}))
    if generation is not None:
        text = generation if isinstance(generation, str) else json.dumps(generation)
        (folder / "generation_config.json").write_text(text)
    return folder


def reference_processors(config: Any, eos: list[int], prompt_length: int) -> Any:
    """The processors that transformers' own `generate` makes."""
    model: Any = GenerationMixin()
    model.config = transformers.PretrainedConfig()
    config._eos_token_tensor = torch.tensor(eos) if eos else None
    return model._get_logits_processor(config, input_ids_seq_length=prompt_length, device="cpu")


def random_settings(rng: random.Random, width: int) -> dict[str, Any]:
    """The fields of a random generation config, each set or not."""

    def word(shortest: int = 1) -> list[int]:
        return [rng.randrange(width) for _ in range(rng.randint(shortest, 3))]

    fields: dict[str, Any] = {
        "sequence_bias": [[word(), rng.uniform(-4, 4)] for _ in range(rng.randint(1, 25))],
        "repetition_penalty": rng.choice([0.7, 1.2, 1.9]),
        "no_repeat_ngram_size": rng.randint(1, 4),
        "bad_words_ids": [word(2), *(word() for _ in range(rng.randint(0, 8)))],
        "min_length": rng.randint(1, 16),
        "min_new_tokens": rng.randint(1, 8),
        "suppress_tokens": [rng.randrange(width + 3) for _ in range(rng.randint(0, 3))],
        "begin_suppress_tokens": [rng.randrange(width + 3) for _ in range(rng.randint(0, 3))],
    }
    chosen = rng.choice([0.2, 0.5, 1.0])
    return {name: value for name, value in fields.items() if rng.random() < chosen}


def random_context(rng: random.Random, context: Context | None) -> Context:
    """A new context, or `context` as it is, extended or shortened."""
    change = rng.randrange(5) if context is not None else 0
    if context is None or change == 0:
        context = Context(rng.randrange(WIDTH + BEYOND // 2) for _ in range(rng.randint(1, 12)))
    elif change == 1 and len(context) > context.prompt_length + 1:
        del context.ids[-2:]
    elif change > 2:
        context.extend([rng.randrange(WIDTH + BEYOND // 2) for _ in range(rng.randint(1, 4))])
    return context


@pytest.mark.parametrize("seed", range(30))
def test_penalties_are_equal_to_those_of_transformers(tmp_path: Path, seed: int) -> None:
    """Several calls of one processor, for chains and trees, other starts, contexts and vocabulary
    sizes."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    settings = random_settings(rng, WIDTH)
    eos = rng.sample(range(WIDTH + 1), rng.randint(0, 3))
    read = read_generation_config(write(tmp_path, settings), {})
    config = transformers.GenerationConfig.from_pretrained(tmp_path)
    if config.sequence_bias is not None:  # old versions take token 0 in this form alone
        config.sequence_bias = {tuple(word): bias for word, bias in config.sequence_bias}
    processor = PenaltyProcessor(read, frozenset(eos), WIDTH, CPU)
    context = None
    for _ in range(8):
        context = random_context(rng, context)
        tokens = [rng.randrange(WIDTH + BEYOND) for _ in range(rng.choice([0, 0, 1, 3, 7]))]
        chain = rng.random() < 0.5
        parents = (
            range(-1, len(tokens) - 1)
            if chain
            else [rng.randint(-1, node - 1) for node in range(len(tokens))]
        )
        start = rng.randint(0, len(tokens))
        logits = 4 * torch.randn(
            len(tokens) + 1 - start, rng.choice([WIDTH, WIDTH - 3, WIDTH + 5]), generator=generator
        )
        given = logits.clone()
        found = processor(logits, context, tokens, parents, start)
        assert torch.equal(logits, given)
        fitted = torch.nn.functional.pad(logits, (0, WIDTH - logits.shape[1]), value=-torch.inf)
        reference = reference_processors(config, eos, context.prompt_length)
        for row, index in enumerate(range(start, len(tokens) + 1)):
            ids = torch.tensor([[*context.ids, *path_to(tokens, list(parents), index - 1)]])
            assert torch.equal(found[row], reference(ids, fitted[row : row + 1].clone())[0]), (
                settings,
                index,
            )


@pytest.mark.parametrize("field", ["sequence_bias", "bad_words_ids"])
def test_sequences_beyond_the_vocabulary_are_refused(field: str) -> None:
    config = (
        GenerationConfig(sequence_bias=(((3, WIDTH), 1.0),)) if field == "sequence_bias" else None
    )
    with pytest.raises(SpecgenError, match=rf"{field} names token {WIDTH}"):
        PenaltyProcessor(
            config or GenerationConfig(bad_words_ids=((WIDTH,),)), frozenset(), WIDTH, CPU
        )


SETTINGS: dict[str, Any] = {
    "eos_token_id": [2, 7],
    "repetition_penalty": 1.3,
    "no_repeat_ngram_size": 3,
    "bad_words_ids": [[5], [6, 7]],
    "sequence_bias": [[[9], 5.0], [[10, 11], -4.0]],
    "min_length": 4,
    "min_new_tokens": 2,
    "suppress_tokens": [1, 2],
    "begin_suppress_tokens": [3],
    "num_beams": 2,
    "temperature": 0.3,
}


def as_lists(value: Any) -> Any:
    return [as_lists(each) for each in value] if isinstance(value, tuple) else value


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    "generation", [None, {}, {"repetition_penalty": 1.7, "eos_token_id": 5}, SETTINGS]
)
def test_a_generation_config_is_read_as_transformers_reads_it(
    tmp_path: Path, generation: Any, nested: bool
) -> None:
    config = (
        {"model_type": "llama", "text_config": SETTINGS}
        if nested
        else {"model_type": "llama", **SETTINGS}
    )
    write(tmp_path, generation, config)
    if isinstance(generation, dict):
        expected = transformers.GenerationConfig.from_pretrained(tmp_path)
    else:
        options: dict[str, Any] = {"config_file_name": "config.json", "_from_model_config": True}
        expected = transformers.GenerationConfig.from_pretrained(tmp_path, **options)
    found = read_generation_config(tmp_path, config)
    assert pickle.loads(pickle.dumps(found)) == found
    assert found.unsupported.get("num_beams") == expected.num_beams
    for name in set(GenerationConfig.__slots__) - {"unsupported"}:
        ours = as_lists(getattr(found, name))
        theirs = getattr(expected, name)
        assert ours == (
            [theirs] if name == "eos_token_id" and isinstance(theirs, int) else theirs
        ), name


@pytest.mark.parametrize(
    ("config", "generation", "default", "tokenizer", "expected"),
    [
        ({"eos_token_id": 3}, (5, 6), 4, 7, {5, 6}),
        ({"eos_token_id": 3}, (), 4, 7, set()),
        ({"eos_token_id": 3}, None, 4, 7, {3}),
        ({"eos_token_id": [3, 8]}, None, 4, 7, {3, 8}),
        ({"text_config": {"eos_token_id": 3}}, None, 4, 7, {3}),
        ({}, None, 4, 7, {4}),
        ({}, None, [4, 9], 7, {4, 9}),
        ({"eos_token_id": None}, None, 4, 7, {7}),
        ({}, None, None, 7, {7}),
        ({}, None, None, None, set()),
    ],
)
def test_where_end_of_sequence_ids_come_from(
    config: dict[str, Any], generation: Any, default: Any, tokenizer: int | None, expected: set[int]
) -> None:
    assert (
        eos_ids(config, GenerationConfig(eos_token_id=generation), default, tokenizer) == expected
    )
