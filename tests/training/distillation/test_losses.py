"""Distillation loss and comparison against plain torch, in chunks."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from strata.training import chunked_logits
from strata.training.distillation import losses
from strata.training.distillation.losses import Output, compare, distillation_loss
from strata.training.targets import IGNORED

TOKENS, VOCABULARY, WIDTH, TEACHER_WIDTH = 10, 7, 3, 5
CAPS = [(None, None), (1.5, None), (None, 0.8), (1.5, 0.8)]


@pytest.fixture(params=[1, 3, 1000])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Tokens per chunk in fp64: single tokens, a last chunk that is smaller, one chunk."""
    monkeypatch.setitem(chunked_logits.LOGIT_BYTES, "cpu", VOCABULARY * 8 * request.param)
    yield request.param


def outputs(dtype: torch.dtype = torch.float64) -> tuple[Output, Output, Tensor]:
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    student = Output(drawn(TOKENS, WIDTH).requires_grad_(), drawn(VOCABULARY, WIDTH).requires_grad_())
    teacher = Output(drawn(TOKENS, TEACHER_WIDTH), drawn(VOCABULARY, TEACHER_WIDTH))
    targets_n = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    targets_n[[0, 4, 9]] = IGNORED
    return student, teacher, targets_n


def plain_logits(output: Output) -> Tensor:
    logits = output.x_nd @ output.weight_vd.T
    return logits if output.softcap is None else output.softcap * torch.tanh(logits / output.softcap)


def gradients(loss: Tensor, student: Output) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [student.x_nd, student.weight_vd]))


@pytest.mark.parametrize(("cap", "teacher_cap"), CAPS)
@pytest.mark.usefixtures("chunk")
def test_loss_and_gradients_equal_torch(cap: float | None, teacher_cap: float | None) -> None:
    student, teacher, targets_n = outputs()
    student, teacher = student._replace(softcap=cap), teacher._replace(softcap=teacher_cap)
    counted = targets_n != IGNORED
    expected = F.cross_entropy(plain_logits(student)[counted], plain_logits(teacher)[counted].softmax(1), reduction="sum")
    found = distillation_loss(student, teacher, targets_n)
    torch.testing.assert_close(found, expected)
    for mine, theirs in zip(gradients(3 * found, student), gradients(3 * expected, student), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_gradients_equal_numerical_ones() -> None:
    student, teacher, targets_n = outputs()

    def loss(x_nd: Tensor, weight_vd: Tensor) -> Tensor:
        return distillation_loss(Output(x_nd, weight_vd, 1.5), teacher, targets_n)

    assert torch.autograd.gradcheck(loss, (student.x_nd, student.weight_vd))


def test_gradients_are_those_of_the_kl_divergence() -> None:
    student, teacher, targets_n = outputs()
    counted = targets_n != IGNORED
    logq, logp = (plain_logits(each)[counted].log_softmax(1) for each in (student, teacher))
    kl = F.kl_div(logq, logp, reduction="sum", log_target=True)
    entropy = -(logp.exp() * logp).sum()
    loss = distillation_loss(student, teacher, targets_n)
    torch.testing.assert_close(loss, kl + entropy)
    for mine, theirs in zip(gradients(loss, student), gradients(kl, student), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_student_that_equals_its_teacher_has_no_gradient() -> None:
    _, teacher, targets_n = outputs()
    student = Output(teacher.x_nd.clone().requires_grad_(), teacher.weight_vd.clone().requires_grad_())
    for gradient in gradients(distillation_loss(student, teacher, targets_n), student):
        torch.testing.assert_close(gradient, torch.zeros_like(gradient))
    found = compare(student, teacher, targets_n)
    assert float(found.kl) == pytest.approx(0, abs=1e-12) and float(found.agreeing) == float(found.tokens) == 7


@pytest.mark.usefixtures("chunk")
def test_comparison_equals_torch() -> None:
    student, teacher, targets_n = outputs()
    counted = targets_n != IGNORED
    mine, theirs = plain_logits(student).detach()[counted], plain_logits(teacher)[counted]
    found = compare(student, teacher, targets_n)
    torch.testing.assert_close(found.cross_entropy, F.cross_entropy(mine, targets_n[counted], reduction="sum"))
    kl = F.kl_div(mine.log_softmax(1), theirs.log_softmax(1), reduction="sum", log_target=True)
    torch.testing.assert_close(found.kl, kl)
    agreeing = int((mine.argmax(1) == theirs.argmax(1)).sum())
    assert (int(found.agreeing), int(found.tokens)) == (agreeing, 7) and 0 < agreeing < 7


def test_bf16_rounds_only_the_inputs() -> None:
    """Logits and their sums are in fp32, so the loss equals that of the rounded inputs in fp64 to the products' rounding."""
    student, teacher, targets_n = outputs(torch.bfloat16)
    double = [Output(each.x_nd.double(), each.weight_vd.double()) for each in (student, teacher)]
    found = distillation_loss(student, teacher, targets_n)
    assert found.dtype == torch.float32
    expected = distillation_loss(*double, targets_n).detach()
    assert float(found.detach()) == pytest.approx(float(expected), rel=1e-2)
    assert [each.dtype for each in gradients(found, student)] == [torch.bfloat16] * 2


def test_no_counted_token_adds_nothing() -> None:
    student, teacher, targets_n = outputs()
    loss = distillation_loss(student, teacher, torch.full_like(targets_n, IGNORED))
    assert float(loss) == 0 and all(not gradient.any() for gradient in gradients(loss, student))
    assert [float(each) for each in compare(student, teacher, torch.full_like(targets_n, IGNORED))] == [0] * 4


def test_logits_of_all_tokens_are_never_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(chunked_logits.LOGIT_BYTES, "cpu", VOCABULARY * 8 * 4)
    sizes = []

    def counted(x_nd: Tensor, weight_vd: Tensor, softcap: float | None) -> Tensor:
        sizes.append(len(x_nd))
        return chunked_logits.logits_of(x_nd, weight_vd, softcap)

    monkeypatch.setattr(losses, "logits_of", counted)
    student, teacher, targets_n = outputs()
    distillation_loss(student, teacher, targets_n).backward()  # type: ignore[no-untyped-call]
    assert sizes == [4, 4, 3, 3]  # seven counted tokens, student and teacher
