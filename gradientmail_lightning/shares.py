"""The node's share of the global batch, in the trainer's own loaders.

A loader is taken when Lightning has prepared it and before anything iterates it. From then on its batches have the
size that the strategy says, and its epochs keep their number of batches, or else that of their samples (see
:mod:`gradientmail_core.adapters.torch_loaders`). Where that cannot work the loader stays as it is, and one warning
says why: a session weighs what a node really trained on, so a batch of the wrong size is no error.

A fit with several train loaders takes one batch from each for a step. What share each should have is the user's
decision, so all of them keep their sizes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import cast

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from gradientmail_core.adapters.torch_loaders import ElasticStream, Share, elastic, why_rigid


class BatchShares:
    """The streams behind the train loaders of one fit. ``size`` is how large a batch should be now.

    Without it batches keep their size, and all that a stream adds is that its place in the data can be told.

    With ``one_pass`` an epoch is one pass over the data, of as many batches as that takes.
    """

    def __init__(self, size: Share | None, warn: Callable[[str], None], *, one_pass: bool = False) -> None:
        self._size = size
        self._one_pass = one_pass
        self._warn = warn
        self._warned = False
        self._streams: list[ElasticStream] = []
        self._complete = False
        self._saved: list[Mapping[str, object]] = []

    def begin(self) -> None:
        """A fit begins: loaders that were taken before are not its own."""
        self._complete = True

    def taken(self, loader: object) -> object:
        """``loader``, or a copy of it whose batches follow the share."""
        if self._complete:
            self._streams, self._complete = [], False
        if self._size is None and hasattr(loader, "load_state_dict"):
            return loader  # its place is in Lightning's own state
        reason = why_rigid(loader) or (_why_untold(loader) if self._size is None else None)
        if reason is not None:
            self._keep(reason)
            return loader
        kept = cast(DataLoader[object], loader)
        nominal = cast(BatchSampler, kept.batch_sampler).batch_size
        one_pass = self._one_pass and self._size is not None
        taken, stream = elastic(kept, lambda: self._size_in(nominal), one_pass=one_pass)
        self._streams.append(stream)
        if len(self._streams) > 1 and self._size is not None:
            self._keep("there are several of them")
        if self._saved:
            stream.load_state_dict(self._saved.pop(0))
        return taken

    def confirm(self) -> None:
        """A batch was trained on; the loaders of this fit are all there."""
        self._complete = True
        for stream in self._streams:
            stream.confirm()

    def state(self) -> list[dict[str, object]]:
        """Where the streams stand, for a checkpoint."""
        return [stream.state_dict() for stream in self._streams]

    def restore(self, states: Sequence[Mapping[str, object]]) -> None:
        """Let the loaders that are taken next go on from ``states``."""
        self._saved = list(states)

    def _size_in(self, nominal: int) -> int:
        return self._size() if self._size is not None and len(self._streams) == 1 else nominal

    def _keep(self, reason: str) -> None:
        if not self._warned:
            self._warn(reason)
        self._warned = True


def _why_untold(loader: object) -> str | None:
    """Why a stream could not tell its place in the data of ``loader``; None if it can."""
    streamed = isinstance(getattr(loader, "dataset", None), IterableDataset)
    return "an IterableDataset is read from its beginning" if streamed else None
