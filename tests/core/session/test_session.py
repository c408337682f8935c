"""The session: exactly DiLoCo where it is set so, usable in a notebook, and clear when it refuses."""

import asyncio
import copy
import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gradientmail_core as gm
from gradientmail_core.adapters.torch import TorchModel
from gradientmail_core.adapters.torch_handoff import TorchHandoff
from gradientmail_core.events import HandedOff, RunWaited, SessionEnded, SyncerElected
from gradientmail_core.sim.world import ToyModel

BARRIER = gm.DiLoCo(
    sync_every=5,
    fragments=1,
    in_flight=1,
    overlap_steps=0,
    follow=False,
    quorum_size=2,
    merge=gm.WeightedMean(),
    outer=gm.Nesterov(lr=0.7, momentum=0.9, warmup=0.0),
    delta_codec="F32",
)
LOCAL_SGD = gm.DiLoCo.local_sgd(sync_every=5, delta_codec="F32", quorum_size=2)
ROUNDS = 10


def network(seed: int = 0, width: int = 16) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Tanh(), torch.nn.Linear(width, 8))


def batches(node: int) -> list[torch.Tensor]:
    noise = torch.Generator().manual_seed(node)
    return [torch.randn(4, 8, generator=noise) for _ in range(ROUNDS * BARRIER.sync_every)]


def inner_step(module: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    optimizer.zero_grad()
    (module(inputs) - inputs.flip(1)).pow(2).mean().backward()
    optimizer.step()


def plain_diloco(nodes: int, **outer_settings: Any) -> torch.nn.Module:
    """DiLoCo (arXiv 2311.08105, algorithm 1) in one process, with torch's own outer optimizer."""
    shared = network()
    outer = torch.optim.SGD(shared.parameters(), **outer_settings)
    workers = [network() for _ in range(nodes)]
    inner = [torch.optim.AdamW(worker.parameters(), 1e-2) for worker in workers]
    data = [batches(node) for node in range(nodes)]
    for round in range(ROUNDS):
        for worker, optimizer, stream in zip(workers, inner, data, strict=True):
            worker.load_state_dict(shared.state_dict())
            for inputs in stream[round * BARRIER.sync_every : (round + 1) * BARRIER.sync_every]:
                inner_step(worker, optimizer, inputs)
        for index, parameter in enumerate(shared.parameters()):
            deltas = [parameter.data - list(worker.parameters())[index].data for worker in workers]
            parameter.grad = torch.stack(deltas).mean(0)
        outer.step()
    return shared


def trained_node(name: int, mailbox: gm.Mailbox, module: torch.nn.Module, algorithm: gm.DiLoCo) -> None:
    optimizer = torch.optim.AdamW(module.parameters(), 1e-2)
    with gm.Session(module, mailbox=mailbox, algorithm=algorithm, node=f"n{name}", min_nodes=2) as session:
        for inputs in batches(name):
            inner_step(module, optimizer, inputs)
            session.step(len(inputs))


@pytest.mark.parametrize(
    ("algorithm", "outer"),
    [(BARRIER, {"lr": 0.7, "momentum": 0.9, "nesterov": True}), (LOCAL_SGD, {"lr": 1.0})],
    ids=["DiLoCo", "Local SGD"],
)
def test_barrier_settings_reproduce_plain_diloco(algorithm: gm.DiLoCo, outer: dict[str, Any]) -> None:
    """With an outer rate of 1 and no momentum it is Local SGD: the parameters' mean every H steps."""
    mailbox = gm.MemoryMailbox()
    results = [network() for _ in range(2)]  # before the threads, which share torch's generator
    threads = [
        threading.Thread(target=trained_node, args=(name, mailbox, results[name], algorithm)) for name in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = plain_diloco(2, **outer)
    for module in results:
        for ours, plain in zip(module.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)
    first, second = (list(results[name].parameters()) for name in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_works_inside_a_running_event_loop() -> None:
    async def cell() -> int:
        module = network()
        with gm.Session(module, mailbox=gm.MemoryMailbox(), algorithm=gm.DiLoCo(sync_every=2, fragments=1)) as session:
            for _ in range(6):
                session.step()
        return session.rounds_seen

    assert asyncio.run(cell()) >= 1


def keys_of(mailbox: gm.MemoryMailbox) -> list[str]:
    return [entry.key for entry in mailbox._entries("", "")]


def test_leaving_by_exception_aborts_and_publishes_nothing_more() -> None:
    ended: list[gm.Event] = []
    mailbox = gm.MemoryMailbox()
    settings = gm.DiLoCo(sync_every=2, fragments=2, flush_on_close=True)
    session = gm.Session(network(), mailbox=mailbox, algorithm=settings, node="a", callbacks=[ended.append])
    with pytest.raises(ZeroDivisionError), session:
        session.step()
        before = keys_of(mailbox)
        raise ZeroDivisionError("bad batch")
    new = set(keys_of(mailbox)) - set(before)
    assert [key.split("-")[1][0] for key in new if key.startswith("live/leases/a/")][-1:] == ["x"]
    assert not [key for key in new if not key.startswith("live/leases/a/")], "what was due is not published"
    assert any(isinstance(event, SessionEnded) and "bad batch" in event.reason for event in ended)
    with pytest.raises(gm.SessionClosed):
        session.step()


def test_leaving_gives_up_where_nobody_closes_and_says_so() -> None:
    """A learner in a run without a syncer: its snapshots wait for nobody, and its model ends on what is committed."""
    heard: list[gm.Event] = []
    module = network()
    started = [parameter.detach().clone() for parameter in module.parameters()]
    session = gm.Session(
        module, mailbox=gm.MemoryMailbox(), algorithm=gm.DiLoCo(sync_every=2, fragments=1), role="learner",
        close_timeout=0.5, callbacks=[heard.append],
    )  # fmt: skip
    with session:
        for _ in range(4):
            inner_step(module, torch.optim.SGD(module.parameters(), 0.1), batches(0)[0])
            session.step()
    assert [event for event in heard if isinstance(event, RunWaited) and "leaving without" in event.reason]
    assert [event.reason for event in heard if isinstance(event, SessionEnded)] == [""]
    for before, after in zip(started, module.parameters(), strict=True):
        assert torch.equal(before, after), "nothing was committed since"


def test_a_session_says_where_it_is_in_its_life() -> None:
    session = gm.Session(network(), mailbox=gm.MemoryMailbox(), algorithm=gm.DiLoCo())
    assert isinstance(session.model, TorchModel)
    lives = [(session.joined, session.ended)]
    with session:
        lives.append((session.joined, session.ended))
    lives.append((session.joined, session.ended))
    assert lives == [(False, False), (True, False), (False, True)]


def run_at(mailbox: gm.Mailbox, algorithm: gm.DiLoCo | None = None, module: torch.nn.Module | None = None) -> None:
    session = gm.Session(module or network(), mailbox=mailbox, algorithm=algorithm or gm.DiLoCo(), callbacks=[])
    with session:
        session.step()


def test_another_schema_is_refused_with_a_diff() -> None:
    mailbox = gm.MemoryMailbox()
    run_at(mailbox)
    with pytest.raises(gm.SchemaMismatch) as refusal:
        run_at(mailbox, module=network(width=17))
    assert "0.weight" in str(refusal.value) and "[16, 8]" in str(refusal.value) and "[17, 8]" in str(refusal.value)


def test_another_configuration_is_refused_with_the_settings() -> None:
    mailbox = gm.MemoryMailbox()
    run_at(mailbox)
    with pytest.raises(gm.RunMismatch, match="sync_every: 50 here, 100 in the run"):
        run_at(mailbox, gm.DiLoCo(sync_every=50))


def test_a_used_prefix_is_refused() -> None:
    mailbox = gm.MemoryMailbox()
    asyncio.run(mailbox.put("photos/cat.jpg", b"..."))
    with pytest.raises(gm.RunMismatch, match="in use"):
        run_at(mailbox)


def test_a_foreign_manifest_is_refused() -> None:
    mailbox = gm.MemoryMailbox()
    asyncio.run(mailbox.put("manifest.json", b'{"name": "a web app"}'))
    with pytest.raises(gm.RunMismatch, match="no manifest"):
        run_at(mailbox)


def test_another_frozen_base_is_refused() -> None:
    def half_frozen(seed: int) -> torch.nn.Module:
        module = network(seed)
        module[0].requires_grad_(False)  # type: ignore[index]  # a layer
        return module

    mailbox = gm.MemoryMailbox()
    run_at(mailbox, module=half_frozen(0))
    with pytest.raises(gm.RunMismatch, match="frozen"):
        run_at(mailbox, module=half_frozen(1))


def test_a_mailbox_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(gm.GradientMailError, match="file"):
        gm.Session(network(), mailbox=str(tmp_path / "file"), algorithm=gm.DiLoCo())


def test_a_bad_url_is_refused() -> None:
    with pytest.raises(gm.ConfigurationError):
        gm.Session(network(), mailbox="gopher://somewhere/run", algorithm=gm.DiLoCo())


def test_more_fragments_than_steps_are_refused() -> None:
    with pytest.raises(gm.ConfigurationError, match="fragments=8 is more than sync_every=4"):
        gm.DiLoCo(sync_every=4, fragments=8)


def test_a_model_without_trainable_parameters_is_refused() -> None:
    frozen = network().requires_grad_(False)
    with pytest.raises(gm.GradientMailError, match="trainable"):
        gm.Session(frozen, mailbox=gm.MemoryMailbox(), algorithm=gm.DiLoCo()).join()


def test_a_session_is_used_once() -> None:
    session = gm.Session(network(), mailbox=gm.MemoryMailbox(), algorithm=gm.DiLoCo(), callbacks=[])
    with session:
        session.step()
    with pytest.raises(gm.SessionClosed):
        session.join()


def test_a_node_that_sends_poison_is_rolled_back_and_leaves() -> None:
    mailbox = gm.MemoryMailbox()
    settings = gm.DiLoCo(sync_every=2, fragments=1, in_flight=1, overlap_steps=0, follow=False)
    module = network()
    started = [parameter.detach().clone() for parameter in module.parameters()]
    session = gm.Session(module, mailbox=mailbox, algorithm=settings, callbacks=[])
    session.join()
    with pytest.raises(gm.SessionFailed, match="refused 3 snapshots"):
        for _ in range(20):
            with torch.no_grad():
                next(module.parameters()).fill_(float("nan"))
            session.step()
    for before, after in zip(started, module.parameters(), strict=True):
        assert torch.equal(before, after), "the model is back at what was committed"
    other = network(seed=3)
    gm.align(other, mailbox=mailbox)
    for before, committed in zip(started, other.parameters(), strict=True):
        assert torch.equal(before, committed), "no poison was committed"


@pytest.mark.parametrize("algorithm", [
    gm.DiLoCo(sync_every=2, fragments=1, in_flight=1, overlap_steps=0, follow=False), gm.FactoredGossip.global_m1(2)
])  # fmt: skip
def test_one_batch_that_is_not_finite_costs_a_round_and_no_more(algorithm: gm.DiLoCo | gm.FactoredGossip) -> None:
    """In a loop of one's own: the optimizer's moments, which took in the NaN, go back with the parameters."""
    module = network()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    with gm.Session(module, mailbox=gm.MemoryMailbox(), algorithm=algorithm, callbacks=[]) as session:
        for step in range(30):
            optimizer.zero_grad()
            inputs = torch.full((4, 8), float("nan") if step == 5 else 1.0)
            module(inputs).square().sum().backward()
            optimizer.step()
            session.step(4)
    assert all(torch.isfinite(parameter).all() for parameter in module.parameters())
    assert session.ledger.merged >= 80


def test_counts_of_any_integer_type_are_taken_and_others_refused() -> None:
    with gm.Session(network(), mailbox=gm.MemoryMailbox(), algorithm=gm.DiLoCo(sync_every=2, fragments=1)) as session:
        session.step(np.int64(4))  # type: ignore[arg-type]  # a whole number all the same
        session.step(torch.tensor(4))  # type: ignore[arg-type]  # a whole number all the same
        for wrong in (3.7, -5, "4"):
            with pytest.raises(gm.ConfigurationError, match="number of samples"):
                session.step(wrong)  # type: ignore[arg-type]  # wrong on purpose


def test_a_namesake_ends_the_older_process_with_the_reason() -> None:
    mailbox = gm.MemoryMailbox()
    settings = gm.DiLoCo(sync_every=2, fragments=1)
    older = gm.Session(network(), mailbox=mailbox, algorithm=settings, node="a", lease_timeout=1.2, callbacks=[])
    older.join()
    with (
        gm.Session(network(), mailbox=mailbox, algorithm=settings, node="a", lease_timeout=1.2, callbacks=[]) as newer,
        pytest.raises(gm.SessionFailed, match="Another process runs as node 'a'") as failed,
    ):
        for _ in range(100):
            newer.step()
            older.step()
            time.sleep(0.05)
    assert str(failed.value).count(failed.value.remedy) == 1


def test_no_algorithm_and_no_mailbox_are_refused() -> None:
    with pytest.raises(gm.ConfigurationError, match="no algorithm"):
        gm.Session(network(), mailbox=gm.MemoryMailbox(), algorithm=None)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(gm.ConfigurationError, match="no mailbox"):
        gm.Session(network(), mailbox=None, algorithm=gm.DiLoCo())  # type: ignore[arg-type]  # wrong on purpose


def test_joining_without_the_newest_parameters_ends_with_the_reason() -> None:
    mailbox = gm.MemoryMailbox()
    run_at(mailbox, gm.DiLoCo(sync_every=1, fragments=1))

    async def lose_payloads() -> None:
        for key in [entry.key async for entry in mailbox.list("blobs/")]:
            await mailbox.delete(key)

    asyncio.run(lose_payloads())
    late = gm.Session(
        network(), mailbox=mailbox, algorithm=gm.DiLoCo(sync_every=1, fragments=1), lease_timeout=1.0, callbacks=[]
    )
    with pytest.raises(gm.RunMismatch, match="cannot be read"):
        late.join()


ALONE = replace(BARRIER, quorum_size=1, sync_every=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_global_model_is_lent_and_the_local_one_comes_back_bit_for_bit(dtype: torch.dtype) -> None:
    mailbox, module = gm.MemoryMailbox(), network().to(dtype)
    with gm.Session(module, mailbox=mailbox, algorithm=ALONE, callbacks=[]) as session:
        for _ in range(6):
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.add_(torch.full_like(parameter, 1 / 3))
            session.step()
        local = [parameter.detach().clone() for parameter in module.parameters()]
        committed = network(seed=5).to(dtype)
        gm.align(committed, mailbox=mailbox)
        with pytest.raises(KeyboardInterrupt), session.global_model() as step:
            assert step == 6
            for lent, expected in zip(module.parameters(), committed.parameters(), strict=True):
                assert torch.equal(lent, expected)
            with pytest.raises(gm.SessionClosed, match="paused"):
                session.step()
            raise KeyboardInterrupt
        for before, after in zip(local, module.parameters(), strict=True):
            assert torch.equal(before, after)


def test_before_anything_was_merged_the_local_model_stays() -> None:
    module = network()
    bias = next(parameter for name, parameter in module.named_parameters() if name == "0.bias")
    with gm.Session(module, mailbox=gm.MemoryMailbox(), algorithm=ALONE, callbacks=[]) as session:
        with torch.no_grad():
            bias.fill_(5.0)
        with session.global_model() as step:
            assert step is None and bool((bias == 5.0).all())


def test_a_model_without_a_way_of_its_own_is_kept_through_read_and_write() -> None:
    toy = ToyModel()
    with gm.Session(toy, mailbox=gm.MemoryMailbox(), algorithm=ALONE, callbacks=[]) as session:
        for _ in range(5):
            toy.train(np.random.default_rng(0))
            session.step()
        local = {name: values.copy() for name, values in toy.values.items()}
        with session.global_model():
            assert not all(np.array_equal(local[name], values) for name, values in toy.values.items())
        assert all(np.array_equal(local[name], values) for name, values in toy.values.items())


def test_pausing_shows_in_the_lease() -> None:
    mailbox = gm.MemoryMailbox()

    def states() -> str:
        keys = sorted(entry.key for entry in mailbox._entries("live/leases/", ""))
        return keys[-1].rsplit("/", 1)[1].split("-")[1][0]

    def becomes(state: str) -> bool:
        deadline = time.monotonic() + 30
        while states() != state and time.monotonic() < deadline:
            time.sleep(0.01)
        return states() == state

    with gm.Session(network(), mailbox=mailbox, algorithm=gm.DiLoCo(), callbacks=[]) as session:
        assert becomes("t")
        with session.paused(), session.global_model():
            assert becomes("e")
        assert becomes("t")


def test_an_elected_node_holds_its_training_until_it_is_relieved() -> None:
    mailbox, settings, elected = gm.MemoryMailbox(), gm.DiLoCo(sync_every=4, fragments=1), threading.Event()
    serving: list[bool] = []

    def heard(event: Any) -> None:
        if isinstance(event, SyncerElected):
            serving.append(event.serving)
            elected.set()

    def other() -> None:
        options: dict[str, Any] = {"node": "a", "lease_timeout": 1.2, "callbacks": []}
        with gm.Session(ToyModel(), mailbox=mailbox, algorithm=settings, **options) as session:
            while not elected.wait(0.02):
                session.step()
            for _ in range(8):
                session.step()
                time.sleep(0.02)

    elector = gm.Session(
        ToyModel(), mailbox=mailbox, algorithm=settings, node="b", role="either", lease_timeout=1.2, callbacks=[heard]
    )
    thread = threading.Thread(target=other)
    with elector:
        thread.start()
        deadline = time.monotonic() + 60
        while len(serving) < 2 and time.monotonic() < deadline:
            elector.step()
            time.sleep(0.02)
        thread.join()
    assert serving == [True, False]


def test_run_is_the_whole_loop() -> None:
    module, optimizer = network(), None
    mailbox = gm.MemoryMailbox()
    session = gm.Session(module, mailbox=mailbox, algorithm=ALONE, callbacks=[])
    optimizer = torch.optim.AdamW(module.parameters(), 1e-2)
    session.run(lambda batch: inner_step(module, optimizer, batch), [torch.ones(3, 8)] * 9)
    assert session.rounds_seen == 2 and session.run_tokens == 2 * 4 * 3
    with pytest.raises(gm.SessionClosed):
        session.step()


class Killed(gm.Session):
    """A process that ends as SIGKILL ends it: nothing more is written, not even a farewell."""

    def kill(self) -> None:
        assert self._loop is not None and self._engine is not None
        self._loop.run(self._engine.stop())
        self._end()


def checkpointed(session: gm.Session, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state = json.loads(json.dumps(session.state_dict()))
    return copy.deepcopy({"session": state, "model": module.state_dict(), "optimizer": optimizer.state_dict()})


LOSSY = replace(ALONE, delta_codec="INT2", error_feedback=0.95)


@pytest.mark.parametrize(
    "settings",
    [ALONE, LOSSY, replace(LOSSY, residual_dtype="BF16", fragments=2, commit_codec="INT4", alignment=gm.Adaptive())],
    ids=["plain", "lossy with feedback", "lossy with a narrow residual"],
)
def test_killed_and_restored_ten_times_ends_on_the_bits_of_a_run_that_never_stopped(settings: gm.DiLoCo) -> None:
    """The anchor, the inner optimizer, the data position and the codec's residual are those of the checkpoint."""
    data = batches(3)
    whole_run, straight = gm.MemoryMailbox(), network()
    optimizer = torch.optim.AdamW(straight.parameters(), 1e-2)
    with gm.Session(straight, mailbox=whole_run, algorithm=settings, node="a", callbacks=[]) as session:
        for inputs in data[:44]:
            inner_step(straight, optimizer, inputs)
            session.step(len(inputs))
    whole = session.ledger

    broken_run, module = gm.MemoryMailbox(), network()
    optimizer, position = torch.optim.AdamW(module.parameters(), 1e-2), 0
    kept: dict[str, Any] | None = None
    for kill_at in (1, 3, 4, 9, 14, 15, 22, 29, 35, 42, 44):
        session = Killed(module, mailbox=broken_run, algorithm=settings, node="a", callbacks=[])
        if kept is not None:
            session.load_state_dict(kept["session"])
        session.join()
        while position < kill_at:
            inner_step(module, optimizer, data[position])
            session.step(len(data[position]))
            position += 1
        if kill_at == 44:
            session.close()
            break
        kept = checkpointed(session, module, optimizer)
        session.kill()
        module = network(seed=99)
        optimizer = torch.optim.AdamW(module.parameters(), 1e-2)
        module.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
    for once, often in zip(straight.parameters(), module.parameters(), strict=True):
        assert torch.equal(once, often)
    assert session.ledger.balanced and session.ledger.fragments == whole.fragments, "nothing was counted twice or lost"


def test_started_again_ten_times_from_what_it_handed_off_ends_on_the_bits_of_a_run_that_never_stopped() -> None:
    """As above, without a file: parameters, optimizer, data position and counters come out of the mailbox."""
    data, settings = batches(0) * 3, replace(ALONE, overlap_steps=0)
    straight = network()
    optimizer = torch.optim.AdamW(straight.parameters(), 1e-2)
    with gm.Session(straight, mailbox=gm.MemoryMailbox(), algorithm=settings, callbacks=[]) as session:
        for inputs in data[:44]:
            inner_step(straight, optimizer, inputs)
            session.step(len(inputs))

    class Position:
        at = 0

        def state_dict(self) -> dict[str, Any]:
            return {"at": self.at}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.at = state_dict["at"]

    mailbox, ends = gm.MemoryMailbox(), [*range(4, 44, 4), 44]
    for life, end in enumerate(ends):
        module, position, handed = network(seed=life), Position(), threading.Event()
        optimizer = torch.optim.AdamW(module.parameters(), 1e-2)

        def heard(event: Any, handed: threading.Event = handed) -> None:
            if isinstance(event, HandedOff):
                handed.set()

        session = Killed(
            module, mailbox=mailbox, algorithm=settings, node="a", callbacks=[heard],
            handoff=TorchHandoff(module, optimizer, data=position), handoff_every=4,
        )  # fmt: skip
        if life == 0:
            module.load_state_dict(network().state_dict())
        session.join()
        assert position.at == end - 4
        for inputs in data[position.at : end]:
            inner_step(module, optimizer, inputs)
            position.at += 1
            session.step(len(inputs))
        if end == ends[-1]:
            session.close()
        else:
            assert handed.wait(30)
            session.kill()
    for once, often in zip(straight.parameters(), module.parameters(), strict=True):
        assert torch.equal(once, often)


def test_a_handoff_needs_a_name_and_a_run_that_resumes() -> None:
    handoff = TorchHandoff(network())
    options: dict[str, Any] = {"mailbox": gm.MemoryMailbox(), "handoff": handoff}
    with pytest.raises(gm.ConfigurationError, match="node's name"):
        gm.Session(network(), algorithm=gm.DiLoCo(), **options)
    with pytest.raises(gm.ConfigurationError, match="handoff_every"):
        gm.Session(network(), algorithm=gm.DiLoCo(), node="a", handoff_every=0, **options)


def test_a_state_of_another_run_is_passed_over() -> None:
    events: list[gm.Event] = []
    first = gm.Session(network(), mailbox=gm.MemoryMailbox(), algorithm=ALONE, callbacks=[])
    with first:
        state = first.state_dict()
    second = gm.Session(network(), mailbox=gm.MemoryMailbox(), algorithm=ALONE, callbacks=[events.append])
    second.load_state_dict(state)
    with second:
        assert second.global_step == 0
        with pytest.raises(gm.SessionClosed, match="after join"):
            second.load_state_dict(state)
    assert any("another run" in str(event) for event in events)


def test_a_signal_handler_can_tell_a_wait_from_a_write() -> None:
    waits: list[bool] = []
    session = gm.Session(network(), mailbox=gm.MemoryMailbox(), algorithm=BARRIER, min_nodes=2, callbacks=[])

    def handler(number: int, frame: object) -> None:
        waits.append(session.waiting)
        if session.waiting:
            raise SystemExit(143)

    previous = signal.signal(signal.SIGTERM, handler)
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    timer.start()
    try:
        assert not session.waiting
        with pytest.raises(SystemExit):
            session.join()
    finally:
        timer.join()
        signal.signal(signal.SIGTERM, previous)
    assert waits and not session.waiting
