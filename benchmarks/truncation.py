"""How long the best factors of rank 16 take beside all singular values, and what they keep of the best energy.

    OMP_NUM_THREADS=2 python benchmarks/truncation.py

Every line is measured in the one run, on a CUDA device where there is one: `torch.linalg.svd` in float32, then the
two ways of `hf_bico.models.low_rank`. A flat spectrum (noise) is the hardest for random projections, a falling one is
what fine-tuning leaves. `--largest 2048` leaves out the matrices of more rows or columns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_bico.models import low_rank
from hf_bico.models.low_rank import Factors, energy, truncated

RANK = 16
SHAPES = ((768, 768), (3072, 768), (1024, 4096), (4096, 4096))


def noise(rows: int, columns: int, device: torch.device) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(device)


def falling(rows: int, columns: int, device: torch.device) -> Tensor:
    """Singular values that fall with the square root of their number."""
    flat = noise(rows, columns, device)
    left, values, right = torch.linalg.svd(flat, full_matrices=False)
    falls = torch.arange(1, len(values) + 1, device=device) ** -0.5
    return torch.mm(left * falls, right)


def seconds(work: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """The least time of three calls, and the result; a call of over a second is not repeated."""
    least, result = float("inf"), None
    for _ in range(3):
        _wait(device)
        start = time.perf_counter()
        result = work()
        _wait(device)
        least = min(least, time.perf_counter() - start)
        if least > 1.0:
            break
    return least, result


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def share_of_best(matrix: Tensor, found: Factors, best: float) -> float:
    lost = energy(matrix.double() - found.left.double() @ found.right.double())
    return (energy(matrix) - lost) / best


def measure(matrix: Tensor, name: str) -> None:
    device = matrix.device
    plain, _ = seconds(lambda: torch.linalg.svd(matrix, full_matrices=False), device)
    wide = matrix.double()
    gram = wide @ wide.T if len(wide) <= wide.shape[1] else wide.T @ wide
    best = float(torch.linalg.eigvalsh(gram)[-RANK:].sum())
    size = f"{matrix.shape[0]} x {matrix.shape[1]}"
    print(f"{size:>12}  {name:8} {'torch.linalg.svd':18} {plain:9.3f} s")
    chosen = truncated(matrix, RANK)
    for way, by in (("eigenvectors", low_rank._by_eigenvectors), ("random projections", low_rank._randomised)):
        taken, found = seconds(partial(by, matrix, RANK), device)
        kept = share_of_best(matrix, found, best)
        mark = "  chosen" if torch.equal(found.left, chosen.left) else ""
        print(f"{'':22} {way:18} {taken:9.3f} s  {plain / taken:6.1f} times faster, keeps {kept:.6f} of the best{mark}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--largest", type=int, default=4096, help="leave out matrices with a longer side than this")
    largest = parser.parse_args().largest
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"rank {RANK}, float32, {where}, torch {torch.__version__}")
    for rows, columns in SHAPES:
        if max(rows, columns) <= largest:
            measure(noise(rows, columns, device), "flat")
            measure(falling(rows, columns, device), "falling")


if __name__ == "__main__":
    main()
