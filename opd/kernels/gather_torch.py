"""Log-probs at given ids, entropy and normaliser of rows of logits, in torch: what the Triton kernels must give, and the
CPU's path.

Works on blocks of rows that stay in cache. Shape legend: c rows, V columns, M ids a row; q, x and z as in
`opd.kernels.partials`.
"""

import torch
from torch import Tensor

from opd.kernels.blocks import Scratch, exponentials, row_blocks, scaled_, store
from opd.kernels.head import LogitForm
from opd.kernels.partials import GatherPartials, RowStats
from opd.kernels.shapes import Bool, Float, Int


def partials(
    logits: Float[Tensor, "c V"], ids: Int[Tensor, "c M"], live: Bool[Tensor, " c"] | None, form: LogitForm
) -> GatherPartials:
    """One pass over the rows of which `live` is true. Ids of -1 are absent."""
    c, vocab = logits.shape
    if ids.numel() and int(ids.max()) >= vocab:
        raise ValueError(f"ids: below {vocab}, the columns in use, not {int(ids.max())}")
    scratch = Scratch(2, logits, vocab)
    row_max, z, entropy_sum = (torch.zeros(c, device=logits.device, dtype=scratch.dtype) for _ in range(3))
    at, factor = torch.zeros(ids.shape, device=logits.device, dtype=scratch.dtype), torch.ones_like(z)
    named = ids.clamp(min=0)
    for rows in row_blocks(c, vocab, logits.device, scratch.count, live):
        x, e = scratch(rows)
        form.capped_(x.copy_(logits[rows]))
        row_max[rows] = x.amax(-1)
        scaled_(x.sub_(row_max[rows, None]), form.scale)
        factor[rows], z[rows] = exponentials(x, e), e.sum(-1)
        at[rows] = x.gather(-1, named[rows])
        entropy_sum[rows] = x.mul_(e).sum(-1)
    return GatherPartials(row_max, z / factor, entropy_sum / factor, at.masked_fill_(ids < 0, 0.0))


def grad(
    logits: Float[Tensor, "c V"],
    ids: Int[Tensor, "c M"],
    stats: RowStats,
    grad_logp: Float[Tensor, "c M"],
    grad_entropy: Float[Tensor, " c"] | None,
    grad_lse: Float[Tensor, " c"] | None,
    form: LogitForm,
    add: Float[Tensor, "c V"] | None,
    out: Float[Tensor, "c V"],
) -> None:
    """Writes the gradient with respect to `logits`, plus `add` where given, to `out`, which may be either of the two.

    d logp_k / ds_j = scale * ([j = id_k] - q_j), d entropy / ds_j = -scale * q_j (log q_j + entropy),
    d lse / ds_j = scale * q_j. The gradients of an id that is named twice add up. Rows without any are not read.
    """
    c, vocab = logits.shape
    grad_logp = grad_logp.masked_fill(ids < 0, 0.0)
    live = (grad_logp != 0).any(-1)
    total = grad_logp.sum(-1)
    if grad_lse is not None:
        live, total = live | (grad_lse != 0), total - grad_lse
    if grad_entropy is not None:
        live = live | (grad_entropy != 0)
    scratch = Scratch(2 if grad_entropy is None else 3, logits, vocab)
    for rows in row_blocks(c, vocab, logits.device, scratch.count, live):
        x, g, *spare = scratch(rows)
        scaled_(form.capped_(x.copy_(logits[rows])).sub_(stats.max[rows, None]), form.scale)
        torch.sub(x, stats.log_z[rows, None], out=g)
        if grad_entropy is None:
            g.exp_().mul_(-total[rows, None])
        else:
            torch.exp(g, out=spare[0])
            g.add_(stats.entropy[rows, None]).mul_(-grad_entropy[rows, None]).sub_(total[rows, None]).mul_(spare[0])
        g.scatter_add_(-1, ids[rows].clamp(min=0), grad_logp[rows].to(g.dtype))
        form.slope_(g.mul_(form.scale), x, stats.max[rows, None])
        if add is not None:
            g.add_(add[rows])
        store(out, rows, g)
    if not live.all():
        dead = (~live).nonzero()[:, 0]
        out[dead] = 0.0 if add is None else add[dead].to(out.dtype)
