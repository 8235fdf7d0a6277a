"""From an objective and a draw of samples to the heads that ask the three models of a bench."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hf_bico.alignment.objectives.base import Head, Heads, OwnHead
from hf_bico.alignment.objectives.classification import ClassHead, carried_head, logistic_head, ridge_head
from hf_bico.alignment.objectives.clip import ContrastHead, ZeroShotHead, caption_head, zero_shot_head
from hf_bico.alignment.objectives.language import AnswerHead, LanguageHead
from hf_bico.bench import Bench
from hf_bico.classifiers import HeadForm, head_of, place_of
from hf_bico.data.dataset import DataSet
from hf_bico.data.draw import Drawn
from hf_bico.errors import ClassNamesError, DataUnknownError, UnsuitableMethodError, UnsupportedModelError
from hf_bico.hub.repo_metadata import only_count
from hf_bico.models.adapters.adapter import Adapter
from hf_bico.models.families.live import LiveModel
from hf_bico.models.inference import features_of
from hf_bico.models.model import Model
from hf_bico.outcomes import Outcome
from hf_bico.rounds import Round
from hf_bico.settings import Settings


def heads_of(bench: Bench, class_names: Sequence[str], drawn: Drawn | None) -> Heads:
    """The heads by the objective of the bench's settings, which is one that its models can give."""
    objective = bench.settings.objective
    if not isinstance(objective, str):
        own = OwnHead(objective)
        return Heads(own, own, own)
    return _BUILDERS[objective](bench, class_names, drawn)


def _zero_shot(bench: Bench, class_names: Sequence[str], drawn: Drawn | None) -> Heads:
    """The fine-tuned source has a text side of its own, which may differ."""
    if not class_names:
        raise ClassNamesError(
            "classes are asked by their names, and the data has neither labels nor names",
            "use data with labels; captions are asked by 'hf-bico port' with --method bico, theseus and the like",
        )
    templates = bench.settings.templates
    source, target = (zero_shot_head(model, class_names, templates) for model in (bench.source, bench.target))
    with bench.tuning.applied_to(bench.source.module):
        return Heads(source, target, zero_shot_head(bench.source, class_names, templates))


def _captions(bench: Bench, class_names: Sequence[str], drawn: Drawn | None) -> Heads:
    """What all pairs together teach each of them is found anew for each draw."""
    if drawn is None:
        raise ValueError("the contrastive objective is asked about samples")
    settings, labelled = bench.settings, drawn.data.labelled
    names = class_names if labelled else ()
    how = (drawn.samples, settings.batch, names, settings.templates)
    source, target = (caption_head(model, *how) for model in (bench.source, bench.target))
    return Heads(source, target, source)


def _language(bench: Bench, class_names: Sequence[str], drawn: Drawn | None) -> Heads:
    head = LanguageHead()
    return Heads(head, head, head)


def _answers(bench: Bench, class_names: Sequence[str], drawn: Drawn | None) -> Heads:
    head = AnswerHead(tuple(class_names))
    return Heads(head, head, head)


def _classification(bench: Bench, class_names: Sequence[str], drawn: Drawn | None) -> Heads:
    """Heads in closed form on the pretrained models' own features; of the fine-tuned source, the one that it has."""
    if drawn is None:
        raise ValueError("the heads of classifiers are fitted to samples")
    size, samples = bench.settings.batch, drawn.samples
    source, target = (features_of(model, samples, size) for model in (bench.source, bench.target))
    own = source_head(bench, class_names)
    labels: Sequence[int] = samples.labels
    if drawn.labels == "pseudo" or own is None:
        with bench.tuning.applied_to(bench.source.module):
            tuned = features_of(bench.source, samples, size)
        if own is None and drawn.labels == "pseudo":
            raise DataUnknownError(
                "the data has no labels, and the fine-tuned source has no head that could predict any",
                "use data with labels",
            )
        own = own or logistic_head(tuned, labels, len(class_names))
        labels = own.logits(tuned).argmax(-1).tolist() if drawn.labels == "pseudo" else labels
    ridges = [ridge_head(features, labels, len(class_names)) for features in (source, target)]
    return Heads(ridges[0], ridges[1], own)


def source_head(bench: Bench, class_names: Sequence[str]) -> ClassHead | None:
    """The head of the fine-tuned source, its classes in the data set's order; None where it has none."""
    lineage = bench.planned.lineage
    head = head_of(lineage.source, place_of(lineage.base))
    if head is not None and _reads_a_new_pooler(lineage.source, lineage.base):
        if bench.settings.fit_head:
            return None
        raise UnsuitableMethodError(
            "the fine-tuned source's head reads a pooler that its base lacks, so that it cannot be carried",
            "fit a head to the calibration samples with --probe",
        )
    return None if head is None else in_order(head, lineage.source.origin.class_names, class_names)


def _reads_a_new_pooler(source: Model | Adapter, base: Model) -> bool:
    own, before = (
        isinstance(model, Model) and any(site.role == "pooler" for site in model.layout.sites)
        for model in (source, base)
    )
    return own and not before


@dataclass(frozen=True)
class WrittenHead:
    """A classifier's head for the target, and whether it was "carried" from the source or "fitted" to the samples."""

    head: ClassHead
    origin: str


def head_form(found: WrittenHead, target: Model, class_names: Sequence[str]) -> HeadForm:
    """The head as it is written beside the target."""
    return HeadForm.of(found.head, target, class_names, found.origin)


def written_head(round: Round, outcome: Outcome) -> WrittenHead | None:
    """The head for the target with these changes; None where the objective is none of classifiers.

    The source's was tuned together with its features, and says little about pretrained ones. So it is carried by the
    map of the features that the target has with these changes to those of the fine-tuned source. What was trained keeps
    the head that it was trained with.
    """
    if round.settings.objective != "classification":
        return None
    bench, samples, size = round.bench, round.drawn_samples, round.settings.batch
    trained_with = round.heads.target
    if outcome.trained is not None and isinstance(trained_with, ClassHead):
        return WrittenHead(trained_with, "fitted")
    own = None if round.settings.fit_head else source_head(bench, round.class_names)
    changes = outcome.changes.renamed(bench.planned.lineage.target.layout.own_names)
    with changes.applied_to(bench.target.module):
        target = features_of(bench.target, samples, size)
    if own is None:
        return WrittenHead(logistic_head(target, samples.labels, len(round.class_names)), "fitted")
    with bench.tuning.applied_to(bench.source.module):
        source = features_of(bench.source, samples, size)
    return WrittenHead(carried_head(own, source, target), "carried")


def head_of_model(model: Model, holder: Model | Adapter, live: LiveModel, data: DataSet, settings: Settings) -> Head:
    """How a model is asked on its own, by what it brings along; a classifier's head may be an adapter's."""
    objective, names = settings.objective, data.class_names
    if objective == "language-modelling":
        return LanguageHead()
    if objective == "text-to-text":
        return AnswerHead(names)
    if objective == "classification":
        head = head_of(holder, place_of(model))
        if head is None:
            raise UnsupportedModelError(
                f"'{holder.name}' has no classification head", "measure it by a linear probe: --probe 100"
            )
        return in_order(head, holder.origin.class_names, names)
    if data.labelled:
        return zero_shot_head(live, names, settings.templates)
    return ContrastHead()


def in_order(head: ClassHead, own: Sequence[str] | None, class_names: Sequence[str]) -> ClassHead:
    """A head with its classes in the data set's order, by their names where these are the same."""
    if not class_names:
        raise ClassNamesError(
            "neither the data nor the fine-tuned model names the classes",
            "give a file with one class name a line: --class-names FILE (class_names=[...] in Python)",
        )
    own = list(own or ())
    if len(head.bias) != len(class_names):
        raise ClassNamesError(
            f"the fine-tuned model tells {len(head.bias)} classes apart, and the data set has {len(class_names)}",
            "use data with the model's own classes",
        )
    ours, theirs = _spelt_alike(own, class_names)
    if sorted(ours) == sorted(theirs) and len(set(ours)) == len(ours):
        return head.in_order([ours.index(name) for name in theirs])
    shared = [name for name in theirs if name in ours and len(ours) == len(theirs)]
    moved = [name for name in shared if ours.index(name) != theirs.index(name)]
    if moved:
        raise ClassNamesError(
            f"'{class_names[theirs.index(moved[0])]}' is class {ours.index(moved[0])} of the fine-tuned model and "
            f"{theirs.index(moved[0])} of the data set, and not all of their classes are the same",
            "use data with the model's own classes",
        )
    return head


def _spelt_alike(*sides: Sequence[str]) -> list[list[str]]:
    """Names of classes without what tells no class from another: capitals, and how words are joined; else as they are.

    >>> _spelt_alike(["LABEL_ONE", "Two"], ["two", "label one"])
    [['label one', 'two'], ['two', 'label one']]
    """
    alike = [[" ".join(re.split(r"[\s_-]+", name.strip().casefold())) for name in names] for names in sides]
    return alike if all(len(set(names)) == len(names) for names in alike) else [list(names) for names in sides]


def taken_in_order(own: Sequence[str], class_names: Sequence[str]) -> str | None:
    """A notice where a head's classes have other names than the data set's, and only their order pairs them."""
    ours, theirs = _spelt_alike(own, class_names)
    if not own or only_count(class_names) or sorted(ours) == sorted(theirs):
        return None
    first, other = (", ".join(names[:3]) + (", ..." if len(names) > 3 else "") for names in (own, class_names))
    return (
        f"The fine-tuned model's classes are called {first} and the data set's {other}: they were paired in this order."
    )


def tuned_target_head(bench: Bench, class_names: Sequence[str], pretrained: Head) -> Head:
    """That of the target while it is fine-tuned: its text side may differ, and nothing else."""
    if isinstance(pretrained, ZeroShotHead):
        return zero_shot_head(bench.target, class_names, bench.settings.templates)
    return pretrained


_BUILDERS: dict[str, Callable[[Bench, Sequence[str], Drawn | None], Heads]] = {
    "zero-shot": _zero_shot,
    "contrastive": _captions,
    "language-modelling": _language,
    "text-to-text": _answers,
    "classification": _classification,
}
