"""What a node reads: its own order, batches that follow its share, and its place in the data after a restart."""

import logging
from itertools import chain

import pytest
from torch.utils.data import DataLoader, SequentialSampler
from transformers import TrainerCallback

from gradientmail_core.adapters.torch_loaders import ElasticStream
from gradientmail_hf.data import Resumed, batches_behind, own_order, resize, why_fixed
from tests.hf.nodes import LENGTH, RecordingCallback, Sized, Stream, fit, llama, number_of, rows, trainer


@pytest.fixture
def warnings(caplog, monkeypatch):
    """What the plugin tells through transformers' own logger."""
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [caplog.handler])
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", False)  # it is True where CI is set
    return lambda: [record.message for record in caplog.records if record.message.startswith("GradientMail")]


def items(batches):
    """The rows of all batches, in order."""
    return list(chain.from_iterable(batches))


# Order


@pytest.mark.parametrize("seedable", [True, False])
def test_nodes_seeded_alike_read_differently(tmp_path, seedable):
    options = {"accelerator_config": {"use_seedable_sampler": seedable}}
    read = {node: fit(tmp_path, RecordingCallback(node=node), **options).read for node in "ab"}
    assert read["a"] != read["b"]
    assert sorted(items(read["a"])) == sorted(items(read["b"])) == list(range(32))
    assert fit(tmp_path, RecordingCallback(node="a"), **options).read == read["a"]
    assert fit(tmp_path, RecordingCallback(node="a"), data_seed=7, **options).read != read["a"]


def test_that_can_be_switched_off(tmp_path):
    read = [fit(tmp_path, RecordingCallback(node=node, own_order=False)).read for node in "ab"]
    assert read[0] == read[1] == fit(tmp_path, []).read


def test_texts_grouped_by_length_are_grouped_differently(tmp_path):
    options = {"train_sampling_strategy": "group_by_length"}
    read = [fit(tmp_path, RecordingCallback(node=node), **options).read for node in "ab"]
    assert read[0] != read[1]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"train_sampling_strategy": "sequential"}, "its SequentialSampler draws from no generator"),
        ({"data": Stream()}, "its dataset decides the order"),
    ],
)
def test_an_order_that_cannot_be_changed_is_told_of(tmp_path, warnings, options, reason):
    made = fit(tmp_path, RecordingCallback(), **options)
    assert made.read[0] == [0, 1, 2, 3]
    assert warnings() == [f"GradientMail: every node reads the same data in the same order, because {reason}."]


def test_other_loaders_have_no_order_of_their_own():
    assert own_order([1, 2], 3) == "it is a list, not a torch DataLoader"
    assert own_order(DataLoader([1, 2], batch_size=None), 3) == "its SequentialSampler draws from no generator"


# Shares

SHARES = {"shrink": ({0: 4, 4: 2}, [4] * 5 + [2] * 11), "grow": ({0: 4, 4: 8}, [4] * 5 + [8] * 11)}


def sizes(made):
    return [len(batch) for batch in made.read]


@pytest.mark.parametrize("change", SHARES)
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_follow_the_share_and_epochs_keep_their_steps(tmp_path, change, workers):
    """Sixteen steps in two epochs of eight; the data go on across epochs, nothing twice before all was seen once."""
    shares, expected = SHARES[change]
    callback = RecordingCallback(shares=shares)
    options = {"max_steps": -1, "num_train_epochs": 2, "dataloader_num_workers": workers}
    made = fit(tmp_path, callback, **options)
    assert made.state.global_step == 16 and made.state.epoch == 2.0
    read = sizes(made)
    assert read[:4] == [4] * 4 and read[-4:] == expected[-4:]
    if workers == 0:
        assert read == expected, "with one batch read ahead"
    assert sorted(items(made.read)[:32]) == list(range(32))
    assert callback.recorded.samples == [LENGTH * size for size in read]


def test_the_share_is_divided_by_accumulation(tmp_path):
    callback = RecordingCallback(shares={0: 7, 2: 12})
    made = fit(tmp_path, callback, gradient_accumulation_steps=2, max_steps=4)
    assert made.state.global_step == 4
    assert sizes(made) == [4] * 5 + [6] * 3
    assert callback.recorded.samples == [LENGTH * rows for rows in (8, 8, 10, 12)]


def test_a_bound_is_kept(tmp_path):
    made = fit(tmp_path, RecordingCallback(shares={0: 16, 4: 3}, max_batch_size=5), max_steps=8)
    assert sizes(made) == [5] * 5 + [3] * 3


def test_without_a_global_batch_size_the_trainers_is_kept(tmp_path):
    made = fit(tmp_path, RecordingCallback(node="a"))
    assert sizes(made) == [4] * 8
    assert type(made.callback_handler.train_dataloader.batch_sampler).__name__ == "BatchSampler"


@pytest.mark.parametrize("workers", [0, 1])
def test_streamed_data_follow_the_share(tmp_path, workers):
    callback = RecordingCallback(shares={0: 4, 4: 2})
    made = fit(tmp_path, callback, data=Stream(), max_steps=10, dataloader_num_workers=workers)
    assert sizes(made)[:4] == [4] * 4 and sizes(made)[-2:] == [2] * 2
    assert items(made.read) == list(range(sum(sizes(made))))


@pytest.mark.parametrize("share", [2, 8])
def test_streamed_data_of_a_known_length_keep_their_steps(tmp_path, share):
    callback = RecordingCallback(shares={0: share})
    made = fit(tmp_path, callback, data=Sized(32), max_steps=-1, num_train_epochs=2)
    assert made.state.global_step == 16
    assert sizes(made) == [share] * 16
    assert items(made.read) == [number % 32 for number in range(16 * share)]


def test_batches_that_belong_together_keep_their_size(tmp_path, warnings):
    options = {"train_sampling_strategy": "group_by_length"}
    made = fit(tmp_path, RecordingCallback(shares={0: 2}), **options)
    assert sizes(made) == [4] * 8
    reason = "its LengthGroupedSampler decides which samples go together"
    assert warnings() == [f"GradientMail: the training batches keep their size, because {reason}."]


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (DataLoader(rows(4), batch_size=2), None),
        (DataLoader(Stream(), batch_size=2), None),
        (DataLoader(rows(4), batch_sampler=[[0, 1], [2, 3]]), "its list decides which samples go together"),
        ([1, 2], "it is a list, not a torch DataLoader"),
    ],
    ids=range(4),
)
def test_what_can_be_resized(loader, reason):
    assert why_fixed(loader) == reason


def test_two_processes_read_their_parts_of_one_order():
    """The blocks that all processes of a node train on at once hold no row twice, and no two blocks share one."""
    shares = {rank: iter([3, 3, 2, 2]) for rank in range(2)}
    loaders = {rank: DataLoader(rows(32), batch_size=4, sampler=SequentialSampler(range(32))) for rank in range(2)}
    read = {}
    for rank, loader in loaders.items():
        stream = resize(loader, lambda rank=rank: next(shares[rank]), rank=rank, world=2, skipped=0, position={})
        batches = iter(loader)
        read[rank] = [number_of(next(batches)["input_ids"]) for _ in range(4)]
        assert len(stream) == 8
    assert [len(batch) for batch in read[0]] == [len(batch) for batch in read[1]] == [3, 3, 2, 2]
    assert sorted(items(read[0] + read[1])) == list(range(20))


# Resuming


def resumed(folder, at, workers=0, own=True, **options):
    """The rows of a training in one go, and of one that was interrupted after ``at`` steps and resumed."""
    settings = {"max_steps": -1, "num_train_epochs": 2, "dataloader_num_workers": workers, **options}
    whole = fit(folder / "whole", RecordingCallback(shares={0: 6}), **settings)
    first = RecordingCallback(shares={0: 6})

    class Stop(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            raise KeyboardInterrupt

    made = trainer(folder, [first, Stop()], save_strategy="steps", save_steps=at, **settings)
    with pytest.raises(KeyboardInterrupt):
        made.train()
    if not own:
        next(folder.rglob("gradientmail.json")).unlink()
    again = trainer(folder, RecordingCallback(shares={0: 6}), llama(1), **settings)
    again.train(resume_from_checkpoint=True)
    return whole, made, again


@pytest.mark.parametrize(("at", "workers"), [(3, 0), (8, 0), (11, 0), (11, 2)])
def test_a_resumed_node_reads_on_where_it_stood(tmp_path, at, workers):
    whole, first, again = resumed(tmp_path, at, workers)
    assert first.read + again.read == whole.read
    assert again.state.global_step == 16 and again.state.epoch == 2.0


def test_a_resumed_node_reads_on_between_accumulated_batches(tmp_path):
    whole, first, again = resumed(tmp_path, 3, gradient_accumulation_steps=2)
    assert first.read + again.read == whole.read
    assert again.state.global_step == whole.state.global_step == 8


def test_without_our_file_as_many_batches_are_passed_over(tmp_path):
    whole, first, again = resumed(tmp_path, 3, own=False)
    assert first.read + again.read == whole.read


def test_another_nodes_place_in_the_data_is_not_taken(tmp_path):
    """Its order would come with it, and both would read the same."""
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    first = fit(tmp_path, RecordingCallback(shares={0: 4}), **options)
    again = trainer(tmp_path, RecordingCallback(shares={0: 4}, node="b"), llama(1), **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert len(again.read) == 2 and again.read != first.read[2:]


def test_a_position_that_cannot_be_is_not_taken(caplog):
    loader = DataLoader(rows(32), batch_size=4)
    stream = resize(loader, lambda: 4, rank=0, world=1, skipped=0, position={"pass": -1})
    assert isinstance(stream, ElasticStream)
    assert number_of(next(iter(loader))["input_ids"]) == [0, 1, 2, 3]
    assert "The data start anew" in caplog.text


@pytest.mark.parametrize(("steps", "behind"), [(0, 0), (3, 6), (4, 0), (9, 2)])
def test_batches_of_the_epoch_that_a_resumed_trainer_has_behind_it(steps, behind):
    assert batches_behind(DataLoader(rows(31), batch_size=4), steps, 2) == behind
    assert batches_behind(DataLoader(Stream(), batch_size=4), steps, 2) == 2 * steps


def test_batches_passed_over_cost_nothing_in_a_restored_stream():
    stream = ElasticStream(SequentialSampler(range(8)), lambda: 2, batches=4)
    batches = Resumed(stream, 1, restored=True)
    assert (len(batches), batches.batch_size) == (4, 2)
    assert list(batches) == [[], [0, 1], [2, 3], [4, 5]]
    stream.confirm(3)
    assert list(batches) == [[6, 7], [0, 1], [2, 3], [4, 5]]
    fresh = ElasticStream(SequentialSampler(range(8)), lambda: 2, batches=4)
    assert list(Resumed(fresh, 1, restored=False)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert fresh.state_dict()["position"] == 2
