"""The owner of the student's weights, optimizer and schedule: taught rollouts in, one or more updates, metrics out."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import get_scheduler

from opd.errors import UserError
from opd.kernels import OutputHead
from opd.models import context_limit, decoder, last_states, output_head
from opd.objective.baseline import with_baselines
from opd.objective.batching import MicroBatch, Taught, empty_batch, micro_batches, num_trainable
from opd.objective.config import ObjectiveConfig, OptimizerConfig
from opd.objective.head_loss import LossSpec, RowSums, head_loss, row_logps

BATCH_TOKENS = 16384
CPU_BATCH_TOKENS = 384  # enough for its matrix products; the activations of more only take memory
WIDTH_MULTIPLE = 32  # tokens: of shapes that recur, buffers and compiled products are used again

Metrics = dict[str, float]
Sums = defaultdict[str, RowSums]  # by domain, or all under ""


class StudentLoss(nn.Module):
    """The student and its loss in one forward, so that DDP and FSDP see every use of the weights."""

    def __init__(self, model: nn.Module, precision: torch.dtype) -> None:
        super().__init__()
        self.model, self.precision = model, precision
        self.max_width = context_limit(model.config.get_text_config())  # type: ignore[union-attr,operator]

    def forward(self, batch: MicroBatch, spec: LossSpec, logps_only: bool = False) -> Any:
        """(loss, sums for metrics), or each row's log-prob [N]."""
        low = self.precision == torch.bfloat16
        with torch.autocast(batch.input_ids.device.type, torch.bfloat16, enabled=low):
            states = last_states(decoder(self.model)(input_ids=self._widened(batch.input_ids), use_cache=False))
        hidden = states[:, : batch.input_ids.shape[1]].reshape(-1, states.shape[-1])[batch.rows]
        if low:
            hidden = hidden.to(torch.bfloat16)
        compute = row_logps if logps_only else head_loss
        return compute(hidden, output_head(self.model), batch, spec)

    def _widened(self, input_ids: Tensor) -> Tensor:
        """With more padding on the right, to a multiple of WIDTH_MULTIPLE where the model has so many positions."""
        width = input_ids.shape[1]
        return pad(input_ids, (0, max(0, min(-width % WIDTH_MULTIPLE, self.max_width - width))))


class Learner:
    """See the module."""

    def __init__(
        self,
        student: nn.Module,
        objective: ObjectiveConfig,
        optimizer: OptimizerConfig,
        *,
        accelerator: Accelerator,
        num_steps: int,
        heads: Mapping[str, OutputHead],
        vocab: int,
        temperature: float,
        reference: nn.Module | Literal["adapters off"] | None = None,
        by_domain: bool = False,
        max_mismatch: float | None = None,
    ) -> None:
        """`reference`: the student's frozen start for terms that need it, a copy or the student without its adapters.
        `by_domain` measures the terms' figures of each domain of prompts, too: `NAME/DOMAIN`. `max_mismatch`: nats a token
        that the sampler's log-probs may differ by from the student's, where both are of the same weights."""
        self.accelerator, self.config, self.max_grad_norm = accelerator, objective, optimizer.max_grad_norm
        self.spec = LossSpec(heads, vocab, temperature, objective.max_logits_mib * 2**20)
        trained = [p for p in student.parameters() if p.requires_grad]
        precision = getattr(torch, objective.precision)
        self.loss, self.optimizer = accelerator.prepare(
            StudentLoss(student, precision),
            torch.optim.AdamW(
                trained, optimizer.lr, optimizer.betas, optimizer.eps, weight_decay=optimizer.weight_decay, fused=True
            ),
        )
        self.reference = reference
        if isinstance(reference, nn.Module):
            self.reference = StudentLoss(reference, precision).eval().requires_grad_(False)
        updates = num_steps * objective.updates_per_batch
        constant = optimizer.schedule == "constant"
        self.scheduler = get_scheduler(
            "constant_with_warmup" if constant else optimizer.schedule,
            self.optimizer.optimizer,
            math.ceil(optimizer.warmup_ratio * updates),
            updates,
        )
        default_tokens = CPU_BATCH_TOKENS if accelerator.device.type == "cpu" else BATCH_TOKENS
        self.batch_tokens = default_tokens if objective.micro_batch_tokens is None else objective.micro_batch_tokens
        self.by_domain, self.max_mismatch, self.nonfinite_in_a_row = by_domain, max_mismatch, 0

    @property
    def student(self) -> nn.Module:
        return self.accelerator.unwrap_model(self.loss).model

    def update(self, taught: Sequence[Taught]) -> Metrics:
        """One optimizer step for each part of the batch. Metrics are means over tokens of all parts and processes; of the
        gradient norms the largest.

        Raises `UserError` after `max_nonfinite_steps` steps in a row whose loss or gradient is not finite; such a step
        leaves the weights alone, and so does one without a trainable token.
        """
        self.loss.train()
        parts = list(self._parts(taught))
        if len(parts) > 1:  # what the ratio refers to: the policy before this batch moved it
            parts = [(tokens, [replace(b, old_logps=self._logps(b)) for b in batches]) for tokens, batches in parts]
        if self.reference is not None:
            parts = [(n, [replace(b, reference_logps=self._reference_logps(b)) for b in batches]) for n, batches in parts]
        parts = [(tokens, with_baselines(batches)) for tokens, batches in parts]
        sums: Sums = defaultdict(RowSums)
        results = [self._step(tokens, batches, sums) for tokens, batches in parts]
        total = max(1, sum(tokens for tokens, _ in parts))
        metrics = {
            "loss": sum(result["loss"] * tokens for result, (tokens, _) in zip(results, parts)) / total,
            "grad_norm": max(result["grad_norm"] for result in results),
            "lr": results[-1]["lr"],
            "empty_updates": float(sum(not tokens for tokens, _ in parts)),
            "nonfinite_updates": sum(result["nonfinite"] for result in results),
            **_means(sums),
        }
        self._watch(metrics)
        return metrics

    @torch.no_grad()
    def measure(self, taught: Sequence[Taught]) -> Metrics:
        """The terms' figures on these rollouts, means over tokens of all processes, without an update."""
        self.loss.eval()
        tokens, rollouts = (max(1, number) for number in num_trainable(taught))
        sums: Sums = defaultdict(RowSums)
        bare = self.accelerator.unwrap_model(self.loss)  # processes may have unequal numbers of batches
        for batch in self._batches(taught, "token_mean", tokens, rollouts):
            sums[batch.domain].merge(bare(batch, self.spec)[1])
        return _means(sums)

    def _parts(self, taught: Sequence[Taught]) -> Iterator[tuple[int, list[MicroBatch]]]:
        """(trainable tokens over all processes, this process's micro-batches) of each update."""
        count = self.config.updates_per_batch
        for part in range(count):
            mine = taught[part * len(taught) // count : (part + 1) * len(taught) // count]
            tokens, rollouts = (self._total(number) for number in num_trainable(mine))
            batches = self._batches(mine, self.config.normalizer, tokens, rollouts)
            most = max(gather_object([len(batches)]))
            yield tokens, batches + [empty_batch(self.accelerator.device)] * (most - len(batches))

    def _batches(self, taught: Sequence[Taught], normalizer: str, tokens: int, rollouts: int) -> list[MicroBatch]:
        device = self.accelerator.device
        return micro_batches(taught, self.batch_tokens, normalizer, tokens, rollouts, device, self.by_domain)

    def _logps(self, batch: MicroBatch) -> Tensor:
        self.loss.eval()  # dropout would add noise to the ratio
        with torch.no_grad():
            logps = self.loss(batch, self.spec, logps_only=True)
        self.loss.train()
        return logps

    def _reference_logps(self, batch: MicroBatch) -> Tensor:
        if isinstance(self.reference, nn.Module):
            with torch.no_grad():
                return self.reference(batch, self.spec, logps_only=True)
        with self.student.disable_adapter():  # type: ignore[operator]
            return self._logps(batch)

    def _step(self, tokens: int, batches: Sequence[MicroBatch], sums: Sums) -> Metrics:
        """Forward, backward and update of one part."""
        lr = self._lr()
        if not tokens:
            return {"loss": 0.0, "grad_norm": 0.0, "lr": lr, "nonfinite": 0.0}
        total = torch.zeros((), device=self.accelerator.device)
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            with nullcontext() if last else self.accelerator.no_sync(self.loss):
                loss, figures = self.loss(batch, self.spec)
                # DDP averages the processes' gradients; the normaliser already counts the tokens of all of them
                self.accelerator.backward(loss * self.accelerator.num_processes)
            total += loss.detach()
            sums[batch.domain].merge(figures)
        norm = float(self.accelerator.clip_grad_norm_(self.loss.parameters(), self.max_grad_norm or math.inf))  # type: ignore[arg-type]
        loss = sum(gather_object([float(total)]))
        finite = math.isfinite(loss) and math.isfinite(norm)
        if finite:
            self.optimizer.step()
            self.scheduler.step()
        self.optimizer.zero_grad()
        return {"loss": loss, "grad_norm": norm, "lr": lr, "nonfinite": float(not finite)}

    def _watch(self, metrics: Metrics) -> None:
        self.nonfinite_in_a_row = self.nonfinite_in_a_row + 1 if metrics["nonfinite_updates"] else 0
        if self.nonfinite_in_a_row >= self.config.max_nonfinite_steps:
            raise UserError(
                f"optimizer.lr: the loss or its gradient was not finite in {self.nonfinite_in_a_row} steps in a row; "
                "lower the rate and resume from the last checkpoint"
            )

        if self.max_mismatch is not None and metrics.get("mismatch", 0.0) > self.max_mismatch:
            raise UserError(
                f"sampler.max_mismatch: the servers' log-probs of the step's tokens differ from the student's by "
                f"{metrics['mismatch']:.3f} nats on average, more than {self.max_mismatch:g}: they do not sample from the "
                "weights that were sent; restart them and resume with --resume, or raise the bound"
            )

    def _lr(self) -> float:
        return float(self.scheduler.get_last_lr()[0])

    def _total(self, number: int) -> int:
        return sum(gather_object([number]))

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beside weights and moments."""
        return {"scheduler": self.scheduler.state_dict(), "nonfinite_in_a_row": self.nonfinite_in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.nonfinite_in_a_row = state["nonfinite_in_a_row"]
        self.scheduler.load_state_dict(state["scheduler"])
        for group, rate in zip(self.optimizer.param_groups, self.scheduler.get_last_lr()):
            group["lr"] = rate


def _means(sums: Sums) -> Metrics:
    """The mean of each figure over the rows of all processes, and of each domain where these were told apart."""
    parts = gather_object([dict(sums)])
    metrics = RowSums.means([one for part in parts for one in part.values()])
    for domain in sorted({name for part in parts for name in part if name}):
        means = RowSums.means([part[domain] for part in parts if domain in part])
        metrics |= {f"{name}/{domain}": mean for name, mean in means.items()}
    return metrics
