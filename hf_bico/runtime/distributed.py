"""The processes that do one job together, as torchrun or accelerate start them: shares, sums, what each has found.

Knows launchers and messages between processes; not what is computed. Imports torch only to join in.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

from hf_bico.errors import ProcessLostError, UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


T = TypeVar("T")

PATIENCE = timedelta(hours=1)
"""How long a process waits for the others: the slowest may still be downloading. One that ends is noticed at once."""
_teams = count()
_met_others = False
_PACKED = 16 * 2**20
"""Bytes: smaller tensors travel together, up to so many."""


def process_rank() -> int:
    """The number of this process, from 0; by the environment alone."""
    return _told("RANK") if process_count() > 1 else 0


def process_count() -> int:
    """How many processes the launcher has started, on all machines."""
    return max(_told("WORLD_SIZE", 1), 1) if "RANK" in os.environ else 1


def is_first_process() -> bool:
    """Whether this process is the one that prints and writes."""
    return process_rank() == 0


def has_met_others() -> bool:
    """Whether this process has begun to work with the others; until then none of them waits for it."""
    return _met_others


def local_device(name: str) -> str:
    """The device of this process: with several processes and as many GPUs, each takes its own."""
    if process_count() == 1 or name not in ("auto", "cuda") or not _one_gpu_each():
        return name
    return f"cuda:{_told('LOCAL_RANK')}"


@dataclass(frozen=True)
class ProcessGroup:
    """The processes that do one job together; each of them calls the same methods in the same order."""

    rank: int = 0
    size: int = 1
    temporary: bool = False
    """Whether the group of processes was made for this job, and is not the caller's."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """This process's part, in order; the parts differ by at most one item, and may be empty.

        >>> [list(Team(rank, 2).share("abcde")) for rank in range(2)]
        [['a', 'b'], ['c', 'd', 'e']]
        """
        first, last = (len(items) * rank // self.size for rank in (self.rank, self.rank + 1))
        return items[first:last]

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Put the sums over all processes into the tensors, which have the same shapes everywhere."""
        if self.size == 1:
            return
        import torch

        for pack in _packs(tensors):
            if len(pack) == 1 and pack[0].is_contiguous():
                _all_reduce(pack[0])
                continue
            together = torch.cat([tensor.reshape(-1) for tensor in pack])
            _all_reduce(together)
            for tensor, found in zip(pack, together.split([tensor.numel() for tensor in pack]), strict=True):
                tensor.copy_(found.view_as(tensor))

    def gathered(self, own: dict[str, T]) -> dict[str, T]:
        """What all processes have found, on every one of them, in the order of their ranks.

        Tensors arrive on the kind of device that they left.
        """
        if self.size == 1:
            return own
        found: dict[str, T] = {}
        for rank in range(self.size):
            found |= self._from(rank, own)
        return found

    def agreed(self, value: T) -> T:
        """The first process's value, on every one of them."""
        return value if self.size == 1 else self._from(0, value)

    def leave(self) -> None:
        """Wait for the others, and part: from here on each may end when it likes."""
        if not self.temporary:
            return
        import torch.distributed as dist

        self.gathered({})
        with _peers_alive():
            dist.destroy_process_group()

    def _from(self, rank: int, value: T) -> T:
        """A value of one process, on all of them: what is not a tensor first, as one letter, then its tensors."""
        import torch

        mine = rank == self.rank
        packer = _Packer()
        letter = packer.letter(value) if mine else torch.empty(0, dtype=torch.uint8)
        length = torch.tensor([letter.numel()])
        _broadcast(length, rank)
        letter = letter if mine else letter.new_empty(int(length))
        _broadcast(letter, rank)
        if not mine:
            found: T = _Unpacker(letter, rank).load()
            return found
        for tensor in packer.tensors.values():
            _broadcast(_as_bytes(tensor), rank)
        return value


ALONE = ProcessGroup()


def join(device: torch.device) -> ProcessGroup:
    """The team that the launcher has started this process for; alone where there was none.

    A group of processes that the caller has made is used as it is. Else GPUs talk by NCCL where every process has its
    own, and everything else by gloo.
    """
    if process_count() == 1:
        return ALONE
    import torch

    dist: Any = torch.distributed
    global _met_others
    _met_others = True
    if device.index is not None:  # where tensors of other processes arrive
        torch.cuda.set_device(device)
    if dist.is_initialized():
        return ProcessGroup(dist.get_rank(), dist.get_world_size())
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" and _one_gpu_each() else "gloo"
    try:
        with _peers_alive():
            store, rank, size = _meeting_place()
            # a place of its own: where an earlier group met, its addresses still are
            own = dist.PrefixStore(f"hf_bico-{next(_teams)}", store)
            dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=PATIENCE)
    except ValueError as error:
        raise UsageError(
            f"{process_count()} processes cannot find each other: {error}",
            "start them by torchrun or accelerate launch",
        ) from error
    return ProcessGroup(rank, size, temporary=True)


@cache
def _meeting_place() -> tuple[Any, int, int]:
    """The launcher's store, this process's rank and the number of processes."""
    from torch.distributed.rendezvous import rendezvous

    store, rank, size = next(iter(rendezvous("env://", timeout=PATIENCE)))
    store.set_timeout(PATIENCE)
    return store, rank, size


class _Packer(pickle.Pickler):
    """Takes a value apart: its tensors, and a letter that says where they belong."""

    def __init__(self) -> None:
        self._written = io.BytesIO()
        super().__init__(self._written)
        self.tensors: dict[int, Tensor] = {}

    def persistent_id(self, obj: Any) -> Any:
        import torch

        if not isinstance(obj, torch.Tensor):
            return None
        self.tensors.setdefault(id(obj), obj)
        return list(self.tensors).index(id(obj)), obj.shape, obj.dtype, obj.is_cuda

    def letter(self, value: Any) -> Tensor:
        import torch

        self.dump(value)
        letter: Tensor = torch.frombuffer(self._written.getbuffer(), dtype=torch.uint8)
        return letter


class _Unpacker(pickle.Unpickler):
    """Puts a value together again; its tensors arrive one by one, as the letter comes to them."""

    def __init__(self, letter: Tensor, sender: int) -> None:
        super().__init__(io.BytesIO(letter.numpy().tobytes()))
        self._sender = sender
        self._arrived: list[Tensor] = []

    def persistent_load(self, pid: Any) -> Tensor:
        import torch

        index: int = pid[0]
        shape, dtype, is_cuda = pid[1:]
        if index == len(self._arrived):
            tensor = torch.empty(shape, dtype=dtype, device="cuda" if is_cuda else "cpu")
            _broadcast(_as_bytes(tensor), self._sender)
            self._arrived.append(tensor)
        return self._arrived[index]


def _as_bytes(tensor: Tensor) -> Tensor:
    """The tensor's own memory where it is in one piece; bytes travel whatever the kind of number is."""
    import torch

    in_bytes: Tensor = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return in_bytes


def _packs(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of a kind that travel together: small ones up to a size, large ones alone."""
    packs: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        pack = packs.setdefault((tensor.dtype, tensor.device), [])
        if pack and sum(each.nbytes for each in pack) + tensor.nbytes > _PACKED:
            yield list(pack)
            pack.clear()
        pack.append(tensor)
    yield from packs.values()


def _all_reduce(tensor: Tensor) -> None:
    import torch.distributed as dist

    with _on_the_way(tensor) as travelling, _peers_alive():
        dist.all_reduce(travelling)


def _broadcast(tensor: Tensor, sender: int) -> None:
    import torch.distributed as dist

    if tensor.numel() > 0:
        with _on_the_way(tensor) as travelling, _peers_alive():
            dist.broadcast(travelling, sender)


@contextmanager
def _on_the_way(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor where the group can carry it: a caller's group may know GPUs alone."""
    import torch.distributed as dist

    travelling = tensor.cuda() if dist.get_backend() == "nccl" and not tensor.is_cuda else tensor
    yield travelling
    if travelling is not tensor:
        tensor.copy_(travelling)


@contextmanager
def _peers_alive() -> Iterator[None]:
    """What the others are needed for: where one of them is gone, torch says so in many ways."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise ProcessLostError(
            f"another process of this job has ended, or cannot be reached ({str(error).splitlines()[0][:120]})",
            "look at its own message above; start the job again",
        ) from error


def _one_gpu_each() -> bool:
    """Whether there are as many GPUs as processes on this machine."""
    import torch

    return torch.cuda.device_count() >= _told("LOCAL_WORLD_SIZE", 1)


def _told(name: str, otherwise: int = 0) -> int:
    """A number that the launcher has put into the environment."""
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else otherwise
