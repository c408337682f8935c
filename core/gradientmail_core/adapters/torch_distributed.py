"""A node of several processes: one leads and holds the session, the others mirror what it does to the model.

Whatever the session does, it does on the leader, inside :meth:`Ranks.run`. Meanwhile the followers wait
in the same call for the leader's word: copy a fragment out (a collective where parameters are sharded),
write one in (the values come with it), set the parameters aside and back, forget the optimizer's state,
done, or failed. So all processes
hold the same parameters after every call, and a failure of the leader is raised on all of them instead
of leaving them in a collective that nobody joins.

Words travel as three integers, texts as UTF-8 and layouts as JSON over a gloo group of their own, whose
time-out outlasts any wait for other nodes; values over NCCL where the parameters are on CUDA devices.
"""

import enum
import json
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import Final, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gradientmail_core.adapters.torch import TorchModel
from gradientmail_core.errors import SessionFailed
from gradientmail_core.tensors.model import Flat, KeepingModel
from gradientmail_core.tensors.schema import FragmentLayout, Piece, Schema

T = TypeVar("T")

_PATIENCE: Final = timedelta(days=30)
_LEADER: Final = 0


class Processes(Protocol):
    """The processes that make up a node."""

    @property
    def leads(self) -> bool:
        """Whether this process holds the session."""
        ...

    @property
    def model(self) -> KeepingModel:
        """The model to give to the session; the leader only uses it inside :meth:`run`."""
        ...

    def total(self, samples: int) -> int:
        """Samples of all processes; right on the leader only."""
        ...

    def run(self, work: Callable[[], int]) -> int:
        """Do ``work`` on the leader and mirror it on the others; its result (an int64) on all of them.

        An error of ``work`` is raised on the leader, and as :class:`SessionFailed` on the others.
        """
        ...

    def numbers(self, work: Callable[[], list[int]]) -> list[int]:
        """As :meth:`run`, for work that results in a list of whole numbers."""
        ...

    def close(self) -> None:
        """Release what is shared between the processes; all of them call it."""
        ...

    def abandon(self) -> None:
        """Say nothing to the other processes any more, and put back here what was set aside. Never waits."""
        ...


class Alone:
    """A node of one process."""

    leads: Final = True

    def __init__(self, model: TorchModel) -> None:
        self.model: KeepingModel = model

    def total(self, samples: int) -> int:
        """See :class:`Processes`."""
        return samples

    def run(self, work: Callable[[], int]) -> int:
        """See :class:`Processes`."""
        return work()

    def numbers(self, work: Callable[[], list[int]]) -> list[int]:
        """See :class:`Processes`."""
        return work()

    def close(self) -> None:
        """See :class:`Processes`."""

    def abandon(self) -> None:
        """See :class:`Processes`."""


class _Word(enum.IntEnum):
    LAYOUT = 0
    READ = 1
    WRITE = 2
    RESET = 3
    DONE = 4
    FAILED = 5
    KEEP = 6
    RESTORE = 7


class Ranks:
    """This process's part in a node of ``torch.distributed`` ranks; rank 0 leads.

    ``replicas`` is the number of ranks that read different data: with tensor parallelism it is smaller
    than the world, and samples are counted once. Every rank makes one, in the same order as any other
    process group.
    """

    def __init__(self, model: TorchModel, device: torch.device, *, replicas: int | None = None) -> None:
        self._inner = model
        self._control = dist.new_group(backend="gloo", timeout=_PATIENCE)
        on_device = device.type == "cuda" and dist.get_backend() == "nccl"
        self._values = dist.group.WORLD if on_device else self._control
        self._device = device if on_device else torch.device("cpu")
        self._world = dist.get_world_size()
        self._replicas = replicas or self._world
        self._layouts: list[FragmentLayout] = []
        self._kept: list[object] = []
        self._abandoned = False
        self.leads = dist.get_rank() == _LEADER
        self.model: KeepingModel = _Led(model, model.frozen_fingerprint, self)

    def total(self, samples: int) -> int:
        """See :class:`Processes`."""
        count = torch.tensor([samples], dtype=torch.int64)
        dist.reduce(count, _LEADER, group=self._control)
        return int(count.item()) * self._replicas // self._world

    def run(self, work: Callable[[], int]) -> int:
        """See :class:`Processes`."""
        if not self.leads:
            return self._follow()[0]
        result = self._led(work)
        self._say(_Word.DONE, result)
        return result

    def numbers(self, work: Callable[[], list[int]]) -> list[int]:
        """See :class:`Processes`."""
        if not self.leads:
            return [int(number) for number in json.loads(self._follow()[1])]
        result = self._led(work)
        self._say(_Word.DONE, text=json.dumps(result))
        return result

    def _led(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except BaseException as error:
            self._say(_Word.FAILED, text=str(error) or type(error).__name__)
            raise

    def close(self) -> None:
        """See :class:`Processes`."""
        dist.destroy_process_group(self._control)

    def abandon(self) -> None:
        """See :class:`Processes`."""
        self._abandoned = True
        while self._kept:
            self._inner.restore(self._kept.pop())

    def read(self, layout: FragmentLayout, out: Flat) -> None:
        """On the leader: copy the fragment out, with the others where it is sharded over them."""
        if self._inner.sharded:
            self._say(_Word.READ, self._numbered(layout))
        self._inner.read(layout, out)

    def write(self, layout: FragmentLayout, values: Flat) -> None:
        """On the leader: write the fragment on all ranks."""
        self._say(_Word.WRITE, self._numbered(layout))
        flat = torch.from_numpy(values if values.flags.writeable else values.copy()).to(self._device)
        self._receive(flat, layout)

    def reset_optimizer(self) -> None:
        """On the leader: forget the optimizer's state on all ranks."""
        self._say(_Word.RESET)
        self._inner.reset_optimizer()

    def keep(self) -> object:
        """On the leader: set the parameters of all ranks aside, each its own."""
        self._say(_Word.KEEP)
        return self._inner.keep()

    def restore(self, kept: object) -> None:
        """On the leader: put back on all ranks what was set aside last."""
        self._say(_Word.RESTORE)
        self._inner.restore(kept)

    def _receive(self, flat: Tensor, layout: FragmentLayout) -> None:
        dist.broadcast(flat, _LEADER, group=self._values)
        self._inner.write_tensor(layout, flat)

    def _numbered(self, layout: FragmentLayout) -> int:
        if layout not in self._layouts:
            self._say(_Word.LAYOUT, text=json.dumps(asdict(layout)))
            self._layouts.append(layout)
        return self._layouts.index(layout)

    def _say(self, word: _Word, argument: int = 0, text: str = "") -> None:
        if self._abandoned:
            return
        body = text.encode()
        self._broadcast(torch.tensor([word, argument, len(body)], dtype=torch.int64))
        if body:
            self._broadcast(torch.frombuffer(bytearray(body), dtype=torch.uint8))

    def _listen(self) -> tuple[_Word, int, str]:
        head = self._broadcast(torch.empty(3, dtype=torch.int64))
        word, argument, length = (int(number) for number in head.tolist())
        body = self._broadcast(torch.empty(length, dtype=torch.uint8)) if length else torch.empty(0, dtype=torch.uint8)
        return _Word(word), argument, body.numpy().tobytes().decode()

    def _broadcast(self, tensor: Tensor) -> Tensor:
        dist.broadcast(tensor, _LEADER, group=self._control)
        return tensor

    def _follow(self) -> tuple[int, str]:
        while True:
            word, argument, text = self._listen()
            match word:
                case _Word.LAYOUT:
                    self._layouts.append(_layout_from(text))
                case _Word.READ:
                    layout = self._layouts[argument]
                    self._inner.read(layout, np.empty(layout.size, np.float32))
                case _Word.WRITE:
                    layout = self._layouts[argument]
                    self._receive(torch.empty(layout.size, dtype=torch.float32, device=self._device), layout)
                case _Word.RESET:
                    self._inner.reset_optimizer()
                case _Word.KEEP:
                    self._kept.append(self._inner.keep())
                case _Word.RESTORE:
                    self._inner.restore(self._kept.pop())
                case _Word.DONE:
                    return argument, text
                case _Word.FAILED:
                    raise SessionFailed(
                        f"The node's leading process failed: {text}", "See its own output for the cause."
                    )


class _Led:
    """The leader's model: each access is first announced to the followers."""

    def __init__(self, model: TorchModel, fingerprint: str | None, ranks: Ranks) -> None:
        self.schema: Schema = model.schema
        self.frozen_fingerprint = fingerprint
        self.read = ranks.read
        self.write = ranks.write
        self.reset_optimizer = ranks.reset_optimizer
        self.keep = ranks.keep
        self.restore = ranks.restore


def _layout_from(text: str) -> FragmentLayout:
    fields = json.loads(text)
    pieces = (
        Piece(
            name=piece["name"],
            shape=tuple(piece["shape"]),
            offset=piece["offset"],
            rows=None if piece["rows"] is None else (piece["rows"][0], piece["rows"][1]),
            role=piece["role"],
        )
        for piece in fields["pieces"]
    )
    return FragmentLayout(fields["fragment"], tuple(pieces))
