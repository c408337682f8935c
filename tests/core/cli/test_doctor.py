"""The doctor's verdict as text, as JSON and as exit code; a gateway that drops the condition is caught."""

import json
from pathlib import Path

import pytest

from gradientmail_core.cli.doctor import LIMITED, as_text, main
from gradientmail_core.errors import ConfigurationError
from gradientmail_core.mailbox.checks import CHECKS
from gradientmail_core.mailbox.examination import Finding
from tests.core.mailbox.proxy import Weather, proxied
from tests.core.mailbox.servers import ACCESS_KEY, SECRET_KEY, S3Server, client


def test_a_directory_is_fit_and_left_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place, report = tmp_path / "mailbox", tmp_path / "out" / "doctor.json"
    place.mkdir()
    assert main([str(place), "--mebibytes", "1", "--json", str(report)]) == 0
    assert list(place.iterdir()) == []
    said = capsys.readouterr().out
    assert "is fit" in said and all(f"ok  {check.name}" in said for check in CHECKS)
    found = json.loads(report.read_text())
    assert (found["verdict"], found["store"], found["url"]) == ("fit", "atomic", place.as_uri())
    assert [finding["check"] for finding in found["findings"]] == [check.name for check in CHECKS]


@pytest.mark.parametrize("backend", ["obstore", "s3fs"])
def test_a_gateway_that_drops_the_condition_is_caught(
    moto_server: S3Server, backend: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    prefix = f"dropped-{backend}"
    with proxied(moto_server.endpoint_url) as proxy:
        proxy.weather = Weather(unconditional=True)
        url = f"s3://{moto_server.bucket}/{prefix}?endpoint_url={proxy.url}&backend={backend}"
        assert main([url, "--mebibytes", "1", "--races", "1"]) == LIMITED
        proxy.weather = Weather()
        assert main([url, "--mebibytes", "1", "--races", "1"]) == 0
    said = capsys.readouterr().out
    assert "A create overwrote an object that existed." in said and "only with one named syncer" in said
    assert ACCESS_KEY not in said and SECRET_KEY not in said
    left = client(moto_server.endpoint_url).list_objects_v2(Bucket=moto_server.bucket, Prefix=f"{prefix}/")
    assert "Contents" not in left


def test_a_missing_bucket_is_unfit_and_says_what_to_do(
    moto_server: S3Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    assert main([f"s3://nosuchbucket/run?endpoint_url={moto_server.endpoint_url}"]) == 1
    said = capsys.readouterr().out
    assert "NoSuchBucket" in said and "Create the bucket" in said and "unfit" in said


def test_a_missing_directory_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no directory"):
        main([str(tmp_path / "typo")])


def test_a_finding_for_people() -> None:
    text = as_text(Finding("rules", "caution", "word " * 40, "Do this."))
    lines = text.splitlines()
    assert lines[0].startswith("  !!  rules") and lines[-1].strip() == "Do this." and len(lines) > 2
    assert max(map(len, lines)) <= 100
