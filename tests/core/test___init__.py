"""The package's public names: all there, and nothing of an object store's loaded before it is asked for."""

import inspect
import subprocess
import sys

import pytest

import gradientmail_core as gm


def test_every_name_is_there() -> None:
    assert all(hasattr(gm, name) for name in gm.__all__)
    with pytest.raises(AttributeError, match="no attribute 'S4Mailbox'"):
        _ = gm.S4Mailbox  # type: ignore[attr-defined]  # a wrong name on purpose


def test_an_object_store_is_loaded_when_it_is_asked_for() -> None:
    program = (
        "import sys, gradientmail_core as gm; loaded = {'s3fs', 'obstore', 'botocore', 'fsspec', 'torch', 'mlx'}"
        "; assert not loaded & set(sys.modules); gm.S3Mailbox('bucket', 'run', credential_provider=lambda: None)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_mailbox_takes_what_a_bucket_needs() -> None:
    parameters = inspect.signature(gm.S3Mailbox).parameters
    expected = (
        "bucket",
        "prefix",
        "endpoint_url",
        "region",
        "request_checksums",
        "max_concurrency",
        "credential_provider",
    )
    assert tuple(parameters)[: len(expected)] == expected
    mailbox = gm.S3Mailbox("bucket", "run", credential_provider=lambda: gm.Credentials("AK", "SK"))
    assert mailbox.url == "s3://bucket/run" and isinstance(mailbox, gm.S3Mailbox)
