"""Object stores: S3 and its imitators, Google Cloud Storage, Azure, and what fsspec knows besides."""

from gradientmail_core.mailbox.objectstore.credentials import CredentialProvider, Credentials
from gradientmail_core.mailbox.objectstore.objects import ObjectMailbox
from gradientmail_core.mailbox.objectstore.stores import S3Mailbox, open_object_store

__all__ = ["CredentialProvider", "Credentials", "ObjectMailbox", "S3Mailbox", "open_object_store"]
