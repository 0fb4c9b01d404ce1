"""A wheel in an empty environment gives the same commands as the bundle."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.calls import ROOT, cni_env, run_directory

SOURCES = ("pyproject.toml", "README.md", "LICENSE", "packaging", "cni_hostport")


def run(*argv, env=None, **more):
    done = subprocess.run(
        argv, capture_output=True, text=True, check=False, timeout=300, env=env, **more
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def requirements(name):
    """Installed distributions that one needs, itself left out (no extras)."""
    found = set()
    for line in importlib.metadata.requires(name) or ():
        wanted = Requirement(line)
        if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
            found |= {wanted.name, *requirements(wanted.name)}
    return found


def copy_distribution(name, site):
    """What pip would install for it, taken from this environment: no network is needed."""
    for file in importlib.metadata.distribution(name).files or ():
        if ".." in file.parts or file.suffix == ".pyc":
            continue
        target = site / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file.locate(), target)


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """The bin folder of an environment with nothing but the wheel and what it asks for."""
    place = tmp_path_factory.mktemp("wheel")
    source = place / "source"
    source.mkdir()
    for name in SOURCES:
        path = Path(ROOT) / name
        copy = shutil.copytree if path.is_dir() else shutil.copy2
        copy(path, source / name)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
    run(*build, "--no-index", "-w", str(place), str(source))
    (wheel,) = place.glob("*.whl")
    run(sys.executable, "-m", "venv", str(place / "env"))
    (site,) = (place / "env/lib").glob("python3*/site-packages")
    for name in requirements("cni-hostport"):
        copy_distribution(name, site)
    python = str(place / "env/bin/python")
    run(python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", str(wheel))
    run(python, "-m", "pip", "check")
    return place / "env/bin"


def test_the_commands_are_there(scripts):
    program = str(scripts / "cni-hostport")
    assert run(program, "version").startswith("cni-hostport ")
    overview = run(program, "--help")
    for command in ("status", "check", "gc", "doctor", "install", "uninstall", "helper"):
        assert f"\n  {command} " in overview
        assert "usage: cni-hostport " + command in run(program, command, "--help")


def test_man_page_and_completions_come_along(scripts):
    share = scripts.parent / "share"
    assert (share / "man/man8/cni-hostport.8").is_file()
    assert (share / "bash-completion/completions/cni-hostport.bash").is_file()
    assert (share / "zsh/site-functions/_cni-hostport").is_file()


def test_it_is_a_plugin(scripts):
    with run_directory() as path:
        env = cni_env(path, "VERSION", CNI_HOSTPORT_RUN_DIR=os.fsdecode(path))
        answer = json.loads(run(str(scripts / "cni-hostport"), env=env, input=""))
    assert "1.1.0" in answer["supportedVersions"]


@pytest.mark.parametrize("agent", [True, False], ids=["node-cache", "the rest"])
def test_every_module_can_be_imported_without_the_tests_packages(scripts, agent):
    """Helper and DNS agent load prometheus_client each in its way: no process is both."""
    code = f"""
import importlib, pkgutil, cni_hostport
for module in pkgutil.walk_packages(cni_hostport.__path__, "cni_hostport."):
    if not module.name.endswith("__main__") and ("nodecache." in module.name) == {agent}:
        importlib.import_module(module.name)
        print(module.name)
"""
    found = run(str(scripts / "python"), "-I", "-c", code).split()
    wanted = {"cni_hostport.nodecache.agent"} if agent else {"cni_hostport.helper.run"}
    assert wanted <= set(found)


def test_install_links_the_command_where_there_is_no_bundle(scripts, tmp_path):
    conflist = tmp_path / "10-x.conflist"
    conflist.write_text('{"name":"x","plugins":[{"type":"bridge"},{"type":"portmap"}]}')
    options = ["--prefix", str(tmp_path / "p"), "--bin-dir", str(tmp_path / "bin")]
    options += ["--command", "", "--no-service", "--conflist", str(conflist)]
    with run_directory() as path:
        env = {"PATH": "/usr/bin", "CNI_HOSTPORT_RUN_DIR": os.fsdecode(path)}
        program = str(scripts / "cni-hostport")
        shown = run(program, "install", "--dry-run", *options, env=env)
        assert f"would link {tmp_path}/bin/cni-hostport -> {program}" in shown
        if os.geteuid() == 0:
            run(program, "install", *options, env=env)
            assert (tmp_path / "bin/cni-hostport").readlink() == Path(program)
            assert '"type":"cni-hostport"' in conflist.read_text()
            run(program, "uninstall", "--prefix", str(tmp_path / "p"), env=env)
            assert '"type":"portmap"' in conflist.read_text()
            assert not (tmp_path / "bin/cni-hostport").exists()
