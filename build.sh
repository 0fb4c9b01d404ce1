#!/usr/bin/env bash
# Builds, tests and shows cni-hostport from a fresh checkout on Debian or Ubuntu.
#
#   ./build.sh                     dist/cni-hostport/, the bundle
#   ./build.sh test [ARGS...]      the bundle, then every test (ARGS go to pytest)
#   ./build.sh lint                linters and types only
#   ./build.sh demo [ARGS...]      the demonstration (--client cnitool: by that client)
#   ./build.sh bench [ARGS...]     the benchmark (--quick: minutes instead of half an hour)
#   ./build.sh --launcher          the bundle with a C launcher in front of the Python plugin
#                                  (a first argument for test, demo and bench as well)
#
# Installs what is missing (packages by apt as root, Python packages into .venv) and
# nothing that is there, so that a second run is quick and needs no network. Exit
# status: that of what it ran; 2 where this machine lacks something it cannot install.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"
export PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin"

PYTHON=/usr/bin/python3
BUNDLE=dist/cni-hostport
BUILD_PACKAGES=(python3 python3-venv binutils gcc libc6-dev)
LAB_PACKAGES=(nftables iptables iproute2 conntrack containernetworking-plugins
    socat curl busybox-static procps util-linux kmod)
LAUNCHER_PACKAGES=(musl-tools)
TEST_PACKAGES=(unbound bind9-dnsutils openssl firewalld dbus python3-nftables)

say() { printf 'build.sh: %s\n' "$*" >&2; }
stop() { say "$@"; exit 2; }

is_debian() {
    [ -r /etc/os-release ] && command -v apt-get dpkg-query >/dev/null &&
        (. /etc/os-release && case " $ID ${ID_LIKE:-} " in *" debian "* | *" ubuntu "*) ;; *) exit 1 ;; esac)
}

# Installs those of the named Debian packages that are not there.
need() {
    is_debian || {
        missing_elsewhere "$@"
        return
    }
    local package missing=()
    for package in "$@"; do
        case $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true) in
        installed) ;;
        *) missing+=("$package") ;;
        esac
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    [ "$(id -u)" = 0 ] || stop "needs these packages; install them or run as root: ${missing[*]}"
    say "installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq >&2 || say "apt-get update failed; trying with the lists that are there"
    apt-get install -y -qq --no-install-recommends "${missing[@]}" >&2 </dev/null ||
        stop "apt-get could not install: ${missing[*]}"
}

missing_elsewhere() {
    stop "this is neither Debian nor Ubuntu. Needed are the equivalents of these packages," \
        "and a Debian or Ubuntu machine for this script: $*"
}

as_root() {
    [ "$(id -u)" = 0 ] || stop "'$1' makes network namespaces and rules in them: run it as root"
}

digest() { sha256sum "$@" | sha256sum | cut -d ' ' -f 1; }

# .venv with these extras of pyproject.toml, made anew only when that file changed.
environment() {
    local extras=$EXTRAS
    need "${BUILD_PACKAGES[@]}"
    local library
    library=lib$($PYTHON -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
    need "$library" "$library-dev"
    $PYTHON -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        stop "needs Python 3.11 or newer as $PYTHON"
    local wanted
    wanted=$(digest pyproject.toml && $PYTHON -c 'import sys; print(sys.version)' && pwd)
    if [ "$(cat .venv/wanted 2>/dev/null)" = "$wanted" ] && grep -qxF "$extras" .venv/extras 2>/dev/null; then
        return 0
    fi
    say "preparing .venv ($extras)"
    [ -x .venv/bin/pip ] && .venv/bin/pip --version >/dev/null 2>&1 || $PYTHON -m venv --clear .venv
    .venv/bin/python -m pip install -q --disable-pip-version-check -e ".[$extras]" >&2
    [ "$(cat .venv/wanted 2>/dev/null)" = "$wanted" ] || rm -f .venv/extras
    printf '%s\n' bundle "$extras" >>.venv/extras
    printf '%s\n' "$wanted" >.venv/wanted
}

# $1: the plugin executable, shim.py and the core of Debian's own Python in one static file.
compile_plugin() {
    local include library libraries
    {
        read -r include
        read -r library
        read -r libraries
    } < <($PYTHON -c 'import sysconfig
print(sysconfig.get_path("include"))
print("{LIBPL}/{LIBRARY}\n{LIBS} {SYSLIBS}".format_map(sysconfig.get_config_vars()))')
    mkdir -p build/plugin
    $PYTHON packaging/freeze.py cni_hostport/shim.py shim >build/plugin/frozen.h
    # the linker warns of name look-ups that a static program cannot make; a plugin makes none
    # shellcheck disable=SC2086
    gcc -O2 -Wall -Wextra -Werror -static -no-pie -s -Ibuild/plugin "-I$include" -o "$1" \
        packaging/plugin.c "$library" $libraries 2>build/plugin/log || {
        cat build/plugin/log >&2
        stop "the plugin executable could not be compiled"
    }
    chmod 755 "$1"  # whatever the umask is
}

# $1: the helper executable, which becomes the Python in the bundle; every library that one needs
# has to be there too, but for the C library's.
compile_helper() {
    local missing
    missing=$(ldd "build/dist/cni-hostport/_internal/${1##*/}" | while read -r name _; do
        case $name in linux-vdso.* | */ld-linux* | ld-linux* | libc.so.* | libm.so.*) continue ;; esac
        [ -e "build/dist/cni-hostport/_internal/$name" ] || printf ' %s' "$name"
    done)
    [ -z "$missing" ] || stop "the bundle lacks libraries of its Python:$missing"
    gcc -O2 -Wall -Wextra -Werror -static -s -o "$1" packaging/helper.c \
        "-DVERSION=\"$($PYTHON -c 'import sys; print("%d.%d" % sys.version_info[:2])')\"" ||
        stop "the helper executable could not be compiled"
    chmod 755 "$1"
}

# build/launcher: one static file of some 25 KB. One segment less to map, and none to protect
# again, is a twentieth of the CPU of its start.
compile_launcher() {
    need "${LAUNCHER_PACKAGES[@]}"
    [ ! build/launcher -nt packaging/launcher.c ] || [ ! build/launcher -nt build.sh ] || return 0
    mkdir -p build
    local compiler=gcc
    command -v musl-gcc >/dev/null && compiler=musl-gcc
    "$compiler" -O2 -Wall -Wextra -Werror -static -s -Wl,-z,norelro -Wl,-z,noseparate-code \
        -o build/launcher.new packaging/launcher.c
    mv build/launcher.new build/launcher
}

# The bundle with the launcher in front of the Python plugin, or without it.
bundle() {
    [ "$launcher" = no ] || compile_launcher
    [ ! -e "$BUNDLE/cni-hostport-python" ] || mv -f "$BUNDLE/cni-hostport-python" "$BUNDLE/cni-hostport"
    python_bundle
    if [ "$launcher" = yes ]; then
        mv "$BUNDLE/cni-hostport" "$BUNDLE/cni-hostport-python"
        install -m 755 build/launcher "$BUNDLE/cni-hostport"
    fi
}

# The bundle, built anew only when something in it changed; its timestamp is new either way.
python_bundle() {
    environment "${1:-bundle}"
    local inputs
    inputs=$(
        {
            find cni_hostport packaging LICENSE .venv/wanted build.sh \
                -type f -not -path '*/__pycache__/*' -print0 |
                sort -z | xargs -0 sha256sum
            # a mended library has to come into the bundle
            dpkg-query -W -f '${Package} ${Version}\n' gcc libc6-dev 'libpython3*'
        } | sha256sum | cut -d ' ' -f 1
    )
    if [ "$(cat build/inputs 2>/dev/null)" != "$inputs" ] || [ ! -x "$BUNDLE/cni-hostport" ]; then
        say "building $BUNDLE"
        mkdir -p build dist
        .venv/bin/pyinstaller --noconfirm --log-level ERROR --distpath build/dist \
            --workpath build/work packaging/cni-hostport.spec >&2
        compile_plugin build/dist/cni-hostport/cni-hostport
        compile_helper build/dist/cni-hostport/cni-hostport-helper
        # neither of the two needs it; PyInstaller's own executables would
        mv build/dist/cni-hostport/_internal/libpython*.so* build/work/cni-hostport/
        rm -rf build/old
        [ ! -e "$BUNDLE" ] || mv "$BUNDLE" build/old
        mv build/dist/cni-hostport "$BUNDLE"
        rm -rf build/old
        printf '%s\n' "$inputs" >build/inputs
    fi
    touch "$BUNDLE/cni-hostport" "$BUNDLE/cni-hostport-helper"
}

# One build at a time in a checkout.
alone() {
    mkdir -p build
    exec 9>build/lock
    flock 9
    "$@"
    exec 9>&-
}

lint() {
    local status=0
    .venv/bin/ruff check . || status=1
    .venv/bin/ruff format --check . || status=1
    .venv/bin/mypy || status=1
    .venv/bin/lint-imports --no-cache || status=1
    return $status
}

# What ARGS name, or everything: some files at a time, since most of a lab test is waiting,
# then those that promise a time, alone.
tests() {
    local status=0
    [ $# -eq 0 ] || exec .venv/bin/python -m pytest "$@"
    .venv/bin/python -m pytest -n "$(($(nproc) + 1))" --dist loadfile -m "not alone" || status=1
    .venv/bin/python -m pytest -m alone || status=1
    [ $status -eq 0 ] || say "tests failed, see above"
    return $status
}

launcher=no
if [ "${1:-}" = --launcher ]; then
    launcher=yes
    shift
fi
command=${1:-build}
case $command in test | lint | bench) EXTRAS=bundle,test,lint ;; *) EXTRAS=bundle ;; esac
[ $# -eq 0 ] || shift
case $command in
build)
    alone bundle
    say "$BUNDLE is ready; $BUNDLE/cni-hostport --help"
    ;;
test)
    as_root test
    need "${BUILD_PACKAGES[@]}" "${LAB_PACKAGES[@]}" "${TEST_PACKAGES[@]}"
    alone compile_launcher
    alone bundle
    tests/clients/setup.sh >&2 </dev/null
    tests "$@" </dev/null
    ;;
lint)
    alone environment
    lint
    ;;
demo)
    as_root demo
    need "${BUILD_PACKAGES[@]}" "${LAB_PACKAGES[@]}"
    alone bundle
    exec .venv/bin/python -m tests.lab.demo "$@"
    ;;
bench)
    as_root bench
    need "${BUILD_PACKAGES[@]}" "${LAB_PACKAGES[@]}"
    alone compile_launcher
    alone bundle
    tests/clients/setup.sh >&2 </dev/null || say "without the newer portmap"
    exec .venv/bin/python -m bench "$@"
    ;;
-h | --help | help)
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"
    ;;
*)
    stop "no command '$command'; ./build.sh --help lists them"
    ;;
esac
