"""Log-probs, entropy, log-sum-exp and their gradients against float64 autograd.

The same tests run on the torch twin and, under TRITON_INTERPRET=1, on the Triton kernels (see test_interpreter.py).
"""

import jaxtyping
import pytest
import torch

from opd.kernels import blocks, gather_logprob
from opd.kernels.dispatch import on_triton
from opd.kernels.gather import gather_grad, gather_stats
from opd.kernels.head import PLAIN, LogitForm


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of a few rows, so that several of them meet even here."""
    monkeypatch.setattr(blocks, "CACHE_BYTES", 8 * 5000 * 4)
    monkeypatch.setattr(blocks, "MIN_ROWS", 1)


def logits_of(c: int, vocab: int, kind: str = "plain", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    logits = 3 * torch.randn(c, vocab, generator=torch.Generator().manual_seed(c * vocab))
    if kind == "peaked":
        logits[:, vocab // 2] += 50
    return (logits + {"high": 1e4, "low": -1e4}.get(kind, 0.0)).to(dtype)


def ids_of(c: int, vocab: int) -> torch.Tensor:
    """Both ends, an absent one, and a repeated one."""
    inner = torch.arange(c) % vocab
    return torch.stack(
        [torch.zeros_like(inner), torch.full_like(inner, vocab - 1), inner, torch.full_like(inner, -1), inner], dim=1
    )


def upstreams(c: int, m: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(shape, generator=generator) for shape in ((c, m), (c,), (c,)))  # type: ignore[return-value]


def exact(logits, ids, form=PLAIN, grads=None):
    """((log-probs, entropy, lse), gradient) in float64; `grads`: the upstream gradients, None where there is none."""
    logits = logits.detach().double().requires_grad_()
    scaled = logits if form.softcap is None else form.softcap * (logits / form.softcap).tanh()
    logp = (scaled * form.scale).log_softmax(-1)
    outputs = [
        logp.gather(-1, ids.clamp(min=0)).masked_fill(ids < 0, 0.0),
        -(logp.exp() * logp).sum(-1),
        (scaled * form.scale).logsumexp(-1),
    ]
    grads = grads or (torch.ones_like(outputs[0]), None, None)
    total = torch.stack([(out * grad.double()).sum() for out, grad in zip(outputs, grads) if grad is not None]).sum()
    (gradient,) = torch.autograd.grad(total, logits)
    return [out.detach() for out in outputs], gradient


def run(logits, ids, mask=None, grads=None, **options):
    """(outputs, gradient) of the public function."""
    logits = logits.detach().requires_grad_()
    outputs = gather_logprob(logits, ids, mask, **options)
    grads = grads or (torch.ones_like(outputs.logp), None, None)
    used = [(out, grad) for out, grad in zip(outputs, grads) if grad is not None]
    (gradient,) = torch.autograd.grad([out for out, _ in used], logits, [grad for _, grad in used])
    return [out.detach() for out in outputs], gradient


def check(logits, ids, form=PLAIN, grads=None, rounding=1.0):
    (logp, entropy, lse), gradient = run(logits, ids, grads=grads, form=form)
    (exact_logp, exact_entropy, exact_lse), exact_grad = exact(logits, ids, form, grads)
    torch.testing.assert_close(logp.double(), exact_logp, rtol=2e-7, atol=rounding * 2.5e-6)
    torch.testing.assert_close(entropy.double(), exact_entropy, rtol=1e-6, atol=rounding * 2e-6)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=2e-7, atol=rounding * 2.5e-6)
    size = sum(
        float(grad.abs().sum(-1).max()) if len(grad) else 0.0
        for grad in grads or [torch.ones(ids.shape)]
        if grad is not None
    )
    torch.testing.assert_close(gradient.double(), exact_grad, rtol=0, atol=rounding * 2e-6 * form.scale * size + 1e-9)


@pytest.mark.parametrize("vocab", [1, 2, 127, 1000, 4096, 5000])
@pytest.mark.parametrize("c", [0, 1, 5, 40])
def test_shapes(c, vocab):
    check(logits_of(c, vocab), ids_of(c, vocab), grads=upstreams(c))


@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 1), (0, 1, 2)])
@pytest.mark.parametrize("kind", ["plain", "peaked"])
def test_each_output_has_its_gradient(kind, which):
    grads = tuple(grad if i in which else None for i, grad in enumerate(upstreams(4)))
    check(logits_of(4, 300, kind), ids_of(4, 300), grads=grads)


@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0, 1 / 0.7])
@pytest.mark.parametrize("kind", ["plain", "peaked", "high", "low"])
def test_offsets_peaks_and_scales(kind, scale):
    check(logits_of(3, 1000, kind), ids_of(3, 1000), LogitForm(scale), upstreams(3), rounding=2.0)


def test_a_soft_cap():
    check(logits_of(5, 1000), ids_of(5, 1000), LogitForm(1 / 0.8, softcap=4.0), upstreams(5), rounding=2.0)


def test_a_temperature_divides_the_logits():
    logits, ids = logits_of(3, 50), ids_of(3, 50)
    torch.testing.assert_close(run(logits, ids, temperature=0.8), run(logits, ids, form=LogitForm(1 / 0.8)), rtol=0, atol=0)


@pytest.mark.parametrize("vocab", [1, 127, 1000, 4096, 5000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_rounds_only_where_it_is_written(dtype, vocab):
    logits, ids, grads = logits_of(7, vocab, dtype=dtype), ids_of(7, vocab), upstreams(7)
    (logp, _, _), gradient = run(logits, ids, grads=grads, temperature=0.5)
    (exact_logp, _, _), exact_grad = exact(logits, ids, LogitForm(2.0), grads)
    assert logp.dtype == torch.float32
    assert gradient.dtype == dtype
    torch.testing.assert_close(logp.double(), exact_logp, rtol=0, atol=2.5e-6)
    torch.testing.assert_close(gradient.double(), exact_grad, rtol=2**-7, atol=5e-6)


def test_padding_is_never_read_and_has_no_gradient():
    logits = logits_of(6, 300)
    logits[:, 200:] = torch.nan
    ids = ids_of(6, 200)
    outputs, gradient = run(logits, ids, grads=upstreams(6), vocab=200)
    cut, cut_gradient = run(logits[:, :200].contiguous(), ids, grads=upstreams(6))
    torch.testing.assert_close(outputs, cut, rtol=0, atol=0)
    assert torch.equal(gradient[:, :200], cut_gradient)
    assert not gradient[:, 200:].any()


def test_rows_of_any_stride():
    logits, ids = logits_of(6, 130), ids_of(6, 130)
    wide = torch.full((12, 3, 130), torch.nan)
    wide[::2, 1] = logits
    torch.testing.assert_close(run(wide[::2, 1], ids), run(logits, ids), rtol=0, atol=0)


def test_rows_outside_the_mask_are_not_read():
    logits, ids, grads = logits_of(5, 127), ids_of(5, 127), upstreams(5)
    mask = torch.tensor([True, False, True, False, True])
    alone, alone_gradient = run(logits[mask], ids[mask], grads=tuple(grad[mask] for grad in grads))
    logits[~mask] = torch.nan
    outputs, gradient = run(logits, ids, mask, grads=grads)
    torch.testing.assert_close([out[mask] for out in outputs], alone, rtol=0, atol=0)
    assert torch.equal(gradient[mask], alone_gradient)
    assert not any(out[~mask].any() for out in outputs)
    assert not gradient[~mask].any()
    outputs, gradient = run(logits, ids, torch.zeros(5, dtype=torch.bool), grads=grads)
    assert not any(out.any() for out in (*outputs, gradient))


def test_a_repeated_id_gets_both_gradients():
    logits = logits_of(4, 50)
    once, twice = torch.full((4, 1), 7), torch.full((4, 2), 7)
    torch.testing.assert_close(run(logits, twice)[1], 2 * run(logits, once)[1])


def test_more_ids_than_columns():
    generator = torch.Generator().manual_seed(3)
    logits, ids = logits_of(4, 50), torch.randint(-1, 50, (4, 200), generator=generator)
    check(logits, ids, LogitForm(0.5), upstreams(4, 200))


def test_the_gradients_of_an_id_add_up_before_they_are_rounded():
    """Two columns of bf16, of which the second is named many times."""
    logits, ids = logits_of(3, 2, dtype=torch.bfloat16), torch.ones(3, 100, dtype=torch.long)
    _, gradient = run(logits, ids)
    torch.testing.assert_close(gradient.double(), exact(logits, ids)[1], rtol=2**-7, atol=1e-4)


def test_absent_ids_give_nothing():
    logits, ids = logits_of(4, 50), torch.full((4, 3), -1)
    (logp, _, _), gradient = run(logits, ids, grads=(torch.full((4, 3), torch.nan), None, None))
    assert not logp.any()
    assert not gradient.any()


def test_no_ids_at_all():
    (logp, entropy, _), gradient = run(
        logits_of(4, 50), torch.zeros(4, 0, dtype=torch.long), grads=(None, torch.ones(4), None)
    )
    assert logp.shape == (4, 0)
    assert entropy.all()
    assert gradient.any()


@pytest.mark.parametrize("place", ["logits", "add"])
def test_another_gradient_is_added(place):
    logits, ids, (grad, _, _) = logits_of(40, 127), ids_of(40, 127), upstreams(40)
    grad[3] = 0.0  # this row of the logits is not read, and what is added stays
    added = torch.randn(40, 127, generator=torch.Generator().manual_seed(2))
    stats = gather_stats(logits, ids)
    alone, both = torch.empty(40, 127), {"logits": logits.clone(), "add": added.clone()}
    gather_grad(logits, ids, stats, grad, out=alone)
    gather_grad(both["logits"], ids, stats, grad, add=both["add"], out=both[place])
    torch.testing.assert_close(both[place], alone + added)


def test_the_gradient_may_take_the_logits_place():
    logits, ids, grads = logits_of(5, 127), ids_of(5, 127), upstreams(5)
    storage = logits.clone()
    _, gradient = run(storage, ids, grads=grads, inplace=True)
    assert gradient.data_ptr() == storage.data_ptr()
    assert torch.equal(gradient, run(logits, ids, grads=grads)[1])


def test_a_row_of_a_real_vocabulary():
    check_bf16 = logits_of(2, 151936, dtype=torch.bfloat16)
    ids = ids_of(2, 151936)
    (logp, entropy, _), gradient = run(check_bf16, ids)
    (exact_logp, exact_entropy, _), exact_grad = exact(check_bf16, ids)
    torch.testing.assert_close(logp.double(), exact_logp, rtol=0, atol=2.5e-6)
    torch.testing.assert_close(entropy.double(), exact_entropy, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(gradient.double(), exact_grad, rtol=2**-7, atol=1e-5)


def test_gradcheck_in_float64():
    logits, ids = logits_of(3, 9).double(), ids_of(3, 7)
    mask = torch.tensor([True, False, True])

    def outputs(leaf):
        return tuple(gather_logprob(leaf, ids, mask, vocab=7, form=LogitForm(1.3, softcap=5.0)))

    assert torch.autograd.gradcheck(outputs, logits.requires_grad_(), fast_mode=False)


def test_mistakes_are_named():
    with pytest.raises(ValueError, match=r"ids: a matrix with a row for each of \(3, 5\), not \(2, 1\)"):
        gather_logprob(torch.zeros(3, 5), torch.zeros(2, 1, dtype=torch.long))
    with pytest.raises(ValueError, match="vocab: between 1 and 5, not 6"):
        gather_logprob(torch.zeros(3, 5), torch.zeros(3, 1, dtype=torch.long), vocab=6)
    with pytest.raises(ValueError, match=r"temperature: above 0 and finite, not 0\.0"):
        gather_logprob(torch.zeros(3, 5), torch.zeros(3, 1, dtype=torch.long), temperature=0.0)
    with pytest.raises(ValueError, match=r"mask: of shape \(3,\), not \(2,\)"):
        gather_logprob(torch.zeros(3, 5), torch.zeros(3, 1, dtype=torch.long), torch.ones(2))
    with pytest.raises(jaxtyping.TypeCheckError):
        gather_stats(torch.zeros(3), torch.zeros(3, 1, dtype=torch.long))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_so(value):
    logits = logits_of(3, 50)
    logits[1, 7] = value
    outputs, gradient = run(logits, ids_of(3, 50), grads=upstreams(3))
    for output in (outputs[0][:, 0], outputs[1], gradient.sum(-1)):
        assert output.isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize("vocab", [40, 50])
def test_ids_that_are_not_in_use(vocab):
    """Refused, or on a device, where that would take a look, without a log-prob; other rows and columns are left alone."""
    logits, ids = logits_of(4, 50), torch.tensor([[vocab + 5], [3], [-1], [-7]])
    if not on_triton(logits):
        with pytest.raises(ValueError, match=f"ids: below {vocab}, the columns in use, not {vocab + 5}"):
            gather_logprob(logits, ids, vocab=vocab)
        return
    leaf = logits.clone().requires_grad_()
    logp = gather_logprob(leaf, ids, vocab=vocab).logp
    (gradient,) = torch.autograd.grad(logp[1:].sum(), leaf)
    assert logp[0].isnan().all()
    assert not logp[2:].any()
    (whole,) = run(logits[1:2, :vocab], ids[1:2], grads=(torch.ones(1, 1), None, None))[1:]
    torch.testing.assert_close(gradient[1:2, :vocab], whole)
    assert not gradient[2:].any()


def test_a_row_that_nobody_asks_about_may_be_anything():
    logits = logits_of(3, 50)
    logits[0, 0] = torch.nan
    leaf = logits.requires_grad_()
    logp = gather_logprob(leaf, torch.full((3, 1), 7)).logp[:, 0]
    (gradient,) = torch.autograd.grad(logp, leaf, torch.tensor([0.0, 1.0, 1.0]))
    assert not gradient[0].any()
    assert gradient.isfinite().all()


def test_ids_in_inference_mode():
    leaf = logits_of(3, 50).requires_grad_()
    with torch.inference_mode():
        ids = torch.full((3, 1), 7)
    assert torch.autograd.grad(gather_logprob(leaf, ids).logp.sum(), leaf)[0].any()
