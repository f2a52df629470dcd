"""The files of all machines: a directory that they mount, or a bucket."""

from __future__ import annotations

from pathlib import Path

import pytest

from rolloutd.admin.disk import CheckResult
from rolloutd.admin.doctor import _check_files, _run_check
from rolloutd.errors import InvalidFile
from rolloutd.service.preflight import find_missing_prerequisites
from rolloutd.settings import Settings, load
from tests.support.s3_server import S3Server


def write(directory: Path, files: str) -> Path:
    file = directory / "config.yaml"
    file.write_text(f"state_dir: {directory}\nfiles: {files}\n")
    return file


def test_shared_directory_has_the_files(tmp_path: Path) -> None:
    assert load(write(tmp_path, "{}")).files_dir == tmp_path
    assert load(write(tmp_path, f"{{directory: {tmp_path / 'shared'}}}")).files_dir == tmp_path / "shared"


def test_files_of_a_bucket_are_copied_here(tmp_path: Path) -> None:
    settings = load(write(tmp_path, "{s3: {bucket: fleet, credentials_file: /etc/key}}"))
    assert settings.files_dir == tmp_path
    assert settings.shared_files.is_named


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ("{directory: /srv, s3: {bucket: fleet, credentials_file: /k}}", "the files are in one place"),
        ("{s3: {bucket: fleet}}", "credentials_file"),
        ("{s3: {bucket: Fleet_1, credentials_file: /k}}", "files.s3.bucket"),
        ("{s3: {bucket: fleet, credentials_file: /k, endpoint: s3.example.com}}", "this is not a URL"),
        ("{s3: {bucket: fleet, credentials_file: /k, endpoint: 'https://a:b@s3'}}", "files.s3.endpoint"),
        ("{s3: {bucket: fleet, credentials_file: /k, prefix: ../other}}", "files.s3.prefix"),
        ("{s3: {bucket: fleet, credentials_file: /k, secret_key: x}}", "files.s3"),
    ],
)
def test_unusable_files_are_refused(tmp_path: Path, files: str, message: str) -> None:
    with pytest.raises(InvalidFile, match=message):
        load(write(tmp_path, files))


async def files_check(settings: Settings) -> CheckResult:
    return await _run_check("files", lambda: _check_files(settings))


async def test_doctor_writes_and_empties_the_bucket(tmp_path: Path, s3_server: S3Server) -> None:
    bucket = s3_server.make_bucket()
    place = (
        f"bucket: {bucket.name}, endpoint: '{bucket.endpoint}', credentials_file: {bucket.credentials_file}"
    )
    settings = load(write(tmp_path, f"{{s3: {{{place}}}}}"))
    result = await files_check(settings)
    assert (result.ok, result.text) == (
        True,
        f"bucket {bucket.name} can be written, read, listed and emptied",
    )
    assert not [path for path in bucket.directory.rglob("*") if path.is_file()]
    bucket.write_credentials(secret="wrong")
    result = await files_check(settings)
    assert not result.ok
    assert result.text == f"bucket {bucket.name}: the secret key is wrong; check `files.s3.credentials_file`"


async def test_doctor_names_shared_directory_that_is_missing(tmp_path: Path) -> None:
    result = await files_check(load(write(tmp_path, f"{{directory: {tmp_path / 'absent'}}}")))
    text = f"{tmp_path / 'absent'}: no such directory; mount it on all machines"
    assert (result.ok, result.text) == (False, text)


def test_credentials_that_others_can_read_are_named(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("[default]\n")
    key.chmod(0o644)
    settings = load(write(tmp_path, f"{{s3: {{bucket: fleet, credentials_file: {key}}}}}"))
    texts = [str(each) for each in find_missing_prerequisites(settings)]
    assert f"files.s3.credentials_file: others may read or write {key}" in "".join(texts)
