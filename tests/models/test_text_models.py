"""Losses and features in half precision, and padding that counts for no gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hf_bico.alignment.calibration_pass import Side, collect
from hf_bico.alignment.objectives.base import LossBatch
from hf_bico.alignment.objectives.language import AnswerHead, LanguageHead
from hf_bico.alignment.statistics import Kind
from hf_bico.models.families.live import LiveModel
from hf_bico.models.families.pooling import Pooling
from hf_bico.models.families.text_models import CausalModel, SequenceModel
from hf_bico.models.hooks import Losses, TextRows, Trace
from hf_bico.models.layout import Site, SitePair, Slot
from hf_bico.models.model import Model
from hf_bico.utils.samples import Text
from support.language_toys import sentences, write_decoder, write_t5

pytestmark = pytest.mark.quick

SAMPLES = [Text(text) for text in sentences(4)]
WORDS = ("no", "yes")
ASKED = LossBatch(SAMPLES, (0, 1, 1, 0))


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LiveModel]:
    """Models that run in bfloat16."""
    folder = tmp_path_factory.mktemp("models")
    written = {"llama": write_decoder(folder / "llama"), "t5": write_t5(folder / "t5")}
    cpu = torch.device("cpu")
    return {name: Model.open(path, "a model").load(cpu, torch.bfloat16) for name, path in written.items()}


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross-entropy of the labels, one by one."""
    return sum((row.logsumexp(0) - row[label] for row, label in zip(logits, labels, strict=True)), torch.zeros(()))


def test_the_loss_of_a_half_model_is_that_of_its_logits_in_single_precision(halves: dict[str, LiveModel]) -> None:
    llama, t5 = halves["llama"], halves["t5"]
    assert isinstance(llama, CausalModel)
    assert isinstance(t5, SequenceModel)
    read, answers = llama.tokens(SAMPLES), t5.answers([Text(WORDS[label]) for label in ASKED.labels])
    assert not read.mask.all()
    with torch.no_grad():
        shown = {
            "llama": (
                LanguageHead().losses(llama, ASKED),
                llama.logits(read)[:, :-1],
                read.ids[:, 1:],
                read.mask[:, 1:],
            ),
            "t5": (
                AnswerHead(WORDS).losses(t5, ASKED),
                t5.logits(t5.tokens(SAMPLES), answers),
                answers.ids,
                answers.mask,
            ),
        }
    for name, (losses, logits, ids, real) in shown.items():
        assert logits.dtype == torch.bfloat16, name
        assert losses.task is not None
        assert losses.task.dtype == torch.float32, name
        exact = summed(logits[real].float(), ids[real])
        rough = functional.cross_entropy(logits[real], ids[real], reduction="sum").float()
        assert not torch.allclose(rough, exact, rtol=1e-5), "half precision would show"
        assert torch.allclose(losses.task, exact, rtol=1e-6), name


@pytest.mark.parametrize(("name", "last"), [("llama", "model.norm"), ("t5", "encoder.final_layer_norm")])
def test_the_features_of_a_half_model_are_means_in_single_precision(
    name: str, last: str, halves: dict[str, LiveModel]
) -> None:
    live, shown = halves[name], list[Tensor]()
    assert isinstance(live, CausalModel | SequenceModel)
    mask = live.tokens(SAMPLES).mask
    hook = live.module.get_submodule(last).register_forward_hook(lambda *passed: shown.append(passed[2]))
    with torch.no_grad(), hook:
        features = live.features(SAMPLES)
    assert shown[0].dtype == torch.bfloat16
    exact = torch.stack([hidden[real].double().mean(0) for hidden, real in zip(shown[0], mask, strict=True)])
    assert features.dtype == torch.float32
    assert not torch.allclose(exact.bfloat16().double(), exact, atol=1e-5), "half precision would show"
    assert torch.allclose(features.double(), exact, atol=1e-6)


def test_a_mean_of_many_tokens_is_not_rounded_on_the_way() -> None:
    hidden = torch.randn(2, 600, 3, generator=torch.Generator().manual_seed(0)).bfloat16() + 8
    mask = torch.ones(2, 600, dtype=torch.bool)
    mask[1, :200] = False
    exact = torch.stack([rows[real].double().mean(0) for rows, real in zip(hidden, mask, strict=True)])
    assert torch.allclose(Pooling(("mean",)).rows(hidden, mask).double(), exact, rtol=1e-6)


class OneReader:
    """A model of one linear site, whose loss looks at padding as well."""

    def __init__(self, rows: Tensor, mask: Tensor, flat: bool) -> None:
        self.rows, self.text = rows, TextRows(torch.zeros(mask.shape, dtype=torch.long), mask)
        self.linear = torch.randn(2, 3, generator=torch.Generator().manual_seed(1))
        self.site = Site("blocks.0.mlp.up", "mlp.up", 0, "blocks.0.mlp.up", (2, 3), Slot("up"), text=True)
        self.flat = flat

    @contextmanager
    def observed(self, sites: Sequence[Site], trace: Trace) -> Iterator[Trace]:
        self.trace = trace
        yield self.trace

    def weight(self, name: str) -> Tensor:
        return self.linear

    def run(self) -> Losses:
        x = self.rows.flatten(0, 1) if self.flat else self.rows
        return Losses(self.trace.tap(self.site, x, x @ self.linear.T).square().sum(), text=self.text)


@pytest.mark.parametrize("flat", [False, True], ids=["by text", "as one list"])
def test_what_a_loss_makes_of_padding_is_no_gradient_of_the_target(flat: bool) -> None:
    mask = torch.tensor([[False, False, True, True], [True, True, True, True], [True, True, True, False]])
    rows = torch.randn(3, 4, 3, generator=torch.Generator().manual_seed(0))
    model = OneReader(rows, mask, flat)
    side = Side(model, None)
    kinds = {Kind.TARGET_GRADIENTS}
    found = collect([SitePair(model.site, model.site)], side, side, [(model.run, model.run)], kinds).target_gradients
    real = [text[own].double() for text, own in zip(rows, mask, strict=True)]
    gradients = [2 * text @ model.linear.double().T for text in real]
    each = [gradient.T @ text for gradient, text in zip(gradients, real, strict=True)]
    gradient = found[model.site.name]
    assert torch.allclose(gradient.weight, sum(each, torch.zeros(())), atol=1e-5)
    assert torch.allclose(gradient.bias, sum((one.sum(0) for one in gradients), torch.zeros(())), atol=1e-5)
    assert torch.equal(gradient.weight_votes, sum((one.sign() for one in each), torch.zeros(())))
