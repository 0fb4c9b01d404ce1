#!/bin/sh
# Builds cnitool from Debian's packages and prints its path. Nothing is left in the system but
# the two packages; source, build cache and the program stay in the cache folder.
set -eu
cache=${CNI_HOSTPORT_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/cni-hostport-lab}
tool=$cache/bin/cnitool
if [ -x "$tool" ]; then
    echo "$tool"
    exit 0
fi
if ! command -v apt-get >/dev/null; then
    echo "cnitool is built from Debian's packages: this machine has no apt-get" >&2
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
lists=$cache/apt/lists
source=$cache/source
mkdir -p "$cache/bin" "$lists/partial" "$source"
{
    dpkg -s golang-go golang-github-appc-cni-dev >/dev/null 2>&1 || {
        apt-get update -qq
        apt-get install -y -qq --no-install-recommends golang-go golang-github-appc-cni-dev
    }
    # The library package lacks the command; the source package has it. The source lines are the
    # machine's own archive, in a list of their own, so that its configuration stays as it is.
    archive=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' | grep -v security | head -n 1)
    release=$(. /etc/os-release && echo "$VERSION_CODENAME")
    keys=/usr/share/keyrings/debian-archive-keyring.gpg
    echo "deb-src [signed-by=$keys] ${archive%/} $release main" >"$cache/apt/sources.list"
    private="-o Dir::Etc::sourcelist=$cache/apt/sources.list -o Dir::Etc::sourceparts=/dev/null \
        -o Dir::State::lists=$lists -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= \
        -o APT::Sandbox::User=root"
    # shellcheck disable=SC2086
    apt-get $private update -qq
    cd "$source"
    # shellcheck disable=SC2086
    apt-get $private source -qq --download-only golang-github-appc-cni
    mkdir -p cni
    tar -xf golang-github-appc-cni_*.orig.tar.* -C cni --strip-components=1
    GO111MODULE=off GOPATH=/usr/share/gocode GOCACHE=$cache/gocache CGO_ENABLED=0 \
        go build -o "$tool.new" cni/cnitool/cnitool.go
    mv "$tool.new" "$tool"
} >&2
echo "$tool"
