"""Where sessions are stepped and closed in mlx-lm's loop, and what batches, reports and files come to hold."""

# ruff: noqa: E402  # what follows the skip needs mlx

import signal

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="mlx has no wheel for this platform")
pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")

import mlx.optimizers as optim
from mlx_lm.tuner import trainer as stock

from gradientmail_core.errors import ConfigurationError
from gradientmail_mlx import GradientMailCallback, train
from tests.mlx.nodes import Bigram, Node, Reports, Seen, counting
from tests.sessions import LAST

ROW = 8
"""Tokens of one row of the data."""


def fit(node, **options):
    train(node.model, node.optimizer, counting(), args=node.args, session=node.session, **options)
    return node


# Counting


def test_every_iteration_is_a_step_and_the_last_one_too(tmp_path):
    session = fit(Node(tmp_path)).session
    assert session.names == ["join", "step", "close"]
    assert session.samples == [4 * ROW] * 6


@pytest.mark.parametrize(("iters", "every", "steps"), [(6, 2, 3), (7, 3, 2), (2, 3, 0)])
def test_accumulated_iterations_are_one_step_and_a_remainder_is_none(tmp_path, iters, every, steps):
    node = fit(Node(tmp_path, iters, {"grad_accumulation_steps": every}))
    assert node.session.samples == [4 * ROW * every] * steps
    assert node.optimizer.state["step"].item() == steps


def test_batches_count_as_their_user_says(tmp_path):
    assert fit(Node(tmp_path), tokens=lambda batch: batch[0].shape[0]).session.samples == [4] * 6


def test_no_iterations_join_and_leave(tmp_path):
    assert fit(Node(tmp_path, 0)).session.names == ["join", "close"]


# Commits


@pytest.mark.parametrize("compiled", [False, True])
def test_a_commit_reaches_the_next_step(tmp_path, compiled):
    """All parameters zero make every token as likely as every other."""
    node, reports = Node(tmp_path, options={"steps_per_report": 1}), Reports()
    if compiled:
        mx.enable_compile()
        node = Node(tmp_path, 6, {"steps_per_report": 1}, Bigram(), optim.SGD(0.1, momentum=0.5))
    node.session.commits = {3: 0.0}
    np.random.seed(0)
    fit(node, training_callback=reports)
    losses = [report["train_loss"] for report in reports.train]
    assert losses[3] == pytest.approx(np.log(32), abs=1e-5)
    assert all(abs(loss - np.log(32)) > 1e-4 for loss in losses[:3])
    assert node.optimizer.state["step"].item() == 6


def test_the_adapter_file_holds_what_was_committed_last(tmp_path):
    node = Node(tmp_path, 6, {"steps_per_save": 2})
    node.session.commits = {LAST: 0.5}
    fit(node)
    assert node.file.keys() == node.tensors.keys()
    assert all((tensor == 0.5).all() for tensor in node.file.values())
    assert all((tensor == 0.5).all() for tensor in mx.load(str(tmp_path / "0000006_adapters.safetensors")).values())


def test_what_a_last_validation_sees_is_trained_and_validation_pauses_the_node(tmp_path):
    node, reports = Node(tmp_path, 4, {"steps_per_eval": 3}), Reports()
    train(
        node.model,
        node.optimizer,
        counting(),
        counting(8),
        args=node.args,
        session=node.session,
        training_callback=reports,
    )
    calls = [call[0] for call in node.session.calls]
    validation = ["pause", "resume"]
    assert calls == ["join", *validation, "step", "step", *validation, "step", *validation, "step", "close"]
    assert len(reports.val) == 3


def test_a_validation_may_see_what_the_run_committed(tmp_path):
    """All parameters zero make every token as likely as every other; by the second validation two steps were made."""
    node, reports = Node(tmp_path, 4, {"steps_per_eval": 3}), Reports()
    node.session.commits = {1: 0.0, 4: 0.5}
    fit(node, val_dataset=counting(8), training_callback=reports, evaluate="global")
    assert reports.val[1]["val_loss"] == pytest.approx(np.log(32), abs=1e-5)
    assert node.session.names[-4:] == ["lend", "return", "step", "close"]


# Ends


def test_the_last_report_comes_after_the_close(tmp_path):
    node = Node(tmp_path)
    seen = []

    class Watch(Reports):
        def on_train_loss_report(self, info):
            seen.append((info["iteration"], "close" in node.session.names))

    fit(node, training_callback=Watch())
    assert seen == [(2, False), (4, False), (6, True)]


@pytest.mark.parametrize("failing", [2, 4])
def test_an_exception_aborts(tmp_path, failing):
    node = Node(tmp_path)
    with pytest.raises(ZeroDivisionError):
        fit(node, training_callback=Reports(fail_at=failing))
    assert node.session.names == ["join", "step", "abort"]
    assert node.session.steps == failing - 1
    assert node.session.calls[-1] == ("abort", "ZeroDivisionError: the report fails")


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_exception_in_the_very_last_iteration_is_no_end(tmp_path, error):
    node, calls = Node(tmp_path), []

    def loss(model, batch, lengths):
        calls.append(1)
        if len(calls) == 6:
            raise error
        return stock.default_loss(model, batch, lengths)

    with pytest.raises(error):
        fit(node, loss=loss)
    assert node.session.names == ["join", "step", "abort"]
    assert node.session.steps == 5


def test_a_sigterm_aborts_and_is_no_success(tmp_path):
    class Killed(Reports):
        def on_train_loss_report(self, info):
            signal.raise_signal(signal.SIGTERM)

    node = Node(tmp_path)
    with pytest.raises(SystemExit) as ended:
        fit(node, training_callback=Killed())
    assert ended.value.code == 143
    assert node.session.names == ["join", "step", "abort"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_failing_session_ends_training(tmp_path):
    node = Node(tmp_path)
    node.session.fail_at = 3
    with pytest.raises(RuntimeError, match="the store is gone"):
        fit(node)
    assert node.session.names == ["join", "step", "abort"]
    assert node.optimizer.state["step"].item() == 3


def test_a_run_that_cannot_be_joined_is_not_trained_in(tmp_path):
    node = Node(tmp_path)

    def refuse():
        raise ConfigurationError("no such run")

    node.session.join = refuse
    with pytest.raises(ConfigurationError):
        fit(node)
    assert node.session.names == ["abort"]


def test_a_close_that_fails_leaves_the_adapter_file_behind(tmp_path):
    node = Node(tmp_path)

    def refuse():
        node.session.calls.append(("abort", "in close"))
        raise ConfigurationError("the store is gone")

    node.session.close = refuse
    with pytest.raises(ConfigurationError, match="the store is gone"):
        fit(node)
    assert node.file.keys() == node.tensors.keys()


def test_data_that_end_early_end_the_run_in_order(tmp_path):
    node = Node(tmp_path)
    node.session.commits = {LAST: 0.25}

    def short(*, dataset, batch_size, max_seq_length, loop, comm_group):
        for _, batch in zip(
            range(3), stock.iterate_batches(dataset, batch_size, max_seq_length, loop=loop), strict=False
        ):
            yield batch

    fit(node, iterate_batches=short)
    assert node.session.samples == [4 * ROW] * 3
    assert node.session.names == ["join", "step", "close"]
    assert all((tensor == 0.25).all() for tensor in node.file.values())


# Batches


def test_batches_follow_the_share(tmp_path):
    node, seen = Node(tmp_path), Seen(stock.iterate_batches)
    node.session.shares = {0: 6, 2: 3, 4: 5}
    fit(node, iterate_batches=seen)
    assert seen.rows == [6, 6, 3, 3, 5, 5]
    assert seen.sizes == [6, 3, 5]
    assert node.session.samples == [rows * ROW for rows in seen.rows]


def test_a_share_is_cut_into_accumulated_iterations_and_changes_between_them(tmp_path):
    node, seen = Node(tmp_path, options={"grad_accumulation_steps": 2}), Seen(stock.iterate_batches)
    node.session.shares = {0: 6, 1: 3}
    fit(node, iterate_batches=seen)
    assert seen.rows == [3, 3, 2, 2, 2, 2]


def test_a_share_is_capped_by_the_data_and_by_the_user(tmp_path):
    for most, rows in ((None, 24), (5, 5)):
        node, seen = Node(tmp_path, 1), Seen(stock.iterate_batches)
        node.session.shares = {0: 1000}
        fit(node, iterate_batches=seen, max_batch_size=most)
        assert seen.rows == [rows]


def test_data_without_a_length_are_no_trouble(tmp_path):
    class Stream:
        """Data that only their own ``iterate_batches`` knows how to read."""

    def endless(*, batch_size, **rest):
        while True:
            yield mx.ones((batch_size, 5), dtype=mx.int32), mx.array([(1, 5)] * batch_size)

    for share, rows in ((None, 4), (6, 6)):
        node = Node(tmp_path, 2)
        node.session.shares = {0: share} if share else {}
        train(node.model, node.optimizer, Stream(), args=node.args, session=node.session, iterate_batches=endless)
        assert node.session.samples == [5 * rows] * 2


@pytest.mark.parametrize(("option", "value"), [("evaluate", "both"), ("max_batch_size", 0)])
def test_settings_that_cannot_be_are_refused_before_the_run_is_joined(tmp_path, option, value):
    node = Node(tmp_path)
    with pytest.raises(ConfigurationError, match=f"{option} is {value!r}"):
        fit(node, **{option: value})
    assert node.session.names == []


def test_without_a_share_batches_stay_as_they_are(tmp_path):
    seen = Seen(stock.iterate_batches)
    fit(Node(tmp_path), iterate_batches=seen, max_batch_size=2)
    assert (seen.rows, seen.sizes) == ([4] * 6, [4])


def order(tmp_path, name, seed=0, start=0, **options):
    node, seen = Node(tmp_path), Seen(stock.iterate_batches)
    node.session.node, node.session.start = name, start
    np.random.seed(seed)
    fit(node, iterate_batches=seen, **options)
    return seen.first


def test_nodes_seeded_alike_read_in_different_orders(tmp_path):
    orders = [order(tmp_path, name) for name in "ab"]
    assert orders[0] != orders[1]
    assert sorted(map(tuple, orders[0])) == sorted(map(tuple, orders[1]))
    assert order(tmp_path, "a") == orders[0]
    assert order(tmp_path, "a", seed=1) != orders[0]
    assert order(tmp_path, "a", start=500) != orders[0], "a node that comes back reads something else"
    assert order(tmp_path, "a", own_order=False) == order(tmp_path, "b", own_order=False)


# Reports


def test_reports_hold_the_runs_figures(tmp_path, capsys):
    node, reports = Node(tmp_path), Reports()
    node.session.commits = {3: 0.1}
    fit(node, training_callback=reports)
    assert [report["iteration"] for report in reports.train] == [2, 4, 6]
    assert [report["gradientmail/round"] for report in reports.train] == [0.0, 1.0, 1.0]
    assert "train_loss" in reports.train[0]
    assert "GradientMail: step 0, 1 rounds, 2 live nodes" in capsys.readouterr().out


# By hand


def by_hand(node, **options):
    node.session.join()
    callback = GradientMailCallback(node.session, node.args, optimizer=node.optimizer, **options)
    return callback


def test_with_both_arguments_mlx_lms_own_train_takes_part_like_ours(tmp_path):
    node, seen, reports = Node(tmp_path), Seen(stock.iterate_batches), Reports()
    node.session.commits, node.session.shares = {LAST: 0.5}, {0: 6}
    callback = by_hand(node, training_callback=reports, iterate_batches=seen)
    stock.train(
        node.model,
        node.optimizer,
        counting(),
        args=node.args,
        training_callback=callback,
        iterate_batches=callback.iterate_batches,
    )
    assert node.session.samples == [6 * ROW] * 6
    assert node.session.names == ["join", "step", "close"]
    assert reports.train[-1]["gradientmail/live_nodes"] == 2.0
    assert all((tensor == 0.5).all() for tensor in node.file.values())


@pytest.mark.parametrize(
    ("every", "iterations"), [(1, [2, 0, 2, 0, 2, 0]), (2, [2, 2, 2]), (4, [4]), (3, [4, 2]), (7, [])]
)
def test_alone_it_counts_at_reports_and_closes_at_the_last(tmp_path, every, iterations):
    node = Node(tmp_path, 6, {"grad_accumulation_steps": every})
    node.session.commits = {LAST: 0.5}
    stock.train(node.model, node.optimizer, counting(), args=node.args, training_callback=by_hand(node))
    assert node.session.samples == [4 * ROW * count for count in iterations]
    assert node.optimizer.state["step"].item() == len(iterations)
    assert node.session.calls[-1] == ("close",)
    assert all((tensor == 0.5).all() for tensor in node.file.values())


def test_a_callback_tracks_the_optimizer(tmp_path):
    node = Node(tmp_path)
    callback = by_hand(node)
    stock.train(node.model, node.optimizer, counting(), args=node.args, training_callback=callback)
    node.session.model.reset_optimizer()
    assert node.optimizer.state["step"].item() == 0


def test_a_session_that_is_not_joined_is_refused(tmp_path):
    node = Node(tmp_path)
    with pytest.raises(ConfigurationError, match=r"not joined.*with Session"):
        GradientMailCallback(node.session, node.args)
