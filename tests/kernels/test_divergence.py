"""Reverse KL, forward KL and JSD with their gradients against float64 autograd.

The same tests run on the torch twins and, under TRITON_INTERPRET=1, on the Triton kernels (see test_interpreter.py).
"""

import pytest
import torch

from opd.kernels import blocks, forward_kl, jsd, reverse_kl
from opd.kernels.divergence import divergence, divergence_grad, divergence_stats, divergence_with_grad
from opd.kernels.head import PLAIN, LogitForm

KINDS = [("reverse_kl", 0.5), ("forward_kl", 0.5), ("jsd", 0.1), ("jsd", 0.5), ("jsd", 0.9)]
SCALES = [(1.0, 1.0), (0.5, 2.0), (2.0, 1.0), (1 / 0.7, 1 / 0.7)]
MODES = ["fused", "recompute"]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of a few rows, so that several of them meet even here."""
    monkeypatch.setattr(blocks, "CACHE_BYTES", 8 * 5000 * 4)
    monkeypatch.setattr(blocks, "MIN_ROWS", 1)


def pair(c: int, vocab: int, case: str = "random") -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(c * vocab)
    student, other = (3 * torch.randn(c, vocab, generator=generator) for _ in range(2))
    peaked, sure, never = student.clone(), student.clone(), other.clone()
    peaked[:, 0] += 50
    sure[:, 0], never[:, 0] = student.amax(-1) + 2, -120  # a log-ratio whose exponential fp32 does not hold
    return {
        "random": (student, other),
        "near": (student, student + 1e-3 * other),
        "far offsets": (student + 1e4, other - 1e4),
        "near at an offset": (student + 1e4, (student + 1e4) + 1e-2 * other),
        "peaked student": (peaked, other),
        "peaked teacher": (other, peaked),
        "both peaked apart": (peaked, peaked.flip(-1)),
        "never at the teacher": (sure, never),
    }[case]


def weights(c: int) -> torch.Tensor:
    return torch.rand(c, generator=torch.Generator().manual_seed(0)) + 0.5


def capped(logits: torch.Tensor, form: LogitForm) -> torch.Tensor:
    if form.softcap is not None:
        logits = form.softcap * (logits / form.softcap).tanh()
    return logits * form.scale


def exact(student, teacher, weight, kind="reverse_kl", beta=0.5, student_form=PLAIN, teacher_form=PLAIN):
    """(weight * divergence of each row, gradient of their sum) in float64."""
    student = student.detach().double().requires_grad_()
    log_q, log_p = capped(student, student_form).log_softmax(-1), capped(teacher.double(), teacher_form).log_softmax(-1)
    if kind == "reverse_kl":
        rows = (log_q.exp() * (log_q - log_p)).sum(-1)
    elif kind == "forward_kl":
        rows = (log_p.exp() * (log_p - log_q)).sum(-1)
    else:
        shares = torch.tensor([beta, 1 - beta], dtype=torch.float64).log()
        log_m = torch.logaddexp(log_p + shares[0], log_q + shares[1])
        rows = (beta * log_p.exp() * (log_p - log_m) + (1 - beta) * log_q.exp() * (log_q - log_m)).sum(-1)
    (rows * weight.double()).sum().backward()
    assert student.grad is not None
    return (rows * weight.double()).detach(), student.grad


def run(student, teacher, weight=None, upstream=None, **options):
    """(rows, gradient) of the public function."""
    student = student.detach().requires_grad_()
    rows = divergence(student, teacher, weight, **options)
    (gradient,) = torch.autograd.grad(rows, student, torch.ones_like(rows) if upstream is None else upstream)
    return rows.detach(), gradient


def check(student, teacher, kind, beta, student_scale=1.0, teacher_scale=1.0, mode=None):
    weight, forms = weights(len(student)), (LogitForm(student_scale), LogitForm(teacher_scale))
    exact_rows, exact_grad = exact(student, teacher, weight, kind, beta, *forms)
    options = {"kind": kind, "beta": beta, "student_form": forms[0], "teacher_form": forms[1]}
    rows, gradient = run(student, teacher, weight, mode=mode, **options)
    # logits times a scale that is no power of two are rounded before they are compared
    rounding = 1e-6 if student_scale == 1 / 0.7 else 0.0
    torch.testing.assert_close(rows.double() / weight, exact_rows / weight, rtol=1e-6, atol=3e-7 + rounding)
    # log-ratios of a row far apart are large numbers whose mean is taken off, as are those of the JSD, of size log 2
    floor = {"reverse_kl": 1e-7 * exact_rows.sum(), "forward_kl": 0.0, "jsd": 1e-7}[kind] + rounding
    atol = (2e-6 * exact_grad.abs().amax() if len(rows) else 0.0) + student_scale * floor
    torch.testing.assert_close(gradient.double(), exact_grad, rtol=0, atol=float(atol))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("kind", "beta"), KINDS)
@pytest.mark.parametrize("vocab", [1, 2, 127, 1000, 4096, 5000])
@pytest.mark.parametrize("c", [0, 1, 5, 40])
def test_shapes(c, vocab, kind, beta, mode):
    check(*pair(c, vocab), kind, beta, mode=mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("kind", "beta"), KINDS)
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize(
    "case",
    [
        "random",
        "near",
        "far offsets",
        "near at an offset",
        "peaked student",
        "peaked teacher",
        "both peaked apart",
        "never at the teacher",
    ],
)
def test_hard_rows(case, scales, kind, beta, mode):
    check(*pair(3, 1000, case), kind, beta, *scales, mode=mode)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(("kind", "beta"), KINDS[:3])
def test_a_temperature_divides_both_models_logits(kind, beta, temperature):
    student, teacher = pair(4, 127)
    form = LogitForm(1 / temperature)
    check(student, teacher, kind, beta, form.scale, form.scale)
    divided = run(student, teacher, kind=kind, beta=beta, temperature=temperature)
    formed = run(student, teacher, kind=kind, beta=beta, student_form=form, teacher_form=form)
    torch.testing.assert_close(divided, formed, rtol=0, atol=0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("kind", "beta"), KINDS[:3])
def test_soft_caps_of_both_models(kind, beta, mode):
    student, teacher = pair(5, 1000)
    forms = LogitForm(1 / 0.8, softcap=4.0), LogitForm(1 / 0.8, softcap=30.0)
    rows, gradient = run(student, teacher, kind=kind, beta=beta, student_form=forms[0], teacher_form=forms[1], mode=mode)
    exact_rows, exact_grad = exact(student, teacher, torch.ones(5), kind, beta, *forms)
    torch.testing.assert_close(rows.double(), exact_rows, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(gradient.double(), exact_grad, rtol=0, atol=4e-6 * float(exact_grad.abs().max()))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("kind", "beta"), KINDS)
@pytest.mark.parametrize("scale", [0.5, 1.0, 1 / 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_rows_give_exactly_nothing(kind, beta, scale, dtype, mode):
    student = pair(20, 1000)[0].to(dtype)
    form = LogitForm(scale)
    rows, gradient = run(student, student.clone(), kind=kind, beta=beta, student_form=form, teacher_form=form, mode=mode)
    assert not rows.any()
    assert not gradient.any()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("kind", "beta"), KINDS)
@pytest.mark.parametrize("vocab", [1, 127, 1000, 4096, 5000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_rounds_only_where_it_is_written(dtype, vocab, kind, beta, mode):
    """The interpreter truncates where a device rounds to the nearest, and `fused` rounds once more."""
    student, teacher = (logits.to(dtype) for logits in pair(7, vocab))
    weight, upstream = weights(7), torch.linspace(-2, 2, 7)
    exact_rows, _ = exact(student, teacher, weight, kind, beta)
    _, exact_grad = exact(student, teacher, weight * upstream, kind, beta)
    rows, gradient = run(student, teacher, weight, upstream, kind=kind, beta=beta, mode=mode)
    assert rows.dtype == torch.float32
    torch.testing.assert_close(rows.double(), exact_rows, rtol=1e-6, atol=3e-7)
    tiny = 1e-7 if dtype == torch.float16 else 0.0  # below its normal range
    atol = tiny + 2e-6 * float(exact_grad.abs().max())
    torch.testing.assert_close(gradient.double(), exact_grad, rtol=2**-7 + (mode == "fused") * 2**-9, atol=atol)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_padding_is_never_read_and_has_no_gradient(kind, beta, mode):
    student, teacher = pair(6, 300)
    teacher = torch.cat([teacher, torch.full((6, 9), torch.inf)], 1)
    student[:, 200:], teacher[:, 200:] = torch.nan, torch.nan
    rows, gradient = run(student, teacher, kind=kind, beta=beta, vocab=200, mode=mode)
    exact_rows, exact_grad = exact(student[:, :200], teacher[:, :200], torch.ones(6), kind, beta)
    torch.testing.assert_close(rows.double(), exact_rows, rtol=1e-6, atol=3e-7)
    torch.testing.assert_close(gradient[:, :200].double(), exact_grad, rtol=0, atol=5e-6)
    assert not gradient[:, 200:].any()


def test_the_columns_that_only_one_model_has_are_padding_by_default():
    student, teacher = pair(4, 50)
    rows, gradient = run(student, teacher[:, :40])
    cut, cut_gradient = run(student[:, :40].contiguous(), teacher[:, :40])
    assert torch.equal(rows, cut)
    assert torch.equal(gradient[:, :40], cut_gradient)
    assert not gradient[:, 40:].any()


@pytest.mark.parametrize("mode", MODES)
def test_rows_of_any_stride(mode):
    student, teacher = pair(6, 130)
    wide = torch.full((12, 3, 130), torch.nan)
    wide[::2, 1], wide[1::2, 2] = student, teacher
    assert torch.equal(run(wide[::2, 1], wide[1::2, 2], mode=mode)[1], run(student, teacher, mode=mode)[1])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("kind", "beta"), KINDS[:3])
def test_rows_of_weight_zero_are_not_read(kind, beta, mode):
    student, teacher = pair(5, 127)
    weight = torch.tensor([1.0, 0.0, -2.0, 0.0, 0.5])
    alone = run(student[weight != 0], teacher[weight != 0], weight[weight != 0], kind=kind, beta=beta, mode=mode)
    student[weight == 0], teacher[weight == 0] = torch.nan, torch.nan
    rows, gradient = run(student, teacher, weight, kind=kind, beta=beta, mode=mode)
    torch.testing.assert_close((rows[weight != 0], gradient[weight != 0]), alone, rtol=0, atol=0)
    assert not rows[weight == 0].any()
    assert not gradient[weight == 0].any()
    rows, gradient = run(student, teacher, torch.zeros(5), kind=kind, beta=beta, mode=mode)
    assert not rows.any()
    assert not gradient.any()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("kind", "beta"), KINDS[:3])
def test_any_upstream_gradient(kind, beta, mode):
    student, teacher = pair(5, 127)
    upstream = torch.tensor([1.0, 0.0, -3.0, 1e-3, 2.0])
    _, gradient = run(student, teacher, weights(5), upstream, kind=kind, beta=beta, mode=mode)
    _, exact_grad = exact(student, teacher, weights(5) * upstream, kind, beta)
    torch.testing.assert_close(gradient.double(), exact_grad, rtol=0, atol=2e-6 * float(exact_grad.abs().max()))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl"])
def test_the_gradient_may_take_the_logits_place(kind, mode):
    student, teacher = pair(5, 127)
    upstream = torch.tensor([1.0, 2.0, 0.0, 1.0, -1.0])
    expected = run(student, teacher, None, upstream, kind=kind, mode=mode)
    leaf = student.clone().requires_grad_()
    rows = divergence(leaf * 1, teacher, kind=kind, mode=mode, inplace=True)
    rows.backward(upstream)
    assert torch.equal(rows, expected[0])
    assert torch.equal(leaf.grad, expected[1])  # type: ignore[arg-type]
    storage = student.clone().requires_grad_()
    rows = divergence(storage, teacher, kind=kind, mode=mode, inplace=True)
    (gradient,) = torch.autograd.grad(rows, storage, upstream)
    assert gradient.data_ptr() == storage.data_ptr()


def test_the_graph_may_be_gone_through_twice():
    student, teacher = pair(3, 20)
    for mode in MODES:
        leaf = student.clone().requires_grad_()
        rows = divergence(leaf, teacher, mode=mode)
        once, twice = (torch.autograd.grad(rows.sum() * 2, leaf, retain_graph=True)[0] for _ in range(2))
        assert torch.equal(once, twice)


def test_no_gradient_is_computed_where_none_is_wanted(monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError

    student, teacher = pair(3, 20)
    expected = run(student, teacher)[0]
    for name in ("divergence_grad", "divergence_with_grad"):
        monkeypatch.setattr(f"opd.kernels.divergence.{name}", fail)
    torch.testing.assert_close(divergence(student, teacher), expected, rtol=1e-6, atol=1e-7)
    with torch.no_grad():
        divergence(student.requires_grad_(), teacher)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_gradcheck_in_float64(kind, beta, mode):
    student, teacher = (logits.double()[:, :7].contiguous() for logits in pair(3, 20))
    form, weight = LogitForm(1.3, softcap=5.0), torch.tensor([1.0, 0.0, -0.5]).double()
    options = {"kind": kind, "beta": beta, "student_form": form, "vocab": 6, "mode": mode}
    assert torch.autograd.gradcheck(
        lambda leaf: divergence(leaf, teacher, weight, **options), student.requires_grad_(), fast_mode=False
    )


@pytest.mark.parametrize(("kind", "beta"), KINDS[:3])
def test_statistics_and_gradient_at_once_are_those_of_two_passes(kind, beta):
    student, teacher = pair(7, 5000)
    weight, forms = weights(7), (LogitForm(0.7), LogitForm(1.1))
    weight[3] = 0.0
    once, twice = torch.empty(7, 5000), torch.empty(7, 5000)
    together = divergence_with_grad(student, teacher, weight, kind, beta, *forms, out=once)
    stats = divergence_stats(student, teacher, weight != 0, kind, beta, *forms)
    divergence_grad(student, teacher, stats, weight, kind, beta, *forms, out=twice)
    for name in ("divergence", "max", "log_z"):
        torch.testing.assert_close(getattr(together, name), getattr(stats, name), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(once, twice, rtol=0, atol=1e-6)


@pytest.mark.parametrize("place", ["student", "teacher"])
@pytest.mark.parametrize(("kind", "beta"), KINDS[:3])
def test_the_gradient_may_overwrite_either_input(kind, beta, place):
    student, teacher = pair(7, 300)
    expected = run(student, teacher, weights(7), kind=kind, beta=beta)[1]
    inputs = {"student": student.clone(), "teacher": teacher.clone()}
    divergence_with_grad(inputs["student"], inputs["teacher"], weights(7), kind, beta, PLAIN, PLAIN, out=inputs[place])
    torch.testing.assert_close(inputs[place], expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize(("kind", "beta"), KINDS[:3])
def test_a_row_of_a_real_vocabulary(kind, beta):
    student, teacher = (logits.bfloat16() for logits in pair(2, 151936))
    rows, gradient = run(student, teacher, kind=kind, beta=beta)
    exact_rows, exact_grad = exact(student, teacher, torch.ones(2), kind, beta)
    torch.testing.assert_close(rows.double(), exact_rows, rtol=1e-6, atol=3e-7)
    atol = 2e-6 * float(exact_grad.abs().max())
    torch.testing.assert_close(gradient.double(), exact_grad, rtol=2**-7, atol=atol)


def test_the_direction_of_each_divergence():
    """The teacher has two modes, the student one of them: the reverse KL hardly minds, the forward KL does."""
    student, teacher = torch.tensor([[0.0, -12.0, -12.0]]), torch.tensor([[0.0, 0.0, -12.0]])
    rows = {kind: float(divergence(student, teacher, kind=kind)) for kind, _ in KINDS}
    assert rows["reverse_kl"] == pytest.approx(0.693, abs=1e-2)
    assert rows["forward_kl"] == pytest.approx(5.3, abs=0.1)
    assert 0 < rows["jsd"] < 0.693
    for named in (reverse_kl, forward_kl, jsd):
        assert float(named(student, teacher)) == rows[named.__name__]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "kl"}, "kind: one of reverse_kl, forward_kl, jsd, not 'kl'"),
        ({"beta": 1.0}, "beta: between 0 and 1, not 1.0"),
        ({"temperature": -1.0}, "temperature: above 0 and finite, not -1.0"),
        ({"mode": "slow"}, "mode: one of fused, recompute, not 'slow'"),
        ({"vocab": 21}, r"vocab: between 1 and the columns of both \(20, 20\), not 21"),
        ({"vocab": 0}, "vocab: between 1"),
        ({"weight": torch.ones(2)}, r"weight: of shape \(3,\), not \(2,\)"),
        ({"teacher": torch.zeros(4, 20)}, "two matrices with as many rows"),
    ],
)
def test_mistakes_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        divergence(**({"student": torch.zeros(3, 20), "teacher": torch.zeros(3, 20)} | change))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("kind", "beta"), KINDS[:3])
def test_what_is_not_finite_stays_so(kind, beta, mode, value):
    """A run is to notice that it went wrong. Other rows are untouched."""
    for number in (0, 1):
        models = [logits.clone() for logits in pair(3, 50)]
        models[number][1, 7] = value
        rows, gradient = run(*models, kind=kind, beta=beta, mode=mode)
        assert rows.isnan().tolist() == [False, True, False]
        assert gradient.isnan().any(-1).tolist() == [False, True, False]


@pytest.mark.parametrize("distance", [1e-1, 1e-2, 1e-3])
@pytest.mark.parametrize("shift", [0.0, 100.0])
@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_the_gradient_between_near_rows_keeps_its_digits(kind, beta, shift, distance):
    """As at the end of a training: what is left to learn is small, and its direction matters."""
    generator = torch.Generator().manual_seed(3)
    student = torch.randn(4, 1000, generator=generator) + shift
    teacher = student + distance * torch.randn(4, 1000, generator=generator)
    _, exact_grad = exact(student, teacher, torch.ones(4), kind, beta)
    for mode in MODES:
        _, gradient = run(student, teacher, kind=kind, beta=beta, mode=mode)
        error = (gradient - exact_grad).abs().max() / exact_grad.abs().max()
        assert error < 2e-6


@pytest.mark.parametrize("distance", [1e-3, 1e-4])
@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_near_rows_whose_maximum_comes_late(kind, beta, distance):
    """What was summed before is moved to the new maximum, by as much in both models but for a little."""
    generator = torch.Generator().manual_seed(5)
    student = torch.randn(8, 8192, generator=generator)
    student[:, 4096:] = -20
    top, rows = student.amax(-1), torch.arange(8)
    student[rows, 4096 + 7 * rows] = top + 6 + torch.rand(8, generator=generator)
    teacher = student + distance * torch.randn(8, 8192, generator=generator)
    _, exact_grad = exact(student, teacher, torch.ones(8), kind, beta)
    for mode in MODES:
        _, gradient = run(student, teacher, kind=kind, beta=beta, mode=mode)
        error = (gradient - exact_grad).abs().amax(-1) / exact_grad.abs().amax(-1)
        assert error.max() < 5e-6


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("kind", "beta"), KINDS[:3])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_logits_that_a_mask_has_set_to_the_lowest_number(temperature, kind, beta, mode):
    """Of both models, as where ids are never to be sampled: times 1 / 0.7 the number would be infinite."""
    models = pair(3, 50)
    for logits in models:
        logits[:, 3] = torch.finfo(torch.float32).min
    found = run(*models, kind=kind, beta=beta, temperature=temperature, mode=mode)
    cut = [torch.cat([logits[:, :3], logits[:, 4:]], 1) for logits in models]
    rows, gradient = run(*cut, kind=kind, beta=beta, temperature=temperature, mode=mode)
    torch.testing.assert_close(found[0], rows, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(torch.cat([found[1][:, :3], found[1][:, 4:]], 1), gradient, rtol=1e-5, atol=1e-6)
    assert not found[1][:, 3].any()


@pytest.mark.parametrize("mode", MODES)
def test_weights_in_low_precision(mode):
    student, teacher = pair(4, 100)
    found = run(student, teacher, torch.ones(4).bfloat16(), mode=mode, temperature=0.7)
    torch.testing.assert_close(found, run(student, teacher, mode=mode, temperature=0.7), rtol=0, atol=0)


@pytest.mark.parametrize("mode", MODES)
def test_a_teacher_in_inference_mode(mode):
    student, teacher = pair(4, 100)
    with torch.inference_mode():
        inferred = teacher * 1
    torch.testing.assert_close(run(student, inferred, mode=mode), run(student, teacher, mode=mode), rtol=0, atol=0)
