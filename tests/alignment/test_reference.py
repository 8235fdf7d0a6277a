"""The streamed implementation against the slow reference, over every kind of pair and batch size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hf_bico
from hf_bico.alignment.objectives.clip import zero_shot_head
from hf_bico.models.model import Model
from hf_bico.settings import DEFAULT_TEMPLATES
from support import reference
from support.paper import PAPER
from support.toys import CLASS_NAMES, WRITERS, Toy, fit, random_rows, random_state, weights_of

NARROW, WIDE = Toy(width=16), Toy(width=24, heads=3, embedding=20)
PAIRS = {
    "narrow to wide": (NARROW, WIDE),
    "deep to shallow": (NARROW.but(blocks=5), WIDE.but(blocks=3)),
    "to a single block": (NARROW, WIDE.but(blocks=1)),
}
"""Others are those of `test_methods`, in float64."""
SAMPLES = 24
STRONG = 1e-5
"""Ten times the cut: directions that rounding cannot push across it."""


class Case:
    """A pair of models on disk, a fine-tuned source that changed only strong directions, and the reference's answer."""

    def __init__(self, folder: Path, shapes: tuple[Toy, Toy], libraries: tuple[str, str]) -> None:
        self.toys = shapes
        self.states = [random_state(toy, seed) for seed, toy in enumerate(shapes)]
        self.folders = [
            WRITERS[library](folder / name, toy, state)
            for name, library, toy, state in zip(("a", "b"), libraries, shapes, self.states, strict=True)
        ]
        self.rows = random_rows(SAMPLES, 16)
        pixels = torch.stack([row["image"] for row in self.rows])
        labels = torch.tensor([row["label"] for row in self.rows])
        self.seen = [
            reference.observe(state, toy, fit(pixels, toy), labels, self.classes(path))
            for state, toy, path in zip(self.states, shapes, self.folders, strict=True)
        ]
        self.tuned = self.fine_tune(folder / "tuned", libraries[0])

    def classes(self, folder: Path) -> torch.Tensor:
        model = Model.open(folder, "a toy").load(torch.device("cpu"), torch.float32)
        return zero_shot_head(model, CLASS_NAMES, DEFAULT_TEMPLATES).classes

    def alignment(self, kind: str, target_site: str) -> reference.Alignment:
        a, b = self.toys
        origin = reference.source_site(target_site, a.blocks, b.blocks)
        rows = [getattr(seen, kind) for seen in self.seen]
        return reference.align(rows[0][origin], rows[1][target_site], a.grid, b.grid)

    def fine_tune(self, folder: Path, library: str) -> Path:
        """Random changes at every site, projected onto what every target site that takes them saw strongly."""
        a, b = self.toys
        generator = torch.Generator().manual_seed(7)
        state = {name: tensor.clone() for name, tensor in self.states[0].items()}
        takers: dict[str, list[str]] = {}
        for site in reference.site_weights(self.states[1], b.blocks):
            takers.setdefault(reference.source_site(site, a.blocks, b.blocks), []).append(site)
        for name, (weight, bias) in reference.site_weights(state, a.blocks).items():
            change = 0.05 * torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            shift = 0.05 * torch.randn(weight.shape[0], generator=generator, dtype=torch.float64)
            for _ in range(200 if len(takers.get(name, ())) > 1 else 1):  # alternate until all projectors agree
                for taker in takers.get(name, ()):
                    out = self.alignment("gradients", taker).source_projector(STRONG)
                    change = out @ change @ self.alignment("inputs", taker).source_projector(STRONG)
                    shift = shift @ out
            weight += change.float()
            if bias is not None:
                bias += shift.float()
        return WRITERS[library](folder, a, state)

    def expected(self) -> dict[str, tuple[torch.Tensor, torch.Tensor | None]]:
        a, b = self.toys
        start = reference.site_weights(self.states[0], a.blocks)
        end = reference.site_weights(weights_of(self.tuned, self.states[0]), a.blocks)
        answers: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {}
        for site in reference.site_weights(self.states[1], b.blocks):
            origin = reference.source_site(site, a.blocks, b.blocks)
            r_in = self.alignment("inputs", site).map(1e-6)
            r_out = self.alignment("gradients", site).map(1e-6)
            weight = r_out.T @ (end[origin][0].double() - start[origin][0].double()) @ r_in
            bias, old = end[origin][1], start[origin][1]
            answers[site] = (weight, None if bias is None or old is None else (bias.double() - old.double()) @ r_out)
        return answers

    def score(self, kind: str, target_site: str) -> float:
        """The nuclear norm over the Frobenius norms of the paired rows."""
        a, b = self.toys
        rows = [getattr(seen, kind) for seen in self.seen]
        source = reference.resized(rows[0][reference.source_site(target_site, a.blocks, b.blocks)], a.grid, b.grid)
        nuclear = self.alignment(kind, target_site).values.sum()
        return float(nuclear / (source.norm() * rows[1][target_site].norm()))

    def ported(self, batch_size: int) -> dict[str, tuple[torch.Tensor, torch.Tensor | None]]:
        """What the package adds to each target site."""
        ported = self.port(batch_size)
        target = Model.open(self.folders[1], "the target")
        for site in ported.report.sites:
            assert site.score_in == pytest.approx(self.score("inputs", site.name), rel=1e-4)
            assert site.score_out == pytest.approx(self.score("gradients", site.name), rel=1e-4)
        vector = ported.task_vector
        return {
            site.name: (
                site.weight.view(vector[site.weight.tensor]),
                None if site.bias is None else site.bias.view(vector[site.bias.tensor]),
            )
            for site in target.layout.main_sites
        }

    def port(self, batch_size: int) -> hf_bico.Ported:
        return hf_bico.port(
            self.tuned,
            to=self.folders[1],
            base=self.folders[0],
            data=self.rows,
            n=SAMPLES,
            class_names=CLASS_NAMES,
            batch_size=batch_size,
            evaluate=False,
            **PAPER,
        )


def assert_agree(case: Case, batch_size: int) -> None:
    ported, expected = case.ported(batch_size), case.expected()
    assert ported.keys() == expected.keys()
    for name, (weight, bias) in expected.items():
        found_weight, found_bias = ported[name]
        error = (found_weight - weight).norm() / weight.norm()
        assert error < 1e-4, f"{name}: weight off by {error:.1e}"
        if bias is not None:
            assert found_bias is not None
            error = (found_bias - bias).norm() / bias.norm()
            assert error < 1e-4, f"{name}: bias off by {error:.1e}"


@pytest.mark.parametrize("shapes", PAIRS.values(), ids=PAIRS.keys())
def test_streamed_port_equals_the_reference(shapes: tuple[Toy, Toy], tmp_path: Path) -> None:
    assert_agree(Case(tmp_path, shapes, ("open_clip", "open_clip")), batch_size=SAMPLES)


def test_mispaired_scores_are_those_of_the_other_half_of_the_samples(tmp_path: Path) -> None:
    """The i-th drawn sample of the source meets the (i + 12)-th of the target, in three of the blocks."""
    case = Case(tmp_path, (NARROW.but(blocks=4), WIDE.but(blocks=4)), ("open_clip", "open_clip"))
    record = case.port(SAMPLES).record
    measured = {site.name: site for site in record.sites if site.mispaired_in is not None}
    roles = ("attn.q", "attn.k", "attn.v", "attn.out", "mlp.up", "mlp.down")
    assert set(measured) == {"proj", *(f"blocks.{block}.{role}" for block in (0, 2, 3) for role in roles)}
    for name, site in measured.items():
        origin = reference.source_site(name, 4, 4)
        for kind, score in (("inputs", site.mispaired_in), ("gradients", site.mispaired_out)):
            first, second = (
                getattr(seen, kind)[one][record.data.indices]
                for seen, one in zip(case.seen, (origin, name), strict=True)
            )
            first = reference.resized(first, case.toys[0].grid, case.toys[1].grid)
            found = reference.align(first, second.roll(SAMPLES // 2, 0), case.toys[1].grid, case.toys[1].grid)
            assert score == pytest.approx(float(found.values.sum() / (first.norm() * second.norm())), rel=1e-4), name


def test_a_sample_alone_in_its_batch_is_not_mispaired_with_itself(tmp_path: Path) -> None:
    record = Case(tmp_path, (NARROW, WIDE), ("open_clip", "open_clip")).port(1).record
    assert {score for site in record.sites for score in (site.mispaired_in, site.mispaired_out)} == {None}


def test_surroundings_do_not_matter(tmp_path: Path) -> None:
    """Autocast, inference mode and TF32 of the caller change nothing."""
    case = Case(tmp_path, (NARROW, WIDE), ("open_clip", "open_clip"))
    matmul: Any = torch.backends.cuda.matmul
    is_old = not hasattr(torch.backends.cudnn, "conv")  # torch before 2.9
    name, rough = ("allow_tf32", True) if is_old else ("fp32_precision", "tf32")
    before = getattr(matmul, name)
    setattr(matmul, name, rough)
    try:
        with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
            ported = case.ported(16)
        assert getattr(matmul, name) == rough
    finally:
        setattr(matmul, name, before)
    for site, (weight, _) in case.ported(16).items():
        assert torch.equal(weight, ported[site][0]), site


@pytest.mark.parametrize("batch_size", [1, 7])
def test_batch_size_does_not_matter(batch_size: int, tmp_path: Path) -> None:
    assert_agree(Case(tmp_path, (NARROW, WIDE.but(grid=5)), ("open_clip", "open_clip")), batch_size)


@pytest.mark.parametrize("source", WRITERS)
@pytest.mark.parametrize("target", WRITERS)
def test_any_library_to_any_library(source: str, target: str, tmp_path: Path) -> None:
    assert_agree(Case(tmp_path, (NARROW, WIDE.but(blocks=3)), (source, target)), batch_size=16)
