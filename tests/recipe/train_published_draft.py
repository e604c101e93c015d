r"""How the draft of the published model was made (`tests/data`): a few of the model's layers,
joined by least squares, with its embedding and its LM head, distilled on its own text.

    python tests/recipe/train_published_draft.py text OUT --minutes 60    # again: more text
    python tests/recipe/train_published_draft.py train OUT --minutes 90   # again: goes on
    python tests/recipe/train_published_draft.py write OUT FILE

Each takes a single thread (OMP_NUM_THREADS=1); a CPU with AMX is many times as fast as others.
While `train` runs, `text` may run beside it. `train` prints the agreement with the greedy answers
to held-out prompts, and what share of the tokens that it drafts in threes is accepted.

The file in `tests/data` read 1.5 million tokens, of 0.6 million of text: 42 % agree with the
held-out answers and 21 % are accepted. Text is what limits: on its own, 56 % agree.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the customary name
from published_prompts import held_out_prompts
from published_target import (
    DOWN,
    END,
    OUT,
    TENSORS,
    VOCABULARY,
    WIDTH,
    CachedTarget,
    Layer,
    Target,
    attention,
    likeliest,
    linear,
    mlp,
    normed,
    run_layer,
    target_folder,
)
from published_text import SYSTEM, TO_ANSWER, Kind, TaughtText, load, save, write_text
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer

LAYERS = (0, 1, 28, 29)  # of the target's 30
FIT_TOKENS = 20_000  # for the least squares
RIDGE = 1e-3  # times the mean of the diagonal
SKIPPED = (
    20  # first tokens of a text, all in the system's message, whose states are of another size
)
LEARNING_RATE = 1e-3
WARM_UP_STEPS = 20
DECAY_SHARE = 0.3  # of the budget
PIECE_TOKENS = 3072  # of padded texts, whose gradients are computed at once
PIECES = 2  # of a step
FREQUENT = 4096  # tokens whose probabilities the loss compares in every step
RARE = 512  # others that are drawn in each step
QUESTION_WEIGHT = 0.5  # of a token of the model's own question, an answer's counts 1
LOSS_ROWS = 256
SAVED_EVERY = 240.0  # seconds
MEASURED_EVERY = 100_000  # tokens
DRAFTED = 3
HELD_OUT_TOKENS = 160
LARGEST = 127  # of a stored whole number


@dataclass(frozen=True, slots=True)
class Batch:
    """Texts of different lengths, one a row. `ids` [texts, tokens]; `hidden` [texts, tokens, width]
    are the target's final states; `weights` [texts, tokens] are those of the tokens that follow."""

    ids: Tensor
    hidden: Tensor
    weights: Tensor


def batch_of(texts: Sequence[TaughtText]) -> Batch:
    length = max(len(text.ids) for text in texts) - 1
    ids = torch.zeros(len(texts), length, dtype=torch.long)
    hidden = torch.zeros(len(texts), length, WIDTH, dtype=torch.bfloat16)
    weights = torch.zeros(len(texts), length)
    for row, text in enumerate(texts):
        own = len(text.ids) - 1
        ids[row, :own] = torch.from_numpy(text.ids[:own].astype(np.int64))
        hidden[row, :own] = torch.from_numpy(np.array(text.hidden[:own])).view(torch.bfloat16)
        kinds = torch.from_numpy(text.kinds[1:])
        weights[row, :own] = (kinds == Kind.ANSWER) + QUESTION_WEIGHT * (kinds == Kind.QUESTION)
    return Batch(ids, hidden, weights)


class Texts:
    """The texts in a folder, also those that are written there later."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: set[str] = set()
        self._waiting: list[list[TaughtText]] = []
        self.all: list[TaughtText] = []
        self.refresh()

    def refresh(self) -> None:
        for path in sorted(self._folder.glob("*.npz")):
            if path.stem not in self._read and ".unfinished" not in path.name:
                self._read.add(path.stem)
                self.all += load(path.with_suffix(""))

    def frequent(self, count: int) -> Tensor:
        counts = np.bincount(np.concatenate([text.ids for text in self.all]), minlength=VOCABULARY)
        return torch.from_numpy(np.argsort(-counts, kind="stable")[:count].copy())

    def next_batch(self, random: Random) -> Batch:
        """Returns some texts of similar lengths. All are read before the first is read again."""
        if not self._waiting:
            texts = random.sample(self.all, len(self.all))
            for first in range(0, len(texts), 64):
                self._waiting += _pieces(texts[first : first + 64])
            random.shuffle(self._waiting)
        return batch_of(self._waiting.pop())


def _pieces(texts: Sequence[TaughtText]) -> Iterator[list[TaughtText]]:
    piece: list[TaughtText] = []
    for text in sorted(texts, key=lambda text: len(text.ids)):
        if piece and (len(piece) + 1) * len(text.ids) > PIECE_TOKENS:
            yield piece
            piece = []
        piece.append(text)
    yield piece


class Divergence(torch.autograd.Function):
    """The cross-entropy of the draft's distribution over some tokens with the target's, summed over
    rows, and how often both have the same likeliest token: `apply(draft, target, weights, tokens)`
    with final states [rows, width], weights [rows] and embeddings of the tokens [tokens, width].

    The gradient with respect to the draft's states is computed at once, a few rows at a time, so
    that the logits of all rows are never in memory.
    """

    @staticmethod
    def forward(
        ctx: Any, draft: Tensor, target: Tensor, weights: Tensor, tokens: Tensor
    ) -> tuple[Tensor, Tensor]:
        gradient = torch.empty_like(draft)
        loss = torch.zeros(())
        same = torch.zeros(())
        for first in range(0, len(draft), LOSS_ROWS):
            rows = slice(first, first + LOSS_ROWS)
            ours = F.linear(draft[rows], tokens).float()
            theirs = F.linear(target[rows], tokens).float()
            same += ((ours.argmax(dim=-1) == theirs.argmax(dim=-1)) * weights[rows]).sum()
            log_probs = ours.log_softmax(dim=-1)
            probs = theirs.softmax(dim=-1)
            loss -= ((probs * log_probs).sum(dim=-1) * weights[rows]).sum()
            difference = (log_probs.exp_() - probs) * weights[rows, None]
            gradient[rows] = difference.bfloat16() @ tokens
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(same)
        return loss, same

    @staticmethod
    def backward(ctx: Any, of_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * of_loss.to(gradient.dtype), None, None, None


class Draft:
    """The draft: its `layers` and final `norm`, float32."""

    def __init__(self, target: Target, layers: Sequence[Layer], norm: Tensor) -> None:
        self._target = target
        self.layers = [
            {name: torch.nn.Parameter(layer[name].float()) for name in TENSORS} for layer in layers
        ]
        self.norm = torch.nn.Parameter(norm.clone().float())
        self._run_layer = torch.compile(run_layer, dynamic=True)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return [*(weight for layer in self.layers for weight in layer.values()), self.norm]

    def states(self, ids: Tensor) -> Tensor:
        """Returns the states after the final norm [texts, tokens, width], bfloat16."""
        hidden = self._target.embedding[ids].float()
        for layer in self.layers:
            hidden = self._run_layer(layer, hidden)
        return normed(hidden, self.norm)


@torch.no_grad()
def joined_layers(target: Target, texts: Sequence[TaughtText]) -> list[Layer]:
    """Returns the layers `LAYERS` of the target. Where others are left out after one of them, its
    down projection is the one whose output is nearest to the state that enters the next one."""
    fitted = []
    while sum(len(text.ids) for text in fitted) < FIT_TOKENS and len(fitted) < len(texts):
        fitted.append(texts[len(fitted)])
    ids = batch_of(fitted).ids
    chosen = torch.zeros(ids.shape, dtype=torch.bool)
    for row, text in enumerate(fitted):
        chosen[row, SKIPPED : len(text.ids) - 1] = True

    goals = dict(zip(LAYERS, (*LAYERS[1:], len(target.layers)), strict=True))
    states = {}
    hidden = target.embedding[ids].float()
    for index, layer in enumerate(target.layers, start=1):
        hidden = run_layer(layer, hidden)
        if index in goals.values():
            states[index] = hidden[chosen]

    joined = []
    hidden = target.embedding[ids].float()
    for index, goal in goals.items():
        layer = {name: weight.float() for name, weight in target.layers[index].items()}
        hidden = hidden + linear(attention(layer, hidden), layer, OUT).float()
        inner = mlp(layer, hidden)
        if goal != index + 1:
            missing = states[goal] - hidden[chosen] - linear(inner[chosen], layer, DOWN).float()
            layer[DOWN] += ridge_regression(inner[chosen].float(), missing).T
        hidden = hidden + linear(inner, layer, DOWN).float()
        joined.append(layer)
    return joined


def ridge_regression(inputs: Tensor, outputs: Tensor) -> Tensor:
    """Returns the map [inputs, outputs] of rows of `inputs` to rows of `outputs`."""
    products = inputs.T @ inputs
    products.diagonal().add_(RIDGE * products.diagonal().mean())
    return torch.linalg.solve(products, inputs.T @ outputs)


class Training:
    """The training in a folder: what is saved there goes on."""

    def __init__(self, out: Path) -> None:
        self._path = out / "training.pt"
        self._random = Random(0)
        self._target = Target()
        self._texts = Texts(out / "text")
        self._held_out = held_out_answers(self._target, out / "held-out")
        self.seen = 0
        self.seconds = 0.0
        state = torch.load(self._path) if self._path.exists() else None
        if state is None:
            layers, norm = joined_layers(self._target, self._texts.all), self._target.norm
        else:
            layers, norm = state["layers"], state["norm"]
            self.seen, self.seconds = state["seen"], state["seconds"]
        self.draft = Draft(self._target, layers, norm)
        parameters = self.draft.parameters
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                [weight for weight in parameters if weight.dim() == 2],
                lr=LEARNING_RATE,
                weight_decay=0.0,
                adjust_lr_fn="match_rms_adamw",
            ),
            torch.optim.AdamW(
                [weight for weight in parameters if weight.dim() == 1],
                lr=LEARNING_RATE,
                betas=(0.9, 0.95),
                weight_decay=0.0,
            ),
        ]
        if state is not None and state["optimizers"] is not None:
            for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)

    def run(self, minutes: float) -> None:
        """Trains until `minutes` are spent, those of earlier calls included."""
        print(f"after {self.seen} tokens: {self.measured()}", flush=True)
        frequent, others = self._vocabulary()
        saved_at = measured_at = self.seen
        last_saved = begin = time.monotonic() - self.seconds
        last_saved = time.monotonic()
        step = 0
        while (spent := (time.monotonic() - begin) / (60 * minutes)) < 1:
            rare = others[torch.randint(len(others), (RARE,))]
            loss, same = self._step(torch.cat([frequent, rare]), step, spent)
            step += 1
            self.seconds = time.monotonic() - begin
            if step % 10 == 0:
                print(
                    f"{spent:.0%}  {self.seen} tokens  loss {loss:.3f}  agreement {same:.3f}",
                    flush=True,
                )
            if time.monotonic() - last_saved > SAVED_EVERY:
                self.save()
                last_saved = time.monotonic()
            if self.seen - measured_at > MEASURED_EVERY:
                measured_at = self.seen
                print(f"after {self.seen} tokens: {self.measured()}", flush=True)
                self._texts.refresh()
                frequent, others = self._vocabulary()
        if self.seen > saved_at:
            self.save()
        print(f"after {self.seen} tokens: {self.measured()}", flush=True)

    def _vocabulary(self) -> tuple[Tensor, Tensor]:
        """Returns the tokens that are frequent in the texts, and all others."""
        frequent = self._texts.frequent(FREQUENT)
        is_other = torch.ones(VOCABULARY, dtype=torch.bool)
        is_other[frequent] = False
        return frequent, is_other.nonzero()[:, 0]

    def _step(self, tokens: Tensor, step: int, spent: float) -> tuple[float, float]:
        """Returns the mean loss and the share of tokens for which both have the same likeliest
        one."""
        rate = LEARNING_RATE * min(1.0, (step + 1) / WARM_UP_STEPS, (1 - spent) / DECAY_SHARE)
        embeddings = self._target.embedding[tokens]
        losses, agreements = 0.0, 0.0
        for _ in range(PIECES):
            batch = self._texts.next_batch(self._random)
            counted = batch.weights > 0
            weights = batch.weights[counted] / batch.weights.sum()
            states = self.draft.states(batch.ids)[counted]
            loss, same = Divergence.apply(states, batch.hidden[counted], weights, embeddings)
            (loss / PIECES).backward()
            losses += loss.item() / PIECES
            agreements += same.item() / PIECES
            self.seen += int(counted.sum())
        torch.nn.utils.clip_grad_norm_(self.draft.parameters, 1.0)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return losses, agreements

    def save(self) -> None:
        state = {
            "layers": [
                {name: weight.detach() for name, weight in layer.items()}
                for layer in self.draft.layers
            ],
            "norm": self.draft.norm.detach(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "seen": self.seen,
            "seconds": self.seconds,
        }
        unfinished = self._path.with_suffix(".unfinished")
        torch.save(state, unfinished)
        unfinished.rename(self._path)

    @torch.no_grad()
    def measured(self) -> str:
        """Returns the agreement with the target's greedy answers to the held-out prompts, and the
        share of the drafted tokens that is accepted."""
        same = accepted = drafted = tokens = 0
        for text in self._held_out:
            batch = batch_of([text])
            answer = batch.weights[0] > 0
            logits = F.linear(self.draft.states(batch.ids)[0, answer], self._target.embedding)
            following = torch.from_numpy(text.ids[1:].astype(np.int64))[answer]
            right = (logits.argmax(dim=-1) == following).tolist()
            same += sum(right)
            tokens += len(right)
            position = 0
            while position < len(right):
                draft = right[position : position + DRAFTED]
                run = draft.index(False) if False in draft else len(draft)
                accepted += run
                drafted += len(draft)
                position += run + 1
        return f"agreement {same / tokens:.1%}, accepted {accepted / drafted:.1%}"


@torch.no_grad()
def held_out_answers(target: Target, stem: Path) -> list[TaughtText]:
    """Returns the target's greedy answers to the held-out prompts, which are kept at `stem`."""
    if stem.with_suffix(".npz").exists():
        return load(stem)
    tokenizer: Any = AutoTokenizer.from_pretrained(target_folder())
    prompts = [
        tokenizer.encode(SYSTEM + prompt + TO_ANSWER, add_special_tokens=False)
        for prompt in held_out_prompts()
    ]
    texts = [list(prompt) for prompt in prompts]
    model = CachedTarget(target, len(texts))

    def is_finished(text: list[int], prompt: list[int]) -> bool:
        own = len(text) - len(prompt)
        return own >= HELD_OUT_TOKENS or (own > 0 and text[-1] == END)

    position = 0
    states = []
    while not all(map(is_finished, texts, prompts)):
        ids = [text[position] if position < len(text) else END for text in texts]
        states.append(model.step(ids, [position] * len(texts)))
        best = likeliest(target, states[-1], 1)[0][:, 0].tolist()
        position += 1
        for text, prompt, token in zip(texts, prompts, best, strict=True):
            if len(text) == position and not is_finished(text, prompt):
                text.append(token)

    hidden = torch.stack([*states, torch.zeros_like(states[0])], dim=1)
    answers = [
        TaughtText(
            np.array(text, np.int32),
            np.array([Kind.GIVEN] * len(prompt) + [Kind.ANSWER] * (len(text) - len(prompt))),
            hidden[row, : len(text)].view(torch.int16).numpy(),
        )
        for row, (text, prompt) in enumerate(zip(texts, prompts, strict=True))
    ]
    save(stem, answers)
    return load(stem)


def write_draft(out: Path, path: Path) -> None:
    """Writes the trained tensors: matrices as whole numbers of 8 bits with a scale for each row,
    norms in bfloat16."""
    state = torch.load(out / "training.pt")
    tensors = {"model.norm.weight": state["norm"].bfloat16()}
    for index, layer in enumerate(state["layers"]):
        for name, weight in layer.items():
            full_name = f"model.layers.{index}.{name}.weight"
            if weight.dim() == 1:
                tensors[full_name] = weight.bfloat16()
                continue
            scales = weight.abs().amax(dim=1, keepdim=True) / LARGEST
            tensors[full_name] = (weight / scales).round().to(torch.int8)
            tensors[f"{full_name}.scales"] = scales
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["text", "train", "write"])
    parser.add_argument("out", type=Path, help="folder of the text and of the unfinished draft")
    parser.add_argument("file", type=Path, nargs="?", help="write: the file of the draft")
    parser.add_argument("--minutes", type=float, default=60)
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.manual_seed(0)
    if options.what == "text":
        write_text(options.out / "text", options.minutes)
    elif options.what == "train":
        Training(options.out).run(options.minutes)
    elif options.file is None:
        sys.exit("name the file to write")
    else:
        write_draft(options.out, options.file)


if __name__ == "__main__":
    main()
