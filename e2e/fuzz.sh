#!/bin/sh
# Runs every fuzz target of the module: fuzz.sh TIME FOLDER.
# One instrumented test binary is built per package and kept in FOLDER, with
# what the fuzzer found interesting. An input that fails is written into the
# package's testdata/fuzz, where every later test run tries it again.
set -eu
time=$1 folder=$2
mkdir -p "$folder/cache"
folder=$(cd "$folder" && pwd)
cd "$(dirname "$0")/.."
targets=0

# ended: the fuzzer stopped at its own deadline in the middle of an input and
# calls that a failure; no input failed.
ended() {
	grep -q 'context deadline exceeded' "$1" && ! grep -qE 'Failing input|panic|Error|_test.go' "$1"
}

for package in $(grep -rlE '^func Fuzz[A-Z]' --include='*_test.go' . | xargs -n1 dirname | sort -u); do
	binary=$folder/$(echo "${package#./}" | tr / -).test
	CGO_ENABLED=0 go test -c -fuzz=. -o "$binary" "$package"
	for target in $(cat "$package"/*_test.go | sed -nE 's/^func (Fuzz[A-Z][A-Za-z0-9_]*)\(.*/\1/p'); do
		log=$folder/$target.log
		if ! (cd "$package" && "$binary" -test.run='^$' -test.fuzz="^$target\$" -test.fuzztime="$time" \
			-test.parallel=2 -test.fuzzminimizetime=10x -test.fuzzcachedir="$folder/cache" >"$log" 2>&1) && ! ended "$log"; then
			cat "$log"
			echo "$package: $target FAILED"
			exit 1
		fi
		targets=$((targets + 1))
		printf '%-18s %s\n' "$target" "$(grep execs: "$log" | tail -1 | sed 's/^fuzz: //')"
	done
done
test "$targets" -gt 0
