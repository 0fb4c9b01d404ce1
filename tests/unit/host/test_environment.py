"""Which directories of a caller's PATH a helper may run programs from."""

import os

import pytest

from cni_hostport.host import environment
from cni_hostport.host.environment import STANDARD_PATH


@pytest.fixture
def place(tmp_path):
    """A directory like any that root made."""
    os.chmod(tmp_path, 0o755)
    (tmp_path / "bin").mkdir(mode=0o755)
    os.chmod(tmp_path / "bin", 0o755)
    return tmp_path / "bin"


def test_roots_own_directories_stand_before_the_standard_ones(place):
    path = environment.safe_path(f"/usr/bin:{place}:{place}")
    assert path == f"{place}:{STANDARD_PATH}"


def test_one_that_others_may_write_is_left_out(place):
    os.chmod(place, 0o777)
    assert environment.safe_path(str(place)) == STANDARD_PATH


def test_one_that_a_group_may_write_is_left_out(place):
    os.chmod(place, 0o775)
    assert environment.only_root_writes(str(place))
    os.chown(place, 0, 50)
    assert not environment.only_root_writes(str(place))


def test_one_of_another_user_is_left_out(place):
    os.chown(place, 65534, 0)
    assert environment.safe_path(str(place)) == STANDARD_PATH


def test_one_inside_another_users_is_left_out(place):
    os.chown(place.parent, 65534, 0)
    assert environment.safe_path(str(place)) == STANDARD_PATH


def test_links_are_followed_before_judging(place):
    os.symlink(place, place.parent / "link")
    assert environment.only_root_writes(str(place.parent / "link"))
    os.chown(place, 65534, 0)
    assert not environment.only_root_writes(str(place.parent / "link"))


@pytest.mark.parametrize("entry", ["", ".", "bin", "/nonexistent", "/etc/passwd", "/dev/null/x"])
def test_what_is_no_absolute_directory_is_left_out(entry):
    assert environment.safe_path(entry) == STANDARD_PATH


def test_nothing_but_the_allowlist_passes():
    caller = {
        b"CNI_HOSTPORT_RUN_DIR": b"/run/x",
        b"CNI_COMMAND": b"ADD",
        b"LD_PRELOAD": b"/x",
        b"NOTIFY_SOCKET": b"/x",
        b"LANG": b"de_DE",
    }
    assert environment.clean_environment(caller) == {
        b"CNI_HOSTPORT_RUN_DIR": b"/run/x",
        b"LANG": b"C.UTF-8",
        b"PATH": STANDARD_PATH.encode(),
    }


def test_the_boot_loaders_names_are_dropped():
    environ = {b"_PYI_X": b"1", b"LD_LIBRARY_PATH_ORIG": b"", b"LD_LIBRARY_PATH": b"x", b"A": b"b"}
    environment.drop_boot_loader_names(environ)
    assert environ == {b"A": b"b"}
