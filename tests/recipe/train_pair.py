r"""How the bundled pair was made: trains a tokenizer, a small Llama as target and another as draft
on the bundled text.

    python tests/recipe/train_pair.py tokenizer OUT
    python tests/recipe/train_pair.py target OUT          # 90 minutes on two CPU cores
    python tests/recipe/train_pair.py draft OUT           # 5 minutes

The bundled models saw the same kind of text without end; this program repeats the bundled text. The
exit layer and the heads were trained by the commands in `exit.yaml` and `head.yaml`;
`train_parts.py` trains others and compares them. The exit layer's predictor was trained again, on
text that is new to the exit layer: with `specgen tune --train --exit-layer specgen/demo/exit
--prompts FILE --seed 1 --device cpu --dtype float32`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the customary name
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specgen import demo

CONTEXT_LENGTH = 1024
# documents to choose from: almost always one of them fits into what is left of a sequence
POOL_SIZE = 64
WARM_UP_STEPS = 100
DECAY_SHARE = 0.25  # of the budget
# steps of the decay: these have sequences of the whole context, so that the model learns all
# positions
LONG_BATCH_EVERY = 4
SPECIAL = PAD, BOS, EOS = "<pad>", "<s>", "</s>"

# The form of the text: "User: ...\nAssistant: ...\nUser: ..."
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if not loop.first %}{{ '\\n' }}{% endif %}"
    "{{ {'system': '', 'user': 'User: ', 'assistant': 'Assistant: '}[m['role']] + "
    "m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\nAssistant:' }}{% endif %}"
)


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters of one model. The budget is `steps` if they are given, else `minutes`."""

    hidden_size: int
    layers: int
    heads: int
    learning_rate: float
    minutes: float
    steps: int | None = None
    batch_size: int = 8
    length: int = 256  # tokens of a training sequence


BUNDLED = {
    "target": Recipe(hidden_size=128, layers=12, heads=4, learning_rate=4e-3, minutes=90),
    "draft": Recipe(hidden_size=48, layers=2, heads=3, learning_rate=8e-3, minutes=5),
}


def train_tokenizer(out: Path, vocabulary_size: int = 4096, characters: int = 3_000_000) -> None:
    """Trains byte-level BPE on about `characters` of the text and saves it to `out`/target and
    `out`/draft."""
    bpe = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)  # the model learns sums digit by digit
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator(demo_text(characters), trainer=trainer)
    add_bos = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, bpe.token_to_id(BOS))]
    )
    bpe.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), add_bos])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=BOS, eos_token=EOS, pad_token=PAD
    )
    tokenizer.model_max_length = CONTEXT_LENGTH
    tokenizer.chat_template = CHAT_TEMPLATE
    for role in demo.ROLES:
        tokenizer.save_pretrained(out / role)


def demo_text(characters: int) -> Iterator[str]:
    """Yields documents of the bundled text, about `characters` in all."""
    for text in demo.documents():
        yield text
        characters -= len(text)
        if characters <= 0:
            return


def sequences(tokenizer: Any, seed: int) -> Iterator[tuple[int, list[int]]]:
    """A generator that is sent lengths and yields as many tokens, packed from whole documents
    between `<s>` and `</s>`.

    A sequence starts with the oldest document of a pool, then takes the longest one that fits,
    again and again. Only its last document is cut.
    """
    texts = demo.documents()
    order = Random(seed)
    pool: list[list[int]] = []
    waiting: list[str] = []

    def take(index: int) -> list[int]:
        tokens = pool.pop(index)
        if not waiting:
            waiting.extend(order.sample(texts, len(texts)))
        ids = tokenizer.backend_tokenizer.encode(waiting.pop(), add_special_tokens=False).ids
        pool.append([tokenizer.bos_token_id, *ids, tokenizer.eos_token_id])
        return tokens

    pool.extend([] for _ in range(POOL_SIZE))
    for _ in range(POOL_SIZE):
        take(0)
    length = yield 0, []
    while True:
        sequence = take(0)[:length]
        while len(sequence) < length:
            fitting = [
                index for index, tokens in enumerate(pool) if len(tokens) <= length - len(sequence)
            ]
            sequence += take(max(fitting, key=lambda index: len(pool[index]), default=0))[
                : length - len(sequence)
            ]
        length = yield length, sequence


def optimizers(model: Any, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embeddings and (without weight decay) the
    norms.

    Muon's updates are scaled to the root mean square of AdamW's (Liu et al. 2025, arXiv
    2502.16982): one learning rate for both.
    """
    matrices = [parameter for parameter in model.model.layers.parameters() if parameter.dim() == 2]
    norms = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [
        {"params": [model.get_input_embeddings().weight], "weight_decay": 0.1},
        {"params": norms, "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=True)
    return [
        torch.optim.Muon(
            matrices, lr=learning_rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
        ),
        adamw,
    ]


def learning_rate_factor(step: int, spent: float) -> float:
    """Warmup-stable-decay schedule (Hu et al. 2024, arXiv 2404.06395), from 0 to 1; `spent` is the
    spent share of the budget."""
    return min(1.0, (step + 1) / WARM_UP_STEPS, max(0.0, (1 - spent) / DECAY_SHARE))


def model_config(recipe: Recipe, tokenizer: Any) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=CONTEXT_LENGTH,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.hidden_size * 11 // 4,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def train(recipe: Recipe, folder: Path, seed: int = 0) -> float:
    """Trains a model with the tokenizer in `folder` and saves it there, in bfloat16. Returns the
    last loss, in nats per token."""
    torch.manual_seed(seed)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = LlamaForCausalLM(model_config(recipe, tokenizer)).train()
    chosen = optimizers(model, recipe.learning_rate)
    stream = sequences(tokenizer, seed)
    next(stream)
    start = time.monotonic()
    step = 0
    spent = 0.0
    loss = torch.zeros(())
    while spent < 1:
        for optimizer in chosen:
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate * learning_rate_factor(step, spent)
        count = recipe.batch_size
        length = recipe.length
        if (
            spent >= 1 - DECAY_SHARE
            and step % LONG_BATCH_EVERY == 0
            and count * length >= CONTEXT_LENGTH
        ):
            count = count * length // CONTEXT_LENGTH
            length = CONTEXT_LENGTH
        batch = torch.tensor([stream.send(length + 1)[1] for _ in range(count)])  # type: ignore[attr-defined]
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in chosen:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        spent = (
            step / recipe.steps
            if recipe.steps
            else (time.monotonic() - start) / (60 * recipe.minutes)
        )
        if step % 50 == 0:
            print(
                f"step {step}  {min(spent, 1):.0%} of the budget  loss {loss.item():.3f}",
                file=sys.stderr,
                flush=True,
            )
    model.to(torch.bfloat16).save_pretrained(folder)
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["tokenizer", *demo.ROLES])
    parser.add_argument("out", type=Path, help="folder of the pair; target/ and draft/ are in it")
    options = parser.parse_args()
    if options.what == "tokenizer":
        train_tokenizer(options.out)
    else:
        train(BUNDLED[options.what], options.out / options.what)


if __name__ == "__main__":
    main()
