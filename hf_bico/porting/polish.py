"""Polishes a port: trains what was carried for a few steps towards the fine-tuned source's predictions.

After the last step the readout is corrected, where there is one. Samples left out choose the learning rate, stop the
training and judge the readout; they also say what the polish is worth, and one that does not help them is dropped. Does
not evaluate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hf_bico.alignment.methods.base import SiteDelta, TransportedSite
from hf_bico.alignment.methods.brief import train_briefly
from hf_bico.alignment.methods.training import Trained
from hf_bico.alignment.objectives.base import Head
from hf_bico.alignment.objectives.clip import ZeroShotHead
from hf_bico.alignment.readout import Readout
from hf_bico.alignment.scaling import Estimate, SampleScores, outlook
from hf_bico.alignment.transport import assemble_changes
from hf_bico.models.deltas import Deltas
from hf_bico.models.layout import SitePair
from hf_bico.models.low_rank import is_zero
from hf_bico.porting.calibration import Calibration
from hf_bico.porting.heads import TargetHead, target_head
from hf_bico.porting.model_pair import ModelPair
from hf_bico.porting.training_tasks import SOURCE, BriefLesson, start_of, stored_changes
from hf_bico.settings import VETO, Settings, polish_veto

NOTHING = Deltas({})


@dataclass(frozen=True)
class Polished:
    """A polished change, and what samples that were left out of it say.

    `gain` is theirs over the untouched target, `carried` and `polished` their mean losses before and after; all are
    None where no sample could be left out. `helped` is False for a polish that was dropped. It is `alone` if it began
    at the untouched target, because what was carried is held back.
    """

    changes: Deltas
    trained: Trained
    unlabelled: int
    helped: bool
    readout: Readout | None = None
    gain: Estimate | None = None
    carried: float | None = None
    polished: float | None = None
    head: TargetHead | None = None
    alone: bool = False


def readout_change(models: ModelPair, readout: Readout) -> Deltas:
    """Return a readout's correction as a change of the target's tensors."""
    target = models.lineage.target
    site = target.layout.site("proj")
    carried = {site.name: TransportedSite(SiteDelta(readout.change))}
    return assemble_changes(carried, [SitePair(site, site)], target.checkpoint, alpha=1.0)


def polish(changes: Deltas, calibration: Calibration, settings: Settings, rank: int | None) -> Polished:
    """Polish carried changes: all of their weights, or with a `rank` their factors."""
    models = calibration.models
    with calibration.watch("polish"):
        head = target_head(calibration, changes)
        lesson = BriefLesson(calibration, calibration.heads.target if head is None else head.head, settings.polish_on)
        lesson.require()
        start = start_of(models, changes, rank, settings)
        readouts = _Readouts.of(calibration, lesson.head, settings.polish_on)
        own = dict(models.target.module.named_parameters())
        places = dict.fromkeys((*start, *(readouts.parameters if readouts is not None else ())))
        with models.target.quiet(), lesson.asking_source():
            task = lesson.task({name: own[name] for name in places}, start)
            task = task if readouts is None else replace(task, finish=readouts.correct)
            trained = train_briefly(task, settings, settings.polish_steps, calibration.watch.progress)
        found = stored_changes(models, {n: c for n, c in trained.changes.items() if not is_zero(c)})
        readout = readouts.last if readouts is not None and trained.finished else None
        result = Polished(found, trained, lesson.size - len(calibration.drawn_samples), False, readout, head=head)
        if trained.left_out is None:
            return result
        numbers, after = trained.left_out.samples, trained.left_out.after
        carried = _scores(lesson, numbers, stored_changes(models, start))
        bare = target_head(calibration, NOTHING)
        untouched = _scores(replace(lesson, head=lesson.head if bare is None else bare.head), numbers, NOTHING)
        changed, gain = bool(trained.steps) or trained.finished, outlook(untouched, after)
        helped = changed and Estimate.of(carried.losses - after.losses).is_above_zero(VETO)
        helped = helped and (gain.is_above_zero(polish_veto(lesson.size, settings.bold)) or not settings.finds_alpha)
        return replace(
            result,
            helped=helped,
            gain=gain if helped else outlook(untouched, carried),
            carried=float(carried.losses.mean()),
            polished=float(after.losses.mean()),
        )


def _scores(lesson: BriefLesson, numbers: Sequence[int], changes: Deltas) -> SampleScores:
    """Score the target with these changes on some samples."""
    models, size = lesson.models, lesson.calibration.settings.batch
    with torch.no_grad(), models.with_changes(changes), models.target.quiet(), lesson.asking_source():
        parts = [lesson.scores(numbers[first : first + size]) for first in range(0, len(numbers), size)]
    found = SampleScores.joined(parts)
    accuracies = None if found.accuracies is None else found.accuracies.cpu()
    return SampleScores(found.losses.cpu(), accuracies)


@dataclass
class _Readouts:
    """Corrects the readout of the loaded target as it is, towards the source's predictions of some samples."""

    calibration: Calibration
    last: Readout | None = field(default=None, init=False)
    """The last correction."""

    @classmethod
    def of(cls, calibration: Calibration, head: Head, toward: str) -> _Readouts | None:
        """Return None where there is nothing to correct: no final projection, or labels to learn."""
        sites = calibration.models.lineage.target.layout.main_sites
        has_projection = any(site.role == "proj" for site in sites)
        return cls(calibration) if toward == SOURCE and has_projection and isinstance(head, ZeroShotHead) else None

    @property
    def parameters(self) -> list[str]:
        """The names of what it changes, in the loaded target."""
        layout = self.calibration.models.lineage.target.layout
        return [layout.own_names.get(slot.tensor, slot.tensor) for slot in layout.site("proj").slots[:1]]

    def correct(self, samples: Sequence[int]) -> dict[str, Tensor]:
        """Return the correction that some samples give, by the loaded target's names."""
        self.last = self.calibration.readout_problem(NOTHING).solve(samples)
        if not self.last.accepted:
            return {}
        models = self.calibration.models
        return dict(readout_change(models, self.last).renamed(models.lineage.target.layout.own_names).items())
