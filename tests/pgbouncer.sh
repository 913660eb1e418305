#!/bin/sh
# Unpacks Debian's PgBouncer, and the libraries of it that are missing here, into the folder $1; needs no root.
# Without apt or a network that folder stays empty: tests/test_pooler.py is skipped then, and says so.
set -eu
mkdir -p "$1/lists/partial" "$1/cache/archives/partial"
cd "$1"
if PATH=$PATH:/usr/sbin command -v pgbouncer >/dev/null || ! command -v apt-get >/dev/null; then
    exit 0
fi
quick() {
    timeout 60 apt-get -qq -o Dir::State::Lists="$PWD/lists" -o Dir::Cache="$PWD/cache" -o Debug::NoLocking=1 \
        -o Acquire::Retries=1 -o Acquire::http::Timeout=10 "$@" >/dev/null 2>&1
}
quick update || true
if quick --yes --no-install-recommends --download-only install pgbouncer; then
    for package in cache/archives/*.deb; do
        dpkg -x "$package" .
    done
else
    echo 'PgBouncer is not to be had here: the tests behind a pooler will be skipped'
fi
rm -rf lists cache
