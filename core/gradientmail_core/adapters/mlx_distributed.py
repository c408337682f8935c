"""A node of several MLX processes (``mlx.launch``): rank 0 holds the session, the others mirror it.

MLX trains data-parallel: every rank holds the whole model and averages gradients. So only writes need an
echo. Rank 0 does its work alone; then all ranks exchange one short message of fixed length (how it ended,
its result, which tensors were written, whether the optimizer was reset), and the tensors it names. After
every call all ranks hold the same parameters, and a failure of rank 0 is raised on all of them instead of
leaving them in a collective that nobody joins.

Everything travels as a sum of rank 0's integers and the others' zeros, so bits arrive as they were sent.
"""

from collections.abc import Callable
from typing import Final

import mlx.core as mx
import numpy as np

from gradientmail_core.adapters.mlx import MlxModel
from gradientmail_core.errors import SessionFailed

_LEADER: Final = 0
_DONE, _FAILED = 0, 1
_PATTERNS: Final = {2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


class MlxRanks:
    """This process's part in a node; with one process, all of it. Every rank makes the same calls in the same order.

    ``group`` is that of ``mlx.core.distributed.init()``; ``model`` is the one the session was given.
    """

    def __init__(self, model: MlxModel, group: mx.distributed.Group) -> None:
        self._model = model
        self._group = group
        self._names = [tensor.name for tensor in model.schema.tensors]
        self.size = group.size()
        self.leads = group.rank() == _LEADER

    def total(self, samples: int) -> int:
        """Samples of all ranks."""
        return int(self._sum(np.array([samples], np.int64))[0])

    def run(self, work: Callable[[], int]) -> int:
        """Do ``work`` on rank 0 and mirror it on the others; its result (an int64) on all of them.

        An error of ``work`` is raised on rank 0, and as :class:`SessionFailed` on the others.
        """
        if self.size == 1:
            return work()
        if not self.leads:
            return self._follow()
        self._model.written.clear()
        self._model.was_reset = False
        try:
            result = work()
        except BaseException as error:
            self._tell(_FAILED, 0, str(error) or type(error).__name__)
            raise
        self._tell(_DONE, result, "")
        return result

    def _tell(self, status: int, result: int, text: str) -> None:
        body = np.frombuffer(text.encode(), np.uint8)
        written = [name in self._model.written for name in self._names]
        self._sum(np.array([status, result, self._model.was_reset, body.size, *written], np.int64))
        if body.size:
            self._sum(body.astype(np.int64))
        for name, sent in zip(self._names, written, strict=True):
            if sent:
                self._exchange(self._model.array(name))

    def _follow(self) -> int:
        head = self._sum(np.zeros(4 + len(self._names), np.int64))
        status, result, was_reset, length = (int(number) for number in head[:4])
        text = self._sum(np.zeros(length, np.int64)).astype(np.uint8).tobytes().decode() if length else ""
        written = [name for name, sent in zip(self._names, head[4:], strict=True) if sent]
        self._model.put({name: self._exchange(mx.zeros_like(self._model.array(name))) for name in written})
        if was_reset:
            self._model.reset_optimizer()
        if status == _FAILED:
            raise SessionFailed(f"The node's leading process failed: {text}", "See its own output for the cause.")
        return result

    def _exchange(self, array: mx.array) -> mx.array:
        patterns = array.view(_PATTERNS[array.itemsize])
        total = mx.distributed.all_sum(patterns, group=self._group, stream=mx.cpu)
        mx.eval(total)
        return total.view(array.dtype)

    def _sum(self, numbers: np.ndarray[tuple[int], np.dtype[np.int64]]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        if self.size == 1:
            return numbers
        return np.array(mx.distributed.all_sum(mx.array(numbers), group=self._group, stream=mx.cpu))
