"""Compiled kernels are loaded only from files and folders that no one else could have written."""

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock import kernel_cache
from penstock.errors import BackendError
from penstock.kernel_cache import digest, distrust, read, trusted, write

SOMEONE = 4321  # a user who is not this one


pytestmark = pytest.mark.usefixtures("fresh_kernel_cache")


@pytest.fixture
def umask(request):
    before = os.umask(request.param)
    yield
    os.umask(before)


def mode(path):
    return stat.S_IMODE(path.lstat().st_mode)


def give_away(path, monkeypatch):
    """Make a file or link someone else's; without the right to do that, make this process someone else."""
    if os.geteuid() == 0:
        os.chown(path, SOMEONE, -1, follow_symlinks=False)
    else:
        me = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: me + 1)


@pytest.mark.parametrize("umask", [0o000, 0o777], indirect=True, ids="{:03o}".format)
def test_folders_and_files_are_the_users_alone_whatever_the_umask(tmp_path, umask):
    folder = trusted(tmp_path / "new" / "root", "numba/hash")
    assert folder == tmp_path / "new" / "root" / "numba" / "hash"
    assert {mode(path) for path in tmp_path.rglob("*")} == {0o700}
    write(folder / "file", b"code")
    assert mode(folder / "file") == 0o600
    assert read(folder / "file") == b"code"


@pytest.mark.parametrize("spoiled", [".", "numba", "numba/hash"])
@pytest.mark.parametrize("loose", [0o720, 0o702, 0o775, 0o777], ids="{:03o}".format)
def test_a_folder_that_others_can_write_is_replaced(tmp_path, caplog, spoiled, loose):
    root = tmp_path / "root"
    (root / "numba" / "hash").mkdir(parents=True)
    (root / spoiled).chmod(loose)
    folder = trusted(root, "numba/hash")
    assert not folder.is_relative_to(root)
    assert folder.is_dir() and distrust(folder.parent, folder) is None
    assert trusted(root, "numba/hash") == folder
    trusted(root / ".", "triton")
    messages = [record.message for record in caplog.records]
    assert messages[0].startswith(f"{root / spoiled} can be written by others (mode {loose:04o}): compiled kernels in ")
    assert str(folder.parents[1]) in messages[0]
    assert len(messages) == 1


def test_the_folder_of_a_process_goes_with_it(tmp_path):
    script = (
        "import os, sys; from pathlib import Path; from penstock.kernel_cache import trusted; os.umask(0o777);"
        "folder = trusted(Path(sys.argv[1]), 'numba'); (folder / 'file').touch(); print(folder)"
    )
    tmp_path.chmod(0o777)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, tmp_path], capture_output=True, text=True, check=False
    )
    assert done.stderr.startswith(f"{tmp_path} can be written by others") and done.stderr.count("\n") == 1
    folder = Path(done.stdout.rstrip())
    assert folder.name == "numba"
    assert not folder.parent.exists()


@pytest.mark.parametrize("part", [".", "numba", "numba/hash"])
def test_a_folder_of_someone_else_is_not_trusted(tmp_path, monkeypatch, part):
    (tmp_path / "numba" / "hash").mkdir(parents=True)
    give_away(tmp_path / part, monkeypatch)
    assert " belongs to user " in (distrust(tmp_path, tmp_path / "numba" / "hash") or "")


def test_root_may_own_what_a_user_reads(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: SOMEONE)
    assert distrust(Path("/usr/lib"), Path("/usr/lib")) is None


def test_folders_above_the_root_may_be_sticky_or_the_users_own_groups(tmp_path, monkeypatch):
    above, root = tmp_path / "above", tmp_path / "above" / "root"
    root.mkdir(parents=True)
    monkeypatch.setattr(kernel_cache, "_users_own_group", lambda gid: False)
    for allowed in (0o1777, 0o755, 0o700):
        above.chmod(allowed)
        assert distrust(root, root) is None
    for refused in (0o777, 0o770):
        above.chmod(refused)
        assert distrust(root, root) == f"{above} can be written by others (mode {refused:04o})"
    monkeypatch.setattr(kernel_cache, "_users_own_group", lambda gid: True)
    assert distrust(root, root) is None
    for refused in (0o1777, 0o770):
        root.chmod(refused)
        assert distrust(root, root) == f"{root} can be written by others (mode {refused:04o})"


@pytest.mark.parametrize(
    ("gid", "group", "members", "own"),
    [
        (7, "me", [], True),
        (7, "me", ["me"], True),
        (7, "me", ["you"], False),
        (7, "us", [], False),
        (8, "me", [], False),
    ],
)
def test_a_users_own_group_has_his_name_and_no_one_else(monkeypatch, gid, group, members, own):
    monkeypatch.setattr("pwd.getpwuid", lambda uid: SimpleNamespace(pw_gid=7, pw_name="me"))
    monkeypatch.setattr("grp.getgrgid", lambda gid: SimpleNamespace(gr_name=group, gr_mem=members))
    assert kernel_cache._users_own_group.__wrapped__(gid) is own


def test_links_to_a_folder_count_with_their_owner_and_their_end(tmp_path, monkeypatch):
    end, link = tmp_path / "end", tmp_path / "link"
    end.mkdir()
    link.symlink_to(end)
    assert distrust(link, link / "numba") is None
    end.chmod(0o777)
    assert distrust(link, link / "numba") == f"{end} can be written by others (mode 0777)"
    end.chmod(0o700)
    give_away(link, monkeypatch)
    assert " belongs to user " in (distrust(link, link / "numba") or "")


def test_a_folder_that_leads_nowhere_is_no_error(tmp_path, caplog):
    (tmp_path / "file").touch(0o600)
    (tmp_path / "loop").symlink_to("loop")
    for root in (tmp_path / "file", tmp_path / "loop", Path(os.devnull)):
        assert trusted(root, "numba") == root / "numba"
        assert read(root / "numba" / "kernel") is None
    assert not caplog.records


def test_a_folder_that_has_to_be_written_is_replaced_if_it_cannot(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(os, "access", lambda path, how: False)  # root can write everywhere
    assert trusted(tmp_path, "numba") == tmp_path / "numba"
    assert not trusted(tmp_path, "triton", to_write=True).is_relative_to(tmp_path)
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        f"{tmp_path / 'triton'} cannot be written"
    ]


def test_no_folder_at_all_is_one_line(tmp_path, monkeypatch):
    root, temporary = tmp_path / "root", tmp_path / "temporary"
    root.mkdir()
    temporary.mkdir()
    for folder in (root, temporary):
        folder.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with pytest.raises(BackendError, match=rf"^{root} can .*0777\), and {temporary} can .*: expected a folder for"):
        trusted(root)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    kernel_cache._process_folder.cache_clear()
    with pytest.raises(BackendError, match=rf"^{root} can .*0777\), and there is no folder for temporary files"):
        trusted(root)


def test_read_takes_plain_files_that_only_the_user_can_write(tmp_path, monkeypatch, caplog):
    file = tmp_path / "file"
    file.write_bytes(b"code")
    for allowed in (0o600, 0o644, 0o444):
        file.chmod(allowed)
        assert read(file) == b"code"
    assert read(tmp_path) is None
    assert read(tmp_path / "missing") is None
    os.mkfifo(tmp_path / "pipe", 0o600)
    assert read(tmp_path / "pipe") is None
    monkeypatch.setattr(kernel_cache, "LARGEST", 3)
    assert read(file) is None
    monkeypatch.undo()
    assert not caplog.records


@pytest.mark.parametrize("spoil", ["0620", "0602", "0666", "link", "someone"])
def test_read_refuses_what_others_could_have_written_and_says_it_once(tmp_path, monkeypatch, caplog, spoil):
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        file.write_bytes(b"code")
        if spoil == "link":
            file.rename(tmp_path / f"{file.name}.end")
            file.symlink_to(tmp_path / f"{file.name}.end")
        elif spoil == "someone":
            give_away(file, monkeypatch)
        else:
            file.chmod(int(spoil, 8))
    assert [read(file) for file in files] == [None, None]
    said = {"link": "is a link, expected a file", "someone": "belongs to user"}.get(spoil, f"(mode {spoil})")
    (record,) = caplog.records
    assert str(files[0]) in record.message and said in record.message


def test_write_leaves_nothing_behind_when_it_fails(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="directory"):
        write(tmp_path / "folder", b"code")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_digest_depends_on_the_whole_name_and_the_content():
    assert len({digest("a", b"bc"), digest("ab", b"c"), digest("a", b"b"), digest("b", b"bc")}) == 4


def test_a_system_without_owners_checks_none(tmp_path):
    script = (
        "import os, sys; from pathlib import Path; del os.geteuid; from penstock import kernel_cache as k;"
        "sys.modules |= {'grp': None, 'pwd': None}; root = Path(sys.argv[1]);"
        "k.write(k.trusted(root) / 'file', b'code'); (root / 'file').chmod(0o666); print(k.read(root / 'file'))"
    )
    tmp_path.chmod(0o777)
    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("b'code'\n", "")
