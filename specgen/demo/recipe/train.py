"""Training of a demo model: a small Llama, saved as a Hugging Face folder with bfloat16 weights.

The same loop runs on CPU and CUDA. Weights are float32; Muon optimizes the matrices and AdamW everything else. Matrix products
use bfloat16 on CUDA, and the faster of bfloat16 and float32 on a CPU. With a budget in steps, two runs on the same machine give
the same weights, even if one of them was interrupted. With a budget in minutes, the number of steps depends on the machine.

There are two checkpoint files, next to the model's folder. ROLE.checkpoint.pt resumes an interrupted run. ROLE.stable.pt is the
state at the start of the learning rate's decay, from which the run can be continued with a larger budget.
"""

from __future__ import annotations

import hashlib
import math
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the customary name
from transformers import LlamaConfig, LlamaForCausalLM

from specgen.base.errors import RunError, SpecgenError, is_out_of_memory
from specgen.base.files import whole_file
from specgen.demo import ROLES
from specgen.demo.recipe.hyperparameters import CONTEXT_LENGTH, DECAY_SHARE, Recipe, Shape, learning_rate_factor
from specgen.demo.recipe.token_stream import TokenStream
from specgen.demo.recipe.tokenizer import load_tokenizer
from specgen.engine.devices import pick_device
from specgen.engine.transformers.quiet import quiet_transformers


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a training run. `loss` is the mean since the last report, in nats per token."""

    step: int
    tokens: int
    budget_spent: float  # a share from 0 to 1
    loss: float
    tokens_per_second: float


def print_progress(progress: Progress) -> None:
    """Print one line to stderr."""
    line = (
        f"step {progress.step}  {progress.tokens / 1e6:.2f}M tokens  {progress.budget_spent:.0%} of the budget  "
        f"loss {progress.loss:.3f}  {progress.tokens_per_second:,.0f} tokens/s"
    )
    print(line, file=sys.stderr, flush=True)


def pick_matmul_dtype(device: torch.device) -> torch.dtype:
    """The dtype for matrix products: bfloat16 on CUDA; on a CPU, where bfloat16 may be slow, the faster one in a short test."""
    if device.type == "cuda":
        return torch.bfloat16
    return min((torch.float32, torch.bfloat16), key=_matmul_seconds)


def _matmul_seconds(dtype: torch.dtype) -> float:
    a = torch.ones(512, 512, dtype=dtype)
    seconds = []
    for _ in range(4):  # the first one is a warmup
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
    """Train the model for `role` with the tokenizer in `out`/`role`, and save it to that folder.

    Starts from the interrupted run's checkpoint if there is one, else from the one at the start of the decay. `device` is cpu,
    cuda or auto (cuda if it is available). `report_every` and `checkpoint_every` are in steps. Raises SpecgenError if the
    tokenizer or the device is missing, the checkpoint is from a different recipe or the budget is already spent, and RunError if
    the loss is not finite or the memory is exhausted.
    """
    if role not in ROLES:
        raise SpecgenError(f"the role is {role!r}", f"It has to be one of {', '.join(ROLES)}")
    folder, checkpoint, stable = out / role, out / f"{role}.checkpoint.pt", out / f"{role}.stable.pt"
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    run = _TrainingRun(recipe, load_tokenizer(folder), pick_device(device))
    settings = _settings(recipe, folder)

    def save(path: Path) -> None:
        with whole_file(path) as file:
            torch.save({"settings": settings, "budget": _budget(recipe), "run": run.state()}, file)

    for path in (checkpoint, stable):
        if path.exists():
            run.restore(_read_checkpoint(path, settings, _budget(recipe)))
            print(f"resuming from step {run.step} ({path})", file=sys.stderr)
            break
    if run.budget_spent >= 1:
        raise SpecgenError(f"the budget is already spent: {run.step} steps are done", "Give a larger budget to continue the run")
    try:
        _training_loop(run, report, report_every, checkpoint_every, partial(save, checkpoint), partial(save, stable))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise RunError("the device ran out of memory", "Use a smaller batch size or model") from error
    with quiet_transformers():
        run.model.to(torch.bfloat16).save_pretrained(folder)
    checkpoint.unlink(missing_ok=True)


class _TrainingRun:
    """A model in training, with everything that has to be saved to resume it."""

    def __init__(self, recipe: Recipe, tokenizer: Any, device: torch.device) -> None:
        torch.manual_seed(recipe.seed)
        self.recipe = recipe
        self.device = device
        self.matmul_dtype = pick_matmul_dtype(device)
        self.model = LlamaForCausalLM(model_config(recipe.shape, tokenizer)).to(device).train()
        self.optimizers = _optimizers(self.model, recipe.learning_rate)
        self.stream = TokenStream(tokenizer, recipe.seed)
        self.step = 0
        self.tokens = 0
        self.seconds = 0.0
        self.decaying = False

    @property
    def budget_spent(self) -> float:
        """The share of the budget that is spent."""
        if self.recipe.steps is not None:
            return self.step / self.recipe.steps
        assert self.recipe.minutes is not None
        return self.seconds / (60 * self.recipe.minutes)

    def advance(self) -> torch.Tensor:
        """Do one optimizer step. Returns the loss as a tensor on the device, so that the host need not wait for it."""
        recipe = self.recipe
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate * learning_rate_factor(self.step, self.budget_spent)
        batch = self.stream.batch(*recipe.batch_shape(self.step, decaying=self.decaying))
        self.tokens += batch[:, 1:].numel()
        if self.device.type == "cuda":
            batch = batch.pin_memory()  # needed for an asynchronous copy
        batch = batch.to(self.device, non_blocking=True)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.matmul_dtype == torch.bfloat16):
            logits = self.model(input_ids=batch[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
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
            "decaying": self.decaying,
            "bfloat16": self.matmul_dtype == torch.bfloat16,
            "rng": torch.get_rng_state(),
            "cuda_rngs": torch.cuda.get_rng_state_all() if self.device.type == "cuda" else [],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what state() returned."""
        self.model.load_state_dict(state["model"])
        self.matmul_dtype = torch.bfloat16 if state["bfloat16"] else torch.float32
        for optimizer, optimizer_state in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(optimizer_state)
        self.stream.restore(state["stream"])
        self.step, self.tokens = state["step"], state["tokens"]
        self.seconds, self.decaying = state["seconds"], state["decaying"]
        torch.set_rng_state(state["rng"])
        if self.device.type == "cuda" and len(state["cuda_rngs"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(state["cuda_rngs"])


def _training_loop(
    run: _TrainingRun,
    report: Callable[[Progress], None],
    report_every: int,
    checkpoint_every: int,
    save_checkpoint: Callable[[], None],
    save_stable: Callable[[], None],
) -> None:
    """Train until the budget is spent."""
    seconds_before, tokens_before = run.seconds, run.tokens
    loss_sum, steps = torch.zeros((), device=run.device), 0
    while run.budget_spent < 1:
        if run.budget_spent >= 1 - DECAY_SHARE and not run.decaying:
            save_stable()
            run.decaying = True
        start = time.monotonic()
        loss_sum += run.advance()
        steps += 1
        run.seconds += time.monotonic() - start
        if run.step % report_every == 0 or run.step % checkpoint_every == 0 or run.budget_spent >= 1:
            start = time.monotonic()
            loss = loss_sum.item() / steps
            run.seconds += time.monotonic() - start  # on CUDA, item() waits until the steps are done
            if not math.isfinite(loss):
                raise RunError(f"the loss is {loss} at step {run.step}", "Use a smaller learning rate")
            rate = (run.tokens - tokens_before) / (run.seconds - seconds_before)
            report(Progress(run.step, run.tokens, min(run.budget_spent, 1.0), loss, rate))
            loss_sum.zero_()
            steps = 0
        if run.step % checkpoint_every == 0:
            save_checkpoint()


def model_config(shape: Shape, tokenizer: Any) -> Any:
    """The transformers configuration of a model of this shape."""
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


def _optimizers(model: Any, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embeddings and (without weight decay) the norms.

    Muon's updates are scaled to the root mean square of AdamW's (Liu et al. 2025, arXiv 2502.16982), so that one learning rate
    suits both. torch's Muon always computes in bfloat16, which is slow on a CPU without AVX-512: a step of the bundled target
    takes three times as long there as with float32.
    """
    matrices = [parameter for parameter in model.model.layers.parameters() if parameter.dim() == 2]
    norms = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    embeddings = {"params": [model.get_input_embeddings().weight], "weight_decay": 0.1}
    groups = [embeddings, {"params": norms, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=True)
    return [torch.optim.Muon(matrices, lr=learning_rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"), adamw]


def _settings(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Returns the settings that must be the same to resume a run: the recipe without its budget, tokenizer and Python version."""
    digest = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    fixed = {name: value for name, value in asdict(recipe).items() if name not in ("minutes", "steps")}
    return {**fixed, "tokenizer": digest, "python": platform.python_version()}


def _budget(recipe: Recipe) -> str:
    return f"{recipe.minutes} minutes" if recipe.steps is None else f"{recipe.steps} steps"


def _read_checkpoint(path: Path, settings: dict[str, Any], budget: str) -> dict[str, Any]:
    """Reads the state of a training run from a checkpoint file.

    Raises SpecgenError if the file is unreadable or was written with other settings. The budget may differ from the checkpoint's
    only if the decay of the learning rate had not begun.
    """
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        run: dict[str, Any] = saved["run"]
        before: dict[str, Any] = {**saved["settings"], "budget": saved["budget"]}
        now = settings | {"budget": budget if run["decaying"] else before["budget"]}
    except Exception as error:  # zip, pickle and torch raise different types
        raise SpecgenError(f"the checkpoint {path} cannot be read", "Delete it to start again") from error
    changed = [name for name in now if before.get(name) != now[name]]
    if changed:
        what = ", ".join(f"{name}: {before.get(name)}, now {now[name]}" for name in changed)
        raise SpecgenError(f"the checkpoint {path} is from a different run ({what})", "Use the same options, or delete it")
    return run
