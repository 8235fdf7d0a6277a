"""Copies of a CLIP in other coordinates: the same function with other weights."""

from __future__ import annotations

from pathlib import Path

import torch

import hf_bico
from hf_bico.alignment.objectives.clip import zero_shot_head
from hf_bico.models.families.live import LiveModel
from hf_bico.models.model import Model
from hf_bico.settings import DEFAULT_TEMPLATES
from support import reference
from support.paper import PAPER
from support.scenes import Scene, write_tables
from support.toys import CLASS_NAMES, Toy, random_rows, random_state, write_open_clip

TOY = Toy(width=16, blocks=3, heads=2, embedding=12)


SAMPLES = 160


CUT = 1e-6


State = dict[str, torch.Tensor]


def random_rotation(size: int, generator: torch.Generator) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator))[0]


def rotation_fixing_ones(size: int, generator: torch.Generator) -> torch.Tensor:
    """Orthogonal, with Q 1 = 1, so that it commutes with a LayerNorm of weight 1 and bias 0."""
    basis = torch.cat([torch.ones(size, 1), torch.randn(size, size - 1, generator=generator)], 1).double()
    frame = torch.linalg.qr(basis)[0]
    inner = torch.block_diag(torch.eye(1, dtype=torch.float64), random_rotation(size - 1, generator))
    return frame @ inner @ frame.T


class Coordinates:
    """New coordinates (row vectors, x' = x Q) for the residual stream, the heads and the neurons of every block."""

    def __init__(self, toy: Toy, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.residual = rotation_fixing_ones(toy.width, generator)
        head_width = toy.width // toy.heads

        def per_head() -> torch.Tensor:
            return torch.block_diag(*(random_rotation(head_width, generator) for _ in range(toy.heads)))

        self.blocks = []
        for _ in range(toy.blocks):
            queries, values = per_head(), per_head()
            order = torch.randperm(toy.width * toy.mlp_ratio, generator=generator)
            self.blocks.append((queries, values, torch.eye(len(order), dtype=torch.float64)[order]))

    def of_site(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """(input, output) coordinates of a site."""
        if name == "proj":
            return self.residual, torch.eye(TOY.embedding, dtype=torch.float64)
        _, block, role = name.split(".", 2)
        queries, values, neurons = self.blocks[int(block)]
        return {
            "attn.q": (self.residual, queries),
            "attn.k": (self.residual, queries),
            "attn.v": (self.residual, values),
            "attn.out": (values, self.residual),
            "mlp.up": (self.residual, neurons),
            "mlp.down": (neurons, self.residual),
        }[role]


def change_sites(state: State, changes: dict[str, tuple[torch.Tensor, torch.Tensor | None]], absolute: bool) -> State:
    """A copy of a state with its sites replaced, or added to."""
    changed = {name: tensor.clone() for name, tensor in state.items()}
    for name, (weight, bias) in reference.site_weights(changed, TOY.blocks).items():
        new_weight, new_bias = changes[name]
        weight.copy_(new_weight if absolute else weight + new_weight)
        if bias is not None and new_bias is not None:
            bias.copy_(new_bias if absolute else bias + new_bias)
    return changed


def rotated(state: State, coordinates: Coordinates) -> State:
    """The same function in new coordinates."""
    moved = {}
    for name, (weight, bias) in reference.site_weights(state, TOY.blocks).items():
        q_in, q_out = coordinates.of_site(name)
        moved[name] = (q_out.T @ weight @ q_in, None if bias is None else bias @ q_out)
    copy = change_sites(state, moved, absolute=True)
    copy["visual.class_embedding"] = state["visual.class_embedding"] @ coordinates.residual
    copy["visual.positional_embedding"] = state["visual.positional_embedding"] @ coordinates.residual
    stem = state["visual.conv1.weight"]
    copy["visual.conv1.weight"] = (coordinates.residual.T @ stem.flatten(1)).view_as(stem)
    return copy


class Rotated:
    """A model, its rotated copy, and what calibration sees of both."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.folder, self.dtype = folder, dtype
        self.state = random_state(TOY, seed=3, dtype=torch.float64)
        for name in self.state:
            if ".ln_" in name:
                self.state[name].fill_(1.0 if name.endswith("weight") else 0.0)
        self.coordinates = Coordinates(TOY, seed=4)
        self.copy = rotated(self.state, self.coordinates)
        self.rows = random_rows(SAMPLES, TOY.image_size)
        self.pixels = torch.stack([row["image"] for row in self.rows]).double()
        self.base = self.write("base", self.state)
        self.target = self.write("target", self.copy)

    def write(self, name: str, state: State) -> Path:
        stored = {key: tensor.to(self.dtype).contiguous() for key, tensor in state.items()}
        return write_open_clip(self.folder / name, TOY, stored)

    def load(self, folder: Path) -> LiveModel:
        return Model.open(folder, "a model").load(torch.device("cpu"), self.dtype)

    def logits(self, model: LiveModel) -> torch.Tensor:
        head = zero_shot_head(model, CLASS_NAMES, DEFAULT_TEMPLATES)
        with torch.no_grad():
            return head.logits(model.image_features(self.pixels.to(self.dtype)))

    def projectors(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Per site, the projectors onto the inputs and output gradients that calibration saw, in float64."""
        labels = torch.tensor([row["label"] for row in self.rows])
        classes = zero_shot_head(self.load(self.base), CLASS_NAMES, DEFAULT_TEMPLATES).classes.double()
        seen = reference.observe(self.state, TOY, self.pixels, labels, classes)
        return {
            name: tuple(reference.align(rows, rows, 1, 1).source_projector(CUT) for rows in (x, seen.gradients[name]))
            for name, x in seen.inputs.items()
        }

    def random_changes(self) -> dict[str, tuple[torch.Tensor, torch.Tensor | None]]:
        generator = torch.Generator().manual_seed(5)

        def noise(*shape: int) -> torch.Tensor:
            return 0.1 * torch.randn(shape, generator=generator, dtype=torch.float64)

        sites = reference.site_weights(self.state, TOY.blocks)
        return {
            name: (noise(*weight.shape), None if bias is None else noise(*bias.shape))
            for name, (weight, bias) in sites.items()
        }

    def port(self, changes: dict[str, tuple[torch.Tensor, torch.Tensor | None]]) -> hf_bico.Ported:
        self.tuned = self.write("tuned", change_sites(self.state, changes, absolute=False))
        return hf_bico.port(
            self.tuned,
            to=self.target,
            base=self.base,
            data=self.rows,
            n=SAMPLES,
            class_names=CLASS_NAMES,
            dtype=str(self.dtype).removeprefix("torch."),
            evaluate=False,
            **PAPER,
        )


def make_turned_scene(folder: Path) -> Scene:
    """The target is the base in other coordinates, so that all of a change can be carried, which matters clearly."""
    made = Rotated(folder, torch.float32)
    generator = torch.Generator().manual_seed(2)

    def noise(part: torch.Tensor) -> torch.Tensor:
        return 0.1 * torch.randn(part.shape, generator=generator, dtype=part.dtype)

    changes = {
        name: (noise(weight), None if bias is None else noise(bias))
        for name, (weight, bias) in reference.site_weights(made.state, TOY.blocks).items()
    }
    tuned = made.write("tuned", change_sites(made.state, changes, absolute=False))
    return Scene(folder, tuned, made.base, made.target, write_tables(folder / "pictures"))
