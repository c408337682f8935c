"""A bucket's own settings, read through the S3 API, and any HTTP store's clock.

Who may use a bucket may often not read its settings, and imitators of S3 lack some of them, so every one is
asked for by itself and may stay unknown. The clock is that of an answer's ``Date`` header, good to a second.
"""

import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from xml.etree import ElementTree

from gradientmail_core.mailbox.objectstore.credentials import Credentials
from gradientmail_core.mailbox.objectstore.location import S3Location
from gradientmail_core.mailbox.objectstore.signed import Opener, Refused, asked
from gradientmail_core.mailbox.surroundings import Surroundings

CLOCK_TIMEOUT_SECONDS = 10.0
_NO_RULES = frozenset({"NoSuchLifecycleConfiguration", "ObjectLockConfigurationNotFoundError"})


def bucket_surroundings(location: S3Location, credentials: Credentials, send: Opener | None = None) -> Surroundings:
    """What the bucket says of itself. Blocks."""

    def ask(setting: str) -> tuple[ElementTree.Element | None, str]:
        try:
            found = asked(location, credentials, {setting: ""}, send=send)
            return ElementTree.fromstring(found.body), found.date
        except Refused as error:
            return (ElementTree.Element("nothing") if error.answer.code in _NO_RULES else None), ""
        except (OSError, ElementTree.ParseError):
            return None, ""

    versioning, date = ask("versioning")
    lifecycle, _ = ask("lifecycle")
    lock, _ = ask("object-lock")
    rules = None if lifecycle is None else [rule for rule in lifecycle.iterfind("{*}Rule") if _applies(rule, location)]
    return Surroundings(
        clock_offset=_offset(date),
        versioned=None if versioning is None else versioning.findtext("{*}Status") == "Enabled",
        old_versions_expire=None if rules is None else any(_has(rule, "NoncurrentVersionExpiration") for rule in rules),
        expiring=None if rules is None else tuple(text for rule in rules for text in _removals(rule)),
        locked=None if lock is None else lock.findtext("{*}ObjectLockEnabled") == "Enabled",
        uploads_expire=None if rules is None else any(_has(rule, "AbortIncompleteMultipartUpload") for rule in rules),
    )


def clock_offset(url: str) -> float | None:
    """The clock behind ``url`` minus this machine's, in seconds, whatever is answered; None without that. Blocks."""
    try:
        with urllib.request.urlopen(url, timeout=CLOCK_TIMEOUT_SECONDS) as response:
            return _offset(str(response.headers.get("Date") or ""))
    except urllib.error.HTTPError as error:
        return _offset(str(error.headers.get("Date") or ""))
    except (OSError, ValueError):
        return None


def _offset(date: str) -> float | None:
    try:
        return (parsedate_to_datetime(date) - datetime.now(UTC)) / timedelta(seconds=1) + 0.5
    except (TypeError, ValueError):
        return None


def _applies(rule: ElementTree.Element, location: S3Location) -> bool:
    """Whether an enabled rule covers some object of the mailbox; one by tag or size is taken to."""
    begins = rule.findtext("{*}Filter/{*}Prefix") or rule.findtext("{*}Filter/{*}And/{*}Prefix")
    begins = begins or rule.findtext("{*}Prefix") or ""
    root = f"{location.prefix}/" if location.prefix else ""
    overlaps = root.startswith(begins) or begins.startswith(root)
    return rule.findtext("{*}Status") == "Enabled" and overlaps


def _removals(rule: ElementTree.Element) -> Iterator[str]:
    """What the rule does to objects that are in use, in words."""
    name = (rule.findtext("{*}ID") or "without a name")[:80]
    for action, verb in (("Expiration", "deletes objects"), ("Transition", "archives objects")):
        found = rule.find(f"{{*}}{action}")
        if found is not None and found.findtext("{*}ExpiredObjectDeleteMarker") != "true":
            when = found.findtext("{*}Days")
            yield f"rule {name!r} {verb}" + (f" after {when} days" if when else f" on {found.findtext('{*}Date')}")


def _has(rule: ElementTree.Element, action: str) -> bool:
    return rule.find(f"{{*}}{action}") is not None
