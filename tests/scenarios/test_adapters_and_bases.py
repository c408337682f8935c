"""Models of which only a part is trained, or that name one tensor twice: what travels, and who is refused."""

import pytest
import torch

import gradientmail_core as gm

SETTINGS = gm.DiLoCo(sync_every=2, fragments=1, delta_codec="F32", compression=None)


class Adapted(torch.nn.Module):
    """A frozen base of a million parameters and adapters of 40,000."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = torch.nn.Linear(1000, 1000, bias=False).requires_grad_(False)
        self.down, self.up = torch.nn.Linear(1000, 20, bias=False), torch.nn.Linear(20, 1000, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(inputs) + self.up(self.down(inputs))
        return result


def sizes(mailbox: gm.MemoryMailbox, prefix: str) -> list[int]:
    return [entry.size for entry in mailbox._entries(prefix, "")]


def trained(module: torch.nn.Module, mailbox: gm.MemoryMailbox, steps: int = 6) -> None:
    with gm.Session(module, mailbox=mailbox, algorithm=SETTINGS, callbacks=[]) as session:
        for _ in range(steps):
            with torch.no_grad():
                for parameter in module.parameters():
                    if parameter.requires_grad:
                        parameter.sub_(0.01)
            session.step()
    assert session.rounds_seen >= 1


def test_only_adapters_travel_and_the_base_stays_frozen() -> None:
    mailbox, module, late = gm.MemoryMailbox(), Adapted(), Adapted()
    base = module.base.weight.detach().clone()
    trained(module, mailbox)
    trained(late, mailbox)
    payload = 40_000 * 4
    assert max(sizes(mailbox, "")) <= 1.05 * payload
    assert sum(sizes(mailbox, "blobs/")) <= 1.05 * payload * 5, "two versions with their outer state, and the first"
    for found in (module, late):
        assert [p.requires_grad for p in found.parameters()] == [False, True, True]
        assert torch.equal(found.base.weight, base)


class Language(torch.nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wte, self.lm_head = torch.nn.Embedding(32, 8), torch.nn.Linear(8, 32, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight


def test_an_untied_twin_of_a_tied_model_is_refused_by_name() -> None:
    mailbox, tied = gm.MemoryMailbox(), Language(tied=True)
    trained(tied, mailbox)
    assert tied.lm_head.weight.data_ptr() == tied.wte.weight.data_ptr()
    with pytest.raises(gm.SchemaMismatch, match=r"lm_head\.weight"):
        trained(Language(tied=False), mailbox)
