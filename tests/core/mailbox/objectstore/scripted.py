"""An S3 endpoint that answers what a test tells it to, and keeps what it was asked."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit

from gradientmail_core.mailbox.objectstore import Credentials, S3Mailbox
from gradientmail_core.mailbox.objectstore.credentials import CredentialProvider
from gradientmail_core.mailbox.objectstore.location import Backend

ACCESS, SECRET, TOKEN = "AKIASCRIPTEDACCESS", "scripted-secret-key", "scripted-session-token"
CANARIES = (ACCESS, SECRET, TOKEN)
STANDARD = {"etag": '"0123456789abcdef"', "last-modified": "Sun, 29 Nov 2026 12:00:00 GMT"}  # obstore insists on both


@dataclass(frozen=True)
class Request:
    """What arrived."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Reply:
    """What is sent back; ``silence`` seconds before it, and ``cut`` bytes of the body missing."""

    status: int = 200
    code: str = ""
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    silence: float = 0.0
    cut: int = 0

    def content(self) -> bytes:
        """The body, or an error document that quotes what stores quote."""
        if not self.code:
            return self.body
        return (
            f"<Error><Code>{self.code}</Code><Message>{TOKEN}</Message><AWSAccessKeyId>{ACCESS}</AWSAccessKeyId>"
            f"<StringToSign>{SECRET}</StringToSign></Error>"
        ).encode()


Script = Callable[[Request], Reply]


class Endpoint:
    """A running server."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[Request] = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.server.daemon_threads = True

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.server.server_port}"

    def mailbox(self, backend: Backend, provider: CredentialProvider | None = None, prefix: str = "run") -> S3Mailbox:
        """A mailbox there."""
        return S3Mailbox(
            "bucket", prefix, endpoint_url=self.url, backend=backend, credential_provider=provider or given_credentials
        )

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                parts = urlsplit(self.path)
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                headers = {name.lower(): value for name, value in self.headers.items()}
                request = Request(
                    self.command, parts.path, dict(parse_qsl(parts.query, keep_blank_values=True)), headers, body
                )
                endpoint.requests.append(request)
                reply = endpoint.script(request)
                time.sleep(reply.silence)
                content = reply.content() if reply.status != 304 else b""
                with contextlib.suppress(OSError):
                    self.send_response(reply.status)
                    for name, value in (STANDARD | reply.headers).items():
                        self.send_header(name, value)
                    self.send_header("content-length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content[: len(content) - reply.cut])
                    if reply.cut:
                        self.close_connection = True

            do_GET = do_PUT = do_DELETE = do_POST = do_HEAD = answer

            def log_message(self, *arguments: object) -> None:
                return

        return Handler


def given_credentials() -> Credentials:
    """The canaries, as credentials."""
    return Credentials(ACCESS, SECRET, TOKEN)


@contextlib.contextmanager
def scripted(script: Script) -> Iterator[Endpoint]:
    """An endpoint that follows ``script`` for the context."""
    endpoint = Endpoint(script)
    thread = threading.Thread(target=endpoint.server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield endpoint
    finally:
        endpoint.server.shutdown()
        endpoint.server.server_close()


def in_turn(*replies: Reply) -> Script:
    """The replies in order, then the last one for ever."""
    left = list(replies)
    return lambda request: left.pop(0) if len(left) > 1 else left[0]


def listing_document(keys: list[str], token: str = "") -> bytes:
    """A page of a listing, each object one byte long."""
    contents = "".join(f"<Contents><Key>{key}</Key><Size>1</Size></Contents>" for key in keys)
    more = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{token}</NextContinuationToken>" if token else ""
    space = "http://s3.amazonaws.com/doc/2006-03-01/"
    return f'<ListBucketResult xmlns="{space}">{contents}{more}</ListBucketResult>'.encode()
