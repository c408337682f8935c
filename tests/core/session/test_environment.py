"""What the environment says, and what it may not say."""

import pytest

from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.errors import ConfigurationError
from gradientmail_core.session.environment import algorithm_from, algorithm_with, mailbox_from


def test_the_mailbox_is_named_or_asked_for():
    assert mailbox_from({"GRADIENTMAIL_MAILBOX": "file:///run"}) == "file:///run"
    for environment in ({}, {"GRADIENTMAIL_MAILBOX": ""}):
        with pytest.raises(ConfigurationError, match=r"No mailbox.*GRADIENTMAIL_MAILBOX"):
            mailbox_from(environment)


def test_nothing_set_means_the_defaults():
    assert algorithm_from({"PATH": "/bin"}) == DiLoCo()


def test_fields_are_set_by_name():
    environment = {
        "GRADIENTMAIL_SYNC_EVERY": "30",
        "GRADIENTMAIL_FRAGMENTS": "3",
        "GRADIENTMAIL_OVERLAP_STEPS": "null",
        "GRADIENTMAIL_GRACE_SECONDS": "0.5",
        "GRADIENTMAIL_DELTA_CODEC": "F32",
    }
    expected = DiLoCo(sync_every=30, fragments=3, overlap_steps=None, grace_seconds=0.5, delta_codec="F32")
    assert algorithm_from(environment) == expected


@pytest.mark.parametrize("text", ["many", "", "[1]", "true", '"3"', "{"])
def test_what_is_no_number_is_refused_by_name(text):
    with pytest.raises(ConfigurationError, match="GRADIENTMAIL_SYNC_EVERY is"):
        algorithm_from({"GRADIENTMAIL_SYNC_EVERY": text})


def test_values_that_cannot_work_are_refused():
    with pytest.raises(ConfigurationError, match="sync_every"):
        algorithm_from({"GRADIENTMAIL_SYNC_EVERY": "0"})


def test_a_mapping_of_plain_settings():
    assert algorithm_with({"sync_every": 8, "delta_codec": "F32"}) == DiLoCo(sync_every=8, delta_codec="F32")
    with pytest.raises(ConfigurationError, match="no setting sync_evry"):
        algorithm_with({"sync_evry": 8})
    with pytest.raises(ConfigurationError, match="sync_every"):
        algorithm_with({"sync_every": 0})
