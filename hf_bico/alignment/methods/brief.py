"""Train for a few steps, by a learning rate and a number of steps that samples left out choose.

Rates are tried on folds: a fifth of the samples is left out, the others are trained on, and the left-out ones are
scored on the way. The rate and the number of steps with the smallest left-out loss are then used on all samples; where
no step helps the left-out ones clearly, none is taken. If the task ends with a last change, the left-out samples are
scored with it and without it. Knows a training task; not models or data sets.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, count, islice
from math import ceil, inf, isfinite
from time import monotonic
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_bico.alignment.methods.base import Trainer
from hf_bico.alignment.methods.finetuning import batches, scheduled_rate
from hf_bico.alignment.methods.saved_training import SavedTraining
from hf_bico.alignment.methods.training import Learner, LeftOut, Trained, TrainingTask, learner_for
from hf_bico.alignment.scaling import Estimate, SampleScores
from hf_bico.errors import NonFiniteWeightsError
from hf_bico.models.low_rank import Change, total
from hf_bico.settings import VETO, Settings
from hf_bico.utils.progress import Progress

FOLDS = 5
"""Into so many parts the samples are split; one of them is left out at a time."""
ENOUGH_LEFT_OUT = 40
"""With so many samples left out, further parts are not tried."""
ENOUGH_FOR_RATE = 20
"""With so many samples left out, the learning rate is chosen; the other parts are trained at that rate alone."""
RATES = tuple(round(10 ** (power / 2), 8) for power in range(-10, -3))
"""Learning rates to try: 1e-5 to 1e-2, a factor of the root of 10 apart."""
CHECKS, CHECKS_OF_FINISH = 20, 4
"""How often the left-out samples are scored on the way, at most: as they are, and with the task's last change too."""
SAVE_AFTER = 30.0
"""Seconds between two checkpoints of a run; a finished run is saved at once."""
WARMUP_PART = 10
"""The learning rate rises over one step in so many."""


Check = tuple[int, bool]
"""When left-out samples are scored: after so many steps, and whether with the task's last change."""
START: Check = (0, False)


class BriefTrainer(Trainer):
    """Trains the target for a few steps on the calibration samples."""

    keeps_factors = True
    toward: ClassVar[str] = "labels"
    """What it learns: the samples' "labels", or the predictions of the fine-tuned "source"."""

    def train(self, training_task: TrainingTask, progress: Progress) -> Trained:
        return train_briefly(training_task, self.settings, self.settings.training_steps, progress)


class Train(BriefTrainer):
    """Learns the samples' labels, or their texts."""


class Distill(BriefTrainer):
    """Learns the fine-tuned source's predictions."""

    toward = "source"


def train_briefly(training_task: TrainingTask, settings: Settings, steps: int, progress: Progress) -> Trained:
    """Train for at most so many steps; the result has none where the left-out samples do not gain by any."""
    runs = Runs(training_task, settings, steps, progress)
    folds = left_out_folds(training_task.size, settings.seed)
    everything = tuple(range(training_task.size))
    if not folds:
        return Trained(runs.final(everything, 0, 0.0, finish=False), 0, training_task.size, None)
    first = ceil(ENOUGH_FOR_RATE / len(folds[0]))
    rate = _best_rate(settings, lambda rate: runs.scores(rate, folds[:first]))
    checks = runs.scores(rate, folds)
    best, numbers = min(checks, key=lambda check: _mean_loss(checks[check])), tuple(chain.from_iterable(folds))
    if training_task.judges:
        halves = training_task.judges[::2], training_task.judges[1::2]
        checks, numbers = runs.scores(rate, halves, "judged "), tuple(chain.from_iterable(halves))
        best = best if best in checks else START
    before = checks[START]
    if not Estimate.of(before.losses - checks[best].losses).is_above_zero(VETO):
        best = START
    (taken, finish), after = best, checks[best]
    return Trained(
        runs.final(everything, taken, rate, finish),
        steps=taken,
        samples=training_task.size,
        validation=None if after.accuracies is None else float(after.accuracies.mean()),
        rate=rate,
        left_out=LeftOut(numbers, before, after),
        finished=finish,
    )


def left_out_folds(size: int, seed: int) -> list[tuple[int, ...]]:
    """Return the samples to leave out, one part after another: a fifth each, until enough samples are in one of them.

    >>> [len(fold) for fold in left_out_folds(100, seed=0)], [len(fold) for fold in left_out_folds(10, seed=0)]
    ([20, 20], [2, 2, 2, 2, 2])
    """
    if size < 2:
        return []
    parts = min(FOLDS, size)
    shuffled: list[int] = torch.randperm(size, generator=torch.Generator().manual_seed(seed)).tolist()
    return [tuple(sorted(shuffled[part::parts])) for part in range(min(parts, ceil(ENOUGH_LEFT_OUT * parts / size)))]


def _best_rate(settings: Settings, scores: Callable[[float], dict[Check, SampleScores]]) -> float:
    """Return the learning rate whose run has the smallest left-out loss on its way.

    The powers of ten are tried first, then the neighbours of the best one. A rate that was asked for is taken.
    """
    if settings.learning_rate is not None:
        return settings.learning_rate
    tried = {rate: scores(rate) for rate in RATES[::2]}

    def best() -> float:
        return min(tried, key=lambda rate: min(map(_mean_loss, tried[rate].values())))

    place = RATES.index(best())
    tried |= {RATES[near]: scores(RATES[near]) for near in (place - 1, place + 1) if 0 <= near < len(RATES)}
    return best()


def _mean_loss(scores: SampleScores) -> float:
    mean = float(scores.losses.mean())
    return mean if isfinite(mean) else inf


@dataclass
class Runs:
    """The runs of one brief training, each on some samples at one rate; finished ones are known from its checkpoint."""

    training_task: TrainingTask
    settings: Settings
    steps: int
    progress: Progress
    _saved: SavedTraining | None = field(default=None, init=False)
    _finished: dict[str, dict[Check, SampleScores]] = field(default_factory=dict, init=False)
    _resumed: tuple[str, dict[Check, SampleScores], int, dict[str, Tensor]] | None = field(default=None, init=False)
    _saved_at: float = field(default_factory=monotonic, init=False)

    def __post_init__(self) -> None:
        settings = self.settings
        if settings.checkpoint is None:
            return
        names = ("learning_rate", "weight_decay", "train_batch", "seed")
        recipe = {"steps": self.steps, **{name: getattr(settings, name) for name in names}}
        self._saved = SavedTraining.of(self.training_task, settings.checkpoint, recipe)
        found = self._saved.load()
        if found is None:
            return
        about, tensors = found
        try:
            self._finished = {name: _read(checks) for name, checks in about["finished"].items()}
            if about["running"] is not None:
                self._resumed = (about["running"], _read(about["checks"]), int(about["steps"]), tensors)
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise self._saved.broken(error) from error

    def scores(self, rate: float, folds: Sequence[tuple[int, ...]], kind: str = "") -> dict[Check, SampleScores]:
        """Return the left-out samples' scores on the way at a rate, one fold after another; `kind` names the folds."""
        names = (f"{rate:g}, {kind}fold {number}" for number in count())
        parts = [self._left_out(name, fold, rate) for name, fold in zip(names, folds, strict=False) if fold]
        shared = set.intersection(*(set(part) for part in parts))
        return {check: SampleScores.joined([part[check] for part in parts]) for check in sorted(shared)}

    def _left_out(self, name: str, fold: tuple[int, ...], rate: float) -> dict[Check, SampleScores]:
        """Train on all samples but those of a fold, and score these on the way; a finished run is remembered."""
        if name in self._finished:
            return self._finished[name]
        left_out, finish = set(fold), self.training_task.finish
        rest = [sample for sample in range(self.training_task.size) if sample not in left_out]
        every = max(1, ceil(self.steps / (CHECKS if finish is None else CHECKS_OF_FINISH)))
        checks = dict[Check, SampleScores]()

        def check(learner: Learner) -> None:
            if learner.steps % every and learner.steps != self.steps:
                return
            checks[learner.steps, False] = _plain(learner.scores(fold))
            if finish is not None:
                checks[learner.steps, True] = _plain(learner.scores(fold, finish(rest)))

        try:
            with self._trained(name, rest, self.steps, rate, check, checks):
                pass
        except NonFiniteWeightsError:
            if not checks or rate == self.settings.learning_rate:  # else it is only too large
                raise
        self._finished[name] = checks
        self._save(None, checks, name=None)
        return checks

    def final(self, samples: Sequence[int], steps: int, rate: float, finish: bool) -> dict[str, Change]:
        """Return the changes of a training on all samples, with the task's last change if it helps."""
        task, last = self.training_task, dict[str, Change]()
        with self._trained("all", samples, steps, rate) as learner:
            changes = learner.changes()
            if finish and task.finish is not None:
                last = dict(task.finish(samples))
        where = {name: changes[name].device for name in last}
        return changes | {name: total([changes[name], change.to(where[name])]) for name, change in last.items()}

    @contextmanager
    def _trained(
        self,
        name: str,
        samples: Sequence[int],
        steps: int,
        rate: float,
        check: Callable[[Learner], None] = lambda learner: None,
        checks: dict[Check, SampleScores] | None = None,
    ) -> Iterator[Learner]:
        """Take so many steps on some samples, with a `check` after each; yield the model in this state."""
        task, settings, seen = self.training_task, self.settings, {} if checks is None else checks
        order = batches(samples, settings.train_batch, torch.Generator().manual_seed(settings.seed))
        with learner_for(task, settings) as learner:
            self._resume(name, learner, seen)
            self.progress("train", learner.steps, max(1, steps))
            if learner.steps == 0:
                check(learner)
            for batch in islice(order, learner.steps, steps):
                learner.step(batch, scheduled_rate(learner.steps, self.steps, self.steps // WARMUP_PART, rate))
                check(learner)
                self.progress("train", learner.steps, max(1, steps))
                if monotonic() - self._saved_at >= SAVE_AFTER:
                    self._save(learner, seen, name)
            yield learner

    def _resume(self, name: str, learner: Learner, checks: dict[Check, SampleScores]) -> None:
        if self._resumed is None or self._saved is None or self._resumed[0] != name:
            return
        _, seen, steps, tensors = self._resumed
        try:
            learner.load_state(tensors, steps)
        except (KeyError, ValueError) as error:
            raise self._saved.broken(error) from error
        checks.update(seen)
        self._resumed = None

    def _save(self, learner: Learner | None, checks: dict[Check, SampleScores], name: str | None) -> None:
        if self._saved is None:
            return
        finished = {one: _written(known) for one, known in self._finished.items()}
        progress = {"finished": finished, "running": name, "checks": {}, "steps": 0}
        if learner is not None:
            progress |= {"checks": _written(checks), "steps": learner.steps}
        self._saved.save({} if learner is None else learner.state(), **progress)
        self._saved_at = monotonic()


def _plain(scores: SampleScores) -> SampleScores:
    """Return losses and accuracies in double and in main memory, as they come back from a file."""
    accuracies = None if scores.accuracies is None else scores.accuracies.detach().cpu().double()
    return SampleScores(scores.losses.detach().cpu().double(), accuracies)


def _written(checks: dict[Check, SampleScores]) -> dict[str, Any]:
    return {
        json.dumps(check): [scores.losses.tolist(), None if scores.accuracies is None else scores.accuracies.tolist()]
        for check, scores in checks.items()
    }


def _read(checks: dict[str, Any]) -> dict[Check, SampleScores]:
    def tensor(values: Any) -> Tensor | None:
        return None if values is None else torch.tensor(values, dtype=torch.float64)

    read = {_read_check(name): (tensor(losses), tensor(right)) for name, (losses, right) in checks.items()}
    return {check: SampleScores(losses, right) for check, (losses, right) in read.items() if losses is not None}


def _read_check(name: str) -> Check:
    steps, finished = json.loads(name)
    return int(steps), bool(finished)
