"""Two ranks: what the leader's session does to its model happens on both, and so do its failures."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from gradientmail_core.adapters.torch import TorchModel
from gradientmail_core.adapters.torch_distributed import Alone, Ranks
from gradientmail_core.errors import SessionFailed
from gradientmail_core.tensors.schema import FragmentLayout, Piece

pytestmark = pytest.mark.timeout(300)

ROWS, COLUMNS = 5, 3
WHOLE = FragmentLayout(0, (Piece("bias", (ROWS,), 0), Piece("weight", (ROWS, COLUMNS), ROWS)))
PART = FragmentLayout(1, (Piece("weight", (2, COLUMNS), 0, rows=(1, 3)),))


def numbers(size: int, start: float = 0.0) -> np.ndarray:
    return np.arange(size, dtype=np.float32) + np.float32(start)


def sharded(placements) -> nn.Module:
    """A layer whose weight is spread over both ranks."""
    module = nn.Linear(COLUMNS, ROWS)
    mesh = init_device_mesh("cpu", (2,))
    module.weight = nn.Parameter(distribute_tensor(torch.zeros(ROWS, COLUMNS), mesh, placements))
    return module


def full(parameter: torch.Tensor | nn.Module) -> list[float]:
    assert isinstance(parameter, torch.Tensor)
    tensor = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return tensor.detach().flatten().tolist()


def mirrored_writes(module: nn.Module) -> dict[str, object]:
    """Write all of the model, then two rows of it, then read both back through the session's model."""
    model = TorchModel(module)
    ranks = Ranks(model, torch.device("cpu"))
    read = [np.empty(layout.size, np.float32) for layout in (WHOLE, PART)]

    def session() -> int:
        ranks.model.write(WHOLE, numbers(WHOLE.size))
        ranks.model.write(PART, numbers(PART.size, 100))
        for layout, out in zip((WHOLE, PART), read, strict=True):
            ranks.model.read(layout, out)
        return 7

    result = ranks.run(session)
    ranks.close()
    found = [values.tolist() for values in read] if ranks.leads else None
    return {"result": result, "bias": full(module.bias), "weight": full(module.weight), "read": found}


def failures() -> dict[str, object]:
    """An error of the session's work, and the next call after it."""
    ranks = Ranks(TorchModel(nn.Linear(COLUMNS, ROWS)), torch.device("cpu"))

    def session() -> int:
        raise ZeroDivisionError("the store is gone")

    try:
        ranks.run(session)
    except (ZeroDivisionError, SessionFailed) as error:
        failure = f"{type(error).__name__}: {error}"
    return {"failure": failure, "after": ranks.run(lambda: 3)}


def reset() -> dict[str, object]:
    """The optimizer's state after the leader's session reset it."""
    module = nn.Linear(COLUMNS, ROWS)
    model = TorchModel(module)
    optimizer = torch.optim.AdamW(module.parameters())
    model.track_optimizer(optimizer)
    module(torch.ones(COLUMNS)).sum().backward()
    optimizer.step()
    ranks = Ranks(model, torch.device("cpu"))

    def session() -> int:
        ranks.model.reset_optimizer()
        return 0

    ranks.run(session)
    return {"state": len(optimizer.state)}


def fsdp2() -> nn.Module:
    """A layer that FSDP2 spreads over both ranks."""
    module = nn.Linear(COLUMNS, ROWS)
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    return module


def lent(module: nn.Module) -> dict[str, object]:
    """What every rank holds after its parameters were set aside, written over by the session, and put back."""
    rank = dist.get_rank()
    ranks = Ranks(TorchModel(module), torch.device("cpu"))
    parameters: list[torch.Tensor] = [parameter.detach() for parameter in module.parameters()]
    own = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in parameters]
    with torch.no_grad():
        for parameter in own:
            parameter.fill_(0.1 + rank)
    kept: list[object] = []

    def enter() -> int:
        kept.append(ranks.model.keep())
        ranks.model.write(WHOLE, numbers(WHOLE.size))
        return 0

    def leave() -> int:
        ranks.model.restore(kept.pop())
        return 0

    ranks.run(enter)
    during = full(module.bias)
    if isinstance(module, FSDPModule):  # which is left with whole parameters by a forward pass alone
        with torch.no_grad():
            module(torch.ones(COLUMNS))
    ranks.run(leave)
    ranks.close()
    return {"during": during, "after": sorted({value for part in own for value in part.flatten().tolist()})}


def totals() -> dict[str, object]:
    """Samples of both ranks, where they read different data and where they read the same."""
    model = TorchModel(nn.Linear(COLUMNS, ROWS))
    sums = [Ranks(model, torch.device("cpu"), replicas=count).total(10 + dist.get_rank()) for count in (None, 2, 1)]
    return {"totals": sums if dist.get_rank() == 0 else None}


def listed() -> dict[str, object]:
    """What the leader found out is known on both, also when it is nothing."""
    ranks = Ranks(TorchModel(nn.Linear(COLUMNS, ROWS)), torch.device("cpu"))
    return {"numbers": [ranks.numbers(lambda: [3, 1]), ranks.numbers(list)]}


def frozen() -> dict[str, object]:
    """The fingerprint of a frozen weight that is spread over the ranks."""
    module = sharded([Shard(0)])
    module.weight.requires_grad_(False)
    model = Ranks(TorchModel(module), torch.device("cpu")).model
    plain = nn.Linear(COLUMNS, ROWS)
    plain.weight = nn.Parameter(torch.zeros(ROWS, COLUMNS), requires_grad=False)
    return {"equal": model.frozen_fingerprint == TorchModel(plain).frozen_fingerprint}


def main(rank: int, folder: Path) -> None:
    """All of it on one rank, written to a file."""
    dist.init_process_group("gloo", init_method=(folder / "meeting").as_uri(), rank=rank, world_size=2)
    torch.manual_seed(rank)
    found = {
        "plain": mirrored_writes(nn.Linear(COLUMNS, ROWS)),
        "shard0": mirrored_writes(sharded([Shard(0)])),
        "shard1": mirrored_writes(sharded([Shard(1)])),
        "replicate": mirrored_writes(sharded([Replicate()])),
        "failures": failures(),
        "reset": reset(),
        "lent": lent(nn.Linear(COLUMNS, ROWS)),
        "lent_shards": lent(sharded([Shard(0)])),
        "lent_fsdp2": lent(fsdp2()),
        "totals": totals(),
        "listed": listed(),
        "frozen": frozen(),
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each of two ranks saw."""
    folder = tmp_path_factory.mktemp("ranks")
    commands = [[sys.executable, "-W", "ignore", __file__, str(rank), str(folder)] for rank in range(2)]
    ranks = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    errors = [rank.communicate(timeout=240)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("kind", ["plain", "shard0", "shard1", "replicate"])
def test_what_the_leader_writes_is_on_all_ranks(found, kind):
    weight = numbers(ROWS * COLUMNS, ROWS).reshape(ROWS, COLUMNS)
    weight[1:3] = numbers(6, 100).reshape(2, COLUMNS)
    for rank in found:
        assert rank[kind]["bias"] == numbers(ROWS).tolist()
        assert rank[kind]["weight"] == weight.flatten().tolist()
        assert rank[kind]["result"] == 7
    whole, part = found[0][kind]["read"]
    assert whole == [*numbers(ROWS).tolist(), *weight.flatten().tolist()]
    assert part == numbers(6, 100).tolist()


def test_the_leaders_numbers_are_known_on_all_ranks(found):
    assert [rank["listed"]["numbers"] for rank in found] == [[[3, 1], []]] * 2
    assert Alone(TorchModel(nn.Linear(COLUMNS, ROWS))).numbers(lambda: [5]) == [5]


def test_the_leaders_failure_is_raised_on_all_ranks_and_the_next_call_works(found):
    assert found[0]["failures"]["failure"] == "ZeroDivisionError: the store is gone"
    assert "SessionFailed: The node's leading process failed: the store is gone" in found[1]["failures"]["failure"]
    assert [rank["failures"]["after"] for rank in found] == [3, 3]


def test_every_ranks_optimizer_is_reset(found):
    assert [rank["reset"]["state"] for rank in found] == [0, 0]


@pytest.mark.parametrize("kind", ["lent", "lent_shards", "lent_fsdp2"])
def test_every_rank_gets_its_own_parameters_back(found, kind):
    for number, rank in enumerate(found):
        assert rank[kind]["during"] == numbers(ROWS).tolist()
        assert rank[kind]["after"] == [float(np.float32(0.1 + number))]


def test_samples_are_counted_once(found):
    assert found[0]["totals"]["totals"] == [21, 21, 10]


def test_a_frozen_weight_has_one_fingerprint_whole_or_in_parts(found):
    assert all(rank["frozen"]["equal"] for rank in found)


def test_a_node_of_one_process_leads_itself():
    model = TorchModel(nn.Linear(COLUMNS, ROWS))
    alone = Alone(model)
    assert alone.leads
    assert alone.model is model
    assert alone.total(5) == 5
    assert alone.run(lambda: 4) == 4
    alone.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
