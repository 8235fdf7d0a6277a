"""Brief trainings: against literal loops, interrupted and resumed, and what samples left out choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from math import ceil, cos, pi
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_bico.alignment.methods import brief
from hf_bico.alignment.methods.brief import (
    CHECKS,
    ENOUGH_LEFT_OUT,
    RATES,
    WARMUP_PART,
    Distill,
    Train,
    left_out_folds,
    train_briefly,
)
from hf_bico.alignment.methods.finetuning import batches
from hf_bico.alignment.methods.training import Trained, TrainingTask
from hf_bico.alignment.scaling import SampleScores, class_scores
from hf_bico.errors import NonFiniteWeightsError, UsageError
from hf_bico.models.low_rank import Change, Factors, dense
from hf_bico.settings import Settings
from hf_bico.utils.progress import silent

CLASSES, WIDTH = 3, 5


class Task:
    """A small net in double precision with samples that it can learn, and wanted probabilities of classes."""

    def __init__(self, size: int = 30, seed: int = 0, learnable: bool = True) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.net = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()
            self.values = torch.randn(size, WIDTH).double()
            truth = 3 * self.values @ torch.randn(WIDTH, CLASSES).double()
            self.wanted = truth.softmax(-1) if learnable else torch.rand(size, CLASSES).double().softmax(-1)
        self.trained_on: set[int] = set()

    def scores(self, numbers: Sequence[int]) -> SampleScores:
        chosen = list(numbers)
        return class_scores(self.net(self.values[chosen]), self.wanted[chosen])

    def loss(self, numbers: Sequence[int]) -> Tensor:
        self.trained_on |= set(numbers)
        return self.scores(numbers).losses.sum()

    def task(
        self,
        start: Mapping[str, Change] | None = None,
        finish: Callable[[Sequence[int]], Mapping[str, Tensor]] | None = None,
        judges: tuple[int, ...] = (),
    ) -> TrainingTask:
        about: dict[str, Any] = {"start": start, "finish": finish, "judges": judges}
        parameters, size = dict(self.net.named_parameters()), len(self.values)
        return TrainingTask(parameters, self.loss, None, size, "a task", scores=self.scores, **about)


def settings(**options: Any) -> Settings:
    return Settings(**{"train_batch": 8, "batch_size": 32, "seed": 3, "weight_decay": 0.1, **options})


def literal_rate(step: int, steps: int, rate: float) -> float:
    warmup = steps // WARMUP_PART
    if step < warmup:
        return rate * (step + 1) / warmup
    return rate * (1 + cos(pi * (step - warmup) / (steps - warmup))) / 2


def literal_loop(
    task: Task, samples: Sequence[int], taken: int, steps: int, rate: float, start: Mapping[str, Factors] | None = None
) -> dict[str, Tensor]:
    """Train with torch's AdamW and autograd alone, through the product of factors where `start` has some."""
    weights = {name: parameter.detach().clone() for name, parameter in task.net.named_parameters()}
    factors = {name: (one.left.double().clone(), one.right.double().clone()) for name, one in (start or {}).items()}
    free = [weight for name, weight in weights.items() if name not in factors]
    leaves = [tensor.requires_grad_() for tensor in (*free, *(part for pair in factors.values() for part in pair))]
    optimizer = torch.optim.AdamW(leaves, lr=rate, weight_decay=0.1)
    order = batches(samples, 8, torch.Generator().manual_seed(3))
    for step, batch in enumerate(islice(order, taken)):
        current = {name: weights[name] + (torch.matmul(*factors[name]) if name in factors else 0) for name in weights}
        logits = torch.func.functional_call(task.net, current, (task.values[batch],))
        divergence = functional.kl_div(logits.log_softmax(-1), task.wanted[batch], reduction="none").sum(-1).mean()
        optimizer.zero_grad()
        divergence.backward()
        optimizer.param_groups[0]["lr"] = literal_rate(step, steps, rate)
        optimizer.step()
    before = dict(task.net.named_parameters())
    return {
        name: (torch.matmul(*factors[name]) if name in factors else weights[name] - before[name]).detach()
        for name in weights
    }


def left_out_losses(task: Task, changes: Mapping[str, Tensor], numbers: Sequence[int]) -> Tensor:
    current = {name: parameter + changes[name] for name, parameter in task.net.named_parameters()}
    logits = torch.func.functional_call(task.net, current, (task.values[list(numbers)],))
    wanted = task.wanted[list(numbers)]
    return functional.kl_div(logits.log_softmax(-1), wanted, reduction="none").sum(-1).detach()


def close(changes: Mapping[str, Change], expected: Mapping[str, Tensor]) -> bool:
    return changes.keys() == expected.keys() and all(
        torch.allclose(dense(changes[name]), expected[name], rtol=1e-9, atol=1e-12) for name in expected
    )


def some_factors(task: Task, rank: int = 2) -> dict[str, Factors]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: Factors(
            0.1 * torch.randn(len(weight), rank, generator=generator).double(),
            0.1 * torch.randn(rank, weight.shape[1], generator=generator).double(),
        )
        for name, weight in task.net.named_parameters()
        if weight.ndim == 2
    }


@pytest.mark.parametrize("factored", [False, True], ids=["weights", "factors"])
def test_all_is_that_of_a_literal_loop(factored: bool) -> None:
    """The curve of every fold, the choice of steps, and the training on all samples."""
    task = Task()
    start = some_factors(task) if factored else None
    rate, steps, size = 0.01, 30, len(task.values)
    trained = train_briefly(task.task(start), settings(learning_rate=rate), steps, silent)
    folds, every = left_out_folds(size, seed=3), ceil(steps / CHECKS)
    checks = [0, *(step for step in range(1, steps + 1) if step % every == 0 or step == steps)]
    means = {}
    for taken in checks:
        losses = []
        for fold in folds:
            rest = [number for number in range(size) if number not in fold]
            losses.append(left_out_losses(task, literal_loop(task, rest, taken, steps, rate, start), fold))
        means[taken] = torch.cat(losses)
    chosen = min(means, key=lambda taken: float(means[taken].mean()))
    assert 0 < chosen == trained.steps
    assert trained.left_out is not None
    assert trained.left_out.samples == tuple(number for fold in folds for number in fold)
    torch.testing.assert_close(trained.left_out.before.losses, means[0])
    torch.testing.assert_close(trained.left_out.after.losses, means[chosen])
    assert close(trained.changes, literal_loop(task, range(size), chosen, steps, rate, start))


def test_judges_say_what_runs_without_half_of_them_each_are_worth() -> None:
    """They choose neither rate nor steps."""
    task, judges, rate, steps = Task(), (1, 4, 5, 9, 20), 0.01, 30
    usual = train_briefly(task.task(), settings(learning_rate=rate), steps, silent)
    judged = train_briefly(task.task(judges=judges), settings(learning_rate=rate), steps, silent)
    assert 0 < judged.steps == usual.steps
    assert close(judged.changes, {name: dense(change) for name, change in usual.changes.items()})
    losses = []
    for half in ((1, 5, 20), (4, 9)):
        rest = [number for number in range(len(task.values)) if number not in half]
        losses.append(left_out_losses(task, literal_loop(task, rest, judged.steps, steps, rate), half))
    assert judged.left_out is not None
    assert judged.left_out.samples == (1, 5, 20, 4, 9)
    torch.testing.assert_close(judged.left_out.after.losses, torch.cat(losses))


def test_what_judges_do_not_gain_by_is_not_learnt() -> None:
    """The other samples want the opposite."""
    task, judges = Task(60), tuple(range(8))
    with torch.no_grad():
        task.wanted[8:] = (-task.wanted[8:].log()).softmax(-1)
    assert train_briefly(task.task(), settings(learning_rate=0.01), 30, silent).steps > 0
    judged = train_briefly(task.task(judges=judges), settings(learning_rate=0.01), 30, silent)
    assert judged.steps == 0
    assert all(not dense(change).any() for change in judged.changes.values())


def test_factors_stay_factors_of_their_rank() -> None:
    task = Task()
    start = some_factors(task, rank=2)
    trained = train_briefly(task.task(start), settings(), 10, silent)
    for name, change in trained.changes.items():
        if name in start:
            assert isinstance(change, Factors)
            assert change.rank == 2
            assert not torch.equal(change.left, start[name].left)
        else:
            assert isinstance(change, Tensor)


def test_the_rate_is_the_best_power_of_ten_or_its_neighbour() -> None:
    task = Task(size=20)  # of which all are left out to choose the rate
    losses = {}
    for rate in RATES:
        one = train_briefly(Task(size=20).task(), settings(learning_rate=rate), 12, silent).left_out
        assert one is not None
        losses[rate] = float(one.after.losses.mean())
    powers = RATES[::2]
    best = min(powers, key=losses.__getitem__)
    near = [rate for rate in RATES if abs(RATES.index(rate) - RATES.index(best)) <= 1]
    trained = train_briefly(task.task(), settings(), 12, silent)
    assert trained.rate == min(near, key=losses.__getitem__)
    assert len(set(losses.values())) > 3


@pytest.mark.parametrize(("size", "runs"), [(20, 6 * 5), (50, 6 * 2 + 2), (100, 6 + 1), (200, 6)])
def test_few_folds_choose_the_rate_and_all_choose_the_steps(
    size: int, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(brief, "RATES", (1e-6, 1e-3, 0.03, 0.1, 10.0, 100.0, 1000.0))
    begun = 0

    def count(stage: str, done: int, total: int) -> None:
        nonlocal begun
        begun += done == 0

    trained = train_briefly(Task(size=size).task(), settings(train_batch=200), 10, count)
    assert trained.rate in (1e-3, 0.03, 0.1)  # the best of those tried first has two neighbours
    assert begun == runs + 1
    assert trained.left_out is not None
    assert len(trained.left_out.samples) == sum(map(len, left_out_folds(size, seed=3)))


@pytest.mark.parametrize(("size", "folds"), [(2, 2), (4, 4), (10, 5), (50, 4), (100, 2), (200, 1), (1100, 1)])
def test_enough_samples_are_left_out_and_none_twice(size: int, folds: int) -> None:
    found = left_out_folds(size, seed=0)
    numbers = [number for fold in found for number in fold]
    assert len(found) == folds
    assert len(numbers) == len(set(numbers)) >= min(size, ENOUGH_LEFT_OUT)
    assert all(len(fold) <= ceil(size / min(5, size)) for fold in found)
    assert left_out_folds(size, seed=1) != found or size == 2


def test_left_out_samples_are_not_trained_on() -> None:
    task = Task(size=200)
    folds = left_out_folds(200, seed=3)
    seen = list[set[int]]()

    def progress(stage: str, done: int, total: int) -> None:
        if done == 0:
            seen.append(set())
            task.trained_on = seen[-1]

    train_briefly(task.task(), settings(learning_rate=0.01, train_batch=64), 10, progress)
    assert len(seen) == len(folds) + 1
    for fold, used in zip(folds, seen, strict=False):
        assert used
        assert not used & set(fold)
    assert seen[-1] & set(folds[0])


def test_one_sample_is_not_trained_on() -> None:
    trained = train_briefly(Task(size=1).task(), settings(), 10, silent)
    assert (trained.steps, trained.left_out) == (0, None)
    assert not any(dense(change).any() for change in trained.changes.values())


def test_nothing_is_learnt_where_no_step_helps() -> None:
    task = Task(size=60, learnable=False)
    trained = train_briefly(task.task(), settings(learning_rate=1.0), 10, silent)
    assert trained.steps == 0
    assert trained.left_out is not None
    assert trained.left_out.before is trained.left_out.after
    assert not any(dense(change).any() for change in trained.changes.values())


def test_a_rate_that_diverges_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(brief, "RATES", (1e-3, 3e-3, 1e-2, 1.0, 1e200))
    assert train_briefly(Task().task(), settings(), 10, silent).rate in (3e-3, 1e-2, 1.0)
    with pytest.raises(NonFiniteWeightsError):
        train_briefly(Task().task(), settings(learning_rate=1e200), 10, silent)


def test_the_model_is_as_before() -> None:
    task = Task()
    before = {name: parameter.clone() for name, parameter in task.net.named_parameters()}
    train_briefly(task.task(some_factors(task)), settings(), 5, silent)
    assert all(torch.equal(before[name], parameter) for name, parameter in task.net.named_parameters())
    assert all(parameter.requires_grad for parameter in task.net.parameters())


class TestLastChange:
    """A change without training after the last step, such as a readout."""

    @staticmethod
    def shift(task: Task, size: float) -> Callable[[Sequence[int]], dict[str, Tensor]]:
        """Move the last bias towards what the samples lack, or away from it."""

        def finish(samples: Sequence[int]) -> dict[str, Tensor]:
            chosen = list(samples)
            with torch.no_grad():
                lacking = (task.wanted[chosen] - task.net(task.values[chosen]).softmax(-1)).mean(0)
            return {"2.bias": size * lacking}

        return finish

    def test_left_out_samples_decide_whether_it_is_kept(self) -> None:
        task = Task(size=60)
        with torch.no_grad():
            task.net[2].bias += torch.tensor([1.0, 0.0, -1.0])  # which the shift can mend
        plain = train_briefly(task.task(), settings(learning_rate=1e-4), 3, silent)
        kept = train_briefly(task.task(finish=self.shift(task, 1.0)), settings(learning_rate=1e-4), 3, silent)
        dropped = train_briefly(task.task(finish=self.shift(task, -50.0)), settings(learning_rate=1e-4), 3, silent)
        assert (plain.finished, kept.finished, dropped.finished) == (False, True, False)
        assert torch.equal(dense(dropped.changes["2.bias"]), dense(plain.changes["2.bias"]))
        assert not torch.equal(dense(kept.changes["2.bias"]), dense(plain.changes["2.bias"]))
        assert kept.left_out is not None
        assert plain.left_out is not None
        assert kept.left_out.after.losses.mean() < plain.left_out.after.losses.mean()

    def test_it_chooses_rate_and_steps_together_with_the_training(self) -> None:
        """A literal search: every rate and every check, as it is and with the last change."""
        task = Task(size=20)
        with torch.no_grad():
            task.net[2].bias += torch.tensor([1.0, 0.0, -1.0])
        shift = self.shift(task, 1.0)
        found = {}
        for rate in RATES[::2]:
            for taken, finished in ((taken, finished) for taken in range(5) for finished in (False, True)):
                losses = []
                for fold in left_out_folds(20, seed=3):
                    rest = [number for number in range(20) if number not in fold]
                    changes = literal_loop(task, rest, taken, 4, rate)
                    if finished:
                        before = {name: parameter.clone() for name, parameter in task.net.named_parameters()}
                        with torch.no_grad():
                            for name, parameter in task.net.named_parameters():
                                parameter += changes[name]
                            changes["2.bias"] = changes["2.bias"] + shift(rest)["2.bias"]
                            for name, parameter in task.net.named_parameters():
                                parameter.copy_(before[name])
                    losses.append(left_out_losses(task, changes, fold))
                found[rate, taken, finished] = float(torch.cat(losses).mean())
        best = min(found, key=found.__getitem__)
        for rate in RATES[::2]:
            trained = train_briefly(task.task(finish=shift), settings(learning_rate=rate), 4, silent)
            own = min((one for one in found if one[0] == rate), key=found.__getitem__)
            assert (trained.steps, trained.finished) == own[1:]
        trained = train_briefly(task.task(finish=shift), settings(), 4, silent)
        assert trained.finished
        assert abs(RATES.index(trained.rate or 0.0) - RATES.index(best[0])) <= 1

    def test_it_is_made_from_the_trained_model_and_all_samples(self) -> None:
        task, made_from = Task(size=60), list[tuple[int, ...]]()
        shift = self.shift(task, 1.0)

        def finish(samples: Sequence[int]) -> dict[str, Tensor]:
            made_from.append(tuple(samples))
            return shift(samples)

        with torch.no_grad():
            task.net[2].bias += torch.tensor([1.0, 0.0, -1.0])
        trained = train_briefly(task.task(finish=finish), settings(learning_rate=1e-2), 6, silent)
        assert trained.finished
        checks, folds = [0, 2, 4, 6], left_out_folds(60, seed=3)
        assert made_from[-1] == tuple(range(60))
        rests = [set(range(60)) - set(fold) for fold in folds for _ in checks]
        assert [set(one) for one in made_from[:-1]] == rests
        plain = literal_loop(task, range(60), trained.steps, 6, 1e-2)
        current = {name: parameter + plain[name] for name, parameter in task.net.named_parameters()}
        logits = torch.func.functional_call(task.net, current, (task.values,))
        expected = plain["2.bias"] + (task.wanted - logits.softmax(-1)).mean(0).detach()
        torch.testing.assert_close(dense(trained.changes["2.bias"]), expected)


class Stopped(Exception):
    """An interruption."""


def interrupted_after(calls: int) -> Callable[[str, int, int], None]:
    left = calls

    def progress(stage: str, done: int, total: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Stopped

    return progress


def same(one: Trained, other: Trained) -> bool:
    assert one.left_out is not None
    assert other.left_out is not None
    return (
        (one.steps, one.rate, one.validation, one.finished)
        == (other.steps, other.rate, other.validation, other.finished)
        and torch.equal(one.left_out.before.losses, other.left_out.before.losses)
        and torch.equal(one.left_out.after.losses, other.left_out.after.losses)
        and all(torch.equal(dense(one.changes[name]), dense(other.changes[name])) for name in one.changes)
    )


@pytest.mark.parametrize("factored", [False, True], ids=["weights", "factors"])
@pytest.mark.parametrize("save_after", [0.0, 1e9], ids=["every step", "every run"])
def test_interrupted_is_undisturbed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factored: bool, save_after: float
) -> None:
    """Bit for bit, wherever it was stopped, and also if it is stopped again and again."""
    monkeypatch.setattr(brief, "SAVE_AFTER", save_after)

    def task() -> TrainingTask:
        one = Task(size=24)
        finish = TestLastChange.shift(one, 1.0)
        return one.task(some_factors(one) if factored else None, finish)

    whole = train_briefly(task(), settings(), 6, silent)
    assert whole.steps
    for calls in (1, 8, 40, 90):
        folder = tmp_path / str(calls)
        with pytest.raises(Stopped):
            train_briefly(task(), settings(checkpoint=str(folder)), 6, interrupted_after(calls))
        resumed = train_briefly(task(), settings(checkpoint=str(folder)), 6, silent)
        assert same(resumed, whole)
    folder = tmp_path / "often"
    for _ in range(1000):
        try:
            resumed = train_briefly(task(), settings(checkpoint=str(folder)), 6, interrupted_after(60))
        except Stopped:
            continue
        assert same(resumed, whole)
        return
    pytest.fail("it never came to an end")


def test_a_checkpoint_of_another_training_is_refused(tmp_path: Path) -> None:
    kept = settings(checkpoint=str(tmp_path))
    train_briefly(Task().task(), kept, 4, silent)
    for other, steps in ((replace(kept, seed=4), 4), (replace(kept, weight_decay=0.2), 4), (kept, 5)):
        with pytest.raises(UsageError, match="another training"):
            train_briefly(Task().task(), other, steps, silent)
    with pytest.raises(UsageError, match="another training"):
        train_briefly(replace(Task().task(), identity="other"), kept, 4, silent)


@pytest.mark.parametrize("entry", ["finished", "running"])
def test_a_broken_checkpoint_is_refused(tmp_path: Path, entry: str) -> None:
    import json

    from safetensors import safe_open
    from safetensors.torch import save_file

    from hf_bico.alignment.methods.saved_training import CHECKPOINT_ENTRY, CHECKPOINT_FILE

    kept = settings(checkpoint=str(tmp_path))
    train_briefly(Task().task(), kept, 4, silent)
    file = tmp_path / CHECKPOINT_FILE
    with safe_open(file, framework="pt") as stored:
        about = json.loads(stored.metadata()[CHECKPOINT_ENTRY])
    about[entry] = {"0.01, fold 0": 7} if entry == "finished" else "0.01, fold 0"
    about["checks"] = 3
    save_file({}, file, metadata={CHECKPOINT_ENTRY: json.dumps(about)})
    with pytest.raises(UsageError, match="broken"):
        train_briefly(Task().task(), kept, 4, silent)


def test_train_and_distill_take_their_steps_from_the_settings() -> None:
    assert (Train.toward, Distill.toward) == ("labels", "source")
    one = Distill(settings(method="distill", train_steps=3)).train(Task().task(), silent)
    assert same(one, train_briefly(Task().task(), settings(), 3, silent))
    assert Settings(method="train").training_steps == 60
    assert Settings(method="finetune").training_steps == 2000
