#!/usr/bin/env bash
# mixed.sh COMMIT FOLDER: builds the programs of an earlier commit and lets them
# work beside those of this tree. Without the commit it says what is not tested.
set -euo pipefail
cd "$(dirname "$0")/.."
commit=$1 folder=$2
if [ -z "$commit" ] || ! git cat-file -e "$commit^{commit}" 2>/dev/null; then
  echo "EARLIER PROGRAMS NOT RUN: ${commit:-a release before this one} is not in this clone (make mixed PREVIOUS=commit)."
  echo "The recorded bus of e2e/testdata/bus stands for them, in make test."
  exit 0
fi
rm -rf "$folder"
mkdir -p "$folder/source"
git archive "$commit" | tar -x -C "$folder/source"
(cd "$folder/source" && CGO_ENABLED=0 go build -buildvcs=false -o "$folder/" ./agent/cmd/kvscout-agent ./scheduler/cmd/kvscout-scheduler)
rm -rf "$folder/source"
KVSCOUT_PREVIOUS=$folder go test -count 1 -run '^TestProgramsOfTheReleaseBefore$' -v ./e2e
