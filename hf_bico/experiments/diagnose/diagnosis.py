"""Defines the result of a diagnosis, its tables and its files. Measures nothing."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeVar

from hf_bico.errors import OutputExistsError, RecordError, UsageError
from hf_bico.experiments.compare.cells import method_label
from hf_bico.experiments.diagnose import pictures
from hf_bico.experiments.diagnose.findings import (
    DIAGNOSIS_SCHEMA,
    UNTOUCHED_TARGET,
    Cost,
    DiagnosisData,
    SitePlace,
    by_place,
)
from hf_bico.models.layout import TEXT_SIDE
from hf_bico.reports.pictures import block_of, is_of_text_tower, picture_figure
from hf_bico.runtime.library_errors import translate_errors
from hf_bico.runtime.output import atomic_folder, locked_folder, read_text, require_free, write_file, write_files
from hf_bico.utils.files import from_plain, parse_json, to_plain
from hf_bico.utils.html import html_page
from hf_bico.utils.text import did_you_mean, format_table, markdown_table, plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ItemT = TypeVar("ItemT")
KeyT = TypeVar("KeyT", bound=Hashable)

NOT_DEFINED = "n/a"
JSON_FILE, MARKDOWN_FILE = "diagnosis.json", "diagnosis.md"
PICTURES = {
    "similarity.png": pictures.similarity_picture,
    "outputs.png": pictures.outputs_picture,
    "drift.png": pictures.drift_picture,
    "sites.png": pictures.sites_picture,
}
"""The paper's figures 1, 2 and A for these models, and the heat maps of a model card."""
INITIAL_FILE = "initial.png"
"""The paper's figure B, together with other diagnoses."""
_CAPTIONS = {
    "similarity.png": "How alike the two pretrained models see the samples, before and after the input-side map.",
    "outputs.png": "How alike the outputs of every layer are to those of the target that was fine-tuned directly.",
    "drift.png": "How far what every layer of the source reads moves from the base.",
    "sites.png": "How well the maps of every site line up, and how much of the change lay where nothing was seen.",
    INITIAL_FILE: "How alike pairs of pretrained models see the samples, before any alignment.",
}


@dataclass(frozen=True)
class Diagnosis(DiagnosisData):
    """A diagnosis with its tables, pictures and files."""

    def to_json(self) -> str:
        return to_plain(self)

    @classmethod
    def from_json(cls, text: str) -> Diagnosis:
        try:
            content = parse_json(text)
            schema = content.get("schema") if isinstance(content, dict) else None
            if schema != DIAGNOSIS_SCHEMA:
                raise RecordError(f"the diagnosis has schema {schema!r}", "use the version of hf-bico that wrote it")
            diagnosis: Diagnosis = from_plain(cls, content)
        except (ValueError, TypeError) as error:
            raise RecordError(f"the diagnosis cannot be read: {error}", "diagnose again") from error
        return diagnosis

    @classmethod
    @translate_errors()
    def load(cls, folder: Path | str) -> Diagnosis:
        """Read what `save` wrote."""
        return cls.from_json(read_text(Path(folder), JSON_FILE, "a diagnosis"))

    @classmethod
    def averaged(cls, several: Sequence[Diagnosis]) -> Diagnosis:
        """Average diagnoses of one pair of models on several tasks or samples, as in the paper's figures.

        Checkpoints are matched by their order; ranks, and what does not depend on samples, are the first one's.
        """
        if not several:
            raise UsageError("there is no diagnosis to average", "give at least one")
        several = _with_common_names(several)
        first = several[0]
        if any((one.base, one.target) != (first.base, first.target) for one in several):
            raise UsageError("diagnoses of different pairs of models have no average", "average those of one pair")
        lists: dict[str, Any] = {}
        for name in ("inputs", "outputs", "drift", "sites"):
            keys = [[_key(finding) for finding in getattr(one, name)] for one in several]
            if any(own != keys[0] for own in keys):
                raise UsageError(
                    f"the diagnoses differ in what their {name} are of", "average those of the same layers and methods"
                )
            lists[name] = [_mean(findings) for findings in zip(*(getattr(one, name) for one in several), strict=True)]
        return replace(first, data=", ".join(dict.fromkeys(one.data for one in several)), **lists)

    def table(self) -> str:
        """Return the tables by block, and the cost, as plain text."""
        tables = [format_table(rows) for rows in (block_rows(self), output_rows(self)) if rows]
        return "\n\n".join([*tables, "\n".join(cost_lines(self.cost))])

    def __repr__(self) -> str:
        aligned = [_mean_text(getattr(one, name) for one in self.inputs) for name in ("cka", "cka_aligned")]
        similar = f"CKA {aligned[0]}, aligned {aligned[1]}"
        return f"Diagnosis of {self.title} on {self.samples} samples of {self.data}: {similar}"

    def _repr_html_(self) -> str:
        lines = [*cost_lines(self.cost), seconds_line(self.cost)]
        return html_page(self.title, block_rows(self), output_rows(self), below=lines)

    @translate_errors()
    def draw(self, path: Path | str | None = None, picture: str = "similarity") -> Figure | None:
        """Draw "similarity", "outputs", "drift" or "sites", into a PNG if a path is given; None without its numbers."""
        if f"{picture}.png" not in PICTURES:
            known = [name.removesuffix(".png") for name in PICTURES]
            raise UsageError(f"picture is '{picture}'", did_you_mean(picture, known, f"use one of: {', '.join(known)}"))
        content = PICTURES[f"{picture}.png"](self)
        if content is None:
            return None
        if path is not None:
            write_file(Path(path), content)
        return picture_figure(content)

    def _repr_markdown_(self) -> str:
        return "\n\n".join(self._markdown_parts())

    def _markdown_parts(self) -> list[str]:
        tables = [markdown_table(rows) for rows in (block_rows(self), output_rows(self)) if rows]
        return [*tables, *(plain(line) for line in (*cost_lines(self.cost), seconds_line(self.cost)))]

    @translate_errors()
    def save(self, folder: Path | str, beside: Sequence[Diagnosis] = (), overwrite: bool = False) -> tuple[Path, ...]:
        """Write diagnosis.json, .md and the pictures, and return the files that were written.

        With other diagnoses `beside`, their similarity before alignment is drawn together with this one's.
        """
        folder = Path(folder)
        images = {name: draw(self) for name, draw in PICTURES.items()}
        images[INITIAL_FILE] = pictures.initial_picture([self, *beside]) if beside else None
        parts = [f"# {plain(self.title)}", f"On {self.samples} samples of {plain(self.data)}.", *self._markdown_parts()]
        parts += [f"![{_CAPTIONS[name]}]({name})\n\n{_CAPTIONS[name]}" for name in images if images[name] is not None]
        # the JSON comes last, because it marks the folder as ours
        content = {MARKDOWN_FILE: "\n\n".join(parts) + "\n", **images, JSON_FILE: self.to_json()}
        with locked_folder(folder):
            require_own(folder, overwrite)
            if folder.is_dir():
                return write_files(folder, content)
            with atomic_folder(folder) as scratch:
                written = write_files(scratch, content)
        return tuple(folder / file.name for file in written)


def _with_common_names(several: Sequence[Diagnosis]) -> list[Diagnosis]:
    """Give checkpoints of the same rank the same name; the last one is the source, which is named after its task."""
    if len({len(one.checkpoints) for one in several}) > 1:
        return list(several)  # their drifts have nothing in common
    ranks = zip(*(one.checkpoints for one in several), strict=True)
    shared = [names[0] if len(set(names)) == 1 else f"checkpoint {n}" for n, names in enumerate(ranks, start=1)]
    renamed = []
    for one in several:
        names = dict(zip(one.checkpoints, shared, strict=True))
        drift = [replace(moved, checkpoint=names[moved.checkpoint]) for moved in one.drift]
        renamed.append(replace(one, checkpoints=shared, drift=drift))
    return renamed


def _key(finding: Any) -> tuple[str, ...]:
    return finding.name, *(str(getattr(finding, name)) for name in ("model", "checkpoint") if hasattr(finding, name))


def _mean(findings: Sequence[Any]) -> Any:
    """Average the floats of findings about the same activation."""
    values = {field.name: [getattr(one, field.name) for one in findings] for field in fields(findings[0])}
    floats = {name: own for name, own in values.items() if all(isinstance(value, float) for value in own)}
    return replace(findings[0], **{name: fmean(own) for name, own in floats.items()})


def require_own(folder: Path, overwrite: bool) -> None:
    """Refuse a folder with other content, or with a diagnosis unless that may be replaced."""
    if not (folder / JSON_FILE).is_file():
        if folder.is_dir() and any(folder.iterdir()):
            raise OutputExistsError(f"'{folder}' exists and holds no diagnosis", "choose another folder with -o")
        require_free(folder, overwrite=False)
    elif not overwrite:
        raise OutputExistsError(
            f"'{folder}' holds a diagnosis", "choose another folder with -o, or replace it with --overwrite"
        )


def block_rows(diagnosis: Diagnosis) -> list[list[str]]:
    """Return a header, and a row for each block: similarity before and after the map, scores, energy, and drift."""
    last = diagnosis.checkpoints[-1] if diagnosis.checkpoints else None
    drifts = [one for one in diagnosis.drift if one.checkpoint == last]
    columns: dict[str, Mapping[SitePlace, float]] = {
        "CKA": by_place(diagnosis.inputs, lambda one: one.cka),
        "CKA aligned": by_place(diagnosis.inputs, lambda one: one.cka_aligned),
        "cosine": by_place(diagnosis.inputs, lambda one: one.cosine),
        "cosine aligned": by_place(diagnosis.inputs, lambda one: one.cosine_aligned),
    }
    scores = {"score in": "score_in", "score out": "score_out", "unseen": "unseen"}
    towers = {True: TEXT_SIDE, False: ""}
    sites_at = _grouped(diagnosis.sites, lambda site: SitePlace(towers[is_of_text_tower(site)], block_of(site)))
    drifts_of = _grouped(drifts, lambda one: one.name)
    inputs_at = _grouped(diagnosis.inputs, lambda one: one.place)
    rows = [["block", *columns, *scores, "energy", "Δdirection", "Δmagnitude"]]
    for place, own in inputs_at.items():
        sites = sites_at.get(place, [])
        moved = [drift for name in dict.fromkeys(one.source for one in own) for drift in drifts_of.get(name, [])]
        row = [place.label, *(_number(column.get(place)) for column in columns.values())]
        row += [_mean_text((getattr(site, name) for site in sites), name == "unseen") for name in scores.values()]
        row.append(_number(sum({site.source: site.energy for site in sites}.values()), percent=True))
        row += [_mean_text(one.direction for one in moved), _mean_text(one.magnitude for one in moved)]
        rows.append(row)
    return rows


def _grouped(items: Iterable[ItemT], key: Callable[[ItemT], KeyT]) -> dict[KeyT, list[ItemT]]:
    groups: dict[KeyT, list[ItemT]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def output_rows(diagnosis: Diagnosis) -> list[list[str]]:
    """Return a header, and a row for each block: the cosine of every model's outputs to the fine-tuned target's."""
    if not diagnosis.outputs:
        return []
    by_model = _grouped(diagnosis.outputs, lambda one: one.model)
    means = {model: by_place(own, lambda one: one.cosine) for model, own in by_model.items()}
    places = list(dict.fromkeys(one.place for one in diagnosis.outputs))
    heads = ["target, pretrained" if model == UNTOUCHED_TARGET else method_label(model) for model in means]
    rows = [["outputs, block", *heads]]
    return rows + [[place.label, *(_number(mean.get(place)) for mean in means.values())] for place in places]


def cost_lines(cost: Cost) -> list[str]:
    """Return the cost of a port by the paper's formulas, as sentences."""
    align = cost.covariances + cost.maps + cost.products
    return [
        "By the paper's formulas, which count a pass as one whatever its rows: calibration takes 6 P_A + 6 P_B = "
        f"{_large(cost.a_pass)} operations, and fine-tuning the target 32,000 P_B = {_large(cost.training)}, "
        f"{_times(cost.training / cost.a_pass)} times as much.",
        f"With all its rows counted, calibration takes {_large(cost.calibration)}; fine-tuning then costs more as "
        "well, by the rows of its batches.",
        f"The maps take about {_large(align)} more: covariances {_large(cost.covariances)}, polar factors "
        f"{_large(cost.maps)}, products {_large(cost.products)}.",
    ]


def seconds_line(cost: Cost) -> str:
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


def _times(ratio: float) -> str:
    """Round a ratio to two digits, to which it follows from rounded figures.

    >>> _times(3357.4), _times(1.234)
    ('3,400', '1.2')
    """
    rounded = float(f"{ratio:.2g}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:g}"


def _mean_text(values: Iterable[float | None], percent: bool = False) -> str:
    known = [value for value in values if value is not None]
    return _number(fmean(known) if known else None, percent)


def _number(value: float | None, percent: bool = False) -> str:
    if value is None:
        return NOT_DEFINED
    return f"{value:.1%}" if percent else f"{value:.3f}"
