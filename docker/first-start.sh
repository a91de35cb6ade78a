#!/bin/sh
# Makes the API keys of a fresh deployment, each once; run again it finds them made and does nothing.
#   first-start.sh admin FILE TOKEN_FILE    redeem the bootstrap token for the first administrator's key
#   first-start.sh node  FILE NODE          make the key of one node, as that administrator
set -eu
what=$1 file=$2
if [ -s "$file" ]; then
    echo "$file is there already"
    exit 0
fi
rm -f "$file" # empty: what was to fill it was killed
case $what in
admin)
    exec saltern key redeem-bootstrap --token-file "$3" --save "$file"
    ;;
node)
    saltern key create "$3" --role node --node "$3" --save "$file" && exit 0
    # The key may be there without its file, if this was killed in between: then it gets a new secret.
    exec saltern key rotate "$3" --no-overlap --yes --save "$file"
    ;;
*)
    echo "first-start.sh: do not know how to make '$what'; say admin or node" >&2
    exit 2
    ;;
esac
