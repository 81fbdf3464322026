"""The output head: from last hidden states to logits, and what the softmax is of.

Shape legend: c rows, H hidden size, R rows of the weight, V columns in use: rows beyond them are padding of the vocabulary.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from opd.kernels.shapes import Float


@dataclass(frozen=True)
class LogitForm:
    """The softmax is of scale * cap(logits), cap(x) = softcap * tanh(x / softcap) where there is a soft cap."""

    scale: float = 1.0  # the model's own factor over the temperature
    softcap: float | None = None

    def capped_(self, logits: Tensor) -> Tensor:
        """cap(logits), in place."""
        return logits if self.softcap is None else logits.div_(self.softcap).tanh_().mul_(self.softcap)

    def slope_(self, grad: Tensor, x: Tensor, row_max: Tensor) -> Tensor:
        """`grad` times the cap's derivative where scale * (cap(logits) - row_max) is `x`, which is overwritten."""
        if self.softcap is None:
            return grad
        tanh = x.mul_(1 / (self.scale * self.softcap)).add_(row_max / self.softcap)
        below = tanh.neg_().add_(1)  # (1 - t) (1 + t) keeps the digits that 1 - t^2 loses where the cap saturates
        grad.mul_(below)
        return grad.mul_(below.neg_().add_(2))


PLAIN = LogitForm()


@dataclass(frozen=True)
class OutputHead:
    """logits = scale * cap(hidden @ weight.T + bias), or the hidden states themselves where there is no weight."""

    weight: Tensor | None  # [R, H]
    scale: float = 1.0
    bias: Tensor | None = None  # [R]
    softcap: float | None = None
    width: int = 0  # R of a head without a weight

    @property
    def num_rows(self) -> int:
        """R, of which the first are in use."""
        return self.width if self.weight is None else len(self.weight)

    @property
    def hidden_size(self) -> int:
        """H: numbers of a token's state."""
        return self.width if self.weight is None else self.weight.shape[1]

    def to(self, target: torch.device | torch.dtype) -> "OutputHead":
        """With its tensors on a device or in a type."""
        weight, bias = (None if part is None else part.to(target) for part in (self.weight, self.bias))
        return replace(self, weight=weight, bias=bias)

    def form(self, temperature: float = 1.0) -> LogitForm:
        """Of softmax(logits / temperature) from what `raw` gives."""
        return LogitForm(self.scale / temperature, self.softcap)

    def raw(self, hidden: Float[Tensor, "c H"], vocab: int, out: Tensor | None = None) -> Float[Tensor, "c V"]:
        """The product with the first `vocab` rows, and the bias: neither capped nor scaled, in the type of the weight."""
        if self.weight is None:
            return hidden[:, :vocab] if out is None else out.copy_(hidden[:, :vocab])
        hidden, weight = hidden.to(self.weight.dtype), self.weight[:vocab].t()
        if self.bias is None:
            return torch.mm(hidden, weight, out=out)  # type: ignore[arg-type]
        return torch.addmm(self.bias[:vocab].to(hidden.dtype), hidden, weight, out=out)  # type: ignore[arg-type]

    def logits(self, hidden: Float[Tensor, "c H"], vocab: int) -> Float[Tensor, "c V"]:
        """The model's logits of the first `vocab` ids, fp32."""
        raw = self.raw(hidden, vocab).float()
        return (raw if self.softcap is None else LogitForm(softcap=self.softcap).capped_(raw.clone())) * self.scale
