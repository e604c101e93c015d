"""Train a target or a draft on the corpus: a small Llama, saved in bfloat16 as a Hugging Face folder.

One loop for CPU and CUDA: Muon for the matrices and AdamW for the rest, over float32 weights, with products in bfloat16 on
CUDA and on a CPU in what is faster there. A budget in minutes gives what a machine can do in that time; a budget in steps
gives the same weights on the same machine every time, interrupted or not. A checkpoint beside the folder carries an
interrupted run. One more is kept from where the learning rate began to fall: with a larger budget training goes on from there.
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
from specgen.demo.recipe.hyperparameters import DECAY, Recipe, Shape, learning_rate_factor
from specgen.demo.recipe.muon import Muon
from specgen.demo.recipe.token_stream import TokenStream
from specgen.demo.recipe.tokenizer import CONTEXT_LENGTH, load_tokenizer
from specgen.errors import RunError, SpecgenError, is_out_of_memory
from specgen.files import whole_file
from specgen.models.load import quiet_transformers

_ASLEEP = 5.0  # times as long as steps usually take: the process was stopped, or the machine asleep


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


def pick_device(name: str = "auto") -> torch.device:
    """`cpu`, `cuda`, or with `auto` CUDA where there is one. Raises SpecgenError for a device that is not there."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise SpecgenError("there is no CUDA device here", "Take --device cpu")
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def pick_products(device: torch.device) -> torch.dtype:
    """The dtype that products are fast in: bfloat16 on CUDA. On a CPU it can be four times slower: both are tried."""
    if device.type == "cuda":
        return torch.bfloat16
    return min((torch.float32, torch.bfloat16), key=_product_seconds)


def _product_seconds(dtype: torch.dtype) -> float:
    a = torch.ones(512, 512, dtype=dtype)
    seconds = []
    for _ in range(4):  # the first one sets things up
        start = time.perf_counter()
        a @ a
        seconds.append(time.perf_counter() - start)
    return min(seconds)


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

    Writes a checkpoint every `checkpoint_every` steps, and goes on from it where one of the same recipe is found; else from
    the end of the stable phase of a run with a smaller budget. Raises SpecgenError for a missing tokenizer or another recipe's
    checkpoint, RunError where training fails.
    """
    if role not in ROLES:
        raise SpecgenError(f"the role is {role!r}", f"It has to be one of {', '.join(ROLES)}")
    folder, checkpoint, stable = out / role, out / f"{role}.checkpoint.pt", out / f"{role}.stable.pt"
    run = _Run(recipe, load_tokenizer(folder), pick_device(device))
    settings = _settings(recipe, folder)

    def save(path: Path) -> None:
        with whole_file(path) as file:
            torch.save({"settings": settings, "budget": _budget(recipe), "run": run.state()}, file)

    for path in (checkpoint, stable):
        if path.exists():
            run.restore(_read_checkpoint(path, settings, _budget(recipe)))
            print(f"going on from step {run.step} ({path})", file=sys.stderr)
            break
    if run.share >= 1:
        raise SpecgenError(f"the budget is spent: {run.step} steps are done", "Give a larger one to prolong the run")
    try:
        _loop(run, report, report_every, checkpoint_every, lambda falling: save(stable if falling else checkpoint))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise RunError("the device ran out of memory", "Take a smaller batch size or shape") from error
    with quiet_transformers():
        run.model.to(torch.bfloat16).save_pretrained(folder)
    checkpoint.unlink(missing_ok=True)


class _Run:
    """A model in training, and all that has to be kept to go on with it later."""

    def __init__(self, recipe: Recipe, tokenizer: Any, device: torch.device) -> None:
        torch.manual_seed(recipe.seed)
        self.recipe = recipe
        self.device = device
        self.products = pick_products(device)
        self.model = LlamaForCausalLM(_config(recipe.shape, tokenizer)).to(device).train()
        self.optimizers = _optimizers(self.model, recipe.learning_rate, self.products)
        self.stream = TokenStream(tokenizer, recipe.seed)
        self.step = 0
        self.tokens = 0
        self.seconds = 0.0
        self.falling = False
        self._usual: float | None = None  # seconds of a step

    @property
    def share(self) -> float:
        """How much of the budget is spent."""
        if self.recipe.steps is not None:
            return self.step / self.recipe.steps
        assert self.recipe.minutes is not None
        return self.seconds / (60 * self.recipe.minutes)

    def spend(self, seconds: float) -> None:
        """A step took so long; what is many times as long as usual was no training."""
        self._usual = seconds if self._usual is None else 0.9 * self._usual + 0.1 * min(seconds, _ASLEEP * self._usual)
        self.seconds += min(seconds, _ASLEEP * self._usual)

    def advance(self) -> torch.Tensor:
        """One optimizer step. Returns its loss, left on the device: reading it would make the host wait."""
        recipe = self.recipe
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate * learning_rate_factor(self.step, self.share)
        windows = self.stream.batch(*recipe.windows(self.step, falling=self.falling))
        self.tokens += windows[:, 1:].numel()
        if self.device.type == "cuda":  # only from pinned memory does a copy run beside the host
            windows = windows.pin_memory()
        windows = windows.to(self.device, non_blocking=True)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.products == torch.bfloat16):
            logits = self.model(input_ids=windows[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss.detach()

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "stream": self.stream.state(),
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "falling": self.falling,
            "narrow": self.products == torch.bfloat16,
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state_all() if self.device.type == "cuda" else [],
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.products = torch.bfloat16 if state["narrow"] else torch.float32
        self.optimizers = _optimizers(self.model, self.recipe.learning_rate, self.products)
        for optimizer, before in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(before)
        self.stream.restore(state["stream"])
        self.step, self.tokens, self.seconds, self.falling = (state[n] for n in ("step", "tokens", "seconds", "falling"))
        torch.set_rng_state(state["random"])
        if self.device.type == "cuda" and len(state["random_cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(state["random_cuda"])


def _loop(
    run: _Run,
    report: Callable[[Progress], None],
    report_every: int,
    checkpoint_every: int,
    save: Callable[[bool], None],
) -> None:
    """Train until the budget is spent. `save` is told whether it is the end of the stable phase that has to be kept."""
    began, tokens_before = run.seconds, run.tokens
    losses, counted = torch.zeros((), device=run.device), 0
    while run.share < 1:
        if run.share >= 1 - DECAY and not run.falling:
            save(True)
            run.falling = True
        start = time.monotonic()
        losses += run.advance()
        counted += 1
        run.spend(time.monotonic() - start)
        if run.step % report_every == 0 or run.step % checkpoint_every == 0 or run.share >= 1:
            start = time.monotonic()
            loss = losses.item() / counted
            # Only now is the work so far done, on CUDA too.
            run.seconds += time.monotonic() - start
            if not math.isfinite(loss):
                raise RunError(f"the loss is {loss} at step {run.step}", "Take a smaller learning rate")
            rate = (run.tokens - tokens_before) / (run.seconds - began)
            report(Progress(run.step, run.tokens, min(run.share, 1.0), loss, rate))
            losses.zero_()
            counted = 0
        if run.step % checkpoint_every == 0:
            save(False)


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


def _optimizers(model: Any, learning_rate: float, products: torch.dtype) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the rest; no weight decay for norms, which have no business at zero."""
    matrices = [parameter for parameter in model.model.layers.parameters() if parameter.dim() == 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    embeddings = {"params": [model.get_input_embeddings().weight], "weight_decay": 0.1}
    groups = [embeddings, {"params": vectors, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=True)
    return [Muon(matrices, learning_rate, products=products), adam]


def _settings(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """What has to be the same for a run to go on: another tokenizer, another Python's code make another stream."""
    digest = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    fixed = {name: value for name, value in asdict(recipe).items() if name not in ("minutes", "steps")}
    return {**fixed, "tokenizer": digest, "python": platform.python_version()}


def _budget(recipe: Recipe) -> str:
    return f"{recipe.minutes} minutes" if recipe.steps is None else f"{recipe.steps} steps"


def _read_checkpoint(path: Path, settings: dict[str, Any], budget: str) -> dict[str, Any]:
    """Before the learning rate falls any budget will do, behind that the same one alone."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        run: dict[str, Any] = saved["run"]
        before: dict[str, Any] = {**saved["settings"], "budget": saved["budget"]}
    except Exception as error:  # zip, pickle and torch each have their own way to say it
        raise SpecgenError(f"the checkpoint {path} cannot be read", "Delete it to begin anew") from error
    now = settings | {"budget": budget if run["falling"] else before["budget"]}
    changed = [name for name in now if before.get(name) != now[name]]
    if changed:
        what = ", ".join(f"{name}: {before.get(name)}, now {now[name]}" for name in changed)
        raise SpecgenError(f"{path} is another run's ({what})", "Give the same options, or delete it to begin anew")
    return run
