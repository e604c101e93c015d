"""Train a target or a draft on the corpus: a small Llama, saved in bfloat16 as a Hugging Face folder.

One loop for CPU and CUDA, in bfloat16 autocast over float32 weights. A budget in minutes gives what a machine can do in
that time; a budget in steps gives the same weights on the same machine every time, interrupted or not. A checkpoint
beside the folder carries an interrupted run, and goes once the weights are saved.
"""

from __future__ import annotations

import hashlib
import math
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows
from transformers import LlamaConfig, LlamaForCausalLM

from specgen.demo import ROLES
from specgen.demo.stream import TokenStream
from specgen.demo.tokenizer import CONTEXT_LENGTH, load_tokenizer
from specgen.errors import RunError, SpecgenError
from specgen.files import whole_file

WARMUP_STEPS = 100
HEAD_SIZE = 64


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama's size; without `heads`, one for every 64 of `hidden_size`. SpecgenError where sizes do not fit."""

    hidden_size: int
    layers: int
    heads: int = 0

    def __post_init__(self) -> None:
        if not self.heads:
            object.__setattr__(self, "heads", max(1, self.hidden_size // HEAD_SIZE))
        if min(self.hidden_size, self.layers, self.heads) < 1:
            raise SpecgenError(f"the shape is {self}", "Each size has to be at least 1")
        if self.hidden_size % (2 * self.heads):
            cure = "It has to divide into heads of an even size, for rotary positions turn pairs"
            raise SpecgenError(f"the hidden size {self.hidden_size} does not fit {self.heads} heads", cure)

    @property
    def intermediate_size(self) -> int:
        return self.hidden_size * 11 // 4


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that decides the weights, the corpus and the machine aside. Raises SpecgenError where a value makes no sense.

    The budget is `minutes` of training time or a number of optimizer `steps`, one of the two. A step takes `batch_size`
    windows of `window` tokens.
    """

    shape: Shape
    learning_rate: float
    minutes: float | None = None
    steps: int | None = None
    batch_size: int = 16
    window: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.minutes is None) == (self.steps is None):
            raise SpecgenError("the budget is not clear", "Give either minutes or steps")
        budget = self.minutes if self.steps is None else self.steps
        for name, value in (("budget", budget), ("learning rate", self.learning_rate), ("batch size", self.batch_size)):
            if value is None or not math.isfinite(value) or value <= 0:
                raise SpecgenError(f"the {name} is {value}", "It has to be above 0")
        if not 1 <= self.window <= CONTEXT_LENGTH:
            raise SpecgenError(f"the window is {self.window}", f"It has to lie between 1 and {CONTEXT_LENGTH} tokens")


BUNDLED = {
    "target": Recipe(Shape(hidden_size=256, layers=12), learning_rate=2e-3, minutes=85),
    "draft": Recipe(Shape(hidden_size=128, layers=2), learning_rate=3e-3, minutes=15),
}
"""What the bundled pair was trained with."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands: `share` of the budget spent (0 to 1), mean `loss` (nats per token) since the last report."""

    step: int
    tokens: int
    share: float
    loss: float
    tokens_per_second: float


def print_progress(progress: Progress) -> None:
    """One line on stderr."""
    line = (
        f"step {progress.step}  {progress.tokens / 1e6:.2f}M tokens  {progress.share:.0%} of the budget  "
        f"loss {progress.loss:.3f}  {progress.tokens_per_second:,.0f} tokens/s"
    )
    print(line, file=sys.stderr, flush=True)


def learning_rate_factor(step: int, share: float) -> float:
    """Linear warm-up over the first steps, times a cosine from 1 down to a tenth over the budget's share."""
    return min(1.0, (step + 1) / WARMUP_STEPS) * (0.1 + 0.45 * (1 + math.cos(math.pi * share)))


def pick_device(name: str = "auto") -> torch.device:
    """`cpu`, `cuda`, or with `auto` CUDA where there is one. Raises SpecgenError for a device that is not there."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise SpecgenError("there is no CUDA device here", "Take --device cpu")
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def train(
    role: str,
    recipe: Recipe,
    out: Path,
    *,
    device: str = "auto",
    report: Callable[[Progress], None] = print_progress,
    report_every: int = 50,
    checkpoint_every: int = 500,
) -> None:
    """Train `role` with the tokenizer in `out`/`role`, and save the weights there.

    Writes a checkpoint every `checkpoint_every` steps, and goes on from it where one of the same recipe is found.
    Raises SpecgenError for a missing tokenizer or another recipe's checkpoint, RunError where training fails.
    """
    if role not in ROLES:
        raise SpecgenError(f"the role is {role!r}", f"It has to be one of {', '.join(ROLES)}")
    folder, checkpoint = out / role, out / f"{role}.checkpoint.pt"
    run = _Run(recipe, load_tokenizer(folder), pick_device(device))
    settings = _settings(recipe, folder)
    if checkpoint.exists():
        run.restore(_read_checkpoint(checkpoint, settings))
        print(f"going on from step {run.step} ({checkpoint})", file=sys.stderr)
    try:
        _loop(run, report, report_every, checkpoint_every, lambda: _write_checkpoint(checkpoint, settings, run))
    except torch.OutOfMemoryError as error:
        raise RunError("the device ran out of memory", "Take a smaller batch size or shape") from error
    run.model.to(torch.bfloat16).save_pretrained(folder)
    checkpoint.unlink(missing_ok=True)


class _Run:
    """A model in training, and all that has to be kept to go on with it later."""

    def __init__(self, recipe: Recipe, tokenizer: Any, device: torch.device) -> None:
        torch.manual_seed(recipe.seed)
        self.recipe = recipe
        self.device = device
        self.model = LlamaForCausalLM(_config(recipe.shape, tokenizer)).to(device).train()
        self.optimizer = _optimizer(self.model, recipe.learning_rate)
        self.stream = TokenStream(tokenizer, recipe.seed, recipe.window)
        self.step = 0
        self.tokens = 0
        self.share = 0.0

    def advance(self) -> torch.Tensor:
        """One optimizer step. Returns its loss, left on the device: reading it would make the host wait."""
        recipe = self.recipe
        for group in self.optimizer.param_groups:
            group["lr"] = recipe.learning_rate * learning_rate_factor(self.step, self.share)
        windows = self.stream.batch(recipe.batch_size)
        if self.device.type == "cuda":  # only from pinned memory does a copy run beside the host
            windows = windows.pin_memory()
        windows = windows.to(self.device, non_blocking=True)
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            logits = self.model(input_ids=windows[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += recipe.batch_size * recipe.window
        return loss.detach()

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "stream": self.stream.state(),
            "step": self.step,
            "tokens": self.tokens,
            "share": self.share,
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state_all() if self.device.type == "cuda" else [],
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.stream.restore(state["stream"])
        self.step, self.tokens, self.share = state["step"], state["tokens"], state["share"]
        torch.set_rng_state(state["random"])
        if self.device.type == "cuda" and len(state["random_cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(state["random_cuda"])


def _loop(
    run: _Run,
    report: Callable[[Progress], None],
    report_every: int,
    checkpoint_every: int,
    save: Callable[[], None],
) -> None:
    recipe = run.recipe
    began, share_before, tokens_before = time.monotonic(), run.share, run.tokens
    losses, counted = torch.zeros((), device=run.device), 0
    while run.share < 1:
        losses += run.advance()
        counted += 1
        seconds = time.monotonic() - began
        if recipe.steps is not None:
            run.share = run.step / recipe.steps
        elif recipe.minutes is not None:
            run.share = share_before + seconds / (60 * recipe.minutes)
        if run.step % report_every == 0 or run.share >= 1:
            loss = losses.item() / counted
            if not math.isfinite(loss):
                raise RunError(f"the loss is {loss} at step {run.step}", "Take a smaller learning rate")
            # After the loss was read: only then is the work so far done, on CUDA too.
            rate = (run.tokens - tokens_before) / (time.monotonic() - began)
            report(Progress(run.step, run.tokens, min(run.share, 1.0), loss, rate))
            losses.zero_()
            counted = 0
        if run.step % checkpoint_every == 0:
            save()


def _config(shape: Shape, tokenizer: Any) -> Any:
    return LlamaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=CONTEXT_LENGTH,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        tie_word_embeddings=True,
        rope_theta=10_000.0,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _optimizer(model: torch.nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """AdamW; weight decay for matrices alone, for norms have no business at zero."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=True)


def _settings(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """What has to be the same for a run to go on: another tokenizer, another Python's code make another stream."""
    digest = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    return {**asdict(recipe), "tokenizer": digest, "python": platform.python_version()}


def _write_checkpoint(path: Path, settings: dict[str, Any], run: _Run) -> None:
    """Whole or not at all: written beside, then moved into place."""
    with whole_file(path) as file:
        torch.save({"settings": settings, "run": run.state()}, file)


def _read_checkpoint(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        run: dict[str, Any] = saved["run"]
        before: dict[str, Any] = saved["settings"]
    except Exception as error:  # zip, pickle and torch each have their own way to say it
        raise SpecgenError(f"the checkpoint {path} cannot be read", "Delete it to begin anew") from error
    changed = [name for name in settings if before.get(name) != settings[name]]
    if changed:
        what = ", ".join(f"{name}: {before.get(name)}, now {settings[name]}" for name in changed)
        raise SpecgenError(f"{path} is another run's ({what})", "Give the same options, or delete it to begin anew")
    return run
