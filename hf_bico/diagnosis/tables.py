"""A diagnosis as rows of text: what was found in every block, and what a port costs."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from hf_bico.comparison.cells import LABELS
from hf_bico.diagnosis.findings import UNTOUCHED, Cost, Findings, Place, by_place
from hf_bico.models.layout import TEXT_SIDE
from hf_bico.reports.pictures import block_of, is_of_text_tower
from hf_bico.reports.record import SiteRecord

NOT_DEFINED = "n/a"


def block_rows(found: Findings) -> list[list[str]]:
    """A head, and a row for each block: likeness before and after the map, the sites' scores, and the drift."""
    last = found.checkpoints[-1] if found.checkpoints else None
    drifted = [one for one in found.drift if one.checkpoint == last]
    columns: dict[str, Mapping[Place, float]] = {
        "CKA": by_place(found.inputs, lambda one: one.cka),
        "CKA aligned": by_place(found.inputs, lambda one: one.cka_aligned),
        "cosine": by_place(found.inputs, lambda one: one.cosine),
        "cosine aligned": by_place(found.inputs, lambda one: one.cosine_aligned),
    }
    places = list(dict.fromkeys(one.place for one in found.inputs))
    scores = {"score in": "score_in", "score out": "score_out", "unseen": "unseen"}
    at: dict[Place, list[SiteRecord]] = {}
    for site in found.sites:
        tower = TEXT_SIDE if is_of_text_tower(site) else ""
        at.setdefault(Place(tower, block_of(site)), []).append(site)
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


def output_rows(found: Findings) -> list[list[str]]:
    """A head, and a row for each block: the cosine of every model's outputs to the fine-tuned target's."""
    if not found.outputs:
        return []
    means = {
        model: by_place([one for one in found.outputs if one.model == model], lambda one: one.cosine)
        for model in found.models
    }
    places = list(dict.fromkeys(one.place for one in found.outputs))
    heads = ["target, pretrained" if model == UNTOUCHED else LABELS.get(model, model) for model in means]
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
