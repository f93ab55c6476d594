#!/usr/bin/env bash
# Manages a PostgreSQL server for tuning with several processes or machines. Its data is in a folder of its own.
#
#   scripts/postgres.sh start [FOLDER]   starts the server (default: logs/postgres) and prints the address for `--storage`
#   scripts/postgres.sh url [FOLDER]     prints the address again
#   scripts/postgres.sh stop [FOLDER]    stops the server; the studies are kept for the next `start`
#
# The server listens on POSTGRES_PORT (default: 5433). With POSTGRES_HOST=name, `start` also accepts connections from other machines,
# where name is the host name under which they reach this one.
# It requires the PostgreSQL server: `apt install postgresql` on Debian and Ubuntu. The service of that package is not changed.
set -euo pipefail

fail() {
    echo "$*" >&2
    exit 1
}

usage() {
    fail "usage: [POSTGRES_HOST=name] [POSTGRES_PORT=5433] $0 start|url|stop [folder]"
}

find_server() {
    command -v pg_ctl || find /usr/lib/postgresql -name pg_ctl 2>/dev/null | sort -V | tail -n 1
}

# PostgreSQL refuses to run as root; then the user that the package has created runs it.
as_owner() {
    if [ "$(id -u)" -eq 0 ]; then
        runuser -u postgres -- "$@"
    else
        "$@"
    fi
}

create() {
    mkdir -p "$folder"
    [ "$(id -u)" -ne 0 ] || chown postgres "$folder"
    if ! as_owner test -x "$folder"; then
        rmdir "$folder" || true
        fail "$(as_owner id -un) may not enter $folder: name a folder elsewhere"
    fi
    local password
    password=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
    # shellcheck disable=SC2016
    printf '%s' "$password" | as_owner sh -c 'umask 077; cat > "$0/password"' "$folder"
    as_owner "$bin/initdb" --pgdata "$folder/data" --username optuna --auth scram-sha-256 --pwfile "$folder/password" \
        > /dev/null
}

control() {
    as_owner "$bin/pg_ctl" --pgdata "$folder/data" "$@"
}

url() {
    local port
    port=$(as_owner sed -n 4p "$folder/data/postmaster.pid" 2> /dev/null) || fail "It does not run: $0 start"
    echo "postgresql+psycopg://optuna:$(as_owner cat "$folder/password")@$(as_owner cat "$folder/host"):$port/postgres"
}

start() {
    [ -f "$folder/data/PG_VERSION" ] || create
    if ! control status > /dev/null 2>&1; then
        launch
    elif [ -n "${POSTGRES_HOST:-}" ] && [ "$POSTGRES_HOST" != "$(as_owner cat "$folder/host")" ]; then
        fail "It runs already, for $(as_owner cat "$folder/host"): stop it first"
    fi
    url
}

launch() {
    local host=${POSTGRES_HOST:-localhost} listen=localhost everybody="host all all all scram-sha-256"
    if [ "$host" != localhost ]; then
        listen='*'
        as_owner grep -qx "$everybody" "$folder/data/pg_hba.conf" \
            || echo "$everybody" | as_owner tee -a "$folder/data/pg_hba.conf" > /dev/null
    fi
    echo "$host" | as_owner tee "$folder/host" > /dev/null
    control --log "$folder/server.log" --wait --silent --options "-p $port -c listen_addresses='$listen' -k ''" start \
        > /dev/null || fail "see $folder/server.log"
}

stop() {
    control --wait --silent stop
}

[ $# -ge 1 ] && [ $# -le 2 ] || usage
server=$(find_server) || true
[ -n "$server" ] || fail "There is no PostgreSQL server: apt install postgresql"
bin=$(dirname "$server")
port=${POSTGRES_PORT:-5433}
folder=$(realpath -m "${2:-logs/postgres}")
case $1 in
    start | url | stop) "$1" ;;
    *) usage ;;
esac
