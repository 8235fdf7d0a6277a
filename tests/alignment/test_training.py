"""The two methods that train: against torch's own loop, interrupted and resumed, and leaving no trace."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from hf_bico.alignment.methods import finetuning
from hf_bico.alignment.methods.finetuning import Fewshot, Finetune, learning_rate_at, split_samples
from hf_bico.alignment.methods.saved_training import CHECKPOINT_ENTRY, CHECKPOINT_FILE
from hf_bico.alignment.methods.training import Trained, TrainingTask
from hf_bico.errors import DataError, NonFiniteWeightsError, ObjectiveError, OutputError, UsageError
from hf_bico.settings import Settings
from hf_bico.utils.progress import silent

CLASSES = 4


class Net(nn.Module):
    """A residual block between two layers, a scale without dimensions, and a head that no loss looks at."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 8), nn.LayerNorm(8)
        # stored the other way round, as some models have it
        self.turned = nn.Parameter((0.3 * torch.randn(8, 8)).T)
        self.last, self.unused = nn.Linear(8, CLASSES), nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.to(dtype)

    def forward(self, values: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(values))
        hidden = hidden + functional.gelu(self.norm(hidden) @ self.turned)
        logits: Tensor = self.scale * self.last(hidden)
        return logits


class Task:
    """A net with samples that it can learn, and a count of what was asked of it."""

    def __init__(self, size: int = 40, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.net = Net(dtype)
            self.values = torch.randn(size, 6, dtype=dtype)
            self.labels = (self.values @ torch.randn(6, CLASSES, dtype=dtype)).argmax(-1)
        self.asked: list[list[int]] = []
        self.tested: list[int] = []

    def loss(self, samples: Sequence[int]) -> Tensor:
        self.asked.append(list(samples))
        chosen = list(samples)
        return functional.cross_entropy(self.net(self.values[chosen]), self.labels[chosen], reduction="sum")

    def accuracy(self, samples: Sequence[int]) -> float:
        self.tested += samples
        chosen = list(samples)
        return (self.net(self.values[chosen]).argmax(-1) == self.labels[chosen]).double().mean().item()

    def training_task(self, identity: str = "a lesson") -> TrainingTask:
        return TrainingTask(dict(self.net.named_parameters()), self.loss, self.accuracy, len(self.labels), identity)


def options(**changed: Any) -> Settings:
    usual = {"train_steps": 12, "train_batch": 16, "warmup": 3, "learning_rate": 0.01, "seed": 5, "batch_size": 7}
    return Settings(**{**usual, **changed})


def same(left: Trained, right: Trained) -> bool:
    """Bit for bit."""
    about = (left.steps, left.samples, left.validation) == (right.steps, right.samples, right.validation)
    return (
        about
        and left.changes.keys() == right.changes.keys()
        and all(torch.equal(change, right.changes[name]) for name, change in left.changes.items())
    )


class Stopped(Exception):
    """Stands for whatever ends a run: Ctrl-C, a lost machine."""


def stop_at(step: int) -> Callable[[str, int, int], None]:
    def progress(stage: str, done: int, total: int) -> None:
        if done == step:
            raise Stopped

    return progress


@pytest.mark.parametrize("batch_size", [1, 7, 16, 40, 100])
def test_fewshot_is_one_plain_step_over_all_samples(batch_size: int) -> None:
    """Whatever the number of samples that go through the model at a time."""
    task, plain = Task(dtype=torch.float64), Task(dtype=torch.float64)
    trained = Fewshot(options(batch_size=batch_size, weight_decay=0.3)).train(task.training_task(), silent)

    before = {name: parameter.detach().clone() for name, parameter in plain.net.named_parameters()}
    optimizer = torch.optim.AdamW(plain.net.parameters(), lr=0.01, weight_decay=0.3)
    functional.cross_entropy(plain.net(plain.values), plain.labels).backward()
    optimizer.step()
    assert trained.changes.keys() == before.keys()
    for name, parameter in plain.net.named_parameters():
        assert torch.allclose(trained.changes[name], parameter.detach() - before[name], rtol=0, atol=1e-7), name
    assert (trained.steps, trained.samples, trained.validation) == (1, 40, None)
    assert list(chain.from_iterable(task.asked)) == list(range(40))
    assert max(len(part) for part in task.asked) <= batch_size


def test_a_parameter_without_gradient_is_left_alone() -> None:
    """As torch has it: no weight decay either."""
    trained = Fewshot(options()).train(Task().training_task(), silent)
    assert not trained.changes["unused.weight"].any()
    assert trained.changes["scale"].any()


def literally(task: Task, settings: Settings) -> tuple[dict[str, Tensor], list[int]]:
    """Fine-tuning written out: whole batches, torch's own backward pass, the order of samples as documented."""
    generator = torch.Generator().manual_seed(settings.seed)
    size = len(task.labels)
    shuffled = torch.randperm(size, generator=generator)
    held, kept = shuffled[: size // 10], shuffled[size // 10 :]
    batch = min(settings.train_batch, len(kept))
    before = {name: parameter.detach().clone() for name, parameter in task.net.named_parameters()}
    optimizer = torch.optim.AdamW(task.net.parameters(), lr=1.0, weight_decay=settings.weight_decay)
    waiting = torch.empty(0, dtype=torch.long)
    for step in range(settings.train_steps):
        while len(waiting) < batch:
            waiting = torch.cat([waiting, kept[torch.randperm(len(kept), generator=generator)]])
        now, waiting = waiting[:batch], waiting[batch:]
        if step < settings.warmup:
            share = (step + 1) / settings.warmup
        else:
            along = (step - settings.warmup) / (settings.train_steps - settings.warmup)
            share = (1 + math.cos(math.pi * along)) / 2
        optimizer.param_groups[0]["lr"] = settings.learning_rate * share
        optimizer.zero_grad()
        functional.cross_entropy(task.net(task.values[now]), task.labels[now]).backward()
        optimizer.step()
    after = dict(task.net.named_parameters())
    return {name: after[name].detach() - start for name, start in before.items()}, held.tolist()


@pytest.mark.parametrize(("size", "train_batch", "batch_size"), [(40, 16, 7), (40, 16, 16), (40, 500, 9), (23, 5, 2)])
def test_finetune_is_the_loop_written_out(size: int, train_batch: int, batch_size: int) -> None:
    """Over the ends of epochs, and with batches larger than all the samples."""
    settings = options(train_batch=train_batch, batch_size=batch_size)
    task, plain = Task(size, torch.float64), Task(size, torch.float64)
    trained = Finetune(settings).train(task.training_task(), silent)
    changes, held = literally(plain, settings)
    for name, change in changes.items():
        assert torch.allclose(trained.changes[name], change, rtol=0, atol=1e-9), name
    assert sorted(task.tested) == sorted(held)
    assert trained.validation == pytest.approx(plain.accuracy(held))
    assert (trained.steps, trained.samples) == (12, size - size // 10)


def test_batches_drop_nothing_and_repeat_nothing_within_an_epoch() -> None:
    task = Task(23)
    trained = Finetune(options(train_batch=5, batch_size=5, train_steps=21)).train(task.training_task(), silent)
    seen = list(chain.from_iterable(task.asked))
    training = set(range(23)) - set(task.tested)
    assert len(seen) == 21 * 5
    assert trained.samples == 21
    epochs = [seen[start : start + 21] for start in range(0, len(seen), 21)]
    assert all(set(epoch) == training for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == len(epochs)


def test_samples_that_no_step_reached_are_not_counted() -> None:
    trained = Finetune(options(train_batch=4, train_steps=2)).train(Task(40).training_task(), silent)
    assert trained.samples == 8


@pytest.mark.parametrize("size", [1, 9, 10, 11, 100, 1003])
def test_split_is_disjoint_and_complete(size: int) -> None:
    training, validation = split_samples(size, torch.Generator().manual_seed(1))
    assert sorted(training + validation) == list(range(size))
    assert len(validation) == size // 10


def test_split_follows_the_seed() -> None:
    ways = [split_samples(100, torch.Generator().manual_seed(seed))[1] for seed in (1, 1, 2)]
    assert ways[0] == ways[1] != ways[2]


def test_too_few_samples_to_validate() -> None:
    assert Finetune(options()).train(Task(9).training_task(), silent).validation is None


def test_rate_rises_in_a_line_and_falls_along_a_cosine() -> None:
    recipe = Settings(method="finetune")
    assert learning_rate_at(0, recipe) == pytest.approx(1e-5 / 200)
    assert learning_rate_at(99, recipe) == pytest.approx(0.5e-5)
    assert learning_rate_at(199, recipe) == learning_rate_at(200, recipe) == pytest.approx(1e-5)
    assert learning_rate_at(1100, recipe) == pytest.approx(0.5e-5)
    assert learning_rate_at(650, recipe) == pytest.approx(1e-5 * (1 + math.sqrt(0.5)) / 2)
    assert 0 < learning_rate_at(1999, recipe) < 1e-10
    assert learning_rate_at(2000, recipe) == 0


@pytest.mark.parametrize(("steps", "warmup"), [(5, 200), (5, 5), (1, 1), (1, 0), (5, 0), (5, 4)])
def test_rate_is_defined_whatever_the_warmup(steps: int, warmup: int) -> None:
    settings = options(train_steps=steps, warmup=warmup, learning_rate=2.0)
    rates = [learning_rate_at(step, settings) for step in range(steps)]
    assert all(0 < rate <= 2.0 for rate in rates)
    assert max(rates) == pytest.approx(2.0)


def test_training_reduces_the_loss() -> None:
    task = Task(200)
    settings = options(train_steps=150, train_batch=32, batch_size=32, learning_rate=0.02)
    before = task.loss(range(200)).item()
    trained = Finetune(settings).train(task.training_task(), silent)
    with torch.no_grad():
        for name, parameter in task.net.named_parameters():
            parameter += trained.changes[name]
    assert task.loss(range(200)).item() < 0.3 * before
    assert trained.validation is not None
    assert trained.validation > 0.7


def test_one_step_reduces_the_loss() -> None:
    task = Task()
    before = task.loss(range(40)).item()
    trained = Fewshot(options()).train(task.training_task(), silent)
    with torch.no_grad():
        for name, parameter in task.net.named_parameters():
            parameter += trained.changes[name]
    assert task.loss(range(40)).item() < before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_interrupted_and_resumed_is_undisturbed(tmp_path: Path, dtype: torch.dtype) -> None:
    """Twice, at steps between checkpoints; only what came after the last checkpoint is done again."""
    settings = options(train_steps=230, checkpoint=str(tmp_path / "saved"), batch_size=16)
    whole = Finetune(replace(settings, checkpoint=None)).train(Task(dtype=dtype).training_task(), silent)

    calls = []
    for step in (130, 205):
        task = Task(dtype=dtype)
        with pytest.raises(Stopped):
            Finetune(settings).train(task.training_task(), stop_at(step))
        calls.append(len(task.asked))
    task = Task(dtype=dtype)
    steps: list[int] = []
    resumed = Finetune(settings).train(task.training_task(), lambda stage, done, total: steps.append(done))
    assert same(resumed, whole)
    assert calls == [130, 105]
    assert len(task.asked) == 30
    assert steps == list(range(200, 231))


def test_finished_training_is_not_done_again(tmp_path: Path) -> None:
    settings = options(checkpoint=str(tmp_path / "saved"))
    first, again = Task(), Task()
    whole = Finetune(settings).train(first.training_task(), silent)
    assert same(Finetune(settings).train(again.training_task(), silent), whole)
    assert again.asked == []
    assert again.net.state_dict().keys() == first.net.state_dict().keys()
    assert all(torch.equal(value, again.net.state_dict()[name]) for name, value in first.net.state_dict().items())


def test_resumed_with_smaller_parts_is_the_same_training(tmp_path: Path) -> None:
    """Where memory was short, fewer samples at a time go on with what there is."""
    settings = options(train_steps=120, checkpoint=str(tmp_path))
    whole = Finetune(replace(settings, checkpoint=None)).train(Task(dtype=torch.float64).training_task(), silent)
    with pytest.raises(Stopped):
        Finetune(settings).train(Task(dtype=torch.float64).training_task(), stop_at(110))
    resumed = Finetune(replace(settings, batch_size=2)).train(Task(dtype=torch.float64).training_task(), silent)
    for name, change in whole.changes.items():
        assert torch.allclose(resumed.changes[name], change, rtol=0, atol=1e-9), name


def test_narrow_parameters_take_steps_below_their_rounding() -> None:
    """bfloat16 cannot hold 1 + 1e-4; the change does."""
    task = Task(dtype=torch.bfloat16)
    settings = options(learning_rate=1e-4, warmup=0, train_steps=3)
    trained = Finetune(settings).train(task.training_task(), silent)
    moved = trained.changes["norm.weight"]
    assert moved.dtype == torch.float32
    assert (moved.abs() > 0).all()
    assert (moved.abs() < 4e-4).all()


@pytest.mark.parametrize("method", [Fewshot, Finetune])
@pytest.mark.parametrize("fault", [None, "loss", "progress"])
def test_everything_is_as_it_was(method: type[Fewshot] | type[Finetune], fault: str | None) -> None:
    """Values, where they lie, flags, gradients, the random state and the gradient mode, also after an error."""
    task = Task()
    training_task = task.training_task()
    parameters = dict(task.net.named_parameters())
    for name in ("first.weight", "scale"):
        parameters[name].requires_grad_(False)
    parameters["last.bias"].grad = torch.ones(CLASSES)
    flags = {name: parameter.requires_grad for name, parameter in parameters.items()}
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    memory = {name: parameter.data_ptr() for name, parameter in parameters.items()}
    random = torch.get_rng_state()

    def failing(samples: Sequence[int]) -> Tensor:
        if len(task.asked) == 5:
            raise Stopped
        return task.loss(samples)

    trainer = method(options(batch_size=7 if fault != "progress" else 40))
    with torch.no_grad():
        if fault is None:
            trainer.train(training_task, silent)
        else:
            with pytest.raises(Stopped):
                trainer.train(replace(training_task, loss=failing if fault == "loss" else task.loss), stop_at(1))
        assert not torch.is_grad_enabled()
    assert task.asked
    for name, parameter in task.net.named_parameters():
        assert torch.equal(parameter, before[name]), name
        assert parameter.data_ptr() == memory[name]
        assert parameter.requires_grad == flags[name], name
        assert (parameter.grad is not None) == (name == "last.bias")
    assert torch.equal(parameters["last.bias"].grad, torch.ones(CLASSES))
    assert torch.equal(torch.get_rng_state(), random)


def test_frozen_parameters_are_trained() -> None:
    task, frozen = Task(), Task()
    frozen.net.requires_grad_(False)
    settings = options()
    assert same(
        Finetune(settings).train(frozen.training_task(), silent), Finetune(settings).train(task.training_task(), silent)
    )


def test_parameters_outside_the_lesson_stay(tmp_path: Path) -> None:
    task = Task()
    training_task = replace(task.training_task(), parameters={"last.weight": task.net.last.weight})
    before = {name: value.clone() for name, value in task.net.state_dict().items()}
    moved: list[str] = []

    def progress(stage: str, done: int, total: int) -> None:
        moved[:] = [name for name, value in task.net.state_dict().items() if not torch.equal(value, before[name])]

    trained = Finetune(options(checkpoint=str(tmp_path))).train(training_task, progress)
    assert moved == ["last.weight"] == list(trained.changes)


def saved_training(folder: Path, **changed: Any) -> Settings:
    settings = options(checkpoint=str(folder), **changed)
    Finetune(settings).train(Task().training_task(), silent)
    return settings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("train_steps", 13), ("train_batch", 17), ("warmup", 4)),
        *(("learning_rate", 0.02), ("weight_decay", 0.2), ("seed", 6)),
    ],
)
def test_checkpoint_of_another_recipe_is_refused(tmp_path: Path, name: str, value: float) -> None:
    settings = saved_training(tmp_path)
    task = Task()
    with pytest.raises(UsageError, match=f"another training: {name} is .* there and {value} here") as refused:
        Finetune(replace(settings, **{name: value})).train(task.training_task(), silent)
    assert "--checkpoint" in refused.value.remedy
    assert task.asked == []


def test_checkpoint_of_another_lesson_is_refused(tmp_path: Path) -> None:
    settings = saved_training(tmp_path)
    with pytest.raises(UsageError, match="another training: its models, samples or settings differ"):
        Finetune(settings).train(Task().training_task("another lesson"), silent)
    with pytest.raises(UsageError, match="another training: samples is 40 there and 41 here"):
        Finetune(settings).train(Task(41).training_task(), silent)


def test_checkpoint_of_other_parameters_is_refused(tmp_path: Path) -> None:
    """Should two lessons have one identity."""
    settings, task = saved_training(tmp_path), Task()
    fewer = replace(task.training_task(), parameters={"scale": task.net.scale})
    for training_task, why in ((fewer, "not those"), (Task(dtype=torch.float64).training_task(), "fits no weight")):
        with pytest.raises(UsageError, match=why):
            Finetune(settings).train(training_task, silent)


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def _empty(file: Path) -> None:
    file.write_bytes(b"")


def _foreign(file: Path) -> None:
    save_file({"weight": torch.ones(2)}, file)


def _without_averages(file: Path) -> None:
    with safe_open(file, framework="pt") as reader:
        about = reader.metadata()
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    save_file({name: tensor for name, tensor in tensors.items() if "exp_avg/" not in name}, file, metadata=about)


def _no_object(file: Path) -> None:
    save_file({"weight": torch.ones(2)}, file, metadata={CHECKPOINT_ENTRY: "[]"})


@pytest.mark.parametrize("damage", [_cut, _empty, _foreign, _without_averages, _no_object])
def test_broken_checkpoint_is_refused(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    settings, task = saved_training(tmp_path), Task()
    before = {name: value.clone() for name, value in task.net.state_dict().items()}
    damage(tmp_path / CHECKPOINT_FILE)
    damaged = (tmp_path / CHECKPOINT_FILE).read_bytes()
    with pytest.raises(UsageError, match=r"training\.safetensors' is broken") as refused:
        Finetune(settings).train(task.training_task(), silent)
    assert "--checkpoint" in refused.value.remedy
    assert (tmp_path / CHECKPOINT_FILE).read_bytes() == damaged
    assert all(torch.equal(value, before[name]) for name, value in task.net.state_dict().items())


def test_checkpoint_that_is_a_file_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    task = Task()
    for place in ("file", "file/below"):
        with pytest.raises(OutputError, match="no checkpoint can be written"):
            Finetune(options(checkpoint=str(tmp_path / place))).train(task.training_task(), silent)
    assert task.asked == []
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("moment", ["writing", "renaming"])
def test_half_written_checkpoint_is_never_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """The second of two saves fails: the first is still there, whole, and the training goes on from it."""
    monkeypatch.setattr(finetuning, "CHECKPOINT_EVERY", 10)
    settings = options(train_steps=23, checkpoint=str(tmp_path))
    whole = Finetune(replace(settings, checkpoint=None)).train(Task().training_task(), silent)
    saves: list[Path] = []

    def half(tensors: dict[str, Tensor], file: Path, metadata: dict[str, str]) -> None:
        saves.append(file)
        save_file(tensors, file, metadata=metadata)
        if len(saves) == 2 and moment == "writing":
            file.write_bytes(file.read_bytes()[:200])
            raise OSError(28, "No space left on device")

    def lost(number: int) -> None:
        if len(saves) == 2 and moment == "renaming":
            raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("hf_bico.alignment.methods.saved_training.save_file", half)
        patch.setattr(os, "fsync", lost)
        with pytest.raises(OutputError, match=r"cannot be written: .*(No space|Input/output)"):
            Finetune(settings).train(Task().training_task(), silent)
    assert [path.name for path in tmp_path.iterdir()] == [CHECKPOINT_FILE]
    with safe_open(tmp_path / CHECKPOINT_FILE, framework="pt") as saved:
        assert json.loads(saved.metadata()[CHECKPOINT_ENTRY])["steps"] == 10
    assert same(Finetune(settings).train(Task().training_task(), silent), whole)


def test_what_a_killed_run_was_writing_is_not_read(tmp_path: Path) -> None:
    settings = options(checkpoint=str(tmp_path))
    (tmp_path / CHECKPOINT_FILE).with_suffix(".part").write_bytes(b"half")
    trained = Finetune(settings).train(Task().training_task(), silent)
    assert same(trained, Finetune(replace(settings, checkpoint=None)).train(Task().training_task(), silent))
    assert [path.name for path in tmp_path.iterdir()] == [CHECKPOINT_FILE]


@pytest.mark.parametrize("method", [Fewshot, Finetune])
def test_loss_that_is_not_finite_at_once(method: type[Fewshot] | type[Finetune]) -> None:
    task = Task()
    task.values[:, 3] = math.nan
    with pytest.raises(NonFiniteWeightsError, match="the loss in training step 1 is not finite") as found:
        method(options()).train(task.training_task(), silent)
    assert "check" in found.value.remedy


def test_gradient_that_is_not_finite() -> None:
    """The root has no slope at 0."""
    weight = nn.Parameter(torch.zeros(1))
    training_task = TrainingTask({"weight": weight}, lambda samples: weight.sqrt().sum(), lambda samples: 0.0, 3)
    with pytest.raises(NonFiniteWeightsError, match="the gradient in training step 1 is not finite"):
        Fewshot(options()).train(training_task, silent)


def test_training_that_diverges_says_so(tmp_path: Path) -> None:
    """And leaves no checkpoint of it behind."""
    task = Task()
    settings = options(learning_rate=1e30, warmup=0, checkpoint=str(tmp_path))
    with pytest.raises(NonFiniteWeightsError, match="not finite") as found:
        Finetune(settings).train(task.training_task(), silent)
    assert "--learning-rate" in found.value.remedy
    assert list(tmp_path.iterdir()) == []


def test_loss_without_a_graph_is_refused() -> None:
    training_task = replace(Task().training_task(), loss=lambda samples: torch.tensor(1.0))
    with pytest.raises(ObjectiveError, match="no trained parameter"):
        Fewshot(options()).train(training_task, silent)


def test_no_samples() -> None:
    with pytest.raises(DataError, match="no sample"):
        Task(0).training_task()


def test_where_memory_runs_out_fewer_samples_go_at_a_time() -> None:
    """The step that failed is done again, and later ones do not try what failed."""
    roomy, tight = Task(dtype=torch.float64), Task(dtype=torch.float64)
    failures = 0

    def loss(samples: Sequence[int]) -> Tensor:
        nonlocal failures
        if len(samples) > 4:
            failures += 1
            raise torch.OutOfMemoryError
        return tight.loss(samples)

    settings = options(batch_size=16)
    trained = Finetune(settings).train(replace(tight.training_task(), loss=loss), silent)
    whole = Finetune(settings).train(roomy.training_task(), silent)
    for name, change in whole.changes.items():
        assert torch.allclose(trained.changes[name], change, rtol=0, atol=1e-9), name
    assert failures == 2
