#!/bin/sh
# Installs the servers that some tests start by themselves, where they are missing and we may.
# Usage: sh tests/services.sh [auto|none]
set -eu
[ "${1:-auto}" = none ] && exit 0
missing=""
command -v chromium >/dev/null || missing="$missing chromium"
command -v initdb >/dev/null || ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || missing="$missing postgresql"
[ -z "$missing" ] && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing$missing"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -q >/dev/null
    # shellcheck disable=SC2086
    apt-get install -y -q --no-install-recommends $missing >/dev/null
else
    echo "tests that need them are skipped; to run them: sudo apt-get install$missing" >&2
fi
