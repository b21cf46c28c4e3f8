#!/usr/bin/env bash
# reproducible.sh FOLDER BUILD PACKAGE...: builds the last commit in two folders,
# the second time with nothing in the build cache, and compares the bytes.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$1 build=$2
shift 2
rm -rf "$folder"
for place in one another-place; do
  mkdir -p "$folder/$place"
  git -c advice.detachedHead=false clone --quiet --no-tags "file://$PWD" "$folder/$place/source"
  (cd "$folder/$place/source" && eval "$build -o '$folder/$place/'" "$@")
  export GOCACHE="$folder/cache"
  rm -rf "$folder/$place/source"
done
rm -rf "$folder/cache"
for program in "$folder"/one/*; do
  cmp "$program" "$folder/another-place/$(basename "$program")"
  "$program" -version
  (cd "$folder/one" && sha256sum "$(basename "$program")")
done
echo "reproducible: the same bytes twice"
