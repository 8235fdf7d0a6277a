"""Share one job among the processes that torchrun or accelerate has started.

Knows launchers and collective operations; not the job. Imports torch only to join the group.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

from hf_bico.errors import ProcessLostError, UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


T = TypeVar("T")

_PEER_TIMEOUT = timedelta(hours=1)
"""How long to wait for the other processes: the slowest may still be downloading. One that dies is noticed at once."""
_group_numbers = count()
_joined = False


def process_rank() -> int:
    """Return the rank of this process, from the environment alone."""
    return _from_environment("RANK") if process_count() > 1 else 0


def process_count() -> int:
    """Return the number of processes that the launcher has started, on all machines."""
    return max(_from_environment("WORLD_SIZE", 1), 1) if "RANK" in os.environ else 1


def is_first_process() -> bool:
    """Return whether this process is the one that prints and writes."""
    return process_rank() == 0


def has_joined() -> bool:
    """Return whether this process has joined the others; until then none of them waits for it."""
    return _joined


def local_device(name: str) -> str:
    """Return the device of this process: with one GPU per process, each takes its own."""
    if process_count() == 1 or name not in ("auto", "cuda") or not _one_gpu_each():
        return name
    return f"cuda:{_from_environment('LOCAL_RANK')}"


@dataclass(frozen=True)
class ProcessGroup:
    """The processes of one job; all of them call the same methods in the same order."""

    rank: int = 0
    size: int = 1
    temporary: bool = False
    """Whether `join` made the group for this job; else it is the caller's."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """Return this process's part, in order; parts differ by at most one item, and may be empty.

        >>> [list(ProcessGroup(rank, 2).share("abcde")) for rank in range(2)]
        [['a', 'b'], ['c', 'd', 'e']]
        """
        first, last = (len(items) * rank // self.size for rank in (self.rank, self.rank + 1))
        return items[first:last]

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Sum the tensors over all processes, in place; shapes must be the same everywhere."""
        if self.size == 1:
            return
        import torch.distributed as dist

        for tensor in tensors:
            _in_place(dist.all_reduce, tensor)

    def gather(self, own: dict[str, T]) -> dict[str, T]:
        """Return the union of all processes' entries, in the order of ranks, on every process.

        Tensors arrive on the kind of device that they left.
        """
        if self.size == 1:
            return own
        union: dict[str, T] = {}
        for rank in range(self.size):
            union |= self._from(rank, own)
        return union

    def broadcast(self, value: T) -> T:
        """Return the first process's value on every process."""
        return value if self.size == 1 else self._from(0, value)

    def leave(self) -> None:
        """Wait for the others and leave a group that `join` made; from here on each process may end."""
        if not self.temporary:
            return
        import torch.distributed as dist

        self.gather({})
        with _peers_alive():
            dist.destroy_process_group()

    def _from(self, rank: int, value: T) -> T:
        """Return one process's value on every process: pickled without its tensors, which follow one by one."""
        import torch
        import torch.distributed as dist

        is_sender = rank == self.rank
        message: list[Any] = [None]
        tensors: list[Tensor] = []
        if is_sender:
            content, tensors = _pickle_without_tensors(value)
            message = [(content, [(tensor.shape, tensor.dtype, tensor.device.type) for tensor in tensors])]
        with _peers_alive():
            dist.broadcast_object_list(message, rank)
        content, kinds = message[0]
        if not is_sender:
            tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in kinds]
        for tensor in tensors:
            if tensor.numel() > 0:  # as bytes: gloo does not know every dtype
                in_bytes = tensor.detach().contiguous().view(-1).view(torch.uint8)
                _in_place(partial(dist.broadcast, src=rank), in_bytes)
        return value if is_sender else _unpickle(content, tensors)


ALONE = ProcessGroup()


def join(device: torch.device) -> ProcessGroup:
    """Join the process group of the launcher; without a launcher, return ALONE.

    A group that the caller has initialized is used as it is. A new one uses NCCL between GPUs if every process has its
    own, and gloo for everything else.
    """
    if process_count() == 1:
        return ALONE
    import torch

    dist: Any = torch.distributed
    global _joined
    _joined = True
    if device.index is not None:  # tensors of other processes arrive there
        torch.cuda.set_device(device)
    if dist.is_initialized():
        return ProcessGroup(dist.get_rank(), dist.get_world_size())
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" and _one_gpu_each() else "gloo"
    try:
        with _peers_alive():
            store, rank, size = _rendezvous()
            # a prefix of its own: the addresses of an earlier group are still in the store
            own = dist.PrefixStore(f"hf_bico-{next(_group_numbers)}", store)
            dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=_PEER_TIMEOUT)
    except ValueError as error:
        raise UsageError(
            f"{process_count()} processes cannot find each other: {error}",
            "start them by torchrun or accelerate launch",
        ) from error
    return ProcessGroup(rank, size, temporary=True)


@cache
def _rendezvous() -> tuple[Any, int, int]:
    """Return the launcher's store, this process's rank and the number of processes."""
    from torch.distributed.rendezvous import rendezvous

    store, rank, size = next(iter(rendezvous("env://", timeout=_PEER_TIMEOUT)))
    store.set_timeout(_PEER_TIMEOUT)
    return store, rank, size


def _pickle_without_tensors(value: object) -> tuple[bytes, list[Tensor]]:
    from torch import Tensor

    tensors: list[Tensor] = []
    places: dict[int, int] = {}  # by id: a tensor that is there twice is sent once

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> int | None:
            if not isinstance(obj, Tensor):
                return None
            if id(obj) not in places:
                places[id(obj)] = len(tensors)
                tensors.append(obj)
            return places[id(obj)]

    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue(), tensors


def _unpickle(content: bytes, tensors: Sequence[Tensor]) -> Any:
    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: int) -> Tensor:
            return tensors[pid]

    return Unpickler(io.BytesIO(content)).load()


def _in_place(operation: Callable[[Tensor], object], tensor: Tensor) -> None:
    """Run a collective operation; on a copy if the caller's group has only NCCL, which takes no CPU tensors."""
    import torch.distributed as dist

    moved = (tensor.cuda() if dist.get_backend() == "nccl" else tensor).contiguous()
    with _peers_alive():
        operation(moved)
    if moved is not tensor:
        tensor.copy_(moved)


@contextmanager
def _peers_alive() -> Iterator[None]:
    """Raise ProcessLostError if another process is gone, which torch reports in many ways."""
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
    """Return whether this machine has a GPU for each of its processes."""
    import torch

    return torch.cuda.device_count() >= _from_environment("LOCAL_WORLD_SIZE", 1)


def _from_environment(name: str, default: int = 0) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else default
