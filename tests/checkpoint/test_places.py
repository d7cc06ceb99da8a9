"""``python -m gradscaler convert``, from and to places where files cannot be read or written."""

import errno
import json
import os
import pathlib
import stat
import subprocess
import sys
import tempfile
from contextlib import contextmanager

import pytest

from gradscaler.__main__ import main

STATE = {"loss_scale": 8.0}
ROOT = hasattr(os, "geteuid") and os.geteuid() == 0
NOBODY = 65534


@pytest.fixture
def folder():
    """A folder that any user may write to, with a file to convert."""
    with tempfile.TemporaryDirectory() as name:
        path = pathlib.Path(name)
        path.chmod(0o777)
        (path / "in.json").write_text(json.dumps(STATE))
        yield path


@pytest.fixture
def unprivileged():
    """Run the test as a user who is not root."""
    if ROOT:
        os.seteuid(NOBODY)
    yield
    if ROOT:
        os.seteuid(0)


def convert(folder, target="out.json", source="in.json"):
    return main(["convert", str(folder / source), str(folder / target), "--to", "mindspore"])


def contents(folder):
    return {path: path.is_file() and path.read_text() for path in folder.rglob("*")}


def check_failed(folder, capsys, message, **names):
    """Assert one line on stderr, status 1, and an unchanged folder."""
    before = contents(folder)
    assert convert(folder, **names) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"{folder / next(iter(names.values()), 'out.json')}: {message}\n"
    assert contents(folder) == before


def test_links_in_a_circle_are_named(folder, capsys):
    (folder / "a.json").symlink_to("b.json")
    (folder / "b.json").symlink_to("a.json")
    check_failed(folder, capsys, os.strerror(errno.ELOOP), source="a.json")
    check_failed(folder, capsys, os.strerror(errno.ELOOP), target="a.json")
    assert (folder / "a.json").is_symlink()


def test_a_link_to_a_file_that_is_not_there_yet_is_followed(folder):
    (folder / "link.json").symlink_to("new.json")
    assert convert(folder, "link.json") == 0
    assert (folder / "link.json").is_symlink()
    assert json.loads((folder / "new.json").read_text()) == {"scale_sense": 8.0}


def make_device(path):
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # as /dev/zero
    except PermissionError:
        pytest.skip("only root may make a device")


@pytest.mark.parametrize("make", [pathlib.Path.mkdir, os.mkfifo, make_device])
def test_a_folder_a_pipe_or_a_device_is_neither_read_nor_replaced(make, folder, capsys):
    path = folder / "out.json"
    make(path)
    mode = path.stat().st_mode
    check_failed(folder, capsys, "is not a file", target="out.json")
    check_failed(folder, capsys, "is not a file", source="out.json")
    assert path.stat().st_mode == mode


@pytest.mark.usefixtures("unprivileged")
def test_a_read_only_file_is_not_replaced(folder, capsys):
    (folder / "out.json").write_text("as it was")
    (folder / "out.json").chmod(0o444)
    check_failed(folder, capsys, os.strerror(errno.EACCES))


@pytest.mark.usefixtures("unprivileged")
def test_in_a_read_only_folder_nothing_is_replaced(folder, capsys):
    inner = folder / "inner"
    inner.mkdir()
    (inner / "out.json").write_text("as it was")
    inner.chmod(0o555)
    check_failed(folder, capsys, os.strerror(errno.EACCES), target="inner/out.json")
    check_failed(folder, capsys, os.strerror(errno.EACCES), target="inner/new.json")
    inner.chmod(0o777)


@pytest.mark.skipif(not ROOT, reason="only root may give a file away")
def test_a_file_keeps_its_owner_and_its_mode(folder):
    target = folder / "out.json"
    target.write_text("")
    os.chown(target, 12345, 54321)
    target.chmod(0o2640)
    before = target.stat()
    assert convert(folder) == 0
    after = target.stat()
    assert json.loads(target.read_text()) == {"scale_sense": 8.0}
    assert (after.st_uid, after.st_gid) == (12345, 54321)
    assert after.st_mode == before.st_mode


@pytest.mark.skipif(not ROOT, reason="takes a file of another user")
def test_a_file_whose_owner_cannot_be_kept_is_not_replaced(folder, capsys, request):
    target = folder / "out.json"
    target.write_text("as it was")
    target.chmod(0o666)
    request.getfixturevalue("unprivileged")
    message = "belongs to an owner or a group that a new file cannot have; delete it first"
    check_failed(folder, capsys, message)
    assert target.stat().st_uid == 0


@contextmanager
def full_disk():
    """No file may grow past ten bytes, the file that takes pytest's own output neither."""
    resource = pytest.importorskip("resource", reason="it is of Unix")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("name", ["out.json", "out.pt", "out.pdparams"])
def test_a_full_disk_leaves_the_file_as_it_was(name, folder, capsys):
    if name == "out.pt":
        pytest.importorskip("torch")
    (folder / name).write_text("as it was")
    with full_disk():
        check_failed(folder, capsys, os.strerror(errno.EFBIG), target=name)


def test_the_log_of_a_full_disk_s_test_may_be_a_file(tmp_path):
    """The limit of the test above holds for each file that pytest writes meanwhile, too."""
    test = f"{__file__}::test_a_full_disk_leaves_the_file_as_it_was[out.json]"
    with (tmp_path / "log").open("w") as log:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-s", test]
        done = subprocess.run(command, stdout=log, stderr=log, check=False)
    assert done.returncode == 0, (tmp_path / "log").read_text()
    assert "1 passed" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("name", ["os.fsync", "pathlib.Path.replace"])
@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), 1, "No space left on device"),
        (KeyboardInterrupt(), 130, None),
    ],
)
def test_a_late_failure_or_ctrl_c_leaves_the_file_as_it_was(
    name, error, status, said, folder, capsys, monkeypatch
):
    def fail(*_):
        raise error

    (folder / "out.json").write_text("as it was")
    before = contents(folder)
    monkeypatch.setattr(name, fail)
    assert convert(folder) == status
    assert capsys.readouterr() == ("", f"{folder / 'out.json'}: {said}\n" if said else "")
    assert contents(folder) == before


def test_a_name_too_long_for_a_line_leaves_room_for_the_message(folder, capsys):
    assert convert(folder, source="x" * 5000) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err) < 1000
    assert err.endswith(f"xxx: {os.strerror(errno.ENAMETOOLONG)}\n")


def test_without_stderr_nothing_is_said(folder, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    assert convert(folder, source="none.json") == 1
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("where", ["full", "closed"])
@pytest.mark.parametrize(("to", "status"), [("flax", 0), ("torch", 1)])
def test_a_stderr_that_takes_nothing_does_not_change_the_status(where, to, status, folder):
    source = folder / ("in.json" if status == 0 else "none.json")
    command = [sys.executable, "-m", "gradscaler", "convert", source, folder / "out.json"]
    if where == "full":
        error = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, error = os.pipe()
        os.close(reader)
    try:
        result = subprocess.run([*command, "--to", to, "--lossy"], stderr=error, check=False)
    finally:
        os.close(error)
    assert result.returncode == status
    assert (folder / "out.json").exists() == (status == 0)
