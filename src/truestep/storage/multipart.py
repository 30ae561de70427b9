"""Unfinished multipart uploads of an S3 bucket: obstore neither lists nor aborts them, so these two requests are ours.

They are signed with AWS Signature Version 4. Keys come from the store's options or the environment; where a machine's
role gives them there are none here, and the caller advises a lifecycle rule.
"""

import datetime
import hashlib
import hmac
import os
import urllib.error
import urllib.parse
import urllib.request
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass

from obstore.store import S3Store

from truestep.errors import StorageError
from truestep.storage.objects import ObjectStore

ANSWER_S = 30.0
EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True)
class Upload:
    """An upload that was begun and not ended. `key` is below the store's root."""

    key: str
    upload_id: str
    began_s: float


@dataclass(frozen=True)
class _Access:
    """The bucket's own URL, and what signs requests to it."""

    url: str
    region: str
    key_id: str
    secret: str
    token: str | None


def list_uploads(store: ObjectStore) -> list[Upload]:
    """Every unfinished upload below the store's root. StorageError if the store has none to offer, or refuses."""
    access, prefix = _access(store), _prefix(store)
    found: list[Upload] = []
    query = {"uploads": "", "prefix": prefix}
    while True:
        root = ElementTree.fromstring(_request(store, access, "GET", "", query))
        for each in root.iterfind("{*}Upload"):
            began = datetime.datetime.fromisoformat(each.findtext("{*}Initiated") or "")
            key = (each.findtext("{*}Key") or "").removeprefix(prefix)
            found.append(Upload(key, each.findtext("{*}UploadId") or "", began.timestamp()))
        if root.findtext("{*}IsTruncated") != "true":
            return found
        query["key-marker"] = root.findtext("{*}NextKeyMarker") or ""
        query["upload-id-marker"] = root.findtext("{*}NextUploadIdMarker") or ""


def abort_upload(store: ObjectStore, upload: Upload) -> None:
    """Give an upload up, with the parts that came; one that is gone already is no loss."""
    key = _prefix(store) + upload.key
    _request(store, _access(store), "DELETE", key, {"uploadId": upload.upload_id}, missing_ok=True)


def _prefix(store: ObjectStore) -> str:
    prefix = store.backend.prefix
    return f"{str(prefix).strip('/')}/" if prefix else ""


def _access(store: ObjectStore) -> _Access:
    if not isinstance(store.backend, S3Store):
        raise StorageError(f"{store.url}: only S3 has multipart uploads to list")
    config = {str(name).removeprefix("aws_"): value for name, value in dict(store.backend.config).items()}

    def setting(name: str, *variables: str) -> str | None:
        found = config.get(name) or next((os.environ[v] for v in variables if os.environ.get(v)), None)
        return str(found) if found else None

    key_id = setting("access_key_id", "AWS_ACCESS_KEY_ID")
    secret = setting("secret_access_key", "AWS_SECRET_ACCESS_KEY")
    if key_id is None or secret is None:
        raise StorageError(f"{store.url}: no access key in the options or the environment")
    region = setting("region", "AWS_REGION", "AWS_DEFAULT_REGION") or "us-east-1"
    endpoint = setting("endpoint", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    bucket = str(config["bucket"])
    url = f"{endpoint.rstrip('/')}/{bucket}" if endpoint else f"https://{bucket}.s3.{region}.amazonaws.com"
    return _Access(url, region, key_id, secret, setting("session_token", "AWS_SESSION_TOKEN"))


def _request(
    store: ObjectStore, access: _Access, method: str, key: str, query: dict[str, str], missing_ok: bool = False
) -> bytes:
    request = urllib.request.Request(*_signed(access, method, key, query), method=method)
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            return answer.read()
    except urllib.error.HTTPError as error:
        if error.code == 404 and missing_ok:
            return b""
        raise StorageError(f"{store.url}: the server refuses to list or end uploads (status {error.code})") from None
    except OSError as error:
        raise StorageError(f"{store.url}: the server cannot be reached ({error})") from None


def _signed(access: _Access, method: str, key: str, query: dict[str, str]) -> tuple[str, None, dict[str, str]]:
    """URL, no body, and headers of a request. The steps are those of "Create a signed AWS API request"."""
    now = datetime.datetime.now(datetime.UTC)
    day, stamp = now.strftime("%Y%m%d"), now.strftime("%Y%m%dT%H%M%SZ")
    parts = urllib.parse.urlsplit(access.url)
    path = urllib.parse.quote(f"{parts.path.rstrip('/')}/{key}", safe="/~")
    asked = "&".join(
        f"{urllib.parse.quote(name, safe='~')}={urllib.parse.quote(value, safe='~')}"
        for name, value in sorted(query.items())
    )
    headers = {"host": parts.netloc, "x-amz-content-sha256": EMPTY_SHA256, "x-amz-date": stamp}
    if access.token:
        headers["x-amz-security-token"] = access.token
    names = ";".join(sorted(headers))
    lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
    canonical = "\n".join([method, path, asked, lines, names, EMPTY_SHA256])
    scope = f"{day}/{access.region}/s3/aws4_request"
    text = "\n".join(["AWS4-HMAC-SHA256", stamp, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    signature = hmac.new(_signing_key(access, day), text.encode(), hashlib.sha256).hexdigest()
    credential = f"{access.key_id}/{scope}"
    headers["authorization"] = f"AWS4-HMAC-SHA256 Credential={credential}, SignedHeaders={names}, Signature={signature}"
    return f"{parts.scheme}://{parts.netloc}{path}?{asked}", None, headers


def _signing_key(access: _Access, day: str) -> bytes:
    key = f"AWS4{access.secret}".encode()
    for part in (day, access.region, "s3", "aws4_request"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    return key
