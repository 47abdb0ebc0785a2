#!/bin/sh
# Installs bubblewrap, in which the sandbox for programs of models runs, if this machine lacks it. Debian and Ubuntu, as root.
set -eu

command -v bwrap >/dev/null 2>&1 && exit 0
if ! command -v apt-get >/dev/null 2>&1 || [ "$(id -u)" != 0 ]; then
    echo "can't install bubblewrap: that needs apt-get and root" >&2
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends bubblewrap
