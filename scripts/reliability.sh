#!/usr/bin/env bash
# Breaks things between two nodes and writes what was seen into docs/RELIABILITY.md.
set -euo pipefail

here=$(unset CDPATH && cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
project=$(dirname "$here")
rows=$project/build/tests/reliability.tsv
document=$project/docs/RELIABILITY.md

usage() {
  cat <<TXT
usage: scripts/reliability.sh [--table-only]

Runs tests/nodes.t in the lab, about eight minutes, and makes the table of docs/RELIABILITY.md from the
rows that its tests leave in build/tests/reliability.tsv.

      --table-only   from the rows of the last run
  -h, --help         this text
TXT
}

# The rows as the document's table: fault, when, reader, its seconds, server, its seconds.
table() {
  echo '| fault | when | the reader says | after | the server says | after |'
  echo '| --- | --- | --- | ---: | --- | ---: |'
  awk -F '\t' '
    function said(text) { return text == "" || text ~ /^\(/ ? text : "`" text "`" }
    function after(seconds) { return seconds == "" ? "" : seconds " s" }
    { printf "| %s | %s | %s | %s | %s | %s |\n", $1, $2, said($3), after($4), said($5), after($6) }' "$rows"
}

main() {
  case ${1:-} in
    "") "$here/test.sh" "$project/tests/nodes.t" ;;
    --table-only) [[ -s $rows ]] || { printf 'reliability.sh: no rows in build/tests: run it without --table-only\n' >&2; exit 1; } ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; exit 2 ;;
  esac
  local new
  new=$(table | awk '
    FNR == NR { table = table $0 "\n"; next }
    /^<!-- table/ { print; printf "%s", table; skip = 1; next }
    /^<!-- end/ { skip = 0 }
    !skip' - "$document")
  printf '%s\n' "$new" >"$document"
}

main "$@"
