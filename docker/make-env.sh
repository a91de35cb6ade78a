#!/bin/sh
# Writes .env beside compose.yaml, with a new value for each secret that it does not hold yet, for you alone (0600).
# Run it before the first start; run again it changes nothing that is there.
#   sh docker/make-env.sh [FILE]
set -eu
umask 077
file=${1:-$(dirname "$0")/.env}
touch "$file"
chmod 600 "$file"
new=$(mktemp "$file.XXXXXX")
trap 'rm -f "$new"' EXIT
cat "$file" >"$new"
hex() {
    od -An -N32 -tx1 /dev/urandom | tr -d ' \n'
}
for name in POSTGRES_PASSWORD SALTERN_OWNER_PASSWORD SALTERN_APP_PASSWORD SALTERN_KEY_ENCRYPTION_KEY GRAFANA_PASSWORD; do
    grep -q "^$name=." "$new" || echo "$name=$(hex)" >>"$new"
done
mv "$new" "$file" # all of it or nothing
trap - EXIT
