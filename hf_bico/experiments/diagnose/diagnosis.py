"""Diagnosis: tables and files.

A diagnosis as rows of text: what was found in every block, and what a port costs.

A diagnosis as a result: read, written, and shown as tables and pictures; measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from hf_bico.errors import OutputExistsError, RecordError, UsageError
from hf_bico.experiments.compare.cells import method_label
from hf_bico.experiments.diagnose.findings import SCHEMA as SCHEMA
from hf_bico.experiments.diagnose.findings import (
    UNTOUCHED,
    Cost,
    DiagnosisFindings,
    Drift,
    InputLikeness,
    OutputLikeness,
    SitePlace,
    by_place,
)
from hf_bico.experiments.diagnose.pictures import (
    drift_picture,
    initial_picture,
    outputs_picture,
    similarity_picture,
    sites_picture,
)
from hf_bico.models.layout import TEXT_SIDE
from hf_bico.reports.pictures import block_of, is_of_text_tower
from hf_bico.reports.record import SiteRecord
from hf_bico.runtime.library_errors import translate_errors
from hf_bico.runtime.output import atomic_folder, locked_folder, read_text, require_free, write_files
from hf_bico.utils.files import from_plain, parse_json, to_plain
from hf_bico.utils.text import format_table, markdown_table, plain

NOT_DEFINED = "n/a"


def block_rows(found: DiagnosisFindings) -> list[list[str]]:
    """A head, and a row for each block: likeness before and after the map, the sites' scores, and the drift."""
    last = found.checkpoints[-1] if found.checkpoints else None
    drifted = [one for one in found.drift if one.checkpoint == last]
    columns: dict[str, Mapping[SitePlace, float]] = {
        "CKA": by_place(found.inputs, lambda one: one.cka),
        "CKA aligned": by_place(found.inputs, lambda one: one.cka_aligned),
        "cosine": by_place(found.inputs, lambda one: one.cosine),
        "cosine aligned": by_place(found.inputs, lambda one: one.cosine_aligned),
    }
    places = list(dict.fromkeys(one.place for one in found.inputs))
    scores = {"score in": "score_in", "score out": "score_out", "unseen": "unseen"}
    at: dict[SitePlace, list[SiteRecord]] = {}
    for site in found.sites:
        tower = TEXT_SIDE if is_of_text_tower(site) else ""
        at.setdefault(SitePlace(tower, block_of(site)), []).append(site)
    rows = [["block", *columns, *scores, "energy", "Δdirection", "Δmagnitude"]]
    for place in places:
        sites = at.get(place, [])
        shown = [_number(column.get(place)) for column in columns.values()]
        for name in scores.values():
            values = [value for site in sites if (value := getattr(site, name)) is not None]
            shown.append(_number(sum(values) / len(values) if values else None, percent=name == "unseen"))
        shown.append(_number(sum({site.source: site.energy for site in sites}.values()), percent=True))
        taken = {one.source for one in found.inputs if one.place == place}
        moved = [one for one in drifted if one.name in taken]
        for values in ([one.direction for one in moved], [one.magnitude for one in moved]):
            shown.append(_number(fmean(values) if values else None))
        rows.append([place.label, *shown])
    return rows


def output_rows(found: DiagnosisFindings) -> list[list[str]]:
    """A head, and a row for each block: the cosine of every model's outputs to the fine-tuned target's."""
    if not found.outputs:
        return []
    means = {
        model: by_place([one for one in found.outputs if one.model == model], lambda one: one.cosine)
        for model in found.models
    }
    places = list(dict.fromkeys(one.place for one in found.outputs))
    heads = ["target, pretrained" if model == UNTOUCHED else method_label(model) for model in means]
    rows = [["outputs, block", *heads]]
    return rows + [[place.label, *(_number(mean.get(place)) for mean in means.values())] for place in places]


def cost_lines(cost: Cost) -> list[str]:
    """What a port costs by the paper's formulas."""
    align = cost.covariances + cost.maps + cost.products
    return [
        f"By the paper's formulas: 6 P_A + 6 P_B = {_large(cost.a_pass)} operations for each row of a pass, "
        f"{_large(cost.calibration)} for all rows; fine-tuning the target takes 32,000 P_B = {_large(cost.training)}, "
        f"{cost.training / cost.a_pass:,.0f} times as much.",
        f"The maps take about {_large(align)} more: covariances {_large(cost.covariances)}, polar factors "
        f"{_large(cost.maps)}, products {_large(cost.products)}.",
    ]


def seconds_line(cost: Cost) -> str:
    """The time that it took."""
    return "Measured: " + ", ".join(f"{stage} {value:.2f} s" for stage, value in cost.seconds.items()) + "."


def _large(number: int) -> str:
    """
    >>> _large(950), _large(32_000_000_000)
    ('950', '32 G')
    """
    for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def _number(value: float | None, percent: bool = False) -> str:
    if value is None:
        return NOT_DEFINED
    return f"{value:.1%}" if percent else f"{value:.3f}"


JSON_FILE, MARKDOWN_FILE = "diagnosis.json", "diagnosis.md"
PICTURES = {
    "similarity.png": similarity_picture,
    "outputs.png": outputs_picture,
    "drift.png": drift_picture,
    "sites.png": sites_picture,
}
"""The paper's figures 1, 2 and A for these models, and the strips that a card has."""
INITIAL_FILE = "initial.png"
"""Its figure B, beside other diagnoses."""
_CAPTIONS = {
    "similarity.png": "How alike the two pretrained models see the samples, before and after the input-side map.",
    "outputs.png": "How alike the outputs of every layer are to those of the target that was fine-tuned directly.",
    "drift.png": "How far what every layer of the source reads moves from the base.",
    "sites.png": "How well the maps of every site line up, and how much of the change lay where nothing was seen.",
    INITIAL_FILE: "How alike pairs of pretrained models see the samples, before any alignment.",
}


@dataclass(frozen=True)
class Diagnosis(DiagnosisFindings):
    """How alike two models are on some samples, and how well a task vector is carried between them."""

    def to_json(self) -> str:
        return to_plain(self)

    @classmethod
    def from_json(cls, text: str) -> Diagnosis:
        try:
            content = parse_json(text)
            schema = content.get("schema") if isinstance(content, dict) else None
            if schema != SCHEMA:
                raise RecordError(f"the diagnosis has schema {schema!r}", "use the version of hf-bico that wrote it")
            found: Diagnosis = from_plain(cls, content)
        except (ValueError, TypeError) as error:
            raise RecordError(f"the diagnosis cannot be read: {error}", "diagnose again") from error
        return found

    @classmethod
    @translate_errors()
    def load(cls, folder: Path | str) -> Diagnosis:
        """Read what was written into a folder."""
        return cls.from_json(read_text(Path(folder), JSON_FILE, "a diagnosis"))

    @classmethod
    def averaged(cls, several: Sequence[Diagnosis]) -> Diagnosis:
        """The means over several diagnoses of one pair of models, on other tasks or samples, as the paper's figures.

        Checkpoints go by their place in the order; ranks, and what was not measured on samples, are the first one's.
        """
        if not several:
            raise UsageError("there is no diagnosis to average", "give at least one")
        several = _under_names_in_common(several)
        first = several[0]
        if any((one.base, one.target) != (first.base, first.target) for one in several):
            raise UsageError("diagnoses of different pairs of models have no average", "average those of one pair")
        lists: dict[str, Any] = {}
        for name in ("inputs", "outputs", "drift", "sites"):
            places = [[_place(found) for found in getattr(one, name)] for one in several]
            if any(own != places[0] for own in places):
                raise UsageError(
                    f"the diagnoses differ in what their {name} are of", "average those of the same layers and methods"
                )
            lists[name] = [_mean(found) for found in zip(*(getattr(one, name) for one in several), strict=True)]
        data = ", ".join(dict.fromkeys(one.data for one in several))
        return replace(first, data=data, **lists)

    def table(self) -> str:
        """Everything by block, as plain text."""
        tables = [format_table(rows) for rows in (block_rows(self), output_rows(self)) if rows]
        return "\n\n".join([*tables, "\n".join(cost_lines(self.cost))])

    def __repr__(self) -> str:
        return f"Diagnosis of {self.title} on {self.samples} samples of {self.data}"

    def _repr_markdown_(self) -> str:
        """What a notebook shows."""
        return "\n\n".join(self._shown())

    def _shown(self) -> list[str]:
        tables = [markdown_table(rows) for rows in (block_rows(self), output_rows(self)) if rows]
        return [*tables, *(plain(line) for line in (*cost_lines(self.cost), seconds_line(self.cost)))]

    @translate_errors()
    def save(self, folder: Path | str, beside: Sequence[Diagnosis] = (), overwrite: bool = False) -> tuple[Path, ...]:
        """Write diagnosis.json, .md and the pictures; the files that were written.

        With other diagnoses `beside`, their similarity before alignment is drawn together with this one's.
        """
        folder = Path(folder)
        drawn = {name: draw(self) for name, draw in PICTURES.items()}
        drawn[INITIAL_FILE] = initial_picture([self, *beside]) if beside else None
        told = [f"# {plain(self.title)}", f"On {self.samples} samples of {plain(self.data)}.", *self._shown()]
        told += [f"![{_CAPTIONS[name]}]({name})\n\n{_CAPTIONS[name]}" for name in drawn if drawn[name] is not None]
        # what tells that the folder is ours comes last
        content = {MARKDOWN_FILE: "\n\n".join(told) + "\n", **drawn, JSON_FILE: self.to_json()}
        with locked_folder(folder):
            require_own(folder, overwrite)
            if folder.is_dir():
                return write_files(folder, content)
            with atomic_folder(folder) as scratch:
                written = write_files(scratch, content)
        return tuple(folder / file.name for file in written)


Found = TypeVar("Found", InputLikeness, OutputLikeness, Drift, SiteRecord)


def _under_names_in_common(several: Sequence[Diagnosis]) -> list[Diagnosis]:
    """With the same names for checkpoints of the same place; the last is the source, which has the task's name."""
    if len({len(one.checkpoints) for one in several}) > 1:
        return list(several)  # their drifts have nothing in common
    places = zip(*(one.checkpoints for one in several), strict=True)
    shared = [names[0] if len(set(names)) == 1 else f"checkpoint {n}" for n, names in enumerate(places, start=1)]
    found = []
    for one in several:
        names = dict(zip(one.checkpoints, shared, strict=True))
        drift = [replace(moved, checkpoint=names[moved.checkpoint]) for moved in one.drift]
        found.append(replace(one, checkpoints=shared, drift=drift))
    return found


def _place(found: InputLikeness | OutputLikeness | Drift | SiteRecord) -> tuple[str, ...]:
    """What it was found of."""
    return found.name, *(str(getattr(found, name)) for name in ("model", "checkpoint") if hasattr(found, name))


def _mean(found: Sequence[Found]) -> Found:
    """What was found of one place in several diagnoses, as one: numbers are means."""
    first = found[0]
    numbers: dict[str, Any] = {}
    for field in fields(first):
        values = [getattr(one, field.name) for one in found]
        if all(isinstance(value, float) for value in values):
            numbers[field.name] = fmean(values)
    return replace(first, **numbers)


def require_own(folder: Path, overwrite: bool) -> None:
    """Refuse a folder that holds something else, or another diagnosis unless that may be replaced."""
    if not (folder / JSON_FILE).is_file():
        if folder.is_dir() and any(folder.iterdir()):
            raise OutputExistsError(f"'{folder}' exists and holds no diagnosis", "choose another folder with -o")
        require_free(folder, overwrite=False)
    elif not overwrite:
        raise OutputExistsError(
            f"'{folder}' holds a diagnosis", "choose another folder with -o, or replace it with --overwrite"
        )
